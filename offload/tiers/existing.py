"""A store in a directory that another session has left, or uses: for reading only."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import uuid
from pathlib import Path

from offload._native import CompletionQueue, IoThreads, StoreFile
from offload.errors import invariant
from offload.protocols import SECTOR_BYTES, TileRequest
from offload.tiers.common import Owned
from offload.tiers.file import DEFAULT_PIECE_BYTES, FileTier
from offload.tiers.filesystem import LOCK_NAME, open_regular, share_lock, unshare_lock
from offload.tiers.store import DATA_NAME, NO_LOCKS, Store

DEPTH = 4


class ExistingStore(FileTier):
    """Slots of another session's store; nothing is made, changed or deleted.

    While it is open, and where the file system has locks, the store's `lock` says that somebody reads it, so that no
    session lets go of what checkpoints name there.

    Args:
        path: The directory that the store lies in.
        store: The store.
        queue: Where completions go; must outlive the tier.
        checksum: Verify payload checksums.

    Raises:
        TierError: There is no such store, or it cannot be read.
    """

    cached = False

    def __init__(self, path: str, store: uuid.UUID, queue: CompletionQueue, *, checksum: bool = True) -> None:
        Owned.__init__(self, path)
        self.depth = DEPTH
        with self.answering_for("open"), contextlib.ExitStack() as undo:
            self._place = _Shared(Path(os.path.abspath(path)) / f"offload-{store}")
            undo.callback(self._place.close)
            self.store_path, self.data_path = self._place.directory, self._place.data_path
            descriptor, self.direct = _open_data(self.data_path)
            self._file = StoreFile(descriptor, self.direct, store.bytes)
            self._engine = IoThreads(queue, DEPTH, DEFAULT_PIECE_BYTES, checksum)
            undo.pop_all()

    def write(self, request: TileRequest) -> None:
        """Not possible."""
        invariant(False, "a store of another session is written to")

    def free_bytes(self) -> int:
        """Return 0."""
        return 0


class _Shared(Store):
    """A store of another session, which is said to be read until `close`."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.data_path = directory, directory / DATA_NAME
        self._share: int | None = None
        with contextlib.suppress(FileNotFoundError):  # a copy has no lock where nobody may write
            try:
                self._share = share_lock(directory / LOCK_NAME)
            except OSError as cause:
                if cause.errno not in NO_LOCKS:
                    raise

    def close(self, *, keep: bool = True) -> None:
        """Read it no more."""
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
