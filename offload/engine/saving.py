"""Checkpoints within the machine: which tiles still have to be written, and which slots checkpoints hold. Pure.

A save takes the state as it is between two sweeps. Tiles that lie on storage are held where they are; staged
subgroups that are dirty are flushed; resident ones are written to slots of their own. Sweeps go on meanwhile: only a
visit of a subgroup that has not been written yet waits, and that subgroup is written first. A save with a *sink*
copies everything into a store of its own instead and holds nothing in the end.

Invariants:
  * a record is written down once its tile is whole on storage, and its slot is held from that moment on;
  * a path is synced after the last write to it; a checkpoint is committed after all its paths have been synced;
  * a write that fails is tried once more, then on other paths; training goes on using the path;
  * a save that fails gives back all that it held and reserved, and leaves training as it was.

Non-goals: what a commit does (the executor), which checkpoints are released and when (the session).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from offload.engine.index import Location, Record, TileIndex
from offload.engine.operations import Commit, CopyTile, Save, SaveOperation, SaveTile, Sync, WriteTile
from offload.errors import CheckpointError, TierError, TierFullError, invariant
from offload.plan.budget import CHECKPOINT_BUFFERS, Plan
from offload.protocols import SECTOR_BYTES, TileId

SAVE_DEPTH = CHECKPOINT_BUFFERS
"""Tiles that a save has on their way at once; also the number of copy buffers."""


@dataclass(slots=True)
class _Item:
    """A tile that has to be written.

    Attributes:
        tile: Which.
        offset: Where it lies in the subgroup's state, or in the image of its weights.
        nbytes: Its payload.
        step: Its version.
        buffered: Whether it has to be gathered into a copy buffer.
        home: Whether it is of state at home in memory, which no visit may touch before.
        stored: Where it is to be read from first.
    """

    tile: TileId
    offset: int
    nbytes: int
    step: int
    buffered: bool = False
    home: bool = False
    stored: Record | None = None


class Saver:
    """The save under way, and what finished ones hold.

    Args:
        index: Slots of the stores.
        issue: Starts an operation, given its id.
    """

    def __init__(self, index: TileIndex, issue: Callable[[Callable[[int], SaveOperation]], None]) -> None:
        self.save: Save | None = None
        self.records: dict[TileId, Record] = {}
        """Tiles of the save under way that are whole on storage."""
        self.ended: tuple[Save, Exception | None] | None = None
        """The last save that ended, and why it failed, until somebody takes it."""
        self.held: dict[int, Mapping[TileId, Record]] = {}
        """What each finished save holds, by its number."""
        self._index = index
        self._issue = issue
        self._error: Exception | None = None
        self._weights: deque[_Item] = deque()
        self._todo: dict[int, deque[_Item]] = {}
        self._copies: deque[_Item] = deque()
        self._urgent: deque[int] = deque()
        self._left: dict[int, int] = {}
        self._flushing: dict[int, None] = {}
        self._flying: dict[int, SaveOperation] = {}
        self._items: dict[int, _Item] = {}
        self._buffers: list[int] = []
        self._reserve: Counter[int] = Counter()
        self._sink_end = 0
        self._synced = False
        self._unblocked: list[int] = []
        self._tries: Counter[TileId] = Counter()
        self.avoided: set[int] = set()
        """Paths that the save under way writes to no more."""

    @property
    def weights_left(self) -> bool:
        """Whether masters that are weights have still to be written: until then weights must not change."""
        return bool(self._weights) or any(item.buffered and not item.home for item in self._items.values())

    def blocks(self, subgroup: int) -> bool:
        """Return whether resident state has still to be written and must not be visited."""
        return subgroup in self._left

    def hurry(self, subgroup: int) -> None:
        """Write a subgroup before others: a visit waits for it."""
        self._urgent.append(subgroup)

    def take_unblocked(self) -> list[int]:
        """Return the subgroups that may be visited again since the last call."""
        unblocked, self._unblocked = self._unblocked, []
        return unblocked

    def tries_again(self, operation: SaveTile | WriteTile, error: Exception) -> bool:
        """Take in that a write for the save has failed; return whether it is to be issued again.

        Another slot is taken in any case. A path that has no room, or fails for the second time, is avoided.
        """
        if self.save is None or self._error is not None or not isinstance(error, TierError):
            return False
        self._tries[operation.tile] += 1
        if self._tries[operation.tile] > 1 or isinstance(error, TierFullError):
            self.avoided.add(operation.record.location.path)
        return self.save.sink is None or self._tries[operation.tile] == 1

    # The course of a save ---------------------------------------------------------------------------------------

    def begin(
        self,
        save: Save,
        plan: Plan,
        unsaved: Mapping[int, None],
        versions: Mapping[int, int],
    ) -> bool:
        """Start a save.

        Args:
            save: What is asked for.
            plan: Homes of all subgroups; none is fresh.
            unsaved: Streamed subgroups whose newest version is not whole on storage: they are being, or will now be,
                flushed, which `flushed` tells of.
            versions: Step of each subgroup's last change.

        Returns:
            Whether it has started; if not, `ended` says why.
        """
        invariant(self.save is None, "a save begins while another is under way")
        self.save, self.records, self._error = save, {}, None
        self._buffers = list(range(SAVE_DEPTH))
        self._sink_end = 0
        self._synced = False
        self._tries.clear()
        self.avoided.clear()
        counts: Counter[int] = Counter()
        pinned: list[tuple[TileId, Record]] = []
        for subgroup in () if save.empty else plan.layout.subgroups:
            number = subgroup.index
            if plan.resident[number]:
                on_gpu = plan.at_home_on_gpu(number)
                items = self._unchanged_or_todo(subgroup.tiles, versions[number], pinned, buffered=on_gpu, home=True)
                if items:
                    self._todo[number] = items
                    self._left[number] = len(items)
                    counts.update(item.nbytes for item in items)
            elif number in unsaved:
                self._flushing[number] = None
                counts.update(nbytes for _, _, nbytes in subgroup.tiles)
            else:
                for tile, _, nbytes in subgroup.tiles:
                    record = self._index.get(tile)
                    invariant(record is not None, f"{tile} is clean and was never written")
                    if record is not None:
                        pinned.append((tile, record))
                        counts[nbytes] += not self._index.is_held(record.location)
            weights = self._unchanged_or_todo(subgroup.weight_tiles, versions[number], pinned, buffered=True)
            self._weights.extend(weights)
            counts.update(item.nbytes for item in weights)
        if save.sink is not None:  # only what is waiting to be copied takes room on the paths, and for a while
            for subgroup_index in self._todo:
                counts.subtract(item.nbytes for item in self._todo[subgroup_index])
            counts.subtract(item.nbytes for item in self._weights)
        counts = +counts
        if not self._index.reserve(counts):
            needed = sum((nbytes + SECTOR_BYTES) * count for nbytes, count in counts.items())
            self._clear()
            self._end(
                CheckpointError(
                    f"the paths have no room for a checkpoint beside the state in use: it needs {needed} bytes more "
                    "on them; free space, raise max_bytes, lower checkpoints_kept, or add a path"
                )
            )
            return False
        self._reserve = counts
        for tile, record in pinned:
            self._keep(tile, record)
        return True

    def _unchanged_or_todo(
        self,
        tiles: Iterable[tuple[TileId, int, int]],
        step: int,
        pinned: list[tuple[TileId, Record]],
        *,
        buffered: bool = False,
        home: bool = False,
    ) -> deque[_Item]:
        """Return the tiles to be written; those that an earlier checkpoint has in this version are pinned again."""
        todo: deque[_Item] = deque()
        for tile, offset, nbytes in tiles:
            known = (records.get(tile) for records in reversed(self.held.values()))
            record = next((r for r in known if r is not None and r.step == step), None)
            if record is not None:
                pinned.append((tile, record))
            else:
                todo.append(_Item(tile, offset, nbytes, step, buffered, home))
        return todo

    def _keep(self, tile: TileId, record: Record) -> None:
        """Hold a tile that is whole on storage, or, with a sink, until it has been copied."""
        if self._index.hold(record.location):
            self._reserve[record.location.nbytes] -= 1
        if self.save is not None and self.save.sink is not None:
            self._copies.append(_Item(tile, 0, record.location.nbytes, record.step, stored=record))
        else:
            self.records[tile] = record

    def flushed(self, records: Iterable[tuple[TileId, Record]], subgroup: int) -> None:
        """Take in that a subgroup has been flushed."""
        if self._flushing.pop(subgroup, subgroup) is None and self._error is None:
            for tile, record in records:
                self._keep(tile, record)

    def flush_failed(self, subgroup: int, error: Exception) -> None:
        """Take in that a flush that only this save needed has failed."""
        self._flushing.pop(subgroup, None)
        self.abort(error)

    def advance(self) -> None:
        """Issue what can be issued now; end the save if that was all."""
        if self.save is None:
            return
        if self._error is not None:
            if not self._flying:
                error = self._error
                self._drop()
                self._end(error)
            return
        for item in self._next_items():
            if not self._start(item):  # there was no room for it
                self.advance()
                return
        if self._flying or self._flushing or self._weights or self._todo or self._copies:
            return
        if not self._synced:
            self._synced = True
            for path in sorted({record.location.path for record in self.records.values()}):
                self._fly(partial(Sync, path=path))
        if not self._flying:
            self._fly(partial(Commit, number=self.save.number, records=self.records))

    def _next_items(self) -> Iterator[_Item]:
        while len(self._items) < SAVE_DEPTH and self._error is None:
            if self._weights and self._buffers:
                yield self._weights.popleft()
            elif self._todo:
                while self._urgent and self._urgent[0] not in self._todo:
                    self._urgent.popleft()
                subgroup = self._urgent[0] if self._urgent else next(iter(self._todo))
                if self._todo[subgroup][0].buffered and not self._buffers:
                    return
                item = self._todo[subgroup].popleft()
                if not self._todo[subgroup]:
                    del self._todo[subgroup]
                yield item
            elif self._copies and self._buffers:
                yield self._copies.popleft()
            else:
                return

    def _start(self, item: _Item) -> bool:
        stored = item.stored
        if stored is not None:
            buffer = self._buffers.pop()
            self._fly(lambda op: CopyTile(op, item.tile, stored, buffer), item)
            return True
        return self._write(item, self._buffers.pop() if item.buffered else None)

    def _write(self, item: _Item, buffer: int | None) -> bool:
        location = self._claim(item.nbytes)
        if location is None:
            detail = f"no path has room left for {item.tile}"
            self.abort(TierFullError("write", tier="storage", path="(all)", detail=detail))
            return False
        record = Record(location, item.step, 0)
        self._fly(lambda op: SaveTile(op, item.tile, record, item.offset, buffer, item.buffered), item)
        return True

    def _claim(self, nbytes: int) -> Location | None:
        if self.save is None or self.save.sink is None:
            return self._index.claim(nbytes, self.avoided)
        location = Location(self.save.sink, self._sink_end, nbytes)
        self._sink_end += nbytes + SECTOR_BYTES
        return location

    def _fly(self, make: Callable[[int], SaveOperation], item: _Item | None = None) -> None:
        def made(op: int) -> SaveOperation:
            operation = self._flying[op] = make(op)
            if item is not None:
                self._items[op] = item
            return operation

        self._issue(made)

    def landed(self, operation: SaveOperation, checksum: int, error: Exception | None) -> None:
        """Take in that an operation has ended, well or not."""
        del self._flying[operation.op]
        item = self._items.pop(operation.op, None)
        if self.save is None:  # it was broken off
            return
        if isinstance(operation, CopyTile):
            if error is None and self._error is None and item is not None:
                self._write(_Item(item.tile, 0, item.nbytes, item.step), operation.buffer)
            if error is None and self._error is None:
                self._index.let_go(operation.tile, operation.record.location)
            else:
                self.records.setdefault(operation.tile, operation.record)  # still held; dropped with the rest
                self._buffers.append(operation.buffer)
        elif isinstance(operation, SaveTile):
            if self._saved(operation, item, checksum, error):
                return
        elif isinstance(operation, Commit) and error is None:
            if self.save.sink is None:
                self.held[operation.number] = operation.records
            self._end(None)
            return
        if error is not None:
            self.abort(error)

    def _saved(self, operation: SaveTile, item: _Item | None, checksum: int, error: Exception | None) -> bool:
        """Take in that a write has ended; return whether it failed and was issued again."""
        subgroup, location = operation.tile.subgroup, operation.record.location
        sink = self.save is not None and self.save.sink is not None
        if error is not None and not sink:
            self._index.lose(location)
        if error is not None and item is not None and self.tries_again(operation, error):
            again = self._claim(location.nbytes)
            if again is not None:
                record = Record(again, operation.record.step, 0)
                self._fly(lambda op: replace(operation, op=op, record=record), item)
                return True
        if operation.buffer is not None:
            self._buffers.append(operation.buffer)
        if item is not None and item.home:
            self._left[subgroup] -= 1
            if not self._left[subgroup]:
                self._unblock(subgroup)
        if error is None:
            if not sink and self._index.hold(location):
                self._reserve[location.nbytes] -= 1
            self.records[operation.tile] = Record(location, operation.record.step, checksum)
        return False

    def _unblock(self, subgroup: int) -> None:
        del self._left[subgroup]
        self._unblocked.append(subgroup)

    # Ends -------------------------------------------------------------------------------------------------------

    def abort(self, error: Exception) -> None:
        """Give the save up: nothing new is issued for it, and it ends when what is in flight has landed."""
        if self.save is None or self._error is not None:
            return
        self._error = error
        for subgroup, items in self._todo.items():
            self._left[subgroup] -= len(items)
            if not self._left[subgroup]:
                self._unblock(subgroup)
        self._todo.clear()
        self._weights.clear()
        for item in self._copies:
            if item.stored is not None:
                self.records.setdefault(item.tile, item.stored)
        self._copies.clear()
        self._flushing.clear()

    def break_off(self, error: Exception, dropped: Iterable[SaveOperation]) -> None:
        """End the save at once: the machine has broken. `dropped` were issued and will not be started."""
        for operation in dropped:
            self._flying.pop(operation.op, None)
            self._items.pop(operation.op, None)
        if self.save is not None:
            self._clear()
            self._end(error)

    def _drop(self) -> None:
        """Let go of everything that the failed save holds."""
        sink = self.save.sink if self.save is not None else None
        for tile, record in self.records.items():
            if record.location.path != sink:
                self._index.let_go(tile, record.location)
        self.records = {}
        self._clear()

    def _clear(self) -> None:
        for subgroup in list(self._left):
            self._unblock(subgroup)
        self._todo.clear()
        self._weights.clear()
        self._copies.clear()
        self._flushing.clear()

    def _end(self, error: Exception | None) -> None:
        self._index.give_back(+self._reserve)
        self._reserve = Counter()
        self._urgent.clear()
        self.ended = (self.save, error) if self.save is not None else None
        self.save = None

    def release(self, number: int) -> None:
        """Let the slots of a finished save go."""
        for tile, record in self.held.pop(number).items():
            self._index.let_go(tile, record.location)
