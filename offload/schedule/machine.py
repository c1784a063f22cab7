"""The step as a state machine: events in, operations out. Pure: no clock, no I/O, no threads, no randomness.

It runs *sweeps*: a sequence of visits, each of one subgroup, that read or change its state. A step is a sweep of
updates; reading or loading state is a sweep too.

A machine and its index change in `Machine.handle` alone, so a run is its list of events: another machine that is
given them decides the same operations.

Books of their own stand beside it: `offload.schedule.staging` (phases of subgroups, the slots of staging memory),
`offload.schedule.runs` (what visits wait for whose state is whole), `offload.schedule.saving` (what checkpoints add),
`offload.schedule.scratch` (gradients and activations that pass through).

A step may be *open* before its rows are known. Visits of an open sweep run once they are admitted, each makes a
speculative version, beside the live one, and that is written to slots of its own at once. The live version stays
where it is on storage until `SealStep` confirms speculative versions or revokes them, and begins what is left of the
step; nothing of a revoked version is used again.

An `Evict` moves state whose home is memory to storage. A visit has it read to its home again, and frees its slots.

Invariants, verified by `check`, with those of the books:
  * a tile is written to a free slot of a store; the version before is freed when all of the new one is written, and
    not before it is confirmed;
  * after a fatal error no new operation is issued.

Non-goals: which path a tile goes to (`TileIndex.claim`), the order of visits (`offload.plan.visit_order`), memory
addresses (the executor knows them).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from offload.errors import InternalError, TierError, TierFullError, invariant
from offload.plan.budget import Plan
from offload.protocols import ScratchOwner, TileId
from offload.schedule.index import TileIndex, TileRecord
from offload.schedule.issued import Issued
from offload.schedule.operations import (
    AbortSave,
    Admit,
    Allocated,
    AwaitPush,
    BeginSave,
    BeginSweep,
    Discard,
    Done,
    Event,
    Evict,
    Extend,
    Failed,
    FreeHome,
    LimitGpuSlots,
    MakeSlots,
    Operation,
    OutcomeTold,
    PauseOpenSweep,
    ReadTile,
    ReleaseBuffer,
    ReleaseSave,
    RequestBuffer,
    Reshare,
    RunVisit,
    Save,
    SaveOperation,
    SaveTile,
    SealStep,
    Stop,
    StopEviction,
    Sweep,
    TakeOver,
    Transfer,
    Visit,
    WriteTile,
)
from offload.schedule.runs import RunQueues
from offload.schedule.saving import Saver
from offload.schedule.scratch import Scratch
from offload.schedule.staging import Phase, Staging, SubgroupState

MOST_MOVING = 4
"""Most subgroups that are moved from memory to storage, or back to their home, at once: enough for all paths."""


@dataclass(slots=True)
class _Flush:
    unwritten: int  # tiles
    step: int  # the version that is written
    records: list[tuple[TileId, TileRecord]] = field(default_factory=list)
    for_save: bool = False  # a save needs it, training does not
    speculative: bool = False  # the version that is written is speculative, and not confirmed yet
    reserved: Counter[int] = field(default_factory=Counter)  # slots of a revoked version that is still being written
    avoided: set[int] = field(default_factory=set)  # paths where a write of a `Evict` has failed or found no room
    error: Exception | None = None


@dataclass(slots=True)
class _Eviction:
    leave: Evict
    waiting: deque[int]  # subgroups whose flush has not begun
    stays: bool = False  # `StopEviction` came: begin no further flush
    error: Exception | None = None


class MachineListener:
    """Receives a machine's warnings and its fatal error; this base class ignores them."""

    def say_warning(self, message: str) -> None:
        """Receive, in words, that a path is no longer written to."""

    def say_broken(self, error: Exception) -> None:
        """Receive the error that breaks the machine, before `Machine.broken` is set."""


class Machine:
    """Runs sweeps over the subgroups of a plan."""

    def __init__(self, plan: Plan, index: TileIndex, listener: MachineListener | None = None) -> None:
        self.plan = plan
        self.index = index
        self.broken: Exception | None = None
        self.finished_sweep: Sweep | None = None
        """The last sweep once it has ended, or (with `failed` set) was given up; None once it is `OutcomeTold`."""
        self.failed = False
        """Whether the last sweep ended before all its visits had. A flush may fail after that: then only `broken`
        is set, and the sweep counts."""
        self.changed_subgroups: list[int] = []
        """Subgroups that the current (or last) sweep has changed, in that order; those come first whose speculative
        version `SealStep` confirmed. Empty after a `Stop` between sweeps, and where an open sweep breaks."""
        self.ended_visits: list[int] = []
        """Subgroups whose visit has ended in the current (or last) sweep, in that order: the weights that it changed
        have been written, or are queued on the lane h2d."""
        self._listener = listener or MachineListener()
        self.staging = Staging(plan)
        self._subgroups = self.staging.subgroups
        self._flushes: dict[int, _Flush] = {}
        self._sweep: Sweep | None = None
        self.speculative_versions: dict[int, list[tuple[TileId, TileRecord]] | None] = {}
        """Subgroups with a speculative version; the records of its tiles once all are written, else None."""
        self.is_paused = False  # whether no further visit of the open sweep begins
        self._reserved: Counter[int] = Counter()  # slots that are reserved for the open sweep, by payload bytes
        self._eviction: _Eviction | None = None
        self.finished_eviction: tuple[Evict, Exception | None] | None = None
        """The last leave that has ended, and why some state is still in memory; None once it is `OutcomeTold`."""
        self._evicted_waiting: deque[int] = deque()  # their visits wait until their state is read to its home
        self._stopped = False
        self._unfinished = 0  # visits of the sweep that have not ended
        self._issued = issued = Issued()
        self.scratch = {kind: Scratch(kind, plan, index, issued) for kind in plan.scratch}
        """What passes through buffers, of each kind."""
        self._runs = RunQueues(plan, self.staging, issued, self.scratch)
        self.saver = Saver(index, issued, self._runs)
        """The save under way, and what finished ones hold."""
        self._history: deque[Event] = deque(maxlen=32)

    # What the outside sees ------------------------------------------------------------------------------------

    @property
    def has_no_sweep(self) -> bool:
        """Whether no sweep is under way (flushes may still be)."""
        return self._sweep is None

    @property
    def is_open(self) -> bool:
        """Whether the sweep under way is open."""
        return self._sweep is not None and self._sweep.is_open

    @property
    def running_count(self) -> int:
        """Number of visits that run."""
        return self._runs.count

    @property
    def in_flight(self) -> int:
        """Number of operations that have been issued and not reported back."""
        return len(self._issued.in_flight)

    @property
    def slots(self) -> Mapping[int, int]:
        """The staging slot of each streamed subgroup that has one."""
        return {n: subgroup.slot for n, subgroup in enumerate(self._subgroups) if subgroup.slot is not None}

    @property
    def live_slots(self) -> Mapping[int, int]:
        """Staging slots that hold a live version; a speculative one may be revoked, so that its slot is no cache."""
        return {n: slot for n, slot in self.slots.items() if n not in self.speculative_versions}

    @property
    def phases(self) -> Sequence[Phase]:
        """Where each subgroup's state is."""
        return [subgroup.phase for subgroup in self._subgroups]

    def is_fresh(self, subgroup: int) -> bool:
        """Return whether a subgroup's state has never been changed."""
        return self._subgroups[subgroup].version is None

    @property
    def is_evicting(self) -> bool:
        """Whether state is leaving memory."""
        return self._eviction is not None

    def is_evicted(self, subgroup: int) -> bool:
        """Return whether state whose home is memory lies on storage now."""
        return self.plan.is_resident(subgroup) and self._subgroups[subgroup].phase is Phase.ABSENT

    def take_finished_eviction(self) -> tuple[Evict, Exception | None] | None:
        """Return the leave that has ended since the last call, if any, and why some state is still in memory."""
        finished = self.finished_eviction
        if finished is not None:
            self.handle(OutcomeTold(finished[0]))
        return finished

    def take_finished_sweep(self) -> Sweep | None:
        """Return the sweep that has finished since the last call, if any."""
        sweep = self.finished_sweep
        if sweep is not None:
            self.handle(OutcomeTold(sweep))
        return sweep

    def take_finished_save(self) -> tuple[Save, Exception | None] | None:
        """Return the save that has finished since the last call, if any, and why it failed."""
        finished = self.saver.finished_save
        if finished is not None:
            self.handle(OutcomeTold(finished[0]))
        return finished

    def handle(self, event: Event) -> None:
        """Change state by one event; `take_operations` then has the operations that follow from it."""
        self._history.append(event)
        try:
            match event:
                case BeginSweep(sweep):
                    self.index.try_again()
                    self._open(sweep) if sweep.is_open else self._begin(sweep)
                case Admit(subgroups):
                    self._admit(subgroups)
                case PauseOpenSweep():
                    self.is_paused = True
                case SealStep(confirmed, rest):
                    self._seal(confirmed, rest)
                case RequestBuffer(owner, fills) | ReleaseBuffer(owner, fills):
                    scratch = self.scratch[owner.kind]
                    is_too_late = not self.has_no_sweep and fills and scratch.is_promised
                    invariant(not is_too_late, f"{owner.kind}, which visits read, are filled during a sweep")
                    change = scratch.request if isinstance(event, RequestBuffer) else scratch.release
                    change(owner.number, fills=fills)
                case Discard(owner):
                    self._discard(owner)
                case BeginSave(save):
                    self._begin_save(save)
                case AbortSave(error):
                    self.saver.abort(error)
                case OutcomeTold(Sweep()):
                    self.finished_sweep = None
                    return
                case OutcomeTold(Save()):
                    self.saver.finished_save = None
                    return
                case OutcomeTold(Evict()):
                    self.finished_eviction = None
                    return
                case Evict():
                    self._begin_eviction(event)
                case StopEviction():
                    if self._eviction is not None:
                        self._eviction.stays = True
                case Extend(plan):
                    self._extend(plan)
                case MakeSlots():
                    self.index.make_slots()
                case Allocated(ends):
                    self.index.note_allocated(ends)
                case LimitGpuSlots(count):
                    self._runs.limit_gpu_slots(count)
                case Reshare(shares):
                    self.index.reshare(shares)
                case TakeOver():
                    self._take_over(event)
                case ReleaseSave(number):
                    self.saver.release(number)
                case Done(op, written):
                    if not self._done(self._issued.end(op), written) and self.broken is None:
                        return  # one tile of several: nothing to decide
                case Failed(op, error):
                    self._failed(self._issued.end(op), error)
                case Stop(error):
                    self._stopped = True
                    if self.finished_sweep is not None:  # its caller has not been told that it ended: it fails now
                        self.failed = True
                    elif self.has_no_sweep:
                        self.changed_subgroups = []
                    self._break(error)
            self._advance()
        except InternalError as error:
            error.add_note("last events:\n  " + "\n  ".join(f"{event!r:.200}" for event in self._history))
            raise

    def take_operations(self) -> list[Operation]:
        """Return the operations to be started now, in order; each is returned once."""
        return self._issued.take()

    def check(self) -> None:
        """Verify the invariants that the module states.

        Raises:
            InternalError: If one does not hold.
        """
        self.staging.check(self.plan)
        self._runs.check(self._issued.in_flight.values())
        if self.broken is None:
            for scratch in self.scratch.values():
                scratch.check(self._issued.in_flight.values())
        for number, subgroup in enumerate(self._subgroups):
            invariant((subgroup.phase is Phase.FLUSHING) == (number in self._flushes), f"flush of {number} is lost")
            if subgroup.visit is not None:
                self._check_waits(number, subgroup, subgroup.visit)
        may_be_left = self.is_open or self.broken is not None
        invariant(may_be_left or not self.speculative_versions, "a speculative version is left")
        for number, records in self.speculative_versions.items():
            flush = self._flushes.get(number)
            is_written = records is not None or (flush is not None and flush.speculative)
            invariant(is_written or self.broken is not None, f"a version of subgroup {number} is not written")
        self.index.check()

    def _check_waits(self, number: int, subgroup: SubgroupState, visit: Visit) -> None:
        """Verify that a visit that has not begun waits for an event or in a queue, so that it will begin."""
        invariant(visit.subgroup == number, f"the visit of {number} is filed wrongly")
        phase = subgroup.phase
        waits = phase in (Phase.FETCHING, Phase.FLUSHING, Phase.BUSY) or self.saver.must_wait(number)
        waits = waits or (visit.speculative and phase is not Phase.DIRTY and not self.staging.is_admitted(number))
        waits = waits or not self._runs.has_its_scratch(visit)
        waits = waits or self.broken is not None  # then no visit joins a queue any more
        absent_queue = self._evicted_waiting if self.plan.is_resident(number) else self.staging.line
        queue = absent_queue if phase is Phase.ABSENT else self._runs.queue_of(visit)
        if not waits and number not in queue:
            invariant(False, f"subgroup {number} is {phase} and waits for nothing")

    # Events ---------------------------------------------------------------------------------------------------

    def _extend(self, plan: Plan) -> None:
        """Go on with a plan that has more subgroups or slots, or other devices for updates."""
        invariant(
            self.has_no_sweep and self.saver.under_way is None, "the plan changes between sweeps and saves only"
        )
        invariant(not self._issued.in_flight, "the plan changes while memory is in use")
        self.plan = plan
        self.index.plan_more_slots(plan.slot_counts)
        self.staging.use_plan(plan)
        self._runs.use_plan(plan)
        for scratch in self.scratch.values():
            scratch.use_plan(plan)

    def _begin(self, sweep: Sweep, confirmed: Iterable[int] = ()) -> None:
        """Begin a sweep that is not open; of `confirmed` subgroups the step's versions are live already."""
        invariant(self._sweep is None, "a sweep begins while another is under way")
        invariant(self.finished_sweep is None, "a sweep begins before the last one was taken")
        subgroups = [visit.subgroup for visit in sweep.visits]
        invariant(len(set(subgroups)) == len(subgroups), "a sweep visits a subgroup twice")
        self._sweep = sweep
        self._unfinished = len(subgroups)
        self.changed_subgroups, self.ended_visits = [*confirmed], []
        for visit in sweep.visits:
            subgroup = self._subgroups[visit.subgroup]
            subgroup.visit = visit
            if subgroup.phase is not Phase.ABSENT:
                self._request_scratch(visit)
            match subgroup.phase:
                case Phase.RESIDENT if self.saver.must_wait(visit.subgroup):
                    self.saver.write_first(visit.subgroup)
                case Phase.ABSENT:
                    self._await_state(visit.subgroup)
                case Phase.RESIDENT | Phase.READY | Phase.DIRTY:
                    self._runs.enqueue_when_readable(visit.subgroup)

    # Open sweeps

    def _open(self, sweep: Sweep) -> None:
        """Begin an open sweep with the first of its visits, as many as the stores have room for new versions of."""
        invariant(self._sweep is None and self.finished_sweep is None, "a sweep begins while another is under way")
        self._sweep, self.is_paused = sweep, self.broken is not None
        for place, visit in enumerate(sweep.visits):
            subgroup = visit.subgroup
            is_streamed = not self.plan.is_resident(subgroup) and not self.is_fresh(subgroup)
            is_plain = visit.changes and not (visit.gpu or visit.overwrites or visit.weight_bytes)
            # Not by `invariant`: its message costs more than a visit.
            if not (visit.speculative and is_streamed and is_plain):
                raise InternalError(f"{visit} is speculative (this is a bug in offload)")
            slot_counts = self._slot_counts(subgroup)
            if self.broken is not None or not self.index.reserve(slot_counts, lent=True):
                break
            self._reserved += slot_counts
            self._subgroups[subgroup].visit, self.staging.priorities[subgroup] = visit, (True, place)
            if self._subgroups[subgroup].phase is Phase.ABSENT:
                self.staging.line.append(subgroup)
            self._flush_live(subgroup)

    def _flush_live(self, number: int) -> None:
        """Flush a dirty subgroup that an open sweep visits: a speculative version leaves the live one on storage."""
        subgroup = self._subgroups[number]
        if self.is_open and self.broken is None and subgroup.visit is not None and subgroup.phase is Phase.DIRTY:
            self._flush(number)

    def _admit(self, subgroups: Iterable[int]) -> None:
        """Let visits of the open sweep run as soon as their state is in memory."""
        for number in subgroups:
            if self.is_open and not self.staging.is_admitted(number) and self._subgroups[number].visit is not None:
                self.staging.admit(number)
                self._runs.enqueue_when_readable(number)

    def _seal(self, confirmed: Collection[int], rest: Sweep | None) -> None:
        """Make confirmed versions live, revoke the others, and begin what is left of the step."""
        if self.broken is not None:
            self._drop_open()
            confirmed = ()
        else:
            self._end_open(confirmed)
        if rest is not None:
            self._begin(rest, confirmed)

    def _end_open(self, confirmed: Collection[int]) -> None:
        """End the open sweep: these speculative versions become live, all others are revoked."""
        invariant(self.is_open and not self.running_count, "versions are confirmed while they are being made")
        invariant(self.speculative_versions.keys() >= set(confirmed), "a version is confirmed that is not there")
        sweep, self._sweep = self._sweep, None
        self._clear_queues()
        versions, self.speculative_versions = self.speculative_versions, {}
        for subgroup in confirmed:
            self._subgroups[subgroup].version = sweep.step if sweep else 0
            records = versions.pop(subgroup)
            if records is None:  # it is still being written: its flush goes on as that of a live version
                self._flushes[subgroup].speculative = False
                writes = (op for op in self._issued.in_flight.values() if isinstance(op, WriteTile))
                in_flight = (op.record for op in writes if op.owner is None and op.tile.subgroup == subgroup)
                for record in (*in_flight, *(record for _, record in self._flushes[subgroup].records)):
                    self.index.loan_to_plan(record.location)
            else:
                self._commit(records)
        for subgroup, records in versions.items():
            if records is not None:  # else `_flushed_speculative` does it
                self._revoke(subgroup, records)
        for subgroup, flush in self._flushes.items():
            if flush.speculative and not flush.reserved:  # revoked: its writes may still fail, and lose slots
                flush.reserved = self._slot_counts(subgroup)
                self._reserved -= flush.reserved
        self.index.unreserve(self._reserved, lent=True)
        self._reserved.clear()

    def _slot_counts(self, subgroup: int) -> Counter[int]:
        """Return how many slots the tiles of a subgroup take, by payload bytes."""
        return Counter(nbytes for _, _, nbytes in self.plan.layout.subgroups[subgroup].tiles)

    def _drop_open(self) -> None:
        """Forget the open sweep, if there is one, as the machine has broken."""
        if self.is_open:
            self._sweep = None
        self.speculative_versions = {}
        self._clear_queues()

    def _revoke(self, subgroup: int, records: Iterable[tuple[TileId, TileRecord]]) -> None:
        """Give back the slots of a speculative version, and the staging slot that holds it."""
        for _, record in records:
            self.index.abandon(record.location)
        self.staging.vacate(subgroup)

    def _commit(self, records: Iterable[tuple[TileId, TileRecord]]) -> None:
        """Make a version live, as all its tiles are written; only now the slots of the one before become free."""
        for tile, record in records:
            self.index.commit(tile, record)

    def _clear_queues(self) -> None:
        """Empty all queues of visits: the sweep has ended."""
        self._evicted_waiting.clear()
        self._runs.clear()
        self.staging.clear_line()
        for subgroup in self._subgroups:
            subgroup.visit = None

    # State that is moved from its home in memory to storage, and back

    def _begin_eviction(self, leave: Evict) -> None:
        """Begin to move state from memory to storage; dirty staging slots are flushed at once."""
        invariant(self._sweep is None and Phase.BUSY not in self.phases, "state leaves memory during a visit")
        invariant(self.saver.under_way is None, "state leaves memory while it is saved")
        invariant(self._eviction is None, "state leaves memory twice at once")
        self.finished_eviction = None
        for number in leave.subgroups:
            resident = self.plan.is_resident(number) and self._subgroups[number].phase is Phase.RESIDENT
            invariant(resident and not self.is_fresh(number), f"subgroup {number} has no state in memory to leave it")
        if self.broken is not None:
            self.finished_eviction = leave, self.broken
            return
        slot_counts = sum((self._slot_counts(number) for number in leave.subgroups), Counter[int]())
        invariant(self.index.reserve(slot_counts, lent=True), "state leaves memory for stores without room")
        self._eviction = _Eviction(leave, deque(leave.subgroups))
        for number in list(self.staging.dirty):
            if self.broken is None:
                self._flush(number)

    def _advance_eviction(self) -> None:
        """Flush the next subgroups of a leave; after the last one, empty the staging slots and end the leave."""
        leaving = self._eviction
        if leaving is None:
            return
        while leaving.waiting and sum(map(self.plan.is_resident, self._flushes)) < MOST_MOVING:
            number = leaving.waiting.popleft()
            if leaving.stays or leaving.error:
                self.index.unreserve(self._slot_counts(number), lent=True)
                continue
            records = self.saver.held_version(self.plan.layout.subgroups[number], self._subgroups[number].version)
            if records:  # a checkpoint holds this version: nothing has to be written
                self.staging.set_phase(number, Phase.FLUSHING)
                self.index.unreserve(self._slot_counts(number), lent=True)
                invariant(self.index.reserve(self._slot_counts(number)), "room that was set aside is gone")
                for tile, record in records.items():
                    self.index.make_newest(tile, record)
                self._end_flush_of_home(number)
            else:
                self._flush(number)
        if leaving.waiting or any(map(self.plan.is_resident, self._flushes)):
            return
        if not (leaving.stays or leaving.error):
            if any(subgroup.phase in (Phase.FETCHING, Phase.FLUSHING) for subgroup in self._subgroups):
                return  # perhaps the flush of a version that was revoked
            for number, subgroup in enumerate(self._subgroups):
                if subgroup.slot is not None:
                    self.staging.vacate(number)
        self._eviction, self.finished_eviction = None, (leaving.leave, leaving.error)

    def _end_flush_of_home(self, number: int) -> None:
        """Free the memory of a subgroup's home: its state is whole on storage, and is read back before a visit."""
        self.staging.set_phase(number, Phase.ABSENT)
        if self.broken is None:
            self._issued.issue(FreeHome(self._issued.new_op(), number))
        if self._subgroups[number].visit is not None:
            self._await_state(number)

    def _await_state(self, number: int) -> None:
        """Queue the visit of an absent subgroup until its state can be fetched, to its home or to a staging slot."""
        (self._evicted_waiting if self.plan.is_resident(number) else self.staging.line).append(number)

    def _fetch_evicted(self) -> None:
        """Fetch to its home the state that visits wait for, of at most `MOST_MOVING` subgroups at once."""
        phases = (subgroup.phase for n, subgroup in enumerate(self._subgroups) if self.plan.is_resident(n))
        fetching = sum(phase is Phase.FETCHING for phase in phases) if self._evicted_waiting else 0
        while self._evicted_waiting and fetching < MOST_MOVING:
            fetching += 1
            self._fetch(self._evicted_waiting.popleft(), None)

    def _note_home(self, number: int) -> None:
        """Free the slots of a subgroup whose state is in memory again, or is about to be overwritten there."""
        for tile, _, _ in self.plan.layout.subgroups[number].tiles:
            self.index.free_and_unreserve(tile)
        self._enter_whole_phase(number, changed=False)

    # Saves

    def _begin_save(self, save: Save) -> None:
        """Begin to save the state between two sweeps; dirty staging slots are flushed, for the save alone."""
        invariant(self._sweep is None and Phase.BUSY not in self.phases, "a save begins during a visit")
        versions = [subgroup.version for subgroup in self._subgroups if subgroup.version is not None]
        invariant(save.empty or len(versions) == len(self._subgroups), "a save begins while there is fresh state")
        invariant(self._eviction is None, "a save begins while state leaves memory")
        dirty = list(self.staging.dirty)
        unsaved = dict.fromkeys([*dirty, *(n for n, flush in self._flushes.items() if not flush.speculative)])
        if self.broken is not None:
            self.saver.finished_save = save, self.broken
        elif self.saver.begin(save, self.plan, unsaved, versions):
            for subgroup in () if save.empty else dirty:
                self._flush(subgroup, for_save=True)

    def _take_over(self, event: TakeOver) -> None:
        """Go on from checkpoints' stores: their records are held, and some of them are the newest versions."""
        invariant(self.has_no_sweep and not self._issued.in_flight, "state is exchanged while it is in use")
        for path, limit_bytes in event.stores.items():
            holders = Counter(r.location for records in event.held_records.values() for r in records.values())
            self.index.replace_store(path, limit_bytes, {x: n for x, n in holders.items() if x.path == path})
        invariant(self.index.has_planned_room(), "stores that were taken over have no room for the plan")
        self.saver.held_records.update({number: dict(records) for number, records in event.held_records.items()})
        for tile, record in event.records.items():
            subgroup = tile.subgroup
            is_streamed = not self.plan.is_resident(subgroup)
            invariant(is_streamed, f"state of subgroup {subgroup} at home in memory is exchanged")
            self.staging.vacate(subgroup)
            self.staging.dirty.pop(subgroup, None)
            self._subgroups[subgroup].version = record.step
            self.index.make_newest(tile, record)

    def _done(self, operation: Operation, written: TileRecord | None) -> bool:
        """Account for an operation that ended well; return False if no decision can follow from its end."""
        if isinstance(operation, WriteTile | SaveTile):
            self.index.note_written(operation.record.location)
        match operation:
            case ReadTile(owner=ScratchOwner() as owner) | WriteTile(owner=ScratchOwner() as owner):
                if self.scratch[owner.kind].transfer_ended(operation, written):
                    self._note_scratch_read(operation.tile.subgroup, owner)
            case ReadTile(tile=tile):
                fetched = self._subgroups[tile.subgroup]
                fetched.unread -= 1
                if fetched.unread:
                    return False
                if self.plan.is_resident(tile.subgroup):
                    self._note_home(tile.subgroup)
                else:
                    self._enter_whole_phase(tile.subgroup, changed=False)
            case WriteTile(tile=tile, record=record):
                self._flushes[tile.subgroup].records.append((tile, written or record))
                return self._flushed_tile(tile.subgroup)
            case RunVisit():
                self._ran(operation)
            case Transfer(way="fetch"):
                self._runs.enqueue_fetched(operation)
            case Transfer(subgroup=subgroup, what="state"):  # back from the GPU
                self._runs.free_slot(operation.transfer_slot, gpu=True)
                self._enter_whole_phase(subgroup, changed=True)
            case Transfer(subgroup=subgroup):  # weights, now queued on the lane h2d
                self._unfinished -= 1
                self.ended_visits.append(subgroup)
                if self.broken is None:
                    self._runs.await_push(operation)
            case AwaitPush(transfer_slot=transfer_slot):
                self._runs.free_slot(transfer_slot, gpu=False)
            case FreeHome():
                return False
            case _:
                self.saver.operation_ended(operation, written, None)
        return True

    def _flushed_tile(self, subgroup: int) -> bool:
        """Count off a tile of a flush, written or failed; after the last, commit or undo it all, and return True."""
        flush = self._flushes[subgroup]
        flush.unwritten -= 1
        if flush.unwritten:
            return False
        del self._flushes[subgroup]
        if flush.speculative:
            self._flushed_speculative(subgroup, flush)
        elif flush.error is None and self.plan.is_resident(subgroup):
            self._commit(flush.records)
            self._end_flush_of_home(subgroup)
        elif flush.error is None:
            self._commit(flush.records)
            self.saver.flushed(flush.records, subgroup)
            self._enter_whole_phase(subgroup, changed=False)
        else:
            for _, new in flush.records:
                self.index.abandon(new.location)
            self._enter_whole_phase(subgroup, changed=True)
            if self.plan.is_resident(subgroup):
                self.index.unreserve(self._slot_counts(subgroup), lent=True)
                if self._eviction is not None:  # None once the machine is broken
                    self._eviction.error = flush.error
            else:
                self.saver.abort(flush.error)
        return True

    def _flushed_speculative(self, subgroup: int, flush: _Flush) -> None:
        """End the flush of a speculative version: keep its records for `SealStep`; revoke one that failed."""
        self.index.unreserve(flush.reserved, lent=True)
        self.staging.set_phase(subgroup, Phase.READY)
        if flush.error is None and subgroup in self.speculative_versions:
            self.speculative_versions[subgroup] = flush.records
            return
        self._revoke(subgroup, flush.records)
        if self._subgroups[subgroup].visit is not None:  # of a sweep that has begun since
            self.staging.enqueue_for_slot(subgroup)

    def _abort_version(self, subgroup: int, error: Exception) -> None:
        """Drop a speculative version that cannot be written, and begin no further visit of the open sweep."""
        self._flushes[subgroup].error = error
        if subgroup in self.speculative_versions:  # else it was revoked before
            del self.speculative_versions[subgroup]
            self.is_paused = True

    # Scratch

    def _request_scratch(self, visit: Visit) -> None:
        """Ask for the scratch that a visit reads, as its subgroup's state is in memory or about to be fetched."""
        if visit.reads is None:
            return
        scratch, owner = self.scratch[visit.reads.kind], visit.reads.number
        invariant(not scratch.is_filling(owner), f"a visit reads {visit.reads}, which is being filled")
        if not scratch.is_wanted(owner):
            # Streamed state keeps a staging slot meanwhile, for which other visits wait.
            scratch.request(owner, fills=False, hurries=not self.plan.is_resident(visit.subgroup))

    def _note_scratch_read(self, number: int, owner: ScratchOwner) -> None:
        """Queue the visit that reads an owner's scratch, now in its buffer, if the subgroup's state is whole, too."""
        subgroup = self._subgroups[number]
        is_whole = subgroup.phase in (Phase.READY, Phase.DIRTY, Phase.RESIDENT) and not self.saver.must_wait(number)
        if is_whole and subgroup.visit is not None and subgroup.visit.reads == owner:
            self._runs.enqueue_when_readable(number)

    def _discard(self, owner: ScratchOwner) -> None:
        scratch = self.scratch[owner.kind]
        invariant(not scratch.is_wanted(owner.number), f"{owner} is discarded while somebody is to read it")
        scratch.discard(owner.number)

    def _ran(self, run: RunVisit) -> None:
        """End a visit's run: discard what it read; free or flush its `transfer_slot`."""
        visit, number = run.visit, run.visit.subgroup
        self._runs.device_of(visit).runs -= 1
        if visit.speculative:
            self.staging.set_phase(number, Phase.DIRTY)
            if self.broken is None:
                self.speculative_versions[number] = None
                self._flush(number, speculative=True)
            return
        if visit.reads is not None:
            self.scratch[visit.reads.kind].release(visit.reads.number, fills=False)
            self._discard(visit.reads)
        if visit.changes:
            subgroup = self._subgroups[number]
            subgroup.version = self._sweep.step if self._sweep else subgroup.version or 0
            self.changed_subgroups.append(number)
        transfer_slot = run.transfer_slot
        flushes = visit.changes and transfer_slot is not None
        if not (flushes and not visit.gpu):  # else it ends when the weights are on the lane h2d
            self._unfinished -= 1
            self.ended_visits.append(number)
        if transfer_slot is not None and not visit.changes:
            self._runs.free_slot(transfer_slot, gpu=visit.gpu)
        if not (flushes and visit.gpu):  # else once the state is back in host memory
            self._enter_whole_phase(number, changed=visit.changes)
        if flushes and transfer_slot is not None and self.broken is None:
            # Once the machine is broken, the GPU keeps its old weights, and the visit does not end.
            self._runs.issue_transfer(visit, "flush", transfer_slot)

    def _enter_whole_phase(self, subgroup: int, *, changed: bool) -> None:
        """Set the phase of a subgroup whose state is whole in memory and no longer in use, and queue its visit."""
        if self.plan.is_resident(subgroup):
            self.staging.set_phase(subgroup, Phase.RESIDENT)
        elif changed or subgroup in self.staging.dirty:
            self.staging.mark_dirty(subgroup)
            self._flush_live(subgroup)  # the GPU's copy out may end when the next sweep is open
        else:
            self.staging.set_phase(subgroup, Phase.READY)
        self._runs.enqueue_when_readable(
            subgroup
        )  # a sweep may have begun while the state was still being copied out

    def _failed(self, operation: Operation, error: Exception) -> None:
        """Handle a failed operation: write to another path, or give up what training can do without; else break."""
        if isinstance(operation, SaveOperation):
            self.saver.operation_ended(operation, None, error)
            return
        if isinstance(operation, ReadTile | WriteTile) and operation.owner is not None:
            scratch = self.scratch[operation.owner.kind]
            if not scratch.is_promised:
                scratch.failed(operation, error)
            elif isinstance(operation, ReadTile) or not self._rewrite_elsewhere(operation, error):
                self._break(error)
            return
        if isinstance(operation, WriteTile) and self._flushes[operation.tile.subgroup].speculative:
            self.index.abandon_unwritable(operation.record.location, is_full=isinstance(error, TierFullError))
            self._abort_version(operation.tile.subgroup, error)
            self._flushed_tile(operation.tile.subgroup)
            return
        if isinstance(operation, WriteTile) and operation.slot is None:
            # The state is still in memory, where it stays if no path takes it: each is tried once.
            flush, location = self._flushes[operation.tile.subgroup], operation.record.location
            self.index.abandon_unwritable(location, is_full=isinstance(error, TierFullError))
            flush.avoided.add(location.path)
            extent = operation.buffer_offset, location.nbytes
            if flush.error is not None or not self._write(operation.tile, None, *extent, avoid=flush.avoided):
                flush.error = flush.error or error
                self._flushed_tile(operation.tile.subgroup)
            return
        if isinstance(operation, WriteTile) and self._flushes[operation.tile.subgroup].for_save:
            # Training can do without this flush: the save may be given up, and the path stays in use.
            location = operation.record.location
            self.index.abandon_unwritable(location, is_full=isinstance(error, TierFullError))
            source = operation.tile, operation.slot, operation.buffer_offset, location.nbytes
            avoided = self.saver.retry(operation, error)
            if avoided is not None and self._write(*source, avoid=avoided):
                return
            self._flushes[operation.tile.subgroup].error = error
            self.saver.abort(error)
            self._flushed_tile(operation.tile.subgroup)
            return
        if isinstance(operation, WriteTile) and self._rewrite_elsewhere(operation, error):
            return
        if isinstance(operation, RunVisit):
            self._runs.device_of(operation.visit).runs -= 1
            subgroup = operation.visit.subgroup
            if operation.transfer_slot is None or not operation.visit.gpu:
                self.staging.set_phase(subgroup, Phase.RESIDENT if self.plan.is_resident(subgroup) else Phase.DIRTY)
        self._break(error)

    def _rewrite_elsewhere(self, write: WriteTile, error: Exception) -> bool:
        """Write a tile, which memory still holds, to another path after a failed write; return whether one takes it.

        The path that failed is not written to again; one that is full keeps the room that is there already.
        """
        location = write.record.location
        if not isinstance(error, TierError):
            return False
        grows_no_more = isinstance(error, TierFullError) and not self.index.has_room_on_disk(location)
        if grows_no_more:
            self.index.abandon_unwritable(location, is_full=True)
            self.index.stop_growing(location.path)
        else:
            self.index.retire(location.path)
            self.index.abandon(location)
        if self.broken is not None:
            return False
        if write.owner is not None:
            is_issued = self.scratch[write.owner.kind].write_again(write)
        else:
            is_issued = self._write(write.tile, write.slot, write.buffer_offset, location.nbytes)
        if is_issued and not grows_no_more:
            self._listener.say_warning(f"{error}; tiles go to other paths from now on")
        return is_issued

    def _break(self, error: Exception) -> None:
        """Issue nothing any more because of a fatal error; operations in flight still report back."""
        if self.broken is None:
            if self.is_open:
                self.changed_subgroups = []  # these the step before has changed, which did not fail
            self._listener.say_broken(error)
            self.broken = error
            for operation in self._issued.close():
                if isinstance(operation, RunVisit):
                    self._runs.device_of(operation.visit).runs -= 1
            self.saver.end_broken(error)
            if self._eviction is not None:
                self.finished_eviction, self._eviction = (self._eviction.leave, error), None

    # Decisions ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Issue what an event has made possible, and end a sweep whose visits have all ended, or that is given up."""
        if self.broken is None:
            self.saver.advance()
            self._advance_eviction()
            self._fetch_evicted()
            self._assign_slots()
        for scratch in self.scratch.values():
            if self.broken is None:
                scratch.advance()
                if scratch.unplaced_tile is not None:
                    self._break(_full_error(scratch.unplaced_tile))
        if self.broken is None:  # or a flush has just found no room
            self._runs.start_transfers()
            if self._sweep is not None and not (self.is_paused and self._sweep.is_open):
                self._runs.start(self._sweep)
        if self.is_open:
            if self.broken is not None and self._ends_broken_sweep():
                self._drop_open()
        elif self._sweep is not None and (self._ends_broken_sweep() or not self._unfinished):
            self.finished_sweep, self._sweep = self._sweep, None
            self.failed = self._unfinished > 0
            self._clear_queues()

    def _ends_broken_sweep(self) -> bool:
        """Return whether a broken machine ends its sweep: after `Stop`, or when no caller's memory is in use."""
        if self.broken is None:
            return False
        return self._stopped or all(isinstance(o, SaveOperation) for o in self._issued.in_flight.values())

    def _assign_slots(self) -> None:
        """Give staging slots to the next visits; flush only as many dirty ones as the remaining visits need."""
        if self.is_paused and self.is_open:
            return
        line = self.staging.line
        while line:
            slot = self.staging.vacate_clean()
            if slot is None and self.is_open:
                slot = self.staging.preempt_slot(line[0])
            if slot is None:
                break
            self._fetch(line.popleft(), slot)
        if not line:
            return
        flushing = sum(self._subgroups[number].visit is None for number in self._flushes)
        for number in list(self.staging.dirty):
            if flushing >= len(line) or self.broken is not None:
                return
            subgroup = self._subgroups[number]
            if subgroup.phase is Phase.DIRTY and subgroup.visit is None:
                flushing += 1
                self._flush(number)

    def _fetch(self, number: int, slot: int | None) -> None:
        """Read state from storage to a staging slot, or home (None); not if it is fresh or will be overwritten."""
        subgroup = self._subgroups[number]
        if subgroup.visit is not None:
            self._request_scratch(subgroup.visit)
        if slot is not None:
            self.staging.assign_slot(number, slot)
        if subgroup.version is None or (subgroup.visit is not None and subgroup.visit.overwrites):
            self._note_home(number) if slot is None else self._enter_whole_phase(number, changed=False)
            return
        tiles = self.plan.layout.subgroups[number].tiles
        self.staging.set_phase(number, Phase.FETCHING)
        subgroup.unread = len(tiles)
        for tile, offset, _ in tiles:
            record = self.index.get(tile)
            if record is None:
                raise InternalError(f"{tile} was changed but never written, and its memory is gone")
            self._issued.issue(ReadTile(self._issued.new_op(), tile, slot, offset, record))

    def _flush(self, subgroup: int, *, for_save: bool = False, speculative: bool = False) -> None:
        """Write a subgroup's state to free slots; without room, fail the save, version or leave, or else break."""
        tiles = self.plan.layout.subgroups[subgroup].tiles
        slot = self._subgroups[subgroup].slot
        self.staging.set_phase(subgroup, Phase.FLUSHING)
        self.staging.dirty.pop(subgroup, None)
        step = self._sweep.step if speculative and self._sweep else self._subgroups[subgroup].version or 0
        self._flushes[subgroup] = flush = _Flush(len(tiles), step, for_save=for_save, speculative=speculative)
        for number, (tile, offset, nbytes) in enumerate(tiles):
            if not self._write(tile, slot, offset, nbytes):
                error = _full_error(tile)
                if not (for_save or speculative or slot is None):
                    self._break(error)
                    return
                if speculative:
                    self._abort_version(subgroup, error)
                flush.error = error
                flush.unwritten -= len(tiles) - number - 1
                self._flushed_tile(subgroup)
                return

    def _write(self, tile: TileId, slot: int | None, offset: int, nbytes: int, avoid: Collection[int] = ()) -> bool:
        """Write a tile of a flush to a slot on no path of `avoid`; return whether there is one."""
        flush = self._flushes[tile.subgroup]
        if flush.speculative:
            location = self.index.claim_loan(nbytes, avoid)
        else:
            location = self.index.claim(nbytes, avoid, lent=slot is None)
        if location is None:
            return False
        record = TileRecord(location, flush.step)
        self._issued.issue(WriteTile(self._issued.new_op(), tile, slot, offset, record))
        return True


def _full_error(tile: TileId) -> TierFullError:
    return TierFullError("write", tier="storage", path="(all)", detail=f"no path has room left for {tile}")
