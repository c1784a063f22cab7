"""The simulated executor: a virtual clock and a heap of completions in place of real lanes.

A lane is a serial resource: each path's reads, each path's writes (where each is slower beside the other, or serves
several transfers at once, by `SharedPath`), the CPU; with a GPU also its updates ("gpu") and its copy engines, one
each way ("h2d", "d2h"), that carry state, weights and gradients in the order in which they are given. An operation
takes the lane's latency and its bytes over the lane's rate, after what was given to the lane before it, and not
before the engine has reacted to what it follows from. Where the rates know what the engine's own thread takes for an
operation, that is a lane, too ("engine"). Where they know the host's memory bandwidth, updates on the CPU have what
the other lanes leave of it at each moment (`Rates.cpu_speed`). Two fidelities: timing only, and, given `SimData`,
with bytes. Same arguments, same run.

With even lanes and no bytes, as in predictions, the GPU is driven as the live engine drives it: a copy to it or an
update there counts as done once it is enqueued, and what follows waits for it on the GPU. Gradients that wait on the
GPU (`Budgets.gradients_on_gpu`) are fetched a few visits ahead, on a stream beside that of state, and an update on
the CPU waits for its own. Of two streams the copy engine takes what has been ready for longer.

Invariants:
  * an operation is reported once, or (stuck) never;
  * virtual time never goes back.

Non-goals: contention for memory, or of a path's transfers with each other, together with faults, disorder or bytes
(there a path always has its rates of both directions at once, and one transfer after the other); a host so much
slower than its lanes that they wait for it in turn.
"""

from __future__ import annotations

import errno
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from offload.engine.operations import (
    AwaitPush,
    Begin,
    Commit,
    CopyTile,
    Done,
    Event,
    Failed,
    Operation,
    ReadTile,
    Run,
    SaveTile,
    Stop,
    Sweep,
    Sync,
    Transfer,
    WriteTile,
)
from offload.engine.timeline import ENGINE, Interval
from offload.errors import ConfigError, CorruptRecordError, InternalError, TierError, TierFullError
from offload.plan.budget import BROUGHT_AHEAD, Plan
from offload.plan.cost import CALLS, PASSING_CALLS
from offload.plan.rates import Rates
from offload.sim.data import SimData, path_name
from offload.sim.faults import (
    CorruptPayload,
    Crash,
    FailOperation,
    Fault,
    Kind,
    MisdirectedWrite,
    PathFull,
    ShortTransfer,
    SimulatedCrash,
    SlowLane,
    StuckOperation,
)
from offload.sim.shared import Flow, SharedPath

_OperationFault = FailOperation | ShortTransfer | StuckOperation | CorruptPayload | MisdirectedWrite


@dataclass(frozen=True, slots=True)
class Disorder:
    """How far a simulated run strays from even lanes; what a real machine does by itself.

    Attributes:
        jitter: Each duration is stretched by a random part of this factor: 0.5 for up to half as long again.
        servers: Operations that each lane works on at once, every one at its share of the lane's rate; above 1
            they may finish in another order than they were given.
        lag_s: How long the engine takes to look; everything that ends meanwhile is reported together.
    """

    jitter: float = 0.0
    servers: int = 1
    lag_s: float = 0.0


COMMIT_S = 1e-3

ORDERLY = Disorder()


class _Lane:
    __slots__ = ("busy_s", "free_s", "latency_s", "memory_cost", "name", "nbytes", "s_per_byte", "shared")

    def __init__(
        self, name: str, bytes_per_s: float, latency_s: float = 0.0, memory_cost: float = 0.0, servers: int = 1
    ) -> None:
        self.name = name
        self.latency_s = latency_s
        self.memory_cost = memory_cost
        self.s_per_byte = servers / bytes_per_s
        self.free_s = [0.0] * servers
        self.busy_s = 0.0
        self.nbytes = 0
        self.shared: SharedPath[Operation] | None = None


class SimExecutor:
    """Runs operations on a virtual clock; an `offload.engine.loop.Executor`.

    Args:
        plan: What the operations belong to.
        rates: Speed of every lane; one entry for each path of the plan.
        faults: What goes wrong.
        seed: Where all randomness comes from.
        data: Bytes, or None for timing only.
        disorder: How uneven the lanes are.

    Raises:
        ConfigError: If `rates` has not one entry for each path, or a fault needs data and there is none.
    """

    gradient_stream = 1
    """The stream on which gradients leave the GPU: 0 is that of state."""

    def __init__(
        self,
        plan: Plan,
        rates: Rates,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        data: SimData | None = None,
        disorder: Disorder = ORDERLY,
    ) -> None:
        if len(rates.paths) != len(plan.budgets.paths):
            allowed = f"give one entry for each of the plan's {len(plan.budgets.paths)} paths"
            raise ConfigError("rates.paths", len(rates.paths), allowed)
        self.now_s = 0.0
        self.record_timeline = True
        """Whether operations that start are added to the timeline."""
        self.data = data
        self.events = 0
        """Events reported so far."""
        self._plan = plan
        self._sizes = [subgroup.state_bytes for subgroup in plan.layout.subgroups]
        self._disorder = disorder
        self._rng = random.Random(seed)
        servers = disorder.servers
        self._rates = rates
        self._cpu = _Lane("cpu", rates.cpu_bytes_per_s, servers=servers)
        self._reads: list[_Lane] = []
        self._writes: list[_Lane] = []
        for number, path in enumerate(rates.paths):
            even = (path.latency_s, path.memory_cost, servers)
            self._reads.append(_Lane(f"read:{number}", path.read_bytes_per_s, *even))
            self._writes.append(_Lane(f"write:{number}", path.write_bytes_per_s, *even))
        # What checkpoints need besides: a store that takes copies, as fast as the first path, and their commits.
        copies = rates.paths[0] if rates.paths else None
        self._copies = _Lane("copies", copies.write_bytes_per_s if copies else rates.cpu_bytes_per_s, servers=servers)
        self._commits = _Lane("commits", rates.cpu_bytes_per_s, COMMIT_S)
        self._pushes = _Lane("pushes", rates.cpu_bytes_per_s)  # of uneven lanes: a push ends with its copy
        self._gpu: dict[str, _Lane] = {}
        if rates.gpu is not None:
            gpu, cost = rates.gpu, rates.gpu.memory_cost
            self._gpu = {
                "gpu": _Lane("gpu", gpu.update_bytes_per_s, servers=servers),
                "h2d": _Lane("h2d", gpu.h2d_bytes_per_s, 0.0, cost, servers),
                "d2h": _Lane("d2h", gpu.d2h_bytes_per_s, 0.0, cost, servers),
            }
        elif plan.uses_gpu:
            raise ConfigError("rates.gpu", None, "is missing, and the plan uses the GPU; measure it")
        self._heap: list[tuple[float, int, Operation | Event, _OperationFault | PathFull | None]] = []
        self._pushed = 0  # breaks ties in time: first given, first reported
        self._out: dict[int, Operation] = {}
        self._started: list[tuple[_Lane, Operation | int | None, float, float, int]] = []
        self._counts: Counter[str] = Counter()
        self._planned: dict[tuple[str, int], _OperationFault] = {}
        self._full: list[PathFull] = []
        self._slow: list[SlowLane] = []
        self._crash_at: int | None = None
        for fault in faults:
            match fault:
                case PathFull():
                    self._full.append(fault)
                case SlowLane():
                    self._slow.append(fault)
                case Crash(event):
                    self._crash_at = event
                case CorruptPayload(number) | MisdirectedWrite(number):
                    if data is None:
                        raise ConfigError("faults", fault, "give data: without bytes it would have no effect")
                    self._planned["write", number] = fault
                case FailOperation(kind, number) | ShortTransfer(kind, number) | StuckOperation(kind, number):
                    self._planned[kind, number] = fault
        self._even = disorder == ORDERLY and not faults and data is None
        # Paths whose transfers share what there is: what one takes there is known when it has ended.
        self._shared: list[SharedPath[Operation]] = []
        for number, path in enumerate(rates.paths):
            if self._even and (path.is_shared or round(path.at_once) > 1):
                self._shared.append(SharedPath(path))
                self._reads[number].shared = self._writes[number].shared = self._shared[-1]
        # What the engine's thread does, one thing after the other.
        self._engine = _Lane(ENGINE, 1.0)
        self._call_s = rates.gpu.call_s if rates.gpu is not None else 0.0
        self._reaction_s = rates.reaction_s  # to what has been reported last: nothing where the engine did it itself
        self._costly = self._even and bool(rates.operation_s or rates.begin_s or self._call_s)
        # Updates that share the memory end when the others let them: they wait here, not in the heap.
        demand = sum(lane.memory_cost * servers / lane.s_per_byte for lane in self._lanes())
        demand += sum(
            path.memory_cost * (path.read.alone + path.write.alone) for path in rates.paths if path.is_shared
        )
        # So do those that wait for gradients.
        waits = rates.cpu_speed(demand) < 1 or plan.budgets.gradients_on_gpu
        self._contended = self._even and waits
        self._updates: deque[tuple[Run, float]] = deque()  # and when each may begin
        self._update_left_s = 0.0  # of the first one, at the CPU's own speed
        self._update_from_s = 0.0
        self._demand = 0.0  # of the other lanes for the memory, a second,
        self._demands: list[tuple[float, float]] = []  # and how it will change: a heap of (when, by how much)
        # What the GPU orders by itself: when the state in each of its slots is there, or updated.
        self._there_s: dict[int, float] = {}
        # Gradients: of which visits they are not asked for yet, of which ahead of the visit, and when they are there.
        self._to_bring: dict[int, int] = {}
        self._ahead: set[int] = set()
        self._brought_s: dict[int, float] = {}
        # What waits to leave the GPU: state, and weights or gradients (by subgroup), and from when on it may.
        self._leaving: tuple[deque[tuple[float, Transfer | int, int]], ...] = (deque(), deque())
        self._pushed_s: dict[int, float] = {}  # when each weight slot has been left

    @property
    def timeline(self) -> list[Interval]:
        """All operations that were started while `record_timeline` was set, in that order."""
        return [
            Interval(lane.name, _label(operation), started_s, finished_s, nbytes)
            for lane, operation, started_s, finished_s, nbytes in self._started
        ]

    @property
    def busy_s(self) -> dict[str, float]:
        """Virtual seconds that each lane has worked for, by name."""
        return {lane.name: lane.busy_s for lane in self._lanes()}

    @property
    def lane_bytes(self) -> dict[str, int]:
        """Bytes that each lane has been given, by name."""
        return {lane.name: lane.nbytes for lane in self._lanes()}

    @property
    def device_ends_s(self) -> float:
        """When the GPU has ended all updates and copies to it that it has been given."""
        return max((self._gpu[name].free_s[0] for name in ("gpu", "h2d") if self._gpu), default=0.0)

    def _lanes(self) -> list[_Lane]:
        engine = [self._engine] if self._costly else []
        return [self._cpu, *self._gpu.values(), *self._reads, *self._writes, *engine]

    def lane_of(self, operation: Operation) -> tuple[_Lane, int]:
        """Return the lane that an operation goes to and the bytes that it costs there."""
        match operation:
            case ReadTile(record=record):
                return self._reads[record.location.path], record.location.nbytes
            case WriteTile(record=record):
                return self._writes[record.location.path], record.location.nbytes
            case Run(visit=visit):
                return self._gpu["gpu"] if visit.gpu else self._cpu, self._sizes[visit.subgroup]
            case Transfer(nbytes=nbytes):
                return self._gpu[operation.lane], nbytes
            case AwaitPush():
                return self._pushes, 0
            case CopyTile(record=record):
                return self._reads[record.location.path], record.location.nbytes
            case SaveTile(record=record):
                return self._write_lane(record.location.path), record.location.nbytes
            case Sync(path=path):
                return self._write_lane(path), 0
            case Commit():
                return self._commits, 0

    def _write_lane(self, path: int) -> _Lane:
        return self._writes[path] if path < len(self._writes) else self._copies

    def inject(self, event: Event, at_s: float | None = None) -> None:
        """Have `wait` report an event that no lane makes, such as `Begin`; now or at a later virtual time."""
        self._push(self.now_s if at_s is None else at_s, event, None)

    def submit(self, operations: Sequence[Operation]) -> None:
        """Give operations to their lanes, which take them up when the engine has reacted."""
        ready_s = self.now_s + self._reaction_s
        for operation in operations:
            lane, nbytes = self.lane_of(operation)
            self._out[operation.op] = operation
            if not self._even:
                self._submit_uneven(operation, lane, nbytes)
                continue
            if self._costly:
                ready_s = self._work(ready_s, self._rates.operation_s + self._calls(operation) * self._call_s)
            if isinstance(operation, ReadTile) and operation.tile[1:] == (0, 0) and self._to_bring:
                ready_s = self._coming(operation.tile.subgroup, ready_s)
            may_start_s = ready_s
            gpu_slot = _gpu_slot(operation)
            if gpu_slot is not None:
                may_start_s = max(ready_s, self._there_s.pop(gpu_slot, 0.0))
            elif lane is self._cpu and isinstance(operation, Run):
                number = operation.visit.subgroup
                if self._to_bring or self._ahead:
                    ready_s = self._bring(number, ready_s)
                if self._contended:
                    self._updates.append((operation, ready_s))
                    if len(self._updates) == 1:
                        self._start_update()
                    continue
            if isinstance(operation, Transfer) and operation.lane == "d2h":
                stream = 0 if operation.what == "state" else self.gradient_stream
                self._leaving[stream].append((may_start_s, operation, nbytes))
                continue
            if isinstance(operation, AwaitPush):
                self._push(max(ready_s, self._pushed_s.pop(operation.weight_slot)), operation, None)
                continue
            if lane.shared is not None:
                self._give_shared(lane, lane.shared, operation, nbytes, may_start_s)
                continue
            finished_s = reported_s = self._give(lane, operation, nbytes, may_start_s)
            if _is_enqueued(operation):
                reported_s = ready_s
                if gpu_slot is not None:
                    self._there_s[gpu_slot] = finished_s
                elif isinstance(operation, Transfer):
                    self._pushed_s[operation.through] = finished_s
            self._pushed += 1
            heappush(self._heap, (reported_s, self._pushed, operation, None))

    def _give(self, lane: _Lane, what: Operation | int, nbytes: int, may_start_s: float) -> float:
        """Put work on an even lane, as `_submit_uneven` would (predictions spend their time here); return its end."""
        started_s = lane.free_s[0]
        if started_s < may_start_s:
            started_s = may_start_s
        duration_s = lane.latency_s + nbytes * lane.s_per_byte
        finished_s = lane.free_s[0] = started_s + duration_s
        lane.busy_s += duration_s
        lane.nbytes += nbytes
        if self._contended and lane.memory_cost and duration_s:
            demand = lane.memory_cost * nbytes / duration_s  # its mean traffic, latency included
            heappush(self._demands, (started_s, demand))
            heappush(self._demands, (finished_s, -demand))
        if self.record_timeline:
            self._started.append((lane, what, started_s, finished_s, nbytes))
        return finished_s

    def _give_shared(
        self, lane: _Lane, path: SharedPath[Operation], operation: Operation, nbytes: int, may_start_s: float
    ) -> None:
        """Put work on a lane whose path is shared by what is given to it."""
        before = path.demand
        path.give(lane.name.partition(":")[0], Flow(operation, nbytes, may_start_s), self.now_s)
        self._note_demand(path.demand - before)

    def _change(self, path: SharedPath[Operation]) -> None:
        """Let the next transfers of a shared path begin or end, now."""
        before = path.demand
        for verb, flow in path.change():
            lane, _ = self.lane_of(flow.what)
            lane.busy_s = path.busy_s(verb)
            lane.nbytes += flow.nbytes
            if self.record_timeline:
                self._started.append((lane, flow.what, flow.started_s, self.now_s, flow.nbytes))
            self._push(self.now_s, flow.what, None)
        self._note_demand(path.demand - before)

    def _note_demand(self, change: float) -> None:
        if self._contended and change:
            heappush(self._demands, (self.now_s, change))

    def _work(self, from_s: float, seconds: float) -> float:
        """Let the engine's thread work; return when it is through."""
        engine = self._engine
        started_s = max(engine.free_s[0], from_s)
        engine.free_s[0] = started_s + seconds
        engine.busy_s += seconds
        if self.record_timeline and seconds:
            self._started.append((engine, None, started_s, engine.free_s[0], 0))
        return engine.free_s[0]

    def _calls(self, operation: Operation) -> int:
        """Return how often the GPU's runtime is called for an operation."""
        if isinstance(operation, Transfer) and operation.what == "weights":
            return PASSING_CALLS + len(self._plan.layout.subgroups[operation.subgroup].segments)
        on_gpu = isinstance(operation, Transfer) or (isinstance(operation, Run) and operation.visit.gpu)
        return CALLS if on_gpu else 0

    def _begin(self, sweep: Sweep) -> None:
        """Have the gradients of the first visits on their way, as far as they lie on the GPU."""
        self._ahead.clear()
        self._brought_s.clear()
        if self._costly:
            self._work(self.now_s + self._rates.reaction_s, self._rates.begin_s)
        if self._even and self._plan.budgets.gradients_on_gpu:
            # A gradient has its weight's dtype.
            self._to_bring = {visit.subgroup: visit.weight_bytes for visit in sweep.visits if visit.weight_bytes}
            self._bring_ahead(self.now_s + self._rates.reaction_s)

    def _bring(self, subgroup: int, ready_s: float) -> float:
        """Fetch the gradients of a visit that begins, if they are not on their way, and of those after it."""
        if subgroup in self._to_bring:
            ready_s = self._fetch(subgroup, ready_s)
        self._ahead.discard(subgroup)
        return self._bring_ahead(ready_s)

    def _coming(self, subgroup: int, ready_s: float) -> float:
        """Fetch the gradients of a visit whose state is being fetched."""
        if subgroup in self._to_bring:
            ready_s = self._fetch(subgroup, ready_s)
            self._ahead.add(subgroup)
        return ready_s

    def _bring_ahead(self, ready_s: float) -> float:
        while self._to_bring and len(self._ahead) < BROUGHT_AHEAD:
            subgroup = next(iter(self._to_bring))
            ready_s = self._fetch(subgroup, ready_s)
            self._ahead.add(subgroup)
        return ready_s

    def _fetch(self, subgroup: int, ready_s: float) -> float:
        nbytes = self._to_bring.pop(subgroup)
        if self._costly:
            segments = len(self._plan.layout.subgroups[subgroup].segments)
            ready_s = self._work(ready_s, (PASSING_CALLS + segments) * self._call_s)
        self._brought_s[subgroup] = math.inf
        self._leaving[self.gradient_stream].append((ready_s, subgroup, nbytes))
        return ready_s

    def _leaves_s(self) -> float:
        """Return when the next copy from the GPU begins, as far as is known; infinite for none."""
        ready_s = min((stream[0][0] for stream in self._leaving if stream), default=math.inf)
        return max(ready_s, self._gpu["d2h"].free_s[0]) if self._gpu else ready_s

    def _leave(self) -> None:
        """Begin the next copy from the GPU."""
        stream = min((stream for stream in self._leaving if stream), key=lambda stream: stream[0][0])
        ready_s, what, nbytes = stream.popleft()
        finished_s = self._give(self._gpu["d2h"], what, nbytes, ready_s)
        if isinstance(what, int):
            self._brought_s[what] = finished_s
        else:
            self._push(finished_s, what, None)

    def _submit_uneven(self, operation: Operation, lane: _Lane, nbytes: int) -> None:
        server = min(range(len(lane.free_s)), key=lane.free_s.__getitem__)
        started_s = max(lane.free_s[server], self.now_s + self._rates.reaction_s)
        duration_s = lane.latency_s + nbytes * lane.s_per_byte
        if self._disorder.jitter:
            duration_s *= 1 + self._disorder.jitter * self._rng.random()
        for slow in self._slow:
            if slow.lane == lane.name and started_s >= slow.from_s:
                duration_s *= slow.factor
        finished_s = lane.free_s[server] = started_s + duration_s
        lane.busy_s += duration_s / len(lane.free_s)
        lane.nbytes += nbytes
        if self.record_timeline:
            self._started.append((lane, operation, started_s, finished_s, nbytes))
        kind = _kind(operation)
        fault: _OperationFault | PathFull | None = self._planned.get((kind, self._counts[kind]))
        self._counts[kind] += 1
        if isinstance(operation, WriteTile | SaveTile):
            path = operation.record.location.path
            full = (f for f in self._full if f.path == path and started_s >= f.from_s)
            fault = next(full, fault)
        if self.data is not None:
            match operation:
                case ReadTile() | CopyTile():
                    self.data.begin_read(operation)
                case Sync():
                    self.data.begin_sync(operation)
                case Commit():
                    self.data.begin_commit(operation)
                case WriteTile() | SaveTile() if not isinstance(fault, MisdirectedWrite | PathFull):
                    self.data.begin_write(operation)
                case Run():
                    self.data.begin_run(operation)
                case Transfer():
                    self.data.begin_copy(operation)
        if not isinstance(fault, StuckOperation):
            self._push(finished_s, operation, fault)

    def _push(self, at_s: float, what: Operation | Event, fault: _OperationFault | PathFull | None) -> None:
        self._pushed += 1
        heappush(self._heap, (at_s, self._pushed, what, fault))

    def _start_update(self) -> None:
        run, may_start_s = self._updates[0]
        self._update_left_s = self.lane_of(run)[1] * self._cpu.s_per_byte
        self._update_from_s = max(self.now_s, may_start_s)

    def _update_starts_s(self) -> float:
        """Return when the update under way began or will; infinite while its gradients have not left."""
        return max(self._update_from_s, self._brought_s.get(self._updates[0][0].visit.subgroup, 0.0))

    def _work_until(self, until_s: float) -> float | None:
        """Let the update under way proceed, beside whatever the other lanes have been given.

        Returns:
            When it is through, if that is before `until_s`; else None, with `_update_left_s` brought up to then.
        """
        at_s, starts_s = self.now_s, self._update_starts_s()
        while True:
            while self._demands and self._demands[0][0] <= at_s:
                self._demand += heappop(self._demands)[1]
            end_s = min(until_s, self._demands[0][0]) if self._demands else until_s
            from_s = max(at_s, starts_s)
            if from_s <= end_s:
                speed = self._rates.cpu_speed(self._demand)
                if from_s + self._update_left_s / speed <= end_s:
                    return from_s + self._update_left_s / speed
                self._update_left_s -= (end_s - from_s) * speed
            if until_s <= end_s:
                return None
            at_s = end_s

    def _end_update(self, at_s: float) -> list[Event]:
        started_s = self._update_starts_s()
        run, _ = self._updates.popleft()
        del self._out[run.op]
        nbytes = self.lane_of(run)[1]
        self.now_s = at_s
        self._cpu.busy_s += at_s - started_s
        self._cpu.nbytes += nbytes
        if self.record_timeline:
            self._started.append((self._cpu, run, started_s, at_s, nbytes))
        if self._updates:
            self._start_update()
        self.events += 1
        self._reaction_s = self._rates.reaction_s
        return [Done(run.op)]

    def wait(self) -> list[Event]:
        """Advance the clock to the next completion and report it, with all others of the same moment.

        With operations out and none that will ever end, reports `Stop`, as the live executor's watchdog does.

        Raises:
            InternalError: If nothing is out and nothing was injected: a live engine would wait for ever.
            SimulatedCrash: If the process dies here.
        """
        while self._updates or self._leaving[0] or self._leaving[1] or self._shared:
            leaves_s, reported_s = self._leaves_s(), self._heap[0][0] if self._heap else math.inf
            path = min(self._shared, key=lambda path: path.changes_s, default=None)
            changes_s = min(leaves_s, path.changes_s) if path is not None else leaves_s
            if self._updates:
                through_s = self._work_until(min(changes_s, reported_s))
                if through_s is not None:
                    return self._end_update(through_s)
            if changes_s > reported_s or changes_s == math.inf:
                break
            self.now_s = max(self.now_s, changes_s)
            if path is None or leaves_s <= path.changes_s:
                self._leave()
            else:
                self._change(path)
        if not self._heap:
            if not self._out:
                raise InternalError(f"the engine waits at {self.now_s} s with nothing in flight")
            operation = next(iter(self._out.values()))
            self.events += 1
            return [Stop(self._error(operation, TierError, "no answer"))]
        until_s = self._heap[0][0] + self._disorder.lag_s
        events: list[Event] = []
        self._reaction_s = 0.0
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, what, fault = heappop(self._heap)
            if self.events == self._crash_at:
                if self.data is not None:
                    self.data.crash(self._rng)
                raise SimulatedCrash(f"in place of event {self.events}, at {self.now_s} s")
            self.now_s = max(self.now_s, at_s)
            self.events += 1
            if not (self._even and _is_enqueued(what)):
                self._reaction_s = self._rates.reaction_s
            if isinstance(what, Operation):
                del self._out[what.op]
                events.append(self._end(what, fault))
            else:
                if isinstance(what, Begin):
                    self._begin(what.sweep)
                events.append(what)
        self.now_s = max(self.now_s, until_s)
        return events

    def _end(self, operation: Operation, fault: _OperationFault | PathFull | None) -> Event:
        if isinstance(fault, FailOperation) and isinstance(operation, Commit) and self.data is not None:
            self.data.undo_commit(operation)
        match fault:
            case FailOperation():
                return Failed(operation.op, self._error(operation, TierError, "injected", fault.errno))
            case ShortTransfer():
                return Failed(operation.op, self._error(operation, TierError, "injected: short transfer"))
            case PathFull():
                return Failed(operation.op, self._error(operation, TierFullError, "injected", errno.ENOSPC))
        if self.data is None:
            return Done(operation.op)
        match operation:
            case ReadTile() | CopyTile():
                try:
                    self.data.end_read(operation)
                except CorruptRecordError as error:
                    return Failed(operation.op, error)
            case Sync():
                self.data.end_sync(operation)
            case Commit():
                self.data.end_commit(operation)
            case WriteTile() | SaveTile():
                flip_bit, misdirect = isinstance(fault, CorruptPayload), isinstance(fault, MisdirectedWrite)
                checksum = self.data.end_write(operation, flip_bit=flip_bit, misdirect=misdirect)
                return Done(operation.op, checksum)
            case Run():
                self.data.end_run(operation)
            case Transfer():
                self.data.end_copy(operation)
        return Done(operation.op)

    def _error(self, operation: Operation, kind: type[TierError], detail: str, errno: int | None = None) -> TierError:
        detail = f"{_label(operation)}: {detail}"
        if isinstance(operation, Sync | Commit):
            return kind(_kind(operation), tier="simulated", path=self.lane_of(operation)[0].name, detail=detail)
        if not isinstance(operation, ReadTile | WriteTile | SaveTile | CopyTile):
            lane = self.lane_of(operation)[0].name
            verb = "update" if isinstance(operation, Run) else "copy"
            return kind(verb, tier="host" if lane == "cpu" else "gpu", path=lane, detail=detail)
        location = operation.record.location
        path = path_name(self._plan, location.path)
        verb = _kind(operation)
        return kind(verb, tier="simulated", path=path, offset=location.offset, errno=errno, detail=detail)


_KINDS: dict[type[Operation], Kind] = {
    ReadTile: "read",
    CopyTile: "read",
    WriteTile: "write",
    SaveTile: "write",
    Run: "run",
    Sync: "sync",
    Commit: "commit",
}


def _is_enqueued(what: Operation | Event) -> bool:
    """Return whether that counts as done once the GPU knows of it."""
    if isinstance(what, Transfer):
        return what.lane == "h2d"
    return isinstance(what, Run) and what.visit.gpu


def _gpu_slot(operation: Operation) -> int | None:
    """Return the GPU staging slot that an operation works on."""
    if isinstance(operation, Transfer):
        return operation.through if operation.what == "state" else None
    return operation.gpu_slot if isinstance(operation, Run) else None


def _kind(operation: Operation) -> str:
    if isinstance(operation, Transfer | AwaitPush):
        return "copy"
    return _KINDS[type(operation)]


def _label(operation: Operation | int | None) -> str:
    if operation is None:
        return ""
    if isinstance(operation, int):
        return f"gradients of subgroup {operation}"
    if isinstance(operation, Run):
        return f"subgroup {operation.visit.subgroup}"
    if isinstance(operation, Transfer | AwaitPush):
        is_state = isinstance(operation, Transfer) and operation.what == "state"
        return f"subgroup {operation.subgroup}" if is_state else f"weights of subgroup {operation.subgroup}"
    if isinstance(operation, Sync):
        return f"sync of path {operation.path}"
    if isinstance(operation, Commit):
        return f"commit of save {operation.number}"
    tile = operation.tile
    return f"subgroup {tile.subgroup} tensor {tile.tensor} tile {tile.tile}"
