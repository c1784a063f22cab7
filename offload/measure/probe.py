"""A probe of a fraction of a second, so that the first prediction rests on measurements too.

It uses the tiers and the kernel of the session that asks, before the session's first operation, and the session's
own staging memory, whose content is undefined at that moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from offload.engine.gpu import GpuLanes
from offload.engine.memory import Arena
from offload.layout import MAX_TILE_BYTES
from offload.measure.drive import Load, drive, lane_rates
from offload.measure.gpu import D2H, H2D, UPDATE, GpuProbe
from offload.measure.workbench import CHUNK_NUMEL, Slots, TrialState
from offload.plan import GpuRates, PathRates, Plan, Rates
from offload.protocols import SECTOR_BYTES, Queue, Tier, UpdateKernel

PROBE_TILES = 4
ROUNDS = 3


def quick_probe(kernel: UpdateKernel, tiers: Sequence[Tier], queue: Queue, address: int, plan: Plan) -> Rates:
    """Measure the update and every path with a few tiles.

    Args:
        kernel: The session's kernel.
        tiers: The session's tiers, with nothing in any slot yet.
        queue: What both report to; nothing else does meanwhile.
        address: Staging memory, `plan.staging_bytes` long; its content is lost. 0 without any.
        plan: What the session is about to do.

    Raises:
        TierError: If a path fails.
    """
    with contextlib.closing(TrialState(plan.layout.rule, _numel(plan))) as state:
        cpu = _best(queue, state.updates(kernel, 1))
    return Rates(cpu, tuple(_probe_path(tier, queue, address, plan) for tier in tiers))


def probe_device(lanes: GpuLanes, plan: Plan) -> GpuRates:
    """Measure copies both ways at once, and the update on the GPU; a few milliseconds each.

    Args:
        lanes: The session's, with nothing on them.
        plan: What the session is about to do.

    Raises:
        OffloadError: If the device fails or has no memory for it.
    """
    with contextlib.closing(GpuProbe(lanes, plan.layout.rule, _numel(plan))) as probe:
        # Without the first, which may have to compile, or to touch memory.
        runs = [probe.rates(H2D, D2H) | probe.rates(UPDATE) for _ in range(ROUNDS + 1)][1:]
    update, h2d, d2h = (max(run[f"gpu/{lane}"] for run in runs) for lane in ("update", "h2d", "d2h"))
    return GpuRates(update, h2d, d2h)


def _numel(plan: Plan) -> int:
    """Return the elements of an update that the session might ask for."""
    return min(CHUNK_NUMEL, max((subgroup.numel for subgroup in plan.layout.subgroups), default=1024))


def _best(queue: Queue, load: Load) -> float:
    """Return the highest rate of a load in a few rounds: other work on the machine only ever slows it down."""
    return max(lane_rates(drive(queue, [load]))[load.lane] for _ in range(ROUNDS))


def _probe_path(tier: Tier, queue: Queue, address: int, plan: Plan) -> PathRates:
    nbytes = min(MAX_TILE_BYTES, max(plan.staging_bytes // PROBE_TILES // SECTOR_BYTES * SECTOR_BYTES, SECTOR_BYTES))
    slots = range(max(1, min(PROBE_TILES, tier.free_bytes() // (nbytes + SECTOR_BYTES))))
    with contextlib.ExitStack() as ends:
        if plan.staging_bytes < PROBE_TILES * nbytes:
            memory = Arena(PROBE_TILES * nbytes)
            ends.callback(memory.close)
            address = memory.address
        write, read = (_best(queue, Slots(tier, nbytes).load(verb, slots, address)) for verb in ("write", "read"))
    return PathRates(read, write)
