#!/usr/bin/env bash
# The test suite under other versions, with the libraries that are built in this tree:
#   test_versions.sh FOLDER "torch==2.10.0 transformers==5.17.0" [pytest arguments]
# FOLDER gets the virtual environment, some 6 GB where no CPU build of that torch is on the package index.
set -euo pipefail
folder=$1
read -ra versions <<<"$2"
shift 2
cd "$(dirname "$0")/.."
python3 -m venv "$folder/env"
pip=("$folder/env/bin/python" -m pip --disable-pip-version-check -q install)
packages=("${versions[@]}" numpy packaging accelerate matplotlib rich typer setuptools wheel
  pytest pytest-xdist hypothesis parameterized peft hqq)
# uv brings several GB in half a minute, pip in four; pip finds its way through more kinds of set-up.
"${pip[@]}" uv
"$folder/env/bin/uv" pip install -q --system-certs --python "$folder/env/bin/python" "${packages[@]}" ||
  "${pip[@]}" "${packages[@]}"
echo "== ${versions[*]} =="
PYTHONPATH=. "$folder/env/bin/python" -m pytest -n auto "$@"
rm -rf "$folder"
