"""Rates from timelines: learns from a session's steps what its lanes really reach.

`observe` returns the rates that one step shows, `typical` the medians over a few steps. "Known" rates are those
before the step; they stay where the step does not show others.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from offload.plan import GpuRates, PathRates, Plan, Rates
from offload.plan.cost import slower
from offload.plan.rates import UPDATE_MEMORY_COST, Direction, cpu_speed
from offload.schedule.timeline import ENGINE, Interval

LEAST_BYTES = 1 << 20
"""A lane that moved less than this in a step does not show its bandwidth."""

HISTORY = 3
"""Steps of which a rate is the median: one outlier changes nothing, a lasting change shows in its second step."""

LEARNT = ("_bytes_per_s", "memory_cost", "latency_s", "at_once", "reaction_s", "operation_s", "begin_s")
"""The ends of the names of those fields of `Rates` and its parts that are learnt from steps."""

IMPOSSIBLE = 0.05
"""Known memory costs count as wrong if the CPU has updated more bytes than they allow, by more than this part."""

LEAST_SHOWN = 0.05
"""The part of its busy time for which a direction must be alone, and beside the other, to show these two rates."""

LEAST_KEPT, LEAST_TOGETHER = 0.05, 1.0
"""Bounds for what steps show of a path's directions.

Each direction keeps a part of its rate alone while the other works: at least `LEAST_KEPT`. The parts of both sum to
at least `LEAST_TOGETHER`, as if they took turns, or to what was known if that is less. A step may seem to show less,
as it is a matter of chance which operations met.
"""

REFINEMENTS = 30
"""Repetitions in `_show_direction`, enough for its rates to converge."""

BISECTIONS = 40
"""Halvings of the interval in `_lowest`."""

TOLERANCE = 1e-6
"""Relative differences below this are rounding."""


def lane_totals(timeline: Sequence[Interval]) -> Mapping[str, tuple[int, float]]:
    """Return, for each lane, the bytes that it moved and the seconds in which it was busy (see `_busy_spans`)."""
    return _totals(timeline, _busy_spans(timeline))


class _LaneTotal(NamedTuple):
    """What a lane did in a step: its bytes, and the seconds in which it was busy."""

    nbytes: int
    busy_s: float

    @property
    def shows_rate(self) -> bool:
        """Whether the lane moved enough bytes to show its bandwidth."""
        return self.nbytes >= LEAST_BYTES and self.busy_s > 0

    def rate(self, known: float) -> float:
        """Return the bytes a second that the lane reached; the known rate if it moved too little to show its own."""
        return self.nbytes / self.busy_s if self.shows_rate else known


_IDLE = _LaneTotal(0, 0.0)
"""The total of a lane that did nothing."""


def _totals(
    timeline: Sequence[Interval], spans: Mapping[str, Sequence[tuple[float, float]]]
) -> dict[str, _LaneTotal]:
    """Return, for each lane, its bytes and its busy seconds; `spans` are its busy times, from `_busy_spans`."""
    nbytes: dict[str, int] = {}
    for interval in timeline:
        nbytes[interval.lane] = nbytes.get(interval.lane, 0) + interval.nbytes
    return {
        lane: _LaneTotal(moved, sum(end_s - begin_s for begin_s, end_s in spans[lane]))
        for lane, moved in nbytes.items()
    }


@dataclass(frozen=True, slots=True)
class _Step:
    """What lanes did in a step, all by lane.

    Attributes:
        intervals: Its operations.
        spans: When it was busy: (begin, end), disjoint and in order.
        totals: Its bytes and busy seconds.
    """

    intervals: Mapping[str, Sequence[Interval]]
    spans: Mapping[str, Sequence[tuple[float, float]]]
    totals: Mapping[str, _LaneTotal]

    @classmethod
    def of(cls, timeline: Sequence[Interval]) -> _Step:
        """Sort a step's timeline by lanes."""
        intervals: dict[str, list[Interval]] = {}
        for interval in timeline:
            intervals.setdefault(interval.lane, []).append(interval)
        spans = _busy_spans(timeline)
        return cls(intervals, spans, _totals(timeline, spans))

    def show_direction(self, lane: str, other: str, known: Direction, latency_s: float) -> _Shown:
        """Return what the step shows of one direction of a path, or of a GPU's link; see `_show_direction`.

        Args:
            lane: The direction's lane, which has moved something.
            other: The other direction's lane.
            known: The direction's known rates.
            latency_s: The known latency of an operation.
        """
        return _show_direction(known, latency_s, self.intervals[lane], self.spans[lane], self.spans.get(other, ()))


def observe(known: Rates, timeline: Sequence[Interval]) -> Rates:
    """Return the rates that lanes reached in one step; a lane that did too little keeps its known rates.

    * A lane's rate is its bytes over its busy time, less latency. Each direction of a path has two rates, alone and
      beside the other direction. So has each of a GPU's link, if these two are known to differ.
    * The CPU's rate is that alone. What the CPU reached is corrected for the memory bandwidth that other lanes took,
      by their traffic in this step and their known `memory_cost`. If these costs would leave too little bandwidth for
      what the CPU did, they are lowered.
    * A path that moved too little to show a rate shows its latency: the time of an operation beside its bytes.
    * The engine's own intervals show the time of its thread; without any, that stays as it was known.
    """
    step = _Step.of(timeline)
    totals = step.totals
    paths = tuple(_path_rates(step, number, path) for number, path in enumerate(known.paths))
    gpu = _gpu_rates(step, known.gpu)
    observed = dataclasses.replace(known, paths=paths, gpu=gpu, **_engine_rates(known, timeline))
    cpu_total = totals.get("cpu", _IDLE)
    if not cpu_total.shows_rate:  # then memory, which it shares, shows nothing, either
        return observed
    seconds_by_demand = _seconds_by_demand(step.spans, _demands(known, totals))
    cpu_bytes_per_s, memory_bytes_per_s, factor = _shared_memory(known, cpu_total.nbytes, seconds_by_demand)
    if factor < 1:  # the known costs would leave too little bandwidth for what the CPU did
        paths = tuple(dataclasses.replace(path, memory_cost=path.memory_cost * factor) for path in paths)
        gpu = dataclasses.replace(gpu, memory_cost=gpu.memory_cost * factor)
    return dataclasses.replace(
        observed, cpu_bytes_per_s=cpu_bytes_per_s, memory_bytes_per_s=memory_bytes_per_s, paths=paths, gpu=gpu
    )


def _demands(known: Rates, totals: Mapping[str, _LaneTotal]) -> dict[str, float]:
    """Return, for each lane but the CPU, the memory bandwidth that it takes while it is busy, in bytes a second.

    That is its rate in this step, or its known rate if it did too little, times its known `memory_cost`.
    """
    demands = {}
    for number, path in enumerate(known.paths):
        for verb, rates in (("read", path.read), ("write", path.write)):
            lane = f"{verb}:{number}"
            demands[lane] = totals.get(lane, _IDLE).rate(rates.beside) * path.memory_cost
    for lane, (rate, cost) in known.gpu.lanes.items():
        demands[lane] = totals.get(lane, _IDLE).rate(rate) * cost
    return demands


def _path_rates(step: _Step, number: int, path: PathRates) -> PathRates:
    """Return the rates that a step shows of a path; `number` is the path's, `path` its known rates."""
    # All by direction, "read" and "write": its known rates, its lane, and the other direction's lane.
    known = {"read": path.read, "write": path.write}
    lanes = {verb: f"{verb}:{number}" for verb in known}
    others = {"read": lanes["write"], "write": lanes["read"]}
    shown = {
        verb: step.show_direction(lanes[verb], others[verb], rates, path.latency_s)
        for verb, rates in known.items()
        if step.totals.get(lanes[verb], _IDLE).shows_rate
    }
    # The parts of their rates alone that directions keep beside each other: as known, and as shown where they are.
    known_parts = {verb: rates.rate_share_beside for verb, rates in known.items()}
    kept_parts = known_parts | {verb: each.kept for verb, each in shown.items()}
    # Which operations met is a matter of chance: parts whose sum is too small are raised (see `LEAST_TOGETHER`).
    factor = max(1.0, min(LEAST_TOGETHER, sum(known_parts.values())) / sum(kept_parts.values()))
    directions = {verb: each.rates(min(1.0, factor * kept_parts[verb])) for verb, each in shown.items()}
    # Fields of `PathRates` by their names.
    beside = {f"{verb}_bytes_per_s": rates.beside for verb, rates in directions.items()}
    alone = {f"{verb}_alone_bytes_per_s": rates.alone for verb, rates in directions.items()}
    used = {lanes[verb]: rates for verb, rates in known.items() if lanes[verb] in step.intervals}  # by lane
    # A step shows no more operations at once than the engine asked for: never go below the known number.
    together = max((path.at_once, *(at_once(step.intervals[lane]) for lane in used)))
    # Directions that moved much keep the known latency, or less if it would be more than half of their busy time.
    latency_s = min((each.idle_s / each.count for each in shown.values()), default=path.latency_s)
    if used and not shown:  # too little was moved to show a rate: busy time beyond bytes at known rates is latency
        count = sum(len(step.intervals[lane]) for lane in used)
        moving_s = sum(step.totals[lane].nbytes / rates.alone for lane, rates in used.items())
        latency_s = max(0.0, sum(step.totals[lane].busy_s for lane in used) - moving_s) / count
    return dataclasses.replace(path, latency_s=latency_s, at_once=together, **beside, **alone)


def _gpu_rates(step: _Step, known: GpuRates) -> GpuRates:
    """Return the rates that a step shows of a GPU and its link; `known` without a GPU, which has no lanes."""
    # The rates of all lanes as if directions of the link did not hinder each other; corrected below where they do.
    gpu = known.reaching({lane: step.totals.get(lane, _IDLE).rate(rate) for lane, (rate, _) in known.lanes.items()})
    for lane, other, direction in (("h2d", "d2h", known.h2d), ("d2h", "h2d", known.d2h)):
        if direction.is_hindered and step.totals.get(lane, _IDLE).shows_rate:
            # Which copies met is a matter of chance, so the proportion of both rates stays as it was known.
            rates = step.show_direction(lane, other, direction, 0.0).rates(direction.rate_share_beside)
            gpu = gpu.reaching({lane: rates.beside, f"{lane}_alone": rates.alone})
    return gpu


def as_on_fastest(timeline: Sequence[Interval], plan: Plan, rates: Rates) -> Sequence[Interval]:
    """Return a timeline as if all state lay on the fastest memory node, whose rates are those that are learnt.

    Operations keep their times. One on state of a slower node gets the bytes that it would have moved in that time
    on the fastest node. The timeline is unchanged if there is only one node.
    """
    # Subgroup and factor for its bytes, by lane and label of the intervals that are about its state.
    factors = {(lane, f"subgroup {n}"): (n, factor) for (lane, n), factor in slower(plan, rates).items()}
    if not factors:
        return timeline

    def convert(interval: Interval) -> Interval:
        """Return an interval, with more bytes if it is about state on a slower node."""
        number_and_factor = factors.get((interval.lane, interval.label))
        if number_and_factor is None:
            return interval
        number, factor = number_and_factor
        is_state = interval.nbytes == plan.layout.subgroups[number].state_bytes  # else weights, or gradients
        return interval._replace(nbytes=round(interval.nbytes * factor)) if is_state else interval

    return [convert(interval) for interval in timeline]


def typical(history: Sequence[Rates]) -> Rates:
    """Return the median of each rate over the last `HISTORY` observations; `history` has at least one."""
    recent = history[-HISTORY:]

    def median_of(parts: Sequence[Any]) -> Any:
        """Return the last of several dataclasses, with the median over all in each field that is learnt."""
        names = [field.name for field in dataclasses.fields(parts[-1]) if field.name.endswith(LEARNT)]
        medians = {name: median(getattr(part, name) for part in parts) for name in names}
        return dataclasses.replace(parts[-1], **medians)

    paths = [median_of([rates.paths[number] for rates in recent]) for number in range(len(recent[-1].paths))]
    gpu = median_of([rates.gpu for rates in recent])
    medians: Rates = dataclasses.replace(median_of(recent), paths=tuple(paths), gpu=gpu)
    return medians


def _busy_spans(timeline: Sequence[Interval]) -> dict[str, list[tuple[float, float]]]:
    """Return, for each lane, when it was busy: (begin, end), disjoint and in order.

    A lane is busy while an operation is on it. The time between two operations counts, too, if the second had been
    handed to the lane before the first ended: then only the lane's thread had not got a core yet. It does not count
    if the engine's thread was still at work on other things, and handed the second over later (`_handed_s`).
    """
    turns = _turns(timeline)
    spans: dict[str, list[tuple[float, float]]] = {}
    for interval in sorted(timeline, key=lambda item: item.started_s):
        lane = spans.setdefault(interval.lane, [])
        if lane and _handed_s(interval, turns) <= lane[-1][1]:  # it goes on with the last span
            lane[-1] = lane[-1][0], max(lane[-1][1], interval.finished_s)
        else:
            lane.append((interval.started_s, max(interval.started_s, interval.finished_s)))
    return spans


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a step shows of one direction of a path, or of a GPU's link.

    Attributes:
        kept: The part of its rate alone that the direction keeps while the other direction works.
        nbytes: Bytes that it moved.
        beside_s: Seconds for which it was busy while the other direction was busy, too.
        alone_s: Seconds for which it was busy and the other was not.
        idle_s: Seconds of `beside_s` and `alone_s` together that were latency: at most half of them.
        count: Number of its operations.
    """

    kept: float
    nbytes: float
    beside_s: float
    alone_s: float
    idle_s: float
    count: int

    def rates(self, kept: float) -> Direction:
        """Return the rates with which the direction moved its bytes, if it keeps the part `kept` beside the other.

        It moves `alone` bytes a second alone, and `kept * alone` beside the other direction, so nbytes =
        (kept * beside_s + alone_s) * alone. That is solved for `alone`, with both times reduced by the share of them
        that was latency, idle_s / busy_s.
        """
        busy_s = self.beside_s + self.alone_s
        alone = self.nbytes / (kept * self.beside_s + self.alone_s) * busy_s / (busy_s - self.idle_s)
        return Direction(kept * alone, alone)


def _show_direction(
    known: Direction,
    latency_s: float,
    intervals: Sequence[Interval],
    spans: Sequence[tuple[float, float]],
    other_spans: Sequence[tuple[float, float]],
) -> _Shown:
    """Return what a step shows of one direction of a path or link: above all, the part of its rate that it keeps.

    The direction has one rate beside the other direction and one alone. An operation that was partly beside the other
    does not say how many of its bytes were moved then: they are divided in proportion to seconds times rate. So bytes
    depend on rates, and rates on bytes. Begin with the known part that is kept; divide the bytes, compute both rates
    from those of all operations, and repeat that until the rates converge. If a step hardly shows one of the two
    rates, the known part stays.

    Args:
        known: Its known rates.
        latency_s: The known latency of an operation.
        intervals: Its operations.
        spans: When it was busy.
        other_spans: When the other direction was busy.
    """
    nbytes, begins_s, ends_s = np.array([(i.nbytes, i.started_s, i.finished_s) for i in intervals]).T
    other_edges_s = np.array(other_spans).ravel() if other_spans else np.zeros(1)  # one edge bounds no span
    busy_s = sum(end_s - begin_s for begin_s, end_s in spans)
    span_begins_s, span_ends_s = np.array(spans).T
    both_busy_s = float(_seconds_within(other_edges_s, span_begins_s, span_ends_s).sum())
    # Seconds beside the other direction, and alone: of each operation (shape [2, operations]), and of the direction.
    beside_s = _seconds_within(other_edges_s, begins_s, ends_s)
    parts_s = np.array([beside_s, ends_s - begins_s - beside_s]).clip(0.0)
    totals_s = np.array([both_busy_s, busy_s - both_busy_s])
    kept = known.rate_share_beside
    shows_both = totals_s.min() >= LEAST_SHOWN * busy_s
    for _ in range(REFINEMENTS if shows_both else 0):
        weights = np.array([[kept], [1.0]]) * parts_s  # seconds times rate, in units of the rate alone
        moved = nbytes * weights / np.maximum(weights.sum(axis=0), TOLERANCE)  # bytes of each operation's two parts
        beside, alone = moved.sum(axis=1) / totals_s
        kept = float(np.clip(beside / max(alone, TOLERANCE), LEAST_KEPT, 1.0))
    idle_s = min(len(intervals) * latency_s, busy_s / 2)
    return _Shown(kept, float(nbytes.sum()), both_busy_s, busy_s - both_busy_s, idle_s, len(intervals))


def _seconds_within(edges_s: Any, from_s: Any, to_s: Any) -> Any:
    """Return how many seconds of some intervals of time lie within spans.

    Args:
        edges_s: The spans' edges, one array: begin, end, begin, end, ..., ascending.
        from_s: Where each interval begins, an array.
        to_s: Where each interval ends.
    """
    is_span = np.arange(len(edges_s) - 1) % 2 == 0  # every second gap between edges is one
    spent_s = np.concatenate(((0.0,), np.cumsum(np.diff(edges_s) * is_span)))  # within spans, up to each edge
    return np.interp(to_s, edges_s, spent_s) - np.interp(from_s, edges_s, spent_s)


def at_once(intervals: Sequence[Interval]) -> int:
    """Return the greatest number of operations of a lane that were under way together."""
    ends = sorted(interval.finished_s for interval in intervals)
    most = ended = 0
    # `started` and `ended` are how many operations have started, and have ended, by `started_s`.
    for started, started_s in enumerate(sorted(interval.started_s for interval in intervals), 1):
        while ends[ended] <= started_s and ended < started - 1:  # not this one: it is under way, however short
            ended += 1
        most = max(most, started - ended)
    return most


@dataclass(frozen=True, slots=True)
class _Turns:
    """The turns of the engine's thread: each from when it is woken until it waits again.

    Attributes:
        begins_s: When each turn began; ascending.
        ends_s: When each turn ended.
    """

    begins_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    def of(self, due_s: float) -> int | None:
        """Return the index of the turn that started an operation, which was due at `due_s`.

        That is the first turn that began then or later; None if there is none.
        """
        turn = bisect.bisect_left(self.begins_s, due_s)
        return turn if turn < len(self.begins_s) else None


def _turns(timeline: Sequence[Interval]) -> _Turns:
    """Return the engine's turns of a timeline, in order."""
    turns = sorted((i.started_s, i.finished_s) for i in timeline if i.lane == ENGINE)
    return _Turns(tuple(begin_s for begin_s, _ in turns), tuple(end_s for _, end_s in turns))


def _engine_rates(known: Rates, timeline: Sequence[Interval]) -> dict[str, Any]:
    """Return the engine's `reaction_s`, `operation_s` and `begin_s`, as far as a step shows them.

    * `reaction_s`: mean time from when an operation was due until an idle lane began it (`_reactions`), less the time
      for which the engine's thread worked meanwhile.
    * `operation_s`: the thread's time in all turns but the first, for each operation that these started. Of the turns
      after the last operation's end, one still belongs to the step: it takes in that end.
    * `begin_s`: the time of the first turn, less `operation_s` for each operation that it started.

    The last two are not learnt with a GPU whose calls have a known cost of their own (`GpuRates.call_s`).
    """
    turns = _turns(timeline)
    operations = sorted((i for i in timeline if i.lane != ENGINE), key=lambda item: item.started_s)
    learnt = {}
    reactions = _reactions(operations)
    if reactions:
        due_s, started_s = np.array(reactions).T
        edges_s = np.array([turns.begins_s, turns.ends_s]).T.ravel() if turns.begins_s else np.zeros(1)
        engine_s = _seconds_within(edges_s, due_s, started_s)
        learnt["reaction_s"] = float((started_s - due_s - engine_s).clip(0.0).mean())
    # Index of the first turn after the end of the last operation, which is the step's last turn.
    last = bisect.bisect_right(turns.begins_s, max((i.finished_s for i in operations), default=-math.inf))
    if last < 1 or known.gpu.call_s:  # no turn is known, or a GPU's calls have a cost of their own
        return learnt
    takes_s = np.subtract(turns.ends_s, turns.begins_s)
    first_count = sum(i.due_s is not None and turns.of(i.due_s) == 0 for i in operations)  # started in the first turn
    begin_s = float(takes_s[0])
    later_s = float(takes_s[1 : last + 1].sum())
    if len(operations) > first_count:
        learnt["operation_s"] = later_s / (len(operations) - first_count)
    else:  # no operations in later turns: all their time counts as the step's
        begin_s += later_s
    learnt["begin_s"] = max(0.0, begin_s - first_count * learnt.get("operation_s", known.operation_s))
    return learnt


def _reactions(operations: Sequence[Interval]) -> list[tuple[float, float]]:
    """Return (due, began) of each operation that became due while its lane was idle, in seconds.

    A path's two directions and a checkpoint's operations there count as one lane, as they share a device. A
    checkpoint's operations only keep the lane busy; they are not returned, as they wait for their turn anyway. Nor is
    an operation without `due_s`.

    Args:
        operations: Sorted by their start.
    """
    idle_from_s: dict[str, float] = {}  # when the last operation so far ended, by device
    reactions: list[tuple[float, float]] = []
    for interval in operations:
        device = interval.lane.rpartition(":")[2]  # a path's number, the same for all that it does; else the lane
        due_s = None if interval.lane.startswith(("save:", "copy:")) else interval.due_s
        if due_s is not None and due_s > idle_from_s.get(device, -math.inf):
            # A GPU's times are converted from its own clock, and may come out before the event that made it due.
            reactions.append((due_s, max(interval.started_s, due_s)))
        idle_from_s[device] = max(idle_from_s.get(device, -math.inf), interval.finished_s)
    return reactions


def _handed_s(interval: Interval, turns: _Turns) -> float:
    """Return when an operation was handed to its lane at the latest, in seconds.

    That is at the end of the engine's turn that started it, or when it began, if that was earlier. If no such turn is
    known, it is when the operation was due; without `due_s`, when it began.
    """
    if interval.due_s is None:
        return interval.started_s
    turn = turns.of(interval.due_s)
    return min(interval.due_s if turn is None else turns.ends_s[turn], interval.started_s)


def _seconds_by_demand(
    spans: Mapping[str, Sequence[tuple[float, float]]], demands: Mapping[str, float]
) -> dict[float, float]:
    """Return for how many seconds the CPU was busy beside each demand of the other lanes, by that demand.

    Args:
        spans: When each lane was busy.
        demands: Memory bandwidth that each lane but the CPU takes while it is busy, in bytes a second. The demand of
            the other lanes is the sum over those that are busy.
    """
    # Where a lane begins or ceases to be busy: the time; the change of `busy_cpu_lanes`; the change of the demand.
    edges: list[tuple[float, int, float]] = []
    for lane, lane_spans in spans.items():
        cpu_change = 1 if lane == "cpu" else 0
        demand = 0.0 if lane == "cpu" else demands.get(lane, 0.0)
        if demand or cpu_change:
            edges += [(begin_s, cpu_change, demand) for begin_s, _ in lane_spans]
            edges += [(end_s, -cpu_change, -demand) for _, end_s in lane_spans]
    seconds: dict[float, float] = {}
    last_s = 0.0
    busy_cpu_lanes = 0  # 1 while the CPU is busy, else 0
    demanded = 0.0
    # Between two edges nothing changes: that time counts for the demand since the first of them.
    for at_s, cpu_change, demand in sorted(edges):
        if busy_cpu_lanes:
            key = round(demanded)  # sums of the same lanes may differ in their last bits
            seconds[key] = seconds.get(key, 0.0) + at_s - last_s
        last_s = at_s
        busy_cpu_lanes += cpu_change
        demanded += demand
    return seconds


class _SharedMemory(NamedTuple):
    """What a step shows of the CPU and of the memory that it shares with the other lanes.

    Attributes:
        cpu_bytes_per_s: The CPU's rate alone: slowed down as `cpu_speed` says, it gives the bytes that the CPU
            updated in this step. Where memory was the limit all the time, many rates do so: of these it is the one
            nearest to the known rate. It is at least the rate that was reached beside the other lanes, and at most
            what the memory's bandwidth allows.
        memory_bytes_per_s: The memory's bandwidth: the known one, or what the update alone took if that is more.
        traffic_factor: Factor for the known traffic of the other lanes: 1, or less if with that traffic the CPU could
            not have updated so much.
    """

    cpu_bytes_per_s: float
    memory_bytes_per_s: float
    traffic_factor: float = 1.0


def _shared_memory(known: Rates, nbytes: int, seconds_by_demand: Mapping[float, float]) -> _SharedMemory:
    """Return what a step shows of the CPU and of its memory.

    Args:
        known: The known rates of both.
        nbytes: State bytes that the CPU updated.
        seconds_by_demand: Seconds of its work, by the memory bandwidth that the other lanes took meanwhile.
    """
    reached = nbytes / sum(seconds_by_demand.values())
    memory = max(known.memory_bytes_per_s, reached * UPDATE_MEMORY_COST)
    most = memory / UPDATE_MEMORY_COST  # the rate at which an update alone takes all of it
    if memory == math.inf:  # unknown: nothing slows the CPU down
        return _SharedMemory(reached, memory)

    def updated_bytes(rate: float, factor: float = 1.0) -> float:
        """Return the bytes that a CPU of this rate updates in the step beside `factor` times the demand."""
        return sum(s * rate * cpu_speed(rate, memory, factor * demand) for demand, s in seconds_by_demand.items())

    # If even the fastest CPU could not have updated so much, the demand is wrong: lower it as little as is needed.
    if updated_bytes(most) < nbytes * (1 - IMPOSSIBLE):
        rate = min(max(known.cpu_bytes_per_s, reached), most)
        less = _lowest(0.0, 1.0, lambda less: updated_bytes(rate, 1.0 - less) >= nbytes)
        return _SharedMemory(rate, memory, 1.0 - less)
    # `updated_bytes` grows with the rate until memory is the limit. Rates from `lowest` to `highest` give `wanted`.
    wanted = min(float(nbytes), updated_bytes(most))
    lowest = _lowest(reached, most, lambda rate: updated_bytes(rate) >= wanted * (1 - TOLERANCE))
    highest = _lowest(reached, most, lambda rate: updated_bytes(rate) > wanted * (1 + TOLERANCE))
    return _SharedMemory(min(max(known.cpu_bytes_per_s, lowest), highest), memory)


def _lowest(low: float, high: float, is_reached: Callable[[float], bool]) -> float:
    """Return the lowest value between `low` and `high` at which `is_reached` holds, by bisection; `high` if nowhere.

    `is_reached` has to hold at all greater values, too.
    """
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if is_reached(middle):
            high = middle
        else:
            low = middle
    return high
