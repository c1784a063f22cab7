"""What the checker keeps account of: storage, devices and saves, each in a book. `checker.py` has the rules.

A book takes in what it is told and verifies that it may be; it decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from offload.errors import InternalError, known
from offload.plan.budget import Plan, ScratchBuffers
from offload.protocols import SECTOR_BYTES, ScratchKind, ScratchOwner, TileId
from offload.schedule.index import Location, TileRecord
from offload.schedule.operations import (
    AwaitPush,
    Commit,
    CopyTile,
    Event,
    Evict,
    Operation,
    ReadTile,
    RunVisit,
    Save,
    SaveTile,
    Sync,
    TakeOver,
    Transfer,
    Visit,
    WriteTile,
)

STORY_LENGTH = 60
"""Operations and events that a violation tells of."""


@dataclass(slots=True)
class Beside:
    """A version beside the live one, which was neither confirmed nor revoked.

    Attributes:
        step: Under which it is written.
        held: Its tiles that lie in its subgroup's staging slot.
        arrived: Its tiles that are on storage.
        writes: Writes in flight, by tile.
    """

    step: int
    held: set[TileId]
    arrived: dict[TileId, TileRecord] = field(default_factory=dict)
    writes: dict[TileId, int] = field(default_factory=dict)


@dataclass(slots=True)
class KnownSubgroup:
    """What is known of one subgroup.

    Attributes:
        version: How often visits have changed it; 0 while fresh.
        step: Step of its last change.
        slot: Its staging slot.
        held: Tiles of the newest version that lie in that slot.
        stored_version: The version that is whole on storage; `stored` says where its tiles lie.
        arriving: Tiles of the newest version that are on storage while not all are.
        gpu_slot: Its staging slot on the GPU.
        gpu_holds: Whether that slot holds the newest state, whole.
        gpu_ahead: Whether only that slot does.
        copy: The copy in flight between the GPU and host memory.
        away: Whether the memory of its home has been given back, and does not hold its state again.
        beside: The version beside the live one.
    """

    version: int = 0
    step: int = 0
    slot: int | None = None
    held: set[TileId] = field(default_factory=set)
    stored_version: int = 0
    stored: dict[TileId, TileRecord] = field(default_factory=dict)
    arriving: dict[TileId, TileRecord] = field(default_factory=dict)
    reads: dict[TileId, int] = field(default_factory=dict)
    writes: dict[TileId, int] = field(default_factory=dict)
    run: int | None = None
    gpu_slot: int | None = None
    gpu_holds: bool = False
    gpu_ahead: bool = False
    copy: int | None = None
    away: bool = False
    beside: Beside | None = None

    @property
    def busy(self) -> bool:
        """Whether a visit or a copy works on its memory."""
        return self.run is not None or self.gpu_slot is not None


@dataclass(slots=True)
class WeightSlot:
    """A weight slot in use.

    Attributes:
        subgroup: Whose it is.
        stage: "fetching", "fetched", "running", "made", "pushing", "pushed", "leaving", in this order.
    """

    subgroup: int
    stage: str


@dataclass(slots=True)
class SaveUnderWay:
    """A save under way.

    Attributes:
        sink: The path number of the store that takes copies, or None.
        versions: Version of each subgroup at the begin.
        steps: Step of each subgroup's last change by then.
        unwritten: For each subgroup, the tiles that have to be written from memory that a visit would change.
        flushes: Subgroups that have to be flushed.
        named: Where tiles lie that are whole on storage (with a sink: in the sink).
        copied: Where tiles lie that have to be copied into the sink.
        read: Tiles of `copied` that have been read.
        dirty: Paths that have not been synced since the last write to them.
        syncing: Syncs in flight and their paths.
        unlanded: Writes in flight, by path.
        again: Tiles whose write has failed and was not issued again yet.
        is_troubled: Whether a write of it has failed: other paths may have no room for what is left.
        failed: Whether an operation of it has failed, for good.
    """

    save: Save
    versions: list[int]
    steps: list[int]
    unwritten: list[set[TileId]]
    flushes: dict[int, None]
    named: dict[TileId, TileRecord] = field(default_factory=dict)
    copied: dict[TileId, TileRecord] = field(default_factory=dict)
    read: dict[TileId, None] = field(default_factory=dict)
    dirty: set[int] = field(default_factory=set)
    syncing: dict[int, int] = field(default_factory=dict)
    unlanded: dict[int, int] = field(default_factory=dict)
    again: dict[TileId, None] = field(default_factory=dict)
    is_troubled: bool = False
    failed: bool = False


class Extents:
    """Byte ranges in use on one path, none overlapping."""

    __slots__ = ("allocated", "end", "failed", "lent", "limit", "starts", "stops", "there", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.starts: list[int] = []
        self.stops: dict[int, int] = {}
        self.used = 0
        self.end = 0
        self.failed = False
        self.allocated = self.there = 0  # first bytes that were set aside for steps; those whose room is there
        self.lent: dict[int, int] = {}  # payload bytes of slots that are lent, by where they start

    def overlaps(self, start: int, stop: int) -> bool:
        position = bisect_left(self.starts, stop)
        return position > 0 and self.stops[self.starts[position - 1]] > start

    def take(self, start: int, stop: int) -> None:
        insort(self.starts, start)
        self.stops[start] = stop
        self.used += stop - start
        self.end = max(self.end, stop)

    def leave(self, start: int) -> None:
        self.starts.pop(bisect_left(self.starts, start))
        self.used -= self.stops.pop(start) - start
        self.lent.pop(start, None)


class Ground:
    """What all books stand on: the plan, what is known of each subgroup, and the story that a violation tells."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.subgroups: list[KnownSubgroup] = []
        self.places: list[dict[TileId, tuple[int, int]]] = []
        """Of each subgroup: where its tiles lie in its state, and how long they are."""
        self.story: deque[str | Operation | Event] = deque(maxlen=STORY_LENGTH)
        self.adopt(plan)

    def adopt(self, plan: Plan) -> None:
        """Go on with a plan that has more subgroups."""
        self.plan = plan
        for subgroup in plan.layout.subgroups[len(self.subgroups) :]:
            self.places.append({tile: (offset, nbytes) for tile, offset, nbytes in subgroup.tiles})
            self.subgroups.append(KnownSubgroup())

    def require(self, condition: object, rule: str) -> None:
        """Verify what a rule says.

        Raises:
            InternalError: If it does not hold; notes tell the story.
        """
        if not condition:
            raise self.violation(rule)

    def violation(self, rule: str) -> InternalError:
        """Return the error that says that a rule is broken."""
        error = InternalError(f"rule {rule} (this is a bug in offload, please report it)")
        error.add_note("last operations and events:\n  " + "\n  ".join(f"{what!r:.300}" for what in self.story))
        return error


class StorageBook:
    """Which bytes of the paths are in use, and by what.

    Attributes:
        extents: Bytes in use, by path.
        holds: How many checkpoints name each place.
        orphans: Places that are held, and no longer of a newest whole version.
        saving_bytes: What saves may take.
        lost_bytes: Of slots that a write has failed to fill, and that nobody uses again.
        refused_bytes: Of those whose path was full: others have to take as much.
        is_full: Whether that is why the write failed that is spoken of.
        most_away_bytes: Most that state at home in memory that has ever left may take.
        most_activation_bytes: Most that activations have taken at once.
        reshared: Whether tiles have been spread in other proportions.
        most_beside: Most slots that versions beside the live ones of one sweep may take, by payload bytes.
    """

    def __init__(self, ground: Ground) -> None:
        self.ground, self._require = ground, ground.require
        self.extents = [Extents(path.available_bytes) for path in ground.plan.budgets.paths]
        self.holds: dict[Location, int] = {}
        self.orphans: dict[Location, None] = {}
        self.saving_bytes = self.lost_bytes = self.refused_bytes = 0
        self.is_full = False
        self.most_away_bytes = 0
        self.most_activation_bytes = 0
        self.reshared = False
        self.most_beside: Counter[int] = Counter()
        self.grown: set[Location] = set()
        """Slots beyond what was allocated."""
        self.counts_lent = True
        """Whether it is known how many slots a step may need, and how many there are."""

    def allocated(self, ends: Sequence[int]) -> None:
        """Take in that the room of each path's first bytes is there."""
        for path, nbytes in zip(self.extents, ends, strict=True):
            self.counts_lent &= not path.there  # else slots beyond what was allocated before are in it
            path.allocated, path.there = nbytes, max(path.there, nbytes)

    def written(self, location: Location) -> None:
        """Take in that a write has ended well: its room is there."""
        if location.path == len(self.extents):  # the store that takes copies
            return
        path = self.extents[location.path]
        path.there = max(path.there, location.offset + SECTOR_BYTES + location.nbytes)

    def fail(self, location: Location) -> None:
        """Take in that a write has failed, so that its path is given up, or is only full beyond what is there."""
        path = self.extents[location.path]
        self.grown.discard(location)
        if self.is_full and location.offset + SECTOR_BYTES + location.nbytes > path.there:
            self.refused_bytes += location.nbytes + SECTOR_BYTES
        else:
            path.failed = True

    def take(self, location: Location, *, lent: bool = False) -> None:
        """Verify that a write may go to these bytes, and take them; `lent` if a step can do without."""
        extents = self.extents[location.path]
        start, stop = location.offset, location.offset + SECTOR_BYTES + location.nbytes
        self._require(start >= 0 and start % SECTOR_BYTES == 0, "7: a slot that is not aligned")
        self._require(stop <= extents.limit, "7: a write beyond its path's limit")
        self._require(not extents.failed, "7: a write to a path that has failed a write")
        self._require(not extents.overlaps(start, stop), "7: a write over bytes that are in use")
        extents.take(start, stop)
        if stop > extents.allocated:
            self.grown.add(location)
        if lent:
            extents.lent[start] = location.nbytes
            sizes = [nbytes for path in self.extents for nbytes in path.lent.values()]
            grown = sum(each.nbytes == location.nbytes for each in self.grown)
            counts = self.counts_lent and not (
                self.saving_bytes or self.most_away_bytes or any(path.failed for path in self.extents)
            )
            enough = not counts or grown >= sizes.count(location.nbytes)
            self._require(enough, "31: a slot that a step may need is lent")
        bytes_used = sum(path.used if path.failed or self.reshared else path.end for path in self.extents)
        beside = sum((nbytes + SECTOR_BYTES) * count for nbytes, count in self.most_beside.items())
        most = self.ground.plan.storage_bytes + self.saving_bytes + self.lost_bytes + beside + self.most_away_bytes
        most += self.most_activation_bytes + self.refused_bytes
        if bytes_used > most:
            # What lies on a path that has failed cannot be moved; elsewhere the plan's bound still holds.
            bytes_used = sum(path.used for path in self.extents)
            some_failed = any(path.failed for path in self.extents)
            self._require(some_failed and bytes_used <= most, "8: more storage than planned")

    def leave(self, records: dict[TileId, TileRecord]) -> None:
        """Free the bytes of a version, but for those that checkpoints hold."""
        for record in records.values():
            if record.location in self.holds:
                self.orphans[record.location] = None
                continue
            self.extents[record.location.path].leave(record.location.offset)

    def lose(self, location: Location) -> None:
        """Give up bytes that a write has failed to fill."""
        self.extents[location.path].leave(location.offset)
        self.give_up(location)
        path = self.extents[location.path]
        if not self.is_full or location.offset + SECTOR_BYTES + location.nbytes > path.there:
            self.counts_lent &= location in self.grown
            self.grown.discard(location)

    def give_up(self, location: Location) -> None:
        """Take in that bytes are not used again, or not before there is room on their path."""
        nbytes = location.nbytes + SECTOR_BYTES
        self.refused_bytes += nbytes * self.is_full
        self.lost_bytes += nbytes * (not self.is_full)

    def hold(self, location: Location) -> None:
        """Have a checkpoint name a place."""
        self.holds[location] = self.holds.get(location, 0) + 1

    def unhold(self, location: Location) -> None:
        """Take in that a checkpoint names a place no more."""
        self.holds[location] -= 1
        if not self.holds[location]:
            del self.holds[location]
            if self.orphans.pop(location, location) is None:
                self.extents[location.path].leave(location.offset)


class DeviceBook:
    """Staging slots on the GPU, and weight slots."""

    def __init__(self, ground: Ground) -> None:
        self.ground, self._require = ground, ground.require
        self.gpu_owners: list[int | None] = []
        self.lent_slots = 0
        self.weight_slots: dict[int, WeightSlot] = {}

    def issued_weights(self, operation: Transfer | AwaitPush, visit: Visit | None) -> None:
        """Verify a transfer of weights, of which the visit has perhaps not run."""
        number = operation.subgroup
        match operation:
            case Transfer(way="fetch"):
                due = visit is not None and visit.fetches and visit.weight_bytes == operation.nbytes
                self._require(due, "11: a fetch of weights that is not due")
                self.take_weight_slot(operation, "fetching")
            case Transfer():
                due = self.ground.plan.layout.subgroups[number].weight_bytes == operation.nbytes
                self._require(due, "11: a push of other weights")
                self.next_stage(operation, "made", "pushing", "11: a push of weights that is not due")
            case AwaitPush():
                self.next_stage(operation, "pushed", "leaving", "11: a wait for a push that has not been")

    def take_weight_slot(self, operation: Transfer | RunVisit, stage: str) -> None:
        """Verify that a weight slot is free, and take it."""
        slot, number = weight_slot_of(operation), subgroup_of(operation)
        self._require(
            slot is not None and 0 <= slot < self.ground.plan.weight_slots, "11: there is no such weight slot"
        )
        self._require(slot not in self.weight_slots, "11: a weight slot that is in use")
        if slot is not None:
            self.weight_slots[slot] = WeightSlot(number, stage)

    def next_stage(self, operation: Transfer | AwaitPush | RunVisit, before: str, after: str, rule: str) -> None:
        """Verify that a weight slot is a subgroup's and at a stage, and bring it to another."""
        number = weight_slot_of(operation)
        slot = None if number is None else self.weight_slots.get(number)
        known = slot is not None and slot.subgroup == subgroup_of(operation) and slot.stage == before
        self._require(known, rule)
        if slot is not None:
            slot.stage = after

    def done_weights(self, operation: Transfer | AwaitPush) -> None:
        """Take in that a transfer of weights has ended."""
        match operation:
            case Transfer(way="fetch", transfer_slot=slot):
                self.weight_slots[slot].stage = "fetched"
            case Transfer(transfer_slot=slot):
                self.weight_slots[slot].stage = "pushed"
            case AwaitPush(transfer_slot=slot):
                del self.weight_slots[slot]

    def issued_copy(self, copy: Transfer) -> None:
        """Verify a copy of state."""
        subgroup = self.ground.subgroups[copy.subgroup]
        resident = self.ground.plan.is_resident(copy.subgroup)
        self._require(not self.ground.plan.at_home_on_gpu(copy.subgroup), "10: a copy of state at home on the GPU")
        self._require(subgroup.run is None and subgroup.copy is None, "10: a copy amid a visit or another copy")
        self._require(not subgroup.reads and not subgroup.writes, "10: a copy amid transfers")
        self._require(copy.slot == (None if resident else subgroup.slot), "10: a copy from or to another's memory")
        self._require(resident or copy.slot is not None, "10: a copy from or to no memory")
        if copy.way == "fetch":
            self._require(subgroup.version > 0, "10: a copy of state that was never changed")
            whole = resident or len(subgroup.held) == len(self.ground.places[copy.subgroup])
            self._require(whole, "10: a copy before all of the newest state is there")
            self._require(subgroup.gpu_slot is None, "10: a second copy to the GPU")
            self.take_gpu_slot(copy.subgroup, copy.transfer_slot)
        else:
            self._require(subgroup.gpu_slot == copy.transfer_slot, "10: a copy out of another's GPU slot")
            self._require(subgroup.gpu_ahead, "10: a copy back of what has not changed")
        subgroup.copy = copy.op

    def take_gpu_slot(self, number: int, gpu_slot: int) -> None:
        """Verify that a GPU staging slot is free, and take it."""
        self._require(0 <= gpu_slot < self.lent_slots, "10: there is no such GPU slot")
        self._require(self.gpu_owners[gpu_slot] is None, "10: a GPU slot that is in use")
        self.gpu_owners[gpu_slot] = number
        self.ground.subgroups[number].gpu_slot = gpu_slot

    def leave_gpu(self, number: int) -> None:
        """Take in that a subgroup's state is not on the GPU any more."""
        subgroup = self.ground.subgroups[number]
        if subgroup.gpu_slot is not None:
            self.gpu_owners[subgroup.gpu_slot] = None
        subgroup.gpu_slot, subgroup.gpu_holds, subgroup.gpu_ahead = None, False, False


class SaveBook:
    """The save under way, and what finished ones name.

    Attributes:
        now: The save under way.
        kept: Version and place of each tile, by finished save.
        for_save: Subgroups that are flushed for a save only.
        given_up: Subgroups whose flush has failed, for a save that needed it.
    """

    def __init__(self, ground: Ground, storage: StorageBook) -> None:
        self.ground, self.storage, self._require = ground, storage, ground.require
        self.now: SaveUnderWay | None = None
        self.kept: dict[int, dict[TileId, tuple[int, TileRecord]]] = {}
        self.for_save: dict[int, None] = {}
        self.given_up: dict[int, None] = {}

    def waits_for(self, number: int) -> bool:
        """Return whether a save under way has still to write a subgroup's state."""
        return self.now is not None and bool(self.now.unwritten[number] or number in self.now.flushes)

    def flushed(self, number: int) -> None:
        """Take in that the newest version of a subgroup is whole on storage."""
        self.for_save.pop(number, None)
        if self.now is not None and number in self.now.flushes:
            del self.now.flushes[number]
            for written, stored in self.ground.subgroups[number].stored.items():
                self.name(self.now, written, stored)

    def take_over(self, event: TakeOver) -> None:
        """Take in what checkpoints hold in stores that an earlier session has written."""
        for number, records in event.held_records.items():
            self.kept[number] = {}
            for tile, record in records.items():
                newest = event.records.get(TileId(tile.subgroup, 0, 0))
                same = newest is not None and newest.step == record.step
                version = self.ground.subgroups[tile.subgroup].version + 1 if same else -2
                self.kept[number][tile] = version, record
                location = record.location
                if location not in self.storage.holds:
                    extents = self.storage.extents[location.path]
                    start, stop = location.offset, location.offset + SECTOR_BYTES + location.nbytes
                    self._require(not extents.overlaps(start, stop), "16: two tiles in one place are taken up")
                    extents.take(start, stop)
                    self.storage.orphans[location] = None
                self.storage.hold(location)

    def release(self, number: int) -> None:
        """Take in that what a finished save names goes."""
        for _, record in self.kept.pop(number).values():
            self.storage.unhold(record.location)

    def saved(self) -> dict[int, dict[TileId, TileRecord]]:
        """Return what each finished save that was not released names."""
        return {number: {tile: record for tile, (_, record) in named.items()} for number, named in self.kept.items()}

    def ended(self, *, well: bool) -> None:
        """Verify how the save that was begun last has ended, by what the engine says.

        Raises:
            InternalError: If it is said to have been committed and was not, or the other way round.
        """
        self.settle_again()
        save, self.now = self.now, None
        if save is None:  # it was committed
            self._require(well, "14: a committed save is said to have failed")
            return
        self._require(not well, "14: a save is said to be committed and was not")
        named = [record for record in save.named.values() if record.location.path < len(self.storage.extents)]
        unread = [record for tile, record in save.copied.items() if tile not in save.read]
        for record in named + unread:
            self.storage.unhold(record.location)
        for number in list(self.for_save):  # it was refused, so nothing is flushed for it
            if not self.ground.subgroups[number].writes and not self.ground.subgroups[number].arriving:
                del self.for_save[number]

    def begin(self, save: Save, *, amid_a_sweep: bool) -> None:
        """Take in that a save begins, of the state as it is."""
        self._require(self.now is None, "12: a save begins while another is under way")
        self._require(not amid_a_sweep, "12: a save begins during a sweep")
        busy = any(subgroup.busy for subgroup in self.ground.subgroups)
        self._require(not busy, "12: a save begins during a visit")
        found = SaveUnderWay(
            save,
            [subgroup.version for subgroup in self.ground.subgroups],
            [subgroup.step for subgroup in self.ground.subgroups],
            [set() for _ in self.ground.subgroups],
            {},
        )
        self.now = found
        known = {tile: known for named in self.kept.values() for tile, known in named.items()}
        for number, subgroup in enumerate(self.ground.subgroups):
            layout = self.ground.plan.layout.subgroups[number]
            is_home = self.ground.plan.is_resident(number) and not subgroup.away
            home = layout.tiles if is_home else ()
            for tile, _, _ in (*home, *layout.weight_tiles):
                version, record = known.get(tile, (-1, None))
                if record is not None and version == subgroup.version:
                    self.name(found, tile, record)
                else:
                    found.unwritten[number].add(tile)
            if is_home:
                continue
            if subgroup.stored_version == subgroup.version:
                for tile, record in subgroup.stored.items():
                    self.name(found, tile, record)
            else:
                found.flushes[number] = None
                if not (subgroup.writes or subgroup.arriving):
                    self.for_save[number] = None
        tiles = [t for s in self.ground.plan.layout.subgroups for t in (*s.tiles, *s.weight_tiles)]
        whole = sum(nbytes + SECTOR_BYTES for _, _, nbytes in tiles)
        self.storage.saving_bytes = max(self.storage.saving_bytes, (len(self.kept) + 1) * whole)

    def name(self, save: SaveUnderWay, tile: TileId, record: TileRecord) -> None:
        """Take note that a tile of the save is whole on storage; with a sink it has still to be copied."""
        self.storage.hold(record.location)
        if save.save.sink is None:
            save.named[tile] = record
            save.dirty.add(record.location.path)
        else:
            save.copied[tile] = record

    def issued(self, operation: SaveTile | CopyTile | Sync | Commit) -> None:
        """Verify an operation of a save."""
        save = self.now
        if save is None or save.failed:
            raise self.ground.violation("12: an operation of a save that is not under way, or has failed")
        match operation:
            case CopyTile(tile=tile, record=record):
                self._require(save.copied.get(tile) == record, "13: a copy from a wrong place or version")
                self._require(save.save.sink is not None, "13: a copy to nowhere")
            case SaveTile(tile=tile, record=record):
                save.again.pop(tile, None)
                self._issued_tile(save, operation)
                path = record.location.path
                save.unlanded[path] = save.unlanded.get(path, 0) + 1
            case Sync(path=path):
                self._require(not save.unlanded.get(path), "14: a sync before the writes to its path have ended")
                save.dirty.discard(path)
                save.syncing[operation.op] = path
            case Commit(number=number, records=records):
                self._require(number == save.save.number, "14: a commit of another save")
                tiles = [t for s in self.ground.plan.layout.subgroups for t, _, _ in (*s.tiles, *s.weight_tiles)]
                self._require(sorted(tiles) == sorted(records), "14: a commit that does not name every tile")
                self._require(records == save.named, "14: a commit that names a tile where it does not lie")
                synced = not save.dirty and not save.syncing
                self._require(synced, "14: a commit before all paths have been synced")
                for tile, record in records.items():
                    right = record.step == save.steps[tile.subgroup]
                    self._require(right, "14: a commit that names a tile in another version")

    def _issued_tile(self, save: SaveUnderWay, write: SaveTile) -> None:
        number, location = write.tile.subgroup, write.record.location
        layout, subgroup = self.ground.plan.layout.subgroups[number], self.ground.subgroups[number]
        places = {tile: (offset, nbytes) for tile, offset, nbytes in (*layout.tiles, *layout.weight_tiles)}
        copies = write.tile in save.copied and not write.gathers and write.buffer is not None
        self._require(write.tile not in save.named, "13: a second write of a tile")
        self._require(write.record.step == save.steps[number], "13: a write under another step than its change's")
        if not copies:
            self._require(write.tile in save.unwritten[number], "13: a write of what need not be written")
            self._require(subgroup.version == save.versions[number], "13: a write of state that has changed")
            self._require(not subgroup.busy, "13: a write from memory that a visit works on")
            expected = places[write.tile] == (write.source_offset, location.nbytes)
            self._require(expected, "13: a tile is not where the layout puts it")
        sink = save.save.sink
        self._require(sink is None or location.path == sink, "13: a copy goes to a path")
        if sink is not None:
            return
        self._require(0 <= location.path < len(self.storage.extents), "13: there is no such path")
        self.storage.take(location)

    def done(self, operation: SaveTile | CopyTile | Sync | Commit, written: TileRecord | None) -> None:
        """Take in that an operation of a save has ended."""
        save = self.now
        if save is None:
            return
        match operation:
            case SaveTile(tile=tile, record=record):
                save.unlanded[record.location.path] -= 1
                save.dirty.add(record.location.path)
                save.unwritten[tile.subgroup].discard(tile)
                save.named[tile] = written or record
                if record.location.path < len(self.storage.extents):
                    self.storage.hold(record.location)
                    self.storage.orphans[record.location] = None
            case CopyTile(tile=tile, record=record):
                self.storage.unhold(record.location)
                save.read[tile] = None
            case Sync():
                del save.syncing[operation.op]
            case Commit(number=number):
                self._require(not save.failed, "14: a save that has failed is committed")
                if save.save.sink is None:
                    self.kept[number] = {t: (save.versions[t.subgroup], r) for t, r in save.named.items()}
                self.now = None

    def failed(self, operation: SaveTile | CopyTile | Sync | Commit) -> None:
        """Take in that an operation of a save has failed."""
        if self.now is None:
            return
        if not isinstance(operation, SaveTile):
            self.now.failed = True
            return
        self.now.is_troubled = True
        self.now.again[operation.tile] = None
        self.now.unlanded[operation.record.location.path] -= 1
        if operation.record.location.path < len(self.storage.extents):
            self.storage.lose(operation.record.location)

    def give_up(self) -> None:
        """Take in that the save under way is given up."""
        if self.now is not None:
            self.now.failed = True

    def settle_again(self) -> None:
        """A failed write that has not been issued again by now never will be: fail its save."""
        if self.now is None or not self.now.again:
            return
        for tile in self.now.again:
            self.now.unwritten[tile.subgroup].discard(tile)
            if tile.subgroup in self.for_save and tile.subgroup not in self.given_up:
                # Only the save needed it: it is given up, and the state is as unsaved as it was.
                subgroup = self.ground.subgroups[tile.subgroup]
                self.storage.leave(subgroup.arriving)
                subgroup.arriving = {}
                self.given_up[tile.subgroup] = None
                self.end_given_up(tile.subgroup)
        self.now.again.clear()
        self.now.failed = True

    def end_given_up(self, number: int) -> None:
        """Take in that a write has ended of a flush that was given up."""
        if not self.ground.subgroups[number].writes:
            del self.given_up[number], self.for_save[number]
            if self.now is not None:
                self.now.flushes.pop(number, None)


@dataclass(slots=True)
class KnownBuffer:
    """What is known of data that passes through buffers, of one owner.

    Attributes:
        version: How often it was written to since it was used last; 0 for none.
        buffer: The buffer that is the owner's.
        in_buffer: The version that is whole in it.
        stored: Where its tiles lie that are whole on storage.
        stored_version: The version of those.
        arriving: Tiles of the newest version that are on storage while not all are.
        reads: Tiles on their way to the buffer, with their operation.
        writes: Tiles on their way to storage, likewise.
    """

    version: int = 0
    buffer: int | None = None
    in_buffer: int = 0
    stored: dict[TileId, TileRecord] = field(default_factory=dict)
    stored_version: int = 0
    arriving: dict[TileId, TileRecord] = field(default_factory=dict)
    reads: dict[TileId, int] = field(default_factory=dict)
    writes: dict[TileId, int] = field(default_factory=dict)


class ScratchBook:
    """Scratch of one kind, which passes through buffers.

    Attributes:
        useless: Writes in flight of what is of no use any more.
    """

    def __init__(self, kind: ScratchKind, ground: Ground, storage: StorageBook) -> None:
        self.kind, self.ground, self.storage = kind, ground, storage
        self.useless: set[int] = set()
        self._known: dict[int, KnownBuffer] = {}
        self._owners: dict[int, int] = {}
        self._filling: dict[int, bool] = {}  # owners that somebody wants to fill, and whether that has begun
        self._readers: Counter[int] = Counter()

    @property
    def buffers(self) -> ScratchBuffers:
        """What the plan says."""
        return self.ground.plan.scratch[self.kind]

    def _require(self, holds: bool, what: str, rule: int = 28) -> None:
        if not holds:
            raise self.ground.violation(f"{rule}: {self.kind}: {what}")

    def places(self, owner: int) -> dict[TileId, tuple[int, int]]:
        """Return offset and size of each tile of an owner."""
        tiles = self.ground.plan.scratch_tiles(ScratchOwner(self.kind, owner))
        return {tile: (offset, nbytes) for tile, offset, nbytes in tiles}

    def of(self, owner: int) -> KnownBuffer:
        """Return what is known of an owner's data."""
        return self._known.setdefault(owner, KnownBuffer())

    # What callers do

    def request(self, owner: int, *, fills: bool, amid_a_sweep: bool) -> None:
        """Take in that a caller wants a buffer."""
        if fills:
            may = not (self.buffers.is_planned and amid_a_sweep)
            self._require(may, "what visits read is filled during a sweep", 29)
            self._filling[owner] = False
        else:
            self._readers[owner] += 1

    def ready(self, owner: int, *, fills: bool) -> None:
        """Take in that a caller does not want a buffer any more."""
        if fills:
            self._filling.pop(owner, None)
        else:
            self._readers[owner] -= 1

    def filled(self, owner: int, buffer: int) -> None:
        """Verify that a caller writes an owner's data to a buffer, and take in that it does."""
        data = self.of(owner)
        self._require(owner in self._filling, "what is written was not announced")
        self._take(owner, buffer)
        self._require(not (data.reads or data.writes), "a buffer is written to amid transfers")
        self._require(data.in_buffer == data.version, "data is added to what is not whole in its buffer")
        data.version += 1
        data.in_buffer, self._filling[owner] = data.version, True

    def read(self, owner: int, buffer: int) -> None:
        """Verify that a caller reads an owner's data from a buffer."""
        self._require(self._readers[owner] > 0, "what is read was not asked for")
        self._require(self.of(owner).buffer == buffer, "data is read from another's buffer")
        self._require(self._is_whole(owner), "data is read before it is whole in its buffer")

    def discard(self, owner: int) -> None:
        """Take in that an owner's data is of no use any more."""
        data = self.of(owner)
        self._require(not self._readers[owner], "what is read is discarded")
        self._filling.pop(owner, None)
        self.useless.update(data.writes.values())
        self.storage.leave(data.stored)
        self.storage.leave(data.arriving)
        data.stored, data.arriving, data.stored_version, data.version, data.in_buffer = {}, {}, 0, 0, 0

    def settle(self) -> None:
        """What is on storage of data that is about to be changed is of no use when its buffer has it."""
        for owner in self._filling:
            data = self.of(owner)
            is_still = data.buffer is not None and not (data.reads or data.writes)
            if is_still and data.stored and data.in_buffer == data.version:
                self.storage.leave(data.stored)
                data.stored, data.stored_version = {}, 0

    def begin(self, visits: Iterable[Visit]) -> None:
        """Verify that what visits read is not being filled as their sweep begins."""
        owners = (visit.reads.number for visit in visits if visit.reads and visit.reads.kind == self.kind)
        self._require(not any(owner in self._filling for owner in owners), "a visit reads what is being filled", 29)

    def issued_run(self, run: RunVisit) -> None:
        """Verify that a visit finds what it reads."""
        owner = known(run.visit.reads, "a visit that reads nothing").number
        self._require(self.of(owner).buffer == run.gradient_buffer, "a visit with another's buffer", 29)
        self._require(self._is_whole(owner), "a visit before what it reads is whole in its buffer", 29)

    def _is_whole(self, owner: int) -> bool:
        data = self.of(owner)
        return data.in_buffer == data.version > 0 and not data.reads

    # What happens

    def issued(self, operation: ReadTile | WriteTile) -> None:
        """Verify a transfer."""
        owner, buffer, tile = known(operation.owner, "a transfer of state").number, operation.slot, operation.tile
        data = self.of(owner)
        place = operation.buffer_offset, operation.record.location.nbytes
        self._require(self.places(owner).get(tile) == place, "a tile is not where the plan puts it")
        if buffer is None or not 0 <= buffer < self.buffers.count:
            raise self.ground.violation(f"28: {self.kind}: there is no such buffer")
        self._require(data.version > 0, "a transfer of what is not there")
        if isinstance(operation, ReadTile):
            self._take(owner, buffer)
            whole = data.stored_version == data.version
            self._require(whole and data.stored.get(tile) == operation.record, "a read of something else")
            self._require(not data.writes and tile not in data.reads, "a read into a buffer in use")
            data.in_buffer = 0
            data.reads[tile] = operation.op
            return
        self._require(data.buffer == buffer, "a write from another's buffer")
        self._require(not self._filling.get(owner, False), "a write from a buffer that a caller writes to")
        self._require(data.in_buffer == data.version, "a write of what is not whole in its buffer")
        self._require(data.stored_version != data.version, "a write of what is on storage")
        self._require(not (tile in data.writes or tile in data.arriving), "a second write of a tile")
        if not self.buffers.is_planned:
            on_paths = 1 + sum(bool(each.stored or each.writes or each.reads) for each in self._known.values())
            nbytes = on_paths * (operation.record.location.nbytes + SECTOR_BYTES)
            self.storage.most_activation_bytes = max(self.storage.most_activation_bytes, nbytes)
        self.storage.take(operation.record.location, lent=not self.buffers.is_planned)
        data.writes[tile] = operation.op

    def done(self, operation: ReadTile | WriteTile, written: TileRecord | None) -> None:
        """Take in that a transfer has ended."""
        owner, location = known(operation.owner, "a transfer of state").number, operation.record.location
        data = self.of(owner)
        if isinstance(operation, ReadTile):
            del data.reads[operation.tile]
            if not data.reads:
                data.in_buffer = data.version
        elif self._is_useless(owner, operation):
            self.storage.extents[location.path].leave(location.offset)
        else:
            del data.writes[operation.tile]
            data.arriving[operation.tile] = written or operation.record
            if len(data.arriving) == len(self.places(owner)):
                data.stored, data.stored_version, data.arriving = data.arriving, data.version, {}

    def failed(self, operation: ReadTile | WriteTile) -> bool:
        """Take in that a transfer has failed; return whether a write has to be issued again.

        Without planned room, what cannot be read has no buffer, and what no path takes stays in its buffer.
        """
        owner, location = known(operation.owner, "a transfer of state").number, operation.record.location
        data = self.of(owner)
        if isinstance(operation, ReadTile):
            if not self.buffers.is_planned and data.buffer is not None:
                del self._owners[data.buffer]
                data.buffer = None
            del data.reads[operation.tile]
            return False
        if not self.buffers.is_planned:
            self.storage.give_up(location)
        self.storage.extents[location.path].leave(location.offset)
        self.storage.grown.discard(location)
        if self._is_useless(owner, operation):
            return False
        del data.writes[operation.tile]
        return self.buffers.is_planned

    def _is_useless(self, owner: int, write: WriteTile) -> bool:
        if write.op not in self.useless:
            return False
        self.useless.discard(write.op)
        del self.of(owner).writes[write.tile]
        return True

    def _take(self, owner: int, buffer: int) -> None:
        """Verify that a buffer is an owner's, or may become it."""
        self._require(0 <= buffer < self.buffers.count, "there is no such buffer")
        data, old = self.of(owner), self._owners.get(buffer)
        if old == owner:
            return
        self._require(data.buffer is None or not data.version, "a second buffer for one owner")
        if old is not None:
            before = self.of(old)
            useful = before.version and before.stored_version != before.version
            self._require(not useful, "a buffer changes hands with what lies nowhere else")
            self._require(not (before.reads or before.writes), "a buffer changes hands amid transfers")
            self._require(not self._readers[old], "a buffer changes hands while it is read")
            before.buffer, before.in_buffer = None, 0
        if data.buffer is not None:
            del self._owners[data.buffer]
        self._owners[buffer], data.buffer = owner, buffer


class LeaveBook:
    """State at home in memory that leaves it for storage.

    Attributes:
        may_leave: Subgroups that are to leave, and have not yet.
        begun: Those of them that have begun to.
        stays: Whether no other is to begin.
        given_up: Those that stay, as a write of them has failed, while other writes of them are in flight.
    """

    def __init__(self, ground: Ground, storage: StorageBook) -> None:
        self.ground, self.storage, self._require = ground, storage, ground.require
        self.may_leave: dict[int, None] = {}
        self.begun: set[int] = set()
        self.stays = False
        self.given_up: dict[int, None] = {}
        self._again: TileId | None = None
        self._ever: set[int] = set()

    def begin(self, leave: Evict, *, amid: bool) -> None:
        """Take in that state is to leave memory."""
        self._require(not amid, "27: state leaves memory during a sweep, a visit or a save")
        self.may_leave, self.stays, self.begun = dict.fromkeys(leave.subgroups), False, set()
        subgroups = self.ground.subgroups
        there = all(self.ground.plan.is_resident(n) and not subgroups[n].away for n in leave.subgroups)
        self._require(there, "27: state leaves memory where it is not")
        self._ever.update(leave.subgroups)  # slots of one size are of no use to tiles of another
        sizes = (nbytes for number in self._ever for _, nbytes in self.ground.places[number].values())
        self.storage.most_away_bytes = sum(nbytes + SECTOR_BYTES for nbytes in sizes)

    def issued_write(self, write: WriteTile) -> None:
        """Verify that a write is of state that leaves."""
        number = write.tile.subgroup
        self._again = None
        self._require(number in self.may_leave and number not in self.given_up, "27: a write of state that stays")
        self._require(not self.stays or number in self.begun, "27: state leaves memory that is wanted there")
        self.begun.add(number)

    def gives_back(self, number: int) -> None:
        """Take in that the memory of a home is given back."""
        self._require(number in self.may_leave, "27: memory of a home is given back that is to stay")
        del self.may_leave[number]

    def failed(self, write: WriteTile) -> None:
        """Take in that a write has failed: it is issued again at once, or its state stays."""
        self.storage.lose(write.record.location)
        if write.tile.subgroup in self.given_up:
            self.end_given_up(write.tile.subgroup)
        else:
            self._again = write.tile

    def settle_again(self) -> None:
        """A failed write that has not been issued again by now never will be: its subgroup stays."""
        tile, self._again = self._again, None
        if tile is None:
            return
        subgroup = self.ground.subgroups[tile.subgroup]
        self.storage.leave(subgroup.arriving)
        subgroup.arriving = {}
        self.given_up[tile.subgroup] = None
        self.end_given_up(tile.subgroup)

    def end_given_up(self, number: int) -> None:
        """Take in that a write has ended of state that stays."""
        if not self.ground.subgroups[number].writes:
            del self.given_up[number]
            self.may_leave.pop(number, None)


def subgroup_of(operation: Transfer | AwaitPush | RunVisit) -> int:
    """Return the subgroup that an operation is for."""
    return operation.visit.subgroup if isinstance(operation, RunVisit) else operation.subgroup


def weight_slot_of(operation: Transfer | AwaitPush | RunVisit) -> int | None:
    """Return the weight slot of an operation, where what passes through a slot are weights."""
    return None if isinstance(operation, RunVisit) and operation.visit.gpu else operation.transfer_slot


def gpu_slot_of(run: RunVisit) -> int | None:
    """Return the staging slot on the GPU of a run there, if it has one."""
    return run.transfer_slot if run.visit.gpu else None
