"""Commits and releases checkpoints: the order in which their small files are written and deleted.

All tiles are durable before step 1. Each file is written whole, or is not there.

    1. Every store that the checkpoint refers to gets a pin. A store with a pin is not deleted.
       With one rank, an empty file in the folder (`begun_name`) says before this that the checkpoint is not
       committed; writing `COMMIT` replaces that file.
    2. The rank writes the file with the caller's `extra`, then its manifest.
    3. Rank 0 waits for the manifests of all ranks, and writes `COMMIT`. From then on there is a checkpoint.
    4. The checkpoint that the folder held before is deleted. Then older ones are released, each in its own folder:
       `RELEASED` is written with the checkpoint's id; then its `COMMIT`, its manifest and its pins are deleted.

So a folder holds the checkpoint from before or the new one, whatever happens in between. `COMMIT` names the
checkpoints that the folder held before: they count as replaced, even if the session is killed in step 4.

Giving up. Ranks wait for each other in step 3: rank 0 for their manifests, the others for `COMMIT`. A rank gives up
after `RANKS_TIMEOUT_S`, when its session breaks, when `close` has waited long enough, or when it sees that another
rank cannot do its part any more: its process has ended, or the part has failed. A rank whose part has failed says so
by an empty file (`note_failure`); its session's next `COMMIT` in the folder deletes that file. Only rank 0 decides,
by writing `COMMIT`, and everything that a `COMMIT` may name has to be kept:

    rank 0 gives up before it begins to write `COMMIT`: no other rank writes it, so there will be no checkpoint;
        the files of this rank are deleted. Manifests of other ranks remain, and are ignored.
    rank 0 fails while it writes `COMMIT`: the file may exist all the same (its name may not last; an answer was
        lost). If the folder can be read and has another `COMMIT` or none, this rank's part is undone; else the
        checkpoint is in doubt.
    another rank fails before it begins to write its manifest: rank 0 never finds it, so this rank's part is undone.
    another rank gives up or fails later: rank 0 may have found the manifest, or may find it long after this rank has
        ended. The checkpoint is in doubt.
    any rank is killed: as if it had given up, with nothing undone.

For a checkpoint in doubt manifest, pins and slots are kept, as if it had been committed, and the caller gets an
error. A session that goes on resolves the doubt when its next checkpoint has been committed: that `COMMIT` names the
checkpoints that rank 0 has given up since the `COMMIT` before. A session that ends leaves the pin, which costs room
but no data.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from offload import waits
from offload.checkpoint.contents import read_commit, read_manifests, read_released
from offload.checkpoint.folder import FolderLock, open_folder
from offload.checkpoint.manifest import (
    COMMIT_NAME,
    FAILURE,
    OWN_FILE,
    RELEASED_NAME,
    CommitRecord,
    Manifest,
    Place,
    StoreRef,
    decode,
    encode,
    extra_name,
    failure_name,
    manifest_name,
    names_of,
    seal_commit,
    seal_released,
    unseal_commit,
)
from offload.checkpoint.request import SaveRequest
from offload.checkpoint.stores import (
    HERE,
    Pin,
    Standing,
    begun_name,
    delete_free,
    delete_released,
    delete_unused,
    drop_notes,
    folders_above,
    is_read,
    lasting_inode,
    pin,
    read_pins,
    released_before,
    standing,
    store_folder,
    unpin,
)
from offload.errors import CheckpointError
from offload.tiers.filesystem import LockFile, release_lock
from offload.tiers.place import Folder

RANKS_TIMEOUT_S = 600.0
"""Seconds that a rank waits for the others to write their manifests."""

_log = logging.getLogger("offload")


@dataclass(slots=True)
class KeptCheckpoint:
    """A checkpoint that this session has committed or resumed from, and whose state in the stores is kept for it.

    Attributes:
        folder: The checkpoint's folder.
        id: The save's id.
        rank: This rank.
        stores: Path and uuid of the stores that the checkpoint refers to.
        save_number: The machine's number of the save; None where the machine holds no slots for it.
        locks: Those of `stores` that ended sessions have left, and that this session has locked and does not write
            to: path, uuid and lock of each. Such a store is deleted once no checkpoint needs it.
        is_reported: Whether the log has said that the checkpoint is missing.
    """

    folder: str
    id: str
    rank: int
    stores: tuple[tuple[str, uuid.UUID], ...]
    save_number: int | None
    locks: tuple[tuple[str, uuid.UUID, LockFile], ...] = ()
    is_reported: bool = False

    @property
    def pin(self) -> Pin:
        """The pin that its stores have for this checkpoint."""
        return Pin(self.id, self.folder)


@dataclass(slots=True)
class CommitJob:
    """One checkpoint to commit.

    When `run` returns, the checkpoint is committed. When it raises `CheckpointError`, the checkpoint is `undone`, or
    in doubt (`is_doubtful`).

    Attributes:
        folder: The folder of the checkpoint.
        request: The caller's request.
        manifest: This rank's part.
        extra: The caller's own bytes.
        older: Checkpoints kept so far, in the order in which they are to be released.
        keep: How many checkpoints to keep, this one included.
        check_stores: Called before anything is written; raises `CheckpointError` if a store in the manifest is not
            where it was opened.
        paths: Paths whose leftovers are deleted: stores without a pin whose session is known to have ended.
        cancelled: Set when the session breaks: nothing is committed from then on.
        ranks_until_s: Returns the time, on the monotonic clock, at which other ranks are given up.
        pause_mirroring: Called on rank 0 before it writes `COMMIT`; returns the id of the checkpoint that it is
            mirroring, or "", and begins to mirror no other until the save has ended.
        note_mirrored: Called on other ranks, before anything is released, with the id of the checkpoint that rank 0
            was mirroring, which they read in `COMMIT`; not called if rank 0 was mirroring none.
        is_needed: Returns whether somebody needs the slots of an older checkpoint, which is then kept.
        read: Checkpoints that this session has resumed from and does not read any more. Their `stores` are only those
            without locks. A checkpoint is removed from this list once these stores are deleted.
        reader: Name of the files by which this session has noted in those stores that it reads them.
        doubtful: Checkpoints of this session that were in doubt so far.
        abandoned_ids: On rank 0: ids of saves that this rank has given up, and that nobody will commit.
        released: Set by `run`: those of `older` and `doubtful` that were released.
        confirmed: Set by `run`: those of `doubtful` that were committed after all.
        committed: Whether the checkpoint has been committed.
        undone: Whether this rank's files of the checkpoint are deleted again, or were never written.
        awaited: In words, what this rank waits for other ranks to do; "" if it does not wait.
        timeout_s: Seconds that a rank waits for the others; by default `RANKS_TIMEOUT_S`.
    """

    folder: Folder
    request: SaveRequest
    manifest: Manifest
    extra: bytes | None
    older: Sequence[KeptCheckpoint]
    keep: int
    cancelled: threading.Event = field(default_factory=threading.Event)
    check_stores: Callable[[], object] = str  # does nothing
    paths: Sequence[str] = ()
    ranks_until_s: Callable[[], float] = lambda: math.inf
    pause_mirroring: Callable[[], str] = str  # returns ""
    note_mirrored: Callable[[str], object] = str  # does nothing
    is_needed: Callable[[KeptCheckpoint], bool] = field(default_factory=lambda: is_being_read)  # defined below
    read: list[KeptCheckpoint] = field(default_factory=list)
    reader: str = ""
    doubtful: Sequence[KeptCheckpoint] = ()
    abandoned_ids: Sequence[str] = ()
    released: list[KeptCheckpoint] = field(default_factory=list)
    confirmed: list[KeptCheckpoint] = field(default_factory=list)
    committed: bool = False
    undone: bool = False
    awaited: str = ""
    timeout_s: float = field(default_factory=lambda: RANKS_TIMEOUT_S)  # as it is then: tests set it
    _may_be_named: bool = False  # COMMIT may name this rank's part from now on
    _mirrored_id: str = ""  # the checkpoint whose files stay here until it is mirrored

    @property
    def is_doubtful(self) -> bool:
        """Whether the commit has failed here, and another rank may have made it a checkpoint all the same."""
        return self._may_be_named and not self.committed and not self.undone

    @property
    def checkpoint(self) -> KeptCheckpoint:
        """This checkpoint, as the session keeps it once it is committed."""
        manifest = self.manifest
        stores = manifest.stores_elsewhere
        return KeptCheckpoint(self.folder.path, manifest.id, manifest.rank, stores, save_number=None)

    def run(self) -> None:
        """Commit the checkpoint, then release older ones that need not be kept.

        Raises:
            CheckpointError: The checkpoint was not committed, or is in doubt; see `undone`.
        """
        lock = FolderLock(self.folder)
        try:
            if self.manifest.rank == 0:  # which alone writes and deletes `COMMIT`
                self._wait_for_lock(lock)
            self._run()
        finally:
            lock.release()

    def _wait_for_lock(self, lock: FolderLock) -> None:
        """Wait until no other session commits in the folder, and acquire its lock, which the caller releases.

        Nothing is written before that, so the checkpoint counts as `undone` if the wait raises.
        """
        self.undone = True
        self._wait(lambda: "" if lock.acquire() else "another session's checkpoint there", who_says="that one says")
        self.undone = False

    def _run(self) -> None:
        """Write the files in the order that the module gives, then release older checkpoints.

        If the commit fails, its files are deleted again, unless a `COMMIT` may name them: then it is in doubt.
        """
        folder, manifest = self.folder, self.manifest
        try:
            earlier_ids = released_before(folder) if manifest.rank == 0 else ()
            begun = begun_name(folder, manifest.id) if manifest.ranks == 1 else ""
            self._write_part(begun)
            if manifest.rank == 0:
                self._write_commit(begun, earlier_ids)
            else:
                self._wait(  # a `COMMIT` that cannot be read (None) counts as missing, and is read again
                    lambda: "" if _is_committed(folder, manifest.id) else f"rank 0 to write {COMMIT_NAME}",
                    find_gone=self._find_gone,
                )
        except CheckpointError:
            if not self._may_be_named or (manifest.rank == 0 and self._is_commit_surely_missing()):
                self.undo()
            raise
        self.committed = True
        try:
            if manifest.rank > 0 and (mirrored := read_commit(folder).mirrored) is not None:
                self.note_mirrored(mirrored)
            self.request.on_commit()  # if it raises, nothing is released
            self._resolve_doubt()
            self._release_older()
        except Exception as error:  # the checkpoint has been committed all the same
            _log.warning("after the checkpoint in %s: %s", folder.path, error)

    def _write_part(self, begun: str) -> None:
        """Pin the stores of this rank's part, then write its files: `extra` and the manifest.

        `begun` is the name of the file that says, from before the first pin, that the checkpoint is not committed
        (`begun_name`); "" for none.
        """
        folder, manifest = self.folder, self.manifest
        self.check_stores()
        if begun:
            folder.write(begun, b"")
        pin_of_folder = Pin(manifest.id, folder.path, folder_inode=lasting_inode(folder))
        for ref in manifest.stores:
            pin(self._store(ref), Pin(manifest.id, HERE) if ref.path is None else pin_of_folder)
        if self.extra is not None:
            folder.write(extra_name(manifest.id, manifest.rank), self.extra)
        # Another rank's part may be named once rank 0 has found its manifest, rank 0's once it writes `COMMIT`.
        self._may_be_named = manifest.rank > 0
        folder.write(manifest_name(manifest.id, manifest.rank), encode(manifest))

    def _write_commit(self, begun: str, earlier_ids: Sequence[str]) -> None:
        """On rank 0: write `COMMIT` once the manifests of all ranks are in the folder.

        `COMMIT` replaces the file `begun`, and names the checkpoints `earlier_ids`, which the folder held before.
        Mirroring is paused before it is written, until the save has ended (`pause_mirroring`).
        """
        manifest = self.manifest
        self._wait(self._describe_missing, find_gone=self._find_gone)
        if self.cancelled.is_set():  # which the wait does not look at when nothing is missing
            raise CheckpointError(f"{self.folder.path} was not committed: the session broke")
        self._may_be_named = True
        # The folder may hold, or have held, this very checkpoint, as when two sessions mirror it. If it were named
        # here, `_delete_replaced_files` would delete its files.
        earlier_ids = [id for id in earlier_ids if id != manifest.id]
        # `COMMIT` names at most `MAX_RELEASED` ids, so the most important come first: that of the checkpoint that was
        # replaced last (the first of `earlier_ids`), and those of saves that were given up.
        replaced = (*earlier_ids[:1], *self.abandoned_ids, *earlier_ids[1:])
        self._mirrored_id = self.pause_mirroring()
        # For the other ranks, which must not release what is mirrored; one rank alone has no need of it.
        mirrored = self._mirrored_id if manifest.ranks > 1 and self._mirrored_id else None
        commit = CommitRecord(manifest.id, manifest.ranks, replaced, mirrored)
        self.folder.write(COMMIT_NAME, seal_commit(commit), begun=begun)

    def undo(self) -> None:
        """Delete this rank's files and pins of the checkpoint; the caller knows that no rank will commit it."""
        self._delete_uncommitted(self.folder, self.manifest.id, [self._store(ref) for ref in self.manifest.stores])
        self.undone = True

    def _store(self, ref: StoreRef) -> Folder:
        """Return the folder of a store that the manifest names."""
        return store_folder(self.folder.path if ref.path is None else ref.path, ref.store)

    def _describe_missing(self) -> str:
        """Return, in words, the ranks whose manifests are not in the folder yet; "" if all are."""
        missing = self._ranks_without_manifest()
        return f"the manifests of ranks {', '.join(map(str, missing))}" if missing else ""

    def _ranks_without_manifest(self) -> list[int]:
        """Return the ranks whose manifests of this save are not in the folder."""
        names = set(self.folder.names())
        id, ranks = self.manifest.id, self.manifest.ranks
        return [rank for rank in range(ranks) if manifest_name(id, rank) not in names]

    def _find_gone(self) -> str:
        """Return, in words, which ranks cannot do their part of this commit any more; "" if there are none.

        Such a rank's process has ended, or its part has failed, before its part was done: writing `COMMIT` on rank 0,
        the manifest on others.
        """
        ended = self.request.find_ended()  # before the folder is read: manifests that it lacks then will never come
        try:
            names = {*self.folder.names()}
        except CheckpointError:  # it may be possible later
            return ""
        manifest = self.manifest
        failed = [rank for rank in range(manifest.ranks) if failure_name(manifest.id, rank) in names]
        for ranks, fate in ((ended, "ended"), (failed, "failed")):
            # Rank 0 is needed even with its manifest there: it still has `COMMIT` to write.
            gone = [rank for rank in ranks if rank == 0 or manifest_name(manifest.id, rank) not in names]
            if gone:
                return f"rank {', '.join(map(str, gone))} has {fate}"
        return ""

    def _wait(
        self,
        missing: Callable[[], str],
        who_says: str = "the other ranks say",
        find_gone: Callable[[], str] = str,  # returns ""
    ) -> None:
        """Poll until nothing is missing any more, with pauses from 0.01 s to 1 s; `awaited` says what is, meanwhile.

        Args:
            missing: Returns, in words, what is still missing; "" ends the wait.
            who_says: Whose log the error tells users to see, such as "the other ranks say".
            find_gone: Returns, in words, which ranks have gone, so that what is missing cannot come; "" for none.

        Raises:
            CheckpointError: That takes too long, a needed rank has gone, or the session broke.
        """
        silence, last_missing_text = waits.Silence(), ""
        until_s, pause_s = silence.now_s + self.timeout_s, 0.01
        try:
            while True:
                # `find_gone` first: what a rank has done before it was found gone, `missing` then sees.
                gone = find_gone()
                missing_text = missing()
                if not missing_text:
                    break
                self.awaited = f"{missing_text}, so that {self.folder.path} is a checkpoint"
                if missing_text != last_missing_text:  # something has come, or this is the first round
                    silence.end()
                if gone:
                    raise CheckpointError(f"{self.folder.path} was not committed: {gone}; see what it has said last")
                is_late = silence.now_s > until_s or time.monotonic() > self.ranks_until_s()
                # The pause ends early, with True, when `cancelled` is set.
                if is_late or silence.wait(self.cancelled.wait, pause_s):
                    story = f"{self.folder.path} was not committed: waited for {missing_text} in vain"
                    raise CheckpointError(f"{story}; see what {who_says}")
                silence.warn_if_due(lambda: self.awaited)
                last_missing_text = missing_text
                pause_s = min(2 * pause_s, 1.0)
        finally:
            self.awaited = ""

    def _is_commit_surely_missing(self) -> bool:
        """Return whether the folder lacks this `COMMIT`, and a write that has failed cannot take effect later."""
        # `is False`: None means that the folder's `COMMIT` cannot be read.
        return not self.folder.fails_late and _is_committed(self.folder, self.manifest.id) is False

    def _resolve_doubt(self) -> None:
        """Resolve earlier checkpoints in doubt, by what rank 0 has written since; this commit has succeeded.

        A checkpoint that the new `COMMIT` names is deleted: rank 0 has given it up, or has replaced it in this
        folder. So is one that rank 0 has released. One that rank 0 has committed is confirmed. Others stay in doubt.
        """
        abandoned_ids = read_commit(self.folder).replaced if self.doubtful else ()
        for checkpoint in self.doubtful:
            folder = open_folder(checkpoint.folder)
            # Before its standing: rank 0 may be releasing it now, and writes that down before `COMMIT` is deleted.
            is_committed = _is_committed(folder, checkpoint.id)
            verdict = standing(checkpoint.pin, store="")
            if checkpoint.id in abandoned_ids or verdict is Standing.RELEASED:
                stores = [store_folder(path, store) for path, store in checkpoint.stores]
                self._delete_uncommitted(folder, checkpoint.id, stores)
                self.released.append(checkpoint)
            elif is_committed:  # else it stays in doubt
                self.confirmed.append(checkpoint)

    def _delete_uncommitted(self, folder: Folder, id: str, stores: Sequence[Folder]) -> None:
        """Delete this rank's files and pins of an uncommitted checkpoint; log what fails, and delete the rest."""
        steps = [
            *(partial(folder.delete, name) for name in names_of(id, self.manifest.rank)),
            *(partial(unpin, store, id) for store in stores),
        ]
        are_done = [_has_succeeded(step) for step in steps]
        begun = begun_name(folder, id)  # "" in a bucket; with several ranks there is no such file
        # Deleted last, and only if no pin is left: while the file `begun` is there, such pins count as released.
        if begun and all(are_done):
            _has_succeeded(partial(folder.delete, begun))

    def _release_older(self) -> None:
        """Delete the folder's earlier checkpoints, and release older ones in other folders.

        A failure costs room, not data. Releasing can be repeated: a session may have been killed in the middle of it.
        """
        is_first = self.manifest.rank == 0
        path = self.folder.path
        for checkpoint in self.older:
            if checkpoint.folder == path:
                self._release(checkpoint)
        if is_first:
            try:
                self._delete_replaced_files()
            except CheckpointError as error:
                _log.warning("%s", error)
        elsewhere = [checkpoint for checkpoint in self.older if checkpoint.folder != path]
        excess = max(0, len(elsewhere) + 1 - self.keep)  # 1: this checkpoint
        for checkpoint in elsewhere[:excess]:
            self._release(checkpoint)
        # The folder may still have the store of a copy that was saved to it before.
        delete_free([path, *self.paths] if is_first else self.paths)
        for checkpoint in [*self.read]:  # all state is in this session's own stores by now
            if not self.is_needed(checkpoint):
                drop_notes(checkpoint.stores, self.reader)
                if delete_released(checkpoint.stores):
                    self.read.remove(checkpoint)

    def _delete_replaced_files(self) -> None:
        """Delete the files of checkpoints that the folder held before, all ranks' files.

        Those of a checkpoint that is being mirrored stay.
        """
        replaced_ids = read_commit(self.folder).replaced
        released_ids, _ = read_released(self.folder)
        if released_ids:  # the new `COMMIT` names them, too, if the folder had none before (`released_before`)
            self.folder.delete(RELEASED_NAME)
        # Not those of other ids: another save to this folder may be under way.
        for name in self.folder.names():
            # Such names are "manifest-<id>-<rank>.json", "failed-<id>-<rank>" and so on.
            id = name.split("-")[1] if OWN_FILE.fullmatch(name) or FAILURE.fullmatch(name) else ""
            if id in replaced_ids and id != self._mirrored_id and self._has_freed(name):
                self.folder.delete(name)

    def _has_freed(self, name: str) -> bool:
        """Delete the stores in this folder that a replaced manifest names; return whether none of them is left.

        They are those of a copy. Only when they are gone may the manifest be deleted, as nothing else names them.
        Other files name no stores. In a folder with locks there is nothing to do: `delete_free` finds such stores.
        """
        if self.folder.has_locks or not name.startswith("manifest-"):
            return True
        try:
            manifest = decode(self.folder.read(name) or b"", name)
        except CheckpointError:  # it is damaged, or has gone (b""): nobody knows its stores
            return True
        stores: list[Place] = [(self.folder.path, ref.store) for ref in manifest.stores if ref.path is None]
        try:
            return delete_released(stores)
        except CheckpointError as error:  # the next commit tries again
            _log.warning("%s", error)
            return False

    def _release(self, checkpoint: KeptCheckpoint) -> None:
        """Release an older checkpoint, whose place this one takes; note it in `released` if that succeeds."""
        note = f"{self.folder.path} took its place. Raise checkpoints_kept to keep more"
        if release(checkpoint, note, is_needed=self.is_needed):
            self.released.append(checkpoint)


def _has_succeeded(step: Callable[[], object]) -> bool:
    """Do one step of deleting a failed checkpoint's files; return whether it succeeded, and log the error if not."""
    try:
        step()
    except CheckpointError as error:
        _log.warning("after a checkpoint that failed: %s", error)
        return False
    return True


def _is_committed(folder: Folder, id: str) -> bool | None:
    """Return whether a folder's `COMMIT` is of the save `id`; None if it cannot be read."""
    try:
        content = folder.read(COMMIT_NAME)
        return content is not None and unseal_commit(content, folder.path).id == id
    except CheckpointError:
        return None


def note_failure(folder: Folder, request: SaveRequest) -> None:
    """Tell the other ranks, by a file in the folder, that this rank's part of a save has failed: they give it up.

    For a save, or a mirror's copy, that this rank has not committed, and that is not in doubt. Nothing is raised if
    the file cannot be written.
    """
    if request.ranks > 1:
        with contextlib.suppress(CheckpointError):
            folder.write(failure_name(request.id, request.rank), b"")


def is_being_read(checkpoint: KeptCheckpoint) -> bool:
    """Return whether somebody is known to read a checkpoint's stores."""
    return any(is_read(store_folder(path, store)) for path, store in checkpoint.stores)


def release(
    checkpoint: KeptCheckpoint,
    note: str,
    *,
    missing: bool = False,
    is_needed: Callable[[KeptCheckpoint], bool] = is_being_read,
) -> bool:
    """Release a checkpoint: withdraw it from its folder, and take its pins off its stores.

    Rank 0 writes `RELEASED` with its id, and then deletes its `COMMIT`. Each rank deletes its own other files and its
    pins; ranks other than 0 wait a moment for rank 0 to release it first. A checkpoint whose folder has neither of
    the two files is not released, unless `missing`: the folder may have been moved.

    Args:
        checkpoint: The checkpoint.
        note: The reason, for a user who looks for the checkpoint.
        missing: Free its slots even if it is not in its folder: the caller knows that it was deleted.
        is_needed: Returns whether somebody needs its slots.

    Returns:
        Whether its slots are free now. If not, the log says why, unless somebody has opened it during this call.
    """
    try:
        if is_needed(checkpoint):
            _log.info("%s stays for now: somebody is reading it", checkpoint.folder)
            return False
        verdict = standing(checkpoint.pin, store="") if checkpoint.rank == 0 else _await_release_by_rank_0(checkpoint)
        if verdict is Standing.HELD and checkpoint.rank > 0:
            _log.info("%s stays for now: rank 0 has not released it", checkpoint.folder)
            return False
        if verdict is Standing.MISSING and not missing:
            _report_missing(checkpoint)
            return False
        if verdict is not Standing.MISSING:
            is_committed = verdict is Standing.HELD  # only on rank 0: others have returned above
            _withdraw(checkpoint, note, committed=is_committed)
        if is_needed(checkpoint):  # somebody opened it before it was withdrawn; nobody can open it any more
            return False
        _unpin_and_delete(checkpoint)
    except CheckpointError as error:
        _log.warning("%s could not be released: %s", checkpoint.folder, error)
        return False
    return True


def _report_missing(checkpoint: KeptCheckpoint) -> None:
    """Log that a checkpoint is not in its folder, and what a user can do; only once for each (`is_reported`)."""
    if checkpoint.is_reported:
        return
    checkpoint.is_reported = True
    paths = ", ".join(path for path, _ in checkpoint.stores)
    _log.warning(
        "the checkpoint %s is not in %s any more. It may have been moved, so its state on %s stays. If it was "
        "deleted, optimizer.release_checkpoint gives the room back now (a Trainer has the optimizer in "
        "trainer.optimizer.optimizer), or `offload gc --really` when training has ended",
        *(checkpoint.id, checkpoint.folder, paths),
    )


def release_before_deletion(folder: str | os.PathLike[str], noted_in: str | os.PathLike[str]) -> bool:
    """Release the checkpoint in a folder that the caller deletes next, for all ranks and whichever session keeps it.

    The folder's `RELEASED` will be deleted with the folder, so another one is written in `noted_in`. Sessions read
    that at their next commit or resume, and then free the checkpoint's slots; `offload gc` does, too.

    Args:
        folder: The checkpoint's. A folder that holds no checkpoint, or a copy of one elsewhere, is left as it is.
        noted_in: The folder above `folder`, or the one above that.

    Returns:
        Whether it is released.

    Raises:
        CheckpointError: Something there cannot be read or written, or is not ours.
        ConfigError: A folder has a name that none can have.
    """
    target, above = open_folder(folder), open_folder(noted_in)
    # If `folder` is a link, the caller deletes the link, and the checkpoint's folder stays: nothing is released.
    # `open_folder` resolves links, so below a link the resolved path differs from the one that was given.
    is_linked = os.path.relpath(folder, noted_in) != os.path.relpath(target.path, above.path)
    if is_linked or above.path not in folders_above(target.path) or target.read(COMMIT_NAME) is None:
        return False
    id, manifests = read_manifests(target)
    stores = {place for manifest in manifests for place in manifest.stores_elsewhere}
    folders = [store_folder(path, store) for path, store in sorted(stores)]
    pins = [(pin, store) for store in folders for pin in read_pins(store) if pin.id == id]
    if not all(pin.names(target.path, store) for pin, store in pins):
        return False  # this folder is a copy: the pins name the original, which needs the slots
    note = f"it was deleted, which {above.path} has noted"
    earlier_ids, _ = read_released(above)
    if not earlier_ids and above.read(RELEASED_NAME) is not None:
        raise CheckpointError(f"{above.path}/{RELEASED_NAME} is not ours to replace: move it away")
    _withdraw(KeptCheckpoint(target.path, id, rank=0, stores=(), save_number=None), note, committed=True)
    above.write(RELEASED_NAME, seal_released((id, *earlier_ids), "these checkpoints were deleted with their folders"))
    return True


def _await_release_by_rank_0(checkpoint: KeptCheckpoint) -> Standing:
    """Wait until rank 0 has released a checkpoint, at most `SETTLE_S`; return the checkpoint's standing then."""
    until_s = time.monotonic() + waits.SETTLE_S
    verdict = standing(checkpoint.pin, store="")
    while verdict is Standing.HELD and time.monotonic() < until_s:
        time.sleep(0.01)
        verdict = standing(checkpoint.pin, store="")
    return verdict


def _withdraw(checkpoint: KeptCheckpoint, note: str, *, committed: bool) -> None:
    """Delete one rank's files of a checkpoint from its folder.

    If the checkpoint is still `committed`, `RELEASED` first takes the place of its `COMMIT`, under the folder's lock.
    """
    folder = open_folder(checkpoint.folder)
    if committed:
        lock = FolderLock(folder)
        try:
            if not lock.acquire():
                raise CheckpointError("another session is writing a checkpoint there")
            _withdraw_commit(checkpoint, folder, note)
        finally:
            lock.release()
    for name in names_of(checkpoint.id, checkpoint.rank):
        folder.delete(name)


def _withdraw_commit(checkpoint: KeptCheckpoint, folder: Folder, note: str) -> None:
    """Write a `RELEASED` with the checkpoint's id and a note, then delete its `COMMIT`; the caller has the lock."""
    commit = read_commit(folder)
    if commit.id != checkpoint.id:  # the checkpoint was replaced just now
        return
    if folder.read(RELEASED_NAME) is not None and not read_released(folder)[0]:
        raise CheckpointError(f"its {RELEASED_NAME} is not ours to replace: move it away")
    folder.write(RELEASED_NAME, seal_released([checkpoint.id, *commit.replaced], note))
    folder.delete(COMMIT_NAME)


def _unpin_and_delete(checkpoint: KeptCheckpoint) -> None:
    """Take a released checkpoint's pins off its stores, and release the locks that it has on ended sessions' stores.

    Of the locked stores, those that no checkpoint needs any more are deleted.
    """
    locks = {(path, store): lock for path, store, lock in checkpoint.locks}
    for path, store in checkpoint.stores:
        unpin(store_folder(path, store), checkpoint.id)
        if (path, store) in locks:
            delete_unused(store_folder(path, store))
    for lock in locks.values():
        release_lock(lock)
