"""Looking at directories before anything is opened in them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from offload.errors import ConfigError
from offload.tiers.places import identity


def check_directories(paths: Sequence[str]) -> None:
    """Verify that stores can be opened in `paths`; nothing is touched.

    Raises:
        ConfigError: If one does not exist, is not a directory, cannot be written, or is there twice.
    """
    seen: dict[tuple[int, int], str] = {}
    for number, path in enumerate(paths):
        field = f"paths[{number}]"
        scheme, separator, rest = path.partition("://")
        if separator and scheme != "file":
            raise ConfigError(field, path, "name a directory; other kinds of path are not supported yet")
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


def directory_free_bytes(path: str) -> int:
    """Return the bytes that this process may still write to the file system of `path`."""
    _, separator, rest = path.partition("://")
    status = os.statvfs(rest if separator else path)
    return status.f_bavail * status.f_frsize
