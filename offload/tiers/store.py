"""The directory of a store: made, locked and described when a session opens it, deleted when it closes."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import socket
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.processes import Process
from offload.tiers.filesystem import LOCK_NAME, PINS_NAME, hold_lock, release_lock, replacing, sync_directory
from offload.tiers.place import TEMPORARY

DATA_NAME = "tiles"
RECORD_NAME = "store.json"
STORE_FORMAT = 1

STORE_NAME = re.compile(r"offload-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
READER_NAME = "reader-"
"""How the names of notes begin, in a store that has no lock, of sessions that read it."""

RANK_NAME = re.compile(r"rank-\d+")
"""What a rank's own directory, or prefix, on a path is called."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_log = logging.getLogger("offload")


class Store:
    """What a session owns of a path: `<path>/offload-<uuid>/`, with a description in `store.json`.

    Where the file system has locks, `lock` in it is held by this process until `close`. Nothing that was there
    before is touched.

    Args:
        path: An existing, writable directory.
        store: The store's name.
        existing: Take a store over whose session has ended; it is left in place whatever happens.

    Attributes:
        directory: The store's directory; does not depend on the working directory.
        data_path: Where the slots go; not made here.

    Raises:
        ConfigError: `path` is not such a directory.
        OSError: The store could not be made, and what had been made is gone again; or, with `existing`, it is not
            there, in use, or on a file system without locks.
    """

    def __init__(self, path: str, store: uuid.UUID, *, existing: bool = False) -> None:
        check_directory(path)
        self.directory = Path(os.path.abspath(path)) / f"offload-{store}"
        self.data_path = self.directory / DATA_NAME
        self._lock: int | None = None
        if existing:
            self._lock = hold_lock(self.directory / LOCK_NAME, existing=True)
            self._identity = _identity(os.stat(self.directory))
            return
        self.directory.mkdir(mode=0o700)
        try:
            while not self._settle(path):
                self.directory.mkdir(mode=0o700, exist_ok=True)
            # Whole or not there: a record that cannot be read would keep the store of a killed session for good.
            with replacing(self.directory / RECORD_NAME, f"{TEMPORARY}{RECORD_NAME}") as file:
                file.write(json.dumps(describe_store(store)).encode())
            if self._lock is None:  # last, as an empty directory is anybody's to delete
                self._delete(LOCK_NAME)
            sync_directory(self.directory.parent)
        except BaseException:
            self.close()
            raise

    def close(self, *, keep: bool = False) -> None:
        """Give the lock up and, unless `keep`, delete what was made here and nothing else."""
        try:
            if not keep:
                self._delete(DATA_NAME, RECORD_NAME, PINS_NAME)
        finally:
            if self._lock is not None:
                release_lock(self._lock)
                self._lock = None
        if not keep:
            # Last, because network file systems keep a file that is open under another name when it is deleted.
            self._delete(LOCK_NAME, directory=True)

    def _settle(self, path: str) -> bool:
        """Lock the new directory, which looks like a leftover until then; return whether nobody has deleted it."""
        try:
            self._identity = _identity(os.stat(self.directory, follow_symlinks=False))
            self._lock = hold_lock(self.directory / LOCK_NAME)
        except OSError as cause:
            if cause.errno in (errno.ENOENT, errno.ESTALE):
                return False
            if cause.errno not in NO_LOCKS:
                raise
            _log.warning("%s: the file system has no locks (%s)", path, cause.strerror)
        return True

    def _delete(self, *names: str, directory: bool = False) -> None:
        try:
            with StoreDirectory(self.directory) as files:
                if files.identity != self._identity:
                    raise OSError(errno.ESTALE, "another directory has its name now")
                files.delete(names)
                if directory:
                    files.remove()
        except FileNotFoundError:
            pass
        except OSError as cause:
            _log.warning("left %s in place: %s", self.directory, cause.strerror)


class StoreDirectory:
    """The directory of a store, held open: what is deleted lies in it, whatever its name means by then.

    A context manager. Links are not followed: neither one in the place of the directory nor one in it.

    Args:
        directory: `<path>/offload-<uuid>`.

    Attributes:
        identity: (st_dev, st_ino).

    Raises:
        OSError: It is not there, is a link, or cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self.identity = _identity(os.fstat(self._descriptor))

    def __enter__(self) -> StoreDirectory:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def files(self) -> dict[str, os.stat_result]:
        """Return what it holds."""
        found = {}
        for name in sorted(os.listdir(self._descriptor)):
            with contextlib.suppress(FileNotFoundError):
                found[name] = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        return found

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; one that is not there counts as deleted."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._descriptor)

    def remove(self) -> None:
        """Delete the directory, which has to be empty."""
        os.rmdir(self._directory)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def describe_store(store: uuid.UUID) -> dict[str, str | int]:
    """Return what a store's record says: format, uuid, and who opened it."""
    return {"format": STORE_FORMAT, "uuid": str(store), "pid": os.getpid(), "host": socket.gethostname()}


def describe_user() -> dict[str, Any]:
    """Return what says who uses a store that has no lock, so that others on this machine see when that has ended."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "process": Process.this()}


def check_directory(path: str) -> None:
    """Make sure that `path` is a directory that files can be made in; leaves nothing behind.

    Raises:
        ConfigError: it is not; names the field "paths".
    """
    if not os.path.exists(path):
        raise ConfigError("paths", path, "there is no such directory: create it, or name one that exists")
    if not os.path.isdir(path):
        raise ConfigError("paths", path, "it is not a directory: name a directory")
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as cause:
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # writable but full: free_bytes() says so, in bytes
        reason = cause.strerror or str(cause)
        raise ConfigError(
            "paths", path, f"no file can be made there ({reason}): make it writable, or name another"
        ) from cause
