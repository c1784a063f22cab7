"""One seed, one scenario whose caller goes on while a step does: through forward and backward passes, at random.

The session's own `EngineThread` and `PendingStep` run here, without a thread: whoever waits drives the engine, event
by event. Gradients depend on the weights that a forward pass has read, and state on gradients: a weight that is read
too early, or a gradient that is written too early, shows in all bits that follow.

Non-goals: what only real threads can do to each other, and modules of torch (tests/e2e/test_overlap_forward.py); the
order of streams on a GPU (tests/kernels/test_gpu.py).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import saves
import swarm
from world import (
    CheckedExecutor,
    CorruptPayload,
    Disorder,
    MisdirectedWrite,
    mix,
)

from offload import waits
from offload._native import CompletionQueue
from offload.device.none import NO_LANES
from offload.engine.executor import visit_nothing
from offload.errors import (
    CheckpointError,
    InternalError,
    OffloadError,
    SessionBrokenError,
    StepAbortedError,
    TierError,
)
from offload.plan import Plan, visit_order
from offload.schedule.loop import pump
from offload.schedule.machine import Machine
from offload.schedule.operations import (
    Begin,
    BeginSave,
    Done,
    Event,
    Failed,
    GiveUp,
    Run,
    Save,
    Stop,
    Sweep,
    Taken,
    Transfer,
    Visit,
)
from offload.schedule.runs import update_visits
from offload.schedule.staging import Phase
from offload.session.step import PendingStep
from offload.session.thread import EngineThread


class Lanes(CheckedExecutor):
    """The checked executor, with what the engine thread wants of it besides."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.requests = 0
        self.visitor: Any = visit_nothing

    def visit_with(self, visitor: Any) -> None:
        self.visitor = visitor

    def end_turn(self) -> None:
        """Nobody asks how long the engine's thread works."""


class Latch(waits.Latch):
    """A latch whose wait drives the engine."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def wait(self, pause_s: float | None = None) -> bool:
        self._session.go_on_until(self.is_set)
        return True


class Twin(saves.Twin):
    """State and weights of a session that does one thing after the other."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.made: dict[int, int] = {}
        """Weights of each subgroup."""

    def sweep(self, number: int, visits: tuple[Visit, ...], gradients: dict[int, int] | None = None) -> None:
        super().sweep(number, visits)
        for visit in visits:
            if visit.changes:
                state = self.states[visit.subgroup]
                state += gradient_of(self.plan, visit.subgroup, gradients or {})
                self.made[visit.subgroup] = zlib.crc32(state)


def gradient_of(plan: Plan, subgroup: int, gradients: dict[int, int]) -> np.uint32:
    """Return what a visit adds to each word of its state for the gradients that it reads."""
    numbers = sorted({segment.parameter for segment in plan.layout.subgroups[subgroup].segments})
    return np.uint32(zlib.crc32(repr([(n, gradients.get(n)) for n in numbers]).encode()))


def random_modules(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Return the parameters of each module; every parameter has one that owns it, and perhaps others."""
    owners = [rng.randrange(count) for _ in range(count)]
    modules = [[n for n in range(count) if owners[n] == module] for module in range(count)]
    for module in modules:
        if rng.random() < 0.2:
            module.append(rng.randrange(count))
    return [tuple(dict.fromkeys(module)) for module in modules if module]


def random_actions(rng: random.Random) -> list[saves.Action]:
    """Return what a caller does: iterations, and what else it asks for."""
    actions = [saves.Action("step")]
    for _ in range(rng.randrange(2, 7)):
        while rng.random() < 0.35:
            actions.append(saves.Action(rng.choice(("forward", "sweep", "save", "save", "wait", "finish")), True))
        actions.append(saves.Action("forward"))
        if rng.random() < 0.2:
            actions.append(saves.Action(rng.choice(("save", "finish"))))
        actions.append(saves.Action("step"))
    return actions


def run_seed(
    seed: int,
    machine_type: type[Machine] = Machine,
    thread_type: type[EngineThread] = EngineThread,
    pending_type: type[PendingStep] = PendingStep,
    session_type: type[Session] | None = None,
    *,
    self_check: bool = True,
) -> saves.Outcome:
    """Run one scenario; raise if anything is not as it has to be."""
    rng = random.Random(seed)
    plan = swarm.tight_plan(rng, swarm.random_layout(rng))
    if rng.random() < 0.8:  # room for checkpoints
        paths = tuple(replace(path, available_bytes=path.available_bytes + (1 << 30)) for path in plan.budgets.paths)
        plan = replace(plan, budgets=replace(plan.budgets, paths=paths))
    actions = random_actions(rng)
    faults = saves.random_faults(rng, plan, actions) if rng.random() < 0.4 else ()
    if rng.random() < 0.2:
        drawn = swarm.draw_faults(seed, paths=len(plan.budgets.paths), operations=4 * len(actions))
        # What the medium does to a checkpoint is nobody's fault.
        faults += tuple(fault for fault in drawn if not isinstance(fault, CorruptPayload | MisdirectedWrite))
    rates = swarm.random_rates(rng, plan)
    disorder = Disorder() if rng.random() < 0.3 else Disorder(rng.choice((0.0, 0.5, 5.0)), rng.randrange(1, 4), 0.0)
    session = (session_type or Session)(seed, plan, rates, faults, disorder, rng, machine_type, self_check)
    session.serve_with(thread_type, pending_type)
    if rng.random() < 0.05:
        session.stop(rng.random() * 0.2)
    return session.run(actions)


class Session(saves.Session):
    """A caller, and the session that it asks."""

    executor: Lanes
    twin: Twin
    thread: EngineThread

    def __init__(self, seed, plan, rates, faults, disorder, rng, machine_type, self_check) -> None:
        super().__init__(seed, plan, rates, faults, disorder, rng, machine_type, self_check)
        self.executor = Lanes(self.inner, plan)
        self.twin = Twin(plan)
        self.data.update, self.data.pushed = self.visit, self.pushed
        self.modules = random_modules(rng, len(plan.layout.parameters))
        self.paces = rng.choice(((0,), (0, 0, 0, 0, 1), (0, 0, 1, 2, 5), (0, 1, 5, 60)))
        """Events that come between two things that the caller does."""
        self.weights: dict[int, int] = {}
        self.passing: dict[int, int] = {}
        """Weights in each weight slot."""
        self.gradients = {number: number for number in range(len(plan.layout.parameters))}
        """What lies in each parameter's gradient slot."""
        self.arrived = dict.fromkeys(self.gradients)
        """Parameters that have a gradient for the next step."""
        self.read: tuple[int, ...] = ()
        """Parameters whose gradients the last step reads."""
        self.used: dict[int, None] = {}
        """Parameters that forward passes have used since then, in order."""
        self.awaited: Sequence[int] | None = None
        self.saving: Save | None = None
        self.failures: list[int] = []
        """Sweeps that have failed."""
        self.told: list[int] = []
        """Sweeps of whose failure the caller has been told."""

    def serve_with(self, thread_type: type[EngineThread], pending_type: type[PendingStep]) -> None:
        """Make the engine thread, which is none."""
        parts = self.parts()
        self.thread, self.pending_type = thread_type(parts), pending_type
        handle = self.machine.handle

        def told(event: Event) -> None:
            """Have the checker see what no lane reports, too."""
            if isinstance(event, Taken) and isinstance(event.finished, Sweep):
                self.executor.ended(well=not self.machine.failed)
                if self.machine.failed:
                    self.failures.append(event.finished.number)
            elif not isinstance(event, Done | Failed | Stop):
                self.executor.observe(event)
            handle(event)
            self.thread.broken = self.machine.broken

        self.machine.handle = told  # type: ignore[method-assign]

    def parts(self) -> Any:
        """Return what the engine thread works with."""
        return SimpleNamespace(
            machine=self.machine,
            executor=self.executor,
            lanes=NO_LANES,
            is_whole=True,
            queue=SimpleNamespace(exchange=self.exchange),
            saves=SimpleNamespace(end_pending=self.saved, last_folder=None),
            memory=SimpleNamespace(drop_checkpoint_buffers=lambda: None),
            gradients=SimpleNamespace(return_borrowed=lambda: None, end_final=lambda: None),
        )

    def tell(self, event: Event) -> None:
        self.machine.handle(event)

    def stop(self, at_s: float) -> None:
        """Have the watchdog give up some time."""
        self.inner.inject(Stop(TierError("wait", tier="simulated", path="lanes", detail="no answer")), at_s)
        self.may_break = True

    # The engine's side

    def go_on(self) -> None:
        """Let one thing happen, and do what is due then."""
        assert self.inner.events < 20 * swarm.MAX_EVENTS, "it goes on for ever"
        machine, thread = self.machine, self.thread
        self.executor.submit(machine.take_operations())
        if not thread.is_due(machine):
            for event in self.executor.wait():
                machine.handle(event)
            self.executor.submit(machine.take_operations())
        if self.self_check:
            machine.check()
        while thread.is_due(machine):
            assert thread.serve_due()

    def go_on_until(self, arrived: Callable[[], object]) -> None:
        while not arrived():
            self.go_on()
            if self.awaited is not None and not arrived():
                waits_for = [s for s in self.awaited if not self.executor.is_ended(s)]
                assert waits_for, f"it waits for subgroups {self.awaited}, which have been visited"

    def begin(self, sweep: Sweep) -> Sweep:
        self.machine.handle(Begin(sweep))
        return sweep

    def exchange(self, request: int, reply: CompletionQueue, quiet_s: float, interrupt: int) -> None:
        self.executor.requests += 1
        self.go_on_until(lambda: reply.wait(0.0))

    def saved(self, error: Exception | None, broke: bool) -> tuple[int, ...]:
        assert self.saving is not None
        self.end_save(self.saving, error)
        return ()

    def visit(self, run: Run, state: np.ndarray) -> None:
        if self.executor.visitor is not visit_nothing:
            self.executor.visitor(run, state)
        else:
            assert self.machine.broken is not None, "a visit of a sweep of nobody"

    def update(self, run: Run, state: np.ndarray, reads: Iterable[int] = ()) -> None:
        """Change state, read gradients, write weights."""
        if not run.visit.changes:
            return
        mix(run, state)
        state += gradient_of(self.plan, run.visit.subgroup, {number: self.gradients[number] for number in reads})
        self.made(run, zlib.crc32(state))

    def made(self, run: Run, made: int) -> None:
        """Put new weights where they belong, or on their way there."""
        if run.visit.gpu or run.through is None:
            self.weights[run.visit.subgroup] = made
        else:
            self.passing[run.through] = made

    def pushed(self, push: Transfer) -> None:
        self.weights[push.subgroup] = self.passing[push.through]

    # The caller's side

    def act(self, actions: list[saves.Action]) -> None:
        for action in (*actions, saves.Action("finish"), saves.Action("look"), saves.Action("finish")):
            # A caller that was told goes on to ask, and is refused.
            what = "refused" if self.failures and self.failures == self.told else action.what
            try:
                getattr(self, what)(action.flag)
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
            self.executor.let_on(self.awaited)
        finally:
            self.awaited = None
        self.outcome.counts["let on beside a sweep"] += not self.machine.idle

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
            self.used.update(dict.fromkeys(module))
        return loss

    def forward(self, flag: bool) -> None:
        """Use modules in some order and, but for an evaluation (`flag`), leave gradients of them in reverse."""
        order = self.rng.sample(self.modules, self.rng.randrange(1, len(self.modules) + 1))
        if self.rng.random() < 0.2:
            order.append(self.rng.choice(order))
        loss = self.loss_of(order)
        if flag:
            return
        # Some arrive though their module was not called: whoever writes to `.grad` may do so at any time.
        order += [module for module in self.modules if module not in order and self.rng.random() < 0.5]
        for module in reversed(order):
            self.compute()
            self.wait_for_gradients(module)
            for number in module:
                before = self.gradients[number] if number in self.arrived else None
                self.gradients[number] = zlib.crc32(repr((loss, number, before)).encode())
            self.arrived.update(dict.fromkeys(module))

    def wait_for_gradients(self, module: tuple[int, ...]) -> None:
        self.wait_for(module)

    def step(self, flag: bool) -> None:
        """Begin to update what has gradients, in the order in which it was used."""
        with self.thread.turn():
            place = {number: place for place, number in enumerate(self.used)}
            active = sorted(self.arrived, key=lambda number: place.get(number, len(place)))
            gradients = {number: self.gradients[number] for number in active}
            places = self.plan.layout.places
            subgroups = tuple(dict.fromkeys(subgroup for number in active for subgroup, _ in places[number]))
            self.arrived, self.used, self.read = {}, {}, tuple(active)
            number = self.sweeps = self.sweeps + 1
            self.thread.sweeps.step_number = number - 1

            def begin() -> Sweep:
                order = visit_order(subgroups, self.machine.slots)
                visits = update_visits(self.plan, order, self.machine.is_fresh)
                self.executor.visit_with(partial(self.update, reads=self.read))
                self.twin.sweep(number, visits, gradients)
                return self.begin(Sweep(number, 10 * number, visits))

            pending = self.pending_type((), partial(Latch, self))
            self.thread.request(begin, pending=pending)
            self.outcome.counts["steps"] += 1

    def sweep(self, flag: bool) -> None:
        """Have something else done to the state, and wait for it."""
        self.ask(swarm.random_sweep(self.rng, self.plan), self.update)

    def look(self, flag: bool) -> None:
        """Compare all state."""
        looked: list[int] = []

        def compare(run: Run, state: np.ndarray) -> None:
            looked.append(run.visit.subgroup)
            assert np.array_equal(state, self.twin.states[run.visit.subgroup]), "state is not what it has to be"

        everything = range(len(self.plan.layout.subgroups))
        self.ask(tuple(Visit(s, changes=False, gpu=self.plan.at_home_on_gpu(s)) for s in everything), compare)
        assert sorted(looked) == [*everything]

    def ask(self, visits: tuple[Visit, ...], visitor: Callable[[Run, np.ndarray], None]) -> None:
        with self.thread.turn():
            number = self.sweeps = self.sweeps + 1

            def begin() -> Sweep:
                self.executor.visit_with(visitor)
                return self.begin(Sweep(number, 10 * number, visits))

            self.thread.request(begin, lambda: self.twin.sweep(number, visits))

    def finish(self, flag: bool) -> None:
        self.thread.finish_pending()

    def wait(self, flag: bool) -> None:
        saver = self.machine.saver
        self.go_on_until(lambda: saver.under_way is None and saver.finished_save is None)

    def save(self, flag: bool) -> None:
        machine, executor = self.machine, self.executor

        def begin() -> None:
            pump(machine, executor, lambda m: m.broken is not None or Phase.BUSY not in m.phases)
            if machine.broken is not None:
                raise machine.broken
            self.saves += 1
            copies = flag and not self.copies  # there is one store for them
            self.saving = Save(self.saves, len(self.plan.budgets.paths) if copies else None)
            self.expected[self.saves] = self.twin.tiles()
            machine.handle(BeginSave(self.saving))
            if self.inner.filled and not copies and machine.saver.under_way and not saves.Session.allocate(self):
                self.may_fail = True
                executor.submit(machine.take_operations())
                machine.handle(GiveUp(CheckpointError("there is no room")))
            pump(machine, executor, lambda m: not m.saver.has_unwritten_weights or m.saver.finished_save is not None)

        with self.thread.turn():
            self.wait(False)
            self.thread.request(begin)
