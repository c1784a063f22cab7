"""Texts of all errors of the package, read from its source: every place that makes one of its error classes.

A line is a class and its message, or the arguments that its message is made of, parted by ` | `. What is known at run
time only is `{}`; a name stands for what is assigned to it in the function or the module, and a parameter for what
the module's own calls of that function pass. No file names: a text that moves stays the same. A combination that a
row of `offload.combinations` refuses is an error with what the row advises. Not here: `invariant` and `known`, which
are for our own bugs.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from string import Formatter

from offload.combinations import TABLE

FILE = "errors.txt"
ROOT = Path(__file__).parents[2]
PACKAGES = ("offload", "integrations")

HOLE = "{}"
MOST = 40
"""Texts that one place may have; more of them are as if nothing were known."""
DEPTH = 3
"""How many names, and calls, a text is followed through."""

PREFIXES = {"PathConfig": "paths[{_}]."}
"""How errors name the settings of a class: those of an entry of `paths`."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Module:
    """A file: its functions' assignments, its constants, and who calls which of its functions."""

    tree: ast.Module
    parent: dict[ast.AST, ast.AST] = field(default_factory=dict)
    calls: defaultdict[str, list[ast.Call]] = field(default_factory=lambda: defaultdict(list))
    assigned: dict[tuple[ast.AST, str], list[ast.expr]] = field(default_factory=dict)
    checks: defaultdict[str, list[ast.Call]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.nodes: list[ast.AST] = [self.tree]
        for node in self.nodes:  # which grows
            children = list(ast.iter_child_nodes(node))
            self.parent.update(dict.fromkeys(children, node))
            self.nodes += children
        for node in self.nodes:
            if isinstance(node, ast.AnnAssign) and isinstance(self.parent[node], ast.ClassDef):
                self._declared(node)
            if isinstance(node, ast.Call):
                self.calls[name_of(node.func)].append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    pairs = [(target, node.value)]
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        pairs = list(zip(target.elts, node.value.elts, strict=False))
                    for name, value in pairs:
                        if isinstance(name, ast.Name):
                            self.assigned.setdefault((self.scope(node), name.id), []).append(value)

    def _declared(self, node: ast.AnnAssign) -> None:
        """Take a setting's declaration, which names its check, as a call of the check with the setting's name."""
        name, owner = name_of(node.target), self.parent[node]
        prefix = PREFIXES.get(owner.name, "") if isinstance(owner, ast.ClassDef) else ""
        given = ast.parse(f"f'{prefix}{name}'", mode="eval").body
        for used in ast.walk(node.value or node):
            if isinstance(used, ast.Name):
                call = ast.Call(used, [given], [])
                self.checks[used.id].append(call)

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function or module that a node is in."""
        while node in self.parent:
            node = self.parent[node]
            if isinstance(node, FUNCTIONS):
                return node
        return self.tree

    def calls_of(self, function: Function) -> list[ast.Call]:
        """Return the module's calls of a function, or of a method by its own object or class; not by `super()`."""
        owner = self.parent[function]
        if not isinstance(owner, ast.ClassDef):
            calls = [call for call in self.calls.get(function.name, []) if isinstance(call.func, ast.Name)]
            return [*calls, *self.checks.get(function.name, [])]
        if function.name == "__call__":
            return self.checks.get(owner.name, [])
        by = ("self", "cls", owner.name)
        called = [(call, call.func) for call in self.calls.get(function.name, [])]
        return [call for call, found in called if isinstance(found, ast.Attribute) and name_of(found.value) in by]


def name_of(node: ast.AST) -> str:
    """Return a name without what it is an attribute of."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def parameters_of(function: Function) -> list[str]:
    """Return the names of a function's parameters, without `self` and `cls`."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def every_parameter_of(function: Function) -> list[str]:
    """Return the names of a function's parameters, with those that are given by name alone."""
    return [*parameters_of(function), *(given.arg for given in function.args.kwonlyargs)]


def argument(call: ast.Call, function: Function, name: str) -> ast.expr | None:
    """Return what a call passes for a parameter, or what that is without."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    names = parameters_of(function)
    position = names.index(name) if name in names else len(call.args)
    if any(isinstance(given, ast.Starred) for given in call.args):
        return None
    if position < len(call.args):
        return call.args[position]
    arguments = function.args
    defaults = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
    only_named = zip((given.arg for given in arguments.kwonlyargs), arguments.kw_defaults, strict=True)
    return {**defaults, **dict(only_named)}.get(name)


def texts(node: ast.expr | None, module: Module, depth: int = DEPTH, by: ast.Call | None = None) -> list[str]:
    """Return all texts that an expression may be, `HOLE` for what is not known.

    Args:
        node: The expression.
        module: Where it stands.
        depth: How many names it may be followed through.
        by: The call of its function that it is asked for; None for all.
    """
    match node:
        case ast.Constant(value=str(value)):
            return [value.replace("{", "(").replace("}", ")")]
        case ast.JoinedStr(values=parts):
            return joined([texts(part, module, depth, by) for part in parts])
        case ast.FormattedValue(value=ast.IfExp() as value):
            return texts(value, module, 0)
        case ast.FormattedValue(value=value):
            return texts(value, module, depth, by)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return joined([texts(left, module, depth, by), texts(right, module, depth, by)])
        case ast.IfExp(body=body, orelse=orelse):
            return few([*texts(body, module, depth, by), *texts(orelse, module, depth, by)])
        case ast.Name() if depth > 0:
            scope = module.scope(node)
            values: list[ast.expr | None] = [*module.assigned.get((scope, node.id), [])]
            if not values and isinstance(scope, FUNCTIONS) and node.id in every_parameter_of(scope):
                calls = [by] if by is not None else module.calls_of(scope)
                passed = [argument(call, scope, node.id) for call in calls]
                return few([text for value in passed for text in texts(value, module, depth - 1)] or [HOLE])
            values = values or [*module.assigned.get((module.tree, node.id), [None])]
            return few([text for value in values for text in texts(value, module, depth - 1, by)])
    return [HOLE]


def joined(parts: list[list[str]]) -> list[str]:
    """Return every text that is made of one of each."""
    return few("".join(chosen) for chosen in islice(product(*parts), MOST + 1))


def few(found: Iterable[str]) -> list[str]:
    """Return texts without those that are there twice, or what stands for too many."""
    one_each = sorted(set(found))
    return one_each if len(one_each) <= MOST else [HOLE]


def error_classes(modules: list[Module]) -> set[str]:
    """Return `OffloadError` and the names of all classes that derive from it."""
    found, size = {"OffloadError"}, 0
    classes = [node for module in modules for node in module.nodes if isinstance(node, ast.ClassDef)]
    while len(found) > size:
        size = len(found)
        found |= {node.name for node in classes if any(name_of(base) in found for base in node.bases)}
    return found


def lines_of(module: Module, classes: set[str]) -> Iterator[str]:
    """Yield the texts of all errors that a module makes, and of the messages that its error classes make."""
    for node in module.nodes:
        if not isinstance(node, ast.Call):
            continue
        name, arguments = name_of(node.func), [*node.args, *(keyword.value for keyword in node.keywords)]
        row: str | None = None
        keys = [""] * len(node.args) + [f"{keyword.arg}=" for keyword in node.keywords]
        if name == "__init__":  # of the class above: the message
            owner = module.parent.get(module.scope(node))
            if not (isinstance(owner, ast.ClassDef) and owner.name in classes):
                continue
            name = f"{owner.name} says"
        elif name not in classes and (row := row_of(node)) is None:
            continue
        scope = module.scope(node)
        for by in (module.calls_of(scope) if isinstance(scope, FUNCTIONS) else []) or [None]:
            given = [texts(value, module, by=by) for value in arguments]
            if row is not None:
                words = {keyword.arg: texts(keyword.value, module, by=by) for keyword in node.keywords}
                name, given, keys = "ConfigError", [*given[:2], advice(row, words)], ["", "", ""]
            parts = [
                [f"{' | ' if number else ''}{key}{text}" for text in found]
                for number, (key, found) in enumerate(zip(keys, given, strict=True))
            ]
            yield from (f"{name}: {chosen}" for chosen in joined(parts))


def row_of(call: ast.Call) -> str | None:
    """Return which row of the table a call refuses by; None if it names none."""
    refuses = isinstance(call.func, ast.Attribute) and call.func.attr in ("refuse", "check")
    owner = name_of(call.func.value) if refuses else ""
    return owner if owner in TABLE else None


def advice(row: str, words: Mapping[str | None, list[str]]) -> list[str]:
    """Return all texts of what a row advises."""
    parts: list[list[str]] = []
    for text, word, *_ in Formatter().parse(TABLE[row].advice):
        parts += [[text.replace("{", "(").replace("}", ")")], [""] if word is None else words.get(word, [HOLE])]
    return joined(parts)


def observe(folder: Path | None = None, root: Path = ROOT) -> str:
    """Return all lines, sorted."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    modules = [Module(ast.parse(file.read_text(encoding="utf-8"))) for file in files]
    classes = error_classes(modules)
    found = {line for module in modules for line in lines_of(module, classes)}
    if root == ROOT:  # rows that a function is given
        named = {row_of(node) for module in modules for node in module.nodes if isinstance(node, ast.Call)}
        found |= {f"ConfigError: {HOLE} | {HOLE} | {text}" for row in {*TABLE} - named for text in advice(row, {})}
    return "".join(f"{line}\n" for line in sorted(line.replace("\n", "\\n") for line in found))
