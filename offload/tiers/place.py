"""What every kind of path can do: whoever holds a `Place`, a `Folder` or a `Tier` does not ask which kind it is."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from offload._native import CompletionQueue
from offload.errors import CheckpointError
from offload.protocols import Tier
from offload.tiers.common import StoreOptions
from offload.tiers.objects import ObjectError

TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished files."""

_MAX_FILE_BYTES = 64 << 30
"""Largest file of a checkpoint: the `extra` of its caller may be large."""
_LARGE = ("manifest-", "extra-")
"""How the names of such files begin."""
_MAX_RECORD_BYTES = 16 << 20
"""Largest of the others, each of which says a few things."""


def limit_bytes(name: str) -> int:
    """Return how large a file of a folder may be, by its name."""
    return _MAX_FILE_BYTES if name.startswith(_LARGE) else _MAX_RECORD_BYTES


@contextlib.contextmanager
def saying(verb: str, what: str) -> Iterator[None]:
    """Turn errors of the system or the object store into a `CheckpointError` that says what could not be done."""
    try:
        yield
    except (OSError, ObjectError) as cause:
        raise CheckpointError(f"cannot {verb} {what}: {getattr(cause, 'strerror', None) or cause}") from cause


class Folder(Protocol):
    """A place for small files. Every method raises `CheckpointError`, naming the file, if it cannot do its work."""

    path: str
    """The prefix of a bucket as the user wrote it, or an absolute path without links."""

    has_locks: bool
    """Whether sessions can lock it."""

    fails_late: bool
    """Whether a write that failed may be done all the same, later: a request whose answer was lost is on its way."""

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


class StoreFolder(Folder, Protocol):
    """The folder of a store, of which somebody else may have made anything."""

    label: str
    """What it is called where it was looked for."""

    def nbytes(self) -> int:
        """Return the bytes that it takes; `OSError` if it is not there or cannot be read."""

    def opened_by(self) -> str:
        """Return who may still use it, where no lock tells; "" elsewhere.

        Raises:
            CheckpointError: It is not a store of this user's.
            OSError: It cannot be read.
        """

    def used_by(self) -> int | None:
        """Return the pid of the process that has its lock, or None; see `lock_holder`."""

    def is_read(self, *, own: int = 0) -> bool:
        """Return whether somebody reads what checkpoints name in it; False where nobody can tell.

        Args:
            own: Readers in this process that do not count.

        Raises:
            OSError: It cannot be found out.
        """

    def take_lock(self) -> int | None:
        """Lock it, if its session has ended, for `release_lock`; None where that cannot be done."""

    def remove(self) -> None:
        """Delete the files that stores are made of, and it; what a lock guards, the caller has locked.

        Raises:
            OSError: Something is left.
            CheckpointError: Likewise, of a bucket.
        """


class Place(Protocol):
    """One path of a storage tier: a directory, or a prefix of a bucket."""

    path: str
    """As the user wrote it, for messages."""

    name: str
    """As manifests have it: whatever the working directory is."""

    has_locks: bool
    """Whether a store's lock tells that somebody uses it. Where nothing tells, no store goes by itself."""

    @property
    def lock_path(self) -> str | None:
        """The directory whose users take turns; None where nobody does."""

    def check(self, field: str) -> Hashable:
        """Verify that a store can be opened, touching nothing and asking nobody over a network.

        Returns:
            What tells this place from others, however they are written.

        Raises:
            ConfigError: It cannot; names `field`.
        """

    def room(self) -> tuple[int, int | None]:
        """Return the bytes that may still be written, and the number of the device that other places may share."""

    def facts(self) -> dict[str, str]:
        """Return what tells its rates from another's: `path`, `file_system` and `device`.

        Raises:
            OSError: It is not there.
        """

    def for_rank(self, rank: int, field: str) -> Place:
        """Return the place of one rank in it, made if need be.

        Raises:
            ConfigError: It is not there or cannot be written; names `field`.
        """

    def open(self, store: uuid.UUID, queue: CompletionQueue, options: StoreOptions) -> Tier:
        """Open a store; see `offload.tiers.open_tier`."""

    def open_existing(self, store: uuid.UUID, queue: CompletionQueue, *, checksum: bool) -> Tier:
        """Open a store that is there, for reading only; see `offload.tiers.open_existing`."""

    def folder(self) -> Folder:
        """Return it as the folder of a checkpoint."""

    def store(self, store: uuid.UUID) -> StoreFolder:
        """Return the folder of a store, whether it is there or not."""

    def stores(self, *, ranks: bool = True) -> Sequence[StoreFolder]:
        """Return the stores that are there, in order of their names; with `ranks`, also those of `rank-<r>`.

        Raises:
            OSError: It cannot be read.
            CheckpointError: Likewise, of a bucket.
        """

    def search(self, store: uuid.UUID, places: Iterable[Place]) -> list[str]:
        """Return the names of places with a store of that name: it may have been moved there from here."""

    def roots(self) -> list[str]:
        """Return the directories that stores may be in if they were moved here, with those of its ranks."""
