"""A probe of a fraction of a second, so that the first prediction rests on measurements too.

It uses the tiers and the kernel of the session that asks, before the session's first operation, and the session's
own staging memory, whose content is undefined at that moment. CPU and memory are measured once a process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from offload.device.lanes import GpuLanes
from offload.device.none import NO_LANES, Lanes
from offload.errors import OffloadError
from offload.formats import EXACT, EXACT_ADAMW, FORMATS, StateFormat, StateSpec
from offload.kernels import CpuUpdateKernel, StreamVariant
from offload.kernels.reference import TORCH_DTYPES
from offload.kernels.table import trial_bytes
from offload.kernels.whole import trial
from offload.layout import MAX_TILE_BYTES, SECTOR_NUMEL, Layout, Parameter, numels_by_format
from offload.measure.drive import drive, lane_rates, rates_beside
from offload.measure.gpu import COPIES, COPIES_BESIDE, D2H, H2D, UPDATE, GpuProbe
from offload.measure.observe import at_once
from offload.measure.trial import trial_rates
from offload.measure.workbench import CHUNK_NUMEL, UPDATE_DEPTH, Slots, TrialState, memory_cost
from offload.memory.arenas import Arena, available_bytes
from offload.plan import NO_GPU, GpuRates, PathRates, Plan, Rates
from offload.plan.rates import mean_rate
from offload.protocols import SECTOR_BYTES, Queue, Tier
from offload.rules import UpdateRule
from offload.units import format_bytes

PROBE_TILES = 4
ROUNDS = 3

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

LONGEST_S = 0.25
"""No further round begins after this, so that a slow machine does not wait for all of them."""

GPU_NUMEL = 1 << 24
"""Elements of an update on a GPU, where the session and the GPU's memory have so many: more than its caches hold."""

MOST_SIDE, MOST_NUMEL = 512, 1 << 18
"""Of the twin of a whole parameter: of its dimensions, where it is a matrix; of all its elements."""

MOST_MEMORY_COST = 2.0
"""Copies of a GPU read or write each byte once: what a short run finds beyond this is noise."""

BESIDE_S = 0.02
"""How long copies of a GPU go on beside the CPU's update."""

PART_BESIDE = 0.1
"""The part of a pass that the update makes at a time meanwhile."""

SYSTEM_CPUS = Path("/sys/devices/system/cpu")
"""Where the kernel tells of caches."""

_VARIANTS = (StreamVariant.PLAIN, StreamVariant.WEIGHT_NONTEMPORAL | StreamVariant.PREFETCH)

log = logging.getLogger("offload")

T = TypeVar("T")

_known: dict[tuple[object, ...], tuple[float, float]] = {}
"""The update's rate and the memory's, by what they depend on: see `_HostProbe`."""

_known_costs: dict[tuple[object, ...], float] = {}
"""`GpuRates.memory_cost`, by the same and the GPU's name."""


def quick_probe(
    kernel: CpuUpdateKernel,
    tiers: Sequence[Tier],
    queue: Queue,
    address: int,
    plan: Plan,
    lanes: Lanes = NO_LANES,
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

    Raises:
        TierError: If a path fails.
        OffloadError: If the device fails, or it or the host has no memory for it.
    """
    layout, gpu = plan.layout, NO_GPU
    numels = numels_by_format(layout.parameters, layout.state.format) or {EXACT: 1}
    cpu: dict[StateFormat, float] = {}
    memory = 0.0
    for state_format in sorted({EXACT, *numels}, key=FORMATS.index):
        with contextlib.closing(_HostProbe(kernel, queue, plan, state_format, address)) as host:
            cpu[state_format], reached = host.rates()
            memory = max(memory, reached)
            if not state_format.rounds:
                gpu = lanes.rated(partial(probe_gpu, host=host, plan=plan))
    paths = tuple(_probe_path(tier, queue, address, plan) for tier in tiers)
    rates = Rates(mean_rate(cpu, numels), paths, gpu, memory)
    return trial_rates(kernel, tiers, queue, rates, plan, (address, plan.staging_bytes))


class _HostProbe:
    """The CPU's update, passing over memory that is taken when it is first needed.

    Args:
        kernel: The session's kernel.
        queue: What it reports to.
        plan: What the session is about to do.
        state_format: Of the state.
        address: Its staging memory.

    Attributes:
        key: What the rates depend on in this process.
    """

    def __init__(
        self, kernel: CpuUpdateKernel, queue: Queue, plan: Plan, state_format: StateFormat, address: int
    ) -> None:
        self._kernel = kernel
        self._queue = queue
        self._spec = EXACT_ADAMW.stored_in(state_format)
        self._numel = _host_numel(plan, self._spec)
        self._staging = address, plan.staging_bytes
        self._state: TrialState | None = None
        cpus = frozenset(os.sched_getaffinity(0))
        self.key = (kernel.threads, cpus, kernel.instruction_set, state_format, self._numel)

    def rates(self) -> tuple[float, float]:
        """Return the rates of the update and of memory, reads and writes together."""
        if self.key not in _known:
            self.update()  # warms up
            found = repeated(lambda: (self.update(), self._open().stream_rate(self._kernel, *_VARIANTS)))
            cpu, memory = (max(rates) for rates in zip(*found, strict=True))
            _known[self.key] = cpu, max(memory, cpu * self._spec.memory_cost)
            sizes = *_known[self.key], self._numel * trial_bytes(self._spec), cache_bytes()
            log.info(
                "the update of %s state reaches %s/s and memory %s/s, by passes over %s; last-level caches hold %s",
                self._spec.format,
                *map(format_bytes, sizes),
            )
        return _known[self.key]

    def update(self, part: float = 1.0) -> float:
        """Return the rate of a pass over a part of the memory, in state bytes per second."""
        state = self._open()
        return lane_rates(drive(self._queue, [state.updates(self._kernel, max(1, round(part * state.chunks)))]))[
            "cpu"
        ]

    def _open(self) -> TrialState:
        if self._state is None:
            depth = max(1, min(UPDATE_DEPTH, self._numel // CHUNK_NUMEL))
            self._state = TrialState(self._spec, self._numel, depth, prefault=True, borrowed=self._staging)
        return self._state

    def close(self) -> None:
        """Give the memory back."""
        if self._state is not None:
            self._state.close()


def probe_gpu(lanes: GpuLanes, host: _HostProbe, plan: Plan) -> GpuRates:
    """Measure copies, each way alone and both ways, the update on the GPU, and what copies leave of the CPU's."""
    state = plan.layout.device_state
    room = lanes.device.free_bytes() // SHARE_OF_AVAILABLE // trial_bytes(state)
    numel = min(GPU_NUMEL, sum(subgroup.numel for subgroup in plan.layout.subgroups), room)
    numel = max(numel, SECTOR_NUMEL)
    copy_bytes = CHUNK_NUMEL * trial_bytes(state) // 2

    def run(probe: GpuProbe) -> dict[str, float]:
        alone = probe.rates(H2D, beside=" alone") | probe.rates(D2H, beside=" alone")
        return alone | probe.rates(H2D, D2H) | probe.rates(UPDATE)

    while True:
        try:
            opened = GpuProbe(lanes, state, numel, 1, copy_bytes=copy_bytes)
            break
        except OffloadError:  # free memory may be in pieces
            if numel == SECTOR_NUMEL:
                raise
            numel = max(numel // 2, SECTOR_NUMEL)
    with contextlib.closing(opened) as probe:
        run(probe)  # may have to compile, or to touch memory
        began_s = time.perf_counter()
        run(probe)
        once_s = time.perf_counter() - began_s
        probe.repeats = max(1, min(COPIES, int(LONGEST_S / ROUNDS / once_s)))
        runs = repeated(partial(run, probe))
        best = {name.partition("/")[2]: max(found[name] for found in runs) for name in runs[0]}
        h2d, d2h = best["h2d"], best["d2h"]
        key = (*host.key, lanes.device.name)
        if key not in _known_costs:
            _known_costs[key] = _cost_beside(probe, host, h2d, d2h)
    return GpuRates(
        best["update"],
        h2d,
        d2h,
        memory_cost=_known_costs[key],
        h2d_alone_bytes_per_s=best["h2d alone"],
        d2h_alone_bytes_per_s=best["d2h alone"],
    )


def _cost_beside(probe: GpuProbe, host: _HostProbe, h2d: float, d2h: float) -> float:
    """Return `GpuRates.memory_cost` from what copies both ways leave of the CPU's update."""
    copies = max(1, min(COPIES_BESIDE, round(BESIDE_S * min(h2d, d2h) / probe.copy_bytes)))
    update = partial(host.update, PART_BESIDE)
    update()  # warms up
    speeds = [probe.beside(update, copies)["gpu/speed of cpu"] for _ in range(ROUNDS)]
    speed, spread = statistics.median(speeds), max(speeds) - min(speeds)
    cpu, memory = host.rates()
    return min(memory_cost(memory, cpu, speed, h2d + d2h, spread / speed), MOST_MEMORY_COST)


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


def repeated(sample: Callable[[], T]) -> list[T]:
    """Take a sample a few times. The best counts: other work on the machine only ever slows one down."""
    taken, until_s = [sample()], time.perf_counter() + LONGEST_S
    while len(taken) < ROUNDS and time.perf_counter() < until_s:
        taken.append(sample())
    return taken


def _probe_path(tier: Tier, queue: Queue, address: int, plan: Plan) -> PathRates:
    # Without staging memory, state that is resident moves when it is parked.
    usual_bytes = plan.staging_bytes or min(SPARE_BYTES, PROBE_TILES * plan.largest_tile_bytes)
    nbytes = min(MAX_TILE_BYTES, max(usual_bytes // PROBE_TILES // SECTOR_BYTES * SECTOR_BYTES, SECTOR_BYTES))
    slots = range(max(1, min(PROBE_TILES, tier.free_bytes() // (nbytes + SECTOR_BYTES))))
    path, half = Slots(tier, nbytes), len(slots) // 2

    def best(loads: dict[str, range], count: int | None = None) -> dict[str, float]:
        """Return what reads and writes of some slots reach beside each other."""

        def sample() -> dict[str, float]:
            moves = [path.load(v, at, address + at.start * nbytes, len(at), count) for v, at in loads.items()]
            return rates_beside(drive(queue, moves))

        return max(repeated(sample), key=lambda rates: sum(rates.values()))

    with contextlib.ExitStack() as ends:
        if plan.staging_bytes < PROBE_TILES * nbytes:
            memory = Arena(PROBE_TILES * nbytes)
            ends.callback(memory.close)
            address = memory.address
        alone = best({"write": slots}) | best({"read": slots})
        both = best({"read": slots[:half], "write": slots[half:]}, PROBE_TILES) if half else alone
        shares = at_once(drive(queue, [path.load("read", slots, address)])) > 1
    at_most = tier.depth if shares else 1.0
    return PathRates(both["read"], both["write"], 0.0, 1.0, alone["read"], alone["write"], at_most)


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
    """Return the seconds of the best of all `ROUNDS`: the first one touches memory, and may import much."""
    taken = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        update()
        taken.append(time.perf_counter() - began_s)
    return min(taken)
