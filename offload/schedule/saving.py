"""Checkpoints within the machine: which tiles still have to be written, and which slots checkpoints hold. Pure.

A save takes the state as it is between two sweeps. Tiles on storage are held where they are, dirty staging slots are
flushed, and resident state is written to slots of its own. Sweeps go on meanwhile: a visit waits only if its subgroup
has not been written yet, and that subgroup is written first. A save with a *sink* copies everything into a store of
its own instead, and holds no slots in the end.

Invariants:
  * a save records a tile once the tile is whole on storage, and holds its slot from that moment on;
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
from offload.layout import PlacedTile
from offload.plan.budget import CHECKPOINT_BUFFERS, Home, Plan
from offload.protocols import SECTOR_BYTES, TileId
from offload.schedule.index import Location, TileIndex, TileRecord
from offload.schedule.issued import Issued
from offload.schedule.operations import Commit, CopyTile, Save, SaveOperation, SaveTile, Sync, WriteTile
from offload.schedule.runs import RunQueues

SAVE_DEPTH = CHECKPOINT_BUFFERS
"""Most operations of a save in flight at once; also the number of copy buffers."""


@dataclass(slots=True)
class _SaveItem:
    """A tile that has to be written."""

    tile: TileId
    offset: int  # in the subgroup's state, or in the image of its weights; in bytes
    nbytes: int  # of its payload
    version: int
    is_gathered: bool = False  # it has to be gathered into a copy buffer first
    is_home: bool = False  # it is state at home in memory, which no visit may change until it is written
    source: TileRecord | None = None  # the record to copy it from, if it is copied from storage into a sink


@dataclass(slots=True)
class RunningSave:
    """One save, from its begin to its end."""

    request: Save
    # Of tiles that are whole on storage, and whose slots are held; with a sink, of tiles in it, not held:
    records: dict[TileId, TileRecord] = field(default_factory=dict)
    reserve: Counter[int] = field(default_factory=Counter)  # slots reserved and not held yet, by payload bytes
    weights: deque[_SaveItem] = field(default_factory=deque)  # fp32 weights (masters) that are not issued yet
    # State at home in memory that is not issued yet, by subgroup:
    home_tiles: dict[int, deque[_SaveItem]] = field(default_factory=dict)
    unwritten: dict[int, int] = field(default_factory=dict)  # tiles of such a subgroup; its visit waits for them
    flushing: dict[int, None] = field(default_factory=dict)  # streamed subgroups whose flush has not ended
    copies: deque[_SaveItem] = field(default_factory=deque)  # to the sink; their slots are held until then
    urgent: deque[int] = field(default_factory=deque)  # subgroups that visits wait for; they are written first
    in_flight: dict[int, _SaveItem | None] = field(default_factory=dict)  # by operation; None: a sync or commit
    buffers: list[int] = field(default_factory=lambda: list(range(SAVE_DEPTH)))  # copy buffers that are free
    sink_end: int = 0  # bytes of the sink that are taken
    has_synced: bool = False  # syncs of its paths have been issued
    failed_writes: Counter[TileId] = field(default_factory=Counter)
    avoided_paths: set[int] = field(default_factory=set)  # to which the save does not write any more
    error: Exception | None = None  # why it has been given up

    def has_tiles_left(self) -> bool:
        """Return whether an operation or a flush has not ended, or a tile has not been issued."""
        return bool(self.in_flight or self.flushing or self.weights or self.home_tiles or self.copies)


class Saver:
    """The save under way, and what finished ones hold."""

    def __init__(self, index: TileIndex, issued: Issued, runs: RunQueues) -> None:
        self.under_way: RunningSave | None = None
        self.finished_save: tuple[Save, Exception | None] | None = None
        """The last save that finished, and its error (None if it succeeded); None once it is `OutcomeTold`."""
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
        in_flight = save.in_flight.values()  # an item that is gathered and is no state at home is of weights
        return bool(save.weights) or any(item and item.is_gathered and not item.is_home for item in in_flight)

    def must_wait(self, subgroup: int) -> bool:
        """Return whether a visit of resident state has to wait until the save has written it."""
        return self.under_way is not None and subgroup in self.under_way.unwritten

    def write_first(self, subgroup: int) -> None:
        """Write a subgroup before others: a visit waits for it."""
        if self.under_way is not None:
            self.under_way.urgent.append(subgroup)

    def count_failed_write(self, operation: SaveTile | WriteTile, error: Exception) -> Collection[int] | None:
        """Count a failed write of the save, and choose the paths to avoid from now on.

        After a tile's first failed write its path is avoided only if it was full; after the second one in any case.

        Returns:
            If the tile is to be written again, to another slot: the paths to avoid. None if it is not: the save is
            over or given up, the error is no tier's, or the sink has failed twice for this tile.
        """
        save = self.under_way
        if save is None or save.error is not None or not isinstance(error, TierError):
            return None
        save.failed_writes[operation.tile] += 1
        is_first_failure = save.failed_writes[operation.tile] == 1
        if not is_first_failure or isinstance(error, TierFullError):
            save.avoided_paths.add(operation.record.location.path)
        # A flush goes to the paths, of which there may be others; a sink is one place.
        has_other_paths = isinstance(operation, WriteTile) or save.request.sink is None
        return save.avoided_paths if has_other_paths or is_first_failure else None

    # The course of a save ---------------------------------------------------------------------------------------

    def begin(self, request: Save, plan: Plan, unsaved: Mapping[int, None], versions: Sequence[int]) -> bool:
        """Start a save: list the tiles to write, reserve slots for them, and hold tiles that are on storage already.

        Args:
            request: The save.
            plan: Homes of all subgroups; none is fresh.
            unsaved: Streamed subgroups whose newest version is not whole on storage. They are flushed, now or
                already; `hold_flushed` reports the end.
            versions: Step of each subgroup's last change.

        Returns:
            Whether it has started; if not, `finished_save` says why.
        """
        invariant(self.under_way is None, "a save begins while another is under way")
        save = RunningSave(request)
        whole: list[tuple[TileId, TileRecord]] = []  # tiles that are on storage already
        for subgroup in () if request.empty else plan.layout.subgroups:
            number, version = subgroup.index, versions[subgroup.index]
            # Whether an `Evict` has moved state at home in memory to storage; its tiles move together, so one tells.
            is_evicted = self._index.get(subgroup.tiles[0][0]) is not None
            if plan.is_resident(number) and not is_evicted:
                is_on_gpu = plan.homes[number] is not Home.HOST
                items = self._unheld_items(save, whole, subgroup.tiles, version, is_gathered=is_on_gpu, is_home=True)
                if items:
                    save.home_tiles[number] = deque(items)
                    save.unwritten[number] = len(items)
            elif number in unsaved:  # its flush makes it whole on storage
                save.flushing[number] = None
                save.reserve.update(nbytes for _, _, nbytes in subgroup.tiles)
            else:  # it is whole on storage
                for tile, _, nbytes in subgroup.tiles:
                    record = known(self._index.get(tile), f"{tile} is clean and was never written")
                    whole.append((tile, record))
                    save.reserve[nbytes] += not self._index.is_held(record.location)  # reserved for a first hold
            save.weights += self._unheld_items(save, whole, subgroup.weight_tiles, version, is_gathered=True)
        save.reserve = +save.reserve  # without zeros
        if not self._index.reserve(save.reserve):
            self.finished_save = request, no_room(save.reserve)
            return False
        self.under_way = save
        for tile, record in whole:
            self._hold_tile(save, tile, record)
        return True

    def _unheld_items(
        self,
        save: RunningSave,
        whole: list[tuple[TileId, TileRecord]],
        tiles: Iterable[tuple[TileId, int, int]],
        version: int,
        *,
        is_gathered: bool,
        is_home: bool = False,
    ) -> list[_SaveItem]:
        """Return items for the tiles that no checkpoint holds in this version, and that the save has to write.

        They are counted in `save.reserve`. Tiles that a checkpoint holds in this version are added to `whole`, each
        with the record by which it is held.
        """
        items = []
        for tile, offset, nbytes in tiles:
            record = self._held_record(tile, version)
            if record is not None:
                whole.append((tile, record))
                continue
            items.append(_SaveItem(tile, offset, nbytes, version, is_gathered=is_gathered, is_home=is_home))
            save.reserve[nbytes] += save.request.sink is None  # a sink takes no room on the paths
        return items

    def _hold_tile(self, save: RunningSave, tile: TileId, record: TileRecord) -> None:
        """Hold a tile that is whole on storage; with a sink, only until it has been copied there."""
        if self._index.hold(record.location):  # the first hold of a slot uses up a reserved one
            save.reserve[record.location.nbytes] -= 1
        if save.request.sink is not None:
            nbytes = record.location.nbytes
            save.copies.append(_SaveItem(tile, offset=0, nbytes=nbytes, version=record.step, source=record))
        else:
            save.records[tile] = record

    def _held_record(self, tile: TileId, version: int) -> TileRecord | None:
        """Return the record with which a checkpoint holds this version of a tile; None if no checkpoint does."""
        newest_first = reversed(self.held_records.values())
        records_of_tile = (records.get(tile) for records in newest_first)
        return next((record for record in records_of_tile if record is not None and record.step == version), None)

    def held_version(self, tiles: Iterable[PlacedTile], version: int | None) -> Mapping[TileId, TileRecord]:
        """Return the records with which checkpoints hold a version of a subgroup's tiles; {} unless all are held."""
        records: dict[TileId, TileRecord] = {}
        if version is None:  # the subgroup is fresh
            return records
        for tile, _, _ in tiles:
            record = self._held_record(tile, version)
            if record is None:
                return {}
            records[tile] = record
        return records

    def hold_flushed(self, records: Iterable[tuple[TileId, TileRecord]], subgroup: int) -> None:
        """Hold the tiles of a subgroup that has been flushed, if the save waits for them."""
        save = self.under_way
        if save is not None and subgroup in save.flushing:
            del save.flushing[subgroup]
            for tile, record in records:
                self._hold_tile(save, tile, record)

    def advance(self) -> None:
        """Issue the operations of the save that are possible now: its tiles, then syncs of paths, then the commit.

        Each kind waits until the one before has ended. A save that was given up issues nothing, and ends when its
        operations in flight have.
        """
        save = self.under_way
        if save is None:
            return
        for item in self._take_next_items(save):
            if item.source is not None:
                copy = CopyTile(self._issued.new_op(), item.tile, item.source, save.buffers.pop())
                self._issue_item(save, copy, item)
            else:
                self._write_item(save, item, save.buffers.pop() if item.is_gathered else None)
        if save.error is not None:
            if not save.in_flight:
                self._end(save, save.error)
            return
        if save.has_tiles_left():
            return
        if not save.has_synced:
            save.has_synced = True
            for path in sorted({record.location.path for record in save.records.values()}):
                self._issue_item(save, Sync(self._issued.new_op(), path))
        if not save.in_flight:
            self._issue_item(save, Commit(self._issued.new_op(), save.request.number, save.records))

    def _take_next_items(self, save: RunningSave) -> Iterator[_SaveItem]:
        """Yield the tiles to write or copy now: fp32 weights, then state (urgent first), then copies for a sink.

        The caller issues each one before it asks for the next: issuing may use a copy buffer, or give the save up.
        """
        while len(save.in_flight) < SAVE_DEPTH and save.error is None:
            if save.weights and save.buffers:
                yield save.weights.popleft()
            elif save.home_tiles:
                while save.urgent and save.urgent[0] not in save.home_tiles:  # all of its tiles have been issued
                    save.urgent.popleft()
                subgroup = save.urgent[0] if save.urgent else next(iter(save.home_tiles))
                tiles = save.home_tiles[subgroup]
                if tiles[0].is_gathered and not save.buffers:  # it is on a GPU, and no copy buffer is free
                    return
                item = tiles.popleft()
                if not tiles:
                    del save.home_tiles[subgroup]
                yield item
            elif save.copies and save.buffers:
                yield save.copies.popleft()
            else:
                return

    def _write_item(self, save: RunningSave, item: _SaveItem, buffer: int | None) -> None:
        """Issue the write of a tile from a copy buffer, or from its home (None); without room give the save up."""
        location = self._claim(save, item.nbytes)
        if location is None:
            detail = f"no path has room left for {item.tile}"
            self.abort(TierFullError("write", tier="storage", path="(all)", detail=detail))
            return
        record = TileRecord(location, item.version)
        op = self._issued.new_op()
        self._issue_item(save, SaveTile(op, item.tile, record, item.offset, buffer, gathers=item.is_gathered), item)

    def _claim(self, save: RunningSave, nbytes: int) -> Location | None:
        """Claim a slot on a path that is not avoided, or the next bytes of the sink; None if no path has room."""
        if save.request.sink is None:
            return self._index.claim(nbytes, save.avoided_paths)
        location = Location(save.request.sink, save.sink_end, nbytes)
        save.sink_end += nbytes + SECTOR_BYTES  # with the slot's header
        return location

    def _issue_item(self, save: RunningSave, operation: SaveOperation, item: _SaveItem | None = None) -> None:
        """Issue an operation of the save, and note the tile that it moves."""
        save.in_flight[operation.op] = item
        self._issued.issue(operation)

    def operation_ended(self, operation: SaveOperation, written: TileRecord | None, error: Exception | None) -> None:
        """Account for an operation of the save that has ended; `error` is None if it ended well.

        A failed write is tried again if it can be. Any other failure gives the save up. For a sync that ended well
        there is nothing else to do.
        """
        save = self.under_way
        if save is None:  # the machine has broken since
            return
        item = save.in_flight.pop(operation.op)
        if isinstance(operation, CopyTile) and item is not None:
            self._end_copy(save, operation, item, error)
        elif isinstance(operation, SaveTile) and item is not None:
            if error is not None and self._retry_write(save, operation, item, error):
                return
            self._end_write(save, operation, item, written, error)
        elif isinstance(operation, Commit) and error is None:
            if save.request.sink is None:
                self.held_records[operation.number] = operation.records
            self._end(save, error=None)
        if error is not None:
            self.abort(error)

    def _end_copy(self, save: RunningSave, copy: CopyTile, item: _SaveItem, error: Exception | None) -> None:
        """Write a tile that has been read into a copy buffer to the sink, unless the save is given up."""
        if error is None and save.error is None:
            # From its copy buffer, where it has been read to: the offset does not count.
            write_to_sink = _SaveItem(item.tile, offset=0, nbytes=item.nbytes, version=item.version)
            self._write_item(save, write_to_sink, copy.buffer)
            self._index.unhold(copy.tile, copy.record.location)  # it has been read
        else:
            save.copies.append(item)  # its slot is still held; `_end` lets it go

    def _retry_write(self, save: RunningSave, failed: SaveTile, item: _SaveItem, error: Exception) -> bool:
        """Give up the slot of a failed write, and write the tile to another one; return False if that cannot be."""
        location = failed.record.location
        if save.request.sink is None:  # else it is no slot of the index
            self._index.abandon_unwritable(location, is_full=isinstance(error, TierFullError))
        if self.count_failed_write(failed, error) is None:  # it must not be tried again
            return False
        new_location = self._claim(save, location.nbytes)  # on no avoided path; with a sink, further on in the sink
        if new_location is None:
            return False
        record = TileRecord(new_location, failed.record.step)
        self._issue_item(save, replace(failed, op=self._issued.new_op(), record=record), item)
        return True

    def _end_write(
        self, save: RunningSave, done: SaveTile, item: _SaveItem, written: TileRecord | None, error: Exception | None
    ) -> None:
        """Account for a write that has ended for good: well, or with an error after which it is not tried again.

        Its copy buffer is free again. A tile that was written is held and recorded.
        """
        if done.buffer is not None:
            save.buffers.append(done.buffer)
        if item.is_home:
            self._count_off_tiles(save, done.tile.subgroup, count=1)
        if error is not None:
            return
        location = done.record.location
        # With a sink, the slot is none of the index. Else it is held, and its first hold uses up a reserved slot.
        if save.request.sink is None and self._index.hold(location):
            save.reserve[location.nbytes] -= 1
        save.records[done.tile] = written or done.record

    def _count_off_tiles(self, save: RunningSave, subgroup: int, count: int) -> None:
        """Count off tiles of a subgroup that were written, or will not be; after the last one its visit goes on."""
        save.unwritten[subgroup] -= count
        if not save.unwritten[subgroup]:
            del save.unwritten[subgroup]
            self._runs.enqueue_when_readable(subgroup)

    # Ends -------------------------------------------------------------------------------------------------------

    def abort(self, error: Exception) -> None:
        """Give the save up: nothing new is issued for it, and it ends when its operations in flight have.

        Visits that wait for tiles not yet issued go on. `copies` stay listed: `_end` unholds their slots.
        """
        save = self.under_way
        if save is None or save.error is not None:
            return
        save.error = error
        for subgroup, items in save.home_tiles.items():
            self._count_off_tiles(save, subgroup, len(items))
        save.home_tiles.clear()
        save.weights.clear()
        save.flushing.clear()

    def end_broken(self, error: Exception) -> None:
        """End the save at once: the machine has broken."""
        if self.under_way is not None:
            self._end(self.under_way, error)

    def _end(self, save: RunningSave, error: Exception | None) -> None:
        """End the save; if it failed, unhold all slots that it holds. Visits that wait for it go on."""
        self.under_way = None
        self.finished_save = save.request, error
        if error is not None:
            self._unhold_all(save)
        self._index.unreserve(+save.reserve)  # `+`: without zeros
        for subgroup in save.unwritten:
            self._runs.enqueue_when_readable(subgroup)

    def _unhold_all(self, save: RunningSave) -> None:
        """Unhold all slots that a failed save holds: of recorded tiles (not those in a sink), and of `copies`."""
        if save.request.sink is None:
            for tile, record in save.records.items():
                self._index.unhold(tile, record.location)
        for item in save.copies:
            if item.source is not None:  # for type checkers: every copy has one
                self._index.unhold(item.tile, item.source.location)

    def release(self, number: int) -> None:
        """Unhold the slots of a finished save."""
        for tile, record in self.held_records.pop(number).items():
            self._index.unhold(tile, record.location)


def no_room(slot_counts: Mapping[int, int] | None = None) -> CheckpointError:
    """Return the error of a save for which the paths have too little room.

    Args:
        slot_counts: The slots that the save needs, by payload bytes; None where it is those of steps, which the plan
            has counted, that cannot be made: others have taken the space since.
    """
    need = "steps beside it need slots that cannot be made"
    if slot_counts is not None:
        needed_bytes = sum((nbytes + SECTOR_BYTES) * count for nbytes, count in slot_counts.items())
        need = f"it needs {needed_bytes} bytes more"
    return CheckpointError(
        f"the paths have no room for a checkpoint beside the state in use: {need} on them; free space, "
        "raise max_bytes, lower checkpoints_kept (a Trainer's save_total_limit), or add a path "
        "(`offload gc --dry-run PATH` says what ended sessions have left there)"
    )
