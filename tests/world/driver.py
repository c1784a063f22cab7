"""One driver of seeds: a seed draws a plan, what is asked for, rates, disorder and faults; then actors act.

A `Driver` is what a session does with machine and executor, in short. Actors are its subclasses: each has a method
for all that it does, draws what it does (`actions`), and knows by a twin on plain arrays what has to come out. The
checker watches all of them. `run_seed` is a seed's run, over several lives where an actor goes on after a crash.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from offload.dtypes import DtypeCode
from offload.errors import InternalError, OffloadError
from offload.layout import Layout, Parameter, build_layout
from offload.plan import NO_GPU, Budgets, GpuRates, PathBudget, PathRates, Placement, Plan, Rates, make_plan
from offload.plan.budget import least_slot_bytes
from offload.protocols import SECTOR_BYTES, TileId
from offload.schedule.index import TileIndex, TileRecord
from offload.schedule.loop import pump
from offload.schedule.machine import Machine
from offload.schedule.operations import Allocated, BeginSweep, Event, MakeSlots, RunVisit, Sweep, Visit
from offload.schedule.runs import update_visits
from world.checker import CheckedExecutor
from world.data import SimData, State, mix, mix_weights
from world.executor import Disorder, SimExecutor
from world.faults import (
    Crash,
    FailOperation,
    Fault,
    MisdirectedWrite,
    PathFull,
    SimulatedCrash,
    SlowLane,
)

MAX_EVENTS = 100_000
CHECKED_EVERY = 3
"""Events after which the machine looks at its invariants: what is wrong stays wrong, and to look takes long."""
ROOMY_BYTES = 1 << 40
DTYPES = [DtypeCode.BFLOAT16, DtypeCode.FLOAT32]


class Action(NamedTuple):
    """What an actor does: the name of its method, and what that is given."""

    what: str
    value: Any = False


@dataclass
class Scenario:
    """What a seed has drawn for one life."""

    seed: int
    """Of what lanes draw."""
    plan: Plan
    actions: list[Action]
    faults: tuple[Fault, ...]
    rates: Rates
    disorder: Disorder
    grown: Plan | None = None
    """What the plan becomes; None for what it is."""


@dataclass
class Outcome:
    """How a run ended: "done", "broken" (with the error), "crashed" or "full"; and what was counted."""

    how: str = "done"
    error: BaseException | None = None
    events: int = 0
    counts: Counter[str] = field(default_factory=Counter)


# What is drawn


def random_layout(rng: random.Random) -> Layout:
    parameters = [
        Parameter(f"p{i}", rng.randrange(1, 5000), rng.choice(DTYPES), rng.randrange(2))
        for i in range(rng.randrange(1, 6))
    ]
    return build_layout(parameters, rng.choice((1024, 1024, 2048, 4096)), rng.choice((4096, 4096, 8192, 16384)))


def random_plan(rng: random.Random) -> Plan:
    """Return a plan whose paths offer no byte more than it demands (or, for some seeds, plenty)."""
    layout = random_layout(rng)
    paths = rng.randrange(1, 5)
    host_bytes = rng.choice((0, 0, 0, layout.state_bytes // 3, layout.state_bytes // 2, layout.state_bytes))
    slot_bytes = max(layout.max_subgroup_bytes, least_slot_bytes(layout.state))
    staging_bytes = rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6)) * slot_bytes
    shares = [rng.choice((0.1, 1.0, 1.0, 3.0)) for _ in range(paths)]
    budgets = Budgets(host_bytes, staging_bytes)
    placements: tuple[Placement, ...] = ()
    if rng.random() < 0.5:
        gpu_bytes = rng.choice((0, 0, layout.state_bytes // 4, layout.state_bytes))
        gpu_staging_bytes = rng.randrange(1, 5) * layout.max_subgroup_bytes
        placements = random_placements(rng, len(layout.subgroups))
        budgets = replace(
            budgets, gpu_bytes=gpu_bytes, gpu_staging_bytes=gpu_staging_bytes, weights_on_gpu=rng.random() < 0.7
        )
    return tight(rng, layout, budgets, shares, placements)


def random_placements(rng: random.Random, count: int) -> tuple[Placement, ...]:
    return tuple(Placement.GPU if rng.random() < 0.5 else Placement.CPU for _ in range(count))


def tight(
    rng: random.Random, layout: Layout, budgets: Budgets, shares: list[float], placements: tuple[Placement, ...] = ()
) -> Plan:
    """Return the plan with paths of such shares and no byte more than it demands (or, for some seeds, plenty)."""

    def plan(limits: list[int]) -> Plan:
        paths = (PathBudget(f"path{n}", *offer) for n, offer in enumerate(zip(limits, shares, strict=True)))
        return make_plan(layout, replace(budgets, paths=tuple(paths)), placements=placements)

    roomy, others = plan([ROOMY_BYTES] * len(shares)), len(shares) - 1
    if not roomy.staging_slots or rng.random() < 0.3:
        return roomy
    demand = roomy.storage_bytes + (max(roomy.slot_counts) + SECTOR_BYTES) * others
    cuts = sorted(rng.randrange(demand + 1) for _ in range(others))
    return plan([stop - start for start, stop in zip([0, *cuts], [*cuts, demand], strict=True)])


def with_room(plan: Plan, nbytes: int, only: int | None = None) -> Plan:
    """Return a plan whose paths have more room, each; or one of them."""
    more = [nbytes if only in (None, number) else 0 for number in range(len(plan.budgets.paths))]
    pairs = zip(plan.budgets.paths, more, strict=True)
    paths = tuple(replace(path, available_bytes=path.available_bytes + room) for path, room in pairs)
    return replace(plan, budgets=replace(plan.budgets, paths=paths))


def random_sweep(rng: random.Random, plan: Plan) -> tuple[Visit, ...]:
    """Return a step on the plan's devices, or another sweep, which visits on the GPU only what is at home there.

    Now and then it uses the GPU's staging slots, too, where all subgroups fit.
    """
    count = len(plan.layout.subgroups)
    if rng.random() < 0.5:
        return update_visits(plan, rng.sample(range(count), count))
    fits = plan.gpu_slots > 0 and plan.gpu_slot_bytes == plan.layout.max_subgroup_bytes
    visits = []
    for visit in random_visits(rng, count):
        gpu = plan.at_home_on_gpu(visit.subgroup) or (fits and rng.random() < 0.3)
        weight_bytes = plan.layout.subgroups[visit.subgroup].weight_bytes if plan.weights_on_gpu and not gpu else 0
        visits.append(replace(visit, gpu=gpu, weight_bytes=weight_bytes, fetches=weight_bytes > 0))
    return tuple(visits)


def random_visits(rng: random.Random, count: int) -> tuple[Visit, ...]:
    wanted = [s for s in range(count) if rng.random() < 0.7] if rng.random() < 0.5 else list(range(count))
    if rng.random() < 0.2:
        rng.shuffle(wanted)
    match rng.randrange(6):
        case 0:
            return tuple(Visit(s, changes=False) for s in wanted)
        case 1:
            return tuple(Visit(s, overwrites=True) for s in wanted)
        case 2:
            changes = [rng.random() < 0.6 for _ in wanted]
            return tuple(Visit(s, c, c and rng.random() < 0.3) for s, c in zip(wanted, changes, strict=True))
        case _:
            return tuple(Visit(s) for s in wanted)


def everything(plan: Plan) -> tuple[Visit, ...]:
    """Return the visits that look at all state."""
    return tuple(Visit(s.index, changes=False, gpu=plan.at_home_on_gpu(s.index)) for s in plan.layout.subgroups)


def random_rates(rng: random.Random, plan: Plan) -> Rates:
    """Return rates that have nothing to do with each other."""

    def speed() -> float:
        return 10 ** rng.uniform(5, 8)

    paths = tuple(PathRates(speed(), speed(), rng.choice((0.0, 1e-4))) for _ in plan.budgets.paths)
    return Rates(speed(), paths, GpuRates(speed(), speed(), speed()) if plan.uses_gpu else NO_GPU)


def random_disorder(rng: random.Random, lags_s: tuple[float, ...]) -> Disorder:
    """Return how lanes end; `lags_s`: how late that may be seen."""
    even = rng.random() < 0.3
    lag_s = rng.choice(lags_s) if lags_s else 0.0
    return Disorder() if even else Disorder(rng.choice((0.0, 0.5, 5.0)), rng.randrange(1, 4), lag_s)


def random_faults(rng: random.Random, plan: Plan, actions: list[Action]) -> tuple[Fault, ...]:
    """Return what may happen to a session that saves."""
    transfers = sum(len(s.tiles) for s in plan.layout.subgroups) * len(actions)
    faults: list[Fault] = []
    paths = len(plan.budgets.paths)
    if rng.random() < 0.5:
        number = rng.randrange(transfers)
        kinds: list[Fault] = [
            FailOperation("write", number),
            FailOperation("sync", rng.randrange(4)),
            FailOperation("commit", rng.randrange(3)),
            FailOperation("read", number),
            FailOperation("write", number, None),
            PathFull(rng.randrange(paths), rng.random()),
            SlowLane(f"write:{rng.randrange(paths)}", rng.random(), 30.0),
        ]
        faults.append(rng.choice(kinds))
    if rng.random() < 0.5:
        faults.append(Crash(rng.randrange(1, 3 * transfers)))
    return tuple(faults)


# What is right


def checksum(words: State) -> int:
    return zlib.crc32(words.tobytes())


class Twin:
    """State and weights of every subgroup, on plain arrays."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.states: dict[int, State] = {}
        self.weights = {s.index: np.zeros(s.numel, np.uint32) for s in plan.layout.subgroups if s.weight_tiles}

    def sweep(self, number: int, visits: tuple[Visit, ...]) -> None:
        for visit in visits:
            run = RunVisit(0, number, visit, None, visit.subgroup not in self.states)
            if not visit.changes:
                continue
            words = self.plan.layout.subgroups[visit.subgroup].state_bytes // 4
            mix(run, self.states.setdefault(visit.subgroup, np.zeros(words, np.uint32)))
            if visit.subgroup in self.weights:
                mix_weights(run, self.weights[visit.subgroup])

    def checksum(self, subgroup: int) -> int | None:
        """Return that of a subgroup's state, None as long as nothing has filled it."""
        return checksum(self.states[subgroup]) if subgroup in self.states else None

    def tiles(self) -> dict[TileId, bytes]:
        """Return what a checkpoint taken now has to hold."""
        found = {}
        for subgroup in self.plan.layout.subgroups:
            wholes = (self.states, subgroup.tiles), (self.weights, subgroup.weight_tiles)
            for words, tiles in wholes:
                for tile, offset, nbytes in tiles:
                    found[tile] = words[subgroup.index][offset // 4 : (offset + nbytes) // 4].tobytes()
        return found


# The driver


class Driver:
    """What a session does with machine and executor, in short; an actor draws what that is.

    It gets the scenario that was drawn, what draws the rest on the way, and what `run_seed` is given.
    """

    lanes: type[SimExecutor] = SimExecutor
    checked: type[CheckedExecutor] = CheckedExecutor
    memory: type[SimData] = SimData
    twins: type[Twin] = Twin
    lags_s: tuple[float, ...] = ()
    keeps_lanes = False
    """Whether all lives have the lanes of the first."""

    def __init__(
        self, scenario: Scenario, rng: random.Random, wrong: tuple[type, ...] = (), *, self_check: bool = True
    ) -> None:
        self.scenario, self.rng, self.wrong, self.self_check = scenario, rng, wrong, self_check
        plan = self.plan = scenario.plan
        whole = scenario.grown or plan
        stores = [(path.available_bytes, path.share) for path in plan.budgets.paths]
        index = self.kind(TileIndex)(stores, plan.slot_counts, plan.checkpoint_bytes)
        self.machine = self.kind(Machine)(plan, index)
        self.data = self.memory(whole, self.visit, self.pushed)
        self.inner = self.lanes(whole, scenario.rates, scenario.faults, scenario.seed, self.data, scenario.disorder)
        self.executor = self.checked(self.inner, plan)
        self.twin = self.twins(whole)
        self.outcome = Outcome()
        self.sweeps = 0
        self.seen: list[tuple[Any, Any]] = []
        """What was read, and what is right."""
        self.may_break = any(not isinstance(fault, SlowLane | Crash) for fault in scenario.faults)

    def kind(self, plain: type) -> Any:
        """Return a class, or the one that is wrong in its place."""
        return next((wrong for wrong in self.wrong if issubclass(wrong, plain)), plain)

    # What an actor draws

    @classmethod
    def draw_plan(cls, rng: random.Random) -> Plan:
        return random_plan(rng)

    @classmethod
    def draw_actions(cls, rng: random.Random, plan: Plan) -> list[Action]:
        raise NotImplementedError

    @classmethod
    def draw_faults(
        cls, seed: int, rng: random.Random, plan: Plan, actions: list[Action], faulty: bool | None
    ) -> tuple[Fault, ...]:
        return random_faults(rng, plan, actions)

    @classmethod
    def draw(
        cls, seed: int, rng: random.Random, plan: Plan, faulty: bool | None, before: Scenario | None = None
    ) -> Scenario:
        """Return what a life does; `faulty`: whether lanes fail, None for now and then; `before`: the last life."""
        actions = cls.draw_actions(rng, plan)
        faults = cls.draw_faults(seed, rng, plan, actions, faulty)
        if before is not None and cls.keeps_lanes:
            lanes = before.rates, before.disorder
        else:
            lanes = random_rates(rng, plan), random_disorder(rng, cls.lags_s)
        return Scenario(seed if before is None else before.seed + 1, plan, actions, faults, *lanes)

    @classmethod
    def lives(cls, rng: random.Random, least: int) -> Iterator[int]:
        """Yield the numbers of lives, each when the one before has ended."""
        yield 0

    # What it does

    def visit(self, run: RunVisit, state: State) -> None:
        mix(run, state)

    def pushed(self, push: Any) -> None:
        """Take note that weights are on the GPU."""

    def start(self) -> None:
        """Make what the rest of a life works with."""

    def resume(self, before: Any) -> bool:
        """Go on from what another life has left; return whether that can be."""
        return False

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
        assert all(found == right for found, right in self.seen), "a sweep sees wrong bytes"
        self.look_back()
        return self.outcome

    def act(self, actions: list[Action]) -> None:
        for what, value in actions:
            if self.machine.broken is None and self.outcome.how == "done":
                getattr(self, what)(value)

    def look_back(self) -> None:
        """Check what is left at the end."""

    def tell(self, event: Event) -> None:
        """Tell the machine, and the checker, of something that no lane reports."""
        self.executor.observe(event)
        self.machine.handle(event)

    def reaches(self, until: Callable[[Machine], object]) -> Callable[[Machine], bool]:
        """Return a condition that looks after the machine each time it is asked."""

        def reached(machine: Machine) -> bool:
            assert self.inner.events < MAX_EVENTS, "it goes on for ever"
            ends = bool(until(machine))
            self.check(ends=ends)
            return ends

        return reached

    def check(self, *, ends: bool = False) -> None:
        """Have the machine look at its own invariants, if it is time to, or something ends; then look at stores."""
        if self.self_check and (ends or self.inner.events % CHECKED_EVERY == 0):
            self.machine.check()
        if ends:
            self.audit()

    def stored(self) -> dict[TileId, TileRecord]:
        """Return where the newest versions lie, by what the machine knows."""
        tiles = (tile for subgroup in self.plan.layout.subgroups for tile, _, _ in subgroup.tiles)
        return {tile: record for tile in tiles if (record := self.machine.index.get(tile)) is not None}

    def audit(self) -> None:
        """Verify that all lies on the paths that the machine takes to be there, unless the medium has harmed it."""
        if any(isinstance(fault, MisdirectedWrite) for fault in self.scenario.faults):
            return
        for records in (self.stored(), *self.machine.saver.held_records.values()):
            for tile, record in records.items():
                self.verify_tile(tile, record)

    def verify_tile(self, tile: TileId, record: TileRecord) -> bytes:
        """Verify that a tile lies where a record says; return what does."""
        stored = self.data.stores[record.location.path].slots.get(record.location.offset)
        assert stored is not None, f"{tile} is lost or torn"
        assert (stored.tile, stored.step) == (tile, record.step), f"{tile} was written over"
        return stored.payload

    def pump(self, until: Callable[[Machine], object]) -> None:
        """Pump until something holds, or the machine breaks."""
        pump(self.machine, self.executor, self.reaches(lambda m: m.broken is not None or until(m)))

    def go_through(self, number: int, visits: tuple[Visit, ...]) -> None:
        """Do a sweep, which a machine that breaks ends, too."""
        sweep = Sweep(number, 10 * number, visits)
        self.inner.inject(BeginSweep(sweep))
        pump(self.machine, self.executor, self.reaches(lambda m: m.finished_sweep is not None))
        assert self.machine.finished_sweep is sweep
        self.end_sweep()

    def end_sweep(self) -> None:
        self.machine.take_finished_sweep()
        self.executor.ended(well=not self.machine.failed)

    def allocate(self) -> bool:
        """Have the room of planned slots be there, as `SessionParts.allocate` does; return whether it is."""
        index = self.machine.index
        if not index.has_needed_slots:
            self.tell(MakeSlots())
            ends = tuple(map(index.end_bytes, range(len(self.plan.budgets.paths))))
            if self.inner.allocate(ends):
                self.tell(Allocated(ends))
        return bool(index.has_needed_slots)


def run_seed(
    actor: type[Driver],
    seed: int,
    *wrong: type,
    self_check: bool = True,
    faulty: bool | None = None,
    crash: int | None = None,
) -> Outcome:
    """Run one seed; raise if anything is not as it has to be.

    Args:
        actor: What it does.
        seed: Which.
        wrong: Classes that are wrong on purpose, in the place of those that they inherit from.
        self_check: Whether the machine looks at its own invariants.
        faulty: Whether lanes fail; None for now and then.
        crash: Event at which the first life ends, and another one goes on from what it has left.

    Returns:
        How the first life ended, and what all of them counted, "died" and "resumed" among it.
    """
    actor = next((each for each in wrong if issubclass(each, actor)), actor)
    rng = random.Random(seed)
    plan = actor.draw_plan(rng)
    before: Driver | None = None
    outcome = Outcome()
    for life in actor.lives(rng, 1 if crash is None else 2):
        scenario = actor.draw(seed, rng, plan, faulty, None if before is None else before.scenario)
        if crash is not None and not life:
            scenario.faults = (Crash(crash),)
        driver = actor(scenario, rng, wrong, self_check=self_check)
        driver.start()
        if before is not None and not driver.resume(before):
            break
        outcome.counts["resumed"] += before is not None
        ended = driver.run(scenario.actions)
        if before is None:
            outcome.how, outcome.error, outcome.events = ended.how, ended.error, ended.events
        outcome.counts["died"] += ended.how == "crashed"
        outcome.counts.update(ended.counts)
        before = driver
    return outcome


def run_seeds(actor: type[Driver], seeds: range) -> Counter[str]:
    """Run seeds; count how they ended, and what they counted."""
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcome = run_seed(actor, seed)
        except Exception as error:
            error.add_note(f"{actor.__name__}, seed {seed}")
            raise
        found[outcome.how] += 1
        found.update(outcome.counts)
    return found
