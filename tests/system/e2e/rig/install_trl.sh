#!/usr/bin/env bash
# usage: install_trl.sh VENV VLLM_VENV PROJECT_VENV
# Installs TRL into VENV: half a minute and 0.1 GB, because it uses torch, transformers and more from the other two environments.
# Does nothing if that version is already installed.
set -euo pipefail
version=1.16.0
venv=$1
stamp=$venv/.trl-version

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then exit 0; fi
"$2/bin/python" -m venv --without-pip "$venv"
packages=$(echo "$venv"/lib/python3*/site-packages)
for other in "$2" "$3"; do (cd "$other" && echo "$PWD"/lib/python3*/site-packages); done > "$packages/others.pth"
"$venv/bin/python" -m pip --disable-pip-version-check install -q "trl==$version"
"$venv/bin/python" -c 'from importlib.metadata import version; print("trl", version("trl"))'
echo "$version" > "$stamp"
