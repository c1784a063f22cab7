"""Callers that go on while a step does, at random: under the checker, compared with a run in memory; and bugs."""

from __future__ import annotations

import forwards
import planted
import pytest
import saves

from offload.schedule.machine import Machine
from offload.session.step import PendingStep
from offload.session.thread import EngineThread


@pytest.mark.slow
def test_bits_and_failures_are_those_of_steps_that_are_waited_for() -> None:
    found = saves.run_seeds(forwards.run_seed, range(300))
    # Guards against a swarm that has stopped testing anything.
    assert found["done"] > 200
    assert found["crashed"] > 5
    assert found["saved"] > 80
    assert found["let on beside a sweep"] > 300
    assert found["told by forward"] > 10
    assert sum(found[f"told by {what}"] for what in ("finish", "save", "sweep", "step")) > 3


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(300, 20_300, 2000))
def test_large_swarm_of_forward_passes(first: int) -> None:
    saves.run_seeds(forwards.run_seed, range(first, first + 2000))


@pytest.mark.parametrize("wrong", planted.FORWARDS, ids=lambda wrong: wrong.__name__)
def test_a_planted_bug_is_found(wrong: type) -> None:
    """The checker, the bits or what the caller is told give each bug away, without the machine's own checks."""
    parts = (Machine, EngineThread, PendingStep, forwards.Session)
    kinds = [wrong if issubclass(wrong, part) else part for part in parts]
    by = planted.FORWARDS[wrong]
    planted.assert_found(lambda seed: forwards.run_seed(seed, *kinds, self_check=False), range(100), by)


@pytest.mark.slow
def test_a_seed_is_a_run() -> None:
    for seed in range(20):
        first, second = forwards.run_seed(seed), forwards.run_seed(seed)
        assert (first.how, first.events, first.counts) == (second.how, second.events, second.counts)
