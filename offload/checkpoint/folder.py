"""The folder of a checkpoint: opened by its name, and locked by the session that commits there."""

from __future__ import annotations

import contextlib
import fcntl
import os

from offload.errors import ConfigError
from offload.tiers import parse_place
from offload.tiers.place import Folder


class FolderLock:
    """A lock on a directory: while it is held, no other session commits there or releases a checkpoint there.

    The lock ends with the process, even if forked children live on. Object stores and some network file systems have
    no locks; there it does nothing.
    """

    def __init__(self, folder: Folder) -> None:
        self._path = folder.path
        self._has_locks = folder.has_locks
        self._descriptor = -1

    def acquire(self) -> bool:
        """Try to acquire the lock, without waiting; return False if another session has it.

        True where there are no locks, or the directory is not there.
        """
        if not self._has_locks:
            return True
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                _with_descriptor.add(self)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                self.release()  # the directory was replaced meanwhile, so this lock guards nothing
                return self.acquire()
        except BlockingIOError:
            return False
        except OSError:  # it has gone, or has no locks
            return True
        return True

    def release(self) -> None:
        """Release the lock, if it was acquired."""
        self._close(unlocks=True)

    def _close(self, *, unlocks: bool) -> None:
        """Close the descriptor, if there is one.

        A lock of `flock` is shared with forked children that have the descriptor, and ends when all have closed it.
        With `unlocks` it ends at once for all of them. A child closes its descriptor without that, as the lock is its
        parent's.
        """
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            _with_descriptor.discard(self)
            with contextlib.suppress(OSError):
                if unlocks:
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


_with_descriptor: set[FolderLock] = set()
"""Locks of this process that have a descriptor."""


def _close_in_child() -> None:
    """Close a forked child's copies of the descriptors, which would keep the locks beyond the parent's life."""
    for lock in [*_with_descriptor]:
        lock._close(unlocks=False)


os.register_at_fork(after_in_child=_close_in_child)


def is_name(text: object) -> bool:
    """Return whether a value is text that can name a path: it has no null character, and the system can encode it."""
    try:
        return isinstance(text, str) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Return the folder that a path names: "s3://bucket/prefix", "file://" and a directory, or a directory.

    Raises:
        ConfigError: The name cannot be one, or a bucket's client is not installed.
    """
    name = os.fspath(path)
    if not name or not is_name(name):
        raise ConfigError("path", path, "name a folder, without null bytes, or s3://bucket/prefix")
    return parse_place(name, "path").folder()
