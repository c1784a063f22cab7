"""A machine that writes down its events, and what another one that is given them decides."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from offload.schedule.machine import Machine
from offload.schedule.operations import Event, Operation


class Recorded(Machine):
    """Writes down all events as they come in at the one door, and all operations as they are taken."""

    def __init__(self, plan: Any, index: Any, *told: Any) -> None:
        self.begun = plan, deepcopy(index)
        self.events: list[Event] = []
        self.operations: list[Operation] = []
        super().__init__(plan, index, *told)

    def handle(self, event: Event) -> None:
        self.events.append(event)
        super().handle(event)

    def take_operations(self) -> list[Operation]:
        out = super().take_operations()
        self.operations += out
        return out


def assert_replays(machine: Recorded) -> None:
    """Give a machine's events to a new one: it decides the same operations and ends as the first one has."""
    plan, index = machine.begun
    again, operations = Machine(plan, deepcopy(index)), []
    for event in machine.events:
        again.handle(event)
        operations += again.take_operations()
    assert operations == machine.operations
    for name in ("plan", "failed", "finished_sweep", "changed_subgroups", "phases", "slots", "in_flight"):
        assert getattr(again, name) == getattr(machine, name), name
    # An error of the machine's own is equal to no other.
    assert repr((again.broken, again.saver.finished_save)) == repr((machine.broken, machine.saver.finished_save))
    assert again.saver.held_records == machine.saver.held_records
    assert vars(again.index) == vars(machine.index)
