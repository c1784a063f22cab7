"""Checkpoints within the machine: which tiles still have to be written, and which slots checkpoints hold. Pure.

A save takes the state as it is between two sweeps. Tiles on storage are held where they are, dirty staging slots are
flushed, and resident state is written to slots of its own. Sweeps go on meanwhile: a visit waits only if its subgroup
has not been written yet, and that subgroup is written first. A save with a *sink* copies everything into a store of
its own instead, and holds no slots in the end.

Invariants:
  * a save records a tile once that is whole on storage, and holds its slot from that moment on;
  * a path is synced after the last write to it; a checkpoint is committed after all its paths have been synced;
  * a write that fails is tried once more, then on other paths; training goes on using the path;
  * a save that fails gives back everything it held and reserved, and leaves training as it was.

Non-goals: how to commit (the executor), when to release checkpoints (the session).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.errors import CheckpointError, TierError, TierFullError, invariant, known
from offload.layout import Subgroup
from offload.plan.budget import CHECKPOINT_BUFFERS, Home, Plan
from offload.protocols import SECTOR_BYTES, TileId
from offload.schedule.index import Location, TileIndex, TileRecord
from offload.schedule.issued import Issued
from offload.schedule.operations import Commit, CopyTile, Save, SaveOperation, SaveTile, Sync, WriteTile
from offload.schedule.runs import RunQueues

SAVE_DEPTH = CHECKPOINT_BUFFERS
"""Most operations of a save in flight at once; also the number of copy buffers."""


@dataclass(slots=True)
class _Item:
    """A tile that has to be written.

    Attributes:
        tile: Its id.
        offset: Byte offset in the subgroup's state, or in the image of its weights.
        nbytes: Its payload.
        step: Its version.
        is_buffered: Whether it has to be gathered into a copy buffer.
        is_home: Whether it is state at home in memory, which no visit may change until it is written.
        source: The record to copy it from, if it is copied from storage into a sink.
    """

    tile: TileId
    offset: int
    nbytes: int
    step: int
    is_buffered: bool = False
    is_home: bool = False
    source: TileRecord | None = None


@dataclass(slots=True)
class RunningSave:
    """One save, from its begin to its end.

    Attributes:
        request: What was asked for.
        records: Of tiles that are whole on storage, and whose slots are held; with a sink, of tiles in it, not held.
        reserve: How many slots are reserved and not held yet, by payload bytes.
        weights: Tiles of fp32 weights (which are masters) still to be written.
        todo: Tiles of state at home in memory still to be written, by subgroup.
        unwritten: How many tiles of each such subgroup are not written yet; visits of it wait meanwhile.
        flushing: Streamed subgroups whose flush has not ended.
        copies: Tiles to be copied into the sink, whose slots are held until then.
        urgent: Subgroups that visits wait for; they are written first.
        flying: Operations in flight, each with its tile; None for a sync or a commit.
        buffers: Free copy buffers.
        sink_end: Bytes of the sink that are taken.
        synced: Whether syncs of its paths have been issued.
        tries: Number of failed writes, by tile.
        avoided: Paths that the save does not write to any more.
        error: Why it has been given up.
    """

    request: Save
    records: dict[TileId, TileRecord] = field(default_factory=dict)
    reserve: Counter[int] = field(default_factory=Counter)
    weights: deque[_Item] = field(default_factory=deque)
    todo: dict[int, deque[_Item]] = field(default_factory=dict)
    unwritten: dict[int, int] = field(default_factory=dict)
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
    """The save under way, and what finished ones hold."""

    def __init__(self, index: TileIndex, issued: Issued, runs: RunQueues) -> None:
        self.under_way: RunningSave | None = None
        self.finished_save: tuple[Save, Exception | None] | None = None
        """The last save that finished, and its error (None if it succeeded); None once it is `Taken`."""
        self.held_records: dict[int, Mapping[TileId, TileRecord]] = {}
        """What each finished save holds, by its number."""
        self._index = index
        self._issued = issued
        self._runs = runs

    @property
    def has_unwritten_weights(self) -> bool:
        """Whether fp32 weights (which are masters) have still to be written: until then they must not change."""
        save = self.under_way
        if save is None:
            return False
        return bool(save.weights) or any(
            item and item.is_buffered and not item.is_home for item in save.flying.values()
        )

    def must_wait(self, subgroup: int) -> bool:
        """Return whether a visit of resident state has to wait until the save has written it."""
        return self.under_way is not None and subgroup in self.under_way.unwritten

    def write_first(self, subgroup: int) -> None:
        """Write a subgroup before others: a visit waits for it."""
        if self.under_way is not None:
            self.under_way.urgent.append(subgroup)

    def retry(self, operation: SaveTile | WriteTile, error: Exception) -> Collection[int] | None:
        """Count a failed write of the save, and choose the paths to avoid from now on.

        Returns:
            The paths to avoid if it is issued again, to another slot: those without room, and those that have failed
            twice. None if it is not to be issued again.
        """
        save = self.under_way
        if save is None or save.error is not None or not isinstance(error, TierError):
            return None
        save.tries[operation.tile] += 1
        if save.tries[operation.tile] > 1 or isinstance(error, TierFullError):
            save.avoided.add(operation.record.location.path)
        return save.avoided if save.request.sink is None or save.tries[operation.tile] == 1 else None

    # The course of a save ---------------------------------------------------------------------------------------

    def begin(self, request: Save, plan: Plan, unsaved: Mapping[int, None], versions: Sequence[int]) -> bool:
        """Start a save.

        Args:
            plan: Homes of all subgroups; none is fresh.
            unsaved: Streamed subgroups whose newest version is not whole on storage. They are flushed, now or
                already; `flushed` reports the end.
            versions: Step of each subgroup's last change.

        Returns:
            Whether it has started; if not, `finished_save` says why.
        """
        invariant(self.under_way is None, "a save begins while another is under way")
        save = RunningSave(request)
        counts: Counter[int] = Counter()
        whole: list[tuple[TileId, TileRecord]] = []

        def to_write(tiles: Iterable[tuple[TileId, int, int]], step: int, buffered: bool, home: bool) -> list[_Item]:
            """Return the tiles that have to be written: those in whose version no checkpoint holds them."""
            todo = []
            for tile, offset, nbytes in tiles:
                record = self._held_record(tile, step)
                if record is not None:
                    whole.append((tile, record))
                    continue
                todo.append(_Item(tile, offset, nbytes, step, buffered, home))
                counts[nbytes] += request.sink is None  # what is written to a sink takes no room on the paths
            return todo

        for subgroup in () if request.empty else plan.layout.subgroups:
            number = subgroup.index
            is_evicted = self._index.get(subgroup.tiles[0][0]) is not None  # a `Leave` has moved it to storage
            if plan.is_resident(number) and not is_evicted:
                buffered = plan.homes[number] is not Home.HOST
                items = to_write(subgroup.tiles, versions[number], buffered, home=True)
                if items:
                    save.todo[number], save.unwritten[number] = deque(items), len(items)
            elif number in unsaved:
                save.flushing[number] = None
                counts.update(nbytes for _, _, nbytes in subgroup.tiles)
            else:
                for tile, _, nbytes in subgroup.tiles:
                    record = known(self._index.get(tile), f"{tile} is clean and was never written")
                    whole.append((tile, record))
                    counts[nbytes] += not self._index.is_held(record.location)
            save.weights += to_write(subgroup.weight_tiles, versions[number], buffered=True, home=False)
        save.reserve = +counts
        if not self._index.reserve(save.reserve):
            self.finished_save = request, no_room(save.reserve)
            return False
        self.under_way = save
        for tile, record in whole:
            self._hold_tile(save, tile, record)
        return True

    def _hold_tile(self, save: RunningSave, tile: TileId, record: TileRecord) -> None:
        """Hold a tile that is whole on storage; with a sink, only until it has been copied there."""
        if self._index.hold(record.location):
            save.reserve[record.location.nbytes] -= 1
        if save.request.sink is not None:
            save.copies.append(_Item(tile, 0, record.location.nbytes, record.step, source=record))
        else:
            save.records[tile] = record

    def _held_record(self, tile: TileId, step: int) -> TileRecord | None:
        """Return the record with which a checkpoint holds this version of a tile; None if no checkpoint does."""
        records_of_tile = (records.get(tile) for records in reversed(self.held_records.values()))
        return next((record for record in records_of_tile if record is not None and record.step == step), None)

    def held_version(self, subgroup: Subgroup, step: int | None) -> Mapping[TileId, TileRecord]:
        """Return the records with which checkpoints hold a version of a subgroup's state; {} unless all tiles are."""
        records = {tile: self._held_record(tile, step) for tile, _, _ in subgroup.tiles} if step is not None else {}
        held = {tile: record for tile, record in records.items() if record is not None}
        return held if len(held) == len(records) else {}

    def flushed(self, records: Iterable[tuple[TileId, TileRecord]], subgroup: int) -> None:
        """Keep the tiles of a subgroup that has been flushed, if the save waits for them."""
        save = self.under_way
        if save is not None and subgroup in save.flushing:
            del save.flushing[subgroup]
            for tile, record in records:
                self._hold_tile(save, tile, record)

    def advance(self) -> None:
        """Issue all operations that are possible now: tiles, then syncs, then the commit. End a save given up."""
        save = self.under_way
        if save is None:
            return
        for item in self._next_items(save):
            if item.source is not None:
                self._issue_item(
                    save, CopyTile(self._issued.new_op(), item.tile, item.source, save.buffers.pop()), item
                )
            else:
                self._write(save, item, save.buffers.pop() if item.is_buffered else None)
        if save.error is not None:
            if not save.flying:
                self._end(save, save.error)
            return
        if save.flying or save.flushing or save.weights or save.todo or save.copies:
            return
        if not save.synced:
            save.synced = True
            for path in sorted({record.location.path for record in save.records.values()}):
                self._issue_item(save, Sync(self._issued.new_op(), path))
        if not save.flying:
            self._issue_item(save, Commit(self._issued.new_op(), save.request.number, save.records))

    def _next_items(self, save: RunningSave) -> Iterator[_Item]:
        """Yield the tiles to write or copy now: fp32 weights, then state (urgent first), then copies for a sink."""
        while len(save.flying) < SAVE_DEPTH and save.error is None:
            if save.weights and save.buffers:
                yield save.weights.popleft()
            elif save.todo:
                while save.urgent and save.urgent[0] not in save.todo:
                    save.urgent.popleft()
                subgroup = save.urgent[0] if save.urgent else next(iter(save.todo))
                if save.todo[subgroup][0].is_buffered and not save.buffers:
                    return
                item = save.todo[subgroup].popleft()
                if not save.todo[subgroup]:
                    del save.todo[subgroup]
                yield item
            elif save.copies and save.buffers:
                yield save.copies.popleft()
            else:
                return

    def _write(self, save: RunningSave, item: _Item, buffer: int | None) -> None:
        location = self._claim(save, item.nbytes)
        if location is None:
            detail = f"no path has room left for {item.tile}"
            self.abort(TierFullError("write", tier="storage", path="(all)", detail=detail))
            return
        record = TileRecord(location, item.step)
        self._issue_item(
            save, SaveTile(self._issued.new_op(), item.tile, record, item.offset, buffer, item.is_buffered), item
        )

    def _claim(self, save: RunningSave, nbytes: int) -> Location | None:
        """Take a slot on a path that is not avoided, or the next bytes of the sink."""
        if save.request.sink is None:
            return self._index.claim(nbytes, save.avoided)
        location = Location(save.request.sink, save.sink_end, nbytes)
        save.sink_end += nbytes + SECTOR_BYTES
        return location

    def _issue_item(self, save: RunningSave, operation: SaveOperation, item: _Item | None = None) -> None:
        save.flying[operation.op] = item
        self._issued.issue(operation)

    def operation_ended(self, operation: SaveOperation, written: TileRecord | None, error: Exception | None) -> None:
        """Account for an operation of the save that has ended; `error` is None if it ended well."""
        save = self.under_way
        if save is None:  # the machine has broken since
            return
        item = save.flying.pop(operation.op)
        if isinstance(operation, CopyTile) and item is not None:
            if error is None and save.error is None:
                self._write(save, _Item(item.tile, 0, item.nbytes, item.step), operation.buffer)
                self._index.unhold(operation.tile, operation.record.location)
            else:
                save.copies.append(item)  # its slot is still held; `_end` lets it go
        elif isinstance(operation, SaveTile) and item is not None:
            if self._saved(save, operation, item, written, error):
                return
        elif isinstance(operation, Commit) and error is None:
            if save.request.sink is None:
                self.held_records[operation.number] = operation.records
            self._end(save, None)
        if error is not None:
            self.abort(error)

    def _saved(
        self, save: RunningSave, done: SaveTile, item: _Item, written: TileRecord | None, error: Exception | None
    ) -> bool:
        """Account for a write that has ended; return whether it failed and was issued again."""
        location, has_no_sink = done.record.location, save.request.sink is None
        if error is not None and has_no_sink:
            self._index.abandon_unwritable(location, is_full=isinstance(error, TierFullError))
        if error is not None and self.retry(done, error) is not None:
            new_location = self._claim(save, location.nbytes)
            if new_location is not None:
                record = TileRecord(new_location, done.record.step)
                self._issue_item(save, replace(done, op=self._issued.new_op(), record=record), item)
                return True
        if done.buffer is not None:
            save.buffers.append(done.buffer)
        if item.is_home:
            self._written(save, done.tile.subgroup, 1)
        if error is None:
            if has_no_sink and self._index.hold(location):
                save.reserve[location.nbytes] -= 1
            save.records[done.tile] = written or done.record
        return False

    def _written(self, save: RunningSave, subgroup: int, count: int) -> None:
        """Count off tiles of a subgroup that have been, or will not be, written; after the last its visit goes on."""
        save.unwritten[subgroup] -= count
        if not save.unwritten[subgroup]:
            del save.unwritten[subgroup]
            self._runs.enqueue_when_readable(subgroup)

    # Ends -------------------------------------------------------------------------------------------------------

    def abort(self, error: Exception) -> None:
        """Give the save up: nothing new is issued for it, and it ends when its operations in flight have."""
        save = self.under_way
        if save is None or save.error is not None:
            return
        save.error = error
        for subgroup, items in save.todo.items():
            self._written(save, subgroup, len(items))
        for unsaved in (save.todo, save.weights, save.flushing):
            unsaved.clear()

    def end_broken(self, error: Exception) -> None:
        """End the save at once: the machine has broken."""
        if self.under_way is not None:
            self._end(self.under_way, error)

    def _end(self, save: RunningSave, error: Exception | None) -> None:
        """End the save; if it failed, let go of all slots that it holds. Visits that wait for it go on."""
        self.under_way, self.finished_save = None, (save.request, error)
        if error is not None:
            if save.request.sink is None:
                for tile, record in save.records.items():
                    self._index.unhold(tile, record.location)
            for item in save.copies:
                if item.source is not None:
                    self._index.unhold(item.tile, item.source.location)
        self._index.unreserve(+save.reserve)
        for subgroup in save.unwritten:
            self._runs.enqueue_when_readable(subgroup)

    def release(self, number: int) -> None:
        """Let go of the slots of a finished save."""
        for tile, record in self.held_records.pop(number).items():
            self._index.unhold(tile, record.location)


def no_room(slot_counts: Mapping[int, int]) -> CheckpointError:
    """Return the error of a save for which the paths have too little room."""
    needed = sum((nbytes + SECTOR_BYTES) * count for nbytes, count in slot_counts.items())
    return CheckpointError(
        f"the paths have no room for a checkpoint beside the state in use: it needs {needed} bytes more "
        "on them; free space, raise max_bytes, lower checkpoints_kept, or add a path "
        "(`offload gc --dry-run PATH` says what ended sessions have left there)"
    )
