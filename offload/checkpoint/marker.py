"""Whether a folder that a framework writes to is whole: files say that a save has begun, and that it has ended.

BEGUN is there: a save is under way, or was interrupted; it says which process began it
WHOLE is there, alone: all that the folder had by then was durable
neither is: nobody knows; folders of before, and those of others, have none
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from enum import Enum

import msgspec

from offload.checkpoint.folder import open_folder
from offload.processes import Process

BEGUN, WHOLE = "offload-save-begun.json", "offload-save-whole.json"

SET_ASIDE = "incomplete-"
"""How the name of a folder begins whose save was interrupted, once no process can end it."""

log = logging.getLogger("offload")


class Mark(Enum):
    """What a folder says of itself."""

    NONE = "no marker"
    BEGUN = "a save has begun, and has not ended"
    WHOLE = "whole"


def mark_begun(folder: str) -> None:
    """Say of a folder, which is made if need be, that it is not whole from now on.

    Raises:
        CheckpointError: It cannot be written to.
    """
    place = open_folder(folder)
    place.prepare()
    place.write(BEGUN, msgspec.json.encode(Process.this()))
    place.delete(WHOLE)


def mark_whole(folder: str) -> None:
    """Say of a folder that it is whole, once all that is in it is durable.

    Raises:
        CheckpointError: It cannot be written to.
        OSError: Something in it cannot be made durable.
    """
    for above, _, names in os.walk(folder):
        for file in (os.path.join(above, name) for name in names):
            with contextlib.suppress(FileNotFoundError):  # somebody's temporary one
                if stat.S_ISREG(os.lstat(file).st_mode):
                    _make_durable(file)
        _make_durable(above)
    os.replace(os.path.join(folder, BEGUN), os.path.join(folder, WHOLE))
    _make_durable(folder)


def mark_of(folder: str) -> Mark:
    """Return what a folder says of itself."""
    if os.path.exists(os.path.join(folder, BEGUN)):
        return Mark.BEGUN
    return Mark.WHOLE if os.path.exists(os.path.join(folder, WHOLE)) else Mark.NONE


def set_aside(above: str, names: re.Pattern[str], into: str | None = None) -> list[str]:
    """Rename folders whose save was interrupted, so that nobody takes them for checkpoints, and log that.

    Any number of processes may do so at a time: each finds none by the time this returns, as far as the machines
    know that whoever began has ended.

    Args:
        above: The folder that they are in; one that is not there has none.
        names: What they are called.
        into: Where they go, on that file system; None to stay in that folder.

    Returns:
        Their new names, of those that this process has renamed.
    """
    renamed = []
    with contextlib.suppress(OSError):
        for name in sorted(filter(names.fullmatch, os.listdir(above))):
            folder = os.path.join(above, name)
            if mark_of(folder) is Mark.BEGUN and _has_ended(folder):
                renamed += _renamed(folder, os.path.join(into or above, SET_ASIDE + name))
    for folder in renamed:
        log.warning("%s is what an interrupted save has left, and no checkpoint: delete it", folder)
    return renamed


def _renamed(folder: str, wanted: str) -> list[str]:
    """Rename a folder, to a name that is not taken; return that, or nothing where another process was first."""
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
    with contextlib.suppress(OSError, msgspec.DecodeError), open(os.path.join(folder, BEGUN), "rb") as file:
        return msgspec.json.decode(file.read(), type=Process).has_ended()
    return False


def _make_durable(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
