"""What every kind of path can do: whoever holds a `Place`, a `Folder` or a `Tier` does not ask which kind it is."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from offload._native import CompletionQueue
from offload.errors import CheckpointError
from offload.protocols import Tier
from offload.tiers.common import FileBytes, StoreOptions
from offload.tiers.filesystem import UNLIMITED_BYTES
from offload.tiers.objects import ObjectError

TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished files."""

_MAX_FILE_BYTES = 64 << 30
"""Largest file of a checkpoint: the `extra` of its caller may be large."""
_LARGE = ("manifest-", "extra-", "model-")
"""How the names of such files begin."""
MAX_RECORD_BYTES = 16 << 20
"""Largest of the others, each of which says a few things."""


def limit_bytes(name: str) -> int:
    """Return how large a file of a folder may be, by its name."""
    return _MAX_FILE_BYTES if name.startswith(_LARGE) else MAX_RECORD_BYTES


@contextlib.contextmanager
def saying(verb: str, what: str) -> Iterator[None]:
    """Turn errors of the system or the object store into a `CheckpointError` that says what could not be done."""
    try:
        yield
    except (OSError, ObjectError) as cause:
        raise CheckpointError(f"cannot {verb} {what}: {getattr(cause, 'strerror', None) or cause}") from cause


class Folder(Protocol):
    """Small files: a checkpoint's, or those of a store, of which somebody else may have made anything.

    Every method raises `CheckpointError`, naming the file, if it cannot do its work; those that are about a store may
    raise `OSError`, too. Defaults are those of a folder that has no locks.
    """

    path: str
    """The prefix of a bucket as the user wrote it, or an absolute path without links."""

    label: str
    """What it was called when it was looked for."""

    has_locks: bool = False
    """Whether sessions can lock it."""

    fails_late: bool = False
    """Whether a write that failed may be done later all the same, as by a request whose answer was lost."""

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if there is none of that name."""

    def read_into(self, name: str, pieces: Sequence[memoryview]) -> None:
        """Fill memory from a file, which has as many bytes."""

    def identity(self) -> str:
        """Return what tells this folder from others on its device, copies of it included; "" where nothing does."""

    def write(self, name: str, content: bytes | Iterable[memoryview] | FileBytes, *, begun: str = "") -> None:
        """Make or replace a file; durable when this returns, whole or not there whatever happens meanwhile.

        Where there are locks a file `begun`, if one is named, goes in the same moment in which this one comes.
        """

    def delete(self, name: str) -> None:
        """Delete a file, durably; one that is not there counts as deleted."""

    def names(self) -> list[str]:
        """Return the names of all whole files, sorted."""

    def walk(self) -> list[tuple[str, int]]:
        """Return name and size in bytes of all files below, sorted; names have slashes between their parts."""

    def prepare(self) -> None:
        """Make the folder if it is not there, and find out whether it can be written."""

    # Of a store

    def nbytes(self) -> int:
        """Return the bytes that a store takes."""

    def opened_by(self) -> str:
        """Make sure that a store is this user's; return who may still use it where no lock tells, else ""."""

    def used_by(self) -> int | None:
        """Return the pid of the process that has a store's lock, or None; see `lock_holder`."""
        return None

    def is_read(self, *, own: int = 0) -> bool:
        """Return whether somebody is known to read a store, beside `own` readers in this process."""
        return False

    def take_lock(self) -> int | None:
        """Lock a store whose session has ended, for `release_lock`; None where that cannot be done."""
        return None

    def remove(self) -> None:
        """Delete the files that stores are made of, and the folder; where there are locks, the caller has it."""

    def remove_tree(self) -> None:
        """Delete the folder with all that is below it; a link stays, and is an error."""

    def remove_empty(self) -> bool:
        """Delete a folder that holds nothing, without its lock; return whether it is gone."""
        return False


class Place(Protocol):
    """One path of a storage tier: a directory, or a prefix of a bucket. Defaults: no locks, no limit."""

    path: str
    """As the user wrote it, for messages."""

    name: str
    """As manifests have it: whatever the working directory is."""

    has_locks: bool = False
    """Whether a store's lock tells that somebody uses it. Where nothing tells, no store goes by itself."""

    lock_path: str | None = None
    """The directory whose users take turns; None where nobody does."""

    def check(self, field: str) -> Hashable:
        """Verify that stores can be opened, touching nothing; return what tells this place from others.

        Raises:
            ConfigError: They cannot; names `field`.
        """

    def parts(self) -> tuple[str, ...]:
        """Return the parts of where it lies; those of a place that lies in it begin with them."""

    def room(self) -> tuple[int, int | None]:
        """Return the bytes that may still be written, and the number of the device that other places may share."""
        return UNLIMITED_BYTES, None

    def facts(self) -> dict[str, str]:
        """Return its `path`, `file_system` and `device`, which tell its rates; `ConfigError` if it is not there."""

    def for_rank(self, rank: int, field: str) -> Place:
        """Return the place of one rank in it, made if need be; a `ConfigError` names `field`."""

    def open(self, store: uuid.UUID, queue: CompletionQueue, options: StoreOptions) -> Tier:
        """Open a new store; see `offload.tiers.open_tier`."""

    def open_existing(self, store: uuid.UUID, queue: CompletionQueue) -> Tier:
        """Open a store that is there, for reading only.

        Raises:
            ConfigError: A bucket cannot be used.
            TierError: There is no such store, or it cannot be read.
        """

    def folder(self) -> Folder:
        """Return it as the folder of a checkpoint."""

    def store(self, store: uuid.UUID) -> Folder:
        """Return the folder of a store, whether it is there or not."""

    def stores(self, *, ranks: bool = True) -> Sequence[Folder]:
        """Return the stores that are there by name, with `ranks` those of `rank-<r>` too; errors as of a `Folder`."""

    def search(self, store: uuid.UUID, names: Iterable[str]) -> list[str]:
        """Return which places there are, of these names and of ranks in them, that a store may have been moved to."""
        return []
