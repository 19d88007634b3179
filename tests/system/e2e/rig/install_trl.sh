#!/usr/bin/env bash
# usage: install_trl.sh VENV VLLM_VENV PROJECT_VENV
# Installs TRL and OpenEnv into VENV: half a minute and 0.3 GB, because they use torch, transformers and more from the other two environments.
# Does nothing if these versions are already installed.
set -euo pipefail
packages="trl==1.16.0 openenv==0.10.0"
venv=$1
stamp=$venv/.trl-version

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$packages" ]; then exit 0; fi
"$2/bin/python" -m venv --without-pip "$venv"
site=$(echo "$venv"/lib/python3*/site-packages)
for other in "$2" "$3"; do (cd "$other" && echo "$PWD"/lib/python3*/site-packages); done > "$site/others.pth"
# shellcheck disable=SC2086 # two packages
"$venv/bin/python" -m pip --disable-pip-version-check install -q $packages
echo "$packages" > "$stamp"
