"""Scratch: data that passes through buffers to the paths and back, and is forgotten when it has been used. Pure.

There are two kinds, each with buffers of its own: gradients, where host memory is not to hold all of them, and
activations that are saved for backward. The rules are the same. Each *owner* (a subgroup of gradients, a tile of
activations) has tiles that pass through one buffer. Whoever brings an owner's data wants its buffer to fill it, and
whoever uses the data wants it to read it. Both say when they are ready. The data is discarded when it is of no use
any more. So buffers are a cache.

Owners have an order, in which they were filled last. Backward goes through gradients in one order and a step comes
in the opposite one; activations are packed in one order and read in the opposite one. So what was filled first is
written first and stays away longest, and what was filled last stays in its buffer.

What lies on the paths is scratch: no checkpoint names it, nothing is synced, and a record goes as soon as its content
is in memory and about to change.

How the kinds differ is said by the plan (`offload.plan.budget.ScratchBuffers`). For gradients the paths have promised
room, so a write that finds none ends the session. Activations get room that state and checkpoints leave: a tile that
no path takes stays in its buffer, and a caller that finds no buffer then keeps its tensors itself. How many tiles a
forward pass fills is known from the one before: those that will not fit are written at once, while buffers are free,
and tiles are read again from the last one down before anybody asks, as buffers become free.

Invariants, verified by `check`:
  * a buffer belongs to at most one owner;
  * an owner's data is in a buffer, or whole on the paths, or both, until it is discarded;
  * an owner that somebody reads keeps its buffer;
  * no more buffers than the plan says (`alone`) hold what lies nowhere else, so that what was written can be read
    whatever the paths refuse.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from offload.errors import TierFullError, invariant, known
from offload.plan.budget import Plan
from offload.protocols import Owner, ScratchKind, TileId
from offload.schedule.index import Location, Record, TileIndex
from offload.schedule.issued import Issued
from offload.schedule.operations import Operation, ReadTile, WriteTile


@dataclass(slots=True)
class Held:
    """Where an owner's data is, and who wants it.

    Data that is there goes through these states, and from any of the last three back to the first when more is
    added to it::

        newest (in its buffer alone) -> being written -> clean (in both) -> stored (on the paths alone)
                                                           ^                    |
                                                           +--- being read <----+

    Attributes:
        order: Grows with each fill, of any owner.
        buffer: Its buffer's number; None if it has none.
        is_newest: Whether the buffer alone has it.
        is_stored: Whether it is whole on the paths.
        is_filling: Whether somebody brings it, or is about to.
        readers: How many have asked to read it, and have not said that they are ready.
        unread: Tiles that are being read.
        unwritten: Tiles that are being written.
        written: Those that have been.
        is_over: Whether it is of no use any more, and goes when nothing is on its way.
        error: What reading it has failed with, for whoever asked for it.
    """

    order: int = 0
    buffer: int | None = None
    is_newest: bool = False
    is_stored: bool = False
    is_filling: bool = False
    readers: int = 0
    unread: int = 0
    unwritten: int = 0
    written: list[tuple[TileId, Record]] = field(default_factory=list)
    is_over: bool = False
    error: Exception | None = None

    @property
    def is_still(self) -> bool:
        """Whether it has a buffer, and nothing is on its way to or from it."""
        return self.buffer is not None and not (self.unread or self.unwritten)

    @property
    def is_there(self) -> bool:
        """Whether it is whole in its buffer."""
        return self.buffer is not None and not self.unread

    @property
    def is_clean(self) -> bool:
        """Whether its buffer may go to another: it is on the paths, and nobody wants it here."""
        return self.is_still and not (self.is_newest or self.readers or self.is_filling)


class Scratch:
    """The scratch of one kind of one session.

    Args:
        kind: Which.
        plan: What buffers there are.
        index: Slots of the stores.
        issued: Takes their operations.

    Attributes:
        homeless: A tile that no path has room for, where room was promised.
        is_full: Whether no path takes any more; until all has been discarded.
        moved: Tiles that were read, and written, since all was discarded; by the operation.
    """

    def __init__(
        self,
        kind: ScratchKind,
        plan: Plan,
        index: TileIndex,
        issued: Issued,
    ) -> None:
        self._kind = kind
        self._index = index
        self._issued = issued
        self.homeless: TileId | None = None
        self._owners: list[int | None] = []  # of the buffers
        self._held: dict[int, Held] = {}
        self._filling: dict[int, None] = {}  # owners that somebody brings data of
        self._ready: deque[int] = deque()  # owners in buffers alone, which nobody fills, in order
        # Owners that are to be read into a buffer. Those that hurry come first: their readers hold other memory.
        self._hurrying: deque[int] = deque()
        self._waiting: deque[int] = deque()
        self._fills = 0  # so far
        self._writes = 0  # so far: each is the version of what it writes
        self._is_due = False  # whether something has changed since `advance`
        # Of a round, from when there was nothing:
        self._first = 0  # its first owner
        self._shown = 0  # the longest run of owners that were filled, in the round before
        self._showing = 0  # likewise, in this one
        self._ahead: int | None = None  # the next owner to be read before anybody asks; None while some are filled
        self._avoided: set[int] = set()  # paths that writes have failed on
        self.is_full = False
        self.moved: Counter[type] = Counter()
        self._moving: Counter[type] = Counter()  # tiles that are being read, and written
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Take in a plan, with nothing on its way."""
        self._plan, self._buffers, self._is_due = plan, plan.scratch[self._kind], True
        added = self._buffers.count - len(self._owners)
        invariant(added >= 0 or not self._in_buffers(), f"a plan takes buffers of {self._kind} away")
        self._owners = self._owners[: self._buffers.count] + [None] * added

    # What the outside sees

    @property
    def is_promised(self) -> bool:
        """Whether the paths have promised room; see `ScratchBuffers`."""
        return self._buffers.is_promised

    @property
    def owners(self) -> Collection[int]:
        """Those whose data is of use, or on its way."""
        return self._held.keys()

    @property
    def is_in_use(self) -> bool:
        """Whether any data is of use."""
        return any(held.is_filling or not held.is_over for held in self._held.values())

    def may_fill(self, owner: int) -> bool:
        """Return whether whoever wants to fill an owner's buffer may write to it."""
        held = self._held.get(owner)
        return held is not None and held.is_filling and held.is_newest and held.is_still

    def finds_none(self, owner: int) -> bool:
        """Return whether there will be no buffer for an owner before others are discarded."""
        has_buffer = owner in self._held and self._held[owner].buffer is not None
        return self.is_full and not (self._moving[WriteTile] or has_buffer or self._has_room())

    def is_filling(self, owner: int) -> bool:
        """Return whether somebody fills an owner's buffer, or is about to."""
        return owner in self._filling

    def is_wanted(self, owner: int) -> bool:
        """Return whether somebody is to read an owner's data."""
        return owner in self._held and self._held[owner].readers > 0

    def is_there(self, owner: int) -> bool:
        """Return whether an owner's data is whole in its buffer."""
        return owner in self._held and self._held[owner].is_there

    def error_of(self, owner: int) -> Exception | None:
        """Return why an owner's data cannot be read."""
        return self._held[owner].error if owner in self._held else None

    def buffer_of(self, owner: int) -> int:
        """Return the buffer of an owner's data."""
        return known(self._held[owner].buffer, "data without a buffer")

    # What those do whose data it is

    def want(self, owner: int, *, fills: bool, hurries: bool = True) -> None:
        """Have a buffer made ready that is an owner's until `ready`; see `may_fill` and `is_there`.

        Args:
            owner: Whose.
            fills: Whether data is to be written to it, beside what it has; else that is to be read from it. Where
                data may be read ahead, that of owners with lower numbers comes behind it.
            hurries: Whether it is read before that of those who do not.
        """
        self._is_due = True
        if fills:
            self._begin_round_if_none(owner)
            held = self._held.setdefault(owner, Held())
            invariant(not held.readers, f"{self._kind} of {owner} are filled while they are read")
            self._fills += 1
            held.order, held.is_filling = self._fills, True
            self._filling[owner] = None
            self._not_ready(owner)
            self._showing, self._ahead = max(self._showing, owner - self._first + 1), None
            return
        invariant(owner in self._held, f"{self._kind} of {owner} are read, and nowhere")
        held = self._held[owner]
        held.readers, held.error, self._ahead = held.readers + 1, None, owner - 1
        if held.buffer is None and owner not in self._hurrying and owner not in self._waiting:
            invariant(held.is_stored, f"{self._kind} of {owner} are read, and nowhere")
            (self._hurrying if hurries else self._waiting).append(owner)

    def ready(self, owner: int, *, fills: bool) -> None:
        """Take in that somebody who has wanted an owner's buffer has filled or read it, or gives that up."""
        held = self._held.get(owner)
        if held is None or not (held.is_filling if fills else held.readers):
            return
        self._is_due = True
        if fills:
            held.is_filling = False
            del self._filling[owner]
            if held.is_newest and held.is_still:
                self._ready.append(owner)
            if held.buffer is None and not held.is_stored:  # nothing has come
                del self._held[owner]
            return
        held.readers -= 1
        for line in (self._hurrying, self._waiting):
            if not held.readers and owner in line:
                line.remove(owner)

    def discard(self, owner: int) -> None:
        """Take in that an owner's data is of no use any more."""
        held = self._held.get(owner)
        if held is None:
            return
        self._is_due, held.readers, held.error = True, 0, None
        self._not_ready(owner)
        if held.is_filling:
            held.is_filling = False
            del self._filling[owner]
        if not held.unread:  # else nothing else is written where it is read from
            self._forget(owner, held)
        if held.buffer is None or held.is_still:
            self._end(owner, held)
        else:
            held.is_over = True

    def _begin_round_if_none(self, owner: int) -> None:
        if not self.is_in_use:
            self._first, self._shown, self._showing, self.is_full = owner, self._showing, 0, False
            self._avoided.clear()
            self.moved.clear()

    def _not_ready(self, owner: int) -> None:
        if owner in self._ready:
            self._ready.remove(owner)

    # Reports

    def landed(self, operation: ReadTile | WriteTile, written: Record | None) -> bool:
        """Take in that a tile has been read or written; return whether its owner's data has come to its buffer."""
        owner, held = self._moved_of(operation)
        self.moved[type(operation)] += 1
        if isinstance(operation, ReadTile):
            held.unread -= 1
        else:
            held.unwritten -= 1
            held.written.append((operation.tile, written or operation.record))
        if held.is_over:
            self._end_useless(owner, held)
            return False
        if not held.is_still:
            return False
        records, held.written = held.written, []
        if records:
            held.is_newest, held.is_stored = False, True
        for each, record in records:
            self._index.commit(each, record)
        return isinstance(operation, ReadTile)

    def write_again(self, write: WriteTile) -> bool:
        """Have a tile go elsewhere whose write has failed, if it is of any use; return whether there is room."""
        owner, held = self._moved_of(write)
        if not held.is_over:
            return self._write(owner, held, write.tile, write.buffer_offset, write.record.location.nbytes)
        held.unwritten -= 1
        self._end_useless(owner, held)
        return True

    def failed(self, operation: ReadTile | WriteTile, error: Exception) -> None:
        """Take in that a transfer has failed for which no room was promised.

        What was to be written goes to another path, or stays in its buffer.
        """
        if isinstance(operation, WriteTile):
            location = operation.record.location
            self._index.refuse(location, is_full=isinstance(error, TierFullError))
            self._index.give_back({location.nbytes: 1}, lent=True)
            self._avoided.add(location.path)
            if not self.write_again(operation):
                self._stay(known(operation.owner, "a tile of nobody").number)
            return
        owner, held = self._moved_of(operation)
        held.unread = 0
        if held.is_over:
            self._end_useless(owner, held)
        else:
            self._free(held)
            held.error = error

    def _moved_of(self, operation: ReadTile | WriteTile) -> tuple[int, Held]:
        """Take in that a transfer has ended; return whose it was."""
        self._moving[type(operation)] -= 1
        self._is_due = True
        owner = known(self._owners[known(operation.slot, "a tile without a buffer")], "a buffer of nobody")
        return owner, self._held[owner]

    def _end_useless(self, owner: int, held: Held) -> None:
        """Free a buffer of no use, once nothing is on its way to or from it."""
        if held.is_still:
            for _, record in held.written:
                self._index.abandon(record.location)
                if not self.is_promised:
                    self._index.give_back({record.location.nbytes: 1}, lent=True)
            self._forget(owner, held)
            self._end(owner, held)

    def _end(self, owner: int, held: Held) -> None:
        """Forget data that is of no use, unless other data is about to come in its place."""
        if held.buffer is not None:
            self._free(held)
        if held.is_filling:
            self._held[owner] = Held(held.order, is_filling=True)
        else:
            del self._held[owner]

    # Decisions

    def advance(self) -> None:
        """Give buffers to those who wait for one, and have others written so that there will be some."""
        if not self._is_due:
            return
        self._is_due = False
        for owner in self._filling:
            if self._held[owner].buffer is None and self._has_room() and (buffer := self._take()) is not None:
                self._begin(owner, buffer)
        for line in (self._hurrying, self._waiting):
            while line and (buffer := self._take()) is not None:
                self._begin(line.popleft(), buffer)
        for owner in self._filling:
            self._make_newest(owner, self._held[owner])
        self._make_room()
        self._read_ahead()

    def _in_buffers(self) -> list[Held]:
        return [self._held[owner] for owner in self._owners if owner is not None]

    def _has_room(self) -> bool:
        """Return whether one more buffer may hold what lies nowhere else."""
        return sum(held.is_newest or held.is_filling for held in self._in_buffers()) < self._buffers.alone

    def _least_useful(self) -> int | None:
        """Return the owner whose buffer goes to another: of those that may, the one that was filled first."""
        clean = [n for n in self._owners if n is not None and self._held[n].is_clean]
        return min(clean, key=lambda owner: self._held[owner].order, default=None)

    def _take(self) -> int | None:
        """Return a buffer that is free, or may be taken; None if there is none."""
        if None not in self._owners:
            owner = self._least_useful()
            if owner is None:
                return None
            self._free(self._held[owner])
        return self._owners.index(None)

    def _free(self, held: Held) -> None:
        self._owners[known(held.buffer, "a buffer that nobody has")] = None
        held.buffer, held.is_newest = None, False

    def _begin(self, owner: int, buffer: int) -> None:
        """Have an owner have a free buffer, and its data read into it, if there is any."""
        held = self._held[owner]
        self._owners[buffer], held.buffer = owner, buffer
        if not held.is_stored:
            return
        tiles = self._tiles(owner)
        held.unread = len(tiles)
        self._moving[ReadTile] += held.unread
        for tile, offset, _ in tiles:
            record = known(self._index.get(tile), f"{tile} is on no path")
            self._issued.issue(ReadTile(self._issued.new_op(), tile, buffer, offset, record, self._owner(owner)))

    def _make_newest(self, owner: int, held: Held) -> None:
        """Have a buffer changed that nothing is on its way to or from: what lies on the paths is of no use then."""
        if held.is_still and not held.is_newest:
            held.is_newest = True
            self._forget(owner, held)

    def _make_room(self) -> None:
        """Write what was filled first: what will not stay anyway, and else until no more lies in buffers than may."""
        ready, staying = self._ready, self._buffers.staying
        leaving = self._first + self._shown - staying
        filling = sum(map(self.may_fill, self._filling))
        while ready and not self.is_full:
            early = ready[0] < leaving and self._moving[WriteTile] < self._buffers.moving
            if not early and len(ready) + filling <= staying:
                return
            owner = ready.popleft()
            tile = self._leave(owner)
            if tile is not None and self.is_promised:
                self.homeless = tile
                return
            if tile is not None:
                self._stay(owner)

    def _leave(self, owner: int) -> TileId | None:
        """Have a buffer written; return a tile for which there is no room, if there is one."""
        held, tiles = self._held[owner], self._tiles(owner)
        held.unwritten = len(tiles)
        for tile, offset, nbytes in tiles:
            if not self._write(owner, held, tile, offset, nbytes):
                return tile
        return None

    def _write(self, owner: int, held: Held, tile: TileId, offset: int, nbytes: int) -> bool:
        location = self._claim(nbytes)
        if location is None:
            return False
        self._writes += 1
        self._moving[WriteTile] += 1
        buffer, record = known(held.buffer, "data without a buffer"), Record(location, self._writes)
        self._issued.issue(WriteTile(self._issued.new_op(), tile, buffer, offset, record, self._owner(owner)))
        return True

    def _claim(self, nbytes: int) -> Location | None:
        if self.is_promised:
            return self._index.claim(nbytes)
        if not self._index.reserve({nbytes: 1}, lent=True):
            return None
        location = self._index.lend(nbytes, self._avoided)
        if location is None:
            self._index.give_back({nbytes: 1}, lent=True)
        return location

    def _stay(self, owner: int) -> None:
        """Leave a tile in its buffer, as no path takes it."""
        self._held[owner].unwritten = 0
        self._ready.appendleft(owner)
        self.is_full = True

    def _forget(self, owner: int, held: Held) -> None:
        """Free the slots of an owner's data on the paths, if there is any."""
        if held.is_stored:
            held.is_stored = False
            for tile, _, _ in self._tiles(owner):
                self._index.drop(tile) if self.is_promised else self._index.forget(tile)

    def _read_ahead(self) -> None:
        """Read the next owners of backward's order into buffers that are free, or hold what is needed later."""
        most = self._buffers.moving
        while self._ahead is not None and self._ahead >= self._first and self._moving[ReadTile] < most:
            owner, held = self._ahead, self._held.get(self._ahead)
            if held is not None and held.is_stored and held.buffer is None:
                last = self._least_useful() if None not in self._owners else owner
                if last is None or last > owner:
                    return
                self._begin(owner, known(self._take(), "a buffer that is free"))
            self._ahead -= 1

    def _owner(self, number: int) -> Owner:
        return Owner(self._kind, number)

    def _tiles(self, owner: int) -> Sequence[tuple[TileId, int, int]]:
        """Return an owner's tiles, each with its offset in the buffer and its size."""
        return self._plan.scratch_tiles(self._owner(owner))

    def check(self, in_flight: Collection[Operation]) -> None:
        """Verify the invariants that the module states.

        Raises:
            InternalError: If one does not hold.
        """
        kind, owners = self._kind, [owner for owner in self._owners if owner is not None]
        there = [owner for owner, held in self._held.items() if held.buffer is not None]
        invariant(sorted(owners) == sorted(there), f"a buffer of {kind} has an owner that left it")
        for owner, held in self._held.items():
            if held.buffer is not None:
                invariant(self._owners[held.buffer] == owner, f"the {kind} buffer {held.buffer} is not {owner}'s")
            invariant(not (held.is_newest and held.is_stored), f"old {kind} of {owner} are kept on the paths")
            invariant(not held.unread or held.is_stored, f"{kind} of {owner} come from nowhere")
            is_somewhere = held.is_newest or held.is_stored or held.is_filling or held.is_over
            invariant(is_somewhere, f"{kind} of {owner} are nowhere")
            comes = held.buffer is not None or owner in (*self._hurrying, *self._waiting) or held.error is not None
            invariant(comes or not held.readers, f"somebody waits for {kind} of {owner}, which do not come")
        newest = sum(held.is_newest for held in self._held.values())
        invariant(newest <= self._buffers.alone, f"no buffers are left for {kind} to be read into")
        moved = [o for o in in_flight if isinstance(o, ReadTile | WriteTile) and o.owner and o.owner.kind == kind]
        count = sum(held.unread + held.unwritten for held in self._held.values())
        invariant(len(moved) == count, f"tiles of {kind} are lost on their way")
