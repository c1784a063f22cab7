"""Compares a step's predicted seconds with the measured ones, lane by lane; and says what would make it shorter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from offload import metrics
from offload.errors import ConfigError, InfeasiblePlanError
from offload.plan.budget import Budgets, Home, PathBudget, Plan
from offload.plan.cost import estimate
from offload.plan.planner import choose_plan
from offload.plan.rates import Rates
from offload.predict.predict import Prediction, predict
from offload.units import format_apart, format_bytes, format_seconds

SHORT_S = 0.5
"""A step of fewer seconds may be several times off its prediction: what is done once a step is most of it then."""


@dataclass(frozen=True, slots=True)
class LaneSeconds:
    """One lane in one step.

    Attributes:
        lane: Its name ("cpu", "read:0", ...).
        predicted_s: Seconds for which it should work.
        measured_s: Seconds for which it worked.
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
        nodes: For each memory node, by its number, the bytes of host memory bound there, and how many of these lie on
            other nodes.
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
        if not self.lanes or self.largest is None:  # before the first step both hold
            return "\n".join([str(self.prediction), *self._node_lines()])
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
        if max(predicted_s, self.measured_s) < SHORT_S:
            lines.append(f"  (a step under {format_seconds(SHORT_S)} may be several times off its prediction)")
        return "\n".join([*lines, *self._node_lines()])

    def _node_lines(self) -> list[str]:
        """Return a line for each memory node."""
        lines = []
        for number, (bound_bytes, elsewhere_bytes) in self.nodes.items():
            line = f"  node{number:<6} {format_bytes(bound_bytes):>10} of host memory bound there"
            if elsewhere_bytes:
                line += f", of which {format_bytes(elsewhere_bytes)} lie on other nodes"
            lines.append(line)
        return lines


def explain(plan: Plan, rates: Rates, metrics: Mapping[str, float]) -> Explanation:
    """Compare the last step with a prediction of it.

    Args:
        plan: What lives where (`Engine.plan`).
        rates: Speed of every lane (`Engine.rates`).
        metrics: `Engine.metrics()` after a step; before the first one nothing is compared.
    """
    return compare(predict(plan, rates), metrics)


def compare(prediction: Prediction, figures: Mapping[str, float]) -> Explanation:
    """Compare a prediction with the last step.

    Before the first step nothing is compared; bytes on memory nodes are known all the same.

    Args:
        prediction: Of a step.
        figures: The engine's metrics after the last step, by name.
    """
    nodes = {}
    for name, bound_bytes in figures.items():
        node = metrics.which(metrics.NODE_BYTES, name)
        if node is not None:
            elsewhere_bytes = figures[metrics.of(metrics.NODE_ELSEWHERE_BYTES, node)]
            nodes[int(node)] = int(bound_bytes), int(elsewhere_bytes)
    if not figures.get(metrics.STEP):
        return Explanation(prediction, math.nan, (), nodes)
    lanes = tuple(
        LaneSeconds(
            lane,
            predicted_s,
            figures.get(metrics.of(metrics.LANE_BUSY_S, lane), 0.0),
            int(figures.get(metrics.of(metrics.LANE_BYTES, lane), 0)),
        )
        for lane, predicted_s in prediction.busy_s.items()
    )
    return Explanation(prediction, figures[metrics.STEP_S], lanes, nodes)


HOST_SHARE = 0.25
"""Part of the session's state by which `what_helps` raises host memory."""
LEAST_SAVED = 0.01
"""Part of a step that a change has to save to be named."""
ONE_MORE = "one more path like the fastest"


def what_helps(plan: Plan, rates: Rates) -> list[tuple[str, float]]:
    """Return the changes that make a step shorter, in words, each with the seconds that it saves; most saved first.

    The seconds are those of the closed form (`estimate`). Changes that save too little are left out.
    """
    now_s = estimate(plan, rates).step_s
    placement = "auto" if plan.uses_gpu else "cpu"
    helpful = []
    for change in changes(plan, rates, int(HOST_SHARE * plan.state_bytes)):
        what = change.what
        other = replace(plan, budgets=change.budgets)
        if what == "host":  # of these changes, the only one that gives state other homes
            what = f"host_memory +{format_bytes(change.nbytes)}"
            try:
                other = choose_plan(plan.layout, change.budgets, change.rates, placement)
            except (ConfigError, InfeasiblePlanError):  # a planner may refuse budgets of a plan made by hand
                continue
        saved_s = now_s - estimate(other, change.rates).step_s
        if saved_s > LEAST_SAVED * now_s:
            helpful.append((what, saved_s))
    return sorted(helpful, key=lambda item: -item[1])


class Change(NamedTuple):
    """A change that may make a step shorter.

    Attributes:
        what: The change in words; "host" or "GPU" for `nbytes` more memory of it.
        nbytes: The bytes added; 0 for other changes.
        budgets: The budgets with the change.
        rates: The rates with the change.
    """

    what: str
    nbytes: int
    budgets: Budgets
    rates: Rates


def changes(plan: Plan, rates: Rates, host_bytes: int, gpu_bytes: int = 0) -> Iterator[Change]:
    """Yield changes that may make a step of a plan shorter; the caller finds out which do.

    Args:
        plan: The plan of the step.
        rates: Speed of every lane.
        host_bytes: Most bytes by which to raise host memory for state; 0 leaves this change out.
        gpu_bytes: Likewise for GPU memory.
    """
    budgets = plan.budgets
    if rates.paths:
        best = max(rates.paths, key=lambda path: path.each_way_bytes_per_s)
        one_more = replace(budgets, paths=(*budgets.paths, PathBudget("one more", 1 << 60)))  # endless room
        yield Change(ONE_MORE, 0, one_more, replace(rates, paths=(*rates.paths, best)))
    more_host = min(plan.home_bytes[Home.STREAMED], host_bytes)
    if more_host > 0:
        yield Change("host", more_host, budgets.with_more_host(more_host), rates)
    more_gpu = min(plan.state_bytes, gpu_bytes)
    if more_gpu > 0:
        yield Change("GPU", more_gpu, replace(budgets, gpu_bytes=budgets.gpu_bytes + more_gpu), rates)
    yield Change("a link to the GPU twice as fast", 0, budgets, replace(rates, gpu=rates.gpu.times(2)))
    cpu = replace(rates, cpu_bytes_per_s=2 * rates.cpu_bytes_per_s, memory_bytes_per_s=2 * rates.memory_bytes_per_s)
    yield Change("CPU and memory twice as fast", 0, budgets, cpu)
