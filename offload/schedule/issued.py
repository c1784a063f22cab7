"""Operations that a machine has decided on, until they report back: one list that all its books add to. Pure."""

from __future__ import annotations

import itertools

from offload.errors import InternalError, invariant
from offload.schedule.operations import Operation


class Issued:
    """The operations that one machine has issued.

    Attributes:
        in_flight: Those that have been issued and not reported back, by id.
    """

    def __init__(self) -> None:
        self.in_flight: dict[int, Operation] = {}
        self._ids = itertools.count(1)
        self._untaken: list[Operation] = []  # not yet handed out by `take`
        self._is_closed = False  # whether `issue` refuses operations

    def new_op(self) -> int:
        """Return the id of the next operation."""
        return next(self._ids)

    def issue(self, operation: Operation) -> None:
        """Queue an operation for the executor, which starts it.

        Raises:
            InternalError: After `close`.
        """
        if self._is_closed:  # not by `invariant`: the message costs more than all else here
            raise InternalError(f"{operation} after a fatal error (this is a bug in offload, please report it)")
        self.in_flight[operation.op] = operation
        self._untaken.append(operation)

    def take(self) -> list[Operation]:
        """Return the operations to be started now, in order; each is returned once."""
        untaken, self._untaken = self._untaken, []
        return untaken

    def end(self, op: int) -> Operation:
        """Remove an operation, which reports back, from those in flight, and return it."""
        invariant(op in self.in_flight, f"operation {op} reports back but is not in flight")
        return self.in_flight.pop(op)

    def close(self) -> list[Operation]:
        """Refuse further operations; return those that were issued and not taken, which will not be started."""
        self._is_closed = True
        unstarted = self.take()
        for operation in unstarted:
            del self.in_flight[operation.op]
        return unstarted
