"""Places that slots live in, one small class for each kind, all behind `offload.protocols.Tier`."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from offload._native import CompletionQueue
from offload.errors import ConfigError, TierError
from offload.protocols import Tier
from offload.tiers.asyncfile import AsyncFileTier, supports_direct
from offload.tiers.common import SLOT_HEADER_BYTES, slot_bytes, tier_error
from offload.tiers.directories import check_directories, free_bytes
from offload.tiers.existing import ExistingStore
from offload.tiers.file import DEFAULT_EXTENT_BYTES, IO_BACKENDS, FileTier, choose_io_backend
from offload.tiers.objects import ObjectClient, RetryPolicy, S3Client
from offload.tiers.places import NETWORK_FILE_SYSTEMS, file_system, identity, lock_holder
from offload.tiers.remote import ExistingRemoteStore, RemoteTier
from offload.tiers.turns import TakingTurns, Turns

_log = logging.getLogger("offload")

__all__ = [
    "IO_BACKENDS",
    "NETWORK_FILE_SYSTEMS",
    "SLOT_HEADER_BYTES",
    "AsyncFileTier",
    "ExistingRemoteStore",
    "ExistingStore",
    "FileTier",
    "ObjectClient",
    "RemoteTier",
    "RetryPolicy",
    "S3Client",
    "Turns",
    "check_directories",
    "choose_io_backend",
    "file_system",
    "free_bytes",
    "identity",
    "innermost",
    "lock_holder",
    "open_existing",
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
    extent_bytes: int = DEFAULT_EXTENT_BYTES,
    depth: int | None = None,
    checksum: bool = True,
    turns: Turns | None = None,
    io_backend: str = "auto",
    used_bytes: int | None = None,
) -> Tier:
    """Open a new store on a path, with the class that its scheme asks for.

    Args:
        path: A directory, "file://" and an absolute one, or "s3://bucket/prefix".
        store: The session's store.
        queue: Where completions go; must outlive the tier.
        max_bytes: Most that the store may grow to; None for all there is.
        extent_bytes: What a directory's store grows by; no more than it is expected to need in all.
        depth: Requests in flight for each direction, 1 to `MAX_DEPTH`; None for the tier's default.
        checksum: Compute and verify payload checksums.
        turns: Take turns on the path with other processes (with io_uring or threads only; a warning says where that
            is not so); None for no lock.
        io_backend: How directories are read and written: "io_uring", "threads", "asyncio", or "auto" for the first
            that works, with asyncio for network and parallel file systems without O_DIRECT.
        used_bytes: Take over a store that is there and whose session has ended, the first `used_bytes` of which are
            cut into slots already; with io_uring or threads only.

    Returns:
        The tier; the caller closes it.

    Raises:
        ConfigError: the path or the backend cannot be used; nothing has been created.
        TierError: the store could not be created, or not taken over.
    """
    scheme, separator, rest = path.partition("://")
    if not separator:
        scheme, rest = "file", path
    more: dict[str, Any] = {} if depth is None else {"depth": depth}
    if scheme == "file":
        if io_backend == "asyncio" or (io_backend == "auto" and _wants_asyncio(rest)):
            if used_bytes is not None:
                raise _no_taking_over(path)
            if turns is not None:
                _log.warning("path_lock has no effect on %s: asyncio takes no turns, other backends do", path)
            return AsyncFileTier(rest, store, queue, max_bytes=max_bytes, checksum=checksum, **more)
        reports_to = queue if turns is None else CompletionQueue()
        tier = FileTier(
            rest,
            store,
            reports_to,
            max_bytes=max_bytes,
            extent_bytes=extent_bytes,
            depth=depth,
            checksum=checksum,
            io_backend=io_backend,
            used_bytes=used_bytes,
        )
        if turns is None:
            return tier
        try:
            return TakingTurns(tier, reports_to, queue, turns)
        except BaseException:
            tier.close()
            raise
    if scheme == "s3" and separator:
        if used_bytes is not None:
            raise _no_taking_over(path)
        if turns is not None:
            _log.warning("path_lock has no effect on %s: requests to an object store take no turns", path)
        return RemoteTier(path, store, queue, max_bytes=max_bytes, checksum=checksum, **more)
    raise ConfigError(
        "paths", path, f"there is no kind of path called {scheme!r}; name a directory or s3://bucket/prefix"
    )


def open_existing(path: str, store: uuid.UUID, queue: CompletionQueue, *, checksum: bool = True) -> Tier:
    """Open a store that is there, for reading only.

    Args:
        path: The directory or "s3://bucket/prefix" that it lies in.
        store: The store.
        queue: Where completions go; must outlive the tier.
        checksum: Verify payload checksums.

    Raises:
        ConfigError: A bucket cannot be used.
        TierError: There is no such store, or it cannot be read.
    """
    if path.startswith("s3://"):
        return ExistingRemoteStore(path, store, queue, checksum=checksum)
    return ExistingStore(path.removeprefix("file://"), store, queue, checksum=checksum)


def _no_taking_over(path: str) -> TierError:
    detail = "stores are taken over on local file systems only"
    return TierError("take over", tier="storage", path=path, detail=detail)


def innermost(tier: Tier) -> Tier:
    """Return the tier that does the work under those that watch, slow down or spoil it."""
    while (inner := getattr(tier, "inner", None)) is not None:
        tier = inner
    return tier


def _wants_asyncio(directory: str) -> bool:
    """Return whether a directory is on a network or parallel file system that has no O_DIRECT."""
    try:
        return file_system(directory) in NETWORK_FILE_SYSTEMS and not supports_direct(directory)
    except OSError:
        return False  # opening it says what is wrong
