"""Takes over a checkpoint where it lies, instead of copying its state.

From then on the checkpoint's tiles are this session's newest versions. Their stores are used in one of two ways:

* A store of an ended session, on one of this session's paths, may become this session's own: new versions go to the
  slots in it that no checkpoint names.
* Other stores are only read, under a lock or a note that says so. A tile in them goes to this session's stores when
  it is next flushed or saved. So a checkpoint refers to stores of its own session alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.checkpoint.contents import read_manifests
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import Manifest, Place, StoreRef
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.stores import Standing, is_same, read_pins, standing, store_folder
from offload.errors import CheckpointError
from offload.layout import Layout
from offload.protocols import SECTOR_BYTES, TileId
from offload.schedule.index import TileRecord


def manifest_in_place(
    checkpoint: Checkpoint, layout: Layout, names: Sequence[str], rank: int, ranks: int
) -> Manifest | None:
    """Return the manifest with this rank's state if its tiles can be used where they lie; None if they cannot.

    They can if the saved layout is this one: the same subgroups, and the same pieces of the same parameters. A
    self-contained copy's tiles cannot be used so, as its owner may move or delete it.

    Args:
        checkpoint: The checkpoint.
        layout: This session's.
        names: Names of this layout's parameters in the checkpoint.
        rank: This rank.
        ranks: How many there are. As many must have saved the checkpoint, or one for all.
    """
    manifests = checkpoint.manifests
    if not any(manifest.layout.parameters for manifest in manifests[1:]):  # one rank has saved for all
        manifest = manifests[0]
    elif len(manifests) == ranks:
        manifest = manifests[rank]
    else:
        return None
    saved = manifest.layout

    def pieces_without_names(layout: Layout) -> list[tuple[object, ...]]:
        """Return which elements of each parameter a rank has, without names, which may differ from the saved ones."""
        return [(p.numel, p.dtype, p.start, p.unsharded_numel, p.box) for p in layout.parameters]

    is_alike = (
        saved.subgroups == layout.subgroups
        and [parameter.name for parameter in saved.parameters] == list(names)
        and pieces_without_names(saved) == pieces_without_names(layout)
    )
    is_copy = any(manifest.stores[ref.store].path is None for ref in manifest.tiles.values())
    return manifest if is_alike and not is_copy else None


@dataclass(slots=True)
class PinnedTiles:
    """The tiles that one rank's part of a checkpoint has in one store.

    Attributes:
        id: The save's id.
        folder: The checkpoint's folder.
        manifest: Of the rank's part.
        records: The tiles, by id.
    """

    id: str
    folder: str
    manifest: Manifest
    records: dict[TileId, TileRecord]

    @property
    def step(self) -> int:
        """Number of the step after which the checkpoint was taken."""
        return self.manifest.step


@dataclass(slots=True)
class Takeover:
    """The tiles and stores of a checkpoint that a session has taken over.

    Attributes:
        records: Every tile of the checkpoint, where this session finds it.
        limit_bytes: By path number: the size to which a store that was opened for writing may grow.
        pinned_records: Tiles that checkpoints have in these stores, whose slots are held: for each checkpoint, by the
            number of a save that stands for it.
    """

    records: dict[TileId, TileRecord] = field(default_factory=dict)
    limit_bytes: dict[int, int] = field(default_factory=dict)
    pinned_records: dict[int, dict[TileId, TileRecord]] = field(default_factory=dict)


def records_in(manifest: Manifest, numbers: Mapping[Place, int]) -> dict[TileId, TileRecord]:
    """Return, as this session's index has them, the records of those tiles of a manifest that lie in some stores.

    `numbers` has the path number of each of these stores. Tiles in other stores are left out.
    """
    records = {}
    for tile, ref in manifest.tiles.items():
        store_ref = manifest.stores[ref.store]
        number = None if store_ref.path is None else numbers.get((store_ref.path, store_ref.store))
        if number is not None:
            records[tile] = ref.record(number, manifest.tile_bytes[tile])
    return records


def relocated(manifest: Manifest, path: str, store: uuid.UUID) -> Manifest:
    """Return a manifest in which a store lies on `path`, where the manifest has another name of the same directory.

    So that `records_in`, which compares names alone, finds the store's tiles.
    """

    def rename(ref: StoreRef) -> StoreRef:
        """Return the entry of a store, with `path` in it if it is this store's."""
        # The path is compared, too, as all stores of a session have one name; None is the checkpoint's own folder.
        is_meant = ref.store == store and ref.path and is_same(ref.path, path)
        return StoreRef(store, path) if is_meant else ref

    return replace(manifest, stores=tuple(map(rename, manifest.stores)))


def pinned_in(
    path: str, store: uuid.UUID, number: int, checkpoint: Checkpoint, layout: Layout
) -> list[PinnedTiles] | None:
    """Return the tiles that checkpoints have in a store; all other slots of the store are free then.

    Before a session writes to the store, this must be certain; else the result is None. Nothing is locked here: the
    caller asks before it locks the store and once more after that, as pins may change.

    Args:
        path: The store's path.
        store: Its id.
        number: The path's number in this session, for the records.
        checkpoint: The one to go on from. It is open here, so it counts as a reader of the store.
        layout: This session's.

    Returns:
        The tiles, by pin and rank. None if a slot that looks free may be needed:

        * `checkpoint` has no pin in the store;
        * a pin's checkpoint is missing, unreadable or of another layout;
        * a pin's checkpoint names no tile in the store by the name that the path has here;
        * a released checkpoint may still be read.
    """
    pinned: list[PinnedTiles] = []
    has_released = False
    try:
        opened = store_folder(path, store)
        for pin in read_pins(opened):
            folder, manifests = checkpoint.path, checkpoint.manifests
            if pin.id != checkpoint.id:
                verdict = standing(pin, f"{path}/offload-{store}")
                if verdict is Standing.MISSING:
                    return None
                if verdict is Standing.RELEASED:
                    has_released = True  # its slots are free, unless somebody still reads them
                    continue
                folder = pin.folder
                id, manifests = read_manifests(open_folder(folder))
                if id != pin.id:  # it was replaced just now
                    return None
            tiles_of_pin = []  # one item for each rank that has tiles in the store
            for manifest in (relocated(manifest, path, store) for manifest in manifests):
                records = records_in(manifest, {(path, store): number})
                if records and manifest.layout.subgroups != layout.subgroups:
                    return None
                if records:
                    tiles_of_pin.append(PinnedTiles(pin.id, folder, manifest, records))
            if not tiles_of_pin:
                return None
            pinned += tiles_of_pin
        if has_released and opened.is_read(own=1):  # `checkpoint` is the one reader of our own
            return None
    except (OSError, CheckpointError):
        return None
    has_loaded = checkpoint.id in [tiles.id for tiles in pinned]
    return pinned if has_loaded else None  # else no pin there says which slots are its


def used_bytes(pinned: Sequence[PinnedTiles]) -> int:
    """Return where the last store slot that checkpoints name ends, in bytes from the store's start.

    A store slot is a header of `SECTOR_BYTES`, then the payload of `nbytes`.
    """
    locations = [record.location for tiles in pinned for record in tiles.records.values()]
    return max(location.offset + SECTOR_BYTES + location.nbytes for location in locations)
