"""An independent checker: sees only the operations that are issued and the events that are reported.

It is written from the rules below and shares no decision with `offload.schedule.machine`: it never asks what should
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
     in flight; within the path's limit; not on a path that has failed a write (otherwise than by being full beyond
     what is there).
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
 16. State is exchanged for that on storage (`TakeOver`) with nothing in flight, between sweeps and saves. What is
     taken up is in use like what was written, and what a store held before comes on top of the bytes of rule 8.
 17. The plan changes (`Extend`) with nothing in flight, between sweeps and saves. Subgroups and their homes stay, and
     so do staging slots in host memory; others may be updated on the GPU from then on.

 Sweeps beside which their caller goes on:
 18. Visits begin in the order given, as far as they are alike: on one device, those whose state lay whole in its home
     or in its staging slot at the begin of the sweep, and those whose state has to be fetched; of each, those whose
     gradients are in their buffer, and those whose gradients are read first.
 19. The caller reads weights of a subgroup, and writes its gradients, when its visit has ended (rule 11).

 Open sweeps, whose visits make versions beside the live ones (which stay the newest, as the rules above have it):
 20. An open sweep ends with `SealStep`, while none of its visits runs, and before anything else begins. Its visits
     run once admitted, in any order, and not after `PauseOpenSweep`; each on the CPU, in a staging slot, on state
     that is not fresh, and whose newest version is whole on storage.
 21. What a speculative visit makes is written as rule 7 has it, from its staging slot and under its sweep's step, to
     bytes that rule 7 allows. Its slot changes hands when it is whole on storage, or was revoked.
 22. A version beside the live one is read, visited, copied and saved by nobody before it is confirmed. It is revoked
     if a write of it fails or finds no room, or `SealStep` does not name it: then nothing of it is used again, in its
     slot neither.
 23. A confirmed version is the newest, as if it had been made by the sweep that follows: that one counts its subgroup
     as moved, and does not visit it.
 24. No version is made under the step of a version that was made by an open sweep before, whatever became of that.
 25. The bytes that versions beside the live ones may take, for the subgroups of one sweep, come on top of those of
     rule 8; what they take leaves what the plan has for checkpoints (while no path has failed and no store was
     taken up).
 26. Weights are published of confirmed versions only, of each once, and before what is left of their step begins.

 State that leaves memory:
 27. State at home in memory leaves it after `Evict`, which comes between sweeps, visits and saves; after
     `StopEviction` nothing more begins to. It is written from its home as rule 7 has it; a write that has failed is
     issued again at once, to bytes elsewhere, or its state stays. The memory is given back when the newest version is
     whole on storage, or held by a checkpoint. Then nothing reads it before all of the newest version has been read
     into it (rule 6), or a visit fills it. What lies on storage meanwhile comes on top of the bytes of rule 8. When
     all has left, staging slots are empty.

 Scratch that passes through buffers (gradients, activations):
 28. A buffer has one owner, and an owner one buffer. A caller writes to it between a `RequestBuffer` that fills and
     its `ReleaseBuffer`, when it has all that there is of the owner's data; from the first write on nothing else uses
     it meanwhile. Callers read it between a `RequestBuffer` that reads and its `ReleaseBuffer`, when it has all of
     it. It changes hands only if its owner's newest data is whole on storage and nobody has asked for it, or was
     discarded. Tiles are written from it, and read into it, as rules 6 and 7 have it; but nothing is kept on storage
     of what is about to be changed.
 29. What visits read is filled between sweeps. A visit that reads it runs when it is whole in its buffer; then it is
     of no use.
 30. Where no room was planned (activations), tiles take bytes beyond those of rule 8. A write that has failed is
     issued again elsewhere, or the tile stays in its buffer; no failure of these ends a session.

Room that is there:
 31. Of each size, there are at least as many slots beyond those of `Allocated` as versions beside the live ones and
     activations take, so that a step finds all that the plan has for it (while nothing was saved or taken up, has
     left memory or failed to be written, and the plan is the first).

Non-goals: whether an order of unlike visits is good, whether anything happens at all (a run that never ends breaks no
rule).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence

from offload.errors import TierError, TierFullError
from offload.plan.budget import Plan
from offload.protocols import SECTOR_BYTES, ScratchOwner, TileId
from offload.schedule.index import Location, TileRecord
from offload.schedule.loop import Executor
from offload.schedule.operations import (
    AbortSave,
    Admit,
    Allocated,
    AwaitPush,
    BeginSave,
    BeginSweep,
    Commit,
    CopyTile,
    Discard,
    Done,
    Event,
    Evict,
    Extend,
    Failed,
    FreeHome,
    LimitGpuSlots,
    Operation,
    PauseOpenSweep,
    ReadTile,
    ReleaseBuffer,
    ReleaseSave,
    RequestBuffer,
    Reshare,
    RunVisit,
    SaveTile,
    SealStep,
    Stop,
    StopEviction,
    Sweep,
    Sync,
    TakeOver,
    Transfer,
    Visit,
    WriteTile,
)
from world.books import (
    Beside,
    DeviceBook,
    Ground,
    KnownSubgroup,
    LeaveBook,
    SaveBook,
    ScratchBook,
    StorageBook,
    gpu_slot_of,
    subgroup_of,
    weight_slot_of,
)


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
        self._events: deque[Event] = deque()
        self._ground = Ground(plan)
        self._storage = StorageBook(self._ground)
        self._device = DeviceBook(self._ground)
        self._saves = SaveBook(self._ground, self._storage)
        self._leaves = LeaveBook(self._ground, self._storage)
        self.scratch = {kind: ScratchBook(kind, self._ground, self._storage) for kind in plan.scratch}
        """What callers write to buffers and read from them is told to these."""
        self._places, self._subgroups = self._ground.places, self._ground.subgroups
        self._require, self._violation = self._ground.require, self._ground.violation
        self._owners: list[int | None] = []
        self._flying: dict[int, Operation] = {}
        self._flying_bytes = 0
        self._last_op = 0
        self._sweep: Sweep | None = None
        self._sweep_requests: dict[int, Visit] = {}  # of the sweep; not yet run
        self._unended: dict[int, None] = {}  # run or not, not yet ended well
        self._steps: dict[int, int] = {}
        self._unbegun: dict[int, tuple[int, str]] = {}  # visits: their place in the order, and where state lay
        self._begun: dict[tuple[str, type[Operation], bool, bool], int] = {}  # the last place, by what is alike
        self._fatal: Exception | None = None
        self._again: dict[TileId, None] = {}  # tiles whose write has failed and was not issued again
        # Of the open sweep:
        self._admitted: set[int] = set()
        self._may_run = False
        self._beside_slots: Counter[int] = Counter()  # that it has taken, by payload bytes
        self._revoked: dict[int, Location] = {}  # writes in flight of versions that have been revoked
        self._open_steps: set[int] = set()
        self._confirmed: dict[int, None] = {}  # since a sweep has begun
        self._unpublished: dict[int, None] = {}
        self._taken_up = False
        self._replace_buffers(plan)

    # The two faces --------------------------------------------------------------------------------------------

    def submit(self, operations: Sequence[Operation]) -> None:
        """Verify operations, then pass them on.

        Raises:
            InternalError: If a rule is broken; notes tell the story.
        """
        for operation in operations:
            self._issued(operation)
        self._give_up_unplaced()
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
        self._ground.story.append(event)
        self._saves.settle_again()
        self._leaves.settle_again()
        match event:
            case BeginSweep(sweep):
                self._begin(sweep)
            case Done(op, written):
                self._done(self._land(op), written)
            case Failed(op, error):
                self._failed(self._land(op), error)
            case Stop(error):
                self._fatal = self._fatal or error
            case BeginSave(save):
                self._saves.begin(save, amid_a_sweep=self._sweep is not None)
            case AbortSave():
                self._saves.give_up()
            case Evict():
                busy = any(subgroup.busy for subgroup in self._subgroups)
                amid = self._sweep is not None or busy or self._saves.now is not None
                self._leaves.begin(event, amid=amid)
            case StopEviction():
                self._leaves.stays = True
            case Admit(subgroups):
                self._admitted |= set(subgroups)
            case PauseOpenSweep():
                self._may_run = False
            case SealStep(confirmed, rest):
                self._seal(confirmed)
                if rest is not None:
                    self._begin(rest)
            case Extend(plan):
                self._extend(plan)
            case LimitGpuSlots(count):
                self._device.lent_slots = count
            case Allocated(ends):
                self._storage.allocated(ends)
            case Reshare():
                self._storage.reshared = True
            case TakeOver():
                self._take_over(event)
            case ReleaseSave(number):
                self._saves.release(number)
            case RequestBuffer(owner, fills):
                amid = self._sweep is not None and self._fatal is None
                self.scratch[owner.kind].request(owner.number, fills=fills, amid_a_sweep=amid)
            case ReleaseBuffer(owner, fills):
                self.scratch[owner.kind].ready(owner.number, fills=fills)
            case Discard(owner):
                self.scratch[owner.kind].discard(owner.number)
        for book in self.scratch.values():
            book.settle()

    def filled(self, owner: ScratchOwner, buffer: int) -> None:
        """Verify that the caller may write an owner's data to a buffer, which it does now.

        Raises:
            InternalError: If it may not; notes tell the story.
        """
        self._ground.story.append(f"{owner} is written to buffer {buffer}")
        self.scratch[owner.kind].filled(owner.number, buffer)

    def read(self, owner: ScratchOwner, buffer: int) -> None:
        """Verify that the caller may read an owner's data from a buffer, which it does now.

        Raises:
            InternalError: If it may not; notes tell the story.
        """
        self._ground.story.append(f"{owner} is read from buffer {buffer}")
        self.scratch[owner.kind].read(owner.number, buffer)

    def saved(self) -> dict[int, dict[TileId, TileRecord]]:
        """Return what each finished save that was not released names."""
        return self._saves.saved()

    def save_ended(self, *, well: bool) -> None:
        """Verify how the save that was begun last has ended, by what the engine says.

        Raises:
            InternalError: If it is said to have been committed and was not, or the other way round.
        """
        self._saves.ended(well=well)

    def left(self) -> None:
        """Verify that state has left memory, as the engine says: staging slots are empty.

        Raises:
            InternalError: If one holds what is not on storage, or is in use; notes tell the story.
        """
        self._require(not self._leaves.may_leave, "27: state is said to have left memory that is there")
        for slot in range(len(self._owners)):
            self._give_up(slot)

    def ended(self, *, well: bool) -> None:
        """Verify how the sweep that was begun last has ended, by what the engine says.

        Args:
            well: Whether the engine takes it as applied.

        Raises:
            InternalError: If it is said to have ended well and has not; notes tell the story.
        """
        self._require(not (well and self._unended), "2: a sweep ends well before each of its visits")
        if well:
            self._require_published()
        self._sweep = None

    def stored(self) -> dict[TileId, tuple[Location, int, int]]:
        """Return where each tile of the newest whole versions lies, with its step and checksum."""
        return {
            tile: (record.location, record.step, record.checksum)
            for subgroup in self._subgroups
            for tile, record in subgroup.stored.items()
        }

    def is_reusable(self, subgroup: int) -> bool:
        """Return whether a subgroup's newest version is whole on storage."""
        return self._subgroups[subgroup].stored_version == self._subgroups[subgroup].version

    def is_ended(self, subgroup: int) -> bool:
        """Return whether a subgroup has no visit that has not ended well."""
        return subgroup not in self._unended

    def published(self, subgroup: int) -> None:
        """Verify that the weights of the version that an open sweep has made of a subgroup may be published.

        Raises:
            InternalError: If they may not; notes tell the story.
        """
        self._ground.story.append(f"weights of subgroup {subgroup} are published")
        self._require(subgroup in self._unpublished, "26: weights are published of a version that was not confirmed")
        del self._unpublished[subgroup]

    def _require_published(self) -> None:
        self._require(not self._unpublished, "26: weights of a confirmed version are not published")

    def enqueue_when_readable(self, subgroups: Sequence[int]) -> None:
        """Verify that a caller may read weights and write gradients of some subgroups, beside a sweep.

        Raises:
            InternalError: If it may not yet; notes tell the story.
        """
        self._ground.story.append(f"the caller goes on with subgroups {subgroups}")
        for subgroup in subgroups:
            self._require(self.is_ended(subgroup), "19: a caller goes on before a visit has ended")

    # Issuing --------------------------------------------------------------------------------------------------

    def _issued(self, operation: Operation) -> None:
        self._ground.story.append(operation)
        self._require(operation.op > self._last_op, "1: an operation's id is not new")
        self._last_op = operation.op
        self._require_published()
        again = isinstance(operation, WriteTile) and operation.tile in self._again
        if not again:
            self._require(self._fatal is None, "9: an operation after a fatal error")
            self._require(not self._again, "9: an operation before a failed write is issued again")
        if isinstance(operation, ReadTile | WriteTile) and operation.owner is not None:
            book = self.scratch[operation.owner.kind]
            if book.buffers.is_planned:
                self._again.pop(operation.tile, None)
                if isinstance(operation, ReadTile):
                    self._issued_in_order(operation)
            book.issued(operation)
            self._flying[operation.op] = operation
            return
        if isinstance(operation, RunVisit | ReadTile) or (
            isinstance(operation, Transfer) and operation.way == "fetch"
        ):
            self._issued_in_order(operation)
        if isinstance(operation, RunVisit):
            self._issued_run(operation)
            reads = operation.visit.reads
            self._require((reads is None) == (operation.gradient_buffer is None), "29: a visit with a wrong buffer")
            if reads is not None:
                self.scratch[reads.kind].issued_run(operation)
        elif isinstance(operation, SaveTile | CopyTile | Sync | Commit):
            self._saves.issued(operation)
        elif isinstance(operation, Transfer) and operation.what == "state":
            self._device.issued_copy(operation)
        elif isinstance(operation, Transfer | AwaitPush):
            self._device.issued_weights(operation, self._sweep_requests.get(operation.subgroup))
        elif isinstance(operation, FreeHome):
            self._issued_give_back(operation.subgroup)
        else:
            place = self._places[operation.tile.subgroup].get(operation.tile)
            expected = (operation.buffer_offset, operation.record.location.nbytes)
            self._require(place == expected, "6, 7: a tile is not where the layout puts it")
            at_home = self._plan.is_resident(operation.tile.subgroup)
            self._require(at_home == (operation.slot is None), "4: a transfer of state that lies elsewhere")
            if operation.slot is not None:
                self._require(0 <= operation.slot < len(self._owners), "4: there is no such staging slot")
                self._flying_bytes += operation.record.location.nbytes
                self._require(self._flying_bytes <= self._plan.staging_bytes, "8: too many bytes in flight")
            if isinstance(operation, ReadTile):
                self._issued_read(operation)
            else:
                self._issued_write(operation)
        self._flying[operation.op] = operation

    def _issued_in_order(self, operation: RunVisit | Transfer | ReadTile) -> None:
        number = operation.tile.subgroup if isinstance(operation, ReadTile) else subgroup_of(operation)
        visit, found = self._sweep_requests.get(number), self._unbegun.pop(number, None)
        if visit is None or found is None:
            return
        place, where = found
        staged = isinstance(operation, RunVisit) and gpu_slot_of(operation) is not None
        of_scratch = isinstance(operation, ReadTile) and operation.owner is not None
        alike = where, type(operation), visit.gpu, staged or of_scratch
        self._require(place > self._begun.get(alike, -1), "18: a visit begins after one that it comes before")
        self._begun[alike] = place

    def _issued_run(self, run: RunVisit) -> None:
        subgroup = self._subgroups[run.visit.subgroup]
        self._require(self._sweep is not None and run.sweep == self._sweep.number, "2: a visit of another sweep")
        self._require(self._sweep_requests.pop(run.visit.subgroup, None) == run.visit, "2: a visit that is not due")
        self._require(subgroup.beside is None, "22: a visit of a version that is not confirmed")
        if run.visit.speculative:
            self._issued_speculative_run(run, subgroup)
        self._require(run.fresh == (subgroup.version == 0), "3: a wrong word on whether the state is fresh")
        self._require(subgroup.run is None, "4: two visits at once on a subgroup")
        self._require(subgroup.copy is None, "10: a visit amid a copy")
        save = self._saves.now
        waits = save is not None and not (save.failed or save.again) and self._saves.waits_for(run.visit.subgroup)
        if waits and save is not None and save.is_troubled:  # given up, as no path takes what is left
            save.failed, waits = True, False
        self._require(not waits, "13: a visit before the state has been saved")
        at_home, slot = self._plan.at_home_on_gpu(run.visit.subgroup), run.slot
        if slot is not None and 0 <= slot < len(self._owners) and subgroup.slot != slot:
            self._take_slot(run.visit.subgroup, slot)  # before one on the GPU: then the subgroup is busy
        self._require(run.visit.gpu or not at_home, "10: state at home on the GPU is visited elsewhere")
        if (gpu_slot := gpu_slot_of(run)) is None:
            self._require(at_home or not run.visit.gpu, "10: a visit on the GPU of what is not there")
            self._require(subgroup.gpu_slot is None, "10: a visit in host memory of what lies on the GPU")
        else:
            self._require(not at_home, "10: a GPU slot for a visit that needs none")
            if subgroup.gpu_slot is None:
                self._device.take_gpu_slot(run.visit.subgroup, gpu_slot)
            self._require(subgroup.gpu_slot == gpu_slot, "10: a visit in another's GPU slot")
            filled = run.fresh or run.visit.overwrites
            self._require(filled or subgroup.gpu_holds, "10: a visit before the newest state is on the GPU")
        if self._plan.is_resident(run.visit.subgroup):
            self._require(run.slot is None, "4: resident state in a staging slot")
            self._require(not subgroup.away, "27: a visit before the state is at home again")
            self._require(not subgroup.reads and not subgroup.writes, "4: a visit amid transfers of its home")
        else:
            self._require(run.slot is not None and 0 <= run.slot < len(self._owners), "4: no staging slot")
            self._require(not subgroup.reads and not subgroup.writes, "4: a visit amid transfers of its slot")
            if not run.fresh and not run.visit.overwrites and gpu_slot is None:
                whole = len(subgroup.held) == len(self._places[run.visit.subgroup])
                self._require(whole, "3: a visit before all of the newest state is there")
        if run.visit.fetches:
            self._device.next_stage(run, "fetched", "running", "11: a visit before its weights are there")
        elif run.visit.weight_bytes:
            self._device.take_weight_slot(run, "running")
        else:
            self._require(weight_slot_of(run) is None, "11: a weight slot for a visit that needs none")
        subgroup.run = run.op

    def _issued_speculative_run(self, run: RunVisit, subgroup: KnownSubgroup) -> None:
        visit = run.visit
        self._require(visit.subgroup in self._admitted, "20: a speculative visit that was not admitted")
        self._require(self._may_run, "20: a speculative visit after a request has come in")
        plain = visit.changes and not (visit.overwrites or visit.gpu or visit.weight_bytes)
        self._require(plain and run.slot is not None and not run.fresh, "20: a speculative visit that is none")
        whole = subgroup.stored_version == subgroup.version
        self._require(whole, "20: a speculative visit of state that is not whole on storage")

    # Plans and stores that change ------------------------------------------------------------------------------

    def _extend(self, plan: Plan) -> None:
        before, count = self._plan, len(self._subgroups)
        self._require(not self._flying and not self._unended, "17: the plan changes while its memory is in use")
        self._require(self._saves.now is None, "17: the plan changes during a save")
        self._require(not self._is_open, "20: the plan changes during an open sweep")
        self._require(plan.layout.subgroups[:count] == before.layout.subgroups, "17: subgroups are cut anew")
        self._require(plan.homes[:count] == before.homes, "17: a subgroup gets another home")
        self._require(plan.staging_slots >= before.staging_slots, "17: a staging slot goes")
        self._replace_buffers(plan)

    def _replace_buffers(self, plan: Plan) -> None:
        self._plan = plan
        self._ground.adopt(plan)
        self._owners += [None] * (plan.staging_slots - len(self._owners))
        self._device.gpu_owners = [None] * plan.gpu_slots
        self._device.lent_slots = plan.gpu_slots

    def _take_over(self, event: TakeOver) -> None:
        self._require(not self._flying and not self._unended, "16: state is exchanged while it is in use")
        self._require(self._saves.now is None, "16: state is exchanged during a save")
        self._require(not self._is_open, "20: state is exchanged during an open sweep")
        self._taken_up, self._storage.counts_lent = True, False
        for number, slot in [(n, s.slot) for n, s in enumerate(self._subgroups) if s.slot is not None]:
            if any(tile.subgroup == number for tile in event.records):
                self._owners[slot] = None
                self._subgroups[number].slot = None
        self._saves.take_over(event)
        self._storage.lost_bytes += sum(self._storage.extents[path].end for path in event.stores)
        for number in sorted({tile.subgroup for tile in event.records}):
            subgroup = self._subgroups[number]
            self._storage.leave(subgroup.stored)
            subgroup.stored = {tile: event.records[tile] for tile in self._places[number]}
            for record in subgroup.stored.values():
                self._storage.orphans.pop(record.location, None)
            subgroup.version += 1
            subgroup.stored_version = subgroup.version
            subgroup.step = next(iter(subgroup.stored.values())).step
            subgroup.held = set()

    def _issued_give_back(self, number: int) -> None:
        subgroup = self._subgroups[number]
        self._leaves.gives_back(number)
        idle = not subgroup.busy and not subgroup.reads and not subgroup.writes
        self._require(idle, "27: memory is given back that is in use")
        if subgroup.stored_version != subgroup.version:
            named = (records for records in reversed(self._saves.kept.values()))
            held = next(({tile: each[tile] for tile in self._places[number] if tile in each} for each in named), {})
            current = len(held) == len(self._places[number]) and {v for v, _ in held.values()} == {subgroup.version}
            self._require(current, "27: memory is given back of state that is not on storage")
            subgroup.stored = {tile: record for tile, (_, record) in held.items()}
            subgroup.stored_version = subgroup.version
            for record in subgroup.stored.values():
                self._storage.orphans.pop(record.location, None)
        subgroup.away, subgroup.held = True, set()
        visit = self._sweep_requests.get(number)
        if visit is not None and visit.overwrites:
            self._note_home(subgroup)

    def _note_home(self, subgroup: KnownSubgroup) -> None:
        """Take in that memory holds a subgroup's state again, or is about to be filled: what is stored goes."""
        self._storage.leave(subgroup.stored)
        subgroup.away, subgroup.stored, subgroup.stored_version = False, {}, 0

    def _issued_read(self, read: ReadTile) -> None:
        subgroup = self._subgroups[read.tile.subgroup]
        self._require(subgroup.beside is None, "22: a read beside a version that is not confirmed")
        if read.slot is None:
            self._require(subgroup.away, "27: a read over state that is at home in memory")
        elif subgroup.slot != read.slot:
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
        if self._saves.now is not None:
            self._saves.now.again.pop(write.tile, None)
        self._require(subgroup.slot == write.slot, "4: a write from a slot that is not its subgroup's")
        if write.slot is None:
            self._leaves.issued_write(write)
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
        self._require(0 <= location.path < len(self._storage.extents), "7: there is no such path")
        self._storage.take(location)
        subgroup.writes[write.tile] = write.op

    def _issued_write_beside(self, write: WriteTile, beside: Beside) -> None:
        nbytes = write.record.location.nbytes
        self._require(write.tile in beside.held, "21: a write of what is not in the staging slot")
        self._require(write.tile not in beside.arrived, "21: a second write of a tile that has arrived")
        self._require(write.record.step == beside.step, "21: a write under another step than that of its sweep")
        self._require(0 <= write.record.location.path < len(self._storage.extents), "21: there is no such path")
        self._beside_slots[nbytes] += 1
        self._storage.take(write.record.location, lent=True)
        beside.writes[write.tile] = write.op
        if self._taken_up or any(path.failed for path in self._storage.extents):
            return
        taken = sum((size + SECTOR_BYTES) * count for size, count in self._beside_slots.items())
        planned = self._plan.checkpoint_bytes if self._plan.has_room_for_checkpoints else 0
        room = sum(path.limit for path in self._storage.extents) - self._plan.storage_bytes - self._storage.lost_bytes
        self._require(taken + planned <= room, "25: a version beside the live one takes room of checkpoints")

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
        # A broken machine ends an open one by itself.
        self._require(broken or not self._is_open, "20: a sweep begins before an open one has been sealed")
        changes = any(visit.changes for visit in sweep.visits)
        used = sweep.step in (self._steps.values() if sweep.is_open else self._open_steps)
        self._require(not (changes and used), "24: a version number is used again")
        alike = all(visit.speculative is sweep.is_open for visit in sweep.visits)
        self._require(alike, "20: a speculative visit in a sweep that is not open, or the other way round")
        self._sweep = sweep
        for book in self.scratch.values():
            book.begin(sweep.visits)
        self._steps[sweep.number] = sweep.step
        self._sweep_requests = {visit.subgroup: visit for visit in sweep.visits}
        self._begun, self._unbegun = {}, {}
        if sweep.is_open:
            self._open_steps.add(sweep.step)
            self._admitted, self._may_run = set(), True
            self._beside_slots.clear()
            places = (self._places[visit.subgroup].values() for visit in sweep.visits)
            self._storage.most_beside |= Counter(nbytes for each in places for _, nbytes in each)
            return
        self._unended = dict.fromkeys(self._sweep_requests)
        again = self._sweep_requests.keys() & self._confirmed
        self._require(not again, "23: a visit of what was confirmed")
        self.moved = [*self._confirmed]
        self._confirmed = {}
        order = ((visit.subgroup, place) for place, visit in enumerate(sweep.visits))
        self._unbegun = {number: (place, where) for number, place in order if (where := self._where(number))}
        for visit in sweep.visits:
            if visit.overwrites and self._subgroups[visit.subgroup].away:
                self._note_home(self._subgroups[visit.subgroup])

    @property
    def _is_open(self) -> bool:
        return self._sweep is not None and self._sweep.is_open

    @property
    def _is_broken(self) -> bool:
        return self._fatal is not None or bool(self._again)

    def _seal(self, confirmed: Collection[int]) -> None:
        self._require(self._is_open or self._is_broken, "20: versions are confirmed of no open sweep")
        running = any(subgroup.run is not None for subgroup in self._subgroups)
        self._require(not running or self._is_broken, "20: versions are confirmed while one is being made")
        chosen = () if self._is_broken else confirmed
        self._sweep = None
        self._sweep_requests = {}
        for number in chosen:
            subgroup = self._subgroups[number]
            beside, subgroup.beside = subgroup.beside, None
            if beside is None:
                raise self._violation("23: a version is confirmed that is not there")
            subgroup.version += 1
            subgroup.step, subgroup.held, subgroup.arriving = beside.step, beside.held, beside.arrived
            self._confirmed[number] = self._unpublished[number] = None
            places = [record.location for record in beside.arrived.values()]
            for place in (*places, *map(self._location_of, beside.writes.values())):
                del self._storage.extents[place.path].lent[place.offset]
            self._arrived(number)
        for subgroup in self._subgroups:
            self._revoke(subgroup)

    def _revoke(self, subgroup: KnownSubgroup) -> None:
        """Forget a version beside the live one, if there is one; its slot has nothing of use any more."""
        beside, subgroup.beside = subgroup.beside, None
        if beside is not None:
            self._storage.leave(beside.arrived)
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
        self._storage.leave(subgroup.stored)
        subgroup.stored, subgroup.arriving = subgroup.arriving, {}
        subgroup.stored_version = subgroup.version
        self._saves.flushed(number)

    def _where(self, number: int) -> str:
        """Return where a subgroup's state lies, or "" if something works on it that a visit has to wait for."""
        subgroup = self._subgroups[number]
        if self._saves.waits_for(number):
            return ""
        if subgroup.busy or subgroup.copy is not None or subgroup.reads or subgroup.writes:
            return ""
        if self._plan.is_resident(number):
            return "away" if subgroup.away else "home"
        is_there = subgroup.slot is not None and (subgroup.held or not subgroup.version)
        return "slot" if is_there else "storage"

    def _land(self, op: int) -> Operation:
        operation = self._flying.pop(op, None)
        if operation is None:
            raise self._violation("1: an operation is reported that is not in flight")
        staged = isinstance(operation, ReadTile | WriteTile) and operation.slot is not None
        if isinstance(operation, ReadTile | WriteTile) and staged and operation.owner is None:
            self._flying_bytes -= operation.record.location.nbytes
        return operation

    def _done(self, operation: Operation, written: TileRecord | None) -> None:
        if isinstance(operation, WriteTile | SaveTile):
            self._storage.written(operation.record.location)
        match operation:
            case SaveTile() | CopyTile() | Sync() | Commit():
                self._saves.done(operation, written)
            case ReadTile(owner=ScratchOwner() as owner) | WriteTile(owner=ScratchOwner() as owner):
                self.scratch[owner.kind].done(operation, written)
            case ReadTile(tile=tile):
                subgroup = self._subgroups[tile.subgroup]
                del subgroup.reads[tile]
                subgroup.held.add(tile)
                if subgroup.away and len(subgroup.held) == len(self._places[tile.subgroup]):
                    self._note_home(subgroup)
            case WriteTile(tile=tile, record=record):
                subgroup = self._subgroups[tile.subgroup]
                del subgroup.writes[tile]
                if operation.op in self._revoked:
                    self._storage.extents[record.location.path].leave(record.location.offset)
                    del self._revoked[operation.op]
                    return
                if subgroup.beside is not None and tile in subgroup.beside.writes:
                    del subgroup.beside.writes[tile]
                    subgroup.beside.arrived[tile] = written or record
                    return
                if tile.subgroup in self._leaves.given_up:
                    self._storage.extents[record.location.path].leave(record.location.offset)
                    self._leaves.end_given_up(tile.subgroup)
                    return
                if tile.subgroup in self._saves.given_up:
                    self._storage.extents[record.location.path].leave(record.location.offset)
                    self._saves.end_given_up(tile.subgroup)
                    return
                subgroup.arriving[tile] = written or record
                self._arrived(tile.subgroup)
            case RunVisit(visit=visit) if visit.speculative:
                subgroup = self._subgroups[visit.subgroup]
                subgroup.run, subgroup.held = None, set()
                places = set(self._places[visit.subgroup])
                subgroup.beside = Beside(self._steps[operation.sweep], places)
            case RunVisit(visit=visit):
                subgroup = self._subgroups[visit.subgroup]
                subgroup.run = None
                if visit.reads is not None:
                    self.scratch[visit.reads.kind].discard(visit.reads.number)
                weight_slot = weight_slot_of(operation)
                pushes = weight_slot is not None and visit.changes
                if weight_slot is not None and pushes:
                    self._device.weight_slots[weight_slot].stage = "made"
                elif weight_slot is not None:
                    del self._device.weight_slots[weight_slot]
                if (
                    not pushes
                    and operation.sweep in self._steps
                    and self._sweep
                    and operation.sweep == self._sweep.number
                ):
                    self._unended.pop(visit.subgroup, None)
                if gpu_slot_of(operation) is not None and visit.changes:
                    subgroup.gpu_holds = subgroup.gpu_ahead = True
                elif gpu_slot_of(operation) is not None:
                    self._device.leave_gpu(visit.subgroup)
                if visit.changes:
                    self.moved.append(visit.subgroup)
                    subgroup.version += 1
                    subgroup.step = self._steps[operation.sweep]
                    subgroup.held = set(self._places[visit.subgroup])
                    self._storage.leave(subgroup.arriving)
                    subgroup.arriving = {}
            case Transfer(what="state", subgroup=number):
                self._subgroups[number].copy = None
                if operation.way == "fetch":
                    self._subgroups[number].gpu_holds = True
                else:
                    self._device.leave_gpu(number)
            case Transfer() | AwaitPush():
                self._device.done_weights(operation)
                if isinstance(operation, Transfer) and operation.way == "flush":
                    self._unended.pop(operation.subgroup, None)

    def _failed(self, operation: Operation, error: Exception) -> None:
        self._storage.is_full = isinstance(error, TierFullError)
        match operation:
            case SaveTile() | CopyTile() | Sync() | Commit():
                self._saves.failed(operation)
            case ReadTile(owner=ScratchOwner() as owner) | WriteTile(owner=ScratchOwner() as owner):
                goes_elsewhere = self.scratch[owner.kind].failed(operation)
                if not self.scratch[owner.kind].buffers.is_planned:
                    return
                if isinstance(operation, WriteTile) and isinstance(error, TierError):
                    self._storage.fail(operation.record.location)
                    self._again |= dict.fromkeys([operation.tile] * goes_elsewhere)
                else:
                    self._fatal = self._fatal or error
            case WriteTile(tile=tile) if operation.op in self._revoked or self._subgroups[tile.subgroup].beside:
                self._failed_beside(operation)
            case WriteTile(slot=None, tile=tile):
                del self._subgroups[tile.subgroup].writes[tile]
                self._leaves.failed(operation)
            case WriteTile(tile=tile, record=record) if tile.subgroup in self._saves.given_up:
                del self._subgroups[tile.subgroup].writes[tile]
                self._storage.lose(record.location)
                self._saves.end_given_up(tile.subgroup)
            case WriteTile(tile=tile, record=record) if tile.subgroup in self._saves.for_save:
                del self._subgroups[tile.subgroup].writes[tile]
                self._storage.lose(record.location)
                if self._saves.now is not None:
                    self._saves.now.again[tile] = None
            case WriteTile(tile=tile, record=record):
                del self._subgroups[tile.subgroup].writes[tile]
                self._storage.extents[record.location.path].leave(record.location.offset)
                if isinstance(error, TierError):
                    self._storage.fail(record.location)
                    self._again[tile] = None
                else:
                    self._fatal = self._fatal or error
            case ReadTile(tile=tile):
                del self._subgroups[tile.subgroup].reads[tile]
                self._fatal = self._fatal or error
            case RunVisit(visit=visit):
                self._subgroups[visit.subgroup].run = None
                self._fatal = self._fatal or error
            case FreeHome():
                self._fatal = self._fatal or error
            case Transfer(subgroup=number) | AwaitPush(subgroup=number):
                if isinstance(operation, Transfer) and operation.what == "state":
                    self._subgroups[number].copy = None
                self._fatal = self._fatal or error

    def _failed_beside(self, write: WriteTile) -> None:
        """A version goes with a write of it that has failed, and with it bytes that nobody uses again."""
        subgroup = self._subgroups[write.tile.subgroup]
        del subgroup.writes[write.tile]
        self._storage.lose(write.record.location)
        if self._revoked.pop(write.op, None) is None and subgroup.beside is not None:
            self._beside_slots[write.record.location.nbytes] -= 1
            del subgroup.beside.writes[write.tile]
            self._abort_version(subgroup, subgroup.beside)

    def _give_up_unplaced(self) -> None:
        """All writes of a version are decided at once: one that lacks some found no room, and goes."""
        for subgroup, places in zip(self._subgroups, self._places, strict=True):
            beside = subgroup.beside
            if beside is not None and len(beside.writes) + len(beside.arrived) < len(places):
                self._abort_version(subgroup, beside)

    def _abort_version(self, subgroup: KnownSubgroup, beside: Beside) -> None:
        places = [record.location for record in beside.arrived.values()]
        places += [self._location_of(op) for op in beside.writes.values()]
        self._beside_slots -= Counter(place.nbytes for place in places)
        self._revoke(subgroup)
