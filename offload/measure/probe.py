"""A probe of a fraction of a second, so that the first prediction rests on measurements too.

It uses the tiers and the kernel of the session that asks, before the session's first operation, and the session's
own staging memory, whose content is undefined at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from offload import waits
from offload.engine.gpu import GpuLanes
from offload.errors import invariant
from offload.kernels.table import trial_bytes, trial_table
from offload.layout import MAX_TILE_BYTES
from offload.plan import GpuRates, PathRates, Plan, Rates
from offload.protocols import (
    SECTOR_BYTES,
    Completion,
    DeviceLane,
    Queue,
    Tier,
    TileId,
    TileRequest,
    UpdateKernel,
)
from offload.rules import FP32
from offload.tiers import tier_error

PROBE_TILES = 4
PROBE_NUMEL = 1 << 21
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
    paths = [_probe_path(tier, queue, address, plan) for tier in tiers]
    return Rates(_probe_update(kernel, queue, plan), tuple(paths))


def probe_device(lanes: GpuLanes, plan: Plan) -> GpuRates:
    """Measure copies both ways at once, and the update on the GPU; a few milliseconds each.

    Args:
        lanes: The session's, with nothing on them.
        plan: What the session is about to do.

    Raises:
        OffloadError: If the device fails or has no memory for it.
    """
    device = lanes.device
    largest = max((subgroup.numel for subgroup in plan.layout.subgroups), default=1024)
    numel = min(PROBE_NUMEL, largest)
    rule = plan.layout.rule
    nbytes = numel * trial_bytes(rule)
    memory, host = device.allocate(nbytes), lanes.arena(2 * nbytes)
    try:
        table = trial_table(rule, memory, numel, fresh=True)

        def copy() -> None:
            lanes.copy(DeviceLane.H2D, memory, host.address, nbytes // 2)
            lanes.copy(DeviceLane.D2H, host.address + nbytes, memory + nbytes // 2, nbytes - nbytes // 2)

        seconds: dict[DeviceLane, list[float]] = {}
        for work, used in (
            (copy, (DeviceLane.H2D, DeviceLane.D2H)),
            (lambda: device.update(table), (DeviceLane.UPDATE,)),
        ):
            for _ in range(ROUNDS + 1):  # the first may have to compile, or to touch memory
                began = {lane: device.mark(lane) for lane in used}
                work()
                ended = {lane: device.mark(lane) for lane in used}
                for lane in used:
                    ended[lane].wait()
                    seconds.setdefault(lane, []).append(ended[lane].time_s() - began[lane].time_s())
        least = {lane: max(min(found[1:]), 1e-9) for lane, found in seconds.items()}
        return GpuRates(
            update_bytes_per_s=rule.item_bytes * numel / least[DeviceLane.UPDATE],
            h2d_bytes_per_s=(nbytes // 2) / least[DeviceLane.H2D],
            d2h_bytes_per_s=(nbytes - nbytes // 2) / least[DeviceLane.D2H],
        )
    finally:
        lanes.give_back(host)
        device.release(memory)


def _time(queue: Queue, count: int, start: Callable[[], None], tier: Tier | None = None) -> float:
    """Return the seconds from the first start to the last end of `count` operations."""
    start()
    records: list[Completion] = []
    while len(records) < count:
        # An update ends; a path may not.
        arrived = queue.wait() if tier is None else waits.completions(queue, lambda: f"path {tier.path} to be probed")
        records.extend(Completion(*record) for record in arrived)
    failed = [record for record in records if record.error != 0]
    if failed and tier is not None:
        raise tier_error("probe", failed[0], None, tier)
    invariant(not failed, "the probe's update failed")
    return max(record[4] for record in records) - min(record[3] for record in records)


def _probe_update(kernel: UpdateKernel, queue: Queue, plan: Plan) -> float:
    largest = max((subgroup.numel for subgroup in plan.layout.subgroups), default=1024)
    numel = min(PROBE_NUMEL, largest)
    rule = plan.layout.rule
    memory = np.zeros(numel * trial_bytes(rule), np.uint8)
    table = trial_table(rule, memory.ctypes.data, numel)
    seconds = [_time(queue, 1, lambda: kernel.submit(1, table)) for _ in range(ROUNDS)]
    return rule.item_bytes * numel / max(min(seconds), 1e-9)


def _probe_path(tier: Tier, queue: Queue, address: int, plan: Plan) -> PathRates:
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None
    nbytes = min(MAX_TILE_BYTES, max(plan.staging_bytes // PROBE_TILES // SECTOR_BYTES * SECTOR_BYTES, SECTOR_BYTES))
    if plan.staging_bytes < PROBE_TILES * nbytes:
        memory = np.zeros((PROBE_TILES + 1) * nbytes, np.uint8)
        address = -(-memory.ctypes.data // SECTOR_BYTES) * SECTOR_BYTES
    count = max(1, min(PROBE_TILES, tier.free_bytes() // (nbytes + SECTOR_BYTES)))
    requests = [
        TileRequest(
            op=number + 1,
            tile=TileId(0, 0, number),
            step=0,
            offset=number * (nbytes + SECTOR_BYTES),
            address=address + number * nbytes,
            nbytes=nbytes,
            numel=nbytes // FP32.item_bytes,
        )
        for number in range(count)
    ]

    def write() -> None:
        for request in requests:
            tier.write(request)

    def read() -> None:
        for request in requests:
            tier.read(request)

    writes = [_time(queue, count, write, tier) for _ in range(ROUNDS)]
    reads = [_time(queue, count, read, tier) for _ in range(ROUNDS)]
    total = count * nbytes
    return PathRates(total / max(min(reads), 1e-9), total / max(min(writes), 1e-9))
