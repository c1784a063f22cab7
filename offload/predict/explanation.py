"""What a step was predicted to take beside what it took, lane by lane; and what would make it shorter."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from offload.errors import ConfigError, InfeasiblePlanError
from offload.plan.budget import Home, PathBudget, Plan
from offload.plan.cost import estimate
from offload.plan.planner import choose_plan
from offload.plan.rates import Rates
from offload.predict.predict import Prediction, predict
from offload.units import format_apart, format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class LaneSeconds:
    """One lane in one step.

    Attributes:
        lane: Its name ("cpu", "read:0", ...).
        predicted_s: Seconds that it should work.
        measured_s: Seconds that it worked.
        nbytes: Bytes that it moved or updated.
    """

    lane: str
    predicted_s: float
    measured_s: float
    nbytes: int

    @property
    def apart_s(self) -> float:
        """How much longer than predicted it worked; negative for shorter."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True)
class Explanation:
    """A prediction and, once there is one, the step it is about; print it.

    Attributes:
        prediction: Of a step in which all state is updated, by the rates known before it.
        measured_s: Seconds of the last step; NaN before the first.
        lanes: Each lane of that step; empty before the first.
        nodes: For each memory node, by its number, the bytes that are meant to lie there, and what of them lies
            elsewhere.
    """

    prediction: Prediction
    measured_s: float
    lanes: tuple[LaneSeconds, ...]
    nodes: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def largest(self) -> LaneSeconds | None:
        """The lane whose seconds differ most from the predicted ones; None before the first step."""
        return max(self.lanes, key=lambda lane: abs(lane.apart_s), default=None)

    def __str__(self) -> str:
        nodes = [
            f"  node{number:<6} {format_bytes(meant_bytes):>10} of host memory bound there"
            + (f", of which {format_bytes(elsewhere_bytes)} lie on other nodes" if elsewhere_bytes else "")
            for number, (meant_bytes, elsewhere_bytes) in self.nodes.items()
        ]
        if not self.lanes or self.largest is None:
            return "\n".join([str(self.prediction), *nodes])
        predicted_s = self.prediction.step_s
        lines = [
            f"a step takes {format_seconds(predicted_s)}, bound by {self.prediction.bound_by}; the last one took "
            f"{format_seconds(self.measured_s)}{format_apart(predicted_s, self.measured_s)}"
        ]
        for lane in self.lanes:
            lines.append(
                f"  {lane.lane:<10} {format_bytes(lane.nbytes):>10} in {format_seconds(lane.measured_s)}, predicted "
                f"{format_seconds(lane.predicted_s)}{format_apart(lane.predicted_s, lane.measured_s)}"
            )
        apart_s = self.largest.apart_s
        by = f"{format_seconds(abs(apart_s))} {'longer' if apart_s > 0 else 'shorter'}"
        lines.append(f"  furthest from its prediction: {self.largest.lane}, {by}")
        return "\n".join([*lines, *nodes])


def explain(plan: Plan, rates: Rates, metrics: Mapping[str, float]) -> Explanation:
    """Return what the last step took beside what it should have taken.

    Args:
        plan: What lives where (`Engine.plan`).
        rates: Speed of every lane (`Engine.rates`).
        metrics: `Engine.metrics()` after a step; before the first one nothing is compared.
    """
    return compare(predict(plan, rates), metrics)


def compare(prediction: Prediction, metrics: Mapping[str, float]) -> Explanation:
    """Return a prediction beside the step that `metrics` are about; see `explain`."""
    meant = {key: int(value) for key, value in metrics.items() if key.startswith("node/") and key.endswith("/bytes")}
    nodes = {
        int(key.split("/")[1]): (nbytes, int(metrics[key.replace("/bytes", "/elsewhere_bytes")]))
        for key, nbytes in meant.items()
    }
    if not metrics.get("step"):
        return Explanation(prediction, math.nan, (), nodes)
    lanes = tuple(
        LaneSeconds(
            lane, predicted_s, metrics.get(f"lane/{lane}/busy_s", 0.0), int(metrics.get(f"lane/{lane}/bytes", 0))
        )
        for lane, predicted_s in prediction.busy_s.items()
    )
    return Explanation(prediction, metrics["step_s"], lanes, nodes)


HOST_SHARE = 0.25
"""Part of its state by which a session's host memory is raised, to see what that would bring."""
LEAST_SAVED = 0.01
"""Part of a step below which nothing is said to help."""


def what_helps(plan: Plan, rates: Rates) -> list[tuple[str, float]]:
    """Return what would make a step shorter by the closed form, and by how many seconds, most first.

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
