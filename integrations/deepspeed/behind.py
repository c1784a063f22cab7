"""DeepSpeed's checkpoints written in the background: `save_checkpoint` returns when versions are pinned.

A *tag* is the name of one save, and of its folder. A rank's save pins the tile versions that lie on paths, and writes
the others there before their next change, as any save of an `Engine` does. A thread then copies them from there into
DeepSpeed's file, under a *partial* name that nothing loads, and renames the file when it is durable. When the files
of all ranks exist, rank 0 writes the tag's name to the file `latest`.

With the layout "in_place" nothing is copied: the engines' checkpoint is in the tag's folder (`in_place.py`). `latest`
names the tag once that is committed, and before another tag is released for it.

Under ZeRO-1 and 2 the model's file has all weights. Each rank writes those that its masters round to, before its own
file gets its name; rank 0 names the model's file when all ranks' files are there, as the tag's last.

Invariants: `latest` names a tag only once the tag is whole; a tag that is not whole lacks files, so nothing loads it,
even while it is saved again; a save that fails leaves training and other tags as they are, and raises on all ranks in
the next call that all ranks make: a save, a load or `wait_checkpoint`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from offload import CheckpointError, SaveRequest
from offload.checkpoint.marker import Mark, mark_of, mark_whole
from offload.integrations.deepspeed import in_place, stream
from offload.integrations.deepspeed.in_place import Frame
from offload.integrations.deepspeed.shard import Shard
from offload.integrations.deepspeed.stream import WEIGHT, SharedModel
from offload.optim.folders import mirror_folder

log = logging.getLogger("offload")

PARTIAL = ".offload-partial"
"""Subfolder of a tag's folder for files that are not whole. There they have their final names: torch writes a file's
name into it."""

ASIDE = ".aside"
"""Suffix, in that subfolder, of the old files of a tag that is saved again."""

LEAST_PRIORITY = 19
"""Nice value of the thread that copies: training's threads are scheduled first."""

PINNED = ".offload-behind"
"""The folder beside the tags in which versions are pinned, by rank, until they have been copied."""

POLL_S = 0.02
"""Seconds between looks at what others have done. Not an event: a Ctrl-C could leave its lock held."""

LOG_AFTER_S = 10.0
"""Seconds that a wait lasts before the log says what for."""

LAST_S = 60.0
"""Seconds that rank 0 looks for the files of others when the program ends."""

_pinned_folders: set[str] = set()
"""Folders of this process in which versions are pinned; two models may be saved beside each other."""

_naming = threading.Lock()
"""Held while `latest` is written."""


class Stage(IntEnum):
    """How far a rank is with a tag.

    Attributes:
        BEGUN: It has pinned its versions.
        PREPARED: It has done its part of the engines' checkpoint; that can be committed once all ranks have.
        COMMITTED: It knows that the engines' checkpoint is committed.
        DURABLE: Its files are durable.
        ENDED: The save has ended, with success or an error.
    """

    BEGUN = 0
    PREPARED = 1
    COMMITTED = 2
    DURABLE = 3
    ENDED = 4


EVERY_RANK = -1
"""Stands for all ranks."""

WAIT_ORDER = (
    (Stage.PREPARED, EVERY_RANK),
    (Stage.COMMITTED, 0),
    (Stage.DURABLE, EVERY_RANK),
    (Stage.ENDED, 0),
    (Stage.ENDED, EVERY_RANK),
)
"""What `SavesBehind.wait` waits for, in this order: that one rank, or all, have come to a stage.

To come to a stage, no rank needs another to have come to a later one of these: so this order cannot deadlock."""


@dataclass
class PendingTag:
    """A tag whose files are being written.

    Attributes:
        folder: The folder of all tags.
        tag: The tag's name.
        file: Final path of this rank's file.
        rank_files: Final paths of all ranks' files, which have to exist before `latest` may name the tag.
        starts: Where each state tensor of each flat tensor begins in the file; None if they are written already.
        frame: What the file has besides state, if state stays where it lies.
        model: The model's file, if it is not whole yet: on rank 0, which names it, and on ranks that write to it.
        files_to_sync: Files that were written before, to be made durable with this rank's.
        names_latest: Whether `latest` is to name the tag.
        id: Id of the engines' checkpoint, the same on all ranks.
        is_given_up: Whether the tag must not become whole any more.
        is_named: Whether all files have their names, and `latest` names the tag if it is to.
        all_are_durable: Whether all ranks know that all parts are durable.
        stage: How far this rank is.
        error: Why the tag did not become whole, or the latest.
    """

    folder: str
    tag: str
    file: str
    rank_files: Sequence[str]
    starts: stream.Starts | None
    frame: Frame | None
    model: SharedModel | None
    files_to_sync: Sequence[str]
    names_latest: bool
    id: str
    started_s: float = field(default_factory=time.monotonic)
    is_given_up: bool = False
    is_named: bool = False
    all_are_durable: bool = False
    stage: Stage = Stage.BEGUN
    error: BaseException | None = None

    @property
    def partial(self) -> str:
        """Path of this rank's file until it is whole."""
        return partial_of(self.file)


def partial_of(file: str) -> str:
    """Return the path that a file has until it is whole, given its final path."""
    return os.path.join(os.path.dirname(file), PARTIAL, os.path.basename(file))


def discard_partials(folder: str) -> None:
    """Delete the partial files that killed saves, maybe of more ranks than now, have left in a tag's folder."""
    shutil.rmtree(os.path.join(folder, PARTIAL), ignore_errors=True)


def set_aside(file: str, *, is_kept: bool) -> None:
    """Rename a file that a new save replaces, so that nothing loads it.

    Then it is deleted, unless `is_kept`: the thread of a save in the background deletes it later.
    """
    if os.path.isfile(file):
        stream.in_its_folder(partial_of(file), lambda: os.rename(file, f"{partial_of(file)}{ASIDE}"))
        if not is_kept:  # at once, as the new file may need the room
            discard_partial(file)


def name_latest(folder: str, tag: str) -> None:
    """Write a tag's name to `latest`, in the folder of all tags.

    A kill at any moment leaves either the old name or the new one: the file is replaced as a whole.

    Raises:
        CheckpointError: `latest` cannot be written, so that it has the old name; or not made durable.
    """
    latest = os.path.join(folder, "latest")
    partial_latest = f"{latest}.partial"
    with _naming:
        try:
            with open(partial_latest, "w", encoding="utf-8") as file:
                file.write(tag)
                file.flush()
                os.fsync(file.fileno())
            os.rename(partial_latest, latest)
            _sync(folder)
        except BaseException as error:
            _unlink_if_there(partial_latest)
            if isinstance(error, OSError):
                text = f"{tag} is whole, but {folder}/latest could not be written to name it: {error}"
                raise CheckpointError(text) from error
            raise


def discard_partial(file: str) -> None:
    """Delete the partial file of a final path, and the old file that was set aside; then their folder, if empty."""
    with contextlib.suppress(OSError):
        _unlink_if_there(partial_of(file))
        _unlink_if_there(f"{partial_of(file)}{ASIDE}")
        os.rmdir(os.path.dirname(partial_of(file)))


def _unlink_if_there(file: str) -> None:
    """Delete a file; do nothing if that fails."""
    with contextlib.suppress(OSError):
        os.unlink(file)


class SavesBehind:
    """One rank's checkpoints that are written while training goes on; one at a time.

    Args:
        shard: The rank's shard, whose state they have.
        rank: This rank.
        on_all_ranks: Does this rank's work, and raises on all ranks if it raises on one; see `ranks.on_all_ranks`.
    """

    def __init__(self, shard: Shard, rank: int, on_all_ranks: Callable[[Callable[[], None]], None]) -> None:
        self._shard, self._rank, self._on_all_ranks = shard, rank, on_all_ranks
        self.pending: PendingTag | None = None
        self.weights_are_rounded_masters = True
        """Whether weights that were taken for rounded masters have always been so; see `SharedModel.is_written`."""
        self._pid = os.getpid()
        atexit.register(_close_at_exit, weakref.ref(self))

    def begin(self, pending: PendingTag) -> None:
        """Pin the state, and start filling the file with it in the background; its other bytes are written already.

        With the layout "in_place" (`pending.frame`) the state is saved where it lies instead. If the file has its
        state already (`pending.starts` is None), nothing is pinned, and the rest is done in the background.

        Raises:
            CheckpointError: State cannot be pinned.
        """
        checkpoints = self._shard.engine.checkpoints
        pinned = ""
        self.pending = pending
        try:
            if pending.frame is not None:
                checkpoints.save(self._in_place_request(pending, pending.frame))
            elif pending.starts is None:
                threading.Thread(target=self._write_unpinned, args=(pending,), daemon=True).start()
            else:
                # The first of rank-0, rank-0-1, ... that no other save of this process uses.
                names = (f"rank-{self._rank}{f'-{number}' if number else ''}" for number in itertools.count())
                folders = (os.path.join(pending.folder, PINNED, name) for name in names)
                pinned = next(folder for folder in folders if folder not in _pinned_folders)
                _pinned_folders.add(pinned)
                os.makedirs(pinned, exist_ok=True)
                request = SaveRequest(
                    pinned,
                    mirrored=False,  # it is released as soon as it has been copied
                    on_commit=partial(self._write_on_commit, pending, pinned),
                    on_done=partial(self._end_save, pending, pinned),
                    id=pending.id,
                )
                checkpoints.save(request)
        except BaseException:
            if not checkpoints.has_begun(pending.id):  # if it has, as before a Ctrl-C, `on_done` ends it
                _pinned_folders.discard(pinned)
                pending.stage = Stage.ENDED
            raise

    def _in_place_request(self, pending: PendingTag, frame: Frame) -> SaveRequest:
        """Return the request for a checkpoint of all ranks' engines in the tag's folder: the layout "in_place"."""
        folder = os.path.join(os.path.dirname(pending.file), in_place.FOLDER)
        return SaveRequest(
            folder,
            mirrored=False,  # it would be this folder alone; `_end_save` has the whole tag mirrored
            extra=partial(self._write_stub, pending, frame.encode()),
            on_commit=partial(self._write_on_commit, pending, folder),
            on_done=partial(self._end_save, pending, ""),
            id=pending.id,
            rank=self._rank,
            ranks=len(pending.rank_files),
            find_ended=partial(self._find_ended, pending),
        )

    def wait(self) -> None:
        """Wait until the tag under way is whole. Collective.

        Raises:
            CheckpointError: On all ranks, if one could not write its part; `latest` names the tag before.
        """
        pending = self.pending

        def wait_for_stage(stage: Stage, rank: int) -> None:
            """Wait until `rank` has come to a stage, if that is this rank, or `EVERY_RANK`; raise the tag's error."""
            if pending is None or rank not in (EVERY_RANK, self._rank):
                return
            # ENDED is waited for only after all ranks have come to DURABLE.
            pending.all_are_durable = stage is Stage.ENDED
            awaited = "to become the latest" if pending.all_are_durable else "to be written"
            _wait(pending, lambda: pending.stage >= stage, awaited)
            if pending.error is not None:
                failure = "did not become the latest" if pending.all_are_durable else "could not be written"
                raise CheckpointError(f"{pending.tag} {failure}: {pending.error}") from pending.error

        try:
            # One by one: after each all ranks learn whether one has failed, for which others would wait in vain.
            for stage, rank in WAIT_ORDER:
                self._on_all_ranks(partial(wait_for_stage, stage, rank))
        except BaseException:
            self.cancel()
            raise
        self.pending = None

    def cancel(self) -> None:
        """Give up the tag under way, if any: it does not become whole, nor the latest. Wait until its thread ends."""
        pending = self.pending
        if pending is not None:
            pending.is_given_up = True
            _wait(pending, lambda: pending.stage is Stage.ENDED, "to be given up")
            # Not before: if a Ctrl-C ends the wait, the next save has to find the tag, and wait for its thread, which
            # could write to that save's files.
            self.pending = None

    def close(self) -> None:
        """Wait until the tag under way is whole, without collectives, as other ranks may have ended.

        Other ranks are waited for at most `LAST_S`. A Ctrl-C gives the tag up.
        """
        pending = self.pending
        if pending is None or os.getpid() != self._pid:  # a forked copy has no such thread
            return
        try:
            _wait(pending, lambda: pending.stage >= Stage.PREPARED, "to be written")
            until_s = time.monotonic() + LAST_S

            def is_late() -> bool:
                """Return whether other ranks take too long; this rank's own copying, after a commit, never does."""
                return pending.stage is not Stage.COMMITTED and time.monotonic() > until_s

            _wait(pending, lambda: pending.stage is Stage.ENDED or is_late(), "of other ranks to be written")
            if pending.stage is not Stage.ENDED:
                log.warning("checkpoint %s is not the latest: files of other ranks are not there", pending.tag)
        finally:
            self.cancel()  # of a tag that has ended this only forgets it

    # On a thread of its own

    def _write_on_commit(self, pending: PendingTag, folder: str) -> None:
        """Write this rank's files; `folder` has the engine's checkpoint, or is "" if versions are not pinned.

        The engine calls this as `on_commit`, when its checkpoint is committed. Afterwards it may release an older one
        for it, which the tag in `latest` may need. So if it keeps an older one, or with the layout "in_place", the
        new tag is made whole, and named in `latest`, here; else in `_end_save`.
        """
        pending.stage = Stage.COMMITTED
        # The old files of a tag that is saved again, which `set_aside` has kept.
        for file in self._files_to_name(pending):
            _unlink_if_there(f"{partial_of(file)}{ASIDE}")
        try:
            self._write_files(pending, folder)
            pending.stage = Stage.DURABLE
            if pending.frame is not None or self._shard.engine.checkpoints.kept:
                self._wait_and_name_tag(pending)
                if pending.is_given_up:  # the error keeps the engine from releasing an older checkpoint
                    raise CheckpointError("it was given up")
        except Exception as error:
            pending.error = error
            raise

    def _end_save(self, pending: PendingTag, pinned: str, error: BaseException | None) -> None:
        """Release the versions pinned in a folder ("" for none), make the tag whole or log its error, and tidy up.

        The engine calls this as `on_done`; `error` says why there is no checkpoint of the engines.
        """
        try:
            pending.error = pending.error or error
            if pinned:
                self._release(pinned)
            if pending.error is None:
                with contextlib.suppress(OSError, CheckpointError):  # `_name_tag` has noted it in `pending.error`
                    if self._rank == 0:
                        self._wait_and_name_tag(pending)
                    tag_folder = os.path.join(pending.folder, pending.tag)
                    if mark_of(tag_folder) is not Mark.NONE:  # whole, or about to be marked so by rank 0
                        mirror_folder(self._shard, tag_folder)  # in place of an optimizer: only its `engine` is used
            else:
                log.warning(
                    "checkpoint %s could not be written, and the one before stays: %s", pending.tag, pending.error
                )
        finally:
            for file in self._files_to_name(pending):
                discard_partial(file)
            pending.stage = Stage.ENDED

    def _write_unpinned(self, pending: PendingTag) -> None:
        """Write this rank's files if no state is left to copy, so that nothing is pinned; a thread runs this."""
        with contextlib.suppress(Exception):  # noted in `pending.error`
            self._write_on_commit(pending, "")
        self._end_save(pending, "", None)

    def _write_files(self, pending: PendingTag, folder: str) -> None:
        """Copy pinned state into this rank's file, and rounded masters into the model's; then name this rank's file.

        Nothing is copied to a file that has its state, or its weights, already.
        """

        def visit(take: stream.Take, names: Sequence[str]) -> None:
            """Call `take` with each run of the pinned state, until the tag is given up."""

            def take_unless_given_up(*run: object) -> None:
                """Raise if the tag was given up, which ends the visit."""
                if pending.is_given_up:
                    raise CheckpointError("it was given up")
                take(*run)

            self._shard.engine.checkpoints.visit(folder, take_unless_given_up, names)

        model = pending.model
        starts_by_file: dict[str, stream.Starts] = {}  # of the files with holes to fill
        if pending.frame is None and pending.starts is not None:
            starts_by_file[pending.partial] = pending.starts
        if model is not None and model.starts:
            starts_by_file[partial_of(model.path)] = {WEIGHT: model.starts}
        if starts_by_file:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)  # of this thread alone
            stream.write_state(starts_by_file, self._shard, visit)
        if model is not None and model.starts:
            self.weights_are_rounded_masters = model.is_written(partial_of(model.path), self._shard.weights)
            if not self.weights_are_rounded_masters:
                raise CheckpointError(
                    "weights were not what their masters round to, as they had been set past torch's counters of "
                    "changes; from now on saves return when all weights are written"
                )
            _sync(partial_of(model.path))
        if pending.frame is None or model is not None:  # else `_write_stub` has named it
            _name_rank_file(pending)

    def _files_to_name(self, pending: PendingTag) -> list[str]:
        """Return the files to which this rank gives their final names: its own, and on rank 0 the model's."""
        model = [pending.model.path] if pending.model is not None and self._rank == 0 else []
        return [pending.file, *model]

    def _release(self, pinned: str) -> None:
        """Release the versions that are pinned by the folder `pinned`, and delete the folder.

        If that fails, the next save to the folder releases them.
        """
        with contextlib.suppress(Exception):
            self._shard.engine.checkpoints.release(pinned)
            shutil.rmtree(pinned)
            os.rmdir(os.path.dirname(pinned))  # `PINNED`, if no other save, of any rank, has a folder in it
        _pinned_folders.discard(pinned)

    def _wait_and_name_tag(self, pending: PendingTag) -> None:
        """Wait until the tag is whole. Rank 0 makes it whole, once the files of all ranks exist.

        Other ranks wait for the model's file, which rank 0 names last, if they write to it. No rank waits any longer
        once the tag is given up, or `wait` has found that all files are durable.
        """
        last_files = [pending.model.path] if pending.model is not None else []
        awaited = pending.rank_files if self._rank == 0 else last_files
        while not (pending.is_given_up or pending.all_are_durable or all(map(os.path.exists, awaited))):
            time.sleep(POLL_S)
        if self._rank == 0 and not (pending.is_given_up or pending.is_named):
            self._name_tag(pending)

    def _write_stub(self, pending: PendingTag, frame: bytes) -> bytes:
        """Write the stub in the place of this rank's file; return `frame`, which the manifest has as `extra`.

        The engine calls this before its checkpoint is committed.
        """
        _unlink_if_there(f"{pending.partial}{ASIDE}")
        in_place.write_stub(pending.partial, pending.id)
        if pending.model is None:  # else `_write_files` names it, once this rank's weights are in the model's file
            _name_rank_file(pending)
        return frame

    def _find_ended(self, pending: PendingTag) -> Sequence[int]:
        """Return the ranks that the commit need not wait for: none, or all of them once the tag is given up.

        The commit calls this when this rank's manifest is written, so this also notes that this rank is PREPARED.
        """
        pending.stage = max(pending.stage, Stage.PREPARED)
        return range(len(pending.rank_files)) if pending.is_given_up else ()

    def _name_tag(self, pending: PendingTag) -> None:
        """Give the model's file its name, which makes the tag whole, and write `latest`, if it is to name the tag."""
        try:
            if pending.model is not None:
                name_file(pending.model.path)
            tag_folder = os.path.join(pending.folder, pending.tag)
            if mark_of(tag_folder) is Mark.BEGUN:
                mark_whole(tag_folder)
            _sync(pending.folder)
            if pending.names_latest:
                name_latest(pending.folder, pending.tag)
        except (OSError, CheckpointError) as error:
            pending.error = error
            raise
        pending.is_named = True
        log.info(
            "checkpoint %s is whole, %.1f s after training went on", pending.tag, time.monotonic() - pending.started_s
        )


def _name_rank_file(pending: PendingTag) -> None:
    """Make durable the files that were written before, and the rank's file; then give that its final name."""
    for file in pending.files_to_sync:
        _sync(file)
    name_file(pending.file)


def name_file(file: str) -> None:
    """Make a file durable, then move it from its partial name to its final one."""
    _sync(partial_of(file))
    os.rename(partial_of(file), file)
    _sync(os.path.dirname(file))


def _wait(pending: PendingTag, is_over: Callable[[], bool], awaited: str) -> None:
    """Wait until `is_over` returns true, and log what is awaited if that takes long. A Ctrl-C interrupts the wait."""
    logged_s = time.monotonic()
    while not is_over():
        time.sleep(POLL_S)
        if time.monotonic() - logged_s > LOG_AFTER_S:
            log.info("waiting for checkpoint %s %s", pending.tag, awaited)
            logged_s = time.monotonic()


def _close_at_exit(behind: weakref.ref[SavesBehind]) -> None:
    """When the interpreter ends: wait for the tag that is being written."""
    saves = behind()
    if saves is not None:
        saves.close()


def _sync(path: str) -> None:
    """Make a file, or the names in a folder, durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
