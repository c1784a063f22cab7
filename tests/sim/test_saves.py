"""Checkpoints in simulation: thousands of random runs, a crash at every event of one, and bugs that must be found."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import planted
import pytest
import saves
import swarm
from world import Crash, Disorder

from offload.dtypes import DtypeCode
from offload.layout import Parameter, build_layout
from offload.plan import Budgets, PathBudget, PathRates, Rates, make_plan
from offload.schedule.machine import Machine


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1500, 500))
def test_checkpoints_hold_one_moment_whatever_happens(first: int) -> None:
    found = saves.run_seeds(saves.run_seed, range(first, first + 500))
    # Guards against a swarm that has stopped testing anything.
    assert found["saved"] > 400
    assert found["copied"] > 100
    assert found["failed"] > 100
    assert found["crashed"] > 30
    assert found["broken"] > 3
    assert found["resumed"] > 100
    assert found["crashed later"] > 20


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1500, 16_500, 1500))
def test_large_swarm_of_checkpoints(first: int) -> None:
    saves.run_seeds(saves.run_seed, range(first, first + 1500))


SMALL = [
    Parameter("a", 3000, DtypeCode.BFLOAT16, 0),
    Parameter("b", 2000, DtypeCode.FLOAT32, 1),
    Parameter("c", 1500, DtypeCode.BFLOAT16, 0),
]
ACTIONS = [
    saves.Action(what) for what in ("sweep", "save", "sweep", "sweep", "save", "sweep", "wait", "sweep", "wait")
]


def small_session(crash: int | None, host_bytes: int, seed: int = 0) -> saves.Session:
    layout = build_layout(SMALL, 1024, 4096)
    paths = (PathBudget("path0", 1 << 30), PathBudget("path1", 1 << 30))
    plan = make_plan(layout, Budgets(host_bytes, 3 * layout.max_subgroup_bytes, paths))
    rates = Rates(1e7, tuple(PathRates(1e7, 5e6, 1e-4) for _ in paths))
    faults = () if crash is None else (Crash(crash),)
    rng = random.Random(7)
    session = saves.Session(seed, plan, rates, faults, Disorder(0.5, 2, 0.0), rng, Machine, True)
    session.keep = 1
    return session


@pytest.mark.slow
@pytest.mark.parametrize("resident", [0.0, 0.5, 1.0])
def test_a_crash_at_every_event_leaves_a_whole_checkpoint(resident: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each event of steps and checkpoints: there is the last committed state afterwards, or the one on its way."""
    monkeypatch.setattr(swarm, "random_sweep", lambda rng, plan: swarm.update_visits(plan, range(len(plan.homes))))
    host_bytes = int(resident * build_layout(SMALL, 1024, 4096).state_bytes)
    whole = small_session(None, host_bytes).run(ACTIONS)
    assert whole.how == "done"
    assert whole.counts["saved"] == 2
    found: Counter[int] = Counter()
    for event, seed in itertools.product(range(1, whole.events), range(4)):  # the seed says what a crash leaves
        session = small_session(event, host_bytes, seed)
        outcome = session.run(ACTIONS)  # verifies every checkpoint that is left, byte for byte
        found[len(session.data.committed)] += outcome.how == "crashed"
        if session.kept:
            assert session.data.committed, "a checkpoint that had been committed is gone"
    assert found[0]
    assert found[1]
    assert found[2], "no crash met the moment between a commit and the release of the one before"


@pytest.mark.slow
@pytest.mark.parametrize("wrong", planted.SAVES, ids=lambda wrong: wrong.__name__)
def test_a_planted_bug_is_found(wrong: type[Machine]) -> None:
    """The checker or the bytes give each bug away, without the machine's own checks."""
    planted.assert_found(
        lambda seed: saves.run_seed(seed, wrong, self_check=False), range(1500), planted.SAVES[wrong]
    )


@pytest.mark.slow
def test_a_seed_is_a_run() -> None:
    for seed in range(20):
        first, second = saves.run_seed(seed), saves.run_seed(seed)
        assert (first.how, first.events, first.counts) == (second.how, second.events, second.counts)
