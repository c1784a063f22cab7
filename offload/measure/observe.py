"""Rates from timelines: what the lanes really reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median

from offload.engine.executor import Interval
from offload.plan import Rates

LEAST_BYTES = 1 << 20
"""A lane that moved less than this in a step says nothing about its bandwidth."""

HISTORY = 3
"""Steps whose median a rate is: one outlier changes nothing, a lasting change is noticed in the second step."""


def lane_totals(timeline: Sequence[Interval]) -> dict[str, tuple[int, float]]:
    """Return, for each lane, the bytes it moved and the seconds in which at least one operation was on it."""
    found: dict[str, tuple[int, float]] = {}
    ends: dict[str, float] = {}
    for interval in sorted(timeline, key=lambda item: (item.lane, item.started_s, item.finished_s)):
        nbytes, busy_s = found.get(interval.lane, (0, 0.0))
        begin_s = max(interval.started_s, ends.get(interval.lane, interval.started_s))
        end_s = max(interval.finished_s, begin_s)
        found[interval.lane] = nbytes + interval.nbytes, busy_s + end_s - begin_s
        ends[interval.lane] = end_s
    return found


def observe(known: Rates, totals: Mapping[str, tuple[int, float]]) -> Rates:
    """Return what the lanes did in one step (`lane_totals`); where that says nothing, what was known."""

    def seen(lane: str, rate: float) -> float:
        nbytes, busy_s = totals.get(lane, (0, 0.0))
        return rate if nbytes < LEAST_BYTES or busy_s <= 0 else nbytes / busy_s

    paths = tuple(
        dataclasses.replace(
            path,
            read_bytes_per_s=seen(f"read:{number}", path.read_bytes_per_s),
            write_bytes_per_s=seen(f"write:{number}", path.write_bytes_per_s),
        )
        for number, path in enumerate(known.paths)
    )
    return dataclasses.replace(known, cpu_bytes_per_s=seen("cpu", known.cpu_bytes_per_s), paths=paths)


def typical(history: Sequence[Rates]) -> Rates:
    """Return the median of each rate over the last `HISTORY` observations, of which there is at least one."""
    recent = history[-HISTORY:]
    paths = []
    for number, path in enumerate(recent[-1].paths):
        read = median(rates.paths[number].read_bytes_per_s for rates in recent)
        write = median(rates.paths[number].write_bytes_per_s for rates in recent)
        paths.append(dataclasses.replace(path, read_bytes_per_s=read, write_bytes_per_s=write))
    cpu = median(rates.cpu_bytes_per_s for rates in recent)
    return dataclasses.replace(recent[-1], cpu_bytes_per_s=cpu, paths=tuple(paths))
