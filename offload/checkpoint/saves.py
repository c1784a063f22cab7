"""The checkpoints of one session: from the hand-over to the commit.

The machine decides which tile is written when (`offload.schedule.saving`). `Saves` knows the memory that tiles are
written from, runs the thread that commits, and notes which checkpoints are kept. Headings say which thread calls the
methods below them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from offload import waits
from offload._native import CompletionQueue, crc32c
from offload.checkpoint.commit import CommitJob, KeptCheckpoint, note_failure, release
from offload.checkpoint.contents import read_commit, read_manifest
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import (
    COMMIT_NAME,
    MAX_RELEASED,
    CommitRecord,
    FileRef,
    Manifest,
    Place,
    StoreRef,
    TileRef,
    all_tiles,
    extra_name,
)
from offload.checkpoint.marker import Mark, is_interrupted, marked_around
from offload.checkpoint.mirror import Mirror
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.request import SaveRequest
from offload.checkpoint.stores import (
    Standing,
    drop_notes,
    is_elsewhere,
    note_move,
    note_reading,
    standing,
    store_folder,
    unpin_released,
)
from offload.checkpoint.takeover import PinnedTiles, Takeover, pinned_in, records_in, used_bytes
from offload.checkpoint.whole import WholeFolder
from offload.config import OffloadConfig
from offload.device.host import HostMemory
from offload.engine.views import StateViews
from offload.errors import CheckpointError, OffloadError, TierError, invariant, known
from offload.plan import Plan
from offload.protocols import Tier, TileId
from offload.schedule.index import TileIndex, TileRecord
from offload.schedule.operations import Commit, Save, SaveTile
from offload.tiers import StoreOptions, open_tier, parse_place, slot_bytes
from offload.tiers.filesystem import LockFile, release_lock
from offload.tiers.place import Folder
from offload.tiers.store import READER_NAME

log = logging.getLogger("offload")

NOT_MIRRORED = "offload.not_mirrored"
"""In the metadata of a checkpoint that no mirror gets."""


class Session(Protocol):
    """What a takeover needs of a session: to go on in an earlier session's store in place of its own."""

    plan: Plan

    def reopen_tier(self, number: int, store: uuid.UUID, used_bytes: int) -> Tier:
        """Open a store of an earlier session for writing; raise an `OffloadError` if that fails.

        Args:
            number: The number of the store's path.
            store: The store's id.
            used_bytes: Bytes at the store's start that are divided into slots already: up to the end of the last slot
                that a checkpoint names.
        """

    def replace_tier(self, number: int, tier: Tier) -> None:
        """Use an opened store in place of the session's own new store on that path, which is deleted."""


class _ReopenedStore(NamedTuple):
    """A store of an ended session that this one has locked and opened for writing.

    Attributes:
        store: Its id.
        tier: The opened store.
        pinned: The tiles that checkpoints have in it.
    """

    store: uuid.UUID
    tier: Tier
    pinned: list[PinnedTiles]


@dataclass(slots=True)
class _StoreLocks:
    """Stores of ended sessions that this one has locked.

    Attributes:
        reopened: Those that are open for writing, by path number.
        locks: The others, which are only read: path, store and lock.
    """

    reopened: dict[int, _ReopenedStore] = field(default_factory=dict)
    locks: tuple[tuple[str, uuid.UUID, LockFile], ...] = ()

    def release(self) -> None:
        """Close and unlock all of them."""
        for reopened in self.reopened.values():
            reopened.tier.close()
        for _, _, lock in self.locks:
            release_lock(lock)


@dataclass(slots=True)
class PendingSave:
    """A checkpoint that is being written, then committed; afterwards the outcome of that.

    `thread` and `job` are None while tiles are written, and set when the commit begins. At the end `job` is None
    again, `error` says whether the save has failed, and `done` is set.

    Attributes:
        save: The request to the machine.
        folder: The folder of the checkpoint.
        request: What the caller has asked for.
        manifest: This rank's part as it was at the hand-over, without the tiles.
        sink: The store in the folder, if the checkpoint is a copy.
        keep: How many checkpoints without `copy` are kept once this one is committed.
        done: Set when the save has ended.
        error: Why it failed; an error of a tier is its `__cause__`.
        job: The commit, once `thread` has begun it.
        thread: The committing thread; None while tiles are written.
        cancelled: Set when the session breaks during the commit.
        ranks_until_s: Time, on the monotonic clock, at which other ranks are given up.
        records: The tiles that the commit names.
    """

    save: Save
    folder: Folder
    request: SaveRequest
    manifest: Manifest
    sink: tuple[uuid.UUID, Tier] | None
    keep: int = sys.maxsize
    done: waits.Latch = field(default_factory=waits.Latch)
    error: CheckpointError | None = None
    job: CommitJob | None = None
    thread: threading.Thread | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    ranks_until_s: float = math.inf
    records: Mapping[TileId, TileRecord] = field(default_factory=dict)

    def wait_for_ranks(self, seconds: float) -> None:
        """Limit the commit's wait for other ranks to `seconds` from now; of several limits the earliest counts."""
        self.ranks_until_s = min(self.ranks_until_s, time.monotonic() + seconds)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the save has ended, for at most `timeout_s`, if that is given; return whether it has.

        On the caller's thread, which a Ctrl-C interrupts.

        Raises:
            CheckpointError: The save waits for the caller: this is called from its `on_commit`.
        """
        if threading.current_thread() is self.thread:
            raise CheckpointError("on_commit is part of a checkpoint, and cannot wait for it: use on_done")
        return waits.wait_for(self.done.wait, self._describe_wait, timeout_s)

    def _describe_wait(self) -> str:
        """Return what the save waits for, for the log; "" if the committing thread logs that itself."""
        job = self.job  # read once: when the save ends, another thread sets it to None
        if job is not None and job.awaited:
            return ""
        stage = "to be committed" if self.thread is not None else "to be written"
        return f"the checkpoint in {self.folder.path} {stage}"


class Saves:
    """All checkpoints of one session, and their mirror; an `offload.engine.executor.SaveSource`.

    Args:
        config: The user's.
        queue: The session's completion queue.
        stores: Path and store of each path number.
        tiers: The session's own, by path number; a takeover replaces some.
        others: Tiers beyond these, by path number: foreign stores, and the sink of a save. This class adds and
            removes them.
        memory: Host memory, for copy buffers.
        views: Gather tiles that do not lie in host memory as they are stored: masters that are weights, and state on
            a GPU.
        settle_s: How long a session that breaks waits for a commit, which may hang for the same reason.
    """

    def __init__(
        self,
        config: OffloadConfig,
        queue: CompletionQueue,
        stores: Sequence[tuple[str, uuid.UUID]],
        tiers: Sequence[Tier],
        others: dict[int, Tier],
        memory: HostMemory,
        views: StateViews,
        *,
        settle_s: float,
    ) -> None:
        # The save under way, and the last one
        self.pending: PendingSave | None = None
        """The save that is under way."""
        self.last: PendingSave | None = None
        """The last save that has ended."""
        # Identity: which training this is, and which checkpoints are its own
        self.last_folder: str | None = None
        """The folder of the checkpoint that was committed or loaded last."""
        self.run = uuid.uuid4().hex
        """Names the training whose checkpoints this session saves: a new one, or that of the one it has loaded."""
        self._ids_by_folder: dict[str, tuple[str, ...]] = {}
        """Ids of this session's checkpoints that may be in each folder that it has loaded from or saved to."""
        self._loaded_id = ""
        """Id of the checkpoint that was loaded last; "" once a warning has said that it will be released."""
        # Kept checkpoints, and which of them go first
        self.kept: list[KeptCheckpoint] = []
        """The checkpoints that are kept, oldest first."""
        self._read_checkpoints: list[KeptCheckpoint] = []
        """Loaded checkpoints, each with those of its stores alone that have no locks. A commit that is no copy
        deletes this session's notes in these stores, and then the stores that no checkpoint and no other session
        needs."""
        # Name of the files by which this session notes, in stores without locks, that it reads them.
        self._note_name = f"{READER_NAME}{uuid.uuid4().hex}.json"
        self._newer: list[KeptCheckpoint] = []
        """Checkpoints newer than the loaded one. Each is released when its folder is saved to again."""
        self._interrupted_numbers = set[int | None]()
        """Numbers of saves to a framework's folders that will never be whole: their checkpoints are released before
        others. None, which `KeptCheckpoint.save_number` may be, is never among them: it is for type checkers."""
        # Resources: stores, memory, the mirror; and settings
        self.stores = [(parse_place(path).name, store) for path, store in stores]
        """Path and store by path number: the session's own, then foreign ones, which are only read."""
        self._path_count = len(stores)  # how many of `self.stores` are the session's own
        self._queue = queue
        self._tiers = tiers
        self._other_tiers = others
        self._memory = memory
        self._views = views
        self._keep = config.checkpoints
        self._keeps_all = False  # while a `keeping_all` lasts
        self._io_backend = config.io_backend
        self._settle_s = settle_s
        paths = [path for path, _ in stores]
        self._is_mirrored = config.mirror is not None
        self.mirror = Mirror(config.mirror, paths, verify=config.checksum, io_backend=config.io_backend)
        self._buffers = (0, 0)
        """Address of the first copy buffer, and bytes of each."""
        # Numbering, and expecting, the next save
        self._last_number = 0  # of the save that began last, or of a checkpoint that was taken over
        self._last_steps: tuple[int, ...] = ()
        """The steps of the last two saves: their distance tells `is_expected` when the next one comes."""
        # In doubt, or waiting: a later commit, or the mirror, decides
        self.named_records: Mapping[TileId, TileRecord] = {}
        """Tiles of a checkpoint whose commit was under way when the session broke: their slots are not freed."""
        self._commit_error: BaseException | None = None  # of the last commit that failed
        self._doubtful: list[KeptCheckpoint] = []
        """Checkpoints that this rank has given up and others may have committed: see `commit`."""
        self._awaiting_mirror: list[KeptCheckpoint] = []
        """Checkpoints to release once they are mirrored."""
        self._undecided_ids: list[str] = []
        """Ids of saves begun since the last commit, if there are several ranks. On rank 0, nobody will commit any but
        the newest: the next `COMMIT` names the others as given up, which resolves other ranks' doubts about them."""

    def check_replaced(self, folder: Folder, commit: CommitRecord | None) -> None:
        """Refuse to replace a checkpoint of another session that may still train: rank 0 calls this before a save.

        A session that has neither loaded nor saved a checkpoint goes on with the name (`run`) of the training that
        has saved the replaced one.

        Args:
            folder: Where the save is to go.
            commit: The folder's `COMMIT`; None if it has none.

        Raises:
            CheckpointError: The checkpoint there is of another session that is alive, or has come there after this
                session last saved or loaded there.
        """
        # Nothing is there, or a checkpoint that this session has saved or loaded, and that may have been moved there.
        if commit is None or any(commit.id in own_ids for own_ids in self._ids_by_folder.values()):
            return
        if folder.path in self._ids_by_folder:
            who = "another session has saved, or somebody has moved there, since this one last saved or loaded there"
        else:
            try:
                manifest = read_manifest(folder, commit.id, 0, commit.ranks)  # ranks train together: 0 stands for all
            except CheckpointError:
                return  # it is damaged: nobody can load it
            pid = _find_user(manifest)
            if pid is None:
                # A training that was resumed by other means, as from a state dict, goes on in its folder.
                if not self._ids_by_folder:
                    self.run = manifest.run or self.run  # older manifests have no `run`
                return
            who = f"process {pid} has saved, or has gone on from, and which is still training"
            if not pid:  # 0: the process is not known
                who = "a process of another user or machine has saved, or gone on from, and may still train with"
        advice = "end the other run, save to another folder, or move that checkpoint away"
        raise CheckpointError(f"{folder.path} holds a checkpoint that {who}: {advice}")

    def begin(self, request: SaveRequest) -> None:
        """Check a save that the caller asks for, and note its id; on the caller's thread, with nothing pending.

        Raises:
            ConfigError: The checkpoint would be saved to the mirror itself.
        """
        if not request.copy:  # no mirror gets a copy
            self.mirror.check(os.fspath(request.path))
        if request.ranks > 1:  # by these ids other ranks learn which saves rank 0 has given up
            # The newest `MAX_RELEASED // 2` ids are noted, this one included. `COMMIT` names at most `MAX_RELEASED`,
            # and has to name checkpoints that it replaces, too.
            self._undecided_ids = [*self._undecided_ids[1 - MAX_RELEASED // 2 :], request.id]

    def wait_for_pending(self) -> None:
        """Wait for the checkpoint that is being written, if one is; on the caller's thread."""
        pending = self.pending
        if pending is not None and not pending.done.is_set():
            log.info("waiting for the checkpoint in %s first", pending.folder.path)
            pending.wait()

    def wait_for_mirror(self, timeout_s: float | None) -> None:
        """Wait until nothing is left to mirror; raise if the last could not be mirrored, or the time is over."""
        self.mirror.wait(timeout_s)

    @property
    def has_awaiting_mirror(self) -> bool:
        """Whether checkpoints that callers have released are still kept, until they are mirrored."""
        return bool(self._awaiting_mirror)

    def mirror_folder(self, folder: str, rank: int, ranks: int, *, is_new: bool) -> None:
        """Queue a background copy of a framework's folder to the mirror; see `Mirror.offer_folder`. On any thread.

        Without a mirror this does nothing. A failure to begin is logged, not raised: the folder itself is whole.
        """
        if not self._is_mirrored:
            return
        try:
            whole = WholeFolder.at(folder)
            saved = self._request_of_part(whole, rank) if whole.checkpoint else None
            if saved is not None and saved.ranks != ranks:  # each rank copies the part that it has saved
                # The log's sentence begins with "... is not mirrored: ", to which "that" refers.
                raise CheckpointError(f"as many ranks go on with that as have saved it, {saved.ranks}")
            self.mirror.offer_folder(whole, saved, self.run, is_first=rank == 0, is_new=is_new)
        except (CheckpointError, OSError) as cause:
            log.warning("%s is not mirrored: %s", folder, cause)
            if is_new:  # else the folder was loaded, not saved
                self.mirror.note_error(CheckpointError(f"{folder} was not mirrored: {cause}"))

    def _request_of_part(self, whole: WholeFolder, rank: int) -> SaveRequest:
        """Return a request for this rank's part of the checkpoint in a framework's folder, as its save had one."""
        path = whole.source(whole.checkpoint)
        commit = read_commit(open_folder(path))
        if self.last is not None and self.last.request.id == commit.id:  # its request knows what ranks have ended
            return replace(self.last.request, path=path)
        rank = min(rank, commit.ranks - 1)  # a request's rank exists; callers refuse another number of ranks
        return SaveRequest(path, id=commit.id, rank=rank, ranks=commit.ranks)

    def end_mirror(self, patience_s: float) -> None:
        """Wait up to `patience_s` for the mirror, close it, and release the checkpoints that waited for it."""
        self.mirror.close(patience_s, self._settle_s)
        for kept in self._awaiting_mirror:  # `missing`, as callers may have deleted the folders
            # The machine is not told to free the slots, as it ends with the session.
            release(kept, note="", missing=True, is_needed=self.mirror.is_needed)

    def metrics(self) -> dict[str, float]:
        """Return the mirror's figures."""
        return self.mirror.metrics()

    # On the engine thread

    def open(self, folder: Folder, request: SaveRequest, manifest: Manifest, *, needs_buffers: bool) -> PendingSave:
        """Make what a save needs (copy buffers, and for a copy a store in the folder), and make the save `pending`.

        The save's step is noted: from the distance of the last two, `is_expected` tells when the next save comes. On
        rank 0 the log warns of checkpoints that will be lost, as this save replaces or releases them once it is whole
        (`_warn_of_losses`). This is on the engine thread, where no Ctrl-C can come between making a thing and noting
        it.

        If this fails, no save is pending. It may have allocated copy buffers, which the next save uses or replaces,
        and have noted the save's number and step.

        Args:
            folder: The checkpoint's folder; it exists and can be written.
            request: What the caller has asked for.
            manifest: This rank's part, without tiles.
            needs_buffers: Whether some tiles have to be gathered in copy buffers before they are written.

        Raises:
            TierError: A store for the copy cannot be made in the folder.
            OffloadError: There is no memory for copy buffers.
        """
        is_empty = not manifest.layout.parameters
        is_copy = request.copy and not is_empty  # without tiles no store is needed
        if is_copy or needs_buffers:
            plan = self._views.plan
            address, _ = self._memory.ensure_checkpoint_buffers(plan)
            self._buffers = address, plan.largest_tile_bytes  # until the save has ended
        self._last_number += 1
        self._last_steps = *self._last_steps[-1:], manifest.step
        sink: tuple[uuid.UUID, Tier] | None = None
        sink_number: int | None = None
        if is_copy:
            sink = self._open_sink(folder, manifest)
            _, tier = sink
            sink_number = len(self.stores)  # the first path number that no store has
            self._other_tiers[sink_number] = tier
        save = Save(self._last_number, sink_number, is_empty)
        keep = sys.maxsize if self._keeps_all else self._keep
        self.pending = PendingSave(save, folder, request, manifest, sink, keep)
        if request.rank == 0:  # which alone replaces `COMMIT`
            self._warn_of_losses(self.pending)
        return self.pending

    def _warn_of_losses(self, pending: PendingSave) -> None:
        """On rank 0: warn of checkpoints that this save will replace or release, and that the user may want to keep.

        They are another session's in the same folder, and the one that this session goes on from. The save's id is
        noted for its folder, too.
        """
        path = pending.folder.path
        # `_newer`: checkpoints of the run that this session goes on with, in stores that it has taken over.
        known_folders = {*self._ids_by_folder, *(kept.folder for kept in (*self.kept, *self._newer))}
        if path not in known_folders and os.path.isfile(os.path.join(path, COMMIT_NAME)):
            log.warning("%s holds a checkpoint of another session: it is replaced once this one is whole", path)
        self._ids_by_folder[path] = (*self._ids_by_folder.get(path, ()), pending.request.id)
        elsewhere = [kept for kept in self._by_release_order() if kept.folder != path]
        # A copy holds no slots, and releases nothing elsewhere. Any other save counts as one more that is kept.
        excess = 0 if pending.request.copy else max(0, len(elsewhere) + 1 - pending.keep)
        for kept in elsewhere[:excess]:
            # No warning where folders differ in numbers alone (checkpoint-500, checkpoint-1000): that the oldest of
            # such a series goes is what users expect.
            if kept.id == self._loaded_id and _without_numbers(kept.folder) != _without_numbers(path):
                text = "%s, from which this session goes on, is released once %s is whole: to keep it, raise %s"
                log.warning(text, kept.folder, path, "checkpoints_kept")
                self._loaded_id = ""  # so that this is said once

    def _open_sink(self, folder: Folder, manifest: Manifest) -> tuple[uuid.UUID, Tier]:
        """Make a new store in a checkpoint's folder, for a copy of all its tiles."""
        store = uuid.uuid4()
        tiles = [tile for subgroup in manifest.layout.subgroups for tile in all_tiles(subgroup)]
        total_bytes = sum(slot_bytes(nbytes) for _, _, nbytes in tiles)
        extent_bytes = max(1 << 20, min(total_bytes, 256 << 20))  # by which the store grows
        options = StoreOptions(extent_bytes=extent_bytes, io_backend=self._io_backend)
        return store, open_tier(folder.path, store, self._queue, options=options)

    def is_expected(self, step: int) -> bool:
        """Return whether a save is expected after a step: if saves come at equal intervals, that of the last two."""
        if len(self._last_steps) < 2:
            return False
        before, last = self._last_steps
        return step == last + (last - before)

    # On the engine thread: what the executor needs

    def buffer_address(self, buffer: int) -> int:
        """Return the address of a copy buffer by its number."""
        address, nbytes = self._buffers
        invariant(address > 0, "a copy buffer that was not made")
        return address + buffer * nbytes

    def find_rewritten(self, held: Iterable[tuple[TileId, TileRecord]]) -> set[int]:
        """Return the subgroups whose fp32 weights are no longer the bytes that earlier checkpoints hold of them.

        Somebody has written to such weights past the engine. Each weight tile is gathered and its checksum compared.
        No save is under way, so that a copy buffer is free.

        Args:
            held: The weight tiles that checkpoints hold, with their records.

        Raises:
            OffloadError: There is no memory for copy buffers.
        """
        address, _ = self._memory.ensure_checkpoint_buffers(self._views.plan)
        rewritten: set[int] = set()
        for tile, record in held:
            if tile.subgroup not in rewritten:
                self._views.gather_tile(tile, address)
                if record.checksum and crc32c(address, record.location.nbytes) != record.checksum:  # 0: it has none
                    rewritten.add(tile.subgroup)
        return rewritten

    def gather(self, operation: SaveTile) -> None:
        """Copy the operation's tile, as it is to be stored, to its copy buffer; nothing if it has no buffer."""
        if operation.buffer is not None:
            self._views.gather_tile(operation.tile, self.buffer_address(operation.buffer))

    def commit(self, operation: Commit) -> None:
        """Start to commit the pending save, on a thread of its own, which posts the outcome to the queue.

        Foreign stores are closed before that.
        """
        pending = known(self.pending, "a commit of no save")
        invariant(pending.save.number == operation.number, "a commit of another save")
        self._close_foreign_stores()  # the last tiles there have been flushed for this save
        pending.records = operation.records
        thread = threading.Thread(target=self._run_job, args=(pending, operation), name="offload-commit", daemon=True)
        thread.start()  # raises if the system has no more threads; `pending.thread` stays None then
        pending.thread = thread

    def commit_error(self) -> Exception:
        """Return why the last commit has failed, as an `Exception` even if another `BaseException` ended it."""
        error = self._commit_error
        return error if isinstance(error, Exception) else CheckpointError(f"the commit was cut short: {error!r}")

    def end_pending(self, error: BaseException | None, *, broke: bool = False) -> list[int]:
        """End the pending save: keep its checkpoint, or note its error; on the engine thread.

        A save without an error may be in doubt all the same: the machine holds its slots, and its checkpoint goes to
        `_doubtful`, but the caller gets an error.

        Args:
            error: Why it failed; None if it has not, as far as the machine knows.
            broke: Whether the session has broken: its lanes may hang, and this does not wait for them.

        Returns:
            Numbers of the saves whose slots the machine is to release.
        """
        pending = self.pending
        if pending is None:
            return []
        if error is not None and pending.thread is not None:  # its commit has failed, or the session broke during it
            error = self._await_commit(pending, error)
        if pending.sink is not None:
            # It stays in `_other_tiers`: a session that breaks still gets completions of writes to a closed sink.
            _, tier = pending.sink
            if error is None or self.named_records:  # else closing deletes the store, which nobody names
                tier.keep({record.location.offset for record in pending.records.values()})
            if not broke:  # else closing may hang; it is closed with the session
                tier.close()
        save_numbers: list[int] = []
        if error is None and pending.job is not None:  # without an error there is a job: the commit has ended
            checkpoint = pending.job.checkpoint
            checkpoint.save_number = None if pending.request.copy else pending.save.number  # a copy holds no slots
            if pending.job.committed:
                save_numbers = self._note_committed(pending, pending.job, checkpoint)
            else:
                error = self.commit_error()  # it is in doubt: see `_run_job`
                self._doubtful.append(checkpoint)
                # It may be committed after all, so the next `COMMIT` must not name it as given up.
                self._undecided_ids = [id for id in self._undecided_ids if id != checkpoint.id]
        self.mirror.resume_mirroring()  # the commit may have paused it
        if error is not None:
            log.warning("no checkpoint was written to %s: %s", pending.folder.path, error)
            error = save_error(pending.folder.path, error)
            if pending.thread is None:  # else the commit's thread tells the other ranks, unless it is in doubt
                tell_ranks = partial(note_failure, pending.folder, pending.request)
                # Not here: the engine thread does not wait for the folder, which may be slow or hang.
                threading.Thread(target=tell_ranks, name="offload-save-failed", daemon=True).start()
        self._note_end(pending, error)
        return save_numbers

    def _await_commit(self, pending: PendingSave, error: BaseException) -> BaseException | None:
        """Stop a commit whose save has an error, and wait up to `settle_s` for its thread.

        Unless the commit has deleted its files again, a `COMMIT` may name the save's tiles: they go to
        `named_records`.

        Returns:
            `error`; None if the checkpoint was committed all the same.
        """
        pending.cancelled.set()
        known(pending.thread, "a commit without a thread").join(self._settle_s)
        if pending.job is None:  # the commit has written nothing
            return error
        if not pending.job.undone:
            self.named_records = pending.records
        return None if pending.job.committed else error

    def _note_committed(self, pending: PendingSave, job: CommitJob, checkpoint: KeptCheckpoint) -> list[int]:
        """Keep a committed checkpoint, unless it is a copy, and have it mirrored; note what the commit has released.

        Returns:
            Numbers of the released checkpoints' saves.
        """
        self._undecided_ids.clear()  # the `COMMIT` has named those that were given up
        self.last_folder = pending.folder.path
        self._ids_by_folder[self.last_folder] = (checkpoint.id,)  # which has replaced all that were there
        # In the order of their saves; those without a number (of earlier sessions, with no slots held) come first.
        committed = sorted([*job.confirmed, *self.kept], key=lambda kept: kept.save_number or 0)
        self.kept = [kept for kept in committed if kept not in job.released]
        self._newer = [kept for kept in self._newer if kept not in job.released]
        decided = (*job.confirmed, *job.released)
        self._doubtful = [doubtful for doubtful in self._doubtful if doubtful not in decided]
        if not pending.request.copy:
            self.kept.append(checkpoint)
            if pending.request.mirrored:
                self.mirror.offer(pending.request)
        return [kept.save_number for kept in job.released if kept.save_number is not None]

    def _note_end(self, pending: PendingSave, error: CheckpointError | None) -> None:
        """Make the pending save `last`, with its error if it failed; tell those who wait for it, and `on_done`."""
        self._buffers = 0, 0
        pending.error = error
        # Only the commit needed these, and `last` would keep them in memory until the next save has ended.
        pending.job = None
        pending.records = {}
        pending.request = replace(pending.request, extra=None)
        self.last, self.pending = pending, None
        pending.done.set()
        if pending.request.on_done is not None:
            threading.Thread(target=pending.request.on_done, args=(error,), name="offload-saved", daemon=True).start()

    def release(self, folder: str, *, after_mirror: bool = False) -> list[int]:
        """Release the kept checkpoint in a folder; on the engine thread, with nothing pending.

        If none of those that this session keeps there is in the folder any more, the caller has deleted them. Then
        the slots of all of them are freed.

        Args:
            folder: The folder of the checkpoint.
            after_mirror: Do not release a checkpoint that is being mirrored: a save after its copy is complete will.

        Returns:
            Numbers of the saves whose slots the machine is to release.

        Raises:
            CheckpointError: No checkpoint is kept there, or it is being read, or cannot be deleted.
        """
        candidates = [kept for kept in self.kept if kept.folder == folder]
        if not candidates:
            folders = ", ".join(kept.folder for kept in self.kept) or "none"
            raise CheckpointError(f"no checkpoint in {folder} is kept by this session; it keeps {folders}")
        present = [kept for kept in candidates if standing(kept.pin, store="") is not Standing.MISSING]
        save_numbers = list[int]()
        for kept in present or candidates:
            if not self._release_from(self.kept, kept, save_numbers, missing=not present, after_mirror=after_mirror):
                raise CheckpointError(f"{folder} could not be released: it is being read, or see the log")
        return save_numbers

    def _must_wait_for_mirror(self, kept: KeptCheckpoint) -> bool:
        """Return whether a checkpoint is being mirrored: by this rank, or possibly by rank 0.

        Rank 0 may still copy its part when this rank is done. Until it has released the checkpoint, nobody else can
        tell.
        """
        if self.mirror.has_taken(kept.id):
            return True
        is_held_by_rank_0 = kept.rank > 0 and standing(kept.pin, store="") is Standing.HELD
        return self._is_mirrored and is_held_by_rank_0

    def _release_from(
        self,
        checkpoints: list[KeptCheckpoint],
        kept: KeptCheckpoint,
        save_numbers: list[int],
        note: str = "released on request",
        *,
        missing: bool = False,
        after_mirror: bool = False,
    ) -> bool:
        """Release a checkpoint of a list, unless it is in use; see `commit.release`.

        Args:
            checkpoints: The list; a released checkpoint is removed from it.
            kept: The checkpoint.
            save_numbers: The number of a released checkpoint's save, if it has one, is added to these.
            note: The reason.
            missing: Release it even if it is not in its folder.
            after_mirror: Count a checkpoint that has to wait for the mirror as released: a later save releases it.

        Returns:
            Whether it is released.
        """
        if after_mirror and self._must_wait_for_mirror(kept):
            checkpoints.remove(kept)
            self._awaiting_mirror.append(kept)
            return True
        is_released = release(kept, note, missing=missing, is_needed=self.mirror.is_needed)
        if is_released:
            checkpoints.remove(kept)
            if kept.save_number is not None:
                save_numbers.append(kept.save_number)
        return is_released

    @contextlib.contextmanager
    def keeping_all(self) -> Iterator[None]:
        """Keep all checkpoints while this context lasts, in which a framework writes its folder.

        Saves that begin in the context release no older checkpoints. If an exception ends it, the folder will never
        be whole. Checkpoints that were made in the context are parts of the folder, and are released before others.
        """
        first_number = self._last_number + 1
        was_keeping_all = self._keeps_all
        self._keeps_all = True
        try:
            yield
        except BaseException:
            self._interrupted_numbers |= {*range(first_number, self._last_number + 1)}
            raise
        finally:
            self._keeps_all = was_keeping_all

    @property
    def has_interrupted(self) -> bool:
        """Whether checkpoints are kept that are parts of folders whose save was interrupted."""
        return bool(self._interrupted_numbers)

    def release_interrupted(self) -> list[int]:
        """Release checkpoints of folders whose save was interrupted, until no more are kept than the user wants.

        On the engine thread, with nothing pending: before the next save, which may have no room otherwise.

        Returns:
            Numbers of the saves whose slots the machine is to release.
        """
        save_numbers = list[int]()
        for checkpoints in (self._newer, self.kept):
            for kept in [*checkpoints]:
                is_too_many = len(self.kept) + len(self._newer) > self._keep
                if is_too_many and kept.save_number in self._interrupted_numbers:
                    self._release_from(checkpoints, kept, save_numbers, "the save of its folder was interrupted")
        # Only numbers of checkpoints that are still kept say that there is something to release (`has_interrupted`).
        self._interrupted_numbers &= {kept.save_number for kept in (*self.kept, *self._newer)}
        return save_numbers

    def _by_release_order(self) -> list[KeptCheckpoint]:
        """Return the kept checkpoints in the order in which they are released.

        Those of interrupted saves come first (the key is False), then the others, both oldest first.
        """
        return sorted(self.kept, key=lambda kept: kept.save_number not in self._interrupted_numbers)

    def release_older(self, before: PendingSave | None) -> list[int]:
        """Release older checkpoints that a save under `keeping_all` has kept, except those in use or missing.

        Nothing is released unless there was such a save, it has succeeded, and it is no `copy`.

        Args:
            before: The last save before that context; None if there was none.

        Returns:
            Numbers of the saves whose slots the machine is to release.
        """
        save_numbers = list[int]()
        if self.last is None or self.last is before or self.last.request.copy or self.last.error is not None:
            return save_numbers
        excess = max(0, len(self.kept) - self._keep)
        for kept in self._by_release_order()[:excess]:
            # A missing one may have been moved: `release` keeps it, and says so in the log.
            is_missing = standing(kept.pin, store="") is Standing.MISSING
            self._release_from(self.kept, kept, save_numbers, after_mirror=not is_missing)
        return save_numbers

    def release_deleted(self) -> list[int]:
        """Free the slots of checkpoints that have been released already, or that only waited for the mirror.

        The first are those that somebody else has released, as `release_before_deletion` does. The second are freed
        once they have been mirrored. A checkpoint that is being read is kept for now. On the engine thread, with
        nothing pending.

        Returns:
            Numbers of the saves whose slots the machine is to release.
        """
        save_numbers = list[int]()
        for checkpoints in (self.kept, self._newer, self._awaiting_mirror):
            awaits_mirror = checkpoints is self._awaiting_mirror
            for kept in [*checkpoints]:
                verdict = standing(kept.pin, store="")
                # One that awaits the mirror: rank 0 tries to release it each time. The others wait until it has gone
                # from its folder.
                is_due = awaits_mirror and (kept.rank == 0 or verdict is Standing.MISSING)
                if is_due or verdict is Standing.RELEASED:
                    self._release_from(checkpoints, kept, save_numbers, missing=awaits_mirror)
        return save_numbers

    # On the committing thread

    def _run_job(self, pending: PendingSave, commit: Commit) -> None:
        """Commit a save, and post the outcome to the engine thread; an error is kept for `commit_error`."""
        job = None
        code = 0  # of the completion: the machine holds the save's slots if it is 0, else frees them
        try:
            job = pending.job = self._make_job(pending, commit.records)
            job.run()
        except BaseException as cause:
            self._commit_error = cause
            # A checkpoint in doubt is kept like one that was committed: it may have been, or may be later.
            code = 0 if job is not None and job.is_doubtful else -1
            if code:  # else it is in doubt: other ranks must not give up what may be committed
                note_failure(pending.folder, pending.request)
        self._queue.post(commit.op, code)

    def _make_job(self, pending: PendingSave, records: Mapping[TileId, TileRecord]) -> CommitJob:
        """Return the job that commits a save whose tiles lie where `records` say.

        The caller's `extra` is called here, if it is a function: all state is durable.
        """
        request = pending.request
        extra = request.extra() if callable(request.extra) else request.extra
        older = [*self._by_release_order(), *(kept for kept in self._newer if kept.folder == pending.folder.path)]
        own_paths = [path for path, _ in self.stores[: self._path_count]]
        # A copy holds no slots on the session's paths, so nothing there is freed for it: no kept checkpoint, except
        # the one that its folder held before, no leftover, and no store that was only read.
        return CommitJob(
            pending.folder,
            request,
            self._manifest_with_tiles(pending, records, extra),
            extra,
            older,
            keep=len(older) + 1 if request.copy else pending.keep,
            check_stores=partial(self._check_stores, pending),
            cancelled=pending.cancelled,
            paths=[] if request.copy else own_paths,
            ranks_until_s=lambda: pending.ranks_until_s,  # read anew each time: `wait_for_ranks` changes it
            pause_mirroring=self.mirror.pause_mirroring,
            note_mirrored=self.mirror.note_mirrored,
            is_needed=self.mirror.is_needed,
            read=[] if request.copy else self._read_checkpoints,
            reader=self._note_name,
            doubtful=tuple(self._doubtful),
            abandoned_ids=tuple(id for id in self._undecided_ids if id != request.id),
        )

    def _check_stores(self, pending: PendingSave) -> None:
        """Check that paths still name the stores that a save's tiles were written to.

        Raises:
            CheckpointError: One does not: the checkpoint could not be loaded.
        """
        numbers = {record.location.path for record in pending.records.values()}
        tiers = self._tiers if pending.sink is None else ()  # a copy's tiles are in the checkpoint's own folder
        for number, tier in enumerate(tiers):
            if number in numbers:
                try:
                    tier.check_in_place()
                except TierError as cause:
                    advice = "a save with copy=True writes what the session still has to its folder"
                    raise CheckpointError(f"{pending.folder.path} was not committed: {cause}; {advice}") from cause

    def _manifest_with_tiles(
        self, pending: PendingSave, records: Mapping[TileId, TileRecord], extra: bytes | None
    ) -> Manifest:
        """Return the manifest of a pending save, completed by its tiles, their stores, and the reference to `extra`.

        A tile names its store by a number in the manifest: the session's path numbers are counted anew, without gaps.
        """
        request = pending.request
        path_numbers = sorted({record.location.path for record in records.values()})
        stores = []
        for path_number in path_numbers:
            if pending.sink is None:
                path, store = self.stores[path_number]
                stores.append(StoreRef(store, path))
            else:
                store, _ = pending.sink
                stores.append(StoreRef(store, path=None))  # in the checkpoint's own folder
        store_numbers = {path_number: number for number, path_number in enumerate(path_numbers)}
        return replace(
            pending.manifest,
            stores=tuple(stores),
            metadata={**pending.manifest.metadata, **({} if request.mirrored else {NOT_MIRRORED: True})},
            tiles={tile: TileRef.of(store_numbers[record.location.path], record) for tile, record in records.items()},
            extra=None if extra is None else FileRef.of(extra_name(request.id, request.rank), extra),
        )

    # Resuming, with nothing pending

    def keep_loaded(self, checkpoint: Checkpoint, rank: int, ranks: int) -> None:
        """Keep a checkpoint whose state was copied into this session like one of its own, if its session has ended.

        A later save then releases it as an older one, and deletes those of its stores that have no other pin. Not
        kept are a checkpoint of a live session, one that another session has resumed from, one of another number of
        ranks, and a self-contained copy. In any case its folder, id and training are noted, and it is queued to be
        mirrored.
        """
        self._note_loaded(checkpoint)
        self._mirror_loaded(checkpoint, rank, ranks)
        if len(checkpoint.manifests) != ranks or any(kept.id == checkpoint.id for kept in self.kept):
            return
        stores = checkpoint.manifests[rank].stores_elsewhere
        if not stores:
            return  # all of it is in its own folder
        locked = self._lock_stores(stores, checkpoint)
        if locked is not None:  # else somebody else needs the stores
            self.kept.append(
                KeptCheckpoint(checkpoint.path, checkpoint.id, rank, stores, save_number=None, locks=locked.locks)
            )

    def _note_loaded(self, checkpoint: Checkpoint) -> None:
        """Note folder and id of a loaded checkpoint, and its training, which this session goes on with."""
        self.last_folder = checkpoint.path
        self._ids_by_folder[checkpoint.path] = (checkpoint.id,)
        self._loaded_id = checkpoint.id
        # Rank 0's name of the training, so that all ranks go on with the same one. Older manifests have none ("").
        self.run = checkpoint.manifests[0].run or self.run

    def _mirror_loaded(self, checkpoint: Checkpoint, rank: int, ranks: int) -> None:
        """Queue the loaded checkpoint to be mirrored, in case the session that saved it was killed before that.

        A checkpoint in a framework's whole folder is mirrored with the folder. The mirror skips what it has already.
        """
        marked_folder, mark = marked_around(checkpoint.path)
        if mark is Mark.WHOLE:
            self.mirror_folder(marked_folder, rank, ranks, is_new=False)
            return
        if NOT_MIRRORED in checkpoint.metadata:
            return
        # A checkpoint without stores elsewhere is a self-contained copy, and no mirror gets one. Each rank copies its
        # own part, so there must be as many ranks as have saved.
        has_stores = any(manifest.stores_elsewhere for manifest in checkpoint.manifests)
        if len(checkpoint.manifests) == ranks and has_stores:
            saved = SaveRequest(checkpoint.path, id=checkpoint.id, rank=rank, ranks=ranks)
            self.mirror.offer(saved, is_new=False)

    def _lock_stores(
        self,
        stores: Sequence[Place],
        checkpoint: Checkpoint,
        session: Session | None = None,
        empty: Collection[int] = (),
    ) -> _StoreLocks | None:
        """Lock all stores of a checkpoint, or none of them, and update their pins.

        Args:
            stores: The stores.
            checkpoint: The checkpoint, open.
            session: Opens stores that this session can reuse for writing, which locks them, too; None to open none.
            empty: Numbers of the session's paths on which it can reuse a store: it has written nothing there yet, so
                it can give its own store up.

        Returns:
            The stores with their locks. None if a store cannot be locked, or none may be, as the checkpoint is a copy
            of one elsewhere.
        """
        if self._is_only_read(stores, checkpoint):
            return None
        locked = _StoreLocks()
        for path, store in stores:
            # The number of the session's own path that the store lies on.
            own_stores = enumerate(self.stores[: self._path_count])
            number = next((own_number for own_number, (own_path, _) in own_stores if own_path == path), None)
            # Of several stores on one path, one alone can replace the session's own.
            can_reopen = number in empty and number not in locked.reopened
            if session is not None and number is not None and can_reopen:
                reopened = self._reopen_store(number, path, store, checkpoint, session)
                if reopened is not None:
                    locked.reopened[number] = reopened
                    continue
            lock = store_folder(path, store).acquire_lock()
            if lock is None:
                locked.release()
                log.info("%s stays with whoever uses its stores", checkpoint.path)
                return None
            locked.locks += ((path, store, lock),)
        for path, store in stores:
            with contextlib.suppress(CheckpointError):  # a pin that stays as it was keeps its store
                note_move(checkpoint.id, checkpoint.path, path, store)
                unpin_released(path, store)
        return locked

    def _is_only_read(self, stores: Sequence[Place], checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint's stores must only be read, and not be locked; the log says why.

        That is so if the checkpoint is a copy of one that is elsewhere, too, which needs the stores; or if their pins
        cannot be read.
        """
        try:
            is_copy = any(is_elsewhere(checkpoint.id, checkpoint.path, path, store) for path, store in stores)
        except CheckpointError as error:
            log.info("%s: its stores are only read: %s", checkpoint.path, error)
            return True
        if is_copy:
            log.info("%s is a copy of a checkpoint that is elsewhere, too: its stores are only read", checkpoint.path)
        return is_copy

    def _reopen_store(
        self, number: int, path: str, store: uuid.UUID, checkpoint: Checkpoint, session: Session
    ) -> _ReopenedStore | None:
        """Open a store for writing, and return it with its pinned tiles; None if it may only be read.

        It may be written to only if it is certain which of its slots are free (`pinned_in`), before the store is
        locked and, as pins may change until then, once more after that.
        """
        layout = session.plan.layout
        pinned = pinned_in(path, store, number, checkpoint, layout)
        if pinned is None:
            return None
        try:
            tier = session.reopen_tier(number, store, used_bytes(pinned))
        except OffloadError as error:
            log.info("offload-%s on %s is only read: %s", store, path, error)
            return None
        if pinned_in(path, store, number, checkpoint, layout) != pinned:  # it changed before it was locked
            tier.close()
            return None
        return _ReopenedStore(store, tier, pinned)

    def take_over(
        self, checkpoint: Checkpoint, manifest: Manifest, index: TileIndex, session: Session, rank: int, ranks: int
    ) -> Takeover:
        """Use a checkpoint's tiles where they lie: open their stores, and return what this session's index needs.

        On the engine thread, with nothing in flight. Stores that the checkpoint's tiles lie in are of three kinds:

            this session's own      stay: the session has saved the checkpoint itself
            those it can reopen     are written to from now on, each in place of its own on the path
            all others              are foreign: they get new path numbers, and are only read

        The checkpoint is queued to be mirrored. If its stores could be locked it is kept, with others that have tiles
        in reopened stores, until later saves release them.

        Args:
            checkpoint: The checkpoint, open.
            manifest: What `manifest_in_place` has returned: this rank's, or that of the one rank that has saved for
                all, which alone may write to the stores then.
            index: The machine's; it is not changed here.
            session: Opens stores for writing, and puts them in the place of its own.
            rank: This rank.
            ranks: How many there are.

        Raises:
            TierError: A store cannot be read; this session has its own stores still.
        """
        takeover = Takeover()
        own_numbers = {place: number for number, place in enumerate(self.stores[: self._path_count])}
        places = dict.fromkeys(manifest.stores_elsewhere)  # each once, in order
        # The path number of each store: first of the session's own, then of reopened and of foreign ones.
        numbers = {place: own_numbers[place] for place in places if place in own_numbers}
        not_own = [place for place in places if place not in own_numbers]
        locked = None  # of another rank's manifest: its stores are only read, as that rank may write to them
        if manifest.rank == rank:
            locked = self._lock_for_takeover(not_own, checkpoint, index, session, takeover)
        all_reopened = {} if locked is None else locked.reopened
        for number, reopened in all_reopened.items():
            path, _ = self.stores[number]
            numbers[path, reopened.store] = number
        foreign_places = [place for place in not_own if place not in numbers]
        foreign_tiers = self._open_foreign_stores(foreign_places, locked)  # may raise: the session is as it was
        self._note_loaded(checkpoint)
        # The keys of `foreign_tiers` are the path numbers that the places get here, in the same order.
        numbers.update(zip(foreign_places, foreign_tiers, strict=True))
        self.stores += foreign_places
        without_locks = tuple((path, store) for path, store in foreign_places if not parse_place(path).has_locks)
        if without_locks:  # a note, in place of a lock, tells other sessions that they are read
            note_reading(without_locks, self._note_name)
            read = KeptCheckpoint(checkpoint.path, checkpoint.id, rank, without_locks, save_number=None)
            self._read_checkpoints.append(read)
        self._other_tiers.update(foreign_tiers)
        for number, reopened in all_reopened.items():
            session.replace_tier(number, reopened.tier)
            path, _ = self.stores[number]
            self.stores[number] = path, reopened.store
        takeover.records = records_in(manifest, numbers)
        self._mirror_loaded(checkpoint, rank, ranks)
        # Not if the stores could not, or must not, be locked (None), nor if all of them were this session's own
        # before.
        if locked is not None and not_own:
            self._keep_after_takeover(checkpoint, manifest, locked, takeover)
        return takeover

    def _lock_for_takeover(
        self, stores: Sequence[Place], checkpoint: Checkpoint, index: TileIndex, session: Session, takeover: Takeover
    ) -> _StoreLocks | None:
        """Lock a checkpoint's stores, and open those for writing that the session can reuse; see `_lock_stores`.

        The size to which each opened store may grow is noted in `takeover.limit_bytes`. The opened stores must have
        room for all slots of the plan. A copy of the index, in which they replace the session's own, tells whether
        they have; if not, no store is opened for writing.
        """
        empty = [number for number in range(self._path_count) if index.is_empty(number)]
        locked = self._lock_stores(stores, checkpoint, session, empty)
        if locked is None or not locked.reopened:
            return locked
        trial = deepcopy(index)
        for number, (_, tier, pinned) in locked.reopened.items():
            # It may grow by as much as the session's own store might, if the path has room for that.
            limit_bytes = used_bytes(pinned) + min(index.limit_bytes(number), tier.free_bytes())
            takeover.limit_bytes[number] = limit_bytes
            # How many checkpoints hold each slot.
            counts = Counter(record.location for tiles in pinned for record in tiles.records.values())
            trial.replace_store(number, limit_bytes, counts)
        if trial.has_planned_room():
            return locked
        locked.release()
        takeover.limit_bytes.clear()
        return self._lock_stores(stores, checkpoint)

    def _open_foreign_stores(self, places: Sequence[Place], locked: _StoreLocks | None) -> dict[int, Tier]:
        """Open stores for reading only, and return them by their new path numbers, which follow those in use.

        If one cannot be opened, the others are closed, and the stores in `locked` released.
        """
        foreign_tiers: dict[int, Tier] = {}
        try:
            for number, (path, store) in enumerate(places, len(self.stores)):
                foreign_tiers[number] = parse_place(path).open_existing(store, self._queue)
        except BaseException:
            for tier in foreign_tiers.values():
                tier.close()
            if locked is not None:
                locked.release()
            raise
        return foreign_tiers

    def _keep_after_takeover(
        self, checkpoint: Checkpoint, manifest: Manifest, locked: _StoreLocks, takeover: Takeover
    ) -> None:
        """Keep the loaded checkpoint, and others that have tiles in the stores that were opened for writing.

        Each of these gets the number of a save, under which `takeover.pinned_records` has its tiles, so that their
        slots are held. Later saves release the checkpoints that are kept. One that has tiles in further stores, too,
        is not kept: its slots stay held.
        """
        all_pinned = [tiles for _, _, pinned in locked.reopened.values() for tiles in pinned]
        pinned_by_id: dict[str, list[PinnedTiles]] = {}
        for tiles in sorted(all_pinned, key=lambda tiles: tiles.step):
            pinned_by_id.setdefault(tiles.id, []).append(tiles)
        own_stores = {*self.stores[: self._path_count]}
        loaded_number = None  # of the loaded checkpoint; None if no store was opened for writing
        for id, pinned in pinned_by_id.items():
            self._last_number += 1
            records = dict(item for tiles in pinned for item in tiles.records.items())
            takeover.pinned_records[self._last_number] = records
            first = pinned[0]  # the others are the same rank's tiles in other stores
            stores = first.manifest.stores_elsewhere
            if id == checkpoint.id:  # it is kept last, below
                loaded_number = self._last_number
            elif own_stores.issuperset(stores):
                kept = KeptCheckpoint(first.folder, id, first.manifest.rank, stores, self._last_number)
                (self.kept if first.step <= manifest.step else self._newer).append(kept)
                if is_interrupted(kept.folder):
                    self._interrupted_numbers.add(self._last_number)
        stores = manifest.stores_elsewhere
        loaded = KeptCheckpoint(checkpoint.path, checkpoint.id, manifest.rank, stores, loaded_number, locked.locks)
        self.kept.append(loaded)

    def _close_foreign_stores(self) -> None:
        """Close the foreign stores: their tiles lie in this session's own stores by now.

        `_other_tiers` has the sink of a save, too. Its number is not below `len(self.stores)`, and it stays open.
        """
        for number in [number for number in self._other_tiers if number < len(self.stores)]:
            self._other_tiers.pop(number).close()

    def close(self) -> None:
        """Close the stores beyond the session's own, delete its notes of reading, and release locks.

        `take_over` has written the notes to stores without locks (`note_reading`); `drop_notes` deletes them. No save
        begins after this, and no checkpoint is kept any more.
        """
        for number in list(self._other_tiers):
            self._other_tiers.pop(number).close()
        for checkpoint in self._read_checkpoints:
            drop_notes(checkpoint.stores, self._note_name)
        for checkpoint in self.kept:
            for _, _, lock in checkpoint.locks:
                release_lock(lock)
        # So that another call releases no lock again. It may delete notes again, which changes nothing: hence
        # `_read_checkpoints` stays.
        self.kept.clear()


def check_mirror(config: OffloadConfig) -> None:
    """Raise `ConfigError` if checkpoints cannot be copied to the mirror that the user wants."""
    if config.mirror is not None:
        parse_place(config.mirror, "mirror").check("mirror")


def _find_user(manifest: Manifest) -> int | None:
    """Return the pid of another process that uses a store that a manifest names; None if none does.

    0 if some process uses it, or may use it, and which one is not known: it is another machine's, or another user's.
    Uses by other sessions of this process do not count.
    """
    for path, store in manifest.stores_elsewhere:
        try:
            pid = store_folder(path, store).used_by()
        except PermissionError:  # the store is another user's, who may use it
            return 0
        except (CheckpointError, OSError):  # the store is gone
            continue
        if pid not in (None, os.getpid()):
            return pid
    return None


def _without_numbers(folder: str) -> str:
    """Return a folder's path without digits, by which folders of a series are alike (checkpoint-500, -1000)."""
    return re.sub(r"\d+", "", folder)


def save_error(folder: str, cause: BaseException) -> CheckpointError:
    """Return the error that users get for a save that has failed with `cause`."""
    if isinstance(cause, CheckpointError):
        return cause
    error = CheckpointError(f"no checkpoint was written to {folder}: {cause}")
    error.__cause__ = cause
    return error
