"""How a file of slots is read and written through asyncio and aiofiles.

For network mounts without O_DIRECT: through the page cache, with one event loop on one thread that keeps a
bounded number of transfers going.
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
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from aiofiles.os import wrap

from offload._native import StoreFile
from offload.protocols import ERROR_SHORT, SECTOR_BYTES, Queue, TileRequest
from offload.tiers.common import SLOT_HEADER_BYTES, make_header, memory_of, verify_header, verify_payload
from offload.tiers.lane import Lane

_log = logging.getLogger(__name__)

_preadv = wrap(os.preadv)
_pwritev = wrap(os.pwritev)
_fdatasync = wrap(os.fdatasync)
_verify_payload = wrap(verify_payload)
_make_header = wrap(make_header)
_reserve = wrap(StoreFile.reserve)


def supports_direct(directory: str) -> bool:
    """Return whether files of a directory can be written with O_DIRECT; leaves nothing behind.

    Raises:
        OSError: No file can be made there.
    """
    # The page is an anonymous map, as O_DIRECT takes aligned memory only.
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".offload-") as file, mmap.mmap(-1, SECTOR_BYTES) as page:
        try:
            descriptor = os.open(file.name, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return False
        try:
            return os.pwritev(descriptor, [page], 0) == SECTOR_BYTES
        except OSError as cause:
            return cause.errno in (errno.ENOSPC, errno.EDQUOT)  # no room, but the flag was accepted
        finally:
            os.close(descriptor)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose destructor works even if its constructor has failed, as when no descriptor is left."""

    def __del__(self) -> None:
        """Close the loop, unless its constructor failed before it made the socket pair that closing needs."""
        if hasattr(self, "_csock"):
            super().__del__()


class AsyncIo:
    """Reads and writes slots for a `FileTier`, with the methods of `_native.IoThreads`, which it replaces.

    Args:
        queue: Where completions go; must outlive it.
        depth: Reads and writes share `2 * depth` threads, each of which makes one system call at a time.
        piece_bytes: Most that one system call moves, a multiple of 4096.
        path: The file. It is opened here a second time, as a `StoreFile` does not give its descriptor out.
        store: The uuid of the session's store, for headers.

    Raises:
        OSError, RuntimeError: The system gives no descriptor, or no thread.
    """

    def __init__(self, queue: Queue, depth: int, piece_bytes: int, path: Path, store: bytes) -> None:
        self._queue = queue
        self._piece_bytes = piece_bytes
        self._store = store
        self._sync_error = 0  # the errno of the first sync that failed; 0 for none
        self._writing: set[asyncio.Task[None]] = set()  # writes that have not ended
        self._running: set[asyncio.Task[None]] = set()  # all that has not ended
        with contextlib.ExitStack() as undo:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, self._descriptor)
            # Made without threads: if the system gives too few, `undo` ends those that `set_threads` has started.
            self._lane = Lane("offload-file", 0)
            undo.callback(self._lane.close)
            self._lane.set_threads(2 * depth)  # for the system calls of both directions
            self._loop = _Loop()
            undo.callback(self._loop.close)
            self._thread = threading.Thread(target=self._loop.run_forever, name="offload-asyncio", daemon=True)
            undo.callback(self._stop_loop)  # noted before the start, as an interrupt may come right after it
            self._thread.start()
            self._closers = undo.pop_all()

    def read(self, file: StoreFile, *fields: Any) -> None:
        """Start reading a slot; `fields` are those of a `TileRequest`, as for `IoThreads.read`."""
        request = TileRequest(*fields)
        self._start(lambda: self._complete(request.op, request.offset, self._read(request)))

    def write(self, file: StoreFile, *fields: Any) -> None:
        """Start writing a slot; `fields` are those of a `TileRequest`, as for `IoThreads.write`."""
        request = TileRequest(*fields)
        self._start(lambda: self._complete(request.op, request.offset, self._write(file, request)), writes=True)

    def sync(self, file: StoreFile, op: int) -> None:
        """Make the writes that were submitted before durable; once a sync has failed, all later syncs fail."""
        # `_writing` is read on the loop's thread: by then all earlier writes have become tasks.
        self._start(lambda: self._complete(op, 0, self._sync(frozenset(self._writing))))

    def set_depth(self, depth: int) -> None:
        """Change how many system calls go on at a time, to twice `depth`."""
        self._lane.set_threads(2 * depth)

    def close(self) -> None:
        """Finish what is in flight and end the threads; idempotent."""
        if self._thread.is_alive():  # else an earlier call has ended it
            asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._closers.close()

    def _stop_loop(self) -> None:
        """Stop the loop and join its thread."""
        if self._thread.ident is not None:  # it has started, even if an interrupt came while it did
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    # On the loop's thread

    def _start(self, coroutine: Callable[[], Coroutine[Any, Any, None]], *, writes: bool = False) -> None:
        """Start the coroutine that a function makes, as a task of the loop; any thread may call.

        `close` waits for the task; later syncs do, too, if it `writes`.
        """

        def start() -> None:
            """Make the task, and keep it in its groups until it is done; on the loop's thread."""
            task = self._loop.create_task(coroutine())
            for group in (self._running, self._writing) if writes else (self._running,):
                group.add(task)
                task.add_done_callback(group.discard)

        self._loop.call_soon_threadsafe(start)

    async def _drain(self) -> None:
        """Wait until no task is running.

        The loop takes calls in their order, so all that was submitted before this has become a task.
        """
        while self._running:
            await asyncio.wait(set(self._running))

    async def _complete(self, op: int, offset: int, work: Coroutine[Any, Any, tuple[int, int]]) -> None:
        """Await `work`, and post the completion of operation `op`.

        `work` returns (error, detail): if the error is 0, the detail is that of the completion, such as a payload's
        checksum. After an error the completion's detail is the slot's `offset`.
        """
        started_s = time.monotonic()
        try:
            error, detail = await work
        except OSError as cause:
            error, detail = cause.errno or errno.EIO, 0  # an error of 0 would say that all went well
        except Exception as cause:  # every operation is completed, whatever happens
            _log.error("asyncio: %r", cause)
            error, detail = errno.EIO, 0
        self._queue.post(op, error, offset if error else detail, started_s, time.monotonic())

    async def _read(self, request: TileRequest) -> tuple[int, int]:
        """Read a slot's header, then its payload, and verify both; return error and checksum (0 for none)."""
        header = bytearray(SLOT_HEADER_BYTES)
        if await self._transfer(_preadv, [memoryview(header)], request.offset) < SLOT_HEADER_BYTES:
            return ERROR_SHORT, 0
        error, expected = verify_header(bytes(header), self._store, request)
        if error:
            return error, 0
        if await self._transfer(_preadv, [memory_of(request)], request.offset + SLOT_HEADER_BYTES) < request.nbytes:
            return ERROR_SHORT, 0
        return (0, 0) if expected is None else await self._in_executor(_verify_payload, request, expected)

    async def _write(self, file: StoreFile, request: TileRequest) -> tuple[int, int]:
        """Reserve room for a slot in the file, then write it; return error and checksum (0 for none)."""
        nbytes = SLOT_HEADER_BYTES + request.nbytes
        if error := await self._in_executor(_reserve, file, request.offset + nbytes):
            return error, 0
        header, checksum = await self._in_executor(_make_header, self._store, request)
        moved_bytes = await self._transfer(_pwritev, [memoryview(header), memory_of(request)], request.offset)
        return (0, checksum or 0) if moved_bytes == nbytes else (errno.EIO, 0)

    async def _sync(self, before: frozenset[asyncio.Task[None]]) -> tuple[int, int]:
        """Wait for the writes `before`, then make them durable; return (error, 0).

        An error is noted in `_sync_error`, for all later syncs.
        """
        if before:
            await asyncio.wait(before)
        try:
            if not self._sync_error:
                await self._in_executor(_fdatasync, self._descriptor)
        except OSError as cause:
            # The kernel reports lost pages only once; they stay lost, so every later sync fails, too.
            self._sync_error = cause.errno or errno.EIO
        return self._sync_error, 0

    async def _in_executor(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function wrapped by aiofiles on a thread of the lane; return its result."""
        return await call(*arguments, loop=self._loop, executor=self._lane)

    async def _transfer(self, call: Callable[..., Any], buffers: Sequence[memoryview], offset: int) -> int:
        """Read or write `buffers` at `offset` by `call`, going on after short transfers; return the bytes moved."""
        total_bytes = 0
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                piece = buffer[done : done + self._piece_bytes]
                moved_bytes = await self._in_executor(call, self._descriptor, [piece], offset + total_bytes)
                if moved_bytes == 0:
                    return total_bytes  # a read has come to the end of the file; a write has moved nothing
                done += moved_bytes
                total_bytes += moved_bytes
        return total_bytes
