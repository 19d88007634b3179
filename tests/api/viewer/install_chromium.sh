#!/usr/bin/env bash
# Installs Debian's Chromium for the viewer's tests, if it is missing and this user may install packages.
# Without it these tests are skipped with a reason.
set -uo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then echo "chromium: there already ($(command -v "$name"))"; exit 0; fi
done
command -v apt-get >/dev/null || { echo "chromium: NOT INSTALLED, no apt-get here"; exit 0; }
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || { echo "chromium: NOT INSTALLED, only root may: apt-get install chromium"; exit 0; }
    as_root=(sudo -n)
fi
export DEBIAN_FRONTEND=noninteractive
for attempt in 1 2; do
    if "${as_root[@]}" timeout 300 apt-get update -qq >/dev/null &&
        "${as_root[@]}" timeout 600 apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; then
        echo "chromium: installed ($(command -v chromium))"
        exit 0
    fi
    echo "chromium: attempt $attempt failed"
done
echo "chromium: NOT INSTALLED"
