"""The full probe: every rate that predictions are computed from, alone and beside each other.

It goes through the same tiers and the same update kernel as a session. All measurements are taken once a round, in an
order that begins with another one each time, so that whatever else the machine does falls on all alike; a rate is the
median over the rounds.

Not done here: choosing anything from the rates; rates of several paths at work at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from offload._native import CompletionQueue
from offload.device.none import NO_LANES
from offload.errors import ConfigError
from offload.formats import EXACT, EXACT_ADAMW, FORMATS, StateFormat
from offload.kernels import CpuUpdateKernel, StreamVariant
from offload.kernels.table import trial_bytes
from offload.layout import MAX_TILE_BYTES
from offload.measure.depth import tune_depth
from offload.measure.drive import Load, bytes_per_s, drive, lane_rates, rates_beside
from offload.measure.gpu import GpuProbe, gpu_probe
from offload.measure.nodes import probe_nodes
from offload.measure.observe import at_once
from offload.measure.rates_file import Measurement, RatesFile, machine_facts, versions
from offload.measure.trial import trial_rates
from offload.measure.workbench import CHUNK_NUMEL, UPDATE_DEPTH, Slots, TrialState, memory_cost
from offload.memory.arenas import Arena, available_bytes
from offload.memory.nodes import memory_nodes
from offload.plan import NO_GPU, GpuRates, PathRates, Rates
from offload.plan.rates import UPDATE_MEMORY_COST
from offload.protocols import SECTOR_BYTES
from offload.schedule.timeline import Interval
from offload.tiers import StoreOptions, check_places, open_tier, parse_place, slot_bytes
from offload.units import format_bytes, format_count

ROUNDS = (3, 15)
"""Fewest and most rounds; in between, as many as there is time for."""

LONGEST_RUN_S = 0.15
"""What a run of one measurement takes where there is time for it."""

DISAGREEMENT = 0.2
"""Spread, as a part of the median, from which on a warning says that runs disagree."""

UPDATE_NUMEL = 1 << 25
"""Elements that the update works on in turn: more than caches hold."""

PATH_DEPTH = 8
PATH_SLOTS = 16
LADDER_BYTES = (SECTOR_BYTES, 16 * SECTOR_BYTES, 1 << 20)
GAUGE_BYTES = 1 << 20

_VARIANTS = {
    "plain": StreamVariant.PLAIN,
    "prefetch": StreamVariant.PREFETCH,
    "weight past caches": StreamVariant.WEIGHT_NONTEMPORAL,
    "weight past caches, prefetch": StreamVariant.WEIGHT_NONTEMPORAL | StreamVariant.PREFETCH,
    "tensor by tensor": StreamVariant.WEIGHT_NONTEMPORAL | StreamVariant.TENSOR_BY_TENSOR,
}

Sample = Callable[[], Mapping[str, float]]
"""Takes one run of some measurements; returns their values by name."""


def full_probe(
    paths: Sequence[str] = (),
    *,
    seconds: float = 20.0,
    threads: int | None = None,
    numel: int | None = None,
    report: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> RatesFile:
    """Measure this machine.

    Args:
        paths: Directories or "s3://bucket/prefix", as in `OffloadConfig.paths`. Each is written to, some hundred
            megabytes at most, and left as it was.
        seconds: About how long it may take; runs are short if it is little, but three rounds there are.
        threads: Most threads of the update; None for as many as this process may use.
        numel: Elements that the update works on, in each format of state; None for more than caches hold, if there is
            memory for that.
        report: Hears of progress: runs done, runs in all, and what is measured next.

    Returns:
        What `save_rates` writes.

    Raises:
        ConfigError: If a path cannot be used or has too little room.
        TierError: If a path fails.
        OffloadError: If there is not enough memory.
    """
    check_places(paths)
    threads = threads or len(os.sched_getaffinity(0))
    if numel is None:
        most = available_bytes() // 4 // sum(trial_bytes(EXACT_ADAMW.stored_in(form)) for form in FORMATS)
        numel = max(UPDATE_DEPTH * CHUNK_NUMEL, min(UPDATE_NUMEL, most)) // CHUNK_NUMEL * CHUNK_NUMEL
    with contextlib.ExitStack() as stack:
        queue = CompletionQueue()
        states = {}
        for form in FORMATS:
            states[form] = TrialState(EXACT_ADAMW.stored_in(form), numel, UPDATE_DEPTH, prefault=True)
            stack.callback(states[form].close)
        counts = thread_counts(threads)
        kernels = {count: stack.enter_context(CpuUpdateKernel(queue, count)) for count in counts}
        expected = len(states) * len(counts) + len(_VARIANTS) + 4 * len(paths)
        run_s = min(LONGEST_RUN_S, seconds / (ROUNDS[0] + 1) / expected)
        cpu = _CpuProbe(queue, kernels, states, run_s)
        probes = []
        for number, path in enumerate(paths):
            report(0, 1, f"opening {path}")
            probes.append(_PathProbe(number, path, queue, stack, cpu, run_s))
        gpus = stack.enter_context(gpu_probe(lambda: cpu.rate(cpu.most)))
        samples: list[tuple[str, Sample]] = [*cpu.samples()]
        for probe in probes:
            samples += probe.samples()
        samples += [sample for gpu in gpus for sample in gpu.samples()]
        found = _rounds(samples, seconds, report)
        measurements = {name: summarise(values, _unit(name)) for name, values in found.items()}
        result = _result(measurements, counts, probes, gpus)
        most_bytes, lanes = numel * trial_bytes(EXACT_ADAMW), gpus[0].lanes if gpus else NO_LANES
        nodes = probe_nodes(kernels[counts[-1]], queue, memory_nodes(), most_bytes, lanes)
        engine = trial_rates(kernels[counts[-1]], [probe.tier for probe in probes], queue, result.rates)
    costs = {name: getattr(engine, name) for name in ("reaction_s", "operation_s", "begin_s")}
    return dataclasses.replace(result, rates=dataclasses.replace(result.rates, nodes=nodes, **costs))


def thread_counts(most: int) -> list[int]:
    """Return the numbers of threads to measure the update with: all up to 8, then two an octave."""
    counts = set(range(1, min(most, 8) + 1)) | {most}
    octave = 8
    while octave < most:
        counts |= {count for count in (octave, octave * 3 // 2) if count < most}
        octave *= 2
    return sorted(counts)


def _update_name(state_format: StateFormat, count: int) -> str:
    """Return what the update with so many threads is called among measurements."""
    which = f" of {state_format.name}" if state_format.rounds else ""
    return f"update{which}/{format_count(count, 'thread')}"


def summarise(values: Sequence[float], unit: str) -> Measurement:
    """Return median and spread of a measurement's runs: the interquartile range (with few runs, the whole range)."""
    median = statistics.median(values)
    if len(values) >= 4:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    else:
        low, high = min(values), max(values)
    return Measurement(median, (high - low) / median if median else 0.0, len(values), unit)


def _rounds(
    samples: Sequence[tuple[str, Sample]], seconds: float, report: Callable[[int, int, str], None]
) -> dict[str, list[float]]:
    """Return the values of all rounds but the first, which warms up and shows how many rounds there is time for."""
    found: dict[str, list[float]] = {}
    started_s = time.monotonic()
    least, most = ROUNDS
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
    return found


def _unit(name: str) -> str:
    last = name.rpartition("/")[2]
    return {"latency": "s", "speed of cpu": "of its rate alone"}.get(last, "bytes/s")


def _result(
    measurements: dict[str, Measurement],
    counts: Sequence[int],
    probes: Sequence[_PathProbe],
    gpus: Sequence[GpuProbe],
) -> RatesFile:
    def median(name: str) -> float:
        return measurements[name].median

    by_format = {form: {count: median(_update_name(form, count)) for count in counts} for form in FORMATS}
    cpu = by_format[EXACT]
    streams = [median(f"memory/{name}") for name in _VARIANTS]
    memory = max(*streams, max(cpu.values()) * UPDATE_MEMORY_COST)

    def cost(name: str, io_bytes_per_s: float) -> float:
        speed = measurements[f"{name}/speed of cpu"]
        return memory_cost(memory, cpu[counts[-1]], speed.median, io_bytes_per_s, speed.spread)

    rated, facts = [], []
    for number, probe in enumerate(probes):
        name, tier = f"path {number}", probe.tier
        read, write, latency_s = (median(f"{name}/{what}") for what in ("read", "write", "latency"))
        alone = [median(f"{name}/{verb} alone") for verb in ("read", "write")]
        together = tier.depth if probe.shares else 1
        rated.append(PathRates(read, write, latency_s, cost(name, read + write), alone[0], alone[1], together))
        facts.append(parse_place(tier.path).facts() | {"io": str(getattr(tier, "io_backend", tier.name))})
    gpu = NO_GPU
    for on_gpu in gpus:
        h2d, d2h = median("gpu/h2d"), median("gpu/d2h")
        link = {f"{way}_alone_bytes_per_s": median(f"gpu/{way} alone") for way in ("h2d", "d2h")}
        gpu = GpuRates(median("gpu/update"), h2d, d2h, on_gpu.memory_bytes, cost("gpu", h2d + d2h), **link)
    rates = Rates(cpu[counts[-1]], tuple(rated), gpu, memory)
    warnings = []
    apart = [f"{name} ({m.spread:.0%})" for name, m in measurements.items() if m.spread > DISAGREEMENT]
    if apart:
        warnings.append(
            f"runs disagree by more than {DISAGREEMENT:.0%} of their median on {', '.join(apart)}; "
            "measure again when the machine is quieter"
        )
    for number, probe in enumerate(probes):
        if probe.tier.cached:
            where = f"path {number} ({facts[number]['path']})"
            warnings.append(f"{where}: there is no O_DIRECT, so its reads may have come from the page cache")
    return RatesFile(
        machine=machine_facts(),
        versions=versions(),
        rates=rates,
        cpu_bytes_per_s=by_format,
        paths=tuple(facts),
        measurements=measurements,
        warnings=tuple(warnings),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


class _Runs:
    """Runs of loads of about the wanted length: how many operations that is, each run of a name tells the next."""

    def __init__(self, queue: CompletionQueue, seconds: float, most: int) -> None:
        self._queue, self._seconds, self._most = queue, seconds, most
        self._counts: dict[str, int] = {}

    def run(self, name: str, least: int, loads: Callable[[int], Sequence[Load]]) -> list[Interval]:
        """Drive loads that have `least` operations or more."""
        count = max(least, self._counts.get(name, least))
        timeline = drive(self._queue, loads(count))
        took_s = max(each.finished_s for each in timeline) - min(each.started_s for each in timeline)
        self._counts[name] = min(self._most, round(count * self._seconds / max(took_s, 1e-9)))
        return timeline


class _CpuProbe:
    """The update by number of threads, and the memory that it runs on."""

    def __init__(
        self,
        queue: CompletionQueue,
        kernels: Mapping[int, CpuUpdateKernel],
        states: Mapping[StateFormat, TrialState],
        run_s: float,
    ) -> None:
        self._kernels = kernels
        self._states = states
        self._runs = _Runs(queue, run_s / 2, 4096)
        self.most = max(kernels)

    def samples(self) -> Iterator[tuple[str, Sample]]:
        """Return what to measure once a round."""
        for state_format, threads in itertools.product(self._states, self._kernels):
            name = _update_name(state_format, threads)
            yield name.replace("/", ", "), partial(self._update, name, threads, state_format)
        for label, variant in _VARIANTS.items():
            yield "memory bandwidth", partial(self._stream, label, variant)

    def load(self, threads: int, count: int | None, state_format: StateFormat = EXACT) -> Load:
        """Return the update as a load."""
        return self._states[state_format].updates(self._kernels[threads], count)

    def rate(self, threads: int, state_format: StateFormat = EXACT) -> float:
        """Return the state bytes that the update does a second, with nothing beside it."""
        name = _update_name(state_format, threads)
        return lane_rates(self._runs.run(name, 4, lambda count: [self.load(threads, count, state_format)]))["cpu"]

    def _update(self, name: str, threads: int, state_format: StateFormat) -> dict[str, float]:
        return {name: self.rate(threads, state_format)}

    def _stream(self, label: str, variant: StreamVariant) -> dict[str, float]:
        # Twice, as a stream negates the state.
        state, kernel = self._states[EXACT], self._kernels[self.most]
        return {f"memory/{label}": state.stream_rate(kernel, variant, variant)}


class _PathProbe:
    """One path, opened as a session opens it."""

    def __init__(
        self,
        number: int,
        path: str,
        queue: CompletionQueue,
        stack: contextlib.ExitStack,
        cpu: _CpuProbe,
        run_s: float,
    ) -> None:
        self._name = f"path {number}"
        self._path = path
        self._queue = queue
        self._cpu = cpu
        self._run_s = run_s
        self._runs = _Runs(queue, run_s, 8 * PATH_SLOTS)
        self._arena = Arena(2 * PATH_DEPTH * MAX_TILE_BYTES, prefault=True)
        stack.callback(self._arena.close)
        sizes = [*LADDER_BYTES, MAX_TILE_BYTES]
        needed = sum(2 * PATH_SLOTS * slot_bytes(size) for size in sizes)
        self.shares = False
        """Whether transfers of one direction have been under way together."""
        self.tier = open_tier(path, uuid.uuid4(), queue, options=StoreOptions(extent_bytes=min(needed, 64 << 20)))
        stack.callback(self.tier.close)
        room = self.tier.free_bytes()  # before slots are written: these are written again
        tune_depth(self.tier, queue, self._arena.address, self._arena.nbytes)
        largest = min(
            MAX_TILE_BYTES, self._affordable_bytes(), room // (4 * PATH_SLOTS) // SECTOR_BYTES * SECTOR_BYTES
        )
        if largest < LADDER_BYTES[1]:
            least = 4 * PATH_SLOTS * LADDER_BYTES[1]
            allowed = f"{format_bytes(room)} are free there and the probe needs {format_bytes(least)}; free some"
            raise ConfigError("paths", path, allowed)
        self._regions, offset = [], 0
        for index, size in enumerate([size for size in sizes if size < largest] + [largest]):
            self._regions.append(Slots(self.tier, size, index, offset))
            offset += 2 * PATH_SLOTS * slot_bytes(size)
        for region in self._regions:
            drive(queue, [region.load("write", range(PATH_SLOTS), self._arena.address)])

    def _affordable_bytes(self) -> int:
        """Return the largest tile of which a slow path moves a run's worth in the time for a run."""
        gauge = Slots(self.tier, GAUGE_BYTES, len(LADDER_BYTES) + 1)
        if self.tier.free_bytes() < 2 * PATH_SLOTS * slot_bytes(GAUGE_BYTES):
            return MAX_TILE_BYTES  # hardly any room: that decides
        rate = lane_rates(drive(self._queue, [gauge.load("write", range(PATH_DEPTH), self._arena.address)]))["write"]
        tile_bytes = int(rate * self._run_s / (2 * PATH_DEPTH)) // SECTOR_BYTES * SECTOR_BYTES
        return max(LADDER_BYTES[1], tile_bytes)

    def samples(self) -> Iterator[tuple[str, Sample]]:
        """Return what to measure once a round."""
        for verb in ("read", "write"):
            yield f"{self._path}: {verb}s alone", partial(self._alone, verb)
        yield f"{self._path}: reads and writes", self._mixed
        yield f"{self._path}: beside the update", self._beside

    def _load(self, verb: str, region: Slots, count: int) -> Load:
        """Return reads of the first half of a region's slots, or writes of the second."""
        half = int(verb == "write")
        slots = range(half * PATH_SLOTS, (half + 1) * PATH_SLOTS)
        return region.load(verb, slots, self._arena.address + half * PATH_DEPTH * MAX_TILE_BYTES, PATH_DEPTH, count)

    def _rates(self, verbs: Sequence[str], region: Slots) -> dict[str, float]:
        """Return what each direction reaches beside the others, with as many bytes each."""
        name = f"{'+'.join(verbs)} {region.tile_bytes}"
        loads = partial(self._loads, verbs, region)
        timeline = self._runs.run(name, 2 * PATH_DEPTH, loads)
        self.shares |= len(verbs) == 1 and at_once(timeline) > 1
        return rates_beside(timeline)

    def _loads(self, verbs: Sequence[str], region: Slots, count: int) -> list[Load]:
        return [self._load(verb, region, count) for verb in verbs]

    def _alone(self, verb: str) -> dict[str, float]:
        return {f"{self._name}/{verb} alone": self._rates([verb], self._regions[-1])[verb]}

    def _mixed(self) -> dict[str, float]:
        """Return both rates with large tiles, and the latency that smaller ones show.

        A lane takes `latency + bytes / rate` for a tile; latency is what fits the times of all sizes best, operations
        overlapping as they do in a step.
        """
        found = [(region.tile_bytes, self._rates(["read", "write"], region)) for region in self._regions]
        latencies = [fit_latency([(size, size / rates[verb]) for size, rates in found]) for verb in ("read", "write")]
        size, rates = found[-1]
        latency_s = min(statistics.mean(latencies), 0.5 * size / max(rates.values()))
        values = {f"{self._name}/{verb}": size / (size / rate - latency_s) for verb, rate in rates.items()}
        return values | {f"{self._name}/latency": latency_s}

    def _beside(self) -> dict[str, float]:
        """Return what the update and the path reach beside each other."""
        alone = self._cpu.rate(self._cpu.most)

        def loads(count: int) -> list[Load]:
            transfers = [self._load(verb, self._regions[-1], count) for verb in ("read", "write")]
            return [*transfers, self._cpu.load(self._cpu.most, None)]

        timeline = self._runs.run("beside", 4 * PATH_DEPTH, loads)
        values = {f"{self._name}/{verb} beside cpu": bytes_per_s(timeline, verb) for verb in ("read", "write")}
        return values | {f"{self._name}/speed of cpu": bytes_per_s(timeline, "cpu") / alone}


def fit_latency(times: Sequence[tuple[int, float]]) -> float:
    """Return the latency of the line through (bytes, seconds) that is nearest in relative terms; at least 0."""
    if len(times) < 2:
        return 0.0
    rows = np.array([(1 / seconds, nbytes / seconds) for nbytes, seconds in times])
    (latency_s, _), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    return max(0.0, float(latency_s))
