"""Which layer may import which, by reading the sources; imports for types count too."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "offload"

# Higher first. A module imports its own layer's package and what is in a lower row; names in one row are
# siblings that do not import each other, but for those that SIBLINGS allows.
ROWS: list[tuple[str, ...]] = [
    ("cli", "integrations"),
    ("weights",),
    ("optim",),
    ("session",),
    ("world",),  # of the tests
    ("predict", "checkpoint", "measure", "pictures"),
    ("gradients", "config"),
    ("engine",),
    ("device",),
    ("schedule", "memory", "weights.mapping"),
    ("plan", "tiers", "kernels"),
    ("layout",),
    ("formats",),
    ("rules",),
    ("protocols", "backends", "limits", "combinations", "metrics"),
    ("errors", "waits", "dtypes", "processes"),
    ("units",),
]
LEVEL = {layer: row for row, layers in enumerate(ROWS) for layer in layers}
SIBLINGS = {
    ("cli", "integrations"),
}
PUBLIC = (
    "offload",
    "offload.checkpoint.marker",
    "offload.checkpoint.torch_files",
    "offload.combinations",
    "offload.optim.hiding",
    "offload.optim.exchange",
    "offload.optim.figures",
    "offload.optim.folders",
    "offload.optim.frozen",
    "offload.optim.optimizer",
    "offload.optim.overlap",
    "offload.optim.pace",
    "offload.optim.preemption",
    "offload.optim.ranks",
    "offload.rules",
    "offload.weights.partitions",
)
NATIVE_USERS = {"tiers", "kernels", "engine", "session", "measure", "optim", "cli", "checkpoint"}
SCHEDULE = ("operations", "machine", "staging", "runs", "saving", "index", "issued", "scratch")
PURE = ["plan", *(f"schedule/{name}.py" for name in SCHEDULE), "layout.py"]
PURE_MAY_IMPORT = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "fnmatch",
    "functools",
    "heapq",
    "itertools",
    "math",
    "typing",
}


parsed = functools.cache(ast.parse)


def imported(tree: ast.AST) -> set[str]:
    """Return the absolute names that a module imports, at any depth; relative imports as "."."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                names.add(".")
            else:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer_of(name: str) -> str | None:
    """Return the layer of a dotted name below `offload`; None for what is not in one."""
    parts = name.split(".")[1:]
    for depth in (2, 1):
        if len(parts) >= depth and ".".join(parts[:depth]) in LEVEL:
            return ".".join(parts[:depth])
    return None


def violations(module: str, source: str) -> list[str]:
    """Return what a module of that dotted name must not import but does."""
    own = layer_of(module)
    wrong = []
    for name in sorted(imported(parsed(source))):
        if name == ".":
            wrong.append(f"{module} imports relatively")
        if name.split(".")[0] != "offload" or own is None:
            continue
        other = layer_of(name)
        if own == "integrations":
            home = name.rpartition(".")[0] or name
            public = other == "integrations" or (home in PUBLIC and layer_of(home) == other and "._" not in name)
            if not public:
                wrong.append(f"{module} imports {name}, which is not a public name")
        elif name.startswith("offload._native"):
            if own not in NATIVE_USERS:
                wrong.append(f"{module} imports native code")
        elif other is None:
            if own != "cli":
                wrong.append(f"{module} imports {name} from the top")
        elif other != own and LEVEL[other] <= LEVEL[own] and (own, other) not in SIBLINGS:
            wrong.append(f"{module} imports {name}: {own} may not import {other}")
    return wrong


@functools.cache
def sources() -> list[tuple[str, str]]:
    found = []
    for folder, prefix in (
        (PACKAGE, "offload"),
        (ROOT / "integrations", "offload.integrations"),
        (ROOT / "tests" / "world", "offload.world"),
    ):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found.append((".".join((prefix, *parts)).removesuffix(".__init__"), path.read_text()))
    return found


def test_layers_are_kept():
    modules = sources()
    assert len(modules) > 10
    assert not [line for module, source in modules for line in violations(module, source)]


def circle(modules: Mapping[str, str]) -> list[str]:
    """Return modules of which each is imported by the one behind it, and the first by the last; none if none do so.

    Imports for types and those in functions count, too; that of the package itself, whose face has all public names,
    does not.
    """
    others = modules.keys() - {"offload"}
    graph = {}
    for module, source in modules.items():
        names = imported(parsed(source))
        graph[module] = {name if name in others else name.rpartition(".")[0] for name in names} & others - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other():
    found = circle(dict(sources()))
    assert found == []
    above, late = "from offload.plan import homes", "def late():\n    from offload.plan.cost import estimate"
    assert not circle({"offload.plan.cost": above, "offload.plan.homes": "import offload"})
    assert circle({"offload.plan.cost": above, "offload.plan.homes": late})


def test_every_module_is_in_a_layer():
    outside = [module for module, _ in sources() if layer_of(module) is None]
    assert set(outside) <= {"offload", "offload.__main__", "offload._version"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("offload.plan.homes", "from offload.tiers.file import FileTier"),
        ("offload.tiers.file", "from offload.plan import Plan"),
        (
            "offload.schedule.machine",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from offload import predict",
        ),
        ("offload.world.executor", "def late():\n    from offload.session.engine import Engine"),
        ("offload.checkpoint.saves", "from offload.session.parts import SessionParts"),
        ("offload.measure.probe", "from offload.checkpoint.stores import Pin"),
        ("offload.errors", "from offload.protocols import TileId"),
        ("offload.layout", "from . import errors"),
        ("offload.plan", "from offload._native import queue"),
        ("offload.integrations.deepspeed", "from offload.session.engine import Engine"),
        ("offload.integrations.deepspeed", "from offload.rules.adam import scalars"),
    ],
)
def test_what_is_forbidden_is_seen(module: str, source: str):
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("offload.session.engine", "from offload.schedule.machine import Machine\nfrom offload.measure import probe"),
        ("offload.world.executor", "from offload.schedule.machine import Run\nfrom offload.plan import Plan"),
        ("offload.integrations.deepspeed", "import offload\nfrom offload import AdamW, errors_of"),
        ("offload.integrations.deepspeed", "from offload.rules import GroupScalars"),
        ("offload.integrations.deepspeed", "from offload.integrations.shared import x"),
        (
            "offload.tiers.file",
            "import os\nfrom offload._native import FileTier\nfrom offload.errors import TierError",
        ),
    ],
)
def test_what_is_allowed_is_let_pass(module: str, source: str):
    assert not violations(module, source)


def test_deciding_code_cannot_observe_the_world():
    """No clock, no I/O, no threads, no randomness: nothing but these modules and the layers below."""
    for where in PURE:
        path = PACKAGE / where
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            tree = parsed(file.read_text())
            tops = {name.split(".")[0] for name in imported(tree)} - {"offload"}
            assert tops <= PURE_MAY_IMPORT, f"{file.name} imports {sorted(tops - PURE_MAY_IMPORT)}"
            calls = {
                node.func.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            seen = calls & {"open", "print", "input", "exec", "eval", "__import__", "id", "hash"}
            assert not seen, f"{file.name} calls {sorted(seen)}"


def test_no_assert_in_the_package():
    for module, source in sources():
        if layer_of(module) == "world":
            continue  # of the tests
        asserts = [node.lineno for node in ast.walk(parsed(source)) if isinstance(node, ast.Assert)]
        assert not asserts, f"{module} asserts in lines {asserts}; use offload.errors.invariant"
