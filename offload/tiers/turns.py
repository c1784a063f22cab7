"""Processes and sessions that share a path take turns on it: a tier that lets requests through to another one only
while it has a turn.

The lock is POSIX record locks on a file that is never read: byte 0 is the place of whoever is next in line, the bytes
after it are the turns. Who wants a turn takes byte 0, then a turn, then gives byte 0 back: so who has just had a turn
queues behind who waits already. Such locks go when the process dies, by SIGKILL too, whatever children it leaves.
They belong to the process: each file is opened once in it and stays open, as any close would give its locks up, and
its sessions have a `threading.Lock` beside each byte. There is no deadlock: a turn never waits for another path.

What the lock says is "this path's device is mine for now", so it lies on the node, never on the path: the path may be
slow, full or on another machine, and gets no file of ours.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial

from offload._native import CompletionQueue
from offload.errors import TierError
from offload.protocols import SECTOR_BYTES, WAKE, Queue, Tier, TileRequest
from offload.tiers.common import Owned, Turns
from offload.tiers.filesystem import byte_holder, identity
from offload.units import format_seconds

LOCK_DIRECTORIES = ("/dev/shm", "/tmp")
"""Where lock files lie: the first that exists. The same for all processes of a node, so no environment variable
(XDG_RUNTIME_DIR, TMPDIR) has a say: ranks that were started in different ways would not meet."""

LINGER_S = 1e-3
"""How long a turn outlasts its last request: the next ones come when the caller has seen the last completions."""

_log = logging.getLogger(__name__)


class LockByte:
    """A byte of a lock file, which one session of one process has at a time.

    Args:
        file: The file's descriptor, this process's only one.
        place: Which byte.
    """

    def __init__(self, file: int, place: int) -> None:
        self.file, self._place = file, place
        self._taken = threading.Lock()

    def take(self) -> bool:
        """Take it if nobody has it; return whether it is the caller's."""
        if not self._taken.acquire(blocking=False):
            return False
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place)
        except OSError as cause:
            self._taken.release()
            if cause.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def give(self) -> None:
        """Give it back."""
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, self._place)
        self._taken.release()

    def holder(self) -> int | None:
        """Return the process that has it, 0 for one that cannot be seen from here, None for nobody."""
        if self._taken.locked():
            return os.getpid()
        pid = byte_holder(self.file, self._place)
        return None if pid is None else max(pid, 0)


_lock_bytes: dict[tuple[int, int, int], list[LockByte]] = {}
"""Those of each lock file that this process has opened, by process, device and inode."""
_opening = threading.Lock()


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
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(descriptor, 0o666)  # whatever the umask
        os.close(descriptor)
    if not stat.S_ISREG(os.lstat(name).st_mode):
        raise OSError(f"{name} is not a file")
    return name


def lock_bytes(path: str | os.PathLike[str], holders: int = 1) -> list[LockByte]:
    """Return the bytes of a directory's lock: the line, then so many turns.

    Raises:
        OSError: As `lock_file`, or the file cannot be opened.
    """
    name = lock_file(path)
    with _opening:
        status = os.lstat(name)
        key = os.getpid(), status.st_dev, status.st_ino
        if key not in _lock_bytes:
            file = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            _lock_bytes[key] = [LockByte(file, 0)]
        found = _lock_bytes[key]
        found += [LockByte(found[0].file, place) for place in range(len(found), holders + 1)]
    return found[: holders + 1]


class TakingTurns(Owned):
    """A tier whose requests reach another one, in their order, while it has a turn on the path.

    A thread takes the turns. A turn ends when nothing is left to do, or after `Turns.turn_bytes` if somebody waits.

    Args:
        inner: The tier that does the work, opened on `inner_queue`; closed with this one.
        inner_queue: What `inner` reports to; nobody else waits on it.
        queue: Where completions go.
        turns: How turns are taken.

    Raises:
        TierError: There is no such lock, or there are no more threads.
    """

    def __init__(self, inner: Tier, inner_queue: CompletionQueue, queue: Queue, turns: Turns) -> None:
        super().__init__(inner.path)
        self.inner, self.name, self.depth = inner, inner.name, inner.depth
        self.cached, self.paid = inner.cached, inner.paid
        self._inner_queue, self._queue, self._settings = inner_queue, queue, turns
        self._wanted: deque[tuple[int, int, Callable[[], None]]] = deque()
        self._asked_s: float | None = None
        try:
            self._line, *self._turns = lock_bytes(turns.path or inner.path, turns.holders)
        except OSError as cause:
            raise _lock_error(inner.path, cause) from cause
        self._thread = threading.Thread(target=self._serve, name="offload-turns", daemon=True)
        with self.answering_for("open"):
            self._thread.start()

    def read(self, request: TileRequest) -> None:
        """See `Tier.read`."""
        self._submit("read", request.op, request.nbytes, partial(self.inner.read, request))

    def write(self, request: TileRequest) -> None:
        """See `Tier.write`."""
        self._submit("write", request.op, request.nbytes, partial(self.inner.write, request))

    def sync(self, op: int) -> None:
        """See `Tier.sync`."""
        self._submit("sync", op, SECTOR_BYTES, partial(self.inner.sync, op))  # a turn of syncs ends too

    def set_depth(self, depth: int) -> None:
        """See `Tier.set_depth`."""
        self.inner.set_depth(depth)
        self.depth = depth

    def allocate(self, nbytes: int) -> None:
        """See `Tier.allocate`."""
        self.inner.allocate(nbytes)

    def free_bytes(self) -> int:
        """See `Tier.free_bytes`."""
        return self.inner.free_bytes()

    def keep(self, offsets: Collection[int]) -> None:
        """See `Tier.keep`."""
        self.inner.keep(offsets)

    def waiting_for(self) -> str:
        """Return whose turn the tier is waiting for, for messages; "" if for none. Any thread."""
        asked_s = self._asked_s
        return "" if asked_s is None else self._describe_wait(time.monotonic() - asked_s)

    def close(self) -> None:
        """Finish what is in flight and close the inner tier; idempotent.

        Requests whose turn does not come within `Turns.report_after_s` complete with ETIMEDOUT: who has it may never
        move again.
        """
        if self.ends_here():
            self._inner_queue.post(WAKE)
            self._thread.join()
            self.inner.close()

    def _submit(self, operation: str, op: int, nbytes: int, start: Callable[[], None]) -> None:
        self.check_open(operation)
        self._wanted.append((op, nbytes, start))
        self._inner_queue.post(WAKE)

    # On the thread

    def _serve(self) -> None:
        while self._wanted or not self._closed:
            if not self._wanted:
                self._inner_queue.wait()
                continue
            try:
                turn = self._take_turn()
            except OSError as cause:
                self._fail(cause.errno or errno.EIO)
                continue
            self._use_turn()
            turn.give()

    def _take_turn(self) -> LockByte:
        """Line up and wait for a turn.

        Raises:
            TimeoutError: The tier is being closed, and no turn has come in time.
            OSError: The system refuses a lock.
        """
        patience_s = report_s = self._settings.report_after_s
        places: Sequence[LockByte] = [self._line]
        try:
            while True:
                taken = next((place for place in places if place.take()), None)
                if taken is self._line:
                    places = self._turns
                    continue
                if taken is not None:
                    return taken
                now_s = time.monotonic()
                self._asked_s = self._asked_s or now_s
                waited_s = now_s - self._asked_s
                if self._closed and waited_s >= patience_s:
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                if waited_s >= report_s:
                    report_s *= 2
                    _log.warning("%s", self._describe_wait(waited_s))
                # Not in the kernel, which would not let go of it; the wait gets longer by a fiftieth of itself.
                time.sleep(min(max(waited_s / 50, 2e-4), 0.05))
        finally:
            self._asked_s = None
            if places is self._turns:
                self._line.give()

    def _use_turn(self) -> None:
        """Pass requests on, and completions back, until the turn is over."""
        flying: dict[int, int] = {}
        moved = 0  # since the turn began, or since nobody was found waiting
        most, over = self._settings.turn_bytes, False
        while True:
            while self._wanted and not over and (not flying or sum(flying.values()) + self._wanted[0][1] <= most):
                if moved >= most:
                    over, moved = self._line.holder() is not None, 0
                    continue
                op, nbytes, start = self._wanted.popleft()
                flying[op] = nbytes
                moved += nbytes
                try:
                    start()
                except Exception as cause:  # a lane answers, whatever happens
                    _log.error("%s: %r", self.path, cause)
                    self._inner_queue.post(op, errno.ECANCELED)
            if not flying and over:
                return
            records = self._inner_queue.wait(-1.0 if flying else LINGER_S)
            if not flying and (self._closed or not records) and not self._wanted:
                return
            for record in records:
                if record[0] != WAKE:
                    del flying[record[0]]
                    self._queue.post(*record)

    def _fail(self, error: int) -> None:
        now_s = time.monotonic()
        while self._wanted:
            self._queue.post(self._wanted.popleft()[0], error, 0, now_s, now_s)

    def _describe_wait(self, waited_s: float) -> str:
        """Return a sentence about a turn that does not come: whose it is and what to do."""
        # The turns first: who has one is what all wait for.
        holder = next((pid for place in (*self._turns, self._line) if (pid := place.holder()) is not None), 0)
        who = f"process {holder}" if holder else "a process that cannot be seen from here (another container?)"
        story = f"waited {format_seconds(waited_s)} for a turn on path {self.path}, which {who} has"
        if holder and _is_stopped(holder):
            return f"{story}; it is stopped: continue it (kill -CONT {holder}) or end it"
        return story


def _lock_error(path: str, cause: OSError) -> TierError:
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
