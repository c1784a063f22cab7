"""A GPU on the virtual clock: streams whose work is done in order, and the engines that do it.

There is an engine for each direction of copies, and one for kernels. Each does one piece of work at a time. How a
copy engine chooses between streams is written down nowhere; users have seen both of `Order`.

Not done here: knowing how long work takes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from enum import Enum, auto
from typing import Generic, TypeVar

What = TypeVar("What")

PIECE_GAP_S = 5e-6
"""What comes between two pieces of a copy, so that the engine may leave the stream there: a kernel that does next to
nothing."""


class Order(Enum):
    """Which of several streams a copy engine takes work from."""

    READINESS = auto()
    """That whose next copy has waited longest for nothing but copies."""
    STAYS = auto()
    """That of its last copy, as long as the next one there can begin; else as by readiness."""


class Work(Generic[What]):
    """A piece of work.

    Args:
        stream: Which it is put on.
        engine: Which does it.
        what: What it is.
        nbytes: Its size.
        given_s: When it is put there.
        follows: Other work that it waits for.
        gap_s: What comes between the work before it on its stream and this.

    Attributes:
        ends_s: When it ends; infinite as long as it has not begun.
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
        self.stream, self.engine, self.what, self.nbytes = stream, engine, what, nbytes
        self.given_s, self.follows, self.gap_s = given_s, follows, gap_s
        self.ends_s = math.inf


class Streams(Generic[What]):
    """What has been put on streams and has not begun.

    Args:
        order: How each engine chooses.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self._waiting: dict[str, deque[Work[What]]] = {}
        self._ended_s: dict[str, float] = {}  # of the last work of a stream that has begun
        self._free_s: dict[str, float] = {}
        self._last: dict[str, str] = {}  # the stream of an engine's last work
        self._next: tuple[float, Work[What] | None] | None = None

    def put(self, work: Work[What]) -> Work[What]:
        """Put work on its stream."""
        self._waiting.setdefault(work.stream, deque()).append(work)
        self._next = None
        return work

    def next(self) -> tuple[float, Work[What] | None]:
        """Return when the next work begins, as far as is known, and which; infinite for none."""
        if self._next is None:
            self._next = min(self._candidates(), key=lambda found: found[0], default=(math.inf, None))
        return self._next

    def begin(self, work: Work[What], ends_s: float) -> None:
        """Take in that the next work begins, and when it ends."""
        self._waiting[work.stream].popleft()
        work.ends_s = self._ended_s[work.stream] = self._free_s[work.engine] = ends_s
        work.follows = None
        self._last[work.engine] = work.stream
        self._next = None

    def _candidates(self) -> Iterator[tuple[float, Work[What]]]:
        """Yield for each engine when it begins its next work, and which."""
        ready: dict[str, list[tuple[float, Work[What]]]] = {}
        for stream, waiting in self._waiting.items():
            if waiting:
                first, ready_s = waiting[0], waiting[0].given_s
                if first.gap_s:
                    ready_s = max(ready_s, self._ended_s.get(stream, -math.inf) + first.gap_s)
                if first.follows is not None:
                    ready_s = max(ready_s, first.follows.ends_s)
                if ready_s < math.inf:
                    ready.setdefault(first.engine, []).append((ready_s, first))
        for engine, heads in ready.items():
            chosen_s, chosen = min(heads, key=lambda head: head[0])
            begins_s = max(chosen_s, self._free_s.get(engine, 0.0))
            if self.order is Order.STAYS:
                last = self._last.get(engine)
                chosen = next((work for s, work in heads if work.stream == last and s <= begins_s), chosen)
            yield begins_s, chosen
