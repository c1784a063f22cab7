"""The step as a state machine: events in, operations out. Pure: no clock, no I/O, no threads, no randomness.

The machine does not know what a step is. It runs *sweeps*: a sequence of visits, each of one subgroup, that read
or change its state. A step is a sweep of updates; reading or loading state is a sweep too.

A machine and its index change in `Machine.handle` alone, so a run is its list of events: another machine that is
given them decides the same operations.

Phases of a streamed subgroup (`ARROWS` has all)::

    ABSENT -> FETCHING -> READY -> BUSY -> DIRTY -> FLUSHING -> READY (clean, cached) -> ABSENT

A resident subgroup is RESIDENT or BUSY. A subgroup whose state has never been changed is *fresh*: nothing is fetched
for it, and its first visit starts from undefined memory (the visitor fills it). What checkpoints add is in
`offload.engine.saving`.

A visit on the GPU takes the state from host memory through one more staging slot, on the GPU, and is BUSY meanwhile::

    RESIDENT or READY -> BUSY (copy in, run, copy out) -> RESIDENT or DIRTY

It has ended when its run has; the copy out finishes behind what comes next. State at home on the GPU is not copied.
A visit on the CPU of a subgroup whose weights lie on the GPU has a weight slot in host memory: weights that it reads
are fetched to it first, those that it changes are pushed to the GPU from there, and the visit ends when the push is
on its lane. The slot is free when the push has ended, perhaps during the next sweep.

A sweep *ahead* works beside whoever opened it: its visits run once they are admitted, each makes a version beside
the live one, and that is written to slots of its own at once. The live version stays where it is on storage until
`Confirm` makes versions live or revokes them; nothing of a revoked one is used again.

Invariants, verified by `check`:
  * a staging slot belongs to at most one subgroup; a subgroup in any state but ABSENT or RESIDENT has one;
  * a staging slot on the GPU belongs to at most one subgroup, which is BUSY;
  * a weight slot belongs to at most one visit;
  * a visit runs when its subgroup's state is whole in memory, and only one visit at a time runs on a subgroup;
  * a slot changes hands only when its content is on storage in its newest version (or is fresh);
  * a tile is written to a free slot of a store; the version before is freed when all of the new one is written, and
    not before it is confirmed;
  * after a fatal error no new operation is issued.

Non-goals: which path a tile goes to (`TileIndex.claim`), the order of visits (`offload.plan.visit_order`), memory
addresses (the executor knows them).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from offload.dtypes import DtypeCode
from offload.engine.index import Record, TileIndex
from offload.engine.operations import (
    Admit,
    AwaitPush,
    Begin,
    BeginSave,
    Confirm,
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
    SaveOperation,
    Stop,
    Sweep,
    Taken,
    TakeUp,
    Transfer,
    Visit,
    WriteTile,
)
from offload.engine.saving import Saver
from offload.errors import InternalError, TierError, TierFullError, invariant, known
from offload.plan.budget import Home, Plan
from offload.protocols import TileId

MAX_RUNS_IN_FLIGHT = 2
"""A second visit is handed over to a device while one runs, so that it does not idle while the engine reacts."""

RESIDENT_RUNS_IN_FLIGHT = 4
"""The same where no subgroup is streamed, which would have to wait behind what was handed over: another thread may
keep Python's lock for 5 ms (`sys.getswitchinterval`), as long as an update takes on a fast machine.
docs/published.md has what 2, 3 and 4 make of a simulated step beside such threads."""


class Phase(Enum):
    """Where a subgroup's state is; see the module's docstring."""

    ABSENT = auto()
    FETCHING = auto()
    READY = auto()
    BUSY = auto()
    DIRTY = auto()
    FLUSHING = auto()
    RESIDENT = auto()


ARROWS: Mapping[Phase, Collection[Phase]] = {
    Phase.ABSENT: (Phase.FETCHING, Phase.READY),  # READY: there is nothing to fetch
    Phase.FETCHING: (Phase.READY,),
    Phase.READY: (Phase.BUSY, Phase.ABSENT),
    Phase.BUSY: (Phase.READY, Phase.DIRTY, Phase.RESIDENT),
    Phase.DIRTY: (Phase.BUSY, Phase.FLUSHING, Phase.ABSENT),  # ABSENT: exchanged for what lies on storage
    Phase.FLUSHING: (Phase.READY, Phase.DIRTY),  # DIRTY: the flush was for a save that has failed
    Phase.RESIDENT: (Phase.BUSY,),
}
"""The phases that may follow each phase."""


@dataclass(slots=True)
class _Waiting:
    """Subgroups that wait for a resource.

    First those whose visit is under way and holds another one already; then streamed ones, which hold staging memory;
    others fill the gaps.
    """

    under_way: deque[int] = field(default_factory=deque)
    streamed: deque[int] = field(default_factory=deque)
    resident: deque[int] = field(default_factory=deque)
    runs: int = 0

    def __bool__(self) -> bool:
        return bool(self.under_way or self.streamed or self.resident)

    def __contains__(self, subgroup: int) -> bool:
        return any(subgroup in queue for queue in (self.under_way, self.streamed, self.resident))

    def first(self) -> int:
        return (self.under_way or self.streamed or self.resident)[0]

    def take(self) -> int:
        return (self.under_way or self.streamed or self.resident).popleft()

    def clear(self) -> None:
        for queue in (self.under_way, self.streamed, self.resident):
            queue.clear()


def update_visits(
    plan: Plan, order: Iterable[int], reloads: Callable[[int], bool] = lambda subgroup: False
) -> tuple[Visit, ...]:
    """Return the visits of a step that updates these subgroups, each on the device that the plan says.

    Args:
        plan: What lives where.
        order: The subgroups.
        reloads: Whether masters of a subgroup are taken from its weights.
    """
    visits = []
    for number in order:
        subgroup, gpu = plan.layout.subgroups[number], plan.updates_on_gpu(number)
        weight_bytes = subgroup.weight_bytes if plan.weights_on_gpu and not gpu else 0
        reads = subgroup.dtype is DtypeCode.FLOAT32 or reloads(number)  # an fp32 weight is the master
        visits.append(Visit(number, gpu=gpu, weight_bytes=weight_bytes, fetches=weight_bytes > 0 and reads))
    return tuple(visits)


class _Slots:
    """Slots of one kind, and which subgroup has each."""

    def __init__(self) -> None:
        self.owners: list[int | None] = []

    def take(self, subgroup: int) -> int | None:
        """Return the first free slot, from now on a subgroup's; None if there is none."""
        if None not in self.owners:
            return None
        slot = self.owners.index(None)
        self.owners[slot] = subgroup
        return slot

    def free(self, slot: int) -> None:
        self.owners[slot] = None


@dataclass(slots=True)
class _Subgroup:
    phase: Phase
    version: int | None = None  # step of its last change; None while it is fresh
    slot: int | None = None  # in staging memory
    unread: int = 0  # tiles that are being fetched
    visit: Visit | None = None  # of the sweep under way, not begun
    passing: tuple[int, Visit] | None = None  # a visit that has not run, and its GPU staging slot or weight slot


@dataclass(slots=True)
class _Flush:
    left: int
    step: int  # the version that is written
    records: list[tuple[TileId, Record]] = field(default_factory=list)
    for_save: bool = False  # nothing but a save needs it
    beside: bool = False  # of a version beside the live one, confirmed by nobody
    room: Counter[int] = field(default_factory=Counter)  # slots that are reserved for it, its sweep having ended
    error: Exception | None = None


class Machine:
    """Runs sweeps over the subgroups of a plan.

    Args:
        plan: Homes and staging slots.
        index: Slots of the stores.
        on_warning: Told, in words, of a path that is no longer written to.
        on_break: Told of the error that breaks the machine, before that is seen in `broken`.
    """

    def __init__(
        self,
        plan: Plan,
        index: TileIndex,
        on_warning: Callable[[str], None] = lambda message: None,
        on_break: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.plan = plan
        self.index = index
        self.broken: Exception | None = None
        self.finished: Sweep | None = None
        """The last sweep that ended, well or (with `failed` set) not, until it is `Taken`."""
        self.failed = False
        """Whether the last sweep ended before all its visits had. A flush may fail after that: then only `broken`
        is set, and the sweep counts."""
        self.moved: list[int] = []
        """Subgroups whose changing visit has finished in the current (or last) sweep, in that order; none after a
        `Stop` between sweeps, or a break ahead of the next one."""
        self.ended: list[int] = []
        """Subgroups whose visit has ended in the current (or last) sweep, in that order: weights that it changes are
        there, or on their way on the lane of pushes."""
        self._on_warning = on_warning
        self._on_break = on_break
        self._subgroups: list[_Subgroup] = []
        self._staging, self._gpu_slots, self._weight_slots = _Slots(), _Slots(), _Slots()
        self._in_flight: dict[int, Operation] = {}
        self._flushes: dict[int, _Flush] = {}
        self._dirty: dict[int, None] = {}  # in the order of their last change
        self._sweep: Sweep | None = None
        self._beside: dict[int, list[tuple[TileId, Record]] | None] = {}
        """Subgroups with a version beside the live one, and where its tiles lie once all are written."""
        self._turns: dict[int, tuple[bool, int]] = {}
        """Of each visit in the sweep ahead: whether it is not admitted, and its place."""
        self._held = False
        self._room: Counter[int] = Counter()  # slots that are reserved for the sweep ahead
        self._confirmed: list[int] = []  # since the last sweep
        # Visits that have not run:
        self._unfetched: deque[int] = deque()  # ... streamed and without a staging slot
        self._cpu = _Waiting()  # ... whole in host memory
        self._copies = _Waiting()  # ... whole in host memory, wanted on the GPU
        self._for_weights = _Waiting()  # ... whole in host memory, and its weights are to be fetched
        self._gpu = _Waiting()  # ... at home on the GPU; also visits under way whose state has been copied there
        self._stopped = False
        self._unfinished = 0
        self._next_op = 1
        self._out: list[Operation] = []
        self.saver = Saver(index, self._take_op, self._issue, self._let_on)
        """The save under way, and what finished ones hold."""
        self._history: deque[Event] = deque(maxlen=32)
        self._adopt(plan)

    # What the outside sees ------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no sweep is under way (flushes may still be)."""
        return self._sweep is None

    @property
    def is_ahead(self) -> bool:
        """Whether the sweep under way is ahead."""
        return self._sweep is not None and self._sweep.ahead

    @property
    def runs(self) -> int:
        """Number of visits that run."""
        return self._cpu.runs + self._gpu.runs

    @property
    def beside(self) -> Collection[int]:
        """Subgroups that have a version beside the live one."""
        return self._beside.keys()

    @property
    def in_flight(self) -> int:
        """Number of operations that have been issued and not reported back."""
        return len(self._in_flight)

    @property
    def slots(self) -> Mapping[int, int]:
        """The staging slot of each streamed subgroup that has one."""
        return {n: subgroup.slot for n, subgroup in enumerate(self._subgroups) if subgroup.slot is not None}

    @property
    def phases(self) -> Sequence[Phase]:
        """Where each subgroup's state is."""
        return [subgroup.phase for subgroup in self._subgroups]

    def is_fresh(self, subgroup: int) -> bool:
        """Return whether a subgroup's state has never been changed."""
        return self._subgroups[subgroup].version is None

    def take_finished(self) -> Sweep | None:
        """Return the sweep that has ended since the last call, if any."""
        finished = self.finished
        if finished is not None:
            self.handle(Taken(finished))
        return finished

    def take_saved(self) -> tuple[Save, Exception | None] | None:
        """Return the save that has ended since the last call, if any, and why it failed."""
        ended = self.saver.ended
        if ended is not None:
            self.handle(Taken(ended[0]))
        return ended

    def handle(self, event: Event) -> None:
        """Take in one event; operations that follow from it are then in `take_operations`."""
        self._history.append(event)
        try:
            match event:
                case Begin(sweep):
                    self._begin_ahead(sweep) if sweep.ahead else self._begin(sweep)
                case Admit(subgroups):
                    self._admit(subgroups)
                case Hold():
                    self._held = True
                case Confirm(subgroups):
                    self._confirm(subgroups)
                case BeginSave(save):
                    self._begin_save(save)
                case Taken(Sweep()):
                    self.finished = None
                    return
                case Taken(Save()):
                    self.saver.ended = None
                    return
                case Extend(plan):
                    self._extend(plan)
                case Reshare(shares):
                    self.index.reshare(shares)
                case TakeUp():
                    self._take_up(event)
                case Release(number):
                    self.saver.release(number)
                case Done(op, checksum):
                    if not self._done(self._pop(op), checksum) and self.broken is None:
                        return  # one tile of several: nothing to decide
                case Failed(op, error):
                    self._failed(self._pop(op), error)
                case Stop(error):
                    self._stopped = True
                    if self.idle:  # between sweeps, perhaps after what a step has confirmed
                        self.moved, self._confirmed = self._confirmed, []
                    self._break(error)
            self._advance()
        except InternalError as error:
            error.add_note("last events:\n  " + "\n  ".join(f"{event!r:.200}" for event in self._history))
            raise

    def take_operations(self) -> list[Operation]:
        """Return the operations to be started now, in order; each is returned once."""
        out, self._out = self._out, []
        return out

    def check(self) -> None:
        """Verify the invariants that the module states.

        Raises:
            InternalError: If one does not hold.
        """
        for number, subgroup in enumerate(self._subgroups):
            phase, slot, resident = subgroup.phase, subgroup.slot, self.plan.is_resident(number)
            at_home = phase in (Phase.RESIDENT, Phase.BUSY) if resident else phase is not Phase.RESIDENT
            invariant(at_home, f"subgroup {number} is {phase}, resident: {resident}")
            without = resident or phase is Phase.ABSENT
            invariant(without == (slot is None), f"subgroup {number} is {phase} and has slot {slot}")
            owned = slot is None or self._staging.owners[slot] == number
            invariant(owned, f"slot {slot} is not subgroup {number}'s")
            invariant((phase is Phase.FETCHING) == (subgroup.unread > 0), f"fetch of {number} is lost")
            invariant((phase is Phase.FLUSHING) == (number in self._flushes), f"flush of {number} is lost")
            if subgroup.visit is not None:
                self._check_waits(number, subgroup, subgroup.visit)
            if subgroup.passing is not None:
                through, visit = subgroup.passing
                slots = self._gpu_slots if visit.gpu else self._weight_slots
                mine = phase is Phase.BUSY and slots.owners[through] == number
                invariant(mine, f"slot {through} is not that of the visit of {number}")
        owners = [owner for owner in self._staging.owners if owner is not None]
        invariant(len(owners) == len(self.slots), "a slot has an owner that left it")
        on_gpu = [owner for owner in self._gpu_slots.owners if owner is not None]
        invariant(len(set(on_gpu)) == len(on_gpu), "a subgroup has two GPU slots")
        busy = all(self._subgroups[owner].phase is Phase.BUSY for owner in on_gpu)
        invariant(busy, "the owner of a GPU slot is not busy")
        for device in (self._cpu, self._gpu):
            runs = sum(
                isinstance(operation, Run) and self._device_of(operation.visit) is device
                for operation in self._in_flight.values()
            )
            invariant(runs == device.runs, f"{device.runs} runs are counted, {runs} are in flight")
        invariant(
            not self._beside or self.is_ahead or self.broken is not None, "a version beside the live one is left"
        )
        for number, records in self._beside.items():
            flush = self._flushes.get(number)
            written = records is not None or (flush is not None and flush.beside)
            invariant(written or self.broken is not None, f"a version of subgroup {number} is not written")
        self.index.check()

    def _check_waits(self, number: int, subgroup: _Subgroup, visit: Visit) -> None:
        """Verify that a visit that has not begun waits for something."""
        invariant(visit.subgroup == number, f"the visit of {number} is filed wrongly")
        phase = subgroup.phase
        waits = phase in (Phase.FETCHING, Phase.FLUSHING, Phase.BUSY) or self.saver.blocks(number)
        waits = waits or (visit.ahead and (not self._is_admitted(number) or phase is Phase.DIRTY))
        waits = waits or self.broken is not None  # then nobody is let on any more
        queue = self._unfetched if phase is Phase.ABSENT else self._queue_of(visit)
        invariant(waits or number in queue, f"subgroup {number} is {phase} and waits for nothing")

    # Events ---------------------------------------------------------------------------------------------------

    def _extend(self, plan: Plan) -> None:
        invariant(self.idle and self.saver.under_way is None, "the plan changes between sweeps and saves only")
        invariant(not self._in_flight, "the plan changes while memory is in use")
        invariant(plan.staging_slots >= len(self._staging.owners), "a plan takes staging slots away")
        self.plan = plan
        self.index.allow(plan.slot_counts)
        self._adopt(plan)

    def _adopt(self, plan: Plan) -> None:
        for home in plan.homes[len(self._subgroups) :]:
            self._subgroups.append(_Subgroup(Phase.ABSENT if home is Home.STREAMED else Phase.RESIDENT))
        self._staging.owners.extend([None] * (plan.staging_slots - len(self._staging.owners)))
        for slots, count in ((self._gpu_slots, plan.gpu_slots), (self._weight_slots, plan.weight_slots)):
            slots.owners = [None] * count

    def _to(self, number: int, phase: Phase) -> None:
        """Bring a subgroup into another phase; the one place where a phase changes."""
        subgroup = self._subgroups[number]
        if phase not in ARROWS[subgroup.phase]:  # not by `invariant`: a step does this for every subgroup
            raise InternalError(f"subgroup {number} goes from {subgroup.phase} to {phase} (this is a bug in offload)")
        subgroup.phase = phase

    def _pop(self, op: int) -> Operation:
        invariant(op in self._in_flight, f"operation {op} reports back but is not in flight")
        return self._in_flight.pop(op)

    def _begin(self, sweep: Sweep) -> None:
        invariant(self._sweep is None, "a sweep begins while another is under way")
        invariant(self.finished is None, "a sweep begins before the last one was taken")
        subgroups = [visit.subgroup for visit in sweep.visits]
        invariant(len(set(subgroups)) == len(subgroups), "a sweep visits a subgroup twice")
        self._sweep = sweep
        self._unfinished = len(subgroups)
        self.moved, self._confirmed = self._confirmed, []
        self.ended = []
        for visit in sweep.visits:
            subgroup = self._subgroups[visit.subgroup]
            subgroup.visit = visit
            match subgroup.phase:
                case Phase.RESIDENT if self.saver.blocks(visit.subgroup):
                    self.saver.hurry(visit.subgroup)
                case Phase.ABSENT:
                    self._unfetched.append(visit.subgroup)
                case Phase.RESIDENT | Phase.READY | Phase.DIRTY:
                    self._let_on(visit.subgroup)

    # Sweeps ahead

    def _begin_ahead(self, sweep: Sweep) -> None:
        """Open a sweep, of the visits that the stores have room for beside the live versions."""
        invariant(self._sweep is None and self.finished is None, "a sweep begins while another is under way")
        self._sweep, self._held = sweep, self.broken is not None
        self._turns = {}
        for place, visit in enumerate(sweep.visits):
            subgroup = visit.subgroup
            able = not self.plan.is_resident(subgroup) and not self.is_fresh(subgroup)
            plain = visit.changes and not (visit.gpu or visit.overwrites or visit.weight_bytes)
            if not (visit.ahead and able and plain):  # not by `invariant`: its message would be made for every visit
                raise InternalError(f"{visit} is ahead (this is a bug in offload)")
            room = self._slots_of(subgroup)
            if self.broken is not None or not self.index.reserve(room, spare=True):
                break
            self._room += room
            self._subgroups[subgroup].visit, self._turns[subgroup] = visit, (True, place)
            phase = self._subgroups[subgroup].phase
            if phase is Phase.DIRTY:
                self._flush(subgroup)  # the live version is whole on storage before there is one beside it
            elif phase is Phase.ABSENT:
                self._unfetched.append(subgroup)

    def _admit(self, subgroups: Iterable[int]) -> None:
        for number in subgroups:
            if self.is_ahead and not self._is_admitted(number) and self._subgroups[number].visit is not None:
                self._turns[number] = False, self._turns[number][1]
                if number in self._unfetched:
                    self._unfetched.remove(number)
                    self._file(number)
                self._let_on(number)

    def _is_admitted(self, number: int) -> bool:
        return number in self._turns and not self._turns[number][0]

    def _confirm(self, subgroups: Collection[int]) -> None:
        if self.broken is not None:
            self._end_ahead()
            return
        invariant(self.is_ahead and not self.runs, "versions are confirmed while they are being made")
        invariant(self._beside.keys() >= set(subgroups), "a version is confirmed that is not there")
        sweep, self._sweep = self._sweep, None
        self._forget_waiting()
        made, self._beside = self._beside, {}
        for subgroup in subgroups:
            self._subgroups[subgroup].version = sweep.step if sweep else 0
            self._confirmed.append(subgroup)
            records = made.pop(subgroup)
            if records is None:
                self._flushes[subgroup].beside = False
            else:
                self._commit(records)
        for subgroup, records in made.items():
            if records is not None:  # else when the flush has ended
                self._revoke(subgroup, records)
        for subgroup, flush in self._flushes.items():
            if flush.beside and not flush.room:  # it may still fail, and lose slots
                flush.room = self._slots_of(subgroup)
                self._room -= flush.room
        self.index.give_back(self._room)
        self._room.clear()

    def _slots_of(self, subgroup: int) -> Counter[int]:
        return Counter(nbytes for _, _, nbytes in self.plan.layout.subgroups[subgroup].tiles)

    def _end_ahead(self) -> None:
        """Forget the sweep ahead, as the machine has broken."""
        if self.is_ahead:
            self._sweep = None
        self._beside = {}
        self._forget_waiting()

    def _revoke(self, subgroup: int, records: Iterable[tuple[TileId, Record]]) -> None:
        """Give back the slots of a version beside the live one, and the staging slot that holds it."""
        for _, record in records:
            self.index.abandon(record.location)
        self._vacate(subgroup)

    def _commit(self, records: Iterable[tuple[TileId, Record]]) -> None:
        """Make a version the newest: all of its tiles are there, and only now do the old slots go."""
        for tile, record in records:
            self.index.commit(tile, record)

    def _evict(self, wanted: int) -> int | None:
        """Take the staging slot of a visit ahead whose turn comes later than that of a subgroup."""
        turn, owner = self._turns[wanted], None
        for number in self._staging.owners:
            subgroup = None if number is None else self._subgroups[number]
            waits = subgroup is not None and subgroup.visit is not None and subgroup.phase is Phase.READY
            if number is not None and waits and not self._is_admitted(number) and self._turns[number] > turn:
                turn, owner = self._turns[number], number
        if owner is None:
            return None
        self._file(owner)
        return self._vacate(owner)

    def _file(self, subgroup: int) -> None:
        """Have a streamed visit wait for a staging slot; ahead, those that are admitted first, each kind in order."""
        behind = 0
        if self.is_ahead:
            turn = self._turns[subgroup]
            for other in reversed(self._unfetched):
                if self._turns[other] < turn:
                    break
                behind += 1
        self._unfetched.insert(len(self._unfetched) - behind, subgroup)

    def _forget_waiting(self) -> None:
        for waiting in (self._unfetched, self._cpu, self._copies, self._for_weights, self._gpu):
            waiting.clear()
        for subgroup in self._subgroups:
            subgroup.visit = None

    # Saves

    def _begin_save(self, save: Save) -> None:
        invariant(self._sweep is None and Phase.BUSY not in self.phases, "a save begins during a visit")
        versions = [subgroup.version for subgroup in self._subgroups if subgroup.version is not None]
        invariant(save.empty or len(versions) == len(self._subgroups), "a save begins while there is fresh state")
        unsaved = dict.fromkeys([*self._dirty, *(n for n, flush in self._flushes.items() if not flush.beside)])
        if self.broken is not None:
            self.saver.ended = save, self.broken
        elif self.saver.begin(save, self.plan, unsaved, versions):
            for subgroup in () if save.empty else list(self._dirty):
                self._flush(subgroup, for_save=True)

    def _take_up(self, event: TakeUp) -> None:
        invariant(self.idle and not self._in_flight, "state is exchanged while it is in use")
        for path, limit_bytes in event.stores.items():
            held = Counter(r.location for records in event.held.values() for r in records.values())
            self.index.take_up(path, limit_bytes, {x: n for x, n in held.items() if x.path == path})
        invariant(self.index.fits(), "stores that were taken up have no room for the plan")
        self.saver.held.update({number: dict(records) for number, records in event.held.items()})
        for tile, record in event.records.items():
            subgroup = tile.subgroup
            invariant(
                not self.plan.is_resident(subgroup), f"state of subgroup {subgroup} at home in memory is exchanged"
            )
            self._vacate(subgroup)
            self._dirty.pop(subgroup, None)
            self._subgroups[subgroup].version = record.step
            self.index.adopt(tile, record)

    def _done(self, operation: Operation, checksum: int) -> bool:
        """Take in that an operation has ended well; return whether a subgroup's state has changed."""
        match operation:
            case ReadTile(tile=tile):
                fetched = self._subgroups[tile.subgroup]
                fetched.unread -= 1
                if fetched.unread:
                    return False
                self._settle(tile.subgroup, changed=False)
            case WriteTile(tile=tile, record=record):
                flush = self._flushes[tile.subgroup]
                flush.records.append((tile, Record(record.location, record.step, checksum)))
                return self._flushed_tile(tile.subgroup)
            case Run():
                self._ran(operation)
            case Transfer(subgroup=subgroup, way="fetch"):
                device = self._gpu if operation.what == "state" else self._cpu
                device.under_way.append(subgroup)
            case Transfer(subgroup=subgroup, what="state"):
                self._gpu_slots.free(operation.through)
                self._settle(subgroup, changed=True)
            case Transfer(subgroup=subgroup, through=weight_slot):
                self._end_visit(subgroup)
                if self.broken is None:
                    self._issue(AwaitPush(self._take_op(), subgroup, weight_slot))
            case AwaitPush(weight_slot=weight_slot):
                self._weight_slots.free(weight_slot)
            case _:
                self.saver.landed(operation, checksum, None)
        return True

    def _flushed_tile(self, subgroup: int) -> bool:
        """Take in that a tile of a flush has ended; return whether it was the last."""
        flush = self._flushes[subgroup]
        flush.left -= 1
        if flush.left:
            return False
        del self._flushes[subgroup]
        if flush.beside:
            self._flushed_beside(subgroup, flush)
            return True
        if flush.error is None:
            self._commit(flush.records)
            self.saver.flushed(flush.records, subgroup)
            self._settle(subgroup, changed=False)
            return True
        for _, new in flush.records:
            self.index.abandon(new.location)
        self._settle(subgroup, changed=True)
        self.saver.abort(flush.error)
        return True

    def _flushed_beside(self, subgroup: int, flush: _Flush) -> None:
        """Take in that a version beside the live one has been written, or has not."""
        self.index.give_back(flush.room)
        self._to(subgroup, Phase.READY)
        if flush.error is None and subgroup in self._beside:
            self._beside[subgroup] = flush.records
            return
        self._revoke(subgroup, flush.records)
        if self._subgroups[subgroup].visit is not None:  # of a sweep that has begun since
            self._file(subgroup)

    def _give_up_beside(self, subgroup: int, error: Exception) -> None:
        """Make no more versions beside live ones, as one cannot be written: it is not there any more."""
        self._flushes[subgroup].error = error
        if subgroup in self._beside:  # else it was revoked before
            del self._beside[subgroup]
            self._held = True

    def _device_of(self, visit: Visit) -> _Waiting:
        return self._gpu if visit.gpu else self._cpu

    def _queue_of(self, visit: Visit) -> _Waiting:
        """Return what a visit waits for when its state is whole."""
        if visit.fetches:
            return self._for_weights
        copied = visit.gpu and not self.plan.at_home_on_gpu(visit.subgroup)
        return self._copies if copied else self._device_of(visit)

    def _let_on(self, number: int) -> None:
        """Let the visit go on that waits for a subgroup's state, if one does."""
        subgroup = self._subgroups[number]
        if subgroup.visit is None:
            return
        if not self.is_ahead or (subgroup.phase is Phase.READY and self._is_admitted(number)):
            queue = self._queue_of(subgroup.visit)
            (queue.resident if self.plan.is_resident(number) else queue.streamed).append(number)

    def _ran(self, run: Run) -> None:
        visit, number = run.visit, run.visit.subgroup
        self._device_of(visit).runs -= 1
        if visit.ahead:
            self._to(number, Phase.DIRTY)
            if self.broken is None:
                self._beside[number] = None
                self._flush(number, beside=True)
            return
        if visit.changes:
            subgroup = self._subgroups[number]
            subgroup.version = self._sweep.step if self._sweep else subgroup.version or 0
            self.moved.append(number)
        through = run.gpu_slot if visit.gpu else run.weight_slot
        flushes = visit.changes and through is not None
        if not (flushes and not visit.gpu):  # else when the weights are on their lane
            self._end_visit(number)
        if through is not None and not visit.changes:
            (self._gpu_slots if visit.gpu else self._weight_slots).free(through)
        if not (flushes and visit.gpu):  # else when the state has come back
            self._settle(number, changed=visit.changes)
        if flushes and through is not None and self.broken is None:
            # Where it has broken, the GPU keeps old weights, and the visit does not end.
            self._transfer(visit, "flush", through)

    def _end_visit(self, subgroup: int) -> None:
        self._unfinished -= 1
        self.ended.append(subgroup)

    def _settle(self, subgroup: int, *, changed: bool) -> None:
        """Take in that a subgroup's state is whole in its memory and nothing works on it any more."""
        if self.plan.is_resident(subgroup):
            self._to(subgroup, Phase.RESIDENT)
        elif changed or subgroup in self._dirty:
            self._dirty.pop(subgroup, None)
            self._dirty[subgroup] = None
            self._to(subgroup, Phase.DIRTY)
        else:
            self._to(subgroup, Phase.READY)
        self._let_on(subgroup)  # perhaps of a sweep that began while the state was still being copied out

    def _failed(self, operation: Operation, error: Exception) -> None:
        if isinstance(operation, SaveOperation):
            self.saver.landed(operation, 0, error)
            return
        if isinstance(operation, WriteTile) and self._flushes[operation.tile.subgroup].beside:
            self.index.lose(operation.record.location)
            self._give_up_beside(operation.tile.subgroup, error)
            self._flushed_tile(operation.tile.subgroup)
            return
        if isinstance(operation, WriteTile) and self._flushes[operation.tile.subgroup].for_save:
            # Training can do without this flush, so the save may be given up and the path is not.
            location = operation.record.location
            self.index.lose(location)
            where = operation.tile, operation.slot, operation.buffer_offset, location.nbytes
            avoided = self.saver.retry(operation, error)
            if avoided is not None and self._write(*where, avoid=avoided):
                return
            self._flushes[operation.tile.subgroup].error = error
            self.saver.abort(error)
            self._flushed_tile(operation.tile.subgroup)
            return
        if isinstance(operation, WriteTile) and isinstance(error, TierError):
            # The staging slot still holds the tile, so it can go elsewhere; but this path is not trusted again.
            location = operation.record.location
            self.index.retire(location.path)
            self.index.abandon(location)
            again = (operation.tile, operation.slot, operation.buffer_offset, location.nbytes)
            if self.broken is None and self._write(*again):
                self._on_warning(f"{error}; tiles go to other paths from now on")
                return
        if isinstance(operation, Run):
            self._device_of(operation.visit).runs -= 1
            subgroup = operation.visit.subgroup
            if operation.gpu_slot is None:
                self._to(subgroup, Phase.RESIDENT if self.plan.is_resident(subgroup) else Phase.DIRTY)
        self._break(error)

    def _break(self, error: Exception) -> None:
        if self.broken is None:
            if self.is_ahead:
                self.moved = []  # by the step before, which was whole
            self._on_break(error)
            self.broken = error
            for operation in self._out:  # decided in the same breath, and not handed over yet
                del self._in_flight[operation.op]
                if isinstance(operation, Run):
                    self._device_of(operation.visit).runs -= 1
            self._out.clear()
            self.saver.break_off(error)

    # Decisions ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self.broken is None:
            self.saver.advance()
            self._assign_slots()
        if self.broken is None:  # or a flush has just found no room
            self._start_transfers()
            self._start_runs()
        if self.is_ahead:
            if self.broken is not None and self._gives_up():
                self._end_ahead()
        elif self._sweep is not None and (self._gives_up() or not self._unfinished):
            self.finished, self._sweep = self._sweep, None
            self.failed = self._unfinished > 0
            self._forget_waiting()

    def _gives_up(self) -> bool:
        """Return whether the sweep ends unfinished; what a checkpoint has in flight touches no caller's memory."""
        if self.broken is None:
            return False
        return self._stopped or all(isinstance(o, SaveOperation) for o in self._in_flight.values())

    def _start_runs(self) -> None:
        if self._held and self.is_ahead:
            return
        most = MAX_RUNS_IN_FLIGHT if self.plan.staging_slots else RESIDENT_RUNS_IN_FLIGHT
        for device in (self._cpu, self._gpu):
            while self._sweep is not None and device.runs < most and device:
                number = device.first()
                subgroup = self._subgroups[number]
                through, visit = subgroup.passing or (None, subgroup.visit)
                visit = known(visit, "a visit that is not there is to run")
                if subgroup.passing is None:
                    if visit.weight_bytes and (through := self._weight_slots.take(number)) is None:
                        break
                    self._to(number, Phase.BUSY)
                subgroup.passing = subgroup.visit = None
                device.take()
                device.runs += 1
                gpu_slot, weight_slot = (through, None) if visit.gpu else (None, through)
                op, sweep, fresh = self._take_op(), self._sweep.number, subgroup.version is None
                self._issue(Run(op, sweep, visit, subgroup.slot, fresh, gpu_slot, weight_slot))

    def _start_transfers(self) -> None:
        """Give slots to the visits that need their state on the GPU, or weights from there, and fetch these."""
        for waiting, slots in ((self._copies, self._gpu_slots), (self._for_weights, self._weight_slots)):
            while waiting and (through := slots.take(waiting.first())) is not None:
                number = waiting.take()
                subgroup = self._subgroups[number]
                visit, subgroup.visit = known(subgroup.visit, "nobody waits for a transfer"), None
                subgroup.passing = through, visit
                self._to(number, Phase.BUSY)
                if visit.gpu and (subgroup.version is None or visit.overwrites):
                    self._gpu.under_way.append(number)
                else:
                    self._transfer(visit, "fetch", through)

    def _transfer(self, visit: Visit, way: Literal["fetch", "flush"], through: int) -> None:
        """Copy what a visit needs: its state where it runs on the GPU, else its weights."""
        op, number = self._take_op(), visit.subgroup
        if visit.gpu:
            nbytes = self.plan.layout.subgroups[number].state_bytes
            self._issue(Transfer(op, number, "state", way, through, nbytes, self._subgroups[number].slot))
        else:
            self._issue(Transfer(op, number, "weights", way, through, visit.weight_bytes))

    def _assign_slots(self) -> None:
        """Give staging slots to the next visits; empty as many as the remaining visits need, and no more."""
        if self._held and self.is_ahead:
            return
        while self._unfetched:
            slot = self._free_slot()
            if slot is None and self.is_ahead:
                slot = self._evict(self._unfetched[0])
            if slot is None:
                break
            self._fetch(self._unfetched.popleft(), slot)
        if not self._unfetched:
            return
        coming = sum(self._subgroups[number].visit is None for number in self._flushes)
        for number in list(self._dirty):
            if coming >= len(self._unfetched) or self.broken is not None:
                return
            subgroup = self._subgroups[number]
            if subgroup.phase is Phase.DIRTY and subgroup.visit is None:
                coming += 1
                self._flush(number)

    def _free_slot(self) -> int | None:
        """Return a slot that is empty or whose content is on storage and not wanted in this sweep."""
        clean = None
        for slot, owner in enumerate(self._staging.owners):
            if owner is None:
                return slot
            if clean is None:
                subgroup = self._subgroups[owner]
                if subgroup.phase is Phase.READY and subgroup.visit is None:
                    clean = owner
        invariant(clean is None or clean not in self._dirty, "a dirty slot is given away")
        return None if clean is None else self._vacate(clean)

    def _vacate(self, number: int) -> int | None:
        """Take a subgroup's staging slot, if it has one, and return it."""
        subgroup = self._subgroups[number]
        slot, subgroup.slot = subgroup.slot, None
        if slot is not None:
            self._to(number, Phase.ABSENT)
            self._staging.free(slot)
        return slot

    def _fetch(self, number: int, slot: int) -> None:
        subgroup = self._subgroups[number]
        self._staging.owners[slot] = number
        subgroup.slot = slot
        if subgroup.version is None or (subgroup.visit is not None and subgroup.visit.overwrites):
            self._settle(number, changed=False)
            return
        tiles = self.plan.layout.subgroups[number].tiles
        self._to(number, Phase.FETCHING)
        subgroup.unread = len(tiles)
        for tile, offset, _ in tiles:
            record = self.index.get(tile)
            if record is None:
                raise InternalError(f"{tile} was changed but never written, and its memory is gone")
            self._issue(ReadTile(self._take_op(), tile, slot, offset, record))

    def _flush(self, subgroup: int, *, for_save: bool = False, beside: bool = False) -> None:
        tiles = self.plan.layout.subgroups[subgroup].tiles
        slot = known(self._subgroups[subgroup].slot, "what is flushed has no slot")
        self._to(subgroup, Phase.FLUSHING)
        self._dirty.pop(subgroup, None)
        step = self._sweep.step if beside and self._sweep else self._subgroups[subgroup].version or 0
        self._flushes[subgroup] = flush = _Flush(len(tiles), step, for_save=for_save, beside=beside)
        for number, (tile, offset, nbytes) in enumerate(tiles):
            if not self._write(tile, slot, offset, nbytes):
                detail = f"no path has room left for {tile}"
                error = TierFullError("write", tier="storage", path="(all)", detail=detail)
                if not (for_save or beside):
                    self._break(error)
                    return
                if beside:
                    self._give_up_beside(subgroup, error)
                flush.error = error
                flush.left -= len(tiles) - number - 1
                self._flushed_tile(subgroup)
                return

    def _write(self, tile: TileId, slot: int, offset: int, nbytes: int, avoid: Collection[int] = ()) -> bool:
        location = self.index.claim(nbytes, avoid)
        if location is None:
            return False
        record = Record(location, self._flushes[tile.subgroup].step, 0)
        self._issue(WriteTile(self._take_op(), tile, slot, offset, record))
        return True

    def _issue(self, operation: Operation) -> None:
        if self.broken is not None:  # not by `invariant`: the message costs more than all else here
            raise InternalError(f"{operation} after a fatal error (this is a bug in offload, please report it)")
        self._in_flight[operation.op] = operation
        self._out.append(operation)

    def _take_op(self) -> int:
        op = self._next_op
        self._next_op += 1
        return op
