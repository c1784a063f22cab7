"""Tiles follow the bandwidth that paths are seen to have."""

from __future__ import annotations

import pytest
from world.executor import SimExecutor

from offload.dtypes import DtypeCode
from offload.layout import Parameter, build_layout
from offload.measure import observe, typical
from offload.plan import Budgets, PathBudget, PathRates, Plan, Rates, make_plan, visit_order
from offload.predict import predict
from offload.schedule.index import TileIndex
from offload.schedule.loop import pump
from offload.schedule.machine import Machine
from offload.schedule.operations import BeginSweep, Reshare, Sweep, Visit

GB = 1e9


def make(path_count: int, room: float, subgroups: int = 40) -> Plan:
    numel = 1 << 20
    layout = build_layout([Parameter("p", subgroups * numel, DtypeCode.BFLOAT16, 0)], numel, 1 << 20)
    state = layout.state_bytes
    paths = tuple(PathBudget(f"path {n}", int(room * state)) for n in range(path_count))
    return make_plan(layout, Budgets(0, 4 * layout.max_subgroup_bytes, paths, follow_rates=True))


def run_steps(plan: Plan, machine: Machine, rates: Rates, seen: list[Rates], numbers: range) -> list[float]:
    """Run steps on lanes of the given rates, learning as the session does; return their seconds."""
    seconds = []
    for number in numbers:
        machine.handle(Reshare(plan.path_shares(typical(seen))))
        executor = SimExecutor(plan, rates)
        order = visit_order(range(len(plan.layout.subgroups)), machine.slots)
        executor.inject(BeginSweep(Sweep(number, number, tuple(Visit(subgroup) for subgroup in order))))
        pump(machine, executor, lambda m: m.finished_sweep is not None)
        assert machine.take_finished_sweep() is not None
        assert machine.broken is None
        seconds.append(executor.now_s)
        pump(machine, executor, lambda m: m.in_flight == 0)
        machine.check()
        seen.append(observe(typical(seen), list(executor.timeline)))
    return seconds


def rates_of(*bandwidths: float) -> Rates:
    return Rates(20 * GB, tuple(PathRates(bandwidth, bandwidth) for bandwidth in bandwidths))


@pytest.mark.parametrize(
    ("before", "after"), [((3, 3), (1, 3)), ((3, 2, 1), (1, 2, 1)), ((2, 2, 2), (2, 2, 0.6)), ((1, 3), (3, 3))]
)
def test_a_path_that_changes_speed_is_followed_within_five_steps(
    before: tuple[float, ...], after: tuple[float, ...]
) -> None:
    plan = make(len(before), room=2.0)
    first, second = rates_of(*(b * GB for b in before)), rates_of(*(b * GB for b in after))
    index = TileIndex(
        [
            (path.available_bytes, share)
            for path, share in zip(plan.budgets.paths, plan.path_shares(first), strict=True)
        ],
        plan.slot_counts,
    )
    machine = Machine(plan, index)
    seen = [first]
    seconds = run_steps(plan, machine, first, seen, range(1, 5))
    assert seconds[-1] <= 1.05 * predict(plan, first).step_s
    seconds = run_steps(plan, machine, second, seen, range(5, 11))
    best = predict(plan, second).step_s  # all tiles where the new rates want them
    assert max(seconds[4:]) <= 1.1 * best, [each / best for each in seconds]
    live = machine.index.live_bytes()
    for nbytes, share in zip(live, plan.path_shares(second), strict=True):
        assert nbytes / sum(live) == pytest.approx(share, rel=0.15)


def test_without_room_beyond_the_plan_nothing_breaks() -> None:
    plan = make(2, room=0.6)
    index = TileIndex([(path.available_bytes, 0.5) for path in plan.budgets.paths], plan.slot_counts)
    machine = Machine(plan, index)
    seen = [rates_of(3 * GB, 3 * GB)]
    run_steps(plan, machine, seen[0], seen, range(1, 4))
    run_steps(plan, machine, rates_of(0.5 * GB, 3 * GB), seen, range(4, 12))
    assert all(n <= path.available_bytes for n, path in zip(index.live_bytes(), plan.budgets.paths, strict=True))


def test_a_path_that_was_slow_for_a_while_is_seen_to_recover() -> None:
    plan = make(2, room=2.0, subgroups=12)
    normal, stalled = rates_of(3 * GB, 3 * GB), rates_of(0.01 * GB, 3 * GB)
    index = TileIndex([(path.available_bytes, 0.5) for path in plan.budgets.paths], plan.slot_counts)
    machine = Machine(plan, index)
    seen = [normal]
    run_steps(plan, machine, normal, seen, range(1, 3))
    run_steps(plan, machine, stalled, seen, range(3, 8))
    assert plan.path_shares(typical(seen))[0] < 0.1
    run_steps(plan, machine, normal, seen, range(8, 14))
    assert plan.path_shares(typical(seen))[0] == pytest.approx(0.5, abs=0.05)
