"""A store in a directory that another session has left, or uses: for reading only."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
import uuid
from pathlib import Path

from offload._native import CompletionQueue, IoThreads, StoreFile
from offload.errors import invariant
from offload.protocols import SECTOR_BYTES, TileRequest
from offload.tiers.common import Owned, check_request
from offload.tiers.file import DEFAULT_PIECE_BYTES
from offload.tiers.places import LOCK_NAME, open_regular, share_lock, unshare_lock
from offload.tiers.store import DATA_NAME, NO_LOCKS

DEPTH = 4


class ExistingStore(Owned):
    """Slots of another session's store; nothing is made, changed or deleted.

    While it is open, and where the file system has locks, the store's `lock` says that somebody reads it, so that no
    session lets go of what checkpoints name there.

    Args:
        path: The directory that the store lies in.
        store: The store.
        queue: Where completions go; must outlive the tier.
        checksum: Verify payload checksums.

    Attributes:
        store_path: The store's directory.

    Raises:
        TierError: There is no such store, or it cannot be read.
    """

    name = "file"
    depth = DEPTH
    cached = False

    def __init__(self, path: str, store: uuid.UUID, queue: CompletionQueue, *, checksum: bool = True) -> None:
        super().__init__(path)
        directory = self.store_path = Path(os.path.abspath(path)) / f"offload-{store}"
        self._queue = queue
        self._share: int | None = None
        with self._answering_for("open"), contextlib.ExitStack() as undo:
            with contextlib.suppress(FileNotFoundError):  # a copy has no lock where nobody may write
                self._lock(directory)
            undo.callback(self._unlock)
            descriptor, direct = _open_data(directory / DATA_NAME)
            self._file = StoreFile(descriptor, direct, store.bytes)
            self._io = IoThreads(queue, DEPTH, DEFAULT_PIECE_BYTES, checksum)
            undo.pop_all()

    def read(self, request: TileRequest) -> None:
        """Start reading a slot; see `offload.protocols.Tier`. After an error the buffer holds anything."""
        self._check_open("read")
        check_request(request)
        place = request.offset, request.address, request.nbytes
        self._io.read(self._file, request.op, *request.tile, request.step, *place, request.checksum)

    def write(self, request: TileRequest) -> None:
        """Not possible."""
        invariant(False, "a store of another session is written to")

    def sync(self, op: int) -> None:
        """Complete as `op`: nothing is written here."""
        now_s = time.monotonic()
        self._queue.post(op, 0, 0, now_s, now_s, 0)

    def register_memory(self, address: int, nbytes: int) -> None:
        """See `Tier.register_memory`; of no use here."""

    def set_depth(self, depth: int) -> None:
        """See `Tier.set_depth`; one depth is enough here."""

    def free_bytes(self) -> int:
        """Return 0."""
        return 0

    def close(self) -> None:
        """Finish what is in flight and leave the store as it is; idempotent."""
        if not self._ends_here():
            return
        self._io.close()
        del self._io, self._file
        self._unlock()

    def _lock(self, directory: Path) -> None:
        try:
            self._share = share_lock(directory / LOCK_NAME)
        except OSError as cause:
            if cause.errno not in NO_LOCKS:
                raise

    def _unlock(self) -> None:
        if self._share is not None:
            unshare_lock(self._share)
            self._share = None


def _open_data(path: Path) -> tuple[int, bool]:
    """Return a descriptor for reading and whether it is open with O_DIRECT."""
    with contextlib.suppress(OSError):
        descriptor = open_regular(path, os.O_RDONLY | os.O_DIRECT)
        # Some file systems refuse the flag at the first transfer only.
        with mmap.mmap(-1, SECTOR_BYTES) as page:
            try:
                os.preadv(descriptor, [page], 0)
                return descriptor, True
            except OSError as cause:
                os.close(descriptor)
                if cause.errno != errno.EINVAL:
                    raise
    return open_regular(path), False
