"""A torch accelerator on the CPU, for tests: `late.py` says what it does, `csrc/` how."""
