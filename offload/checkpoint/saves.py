"""The checkpoints of one session: from the hand-over to the commit.

The machine decides what is written when (`offload.engine.saving`); here is what it is written from, the thread that
commits, and which checkpoints are kept. Methods say which thread they belong to.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload._native import CompletionQueue
from offload.checkpoint.commit import CommitJob, Kept
from offload.checkpoint.folder import Folder
from offload.checkpoint.manifest import Manifest, Piece, StoreRef, TileRef, extra_name
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.stores import take_over
from offload.engine.index import Record
from offload.engine.memory import Arena
from offload.engine.saving import SAVE_DEPTH, Commit, Save, SaveTile
from offload.errors import CheckpointError, invariant
from offload.layout import Layout
from offload.protocols import Tier, TileId
from offload.tiers import innermost, open_tier
from offload.tiers.places import release_lock
from offload.tiers.remote import crc32c_of

log = logging.getLogger("offload")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint says besides its tiles, as it was at the hand-over.

    Attributes:
        layout: Parameters and subgroups.
        step: Number of the session's last step.
        steps: Updates that each parameter has had.
        pieces: Which part of each parameter is here.
        metadata: What the caller gave, as JSON.
        extra: What else the caller gave.
        id: The save's; the same on all ranks.
        rank: This rank.
        ranks: How many there are.
    """

    layout: Layout
    step: int
    steps: tuple[int, ...]
    pieces: tuple[Piece, ...]
    metadata: Mapping[str, Any]
    extra: bytes | None
    id: str
    rank: int
    ranks: int


@dataclass(slots=True)
class Pending:
    """A checkpoint that is being written.

    Attributes:
        save: What the machine was told.
        folder: Where it goes.
        snapshot: What it says.
        sink: The store in the folder that takes a copy, if it is one.
        on_done: Called, in a thread of its own, with the error or None when it has ended.
        done: Set when it has ended.
        error: Why it failed.
        started_s: When it was handed over, on the monotonic clock.
    """

    save: Save
    folder: Folder
    snapshot: Snapshot
    sink: tuple[uuid.UUID, Tier] | None
    on_done: Callable[[BaseException | None], None] | None
    started_s: float
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    job: CommitJob | None = None
    thread: threading.Thread | None = None


class Saves:
    """All checkpoints of one session; a `offload.engine.executor.SaveSource`.

    Args:
        queue: The session's.
        tiers: One for each path.
        stores: Path and store of each tier, in the same order.
        others: Where the sink is put, by its number, while there is one.
        resident_address: Where a resident subgroup's state begins.
        gather: Copies the masters of a tile that are weights to an address.
        keep: How many checkpoints are kept.
        checksum: Whether tiles carry checksums.
    """

    def __init__(
        self,
        queue: CompletionQueue,
        stores: Sequence[tuple[str, uuid.UUID]],
        others: dict[int, Tier],
        resident_address: Callable[[int], int],
        gather: Callable[[TileId, int], None],
        *,
        keep: int,
        checksum: bool,
    ) -> None:
        self.pending: Pending | None = None
        self.last: Pending | None = None
        """The last one that has ended."""
        self.last_folder: str | None = None
        """Where the last checkpoint is that was committed or loaded."""
        self.kept: list[Kept] = []
        """What is kept, oldest first."""
        self.stores = [(_absolute(path), store) for path, store in stores]
        """Path and store of each path number; those that are read only come after the session's own."""
        self._queue = queue
        self._others = others
        self._resident_address = resident_address
        self._gather = gather
        self._keep = keep
        self._checksum = checksum
        self._buffers: Arena | None = None
        self._buffer_bytes = 0
        self._numbers = 0
        self._records: dict[TileId, Record] = {}
        self._commit_error: BaseException | None = None

    # On the caller's thread, with nothing pending

    def prepare(
        self,
        folder: Folder,
        snapshot: Snapshot,
        *,
        copy: bool,
        needs_buffers: bool,
        io_backend: str,
        on_done: Callable[[BaseException | None], None] | None,
    ) -> Pending:
        """Make everything ready for a hand-over.

        Raises:
            CheckpointError: The folder cannot be used.
            TierError: A store for the copy cannot be made in it.
            OffloadError: There is no memory for copy buffers.
        """
        folder.prepare()
        if copy or needs_buffers:
            self._make_buffers(snapshot.layout)
        sink = None
        self._numbers += 1
        number = len(self.stores)
        if copy:
            store = uuid.uuid4()
            total = sum(nbytes + 4096 for s in snapshot.layout.subgroups for _, _, nbytes in s.tiles + s.weight_tiles)
            sink = (
                store,
                open_tier(
                    folder.path,
                    store,
                    self._queue,
                    extent_bytes=max(1 << 20, min(total, 256 << 20)),
                    checksum=self._checksum,
                    io_backend=io_backend,
                ),
            )
            self._others[number] = sink[1]
        save = Save(self._numbers, number if copy else None)
        return Pending(save, folder, snapshot, sink, on_done, time.monotonic())

    def _make_buffers(self, layout: Layout) -> None:
        most = max((nbytes for s in layout.subgroups for _, _, nbytes in s.tiles), default=4096)
        if self._buffers is not None and self._buffer_bytes >= most:
            return
        if self._buffers is not None:
            self._buffers.close()
        self._buffers, self._buffer_bytes = Arena(SAVE_DEPTH * most), most

    # On the engine thread: what the executor needs

    def resident_address(self, subgroup: int) -> int:
        """See `SaveSource.resident_address`."""
        return self._resident_address(subgroup)

    def buffer_address(self, buffer: int) -> int:
        """See `SaveSource.buffer_address`."""
        invariant(self._buffers is not None, "a copy buffer that was not made")
        return self._buffers.address + buffer * self._buffer_bytes if self._buffers else 0

    def gather(self, operation: SaveTile) -> None:
        """See `SaveSource.gather`."""
        if operation.buffer is not None:
            self._gather(operation.tile, self.buffer_address(operation.buffer))

    def commit(self, operation: Commit) -> None:
        """See `SaveSource.commit`."""
        pending = self.pending
        invariant(pending is not None and pending.save.number == operation.number, "a commit of no save")
        if pending is None:
            return
        records = self._records
        thread = threading.Thread(
            target=self._run, args=(pending, records, operation.op), name="offload-commit", daemon=True
        )
        pending.thread = thread
        thread.start()

    def commit_error(self) -> Exception:
        """See `SaveSource.commit_error`."""
        error = self._commit_error
        return error if isinstance(error, Exception) else CheckpointError(f"the commit was cut short: {error!r}")

    def records_are(self, records: dict[TileId, Record]) -> None:
        """Hear which records the save under way writes down; the same object as the machine's."""
        self._records = records

    def ended(self, error: BaseException | None) -> list[int]:
        """Take in that the save under way has ended.

        Returns:
            Numbers of the saves whose slots the machine is to release.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return []
        released: list[int] = []
        if pending.sink is not None:
            del self._others[pending.save.sink if pending.save.sink is not None else -1]
            if error is None:
                innermost(pending.sink[1]).kept = frozenset(r.location.offset for r in self._records.values())  # type: ignore[attr-defined]
            pending.sink[1].close()
        if error is None and pending.job is not None:
            self.last_folder = pending.folder.path
            gone = pending.job.released
            released = [kept.number for kept in gone if kept.number is not None]
            self.kept = [kept for kept in self.kept if kept not in gone]
            if pending.sink is None:
                own = pending.job.kept
                own.number = pending.save.number
                self.kept.append(own)
        if error is not None:
            log.warning("no checkpoint was written to %s: %s", pending.folder.path, error)
        self._records = {}
        pending.error = error
        self.last = pending
        pending.done.set()
        if pending.on_done is not None:
            threading.Thread(target=pending.on_done, args=(error,), name="offload-saved", daemon=True).start()
        return released

    # On the committing thread

    def _run(self, pending: Pending, records: Mapping[TileId, Record], op: int) -> None:
        error = 0
        try:
            pending.job = self._job(pending, records)
            pending.job.run()
        except BaseException as cause:
            self._commit_error = cause
            error = -1
        self._queue.post(op, error)

    def _job(self, pending: Pending, records: Mapping[TileId, Record]) -> CommitJob:
        snapshot = pending.snapshot
        used = sorted({record.location.path for record in records.values()})
        refs = [
            StoreRef(pending.sink[0], None)
            if pending.sink is not None
            else StoreRef(self.stores[path][1], self.stores[path][0])
            for path in used
        ]
        numbers = {path: number for number, path in enumerate(used)}
        extra = snapshot.extra
        manifest = Manifest(
            id=snapshot.id,
            rank=snapshot.rank,
            ranks=snapshot.ranks,
            step=snapshot.step,
            layout=snapshot.layout,
            steps=snapshot.steps,
            pieces=snapshot.pieces,
            stores=tuple(refs),
            tiles={
                tile: TileRef(numbers[record.location.path], record.location.offset, record.step, record.checksum)
                for tile, record in records.items()
            },
            checksums=self._checksum,
            metadata=snapshot.metadata,
            extra=None if extra is None else (extra_name(snapshot.id, snapshot.rank), len(extra), crc32c_of(extra)),
        )
        # A copy holds nothing, so it takes nobody's place; but what its folder held before does go.
        older = list(self.kept)
        keep = self._keep if pending.sink is None else len(older) + 1
        paths = [path for path, _ in self.stores if not path.startswith("s3://")] if pending.sink is None else []
        return CommitJob(pending.folder, manifest, extra, older, keep, paths=paths)

    # Resuming; on the caller's thread, with nothing pending

    def resumed(self, checkpoint: Checkpoint, rank: int, ranks: int) -> None:
        """Take over the checkpoint that was loaded as one of those that are kept, if its session has ended.

        It is released in its turn then, and the stores that it leaves without a pin are deleted. A checkpoint that a
        live session has (or another one has resumed from), or of another number of ranks, is left alone.
        """
        self.last_folder = checkpoint.path
        if len(checkpoint.manifests) != ranks or any(kept.id == checkpoint.id for kept in self.kept):
            return
        stores = tuple((ref.path, ref.store) for ref in checkpoint.manifests[rank].stores if ref.path is not None)
        if not stores:
            return
        locks = [take_over(path, store) for path, store in stores]
        taken = tuple(lock for lock in locks if lock is not None)
        if len(taken) < len(locks):
            for lock in taken:
                release_lock(lock)
            log.info("%s stays with whoever uses its stores", checkpoint.path)
            return
        self.kept.append(Kept(checkpoint.path, checkpoint.id, rank, stores, None, taken))

    def close(self) -> None:
        """Free memory and locks; nothing is pending."""
        for kept in self.kept:
            for lock in kept.locks:
                release_lock(lock)
        self.kept.clear()
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None


def _absolute(path: str) -> str:
    return path if path.startswith("s3://") else os.path.abspath(path.removeprefix("file://"))
