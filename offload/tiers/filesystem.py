"""The file system of paths: its type, identities, durable and locked files, and which process uses a store."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from offload import waits
from offload._native import file_system_magic

LOCK_NAME = "lock"

UNLIMITED_BYTES = 1 << 60
"""Room of a file system or object store that does not report its size."""

_FILE_SYSTEMS = {
    0xEF53: "ext",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0x65735546: "fuse",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x517B: "smb",
    0x01021997: "9p",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x5346544E: "ntfs",
}

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "fuse", "cifs", "smb2", "smb", "9p", "ceph", "lustre", "gpfs", "beegfs"})
"""Types whose data usually lies on another machine."""

PINS_NAME = "pins.json"
STORE_FILES = ("tiles", "store.json", PINS_NAME, LOCK_NAME)
"""Everything that the directory of a store may hold."""

_OWNER_BYTE = 0
_READERS_BYTE = 1
"""The bytes of a store's lock file that its owner and its readers lock."""

_FLOCK = "@hhqqi4x"
"""`struct flock`: type, whence, start, length, pid; native alignment and padding."""

_PID_BYTES = 20
"""Length of a lock file's content: its owner's pid, as the system reports none (-1) for an open file description's
lock."""

_POLL_S = 1e-3
"""Seconds between attempts to acquire a lock that another process will release soon."""


@dataclass(slots=True, eq=False)
class LockFile:
    """A store's lock file that this process has open: one object for all locks that the process has on the file.

    On local file systems the locks are open file description locks. They stay when other code of this process opens
    and closes the file, as a copy of the folder does. But a forked child's copy of a descriptor would keep them, so a
    child closes its copies.

    On network file systems, or where the system has no such locks, they are POSIX record locks (`has_record_locks`).
    Closing any descriptor of the file gives up all that the process has on it, so all descriptors stay open until no
    lock is needed.

    Attributes:
        key: Device and inode.
        descriptors: The open descriptors of the file; the first has the readers' lock.
    """

    key: tuple[int, int]
    descriptors: list[int]
    has_record_locks: bool
    owner: int = -1  # the descriptor that has the lock of `hold_lock`; -1 without that lock
    readers: int = 0  # calls of `share_lock` that have not been undone: they share one lock

    def lock(self, descriptor: int, kind: int, byte: int) -> None:
        """Lock or unlock a byte at once, by `kind` F_RDLCK, F_WRLCK or F_UNLCK.

        Raises:
            OSError: Another process has locked the byte, or the file system has no locks.
        """
        command = fcntl.F_SETLK if self.has_record_locks else fcntl.F_OFD_SETLK
        # From `byte` on, one byte; the pid has to be 0 for an open file description's lock.
        fcntl.fcntl(descriptor, command, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))

    def unlock(self, descriptor: int, byte: int) -> None:
        """Unlock a byte. Closing the descriptor is not enough: a child that is just being forked may have a copy."""
        with contextlib.suppress(OSError):  # a file server may refuse this for a deleted file
            self.lock(descriptor, fcntl.F_UNLCK, byte)


_lock_files: dict[tuple[int, int], LockFile] = {}
"""The lock files that this process has open, by device and inode."""
_table_lock = threading.RLock()
"""Guards `_lock_files` and what is in them; held across a fork."""


def _close_in_child() -> None:
    """Close a forked child's copies of lock files, which would keep its parent's locks beyond the parent's life."""
    for file in _lock_files.values():
        for descriptor in file.descriptors:
            os.close(descriptor)
        file.descriptors.clear()
        file.owner = -1
        file.readers = 0
    _lock_files.clear()
    _table_lock.release()  # which was acquired before the fork


# Nobody forks between opening a lock file and noting it.
os.register_at_fork(before=_table_lock.acquire, after_in_parent=_table_lock.release, after_in_child=_close_in_child)


def file_system(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system that `path` lies on: "ext", "xfs", "tmpfs", "overlay", "nfs", ...

    An unknown type is named by its number, such as "0x1badface".

    Raises:
        OSError: `path` does not exist or cannot be reached.
    """
    magic = file_system_magic(os.fspath(path))
    return _FILE_SYSTEMS.get(magic, f"{magic:#x}")


def room_bytes(status: os.statvfs_result) -> int:
    """Return the bytes that a user may still write; `UNLIMITED_BYTES` if the file system does not report its size."""
    return status.f_bavail * status.f_frsize if status.f_blocks else UNLIMITED_BYTES


def identity(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return what identifies a directory, whatever path names it: (st_dev, st_ino).

    Raises:
        OSError: `path` does not exist or cannot be reached.
    """
    status = os.stat(os.path.realpath(path))
    return status.st_dev, status.st_ino


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable, if its file system can do that.

    Raises:
        OSError: The directory cannot be opened, or an error occurred on its device.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as cause:
        if cause.errno != errno.EINVAL:  # the file system cannot
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, temporary: str, *, is_new: bool = False) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing; it durably replaces `path` when this context ends without an error.

    Args:
        path: The file to make or replace.
        temporary: Name of the temporary file, beside `path`. A leftover of that name is overwritten, unless another
            process is writing it.
        is_new: Raise if there is a file at `path` when it would be replaced.

    Raises:
        OSError: The file could not be written; `path` is as it was before.
    """
    unfinished = path.with_name(temporary)
    # Opened without O_TRUNC: another process may be writing the file, so it is truncated only once it is locked.
    with open(unfinished, "wb", opener=lambda name, flags: os.open(name, flags & ~os.O_TRUNC, 0o666)) as file:
        _lock_for_writing(file.fileno(), unfinished)
        try:
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            if is_new and os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, "somebody else has written it meanwhile", str(path))
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        finally:
            with contextlib.suppress(OSError):
                # Closing alone does not unlock while a child that was just forked has the descriptor, too.
                fcntl.flock(file.fileno(), fcntl.LOCK_UN)
    sync_directory(path.parent)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[Path]:
    """Make and lock a temporary folder, which is deleted when this context ends; yield its path.

    If a killed process has left the folder there, it is used again, and emptied first.

    Raises:
        OSError: The folder cannot be made, or another process uses it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink():  # by which files elsewhere would be deleted below
        raise OSError(errno.ELOOP, "it is a link", str(folder))
    with open(folder / LOCK_NAME, "wb") as lock, contextlib.ExitStack() as ends:
        _lock_for_writing(lock.fileno(), folder / LOCK_NAME)
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        for leftover in folder.iterdir():
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            elif leftover.name != LOCK_NAME:
                leftover.unlink()
        yield folder


def _lock_for_writing(descriptor: int, path: Path) -> None:
    """Lock a file that has just been opened for writing, so that this process alone writes it.

    On a file system without locks nothing is done.

    Raises:
        OSError: Another process is writing it, or has replaced it meanwhile.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, "somebody else is writing it", str(path)) from None
    except OSError:
        return  # the file system has no locks
    if not _is_at(path, descriptor):
        raise OSError(errno.EBUSY, "somebody else has been writing it", str(path))


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether a path still names the open file."""
    return path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """Open a file that another user may have made; return its descriptor.

    FIFOs and devices are refused without being opened, and opening never blocks.

    Args:
        path: The file.
        flags: Access mode and O_DIRECT.
        follow: Whether it may be a symbolic link. Links among its directories are always followed.

    Raises:
        OSError: The file does not exist, cannot be opened, or is not a regular file (EINVAL; ELOOP for a link).
    """
    # Opening a device may have effects, so the type is checked first; then again, as the name may mean another now.
    _check_regular(os.stat(path, follow_symlinks=follow), path)
    descriptor = -1
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        _check_regular(os.fstat(descriptor), path)
        os.set_blocking(descriptor, True)  # only opening must not block
        return descriptor  # within `try`, so that an interrupt at this line closes it
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        raise


def _check_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Raise OSError unless the status is that of a regular file; see `open_regular`."""
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", os.fspath(path))
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, "it is a directory and not a regular file", os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_regular(path: str | os.PathLike[str], limit_bytes: int, *, follow: bool = False) -> bytes:
    """Return the content of a file that another user may have made; see `open_regular`.

    Raises:
        OSError: As `open_regular`; or it is larger than `limit_bytes` (EFBIG).
    """
    # `open` calls the opener itself, so that no interrupt comes between opening and noting the descriptor.
    with open(path, "rb", opener=partial(open_regular, follow=follow)) as file:
        # A byte more than there should be, so that a file that is larger, or grows meanwhile, shows.
        content = file.read(min(limit_bytes, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it has more than {limit_bytes} bytes", os.fspath(path))
    return content


def read_json(path: str | os.PathLike[str], limit_bytes: int, *, follow: bool = False) -> Any:
    """Return the value in a JSON file that another user may have made; see `open_regular`.

    Raises:
        OSError: As `read_regular`.
        ValueError: The content is not JSON in UTF-8, or nested too deeply.
    """
    content = read_regular(path, limit_bytes, follow=follow)
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def hold_lock(path: Path, *, existing: bool = False) -> LockFile:
    """Lock a lock file for this process as a store's owner; return it for `release_lock`.

    Freed when this process ends, however it ends, even if a forked child lives on.

    Until a new lock file is locked its store looks like a leftover, so a process that deletes leftovers may lock it
    first. This waits until that process gives the lock up.

    Args:
        path: The file; made here unless `existing`.
        existing: Lock a file that exists.

    Raises:
        FileNotFoundError: Its directory does not exist (or, with `existing`, the file does not), or the file was
            deleted before it was locked.
        OSError: The file cannot be made, an existing store has an owner (EAGAIN or EACCES), or the file system has
            no locks; a file that was made is not deleted.
    """
    with _table_lock:
        if existing:
            # Asked of our own notes: the system would grant this process its own record lock a second time.
            if (known := _known_lock_file(path)) is not None and known.owner >= 0:
                raise BlockingIOError(errno.EAGAIN, "this process has locked it already", str(path))
            descriptor = open_regular(path, os.O_RDWR)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        file = _note_lock_file(descriptor)
        try:
            if not _try_lock_as_owner(file, descriptor, 0.0):  # without a pause
                if existing:
                    raise BlockingIOError(errno.EAGAIN, "another process has locked it", str(path))
                # A process that deletes leftovers has the lock; `wait_for` gives each try the longest pause.
                waits.wait_for(partial(_try_lock_as_owner, file, descriptor), lambda: f"whoever has locked {path}")
            # A new file's name is its session's alone: nobody else makes another file there.
            is_there = _is_at(path, descriptor) if existing else path.exists()
            if not is_there:
                raise FileNotFoundError(errno.ENOENT, "somebody has deleted it meanwhile", str(path))
            if not file.has_record_locks:  # the system reports no pid for such a lock, so the file gets it
                with contextlib.suppress(OSError):  # a full disk: messages do without
                    os.pwrite(descriptor, f"{os.getpid():<{_PID_BYTES}}".encode(), 0)
        except BaseException:
            file.unlock(descriptor, _OWNER_BYTE)
            _close_unused(file)
            raise
        file.owner = descriptor
    return file


def _try_lock_as_owner(file: LockFile, descriptor: int, pause_s: float) -> bool:
    """Try to lock a lock file as owner; return whether that succeeded.

    If another process has the lock, this pauses before it returns, for `pause_s` at most.
    """
    try:
        file.lock(descriptor, fcntl.F_WRLCK, _OWNER_BYTE)
        return True
    except OSError as cause:
        if cause.errno not in (errno.EAGAIN, errno.EACCES):  # POSIX allows either for a lock of another process
            raise
    time.sleep(min(pause_s, _POLL_S))
    return False


def release_lock(file: LockFile) -> None:
    """Give up a lock of `hold_lock`; a forked child has none."""
    with _table_lock:
        if file.owner >= 0:
            file.unlock(file.owner, _OWNER_BYTE)
            file.owner = -1
            _close_unused(file)


def share_lock(path: Path) -> LockFile:
    """Lock a store's lock file as a reader of what checkpoints name there; return it for `unshare_lock`.

    Raises:
        OSError: There is no such file, or the file system has no locks.
    """
    with _table_lock:
        file = _known_lock_file(path) or _note_lock_file(open_regular(path))
        try:
            file.lock(file.descriptors[0], fcntl.F_RDLCK, _READERS_BYTE)
        except OSError:
            _close_unused(file)
            raise
        file.readers += 1
    return file


def unshare_lock(file: LockFile) -> None:
    """Give up one lock of `share_lock`; the last of this process unlocks the file. A forked child has none."""
    with _table_lock:
        if file.readers:
            file.readers -= 1
            if not file.readers:
                file.unlock(file.descriptors[0], _READERS_BYTE)
            _close_unused(file)


def _known_lock_file(path: str | os.PathLike[str]) -> LockFile | None:
    """Return the lock file at a path if this process has it open, else None; FileNotFoundError if there is none."""
    status = os.stat(path, follow_symlinks=False)
    return _lock_files.get((status.st_dev, status.st_ino))


def _note_lock_file(descriptor: int) -> LockFile:
    """Note a new descriptor of a lock file; return the file's `LockFile`, which is made for its first descriptor.

    If that fails, the descriptor is closed.
    """
    try:
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino
        if key not in _lock_files:
            _lock_files[key] = LockFile(key, [], _has_record_locks(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    _lock_files[key].descriptors.append(descriptor)
    return _lock_files[key]


def _has_record_locks(descriptor: int) -> bool:
    """Return whether a lock file gets POSIX record locks: on a network, or where the system has no others.

    A file server may keep an open file description's lock when the process that has it was killed.
    """
    try:
        # Raises where the system has no open file description locks.
        byte_holder(descriptor, _OWNER_BYTE, fcntl.F_OFD_GETLK)
        return file_system(f"/proc/self/fd/{descriptor}") in NETWORK_FILE_SYSTEMS
    except OSError:
        return True


def _close_unused(file: LockFile) -> None:
    """Close a lock file's descriptors if this process has no lock on it any more."""
    if file.owner >= 0 or file.readers:
        return
    del _lock_files[file.key]
    for descriptor in file.descriptors:
        os.close(descriptor)
    file.descriptors.clear()


def lock_holder(store: str | os.PathLike[str], name: str = LOCK_NAME) -> int | None:
    """Return the pid of the process that is using a store, or None if its lock is free or not there.

    The lock is left as it is, even if this process holds it. The pid is 0 if it is not known; for a holder on another
    machine or in another container it may be one there.

    Args:
        store: A store's directory, or another one with a file that `hold_lock` locks.
        name: The name of the lock file in it.

    Raises:
        OSError: the lock file exists but cannot be opened.
    """
    return _holder_of_byte(os.path.join(store, name), _OWNER_BYTE, lambda file: file.owner >= 0)


def is_being_read(store: str | os.PathLike[str], *, own: int = 0) -> bool:
    """Return whether a store has readers other than `own` ones of this process: see `share_lock`.

    A reader in another process counts, and so does one of this process beyond the number `own`.

    Raises:
        OSError: the lock file exists but cannot be opened.
    """
    return _holder_of_byte(os.path.join(store, LOCK_NAME), _READERS_BYTE, lambda file: file.readers > own) is not None


def _holder_of_byte(path: str, byte: int, is_own: Callable[[LockFile], bool]) -> int | None:
    """Return the pid of the process that has locked a byte of a lock file; None if none has or there is no file.

    Args:
        path: The lock file.
        byte: The byte's position.
        is_own: Returns whether this process itself has the lock, given the file as it has it open: the system does
            not report a process's own locks to it.
    """
    with _table_lock:
        try:
            known = _known_lock_file(path)
        except FileNotFoundError:
            return None
        if known is not None and is_own(known):
            return os.getpid()
        if known is not None:  # opening it once more, and closing that, could give up our locks
            command = fcntl.F_GETLK if known.has_record_locks else fcntl.F_OFD_GETLK
            # By the descriptor that has our readers' lock: the system does not report that one, which does not count.
            return _holder_of_lock(known.descriptors[0], byte, command)
        descriptor = open_regular(path)
        try:
            pid = _holder_of_lock(descriptor, byte, fcntl.F_GETLK)
            # Our own pid is that of another container's process: if it were ours, the file would be known.
            return 0 if pid == os.getpid() else pid
        finally:
            os.close(descriptor)


def _holder_of_lock(descriptor: int, byte: int, command: int) -> int | None:
    """Return the pid of the process that has locked a byte, or None; see `byte_holder`.

    Where the system does not report the pid (-1), it is the one that the owner has written to the file, else 0.
    """
    pid = byte_holder(descriptor, byte, command)
    if pid != -1:
        return pid
    noted = os.pread(descriptor, _PID_BYTES, 0).strip()
    return int(noted) if noted.isdigit() else 0


def byte_holder(descriptor: int, byte: int, command: int = fcntl.F_GETLK) -> int | None:
    """Return the pid of another process that has locked a byte of a file, or None, as the system says.

    Args:
        descriptor: The file's.
        byte: Its position.
        command: F_GETLK, or F_OFD_GETLK to ask for locks of other descriptors, also of this process. The pid is -1
            for an open file description's lock.

    Raises:
        OSError: The file system has no locks.
    """
    # Ask which lock conflicts with a write lock, as every other lock does; nothing is locked. The answer is such a
    # lock, or type F_UNLCK if there is none.
    write_lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    lock_type, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, command, write_lock))
    return None if lock_type == fcntl.F_UNLCK else int(pid)
