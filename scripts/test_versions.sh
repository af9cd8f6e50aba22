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
python=$folder/env/bin/python
pip=("$python" -m pip --disable-pip-version-check -q install)
"${pip[@]}" uv
# What pyproject.toml asks for, to test and to build, beside the versions given.
mapfile -t packages < <("$python" -c 'import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
needed = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["test"]
print(*needed, sep="\n")')
# uv brings several GB in half a minute, pip in four; pip finds its way through more kinds of set-up.
"$folder/env/bin/uv" pip install -q --system-certs --python "$python" "${versions[@]}" "${packages[@]}" ||
  "${pip[@]}" "${versions[@]}" "${packages[@]}"
echo "== ${versions[*]} =="
PYTHONPATH=. "$python" -m pytest -n auto "$@"
rm -rf "$folder"
