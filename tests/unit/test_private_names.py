"""How many private names of the package tests reach for: what they reach for cannot change without them.

Counted are distinct names, not places: one name that ten tests use is one thing that has to stay. `self._x` counts in
a class that inherits `_x` from the package.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(r"_[A-Za-z]\w*")
WORD, INHERITS = re.compile(r"\b_[A-Za-z]\w*"), re.compile(r"^ *class \w+\(", re.MULTILINE)
ATTRIBUTE = re.compile(r"(?<=[\w\])]\.)_[A-Za-z]\w*")
OTHERS = {
    "_configure_optimizer",  # DeepSpeed's
    "_fields",  # of named tuples
    "_from_json",  # pytest's
    "_get_compact_grad_partition_slice",  # DeepSpeed's
    "_loads",  # of pickle
    "_local_tensor",  # of torch
    "_make",  # of named tuples
    "_native",  # the module
    "_optimizer_step",  # DeepSpeed's
    "_post_step",  # DeepSpeed's
    "_replace",  # of named tuples
    "_update_model_bit16_weights",  # DeepSpeed's
}
MOST = 48


def sources(*folders: str, names: set[str] | None = None) -> dict[Path, list[ast.AST]]:
    """Return modules of folders, each as all of its nodes: those alone that say one of these names, or inherit."""
    files = [path for name in folders for path in sorted((ROOT / name).rglob("*.py"))]
    texts = {path: path.read_text() for path in files}
    if names is not None:
        texts = {path: text for path, text in texts.items() if INHERITS.search(text) or names & {*WORD.findall(text)}}
    return {path: [*ast.walk(ast.parse(text))] for path, text in texts.items()}


def given(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the private names that something gives: of functions, classes, variables, and what is its own."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return {name for name in names if PRIVATE.fullmatch(name)}


def is_self(node: ast.AST) -> bool:
    """Return whether that is what a method is called on."""
    return isinstance(node, ast.Name) and node.id == "self"


class Classes:
    """Classes of the package and of its tests, by their names."""

    def __init__(self, package: dict[Path, list[ast.AST]], tests: dict[Path, list[ast.AST]]) -> None:
        self.own: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, set[str]] = defaultdict(set)
        for nodes in (*package.values(), *tests.values()):
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    self.bases[node.name] |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
        for nodes in package.values():
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    self.own[node.name] |= given(ast.walk(node))

    def inherited(self, name: str) -> set[str]:
        """Return the private names that a class has of the package."""
        return self.own[name].union(*(self.inherited(base) for base in self.bases[name] - {name}))


def reached(nodes: list[ast.AST], package: set[str], classes: Classes) -> Iterator[tuple[str, int]]:
    """Return the private names of the package that a test reaches for, with the lines."""
    inside: dict[ast.AST, set[str]] = {}  # what a class has of the package, for all that is in it
    own: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            names, parts = classes.inherited(node.name), [*ast.walk(node)]
            inside |= dict.fromkeys(parts, names)
            own |= given(parts) - names
    formatted = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        found: list[str] = []
        if isinstance(node, ast.Attribute):
            ours = inside[node] if is_self(node.value) and node in inside else package - own
            found = [node.attr] if node.attr in ours else []
        elif isinstance(node, ast.FunctionDef):
            found = [node.name] if node.name in inside.get(node, ()) else []  # overridden
        elif isinstance(node, ast.ImportFrom):
            found = [name for alias in node.names for name in (alias.name,) if name in package]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in formatted:
            named = node.value.split(".") if re.fullmatch(r"[\w.]+", node.value) else ATTRIBUTE.findall(node.value)
            found = [name for name in named if name in package]  # patched, or asked for by its name; or in a script
        yield from ((name, node.lineno) for name in found if name not in OTHERS)


@pytest.mark.slow
def test_tests_reach_for_few_private_names() -> None:
    package = sources("offload", "integrations")
    names = set().union(*map(given, package.values()))
    tests = sources("tests", names=names)
    classes = Classes(package, tests)
    places: dict[str, list[str]] = defaultdict(list)
    for path, nodes in tests.items():
        for name, line in reached(nodes, names, classes):
            places[name].append(f"{path.relative_to(ROOT)}:{line}")
    for name, where in sorted(places.items()):
        print(f"{name}: {', '.join(where)}")
    assert len(places) <= MOST, f"{len(places)} private names: {sorted(places)}"
