"""A checker of what bytes do not show: it sees only the operations that are issued and the events that are reported.

What is read or written too early, at a wrong place or in another version shows by itself: `SimData` fills memory and
store slots with rubbish while something is under way in them, a read verifies what it finds, an actor's twin says
what has to come out, and `Driver.audit` looks for all that is stored. So the checker keeps no account of versions.
It never asks what should be done next, only whether what is done may be done.

Rules:
  1. An operation has an id of its own and is reported once.
  2. Nothing touches bytes, in memory or on a path, that an operation in flight or a caller touches, unless both read.
     A staging slot on the GPU, and a weight slot, is one subgroup's from its first use until what was changed in it
     has left.
  3. A slot on a path is aligned, lies within the path's limit, and is not written on a path that has failed a write
     (otherwise than by being full beyond what is there). Callers touch a buffer only when they have asked for it.
  4. After a fatal error (a failed run or read, `Stop`) nothing new is issued. A failed write is issued again before
     anything else, or nothing more is.
  5. A sweep's visits run once, and while no other sweep is under way. It ends well only if each has ended: its run,
     or the push of its weights. Then, and not before, a caller beside it may use that subgroup.
  6. Visits begin in the order given, as far as they are alike: on one device, those whose state lay in memory, and
     those whose state has to be fetched. This is judged of subgroups that nothing was under way for when the sweep
     began, outside saves.
  7. A write carries the step of its state's last change. Speculative versions get a step of their own.
  8. A speculative visit runs once admitted and not after `PauseOpenSweep`. `SealStep` comes while none runs, and
     before anything else begins. A confirmed version is not visited, and its weights are published once, before what
     is left of the step begins. A revoked one is not written any more.
  9. Bytes that speculative versions take leave what the plan has for checkpoints; and of each size of slots at
     least as many are used beyond those of `Allocated` as are lent, so that a step finds all that is planned for it.
     This is judged until a write fails, or anything was saved, taken over, evicted or added to the plan.
 10. A save begins between sweeps and saves. After a failure other than a write's nothing more is issued for it. It
     writes no tile that a checkpoint holds in its version. All that a commit names had been written when the last
     sync of its path began, which has ended. A save is said to be committed if and only if it is.
 11. The plan changes, and state is taken over, with nothing in flight and between sweeps and saves. A larger plan
     takes nothing away.

Non-goals: whether an order of unlike visits is good, whether anything happens at all (a run that never ends breaks no
rule).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from offload.errors import InternalError, TierError, TierFullError
from offload.plan.budget import Plan
from offload.protocols import SECTOR_BYTES, ScratchOwner, TileId
from offload.schedule import operations as ops
from offload.schedule.index import Location
from offload.schedule.loop import Executor

STORY_LENGTH = 60
"""Operations and events that a violation tells of."""


class Touch(NamedTuple):
    """Bytes that an operation touches: of what, from where to where, and whether it writes them."""

    what: tuple[str, int]
    start: int
    stop: int
    writes: bool

    def conflicts(self, other: Touch) -> bool:
        """Return whether both may not be under way at once."""
        overlap = self.what == other.what and self.start < other.stop and other.start < self.stop
        return overlap and (self.writes or other.writes)


def memory_of(subgroup: int, slot: int | None, owner: ScratchOwner | None = None) -> tuple[str, int]:
    """Return where state lies that is in a staging slot or at home (None), or scratch in a buffer."""
    if slot is None:
        return "home", subgroup
    return ("staging slot", slot) if owner is None else (owner.kind, slot)


def stop_of(place: Location) -> int:
    """Return where a slot on a path ends."""
    return place.offset + SECTOR_BYTES + place.nbytes


def subgroup_of(operation: ops.Operation) -> int | None:
    """Return the subgroup that an operation is for."""
    if isinstance(operation, ops.RunVisit):
        return operation.visit.subgroup
    if isinstance(operation, ops.ReadTile | ops.WriteTile | ops.SaveTile | ops.CopyTile):
        return operation.tile.subgroup
    return None if isinstance(operation, ops.Sync | ops.Commit) else operation.subgroup


def slot_beside(operation: ops.Operation) -> tuple[str, int] | None:
    """Return the staging slot on the GPU, or the weight slot, that an operation uses."""
    match operation:
        case ops.RunVisit(visit=visit, transfer_slot=int(slot)):
            return "GPU slot" if visit.gpu else "weight slot", slot
        case ops.Transfer(what=what, transfer_slot=slot):
            return "GPU slot" if what == "state" else "weight slot", slot
        case ops.AwaitPush(transfer_slot=slot):
            return "weight slot", slot
    return None


def touches(operation: ops.Operation, plan: Plan) -> Iterator[Touch]:
    """Yield what an operation touches, but for what `slot_beside` tells."""
    match operation:
        case ops.ReadTile() | ops.WriteTile() | ops.SaveTile() | ops.CopyTile():
            where, nbytes = operation.record.location, operation.record.location.nbytes
            fetches = isinstance(operation, ops.ReadTile | ops.CopyTile)
            yield Touch(("path", where.path), where.offset, stop_of(where), not fetches)
            if isinstance(operation, ops.ReadTile | ops.WriteTile):
                memory = memory_of(operation.tile.subgroup, operation.slot, operation.owner)
                yield Touch(memory, operation.buffer_offset, operation.buffer_offset + nbytes, fetches)
                return
            if operation.buffer is not None:
                gathers = isinstance(operation, ops.SaveTile) and operation.gathers
                yield Touch(("copy buffer", operation.buffer), 0, nbytes, fetches or gathers)
            if isinstance(operation, ops.SaveTile) and (operation.buffer is None or operation.gathers):
                subgroup = plan.layout.subgroups[operation.tile.subgroup]
                kind = "masters" if operation.tile.tensor >= len(subgroup.tensors) else "home"
                start = operation.source_offset
                yield Touch((kind, subgroup.index), start, start + nbytes, False)
        case ops.RunVisit(visit=visit):
            subgroup = plan.layout.subgroups[visit.subgroup]
            yield Touch(memory_of(subgroup.index, operation.slot), 0, subgroup.state_bytes, True)
            if operation.gradient_buffer is not None:
                yield Touch(("gradients", operation.gradient_buffer), 0, plan.gradient_buffer_bytes, False)
            if subgroup.weight_tiles and visit.changes and not visit.speculative:
                yield Touch(("masters", subgroup.index), 0, subgroup.numel * 4, True)
        case ops.Transfer(what="state", subgroup=number):
            nbytes = plan.layout.subgroups[number].state_bytes
            yield Touch(memory_of(number, operation.slot), 0, nbytes, operation.way == "flush")
        case ops.FreeHome(subgroup=number):
            yield Touch(("home", number), 0, plan.layout.subgroups[number].state_bytes, True)


class CheckedExecutor:
    """Passes everything on to another executor and verifies that it keeps the rules.

    Events are handed on one by one, so that each operation is judged by what was known when it was issued. Whatever
    it is told of, it raises `InternalError` if a rule is broken then; notes tell the story.
    """

    def __init__(self, inner: Executor, plan: Plan) -> None:
        self.moved: list[int] = []
        """Subgroups whose changing visit has ended well in the current (or last) sweep, in that order."""
        self._inner, self._plan = inner, plan
        self._events: deque[ops.Event] = deque()
        self._story: deque[str | ops.Operation | ops.Event] = deque(maxlen=STORY_LENGTH)
        self._last_op = 0
        self._flying: dict[int, tuple[ops.Operation, list[Touch]]] = {}
        self._asked: set[tuple[ScratchOwner, bool]] = set()  # buffers that callers want, and whether to fill them
        self._filling: dict[ScratchOwner, Touch] = {}
        self._holders: dict[tuple[str, int], int] = {}  # slots on the GPU and weight slots
        self._fatal = False
        self._again: dict[TileId, None] = {}  # tiles whose write has failed and was not issued again
        self._failed_paths: set[int] = set()
        # Sweeps:
        self._sweep: ops.Sweep | None = None
        self._steps: dict[int, int] = {}  # of each sweep
        self._due: dict[int, ops.Visit] = {}
        self._unended: dict[int, None] = {}
        self._in_slots: dict[int, int] = {}  # whose state each staging slot has had last
        self._unbegun: dict[int, tuple[int, bool]] = {}  # visits whose order counts: place, and if in memory
        self._begun: dict[tuple[object, ...], int] = {}  # the last place, by what is alike
        # Versions:
        self._changed: dict[int, int] = {}  # step of each subgroup's last change
        self._speculative: dict[int, int] = {}  # and of the speculative version beside it
        self._optional: set[int] = set()  # writes in flight that may fail: of what was revoked or discarded, of saves
        self._open_steps: set[int] = set()
        self._admitted: set[int] = set()
        self._may_run = False
        self._confirmed: dict[int, None] = {}  # since a sweep has begun
        self._unpublished: dict[int, None] = {}
        # Room:
        self._is_roomy = True
        self._allocated: Sequence[int] = ()
        self._there = Counter[int]()  # of each path, the first bytes whose room is there
        self._grown: set[Location] = set()
        self._lent: dict[Location, ScratchOwner | int] = {}  # to activations, or to a subgroup's speculative version
        # Saves:
        self._save: ops.Save | None = None
        self._save_failed = False
        self._committed = False
        self._at_save: dict[int, int] = {}  # step of each subgroup's last change when it began
        self._kept: dict[int, set[tuple[TileId, int]]] = {}  # tiles and steps that a checkpoint holds
        self._unsynced: set[Location] = set()
        self._syncing: dict[int, set[Location]] = {}

    # The two faces

    def submit(self, operations: Sequence[ops.Operation]) -> None:
        """Verify operations, then pass them on."""
        for operation in operations:
            self._issued(operation)
        self._revoke_unplaced()
        self._inner.submit(operations)

    def wait(self) -> list[ops.Event]:
        """Return the next event of the inner executor."""
        while not self._events:
            self._events.extend(self._inner.wait())
        event = self._events.popleft()
        self.observe(event)
        return [event]

    def observe(self, event: ops.Event) -> None:
        """Take in an event that reaches the machine by another way than `wait`."""
        self._story.append(event)
        match event:
            case ops.BeginSweep(sweep):
                self._begin(sweep)
            case ops.Done(op):
                self._done(self._land(op))
            case ops.Failed(op, error):
                self._failed(self._land(op), error)
            case ops.Stop():
                self._fatal = True
            case ops.Admit(subgroups):
                self._admitted |= set(subgroups)
            case ops.PauseOpenSweep():
                self._may_run = False
            case ops.SealStep(confirmed, rest):
                self._seal(confirmed)
                if rest is not None:
                    self._begin(rest)
            case ops.BeginSave(save):
                self._require(self._sweep is None and self._save is None, "10: a save begins amid something else")
                self._save, self._save_failed, self._committed, self._is_roomy = save, False, False, False
                self._at_save = dict(self._changed)
            case ops.AbortSave():
                self._save_failed = True
            case ops.ReleaseSave(number):
                del self._kept[number]
            case ops.Extend(plan):
                self._extend(plan)
            case ops.TakeOver():
                self._require(self._is_idle, "11: state is exchanged while it is in use")
                self._is_roomy = False
                self._in_slots.clear()
                for number, records in event.held_records.items():
                    self._kept[number] = {(tile, record.step) for tile, record in records.items()}
                self._changed |= {tile.subgroup: record.step for tile, record in event.records.items()}
            case ops.Evict():
                self._is_roomy = False
                self._in_slots.clear()
            case ops.Allocated(ends):
                self._is_roomy = self._is_roomy and not any(self._allocated)
                self._allocated = ends
                self._there |= Counter(dict(enumerate(ends)))
            case ops.RequestBuffer(owner, fills):
                self._asked.add((owner, fills))
            case ops.ReleaseBuffer(owner, fills):
                self._asked.discard((owner, fills))
                self._filling.pop(owner, None)
            case ops.Discard(owner):
                self._discard(owner)

    def filled(self, owner: ScratchOwner, buffer: int) -> None:
        """Verify that the caller may write an owner's data to a buffer, which it does until `ReleaseBuffer`."""
        self._filling[owner] = self._caller_touches(owner, buffer, fills=True)

    def read(self, owner: ScratchOwner, buffer: int) -> None:
        """Verify that the caller may read an owner's data from a buffer, which it does now."""
        self._caller_touches(owner, buffer, fills=False)

    def _caller_touches(self, owner: ScratchOwner, buffer: int, *, fills: bool) -> Touch:
        self._story.append(f"{owner} is {'written to' if fills else 'read from'} buffer {buffer}")
        self._require((owner, fills) in self._asked, "3: a caller touches a buffer that it has not asked for")
        self._filling.pop(owner, None)
        touch = Touch((owner.kind, buffer), 0, 1 << 60, fills)
        self._require_free([touch])
        return touch

    def save_ended(self, *, well: bool) -> None:
        """Verify how the save that was begun last has ended, by what the engine says."""
        self._require(well == self._committed, "10: a save has ended otherwise than it is said to have")
        self._save = None

    def ended(self, *, well: bool) -> None:
        """Verify how the sweep that was begun last has ended, by what the engine says."""
        self._require(not (well and self._unended), "5: a sweep ends well before each of its visits")
        self._require(not (well and self._unpublished), "8: weights of a confirmed version are not published")
        self._sweep = None

    def is_ended(self, subgroup: int) -> bool:
        """Return whether a subgroup has no visit that has not ended well."""
        return subgroup not in self._unended

    def published(self, subgroup: int) -> None:
        """Verify that the weights of the version that an open sweep has made of a subgroup may be published."""
        self._story.append(f"weights of subgroup {subgroup} are published")
        self._require(subgroup in self._unpublished, "8: weights are published of a version that was not confirmed")
        del self._unpublished[subgroup]

    def enqueue_when_readable(self, subgroups: Sequence[int]) -> None:
        """Verify that a caller may read weights and write gradients of some subgroups, beside a sweep."""
        self._story.append(f"the caller goes on with subgroups {subgroups}")
        self._require(all(map(self.is_ended, subgroups)), "5: a caller goes on before a visit has ended")

    def _require(self, condition: object, rule: str) -> None:
        if not condition:
            error = InternalError(f"rule {rule} (this is a bug in offload, please report it)")
            error.add_note("last operations and events:\n  " + "\n  ".join(f"{what!r:.300}" for what in self._story))
            raise error

    def _require_free(self, own: Collection[Touch]) -> None:
        """Verify that nothing under way touches the same bytes."""
        others = [touch for _, touched in self._flying.values() for touch in touched] + [*self._filling.values()]
        free = not any(touch.conflicts(other) for touch in own for other in others)
        self._require(free, "2: bytes are touched that something under way touches")

    @property
    def _is_broken(self) -> bool:
        return self._fatal or bool(self._again)

    @property
    def _is_open(self) -> bool:
        return self._sweep is not None and self._sweep.is_open

    @property
    def _is_idle(self) -> bool:
        return not (self._flying or self._unended or self._save or self._is_open)

    def _is_planned(self, owner: ScratchOwner | None) -> bool:
        """Return whether there is room for what is written: for state, and scratch that steps need."""
        return owner is None or self._plan.scratch[owner.kind].is_planned

    def _writes(self, owner: ScratchOwner | None) -> Iterator[ops.WriteTile]:
        """Yield the writes in flight of an owner's scratch, or of state."""
        for operation, _ in self._flying.values():
            if isinstance(operation, ops.WriteTile) and operation.owner == owner:
                yield operation

    # Issuing

    def _issued(self, operation: ops.Operation) -> None:
        self._story.append(operation)
        self._require(operation.op > self._last_op, "1: an operation's id is not new")
        self._last_op = operation.op
        self._require(not self._unpublished, "8: weights of a confirmed version are not published")
        if isinstance(operation, ops.WriteTile) and operation.tile in self._again:
            del self._again[operation.tile]
        else:
            self._require(not self._fatal, "4: an operation after a fatal error")
            self._require(not self._again, "4: an operation before a failed write is issued again")
        own = [*touches(operation, self._plan)]
        self._require_free(own)
        self._flying[operation.op] = (
            operation,
            [] if isinstance(operation, ops.FreeHome) else own,
        )  # that is done at once
        self._judge_order(operation)
        number, slot = subgroup_of(operation), slot_beside(operation)
        if number is not None and slot is not None:
            self._require(self._holders.setdefault(slot, number) == number, f"2: another's {slot[0]}")
        match operation:
            case ops.RunVisit(visit=visit, slot=at):
                self._hold_slot(visit.subgroup, at)
                self._issued_run(operation)
            case ops.ReadTile(tile=tile, slot=at, owner=None):
                self._hold_slot(tile.subgroup, at)
            case ops.WriteTile():
                self._issued_write(operation)
            case ops.SaveTile():
                self._issued_write(operation)
                self._issued_for_save(operation)
            case ops.CopyTile() | ops.Sync() | ops.Commit():
                self._issued_for_save(operation)

    def _judge_order(self, operation: ops.Operation) -> None:
        """Verify the order of visits by the first operation of each."""
        if not isinstance(operation, ops.RunVisit | ops.ReadTile) and not (
            isinstance(operation, ops.Transfer) and operation.way == "fetch"
        ):
            return
        number = subgroup_of(operation)
        if number is None or number not in self._unbegun:
            return
        place, is_there = self._unbegun.pop(number)
        of_scratch = isinstance(operation, ops.ReadTile) and operation.owner is not None
        where = self._plan.is_resident(number), is_there, slot_beside(operation) is not None, of_scratch
        alike = type(operation), self._due[number].gpu, where
        self._require(place > self._begun.get(alike, -1), "6: a visit begins after one that it comes before")
        self._begun[alike] = place

    def _hold_slot(self, number: int, slot: int | None) -> None:
        """Take in that a subgroup's state is in a staging slot, or at home or nowhere (None)."""
        self._in_slots = {other: whose for other, whose in self._in_slots.items() if whose != number}
        if slot is not None:
            self._in_slots[slot] = number

    def _issued_run(self, run: ops.RunVisit) -> None:
        number = run.visit.subgroup
        self._require(self._sweep is not None and run.sweep == self._sweep.number, "5: a visit of another sweep")
        self._require(self._due.pop(number, None) == run.visit, "5: a visit that is not due")
        self._require(run.fresh == (number not in self._changed), "5: a wrong word on whether the state is fresh")
        if run.visit.speculative:
            self._require(number in self._admitted, "8: a speculative visit that was not admitted")
            self._require(self._may_run, "8: a speculative visit after a request has come in")

    def _issued_write(self, write: ops.WriteTile | ops.SaveTile) -> None:
        place, number = write.record.location, write.tile.subgroup
        owner = write.owner if isinstance(write, ops.WriteTile) else None
        if isinstance(write, ops.SaveTile):
            step = self._at_save.get(number)
        else:  # a speculative version's, if there is one
            step = self._speculative.get(number, self._changed.get(number))
        right = owner is not None or write.record.step == step
        self._require(right, "7: a write under another step than its change's")
        is_of_save = step == self._at_save.get(number) and self._save is not None
        if isinstance(write, ops.WriteTile) and owner is None and (write.slot is None or is_of_save):
            self._optional.add(write.op)
        paths = self._plan.budgets.paths
        if place.path == len(paths):  # the store that takes copies
            return
        stop = stop_of(place)
        self._require(place.offset >= 0 and place.offset % SECTOR_BYTES == 0, "3: a slot that is not aligned")
        self._require(stop <= paths[place.path].available_bytes, "3: a write beyond its path's limit")
        self._require(place.path not in self._failed_paths, "3: a write to a path that has failed a write")
        if not self._allocated or stop > self._allocated[place.path]:
            self._grown.add(place)
        if owner is not None and not self._is_planned(owner):
            self._lend(place, owner)
        elif owner is None and isinstance(write, ops.WriteTile) and number in self._speculative:
            self._lend(place, number)

    def _lend(self, place: Location, whose: ScratchOwner | int) -> None:
        """Verify that a write to a slot that a step can do without leaves room."""
        self._lent[place] = whose
        if not self._is_roomy:
            return
        grown = sum(other.nbytes == place.nbytes for other in self._grown)
        lent = sum(other.nbytes == place.nbytes for other in self._lent)
        self._require(grown >= lent, "9: a slot that a step may need is lent")
        plan = self._plan
        versions = (other.nbytes + SECTOR_BYTES for other, of in self._lent.items() if isinstance(of, int))
        planned = plan.checkpoint_bytes if plan.has_room_for_checkpoints else 0
        room = sum(path.available_bytes for path in plan.budgets.paths) - plan.storage_bytes
        fits = not isinstance(whose, int) or sum(versions) + planned <= room
        self._require(fits, "9: a speculative version takes room of checkpoints")

    def _issued_for_save(self, operation: ops.SaveTile | ops.CopyTile | ops.Sync | ops.Commit) -> None:
        save = self._save
        self._require(save is not None and not self._save_failed, "10: an operation of no save, or a failed one")
        match operation:
            case ops.SaveTile(tile=tile, record=record) if save is not None and save.sink is None:
                held = any((tile, record.step) in held for held in self._kept.values())
                self._require(not held, "10: a save writes what a checkpoint holds")
            case ops.Sync(path=path):
                self._syncing[operation.op] = {place for place in self._unsynced if place.path == path}
                self._unsynced -= self._syncing[operation.op]
            case ops.Commit(records=records):
                late = self._unsynced.union(*self._syncing.values())
                durable = not any(record.location in late for record in records.values())
                self._require(durable, "10: a commit before all that it names has been synced")

    # Reporting

    def _land(self, op: int) -> ops.Operation:
        self._require(op in self._flying, "1: an operation is reported that is not in flight")
        return self._flying.pop(op)[0]

    def _done(self, operation: ops.Operation) -> None:
        match operation:
            case ops.WriteTile(record=record) | ops.SaveTile(record=record):
                self._unsynced.add(record.location)
                self._there |= Counter({record.location.path: stop_of(record.location)})
                self._optional.discard(operation.op)
            case ops.Sync():
                del self._syncing[operation.op]
            case ops.Commit(number=number, records=records):
                if self._save is not None and self._save.sink is None:
                    self._kept[number] = {(tile, record.step) for tile, record in records.items()}
                self._save, self._committed = None, True
            case ops.RunVisit(visit=visit):
                self._ran(operation, visit)
            case ops.Transfer(way="flush", what=what, subgroup=number):
                if what == "weights":
                    self._unended.pop(number, None)
                else:
                    self._leave_slot(operation)
            case ops.AwaitPush():
                self._leave_slot(operation)

    def _ran(self, run: ops.RunVisit, visit: ops.Visit) -> None:
        number = visit.subgroup
        if visit.reads is not None:
            self._discard(visit.reads)
        if visit.speculative:
            self._speculative[number] = self._steps[run.sweep]
            return
        pushes = visit.weight_bytes > 0 and visit.changes
        if not pushes and self._sweep is not None and run.sweep == self._sweep.number:
            self._unended.pop(number, None)
        if not visit.changes:
            self._leave_slot(run)
            return
        self.moved.append(number)
        self._changed[number] = self._steps[run.sweep]

    def _leave_slot(self, operation: ops.Operation) -> None:
        slot = slot_beside(operation)
        if slot is not None:
            self._holders.pop(slot, None)

    def _failed(self, operation: ops.Operation, error: Exception) -> None:
        match operation:
            case ops.SaveTile():
                self._is_roomy = False
            case ops.CopyTile() | ops.Sync() | ops.Commit():
                self._unsynced |= self._syncing.pop(operation.op, set())
                self._save_failed = True
            case ops.WriteTile():
                self._is_roomy = False
                self._failed_write(operation, error)
            case ops.ReadTile(owner=owner) if not self._is_planned(owner):
                pass  # it is the caller who is told
            case _:
                self._fatal = True

    def _failed_write(self, write: ops.WriteTile, error: Exception) -> None:
        """Training can do without speculative versions, what leaves memory, saves, and scratch that has no room."""
        if write.op in self._optional or not self._is_planned(write.owner):
            self._optional.discard(write.op)
        elif write.owner is None and write.tile.subgroup in self._speculative:
            self._revoke(write.tile.subgroup)
        elif isinstance(error, TierError):
            self._again[write.tile] = None
            place = write.record.location
            if not isinstance(error, TierFullError) or stop_of(place) <= self._there[place.path]:
                self._failed_paths.add(place.path)
        else:
            self._fatal = True

    # Sweeps

    def _begin(self, sweep: ops.Sweep) -> None:
        is_over = not self._unended and not self._is_open
        self._require(is_over or self._is_broken, "5: a sweep begins while another is under way")
        used = sweep.step in (self._steps.values() if sweep.is_open else self._open_steps)
        changes = any(visit.changes for visit in sweep.visits)
        self._require(not (changes and used), "7: a version number is used again")
        alike = all(visit.speculative is sweep.is_open for visit in sweep.visits)
        self._require(alike, "8: a speculative visit in a sweep that is not open, or the other way round")
        self._sweep = sweep
        self._steps[sweep.number] = sweep.step
        self._due = {visit.subgroup: visit for visit in sweep.visits}
        self._begun, self._unbegun = {}, {}
        if sweep.is_open:
            self._open_steps.add(sweep.step)
            self._admitted, self._may_run = set(), True
            return
        self._unended = dict.fromkeys(self._due)
        self._require(not self._due.keys() & self._confirmed, "8: a visit of what was confirmed")
        self.moved, self._confirmed = [*self._confirmed], {}
        if self._save is not None:
            return
        busy = {subgroup_of(operation) for operation, _ in self._flying.values()} | {*self._holders.values()}
        for place, visit in enumerate(sweep.visits):
            number, is_there = visit.subgroup, visit.subgroup in self._in_slots.values()
            if not visit.overwrites and number in self._changed and number not in busy:
                self._unbegun[number] = place, is_there

    def _seal(self, confirmed: Collection[int]) -> None:
        self._require(self._is_open or self._is_broken, "8: versions are confirmed of no open sweep")
        running = any(isinstance(operation, ops.RunVisit) for operation, _ in self._flying.values())
        self._require(not running or self._is_broken, "8: versions are confirmed while one is being made")
        self._sweep, self._due = None, {}
        for number in () if self._is_broken else confirmed:
            self._require(number in self._speculative, "8: a version is confirmed that is not there")
            self._changed[number] = self._speculative.pop(number)
            self._confirmed[number] = self._unpublished[number] = None
            self._no_longer_lent(number)
        for number in [*self._speculative]:
            self._revoke(number)

    def _revoke(self, number: int) -> None:
        """Forget a speculative version: nothing of it is used again."""
        del self._speculative[number]
        self._hold_slot(number, None)
        self._no_longer_lent(number)
        self._optional |= {write.op for write in self._writes(None) if write.tile.subgroup == number}

    def _revoke_unplaced(self) -> None:
        """All writes of a version are decided at once: one that lacks some has found no room, and goes."""
        for number in [*self._speculative]:
            placed = sum(whose == number for whose in self._lent.values())
            if 0 < placed < len(self._plan.layout.subgroups[number].tiles):
                self._revoke(number)

    # Plans and scratch

    def _extend(self, plan: Plan) -> None:
        before = self._plan
        count = len(before.homes)
        self._require(self._is_idle, "11: the plan changes while it is in use")
        self._require(plan.layout.subgroups[:count] == before.layout.subgroups, "11: subgroups are cut anew")
        self._require(plan.homes[:count] == before.homes, "11: a subgroup gets another home")
        self._require(plan.staging_slots >= before.staging_slots, "11: a staging slot goes")
        self._plan, self._is_roomy = plan, False

    def _discard(self, owner: ScratchOwner) -> None:
        self._filling.pop(owner, None)
        self._asked.discard((owner, True))
        self._no_longer_lent(owner)
        self._optional |= {write.op for write in self._writes(owner)}

    def _no_longer_lent(self, whose: ScratchOwner | int) -> None:
        self._lent = {place: other for place, other in self._lent.items() if other != whose}
