"""The live executor: real lanes, one completion queue.

It does what the machine says and reports what happened. Transfers run on the tiers' threads and updates on the
kernel's; both report to one queue, on which the session's engine thread waits. All methods belong to that thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from offload import waits
from offload.device.host import HostMemory
from offload.device.lanes import Timed
from offload.device.none import NO_LANES, Lanes
from offload.engine.seals import DamagedError, Seals
from offload.errors import OffloadError, TierError, known
from offload.kernels.whole import WholeUpdate
from offload.plan.budget import Plan
from offload.protocols import ERROR_CALL, ERROR_CHECKSUM, WAKE, Completion, Queue, Tier, TileRequest, UpdateKernel
from offload.schedule.index import TileRecord
from offload.schedule.operations import (
    AwaitPush,
    Commit,
    CopyTile,
    Done,
    Event,
    Failed,
    FreeHome,
    Operation,
    ReadTile,
    RunVisit,
    SaveTile,
    Stop,
    Sync,
    Transfer,
    Visit,
    WriteTile,
    tile_label,
)
from offload.schedule.timeline import ENGINE, Interval
from offload.tiers import innermost, tier_error
from offload.units import format_seconds
from offload.weights.mapping import MappedWeightsWindow, mapped_weights_of

REQUEST = (1 << 64) - 1
"""Operation id of a completion by which a caller's thread announces a request."""

INTERRUPT = (1 << 64) - 2
"""Operation id of a completion that says: a caller that waits for an answer has been interrupted (by a Ctrl-C)."""

STALL_S = 300.0
"""How long a lane may be silent with operations in flight before the session gives up on it."""


LANE_VERBS = {ReadTile: "read", WriteTile: "write", SaveTile: "save", CopyTile: "copy"}
"""Names of a path's lanes, by operation: those of a checkpoint differ from those of a step."""

VERBS = {ReadTile: "read", CopyTile: "read", WriteTile: "write", SaveTile: "write", RunVisit: "update", Sync: "sync"}
"""Names of operations in errors; all others are "copy": between memory and a GPU."""


class SaveSource(Protocol):
    """Gives the tiles of checkpoints that must be copied first, and commits checkpoints."""

    def buffer_address(self, buffer: int) -> int:
        """Return the address of a copy buffer."""

    def gather(self, operation: SaveTile) -> None:
        """Fill the operation's copy buffer with its tile."""

    def commit(self, operation: Commit) -> None:
        """Start to commit; completes on the queue as the operation, with `error` 0 or -1."""

    def commit_error(self) -> Exception:
        """Return why the last commit has failed."""


Visitor = Callable[[RunVisit], "Any | None"]
"""Works on a subgroup's state: returns a table for the kernel, a `WholeUpdate`, or None if it did the work itself."""

Coming = Callable[[int], None]
"""Called with each subgroup whose state starts to be fetched, so that other data for its update can be, too."""


def no_visit(run: RunVisit) -> None:
    """Do nothing: the visitor between requests."""


def nothing_comes(subgroup: int) -> None:
    """Ignore that a subgroup is being fetched."""


class _InFlight(NamedTuple):
    """An operation in flight, and what was asked of a tier for it."""

    operation: Operation
    request: TileRequest | None = None


class LiveExecutor:
    """Starts the machine's operations on tiers, kernel and device, and returns what completed as events.

    Args:
        tiers: One for each path, opened on `queue`.
        kernel: Runs updates; reports to `queue`.
        queue: Gets all completions.
        memory: Where homes, staging slots and buffers are.
        saves: The checkpoints' copy buffers and commits; None where there are none.
        verify: Whether tiles get checksums when written, and are compared with those of the index when read.
        stall_s: How long a lane may be silent with operations in flight before the session gives up on it.
        lanes: The device's.
        others: Stores that are no path of the plan, by number: foreign ones, which are only read, and a save's sink.
            Their openers add them.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        kernel: UpdateKernel,
        queue: Queue,
        memory: HostMemory,
        saves: SaveSource | None = None,
        *,
        verify: bool = True,
        stall_s: float = STALL_S,
        lanes: Lanes = NO_LANES,
        others: Mapping[int, Tier] | None = None,
    ) -> None:
        self.timeline: list[Interval] = []
        """Operations that have ended, in that order; the start of a step takes and replaces the list."""
        self.written_bytes: Counter[int] = Counter()
        """Bytes written to each path, by its number, checkpoints included: they wear a drive."""
        self.requests = 0
        """Requests that callers have announced, less those that the engine thread has taken."""
        self.seals_homes = False
        """Whether updates seal state at home in memory, too: they take longer then, and checkpoints less."""
        self._tiers = tiers
        self._kernel = kernel
        self._queue = queue
        self._memory = memory
        self._saves = saves
        self._verify = verify
        self._stall_s = stall_s
        self._lanes = lanes
        self._calls = Calls(queue)  # for what would keep the engine thread: whole updates, reads of weights' files
        self.visiting = MappedWeightsWindow()
        """Reads weights that lie in files, before the update of their subgroup."""
        self._seals = Seals(memory)
        # Runs whose inputs are being copied or read, with their tables:
        self._awaiting_inputs: dict[int, tuple[RunVisit, npt.NDArray[Any] | WholeUpdate]] = {}
        self._silence = waits.Silence()  # since the last completion, while operations are in flight
        self._visitor: Visitor = no_visit  # of the sweep under way
        self._coming: Coming = nothing_comes
        self._only_updates = False  # whether `_visitor` only returns tables
        self._others = {} if others is None else others
        self._plan: Plan | None = None  # None in a trial of paths
        self._in_flight: dict[int, _InFlight] = {}  # by operation
        self._events: list[Event] = []  # failures that `wait` has not returned yet
        self._due_s: dict[int, float] = {}  # `Interval.due_s` of operations in flight
        self._last_end_s = 0.0  # since when operations that are started now are due: see `wait`
        # Since when the engine thread has worked without an entry in the timeline; None before the first `wait`.
        self._woke_s: float | None = None

    def use_plan(self, plan: Plan) -> None:
        """Go on with another plan, while nothing is in flight."""
        self._plan = plan

    def set_visitor(self, visitor: Visitor, coming: Coming = nothing_comes, *, updates: bool = False) -> None:
        """Use a visitor for the runs of the next sweep.

        Args:
            visitor: Called at the start of each run.
            coming: Called with each subgroup that starts to be fetched.
            updates: Whether the visitor only returns tables, so that the kernel is the first to read the state.
        """
        self._visitor = visitor
        self._coming = coming
        self._only_updates = updates

    def submit(self, operations: Sequence[Operation]) -> None:
        """Start operations; one that cannot be started is reported as failed by the next `wait`."""
        for operation in operations:
            if not self._in_flight:
                self._silence.end()  # until now nothing was awaited: the time to a stall starts here
            self._due_s[operation.op] = self._last_end_s  # the newest completion has made it possible
            try:
                self._start(operation)
            except Exception as error:
                self._fail(operation, error)

    def _fail(self, operation: Operation, error: Exception) -> None:
        """Report an exception, perhaps a visitor's, as an operation's failure: the engine thread must survive it."""
        if isinstance(error, DamagedError):
            error = self._damage_error(error.operation)
        self._in_flight.pop(operation.op, None)
        del self._due_s[operation.op]
        self._events.append(Failed(operation.op, error))
        self._queue.post(WAKE)  # as no lane reports this operation

    def _start(self, operation: Operation) -> None:
        """Start one operation: post it to its lane, or to a thread that will report its end to the queue."""
        if isinstance(operation, ReadTile | WriteTile | SaveTile | CopyTile):
            self._start_tile(operation)
            return
        self._in_flight[operation.op] = _InFlight(operation)
        match operation:
            case Transfer() | AwaitPush():
                self._start_on_gpu(operation)
            case RunVisit() if operation.visit.gpu:
                self._start_on_gpu(operation)
            case RunVisit():
                self._start_cpu_run(operation)
            case Sync():
                self._tier(operation.path).sync(operation.op)
            case Commit():
                self._save_source().commit(operation)
            case FreeHome():
                self._seals.forget_home(operation.subgroup)
                layout = known(self._plan, "memory goes back, and there is no plan").layout
                self._memory.discard_home(layout.subgroups[operation.subgroup])
                self._queue.post(operation.op)  # it has ended already

    def _start_cpu_run(self, run: RunVisit) -> None:
        """Call a run's visitor, and start the update that it returns, if any, once all inputs are in memory.

        Inputs are gradients and weights that are being copied from a GPU, and weights that lie in a file.
        """
        started_s = time.monotonic()
        if run.slot is None:
            self._seals.forget_home(run.visit.subgroup)  # of state that the run may change
        elif not self._only_updates:  # the visitor may read state; else `_update` or the kernel verifies the slot
            self._verify_slot(run, run.slot)
        table = self._visitor(run)
        if table is None:  # the visitor has done the work itself
            self._queue.post(run.op, started_s=started_s, finished_s=time.monotonic())
            return
        if self._lanes.report_inputs(run.visit.subgroup, run.op):  # copies from the GPU are under way
            self._awaiting_inputs[run.op] = run, table
            return
        mapped_weights = mapped_weights_of(table.table if isinstance(table, WholeUpdate) else table)
        if mapped_weights is not None:  # they are read from their file first
            self._awaiting_inputs[run.op] = run, table
            self._calls.submit(run.op, partial(self.visiting.begin, mapped_weights))
        else:
            self._update(run, table)

    def _start_tile(self, operation: ReadTile | WriteTile | SaveTile | CopyTile) -> None:
        """Hand the transfer of a tile to its path's tier."""
        checksum, verify = self._checksum_and_verify(operation)
        if isinstance(operation, SaveTile) and operation.buffer is not None and operation.gathers:
            self._save_source().gather(operation)
        request = self._request(operation, checksum, verify)
        self._in_flight[operation.op] = _InFlight(operation, request)
        tier = self._tier(operation.record.location.path)
        if isinstance(operation, WriteTile | SaveTile):
            tier.write(request)
            return
        if isinstance(operation, ReadTile):
            if operation.slot is None:  # touch the home, so that missing memory is an error here
                self._memory.touch_home(operation.tile.subgroup, operation.buffer_offset, request.nbytes)
            # The first tile of a subgroup's state: its fetch begins. Tensors of scratch have other numbers.
            if operation.tile.tensor == operation.tile.tile == 0:
                self._coming(operation.tile.subgroup)
        tier.read(request)

    def _checksum_and_verify(self, operation: ReadTile | WriteTile | SaveTile | CopyTile) -> tuple[int | None, bool]:
        """Return `checksum` and `verify` of the request for a tile: see `TileRequest`.

        The first is the tile's checksum, None if it is not known. The second is, on read, whether the tier compares
        the data with it; on write, whether the tier stores one, which it computes if it is not known.
        """
        if not self._verify:
            return None, False
        match operation:
            case WriteTile(owner=None):  # of state
                return self._seals.checksum_for_flush(operation), True
            case WriteTile():  # of scratch, which has no seal
                return None, True
            case SaveTile():
                return self._seals.checksum_for_save(operation), True
            case ReadTile(owner=None):  # of state: the next update may verify it instead
                return operation.record.checksum, self._seals.note_read(operation)
            case _:  # scratch and tiles of checkpoints are read
                return operation.record.checksum, True

    def _request(
        self, operation: ReadTile | WriteTile | SaveTile | CopyTile, checksum: int | None, verify: bool
    ) -> TileRequest:
        """Return what a tier has to do for the transfer of a tile; for checksums see `_checksum_and_verify`."""
        location = operation.record.location
        return TileRequest(
            op=operation.op,
            tile=operation.tile,
            step=operation.record.step,
            offset=location.offset,
            address=self._address(operation),
            nbytes=location.nbytes,
            checksum=checksum,
            verify=verify,
        )

    def _verify_slot(self, run: RunVisit, slot: int) -> None:
        """Verify the state that a run reads in a staging slot, and forget its seal: the visitor may change it."""
        is_read = not run.fresh and not run.visit.overwrites
        self._seals.verify_and_forget(slot, run.visit.subgroup if is_read else None)

    def _update(self, run: RunVisit, table: npt.NDArray[Any] | WholeUpdate) -> None:
        """Start the update of a run whose inputs are in memory; the kernel also seals the state if that is wanted."""
        if isinstance(table, WholeUpdate):
            if run.slot is not None:  # a home's seal was forgotten when the run was started
                self._verify_slot(run, run.slot)
            self._calls.submit(run.op, table)
            return
        # A trial of paths has no plan.
        subgroup = self._plan.layout.subgroups[run.visit.subgroup] if self._plan is not None else None
        is_sealed = self._verify and (run.slot is not None or self.seals_homes)
        if subgroup is None or not is_sealed:
            self._kernel.submit(run.op, table)
            return
        seal_to_compare = self._seals.seal_to_compare_or_verify(run, subgroup)
        state = self._seals.state(subgroup, self._state_address(run.slot, subgroup.index))
        new_seal = self._kernel.submit_sealed(run.op, table, state, seal_to_compare)
        self._seals.note_started(run, new_seal)

    def _start_on_gpu(self, operation: Transfer | AwaitPush | RunVisit) -> None:
        """Enqueue a copy or an update on the GPU's lanes, which report it to the queue.

        What host memory waits for is reported when it has ended, all else at once: see `offload.device.lanes`.
        """
        lanes, due_s = self._lanes, self._due_s[operation.op]
        match operation:
            case RunVisit():
                # A table that was copied with the state is on the device already.
                table = None if lanes.has_table(operation) else self._visitor(operation)
                lanes.enqueue_update(operation, table, due_s)
            case AwaitPush():
                lanes.await_push(operation)
            case Transfer(what="weights", way="fetch"):
                lanes.fetch_weights(operation, due_s)
            case Transfer(what="weights"):
                lanes.push(operation, due_s)
            case Transfer():
                self._copy_state(operation, due_s)

    def _copy_state(self, copy: Transfer, due_s: float) -> None:
        """Enqueue a copy of state between its place in host memory and a staging slot on the GPU.

        Towards the GPU the state is verified first, and the table of its update is sent with it. The seal of a
        staging slot is forgotten both ways, that of a home when the copy back changes it: GPUs make no seals.
        """
        slot, subgroup, to_gpu = copy.slot, copy.subgroup, copy.way == "fetch"
        if slot is not None:  # a copy back overwrites the slot, so nothing in it is verified then
            self._seals.verify_and_forget(slot, subgroup if to_gpu else None)
        elif not to_gpu:
            self._seals.forget_home(subgroup)
        address = self._state_address(slot, subgroup)
        if not to_gpu:
            self._lanes.copy_out(copy, address, due_s)
            return
        # The visitor makes the table now, for a stand-in of the `RunVisit` that comes when the copy is enqueued.
        visit = Visit(subgroup, gpu=True)
        run = RunVisit(copy.op, sweep=0, visit=visit, slot=slot, fresh=False, transfer_slot=copy.transfer_slot)
        self._lanes.copy_in(copy, address, self._visitor(run), due_s)

    def _state_address(self, slot: int | None, subgroup: int) -> int:
        """Return the address of a subgroup's state: in a staging slot, or at home."""
        return self._memory.state_address(subgroup) if slot is None else self._memory.slot_address(slot)

    def _tier(self, path: int) -> Tier:
        """Return the tier of a path, or of a store that is no path of the plan."""
        return self._tiers[path] if path < len(self._tiers) else self._others[path]

    def _save_source(self) -> SaveSource:
        """Return the checkpoints' copy buffers and commits."""
        return known(self._saves, "a checkpoint is written from nowhere")

    def _address(self, operation: ReadTile | WriteTile | SaveTile | CopyTile) -> int:
        """Return the address that a tile is read to or written from.

        State lies in a staging slot or at home, scratch in its owner's buffer, and a checkpoint's tile in a copy
        buffer, or at home if it is saved from there.
        """
        if isinstance(operation, ReadTile | WriteTile):
            if operation.owner is not None:  # scratch: `slot` is the number of its owner's buffer
                buffer = known(operation.slot, f"{operation.owner.kind} without a buffer")
                return self._memory.buffer_address(operation.owner.kind, buffer) + operation.buffer_offset
            return self._state_address(operation.slot, operation.tile.subgroup) + operation.buffer_offset
        if operation.buffer is None:  # a `SaveTile` of state at home in host memory
            return self._memory.state_address(operation.tile.subgroup) + operation.source_offset
        return self._save_source().buffer_address(operation.buffer)

    def end_engine_interval(self) -> float:
        """Add an interval of the engine thread's work to the timeline, from its waking or the last call until now.

        `wait` calls this before it waits. Others call it where the thread's further work, and operations begun from
        now on, are not to count for what came before: these are due since the time that this returns.

        Returns:
            The present time, on the monotonic clock.
        """
        now_s = time.monotonic()
        if self._woke_s is not None:  # else `wait` was not called yet
            self.timeline.append(Interval(ENGINE, label="", started_s=self._woke_s, finished_s=now_s, nbytes=0))
            self._woke_s = now_s
        self._last_end_s = now_s
        return now_s

    def wait(self) -> list[Event]:
        """Wait for completions and return their events; none if only a request came, or nothing for long.

        A long silence of all lanes is logged. After `stall_s` of it a `Stop` is returned, which breaks the session;
        after `waits.QUIET_S` already if a caller that waits has been interrupted.
        """
        self.end_engine_interval()
        is_watched = self._operation_that_must_end() is not None
        if self._events:
            records = []  # failures of `submit` are returned at once
        elif is_watched:  # wait until the next warning is due, or until a lane counts as hanging
            left_s = self._stall_s - self._silence.lasts_s
            records = self._silence.wait(self._queue.wait, max(min(left_s, self._silence.left_s), 0.0))
        else:
            records = self._queue.wait()
        # The id of the operation comes first in a record.
        completions = [Completion(*record) for record in records if record[0] != INTERRUPT]
        is_interrupted = len(completions) < len(records)  # then `INTERRUPT` was among the records
        self._woke_s = time.monotonic()
        events, self._events = self._events, []
        if completions:
            self._silence.end()
        elif not events and is_watched:  # time has run out, or a caller was interrupted
            lasts_s = self._silence.lasts_s
            most_s = min(waits.QUIET_S, self._stall_s) if is_interrupted else self._stall_s
            if lasts_s >= most_s:
                self._silence.end()
                return [Stop(self._stall_error(lasts_s, "interrupted after" if is_interrupted else "no answer for"))]
            self._silence.warn_if_due(self._awaited)
        # Operations that these events make possible are due since the last of these ends.
        ends_s = [completion.finished_s for completion in completions if completion.op not in (WAKE, REQUEST)]
        self._last_end_s = max(ends_s, default=self._woke_s)
        for completion in completions:
            if completion.op == REQUEST:
                self.requests += 1
            elif completion.op in self._awaiting_inputs and completion.error == 0:
                self._start_update(*self._awaiting_inputs.pop(completion.op))
            elif completion.op != WAKE:
                events.append(self._report(completion))
        return events

    def close(self) -> None:
        """Wait for the updates of whole parameters that are under way, and end their thread; idempotent."""
        self._calls.close()

    def drain(self) -> None:
        """Wait until no operation but a commit is in flight, or a lane hangs; ignore errors.

        A commit touches no caller's memory, and may take long. All others have to end before callers free theirs.
        """
        while any(not isinstance(started.operation, Commit) for started in self._in_flight.values()):
            if any(isinstance(event, Stop) for event in self.wait()):
                return

    def _start_update(self, run: RunVisit, table: npt.NDArray[Any] | WholeUpdate) -> None:
        """Start the update of a run whose weights or gradients have been copied from the GPU or read from a file."""
        self._calls.ops.discard(run.op)  # of the call that read the file, if there was one: it has ended
        try:
            self._update(run, table)
        except Exception as error:
            self._fail(run, error)

    def take_timed(self) -> None:
        """Add to the timeline all that the GPU's lanes have done, and that was not added yet."""
        self._lanes.take_timed(self._add_timed)

    def _add_timed(self, timed: Timed) -> None:
        """Add what a lane of the GPU has done to the timeline."""
        label = f"subgroup {timed.subgroup}"
        began_s, ended_s = timed.began.time_s(), timed.ended.time_s()
        self.timeline.append(Interval(timed.lane, label, began_s, ended_s, timed.nbytes, timed.due_s))

    def _report(self, completion: Completion) -> Event:
        """Return the event that a completion makes, and add the operation to the timeline."""
        op = completion.op
        operation, request = self._in_flight.pop(op)
        self._calls.ops.discard(op)
        due_s = self._due_s.pop(op)
        if completion.error == ERROR_CALL:
            self._awaiting_inputs.pop(op, None)
            return Failed(op, self._calls.take_error())
        # A run that awaits inputs is reported only if they have failed: else `wait` has started its update.
        if op in self._awaiting_inputs or isinstance(operation, Transfer | AwaitPush):
            return self._report_gpu_copy(operation, completion)
        if isinstance(operation, Sync | Commit):
            if completion.error == 0:
                return Done(op)
            if isinstance(operation, Commit):
                return Failed(op, self._save_source().commit_error())
            return Failed(op, self._tier_error("sync", completion, request=None, tier=self._tier(operation.path)))
        if isinstance(operation, FreeHome) or (isinstance(operation, RunVisit) and operation.visit.gpu):
            return Done(op)  # the GPU's lanes note the run's time when it has ended there
        if isinstance(operation, RunVisit):
            return self._report_cpu_run(operation, completion, due_s)
        return self._report_tile(operation, request, completion, due_s)

    def _report_gpu_copy(self, operation: Operation, completion: Completion) -> Event:
        """Return the event of a copy between host memory and the GPU: of a transfer, or of what a run waits for."""
        tier, path = self._tier_and_path(operation)
        self._awaiting_inputs.pop(completion.op, None)
        if completion.error != 0:
            detail = "the GPU has failed; see the log"
            return Failed(completion.op, TierError("copy", tier=tier, path=path, detail=detail))
        if isinstance(operation, AwaitPush) or (isinstance(operation, Transfer) and operation.lane == "d2h"):
            # The subgroup's times on the GPU are read here, while lanes work. To read those of all subgroups as the
            # next step begins would keep lanes waiting.
            with contextlib.suppress(OffloadError):  # a failed device shows with its next completion
                self._lanes.take_timed(self._add_timed, operation.subgroup)
        return Done(completion.op)

    def _report_cpu_run(self, run: RunVisit, completion: Completion, due_s: float) -> Event:
        """Return the event of a run on the CPU, and note its seal, or which tile it has found damaged."""
        subgroup = run.visit.subgroup
        if completion.error == 0:
            nbytes = self._plan.layout.subgroups[subgroup].state_bytes if self._plan else 0
            times = completion.started_s, completion.finished_s
            self.timeline.append(Interval("cpu", f"subgroup {subgroup}", *times, nbytes, due_s))
            self._seals.note_ended(run.op)
            return Done(completion.op)
        if completion.error == ERROR_CHECKSUM:
            damaged = self._seals.take_damaged_read(run.op, completion.detail)
            return Failed(completion.op, self._damage_error(damaged))
        detail = f"the kernel reports {completion.error}"
        return Failed(completion.op, TierError("update", tier="host", path="cpu", detail=detail))

    def _report_tile(
        self,
        operation: ReadTile | WriteTile | SaveTile | CopyTile,
        request: TileRequest | None,
        completion: Completion,
        due_s: float,
    ) -> Event:
        """Return the event of a tile's transfer, for which `request` was made; that of a write has its checksum."""
        record = operation.record
        path, nbytes = record.location.path, record.location.nbytes
        if completion.error != 0:
            return Failed(completion.op, self._tier_error(_verb(operation), completion, request, self._tier(path)))
        lane = f"{LANE_VERBS[type(operation)]}:{path}"
        times = completion.started_s, completion.finished_s
        self.timeline.append(Interval(lane, tile_label(operation), *times, nbytes, due_s))
        if not isinstance(operation, WriteTile | SaveTile):
            return Done(completion.op)
        self.written_bytes[path] += nbytes
        return Done(completion.op, TileRecord(record.location, record.step, checksum=completion.detail))

    def _damage_error(self, operation: ReadTile) -> TierError:
        """Return the error of a failed read, for a tile that was read and does not have its record's checksum."""
        request = self._request(operation, operation.record.checksum, verify=False)  # for the error's text alone
        completion = Completion(operation.op, ERROR_CHECKSUM, detail=request.offset, started_s=0.0, finished_s=0.0)
        return self._tier_error("read", completion, request, self._tier(operation.record.location.path))

    def _tier_error(self, verb: str, completion: Completion, request: TileRequest | None, tier: Tier) -> TierError:
        """Return the error of a failed completion, with the names of the tile's parameters and of its file.

        `request` is None for a sync, which is of no tile.
        """
        error = tier_error(verb, completion, request, tier)
        if request is None or self._plan is None:
            return error
        place = getattr(innermost(tier), "store_path", None)
        where = f" in {place}" if place is not None else ""
        return type(error)(
            error.operation,
            tier=error.tier,
            path=error.path,
            offset=error.offset,
            errno=error.errno,
            detail=f"{self._plan.layout.parameters_of(request.tile)}{where}; {error.detail}",
        )

    def _stall_error(self, lasts_s: float, what: str) -> TierError:
        """Return the error for an operation whose lane is silent; its text is `what`, then the time."""
        operation, request = known(self._operation_that_must_end(), "silence of nothing")
        tier, path = self._tier_and_path(operation)
        # Only some tiers wait for more than their device (a network), and can say for what.
        reasons = [reason() for tier in self._tiers if (reason := getattr(tier, "waiting_for", None)) is not None]
        return TierError(
            _verb(operation),
            tier=tier,
            path=path,
            offset=request.offset if request else None,
            detail="; ".join([f"{what} {format_seconds(lasts_s)}", *filter(None, reasons)]),
        )

    def _operation_that_must_end(self) -> _InFlight | None:
        """Return the first operation in flight whose lane hangs if it is silent for `stall_s`; None if there is none.

        A commit may wait for other ranks, and itself reports a wait that is too long. The update of a whole parameter
        has no limit, nor has a run whose weights are being read from their file.
        """
        for op, started in self._in_flight.items():
            if not isinstance(started.operation, Commit) and op not in self._calls.ops:
                return started
        return None

    def _tier_and_path(self, operation: Operation) -> tuple[str, str]:
        """Return the names of the tier and the path that an operation uses."""
        tier = None
        if isinstance(operation, Sync):
            tier = self._tier(operation.path)
        elif isinstance(operation, ReadTile | WriteTile | SaveTile | CopyTile):
            tier = self._tier(operation.record.location.path)
        if tier is not None:
            return tier.name, tier.path
        if isinstance(operation, Transfer | AwaitPush):
            return "gpu", operation.lane
        if operation.op in self._awaiting_inputs:  # a run waits for gradients
            return "gpu", "d2h"
        return "host", "cpu"

    def _awaited(self) -> str:
        """Return, for the log, what a silent lane has been asked to do."""
        operation, request = known(self._operation_that_must_end(), "silence of nothing")
        tier, path = self._tier_and_path(operation)
        where = f" at byte {request.offset}" if request is not None else ""
        return f"{tier} path {path} to {_verb(operation)}{where}"


def _verb(operation: Operation) -> str:
    """Return what an operation does, for errors and the log."""
    return VERBS.get(type(operation), "copy")


class Calls:
    """A thread that makes calls one after another and reports each to the queue: for updates that no kernel makes.

    It is started with the first call. `submit`, `take_error` and `close` belong to one thread.

    Attributes:
        ops: Operations that have been submitted; the executor removes one when its end is reported.
    """

    def __init__(self, completions: Queue) -> None:
        self.ops: set[int] = set()
        self._completions = completions
        self._todo: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()  # None: end
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None  # what a call has raised

    def submit(self, op: int, call: Callable[[], None]) -> None:
        """Queue a call after earlier ones; completes as operation `op`, with `ERROR_CALL` if it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_thread, name="offload-updates", daemon=True)
            self._thread.start()
        self.ops.add(op)
        self._todo.put((op, call))

    def take_error(self) -> Exception:
        """Return the exception that a call has raised; no call was made after that one."""
        return known(self._error, "a call has failed with nothing")

    def close(self) -> None:
        """Wait for the calls that have been submitted, and end the thread; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._todo.put(None)
            thread.join()

    def _run_thread(self) -> None:
        """Make the queued calls, in the thread, until `close`; after one that raised, only report failures."""
        while (queued := self._todo.get()) is not None:
            op, call = queued
            started_s = time.monotonic()
            try:
                if self._error is None:
                    call()
            except Exception as error:
                self._error = error
            error_code = 0 if self._error is None else ERROR_CALL
            del queued, call  # the next wait must not keep alive what the call refers to
            self._completions.post(op, error_code, started_s=started_s, finished_s=time.monotonic())
