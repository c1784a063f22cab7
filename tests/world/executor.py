"""The simulated executor with faults: uneven lanes, operations that fail, and, given `SimData`, bytes.

A lane may work on several operations at once, which then end in another order than they were given, and take longer
than its rate says. Every operation, one of a GPU too, is reported when its lane has done it.

Same arguments, same run.

Non-goals: contention for memory, or of a path's transfers with each other, and what the engine's own thread takes
(`TimingExecutor`): a path always has its rates of both directions at once.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop

from offload.errors import ConfigError, CorruptRecordError, InternalError, TierError, TierFullError
from offload.plan.budget import Plan
from offload.plan.rates import Rates
from offload.predict.lanes import Lane, VirtualLanes, label
from offload.protocols import SECTOR_BYTES
from offload.schedule import operations as ops
from world.data import SimData, path_name
from world.faults import (
    CorruptPayload,
    Crash,
    FailOperation,
    Fault,
    Kind,
    MisdirectedWrite,
    PathFull,
    SimulatedCrash,
    SlowLane,
    StuckOperation,
)

_OperationFault = FailOperation | StuckOperation | CorruptPayload | MisdirectedWrite


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


ORDERLY = Disorder()


class SimExecutor(VirtualLanes):
    """Runs operations on a virtual clock; an `offload.schedule.loop.Executor`.

    All randomness comes from the seed. Without data it is for timing only.

    Raises:
        ConfigError: If `rates` has not one entry for each path, or a fault needs data and there is none.
    """

    def __init__(
        self,
        plan: Plan,
        rates: Rates,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        data: SimData | None = None,
        disorder: Disorder = ORDERLY,
    ) -> None:
        super().__init__(plan, rates, disorder.servers)
        self.data = data
        self.events = 0
        """Events reported so far."""
        self._disorder = disorder
        self._rng = random.Random(seed)
        self._out: dict[int, ops.Operation] = {}
        self._counts: Counter[str] = Counter()
        self._planned: dict[tuple[str, int], _OperationFault] = {}
        self._full: list[PathFull] = []
        self.filled: set[int] = set()
        """Paths that somebody else has filled: what is there takes writes, and nothing more is to be had."""
        self.there: list[int] = [0] * len(plan.budgets.paths)
        """Bytes of each path whose room is there: they were allocated, or written to."""
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
                case FailOperation(kind, number) | StuckOperation(kind, number):
                    self._planned[kind, number] = fault

    def allocate(self, ends: Sequence[int]) -> bool:
        """Have the room of each path's first bytes be there; return whether it is."""
        for path, nbytes in enumerate(ends):
            if nbytes > self.there[path]:
                if path in self.filled:
                    return False
                self.there[path] = nbytes
        return True

    def submit(self, operations: Sequence[ops.Operation]) -> None:
        """Give operations to their lanes, which take them up when the engine has reacted."""
        for operation in operations:
            lane, nbytes = self.lane_of(operation)
            self._out[operation.op] = operation
            self._start(operation, lane, nbytes)

    def _start(self, operation: ops.Operation, lane: Lane, nbytes: int) -> None:
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
        is_write = isinstance(operation, ops.WriteTile | ops.SaveTile)
        if isinstance(operation, ops.WriteTile | ops.SaveTile):
            path = operation.record.location.path
            full = (f for f in self._full if f.path == path and started_s >= f.from_s)
            fault = next(full, fault)
            stop = operation.record.location.offset + SECTOR_BYTES + operation.record.location.nbytes
            if path < len(self.there) and stop > self.there[path]:
                if path in self.filled:
                    fault = PathFull(path)
                else:
                    self.there[path] = stop
        if self.data is not None and not (is_write and isinstance(fault, MisdirectedWrite | PathFull)):
            self.data.begin(operation)
        if not isinstance(fault, StuckOperation):
            self._push(finished_s, operation, fault)

    def wait(self) -> list[ops.Event]:
        """Advance the clock to the next completion and report it, with all others of the same moment.

        With operations out and none that will ever end, reports `Stop`, as the live executor's watchdog does.

        Raises:
            InternalError: If nothing is out and nothing was injected: a live engine would wait for ever.
            SimulatedCrash: If the process dies here.
        """
        if not self._heap:
            if not self._out:
                raise InternalError(f"the engine waits at {self.now_s} s with nothing in flight")
            operation = next(iter(self._out.values()))
            self.events += 1
            return [ops.Stop(self._error(operation, TierError, "no answer"))]
        until_s = self._heap[0][0] + self._disorder.lag_s
        events: list[ops.Event] = []
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, what, fault = heappop(self._heap)
            if self.events == self._crash_at:
                if self.data is not None:
                    self.data.crash(self._rng)
                raise SimulatedCrash(f"in place of event {self.events}, at {self.now_s} s")
            self.now_s = max(self.now_s, at_s)
            self.events += 1
            if isinstance(what, ops.Operation):
                del self._out[what.op]
                events.append(self._end(what, fault))
            else:
                events.append(what)
        self.now_s = max(self.now_s, until_s)
        return events

    def _end(self, operation: ops.Operation, fault: _OperationFault | PathFull | None) -> ops.Event:
        if isinstance(fault, FailOperation) and isinstance(operation, ops.Commit) and self.data is not None:
            self.data.undo_commit(operation)
        match fault:
            case FailOperation():
                return ops.Failed(operation.op, self._error(operation, TierError, "injected", fault.errno))
            case PathFull():
                return ops.Failed(operation.op, self._error(operation, TierFullError, "injected", errno.ENOSPC))
        if self.data is None:
            return ops.Done(operation.op)
        flip_bit, misdirect = isinstance(fault, CorruptPayload), isinstance(fault, MisdirectedWrite)
        try:
            return ops.Done(operation.op, self.data.end(operation, flip_bit=flip_bit, misdirect=misdirect))
        except CorruptRecordError as error:
            return ops.Failed(operation.op, error)

    def _error(
        self, operation: ops.Operation, kind: type[TierError], detail: str, errno: int | None = None
    ) -> TierError:
        lane = self.lane_of(operation)[0].name
        verb: str = _kind(operation)
        detail = f"{label(operation)}: {detail}"
        match operation:
            case ops.ReadTile() | ops.WriteTile() | ops.SaveTile() | ops.CopyTile():
                where, path = operation.record.location, path_name(self._plan, operation.record.location.path)
                return kind(verb, tier="simulated", path=path, offset=where.offset, errno=errno, detail=detail)
            case ops.Sync() | ops.Commit():
                return kind(verb, tier="simulated", path=lane, detail=detail)
        verb = "update" if verb == "run" else verb
        return kind(verb, tier="host" if lane == "cpu" else "gpu", path=lane, detail=detail)


def _kind(operation: ops.Operation) -> Kind:
    match operation:
        case ops.ReadTile() | ops.CopyTile():
            return "read"
        case ops.WriteTile() | ops.SaveTile():
            return "write"
        case ops.RunVisit():
            return "run"
        case ops.Sync():
            return "sync"
        case ops.Commit():
            return "commit"
    return "copy"
