"""A directory of a local file system as a path of slots."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import uuid
from pathlib import Path
from typing import cast

from offload._native import CompletionQueue, IoThreads, StoreFile
from offload.errors import ConfigError, TierError
from offload.protocols import SECTOR_BYTES, TileRequest
from offload.tiers.asyncfile import AsyncIo
from offload.tiers.common import DEFAULTS, Owned, StoreOptions, check_depth, check_limits, check_request
from offload.tiers.filesystem import open_regular
from offload.tiers.store import Store

IO_BACKENDS = ("auto", "threads", "asyncio")
"""Ways to read and write; "auto" is "threads" on local file systems."""

# Measured (bench/reports/*-paths.json, "sweep" and "depth"): fewer or smaller pieces in flight lose
# throughput, more or larger gain little.
DEFAULT_DEPTHS = {"threads": 4, "asyncio": 2}
DEFAULT_PIECE_BYTES = 4 << 20

_log = logging.getLogger(__name__)
_logged: set[str] = set()


def _log_once(message: str, level: int = logging.INFO) -> None:
    """Log a message the first time only: it is about the whole process, not about one path."""
    if message not in _logged:
        _logged.add(message)
        logging.getLogger("offload").log(level, "%s", message)


def choose_io_backend(wanted: str = "auto") -> str:
    """Return the backend for the setting `wanted`, "threads" or "asyncio", and log it; for "io_uring", "threads".

    Raises:
        ConfigError: `wanted` is unknown.
    """
    if wanted == "io_uring":
        _log_once('io_backend "io_uring" is taken as "threads", which are as fast (said once)', logging.WARNING)
    elif wanted not in IO_BACKENDS:
        raise ConfigError("io_backend", wanted, "use " + " or ".join(f'"{name}"' for name in IO_BACKENDS))
    # "auto", too, is "threads" here: where asyncio suits a path better, `Directory.open` has asked for "asyncio".
    chosen = "asyncio" if wanted == "asyncio" else "threads"
    _log_once(f"storage I/O by {chosen}")
    return chosen


class FileTier(Owned):
    """Slots in one preallocated file of a directory, read and written by native threads or asyncio.

    The store is `<path>/offload-<uuid>/` (see `store.Store`) with the slots in `tiles`; `close` deletes it. The file
    is opened past the page cache (O_DIRECT) where the file system allows it.

    A process forked from this one cannot use the tier: every method raises there, except `close`, which does
    nothing. After a failed sync every later one fails too, because the kernel reports lost pages only once.

    Args:
        path: An existing, writable directory.
        store: The session's store.
        queue: Where completions go; must outlive the tier.
        options: The depth is of tiles (with threads) or system calls (with asyncio), by default `DEFAULT_DEPTHS`; the
            backend is one of `IO_BACKENDS`.
        piece_bytes: Most that one system call moves, a multiple of 4096.
        direct: Try O_DIRECT; False for the page cache, which asyncio always uses.

    Attributes:
        io_backend: The backend that is used: "threads" or "asyncio".
        direct: Whether the file is open with O_DIRECT.
        store_path: The store's directory.
        data_path: The file with the slots.

    Raises:
        ConfigError: `path` or a size cannot be used; nothing has been created.
        TierError: The store could not be created; what had been created is deleted again.
    """

    name = "file"

    def __init__(
        self,
        path: str | os.PathLike[str],
        store: uuid.UUID,
        queue: CompletionQueue,
        options: StoreOptions = DEFAULTS,
        *,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
        direct: bool = True,
    ) -> None:
        super().__init__(os.fspath(path))
        self.io_backend = choose_io_backend(options.io_backend)
        self.depth = DEFAULT_DEPTHS[self.io_backend] if options.depth is None else options.depth
        check_limits(options.max_bytes, self.depth, piece_bytes)
        used_bytes = options.used_bytes
        is_existing = used_bytes is not None
        if is_existing:
            self.kept = frozenset()  # so that `close` does not delete the store
        with self.raising_tier_error("open"), contextlib.ExitStack() as undo:
            self._directory = Store(self.path, store, existing=is_existing)
            undo.callback(self._directory.close, keep=is_existing)
            self.store_path, self.data_path = self._directory.directory, self._directory.data_path
            direct = direct and self.io_backend != "asyncio"
            descriptor, self.direct = _open_data(self.data_path, direct, existing=is_existing)
            self.cached = not self.direct
            self._status = os.fstat(descriptor)
            # `close` makes an existing file no shorter than it was.
            self._bytes_before = self._status.st_size if is_existing else 0
            # The `StoreFile` owns the descriptor from here on: its destructor closes it, whatever happens. For it a
            # limit of 0 is none.
            self._file = StoreFile(descriptor, self.direct, store.bytes, options.max_bytes or 0, options.extent_bytes)
            # The slots of an existing file count as used, so that `free_bytes` and `close` begin behind them.
            if used_bytes is not None and (error := self._file.reserve(used_bytes)):
                raise OSError(error, os.strerror(error))
            if self.io_backend == "asyncio":
                asyncio_io = AsyncIo(queue, self.depth, piece_bytes, self.data_path, store.bytes)
                self._io = cast(IoThreads, asyncio_io)  # it has the same methods
            else:
                self._io = IoThreads(queue, self.depth, piece_bytes)
            undo.callback(self._io.close)
            undo.pop_all()

    def read(self, request: TileRequest) -> None:
        """Start reading a slot; see `offload.protocols.Tier`. After an error the buffer holds anything."""
        self.check_open("read")
        check_request(request)
        self._io.read(self._file, *request)

    def write(self, request: TileRequest) -> None:
        """Start writing a slot; see `offload.protocols.Tier`. The file grows by extents as it needs to."""
        self.check_open("write")
        check_request(request)
        self._io.write(self._file, *request)

    def sync(self, op: int) -> None:
        """Make every write that was submitted before durable; completes as `op`."""
        self.check_open("sync")
        self._io.sync(self._file, op)

    def set_depth(self, depth: int) -> None:
        """Change how many requests are in flight for each direction."""
        self.check_open("set_depth")
        check_depth(depth)
        with self.raising_tier_error("set_depth"):
            self._io.set_depth(depth)
        self.depth = depth

    def allocate(self, nbytes: int) -> None:
        """Set `nbytes` of the file aside, so that writes there do not fail for lack of room."""
        self.check_open("allocate")
        with self.raising_tier_error("allocate"):
            if error := self._file.reserve(nbytes, exact=True):
                raise OSError(error, os.strerror(error))

    def free_bytes(self) -> int:
        """Return the bytes by which slots may still grow, headers included."""
        self.check_open("free_bytes")
        return self._file.free_bytes()

    def check_in_place(self) -> None:
        """See `Tier.check_in_place`; compares the file that the path names with the open one."""
        # A file that is not there any more is reported below, as another file is.
        with self.raising_tier_error("save"), contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.data_path), self._status):
                return
        detail = f"{self.data_path} is not the open file any more: it was deleted, or another disk is there"
        raise TierError("save", tier=self.name, path=self.path, detail=detail)

    def inject(self, kind: str, nth: int = 1, error: int = 0, limit_bytes: int = 0) -> None:
        """For tests: make the `nth` next system call fail; not with asyncio.

        Args:
            kind: "read", "write", "sync" or "allocate".
            nth: Which call of that kind, counted from 1.
            error: The errno to fail with (EINTR is retried, like a real one); 0 for a short transfer.
            limit_bytes: Most that a short transfer moves.
        """
        self.check_open("inject")
        self._io.inject(kind, nth, error, limit_bytes)

    def close(self) -> None:
        """Finish what is in flight, end the threads, and delete the store; idempotent.

        After `keep` the store stays with all its slots, and only room that was allocated beyond them is freed.
        """
        if not self.mark_closed():
            return  # closed before, or another process's
        self._io.close()
        # Nothing is in flight any more, so the file is closed, too: by deleting its last reference.
        used_bytes = self._file.used_bytes
        del self._io, self._file
        if self.kept is not None:
            with contextlib.suppress(OSError):  # frees what was preallocated; if that fails, no harm is done
                os.truncate(self.data_path, max(used_bytes, self._bytes_before))
        self._directory.close(keep=self.kept is not None)


def _open_data(path: Path, direct: bool, *, existing: bool) -> tuple[int, bool]:
    """Create the data file, or open the `existing` one; return its descriptor, and whether it has O_DIRECT.

    With `direct` O_DIRECT is tried; where it does not work, the descriptor goes through the page cache. An existing
    file with a second name is refused: it may be the file of a backup, which must not change with it.
    """
    if existing:
        if os.stat(path).st_nlink > 1:
            raise OSError(errno.EMLINK, "it has hard links")
        buffered = open_regular(path, os.O_RDWR)
    else:
        buffered = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
    if direct:
        # Some file systems refuse the flag at open, some at the first transfer: so a page is written and read, too.
        descriptor = -1  # not open
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_DIRECT)
            with mmap.mmap(-1, SECTOR_BYTES) as page:  # O_DIRECT takes aligned memory only, as an anonymous map is
                page[:8] = b"aligned?"
                # Nothing is written to an existing file: there a page that can be read is enough.
                written_bytes = SECTOR_BYTES if existing else os.pwritev(descriptor, [page], 0)
                if written_bytes == SECTOR_BYTES and os.preadv(descriptor, [page], 0) == SECTOR_BYTES:
                    if not existing:
                        os.ftruncate(descriptor, 0)  # remove the page of the trial
                    os.close(buffered)
                    return descriptor, True
        except OSError as cause:
            # The first two refuse the flag. The others say that the disk is full: then the page cache is used, and
            # writing a slot reports the full disk.
            if cause.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSPC, errno.EDQUOT):
                os.close(buffered)
                raise
            _log.info("%s: no O_DIRECT (%s), using the page cache", path, cause.strerror)
        if descriptor >= 0:  # opened, but the trial failed or was short
            os.close(descriptor)
        if not existing:
            os.ftruncate(buffered, 0)  # what the trial may have written
    return buffered, False
