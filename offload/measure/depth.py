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

from offload.measure.drive import Load, drive
from offload.measure.workbench import Slots
from offload.protocols import SECTOR_BYTES, Queue, Tier
from offload.tiers import SLOT_HEADER_BYTES

DEPTHS = (2, 4, 8, 16)
"""Depths that are tried. Not 1: a device without a waiting request idles in between. If that costs little, a depth of
2 costs little, too; and a trial that other work disturbs can then not choose the slowest."""

NEAR = 0.97
"""Part of the best rate from which on a depth counts as equally good."""

TILES = DEPTHS[-1]
"""Tiles that are read in a trial, and as many are written: enough to reach every depth."""

TILE_BYTES = (256 << 10, 2 << 20)
"""Least and most bytes of a tile: smaller ones tell nothing, larger ones take too long."""

ROUNDS = 3
"""How often a depth is tried at most; its best trial counts."""

HOPELESS = 0.8
"""Part of the best rate; a depth that reached no more is not tried in further rounds."""

MOST_SECONDS = 1.0
"""About how long `tune_depth` may take."""


def choose_depth(rates: Mapping[int, float]) -> int:
    """Return the smallest depth whose rate is nearly the best (`NEAR`); `rates` are by depth, at least one."""
    enough = NEAR * max(rates.values())
    return min(depth for depth, rate in rates.items() if rate >= enough)


def goes_on_rising(rates: Mapping[int, float]) -> bool:
    """Return whether a greater depth should be tried, after the depths in `rates`.

    Not if a depth below the two greatest so far is nearly the fastest: still greater ones would be no faster.
    """
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
    # Each of the 2 * TILES tiles has memory and a slot of its own; `room` is the most payload that a slot can have.
    room = tier.free_bytes() // (2 * TILES) - SLOT_HEADER_BYTES
    tile_bytes = min(most, nbytes // (2 * TILES), room) // SECTOR_BYTES * SECTOR_BYTES
    if tile_bytes < least or tier.cached:
        return {}
    began_s = clock()
    depth_before = tier.depth
    slots = Slots(tier, tile_bytes, verify=verify)
    rates: dict[int, float] = {}

    def has_used(part: float) -> bool:
        """Return whether more than this part of `MOST_SECONDS` has passed."""
        return clock() - began_s > part * MOST_SECONDS

    def load(verb: str, numbers: range) -> Load:
        """Return a load that reads or writes these slots, one transfer for each; slot n has the nth tile's memory."""
        return slots.load(verb, numbers, address + numbers.start * tile_bytes)

    def try_depth(depth: int) -> None:
        """Set a depth, read and write tiles at the same time, and note the depth's best rate so far in `rates`."""
        tier.set_depth(depth)
        started_s = clock()
        drive(queue, [load("read", range(TILES)), load("write", range(TILES, 2 * TILES))])
        seconds = clock() - started_s
        # The best of the rounds: other work on the machine only ever slows one down.
        rates[depth] = max(rates.get(depth, 0.0), 2 * TILES * tile_bytes / max(seconds, 1e-9))

    # Write all slots once, not timed: only written slots can be read, and first writes take longer. One slot first,
    # then each time as many more as are filled, so that a slow path is noticed soon.
    filled = 0
    while filled < 2 * TILES:
        if has_used(0.25):  # the path is too slow: too little time would be left for depths
            return {}
        more = range(filled, max(1, 2 * filled))
        drive(queue, [load("write", more)])
        filled = more.stop

    for depth in DEPTHS:
        if not goes_on_rising(rates):
            break
        if has_used(1.0):  # with only some depths tried, the best of all is not known
            tier.set_depth(depth_before)
            return {}
        try_depth(depth)
    for depth in (ROUNDS - 1) * sorted(rates):  # further rounds
        if rates[depth] > HOPELESS * max(rates.values()) and not has_used(1.0):
            try_depth(depth)
    tier.set_depth(choose_depth(rates))
    return rates
