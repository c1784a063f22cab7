"""Scratch: data that passes through buffers to the paths and back, and is forgotten when it has been used. Pure.

There are two kinds, each with buffers of its own: gradients, where host memory is not to hold all of them, and
activations that are saved for backward. The rules are the same. Each *owner* (a subgroup of gradients, a tile of
activations) has tiles that pass through one buffer. A caller calls `request` to fill or to read an owner's buffer,
and `release` when it has done so. The data is discarded when it has been used. So buffers are a cache.

Owners are ordered by their last fill. Gradients and activations are filled in one order and read in the opposite one.
So the owner that was filled first is written to the paths first, and the one that was filled last keeps its buffer.

Scratch on the paths is in no checkpoint and is not synced. Its slots are freed as soon as its content is in memory
and about to change.

How the kinds differ is said by the plan (`offload.plan.budget.ScratchBuffers`). It has slots for gradients on the
paths, so a write that finds no room ends the session. Activations get room that state and checkpoints leave: a tile
that no path takes stays in its buffer, and a caller that finds no buffer then keeps its tensors itself.

A *round* (one forward pass) starts with the first fill after all was discarded. The round before says how many tiles
will be filled: those that will not fit are written at once, while buffers are free. In backward, tiles are read from
the last one down before anybody asks, as buffers become free.

The data of an owner ("clean" is in its buffer and on the paths, "stored" on the paths alone)::

    nothing                     | request to fill                     | waiting
    waiting                     | advance                             | newest
    waiting                     | release or discard                  | nothing
    newest                      | advance                             | being written
    being written               | written                             | clean
    being written               | no path takes it                    | newest
    clean                       | advance                             | newest or stored
    stored                      | advance                             | being read
    being read                  | read                                | clean
    being read                  | read has failed                     | stored
    newest or clean or stored   | discard                             | nothing
    being written or being read | discard                             | discarded
    discarded                   | written or read                     | nothing or waiting
    discarded                   | no path takes it or read has failed | nothing

Invariants, verified by `check`:
  * a buffer belongs to at most one owner;
  * an owner's data is in a buffer, or whole on the paths, or both, until it is discarded;
  * an owner that somebody reads keeps its buffer;
  * no more buffers than the plan says (`alone`) hold data that lies nowhere else, so that a buffer is left to read
    written data into, even if the paths refuse all writes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from offload.errors import TierFullError, invariant, known
from offload.plan.budget import Plan
from offload.protocols import ScratchKind, ScratchOwner, TileId
from offload.schedule.index import Location, TileIndex, TileRecord
from offload.schedule.issued import Issued
from offload.schedule.operations import Operation, ReadTile, WriteTile


@dataclass(slots=True)
class ScratchEntry:
    """Where an owner's data is, and who fills or reads it.

    The module has a table of the states. The first of these attributes that is set says which one it is:
    `is_discarded` (discarded), `unread` (being read), `unwritten` (being written), `is_newest` (newest), `is_stored`
    (clean if it has a buffer, else stored). If none is set, it is waiting. An owner without an entry has nothing.
    """

    order: int = 0  # grows with each fill, of any owner
    buffer: int | None = None  # its number
    is_newest: bool = False  # the data is in its buffer alone
    is_stored: bool = False  # it is whole on the paths
    is_filling: bool = False  # a caller fills the buffer, or waits to
    readers: int = 0  # `request`s to read it without a `release` yet
    unread: int = 0  # tiles that are being read
    unwritten: int = 0  # tiles that are being written
    written: list[tuple[TileId, TileRecord]] = field(default_factory=list)  # tiles that have been, of the same write
    is_discarded: bool = False  # during a transfer: it is removed when no transfer is under way
    error: Exception | None = None  # why reading it has failed, for those who wait for it

    @property
    def is_idle(self) -> bool:
        """Whether it has a buffer, with no transfer to or from that under way."""
        return self.buffer is not None and not (self.unread or self.unwritten)

    @property
    def is_in_buffer(self) -> bool:
        """Whether it is whole in its buffer."""
        return self.buffer is not None and not self.unread

    @property
    def is_reusable(self) -> bool:
        """Whether another owner may get its buffer: the data is on the paths, and nobody fills or reads it."""
        return self.is_idle and not (self.is_newest or self.readers or self.is_filling)


class Scratch:
    """The scratch of one kind of one session.

    Attributes:
        unplaced_tile: A tile that no path has room for, where room was planned.
        is_full: Whether no path takes any more; until the next round.
        moved: Number of tiles that were read, and written, in this round; by the class of the operation.
    """

    def __init__(self, kind: ScratchKind, plan: Plan, index: TileIndex, issued: Issued) -> None:
        self._kind = kind
        self._index = index
        self._issued = issued
        self.unplaced_tile: TileId | None = None
        self._owners: list[int | None] = []  # by buffer
        self._entries: dict[int, ScratchEntry] = {}  # by owner
        self._filling: dict[int, None] = {}  # owners that callers fill, or wait to
        # Owners in buffers alone, which nobody fills, in the order of their fills:
        self._to_write: deque[int] = deque()
        self._to_read_first: deque[int] = deque()  # owners that wait for a buffer; their readers hold other memory
        self._to_read: deque[int] = deque()  # other owners that wait for a buffer
        self._fill_count = 0  # of all rounds
        self._write_count = 0  # of all rounds; a tile's version is the number of its write
        self._is_due = False  # whether something has changed since `advance`
        self._first_owner = 0  # the owner whose fill began this round
        self._last_round_length = 0  # in owners: from the first to the highest one that the round before filled
        self._round_length = 0  # likewise, in this round so far
        # The next owner to be read before anybody asks; None from each fill until the next request to read:
        self._next_to_read_ahead: int | None = None
        self._avoided_paths: set[int] = set()  # where writes have failed in this round
        self.is_full = False
        self.moved: Counter[type] = Counter()
        self._moving: Counter[type] = Counter()  # tiles that are being read, and written
        self.use_plan(plan)

    def use_plan(self, plan: Plan) -> None:
        """Go on with another plan, while no transfer is under way."""
        self._plan = plan
        self._buffers = plan.scratch[self._kind]
        self._is_due = True
        added = self._buffers.count - len(self._owners)  # < 0 if buffers are taken away: then all must be free
        invariant(added >= 0 or not self._in_buffers(), f"a plan takes buffers of {self._kind} away")
        self._owners = self._owners[: self._buffers.count] + [None] * added

    # What the outside sees

    @property
    def is_planned(self) -> bool:
        """Whether the plan has slots for all of it on the paths, so that a write without room ends the session."""
        return self._buffers.is_planned

    @property
    def owners(self) -> Collection[int]:
        """Owners whose data has not been discarded, or is being read or written."""
        return self._entries.keys()

    @property
    def is_in_use(self) -> bool:
        """Whether any data has not been discarded."""
        return any(entry.is_filling or not entry.is_discarded for entry in self._entries.values())

    def may_fill(self, owner: int) -> bool:
        """Return whether a caller that wants to fill an owner's buffer may write to it now."""
        entry = self._entries.get(owner)
        return entry is not None and entry.is_filling and entry.is_newest and entry.is_idle

    def gets_no_buffer(self, owner: int) -> bool:
        """Return whether an owner cannot get a buffer to be filled before other data is discarded.

        So it is if the paths take no more, no write under way will free a buffer, the owner has none, and no further
        buffer may hold data that lies nowhere else.
        """
        has_buffer = owner in self._entries and self._entries[owner].buffer is not None
        return self.is_full and not (self._moving[WriteTile] or has_buffer or self._has_room())

    def is_filling(self, owner: int) -> bool:
        """Return whether a caller fills an owner's buffer, or waits to."""
        return owner in self._filling

    def is_wanted(self, owner: int) -> bool:
        """Return whether a reader waits for an owner's data, or reads it."""
        return owner in self._entries and self._entries[owner].readers > 0

    def is_in_buffer(self, owner: int) -> bool:
        """Return whether an owner's data is whole in its buffer."""
        return owner in self._entries and self._entries[owner].is_in_buffer

    def error_of(self, owner: int) -> Exception | None:
        """Return why an owner's data could not be read; None if it could."""
        return self._entries[owner].error if owner in self._entries else None

    def buffer_of(self, owner: int) -> int:
        """Return the buffer of an owner's data."""
        return known(self._entries[owner].buffer, "data without a buffer")

    # What callers say

    def request(self, owner: int, *, fills: bool, hurries: bool = True) -> None:
        """Ask for an owner's buffer, to be kept until `release`.

        The buffer may be filled once `may_fill` says so, and read once `is_in_buffer` does.

        Args:
            owner: Whose buffer.
            fills: Whether the caller adds data to it. Else the caller reads what is there, and owners with lower
                numbers may be read ahead after it.
            hurries: Whether its data is read before that of owners whose readers do not hurry.
        """
        self._is_due = True
        if fills:
            self._request_to_fill(owner)
            return
        invariant(owner in self._entries, f"{self._kind} of {owner} are read, and nowhere")
        entry = self._entries[owner]
        entry.readers += 1
        entry.error = None
        self._next_to_read_ahead = owner - 1  # backward reads from the last owner down
        if entry.buffer is None and owner not in self._to_read_first and owner not in self._to_read:
            invariant(entry.is_stored, f"{self._kind} of {owner} are read, and nowhere")
            queue = self._to_read_first if hurries else self._to_read
            queue.append(owner)

    def _request_to_fill(self, owner: int) -> None:
        """Note that a caller fills an owner's buffer; the first fill begins a round."""
        self._begin_round_if_none(owner)
        entry = self._entries.setdefault(owner, ScratchEntry())
        invariant(not entry.readers, f"{self._kind} of {owner} are filled while they are read")
        self._fill_count += 1
        entry.order = self._fill_count
        entry.is_filling = True
        self._filling[owner] = None
        self._do_not_write(owner)  # it may be queued to be written since an earlier fill
        self._round_length = max(self._round_length, owner - self._first_owner + 1)
        self._next_to_read_ahead = None

    def release(self, owner: int, *, fills: bool) -> None:
        """End a `request`: the caller has filled or read the owner's buffer, or gives that up."""
        entry = self._entries.get(owner)
        if entry is None or not (entry.is_filling if fills else entry.readers):  # there was no such request
            return
        self._is_due = True
        if fills:
            self._end_filling(owner, entry)
            return
        entry.readers -= 1
        for queue in (self._to_read_first, self._to_read):
            if not entry.readers and owner in queue:
                queue.remove(owner)

    def _end_filling(self, owner: int, entry: ScratchEntry) -> None:
        """Queue a filled buffer to be written, now or later; forget an owner that has neither a buffer nor data."""
        entry.is_filling = False
        del self._filling[owner]
        if entry.is_newest and entry.is_idle:
            self._to_write.append(owner)
        if entry.buffer is None and not entry.is_stored:  # it never had a buffer
            del self._entries[owner]

    def discard(self, owner: int) -> None:
        """Discard an owner's data and free its slots and buffer, at once or when its transfers have ended."""
        entry = self._entries.get(owner)
        if entry is None:
            return
        self._is_due = True
        entry.readers = 0
        entry.error = None
        self._do_not_write(owner)
        if entry.is_filling:
            entry.is_filling = False
            del self._filling[owner]
        if not entry.unread:  # while tiles are read, their slots must not be written
            self._free_path_slots(owner, entry)
        if entry.buffer is None or entry.is_idle:
            self._remove(owner, entry)
        else:
            entry.is_discarded = True

    def _begin_round_if_none(self, owner: int) -> None:
        """Begin a round if no data is left of the last one; `owner` is the first to be filled."""
        if not self.is_in_use:
            self._last_round_length = self._round_length
            self._round_length = 0
            self._first_owner = owner
            self.is_full = False
            self._avoided_paths.clear()
            self.moved.clear()

    def _do_not_write(self, owner: int) -> None:
        """Take an owner out of the queue of those to be written."""
        if owner in self._to_write:
            self._to_write.remove(owner)

    # Reports

    def transfer_ended(self, operation: ReadTile | WriteTile, written: TileRecord | None) -> bool:
        """Account for a tile that was read or written; return whether its owner's data is now whole in its buffer.

        That is after the last read only. After the last write of an owner its tiles are committed: the data is on the
        paths, too.

        Args:
            operation: The read or write that has ended well.
            written: The record of a tile that was written, with its checksum; None if the operation's record counts.
        """
        owner, entry = self._end_transfer(operation)
        self.moved[type(operation)] += 1
        if isinstance(operation, ReadTile):
            entry.unread -= 1
        else:
            entry.unwritten -= 1
            entry.written.append((operation.tile, written or operation.record))
        if entry.is_discarded:
            self._remove_if_idle(owner, entry)
            return False
        if not entry.is_idle:  # other tiles are still on their way
            return False
        records, entry.written = entry.written, []
        if records:  # it was the last write; reads leave no records
            entry.is_newest = False
            entry.is_stored = True
        for tile, record in records:
            self._index.commit(tile, record)
        return isinstance(operation, ReadTile)

    def write_again(self, write: WriteTile) -> bool:
        """Write a tile to another slot after a failed write; return False if no path has room.

        If the data was discarded meanwhile, nothing is written, and True is returned.
        """
        owner, entry = self._end_transfer(write)
        if not entry.is_discarded:
            return self._claim_and_write(owner, entry, write.tile, write.buffer_offset, write.record.location.nbytes)
        entry.unwritten -= 1
        self._remove_if_idle(owner, entry)
        return True

    def transfer_failed(self, operation: ReadTile | WriteTile, error: Exception) -> None:
        """Handle a failed transfer of a kind without planned room (activations).

        After a failed write the tile is written to another path, or else stays in its buffer. A failed read frees the
        buffer, and `error_of` tells the reader.
        """
        if isinstance(operation, WriteTile):
            location = operation.record.location
            self._index.abandon_unwritable(location, is_full=isinstance(error, TierFullError))
            self._index.unreserve({location.nbytes: 1}, lent=True)  # `write_again` reserves it anew
            self._avoided_paths.add(location.path)
            if not self.write_again(operation):
                self._keep_in_buffer(known(operation.owner, "a tile of nobody").number)
            return
        owner, entry = self._end_transfer(operation)
        entry.unread = 0  # an owner of such a kind has one tile
        if entry.is_discarded:
            self._remove_if_idle(owner, entry)
        else:
            self._free_buffer(entry)
            entry.error = error

    def _end_transfer(self, operation: ReadTile | WriteTile) -> tuple[int, ScratchEntry]:
        """Count off a transfer that ended; return its owner and the owner's entry."""
        self._moving[type(operation)] -= 1
        self._is_due = True
        buffer = known(operation.slot, "a tile without a buffer")  # in scratch's operations `slot` is the buffer
        owner = known(self._owners[buffer], "a buffer of nobody")
        return owner, self._entries[owner]

    def _remove_if_idle(self, owner: int, entry: ScratchEntry) -> None:
        """Remove discarded data if no transfer of it is under way."""
        if entry.is_idle:
            for _, record in entry.written:
                self._index.abandon(record.location)
                if not self.is_planned:  # else its room stays planned
                    self._index.unreserve({record.location.nbytes: 1}, lent=True)
            self._free_path_slots(owner, entry)
            self._remove(owner, entry)

    def _remove(self, owner: int, entry: ScratchEntry) -> None:
        """Remove data and free its buffer; if a caller fills the owner anew, it starts with nothing."""
        if entry.buffer is not None:
            self._free_buffer(entry)
        if entry.is_filling:
            self._entries[owner] = ScratchEntry(entry.order, is_filling=True)
        else:
            del self._entries[owner]

    # Decisions

    def advance(self) -> None:
        """Give buffers to owners that wait for one, write others so that more become free, and read ahead.

        Buffers go first to owners that are filled, then to those that are read, last to those read ahead.
        """
        if not self._is_due:
            return
        self._is_due = False
        for owner in self._filling:
            if self._entries[owner].buffer is None and self._has_room():
                buffer = self._find_or_free_buffer()
                if buffer is not None:
                    self._give_buffer(owner, buffer)
        for queue in (self._to_read_first, self._to_read):
            while queue and (buffer := self._find_or_free_buffer()) is not None:
                self._give_buffer(queue.popleft(), buffer)
        for owner in self._filling:  # also those that had kept their buffers, or whose data has just been read
            self._make_newest(owner, self._entries[owner])
        self._write_to_make_room()
        self._read_ahead()

    def _in_buffers(self) -> list[ScratchEntry]:
        """Return the entries of all owners that have a buffer."""
        return [self._entries[owner] for owner in self._owners if owner is not None]

    def _has_room(self) -> bool:
        """Return whether one more buffer may hold data that lies nowhere else (`ScratchBuffers.alone` at most)."""
        unwritten_buffers = sum(entry.is_newest or entry.is_filling for entry in self._in_buffers())
        return unwritten_buffers < self._buffers.alone

    def _next_to_lose_buffer(self) -> int | None:
        """Return the owner that was filled first among those whose buffer another may take; None if there is none.

        It is read last, as owners are read in the opposite order of their fills.
        """
        reusable = [n for n in self._owners if n is not None and self._entries[n].is_reusable]
        return min(reusable, key=lambda owner: self._entries[owner].order, default=None)

    def _find_or_free_buffer(self) -> int | None:
        """Return a free buffer; if none is, free that of a clean owner (`is_reusable`); None if there is neither."""
        if None not in self._owners:
            owner = self._next_to_lose_buffer()
            if owner is None:
                return None
            self._free_buffer(self._entries[owner])
        return self._owners.index(None)

    def _free_buffer(self, entry: ScratchEntry) -> None:
        """Free an owner's buffer; data that is not on the paths, too, is lost."""
        buffer = known(entry.buffer, "a buffer that nobody has")
        self._owners[buffer] = None
        entry.buffer = None
        entry.is_newest = False

    def _give_buffer(self, owner: int, buffer: int) -> None:
        """Give a free buffer to an owner, and read its data into it if there is any on the paths."""
        entry = self._entries[owner]
        entry.buffer = buffer
        self._owners[buffer] = owner
        if not entry.is_stored:
            return
        tiles = self._tiles(owner)
        entry.unread = len(tiles)
        self._moving[ReadTile] += entry.unread
        for tile, offset, _ in tiles:
            record = known(self._index.get(tile), f"{tile} is on no path")
            self._issued.issue(ReadTile(self._issued.new_op(), tile, buffer, offset, record, self._of_kind(owner)))

    def _make_newest(self, owner: int, entry: ScratchEntry) -> None:
        """Let a buffer be filled, if no transfer of it is under way.

        The slots of its data on the paths are freed, as that copy is about to be old.
        """
        if entry.is_idle and not entry.is_newest:
            entry.is_newest = True
            self._free_path_slots(owner, entry)

    def _write_to_make_room(self) -> None:
        """Write filled buffers to the paths, first filled first, until the unwritten ones are at most `staying`.

        Owners that will not fit in buffers by the end of the round are written earlier, a few (`moving`) at once.
        """
        queue, staying = self._to_write, self._buffers.staying
        # This round is expected to be as long as the last one: its last owners may stay in their buffers.
        first_to_stay = self._first_owner + self._last_round_length - staying
        filling = sum(map(self.may_fill, self._filling))  # number of unwritten buffers that callers fill
        while queue and not self.is_full:
            is_early = queue[0] < first_to_stay and self._moving[WriteTile] < self._buffers.moving
            if not is_early and len(queue) + filling <= staying:
                return
            owner = queue.popleft()
            unplaced_tile = self._write_owner(owner)
            if unplaced_tile is not None and self.is_planned:
                self.unplaced_tile = unplaced_tile
                return
            if unplaced_tile is not None:
                self._keep_in_buffer(owner)

    def _write_owner(self, owner: int) -> TileId | None:
        """Write an owner's buffer to the paths; return the first tile for which there is no room, else None.

        If there is no room, `unwritten` also counts that tile and those behind it, which are not written: the caller
        ends the session, or keeps the data in its buffer (`_keep_in_buffer`).
        """
        entry, tiles = self._entries[owner], self._tiles(owner)
        entry.unwritten = len(tiles)
        for tile, offset, nbytes in tiles:
            if not self._claim_and_write(owner, entry, tile, offset, nbytes):
                return tile
        return None

    def _claim_and_write(self, owner: int, entry: ScratchEntry, tile: TileId, offset: int, nbytes: int) -> bool:
        """Write a tile from `offset` in its owner's buffer to a free slot; return False if no path has room."""
        location = self._claim(nbytes)
        if location is None:
            return False
        self._write_count += 1
        self._moving[WriteTile] += 1
        buffer = known(entry.buffer, "data without a buffer")
        record = TileRecord(location, self._write_count)
        self._issued.issue(WriteTile(self._issued.new_op(), tile, buffer, offset, record, self._of_kind(owner)))
        return True

    def _claim(self, nbytes: int) -> Location | None:
        """Claim a slot of the planned room; without planned room, a loan of what state and checkpoints leave.

        None if no path has such a slot.
        """
        if self.is_planned:
            return self._index.claim(nbytes)
        if not self._index.reserve({nbytes: 1}, lent=True):
            return None
        location = self._index.claim_loan(nbytes, self._avoided_paths)
        if location is None:
            self._index.unreserve({nbytes: 1}, lent=True)
        return location

    def _keep_in_buffer(self, owner: int) -> None:
        """Leave an owner's data in its buffer, as no path takes its only tile, and write no other in this round."""
        self._entries[owner].unwritten = 0
        self._to_write.appendleft(owner)
        self.is_full = True

    def _free_path_slots(self, owner: int, entry: ScratchEntry) -> None:
        """Free the slots of an owner's data on the paths, if there is any."""
        if entry.is_stored:
            entry.is_stored = False
            free = self._index.free_discarded if self.is_planned else self._index.free_and_unreserve
            for tile, _, _ in self._tiles(owner):
                free(tile)

    def _read_ahead(self) -> None:
        """Read ahead, into buffers, the owners that backward needs next: from `_next_to_read_ahead` down.

        It stops at `moving` tiles in flight, or when no buffer is free and none has data that backward needs later.
        """
        most_moving = self._buffers.moving
        while self._next_to_read_ahead is not None and self._next_to_read_ahead >= self._first_owner:
            if self._moving[ReadTile] >= most_moving:
                return
            owner = self._next_to_read_ahead
            entry = self._entries.get(owner)
            if entry is not None and entry.is_stored and entry.buffer is None:
                if not self._may_read_ahead(owner):
                    return
                self._give_buffer(owner, known(self._find_or_free_buffer(), "a buffer that is free"))
            self._next_to_read_ahead -= 1

    def _may_read_ahead(self, owner: int) -> bool:
        """Return whether a buffer is free for an owner, or may be freed as backward needs its data later.

        Backward needs owners in the order of falling numbers, so later data has a lower number.
        """
        if None in self._owners:
            return True
        loser = self._next_to_lose_buffer()
        return loser is not None and loser <= owner

    def _of_kind(self, owner: int) -> ScratchOwner:
        """Return an owner's number together with its kind, as operations and the plan name it."""
        return ScratchOwner(self._kind, owner)

    def _tiles(self, owner: int) -> Sequence[tuple[TileId, int, int]]:
        """Return an owner's tiles, each with its offset in the buffer and its size."""
        return self._plan.scratch_tiles(self._of_kind(owner))

    def check(self, in_flight: Collection[Operation]) -> None:
        """Verify the module's invariants, for `Machine.check`."""
        kind, owners = self._kind, [owner for owner in self._owners if owner is not None]
        with_buffers = [owner for owner, entry in self._entries.items() if entry.buffer is not None]
        invariant(sorted(owners) == sorted(with_buffers), f"a buffer of {kind} has an owner that left it")
        for owner, entry in self._entries.items():
            self._check_entry(owner, entry)
        newest = sum(entry.is_newest for entry in self._entries.values())
        invariant(newest <= self._buffers.alone, f"no buffers are left for {kind} to be read into")
        transfers = (operation for operation in in_flight if isinstance(operation, ReadTile | WriteTile))
        moving = sum(transfer.owner is not None and transfer.owner.kind == kind for transfer in transfers)
        counted = sum(entry.unread + entry.unwritten for entry in self._entries.values())
        invariant(moving == counted, f"tiles of {kind} are lost on their way")

    def _check_entry(self, owner: int, entry: ScratchEntry) -> None:
        """Verify that an owner's data is somewhere, and is in a buffer or will be if a reader waits for it."""
        kind = self._kind
        if entry.buffer is not None:
            invariant(self._owners[entry.buffer] == owner, f"the {kind} buffer {entry.buffer} is not {owner}'s")
        invariant(not (entry.is_newest and entry.is_stored), f"old {kind} of {owner} are kept on the paths")
        invariant(not entry.unread or entry.is_stored, f"{kind} of {owner} come from nowhere")
        is_somewhere = entry.is_newest or entry.is_stored or entry.is_filling or entry.is_discarded
        invariant(is_somewhere, f"{kind} of {owner} are nowhere")
        is_queued = owner in (*self._to_read_first, *self._to_read)
        is_coming = entry.buffer is not None or is_queued or entry.error is not None
        invariant(is_coming or not entry.readers, f"somebody waits for {kind} of {owner}, which do not come")
