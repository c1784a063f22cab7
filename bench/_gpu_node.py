"""A node with one H100 that is not there: what a step takes on simulated lanes, its bounds, and what each part saves.

A bound is computed from sizes and rates alone (`bench/gpu.py`, `bound_s`). Everything else is the engine's own
machine and planner; what a row changes is a constant of theirs, or a figure of the node.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

from _worker import gpu_share

import offload.predict.timing as executor
import offload.schedule.runs as runs_module
from offload.dtypes import DtypeCode
from offload.layout import MAX_TILE_BYTES, Layout, Parameter, extend_layout
from offload.plan import Budgets, GpuRates, Rates, choose_plan, choose_subgroup_numel
from offload.plan.budget import GPU_STAGING_SLOTS

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


def layout_of(sizes: Sequence[int]) -> Layout:
    """Return the layout of tensors of so many elements, as a session would have it."""
    parameters = [Parameter(f"p{n}", size, DtypeCode.BFLOAT16, 0) for n, size in enumerate(sizes)]
    return extend_layout(Layout((), ()), parameters, choose_subgroup_numel(sum(sizes)), MAX_TILE_BYTES)


def budgets_of(layout: Layout, keep_grads: bool = True) -> Budgets:
    """Return what there is where all state lies in host memory, weights and perhaps gradients on the GPU."""
    staging_bytes = GPU_STAGING_SLOTS * max(layout.subgroup_bytes)
    return Budgets(
        layout.state_bytes, gpu_staging_bytes=staging_bytes, weights_on_gpu=True, gradients_on_gpu=keep_grads
    )


def step(layout: Layout, place: Place, rates: Rates = NODE, known: Rates | None = None) -> Found:
    """Return the share that the GPU updates and what a step takes, where the planner takes the node for `known`."""
    plan = choose_plan(layout, budgets_of(layout), known or rates, place)
    return {"gpu_share": gpu_share(plan), "step_s": prediction.predict(plan, rates, steps=2, timeline=False).step_s}


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
    layout = layout_of([elements // 64] * 64)

    def bound(share: float) -> float:
        return bound_s(as_probed(), elements, share) or 0.0

    places = (
        ("all on the CPU", CPU, bound(0.0)),
        ("all on the GPU", ALL, bound(1.0)),
        ("auto", AUTO, min(bound(number / 1000) for number in range(1001))),
    )
    steps = {name: step(layout, place) | {"bound_s": least_s} for name, place, least_s in places}
    best = min((step(layout, n / parts) for n in range(parts + 1)), key=lambda row: row["step_s"])
    return {"elements": elements, "steps": steps, "best": best, "parts": list(rows_of(layout))}


def rows_of(layout: Layout) -> Iterator[Found]:
    """Yield what each part of the engine changes: a row with the step, and over that of the engine as it is."""
    as_is = {place: step(layout, place)["step_s"] for place in (CPU, AUTO)}

    def row(what: str, place: Place, *changes: Any, **options: Any) -> Found:
        with changed(*changes):
            found = step(layout, place, **options)
        name = "CPU" if place == CPU else place
        return {"what": what, "updates": name, **found, "over": found["step_s"] / as_is[place]}

    for count in (1, 2, 3, 4):
        runs = (runs_module, "RESIDENT_RUNS_IN_FLIGHT", count)
        for place in (CPU, AUTO):
            yield row(f"{count} updates in flight", place, runs)
            yield row(f"{count} updates in flight, other Python threads busy", place, runs, rates=BUSY)
    state, four = (executor.TimingExecutor, "gradient_stream", "d2h"), (executor, "FETCHED_AHEAD", 4)
    yield row("gradients fetched all at the begin", AUTO, (executor, "FETCHED_AHEAD", 1 << 30))
    yield row("gradients fetched 4 visits ahead", AUTO, four)
    yield row("gradients on the stream of state, 4 visits ahead", AUTO, state, four)
    for factor in (1, 2, 3):
        known = replace(NODE, cpu_bytes_per_s=factor * NODE.cpu_bytes_per_s, memory_bytes_per_s=float("inf"))
        yield row(f"rates of a probe that sees no contention, the CPU's {factor} times", AUTO, known=known)
