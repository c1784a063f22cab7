"""Keeps lanes busy for a while, to measure their rates alone and beside each other.

Invariants: a load never has more operations in flight than its depth, and starts none after one has failed; no
operation is in flight when `drive` returns or raises. What an operation is, callers decide.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.engine.flights import Flights
from offload.errors import OffloadError
from offload.measure.observe import lane_totals
from offload.protocols import Completion, Queue
from offload.schedule.timeline import Interval

ENOUGH_TOGETHER = 0.3
"""Lanes show their rates beside each other if all work at once for this part of the time of the longest one."""


@dataclass(frozen=True, slots=True)
class Load:
    """Operations of one kind on one lane.

    Attributes:
        lane: Its name in the timeline.
        nbytes: Bytes of one operation.
        depth: Operations in flight at once.
        start: Starts an operation; called with its id, and with its place: a number from 0 to `depth` - 1 that no
            other operation in flight has.
        error: Returns the error of a failed completion.
        count: Operations in all; None to go on until all loads with a count have ended.
        what: Name of what is measured, for the log.
    """

    lane: str
    nbytes: int
    depth: int
    start: Callable[[int, int], None]
    error: Callable[[Completion], OffloadError]
    count: int | None
    what: str = "the update"


class _Flight(NamedTuple):
    """An operation of a load, in one of the load's places; its text is what the log calls it."""

    load: Load
    place: int

    def __str__(self) -> str:
        return f"{self.load.what} to be probed"


def drive(queue: Queue, loads: Sequence[Load]) -> list[Interval]:
    """Run loads beside each other and return their operations, in the order in which they ended.

    Args:
        queue: Gets the completions of all operations, and no others meanwhile.
        loads: At least one has a count.

    Raises:
        OffloadError: The error of the first operation that failed, once all others have ended.
    """
    timeline: list[Interval] = []
    # Places in which no operation is in flight; the loads' first places come first, so that they begin together.
    most_depth = max(load.depth for load in loads)
    free = deque(_Flight(load, place) for place in range(most_depth) for load in loads if place < load.depth)
    started: Counter[str] = Counter()
    unended = sum(load.count or 0 for load in loads)  # operations of loads with a count that have not ended

    def take_next() -> _Flight | None:
        """Take the next free place in which an operation is to be started; None if there is none now.

        Places whose load has started all its operations are thrown away; all places, once `unended` is 0.
        """
        while free:
            flight = free.popleft()
            load = flight.load
            if unended and started[load.lane] < (math.inf if load.count is None else load.count):
                started[load.lane] += 1
                return flight
        return None

    flights = Flights[_Flight](queue)
    with contextlib.closing(flights.run(take_next, lambda op, flight: flight.load.start(op, flight.place))) as ended:
        for completion, flight in ended:
            load = flight.load
            if completion.error:
                raise load.error(completion)  # `closing` waits for what is in flight
            timeline.append(Interval(load.lane, "", completion.started_s, completion.finished_s, load.nbytes))
            if load.count is not None:
                unended -= 1
            free.append(flight)
    return timeline


def lane_rates(timeline: Sequence[Interval]) -> dict[str, float]:
    """Return the bytes per second of each lane over the time in which it was busy."""
    return {lane: nbytes / max(busy_s, 1e-9) for lane, (nbytes, busy_s) in lane_totals(timeline).items()}


def rates_beside(timeline: Sequence[Interval]) -> dict[str, float]:
    """Return the bytes per second of each lane while all lanes were at work.

    If all were at work for too short a time, as where one ends before another begins, the rates of `lane_rates`.
    """
    spans = _spans(timeline)
    together_s = min(end_s for _, end_s in spans) - max(begin_s for begin_s, _ in spans)
    rates = lane_rates(timeline)
    if together_s < ENOUGH_TOGETHER * max(end_s - begin_s for begin_s, end_s in spans):
        return rates
    # `bytes_per_s` is 0 for a lane that paused during the time together: its rate over all its time then.
    return {lane: bytes_per_s(timeline, lane) or rate for lane, rate in rates.items()}


def _spans(timeline: Sequence[Interval]) -> list[tuple[float, float]]:
    """Return, for each lane in any order, when its first operation began and when its last one ended."""
    lanes = {interval.lane for interval in timeline}
    of_lanes = [[interval for interval in timeline if interval.lane == lane] for lane in lanes]
    return [(min(i.started_s for i in lane), max(i.finished_s for i in lane)) for lane in of_lanes]


def bytes_per_s(timeline: Sequence[Interval], lane: str) -> float:
    """Return a lane's bytes a second in the time in which all lanes of a timeline were at work.

    That is from when the last lane began until the first one ended: filling and draining of lanes do not count. Of an
    operation that was only partly in that time, the same part of its bytes counts.
    """
    spans = _spans(timeline)
    began_s = max(begin_s for begin_s, _ in spans)
    ended_s = min(end_s for _, end_s in spans)
    moved_bytes = 0.0
    for interval in timeline:
        if interval.lane == lane:
            inside_s = min(interval.finished_s, ended_s) - max(interval.started_s, began_s)
            length_s = interval.finished_s - interval.started_s
            if inside_s > 0:
                moved_bytes += interval.nbytes * inside_s / length_s
    return moved_bytes / max(ended_s - began_s, 1e-9)
