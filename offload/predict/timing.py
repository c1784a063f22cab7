"""The simulated executor of predictions: even lanes, no bytes, no faults.

It adds to `VirtualLanes` what limits a real step. Directions of a path may be slower beside each other, and serve
several transfers at once (`SharedPath`). If the rates have the time that the engine's own thread takes for an
operation, that thread is a lane, too ("engine"). If they have the host's memory bandwidth, updates on the CPU get
what the other lanes leave of it at each moment (`Rates.cpu_speed`).

The GPU is driven as the live engine drives it: a copy to it or an update there counts as done once it is enqueued,
and the operations that depend on it wait on the GPU (`Streams`). Gradients that are on the GPU when the step begins
(`Plan.fetches_gradients`) are fetched `FETCHED_AHEAD` visits in advance, on a stream beside that of state; an update
on the CPU waits for its own.

Non-goals: a host so much slower than its lanes that they wait for it in turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from offload.errors import InternalError, known
from offload.plan.budget import FETCHED_AHEAD, Plan
from offload.plan.cost import CALLS, PASSING_CALLS, slower
from offload.plan.rates import Rates
from offload.predict.lanes import Lane, VirtualLanes
from offload.predict.shared import Flow, SharedPath
from offload.predict.streams import PIECE_GAP_S, Order, Streams, Work
from offload.schedule.operations import (
    AwaitPush,
    BeginSweep,
    Done,
    Event,
    Operation,
    ReadTile,
    RunVisit,
    Sweep,
    Transfer,
)
from offload.schedule.timeline import ENGINE


class TimingExecutor(VirtualLanes):
    """Runs operations on a virtual clock; an `offload.schedule.loop.Executor`.

    Args:
        plan: What lives where.
        rates: Speed of every lane.
        order: How the GPU's copy engines choose between streams.
        piece_bytes: Size of the pieces that copies are cut into; after each, an engine may go to another stream. None
            for whole copies.
    """

    gradient_stream = "leaving"
    """The stream of copies of gradients from the GPU; those of state are on the stream "d2h"."""

    def __init__(
        self, plan: Plan, rates: Rates, *, order: Order = Order.READINESS, piece_bytes: int | None = None
    ) -> None:
        super().__init__(plan, rates)
        self.streams: Streams[Operation | int] = Streams(order)
        """The GPU's streams. Each work is named by its operation, or by the subgroup whose gradients it copies."""
        self._piece_bytes = piece_bytes
        # Paths whose transfers share the bandwidth: how long one takes is known only when it has ended.
        self._shared: list[SharedPath[Operation]] = []
        for number, path in enumerate(rates.paths):
            if path.is_half_duplex or round(path.at_once) > 1:
                self._shared.append(SharedPath(path))
                self._reads[number].shared = self._writes[number].shared = self._shared[-1]
        self._slower = slower(plan, rates)
        # The engine's thread. `_engine_work` gives it seconds of work, so its rate is not used.
        self._engine = Lane(ENGINE, 1.0)
        self._call_s = rates.gpu.call_s
        # The engine's reaction to the last report; 0 if that was of work which the engine itself had only enqueued.
        self._reaction_s = rates.reaction_s
        self._has_engine_lane = bool(rates.operation_s or rates.begin_s or self._call_s)  # its costs are known
        # Updates on the CPU wait in `_updates`, not in the heap, if their ends are not known when they begin: other
        # lanes' memory traffic may slow them down, or they may have to wait for gradients.
        most_demand = sum(lane.memory_cost / lane.s_per_byte for lane in self._lanes())
        # A direction of a half-duplex path may work alone, and faster than its lane's rate says.
        most_demand += sum(
            path.memory_cost * (path.read.alone + path.write.alone) for path in rates.paths if path.is_half_duplex
        )
        self._queues_updates = rates.cpu_speed(most_demand) < 1 or plan.fetches_gradients
        # A queue whose first update is the one under way; each with the time when it may begin.
        self._updates: deque[tuple[RunVisit, float]] = deque()
        self._update_left_s = 0.0  # work left of the first one, in seconds at the CPU's own speed
        self._update_from_s = 0.0  # when the first one may begin, if it need not wait for gradients
        self._demand = 0.0  # memory traffic of the other lanes now, in bytes a second
        self._demands: list[tuple[float, float]] = []  # coming changes of `_demand`: a heap of (when, by how much)
        # By staging slot of the GPU: the work that the next work in the slot follows.
        self._last_in_slot: dict[int, Work[Operation | int]] = {}
        self._to_fetch: dict[int, int] = {}  # bytes of gradients on the GPU that are not asked for yet, by subgroup
        self._ahead: set[int] = set()  # subgroups whose gradients were asked for before their visits
        self._gradient_copies: dict[int, Work[Operation | int]] = {}  # by subgroup
        self._weights_sent: dict[int, Work[Operation | int]] = {}  # from each weight slot
        # By the GPU's work: the operation that is reported when the work ends, after the earliest time of the report.
        self._awaited: dict[Work[Operation | int], tuple[float, Operation]] = {}

    def end_device(self) -> float:
        """Let the GPU do all enqueued work; return when it has ended its updates and the copies to it.

        The last copies to the host are not waited for: they go on behind a step.
        """
        while self.streams.next()[1] is not None:  # [1]: the next work
            self._begin_work()
        # `free_s` has one entry: the lanes of this class have one server each.
        return max((lane.free_s[0] for name, lane in self._named.items() if name not in ("cpu", "d2h")), default=0.0)

    def _lanes(self) -> list[Lane]:
        """Return all lanes, with the engine's thread if its costs are known."""
        return [*super()._lanes(), self._engine] if self._has_engine_lane else super()._lanes()

    def submit(self, operations: Sequence[Operation]) -> None:
        """Put operations on their lanes; each may begin when the engine has reacted and done its own work for it."""
        ready_s = self.now_s + self._reaction_s
        for operation in operations:
            if self._has_engine_lane:
                work_s = self._rates.operation_s + self._count_calls(operation) * self._call_s
                ready_s = self._engine_work(ready_s, work_s)
            ready_s = self._fetch_for(operation, ready_s)
            self._put(operation, ready_s)

    def _fetch_for(self, operation: Operation, ready_s: float) -> float:
        """Fetch the gradients that an operation makes the engine ask for, if any.

        A visit's gradients are asked for when its first tile is read, or when the CPU is to run the visit.

        Returns:
            When the engine's thread has done that, so that the operation may begin; `ready_s` if it fetches nothing.
        """
        if isinstance(operation, ReadTile):
            subgroup, tensor, tile = operation.tile
            return self._fetch_with_state(subgroup, ready_s) if tensor == tile == 0 else ready_s
        # If no gradients are left to be fetched, and none were asked for in advance, a visit has nothing to do here.
        if isinstance(operation, RunVisit) and not operation.visit.gpu and (self._to_fetch or self._ahead):
            return self._fetch_for_visit(operation.visit.subgroup, ready_s)
        return ready_s

    def _put(self, operation: Operation, ready_s: float) -> None:
        """Put an operation on its lane, where it may begin at `ready_s`.

        There are four kinds of lanes: the GPU's streams; the CPU, if ends of updates are not known in advance; paths
        whose transfers share the bandwidth; and all others, on which the end is computed at once.
        """
        lane, nbytes = self.lane_of(operation)
        if isinstance(operation, Transfer | AwaitPush) or (isinstance(operation, RunVisit) and operation.visit.gpu):
            self._enqueue(operation, nbytes, ready_s)
        elif isinstance(operation, RunVisit) and self._queues_updates:
            self._updates.append((operation, ready_s))  # `wait` finds out when it ends
            if len(self._updates) == 1:
                self._start_update()
        elif lane.shared is not None:
            self._give_shared(lane, lane.shared, operation, nbytes, ready_s)
        else:
            self._push(self._give(lane, operation, nbytes, ready_s), operation)

    def _enqueue(self, operation: Transfer | AwaitPush | RunVisit, nbytes: int, ready_s: float) -> None:
        """Put an operation on a stream of the GPU, and have it reported.

        Copies from the GPU, and waits for pushes, are reported when they end; all else is reported at `ready_s`, as
        the host need not wait for its end.
        """
        if isinstance(operation, AwaitPush):
            self._report_after(self._weights_sent.pop(operation.transfer_slot), ready_s, operation)
        elif isinstance(operation, RunVisit):
            self._enqueue_update(operation, nbytes, ready_s)
        elif operation.what == "state":
            self._enqueue_state(operation, nbytes, ready_s)
        elif operation.lane == "h2d":  # new weights
            self._weights_sent[operation.transfer_slot] = self._copy("h2d", "h2d", operation, nbytes, ready_s)
            self._push(ready_s, operation)
        else:  # old weights, for the update
            weights = self._copy(self.gradient_stream, "d2h", operation, nbytes, ready_s)
            self._report_after(weights, ready_s, operation)

    def _enqueue_update(self, operation: RunVisit, nbytes: int, ready_s: float) -> None:
        """Put an update on the GPU behind the copy of its state there, and report it at `ready_s`."""
        slot = operation.transfer_slot  # None for state at home on the GPU
        state = self._last_in_slot.pop(slot, None) if slot is not None else None
        work = self.streams.put(Work("gpu", "gpu", operation, nbytes, ready_s, state))
        if slot is not None:
            self._last_in_slot[slot] = work
        self._push(ready_s, operation)

    def _enqueue_state(self, operation: Transfer, nbytes: int, ready_s: float) -> None:
        """Copy state to a staging slot on the GPU, or from it behind the update there.

        A copy to the GPU is reported at `ready_s`, one to the host when it ends.
        """
        lane, slot = operation.lane, operation.transfer_slot
        work = self._copy(lane, lane, operation, nbytes, ready_s, self._last_in_slot.pop(slot, None))
        if lane == "h2d":
            self._last_in_slot[slot] = work
            self._push(ready_s, operation)
        else:
            self._report_after(work, ready_s, operation)

    def _copy(
        self,
        stream: str,
        engine: str,
        what: Operation | int,
        nbytes: int,
        ready_s: float,
        follows: Work[Operation | int] | None = None,
    ) -> Work[Operation | int]:
        """Put a copy on a stream, in pieces of at most `piece_bytes`; return the last piece.

        Args:
            stream: The stream of the GPU.
            engine: The copy engine, "h2d" or "d2h".
            what: The operation, or the subgroup whose gradients are copied.
            nbytes: Bytes to copy.
            ready_s: When the copy is put there.
            follows: Work on another stream that it waits for.
        """
        gap_s = 0.0
        if self._piece_bytes is not None:
            gap_s = PIECE_GAP_S
            while nbytes > self._piece_bytes:
                self.streams.put(Work(stream, engine, what, self._piece_bytes, ready_s, follows, gap_s))
                nbytes -= self._piece_bytes
        return self.streams.put(Work(stream, engine, what, nbytes, ready_s, follows, gap_s))

    def _report_after(self, work: Work[Operation | int], ready_s: float, operation: Operation) -> None:
        """Report an operation when work of the GPU has ended, and not before `ready_s`."""
        if work.ends_s < math.inf:
            self._push(max(ready_s, work.ends_s), operation)
        else:
            self._awaited[work] = ready_s, operation

    def _begin_work(self) -> None:
        """Begin the next work of the GPU. As its end is known then, operations that wait for it get their report."""
        begins_s, work = self.streams.next()
        work = known(work, "the GPU begins with nothing")
        ends_s = self._give(self._named[work.engine], work.what, work.nbytes, begins_s)
        self.streams.begin(work, ends_s)
        if work in self._awaited:
            ready_s, operation = self._awaited.pop(work)
            self._push(max(ready_s, ends_s), operation)

    def _give(self, lane: Lane, what: Operation | int, nbytes: int, may_start_s: float) -> float:
        """Put work on a lane with a constant rate, behind earlier work and not before `may_start_s`; return its end.

        Predictions spend most of their time here.
        """
        started_s = lane.free_s[0]
        if started_s < may_start_s:
            started_s = may_start_s
        duration_s = lane.latency_s + nbytes * lane.s_per_byte
        if self._slower:
            duration_s *= self._times(lane, what)
        finished_s = lane.free_s[0] = started_s + duration_s
        lane.busy_s += duration_s
        lane.nbytes += nbytes
        if self._queues_updates and lane.memory_cost and duration_s:
            demand = lane.memory_cost * nbytes / duration_s  # its mean traffic, latency included
            heappush(self._demands, (started_s, demand))
            heappush(self._demands, (finished_s, -demand))
        if self.record_timeline:
            self._started.append((lane, what, started_s, finished_s, nbytes))
        return finished_s

    def _times(self, lane: Lane, what: Operation | int) -> float:
        """Return how many times as long work takes, where its state lies, as on the fastest memory node.

        1 for work that is no update, and no copy of state to or from the GPU.
        """
        if isinstance(what, RunVisit):
            return self._slower.get((lane.name, what.visit.subgroup), 1.0)
        if isinstance(what, Transfer) and what.what == "state":
            return self._slower.get((lane.name, what.subgroup), 1.0)
        return 1.0

    def _give_shared(
        self, lane: Lane, path: SharedPath[Operation], operation: Operation, nbytes: int, may_start_s: float
    ) -> None:
        """Put a transfer on a lane whose path is shared by its transfers."""
        demand_before = path.demand
        path.give(lane.name.partition(":")[0], Flow(operation, nbytes, may_start_s), self.now_s)
        self._note_demand(path.demand - demand_before)

    def _change(self, path: SharedPath[Operation]) -> None:
        """Make a shared path's next change, which is due now, and report the transfers that end there."""
        demand_before = path.demand
        for verb, transfer in path.change():
            lane, _ = self.lane_of(transfer.what)
            lane.busy_s = path.busy_s(verb)
            lane.nbytes += transfer.nbytes
            if self.record_timeline:
                self._started.append((lane, transfer.what, transfer.started_s, self.now_s, transfer.nbytes))
            self._push(self.now_s, transfer.what)
        self._note_demand(path.demand - demand_before)

    def _note_demand(self, change: float) -> None:
        """Change the memory traffic beside updates from now on, by `change` bytes a second."""
        if self._queues_updates and change:
            heappush(self._demands, (self.now_s, change))

    def _engine_work(self, from_s: float, seconds: float) -> float:
        """Let the engine's thread work for so many seconds, after its earlier work and `from_s`; return the end."""
        engine = self._engine
        started_s = max(engine.free_s[0], from_s)
        engine.free_s[0] = started_s + seconds
        engine.busy_s += seconds
        if self.record_timeline and seconds:
            self._started.append((engine, None, started_s, engine.free_s[0], 0))
        return engine.free_s[0]

    def _count_calls(self, operation: Operation) -> int:
        """Return the number of calls of the GPU's runtime for an operation."""
        if isinstance(operation, Transfer) and operation.what == "weights":
            return PASSING_CALLS + len(self._plan.layout.subgroups[operation.subgroup].segments)
        is_update_on_gpu = isinstance(operation, RunVisit) and operation.visit.gpu
        return CALLS if isinstance(operation, Transfer) or is_update_on_gpu else 0

    def _begin(self, sweep: Sweep) -> None:
        """Begin a step: let the engine work for it, and fetch the first visits' gradients if the GPU has them."""
        self._ahead.clear()
        self._gradient_copies.clear()
        if self._has_engine_lane:
            self._engine_work(self.now_s + self._rates.reaction_s, self._rates.begin_s)
        if self._plan.fetches_gradients:
            # A gradient has its weight's dtype, and so its bytes.
            self._to_fetch = {visit.subgroup: visit.weight_bytes for visit in sweep.visits if visit.weight_bytes}
            self._fetch_ahead(self.now_s + self._rates.reaction_s)

    def _fetch_for_visit(self, subgroup: int, ready_s: float) -> float:
        """Fetch the gradients of a visit that begins, unless they were asked for, and those of later visits.

        Return the time at which the engine's thread has done that, as the other methods that fetch do.
        """
        if subgroup in self._to_fetch:
            ready_s = self._fetch_gradients(subgroup, ready_s)
        self._ahead.discard(subgroup)
        return self._fetch_ahead(ready_s)

    def _fetch_with_state(self, subgroup: int, ready_s: float) -> float:
        """Fetch the gradients of a visit whose state starts to be fetched."""
        if subgroup in self._to_fetch:
            ready_s = self._fetch_gradients(subgroup, ready_s)
            self._ahead.add(subgroup)
        return ready_s

    def _fetch_ahead(self, ready_s: float) -> float:
        """Fetch gradients until those of `FETCHED_AHEAD` coming visits have been asked for."""
        while self._to_fetch and len(self._ahead) < FETCHED_AHEAD:
            subgroup = next(iter(self._to_fetch))
            ready_s = self._fetch_gradients(subgroup, ready_s)
            self._ahead.add(subgroup)
        return ready_s

    def _fetch_gradients(self, subgroup: int, ready_s: float) -> float:
        """Enqueue the copy of a subgroup's gradients from the GPU; return when the engine's thread has done that."""
        nbytes = self._to_fetch.pop(subgroup)
        if self._has_engine_lane:
            segments = len(self._plan.layout.subgroups[subgroup].segments)
            ready_s = self._engine_work(ready_s, (PASSING_CALLS + segments) * self._call_s)
        self._gradient_copies[subgroup] = self._copy(self.gradient_stream, "d2h", subgroup, nbytes, ready_s)
        return ready_s

    def _start_update(self) -> None:
        """Make the first of the waiting updates the one under way: note its work, and when it may begin."""
        run, may_start_s = self._updates[0]
        _, nbytes = self.lane_of(run)
        self._update_left_s = nbytes * self._cpu.s_per_byte * self._times(self._cpu, run)
        self._update_from_s = max(self.now_s, may_start_s)

    def _update_starts_s(self) -> float:
        """Return when the update under way began or will begin; infinite until its gradients' copy has begun."""
        run, _ = self._updates[0]
        gradients = self._gradient_copies.get(run.visit.subgroup)
        return max(self._update_from_s, gradients.ends_s if gradients is not None else 0.0)

    def _work_until(self, until_s: float) -> float | None:
        """Let the update under way proceed from now until `until_s`.

        Its speed is what the other lanes' memory traffic leaves. So time is cut at each change of the traffic.

        Returns:
            Its end, if that is not after `until_s`: the caller then ends the update. Else None, and `_update_left_s`
            is what is left at `until_s`.
        """
        at_s = self.now_s
        starts_s = self._update_starts_s()
        while True:
            # Go on to the next change of the traffic, at most to `until_s`: the speed is constant until then.
            while self._demands and self._demands[0][0] <= at_s:
                _, change = heappop(self._demands)
                self._demand += change
            next_s = min(until_s, self._demands[0][0]) if self._demands else until_s
            from_s = max(at_s, starts_s)
            if from_s <= next_s:  # else it begins after this piece of time
                speed = self._rates.cpu_speed(self._demand)
                ends_s = from_s + self._update_left_s / speed
                if ends_s <= next_s:
                    return ends_s
                self._update_left_s -= (next_s - from_s) * speed
            if until_s <= next_s:
                return None
            at_s = next_s

    def _end_update(self, at_s: float) -> list[Event]:
        """End the CPU update under way: account for it, start the next one, and report it.

        The engine reacts to a report after `reaction_s`, so operations that it submits next begin that much later.
        """
        started_s = self._update_starts_s()
        run, _ = self._updates.popleft()
        _, nbytes = self.lane_of(run)
        self.now_s = at_s
        self._cpu.busy_s += at_s - started_s
        self._cpu.nbytes += nbytes
        if self.record_timeline:
            self._started.append((self._cpu, run, started_s, at_s, nbytes))
        if self._updates:
            self._start_update()
        self._reaction_s = self._rates.reaction_s
        return [Done(run.op)]

    def wait(self) -> list[Event]:
        """Advance the clock to the next completion and report it, with all others of the same moment.

        Raises:
            InternalError: If nothing is in flight or injected: a live engine would wait for ever.
        """
        ended_s = self._work_until_report()
        if ended_s is not None:
            return self._end_update(ended_s)
        if not self._heap:
            raise InternalError(f"the engine waits at {self.now_s} s with nothing in flight")
        until_s = self._heap[0][0]
        self.now_s = max(self.now_s, until_s)
        self._reaction_s = 0.0
        events: list[Event] = []
        while self._heap and self._heap[0][0] <= until_s:
            _, _, what, _ = heappop(self._heap)
            if not _is_enqueued(what):  # work that the engine has only enqueued wakes no thread
                self._reaction_s = self._rates.reaction_s
            if isinstance(what, Operation):
                events.append(Done(what.op))
            else:
                if isinstance(what, BeginSweep):
                    self._begin(what.sweep)
                events.append(what)
        return events

    def _work_until_report(self) -> float | None:
        """Let the GPU, shared paths and the CPU's update work until the next report in the heap is due.

        Returns:
            The end of the CPU's update under way, if that comes first; else None.
        """
        # Whichever is due first goes on: the update, a change, or the report. A change is the begin of the GPU's next
        # work, or the begin or end of a transfer on a shared path. A path's `changes_s` is when its next one is due.
        while True:
            begins_s, _ = self.streams.next()
            reported_s = self._heap[0][0] if self._heap else math.inf
            path = min(self._shared, key=lambda path: path.changes_s, default=None)
            changes_s = min(begins_s, path.changes_s) if path is not None else begins_s
            if self._updates:  # the first one is under way
                ended_s = self._work_until(min(changes_s, reported_s))
                if ended_s is not None:
                    return ended_s
            # A change comes before a report of the same time: it may add reports, and `wait` returns those of one
            # moment together.
            if changes_s > reported_s or changes_s == math.inf:
                return None
            self.now_s = max(self.now_s, changes_s)  # the clock never goes back, even if the change were overdue
            if path is None or begins_s <= path.changes_s:
                self._begin_work()
            else:
                self._change(path)


def _is_enqueued(what: Operation | Event) -> bool:
    """Return whether an operation counts as done once it is enqueued on the GPU: a copy to it, or an update there."""
    if isinstance(what, Transfer):
        return what.lane == "h2d"
    return isinstance(what, RunVisit) and what.visit.gpu
