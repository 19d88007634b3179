#!/usr/bin/env bash
# usage: install.sh VENV_VLLM VENV_TRAINERS VENV_AGENTS VENV_TRACKERS VENV_REPLAY
# Installs the packages that the tests of the integrations import: a minute and 2 GB the first time; does nothing
# if these versions, and what pyproject.toml lists, are already installed.
#
# VENV_TRAINERS: verl and SkyRL, on the torch of VENV_VLLM. Without their dependencies, which include CUDA builds: only
#     those that an import needs. Nothing is installed into VENV_VLLM.
# VENV_AGENTS: Harbor and verifiers, with their dependencies, on Python 3.12 or later.
# VENV_TRACKERS: Weights & Biases, MLflow and TensorBoard: the extras of tokencache.
# VENV_REPLAY: aiperf and the library of Dynamo, whose loaders read traces. Without their dependencies: only those that an import needs.
set -euo pipefail
vllm=$(cd "$1" && pwd) trainers=$2 agents=$3 trackers=$4 replay=$5
repository=$(cd "$(dirname "$0")/../.." && pwd)
uv=$repository/tests/system/e2e/rig/uv.sh
trainer_packages="verl==0.9.1 skyrl==0.3.0 skyrl-gym==0.4.0"
agent_packages="harbor==0.25.0 verifiers==0.4.0"
tracker_packages="wandb==0.31.0 mlflow-skinny==3.17.2 tensorboard==2.21.0"
replay_packages="aiperf==0.13.0 ai-dynamo-runtime==1.6.1"
tests="pytest pytest-asyncio hypothesis openai"
python=${PYTHON:-python3}

listed=$(sha256sum <"$repository/pyproject.toml")

installed() { [ -f "$1/.installed" ] && [ "$(cat "$1/.installed")" = "$2 $listed" ]; }

if ! installed "$trainers" "$trainer_packages"; then
    "$vllm/bin/python" -m venv --without-pip "$trainers"
    site=$("$trainers/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/vllm.pth"
    # shellcheck disable=SC2086 # several packages
    "$uv" pip install -q --python "$trainers/bin/python" --no-deps $trainer_packages "tensordict>=0.8.0,<=0.10.0" \
        ray hydra-core omegaconf "antlr4-python3-runtime==4.9.3" codetiming torchdata TransferQueue accelerate peft datasets pandas \
        pyarrow msgpack pyvers orjson cloudpickle importlib_metadata zipp multiprocess dill xxhash python-dateutil click jaxtyping \
        wadler-lindig cloudpathlib
    # shellcheck disable=SC2086
    "$uv" pip install -q --python "$trainers/bin/python" -e "$repository[testing]" $tests
    echo "$trainer_packages $listed" > "$trainers/.installed"
fi

if ! installed "$agents" "$agent_packages"; then
    # uv downloads a Python if none of these is new enough
    newer=3.12
    for candidate in "$python" python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then newer=$candidate && break; fi
    done
    "$uv" venv -q --clear --python "$newer" "$agents"
    # An index may not have the newest certifi yet, of which Harbor requires the latest release.
    # shellcheck disable=SC2086
    "$uv" pip install -q --python "$agents/bin/python" --override <(echo certifi) \
        -e "$repository[testing]" $agent_packages $tests
    echo "$agent_packages $listed" > "$agents/.installed"
fi

if ! installed "$trackers" "$tracker_packages"; then
    "$uv" venv -q --clear --python "$python" "$trackers"
    # shellcheck disable=SC2086
    "$uv" pip install -q --python "$trackers/bin/python" -e "$repository[testing,wandb,mlflow,tensorboard]" $tracker_packages $tests
    echo "$tracker_packages $listed" > "$trackers/.installed"
fi

if ! installed "$replay" "$replay_packages"; then
    "$uv" venv -q --clear --python "$python" "$replay"
    # shellcheck disable=SC2086
    "$uv" pip install -q --python "$replay/bin/python" --no-deps $replay_packages
    # shellcheck disable=SC2086
    "$uv" pip install -q --python "$replay/bin/python" -e "$repository[testing]" $tests \
        "pydantic<2.14" pydantic-settings ruamel.yaml orjson jinja2 pyyaml cyclopts numpy aiofiles psutil pillow ffmpeg-python
    echo "$replay_packages $listed" > "$replay/.installed"
fi
