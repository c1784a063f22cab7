"""Threads of a tier in Python, which no exit has to wait for if their device hangs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_STOP = None
"""In the queue: ends the thread that gets it."""


class Lane:
    """The threads of a lane: they take work from one queue, in order, each one piece of work at a time.

    They are daemons, unlike those of `concurrent.futures`: an interpreter that exits does not wait for them.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.set_threads(threads)

    def put(self, work: Callable[[], None]) -> None:
        """Queue `work` for a thread; it must not raise."""
        self._work.put(work)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a call for a thread; return its future, as executors of `concurrent.futures` do."""
        future: Future[Any] = Future()

        def work() -> None:
            """Make the call, unless the future was cancelled, and give the future the outcome."""
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
        """Finish all work, then go on with `threads` threads; RuntimeError if the system gives no more."""
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
        """Do what is queued until `_STOP` comes; one thread's work."""
        while (work := self._work.get()) is not _STOP:
            work()
