#!/usr/bin/env bash
# A virtual environment with torch, this package and its test tools:  setup_environment.sh [PYTHON] [VENV]
#
# torch is installed first and by itself, so that the package finds it there and nothing pulls another one in. Without a
# GPU the CPU build is enough, and 10 times smaller. Where to get it depends on the platform: some package indexes have it
# as a "+cpu" version, uv knows PyTorch's own index, and the plain wheel always works. TORCH=... asks for another version.
set -euo pipefail
python=${1:-python3}
venv=${2:-.venv}
torch=${TORCH:-torch==2.13.0}

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)

if ! "$venv/bin/python" -c "import torch" 2>/dev/null; then
  if nvidia-smi >/dev/null 2>&1 || [ "$(uname -s)" = Darwin ]; then
    "${pip[@]}" install "$torch"
  elif "${pip[@]}" install "$torch+cpu" 2>/dev/null; then
    :
  elif "${pip[@]}" install uv && "$venv/bin/uv" pip install -q --python "$venv/bin/python" --torch-backend=cpu "$torch" 2>/dev/null; then
    :
  else
    echo "no CPU build of $torch found here: installing the plain one, which may bring several GB of CUDA libraries" >&2
    "${pip[@]}" install "$torch"
  fi
fi
"${pip[@]}" install -e ".[test,lint]"
"$venv/bin/qwen-patch" doctor
