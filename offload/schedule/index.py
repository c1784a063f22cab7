"""Where every tile's newest version lies, and which slots of each store are free. Pure.

A slot is taken by `claim`, then named by `commit`, given back by `abandon` or, if its write has failed, by `refuse`.
Checkpoints set room aside (`reserve`, `give_back`), `hold` slots and `let_go`. A session that resumes may `take_over`
stores and `adopt` tiles.

What a step cannot do without comes first: its own slots are `cut` and their room is allocated (`allocated`) before
others may have any. Others (speculative versions, activations, state that leaves memory) are *lent* slots: they
reserve and claim them with `lent`, and get none that a step may need.

Invariants:
  * a slot is free, claimed (a write is on its way) or in use: live (an index entry names it), held (checkpoints name
    it), or both; only free slots are written to;
  * a tile has at most one live slot;
  * held slots come on top of the planned ones, so room is reserved before they are held;
  * a path number beyond the stores is that of a *foreign* store: it is only read, its slots are live at most, and its
    owner frees them;
  * there are never more slots of a size than planned, so the plan's bytes on storage are an upper bound; free slots
    on a path that is no longer written to do not count, so that other paths can take their place; after `reshare` a
    path may get more, where there is room beyond the plan;
  * of each size, no fewer slots are free or in the plan's use than the plan may need at once, whatever is lent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from offload.errors import InternalError, invariant
from offload.protocols import SECTOR_BYTES, TileId

GROWTH_CREDIT_TILES = 2
"""How many tiles a path has to be behind before its store grows beyond the plan instead of another's being reused."""


@dataclass(frozen=True, slots=True)
class Location:
    """One slot: `offset` and `nbytes` (payload) in the store of path number `path`."""

    path: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """A tile's newest version on storage: where it lies, which step wrote it, and the checksum that it has got."""

    location: Location
    step: int
    checksum: int = 0


@dataclass(slots=True)
class _Store:
    limit_bytes: int
    share: float
    end: int = 0
    live_bytes: int = 0
    lost_bytes: int = 0
    credit_bytes: float = 0.0
    usable: bool = True
    is_full: bool = False  # whether it is not asked to grow
    there: int = 0  # bytes whose room is known to be there
    due: int = 0  # bytes that are to be there before slots are lent
    free: dict[int, list[int]] = field(default_factory=dict)
    absent: dict[int, list[int]] = field(default_factory=dict)  # slots whose file had no room for them

    def may_grow(self, nbytes: int) -> bool:
        """Return whether there may be one more slot."""
        fits = bool(self.absent.get(nbytes)) or self.end + nbytes + SECTOR_BYTES <= self.limit_bytes
        return fits and not self.is_full

    def grow(self, nbytes: int) -> int:
        """Return the offset of one more slot."""
        absent = self.absent.get(nbytes)
        if absent:
            self.lost_bytes -= nbytes + SECTOR_BYTES
            return absent.pop()
        self.end += nbytes + SECTOR_BYTES
        return self.end - nbytes - SECTOR_BYTES


class TileIndex:
    """The slots of all stores of one session.

    Args:
        stores: For each path, the bytes its store may grow to and its share of the tiles.
        slot_counts: For each payload size, the most slots there may be in all stores together.
        checkpoint_bytes: Most that checkpoints may hold; stores that grow beyond the plan leave this room.
    """

    def __init__(
        self, stores: Sequence[tuple[int, float]], slot_counts: Mapping[int, int], checkpoint_bytes: int = 0
    ) -> None:
        self._planned = dict(slot_counts)
        self._unmade = Counter(slot_counts)
        self._stores = [_Store(limit, share) for limit, share in stores]
        self._drifting = False
        self._lent: Counter[int] = Counter()  # of those that are not made: reserved to be lent
        self._lent_out: set[Location] = set()  # claimed slots that are lent
        self._records: dict[TileId, Record] = {}
        self._claimed: set[Location] = set()
        self._held: dict[Location, int] = {}
        self._checkpoint_bytes = checkpoint_bytes
        self._held_bytes = 0

    def get(self, tile: TileId) -> Record | None:
        """Return where the newest version of `tile` lies, or None if it was never written."""
        return self._records.get(tile)

    def claim(self, nbytes: int, avoid: Collection[int] = (), *, lent: bool = False) -> Location | None:
        """Reserve a free slot for a payload of `nbytes`, on the path whose turn it is; on none of `avoid`.

        Turns are in proportion to shares and interleaved as evenly as can be, so that every subgroup is striped over
        all paths and its tiles arrive together (smooth weighted round robin).

        Args:
            nbytes: Its payload.
            avoid: Paths.
            lent: Whether no step needs it: it is one that was reserved to be `lent`.

        Returns:
            The slot, or None if no usable path has room.
        """
        whole = nbytes + SECTOR_BYTES
        own = self._own_unmade(nbytes)
        unmade = self._unmade.get(nbytes, 0) if lent else own
        reuses = own < 0 or not lent
        able: list[tuple[int, _Store, float]] = []
        total = 0.0
        for number, store in enumerate(self._stores):
            if not store.usable or number in avoid:
                continue
            handicap = 0.0
            if not (reuses and store.free.get(nbytes)):
                if not store.may_grow(nbytes):
                    continue
                if unmade <= 0:
                    if lent or not self._may_grow(whole):
                        continue
                    handicap = GROWTH_CREDIT_TILES * whole
            able.append((number, store, handicap))
            total += store.share
        if not able:
            return None
        best = -math.inf
        number, store, _ = able[0]
        for candidate, offered, handicap in able:
            credit_bytes = offered.credit_bytes = offered.credit_bytes + whole * offered.share / total
            if credit_bytes - handicap > best:
                best, number, store = credit_bytes - handicap, candidate, offered
        store.credit_bytes -= whole
        if reuses and store.free.get(nbytes):
            location = Location(number, store.free[nbytes].pop(), nbytes)
        else:
            location = Location(number, store.grow(nbytes), nbytes)
            if unmade > 0:
                self._unmade[nbytes] -= 1
        if lent:
            self._lent_out.add(location)
            self._lent[nbytes] -= 1
        store.live_bytes += whole
        self._claimed.add(location)
        return location

    def lend(self, nbytes: int, avoid: Collection[int] = ()) -> Location | None:
        """Claim a slot that can be done without; None while slots that plan and checkpoints need are missing, too."""
        return self.claim(nbytes, avoid, lent=True) if self.is_whole else None

    def _own_unmade(self, nbytes: int) -> int:
        """Return how many slots of a size plan and checkpoints need beside those that are made; < 0 for too many."""
        return self._unmade.get(nbytes, 0) - self._lent[nbytes]

    @property
    def is_whole(self) -> bool:
        """Whether all slots that plan and checkpoints need are there, so that others may be lent."""
        are_there = all(store.due <= store.there for store in self._stores if store.usable)
        return are_there and all(self._own_unmade(nbytes) <= 0 for nbytes in self._unmade)

    def cut(self) -> None:
        """Make the slots that plan and checkpoints need, spread as their paths are fast; see `allocated`."""
        for nbytes in sorted(self._unmade, reverse=True):
            whole, missing = nbytes + SECTOR_BYTES, self._own_unmade(nbytes)
            stores = [store for store in self._stores if store.usable]
            shares = sum(store.share for store in stores)
            made: list[tuple[_Store, list[int]]] = []
            for store in stores:  # what has no room on one path goes to the next ones
                count, shares = math.ceil(missing * store.share / shares), shares - store.share
                fits = len(store.absent.get(nbytes, ())) + max(0, store.limit_bytes - store.end) // whole
                count = max(0, min(missing, count, fits))
                made.append((store, [store.grow(nbytes) for _ in range(count)]))
                missing -= len(made[-1][1])
            for store, offsets in made:
                while missing > 0 and (store.absent.get(nbytes) or store.end + whole <= store.limit_bytes):
                    offsets.append(store.grow(nbytes))
                    missing -= 1
                self._unmade[nbytes] -= len(offsets)
                store.due = store.end if offsets else store.due
                # What has been in use is used again first: its room is there.
                store.free[nbytes] = [*sorted(offsets, reverse=True), *store.free.get(nbytes, ())]

    def allocated(self, ends: Sequence[int]) -> None:
        """Take in that the room of each path's first bytes is there."""
        for store, nbytes in zip(self._stores, ends, strict=True):
            store.there = max(store.there, nbytes)

    def end_bytes(self, path: int) -> int:
        """Return where the slots of a store end."""
        return self._stores[path].end

    def stop_growing(self, path: int) -> None:
        """Have a store that has refused to grow not be asked again before `try_again`."""
        self._stores[path].is_full = True

    def try_again(self) -> None:
        """Have all stores be asked again for room."""
        for store in self._stores:
            store.is_full = False

    def commit(self, tile: TileId, record: Record) -> None:
        """Make a claimed slot the newest version of `tile`; the slot of the version before becomes free."""
        if record.location not in self._claimed:  # not by `invariant`: its message would be made for every tile
            raise InternalError(f"{tile} was written to a slot nobody claimed (this is a bug in offload)")
        before = self._records.get(tile)
        if before is not None:
            self.keep(record.location)
        self._unclaim(record.location)
        self._records[tile] = record
        if before is not None:
            self._release(before.location)

    def keep(self, location: Location) -> None:
        """Take in that a claimed slot is lent no more: the plan will use it, and gives back another."""
        if location in self._lent_out:
            self._lent_out.remove(location)
            self._lent[location.nbytes] += 1

    def _unclaim(self, location: Location) -> None:
        self._claimed.remove(location)
        self._lent_out.discard(location)

    def written(self, location: Location) -> None:
        """Take in that a write has ended well, so that its room is there."""
        if not self._is_foreign(location):
            store = self._stores[location.path]
            store.there = max(store.there, location.offset + location.nbytes + SECTOR_BYTES)

    def forget(self, tile: TileId) -> None:
        """Free the slot of a tile's newest version, and the room that was reserved for it: it is in memory again."""
        record = self._records.pop(tile)
        self._release(record.location)
        self._change_unmade({record.location.nbytes: 1}, -1)

    def drop(self, tile: TileId) -> None:
        """Free the slot of a tile that is of no use any more; its room stays planned."""
        self._release(self._records.pop(tile).location)

    def abandon(self, location: Location) -> None:
        """Give a claimed slot back; what was written there is ignored."""
        invariant(location in self._claimed, "a slot that was not claimed is given back")
        self.keep(location)
        self._unclaim(location)
        self._release(location)

    def is_held(self, location: Location) -> bool:
        """Return whether a checkpoint names a slot."""
        return location in self._held

    def reserve(self, slot_counts: Mapping[int, int], *, lent: bool = False) -> bool:
        """Set room aside for slots beyond the plan; return whether there is enough.

        Args:
            slot_counts: How many, by payload bytes.
            lent: Whether no step needs them: they leave the room that checkpoints may still need.
        """
        fits = self.missing_bytes(slot_counts, spare=lent) <= 0
        if fits:
            self._change_unmade(slot_counts, 1, lent=lent)
        return fits

    def missing_bytes(self, slot_counts: Mapping[int, int], *, spare: bool = False) -> int:
        """Return the bytes that the stores lack for slots beyond the plan; see `reserve`."""
        if not any(slot_counts.values()):
            return 0
        unmade = dict(self._unmade)
        for nbytes, count in slot_counts.items():
            unmade[nbytes] = unmade.get(nbytes, 0) + count
        if not any(store.usable for store in self._stores):
            return sum((nbytes + SECTOR_BYTES) * count for nbytes, count in slot_counts.items())
        promised_bytes = self._promised_bytes() if spare else 0
        return max(0, promised_bytes - self._spare_bytes(unmade, leaves=spare))

    def give_back(self, slot_counts: Mapping[int, int], *, lent: bool = False) -> None:
        """Give back reserved room that was not used."""
        self._change_unmade(slot_counts, -1, lent=lent)

    def _change_unmade(self, slot_counts: Mapping[int, int], sign: int, *, lent: bool = False) -> None:
        for nbytes, count in slot_counts.items():
            self._unmade[nbytes] = self._unmade.get(nbytes, 0) + sign * count
            self._lent[nbytes] += sign * count * lent

    def hold(self, location: Location) -> bool:
        """Keep a live, held or (once written) claimed slot for a checkpoint; return whether it uses reserved room."""
        if location in self._claimed:
            self._unclaim(location)
            self._stores[location.path].live_bytes -= location.nbytes + SECTOR_BYTES
        self._held[location] = self._held.get(location, 0) + 1
        first = self._held[location] == 1
        self._held_bytes += (location.nbytes + SECTOR_BYTES) * first
        return first

    def let_go(self, tile: TileId, location: Location) -> None:
        """End one `hold`; a slot that nothing names any more becomes free."""
        invariant(location in self._held, "a slot that is not held is let go")
        self._held[location] -= 1
        if self._held[location]:
            return
        del self._held[location]
        self._held_bytes -= location.nbytes + SECTOR_BYTES
        self._change_unmade({location.nbytes: 1}, -1)
        record = self._records.get(tile)
        if record is None or record.location != location:
            self._free(location)

    # Going on from a checkpoint where it lies

    def take_over(self, path: int, limit_bytes: int, held: Mapping[Location, int]) -> None:
        """Replace a store of which no slot is in use by one that an earlier session has written.

        Args:
            path: Its path's number.
            limit_bytes: How far it may grow.
            held: Slots that checkpoints name, and how many checkpoints do. The rest is cut into free slots.
        """
        invariant(self.is_empty(path), "a store that is in use is exchanged")
        for nbytes, offsets in self._stores[path].free.items():
            self._unmade[nbytes] += len(offsets)
        store = self._stores[path] = _Store(limit_bytes, self._stores[path].share)
        store.there = max((x.offset + x.nbytes + SECTOR_BYTES for x in held), default=0)
        sizes = sorted({*self._planned, *(location.nbytes for location in held)}, reverse=True)
        for location in sorted(held, key=lambda location: location.offset):
            invariant(location.offset >= store.end, f"two slots overlap at byte {location.offset} of path {path}")
            for nbytes in sizes:
                while store.end + nbytes + SECTOR_BYTES <= location.offset:
                    store.free.setdefault(nbytes, []).append(store.end)
                    store.end += nbytes + SECTOR_BYTES
                    self._unmade[nbytes] = self._unmade.get(nbytes, 0) - 1
            store.lost_bytes += location.offset - store.end
            store.end = location.offset + location.nbytes + SECTOR_BYTES
            self._held[location] = held[location]
            self._held_bytes += location.nbytes + SECTOR_BYTES
            self._unmade.setdefault(location.nbytes, 0)

    def fits(self) -> bool:
        """Return whether all planned and reserved slots have room."""
        return self._spare_bytes(self._unmade) >= 0

    def limit_bytes(self, path: int) -> int:
        """Return how far a store may grow."""
        return self._stores[path].limit_bytes

    def is_empty(self, path: int) -> bool:
        """Return whether no slot of a store is in use."""
        return not (self._stores[path].live_bytes or any(location.path == path for location in self._held))

    def adopt(self, tile: TileId, record: Record) -> None:
        """Make a slot that is held, or one of a foreign store, the newest version of `tile`."""
        location, before = record.location, self._records.get(tile)
        if not self._is_foreign(location):
            invariant(location in self._held, f"{tile} is taken from a slot that no checkpoint holds")
            self._stores[location.path].live_bytes += location.nbytes + SECTOR_BYTES
        self._records[tile] = record
        if before is not None:
            self._release(before.location)

    def _is_foreign(self, location: Location) -> bool:
        return location.path >= len(self._stores)

    def is_foreign(self, tile: TileId) -> bool:
        """Return whether the newest version of a tile lies in a foreign store."""
        record = self._records.get(tile)
        return record is not None and self._is_foreign(record.location)

    def is_there(self, location: Location) -> bool:
        """Return whether the room of a slot is known to be there, so that its path may be full and take it."""
        return location.offset + location.nbytes + SECTOR_BYTES <= self._stores[location.path].there

    def refuse(self, location: Location, *, is_full: bool) -> None:
        """Take in that a claimed slot cannot be written: it is never used again, unless its path is full."""
        store, nbytes = self._stores[location.path], location.nbytes
        if is_full and self.is_there(location):
            self.abandon(location)
            return
        if is_full:
            store.absent.setdefault(nbytes, []).append(location.offset)
        self.keep(location)
        self._unclaim(location)
        store.live_bytes -= nbytes + SECTOR_BYTES
        store.lost_bytes += nbytes + SECTOR_BYTES
        self._unmade[nbytes] += 1

    def _spare_bytes(self, unmade: Mapping[int, int], *, leaves: bool = False) -> int:
        """Return the bytes that are left in all usable stores once these slots have been made; < 0 for too few.

        Args:
            unmade: How many, by payload bytes.
            leaves: Whether there is to be room for more, of any size, after that.
        """
        usable = [store for store in self._stores if store.usable]
        absent = {nbytes: sum(len(store.absent.get(nbytes, ())) for store in usable) for nbytes in unmade}
        todo = [(n + SECTOR_BYTES, count - absent[n]) for n, count in unmade.items() if count > absent[n]]
        # What is left at the end of each path may be too short for a slot.
        sizes = (nbytes + SECTOR_BYTES for nbytes in unmade) if leaves else (size for size, _ in todo)
        slack = max(sizes, default=0) * (len(usable) - 1)
        return sum(store.limit_bytes - store.end for store in usable) - sum(s * count for s, count in todo) - slack

    def _may_grow(self, whole: int) -> bool:
        """Return whether a slot beyond the plan leaves the room that plan and checkpoints may still need."""
        return self._drifting and self._spare_bytes(self._unmade, leaves=True) - self._promised_bytes() >= whole

    def _promised_bytes(self) -> int:
        """Return the bytes that checkpoints may still need."""
        return max(0, self._checkpoint_bytes - self._held_bytes)

    def reshare(self, shares: Sequence[float]) -> None:
        """Spread tiles in other proportions from now on.

        Tiles stay in their slots until they are written again. A path with a larger share may get more slots than
        planned, where there is room beyond the plan.
        """
        self._drifting = True
        for store, share in zip(self._stores, shares, strict=True):
            store.share = share

    def allow(self, slot_counts: Mapping[int, int]) -> None:
        """Raise the number of planned slots to that of a larger plan."""
        for nbytes, count in slot_counts.items():
            self._unmade[nbytes] = self._unmade.get(nbytes, 0) + count - self._planned.get(nbytes, 0)
        self._planned = dict(slot_counts)

    def has_room(self, slot_counts: Mapping[int, int]) -> bool:
        """Return whether all slots of a larger plan could still be made, as `allow` promises."""
        unmade = {n: count - self._planned.get(n, 0) + self._unmade.get(n, 0) for n, count in slot_counts.items()}
        return self._spare_bytes(unmade) >= 0

    def retire(self, path: int) -> None:
        """Write to this path no more; what lies there stays readable."""
        store = self._stores[path]
        if store.usable:
            store.usable = False
            for nbytes, offsets in store.free.items():
                self._unmade[nbytes] += len(offsets)

    def _release(self, location: Location) -> None:
        if self._is_foreign(location):
            return
        store = self._stores[location.path]
        store.live_bytes -= location.nbytes + SECTOR_BYTES
        if location not in self._held:
            self._free(location)

    def _free(self, location: Location) -> None:
        store = self._stores[location.path]
        store.free.setdefault(location.nbytes, []).append(location.offset)
        if not store.usable:
            self._unmade[location.nbytes] += 1

    def live_bytes(self) -> tuple[int, ...]:
        """Return, for each path, the bytes of its live and claimed slots."""
        return tuple(store.live_bytes for store in self._stores)

    def check(self) -> None:
        """Verify the invariants that the module states.

        Raises:
            InternalError: If one does not hold.
        """
        # Thousands of times in a simulation: keys are plain tuples, and texts are made of what is wrong only.
        live = [(record.location, tile) for tile, record in self._records.items()]
        slots: list[tuple[int, int, int, object]] = [
            (at.path, at.offset, at.nbytes, tile) for at, tile in live if not self._is_foreign(at)
        ]
        slots += [(at.path, at.offset, at.nbytes, "claimed") for at in self._claimed]
        held = {(at.path, at.offset, at.nbytes) for at in self._held}.difference(slot[:3] for slot in slots)
        slots += [(*at, "held") for at in held]
        for number, store in enumerate(self._stores):
            for nbytes, offsets in store.free.items():
                slots += [(number, offset, nbytes, "free") for offset in offsets]
        total = [0] * len(self._stores)
        taken: dict[tuple[int, int], object] = {}
        for path, offset, nbytes, who in slots:
            key = (path, offset)
            if key in taken:
                invariant(False, f"slot {key} belongs to {taken[key]} and {who}")
            taken[key] = who
            total[path] += nbytes + SECTOR_BYTES
        for number, store in enumerate(self._stores):
            unaccounted = store.end - total[number] - store.lost_bytes
            invariant(unaccounted == 0, f"store {number} lost {unaccounted} bytes")
