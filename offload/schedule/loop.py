"""The one loop between machine and executor, which sessions and simulations use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from offload.schedule.machine import Machine
from offload.schedule.operations import Event, Operation


class Executor(Protocol):
    """Starts operations on lanes and reports their ends as events; decides nothing."""

    def submit(self, operations: Sequence[Operation]) -> None:
        """Start operations; each is reported exactly once by a later `wait`."""

    def wait(self) -> list[Event]:
        """Wait for something to happen and return what has happened, in the order in which it did."""


def pump(machine: Machine, executor: Executor, until: Callable[[Machine], bool]) -> None:
    """Carry the machine's operations to the executor, and its events to the machine, until `until(machine)` holds."""
    executor.submit(machine.take_operations())
    while not until(machine):
        for event in executor.wait():
            machine.handle(event)
        executor.submit(machine.take_operations())
