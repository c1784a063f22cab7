"""A tier of a given bandwidth and latency: how a slower device is emulated on the one there is.

Label what is measured through it as emulated.
"""

from __future__ import annotations

import fcntl
import heapq
import mmap
import os
import struct
import threading
import time
from pathlib import Path

from offload._native import CompletionQueue
from offload.errors import ConfigError
from offload.protocols import Completion, Queue, Tier, TileRequest
from offload.tiers.common import Explaining


class SharedLanes:
    """When the lanes of an emulated device are free next, in a file that all processes of a node share.

    The serial lane is the token bucket of an emulation: what a transfer takes of the device's time, no other one has,
    whichever process asked for it.

    Args:
        path: The file; made, empty, if it is not there. On a file system in memory, such as /dev/shm.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lock = threading.Lock()
        self._file = os.open(Path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, mmap.PAGESIZE)
        self._memory = mmap.mmap(self._file, mmap.PAGESIZE)

    def book(self, lane: str, submitted_s: float, seconds: float) -> float:
        """Take a lane for a time, from when it is free on; return when that ends (`time.monotonic`, one per node)."""
        place = 8 * ("read", "write").index(lane)
        # The file's lock is of this open file, which all threads here share.
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                free_s: float = struct.unpack_from("d", self._memory, place)[0]
                ends_s = max(submitted_s, free_s) + seconds
                struct.pack_into("d", self._memory, place, ends_s)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return ends_s

    def close(self) -> None:
        """Let go of the file, which stays for the others."""
        self._memory.close()
        os.close(self._file)


class OwnLanes:
    """When the lanes of an emulated device that nobody else uses are free next."""

    def __init__(self) -> None:
        self._free_s = {"read": 0.0, "write": 0.0}

    def book(self, lane: str, submitted_s: float, seconds: float) -> float:
        """See `SharedLanes.book`."""
        self._free_s[lane] = max(submitted_s, self._free_s[lane]) + seconds
        return self._free_s[lane]

    def close(self) -> None:
        """Nothing to do."""


class ThrottledTier:
    """A decorator that holds completions back until a serial lane of the given speed would have been through.

    Each direction is a lane of its own. A transfer that the inner tier takes longer for takes longer.

    Args:
        inner: The tier that does the work, opened on `inner_queue`; closed with this one.
        inner_queue: What `inner` reports to; nobody else waits on it.
        queue: Where completions go when they are due.
        read_bytes_per_s: Bandwidth of reads.
        write_bytes_per_s: Bandwidth of writes.
        latency_s: Added to every transfer; transfers wait for it side by side.
        lanes: The emulated device's, if other tiers (of other processes, too) are on it; closed with this tier.

    Raises:
        ConfigError: If a bandwidth is not greater than 0 or the latency less than 0.
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
        lanes: SharedLanes | None = None,
    ) -> None:
        if latency_s < 0:
            raise ConfigError("latency_s", latency_s, "give seconds >= 0")
        self.inner = inner
        self.name = inner.name
        self.path = inner.path
        self.cached = inner.cached
        self._inner_queue = inner_queue
        self._queue = queue
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._submitted: dict[int, tuple[str, int, float]] = {}
        self._lanes = lanes or OwnLanes()
        self._closing = False
        self.set_rates(read_bytes_per_s, write_bytes_per_s)
        self._thread = threading.Thread(target=self._serve, name="offload-throttle", daemon=True)
        self._thread.start()

    def set_rates(self, read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        """Change both bandwidths from now on; any thread."""
        for field, value in (("read_bytes_per_s", read_bytes_per_s), ("write_bytes_per_s", write_bytes_per_s)):
            if not value > 0:
                raise ConfigError(field, value, "give a number greater than 0")
        self._rates = {"read": read_bytes_per_s, "write": write_bytes_per_s}

    def read(self, request: TileRequest) -> None:
        """See `Tier.read`."""
        self._note("read", request)
        self.inner.read(request)

    def write(self, request: TileRequest) -> None:
        """See `Tier.write`."""
        self._note("write", request)
        self.inner.write(request)

    def register_memory(self, address: int, nbytes: int) -> None:
        """See `Tier.register_memory`."""
        self.inner.register_memory(address, nbytes)

    @property
    def depth(self) -> int:
        """See `Tier.depth`."""
        return self.inner.depth

    def set_depth(self, depth: int) -> None:
        """See `Tier.set_depth`."""
        self.inner.set_depth(depth)

    def explain(self, op: int) -> str:
        """Return what the inner tier knows about a failed operation; see `common.Explaining`."""
        return self.inner.explain(op) if isinstance(self.inner, Explaining) else ""

    def waiting_for(self) -> str:
        """Return what the inner tier is waiting for other than its device; "" if nothing."""
        why = getattr(self.inner, "waiting_for", None)
        return "" if why is None else str(why())

    def sync(self, op: int) -> None:
        """See `Tier.sync`; not held back."""
        self.inner.sync(op)

    def free_bytes(self) -> int:
        """See `Tier.free_bytes`."""
        return self.inner.free_bytes()

    def close(self) -> None:
        """See `Tier.close`."""
        self.inner.close()
        if not self._closing:
            self._closing = True
            self._inner_queue.post(0)
            self._thread.join()
            self._lanes.close()

    def _note(self, lane: str, request: TileRequest) -> None:
        with self._lock:
            self._submitted[request.op] = lane, request.nbytes, time.monotonic()

    def _serve(self) -> None:
        held: list[tuple[float, int, Completion]] = []
        ended = False
        while held or not ended:
            timeout_s = max(held[0][0] - time.monotonic(), 0.0) if held else -1.0
            for record in self._inner_queue.wait(timeout_s):
                completion = Completion(*record)
                ended = ended or completion.op == 0  # posted after everything else
                if completion.op:
                    heapq.heappush(held, self._due(completion))
            now_s = time.monotonic()
            while held and held[0][0] <= now_s:
                self._queue.post(*heapq.heappop(held)[2])

    def _due(self, completion: Completion) -> tuple[float, int, Completion]:
        with self._lock:
            lane, nbytes, submitted_s = self._submitted.pop(completion.op, ("", 0, 0.0))
        if not lane:  # a sync
            return completion.finished_s, completion.op, completion
        seconds = nbytes / self._rates[lane]
        through_s = self._lanes.book(lane, submitted_s, seconds)
        finished_s = max(completion.finished_s, through_s + self._latency_s)
        late = completion._replace(started_s=through_s - seconds, finished_s=finished_s)
        return finished_s, completion.op, late
