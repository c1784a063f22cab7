"""Whether a folder that a framework writes to is whole: marker files say that a save has begun, and has ended.

BEGUN is there: a save is under way, or was interrupted; the marker says which process began it
WHOLE is there, alone: everything that was in the folder when it was marked is durable
neither is there: nobody knows; the folder is older than these markers, or something else has written it

The process that saves locks `LOCK` beside BEGUN, where there are locks. So another machine or container, and this one
after a reboot, can tell that the process has ended.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import stat
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace

from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import ID, OWN
from offload.errors import CheckpointError
from offload.processes import Process
from offload.tiers.directories import mount_of
from offload.tiers.filesystem import LockFile, file_system, hold_lock, lock_holder, release_lock
from offload.tiers.place import MAX_RECORD_BYTES, TEMPORARY, Folder, raising_checkpoint_error
from offload.tiers.store import NO_LOCK_ERRNOS

BEGUN, WHOLE = "offload-save-begun.json", "offload-save-whole.json"

LOCK = f"{TEMPORARY}offload-save-lock"
"""A file that the saving process has locked while the folder has `BEGUN`; then it is deleted."""

_WITH_LOCKS = frozenset({"ext", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "overlay", "nfs", "ceph", "gpfs"})
"""Types of file systems on which all machines see a lock; of NFS unless its mount's options say otherwise."""

_LOCAL_LOCKS = frozenset({"nolock", "local_lock=all", "local_lock=posix"})
"""Options of NFS with which a machine sees its own locks alone."""

UNFINISHED = ".offload-"
"""Prefix of the names of folders with unfinished files, which are not copied."""

SET_ASIDE = "incomplete-"
"""Prefix of the new name of a folder whose save was interrupted, once the process that began it has ended."""

_UNWRITTEN = re.compile(re.escape(TEMPORARY) + ID)
"""Names of files of this package that were not written whole."""

log = logging.getLogger("offload")


class Mark(Enum):
    """Whether a folder is whole, by its marker files."""

    NONE = "no marker"
    BEGUN = "a save has begun, and has not ended"
    WHOLE = "whole"


class Marker(msgspec.Struct, omit_defaults=True):
    """The content of a marker file.

    Attributes:
        process: The process that began the save or, in a mirror, the copy. None where the kernel does not say which,
            and in a mirror once the copy is whole.
        depth: How many of the last parts of the folder's path a mirror keeps. The run's folder is above these parts:
            with 2, of "run/step_5/optim" it is "run".
        beside: Files that belong to the folder but lie elsewhere in the run's folder; names relative to the latter.
        shared: Small files in the run's folder that every save overwrites.
        files: Files that are durable, by their names in the run's folder: size in bytes, and time of the last change
            in ns. In a run's own folder they are noted once it is whole; the engine's checkpoint is not among them.
        whole_s: When the folder became whole in the run, in seconds since the epoch; 0 before that.
        run: In a mirror: names the training, as `Manifest.run` does; "" in older markers.
        source: In a mirror: path of the run's folder; "" in older markers.
        locked: In `BEGUN`: whether `LOCK` is locked until the save, or its process, ends; False in older markers.
    """

    process: Process | None = None
    depth: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    beside: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    files: dict[str, tuple[int, int]] = {}
    whole_s: float = 0.0
    run: str = ""
    source: str = ""
    locked: bool = False

    def is_of(self, run: str, source: str) -> bool:
        """Return whether the mirror's folder, which has this marker, is a copy of a training's folder.

        It is if it names the same training or the same folder of the run: a training that begins anew in a folder,
        without state, has another name. Where the name of either training is unknown (""), it counts as a copy, too.

        Args:
            run: The training's name.
            source: Path of the folder that it saves to.
        """
        return "" in (run, self.run) or self.run == run or self.source == source

    def encode(self) -> bytes:
        """Return the marker as JSON, without `files` if it would be too long to be read, or a name is not Unicode."""
        with contextlib.suppress(UnicodeEncodeError):
            content = msgspec.json.encode(self)
            if len(content) <= MAX_RECORD_BYTES:
                return content
        return msgspec.json.encode(replace(self, files={}))


ALONE = Marker()
"""The marker of a folder to which no other files belong."""

DAMAGED = Marker(depth=0)
"""Returned in place of a marker that exists but cannot be read."""

newest_s = [0.0]
"""The latest `whole_s` of all markers that this process has read or written, in a list that functions change."""

_locks: dict[str, LockFile] = {}
"""The locks on `LOCK` of the folders that this process saves to, by the paths of these files."""


def mark_begun(folder: str, belongs: Marker = ALONE, *, locks: bool = True) -> None:
    """Mark a folder, made if need be, as not whole from now on.

    The marker says what `belongs` says, but it names this process and lists no files. `LOCK` stays locked until the
    folder is whole, or this process ends. `locks` is False for a folder that the caller deletes next: network file
    systems refuse to delete one with a file that is open.

    Raises:
        CheckpointError: The folder cannot be written to.
    """
    opened = open_folder(folder)
    opened.prepare()
    if not locks:  # an earlier save to the folder, which has failed, may have left its lock file open
        _let_go(opened)
    is_locked = locks and _lock(opened)
    opened.write(BEGUN, replace(belongs, process=Process.this(), files={}, locked=is_locked).encode())
    opened.delete(WHOLE)  # after that: `BEGUN` counts where both are there


def _lock(opened: Folder) -> bool:
    """Lock a folder for the save that begins; return whether this process has the lock.

    It has none where there are no locks, or another process has locked the file.
    """
    path = Path(opened.path, LOCK)
    # Saves by this process that failed have left their locks. A lock is released if its file is not at its path any
    # more, as when the folder was deleted or renamed since.
    for name, lock in [*_locks.items()]:
        if not _is_at(lock, name):
            release_lock(_locks.pop(name))
    if str(path) in _locks:  # of a failed save to this very folder
        return True
    is_new = not path.exists()
    try:
        path.touch(mode=0o600)
        _locks[str(path)] = hold_lock(path, existing=True)  # which waits for nobody
    except OSError as cause:
        if is_new and cause.errno in NO_LOCK_ERRNOS:  # the file has been made, and is of no use
            _unlock(opened)
        return False
    return True


def _is_at(lock: LockFile, name: str) -> bool:
    """Return whether a lock file is still the file at the path `name`, by device and inode."""
    with contextlib.suppress(OSError):
        status = os.lstat(name)
        return lock.key == (status.st_dev, status.st_ino)
    return False


def _unlock(opened: Folder) -> None:
    """Delete the lock file of a folder that is whole, or has no marker any more, then release the lock.

    In this order: others take a lock file that is there and not locked for that of a killed process.
    """
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(opened.path, LOCK))
    _let_go(opened)


def _let_go(opened: Folder) -> None:
    """Release this process's lock on a folder, if it has one."""
    if (lock := _locks.pop(os.path.join(opened.path, LOCK), None)) is not None:
        release_lock(lock)


def mark_whole(folder: str) -> None:
    """Make everything in a folder durable, then mark the folder as whole.

    The marker notes the framework's files, by their names in the run's folder: size and time of change.

    Raises:
        CheckpointError: The folder has no marker of a begun save any more, or a file in it cannot be made durable.
    """
    files = dict[str, tuple[int, int]]()
    with raising_checkpoint_error("mark as whole", folder):
        for directory, _, names in os.walk(folder):
            # Not the lock file: on network file systems, closing it again would give up this process's lock on it.
            for path in (*(os.path.join(directory, name) for name in names if name != LOCK), directory):
                with contextlib.suppress(FileNotFoundError):  # somebody's temporary file
                    status = os.lstat(path)
                    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
                        _make_durable(path)
                    if stat.S_ISREG(status.st_mode):
                        files[os.path.relpath(path, folder)] = (status.st_size, status.st_mtime_ns)
        opened = open_folder(folder)
        mark, marker = mark_in(opened)
        if mark is not Mark.BEGUN:
            gone = "somebody else has deleted, moved or marked it (does another run save there?)"
            raise CheckpointError(f"cannot mark as whole {folder}: {gone}")
        if marker is not DAMAGED:  # the marker, with files and time, is renamed to `WHOLE` below
            in_run = "/".join(os.path.abspath(folder).split("/")[-marker.depth :])  # the folder's name in the run's
            noted = {f"{in_run}/{name}": state for name, state in files.items() if not _may_go(name)}
            # A folder that was fetched from a mirror has the time at which it became whole in the run.
            opened.write(BEGUN, replace(marker, files=noted, whole_s=marker.whole_s or now_s()).encode())
        os.replace(os.path.join(folder, BEGUN), os.path.join(folder, WHOLE))
        _make_durable(folder)
        _unlock(opened)


def now_s() -> float:
    """Return the time at which a folder becomes whole, in seconds since the epoch, and note it in `newest_s`.

    It is later than every `whole_s` that this process has seen, so that newer folders sort last. The clock alone does
    not ensure that: it may have been set back, or another machine may have saved what this run goes on from. Then it
    is the next number that a float can have.
    """
    newest_s[0] = max(time.time(), math.nextafter(newest_s[0], math.inf))
    return newest_s[0]


def _may_go(name: str) -> bool:
    """Return whether a file may go from a folder that stays whole: a temporary one, a marker, or the engine's."""
    parts = name.split("/")
    is_temporary = any(part.startswith((TEMPORARY, UNFINISHED)) for part in parts)
    return is_temporary or parts[-1] in (BEGUN, WHOLE) or any(map(OWN.fullmatch, parts))


def unmark(folder: str) -> None:
    """Delete a folder's marker of a begun save, and `LOCK`, where no process can tell when the folder is whole."""
    opened = open_folder(folder)
    opened.delete(BEGUN)
    _unlock(opened)


def is_inside(name: str) -> bool:
    """Return whether a relative name stays within the folder that it is relative to."""
    return bool(name) and not os.path.isabs(name) and "\0" not in name and ".." not in name.split("/")


def mark_of(folder: str) -> Mark:
    """Return whether a directory is whole, by its markers."""
    if os.path.exists(os.path.join(folder, BEGUN)):
        return Mark.BEGUN
    return Mark.WHOLE if os.path.exists(os.path.join(folder, WHOLE)) else Mark.NONE


def marked_around(folder: str) -> tuple[str, Mark]:
    """Return the first folder that has a marker, of `folder` and those above it, and its mark; else ("", NONE)."""
    while folder:
        mark = mark_of(folder)
        if mark is not Mark.NONE:
            return folder, mark
        above = os.path.dirname(folder)
        is_root = above == folder
        folder = "" if is_root else above
    return "", Mark.NONE


def is_interrupted(folder: str) -> bool:
    """Return whether a directory is, or lies in, a folder whose save was interrupted: the saver has ended."""
    marked_folder, mark = marked_around(folder)
    return mark is Mark.BEGUN and _has_saver_ended(marked_folder)


def mark_in(folder: Folder) -> tuple[Mark, Marker]:
    """Return a folder's mark and marker; the folder may be one of a bucket.

    Without a marker file they are `Mark.NONE` and `ALONE`. A marker that cannot be decoded is returned as `DAMAGED`;
    so is one that names a file outside of the run's folder, as somebody else has written it. The `whole_s` of any
    other marker is noted in `newest_s`, for `now_s`.

    Raises:
        CheckpointError: The marker cannot be read.
    """
    for name, mark in ((BEGUN, Mark.BEGUN), (WHOLE, Mark.WHOLE)):  # in this order: `BEGUN` overrules `WHOLE`
        content = folder.read(name)
        if content is not None:
            with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                marker = msgspec.json.decode(content, type=Marker)
                if all(map(is_inside, (*marker.beside, *marker.shared, *marker.files))):
                    newest_s[0] = max(newest_s[0], marker.whole_s)
                    return mark, marker
            return mark, DAMAGED
    return Mark.NONE, ALONE


def set_aside(above: str, names: re.Pattern[str], into: str | None = None) -> list[str]:
    """Rename folders whose save was interrupted, so that nobody takes them for checkpoints, and log that.

    Only folders whose saving process is known to have ended are renamed; those in which not even a marker has been
    written are deleted. Several processes may call this at the same time: when one call returns, all of these folders
    have new names.

    Args:
        above: The folder that contains these folders. If it does not exist, nothing is done.
        names: Pattern of the names of these folders.
        into: The folder, on the same file system, to move them to; None to leave them in `above`.

    Returns:
        The new names of the folders that this process has renamed.
    """
    new_names = []
    with contextlib.suppress(OSError):  # `above` does not exist, or cannot be read
        for name in sorted(filter(names.fullmatch, os.listdir(above))):
            folder = os.path.join(above, name)
            with contextlib.suppress(OSError):  # another process was first, it is no folder, or it may not be deleted
                _delete_unbegun(folder)
            if mark_of(folder) is Mark.BEGUN and _has_saver_ended(folder):
                new_name = _rename_aside(folder, os.path.join(into or above, SET_ASIDE + name))
                if new_name is not None:
                    new_names.append(new_name)
    for new_name in new_names:
        log.warning("%s is what an interrupted save has left, and no checkpoint: delete it", new_name)
    return new_names


def _delete_unbegun(folder: str) -> None:
    """Delete a folder in which a save was killed before it had written its marker; do nothing to others.

    Such a folder has at most a lock file that nobody has locked, and unfinished files of markers.
    """
    names = os.listdir(folder)
    is_unbegun = all(name == LOCK or _UNWRITTEN.fullmatch(name) for name in names)
    if is_unbegun and lock_holder(folder, LOCK) is None:
        for name in names:
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _rename_aside(folder: str, wanted: str) -> str | None:
    """Rename a folder to `wanted`, or `wanted.1` and so on.

    Return the new name; None if another process was first, or the folder cannot be renamed.
    """
    for number in range(1000):
        target = f"{wanted}.{number}" if number else wanted
        with contextlib.suppress(OSError):  # the target is a folder that has files: try the next number
            os.rename(folder, target)
            return target
        if not os.path.isdir(folder):  # another process has renamed it
            break
    return None


def _sees_locks(folder: str) -> bool:
    """Return whether this process sees locks that other machines and containers have on files in a folder.

    False if that is not known of the type of file system.
    """
    kind = file_system(folder)
    # Only the options of NFS matter, see `_LOCAL_LOCKS`.
    _, options = mount_of(os.path.realpath(folder)) if kind == "nfs" else ("", "")
    return kind in _WITH_LOCKS and _LOCAL_LOCKS.isdisjoint(options.split(","))


def _has_saver_ended(folder: str) -> bool:
    """Return whether the process that began the save in a folder is known to have ended before the save did.

    On the same machine the process that the marker names tells it. Where that does not, the lock file does, if locks
    of other machines are seen: it is still there, and nobody has locked it.
    """
    with contextlib.suppress(CheckpointError, OSError):  # OSError: whether `LOCK` is locked cannot be seen from here
        _, marker = mark_in(open_folder(folder))
        has_ended = marker.process is not None and marker.process.has_ended()
        if not has_ended and marker.locked and _sees_locks(folder):
            # The lock is asked first, then whether the file is there: a save that ends well deletes the file before
            # it unlocks it, so a file that is still there was not unlocked by such a save.
            has_ended = lock_holder(folder, LOCK) is None and os.path.exists(os.path.join(folder, LOCK))
        return has_ended and mark_of(folder) is Mark.BEGUN  # the save may have ended well meanwhile
    return False


def _make_durable(path: str) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
