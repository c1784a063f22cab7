"""What the time between steps could be used for, and why nothing is moved in it.

With S bytes streamed and an arena of A bytes, a step updates all of S, and no update can start before the step (no
clip factor is known). At its begin at most A lie in memory, so at least S - A are read in it; at its end at most A
newest versions are in memory only, so at least S - A are written in it. The machine needs exactly that much: it
visits first what the arena holds and leaves last what the next step visits first, unwritten. Writing that between
steps makes no later write unnecessary, because the next step changes all of it again; giving its place to something
else makes one more read necessary.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from test_predict import make

from offload.engine.index import TileIndex
from offload.engine.loop import pump
from offload.engine.machine import Machine
from offload.engine.operations import Begin, Sweep, Visit
from offload.engine.staging import Phase
from offload.plan import PathRates, Rates, visit_order
from offload.sim.executor import SimExecutor

SUBGROUPS = 24


class FlushesWhenIdle(Machine):
    """Writes what is left in the arena as soon as a step has ended."""

    def _advance(self) -> None:
        super()._advance()
        for subgroup in list(self._staging.dirty) if self.idle and self.broken is None else []:
            if self.phases[subgroup] is Phase.DIRTY:
                self._flush(subgroup)


@dataclass
class Steady:
    """One step of many: its seconds, and what was read and written from its begin to the next's, in subgroups."""

    step_s: float
    read: float
    written: float
    unfinished: int


def steady(kind: type[Machine], slots: int, read: float, write: float, freed: int = 0) -> Steady:
    """Simulate steps with time enough in between to write everything; `freed` clean slots are given up in it."""
    plan = make(SUBGROUPS, slots)
    rates = Rates(plan.slot_bytes * 1e4, (PathRates(plan.slot_bytes * read, plan.slot_bytes * write),))
    index = TileIndex([(path.available_bytes, 1.0) for path in plan.budgets.paths], plan.slot_counts)
    machine, executor = kind(plan, index), SimExecutor(plan, rates)
    begun_s, moved, step_s, unfinished = 0.0, executor.lane_bytes, 0.0, 0
    for number in range(1, 6):
        pump(machine, executor, lambda m: m.in_flight == 0)
        owners = machine._staging.slots.owners[: freed if number > 1 else 0]
        for owner in (owner for owner in owners if owner is not None):
            machine._staging.vacate(owner)
        before, moved = moved, executor.lane_bytes
        begun_s = executor.now_s
        order = visit_order(range(SUBGROUPS), machine.slots)
        executor.inject(Begin(Sweep(number, number, tuple(Visit(subgroup) for subgroup in order))))
        pump(machine, executor, lambda m: m.finished is not None)
        assert machine.broken is None
        machine.take_finished()
        machine.check()
        step_s, unfinished = executor.now_s - begun_s, machine.in_flight
    size = plan.slot_bytes
    return Steady(
        step_s, (moved["read:0"] - before["read:0"]) / size, (moved["write:0"] - before["write:0"]) / size, unfinished
    )


@pytest.mark.parametrize("slots", [2, 8, 20])
@pytest.mark.parametrize(("read", "write"), [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (1.0, 10.0)])
def test_time_between_steps_cannot_hide_more(slots: int, read: float, write: float) -> None:
    least = SUBGROUPS - slots
    now = steady(Machine, slots, read, write)
    assert (now.read, now.written) == (least, least)
    assert now.unfinished == 0  # what had to be written gave its place to the last fetches, so it was through before
    # Filling and draining cost one subgroup on the faster lane; all else is the slower lane's work.
    assert now.step_s == pytest.approx(least / min(read, write) + 1 / max(read, write), rel=1e-2)

    flushing = steady(FlushesWhenIdle, slots, read, write)
    assert (flushing.read, flushing.written) == (least, SUBGROUPS)
    assert flushing.step_s == pytest.approx(now.step_s)

    for freed in (1, 2):  # places for the first fetches, so that they start at once
        fetching = steady(FlushesWhenIdle, slots, read, write, freed)
        assert (fetching.read, fetching.written) == (least + freed, SUBGROUPS)
        assert fetching.step_s >= now.step_s * (1 - 1e-9)
