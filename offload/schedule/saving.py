"""Checkpoints within the machine: which tiles still have to be written, and which slots checkpoints hold. Pure.

A save takes the state as it is between two sweeps. Tiles that lie on storage are held where they are; staged
subgroups that are dirty are flushed; resident ones are written to slots of their own. Sweeps go on meanwhile: only a
visit of a subgroup that has not been written yet waits, and that subgroup is written first. A save with a *sink*
copies everything into a store of its own instead and holds nothing in the end.

Invariants:
  * a record is written down once its tile is whole on storage, and its slot is held from that moment on;
  * a path is synced after the last write to it; a checkpoint is committed after all its paths have been synced;
  * a write that fails is tried once more, then on other paths; training goes on using the path;
  * a save that fails gives back everything it held and reserved, and leaves training as it was.

Non-goals: what a commit does (the executor), which checkpoints are released and when (the session).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.errors import CheckpointError, TierError, TierFullError, invariant, known
from offload.plan.budget import CHECKPOINT_BUFFERS, Plan
from offload.protocols import SECTOR_BYTES, TileId
from offload.schedule.index import Location, Record, TileIndex
from offload.schedule.operations import Commit, CopyTile, Save, SaveOperation, SaveTile, Sync, WriteTile

SAVE_DEPTH = CHECKPOINT_BUFFERS
"""Tiles that a save has on their way at once; also the number of copy buffers."""


@dataclass(slots=True)
class _Item:
    """A tile that has to be written.

    Attributes:
        tile: Its id.
        offset: Where it lies in the subgroup's state, or in the image of its weights.
        nbytes: Its payload.
        step: Its version.
        buffered: Whether it has to be gathered into a copy buffer.
        home: Whether it is state at home in memory, which no visit may touch until it is written.
        stored: Where it is read from, if it is copied into a sink.
    """

    tile: TileId
    offset: int
    nbytes: int
    step: int
    buffered: bool = False
    home: bool = False
    stored: Record | None = None


@dataclass(slots=True)
class UnderWay:
    """One save, from its begin to its end.

    Attributes:
        save: The request.
        records: Where tiles lie that are whole on storage (with a sink: in it); without one, their slots are held.
        reserve: Slots that are reserved and not held yet: how many, by payload bytes.
        weights: Tiles of masters that are weights, still to be written.
        todo: Tiles of state at home in memory, still to be written, by subgroup.
        left: How many tiles of each such subgroup are not written yet; it must not be visited meanwhile.
        flushing: Streamed subgroups whose flush has not ended.
        copies: Tiles whose slots are held until they have been copied into the sink.
        urgent: Subgroups that are written first.
        flying: Operations in flight, each with its tile; None for a sync or a commit.
        buffers: Free copy buffers.
        sink_end: Bytes of the sink that are taken.
        synced: Whether its paths are being synced, or have been.
        tries: Writes that have failed, by tile.
        avoided: Paths that it writes to no more.
        error: Why it has been given up.
    """

    save: Save
    records: dict[TileId, Record] = field(default_factory=dict)
    reserve: Counter[int] = field(default_factory=Counter)
    weights: deque[_Item] = field(default_factory=deque)
    todo: dict[int, deque[_Item]] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    flushing: dict[int, None] = field(default_factory=dict)
    copies: deque[_Item] = field(default_factory=deque)
    urgent: deque[int] = field(default_factory=deque)
    flying: dict[int, _Item | None] = field(default_factory=dict)
    buffers: list[int] = field(default_factory=lambda: list(range(SAVE_DEPTH)))
    sink_end: int = 0
    synced: bool = False
    tries: Counter[TileId] = field(default_factory=Counter)
    avoided: set[int] = field(default_factory=set)
    error: Exception | None = None


class Saver:
    """The save under way, and what finished ones hold.

    Args:
        index: Slots of the stores.
        take_op: Returns the id of the next operation.
        issue: Starts an operation.
        unblock: Called with each subgroup that may be visited again.
    """

    def __init__(
        self,
        index: TileIndex,
        take_op: Callable[[], int],
        issue: Callable[[SaveOperation], None],
        unblock: Callable[[int], None],
    ) -> None:
        self.under_way: UnderWay | None = None
        self.ended: tuple[Save, Exception | None] | None = None
        """The last save that ended, and why it failed, until it is `Taken`."""
        self.held: dict[int, Mapping[TileId, Record]] = {}
        """What each finished save holds, by its number."""
        self._index = index
        self._take_op = take_op
        self._issue = issue
        self._unblock = unblock

    @property
    def weights_left(self) -> bool:
        """Whether masters that are weights have still to be written: until then weights must not change."""
        now = self.under_way
        if now is None:
            return False
        return bool(now.weights) or any(item and item.buffered and not item.home for item in now.flying.values())

    def blocks(self, subgroup: int) -> bool:
        """Return whether resident state has still to be written and must not be visited."""
        return self.under_way is not None and subgroup in self.under_way.left

    def hurry(self, subgroup: int) -> None:
        """Write a subgroup before others: a visit waits for it."""
        if self.under_way is not None:
            self.under_way.urgent.append(subgroup)

    def retry(self, operation: SaveTile | WriteTile, error: Exception) -> Collection[int] | None:
        """Take in that a write for the save has failed.

        Returns:
            The paths to avoid if it is issued again, to another slot: those without room, and those that have failed
            twice. None if it is not to be issued again.
        """
        now = self.under_way
        if now is None or now.error is not None or not isinstance(error, TierError):
            return None
        now.tries[operation.tile] += 1
        if now.tries[operation.tile] > 1 or isinstance(error, TierFullError):
            now.avoided.add(operation.record.location.path)
        return now.avoided if now.save.sink is None or now.tries[operation.tile] == 1 else None

    # The course of a save ---------------------------------------------------------------------------------------

    def begin(
        self,
        save: Save,
        plan: Plan,
        unsaved: Mapping[int, None],
        versions: Sequence[int],
    ) -> bool:
        """Start a save.

        Args:
            save: The request.
            plan: Homes of all subgroups; none is fresh.
            unsaved: Streamed subgroups whose newest version is not whole on storage. They are flushed, now or
                already; `flushed` reports the end.
            versions: Step of each subgroup's last change.

        Returns:
            Whether it has started; if not, `ended` says why.
        """
        invariant(self.under_way is None, "a save begins while another is under way")
        now = UnderWay(save)
        counts: Counter[int] = Counter()
        pinned: list[tuple[TileId, Record]] = []

        def unwritten(tiles: Iterable[tuple[TileId, int, int]], step: int, buffered: bool, home: bool) -> list[_Item]:
            """Return the tiles to be written; one that an earlier checkpoint has in this version is pinned again."""
            todo = []
            for tile, offset, nbytes in tiles:
                older = (records.get(tile) for records in reversed(self.held.values()))
                record = next((r for r in older if r is not None and r.step == step), None)
                if record is not None:
                    pinned.append((tile, record))
                    continue
                todo.append(_Item(tile, offset, nbytes, step, buffered, home))
                counts[nbytes] += save.sink is None  # what is written to a sink takes no room on the paths
            return todo

        for subgroup in () if save.empty else plan.layout.subgroups:
            number = subgroup.index
            if plan.is_resident(number):
                items = unwritten(subgroup.tiles, versions[number], plan.at_home_on_gpu(number), home=True)
                if items:
                    now.todo[number], now.left[number] = deque(items), len(items)
            elif number in unsaved:
                now.flushing[number] = None
                counts.update(nbytes for _, _, nbytes in subgroup.tiles)
            else:
                for tile, _, nbytes in subgroup.tiles:
                    record = known(self._index.get(tile), f"{tile} is clean and was never written")
                    pinned.append((tile, record))
                    counts[nbytes] += not self._index.is_held(record.location)
            now.weights += unwritten(subgroup.weight_tiles, versions[number], buffered=True, home=False)
        now.reserve = +counts
        if not self._index.reserve(now.reserve):
            needed = sum((nbytes + SECTOR_BYTES) * count for nbytes, count in now.reserve.items())
            error = CheckpointError(
                f"the paths have no room for a checkpoint beside the state in use: it needs {needed} bytes more "
                "on them; free space, raise max_bytes, lower checkpoints_kept, or add a path"
            )
            self.ended = save, error
            return False
        self.under_way = now
        for tile, record in pinned:
            self._keep(now, tile, record)
        return True

    def _keep(self, now: UnderWay, tile: TileId, record: Record) -> None:
        """Hold a tile that is whole on storage, or, with a sink, until it has been copied."""
        if self._index.hold(record.location):
            now.reserve[record.location.nbytes] -= 1
        if now.save.sink is not None:
            now.copies.append(_Item(tile, 0, record.location.nbytes, record.step, stored=record))
        else:
            now.records[tile] = record

    def flushed(self, records: Iterable[tuple[TileId, Record]], subgroup: int) -> None:
        """Take in that a subgroup has been flushed."""
        now = self.under_way
        if now is not None and subgroup in now.flushing:
            del now.flushing[subgroup]
            for tile, record in records:
                self._keep(now, tile, record)

    def advance(self) -> None:
        """Issue what can be issued now; end the save if that was all."""
        now = self.under_way
        if now is None:
            return
        for item in self._next_items(now):
            if item.stored is not None:
                self._fly(now, CopyTile(self._take_op(), item.tile, item.stored, now.buffers.pop()), item)
            else:
                self._write(now, item, now.buffers.pop() if item.buffered else None)
        if now.error is not None:
            if not now.flying:
                self._end(now, now.error)
            return
        if now.flying or now.flushing or now.weights or now.todo or now.copies:
            return
        if not now.synced:
            now.synced = True
            for path in sorted({record.location.path for record in now.records.values()}):
                self._fly(now, Sync(self._take_op(), path))
        if not now.flying:
            self._fly(now, Commit(self._take_op(), now.save.number, now.records))

    def _next_items(self, now: UnderWay) -> Iterator[_Item]:
        while len(now.flying) < SAVE_DEPTH and now.error is None:
            if now.weights and now.buffers:
                yield now.weights.popleft()
            elif now.todo:
                while now.urgent and now.urgent[0] not in now.todo:
                    now.urgent.popleft()
                subgroup = now.urgent[0] if now.urgent else next(iter(now.todo))
                if now.todo[subgroup][0].buffered and not now.buffers:
                    return
                item = now.todo[subgroup].popleft()
                if not now.todo[subgroup]:
                    del now.todo[subgroup]
                yield item
            elif now.copies and now.buffers:
                yield now.copies.popleft()
            else:
                return

    def _write(self, now: UnderWay, item: _Item, buffer: int | None) -> None:
        location = self._claim(now, item.nbytes)
        if location is None:
            detail = f"no path has room left for {item.tile}"
            self.abort(TierFullError("write", tier="storage", path="(all)", detail=detail))
            return
        record = Record(location, item.step, 0)
        self._fly(now, SaveTile(self._take_op(), item.tile, record, item.offset, buffer, item.buffered), item)

    def _claim(self, now: UnderWay, nbytes: int) -> Location | None:
        if now.save.sink is None:
            return self._index.claim(nbytes, now.avoided)
        location = Location(now.save.sink, now.sink_end, nbytes)
        now.sink_end += nbytes + SECTOR_BYTES
        return location

    def _fly(self, now: UnderWay, operation: SaveOperation, item: _Item | None = None) -> None:
        now.flying[operation.op] = item
        self._issue(operation)

    def landed(self, operation: SaveOperation, checksum: int, error: Exception | None) -> None:
        """Take in that an operation has ended, well or not."""
        now = self.under_way
        if now is None:  # it was broken off
            return
        item = now.flying.pop(operation.op)
        if isinstance(operation, CopyTile) and item is not None:
            if error is None and now.error is None:
                self._write(now, _Item(item.tile, 0, item.nbytes, item.step), operation.buffer)
                self._index.let_go(operation.tile, operation.record.location)
            else:
                now.copies.append(item)  # still held
        elif isinstance(operation, SaveTile) and item is not None:
            if self._saved(now, operation, item, checksum, error):
                return
        elif isinstance(operation, Commit) and error is None:
            if now.save.sink is None:
                self.held[operation.number] = operation.records
            self._end(now, None)
        if error is not None:
            self.abort(error)

    def _saved(self, now: UnderWay, operation: SaveTile, item: _Item, checksum: int, error: Exception | None) -> bool:
        """Take in that a write has ended; return whether it failed and was issued again."""
        location, to_path = operation.record.location, now.save.sink is None
        if error is not None and to_path:
            self._index.lose(location)
        if error is not None and self.retry(operation, error) is not None:
            again = self._claim(now, location.nbytes)
            if again is not None:
                record = Record(again, operation.record.step, 0)
                self._fly(now, replace(operation, op=self._take_op(), record=record), item)
                return True
        if operation.buffer is not None:
            now.buffers.append(operation.buffer)
        if item.home:
            self._written(now, operation.tile.subgroup, 1)
        if error is None:
            if to_path and self._index.hold(location):
                now.reserve[location.nbytes] -= 1
            now.records[operation.tile] = Record(location, operation.record.step, checksum)
        return False

    def _written(self, now: UnderWay, subgroup: int, count: int) -> None:
        """Count off tiles of a subgroup that need not be written any more."""
        now.left[subgroup] -= count
        if not now.left[subgroup]:
            del now.left[subgroup]
            self._unblock(subgroup)

    # Ends -------------------------------------------------------------------------------------------------------

    def abort(self, error: Exception) -> None:
        """Give the save up: nothing new is issued for it, and it ends when what is in flight has landed."""
        now = self.under_way
        if now is None or now.error is not None:
            return
        now.error = error
        for subgroup, items in now.todo.items():
            self._written(now, subgroup, len(items))
        for waiting in (now.todo, now.weights, now.flushing):
            waiting.clear()

    def break_off(self, error: Exception) -> None:
        """End the save at once: the machine has broken."""
        if self.under_way is not None:
            self._end(self.under_way, error)

    def _end(self, now: UnderWay, error: Exception | None) -> None:
        self.under_way, self.ended = None, (now.save, error)
        if error is not None:
            if now.save.sink is None:
                for tile, record in now.records.items():
                    self._index.let_go(tile, record.location)
            for item in now.copies:
                if item.stored is not None:
                    self._index.let_go(item.tile, item.stored.location)
        self._index.give_back(+now.reserve)
        for subgroup in now.left:
            self._unblock(subgroup)

    def release(self, number: int) -> None:
        """Let the slots of a finished save go."""
        for tile, record in self.held.pop(number).items():
            self._index.let_go(tile, record.location)
