"""Scratch buffers that callers' threads fill and read: which ones they want, and when they have them.

The machine decides which owner has which buffer (`offload.schedule.scratch`), on the engine thread. A caller posts
calls that the engine thread makes between events, whatever sweep is under way. The caller does not wait for these
calls. It does wait for a buffer that it has asked for.

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
        answered: Set when it is decided whether the caller gets the buffer.
        buffer: Its number, once `answered`; None if the caller gets none.
        error: Why it cannot be read, or filled.
        mark: After the last copy that a device makes to the buffer, or from it; None if no device copies.
        is_known: Whether the engine thread has begun the request; an interrupt may come before it is posted.
    """

    def __init__(self, owner: ScratchOwner, *, fills: bool) -> None:
        self.owner, self.fills = owner, fills
        self.is_known = False
        self.buffer: int | None = None
        self.error: Exception | None = None
        self.mark: Mark | None = None
        self.answered = waits.Latch()

    def begin(self) -> None:
        """Called on the engine thread when it takes the request, before it tells the machine."""

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

    def post(self, call: Callable[[Any], None], argument: Any) -> None:
        """Have the engine thread make `call(argument)` when it next wakes, after all calls posted before.

        The thread is not woken for it. Safe in a `__del__`.
        """
        self._posts.append((call, argument))

    def ask(self, request: BufferRequest) -> None:
        """Ask for a buffer."""
        self.post(self._begin, request)
        self.wake()

    def release(self, request: BufferRequest) -> None:
        """Say that the caller is done with a buffer, or wants it no longer.

        A device may still copy to it or from it, until the request's `mark`: others get the buffer after that.
        The engine thread is not woken for this.
        """
        self.post(self._end, request)

    def wake(self) -> None:
        """Wake the engine thread, to make the posted calls."""
        self._parts.queue.post(WAKE)

    # On the engine thread

    def is_due(self) -> bool:
        """Return whether `serve` has something to do."""
        has_copied = any(request.mark is None or request.mark.reached() for request in self._after_copies)
        return bool(self._posts) or has_copied or any(map(self._is_answerable, self._awaited))

    def serve(self) -> None:
        """Make posted calls, start the operations that follow, and answer callers whose buffers are there."""
        self.take_posts()
        self._parts.executor.submit(self._parts.machine.take_operations())
        for request in [request for request in self._awaited if self._is_answerable(request)]:
            self._awaited.remove(request)
            self._answer(request)

    def _answer(self, request: BufferRequest) -> None:
        """Tell a caller which buffer it has, or why it has none."""
        machine, owner = self._parts.machine, request.owner.number
        scratch = machine.scratch[request.owner.kind]
        request.error = machine.broken if machine.broken is not None else scratch.error_of(owner)
        has_buffer = scratch.may_fill(owner) if request.fills else scratch.is_in_buffer(owner)
        if request.error is None and has_buffer:
            request.buffer = scratch.buffer_of(owner)
        request.answered.set()

    def take_posts(self) -> None:
        """Make the posted calls, after releasing buffers that a device has copied from or to by now."""
        waiting, self._after_copies = self._after_copies, []
        for request in waiting:
            self._release_when_copied(request)
        while self._posts:
            call, argument = self._posts.popleft()
            call(argument)

    def are_in_use(self, kind: ScratchKind) -> bool:
        """Make the posted calls; return whether any data of a kind is being filled, or may still be read."""
        self.take_posts()
        return self._parts.machine.scratch[kind].is_in_use

    def _is_answerable(self, request: BufferRequest) -> bool:
        """Return whether it is decided that a caller gets its buffer, or why it gets none."""
        machine, owner = self._parts.machine, request.owner.number
        if machine.broken is not None:
            return True
        scratch = machine.scratch[request.owner.kind]
        if request.fills:
            return scratch.may_fill(owner) or scratch.gets_no_buffer(owner)
        return scratch.is_in_buffer(owner) or scratch.error_of(owner) is not None

    def _begin(self, request: BufferRequest) -> None:
        """Tell the machine of a request, unless it has broken; `serve` answers the caller in both cases."""
        request.begin()
        request.is_known = True
        if self._parts.machine.broken is None:
            self._parts.machine.handle(RequestBuffer(request.owner, request.fills))
        self._awaited.append(request)

    def _end(self, request: BufferRequest) -> None:
        """Release a buffer that the caller is done with.

        If a device still copies, the buffer is released later: the device wakes this thread at the request's mark.
        """
        if not request.is_known:  # an interrupt came before it was asked for
            return
        if request in self._awaited:  # an interrupt has ended the wait
            self._awaited.remove(request)
        self._release_when_copied(request)
        if request in self._after_copies and request.mark is not None:
            self._parts.lanes.device.report(request.mark, self._parts.queue, WAKE)

    def _release_when_copied(self, request: BufferRequest) -> None:
        """Tell the machine that a caller is done with a buffer; while a device still copies, note it for later."""
        if request.mark is not None and not request.mark.reached():
            self._after_copies.append(request)
            return
        if self._parts.machine.broken is None:
            self._parts.machine.handle(ReleaseBuffer(request.owner, request.fills))
        request.end()
