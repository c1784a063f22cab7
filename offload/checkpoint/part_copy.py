"""Copies one rank's part of a checkpoint, as it is, into a folder where it needs nothing else, and commits it there.

A progress file in the folder names the rank's stores there and how many tiles are durable in each. Whoever copies the
same part after a crash copies the other tiles into a store of its own; a store that was interrupted is not written to
again, so no kind of path has to take one over. Ranks tell each other by such files:

    rank 0's progress file is there: the others are to copy their parts
    it has gone, and there is no `COMMIT`: rank 0 has given up
    a rank's failure file is there: the others are to give up; it stays until the folder mirrors another checkpoint
"""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from offload._native import CompletionQueue
from offload.checkpoint.commit import CommitJob
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import (
    MODEL_KEY,
    Manifest,
    MirrorProgress,
    StoreRef,
    TileRef,
    model_name,
    seal_progress,
    unseal_progress,
)
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.stores import commit_to_replace, judge, remove
from offload.errors import CheckpointError, OffloadError
from offload.protocols import Tier, TileId
from offload.tiers import StoreOptions, open_tier, parse_place, slot_bytes
from offload.tiers.place import Folder

BATCH_BYTES = 256 << 20
"""Bytes after which what has been copied is made durable and noted; also what a store grows by."""

FAILURE = re.compile(r"failed-[0-9a-f]{32}-\d+")
"""Names of failure files."""

log = logging.getLogger("offload")


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint in a folder that mirrors another.

    Attributes:
        path: The folder that mirrors it.
        id: The save's id.
        rank: The rank.
        ranks: The number of ranks.
        find_ended: Returns ranks that are known to have ended.
        is_new: Whether the checkpoint has just been saved, so that no earlier session has tried to copy it.
    """

    path: str
    id: str
    rank: int
    ranks: int
    find_ended: Callable[[], Collection[int]]
    is_new: bool

    @cached_property
    def folder(self) -> Folder:
        """The folder, opened when it is first used: a bucket's client takes its time."""
        return open_folder(self.path)

    def progress_name(self, rank: int) -> str:
        """Return the name of a rank's progress file."""
        return f"mirror-{self.id}-{rank}.json"

    def failure_name(self, rank: int) -> str:
        """Return the name of the file that says that a rank has failed."""
        return f"failed-{self.id}-{rank}"

    def is_committed(self) -> bool:
        """Return whether the folder holds the checkpoint."""
        commit = commit_to_replace(self.folder)
        return commit is not None and commit.id == self.id

    def has_begun(self) -> bool:
        """Return whether rank 0 has begun, and has not given up.

        Raises:
            CheckpointError: It has failed before this rank could see that it had begun.
        """
        names = self.folder.names()
        if self.is_new and self.failure_name(0) in names:
            raise CheckpointError("rank 0 has failed; see what it says")
        return self.progress_name(0) in names or self.is_committed()

    def note_failure(self) -> None:
        """Tell the other ranks that this one has failed."""
        with contextlib.suppress(OffloadError):
            if self.ranks > 1:
                self.folder.write(self.failure_name(self.rank), b"\n")

    def find_failed(self) -> list[int]:
        """Return the ranks that will not do their parts."""
        names = self.folder.names()
        failed = [rank for rank in range(self.ranks) if self.failure_name(rank) in names]
        return [*self.find_ended(), *failed, *([] if self.progress_name(0) in names else [0])]


@dataclass(slots=True)
class PartCopy:
    """The work on one part: `begin`, every batch of `copy`, `commit`; then `keep` or `abandon`, and `close`.

    Attributes:
        part: Of which checkpoint.
        source: The checkpoint, with this rank's part open.
        io_backend: Backend of a store in a directory.
        progress: How far it is.
        sink: The store that is written to.
        job: The commit.
    """

    part: Part
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
        """Find out what is there already, and say that this rank has begun.

        Raises:
            CheckpointError: Another session is doing this.
        """
        part = self.part
        self.progress = self._found()
        for name in part.folder.names() if part.rank == 0 else ():
            if FAILURE.fullmatch(name):
                part.folder.delete(name)
        self._note(*self.progress.stores)

    def _found(self) -> MirrorProgress:
        """Return how far an earlier session has come; delete what is of no use."""
        part, place = self.part, parse_place(self.part.folder.path)
        content, found, is_usable = part.folder.read(part.progress_name(part.rank)), MirrorProgress(), True
        with contextlib.suppress(CheckpointError):  # it is damaged, so all is copied again
            found = unseal_progress(content, part.folder.path) if content is not None else found
        for store, count in found.stores:
            if (pid := judge(place.store(store)).used_by) is not None:
                raise CheckpointError(f"process {pid} is copying it")
            try:
                if count:
                    place.open_existing(store, CompletionQueue(), checksum=False).close()
            except OffloadError:
                is_usable = False
        useful = tuple((store, count) for store, count in found.stores if count and is_usable)
        tiles = sum(count for _, count in useful)
        if tiles > len(self.manifest.tiles):
            useful, tiles = (), 0
        for store, count in found.stores:
            if (store, count) not in useful:
                remove(judge(place.store(store)))
        if tiles:
            log.info("%s: %d of %d tiles are there", part.folder.path, tiles, len(self.manifest.tiles))
        return MirrorProgress(useful)

    def _note(self, *stores: tuple[uuid.UUID, int]) -> None:
        self.progress = MirrorProgress(stores)
        self.part.folder.write(self.part.progress_name(self.part.rank), seal_progress(self.progress))

    def copy(self) -> Iterator[int]:
        """Copy the tiles that are missing, batch by batch; yield the bytes of each once it is durable."""
        manifest = self.manifest
        first = sum(count for _, count in self.progress.stores)
        if first == len(manifest.tiles):
            return
        before, store, count = self.progress.stores, uuid.uuid4(), 0
        self._note(*before, (store, 0))  # before it is made, so that none is forgotten
        total_bytes = sum(map(slot_bytes, manifest.tile_bytes.values()))
        options = StoreOptions(
            extent_bytes=max(1 << 20, min(total_bytes, BATCH_BYTES)),
            checksum=manifest.checksums,
            io_backend=self.io_backend,
        )
        self.sink = open_tier(self.part.folder.path, store, self.source.queue, options=options)
        for batch in _batches(manifest, first):
            self.source.copy(batch, self.sink)
            count += len(batch)
            self._note(*before, (store, count))
            yield sum(manifest.tile_bytes[tile] for tile, _ in batch)

    def commit(self, extra: bytes | None, job: Callable[..., CommitJob]) -> None:
        """Commit it, as a copy is.

        Args:
            extra: The part's `extra`.
            job: Makes the job of folder, manifest and extra.
        """
        weights = model_name(self.part.id, self.part.rank)
        if self.manifest.metadata.get(MODEL_KEY):
            content = open_folder(self.source.path).read(weights)
            if content is None:
                raise CheckpointError(f"{weights} is missing")
            self.part.folder.write(weights, content)
        self.job = job(self.part.folder, self._placed(), extra)
        self.job.run()
        self.keep()
        self.part.folder.delete(self.part.progress_name(self.part.rank))

    def _placed(self) -> Manifest:
        """Return the manifest with the tiles that have been copied, where they are now."""
        manifest, stores = self.manifest, self.progress.stores
        refs, tiles = iter(manifest.tiles.items()), dict[TileId, TileRef]()
        for number, (_, count) in enumerate(stores):
            offset = 0
            for tile, ref in islice(refs, count):
                tiles[tile] = TileRef(number, offset, ref.step, ref.checksum)
                offset += slot_bytes(manifest.tile_bytes[tile])
        return replace(manifest, stores=tuple(StoreRef(store, None) for store, _ in stores), tiles=tiles)

    def keep(self) -> None:
        """Have `close` leave what is durable."""
        last = len(self.progress.stores) - 1
        if self.sink is not None:
            self.sink.keep({ref.offset for ref in self._placed().tiles.values() if ref.store == last})

    def abandon(self) -> None:
        """Delete what has been made, unless it may be committed all the same."""
        part = self.part
        if self.job is not None and self.job.is_doubtful:
            has_ended = False
            with contextlib.suppress(OffloadError):
                names = part.folder.names()
                has_ended = part.rank > 0 and part.progress_name(0) not in names and not part.is_committed()
            if not has_ended:
                self.keep()
                return
            self.job.undo()
        self.close()
        with contextlib.suppress(OffloadError):
            for store, _ in self.progress.stores:
                remove(judge(parse_place(part.folder.path).store(store)))
            part.folder.delete(part.progress_name(part.rank))

    def close(self) -> None:
        """Close the store; idempotent."""
        if self.sink is not None:
            self.sink.close()


def _batches(manifest: Manifest, first: int) -> Iterator[list[tuple[TileId, int]]]:
    """Yield the tiles from number `first` on in batches of `BATCH_BYTES`, with their offsets in one store."""
    batch: list[tuple[TileId, int]] = []
    offset = end = 0
    for tile in islice(manifest.tiles, first, None):
        batch.append((tile, offset))
        offset += slot_bytes(manifest.tile_bytes[tile])
        if offset - end >= BATCH_BYTES:
            yield batch
            batch, end = [], offset
    if batch:
        yield batch
