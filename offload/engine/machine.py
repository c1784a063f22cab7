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
        self._phases: list[Phase] = []
        self._owners: list[int | None] = []
        self._slots: dict[int, int] = {}
        self._in_flight: dict[int, Operation] = {}
        self._fetches: dict[int, int] = {}
        self._flushes: dict[int, _Flush] = {}
        self._dirty: dict[int, None] = {}  # in the order of their last change
        self._versions: dict[int, int] = {}  # of subgroups that are not fresh
        self._sweep: Sweep | None = None
        self._beside: dict[int, list[tuple[TileId, Record]] | None] = {}
        """Subgroups with a version beside the live one, and where its tiles lie once all are written."""
        self._admitted: set[int] = set()
        self._places: dict[int, int] = {}  # of visits, in the sweep ahead
        self._held = False
        self._room: Counter[int] = Counter()  # slots that are reserved for the sweep ahead
        self._confirmed: list[int] = []  # since the last sweep
        self._pending: dict[int, Visit] = {}  # not yet run; of these:
        self._unfetched: deque[int] = deque()  # ... streamed and without a staging slot
        self._cpu = _Waiting()  # ... whole in host memory
        self._copies = _Waiting()  # ... whole in host memory, wanted on the GPU
        self._for_weights = _Waiting()  # ... whole in host memory, and its weights are to be fetched
        self._gpu = _Waiting()  # ... at home on the GPU; also visits under way whose state has been copied there
        self._gpu_slots: dict[int, tuple[int, Visit]] = {}
        self._weight_slots: dict[int, Visit] = {}  # by weight slot
        self._with_weights: dict[int, tuple[int, Visit]] = {}  # ... of visits under way, until they run
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
        return self._slots

    @property
    def phases(self) -> Sequence[Phase]:
        """Where each subgroup's state is."""
        return self._phases

    def is_fresh(self, subgroup: int) -> bool:
        """Return whether a subgroup's state has never been changed."""
        return subgroup not in self._versions

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
        for subgroup, phase in enumerate(self._phases):
            slot, resident = self._slots.get(subgroup), self.plan.is_resident(subgroup)
            at_home = phase in (Phase.RESIDENT, Phase.BUSY) if resident else phase is not Phase.RESIDENT
            invariant(at_home, f"subgroup {subgroup} is {phase}, resident: {resident}")
            without = resident or phase is Phase.ABSENT
            invariant(without == (slot is None), f"subgroup {subgroup} is {phase} and has slot {slot}")
            invariant(slot is None or self._owners[slot] == subgroup, f"slot {slot} is not subgroup {subgroup}'s")
            invariant((phase is Phase.FETCHING) == (subgroup in self._fetches), f"fetch of {subgroup} is lost")
            invariant((phase is Phase.FLUSHING) == (subgroup in self._flushes), f"flush of {subgroup} is lost")
        owners = [owner for owner in self._owners if owner is not None]
        invariant(len(owners) == len(self._slots), "a slot has an owner that left it")
        for subgroup, visit in self._pending.items():
            invariant(visit.subgroup == subgroup, f"the visit of {subgroup} is filed wrongly")
            phase = self._phases[subgroup]
            queue = self._unfetched if phase is Phase.ABSENT else self._queue_of(visit)
            waits = phase in (Phase.FETCHING, Phase.FLUSHING, Phase.BUSY) or self.saver.blocks(subgroup)
            waits = waits or (visit.ahead and (subgroup not in self._admitted or phase is Phase.DIRTY))
            waits = waits or self.broken is not None  # then nobody is let on any more
            invariant(waits or subgroup in queue, f"subgroup {subgroup} is {phase} and waits for nothing")
        for owner, (gpu_slot, _) in self._gpu_slots.items():
            invariant(self._phases[owner] is Phase.BUSY, f"GPU slot {gpu_slot} is {self._phases[owner]}'s")
        used = {gpu_slot for gpu_slot, _ in self._gpu_slots.values()}
        invariant(len(used) == len(self._gpu_slots), "two subgroups have one GPU slot")
        for subgroup, (weight_slot, visit) in self._with_weights.items():
            mine = self._phases[subgroup] is Phase.BUSY and self._weight_slots.get(weight_slot) is visit
            invariant(mine, f"weight slot {weight_slot} is not that of the visit of {subgroup}")
        for device in (self._cpu, self._gpu):
            runs = sum(
                isinstance(operation, Run) and self._device_of(operation.visit) is device
                for operation in self._in_flight.values()
            )
            invariant(runs == device.runs, f"{device.runs} runs are counted, {runs} are in flight")
        invariant(
            not self._beside or self.is_ahead or self.broken is not None, "a version beside the live one is left"
        )
        for subgroup, records in self._beside.items():
            flush = self._flushes.get(subgroup)
            written = records is not None or (flush is not None and flush.beside)
            invariant(written or self.broken is not None, f"a version of subgroup {subgroup} is not written")
        self.index.check()

    # Events ---------------------------------------------------------------------------------------------------

    def _extend(self, plan: Plan) -> None:
        invariant(self.idle and self.saver.under_way is None, "the plan changes between sweeps and saves only")
        invariant(not self._in_flight, "the plan changes while memory is in use")
        invariant(plan.staging_slots >= len(self._owners), "a plan takes staging slots away")
        self.plan = plan
        self.index.allow(plan.slot_counts)
        self._adopt(plan)

    def _adopt(self, plan: Plan) -> None:
        for home in plan.homes[len(self._phases) :]:
            self._phases.append(Phase.ABSENT if home is Home.STREAMED else Phase.RESIDENT)
        self._owners.extend([None] * (plan.staging_slots - len(self._owners)))

    def _to(self, subgroup: int, phase: Phase) -> None:
        """Bring a subgroup into another phase; the one place where a phase changes."""
        if phase not in ARROWS[self._phases[subgroup]]:  # not by `invariant`: a step does this for every subgroup
            before = self._phases[subgroup]
            raise InternalError(f"subgroup {subgroup} goes from {before} to {phase} (this is a bug in offload)")
        self._phases[subgroup] = phase

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
        self._pending = {visit.subgroup: visit for visit in sweep.visits}
        for subgroup in subgroups:
            match self._phases[subgroup]:
                case Phase.RESIDENT if self.saver.blocks(subgroup):
                    self.saver.hurry(subgroup)
                case Phase.ABSENT:
                    self._unfetched.append(subgroup)
                case Phase.RESIDENT | Phase.READY | Phase.DIRTY:
                    self._let_on(subgroup)

    # Sweeps ahead

    def _begin_ahead(self, sweep: Sweep) -> None:
        """Open a sweep, of the visits that the stores have room for beside the live versions."""
        invariant(self._sweep is None and self.finished is None, "a sweep begins while another is under way")
        self._sweep, self._held = sweep, self.broken is not None
        self._admitted, self._places = set(), {}
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
            self._pending[subgroup], self._places[subgroup] = visit, place
            if self._phases[subgroup] is Phase.DIRTY:
                self._flush(subgroup)  # the live version is whole on storage before there is one beside it
            elif self._phases[subgroup] is Phase.ABSENT:
                self._unfetched.append(subgroup)

    def _admit(self, subgroups: Iterable[int]) -> None:
        for subgroup in subgroups:
            if self.is_ahead and subgroup not in self._admitted and subgroup in self._pending:
                self._admitted.add(subgroup)
                if subgroup in self._unfetched:
                    self._unfetched.remove(subgroup)
                    self._file(subgroup)
                self._let_on(subgroup)

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
            self._versions[subgroup] = sweep.step if sweep else 0
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
        if subgroup in self._slots:
            self._vacate(self._slots[subgroup])

    def _commit(self, records: Iterable[tuple[TileId, Record]]) -> None:
        """Make a version the newest: all of its tiles are there, and only now do the old slots go."""
        for tile, record in records:
            self.index.commit(tile, record)

    def _evict(self, wanted: int) -> int | None:
        """Take the staging slot of a visit ahead whose turn comes later than that of a subgroup."""
        wants = self._turn(wanted)
        later = [
            (self._turn(owner), slot)
            for slot, owner in enumerate(self._owners)
            if owner in self._pending and owner not in self._admitted and self._phases[owner] is Phase.READY
        ]
        turn, slot = max(later, default=(wants, -1))
        if turn <= wants:
            return None
        self._file(known(self._owners[slot], "a slot of nobody"))
        self._vacate(slot)
        return slot

    def _file(self, subgroup: int) -> None:
        """Have a streamed visit wait for a staging slot; ahead, those that are admitted first, each kind in order."""
        behind = 0
        if self.is_ahead:
            turn = self._turn(subgroup)
            for other in reversed(self._unfetched):
                if self._turn(other) < turn:
                    break
                behind += 1
        self._unfetched.insert(len(self._unfetched) - behind, subgroup)

    def _turn(self, subgroup: int) -> tuple[bool, int]:
        return subgroup not in self._admitted, self._places[subgroup]

    def _forget_waiting(self) -> None:
        for waiting in (self._pending, self._unfetched, self._cpu, self._copies, self._for_weights, self._gpu):
            waiting.clear()

    # Saves

    def _begin_save(self, save: Save) -> None:
        invariant(self._sweep is None and Phase.BUSY not in self._phases, "a save begins during a visit")
        invariant(save.empty or len(self._versions) == len(self._phases), "a save begins while there is fresh state")
        unsaved = dict.fromkeys([*self._dirty, *(n for n, flush in self._flushes.items() if not flush.beside)])
        if self.broken is not None:
            self.saver.ended = save, self.broken
        elif self.saver.begin(save, self.plan, unsaved, self._versions):
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
            if subgroup in self._slots:
                self._vacate(self._slots[subgroup])
            self._dirty.pop(subgroup, None)
            self._versions[subgroup] = record.step
            self.index.adopt(tile, record)

    def _done(self, operation: Operation, checksum: int) -> bool:
        """Take in that an operation has ended well; return whether a subgroup's state has changed."""
        match operation:
            case ReadTile(tile=tile):
                self._fetches[tile.subgroup] -= 1
                if self._fetches[tile.subgroup]:
                    return False
                del self._fetches[tile.subgroup]
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
                del self._gpu_slots[subgroup]
                self._settle(subgroup, changed=True)
            case Transfer(subgroup=subgroup, through=weight_slot):
                self._end_visit(subgroup)
                if self.broken is None:
                    self._issue(AwaitPush(self._take_op(), subgroup, weight_slot))
            case AwaitPush(weight_slot=weight_slot):
                del self._weight_slots[weight_slot]
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
        if subgroup in self._pending:  # of a sweep that has begun since
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

    def _let_on(self, subgroup: int) -> None:
        """Let the visit go on that waits for a subgroup's state, if one does."""
        ready = self._phases[subgroup] is Phase.READY and subgroup in self._admitted
        if subgroup in self._pending and (ready or not self.is_ahead):
            queue = self._queue_of(self._pending[subgroup])
            (queue.resident if self.plan.is_resident(subgroup) else queue.streamed).append(subgroup)

    def _ran(self, run: Run) -> None:
        visit, subgroup = run.visit, run.visit.subgroup
        self._device_of(visit).runs -= 1
        if visit.ahead:
            self._to(subgroup, Phase.DIRTY)
            if self.broken is None:
                self._beside[subgroup] = None
                self._flush(subgroup, beside=True)
            return
        if visit.changes:
            self._versions[subgroup] = self._sweep.step if self._sweep else self._versions.get(subgroup, 0)
            self.moved.append(subgroup)
        if run.weight_slot is None:
            self._end_visit(subgroup)
        elif not visit.changes:
            self._end_visit(subgroup)
            del self._weight_slots[run.weight_slot]
        elif self.broken is None:  # else the GPU keeps old weights, and the visit does not end
            self._transfer(visit, "flush", run.weight_slot)
        if run.gpu_slot is None:
            self._settle(subgroup, changed=visit.changes)
        elif not visit.changes:
            del self._gpu_slots[subgroup]
            self._settle(subgroup, changed=False)
        elif self.broken is None:
            self._transfer(visit, "flush", run.gpu_slot)

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
            self._start_copies()
            self._start_fetches()
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
                subgroup = device.first()
                gpu_slot = weight_slot = None
                if subgroup in self._gpu_slots:
                    gpu_slot, visit = self._gpu_slots[subgroup]
                elif subgroup in self._with_weights:
                    weight_slot, visit = self._with_weights.pop(subgroup)
                else:
                    visit = self._pending[subgroup]
                    if visit.weight_bytes and (weight_slot := self._take_weight_slot(visit)) is None:
                        break
                    del self._pending[subgroup]
                    self._to(subgroup, Phase.BUSY)
                device.take()
                device.runs += 1
                slot, fresh = self._slots.get(subgroup), self.is_fresh(subgroup)
                self._issue(Run(self._take_op(), self._sweep.number, visit, slot, fresh, gpu_slot, weight_slot))

    def _start_copies(self) -> None:
        """Give GPU staging slots to the visits that wait for one."""
        while self._copies and (gpu_slot := self._free_gpu_slot()) is not None:
            subgroup = self._copies.take()
            visit = self._pending.pop(subgroup)
            self._gpu_slots[subgroup] = gpu_slot, visit
            self._to(subgroup, Phase.BUSY)
            if self.is_fresh(subgroup) or visit.overwrites:
                self._gpu.under_way.append(subgroup)
            else:
                self._transfer(visit, "fetch", gpu_slot)

    def _start_fetches(self) -> None:
        """Give weight slots to the visits whose weights are to be fetched."""
        while self._for_weights:
            visit = self._pending[self._for_weights.first()]
            weight_slot = self._take_weight_slot(visit)
            if weight_slot is None:
                return
            subgroup = self._for_weights.take()
            self._with_weights[subgroup] = weight_slot, self._pending.pop(subgroup)
            self._to(subgroup, Phase.BUSY)
            self._transfer(visit, "fetch", weight_slot)

    def _transfer(self, visit: Visit, way: Literal["fetch", "flush"], through: int) -> None:
        """Copy what a visit needs: its state where it runs on the GPU, else its weights."""
        op, number = self._take_op(), visit.subgroup
        if visit.gpu:
            nbytes = self.plan.layout.subgroups[number].state_bytes
            self._issue(Transfer(op, number, "state", way, through, nbytes, self._slots.get(number)))
        else:
            self._issue(Transfer(op, number, "weights", way, through, visit.weight_bytes))

    def _take_weight_slot(self, visit: Visit) -> int | None:
        slots = range(self.plan.weight_slots)
        found = next((slot for slot in slots if slot not in self._weight_slots), None)
        if found is not None:
            self._weight_slots[found] = visit
        return found

    def _free_gpu_slot(self) -> int | None:
        used = [gpu_slot for gpu_slot, _ in self._gpu_slots.values()]
        return next((gpu_slot for gpu_slot in range(self.plan.gpu_slots) if gpu_slot not in used), None)

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
        coming = sum(subgroup not in self._pending for subgroup in self._flushes)
        for subgroup in list(self._dirty):
            if coming >= len(self._unfetched) or self.broken is not None:
                return
            if self._phases[subgroup] is Phase.DIRTY and subgroup not in self._pending:
                coming += 1
                self._flush(subgroup)

    def _free_slot(self) -> int | None:
        """Return a slot that is empty or whose content is on storage and not wanted in this sweep."""
        clean = None
        for slot, owner in enumerate(self._owners):
            if owner is None:
                return slot
            if clean is None and self._phases[owner] is Phase.READY and owner not in self._pending:
                clean = slot
        if clean is not None:
            owner = self._owners[clean]
            invariant(owner is not None and owner not in self._dirty, "a dirty slot is given away")
            self._vacate(clean)
        return clean

    def _vacate(self, slot: int) -> None:
        owner = self._owners[slot]
        if owner is not None:
            self._to(owner, Phase.ABSENT)
            del self._slots[owner]
        self._owners[slot] = None

    def _fetch(self, subgroup: int, slot: int) -> None:
        self._owners[slot] = subgroup
        self._slots[subgroup] = slot
        if self.is_fresh(subgroup) or self._pending[subgroup].overwrites:
            self._settle(subgroup, changed=False)
            return
        tiles = self.plan.layout.subgroups[subgroup].tiles
        self._to(subgroup, Phase.FETCHING)
        self._fetches[subgroup] = len(tiles)
        for tile, offset, _ in tiles:
            record = self.index.get(tile)
            if record is None:
                raise InternalError(f"{tile} was changed but never written, and its memory is gone")
            self._issue(ReadTile(self._take_op(), tile, slot, offset, record))

    def _flush(self, subgroup: int, *, for_save: bool = False, beside: bool = False) -> None:
        tiles = self.plan.layout.subgroups[subgroup].tiles
        slot = self._slots[subgroup]
        self._to(subgroup, Phase.FLUSHING)
        self._dirty.pop(subgroup, None)
        step = self._sweep.step if beside and self._sweep else self._versions[subgroup]
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
