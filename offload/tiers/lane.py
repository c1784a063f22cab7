"""Threads of a tier in Python, which nobody has to wait for if their device hangs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_STOP = None


class Lane:
    """Threads that take work from one queue, in order.

    They are daemons, unlike those of `concurrent.futures`: an interpreter that exits does not wait for them.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.set_threads(threads)

    def put(self, work: Callable[[], None]) -> None:
        """Have `work` done; it must not raise."""
        self._work.put(work)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have a call made; return what becomes of it, as executors of `concurrent.futures` do."""
        future: Future[Any] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = call(*arguments)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        self.put(work)
        return future

    def set_threads(self, threads: int) -> None:
        """Go on with so many threads; RuntimeError if the system has not so many."""
        self.close()
        for number in range(threads):
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Finish all work and end the threads."""
        for _ in self._threads:
            self._work.put(_STOP)
        while self._threads:
            self._threads.pop().join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not _STOP:
            work()
