"""A node with one H100 that is not there: what a step takes on simulated lanes, its bounds, and what each part saves.

A bound is computed from sizes and rates alone (`bench/gpu.py`, `bound_s`). Everything else is the engine's own
machine and planner; what a row changes is a constant of theirs, or a figure of the node.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

from _gpu_runs import gpu_share

import offload.plan.budget as budget
import offload.plan.planner as planner
import offload.predict.timing as executor
import offload.schedule.runs as runs_module
from offload.dtypes import DtypeCode
from offload.layout import MAX_TILE_BYTES, Layout, Parameter, extend_layout
from offload.plan import Budgets, GpuRates, Rates, choose_plan, choose_subgroup_numel
from offload.predict.streams import Order

prediction = importlib.import_module("offload.predict.predict")  # the package has a function of that name

MEMORY, LINK, GPU = 230e9, 47e9, 1.3e12
"""Bytes a second: one socket's memory, reads and writes mixed (8 channels of DDR5-4800 are 307e9); PCIe 5.0 x16 each
way while both are busy (alone: 53e9 from an H100, NVIDIA/nvbandwidth#24); state that the GPU updates (28 bytes of
3.35e12 for each 12 of state are 1.44e12)."""

CALL_S, OPERATION_S, REACTION_S = 1e-5, 1e-4, 1e-4
"""A call of the GPU's runtime, and what the engine's thread does for an operation: as in `h100-node.json`, which says
where they are from. A thread that wakes up."""

SWITCH_S = 5e-3
"""What another Python thread may keep the interpreter for: CPython's switch interval (`sys.getswitchinterval`)."""

NODE = Rates(
    MEMORY * 12 / 28,
    gpu=GpuRates(GPU, LINK, LINK, call_s=CALL_S),
    memory_bytes_per_s=MEMORY,
    reaction_s=REACTION_S,
    operation_s=OPERATION_S,
)
BUSY = replace(NODE, reaction_s=SWITCH_S)

Found = dict[str, Any]
Place = float | str
CPU, ALL, AUTO = 0.0, 1.0, "auto"


def as_probed() -> Found:
    """Return the node's rates as section a of `bench/gpu.py` names them."""
    return {
        "d2h (probe)": LINK,
        "h2d (probe)": LINK,
        "cpu update, elements/s": MEMORY / 28,
        "gpu update, elements/s": GPU / 12,
    }


@dataclass(frozen=True)
class Problem:
    """What is updated: all state lies in host memory, weights and gradients on the GPU."""

    layout: Layout
    slots: int = budget.GPU_STAGING_SLOTS
    keep_grads: bool = True

    def step(self, place: Place, rates: Rates = NODE, *, known: Rates | None = None) -> Found:
        """Return the share that the GPU updates and what a step takes.

        Args:
            place: Who updates.
            rates: What the node does.
            known: What the planner takes the node for.
        """
        budgets = Budgets(
            self.layout.state_bytes,
            gpu_staging_bytes=self.slots * max(self.layout.subgroup_bytes),
            weights_on_gpu=True,
            gradients_on_gpu=self.keep_grads,
        )
        plan = choose_plan(self.layout, budgets, known or rates, place)
        step_s = prediction.predict(plan, rates, steps=2, timeline=False).step_s
        return {"gpu_share": gpu_share(plan), "step_s": step_s}


def problem(elements: int) -> Problem:
    parameters = [Parameter(f"p{n}", elements // 64, DtypeCode.BFLOAT16, 0) for n in range(64)]
    return Problem(extend_layout(Layout((), ()), parameters, choose_subgroup_numel(elements), MAX_TILE_BYTES))


class OwnTables(executor.TimingExecutor):
    """Tables of updates have a stream of their own."""

    table_stream = "tables"


@contextlib.contextmanager
def changed(*changes: tuple[ModuleType | type, str, object]) -> Iterator[None]:
    """Give names of modules or classes other values for a while."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def node(elements: int, bound_s: Callable[[Found, int, float], float | None], parts: int) -> Found:
    """Return steps beside their bounds, the best share of all, and what each part changes.

    Args:
        elements: Parameters.
        bound_s: What a step cannot be faster than, at given rates and share.
        parts: Steps in which shares are tried.
    """
    whole = problem(elements)

    def bound(share: float) -> float:
        found = bound_s(as_probed(), elements, share)
        assert found is not None
        return found

    found: Found = {"elements": elements, "steps": {}}
    shares = [number / parts for number in range(parts + 1)]
    for name, place, least_s in (
        ("all on the CPU", CPU, bound(0.0)),
        ("all on the GPU", ALL, bound(1.0)),
        ("auto", AUTO, min(bound(number / 1000) for number in range(1001))),
    ):
        found["steps"][name] = whole.step(place) | {"bound_s": least_s}
    tried = [whole.step(share) for share in shares]
    found["best"] = min(tried, key=lambda row: row["step_s"])
    found["parts"] = list(rows_of(whole))
    return found


def rows_of(whole: Problem) -> Iterator[Found]:
    """Return what each part of the engine changes: a row with the step, and over that of the engine as it is."""
    as_is = {place: whole.step(place)["step_s"] for place in (CPU, ALL, AUTO)}

    def row(what: str, place: Place, *changes: Any, of: Problem = whole, **options: Any) -> Found:
        with changed(*changes):
            step = of.step(place, **options)
        name = {CPU: "CPU", ALL: "GPU"}.get(place, place)
        return {"what": what, "updates": name, **step, "over": step["step_s"] / as_is[place]}

    for count in (1, 2, 3, 4):
        runs = (runs_module, "RESIDENT_RUNS_IN_FLIGHT", count)
        for place in (CPU, AUTO):
            yield row(f"{count} updates in flight", place, runs)
            yield row(f"{count} updates in flight, other Python threads busy", place, runs, rates=BUSY)
    yield row("as it is, other Python threads busy", ALL, rates=BUSY)
    yield row("gradients have left in backward", CPU, of=replace(whole, keep_grads=False))
    yield row("gradients have left in backward", AUTO, of=replace(whole, keep_grads=False))
    for name, ahead in (("all at the begin", 1 << 30), ("with their visit", 1), ("4 visits ahead", 4)):
        for place in (CPU, AUTO):
            yield row(f"gradients fetched {name}", place, (executor, "BROUGHT_AHEAD", ahead))
    state = (executor.TimingExecutor, "gradient_stream", "d2h")
    yield row("gradients on the stream of state", AUTO, state)
    yield row("gradients on the stream of state, 4 visits ahead", AUTO, state, (executor, "BROUGHT_AHEAD", 4))
    for what, kind in (("", executor.TimingExecutor), ("tables on a stream of their own, ", OwnTables)):
        for order, name in ((Order.READINESS, "by readiness"), (Order.STAYS, "with their stream")):
            made = (prediction, "TimingExecutor", partial(kind, order=order))
            yield row(f"{what}copy engines go on {name}", AUTO, made)
    for slots in (1, 2, 3, 8):
        given: Sequence[Any] = [(owner, "GPU_STAGING_SLOTS", slots) for owner in (budget, planner)]
        for place in (ALL, AUTO):
            yield row(f"{slots} staging slots on the GPU", place, *given, of=replace(whole, slots=slots))
    for slots in (1, 2, 4, 8, 40):
        for place in (CPU, AUTO):
            yield row(f"{slots} weight slots", place, (budget, "WEIGHT_SLOTS", slots))
    for factor in (1, 2, 3):
        known = replace(NODE, cpu_bytes_per_s=factor * NODE.cpu_bytes_per_s, memory_bytes_per_s=float("inf"))
        what = f"rates of a probe that sees no contention, the CPU's {factor} times"
        yield row(what, AUTO, known=known)
