"""A probe of a fraction of a second, so that the first prediction rests on measurements too.

It uses the tiers and the kernel of the session that asks, before the session's first operation, and the session's
own staging memory, whose content is undefined at that moment. CPU and memory are measured once a process.
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
"""Of a path: read, and as many written."""

ENOUGH_BYTES = 512 << 20
"""State, gradients and weights that an update passes over to tell what memory gives rather than caches; or"""
CACHES = 3
"""so many times what the last-level caches hold, if that is more."""

SPARE_BYTES = 32 << 20
"""What a probe may take beyond the plan, where sessions are small."""

ALIGNMENT_BYTES = 16 << 20
"""What a trial state takes at most beyond its elements."""

SHARE_OF_AVAILABLE = 8
"""The part of the memory still available that a probe may take is one in so many."""

GPU_NUMEL = 1 << 24
"""Elements of an update on a GPU, where the session and the GPU's memory have so many: more than its caches hold."""

MOST_SIDE, MOST_NUMEL = 512, 1 << 18
"""Of the twin of a whole parameter: of its dimensions, where it is a matrix; of all its elements."""

PART_BESIDE = 0.1
"""The part of a pass that the update makes at a time beside copies of a GPU."""

SYSTEM_CPUS = Path("/sys/devices/system/cpu")
"""Where the kernel tells of caches."""

_VARIANTS = {
    "plain, then past caches": (StreamVariant.PLAIN, StreamVariant.WEIGHT_NONTEMPORAL | StreamVariant.PREFETCH)
}

log = logging.getLogger("offload")

_known: dict[tuple[object, ...], dict[str, Measurement]] = {}
"""What has been measured of CPU and memory, and of them beside a GPU, by what it depends on."""


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
    """Measure the update of exact state and of what else the session has, memory, the GPU, every path, the engine.

    The update passes over more memory than caches hold, where the session has so much of it, and the machine so much
    to spare; the log says how much it was.

    Args:
        kernel: The session's kernel.
        tiers: The session's tiers, with nothing in any slot yet.
        queue: What all report to; nothing else does meanwhile.
        address: Staging memory, `plan.staging_bytes` long; its content is lost. 0 without any.
        plan: What the session is about to do.
        lanes: The session's, with nothing on them; nor is the caller's work under way.
        verify: Whether tiles are verified; see `TileRequest`.

    Raises:
        TierError: If a path fails.
        OffloadError: If the device fails, or it or the host has no memory for it.
    """
    layout, staging = plan.layout, (address, plan.staging_bytes)
    numels = numels_by_format(layout.parameters, layout.state.format) or {EXACT: 1}
    formats, measured, gpu = sorted({EXACT, *numels}, key=FORMATS.index), dict[str, Measurement](), NO_GPU
    for state_format in formats:
        with contextlib.ExitStack() as ends:
            spec = EXACT_ADAMW.stored_in(state_format)
            numel, cpus = _host_numel(plan, spec), frozenset(os.sched_getaffinity(0))
            key = (kernel.threads, cpus, kernel.instruction_set, state_format, numel)
            # Memory is taken when it is first needed.
            cpu = functools.cache(partial(_cpu_probe, kernel, queue, spec, numel, staging, ends))
            if key not in _known:
                _known[key] = best_of(cpu().samples())
                reached = ", ".join(f"{name} {format_bytes(each.median)}/s" for name, each in _known[key].items())
                sizes = map(format_bytes, (numel * trial_bytes(spec), cache_bytes()))
                log.info("%s, by passes over %s; last-level caches hold %s", reached, *sizes)
            measured |= _known[key]
            if state_format == formats[0]:  # exact state, of which the GPU's rates are
                gpu = lanes.rated(partial(probe_gpu, cpu=cpu, key=key, threads=kernel.threads, plan=plan))
    paths: list[PathProbe] = []
    for tier in tiers:
        with contextlib.ExitStack() as ends:
            paths.append(_path_probe(len(paths), Slots(tier, 0, verify=verify), queue, plan, staging, ends))
            measured |= best_of(paths[-1].samples())
    cpu_rates = {each: measured[update_name(each, kernel.threads)].median for each in formats}
    rates = rates_of(measured, kernel.threads, paths)
    rates = replace(rates, cpu_bytes_per_s=mean_rate(cpu_rates, numels), gpu=gpu)
    return trial_rates(kernel, tiers, queue, rates, plan, staging)


def _cpu_probe(
    kernel: CpuUpdateKernel,
    queue: Queue,
    spec: StateSpec,
    numel: int,
    staging: tuple[int, int],
    ends: contextlib.ExitStack,
) -> CpuProbe:
    """Return a probe of passes over state, in staging memory if that is large enough."""
    depth = max(1, min(UPDATE_DEPTH, numel // CHUNK_NUMEL))
    state = TrialState(spec, numel, depth, prefault=True, borrowed=staging)
    ends.callback(state.close)
    probe = CpuProbe(Runs(queue), {kernel.threads: kernel}, {spec.format: state}, _VARIANTS, state.chunks)
    probe.rate(spec.format)  # warms up
    return probe


def probe_gpu(
    lanes: GpuLanes, cpu: Callable[[], CpuProbe], key: tuple[object, ...], threads: int, plan: Plan
) -> GpuRates:
    """Measure copies, each way alone and both ways, the update on the GPU, and what copies leave of the CPU's.

    Args:
        lanes: The session's.
        cpu: Returns the probe of the CPU's update.
        key: What its rates depend on, which are known.
        threads: Of these.
        plan: What the session is about to do.
    """
    state = plan.layout.device_state
    room = lanes.device.free_bytes() // SHARE_OF_AVAILABLE // trial_bytes(state)
    numel = min(GPU_NUMEL, sum(subgroup.numel for subgroup in plan.layout.subgroups), room)
    numel = max(numel, SECTOR_NUMEL)
    copy_bytes, beside = CHUNK_NUMEL * trial_bytes(state) // 2, (*key, lanes.device.name)
    update = None if beside in _known else lambda: cpu().rate(part=PART_BESIDE)
    while True:
        try:
            opened = GpuProbe(lanes, state, numel, LONGEST_S / QUICK_ROUNDS, update, copy_bytes=copy_bytes)
            break
        except OffloadError:  # free memory may be in pieces
            if numel == SECTOR_NUMEL:
                raise
            numel = max(numel // 2, SECTOR_NUMEL)
    with contextlib.closing(opened) as probe:
        probe.warm_up()
        found = best_of(probe.samples())
    _known.setdefault(beside, {name: each for name, each in found.items() if name.endswith("cpu")})
    return rates_of({**_known[key], **found, **_known[beside]}, threads, gpu_bytes=0).gpu


def _host_numel(plan: Plan, spec: StateSpec) -> int:
    """Return the elements to pass over: more than caches hold, if the session and the machine have room for that.

    They lie in what the session is about to take itself: in staging memory, which has been touched, or beside it.
    """
    beside = plan.host_bytes - plan.overhead_bytes - plan.staging_bytes
    nbytes = min(
        enough_bytes(),
        max(beside, plan.staging_bytes - ALIGNMENT_BYTES, min(beside + plan.staging_bytes, SPARE_BYTES)),
        available_bytes() // SHARE_OF_AVAILABLE,
    )
    numel = nbytes // trial_bytes(spec)
    return max(SECTOR_NUMEL, numel // CHUNK_NUMEL * CHUNK_NUMEL or numel // SECTOR_NUMEL * SECTOR_NUMEL)


def enough_bytes() -> int:
    """Return the bytes that a pass has to go over to tell what memory gives."""
    return max(ENOUGH_BYTES, CACHES * cache_bytes())


def cache_bytes() -> int:
    """Return what the last-level caches of the CPUs that this process may use hold; 0 where that is not known."""
    found: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0):
        with contextlib.suppress(OSError, ValueError):
            last = max(
                (SYSTEM_CPUS / f"cpu{cpu}" / "cache").glob("index*"), key=lambda at: int((at / "level").read_text())
            )
            size = (last / "size").read_text().strip()
            units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
            nbytes = int(size[:-1]) * units[size[-1]] if size[-1:] in units else int(size)
            found[(last / "shared_cpu_list").read_text()] = nbytes
    return sum(found.values())


def _path_probe(
    number: int, slots: Slots, queue: Queue, plan: Plan, staging: tuple[int, int], ends: contextlib.ExitStack
) -> PathProbe:
    address, staging_bytes = staging
    # Without staging memory, state that is resident moves when it is parked.
    usual_bytes = staging_bytes or min(SPARE_BYTES, 2 * PROBE_TILES * plan.largest_tile_bytes)
    tile_bytes = usual_bytes // (2 * PROBE_TILES) // SECTOR_BYTES * SECTOR_BYTES
    slots = replace(slots, tile_bytes=min(MAX_TILE_BYTES, max(tile_bytes, SECTOR_BYTES)))
    room = slots.tier.free_bytes() // (slots.tile_bytes + SECTOR_BYTES)
    count = max(1, min(PROBE_TILES, room // 2))
    if staging_bytes < 2 * count * slots.tile_bytes:
        memory = Arena(2 * count * slots.tile_bytes)
        ends.callback(memory.close)
        address = memory.address
    return PathProbe(number, Runs(queue), [slots], count, count, address, is_split=room > 1)


def with_whole_parameters(rates: Rates, layout: Layout) -> Rates:
    """Return rates whose CPU needs for the state of a layout what kernels and updates of whole parameters do.

    No kernel makes the latter, so what kernels reach says nothing of them: a small twin of each parameter is updated,
    and its time taken times the operations of the parameter over the twin's. The first steps then show more
    (`offload.measure.observe`).
    """
    subgroups = layout.subgroups
    whole = [subgroup for subgroup in subgroups if subgroup.state.rule.is_whole]
    if not whole:
        return rates
    cut_bytes = sum(subgroup.state_bytes for subgroup in subgroups if not subgroup.state.rule.is_whole)
    seconds, known = cut_bytes / rates.cpu_bytes_per_s, dict[tuple[object, ...], float]()
    for subgroup in whole:
        for segment in subgroup.segments:
            parameter = layout.parameters[segment.parameter]
            key = subgroup.state.rule, parameter.shape, parameter.dtype
            if key not in known:
                known[key] = _seconds(subgroup.state.rule, parameter)
            seconds += known[key]
    return replace(rates, cpu_bytes_per_s=layout.state_bytes / seconds)


def _seconds(rule: UpdateRule, parameter: Parameter) -> float:
    """Return the seconds of a parameter's update."""
    shape = parameter.shape or (parameter.numel,)
    twin = _smaller(shape)
    update = trial(rule, twin, TORCH_DTYPES[parameter.dtype], parameter.group)
    return _best_s(update) * rule.work(shape) / rule.work(twin)


def _smaller(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 2:
        return tuple(min(size, MOST_SIDE) for size in shape)
    rest = math.prod(shape[1:])
    return (max(1, min(shape[0], MOST_NUMEL // max(rest, 1))), *shape[1:]) if shape else shape


def _best_s(update: Callable[[], None]) -> float:
    """Return the seconds of the best of all `QUICK_ROUNDS`: the first one touches memory, and may import much."""
    taken = []
    for _ in range(QUICK_ROUNDS):
        began_s = time.perf_counter()
        update()
        taken.append(time.perf_counter() - began_s)
    return min(taken)
