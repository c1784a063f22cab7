"""Looking at paths before anything is opened on them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from offload.errors import ConfigError
from offload.tiers.objects import import_botocore, split_url
from offload.tiers.places import UNLIMITED_BYTES, identity, room_bytes

log = logging.getLogger("offload")


def check_directories(paths: Sequence[str]) -> None:
    """Verify that stores can be opened on `paths`; nothing is touched and nobody is asked over a network.

    Raises:
        ConfigError: If a directory does not exist, is not one, or cannot be written, if a bucket's name cannot be one
            or the client for it is not installed, or if a path is there twice.
    """
    seen: dict[tuple[int, int] | tuple[str, str], str] = {}
    for number, path in enumerate(paths):
        field = f"paths[{number}]"
        scheme, separator, rest = path.partition("://")
        if scheme == "s3" and separator:
            bucket = split_url(path, field)
            import_botocore(path, field)
            if bucket in seen:
                raise ConfigError(field, path, f"it is the same place as {seen[bucket]}; name each one once")
            seen[bucket] = path
            continue
        if separator and scheme != "file":
            raise ConfigError(field, path, "name a directory or s3://bucket/prefix")
        directory = rest if separator else path
        if not os.path.exists(directory):
            raise ConfigError(field, path, "the directory does not exist; create it first")
        if not os.path.isdir(directory):
            raise ConfigError(field, path, "it is not a directory; name one")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigError(field, path, "the directory cannot be written; change its permissions or name another")
        key = identity(directory)
        if key in seen:
            raise ConfigError(field, path, f"it is the same directory as {seen[key]}; name each one once")
        seen[key] = path


def free_bytes(paths: Sequence[str]) -> list[int]:
    """Return, for each path, the bytes that this process may still write there.

    Directories on one device share its free space evenly; a warning names the device, as such paths are no faster
    than one. An object store has no limit, nor has a file system that does not say how large it is.
    """
    directories: dict[int, list[int]] = {}
    found = []
    for number, path in enumerate(paths):
        scheme, separator, rest = path.partition("://")
        if scheme == "s3" and separator:
            found.append(UNLIMITED_BYTES)
            continue
        directory = rest if separator else path
        found.append(room_bytes(os.statvfs(directory)))
        directories.setdefault(os.stat(directory).st_dev, []).append(number)
    for device, numbers in directories.items():
        if len(numbers) > 1:
            names = ", ".join(paths[number] for number in numbers)
            log.warning(
                "%s are on one device (%d:%d): together they are no faster than one",
                names,
                os.major(device),
                os.minor(device),
            )
        for number in numbers:
            found[number] //= len(numbers)
    return found
