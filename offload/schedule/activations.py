"""Activation buffers: which of the tensors that autograd saves are in memory, and which on the paths. Pure.

Saved tensors are written one after another to *activation tiles*, each in one buffer (`offload.schedule.buffers`).
Backward reads them in the opposite order. So what was packed first is written first and stays away longest, what was
packed last stays in memory, and tiles are read again from the last one down, as buffers become free. How many tiles a
forward pass fills is known from the one before: those that will not fit are written at once, while buffers are free.

Room on the paths is what state and checkpoints leave, reserved tile by tile. A tile that no path takes stays in its
buffer, and a caller that finds no buffer then keeps its tensors itself.

Invariants, verified by `check`, beside those of `Buffers`: a tile that somebody reads keeps its buffer; some buffers
hold nothing that lies nowhere else, so that what was written can be read whatever the paths refuse.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence

from offload.errors import TierFullError, invariant, known
from offload.plan.budget import Plan
from offload.protocols import ACTIVATIONS, TileId
from offload.schedule.buffers import Buffers
from offload.schedule.index import Location, TileIndex
from offload.schedule.operations import Operation, ReadTile, WriteTile


class ActivationBuffers(Buffers):
    """The activation buffers of one session; owners are tiles, which are numbered in the order of packing.

    Args:
        plan: How many there are, and how large.
        index: Slots of the stores.
        new_op: Returns the id of the next operation.
        issue: Starts an operation.

    Attributes:
        is_full: Whether no path takes any more; until all tiles are discarded.
        errors: What reading a tile has failed with, for whoever asked for it.
        moved: Tiles that were read, and written, since there were none; by the operation.
    """

    what = "activations"

    def __init__(
        self, plan: Plan, index: TileIndex, new_op: Callable[[], int], issue: Callable[[Operation], None]
    ) -> None:
        super().__init__(index, new_op, issue)
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

    @property
    def alive(self) -> int:
        """Number of tiles that are of use."""
        return len(self._tiles_alive)

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
