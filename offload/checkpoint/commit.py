"""Committing and releasing checkpoints: the order in which small files are written and deleted.

    1. every store that the checkpoint refers to gets a pin              (a store with a pin is not deleted)
    2. the file with what else the caller gave, then the manifest        (each whole or not there)
    3. rank 0 waits for all manifests and writes `COMMIT`                (from now on there is a checkpoint)
    4. what the folder held before goes; then older checkpoints are released, each in its own folder: `RELEASED` names
       it, `COMMIT` goes, then its manifest and its pins

`COMMIT` names what the folder held before, so that these are known to be replaced if the session is killed in 4.

Whatever happens in between, a folder holds the checkpoint from before or the new one. Data is durable before 1.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from offload.checkpoint.contents import read_commit, read_released
from offload.checkpoint.folder import Folder, open_folder
from offload.checkpoint.manifest import (
    COMMIT_NAME,
    OWN_FILE,
    RELEASED_NAME,
    CommitRecord,
    Manifest,
    StoreRef,
    encode,
    extra_name,
    manifest_name,
    seal_commit,
    seal_released,
    unseal_commit,
)
from offload.checkpoint.stores import (
    HERE,
    Pin,
    Standing,
    delete_unused,
    find_stores,
    is_read,
    pin,
    released_before,
    remove,
    standing,
    store_folder,
    unpin,
)
from offload.errors import CheckpointError
from offload.tiers.places import release_lock

RANKS_TIMEOUT_S = 600.0
"""How long a rank waits for the others to write their manifests."""

_log = logging.getLogger("offload")


@dataclass(slots=True)
class Kept:
    """A checkpoint that this session has committed (or has resumed from) and that holds slots.

    Attributes:
        folder: Where it is.
        id: The save's.
        rank: This rank.
        stores: Path and uuid of the stores that it refers to.
        number: The machine's number of the save; None where the machine holds nothing for it.
        taken: Those of its stores that another session has left and this one has locked without writing to them,
            each with the lock; they are deleted with their last checkpoint.
        reported: Whether the log has said that it is missing.
    """

    folder: str
    id: str
    rank: int
    stores: tuple[tuple[str, uuid.UUID], ...]
    number: int | None
    taken: tuple[tuple[str, uuid.UUID, int], ...] = ()
    reported: bool = False


@dataclass(slots=True)
class CommitJob:
    """One checkpoint to commit.

    Attributes:
        folder: Where it goes.
        manifest: This rank's part.
        extra: What else the caller gave.
        older: Checkpoints kept so far, oldest first.
        keep: How many to keep, this one included.
        paths: Directories whose leftovers go on the way: stores without a pin whose session has ended.
        cancelled: Set when the session breaks: nothing is committed from then on.
        released: Those of `older` that were released.
        committed: Whether the checkpoint is one.
        undone: Whether nothing of it is left; if neither, other ranks may commit it yet.
    """

    folder: Folder
    manifest: Manifest
    extra: bytes | None
    older: Sequence[Kept]
    keep: int
    cancelled: threading.Event = field(default_factory=threading.Event)
    paths: Sequence[str] = ()
    released: list[Kept] = field(default_factory=list)
    committed: bool = False
    undone: bool = False

    @property
    def kept(self) -> Kept:
        """This checkpoint, as it is kept."""
        manifest = self.manifest
        stores = tuple((ref.path, ref.store) for ref in manifest.stores if ref.path is not None)
        return Kept(self.folder.path, manifest.id, manifest.rank, stores, None)

    def run(self) -> None:
        """Commit, then release what need not be kept.

        Raises:
            CheckpointError: It was not committed; nothing but files that nobody looks at is left of it.
        """
        folder, manifest = self.folder, self.manifest
        try:
            before = released_before(folder) if manifest.rank == 0 else ()
            for ref in manifest.stores:
                pin(self._store(ref), Pin(manifest.id, HERE if ref.path is None else folder.path))
            if self.extra is not None:
                folder.write(extra_name(manifest.id, manifest.rank), self.extra)
            folder.write(manifest_name(manifest.id, manifest.rank), encode(manifest))
            if manifest.rank == 0:
                self._wait("manifests of all ranks", self._all_there)
                if self.cancelled.is_set():
                    raise CheckpointError(f"{folder.path} was not committed: the session broke")
                folder.write(COMMIT_NAME, seal_commit(CommitRecord(manifest.id, manifest.ranks, before)))
            else:
                self._wait(COMMIT_NAME, self._is_committed)
        except CheckpointError:
            # The first rank may commit yet what another one has given up waiting for as its session broke.
            if manifest.rank == 0 or not self.cancelled.is_set():
                self._undo()
                self.undone = True
            raise
        self.committed = True
        try:
            self._tidy()
        except Exception as error:  # it is a checkpoint all the same
            _log.warning("after the checkpoint in %s: %s", folder.path, error)

    def _store(self, ref: StoreRef) -> Folder:
        return store_folder(self.folder.path if ref.path is None else ref.path, ref.store)

    def _is_committed(self) -> bool:
        content = self.folder.read(COMMIT_NAME)
        return content is not None and unseal_commit(content, self.folder.path).id == self.manifest.id

    def _all_there(self) -> bool:
        names = set(self.folder.names())
        return all(manifest_name(self.manifest.id, rank) in names for rank in range(self.manifest.ranks))

    def _wait(self, what: str, arrived: Callable[[], bool]) -> None:
        until_s, pause_s = time.monotonic() + RANKS_TIMEOUT_S, 0.01
        while not arrived():
            if time.monotonic() > until_s or self.cancelled.wait(pause_s):
                raise CheckpointError(
                    f"{self.folder.path} was not committed: waited for {what} in vain; see what the other ranks say"
                )
            pause_s = min(2 * pause_s, 1.0)

    def _undo(self) -> None:
        """Take back what an uncommitted checkpoint has left, as far as that can be done."""
        own = self.manifest
        steps: list[Callable[[], object]] = [
            partial(self.folder.delete, manifest_name(own.id, own.rank)),
            partial(self.folder.delete, extra_name(own.id, own.rank)),
            *(partial(unpin, self._store(ref), own.id) for ref in own.stores),
        ]
        for step in steps:
            try:
                step()
            except CheckpointError as error:
                _log.warning("after a checkpoint that failed: %s", error)

    def _tidy(self) -> None:
        """Delete what the folder held before, and release older checkpoints; a failure costs room and no data.

        One of several stores may be gone already if a session was killed here, so releasing can be repeated.
        """
        own, path = self.manifest, self.folder.path
        for kept in self.older:
            if kept.folder == path:
                self._release(kept)
        try:
            if own.rank == 0:
                if read_released(self.folder)[0]:
                    self.folder.delete(RELEASED_NAME)
                for name in self.folder.names():
                    if OWN_FILE.fullmatch(name) and own.id not in name:
                        self.folder.delete(name)
        except CheckpointError as error:
            _log.warning("%s", error)
        others = [kept for kept in self.older if kept.folder != path]
        for kept in others[: max(0, len(others) + 1 - self.keep)]:
            self._release(kept)
        # In the folder there may be a copy that it held before. Nothing goes by itself from an object store.
        places = [path] if own.rank == 0 and not path.startswith("s3://") else []
        for place in dict.fromkeys([*places, *self.paths]):
            for leftover in find_stores(place):
                if leftover.is_free and remove(leftover):
                    _log.info("deleted %s, which a session that has ended left behind", leftover.path)

    def _release(self, kept: Kept) -> None:
        if release(kept, f"{self.folder.path} took its place. Raise checkpoints_kept to keep more"):
            self.released.append(kept)


def release(kept: Kept, note: str, *, missing: bool = False) -> bool:
    """Make a checkpoint none, and take its pins off its stores.

    `RELEASED` says so, then its `COMMIT` goes. Where its folder holds neither it nor word of its release, its folder
    may have been moved, and it stays.

    Args:
        kept: Which one.
        note: Why, for whoever looks for it.
        missing: Free its slots even if it is not in its folder: the caller knows that it is gone.

    Returns:
        Whether its slots are free now. If not, the log says why.
    """
    try:
        if any(is_read(store_folder(path, store)) for path, store in kept.stores):
            _log.info("%s stays for now: somebody is reading it", kept.folder)
            return False
        found = standing(Pin(kept.id, kept.folder), "")
        if found is Standing.MISSING and not missing:
            if not kept.reported:
                kept.reported = True
                _log.warning(
                    "the checkpoint %s is not in %s any more. It may have been moved, so its state on %s stays. If "
                    "it was deleted, release_checkpoint gives the room back now, or `offload gc --really` later",
                    kept.id,
                    kept.folder,
                    ", ".join(path for path, _ in kept.stores),
                )
            return False
        if found is not Standing.MISSING:
            _withdraw(kept, note, committed=found is Standing.HELD)
        _forget(kept)
    except CheckpointError as error:
        _log.warning("%s could not be released: %s", kept.folder, error)
        return False
    return True


def _withdraw(kept: Kept, note: str, *, committed: bool) -> None:
    """Take a checkpoint out of its folder."""
    folder = open_folder(kept.folder)
    if committed and kept.rank == 0:
        if folder.read(RELEASED_NAME) is None or read_released(folder)[0]:  # else it is somebody else's file
            folder.write(RELEASED_NAME, seal_released([kept.id, *read_commit(folder).replaced], note))
        folder.delete(COMMIT_NAME)
    folder.delete(manifest_name(kept.id, kept.rank))
    folder.delete(extra_name(kept.id, kept.rank))


def _forget(kept: Kept) -> None:
    """Take the pins of a released checkpoint off its stores, and delete those stores that nothing needs any more."""
    locks = {(path, store): lock for path, store, lock in kept.taken}
    for path, store in kept.stores:
        unpin(store_folder(path, store), kept.id)
        if (path, store) in locks:
            delete_unused(Path(path) / f"offload-{store}")
    for lock in locks.values():
        release_lock(lock)
