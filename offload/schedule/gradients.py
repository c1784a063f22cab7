"""Gradient buffers: which gradients are in memory, which on the paths, and which are on their way. Pure.

Where host memory is not to hold all gradients, they pass through a few buffers, each as large as the gradients of the
largest subgroup. A subgroup's are *filled* by whoever brings them, written to the paths when the buffer is needed for
others, read again for the next backward pass's or for the subgroup's visit, and gone when that has run. So buffers
are a cache: what came last is still there when the step begins, and what comes last is what a step needs first.

Gradients on the paths are scratch: no checkpoint names them, nothing is synced, and a record goes as soon as its
content is in memory and about to change.

Invariants, verified by `check`:
  * a buffer belongs to at most one subgroup;
  * gradients are in a buffer, or whole on the paths, or both, or there are none;
  * but for `SPARE_BUFFERS` of the plan, and unless there is a buffer for every subgroup, buffers may hold what lies
    nowhere else: so a visit's gradients find a buffer, whichever visits wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from offload.errors import invariant, known
from offload.plan.budget import Plan
from offload.protocols import TileId
from offload.schedule.index import Record, TileIndex
from offload.schedule.operations import Operation, ReadTile, WriteTile


@dataclass(slots=True)
class _Held:
    """What a buffer holds.

    Attributes:
        buffer: Its number.
        is_newest: Whether the buffer alone has it.
        is_wanted: Whether a visit under way is to read it.
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


class GradientBuffers:
    """The gradient buffers of one session.

    Args:
        plan: How many there are, and how gradients are cut.
        index: Slots of the stores.
        new_op: Returns the id of the next operation.
        issue: Starts an operation.
        full: Called with a tile that no path has room for.
    """

    def __init__(
        self,
        plan: Plan,
        index: TileIndex,
        new_op: Callable[[], int],
        issue: Callable[[Operation], None],
        full: Callable[[TileId], None],
    ) -> None:
        self._index = index
        self._new_op = new_op
        self._issue = issue
        self._full = full
        self._owners: list[int | None] = []
        self._held: dict[int, _Held] = {}  # by subgroup; those that were filled last are last
        self._stored: set[int] = set()  # subgroups whose gradients are whole on the paths
        self._filling: int | None = None
        self._writes = 0  # so far: each is the version of what it writes
        self._is_due = False  # whether something has changed since `advance`
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

    # Filling

    def fill(self, subgroup: int) -> None:
        """Have a buffer made ready for gradients of a subgroup; see `is_filling`."""
        self._filling, self._is_due = subgroup, True
        if subgroup in self._held:
            self._held[subgroup] = self._held.pop(subgroup)  # the last to have been filled

    def is_filling(self, subgroup: int) -> bool:
        """Return whether the caller may write a subgroup's gradients to its buffer."""
        held = self._held.get(subgroup)
        return self._filling == subgroup and held is not None and held.is_newest and held.is_still

    def buffer_of(self, subgroup: int) -> int:
        """Return the buffer of a subgroup's gradients."""
        return self._held[subgroup].buffer

    def stop_filling(self) -> None:
        """Take in that the caller writes nothing more."""
        self._filling, self._is_due = None, True

    def drop(self) -> None:
        """Forget all gradients."""
        self._filling = None
        for subgroup in [*self._held]:
            self.used(subgroup)
        for subgroup in [*self._stored]:
            self._forget(subgroup)

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

    def are_there(self, subgroup: int) -> bool:
        """Return whether a visit finds its gradients in a buffer."""
        return subgroup in self._held and not self._held[subgroup].unread

    def used(self, subgroup: int) -> None:
        """Take in that gradients are of no use any more."""
        held, self._is_due = self._held[subgroup], True
        if self._filling == subgroup:
            self._filling = None
        if held.is_still:
            self._free(subgroup)
        else:
            held.is_over = True
        self._forget(subgroup)

    def forget_waiting(self) -> None:
        """Have no visit wait: the sweep has ended."""
        self._is_due = True
        self._streamed.clear()
        self._resident.clear()
        for held in self._held.values():
            held.is_wanted = False

    # Reports

    def landed(self, operation: ReadTile | WriteTile, checksum: int) -> bool:
        """Take in that a tile has been read or written; return whether a visit may find its gradients now."""
        tile = operation.tile
        held, self._is_due = self._held[tile.subgroup], True
        if isinstance(operation, ReadTile):
            held.unread -= 1
        else:
            record = operation.record
            held.unwritten -= 1
            held.written.append((tile, Record(record.location, record.step, checksum)))
        if held.is_over:
            self._end_useless(tile.subgroup, held)
            return False
        if not held.is_still:
            return False
        written, held.written = held.written, []
        if written:
            held.is_newest = False
            self._stored.add(tile.subgroup)
        for each, record in written:
            self._index.commit(each, record)
        return isinstance(operation, ReadTile)

    def write_again(self, write: WriteTile) -> bool:
        """Have a tile go elsewhere whose write has failed, if it is of any use; return whether there is room."""
        held, self._is_due = self._held[write.tile.subgroup], True
        if not held.is_over:
            buffer = known(write.slot, "a gradient buffer without a number")
            return self._write(write.tile, buffer, write.buffer_offset, write.record.location.nbytes)
        held.unwritten -= 1
        self._end_useless(write.tile.subgroup, held)
        return True

    def _end_useless(self, subgroup: int, held: _Held) -> None:
        """Free a buffer of no use, once nothing is on its way to or from it."""
        if held.is_still:
            for _, record in held.written:
                self._index.abandon(record.location)
            self._free(subgroup)

    # Decisions

    def advance(self) -> None:
        """Give buffers to those who wait for one, and have others written so that there will be some."""
        if not self._is_due:
            return
        self._is_due, filling = False, self._filling
        if filling is not None and filling not in self._held:
            buffer = self._take()
            if buffer is not None:
                self._begin(filling, buffer)
        for line in (self._streamed, self._resident):
            while line and (buffer := self._take()) is not None:
                self._begin(line.popleft(), buffer, is_wanted=True)
        if filling is not None and filling in self._held:
            self._make_newest(filling)
        self._make_room()

    def _begin(self, subgroup: int, buffer: int, *, is_wanted: bool = False) -> None:
        """Have a subgroup own a free buffer, and its gradients read into it, if there are any."""
        self._owners[buffer] = subgroup
        held = self._held[subgroup] = _Held(buffer, is_wanted=is_wanted)
        if subgroup not in self._stored:
            return
        tiles = self._plan.gradient_tiles[subgroup]
        held.unread = len(tiles)
        for tile, offset, _ in tiles:
            record = known(self._index.get(tile), f"{tile} is on no path")
            self._issue(ReadTile(self._new_op(), tile, buffer, offset, record, gradients=True))

    def _make_newest(self, subgroup: int) -> None:
        """Have a buffer changed that nothing is on its way to or from: what lies on the paths is of no use then."""
        held = self._held[subgroup]
        if held.is_still and not held.is_newest:
            held.is_newest = True
            self._forget(subgroup)

    def _take(self) -> int | None:
        """Return a buffer that is free, or whose content is on the paths and not wanted; None if there is none."""
        if None not in self._owners:
            clean = next((n for n, held in self._held.items() if self._is_clean(n, held)), None)
            if clean is None:
                return None
            self._free(clean)
        return self._owners.index(None)

    def _is_clean(self, subgroup: int, held: _Held) -> bool:
        return held.is_still and not (held.is_newest or held.is_wanted) and subgroup != self._filling

    def _make_room(self) -> None:
        """Write what was filled first, until no more lies in buffers alone than may; visits rid others of it soon."""
        alone = [n for n, held in self._held.items() if held.is_newest and not (held.is_wanted or held.unwritten)]
        count = len(alone)
        for subgroup in alone:
            if count <= self._plan.staying_gradients:
                return
            if subgroup != self._filling:
                count -= 1
                held, tiles = self._held[subgroup], self._plan.gradient_tiles[subgroup]
                held.unwritten = len(tiles)
                for tile, offset, nbytes in tiles:
                    if not self._write(tile, held.buffer, offset, nbytes):
                        self._full(tile)
                        return

    def _write(self, tile: TileId, buffer: int, offset: int, nbytes: int) -> bool:
        location = self._index.claim(nbytes)
        if location is None:
            return False
        self._writes += 1
        record = Record(location, self._writes, 0)
        self._issue(WriteTile(self._new_op(), tile, buffer, offset, record, gradients=True))
        return True

    def _free(self, subgroup: int) -> None:
        self._owners[self._held.pop(subgroup).buffer] = None

    def _forget(self, subgroup: int) -> None:
        """Free the slots of gradients on the paths, if there are any."""
        if subgroup in self._stored:
            self._stored.discard(subgroup)
            for tile, _, _ in self._plan.gradient_tiles[subgroup]:
                self._index.drop(tile)

    def check(self, in_flight: Collection[Operation]) -> None:
        """Verify the invariants that the module states.

        Raises:
            InternalError: If one does not hold.
        """
        owners = [owner for owner in self._owners if owner is not None]
        invariant(len(owners) == len(self._held), "a gradient buffer has an owner that left it")
        for subgroup, held in self._held.items():
            invariant(self._owners[held.buffer] == subgroup, f"gradient buffer {held.buffer} is not {subgroup}'s")
            stored = subgroup in self._stored
            invariant(not (held.is_newest and stored), f"old gradients of {subgroup} are kept on the paths")
            invariant(not held.unread or stored, f"gradients of {subgroup} come from nowhere")
        moved = [o for o in in_flight if isinstance(o, ReadTile | WriteTile) and o.gradients]
        count = sum(held.unread + held.unwritten for held in self._held.values())
        invariant(len(moved) == count, "tiles of gradients are lost on their way")
