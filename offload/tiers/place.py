"""What every kind of path can do: users of a `Place`, a `Folder` or a `Tier` need not know which kind it is."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from offload._native import CompletionQueue
from offload.errors import CheckpointError
from offload.protocols import Tier
from offload.tiers.common import FileBytes, StoreOptions
from offload.tiers.filesystem import UNLIMITED_BYTES, LockFile
from offload.tiers.objects import ObjectError

TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished files."""

_MAX_LARGE_FILE_BYTES = 64 << 30
"""Largest file of a checkpoint that may be large, such as `extra`, whose content is its caller's."""
_LARGE_FILE_PREFIXES = ("manifest-", "extra-")
MAX_RECORD_BYTES = 16 << 20
"""Largest of the other files, which hold small records."""


def limit_bytes(name: str) -> int:
    """Return the greatest size at which a file of this name is read: another user may have made it."""
    return _MAX_LARGE_FILE_BYTES if name.startswith(_LARGE_FILE_PREFIXES) else MAX_RECORD_BYTES


@contextlib.contextmanager
def raising_checkpoint_error(verb: str, what: str) -> Iterator[None]:
    """Turn errors of the system or object store within this context into `CheckpointError("cannot verb what")`."""
    try:
        yield
    except (OSError, ObjectError) as cause:
        raise CheckpointError(f"cannot {verb} {what}: {getattr(cause, 'strerror', None) or cause}") from cause


class Folder(Protocol):
    """The small files of a checkpoint or a store; another user may have made them, so nothing in them is trusted.

    Every method raises `CheckpointError`, naming the file, if it cannot do its work; those of a store may raise
    `OSError`, too. Defaults are those of a folder without locks.
    """

    path: str
    """The prefix of a bucket as the user wrote it, or an absolute path without links."""

    label: str
    """Its name as it was given, for messages."""

    has_locks: bool = False
    """Whether sessions can lock it."""

    fails_late: bool = False
    """Whether a write that failed may still take effect later, as a request whose answer was lost may."""

    def hasten(self) -> None:
        """Give up sooner from now on where a bucket does not answer: somebody waits, and can do without."""
        return None

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if there is none of that name."""

    def read_into(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Fill memory from a file of exactly that size."""

    def content(self, name: str, scratch: str | None) -> contextlib.AbstractContextManager[FileBytes]:
        """Open a file whose content may be larger than memory.

        A bucket's object is brought to a temporary file first, in the directory `scratch`, or in `TMPDIR`.
        """

    def identity(self) -> str:
        """Return a text that no other folder on the device has, not even a copy of this one; "" if there is none."""

    def write(self, name: str, content: bytes | Iterable[memoryview] | FileBytes, *, begun: str = "") -> None:
        """Make or replace a file, durably and atomically.

        In a folder with locks the temporary file is called `begun`, if that is given: it is there until, in one
        atomic step, the new file replaces it.
        """

    def delete(self, name: str) -> None:
        """Delete a file, durably; one that is not there counts as deleted."""

    def names(self) -> list[str]:
        """Return the names of all whole files, sorted."""

    def walk(self) -> list[tuple[str, int]]:
        """Return name and size in bytes of all files below, sorted; names have slashes between their parts."""

    def prepare(self) -> None:
        """Make the folder if it does not exist, and check by a trial file that it can be written."""

    # Of a store

    def nbytes(self) -> int:
        """Return the bytes that a store takes."""

    def opened_by(self) -> str:
        """Check that a store is this user's; return who may still use it, if it has no lock.

        "" says that nobody does, or that the store's lock tells (`used_by`).
        """

    def used_by(self) -> int | None:
        """Return the pid of the process that has a store's lock, or None; see `lock_holder`."""
        return None

    def is_read(self, *, own: int = 0) -> bool:
        """Return whether a store is known to have readers other than `own` ones of this process."""
        return False

    def acquire_lock(self) -> LockFile | None:
        """Lock a store whose session has ended; return the lock for `release_lock`, None if that fails."""
        return None

    def remove(self) -> None:
        """Delete a store's files and its folder; where stores have locks, the caller has this store's lock."""

    def remove_tree(self) -> None:
        """Delete the folder with everything below it; raise if it is a link."""

    def remove_empty(self) -> bool:
        """Delete the folder, without a lock, if it is empty; return whether it was deleted."""
        return False


class Place(Protocol):
    """One path of a storage tier: a directory, or a prefix of a bucket. Defaults: no locks, no limit."""

    path: str
    """As the user wrote it, for messages."""

    name: str
    """The path in manifests, which does not depend on the working directory."""

    has_locks: bool = False
    """Whether a store's lock tells that it is used. Where nothing tells, only a person deletes stores."""

    lock_path: str | None = None
    """The directory whose users take turns; None if nobody does."""

    def check(self, field: str) -> Hashable:
        """Check, without touching anything, that stores can be opened; return what identifies this place.

        Raises:
            ConfigError: They cannot be opened; names `field`.
        """

    def parts(self) -> tuple[str, ...]:
        """Return the components of the full path; a place lies within another if its parts begin with the other's."""

    def room(self) -> tuple[int, int | None]:
        """Return the bytes that may still be written, and the device's number (None: shared with no other place)."""
        return UNLIMITED_BYTES, None

    def facts(self) -> dict[str, str]:
        """Return `path`, `file_system` and `device`, by which rates are found; `ConfigError` if it does not exist."""

    def for_rank(self, rank: int, field: str) -> Place:
        """Return the place for one rank within this one, made if need be; a `ConfigError` names `field`."""

    def open(self, store: uuid.UUID, queue: CompletionQueue, options: StoreOptions) -> Tier:
        """Open a new store; see `offload.tiers.open_tier`."""

    def open_existing(self, store: uuid.UUID, queue: CompletionQueue) -> Tier:
        """Open an existing store, for reading only.

        Raises:
            ConfigError: A bucket cannot be used.
            TierError: There is no such store, or it cannot be read.
        """

    def folder(self) -> Folder:
        """Return this place as the folder of a checkpoint."""

    def store(self, store: uuid.UUID) -> Folder:
        """Return the folder of a store, which need not exist."""

    def stores(self, *, ranks: bool = True) -> Sequence[Folder]:
        """Return the existing stores by name, with `ranks` also those in `rank-<r>`; raises as a `Folder` does."""

    def search(self, store: uuid.UUID, names: Iterable[str]) -> list[str]:
        """Return the paths that have a store of this uuid; here none.

        Those of `names` are looked at, and the ranks' folders beside or in them.
        """
        return []
