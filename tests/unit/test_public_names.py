"""Each public name lives in one place, there are few of them, and importing the package loads nothing heavy."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module

import offload

MOST_OF_ENGINE = 26


def test_every_public_name_is_there_and_documented() -> None:
    assert sorted(offload.__all__, key=lambda name: (not name.isupper(), name)) == offload.__all__
    for name in offload.__all__:
        value = getattr(offload, name)
        assert value.__doc__, name
        home = value.__module__
        assert home.startswith("offload.") or name in {"Adam", "AdamW"}, name
        assert getattr(sys.modules[home], name, value) is value, name
        assert name in dir(offload)


def test_type_checkers_are_told_of_every_public_name() -> None:
    tree = ast.parse(inspect.getsource(offload))
    told = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    imports = [(node.module, alias) for node in told if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(alias.name for _, alias in imports) == sorted(offload.__all__)
    for module, alias in imports:
        assert alias.asname == alias.name, f"{alias.name} is not exported: mypy wants it said twice"
        assert getattr(import_module(str(module)), alias.name) is getattr(offload, alias.name)


def test_an_engine_has_few_public_members() -> None:
    with offload.Engine([offload.Parameter("p", 1, offload.DtypeCode.FLOAT32, 0)]) as engine:
        members = [name for name in dir(engine) if not name.startswith("_")]
    assert len(members) <= MOST_OF_ENGINE, members


def test_import_loads_neither_torch_nor_native_code() -> None:
    script = "import offload, sys; assert 'torch' not in sys.modules; assert 'offload._native' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
