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
from offload.tiers.filesystem import (
    LOCK_NAME,
    PINS_NAME,
    LockFile,
    hold_lock,
    release_lock,
    replacing,
    sync_directory,
)
from offload.tiers.place import TEMPORARY

DATA_NAME = "tiles"
RECORD_NAME = "store.json"
STORE_FORMAT = 1

STORE_NAME = re.compile(r"offload-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
READER_NAME = "reader-"
"""Prefix of the files in a store without a lock by which sessions note that they read it."""

RANK_NAME = re.compile(r"rank-\d+")
"""Name of a rank's own directory, or prefix, on a path."""

NO_LOCK_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
"""System errors that mean that a file system has no locks."""

_log = logging.getLogger("offload")


class Store:
    """A session's directory on a path: `<path>/offload-<uuid>/`, with a description in `store.json`.

    If the file system has locks, this process holds `lock` in it until `close`. No other file of the path is touched.

    Args:
        path: An existing, writable directory.
        store: The store's name.
        existing: Take over an existing store whose session has ended; it is never deleted here.

    Attributes:
        directory: The store's directory, as an absolute path.
        data_path: The file for the slots; not made here.

    Raises:
        ConfigError: `path` is not such a directory.
        OSError: The store could not be made, and what had been made is deleted again; or, with `existing`, it does
            not exist, is in use, or is on a file system without locks.
    """

    def __init__(self, path: str, store: uuid.UUID, *, existing: bool = False) -> None:
        check_directory(path)
        self.directory = Path(os.path.abspath(path)) / f"offload-{store}"
        self.data_path = self.directory / DATA_NAME
        self._lock: LockFile | None = None  # None if the file system has no locks
        if existing:
            self._lock = hold_lock(self.directory / LOCK_NAME, existing=True)
            self._identity = _identity(os.stat(self.directory))
            return
        self.directory.mkdir(mode=0o700)
        try:
            while not self._lock_new(path):  # another process has deleted it: make it again
                self.directory.mkdir(mode=0o700, exist_ok=True)  # it is there if its lock file alone was deleted
            # Written atomically: with a damaged record the store of a killed session would never be deleted.
            with replacing(self.directory / RECORD_NAME, f"{TEMPORARY}{RECORD_NAME}") as file:
                file.write(json.dumps(describe_store(store)).encode())
            # Without locks no lock file stays. Late, as anybody may delete a directory that is empty and unlocked.
            if self._lock is None:
                self._delete(LOCK_NAME)
            sync_directory(self.directory.parent)
        except BaseException:
            self.close()
            raise

    def close(self, *, keep: bool = False) -> None:
        """Give the lock up and, unless `keep`, delete the files that were made here and the directory."""
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

    def _lock_new(self, path: str) -> bool:
        """Lock the new directory, if the file system has locks; return whether the directory is still there.

        The directory's identity is noted, for `_delete`. Before the directory is locked, another process may take it
        for a leftover and delete it.
        """
        try:
            self._identity = _identity(os.stat(self.directory, follow_symlinks=False))
            self._lock = hold_lock(self.directory / LOCK_NAME)
        except OSError as cause:
            if cause.errno in (errno.ENOENT, errno.ESTALE):  # it is gone; NFS may say so by ESTALE
                return False
            if cause.errno not in NO_LOCK_ERRNOS:
                raise
            _log.warning("%s: the file system has no locks (%s)", path, cause.strerror)
        return True

    def _delete(self, *names: str, directory: bool = False) -> None:
        """Delete files of the store, and then, with `directory`, its directory.

        Nothing is deleted if another directory has its name by now. A failure is logged: the store is left in place.
        """
        try:
            with StoreDirectory(self.directory) as files:
                if files.identity != self._identity:
                    raise OSError(errno.ESTALE, "another directory has its name now")
                files.delete(names)
                if directory:
                    files.remove()
        except FileNotFoundError:
            pass  # the directory has been deleted already
        except OSError as cause:
            _log.warning("left %s in place: %s", self.directory, cause.strerror)


class StoreDirectory:
    """The directory of a store, kept open: files are deleted in this directory, even if its name means another one.

    A context manager. Links are not followed, neither to the directory nor in it.

    Attributes:
        identity: (st_dev, st_ino).

    Raises:
        OSError: The directory does not exist, is a link, or cannot be opened.
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
        """Return the status of each file in the directory, by name."""
        status_by_name = {}
        for name in sorted(os.listdir(self._descriptor)):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                status_by_name[name] = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        return status_by_name

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; one that is not there counts as deleted."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._descriptor)

    def remove(self) -> None:
        """Delete the directory, which has to be empty."""
        os.rmdir(self._directory)


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Return what identifies a directory: (st_dev, st_ino)."""
    return status.st_dev, status.st_ino


def describe_store(store: uuid.UUID) -> dict[str, str | int]:
    """Return the content of a store's record: format, uuid, and the process that has opened it."""
    return {"format": STORE_FORMAT, "uuid": str(store), "pid": os.getpid(), "host": socket.gethostname()}


def describe_user() -> dict[str, Any]:
    """Return a note that this process uses a store without locks, from which others can tell when it has ended."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "process": Process.this()}


def check_directory(path: str) -> None:
    """Check that `path` is a directory in which files can be made; nothing is left behind.

    Raises:
        ConfigError: It is not; names the field "paths".
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
            return  # it can be written, but is full: `free_bytes` will say that
        reason = cause.strerror or str(cause)
        raise ConfigError(
            "paths", path, f"no file can be made there ({reason}): make it writable, or name another"
        ) from cause
