"""Two published systems' schedules, run by our machine over simulated lanes that slow each other down.

Deep Optimizer States (Middleware '24, arXiv 2410.21316) updates every k-th subgroup on the GPU; MLP-Offload (SC '25,
arXiv 2509.02480) streams state over two storage paths. Both are configurations of `offload.schedule.machine` here: a
plan says what lives and is updated where, and `SharedExecutor` says what an operation costs, what may not start yet,
and how lanes that work at the same time share what they work on. Ranks of a node do the same at the same time, so one
is simulated, with its part of what they share.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.dtypes import DtypeCode
from offload.errors import InternalError, invariant
from offload.layout import SECTOR_NUMEL, Layout, Parameter, build_layout
from offload.plan import Budgets, GpuRates, Home, PathBudget, PathRates, Placement, Plan, Rates
from offload.predict.lanes import VirtualLanes
from offload.schedule.index import TileIndex
from offload.schedule.loop import pump
from offload.schedule.machine import Machine
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
    Visit,
    WriteTile,
)
from offload.schedule.runs import update_visits
from offload.schedule.staging import Phase

STATE_BYTES = 12
"""Of a parameter: fp32 master and two moments."""

UPDATE_TRAFFIC_BYTES = 28
"""Memory traffic of these systems' CPU update of a parameter: state read and written, and an fp32 gradient read."""

CONVERT_TRAFFIC_BYTES = 8
"""Of turning a parameter's new fp32 weight into 16 bits and sending it: 4 read, 2 written, 2 read by the copy."""

BLOCKING_TRAFFIC_BYTES = 16
"""The same by blocking calls: a fresh buffer (2 cleared, 2 fetched before written) and a bounce buffer (2, 2) too."""

_ANY = Rates(1.0, (PathRates(1.0, 1.0),), GpuRates(1.0, 1.0, 1.0))


@functools.lru_cache(maxsize=256)
def exact_layout(numels: tuple[int, ...]) -> Layout:
    """Return a layout with subgroups of these sizes (whole sectors), every tensor one tile."""
    parameters = [Parameter(f"p{n}", numel, DtypeCode.BFLOAT16, n) for n, numel in enumerate(numels)]
    largest = -(-max(numels) // SECTOR_NUMEL) * SECTOR_NUMEL
    return build_layout(parameters, largest, max_tile_bytes=4 * largest)


@dataclass(slots=True)
class _Work:
    """An operation on a lane: stages of (what is used, amount), one after the other."""

    operation: Operation
    stages: deque[tuple[str, float]]
    amount: float


class SharedExecutor(VirtualLanes):
    """Simulated lanes whose speeds follow from what else runs at each moment.

    Subclasses say what an operation costs (`stages_of`), whether it may start (`may_start`), and at which speeds
    stages proceed that run at the same time (`speeds`).
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, dataclasses.replace(_ANY, paths=_ANY.paths * len(plan.budgets.paths)))
        self._waiting: dict[str, deque[_Work]] = {}
        self._working: dict[str, _Work] = {}

    def stages_of(self, operation: Operation) -> tuple[str, list[tuple[str, float]]]:
        """Return the lane that an operation goes to and its stages there."""
        raise NotImplementedError

    def may_start(self, operation: Operation) -> bool:
        """Return whether an operation whose lane is free may start now."""
        return True

    def speeds(self, active: Mapping[str, tuple[str, float]]) -> dict[str, float]:
        """Return how fast each lane proceeds, given for each the stage that it is at and that stage's amount."""
        raise NotImplementedError

    def started(self, operation: Operation) -> None:
        """Take in that an operation starts now."""

    def ended(self, operation: Operation) -> None:
        """Take in that an operation has ended now."""

    def submit(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            lane, stages = self.stages_of(operation)
            found = deque((use, amount) for use, amount in stages if amount > 0)
            found = found or deque([stages[0]])
            self._waiting.setdefault(lane, deque()).append(_Work(operation, found, found[0][1]))

    def _start(self) -> None:
        for lane, waiting in self._waiting.items():
            if lane not in self._working:
                for position, work in enumerate(waiting):
                    if self.may_start(work.operation):
                        del waiting[position]
                        self._working[lane] = work
                        self.started(work.operation)
                        break
                    if lane != "cpu":  # which takes what it gets from several machines in the order of the sweep
                        break

    def wait(self) -> list[Event]:
        while True:
            self._start()
            if not self._working:
                raise InternalError(f"at {self.now_s} s nothing may start")
            active = {lane: (work.stages[0][0], work.amount) for lane, work in self._working.items()}
            speeds = self.speeds(active)
            left_s = {lane: work.stages[0][1] / speeds[lane] for lane, work in self._working.items()}
            step_s = min(left_s.values())
            self.now_s += step_s
            done: list[Event] = []
            for lane, work in list(self._working.items()):
                use, amount = work.stages[0]
                if left_s[lane] > step_s * (1 + 1e-12):
                    work.stages[0] = (use, amount - step_s * speeds[lane])
                    continue
                work.stages.popleft()
                if work.stages:
                    work.amount = work.stages[0][1]
                    continue
                del self._working[lane]
                self.ended(work.operation)
                done.append(Done(work.operation.op))
            if done:
                return done


class Forgetting(Machine):
    """Our machine without reuse of staging memory: all of it is flushed, and fetched again by the next sweep.

    Subgroups whose flushes have not ended when a sweep begins are visited where they are.
    """

    def handle(self, event: Event) -> None:
        if isinstance(event, BeginSweep):
            for number in self.staging.slots.owners:
                if number is not None and self._subgroups[number].phase is Phase.READY:
                    self.staging.vacate(number)
        super().handle(event)

    def _assign_slots(self) -> None:
        super()._assign_slots()
        if self.staging.line or self.is_open or self.broken is not None:
            return
        for number in list(self.staging.dirty):
            if self._subgroups[number].phase is Phase.DIRTY and self._subgroups[number].visit is None:
                self._begin_flush(number)


# Interleaved updates ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """What interleaved updates run on; rates of one rank alone, but for the memory.

    Attributes:
        update_params_per_s: CPU update of one rank while nothing hinders it.
        blocking_params_per_s: New weights turned into 16 bits and sent by blocking calls of the updating thread. (The
            helper thread does that as fast as memory allows.)
        memory_bytes_per_s: Memory bandwidth of the node, shared by its ranks.
        link_bytes_per_s: One way of a GPU's link.
        gpu_params_per_s: GPU update.
        gpu_subgroup_s: Fixed cost of a subgroup's turn on the GPU: launches and waits between copies and update.
    """

    update_params_per_s: float
    blocking_params_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    gpu_params_per_s: float
    gpu_subgroup_s: float = 0.0


class _Interleaved(SharedExecutor):
    """One set of buffers, one transfer at a time on the link; conversions as the stride says.

    One thread goes through the subgroups in order: those behind a GPU subgroup wait until that one has been copied
    in. The first GPU subgroup has been by then: it is fetched behind the backward pass.
    """

    def __init__(self, plan: Plan, node: Node, ranks: int, stride: int) -> None:
        super().__init__(plan)
        self._node, self._stride = node, stride
        self._memory_bytes_per_s = node.memory_bytes_per_s / ranks
        self._numels = [subgroup.numel for subgroup in plan.layout.subgroups]
        self._cpu_count = sum(not plan.updates_on_gpu(n) for n in range(len(self._numels)))
        self._copied = [n for n in range(len(self._numels)) if plan.updates_on_gpu(n) and not plan.at_home_on_gpu(n)]
        self.begin()
        # For each use: parameters a second alone, and bytes of memory traffic for each.
        self._uses = {
            "update": (node.update_params_per_s, UPDATE_TRAFFIC_BYTES),
            "blocking": (node.blocking_params_per_s, BLOCKING_TRAFFIC_BYTES),
            "convert": (self._memory_bytes_per_s / CONVERT_TRAFFIC_BYTES, CONVERT_TRAFFIC_BYTES),
            "link": (node.link_bytes_per_s / STATE_BYTES, STATE_BYTES),
            "gpu": (node.gpu_params_per_s, 0),
            "fixed": (1.0, 0),
        }

    def begin(self) -> None:
        """Take up an update."""
        self._came: set[int] = set()
        self._order: dict[int, int] = {}  # of the weights that wait for the helper, by operation

    def stages_of(self, operation: Operation) -> tuple[str, list[tuple[str, float]]]:
        match operation:
            case RunVisit(visit=visit):
                numel = self._numels[visit.subgroup]
                if visit.gpu:
                    copied = visit.subgroup in self._copied
                    return "gpu", [("gpu", numel), ("fixed", self._node.gpu_subgroup_s * copied)]
                return "cpu", [("update", numel), ("blocking", numel if self._stride == 0 else 0)]
            case Transfer(subgroup=subgroup, what="weights"):
                self._order[operation.op] = len(self._order)
                return "helper", [("convert", self._numels[subgroup])]
            case AwaitPush():
                return "done", [("fixed", 0)]
            case Transfer(subgroup=subgroup):
                there = operation.way == "fetch" and subgroup == self._copied[0]
                return "link", [("link", 0 if there else self._numels[subgroup])]
        raise InternalError(f"{operation} in a plan without storage")

    def may_start(self, operation: Operation) -> bool:
        match operation:
            case RunVisit(visit=visit) if not visit.gpu:
                return all(number in self._came for number in self._copied if number < visit.subgroup)
            case Transfer(
                what="weights"
            ):  # the helper is given batches of k-1 subgroups, and at the end what is left
                batch = self._order[operation.op] // (self._stride - 1)
                return len(self._order) >= min((batch + 1) * (self._stride - 1), self._cpu_count)
        return True

    def started(self, operation: Operation) -> None:
        if isinstance(operation, RunVisit) and operation.visit.gpu:
            self._came.add(operation.visit.subgroup)

    def speeds(self, active: Mapping[str, tuple[str, float]]) -> dict[str, float]:
        demand = sum(self._uses[use][0] * self._uses[use][1] for use, _ in active.values())
        slowed = min(1.0, self._memory_bytes_per_s / demand) if demand else 1.0
        return {
            lane: self._uses[use][0] * (slowed if self._uses[use][1] else 1.0) for lane, (use, _) in active.items()
        }


class _Unlimited(Plan):
    """A plan with a place for the new weights of every subgroup, as that system has: no update waits for one."""

    @property
    def weight_slots(self) -> int:  # type: ignore[override]
        return len(self.homes)


def interleaved_update_s(node: Node, numels: Sequence[int], stride: int, ranks: int, cpu_ratio: float = 1.0) -> float:
    """Return the seconds of one update; the last copy out of the GPU goes on behind it.

    Args:
        node: Where.
        numels: Subgroup sizes of a rank, in order.
        stride: Every so many-th subgroup is updated on the GPU; 0 for none.
        ranks: Ranks of the node.
        cpu_ratio: Part of the subgroups at home on the CPU, the first ones; the others are at home on the GPU.
    """
    count = len(numels)
    on_cpu = int(cpu_ratio * count + 1e-9)
    homes = (Home.HOST,) * on_cpu + (Home.GPU,) * (count - on_cpu)
    taken = [n >= on_cpu or (stride > 1 and (n + 1) % stride == 0) for n in range(count)]
    placements = tuple(Placement.GPU if gpu else Placement.CPU for gpu in taken)
    budgets = Budgets(0, weights_on_gpu=stride > 1)
    plan = _Unlimited(exact_layout(tuple(numels)), homes, placements, 0, 0, budgets, gpu_slots=1)
    machine, executor = Machine(plan, TileIndex([], {})), _Interleaved(plan, node, ranks, stride)
    for step in (1, 2):  # the first finds fresh state and copies nothing in
        begun_s = executor.now_s
        executor.begin()
        machine.handle(BeginSweep(Sweep(step, step, update_visits(plan, range(count)))))
        pump(machine, executor, lambda machine: machine.finished_sweep is not None)
        update_s = executor.now_s - begun_s
        pump(machine, executor, lambda machine: machine.in_flight == 0)
        machine.take_finished_sweep()
    return update_s


# Several storage paths ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drive:
    """A path as the ranks of a node share it; each rate with nothing else running there, but for `mixed`.

    Attributes:
        read_bytes_per_s: Reading only.
        write_bytes_per_s: Writing only.
        mixed_bytes_per_s: Reads and writes together while both are under way; each gets in proportion to the bytes
            that were asked for.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float


class _OneAhead(SharedExecutor):
    """Subgroups in order; on each path one fetch ahead and one flush behind.

    There is a machine for each path, and one thread updates for all; operation `n` is machine `n % count`'s.
    """

    def __init__(
        self,
        plan: Plan,
        members: Sequence[Sequence[int]],
        drives: Sequence[Drive],
        params_per_s: float,
        read_scale: float,
    ) -> None:
        super().__init__(plan)
        self._members, self._drives = members, drives
        self._params_per_s, self._read_scale = params_per_s, read_scale
        self._turn: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._flushing: list[Counter[int]] = [Counter() for _ in drives]
        self._begun_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = {}

    def begin(self, order: Sequence[int]) -> None:
        """Take up a sweep over these subgroups, as numbered over all paths."""
        self._turn = {number: turn for turn, number in enumerate(order)}
        self._before = {}
        for members in self._members:
            mine = sorted(members, key=self._turn.__getitem__)
            self._before |= dict(zip(mine[1:], mine[:-1], strict=True))
        self._begun_s, self._ended_s = {}, {}

    def waits(self) -> dict[int, float]:
        """Return the seconds that the updating thread waited before each subgroup of the last sweep."""
        ends = [min(self._begun_s.values()), *self._ended_s.values()]
        return {
            number: begun_s - end_s for (number, begun_s), end_s in zip(self._begun_s.items(), ends, strict=False)
        }

    def _whose(self, operation: Operation) -> tuple[int, int]:
        which = operation.op % len(self._members)
        match operation:
            case RunVisit(visit=visit):
                return which, self._members[which][visit.subgroup]
            case ReadTile(tile=tile) | WriteTile(tile=tile):
                return which, self._members[which][tile.subgroup]
        raise InternalError(f"{operation} in a plan without a GPU")

    def stages_of(self, operation: Operation) -> tuple[str, list[tuple[str, float]]]:
        which, number = self._whose(operation)
        match operation:
            case ReadTile(record=record):
                return f"read:{which}", [("read", record.location.nbytes * self._read_scale)]
            case WriteTile(record=record):
                self._flushing[which][number] += 1
                return f"write:{which}", [("write", record.location.nbytes)]
            case RunVisit():
                return "cpu", [("cpu", self._sizes[number] / STATE_BYTES)]
        raise InternalError(f"{operation} in a plan without a GPU")

    def may_start(self, operation: Operation) -> bool:
        _, number = self._whose(operation)
        match operation:
            case RunVisit():
                blocked = any(len(flushing) > 1 for flushing in self._flushing)
                return self._turn[number] == len(self._begun_s) and not blocked
            case ReadTile():
                return number not in self._before or self._before[number] in self._begun_s
        return True

    def started(self, operation: Operation) -> None:
        if isinstance(operation, RunVisit):
            self._begun_s[self._whose(operation)[1]] = self.now_s

    def ended(self, operation: Operation) -> None:
        which, number = self._whose(operation)
        if isinstance(operation, RunVisit):
            self._ended_s[number] = self.now_s
        elif isinstance(operation, WriteTile):
            self._flushing[which][number] -= 1
            self._flushing[which] += Counter()  # without those at 0

    def speeds(self, active: Mapping[str, tuple[str, float]]) -> dict[str, float]:
        found = dict.fromkeys(active, self._params_per_s)
        for which, drive in enumerate(self._drives):
            read, write = active.get(f"read:{which}"), active.get(f"write:{which}")
            both = (read[1] if read else 0.0) + (write[1] if write else 0.0)
            for name, here, alone in (
                (f"read:{which}", read, drive.read_bytes_per_s),
                (f"write:{which}", write, drive.write_bytes_per_s),
            ):
                if here:
                    found[name] = drive.mixed_bytes_per_s * here[1] / both if read and write else alone
        return found


class _Together:
    """Machines that share an executor: each operation says by its number whose it is."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = machines

    def handle(self, event: Event) -> None:
        invariant(isinstance(event, Done), f"{event} in a run without faults")
        which = event.op % len(self.machines)
        self.machines[which].handle(dataclasses.replace(event, op=event.op // len(self.machines)))

    def take_operations(self) -> list[Operation]:
        count = len(self.machines)
        return [
            dataclasses.replace(operation, op=operation.op * count + which)
            for which, machine in enumerate(self.machines)
            for operation in machine.take_operations()
        ]


@dataclass(frozen=True)
class Streamed:
    """One update of streamed state.

    Attributes:
        update_s: Its seconds.
        waits_s: In the order of processing, the seconds waited before each subgroup.
    """

    update_s: float
    waits_s: tuple[float, ...]


def streamed_update(
    numels: Sequence[int],
    members: Sequence[Sequence[int]],
    drives: Sequence[Drive],
    params_per_s: float,
    cached: int,
    read_scale: float = 1.0,
) -> Streamed:
    """Return an update over one or several storage paths, as one rank sees it.

    Args:
        numels: Subgroup sizes of a rank.
        members: For each path, the subgroups that lie there.
        drives: What each path has for this rank.
        params_per_s: CPU update of one rank.
        cached: Subgroups of each path that stay in memory, the direction of the sweep alternating; 0 for none.
        read_scale: Bytes read for each byte of state.
    """
    # Where nothing is cached, three subgroups are in memory at once. Three of one sector at the end of each sweep
    # push the last ones out, and the next sweep begins with these three and ends with three others.
    numels, members = list(numels), [list(numbers) for numbers in members]
    order, first, last = list(range(len(numels))), [], []
    if not cached:
        for numbers in members:
            start = len(numels)
            first += range(start, start + 3)
            last += range(start + 3, start + 6)
            numbers += range(start, start + 6)
            numels += [SECTOR_NUMEL] * 6
    everything = exact_layout(tuple(numels))
    budgets = Budgets(0, paths=(PathBudget("path", 1 << 60),))
    machines = []
    for numbers in members:
        layout = exact_layout(tuple(numels[number] for number in numbers))
        slots = min(cached or 3, len(numbers))
        places = (Home.STREAMED,) * len(numbers), (Placement.CPU,) * len(numbers)
        plan = Plan(layout, *places, slots, layout.max_subgroup_bytes, budgets)
        machines.append(Machine(plan, TileIndex([(1 << 60, 1.0)], plan.slot_counts)))
    several = dataclasses.replace(machines[0].plan, layout=everything)
    executor, together = _OneAhead(several, members, drives, params_per_s, read_scale), _Together(machines)
    found = []
    for step in (1, 2, 3):  # the first finds fresh state; then once each way
        begun_s = executor.now_s
        turns = [*first, *order, *last]
        executor.begin(turns)
        for machine, numbers in zip(machines, members, strict=True):
            mine = sorted(range(len(numbers)), key=lambda local, n=numbers: turns.index(n[local]))
            machine.handle(BeginSweep(Sweep(step, step, tuple(Visit(local) for local in mine))))
        pump(together, executor, lambda _: all(machine.finished_sweep for machine in machines))  # type: ignore[arg-type]
        update_s, waits = executor.now_s - begun_s, executor.waits()
        pump(together, executor, lambda _: not any(machine.in_flight for machine in machines))  # type: ignore[arg-type]
        for machine in machines:
            machine.take_finished_sweep()
        found.append(Streamed(update_s, tuple(waits[number] for number in order)))
        order, first, last = order[::-1] if cached else order, last, first
    each_way = found[1:]
    waits_s = tuple(sum(pair) / 2 for pair in zip(*(one.waits_s for one in each_way), strict=True))
    return Streamed(sum(one.update_s for one in each_way) / 2, waits_s)
