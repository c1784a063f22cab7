"""A mirror: committed checkpoints are copied in the background to a second place, where each needs nothing else.

One thread a session copies one checkpoint at a time, the newest that has been committed by then. While a checkpoint
is copied it is not released (`is_needed`), and its manifest stays in its folder.

Ranks. Rank 0 decides which checkpoint is mirrored, and the others copy their parts of it once rank 0's progress file
exists. A rank has to know the decision before it releases anything for the next checkpoint, so the `COMMIT` of that
names it, too; between `pause_mirroring` and the end of a save rank 0 begins to mirror nothing. Rank 0 may begin to
mirror a checkpoint while a newer one arrives, so the others skip a checkpoint only when rank 0 has begun a newer one,
or a `COMMIT` says that rank 0 has not begun the one in question.

Parts. Each rank copies its own part, unchanged, and commits it in the mirror's folder. A progress file there names
the rank's stores in that folder, and how many tiles are durable in each. After a crash the same part is continued:
the other tiles are copied into a new store. An interrupted store is not written to again, so no kind of path has to
support that. Ranks tell each other by such files:

    rank 0's progress file exists: the others are to copy their parts
    rank 0's progress file does not exist, and there is no `COMMIT`: rank 0 has given up
    a rank's failure file exists: the others are to give up; it is kept until the folder mirrors another checkpoint
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice

import msgspec
import psutil

from offload import metrics, waits
from offload._native import CompletionQueue
from offload.checkpoint.commit import CommitJob, KeptCheckpoint, note_failure
from offload.checkpoint.contents import read_commit, read_manifest
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import (
    FAILURE,
    MODEL_KEY,
    Manifest,
    MirrorProgress,
    StoreRef,
    TileRef,
    failure_name,
    model_name,
    seal_progress,
    unseal_progress,
)
from offload.checkpoint.marker import Mark, is_interrupted, marked_around
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.request import SaveRequest
from offload.checkpoint.stores import commit_to_replace, is_read, judge, remove, store_folder
from offload.checkpoint.whole import FolderCopy, Seen, WholeFolder, delete_copy
from offload.errors import CheckpointError, ConfigError, OffloadError
from offload.plan.budget import CHECKPOINT_BUFFERS
from offload.protocols import Tier, TileId
from offload.tiers import StoreOptions, open_tier, parse_place, slot_bytes
from offload.tiers.place import Folder
from offload.units import format_bytes

log = logging.getLogger("offload")

RANKS_S = 6 * 3600.0
"""Seconds that a rank waits for others, which may have far more to copy, or a slower way to the mirror."""

KNOWN_S = 5.0
"""Seconds that the release of a checkpoint waits until it is known which stores the mirror reads."""

BATCH_BYTES = 256 << 20
"""Bytes after which copied tiles are made durable and noted; also the step in which a store grows."""


@dataclass(slots=True, eq=False)
class Task:
    """One thing to mirror: this rank's part of a checkpoint, and on rank 0 the framework's files around it.

    Attributes:
        source: The folder.
        part: None where no checkpoint of ours is in it.
        files: The copy of the framework's files; None where a checkpoint is mirrored alone, and on other ranks.
        failure: Why the files could not be opened; None if they could, or there are none.
        is_new: Whether the source has just been saved; else it was loaded, and may have been mirrored in part.
        session_run: Names the training that the session is of, where there are files.
        is_taken: Whether rank 0 has decided to mirror the source.
        done: Set when the source has been mirrored, skipped or given up.
    """

    source: str
    part: RankPart | None
    files: FolderCopy | None = None
    failure: OSError | None = None
    is_new: bool = True
    session_run: str = ""
    is_taken: bool = False
    done: waits.Latch = field(default_factory=waits.Latch)

    @property
    def id(self) -> str:
        """The checkpoint's id; "" where there is none."""
        return "" if self.part is None else self.part.request.id

    @property
    def run(self) -> str:
        """Names the training that the source is of; "" if nobody knows."""
        if self.part is None:
            return self.session_run
        with contextlib.suppress(CheckpointError):  # the source may be gone, and its files open
            return self.part.run
        return ""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone has tasks without a part."""
        return self.part is None or self.part.request.rank == 0


class _Interrupted(Exception):
    """The mirror was told to end; what it has copied stays."""


class Mirror:
    """The mirror of one session.

    Args:
        path: Directory or "s3://" prefix; None for no mirror, where nothing happens.
        paths: Where to look for stores; see `Checkpoint`.
        verify: Whether tiles are verified.
        io_backend: Backend of stores in a directory.

    Attributes:
        copied_bytes: Bytes of tiles and files that this session has copied.
    """

    def __init__(self, path: str | None, paths: Sequence[str], *, verify: bool, io_backend: str) -> None:
        self.copied_bytes = 0
        # Made absolute: the working directory may change.
        self._path = path and parse_place(path).name
        self._device = _device_of(self._path)
        self._io_backend = io_backend
        self._open_checkpoint = partial(Checkpoint, verify=verify, paths=paths, buffers=CHECKPOINT_BUFFERS)
        self._lock = threading.Lock()
        self._tasks: tuple[Task, ...] = ()
        """Checkpoints to mirror, in their order; the first may be under way."""
        self._is_mirroring_paused = False
        self._run_folders = Seen()
        self._unfinished: WholeFolder | None = None
        """The folder whose copy was begun last and is not whole: it is deleted to make room for the next one."""
        self._reads: frozenset[tuple[str | None, uuid.UUID]] = frozenset()  # the stores that the mirror reads
        self._is_known = threading.Event()
        """Cleared while stores are opened or closed: `_reads` may then lack stores that the mirror reads."""
        self._is_known.set()
        self._error: CheckpointError | None = None  # of the task that has ended last
        self._cancelled = threading.Event()
        # Wakes the mirror's thread. Not a condition: the main thread posts, where a Ctrl-C may come at any line.
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = waits.BackgroundWork(self._run, "offload-mirror")

    def metrics(self) -> dict[str, float]:
        """Return the mirror's figures; none where there is no mirror."""
        return {} if self._path is None else {metrics.MIRRORED_BYTES: self.copied_bytes}

    def _target(self, source: str) -> str:
        """Return the folder that mirrors a checkpoint's folder, by its name.

        For "a/optimizer..." by both names, as each folder "a" of a framework has an "optimizer" in it.
        """
        above, last = source.rstrip("/").split("/")[-2:]
        name = f"{above}/{last}" if last.startswith("optimizer") else last
        return f"{(self._path or '').rstrip('/')}/{name}"

    def check(self, folder: str) -> None:
        """Raise `ConfigError` if a checkpoint's folder is the mirror, or would be mirrored in itself."""
        if self._path is None:
            return
        forbidden = (self._path, self._target(folder))
        if parse_place(folder).parts() in [parse_place(path).parts() for path in forbidden]:
            raise ConfigError("path", folder, f"save to a folder outside of {self._path}, which is the mirror")

    # On the engine thread, and on the committing one

    def offer(self, saved: SaveRequest, *, is_new: bool = True) -> None:
        """Queue a save's checkpoint to be mirrored next, in place of others that have not begun.

        Nothing is queued without a mirror, nor for a checkpoint in a framework's folder: the folder is mirrored as a
        whole. `is_new` is False for a loaded one.
        """
        if self._path is None:
            return
        source = os.fspath(saved.path)
        around, mark = marked_around(source)
        if mark is Mark.WHOLE:
            log.warning(
                "%s is not mirrored, as %s is a whole folder: save in a new `checkpoint_folder`", source, around
            )
        elif mark is Mark.NONE or is_interrupted(around):  # else it goes with the folder that it is in
            self.queue_task(Task(source, _part_of(saved, self._target(source), is_new), is_new=is_new))

    def offer_folder(
        self, whole: WholeFolder, saved: SaveRequest | None, run: str, *, is_first: bool, is_new: bool
    ) -> None:
        """Queue a framework's folder to be mirrored next, as `offer` does a checkpoint; not one in the mirror itself.

        On rank 0 the folder's files are open when this returns, so that the caller may delete them.

        Args:
            whole: The folder; all ranks name the same.
            saved: The checkpoint in it, if there is one, as for `offer`.
            run: Names the training that the session is of.
            is_first: Whether this is rank 0; other ranks have nothing to do where there is no checkpoint.
            is_new: Whether it has just been saved; else it was loaded, and may have been mirrored in part.
        """
        source = whole.source()
        mirror = (self._path or "").rstrip("/")
        if not mirror or (saved is None and not is_first):
            return
        source_parts = parse_place(source).parts()
        mirror_parts = parse_place(mirror).parts()
        if source_parts[: len(mirror_parts)] == mirror_parts:
            return
        part = None if saved is None else _part_of(saved, f"{mirror}/{whole.checkpoint}", is_new)
        files = failure = None
        try:
            files = FolderCopy(whole, mirror, is_new=is_new) if is_first else None
        except OSError as cause:  # raised in the mirror's thread, so that other ranks hear of it
            failure = cause
        if is_new:  # a loaded folder may be another run's, of which nothing is to be deleted
            self._run_folders.note(whole)
        for task in self._tasks:
            if task.is_taken:
                log.info("%s is still being mirrored: %s copied so far", task.source, format_bytes(self.copied_bytes))
        self.queue_task(Task(source, part, files, failure, is_new, run))

    def queue_task(self, task: Task) -> None:
        """Append a task to the queue, and wake the mirror's thread; a task that is not needed is closed at once.

        Not needed is a task whose checkpoint is queued already. On rank 0, that of a loaded checkpoint is not needed
        beside any other, as it is no newer and nothing waits for it.
        """
        with self._lock:
            is_needless = bool(task.id) and any(queued.id == task.id for queued in self._tasks)
            is_needless |= not task.is_new and task.is_first and bool(self._tasks)
            if not is_needless:
                self._tasks = (*self._tasks, task)
        if is_needless:
            self._close_task(task)
        elif task.is_first:  # other ranks skip what rank 0 has skipped, once they know
            self._skip_before(task)
        self._thread.start()
        self._news.put(None)

    def _skip_before(self, newer: Task) -> None:
        """Remove the tasks before a newer one from the queue, except one that has been taken."""
        with self._lock:
            # `newer` may have been skipped itself by now, for one that came after it.
            earlier = self._tasks[: self._tasks.index(newer)] if newer in self._tasks else ()
            skipped = [task for task in earlier if not task.is_taken]
            self._tasks = tuple(task for task in self._tasks if task not in skipped)
        for task in skipped:
            log.info("%s is not mirrored: there is a newer one", task.source)
            self._close_task(task)

    def _close_task(self, task: Task) -> None:
        """Close a task's files, and tell those who wait for it; it is not in the queue any more."""
        if task.files is not None:
            task.files.close()
        task.done.set()

    def pause_mirroring(self) -> str:
        """Mirror no further checkpoint until `resume_mirroring`; return the id of the one being mirrored, or ""."""
        with self._lock:
            self._is_mirroring_paused = True
            return next((task.id for task in self._tasks if task.is_taken and task.id), "")

    def resume_mirroring(self) -> None:
        """Let mirroring begin again: the save that has called `pause_mirroring` has ended."""
        self._is_mirroring_paused = False
        self._news.put(None)

    def note_mirrored(self, id: str) -> None:
        """On ranks other than 0: note, when a `COMMIT` is read, that rank 0 mirrors the checkpoint `id` and no other.

        What rank 0 has not taken by now it has skipped, except the newest.
        """
        with self._lock:
            for task in self._tasks:
                task.is_taken |= task.id == id
            newest = self._tasks[-1] if self._tasks else None
        if newest is not None:
            self._skip_before(newest)
        self._news.put(None)

    def has_taken(self, id: str) -> bool:
        """Return whether a checkpoint is being mirrored."""
        return any(task.is_taken and task.id == id for task in self._tasks)

    def is_needed(self, checkpoint: KeptCheckpoint) -> bool:
        """Return whether a checkpoint is being mirrored, or its stores have a reader other than the mirror."""
        if self.has_taken(checkpoint.id):
            return True
        self._is_known.wait(KNOWN_S)  # so that the mirror's own reading is not taken for another's
        # The mirror reads a store at most once.
        return any(is_read(store_folder(*place), own=int(place in self._reads)) for place in checkpoint.stores)

    # On the caller's thread

    def note_error(self, error: CheckpointError) -> None:
        """Let `wait` raise an error: the task that was to be mirrored last could not be begun."""
        self._error = error

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is left to mirror, for at most `timeout_s`, if that is given.

        Raises:
            CheckpointError: The checkpoint that was mirrored last could not be. It is there, and training may go on.
            TimeoutError: Something is left by then.
        """
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while tasks := self._tasks:  # replaced, not changed, by other threads
            first = tasks[0]
            left_s = None if timeout_s is None else max(until_s - time.monotonic(), 0.0)
            if not waits.wait_for(first.done.wait, partial("{} to be mirrored".format, first.source), left_s):
                raise TimeoutError(f"{first.source} is not mirrored after {timeout_s} s")
        if self._error is not None:
            raise self._error

    def close(self, patience_s: float, settle_s: float) -> None:
        """Wait up to `patience_s` for what is left to mirror, then end the thread, within `settle_s`."""
        if not self._thread.started:  # nothing was ever queued
            return
        if self._tasks and patience_s:
            log.info("waiting up to %.0f s for %s to be mirrored", patience_s, self._tasks[-1].source)
            with contextlib.suppress(CheckpointError, TimeoutError):
                self.wait(patience_s)
        for task in self._tasks:
            log.warning("%s is not mirrored yet: load_checkpoint of it goes on with that", task.source)
        waits.apart(self._cancelled.set, "offload-mirror-end", lambda: "")  # a Ctrl-C would leave it half set
        self._news.put(None)
        waits.wait_for(self._thread.wait, lambda: "the mirror to end", settle_s)

    # On the mirror's thread

    def _run(self) -> None:
        """Mirror what is queued, one task at a time, until the mirror is closed."""
        # Other reads and writes go first: 7 is the last priority, which threads that this one starts inherit.
        with contextlib.suppress(psutil.Error, OSError, AttributeError):
            psutil.Process(threading.get_native_id()).ionice(psutil.IOPRIO_CLASS_BE, 7)
        while not self._cancelled.is_set():
            task = self._take_next()
            if task is None:  # nothing is queued, or mirroring is paused
                self._news.get()
                continue
            try:
                self._check_in_place()
                if self._wait_for_rank_0(task):
                    self.mirror_task(task)
                    self._finish_task(task, cause=None)
            except _Interrupted:  # `close` ends the mirror
                break
            except Exception as cause:
                log.warning("%s was not mirrored: %s", task.source, cause)
                if task.is_taken and task.part is not None:
                    task.part.note_failure()
                self._finish_task(task, cause)
        for task in self._tasks:
            self._finish_task(task, CheckpointError("the session was closed"))

    def _check_in_place(self) -> None:
        """Raise unless the mirror is where it was: where it was unmounted, copies would fill the disk below."""
        if _device_of(self._path) != self._device:
            advice = "mount or make it, or begin a new session if it was mounted anew"
            raise CheckpointError(f"it is not there, or lies on another device than when the session began: {advice}")

    def _take_next(self) -> Task | None:
        """Return the queue's first task, if there is one; on rank 0 it is taken from then on, unless paused."""
        with self._lock:
            task = self._tasks[0] if self._tasks else None
            if task is not None and task.is_first and not task.is_taken:
                if self._is_mirroring_paused:
                    return None
                task.is_taken = True
            return task

    def _finish_task(self, task: Task, cause: Exception | None) -> None:
        """Remove a task that has ended from the queue, and keep its error, or that it had none, for `wait`."""
        with self._lock:
            was_queued = task in self._tasks
            self._tasks = tuple(queued for queued in self._tasks if queued is not task)
        if was_queued:  # else `_skip_before` has closed it
            self._error = None
            if cause is not None:
                self._error = CheckpointError(f"{task.source} was not mirrored in {self._path}: {cause}")
                self._error.__cause__ = cause
            self._close_task(task)

    def _wait_for_rank_0(self, task: Task) -> bool:
        """Wait until rank 0 has begun to mirror a checkpoint; return False if it has skipped it for a newer one.

        On rank 0 the task is taken already.
        """
        silence = waits.Silence()
        pause_s = 0.01
        while not task.is_taken:
            if self._cancelled.is_set():
                raise _Interrupted
            if silence.lasts_s > RANKS_S:
                raise CheckpointError("rank 0 has not begun to; see what it says")
            for queued in reversed(self._tasks):  # newest first
                if queued.part is not None and queued.part.has_begun():
                    queued.is_taken = True
                    self._skip_before(queued)
                    break
            if task not in self._tasks:  # `_skip_before` has removed it
                return False
            if not task.is_taken:
                silence.wait(self._wait_for_news, pause_s)
                pause_s = min(2 * pause_s, 1.0)
        return True

    def _wait_for_news(self, pause_s: float) -> bool:
        """Wait for a note that there is a new task, or to end; return whether it has come."""
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=pause_s)
            return True
        return False

    def mirror_task(self, task: Task) -> None:
        """Copy what a task names: this rank's part of a checkpoint; on rank 0 also the files around it."""
        if task.failure is not None:
            raise task.failure
        if task.part is not None and task.is_first:
            task.part.check_run()
        if task.files is not None:
            self._mirror_files(task, task.files)
        elif task.part is not None and self._copy_part(task.part):
            log.info("%s is mirrored in %s", task.source, self._path)

    def _mirror_files(self, task: Task, files: FolderCopy) -> None:
        """On rank 0: copy a framework's folder, then delete copies of folders that were deleted from the run's.

        A folder that was loaded, not saved, may be a copy of another run's: a whole folder of its name in the mirror
        stays whole, and nothing is deleted for it. An earlier task's unfinished copy is deleted first, to make room.
        """
        if self._unfinished is not None and self._unfinished.name != files.whole.name:
            delete_copy(self._unfinished, files.mirror, is_unfinished=True)
            self._unfinished = None
        has_begun = files.begin(task.run)  # False: the copy in the mirror is whole, and stays so
        if has_begun:
            self._unfinished = files.whole
        stays_whole = not has_begun and not task.is_new
        has_copied_part = task.part is not None and not stays_whole and self._copy_part(task.part)
        if has_begun:
            for nbytes in files.copy():
                self._note_copied(nbytes)
            files.commit()
        if has_begun or has_copied_part:
            log.info("%s is mirrored in %s", task.source, files.target)
        self._unfinished = None
        if task.is_new:
            self._delete_siblings(files, task.run)

    def _delete_siblings(self, files: FolderCopy, run: str) -> None:
        """Delete the mirror's copies of folders that were beside a folder in the run's, and were deleted there."""
        for deleted in self._run_folders.deleted_siblings(files.whole):
            try:
                copy = open_folder(f"{files.mirror}/{deleted.checkpoint}") if deleted.checkpoint else None
                if copy is not None and _find_other_run(copy, run) is not None:
                    continue  # it was not mirrored, as another run's copy has its name
                if delete_copy(deleted, files.mirror, run):
                    log.info("%s has gone, and goes from the mirror", deleted.source())
            except OffloadError as cause:
                log.warning("%s stays in the mirror: %s", deleted.source(), cause)

    def _note_copied(self, nbytes: int) -> None:
        """Count bytes that have become durable in the mirror; raise `_Interrupted` if the mirror is being closed."""
        self.copied_bytes += nbytes
        if self._cancelled.is_set():
            raise _Interrupted

    def _copy_part(self, part: RankPart) -> bool:
        """Copy this rank's part of a checkpoint, unless all of that is there; return whether it was copied."""
        request = part.request
        part.folder.prepare()
        if part.is_committed():
            return False
        with self._open_part(part) as source, contextlib.ExitStack() as ends:
            extra = source.extra(0)  # of the one manifest that is open, this rank's
            copy = RankPartCopy(part, source, self._io_backend)
            copy.begin()
            ends.callback(copy.close)
            try:
                for nbytes in copy.copy():
                    self._note_copied(nbytes)
                copy.commit(extra, self._cancelled)
            except BaseException as cause:
                if self._cancelled.is_set():
                    copy.keep()
                    raise _Interrupted from cause
                if request.find_ended():  # a rank has died: a restarted run continues this copy
                    copy.keep()
                else:
                    copy.abandon()
                raise
        return True

    @contextlib.contextmanager
    def _open_part(self, part: RankPart) -> Iterator[Checkpoint]:
        """Open this rank's part of a checkpoint; `_reads` has the stores that it reads, while `_is_known` is set."""
        request = part.request
        with contextlib.ExitStack() as ends:
            self._is_known.clear()
            ends.callback(self._is_known.set)
            rank_part = (request.id, request.rank, request.ranks)
            source = ends.enter_context(self._open_checkpoint(part.source, part=rank_part))
            (manifest,) = source.manifests
            read = {manifest.stores[ref.store] for ref in manifest.tiles.values()}
            self._reads = frozenset((ref.path, ref.store) for ref in read)
            self._is_known.set()
            # Cleared before the stores are closed: another reader of them must not be taken for this one.
            ends.callback(setattr, self, "_reads", frozenset())
            ends.callback(self._is_known.clear)
            yield source


def _device_of(path: str | None) -> str:
    """Return the device that a mirror lies on; "" if it is not there, or there is none."""
    with contextlib.suppress(ConfigError):
        return "" if path is None else parse_place(path).facts()["device"]
    return ""


# One rank's part


def _part_of(saved: SaveRequest, target: str, is_new: bool) -> RankPart:
    """Return this rank's part of a save's checkpoint, to be copied to the folder `target`."""
    same = {name: getattr(saved, name) for name in ("id", "rank", "ranks", "find_ended")}
    return RankPart(SaveRequest(target, copy=True, **same), os.fspath(saved.path), is_new)


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a checkpoint in a folder that mirrors another.

    Attributes:
        request: The save of its copy, in the folder that mirrors it.
        source: The folder that the checkpoint is in.
        is_new: Whether the checkpoint has just been saved, so that no earlier session has tried to copy it.
    """

    request: SaveRequest
    source: str
    is_new: bool

    @cached_property
    def folder(self) -> Folder:
        """The folder, opened when it is first used: a bucket's client takes its time."""
        return open_folder(self.request.path)

    def progress_name(self, rank: int | None = None) -> str:
        """Return the name of a rank's progress file; of this one's if no rank is given."""
        return f"mirror-{self.request.id}-{self.request.rank if rank is None else rank}.json"

    def is_committed(self) -> bool:
        """Return whether the folder holds the checkpoint."""
        commit = commit_to_replace(self.folder)
        return commit is not None and commit.id == self.request.id

    @cached_property
    def run(self) -> str:
        """Names the training that the checkpoint is of; "" where its version did not say."""
        return read_manifest(open_folder(self.source), self.request.id, 0, self.request.ranks).run

    def check_run(self) -> None:
        """Raise if the folder holds a checkpoint of another training, as two of them may have folders of one name.

        Raises:
            CheckpointError: It does; nothing there is replaced.
        """
        other = None if self.is_committed() else _find_other_run(self.folder, self.run)
        if other is not None:
            raise CheckpointError(
                f"{self.folder.path} holds a checkpoint of another run, of step {other.step}, saved on {other.host}: "
                "give this run a mirror of its own, or delete that checkpoint"
            )

    def has_begun(self) -> bool:
        """Return whether rank 0 has begun, and has not given up.

        Raises:
            CheckpointError: Rank 0 has failed before this rank could see that it had begun.
        """
        names = self.folder.names()
        if self.is_new and failure_name(self.request.id, 0) in names:  # else it may be of an earlier session's copy
            raise CheckpointError("rank 0 has failed; see what it says")
        return self.progress_name(0) in names or self.is_committed()

    def note_failure(self) -> None:
        """Tell the other ranks that this one has failed."""
        with contextlib.suppress(OffloadError):  # the folder cannot be opened
            note_failure(self.folder, self.request)

    def find_failed(self) -> list[int]:
        """Return the ranks that will not do their parts: they have ended, failed or, as rank 0, given up."""
        names = self.folder.names()
        failed = [rank for rank in range(self.request.ranks) if failure_name(self.request.id, rank) in names]
        given_up = [] if self.progress_name(0) in names else [0]
        return [*self.request.find_ended(), *failed, *given_up]


def _find_other_run(folder: Folder, run: str) -> Manifest | None:
    """Return rank 0's manifest of the checkpoint in a folder, if it is known to be of another training; else None."""
    with contextlib.suppress(CheckpointError):  # it is damaged, or not there
        commit = read_commit(folder)
        manifest = read_manifest(folder, commit.id, 0, commit.ranks)
        return manifest if "" not in (run, manifest.run) and manifest.run != run else None
    return None


@dataclass(slots=True)
class RankPartCopy:
    """The work on one part: `begin`, every batch of `copy`, `commit`; then `keep` or `abandon`, and `close`.

    Attributes:
        part: The part to copy.
        source: The checkpoint, with this rank's part open.
        io_backend: Backend of a store in a directory.
        progress: The stores that have been written, with the tiles in them.
        sink: The store that is being written.
        job: The commit, once it has begun.
    """

    part: RankPart
    source: Checkpoint
    io_backend: str
    progress: MirrorProgress = field(default_factory=MirrorProgress)
    sink: Tier | None = None
    job: CommitJob | None = None

    @property
    def manifest(self) -> Manifest:
        """The part's manifest, in the checkpoint that is copied."""
        return self.source.manifests[0]

    def begin(self) -> None:
        """Find what an earlier session has copied, delete what of it is useless, and note that this rank has begun.

        Raises:
            CheckpointError: Another session is copying this part.
        """
        part = self.part
        self.progress = self._take_up_progress()
        if part.request.rank == 0:
            for name in part.folder.names():
                if FAILURE.fullmatch(name):  # of an earlier copy: other ranks would give up because of it
                    part.folder.delete(name)
        self._write_progress(*self.progress.stores)

    def _take_up_progress(self) -> MirrorProgress:
        """Return how far an earlier session has copied this part; delete its stores that cannot be used."""
        part = self.part
        mirror = parse_place(part.folder.path)
        content = part.folder.read(part.progress_name())
        recorded = MirrorProgress()
        if content is not None:
            with contextlib.suppress(CheckpointError):  # it is damaged, so all is copied again
                recorded = unseal_progress(content, part.folder.path)
        are_usable = True
        for store, count in recorded.stores:
            pid = judge(mirror.store(store)).used_by
            if pid is not None:
                raise CheckpointError(f"process {pid} is copying it")
            try:
                if count:  # opened only to see that it can be
                    mirror.open_existing(store, CompletionQueue()).close()
            except OffloadError:
                are_usable = False  # then none is: a store's tiles are counted on from the store before it
        useful = tuple((store, count) for store, count in recorded.stores if count and are_usable)
        tile_count = sum(count for _, count in useful)
        if tile_count > len(self.manifest.tiles):  # it cannot be of this part
            useful = ()
            tile_count = 0
        for store, count in recorded.stores:
            if (store, count) not in useful:
                remove(judge(mirror.store(store)))
        if tile_count:
            log.info("%s: %d of %d tiles are there", part.folder.path, tile_count, len(self.manifest.tiles))
        return MirrorProgress(useful)

    def _write_progress(self, *stores: tuple[uuid.UUID, int]) -> None:
        """Note the stores that have been written, each with the number of its durable tiles; in the mirror, too."""
        self.progress = MirrorProgress(stores)
        self.part.folder.write(self.part.progress_name(), seal_progress(self.progress))

    def copy(self) -> Iterator[int]:
        """Copy the tiles that are missing, batch by batch; yield the bytes of each once it is durable."""
        manifest = self.manifest
        earlier_stores = self.progress.stores
        first = sum(count for _, count in earlier_stores)
        if first == len(manifest.tiles):  # an earlier session has copied all
            return
        store = uuid.uuid4()
        count = 0
        self._write_progress(*earlier_stores, (store, count))  # before it is made, so that none is left unnoticed
        total_bytes = sum(map(slot_bytes, manifest.tile_bytes.values()))
        options = StoreOptions(extent_bytes=max(1 << 20, min(total_bytes, BATCH_BYTES)), io_backend=self.io_backend)
        self.sink = open_tier(self.part.folder.path, store, self.source.queue, options=options)
        for batch in _batches(manifest, first):
            self.source.copy(batch, self.sink)
            count += len(batch)
            self._write_progress(*earlier_stores, (store, count))
            yield sum(manifest.tile_bytes[tile] for tile, _ in batch)

    def commit(self, extra: bytes | None, cancelled: threading.Event) -> None:
        """Commit the part as one of a self-contained copy, with its `extra`, if it has one.

        It waits no longer for other ranks once `cancelled` is set.
        """
        weights = model_name(self.part.request.id, self.part.request.rank)
        if self.manifest.metadata.get(MODEL_KEY):
            target = self.part.folder
            # Weights that no optimizer changes may be larger than memory.
            scratch = target.path if target.has_locks else None
            with open_folder(self.source.path).content(weights, scratch) as content:
                target.write(weights, content)
        request = replace(self.part.request, find_ended=self.part.find_failed)
        manifest = self._manifest_of_copy()
        self.job = CommitJob(
            self.part.folder, request, manifest, extra, older=(), keep=1, cancelled=cancelled, timeout_s=RANKS_S
        )
        self.job.run()
        self.keep()
        self.part.folder.delete(self.part.progress_name())

    def _manifest_of_copy(self) -> Manifest:
        """Return the manifest with the tiles that have been copied, in its order, where they lie in the mirror."""
        manifest, stores = self.manifest, self.progress.stores
        tiles: dict[TileId, TileRef] = {}
        remaining = iter(manifest.tiles.items())
        for number, (_, count) in enumerate(stores):
            offset = 0
            for tile, ref in islice(remaining, count):
                tiles[tile] = msgspec.structs.replace(ref, store=number, offset=offset)
                offset += slot_bytes(manifest.tile_bytes[tile])
        return replace(manifest, stores=tuple(StoreRef(store, path=None) for store, _ in stores), tiles=tiles)

    def keep(self) -> None:
        """Tell the sink, if it was made, which slots are in use: `close` does not delete these durable tiles then."""
        if self.sink is not None:
            sink_number = len(self.progress.stores) - 1  # it is the last store in the progress file
            tiles = self._manifest_of_copy().tiles.values()
            self.sink.keep({ref.offset for ref in tiles if ref.store == sink_number})

    def abandon(self) -> None:
        """Delete this rank's copied stores and progress file, unless another rank may still commit the copy.

        That rank 0's progress file is gone tells the others to give up.
        """
        part = self.part
        if self.job is not None and self.job.is_doubtful:
            if not self._has_rank_0_given_up():
                self.keep()
                return
            self.job.undo()
        self.close()
        with contextlib.suppress(OffloadError):
            for store, _ in self.progress.stores:
                remove(judge(parse_place(part.folder.path).store(store)))
            part.folder.delete(part.progress_name())

    def _has_rank_0_given_up(self) -> bool:
        """Return whether rank 0, which alone can commit the copy, is known to have given up; False on rank 0."""
        part = self.part
        if part.request.rank == 0:
            return False
        with contextlib.suppress(OffloadError):
            return part.progress_name(0) not in part.folder.names() and not part.is_committed()
        return False

    def close(self) -> None:
        """Close the store; idempotent."""
        if self.sink is not None:
            self.sink.close()


def _batches(manifest: Manifest, first: int) -> Iterator[list[tuple[TileId, int]]]:
    """Yield the tiles from number `first` on, in batches of at least `BATCH_BYTES` (but the last).

    Each tile comes with its offset in a store that has these tiles alone.
    """
    batch: list[tuple[TileId, int]] = []
    offset = batch_start = 0
    for tile in islice(manifest.tiles, first, None):
        batch.append((tile, offset))
        offset += slot_bytes(manifest.tile_bytes[tile])
        if offset - batch_start >= BATCH_BYTES:
            yield batch
            batch = []
            batch_start = offset
    if batch:
        yield batch
