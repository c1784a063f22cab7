"""A path whose transfers share its bandwidth, on the virtual clock.

Each direction has two speeds, alone and beside the other, and serves so many transfers at once: they share its speed
equally, and others wait in the order in which they were given. What a transfer takes depends on what is given to the
path later, so it is not known when it begins: time goes from one change to the next. A change is a transfer that
begins or ends.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

from offload.plan.rates import Direction, PathRates

T = TypeVar("T")

AT_ONCE_S = 1e-12
"""Transfers that end within so much of each other end together: the clock's rounding is no time between them."""


@dataclass(slots=True)
class Flow(Generic[T]):
    """What a direction has been given.

    Attributes:
        what: Whatever stands for it.
        nbytes: Its bytes.
        started_s: When it began; before that, when it may.
    """

    what: T
    nbytes: int
    started_s: float


@dataclass(slots=True)
class _Lane(Generic[T]):
    """One direction.

    Work is counted in seconds that a transfer takes alone. All transfers that are served have had the same share
    since each began, so one sum, `share_s`, says how far all of them are: a transfer ends when the sum has grown by
    its own work.
    """

    rates: Direction
    latency_s: float
    at_once: int
    queue: deque[Flow[T]] = field(default_factory=deque)
    served: list[tuple[float, int, Flow[T]]] = field(default_factory=list)
    """A heap: at what `share_s` each transfer ends."""
    share_s: float = 0.0
    begun: int = 0
    busy_s: float = 0.0
    alone_s: float = 0.0
    """What all transfers that are served take alone, one after the other,"""
    beside_s: float = 0.0
    """and beside the other direction;"""
    nbytes: int = 0
    """and their bytes."""

    def work_s(self, transfer: Flow[T], bytes_per_s: float) -> float:
        return self.latency_s + transfer.nbytes / bytes_per_s

    def count(self, transfer: Flow[T], sign: int) -> None:
        self.alone_s += sign * self.work_s(transfer, self.rates.alone)
        self.beside_s += sign * self.work_s(transfer, self.rates.beside)
        self.nbytes += sign * transfer.nbytes
        if not self.served:  # no rounding stays
            self.alone_s = self.beside_s = 0.0

    def stretch(self, *, alone: bool) -> float:
        """Return the seconds that a second of each transfer's work takes."""
        slower = 1.0 if alone or not self.alone_s else self.beside_s / self.alone_s
        return len(self.served) * slower

    def begin(self, at_s: float) -> None:
        """Begin what may begin now."""
        while self.queue and len(self.served) < self.at_once and self.queue[0].started_s <= at_s:
            transfer = self.queue.popleft()
            transfer.started_s = at_s
            self.begun += 1
            ends = self.share_s + self.work_s(transfer, self.rates.alone)
            heappush(self.served, (ends, self.begun, transfer))
            self.count(transfer, 1)

    def end(self) -> Flow[T]:
        """End the transfer that is due first."""
        self.share_s, _, transfer = heappop(self.served)
        self.count(transfer, -1)
        if not self.served:
            self.share_s = 0.0
        return transfer


class SharedPath(Generic[T]):
    """Two directions, each of which serves some transfers at once.

    Args:
        rates: Of the path.
    """

    def __init__(self, rates: PathRates) -> None:
        at_once = max(1, round(rates.at_once))
        self._lanes: dict[str, _Lane[T]] = {
            verb: _Lane(direction, rates.latency_s, at_once)
            for verb, direction in (("read", rates.read), ("write", rates.write))
        }
        self._memory_cost = rates.memory_cost
        self._at_s = 0.0
        self.changes_s = math.inf
        """When something begins or ends next; infinite where nothing is waiting."""
        self.demand = 0.0
        """Traffic in memory, a second, since the last change."""

    def busy_s(self, verb: str) -> float:
        """Return the seconds in which a direction has worked up to the last change."""
        return self._lanes[verb].busy_s

    def give(self, verb: str, transfer: Flow[T], now_s: float) -> None:
        """Put a transfer behind those of its direction; there has been no change before `now_s`."""
        self._go_on(now_s)
        self._lanes[verb].queue.append(transfer)
        self._look_ahead()

    def change(self) -> list[tuple[str, Flow[T]]]:
        """Go on to the next change; return what ended there, with its direction."""
        at_s = self.changes_s
        alone = self._alone()
        ends = {
            verb: self._at_s + self._left_s(lane, alone=alone) <= at_s
            for verb, lane in self._lanes.items()
            if lane.served
        }
        self._go_on(at_s)
        ended = []
        for verb, lane in self._lanes.items():
            if ends.get(verb):
                ended.append((verb, lane.end()))
                while lane.served and lane.served[0][0] - lane.share_s <= AT_ONCE_S:
                    ended.append((verb, lane.end()))
            lane.begin(at_s)
        self._look_ahead()
        return ended

    def _alone(self) -> bool:
        return not all(lane.served for lane in self._lanes.values())

    def _left_s(self, lane: _Lane[T], *, alone: bool) -> float:
        """Return what is left of the served transfer that ends first takes, if nothing changes."""
        return max(0.0, lane.served[0][0] - lane.share_s) * lane.stretch(alone=alone)

    def _go_on(self, to_s: float) -> None:
        """Let both directions work until then."""
        passed_s = to_s - self._at_s
        if passed_s <= 0:
            return
        alone = self._alone()
        for lane in self._lanes.values():
            if lane.served:
                lane.share_s += passed_s / lane.stretch(alone=alone)
                lane.busy_s += passed_s
        self._at_s = to_s

    def _look_ahead(self) -> None:
        """Work out when the next change is, and the traffic until then."""
        alone, self.demand, self.changes_s = self._alone(), 0.0, math.inf
        for lane in self._lanes.values():
            if lane.served:
                self.changes_s = min(self.changes_s, self._at_s + self._left_s(lane, alone=alone))
                whole_s = lane.alone_s if alone else lane.beside_s
                self.demand += self._memory_cost * lane.nbytes / whole_s if whole_s else 0.0
            if lane.queue and len(lane.served) < lane.at_once:
                self.changes_s = min(self.changes_s, max(self._at_s, lane.queue[0].started_s))
