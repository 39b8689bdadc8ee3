#!/usr/bin/env bash
# Makes .venv-sglang: SGLang for a CPU, without CUDA packages, and this project. Quick when repeated. Linux only.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV_SGLANG:-.venv-sglang}
torch=2.13.0
sglang=0.5.23

stamp="$venv/.installed"
wanted=$(cat pyproject.toml scripts/setup_sglang.sh configs/serving/requirements-cpu.txt \
  sglang_dspark/serving/torchvision_shim.py | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  exit 0
fi
python=
for name in "${PYTHON:-}" python3.11 python3.12 python3; do
  if [ -n "$name" ] && "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
    python=$name
    break
  fi
done
if [ -z "$python" ]; then
  echo "Error: SGLang's pinned packages need Python 3.11 or 3.12; install one or set PYTHON." >&2
  exit 2
fi
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/pip" --disable-pip-version-check "$@"; }

# The CPU build of PyTorch: from where pip is configured to look, otherwise from where uv knows that PyTorch publishes it.
if ! "$venv/bin/python" -c "import torch; assert torch.__version__ == '$torch+cpu'" 2>/dev/null; then
  echo "Installing PyTorch $torch for the CPU into $venv"
  pip install --quiet --no-deps "torch==$torch+cpu" 2>/dev/null || {
    pip install --quiet uv
    "$venv/bin/uv" pip install --quiet --no-deps --python "$venv/bin/python" --torch-backend cpu "torch==$torch"
  }
fi
echo "Installing SGLang $sglang and what it needs into $venv (2.5 GB with PyTorch, once)"
pip install --quiet --no-deps --requirement configs/serving/requirements-cpu.txt "sglang==$sglang"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp sglang_dspark/serving/torchvision_shim.py "$site/dspark_torchvision_shim.py"
echo 'import dspark_torchvision_shim; dspark_torchvision_shim.install()' >"$site/dspark_torchvision_shim.pth"
pip install --quiet --no-deps --editable .
"$venv/bin/python" -c 'import torchvision, sglang.srt.server_args'
echo "$wanted" >"$stamp"
