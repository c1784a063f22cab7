"""A thread that makes calls one after another, and reports each to the queue: for updates that no kernel makes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from offload.errors import known
from offload.protocols import ERROR_CALL, Queue


class Calls:
    """The thread; it is started with the first call. `submit`, `take_error` and `close` belong to one thread.

    Args:
        completions: What calls are reported to.

    Attributes:
        ops: Operations that have been submitted; whoever takes a report discards its own.
    """

    def __init__(self, completions: Queue) -> None:
        self.ops: set[int] = set()
        self._completions = completions
        self._todo: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, op: int, call: Callable[[], None]) -> None:
        """Have a call made behind earlier ones; completes as operation `op`, with `ERROR_CALL` if it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="offload-updates", daemon=True)
            self._thread.start()
        self.ops.add(op)
        self._todo.put((op, call))

    def take_error(self) -> Exception:
        """Return what a call has raised; no further one is made."""
        return known(self._error, "a call has failed with nothing")

    def close(self) -> None:
        """Wait for the calls that have been submitted, and end the thread; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._todo.put(None)
            thread.join()

    def _serve(self) -> None:
        while (work := self._todo.get()) is not None:
            op, call = work
            started_s = time.monotonic()
            try:
                if self._error is None:
                    call()
            except Exception as error:
                self._error = error
            error_code = 0 if self._error is None else ERROR_CALL
            del work, call
            self._completions.post(op, error_code, started_s=started_s, finished_s=time.monotonic())
