"""Buffers that scratch data passes through on its way to the paths and back: gradients, activations. Pure.

Each *owner* (a subgroup of gradients, a tile of activations) has tiles that pass through one buffer. A buffer is
*filled* by whoever brings the data, written to the paths when it is needed for others, read again for whoever wants
that, and free when its owner is of no use any more. So buffers are a cache.

What lies on the paths is scratch: no checkpoint names it, nothing is synced, and a record goes as soon as its content
is in memory and about to change.

Invariants, verified by `check`:
  * a buffer belongs to at most one owner;
  * an owner's data is in a buffer, or whole on the paths, or both, or there is none.

`GradientBuffers` and `ActivationBuffers` say which buffers stay, and what is read for whom.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from offload.errors import TierFullError, invariant, known
from offload.plan.budget import Plan
from offload.protocols import ACTIVATIONS, TileId
from offload.schedule.index import Location, Record, TileIndex
from offload.schedule.issued import Issued
from offload.schedule.operations import Operation, ReadTile, WriteTile


@dataclass(slots=True)
class Held:
    """What a buffer holds.

    Attributes:
        buffer: Its number.
        is_newest: Whether the buffer alone has it.
        is_wanted: Whether somebody is to read it.
        unread: Tiles that are being read.
        unwritten: Tiles that are being written.
        written: Those that have been.
        is_over: Whether it is of no use any more, and goes when nothing is on its way.
    """

    buffer: int
    is_newest: bool = False
    is_wanted: bool = False
    unread: int = 0
    unwritten: int = 0
    written: list[tuple[TileId, Record]] = field(default_factory=list)
    is_over: bool = False

    @property
    def is_still(self) -> bool:
        """Whether nothing is on its way to or from the buffer."""
        return not (self.unread or self.unwritten)


class Buffers:
    """The buffers of one session for one kind of data.

    Args:
        index: Slots of the stores.
        issued: Takes their operations.
    """

    what: ClassVar[Literal["gradients", "activations"]]

    def __init__(self, index: TileIndex, issued: Issued) -> None:
        self._index = index
        self._issued = issued
        self._owners: list[int | None] = []
        self._held: dict[int, Held] = {}  # by owner; those that were filled last are last
        self._stored: set[int] = set()  # owners whose data is whole on the paths
        self._filling: dict[int, None] = {}  # owners that the caller brings data of
        self._writes = 0  # so far: each is the version of what it writes
        self._is_due = False  # whether something has changed since `advance`

    # What kinds of data do differently

    def _tiles(self, owner: int) -> Sequence[tuple[TileId, int, int]]:
        """Return an owner's tiles, each with its offset in the buffer and its size."""
        raise NotImplementedError

    def _lines(self) -> Sequence[deque[int]]:
        """Return the lines in which owners wait for a buffer that their data is read into, most urgent first."""
        raise NotImplementedError

    def _may_fill(self) -> bool:
        """Return whether one more buffer may hold what lies nowhere else."""
        return True

    def _make_room(self) -> None:
        """Have buffers written, so that there will be some for others."""
        raise NotImplementedError

    def _claim(self, nbytes: int) -> Location | None:
        return self._index.claim(nbytes)

    def _give_back(self, tile: TileId) -> None:
        self._index.drop(tile)

    def _abandon(self, location: Location) -> None:
        self._index.abandon(location)

    def _least_useful(self) -> int | None:
        """Return the owner whose buffer goes to another, of those whose data is on the paths and not wanted."""
        return next((n for n, held in self._held.items() if self._is_clean(n, held)), None)

    # Filling

    def is_filling(self, owner: int) -> bool:
        """Return whether the caller may write an owner's data to its buffer."""
        held = self._held.get(owner)
        return owner in self._filling and held is not None and held.is_newest and held.is_still

    def buffer_of(self, owner: int) -> int:
        """Return the buffer of an owner's data."""
        return self._held[owner].buffer

    def are_there(self, owner: int) -> bool:
        """Return whether an owner's data is whole in a buffer."""
        return owner in self._held and not self._held[owner].unread

    def used(self, owner: int) -> None:
        """Take in that an owner's data is of no use any more."""
        held, self._is_due = self._held.get(owner), True
        self._filling.pop(owner, None)
        if held is not None and not held.is_still:
            held.is_over = True
        elif held is not None:
            self._free(owner)
        if held is None or not held.unread:  # else nothing else is written where it is read from
            self._forget(owner)

    # Reports

    def landed(self, operation: ReadTile | WriteTile, checksum: int) -> bool:
        """Take in that a tile has been read or written; return whether its owner's data has come to its buffer."""
        owner = self._owner_of(operation)
        held, self._is_due = self._held[owner], True
        if isinstance(operation, ReadTile):
            held.unread -= 1
        else:
            record = operation.record
            held.unwritten -= 1
            held.written.append((operation.tile, Record(record.location, record.step, checksum)))
        if held.is_over:
            self._end_useless(owner, held)
            return False
        if not held.is_still:
            return False
        written, held.written = held.written, []
        if written:
            held.is_newest = False
            self._stored.add(owner)
        for each, record in written:
            self._index.commit(each, record)
        return isinstance(operation, ReadTile)

    def write_again(self, write: WriteTile) -> bool:
        """Have a tile go elsewhere whose write has failed, if it is of any use; return whether there is room."""
        owner = self._owner_of(write)
        held, self._is_due = self._held[owner], True
        if not held.is_over:
            buffer = known(write.slot, "a buffer without a number")
            return self._write(write.tile, buffer, write.buffer_offset, write.record.location.nbytes)
        held.unwritten -= 1
        self._end_useless(owner, held)
        return True

    def _owner_of(self, operation: ReadTile | WriteTile) -> int:
        return known(self._owners[known(operation.slot, "a tile without a buffer")], "a buffer of nobody")

    def _end_useless(self, owner: int, held: Held) -> None:
        """Free a buffer of no use, once nothing is on its way to or from it."""
        if held.is_still:
            for _, record in held.written:
                self._abandon(record.location)
            self._forget(owner)
            self._free(owner)

    # Decisions

    def advance(self) -> None:
        """Give buffers to those who wait for one, and have others written so that there will be some."""
        if not self._is_due:
            return
        self._is_due = False
        for owner in self._filling:
            if owner not in self._held and self._may_fill() and (buffer := self._take()) is not None:
                self._begin(owner, buffer)
        for line in self._lines():
            while line and (buffer := self._take()) is not None:
                self._begin(line.popleft(), buffer, is_wanted=True)
        for owner in self._filling:
            if owner in self._held:
                self._make_newest(owner)
        self._make_room()

    def _begin(self, owner: int, buffer: int, *, is_wanted: bool = False) -> None:
        """Have an owner have a free buffer, and its data read into it, if there is any."""
        self._owners[buffer] = owner
        held = self._held[owner] = Held(buffer, is_wanted=is_wanted)
        if owner not in self._stored:
            return
        tiles = self._tiles(owner)
        held.unread = len(tiles)
        for tile, offset, _ in tiles:
            record = known(self._index.get(tile), f"{tile} is on no path")
            self._issued.issue(ReadTile(self._issued.new_op(), tile, buffer, offset, record, self.what))

    def _make_newest(self, owner: int) -> None:
        """Have a buffer changed that nothing is on its way to or from: what lies on the paths is of no use then."""
        held = self._held[owner]
        if held.is_still and not held.is_newest:
            held.is_newest = True
            self._forget(owner)

    def _take(self) -> int | None:
        """Return a buffer that is free, or whose content is on the paths and not wanted; None if there is none."""
        if None not in self._owners:
            clean = self._least_useful()
            if clean is None:
                return None
            self._free(clean)
        return self._owners.index(None)

    def _is_clean(self, owner: int, held: Held) -> bool:
        return held.is_still and not (held.is_newest or held.is_wanted) and owner not in self._filling

    def _leave(self, owner: int) -> TileId | None:
        """Have a buffer written; return a tile for which there is no room, if there is one."""
        held, tiles = self._held[owner], self._tiles(owner)
        held.unwritten = len(tiles)
        for tile, offset, nbytes in tiles:
            if not self._write(tile, held.buffer, offset, nbytes):
                return tile
        return None

    def _write(self, tile: TileId, buffer: int, offset: int, nbytes: int) -> bool:
        location = self._claim(nbytes)
        if location is None:
            return False
        self._writes += 1
        record = Record(location, self._writes, 0)
        self._issued.issue(WriteTile(self._issued.new_op(), tile, buffer, offset, record, self.what))
        return True

    def _free(self, owner: int) -> None:
        self._owners[self._held.pop(owner).buffer] = None

    def _forget(self, owner: int) -> None:
        """Free the slots of an owner's data on the paths, if there is any."""
        if owner in self._stored:
            self._stored.discard(owner)
            for tile, _, _ in self._tiles(owner):
                self._give_back(tile)

    def check(self, in_flight: Collection[Operation]) -> None:
        """Verify the invariants that the module states.

        Raises:
            InternalError: If one does not hold.
        """
        owners = [owner for owner in self._owners if owner is not None]
        invariant(len(owners) == len(self._held), "a buffer has an owner that left it")
        for owner, held in self._held.items():
            invariant(self._owners[held.buffer] == owner, f"the {self.what} buffer {held.buffer} is not {owner}'s")
            stored = owner in self._stored
            invariant(not (held.is_newest and stored), f"old {self.what} of {owner} are kept on the paths")
            invariant(not held.unread or stored, f"{self.what} of {owner} come from nowhere")
        moved = [o for o in in_flight if isinstance(o, ReadTile | WriteTile) and o.what == self.what]
        count = sum(held.unread + held.unwritten for held in self._held.values())
        invariant(len(moved) == count, f"tiles of {self.what} are lost on their way")


class GradientBuffers(Buffers):
    """The gradient buffers of one session: which gradients are in memory, which on the paths, which on their way.

    Where host memory is not to hold all gradients, they pass through a few buffers, each as large as the gradients of
    the largest subgroup. Owners are subgroups. What came last is still there when the step begins, and what comes
    last is what a step needs first. Gradients are gone when their subgroup's visit has run.

    An invariant: but for `SPARE_BUFFERS` of the plan, and unless there is a buffer for every subgroup, buffers may
    hold what lies nowhere else: so a visit's gradients find a buffer, whichever visits wait for each other.

    Args:
        plan: How many there are, and how gradients are cut.
        index: Slots of the stores.
        issued: Takes their operations.

    Attributes:
        homeless: A tile that no path has room for.
    """

    what = "gradients"

    def __init__(self, plan: Plan, index: TileIndex, issued: Issued) -> None:
        super().__init__(index, issued)
        self.homeless: TileId | None = None
        # Subgroups whose gradients are to be read for their visits: those with streamed state, which has a staging
        # slot meanwhile, come first.
        self._streamed: deque[int] = deque()
        self._resident: deque[int] = deque()
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Take in a plan, with nothing on its way."""
        self._plan, self._is_due = plan, True
        count = plan.gradient_buffers
        invariant(count >= len(self._owners), "a plan takes gradient buffers away")
        self._owners.extend([None] * (count - len(self._owners)))

    def _tiles(self, owner: int) -> Sequence[tuple[TileId, int, int]]:
        return self._plan.gradient_tiles[owner]

    def _lines(self) -> Sequence[deque[int]]:
        return self._streamed, self._resident

    # Filling

    def fill(self, subgroup: int) -> None:
        """Have a buffer made ready for gradients of a subgroup; see `is_filling`."""
        self._filling, self._is_due = {subgroup: None}, True
        if subgroup in self._held:
            self._held[subgroup] = self._held.pop(subgroup)  # the last to have been filled

    def stop_filling(self) -> None:
        """Take in that the caller writes nothing more."""
        self._filling, self._is_due = {}, True

    def drop(self) -> None:
        """Forget all gradients."""
        self._filling = {}
        for subgroup in [*self._held, *self._stored]:
            self.used(subgroup)

    # Visits

    def come(self, subgroup: int) -> None:
        """Have the gradients of a visit come to a buffer, if they are not there: its state is there, or comes."""
        self._is_due = True
        if subgroup in self._held:
            self._held[subgroup].is_wanted = True
        else:
            invariant(subgroup in self._stored, f"a visit of {subgroup} reads gradients that are not there")
            line = self._resident if self._plan.is_resident(subgroup) else self._streamed
            if subgroup not in line:
                line.append(subgroup)

    def forget_waiting(self) -> None:
        """Have no visit wait: the sweep has ended."""
        self._is_due = True
        self._streamed.clear()
        self._resident.clear()
        for held in self._held.values():
            held.is_wanted = False

    # Decisions

    def _make_room(self) -> None:
        """Write what was filled first, until no more lies in buffers alone than may; visits rid others of it soon."""
        alone = [n for n, held in self._held.items() if held.is_newest and not (held.is_wanted or held.unwritten)]
        count = len(alone)
        for subgroup in alone:
            if count <= self._plan.staying_gradients:
                return
            if subgroup not in self._filling:
                count -= 1
                self.homeless = self._leave(subgroup)
                if self.homeless is not None:
                    return


class ActivationBuffers(Buffers):
    """The activation buffers of one session: which tensors that autograd saves are in memory, which on the paths.

    Saved tensors are written one after another to *activation tiles*, each in one buffer. Owners are tiles, which are
    numbered in the order of packing. Backward reads them in the opposite order. So what was packed first is written
    first and stays away longest, what was packed last stays in memory, and tiles are read again from the last one
    down, as buffers become free. How many tiles a forward pass fills is known from the one before: those that will
    not fit are written at once, while buffers are free.

    Room on the paths is what state and checkpoints leave, reserved tile by tile. A tile that no path takes stays in
    its buffer, and a caller that finds no buffer then keeps its tensors itself.

    Invariants, verified by `check`, beside those of `Buffers`: a tile that somebody reads keeps its buffer; some
    buffers hold nothing that lies nowhere else, so that what was written can be read whatever the paths refuse.

    Args:
        plan: How many there are, and how large.
        index: Slots of the stores.
        issued: Takes their operations.

    Attributes:
        is_full: Whether no path takes any more; until all tiles are discarded.
        errors: What reading a tile has failed with, for whoever asked for it.
        moved: Tiles that were read, and written, since there were none; by the operation.
    """

    what = "activations"

    def __init__(self, plan: Plan, index: TileIndex, issued: Issued) -> None:
        super().__init__(index, issued)
        self.is_full = False
        self.errors: dict[int, Exception] = {}
        self._packed: deque[int] = deque()  # tiles in buffers alone, which nobody writes to, in order
        self._tiles_alive: dict[int, None] = {}  # in order
        self._first = 0  # of the tiles since none was alive
        self._shown = 0  # tiles of the longest run of packing, in the round before
        self._showing = 0  # likewise, in this one
        self._readers: Counter[int] = Counter()
        self._line: deque[int] = deque()  # tiles that somebody waits for
        self._ahead: int | None = None  # the next tile to be read before anybody asks; None while tensors are packed
        self._avoided: set[int] = set()  # paths that writes have failed on; until all tiles are discarded
        self.moved: Counter[type] = Counter()
        self._moving: Counter[type] = Counter()  # reads and writes that are under way
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Take in a plan, with nothing on its way."""
        self._plan, count = plan, plan.activation_buffers
        if count != len(self._owners):
            invariant(not self._held, "activation buffers change while they are in use")
            self._owners = [None] * count

    @property
    def is_empty(self) -> bool:
        """Whether no tile is of use, and nothing is on its way to or from a buffer."""
        return not (self._tiles_alive or self._held)

    def _tiles(self, owner: int) -> Sequence[tuple[TileId, int, int]]:
        return ((TileId(0, ACTIVATIONS, owner % (1 << 31)), 0, self._plan.budgets.activation_tile_bytes),)

    def _lines(self) -> Sequence[deque[int]]:
        return (self._line,)

    def _claim(self, nbytes: int) -> Location | None:
        if not self._index.reserve({nbytes: 1}, lent=True):
            return None
        location = self._index.lend(nbytes, self._avoided)
        if location is None:
            self._index.give_back({nbytes: 1}, lent=True)
        return location

    def _give_back(self, tile: TileId) -> None:
        self._index.forget(tile)

    def _abandon(self, location: Location) -> None:
        super()._abandon(location)
        self._index.give_back({location.nbytes: 1}, lent=True)

    # What the caller does

    def pack(self, tile: int) -> None:
        """Have a buffer made ready for the next tile; see `is_filling`."""
        if not self._tiles_alive:
            self._first, self._shown, self._showing, self.is_full = tile, self._showing, 0, False
            self._avoided.clear()
            self.moved.clear()
        self._tiles_alive[tile] = self._filling[tile] = None
        self._showing = max(self._showing, tile - self._first + 1)
        self._ahead, self._is_due = None, True

    def finds_none(self, tile: int) -> bool:
        """Return whether there will be no buffer for a tile before others are discarded."""
        return self.is_full and not (self._moving[WriteTile] or tile in self._held or self._may_fill())

    def packed(self, tile: int) -> None:
        """Take in that a tile holds all that it will."""
        if self._filling.pop(tile, tile) is None and tile in self._held:
            self._packed.append(tile)
            self._is_due = True

    def unpack(self, tile: int) -> None:
        """Have a tile come to a buffer, and stay there until `unpacked`; others of lower numbers come behind it."""
        self.errors.pop(tile, None)
        self._readers[tile] += 1
        self._ahead, self._is_due = tile - 1, True
        if tile in self._held:
            self._held[tile].is_wanted = True
        elif tile not in self._line:
            invariant(tile in self._stored, f"activations of tile {tile} are nowhere")
            self._line.append(tile)

    def unpacked(self, tile: int) -> None:
        """Take in that somebody who has asked for a tile has read it, or gives that up."""
        self._readers[tile] -= 1
        if not self._readers[tile]:
            del self._readers[tile]
            self._is_due = True
            if tile in self._held:
                self._held[tile].is_wanted = False
            elif tile in self._line:
                self._line.remove(tile)

    def discard(self, tile: int) -> None:
        """Take in that a tile is of no use any more."""
        self._tiles_alive.pop(tile, None)
        self.errors.pop(tile, None)
        self.used(tile)
        if tile in self._packed:
            self._packed.remove(tile)

    # Reports

    def landed(self, operation: ReadTile | WriteTile, checksum: int) -> bool:
        """See `Buffers.landed`."""
        self._moving[type(operation)] -= 1
        self.moved[type(operation)] += 1
        return super().landed(operation, checksum)

    def failed(self, operation: ReadTile | WriteTile, error: Exception) -> None:
        """Take in that a transfer has failed: what was to be written goes to another path, or stays in its buffer."""
        owner = self._owner_of(operation)
        held, self._is_due = self._held[owner], True
        self._moving[type(operation)] -= 1
        if isinstance(operation, ReadTile):
            held.unread = 0
            if not held.is_over:
                self._free(owner)
                self.errors[owner] = error
        else:
            location = operation.record.location
            self._index.refuse(location, is_full=isinstance(error, TierFullError))
            self._index.give_back({location.nbytes: 1}, lent=True)
            self._avoided.add(location.path)
            if not held.is_over and self._write(operation.tile, held.buffer, 0, location.nbytes):
                return
            held.unwritten = 0
            if not held.is_over:
                self._stay(owner)
        if held.is_over:
            self._end_useless(owner, held)

    # What is under way

    def _begin(self, owner: int, buffer: int, *, is_wanted: bool = False) -> None:
        super()._begin(owner, buffer, is_wanted=is_wanted)
        self._moving[ReadTile] += self._held[owner].unread

    def _write(self, tile: TileId, buffer: int, offset: int, nbytes: int) -> bool:
        has_room = super()._write(tile, buffer, offset, nbytes)
        self._moving[WriteTile] += has_room
        return has_room

    # Decisions

    def _least_useful(self) -> int | None:
        return min((n for n, held in self._held.items() if self._is_clean(n, held)), default=None)

    def _may_fill(self) -> bool:
        filling = sum(tile in self._held for tile in self._filling)
        alone = len(self._packed) + filling + self._moving[WriteTile]
        return alone < self._plan.activation_buffers - self._plan.moving_activations

    def _stay(self, tile: int) -> None:
        """Leave a tile in its buffer, as no path takes it."""
        self._packed.appendleft(tile)
        self.is_full = True

    def _make_room(self) -> None:
        """Write what was packed first: what will not stay anyway, and else until no more lies in buffers than may."""
        packed, staying, most = self._packed, self._plan.staying_activations, self._plan.moving_activations
        leaving = self._first + self._shown - staying
        while packed and not self.is_full:
            early = packed[0] < leaving and self._moving[WriteTile] < most
            if not early and len(packed) + len(self._filling) <= staying:
                break
            tile = packed.popleft()
            if self._leave(tile) is not None:
                self._held[tile].unwritten = 0
                self._stay(tile)
        self._read_ahead(most)

    def _read_ahead(self, most: int) -> None:
        """Read the next tiles of backward's order into buffers that are free, or hold what is needed later."""
        while self._ahead is not None and self._ahead >= self._first and self._moving[ReadTile] < most:
            tile = self._ahead
            if tile in self._stored and tile not in self._held:
                last = self._least_useful() if None not in self._owners else tile
                if last is None or last > tile:
                    return
                self._begin(tile, known(self._take(), "a buffer that is free"))
            self._ahead -= 1

    def check(self, in_flight: Collection[Operation]) -> None:
        """See `Buffers.check`."""
        super().check(in_flight)
        for tile in self._readers:
            there = tile in self._held or tile in self._line or tile in self.errors
            invariant(there, f"somebody waits for tile {tile} of activations, which does not come")
            invariant(tile not in self._held or self._held[tile].is_wanted, f"tile {tile} may go while it is read")
        newest = sum(held.is_newest for held in self._held.values())
        most = self._plan.activation_buffers - self._plan.moving_activations
        invariant(newest <= most, "no buffers are left for tiles to be read into")
        alone = {tile for tile, held in self._held.items() if held.is_newest and not held.is_over}
        lost = self._tiles_alive.keys() - self._stored - alone - self._filling.keys()
        invariant(not lost, f"activations of tiles {sorted(lost)} are nowhere")
