"""A path whose transfers share its bandwidth, on the virtual clock.

Each direction has two speeds: alone, and beside the other. It serves `at_once` transfers at once, which share its
speed equally; further ones wait in the order in which they were given. How long a transfer takes depends on later
ones, so it is not known when it begins. So the clock goes from one change to the next; a change is a transfer's begin
or end.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from offload.plan.rates import Direction, PathRates

T = TypeVar("T")

AT_ONCE_S = 1e-12
"""Transfers whose ends are no further apart end together: such a difference is the clock's rounding."""


@dataclass(slots=True)
class Flow(Generic[T]):
    """A transfer that was given to a direction.

    Attributes:
        what: The caller's name for it.
        nbytes: Its bytes.
        started_s: When it began; until then, when it may begin.
    """

    what: T
    nbytes: int
    started_s: float


class _Served(NamedTuple, Generic[T]):
    """A transfer that is served, as an entry of a heap.

    Attributes:
        ends_share_s: The lane's `share_s` at which it ends.
        number: Of those begun on the lane; breaks ties.
        transfer: What is served.
    """

    ends_share_s: float
    number: int
    transfer: Flow[T]


@dataclass(slots=True)
class _Lane(Generic[T]):
    """One direction of a path: transfers that wait, and those that are served at once.

    Work is counted in the seconds that a transfer takes alone. All served transfers get equal shares, so one sum,
    `share_s`, counts the work that each of them got: a transfer that begins when the sum is s and has work w ends
    when the sum is s + w (the virtual time of fair queueing).
    """

    rates: Direction
    latency_s: float
    at_once: int
    queue: deque[Flow[T]] = field(default_factory=deque)
    """Transfers that wait for their turn."""
    served: list[_Served[T]] = field(default_factory=list)
    """A heap: the first is the one that ends first."""
    share_s: float = 0.0
    """Seconds of work that a transfer got by now if it was served ever since the direction was idle."""
    begun: int = 0
    """Number of transfers that have begun."""
    busy_s: float = 0.0
    """Seconds for which it has worked."""
    alone_s: float = 0.0
    """Seconds that all served transfers take one after the other, while the other direction is not used."""
    beside_s: float = 0.0
    """The same while the other direction is used."""
    nbytes: int = 0
    """Bytes of all served transfers."""

    def work_s(self, transfer: Flow[T], bytes_per_s: float) -> float:
        """Return the seconds that a transfer takes by itself at a rate."""
        return self.latency_s + transfer.nbytes / bytes_per_s

    def count(self, transfer: Flow[T], sign: int) -> None:
        """Add a transfer that begins to the sums over served transfers (`sign` 1), or subtract one that ends (-1)."""
        self.alone_s += sign * self.work_s(transfer, self.rates.alone)
        self.beside_s += sign * self.work_s(transfer, self.rates.beside)
        self.nbytes += sign * transfer.nbytes
        if not self.served:  # nothing is served: what the sums still have is rounding
            self.alone_s = self.beside_s = 0.0

    def stretch(self, *, alone: bool) -> float:
        """Return the seconds in which each served transfer gets one second of work.

        If n transfers share the direction, these are n seconds. Beside the other direction (`alone` False), all take
        beside_s / alone_s times as long.
        """
        slower = 1.0 if alone or not self.alone_s else self.beside_s / self.alone_s
        return len(self.served) * slower

    def begin(self, at_s: float) -> None:
        """Begin waiting transfers, as many as may be served at once."""
        while self.queue and len(self.served) < self.at_once and self.queue[0].started_s <= at_s:
            transfer = self.queue.popleft()
            transfer.started_s = at_s
            self.begun += 1
            ends_share_s = self.share_s + self.work_s(transfer, self.rates.alone)
            heappush(self.served, _Served(ends_share_s, self.begun, transfer))
            self.count(transfer, 1)

    def end(self) -> Flow[T]:
        """Take the transfer that ends first from those served, and return it.

        `share_s` is set to the very value at which it ends, so that no rounding stays.
        """
        self.share_s, _, transfer = heappop(self.served)
        self.count(transfer, -1)
        if not self.served:
            self.share_s = 0.0  # it begins anew, so that a small sum keeps its precision
        return transfer


class SharedPath(Generic[T]):
    """The reads and writes of one path."""

    def __init__(self, rates: PathRates) -> None:
        at_once = max(1, round(rates.at_once))
        self._lanes: dict[str, _Lane[T]] = {
            verb: _Lane(direction, rates.latency_s, at_once)
            for verb, direction in (("read", rates.read), ("write", rates.write))
        }
        self._memory_cost = rates.memory_cost
        self._at_s = 0.0  # up to when both directions have worked
        self.changes_s = math.inf
        """When a transfer begins or ends next; infinite if there is none."""
        self.demand = 0.0
        """Memory traffic since the last change, in bytes a second."""

    def busy_s(self, verb: str) -> float:
        """Return the seconds in which a direction has worked up to the last change."""
        return self._lanes[verb].busy_s

    def give(self, verb: str, transfer: Flow[T], now_s: float) -> None:
        """Add a transfer to a direction, "read" or "write". All changes before `now_s` must have been made."""
        lane = self._lanes[verb]
        # If the transfer has to wait for others, and no time passes, nothing changes yet.
        waits = now_s <= self._at_s and (lane.queue or len(lane.served) >= lane.at_once)
        self._go_on(now_s)
        lane.queue.append(transfer)
        if not waits:
            self._look_ahead()

    def change(self) -> list[tuple[str, Flow[T]]]:
        """Go on to the next change: end transfers, and begin those that wait for their turn.

        Returns:
            The transfers that end there, each after its direction ("read" or "write").
        """
        at_s = self.changes_s
        alone = self._is_alone()
        # Which directions have a transfer that ends. Asked before time goes on: afterwards, rounding may leave a
        # little of such a transfer.
        has_end = {
            verb: self._at_s + self._left_s(lane, alone=alone) <= at_s
            for verb, lane in self._lanes.items()
            if lane.served
        }
        self._go_on(at_s)
        ended_transfers = []
        for verb, lane in self._lanes.items():
            if has_end.get(verb):
                ended_transfers.append((verb, lane.end()))
                # Others that end at the same moment, but for rounding.
                while lane.served and lane.served[0].ends_share_s - lane.share_s <= AT_ONCE_S:
                    ended_transfers.append((verb, lane.end()))
            lane.begin(at_s)
        self._look_ahead()
        return ended_transfers

    def _is_alone(self) -> bool:
        """Return whether at most one direction is in use."""
        read, write = self._lanes.values()
        return not (read.served and write.served)

    def _left_s(self, lane: _Lane[T], *, alone: bool) -> float:
        """Return the seconds until the first of the served transfers ends, if nothing changes before."""
        return max(0.0, lane.served[0].ends_share_s - lane.share_s) * lane.stretch(alone=alone)

    def _go_on(self, to_s: float) -> None:
        """Let both directions work until `to_s`."""
        passed_s = to_s - self._at_s
        if passed_s <= 0:  # they have worked until then already
            return
        alone = self._is_alone()
        for lane in self._lanes.values():
            if lane.served:
                lane.share_s += passed_s / lane.stretch(alone=alone)
                lane.busy_s += passed_s
        self._at_s = to_s

    def _look_ahead(self) -> None:
        """Compute the time of the next change, and the memory traffic until then.

        A direction moves all bytes of its served transfers in the seconds that these take one after the other, so its
        traffic is proportional to the quotient.
        """
        alone = self._is_alone()
        demand, changes_s = 0.0, math.inf
        for lane in self._lanes.values():
            if lane.served:
                ends_s = self._at_s + self._left_s(lane, alone=alone)
                if ends_s < changes_s:
                    changes_s = ends_s
                all_s = lane.alone_s if alone else lane.beside_s
                if all_s:
                    demand += self._memory_cost * lane.nbytes / all_s
            if lane.queue and len(lane.served) < lane.at_once:
                changes_s = min(changes_s, max(self._at_s, lane.queue[0].started_s))
        self.demand, self.changes_s = demand, changes_s
