"""Questions about paths: what they are, whether two are the same, and who is using a store."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from offload._native import file_system_magic

LOCK_NAME = "lock"

UNLIMITED_BYTES = 1 << 60
"""What a place has room for that does not say."""

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

NETWORK_FILE_SYSTEMS = frozenset({"nfs", "fuse", "cifs", "smb2", "smb", "9p", "ceph", "lustre", "gpfs", "beegfs"})
"""Types whose data usually lies on another machine."""

# Locks that this process holds, by identity of the file, with the holder's pid: closing any descriptor of a
# locked file gives the lock up, so such a file must never be opened a second time. A forked child inherits
# the table but not the locks, which is why the pid is kept.
_held: dict[tuple[int, int], int] = {}


def file_system(path: str | os.PathLike[str]) -> str:
    """Return the type of the file system that `path` lies on: "ext", "xfs", "tmpfs", "overlay", "nfs", ...

    An unknown type is named by its number, such as "0x1badface".

    Raises:
        OSError: `path` does not exist or cannot be reached.
    """
    magic = file_system_magic(os.fspath(path))
    return _FILE_SYSTEMS.get(magic, f"{magic:#x}")


def room_bytes(status: os.statvfs_result) -> int:
    """Return what a user may still write; `UNLIMITED_BYTES` where the file system does not say how large it is."""
    return status.f_bavail * status.f_frsize if status.f_blocks else UNLIMITED_BYTES


def identity(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Return what tells one directory from another, whatever it is called: (st_dev, st_ino).

    Raises:
        OSError: `path` does not exist or cannot be reached.
    """
    status = os.stat(os.path.realpath(path))
    return status.st_dev, status.st_ino


def hold_lock(path: Path) -> int:
    """Create a lock file and lock it for this process; return its descriptor for `release_lock`.

    A POSIX record lock: freed when this process ends, however it ends, even if a forked child lives on.

    Raises:
        OSError: the file exists already, cannot be made, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    status = os.fstat(descriptor)
    _held[status.st_dev, status.st_ino] = os.getpid()
    return descriptor


def release_lock(descriptor: int) -> None:
    """Give up a lock of `hold_lock` and close its descriptor."""
    status = os.fstat(descriptor)
    _held.pop((status.st_dev, status.st_ino), None)
    os.close(descriptor)


def lock_holder(store: str | os.PathLike[str]) -> int | None:
    """Return the pid of the process that is using a store, or None if its lock is free.

    Never disturbs the lock, also where this process holds it. A holder on another machine has a pid of 0 or
    one of that machine's.

    Args:
        store: A store's directory.

    Raises:
        OSError: the lock file exists but cannot be opened.
    """
    path = os.path.join(store, LOCK_NAME)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if _held.get((status.st_dev, status.st_ino)) == os.getpid():
        return os.getpid()
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # struct flock: type, whence, start, length, pid; native alignment and padding.
        layout = "@hhqqi4x"
        asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(layout, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else int(pid)
