"""Actors that ask the session's own thread: callers that go on while a step does, and whose backward passes update.

`EngineThread`, `PendingStep` and `Speculation` run here, without a thread: whoever waits drives the engine, event by
event; tables, gradients and fingerprints are stood in for. Gradients depend on the weights that a forward pass has
read, and state on gradients, weights that are masters, hyperparameters, and which parameters are active: what is read
or written too early shows in all bits that follow.

Non-goals: what only real threads can do to each other, modules of torch, the real tables and fingerprints
(tests/e2e/test_overlap_*.py); the order of streams on a GPU (tests/kernels/test_gpu.py).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from world.actors import Changing, Fills, Packs, Parks, Saves, Sweeps
from world.checker import CheckedExecutor
from world.data import SimData, mix
from world.driver import (
    MAX_EVENTS,
    Action,
    Driver,
    Scenario,
    Twin,
    everything,
    random_faults,
    random_plan,
    with_room,
)
from world.executor import SimExecutor
from world.faults import CorruptPayload, FailOperation, Fault, MisdirectedWrite, PathFull
from world.faults import random_faults as any_faults

from offload import waits
from offload.device.none import NO_LANES
from offload.engine.executor import no_visit
from offload.errors import (
    CheckpointError,
    InternalError,
    OffloadError,
    SessionBrokenError,
    StepAbortedError,
    TierError,
)
from offload.plan import Plan, visit_order
from offload.protocols import SECTOR_BYTES, SegmentFlag
from offload.schedule import operations as ops
from offload.schedule.loop import pump
from offload.schedule.runs import update_visits
from offload.schedule.staging import Phase
from offload.session.speculation import Speculation
from offload.session.step import PendingStep
from offload.session.thread import EngineThread


class AskedLanes(CheckedExecutor):
    """The checked executor, with what the engine thread wants of it besides."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests = 0
        self.visitor: Any = no_visit

    def set_visitor(self, visitor: Any) -> None:
        self.visitor = visitor

    def end_engine_interval(self) -> float:
        """Nobody asks how long the engine's thread works."""
        return 0.0


class Latch(waits.Latch):
    """A latch whose wait drives the engine."""

    def __init__(self, caller: Calls) -> None:
        super().__init__()
        self._caller = caller

    def wait(self, pause_s: float | None = None) -> bool:
        self._caller.go_on_until(self.is_set)
        return True


def random_modules(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Return the parameters of each module; every parameter has one that owns it, and perhaps others."""
    owners = [rng.randrange(count) for _ in range(count)]
    modules = [[n for n in range(count) if owners[n] == module] for module in range(count)]
    for module in modules:
        if rng.random() < 0.2:
            module.append(rng.randrange(count))
    return [tuple(dict.fromkeys(module)) for module in modules if module]


ROW = np.dtype([("parameter", np.uint64), ("told", np.uint64), ("flags", np.uint32), ("numel", np.uint32)])
"""What the update of a segment is told."""


class Told(NamedTuple):
    """What a step tells; it knows of no addresses of weights."""

    groups: tuple[float, ...]
    scale: float
    clip: float
    active: frozenset[int]
    weights: None = None


def table_of(plan: Plan, subgroup: int, told: Told) -> npt.NDArray[Any]:
    """Return what the update of a subgroup is told."""
    segments = plan.layout.subgroups[subgroup].segments
    rows = [(s.parameter, zlib.crc32(repr(told[:3]).encode()), s.parameter in told[3], s.numel) for s in segments]
    table = np.zeros(len(segments), ROW)
    for row, (parameter, number, active, numel) in zip(table, rows, strict=True):
        row["parameter"], row["numel"] = parameter, numel
        if active:
            row["told"], row["flags"] = number, SegmentFlag.ACTIVE
    return table


class Memory:
    """Gradients and weights that are masters, as an update reads them."""

    def __init__(self, gradients: dict[int, int], weights: dict[int, np.ndarray]) -> None:
        self.gradients = gradients
        self.weights = weights

    def fingerprint(self, kind: int, place: int, size: int) -> int:
        """Return that of a gradient (kind 0) or of a subgroup's masters; 0 for what is not read."""
        if not size:
            return 0
        found = repr(self.gradients[place]).encode() if kind == 0 else self.weights[place].tobytes()
        return zlib.crc32(found)

    def read(self, subgroup: int, table: npt.NDArray[Any]) -> list[tuple[int, int]]:
        """Return the fingerprints of what the update of each segment reads."""
        found = []
        for row in table:
            size = int(row["numel"]) if row["flags"] else 0
            masters = size if subgroup in self.weights else 0
            found.append((self.fingerprint(0, int(row["parameter"]), size), self.fingerprint(1, subgroup, masters)))
        return found


def update(run: ops.RunVisit, state: np.ndarray, table: npt.NDArray[Any], read: Sequence[tuple[int, int]]) -> int:
    """Change state; return the weights that it has then."""
    mix(run, state)
    state += np.uint32(zlib.crc32(repr((table.tolist(), read)).encode()))
    return zlib.crc32(state)


class CallsTwin(Twin):
    """State and weights of a session that does one thing after the other, and makes nothing ahead."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.made: dict[int, int] = {}
        """Weights of each subgroup."""

    def sweep(self, number: int, visits: tuple[ops.Visit, ...]) -> None:
        super().sweep(number, visits)
        self.made |= {visit.subgroup: zlib.crc32(self.states[visit.subgroup]) for visit in visits if visit.changes}

    def step(self, number: int, subgroups: Iterable[int], told: Told, gradients: dict[int, int]) -> None:
        memory = Memory(gradients, self.weights)
        tables = {subgroup: table_of(self.plan, subgroup, told) for subgroup in subgroups}
        read = {subgroup: memory.read(subgroup, table) for subgroup, table in tables.items()}
        super().sweep(number, tuple(map(ops.Visit, tables)))
        for subgroup, table in tables.items():
            state = self.states[subgroup]
            state += np.uint32(zlib.crc32(repr((table.tolist(), read[subgroup])).encode()))
            self.made[subgroup] = zlib.crc32(state)


class Tables:
    """What the session's `Speculation` wants of tables, views, gradients and kernel."""

    def __init__(self, caller: Calls) -> None:
        self._caller = caller
        self._plan = caller.plan
        self.step_rows = Told((), 0.0, 0.0, frozenset())
        self.expected = self.step_rows
        self.weights = np.zeros(0, np.uint64)

    def return_borrowed(self) -> None:
        """Nothing is borrowed."""

    def fetch_final(self, *told: object) -> None:
        """Nothing lies on a GPU."""

    def end_final(self) -> None:
        """No lane reads gradients."""

    def rows(self, groups, scale, clip, active, gradients, weights) -> Told:
        self.expected = Told(tuple(groups), scale, clip, frozenset(active))
        return self.expected

    def read_at(self) -> None:
        return None

    def has_landed(self, segments: object) -> bool:
        return True  # in host memory they lie where they arrive

    def make_table(self, run, address, rows, *, weights_address, apart) -> npt.NDArray[Any]:
        table = table_of(self._plan, run.visit.subgroup, rows)
        self._caller.under_way[run.op] = table, apart[1]
        return table

    def updates_alike(self, subgroup: int, expected: Told, begun: Told) -> bool:
        tables = (table_of(self._plan, subgroup, rows).tobytes() for rows in (expected, begun))
        return next(tables) == next(tables)

    def read_by(self, subgroup, table, begun) -> tuple[npt.NDArray[Any], ...]:
        places = [(int(row["parameter"]), subgroup) for row in table]
        masters = subgroup in self._caller.data.weights
        sizes = [(int(row["numel"]), int(row["numel"]) * masters) if row["flags"] else (0, 0) for row in table]
        return table["parameter"].astype(np.uint64), np.array(places, np.uint64), np.array(sizes, np.uint64)

    def fingerprints(self, parameters, places, sizes, *, masters=False) -> npt.NDArray[np.uint64]:
        memory, pairs = self._caller.memory, zip(places.tolist(), sizes.tolist(), strict=True)
        return np.array([memory.fingerprint(int(masters), *pair) for pair in pairs], np.uint64)

    def weight_copies(self, subgroup, image, active=None, weights=None) -> npt.NDArray[np.uint64]:
        if active is not None:  # else masters come from a GPU
            self._caller.publish(subgroup)
        return np.zeros((0, 3), np.uint64)


class Data(SimData):
    """Memory whose visits are told what to do when they begin, and do it when they end."""

    caller: Calls

    def begin(self, operation: ops.Operation) -> None:
        super().begin(operation)
        if isinstance(operation, ops.RunVisit):
            self.caller.begin_visit(operation)

    def end(self, operation: ops.Operation, **how: bool) -> Any:
        if isinstance(operation, ops.RunVisit):
            operation = replace(operation, sweep=self.caller.stands_for.get(operation.sweep, operation.sweep))
        return super().end(operation, **how)


class FailingLanes(SimExecutor):
    """Lanes on which a share of the writes fails of versions that nobody has confirmed."""

    caller: Calls
    failing = 0.0

    def _end(self, operation: ops.Operation, fault: Any) -> ops.Event:
        ahead = isinstance(operation, ops.WriteTile) and self.caller.is_unconfirmed(operation)
        if ahead and self.failing and self._rng.random() < self.failing:
            fault = PathFull(0) if self._rng.random() < 0.5 else FailOperation("write", 0)
            self.caller.failed_ahead[operation.op] = operation.tile.subgroup, operation.record.step
            self.caller.outcome.counts["writes ahead failed"] += 1
        return super()._end(operation, fault)


class Calls(Saves):
    """A caller that goes on while a step does: iterations, and what else it asks for.

    Gradients arrive one by one, change, or are dropped. Mostly state is updated during backward passes, too.
    """

    checked = AskedLanes
    lanes = FailingLanes
    memory = Data
    keeps_lanes = False
    twins = CallsTwin
    data: Data
    executor: AskedLanes
    inner: FailingLanes
    twin: Any
    thread: EngineThread

    def __init__(self, *drawn: Any, **more: Any) -> None:
        super().__init__(*drawn, **more)
        rng, parameters = self.rng, range(len(self.plan.layout.parameters))
        self.data.caller = self.inner.caller = self
        self.inner.failing = rng.choice((0.0, 0.0, 0.0, 0.05, 0.3))
        self.keep = max(self.plan.budgets.checkpoints, 1)
        self.may_fail = not self.plan.has_room_for_checkpoints or not self.plan.budgets.checkpoints or self.may_break
        # What the caller does:
        self.modules = random_modules(rng, len(parameters))
        self.paces = rng.choice(((0,), (0, 0, 0, 0, 1), (0, 0, 1, 2, 5), (0, 1, 5, 60)))
        """Events that come between two things that it does."""
        self.pauses = rng.choice(((0,), (0, 5, 50), (0, 200)))
        """How often something comes between the last gradient and the step."""
        self.steady = rng.choice((0.0, 0.5, 0.9, 1.0, 1.0))
        """Share of passes that use all modules, in the same order."""
        self.speculates = self.plan.staging_slots > 0 and rng.random() < 0.8
        """Whether state is updated during backward passes."""
        self.pending_share = rng.choice((0.0, 0.3, 1.0, 1.0))
        """Share of steps that are not waited for."""
        self.limit = rng.choice((0.0, 0.0, 0.2))
        """Share of steps that are clipped."""
        self.rate = 1.0
        # What there is:
        self.weights: dict[int, int] = {}
        self.begun_visit: dict[int, int] = {}
        """Weights in each weight slot."""
        self.gradients = {number: number for number in parameters}
        """What lies in each parameter's gradient slot."""
        self.arrived: dict[int, None] = dict.fromkeys(parameters)
        """Parameters that have a gradient for the next step."""
        self.memory = Memory(self.gradients, self.data.weights)
        self.tables = Tables(self)
        self.scribbled: set[int] = set()
        """Subgroups whose masters were written to since they were updated last."""
        # What has been asked for:
        self.awaited: Sequence[int] | None = None
        self.saving: ops.Save | None = None
        self.failures: list[int] = []
        """Sweeps that have failed."""
        self.told: list[int] = []
        """Sweeps of whose failure the caller has been told."""
        self.steps = 0
        self.stands_for: dict[int, int] = {}
        """Of each sweep that updates: which step it is of, or is expected to be."""
        self.visitors: dict[int, Any] = {}
        # Of speculative versions:
        self.images: dict[int, int] = {}
        self.under_way: dict[int, tuple[npt.NDArray[Any], npt.NDArray[np.uint64]]] = {}
        self.steps_ahead: dict[int, None] = {}
        self.taken_over: set[tuple[int, int]] = set()
        """Subgroups and steps of versions that have been confirmed."""
        self.failed_ahead: dict[int, tuple[int, int]] = {}
        """Subgroups and steps of versions of which a write was made to fail, by operation."""
        self.open_sweep: ops.Sweep | None = None

    @classmethod
    def draw_plan(cls, rng: random.Random) -> Plan:
        """Return a plan, which mostly streams, with room for checkpoints and for some versions beside the live ones.

        A GPU updates some of it in the step; all is made ahead, or what the GPU does not update.
        """
        keep = rng.choice((1, 1, 2))
        plan = random_plan(rng)
        while not plan.staging_slots and rng.random() < 0.9:
            plan = random_plan(rng)
        plan = replace(plan, budgets=replace(plan.budgets, checkpoints=keep if rng.random() < 0.9 else 0))
        versions = plan.state_bytes + SECTOR_BYTES * sum(len(s.tiles) for s in plan.layout.subgroups)
        tiles = [nbytes for s in plan.layout.subgroups for _, _, nbytes in (*s.tiles, *s.weight_tiles)]
        plan = with_room(plan, 2 * (max(tiles) + SECTOR_BYTES))  # the end of a path may be too short for a tile
        for room in (plan.checkpoint_bytes, int(versions * rng.choice((0.0, 0.3, 0.6, 1.0, 2.0)))):
            plan = with_room(plan, room, rng.randrange(len(plan.budgets.paths)))
        return replace(plan, budgets=replace(plan.budgets, speculates=rng.random() < 0.8))

    @classmethod
    def draw_actions(cls, rng: random.Random, plan: Plan) -> list[Action]:
        actions = [Action("step")]
        asks: tuple[str, ...] = ("sweep", "save", "save", "wait", "finish", "look", "extend", "forward", "nothing")
        if rng.random() < 0.4:
            asks = ("fill", "fill", "free", "sweep", "save", "save", "wait", "finish", "extend", "forward", "nothing")
        for _ in range(rng.randrange(4, 10)):
            while rng.random() < 0.15:
                actions.append(Action(rng.choice(asks), True))
            actions.append(Action("forward"))
            while rng.random() < 0.15:
                actions.append(Action(rng.choice(("forward", "skip", "forget", "scribble"))))
                actions.append(Action("forward"))
            if rng.random() < 0.2:
                actions.append(Action(rng.choice(asks), rng.random() < 0.3))
            actions.append(Action("step", rng.random() < 0.15))
        return actions

    @classmethod
    def draw_faults(cls, seed, rng, plan, actions, faulty) -> tuple[Fault, ...]:
        if not faulty and (faulty is not None or rng.random() >= 0.6):
            return ()
        faults = random_faults(rng, plan, actions)
        if rng.random() < 0.4:  # all kinds, but for what the medium does to a checkpoint
            more = any_faults(seed, paths=len(plan.budgets.paths), operations=4 * len(actions))
            faults += tuple(fault for fault in more if not isinstance(fault, CorruptPayload | MisdirectedWrite))
        return faults

    @classmethod
    def draw(cls, seed, rng, plan, faulty, before=None) -> Scenario:
        more = replace(plan, staging_slots=plan.staging_slots + 2)
        return replace(super().draw(seed, rng, plan, faulty, before), grown=more)

    @classmethod
    def lives(cls, rng: random.Random, least: int) -> Iterator[int]:
        yield from range(max(rng.choice((1, 1, 2, 3)), least))

    def start(self) -> None:
        """Make the engine thread, which is none."""
        self.thread = self.kind(EngineThread)(self.parts())
        self.thread.speculation = self.kind(Speculation)(self.thread._parts, self)
        self.thread.speculation.is_on = self.speculates
        handle = self.machine.handle

        def told(event: ops.Event) -> None:
            """Have the checker see what no lane reports, too."""
            self.note(event)
            if isinstance(event, ops.OutcomeTold) and isinstance(event.finished, ops.Sweep):
                self.executor.ended(well=not self.machine.failed)
                if self.machine.failed:
                    self.failures.append(event.finished.number)
            elif not isinstance(event, ops.Done | ops.Failed | ops.Stop):
                self.executor.observe(event)
            before = self.machine.saver.finished_save
            handle(event)
            self.thread.broken = self.machine.broken
            ended = self.machine.saver.finished_save
            if ended is not None and ended is not before:  # the machine may go on before the session takes note
                super(Calls, self).check_saved(ended[1])

        self.machine.handle = told  # type: ignore[method-assign]

    def note(self, event: ops.Event) -> None:
        """Take note of an event that the machine is about to be told of."""
        counts = self.outcome.counts
        if isinstance(event, ops.OutcomeTold) and isinstance(event.finished, ops.Sweep):
            moved = self.machine.changed_subgroups, self.executor.moved
            assert moved[0] == moved[1], (
                f"it does not say which subgroups have moved: {moved}, {self.machine.broken!r}"
            )
        elif isinstance(event, ops.SealStep):
            counts["confirmed"] += len(event.confirmed)
            counts["revoked"] += len(self.machine.speculative_versions) - len(event.confirmed)
            step = self.open_sweep.step if self.open_sweep is not None else 0
            self.taken_over |= {(subgroup, step) for subgroup in event.confirmed}
        elif isinstance(event, ops.Failed) and self.failed_ahead.get(event.op) in self.taken_over:
            self.may_break = self.may_fail = True  # it was confirmed before anybody heard of the failure
        elif isinstance(event, ops.Admit):
            counts["admitted"] += len(event.subgroups)

    def run(self, actions: list[Action]) -> Any:
        if self.rng.random() < 0.05:
            self.stop(self.rng.random() * 0.2)
        return super().run(actions)

    def parts(self) -> Any:
        """Return what the engine thread works with."""
        return SimpleNamespace(
            plan=self.plan,
            machine=self.machine,
            executor=self.executor,
            lanes=NO_LANES,
            is_whole=True,
            queue=SimpleNamespace(exchange=self.exchange, post=lambda token: None),
            saves=SimpleNamespace(end_pending=self.saved, last_folder=None, pending=None),
            memory=SimpleNamespace(
                drop_checkpoint_buffers=lambda: None,
                allocate_arena=lambda nbytes: SimpleNamespace(address=1 << 40),
                free_arena=lambda arena: None,
                slot_address=lambda slot: 0,
            ),
            tables=self.tables,
            kernel=self.tables,
            gradients=self.tables,
        )

    def tell(self, event: ops.Event) -> None:
        self.machine.handle(event)

    def stop(self, at_s: float) -> None:
        """Have the watchdog give up some time."""
        self.inner.inject(ops.Stop(TierError("wait", tier="simulated", path="lanes", detail="no answer")), at_s)
        self.may_break = True

    # The engine's side

    def go_on(self) -> None:
        """Let one thing happen, and do what is due then."""
        assert self.inner.events < MAX_EVENTS, "it goes on for ever"
        machine, thread = self.machine, self.thread
        self.executor.submit(machine.take_operations())
        if not thread.is_due(machine):
            for event in self.executor.wait():
                machine.handle(event)
            self.executor.submit(machine.take_operations())
        self.check()
        while thread.is_due(machine):
            assert thread.serve_due()

    def go_on_until(self, arrived: Callable[[], object]) -> None:
        while not arrived():
            self.go_on()
            if self.awaited is not None and not arrived():
                waits_for = [s for s in self.awaited if not self.executor.is_ended(s)]
                assert waits_for, f"it waits for subgroups {self.awaited}, which have been visited"
        self.check(ends=True)

    def begin(self, sweep: ops.Sweep) -> ops.Sweep:
        self.machine.handle(ops.BeginSweep(sweep))
        return sweep

    def exchange(self, op: int, reply: Any, quiet_s: float, interrupt_op: int) -> None:
        self.executor.requests += 1
        self.go_on_until(lambda: reply.wait(0.0))

    def saved(self, error: Exception | None, broke: bool) -> tuple[int, ...]:
        assert self.saving is not None
        assert error is None or self.may_fail or self.machine.broken, f"a save has failed for too little: {error!r}"
        self.end_save(self.saving, error)
        return ()

    def check_saved(self, error) -> None:
        """It has been told: see `start`."""

    def make_open(self, visits: tuple[ops.Visit, ...], visitor: Any) -> ops.Sweep:
        """Return an open sweep."""
        self.executor.set_visitor(visitor)
        self.sweeps += 1
        self.stands_for[self.sweeps] = self.steps + 1
        self.open_sweep = ops.Sweep(self.sweeps, self.version_of(self.sweeps), visits, is_open=True)
        self.steps_ahead[self.open_sweep.step] = None
        return self.open_sweep

    def version_of(self, number: int) -> int:
        return 10 * number

    def is_unconfirmed(self, write: ops.WriteTile) -> bool:
        """Return whether a write is of a version that was made ahead, and was not confirmed by now."""
        made = write.tile.subgroup, write.record.step
        return write.record.step in self.steps_ahead and made not in self.taken_over

    def begin_visit(self, run: ops.RunVisit) -> None:
        if run.visit.speculative:
            self.executor.visitor(run)  # makes a table: see `Tables.make_table`
        else:
            self.visitors[run.op] = self.executor.visitor

    def visit(self, run: ops.RunVisit, state: np.ndarray) -> None:
        number = run.visit.subgroup
        if not run.visit.speculative:
            visitor = self.visitors.pop(run.op)
            assert visitor is not no_visit, "a visit of a sweep of nobody"
            visitor(run, state)
            return
        table, sums = self.under_way.pop(run.op)
        read = self.memory.read(number, table)
        sums[:] = read
        self.images[number] = update(run, state, table, read)
        self.outcome.counts["made"] += 1

    def update(self, run: ops.RunVisit, state: np.ndarray) -> None:
        """Change state, and write weights."""
        if run.visit.changes:
            mix(run, state)
            self.made(run, zlib.crc32(state))

    def update_from(self, run: ops.RunVisit, state: np.ndarray, told: Told) -> None:
        number = run.visit.subgroup
        table = table_of(self.plan, number, told)
        self.made(run, update(run, state, table, self.memory.read(number, table)))

    def publish(self, subgroup: int) -> None:
        self.executor.published(subgroup)
        self.data.publish(subgroup)
        self.weights[subgroup] = self.images[subgroup]

    def made(self, run: ops.RunVisit, made: int) -> None:
        """Put new weights where they belong, or on their way there."""
        if run.visit.gpu or run.transfer_slot is None:
            self.weights[run.visit.subgroup] = made
        else:
            self.begun_visit[run.transfer_slot] = made

    def pushed(self, push: ops.Transfer) -> None:
        self.weights[push.subgroup] = self.begun_visit[push.transfer_slot]

    # The caller's side

    def act(self, actions: list[Action]) -> None:
        for action in (*actions, Action("finish"), Action("look"), Action("finish")):
            # A caller that was told goes on to ask, and is refused.
            what = "refused" if self.failures and self.failures == self.told else action.what
            try:
                getattr(self, what)(action.value)
            except InternalError:
                raise
            except StepAbortedError as error:
                self.told.append(error.step)
                self.outcome.counts[f"told by {action.what}"] += 1
            except SessionBrokenError:
                assert self.machine.broken is not None, "refused, and nothing is broken"
            except OffloadError as error:
                if error is not self.machine.broken:
                    raise
                if action.what not in ("save", "extend"):  # these are no sweeps
                    self.told.append(self.sweeps)
        assert self.told == self.failures, (
            f"sweeps {self.failures} have failed, and the caller was told of {self.told}"
        )
        if self.machine.broken is None and self.rng.random() < 0.5:
            self.forward(False)
            self.close()

    def refused(self, flag: bool) -> None:
        with self.thread.turn():
            raise AssertionError("a session that has broken is used")

    def compute(self) -> None:
        """Let the engine go on for a while beside the caller."""
        for _ in range(self.rng.choice(self.paces)):
            if self.machine.in_flight or self.thread.is_due(self.machine):
                self.go_on()

    def subgroups_of(self, parameters: Iterable[int]) -> tuple[int, ...]:
        places = self.plan.layout.places
        return tuple(sorted({subgroup for number in parameters for subgroup, _ in places[number]}))

    def wait_for(self, module: tuple[int, ...]) -> None:
        self.awaited = self.subgroups_of(module)
        try:
            self.thread.wait_for(self.awaited)
            self.executor.enqueue_when_readable(self.awaited)
        finally:
            self.awaited = None
        self.outcome.counts["let on beside a sweep"] += not self.machine.has_no_sweep

    def loss_of(self, order):
        """Have modules wait for their weights and use them; return a number that all they read has a part in."""
        loss = self.sweeps
        for module in order:
            self.compute()
            self.wait_for(module)
            subgroups = self.subgroups_of(module)
            read = [self.weights.get(subgroup) for subgroup in subgroups]
            assert read == [self.twin.made.get(subgroup) for subgroup in subgroups], "weights are not the last step's"
            loss = zlib.crc32(repr((loss, read)).encode())
        return loss

    def forward(self, flag: bool) -> None:
        """Use modules and, but for an evaluation (`flag`), have gradients of them arrive in reverse."""
        order, is_steady = [*self.modules], self.rng.random() < self.steady
        if not is_steady:
            order = self.rng.sample(order, self.rng.randrange(1, len(order) + 1))
            order += [self.rng.choice(order)] * (self.rng.random() < 0.2)
        loss = self.loss_of(order)
        if flag:
            return
        if not is_steady:  # some arrive though their module was not called: whoever writes to `.grad` may do so
            order += [module for module in self.modules if module not in order and self.rng.random() < 0.5]
        for module in reversed(order):
            self.compute()
            self.wait_for_gradients(module)
            for number in module:
                before = self.gradients[number] if number in self.arrived else None
                self.gradients[number] = zlib.crc32(repr((loss, number, before)).encode())
                self.arrived[number] = None
                if self.thread.speculation.announce_arrival(number, None):
                    self.thread.speculation.foresee([self.rate], (), None)
                self.thread.speculation.note_arrival(number)
            if self.rng.random() < 0.05:
                self.scribble(False)

    def wait_for_gradients(self, module: tuple[int, ...]) -> None:
        self.wait_for(module)

    def step(self, flag: bool) -> None:
        """Begin to update what has gradients; `flag`: with other hyperparameters than those that it had till now."""
        if flag:
            self.rate += 1
        while self.rng.random() < 0.1:
            self.scribble(False)
        for _ in range(self.rng.choice(self.pauses)):
            self.compute()
        with self.thread.turn():
            active = sorted(self.arrived)
            if not active:
                return
            places = self.plan.layout.places
            subgroups = tuple(dict.fromkeys(subgroup for number in active for subgroup, _ in places[number]))
            clip = 0.5 if self.rng.random() < self.limit else 1.0
            told = (self.rate,), 1.0, clip, frozenset(active)
            self.arrived = {}
            number = self.sweeps = self.sweeps + 1
            self.tables.step_rows = told
            self.thread.sweeps.step_number = number - 1

            def begin() -> ops.Sweep:
                self.thread.speculation.begin_step(active)
                self.allocate()
                done = self.thread.speculation.choose_confirmed(subgroups)
                self.steps += 1
                self.stands_for[number] = self.steps
                order = visit_order([s for s in subgroups if s not in done], self.machine.live_slots)
                visits = update_visits(self.plan, order, self.machine.is_fresh)
                self.executor.set_visitor(partial(self.update_from, told=told))
                self.scribbled.difference_update(subgroups)
                self.twin.step(self.steps, subgroups, told, self.gradients)
                rest = ops.Sweep(number, self.version_of(number), visits)
                self.thread.speculation.seal(done, rest)
                return rest

            def applied() -> None:
                self.outcome.counts["steps"] += 1
                self.thread.speculation.end_step(1.0, clip)

            def meanwhile() -> None:
                if self.rng.random() < 0.1:
                    self.machine.handle(
                        ops.Reshare(tuple(self.rng.uniform(0.05, 1.0) for _ in self.plan.budgets.paths))
                    )

            pending = None
            if self.rng.random() < self.pending_share:
                pending = self.kind(PendingStep)((), partial(Latch, self))
            self.thread.request(begin, applied, meanwhile, pending, seals=True)

    def scribble(self, flag: bool) -> None:
        """Write to a gradient, or to a weight, without a word."""
        if not self.arrived:
            return
        if self.rng.random() < 0.7 or not self.data.weights:
            self.gradients[self.rng.choice(sorted(self.arrived))] += 1
            return
        self.thread.finish_pending()
        if self.machine.broken is None:
            self.wait(False)  # a checkpoint reads weights
            chosen = self.rng.choice(sorted(self.data.weights))
            self.scribbled.add(chosen)
            for weights in (self.data.weights[chosen], self.twin.weights[chosen]):
                weights += np.uint32(1)

    def fill(self, flag: bool) -> None:
        """Somebody else takes what is left of some paths."""
        paths = range(len(self.plan.budgets.paths))
        self.inner.filled = {path for path in paths if self.rng.random() < 0.7}
        self.outcome.counts["filled"] += 1
        self.allocate()

    def free(self, flag: bool) -> None:
        """Somebody else gives it back."""
        self.inner.filled = set()

    def allocate(self) -> bool:
        """See `Saves.allocate`; what steps need and is not there may fail them."""
        is_whole = super().allocate()
        if not is_whole and self.inner.filled:
            self.may_break = self.may_fail = True
        return is_whole

    def skip(self, flag: bool) -> None:
        """Drop gradients, and say so."""
        self.arrived = {}
        if self.thread.is_usable and self.thread.speculation.drop_arrivals():
            self.nothing(False)

    def forget(self, flag: bool) -> None:
        """Drop gradients without a word."""
        self.arrived = {}

    def nothing(self, flag: bool) -> None:
        """Ask for nothing in particular."""
        with self.thread.turn():
            self.thread.request(lambda: None)

    def extend(self, flag: bool) -> None:
        """Go on with more staging slots."""

        def begin() -> None:
            self.thread.settle()
            grown, machine = self.scenario.grown, self.machine
            roomy = grown.has_room_for_checkpoints or not self.plan.has_room_for_checkpoints
            if roomy and machine.saver.under_way is None and machine.index.has_room(grown.slot_counts):
                machine.handle(ops.Extend(grown))
                self.may_fail = True  # the ends of paths may be too short for what the larger plan promises

        with self.thread.turn():
            self.wait(False)
            self.thread.request(begin)

    def sweep(self, flag: bool) -> None:
        """Have something else done to the state, and wait for it."""
        self.ask(self.draw_sweep(), self.update)

    def look(self, flag: bool) -> None:
        """Compare all state."""
        looked: list[int] = []

        def compare(run: ops.RunVisit, state: np.ndarray) -> None:
            looked.append(run.visit.subgroup)
            assert np.array_equal(state, self.twin.states[run.visit.subgroup]), "state is not what it has to be"

        visits = everything(self.plan)
        self.ask(visits, compare)
        assert sorted(looked) == [visit.subgroup for visit in visits]

    def ask(self, visits: tuple[ops.Visit, ...], visitor: Callable[[ops.RunVisit, np.ndarray], None]) -> None:
        with self.thread.turn():
            number = self.sweeps = self.sweeps + 1

            def begin() -> ops.Sweep:
                self.executor.set_visitor(visitor)
                return self.begin(ops.Sweep(number, 10 * number, visits))

            self.thread.request(begin, lambda: self.twin.sweep(number, visits))

    def finish(self, flag: bool) -> None:
        self.thread.finish_pending()

    def wait(self, flag: bool) -> None:
        saver = self.machine.saver
        self.go_on_until(lambda: saver.under_way is None and saver.finished_save is None)

    def save(self, flag: bool) -> None:
        if self.scribbled:  # else a master would change without a step between two checkpoints
            return
        machine, executor = self.machine, self.executor

        def begin() -> None:
            pump(machine, executor, lambda m: m.broken is not None or Phase.BUSY not in m.phases)
            if machine.broken is not None:
                raise machine.broken
            self.saves += 1
            copies = flag and not self.copies  # there is one store for them
            self.saving = ops.Save(self.saves, len(self.plan.budgets.paths) if copies else None)
            self.expected[self.saves] = self.twin.tiles()
            machine.handle(ops.BeginSave(self.saving))
            if self.inner.filled and not copies and machine.saver.under_way and not Saves.allocate(self):
                self.may_fail = True
                executor.submit(machine.take_operations())
                machine.handle(ops.AbortSave(CheckpointError("there is no room")))
            pump(machine, executor, lambda m: not m.saver.has_unwritten_weights or m.saver.finished_save is not None)

        with self.thread.turn():
            self.wait(False)
            self.thread.request(begin)

    def close(self) -> None:
        """End the session as it is: during a backward pass, with flushes and a checkpoint under way."""
        thread, machine = self.thread, self.machine
        thread._next = None
        self.executor.requests += 1
        while not thread.is_due(machine) or thread.serve_due():
            if not thread.is_due(machine):
                for event in self.executor.wait():
                    machine.handle(event)
                self.executor.submit(machine.take_operations())
        self.wait(False)
        thread._finish_session()
        if machine.broken is None:
            self.outcome.counts["closed"] += 1
            is_whole = self.twin.states.keys() == {*range(len(machine.phases))}
            expected = self.twin.tiles() if is_whole else {}
            for tile, record in self.stored().items():
                found = self.verify_tile(tile, record)
                is_newest = machine.phases[tile.subgroup] in (Phase.ABSENT, Phase.READY)
                assert not (is_newest and expected) or found == expected[tile], f"{tile} is of another version"


CHOICES: dict[str, type[Driver]] = {
    "sweeps": Sweeps,
    "changing": Changing,
    "saves": Saves,
    "parks": Parks,
    "fills": Fills,
    "packs": Packs,
    "calls": Calls,
}
"""All actors, by what recordings and tests call them."""
