#!/usr/bin/env bash
# usage: install_dynamo.sh VENV VLLM_VENV
# Installs NVIDIA's Dynamo (frontend, mocker, library for workers) into VENV: a few seconds and 0.3 GB the first time, because it uses torch,
# vLLM, transformers and more from VLLM_VENV. Does nothing if that version is already installed.
#
# Without its declared requirements: one of them, aisimulate, is not on the index, and another (pydantic below 2.14) contradicts vLLM's.
set -euo pipefail
version=1.6.1
venv=$1
stamp=$venv/.dynamo-version

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then exit 0; fi
"$2/bin/python" -m venv --without-pip "$venv"
packages=$(echo "$venv"/lib/python3*/site-packages)
(cd "$2" && echo "$PWD"/lib/python3*/site-packages) > "$packages/vllm.pth"
cp "$(dirname "$0")/wait_asleep.pth" "$packages"
"$(dirname "$0")/uv.sh" pip install -q --python "$venv/bin/python" --no-deps "ai-dynamo==$version" "ai-dynamo-runtime==$version" \
    "redis>=6.2,<9" "zstandard>=0.23,<1" "kr8s" "pyzmq>=26"
"$venv/bin/python" -c 'from importlib.metadata import version; print("ai-dynamo", version("ai-dynamo"))'
echo "$version" > "$stamp"
