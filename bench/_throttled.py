"""A tier of a given bandwidth and latency: how a slower device is emulated on the one there is.

Label what is measured through it as emulated.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from offload._native import CompletionQueue
from offload.protocols import Completion, Queue, Tier, TileRequest
from offload.tiers.common import Explaining

GRAIN_S = 2e-4
"""What a transfer gets of a shared device's time before it is the next one's turn."""


class Lanes:
    """When the lanes of an emulated device are free next."""

    def __init__(self) -> None:
        self._free_s = {"read": 0.0, "write": 0.0}

    def book(self, lane: str, submitted_s: float, seconds: float) -> float:
        """Take a lane for a time, from when it is free on; return when that ends (`time.monotonic`)."""
        self._free_s[lane] = max(submitted_s, self._free_s[lane]) + seconds
        return self._free_s[lane]


@dataclass
class _Transfer:
    completion: Completion
    submitted_s: float
    left_s: float
    started_s: float = 0.0


class TakingGrains:
    """An emulated device whose transfers, reads and writes alike, share its time: each gets a grain of it in turn.

    Args:
        at_once: Transfers that it serves at once; the others wait in the order in which they came.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._served: deque[_Transfer] = deque()
        self._waiting: deque[_Transfer] = deque()
        self._free_s = 0.0

    def add(self, transfer: _Transfer) -> None:
        """Take on a transfer."""
        self._waiting.append(transfer)

    def ended(self, now_s: float) -> list[tuple[float, _Transfer]]:
        """Return what has ended by now, and when."""
        ended = []
        while self._free_s <= now_s:
            while self._waiting and len(self._served) < self._at_once:
                self._served.append(self._waiting.popleft())
            if not self._served:
                break
            transfer = self._served.popleft()
            began_s = max(self._free_s, transfer.submitted_s)
            transfer.started_s = transfer.started_s or began_s
            grain_s = min(transfer.left_s, GRAIN_S)
            self._free_s = began_s + grain_s
            transfer.left_s -= grain_s
            if transfer.left_s > 0:
                self._served.append(transfer)
            else:
                ended.append((self._free_s, transfer))
        return ended

    def next_s(self) -> float:
        """Return when something may end, at the earliest; infinite where nothing is under way."""
        left_s = min((transfer.left_s for transfer in (*self._served, *self._waiting)), default=math.inf)
        return self._free_s + left_s


class ThrottledTier:
    """A decorator that holds completions back until a serial lane of the given speed would have been through.

    Each direction is a lane of its own, or both share a device's time. A transfer that the inner tier takes longer
    for takes longer.

    Args:
        inner: The tier that does the work, opened on `inner_queue`; closed with this one.
        inner_queue: What `inner` reports to; nobody else waits on it.
        queue: Where completions go when they are due.
        read_bytes_per_s: Bandwidth of reads.
        write_bytes_per_s: Bandwidth of writes.
        latency_s: Added to every transfer; transfers wait for it side by side.
        at_once: If both directions share the device's time, the transfers that it serves at once; 0 if they do not.
    """

    def __init__(
        self,
        inner: Tier,
        inner_queue: CompletionQueue,
        queue: Queue,
        *,
        read_bytes_per_s: float,
        write_bytes_per_s: float,
        latency_s: float = 0.0,
        at_once: int = 0,
    ) -> None:
        self.inner = inner
        self._inner_queue = inner_queue
        self._queue = queue
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._submitted: dict[int, tuple[str, int, float]] = {}
        self._lanes = Lanes()
        self._device = TakingGrains(at_once) if at_once else None
        self._closing = False
        self._rates = {"read": read_bytes_per_s, "write": write_bytes_per_s}
        self._thread = threading.Thread(target=self._serve, name="offload-throttle", daemon=True)
        self._thread.start()

    def read(self, request: TileRequest) -> None:
        """See `Tier.read`."""
        self._note("read", request)
        self.inner.read(request)

    def write(self, request: TileRequest) -> None:
        """See `Tier.write`."""
        self._note("write", request)
        self.inner.write(request)

    def explain(self, op: int) -> str:
        """Return what the inner tier knows about a failed operation; see `common.Explaining`."""
        return self.inner.explain(op) if isinstance(self.inner, Explaining) else ""

    def __getattr__(self, name: str) -> Any:
        """Return what else a tier has: the inner one's. A sync is held back by what came before it alone."""
        return getattr(self.inner, name)

    def close(self) -> None:
        """See `Tier.close`."""
        self.inner.close()
        if not self._closing:
            self._closing = True
            self._inner_queue.post(0)
            self._thread.join()

    def _note(self, lane: str, request: TileRequest) -> None:
        with self._lock:
            self._submitted[request.op] = lane, request.nbytes, time.monotonic()

    def _serve(self) -> None:
        held: list[tuple[float, int, Completion]] = []
        syncs: deque[tuple[set[int], Completion]] = deque()  # each with the transfers before it that are held back
        kept: set[int] = set()
        ended = False
        while held or not ended or (self._device and self._device.next_s() < math.inf):
            next_s = min(held[0][0] if held else math.inf, self._device.next_s() if self._device else math.inf)
            timeout_s = max(next_s - time.monotonic(), 0.0) if next_s < math.inf else -1.0
            for record in self._inner_queue.wait(timeout_s):
                completion = Completion(*record)
                ended = ended or completion.op == 0  # posted after everything else
                if completion.op and self._take(completion, held):
                    kept.add(completion.op)
                elif completion.op:
                    syncs.append(({*kept}, completion))
            now_s = time.monotonic()
            for through_s, transfer in self._device.ended(now_s) if self._device else ():
                heapq.heappush(held, self._late(transfer.completion, transfer.started_s, through_s))
            while held and held[0][0] <= now_s:
                due = heapq.heappop(held)[2]
                self._queue.post(*due)
                for before in (kept, *(before for before, _ in syncs)):
                    before.discard(due.op)
            while syncs and not syncs[0][0]:
                self._queue.post(*syncs.popleft()[1])

    def _take(self, completion: Completion, held: list[tuple[float, int, Completion]]) -> bool:
        """Hold a transfer back; return False for a sync."""
        with self._lock:
            lane, nbytes, submitted_s = self._submitted.pop(completion.op, ("", 0, 0.0))
        if not lane:
            return False
        seconds = nbytes / self._rates[lane]
        if self._device is not None:
            self._device.add(_Transfer(completion, submitted_s, seconds))
            return True
        through_s = self._lanes.book(lane, submitted_s, seconds)
        heapq.heappush(held, self._late(completion, through_s - seconds, through_s))
        return True

    def _late(self, completion: Completion, started_s: float, through_s: float) -> tuple[float, int, Completion]:
        finished_s = max(completion.finished_s, through_s + self._latency_s)
        return finished_s, completion.op, completion._replace(started_s=started_s, finished_s=finished_s)
