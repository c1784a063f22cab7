"""Keeping operations in flight on a queue of their own: for probes, and for reading a checkpoint.

Invariants: what is in flight is noted before it is started; a run ends only when all of it has ended, or when it has
been waited for in vain. Nothing is decided here about which operations there are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from offload import waits
from offload.errors import OffloadError
from offload.protocols import Completion, Queue

T = TypeVar("T")


class Flights(Generic[T]):
    """Operations in flight.

    Args:
        queue: Where they report; nobody else does.
        what: Names an operation that is waited for, for the log.
        stall_s: How long all of them may be silent before they are given up; None for as long as it takes.

    Attributes:
        out: Operations that have not ended, by id. Between runs there are none, unless they were given up or the wait
            for them was interrupted: they may still use their memory.
    """

    def __init__(self, queue: Queue, what: Callable[[T], str], stall_s: float | None = None) -> None:
        self.out: dict[int, T] = {}
        self._queue = queue
        self._what = what
        self._stall_s = stall_s
        self._arrived: list[tuple[int, int, int, float, float, int]] = []
        self._ops = 0

    def run(
        self, take: Callable[[], T | None], start: Callable[[int, T], None]
    ) -> Generator[tuple[Completion, T], None, None]:
        """Yield operations as they end, and start others in their place; to be closed by whoever stops early.

        Args:
            take: Returns the next operation, or None if there is none, or none before others have ended.
            start: Starts it under an id; an `OffloadError` says that it was not started.
        """
        gave_up, patience_s = False, self._stall_s
        try:
            while not gave_up:
                while (item := take()) is not None:
                    self._ops += 1
                    self.out[self._ops] = item
                    try:
                        start(self._ops, item)
                    except OffloadError:
                        del self.out[self._ops]
                        raise
                if not self.out:
                    return
                # Out of `out` first, all of them: whoever iterates may stop at any.
                landed = self._landed(patience_s)
                gave_up = landed is None
                yield from landed or ()
        except (OffloadError, GeneratorExit):
            raise
        except BaseException:  # an interrupt, at any line: what is in `out` may not have been started
            patience_s = waits.SETTLE_S
            raise
        finally:
            while self.out and not gave_up:
                gave_up = self._landed(patience_s) is None

    def oldest(self) -> str:
        """Name the operation that was started first of those in flight."""
        return self._what(next(iter(self.out.values())))

    def _landed(self, patience_s: float | None) -> list[tuple[Completion, T]] | None:
        """Return what has ended since it was last asked; None if nothing ends for `patience_s`."""
        if not waits.completions(self._queue, self.oldest, patience_s, self._arrived):
            return None
        # Those that are not in `out` were taken out of it before an interrupt.
        landed = [(Completion(*record), self.out.pop(record[0])) for record in self._arrived if record[0] in self.out]
        self._arrived.clear()
        return landed
