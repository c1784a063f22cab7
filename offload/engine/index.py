"""Where every tile's newest version lies, and which slots of each store are free. Pure.

Invariants:
  * a slot is free, claimed (a write is on its way) or live (an index entry names it), never two of them;
  * a tile has at most one live slot; a write never goes to a live slot;
  * there are never more slots of a size than the plan reckons with, so its bytes on storage are an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offload.errors import invariant
from offload.protocols import SECTOR_BYTES, TileId


@dataclass(frozen=True, slots=True)
class Location:
    """One slot: `offset` and `nbytes` (payload) in the store of path number `path`."""

    path: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """A tile's newest version on storage: where it lies, which step wrote it, and its checksum."""

    location: Location
    step: int
    checksum: int


@dataclass(slots=True)
class _Store:
    limit_bytes: int
    share: float
    end: int = 0
    live_bytes: int = 0
    usable: bool = True
    free: dict[int, list[int]] = field(default_factory=dict)


class TileIndex:
    """The slots of all stores of one session.

    Args:
        stores: For each path, the bytes its store may grow to and its share of the tiles.
        slot_counts: For each payload size, the most slots there may be in all stores together.
    """

    def __init__(self, stores: Sequence[tuple[int, float]], slot_counts: Mapping[int, int]) -> None:
        self._allowed = dict(slot_counts)
        self._unmade = dict(slot_counts)
        self._stores = [_Store(limit, share) for limit, share in stores]
        self._records: dict[TileId, Record] = {}
        self._claimed: set[Location] = set()

    def get(self, tile: TileId) -> Record | None:
        """Return where the newest version of `tile` lies, or None if it was never written."""
        return self._records.get(tile)

    def claim(self, nbytes: int) -> Location | None:
        """Reserve a free slot for a payload of `nbytes`, on the path that is furthest behind its share.

        Returns:
            The slot, or None if no usable path has room.
        """
        whole = nbytes + SECTOR_BYTES
        best: tuple[float, int] | None = None
        for number, store in enumerate(self._stores):
            growing = self._unmade.get(nbytes, 0) > 0 and store.end + whole <= store.limit_bytes
            if not store.usable or not (store.free.get(nbytes) or growing):
                continue
            rank = ((store.live_bytes + whole) / store.share, number)
            if best is None or rank < best:
                best = rank
        if best is None:
            return None
        number = best[1]
        store = self._stores[number]
        free = store.free.get(nbytes)
        if free:
            offset = free.pop()
        else:
            offset = store.end
            store.end += whole
            self._unmade[nbytes] -= 1
        store.live_bytes += whole
        location = Location(number, offset, nbytes)
        self._claimed.add(location)
        return location

    def commit(self, tile: TileId, record: Record) -> None:
        """Make a claimed slot the newest version of `tile`; the slot of the version before becomes free."""
        invariant(record.location in self._claimed, f"{tile} was written to a slot nobody claimed")
        before = self._records.get(tile)
        self._claimed.remove(record.location)
        self._records[tile] = record
        if before is not None:
            self._release(before.location)

    def abandon(self, location: Location) -> None:
        """Give a claimed slot back; its content counts for nothing."""
        invariant(location in self._claimed, "a slot that was not claimed is given back")
        self._claimed.remove(location)
        self._release(location)

    def allow(self, slot_counts: Mapping[int, int]) -> None:
        """Reckon with more slots, as a plan for more subgroups does."""
        made = {nbytes: -count for nbytes, count in self._unmade.items()}
        for nbytes, count in slot_counts.items():
            self._unmade[nbytes] = count - self._allowed.get(nbytes, 0) - made.get(nbytes, 0)
        self._allowed = dict(slot_counts)

    def retire(self, path: int) -> None:
        """Write to this path no more; what lies there stays readable."""
        self._stores[path].usable = False

    def _release(self, location: Location) -> None:
        store = self._stores[location.path]
        store.live_bytes -= location.nbytes + SECTOR_BYTES
        store.free.setdefault(location.nbytes, []).append(location.offset)

    def live_bytes(self) -> tuple[int, ...]:
        """Return, for each path, the bytes of its live and claimed slots."""
        return tuple(store.live_bytes for store in self._stores)

    def check(self) -> None:
        """Verify the invariants that the module states.

        Raises:
            InternalError: If one does not hold.
        """
        taken: dict[tuple[int, int], str] = {}
        slots = [(record.location, str(tile)) for tile, record in self._records.items()]
        slots += [(location, "claimed") for location in sorted(self._claimed, key=lambda x: (x.path, x.offset))]
        for number, store in enumerate(self._stores):
            for nbytes, offsets in store.free.items():
                slots += [(Location(number, offset, nbytes), "free") for offset in offsets]
        total = [0] * len(self._stores)
        for location, who in slots:
            key = (location.path, location.offset)
            invariant(key not in taken, f"slot {key} belongs to {taken.get(key)} and {who}")
            taken[key] = who
            total[location.path] += location.nbytes + SECTOR_BYTES
        for number, store in enumerate(self._stores):
            invariant(total[number] == store.end, f"store {number} lost {store.end - total[number]} bytes")
