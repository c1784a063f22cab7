"""A mirror: committed checkpoints are copied to a second place behind training, where each needs nothing else.

One thread a session copies one checkpoint at a time, the newest that has been committed by then (`part_copy`). While
a checkpoint is copied nobody releases it (`is_needed`), and its manifest stays in its folder.

Ranks. Rank 0 decides what is mirrored, and the others copy their parts of it once its progress file is there. A rank
has to know before it releases anything for the next checkpoint, so that one's `COMMIT` says so, too; between `claim`
and the end of a save rank 0 begins nothing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil

from offload import waits
from offload.checkpoint.commit import CommitJob, KeptCheckpoint
from offload.checkpoint.part_copy import Part, PartCopy
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.stores import is_read, store_folder
from offload.errors import CheckpointError, ConfigError
from offload.plan.budget import CHECKPOINT_BUFFERS
from offload.tiers import parse_place

log = logging.getLogger("offload")

RANKS_S = 6 * 3600.0
"""Seconds that a rank waits for others, which may have far more to copy, or a slower way to the mirror."""


@dataclass(slots=True, eq=False)
class _Task:
    """A checkpoint to mirror; `is_taken` once rank 0 has decided to."""

    source: str
    part: Part
    is_taken: bool = False
    done: waits.Latch = field(default_factory=waits.Latch)

    @property
    def id(self) -> str:
        return self.part.id


class _Interrupted(Exception):
    """The mirror was told to end; what it has copied stays."""


class Mirror:
    """The mirror of one session.

    Args:
        path: Directory or "s3://" prefix; None for no mirror, where nothing happens.
        paths: Where to look for stores; see `Checkpoint`.
        checksum: Whether tiles are verified.
        io_backend: Backend of stores in a directory.

    Attributes:
        copied_bytes: Bytes of tiles that this session has copied.
    """

    def __init__(self, path: str | None, paths: Sequence[str], *, checksum: bool, io_backend: str) -> None:
        self.copied_bytes = 0
        self._path, self._io_backend = path, io_backend
        self._open = partial(Checkpoint, verify=checksum, paths=paths, buffers=CHECKPOINT_BUFFERS)
        self._lock = threading.Lock()
        self._tasks: tuple[_Task, ...] = ()
        """Checkpoints to mirror, in their order; the first may be under way."""
        self._is_claimed = False
        self._reads: frozenset[tuple[str | None, uuid.UUID]] = frozenset()
        self._error: CheckpointError | None = None
        self._cancelled = threading.Event()
        # Not a condition: the main thread posts to it, where a Ctrl-C may come at any line.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = waits.BackgroundWork(self._run, "offload-mirror")

    def _target(self, source: str) -> str:
        """Return the folder that mirrors a checkpoint's."""
        above, last = source.rstrip("/").split("/")[-2:]
        name = f"{above}/{last}" if last.startswith("optimizer") else last
        return f"{(self._path or '').rstrip('/')}/{name}"

    def check(self, folder: str) -> None:
        """Verify that a checkpoint's folder is not its mirror.

        Raises:
            ConfigError: It is.
        """
        if self._path is None:
            return
        if parse_place(folder).parts() in [parse_place(p).parts() for p in (self._path, self._target(folder))]:
            raise ConfigError("path", folder, f"save to a folder outside of {self._path}, which is the mirror")

    # On the engine thread, and on the committing one

    def offer(
        self,
        source: str,
        id: str,
        rank: int,
        ranks: int,
        find_ended: Callable[[], Collection[int]] = tuple,
        *,
        is_new: bool = True,
    ) -> None:
        """Mirror a checkpoint next, in the place of another one that has not begun; see `Part`."""
        if self._path is None or any(task.id == id for task in self._tasks):
            return
        task = _Task(source, Part(self._target(source), id, rank, ranks, find_ended, is_new))
        with self._lock:
            passed = [each for each in self._tasks if not each.is_taken]
            self._tasks = (*(each for each in self._tasks if each.is_taken), task)
        for each in passed:
            log.info("the checkpoint %s in %s is not mirrored: there is a newer one", each.id, each.source)
            each.done.set()
        self._thread.start()
        self._news.put(None)

    def claim(self) -> str:
        """See `CommitJob.claim`."""
        with self._lock:
            self._is_claimed = True
            return next((task.id for task in self._tasks if task.is_taken), "")

    def end_claim(self) -> None:
        """Take note that the save that has claimed has ended."""
        self._is_claimed = False
        self._news.put(None)

    def told(self, id: str) -> None:
        """See `CommitJob.told`."""
        with self._lock:
            for task in self._tasks:
                task.is_taken |= task.id == id
        self._news.put(None)

    def is_needed(self, checkpoint: KeptCheckpoint) -> bool:
        """Return whether a checkpoint is being mirrored, or somebody else than the mirror reads its stores."""
        if any(task.is_taken and task.id == checkpoint.id for task in self._tasks):
            return True
        stores = ((place, store_folder(*place)) for place in checkpoint.stores)
        return any(is_read(store, own=place in self._reads) for place, store in stores)

    # On the caller's thread

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is left to mirror.

        Raises:
            CheckpointError: The checkpoint that was mirrored last could not be. It is there, and training may go on.
            TimeoutError: Something is left by then.
        """
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while tasks := self._tasks:
            left_s = None if timeout_s is None else max(until_s - time.monotonic(), 0.0)
            if not waits.wait_for(tasks[0].done.wait, partial("{} to be mirrored".format, tasks[0].source), left_s):
                raise TimeoutError(f"{tasks[0].source} is not mirrored after {timeout_s} s")
        if self._error is not None:
            raise self._error

    def close(self, patience_s: float, settle_s: float) -> None:
        """Wait so long for what is left to mirror, then give it up; whoever loads the checkpoint goes on with it."""
        if not self._thread.started:
            return
        if self._tasks and patience_s:
            log.info("waiting up to %.0f s for %s to be mirrored", patience_s, self._tasks[-1].source)
            with contextlib.suppress(CheckpointError, TimeoutError):
                self.wait(patience_s)
        for task in self._tasks:
            log.warning("%s is not mirrored yet: load_checkpoint of it goes on with that", task.source)
        waits.BackgroundWork(self._cancelled.set, "offload-mirror-end").start()  # a Ctrl-C would leave it half set
        self._news.put(None)
        waits.wait_for(self._thread.wait, lambda: "the mirror to end", settle_s)

    # On the mirror's thread

    def _run(self) -> None:
        with contextlib.suppress(psutil.Error, OSError, AttributeError):  # threads that it starts inherit it
            psutil.Process(threading.get_native_id()).ionice(psutil.IOPRIO_CLASS_BE, 7)
        while not self._cancelled.is_set():
            task = self._next()
            if task is None:
                self._news.get()
                continue
            try:
                if self._wait_for_first(task):
                    self._mirror(task)
                    self._drop(task, None)
            except _Interrupted:
                break
            except Exception as cause:
                log.warning("%s was not mirrored: %s", task.source, cause)
                if task.is_taken:
                    task.part.note_failure()
                self._drop(task, cause)
        for task in self._tasks:
            self._drop(task, CheckpointError("the session was closed"))

    def _next(self) -> _Task | None:
        """Return the checkpoint to mirror next, if there is one; rank 0 takes it by that."""
        with self._lock:
            task = next(iter(self._tasks), None)
            if task is not None and task.part.rank == 0 and not task.is_taken:
                task.is_taken = not self._is_claimed
                return task if task.is_taken else None
            return task

    def _drop(self, task: _Task, cause: Exception | None) -> None:
        with self._lock:
            is_there = task in self._tasks
            self._tasks = tuple(each for each in self._tasks if each is not task)
        if is_there:
            self._error = None
            if cause is not None:
                self._error = CheckpointError(f"{task.source} was not mirrored in {self._path}: {cause}")
                self._error.__cause__ = cause
            task.done.set()

    def _wait_for_first(self, task: _Task) -> bool:
        """Wait until rank 0 has begun to mirror a checkpoint; return False if it has passed it over."""
        silence, pause_s = waits.Silence(), 0.01
        while not task.is_taken:
            if self._cancelled.is_set():
                raise _Interrupted
            if silence.lasts_s > RANKS_S:
                raise CheckpointError("rank 0 has not begun to; see what it says")
            has_begun = task.part.has_begun()
            with self._lock:
                if task not in self._tasks:
                    return False
                task.is_taken |= has_begun
            if not task.is_taken:
                with contextlib.suppress(queue.Empty):
                    self._news.get(timeout=pause_s)
                pause_s = min(2 * pause_s, 1.0)
        return True

    def _mirror(self, task: _Task) -> None:
        part = task.part
        part.folder.prepare()
        if part.is_committed():
            return
        with contextlib.ExitStack() as ends:
            source = ends.enter_context(self._open(task.source, part=(part.id, part.rank, part.ranks)))
            (manifest,) = source.manifests
            read = {manifest.stores[ref.store] for ref in manifest.tiles.values()}
            self._reads = frozenset((ref.path, ref.store) for ref in read)
            # Before it closes them: somebody else's reader is not to be taken for this one.
            ends.callback(setattr, self, "_reads", frozenset())
            extra = source.extra(0)
            copy = PartCopy(part, source, self._io_backend)
            copy.begin()
            ends.callback(copy.close)
            try:
                for nbytes in copy.copy():
                    self.copied_bytes += nbytes
                    if self._cancelled.is_set():
                        raise _Interrupted
                copy.commit(
                    extra,
                    partial(
                        CommitJob,
                        older=(),
                        keep=1,
                        cancelled=self._cancelled,
                        find_ended=part.find_failed,
                        timeout_s=RANKS_S,
                    ),
                )
            except BaseException as cause:
                if self._cancelled.is_set():
                    copy.keep()
                    raise _Interrupted from cause
                copy.abandon()
                raise
        log.info("%s is mirrored in %s", task.source, part.folder.path)
