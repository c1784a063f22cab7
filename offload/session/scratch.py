"""Scratch as callers' threads fill and read it: what buffers they want, and when they have them.

Which owner has which buffer is decided by the machine (`offload.schedule.scratch`), on the engine thread. A caller
posts what it does, and waits for a buffer alone: posts are taken up between events, whatever sweep is under way.

Not here: what lies in buffers (`offload.gradients.paths`, `offload.session.activations`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from offload import waits
from offload.protocols import WAKE, Mark, Owner, ScratchKind
from offload.schedule.operations import Ready, Want
from offload.session.parts import SessionParts


class Wanted:
    """A buffer that a caller wants, to fill it (`fills`) or to read it.

    Attributes:
        buffer: Its number, once `answered`; None where there is none.
        error: Why it cannot be read, or filled.
        mark: After the last copy that a device makes to the buffer, or from it.
        is_known: Whether the engine has heard of it; an interrupt may come before it is asked.
    """

    def __init__(self, owner: Owner, *, fills: bool) -> None:
        self.owner, self.fills = owner, fills
        self.is_known = False
        self.buffer: int | None = None
        self.error: Exception | None = None
        self.mark: Mark | None = None
        self.answered = waits.Latch()

    def begin(self) -> None:
        """Take in that the engine hears of it; on the engine thread, before the machine does."""

    def end(self) -> None:
        """Take in that nothing touches the buffer for it any more; on the engine thread, after the machine has."""


class Wants:
    """What callers want of a session's scratch.

    Args:
        parts: The session's.
    """

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts
        self._posts: deque[tuple[Callable[[Any], None], Any]] = deque()
        # On the engine thread
        self._awaited: list[Wanted] = []
        self._behind: list[Wanted] = []  # what is ready when a device has copied

    # On callers' threads

    def post(self, take_in: Callable[[Any], None], what: Any) -> None:
        """Have the engine thread take something in, in order; a garbage collector may do so at any line."""
        self._posts.append((take_in, what))

    def ask(self, wanted: Wanted) -> None:
        """Ask for a buffer."""
        self.post(self._begin, wanted)
        self.wake()

    def ready(self, wanted: Wanted) -> None:
        """Say that a buffer has been filled or read, once its mark is reached, or is not wanted any more."""
        self.post(self._end, wanted)

    def wake(self) -> None:
        """Have the engine thread look at what was posted."""
        self._parts.queue.post(WAKE)

    # On the engine thread

    def is_due(self) -> bool:
        """Return whether `serve` has something to do."""
        has_copied = any(wanted.mark is None or wanted.mark.reached() for wanted in self._behind)
        return bool(self._posts) or has_copied or any(map(self._is_answerable, self._awaited))

    def serve(self) -> None:
        """Take in what callers have done, and answer them."""
        self.take_posts()
        machine = self._parts.machine
        self._parts.executor.submit(machine.take_operations())
        for wanted in [wanted for wanted in self._awaited if self._is_answerable(wanted)]:
            self._awaited.remove(wanted)
            scratch, owner = machine.scratch[wanted.owner.kind], wanted.owner.number
            wanted.error = machine.broken if machine.broken is not None else scratch.error_of(owner)
            has_it = scratch.may_fill(owner) if wanted.fills else scratch.is_there(owner)
            if wanted.error is None and has_it:
                wanted.buffer = scratch.buffer_of(owner)
            wanted.answered.set()

    def take_posts(self) -> None:
        """Take in what callers have done."""
        behind, self._behind = self._behind, []
        for wanted in behind:
            self._let_go(wanted)
        while self._posts:
            take_in, what = self._posts.popleft()
            take_in(what)

    def are_in_use(self, kind: ScratchKind) -> bool:
        """Return whether any data of a kind is of use."""
        self.take_posts()
        return self._parts.machine.scratch[kind].is_in_use

    def _is_answerable(self, wanted: Wanted) -> bool:
        machine, owner = self._parts.machine, wanted.owner.number
        if machine.broken is not None:
            return True
        scratch = machine.scratch[wanted.owner.kind]
        if wanted.fills:
            return scratch.may_fill(owner) or scratch.finds_none(owner)
        return scratch.is_there(owner) or scratch.error_of(owner) is not None

    def _begin(self, wanted: Wanted) -> None:
        wanted.begin()
        wanted.is_known = True
        if self._parts.machine.broken is None:
            self._parts.machine.handle(Want(wanted.owner, wanted.fills))
        self._awaited.append(wanted)

    def _end(self, wanted: Wanted) -> None:
        if not wanted.is_known:
            return
        if wanted in self._awaited:  # an interrupt has ended the wait
            self._awaited.remove(wanted)
        self._let_go(wanted)
        if wanted in self._behind and wanted.mark is not None:
            self._parts.lanes.device.report(wanted.mark, self._parts.queue, WAKE)

    def _let_go(self, wanted: Wanted) -> None:
        """Have the machine know that a buffer is not wanted any more, when a device has copied."""
        if wanted.mark is not None and not wanted.mark.reached():
            self._behind.append(wanted)
            return
        if self._parts.machine.broken is None:
            self._parts.machine.handle(Ready(wanted.owner, wanted.fills))
        wanted.end()
