"""Keeping lanes busy for a while, to see what they reach alone and beside each other.

Invariants: an operation is started only when fewer than its load's depth are out, and never after one has failed;
nothing is in flight when `drive` returns or raises. It decides nothing about what an operation is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.engine.timeline import Interval
from offload.errors import OffloadError
from offload.protocols import Completion, Queue


@dataclass(frozen=True, slots=True)
class Load:
    """Operations of one kind on one lane.

    Attributes:
        lane: Its name in the timeline.
        nbytes: Bytes of one operation.
        depth: Operations in flight at once.
        start: Starts an operation under an id and at a place from 0 to `depth` - 1, where none is in flight.
        error: What a failed completion stands for.
        count: Operations in all; None for as long as a load that has a count goes on.
    """

    lane: str
    nbytes: int
    depth: int
    start: Callable[[int, int], None]
    error: Callable[[Completion], OffloadError]
    count: int | None


def drive(queue: Queue, loads: Sequence[Load]) -> list[Interval]:
    """Run loads beside each other and return what was done, in the order in which it ended.

    Args:
        queue: What everything that the loads start reports to; nobody else uses it meanwhile.
        loads: At least one has a count.

    Raises:
        OffloadError: What the first failed operation stands for, once all others have ended.
    """
    timeline: list[Interval] = []
    out: dict[int, tuple[Load, int]] = {}
    started: Counter[str] = Counter()
    failures: list[Exception] = []
    counted = 0  # operations in flight of loads that have a count

    def start(load: Load, place: int) -> None:
        nonlocal counted
        if load.count is None and not counted:
            return
        if failures or (load.count is not None and started[load.lane] >= load.count):
            return
        started[load.lane] += 1
        op = started.total()
        try:
            load.start(op, place)
        except OffloadError as error:
            failures.append(error)
            return
        out[op] = load, place
        counted += load.count is not None

    for load in sorted(loads, key=lambda item: item.count is None):
        for place in range(load.depth):
            start(load, place)
    while out:
        for record in queue.wait():
            completion = Completion(*record)
            load, place = out.pop(completion.op)
            counted -= load.count is not None
            if completion.error:
                failures.append(load.error(completion))
                continue
            timeline.append(Interval(load.lane, "", completion.started_s, completion.finished_s, load.nbytes))
            start(load, place)
    if failures:
        raise failures[0]
    return timeline


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
