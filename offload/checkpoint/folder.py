"""Where a checkpoint's own files lie: a directory, or a prefix of a bucket. Small files, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from offload.errors import CheckpointError, ConfigError
from offload.tiers.objects import HASTY, ObjectError, ObjectMissingError, S3Client, split_url
from offload.tiers.places import read_regular, replacing, sync_directory

TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished files."""

MAX_FILE_BYTES = 64 << 30
"""Largest file of a checkpoint: the `extra` of its caller may be large."""
LARGE = ("manifest-", "extra-")
"""How the names of such files begin."""
MAX_RECORD_BYTES = 16 << 20
"""Largest of the others, each of which says a few things."""


class Folder(Protocol):
    """A place for small files. Every method raises `CheckpointError`, naming the file, if it cannot do its work."""

    path: str
    """The prefix of a bucket as the user wrote it, or an absolute path without links."""

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if there is none of that name."""

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file; durable when this returns, whole or not there whatever happens meanwhile."""

    def delete(self, name: str) -> None:
        """Delete a file, durably; one that is not there counts as deleted."""

    def names(self) -> list[str]:
        """Return the names of all whole files, sorted."""

    def prepare(self) -> None:
        """Make the folder if it is not there, and find out whether it can be written."""


@contextlib.contextmanager
def _saying(verb: str, what: str) -> Iterator[None]:
    """Turn errors of the system or the object store into a `CheckpointError` that says what could not be done."""
    try:
        yield
    except (OSError, ObjectError) as cause:
        raise CheckpointError(f"cannot {verb} {what}: {getattr(cause, 'strerror', None) or cause}") from cause


class DirectoryFolder:
    """A folder on a file system.

    Args:
        path: Where it is; made absolute and free of links, which may point elsewhere tomorrow.
        follow: Whether its last name, and its files, may be links.
    """

    def __init__(self, path: str, *, follow: bool = True) -> None:
        if follow:
            self.path = os.path.realpath(path)
        else:
            parent, name = os.path.split(os.path.abspath(path))
            self.path = os.path.join(os.path.realpath(parent), name)
        self._follow = follow
        self._root = Path(self.path)

    def read(self, name: str) -> bytes | None:
        """See `Folder.read`."""
        what = os.path.join(self.path, name)
        try:
            with _saying("read", what), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                limit_bytes = MAX_FILE_BYTES if name.startswith(LARGE) else MAX_RECORD_BYTES
                return read_regular(self._root / name, limit_bytes, follow=self._follow)
        except MemoryError as cause:
            raise CheckpointError(f"cannot read {what}: it is larger than memory") from cause
        return None

    def write(self, name: str, content: bytes) -> None:
        """See `Folder.write`."""
        temporary = f"{TEMPORARY}{uuid.uuid4().hex}"
        with _saying("write", os.path.join(self.path, name)), replacing(self._root / name, temporary) as file:
            file.write(content)

    def delete(self, name: str) -> None:
        """See `Folder.delete`."""
        with _saying("delete", os.path.join(self.path, name)), contextlib.suppress(FileNotFoundError):
            (self._root / name).unlink()
            sync_directory(self._root)

    def names(self) -> list[str]:
        """See `Folder.names`."""
        with _saying("list", f"{self.path}/"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(name for name in os.listdir(self._root) if not name.startswith(TEMPORARY))
        return []

    def prepare(self) -> None:
        """See `Folder.prepare`."""
        with _saying("use", f"{self.path}/"):
            self._root.mkdir(parents=True, exist_ok=True)
            trial = self._root / f"{TEMPORARY}{uuid.uuid4().hex}"
            trial.write_bytes(b"")
            trial.unlink()
            # The names of parent folders that were made have to last too.
            for directory in (self._root, *list(self._root.parents)[:2]):
                with contextlib.suppress(PermissionError):
                    sync_directory(directory)


class BucketFolder:
    """A checkpoint's folder in an object store: an object is whole or not there by nature."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        bucket, prefix = split_url(path, "checkpoint")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = S3Client(path, bucket, retry=HASTY)

    def read(self, name: str) -> bytes | None:
        """See `Folder.read`."""
        key = self._prefix + name
        with _saying("read", f"{self.path}/{name}"), contextlib.suppress(ObjectMissingError):
            nbytes = self._client.head(key)
            if nbytes is None:
                return None
            if nbytes > (MAX_FILE_BYTES if name.startswith(LARGE) else MAX_RECORD_BYTES):
                raise CheckpointError(f"cannot read {self.path}/{name}: it has {nbytes} bytes")
            content = bytearray(nbytes)
            if nbytes and self._client.get_into(key, [memoryview(content)]) != nbytes:
                raise CheckpointError(f"{self.path}/{name} changed while it was read; try again")
            return bytes(content)
        return None

    def write(self, name: str, content: bytes) -> None:
        """See `Folder.write`."""
        with _saying("write", f"{self.path}/{name}"):
            self._client.put(self._prefix + name, [memoryview(content)])

    def delete(self, name: str) -> None:
        """See `Folder.delete`."""
        with _saying("delete", f"{self.path}/{name}"):
            self._client.delete([self._prefix + name])

    def names(self) -> list[str]:
        """See `Folder.names`."""
        with _saying("list", f"{self.path}/"):
            keys = self._client.list(self._prefix)
        names = (key.removeprefix(self._prefix) for key in keys)
        return sorted(name for name in names if "/" not in name)

    def walk(self) -> list[tuple[str, int]]:
        """Return name and size of all objects below, sorted."""
        with _saying("list", f"{self.path}/"):
            found = self._client.sizes(self._prefix)
        return sorted((key.removeprefix(self._prefix), nbytes) for key, nbytes in found.items())

    def delete_all(self) -> None:
        """Delete all objects below.

        Descriptions (*.json) go last, so that an interrupted delete can be recognised and finished.
        """
        with _saying("delete", f"{self.path}/"):
            keys = self._client.list(self._prefix)
            described = [key for key in keys if key.endswith(".json")]
            self._client.delete([key for key in keys if key not in described])
            self._client.delete(described)

    def prepare(self) -> None:
        """See `Folder.prepare`."""
        name = f"{TEMPORARY}{uuid.uuid4().hex}"
        self.write(name, b"trial")
        self.delete(name)


class FolderLock:
    """A lock on a directory: while it is held, no other session commits there or releases a checkpoint there.

    It ends with the process, even if forked children live on. Object stores and some network file systems have no
    locks; there it does nothing.
    """

    def __init__(self, folder: Folder) -> None:
        self._path = folder.path
        self._descriptor = -1

    def take(self) -> bool:
        """Take the lock; return False if somebody else has it, and True where there are no locks."""
        if self._path.startswith("s3://"):
            return True
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                _held.add(self)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._descriptor), os.stat(self._path)):
                self.drop()  # of a directory that was replaced meanwhile, and its holder's lock with it
                return self.take()
        except BlockingIOError:
            return False
        except OSError:  # it has gone, or has no locks
            return True
        return True

    def drop(self) -> None:
        """Give the lock back, if it is held."""
        self._close(unlocks=True)

    def _close(self, *, unlocks: bool) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            _held.discard(self)
            with contextlib.suppress(OSError):
                if unlocks:  # a child that is just being forked may have the descriptor, too
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


_held: set[FolderLock] = set()
"""Locks of this process that have a descriptor."""


def _let_go() -> None:
    """Close, in a forked child, the descriptors that would keep the locks beyond its parent's life."""
    for lock in [*_held]:
        lock._close(unlocks=False)


os.register_at_fork(after_in_child=_let_go)


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Return the folder that a path names: "s3://bucket/prefix", "file://" and a directory, or a directory.

    Raises:
        ConfigError: The name cannot be one, or a bucket's client is not installed.
    """
    name = os.fspath(path)
    try:
        known = isinstance(name, str) and name != "" and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        known = False
    if not known:
        raise ConfigError("path", path, "name a folder, without null bytes, or s3://bucket/prefix")
    if name.startswith("s3://"):
        return BucketFolder(name)
    return DirectoryFolder(name.removeprefix("file://"))
