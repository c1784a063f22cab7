"""Each public name lives in one place, and importing the package loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import offload


def test_every_public_name_is_there_and_documented() -> None:
    assert sorted(offload.__all__, key=lambda name: (not name.isupper(), name)) == offload.__all__
    for name in offload.__all__:
        value = getattr(offload, name)
        assert value.__doc__, name
        home = value.__module__
        assert home.startswith("offload.") or name in {"Adam", "AdamW"}, name
        assert getattr(sys.modules[home], name, value) is value, name
        assert name in dir(offload)


def test_import_loads_neither_torch_nor_native_code() -> None:
    script = "import offload, sys; assert 'torch' not in sys.modules; assert 'offload._native' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
