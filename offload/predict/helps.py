"""What would make a session's step shorter, by the closed form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from offload.errors import ConfigError, InfeasiblePlanError
from offload.plan.budget import Home, PathBudget, Plan
from offload.plan.cost import estimate
from offload.plan.planner import choose_plan
from offload.plan.rates import Rates
from offload.units import format_bytes

HOST_SHARE = 0.25
"""Part of its state by which a session's host memory is raised, to see what that would bring."""
LEAST_SAVED = 0.01
"""Part of a step below which nothing is said to help."""


def what_helps(plan: Plan, rates: Rates) -> list[tuple[str, float]]:
    """Return what would make a step shorter, and by how many seconds, most first.

    Args:
        plan: What lives where.
        rates: Speed of every lane; one entry for each path of the plan.
    """
    now_s = estimate(plan, rates).step_s
    found = []
    for what, other, faster in _changes(plan, rates):
        saved_s = now_s - estimate(other, faster).step_s
        if saved_s > LEAST_SAVED * now_s:
            found.append((what, saved_s))
    return sorted(found, key=lambda item: -item[1])


def _changes(plan: Plan, rates: Rates) -> Iterator[tuple[str, Plan, Rates]]:
    budgets, placement = plan.budgets, "auto" if plan.uses_gpu else "cpu"
    streamed_bytes = plan.home_bytes[Home.STREAMED]
    if streamed_bytes:
        more = min(streamed_bytes, int(HOST_SHARE * plan.state_bytes))
        roomy = budgets.with_more_host(more)
        # What a session has been given by hand need not be what the planner takes.
        with contextlib.suppress(ConfigError, InfeasiblePlanError):
            yield f"host_memory +{format_bytes(more)}", choose_plan(plan.layout, roomy, rates, placement), rates
        if rates.paths:
            best = max(rates.paths, key=lambda path: path.each_way_bytes_per_s)
            wider = replace(rates, paths=(*rates.paths, best))
            one_more = replace(budgets, paths=(*budgets.paths, PathBudget("one more", 1 << 60)))
            yield "one more path like the fastest", replace(plan, budgets=one_more), wider
    cpu = replace(rates, cpu_bytes_per_s=2 * rates.cpu_bytes_per_s, memory_bytes_per_s=2 * rates.memory_bytes_per_s)
    yield "CPU and memory twice as fast", plan, cpu
    if plan.uses_gpu:
        gpu = rates.gpu
        faster = gpu.times(2)
        yield "a link to the GPU twice as fast", plan, replace(rates, gpu=faster)
