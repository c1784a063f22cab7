"""The checkpoints of one session: from the hand-over to the commit.

The machine decides which tile is written when (`offload.schedule.saving`). This knows the memory that tiles are
written from, runs the thread that commits, and notes which checkpoints are kept. Methods say which thread they belong
to.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from offload import waits
from offload._native import CompletionQueue
from offload.checkpoint.adopt import Adopted, Pinned, Place, pinned_in, records_in, used_bytes
from offload.checkpoint.commit import CommitJob, Kept, release
from offload.checkpoint.manifest import MAX_RELEASED, Manifest, StoreRef, TileRef, extra_name
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.stores import Pin, Standing, is_elsewhere, note_move, standing, store_folder
from offload.errors import CheckpointError, OffloadError, invariant, known
from offload.layout import Layout
from offload.protocols import Tier, TileId
from offload.schedule.index import Record, TileIndex
from offload.schedule.operations import Commit, Save, SaveTile
from offload.tiers import StoreOptions, open_tier, parse_place, slot_bytes
from offload.tiers.filesystem import release_lock
from offload.tiers.place import Folder
from offload.tiers.remote import crc32c_of

log = logging.getLogger("offload")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Lets a resumed session continue in a store that an earlier session left, instead of in its own empty one.

    Attributes:
        layout: How the session's state is cut.
        can: Returns whether nothing has been written to the new store of a path yet.
        open: Opens a store for writing, given the number of its path, its id, and how many bytes are cut into slots
            already; raises an `OffloadError` if it cannot.
        install: Puts the opened store in the place of the new one, which is deleted.
    """

    layout: Layout
    can: Callable[[int], bool]
    open: Callable[[int, uuid.UUID, int], Tier]
    install: Callable[[int, Tier], None]


@dataclass(slots=True)
class _Owned:
    """Stores of ended sessions that this one has locked; `tiers` are those opened for writing, by path number."""

    tiers: dict[int, tuple[uuid.UUID, Tier, list[Pinned]]] = field(default_factory=dict)
    taken: tuple[tuple[str, uuid.UUID, int], ...] = ()

    def give_up(self) -> None:
        for _, tier, _ in self.tiers.values():
            tier.close()
        for _, _, lock in self.taken:
            release_lock(lock)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a checkpoint says besides its tiles, as it was at the hand-over.

    Attributes:
        layout: Parameters and subgroups.
        step: Number of the session's last step.
        steps: Updates that each parameter has had.
        metadata: What the caller gave, as JSON.
        extra: The caller's own bytes.
        id: The save's; the same on all ranks.
        rank: This rank.
        ranks: How many there are.
        copy: Whether everything is copied to the folder.
        seed: Of stochastic rounding; None where nothing is rounded so.
        numbers: What it knows each parameter by.
        ended: Returns ranks that are known to have ended.
    """

    layout: Layout
    step: int
    steps: tuple[int, ...]
    metadata: Mapping[str, Any]
    extra: bytes | None
    id: str
    rank: int
    ranks: int
    copy: bool
    seed: int | None
    numbers: tuple[int, ...]
    ended: Callable[[], Collection[int]] = tuple


@dataclass(slots=True)
class Pending:
    """A checkpoint that is being written.

    Attributes:
        save: The request to the machine.
        folder: Where it goes.
        snapshot: What it says besides its tiles.
        sink: The store in the folder, if it is a copy.
        on_done: Called, in a thread of its own, with the error or None when it has ended.
        done: Set when it has ended.
        error: Why it failed; an error of a tier is its `__cause__`.
        started_s: When it was handed over, on the monotonic clock.
        cancelled: Set when the session breaks while it is committed.
        ranks_until_s: When it is given up, on the monotonic clock, if other ranks have not done their part by then.
        records: The tiles that its commit names.
    """

    save: Save
    folder: Folder
    snapshot: Snapshot
    sink: tuple[uuid.UUID, Tier] | None
    on_done: Callable[[BaseException | None], None] | None
    started_s: float
    done: waits.Latch = field(default_factory=waits.Latch)
    error: CheckpointError | None = None
    job: CommitJob | None = None
    thread: threading.Thread | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    ranks_until_s: float = math.inf
    records: Mapping[TileId, Record] = field(default_factory=dict)

    def wait_for_ranks(self, seconds: float) -> None:
        """Give it up if other ranks have not done their part in so many seconds; the earliest limit counts."""
        self.ranks_until_s = min(self.ranks_until_s, time.monotonic() + seconds)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended, on the caller's thread, where a Ctrl-C is a way out; return whether it has."""
        return waits.wait_for(self.done.wait, self._awaited, timeout_s)

    def _awaited(self) -> str:
        """Return what it waits for, for the log; "" where the committing thread says it."""
        job = self.job
        if job is not None and job.awaited:
            return ""
        stage = "to be committed" if self.thread is not None else "to be written"
        return f"the checkpoint in {self.folder.path} {stage}"


class Saves:
    """All checkpoints of one session; a `offload.engine.executor.SaveSource`.

    Args:
        queue: The session's.
        stores: Path and store of each path number.
        others: Tiers beyond the session's own, by path number: the sink and foreign stores.
        resident_address: Returns the address of a resident subgroup's state.
        gather: Copies a tile of masters that are weights to an address.
        buffers: Takes memory for the copy buffers; returns its address and the bytes of each buffer.
        keep: How many checkpoints are kept.
        checksum: Whether tiles carry checksums.
        settle_s: How long a session that breaks waits for a commit: it may hang with what broke the session.
    """

    def __init__(
        self,
        queue: CompletionQueue,
        stores: Sequence[tuple[str, uuid.UUID]],
        others: dict[int, Tier],
        resident_address: Callable[[int], int],
        gather: Callable[[TileId, int], None],
        buffers: Callable[[], tuple[int, int]],
        *,
        keep: int,
        checksum: bool,
        settle_s: float,
    ) -> None:
        self.pending: Pending | None = None
        self.last: Pending | None = None
        """The last one that has ended."""
        self.last_folder: str | None = None
        """Where the last checkpoint is that was committed or loaded."""
        self.kept: list[Kept] = []
        """What is kept, oldest first."""
        self._newer: list[Kept] = []
        """What was saved after the checkpoint that was loaded; it goes when another one is saved to its folder."""
        self.stores = [(parse_place(path).name, store) for path, store in stores]
        """Path and store of each path number; foreign ones, which are only read, come after the session's own."""
        self._paths = len(stores)
        self._queue = queue
        self._others = others
        self._resident_address = resident_address
        self._gather = gather
        self._keep = keep
        self._checksum = checksum
        self._settle_s = settle_s
        self._make_buffers = buffers
        self._buffers = (0, 0)
        self._numbers = 0
        self._steps: tuple[int, ...] = ()
        self.named: Mapping[TileId, Record] = {}
        """Tiles of a checkpoint whose commit went on when the session broke: their slots stay."""
        self._commit_error: BaseException | None = None
        self._doubtful: list[Kept] = []
        """Checkpoints that this rank has given up and others may have committed: see `commit`."""
        self._undecided: list[str] = []
        """Ids of saves begun since the last commit. On rank 0, nobody will commit any but the newest."""

    def begin(self, id: str, ranks: int) -> None:
        """Note that a save is asked for; on the caller's thread, with nothing pending."""
        if ranks > 1:  # one rank alone is never in doubt
            self._undecided = [*self._undecided[1 - MAX_RELEASED // 2 :], id]

    def wait_for_pending(self) -> None:
        """Wait for the checkpoint that is being written, if one is; on the caller's thread."""
        pending = self.pending
        if pending is not None and not pending.done.is_set():
            log.info("waiting for the checkpoint in %s first", pending.folder.path)
            pending.wait()

    # On the engine thread

    def open(
        self,
        folder: Folder,
        snapshot: Snapshot,
        *,
        needs_buffers: bool,
        io_backend: str,
        on_done: Callable[[BaseException | None], None] | None,
    ) -> Pending:
        """Prepare a save, which is `pending` from then on.

        On the engine thread, where no Ctrl-C can come between making a thing and noting it.

        Args:
            folder: Where it goes; prepared.
            snapshot: What it says besides its tiles.
            needs_buffers: Whether some tiles have to be gathered first.
            io_backend: Of the store in the folder, for a copy.
            on_done: Called, in a thread of its own, with the error or None when it has ended.

        Raises:
            TierError: A store for the copy cannot be made in the folder.
            OffloadError: There is no memory for copy buffers.
        """
        empty = not snapshot.layout.parameters
        copy = snapshot.copy and not empty
        if copy or needs_buffers:
            self._buffers = self._make_buffers()  # until the save has ended
        sink = None
        self._numbers += 1
        self._steps = *self._steps[-1:], snapshot.step
        number = len(self.stores)
        if copy:
            store = uuid.uuid4()
            tiles = [tile for s in snapshot.layout.subgroups for tile in s.tiles + s.weight_tiles]
            total = sum(slot_bytes(nbytes) for _, _, nbytes in tiles)
            sink = (
                store,
                open_tier(
                    folder.path,
                    store,
                    self._queue,
                    options=StoreOptions(
                        extent_bytes=max(1 << 20, min(total, 256 << 20)),
                        checksum=self._checksum,
                        io_backend=io_backend,
                    ),
                ),
            )
            self._others[number] = sink[1]
        save = Save(self._numbers, number if copy else None, empty)
        self.pending = Pending(save, folder, snapshot, sink, on_done, time.monotonic())
        return self.pending

    def is_expected(self, step: int) -> bool:
        """Return whether a save after a step would come as long after the last one as that after the one before."""
        return len(self._steps) == 2 and step == 2 * self._steps[1] - self._steps[0]

    # On the engine thread: what the executor needs

    def resident_address(self, subgroup: int) -> int:
        """See `SaveSource.resident_address`."""
        return self._resident_address(subgroup)

    def buffer_address(self, buffer: int) -> int:
        """See `SaveSource.buffer_address`."""
        address, nbytes = self._buffers
        invariant(address > 0, "a copy buffer that was not made")
        return address + buffer * nbytes

    def gather(self, operation: SaveTile) -> None:
        """See `SaveSource.gather`."""
        if operation.buffer is not None:
            self._gather(operation.tile, self.buffer_address(operation.buffer))

    def commit(self, operation: Commit) -> None:
        """See `SaveSource.commit`."""
        pending = known(self.pending, "a commit of no save")
        invariant(pending.save.number == operation.number, "a commit of another save")
        self._close_foreign()  # what was still there has been flushed for this save
        pending.records = operation.records
        thread = threading.Thread(target=self._run, args=(pending, operation), name="offload-commit", daemon=True)
        thread.start()  # or the system has no more threads, and there is none to be waited for
        pending.thread = thread

    def commit_error(self) -> Exception:
        """See `SaveSource.commit_error`."""
        error = self._commit_error
        return error if isinstance(error, Exception) else CheckpointError(f"the commit was cut short: {error!r}")

    def ended(self, error: BaseException | None, *, broke: bool = False) -> list[int]:
        """Take in that the save under way has ended.

        Args:
            error: Why it failed.
            broke: Whether the session has broken: its lanes may hang, and nothing here waits for them.

        Returns:
            Numbers of the saves whose slots the machine is to release.
        """
        pending = self.pending
        if pending is None:
            return []
        released: list[int] = []
        if error is not None and pending.thread is not None:
            # The session may have broken during the commit: then the outcome of the commit counts.
            pending.cancelled.set()
            pending.thread.join(self._settle_s)
            if pending.job is not None and pending.job.committed:
                error = None
            if pending.job is not None and not pending.job.undone:
                self.named = pending.records
        if pending.sink is not None:
            # It stays in `others` when it is closed: a session that breaks still hears of writes to it.
            if error is None or self.named:
                pending.sink[1].keep({record.location.offset for record in pending.records.values()})
            if not broke:  # else it is closed with the session, as it may hang
                pending.sink[1].close()
        if error is None and pending.job is not None:
            own = pending.job.kept
            own.number = None if pending.snapshot.copy else pending.save.number
            if not pending.job.committed:
                error = self.commit_error()
                self._doubtful.append(own)
                self._undecided = [id for id in self._undecided if id != own.id]
            else:
                self._undecided.clear()
                self.last_folder = pending.folder.path
                gone = pending.job.released
                released = [kept.number for kept in gone if kept.number is not None]
                known = sorted([*pending.job.confirmed, *self.kept], key=lambda kept: kept.number or 0)
                self.kept = [kept for kept in known if kept not in gone]
                self._newer = [kept for kept in self._newer if kept not in gone]
                settled = [*pending.job.confirmed, *gone]
                self._doubtful = [kept for kept in self._doubtful if kept not in settled]
                if not pending.snapshot.copy:
                    self.kept.append(own)
        if error is not None:
            log.warning("no checkpoint was written to %s: %s", pending.folder.path, error)
            error = save_error(pending.folder.path, error)
        self._buffers = 0, 0
        pending.error, pending.job, pending.records = error, None, {}
        pending.snapshot = replace(pending.snapshot, extra=None)  # until the next save
        self.last, self.pending = pending, None
        pending.done.set()
        if pending.on_done is not None:
            threading.Thread(target=pending.on_done, args=(error,), name="offload-saved", daemon=True).start()
        return released

    def release(self, folder: str) -> list[int]:
        """Release the kept checkpoint in a folder; if it is gone from there, all that were written there.

        On the engine thread, with nothing pending.

        Returns:
            Numbers of the saves whose slots the machine is to release.

        Raises:
            CheckpointError: None is kept there, or it is being read or cannot be deleted.
        """
        found = [kept for kept in self.kept if kept.folder == folder]
        if not found:
            places = ", ".join(kept.folder for kept in self.kept) or "none"
            raise CheckpointError(f"no checkpoint in {folder} is kept by this session; it keeps {places}")
        there = [kept for kept in found if standing(Pin(kept.id, folder), "") is not Standing.MISSING]
        released = []
        for kept in there or found:
            if not release(kept, "released on request", missing=not there):
                raise CheckpointError(f"{folder} could not be released: it is being read, or see the log")
            self.kept.remove(kept)
            released += [kept.number] if kept.number is not None else []
        return released

    # On the committing thread

    def _run(self, pending: Pending, commit: Commit) -> None:
        job, error = None, 0
        try:
            job = pending.job = self._job(pending, commit.records)
            job.run()
        except BaseException as cause:
            self._commit_error = cause
            # A checkpoint that others may still commit is kept like one that was committed.
            error = 0 if job is not None and job.is_doubtful else -1
        self._queue.post(commit.op, error)

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
            stores=tuple(refs),
            tiles={
                tile: TileRef(numbers[record.location.path], record.location.offset, record.step, record.checksum)
                for tile, record in records.items()
            },
            checksums=self._checksum,
            metadata=snapshot.metadata,
            extra=None if extra is None else (extra_name(snapshot.id, snapshot.rank), len(extra), crc32c_of(extra)),
            seed=snapshot.seed,
            numbers=snapshot.numbers,
        )
        # A copy holds no slots, so it displaces no kept checkpoint, except the one that its folder held before.
        older = [*self.kept, *(kept for kept in self._newer if kept.folder == pending.folder.path)]
        keep = len(older) + 1 if snapshot.copy else self._keep
        paths = [path for path, _ in self.stores[: self._paths]] if not snapshot.copy else []
        return CommitJob(
            pending.folder,
            manifest,
            extra,
            older,
            keep,
            pending.cancelled,
            paths,
            ranks_until_s=lambda: pending.ranks_until_s,
            ended=snapshot.ended,
            doubtful=tuple(self._doubtful),
            abandoned=tuple(id for id in self._undecided if id != snapshot.id),
        )

    # Resuming, with nothing pending

    def resumed(self, checkpoint: Checkpoint, rank: int, ranks: int) -> None:
        """Keep the checkpoint that was loaded as one of our own, if its session has ended.

        It is then released in its turn, and stores that it leaves without a pin are deleted. A checkpoint of a live
        session, one that another session has resumed from, or one of another number of ranks is left alone.
        """
        self.last_folder = checkpoint.path
        if len(checkpoint.manifests) != ranks or any(kept.id == checkpoint.id for kept in self.kept):
            return
        stores = tuple((ref.path, ref.store) for ref in checkpoint.manifests[rank].stores if ref.path is not None)
        if not stores:
            return
        owned = self._own(stores, checkpoint, None)
        if owned is not None:
            self.kept.append(Kept(checkpoint.path, checkpoint.id, rank, stores, None, owned.taken))

    def _own(self, stores: Iterable[Place], checkpoint: Checkpoint, exchange: Exchange | None) -> _Owned | None:
        """Lock every store in `stores`; open for writing those that we can continue in. All or nothing."""
        owned = _Owned()
        stores = list(stores)
        try:
            copied = any(is_elsewhere(checkpoint.id, checkpoint.path, path, store) for path, store in stores)
        except CheckpointError as error:
            log.info("%s: its stores are only read: %s", checkpoint.path, error)
            return None
        if copied:
            log.info("%s is a copy of a checkpoint that is elsewhere, too: its stores are only read", checkpoint.path)
            return None
        for path, store in stores:
            number = next((n for n, (own, _) in enumerate(self.stores[: self._paths]) if own == path), None)
            if exchange is not None and number is not None and number not in owned.tiers and exchange.can(number):
                found = self._open(number, path, store, checkpoint, exchange)
                if found is not None:
                    owned.tiers[number] = found
                    continue
            lock = store_folder(path, store).take_lock()
            if lock is None:
                owned.give_up()
                log.info("%s stays with whoever uses its stores", checkpoint.path)
                return None
            owned.taken += ((path, store, lock),)
        with contextlib.suppress(CheckpointError):
            for path, store in stores:
                note_move(checkpoint.id, checkpoint.path, path, store)
        return owned

    def _open(
        self, number: int, path: str, store: uuid.UUID, checkpoint: Checkpoint, exchange: Exchange
    ) -> tuple[uuid.UUID, Tier, list[Pinned]] | None:
        pinned = pinned_in(path, store, number, checkpoint, exchange.layout)
        if pinned is None:
            return None
        try:
            tier = exchange.open(number, store, used_bytes(pinned))
        except OffloadError as error:
            log.info("offload-%s on %s is only read: %s", store, path, error)
            return None
        if pinned_in(path, store, number, checkpoint, exchange.layout) != pinned:  # it changed before it was locked
            tier.close()
            return None
        return store, tier, pinned

    def adopt(
        self, checkpoint: Checkpoint, manifest: Manifest, index: TileIndex, exchange: Exchange, rank: int
    ) -> Adopted:
        """Take over the stores of a checkpoint as far as possible; on the engine thread, with nothing in flight.

        A manifest that another rank has written for all is that rank's to take over; here its stores are only read.

        Raises:
            TierError: A store cannot be read; nothing has changed then.
        """
        self.last_folder = checkpoint.path
        adopted = Adopted()
        own = {place: number for number, place in enumerate(self.stores[: self._paths])}
        named = {(ref.path, ref.store): None for ref in manifest.stores if ref.path is not None}
        numbers = {place: own[place] for place in named if place in own}
        others = [place for place in named if place not in own]
        owned = self._own(others, checkpoint, exchange) if manifest.rank == rank else None
        if owned is not None and owned.tiers:
            trial = deepcopy(index)
            for number, (_, tier, pinned) in owned.tiers.items():
                end = used_bytes(pinned)
                adopted.limits[number] = end + min(index.limit_bytes(number), tier.free_bytes())
                counts = Counter(record.location for one in pinned for record in one.records.values())
                trial.take_up(number, adopted.limits[number], counts)
            if not trial.fits():
                owned.give_up()
                adopted.limits.clear()
                owned = self._own(others, checkpoint, None)
        tiers = owned.tiers if owned is not None else {}
        numbers.update({(self.stores[number][0], store): number for number, (store, _, _) in tiers.items()})
        foreign: dict[int, Tier] = {}
        try:
            for place in others:
                if place not in numbers:
                    number = numbers[place] = len(self.stores) + len(foreign)
                    path, store = place
                    foreign[number] = parse_place(path).open_existing(store, self._queue, checksum=self._checksum)
        except BaseException:
            for tier in foreign.values():
                tier.close()
            if owned is not None:
                owned.give_up()
            raise
        self.stores += [place for place in others if numbers[place] in foreign]
        self._others.update(foreign)
        for number, (store, tier, _) in tiers.items():
            exchange.install(number, tier)
            self.stores[number] = self.stores[number][0], store
        adopted.records = records_in(manifest, numbers)
        if owned is not None and others:
            self._keep_on(checkpoint, manifest, owned, adopted)
        return adopted

    def _keep_on(self, checkpoint: Checkpoint, manifest: Manifest, owned: _Owned, adopted: Adopted) -> None:
        """Hold what checkpoints name in stores that were taken over; older ones are released in their turn."""
        by_id: dict[str, list[Pinned]] = {}
        for one in sorted((one for _, _, found in owned.tiers.values() for one in found), key=lambda one: one.step):
            by_id.setdefault(one.id, []).append(one)
        ours = {(path, store) for path, store in self.stores[: self._paths]}
        for id, found in by_id.items():
            self._numbers += 1
            adopted.held[self._numbers] = {tile: record for one in found for tile, record in one.records.items()}
            stores = tuple((ref.path, ref.store) for ref in found[0].manifest.stores if ref.path is not None)
            if id != checkpoint.id and ours.issuperset(stores):
                kept = Kept(found[0].folder, id, found[0].manifest.rank, stores, self._numbers)
                (self.kept if found[0].step <= manifest.step else self._newer).append(kept)
        number = next((n for n, id in zip(adopted.held, by_id, strict=True) if id == checkpoint.id), None)
        stores = tuple((ref.path, ref.store) for ref in manifest.stores if ref.path is not None)
        self.kept.append(Kept(checkpoint.path, checkpoint.id, manifest.rank, stores, number, owned.taken))

    def _close_foreign(self) -> None:
        for number in [number for number in self._others if number < len(self.stores)]:
            self._others.pop(number).close()

    def close(self) -> None:
        """Let go of stores and locks; nothing is handed over any more."""
        for number in list(self._others):
            self._others.pop(number).close()
        for kept in self.kept:
            for _, _, lock in kept.taken:
                release_lock(lock)
        self.kept.clear()


def save_error(folder: str, cause: BaseException) -> CheckpointError:
    """Return the error that users get for a save that failed with `cause`."""
    if isinstance(cause, CheckpointError):
        return cause
    error = CheckpointError(f"no checkpoint was written to {folder}: {cause}")
    error.__cause__ = cause
    return error
