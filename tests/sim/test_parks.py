"""State that leaves memory, in simulation: parks among sweeps, saves and faults, and bugs that must be found."""

from __future__ import annotations

import parks
import planted
import pytest
import saves

from offload.schedule.machine import Machine


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 500])
def test_state_leaves_memory_and_comes_home_whatever_happens(first: int) -> None:
    found = saves.run_seeds(parks.run_seed, range(first, first + 500))
    # Guards against a swarm that has stopped testing anything.
    assert found["parked"] > 1000
    assert found["stayed"] > 100
    assert found["refused"] > 20
    assert found["park failed"] > 1
    assert found["saved"] > 200
    assert found["crashed"] > 30
    assert found["resumed"] > 100


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1000, 10_000, 1500))
def test_large_swarm_of_parks(first: int) -> None:
    saves.run_seeds(parks.run_seed, range(first, first + 1500))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", planted.PARKS, ids=lambda wrong: wrong.__name__)
def test_a_planted_bug_is_found(wrong: type[Machine]) -> None:
    """The checker or the bytes give each bug away, without the machine's own checks."""
    planted.assert_found(
        lambda seed: parks.run_seed(seed, wrong, self_check=False), range(1500), planted.PARKS[wrong]
    )
