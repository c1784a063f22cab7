"""The test accelerator finds mistakes that are planted, and nothing where there are none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pytest

from accelerator import leave_out, mistakes, processes, runner
from accelerator.mistakes import MISTAKES, Mistake, Shows
from accelerator.runner import Outcome, Task
from accelerator.workloads import WORKLOADS

PLANTS = "accelerator.mistakes"

PREFIXES = {
    Shows.BITS: ("Wrong: bits", "Wrong: memory"),
    Shows.CRASH: ("crash: signal 11",),
    Shows.TIMES: ("Wrong: times",),
    Shows.PLACE: ("Wrong: place",),
}


@pytest.fixture(scope="module", autouse=True)
def _accelerator() -> None:
    processes.needed()


def shows(mistake: Mistake, found: str) -> bool:
    """Return whether an outcome is what a mistake should come to."""
    if mistake.shows is Shows.ERROR:
        return bool(found) and not found.startswith(("Wrong", "crash", "hangs"))
    return found.startswith(PREFIXES[mistake.shows])


def missed(chosen: Sequence[str]) -> dict[str, list[Outcome]]:
    """Return the mistakes that no seed finds, and what came of them."""
    left: dict[str, list[Outcome]] = {name: [] for name in chosen}

    def tasks() -> Iterator[Task]:
        for name in chosen:
            for seed in range(mistakes.WITHIN):
                if name in left:
                    yield Task(name, MISTAKES[name].workload, seed)

    for outcome in runner.outcomes(PLANTS, tasks()):
        name = outcome.task.planted
        left[name].append(outcome)
        if shows(MISTAKES[name], outcome.found):
            del left[name]
    return left


def failed(tasks: Sequence[Task]) -> list[Outcome]:
    return [outcome for outcome in runner.outcomes(PLANTS, tasks) if outcome.found]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_planted_mistakes_are_found(part: int) -> None:
    chosen = [name for name, mistake in MISTAKES.items() if mistake.quick]
    assert len(chosen) >= 14
    assert not missed(chosen[part::2])


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_all_planted_mistakes_are_found() -> None:
    assert not missed([name for name, mistake in MISTAKES.items() if not mistake.quick])


@pytest.mark.slow
def test_ten_seeds_without_a_mistake_end_as_on_the_cpu() -> None:
    names = [*WORKLOADS]
    assert not failed([Task("", names[place % len(names)], place % 10) for place in range(max(20, len(names)))])


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_all_trainings_end_as_on_the_cpu_ten_seeds_each() -> None:
    assert not failed([Task("", name, seed) for name in WORKLOADS for seed in range(5, 15)])


def test_each_call_that_orders_work_is_missed_where_it_is_left_out_or_explained() -> None:
    """The report is of these calls: `python -m accelerator.leave_out` tries those that it does not have."""
    found = {key for key, how in json.loads(leave_out.REPORT.read_text())["calls"].items() if how}
    keys = {call.key for call in leave_out.calls()}
    assert keys - found <= leave_out.UNNOTICED.keys()
    assert not found & leave_out.UNNOTICED.keys()
    assert leave_out.UNNOTICED.keys() <= keys
    assert len(keys & found) >= 0.75 * len(keys)


def test_each_mistake_has_a_training() -> None:
    assert all(mistake.workload in WORKLOADS for mistake in MISTAKES.values())


def test_each_mistake_is_planted_in_what_is_there() -> None:
    for plant in mistakes.plants().values():
        with plant():
            pass
    with pytest.raises(AttributeError), mistakes.instead(Mistake, "gone")(missed)():
        pass
