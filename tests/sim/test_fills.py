"""Random programs of gradients that pass through buffers, under the checker; and machines that it must find."""

from __future__ import annotations

from collections import Counter

import buffer_programs
import fills
import planted
import pytest


def run_seeds(seeds: range) -> Counter[str]:
    found, run = buffer_programs.run_seeds(fills.make_program, fills.run_program, seeds)
    found["leaving"] = sum(each.plan.gradient_buffers < len(each.plan.layout.subgroups) for each in run)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_programs(first: int):
    found = run_seeds(range(first, first + 250))
    # Guards against programs that have stopped testing anything.
    assert found["done"] > 120
    assert found["broken"] > 5
    assert found["leaving"] > 80


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1000, 11_000, 2000))
def test_many_programs(first: int):
    run_seeds(range(first, first + 2000))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [*planted.FILLING], ids=lambda wrong: wrong.__name__)
def test_planted_bug_is_found(wrong: type):
    planted.assert_found(
        lambda seed: fills.run_program(fills.make_program(seed), wrong, self_check=False),
        range(1500),
        planted.FILLING[wrong],
    )
