"""DeepSpeed's checkpoints written behind training: `save_checkpoint` returns when versions are pinned.

A rank's save pins the versions that lie on paths, and has others written there before their next change, as any save
of an `Engine` does. A thread then copies them from there into DeepSpeed's file, under a name that nothing loads, and
renames it when it is durable. Rank 0 lets `latest` name the tag when the files of all ranks are there.

Invariants: `latest` names whole checkpoints alone; a tag that is not whole lacks a file, so nothing loads it; a save
that fails leaves training and the checkpoint before it as they are, and is told on all ranks by the next call that
all ranks make: a save, a load or `wait_checkpoint`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from offload import CheckpointError, OffloadError, waits
from offload.checkpoint.reader import Checkpoint, Range
from offload.integrations.deepspeed import stream
from offload.integrations.deepspeed.shard import STATE, Shard
from offload.tiers.filesystem import replacing, sync_directory
from offload.units import format_seconds

log = logging.getLogger("offload")

PARTIAL = ".offload-partial"
"""The folder in a tag's in which files are that are not whole, under their names, which torch writes into them."""

PINNED = ".offload-behind"
"""The folder beside the tags in which versions are pinned, by rank, until they have been copied."""

PIECE_NUMEL = 1 << 20
"""Elements of each state tensor that are copied at a time."""

LOOK_S = 0.05
"""How often rank 0 looks for the files of the others."""

LAST_S = 60.0
"""How long rank 0 looks for them when the program ends."""


@dataclass
class PendingTag:
    """A tag whose files are being written.

    Attributes:
        folder: Of all tags.
        tag: Its name.
        file: This rank's file when it is whole.
        others: The other files that have to be there before `latest` may name the tag; to be looked for by rank 0.
        starts: Where each state tensor of each flat tensor begins in the file; None if it is whole already.
        synced: What was written before, to be made durable with it.
        publishes: Whether `latest` is to name it.
    """

    folder: str
    tag: str
    file: str
    others: Sequence[str]
    starts: stream.Starts | None
    synced: Sequence[str]
    publishes: bool
    started_s: float = field(default_factory=time.monotonic)
    is_given_up: bool = False
    durable: waits.Latch = field(default_factory=waits.Latch)
    """Set when this rank's part has ended, well or not."""
    error: Exception | None = None
    settled: waits.Latch = field(default_factory=waits.Latch)
    """Set when all ranks know how all parts have ended."""

    @property
    def partial(self) -> str:
        """This rank's file until it is whole."""
        return partial_of(self.file)


def partial_of(file: str) -> str:
    """Return where a file is until it is whole."""
    return os.path.join(os.path.dirname(file), PARTIAL, os.path.basename(file))


class SavesBehind:
    """One rank's checkpoints that are written while training goes on; one at a time.

    Args:
        shard: Whose state they hold.
        rank: This rank.
        on_all_ranks: Does one rank's work; see `OffloadedOptimizer`.
    """

    def __init__(self, shard: Shard, rank: int, on_all_ranks: Callable[[Callable[[], None]], None]) -> None:
        self._shard, self._rank, self._on_all_ranks = shard, rank, on_all_ranks
        self._pending: PendingTag | None = None
        self._work: waits.BackgroundWork | None = None
        atexit.register(_end, weakref.ref(self))

    def begin(self, pending: PendingTag) -> None:
        """Pin the state, and have the file filled behind; its other bytes are there already.

        Raises:
            CheckpointError: State cannot be pinned.
        """
        pinned = os.path.join(pending.folder, PINNED, f"rank-{self._rank}")
        if pending.starts is not None:
            os.makedirs(pinned, exist_ok=True)
            self._shard.engine.checkpoints.save(pinned)
        self._pending = pending
        self._work = waits.BackgroundWork(lambda: self._write(pending, pinned), "offload-save-behind")
        self._work.start()

    def settle(self) -> None:
        """Wait until the tag under way is whole, and tell on all ranks if it is not. Collective.

        Raises:
            CheckpointError: It could not be written; `latest` names the one before.
        """
        pending, work = self._pending, self._work

        def part() -> None:
            if pending is not None:
                self._wait(pending.durable, pending)
                if pending.error is not None:
                    raise CheckpointError(f"{pending.tag} could not be written: {pending.error}") from pending.error

        try:
            self._on_all_ranks(part)
        except BaseException:
            self.give_up()
            raise
        if pending is not None and work is not None:
            pending.settled.set()
            self._wait_for_thread(work, pending)
            self._pending = self._work = None
            if pending.error is not None:  # `latest` itself
                raise CheckpointError(f"{pending.tag} is whole, and not the latest: {pending.error}")

    def give_up(self) -> None:
        """Have the tag under way not become the latest; what is there of it goes."""
        pending, work, self._pending, self._work = self._pending, self._work, None, None
        if pending is not None and work is not None:
            pending.is_given_up = True
            self._wait_for_thread(work, pending)

    def close(self) -> None:
        """Wait until the tag under way is whole, alone; a Ctrl-C gives it up."""
        pending, work = self._pending, self._work
        if pending is None or work is None:
            return
        try:
            self._wait(pending.durable, pending)
            if not work.wait(LAST_S):
                log.warning("%s is not whole: not all other ranks have written their parts", pending.tag)
        finally:
            self.give_up()

    @staticmethod
    def _wait(latch: waits.Latch, pending: PendingTag) -> None:
        waits.wait_for(latch.wait, lambda: f"checkpoint {pending.tag} to be written")

    @staticmethod
    def _wait_for_thread(work: waits.BackgroundWork, pending: PendingTag) -> None:
        waits.wait_for(work.wait, lambda: f"checkpoint {pending.tag} to become the latest")

    # On its thread

    def _write(self, pending: PendingTag, pinned: str) -> None:
        """Write this rank's part, then make it known."""
        try:
            try:
                if pending.starts is not None:
                    self._copy(pending, pending.starts, pinned)
                for name in (pending.partial, *pending.synced):
                    _sync(name)
                os.rename(pending.partial, pending.file)
                sync_directory(os.path.dirname(pending.file))
            except Exception as error:
                pending.error = error
                log.warning("checkpoint %s could not be written, the one before stays: %s", pending.tag, error)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(pending.partial)
                self._release(pinned)
        finally:
            pending.durable.set()
        if pending.error is None and self._rank == 0:
            self._publish(pending)

    def _copy(self, pending: PendingTag, starts: stream.Starts, pinned: str) -> None:
        engine, pieces = self._shard.engine, self._shard.pieces
        engine.checkpoints.wait()
        file = os.open(pending.partial, os.O_WRONLY)
        memory = torch.empty(len(STATE), PIECE_NUMEL, dtype=torch.float32)
        try:
            with Checkpoint(pinned) as checkpoint:
                for piece in pieces:
                    for first in range(0, piece.numel, PIECE_NUMEL):
                        if pending.is_given_up:
                            raise CheckpointError("it was given up")
                        out = dict(zip(STATE, memory[:, : min(PIECE_NUMEL, piece.numel - first)], strict=True))
                        checkpoint.read([Range(piece.name, name, piece.start + first, out[name]) for name in STATE])
                        stream.write_run(file, starts[piece.flat], piece.offset + first, out)
        finally:
            os.close(file)

    def _release(self, pinned: str) -> None:
        """Let go of the pinned versions; where that fails, the next save does."""
        with contextlib.suppress(OffloadError, OSError):
            self._shard.engine.checkpoints.release(pinned)
            shutil.rmtree(pinned)
            os.rmdir(os.path.dirname(pinned))

    def _publish(self, pending: PendingTag) -> None:
        """Have `latest` name the tag, if it is to, once all files are there."""
        while not (pending.settled.is_set() or all(map(os.path.exists, pending.others))):
            if pending.is_given_up:
                return
            pending.settled.wait(LOOK_S)
        with contextlib.suppress(OSError):  # those of a save that was killed may still be there
            os.rmdir(os.path.dirname(pending.partial))
        try:
            if not pending.publishes:
                return
            with replacing(Path(pending.folder, "latest"), "latest.partial") as file:
                file.write(pending.tag.encode())
        except OSError as error:
            pending.error = error
            return
        seconds = format_seconds(time.monotonic() - pending.started_s)
        log.info("checkpoint %s is whole, %s after training went on", pending.tag, seconds)


def _end(behind: weakref.ref[SavesBehind]) -> None:
    """The interpreter ends."""
    found = behind()
    if found is not None:
        found.close()


def _sync(path: str) -> None:
    """Make a file durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
