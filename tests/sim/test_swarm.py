"""Thousands of random runs, each under the checker and compared with a run in memory; and bugs that it must find."""

from __future__ import annotations

from collections import Counter

import planted
import pytest
import swarm

from offload.engine.index import TileIndex
from offload.engine.machine import Machine
from offload.errors import InternalError


def run_seeds(seeds: range) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        scenario = swarm.make_scenario(seed)
        try:
            outcome = swarm.run_scenario(scenario)
        except Exception as error:
            error.add_note(f"seed {seed}: {scenario.disorder}, faults {scenario.faults}")
            raise
        found[outcome.how] += 1
        found["streamed"] += scenario.plan.staging_slots < len(scenario.plan.resident) - sum(scenario.plan.resident)
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
@pytest.mark.parametrize("wrong", [*planted.MACHINES, *planted.INDICES], ids=lambda wrong: wrong.__name__)
def test_planted_bug_is_found(wrong: type):
    """The checker, the bytes or the way it ends give each bug away, without the machine's own checks."""
    machine_type = wrong if issubclass(wrong, Machine) else Machine
    index_type = wrong if issubclass(wrong, TileIndex) else TileIndex
    for seed in range(1500):
        try:
            swarm.run_scenario(swarm.make_scenario(seed), machine_type, index_type, self_check=False)
        except AssertionError:
            return
        except InternalError as error:
            if not str(error).startswith(("rule ", "the engine waits")):
                pytest.fail(f"found by the machine itself: {error}")
            return
    pytest.fail("nobody noticed")


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
