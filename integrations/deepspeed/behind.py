"""DeepSpeed's checkpoints written behind training: `save_checkpoint` returns when versions are pinned.

A rank's save pins the versions that lie on paths, and has others written there before their next change, as any save
of an `Engine` does. A thread then copies them from there into DeepSpeed's file, under a name that nothing loads, and
renames it when it is durable. Rank 0 lets `latest` name the tag when the files of all ranks are there.

With the layout "in_place" nothing is copied: the engines' checkpoint is in the tag's folder (`in_place.py`). `latest`
names the tag once there is that, and before another tag is released for it.

Under ZeRO-1 and 2 the model's file has all weights. Each rank writes those that its masters round to, before its own
file gets its name; rank 0 names the model's file when all ranks' files are there, as the tag's last.

Invariants: `latest` comes to name a tag when it is whole; a tag that is not whole, as it is being saved again, too,
lacks files, so nothing loads it; a save that fails leaves training and other tags as they are, and is told on all
ranks by the next call that all ranks make: a save, a load or `wait_checkpoint`.
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
"""The folder in a tag's in which files are that are not whole, under their names, which torch writes into them."""

ASIDE = ".aside"
"""The end of the name of what a tag that is saved again had."""

LEAST_PRIORITY = 19
"""Of the thread that copies, as the system counts: training's threads go before it."""

PINNED = ".offload-behind"
"""The folder beside the tags in which versions are pinned, by rank, until they have been copied."""

LOOK_S = 0.02
"""How often somebody looks for what others have done. No event: a Ctrl-C may leave its lock behind."""

SAY_S = 10.0
"""How long a wait is before the log says what for."""

LAST_S = 60.0
"""How long rank 0 looks for the files of others when the program ends."""

_pinned: set[str] = set()
"""Folders of this process in which versions are pinned; two models may be saved beside each other."""

_naming = threading.Lock()
"""Whoever writes `latest` has it."""


class Stage(IntEnum):
    """How far a rank is with a tag.

    Attributes:
        BEGUN: It has pinned its versions.
        PREPARED: It has done all that others wait for so that there is a checkpoint of the engines.
        COMMITTED: It knows that there is one.
        DURABLE: Its part is durable.
        ENDED: Nothing is done for it any more, well or not.
    """

    BEGUN = 0
    PREPARED = 1
    COMMITTED = 2
    DURABLE = 3
    ENDED = 4


EVERY = -1
"""Stands for all ranks."""

SETTLING = (
    (Stage.PREPARED, EVERY),
    (Stage.COMMITTED, 0),
    (Stage.DURABLE, EVERY),
    (Stage.ENDED, 0),
    (Stage.ENDED, EVERY),
)
"""What ranks wait for together, one after the other: each needs of other ranks no more than what comes before."""


@dataclass
class PendingTag:
    """A tag whose files are being written.

    Attributes:
        folder: Of all tags.
        tag: Its name.
        file: This rank's file when it is whole.
        others: All ranks' files, which have to be there before `latest` may name the tag.
        starts: Where each state tensor of each flat tensor begins in the file; None if it has them already.
        frame: What the file has besides, if state stays where it is.
        model: The model's file, if it is not there yet: rank 0's to name, and of other ranks that write to it.
        synced: What was written before, to be made durable with it.
        publishes: Whether `latest` is to name it.
        id: Of the engines' checkpoint, the same on all ranks.
        is_given_up: Whether it is not to become whole any more.
        is_named: Whether `latest` names it, if it is to.
        is_settled: Whether all ranks know that all parts are durable.
        stage: How far this rank is.
        error: Why it did not become whole, or the latest.
    """

    folder: str
    tag: str
    file: str
    others: Sequence[str]
    starts: stream.Starts | None
    frame: Frame | None
    model: SharedModel | None
    synced: Sequence[str]
    publishes: bool
    id: str
    started_s: float = field(default_factory=time.monotonic)
    is_given_up: bool = False
    is_named: bool = False
    is_settled: bool = False
    stage: Stage = Stage.BEGUN
    error: BaseException | None = None

    @property
    def partial(self) -> str:
        """This rank's file until it is whole."""
        return partial_of(self.file)


def partial_of(file: str) -> str:
    """Return where a file is until it is whole."""
    return os.path.join(os.path.dirname(file), PARTIAL, os.path.basename(file))


def set_aside(file: str) -> None:
    """Have nothing load a file; a large one takes its time to be deleted, which is done behind training."""
    if os.path.exists(file):
        os.makedirs(os.path.dirname(partial_of(file)), exist_ok=True)
        os.rename(file, f"{partial_of(file)}{ASIDE}")


def discard(file: str) -> None:
    """Delete what there is of a file that is not whole, what it was to displace, and the folder if it is empty."""
    with contextlib.suppress(OSError):
        _delete(partial_of(file))
        _delete(f"{partial_of(file)}{ASIDE}")
        os.rmdir(os.path.dirname(partial_of(file)))


def _delete(file: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(file)


class SavesBehind:
    """One rank's checkpoints that are written while training goes on; one at a time.

    Args:
        shard: Whose state they hold.
        rank: This rank.
        on_all_ranks: Does one rank's work; see `OffloadedOptimizer`.
    """

    def __init__(self, shard: Shard, rank: int, on_all_ranks: Callable[[Callable[[], None]], None]) -> None:
        self._shard, self._rank, self._on_all_ranks = shard, rank, on_all_ranks
        self.pending: PendingTag | None = None
        self.rounds = True
        """Whether weights have been what masters round to, wherever a tag has said so."""
        self._pid = os.getpid()
        atexit.register(_end, weakref.ref(self))

    def begin(self, pending: PendingTag) -> None:
        """Pin the state, and have the file filled behind; its other bytes are there already.

        Raises:
            CheckpointError: State cannot be pinned.
        """
        checkpoints, pinned = self._shard.engine.checkpoints, ""
        self.pending = pending
        try:
            if pending.frame is not None:
                folder = os.path.join(os.path.dirname(pending.file), in_place.FOLDER)
                request = SaveRequest(
                    folder,
                    mirrored=False,  # a mirror has the engines' part alone
                    extra=partial(self._stand_in, pending, pending.frame.encode()),
                    on_commit=partial(self._write, pending, folder),
                    on_done=partial(self._end, pending, ""),
                    id=pending.id,
                    rank=self._rank,
                    ranks=len(pending.others),
                    find_ended=partial(self._find_ended, pending),
                )
                checkpoints.save(request)
            elif pending.starts is None:
                threading.Thread(target=self._write_alone, args=(pending,), daemon=True).start()
            else:
                names = (f"rank-{self._rank}{f'-{number}' if number else ''}" for number in itertools.count())
                places = (os.path.join(pending.folder, PINNED, name) for name in names)
                _pinned.add(pinned := next(place for place in places if place not in _pinned))
                os.makedirs(pinned, exist_ok=True)
                request = SaveRequest(
                    pinned,
                    mirrored=False,
                    on_commit=partial(self._write, pending, pinned),
                    on_done=partial(self._end, pending, pinned),
                    id=pending.id,
                )
                checkpoints.save(request)
        except BaseException:
            if not checkpoints.has_begun(pending.id):  # else it ends as others do, as after a Ctrl-C
                _pinned.discard(pinned)
                pending.stage = Stage.ENDED
            raise

    def settle(self) -> None:
        """Wait until the tag under way is whole, and tell on all ranks if it is not. Collective.

        Raises:
            CheckpointError: It could not be written; `latest` names the one before.
        """
        pending = self.pending

        def reach(stage: Stage, rank: int) -> None:
            if pending is None or rank not in (EVERY, self._rank):
                return
            pending.is_settled = stage is Stage.ENDED
            _wait(
                pending,
                lambda: pending.stage >= stage,
                "to become the latest" if pending.is_settled else "to be written",
            )
            if pending.error is not None:
                what = "did not become the latest" if pending.is_settled else "could not be written"
                raise CheckpointError(f"{pending.tag} {what}: {pending.error}") from pending.error

        try:
            for stage, rank in SETTLING:  # a rank may wait for what another one has failed to do before
                self._on_all_ranks(partial(reach, stage, rank))
        except BaseException:
            self.give_up()
            raise
        self.pending = None

    def give_up(self) -> None:
        """Have the tag under way not become whole, and not the latest, if it is not yet."""
        pending = self.pending
        if pending is not None:
            pending.is_given_up = True
            _wait(pending, lambda: pending.stage is Stage.ENDED, "to be given up")
            self.pending = None  # not before: an interrupted wait would leave its thread to the next save's files

    def close(self) -> None:
        """Wait until the tag under way is whole, alone; a Ctrl-C gives it up."""
        pending = self.pending
        if pending is None or os.getpid() != self._pid:  # a forked copy has no such thread
            return
        try:
            _wait(pending, lambda: pending.stage >= Stage.PREPARED, "to be written")
            until_s = time.monotonic() + LAST_S

            def is_late() -> bool:  # what comes after a commit takes as long as it takes
                return pending.stage is not Stage.COMMITTED and time.monotonic() > until_s

            _wait(pending, lambda: pending.stage is Stage.ENDED or is_late(), "of other ranks to be written")
            if pending.stage is not Stage.ENDED:
                log.warning("checkpoint %s is not the latest: files of other ranks are not there", pending.tag)
        finally:
            self.give_up()

    # On a thread of its own

    def _write(self, pending: PendingTag, folder: str) -> None:
        """Write this rank's part. A checkpoint that its own displaces stays until `latest` names the tag.

        Args:
            pending: Of which tag.
            folder: Of the engine's checkpoint, if it has one.
        """
        pending.stage = Stage.COMMITTED
        for file in self._named(pending):
            _delete(f"{partial_of(file)}{ASIDE}")
        try:
            self._fill(pending, folder)
            pending.stage = Stage.DURABLE
            if pending.frame is not None or self._shard.engine.checkpoints.kept:
                self._publish(pending)
                if pending.is_given_up:
                    raise CheckpointError("it was given up")
        except Exception as failed:
            pending.error = failed
            raise

    def _end(self, pending: PendingTag, pinned: str, error: BaseException | None) -> None:
        """Let go of the versions, and make known what has become of the tag.

        Args:
            pending: Which.
            pinned: Where its versions are pinned, if it needs any.
            error: Why there is no checkpoint of the engines.
        """
        try:
            pending.error = pending.error or error
            if pinned:
                self._release(pinned)
            if pending.error is None:
                with contextlib.suppress(OSError, CheckpointError):  # which the tag has
                    if self._rank == 0:
                        self._publish(pending)
                    tag = os.path.join(pending.folder, pending.tag)
                    if mark_of(tag) is not Mark.NONE:  # it is whole, or becomes so on rank 0 in this moment
                        mirror_folder(self._shard, tag)
            else:
                log.warning(
                    "checkpoint %s could not be written, and the one before stays: %s", pending.tag, pending.error
                )
        finally:
            for file in self._named(pending):
                discard(file)
            pending.stage = Stage.ENDED

    def _write_alone(self, pending: PendingTag) -> None:
        """Write this rank's part, which needs no versions."""
        with contextlib.suppress(Exception):  # which the tag has
            self._write(pending, "")
        self._end(pending, "", None)

    def _fill(self, pending: PendingTag, folder: str) -> None:
        def visit(take: stream.Take, names: Sequence[str]) -> None:
            def unless_given_up(*given: object) -> None:
                if pending.is_given_up:
                    raise CheckpointError("it was given up")
                take(*given)

            self._shard.engine.checkpoints.visit(folder, unless_given_up, names)

        model, files = pending.model, dict[str, stream.Starts]()
        if pending.frame is None and pending.starts is not None:
            files[pending.partial] = pending.starts
        if model is not None and model.starts:
            files[partial_of(model.path)] = {WEIGHT: model.starts}
        if files:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
            stream.write_state(files, self._shard, visit)
        if model is not None and model.starts:
            self.rounds = model.is_written(partial_of(model.path), self._shard.weights)
            if not self.rounds:
                raise CheckpointError(
                    "weights were not what their masters round to, as they had been set past torch's counters of "
                    "changes; from now on saves return when all weights are written"
                )
            _sync(partial_of(model.path))
        if pending.frame is None or model is not None:
            _place(pending)

    def _named(self, pending: PendingTag) -> list[str]:
        """Return the files that this rank names."""
        model = [pending.model.path] if pending.model is not None and self._rank == 0 else []
        return [pending.file, *model]

    def _release(self, pinned: str) -> None:
        """Let go of the pinned versions; where that fails, the next save does."""
        with contextlib.suppress(Exception):
            self._shard.engine.checkpoints.release(pinned)
            shutil.rmtree(pinned)
            os.rmdir(os.path.dirname(pinned))
        _pinned.discard(pinned)

    def _publish(self, pending: PendingTag) -> None:
        """Have rank 0 make the tag whole once all ranks' files are there; others wait for the model's, its last."""
        last = [pending.model.path] if pending.model is not None else []
        awaited = pending.others if self._rank == 0 else last
        while not (pending.is_given_up or pending.is_settled or all(map(os.path.exists, awaited))):
            time.sleep(LOOK_S)
        if self._rank == 0 and not (pending.is_given_up or pending.is_named):
            self._name(pending)

    def _stand_in(self, pending: PendingTag, frame: bytes) -> bytes:
        """Have a file that names the checkpoint stand where the rank's would, and return what goes with its state."""
        _delete(f"{pending.partial}{ASIDE}")
        in_place.write_stub(pending.partial, pending.id)
        if pending.model is None:
            _place(pending)
        return frame

    def _find_ended(self, pending: PendingTag) -> Sequence[int]:
        """Return the ranks that nobody waits for. The first who asks has written all that this rank has to."""
        pending.stage = max(pending.stage, Stage.PREPARED)
        return range(len(pending.others)) if pending.is_given_up else ()

    def _name(self, pending: PendingTag) -> None:
        """Name the model's file, by which the tag is whole, and have `latest` name the tag, if it is to."""
        try:
            if pending.model is not None:
                _rename(pending.model.path)
            if mark_of(tag := os.path.join(pending.folder, pending.tag)) is Mark.BEGUN:
                mark_whole(tag)
            if pending.publishes:
                latest = os.path.join(pending.folder, "latest")
                with _naming, open(f"{latest}.partial", "w", encoding="utf-8") as file:
                    file.write(pending.tag)
                    file.flush()
                    os.fsync(file.fileno())
                    os.rename(file.name, latest)
            _sync(pending.folder)
        except (OSError, CheckpointError) as failed:
            pending.error = failed
            raise
        pending.is_named = True
        log.info("checkpoint %s is whole, %.1f s after training went on", pending.tag, _since(pending.started_s))


def _place(pending: PendingTag) -> None:
    """Give the rank's file its name, when all that belongs to it is durable."""
    for name in pending.synced:
        _sync(name)
    _rename(pending.file)


def _rename(file: str) -> None:
    """Give a file its name when it is durable."""
    _sync(partial_of(file))
    os.rename(partial_of(file), file)
    _sync(os.path.dirname(file))


def _since(then_s: float) -> float:
    return time.monotonic() - then_s


def _wait(pending: PendingTag, arrived: Callable[[], bool], what: str) -> None:
    """Wait until something has happened to a tag, and say so if that takes long. A Ctrl-C is a way out."""
    said_s = time.monotonic()
    while not arrived():
        time.sleep(LOOK_S)
        if _since(said_s) > SAY_S:
            log.info("waiting for checkpoint %s %s", pending.tag, what)
            said_s = time.monotonic()


def _end(behind: weakref.ref[SavesBehind]) -> None:
    """The interpreter ends."""
    found = behind()
    if found is not None:
        found.close()


def _sync(path: str) -> None:
    """Make a file, or the names in a folder, durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
