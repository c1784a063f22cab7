"""Keeping lanes busy for a while, to see what they reach alone and beside each other.

Invariants: a load never has more operations in flight than its depth, and starts none after one has failed; nothing
is in flight when `drive` returns or raises. It decides nothing about what an operation is.
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
"""Lanes that are at work together for so much of the longest one's time show what they reach then."""


@dataclass(frozen=True, slots=True)
class Load:
    """Operations of one kind on one lane.

    Attributes:
        lane: Its name in the timeline.
        nbytes: Bytes of one operation.
        depth: Operations in flight at once.
        start: Starts an operation under an id and at a place from 0 to `depth` - 1, where none is in flight.
        error: Returns the error that a failed completion stands for.
        count: Operations in all; None for as long as a load that has a count goes on.
        what: What is measured, for the log.
    """

    lane: str
    nbytes: int
    depth: int
    start: Callable[[int, int], None]
    error: Callable[[Completion], OffloadError]
    count: int | None
    what: str = "the update"


class _Flight(NamedTuple):
    """An operation of a load, in one of its places."""

    load: Load
    place: int

    def __str__(self) -> str:
        return f"{self.load.what} to be probed"


def drive(queue: Queue, loads: Sequence[Load]) -> list[Interval]:
    """Run loads beside each other and return what was done, in the order in which it ended.

    Args:
        queue: Where everything that the loads start reports; nobody else uses it meanwhile.
        loads: At least one has a count.

    Raises:
        OffloadError: What the first failed operation stands for, once all others have ended.
    """
    timeline: list[Interval] = []
    idle = deque((load, at) for at in range(max(x.depth for x in loads)) for load in loads if at < load.depth)
    started: Counter[str] = Counter()
    left = sum(load.count or 0 for load in loads)

    def take() -> _Flight | None:
        while idle:
            load, place = idle.popleft()
            if left and started[load.lane] < (math.inf if load.count is None else load.count):
                started[load.lane] += 1
                return _Flight(load, place)
        return None

    flights = Flights[_Flight](queue)
    with contextlib.closing(flights.run(take, lambda op, item: item.load.start(op, item.place))) as landed:
        for completion, (load, place) in landed:
            if completion.error:
                raise load.error(completion)
            timeline.append(Interval(load.lane, "", completion.started_s, completion.finished_s, load.nbytes))
            left -= load.count is not None
            idle.append((load, place))
    return timeline


def lane_rates(timeline: Sequence[Interval]) -> dict[str, float]:
    """Return the bytes per second of each lane over the time in which it was busy."""
    return {lane: nbytes / max(busy_s, 1e-9) for lane, (nbytes, busy_s) in lane_totals(timeline).items()}


def rates_beside(timeline: Sequence[Interval]) -> dict[str, float]:
    """Return the bytes per second of each lane while all were at work, if they were for long enough to tell.

    Else, as where one is through before another has begun, or rests while another works, those of `lane_rates`.
    """
    spans = [
        (min(i.started_s for i in timeline if i.lane == lane), max(i.finished_s for i in timeline if i.lane == lane))
        for lane in {interval.lane for interval in timeline}
    ]
    together_s = min(end_s for _, end_s in spans) - max(begin_s for begin_s, _ in spans)
    found = lane_rates(timeline)
    if together_s < ENOUGH_TOGETHER * max(end_s - begin_s for begin_s, end_s in spans):
        return found
    return {lane: bytes_per_s(timeline, lane) or alone for lane, alone in found.items()}


def bytes_per_s(timeline: Sequence[Interval], lane: str) -> float:
    """Return what a lane reached while all lanes were at work, taking an operation's bytes as spread evenly.

    The time from when the last lane had begun until the first one ended, so that filling and draining do not count.
    """
    lanes = {interval.lane for interval in timeline}
    began_s = max(min(i.started_s for i in timeline if i.lane == name) for name in lanes)
    ended_s = min(max(i.finished_s for i in timeline if i.lane == name) for name in lanes)
    moved = 0.0
    for interval in timeline:
        if interval.lane == lane:
            inside_s = min(interval.finished_s, ended_s) - max(interval.started_s, began_s)
            length_s = interval.finished_s - interval.started_s
            if inside_s > 0:
                moved += interval.nbytes * inside_s / length_s
    return moved / max(ended_s - began_s, 1e-9)
