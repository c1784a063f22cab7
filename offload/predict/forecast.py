"""Predicts the next step: simulated once, then corrected by the closed form as long as rates change little."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import NamedTuple

from offload.errors import known
from offload.plan.budget import Plan
from offload.plan.cost import estimate
from offload.plan.rates import Rates
from offload.predict.explanation import Explanation
from offload.predict.predict import Prediction, predict, with_backward_s, with_forward_s
from offload.units import format_bytes, format_seconds

log = logging.getLogger("offload")

FAR, FAR_S = 5.0, 5.0
"""A step is late if it takes more than `FAR` times the expected seconds, and over `FAR_S` more than these."""

DRIFT = 0.1
"""Part by which the closed form's step may change before the step is simulated again."""


class _Simulation(NamedTuple):
    """A simulated step.

    Attributes:
        plan: The plan that was simulated.
        rates: The rates at that time.
        estimated_s: Seconds of the step by the closed form, with these rates.
        prediction: The result of the simulation.
    """

    plan: Plan
    rates: Rates
    estimated_s: float
    prediction: Prediction


class Forecast:
    """Predictions for one session, whose plan and rates change as it goes on."""

    def __init__(self) -> None:
        self._last: _Simulation | None = None  # None before the first
        self._late_steps = 0  # steps that `watch` has found late

    def simulated(self, plan: Plan, rates: Rates) -> Prediction:
        """Simulate a step, and keep the prediction."""
        prediction = predict(plan, rates)
        self._last = _Simulation(plan, rates, estimate(plan, rates).step_s, prediction)
        return prediction

    def carried_on(self, plan: Plan, rates: Rates) -> Prediction:
        """Return a prediction: the last simulation, scaled as the closed form of a step has changed since.

        A step is simulated anew if none was with this plan, or if the closed form has changed by more than `DRIFT`.
        """
        last = self._last
        if last is not None and last.plan is plan:
            now_s = estimate(plan, rates).step_s
            if abs(now_s - last.estimated_s) <= DRIFT * last.estimated_s:
                factor = now_s / last.estimated_s if last.estimated_s else 1.0
                return carry_on(last.prediction, last.rates, rates, factor)
        return self.simulated(plan, rates)

    def with_forward_s(self, plan: Plan, rates: Rates, forward_s: float) -> float:
        """Return the seconds from a step's begin to the end of the forward pass into which the step goes on.

        `forward_s` is the time of the forward pass by itself.
        """
        simulated, factor = self._drifted(plan, rates)
        return with_forward_s(simulated, plan, forward_s, factor=factor)

    def with_backward_s(self, plan: Plan, rates: Rates, forward_s: float, backward_s: float, follows: bool) -> float:
        """Return the seconds of an iteration with updates during backward.

        Args:
            forward_s: Seconds of the forward pass by itself.
            backward_s: Seconds of backward by itself.
            follows: Whether the rest of the step goes on into forward.
        """
        simulated, factor = self._drifted(plan, rates)
        return with_backward_s(simulated, plan, rates, forward_s, backward_s, follows=follows, factor=factor)

    def _drifted(self, plan: Plan, rates: Rates) -> tuple[Prediction, float]:
        """Return the last simulation, and the factor by which a step takes longer with the present rates.

        Unlike what `carried_on` returns, the simulation always has a timeline.
        """
        now = self.carried_on(plan, rates)
        simulated = known(self._last, "nothing was simulated").prediction
        factor = now.step_s / simulated.step_s if simulated.step_s else 1.0
        return simulated, factor

    def borrowing_s(self, plan: Plan, rates: Rates) -> tuple[float, float] | None:
        """Return the seconds of a step with borrowed GPU staging slots, and without; None if none are borrowed."""
        if plan.unborrowed is plan:
            return None
        return self.carried_on(plan, rates).step_s, predict(plan.unborrowed, rates).step_s

    def watch(self, plan: Plan, rates: Rates, step_s: float) -> None:
        """Warn of a step that took far longer than expected; only of the first, second, fourth, eighth, and so on.

        So a session whose steps are all late does not fill the log.
        """
        if step_s <= FAR_S:  # cannot be late: the estimate need not be computed
            return
        expected_s = estimate(plan, rates).step_s
        if step_s > max(FAR * expected_s, expected_s + FAR_S):
            self._late_steps += 1
            is_power_of_two = self._late_steps.bit_count() == 1
            if is_power_of_two:
                text = "the step took %.1f s, and %.1f s were expected: optimizer.explain() says which lane was late"
                log.warning(text, step_s, expected_s)


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A plan and its prediction; print it.

    Attributes:
        plan: What lives where.
        explanation: How long a step should take by the rates known now, what bounds it, and how long the last one
            took.
        unpinned_bytes: Host memory that could not be pinned: the GPU's copies of it are slower.
        iteration: If the step is hidden: seconds of forward, of backward, and of a whole iteration.
        hidden_in: "forward", "backward" or "forward and backward", if the step is hidden.
        parked: While the session is parked: bytes that were given back, and seconds until they are back
            (`predict_back_s`).
        borrowing: If staging slots on the GPU are borrowed: seconds of a step with them, and of one on the CPU.
        borrowed_bytes: Bytes that the last step has borrowed.
        frozen_bytes: State of parameters that are frozen now; predicted times are of steps that update it, too.
    """

    plan: Plan
    explanation: Explanation
    unpinned_bytes: int = 0
    iteration: tuple[float, float, float] | None = None
    hidden_in: str = ""
    parked: tuple[int, float] | None = None
    borrowing: tuple[float, float] | None = None
    borrowed_bytes: int = 0
    frozen_bytes: int = 0

    def __str__(self) -> str:
        plan = str(self.plan)
        if self.unpinned_bytes:
            nbytes = format_bytes(self.unpinned_bytes)
            plan += f"\n  not pinned   {nbytes:>10}  of the host memory: slower from and to the GPU"
        if self.frozen_bytes:
            nbytes = format_bytes(self.frozen_bytes)
            rest = "of the state, of frozen parameters: it stays where it is, and steps take less than is predicted"
            plan += f"\n  frozen       {nbytes:>10}  {rest}"
        lines = [plan, str(self.explanation)]
        if self.iteration is not None:
            forward_s, backward_s, iteration_s = self.iteration
            lines.append(
                f"the step is hidden in {self.hidden_in}: with {format_seconds(forward_s)} of forward and "
                f"{format_seconds(backward_s)} of backward an iteration takes {format_seconds(iteration_s)}"
            )
        if self.borrowing is not None:
            with_s, without_s = map(format_seconds, self.borrowing)
            lines.append(
                f"with the staging slots that are borrowed a step takes {with_s}, and {without_s} without; "
                f"the last step has borrowed {format_bytes(self.borrowed_bytes)}"
            )
        if self.parked is not None:
            given_bytes, back_s = self.parked
            lines.append(f"parked: {format_bytes(given_bytes)} given back, back in about {format_seconds(back_s)}")
        return "\n".join(lines)


def predict_back_s(
    rates: Rates,
    read_bytes: Mapping[int, int],
    sent_bytes: int,
    before_bytes: int,
    beside_bytes: int,
    allocate_bytes_per_s: float,
) -> float:
    """Return by how many seconds the first step after parking takes longer than others, `unpark` included.

    Three things follow each other: `before_bytes` of memory are allocated; state is read while `beside_bytes` are
    allocated, and the longer of the two counts; state is copied to the GPU.

    Args:
        rates: Speed of every lane.
        read_bytes: Bytes of state that only this step has to read, by the number of the path. Numbers beyond the
            paths of the rates are foreign stores.
        sent_bytes: State that is copied to its home on the GPU.
        before_bytes: Memory that is allocated before state is read.
        beside_bytes: Memory that is allocated while state is read.
        allocate_bytes_per_s: Speed of allocation; 0 where unknown.
    """
    path_rates = [path.read.alone for path in rates.paths]

    def path_rate(number: int) -> float:
        """Return the rate at which a path is read; for a foreign store, whose path is not known here, the slowest."""
        return path_rates[number] if number < len(path_rates) else min(path_rates)

    read_s = max((nbytes / path_rate(number) for number, nbytes in read_bytes.items()), default=0.0)
    sent_s = sent_bytes / rates.gpu.h2d.alone if sent_bytes else 0.0
    if not allocate_bytes_per_s:
        return read_s + sent_s
    return max(read_s, beside_bytes / allocate_bytes_per_s) + sent_s + before_bytes / allocate_bytes_per_s


def carry_on(prediction: Prediction, then: Rates, now: Rates, factor: float) -> Prediction:
    """Scale a prediction to rates that have changed a little, instead of a new simulation; it has no timeline then.

    The step is scaled by `factor`, and each lane's seconds by that lane's old rate over its present one.

    Args:
        prediction: What to scale.
        then: The rates that it was made from.
        now: The present rates.
        factor: Factor by which the whole step takes longer now.
    """
    busy_s = {lane: s * _rate(then, lane) / _rate(now, lane) for lane, s in prediction.busy_s.items()}
    return dataclasses.replace(prediction, step_s=prediction.step_s * factor, busy_s=busy_s, timeline=())


def _rate(rates: Rates, lane: str) -> float:
    """Return a lane's rate, in units that cancel in a quotient of two."""
    kind, _, number = lane.partition(":")
    if kind in ("read", "write"):
        return float(getattr(rates.paths[int(number)], f"{kind}_bytes_per_s"))
    if kind == "engine":  # operations a second; 1 where the time of one is not known, so that the quotient is 1
        return 1 / rates.operation_s if rates.operation_s else 1.0
    return rates.cpu_bytes_per_s if kind == "cpu" else rates.gpu.lanes[kind][0]  # [0]: bytes a second
