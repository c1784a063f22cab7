"""No GPU is an object (`NO_GPU`, `NoDevice`, `Lanes`), chosen once: few places ask whether there is one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from offload.plan import NO_GPU, GpuRates, Rates

ROOT = Path(__file__).parents[2]
MOST = 9
"""And one more in `offload/backends.py`, see `NAMED`."""

ASKED = ("gpu", "gpu_rates", "lanes", "device")
"""What a GPU is called, without leading underscores."""

NONE = ("NO_GPU", "NO_LANES", "NoDevice", "GpuLanes", "GpuRates", "GpuProbe")
"""Objects and classes that tell whether there is one."""

NAMED = ("offload/backends.py", "offload/kernels/", "offload/tiers/")
"""Where a device is one that somebody names, or a disk. `accelerator` in the first asks whether torch sees any."""

EXAMPLE = """
if rates.gpu is None: ...
x = 1 if self._gpu is not None else 2
while rates.gpu.lanes and True: ...
y = rates.gpu or NO_GPU
assert not x or plan.lanes.gpu
z = [a for a in b if rates.gpu != NO_GPU]
if isinstance(device, NoDevice): ...
name = machine["gpu"] or "none"
if "d2h" in lanes: ...
"""
OTHERS = """
if run.visit.gpu: ...
if placement in ("auto", "gpu"): ...
if run.through is None: ...
found = on_gpu and keeps
for lane in rates.gpu.lanes: ...
if plan.weights_on_gpu: ...
"""


def operands(test: ast.expr) -> Iterator[ast.expr]:
    """Yield what decides a condition."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from operands(value)
    elif isinstance(test, ast.UnaryOp):
        yield from operands(test.operand)
    else:
        yield test


def is_gpu(node: ast.expr) -> bool:
    """Return whether an expression may be a GPU, its rates, its lanes, or none."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "gpu"
    if isinstance(node, ast.Attribute) and node.attr == "gpu":
        return getattr(node.value, "attr", getattr(node.value, "id", "")) != "visit"
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_") in ASKED


def is_true_of_one(node: ast.expr) -> bool:
    """Return whether an expression, as a condition, asks whether there is a GPU."""
    if isinstance(node, ast.Attribute) and node.attr == "lanes":
        return isinstance(node.value, ast.Attribute) and node.value.attr == "gpu"
    return isinstance(node, ast.Attribute | ast.Subscript) and is_gpu(node)


def names_of(node: ast.AST) -> set[str]:
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def questions(source: str) -> Iterator[tuple[int, str]]:
    """Yield lines and texts of expressions that ask whether there is a GPU."""
    for node in ast.walk(ast.parse(source)):
        asks: list[ast.expr] = []
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.Assert(test=test):
                asks = [value for value in operands(test) if is_true_of_one(value)]
            case ast.comprehension(ifs=ifs):
                asks = [value for value in chain.from_iterable(map(operands, ifs)) if is_true_of_one(value)]
            case ast.BoolOp(op=ast.Or(), values=[first, *_]) if is_gpu(first):
                asks = [first]
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                asks = [node] if is_gpu(left) or ast.unparse(left) == "there" else []  # torch's accelerator
            case ast.Compare(left=ast.Constant(value="gpu" | "h2d" | "d2h"), ops=[ast.In() | ast.NotIn()]):
                asks = [node]
            case ast.Compare() if names_of(node) & {*NONE}:
                asks = [node]
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]) if names_of(kind) & {*NONE}:
                asks = [node]
        yield from ((ask.lineno, ast.unparse(ask)) for ask in asks)


def test_few_places_ask_whether_there_is_a_gpu() -> None:
    files = [file for package in ("offload", "integrations") for file in sorted((ROOT / package).rglob("*.py"))]
    names = [name for file in files if not (name := str(file.relative_to(ROOT))).startswith(NAMED)]
    found = [f"{name}:{line}: {text}" for name in names for line, text in questions((ROOT / name).read_text())]
    assert found, "no question was found"
    assert len(found) <= MOST, "\n".join(found)


def test_questions_are_found() -> None:
    assert {line for line, _ in questions(EXAMPLE)} == set(range(2, 11))
    assert list(questions(OTHERS)) == []


def test_rates_of_no_gpu_are_in_no_file() -> None:
    rates = Rates(1e9)
    assert rates.gpu == NO_GPU
    assert "gpu" not in rates.to_dict()
    assert Rates.from_dict(rates.to_dict()) == Rates.from_dict({**rates.to_dict(), "gpu": None}) == rates
    assert not rates.shared_by(4).gpu.lanes


@pytest.mark.parametrize("cost", [0.0, 1.0])
def test_a_gpu_is_another_than_none_whatever_its_rates(cost: float) -> None:
    numbers = NO_GPU.update_bytes_per_s, NO_GPU.h2d_bytes_per_s, NO_GPU.d2h_bytes_per_s
    rates = Rates(1e9, gpu=replace(GpuRates(*numbers), memory_cost=cost))
    assert rates.gpu != NO_GPU
    assert Rates.from_dict(rates.to_dict()) == rates
    assert rates.gpu.reaching({"gpu": 1.0, "h2d": 2.0, "d2h": 3.0}) == GpuRates(1.0, 2.0, 3.0, memory_cost=cost)
    assert list(rates.gpu.lanes) == ["gpu", "h2d", "d2h"]
