"""An independent checker: sees only the operations that are issued and the events that are reported.

It is written from the rules below and shares no decision with `offload.engine.machine`: it never asks what should
be done next, only whether what is done may be done. It serves every executor, simulated or live.

Rules:
  1. An operation has an id of its own and is reported once.
  2. A visit runs once in its sweep. A sweep ends well only if each of its visits has run and ended well.
  3. A visit runs on the whole newest state, unless its subgroup is fresh or the visit overwrites it; `fresh` is
     set for exactly the subgroups that no visit has changed.
  4. A staging slot has one owner and a subgroup one slot. Nothing touches memory that an operation in flight
     uses, except that writes may run side by side.
  5. A staging slot changes hands only if its owner's newest state is whole on storage, or its owner is fresh.
  6. A read takes a tile of the newest whole version from where it lies, by its step and checksum, into its place.
  7. A write takes a changed tile in its newest version from its place, under the step of its change, to bytes of
     a store that hold nothing of any newest whole version, nothing of a newer one that is arriving, and nothing
     in flight; within the path's limit; not on a path that has failed a write.
  8. Bytes in flight stay within the staging memory; bytes on the paths within `Plan.storage_bytes` (space on a
     path that has failed is given up: of it only what is live counts; after a `Reshare`, of all paths).
  9. After a fatal error (a failed run or read, `Stop`) nothing new is issued. A failed write is issued again
     before anything else, or nothing more is.
 10. A visit on the GPU runs on the state at home there, or in a GPU staging slot of its own: one that the whole
     newest state was copied into, unless the visit fills it. What it changed is copied back before anything else
     touches the subgroup or its memory, and then the GPU staging slot is free.
 11. A run on the CPU whose visit needs weights that lie on the GPU has a weight slot that is nobody else's; if it
     reads them, they were fetched to that slot before. What it changed is pushed from there, once, and the visit ends
     with that. Then the slot is waited for, and free when it has been left; one that was not changed is free at once.

 Checkpoints (the state is immutable from `BeginSave` until a visit, which is what makes them possible):
 12. A save begins between sweeps, with no visit or copy on the GPU under way, and one at a time. A write for it that
     has failed is issued again before anything else happens; else, and after any other failure, nothing more is
     issued for it.
 13. A save writes a tile of the version at its begin, from its place, once, under the step of its change, to bytes
     that rule 7 allows (or to the store that takes copies). State at home in memory and masters that are weights are
     not visited before they have been written. What is copied is read from where the newest whole version lies.
 14. A commit names every tile once, whole and in the version at the begin; every write of it ended before a sync of
     its path began, and that sync has ended.
 15. What a save under way or a finished one names is in use (rule 7) until it is released. The bytes that this
     takes come on top of those of rule 8.
 16. State is exchanged for what lies on storage (`TakeUp`) with nothing in flight, between sweeps and saves. What is
     taken up is in use like what was written, and what a store held before comes on top of the bytes of rule 8.
 17. The plan changes (`Extend`) with nothing in flight, between sweeps and saves. Subgroups and their homes stay, and
     so do staging slots in host memory; others may be updated on the GPU from then on.

 Sweeps beside which their caller goes on:
 18. Visits begin in the order given, as far as they are alike: on one device, those whose state lay whole in its home
     or in its staging slot at the begin of the sweep, and those whose state has to be fetched.
 19. The caller reads weights of a subgroup, and writes its gradients, when its visit has ended (rule 11).

 Sweeps ahead, whose visits make versions beside the live ones (which stay the newest, as the rules above have it):
 20. A sweep ahead ends with `Confirm`, while none of its visits runs, and before anything else begins. Its visits
     run once admitted, in any order, and not after `Hold`; each on the CPU, in a staging slot, on state that is not
     fresh, and whose newest version is whole on storage.
 21. What a visit ahead makes is written as rule 7 has it, from its staging slot and under the step of its sweep, to
     bytes that rule 7 allows. Its slot changes hands when it is whole on storage, or was revoked.
 22. A version beside the live one is read, visited, copied and saved by nobody before it is confirmed. It is revoked
     if a write of it fails, or `Confirm` does not name it: then nothing of it is used again, in its slot neither.
 23. A confirmed version is the newest, as if it had been made by the sweep that follows: that one counts its subgroup
     as moved, and does not visit it.
 24. No version is made under the step of a version that was made ahead before, whatever became of that.
 25. The bytes that versions beside the live ones may take, for the subgroups of one sweep, come on top of those of
     rule 8; what they take leaves what the plan promises to checkpoints (while no path has failed and no store was
     taken up).
 26. Weights are published of confirmed versions only, of each once, and before the next sweep begins.

Non-goals: whether an order of unlike visits is good, whether anything happens at all (a run that never ends breaks no
rule).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from offload.engine.index import Location, Record
from offload.engine.loop import Executor
from offload.engine.operations import (
    Admit,
    AwaitPush,
    Begin,
    BeginSave,
    Commit,
    Confirm,
    CopyTile,
    Done,
    Event,
    Extend,
    Failed,
    Hold,
    Operation,
    ReadTile,
    Release,
    Reshare,
    Run,
    Save,
    SaveTile,
    Stop,
    Sweep,
    Sync,
    TakeUp,
    Transfer,
    Visit,
    WriteTile,
)
from offload.errors import InternalError, TierError
from offload.plan.budget import Plan
from offload.protocols import SECTOR_BYTES, TileId

STORY_LENGTH = 60
"""Operations and events that a violation tells of."""


@dataclass(slots=True)
class _Beside:
    """A version beside the live one, which was neither confirmed nor revoked.

    Attributes:
        step: Under which it is written.
        held: Its tiles that lie in its subgroup's staging slot.
        arrived: Its tiles that are on storage.
        writes: Writes in flight, by tile.
    """

    step: int
    held: set[TileId]
    arrived: dict[TileId, Record] = field(default_factory=dict)
    writes: dict[TileId, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Subgroup:
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
        beside: The version beside the live one.
    """

    version: int = 0
    step: int = 0
    slot: int | None = None
    held: set[TileId] = field(default_factory=set)
    stored_version: int = 0
    stored: dict[TileId, Record] = field(default_factory=dict)
    arriving: dict[TileId, Record] = field(default_factory=dict)
    reads: dict[TileId, int] = field(default_factory=dict)
    writes: dict[TileId, int] = field(default_factory=dict)
    run: int | None = None
    gpu_slot: int | None = None
    gpu_holds: bool = False
    gpu_ahead: bool = False
    copy: int | None = None
    beside: _Beside | None = None

    @property
    def busy(self) -> bool:
        """Whether a visit or a copy works on its memory."""
        return self.run is not None or self.gpu_slot is not None


@dataclass(slots=True)
class _WeightSlot:
    """A weight slot in use.

    Attributes:
        subgroup: Whose it is.
        stage: "fetching", "fetched", "running", "made", "pushing", "pushed", "leaving", in this order.
    """

    subgroup: int
    stage: str


@dataclass(slots=True)
class _Save:
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
        failed: Whether an operation of it has failed, for good.
    """

    save: Save
    versions: list[int]
    steps: list[int]
    unwritten: list[set[TileId]]
    flushes: dict[int, None]
    named: dict[TileId, Record] = field(default_factory=dict)
    copied: dict[TileId, Record] = field(default_factory=dict)
    read: dict[TileId, None] = field(default_factory=dict)
    dirty: set[int] = field(default_factory=set)
    syncing: dict[int, int] = field(default_factory=dict)
    unlanded: dict[int, int] = field(default_factory=dict)
    again: dict[TileId, None] = field(default_factory=dict)
    failed: bool = False


class _Extents:
    """Byte ranges in use on one path, none overlapping."""

    __slots__ = ("end", "failed", "limit", "starts", "stops", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.starts: list[int] = []
        self.stops: dict[int, int] = {}
        self.used = 0
        self.end = 0
        self.failed = False

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


class CheckedExecutor:
    """Passes everything on to another executor and verifies that it keeps the rules.

    Events are handed on one by one, so that each operation is judged by what was known when it was issued.

    Args:
        inner: The executor that does the work.
        plan: What the operations belong to.
    """

    def __init__(self, inner: Executor, plan: Plan) -> None:
        self.moved: list[int] = []
        """Subgroups whose changing visit has ended well in the current (or last) sweep, in that order."""
        self._inner = inner
        self._plan = plan
        self._events: deque[Event] = deque()
        self._story: deque[str | Operation | Event] = deque(maxlen=STORY_LENGTH)
        self._places: list[dict[TileId, tuple[int, int]]] = []
        self._subgroups: list[_Subgroup] = []
        self._owners: list[int | None] = []
        self._gpu_owners: list[int | None] = []
        self._weight_slots: dict[int, _WeightSlot] = {}
        self._extents = [_Extents(path.available_bytes) for path in plan.budgets.paths]
        self._flying: dict[int, Operation] = {}
        self._flying_bytes = 0
        self._last_op = 0
        self._sweep: Sweep | None = None
        self._visits: dict[int, Visit] = {}  # of the sweep; not yet run
        self._unended: dict[int, None] = {}  # run or not, not yet ended well
        self._steps: dict[int, int] = {}
        self._unbegun: dict[int, tuple[int, str]] = {}  # visits: their place in the order, and where state lay
        self._begun: dict[tuple[str, type[Operation], bool, bool], int] = {}  # the last place, by what is alike
        self._fatal: Exception | None = None
        self._save: _Save | None = None
        self._kept: dict[int, dict[TileId, tuple[int, Record]]] = {}  # version and place, by save
        self._holds: dict[Location, int] = {}
        self._orphans: dict[Location, None] = {}  # held, and no longer of a newest whole version
        self._saving_bytes = 0
        self._reshared = False
        self._lost_bytes = 0  # of slots that a save has failed to write, and that nobody uses again
        self._for_save: dict[int, None] = {}  # subgroups that are flushed for a save only
        self._given_up: dict[int, None] = {}  # subgroups whose flush has failed, for a save that needed it
        self._again: dict[TileId, None] = {}  # tiles whose write has failed and was not issued again
        # Of the sweep ahead:
        self._admitted: set[int] = set()
        self._may_run = False
        self._beside_slots: Counter[int] = Counter()  # that it has taken, by payload bytes
        self._most_beside: Counter[int] = Counter()  # ... most that one may take
        self._revoked: dict[int, Location] = {}  # writes in flight of versions that have been revoked
        self._steps_ahead: set[int] = set()
        self._confirmed: dict[int, None] = {}  # since a sweep has begun
        self._unpublished: dict[int, None] = {}
        self._taken_up = False
        self._adopt(plan)

    # The two faces --------------------------------------------------------------------------------------------

    def submit(self, operations: Sequence[Operation]) -> None:
        """Verify operations, then pass them on.

        Raises:
            InternalError: If a rule is broken; notes tell the story.
        """
        for operation in operations:
            self._issued(operation)
        self._inner.submit(operations)

    def wait(self) -> list[Event]:
        """Return the next event of the inner executor.

        Raises:
            InternalError: If a rule is broken; notes tell the story.
        """
        while not self._events:
            self._events.extend(self._inner.wait())
        event = self._events.popleft()
        self.observe(event)
        return [event]

    def observe(self, event: Event) -> None:
        """Take in an event that reaches the machine by another way than `wait`."""
        self._story.append(event)
        self._settle_again()
        match event:
            case Begin(sweep):
                self._begin(sweep)
            case Done(op, checksum):
                self._done(self._land(op), checksum)
            case Failed(op, error):
                self._failed(self._land(op), error)
            case Stop(error):
                self._fatal = self._fatal or error
            case BeginSave(save):
                self._begin_save(save)
            case Admit(subgroups):
                self._admitted |= set(subgroups)
            case Hold():
                self._may_run = False
            case Confirm(subgroups):
                self._confirm(subgroups)
            case Extend(plan):
                self._extend(plan)
            case Reshare():
                self._reshared = True
            case TakeUp():
                self._take_up(event)
            case Release(number):
                for _, record in self._kept.pop(number).values():
                    self._unhold(record.location)

    def saved(self) -> dict[int, dict[TileId, Record]]:
        """Return what each finished save that was not released names."""
        return {number: {tile: record for tile, (_, record) in named.items()} for number, named in self._kept.items()}

    def save_ended(self, *, well: bool) -> None:
        """Verify how the save that was begun last has ended, by what the engine says.

        Raises:
            InternalError: If it is said to have been committed and was not, or the other way round.
        """
        self._settle_again()
        save, self._save = self._save, None
        if save is None:  # it was committed
            self._require(well, "14: a committed save is said to have failed")
            return
        self._require(not well, "14: a save is said to be committed and was not")
        named = [record for record in save.named.values() if record.location.path < len(self._extents)]
        unread = [record for tile, record in save.copied.items() if tile not in save.read]
        for record in named + unread:
            self._unhold(record.location)
        for number in list(self._for_save):  # it was refused, so nothing is flushed for it
            if not self._subgroups[number].writes and not self._subgroups[number].arriving:
                del self._for_save[number]

    def ended(self, *, well: bool) -> None:
        """Verify how the sweep that was begun last has ended, by what the engine says.

        Args:
            well: Whether the engine takes it as applied.

        Raises:
            InternalError: If it is said to have ended well and has not; notes tell the story.
        """
        self._require(not (well and self._unended), "2: a sweep ends well before each of its visits")
        self._sweep = None

    def is_clean(self, subgroup: int) -> bool:
        """Return whether a subgroup's newest version is whole on storage."""
        return self._subgroups[subgroup].stored_version == self._subgroups[subgroup].version

    def is_ended(self, subgroup: int) -> bool:
        """Return whether a subgroup has no visit that has not ended well."""
        return subgroup not in self._unended

    def published(self, subgroup: int) -> None:
        """Verify that the weights of the version that was made ahead of a subgroup may be published.

        Raises:
            InternalError: If they may not; notes tell the story.
        """
        self._story.append(f"weights of subgroup {subgroup} are published")
        self._require(subgroup in self._unpublished, "26: weights are published of a version that was not confirmed")
        del self._unpublished[subgroup]

    def let_on(self, subgroups: Sequence[int]) -> None:
        """Verify that a caller may read weights and write gradients of some subgroups, beside a sweep.

        Raises:
            InternalError: If it may not yet; notes tell the story.
        """
        self._story.append(f"the caller goes on with subgroups {subgroups}")
        for subgroup in subgroups:
            self._require(self.is_ended(subgroup), "19: a caller goes on before a visit has ended")

    # Issuing --------------------------------------------------------------------------------------------------

    def _issued(self, operation: Operation) -> None:
        self._story.append(operation)
        self._require(operation.op > self._last_op, "1: an operation's id is not new")
        self._last_op = operation.op
        again = isinstance(operation, WriteTile) and operation.tile in self._again
        if not again:
            self._require(self._fatal is None, "9: an operation after a fatal error")
            self._require(not self._again, "9: an operation before a failed write is issued again")
        if isinstance(operation, Run | ReadTile) or (isinstance(operation, Transfer) and operation.way == "fetch"):
            self._issued_in_order(operation)
        if isinstance(operation, Run):
            self._issued_run(operation)
        elif isinstance(operation, SaveTile | CopyTile | Sync | Commit):
            self._issued_save(operation)
        elif isinstance(operation, Transfer) and operation.what == "state":
            self._issued_copy(operation)
        elif isinstance(operation, Transfer | AwaitPush):
            self._issued_weights(operation)
        else:
            place = self._places[operation.tile.subgroup].get(operation.tile)
            expected = (operation.buffer_offset, operation.record.location.nbytes)
            self._require(place == expected, "6, 7: a tile is not where the layout puts it")
            self._require(not self._plan.is_resident(operation.tile.subgroup), "4: a transfer of resident state")
            self._require(0 <= operation.slot < len(self._owners), "4: there is no such staging slot")
            self._flying_bytes += operation.record.location.nbytes
            self._require(self._flying_bytes <= self._plan.staging_bytes, "8: too many bytes in flight")
            if isinstance(operation, ReadTile):
                self._issued_read(operation)
            else:
                self._issued_write(operation)
        self._flying[operation.op] = operation

    def _issued_in_order(self, operation: Run | Transfer | ReadTile) -> None:
        number = operation.tile.subgroup if isinstance(operation, ReadTile) else _subgroup_of(operation)
        visit, found = self._visits.get(number), self._unbegun.pop(number, None)
        if visit is None or found is None:
            return
        place, where = found
        staged = isinstance(operation, Run) and operation.gpu_slot is not None
        alike = where, type(operation), visit.gpu, staged
        self._require(place > self._begun.get(alike, -1), "18: a visit begins after one that it comes before")
        self._begun[alike] = place

    def _issued_run(self, run: Run) -> None:
        subgroup = self._subgroups[run.visit.subgroup]
        self._require(self._sweep is not None and run.sweep == self._sweep.number, "2: a visit of another sweep")
        self._require(self._visits.pop(run.visit.subgroup, None) == run.visit, "2: a visit that is not due")
        self._require(subgroup.beside is None, "22: a visit of a version that is not confirmed")
        if run.visit.ahead:
            self._issued_run_ahead(run, subgroup)
        self._require(run.fresh == (subgroup.version == 0), "3: a wrong word on whether the state is fresh")
        self._require(subgroup.run is None, "4: two visits at once on a subgroup")
        self._require(subgroup.copy is None, "10: a visit amid a copy")
        save = self._save if self._save is not None and not (self._save.failed or self._save.again) else None
        waits = save and (save.unwritten[run.visit.subgroup] or run.visit.subgroup in save.flushes)
        self._require(not waits, "13: a visit before the state has been saved")
        at_home = self._plan.at_home_on_gpu(run.visit.subgroup)
        self._require(run.visit.gpu or not at_home, "10: state at home on the GPU is visited elsewhere")
        if run.gpu_slot is None:
            self._require(at_home or not run.visit.gpu, "10: a visit on the GPU of what is not there")
            self._require(subgroup.gpu_slot is None, "10: a visit in host memory of what lies on the GPU")
        else:
            self._require(run.visit.gpu and not at_home, "10: a GPU slot for a visit that needs none")
            if subgroup.gpu_slot is None:
                self._take_gpu_slot(run.visit.subgroup, run.gpu_slot)
            self._require(subgroup.gpu_slot == run.gpu_slot, "10: a visit in another's GPU slot")
            filled = run.fresh or run.visit.overwrites
            self._require(filled or subgroup.gpu_holds, "10: a visit before the newest state is on the GPU")
        if self._plan.is_resident(run.visit.subgroup):
            self._require(run.slot is None, "4: resident state in a staging slot")
        else:
            self._require(run.slot is not None and 0 <= run.slot < len(self._owners), "4: no staging slot")
            if run.slot is not None and subgroup.slot != run.slot:
                self._take_slot(run.visit.subgroup, run.slot)
            self._require(not subgroup.reads and not subgroup.writes, "4: a visit amid transfers of its slot")
            if not run.fresh and not run.visit.overwrites and run.gpu_slot is None:
                whole = len(subgroup.held) == len(self._places[run.visit.subgroup])
                self._require(whole, "3: a visit before all of the newest state is there")
        if run.visit.fetches:
            self._next_stage(run, "fetched", "running", "11: a visit before its weights are there")
        elif run.visit.weight_bytes:
            self._take_weight_slot(run, "running")
        else:
            self._require(run.weight_slot is None, "11: a weight slot for a visit that needs none")
        subgroup.run = run.op

    def _issued_run_ahead(self, run: Run, subgroup: _Subgroup) -> None:
        visit = run.visit
        self._require(visit.subgroup in self._admitted, "20: a visit ahead that was not admitted")
        self._require(self._may_run, "20: a visit ahead after a request has come in")
        plain = visit.changes and not (visit.overwrites or visit.gpu or visit.weight_bytes)
        self._require(plain and run.slot is not None and not run.fresh, "20: a visit ahead that is none")
        whole = subgroup.stored_version == subgroup.version
        self._require(whole, "20: a visit ahead of state that is not whole on storage")

    # Weights ----------------------------------------------------------------------------------------------------

    def _issued_weights(self, operation: Transfer | AwaitPush) -> None:
        number, visit = operation.subgroup, self._visits.get(operation.subgroup)
        match operation:
            case Transfer(way="fetch"):
                due = visit is not None and visit.fetches and visit.weight_bytes == operation.nbytes
                self._require(due, "11: a fetch of weights that is not due")
                self._take_weight_slot(operation, "fetching")
            case Transfer():
                due = self._plan.layout.subgroups[number].weight_bytes == operation.nbytes
                self._require(due, "11: a push of other weights")
                self._next_stage(operation, "made", "pushing", "11: a push of weights that is not due")
            case AwaitPush():
                self._next_stage(operation, "pushed", "leaving", "11: a wait for a push that has not been")

    def _take_weight_slot(self, operation: Transfer | Run, stage: str) -> None:
        slot, number = _weight_slot(operation), _subgroup_of(operation)
        self._require(slot is not None and 0 <= slot < self._plan.weight_slots, "11: there is no such weight slot")
        self._require(slot not in self._weight_slots, "11: a weight slot that is in use")
        if slot is not None:
            self._weight_slots[slot] = _WeightSlot(number, stage)

    def _next_stage(self, operation: Transfer | AwaitPush | Run, before: str, after: str, rule: str) -> None:
        number = _weight_slot(operation)
        slot = None if number is None else self._weight_slots.get(number)
        known = slot is not None and slot.subgroup == _subgroup_of(operation) and slot.stage == before
        self._require(known, rule)
        if slot is not None:
            slot.stage = after

    def _done_weights(self, operation: Transfer | AwaitPush) -> None:
        match operation:
            case Transfer(way="fetch", through=slot):
                self._weight_slots[slot].stage = "fetched"
            case Transfer(through=slot):
                self._weight_slots[slot].stage = "pushed"
                self._unended.pop(operation.subgroup, None)
            case AwaitPush(weight_slot=slot):
                del self._weight_slots[slot]

    # Checkpoints ------------------------------------------------------------------------------------------------

    def _begin_save(self, save: Save) -> None:
        self._require(self._save is None, "12: a save begins while another is under way")
        self._require(self._sweep is None, "12: a save begins during a sweep")
        busy = any(subgroup.busy for subgroup in self._subgroups)
        self._require(not busy, "12: a save begins during a visit")
        found = _Save(
            save,
            [subgroup.version for subgroup in self._subgroups],
            [subgroup.step for subgroup in self._subgroups],
            [set() for _ in self._subgroups],
            {},
        )
        self._save = found
        known = {tile: known for named in self._kept.values() for tile, known in named.items()}
        for number, subgroup in enumerate(self._subgroups):
            layout = self._plan.layout.subgroups[number]
            home = layout.tiles if self._plan.is_resident(number) else ()
            for tile, _, _ in (*home, *layout.weight_tiles):
                version, record = known.get(tile, (-1, None))
                if record is not None and version == subgroup.version:
                    self._name(found, tile, record)
                else:
                    found.unwritten[number].add(tile)
            if self._plan.is_resident(number):
                continue
            if subgroup.stored_version == subgroup.version:
                for tile, record in subgroup.stored.items():
                    self._name(found, tile, record)
            else:
                found.flushes[number] = None
                if not (subgroup.writes or subgroup.arriving):
                    self._for_save[number] = None
        tiles = [t for s in self._plan.layout.subgroups for t in (*s.tiles, *s.weight_tiles)]
        whole = sum(nbytes + SECTOR_BYTES for _, _, nbytes in tiles)
        self._saving_bytes = max(self._saving_bytes, (len(self._kept) + 1) * whole)

    def _extend(self, plan: Plan) -> None:
        before, count = self._plan, len(self._subgroups)
        self._require(not self._flying and not self._unended, "17: the plan changes while its memory is in use")
        self._require(self._save is None, "17: the plan changes during a save")
        self._require(not self._is_ahead, "20: the plan changes during a sweep ahead")
        self._require(plan.layout.subgroups[:count] == before.layout.subgroups, "17: subgroups are cut anew")
        self._require(plan.homes[:count] == before.homes, "17: a subgroup gets another home")
        self._require(plan.staging_slots >= before.staging_slots, "17: a staging slot goes")
        self._adopt(plan)

    def _adopt(self, plan: Plan) -> None:
        self._plan = plan
        for subgroup in plan.layout.subgroups[len(self._subgroups) :]:
            self._places.append({tile: (offset, nbytes) for tile, offset, nbytes in subgroup.tiles})
            self._subgroups.append(_Subgroup())
        self._owners += [None] * (plan.staging_slots - len(self._owners))
        self._gpu_owners = [None] * plan.gpu_slots

    def _take_up(self, event: TakeUp) -> None:
        self._require(not self._flying and not self._unended, "16: state is exchanged while it is in use")
        self._require(self._save is None, "16: state is exchanged during a save")
        self._require(not self._is_ahead, "20: state is exchanged during a sweep ahead")
        self._taken_up = True
        for number, slot in [(n, s.slot) for n, s in enumerate(self._subgroups) if s.slot is not None]:
            if any(tile.subgroup == number for tile in event.records):
                self._owners[slot] = None
                self._subgroups[number].slot = None
        for number, records in event.held.items():
            self._kept[number] = {}
            for tile, record in records.items():
                newest = event.records.get(TileId(tile.subgroup, 0, 0))
                same = newest is not None and newest.step == record.step
                version = self._subgroups[tile.subgroup].version + 1 if same else -2
                self._kept[number][tile] = version, record
                location = record.location
                if location not in self._holds:
                    extents = self._extents[location.path]
                    start, stop = location.offset, location.offset + SECTOR_BYTES + location.nbytes
                    self._require(not extents.overlaps(start, stop), "16: two tiles in one place are taken up")
                    extents.take(start, stop)
                    self._orphans[location] = None
                self._hold(location)
        self._lost_bytes += sum(self._extents[path].end for path in event.stores)
        for number in sorted({tile.subgroup for tile in event.records}):
            subgroup = self._subgroups[number]
            self._leave(subgroup.stored)
            subgroup.stored = {tile: event.records[tile] for tile in self._places[number]}
            for record in subgroup.stored.values():
                self._orphans.pop(record.location, None)
            subgroup.version += 1
            subgroup.stored_version = subgroup.version
            subgroup.step = next(iter(subgroup.stored.values())).step
            subgroup.held = set()

    def _name(self, save: _Save, tile: TileId, record: Record) -> None:
        """Take note that a tile of the save is whole on storage; with a sink it has still to be copied."""
        self._hold(record.location)
        if save.save.sink is None:
            save.named[tile] = record
            save.dirty.add(record.location.path)
        else:
            save.copied[tile] = record

    def _hold(self, location: Location) -> None:
        self._holds[location] = self._holds.get(location, 0) + 1

    def _unhold(self, location: Location) -> None:
        self._holds[location] -= 1
        if not self._holds[location]:
            del self._holds[location]
            if self._orphans.pop(location, location) is None:
                self._extents[location.path].leave(location.offset)

    def _issued_save(self, operation: SaveTile | CopyTile | Sync | Commit) -> None:
        save = self._save
        if save is None or save.failed:
            raise self._violation("12: an operation of a save that is not under way, or has failed")
        match operation:
            case CopyTile(tile=tile, record=record):
                self._require(save.copied.get(tile) == record, "13: a copy from a wrong place or version")
                self._require(save.save.sink is not None, "13: a copy to nowhere")
            case SaveTile(tile=tile, record=record):
                save.again.pop(tile, None)
                self._issued_save_tile(save, operation)
                path = record.location.path
                save.unlanded[path] = save.unlanded.get(path, 0) + 1
            case Sync(path=path):
                self._require(not save.unlanded.get(path), "14: a sync before the writes to its path have ended")
                save.dirty.discard(path)
                save.syncing[operation.op] = path
            case Commit(number=number, records=records):
                self._require(number == save.save.number, "14: a commit of another save")
                tiles = [t for s in self._plan.layout.subgroups for t, _, _ in (*s.tiles, *s.weight_tiles)]
                self._require(sorted(tiles) == sorted(records), "14: a commit that does not name every tile")
                self._require(records == save.named, "14: a commit that names a tile where it does not lie")
                synced = not save.dirty and not save.syncing
                self._require(synced, "14: a commit before all paths have been synced")
                for tile, record in records.items():
                    right = record.step == save.steps[tile.subgroup]
                    self._require(right, "14: a commit that names a tile in another version")

    def _issued_save_tile(self, save: _Save, write: SaveTile) -> None:
        number, location = write.tile.subgroup, write.record.location
        layout, subgroup = self._plan.layout.subgroups[number], self._subgroups[number]
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
        self._require(0 <= location.path < len(self._extents), "13: there is no such path")
        self._take(location)

    def _take(self, location: Location) -> None:
        """Verify that a write may go to these bytes, and take them."""
        extents = self._extents[location.path]
        start, stop = location.offset, location.offset + SECTOR_BYTES + location.nbytes
        self._require(start >= 0 and start % SECTOR_BYTES == 0, "7: a slot that is not aligned")
        self._require(stop <= extents.limit, "7: a write beyond its path's limit")
        self._require(not extents.failed, "7: a write to a path that has failed a write")
        self._require(not extents.overlaps(start, stop), "7: a write over bytes that are in use")
        extents.take(start, stop)
        bytes_used = sum(path.used if path.failed or self._reshared else path.end for path in self._extents)
        beside = sum((nbytes + SECTOR_BYTES) * count for nbytes, count in self._most_beside.items())
        most = self._plan.storage_bytes + self._saving_bytes + self._lost_bytes + beside
        if bytes_used > most:
            # What lies on a path that has failed cannot be moved; elsewhere the plan's bound still holds.
            bytes_used = sum(path.used for path in self._extents)
            some_failed = any(path.failed for path in self._extents)
            self._require(some_failed and bytes_used <= most, "8: more storage than planned")

    def _done_save(self, operation: SaveTile | CopyTile | Sync | Commit, checksum: int) -> None:
        save = self._save
        if save is None:
            return
        match operation:
            case SaveTile(tile=tile, record=record):
                save.unlanded[record.location.path] -= 1
                save.dirty.add(record.location.path)
                save.unwritten[tile.subgroup].discard(tile)
                save.named[tile] = Record(record.location, record.step, checksum)
                if record.location.path < len(self._extents):
                    self._hold(record.location)
                    self._orphans[record.location] = None
            case CopyTile(tile=tile, record=record):
                self._unhold(record.location)
                save.read[tile] = None
            case Sync():
                del save.syncing[operation.op]
            case Commit(number=number):
                self._require(not save.failed, "14: a save that has failed is committed")
                if save.save.sink is None:
                    self._kept[number] = {t: (save.versions[t.subgroup], r) for t, r in save.named.items()}
                self._save = None

    def _failed_save(self, operation: SaveTile | CopyTile | Sync | Commit) -> None:
        if self._save is None:
            return
        if not isinstance(operation, SaveTile):
            self._save.failed = True
            return
        self._save.again[operation.tile] = None
        self._save.unlanded[operation.record.location.path] -= 1
        if operation.record.location.path < len(self._extents):
            self._lose(operation.record.location)

    def _settle_again(self) -> None:
        """A failed write that has not been issued again by now never will be: fail its save."""
        if self._save is None or not self._save.again:
            return
        for tile in self._save.again:
            self._save.unwritten[tile.subgroup].discard(tile)
            if tile.subgroup in self._for_save and tile.subgroup not in self._given_up:
                # Only the save needed it: it is given up, and the state is as unsaved as it was.
                subgroup = self._subgroups[tile.subgroup]
                self._leave(subgroup.arriving)
                subgroup.arriving = {}
                self._given_up[tile.subgroup] = None
                self._end_given_up(tile.subgroup)
        self._save.again.clear()
        self._save.failed = True

    def _lose(self, location: Location) -> None:
        self._extents[location.path].leave(location.offset)
        self._lost_bytes += location.nbytes + SECTOR_BYTES

    def _issued_copy(self, copy: Transfer) -> None:
        subgroup = self._subgroups[copy.subgroup]
        resident = self._plan.is_resident(copy.subgroup)
        self._require(not self._plan.at_home_on_gpu(copy.subgroup), "10: a copy of state at home on the GPU")
        self._require(subgroup.run is None and subgroup.copy is None, "10: a copy amid a visit or another copy")
        self._require(not subgroup.reads and not subgroup.writes, "10: a copy amid transfers")
        self._require(copy.slot == (None if resident else subgroup.slot), "10: a copy from or to another's memory")
        self._require(resident or copy.slot is not None, "10: a copy from or to no memory")
        if copy.way == "fetch":
            self._require(subgroup.version > 0, "10: a copy of state that was never changed")
            whole = resident or len(subgroup.held) == len(self._places[copy.subgroup])
            self._require(whole, "10: a copy before all of the newest state is there")
            self._require(subgroup.gpu_slot is None, "10: a second copy to the GPU")
            self._take_gpu_slot(copy.subgroup, copy.through)
        else:
            self._require(subgroup.gpu_slot == copy.through, "10: a copy out of another's GPU slot")
            self._require(subgroup.gpu_ahead, "10: a copy back of what has not changed")
        subgroup.copy = copy.op

    def _take_gpu_slot(self, number: int, gpu_slot: int) -> None:
        self._require(0 <= gpu_slot < len(self._gpu_owners), "10: there is no such GPU slot")
        self._require(self._gpu_owners[gpu_slot] is None, "10: a GPU slot that is in use")
        self._gpu_owners[gpu_slot] = number
        self._subgroups[number].gpu_slot = gpu_slot

    def _leave_gpu(self, number: int) -> None:
        subgroup = self._subgroups[number]
        if subgroup.gpu_slot is not None:
            self._gpu_owners[subgroup.gpu_slot] = None
        subgroup.gpu_slot, subgroup.gpu_holds, subgroup.gpu_ahead = None, False, False

    def _issued_read(self, read: ReadTile) -> None:
        subgroup = self._subgroups[read.tile.subgroup]
        self._require(subgroup.beside is None, "22: a read beside a version that is not confirmed")
        if subgroup.slot != read.slot:
            self._take_slot(read.tile.subgroup, read.slot)
        self._require(not subgroup.busy, "4: a read into a slot that a visit works on")
        self._require(not subgroup.writes, "4: a read into a slot that is being written from")
        self._require(read.tile not in subgroup.reads, "4: two reads into one place")
        self._require(subgroup.version > 0, "6: a read of state that was never changed")
        self._require(subgroup.stored_version == subgroup.version, "6: a read of a version that is not the newest")
        self._require(subgroup.stored.get(read.tile) == read.record, "6: a read from a wrong place or version")
        subgroup.held.discard(read.tile)
        subgroup.reads[read.tile] = read.op

    def _issued_write(self, write: WriteTile) -> None:
        subgroup = self._subgroups[write.tile.subgroup]
        location = write.record.location
        self._again.pop(write.tile, None)
        if self._save is not None:
            self._save.again.pop(write.tile, None)
        self._require(subgroup.slot == write.slot, "4: a write from a slot that is not its subgroup's")
        self._require(not subgroup.busy, "4: a write from a slot that a visit works on")
        self._require(not subgroup.reads, "4: a write from a slot that is being read into")
        self._require(write.tile not in subgroup.writes, "7: two writes of one tile")
        if subgroup.beside is not None:
            self._issued_write_beside(write, subgroup.beside)
            subgroup.writes[write.tile] = write.op
            return
        self._require(write.tile in subgroup.held, "7: a write of what is not the newest state")
        self._require(subgroup.version > subgroup.stored_version, "7: a write of state that is on storage")
        self._require(write.tile not in subgroup.arriving, "7: a second write of a tile that has arrived")
        self._require(write.record.step == subgroup.step, "7: a write under another step than that of its change")
        self._require(0 <= location.path < len(self._extents), "7: there is no such path")
        self._take(location)
        subgroup.writes[write.tile] = write.op

    def _issued_write_beside(self, write: WriteTile, beside: _Beside) -> None:
        nbytes = write.record.location.nbytes
        self._require(write.tile in beside.held, "21: a write of what is not in the staging slot")
        self._require(write.tile not in beside.arrived, "21: a second write of a tile that has arrived")
        self._require(write.record.step == beside.step, "21: a write under another step than that of its sweep")
        self._require(0 <= write.record.location.path < len(self._extents), "21: there is no such path")
        self._beside_slots[nbytes] += 1
        self._take(write.record.location)
        beside.writes[write.tile] = write.op
        if self._taken_up or any(path.failed for path in self._extents):
            return
        taken = sum((size + SECTOR_BYTES) * count for size, count in self._beside_slots.items())
        promised = self._plan.checkpoint_bytes if self._plan.has_room_for_checkpoints else 0
        room = sum(path.limit for path in self._extents) - self._plan.storage_bytes - self._lost_bytes
        self._require(taken + promised <= room, "25: a version beside the live one takes room of checkpoints")

    def _take_slot(self, number: int, slot: int) -> None:
        subgroup = self._subgroups[number]
        if subgroup.slot is not None:
            self._give_up(subgroup.slot)
        if self._owners[slot] is not None:
            self._give_up(slot)
        self._owners[slot] = number
        subgroup.slot = slot

    def _give_up(self, slot: int) -> None:
        owner = self._owners[slot]
        if owner is None:
            return
        subgroup = self._subgroups[owner]
        idle = not subgroup.busy and not subgroup.reads and not subgroup.writes
        self._require(idle, "4: a slot changes hands while operations use it")
        self._require(subgroup.stored_version == subgroup.version, "5: a slot changes hands with unsaved state")
        if subgroup.beside is not None:
            whole = len(subgroup.beside.arrived) == len(self._places[owner])
            self._require(whole, "21: a slot changes hands with a version that is not written")
            subgroup.beside.held.clear()
        subgroup.slot = None
        subgroup.held.clear()
        self._owners[slot] = None

    # Reporting ------------------------------------------------------------------------------------------------

    def _begin(self, sweep: Sweep) -> None:
        broken = self._is_broken
        self._require(broken or not self._unended, "2: a sweep begins before the last one's visits have ended")
        self._require(not self._is_ahead, "20: a sweep begins before one ahead has ended")
        self._require(broken or not self._unpublished, "26: weights of a confirmed version are not published")
        changes = any(visit.changes for visit in sweep.visits)
        used = sweep.step in (self._steps.values() if sweep.ahead else self._steps_ahead)
        self._require(not (changes and used), "24: a version number is used again")
        alike = all(visit.ahead is sweep.ahead for visit in sweep.visits)
        self._require(alike, "20: a visit ahead in a sweep that is not, or the other way round")
        self._sweep = sweep
        self._steps[sweep.number] = sweep.step
        self._visits = {visit.subgroup: visit for visit in sweep.visits}
        self._begun, self._unbegun = {}, {}
        if sweep.ahead:
            self._steps_ahead.add(sweep.step)
            self._admitted, self._may_run = set(), True
            self._beside_slots.clear()
            places = (self._places[visit.subgroup].values() for visit in sweep.visits)
            self._most_beside |= Counter(nbytes for each in places for _, nbytes in each)
            return
        self._unended = dict.fromkeys(self._visits)
        again = self._visits.keys() & self._confirmed
        self._require(not again, "23: a visit of what was confirmed")
        self.moved = [*self._confirmed]
        self._confirmed = {}
        order = ((visit.subgroup, place) for place, visit in enumerate(sweep.visits))
        self._unbegun = {number: (place, where) for number, place in order if (where := self._where(number))}

    @property
    def _is_ahead(self) -> bool:
        return self._sweep is not None and self._sweep.ahead

    @property
    def _is_broken(self) -> bool:
        return self._fatal is not None or bool(self._again)

    def _confirm(self, subgroups: Collection[int]) -> None:
        self._require(self._is_ahead or self._is_broken, "20: versions are confirmed of no sweep ahead")
        running = any(subgroup.run is not None for subgroup in self._subgroups)
        self._require(not running or self._is_broken, "20: versions are confirmed while one is being made")
        chosen = () if self._is_broken else subgroups
        self._sweep = None
        self._visits = {}
        for number in chosen:
            subgroup = self._subgroups[number]
            beside, subgroup.beside = subgroup.beside, None
            if beside is None:
                raise self._violation("23: a version is confirmed that is not there")
            subgroup.version += 1
            subgroup.step, subgroup.held, subgroup.arriving = beside.step, beside.held, beside.arrived
            self._confirmed[number] = self._unpublished[number] = None
            self._arrived(number)
        for subgroup in self._subgroups:
            self._revoke(subgroup)

    def _revoke(self, subgroup: _Subgroup) -> None:
        """Forget a version beside the live one, if there is one; its slot has nothing of use any more."""
        beside, subgroup.beside = subgroup.beside, None
        if beside is not None:
            self._leave(beside.arrived)
            self._revoked.update((op, self._location_of(op)) for op in beside.writes.values())

    def _location_of(self, op: int) -> Location:
        write = self._flying[op]
        if not isinstance(write, WriteTile):
            raise self._violation("1: an operation that is no write")
        return write.record.location

    def _arrived(self, number: int) -> None:
        """Take in that a tile has been written: when all have, they are the newest on storage."""
        subgroup = self._subgroups[number]
        if len(subgroup.arriving) < len(self._places[number]):
            return
        self._leave(subgroup.stored)
        subgroup.stored, subgroup.arriving = subgroup.arriving, {}
        subgroup.stored_version = subgroup.version
        self._for_save.pop(number, None)
        save = self._save
        if save is not None and number in save.flushes:
            del save.flushes[number]
            for written, stored in subgroup.stored.items():
                self._name(save, written, stored)

    def _where(self, number: int) -> str:
        """Return where a subgroup's state lies, or "" if something works on it that a visit has to wait for."""
        subgroup, save = self._subgroups[number], self._save
        if save is not None and (save.unwritten[number] or number in save.flushes):
            return ""
        if subgroup.busy or subgroup.copy is not None or subgroup.reads or subgroup.writes:
            return ""
        if self._plan.is_resident(number):
            return "home"
        is_there = subgroup.slot is not None and (subgroup.held or not subgroup.version)
        return "slot" if is_there else "storage"

    def _land(self, op: int) -> Operation:
        operation = self._flying.pop(op, None)
        if operation is None:
            raise self._violation("1: an operation is reported that is not in flight")
        if isinstance(operation, ReadTile | WriteTile):
            self._flying_bytes -= operation.record.location.nbytes
        return operation

    def _done(self, operation: Operation, checksum: int) -> None:
        match operation:
            case SaveTile() | CopyTile() | Sync() | Commit():
                self._done_save(operation, checksum)
            case ReadTile(tile=tile):
                subgroup = self._subgroups[tile.subgroup]
                del subgroup.reads[tile]
                subgroup.held.add(tile)
            case WriteTile(tile=tile, record=record):
                subgroup = self._subgroups[tile.subgroup]
                del subgroup.writes[tile]
                if operation.op in self._revoked:
                    self._extents[record.location.path].leave(record.location.offset)
                    del self._revoked[operation.op]
                    return
                if subgroup.beside is not None and tile in subgroup.beside.writes:
                    del subgroup.beside.writes[tile]
                    subgroup.beside.arrived[tile] = Record(record.location, record.step, checksum)
                    return
                if tile.subgroup in self._given_up:
                    self._extents[record.location.path].leave(record.location.offset)
                    self._end_given_up(tile.subgroup)
                    return
                subgroup.arriving[tile] = Record(record.location, record.step, checksum)
                self._arrived(tile.subgroup)
            case Run(visit=visit) if visit.ahead:
                subgroup = self._subgroups[visit.subgroup]
                subgroup.run, subgroup.held = None, set()
                places = set(self._places[visit.subgroup])
                subgroup.beside = _Beside(self._steps[operation.sweep], places)
            case Run(visit=visit):
                subgroup = self._subgroups[visit.subgroup]
                subgroup.run = None
                pushes = operation.weight_slot is not None and visit.changes
                if operation.weight_slot is not None and pushes:
                    self._weight_slots[operation.weight_slot].stage = "made"
                elif operation.weight_slot is not None:
                    del self._weight_slots[operation.weight_slot]
                if (
                    not pushes
                    and operation.sweep in self._steps
                    and self._sweep
                    and operation.sweep == self._sweep.number
                ):
                    self._unended.pop(visit.subgroup, None)
                if operation.gpu_slot is not None and visit.changes:
                    subgroup.gpu_holds = subgroup.gpu_ahead = True
                elif operation.gpu_slot is not None:
                    self._leave_gpu(visit.subgroup)
                if visit.changes:
                    self.moved.append(visit.subgroup)
                    subgroup.version += 1
                    subgroup.step = self._steps[operation.sweep]
                    subgroup.held = set(self._places[visit.subgroup])
                    self._leave(subgroup.arriving)
                    subgroup.arriving = {}
            case Transfer(what="state", subgroup=number):
                self._subgroups[number].copy = None
                if operation.way == "fetch":
                    self._subgroups[number].gpu_holds = True
                else:
                    self._leave_gpu(number)
            case Transfer() | AwaitPush():
                self._done_weights(operation)

    def _failed(self, operation: Operation, error: Exception) -> None:
        match operation:
            case SaveTile() | CopyTile() | Sync() | Commit():
                self._failed_save(operation)
            case WriteTile(tile=tile) if operation.op in self._revoked or self._subgroups[tile.subgroup].beside:
                self._failed_beside(operation)
            case WriteTile(tile=tile, record=record) if tile.subgroup in self._given_up:
                del self._subgroups[tile.subgroup].writes[tile]
                self._lose(record.location)
                self._end_given_up(tile.subgroup)
            case WriteTile(tile=tile, record=record) if tile.subgroup in self._for_save:
                del self._subgroups[tile.subgroup].writes[tile]
                self._lose(record.location)
                if self._save is not None:
                    self._save.again[tile] = None
            case WriteTile(tile=tile, record=record):
                del self._subgroups[tile.subgroup].writes[tile]
                self._extents[record.location.path].leave(record.location.offset)
                if isinstance(error, TierError):
                    self._extents[record.location.path].failed = True
                    self._again[tile] = None
                else:
                    self._fatal = self._fatal or error
            case ReadTile(tile=tile):
                del self._subgroups[tile.subgroup].reads[tile]
                self._fatal = self._fatal or error
            case Run(visit=visit):
                self._subgroups[visit.subgroup].run = None
                self._fatal = self._fatal or error
            case Transfer(subgroup=number) | AwaitPush(subgroup=number):
                if isinstance(operation, Transfer) and operation.what == "state":
                    self._subgroups[number].copy = None
                self._fatal = self._fatal or error

    def _failed_beside(self, write: WriteTile) -> None:
        """A version goes with a write of it that has failed, and with it bytes that nobody uses again."""
        subgroup = self._subgroups[write.tile.subgroup]
        del subgroup.writes[write.tile]
        self._lose(write.record.location)
        if self._revoked.pop(write.op, None) is None and subgroup.beside is not None:
            beside = subgroup.beside
            places = [record.location for record in beside.arrived.values()]
            places += [self._location_of(op) for op in beside.writes.values() if op != write.op]
            self._beside_slots -= Counter(place.nbytes for place in (*places, write.record.location))
            del beside.writes[write.tile]
            self._revoke(subgroup)

    def _end_given_up(self, number: int) -> None:
        if not self._subgroups[number].writes:
            del self._given_up[number], self._for_save[number]
            if self._save is not None:
                self._save.flushes.pop(number, None)

    def _leave(self, records: dict[TileId, Record]) -> None:
        for record in records.values():
            if record.location in self._holds:
                self._orphans[record.location] = None
                continue
            self._extents[record.location.path].leave(record.location.offset)

    # Violations -----------------------------------------------------------------------------------------------

    def stored(self) -> dict[TileId, tuple[Location, int, int]]:
        """Return where each tile of the newest whole versions lies, with its step and checksum."""
        return {
            tile: (record.location, record.step, record.checksum)
            for subgroup in self._subgroups
            for tile, record in subgroup.stored.items()
        }

    def _require(self, condition: object, rule: str) -> None:
        if not condition:
            raise self._violation(rule)

    def _violation(self, rule: str) -> InternalError:
        error = InternalError(f"rule {rule} (this is a bug in offload, please report it)")
        error.add_note("last operations and events:\n  " + "\n  ".join(f"{what!r:.300}" for what in self._story))
        return error


def _subgroup_of(operation: Transfer | AwaitPush | Run) -> int:
    return operation.visit.subgroup if isinstance(operation, Run) else operation.subgroup


def _weight_slot(operation: Transfer | AwaitPush | Run) -> int | None:
    return operation.through if isinstance(operation, Transfer) else operation.weight_slot
