"""One seed, one scenario: a random plan, random sweeps, random faults; run it and compare with a run in memory."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field, replace

import numpy as np
from world import (
    CheckedExecutor,
    CorruptPayload,
    Crash,
    Disorder,
    FailOperation,
    Fault,
    MisdirectedWrite,
    PathFull,
    ShortTransfer,
    SimData,
    SimExecutor,
    SimulatedCrash,
    SlowLane,
    mix,
)
from world import random_faults as draw_faults

from offload.dtypes import DtypeCode
from offload.errors import InfeasiblePlanError, InternalError, OffloadError
from offload.layout import Layout, Parameter, build_layout, extend_layout
from offload.plan import (
    NO_GPU,
    Budgets,
    GpuRates,
    PathBudget,
    PathRates,
    Placement,
    Plan,
    Rates,
    make_plan,
    visit_order,
)
from offload.plan.budget import LEAST_SLOT_BYTES
from offload.protocols import SECTOR_BYTES
from offload.schedule.index import TileIndex
from offload.schedule.loop import pump
from offload.schedule.machine import Machine
from offload.schedule.operations import Begin, Extend, Reshare, Run, Sweep, Visit
from offload.schedule.runs import update_visits

MAX_EVENTS = 5000
ROOMY_BYTES = 1 << 40


@dataclass
class Scenario:
    seed: int
    plan: Plan
    rates: Rates
    disorder: Disorder
    faults: tuple[Fault, ...]
    sweeps: list[tuple[Visit, ...]]
    cached_first: bool
    shares: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Shares of the paths from a sweep on, by its number."""
    grown: Plan | None = None
    """What the plan becomes before sweep `grows_before`."""
    grows_before: int = 0


@dataclass
class Outcome:
    """How a run ended: "done", "broken" (with the error) or "crashed"."""

    how: str
    error: Exception | None = None
    events: int = 0
    seen: dict[tuple[int, int], int | None] = field(default_factory=dict)


def random_layout(rng: random.Random) -> Layout:
    dtypes = [DtypeCode.BFLOAT16, DtypeCode.FLOAT32]
    parameters = [
        Parameter(f"p{i}", rng.randrange(1, 5000), rng.choice(dtypes), rng.randrange(2))
        for i in range(rng.randrange(1, 6))
    ]
    return build_layout(parameters, rng.choice((1024, 1024, 2048, 4096)), rng.choice((4096, 4096, 8192, 16384)))


def tight_plan(rng: random.Random, layout: Layout) -> Plan:
    """Return a plan whose paths offer no byte more than it demands (or, for some seeds, plenty)."""
    paths = rng.randrange(1, 5)
    host_bytes = rng.choice((0, 0, 0, layout.state_bytes // 3, layout.state_bytes // 2, layout.state_bytes))
    staging_bytes = rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6)) * max(layout.max_subgroup_bytes, LEAST_SLOT_BYTES)
    shares = [rng.choice((0.1, 1.0, 1.0, 3.0)) for _ in range(paths)]
    budgets, placements = Budgets(host_bytes, staging_bytes), ()
    if rng.random() < 0.5:
        gpu_bytes = rng.choice((0, 0, layout.state_bytes // 4, layout.state_bytes))
        gpu_staging_bytes = rng.randrange(1, 5) * layout.max_subgroup_bytes
        placements = random_placements(rng, len(layout.subgroups))
        budgets = Budgets(
            host_bytes,
            staging_bytes,
            gpu_bytes=gpu_bytes,
            gpu_staging_bytes=gpu_staging_bytes,
            weights_on_gpu=rng.random() < 0.7,
        )

    def plan(limits: list[int]) -> Plan:
        offers = [
            PathBudget(f"path{i}", limit, share) for i, (limit, share) in enumerate(zip(limits, shares, strict=True))
        ]
        return make_plan(layout, replace(budgets, paths=tuple(offers)), placements=placements)

    roomy = plan([ROOMY_BYTES] * paths)
    if not roomy.staging_slots or rng.random() < 0.3:
        return roomy
    demand = roomy.storage_bytes + (max(roomy.slot_counts) + SECTOR_BYTES) * (paths - 1)
    cuts = sorted(rng.randrange(demand + 1) for _ in range(paths - 1))
    return plan([stop - start for start, stop in zip([0, *cuts], [*cuts, demand], strict=True)])


def random_placements(rng: random.Random, count: int) -> tuple[Placement, ...]:
    return tuple(Placement.GPU if rng.random() < 0.5 else Placement.CPU for _ in range(count))


def random_sweep(rng: random.Random, plan: Plan) -> tuple[Visit, ...]:
    """Return a step on the plan's devices, or another sweep, which visits on the GPU only what is at home there."""
    count = len(plan.layout.subgroups)
    if rng.random() < 0.5:
        return update_visits(plan, rng.sample(range(count), count))
    return tuple(placed(visit, plan, rng) for visit in random_visits(rng, count))


def placed(visit: Visit, plan: Plan, rng: random.Random) -> Visit:
    """Return a visit on the GPU, or on the CPU with the weights that it needs there."""
    gpu = plan.at_home_on_gpu(visit.subgroup) or in_gpu_slot(plan, rng)
    weight_bytes = plan.layout.subgroups[visit.subgroup].weight_bytes if plan.weights_on_gpu and not gpu else 0
    return replace(visit, gpu=gpu, weight_bytes=weight_bytes, fetches=weight_bytes > 0)


def in_gpu_slot(plan: Plan, rng: random.Random) -> bool:
    """Return, now and then, that a sweep that is no step uses the GPU's staging slots; where all subgroups fit."""
    return plan.gpu_slots > 0 and plan.gpu_slot_bytes == plan.layout.max_subgroup_bytes and rng.random() < 0.3


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


def random_rates(rng: random.Random, plan: Plan) -> Rates:
    """Return rates that have nothing to do with each other."""

    def speed() -> float:
        return 10 ** rng.uniform(5, 8)

    paths = tuple(PathRates(speed(), speed(), rng.choice((0.0, 1e-4))) for _ in plan.budgets.paths)
    return Rates(speed(), paths, GpuRates(speed(), speed(), speed()) if plan.uses_gpu else NO_GPU)


def make_scenario(seed: int, *, faulty: bool | None = None) -> Scenario:
    rng = random.Random(seed)
    layout = random_layout(rng)
    plan = tight_plan(rng, layout)
    sweeps = [random_sweep(rng, plan) for _ in range(rng.randrange(2, 6))]

    rates = random_rates(rng, plan)
    even = rng.random() < 0.3
    lag_s = rng.choice((0.0, 0.0, 0.02))
    disorder = Disorder() if even else Disorder(rng.choice((0.0, 0.5, 5.0)), rng.randrange(1, 4), lag_s)
    if faulty is None:
        faulty = rng.random() < 0.5
    transfers = sum(len(s.tiles) for s in layout.subgroups) * len(sweeps)
    faults = draw_faults(seed, paths=len(plan.budgets.paths), operations=max(transfers // 2, 1)) if faulty else ()
    if faulty and rng.random() < 0.1:
        faults += (Crash(rng.randrange(1, 2 * transfers + 2)),)
    return Scenario(seed, plan, rates, disorder, faults, sweeps, rng.random() < 0.8)


def make_changing_scenario(seed: int) -> Scenario:
    """Return a scenario whose paths get other shares, and whose plan grows (where that can be), between sweeps.

    With a GPU others are updated there from then on.
    """
    scenario, rng = make_scenario(seed), random.Random(-1 - seed)
    plan, count = scenario.plan, len(scenario.sweeps)
    shares = {n: tuple(rng.uniform(0.05, 1.0) for _ in plan.budgets.paths) for n in range(1, count + 1)}
    scenario.shares = {number: shares[number] for number in shares if rng.random() < 0.6}
    dtypes = [DtypeCode.BFLOAT16, DtypeCode.FLOAT32]
    added = [
        Parameter(f"added{i}", rng.randrange(1, 5000), rng.choice(dtypes), 0) for i in range(rng.randrange(1, 4))
    ]
    layout = extend_layout(plan.layout, added, 1024, 4096)
    count_on_gpu = len(layout.subgroups) if plan.uses_gpu else 0
    placements = random_placements(rng, count_on_gpu)
    # Room for what is added, on one of the paths.
    room = 2 * sum(nbytes + SECTOR_BYTES for s in layout.subgroups[len(plan.homes) :] for _, _, nbytes in s.tiles)
    room += len(plan.budgets.paths) * (max(s.tile_numel for s in layout.subgroups) * 4 + SECTOR_BYTES)
    paths, chosen = list(plan.budgets.paths), rng.randrange(len(plan.budgets.paths))
    paths[chosen] = replace(paths[chosen], available_bytes=paths[chosen].available_bytes + room)
    wider = replace(plan, budgets=replace(plan.budgets, paths=tuple(paths)))
    try:
        grown = make_plan(layout, wider.budgets, kept=wider, placements=placements)
    except InfeasiblePlanError:
        return scenario
    if grown.uses_gpu != plan.uses_gpu or grown.gpu_slots < plan.gpu_slots:  # no rates; no memory for the first plan
        return scenario
    scenario.plan, scenario.grown, scenario.grows_before = wider, grown, rng.randrange(2, count + 1)
    new = update_visits(grown, range(len(plan.layout.subgroups), len(layout.subgroups)))
    for number in range(scenario.grows_before - 1, count):
        scenario.sweeps[number] = random_sweep(rng, grown) if plan.uses_gpu else scenario.sweeps[number] + new
    return scenario


def in_memory(plan: Plan, sweeps: list[tuple[Visit, ...]], first: int = 1) -> dict[tuple[int, int], int | None]:
    """Run sweeps on plain arrays; return what the reading visits see, by (sweep, subgroup)."""
    states: dict[int, np.ndarray] = {}
    seen: dict[tuple[int, int], int | None] = {}
    for number, visits in enumerate(sweeps, start=first):
        for visit in visits:
            fresh = visit.subgroup not in states
            run = Run(0, number, visit, None, fresh)
            if not visit.changes:
                seen[number, visit.subgroup] = None if fresh else zlib.crc32(states[visit.subgroup])
                continue
            words = plan.layout.subgroups[visit.subgroup].state_bytes // 4
            state = states.setdefault(visit.subgroup, np.zeros(words, np.uint32))
            mix(run, state)
    return seen


def survivable(scenario: Scenario) -> bool:
    """Return whether no fault of the scenario may break it: lanes that are slow, one path lost amid plenty."""
    harmful = [fault for fault in scenario.faults if not isinstance(fault, SlowLane | Crash)]
    paths = scenario.plan.budgets.paths
    plenty = len(paths) > 1 and all(path.available_bytes >= ROOMY_BYTES for path in paths)
    lost_path = len(harmful) == 1 and (
        isinstance(harmful[0], PathFull)
        or (isinstance(harmful[0], FailOperation | ShortTransfer) and harmful[0].kind == "write")
    )
    return not harmful or (plenty and lost_path)


def run_scenario(
    scenario: Scenario,
    machine_type: type[Machine] = Machine,
    index_type: type[TileIndex] = TileIndex,
    *,
    self_check: bool = True,
) -> Outcome:
    """Run a scenario, then read everything back.

    Raises:
        InternalError: If a rule was broken.
        AssertionError: If it ended in a way that it must not.
    """
    plan = scenario.plan
    last_plan = scenario.grown or plan
    stores = [(path.available_bytes, path.share) for path in plan.budgets.paths]
    machine = machine_type(plan, index_type(stores, plan.slot_counts))
    outcome = Outcome("done")
    updated: list[int] = []

    def visit(run: Run, state: np.ndarray) -> None:
        if run.visit.changes:
            mix(run, state)
            updated.append(run.visit.subgroup)
        else:
            outcome.seen[run.sweep, run.visit.subgroup] = None if run.fresh else zlib.crc32(state)

    data = SimData(last_plan, visit)
    inner = SimExecutor(last_plan, scenario.rates, scenario.faults, scenario.seed, data, scenario.disorder)
    executor = CheckedExecutor(inner, plan)

    def finished(machine: Machine) -> bool:
        assert inner.events < MAX_EVENTS, "it goes on for ever"
        if self_check:
            machine.check()
        return machine.finished_sweep is not None

    subgroups = range(len(last_plan.layout.subgroups))
    everything = tuple(Visit(s, changes=False, gpu=last_plan.at_home_on_gpu(s)) for s in subgroups)
    sweeps = [*scenario.sweeps, everything]
    synced: dict = {}
    expected = in_memory(last_plan, sweeps)
    try:
        for number, visits in enumerate(sweeps, start=1):
            if number in scenario.shares:
                inner.inject(Reshare(scenario.shares[number]))
            if scenario.grown is not None and number == scenario.grows_before:
                pump(machine, executor, lambda m: m.in_flight == 0 or m.broken is not None)
                if machine.broken is not None:
                    outcome.how, outcome.error = "broken", machine.broken
                    break
                if not machine.index.has_room(scenario.grown.slot_counts):
                    outcome.how = "full"  # the paths have strayed from the plan, and the session would refuse it
                    break
                inner.inject(Extend(scenario.grown))
            by_subgroup = {v.subgroup: v for v in visits}
            order = [v.subgroup for v in visits]
            if scenario.cached_first:
                order = list(visit_order(order, machine.slots))
            updated.clear()
            executor_sweep = Sweep(number, 10 * number, tuple(by_subgroup[s] for s in order))
            inner.inject(Begin(executor_sweep))
            pump(machine, executor, finished)
            sweep = machine.take_finished_sweep()
            assert sweep is executor_sweep
            executor.ended(well=not machine.failed)
            assert machine.moved == executor.moved == updated, "it does not say which subgroups have moved"
            if machine.broken is not None:
                outcome.how, outcome.error = "broken", machine.broken
                break
            if scenario.seed % 3 == 0 and number == 1:
                data.sync()
                synced = executor.stored()
    except SimulatedCrash:
        outcome.how = "crashed"
        # What was synced and is still the newest version must have survived; nothing may have written over it.
        # A write that landed elsewhere, or a bit that flipped, is the medium's doing: what it fell on is gone.
        harmed = any(isinstance(fault, MisdirectedWrite | CorruptPayload) for fault in scenario.faults)
        for tile, (location, step, checksum) in executor.stored().items():
            if synced.get(tile) == (location, step, checksum) and not harmed:
                found = data.stores[location.path].slots[location.offset]
                assert found is not None, "a tile is gone"
                assert (found.tile, found.step, zlib.crc32(found.payload)) == (tile, step, checksum)
    outcome.events = inner.events
    for key, checksum in outcome.seen.items():
        assert checksum == expected[key], f"sweep {key[0]} sees wrong bytes of subgroup {key[1]}"
    if outcome.how == "done":
        assert len(outcome.seen) == len(expected), "a visit has not happened"
    if outcome.how == "broken":
        assert isinstance(outcome.error, OffloadError), repr(outcome.error)
        assert not isinstance(outcome.error, InternalError), repr(outcome.error)
        assert not survivable(scenario), f"it broke for too little: {outcome.error!r}"
        # A broken machine ends every further sweep at once and issues nothing for it.
        before = machine.in_flight
        machine.handle(Begin(Sweep(len(sweeps) + 1, 0, everything[: len(machine.phases)])))
        assert not machine.take_operations()
        assert before or machine.take_finished_sweep() is not None
    return outcome
