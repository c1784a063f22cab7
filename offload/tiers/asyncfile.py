"""A directory of a network or parallel file system as a path of slots, through asyncio and aiofiles.

For mounts where neither O_DIRECT nor io_uring works: through the page cache, with one event loop on one thread that
keeps a bounded number of transfers going. The store on disk is the one that `FileTier` makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import mmap
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from aiofiles.os import wrap

from offload._native import crc32c, make_slot_header
from offload.protocols import ERROR_CHECKSUM, ERROR_SHORT, SECTOR_BYTES, Queue, TileRequest
from offload.tiers.common import (
    DEFAULTS,
    SLOT_HEADER_BYTES,
    Owned,
    StoreOptions,
    admit,
    check_depth,
    check_limits,
    check_request,
    memory_of,
)
from offload.tiers.file import DEFAULT_PIECE_BYTES
from offload.tiers.lane import Lane
from offload.tiers.places import room_bytes
from offload.tiers.store import Store

DEFAULT_DEPTH = 2
"""A server far away answers late but many at once."""

_log = logging.getLogger(__name__)

_preadv = wrap(os.preadv)
_pwritev = wrap(os.pwritev)
_fdatasync = wrap(os.fdatasync)
_crc32c = wrap(crc32c)


def supports_direct(directory: str) -> bool:
    """Return whether files of a directory can be written with O_DIRECT; leaves nothing behind.

    Raises:
        OSError: No file can be made there.
    """
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".offload-") as file, mmap.mmap(-1, SECTOR_BYTES) as page:
        try:
            descriptor = os.open(file.name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return False
        try:
            return os.pwritev(descriptor, [page], 0) == SECTOR_BYTES
        except OSError as cause:
            return cause.errno in (errno.ENOSPC, errno.EDQUOT)
        finally:
            os.close(descriptor)


class _Loop(asyncio.SelectorEventLoop):
    """A loop that may be forgotten half made: where no descriptor is left its constructor fails, and then its end."""

    def __del__(self) -> None:
        if hasattr(self, "_csock"):
            super().__del__()


class AsyncFileTier(Owned):
    """Slots in one file of a directory, read and written through asyncio.

    The store is `<path>/offload-<uuid>/` with the slots in `tiles`, a description in `store.json` and, where the file
    system has locks, a `lock` that this process holds until `close`, which deletes the store. A process forked from
    this one cannot use the tier: every method raises there, except `close`, which does nothing.

    Args:
        path: An existing, writable directory.
        store: The session's store.
        queue: Where completions go; must outlive the tier.
        options: How; the depth is of system calls, which both directions share.
        piece_bytes: Most that one system call moves, a multiple of 4096.

    Attributes:
        store_path: The store's directory.
        data_path: The file with the slots.

    Raises:
        ConfigError: `path` or a size cannot be used; nothing has been created.
        TierError: The store could not be created; what had been created is gone again.
    """

    name = "asyncfile"
    cached = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        store: uuid.UUID,
        queue: Queue,
        options: StoreOptions = DEFAULTS,
        *,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
    ) -> None:
        super().__init__(os.fspath(path))
        self.depth = depth = DEFAULT_DEPTH if options.depth is None else options.depth
        check_limits(options.max_bytes, depth, piece_bytes)
        self._store = store.bytes
        self._queue = queue
        self._max_bytes = options.max_bytes
        self._checksum = options.checksum
        self._piece_bytes = piece_bytes
        self._used_bytes = 0
        self._sync_error = 0
        self._writing: set[asyncio.Task[None]] = set()
        self._running: set[asyncio.Task[None]] = set()
        with self._answering_for("open"), contextlib.ExitStack() as undo:
            self._place = Store(self.path, store)
            undo.callback(self._place.close)
            self.store_path, self.data_path = self._place.directory, self._place.data_path
            self._descriptor = os.open(self.data_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, self._descriptor)
            self._lane = Lane("offload-file", 0)
            undo.callback(self._lane.close)
            self._lane.set_threads(2 * depth)  # for the system calls of both directions
            self._loop = _Loop()
            undo.callback(self._loop.close)
            self._thread = threading.Thread(target=self._loop.run_forever, name="offload-asyncio", daemon=True)
            undo.callback(self._stop_loop)
            self._thread.start()
            undo.pop_all()

    def read(self, request: TileRequest) -> None:
        """Start reading a slot; see `offload.protocols.Tier`. After an error the buffer holds anything."""
        self._check_open("read")
        check_request(request)
        self._start(lambda: self._answer(request.op, request.offset, self._read(request)))

    def write(self, request: TileRequest) -> None:
        """Start writing a slot; see `offload.protocols.Tier`."""
        self._check_open("write")
        check_request(request)
        end = request.offset + SLOT_HEADER_BYTES + request.nbytes
        if self._max_bytes is not None and end > self._max_bytes:
            now_s = time.monotonic()
            self._queue.post(request.op, errno.ENOSPC, 0, now_s, now_s, request.offset)
            return
        self._used_bytes = max(self._used_bytes, end)
        self._start(lambda: self._answer(request.op, request.offset, self._write(request)), writes=True)

    def register_memory(self, address: int, nbytes: int) -> None:
        """See `Tier.register_memory`; of no use here."""

    def sync(self, op: int) -> None:
        """Make every write that was submitted before durable; completes as `op`. Once failed, it fails for good."""
        self._check_open("sync")
        self._start(lambda: self._answer(op, 0, self._sync(frozenset(self._writing))))

    def set_depth(self, depth: int) -> None:
        """See `Tier.set_depth`."""
        self._check_open("set_depth")
        check_depth(depth)
        with self._answering_for("set_depth"):
            self._lane.set_threads(2 * depth)
        self.depth = depth

    def free_bytes(self) -> int:
        """Return the bytes by which slots may still grow, headers included."""
        self._check_open("free_bytes")
        room = room_bytes(os.fstatvfs(self._descriptor))
        return room if self._max_bytes is None else min(room, self._max_bytes - self._used_bytes)

    def close(self) -> None:
        """Finish what is in flight, end the threads, delete the store; idempotent."""
        if not self._ends_here():
            return
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._stop_loop()
        self._loop.close()
        self._lane.close()
        os.close(self._descriptor)
        self._place.close(keep=self.kept is not None)

    def _stop_loop(self) -> None:
        if self._thread.ident is not None:  # it has started, whatever interrupted that
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    # On the loop's thread

    def _start(self, answer: Callable[[], Coroutine[Any, Any, None]], *, writes: bool = False) -> None:
        def start() -> None:
            task = self._loop.create_task(answer())
            for group in (self._running, self._writing) if writes else (self._running,):
                group.add(task)
                task.add_done_callback(group.discard)

        self._loop.call_soon_threadsafe(start)

    async def _drain(self) -> None:
        # What was submitted before has become a task by now, in order of submission.
        while self._running:
            await asyncio.wait(set(self._running))

    async def _answer(self, op: int, offset: int, work: Coroutine[Any, Any, tuple[int, int]]) -> None:
        started_s = time.monotonic()
        try:
            error, checksum = await work
        except OSError as cause:
            error, checksum = cause.errno or errno.EIO, 0
        except Exception as cause:  # a lane answers, whatever happens
            _log.error("%s: %r", self.path, cause)
            error, checksum = errno.EIO, 0
        self._queue.post(op, error, checksum, started_s, time.monotonic(), offset if error else 0)

    async def _read(self, request: TileRequest) -> tuple[int, int]:
        header = bytearray(SLOT_HEADER_BYTES)
        if await self._move(_preadv, [memoryview(header)], request.offset) < SLOT_HEADER_BYTES:
            return ERROR_SHORT, 0
        error, promised = admit(bytes(header), self._store, request)
        if error:
            return error, 0
        if await self._move(_preadv, [memory_of(request)], request.offset + SLOT_HEADER_BYTES) < request.nbytes:
            return ERROR_SHORT, 0
        if not self._checksum or promised is None:
            return 0, 0
        found = await self._crc(request)
        return (0 if found == promised else ERROR_CHECKSUM), found

    async def _write(self, request: TileRequest) -> tuple[int, int]:
        checksum = await self._crc(request) if self._checksum else None
        header = make_slot_header(self._store, *request.tile, request.step, request.numel, request.nbytes, checksum)
        moved = await self._move(_pwritev, [memoryview(header), memory_of(request)], request.offset)
        if moved < SLOT_HEADER_BYTES + request.nbytes:
            return errno.EIO, 0
        return 0, checksum or 0

    async def _sync(self, before: frozenset[asyncio.Task[None]]) -> tuple[int, int]:
        if before:
            await asyncio.wait(before)
        try:
            if not self._sync_error:
                await _fdatasync(self._descriptor, loop=self._loop, executor=self._lane)
        except OSError as cause:
            # The kernel reports lost pages once; what was lost stays lost.
            self._sync_error = cause.errno or errno.EIO
        return self._sync_error, 0

    async def _crc(self, request: TileRequest) -> int:
        found = await _crc32c(request.address, request.nbytes, loop=self._loop, executor=self._lane)
        return int(found)

    async def _move(self, call: Callable[..., Any], buffers: Sequence[memoryview], offset: int) -> int:
        """Read or write `buffers` at `offset`, however often the system stops short; return the bytes moved."""
        total = 0
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                piece = buffer[done : done + self._piece_bytes]
                moved = await call(self._descriptor, [piece], offset + total, loop=self._loop, executor=self._lane)
                if moved == 0:
                    return total  # the end of the file
                done += moved
                total += moved
        return total
