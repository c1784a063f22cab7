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
from world.executor import SimExecutor

from offload.plan import PathRates, Rates, visit_order
from offload.schedule.index import TileIndex
from offload.schedule.loop import pump
from offload.schedule.machine import Machine
from offload.schedule.operations import BeginSave, BeginSweep, ReleaseSave, Save, Sweep, Visit

SUBGROUPS = 24


@dataclass
class Steady:
    """One step of many: its seconds, and what was read and written from its begin to the next's, in subgroups."""

    step_s: float
    read: float
    written: float
    unfinished: int


def steady(slots: int, read: float, write: float, *, flushing: bool = False, ahead: int = 0) -> Steady:
    """Simulate steps.

    Args:
        slots: Of the arena.
        read: Rate of reads.
        write: Rate of writes.
        flushing: Whether all is written between steps, as for a checkpoint.
        ahead: Subgroups that are read between steps: the first that the next step would have to read.
    """
    plan = make(SUBGROUPS, slots)
    rates = Rates(plan.slot_bytes * 1e4, (PathRates(plan.slot_bytes * read, plan.slot_bytes * write),))
    index = TileIndex([(path.available_bytes, 1.0) for path in plan.budgets.paths], plan.slot_counts)
    machine, executor = Machine(plan, index), SimExecutor(plan, rates)
    begun_s, moved, step_s, unfinished = 0.0, executor.lane_bytes, 0.0, 0
    for number in range(1, 6):
        pump(machine, executor, lambda m: m.in_flight == 0)
        before, moved = moved, executor.lane_bytes
        begun_s = executor.now_s
        order = visit_order(range(SUBGROUPS), machine.slots)
        executor.inject(BeginSweep(Sweep(number, number, tuple(Visit(subgroup) for subgroup in order))))
        pump(machine, executor, lambda m: m.finished_sweep is not None)
        assert machine.broken is None
        machine.take_finished_sweep()
        machine.check()
        step_s, unfinished = executor.now_s - begun_s, machine.in_flight
        if flushing:
            executor.inject(BeginSave(Save(number)))
            pump(machine, executor, lambda m: m.saver.finished_save is not None)
            machine.take_finished_save()
            executor.inject(ReleaseSave(number))
        if ahead:
            order = visit_order(range(SUBGROUPS), machine.slots)
            first = [subgroup for subgroup in order if subgroup not in machine.slots][:ahead]
            executor.inject(BeginSweep(Sweep(100 + number, number, tuple(Visit(s, changes=False) for s in first))))
            pump(machine, executor, lambda m: m.finished_sweep is not None)
            machine.take_finished_sweep()
    size = plan.slot_bytes
    return Steady(
        step_s, (moved["read:0"] - before["read:0"]) / size, (moved["write:0"] - before["write:0"]) / size, unfinished
    )


@pytest.mark.parametrize("slots", [2, 8, 20])
@pytest.mark.parametrize(("read", "write"), [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0), (1.0, 10.0)])
def test_time_between_steps_cannot_hide_more(slots: int, read: float, write: float) -> None:
    least = SUBGROUPS - slots
    now = steady(slots, read, write)
    assert (now.read, now.written) == (least, least)
    assert now.unfinished == 0  # what had to be written gave its place to the last fetches, so it was through before
    # Filling and draining cost one subgroup on the faster lane; all else is the slower lane's work.
    assert now.step_s == pytest.approx(least / min(read, write) + 1 / max(read, write), rel=1e-2)

    flushing = steady(slots, read, write, flushing=True)
    assert (flushing.read, flushing.written) == (least, SUBGROUPS)
    assert flushing.step_s == pytest.approx(now.step_s)

    for ahead in (1, 2):
        fetching = steady(slots, read, write, flushing=True, ahead=ahead)
        assert (fetching.read, fetching.written) == (least + ahead, SUBGROUPS)
        assert fetching.step_s >= now.step_s * (1 - 1e-9)
