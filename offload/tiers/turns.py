"""Processes that share a path take turns on it: where the lock lies, and what is said about a long wait.

The waiting itself is native (csrc/io/path_lock.h). What the lock says is "this path's device is mine for now", so
it lies on the node, never on the path: the path may be slow, full or on another machine, and gets no file of ours.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from dataclasses import dataclass

from offload import waits
from offload._native import TakingTurns
from offload.errors import TierError
from offload.tiers.places import identity
from offload.units import format_seconds

LOCK_DIRECTORIES = ("/dev/shm", "/tmp")
"""Where lock files lie: the first that exists. The same for all processes of a node, so no environment variable
(XDG_RUNTIME_DIR, TMPDIR) has a say: ranks that were started in different ways would not meet."""

DEFAULT_TURN_BYTES = 64 << 20
DEFAULT_REPORT_AFTER_S = waits.QUIET_S

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How a tier takes turns on its path.

    Attributes:
        path: Directory whose identity names the lock; None for the tier's own path. Ranks that write to different
            subdirectories of one path take turns on the path.
        holders: Processes that may have a turn at once; all have to say the same.
        turn_bytes: What a turn may move while somebody else is waiting. Each end of a turn lets the path run dry.
        report_after_s: How long to wait for a turn before a warning names the process that is in the way.
    """

    path: str | None = None
    holders: int = 1
    turn_bytes: int = DEFAULT_TURN_BYTES
    report_after_s: float = DEFAULT_REPORT_AFTER_S


def lock_file(path: str | os.PathLike[str]) -> str:
    """Return the lock file of a directory, made if it is not there.

    An empty file for each path, which stays: deleting it would let two processes lock two files of one name. Any
    user may lock it, like any user may write to the directory it lies in; nobody reads or writes anything there
    that matters.

    Raises:
        OSError: `path` does not exist, or the file cannot be made or is not a file.
    """
    device, inode = identity(path)
    directory = next((name for name in LOCK_DIRECTORIES if os.path.isdir(name)), LOCK_DIRECTORIES[-1])
    name = f"{directory}/offload-path-{device:x}-{inode:x}.lock"
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        # Without O_CREAT first: in a sticky directory the kernel refuses it for another user's file.
        descriptor = os.open(name, flags)
    except FileNotFoundError:
        try:
            descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(descriptor, 0o666)  # whatever the umask
        except FileExistsError:
            descriptor = os.open(name, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{name} is not a file")
    finally:
        os.close(descriptor)
    return name


def describe_wait(path: str, waited_s: float, holder: int) -> str:
    """Return a sentence about a turn that does not come: whose it is and what to do."""
    who = f"process {holder}" if holder else "a process that cannot be seen from here (another container?)"
    story = f"waited {format_seconds(waited_s)} for a turn on path {path}, which {who} has"
    if holder and _is_stopped(holder):
        return f"{story}; it is stopped: continue it (kill -CONT {holder}) or end it"
    return story


def watch(io: TakingTurns, path: str) -> threading.Thread:
    """Start a thread that logs a warning whenever a turn is long in coming; it ends when `io` is closed."""

    def run() -> None:
        while (report := io.next_report()) is not None:
            _log.warning("%s", describe_wait(path, *report))

    thread = threading.Thread(target=run, name="offload-turn-watch", daemon=True)
    thread.start()
    return thread


def lock_error(path: str, cause: OSError) -> TierError:
    """Return the error for a lock that cannot be had."""
    return TierError(
        "lock",
        tier="file",
        path=path,
        errno=cause.errno,
        detail=f'{cause.strerror or cause} ({cause.filename}); use path_lock "off" to go without taking turns',
    )


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The name may hold anything, brackets too; the state comes after the last one.
        return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    return False
