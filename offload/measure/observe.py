"""Rates from timelines: learns from a session's steps what its lanes really reach."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from offload.plan import PathRates, Plan, Rates
from offload.plan.cost import slower
from offload.plan.rates import UPDATE_MEMORY_COST, Direction, cpu_speed
from offload.schedule.timeline import ENGINE, Interval

LEAST_BYTES = 1 << 20
"""A lane that moved less than this in a step does not show its bandwidth."""

HISTORY = 3
"""Steps of which a rate is the median: one outlier changes nothing, a lasting change shows in its second step."""

LEARNT = ("_bytes_per_s", "memory_cost", "latency_s", "at_once", "reaction_s", "operation_s", "begin_s")
"""Suffixes of the rates that are learnt from steps."""

IMPOSSIBLE = 0.05
"""Known rates count as wrong if an update has done more than they allow, by more than this part."""

LEAST_SHOWN = 0.05
"""A direction of a path must be alone (or beside the other) for at least this part of its busy time to show its rate
so."""

LEAST_KEPT, LEAST_TOGETHER = 0.05, 1.0
"""Bounds for what steps show, since which operations met is a matter of chance: a direction keeps at least
`LEAST_KEPT` of its rate alone while the other works, and the parts of both sum to at least `LEAST_TOGETHER` (as if
they took turns), or to what was known, if that is less."""

REFINEMENTS = 30
BISECTIONS = 40
TOLERANCE = 1e-6


def lane_totals(timeline: Sequence[Interval]) -> dict[str, tuple[int, float]]:
    """Return, for each lane, the bytes it moved and the seconds in which it was busy; see `_busy_spans`."""
    return _totals(timeline, _busy_spans(timeline))


def _totals(
    timeline: Sequence[Interval], spans: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, tuple[int, float]]:
    totals: dict[str, int] = {}
    for interval in timeline:
        totals[interval.lane] = totals.get(interval.lane, 0) + interval.nbytes
    return {lane: (nbytes, sum(end_s - begin_s for begin_s, end_s in spans[lane])) for lane, nbytes in totals.items()}


def observe(known: Rates, timeline: Sequence[Interval]) -> Rates:
    """Return the rates that lanes reached in one step; the known rates for lanes that did too little.

    A lane's rate is its bytes over its busy time, less latency. A path's directions have two rates, alone and beside
    the other; so have a link's, if these are known to differ. The CPU's rate is its rate alone: it is corrected for
    the memory bandwidth that other lanes took, by their traffic in this step and their known `memory_cost`. If that
    would leave too little bandwidth for what the CPU did, the costs are lowered.

    A path that moved too little to show its rate shows its latency: the time that operations take beside their bytes.
    The engine's own intervals show the time of its thread; without any, that stays as it was known.
    """
    spans = _busy_spans(timeline)
    totals = _totals(timeline, spans)
    intervals: dict[str, list[Interval]] = {}
    for interval in timeline:
        intervals.setdefault(interval.lane, []).append(interval)
    demands: dict[str, float] = {}

    def note_demand(lane: str, rate: float, memory_cost: float) -> bool:  # returns whether the lane shows its rate
        nbytes, busy_s = totals.get(lane, (0, 0.0))
        shows = nbytes >= LEAST_BYTES and busy_s > 0
        demands[lane] = (nbytes / busy_s if shows else rate) * memory_cost
        return shows

    def lane_rate(lane: str, rate: float, memory_cost: float) -> float:
        nbytes, busy_s = totals.get(lane, (0, 0.0))
        return nbytes / busy_s if note_demand(lane, rate, memory_cost) else rate

    def path_rates(number: int, path: PathRates) -> PathRates:
        shown = {
            verb: _shown(rates, path.latency_s, intervals[lane], spans[lane], spans.get(f"{other}:{number}", ()))
            for verb, other, rates in (("read", "write", path.read), ("write", "read", path.write))
            if note_demand(lane := f"{verb}:{number}", rates.beside, path.memory_cost)
        }
        known_keeps = {"read": path.read.rate_share_beside, "write": path.write.rate_share_beside}
        keeps = known_keeps | {verb: each.keeps for verb, each in shown.items()}
        more = max(1.0, min(LEAST_TOGETHER, sum(known_keeps.values())) / sum(keeps.values()))
        directions = {verb: each.rates(min(1.0, more * keeps[verb])) for verb, each in shown.items()}
        beside = {f"{verb}_bytes_per_s": rates.beside for verb, rates in directions.items()}
        alone = {f"{verb}_alone_bytes_per_s": rates.alone for verb, rates in directions.items()}
        lanes = {
            f"{verb}:{number}": rates
            for verb, rates in (("read", path.read), ("write", path.write))
            if f"{verb}:{number}" in intervals
        }
        # A step shows no more operations at once than the engine asked for: never go below the known number.
        together = max((path.at_once, *(at_once(intervals[lane]) for lane in lanes)))
        # A direction that moved much has shown that its operations take no more than `_Shown.idle_s` beside bytes.
        latency_s = min((each.idle_s / each.count for each in shown.values()), default=path.latency_s)
        if lanes and not shown:
            count = sum(len(intervals[lane]) for lane in lanes)
            moving_s = sum(totals[lane][0] / rates.alone for lane, rates in lanes.items())
            latency_s = max(0.0, sum(totals[lane][1] for lane in lanes) - moving_s) / count
        return dataclasses.replace(path, latency_s=latency_s, at_once=together, **beside, **alone)

    paths = tuple(path_rates(number, path) for number, path in enumerate(known.paths))
    gpu = known.gpu.reaching({lane: lane_rate(lane, rate, cost) for lane, (rate, cost) in known.gpu.lanes.items()})
    for lane, other, way in (("h2d", "d2h", known.gpu.h2d), ("d2h", "h2d", known.gpu.d2h)):
        if way.is_hindered and totals.get(lane, (0, 0.0))[0] >= LEAST_BYTES:
            # Which copies met is a matter of chance: the proportion stays.
            rates = _shown(way, 0.0, intervals[lane], spans[lane], spans.get(other, ())).rates(way.rate_share_beside)
            gpu = gpu.reaching({lane: rates.beside, f"{lane}_alone": rates.alone})
    observed = dataclasses.replace(known, paths=paths, gpu=gpu, **_engine_rates(known, timeline))
    nbytes, busy_s = totals.get("cpu", (0, 0.0))
    if nbytes < LEAST_BYTES or busy_s <= 0:
        return observed
    cpu, memory, factor = _shared_memory(known, nbytes, _seconds_by_demand(spans, demands))
    if factor < 1:
        paths = tuple(dataclasses.replace(path, memory_cost=path.memory_cost * factor) for path in paths)
        gpu = dataclasses.replace(gpu, memory_cost=gpu.memory_cost * factor)
    return dataclasses.replace(observed, cpu_bytes_per_s=cpu, memory_bytes_per_s=memory, paths=paths, gpu=gpu)


def as_on_fastest(timeline: Sequence[Interval], plan: Plan, rates: Rates) -> Sequence[Interval]:
    """Return a timeline in which work on slower memory nodes has the bytes of the fastest node in the same time."""
    times = {(lane, f"subgroup {n}"): (n, factor) for (lane, n), factor in slower(plan, rates).items()}
    if not times:
        return timeline

    def converted(interval: Interval) -> Interval:
        number, factor = times.get((interval.lane, interval.label), (0, 1.0))
        is_state = interval.nbytes == plan.layout.subgroups[number].state_bytes  # else weights, or gradients
        return interval._replace(nbytes=round(interval.nbytes * factor)) if is_state else interval

    return [converted(interval) for interval in timeline]


def typical(history: Sequence[Rates]) -> Rates:
    """Return the median of each rate over the last `HISTORY` observations, of which there is at least one."""
    recent = history[-HISTORY:]

    def middle(part: Any, parts: Sequence[Any]) -> Any:
        names = [field.name for field in dataclasses.fields(part) if field.name.endswith(LEARNT)]
        return dataclasses.replace(part, **{name: median(getattr(each, name) for each in parts) for name in names})

    last = recent[-1]
    paths = [middle(path, [rates.paths[number] for rates in recent]) for number, path in enumerate(last.paths)]
    gpu = middle(last.gpu, [rates.gpu for rates in recent])
    medians: Rates = dataclasses.replace(middle(last, recent), paths=tuple(paths), gpu=gpu)
    return medians


def _busy_spans(timeline: Sequence[Interval]) -> dict[str, list[tuple[float, float]]]:
    """Return, for each lane, when at least one operation was on it or due: disjoint spans in order.

    The time between one operation's end and the start of another that was due before counts as busy: the lane's
    thread, or the engine's, may not have got a core. It does not while the engine's thread worked before it started
    the other.
    """
    turns = _turns(timeline)
    spans: dict[str, list[tuple[float, float]]] = {}
    for interval in sorted(timeline, key=lambda item: item.started_s):
        lane = spans.setdefault(interval.lane, [])
        if lane and _handed_s(interval, turns) <= lane[-1][1]:
            lane[-1] = lane[-1][0], max(lane[-1][1], interval.finished_s)
        else:
            lane.append((interval.started_s, max(interval.started_s, interval.finished_s)))
    return spans


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a step shows of one direction of a path.

    Attributes:
        keeps: The part of its rate alone that it keeps while the other works.
        nbytes: Bytes that it moved.
        beside_s: Seconds for which it was busy while the other was.
        alone_s: Seconds for which it was busy alone.
        idle_s: Seconds of both that were latency: at most half.
        count: Number of its operations.
    """

    keeps: float
    nbytes: float
    beside_s: float
    alone_s: float
    idle_s: float
    count: int

    def rates(self, keeps: float) -> Direction:
        """Return the rates with which it moved these bytes, if it keeps that part.

        Solves nbytes = (keeps * beside_s + alone_s) * alone for `alone`, with times scaled down by latency's part.
        """
        busy_s = self.beside_s + self.alone_s
        alone = self.nbytes / (keeps * self.beside_s + self.alone_s) * busy_s / (busy_s - self.idle_s)
        return Direction(keeps * alone, alone)


def _shown(
    known: Direction,
    latency_s: float,
    intervals: Sequence[Interval],
    spans: Sequence[tuple[float, float]],
    others: Sequence[tuple[float, float]],
) -> _Shown:
    """Return what a step shows of one direction of a path.

    An operation that was partly beside the other direction does not say how many of its bytes that part moved. They
    are divided by the rates that all operations together show. These are found by a fixed-point iteration: from the
    known proportion, divide the bytes, compute the rates, and so again. If a step hardly shows one of the two, the
    known proportion stays.

    Args:
        spans: When it was busy.
        others: When the other direction was busy.
    """
    nbytes, begins_s, ends_s = np.array([(i.nbytes, i.started_s, i.finished_s) for i in intervals]).T
    edges_s = np.array(others).ravel() if others else np.zeros(1)
    # The other's busy seconds up to each edge: every second gap between edges is one of its spans.
    busy_s = np.concatenate(((0.0,), np.cumsum(np.diff(edges_s) * (np.arange(len(edges_s) - 1) % 2 == 0))))

    def beside_s(from_s: Any, to_s: Any) -> Any:
        return np.interp(to_s, edges_s, busy_s) - np.interp(from_s, edges_s, busy_s)

    whole_s = sum(end_s - begin_s for begin_s, end_s in spans)
    both_s = float(beside_s(*np.array(spans).T).sum())
    # Seconds beside the other direction, and alone: of each operation, and of all.
    parts_s = np.array([beside_s(begins_s, ends_s), ends_s - begins_s - beside_s(begins_s, ends_s)]).clip(0.0)
    totals_s = np.array([both_s, whole_s - both_s])
    keeps = known.rate_share_beside
    for _ in range(REFINEMENTS if totals_s.min() >= LEAST_SHOWN * whole_s else 0):
        weights = np.array([[keeps], [1.0]]) * parts_s
        moved = nbytes * weights / np.maximum(weights.sum(axis=0), TOLERANCE)
        beside, alone = moved.sum(axis=1) / totals_s
        keeps = float(np.clip(beside / max(alone, TOLERANCE), LEAST_KEPT, 1.0))
    idle_s = min(len(intervals) * latency_s, whole_s / 2)
    return _Shown(keeps, float(nbytes.sum()), both_s, whole_s - both_s, idle_s, len(intervals))


def at_once(intervals: Sequence[Interval]) -> int:
    """Return the most operations of a lane that were under way together."""
    ends = sorted(interval.finished_s for interval in intervals)
    most = ended = 0
    for started, started_s in enumerate(sorted(interval.started_s for interval in intervals), 1):
        while ends[ended] <= started_s and ended < started - 1:
            ended += 1
        most = max(most, started - ended)
    return most


@dataclass(frozen=True, slots=True)
class _Turns:
    """The turns of the engine's thread: each from when it is woken until it waits again."""

    begins_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    def of(self, due_s: float) -> int | None:
        """Return the turn that started an operation; None if it is not known."""
        turn = bisect.bisect_left(self.begins_s, due_s)
        return turn if turn < len(self.begins_s) else None


def _turns(timeline: Sequence[Interval]) -> _Turns:
    turns = sorted((i.started_s, i.finished_s) for i in timeline if i.lane == ENGINE)
    return _Turns(tuple(begin_s for begin_s, _ in turns), tuple(end_s for _, end_s in turns))


def _engine_rates(known: Rates, timeline: Sequence[Interval]) -> dict[str, Any]:
    """Return the engine's `reaction_s`, `operation_s` and `begin_s`, as far as a step shows them.

    * `reaction_s`: mean time from when an operation was due until an idle lane began it, less the thread's work in
      it. A path's two directions and a checkpoint's writes there count as one lane, as they share a device. A
      checkpoint's operations show no reaction: they wait for their turn anyway.
    * `operation_s`: the thread's time in later turns for each operation that they started. Of the turns after the
      last operation's end, one still belongs to the step.
    * `begin_s`: the first turn's time beside its operations.

    The thread's costs are not learnt with a GPU whose calls have a known cost of their own.
    """
    turns = _turns(timeline)
    edges_s = np.array([turns.begins_s, turns.ends_s]).T.ravel() if turns.begins_s else np.zeros(1)
    worked_s = np.concatenate(((0.0,), np.cumsum(np.diff(edges_s) * (np.arange(len(edges_s) - 1) % 2 == 0))))
    idle_from_s: dict[str, float] = {}
    reactions: list[tuple[float, float]] = []
    operations = sorted((i for i in timeline if i.lane != ENGINE), key=lambda item: item.started_s)
    for interval in operations:
        device = interval.lane.rpartition(":")[2]
        due_s = None if interval.lane.startswith(("save:", "copy:")) else interval.due_s
        if due_s is not None and due_s > idle_from_s.get(device, -math.inf):
            reactions.append((due_s, max(interval.started_s, due_s)))
        idle_from_s[device] = max(idle_from_s.get(device, -math.inf), interval.finished_s)
    learnt = {}
    if reactions:
        due_s, started_s = np.array(reactions).T
        engine_s = np.interp(started_s, edges_s, worked_s) - np.interp(due_s, edges_s, worked_s)
        learnt["reaction_s"] = float((started_s - due_s - engine_s).clip(0.0).mean())
    last = bisect.bisect_right(turns.begins_s, max((i.finished_s for i in operations), default=-math.inf))
    if last < 1 or known.gpu.call_s:
        return learnt
    takes_s = np.subtract(turns.ends_s, turns.begins_s)
    first = sum(i.due_s is not None and turns.of(i.due_s) == 0 for i in operations)
    begin_s, later_s = float(takes_s[0]), float(takes_s[1 : last + 1].sum())
    if len(operations) > first:
        learnt["operation_s"] = later_s / (len(operations) - first)
    else:  # no operations in later turns: all their time counts as the step's
        begin_s += later_s
    learnt["begin_s"] = max(0.0, begin_s - first * learnt.get("operation_s", known.operation_s))
    return learnt


def _handed_s(interval: Interval, turns: _Turns) -> float:
    """Return the latest time at which an operation was handed to its lane."""
    if interval.due_s is None:
        return interval.started_s
    turn = turns.of(interval.due_s)
    return min(interval.due_s if turn is None else turns.ends_s[turn], interval.started_s)


def _seconds_by_demand(
    spans: Mapping[str, Sequence[tuple[float, float]]], demands: Mapping[str, float]
) -> dict[float, float]:
    """Return the CPU's busy seconds by the memory bandwidth that the other lanes together demanded meanwhile."""
    edges: list[tuple[float, int, float]] = []
    for lane, lane_spans in spans.items():
        demand, cpu_change = (0.0, 1) if lane == "cpu" else (demands.get(lane, 0.0), 0)
        if demand or cpu_change:
            edges += [(begin_s, cpu_change, demand) for begin_s, _ in lane_spans]
            edges += [(end_s, -cpu_change, -demand) for _, end_s in lane_spans]
    seconds: dict[float, float] = {}
    last_s, cpu_lanes, demanded = 0.0, 0, 0.0
    for at_s, cpu_change, demand in sorted(edges):
        if cpu_lanes:
            key = round(demanded)  # sums of the same lanes may differ in their last bits
            seconds[key] = seconds.get(key, 0.0) + at_s - last_s
        last_s, cpu_lanes, demanded = at_s, cpu_lanes + cpu_change, demanded + demand
    return seconds


def _shared_memory(known: Rates, nbytes: int, seconds_by_demand: Mapping[float, float]) -> tuple[float, float, float]:
    """Return what a step shows of the CPU and of the memory that it shares with the other lanes.

    Args:
        known: What is known of both.
        nbytes: State bytes that the CPU updated.
        seconds_by_demand: Seconds of its work, by the demand of the other lanes.

    Returns:
        First, the CPU's rate alone: slowed by `Rates.cpu_speed`, it gives these bytes in this time. Where memory is
        the limit all the time, many rates do so; the one nearest to the known rate is taken. The rate is at least
        the one that was reached, and at most what the memory's bandwidth allows. Next, that bandwidth: the known
        one, or what the update itself took if that is more. Last, a factor for what other lanes take of it: 1, or
        less where the step could not have been as fast as it was.
    """
    least = nbytes / sum(seconds_by_demand.values())
    memory = max(known.memory_bytes_per_s, least * UPDATE_MEMORY_COST)
    most = memory / UPDATE_MEMORY_COST
    if memory == math.inf:
        return least, memory, 1.0

    def done(rate: float, factor: float = 1.0) -> float:
        return sum(s * rate * cpu_speed(rate, memory, factor * demand) for demand, s in seconds_by_demand.items())

    if done(most) < nbytes * (1 - IMPOSSIBLE):
        rate = min(max(known.cpu_bytes_per_s, least), most)
        return rate, memory, 1.0 - _first(0.0, 1.0, lambda less: done(rate, 1.0 - less) >= nbytes)
    wanted = min(float(nbytes), done(most))
    lowest = _first(least, most, lambda rate: done(rate) >= wanted * (1 - TOLERANCE))
    highest = _first(least, most, lambda rate: done(rate) > wanted * (1 + TOLERANCE))
    return min(max(known.cpu_bytes_per_s, lowest), highest), memory, 1.0


def _first(low: float, high: float, reached: Callable[[float], bool]) -> float:
    """Return the lowest value at which `reached` is true, by bisection; `high` if it is true there only, or never."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
