"""Manifests and folders of checkpoints as a test wants them; no session has made them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.checkpoint.contents import CommitRecord
from offload.checkpoint.manifest import (
    COMMIT_NAME,
    Manifest,
    StoreRef,
    TileRef,
    all_tiles,
    encode,
    manifest_name,
    seal_commit,
)
from offload.dtypes import DtypeCode
from offload.layout import Layout, Parameter, build_layout
from offload.protocols import SECTOR_BYTES

STORE = uuid.UUID(int=7)


def layout_of(*parameters: Parameter, subgroup_numel: int = 1024) -> Layout:
    """Return the layout of some parameters; of two, if none are given."""
    two = (Parameter("a", 3000, DtypeCode.BFLOAT16, 0), Parameter("b", 700, DtypeCode.FLOAT32, 1))
    return build_layout(parameters or two, subgroup_numel)


def manifest_of(layout: Layout, path: str | None = "/mnt/p", **fields: Any) -> Manifest:
    """Return a manifest whose tiles lie one behind another in one store."""
    tiles = [tile for subgroup in layout.subgroups for tile, _, _ in all_tiles(subgroup)]
    given = {
        "id": "a" * 32,
        "rank": 0,
        "ranks": 1,
        "step": 5,
        "layout": layout,
        "steps": tuple(range(len(layout.parameters))),
        "stores": (StoreRef(STORE, path),),
        "tiles": {tile: TileRef(0, n * 16 * SECTOR_BYTES, n + 1, n + 100) for n, tile in enumerate(tiles)},
        "checksums": True,
    }
    return Manifest(**{**given, **fields})


def write_checkpoint(folder: Path, manifests: Sequence[Manifest], commit: CommitRecord | None = None) -> Path:
    """Write manifests, and what makes them a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for manifest in manifests:
        (folder / manifest_name(manifest.id, manifest.rank)).write_bytes(encode(manifest))
    commit = commit or CommitRecord(manifests[0].id, len(manifests))
    (folder / COMMIT_NAME).write_bytes(seal_commit(commit))
    return folder
