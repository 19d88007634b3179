#!/usr/bin/env bash
# usage: install_torchvision.sh FOLDER
# Unpacks torchvision into FOLDER, for the Python path of a vLLM that serves images on CPU; 8 MB. Does nothing if it is there.
#
# vLLM's multimodal models import torchvision. PyPI's build is for CUDA, and two of its files fail beside a torch for CPU: they register
# shapes and gradients of compiled operators that such a torch cannot load. vLLM uses only transforms, which are plain Python; so both
# files are emptied. (Found with torch 2.13.0, torchvision 0.28.0 and vLLM 0.32.0.)
set -euo pipefail
version=0.28.0
folder=$1
stamp=$folder/.torchvision-version

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$version" ]; then exit 0; fi
downloads=$(mktemp -d)
trap 'rm -rf "$downloads"' EXIT
"${PYTHON:-python3}" -m pip --disable-pip-version-check download -q --no-deps -d "$downloads" "torchvision==$version"
mkdir -p "$folder"
"${PYTHON:-python3}" -m zipfile -e "$downloads"/torchvision-*.whl "$folder"
for name in _meta_registrations _autograd_registrations; do : > "$folder/torchvision/$name.py"; done
echo "torchvision $version"
echo "$version" > "$stamp"
