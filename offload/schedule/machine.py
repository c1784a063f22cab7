"""The step as a state machine: events in, operations out. Pure: no clock, no I/O, no threads, no randomness.

It runs *sweeps*: a sequence of visits, each of one subgroup, that read or change its state. A step is a sweep of
updates; reading or loading state is a sweep too.

A machine and its index change in `Machine.handle` alone, so a run is its list of events: another machine that is
given them decides the same operations.

It keeps part of its state in other modules: `offload.schedule.staging` (phases of subgroups, staging slots),
`offload.schedule.runs` (what a visit waits for once its state is whole), `offload.schedule.saving` (checkpoints),
`offload.schedule.scratch` (gradients and activations that pass through buffers).

Updates may begin before the step's rows (scalars, norm) are known: the step's sweep is then *open*. A visit of an
open sweep runs once it is admitted. It makes a speculative version beside the live one, and this version is written
to slots of its own at once. The live version stays where it is on storage. `SealStep` confirms or revokes each
speculative version, and begins what is left of the step. Nothing of a revoked version is used again.

An `Evict` moves state whose home is memory to storage. The next visit has that state read to its home again, and
frees its store slots.

Invariants, verified by `check`, with those of these modules:
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
from offload.schedule.staging import Phase, Priority, Staging, SubgroupState

MOST_MOVING = 4
"""Most subgroups that are moved from memory to storage, or back to their home, at once: enough for all paths."""


@dataclass(slots=True)
class _Flush:
    """The flush of one subgroup's state to slots of stores."""

    unwritten: int  # tiles whose write has not ended
    version: int  # that is written
    records: list[tuple[TileId, TileRecord]] = field(default_factory=list)  # of tiles that have been written
    for_save: bool = False  # only a save needs it: training can go on without
    speculative: bool = False  # the version that is written is speculative, and not confirmed yet
    # Of a revoked version that is still being written, the slots that stay reserved for it, by payload bytes:
    reserved: Counter[int] = field(default_factory=Counter)
    avoided_paths: set[int] = field(default_factory=set)  # where a write of an eviction has failed or found no room
    error: Exception | None = None


@dataclass(slots=True)
class _Eviction:
    """The eviction under way: resident state on its way to storage."""

    request: Evict
    waiting: deque[int]  # subgroups whose flush has not begun
    is_stopped: bool = False  # `StopEviction` came: begin no further flush
    error: Exception | None = None

    @property
    def is_cut_short(self) -> bool:
        """Whether the state of some subgroups stays in memory."""
        return self.is_stopped or self.error is not None


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
        """Subgroups that the current (or last) sweep has changed: first those whose speculative version `SealStep`
        confirmed, then the others in the order of their changes. Empty after a `Stop` between sweeps, and where an
        open sweep breaks."""
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
        self._reserved: Counter[int] = Counter()  # how many slots the open sweep has reserved, by payload bytes
        self._eviction: _Eviction | None = None
        self.finished_eviction: tuple[Evict, Exception | None] | None = None
        """The last eviction that has ended, and its error (None if it had none); None once it is `OutcomeTold`."""
        self._evicted_waiting: deque[int] = deque()  # evicted subgroups whose visits wait for a fetch to their home
        self._stopped = False  # `Stop` came
        self._unended_visits = 0  # of the sweep
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

    def held_weights(self, subgroup: int) -> Mapping[TileId, TileRecord]:
        """Return the records with which checkpoints hold a subgroup's fp32 weights in its present version.

        {} unless checkpoints hold all tiles of these weights.
        """
        weight_tiles = self.plan.layout.subgroups[subgroup].weight_tiles
        return self.saver.held_version(weight_tiles, self._subgroups[subgroup].version)

    @property
    def is_evicting(self) -> bool:
        """Whether an eviction is under way."""
        return self._eviction is not None

    def is_evicted(self, subgroup: int) -> bool:
        """Return whether a subgroup's state, whose home is memory, lies on storage now."""
        return self.plan.is_resident(subgroup) and self._subgroups[subgroup].phase is Phase.ABSENT

    def take_finished_eviction(self) -> tuple[Evict, Exception | None] | None:
        """Return the eviction that has ended since the last call, if any, with its error (None if it had none).

        After an error, or a `StopEviction`, some state may still be in memory.
        """
        finished = self.finished_eviction
        if finished is not None:
            # The machine forgets it by an event, so that a replay of the events forgets it, too.
            self.handle(OutcomeTold(finished[0]))  # names the request
        return finished

    def take_finished_sweep(self) -> Sweep | None:
        """Return the sweep that has finished since the last call, if any; `failed` says whether it ended early."""
        sweep = self.finished_sweep
        if sweep is not None:
            self.handle(OutcomeTold(sweep))  # an event, as in `take_finished_eviction`
        return sweep

    def take_finished_save(self) -> tuple[Save, Exception | None] | None:
        """Return the save that has finished since the last call, if any, with its error (None if it succeeded)."""
        finished = self.saver.finished_save
        if finished is not None:
            self.handle(OutcomeTold(finished[0]))  # an event that names the request, as in `take_finished_eviction`
        return finished

    def handle(self, event: Event) -> None:
        """Change state by one event; `take_operations` then has the operations that follow from it."""
        self._history.append(event)
        try:
            if self._apply(event):
                self._advance()
        except InternalError as error:
            error.add_note("last events:\n  " + "\n  ".join(f"{event!r:.200}" for event in self._history))
            raise

    def _apply(self, event: Event) -> bool:
        """Change state as an event says; return whether decisions can follow (`_advance` makes them)."""
        match event:
            case BeginSweep(sweep):
                self.index.try_again()  # a path that was full may have room by now
                if sweep.is_open:
                    self._begin_open_sweep(sweep)
                else:
                    self._begin_sweep(sweep)
            case Admit(subgroups):
                self._admit_visits(subgroups)
            case PauseOpenSweep():
                self.is_paused = True
            case SealStep(confirmed, rest):
                self._seal_step(confirmed, rest)
            case RequestBuffer() | ReleaseBuffer():
                self._request_or_release_buffer(event)
            case Discard(owner):
                self._discard_scratch(owner)
            case BeginSave(save):
                self._begin_save(save)
            case AbortSave(error):
                self.saver.abort(error)
            case OutcomeTold(finished):
                self._forget_outcome(finished)
                return False  # no decision depends on it
            case Evict():
                self._begin_eviction(event)
            case StopEviction():
                if self._eviction is not None:
                    self._eviction.is_stopped = True
            case Extend(plan):
                self._use_larger_plan(plan)
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
                decisions_can_follow = self._handle_done(self._issued.end(op), written)
                # A broken machine's sweep ends when nothing is in flight, whatever ends last.
                return decisions_can_follow or self.broken is not None
            case Failed(op, error):
                self._handle_failure(self._issued.end(op), error)
            case Stop(error):
                self._stop(error)
        return True

    def _forget_outcome(self, finished: Sweep | Save | Evict) -> None:
        """Forget how a sweep, a save or an eviction has ended: its caller knows."""
        match finished:
            case Sweep():
                self.finished_sweep = None
            case Save():
                self.saver.finished_save = None
            case Evict():
                self.finished_eviction = None

    def _request_or_release_buffer(self, event: RequestBuffer | ReleaseBuffer) -> None:
        """Tell the owner's scratch that a caller wants its buffer, or has filled or read it."""
        owner, scratch = event.owner, self.scratch[event.owner.kind]
        # Visits read only scratch that has planned room (gradients).
        is_too_late = not self.has_no_sweep and event.fills and scratch.is_planned
        invariant(not is_too_late, f"{owner.kind}, which visits read, are filled during a sweep")
        if isinstance(event, RequestBuffer):
            scratch.request(owner.number, fills=event.fills)
        else:
            scratch.release(owner.number, fills=event.fills)

    def _stop(self, error: Exception) -> None:
        """Break the machine as `Stop` says.

        A sweep under way fails; an open one is forgotten, as nobody waits for it yet. An ended sweep fails, too, if
        its caller has not been told that it ended. Between sweeps none fails.
        """
        self._stopped = True
        if self.finished_sweep is not None:  # its caller has not been told that it ended: it fails now
            self.failed = True
        elif self.has_no_sweep:
            # No sweep fails here, so what the last one changed must not be reported as half updated.
            self.changed_subgroups = []
        self._break(error)

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
        if self.broken is None:  # else transfers that it counts may never have started
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
        awaits_state = phase in (Phase.FETCHING, Phase.FLUSHING, Phase.BUSY)
        # A dirty subgroup is flushed at once, admitted or not.
        awaits_admission = visit.speculative and phase is not Phase.DIRTY and not self.staging.is_admitted(number)
        awaits_event = (
            awaits_state
            or awaits_admission
            or self.saver.must_wait(number)
            or not self._runs.has_its_scratch(visit)
            or self.broken is not None  # then no visit joins a queue any more
        )
        absent_queue = self._evicted_waiting if self.plan.is_resident(number) else self.staging.line
        queue = absent_queue if phase is Phase.ABSENT else self._runs.queue_of(visit)
        # Not by `invariant` alone: its message would be made for every visit.
        if not awaits_event and number not in queue:
            invariant(False, f"subgroup {number} is {phase} and waits for nothing")

    # Events ---------------------------------------------------------------------------------------------------

    def _use_larger_plan(self, plan: Plan) -> None:
        """Go on with a plan that has more subgroups or slots, or other devices for updates."""
        is_between = self.has_no_sweep and self.saver.under_way is None
        invariant(is_between, "the plan changes between sweeps and saves only")
        invariant(not self._issued.in_flight, "the plan changes while memory is in use")
        self.plan = plan
        self.index.plan_more_slots(plan.slot_counts)
        self.staging.use_plan(plan)
        self._runs.use_plan(plan)
        for scratch in self.scratch.values():
            scratch.use_plan(plan)

    def _begin_sweep(self, sweep: Sweep, confirmed: Iterable[int] = ()) -> None:
        """Begin a sweep that is not open: give each of its subgroups its visit, and queue those that can go on.

        The scratch that visits read is requested. `changed_subgroups` and `ended_visits` begin anew.

        Args:
            sweep: The sweep.
            confirmed: Subgroups of the same step whose new versions `SealStep` has just made live.
        """
        invariant(self._sweep is None, "a sweep begins while another is under way")
        invariant(self.finished_sweep is None, "a sweep begins before the last one was taken")
        subgroups = [visit.subgroup for visit in sweep.visits]
        invariant(len(set(subgroups)) == len(subgroups), "a sweep visits a subgroup twice")
        self._sweep = sweep
        self._unended_visits = len(subgroups)
        self.changed_subgroups = [*confirmed]
        self.ended_visits = []
        for visit in sweep.visits:
            subgroup = self._subgroups[visit.subgroup]
            subgroup.visit = visit
            if subgroup.phase is not Phase.ABSENT:  # else `_begin_fetch` requests the scratch
                self._request_scratch(visit)
            match subgroup.phase:  # in other phases the visit is queued when the state is whole and not in use
                case Phase.RESIDENT if self.saver.must_wait(visit.subgroup):  # the save queues it in the end
                    self.saver.write_first(visit.subgroup)
                case Phase.ABSENT:
                    self._enqueue_for_fetch(visit.subgroup)
                case Phase.RESIDENT | Phase.READY | Phase.DIRTY:
                    self._runs.enqueue_when_readable(visit.subgroup)

    # Open sweeps

    def _begin_open_sweep(self, sweep: Sweep) -> None:
        """Begin an open sweep, with as many of its visits as the stores have room for.

        Each visit needs slots for a speculative version beside the live one, which are reserved here. The first visit
        without room and all later ones are left out. `changed_subgroups` and `ended_visits` stay those of the sweep
        before, until `SealStep` begins the rest of the step.
        """
        invariant(self._sweep is None and self.finished_sweep is None, "a sweep begins while another is under way")
        self._sweep = sweep
        self.is_paused = False
        for place, visit in enumerate(sweep.visits):
            self._check_may_be_speculative(visit)
            subgroup = visit.subgroup
            slot_counts = self._slot_counts(subgroup)
            # A flush of an earlier visit may have broken the machine.
            if self.broken is not None or not self.index.reserve(slot_counts, lent=True):
                break
            self._reserved += slot_counts
            self._subgroups[subgroup].visit = visit
            self.staging.priorities[subgroup] = Priority(is_not_admitted=True, place=place)
            if self._subgroups[subgroup].phase is Phase.ABSENT:
                self.staging.line.append(subgroup)  # at the end: no visit is admitted yet, so `place` is its order
            self._flush_if_live_is_dirty(subgroup)

    def _check_may_be_speculative(self, visit: Visit) -> None:
        """Verify that a visit of an open sweep can make a version beside the live one, which stays on storage."""
        is_on_storage = not self.plan.is_resident(visit.subgroup) and not self.is_fresh(visit.subgroup)
        is_plain_update = visit.changes and not (visit.gpu or visit.overwrites or visit.weight_bytes)
        # Not by `invariant`: its message costs more than a visit.
        if not (visit.speculative and is_on_storage and is_plain_update):
            raise InternalError(f"{visit} is speculative (this is a bug in offload)")

    def _flush_if_live_is_dirty(self, number: int) -> None:
        """Flush a subgroup that an open sweep visits, if it is dirty.

        The visit overwrites the state in the staging slot with a speculative version. As this may be revoked, the
        live version has to lie on storage before.
        """
        subgroup = self._subgroups[number]
        if self.is_open and self.broken is None and subgroup.visit is not None and subgroup.phase is Phase.DIRTY:
            self._begin_flush(number)

    def _admit_visits(self, subgroups: Iterable[int]) -> None:
        """Let visits of the open sweep run as soon as their state is in memory.

        Subgroups that were admitted before, or that have no visit in the sweep, are ignored.
        """
        for number in subgroups:
            if self.is_open and not self.staging.is_admitted(number) and self._subgroups[number].visit is not None:
                self.staging.admit(number)
                self._runs.enqueue_when_readable(number)

    def _seal_step(self, confirmed: Collection[int], rest: Sweep | None) -> None:
        """Make confirmed versions live, revoke the others, and begin what is left of the step."""
        if self.broken is not None:
            self._forget_open_sweep()
            confirmed = ()
        else:
            self._end_open_sweep(confirmed)
        if rest is not None:  # begun by a broken machine, too: `_end_sweep_if_due` ends it, failed if it has visits
            self._begin_sweep(rest, confirmed)

    def _end_open_sweep(self, confirmed: Collection[int]) -> None:
        """End the open sweep: speculative versions of `confirmed` subgroups become live, all others are revoked."""
        invariant(self.is_open and not self.running_count, "versions are confirmed while they are being made")
        invariant(self.speculative_versions.keys() >= set(confirmed), "a version is confirmed that is not there")
        sweep, self._sweep = self._sweep, None
        self._clear_queues()
        versions, self.speculative_versions = self.speculative_versions, {}
        for subgroup in confirmed:
            # There is a sweep, as it is open: the 0 is for type checkers, which cannot tell.
            self._subgroups[subgroup].version = sweep.step if sweep else 0
            records = versions.pop(subgroup)  # `versions` keeps those that are revoked below
            if records is None:  # it is still being written
                self._confirm_flush(subgroup)
            else:
                self._commit_version(records)
        for subgroup, records in versions.items():
            if records is not None:  # else it is revoked when its flush ends (`_end_speculative_flush`)
                self._revoke_version(subgroup, records)
        self._unreserve_unused_loans()

    def _confirm_flush(self, subgroup: int) -> None:
        """Let the flush of a confirmed version go on as that of a live one.

        Its slots were claimed as loans, and become the plan's: those being written, and those already written.
        """
        flush = self._flushes[subgroup]
        flush.speculative = False
        for operation in self._issued.in_flight.values():
            if not isinstance(operation, WriteTile) or operation.owner is not None:  # with an owner: of scratch
                continue
            if operation.tile.subgroup == subgroup:
                self.index.loan_to_plan(operation.record.location)
        for _, record in flush.records:
            self.index.loan_to_plan(record.location)

    def _unreserve_unused_loans(self) -> None:
        """Unreserve the room that was reserved for the open sweep, except that of revoked flushes under way.

        A write of a revoked flush may still fail. Its slot is then lost, and needs the reserved room to be replaced.
        """
        for subgroup, flush in self._flushes.items():
            if flush.speculative and not flush.reserved:  # with `reserved` it was revoked in an earlier open sweep
                flush.reserved = self._slot_counts(subgroup)
                self._reserved -= flush.reserved
        self.index.unreserve(self._reserved, lent=True)
        self._reserved.clear()

    def _slot_counts(self, subgroup: int) -> Counter[int]:
        """Return how many slots the tiles of a subgroup take, by payload bytes."""
        return Counter(nbytes for _, _, nbytes in self.plan.layout.subgroups[subgroup].tiles)

    def _forget_open_sweep(self) -> None:
        """Forget the open sweep, its speculative versions and its queues, as the machine has broken.

        A second call, for the sweep's `SealStep`, changes nothing.
        """
        if self.is_open:
            self._sweep = None
        self.speculative_versions = {}
        self._clear_queues()

    def _revoke_version(self, subgroup: int, records: Iterable[tuple[TileId, TileRecord]]) -> None:
        """Revoke a speculative version: free the store slots of its `records` and the staging slot that it is in."""
        for _, record in records:
            self.index.abandon(record.location)
        self.staging.vacate(subgroup)

    def _commit_version(self, records: Iterable[tuple[TileId, TileRecord]]) -> None:
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

    def _begin_eviction(self, request: Evict) -> None:
        """Begin to move state from memory to storage: reserve slots for it, and flush dirty staging slots at once.

        `_advance_eviction` flushes the homes, a few at a time, and empties the staging slots in the end.
        """
        invariant(self._sweep is None and Phase.BUSY not in self.phases, "state leaves memory during a visit")
        invariant(self.saver.under_way is None, "state leaves memory while it is saved")
        invariant(self._eviction is None, "state leaves memory twice at once")
        self.finished_eviction = None
        for number in request.subgroups:
            resident = self.plan.is_resident(number) and self._subgroups[number].phase is Phase.RESIDENT
            invariant(resident and not self.is_fresh(number), f"subgroup {number} has no state in memory to leave it")
        if self.broken is not None:
            self.finished_eviction = request, self.broken
            return
        slot_counts = sum((self._slot_counts(number) for number in request.subgroups), Counter[int]())
        invariant(self.index.reserve(slot_counts, lent=True), "state leaves memory for stores without room")
        self._eviction = _Eviction(request, deque(request.subgroups))
        for number in list(self.staging.dirty):
            if self.broken is None:  # a flush before it may have found no room
                self._begin_flush(number)

    def _advance_eviction(self) -> None:
        """Evict the next subgroups; after the last one, empty the staging slots and end the eviction.

        If it is cut short, the subgroups that still wait stay at home, and staging slots keep their content.
        """
        eviction = self._eviction
        if eviction is None:
            return
        # A flush of a resident subgroup is one of this eviction; flushes of others are of staging slots.
        while eviction.waiting and sum(map(self.plan.is_resident, self._flushes)) < MOST_MOVING:
            number = eviction.waiting.popleft()
            if eviction.is_cut_short:  # it stays at home, and does not need what `_begin_eviction` has reserved
                self.index.unreserve(self._slot_counts(number), lent=True)
            else:
                self._evict_subgroup(number)
        if eviction.waiting or any(map(self.plan.is_resident, self._flushes)):
            return
        if not eviction.is_cut_short:
            # A slot is emptied once its transfers have ended, perhaps the writes of a version that was revoked.
            if any(subgroup.phase in (Phase.FETCHING, Phase.FLUSHING) for subgroup in self._subgroups):
                return
            for number, subgroup in enumerate(self._subgroups):
                if subgroup.slot is not None:
                    self.staging.vacate(number)
        self._eviction = None
        self.finished_eviction = eviction.request, eviction.error

    def _evict_subgroup(self, number: int) -> None:
        """Flush a subgroup from its home to slots of stores.

        If checkpoints hold all tiles of this version already, nothing is written: their slots become the newest ones.
        """
        subgroup_layout, slot_counts = self.plan.layout.subgroups[number], self._slot_counts(number)
        held_records = self.saver.held_version(subgroup_layout.tiles, self._subgroups[number].version)
        if not held_records:
            self._begin_flush(number)
            return
        self.staging.set_phase(number, Phase.FLUSHING)
        # No slot is claimed, so what `_begin_eviction` reserved stays reserved until `free_and_unreserve`; but not as
        # loans, which only a claim uses up.
        self.index.unreserve(slot_counts, lent=True)
        invariant(self.index.reserve(slot_counts), "room that was set aside is gone")
        for tile, record in held_records.items():
            self.index.make_newest(tile, record)
        self._end_flush_of_home(number)

    def _end_flush_of_home(self, number: int) -> None:
        """Free the memory of a subgroup's home: its state is whole on storage, and is read back before a visit."""
        self.staging.set_phase(number, Phase.ABSENT)
        if self.broken is None:
            self._issued.issue(FreeHome(self._issued.new_op(), number))
        if self._subgroups[number].visit is not None:
            self._enqueue_for_fetch(number)

    def _enqueue_for_fetch(self, number: int) -> None:
        """Queue the visit of an absent subgroup until its state can be fetched, to its home or to a staging slot."""
        queue = self._evicted_waiting if self.plan.is_resident(number) else self.staging.line
        queue.append(number)

    def _fetch_evicted(self) -> None:
        """Fetch evicted state that visits wait for to its home; at most `MOST_MOVING` subgroups at once."""
        if not self._evicted_waiting:
            return
        phases = (subgroup.phase for n, subgroup in enumerate(self._subgroups) if self.plan.is_resident(n))
        fetching = sum(phase is Phase.FETCHING for phase in phases)
        while self._evicted_waiting and fetching < MOST_MOVING:
            fetching += 1
            self._begin_fetch(self._evicted_waiting.popleft(), slot=None)

    def _end_fetch_to_home(self, number: int) -> None:
        """Free the store slots of a subgroup whose state is at home again, or will be overwritten there.

        The visit that waits for it is queued to run.
        """
        for tile, _, _ in self.plan.layout.subgroups[number].tiles:
            self.index.free_and_unreserve(tile)
        self._enter_whole_phase(number, changed=False)

    # Saves

    def _begin_save(self, save: Save) -> None:
        """Begin to save the state between two sweeps; dirty staging slots are flushed, for the save alone."""
        invariant(self._sweep is None and Phase.BUSY not in self.phases, "a save begins during a visit")
        # By subgroup: none is left out, unless the save is empty, which needs no versions.
        versions = [subgroup.version for subgroup in self._subgroups if subgroup.version is not None]
        invariant(save.empty or len(versions) == len(self._subgroups), "a save begins while there is fresh state")
        invariant(self._eviction is None, "a save begins while state leaves memory")
        dirty = list(self.staging.dirty)
        # Where a speculative version is flushed (a revoked one, by now), the live one lies on storage.
        flushing = [number for number, flush in self._flushes.items() if not flush.speculative]
        unsaved = dict.fromkeys([*dirty, *flushing])
        if self.broken is not None:
            self.saver.finished_save = save, self.broken
        elif self.saver.begin(save, self.plan, unsaved, versions):
            for subgroup in () if save.empty else dirty:
                self._begin_flush(subgroup, for_save=True)

    def _take_over(self, event: TakeOver) -> None:
        """Go on from checkpoints' stores: their records are held, and some of them are the newest versions."""
        invariant(self.has_no_sweep and not self._issued.in_flight, "state is exchanged while it is in use")
        # How many checkpoints hold each slot.
        holds = Counter(r.location for records in event.held_records.values() for r in records.values())
        for path, limit_bytes in event.stores.items():
            holds_of_path = {location: count for location, count in holds.items() if location.path == path}
            self.index.replace_store(path, limit_bytes, holds_of_path)
        invariant(self.index.has_planned_room(), "stores that were taken over have no room for the plan")
        self.saver.held_records.update({number: dict(records) for number, records in event.held_records.items()})
        for tile, record in event.records.items():
            subgroup = tile.subgroup
            is_streamed = not self.plan.is_resident(subgroup)
            invariant(is_streamed, f"state of subgroup {subgroup} at home in memory is exchanged")
            self.staging.vacate(subgroup)  # at its first tile; at the others it has no slot any more
            self.staging.dirty.pop(subgroup, None)
            self._subgroups[subgroup].version = record.step
            self.index.make_newest(tile, record)

    def _handle_done(self, operation: Operation, written: TileRecord | None) -> bool:
        """Account for an operation that ended well; return False if no decision can follow from its end.

        `written` is the record of a tile that was written, with its checksum; None if the operation's own one holds.
        """
        if isinstance(operation, WriteTile | SaveTile):
            self.index.note_written(operation.record.location)
        match operation:
            case ReadTile(owner=ScratchOwner() as owner) | WriteTile(owner=ScratchOwner() as owner):
                is_now_in_buffer = self.scratch[owner.kind].transfer_ended(operation, written)
                if is_now_in_buffer:
                    self._enqueue_reader_of(owner, operation.tile.subgroup)
            case ReadTile(tile=tile):
                return self._end_tile_read(tile.subgroup)
            case WriteTile(tile=tile, record=record):
                self._flushes[tile.subgroup].records.append((tile, written or record))
                return self._end_tile_write(tile.subgroup)
            case RunVisit():
                self._end_run(operation)
            case Transfer(way="fetch"):
                self._runs.enqueue_fetched(operation)
            case Transfer(subgroup=subgroup, what="state"):  # back from the GPU
                self._runs.free_slot(operation.transfer_slot, gpu=True)
                self._enter_whole_phase(subgroup, changed=True)
            case Transfer(subgroup=subgroup):  # a push of weights, which is queued on the lane h2d
                self._end_visit(subgroup)
                if self.broken is None:
                    self._runs.await_push(operation)
            case AwaitPush(transfer_slot=transfer_slot):
                self._runs.free_slot(transfer_slot, gpu=False)
            case FreeHome():
                return False
            case _:
                self.saver.operation_ended(operation, written, error=None)
        return True

    def _end_tile_read(self, number: int) -> bool:
        """Count off a tile of a fetch; return whether it was the last one, after which the state is whole."""
        subgroup = self._subgroups[number]
        subgroup.unread -= 1
        if subgroup.unread:
            return False
        if self.plan.is_resident(number):
            self._end_fetch_to_home(number)
        else:
            self._enter_whole_phase(number, changed=False)
        return True

    def _end_visit(self, number: int) -> None:
        """Count off a visit that has ended."""
        self._unended_visits -= 1
        self.ended_visits.append(number)

    def _end_tile_write(self, subgroup: int) -> bool:
        """Count off a tile of a flush, written or failed; return whether it was the last, which ends the flush."""
        flush = self._flushes[subgroup]
        flush.unwritten -= 1
        if flush.unwritten:
            return False
        del self._flushes[subgroup]
        if flush.speculative:
            self._end_speculative_flush(subgroup, flush)
        elif flush.error is not None:
            self._undo_flush(subgroup, flush, flush.error)
        else:
            self._commit_version(flush.records)
            if self.plan.is_resident(subgroup):
                self._end_flush_of_home(subgroup)
            else:
                self.saver.hold_flushed(flush.records, subgroup)
                self._enter_whole_phase(subgroup, changed=False)
        return True

    def _undo_flush(self, subgroup: int, flush: _Flush, error: Exception) -> None:
        """Abandon what a failed flush has written, and fail the save or the eviction that it was for.

        Flushes of speculative versions end in `_end_speculative_flush`. A failed flush that training needs breaks the
        machine, and does not come here either.
        """
        for _, record in flush.records:
            self.index.abandon(record.location)
        self._enter_whole_phase(subgroup, changed=True)
        if not self.plan.is_resident(subgroup):  # the flush of a staging slot was for a save, that of a home evicts
            self.saver.abort(error)
            return
        self.index.unreserve(self._slot_counts(subgroup), lent=True)  # as `_begin_eviction` has reserved them
        if self._eviction is not None:  # None once the machine is broken
            self._eviction.error = error

    def _end_speculative_flush(self, subgroup: int, flush: _Flush) -> None:
        """End a speculative version's flush: keep its records for `SealStep`, or revoke the version.

        It is revoked if a write has failed, or if it was revoked while it was being written.
        """
        self.index.unreserve(flush.reserved, lent=True)  # empty if its sweep is still open
        self.staging.set_phase(subgroup, Phase.READY)
        if flush.error is None and subgroup in self.speculative_versions:
            self.speculative_versions[subgroup] = flush.records
            return
        self._revoke_version(subgroup, flush.records)
        # Its staging slot is free. A visit of a sweep that has begun since waits for one, to fetch the live version.
        if self._subgroups[subgroup].visit is not None:
            self.staging.enqueue_for_slot(subgroup)

    def _abort_version(self, subgroup: int, error: Exception) -> None:
        """Give up a speculative version of which a write has failed, and begin no further visit of the open sweep.

        Nothing is lost: the step updates the live version instead. `_end_speculative_flush` frees the slots.
        """
        self._flushes[subgroup].error = error
        if subgroup in self.speculative_versions:  # else it was revoked, or another write of it has failed before
            del self.speculative_versions[subgroup]
            self.is_paused = True

    # Scratch

    def _request_scratch(self, visit: Visit) -> None:
        """Request the scratch that a visit reads, once its subgroup's state is in memory or about to be fetched.

        Not earlier: scratch that is read keeps a buffer.
        """
        if visit.reads is None:
            return
        scratch, owner = self.scratch[visit.reads.kind], visit.reads.number
        invariant(not scratch.is_filling(owner), f"a visit reads {visit.reads}, which is being filled")
        if not scratch.is_wanted(owner):  # a visit that began to wait during a flush of its state has asked before
            # It hurries for streamed state, which meanwhile keeps a staging slot that other visits wait for.
            scratch.request(owner, fills=False, hurries=not self.plan.is_resident(visit.subgroup))

    def _enqueue_reader_of(self, owner: ScratchOwner, number: int) -> None:
        """Queue the visit that reads an owner's scratch, now in its buffer, if the subgroup's state is whole, too."""
        subgroup = self._subgroups[number]
        is_whole = subgroup.phase in (Phase.READY, Phase.DIRTY, Phase.RESIDENT) and not self.saver.must_wait(number)
        # No visit reads activations, all of whose tiles name subgroup 0: then the owners differ.
        if is_whole and subgroup.visit is not None and subgroup.visit.reads == owner:
            self._runs.enqueue_when_readable(number)

    def _discard_scratch(self, owner: ScratchOwner) -> None:
        """Discard an owner's scratch; an error if somebody reads it or waits for it."""
        scratch = self.scratch[owner.kind]
        invariant(not scratch.is_wanted(owner.number), f"{owner} is discarded while somebody is to read it")
        scratch.discard(owner.number)

    def _end_run(self, run: RunVisit) -> None:
        """End a visit's run: discard the scratch that it read, and start to copy out what it changed.

        Usually the visit ends with its run. Two kinds copy something out of their transfer slot. A visit on the CPU
        pushes changed weights to the GPU, and ends when the push is on its lane. A visit on the GPU copies changed
        state to host memory, and until that has ended the subgroup stays BUSY.
        """
        visit, number, transfer_slot = run.visit, run.visit.subgroup, run.transfer_slot
        self._runs.device_of(visit).runs -= 1
        if visit.speculative:
            self._end_speculative_run(number)
            return
        if visit.reads is not None:
            self.scratch[visit.reads.kind].release(visit.reads.number, fills=False)
            self._discard_scratch(visit.reads)
        if visit.changes:
            subgroup = self._subgroups[number]
            # If there is no sweep, a `Stop` has ended it, and the version is not used any more: any number will do,
            # but not None, which says that the state is fresh.
            subgroup.version = self._sweep.step if self._sweep else subgroup.version or 0
            self.changed_subgroups.append(number)
        copies_out = visit.changes and transfer_slot is not None
        pushes_weights, copies_state = copies_out and not visit.gpu, copies_out and visit.gpu
        if not pushes_weights:  # else the visit ends when the weights are on the lane h2d
            self._end_visit(number)
        if transfer_slot is not None and not visit.changes:
            self._runs.free_slot(transfer_slot, gpu=visit.gpu)
        if not copies_state:  # else the state is whole once it is back in host memory
            self._enter_whole_phase(number, changed=visit.changes)
        if visit.changes and transfer_slot is not None and self.broken is None:
            # Once the machine is broken, the GPU keeps its old weights, and the visit does not end.
            self._runs.issue_transfer(visit, "flush", transfer_slot)

    def _end_speculative_run(self, number: int) -> None:
        """Write the speculative version that a run has made."""
        self.staging.set_phase(number, Phase.DIRTY)  # not noted in `staging.dirty`: it is flushed right here
        if self.broken is None:
            self.speculative_versions[number] = None  # not all of its tiles are written yet
            self._begin_flush(number, speculative=True)

    def _enter_whole_phase(self, subgroup: int, *, changed: bool) -> None:
        """Set the phase of a subgroup whose state is whole in memory and in use by nobody, and queue its next visit.

        Args:
            subgroup: Number of the subgroup.
            changed: Whether the state in its staging slot is not on storage: a visit has changed it, or its flush has
                failed.
        """
        if self.plan.is_resident(subgroup):
            self.staging.set_phase(subgroup, Phase.RESIDENT)
        elif changed or subgroup in self.staging.dirty:  # `dirty`: changed by an earlier visit, only read by this one
            self.staging.mark_dirty(subgroup)
            self._flush_if_live_is_dirty(subgroup)  # the GPU's copy out may end when the next sweep is open
        else:
            self.staging.set_phase(subgroup, Phase.READY)
        # A sweep may have begun while the state was still being copied out.
        self._runs.enqueue_when_readable(subgroup)

    def _handle_failure(self, operation: Operation, error: Exception) -> None:
        """Handle a failed operation: write to another path, or give up what training can do without; else break."""
        if isinstance(operation, SaveOperation):
            self.saver.operation_ended(operation, written=None, error=error)
        elif isinstance(operation, ReadTile | WriteTile) and operation.owner is not None:
            self._handle_scratch_failure(operation, operation.owner, error)
        elif isinstance(operation, WriteTile):
            self._handle_failed_write(operation, error)
        else:
            if isinstance(operation, RunVisit):
                self._undo_run(operation)
            self._break(error)

    def _handle_scratch_failure(self, operation: ReadTile | WriteTile, owner: ScratchOwner, error: Exception) -> None:
        """Handle a failed transfer of scratch.

        Without planned room (activations) training goes on. Else (gradients) a failed write goes to another path; a
        failed read, or no other path, breaks the machine.
        """
        scratch = self.scratch[owner.kind]
        if not scratch.is_planned:
            scratch.transfer_failed(operation, error)
        elif isinstance(operation, ReadTile) or not self._rewrite_elsewhere(operation, error):
            self._break(error)

    def _handle_failed_write(self, write: WriteTile, error: Exception) -> None:
        """Handle a failed write of state, by what its flush was for.

        Training can do without a flush for a speculative version, an eviction or a save. Any other one is written to
        another path, or breaks the machine.
        """
        flush = self._flushes[write.tile.subgroup]
        if flush.speculative:
            self._give_up_slot(write, error)
            self._abort_version(write.tile.subgroup, error)
            self._end_tile_write(write.tile.subgroup)
        elif write.slot is None:  # from a home: it is evicted
            self._retry_eviction_write(write, flush, error)
        elif flush.for_save:
            self._retry_save_write(write, flush, error)
        elif not self._rewrite_elsewhere(write, error):
            self._break(error)

    def _give_up_slot(self, write: WriteTile, error: Exception) -> None:
        """Give up the store slot of a failed write; its path stays in use."""
        self.index.abandon_unwritable(write.record.location, is_full=isinstance(error, TierFullError))

    def _retry_eviction_write(self, write: WriteTile, flush: _Flush, error: Exception) -> None:
        """Write a tile of an eviction to a path that has not failed; if there is none, the state stays at home."""
        self._give_up_slot(write, error)
        flush.avoided_paths.add(write.record.location.path)
        # With an error, another tile of the flush has found no path: the state stays at home in any case.
        if flush.error is None and self._write_again(write, flush.avoided_paths):
            return
        flush.error = flush.error or error
        self._end_tile_write(write.tile.subgroup)

    def _retry_save_write(self, write: WriteTile, flush: _Flush, error: Exception) -> None:
        """Write a tile that only a save needs to another slot, or give the save up: training can do without."""
        self._give_up_slot(write, error)
        avoided_paths = self.saver.count_failed_write(write, error)
        if avoided_paths is not None and self._write_again(write, avoided_paths):
            return
        flush.error = error
        self.saver.abort(error)
        self._end_tile_write(write.tile.subgroup)

    def _undo_run(self, run: RunVisit) -> None:
        """Count off a run that failed, and end its subgroup's phase BUSY; the caller then breaks the machine.

        A subgroup that owns a staging slot on the GPU stays BUSY, as `RunQueues.check` demands of owners.
        """
        self._runs.device_of(run.visit).runs -= 1
        subgroup = run.visit.subgroup
        if run.transfer_slot is None or not run.visit.gpu:
            self.staging.set_phase(subgroup, Phase.RESIDENT if self.plan.is_resident(subgroup) else Phase.DIRTY)

    def _rewrite_elsewhere(self, write: WriteTile, error: Exception) -> bool:
        """Write a tile to another path after a failed write; return whether a path takes it.

        Usually the path that failed is retired: it is read, and not written to again. If a full path had no room for
        the slot, the path only stops growing, and its other slots stay in use.
        """
        location = write.record.location
        if not isinstance(error, TierError):
            return False
        cannot_grow = isinstance(error, TierFullError) and not self.index.has_room_on_disk(location)
        if cannot_grow:
            self.index.abandon_unwritable(location, is_full=True)
            self.index.stop_growing(location.path)
        else:
            self.index.retire(location.path)
            self.index.abandon(location)
        if self.broken is not None:  # nothing is issued any more
            return False
        if write.owner is not None:
            is_issued = self.scratch[write.owner.kind].write_again(write)
        else:
            is_issued = self._write_again(write)
        if is_issued and not cannot_grow:
            self._listener.say_warning(f"{error}; tiles go to other paths from now on")
        return is_issued

    def _break(self, error: Exception) -> None:
        """Issue nothing any more because of a fatal error; operations in flight still report back."""
        if self.broken is not None:
            return
        if self.is_open:
            # The list is still that of the sweep before, which has ended: what that changed is not half updated.
            self.changed_subgroups = []
        self._listener.say_broken(error)
        self.broken = error
        for operation in self._issued.close():  # these are not started, so none of them reports back
            if isinstance(operation, RunVisit):
                self._runs.device_of(operation.visit).runs -= 1
        self.saver.end_broken(error)
        if self._eviction is not None:
            self.finished_eviction = self._eviction.request, error
            self._eviction = None

    # Decisions ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Issue what an event has made possible, and end a sweep whose visits have all ended, or that is given up.

        Nothing is issued once the machine is broken. As a decision may break it, later ones ask for that again.
        """
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
        if self.broken is None:  # a flush or scratch may have just found no room
            self._runs.start_transfers()
            if self._sweep is not None and not (self.is_paused and self._sweep.is_open):
                self._runs.start(self._sweep)
        self._end_sweep_if_due()

    def _end_sweep_if_due(self) -> None:
        """End the sweep if all its visits have ended, or if the machine is broken and ends it.

        An open sweep ends here only if the machine is broken; usually `SealStep` ends it.
        """
        if self.is_open:
            if self._ends_broken_sweep():
                self._forget_open_sweep()
        elif self._sweep is not None and (self._ends_broken_sweep() or not self._unended_visits):
            self.finished_sweep, self._sweep = self._sweep, None
            self.failed = self._unended_visits > 0
            self._clear_queues()

    def _ends_broken_sweep(self) -> bool:
        """Return whether a broken machine ends its sweep: after `Stop`, or when no caller's memory is in use."""
        if self.broken is None:
            return False
        in_flight = self._issued.in_flight.values()  # those of a save use no caller's memory
        return self._stopped or all(isinstance(operation, SaveOperation) for operation in in_flight)

    def _assign_slots(self) -> None:
        """Give staging slots to the next visits; for those that get none, flush dirty subgroups to free slots.

        In an open sweep an admitted visit may get the slot of one that is not admitted.
        """
        if self.is_paused and self.is_open:  # no visit would begin
            return
        line = self.staging.line
        while line:
            slot = self.staging.find_or_free_slot()
            if slot is None and self.is_open:
                slot = self.staging.preempt_slot(line[0])
            if slot is None:
                break
            self._begin_fetch(line.popleft(), slot)
        if line:
            self._flush_dirty(len(line))

    def _flush_dirty(self, slots_needed: int) -> None:
        """Flush dirty subgroups, first changed first, until `slots_needed` slots are about to become free.

        A subgroup whose visit is still to come is left out: the visit uses the state in its slot.
        """
        # Flushes under way of subgroups without a visit to come: afterwards their staging slots can be given away.
        flushing = sum(self._subgroups[number].visit is None for number in self._flushes)
        for number in list(self.staging.dirty):
            if flushing >= slots_needed or self.broken is not None:
                return
            subgroup = self._subgroups[number]
            if subgroup.phase is Phase.DIRTY and subgroup.visit is None:
                flushing += 1
                self._begin_flush(number)

    def _begin_fetch(self, number: int, slot: int | None) -> None:
        """Read a subgroup's state from storage to a staging slot, or to its home (`slot` None).

        Fresh state, and state that its visit overwrites, is not read: its memory counts as whole at once.
        """
        subgroup = self._subgroups[number]
        if subgroup.visit is not None:
            self._request_scratch(subgroup.visit)
        if slot is not None:
            self.staging.assign_slot(number, slot)
        needs_no_read = subgroup.version is None or (subgroup.visit is not None and subgroup.visit.overwrites)
        if needs_no_read and slot is None:
            self._end_fetch_to_home(number)
        elif needs_no_read:
            self._enter_whole_phase(number, changed=False)
        else:
            self._read_tiles(number, slot)

    def _read_tiles(self, number: int, slot: int | None) -> None:
        """Issue the reads of all tiles of a subgroup to a staging slot, or to its home (`slot` None)."""
        tiles = self.plan.layout.subgroups[number].tiles
        self.staging.set_phase(number, Phase.FETCHING)
        self._subgroups[number].unread = len(tiles)
        for tile, offset, _ in tiles:
            record = self.index.get(tile)
            if record is None:
                raise InternalError(f"{tile} was changed but never written, and its memory is gone")
            self._issued.issue(ReadTile(self._issued.new_op(), tile, slot, offset, record))

    def _begin_flush(self, subgroup: int, *, for_save: bool = False, speculative: bool = False) -> None:
        """Start to write a subgroup's state to free slots of stores; it is no longer dirty.

        Args:
            for_save: Whether only a save needs the flush, which may fail then without ending the session.
            speculative: Whether the state is a speculative version, written beside the live one.
        """
        tiles = self.plan.layout.subgroups[subgroup].tiles
        slot = self._subgroups[subgroup].slot
        self.staging.set_phase(subgroup, Phase.FLUSHING)
        self.staging.dirty.pop(subgroup, None)
        # The live version. `or 0` is for type checkers: it is None for fresh state alone, and only state that has
        # been changed is flushed.
        version = self._subgroups[subgroup].version or 0
        # A sweep's `step` is the version that its changes get. The subgroup's own `version` stays the live one until
        # the seal. `and self._sweep` is for type checkers: with `speculative` there is a sweep.
        if speculative and self._sweep:
            version = self._sweep.step
        self._flushes[subgroup] = _Flush(len(tiles), version, for_save=for_save, speculative=speculative)
        for position, (tile, offset, nbytes) in enumerate(tiles):
            if not self._claim_and_write(tile, slot, offset, nbytes):
                # `_Flush` counts all tiles as unwritten, and no write of the later ones will report back.
                self._fail_flush_without_room(tile, later_tiles=len(tiles) - position - 1)
                return

    def _fail_flush_without_room(self, tile: TileId, later_tiles: int) -> None:
        """Fail a flush, as no path has room for one of its tiles.

        With it fails the save, the speculative version or the eviction that it is for. A flush that training needs
        breaks the machine.

        Args:
            tile: The tile without room.
            later_tiles: Number of tiles behind it, of which no write was issued either.
        """
        subgroup, error = tile.subgroup, _full_error(tile)
        flush = self._flushes[subgroup]
        is_evicted = self._subgroups[subgroup].slot is None
        if not (flush.for_save or flush.speculative or is_evicted):
            self._break(error)
            return
        if flush.speculative:
            self._abort_version(subgroup, error)
        flush.error = error
        flush.unwritten -= later_tiles  # no write of these was issued, so that none will report back
        self._end_tile_write(subgroup)  # of `tile`; writes of the tiles before it are still in flight

    def _claim_and_write(
        self, tile: TileId, slot: int | None, offset: int, nbytes: int, avoid: Collection[int] = ()
    ) -> bool:
        """Write a tile of a flush to a free slot of a path that is not in `avoid`; return False if none has room."""
        flush = self._flushes[tile.subgroup]
        if flush.speculative:
            location = self.index.claim_loan(nbytes, avoid)
        else:
            is_evicted = slot is None  # its room was reserved with `lent`, by `_begin_eviction`
            location = self.index.claim(nbytes, avoid, lent=is_evicted)
        if location is None:
            return False
        record = TileRecord(location, flush.version)
        self._issued.issue(WriteTile(self._issued.new_op(), tile, slot, offset, record))
        return True

    def _write_again(self, failed: WriteTile, avoid: Collection[int] = ()) -> bool:
        """Write the tile of a failed write to a new slot of a path not in `avoid`; return False if none has room."""
        nbytes = failed.record.location.nbytes
        return self._claim_and_write(failed.tile, failed.slot, failed.buffer_offset, nbytes, avoid)


def _full_error(tile: TileId) -> TierFullError:
    """Return the error of a tile that no path takes."""
    return TierFullError("write", tier="storage", path="(all)", detail=f"no path has room left for {tile}")
