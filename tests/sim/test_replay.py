"""A run is its list of events."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import saves
import swarm
from recorded import Recorded, assert_replays

from offload.schedule.machine import Machine
from offload.schedule.operations import (
    Begin,
    BeginSave,
    Done,
    Extend,
    Failed,
    Release,
    Reshare,
    Stop,
    Taken,
    TakeOver,
)

RUNS: dict[str, Callable[[int, type[Machine]], object]] = {
    "sweeps": lambda seed, machine: swarm.run_scenario(swarm.make_scenario(seed), machine),
    "plans that change": lambda seed, machine: swarm.run_scenario(swarm.make_changing_scenario(seed), machine),
    "saves": saves.run_seed,
}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "first"), [("sweeps", 0), ("plans that change", 200), ("saves", 400)])
def test_a_machine_that_is_given_the_same_events_decides_the_same(what: str, first: int) -> None:
    met: set[type] = set()
    for seed in range(first, first + 50):
        made: list[Recorded] = []

        class Noted(Recorded):
            def __init__(self, *arguments, made=made) -> None:
                super().__init__(*arguments)
                made.append(self)

        RUNS[what](seed, Noted)
        for machine in made:
            assert_replays(machine)
            met |= {type(event) for event in machine.events}
    also = {"sweeps": {Stop}, "plans that change": {Extend, Reshare}, "saves": {BeginSave, Release, TakeOver}}
    assert {Begin, Done, Failed, Taken} | also[what] <= met
