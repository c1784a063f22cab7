"""Random programs of activations beside steps, under the checker; and machines that it must find."""

from __future__ import annotations

from collections import Counter

import buffer_programs
import planted
import pytest
import saved


def run_seeds(seeds: range) -> Counter[str]:
    return buffer_programs.run_seeds(saved.make_program, saved.run_program, seeds)[0]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 100))
def test_programs(first: int):
    found = run_seeds(range(first, first + 100))
    # Guards against programs that have stopped testing anything.
    assert found["done"] > 70
    assert found["away"] > 1000
    assert found["kept"] > 50


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(300, 3300, 500))
def test_many_programs(first: int):
    run_seeds(range(first, first + 500))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [*planted.SAVING], ids=lambda wrong: wrong.__name__)
def test_planted_bug_is_found(wrong: type):
    planted.assert_found(
        lambda seed: saved.run_program(saved.make_program(seed), wrong, self_check=False),
        range(300),
        planted.SAVING[wrong],
    )
