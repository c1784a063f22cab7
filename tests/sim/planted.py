"""Machines, indices, and parts of a session that are wrong on purpose, each in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import backwards
import forwards
import pytest

from offload._native import CompletionQueue
from offload.engine.executor import visit_nothing
from offload.engine.index import Location, Record, TileIndex
from offload.engine.machine import Machine, Phase
from offload.engine.operations import (
    AwaitPush,
    Confirm,
    CopyIn,
    CopyOut,
    FetchWeights,
    PushWeights,
    ReadTile,
    Run,
    WriteTile,
)
from offload.errors import InternalError
from offload.session.ahead import Ahead
from offload.session.behind import Behind
from offload.session.thread import EngineThread


def assert_found(run_seed: Callable[[int], object], seeds: range) -> None:
    """Check that the checker, the bytes or the way it ends give a bug away, without the machine's own checks."""
    for seed in seeds:
        try:
            run_seed(seed)
        except AssertionError:
            return
        except InternalError as error:
            if not str(error).startswith(("rule ", "the engine waits")):
                pytest.fail(f"found by the machine itself: {error}")
            return
    pytest.fail("nobody noticed")


class Careless(Machine):
    """Does not look at its own arrows: others have to find what is wrong."""

    def _to(self, subgroup, phase):
        self._phases[subgroup] = phase


class RunsBeforeTheLastTile(Careless):
    def _done(self, operation, checksum):
        if isinstance(operation, ReadTile):
            subgroup = operation.tile.subgroup
            if subgroup not in self._fetches:
                return
            if self._fetches[subgroup] == 2:
                self._fetches[subgroup] = 1
        super()._done(operation, checksum)


class ReusesDirtySlot(Careless):
    def _free_slot(self):
        slot = super()._free_slot()
        if slot is None and self._dirty:
            owner = next(iter(self._dirty))
            if self._phases[owner] is Phase.DIRTY and owner not in self._pending:
                slot = self._slots[owner]
                del self._dirty[owner]
                if self.index.get(self.plan.layout.subgroups[owner].tiles[0][0]) is None:
                    del self._versions[owner]
                self._vacate(slot)
        return slot


class WritesInPlace(Careless):
    def _write(self, tile, slot, offset, nbytes):
        before = self.index.get(tile)
        if before is None:
            return super()._write(tile, slot, offset, nbytes)
        self._issue(
            WriteTile(self._take_op(), tile, slot, offset, Record(before.location, self._versions[tile.subgroup], 0))
        )
        return True

    def _done(self, operation, checksum):
        if isinstance(operation, WriteTile) and operation.record.location not in self.index._claimed:
            self.index._records.pop(operation.tile)
            self.index._claimed.add(operation.record.location)
        super()._done(operation, checksum)


class FreesOldVersionFirst(Careless):
    def _flush(self, subgroup):
        for tile, _, _ in self.plan.layout.subgroups[subgroup].tiles:
            before = self.index._records.pop(tile, None)
            if before is not None:
                self.index._release(before.location)
        super()._flush(subgroup)


class CommitsTileByTile(Careless):
    def _done(self, operation, checksum):
        if isinstance(operation, WriteTile):
            flush = self._flushes[operation.tile.subgroup]
            self.index.commit(operation.tile, replace(operation.record, checksum=checksum))
            flush.left -= 1
            if flush.left == 0:
                del self._flushes[operation.tile.subgroup]
                self._settle(operation.tile.subgroup, changed=False)
        else:
            super()._done(operation, checksum)


class IgnoresFailedRead(Careless):
    def _failed(self, operation, error):
        if isinstance(operation, ReadTile):
            self._done(operation, 0)
        else:
            super()._failed(operation, error)


class IgnoresFailedWrite(Careless):
    def _failed(self, operation, error):
        if isinstance(operation, WriteTile):
            self._done(operation, 0)
        else:
            super()._failed(operation, error)


class IgnoresFailedRun(Careless):
    def _failed(self, operation, error):
        if isinstance(operation, Run):
            self._done(operation, 0)
        else:
            super()._failed(operation, error)


class GoesOnAfterBreaking(Careless):
    def _advance(self):
        broken, self.broken = self.broken, None
        self._assign_slots()
        self._start_runs()
        self.broken = self.broken or broken
        super()._advance()


class RunsTwice(Careless):
    def _start_runs(self):
        before = len(self._out)
        super()._start_runs()
        for operation in self._out[before:]:
            if isinstance(operation, Run) and operation.op % 5 == 0:
                self._device_of(operation.visit).runs += 1
                self._issue(replace(operation, op=self._take_op()))


class SkipsAVisit(Careless):
    def _begin(self, sweep):
        super()._begin(replace(sweep, visits=sweep.visits[:-1]))
        self._sweep = sweep


class EndsBeforeTheLastVisit(Careless):
    def _advance(self):
        super()._advance()
        if self._sweep is not None and not self._pending:
            self.finished, self._sweep = self._sweep, None


class FlushesHalf(Careless):
    def _flush(self, subgroup):
        super()._flush(subgroup)
        flush = self._flushes[subgroup]
        for operation in [o for o in self._out if isinstance(o, WriteTile) and o.tile.subgroup == subgroup][1::2]:
            self._out.remove(operation)
            del self._in_flight[operation.op]
            flush.left -= 1
            flush.records.append((operation.tile, operation.record))


class RecordsWrongVersion(Careless):
    def _write(self, tile, slot, offset, nbytes):
        self._flushes[tile.subgroup].step += 1
        return super()._write(tile, slot, offset, nbytes)


class ForgetsChecksum(Careless):
    def _done(self, operation, checksum):
        super()._done(operation, 0)


class FlushesWhileRunning(Careless):
    def _start_runs(self):
        super()._start_runs()
        for subgroup in list(self._dirty):
            if self._phases[subgroup] is Phase.BUSY and self._unfetched and subgroup not in self._flushes:
                self._flush(subgroup)
                self._to(subgroup, Phase.BUSY)


class ForgetsDirtAfterReading(Careless):
    def _ran(self, run):
        super()._ran(run)
        visit = run.visit
        if not visit.changes and visit.subgroup in self._dirty:
            del self._dirty[visit.subgroup]
            self._to(visit.subgroup, Phase.READY)


class NeverFetches(Careless):
    def _fetch(self, subgroup, slot):
        self._pending[subgroup] = replace(visit := self._pending[subgroup], overwrites=True)
        super()._fetch(subgroup, slot)
        self._pending[subgroup] = visit


class FetchesIntoWrongPlace(Careless):
    def _issue(self, operation):
        if isinstance(operation, ReadTile) and operation.tile.tensor:
            operation = replace(operation, buffer_offset=operation.buffer_offset - operation.record.location.nbytes)
        super()._issue(operation)


class TakesStateForFresh(Careless):
    def _start_runs(self):
        before = len(self._out)
        super()._start_runs()
        for position, operation in enumerate(self._out[before:], before):
            if isinstance(operation, Run) and operation.sweep > 1:
                self._out[position] = replace(operation, fresh=True)


class SharesASlot(Careless):
    def _free_slot(self):
        slot = super()._free_slot()
        if slot is None and any(self._phases[s] is Phase.FETCHING for s in self._slots):
            subgroup = next(s for s in self._slots if self._phases[s] is Phase.FETCHING)
            return self._slots[subgroup]
        return slot


class GivesUpTooEarly(Careless):
    def _failed(self, operation, error):
        if isinstance(operation, WriteTile):
            self._break(error)
        else:
            super()._failed(operation, error)


class NeverCopiesOut(Careless):
    def _ran(self, run):
        super()._ran(run)
        if run.gpu_slot is not None and self._out and isinstance(self._out[-1], CopyOut):
            del self._in_flight[self._out.pop().op]
            del self._gpu_slots[run.visit.subgroup]
            self._settle(run.visit.subgroup, changed=True)


class SettlesBeforeTheCopyOut(Careless):
    def _ran(self, run):
        super()._ran(run)
        if run.gpu_slot is not None and run.visit.changes and self.broken is None:
            self._settle(run.visit.subgroup, changed=True)

    def _settle(self, subgroup, *, changed):
        if self._phases[subgroup] not in (Phase.RESIDENT, Phase.READY, Phase.DIRTY):
            super()._settle(subgroup, changed=changed)


class RunsBeforeTheCopyIn(Careless):
    def _start_copies(self):
        before = len(self._out)
        super()._start_copies()
        self._gpu.under_way.extend(o.subgroup for o in self._out[before:] if isinstance(o, CopyIn))

    def _done(self, operation, checksum):
        return False if isinstance(operation, CopyIn) else super()._done(operation, checksum)


class SharesAGpuSlot(Careless):
    def _free_gpu_slot(self):
        return super()._free_gpu_slot() or 0


class ForgetsToPush(Careless):
    def _ran(self, run):
        super()._ran(replace(run, weight_slot=None))


class EndsBeforeThePush(Careless):
    def _ran(self, run):
        super()._ran(run)
        self._unfinished -= run.visit.weight_bytes > 0

    def _done(self, operation, checksum):
        self._unfinished += isinstance(operation, PushWeights)
        return super()._done(operation, checksum)


class SharesAWeightSlot(Careless):
    def _take_weight_slot(self, visit):
        found = super()._take_weight_slot(visit)
        return 0 if found is None else found


class RunsBeforeTheFetch(Careless):
    def _start_fetches(self):
        before = len(self._out)
        super()._start_fetches()
        self._cpu.under_way.extend(o.subgroup for o in self._out[before:] if isinstance(o, FetchWeights))

    def _done(self, operation, checksum):
        return False if isinstance(operation, FetchWeights) else super()._done(operation, checksum)


class NeverFetchesWeights(Careless):
    def _queue_of(self, visit):
        return super()._queue_of(replace(visit, fetches=False))


class FreesAWeightSlotBeforeItIsLeft(Careless):
    def _done(self, operation, checksum):
        if isinstance(operation, AwaitPush):
            return True
        done = super()._done(operation, checksum)
        if isinstance(operation, PushWeights):
            del self._weight_slots[operation.weight_slot]
        return done


class PushesFromAnotherSlot(Careless):
    def _issue(self, operation):
        if isinstance(operation, PushWeights) and operation.weight_slot:
            operation = replace(operation, weight_slot=operation.weight_slot - 1)
        super()._issue(operation)


class WaitsForEver(Careless):
    def _flush(self, subgroup):
        pass


class ForgetsOwnersWhenThePlanGrows(Careless):
    def _extend(self, plan):
        super()._extend(plan)
        self._owners = [None] * plan.staging_slots


class ForgetsRoomForWhatIsAdded(Careless):
    def _extend(self, plan):
        counts = dict(self.index._unmade)
        super()._extend(plan)
        self.index._unmade = counts


class IndexWithoutLimits(TileIndex):
    def claim(self, nbytes, avoid=()):
        for store in self._stores:
            store.limit_bytes += 1 << 20
        return super().claim(nbytes, avoid)


class IndexThatForgetsToFree(TileIndex):
    def __init__(self, stores, slot_counts):
        super().__init__(stores, {nbytes: 1000 * count for nbytes, count in slot_counts.items()})

    def _release(self, location):
        self._stores[location.path].live_bytes -= location.nbytes


class IndexThatOverlaps(TileIndex):
    def claim(self, nbytes, avoid=()):
        location = super().claim(nbytes, avoid)
        if location is not None and location.offset >= 4096:
            self._claimed.remove(location)
            location = Location(location.path, location.offset - 4096, nbytes)
            self._claimed.add(location)
        return location


class IndexOfOldVersions(TileIndex):
    def __init__(self, stores, slot_counts):
        super().__init__(stores, slot_counts)
        self._before = {}

    def commit(self, tile, record):
        self._before[tile] = self._records.get(tile, record)
        super().commit(tile, record)

    def get(self, tile):
        return self._before.get(tile)


class IndexThatLosesSlotsWhenReshared(TileIndex):
    def reshare(self, shares):
        super().reshare(shares)
        for store in self._stores:
            store.free.clear()


class IndexThatTrustsFailedPaths(TileIndex):
    def retire(self, path):
        pass


class WritesGradientsAtOnce(forwards.Session):
    """Backward writes to a gradient slot that a deferred visit has still to read."""

    def wait_for_gradients(self, module):
        pass


class EndsAVisitBeforeItsPush(Careless):
    """A module is let on when the update has run, and its weights are not on the GPU."""

    def _ran(self, run):
        super()._ran(run)
        if run.weight_slot is not None and run.visit.changes:
            self.ended.append(run.visit.subgroup)

    def _end_visit(self, subgroup):
        super()._end_visit(subgroup)
        if subgroup in self.ended[:-1]:
            self.ended.pop()


class EndsAVisitThatBegins(Careless):
    def _start_runs(self):
        before = len(self._out)
        super()._start_runs()
        self.ended += [operation.visit.subgroup for operation in self._out[before:] if isinstance(operation, Run)]

    def _end_visit(self, subgroup):
        super()._end_visit(subgroup)
        self.ended.pop()


class WaitsForOneSubgroupOnly(Behind):
    def wait_for(self, subgroups):
        super().wait_for([*subgroups][:1])


class LetsOnWhoComesAgain(Behind):
    def wait_for(self, subgroups):
        if not self._visits or any(latch.is_set() for latch in self._visits.values()):
            return
        super().wait_for(subgroups)


class NeverTellsOfSingleVisits(Behind):
    def ended(self, subgroups):
        pass


class GoesOnCountingFromTheLastSweep(EngineThread):
    def _begin_request(self):
        told = self._told
        super()._begin_request()
        self._told = told


class BeginsAmidASweep(EngineThread):
    """A request waits for nothing: neither its caller nor the engine does."""

    def finish(self):
        self.raise_untold()

    def _may_begin(self, machine):
        return self._parts.executor.requests > 0


class AnswersBeforeTheSweepHasEnded(EngineThread):
    """What is not to go on behind its caller does."""

    _answered = False

    def _begin_request(self):
        super()._begin_request()
        if self._current is not None and self._current.behind is None:
            self._reply.post(0)
            self._answered = True

    def _answer(self, error):
        reply = self._reply
        if self._answered:
            self._reply, self._answered = CompletionQueue(), False
        super()._answer(error)
        self._reply = reply


class ForgetsAFailure(Behind):
    def end(self, error):
        super().end(None)


class AsksBeforeItWasTold(EngineThread):
    """A request takes the place of the sweep that nobody has waited for, and its failure is gone."""

    def finish(self):
        if self.behind is not None and self.behind.is_over:
            self.raise_untold()


class TellsOfAFailureOnlyWhoWaitsForAll(EngineThread):
    def wait_for(self, subgroups):
        behind = self.behind
        if behind is not None:
            behind.wait_for(subgroups)
        return behind is not None


class TellsOfAFailureTwice(EngineThread):
    def raise_untold(self):
        behind = self.behind
        try:
            super().raise_untold()
        except BaseException:
            self.behind = behind
            raise


class EndsTheRequestThatGoesOn(EngineThread):
    """An answer ends the request: what its visits work with is taken away."""

    def _begin_request(self):
        super()._begin_request()
        if self._followed is not None:
            self._parts.executor.visit_with(visit_nothing)


class VisitsTheLastFirst(Careless):
    def _begin(self, sweep):
        super()._begin(sweep)
        self._unfetched.reverse()


class RunsTheLastFirst(Careless):
    def _start_runs(self):
        for queue in (self._cpu.streamed, self._cpu.resident):
            if len(queue) > 1:
                queue.reverse()
        super()._start_runs()


class LosesFlushesOfTheForwardPass(Careless):
    """What is being flushed when a sweep begins counts as flushed, and its end is not looked at."""

    def _begin(self, sweep):
        for subgroup in list(self._flushes):
            for operation in self._in_flight.values():
                if isinstance(operation, WriteTile) and operation.tile.subgroup == subgroup:
                    self._lost.add(operation.op)
            flush = self._flushes.pop(subgroup)
            for written, new in flush.records:
                self.index.commit(written, new)
            self._settle(subgroup, changed=False)
        super()._begin(sweep)

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self._lost = set()

    def _done(self, operation, checksum):
        if operation.op in self._lost:
            return True
        return super()._done(operation, checksum)

    def _failed(self, operation, error):
        if operation.op not in self._lost:
            super()._failed(operation, error)


class FreesTheLiveVersionEarly(Careless):
    """Its slots go when the version beside it has been written."""

    def _flushed_beside(self, subgroup, flush):
        super()._flushed_beside(subgroup, flush)
        if subgroup in self._beside:
            for tile, _, _ in self.plan.layout.subgroups[subgroup].tiles:
                self.index._release(self.index._records[tile].location)


class TakesOverWhatIsWrittenAtOnce(Careless):
    """A version ahead is the newest as soon as it is on storage."""

    def _flushed_beside(self, subgroup, flush):
        super()._flushed_beside(subgroup, flush)
        if self._beside.get(subgroup):
            self._commit(self._beside.pop(subgroup))


class GoesOnFromWhatWasRevoked(Careless):
    """A staging slot keeps a revoked version and counts as whole: the step is made on top of it."""

    def _revoke(self, subgroup, records):
        for _, record in records:
            self.index.abandon(record.location)


class SavesWhatWasRevoked(Careless):
    """A checkpoint waits for flushes of revoked versions, and pins their slots."""

    def _begin_save(self, save):
        for flush in self._flushes.values():
            flush.beside, flush.room = False, flush.room or flush.beside
        super()._begin_save(save)
        for flush in self._flushes.values():
            flush.beside = bool(flush.room)

    def _flushed_beside(self, subgroup, flush):
        if self.saver.under_way is None or subgroup not in self.saver.under_way.flushing or flush.error:
            super()._flushed_beside(subgroup, flush)
            return
        self._to(subgroup, Phase.READY)
        self._vacate(self._slots[subgroup])
        self.saver.flushed(flush.records, subgroup)
        if subgroup in self._pending:
            self._unfetched.append(subgroup)


class GivesASecondSlot(Careless):
    """A subgroup whose revoked version is still being written is fetched beside that."""

    def _begin(self, sweep):
        super()._begin(sweep)
        for subgroup, flush in self._flushes.items():
            if flush.beside and subgroup in self._pending:
                self._unfetched.append(subgroup)


class ForgetsFlushesOfTheForwardPass(Careless):
    """What staging slots hold from the last step counts as written when a sweep ahead begins."""

    def _begin_ahead(self, sweep):
        for subgroup in [s for s in self._dirty if self.index.get(self.plan.layout.subgroups[s].tiles[0][0])]:
            del self._dirty[subgroup]
            self._to(subgroup, Phase.READY)
        super()._begin_ahead(sweep)


class RunsWhatWasNotAdmitted(Careless):
    def _begin_ahead(self, sweep):
        super()._begin_ahead(sweep)
        self._admit(tuple(self._pending))


class RunsAfterHold(Careless):
    def _start_runs(self):
        held, self._held = self._held, False
        super()._start_runs()
        self._held = held


class WritesUnderTheLiveStep(Careless):
    def _write(self, tile, slot, offset, nbytes, avoid=()):
        flush = self._flushes[tile.subgroup]
        flush.step = self._versions[tile.subgroup] if flush.beside else flush.step
        return super()._write(tile, slot, offset, nbytes, avoid)


class ConfirmsWhatIsHalfWritten(Careless):
    """A version counts as whole on storage when it is confirmed, and the rest of its tiles is not waited for."""

    def _confirm(self, subgroups):
        for subgroup in subgroups:
            if self._beside.get(subgroup, ()) is None:
                self._beside[subgroup] = list(self._flushes[subgroup].records)
                self._flushes[subgroup].records.clear()
        super()._confirm(subgroups)


class EvictsWhatIsBeingWritten(Careless):
    def _free_slot(self):
        slot = super()._free_slot()
        writing = [s for s, flush in self._flushes.items() if flush.beside and s in self._slots]
        if slot is None and writing:
            slot = self._slots[writing[0]]
            self._vacate(slot)
        return slot

    def _to(self, subgroup, phase):
        if not (phase is Phase.READY and subgroup not in self._slots):
            super()._to(subgroup, phase)


class ForgetsWhatWasConfirmed(Careless):
    """The step does not say that confirmed subgroups have moved."""

    def _confirm(self, subgroups):
        super()._confirm(subgroups)
        self._confirmed.clear()


class BreaksForAWriteAhead(Careless):
    def _failed(self, operation, error):
        if isinstance(operation, WriteTile) and self._flushes[operation.tile.subgroup].beside:
            self._break(error)
        else:
            super()._failed(operation, error)


class ConfirmsWhatCouldNotBeWritten(Careless):
    """A version whose write has failed may be confirmed, and a checkpoint fails with it."""

    def _give_up_beside(self, subgroup, error):
        before = dict(self._beside)
        super()._give_up_beside(subgroup, error)
        self._beside = before

    def _flushed_beside(self, subgroup, flush):
        super()._flushed_beside(subgroup, flush)
        if flush.error is not None:
            self._beside.pop(subgroup, None)


class TakesRoomOfCheckpoints(TileIndex):
    def reserve(self, slot_counts, *, spare=False):
        return super().reserve(slot_counts)


class PublishesEarly(Ahead):
    """As soon as a version has been made."""

    def hold(self):
        super().hold()
        for subgroup in self._parts.machine.beside:
            self._publish(subgroup)


class PublishesWhatIsRevoked(Ahead):
    def confirm(self, subgroups):
        made = [*self._parts.machine.beside] if self._parts.machine.is_ahead else []
        tables = dict(self._made)
        chosen = super().confirm(subgroups)
        self._made.update(tables)
        for subgroup in made:
            if subgroup not in chosen:
                self._publish(subgroup)
        return chosen


class ForgetsToPublish(Ahead):
    def _publish(self, subgroup):
        if subgroup % 3:
            super()._publish(subgroup)


class ConfirmsWithChangedGradients(Ahead):
    def _unchanged(self, subgroups):
        made = self._made
        alike = self._parts.tables.is_as_ahead
        return [n for n in subgroups if alike(n, made[n].address, made[n].table, None, None)]


class ConfirmsWithOtherRows(Ahead):
    """Whatever is clipped, or has another rate, or is not active any more."""

    def _unchanged(self, subgroups):
        tables, expected = self._parts.tables, self._parts.tables.now
        tables.now = tables.expected
        try:
            return super()._unchanged(subgroups)
        finally:
            tables.now = expected


class ConfirmsWhenABatchIsSkipped(Ahead):
    """And for any other request."""

    def revoke(self):
        machine = self._parts.machine
        if machine.is_ahead and machine.broken is None:
            chosen = tuple(machine.beside)
            machine.handle(Confirm(chosen))
            for subgroup in chosen:
                self._publish(subgroup)
            self._end()
        else:
            super().revoke()


class VisitsWhatWasConfirmed(Ahead):
    def confirm(self, subgroups):
        super().confirm(subgroups)
        return ()


class UsesANumberAgain(backwards.Session):
    """A step's versions have the number of those that were made ahead of it, and revoked."""

    def version_of(self, number):
        return 10 * self.stands_for[number] + 5


class RevokesNothing(EngineThread):
    """Any request begins beside a sweep ahead."""

    def _begin_request(self):
        revoke, self.ahead.revoke = self.ahead.revoke, lambda: None
        super()._begin_request()
        self.ahead.revoke = revoke


BACKWARDS = [
    FreesTheLiveVersionEarly,
    TakesOverWhatIsWrittenAtOnce,
    GoesOnFromWhatWasRevoked,
    SavesWhatWasRevoked,
    GivesASecondSlot,
    ForgetsFlushesOfTheForwardPass,
    RunsWhatWasNotAdmitted,
    RunsAfterHold,
    WritesUnderTheLiveStep,
    ConfirmsWhatIsHalfWritten,
    EvictsWhatIsBeingWritten,
    ForgetsWhatWasConfirmed,
    BreaksForAWriteAhead,
    ConfirmsWhatCouldNotBeWritten,
    TakesRoomOfCheckpoints,
    PublishesEarly,
    PublishesWhatIsRevoked,
    ForgetsToPublish,
    ConfirmsWithChangedGradients,
    ConfirmsWithOtherRows,
    ConfirmsWhenABatchIsSkipped,
    VisitsWhatWasConfirmed,
    UsesANumberAgain,
    RevokesNothing,
]
FORWARDS = [
    WritesGradientsAtOnce,
    EndsAVisitBeforeItsPush,
    EndsAVisitThatBegins,
    WaitsForOneSubgroupOnly,
    LetsOnWhoComesAgain,
    NeverTellsOfSingleVisits,
    GoesOnCountingFromTheLastSweep,
    BeginsAmidASweep,
    AnswersBeforeTheSweepHasEnded,
    ForgetsAFailure,
    AsksBeforeItWasTold,
    TellsOfAFailureOnlyWhoWaitsForAll,
    TellsOfAFailureTwice,
    EndsTheRequestThatGoesOn,
    VisitsTheLastFirst,
    RunsTheLastFirst,
    LosesFlushesOfTheForwardPass,
]
MACHINES = [
    RunsBeforeTheLastTile,
    ReusesDirtySlot,
    WritesInPlace,
    FreesOldVersionFirst,
    CommitsTileByTile,
    IgnoresFailedRead,
    IgnoresFailedWrite,
    IgnoresFailedRun,
    GoesOnAfterBreaking,
    RunsTwice,
    SkipsAVisit,
    EndsBeforeTheLastVisit,
    FlushesHalf,
    RecordsWrongVersion,
    ForgetsChecksum,
    FlushesWhileRunning,
    ForgetsDirtAfterReading,
    NeverFetches,
    FetchesIntoWrongPlace,
    TakesStateForFresh,
    SharesASlot,
    GivesUpTooEarly,
    NeverCopiesOut,
    SettlesBeforeTheCopyOut,
    RunsBeforeTheCopyIn,
    SharesAGpuSlot,
    ForgetsToPush,
    EndsBeforeThePush,
    SharesAWeightSlot,
    RunsBeforeTheFetch,
    NeverFetchesWeights,
    FreesAWeightSlotBeforeItIsLeft,
    PushesFromAnotherSlot,
    WaitsForEver,
]
GROWING = [
    ForgetsOwnersWhenThePlanGrows,
    ForgetsRoomForWhatIsAdded,
    IndexThatLosesSlotsWhenReshared,
]
INDICES = [
    IndexWithoutLimits,
    IndexThatForgetsToFree,
    IndexThatOverlaps,
    IndexOfOldVersions,
    IndexThatTrustsFailedPaths,
]
