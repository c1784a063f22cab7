"""A path whose directions share its bandwidth, on the virtual clock: each has two speeds, alone and beside the other.

What a transfer takes depends on what is given to the path later, so it is not known when it begins: time goes from
one change to the next. A change is a transfer that begins or ends.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from offload.plan.rates import Direction, PathRates

T = TypeVar("T")


@dataclass(slots=True)
class Transfer(Generic[T]):
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
    """One direction: its transfers, one after the other."""

    rates: Direction
    queue: deque[Transfer[T]] = field(default_factory=deque)
    works: bool = False
    left: float = 1.0
    """The part of the first transfer that is still to be done."""

    def takes_s(self, latency_s: float, *, alone: bool) -> float:
        """Return what is left of the first transfer takes, if nothing changes."""
        return self.left * (latency_s + self.queue[0].nbytes / (self.rates.alone if alone else self.rates.beside))


class SharedPath(Generic[T]):
    """Two serial lanes, one each way.

    Args:
        rates: Of the path.
    """

    def __init__(self, rates: PathRates) -> None:
        self._lanes: dict[str, _Lane[T]] = {"read": _Lane(rates.read), "write": _Lane(rates.write)}
        self._latency_s = rates.latency_s
        self._memory_cost = rates.memory_cost
        self._at_s = 0.0
        self.changes_s = math.inf
        """When something begins or ends next; infinite where nothing is waiting."""
        self.demand = 0.0
        """Traffic in memory, a second, since the last change."""

    def give(self, verb: str, transfer: Transfer[T], now_s: float) -> None:
        """Put a transfer behind those of its direction; there has been no change before `now_s`."""
        self._go_on(now_s)
        self._lanes[verb].queue.append(transfer)
        self._look_ahead()

    def change(self) -> list[tuple[str, Transfer[T]]]:
        """Go on to the next change; return what ended there, with its direction."""
        at_s = self.changes_s
        ends = {verb for verb, lane in self._lanes.items() if lane.works and self._ends_s(verb) <= at_s}
        self._go_on(at_s)
        ended = []
        for verb, lane in self._lanes.items():
            if verb in ends:
                ended.append((verb, lane.queue.popleft()))
                lane.works, lane.left = False, 1.0
            if not lane.works and lane.queue and lane.queue[0].started_s <= at_s:
                lane.works = True
                lane.queue[0].started_s = at_s
        self._look_ahead()
        return ended

    def _alone(self) -> bool:
        return not all(lane.works for lane in self._lanes.values())

    def _ends_s(self, verb: str) -> float:
        return self._at_s + self._lanes[verb].takes_s(self._latency_s, alone=self._alone())

    def _go_on(self, to_s: float) -> None:
        """Let both directions work until then."""
        alone = self._alone()
        for lane in self._lanes.values():
            if lane.works:
                takes_s = lane.takes_s(self._latency_s, alone=alone)
                if takes_s > 0:
                    lane.left *= max(0.0, 1 - (to_s - self._at_s) / takes_s)
        self._at_s = max(self._at_s, to_s)

    def _look_ahead(self) -> None:
        """Work out when the next change is, and the traffic until then."""
        alone, self.demand, self.changes_s = self._alone(), 0.0, math.inf
        for lane in self._lanes.values():
            if not lane.queue:
                continue
            first = lane.queue[0]
            if lane.works:
                takes_s = lane.takes_s(self._latency_s, alone=alone)
                self.changes_s = min(self.changes_s, self._at_s + takes_s)
                whole_s = self._latency_s + first.nbytes / (lane.rates.alone if alone else lane.rates.beside)
                self.demand += self._memory_cost * first.nbytes / whole_s if whole_s else 0.0
            else:
                self.changes_s = min(self.changes_s, max(self._at_s, first.started_s))
