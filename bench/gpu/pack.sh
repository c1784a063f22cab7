#!/usr/bin/env bash
# pack.sh FOLDER [PYTHON]: gather what a machine with torch, but without a package index, lacks for `once.sh`.
#
# Run this where there is an index, with the checkout's .venv or $PYTHON_HERE. FOLDER then holds wheels for CPython
# PYTHON (default: 3.12) on x86-64 Linux, and the commit of these sources, for a copy that has no .git.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:?pack.sh FOLDER [PYTHON]}
here=${PYTHON_HERE:-$root/.venv/bin/python}
[ -x "$here" ] || here=python3

mkdir -p "$folder"
rm -f "$folder"/*.whl
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do platforms+=(--platform "${name}_x86_64"); done
"$here" -m pip download --quiet --no-deps --only-binary=:all: --python-version "${2:-3.12}" --implementation cp \
  "${platforms[@]}" --dest "$folder" aiofiles msgspec
git -C "$root" rev-parse HEAD >"$folder/COMMIT"
du --bytes --apparent-size "$folder"/*
