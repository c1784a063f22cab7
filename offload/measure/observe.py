"""Rates from timelines: what the lanes really reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from offload.engine.executor import Interval
from offload.plan import PathRates, Rates

LEAST_BYTES = 1 << 20
"""A lane that moved less than this in a step says nothing about its bandwidth."""

WEIGHT = 0.5
"""Weight of the newest step in a rate; the rest is what was known before."""


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


def refine(rates: Rates, totals: Mapping[str, tuple[int, float]]) -> Rates:
    """Return `rates` moved towards what the lanes did in one step (`lane_totals`)."""

    def moved(lane: str, known: float) -> float:
        nbytes, busy_s = totals.get(lane, (0, 0.0))
        if nbytes < LEAST_BYTES or busy_s <= 0:
            return known
        return (1 - WEIGHT) * known + WEIGHT * nbytes / busy_s

    paths = tuple(
        PathRates(
            read_bytes_per_s=moved(f"read:{number}", path.read_bytes_per_s),
            write_bytes_per_s=moved(f"write:{number}", path.write_bytes_per_s),
            latency_s=path.latency_s,
        )
        for number, path in enumerate(rates.paths)
    )
    return dataclasses.replace(rates, cpu_bytes_per_s=moved("cpu", rates.cpu_bytes_per_s), paths=paths)
