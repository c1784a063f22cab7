"""Lanes on a virtual clock: the base class of both simulated executors (of predictions, and of tests).

A lane is a serial resource: each path's reads, each path's writes, the CPU; with a GPU also its updates ("gpu") and
its copy engines, one for each direction ("h2d", "d2h"), for state, weights and gradients in the order in which they
are given. An operation takes the lane's latency plus its bytes over the lane's rate. It begins after the lane's
earlier operations, and not before the engine has reacted to the event that made it possible. Completions wait in a
heap.

Invariants:
  * an operation is reported once; or never, if a test's fault makes it stuck;
  * virtual time never goes back.
"""

from __future__ import annotations

from functools import partial
from heapq import heappush
from typing import Any

from offload.plan.budget import Plan
from offload.plan.rates import Rates
from offload.predict.shared import SharedPath
from offload.schedule.operations import (
    AwaitPush,
    Commit,
    CopyTile,
    Event,
    FreeHome,
    Operation,
    ReadTile,
    RunVisit,
    SaveTile,
    Sync,
    Transfer,
    WriteTile,
    tile_label,
)
from offload.schedule.timeline import Interval

COMMIT_S = 1e-3
"""Virtual seconds of a checkpoint's commit."""


class Lane:
    """A serial resource, or a few (`servers`) that share its rate equally; each works on one operation at a time."""

    __slots__ = ("busy_s", "free_s", "latency_s", "memory_cost", "name", "nbytes", "s_per_byte", "shared")

    def __init__(
        self, name: str, bytes_per_s: float, latency_s: float = 0.0, memory_cost: float = 0.0, servers: int = 1
    ) -> None:
        self.name = name
        self.latency_s = latency_s
        self.memory_cost = memory_cost  # bytes of the host's memory traffic for each byte
        self.s_per_byte = servers / bytes_per_s  # of one server
        self.free_s = [0.0] * servers  # when each server has done what it was given
        self.busy_s = 0.0  # seconds of work so far
        self.nbytes = 0  # bytes given so far
        self.shared: SharedPath[Operation] | None = None  # serves the lane if its transfers share the bandwidth


class VirtualLanes:
    """Lanes, a clock and a heap of completions.

    Args:
        plan: What lives where.
        rates: Speed of every lane.
        servers: Operations that each lane works on at once, every one at its share of the lane's rate.
    """

    def __init__(self, plan: Plan, rates: Rates, servers: int = 1) -> None:
        plan.check_rates(rates)
        self.now_s = 0.0
        self.record_timeline = True
        """Whether operations that start are added to the timeline."""
        self._plan = plan
        self._rates = rates
        self._sizes = [subgroup.state_bytes for subgroup in plan.layout.subgroups]
        self._cpu = Lane("cpu", rates.cpu_bytes_per_s, servers=servers)
        # By their names: the CPU, and what the rates know of a GPU.
        self._named = {"cpu": self._cpu}
        for lane, (rate, cost) in rates.gpu.lanes.items():
            self._named[lane] = Lane(lane, rate, memory_cost=cost, servers=servers)
        self._reads: list[Lane] = []
        self._writes: list[Lane] = []
        for number, path in enumerate(rates.paths):
            of_path = partial(Lane, latency_s=path.latency_s, memory_cost=path.memory_cost, servers=servers)
            self._reads.append(of_path(f"read:{number}", path.read_bytes_per_s))
            self._writes.append(of_path(f"write:{number}", path.write_bytes_per_s))
        # For checkpoints: a sink that is as fast as the first path.
        copies_bytes_per_s = rates.paths[0].write_bytes_per_s if rates.paths else rates.cpu_bytes_per_s
        self._copies = Lane("copies", copies_bytes_per_s, servers=servers)
        self._commits = Lane("commits", rates.cpu_bytes_per_s, COMMIT_S)  # without bytes: any rate will do
        # For waits that move nothing: until new weights are copied out of their slot, until a home is free.
        self._waits = Lane("waits", rates.cpu_bytes_per_s)
        # What `wait` reports. Entries: the time, a number that breaks ties, the operation or event, a test's fault.
        self._heap: list[tuple[float, int, Operation | Event, Any]] = []
        self._pushed = 0  # such numbers so far
        # For the timeline: lane, work (as `label` takes it), begin and end in seconds, and bytes.
        self._started: list[tuple[Lane, Operation | int | None, float, float, int]] = []

    @property
    def timeline(self) -> list[Interval]:
        """All operations that were started while `record_timeline` was set, in that order."""
        return [
            Interval(lane.name, label(operation), started_s, finished_s, nbytes)
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

    def _lanes(self) -> list[Lane]:
        """Return the lanes that figures are about: no copies to checkpoints, commits or waits."""
        return [*self._named.values(), *self._reads, *self._writes]

    def lane_of(self, operation: Operation) -> tuple[Lane, int]:
        """Return the lane that an operation goes to and the bytes that it costs there."""
        match operation:
            case ReadTile(record=record):
                return self._reads[record.location.path], record.location.nbytes
            case WriteTile(record=record):
                return self._writes[record.location.path], record.location.nbytes
            case RunVisit(visit=visit):
                return self._named["gpu"] if visit.gpu else self._cpu, self._sizes[visit.subgroup]
            case Transfer(nbytes=nbytes):
                return self._named[operation.lane], nbytes
            case AwaitPush() | FreeHome():
                return self._waits, 0
            case CopyTile(record=record):
                return self._reads[record.location.path], record.location.nbytes
            case SaveTile(record=record):
                return self._write_lane(record.location.path), record.location.nbytes
            case Sync(path=path):
                return self._write_lane(path), 0
            case Commit():
                return self._commits, 0

    def _write_lane(self, path: int) -> Lane:
        """Return the lane of a path's writes; a number beyond the paths is that of a checkpoint's sink."""
        return self._writes[path] if path < len(self._writes) else self._copies

    def inject(self, event: Event, at_s: float | None = None) -> None:
        """Let `wait` return an event that no lane causes, such as `BeginSweep`: at `at_s`, or now if that is None."""
        self._push(self.now_s if at_s is None else at_s, event)

    def _push(self, at_s: float, what: Operation | Event, fault: Any = None) -> None:
        """Let `wait` report an operation or event at a time; tests' executors give a fault with it."""
        self._pushed += 1  # of entries with equal times, the first given is reported first
        heappush(self._heap, (at_s, self._pushed, what, fault))


def label(operation: Operation | int | None) -> str:
    """Return what a timeline calls a piece of work.

    Usually that is an operation. A number stands for the copy of that subgroup's gradients, None for work of the
    engine's thread, which is called "".
    """
    if operation is None:
        return ""
    if isinstance(operation, int):
        return f"gradients of subgroup {operation}"
    if isinstance(operation, RunVisit):
        return f"subgroup {operation.visit.subgroup}"
    if isinstance(operation, FreeHome):
        return f"subgroup {operation.subgroup}"
    if isinstance(operation, Transfer | AwaitPush):
        is_state = isinstance(operation, Transfer) and operation.what == "state"
        return f"subgroup {operation.subgroup}" if is_state else f"weights of subgroup {operation.subgroup}"
    if isinstance(operation, Sync):
        return f"sync of path {operation.path}"
    if isinstance(operation, Commit):
        return f"commit of save {operation.number}"
    return tile_label(operation)
