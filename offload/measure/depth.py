"""How many requests a path should have in flight: tried out when a session opens it.

More requests than a device can use gain nothing, cost memory bandwidth and threads, and delay other requests. How
many it can use differs between a disk, a file server and an object store. So a few depths are tried, with reads and
writes at the same time as in a step, and the smallest is taken that is nearly as fast as the best. Bits never depend
on it.

This happens before the session's first operation, on its own tiers and in its staging memory, whose content is
undefined at that moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from offload.measure.drive import drive
from offload.measure.workbench import Slots
from offload.protocols import SECTOR_BYTES, Queue, Tier
from offload.tiers import SLOT_HEADER_BYTES

DEPTHS = (2, 4, 8, 16)
"""Depths that are tried. Not 1: a device without a waiting request idles in between. If that costs little, a depth of
2 costs little, too; and a trial that other work disturbs can then not choose the slowest."""

NEAR = 0.97
"""Part of the best rate from which on a depth counts as equally good."""

TILES = DEPTHS[-1]
"""Tiles that are read, and as many written, in a round: enough to reach every depth."""

TILE_BYTES = (256 << 10, 2 << 20)
"""Least and most bytes of a tile: smaller ones tell nothing, larger ones take too long."""

ROUNDS = 3

HOPELESS = 0.8
"""Part of the best rate; a depth that reached no more is not tried in further rounds."""

MOST_SECONDS = 1.0


def choose_depth(rates: Mapping[int, float]) -> int:
    """Return the smallest depth whose rate is `NEAR` the best; `rates` holds at least one."""
    enough = NEAR * max(rates.values())
    return min(depth for depth, rate in rates.items() if rate >= enough)


def goes_on_rising(rates: Mapping[int, float]) -> bool:
    """Return whether to try a greater depth: not after two that were no better than a smaller one."""
    depths = sorted(rates)
    return len(depths) < 3 or choose_depth(rates) in depths[-2:]


def tune_depth(
    tier: Tier,
    queue: Queue,
    address: int,
    nbytes: int,
    clock: Callable[[], float] = time.monotonic,
    *,
    verify: bool = True,
) -> dict[int, float]:
    """Try depths on a path and set the best; takes about `MOST_SECONDS` at most.

    Args:
        tier: The path, with nothing in any slot yet; its first slots are written.
        queue: The tier's; nothing else may report to it meanwhile.
        address: Memory whose content is lost.
        nbytes: Its size.
        clock: Seconds, never going back.
        verify: Whether tiles are verified; see `TileRequest`.

    Returns:
        Bytes per second by depth, reads and writes together. Empty, with the depth unchanged, if there is too little
        memory or room, if the system's page cache would answer instead of the device, or if the path is too slow.

    Raises:
        TierError: If the path fails.
    """
    least, most = TILE_BYTES
    room = tier.free_bytes() // (2 * TILES) - SLOT_HEADER_BYTES
    tile_bytes = min(most, nbytes // (2 * TILES), room) // SECTOR_BYTES * SECTOR_BYTES
    if tile_bytes < least or tier.cached:
        return {}
    began_s, before, path = clock(), tier.depth, Slots(tier, tile_bytes, verify=verify)

    def is_late(part: float) -> bool:
        return clock() - began_s > part * MOST_SECONDS

    def move(*loads: tuple[str, range]) -> float:
        """Return the seconds that these reads and writes of slots take together."""
        started_s = clock()
        drive(queue, [path.load(*load, address + load[1].start * tile_bytes) for load in loads])
        return clock() - started_s

    filled = 0
    while filled < 2 * TILES:  # first writes to slots take longer: not timed. In steps, to notice a slow path soon
        if is_late(0.25):
            return {}
        more = range(filled, max(1, 2 * filled))
        move(("write", more))
        filled = more.stop
    rates: dict[int, float] = {}

    def attempt(depth: int) -> None:
        tier.set_depth(depth)
        seconds = move(("read", range(TILES)), ("write", range(TILES, 2 * TILES)))
        # The best of the rounds: other work on the machine only ever slows one down.
        rates[depth] = max(rates.get(depth, 0.0), 2 * TILES * tile_bytes / max(seconds, 1e-9))

    for depth in DEPTHS:
        if not goes_on_rising(rates):
            break
        if is_late(1.0):
            tier.set_depth(before)
            return {}
        attempt(depth)
    for depth in (ROUNDS - 1) * sorted(rates):
        if rates[depth] > HOPELESS * max(rates.values()) and not is_late(1.0):
            attempt(depth)
    tier.set_depth(choose_depth(rates))
    return rates
