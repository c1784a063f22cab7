"""The quick probe: a fraction of a second, so that a session's first prediction rests on measurements, too.

It uses the session's tiers, kernel and staging memory, before the session's first operation, while the content of
that memory is undefined. CPU and memory are measured once a process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from offload.device.lanes import GpuLanes
from offload.device.none import NO_LANES, Lanes
from offload.errors import OffloadError
from offload.formats import EXACT, EXACT_ADAMW, FORMATS, StateSpec
from offload.kernels import CpuUpdateKernel, StreamVariant
from offload.kernels.reference import TORCH_DTYPES
from offload.kernels.table import trial_bytes
from offload.kernels.whole import trial
from offload.layout import MAX_TILE_BYTES, SECTOR_NUMEL, Layout, Parameter, numels_by_format
from offload.measure.gpu import GpuProbe
from offload.measure.rates_file import Measurement
from offload.measure.samples import LONGEST_S, QUICK_ROUNDS, CpuProbe, PathProbe, Runs, best_of, rates_of, update_name
from offload.measure.trial import trial_rates
from offload.measure.workbench import CHUNK_NUMEL, UPDATE_DEPTH, Slots, TrialState
from offload.memory.arenas import Arena, available_bytes
from offload.plan import NO_GPU, GpuRates, Plan, Rates
from offload.plan.rates import mean_rate
from offload.protocols import SECTOR_BYTES, Queue, Tier
from offload.rules import UpdateRule
from offload.units import format_bytes

PROBE_TILES = 4
"""Tiles of a path that are read, and as many that are written."""

ENOUGH_BYTES = 512 << 20
"""Least bytes of state, gradients and weights that updates have to go over to measure memory rather than caches."""
CACHES = 3
"""And they have to be this many times the size of the last-level caches."""

SPARE_BYTES = 32 << 20
"""Memory that a probe may allocate beyond the plan of a small session."""

ALIGNMENT_BYTES = 16 << 20
"""Most bytes of a trial state beyond its elements."""

SHARE_OF_AVAILABLE = 8
"""A probe may allocate 1 / `SHARE_OF_AVAILABLE` of the memory that is still available."""

GPU_NUMEL = 1 << 24
"""Most elements of an update on a GPU: more than its caches hold."""

MOST_SIDE, MOST_NUMEL = 512, 1 << 18
"""Limits for the trial of a whole parameter: rows and columns of a matrix; elements of any other."""

PART_BESIDE = 0.1
"""Part of a pass that one run of the update makes beside a GPU's copies."""

SYSTEM_CPUS = Path("/sys/devices/system/cpu")
"""Where Linux describes caches."""

# `CpuProbe.variants`: one sample, of two passes over memory.
_VARIANTS = {
    "plain, then past caches": (StreamVariant.PLAIN, StreamVariant.WEIGHT_NONTEMPORAL | StreamVariant.PREFETCH)
}

log = logging.getLogger("offload")

_known: dict[tuple[object, ...], dict[str, Measurement]] = {}
"""Measurements of this process so far, by a key of all that they depend on.

With a key that `quick_probe` makes they are those of CPU and memory. With a GPU's name added to that key, they are
those of copies to and from this GPU beside the CPU's update, and the part of its rate that the update keeps then.
"""


def quick_probe(
    kernel: CpuUpdateKernel,
    tiers: Sequence[Tier],
    queue: Queue,
    address: int,
    plan: Plan,
    lanes: Lanes = NO_LANES,
    *,
    verify: bool = True,
) -> Rates:
    """Measure the rates of a session's lanes: the CPU's update, memory, the GPU, every path, and the engine.

    The update is measured with exact state, and with state in each format that the session has.

    Updates go over more memory than caches hold, if the session has that much and the machine has it to spare; the
    log says how much it was.

    Args:
        kernel: The session's kernel.
        tiers: The session's tiers, with nothing in any slot yet.
        queue: The session's; nothing else may report to it meanwhile.
        address: Staging memory, `plan.staging_bytes` long; its content is lost. 0 without any.
        plan: The session's.
        lanes: The session's, with nothing on them; nor may the caller's work be under way on the device.
        verify: Whether tiles are verified; see `TileRequest`.

    Raises:
        TierError: If a path fails.
        OffloadError: If the device fails, or it or the host has no memory for it.
    """
    layout = plan.layout
    staging = (address, plan.staging_bytes)
    numels = numels_by_format(layout.parameters, layout.state.format) or {EXACT: 1}  # without state: that of exact
    formats = sorted({EXACT, *numels}, key=FORMATS.index)
    measured: dict[str, Measurement] = {}
    gpu = NO_GPU
    for state_format in formats:
        with contextlib.ExitStack() as ends:
            spec = EXACT_ADAMW.stored_in(state_format)
            numel = _host_numel(plan, spec)
            cpus = frozenset(os.sched_getaffinity(0))
            key = (kernel.threads, cpus, kernel.instruction_set, state_format, numel)
            # `cpu` makes its probe, and allocates memory for that, when it is first called: not at all if everything
            # is known from an earlier probe.
            cpu = functools.cache(partial(_cpu_probe, kernel, queue, spec, numel, staging, ends))
            measured |= _ensure_measured(key, cpu, numel * trial_bytes(spec))
            if state_format == formats[0]:  # exact state: the GPU is measured once, beside the update of that
                gpu = lanes.measure_rates(partial(probe_gpu, cpu=cpu, key=key, threads=kernel.threads, plan=plan))
    paths: list[PathProbe] = []
    for number, tier in enumerate(tiers):
        with contextlib.ExitStack() as ends:
            slots = Slots(tier, tile_bytes=0, verify=verify)  # `_path_probe` chooses the size
            paths.append(_path_probe(number, slots, queue, plan, staging, ends))
            measured |= best_of(paths[-1].samples())
    cpu_rates = {each: measured[update_name(each, kernel.threads)].median for each in formats}
    rates = rates_of(measured, kernel.threads, paths)
    rates = replace(rates, cpu_bytes_per_s=mean_rate(cpu_rates, numels), gpu=gpu)
    return trial_rates(kernel, tiers, queue, rates, plan, staging)


def _ensure_measured(
    key: tuple[object, ...], cpu: Callable[[], CpuProbe], passed_bytes: int
) -> dict[str, Measurement]:
    """Return the measurements of CPU and memory that `_known` has under a key; take and log them if it has none.

    Args:
        key: The key.
        cpu: Returns the probe that takes them.
        passed_bytes: Bytes of memory that a pass goes over, for the log.
    """
    if key not in _known:
        _known[key] = best_of(cpu().samples())
        reached = ", ".join(f"{name} {format_bytes(each.median)}/s" for name, each in _known[key].items())
        sizes = format_bytes(passed_bytes), format_bytes(cache_bytes())
        log.info("%s, by passes over %s; last-level caches hold %s", reached, *sizes)
    return _known[key]


def _cpu_probe(
    kernel: CpuUpdateKernel,
    queue: Queue,
    spec: StateSpec,
    numel: int,
    staging: tuple[int, int],
    ends: contextlib.ExitStack,
) -> CpuProbe:
    """Return a probe of the session's kernel, after a first run of updates that warms up.

    Args:
        kernel: The kernel.
        queue: The kernel's.
        spec: What the state is that is updated, and how it is stored.
        numel: Its elements.
        staging: Address and size of memory for the state; other memory is allocated if it is too small.
        ends: Frees such other memory.
    """
    depth = max(1, min(UPDATE_DEPTH, numel // CHUNK_NUMEL))
    state = TrialState(spec, numel, depth, prefault=True, borrowed=staging)
    ends.callback(state.close)
    probe = CpuProbe(Runs(queue), {kernel.threads: kernel}, {spec.format: state}, _VARIANTS, state.chunks)
    probe.rate(spec.format)  # warms up
    return probe


def probe_gpu(
    lanes: GpuLanes, cpu: Callable[[], CpuProbe], key: tuple[object, ...], threads: int, plan: Plan
) -> GpuRates:
    """Measure copies, each way alone and both ways, updates on the GPU, and the CPU's update beside copies.

    Args:
        lanes: The GPU's lanes, with nothing on them.
        cpu: Returns the probe of the CPU's update.
        key: Key in `_known` of the CPU's measurements, which are there already.
        threads: Number of threads in these.
        plan: The session's.
    """
    state = plan.layout.device_state
    room_numel = lanes.device.free_bytes() // SHARE_OF_AVAILABLE // trial_bytes(state)
    session_numel = sum(subgroup.numel for subgroup in plan.layout.subgroups)
    numel = max(SECTOR_NUMEL, min(GPU_NUMEL, session_numel, room_numel))
    copy_bytes = CHUNK_NUMEL * trial_bytes(state) // 2  # host memory has two of these: as much as a chunk together
    key_beside = (*key, lanes.device.name)  # in `_known`, of what is measured beside the CPU's update
    update = None if key_beside in _known else lambda: cpu().rate(part=PART_BESIDE)  # None: that is known
    while True:
        try:
            opened = GpuProbe(lanes, state, numel, LONGEST_S / QUICK_ROUNDS, update, copy_bytes=copy_bytes)
            break
        except OffloadError:  # perhaps of too little memory, as what is free may be in pieces: try half as much
            if numel == SECTOR_NUMEL:
                raise
            numel = max(numel // 2, SECTOR_NUMEL)
    with contextlib.closing(opened) as probe:
        probe.warm_up()
        measured = best_of(probe.samples())
    # "... beside cpu" and "gpu/speed of cpu" are known from now on.
    _known.setdefault(key_beside, {name: value for name, value in measured.items() if name.endswith("cpu")})
    # `measured` lacks what was known already. `gpu_bytes` 0: the size of the GPU's memory is not needed.
    return rates_of({**_known[key], **measured, **_known[key_beside]}, threads, gpu_bytes=0).gpu


def _host_numel(plan: Plan, spec: StateSpec) -> int:
    """Return the elements that updates go over: more than caches hold, if the session and the machine have the room.

    They take no more memory than the session: they lie in its staging memory, or in memory of their own, which may be
    as much as the session is about to allocate besides (`other_bytes`). For a small session it may be as much as both
    together, up to `SPARE_BYTES`.
    """
    other_bytes = plan.host_bytes - plan.overhead_bytes - plan.staging_bytes
    both_bytes = min(other_bytes + plan.staging_bytes, SPARE_BYTES)
    session_bytes = max(other_bytes, plan.staging_bytes - ALIGNMENT_BYTES, both_bytes)
    nbytes = min(enough_bytes(), session_bytes, available_bytes() // SHARE_OF_AVAILABLE)
    numel = nbytes // trial_bytes(spec)
    unit = CHUNK_NUMEL if numel >= CHUNK_NUMEL else SECTOR_NUMEL
    return max(SECTOR_NUMEL, numel // unit * unit)


def enough_bytes() -> int:
    """Return the bytes that a pass has to go over to measure memory rather than caches."""
    return max(ENOUGH_BYTES, CACHES * cache_bytes())


def cache_bytes() -> int:
    """Return the bytes of the last-level caches of the CPUs that this process may use; 0 if unknown."""
    sizes: dict[str, int] = {}  # by the CPUs that share a cache, as text, so that each cache counts once
    for cpu in os.sched_getaffinity(0):
        with contextlib.suppress(OSError, ValueError):  # what Linux does not describe is not counted
            caches = (SYSTEM_CPUS / f"cpu{cpu}" / "cache").glob("index*")
            last = max(caches, key=lambda cache: int((cache / "level").read_text()))
            nbytes = _parse_size((last / "size").read_text().strip())
            sizes[(last / "shared_cpu_list").read_text()] = nbytes
    return sum(sizes.values())


def _parse_size(text: str) -> int:
    """Return the bytes of a size as Linux writes it for a cache, such as "32768K"."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = text[:-1], text[-1:]
    return int(number) * units[unit] if unit in units else int(text)


def _path_probe(
    number: int, slots: Slots, queue: Queue, plan: Plan, staging: tuple[int, int], ends: contextlib.ExitStack
) -> PathProbe:
    """Return a probe of a path, with tiles as large as staging memory allows, and as many as the path has room for.

    Args:
        number: The path's.
        slots: Slots on the path, of any size: this chooses one.
        queue: Gets the path's completions.
        plan: The session's.
        staging: Address and size of staging memory; other memory is allocated if it is too small.
        ends: Frees such other memory.
    """
    address, staging_bytes = staging
    # Without staging memory no state is streamed: the path is for other uses, such as checkpoints and parked state.
    memory_bytes = staging_bytes or min(SPARE_BYTES, 2 * PROBE_TILES * plan.largest_tile_bytes)
    tile_bytes = memory_bytes // (2 * PROBE_TILES) // SECTOR_BYTES * SECTOR_BYTES
    slots = replace(slots, tile_bytes=min(MAX_TILE_BYTES, max(tile_bytes, SECTOR_BYTES)))
    room = slots.tier.free_bytes() // (slots.tile_bytes + SECTOR_BYTES)  # number of slots
    count = max(1, min(PROBE_TILES, room // 2))  # half are read, half are written
    if staging_bytes < 2 * count * slots.tile_bytes:
        memory = Arena(2 * count * slots.tile_bytes)
        ends.callback(memory.close)
        address = memory.address
    return PathProbe(number, Runs(queue), [slots], slots=count, depth=count, address=address, is_split=room > 1)


def with_whole_parameters(rates: Rates, layout: Layout) -> Rates:
    """Return rates in which the CPU's rate also accounts for rules of whole parameters, which no kernel updates.

    For each such parameter a trial, a small tensor, is updated and timed. The parameter's own update is estimated to
    take longer by the ratio of their work; the first steps correct that (`offload.measure.observe`). The new rate is
    all state bytes over the seconds of kernels and of these updates.
    """
    subgroups = layout.subgroups
    whole = [subgroup for subgroup in subgroups if subgroup.state.rule.is_whole]
    if not whole:
        return rates
    cut_bytes = sum(subgroup.state_bytes for subgroup in subgroups if not subgroup.state.rule.is_whole)
    seconds = cut_bytes / rates.cpu_bytes_per_s
    known_s: dict[tuple[object, ...], float] = {}  # of an update, by rule, shape and dtype
    for subgroup in whole:
        for segment in subgroup.segments:
            parameter = layout.parameters[segment.parameter]
            key = subgroup.state.rule, parameter.shape, parameter.dtype
            if key not in known_s:
                # If the trial fails, count as if a kernel updated an equal part of the subgroup's state.
                known_s[key] = subgroup.state_bytes / len(subgroup.segments) / rates.cpu_bytes_per_s
                with contextlib.suppress(Exception):  # a class may not take a smaller tensor with these attributes
                    known_s[key] = _estimate_update_s(subgroup.state.rule, parameter)
            seconds += known_s[key]
    return replace(rates, cpu_bytes_per_s=layout.state_bytes / seconds)


def _estimate_update_s(rule: UpdateRule, parameter: Parameter) -> float:
    """Return the estimated seconds of a whole parameter's update: a trial's, times the ratio of their work."""
    shape = parameter.shape or (parameter.numel,)
    small_shape = _smaller(shape)
    update = trial(rule, small_shape, TORCH_DTYPES[parameter.dtype], parameter.group, parameter.name)
    return _best_s(update) * rule.work(shape) / rule.work(small_shape)


def _smaller(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter's trial.

    A matrix has at most `MOST_SIDE` rows and columns. Another tensor is cut along its first dimension, to at most
    `MOST_NUMEL` elements, or to size 1 there.
    """
    if len(shape) == 2:
        return tuple(min(size, MOST_SIDE) for size in shape)
    if not shape:
        return shape
    first, *others = shape
    most_first = MOST_NUMEL // max(math.prod(others), 1)
    return (max(1, min(first, most_first)), *others)


def _best_s(update: Callable[[], None]) -> float:
    """Return the seconds of the fastest of `QUICK_ROUNDS` updates; the first may touch memory and import modules."""
    durations_s = []
    for _ in range(QUICK_ROUNDS):
        began_s = time.perf_counter()
        update()
        durations_s.append(time.perf_counter() - began_s)
    return min(durations_s)
