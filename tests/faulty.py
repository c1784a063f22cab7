"""Faults as data: a tier that does what another one does, except where it was told to fail."""

from __future__ import annotations

import ctypes
import errno
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from offload._native import crc32c
from offload.errors import invariant
from offload.protocols import ERROR_CHECKSUM, Queue, Tier, TileId, TileRequest
from offload.session import setup
from offload.tiers import open_tier
from offload.tiers.common import check_request, closed_error

Operation = Literal["read", "write", "sync"]


class FaultKind(Enum):
    """What goes wrong."""

    ERROR = "error"
    """The operation fails with an errno and moves nothing."""
    CORRUPT = "corrupt"
    """A write succeeds, but its payload is damaged; a read finds damage that a second read does not."""
    TORN = "torn"
    """A write fails with an errno half-way and leaves the slot damaged."""
    LOST = "lost"
    """A write is reported as done but never happens: the slot keeps what it had."""
    MISDIRECTED = "misdirected"
    """The slot of another tile: a write stores this one under a wrong name, a read finds a wrong name."""
    DELAY = "delay"
    """The operation waits until `FaultyTier.release`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, at one operation.

    Attributes:
        operation: "read", "write" or "sync".
        kind: What goes wrong.
        nth: At which operation of that kind, counted from 1 (of `tile`, where it is given).
        errno: With which system error, for ERROR and TORN.
        tile: Only operations on this tile count; None for all.
    """

    operation: Operation
    kind: FaultKind
    nth: int = 1
    errno: int = errno.EIO
    tile: TileId | None = None


class FaultyTier:
    """A decorator that injects faults into the operations of a tier that it owns.

    Completions of the inner tier go to the queue as they are. Damage is remembered by slot until it is
    written again, so that reads of it fail as the inner tier would make them fail.

    Args:
        inner: The tier that does the work; closed with this one.
        queue: The queue that `inner` reports to.
        faults: What is to go wrong, in any order; each happens once.

    Attributes:
        fired: The faults that have happened, in order.
    """

    def __init__(self, inner: Tier, queue: Queue, faults: Iterable[Fault] = ()) -> None:
        self.inner = inner
        self.name = inner.name
        self.path = inner.path
        self.cached = inner.cached
        self.paid = inner.paid
        self.fired: list[Fault] = []
        self._queue = queue
        self._pending: list[Fault] = []
        self._seen: list[int] = []
        for fault in faults:
            self.plant(fault)
        self._damaged: dict[int, None] = {}
        self._held: dict[int, tuple[Operation, TileRequest | None]] = {}
        self._closed = False

    def plant(self, fault: Fault) -> None:
        """Have a fault happen; its operations are counted from now on."""
        self._pending.append(fault)
        self._seen.append(0)

    def _begin(self, verb: Operation, request: TileRequest, plain: Callable[[TileRequest], None]) -> Fault | None:
        """Do an operation that is to have no fault, and hold one that is to wait; return the fault of any other."""
        self._check_open(verb)
        check_request(request)
        fault = self._due(verb, request.tile)
        if fault is None:
            plain(request)
        elif fault.kind is FaultKind.DELAY:
            self._held[request.op] = (verb, request)
            return None
        return fault

    def read(self, request: TileRequest) -> None:
        """Read as the inner tier does, or fail as told."""
        fault = self._begin("read", request, self._read)
        if fault is None:
            return
        if fault.kind is FaultKind.CORRUPT:
            self._read_damage(request)
        elif fault.kind is FaultKind.MISDIRECTED:
            self.inner.read(request._replace(tile=_another(request.tile)))
        else:
            self._fail(request.op, fault.errno, request.offset)

    def write(self, request: TileRequest) -> None:
        """Write as the inner tier does, or fail as told."""
        fault = self._begin("write", request, self._write)
        if fault is None:
            return
        if fault.kind is FaultKind.CORRUPT:
            self._write(request)
            self._damaged[request.offset] = None
        elif fault.kind is FaultKind.TORN:
            self._damaged[request.offset] = None
            self._fail(request.op, fault.errno, request.offset)
        elif fault.kind is FaultKind.LOST:
            now_s = time.monotonic()
            self._queue.post(request.op, 0, crc32c(request.address, request.nbytes), now_s, now_s)
        elif fault.kind is FaultKind.MISDIRECTED:
            self._write(request._replace(tile=_another(request.tile)))
        else:
            self._fail(request.op, fault.errno, request.offset)

    def sync(self, op: int) -> None:
        """Sync as the inner tier does, or fail as told."""
        self._check_open("sync")
        fault = self._due("sync", None)
        if fault is None:
            self.inner.sync(op)
        elif fault.kind is FaultKind.DELAY:
            self._held[op] = ("sync", None)
        else:
            self._fail(op, fault.errno, 0)

    def check_in_place(self) -> None:
        """See `Tier.check_in_place`."""
        self.inner.check_in_place()

    def keep(self, offsets: Collection[int]) -> None:
        """See `Tier.keep`."""
        self.inner.keep(offsets)

    @property
    def depth(self) -> int:
        """See `Tier.depth`."""
        return self.inner.depth

    def set_depth(self, depth: int) -> None:
        """Tell the inner tier."""
        self._check_open("set_depth")
        self.inner.set_depth(depth)

    def allocate(self, nbytes: int) -> None:
        """Tell the inner tier."""
        self._check_open("allocate")
        self.inner.allocate(nbytes)

    def free_bytes(self) -> int:
        """Return what the inner tier does."""
        self._check_open("free_bytes")
        return self.inner.free_bytes()

    def held(self) -> list[int]:
        """Return the operations that wait for `release`, in order."""
        return list(self._held)

    def release(self, op: int) -> None:
        """Start a delayed operation after all."""
        self._check_open("release")
        invariant(op in self._held, f"operation {op} is not held")
        self._start(op)

    def close(self) -> None:
        """Start what is still held, then close the inner tier, which finishes it; idempotent."""
        if self._closed:
            return
        for op in list(self._held):
            self._start(op)
        self._closed = True
        self.inner.close()

    def _start(self, op: int) -> None:
        operation, request = self._held.pop(op)
        if request is None:
            self.inner.sync(op)
        elif operation == "read":
            self._read(request)
        else:
            self._write(request)

    def _read(self, request: TileRequest) -> None:
        if request.offset in self._damaged:
            self._read_damage(request)
        else:
            self.inner.read(request)

    def _write(self, request: TileRequest) -> None:
        self._damaged.pop(request.offset, None)
        self.inner.write(request)

    def _read_damage(self, request: TileRequest) -> None:
        # What arrived is in the buffer when a checksum fails, so it must not be left as it was.
        ctypes.memset(request.address, 0xA5, request.nbytes)
        self._fail(request.op, ERROR_CHECKSUM, request.offset)

    def _fail(self, op: int, error: int, offset: int) -> None:
        now_s = time.monotonic()
        self._queue.post(op, error, offset, now_s, now_s)

    def _due(self, operation: Operation, tile: TileId | None) -> Fault | None:
        """Count one operation; return the fault that is due at it. The first in the list wins."""
        due: int | None = None
        for index, fault in enumerate(self._pending):
            if fault.operation == operation and fault.tile in (None, tile):
                self._seen[index] += 1
                if due is None and self._seen[index] >= fault.nth:
                    due = index
        if due is None:
            return None
        del self._seen[due]
        self.fired.append(self._pending.pop(due))
        return self.fired[-1]

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise closed_error(operation, self)


def _another(tile: TileId) -> TileId:
    return tile._replace(tile=tile.tile + 1)


def faulty_paths(monkeypatch: Any) -> list[FaultyTier]:
    """Have sessions open their paths as tiers that can fail; return these, in the order in which they are opened."""
    opened: list[FaultyTier] = []

    def opening(name: str, store: uuid.UUID, queue: Any, **settings: Any) -> FaultyTier:
        opened.append(FaultyTier(open_tier(name, store, queue, **settings), queue))
        return opened[-1]

    monkeypatch.setattr(setup, "open_tier", opening)
    return opened
