#!/usr/bin/env bash
# pack.sh [FOLDER] [PYTHON]: gather what a CUDA machine without a package index lacks.
#
# Run this where there is an index and a python that has torch (the checkout's .venv, or $PYTHON_HERE). FOLDER (default:
# build/gpu-pack) then holds wheels for CPython PYTHON (default: 3.12) on x86-64 Linux, the source archive, and which
# commit and files it is. On the other machine either unpack the archive inside FOLDER, or have FOLDER below a copy of
# the checkout; then `bench/gpu/run.sh STAGE REPORTS`.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-$root/build/gpu-pack}
version=${2:-3.12}
here=${PYTHON_HERE:-$root/.venv/bin/python}
[ -x "$here" ] || here=python3
most_mib=60
torchao=torchao==0.18.0
deepspeed=$(sed -n 's/^DEEPSPEED := //p' "$root/Makefile")

rm -rf "$folder/wheels"
mkdir -p "$folder/wheels"
folder=$(cd "$folder" && pwd)
cd "$root"

download() {
  local platforms=()
  for name in manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 \
    manylinux2014_x86_64 manylinux1_x86_64; do platforms+=(--platform "$name"); done
  "$here" -m pip download --quiet --only-binary=:all: --python-version "$version" --implementation cp \
    "${platforms[@]}" --dest "$folder/wheels" "$@"
}
download aiofiles msgspec     # what this package imports and a machine with torch may lack
download hjson pydantic       # what DeepSpeed imports, with what that imports
download --no-deps "$torchao"
# Sources only, pure Python; its native parts are compiled where they are first used.
DS_BUILD_OPS=0 "$here" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder/wheels" "$deepspeed"

git rev-parse HEAD >"$folder/COMMIT"
git ls-files -z --cached --others --exclude-standard -- . ':!bench/reports' |
  xargs -0 sh -c 'for f; do [ -f "$f" ] && printf "%s\0" "$f"; done' sh >"$folder/FILES"
xargs -0 sha256sum <"$folder/FILES" >"$folder/SHA256SUMS"
git status --porcelain >"$folder/CHANGED"
tar --create --gzip --null --files-from="$folder/FILES" --transform='s,^,offload/,' --file="$folder/offload.tar.gz"
rm "$folder/FILES"

echo "commit $(cat "$folder/COMMIT")$([ -s "$folder/CHANGED" ] && echo ', with uncommitted changes')"
cd "$folder"
du --bytes --apparent-size offload.tar.gz wheels/*.whl
total=$(cat COMMIT CHANGED SHA256SUMS offload.tar.gz wheels/*.whl | wc --bytes)
echo "$((total >> 10)) KiB in $folder"
if [ "$total" -gt $((most_mib << 20)) ]; then
  echo "pack.sh: that is more than $most_mib MiB" >&2
  exit 1
fi
