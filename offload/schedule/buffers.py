"""Buffers that scratch data passes through on its way to the paths and back: gradients, activations. Pure.

Each *owner* (a subgroup of gradients, a tile of activations) has tiles that pass through one buffer. A buffer is
*filled* by whoever brings the data, written to the paths when it is needed for others, read again for whoever wants
that, and free when its owner is of no use any more. So buffers are a cache.

What lies on the paths is scratch: no checkpoint names it, nothing is synced, and a record goes as soon as its content
is in memory and about to change.

Invariants, verified by `check`:
  * a buffer belongs to at most one owner;
  * an owner's data is in a buffer, or whole on the paths, or both, or there is none.

Not here: which buffers stay, and what is read for whom (`offload.schedule.gradients` and `activations` beside it).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from offload.errors import invariant, known
from offload.protocols import TileId
from offload.schedule.index import Location, Record, TileIndex
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
        new_op: Returns the id of the next operation.
        issue: Starts an operation.
    """

    what: ClassVar[Literal["gradients", "activations"]]

    def __init__(self, index: TileIndex, new_op: Callable[[], int], issue: Callable[[Operation], None]) -> None:
        self._index = index
        self._new_op = new_op
        self._issue = issue
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
            self._issue(ReadTile(self._new_op(), tile, buffer, offset, record, self.what))

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
        self._issue(WriteTile(self._new_op(), tile, buffer, offset, record, self.what))
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
