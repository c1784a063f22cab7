"""Thousands of random runs, each under the checker and compared with a run in memory; and bugs that it must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import planted
import pytest
import swarm
from world import CheckedExecutor, SimExecutor

from offload.dtypes import DtypeCode
from offload.errors import InternalError
from offload.layout import Parameter, build_layout
from offload.plan import Budgets, Home, PathBudget, PathRates, Plan, Rates, make_plan
from offload.schedule.index import TileIndex
from offload.schedule.machine import Machine
from offload.schedule.operations import Extend


def run_seeds(seeds: range, make: Callable[[int], swarm.Scenario] = swarm.make_scenario) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        scenario = make(seed)
        try:
            outcome = swarm.run_scenario(scenario)
        except Exception as error:
            error.add_note(f"seed {seed}: {scenario.disorder}, faults {scenario.faults}")
            raise
        found[outcome.how] += 1
        found["grown"] += scenario.grown is not None and outcome.how == "done"
        found["streamed"] += scenario.plan.staging_slots < scenario.plan.homes.count(Home.STREAMED)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 3000, 500))
def test_swarm(first: int):
    found = run_seeds(range(first, first + 500))
    # Guards against a swarm that has stopped testing anything.
    assert found["done"] > 300
    assert found["broken"] > 30
    assert found["crashed"] > 3
    assert found["streamed"] > 150


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(3000, 23_000, 2000))
def test_large_swarm(first: int):
    run_seeds(range(first, first + 2000))


@pytest.mark.slow
def test_swarm_of_plans_that_change():
    found = run_seeds(range(500), swarm.make_changing_scenario)
    assert found["grown"] > 250
    assert found["done"] > 300


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(500, 8500, 2000))
def test_large_swarm_of_plans_that_change(first: int):
    run_seeds(range(first, first + 2000), swarm.make_changing_scenario)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [*planted.MACHINES, *planted.GROWING], ids=lambda wrong: wrong.__name__)
def test_planted_bug_is_found(wrong: type):
    """The checker, the bytes or the way it ends give each bug away, without the machine's own checks."""
    machine_type = wrong if issubclass(wrong, Machine) else Machine
    index_type = wrong if issubclass(wrong, TileIndex) else TileIndex
    make = swarm.make_changing_scenario if wrong in planted.GROWING else swarm.make_scenario
    planted.assert_found(
        lambda seed: swarm.run_scenario(make(seed), machine_type, index_type, self_check=False),
        range(1500),
        (planted.MACHINES | planted.GROWING)[wrong],
    )


@pytest.mark.parametrize(
    ("numel", "slots", "resident", "match"),
    [(4096, 2, 0, "staging slot goes"), (4096, 3, 1, "another home"), (3072, 3, 0, "cut anew")],
)
def test_a_plan_that_takes_something_away_is_found(numel: int, slots: int, resident: int, match: str):
    def plan(numel: int, slots: int, resident: int) -> Plan:
        layout = build_layout([Parameter("p", numel, DtypeCode.BFLOAT16, 0)], 1024, 4096)
        paths = (PathBudget("path0", 1 << 30),)
        slot_bytes = layout.max_subgroup_bytes
        return make_plan(layout, Budgets(resident * slot_bytes, slots * slot_bytes, paths))

    before = plan(3072, 3, 0)
    executor = CheckedExecutor(SimExecutor(before, Rates(1e9, (PathRates(1e9, 1e9),))), before)
    executor.observe(Extend(plan(4096, 3, 0)))
    with pytest.raises(InternalError, match=f"rule 17.*{match}"):
        executor.observe(Extend(plan(numel, slots, resident)))


def test_a_seed_is_a_run():
    def trace(seed: int) -> tuple[object, ...]:
        outcome = swarm.run_scenario(swarm.make_scenario(seed))
        return outcome.how, str(outcome.error), outcome.events, list(outcome.seen.items())

    for seed in range(40):
        assert trace(seed) == trace(seed)
        assert swarm.make_scenario(seed).faults == swarm.make_scenario(seed).faults


def test_violation_tells_the_story():
    with pytest.raises(InternalError, match="rule 2") as caught:
        swarm.run_scenario(swarm.make_scenario(0, faulty=False), planted.SkipsAVisit, self_check=False)
    (story,) = caught.value.__notes__
    assert "Begin(" in story
    assert "Run(" in story
    assert "Done(" in story
