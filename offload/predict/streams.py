"""A GPU on the virtual clock: streams whose work is done in order, and the engines that do it.

There is an engine for each direction of copies, and one for kernels. Each does one piece of work at a time. How a
copy engine chooses between streams is not documented; both ways of `Order` have been observed.

Non-goals: knowing how long work takes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from enum import Enum, auto
from typing import Generic, TypeVar

What = TypeVar("What")

PIECE_GAP_S = 5e-6
"""Time of the almost empty kernel between two pieces of a copy; it lets the engine go to another stream there."""


class Order(Enum):
    """How a copy engine chooses between streams."""

    READINESS = auto()
    """The stream whose next copy has been ready (waiting for the engine only) for the longest time."""
    STAYS = auto()
    """The stream of the engine's last copy, as long as the next copy there is ready; else as `READINESS`."""


class Work(Generic[What]):
    """A copy, a piece of one, or a kernel.

    Args:
        stream: The stream that it is put on.
        engine: The engine that does it.
        what: The caller's name for it.
        nbytes: Bytes that it copies or updates.
        given_s: When it is put on its stream.
        follows: Work on another stream that it waits for.
        gap_s: Time between the end of the work before it on its stream and its own begin, at least.

    Attributes:
        ends_s: When it ends; infinite until it has begun.
    """

    __slots__ = ("ends_s", "engine", "follows", "gap_s", "given_s", "nbytes", "stream", "what")

    def __init__(
        self,
        stream: str,
        engine: str,
        what: What,
        nbytes: int,
        given_s: float,
        follows: Work[What] | None = None,
        gap_s: float = 0.0,
    ) -> None:
        self.stream = stream
        self.engine = engine
        self.what = what
        self.nbytes = nbytes
        self.given_s = given_s
        self.follows = follows
        self.gap_s = gap_s
        self.ends_s = math.inf


class Streams(Generic[What]):
    """Work that has been put on streams and has not begun, and the choice of what begins next."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._waiting: dict[str, deque[Work[What]]] = {}
        self._ended_s: dict[str, float] = {}  # by stream, when the last work that has begun on it ends
        self._free_s: dict[str, float] = {}  # by engine, when the last work that it has begun ends
        self._last: dict[str, str] = {}  # by engine, the stream of its last work
        self._next: tuple[float, Work[What] | None] | None = None  # the result of `next`; None if it has to be found

    def put(self, work: Work[What]) -> Work[What]:
        """Put work on its stream, behind what is there; return it."""
        self._waiting.setdefault(work.stream, deque()).append(work)
        self._next = None
        return work

    def next(self) -> tuple[float, Work[What] | None]:
        """Return the time at which the next work begins, and that work; infinity and None if none can begin."""
        if self._next is None:
            self._next = min(self._candidates(), key=lambda candidate: candidate[0], default=(math.inf, None))
        return self._next

    def begin(self, work: Work[What], ends_s: float) -> None:
        """Begin the work that `next` has returned; it ends at `ends_s`."""
        self._waiting[work.stream].popleft()
        work.ends_s = ends_s
        self._ended_s[work.stream] = ends_s
        self._free_s[work.engine] = ends_s
        work.follows = None  # else each work would keep all earlier ones in memory
        self._last[work.engine] = work.stream
        self._next = None

    def _candidates(self) -> Iterator[tuple[float, Work[What]]]:
        """Yield, for each engine, the time at which it begins its next work, and that work.

        Of each stream only the first work can begin. An engine chooses among these by `Order`.
        """
        # By engine: the first work of each stream that waits for it, after the time at which that work is ready.
        ready: dict[str, list[tuple[float, Work[What]]]] = {}
        for stream, waiting in self._waiting.items():
            if waiting:
                first = waiting[0]
                ready_s = self._ready_s(stream, first)
                if ready_s < math.inf:
                    ready.setdefault(first.engine, []).append((ready_s, first))
        for engine, heads in ready.items():
            chosen_s, chosen = min(heads, key=lambda head: head[0])
            begins_s = max(chosen_s, self._free_s.get(engine, 0.0))
            if self.order is Order.STAYS:  # with the stream of its last work, if that has work ready by then
                last_stream = self._last.get(engine)
                chosen = next((work for s, work in heads if work.stream == last_stream and s <= begins_s), chosen)
            yield begins_s, chosen

    def _ready_s(self, stream: str, first: Work[What]) -> float:
        """Return the time from which the first work of a stream waits for its engine only.

        Infinite while the work that it follows has not begun, as the end of that is not known yet.
        """
        ready_s = first.given_s
        # Without a gap, the work before it need not be asked: all work of a stream is done by one engine, in order.
        if first.gap_s:
            ready_s = max(ready_s, self._ended_s.get(stream, -math.inf) + first.gap_s)
        if first.follows is not None:
            ready_s = max(ready_s, first.follows.ends_s)
        return ready_s
