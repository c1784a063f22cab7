"""Machines, indices, and parts of a session that are wrong on purpose, each in one way.

Most are the machine behind a filter (`Filtered`): what it asks for and what it is told passes through, and something
is left out, done too early or changed on the way. Such a bug knows operations, events and public names only.

What leaving out a call or a condition, or another operator, would make of the product is here only where nothing else
shows that a rule is held: `mutations.py` makes such mistakes. Nor is one mistake here for each kind of bytes that may
be written over: the stores find all of them in one way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from callers import Calls

from offload.engine.executor import no_visit
from offload.schedule import operations as ops
from offload.schedule.index import Location, TileIndex, TileRecord
from offload.schedule.machine import Machine
from offload.schedule.staging import Phase
from offload.session.speculation import Speculation
from offload.session.step import PendingStep
from offload.session.thread import EngineThread, nothing

PLANTED: dict[type, tuple[str, str]] = {}
"""Each with the actor that finds it, and what finds it first: a rule, or what a test says."""


def found_by(choice: str, says: str, method: Callable[..., Any] | None = None) -> Callable[[Any], type]:
    """Plant a class; or a function, as the one method of a class that is wrong."""

    def planted(wrong: Any) -> type:
        if method is not None:
            base = globals()[method.__qualname__.split(".")[0]]
            wrong = type(wrong.__name__, (base,), {method.__name__: wrong})
        PLANTED[wrong] = choice, says
        return wrong

    return planted


def begun(event):
    """Return the sweep that an event begins, or None."""
    if isinstance(event, ops.BeginSweep):
        return event.sweep
    return event.rest if isinstance(event, ops.SealStep) else None


class Filtered(Machine):
    """A machine behind a filter.

    Operations have other ids outside, so that some may be left out, added, or put in another order. An operation
    whose end the machine was told of (`tell`) may go on outside; what becomes of it is told to nobody.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.asked: dict[int, ops.Operation] = {}
        """What the machine waits for, by its own ids."""
        self.outside: dict[int, ops.Operation] = {}
        """What is under way, by its id outside."""
        self.sweep = ops.Sweep(0, 0, ())
        """The one that has begun last."""
        self.open = ops.Sweep(0, -1, ())
        """The last open sweep."""
        self.noted: dict[Any, Any] = {}
        """What a bug remembers."""
        self._given = 0
        super().__init__(*arguments, **more)

    def asks(self, operation: Any) -> Iterable[ops.Operation]:
        """Return what is started in an operation's place."""
        return (operation,)

    def hears(self, event: Any, operation: Any) -> Iterable[ops.Event]:
        """Return what the machine is told in an event's place, which is perhaps of one of its operations."""
        return (event,)

    def arrange(self, operations: list[ops.Operation]) -> list[ops.Operation]:
        """Return operations in the order in which they are started."""
        return operations

    def tell(self, event: ops.Event) -> None:
        """Tell the machine, and nobody else."""
        if isinstance(event, ops.Done | ops.Failed):
            del self.asked[event.op]
        Machine.handle(self, event)

    def under_way(self, kind: Any) -> list[Any]:
        """Return the operations of a kind that the machine waits for."""
        return [operation for operation in self.asked.values() if isinstance(operation, kind)]

    def is_beside(self, operation: Any) -> bool:
        """Return whether an operation is a write of the last open sweep, whose versions are beside the live ones."""
        return isinstance(operation, ops.WriteTile) and operation.record.step == self.open.step

    def handle(self, event: ops.Event) -> None:
        operation = None
        if isinstance(event, ops.Done | ops.Failed):
            operation = self.outside.pop(event.op)
            if operation.op not in self.asked:
                return
            event = replace(event, op=operation.op)
        if (sweep := begun(event)) is not None:
            self.sweep = sweep
            self.open = sweep if sweep.is_open else self.open
        for heard in self.hears(event, operation):
            self.tell(heard)

    def take_operations(self) -> list[ops.Operation]:
        out: list[ops.Operation] = []
        while asked := super().take_operations():
            self.asked |= {operation.op: operation for operation in asked}
            for operation in asked:
                out += self.asks(operation)
        given = []
        for operation in self.arrange(out):
            self._given += 1
            self.outside[self._given] = operation
            given.append(replace(operation, op=self._given))
        return given


class EndsEarly(Filtered):
    """Operations that count as done when they are started."""

    def hits(self, operation: Any) -> bool:
        """Return whether an operation is one of them."""
        raise NotImplementedError

    def asks(self, operation: Any) -> Iterator[ops.Operation]:
        yield operation
        if self.hits(operation):
            self.tell(ops.Done(operation.op))


class Overwrites(Filtered):
    """Writes that go to another place of the same size, which is not free."""

    def places(self, write: Any) -> Iterable[Location | None]:
        """Return where a write may go in place of where it should; the first that there is counts."""
        raise NotImplementedError

    def asks(self, operation: Any) -> Iterable[ops.Operation]:
        if isinstance(operation, ops.WriteTile | ops.SaveTile):
            right = operation.record.location
            wrong = (p for p in self.places(operation) if p is not None and p.nbytes == right.nbytes and p != right)
            operation = replace(operation, record=replace(operation.record, location=next(wrong, right)))
        return (operation,)

    def live(self, *subgroups: int) -> Iterator[Location | None]:
        """Yield where the newest versions of subgroups' tiles lie; of all, if none is named."""
        for subgroup in subgroups or range(len(self.plan.layout.subgroups)):
            for tile, _, _ in self.plan.layout.subgroups[subgroup].tiles:
                record = self.index.get(tile)
                yield None if record is None else record.location


# Sweeps: the machine


@found_by("sweeps", "was written to a slot nobody claimed", Overwrites.places)
def writes_in_place(self, write):
    record = self.index.get(write.tile)
    return () if record is None else (record.location,)


@found_by("sweeps", "rule 2:")
class CommitsTileByTile(Overwrites):
    """The version before of a tile goes when that tile has been written, and others of its subgroup have not."""

    def hears(self, event, operation):
        if isinstance(event, ops.Done) and isinstance(operation, ops.WriteTile):
            number, record = operation.tile.subgroup, self.index.get(operation.tile)
            self.noted.setdefault(number, []).append(record and record.location)
            if sum(write.tile.subgroup == number for write in self.under_way(ops.WriteTile)) == 1:
                del self.noted[number]  # all of them go
        return (event,)

    def places(self, write):
        return (place for places in self.noted.values() for place in places)


@found_by("sweeps", "rule 4:")
class GoesOnAfterBreaking(Filtered):
    """What is fatal is seen when nothing else is under way."""

    fatal = None

    def hears(self, event, operation):
        if self.fatal is None and isinstance(event, ops.Failed) and isinstance(operation, ops.ReadTile):
            self.fatal = event
        else:
            yield event
        if self.fatal is not None and self.fatal.op in self.asked and len(self.asked) == 1:
            yield self.fatal


@found_by("sweeps", "rule 5:", Filtered.asks)
def skips_a_visit(self, operation):
    """It counts as done, and is never started."""
    plain = isinstance(operation, ops.RunVisit) and operation.transfer_slot is None
    if plain and operation.visit == self.sweep.visits[-1]:
        self.tell(ops.Done(operation.op))
    else:
        yield operation


@found_by("sweeps", "rule 2:", Filtered.asks)
def flushes_while_running(self, operation):
    yield operation
    if isinstance(operation, ops.RunVisit) and operation.slot is not None:
        tile, offset, nbytes = self.plan.layout.subgroups[operation.visit.subgroup].tiles[0]
        yield ops.WriteTile(0, tile, operation.slot, offset, TileRecord(Location(0, 1 << 40, nbytes), 0, 0))


@found_by("sweeps", "rule 2:", Filtered.asks)
def fetches_into_wrong_place(self, operation):
    if isinstance(operation, ops.ReadTile) and operation.tile.tensor:
        operation = replace(operation, buffer_offset=operation.buffer_offset - operation.record.location.nbytes)
    return (operation,)


@found_by("sweeps", "rule 5:", Filtered.asks)
def takes_state_for_fresh(self, operation):
    wrong = isinstance(operation, ops.RunVisit) and operation.sweep > 1
    return (replace(operation, fresh=True) if wrong else operation,)


@found_by("sweeps", "rule 2:")
class SharesASlot(Filtered):
    """A fetch goes to the slot of a subgroup in a certain phase."""

    phase = Phase.FETCHING

    def asks(self, operation):
        if isinstance(operation, ops.ReadTile):
            number = operation.tile.subgroup
            slots = (s for n, s in self.slots.items() if n != number and self.phases[n] is self.phase)
            operation = replace(operation, slot=next(slots, operation.slot))
        return (operation,)


@found_by("sweeps", "rule 2:")
class SharesAGpuSlot(Filtered):
    what = "state"

    def asks(self, operation):
        what = getattr(operation, "what", "weights")
        what = "state" if isinstance(operation, ops.RunVisit) and operation.visit.gpu else what
        shares = what == self.what and getattr(operation, "transfer_slot", None)
        return (replace(operation, transfer_slot=0) if shares else operation,)


@found_by("sweeps", "rule 2:")
class SharesAWeightSlot(SharesAGpuSlot):
    what = "weights"


@found_by("changing", "a sweep sees wrong bytes")
class ForgetsOwnersWhenThePlanGrows(SharesASlot):
    """A slot of unsaved state counts as free from then on."""

    phase = Phase.DIRTY
    grown = False

    def hears(self, event, operation):
        self.grown = self.grown or isinstance(event, ops.Extend)
        return (event,)

    def asks(self, operation):
        return super().asks(operation) if self.grown else (operation,)


@found_by("sweeps", "rule 3:", Overwrites.places)
def writes_beyond_the_limit(self, write):
    place = write.record.location
    return (replace(place, offset=self.index.limit_bytes(place.path) & ~4095),)


@found_by("sweeps", "rule 2:", Overwrites.places)
def writes_over_its_neighbour(self, write):
    place = write.record.location
    return (replace(place, offset=place.offset - 4096),) if place.offset >= 4096 else ()


@found_by("sweeps", "was written over")
class IndexOfOldVersions(TileIndex):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._before = {}

    def commit(self, tile, record):
        self._before[tile] = super().get(tile) or record
        super().commit(tile, record)

    def get(self, tile):
        return self._before.get(tile)


@found_by("changing", "it broke for too little")
class IndexThatLosesSlotsWhenReshared(TileIndex):
    """Slots that are free then are claimed, by nobody."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.freed = Counter()

    def commit(self, tile, record):
        self.freed[record.location.nbytes] += self.get(tile) is not None
        super().commit(tile, record)

    def claim(self, nbytes, avoid=(), *, lent=False):
        self.freed[nbytes] -= self.freed[nbytes] > 0
        return super().claim(nbytes, avoid, lent=lent)

    def reshare(self, shares):
        super().reshare(shares)
        for nbytes, count in self.freed.items():
            for _ in range(count):
                super().claim(nbytes)
        self.freed.clear()


# State that leaves memory


@found_by("parks", "rule 2:", EndsEarly.hits)
def gives_memory_back_before_the_last_tile(self, operation):
    is_home = isinstance(operation, ops.WriteTile) and operation.slot is None
    return is_home and operation.tile == self.plan.layout.subgroups[operation.tile.subgroup].tiles[-1][0]


# Saves


@found_by("saves", "was written over", Filtered.hears)
def releases_too_early(self, event, operation):
    """What a checkpoint holds goes when the next sweep begins."""
    if isinstance(event, ops.BeginSweep):
        return (*map(ops.ReleaseSave, self.saver.held_records), event)
    return () if isinstance(event, ops.ReleaseSave) else (event,)


@found_by("saves", "is lost or torn", Filtered.hears)
def ignores_failed_saves(self, event, operation):
    fails = isinstance(event, ops.Failed) and isinstance(operation, ops.SaveTile)
    return (ops.Done(event.op),) if fails else (event,)


@found_by("saves", "is of another moment", Filtered.asks)
def saves_from_the_wrong_place(self, operation):
    if isinstance(operation, ops.SaveTile) and operation.source_offset:
        operation = replace(operation, source_offset=0)
    return (operation,)


@found_by("saves", "rule 2:", Overwrites.places)
def writes_over_what_is_held(self, write):
    return (record.location for records in self.saver.held_records.values() for record in records.values())


@found_by("saves", "was written over", Filtered.hears)
def takes_up_another_version(self, event, operation):
    """What a checkpoint holds passes for older than it is."""
    if isinstance(event, ops.TakeOver):
        held = {
            n: {t: replace(r, step=r.step - 1) for t, r in each.items()} for n, each in event.held_records.items()
        }
        event = replace(event, held_records=held)
    return (event,)


# Callers that go on


@found_by("calls", "weights are not the last step's")
class WritesGradientsAtOnce(Calls):
    """Backward writes to a gradient slot that a deferred visit has still to read."""

    def wait_for_gradients(self, module):
        pass


@found_by("calls", "rule 5:")
class EndsAVisitBeforeItsPush(Filtered):
    """A module is let on when the update has run, and its weights are not on the GPU."""

    def asks(self, operation):
        if isinstance(operation, ops.Transfer) and (operation.what, operation.way) == ("weights", "flush"):
            self.ended_visits.append(operation.subgroup)
        return (operation,)

    def tell(self, event):
        super().tell(event)
        self.ended_visits[:] = dict.fromkeys(self.ended_visits)


@found_by("calls", "rule 5:")
class WaitsForOneSubgroupOnly(PendingStep):
    def wait_for(self, subgroups):
        super().wait_for([*subgroups][:1])


@found_by("calls", "rule 5:")
class LetsOnWhoComesAgain(PendingStep):
    left = None
    """Visits that have not ended."""

    def begin(self, subgroups):
        visits = [*subgroups]
        self.left, self.all = {*visits}, {*visits}
        super().begin(visits)

    def note_visited(self, subgroups):
        super().note_visited(subgroups)
        self.left.difference_update(subgroups)

    def wait_for(self, subgroups):
        if self.left and self.left == self.all:
            super().wait_for(subgroups)


@found_by("calls", "and the caller was told of")
class AsksBeforeItWasTold(EngineThread):
    """A request takes the place of the sweep that nobody has waited for, and its failure is gone."""

    def finish_pending(self):
        if self.pending is not None and self.pending.is_over:
            super().finish_pending()


@found_by("calls", "rule 5:")
class BeginsAmidASweep(AsksBeforeItWasTold):
    """A request waits for nothing: neither its caller nor the engine does."""

    def _may_begin(self, machine):
        return self._parts.executor.requests > 0


@found_by("calls", "rule 5:")
class AnswersBeforeTheSweepHasEnded(EngineThread):
    """What is not to go on behind its caller does."""

    def request(self, begin, applied=nothing, meanwhile=nothing, pending=None, *, seals=False):
        alone = pending is None
        pending = pending or PendingStep(())
        super().request(begin, applied, meanwhile, pending, seals=seals)
        if alone:
            self.pending = None


@found_by("calls", "a visit of a sweep of nobody")
class EndsTheRequestThatGoesOn(EngineThread):
    """An answer ends the request: what its visits work with is taken away."""

    def request(self, begin, applied=nothing, meanwhile=nothing, pending=None, *, seals=False):
        def ends():
            meanwhile()
            self._parts.executor.set_visitor(no_visit)

        super().request(begin, applied, meanwhile if pending is None else ends, pending, seals=seals)


@found_by("calls", "rule 6:", Filtered.hears)
def visits_the_last_first(self, event, operation):
    if isinstance(event, ops.BeginSweep):
        event = ops.BeginSweep(replace(event.sweep, visits=event.sweep.visits[::-1]))
    return (event,)


@found_by("calls", "rule 6:", Filtered.arrange)
def runs_the_last_first(self, operations):
    last_first = (operation for operation in reversed(operations) if isinstance(operation, ops.RunVisit))
    return [next(last_first) if isinstance(each, ops.RunVisit) else each for each in operations]


@found_by("calls", "rule 2:", Filtered.hears)
def loses_flushes_of_the_forward_pass(self, event, operation):
    """What is being flushed when a sweep begins counts as flushed."""
    if isinstance(event, ops.BeginSweep):
        yield from [ops.Done(write.op) for write in self.under_way(ops.WriteTile)]
    yield event


# Open sweeps


@found_by("calls", "rule 9:", Overwrites.places)
def frees_the_live_version_early(self, write):
    """Its slots go when the version beside it has been written."""
    written = {*self.speculative_versions} - {operation.tile.subgroup for operation in self.under_way(ops.WriteTile)}
    return self.live(*sorted(written)) if written else ()


@found_by("calls", "rule 9:", Filtered.hears)
def takes_over_what_is_written_at_once(self, event, operation):
    """A speculative version is the newest as soon as it is on storage."""
    if isinstance(event, ops.Done) and self.is_beside(operation):
        number = operation.tile.subgroup
        self.noted.setdefault(number, []).append((operation.tile, operation.record))
        if sum(write.tile.subgroup == number for write in self.under_way(ops.WriteTile)) == 1:
            for tile, record in self.noted.pop(number):
                self.index.commit(tile, record)
    yield event


@found_by("calls", "rule 10:")
class SavesWhatWasRevoked(Filtered):
    """A checkpoint names revoked versions."""

    def hears(self, event, operation):
        if isinstance(event, ops.Done) and self.is_beside(operation):
            self.noted[operation.tile] = event.record or operation.record
        elif isinstance(event, ops.BeginSweep) and event.sweep.is_open:
            self.noted.clear()
        elif isinstance(event, ops.SealStep):
            self.noted = {t: r for t, r in self.noted.items() if t.subgroup not in event.confirmed}
        yield event

    def asks(self, operation):
        if isinstance(operation, ops.Commit) and not self.is_open:
            operation = replace(operation, records={**operation.records, **self.noted})
        return (operation,)


@found_by("calls", "is lost or torn", Filtered.hears)
def gives_a_second_slot(self, event, operation):
    """A subgroup whose revoked version is still being written is fetched beside that."""
    if (sweep := begun(event)) is not None and not sweep.is_open:
        yield from [ops.Done(write.op) for write in self.under_way(ops.WriteTile) if self.is_beside(write)]
    yield event


@found_by("calls", "rule 8:", Filtered.hears)
def runs_after_hold(self, event, operation):
    return () if isinstance(event, ops.PauseOpenSweep) else (event,)


@found_by("calls", "rule 7:", Filtered.asks)
def writes_under_the_live_step(self, operation):
    if self.is_beside(operation):
        live = self.index.get(operation.tile)
        operation = replace(operation, record=replace(operation.record, step=live.step))
    return (operation,)


@found_by("calls", "is of another moment")
class ConfirmsWhatIsHalfWritten(Filtered):
    """Of a version that is confirmed, tiles that are still being written then stay what they were."""

    late = frozenset()

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        commit = self.index.commit

        def in_time(tile, record):
            if tile in self.late:
                self.late.remove(tile)
                self.index.abandon(record.location)
            else:
                commit(tile, record)

        self.index.commit = in_time

    def hears(self, event, operation):
        if isinstance(event, ops.SealStep):
            beside = [write.tile for write in self.under_way(ops.WriteTile) if self.is_beside(write)]
            self.late = {tile for tile in beside if tile.subgroup in event.confirmed}
        return (event,)


@found_by("calls", "rule 9:")
class TakesRoomOfCheckpoints(TileIndex):
    def missing_bytes(self, slot_counts, *, lent=False):
        return super().missing_bytes(slot_counts)


@found_by("calls", "rule 8:")
class PublishesEarly(Speculation):
    """As soon as a version has been made."""

    def pause(self):
        super().pause()
        for subgroup in self._parts.machine.speculative_versions:
            self._publish(subgroup)


@found_by("calls", "weights are not the last step's")
class ConfirmsWithOtherRows(Speculation):
    """Whatever is clipped, or has another rate, or is not active any more."""

    def choose_confirmed(self, subgroups):
        tables, step_rows = self._parts.tables, self._parts.tables.step_rows
        tables.step_rows = tables.expected
        try:
            return super().choose_confirmed(subgroups)
        finally:
            tables.step_rows = step_rows


@found_by("calls", "rule 8:")
class ConfirmsWhenABatchIsSkipped(Speculation):
    """And for any other request."""

    def revoke(self):
        machine = self._parts.machine
        if machine.is_open and machine.broken is None:
            chosen = tuple(machine.speculative_versions)
            machine.handle(ops.SealStep(chosen))
            for subgroup in chosen:
                self._publish(subgroup)
            self._forget_versions()
        else:
            super().revoke()


@found_by("calls", "rule 8:")
class VisitsWhatWasConfirmed(Speculation):
    def seal(self, confirmed, rest):
        super().seal(confirmed, replace(rest, visits=(*rest.visits, *map(ops.Visit, confirmed))))


@found_by("calls", "rule 7:")
class UsesANumberAgain(Calls):
    """A step's versions have the number of those that were made before it was sealed, and revoked."""

    def version_of(self, number):
        return 10 * self.stands_for[number] + 5


# Gradients that pass through buffers


def of_scratch(operation: Any, kind: Any, scratch: str) -> bool:
    """Return whether an operation is of that kind, and moves a tile of such scratch."""
    return isinstance(operation, kind) and operation.owner is not None and operation.owner.kind == scratch


@found_by("fills", "rule 2:", Filtered.asks)
def visits_with_other_gradients(self, operation):
    if isinstance(operation, ops.RunVisit) and operation.visit.reads and self.plan.gradient_buffers > 1:
        buffer = (operation.gradient_buffer + 1) % self.plan.gradient_buffers
        operation = replace(operation, gradient_buffer=buffer)
    return (operation,)


@found_by("fills", "rule 2:", Filtered.asks)
def reads_the_first_gradients_again(self, operation):
    """What is read is what was written first."""
    if of_scratch(operation, ops.WriteTile, "gradients"):
        self.noted.setdefault(operation.tile, operation.record.location)
    if of_scratch(operation, ops.ReadTile, "gradients"):
        record = replace(operation.record, location=self.noted[operation.tile])
        operation = replace(operation, record=record)
    return (operation,)


# Activations that pass through buffers


@found_by("packs", "rule 2:", EndsEarly.hits)
def reads_activations_too_early(self, operation):
    return of_scratch(operation, ops.ReadTile, "activations")


@found_by("packs", "is lost or torn", Overwrites.places)
def writes_activations_over_state(self, write):
    return self.live() if of_scratch(write, ops.WriteTile, "activations") else ()
