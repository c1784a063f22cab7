"""Waiting: no wait of this package is silent for long, and each one has a way out.

A wait here is for something that may never come: a device, another rank, another process, a thread that is stuck in
one of them. After `QUIET_S` without progress a warning names what is waited for; it comes back ever more rarely.

A Ctrl-C is raised on the main thread, at any line. What it must not cut in two is done on another one: `apart`, or
`side_by_side`. What may hang for good while a session ends is `BackgroundWork`, which goes on when nobody waits for
it any more.

Not done here: deciding how long a wait is worth while.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

QUIET_S = 30.0
"""How long a wait may be silent."""

SETTLE_S = 5.0
"""How long what has been given up may take to end in good order."""

SLICE_S = 0.5
"""How long a native wait may keep Python from a Ctrl-C."""

log = logging.getLogger("offload")


class Silence:
    """The time since something happened last, for whoever waits in a loop of its own."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """Take note that something has happened."""
        self._since_s = time.monotonic()
        self._due_s = self._since_s + QUIET_S

    @property
    def lasts_s(self) -> float:
        """How long nothing has happened."""
        return time.monotonic() - self._since_s

    @property
    def left_s(self) -> float:
        """How long until something is to be said."""
        return max(self._due_s - time.monotonic(), 0.0)

    def tell(self, what: Callable[[], str]) -> None:
        """Log what is waited for, if it is time to; "" for what somebody else has said."""
        if self.left_s:
            return
        lasts_s = self.lasts_s
        self._due_s += max(lasts_s, QUIET_S)  # twice as late as the last time
        if story := what():
            log.warning("nothing has happened for %.0f s; waiting for %s", lasts_s, story)


def wait_for(arrived: Callable[[float], object], what: Callable[[], str], timeout_s: float | None = None) -> bool:
    """Wait until something arrives, and say what for if that takes long. A Ctrl-C is a way out.

    Args:
        arrived: Waits for so many seconds at most; returns whether it has come.
        what: Names it, for the log; "" for what somebody else says.
        timeout_s: How long to wait; None for as long as it takes.

    Returns:
        Whether it has come.
    """
    silence = Silence()
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        pause_s = silence.left_s
        if until_s is not None:
            pause_s = min(pause_s, max(until_s - time.monotonic(), 0.0))
        if arrived(pause_s):
            return True
        if until_s is not None and time.monotonic() >= until_s:
            return False
        silence.tell(what)


class _Completions(Protocol):
    """The part of a completion queue that is waited for."""

    def wait(self, timeout_s: float = -1.0) -> list[Any]:
        """See `offload.protocols.Queue.wait`."""


def completions(
    queue: _Completions, what: Callable[[], str], timeout_s: float | None = None, found: list[Any] | None = None
) -> list[Any]:
    """Return what has arrived on a queue, at least one completion; nothing only after `timeout_s`.

    Args:
        queue: Which.
        what: Names what is waited for, for the log.
        timeout_s: How long to wait; None for as long as it takes.
        found: Is returned, with what it holds already; an interrupt leaves in it what has arrived.
    """
    into = [] if found is None else found

    def arrived(pause_s: float) -> bool:
        # One call, as a Ctrl-C is raised when the wait is over: what it has taken from the queue would be lost.
        into.extend(itertools.chain.from_iterable(map(queue.wait, (min(pause_s, SLICE_S),))))
        return bool(into)

    wait_for(arrived, what, timeout_s)
    return into


class Latch:
    """A `threading.Event` that is set once, and whose wait an interrupt may end at any line.

    An event's own Python code may be left locked by one, or raise a RuntimeError of its own over it.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._unset = threading.Lock()
        self._unset.acquire()

    def is_set(self) -> bool:
        """Whether it has been set."""
        return self._is_set

    def set(self) -> None:
        """Set it; by its one owner, once."""
        self._is_set = True
        self._unset.release()

    def wait(self, pause_s: float | None = None) -> bool:
        """Wait until it is set, for so long at most; return whether it is."""
        until_s = math.inf if pause_s is None else time.monotonic() + pause_s
        while not self._is_set:
            left_s = until_s - time.monotonic()
            # In slices: another waiter may have been interrupted with the lock.
            if self._unset.acquire(timeout=max(min(left_s, SLICE_S), 0.0)):
                self._unset.release()
            if left_s <= 0:
                break
        return self._is_set


class BackgroundWork:
    """Work that is done once on a thread of its own, which outlives whoever waits for it.

    For work that may hang, and for work between whose parts no Ctrl-C may come: Python raises that on the main
    thread. This one is a daemon, so an interpreter that exits does not wait for it either, and holds all that the
    work needs until then: memory that a device may still write to stays mapped, descriptors stay open.

    Args:
        work: What to do.
        name: The thread's.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._name = name
        self._taken = threading.Lock()
        self._ended = Latch()
        self.error: BaseException | None = None
        """What the work has raised."""

    @property
    def started(self) -> bool:
        """Whether the work has begun."""
        return self._taken.locked()

    @property
    def done(self) -> bool:
        """Whether the work has ended, well or not."""
        return self._ended.is_set()

    def start(self) -> None:
        """Start; idempotent, also after an interrupt at any point of another call."""
        if self.started:
            return
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except (RuntimeError, MemoryError, OSError):  # no more threads or memory, or the interpreter is exiting
            self._run()

    def forestall(self) -> bool:
        """Have the work never begin; return whether that came too late."""
        return not self._taken.acquire(blocking=False)

    def wait(self, pause_s: float | None = None) -> bool:
        """Wait for the end, for so long at most; return whether it has come."""
        return self._ended.wait(pause_s)

    def do(self, what: Callable[[], str], timeout_s: float | None = None) -> bool:
        """Start, and wait for the end (see `wait_for`); return whether it has come. Raises the work's error."""
        self.start()
        has_ended = wait_for(self.wait, what, timeout_s)
        if has_ended and self.error is not None:
            raise self.error
        return has_ended

    def _run(self) -> None:
        if self.forestall():
            return
        work, self._work = self._work, _nothing
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()


def _nothing() -> None:
    pass


def apart(work: Callable[[], None], name: str, what: Callable[[], str], timeout_s: float | None = None) -> bool:
    """Do work on a thread of its own, so that no interrupt comes between its parts; see `BackgroundWork.do`."""
    return BackgroundWork(work, name).do(what, timeout_s)


def side_by_side(
    works: Sequence[Callable[[], None]], name: str, what: Callable[[], str], give_up: Callable[[], None] = _nothing
) -> None:
    """Do several works at once, each on a thread of its own, and wait until all have ended.

    Args:
        works: What to do; what has begun ends before an interrupt is raised.
        name: That of the threads.
        what: See `wait_for`.
        give_up: Called at an interrupt, to have them end soon.

    Raises:
        BaseException: What the first of them, in this order, has raised.
    """
    crew = [BackgroundWork(work, name) for work in works]
    try:
        for each in crew:
            each.start()
        for each in crew:
            wait_for(each.wait, what)
    except BaseException:
        give_up()
        for each in crew:
            if each.started:
                each.wait()
        raise
    for each in crew:
        if each.error is not None:
            raise each.error
