#!/usr/bin/env bash
# run.sh STAGE FOLDER [OPTION...]: build here, without an index, run one stage, leave a dated report in FOLDER.
#
# STAGE is check, rates, train or micro; `run.sh --help` says what each does. Needs a python3 (or $PYTHON) with torch,
# pytest, scikit-build-core, nanobind, cmake and ninja. What `pack.sh` gathered is looked for in $OFFLOAD_PACK, in
# build/gpu-pack, and around this copy of the sources.
exec "${PYTHON:-python3}" -P "$(dirname "$0")/stages.py" "$@"
