#!/usr/bin/env bash
# usage: install_miniswe.sh VENV
# Installs mini-swe-agent, a small real harness, into VENV; does nothing if that version is already installed.
set -euo pipefail
version=2.4.6
venv=$1
stamp=$venv/.miniswe-version

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then exit 0; fi
"${PYTHON:-python3}" -m venv --without-pip "$venv"
# litellm, through which it calls models, imports `mcp` without requiring it
"$(dirname "$0")/uv.sh" pip install -q --python "$venv/bin/python" "mini-swe-agent==$version" mcp
"$venv/bin/python" -c 'from importlib.metadata import version; print("mini-swe-agent", version("mini-swe-agent"))'
echo "$version" > "$stamp"
