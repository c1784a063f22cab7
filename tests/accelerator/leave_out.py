"""Leaves out each call of the product that orders work on a device, one at a time, and says whether anybody notices.

    PYTHONPATH=tests python -m accelerator.leave_out [--all] [report]

The calls of `follow`, `record_use` and `record_stream` in `offload/` and `integrations/` are left out, one by one, in
all of the trainings of `workloads.py`, over the seeds, until one of them does not end as on the CPU. What is found
already is in the report, which is written after each call: run again, this goes on where it was. The report of this
tree is `left_out.json`; calls that are new, or in another function, are tried again.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REPORT = Path(__file__).with_name("left_out.json")
SEEDS = range(9)
NAMES = {"follow": 2, "record_use": 1, "record_stream": 1}
"""What is left out, with the number of arguments: other things are called the same."""

ELSEWHERE = ("offload/checkpoint/", "offload/measure/")
"""Code that is not for devices, or measures one: what its order decides, `tests/unit/test_gpu_probe.py` looks at."""

UNNOTICED: dict[str, str] = {
    "OffloadedStage3.partition_grads: "
    "parameter.grad.record_stream(torch.accelerator.current_stream(parameter.grad.device))": (
        "none of the trainings is DeepSpeed's"
    ),
    "GpuLanes.copy_in: self.device.follow(DeviceLane.H2D, last_update)": (
        "for visits that change nothing, of which a session has none on a device: the others' slots are given out "
        "again only when their copy-out has been reported, which follows the update"
    ),
    "GpuGradients._fetch_of: self.lanes.device.follow(lane, mark.on_lane())": (
        "for steps that find no room for a staging slot, which the trainings leave; the simulated device has some"
    ),
    "GpuGradients.fetch_final: self.lanes.device.follow(lane, known(mark, 'a gradient on a device has no mark'))": (
        "an update that has read a gradient too early has read another than the step finds, and is revoked"
    ),
    "GpuLanes.copy_to_device: self.device.follow(DeviceLane.H2D, self.device.mark(lane, timed=False))": (
        "who replaces state at home has its weights fetched first, behind the update"
    ),
    "GpuLanes.save: self.device.follow(DeviceLane.LEAVING, self.device.mark(DeviceLane.CALLER, timed=False))": (
        "none of the trainings has activations on paths; test_activations.py has"
    ),
    "GpuLanes.restore: self.device.follow(DeviceLane.H2D, self.device.mark(lane, timed=False))": (
        "none of the trainings has activations on paths; test_activations.py has"
    ),
    "GpuLanes.restore: self.device.follow(DeviceLane.CALLER, mark)": (
        "none of the trainings has activations on paths; test_activations.py has"
    ),
    "Overlap._copy_from_hidden: self._holder.device.record_use(copy)": (
        "the step behind keeps the copies until the next one begins, which comes behind whoever has read them"
    ),
    "PieceCopies._next_buffer: device.follow(lane, device.mark(other, timed=False))": (
        "for what an interrupt has left, which is copied again, whole, behind it"
    ),
}
"""Why nobody notices, by function and what is left out; these calls are not tried, unless `--all` says so."""

ACTIVE = "_left_out"


class Call:
    """One call."""

    def __init__(self, path: Path, function: str, node: ast.Expr) -> None:
        self.place = f"{path.relative_to(ROOT)}:{node.lineno}"
        self.key = f"{function}: {ast.unparse(node)}"
        """Which call it is, wherever it stands."""


class _Finder(ast.NodeTransformer):
    """Puts each call behind a question: whether it is the one that is left out."""

    def __init__(self, path: Path) -> None:
        self.calls: list[Call] = []
        self._path = path
        self._within: list[str] = []

    def _named(self, node: Any) -> Any:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()
        return node

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _named

    def visit_Expr(self, node: ast.Expr) -> Any:
        called = node.value
        if not isinstance(called, ast.Call) or not isinstance(called.func, ast.Attribute):
            return node
        if NAMES.get(called.func.attr) != len(called.args):
            return node
        call = Call(self._path, ".".join(self._within), node)
        self.calls.append(call)
        asked = ast.parse(f"if getattr(__import__('sys'), {ACTIVE!r}, '') != {call.place!r}: pass").body[0]
        assert isinstance(asked, ast.If)
        asked.body = [node]
        return ast.fix_missing_locations(ast.copy_location(asked, node))


def changed(path: Path) -> tuple[ast.Module, list[Call]]:
    """Return a module in which each call can be left out, and the calls."""
    finder = _Finder(path)
    tree = finder.visit(ast.parse(path.read_text(), str(path)))
    return tree, finder.calls


def calls() -> list[Call]:
    """Return all calls of the product."""
    files = sorted(path for part in ("offload", "integrations") for path in (ROOT / part).rglob("*.py"))
    return [call for path in files if _is_for_devices(path) for call in changed(path)[1]]


def _is_for_devices(path: Path) -> bool:
    return path.is_relative_to(ROOT) and not str(path.relative_to(ROOT)).startswith(ELSEWHERE)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = Path(self.get_filename(fullname)).resolve()
        if not _is_for_devices(path):
            return super().get_code(fullname)
        return compile(changed(path)[0], str(path), "exec")


class _Changing(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "offload":
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if str(spec.origin).endswith(".py"):
                    spec.loader = _Loader(fullname, spec.origin)
                return spec
        return None


def plants() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Have the product imported so that calls can be left out, and return how, by their places."""

    @contextlib.contextmanager
    def without(place: str) -> Iterator[None]:
        setattr(sys, ACTIVE, place)
        try:
            yield
        finally:
            delattr(sys, ACTIVE)

    assert "offload" not in sys.modules
    sys.meta_path.insert(0, _Changing())
    lanes = importlib.import_module("offload.device.lanes")
    assert ACTIVE in lanes.GpuLanes.enqueue_update.__code__.co_consts, (
        "calls cannot be left out: other code is imported"
    )
    return {call.place: lambda place=call.place: without(place) for call in calls()}


def main(report: Path, explained: bool) -> None:
    """Leave out each call that the report does not tell of yet; if `explained`, those that nobody notices, too."""
    from accelerator import runner

    told = json.loads(report.read_text()) if report.exists() else {}
    found: dict[str, list[Any] | None] = told.get("calls", {})
    # Trainings that found something, the last one first: together they find most.
    everything, order = calls(), told.get("workloads", [])

    def tasks() -> Iterator[runner.Task]:
        from accelerator import workloads

        for number, call in enumerate(everything):
            if call.key in found or (call.key in UNNOTICED and not explained):
                continue
            print(f"{number + 1}/{len(everything)} {call.place} {call.key}", flush=True)
            names = list(dict.fromkeys([*order, *workloads.WORKLOADS]))
            for seed in SEEDS:
                for name in names:
                    if call.key not in found:
                        yield runner.Task(call.place, name, seed)
            if call.key not in found:
                found[call.key] = None
                save()

    def save() -> None:
        report.write_text(json.dumps({"calls": found, "workloads": order}, indent=1) + "\n")

    for gone in found.keys() - {call.key for call in everything}:
        del found[gone]
    by_place = {call.place: call for call in everything}
    for outcome in runner.outcomes("accelerator.leave_out", tasks()):
        if outcome.found:
            key = by_place[outcome.task.planted].key
            found[key] = [outcome.task.workload, outcome.task.seed, outcome.found]
            if outcome.task.workload in order:
                order.remove(outcome.task.workload)
            order.insert(0, outcome.task.workload)
            save()
            print(f"  found by {outcome.task.workload}, seed {outcome.task.seed}: {outcome.found}", flush=True)
    tell(everything, found)


def tell(everything: Sequence[Call], found: dict[str, Any]) -> None:
    """Print the table, and what is missing."""
    for call in everything:
        how = found.get(call.key)
        said = f"{how[0]}, seed {how[1]}: {how[2]}" if how else f"not found: {UNNOTICED.get(call.key, 'unexplained')}"
        tried = "" if how or call.key in found else " (not tried)"
        print(f"{call.place} {call.key}\n    {said}{tried}")
    print(f"{sum(bool(found.get(call.key)) for call in everything)} of {len(everything)} are found")


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--all"]
    main(Path(given[0]) if given else REPORT, "--all" in sys.argv)
