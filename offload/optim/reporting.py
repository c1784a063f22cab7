"""Collects what `OffloadedOptimizer.report` shows; `offload.pictures` draws it."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from functools import partial

import psutil

from offload import metrics
from offload.pictures.draw import Tier
from offload.pictures.report import Lane, Report, Step
from offload.plan import Home, Plan
from offload.predict import PlanReport
from offload.predict.explanation import what_helps
from offload.session.engine import Engine

LEAST_SHARE = 0.05
"""Used share of a tier, below which a bar of the tier's size would show nothing."""


def report_of(engine: Engine, figures: Mapping[str, float], told: PlanReport) -> Report:
    """Return a page's content: the engine's plan, as `told`, and its last step, as `figures` of metrics."""
    plan = engine.plan
    number, seconds = int(figures[metrics.STEP]), (figures[metrics.STEP_S], figures[metrics.PREDICTED_STEP_S])
    steps = [Step(number, *seconds)] if number else []
    lanes = [
        Lane(
            name,
            figures.get(metrics.of(metrics.LANE_PREDICTED_S, name)),
            figures[metrics.of(metrics.LANE_BUSY_S, name)],
            int(figures[metrics.of(metrics.LANE_BYTES, name)]),
        )
        for name in filter(None, map(partial(metrics.which, metrics.LANE_BUSY_S), figures))
    ]
    return Report(
        title=f"offload: {plan.state_bytes / (1 << 30):.3g} GiB of optimizer state",
        plan=str(told),
        tiers=_tiers(plan, figures),
        steps=steps,
        lanes=lanes,
        planned_bytes=plan.host_bytes,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # of Linux, in KiB
        checkpoints=[*engine.checkpoints.kept],
        advice=what_helps(plan, engine.rates),
        notes=[],
    )


def _tiers(plan: Plan, figures: Mapping[str, float]) -> list[Tier]:
    """Return what lies in each tier: GPU memory if any, host memory, paths."""
    state, gradients, staging = plan.home_bytes[Home.HOST], plan.budgets.gradient_bytes, plan.staging_bytes
    rest = plan.host_bytes - state - gradients - staging
    host = {"state": state, "gradients": gradients, "staging": staging, "buffers and tables": rest}
    tiers = [Tier("host memory", host, _whole(plan.host_bytes, psutil.virtual_memory().total))]
    if device := plan.device_bytes:
        tiers.insert(0, Tier("GPU memory", device, None))
    for number, path in enumerate(plan.budgets.paths):
        stored = int(figures.get(metrics.of(metrics.LIVE_BYTES, number), 0))
        tiers.append(Tier(f"path {number}", {"state": stored}, _whole(stored, path.available_bytes)))
    return tiers


def _whole(used_bytes: int, nbytes: int) -> int | None:
    """Return a tier's size, to be drawn, if the used bytes can be seen beside it; else None."""
    return nbytes if used_bytes >= LEAST_SHARE * nbytes else None
