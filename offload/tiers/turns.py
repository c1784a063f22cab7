"""Processes and sessions that share a path take turns on it: a tier that passes requests on to another tier only
while it has a turn.

The lock is a set of POSIX record locks on bytes of a file that is never read: byte 0 is the head of the line, the
bytes after it are the turns. A process that wants a turn locks byte 0, then a turn, then unlocks byte 0: so one that
has just had a turn queues behind those that wait already. Such locks are freed when the process dies, by SIGKILL too,
even if children live on. They belong to the process: each file is opened once in it and stays open, as any close
would give its locks up, and its sessions exclude each other by a `threading.Lock` beside each byte. There is no
deadlock: while it has a turn, a session never waits for another path.

The lock means "this path's device is mine for now". Its file lies on the local machine, never on the path: the path
may be slow, full or on another machine.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from offload._native import CompletionQueue
from offload.errors import TierError
from offload.protocols import SECTOR_BYTES, WAKE, Queue, Tier, TileRequest
from offload.tiers.common import Owned, Turns
from offload.tiers.filesystem import byte_holder, identity
from offload.units import format_seconds

LOCK_DIRECTORIES = ("/dev/shm", "/tmp")
"""Directories for lock files; the first that exists is used. Environment variables (XDG_RUNTIME_DIR, TMPDIR) do not
count: all processes of a machine have to use the same one, however they were started."""

LINGER_S = 1e-3
"""Seconds that a turn is kept after its last request: the next may come when the caller has seen the completions."""

_log = logging.getLogger(__name__)


class LockByte:
    """A byte of a lock file, which at most one session has locked at a time.

    The byte's record lock excludes other processes; a `threading.Lock` excludes other sessions of this process.

    Args:
        file: The file's descriptor, this process's only one.
        position: Of the byte in the file.
    """

    def __init__(self, file: int, position: int) -> None:
        self.file = file
        self._position = position
        self._in_process = threading.Lock()  # locked by the session of this process that has the byte

    def try_acquire(self) -> bool:
        """Lock the byte if it is free; return whether that succeeded."""
        if not self._in_process.acquire(blocking=False):
            return False
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._position)
        except OSError as cause:
            self._in_process.release()
            if cause.errno in (errno.EAGAIN, errno.EACCES):  # POSIX allows either for a lock of another process
                return False
            raise
        return True

    def release(self) -> None:
        """Unlock the byte."""
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, self._position)
        self._in_process.release()  # last: else another session could lock the byte, and this would unlock it

    def holder(self) -> int | None:
        """Return the pid of the process that has the byte, or None; 0 for a process that cannot be seen from here."""
        if self._in_process.locked():
            return os.getpid()
        pid = byte_holder(self.file, self._position)
        return None if pid is None else max(pid, 0)


_lock_bytes: dict[tuple[int, int, int], list[LockByte]] = {}
"""The bytes of each lock file that this process has opened, by process, device and inode. A forked child inherits the
entries of its parent, whose locks are not its own; so it opens a file anew, under its own pid."""
_opening_lock = threading.Lock()


def lock_file(path: str | os.PathLike[str]) -> str:
    """Make the lock file of a directory if it is not there; return its path.

    It is empty and never deleted: else two processes could have locked two files of that name. Any user may lock it,
    as any user may write to its directory.

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
    """Return the bytes of a directory's lock: the line, then `holders` turns.

    Raises:
        OSError: As `lock_file`, or the file cannot be opened.
    """
    name = lock_file(path)
    with _opening_lock:
        status = os.lstat(name)
        key = os.getpid(), status.st_dev, status.st_ino
        if key not in _lock_bytes:
            file = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            _lock_bytes[key] = [LockByte(file, 0)]
        known_bytes = _lock_bytes[key]
        # An earlier caller may have needed fewer turns, or more.
        known_bytes += [LockByte(known_bytes[0].file, position) for position in range(len(known_bytes), holders + 1)]
    return known_bytes[: holders + 1]


class _Request(NamedTuple):
    """A request that waits for a turn: `start` passes it on to the inner tier."""

    op: int
    nbytes: int
    start: Callable[[], None]


class TakingTurns(Owned):
    """A `Tier` (which describes the methods) that passes requests to another one while it has a turn on the path.

    A thread takes the turns. A turn ends when no requests are left, or after `Turns.turn_bytes` if another process
    waits.

    Args:
        inner: The tier that does the I/O, opened on `inner_queue`; closed with this one.
        inner_queue: The queue that `inner` reports to, and on which this tier's thread alone waits.
        queue: Where completions go.
        turns: How turns are taken.

    Raises:
        TierError: There is no such lock, or there are no more threads.
    """

    def __init__(self, inner: Tier, inner_queue: CompletionQueue, queue: Queue, turns: Turns) -> None:
        super().__init__(inner.path)
        self.inner = inner
        self.name, self.depth = inner.name, inner.depth
        self.cached, self.paid = inner.cached, inner.paid
        self._inner_queue = inner_queue
        self._queue = queue
        self._turn_settings = turns
        self._requests: deque[_Request] = deque()  # not passed on yet
        self._waiting_since_s: float | None = None  # for a turn, on the monotonic clock; None while it does not wait
        try:
            self._line, *self._turns = lock_bytes(turns.path or inner.path, turns.holders)
        except OSError as cause:
            raise _lock_error(inner.path, cause) from cause
        self._thread = threading.Thread(target=self._serve, name="offload-turns", daemon=True)
        with self.raising_tier_error("open"):
            self._thread.start()

    def read(self, request: TileRequest) -> None:
        self._submit("read", request.op, request.nbytes, partial(self.inner.read, request))

    def write(self, request: TileRequest) -> None:
        self._submit("write", request.op, request.nbytes, partial(self.inner.write, request))

    def sync(self, op: int) -> None:
        # A sync moves no bytes; it counts as a sector, so that a turn of nothing but syncs ends, too.
        self._submit("sync", op, SECTOR_BYTES, partial(self.inner.sync, op))

    def set_depth(self, depth: int) -> None:
        """Change the depth of the inner tier."""
        self.inner.set_depth(depth)
        self.depth = depth

    def allocate(self, nbytes: int) -> None:
        self.inner.allocate(nbytes)

    def free_bytes(self) -> int:
        return self.inner.free_bytes()

    def check_in_place(self) -> None:
        self.inner.check_in_place()

    def keep(self, offsets: Collection[int]) -> None:
        self.inner.keep(offsets)

    def waiting_for(self) -> str:
        """Return, for messages, which process's turn this tier waits for; "" if it does not wait. Any thread."""
        since_s = self._waiting_since_s
        return "" if since_s is None else self._describe_wait(time.monotonic() - since_s)

    def close(self) -> None:
        """Finish what is in flight and close the inner tier; idempotent.

        Requests that get no turn within `Turns.report_after_s` complete with ETIMEDOUT, as the process that has the
        turn may be stopped.
        """
        if self.mark_closed():
            self._inner_queue.post(WAKE)
            self._thread.join()
            self.inner.close()

    def _submit(self, operation: str, op: int, nbytes: int, start: Callable[[], None]) -> None:
        """Queue a request for the next turn, and wake the thread."""
        self.check_open(operation)
        self._requests.append(_Request(op, nbytes, start))
        self._inner_queue.post(WAKE)

    # On the thread

    def _serve(self) -> None:
        """While there are requests: acquire a turn, use it, release it; until the tier is closed."""
        while self._requests or not self._closed:
            if not self._requests:
                self._inner_queue.wait()  # nothing is in flight, so what comes are `WAKE`s only
                continue
            try:
                turn = self._acquire_turn()
            except OSError as cause:
                self._fail_all(cause.errno or errno.EIO)
                continue
            self._use_turn()
            turn.release()

    def _acquire_turn(self) -> LockByte:
        """Wait for the head of the line and lock it, then wait for any turn and lock it; return the turn.

        `candidates` are the bytes that are tried: first the line, and once that is locked, the turns. The line is
        unlocked at the end.

        Raises:
            TimeoutError: The tier is being closed, and no turn has come in time.
            OSError: The system refuses a lock.
        """
        patience_s = self._turn_settings.report_after_s
        report_s = patience_s  # the wait after which the next warning is due
        candidates: Sequence[LockByte] = [self._line]
        try:
            while True:
                acquired = next((candidate for candidate in candidates if candidate.try_acquire()), None)
                if acquired is self._line:
                    candidates = self._turns
                    continue
                if acquired is not None:
                    return acquired
                now_s = time.monotonic()
                self._waiting_since_s = self._waiting_since_s or now_s
                waited_s = now_s - self._waiting_since_s
                if self._closed and waited_s >= patience_s:
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                if waited_s >= report_s:
                    report_s *= 2
                    _log.warning("%s", self._describe_wait(waited_s))
                # Polled, as `close` cannot end a wait in the kernel; pauses are a fiftieth of the wait so far.
                time.sleep(min(max(waited_s / 50, 2e-4), 0.05))
        finally:
            self._waiting_since_s = None
            if candidates is self._turns:  # so the line was locked
                self._line.release()

    def _start(self, request: _Request) -> None:
        """Start a request's operation, which is completed whatever happens."""
        try:
            request.start()
        except Exception as cause:
            _log.error("%s: %r", self.path, cause)
            # On the inner queue, as the inner tier would: `_use_turn` ends the request and passes this on.
            self._inner_queue.post(request.op, errno.ECANCELED)

    def _use_turn(self) -> None:
        """Pass requests on, and completions back, until the turn is over.

        After each `Turns.turn_bytes` it is asked whether another process waits: then no request is started any more,
        and the turn is over once nothing is in flight. It is also over if nothing is in flight and no request comes
        for `LINGER_S`, or the tier is closed.
        """
        bytes_in_flight: dict[int, int] = {}  # by operation
        moved_bytes = 0  # since the turn began, or since no process was found waiting
        limit_bytes = self._turn_settings.turn_bytes
        is_over = False
        while True:
            while self._requests and not is_over and self._may_start(self._requests[0], bytes_in_flight):
                if moved_bytes >= limit_bytes:
                    is_over = self._line.holder() is not None  # another process waits
                    moved_bytes = 0
                    continue
                request = self._requests.popleft()
                bytes_in_flight[request.op] = request.nbytes
                moved_bytes += request.nbytes
                self._start(request)
            is_idle = not bytes_in_flight
            if is_idle and is_over:
                return
            completions = self._inner_queue.wait(LINGER_S if is_idle else -1.0)  # -1.0: as long as it takes
            if is_idle and (self._closed or not completions) and not self._requests:
                return  # nobody has asked for more
            for completion in completions:
                op = completion[0]
                if op != WAKE:
                    del bytes_in_flight[op]
                    self._queue.post(*completion)

    def _may_start(self, request: _Request, bytes_in_flight: Mapping[int, int]) -> bool:
        """Return whether a request may go on beside those in flight; a larger one than a turn's bytes goes alone."""
        if not bytes_in_flight:
            return True
        return sum(bytes_in_flight.values()) + request.nbytes <= self._turn_settings.turn_bytes

    def _fail_all(self, error: int) -> None:
        """Complete all waiting requests with an error of the system."""
        now_s = time.monotonic()
        while self._requests:
            self._queue.post(self._requests.popleft().op, error, 0, now_s, now_s)

    def _describe_wait(self, waited_s: float) -> str:
        """Return a sentence about a long wait for a turn: which process has it, and what to do."""
        # The turns are asked before the line: whoever has the line waits for a turn, too.
        holder = next((pid for lock_byte in (*self._turns, self._line) if (pid := lock_byte.holder()) is not None), 0)
        # 0: a process whose pid is not known; or no process, as all has been released since the last try.
        who = f"process {holder}" if holder else "a process that cannot be seen from here (another container?)"
        story = f"waited {format_seconds(waited_s)} for a turn on path {self.path}, which {who} has"
        if holder and _is_stopped(holder):
            return f"{story}; it is stopped: continue it (kill -CONT {holder}) or end it"
        return story


def _lock_error(path: str, cause: OSError) -> TierError:
    """Return the error for a lock file that cannot be used."""
    return TierError(
        "lock",
        tier="file",
        path=path,
        errno=cause.errno,
        detail=f'{cause.strerror or cause} ({cause.filename}); use path_lock "off" to go without taking turns',
    )


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by a signal or a debugger, as far as that can be seen."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        # The process's name may contain anything, even brackets; the state follows the last one.
        return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    return False
