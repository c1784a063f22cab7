"""When lanes worked on which operations, and that as a trace file for viewers such as Perfetto."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

CALLER = "caller"
"""Shown like a lane: forward and backward, and waits in them, while a step goes on."""

ENGINE = "engine"
"""Shown like a lane: the engine thread, each time from when it is woken until it waits again."""

LANES = (CALLER, ENGINE, "cpu", "gpu", "read", "write", "h2d", "d2h")
"""The order in which lanes are shown."""


class Interval(NamedTuple):
    """One operation on a lane, for timelines.

    Attributes:
        lane: "engine", "cpu", or "read:<path>" and "write:<path>" with the path's number; with a GPU "gpu", "h2d" and
            "d2h"; of checkpoints "save:<path>" and "copy:<path>".
        label: What the operation worked on.
        started_s: When the lane began it, on the monotonic clock.
        finished_s: When the lane had finished it.
        nbytes: Bytes of state that were moved or updated.
        due_s: When the event that made it possible happened: an engine that takes no time would have handed it to the
            lane then. None if that was not noted; it then counts as `started_s`.
    """

    lane: str
    label: str
    started_s: float
    finished_s: float
    nbytes: int
    due_s: float | None = None


def covered_s(intervals: Iterable[Interval]) -> float:
    """Return the seconds in which at least one of some operations was under way."""
    total_s, until_s = 0.0, -math.inf
    for started_s, finished_s in sorted((interval.started_s, interval.finished_s) for interval in intervals):
        total_s += max(finished_s - max(started_s, until_s), 0.0)
        until_s = max(until_s, finished_s)
    return total_s


def lane_order(lane: str) -> tuple[int, int, str]:
    """Return the key by which lanes are sorted: their kind, then the number of their path."""
    kind, _, index = lane.partition(":")
    order = LANES.index(kind) if kind in LANES else len(LANES)
    return order, int(index) if index.isdecimal() else 0, lane


def tracks(intervals: Sequence[Sequence[Any]]) -> list[int]:
    """Return for each interval, given in the order of their starts, the first track (row) that is free by then."""
    used: list[tuple[float, int]] = []  # heap of (end of its interval, track)
    free: list[int] = []  # heap
    tracks = []
    for began_s, ended_s in (interval[2:4] for interval in intervals):
        while used and used[0][0] <= began_s:
            heapq.heappush(free, heapq.heappop(used)[1])
        track = heapq.heappop(free) if free else len(used)
        heapq.heappush(used, (ended_s, track))
        tracks.append(track)
    return tracks


def trace(timeline: Sequence[Sequence[Any]], paths: Sequence[str], *, step: int) -> dict[str, Any]:
    """Return a timeline in the Trace Event Format: a thread for each lane, and more where its operations overlap.

    Args:
        timeline: Intervals, or their first five values.
        paths: Names of the paths, by the number in a lane's name.
        step: Number of the step.

    Source: "Trace Event Format", the Chromium project.
    """
    start_s = min((interval[2] for interval in timeline), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"offload, step {step}"}}
    ]
    threads = 0
    for lane in sorted({interval[0] for interval in timeline}, key=lane_order):
        intervals = sorted(
            (interval for interval in timeline if interval[0] == lane), key=lambda item: (item[2], item[3])
        )
        used = tracks(intervals)
        number = lane.partition(":")[2]
        where = f" ({paths[int(number)]})" if number.isdecimal() and int(number) < len(paths) else ""
        for track in range(max(used) + 1):
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": 1,
                    "tid": threads + track,
                    "args": {"name": f"{lane}{where}"},
                }
            )
        for interval, track in zip(intervals, used, strict=True):
            _, label, began_s, ended_s, nbytes = interval[:5]
            events.append(
                {
                    "ph": "X",
                    "name": label,
                    "cat": lane,
                    "pid": 1,
                    "tid": threads + track,
                    "ts": (began_s - start_s) * 1e6,
                    "dur": (ended_s - began_s) * 1e6,
                    "args": {"bytes": nbytes},
                }
            )
        threads += max(used) + 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}
