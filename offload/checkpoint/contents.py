"""Reads a checkpoint's folder: its `COMMIT`, its `RELEASED`, the manifests and `extra`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import (
    COMMIT_NAME,
    RELEASED_NAME,
    CommitRecord,
    FileRef,
    Manifest,
    decode,
    manifest_name,
    unseal_commit,
    unseal_released,
)
from offload.errors import CheckpointError, ConfigError
from offload.tiers.place import Folder


def some_of(names: Sequence[str]) -> str:
    """Return the first five names and the number of the others, for messages."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more if names else "none"


def read_commit(folder: Folder) -> CommitRecord:
    """Return the `COMMIT` of the checkpoint that a folder holds.

    Raises:
        CheckpointError: The folder holds no checkpoint, or its `COMMIT` is damaged.
    """
    content = folder.read(COMMIT_NAME)
    if content is not None:
        return unseal_commit(content, os.path.join(folder.path, COMMIT_NAME))
    ids, note = read_released(folder)
    if ids:
        raise CheckpointError(f"{folder.path} was a checkpoint until it was released: {note}")
    names = folder.names()
    if any(name.startswith("manifest-") for name in names):
        raise CheckpointError(
            f"{folder.path} is no checkpoint yet: it was never committed (there is no {COMMIT_NAME})"
        )
    reason = "the folder is not there, or empty" if not names else f"it holds {some_of(names)}"
    inside = [path for name in names if os.path.isfile(os.path.join(path := f"{folder.path}/{name}", COMMIT_NAME))]
    if inside:  # as in a trainer's folder
        reason += f"; a checkpoint is in {some_of(inside)}"
    raise CheckpointError(f"{folder.path} is no checkpoint: {reason}")


def read_released(folder: Folder) -> tuple[tuple[str, ...], str]:
    """Return what a folder's `RELEASED` says: ids of released checkpoints, and a note that says why.

    The folder held these checkpoints, or they were in folders below it that have been deleted.

    Returns:
        The ids and the note; none and "" if there is no such file, or it was not written by this package.
    """
    content = folder.read(RELEASED_NAME)
    try:
        return unseal_released(content, folder.path) if content is not None else ((), "")
    except CheckpointError:
        return (), ""


def read_manifests(folder: Folder) -> tuple[str, list[Manifest]]:
    """Return the id and all manifests, in the order of ranks, of the checkpoint that a folder holds.

    The manifests' `step` may differ: a rank with weights of its own may skip a step that the others take.

    Raises:
        CheckpointError: There is no checkpoint, or a file of it is missing, damaged, or of another checkpoint.
    """
    commit = read_commit(folder)
    return commit.id, [read_manifest(folder, commit.id, rank, commit.ranks) for rank in range(commit.ranks)]


def read_manifest(folder: Folder, id: str, rank: int, ranks: int) -> Manifest:
    """Return one rank's manifest of a save.

    Raises:
        CheckpointError: The manifest is missing, damaged, or of another checkpoint.
    """
    name = manifest_name(id, rank)
    where = os.path.join(folder.path, name)
    content = folder.read(name)
    if content is None:
        raise CheckpointError(f"{where} is missing: the checkpoint was written by {ranks} ranks")
    manifest = decode(content, where)
    if (manifest.id, manifest.rank, manifest.ranks) != (id, rank, ranks):
        part = f"rank {manifest.rank} of {manifest.ranks} of the save {manifest.id}"
        raise CheckpointError(f"{where} belongs to another checkpoint: it is of {part}")
    return manifest


def read_extra(folder: Folder, manifest: Manifest) -> bytes | None:
    """Return the `extra` that a rank's caller gave; None if it gave none.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    if manifest.extra is None:
        return None
    where = os.path.join(folder.path, manifest.extra.name)
    content = folder.read(manifest.extra.name)
    if content is None:
        raise CheckpointError(f"{where} is missing")
    if manifest.extra != FileRef.of(manifest.extra.name, content):
        raise CheckpointError(f"{where} is damaged: its size or checksum is not the one it was written with")
    return content


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a committed checkpoint."""
    try:
        read_commit(open_folder(path))
    except (CheckpointError, ConfigError):
        return False
    return True
