"""Scratch buffers that callers' threads fill and read: which ones they want, and when they have them.

The machine decides which owner has which buffer (`offload.schedule.scratch`), on the engine thread. A caller posts
what it wants and does without waiting for an answer, except for the buffer itself. The engine thread takes posts
between events, whatever sweep is under way.

Not here: what lies in buffers (`offload.gradients.paths`, `offload.session.activations`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from offload import waits
from offload.protocols import WAKE, Mark, ScratchKind, ScratchOwner
from offload.schedule.operations import ReleaseBuffer, RequestBuffer
from offload.session.parts import SessionParts


class BufferRequest:
    """A buffer that a caller wants, to fill it (`fills`) or to read it.

    Attributes:
        buffer: Its number, once `answered`; None if the caller gets none.
        error: Why it cannot be read, or filled.
        mark: After the last copy that a device makes to the buffer, or from it.
        is_known: Whether the engine thread has taken the post that asks for it; an interrupt may prevent that.
    """

    def __init__(self, owner: ScratchOwner, *, fills: bool) -> None:
        self.owner, self.fills = owner, fills
        self.is_known = False
        self.buffer: int | None = None
        self.error: Exception | None = None
        self.mark: Mark | None = None
        self.answered = waits.Latch()

    def begin(self) -> None:
        """Called on the engine thread when it takes the wish, before it tells the machine."""

    def end(self) -> None:
        """Called on the engine thread when caller and device are done with the buffer, after the machine is told."""


class BufferRequests:
    """The scratch buffers that callers want from a session."""

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts
        self._posts: deque[tuple[Callable[[Any], None], Any]] = deque()
        # On the engine thread
        self._awaited: list[BufferRequest] = []
        self._after_copies: list[BufferRequest] = []  # released by their callers, but a device still copies

    # On callers' threads

    def post(self, take_in: Callable[[Any], None], what: Any) -> None:
        """Post a call, `take_in(what)`, to the engine thread, which makes calls in order; safe in a `__del__`."""
        self._posts.append((take_in, what))

    def ask(self, wanted: BufferRequest) -> None:
        """Ask for a buffer."""
        self.post(self._begin, wanted)
        self.wake()

    def release(self, wanted: BufferRequest) -> None:
        """Say that the caller is done with a buffer: filled or read once its mark is reached, or no longer wanted."""
        self.post(self._end, wanted)

    def wake(self) -> None:
        """Wake the engine thread, to take what was posted."""
        self._parts.queue.post(WAKE)

    # On the engine thread

    def is_due(self) -> bool:
        """Return whether `serve` has something to do."""
        has_copied = any(wanted.mark is None or wanted.mark.reached() for wanted in self._after_copies)
        return bool(self._posts) or has_copied or any(map(self._is_answerable, self._awaited))

    def serve(self) -> None:
        """Take posts, start the operations that follow from them, and answer callers whose buffers are there."""
        self.take_posts()
        machine = self._parts.machine
        self._parts.executor.submit(machine.take_operations())
        for wanted in [wanted for wanted in self._awaited if self._is_answerable(wanted)]:
            self._awaited.remove(wanted)
            scratch, owner = machine.scratch[wanted.owner.kind], wanted.owner.number
            wanted.error = machine.broken if machine.broken is not None else scratch.error_of(owner)
            has_it = scratch.may_fill(owner) if wanted.fills else scratch.is_in_buffer(owner)
            if wanted.error is None and has_it:
                wanted.buffer = scratch.buffer_of(owner)
            wanted.answered.set()

    def take_posts(self) -> None:
        """Take posts, and release buffers that a device has copied from or to by now."""
        waiting, self._after_copies = self._after_copies, []
        for wanted in waiting:
            self._release_when_copied(wanted)
        while self._posts:
            take_in, what = self._posts.popleft()
            take_in(what)

    def are_in_use(self, kind: ScratchKind) -> bool:
        """Return whether any data of a kind is being filled, or may still be read."""
        self.take_posts()
        return self._parts.machine.scratch[kind].is_in_use

    def _is_answerable(self, wanted: BufferRequest) -> bool:
        """Return whether it is decided that a caller gets its buffer, or why it gets none."""
        machine, owner = self._parts.machine, wanted.owner.number
        if machine.broken is not None:
            return True
        scratch = machine.scratch[wanted.owner.kind]
        if wanted.fills:
            return scratch.may_fill(owner) or scratch.gets_no_buffer(owner)
        return scratch.is_in_buffer(owner) or scratch.error_of(owner) is not None

    def _begin(self, wanted: BufferRequest) -> None:
        wanted.begin()
        wanted.is_known = True
        if self._parts.machine.broken is None:
            self._parts.machine.handle(RequestBuffer(wanted.owner, wanted.fills))
        self._awaited.append(wanted)

    def _end(self, wanted: BufferRequest) -> None:
        """Take a release; where a device still copies, its mark wakes this thread to do the rest."""
        if not wanted.is_known:
            return
        if wanted in self._awaited:  # an interrupt has ended the wait
            self._awaited.remove(wanted)
        self._release_when_copied(wanted)
        if wanted in self._after_copies and wanted.mark is not None:
            self._parts.lanes.device.report(wanted.mark, self._parts.queue, WAKE)

    def _release_when_copied(self, wanted: BufferRequest) -> None:
        """Tell the machine that a caller is done with a buffer; if a device still copies, note it for later."""
        if wanted.mark is not None and not wanted.mark.reached():
            self._after_copies.append(wanted)
            return
        if self._parts.machine.broken is None:
            self._parts.machine.handle(ReleaseBuffer(wanted.owner, wanted.fills))
        wanted.end()
