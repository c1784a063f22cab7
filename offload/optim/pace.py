"""How long forward and backward take while a step goes on in the background, and how long the caller waits for it."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from offload.schedule.timeline import CALLER, Interval

HISTORY = 5
"""Iterations over which the median of seconds is taken."""

LEAST_WAIT_S = 1e-4
"""Waits that are shorter are not shown as intervals."""


class Pace:
    """Measures the seconds of forward and backward, less waits, between a step's return and the next step's begin.

    Forward lasts from the last step's return until the first gradient arrives. Backward lasts from then until the
    caller first waits for the whole step, or the next step begins. So if several passes make one step, only the first
    one's forward counts as forward.

    Attributes:
        waited_s: Seconds that the caller has waited for the last step that has ended: in `step` and after it.
        iteration_s: Seconds between the returns of the last two steps; NaN before there are two.
        in_forward: Whether no gradient has arrived since the last step returned.
        last_intervals: `intervals` when the last step began.
    """

    def __init__(self) -> None:
        self.waited_s, self.iteration_s = 0.0, math.nan
        self.in_forward = True
        self.last_intervals: list[Interval] = []
        self._history: deque[tuple[float, float]] = deque(maxlen=HISTORY)
        self._returned_s = self._arrived_s = self._backward_ended_s = math.nan
        self._call_s = self._forward_waits_s = self._other_waits_s = 0.0
        self._waits: list[Interval] = []

    @property
    def intervals(self) -> list[Interval]:
        """The caller's intervals that have ended since the last step returned: forward, backward, waits."""
        marks = (
            ("forward", self._returned_s, self._arrived_s),
            ("backward", self._arrived_s, self._backward_ended_s),
        )
        passes = [Interval(CALLER, label, began_s, ended_s, 0) for label, began_s, ended_s in marks]
        return [
            *(interval for interval in passes if not math.isnan(interval.finished_s - interval.started_s)),
            *self._waits,
        ]

    @property
    def typical_s(self) -> tuple[float, float] | None:
        """Median seconds of forward and of backward; None before both have been measured."""
        if not self._history:
            return None
        forward_s, backward_s = zip(*self._history, strict=True)
        return statistics.median(forward_s), statistics.median(backward_s)

    def note_arrival(self) -> None:
        """Note that a gradient has arrived."""
        if self.in_forward:
            self._arrived_s, self.in_forward = time.monotonic(), False

    @contextmanager
    def timed_wait(self, *, for_all: bool = False) -> Iterator[None]:
        """Measure a wait of the caller, for some weights or (`for_all`) for the whole step.

        The first wait for the whole step, once gradients have begun to arrive, ends backward.
        """
        began_s, in_forward = time.monotonic(), self.in_forward
        if for_all and not in_forward and math.isnan(self._backward_ended_s):
            self._backward_ended_s = began_s
        try:
            yield
        finally:
            ended_s = time.monotonic()
            waited_s = ended_s - began_s
            if waited_s > LEAST_WAIT_S:
                self._waits.append(Interval(CALLER, "waits for weights", began_s, ended_s, 0))
            if in_forward:
                self._forward_waits_s += waited_s
            else:
                self._other_waits_s += waited_s

    def begin_step(self) -> float:
        """Note that the next step begins, and the last one has ended; return the time."""
        now_s = time.monotonic()
        forward_s = self._arrived_s - self._returned_s - self._forward_waits_s
        if not math.isnan(forward_s):
            ended_s = now_s if math.isnan(self._backward_ended_s) else self._backward_ended_s
            self._history.append((max(forward_s, 0.0), max(ended_s - self._arrived_s, 0.0)))
        self.waited_s = self._call_s + self._forward_waits_s + self._other_waits_s
        if math.isnan(self._backward_ended_s):
            self._backward_ended_s = now_s
        self.last_intervals = self.intervals
        return now_s

    def end_call(self, began_s: float) -> None:
        """Note that `step`, which began at `began_s`, returns; the rest of the step may go on in the background."""
        before_s, self._returned_s = self._returned_s, time.monotonic()
        self.iteration_s = self._returned_s - before_s
        self._arrived_s = self._backward_ended_s = math.nan
        self.in_forward = True
        self._waits = []
        self._call_s, self._forward_waits_s, self._other_waits_s = self._returned_s - began_s, 0.0, 0.0
