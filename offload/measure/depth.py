"""How many requests a path should have in flight: tried out when a session opens it.

More than a device can use cost memory bandwidth, threads and the turns of others, and gain nothing; how many it can
use differs between a disk, a file server and an object store. So a few depths are tried, reads and writes at the same
time as in a step, and the smallest that is nearly the best is taken. Bits never depend on it.

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
"""Not 1: a device that has nothing waiting idles between requests. Where that costs little, little is lost by 2, and
a trial that other work disturbs cannot choose what costs most."""

NEAR = 0.97
"""A depth that reaches this part of the best is as good."""

TILES = DEPTHS[-1]
"""Read and as many written in a round, so that every depth can be reached."""

TILE_BYTES = (256 << 10, 2 << 20)
"""Size of these tiles: with smaller ones nothing is learnt, with larger ones too much is moved."""

ROUNDS = 3

HOPELESS = 0.8
"""A depth that reached no more of the best than this is not tried again."""

MOST_SECONDS = 1.0


def choose_depth(rates: Mapping[int, float]) -> int:
    """Return the smallest depth whose rate is `NEAR` the best; `rates` holds at least one."""
    enough = NEAR * max(rates.values())
    return min(depth for depth, rate in rates.items() if rate >= enough)


def goes_on_rising(rates: Mapping[int, float]) -> bool:
    """Return whether a greater depth is worth trying: not after two that are no better than a smaller one."""
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
    """Try depths on a path and let it work with the best; takes about `MOST_SECONDS` at most.

    Args:
        tier: The path, with nothing in any slot yet; its first slots are written.
        queue: What it reports to; nothing else does meanwhile.
        address: Memory whose content is lost.
        nbytes: Its size.
        clock: Seconds, never going back.
        verify: Whether tiles are verified; see `TileRequest`.

    Returns:
        Bytes per second by depth, reads and writes together. Nothing if there is too little memory or room to tell,
        if the system's page cache would answer instead of the device, or if the path is too slow: it works as before
        then.

    Raises:
        TierError: If the path fails.
    """
    least, most = TILE_BYTES
    room = tier.free_bytes() // (2 * TILES) - SLOT_HEADER_BYTES
    tile_bytes = min(most, nbytes // (2 * TILES), room) // SECTOR_BYTES * SECTOR_BYTES
    if tile_bytes < least or tier.cached:
        return {}
    begun_s, before, path = clock(), tier.depth, Slots(tier, tile_bytes, verify=verify)

    def late(part: float) -> bool:
        return clock() - begun_s > part * MOST_SECONDS

    def move(*loads: tuple[str, range]) -> float:
        """Return the seconds that these reads and writes of slots take together."""
        started_s = clock()
        drive(queue, [path.load(*load, address + load[1].start * tile_bytes) for load in loads])
        return clock() - started_s

    filled = 0
    while filled < 2 * TILES:  # all slots, as new ones cost more; in steps, so that a slow path is found out soon
        if late(0.25):
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
        if late(1.0):
            tier.set_depth(before)
            return {}
        attempt(depth)
    for depth in (ROUNDS - 1) * sorted(rates):
        if rates[depth] > HOPELESS * max(rates.values()) and not late(1.0):
            attempt(depth)
    tier.set_depth(choose_depth(rates))
    return rates
