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
    """Return the seconds in which at least one operation was under way: the length of the intervals' union."""
    total_s = 0.0
    until_s = -math.inf  # the end of all intervals so far: time before it has been counted
    for started_s, finished_s in sorted((interval.started_s, interval.finished_s) for interval in intervals):
        total_s += max(finished_s - max(started_s, until_s), 0.0)
        until_s = max(until_s, finished_s)
    return total_s


def lane_order(lane: str) -> tuple[int, int, str]:
    """Return the key by which lanes are sorted: their kind, then the number of their path."""
    kind, _, index = lane.partition(":")
    order = LANES.index(kind) if kind in LANES else len(LANES)  # those of checkpoints come last
    return order, int(index) if index.isdecimal() else 0, lane


def tracks(intervals: Sequence[Sequence[Any]]) -> list[int]:
    """Return a track (row) number for each interval, so that no two intervals of a track overlap.

    Trace viewers cannot draw overlapping intervals in one row. Intervals are given in the order of their starts. Each
    gets the first track that is free when it starts.

    Args:
        intervals: Each is an `Interval`, or a sequence that begins with its first four values.
    """
    busy: list[tuple[float, int]] = []  # heap of (end of its interval, track)
    free: list[int] = []  # heap of track numbers
    interval_tracks = []
    for interval in intervals:
        _, _, began_s, ended_s, *_ = interval
        while busy and busy[0][0] <= began_s:
            _, freed_track = heapq.heappop(busy)
            heapq.heappush(free, freed_track)
        # If none is free, all tracks so far are busy, and their count is the number of a new one.
        track = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ended_s, track))
        interval_tracks.append(track)
    return interval_tracks


def trace(timeline: Sequence[Sequence[Any]], paths: Sequence[str], *, step: int) -> dict[str, Any]:
    """Return a timeline in the Trace Event Format: a thread for each lane, and more where its operations overlap.

    Metadata events ("M") name the process and its threads; `_trace_event` makes the others.

    Args:
        timeline: Intervals, or their first five values.
        paths: Names of the paths, by the number in a lane's name.
        step: Number of the step.

    Source: "Trace Event Format", the Chromium project.
    """
    intervals = [Interval(*values[:5]) for values in timeline]
    start_s = min((interval.started_s for interval in intervals), default=0.0)
    name = f"offload, step {step}"
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": name}}]
    first_thread = 0
    for lane in sorted({interval.lane for interval in intervals}, key=lane_order):
        of_lane = [interval for interval in intervals if interval.lane == lane]
        of_lane.sort(key=lambda interval: (interval.started_s, interval.finished_s))
        threads = [first_thread + track for track in tracks(of_lane)]
        next_thread = max(threads) + 1
        number = lane.partition(":")[2]  # "" of a lane that is no path's
        # Numbers beyond `paths` are those of foreign stores and of a checkpoint's sink.
        is_known_path = number.isdecimal() and int(number) < len(paths)
        shown_name = f"{lane} ({paths[int(number)]})" if is_known_path else lane
        for thread in range(first_thread, next_thread):
            args = {"name": shown_name}
            events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": thread, "args": args})
        for interval, thread in zip(of_lane, threads, strict=True):
            events.append(_trace_event(interval, thread, start_s))
        first_thread = next_thread
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _trace_event(interval: Interval, thread: int, start_s: float) -> dict[str, Any]:
    """Return an interval as a complete event ("X"): begin (since `start_s`) and duration in microseconds."""
    return {
        "ph": "X",
        "name": interval.label,
        "cat": interval.lane,
        "pid": 1,
        "tid": thread,
        "ts": (interval.started_s - start_s) * 1e6,
        "dur": (interval.finished_s - interval.started_s) * 1e6,
        "args": {"bytes": interval.nbytes},
    }
