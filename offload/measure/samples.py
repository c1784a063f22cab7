"""What probes measure, as one list of samples, and the two efforts in which they take it.

A sample is one run of some measurements on a lane, alone or beside others. `CpuProbe` and `PathProbe` have those of
the update and of a path, `offload.measure.gpu.GpuProbe` those of a GPU. The quick effort (`best_of`) takes each a few
times in turn; the full one (`medians_of`) takes all once a round, in an order that begins with another one each time,
so that whatever else the machine does falls on all alike. `rates_of` makes rates of what either has found.

Not done here: opening lanes and choosing over how many bytes they are measured, which callers do.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from offload.formats import EXACT, StateFormat
from offload.kernels import CpuUpdateKernel, StreamVariant
from offload.measure.drive import Load, bytes_per_s, drive, lane_rates, rates_beside
from offload.measure.observe import at_once
from offload.measure.rates_file import Measurement
from offload.measure.workbench import Slots, TrialState, memory_cost
from offload.plan import NO_GPU, GpuRates, PathRates, Rates
from offload.plan.rates import UPDATE_MEMORY_COST
from offload.protocols import Queue, Tier
from offload.schedule.timeline import Interval
from offload.units import format_count

QUICK_ROUNDS = 3
LONGEST_S = 0.25
"""No further round of a sample that is taken quickly begins after this: a slow machine does not wait for all."""

FULL_ROUNDS = (3, 15)
"""Fewest and most rounds; in between, as many as there is time for."""

MOST_GPU_MEMORY_COST = 2.0
"""Copies of a GPU read or write each byte once: what runs find beyond this is noise."""

RATE, SPEED, SECONDS = "bytes/s", "of its rate alone", "s"
"""Units of measurements."""

Sample = tuple[str, Callable[[], Mapping[str, float]]]
"""What is measured, for whoever watches, and what takes one run of it and returns values by name."""

T = TypeVar("T")


def repeated(sample: Callable[[], T]) -> list[T]:
    """Take a sample a few times. The best counts: other work on the machine only ever slows one down."""
    taken, until_s = [sample()], time.perf_counter() + LONGEST_S
    while len(taken) < QUICK_ROUNDS and time.perf_counter() < until_s:
        taken.append(sample())
    return taken


def best_of(samples: Iterable[Sample]) -> dict[str, Measurement]:
    """Return, for each sample, the rates of its best run, all rates together; what is no rate has its median."""
    found = {}
    for _, sample in samples:
        runs = repeated(sample)
        best = max(runs, key=lambda run: sum(value for name, value in run.items() if _unit(name) == RATE))
        for name, value in best.items():
            each = summarise([run[name] for run in runs], _unit(name))
            found[name] = Measurement(value, each.spread, each.runs, RATE) if each.unit == RATE else each
    return found


def medians_of(
    samples: Sequence[Sample], seconds: float, report: Callable[[int, int, str], None]
) -> dict[str, Measurement]:
    """Return medians over all rounds but the first, which warms up and shows how many there is time for."""
    found: dict[str, list[float]] = {}
    started_s = time.monotonic()
    least, most = FULL_ROUNDS
    rounds, done, number = least, 0, 0
    while number <= rounds:
        first = number % len(samples)
        for what, sample in [*samples[first:], *samples[:first]]:
            report(done, (rounds + 1) * len(samples), what)
            values = sample()
            done += 1
            for name, value in values.items():
                found.setdefault(name, [])
                if number:
                    found[name].append(value)
        number += 1
        # The warm-up is shorter or longer than the others, so the estimate is taken again after each round.
        left_s = seconds - (time.monotonic() - started_s)
        each_s = (time.monotonic() - started_s) / number
        rounds = max(least, min(most, number - 1 + int(max(left_s, 0.0) / each_s)))
    report(done, done, "memory nodes, and the engine's own work")
    return {name: summarise(values, _unit(name)) for name, values in found.items()}


def summarise(values: Sequence[float], unit: str) -> Measurement:
    """Return median and spread of a measurement's runs: the interquartile range (with few runs, the whole range)."""
    median = statistics.median(values)
    if len(values) >= 4:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low, high = min(values), max(values)
    return Measurement(median, (high - low) / median if median else 0.0, len(values), unit)


def _unit(name: str) -> str:
    return {"latency": SECONDS, "speed of cpu": SPEED}.get(name.rpartition("/")[2], RATE)


@dataclass
class Runs:
    """Runs of loads of about the wanted length: how many operations that is, each run of a name tells the next.

    Attributes:
        queue: What lanes report to.
        seconds: The length; 0 for runs that are as short as can be.
        most: Operations of a run at most.
    """

    queue: Queue
    seconds: float = 0.0
    most: int = 0
    counts: dict[str, int] = field(default_factory=dict, init=False)

    def run(self, name: str, least: int, loads: Callable[[int], Sequence[Load]]) -> list[Interval]:
        """Drive loads that have `least` operations or more."""
        count = max(least, self.counts.get(name, least))
        timeline = drive(self.queue, loads(count))
        took_s = max(each.finished_s for each in timeline) - min(each.started_s for each in timeline)
        self.counts[name] = min(self.most, round(count * self.seconds / max(took_s, 1e-9)))
        return timeline


@dataclass
class CpuProbe:
    """The update, by format of the state and number of threads, and the memory that it runs on.

    Attributes:
        runs: Drives the lane.
        kernels: By number of threads.
        states: What is updated, by format.
        variants: Passes over exact state that measure memory, by name: an even number, as one negates the state.
        least: Updates of one run, at least.
    """

    runs: Runs
    kernels: Mapping[int, CpuUpdateKernel]
    states: Mapping[StateFormat, TrialState]
    variants: Mapping[str, Sequence[StreamVariant]]
    least: int

    def samples(self) -> Iterator[Sample]:
        """Return what to measure."""
        for each in itertools.product(self.states, self.kernels):
            yield update_name(*each).replace("/", ", "), partial(self._update, *each)
        if EXACT in self.states:
            for name, variants in self.variants.items():
                yield "memory bandwidth", partial(self._stream, name, variants)

    def load(self, count: int | None, state_format: StateFormat = EXACT, threads: int | None = None) -> Load:
        """Return the update as a load, with the most threads if nothing is said."""
        return self.states[state_format].updates(self.kernels[threads or max(self.kernels)], count)

    def rate(self, state_format: StateFormat = EXACT, threads: int | None = None, part: float = 1.0) -> float:
        """Return the state bytes a second of the update with nothing beside it, in a part of `least` or more."""
        least = max(1, round(part * self.least))
        name = f"{state_format} {threads}"
        return lane_rates(self.runs.run(name, least, lambda count: [self.load(count, state_format, threads)]))["cpu"]

    def _update(self, state_format: StateFormat, threads: int) -> dict[str, float]:
        return {update_name(state_format, threads): self.rate(state_format, threads)}

    def _stream(self, name: str, variants: Sequence[StreamVariant]) -> dict[str, float]:
        return {f"memory/{name}": self.states[EXACT].stream_rate(self.kernels[max(self.kernels)], *variants)}


def update_name(state_format: StateFormat, count: int) -> str:
    """Return what the update with so many threads is called among measurements."""
    which = f" of {state_format.name}" if state_format.rounds else ""
    return f"update{which}/{format_count(count, 'thread')}"


@dataclass
class PathProbe:
    """One path: each direction alone, both at once and, where there is a `CpuProbe`, beside the update.

    Writes alone come first: they make what is read. Beside reads, writes are of slots and memory of their own.

    Attributes:
        number: Among paths.
        runs: Drives the path's lanes.
        regions: Slots of one size each, the largest last: its rates count, the others show the latency.
        slots: How many of each region a direction uses.
        depth: Transfers of one direction in flight.
        address: Memory for twice as many of the largest tiles.
        cpu: The update; None to leave that out.
        is_split: Whether regions have as many slots again for writes beside reads; else both are as they are alone.
        shares: Whether transfers of one direction have been under way together.
    """

    number: int
    runs: Runs
    regions: Sequence[Slots]
    slots: int
    depth: int
    address: int
    cpu: CpuProbe | None = None
    is_split: bool = True
    shares: bool = field(default=False, init=False)

    @property
    def tier(self) -> Tier:
        """The path."""
        return self.regions[-1].tier

    def samples(self) -> Iterator[Sample]:
        """Return what to measure."""
        name, path = f"path {self.number}", self.tier.path
        for verb in ("write", "read"):
            yield f"{path}: {verb}s alone", partial(self._alone, name, verb)
        yield f"{path}: reads and writes", partial(self._mixed, name)
        if self.cpu is not None:
            yield f"{path}: beside the update", partial(self._beside, name, self.cpu)

    def _loads(self, region: Slots, count: int, *verbs: str) -> list[Load]:
        """Return loads of some directions: the first of them moves tiles of a region's first slots."""
        halves = ((n, range(n * self.slots, (n + 1) * self.slots)) for n in range(len(verbs)))
        places = ((slots, self.address + n * self.depth * region.tile_bytes) for n, slots in halves)
        return [region.load(verb, *at, self.depth, count) for verb, at in zip(verbs, places, strict=True)]

    def _rates(self, region: Slots, *verbs: str) -> dict[str, float]:
        """Return what each direction reaches beside the others, with as many bytes each."""
        if len(verbs) > 1 and not self.is_split:
            return {verb: self._rates(region, verb)[verb] for verb in verbs}
        name = f"{'+'.join(verbs)} {region.tile_bytes}"
        timeline = self.runs.run(name, self.slots, lambda count: self._loads(region, count, *verbs))
        self.shares |= len(verbs) == 1 and at_once(timeline) > 1
        return rates_beside(timeline)

    def _alone(self, name: str, verb: str) -> dict[str, float]:
        return {f"{name}/{verb} alone": self._rates(self.regions[-1], verb)[verb]}

    def _mixed(self, name: str) -> dict[str, float]:
        """Return both rates with large tiles, and the latency that smaller ones show.

        A lane takes `latency + bytes / rate` for a tile; latency is what fits the times of all sizes best, operations
        overlapping as they do in a step.
        """
        found = [(region.tile_bytes, self._rates(region, "read", "write")) for region in self.regions]
        latencies = [fit_latency([(size, size / rates[verb]) for size, rates in found]) for verb in ("read", "write")]
        size, rates = found[-1]
        latency_s = min(statistics.mean(latencies), 0.5 * size / max(rates.values()))
        values = {f"{name}/{verb}": size / (size / rate - latency_s) for verb, rate in rates.items()}
        return values | {f"{name}/latency": latency_s}

    def _beside(self, name: str, cpu: CpuProbe) -> dict[str, float]:
        """Return what the update and the path reach beside each other."""

        def loads(count: int) -> list[Load]:
            return [*self._loads(self.regions[-1], count, "read", "write"), cpu.load(None)]

        alone, timeline = cpu.rate(), self.runs.run("beside", 2 * self.slots, loads)
        values = {f"{name}/{verb} beside cpu": bytes_per_s(timeline, verb) for verb in ("read", "write")}
        return values | {f"{name}/speed of cpu": bytes_per_s(timeline, "cpu") / alone}


def fit_latency(times: Sequence[tuple[int, float]]) -> float:
    """Return the latency of the line through (bytes, seconds) that is nearest in relative terms; at least 0."""
    if len(times) < 2:
        return 0.0
    rows = np.array([(1 / seconds, nbytes / seconds) for nbytes, seconds in times])
    (latency_s, _), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    return max(0.0, float(latency_s))


def rates_of(
    found: Mapping[str, Measurement], threads: int, paths: Sequence[PathProbe] = (), gpu_bytes: int | None = None
) -> Rates:
    """Return the rates of all lanes, with exact state.

    Args:
        found: What samples have found, by name.
        threads: With which the update is made.
        paths: Those that were measured.
        gpu_bytes: The size of the GPU's memory, 0 where unknown; None without one.
    """

    def value(name: str) -> float:
        return found[name].median

    def cost(lane: str, io_bytes_per_s: float) -> float:
        """Return what I/O takes of the memory for each byte; as plain DMA does where that was not measured."""
        speed = found.get(f"{lane}/speed of cpu")
        return memory_cost(memory, cpu, speed.median, io_bytes_per_s, speed.spread) if speed else 1.0

    # Memory gives no less than what any update of exact state takes.
    costs = {"memory": 1.0, "update": UPDATE_MEMORY_COST}
    memory = max(costs.get(name.partition("/")[0], 0.0) * each.median for name, each in found.items())
    cpu, rated, gpu = value(update_name(EXACT, threads)), list[PathRates](), NO_GPU
    for path in paths:
        name, together = f"path {path.number}", path.tier.depth if path.shares else 1
        whats = ("read", "write", "latency", "read alone", "write alone")
        read, write, latency_s, *alone = (value(f"{name}/{what}") for what in whats)
        rated.append(PathRates(read, write, latency_s, cost(name, read + write), alone[0], alone[1], together))
    if gpu_bytes is not None:
        update, *link = (value(f"gpu/{what}") for what in ("update", "h2d", "d2h", "h2d alone", "d2h alone"))
        of_memory = min(cost("gpu", link[0] + link[1]), MOST_GPU_MEMORY_COST)
        gpu = GpuRates(update, link[0], link[1], gpu_bytes, of_memory, 0.0, link[2], link[3])
    return Rates(cpu, tuple(rated), gpu, memory)
