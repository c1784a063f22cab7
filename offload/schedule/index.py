"""Where every tile's newest version lies, and which slots of each store are free. Pure.

Checkpoints set room aside (`reserve`, `unreserve`) before they `hold` slots. A session that resumes goes on in stores
of another one (`replace_store`), whose tiles it makes its own (`make_newest`). A slot::

    free          | claim                                               | claimed
    claimed       | commit                                              | live
    claimed       | hold                                                | held
    claimed       | abandon                                             | free
    claimed       | abandon_unwritable                                  | lost
    live          | free_discarded or commit of the tile's next version | free
    live          | hold                                                | live and held
    live and held | free_discarded or commit of the tile's next version | held
    live and held | hold or make_newest                                 | live and held
    live and held | unhold                                              | live
    held          | hold                                                | held
    held          | make_newest                                         | live and held
    held          | unhold                                              | free

`free_and_unreserve` also undoes `reserve`. Holds are counted: `unhold` here ends the last one. If a path is full, but
has the slot's room already, `abandon_unwritable` is an `abandon`.

Slots that steps and checkpoints need come first: they are made (`make_slots`), and their room on the disk is
allocated (`note_allocated`), before others may have any. All others are *loans*: to speculative versions, to
activations, and to state that is evicted from memory. Room for loans is reserved, and loans are claimed, with `lent`:
none is a slot that a step may need.

"Unmade" slots are those that may still be made: planned or reserved, and not part of a store yet.

Slots are counted by the bytes of their payload. Each takes a header of `SECTOR_BYTES` more.

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
from typing import NamedTuple

from offload.errors import InternalError, invariant
from offload.protocols import SECTOR_BYTES, TileId

GROWTH_CREDIT_TILES = 2
"""By how many tiles a path must be below its share before its store grows beyond the plan while others have slots."""


@dataclass(frozen=True, slots=True)
class Location:
    """One slot: `offset` and `nbytes` in the store of path number `path`.

    The slot begins with a header of `SECTOR_BYTES`, at `offset`; `nbytes` are those of the payload behind it.
    """

    path: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TileRecord:
    """A tile's newest version on storage: its slot, the step that wrote it, and the checksum of its payload."""

    location: Location
    step: int
    checksum: int = 0


@dataclass(slots=True)
class _Store:
    """What is known of one path's store."""

    limit_bytes: int
    share: float
    end: int = 0  # where its slots end
    live_bytes: int = 0  # of live and claimed slots
    lost_bytes: int = 0  # of gaps and refused slots
    credit_bytes: float = 0.0  # its share of all claims so far, less its own
    usable: bool = True  # False once its path is retired: it is only read
    is_full: bool = False  # it refused to grow and is not asked again before `try_again`
    allocated_end: int = 0  # the disk is known to have room for the bytes before this
    needed_end: int = 0  # slots are lent only while the disk has room for the bytes before this
    free: dict[int, list[int]] = field(default_factory=dict)  # offsets, by payload bytes
    absent: dict[int, list[int]] = field(default_factory=dict)  # likewise, of refused slots that may get room later

    def has_space(self, nbytes: int) -> bool:
        """Return whether one more slot may be made without exceeding the store's limit."""
        return bool(self.absent.get(nbytes)) or self.end + nbytes + SECTOR_BYTES <= self.limit_bytes

    def may_grow(self, nbytes: int) -> bool:
        """Return whether one more slot may be made now."""
        return not self.is_full and self.has_space(nbytes)

    def grow(self, nbytes: int) -> int:
        """Make one more slot and return its offset; a refused one is tried again first."""
        slot_bytes = nbytes + SECTOR_BYTES
        absent = self.absent.get(nbytes)
        if absent:
            self.lost_bytes -= slot_bytes
            return absent.pop()
        offset = self.end
        self.end += slot_bytes
        return offset


class _Candidate(NamedTuple):
    """A store that can give a slot to a claim."""

    number: int
    store: _Store
    handicap_bytes: float  # by how much its credit must exceed that of others


def _take_turn(candidates: Sequence[_Candidate], slot_bytes: int) -> tuple[int, _Store]:
    """Choose the store that gives a slot, by smooth weighted round robin; return its path's number and the store.

    Each candidate gets its share of the slot's bytes as credit. The one with the highest credit, its handicap
    subtracted, is chosen and pays the whole slot, so that others have their turn next.
    """
    total_share = 0.0
    for candidate in candidates:
        total_share += candidate.store.share
    best_bytes = -math.inf
    chosen, chosen_store, _ = candidates[0]  # until the loop has compared credits
    for number, store, handicap_bytes in candidates:
        store.credit_bytes += slot_bytes * store.share / total_share
        if store.credit_bytes - handicap_bytes > best_bytes:
            best_bytes = store.credit_bytes - handicap_bytes
            chosen, chosen_store = number, store
    chosen_store.credit_bytes -= slot_bytes
    return chosen, chosen_store


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
        """By payload bytes, slots that may still be made; below 0 if more are made than are planned or reserved."""
        self._stores = [_Store(limit, share) for limit, share in stores]
        self._is_reshared = False  # whether paths may get more slots than planned
        self._unmade_loans: Counter[int] = Counter()  # how many of `_unmade` are reserved to be lent
        self._lent: set[Location] = set()  # claimed slots that are lent
        self._records: dict[TileId, TileRecord] = {}
        self._claimed: set[Location] = set()
        self._held: dict[Location, int] = {}  # how many checkpoints hold each
        self._checkpoint_bytes = checkpoint_bytes
        self._held_bytes = 0

    def get(self, tile: TileId) -> TileRecord | None:
        """Return where the newest version of `tile` lies, or None if it was never written."""
        return self._records.get(tile)

    def claim(self, nbytes: int, avoid: Collection[int] = (), *, lent: bool = False) -> Location | None:
        """Claim a free slot for a payload of `nbytes` on the path whose turn it is; make one there if it has none.

        Turns are in proportion to shares and interleaved as evenly as can be, so that every subgroup is striped over
        all paths and its tiles arrive together (smooth weighted round robin). A claim moves the turn on.

        Args:
            nbytes: Bytes of the payload.
            avoid: Numbers of paths that give no slot.
            lent: Whether no step needs the slot: it is one of those that were reserved with `lent`.

        Returns:
            The slot, or None if no usable path has room.
        """
        slot_bytes = nbytes + SECTOR_BYTES
        unmade_to_keep = self._unmade_to_keep(nbytes)
        # How many slots may be made within what is planned and reserved. Loans' part is for claims with `lent` only.
        unmade = self._unmade.get(nbytes, 0) if lent else unmade_to_keep
        may_reuse = unmade_to_keep < 0 or not lent  # < 0: more slots are made than steps and checkpoints need
        # A store grows beyond the plan only if its credit exceeds that of stores with a free slot by so much.
        handicap_bytes = 0.0 if unmade > 0 else GROWTH_CREDIT_TILES * slot_bytes
        candidates: list[_Candidate] = []
        for number, store in enumerate(self._stores):
            if not store.usable or number in avoid:
                continue
            if may_reuse and store.free.get(nbytes):
                candidates.append(_Candidate(number, store, 0.0))
            elif store.may_grow(nbytes) and (unmade > 0 or (not lent and self._may_grow_beyond_plan(slot_bytes))):
                candidates.append(_Candidate(number, store, handicap_bytes))
        if not candidates:
            return None
        number, store = _take_turn(candidates, slot_bytes)
        if may_reuse and store.free.get(nbytes):
            location = Location(number, store.free[nbytes].pop(), nbytes)
        else:
            location = Location(number, store.grow(nbytes), nbytes)
            if unmade > 0:
                self._unmade[nbytes] -= 1
        if lent:
            self._lent.add(location)
            self._unmade_loans[nbytes] -= 1  # so if a free slot is lent, the plan has one more to be made
        store.live_bytes += slot_bytes
        self._claimed.add(location)
        return location

    def claim_loan(self, nbytes: int, avoid: Collection[int] = ()) -> Location | None:
        """Claim a slot to be lent; return None if there is none, or while plan and checkpoints lack slots or room."""
        return self.claim(nbytes, avoid, lent=True) if self.has_needed_slots else None

    def _unmade_to_keep(self, nbytes: int) -> int:
        """Return how many slots of a size have still to be made for plan and checkpoints, loans left out.

        < 0 if more are made than plan and checkpoints need.
        """
        return self._unmade.get(nbytes, 0) - self._unmade_loans[nbytes]

    @property
    def has_needed_slots(self) -> bool:
        """Whether all slots that plan and checkpoints need are made and have room, so that others may be lent."""
        have_room = all(store.needed_end <= store.allocated_end for store in self._stores if store.usable)
        return have_room and all(self._unmade_to_keep(nbytes) <= 0 for nbytes in self._unmade)

    def make_slots(self) -> None:
        """Make all slots that plan and checkpoints need, on each path by its share, largest sizes first.

        Their room on the disk is allocated afterwards: `note_allocated` then says how far.
        """
        for nbytes in sorted(self._unmade, reverse=True):
            for store, offsets in self._made_slots(nbytes, self._unmade_to_keep(nbytes)):
                self._unmade[nbytes] -= len(offsets)
                if offsets:
                    store.needed_end = store.end
                # `claim` takes from the end: first the slots that were free before; then new ones, the lowest offset
                # first.
                store.free[nbytes] = [*sorted(offsets, reverse=True), *store.free.get(nbytes, ())]

    def _made_slots(self, nbytes: int, missing: int) -> list[tuple[_Store, list[int]]]:
        """Make `missing` slots of a size, as many as fit; return each usable store with the offsets of its new slots.

        Each store gets its part of those still missing, by its share among the stores still to come. So slots that
        have no room in one store are made in the next ones.
        """
        stores = [store for store in self._stores if store.usable]
        shares_left = sum(store.share for store in stores)
        offsets_by_store: list[tuple[_Store, list[int]]] = []
        for store in stores:
            wanted = math.ceil(missing * store.share / shares_left)
            shares_left -= store.share
            unused_slots = max(0, store.limit_bytes - store.end) // (nbytes + SECTOR_BYTES)
            fitting = len(store.absent.get(nbytes, ())) + unused_slots
            count = max(0, min(missing, wanted, fitting))  # `missing` is < 0 if more are made than are needed
            offsets_by_store.append((store, [store.grow(nbytes) for _ in range(count)]))
            missing -= count
        for store, offsets in offsets_by_store:  # slots without room in the last stores are made in the first ones
            while missing > 0 and store.has_space(nbytes):
                offsets.append(store.grow(nbytes))
                missing -= 1
        return offsets_by_store

    def note_allocated(self, ends: Sequence[int]) -> None:
        """Note that the disk has room for each store's bytes before `ends[path]`."""
        for store, nbytes in zip(self._stores, ends, strict=True):
            store.allocated_end = max(store.allocated_end, nbytes)

    def end_bytes(self, path: int) -> int:
        """Return where the slots of a store end."""
        return self._stores[path].end

    def stop_growing(self, path: int) -> None:
        """Do not make slots in a store, which has refused to grow, before `try_again`."""
        self._stores[path].is_full = True

    def try_again(self) -> None:
        """Let all stores grow again."""
        for store in self._stores:
            store.is_full = False

    def commit(self, tile: TileId, record: TileRecord) -> None:
        """Make a claimed slot the newest version of `tile`; the slot of the version before becomes free."""
        if record.location not in self._claimed:  # not by `invariant`: its message would be made for every tile
            raise InternalError(f"{tile} was written to a slot nobody claimed (this is a bug in offload)")
        before = self._records.get(tile)
        # A lent slot becomes the plan's, in place of that of the version before, which is freed below. A lent slot of
        # a first version (evicted state, activations) stays beyond the plan: see `free_and_unreserve`.
        if before is not None:
            self.loan_to_plan(record.location)
        self._unclaim(record.location)
        self._records[tile] = record
        if before is not None:
            self._end_live(before.location)

    def loan_to_plan(self, location: Location) -> None:
        """Turn a lent slot into one of the plan's; nothing is done if it is not lent.

        The plan then has one slot fewer to be made, and loans have one more.
        """
        if location in self._lent:
            self._lent.remove(location)
            self._unmade_loans[location.nbytes] += 1  # the plan's part is the rest of `_unmade` (`_unmade_to_keep`)

    def _unclaim(self, location: Location) -> None:
        """End a claim, and forget whether the slot was lent."""
        self._claimed.remove(location)
        self._lent.discard(location)

    def note_written(self, location: Location) -> None:
        """Note that a slot has been written, so that the disk has room for it.

        Slots before it count as having room, too: the file of a store is allocated from its begin on.
        """
        if not self._is_foreign(location):
            store = self._stores[location.path]
            store.allocated_end = max(store.allocated_end, location.offset + location.nbytes + SECTOR_BYTES)

    def free_and_unreserve(self, tile: TileId) -> None:
        """Free the slot of a tile, which is in memory again, and give back the room that was reserved for it."""
        record = self._records.pop(tile)
        self._end_live(record.location)
        # Without `lent`: the loan was counted off when the slot was claimed, or when a held slot took its place.
        self._change_unmade({record.location.nbytes: 1}, -1)

    def free_discarded(self, tile: TileId) -> None:
        """Free the slot of a tile that was discarded; its room stays planned."""
        self._end_live(self._records.pop(tile).location)

    def abandon(self, location: Location) -> None:
        """Give a claimed slot back; what was written there is ignored."""
        invariant(location in self._claimed, "a slot that was not claimed is given back")
        self.loan_to_plan(location)  # so the loan may be claimed again
        self._unclaim(location)
        self._end_live(location)  # `live_bytes` counts claimed slots, too

    def is_held(self, location: Location) -> bool:
        """Return whether a checkpoint names a slot."""
        return location in self._held

    def reserve(self, slot_counts: Mapping[int, int], *, lent: bool = False) -> bool:
        """Set room aside for slots beyond the plan; return whether there was enough, else nothing is reserved.

        Args:
            slot_counts: How many, by payload bytes.
            lent: Whether no step needs them: the room that checkpoints may still need must then remain.
        """
        fits = self.missing_bytes(slot_counts, lent=lent) <= 0
        if fits:
            self._change_unmade(slot_counts, 1, lent=lent)
        return fits

    def missing_bytes(self, slot_counts: Mapping[int, int], *, lent: bool = False) -> int:
        """Return the bytes that the stores lack to `reserve` these slots, 0 if they fit; arguments as there."""
        if not any(slot_counts.values()):  # nothing is asked for: that fits, even if planned slots lack room
            return 0
        if not any(store.usable for store in self._stores):  # so none of them can be made
            return sum((nbytes + SECTOR_BYTES) * count for nbytes, count in slot_counts.items())
        unmade = dict(self._unmade)
        for nbytes, count in slot_counts.items():
            unmade[nbytes] = unmade.get(nbytes, 0) + count
        bytes_to_leave = self._unheld_checkpoint_bytes() if lent else 0
        # What is left to checkpoints has to suit slots of any size.
        return max(0, bytes_to_leave - self._spare_bytes(unmade, for_any_size=lent))

    def unreserve(self, slot_counts: Mapping[int, int], *, lent: bool = False) -> None:
        """Give back reserved room that was not used."""
        self._change_unmade(slot_counts, -1, lent=lent)

    def _change_unmade(self, slot_counts: Mapping[int, int], sign: int, *, lent: bool = False) -> None:
        """Add counts (or subtract: `sign` -1) to the slots that may still be made; with `lent` to loans, too."""
        for nbytes, count in slot_counts.items():
            self._unmade[nbytes] += sign * count
            self._unmade_loans[nbytes] += sign * count if lent else 0

    def hold(self, location: Location) -> bool:
        """Hold a live, held or (once written) claimed slot for a checkpoint; return whether it was not held yet."""
        if location in self._claimed:
            self._unclaim(location)
            self._stores[location.path].live_bytes -= location.nbytes + SECTOR_BYTES  # of live and claimed slots only
        self._held[location] = self._held.get(location, 0) + 1
        is_first = self._held[location] == 1
        if is_first:
            self._held_bytes += location.nbytes + SECTOR_BYTES
        return is_first

    def unhold(self, tile: TileId, location: Location) -> None:
        """End one `hold`; a slot that is neither held nor live any more becomes free."""
        invariant(location in self._held, "a slot that is not held is let go")
        self._held[location] -= 1
        if self._held[location]:
            return
        del self._held[location]
        self._held_bytes -= location.nbytes + SECTOR_BYTES
        self._change_unmade({location.nbytes: 1}, -1)  # it came on top of the planned slots
        record = self._records.get(tile)
        if record is None or record.location != location:  # it is not live: the tile's newest version lies elsewhere
            self._free(location)

    # Going on from a checkpoint where it lies

    def replace_store(self, path: int, limit_bytes: int, held: Mapping[Location, int]) -> None:
        """Replace a store of which no slot is in use by one that an earlier session has written.

        Args:
            path: Its path's number.
            limit_bytes: How far it may grow.
            held: Slots that checkpoints hold, each with the number of those checkpoints. The room before and between
                these slots is cut into free slots, the largest first, even of more than the plan needs (`_unmade` is
                below 0 then).
        """
        invariant(self.is_empty(path), "a store that is in use is exchanged")
        for nbytes, offsets in self._stores[path].free.items():
            self._unmade[nbytes] += len(offsets)  # they go with the old store
        store = self._stores[path] = _Store(limit_bytes, self._stores[path].share)
        store.allocated_end = max((slot.offset + slot.nbytes + SECTOR_BYTES for slot in held), default=0)
        sizes = sorted({*self._planned, *(location.nbytes for location in held)}, reverse=True)
        for location in sorted(held, key=lambda location: location.offset):
            invariant(location.offset >= store.end, f"two slots overlap at byte {location.offset} of path {path}")
            for nbytes in sizes:  # fill the gap before this slot
                while store.end + nbytes + SECTOR_BYTES <= location.offset:
                    store.free.setdefault(nbytes, []).append(store.end)
                    store.end += nbytes + SECTOR_BYTES
                    self._unmade[nbytes] -= 1
            store.lost_bytes += location.offset - store.end  # the rest of the gap, in which no slot fits
            store.end = location.offset + location.nbytes + SECTOR_BYTES
            self._held[location] = held[location]
            self._held_bytes += location.nbytes + SECTOR_BYTES
            self._unmade.setdefault(location.nbytes, 0)  # a size that `_spare_bytes` leaves room for from now on

    def has_planned_room(self) -> bool:
        """Return whether all planned and reserved slots have room."""
        return self._spare_bytes(self._unmade) >= 0

    def limit_bytes(self, path: int) -> int:
        """Return how far a store may grow."""
        return self._stores[path].limit_bytes

    def is_empty(self, path: int) -> bool:
        """Return whether no slot of a store is in use."""
        return not (self._stores[path].live_bytes or any(location.path == path for location in self._held))

    def make_newest(self, tile: TileId, record: TileRecord) -> None:
        """Make a slot that is held, or one of a foreign store, the newest version of `tile`."""
        location, before = record.location, self._records.get(tile)
        if not self._is_foreign(location):
            invariant(location in self._held, f"{tile} is taken from a slot that no checkpoint holds")
            self._stores[location.path].live_bytes += location.nbytes + SECTOR_BYTES
        self._records[tile] = record
        if before is not None:
            self._end_live(before.location)

    def _is_foreign(self, location: Location) -> bool:
        """Return whether a slot lies in a foreign store."""
        return location.path >= len(self._stores)

    def is_foreign(self, tile: TileId) -> bool:
        """Return whether the newest version of a tile lies in a foreign store."""
        record = self._records.get(tile)
        return record is not None and self._is_foreign(record.location)

    def has_room_on_disk(self, location: Location) -> bool:
        """Return whether the room of a slot is known to be there, so that even a full path can take its bytes."""
        return location.offset + location.nbytes + SECTOR_BYTES <= self._stores[location.path].allocated_end

    def abandon_unwritable(self, location: Location, *, is_full: bool) -> None:
        """Give up a claimed slot whose write has failed.

        Usually the slot is lost: its bytes stay unused. If its path is full (`is_full`), it may be made again once
        the path has room. If the full path has the slot's room already, the slot is only abandoned, and so free.
        """
        store, nbytes = self._stores[location.path], location.nbytes
        if is_full and self.has_room_on_disk(location):
            self.abandon(location)
            return
        if is_full:
            store.absent.setdefault(nbytes, []).append(location.offset)
        self.loan_to_plan(location)
        self._unclaim(location)
        store.live_bytes -= nbytes + SECTOR_BYTES
        store.lost_bytes += nbytes + SECTOR_BYTES
        self._unmade[nbytes] += 1  # another is made in its place

    def _spare_bytes(self, unmade: Mapping[int, int], *, for_any_size: bool = False) -> int:
        """Return the bytes that remain in all usable stores once these slots have been made; < 0 if they may not fit.

        Args:
            unmade: How many slots are to be made, by payload bytes.
            for_any_size: Whether the remaining bytes are to be usable for more slots of any of these sizes.
        """
        usable = [store for store in self._stores if store.usable]
        needed_bytes = 0
        sizes = []  # of slots that are to fit, header included
        for nbytes, count in unmade.items():
            absent = sum(len(store.absent.get(nbytes, ())) for store in usable)  # their bytes are below `end`
            needed_bytes += (nbytes + SECTOR_BYTES) * max(0, count - absent)
            if for_any_size or count > absent:
                sizes.append(nbytes + SECTOR_BYTES)
        # All paths but one may end with up to one slot's bytes that no slot fits in.
        wasted_bytes = max(sizes, default=0) * (len(usable) - 1)
        return sum(store.limit_bytes - store.end for store in usable) - needed_bytes - wasted_bytes

    def _may_grow_beyond_plan(self, slot_bytes: int) -> bool:
        """Return whether a slot may be made beyond the plan: it leaves the room that plan and checkpoints need."""
        if not self._is_reshared:  # each path keeps to its planned share
            return False
        return self._spare_bytes(self._unmade, for_any_size=True) - self._unheld_checkpoint_bytes() >= slot_bytes

    def _unheld_checkpoint_bytes(self) -> int:
        """Return the bytes that checkpoints may still need."""
        return max(0, self._checkpoint_bytes - self._held_bytes)

    def reshare(self, shares: Sequence[float]) -> None:
        """Spread tiles over the paths by these shares from now on.

        Tiles stay in their slots until they are written again. A path with a larger share may get more slots than
        planned, where there is room beyond the plan.
        """
        self._is_reshared = True
        for store, share in zip(self._stores, shares, strict=True):
            store.share = share

    def plan_more_slots(self, slot_counts: Mapping[int, int]) -> None:
        """Raise the numbers of planned slots, by payload bytes, to those of a larger plan."""
        for nbytes, count in slot_counts.items():
            self._unmade[nbytes] += count - self._planned.get(nbytes, 0)
        self._planned = dict(slot_counts)

    def has_room(self, slot_counts: Mapping[int, int]) -> bool:
        """Return whether all slots of a larger plan could still be made, as `plan_more_slots` needs."""
        unmade = {}
        for nbytes, count in slot_counts.items():
            unmade[nbytes] = count - self._planned.get(nbytes, 0) + self._unmade.get(nbytes, 0)
        return self._spare_bytes(unmade) >= 0

    def retire(self, path: int) -> None:
        """Write to this path no more; what lies there stays readable."""
        store = self._stores[path]
        if store.usable:
            store.usable = False
            for nbytes, offsets in store.free.items():
                self._unmade[nbytes] += len(offsets)  # they are made on other paths

    def _end_live(self, location: Location) -> None:
        """Free the slot of a version that is not the newest any more, unless a checkpoint holds it."""
        if self._is_foreign(location):
            return
        store = self._stores[location.path]
        store.live_bytes -= location.nbytes + SECTOR_BYTES
        if location not in self._held:
            self._free(location)

    def _free(self, location: Location) -> None:
        """Add a slot to the free ones; on a retired path it is replaced by one to be made elsewhere."""
        store = self._stores[location.path]
        store.free.setdefault(location.nbytes, []).append(location.offset)
        if not store.usable:
            self._unmade[location.nbytes] += 1

    def live_bytes(self) -> tuple[int, ...]:
        """Return, for each path, the bytes of its live and claimed slots."""
        return tuple(store.live_bytes for store in self._stores)

    def check(self) -> None:
        """Verify that each slot is in one state, and that slots and lost bytes fill each store; for `Machine.check`.

        States are live (held, too, or not), claimed, held alone and free. Slots in foreign stores are not counted.
        """
        total_bytes = [0] * len(self._stores)
        owners: dict[tuple[int, int], object] = {}
        for path, offset, nbytes, owner in self._slots_and_owners():
            key = (path, offset)
            if key in owners:  # not by `invariant` alone: its message would be made for every slot
                invariant(False, f"slot {key} belongs to {owners[key]} and {owner}")
            owners[key] = owner
            total_bytes[path] += nbytes + SECTOR_BYTES
        for number, store in enumerate(self._stores):
            unaccounted = store.end - total_bytes[number] - store.lost_bytes
            invariant(unaccounted == 0, f"store {number} has {unaccounted} bytes that nothing accounts for")

    def _slots_and_owners(self) -> list[tuple[int, int, int, object]]:
        """Return path, offset and payload bytes of every slot, and its owner: a tile, "claimed", "held" or "free"."""
        # A simulation calls this thousands of times: hence plain tuples.
        live = [(record.location, tile) for tile, record in self._records.items()]
        slots: list[tuple[int, int, int, object]] = [
            (at.path, at.offset, at.nbytes, tile) for at, tile in live if not self._is_foreign(at)
        ]
        slots += [(at.path, at.offset, at.nbytes, "claimed") for at in self._claimed]
        held = {(at.path, at.offset, at.nbytes) for at in self._held}
        # A slot that is live and held counts once, as live.
        held.difference_update((path, offset, nbytes) for path, offset, nbytes, _ in slots)
        slots += [(*at, "held") for at in held]
        for number, store in enumerate(self._stores):
            for nbytes, offsets in store.free.items():
                slots += [(number, offset, nbytes, "free") for offset in offsets]
        return slots
