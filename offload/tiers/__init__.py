"""Storage tiers: each path, a directory or a prefix of a bucket, is opened as an `offload.protocols.Tier`.

A path is parsed to a `Place`, which knows of which kind the path is, and opens its tiers, stores and folders.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Hashable, Sequence

from offload._native import CompletionQueue
from offload.errors import ConfigError
from offload.protocols import Tier
from offload.tiers.buckets import Bucket
from offload.tiers.common import DEFAULTS, SLOT_HEADER_BYTES, StoreOptions, Turns, slot_bytes, tier_error
from offload.tiers.directories import Directory
from offload.tiers.file import FileTier
from offload.tiers.filesystem import file_system, identity, lock_holder
from offload.tiers.objects import RetryPolicy, S3Client
from offload.tiers.place import Place
from offload.tiers.remote import RemoteTier

_log = logging.getLogger("offload")

__all__ = [
    "SLOT_HEADER_BYTES",
    "FileTier",
    "Place",
    "RemoteTier",
    "RetryPolicy",
    "S3Client",
    "StoreOptions",
    "Turns",
    "check_places",
    "file_system",
    "free_bytes",
    "identity",
    "innermost",
    "lock_holder",
    "open_tier",
    "parse_place",
    "slot_bytes",
    "tier_error",
]


_SCHEME = re.compile(r"([^/]*)://")
_CUT_SCHEME = re.compile(r"(file|s3):/(?!/)")
"""A scheme that has lost a slash, as in "s3:/bucket": `pathlib.Path` makes one slash of two."""

PLACES: dict[str, Callable[[str, str], Place]] = {"file": Directory, "s3": Bucket}
"""Classes of places by the scheme of a path; each takes the path, and the setting's name for errors."""


def parse_place(path: str, field: str = "paths") -> Place:
    """Return the place that a path names: a directory, "file://" and a directory, or "s3://bucket/prefix".

    Raises:
        ConfigError: The scheme is unknown or has lost a slash, or the path cannot be the name of a bucket; names
            `field`.
    """
    if (cut_scheme := _CUT_SCHEME.match(path)) is not None:
        advice = f"a pathlib.Path cannot hold {cut_scheme[1]}://: give text (of a directory of this name: ./{path})"
        raise ConfigError(field, path, advice)
    match = _SCHEME.match(path)
    scheme = "file" if match is None else match[1]
    if scheme not in PLACES:
        advice = f"there is no kind of path called {scheme!r}; name a directory or s3://bucket/prefix"
        raise ConfigError(field, path, advice)
    return PLACES[scheme](path, field)


def check_places(paths: Sequence[str]) -> None:
    """Check that stores can be opened on `paths`, without touching anything and without network requests.

    Raises:
        ConfigError: If a directory does not exist, is not one, or cannot be written, if a bucket's name cannot be one
            or the client for it is not installed, or if a path is there twice.
    """
    seen: dict[Hashable, str] = {}  # paths by what identifies their places
    for number, path in enumerate(paths):
        field = f"paths[{number}]"
        identity_of_place = parse_place(path, field).check(field)
        if identity_of_place in seen:
            raise ConfigError(field, path, f"it is the same place as {seen[identity_of_place]}; name each one once")
        seen[identity_of_place] = path


def free_bytes(paths: Sequence[str]) -> list[int]:
    """Return, for each path, the bytes that this process may still write there.

    Directories on one device share its free space evenly; a warning names the device, as such paths are no faster
    than one. An object store has no limit, nor has a file system that does not say how large it is.
    """
    # For each path: bytes, and the number of its device, None if no other path can share it.
    rooms_and_devices = [parse_place(path).room() for path in paths]
    devices = [device for _, device in rooms_and_devices]
    for device in dict.fromkeys(devices):
        if device is not None and devices.count(device) > 1:
            names = ", ".join(path for path, its_device in zip(paths, devices, strict=True) if its_device == device)
            numbers = os.major(device), os.minor(device)
            _log.warning("%s are on one device (%d:%d): together they are no faster than one", names, *numbers)
    return [room if device is None else room // devices.count(device) for room, device in rooms_and_devices]


def open_tier(path: str, store: uuid.UUID, queue: CompletionQueue, *, options: StoreOptions = DEFAULTS) -> Tier:
    """Open a new store on a path (see `parse_place`); the caller closes the tier, and the queue outlives it.

    Raises:
        ConfigError: The path or the backend cannot be used; nothing has been created.
        TierError: The store could not be created, or not taken over.
    """
    return parse_place(path).open(store, queue, options)


def innermost(tier: Tier) -> Tier:
    """Return the tier that does the I/O, without the tiers that wrap it (to take turns, or in tests)."""
    while (inner := getattr(tier, "inner", None)) is not None:
        tier = inner
    return tier
