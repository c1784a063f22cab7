"""A run is its list of events."""

from __future__ import annotations

import pytest
from callers import CHOICES
from recorded import Recorded, assert_replays
from world.driver import run_seed

from offload.schedule.operations import (
    BeginSave,
    BeginSweep,
    Done,
    Extend,
    Failed,
    OutcomeTold,
    ReleaseSave,
    Reshare,
    Stop,
    TakeOver,
)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "first"), [("sweeps", 0), ("changing", 200), ("saves", 400)])
def test_a_machine_that_is_given_the_same_events_decides_the_same(what: str, first: int) -> None:
    met: set[type] = set()
    for seed in range(first, first + 50):
        made: list[Recorded] = []

        class Noted(Recorded):
            def __init__(self, *arguments, made=made) -> None:
                super().__init__(*arguments)
                made.append(self)

        run_seed(CHOICES[what], seed, Noted)
        for machine in made:
            assert_replays(machine)
            met |= {type(event) for event in machine.events}
    also = {"sweeps": {Stop}, "changing": {Extend, Reshare}, "saves": {BeginSave, ReleaseSave, TakeOver}}
    assert {BeginSweep, Done, Failed, OutcomeTold} | also[what] <= met
