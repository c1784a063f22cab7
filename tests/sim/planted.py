"""Machines, indices, and parts of a session that are wrong on purpose, each in one way.

Most are the machine behind a filter (`Filtered`): what it asks for and what it is told passes through, and something
is left out, done too early or changed on the way. Such a bug knows operations, events and public names only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import backwards
import forwards

from offload.engine.executor import visit_nothing
from offload.errors import InternalError, SessionBrokenError
from offload.schedule.index import Location, Record, TileIndex
from offload.schedule.machine import Machine
from offload.schedule.operations import (
    Admit,
    AwaitPush,
    Begin,
    Commit,
    Discard,
    Done,
    Event,
    Extend,
    Failed,
    Hold,
    Operation,
    ReadTile,
    Release,
    Run,
    SaveTile,
    Seal,
    Stay,
    Stop,
    Sweep,
    Sync,
    TakeOver,
    Transfer,
    Visit,
    WriteTile,
)
from offload.schedule.staging import Phase
from offload.session.speculation import Speculation
from offload.session.step import PendingStep
from offload.session.thread import EngineThread, nothing


def assert_found(run_seed: Callable[[int], object], seeds: range, by: str) -> None:
    """Check what gives a bug away first: a rule of the checker ("rule 5:"), the bytes, or the way it ends."""
    found = None
    for seed in seeds:
        try:
            run_seed(seed)
        except (AssertionError, InternalError) as error:
            found = error
            break
    assert found is not None, "nobody noticed"
    if by.startswith("rule") or isinstance(found, InternalError):
        assert isinstance(found, InternalError), f"something else is found: {found}"
        assert str(found).startswith(by), f"something else is found: {found}"
    else:
        assert by in str(found), f"something else is found: {found}"


def subgroup_of(operation: Any) -> int | None:
    """Return the subgroup that an operation is for."""
    if isinstance(operation, Run):
        return operation.visit.subgroup
    return operation.tile.subgroup if hasattr(operation, "tile") else getattr(operation, "subgroup", None)


def is_transfer(operation: Any, what: str, way: str) -> bool:
    """Return whether an operation carries that, that way."""
    return isinstance(operation, Transfer) and (operation.what, operation.way) == (what, way)


def begun(event):
    """Return the sweep that an event begins, or None."""
    if isinstance(event, Begin):
        return event.sweep
    return event.rest if isinstance(event, Seal) else None


class Filtered(Machine):
    """A machine behind a filter.

    Operations have other ids outside, so that some may be left out, added, or put in another order. An operation
    whose end the machine was told of (`tell`) may go on outside; what becomes of it is told to nobody.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.asked: dict[int, Operation] = {}
        """What the machine waits for, by its own ids."""
        self.outside: dict[int, Operation] = {}
        """What is under way, by its id outside."""
        self.later: list[Operation] = []
        """What is started with the next operations."""
        self.sweep = Sweep(0, 0, ())
        """The one that has begun last."""
        self.runs_begun = 0
        """Its runs so far."""
        self._given = 0
        super().__init__(*arguments, **more)

    def asks(self, operation: Any) -> Iterable[Operation]:
        """Return what is started in an operation's place."""
        return (operation,)

    def hears(self, event: Any, operation: Any) -> Iterable[Event]:
        """Return what the machine is told in an event's place, which is perhaps of one of its operations."""
        return (event,)

    def landed(self, event: Event, operation: Any) -> None:
        """Take in the end of an operation that the machine was told of before."""

    def arrange(self, operations: list[Operation]) -> list[Operation]:
        """Return operations in the order in which they are started."""
        return operations

    def tell(self, event: Event) -> None:
        """Tell the machine, and nobody else."""
        if isinstance(event, Done | Failed):
            del self.asked[event.op]
        Machine.handle(self, event)

    def under_way(self, kind: Any) -> list[Any]:
        """Return the operations of a kind that the machine waits for."""
        return [operation for operation in self.asked.values() if isinstance(operation, kind)]

    def handle(self, event: Event) -> None:
        operation = None
        if isinstance(event, Done | Failed):
            operation = self.outside.pop(event.op)
            if operation.op not in self.asked:
                self.landed(event, operation)
                return
            event = replace(event, op=operation.op)
        if (sweep := begun(event)) is not None:
            self.sweep, self.runs_begun = sweep, 0
        for heard in self.hears(event, operation):
            self.tell(heard)

    def take_operations(self) -> list[Operation]:
        out, self.later = self.later, []
        while asked := super().take_operations():
            self.asked |= {operation.op: operation for operation in asked}
            for operation in asked:
                self.runs_begun += isinstance(operation, Run)
                out += self.asks(operation)
        given = []
        for operation in self.arrange(out):
            self._given += 1
            self.outside[self._given] = operation
            given.append(replace(operation, op=self._given))
        return given


class Chooses(Filtered):
    """Does something to the operations that it hits."""

    def hits(self, operation: Any) -> bool:
        """Return whether an operation is done wrongly."""
        raise NotImplementedError


class Skips(Chooses):
    """Operations that count as done and are never started."""

    def asks(self, operation: Any) -> Iterator[Operation]:
        if self.hits(operation):
            self.tell(Done(operation.op))
        else:
            yield operation


class EndsEarly(Chooses):
    """Operations that count as done when they are started."""

    def asks(self, operation: Any) -> Iterator[Operation]:
        yield operation
        if self.hits(operation):
            self.tell(Done(operation.op))


class IgnoresFailure(Chooses):
    """Operations that count as done when they have failed."""

    def hears(self, event: Any, operation: Any) -> Iterable[Event]:
        return (Done(event.op),) if isinstance(event, Failed) and self.hits(operation) else (event,)


class Overwrites(Filtered):
    """Writes that go to a slot that is not free."""

    def target(self, write: Any) -> Location | None:
        """Return where a write goes in place of where it should; None for there."""
        raise NotImplementedError

    def asks(self, operation: Any) -> Iterable[Operation]:
        target = self.target(operation) if isinstance(operation, WriteTile | SaveTile) else None
        if target is not None:
            operation = replace(operation, record=replace(operation.record, location=target))
        return (operation,)

    def live(self, tile: Any) -> Location | None:
        """Return where the newest version of a tile lies."""
        record = self.index.get(tile)
        return None if record is None else record.location


def of_size(places: Iterable[Location | None], write: Any) -> Location | None:
    """Return the first place that is as large as the one that a write should go to."""
    right = write.record.location
    return next((p for p in places if p is not None and p.nbytes == right.nbytes and p != right), None)


# Sweeps: the machine


class RunsBeforeTheLastTile(Filtered):
    def hears(self, event, operation):
        yield event
        if isinstance(event, Done) and isinstance(operation, ReadTile):
            left = [read for read in self.under_way(ReadTile) if read.tile.subgroup == operation.tile.subgroup]
            if len(left) == 1:
                yield Done(left[0].op)


class ReusesDirtySlot(Skips):
    def hits(self, operation):
        return isinstance(operation, WriteTile)


class FlushesHalf(Skips):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.written = Counter()

    def hits(self, operation):
        if isinstance(operation, WriteTile):
            self.written[operation.tile.subgroup] += 1
        return isinstance(operation, WriteTile) and self.written[operation.tile.subgroup] % 2 == 0


class WritesInPlace(Overwrites):
    def target(self, write):
        return self.live(write.tile)


class FreesOldVersionFirst(Overwrites):
    """A tile goes to where the version before of another tile lies."""

    def target(self, write):
        tiles = (tile for tile, _, _ in self.plan.layout.subgroups[write.tile.subgroup].tiles if tile != write.tile)
        return of_size(map(self.live, tiles), write)


class CommitsTileByTile(Overwrites):
    """The version before of a tile goes when that tile has been written, and others of its subgroup have not."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.freed = {}

    def hears(self, event, operation):
        if isinstance(event, Done) and isinstance(operation, WriteTile):
            number = operation.tile.subgroup
            self.freed.setdefault(number, []).append(self.live(operation.tile))
            if sum(write.tile.subgroup == number for write in self.under_way(WriteTile)) == 1:
                del self.freed[number]  # all of them go
        return (event,)

    def target(self, write):
        return of_size((place for places in self.freed.values() for place in places), write)


class IgnoresFailedRead(IgnoresFailure):
    def hits(self, operation):
        return isinstance(operation, ReadTile)


class IgnoresFailedWrite(IgnoresFailure):
    def hits(self, operation):
        return isinstance(operation, WriteTile)


class IgnoresFailedRun(IgnoresFailure):
    def hits(self, operation):
        return isinstance(operation, Run)


class GoesOnAfterBreaking(Filtered):
    """What is fatal is seen when nothing else is under way."""

    fatal = None

    def hears(self, event, operation):
        if self.fatal is None and isinstance(event, Failed) and isinstance(operation, ReadTile):
            self.fatal = event
        else:
            yield event
        if self.fatal is not None and self.fatal.op in self.asked and len(self.asked) == 1:
            yield self.fatal


class RunsTwice(Filtered):
    def asks(self, operation):
        again = isinstance(operation, Run) and operation.op % 5 == 0
        return (operation, operation) if again else (operation,)


class SkipsAVisit(Skips):
    def hits(self, operation):
        plain = isinstance(operation, Run) and operation.through is None
        return plain and operation.visit == self.sweep.visits[-1]


class EndsBeforeTheLastVisit(EndsEarly):
    def hits(self, operation):
        plain = isinstance(operation, Run) and operation.through is None
        return plain and self.runs_begun == len(self.sweep.visits)


class RecordsWrongVersion(Filtered):
    def asks(self, operation):
        if isinstance(operation, WriteTile):
            operation = replace(operation, record=replace(operation.record, step=operation.record.step + 1))
        return (operation,)


class ForgetsChecksum(Filtered):
    def hears(self, event, operation):
        return (Done(event.op) if isinstance(event, Done) else event,)


class FlushesWhileRunning(Filtered):
    def asks(self, operation):
        yield operation
        if isinstance(operation, Run) and operation.slot is not None:
            tile, offset, nbytes = self.plan.layout.subgroups[operation.visit.subgroup].tiles[0]
            yield WriteTile(0, tile, operation.slot, offset, Record(Location(0, 1 << 40, nbytes), 0, 0))


class ForgetsDirtAfterReading(Skips):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.only_read = {}

    def hits(self, operation):
        if isinstance(operation, Run):
            self.only_read[operation.visit.subgroup] = not operation.visit.changes
        return isinstance(operation, WriteTile) and self.only_read[operation.tile.subgroup]


class NeverFetches(Skips):
    def hits(self, operation):
        return isinstance(operation, ReadTile)


class FetchesIntoWrongPlace(Filtered):
    def asks(self, operation):
        if isinstance(operation, ReadTile) and operation.tile.tensor:
            operation = replace(operation, buffer_offset=operation.buffer_offset - operation.record.location.nbytes)
        return (operation,)


class TakesStateForFresh(Filtered):
    def asks(self, operation):
        wrong = isinstance(operation, Run) and operation.sweep > 1
        return (replace(operation, fresh=True) if wrong else operation,)


class SharesASlot(Filtered):
    """A fetch goes to the slot of a subgroup in a certain phase."""

    phase = Phase.FETCHING

    def asks(self, operation):
        if isinstance(operation, ReadTile):
            number = operation.tile.subgroup
            slots = (s for n, s in self.slots.items() if n != number and self.phases[n] is self.phase)
            operation = replace(operation, slot=next(slots, operation.slot))
        return (operation,)


class GivesUpTooEarly(Filtered):
    def hears(self, event, operation):
        if isinstance(event, Failed) and isinstance(operation, WriteTile):
            event = Failed(event.op, SessionBrokenError("a write has failed"))
        return (event,)


class NeverCopiesOut(Skips):
    def hits(self, operation):
        return is_transfer(operation, "state", "flush")


class SettlesBeforeTheCopyOut(EndsEarly):
    def hits(self, operation):
        return is_transfer(operation, "state", "flush")


class RunsBeforeTheCopyIn(EndsEarly):
    def hits(self, operation):
        return is_transfer(operation, "state", "fetch")


class SharesAGpuSlot(Filtered):
    what = "state"

    def asks(self, operation):
        what = getattr(operation, "what", "weights")
        what = "state" if isinstance(operation, Run) and operation.visit.gpu else what
        shares = what == self.what and getattr(operation, "through", None)
        return (replace(operation, through=0) if shares else operation,)


class SharesAWeightSlot(SharesAGpuSlot):
    what = "weights"


class ForgetsToPush(Filtered):
    def asks(self, operation):
        if is_transfer(operation, "weights", "flush"):
            self.tell(Done(operation.op))
        elif not isinstance(operation, AwaitPush):  # whose slot is lost
            yield operation


class EndsBeforeThePush(EndsEarly):
    """A visit has ended when its push begins; the slot is waited for when the push has."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.waits = []

    def hits(self, operation):
        return is_transfer(operation, "weights", "flush")

    def asks(self, operation):
        if isinstance(operation, AwaitPush):
            self.waits.append(operation)
            return ()
        return super().asks(operation)

    def landed(self, event, operation):
        self.later += [wait for wait in self.waits if wait.through == operation.through]


class RunsBeforeTheFetch(EndsEarly):
    def hits(self, operation):
        return is_transfer(operation, "weights", "fetch")


class NeverFetchesWeights(Skips):
    def hits(self, operation):
        return is_transfer(operation, "weights", "fetch")


class FreesAWeightSlotBeforeItIsLeft(EndsEarly):
    def hits(self, operation):
        return isinstance(operation, AwaitPush)


class PushesFromAnotherSlot(Filtered):
    def asks(self, operation):
        if is_transfer(operation, "weights", "flush") and operation.through:
            operation = replace(operation, through=operation.through - 1)
        return (operation,)


class WaitsForEver(Filtered):
    def asks(self, operation):
        return () if isinstance(operation, WriteTile) else (operation,)


class ForgetsOwnersWhenThePlanGrows(SharesASlot):
    """A slot of unsaved state counts as free from then on."""

    phase = Phase.DIRTY
    grown = False

    def hears(self, event, operation):
        self.grown = self.grown or isinstance(event, Extend)
        return (event,)

    def asks(self, operation):
        return super().asks(operation) if self.grown else (operation,)


class ForgetsRoomForWhatIsAdded(TileIndex):
    def allow(self, slot_counts):
        pass


class WritesBeyondTheLimit(Overwrites):
    def target(self, write):
        place = write.record.location
        return replace(place, offset=self.index.limit_bytes(place.path) & ~4095)


class WritesOverItsNeighbour(Overwrites):
    def target(self, write):
        place = write.record.location
        return replace(place, offset=place.offset - 4096) if place.offset >= 4096 else None


class IndexThatForgetsToFree(TileIndex):
    """What is no longer named stays held, by nobody."""

    def __init__(self, stores, slot_counts):
        super().__init__(stores, {nbytes: 1000 * count for nbytes, count in slot_counts.items()})

    def commit(self, tile, record):
        before = self.get(tile)
        if before is not None:
            self.hold(before.location)
        super().commit(tile, record)


class IndexOfOldVersions(TileIndex):
    def __init__(self, stores, slot_counts):
        super().__init__(stores, slot_counts)
        self._before = {}

    def commit(self, tile, record):
        self._before[tile] = super().get(tile) or record
        super().commit(tile, record)

    def get(self, tile):
        return self._before.get(tile)


class IndexThatLosesSlotsWhenReshared(TileIndex):
    """Slots that are free then are claimed, by nobody."""

    def __init__(self, stores, slot_counts):
        super().__init__(stores, slot_counts)
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


class IndexThatTrustsFailedPaths(TileIndex):
    def retire(self, path):
        pass


# State that leaves memory


class GivesMemoryBackBeforeTheLastTile(EndsEarly):
    def hits(self, operation):
        is_home = isinstance(operation, WriteTile) and operation.slot is None
        return is_home and operation.tile == self.plan.layout.subgroups[operation.tile.subgroup].tiles[-1][0]


class GivesMemoryBackUnwritten(Skips):
    def hits(self, operation):
        return isinstance(operation, WriteTile) and operation.slot is None


class KeepsChangesInSlots(Skips):
    def hits(self, operation):
        return isinstance(operation, WriteTile) and operation.slot is not None and self.is_leaving


class VisitsWhatIsAway(Skips):
    def hits(self, operation):
        return isinstance(operation, ReadTile) and operation.slot is None


class LeavesAfterAll(Filtered):
    def hears(self, event, operation):
        return () if isinstance(event, Stay) else (event,)


class IgnoresFailedLeaves(IgnoresFailure):
    def hits(self, operation):
        return isinstance(operation, WriteTile) and operation.slot is None


class LeavesForLiveSlots(Overwrites):
    def target(self, write):
        if not (isinstance(write, WriteTile) and write.slot is None):
            return None
        tiles = (tile for subgroup in self.plan.layout.subgroups for tile, _, _ in subgroup.tiles)
        return of_size(map(self.live, tiles), write)


# Saves


class VisitsBeforeTheStateIsSaved(EndsEarly):
    def hits(self, operation):
        return isinstance(operation, SaveTile) and not self.idle


class CommitsWithoutSync(Skips):
    def hits(self, operation):
        return isinstance(operation, Sync)


class SyncsBeforeTheLastWrite(EndsEarly):
    def hits(self, operation):
        save = self.saver.under_way
        left = save and (save.todo or save.weights or save.copies or save.flushing)
        return isinstance(operation, SaveTile) and not left and len(self.under_way(SaveTile)) == 1


class ReleasesTooEarly(Filtered):
    """What a checkpoint holds goes when the next sweep begins."""

    def hears(self, event, operation):
        if isinstance(event, Begin):
            return (*map(Release, self.saver.held_records), event)
        return () if isinstance(event, Release) else (event,)


class ForgetsMastersThatAreWeights(Skips):
    def hits(self, operation):
        weights = isinstance(operation, SaveTile) and self.plan.layout.subgroups[operation.tile.subgroup].weight_tiles
        return weights and operation.tile in [tile for tile, _, _ in weights]


class TakesDirtyForClean(Skips):
    def hits(self, operation):
        return isinstance(operation, WriteTile) and self.saver.under_way is not None


class CommitsWithOldChecksums(Filtered):
    def asks(self, operation):
        if isinstance(operation, Commit):
            records = {tile: replace(record, checksum=0) for tile, record in operation.records.items()}
            operation = replace(operation, records=records)
        return (operation,)


class IgnoresFailedSaves(IgnoresFailure):
    def hits(self, operation):
        return isinstance(operation, SaveTile)


class SavesUnderTheWrongStep(Filtered):
    def asks(self, operation):
        if isinstance(operation, SaveTile):
            operation = replace(operation, record=replace(operation.record, step=operation.record.step + 1))
        return (operation,)


class SavesFromTheWrongPlace(Filtered):
    def asks(self, operation):
        if isinstance(operation, SaveTile) and operation.source_offset:
            operation = replace(operation, source_offset=0)
        return (operation,)


class WritesOverWhatIsHeld(Overwrites):
    def target(self, write):
        held = [record.location for records in self.saver.held_records.values() for record in records.values()]
        return of_size(held, write)


class LetsGoBeforeTheCopy(Overwrites):
    def target(self, write):
        save = self.saver.under_way
        return of_size((item.stored.location for item in (save.copies if save else ())), write)


class TakesWhatIsHeldForFree(Overwrites):
    held = ()

    def hears(self, event, operation):
        if isinstance(event, TakeOver):
            self.held = [record.location for records in event.held_records.values() for record in records.values()]
        return (event,)

    def target(self, write):
        return of_size(self.held, write)


class TakesUpAnotherVersion(Filtered):
    """What a checkpoint holds passes for older than it is."""

    def hears(self, event, operation):
        if isinstance(event, TakeOver):
            held = {
                n: {t: replace(r, step=r.step - 1) for t, r in each.items()} for n, each in event.held_records.items()
            }
            event = replace(event, held_records=held)
        return (event,)


# Callers that go on


class WritesGradientsAtOnce(forwards.Session):
    """Backward writes to a gradient slot that a deferred visit has still to read."""

    def wait_for_gradients(self, module):
        pass


class EndsAVisitThatBegins(Filtered):
    def begins(self, operation):
        return isinstance(operation, Run)

    def asks(self, operation):
        if self.begins(operation):
            self.ended_visits.append(subgroup_of(operation))
        return (operation,)

    def tell(self, event):
        super().tell(event)
        self.ended_visits[:] = dict.fromkeys(self.ended_visits)


class EndsAVisitBeforeItsPush(EndsAVisitThatBegins):
    """A module is let on when the update has run, and its weights are not on the GPU."""

    def begins(self, operation):
        return is_transfer(operation, "weights", "flush")


class WaitsForOneSubgroupOnly(PendingStep):
    def wait_for(self, subgroups):
        super().wait_for([*subgroups][:1])


class LetsOnWhoComesAgain(PendingStep):
    left = None
    """Visits that have not ended."""

    def begin(self, subgroups):
        visits = [*subgroups]
        self.left, self.all = {*visits}, {*visits}
        super().begin(visits)

    def visited(self, subgroups):
        super().visited(subgroups)
        self.left.difference_update(subgroups)

    def wait_for(self, subgroups):
        if self.left and self.left == self.all:
            super().wait_for(subgroups)


class NeverTellsOfSingleVisits(PendingStep):
    def visited(self, subgroups):
        pass


class GoesOnCountingFromTheLastSweep(PendingStep):
    """As many visits as have ended in the last sweep are not told of."""

    last = 0

    def begin(self, subgroups):
        self.skipped, self.told = GoesOnCountingFromTheLastSweep.last, 0
        super().begin(subgroups)

    def visited(self, subgroups):
        untold = max(0, self.skipped - self.told)
        self.told += len(subgroups)
        super().visited(subgroups[untold:])

    def end(self, error):
        GoesOnCountingFromTheLastSweep.last = self.told
        super().end(error)


class BeginsAmidASweep(EngineThread):
    """A request waits for nothing: neither its caller nor the engine does."""

    def finish_pending(self):
        if self.pending is not None and self.pending.is_over:
            super().finish_pending()

    def _may_begin(self, machine):
        return self._parts.executor.requests > 0


class AnswersBeforeTheSweepHasEnded(EngineThread):
    """What is not to go on behind its caller does."""

    def request(self, begin, applied=nothing, meanwhile=nothing, pending=None, *, seals=False):
        alone = pending is None
        pending = pending or PendingStep(())
        super().request(begin, applied, meanwhile, pending, seals=seals)
        if alone:
            self.pending = None


class ForgetsAFailure(PendingStep):
    def end(self, error):
        super().end(None)


class AsksBeforeItWasTold(EngineThread):
    """A request takes the place of the sweep that nobody has waited for, and its failure is gone."""

    def finish_pending(self):
        if self.pending is not None and self.pending.is_over:
            super().finish_pending()


class TellsOfAFailureOnlyWhoWaitsForAll(EngineThread):
    def wait_for(self, subgroups):
        pending = self.pending
        if pending is not None:
            pending.wait_for(subgroups)
        return pending is not None


class TellsOfAFailureTwice(EngineThread):
    def finish_pending(self):
        pending = self.pending
        try:
            super().finish_pending()
        except BaseException:
            self.pending = pending
            raise


class EndsTheRequestThatGoesOn(EngineThread):
    """An answer ends the request: what its visits work with is taken away."""

    def request(self, begin, applied=nothing, meanwhile=nothing, pending=None, *, seals=False):
        def ends():
            meanwhile()
            self._parts.executor.visit_with(visit_nothing)

        super().request(begin, applied, meanwhile if pending is None else ends, pending, seals=seals)


class VisitsTheLastFirst(Filtered):
    def hears(self, event, operation):
        if isinstance(event, Begin):
            event = Begin(replace(event.sweep, visits=event.sweep.visits[::-1]))
        return (event,)


class RunsTheLastFirst(Filtered):
    def arrange(self, operations):
        return reversed_among(operations, Run)


def reversed_among(operations: list[Operation], kind: type) -> list[Operation]:
    """Return operations with those of a kind in reverse order."""
    last_first = (operation for operation in reversed(operations) if isinstance(operation, kind))
    return [next(last_first) if isinstance(operation, kind) else operation for operation in operations]


class LosesFlushesOfTheForwardPass(Filtered):
    """What is being flushed when a sweep begins counts as flushed."""

    def hears(self, event, operation):
        if isinstance(event, Begin):
            yield from [Done(write.op) for write in self.under_way(WriteTile)]
        yield event


# Open sweeps


class BesideTheLive(Filtered):
    """Knows the writes of versions beside the live ones."""

    def is_beside(self, operation):
        """Return whether that is a write of the last open sweep."""
        return isinstance(operation, WriteTile) and operation.record.step == self.open.step

    open = Sweep(0, -1, ())

    def handle(self, event):
        if isinstance(event, Begin) and event.sweep.is_open:
            self.open = event.sweep
        super().handle(event)


class FreesTheLiveVersionEarly(BesideTheLive, Overwrites):
    """Its slots go when the version beside it has been written."""

    def target(self, write):
        busy = {operation.tile.subgroup for operation in self.under_way(WriteTile)}
        tiles = (
            t for n in self.speculative_versions if n not in busy for t, _, _ in self.plan.layout.subgroups[n].tiles
        )
        return of_size(map(self.live, tiles), write)


class TakesOverWhatIsWrittenAtOnce(BesideTheLive):
    """A speculative version is the newest as soon as it is on storage."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.written = {}

    def hears(self, event, operation):
        if isinstance(event, Done) and self.is_beside(operation):
            number = operation.tile.subgroup
            self.written.setdefault(number, []).append((operation.tile, operation.record))
            if sum(write.tile.subgroup == number for write in self.under_way(WriteTile)) == 1:
                for tile, record in self.written.pop(number):
                    self.index.commit(tile, record)
        yield event


class GoesOnFromWhatWasRevoked(Skips):
    """A staging slot keeps a revoked version and counts as whole: the step is made on top of it."""

    revoked = frozenset()

    def hears(self, event, operation):
        if isinstance(event, Seal):
            self.revoked = {*self.speculative_versions} - {*event.confirmed}
        return (event,)

    def hits(self, operation):
        return isinstance(operation, ReadTile) and operation.tile.subgroup in self.revoked


class SavesWhatWasRevoked(BesideTheLive):
    """A checkpoint names revoked versions."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.written = {}

    def hears(self, event, operation):
        if isinstance(event, Done) and self.is_beside(operation):
            self.written[operation.tile] = replace(operation.record, checksum=event.checksum)
        elif isinstance(event, Begin) and event.sweep.is_open:
            self.written.clear()
        elif isinstance(event, Seal):
            self.written = {t: r for t, r in self.written.items() if t.subgroup not in event.confirmed}
        yield event

    def asks(self, operation):
        if isinstance(operation, Commit) and not self.is_open:
            operation = replace(operation, records={**operation.records, **self.written})
        return (operation,)


class GivesASecondSlot(BesideTheLive):
    """A subgroup whose revoked version is still being written is fetched beside that."""

    def hears(self, event, operation):
        if (sweep := begun(event)) is not None and not sweep.is_open:
            yield from [Done(write.op) for write in self.under_way(WriteTile) if self.is_beside(write)]
        yield event


class ForgetsFlushesOfTheForwardPass(BesideTheLive, Skips):
    """What staging slots hold from the last step counts as written when an open sweep begins."""

    def hits(self, operation):
        return self.is_open and isinstance(operation, WriteTile) and not self.is_beside(operation)


class RunsWhatWasNotAdmitted(Filtered):
    def hears(self, event, operation):
        yield event
        if isinstance(event, Begin) and event.sweep.is_open:
            yield Admit(tuple(visit.subgroup for visit in event.sweep.visits))


class RunsAfterHold(Filtered):
    def hears(self, event, operation):
        return () if isinstance(event, Hold) else (event,)


class WritesUnderTheLiveStep(BesideTheLive):
    def asks(self, operation):
        if self.is_beside(operation):
            live = self.index.get(operation.tile)
            operation = replace(operation, record=replace(operation.record, step=live.step))
        return (operation,)


class ConfirmsWhatIsHalfWritten(BesideTheLive):
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
        if isinstance(event, Seal):
            beside = [write.tile for write in self.under_way(WriteTile) if self.is_beside(write)]
            self.late = {tile for tile in beside if tile.subgroup in event.confirmed}
        return (event,)


class EvictsWhatIsBeingWritten(BesideTheLive, EndsEarly):
    def hits(self, operation):
        return self.is_beside(operation)


class ForgetsWhatWasConfirmed(Filtered):
    """The step does not say that confirmed subgroups have moved."""

    def handle(self, event):
        super().handle(event)
        if (sweep := begun(event)) is not None and not sweep.is_open:
            self.moved.clear()


class BreaksForAWriteAhead(BesideTheLive):
    def hears(self, event, operation):
        return (event, Stop(event.error)) if isinstance(event, Failed) and self.is_beside(operation) else (event,)


class ConfirmsWhatCouldNotBeWritten(BesideTheLive, IgnoresFailure):
    def hits(self, operation):
        return self.is_beside(operation)


class TakesRoomOfCheckpoints(TileIndex):
    def missing_bytes(self, slot_counts, *, spare=False):
        return super().missing_bytes(slot_counts)


class LendsWhatStepsNeed(TileIndex):
    def claim(self, nbytes, avoid=(), *, lent=False):
        return super().claim(nbytes, avoid)


class PublishesEarly(Speculation):
    """As soon as a version has been made."""

    def hold(self):
        super().hold()
        for subgroup in self._parts.machine.speculative_versions:
            self._publish(subgroup)


class PublishesWhatIsRevoked(Speculation):
    def choose_confirmed(self, subgroups):
        for subgroup in self._parts.machine.speculative_versions if self._parts.machine.is_open else ():
            self._publish(subgroup)
        return super().choose_confirmed(subgroups)


class ForgetsToPublish(Speculation):
    def _publish(self, subgroup):
        if subgroup % 3:
            super()._publish(subgroup)


class Alike:
    """Fingerprints that are those of whatever they are compared with, stacked or not."""

    def __array_function__(self, *call):
        return self

    def __eq__(self, other):
        return other == other


class ConfirmsWithChangedGradients(Speculation):
    def choose_confirmed(self, subgroups):
        gradients = self._parts.gradients
        with mock.patch.object(gradients, "fingerprints", return_value=Alike()):
            return super().choose_confirmed(subgroups)


class ConfirmsWithOtherRows(Speculation):
    """Whatever is clipped, or has another rate, or is not active any more."""

    def choose_confirmed(self, subgroups):
        tables, begun = self._parts.tables, self._parts.tables.begun
        tables.begun = tables.expected
        try:
            return super().choose_confirmed(subgroups)
        finally:
            tables.begun = begun


class ConfirmsWhenABatchIsSkipped(Speculation):
    """And for any other request."""

    def revoke(self):
        machine = self._parts.machine
        if machine.is_open and machine.broken is None:
            chosen = tuple(machine.speculative_versions)
            machine.handle(Seal(chosen))
            for subgroup in chosen:
                self._publish(subgroup)
            self._forget_versions()
        else:
            super().revoke()


class VisitsWhatWasConfirmed(Speculation):
    def seal(self, confirmed, rest):
        super().seal(confirmed, replace(rest, visits=(*rest.visits, *map(Visit, confirmed))))


class UsesANumberAgain(backwards.Session):
    """A step's versions have the number of those that were made before it was sealed, and revoked."""

    def version_of(self, number):
        return 10 * self.stands_for[number] + 5


class RevokesNothing(Speculation):
    """Any request begins beside an open sweep."""

    def revoke(self):
        if not self._parts.machine.is_open:
            super().revoke()


# Each with what finds it first: a rule, or what a test says.
# Gradients that pass through buffers


def of_scratch(operation: Any, kind: Any, scratch: str) -> bool:
    """Return whether an operation is of that kind, and moves a tile of such scratch."""
    return isinstance(operation, kind) and operation.owner is not None and operation.owner.kind == scratch


def of_gradients(operation: Any, kind: Any) -> bool:
    """Return whether an operation is of that kind, and of gradients."""
    return of_scratch(operation, kind, "gradients")


class VisitsBeforeTheLastGradients(Filtered):
    def hears(self, event, operation):
        yield event
        if isinstance(event, Done) and of_gradients(operation, ReadTile) and not self.idle:
            reads = (read for read in self.under_way(ReadTile) if of_gradients(read, ReadTile))
            left = [read for read in reads if read.slot == operation.slot]
            if len(left) == 1:
                yield Done(left[0].op)


class LosesGradientsThatLeave(Skips):
    def hits(self, operation):
        return of_gradients(operation, WriteTile)


class WritesGradientsOverState(Overwrites):
    def target(self, write):
        tiles = (tile for subgroup in self.plan.layout.subgroups for tile, _, _ in subgroup.tiles)
        return of_size(map(self.live, tiles), write) if of_gradients(write, WriteTile) else None


class IgnoresFailedGradients(IgnoresFailure):
    def hits(self, operation):
        return of_gradients(operation, WriteTile)


class VisitsWithOtherGradients(Filtered):
    def asks(self, operation):
        if isinstance(operation, Run) and operation.visit.reads and self.plan.gradient_buffers > 1:
            buffer = (operation.gradient_buffer + 1) % self.plan.gradient_buffers
            operation = replace(operation, gradient_buffer=buffer)
        return (operation,)


class KeepsGradientsThatWereDropped(Filtered):
    def hears(self, event, operation):
        return () if isinstance(event, Discard) else (event,)


class LetsTheCallerAddToWhatIsStillRead(EndsEarly):
    def hits(self, operation):
        return of_gradients(operation, ReadTile)


class ReadsTheFirstGradientsAgain(Filtered):
    """What is read is what was written first."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.first = {}

    def asks(self, operation):
        if of_gradients(operation, WriteTile):
            self.first.setdefault(operation.tile, operation.record.location)
        if of_gradients(operation, ReadTile):
            record = replace(operation.record, location=self.first[operation.tile])
            operation = replace(operation, record=record)
        return (operation,)


# Activations that pass through buffers


def of_activations(operation: Any, kind: Any) -> bool:
    """Return whether an operation is of that kind, and of activations."""
    return of_scratch(operation, kind, "activations")


class LosesActivationsThatLeave(Skips):
    def hits(self, operation):
        return of_activations(operation, WriteTile)


class ReadsActivationsTooEarly(EndsEarly):
    def hits(self, operation):
        return of_activations(operation, ReadTile)


class IgnoresFailedActivations(IgnoresFailure):
    def hits(self, operation):
        return of_activations(operation, WriteTile)


class WritesActivationsOverState(Overwrites):
    def target(self, write):
        tiles = (tile for subgroup in self.plan.layout.subgroups for tile, _, _ in subgroup.tiles)
        return of_size(map(self.live, tiles), write) if of_activations(write, WriteTile) else None


MACHINES = {
    RunsBeforeTheLastTile: "rule 10:",
    ReusesDirtySlot: "rule 5:",
    WritesInPlace: "rule 7:",
    FreesOldVersionFirst: "rule 7:",
    CommitsTileByTile: "rule 7:",
    IgnoresFailedRead: "rule 9:",
    IgnoresFailedWrite: "rule 9:",
    IgnoresFailedRun: "rule 9:",
    GoesOnAfterBreaking: "rule 9:",
    RunsTwice: "rule 2:",
    SkipsAVisit: "rule 2:",
    EndsBeforeTheLastVisit: "rule 2:",
    FlushesHalf: "rule 5:",
    RecordsWrongVersion: "rule 7:",
    ForgetsChecksum: "rule 6:",
    FlushesWhileRunning: "rule 4:",
    ForgetsDirtAfterReading: "rule 5:",
    NeverFetches: "rule 10:",
    FetchesIntoWrongPlace: "rule 6, 7:",
    TakesStateForFresh: "rule 3:",
    SharesASlot: "rule 4:",
    GivesUpTooEarly: "it broke for too little",
    NeverCopiesOut: "rule 4:",
    SettlesBeforeTheCopyOut: "rule 4:",
    RunsBeforeTheCopyIn: "rule 10:",
    SharesAGpuSlot: "rule 10:",
    ForgetsToPush: "rule 2:",
    EndsBeforeThePush: "rule 2:",
    SharesAWeightSlot: "rule 11:",
    RunsBeforeTheFetch: "rule 11:",
    NeverFetchesWeights: "rule 11:",
    FreesAWeightSlotBeforeItIsLeft: "rule 11:",
    PushesFromAnotherSlot: "rule 11:",
    WaitsForEver: "the engine waits",
    WritesBeyondTheLimit: "rule 7:",
    WritesOverItsNeighbour: "rule 7:",
    IndexThatForgetsToFree: "it broke for too little",
    IndexOfOldVersions: "rule 6:",
    IndexThatTrustsFailedPaths: "rule 7:",
}
GROWING = {
    ForgetsOwnersWhenThePlanGrows: "rule 5:",
    ForgetsRoomForWhatIsAdded: "it broke for too little",
    IndexThatLosesSlotsWhenReshared: "it broke for too little",
}
SAVES = {
    VisitsBeforeTheStateIsSaved: "rule 13:",
    CommitsWithoutSync: "rule 14:",
    SyncsBeforeTheLastWrite: "rule 14:",
    ReleasesTooEarly: "rule 7:",
    ForgetsMastersThatAreWeights: "rule 13:",
    TakesDirtyForClean: "rule 13:",
    CommitsWithOldChecksums: "rule 14:",
    IgnoresFailedSaves: "rule 12:",
    SavesUnderTheWrongStep: "rule 13:",
    SavesFromTheWrongPlace: "rule 13:",
    WritesOverWhatIsHeld: "rule 7:",
    LetsGoBeforeTheCopy: "rule 7:",
    TakesWhatIsHeldForFree: "rule 7:",
    TakesUpAnotherVersion: "rule 13:",
}
PARKS = {
    GivesMemoryBackBeforeTheLastTile: "rule 27:",
    GivesMemoryBackUnwritten: "rule 27:",
    KeepsChangesInSlots: "rule 5:",
    VisitsWhatIsAway: "rule 27:",
    LeavesAfterAll: "rule 27:",
    IgnoresFailedLeaves: "rule 27:",
    LeavesForLiveSlots: "rule 7:",
}
FILLING = {
    VisitsBeforeTheLastGradients: "rule 29:",
    LosesGradientsThatLeave: "rule 28:",
    WritesGradientsOverState: "rule 7:",
    IgnoresFailedGradients: "rule 9:",
    VisitsWithOtherGradients: "rule 29:",
    KeepsGradientsThatWereDropped: "rule 28:",
    LetsTheCallerAddToWhatIsStillRead: "rule 7:",
    ReadsTheFirstGradientsAgain: "rule 28:",
}
SAVING = {
    LosesActivationsThatLeave: "rule 28:",
    ReadsActivationsTooEarly: "rule 28:",
    IgnoresFailedActivations: "rule 28:",
    WritesActivationsOverState: "rule 7:",
}
FORWARDS = {
    WritesGradientsAtOnce: "weights are not the last step's",
    EndsAVisitBeforeItsPush: "rule 19:",
    EndsAVisitThatBegins: "rule 19:",
    WaitsForOneSubgroupOnly: "rule 19:",
    LetsOnWhoComesAgain: "rule 19:",
    NeverTellsOfSingleVisits: "which have been visited",
    GoesOnCountingFromTheLastSweep: "which have been visited",
    BeginsAmidASweep: "rule 2:",
    AnswersBeforeTheSweepHasEnded: "rule 19:",
    ForgetsAFailure: "rule 19:",
    AsksBeforeItWasTold: "rule 19:",
    TellsOfAFailureOnlyWhoWaitsForAll: "rule 19:",
    TellsOfAFailureTwice: "and the caller was told of",
    EndsTheRequestThatGoesOn: "a visit of a sweep of nobody",
    VisitsTheLastFirst: "rule 18:",
    RunsTheLastFirst: "rule 18:",
    LosesFlushesOfTheForwardPass: "rule 13:",
}
BACKWARDS = {
    FreesTheLiveVersionEarly: "rule 7:",
    TakesOverWhatIsWrittenAtOnce: "TileId(subgroup=1, tensor=0, tile=0) was written to a slot nobody claimed",
    GoesOnFromWhatWasRevoked: "rule 10:",
    SavesWhatWasRevoked: "rule 14:",
    GivesASecondSlot: "rule 4:",
    ForgetsFlushesOfTheForwardPass: "rule 5:",
    RunsWhatWasNotAdmitted: "rule 20:",
    RunsAfterHold: "rule 20:",
    WritesUnderTheLiveStep: "rule 21:",
    ConfirmsWhatIsHalfWritten: "rule 7:",
    EvictsWhatIsBeingWritten: "rule 4:",
    ForgetsWhatWasConfirmed: "which subgroups have moved",
    BreaksForAWriteAhead: "it broke for too little",
    ConfirmsWhatCouldNotBeWritten: "rule 23:",
    TakesRoomOfCheckpoints: "rule 25:",
    LendsWhatStepsNeed: "rule 31:",
    PublishesEarly: "rule 26:",
    PublishesWhatIsRevoked: "rule 26:",
    ForgetsToPublish: "rule 26:",
    ConfirmsWithChangedGradients: "weights are not the last step's",
    ConfirmsWithOtherRows: "state is not what it has to be",
    ConfirmsWhenABatchIsSkipped: "is of another version",
    VisitsWhatWasConfirmed: "rule 23:",
    UsesANumberAgain: "rule 24:",
    RevokesNothing: "rule 20:",
}
