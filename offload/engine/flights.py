"""Keeps operations in flight on a queue of their own: for probes, and for reading a checkpoint.

Invariants: an operation is in `out` before it is started; `run` ends only when all operations have ended, or none has
ended for `stall_s`. The caller decides which operations there are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from offload import waits
from offload.errors import OffloadError
from offload.protocols import Completion, Queue

T = TypeVar("T")


class Flights(Generic[T]):
    """Operations in flight, whose text (`str`) is what the log calls them.

    Args:
        queue: Gets the completions of these operations, and no others.
        stall_s: Seconds without a completion after which all are given up; None for never.

    Attributes:
        out: Operations that have not ended, by id. Between runs there are none, except operations that were given up,
            or whose wait was interrupted: they may still use their memory.
    """

    def __init__(self, queue: Queue, stall_s: float | None = None) -> None:
        self.out: dict[int, T] = {}
        self._queue = queue
        self._stall_s = stall_s
        self._arrived: list[tuple[int, int, int, float, float]] = []  # completions; kept if an interrupt comes
        self._last_op = 0

    def run(
        self, next_item: Callable[[], T | None], start: Callable[[int, T], None]
    ) -> Generator[tuple[Completion, T], None, None]:
        """Yield operations as they end, each with its completion, and start others in their place.

        A caller that stops early must close this generator, which then waits for the operations in flight. If none
        ends for `stall_s` it returns: those left are in `out`.

        Args:
            next_item: Returns the next operation; None if there is none, or none before others have ended.
            start: Starts an operation under an id; raises an `OffloadError` if it was not started.
        """
        gave_up = False  # whether nothing has ended for `patience_s`
        patience_s = self._stall_s
        try:
            while not gave_up:
                self._start_all(next_item, start)
                if not self.out:
                    return
                # All are removed from `out` before the first is yielded, as the caller may stop after any.
                ended = self._take_ended(patience_s)
                gave_up = ended is None
                yield from ended or ()
        except (OffloadError, GeneratorExit):  # all that is in `out` has been started: it will end, or stall
            raise
        except BaseException:  # an interrupt, or a bug: what is in `out` may not have been started, and never end
            patience_s = waits.SETTLE_S
            raise
        finally:  # wait for the operations in flight, which use the caller's memory
            while self.out and not gave_up:
                gave_up = self._take_ended(patience_s) is None

    def _start_all(self, next_item: Callable[[], T | None], start: Callable[[int, T], None]) -> None:
        """Start operations until there is no next one; each is in `out` before it is started."""
        while (item := next_item()) is not None:
            self._last_op += 1
            self.out[self._last_op] = item
            try:
                start(self._last_op, item)
            except OffloadError:
                del self.out[self._last_op]
                raise

    def oldest(self) -> str:
        """Return the name of the operation in flight that was started first."""
        return str(next(iter(self.out.values())))

    def _take_ended(self, patience_s: float | None) -> list[tuple[Completion, T]] | None:
        """Wait for operations to end, and remove these from `out`; return None if none ends for `patience_s`."""
        if not waits.completions(self._queue, self.oldest, patience_s, self._arrived):
            return None
        # `_arrived` may still have completions of an earlier call that was interrupted; operations of these that are
        # not in `out` any more were removed by that call.
        ended = [(Completion(*record), self.out.pop(record[0])) for record in self._arrived if record[0] in self.out]
        self._arrived.clear()
        return ended
