#!/usr/bin/env bash
# once.sh [OUT] [OPTION...]: tell most about a GPU in nine minutes, on a machine that is bare and has no package index.
#
# Needs a python3 (or $PYTHON) with torch, pytest, scikit-build-core, nanobind, cmake and ninja; what else is missing
# comes as wheels in a folder (`pack.sh`). `once.sh --help` lists the parts; docs/gpu.md says what each decides.
exec "${PYTHON:-python3}" -P "$(dirname "$0")/once.py" "$@"
