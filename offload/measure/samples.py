"""The samples that probes take, and the two ways of taking them: quickly or fully.

A sample is one run of some measurements on a lane, alone or beside others. `CpuProbe` and `PathProbe` have those of
the update and of a path, `offload.measure.gpu.GpuProbe` those of a GPU. The quick way (`best_of`) takes each sample a
few times in turn. The full way (`medians_of`) takes all samples once a round, each round beginning with another one,
so that other work on the machine disturbs all alike. `rates_of` makes rates of the measurements of either.

Non-goals: opening lanes, and choosing the bytes that are measured, which callers do.
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
"""Runs of each sample, in the quick way."""
LONGEST_S = 0.25
"""Seconds after which the quick way begins no further run of a sample, for slow machines."""

FULL_ROUNDS = (3, 15)
"""Fewest and most rounds, in the full way; in between, as many as there is time for."""

MOST_GPU_MEMORY_COST = 2.0
"""Copies of a GPU read or write each byte once: measured costs beyond this are noise."""

RATE, SPEED, SECONDS = "bytes/s", "of its rate alone", "s"
"""Units of measurements."""

Sample = tuple[str, Callable[[], Mapping[str, float]]]
"""What is measured, in words for progress; and a function that makes one run and returns measured values by name."""

T = TypeVar("T")


def repeated(sample: Callable[[], T]) -> list[T]:
    """Make a few runs of a sample, and return what each has returned.

    Callers use the best of them: other work on the machine only ever slows a run down.
    """
    runs = [sample()]
    until_s = time.perf_counter() + LONGEST_S
    while len(runs) < QUICK_ROUNDS and time.perf_counter() < until_s:
        runs.append(sample())
    return runs


def best_of(samples: Iterable[Sample]) -> dict[str, Measurement]:
    """Take samples in the quick way: a few runs of each; return measurements by name.

    A rate is that of the sample's best run: the run whose rates have the largest sum, so that all its rates were
    measured together. It stands in place of the median. Other values, such as latencies, are medians over the runs.
    """
    measurements = {}

    def rate_sum(run: Mapping[str, float]) -> float:
        """Return the sum of a run's rates; its other values do not count."""
        return sum(value for name, value in run.items() if _unit(name) == RATE)

    for _, sample in samples:
        runs = repeated(sample)
        best = max(runs, key=rate_sum)
        for name, value in best.items():
            summary = summarise([run[name] for run in runs], _unit(name))
            is_rate = summary.unit == RATE
            measurements[name] = Measurement(value, summary.spread, summary.runs, RATE) if is_rate else summary
    return measurements


def medians_of(
    samples: Sequence[Sample], seconds: float, report: Callable[[int, int, str], None]
) -> dict[str, Measurement]:
    """Take samples in the full way: each once a round; return measurements by name.

    They are medians over all rounds but the first, which warms up and shows how many rounds there is time for.

    Args:
        samples: What to measure; each is taken once a round.
        seconds: About how long all rounds may take.
        report: See `full_probe`.
    """
    taken: dict[str, list[float]] = {}
    started_s = time.monotonic()
    least, most = FULL_ROUNDS
    rounds = least  # that count, so without the first one; estimated again after each
    done = 0
    number = 0
    while number <= rounds:  # round 0 warms up
        first = number % len(samples)  # each round begins with another sample
        for what, sample in [*samples[first:], *samples[:first]]:
            report(done, (rounds + 1) * len(samples), what)
            values = sample()
            done += 1
            for name, value in values.items():
                series = taken.setdefault(name, [])
                if number > 0:  # not of the round that warms up
                    series.append(value)
        number += 1
        # Rounds may take different times, so `rounds` is estimated again after each one.
        left_s = seconds - (time.monotonic() - started_s)
        each_s = (time.monotonic() - started_s) / number
        rounds = max(least, min(most, number - 1 + int(max(left_s, 0.0) / each_s)))
    report(done, done, "memory nodes, and the engine's own work")  # what `full_probe` measures after these samples
    return {name: summarise(values, _unit(name)) for name, values in taken.items()}


def summarise(values: Sequence[float], unit: str) -> Measurement:
    """Return the measurement that several runs make: their median and, as a part of that, their spread.

    The spread is the interquartile range; with fewer than four runs, the whole range.
    """
    median = statistics.median(values)
    if len(values) >= 4:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low, high = min(values), max(values)
    return Measurement(median, (high - low) / median if median else 0.0, len(values), unit)


def _unit(name: str) -> str:
    """Return the unit of a measurement, which follows from the last part of its name: "path 0/latency" -> "s"."""
    return {"latency": SECONDS, "speed of cpu": SPEED}.get(name.rpartition("/")[2], RATE)


@dataclass
class Runs:
    """Makes runs of loads that take about a wanted time.

    Runs have names. The time that one takes determines how many operations the next run of its name has.

    Attributes:
        queue: Gets the completions of the lanes.
        seconds: The wanted time of a run; 0 for runs with the least number of operations.
        most: Most operations of a run, unless its least number is greater.
        counts: Operations of the next run, by name.
    """

    queue: Queue
    seconds: float = 0.0
    most: int = 0
    counts: dict[str, int] = field(default_factory=dict, init=False)

    def run(self, name: str, least: int, loads: Callable[[int], Sequence[Load]]) -> list[Interval]:
        """Make a run and return its operations.

        Args:
            name: The run's.
            least: Least number of operations.
            loads: Returns the run's loads for a number of operations.
        """
        count = max(least, self.counts.get(name, least))
        timeline = drive(self.queue, loads(count))
        took_s = max(each.finished_s for each in timeline) - min(each.started_s for each in timeline)
        self.counts[name] = min(self.most, round(count * self.seconds / max(took_s, 1e-9)))
        return timeline


@dataclass
class CpuProbe:
    """Samples of the CPU's update, by format of the state and number of threads, and of the memory that it runs on.

    Attributes:
        runs: Makes the runs.
        kernels: The kernels to measure, by number of threads.
        states: The state that is updated, by format.
        variants: For each sample of memory, by name, its passes over exact state: an even number, as each one negates
            the state.
        least: Least number of updates in a run.
    """

    runs: Runs
    kernels: Mapping[int, CpuUpdateKernel]
    states: Mapping[StateFormat, TrialState]
    variants: Mapping[str, Sequence[StreamVariant]]
    least: int

    def samples(self) -> Iterator[Sample]:
        """Yield the samples to take."""
        for state_format, threads in itertools.product(self.states, self.kernels):
            what = update_name(state_format, threads).replace("/", ", ")
            yield what, partial(self._update, state_format, threads)
        if EXACT in self.states:
            for name, variants in self.variants.items():
                yield "memory bandwidth", partial(self._stream, name, variants)

    def load(self, count: int | None, state_format: StateFormat = EXACT, threads: int | None = None) -> Load:
        """Return a load of `count` updates (see `Load.count`); with the most threads if `threads` is None."""
        return self.states[state_format].updates(self.kernels[threads or max(self.kernels)], count)

    def rate(self, state_format: StateFormat = EXACT, threads: int | None = None, part: float = 1.0) -> float:
        """Measure the update alone: return the state bytes that it updates a second.

        Args:
            state_format: Format of the state.
            threads: Number of threads; None for the most.
            part: The run has at least this part of `least` updates.
        """
        least = max(1, round(part * self.least))
        name = f"{state_format} {threads}"
        return lane_rates(self.runs.run(name, least, lambda count: [self.load(count, state_format, threads)]))["cpu"]

    def _update(self, state_format: StateFormat, threads: int) -> dict[str, float]:
        """Take a sample of the update."""
        return {update_name(state_format, threads): self.rate(state_format, threads)}

    def _stream(self, name: str, variants: Sequence[StreamVariant]) -> dict[str, float]:
        """Take a sample of passes over all memory, with the most threads."""
        return {f"memory/{name}": self.states[EXACT].stream_rate(self.kernels[max(self.kernels)], *variants)}


def update_name(state_format: StateFormat, threads: int) -> str:
    """Return the name of an update's measurement, such as "update/8 threads"; for rounded state with its format."""
    of_format = f" of {state_format.name}" if state_format.rounds else ""
    return f"update{of_format}/{format_count(threads, 'thread')}"


@dataclass
class PathProbe:
    """Samples of one path: each direction alone, both at once and, where there is a `CpuProbe`, beside the update.

    Writes alone come first: reads need slots that were written. Beside reads, writes use slots and memory of their
    own.

    Attributes:
        number: The path's, for the names of measurements.
        runs: Makes the runs.
        regions: Slots of several sizes, the largest last: rates are those of the largest, and the others show the
            latency.
        slots: Number of slots of each region that a direction uses.
        depth: Transfers of one direction in flight.
        address: Memory for twice as many of the largest tiles.
        cpu: The probe of the update; None to leave the sample beside it out.
        is_split: Whether regions have as many slots again for writes beside reads; else both directions are measured
            alone only.
        shares: Whether transfers of one direction have been seen under way together: then they share its bandwidth.
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
        """Yield the samples to take."""
        name, path = f"path {self.number}", self.tier.path
        for verb in ("write", "read"):
            yield f"{path}: {verb}s alone", partial(self._alone, name, verb)
        yield f"{path}: reads and writes", partial(self._mixed, name)
        if self.cpu is not None:
            yield f"{path}: beside the update", partial(self._beside, name, self.cpu)

    def _loads(self, region: Slots, count: int, *verbs: str) -> list[Load]:
        """Return a load of `count` transfers for each verb, each with its own slots of a region and own memory."""
        loads = []
        for part, verb in enumerate(verbs):
            slots = range(part * self.slots, (part + 1) * self.slots)
            address = self.address + part * self.depth * region.tile_bytes
            loads.append(region.load(verb, slots, address, self.depth, count))
        return loads

    def _rates(self, region: Slots, *verbs: str) -> dict[str, float]:
        """Make a run of one direction, or of both beside each other; return each one's bytes a second, by its verb.

        All move equally many bytes. If regions have no slots for two directions at once, each is measured alone.
        Notes in `shares` whether transfers of one direction met.

        Args:
            region: The slots.
            verbs: The directions: "read", "write".
        """
        if len(verbs) > 1 and not self.is_split:
            return {verb: self._rates(region, verb)[verb] for verb in verbs}
        name = f"{'+'.join(verbs)} {region.tile_bytes}"
        timeline = self.runs.run(name, self.slots, lambda count: self._loads(region, count, *verbs))
        self.shares |= len(verbs) == 1 and at_once(timeline) > 1  # not of both directions, which overlap anyway
        return rates_beside(timeline)

    def _alone(self, name: str, verb: str) -> dict[str, float]:
        """Take a sample of one direction alone."""
        return {f"{name}/{verb} alone": self._rates(self.regions[-1], verb)[verb]}

    def _mixed(self, name: str) -> dict[str, float]:
        """Take a sample of both directions at once: their rates with the largest tiles, and the path's latency.

        A lane takes `latency + bytes / rate` for a tile. The latency is that of the line that fits the times of tiles
        of all sizes best (`fit_latency`), with operations overlapping as they do in a step. The rates returned are
        without it: bytes over a tile's time less the latency.
        """
        rates_by_size = [(region.tile_bytes, self._rates(region, "read", "write")) for region in self.regions]
        latencies = [
            fit_latency([(size, size / rates[verb]) for size, rates in rates_by_size]) for verb in ("read", "write")
        ]
        largest, rates = rates_by_size[-1]
        # At most half of the time of a large tile is latency: noise may show more.
        latency_s = min(statistics.mean(latencies), 0.5 * largest / max(rates.values()))
        values = {f"{name}/{verb}": largest / (largest / rate - latency_s) for verb, rate in rates.items()}
        return values | {f"{name}/latency": latency_s}

    def _beside(self, name: str, cpu: CpuProbe) -> dict[str, float]:
        """Take a sample of the path beside the update: its rates, and the part of its rate that the update keeps."""

        def loads(count: int) -> list[Load]:
            """Return `count` reads and as many writes, and updates that go on until all these have ended."""
            return [*self._loads(self.regions[-1], count, "read", "write"), cpu.load(None)]

        alone = cpu.rate()
        timeline = self.runs.run("beside", least=2 * self.slots, loads=loads)
        values = {f"{name}/{verb} beside cpu": bytes_per_s(timeline, verb) for verb in ("read", "write")}
        return values | {f"{name}/speed of cpu": bytes_per_s(timeline, "cpu") / alone}


def fit_latency(times: Sequence[tuple[int, float]]) -> float:
    """Return the latency of the line seconds = latency + bytes / rate that fits best, in seconds; at least 0.

    It is found by least squares. Each equation is divided by its seconds, so that relative errors are minimised.

    Args:
        times: Bytes of a tile and seconds that it takes, for several sizes. One size alone shows no latency: 0.
    """
    if len(times) < 2:
        return 0.0
    # For each size: 1 = latency * (1 / seconds) + (1 / rate) * (bytes / seconds).
    rows = np.array([(1 / seconds, nbytes / seconds) for nbytes, seconds in times])
    (latency_s, _), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    return max(0.0, float(latency_s))


def rates_of(
    found: Mapping[str, Measurement], threads: int, paths: Sequence[PathProbe] = (), gpu_bytes: int | None = None
) -> Rates:
    """Return the rates of all lanes that measurements show; the CPU's with exact state.

    Args:
        found: The measurements of all samples, by name.
        threads: Threads of the update whose rate counts.
        paths: The paths that were measured.
        gpu_bytes: The size of the GPU's memory, 0 where unknown; None without a GPU.
    """

    # The memory's bandwidth is at least the traffic of any pass or update that was measured: its bytes a second times
    # the memory traffic of each byte (`traffic`, by the first part of the measurement's name).
    traffic = {"memory": 1.0, "update": UPDATE_MEMORY_COST}
    memory = max(traffic.get(name.partition("/")[0], 0.0) * each.median for name, each in found.items())
    cpu = found[update_name(EXACT, threads)].median

    def value(name: str) -> float:
        """Return what was measured under a name."""
        return found[name].median

    def cost(lane: str, io_bytes_per_s: float) -> float:
        """Return the `memory_cost` of a path or of the GPU's link; that of plain DMA, 1, if it was not measured."""
        kept = found.get(f"{lane}/speed of cpu")  # the part of its rate that the update keeps beside that lane
        return memory_cost(memory, cpu, kept.median, io_bytes_per_s, kept.spread) if kept else 1.0

    def path_rates(path: PathProbe) -> PathRates:
        """Return the rates of one path."""
        name = f"path {path.number}"
        read, write = value(f"{name}/read"), value(f"{name}/write")
        return PathRates(
            read,
            write,
            latency_s=value(f"{name}/latency"),
            memory_cost=cost(name, read + write),
            read_alone_bytes_per_s=value(f"{name}/read alone"),
            write_alone_bytes_per_s=value(f"{name}/write alone"),
            at_once=path.tier.depth if path.shares else 1,
        )

    gpu = NO_GPU
    if gpu_bytes is not None:
        h2d, d2h = value("gpu/h2d"), value("gpu/d2h")
        gpu = GpuRates(
            value("gpu/update"),
            h2d,
            d2h,
            memory_bytes=gpu_bytes,
            memory_cost=min(cost("gpu", h2d + d2h), MOST_GPU_MEMORY_COST),
            h2d_alone_bytes_per_s=value("gpu/h2d alone"),
            d2h_alone_bytes_per_s=value("gpu/d2h alone"),
        )
    return Rates(cpu, tuple(path_rates(path) for path in paths), gpu, memory_bytes_per_s=memory)
