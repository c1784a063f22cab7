"""Waiting: no wait of this package is silent for long, and each one has a way out.

These waits are for something that may never come: a device, another rank, another process, a thread that is stuck in
one of them. After `QUIET_S` without progress a warning names it; the warning is repeated ever more rarely.

A Ctrl-C is raised on the main thread, at any line. Work that it must not interrupt is done on another thread:
`apart`, or `side_by_side`. Work that may hang for good while a session ends is `BackgroundWork`, for which nobody has
to wait.

Not done here: deciding how long to wait.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

QUIET_S = 30.0
"""How long a wait may be silent."""

SETTLE_S = 5.0
"""How long work that has been given up may take to end in good order."""

SLICE_S = 0.5
"""How long a native wait may delay a Ctrl-C."""

PART_S = 0.125
"""Longest part of a `Silence.wait`, which waits in parts so that it notices when the process was stopped."""

STOPPED_S = 1.0
"""A part that ends this much too late shows that the process was probably stopped: a busy machine is late by less."""

log = logging.getLogger("offload")

T = TypeVar("T")


class Silence:
    """The time since something happened last, for callers that wait in a loop of their own.

    Time in which this process was stopped (Ctrl-Z, a paused container) does not count: the threads that serve devices
    were stopped, too, so it says nothing about a device.
    """

    def __init__(self) -> None:
        """Start a silence now."""
        self._stopped_s = 0.0
        self.end()

    def end(self) -> None:
        """Note that something has happened: the silence starts anew."""
        self._since_s = self.now_s
        self._due_s = self._since_s + QUIET_S

    @property
    def now_s(self) -> float:
        """Seconds on a clock that stands still while this process is stopped in a wait of this silence."""
        return time.monotonic() - self._stopped_s

    @property
    def lasts_s(self) -> float:
        """Seconds since something happened last."""
        return self.now_s - self._since_s

    @property
    def left_s(self) -> float:
        """Seconds until the next warning is due."""
        return max(self._due_s - self.now_s, 0.0)

    def wait(self, arrived: Callable[[float], T], most_s: float) -> T:
        """Call `arrived` again and again until it returns something true, or `most_s` are over.

        Args:
            arrived: Waits at most for the seconds that it is given, never more than `PART_S`. If a call takes much
                longer (`STOPPED_S`), that counts as a time in which this process was stopped.
            most_s: Seconds on the clock of `now_s`, so without times in which the process was stopped.

        Returns:
            What `arrived` has returned last.
        """
        until_s = self.now_s + most_s
        while True:
            began_s = time.monotonic()
            pause_s = min(max(until_s - self.now_s, 0.0), PART_S)
            result = arrived(pause_s)
            late_s = time.monotonic() - began_s - pause_s
            if late_s > STOPPED_S:
                self._stopped_s += late_s  # which sets back `now_s`, so `until_s` is later by the same time
            if result or self.now_s >= until_s:
                return result

    def warn_if_due(self, what: Callable[[], str]) -> None:
        """If a warning is due, log what is waited for.

        Args:
            what: Names the thing that is waited for; returns "" if somebody else logs it.
        """
        if self.left_s:
            return
        lasts_s = self.lasts_s
        self._due_s += max(lasts_s, QUIET_S)  # the next warning comes when the silence has lasted about twice as long
        awaited = what()
        if awaited:
            log.warning("nothing has happened for %.0f s; waiting for %s", lasts_s, awaited)


def wait_for(arrived: Callable[[float], object], what: Callable[[], str], timeout_s: float | None = None) -> bool:
    """Wait until something arrives, and log what is waited for if that takes long. A Ctrl-C ends the wait.

    Args:
        arrived: Called with a number of seconds; waits at most so long, and returns whether the thing has arrived.
        what: Names the thing, for the log; "" if somebody else logs it.
        timeout_s: How long to wait, without time in which this process was stopped; None for as long as it takes.

    Returns:
        Whether it has arrived.
    """
    silence = Silence()
    until_s = math.inf if timeout_s is None else silence.now_s + timeout_s
    while True:
        if silence.wait(arrived, min(silence.left_s, max(until_s - silence.now_s, 0.0))):
            return True
        if silence.now_s >= until_s:
            return False
        silence.warn_if_due(what)


class _Completions(Protocol):
    """The part of a completion queue that is waited for."""

    def wait(self, timeout_s: float = -1.0) -> list[Any]:
        """Take all completions that have arrived, as `offload.protocols.Queue.wait` does."""


def completions(
    queue: _Completions, what: Callable[[], str], timeout_s: float | None = None, into: list[Any] | None = None
) -> list[Any]:
    """Wait for completions on a queue and return them: at least one, or none after `timeout_s`.

    Args:
        queue: The queue.
        what: Names what is waited for, for the log.
        timeout_s: How long to wait; None for as long as it takes.
        into: The list to fill and return, so that after an interrupt the caller has what had arrived. If it has
            completions already, the call waits for a moment (`PART_S`) at most.
    """
    collected = [] if into is None else into

    def arrived(pause_s: float) -> bool:
        """Wait for completions, and add them to the list, for `wait_for`."""
        # `extend` calls `queue.wait` by `map`, all within native code. A Ctrl-C is raised between instructions of
        # Python only: between a plain call of `wait` and the use of its result, completions would be lost.
        collected.extend(itertools.chain.from_iterable(map(queue.wait, (pause_s,))))
        return bool(collected)

    wait_for(arrived, what, timeout_s)
    return collected


class Latch:
    """Like a `threading.Event` that is set once; but a wait may be interrupted at any line without harm.

    In `threading.Event`, which is Python code, an interrupt may leave a lock locked, or lead to a RuntimeError.

    A flag says whether the latch is set. A lock, which is locked until then, only wakes the waiters: each acquires
    it, and releases it for the next one.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._unset = threading.Lock()  # locked until the latch is set, and for moments by waits afterwards
        self._unset.acquire()

    def is_set(self) -> bool:
        """Whether it has been set."""
        return self._is_set

    def set(self) -> None:
        """Set it, once; only its owner may."""
        self._is_set = True
        self._unset.release()

    def wait(self, pause_s: float | None = None) -> bool:
        """Wait until it is set, at most `pause_s`; return whether it is."""
        until_s = math.inf if pause_s is None else time.monotonic() + pause_s
        while not self._is_set:
            left_s = until_s - time.monotonic()
            # In slices, after which the flag is looked at: another waiter may have been interrupted between acquiring
            # and releasing the lock, which then stays locked.
            if self._unset.acquire(timeout=max(min(left_s, SLICE_S), 0.0)):
                self._unset.release()
            if left_s <= 0:
                break
        return self._is_set


class BackgroundWork:
    """Work that is done once, on a thread of its own; callers wait for it, and may give the wait up.

    For work that may hang, and for work that no Ctrl-C may interrupt: Python raises that on the main thread. The
    work's thread is a daemon, so an interpreter that exits does not wait for it. Until the work ends, the thread
    keeps all that it needs: memory that a device may still write to stays mapped, descriptors stay open.

    Args:
        work: The work.
        name: The thread's name.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._name = name
        # Locked, and never released, by whoever is first to begin the work or to forestall it.
        self._begun = threading.Lock()
        self._ended = Latch()
        self.error: BaseException | None = None
        """The exception that the work has raised."""

    @property
    def started(self) -> bool:
        """Whether the work has begun, or has been forestalled."""
        return self._begun.locked()

    @property
    def done(self) -> bool:
        """Whether the work has ended, well or not."""
        return self._ended.is_set()

    def start(self) -> None:
        """Start the work on its thread; idempotent, also after an interrupt at any point of another call.

        Two calls may start a thread each: the second thread finds that the work has begun, and ends.
        """
        if self.started:
            return
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except (RuntimeError, MemoryError, OSError):  # no more threads or memory, or the interpreter is exiting
            self._run()  # on the caller's thread: rather so than not at all

    def forestall(self) -> bool:
        """Keep the work from ever beginning; return False if it is too late, as the work has begun."""
        return self._begun.acquire(blocking=False)

    def wait(self, pause_s: float | None = None) -> bool:
        """Wait for the end, at most `pause_s`; return whether the work has ended."""
        return self._ended.wait(pause_s)

    def do(self, what: Callable[[], str], timeout_s: float | None = None) -> bool:
        """Start, wait for the end (see `wait_for`) and return whether the work has ended; raise its error."""
        self.start()
        has_ended = wait_for(self.wait, what, timeout_s)
        if has_ended and self.error is not None:
            raise self.error
        return has_ended

    def _run(self) -> None:
        """Do the work on the current thread, unless it was forestalled or has begun before."""
        if not self._begun.acquire(blocking=False):
            return
        work, self._work = self._work, _do_nothing  # so what the work refers to is freed when it has ended
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()


def _do_nothing() -> None:
    """Do nothing: stands for work that has been done."""


def apart(work: Callable[[], None], name: str, what: Callable[[], str], timeout_s: float | None = None) -> bool:
    """Do work on a thread of its own, so that no interrupt comes between its parts; see `BackgroundWork.do`."""
    return BackgroundWork(work, name).do(what, timeout_s)


def side_by_side(
    works: Sequence[Callable[[], None]], name: str, what: Callable[[], str], give_up: Callable[[], None] = _do_nothing
) -> None:
    """Do several works at once, each on a thread of its own, and wait until all have ended.

    Args:
        works: The works. At an interrupt those that have not begun never begin; it is raised again when the others
            have ended.
        name: Name of the threads.
        what: See `wait_for`.
        give_up: Called at an interrupt, to make the works end soon.

    Raises:
        BaseException: The error of the first of them, in this order, that raised one.
    """
    all_work = [BackgroundWork(work, name) for work in works]
    try:
        for work in all_work:
            work.start()
        for work in all_work:
            wait_for(work.wait, what)
    except BaseException:
        give_up()
        for work in all_work:
            if not work.forestall():  # it has begun, so wait for its end: it may use memory of the caller
                work.wait()
        raise
    for work in all_work:
        if work.error is not None:
            raise work.error
