"""The full probe: every rate that predictions are computed from, alone and beside each other.

It uses the same tiers and the same update kernel as a session; a rate is the median over rounds.

Non-goals: choosing anything from the rates; rates of several paths at work at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from offload._native import CompletionQueue
from offload.device.none import NO_LANES
from offload.errors import ConfigError
from offload.formats import EXACT_ADAMW, FORMATS
from offload.kernels import CpuUpdateKernel, StreamVariant
from offload.kernels.table import trial_bytes
from offload.layout import MAX_TILE_BYTES
from offload.measure.depth import tune_depth
from offload.measure.drive import drive, lane_rates
from offload.measure.gpu import GpuProbe, gpu_probe
from offload.measure.nodes import probe_nodes
from offload.measure.rates_file import Measurement, RatesFile, machine_facts, versions
from offload.measure.samples import FULL_ROUNDS, CpuProbe, PathProbe, Runs, medians_of, rates_of, update_name
from offload.measure.trial import trial_rates
from offload.measure.workbench import CHUNK_NUMEL, UPDATE_DEPTH, Slots, TrialState
from offload.memory.arenas import Arena, available_bytes
from offload.memory.nodes import memory_nodes
from offload.protocols import SECTOR_BYTES, Tier
from offload.tiers import StoreOptions, check_places, open_tier, parse_place, slot_bytes
from offload.units import format_bytes

LONGEST_RUN_S = 0.15
"""Most seconds of one run of a measurement."""

DISAGREEMENT = 0.2
"""Spread, as a part of the median, beyond which a warning says that runs disagree."""

UPDATE_NUMEL = 1 << 25
"""Elements that updates go over in turn: more than caches hold."""

PATH_DEPTH = 8
"""Transfers of one direction in flight on a path."""
PATH_SLOTS = 16
"""Slots that one direction uses, of each size of tiles."""
LADDER_BYTES = (SECTOR_BYTES, 16 * SECTOR_BYTES, 1 << 20)  # tiles whose times show the latency
GAUGE_BYTES = 1 << 20  # tiles that show whether a path is slow

_VARIANTS = {
    "plain": StreamVariant.PLAIN,
    "prefetch": StreamVariant.PREFETCH,
    "weight past caches": StreamVariant.WEIGHT_NONTEMPORAL,
    "weight past caches, prefetch": StreamVariant.WEIGHT_NONTEMPORAL | StreamVariant.PREFETCH,
    "tensor by tensor": StreamVariant.WEIGHT_NONTEMPORAL | StreamVariant.TENSOR_BY_TENSOR,
}
"""Ways to pass over memory, by name; the fastest shows the memory's bandwidth."""


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
        seconds: About how long it may take; with little, runs are short, but there are at least three rounds.
        threads: Most threads of the update; None for as many as this process may use.
        numel: Elements that the update goes over, in each format of state; None for more than caches hold, if there
            is memory for that.
        report: Called with the number of runs done, of all runs, and what is measured next.

    Returns:
        The content of a file, for `save_rates`.

    Raises:
        ConfigError: If a path cannot be used or has too little room.
        TierError: If a path fails.
        OffloadError: If there is not enough memory.
    """
    check_places(paths)
    threads = threads or len(os.sched_getaffinity(0))
    if numel is None:
        numel = _affordable_numel()
    with contextlib.ExitStack() as stack:
        queue = CompletionQueue()
        states = {}
        for form in FORMATS:
            states[form] = TrialState(EXACT_ADAMW.stored_in(form), numel, UPDATE_DEPTH, prefault=True)
            stack.callback(states[form].close)
        counts = thread_counts(threads)
        kernels = {count: stack.enter_context(CpuUpdateKernel(queue, count)) for count in counts}
        # The time of a run is short enough for the fewest rounds, and one that warms up, of all samples but a GPU's.
        # A path has four samples (`PathProbe.samples`).
        expected_samples = len(states) * len(counts) + len(_VARIANTS) + 4 * len(paths)
        fewest_rounds, _ = FULL_ROUNDS
        run_s = min(LONGEST_RUN_S, seconds / (fewest_rounds + 1) / expected_samples)
        # Each twice, as a pass negates the state.
        variants = {name: (variant, variant) for name, variant in _VARIANTS.items()}
        cpu = CpuProbe(Runs(queue, seconds=run_s / 2, most=4096), kernels, states, variants, least=4)
        probes = []
        for number, path in enumerate(paths):
            report(0, 1, f"opening {path}")  # nothing is done; how many runs there will be is not known yet
            probes.append(_path_probe(number, path, queue, stack, cpu, run_s))
        gpus = stack.enter_context(gpu_probe(cpu.rate))
        lanes: list[CpuProbe | PathProbe | GpuProbe] = [cpu, *probes, *gpus]
        measurements = medians_of([sample for lane in lanes for sample in lane.samples()], seconds, report)
        result = _result(measurements, counts, probes, gpus)
        kernel = kernels[counts[-1]]  # with the most threads
        link = gpus[0].lanes if gpus else NO_LANES
        nodes = probe_nodes(kernel, queue, memory_nodes(), numel * trial_bytes(EXACT_ADAMW), link)
        rates_of_trial = trial_rates(kernel, [probe.tier for probe in probes], queue, result.rates)
    # Only the engine's costs are taken of these: paths' latencies were measured above.
    costs = {name: getattr(rates_of_trial, name) for name in ("reaction_s", "operation_s", "begin_s")}
    return dataclasses.replace(result, rates=dataclasses.replace(result.rates, nodes=nodes, **costs))


def _affordable_numel() -> int:
    """Return `UPDATE_NUMEL`, or as many elements as a quarter of the available memory holds in all formats together.

    They are whole chunks, and at least `UPDATE_DEPTH` of these, however little memory there is.
    """
    item_bytes = sum(trial_bytes(EXACT_ADAMW.stored_in(form)) for form in FORMATS)
    most = available_bytes() // 4 // item_bytes
    return max(UPDATE_DEPTH * CHUNK_NUMEL, min(UPDATE_NUMEL, most)) // CHUNK_NUMEL * CHUNK_NUMEL


def thread_counts(most: int) -> list[int]:
    """Return the numbers of threads to measure the update with: 1 to 8, 12, 16, 24, ... below `most`, and `most`."""
    counts = set(range(1, min(most, 8) + 1)) | {most}
    doubled = 8
    while doubled < most:
        counts |= {count for count in (doubled, doubled * 3 // 2) if count < most}
        doubled *= 2
    return sorted(counts)


def _result(
    measurements: Mapping[str, Measurement],
    counts: Sequence[int],
    probes: Sequence[PathProbe],
    gpus: Sequence[GpuProbe],
) -> RatesFile:
    """Return the content of a file of rates.

    Args:
        measurements: What was measured, by name.
        counts: Numbers of threads that the update was measured with, ascending.
        probes: The paths' probes, in order.
        gpus: The GPU's probe; empty without a GPU.
    """
    by_format = {form: {count: measurements[update_name(form, count)].median for count in counts} for form in FORMATS}
    rates = rates_of(measurements, counts[-1], probes, gpus[0].memory_bytes if gpus else None)
    tiers = [probe.tier for probe in probes]
    facts = [parse_place(tier.path).facts() | {"io": str(getattr(tier, "io_backend", tier.name))} for tier in tiers]
    return RatesFile(
        machine=machine_facts(),
        versions=versions(),
        rates=rates,
        cpu_bytes_per_s=by_format,
        paths=tuple(facts),
        measurements=measurements,
        warnings=tuple(_warnings(measurements, tiers, facts)),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _warnings(
    measurements: Mapping[str, Measurement], tiers: Sequence[Tier], facts: Sequence[Mapping[str, object]]
) -> list[str]:
    """Return warnings about measurements whose runs disagree, and paths whose reads the page cache may serve."""
    warnings = []
    unsteady = [f"{name} ({m.spread:.0%})" for name, m in measurements.items() if m.spread > DISAGREEMENT]
    if unsteady:
        warnings.append(
            f"runs disagree by more than {DISAGREEMENT:.0%} of their median on {', '.join(unsteady)}; "
            "measure again when the machine is quieter"
        )
    for number, tier in enumerate(tiers):
        if tier.cached:
            where = f"path {number} ({facts[number]['path']})"
            warnings.append(f"{where}: there is no O_DIRECT, so its reads may have come from the page cache")
    return warnings


def _path_probe(
    number: int, path: str, queue: CompletionQueue, ends: contextlib.ExitStack, cpu: CpuProbe, run_s: float
) -> PathProbe:
    """Open a path as a session does, choose sizes of tiles for it, and return its probe.

    The probe has a region of slots for each size: half of the slots are read, and have been written when this
    returns; the others are for writes beside these reads.

    Args:
        number: The path's, for the names of measurements.
        path: The path, as the user wrote it.
        queue: Gets the path's completions.
        ends: Closes the path and frees memory.
        cpu: The probe of the update, which runs beside the path in one of the samples.
        run_s: Seconds of one run.

    Raises:
        ConfigError: The path cannot be used or has too little room.
    """
    arena = Arena(2 * PATH_DEPTH * MAX_TILE_BYTES, prefault=True)
    ends.callback(arena.close)
    sizes = [*LADDER_BYTES, MAX_TILE_BYTES]
    needed = sum(2 * PATH_SLOTS * slot_bytes(size) for size in sizes)
    tier = open_tier(path, uuid.uuid4(), queue, options=StoreOptions(extent_bytes=min(needed, 64 << 20)))
    ends.callback(tier.close)
    room = tier.free_bytes()  # before `tune_depth` writes slots: the regions take their place
    tune_depth(tier, queue, arena.address, arena.nbytes)
    affordable = _affordable_bytes(tier, queue, arena.address, run_s)
    # Of the largest tiles there are 2 * PATH_SLOTS; the smaller regions together take no more room than these.
    largest = min(MAX_TILE_BYTES, affordable, room // (4 * PATH_SLOTS) // SECTOR_BYTES * SECTOR_BYTES)
    if largest < LADDER_BYTES[1]:
        least = 4 * PATH_SLOTS * LADDER_BYTES[1]
        allowed = f"{format_bytes(room)} are free there and the probe needs {format_bytes(least)}; free some"
        raise ConfigError("paths", path, allowed)
    regions = []
    offset = 0
    # The largest size comes last, as `PathProbe` asks; of the others, those that are at most half as large.
    for index, size in enumerate([size for size in sizes if 2 * size <= largest] + [largest]):
        regions.append(Slots(tier, size, number=index, offset=offset))
        offset += 2 * PATH_SLOTS * slot_bytes(size)
    for region in regions:
        drive(queue, [region.load("write", range(PATH_SLOTS), arena.address)])
    runs = Runs(queue, seconds=run_s, most=8 * PATH_SLOTS)
    return PathProbe(number, runs, regions, PATH_SLOTS, PATH_DEPTH, arena.address, cpu)


def _affordable_bytes(tier: Tier, queue: CompletionQueue, address: int, run_s: float) -> int:
    """Return the size of tiles with which a run on this path takes about `run_s`, in bytes.

    It follows from the rate of a few writes, which this makes to the path's first slots.
    """
    gauge = Slots(tier, GAUGE_BYTES, number=len(LADDER_BYTES) + 1)  # a number that no region has
    if tier.free_bytes() < 2 * PATH_SLOTS * slot_bytes(GAUGE_BYTES):
        return MAX_TILE_BYTES  # no limit from here: the caller chooses a size by the little room that there is
    rate = lane_rates(drive(queue, [gauge.load("write", range(PATH_DEPTH), address)]))["write"]
    tile_bytes = int(rate * run_s / PATH_SLOTS) // SECTOR_BYTES * SECTOR_BYTES  # a run moves `PATH_SLOTS` or more
    return max(LADDER_BYTES[1], tile_bytes)
