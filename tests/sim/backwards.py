"""One seed, one scenario whose state is updated during backward passes: arrivals, changes of mind, faults at random.

The session's own `EngineThread` and `Speculation` run here, event by event, as in `forwards`; its tables, gradients
and fingerprints are stood in for. A twin makes steps alone, and speculates on nothing. What an update does depends
on all that it reads: gradients, weights that are masters, hyperparameters, and which parameters are active.

Non-goals: the real tables and fingerprints (tests/e2e/test_overlap_backward.py).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import forwards
import numpy as np
import numpy.typing as npt
import saves
import swarm
from world import (
    CorruptPayload,
    Disorder,
    FailOperation,
    MisdirectedWrite,
    PathFull,
    SimData,
    SimExecutor,
    mix,
)

from offload.engine.executor import visit_nothing
from offload.plan import Plan, visit_order
from offload.protocols import SECTOR_BYTES, SegmentFlag
from offload.schedule.index import TileIndex
from offload.schedule.machine import Machine
from offload.schedule.operations import (
    Admit,
    Event,
    Extend,
    Failed,
    Operation,
    Reshare,
    Run,
    Seal,
    Sweep,
    Taken,
    Visit,
    WriteTile,
)
from offload.schedule.runs import update_visits
from offload.session.speculation import Speculation
from offload.session.step import PendingStep
from offload.session.thread import EngineThread

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


def update(run: Run, state: np.ndarray, table: npt.NDArray[Any], read: Sequence[tuple[int, int]]) -> int:
    """Change state; return the weights that it has then."""
    mix(run, state)
    state += np.uint32(zlib.crc32(repr((table.tolist(), read)).encode()))
    return zlib.crc32(state)


class Twin(forwards.Twin):
    """State and weights of a session that makes nothing ahead."""

    def step(self, number: int, subgroups: Iterable[int], told: Told, gradients: dict[int, int]) -> None:
        memory = Memory(gradients, self.weights)
        tables = {subgroup: table_of(self.plan, subgroup, told) for subgroup in subgroups}
        read = {subgroup: memory.read(subgroup, table) for subgroup, table in tables.items()}
        saves.Twin.sweep(self, number, tuple(map(Visit, tables)))
        for subgroup, table in tables.items():
            state = self.states[subgroup]
            state += np.uint32(zlib.crc32(repr((table.tolist(), read[subgroup])).encode()))
            self.made[subgroup] = zlib.crc32(state)


class Tables:
    """What the session's `Speculation` wants of tables, views, gradients and kernel."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._plan = session.plan
        self.begun = Told((), 0.0, 0.0, frozenset())
        self.expected = self.begun
        self.weights = np.zeros(0, np.uint64)

    def return_borrowed(self) -> None:
        """Nothing is borrowed."""

    def bring_final(self, *told: object) -> None:
        """Nothing lies on a GPU."""

    def end_final(self) -> None:
        """No lane reads gradients."""

    def rows(
        self,
        groups: Sequence[float],
        scale: float,
        clip: float,
        active: Sequence[int],
        gradients: None,
        weights: npt.NDArray[np.uint64],
    ) -> Told:
        self.expected = Told(tuple(groups), scale, clip, frozenset(active))
        return self.expected

    def read_at(self) -> None:
        return None

    def has_landed(self, segments: object) -> bool:
        return True  # in host memory they lie where they arrive

    def fill(
        self,
        run: Run,
        address: int,
        rows: Told,
        *,
        weights_address: None,
        apart: tuple[int, npt.NDArray[np.uint64]],
    ) -> npt.NDArray[Any]:
        table = table_of(self._plan, run.visit.subgroup, rows)
        self._session.under_way[run.op] = table, apart[1]
        return table

    def agree(self, subgroup: int, expected: Told, begun: Told) -> bool:
        tables = (table_of(self._plan, subgroup, rows).tobytes() for rows in (expected, begun))
        return next(tables) == next(tables)

    def read_by(
        self, subgroup: int, table: npt.NDArray[Any], begun: Told
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        places = [(int(row["parameter"]), subgroup) for row in table]
        masters = subgroup in self._session.data.weights
        sizes = [(int(row["numel"]), int(row["numel"]) * masters) if row["flags"] else (0, 0) for row in table]
        return table["parameter"].astype(np.uint64), np.array(places, np.uint64), np.array(sizes, np.uint64)

    def fingerprints(
        self, parameters: object, places: npt.NDArray[Any], sizes: npt.NDArray[Any], *, masters: bool = False
    ) -> npt.NDArray[np.uint64]:
        memory, pairs = self._session.memory, zip(places.tolist(), sizes.tolist(), strict=True)
        return np.array([memory.fingerprint(int(masters), *pair) for pair in pairs], np.uint64)

    def weight_copies(
        self, subgroup: int, image: int, active: npt.NDArray[Any] | None = None, weights: None = None
    ) -> npt.NDArray[np.uint64]:
        if active is not None:  # else masters come from a GPU
            self._session.publish(subgroup)
        return np.zeros((0, 3), np.uint64)


class Data(SimData):
    """Memory whose visits are told what to do when they begin, and do it when they end."""

    session: Session

    def begin_run(self, run: Run) -> None:
        super().begin_run(run)
        self.session.begin_visit(run)

    def end_run(self, run: Run) -> None:
        super().end_run(replace(run, sweep=self.session.stands_for.get(run.sweep, run.sweep)))


class Lanes(SimExecutor):
    """Lanes on which a share of the writes fails of versions that nobody has confirmed."""

    session: Session
    failing = 0.0

    def _end(self, operation: Operation, fault: Any) -> Event:
        ahead = isinstance(operation, WriteTile) and self.session.is_unconfirmed(operation)
        if ahead and self.failing and self._rng.random() < self.failing:
            fault = PathFull(0) if self._rng.random() < 0.5 else FailOperation("write", 0)
            self.session.failed_ahead[operation.op] = operation.tile.subgroup, operation.record.step
            self.session.outcome.counts["writes ahead failed"] += 1
        return super()._end(operation, fault)


def random_plan(rng: random.Random, keep: int) -> Plan:
    """Return a plan that streams, with room for checkpoints and for some versions beside the live ones.

    A GPU updates some of it in the step; all is made ahead, or what the GPU does not update.
    """
    plan = swarm.tight_plan(rng, swarm.random_layout(rng))
    while not plan.staging_slots:
        plan = swarm.tight_plan(rng, swarm.random_layout(rng))
    plan = replace(plan, budgets=replace(plan.budgets, checkpoints=keep if rng.random() < 0.9 else 0))
    versions = plan.state_bytes + SECTOR_BYTES * sum(len(s.tiles) for s in plan.layout.subgroups)
    paths = list(plan.budgets.paths)
    tiles = [nbytes for s in plan.layout.subgroups for _, _, nbytes in (*s.tiles, *s.weight_tiles)]
    for number, path in enumerate(paths):  # what is left at the end of each may be too short for a tile
        paths[number] = replace(path, available_bytes=path.available_bytes + 2 * (max(tiles) + SECTOR_BYTES))
    for room in (plan.checkpoint_bytes, int(versions * rng.choice((0.0, 0.3, 0.6, 1.0, 2.0)))):
        chosen = rng.randrange(len(paths))
        paths[chosen] = replace(paths[chosen], available_bytes=paths[chosen].available_bytes + room)
    return replace(plan, budgets=replace(plan.budgets, paths=tuple(paths), speculates=rng.random() < 0.8))


def random_actions(rng: random.Random) -> list[saves.Action]:
    """Return what a caller does: iterations, and what else it asks for."""
    actions = [saves.Action("step")]
    asks: tuple[str, ...] = ("sweep", "save", "save", "wait", "finish", "look", "extend", "forward", "nothing")
    if rng.random() < 0.4:
        asks = ("fill", "fill", "free", "sweep", "save", "save", "wait", "finish", "extend", "forward", "nothing")
    for _ in range(rng.randrange(4, 10)):
        while rng.random() < 0.15:
            actions.append(saves.Action(rng.choice(asks), True))
        actions.append(saves.Action("forward"))
        while rng.random() < 0.15:
            actions.append(saves.Action(rng.choice(("forward", "skip", "forget", "scribble"))))
            actions.append(saves.Action("forward"))
        if rng.random() < 0.2:
            actions.append(saves.Action(rng.choice(asks), rng.random() < 0.3))
        actions.append(saves.Action("step", rng.random() < 0.15))
    return actions


def run_seed(
    seed: int,
    machine_type: type[Machine] = Machine,
    index_type: type[TileIndex] = TileIndex,
    thread_type: type[EngineThread] = EngineThread,
    speculation_type: type[Speculation] = Speculation,
    session_type: type[Session] | None = None,
    *,
    self_check: bool = True,
    faulty: bool | None = None,
    crash: int | None = None,
) -> saves.Outcome:
    """Run one scenario; raise if anything is not as it has to be.

    Args:
        seed: Which.
        machine_type: A machine; also index_type, thread_type, speculation_type, session_type: what it works with.
        self_check: Whether the machine looks at its own invariants.
        faulty: Whether lanes fail; None for now and then.
        crash: Event at which the first session dies, and another one goes on from what it has left.
    """
    rng = random.Random(seed)
    keep = rng.choice((1, 1, 2))
    plan = random_plan(rng, keep)
    before: Session | None = None
    outcome = saves.Outcome()
    lives = rng.choice((1, 1, 2, 3))
    for life in range(lives if crash is None else 2):
        actions = random_actions(rng)
        faults = ()
        if faulty or (faulty is None and rng.random() < 0.4):
            faults = saves.random_faults(rng, plan, actions)
            if rng.random() < 0.4:
                drawn = swarm.draw_faults(seed, paths=len(plan.budgets.paths), operations=4 * len(actions))
                # What the medium does to a checkpoint is nobody's fault.
                faults += tuple(fault for fault in drawn if not isinstance(fault, CorruptPayload | MisdirectedWrite))
        if crash is not None and not life:
            faults = (swarm.Crash(crash),)
        rates = swarm.random_rates(rng, plan)
        even = rng.random() < 0.3
        disorder = Disorder() if even else Disorder(rng.choice((0.0, 0.5, 5.0)), rng.randrange(1, 4), 0.0)
        session = (session_type or Session)(seed + life, plan, rates, faults, disorder, rng, machine_type, self_check)
        session.serve_with(thread_type, PendingStep, speculation_type, index_type)
        if before is not None and not session.resume(before):
            break
        outcome.counts["resumed"] += before is not None
        if rng.random() < 0.05:
            session.stop(rng.random() * 0.2)
        ended = session.run(actions)
        outcome.how, outcome.events = ended.how, outcome.events or ended.events
        outcome.counts["died"] += ended.how == "crashed"
        outcome.counts.update(ended.counts)
        before = session
    return outcome


class Session(forwards.Session):
    """A caller whose gradients arrive one by one, and the session that it asks."""

    twin: Twin

    def __init__(self, seed, plan, rates, faults, disorder, rng, machine_type, self_check) -> None:
        super().__init__(seed, plan, rates, faults, disorder, rng, machine_type, self_check)
        self.more = replace(plan, staging_slots=plan.staging_slots + 2)
        self.data, self.twin = Data(self.more, self.visit, self.pushed), Twin(plan)
        self.inner = Lanes(self.more, rates, faults, seed, self.data, disorder)
        self.data.session = self.inner.session = self
        self.inner.failing = rng.choice((0.0, 0.0, 0.0, 0.05, 0.3))
        self.executor = forwards.Lanes(self.inner, plan)
        self.keep = max(plan.budgets.checkpoints, 1)
        self.may_fail = not plan.has_room_for_checkpoints or not plan.budgets.checkpoints or self.may_break
        self.memory = Memory(self.gradients, self.data.weights)
        self.tables = Tables(self)
        self.arrived: dict[int, None] = dict.fromkeys(self.gradients)
        self.modules = forwards.random_modules(rng, len(plan.layout.parameters))
        self.pending_share = rng.choice((0.0, 0.3, 1.0))
        self.pauses = rng.choice(((0,), (0, 5, 50), (0, 200)))
        """How often something comes between the last gradient and the step."""
        self.steady = rng.choice((0.5, 0.9, 1.0, 1.0))
        """Share of passes that use all modules, in the same order."""
        self.limit = rng.choice((0.0, 0.0, 0.2))
        """Share of steps that are clipped."""
        self.rate = 1.0
        self.scribbled: set[int] = set()
        """Subgroups whose masters were written to since they were updated last."""
        self.images: dict[int, int] = {}
        self.stands_for: dict[int, int] = {}
        """Of each sweep that updates: which step it is of, or is expected to be."""
        self.under_way: dict[int, tuple[npt.NDArray[Any], npt.NDArray[np.uint64]]] = {}
        self.visitors: dict[int, Any] = {}
        self.steps = 0
        self.steps_ahead: dict[int, None] = {}
        self.taken_over: set[tuple[int, int]] = set()
        """Subgroups and steps of versions that have been confirmed."""
        self.failed_ahead: dict[int, tuple[int, int]] = {}
        """Subgroups and steps of versions of which a write was made to fail, by operation."""
        self.open_sweep: Sweep | None = None

    def serve_with(self, thread_type, pending_type, speculation_type=Speculation, index_type=TileIndex) -> None:
        if index_type is not TileIndex:
            stores = [(path.available_bytes, path.share) for path in self.plan.budgets.paths]
            index = index_type(stores, self.plan.slot_counts, self.plan.checkpoint_bytes)
            self.machine = type(self.machine)(self.plan, index)
        super().serve_with(thread_type, pending_type)
        parts = self.thread._parts
        self.thread.speculation = speculation_type(parts, self)
        self.thread.speculation.is_on = True
        handle = self.machine.handle

        def told(event: Event) -> None:
            if isinstance(event, Taken) and isinstance(event.finished, Sweep):
                moved = self.machine.moved, self.executor.moved
                assert moved[0] == moved[1], (
                    f"it does not say which subgroups have moved: {moved}, {self.machine.broken!r}"
                )
            if isinstance(event, Seal):
                self.outcome.counts["confirmed"] += len(event.confirmed)
                self.outcome.counts["revoked"] += len(self.machine.speculative_versions) - len(event.confirmed)
                step = self.open_sweep.step if self.open_sweep is not None else 0
                self.taken_over |= {(subgroup, step) for subgroup in event.confirmed}
            if isinstance(event, Failed) and self.failed_ahead.get(event.op) in self.taken_over:
                self.may_break = self.may_fail = True  # it was confirmed before anybody heard of the failure
            self.outcome.counts["admitted"] += len(event.subgroups) if isinstance(event, Admit) else 0
            before = self.machine.saver.finished_save
            handle(event)
            ended = self.machine.saver.finished_save
            if ended is not None and ended is not before:  # the machine may go on before the session takes note
                super(Session, self).check_saved(ended[1])

        self.machine.handle = told  # type: ignore[method-assign]

    def parts(self) -> Any:
        parts = super().parts()
        parts.plan = self.plan
        parts.tables = parts.kernel = parts.gradients = self.tables
        parts.queue.post = lambda token: None
        parts.memory.arena = lambda nbytes: SimpleNamespace(address=1 << 40)
        parts.memory.give_back = lambda arena: None
        parts.memory.slot_address = lambda slot: 0
        parts.saves.pending = None
        return parts

    # The engine's side

    def open(self, visits: tuple[Visit, ...], visitor: Any) -> Sweep:
        """Return an open sweep."""
        self.executor.visit_with(visitor)
        self.sweeps += 1
        self.stands_for[self.sweeps] = self.steps + 1
        self.open_sweep = Sweep(self.sweeps, self.version_of(self.sweeps), visits, is_open=True)
        self.steps_ahead[self.open_sweep.step] = None
        return self.open_sweep

    def version_of(self, number: int) -> int:
        return 10 * number

    def is_unconfirmed(self, write: WriteTile) -> bool:
        """Return whether a write is of a version that was made ahead, and was not confirmed by now."""
        made = write.tile.subgroup, write.record.step
        return write.record.step in self.steps_ahead and made not in self.taken_over

    def begin_visit(self, run: Run) -> None:
        if run.visit.speculative:
            self.executor.visitor(run)  # makes a table: see `Tables.fill`
        else:
            self.visitors[run.op] = self.executor.visitor

    def visit(self, run: Run, state: np.ndarray) -> None:
        number = run.visit.subgroup
        if not run.visit.speculative:
            visitor = self.visitors.pop(run.op)
            assert visitor is not visit_nothing, "a visit of a sweep of nobody"
            visitor(run, state)
            return
        table, sums = self.under_way.pop(run.op)
        read = self.memory.read(number, table)
        sums[:] = read
        self.images[number] = update(run, state, table, read)
        self.outcome.counts["made"] += 1

    def update_from(self, run: Run, state: np.ndarray, told: Told) -> None:
        number = run.visit.subgroup
        table = table_of(self.plan, number, told)
        self.made(run, update(run, state, table, self.memory.read(number, table)))

    def publish(self, subgroup: int) -> None:
        self.executor.published(subgroup)
        self.data.publish(subgroup)
        self.weights[subgroup] = self.images[subgroup]

    def check_saved(self, error) -> None:
        """It has been told: see `serve_with`."""

    def save(self, flag: bool) -> None:
        if not self.scribbled:  # else a master would change without a step between two checkpoints
            super().save(flag)

    def end_save(self, save, error) -> None:
        assert error is None or self.may_fail or self.machine.broken, f"a save has failed for too little: {error!r}"
        super().end_save(save, error)

    # The caller's side

    def act(self, actions: list[saves.Action]) -> None:
        super().act(actions)
        if self.machine.broken is None and self.rng.random() < 0.5:
            self.forward(False)
            self.close()

    def forward(self, flag: bool) -> None:
        """Use modules and, but for an evaluation (`flag`), have gradients of them arrive in reverse."""
        steady = self.rng.random() < self.steady
        order = [*self.modules]
        if not steady:
            order = self.rng.sample(order, self.rng.randrange(1, len(order) + 1))
        loss = self.loss_of(order)
        if flag:
            return
        for module in reversed(order):
            self.compute()
            self.wait_for_gradients(module)
            for number in module:
                before = self.gradients[number] if number in self.arrived else None
                self.gradients[number] = zlib.crc32(repr((loss, number, before)).encode())
                self.arrived[number] = None
                if self.thread.speculation.begins_pass(number, None):
                    self.thread.speculation.foresee([self.rate], (), None)
                self.thread.speculation.note_arrival(number)
            if self.rng.random() < 0.05:
                self.scribble(False)

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
        """See `saves.Session.allocate`; what steps need and is not there may fail them."""
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
            roomy = self.more.has_room_for_checkpoints or not self.plan.has_room_for_checkpoints
            if roomy and self.machine.saver.under_way is None and self.machine.index.has_room(self.more.slot_counts):
                self.machine.handle(Extend(self.more))
                self.may_fail = True  # the ends of paths may be too short for what the larger plan promises

        with self.thread.turn():
            self.wait(False)
            self.thread.request(begin)

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
            self.arrived, self.used = {}, {}
            number = self.sweeps = self.sweeps + 1
            self.tables.begun = told
            self.thread.sweeps.step_number = number - 1

            def begin() -> Sweep:
                self.thread.speculation.begin_step(active)
                self.allocate()
                done = self.thread.speculation.choose_confirmed(subgroups)
                self.steps += 1
                self.stands_for[number] = self.steps
                order = visit_order([s for s in subgroups if s not in done], self.machine.live_slots)
                visits = update_visits(self.plan, order, self.machine.is_fresh)
                self.executor.visit_with(partial(self.update_from, told=told))
                self.scribbled.difference_update(subgroups)
                self.twin.step(self.steps, subgroups, told, self.gradients)
                rest = Sweep(number, self.version_of(number), visits)
                self.thread.speculation.seal(done, rest)
                return rest

            def applied() -> None:
                self.outcome.counts["steps"] += 1
                self.thread.speculation.end_step(1.0, clip)

            def meanwhile() -> None:
                if self.rng.random() < 0.1:
                    self.machine.handle(Reshare(tuple(self.rng.uniform(0.05, 1.0) for _ in self.plan.budgets.paths)))

            pending = None
            if self.rng.random() < self.pending_share:
                pending = self.pending_type((), partial(forwards.Latch, self))
            self.thread.request(begin, applied, meanwhile, pending, seals=True)

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
            expected = {} if self.twin.states.keys() != {*range(len(machine.phases))} else self.twin.tiles()
            for tile, (location, step, _) in self.executor.stored().items():
                stored = self.data.stores[location.path].slots.get(location.offset)
                newest = self.executor.is_clean(tile.subgroup)
                assert stored is not None, f"{tile} is gone"
                assert (stored.tile, stored.step) == (tile, step), f"{tile} was written over"
                assert not (newest and expected) or stored.payload == expected[tile], f"{tile} is of another version"
