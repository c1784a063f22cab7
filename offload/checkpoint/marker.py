"""Whether a folder that a framework writes to is whole: marker files say that a save has begun, and has ended.

BEGUN is there: a save is under way, or was interrupted; the marker says which process began it
WHOLE is there, alone: everything that was in the folder when it was marked is durable
neither is: nobody knows; the folder is older than these markers, or written by something else
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from enum import Enum

import msgspec
from msgspec.structs import replace

from offload.checkpoint.folder import open_folder
from offload.errors import CheckpointError
from offload.processes import Process
from offload.tiers.place import Folder, saying

BEGUN, WHOLE = "offload-save-begun.json", "offload-save-whole.json"

SET_ASIDE = "incomplete-"
"""Prefix of the new name of a folder whose save was interrupted, once the process that began it has ended."""

log = logging.getLogger("offload")


class Mark(Enum):
    """What a folder says of itself."""

    NONE = "no marker"
    BEGUN = "a save has begun, and has not ended"
    WHOLE = "whole"


class Marker(msgspec.Struct, omit_defaults=True):
    """What is in a marker.

    Attributes:
        process: Which began the save; None where the kernel does not say, and in a mirror once the copy is whole.
        depth: How many of the last parts of the folder's path a mirror keeps; what is above them is the run's folder.
        beside: Files that belong to the folder but lie elsewhere in the run's folder, by their names in that.
        shared: Small files in the run's folder that every save writes over.
        files: In a mirror, the files that are durable there: size in bytes, and time of the last change in ns.
        whole_s: In a mirror, when all became whole, since the epoch.
    """

    process: Process | None = None
    depth: int = 1
    beside: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    files: dict[str, tuple[int, int]] = {}
    whole_s: float = 0.0

    def encode(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(self)


ALONE = Marker()
"""What a marker says of a folder to which nothing else belongs."""


def mark_begun(folder: str, belongs: Marker = ALONE) -> None:
    """Mark a folder, which is made if need be, as not whole: a save begins; and note what belongs to it.

    Args:
        folder: The folder.
        belongs: Has `depth`, `beside` and `shared`.

    Raises:
        CheckpointError: It cannot be written to.
    """
    opened = open_folder(folder)
    opened.prepare()
    opened.write(BEGUN, replace(belongs, process=Process.this(), files={}, whole_s=0.0).encode())
    opened.delete(WHOLE)


def mark_whole(folder: str) -> None:
    """Make everything in a folder durable, then mark it as whole.

    Raises:
        CheckpointError: It has no marker of a begun save any more, or something in it cannot be made durable.
    """
    with saying("mark as whole", folder):
        for above, _, names in os.walk(folder):
            for path in (*(os.path.join(above, name) for name in names), above):
                with contextlib.suppress(FileNotFoundError):  # somebody's temporary one
                    if stat.S_ISREG(mode := os.lstat(path).st_mode) or stat.S_ISDIR(mode):
                        _make_durable(path)
        os.replace(os.path.join(folder, BEGUN), os.path.join(folder, WHOLE))
        _make_durable(folder)


def unmark(folder: str) -> None:
    """Delete a folder's marker of a begun save, where nobody could tell when the folder is whole."""
    open_folder(folder).delete(BEGUN)


def mark_of(folder: str) -> Mark:
    """Return what a directory says of itself."""
    if os.path.exists(os.path.join(folder, BEGUN)):
        return Mark.BEGUN
    return Mark.WHOLE if os.path.exists(os.path.join(folder, WHOLE)) else Mark.NONE


def whole_around(folder: str) -> str:
    """Return which of a directory and the one above it is marked as whole; "" if neither is."""
    return next((place for place in (folder, os.path.dirname(folder)) if mark_of(place) is Mark.WHOLE), "")


def mark_in(folder: Folder) -> tuple[Mark, Marker]:
    """Return what a folder says of itself, in a bucket too, and what is in its marker.

    Raises:
        CheckpointError: It cannot be read.
    """
    for name, mark in ((BEGUN, Mark.BEGUN), (WHOLE, Mark.WHOLE)):
        content = folder.read(name)
        if content is not None:
            with contextlib.suppress(msgspec.DecodeError):
                return mark, msgspec.json.decode(content, type=Marker)
            return mark, Marker()
    return Mark.NONE, Marker()


def set_aside(above: str, names: re.Pattern[str], into: str | None = None) -> list[str]:
    """Rename folders whose save was interrupted, so that nobody takes them for checkpoints, and log that.

    Only folders are renamed whose saving process is known to have ended. Any number of processes may do this at a
    time: when it returns in one of them, none of these folders has its old name.

    Args:
        above: The folder that they are in; one that is not there has none.
        names: What they are called.
        into: The folder, on the same file system, to move them to; None to leave them in `above`.

    Returns:
        Their new names, of those that this process has renamed.
    """
    renamed = []
    with contextlib.suppress(OSError):
        for name in sorted(filter(names.fullmatch, os.listdir(above))):
            folder = os.path.join(above, name)
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # an empty one, made by a save that had not begun with it
            if mark_of(folder) is Mark.BEGUN and _has_ended(folder):
                renamed += _renamed(folder, os.path.join(into or above, SET_ASIDE + name))
    for folder in renamed:
        log.warning("%s is what an interrupted save has left, and no checkpoint: delete it", folder)
    return renamed


def _renamed(folder: str, wanted: str) -> list[str]:
    """Rename a folder to a name that is not taken; return the new name, or nothing if another process was first."""
    for number in range(1000):
        target = f"{wanted}.{number}" if number else wanted
        with contextlib.suppress(OSError):  # there is one of that name, which has files
            os.rename(folder, target)
            return [target]
        if not os.path.isdir(folder):
            break
    return []


def _has_ended(folder: str) -> bool:
    """Return whether the process that began a save is known to have ended."""
    with contextlib.suppress(CheckpointError):
        process = mark_in(open_folder(folder))[1].process
        return process is not None and process.has_ended()
    return False


def _make_durable(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
