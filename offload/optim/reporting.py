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
from offload.units import format_bytes

LEAST_SHARE = 0.05
"""Used share of a tier, below which a bar of the tier's size would show nothing."""


def report_of(engine: Engine, figures: Mapping[str, float], plan_report: PlanReport) -> Report:
    """Return a page's content: the plan as text, from `plan_report`, and the last step, from `figures` of metrics."""
    plan = engine.plan
    step_number = int(figures[metrics.STEP])
    last_step = Step(step_number, figures[metrics.STEP_S], figures[metrics.PREDICTED_STEP_S])
    earlier_steps = [Step(number, step_s, None) for number, step_s in engine.last_step.earlier_steps]
    # The lanes of which there is a busy time; None for names of other metrics.
    lane_names = filter(None, map(partial(metrics.which, metrics.LANE_BUSY_S), figures))
    lanes = [
        Lane(
            name,
            figures.get(metrics.of(metrics.LANE_PREDICTED_S, name)),
            figures[metrics.of(metrics.LANE_BUSY_S, name)],
            int(figures[metrics.of(metrics.LANE_BYTES, name)]),
        )
        for name in lane_names
    ]
    return Report(
        title=f"offload: {format_bytes(plan.state_bytes)} of optimizer state",
        plan=str(plan_report),
        tiers=_tiers(plan, figures),
        steps=[*earlier_steps, last_step] if engine.last_step.step_s else [],  # 0 before the session's first step
        lanes=lanes,
        planned_bytes=plan.host_bytes,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # of Linux, in KiB
        checkpoints=[*engine.checkpoints.kept],
        advice=what_helps(plan, engine.rates),
        notes=[],
    )


def _tiers(plan: Plan, figures: Mapping[str, float]) -> list[Tier]:
    """Return what lies in each tier, by use: GPU memory if any, host memory, paths."""
    host = {
        "state": plan.home_bytes[Home.HOST],
        "gradients": plan.budgets.gradient_bytes,
        "staging": plan.staging_bytes,
    }
    host["buffers and tables"] = plan.host_bytes - sum(host.values())
    tiers = [Tier("host memory", host, _size_to_draw(plan.host_bytes, psutil.virtual_memory().total))]
    if plan.device_bytes:
        tiers.insert(0, Tier("GPU memory", plan.device_bytes, None))  # a plan does not know the GPU's size
    for number, path in enumerate(plan.budgets.paths):
        stored_bytes = int(figures.get(metrics.of(metrics.LIVE_BYTES, number), 0))
        size = _size_to_draw(stored_bytes, path.available_bytes)
        tiers.append(Tier(f"path {number}", {"state": stored_bytes}, size))
    return tiers


def _size_to_draw(used_bytes: int, tier_bytes: int) -> int | None:
    """Return a tier's size, for its bar to show, if the used bytes can be seen in a bar of that size; else None."""
    return tier_bytes if used_bytes >= LEAST_SHARE * tier_bytes else None
