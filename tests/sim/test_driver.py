"""Thousands of random runs of every actor, under the checker and beside a twin; and bugs that they must find."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import planted
import pytest
from callers import CHOICES, Calls
from world.actors import Saves, Sweeps
from world.checker import CheckedExecutor
from world.driver import Action, Scenario, run_seed, run_seeds
from world.executor import Disorder, SimExecutor
from world.faults import Crash

from offload.dtypes import DtypeCode
from offload.errors import InternalError
from offload.layout import Parameter, build_layout
from offload.plan import Budgets, PathBudget, PathRates, Plan, Rates, make_plan
from offload.schedule.index import Location, TileIndex
from offload.schedule.operations import Extend
from offload.schedule.runs import update_visits


class Seeds(NamedTuple):
    """Which seeds of an actor run.

    Attributes:
        count: In `make test`; 140 of "sweeps" and "calls", or 40 of the others, find each planted bug.
        part: In one test.
        full: In `make test-full`.
        least: Guards against parts that have stopped testing anything: what is counted more often than that.
    """

    count: int
    part: int
    full: int
    least: dict[str, int]


SEEDS = {
    "sweeps": Seeds(500, 500, 23_000, {"done": 300, "broken": 30, "crashed": 3, "streamed": 150}),
    "changing": Seeds(250, 250, 8500, {"done": 150, "grown": 150}),
    "saves": Seeds(
        250,
        250,
        16_500,
        {"saved": 200, "copied": 50, "failed": 50, "crashed": 15, "broken": 0, "resumed": 50, "died": 35},
    ),
    "parks": Seeds(
        250,
        250,
        10_000,
        {"parked": 500, "stayed": 50, "refused": 10, "park failed": 0, "saved": 100, "crashed": 15, "resumed": 50},
    ),
    "fills": Seeds(250, 250, 11_000, {"done": 120, "broken": 5, "leaving": 80}),
    "packs": Seeds(100, 100, 3300, {"done": 70, "away": 1000, "kept": 50}),
    "calls": Seeds(
        250,
        250,
        30_000,
        {
            "done": 150,
            "broken": 15,
            "died": 3,
            "closed": 50,
            "resumed": 8,
            "confirmed": 200,
            "revoked": 120,
            "writes ahead failed": 25,
            "saved": 15,
            "let on beside a sweep": 2000,
            "told by forward": 8,
        },
    ),
}
PARTS = [(choice, first) for choice, seeds in SEEDS.items() for first in range(0, seeds.count, seeds.part)]
REST = [(c, first) for c, seeds in SEEDS.items() for first in range(seeds.count, seeds.full, 4 * seeds.part)]


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "first"), PARTS)
def test_what_comes_out_is_right_whatever_happens(choice: str, first: int) -> None:
    found = run_seeds(CHOICES[choice], range(first, first + SEEDS[choice].part))
    if choice == "calls":
        assert any(found[f"told by {what}"] for what in ("finish", "save", "sweep", "step"))
    assert not {what: found[what] for what, least in SEEDS[choice].least.items() if found[what] <= least}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("choice", "first"), REST)
def test_many_seeds(choice: str, first: int) -> None:
    run_seeds(CHOICES[choice], range(first, min(first + 4 * SEEDS[choice].part, SEEDS[choice].full)))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", planted.PLANTED, ids=lambda wrong: wrong.__name__)
def test_a_planted_bug_is_found(wrong: type) -> None:
    """The checker, the bytes, what a caller is told or the way it ends give it away, without the machine's checks."""
    choice, by = planted.PLANTED[wrong]
    found = None
    for seed in range(600):
        try:
            run_seed(CHOICES[choice], seed, wrong, self_check=False)
        except (AssertionError, InternalError) as error:
            found = error
            break
    assert found is not None, "nobody noticed"
    assert by in str(found), f"something else is found: {found}"


@pytest.mark.parametrize("choice", [pytest.param(choice, marks=pytest.mark.slow) for choice in CHOICES])
def test_a_seed_is_a_run(choice: str) -> None:
    for seed in range(10):
        first, second = (run_seed(CHOICES[choice], seed) for _ in range(2))
        assert (first.how, str(first.error), first.events) == (second.how, str(second.error), second.events)
        assert first.counts == second.counts


def test_violation_tells_the_story() -> None:
    with pytest.raises(InternalError, match="rule 5") as caught:
        run_seed(Sweeps, 0, planted.skips_a_visit, self_check=False, faulty=False)
    (story,) = caught.value.__notes__
    assert "BeginSweep(" in story
    assert "RunVisit(" in story
    assert "Done(" in story


@pytest.mark.parametrize(
    ("numel", "slots", "resident", "match"),
    [(4096, 2, 0, "staging slot goes"), (4096, 3, 1, "another home"), (3072, 3, 0, "cut anew")],
)
def test_a_plan_that_takes_something_away_is_found(numel: int, slots: int, resident: int, match: str) -> None:
    def plan(numel: int, slots: int, resident: int) -> Plan:
        layout = build_layout([Parameter("p", numel, DtypeCode.BFLOAT16, 0)], 1024, 4096)
        paths = (PathBudget("path0", 1 << 30),)
        slot_bytes = layout.max_subgroup_bytes
        return make_plan(layout, Budgets(resident * slot_bytes, slots * slot_bytes, paths))

    before = plan(3072, 3, 0)
    executor = CheckedExecutor(SimExecutor(before, Rates(1e9, (PathRates(1e9, 1e9),))), before)
    executor.observe(Extend(plan(4096, 3, 0)))
    with pytest.raises(InternalError, match=f"rule 11.*{match}"):
        executor.observe(Extend(plan(numel, slots, resident)))


class EverySubgroup(Saves):
    """Each sweep is a step."""

    def draw_sweep(self):
        return update_visits(self.plan, range(len(self.plan.homes)))


@pytest.mark.slow
@pytest.mark.parametrize("resident", [0.0, 0.5, 1.0])
def test_a_crash_at_every_event_leaves_a_whole_checkpoint(resident: float) -> None:
    """At each event of steps and checkpoints: there is the last committed state afterwards, or the one on its way."""
    small = (
        ("a", 3000, DtypeCode.BFLOAT16, 0),
        ("b", 2000, DtypeCode.FLOAT32, 1),
        ("c", 1500, DtypeCode.BFLOAT16, 0),
    )
    layout = build_layout([Parameter(*each) for each in small], 1024, 4096)
    paths = (PathBudget("path0", 1 << 30), PathBudget("path1", 1 << 30))
    plan = make_plan(layout, Budgets(int(resident * layout.state_bytes), 3 * layout.max_subgroup_bytes, paths))
    rates = Rates(1e7, tuple(PathRates(1e7, 5e6, 1e-4) for _ in paths))
    done = [Action(what) for what in ("sweep", "save", "sweep", "sweep", "save", "sweep", "wait", "sweep", "wait")]

    def session(crash: int | None, seed: int = 0) -> Saves:
        faults = () if crash is None else (Crash(crash),)
        made = EverySubgroup(Scenario(seed, plan, done, faults, rates, Disorder(0.5, 2, 0.0)), random.Random(7))
        made.keep = 1
        return made

    whole = session(None).run(done)
    assert whole.how == "done"
    assert whole.counts["saved"] == 2
    found: Counter[int] = Counter()
    for event, seed in itertools.product(range(1, whole.events), range(2)):  # the seed says what a crash leaves
        crashed = session(event, seed)
        outcome = crashed.run(done)  # verifies every checkpoint that is left, byte for byte
        found[len(crashed.data.committed)] += outcome.how == "crashed"
        if crashed.kept:
            assert crashed.data.committed, "a checkpoint that had been committed is gone"
    assert found[0]
    assert found[1]
    assert found[2], "no crash met the moment between a commit and the release of the one before"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42, pytest.param(116, marks=pytest.mark.full)])
def test_a_crash_at_every_event_of_backward_passes(seed: int) -> None:
    """What is left is compared byte for byte, and the session that goes on from it is like others."""
    whole = run_seed(Calls, seed, faulty=False)
    assert whole.how == "done"
    assert min(whole.counts[what] for what in ("saved", "confirmed", "revoked")) > 0
    found = [run_seed(Calls, seed, faulty=False, crash=event) for event in range(1, whole.events)]
    assert all(outcome.counts["died"] for outcome in found)
    assert sum(outcome.counts["resumed"] for outcome in found) > len(found) // 10


def test_a_version_that_finds_no_room_is_given_up() -> None:
    """As a path takes no more writes; the bytes of its tiles that found room are used again."""
    refused = []

    class Counting(TileIndex):
        def claim_loan(self, nbytes: int, avoid: Collection[int] = ()) -> Location | None:
            location = super().claim_loan(nbytes, avoid)
            if location is None:
                refused.append(nbytes)
            return location

    assert run_seed(Calls, 8, Counting).how == "done"
    assert refused
