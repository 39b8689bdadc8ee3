#!/usr/bin/env bash
# Makes .venv and installs this project into it: scripts/setup.sh [EXTRA ...]. Says what it does; quick when repeated.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$(IFS=,; echo "$*")
venv=${VENV:-.venv}

find_python() {
  local name
  for name in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  echo "Error: no Python 3.11 or newer was found; install one (Debian: apt install python3 python3-venv) or set PYTHON." >&2
  exit 2
}

# PyTorch first, and on machines without an NVIDIA GPU in its CPU build, which is a tenth of the size. pip takes that build
# where an index or folder that it is configured with has it; uv knows where PyTorch publishes it, and picks the build for
# the driver where there is a GPU. The build that pip takes by itself is the last resort.
install_torch() {
  local backend=auto version
  "$venv/bin/python" -c 'import torch' 2>/dev/null && return
  if [ "$(uname -s)" = Linux ] && ! nvidia-smi -L >/dev/null 2>&1; then
    backend=cpu
    for version in 2.14.1 2.13.0; do
      "$venv/bin/pip" install --quiet "torch==$version+cpu" 2>/dev/null && return
    done
  fi
  if [ "$(uname -s)" = Linux ]; then
    "$venv/bin/pip" install --quiet uv &&
      "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --torch-backend "$backend" "$torch" && return
    echo "The $backend build of PyTorch could not be had; installing the one that pip takes, which may be large." >&2
  fi
  "$venv/bin/pip" install --quiet "$torch"
}

stamp="$venv/.installed-${extras:-core}"
wanted=$(cat pyproject.toml scripts/setup.sh | cksum)
# What was installed with extras serves without them too.
for done in "$stamp" $([ -n "$extras" ] || ls "$venv"/.installed-* 2>/dev/null); do
  if [ -f "$done" ] && [ "$(cat "$done")" = "$wanted" ]; then
    exit 0
  fi
done
if [ ! -x "$venv/bin/pip" ]; then
  python=$(find_python)
  echo "Creating $venv with $("$python" --version)"
  "$python" -m venv "$venv" || {
    rm -rf "$venv"
    echo "Error: $python cannot make virtual environments; install its venv module (Debian: apt install python3-venv)." >&2
    exit 2
  }
fi
torch=$(sed -n 's/^ *"\(torch[><=].*\)",$/\1/p' pyproject.toml)
echo "Installing PyTorch into $venv (200 MB to 3 GB, once)"
install_torch
echo "Installing sglang-dspark${extras:+ with $extras} into $venv"
"$venv/bin/pip" install --quiet --quiet --editable ".${extras:+[$extras]}"
echo "$wanted" >"$stamp"
