"""Places that slots live in, one small class for each kind, all behind `offload.protocols.Tier`."""

from __future__ import annotations

import uuid

from offload._native import CompletionQueue
from offload.errors import ConfigError
from offload.protocols import Tier
from offload.tiers.common import SLOT_HEADER_BYTES, slot_bytes, tier_error
from offload.tiers.directories import check_directories, directory_free_bytes
from offload.tiers.faulty import Fault, FaultKind, FaultyTier
from offload.tiers.file import DEFAULT_THREADS, IO_BACKENDS, FileTier, choose_io_backend
from offload.tiers.memory import MemoryTier
from offload.tiers.places import NETWORK_FILE_SYSTEMS, file_system, identity, lock_holder
from offload.tiers.throttled import ThrottledTier
from offload.tiers.turns import Turns

__all__ = [
    "IO_BACKENDS",
    "NETWORK_FILE_SYSTEMS",
    "SLOT_HEADER_BYTES",
    "Fault",
    "FaultKind",
    "FaultyTier",
    "FileTier",
    "MemoryTier",
    "ThrottledTier",
    "Turns",
    "check_directories",
    "choose_io_backend",
    "directory_free_bytes",
    "file_system",
    "identity",
    "lock_holder",
    "open_tier",
    "slot_bytes",
    "tier_error",
]


def open_tier(
    path: str,
    store: uuid.UUID,
    queue: CompletionQueue,
    *,
    max_bytes: int | None = None,
    threads: int | None = None,
    checksum: bool = True,
    turns: Turns | None = None,
    io_backend: str = "auto",
) -> Tier:
    """Open a new store on a path, with the class that its scheme asks for.

    Args:
        path: A directory, or "file://" and an absolute one.
        store: The session's store.
        queue: Where completions go; must outlive the tier.
        max_bytes: Most that the store may grow to; None for all there is.
        threads: Threads for each direction, where threads do it; None for the tier's default.
        checksum: Compute and verify payload checksums.
        turns: Take turns on the path with other processes; None for no lock.
        io_backend: How directories are read and written: "auto", "io_uring" or "threads".

    Returns:
        The tier; the caller closes it.

    Raises:
        ConfigError: the path or the backend cannot be used; nothing has been created.
        TierError: the store could not be created.
    """
    scheme, separator, rest = path.partition("://")
    if not separator:
        scheme, rest = "file", path
    if scheme == "file":
        return FileTier(
            rest,
            store,
            queue,
            max_bytes=max_bytes,
            threads=DEFAULT_THREADS if threads is None else threads,
            checksum=checksum,
            io_backend=io_backend,
            turns=turns,
        )
    if scheme == "s3":
        raise ConfigError("paths", path, "object stores are not supported in this version; name a directory")
    raise ConfigError("paths", path, f"there is no kind of path called {scheme!r}; name a directory")
