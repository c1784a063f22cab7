"""One seed, one scenario with checkpoints: sweeps, saves, releases, faults at random; a twin says what is right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np
import swarm
from world import (
    CheckedExecutor,
    Crash,
    Disorder,
    FailOperation,
    Fault,
    PathFull,
    ShortTransfer,
    SimData,
    SimExecutor,
    SimulatedCrash,
    SlowLane,
    mix,
)
from world.data import mix_weights

from offload.errors import InternalError, OffloadError
from offload.plan import Plan
from offload.protocols import TileId
from offload.schedule.index import TileIndex
from offload.schedule.loop import pump
from offload.schedule.machine import Machine
from offload.schedule.operations import (
    Allocated,
    Begin,
    BeginSave,
    Cut,
    Event,
    Release,
    Run,
    Save,
    Sweep,
    TakeOver,
    Visit,
)
from offload.schedule.staging import Phase


@dataclass
class Action:
    """What the session does: "sweep", "save" (`flag`: a copy) or "wait" (for the save)."""

    what: str
    flag: bool = False


@dataclass
class Outcome:
    how: str = "done"
    error: BaseException | None = None
    events: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class Twin:
    """State and weights of every subgroup, on plain arrays."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.states: dict[int, np.ndarray] = {}
        self.weights = {s.index: np.zeros(s.numel, np.uint32) for s in plan.layout.subgroups if s.weight_tiles}

    def sweep(self, number: int, visits: tuple[Visit, ...]) -> None:
        for visit in visits:
            run = Run(0, number, visit, None, visit.subgroup not in self.states)
            if not visit.changes:
                continue
            words = self.plan.layout.subgroups[visit.subgroup].state_bytes // 4
            mix(run, self.states.setdefault(visit.subgroup, np.zeros(words, np.uint32)))
            if visit.subgroup in self.weights:
                mix_weights(run, self.weights[visit.subgroup])

    def tiles(self) -> dict[TileId, bytes]:
        """Return what a checkpoint taken now has to hold."""
        found = {}
        for subgroup in self.plan.layout.subgroups:
            for whole, tiles in (
                (self.states[subgroup.index], subgroup.tiles),
                (self.weights.get(subgroup.index), subgroup.weight_tiles),
            ):
                for tile, offset, nbytes in tiles:
                    found[tile] = whole[offset // 4 : (offset + nbytes) // 4].tobytes()
        return found


def random_actions(rng: random.Random) -> list[Action]:
    actions = [Action("sweep")]
    for _ in range(rng.randrange(3, 9)):
        what = rng.choice(("sweep", "sweep", "save", "save", "wait"))
        actions.append(Action(what, rng.random() < 0.3))
    return [*actions, Action("wait")]


def random_faults(rng: random.Random, plan: Plan, actions: list[Action]) -> tuple[Fault, ...]:
    transfers = sum(len(s.tiles) for s in plan.layout.subgroups) * len(actions)
    faults: list[Fault] = []
    paths = len(plan.budgets.paths)
    if rng.random() < 0.5:
        number = rng.randrange(transfers)
        faults.append(
            rng.choice(
                [
                    FailOperation("write", number),
                    FailOperation("sync", rng.randrange(4)),
                    FailOperation("commit", rng.randrange(3)),
                    FailOperation("read", number),
                    ShortTransfer("write", number),
                    PathFull(rng.randrange(paths), rng.random()),
                    SlowLane(f"write:{rng.randrange(paths)}", rng.random(), 30.0),
                ]
            )
        )
    if rng.random() < 0.5:
        faults.append(Crash(rng.randrange(1, 3 * transfers)))
    return tuple(faults)


def run_seed(
    seed: int,
    machine_type: type[Machine] = Machine,
    *,
    self_check: bool = True,
    crash: int | None = None,
    session_type: type[Session] | None = None,
    actions: Callable[[random.Random], list[Action]] = random_actions,
) -> Outcome:
    """Run one scenario; raise if anything is not as it has to be."""
    make_session, make_actions = session_type or Session, actions
    rng = random.Random(seed)
    layout = swarm.random_layout(rng)
    plan = swarm.tight_plan(rng, layout)
    if rng.random() < 0.8:  # room for checkpoints
        paths = tuple(replace(path, available_bytes=path.available_bytes + (1 << 30)) for path in plan.budgets.paths)
        plan = replace(plan, budgets=replace(plan.budgets, paths=paths))
    actions = make_actions(rng)
    faults = random_faults(rng, plan, actions)
    if crash is not None:
        faults = (Crash(crash),)
    rates = swarm.random_rates(rng, plan)
    disorder = Disorder() if rng.random() < 0.3 else Disorder(rng.choice((0.0, 0.5, 5.0)), rng.randrange(1, 4), 0.0)
    session = make_session(seed, plan, rates, faults, disorder, rng, machine_type, self_check)
    outcome = session.run(actions)
    for life in range(rng.randrange(1, 3)):  # whatever happened: go on from the checkpoint that is left, if there is
        actions = make_actions(rng)
        faults = random_faults(rng, plan, actions)
        following = make_session(seed + life + 1, plan, rates, faults, disorder, rng, machine_type, self_check)
        if not following.resume(session):
            break
        session = following
        outcome.counts["resumed"] += 1
        later = session.run(actions)
        outcome.counts.update(later.counts)
        outcome.counts["crashed later"] += later.how == "crashed"
    return outcome


class Session:
    """What the engine's session does with machine and executor, in short."""

    def __init__(self, seed, plan, rates, faults, disorder, rng, machine_type, self_check) -> None:
        self.plan, self.rng, self.self_check = plan, rng, self_check
        stores = [(path.available_bytes, path.share) for path in plan.budgets.paths]
        self.machine = machine_type(plan, TileIndex(stores, plan.slot_counts, plan.checkpoint_bytes))
        self.data = SimData(plan, lambda run, state: mix(run, state))
        self.inner = SimExecutor(plan, rates, faults, seed, self.data, disorder)
        self.executor = CheckedExecutor(self.inner, plan)
        self.twin = Twin(plan)
        self.outcome = Outcome()
        self.expected: dict[int, dict[TileId, bytes]] = {}
        self.kept: list[int] = []  # committed without a sink, not released
        self.copies: list[int] = []
        self.keep = rng.choice((1, 1, 2))
        self.sweeps = self.saves = 0
        self.filled: set[int] = set()
        """Subgroups that have been visited, or taken up."""
        self.may_break = any(not isinstance(fault, SlowLane | Crash) for fault in faults)

    def tell(self, event: Event) -> None:
        """Tell the machine, and the checker, of something that no lane reports."""
        self.executor.observe(event)
        self.machine.handle(event)

    def allocate(self) -> bool:
        """Have the room of planned slots be there, as `SessionParts.allocate` does; return whether it is."""
        index = self.machine.index
        if not index.is_whole:
            self.tell(Cut())
            ends = tuple(map(index.end_bytes, range(len(self.plan.budgets.paths))))
            if self.inner.allocate(ends):
                self.tell(Allocated(ends))
        return index.is_whole

    def resume(self, before: Session) -> bool:
        """Go on from the newest checkpoint that another session, which was killed, has left; False if there is none.

        It goes on in the same stores, as the engine's session does when it takes them over.
        """
        sink = len(self.plan.budgets.paths)
        committed = {
            number: records
            for number, records in sorted(before.data.committed.items())
            if all(record.location.path < sink for record in records.values())
        }
        if not committed:
            return False
        before.data.crash(self.rng)  # of what was never synced nothing is promised
        newest = max(committed)
        streamed = [s for s in self.plan.layout.subgroups if not self.plan.is_resident(s.index)]
        records = {tile: committed[newest][tile] for s in streamed for tile, _, _ in s.tiles}
        limits = {n: path.available_bytes for n, path in enumerate(self.plan.budgets.paths)}
        trial = deepcopy(self.machine.index)
        for path in limits:
            held = Counter(r.location for each in committed.values() for r in each.values())
            trial.take_over(path, limits[path], {x: n for x, n in held.items() if x.path == path})
        if not trial.fits():
            return False
        self.data.stores, self.data.committed = before.data.stores, dict(committed)
        self.expected, self.kept = {n: before.expected[n] for n in committed}, list(committed)
        self.saves, self.sweeps = before.saves, before.sweeps
        self.tell(TakeOver(limits, committed, records))
        for subgroup in self.plan.layout.subgroups:
            found = self.expected[newest]
            if subgroup in streamed:
                whole = b"".join(found[tile] for tile, _, _ in subgroup.tiles)
                self.twin.states[subgroup.index] = np.frombuffer(whole, np.uint32).copy()
            if subgroup.weight_tiles:
                whole = b"".join(found[tile] for tile, _, _ in subgroup.weight_tiles)
                for weights in (self.twin.weights, self.data.weights):
                    weights[subgroup.index] = np.frombuffer(whole, np.uint32).copy()
        self.filled = {subgroup.index for subgroup in streamed}
        return True

    def run(self, actions: list[Action]) -> Outcome:
        try:
            self.act(actions)
            if self.machine.broken is not None:
                assert self.may_break, f"it broke for too little: {self.machine.broken!r}"
                assert isinstance(self.machine.broken, OffloadError)
                assert not isinstance(self.machine.broken, InternalError)
                self.outcome.how, self.outcome.error = "broken", self.machine.broken
        except SimulatedCrash:
            self.outcome.how = "crashed"
        self.outcome.events = self.inner.events
        # Whatever has happened: what was committed and not released is there, and nothing else passes for it.
        found = self.data.committed
        assert set(self.kept) | set(self.copies) <= set(found), "a committed checkpoint is gone"
        for number in found:
            self.verify(number, found[number])
        return self.outcome

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if self.machine.broken is None:
                getattr(self, action.what)(action.flag)

    def verify(self, number: int, records) -> None:
        expected = self.expected[number]
        assert sorted(records) == sorted(expected), "a checkpoint does not have every tile"
        for tile, record in records.items():
            stored = self.data.stores[record.location.path].slots.get(record.location.offset)
            assert stored is not None, f"save {number}: {tile} is lost or torn"
            assert (stored.tile, stored.step) == (tile, record.step), f"save {number}: {tile} was written over"
            assert stored.payload == expected[tile], f"save {number}: {tile} is of another moment"

    def pump(self, until) -> None:
        """Pump until something holds (or the machine breaks), taking note of a save that ends on the way."""

        def reached(machine: Machine) -> bool:
            assert self.inner.events < 20 * swarm.MAX_EVENTS, "it goes on for ever"
            if self.self_check:
                machine.check()
            return machine.saver.finished_save is not None or machine.broken is not None or until(machine)

        while True:
            pump(self.machine, self.executor, reached)
            ended = self.machine.take_finished_save()
            if ended is None:
                return
            self.end_save(*ended)

    def check_saved(self, error: Exception | None) -> None:
        if self.machine.broken is None or error is None:
            self.executor.save_ended(well=error is None)

    def end_save(self, save: Save, error: Exception | None) -> None:
        self.check_saved(error)
        if error is not None:
            self.outcome.counts["failed"] += 1
            return
        self.outcome.counts["copied" if save.sink is not None else "saved"] += 1
        self.verify(save.number, self.data.committed[save.number])
        if save.sink is not None:
            self.copies.append(save.number)
            return
        assert self.executor.saved()[save.number] == self.machine.saver.held_records[save.number]
        self.kept.append(save.number)
        while len(self.kept) > self.keep:
            old = self.kept.pop(0)
            del self.data.committed[old]
            self.tell(Release(old))

    def sweep(self, flag: bool) -> None:
        self.sweeps += 1
        count = len(self.plan.layout.subgroups)
        visits = swarm.random_sweep(self.rng, self.plan)
        unfilled = [s for s in range(count) if s not in self.filled]
        if unfilled:  # nothing stays fresh
            visits = tuple(Visit(s, gpu=self.plan.at_home_on_gpu(s)) for s in unfilled)
            self.filled = set(range(count))
        # Its visits change weights that are masters: those have been saved by then.
        self.pump(lambda machine: not machine.saver.has_unwritten_weights)
        if self.machine.broken is not None:
            return
        sweep = Sweep(self.sweeps, 10 * self.sweeps, visits)
        self.inner.inject(Begin(sweep))
        self.pump(lambda machine: machine.finished_sweep is not None)
        if self.machine.finished_sweep is None:
            return
        assert self.machine.take_finished_sweep() is sweep
        self.executor.ended(well=not self.machine.failed)
        if not self.machine.failed:
            self.twin.sweep(sweep.number, visits)

    def wait(self, flag: bool) -> None:
        self.pump(lambda machine: machine.saver.under_way is None)

    def save(self, flag: bool) -> None:
        self.wait(False)
        self.pump(lambda machine: Phase.BUSY not in machine.phases)
        if self.machine.broken is not None:
            return
        if self.copies and flag:
            flag = False  # one copy a run: there is one store for them
        self.saves += 1
        save = Save(self.saves, len(self.plan.budgets.paths) if flag else None)
        self.expected[self.saves] = self.twin.tiles()
        self.tell(BeginSave(save))
        self.pump(lambda machine: not machine.saver.has_unwritten_weights)


def run_seeds(run_seed: Callable[[int], Outcome], seeds: range) -> Counter[str]:
    """Run seeds; count how they ended, and what they counted."""
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcome = run_seed(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        found[outcome.how] += 1
        found.update(outcome.counts)
    return found
