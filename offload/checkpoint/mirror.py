"""A mirror: committed checkpoints are copied in the background to a second place, where each needs nothing else.

Each session has one thread that copies one checkpoint at a time: the newest that has been committed by then. While a
checkpoint is copied it is not released (`is_needed`), and its manifest stays in its folder.

Ranks. Rank 0 decides which checkpoint is mirrored. The others copy their parts of it once rank 0's progress file
exists. A rank has to know the decision before it releases anything for the next checkpoint, so the `COMMIT` of the
next one names the checkpoint that is mirrored, too. Between `pause_mirroring` and the end of a save rank 0 begins to
mirror nothing. Rank 0 may begin to mirror a checkpoint while a newer one arrives, so the others skip a checkpoint
only when rank 0 has begun a newer one, or a `COMMIT` says that rank 0 has not begun this one.

Parts. Each rank copies its own part, unchanged, and commits it in the mirror's folder. A progress file there names
the rank's stores in that folder, and how many tiles are durable in each. After a crash the copy of the part is
continued: its remaining tiles go into a new store. An interrupted store is not written to again, so no kind of path
has to support that. Ranks tell each other by such files:

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
        is_taken: Whether rank 0 has decided to mirror the source, as far as this rank knows.
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
        # The source may be deleted by now; its files, which were opened before, are copied all the same.
        with contextlib.suppress(CheckpointError):
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
        """Return the folder in the mirror for a checkpoint's folder `source`: one with the same last name.

        If that name begins with "optimizer", the name above is kept, too ("step_5/optimizer"): each folder of a
        framework has an "optimizer" in it.
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
        """Queue a save's checkpoint to be mirrored next, in place of others whose copy has not begun.

        Nothing is queued without a mirror. A checkpoint in a framework's folder whose save is under way is not queued
        either: it will be mirrored with the folder. One in a folder that is whole already is not mirrored, which is
        logged. `is_new` is False for a loaded checkpoint.
        """
        if self._path is None:
            return
        source = os.fspath(saved.path)
        around, mark = marked_around(source)
        if mark is Mark.WHOLE:
            log.warning(
                "%s is not mirrored, as %s is a whole folder: save in a new `checkpoint_folder`", source, around
            )
        elif mark is Mark.NONE or is_interrupted(around):  # a folder whose save was interrupted will never be whole
            self.queue_task(Task(source, _part_of(saved, self._target(source), is_new), is_new=is_new))

    def offer_folder(
        self, whole: WholeFolder, saved: SaveRequest | None, run: str, *, is_first: bool, is_new: bool
    ) -> None:
        """Queue a framework's folder to be mirrored next, as `offer` queues a checkpoint.

        Nothing is queued for a folder that lies in the mirror itself. On rank 0 the folder's files are open when this
        returns, so that the caller may delete them. Files beyond the number that `FolderCopy` opens have to stay.

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
        """Append a task to the queue, and wake the mirror's thread.

        On rank 0 it takes the place of older ones that have not begun; other ranks skip these once they know that
        rank 0 has. A needless task is closed at once instead: one whose checkpoint is queued already and, on rank 0,
        one for a loaded checkpoint while any other task is queued, as it is no newer and nothing waits for it.
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
        """On ranks other than 0: note that rank 0 mirrors the checkpoint `id`, as a new `COMMIT` says, and no other.

        Other queued checkpoints are skipped, as rank 0 has skipped them. The newest stays queued: rank 0 may still
        begin to mirror it.
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
        """Return whether a checkpoint is being mirrored, or its stores have a reader other than the mirror.

        If the mirror opens or closes stores just now, this waits up to `KNOWN_S` for that.
        """
        if self.has_taken(checkpoint.id):
            return True
        self._is_known.wait(KNOWN_S)  # so that the mirror's own reading is not taken for another's
        # `own`: how many of a store's readers are the mirror's. It has a store open at most once.
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
        for task in self._tasks:  # a session that loads it offers it to its own mirror again
            log.warning("%s is not mirrored yet: load_checkpoint of it goes on with that", task.source)
        waits.apart(self._cancelled.set, "offload-mirror-end", lambda: "")  # a Ctrl-C would leave it half set
        self._news.put(None)
        waits.wait_for(self._thread.wait, lambda: "the mirror to end", settle_s)

    # On the mirror's thread

    def _run(self) -> None:
        """Mirror what is queued, one task at a time, until the mirror is closed."""
        # Other reads and writes go first: 7 is the last priority, which threads that this one starts inherit.
        # A system may have no priorities of I/O (AttributeError), or refuse this one; the mirror does without then.
        with contextlib.suppress(psutil.Error, OSError, AttributeError):
            psutil.Process(threading.get_native_id()).ionice(psutil.IOPRIO_CLASS_BE, 7)
        while not self._cancelled.is_set():
            task = self._take_next()
            if task is None:  # nothing is queued, or mirroring is paused
                self._news.get()
                continue
            try:
                self._check_in_place()
                if self._wait_for_rank_0(task):  # else it was skipped, and closed
                    self.mirror_task(task)
                    self._finish_task(task, cause=None)
            except _Interrupted:  # `close` ends the mirror
                break
            except Exception as cause:
                log.warning("%s was not mirrored: %s", task.source, cause)
                # If the task is not taken, rank 0 has not begun, as far as this rank knows, and waits for no part.
                if task.is_taken and task.part is not None:
                    task.part.note_failure()
                self._finish_task(task, cause)
        for task in self._tasks:  # one that was interrupted, and those whose turn has not come
            self._finish_task(task, CheckpointError("the session was closed"))

    def _check_in_place(self) -> None:
        """Raise unless the mirror is where it was: where it was unmounted, copies would fill the disk below."""
        if _device_of(self._path) != self._device:
            advice = "mount or make it, or begin a new session if it was mounted anew"
            # "It" is the mirror, which the log's sentence does not name: "... was not mirrored: ".
            raise CheckpointError(f"it is not there, or lies on another device than when the session began: {advice}")

    def _take_next(self) -> Task | None:
        """Return the queue's first task, which stays queued; None if there is none.

        On rank 0 this is where it is decided to mirror the task (`is_taken`). While mirroring is paused, nothing is
        decided, and None is returned for a task that is not taken yet.
        """
        with self._lock:
            task = self._tasks[0] if self._tasks else None
            if task is not None and task.is_first and not task.is_taken:
                if self._is_mirroring_paused:
                    return None
                task.is_taken = True
            return task

    def _finish_task(self, task: Task, cause: Exception | None) -> None:
        """Remove a task that has ended from the queue, and note for `wait` its error, or that it had none (None)."""
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

        Tasks that rank 0 has skipped are removed from the queue and closed; the one that it has begun is noted as
        taken. On rank 0 the task is taken already, and nothing is waited for.
        """
        silence = waits.Silence()
        pause_s = 0.01
        while not task.is_taken:
            if self._cancelled.is_set():
                raise _Interrupted
            if silence.lasts_s > RANKS_S:  # the log's sentence begins with "... was not mirrored: "
                raise CheckpointError("rank 0 has not begun to; see what it says")
            # Newest first: if rank 0 has begun to mirror a newer checkpoint, it has skipped or given up those before.
            for queued in reversed(self._tasks):
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
        """Wait at most `pause_s` to be woken, for a new task or the end; return whether that has happened."""
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=pause_s)
            return True
        return False

    def mirror_task(self, task: Task) -> None:
        """Copy what a task names: this rank's part of a checkpoint; on rank 0 also the files around it."""
        if task.failure is not None:
            raise task.failure
        if task.part is not None and task.is_first:  # other ranks copy once rank 0 has begun, after this check
            task.part.check_run()
        if task.files is not None:
            self._mirror_files(task, task.files)
        elif task.part is not None and self._copy_part(task.part):
            log.info("%s is mirrored in %s", task.source, self._path)

    def _mirror_files(self, task: Task, files: FolderCopy) -> None:
        """On rank 0: copy a framework's folder, then delete copies of folders that were deleted from the run's.

        An earlier task's unfinished copy is deleted first, to make room. Then the folder is marked as begun in the
        mirror, and the engine's checkpoint is copied before its other files.

        A folder that was loaded, not saved, may be a copy of another run's. If the mirror has a whole folder of its
        name, nothing is copied; and no copies of other folders are deleted.
        """
        if self._unfinished is not None and self._unfinished.name != files.whole.name:
            delete_copy(self._unfinished, files.mirror, is_unfinished=True)
            self._unfinished = None
        has_begun = files.begin(task.run)  # False: the copy in the mirror is whole, and stays so
        if has_begun:
            self._unfinished = files.whole
        stays_whole = not has_begun and not task.is_new  # then the copy may be another run's, and gets no part
        has_copied_part = task.part is not None and not stays_whole and self._copy_part(task.part)
        if has_begun:
            for nbytes in files.copy():
                self._note_copied(nbytes)
            files.commit()
        if has_begun or has_copied_part:
            log.info("%s is mirrored in %s", task.source, files.target)
        self._unfinished = None  # not reached if the copy has failed: then the next folder's task deletes it
        if task.is_new:
            self._delete_siblings(files, task.run)

    def _delete_siblings(self, files: FolderCopy, run: str) -> None:
        """Delete the mirror's copies of siblings of a folder that were deleted from the run's folder."""
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
        """Copy this rank's part of a checkpoint, unless the mirror has the checkpoint; return whether it was copied.

        If that fails as the session or a rank has ended, a later session continues from what was copied. Else the
        copy is given up, see `RankPartCopy.abandon`.
        """
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
                if self._cancelled.is_set():  # the session ends: its next one continues this copy
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
        """Open this rank's part of a checkpoint, and note in `_reads` the stores that the mirror reads by that.

        While stores are opened or closed `_reads` may be wrong, so `_is_known` is cleared then.
        """
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
            # Callbacks run last first: `_is_known` and `_reads` are cleared, then the stores are closed. After that a
            # reader of these stores is another one, and must not be taken for the mirror.
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
        """Return the ranks that will not do their parts of the copy: they have ended, failed or given up.

        Only rank 0 tells that it has given up: its progress file is gone. It is gone after rank 0's commit, too, so
        callers look for `COMMIT` after this.
        """
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
    """The copying of one part: call `begin`, exhaust `copy`, call `commit`; at the end `close`.

    If `copy` or `commit` fails, call `keep`, so that a later session continues the copy, or `abandon`; then `close`.

    Attributes:
        part: The part to copy.
        source: The checkpoint, with this rank's part open.
        io_backend: Backend of a store in a directory.
        progress: The stores in the mirror for tiles of this part, each with the number of its durable tiles.
        sink: The store that this copy writes, the last in `progress`; None until it is made.
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
        """Find what an earlier session has copied of this part, and note in the mirror that this rank has begun.

        What is useless of the earlier copy is deleted: stores and, on rank 0, failure files.

        Raises:
            CheckpointError: Another session is copying this part.
        """
        part = self.part
        self.progress = self._take_up_progress()
        if part.request.rank == 0:  # before its progress file is written, at which the other ranks begin
            for name in part.folder.names():
                if FAILURE.fullmatch(name):  # of an earlier copy: other ranks would give up because of it
                    part.folder.delete(name)
        self._write_progress(*self.progress.stores)

    def _take_up_progress(self) -> MirrorProgress:
        """Return how far an earlier session has copied this part; delete those of its stores that cannot be used.

        All stores are used or none: a part's tiles have one order, and each store has the next ones after those in
        the store before it.

        Raises:
            CheckpointError: Another session is copying this part.
        """
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
                if count:  # opened only to see that it can be; a store without tiles may not even have been made
                    mirror.open_existing(store, CompletionQueue()).close()
            except OffloadError:
                are_usable = False
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
        """Note, here and in this rank's progress file, the stores and the number of durable tiles in each."""
        self.progress = MirrorProgress(stores)
        self.part.folder.write(self.part.progress_name(), seal_progress(self.progress))

    def copy(self) -> Iterator[int]:
        """Copy the missing tiles to a new store, batch by batch; yield a batch's bytes once the batch is durable."""
        manifest = self.manifest
        earlier_stores = self.progress.stores
        first = sum(count for _, count in earlier_stores)
        if first == len(manifest.tiles):  # an earlier session has copied all
            return
        store = uuid.uuid4()
        count = 0
        # Noted before it is made, so that a later session finds the store, whenever this one is killed.
        self._write_progress(*earlier_stores, (store, count))
        total_bytes = sum(map(slot_bytes, manifest.tile_bytes.values()))
        options = StoreOptions(extent_bytes=max(1 << 20, min(total_bytes, BATCH_BYTES)), io_backend=self.io_backend)
        self.sink = open_tier(self.part.folder.path, store, self.source.queue, options=options)
        for batch in _batches(manifest, first):
            self.source.copy(batch, self.sink)
            count += len(batch)
            self._write_progress(*earlier_stores, (store, count))
            yield sum(manifest.tile_bytes[tile] for tile, _ in batch)

    def commit(self, extra: bytes | None, cancelled: threading.Event) -> None:
        """Commit the part as one of a self-contained copy, and delete its progress file.

        The commit waits no longer for other ranks once `cancelled` is set. `extra` is that of the source, None if it
        has none. The file of weights that no optimizer changes is copied first, if the source has one.
        """
        weights = model_name(self.part.request.id, self.part.request.rank)
        if self.manifest.metadata.get(MODEL_KEY):
            target = self.part.folder
            # The file may be larger than memory. From a bucket it comes by way of a temporary file, in the mirror's
            # directory if that is one.
            scratch = target.path if target.has_locks else None
            with open_folder(self.source.path).content(weights, scratch) as content:
                target.write(weights, content)
        request = replace(self.part.request, find_ended=self.part.find_failed)
        manifest = self._manifest_of_copy()
        # `older`, `keep`: no checkpoint in another folder is released for this one.
        self.job = CommitJob(
            self.part.folder, request, manifest, extra, older=(), keep=1, cancelled=cancelled, timeout_s=RANKS_S
        )
        self.job.run()
        self.keep()
        self.part.folder.delete(self.part.progress_name())

    def _manifest_of_copy(self) -> Manifest:
        """Return the part's manifest, with the tiles that have been copied so far as they lie in the mirror.

        Tiles are copied in the manifest's order, so each store has the next `count` of them, one after the other.
        """
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
        """Tell the sink, if it was made, which slots are in use, so that `close` does not delete the store."""
        if self.sink is not None:
            sink_number = len(self.progress.stores) - 1  # it is the last store in the progress file
            tiles = self._manifest_of_copy().tiles.values()
            self.sink.keep({ref.offset for ref in tiles if ref.store == sink_number})

    def abandon(self) -> None:
        """Give this rank's part of the copy up: delete its stores and its progress file.

        Other ranks give up when they see that rank 0's progress file is gone. If rank 0 may still commit the copy
        with this part, or may have committed it, everything is kept instead.
        """
        part = self.part
        if self.job is not None and self.job.is_doubtful:
            if not self._has_rank_0_given_up():
                self.keep()
                return
            self.job.undo()
        self.close()  # which deletes the sink, unless `commit` has called `keep`; other stores are deleted below
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
