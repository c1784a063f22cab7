"""Going on from a checkpoint where it lies, instead of copying its state.

Its tiles are this session's newest versions from then on. A store whose session has ended, on one of this session's
paths, becomes this session's own: new versions go to the slots in it that no checkpoint names. What lies in other
stores is only read, until it is next flushed or saved, and goes to this session's stores then, so that a checkpoint
refers to stores of its own session alone. A store is locked or said to be read for as long as that takes.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.checkpoint.contents import read_manifests
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import Manifest, StoreRef
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.stores import Standing, is_same, read_pins, standing, store_folder
from offload.errors import CheckpointError
from offload.layout import Layout
from offload.protocols import SECTOR_BYTES, TileId
from offload.schedule.index import Location, Record

Place = tuple[str, uuid.UUID]
"""A store and the path that it lies on; a session's stores on all its paths have one name."""


def manifest_in_place(
    checkpoint: Checkpoint, layout: Layout, names: Sequence[str], rank: int, ranks: int
) -> Manifest | None:
    """Return the manifest of this rank's state if its tiles are just what this layout is cut into, else None.

    A copy is never gone on from: whoever has it may move or delete it.

    Args:
        checkpoint: An open one.
        layout: This session's.
        names: What each parameter is called there.
        rank: This rank.
        ranks: Number of ranks.
    """
    manifests = checkpoint.manifests
    if not any(manifest.layout.parameters for manifest in manifests[1:]):  # one rank has saved for all
        manifest = manifests[0]
    elif len(manifests) == ranks:
        manifest = manifests[rank]
    else:
        return None
    there = manifest.layout

    def places(layout: Layout) -> list[tuple[object, ...]]:
        return [(p.numel, p.dtype, p.start, p.unsharded_numel, p.box) for p in layout.parameters]

    alike = (
        there.subgroups == layout.subgroups
        and [p.name for p in there.parameters] == list(names)
        and places(there) == places(layout)
        and all(manifest.stores[ref.store].path is not None for ref in manifest.tiles.values())
    )
    return manifest if alike else None


@dataclass(slots=True)
class Pinned:
    """What a checkpoint names in one store."""

    id: str
    folder: str
    manifest: Manifest
    records: dict[TileId, Record]

    @property
    def step(self) -> int:
        """The step after which it was taken."""
        return self.manifest.step


@dataclass(slots=True)
class Adopted:
    """What a session has taken over of a checkpoint's stores.

    Attributes:
        records: Every tile of the checkpoint, where this session finds it.
        limits: Paths whose store is one that was there, and how far it may grow.
        held: What checkpoints name in these, by the numbers of saves.
    """

    records: dict[TileId, Record] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)
    held: dict[int, dict[TileId, Record]] = field(default_factory=dict)


def records_in(manifest: Manifest, numbers: Mapping[Place, int]) -> dict[TileId, Record]:
    """Return the records of a manifest's tiles in some stores, given the path number of each."""
    found = {}
    for tile, ref in manifest.tiles.items():
        store = manifest.stores[ref.store]
        number = None if store.path is None else numbers.get((store.path, store.store))
        if number is not None:
            found[tile] = Record(Location(number, ref.offset, manifest.tile_bytes[tile]), ref.step, ref.checksum)
    return found


def located(manifest: Manifest, path: str, store: uuid.UUID) -> Manifest:
    """Return a manifest in which a store is on `path` if it was written there under another name."""

    def locate(ref: StoreRef) -> StoreRef:
        return StoreRef(store, path) if ref.store == store and ref.path and is_same(ref.path, path) else ref

    return replace(manifest, stores=tuple(map(locate, manifest.stores)))


def pinned_in(
    path: str, store: uuid.UUID, number: int, checkpoint: Checkpoint, layout: Layout
) -> list[Pinned] | None:
    """Return what checkpoints name in a store that the caller has locked, in order of their steps.

    Args:
        path: Where the store lies.
        store: Which one.
        number: The number of its path in the session.
        checkpoint: The one to go on from, which is open here and so reads the store.
        layout: The session's.

    Returns:
        None if it cannot be known for sure which slots are free, so that none may be written to: a pin's checkpoint
        is missing, or of another layout, or names nothing in the store as it is called now, or somebody may still
        read one that was released.
    """
    found: list[Pinned] = []
    dead = False
    try:
        place = store_folder(path, store)
        for pin in read_pins(place):
            folder, manifests = checkpoint.path, checkpoint.manifests
            if pin.id != checkpoint.id:
                known = standing(pin, f"{path}/offload-{store}")
                if known is Standing.MISSING:
                    return None
                if known is Standing.RELEASED:
                    dead = True
                    continue
                folder = pin.folder
                id, manifests = read_manifests(open_folder(folder))
                if id != pin.id:
                    return None
            before = len(found)
            for manifest in (located(manifest, path, store) for manifest in manifests):
                records = records_in(manifest, {(path, store): number})
                if records and manifest.layout.subgroups != layout.subgroups:
                    return None
                if records:
                    found.append(Pinned(pin.id, folder, manifest, records))
            if len(found) == before:
                return None
        if dead and place.is_read(own=1):
            return None
    except (OSError, CheckpointError):
        return None
    if checkpoint.id not in [pinned.id for pinned in found]:
        return None
    return found


def used_bytes(pinned: Sequence[Pinned]) -> int:
    """Return where the last slot ends that checkpoints name."""
    return max(r.location.offset + r.location.nbytes + SECTOR_BYTES for one in pinned for r in one.records.values())
