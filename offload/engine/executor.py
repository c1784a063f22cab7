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
from typing import Any, Protocol

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


class LiveExecutor:
    """Starts the machine's operations on tiers, kernel and device, and returns what completed as events.

    Args:
        tiers: One for each path, opened on `queue`.
        kernel: Runs updates; reports to `queue`.
        queue: Gets all completions.
        memory: Where homes, staging slots and buffers are.
        saves: The checkpoints' copy buffers and commits; None where there are none.
        verify: Whether tiles get checksums when written, and are compared with those of the index when read.
        stall_s: See `STALL_S`.
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
        self._calls = Calls(queue)
        self.visiting = MappedWeightsWindow()
        self._seals = Seals(memory)
        self._waiting: dict[
            int, tuple[RunVisit, npt.NDArray[Any] | WholeUpdate]
        ] = {}  # runs whose inputs are being copied
        self._silence = waits.Silence()
        self._visitor: Visitor = no_visit
        self._coming: Coming = nothing_comes
        self._only_updates = False  # as `visit_with` says
        self._others = {} if others is None else others
        self._plan: Plan | None = None
        self._in_flight: dict[int, tuple[Operation, TileRequest | None]] = {}
        self._events: list[Event] = []
        self._due_s: dict[int, float] = {}  # `Interval.due_s` of operations in flight
        self._last_end_s = 0.0  # when the last operation ended that `wait` has returned
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
        self._visitor, self._coming, self._only_updates = visitor, coming, updates

    def submit(self, operations: Sequence[Operation]) -> None:
        """Start operations; one that cannot be started is reported as failed by the next `wait`."""
        for operation in operations:
            if not self._in_flight:
                self._silence.end()
            self._due_s[operation.op] = self._last_end_s
            try:
                self._start(operation)
            except Exception as error:
                self._fail(operation, error)

    def _fail(self, operation: Operation, error: Exception) -> None:
        """Report an exception, perhaps a visitor's, as an operation's failure: the engine thread must survive it."""
        if isinstance(error, DamagedError):
            error = self._damaged(error.operation)
        self._in_flight.pop(operation.op, None)
        del self._due_s[operation.op]
        self._events.append(Failed(operation.op, error))
        self._queue.post(WAKE)

    def _start(self, operation: Operation) -> None:
        """Start one operation: post it to its lane, or to a thread that will report its end to the queue."""
        if isinstance(operation, Transfer | AwaitPush) or (isinstance(operation, RunVisit) and operation.visit.gpu):
            self._in_flight[operation.op] = (operation, None)
            self._put_on_lanes(operation)
            return
        if isinstance(operation, RunVisit):
            self._in_flight[operation.op] = (operation, None)
            started_s = time.monotonic()
            if operation.slot is None:
                self._seals.touched_home(operation.visit.subgroup)
            elif not self._only_updates:
                self._touch_slot(operation, operation.slot)
            table = self._visitor(operation)
            if table is None:
                self._queue.post(operation.op, started_s=started_s, finished_s=time.monotonic())
            elif self._lanes.report_inputs(
                operation.visit.subgroup, operation.op
            ):  # copies from the GPU are under way
                self._waiting[operation.op] = operation, table
            elif (visit := mapped_weights_of(table.table if isinstance(table, WholeUpdate) else table)) is not None:
                self._waiting[operation.op] = operation, table
                self._calls.submit(operation.op, partial(self.visiting.begin, visit))
            else:
                self._update(operation, table)
            return
        if isinstance(operation, Sync):
            self._in_flight[operation.op] = (operation, None)
            self._tier(operation.path).sync(operation.op)
            return
        if isinstance(operation, Commit):
            self._in_flight[operation.op] = (operation, None)
            self._source().commit(operation)
            return
        if isinstance(operation, FreeHome):
            self._in_flight[operation.op] = (operation, None)
            self._seals.touched_home(operation.subgroup)
            layout = known(self._plan, "memory goes back, and there is no plan").layout
            self._memory.discard_home(layout.subgroups[operation.subgroup])
            self._queue.post(operation.op)
            return
        request = self._request(operation, *self._checks(operation))
        self._in_flight[operation.op] = (operation, request)
        tier = self._tier(operation.record.location.path)
        if isinstance(operation, ReadTile | CopyTile):
            if isinstance(operation, ReadTile) and operation.slot is None:
                self._memory.touch_home(operation.tile.subgroup, operation.buffer_offset, request.nbytes)
            if isinstance(operation, ReadTile) and operation.tile[1:] == (0, 0):  # the first of a subgroup
                self._coming(operation.tile.subgroup)
            tier.read(request)
        else:
            tier.write(request)

    def _checks(self, operation: ReadTile | WriteTile | SaveTile | CopyTile) -> tuple[int | None, bool]:
        """Return the checksum of a tile to be moved, if known, and whether the tier computes or verifies it."""
        if not self._verify:
            return None, False
        if isinstance(operation, WriteTile) and operation.owner is not None:
            return None, True
        if isinstance(operation, ReadTile) and operation.owner is not None:
            return operation.record.checksum, True
        if isinstance(operation, SaveTile):
            return self._seals.saving(operation), True
        if isinstance(operation, WriteTile):
            return self._seals.writing(operation), True
        return operation.record.checksum, isinstance(operation, CopyTile) or self._seals.reading(operation)

    def _request(
        self, operation: ReadTile | WriteTile | SaveTile | CopyTile, checksum: int | None, verify: bool
    ) -> TileRequest:
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

    def _touch_slot(self, run: RunVisit, slot: int) -> None:
        """Verify the state that a run reads in a staging slot, and forget its seal."""
        is_read = not run.fresh and not run.visit.overwrites
        self._seals.touched(slot, run.visit.subgroup if is_read else None)

    def _update(self, run: RunVisit, table: npt.NDArray[Any] | WholeUpdate) -> None:
        """Start the update of a run whose inputs are in memory; the kernel also seals the state if that is wanted."""
        if isinstance(table, WholeUpdate):
            if run.slot is not None:  # a home's seal was forgotten when the run was started
                self._touch_slot(run, run.slot)
            self._calls.submit(run.op, table)
            return
        subgroup = self._plan.layout.subgroups[run.visit.subgroup] if self._plan is not None else None
        if subgroup is None or not self._verify or (run.slot is None and not self.seals_homes):
            self._kernel.submit(run.op, table)
            return
        expected = self._seals.expected(run, subgroup)
        state = self._seals.state(subgroup, self._state_address(run.slot, subgroup.index))
        self._seals.started(run, self._kernel.submit_sealed(run.op, table, state, expected))

    def _put_on_lanes(self, operation: Transfer | AwaitPush | RunVisit) -> None:
        lanes, due_s = self._lanes, self._due_s[operation.op]
        match operation:
            case RunVisit():
                lanes.enqueue_update(
                    operation, None if lanes.has_table(operation) else self._visitor(operation), due_s
                )
            case AwaitPush():
                lanes.await_push(operation)
            case Transfer(what="weights"):
                (lanes.fetch_weights if operation.way == "fetch" else lanes.push)(operation, due_s)
            case Transfer(subgroup=subgroup, slot=slot):
                to_gpu = operation.way == "fetch"
                if slot is not None:
                    self._seals.touched(slot, subgroup if to_gpu else None)
                elif not to_gpu:
                    self._seals.touched_home(subgroup)
                address = self._state_address(slot, subgroup)
                if to_gpu:  # the visitor makes the table now, of the run that follows
                    visit, transfer_slot = Visit(subgroup, gpu=True), operation.transfer_slot
                    run = RunVisit(operation.op, 0, visit, slot, fresh=False, transfer_slot=transfer_slot)
                    lanes.copy_in(operation, address, self._visitor(run), due_s)
                else:
                    lanes.copy_out(operation, address, due_s)

    def _state_address(self, slot: int | None, subgroup: int) -> int:
        """Return the address of a subgroup's state: in a staging slot, or at home."""
        return self._memory.state_address(subgroup) if slot is None else self._memory.slot_address(slot)

    def _tier(self, path: int) -> Tier:
        return self._tiers[path] if path < len(self._tiers) else self._others[path]

    def _source(self) -> SaveSource:
        return known(self._saves, "a checkpoint is written from nowhere")

    def _address(self, operation: ReadTile | WriteTile | SaveTile | CopyTile) -> int:
        """Return the address that a tile is read to or written from, after gathering it to its buffer if need be."""
        if isinstance(operation, ReadTile | WriteTile):
            if operation.owner is not None:
                buffer = known(operation.slot, f"{operation.owner.kind} without a buffer")
                return self._memory.buffer_address(operation.owner.kind, buffer) + operation.buffer_offset
            return self._state_address(operation.slot, operation.tile.subgroup) + operation.buffer_offset
        if operation.buffer is None:
            return self._memory.state_address(operation.tile.subgroup) + operation.source_offset
        source = self._source()
        if isinstance(operation, SaveTile) and operation.gathers:
            source.gather(operation)
        return source.buffer_address(operation.buffer)

    def end_turn(self) -> None:
        """End an interval of the engine thread's work in the timeline: what follows belongs to another step."""
        if self._woke_s is not None:
            now_s = time.monotonic()
            self.timeline.append(Interval(ENGINE, "", self._woke_s, now_s, 0))
            self._woke_s = now_s

    def wait(self) -> list[Event]:
        """Wait for completions and return their events; none if only a request came, or nothing for long.

        A lane that is silent for `stall_s` makes a `Stop`.
        """
        self.end_turn()
        is_watched = self._silent() is not None
        left_s = self._stall_s - self._silence.lasts_s
        timeout_s = max(min(left_s, self._silence.left_s), 0.0) if is_watched else -1.0
        records = [] if self._events else self._queue.wait(timeout_s)
        interrupted = any(record[0] == INTERRUPT for record in records)
        if interrupted:
            records = [record for record in records if record[0] != INTERRUPT]
        self._woke_s = time.monotonic()
        events, self._events = self._events, []
        if records:
            self._silence.end()
        elif not events and is_watched:
            lasts_s = self._silence.lasts_s
            if lasts_s >= self._stall_s or (interrupted and lasts_s >= waits.QUIET_S):
                self._silence.end()
                return [Stop(self._stalled(lasts_s, "interrupted after" if interrupted else "no answer for"))]
            self._silence.tell(self._awaited)
        ended_s = [record[4] for record in records if record[0] not in (WAKE, REQUEST)]
        self._last_end_s = max(ended_s, default=self._woke_s)
        for record in records:
            completion = Completion(*record)
            if completion.op == REQUEST:
                self.requests += 1
            elif completion.op in self._waiting and completion.error == 0:
                self._go_on(*self._waiting.pop(completion.op))
            elif completion.op != WAKE:
                events.append(self._report(completion))
        return events

    def close(self) -> None:
        """Wait for the updates of whole parameters that are under way, and end their thread; idempotent."""
        self._calls.close()

    def drain(self) -> None:
        """Wait until no operation that touches a caller's memory is in flight, or a lane hangs; ignore errors."""
        while any(not isinstance(operation, Commit) for operation, _ in self._in_flight.values()):
            if any(isinstance(event, Stop) for event in self.wait()):
                return

    def _go_on(self, run: RunVisit, table: npt.NDArray[Any] | WholeUpdate) -> None:
        """Start the update of a run whose weights or gradients have been copied from the GPU or read from a file."""
        self._calls.ops.discard(run.op)
        try:
            self._update(run, table)
        except Exception as error:
            self._fail(run, error)

    def take_timed(self) -> None:
        """Add what the GPU's lanes have done to the timeline."""
        self._lanes.take_timed(self._add_timed)

    def _add_timed(self, timed: Timed) -> None:
        label = f"subgroup {timed.subgroup}"
        times = timed.began.time_s(), timed.ended.time_s()
        self.timeline.append(Interval(timed.lane, label, *times, timed.nbytes, timed.due_s))

    def _report(self, completion: Completion) -> Event:
        """Return the event that a completion makes, and add the operation to the timeline."""
        operation, request = self._in_flight.pop(completion.op)
        self._calls.ops.discard(completion.op)
        due_s = self._due_s.pop(completion.op)
        if completion.error == ERROR_CALL:
            self._waiting.pop(completion.op, None)
            return Failed(completion.op, self._calls.take_error())
        if completion.op in self._waiting or isinstance(operation, Transfer | AwaitPush):
            tier, path = self._tier_and_path(operation)
            self._waiting.pop(completion.op, None)
            if completion.error == 0:
                if isinstance(operation, AwaitPush) or (isinstance(operation, Transfer) and operation.lane == "d2h"):
                    # Read here, while lanes work: all would wait for it when the next step begins.
                    with contextlib.suppress(OffloadError):  # a failed device shows with its next completion
                        self._lanes.take_timed(self._add_timed, operation.subgroup)
                return Done(completion.op)
            return Failed(
                completion.op, TierError("copy", tier=tier, path=path, detail="the GPU has failed; see the log")
            )
        if isinstance(operation, Sync | Commit):
            if completion.error == 0:
                return Done(completion.op)
            if isinstance(operation, Commit):
                return Failed(completion.op, self._source().commit_error())
            return Failed(completion.op, self._tier_error("sync", completion, None, self._tier(operation.path)))
        if isinstance(operation, FreeHome) or (isinstance(operation, RunVisit) and operation.visit.gpu):
            return Done(completion.op)  # the GPU's lanes note the run's time when it has ended there
        if isinstance(operation, RunVisit):
            lane, subgroup = "cpu", operation.visit.subgroup
            nbytes = self._plan.layout.subgroups[subgroup].state_bytes if self._plan else 0
            label = f"subgroup {subgroup}"
        else:
            location = operation.record.location
            lane = f"{LANE_VERBS[type(operation)]}:{location.path}"
            nbytes = location.nbytes
            label = tile_label(operation)
        if completion.error == 0:
            times = completion.started_s, completion.finished_s
            self.timeline.append(Interval(lane, label, *times, nbytes, due_s))
            if isinstance(operation, WriteTile | SaveTile):
                record = operation.record
                self.written_bytes[record.location.path] += nbytes
                return Done(completion.op, TileRecord(record.location, record.step, completion.detail))
            if isinstance(operation, RunVisit):
                self._seals.ended(operation.op)
            return Done(completion.op)
        if isinstance(operation, RunVisit) and completion.error == ERROR_CHECKSUM:
            damaged = self._seals.damaged(operation.op, completion.detail)
            return Failed(completion.op, self._damaged(damaged))
        if request is None or isinstance(operation, RunVisit):
            detail = f"the kernel reports {completion.error}"
            return Failed(completion.op, TierError("update", tier="host", path="cpu", detail=detail))
        tier_used = self._tier(operation.record.location.path)
        return Failed(completion.op, self._tier_error(_verb(operation), completion, request, tier_used))

    def _damaged(self, operation: ReadTile) -> TierError:
        """Return the error for a tile that was read and does not have its record's checksum."""
        request = self._request(operation, operation.record.checksum, False)
        completion = Completion(operation.op, ERROR_CHECKSUM, request.offset, 0.0, 0.0)
        return self._tier_error("read", completion, request, self._tier(operation.record.location.path))

    def _tier_error(self, verb: str, completion: Completion, request: TileRequest | None, tier: Tier) -> TierError:
        """Return the error of a failed completion, with the names of the tile's parameters and of its file."""
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

    def _stalled(self, lasts_s: float, what: str) -> TierError:
        """Return the error for an operation whose lane is silent."""
        operation, request = known(self._silent(), "silence of nothing")
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

    def _silent(self) -> tuple[Operation, TileRequest | None] | None:
        """Return an operation that must end, or its lane counts as hanging; None if none in flight must.

        A commit may wait for other ranks, and itself reports a wait that is too long. The update of a whole parameter
        has no limit.
        """
        in_flight = self._in_flight.items()
        return next((x for op, x in in_flight if not isinstance(x[0], Commit) and op not in self._calls.ops), None)

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
        return ("gpu", "d2h") if operation.op in self._waiting else ("host", "cpu")  # a run waits for gradients

    def _awaited(self) -> str:
        """Return, for the log, what a silent lane has been asked to do."""
        operation, request = known(self._silent(), "silence of nothing")
        tier, path = self._tier_and_path(operation)
        where = f" at byte {request.offset}" if request is not None else ""
        return f"{tier} path {path} to {_verb(operation)}{where}"


def _verb(operation: Operation) -> str:
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
        self._todo: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, op: int, call: Callable[[], None]) -> None:
        """Queue a call after earlier ones; completes as operation `op`, with `ERROR_CALL` if it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="offload-updates", daemon=True)
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

    def _serve(self) -> None:
        """Make the queued calls, in the thread, until `close`; after one that raised, only report failures."""
        while (work := self._todo.get()) is not None:
            op, call = work
            started_s = time.monotonic()
            try:
                if self._error is None:
                    call()
            except Exception as error:
                self._error = error
            error_code = 0 if self._error is None else ERROR_CALL
            del work, call
            self._completions.post(op, error_code, started_s=started_s, finished_s=time.monotonic())
