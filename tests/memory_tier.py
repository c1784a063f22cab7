"""A path of slots in memory: the smallest thing that is a tier, for tests."""

from __future__ import annotations

import ctypes
import errno
import time
import uuid

import psutil

from offload._native import crc32c
from offload.protocols import ERROR_CHECKSUM, ERROR_HEADER, ERROR_SHORT, SECTOR_BYTES, Queue, TileRequest
from offload.tiers.common import SLOT_HEADER_BYTES, Owned, check_depth, check_request, make_header, verify_header


class MemoryTier(Owned):
    """Slots as byte strings in this process, with the headers and checks of a real store.

    Transfers are done inside the call and their completion is on the queue when it returns. Keeps no more
    than has been written; nothing survives `close`.

    Args:
        store: The session's store; goes into the headers.
        queue: Where completions go.
        max_bytes: Most that the store may reach to; None for what the machine has available.

    Attributes:
        slots: Header and payload of each slot by offset; a test may damage them.
    """

    name = "memory"
    cached = False

    def __init__(
        self,
        store: uuid.UUID,
        queue: Queue,
        *,
        path: str = "memory:",
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(path)
        self.slots: dict[int, bytearray] = {}
        self._store = store.bytes
        self._queue = queue
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self.depth = 1

    def read(self, request: TileRequest) -> None:
        """Copy a slot into memory; see `offload.protocols.Tier`. The buffer is left alone on an error."""
        self.check_open("read")
        check_request(request)
        started_s = time.monotonic()
        error, checksum = self._read(request)
        self._report(request, error, checksum, started_s)

    def write(self, request: TileRequest) -> None:
        """Copy a tile into a slot; see `offload.protocols.Tier`."""
        self.check_open("write")
        check_request(request)
        started_s = time.monotonic()
        end = request.offset + SLOT_HEADER_BYTES + request.nbytes
        if self._max_bytes is not None and end > self._max_bytes:
            self._report(request, errno.ENOSPC, 0, started_s)
            return
        record = bytearray(SLOT_HEADER_BYTES + request.nbytes)
        record[:SLOT_HEADER_BYTES], checksum = make_header(self._store, request)
        ctypes.memmove(_payload_address(record), request.address, request.nbytes)
        self.slots[request.offset] = record
        self._used_bytes = max(self._used_bytes, end)
        self._report(request, 0, checksum or 0, started_s)

    def sync(self, op: int) -> None:
        """Complete as `op`: memory has nothing to make durable."""
        self.check_open("sync")
        now_s = time.monotonic()
        self._queue.post(op, 0, 0, now_s, now_s)

    def set_depth(self, depth: int) -> None:
        """Take note of it: requests are over as soon as they have begun."""
        self.check_open("set_depth")
        check_depth(depth)
        self.depth = depth

    def allocate(self, nbytes: int) -> None:
        """Do nothing: memory is taken as it is written to."""
        self.check_open("allocate")

    def free_bytes(self) -> int:
        """Return the bytes by which slots may still grow, headers included."""
        self.check_open("free_bytes")
        available = int(psutil.virtual_memory().available)
        return available if self._max_bytes is None else min(available, self._max_bytes - self._used_bytes)

    def close(self) -> None:
        """Free all slots; idempotent."""
        if self.mark_closed():
            self.slots.clear()

    def cut(self, end: int) -> None:
        """End the store at a byte, as a file that lost its tail does."""
        for start, record in list(self.slots.items()):
            if start + SLOT_HEADER_BYTES > end:
                del self.slots[start]
            else:
                self.slots[start] = record[: end - start]
        self._used_bytes = end

    def _read(self, request: TileRequest) -> tuple[int, int]:
        record = self.slots.get(request.offset)
        if record is None:
            beyond = request.offset + SECTOR_BYTES > self._used_bytes
            return (ERROR_SHORT if beyond else ERROR_HEADER), 0
        error, promised = verify_header(bytes(record[:SLOT_HEADER_BYTES]), self._store, request)
        if error:
            return error, 0
        if len(record) != SLOT_HEADER_BYTES + request.nbytes:
            return ERROR_SHORT, 0
        found = 0
        if promised is not None:
            found = crc32c(_payload_address(record), request.nbytes)
            if found != promised:
                return ERROR_CHECKSUM, found
        ctypes.memmove(request.address, _payload_address(record), request.nbytes)
        return 0, found

    def _report(self, request: TileRequest, error: int, checksum: int, started_s: float) -> None:
        self._queue.post(request.op, error, request.offset if error else checksum, started_s, time.monotonic())


def _payload_address(record: bytearray) -> int:
    # A bytearray does not move while its length stays, so the address outlives this export.
    return ctypes.addressof(ctypes.c_char.from_buffer(record)) + SLOT_HEADER_BYTES
