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
"""The shortest wait that is shown as an interval."""


class Pace:
    """Measures the seconds of forward, less waits, and of backward, between a step's return and the next one's begin.

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
        self.waited_s = 0.0
        self.iteration_s = math.nan
        self.in_forward = True
        self.last_intervals: list[Interval] = []
        self._history: deque[tuple[float, float]] = deque(maxlen=HISTORY)  # seconds of forward and of backward
        # Times by `time.monotonic`, NaN where it has not happened yet: when the last step returned; since then, when
        # the first gradient arrived, and when backward ended.
        self._returned_s = self._arrived_s = self._backward_ended_s = math.nan
        # Seconds that the caller has spent in the last `step`, and since then in waits, in forward and later.
        self._call_s = self._forward_waits_s = self._other_waits_s = 0.0
        self._waits: list[Interval] = []  # of the caller, since the last step returned

    @property
    def intervals(self) -> list[Interval]:
        """The caller's intervals that have ended since the last step returned: forward, backward, waits."""
        passes = [
            Interval(CALLER, "forward", self._returned_s, self._arrived_s, nbytes=0),
            Interval(CALLER, "backward", self._arrived_s, self._backward_ended_s, nbytes=0),
        ]
        # A pass that has not begun or ended has a time of NaN.
        ended = [each for each in passes if not math.isnan(each.finished_s - each.started_s)]
        return [*ended, *self._waits]

    @property
    def typical_s(self) -> tuple[float, float] | None:
        """Median seconds of forward and of backward; None before both have been measured."""
        if not self._history:
            return None
        forward_s, backward_s = zip(*self._history, strict=True)
        return statistics.median(forward_s), statistics.median(backward_s)

    def note_arrival(self) -> None:
        """Note that a gradient has arrived; the first one ends forward."""
        if self.in_forward:
            self._arrived_s = time.monotonic()
            self.in_forward = False

    @contextmanager
    def timed_wait(self, *, for_all: bool = False) -> Iterator[None]:
        """Measure a wait of the caller, for some weights or (`for_all`) for the whole step.

        The first wait for the whole step, once gradients have begun to arrive, ends backward.
        """
        began_s = time.monotonic()
        in_forward = self.in_forward  # when the wait began: a gradient may arrive during it
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
        """Note that a step begins, and sum up the iteration since the last one returned.

        Backward ends here, unless a wait for the whole last step has ended it.

        Returns:
            The time by `time.monotonic`, for `end_call`.
        """
        now_s = time.monotonic()
        if math.isnan(self._backward_ended_s):
            self._backward_ended_s = now_s
        forward_s = self._arrived_s - self._returned_s - self._forward_waits_s
        if not math.isnan(forward_s):  # NaN before the first step, or if no gradient has arrived since the last
            backward_s = self._backward_ended_s - self._arrived_s
            # Forward's is below 0 if a wait that began in it has lasted on after the first gradient.
            self._history.append((max(forward_s, 0.0), max(backward_s, 0.0)))
        self.waited_s = self._call_s + self._forward_waits_s + self._other_waits_s
        self.last_intervals = self.intervals
        return now_s

    def end_call(self, began_s: float) -> None:
        """Note that `step`, which began at `began_s`, returns; the rest of the step may go on in the background."""
        last_returned_s = self._returned_s
        self._returned_s = time.monotonic()
        self.iteration_s = self._returned_s - last_returned_s
        self._arrived_s = self._backward_ended_s = math.nan
        self.in_forward = True
        self._waits = []
        self._call_s = self._returned_s - began_s
        self._forward_waits_s = self._other_waits_s = 0.0
