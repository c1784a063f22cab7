"""Stores and what pins them.

A store that checkpoints refer to says so itself, in `pins.json`: a list of checkpoints, each by its id and folder.
A pin is durable before its checkpoint is committed, and goes after its checkpoint has gone, so that a store without
pins is needed by nobody but the session that has its lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.checkpoint.folder import TEMPORARY, BucketFolder, Folder, open_folder
from offload.checkpoint.manifest import COMMIT_NAME, RELEASED_NAME, seal, unseal, unseal_commit
from offload.errors import CheckpointError, ConfigError
from offload.tiers.places import (
    LOCK_NAME,
    PINS_NAME,
    STORE_FILES,
    hold_lock,
    is_being_read,
    lock_holder,
    release_lock,
)
from offload.tiers.store import RECORD_NAME

_log = logging.getLogger("offload")

_STORE = re.compile(r"offload-([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})")


@dataclass(frozen=True, slots=True)
class Pin:
    """One checkpoint that refers to a store: its id, and the folder that it was written to."""

    id: str
    folder: str


def store_folder(path: str, store: uuid.UUID) -> Folder:
    """Return the folder of a store on a path."""
    return open_folder(f"{path.rstrip('/')}/offload-{store}")


def read_pins(folder: Folder) -> list[Pin]:
    """Return the pins of a store.

    Raises:
        CheckpointError: They are damaged or cannot be read.
    """
    content = folder.read(PINS_NAME)
    if content is None:
        return []
    where = f"{folder.path}/{PINS_NAME}"
    rows = unseal("pins", content, where).get("pins")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == 2 and all(isinstance(text, str) for text in row) for row in rows
    ):
        raise CheckpointError(f"{where} is damaged: pins is {json.dumps(rows)[:60]}")
    return [Pin(*row) for row in rows]


def write_pins(folder: Folder, pins: Sequence[Pin]) -> None:
    """Replace the pins of a store, durably."""
    folder.write(PINS_NAME, seal("pins", {"pins": [[pin.id, pin.folder] for pin in pins]}))


def pin(folder: Folder, added: Pin) -> None:
    """Add a pin to a store."""
    pins = read_pins(folder)
    if added not in pins:
        write_pins(folder, [*pins, added])


def unpin(folder: Folder, id: str) -> list[Pin]:
    """Take a checkpoint's pin off a store; return what pins it still."""
    pins = [pin for pin in read_pins(folder) if pin.id != id]
    write_pins(folder, pins)
    return pins


def is_read(folder: Folder) -> bool:
    """Return whether somebody may be reading what checkpoints name in a store, other than its owner.

    In an object store nobody can tell, so the answer is no.
    """
    if isinstance(folder, BucketFolder):
        return False
    with contextlib.suppress(OSError):
        return is_being_read(folder.path)
    return False


# Leftovers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leftover:
    """A store, and whether anybody needs it.

    Attributes:
        path: Its directory.
        nbytes: Bytes that it takes.
        used_by: Pid of the process that has its lock, or None.
        being_read: Whether some process reads it.
        pins: Checkpoints that it is pinned by and that are where they were written.
        missing: Pins of checkpoints of which nobody knows: deleted, never committed, or moved.
        problem: Why it cannot be judged; "" if it can.
        opened_by: In an object store, who has opened it and may use it still: nobody can tell. "" elsewhere.
    """

    path: str
    nbytes: int
    used_by: int | None
    being_read: bool
    pins: tuple[Pin, ...]
    missing: tuple[Pin, ...]
    problem: str = ""
    opened_by: str = ""

    @property
    def is_free(self) -> bool:
        """Whether nobody uses or reads it and no checkpoint that is where it was written needs it."""
        return not (self.used_by is not None or self.being_read or self.pins or self.problem)


def find_stores(path: str) -> list[Leftover]:
    """Return all stores on a path, those of ranks (`rank-<r>`) included, in order of their names.

    Raises:
        ConfigError: `path` is not a directory that can be read, or not a bucket that can be used.
    """
    if path.startswith("s3://"):
        return _find_remote(path.rstrip("/"))
    root = Path(path)
    if not root.is_dir():
        raise ConfigError("PATH", path, "name a directory that exists")
    try:
        found = [entry for entry in sorted(root.iterdir()) if _STORE.fullmatch(entry.name)]
        for rank in sorted(root.glob("rank-*")):
            found += [entry for entry in sorted(rank.iterdir()) if _STORE.fullmatch(entry.name)]
    except OSError as cause:
        raise ConfigError("PATH", path, f"it cannot be read: {cause.strerror}") from cause
    return [_judge(entry) for entry in found if entry.is_dir()]


def leftover_bytes(paths: Sequence[str]) -> int:
    """Return what stores whose sessions have ended take on directories among `paths`."""
    found = 0
    for path in paths:
        if path.startswith("s3://"):
            continue
        with contextlib.suppress(OSError):
            for store in Path(path.removeprefix("file://")).iterdir():
                if _STORE.fullmatch(store.name) and lock_holder(store) is None:
                    found += sum(entry.stat().st_blocks * 512 for entry in store.iterdir())
    return found


def _find_remote(path: str) -> list[Leftover]:
    found: dict[str, int] = {}
    try:
        for key, nbytes in BucketFolder(path).walk():
            ranked = re.match(rf"((?:rank-\d+/)?{_STORE.pattern})/", key)
            if ranked is not None:
                found[ranked.group(1)] = found.get(ranked.group(1), 0) + nbytes
    except CheckpointError as cause:
        raise ConfigError("PATH", path, str(cause)) from cause
    return [_judge_remote(f"{path}/{name}", nbytes) for name, nbytes in sorted(found.items())]


def _judge_remote(path: str, nbytes: int) -> Leftover:
    folder = open_folder(path)
    try:
        opened = json.loads(folder.read(RECORD_NAME) or b"{}")
        who = f"process {opened.get('pid', '?')} on {opened.get('host', '?')}"
        alive, missing = _split_pins(folder)
    except (ValueError, AttributeError, CheckpointError) as cause:
        return Leftover(path, nbytes, None, False, (), (), problem=str(cause))
    return Leftover(path, nbytes, None, False, alive, missing, opened_by=who)


def _split_pins(folder: Folder) -> tuple[tuple[Pin, ...], tuple[Pin, ...]]:
    """Return the pins whose checkpoints are where they were written, and those of which nobody can tell."""
    held = [(pin, holds(pin.folder, pin.id)) for pin in read_pins(folder)]
    return tuple(pin for pin, there in held if there), tuple(pin for pin, there in held if there is None)


def _judge(store: Path) -> Leftover:
    nbytes = 0
    with contextlib.suppress(OSError):
        nbytes = sum(entry.stat().st_blocks * 512 for entry in store.iterdir())
    try:
        used_by, being_read = lock_holder(store), is_being_read(store)
        alive, missing = _split_pins(open_folder(str(store)))
    except (OSError, CheckpointError) as cause:
        return Leftover(str(store), nbytes, None, False, (), (), problem=str(cause))
    return Leftover(str(store), nbytes, used_by, being_read, alive, missing)


def holds(folder: str, id: str) -> bool | None:
    """Return whether a folder holds the checkpoint of that id; None if it holds none, so that nobody can tell.

    A folder that was moved holds none either. What cannot be read counts as held: it may be mended.
    """
    try:
        place = open_folder(folder)
        content = place.read(COMMIT_NAME)
        if content is None:
            return None if place.read(RELEASED_NAME) is None else False
        return unseal_commit(content, folder)[0] == id
    except (ConfigError, CheckpointError):
        return True


def unused_copies(folder: str, used: Collection[uuid.UUID]) -> list[Leftover]:
    """Return stores in a checkpoint's own folder that it does not refer to and nobody uses."""
    if folder.startswith("s3://"):
        return []
    found = []
    for entry in sorted(Path(folder).iterdir()):
        match = _STORE.fullmatch(entry.name)
        if match is not None and uuid.UUID(match.group(1)) not in used:
            found.append(_judge(entry))
    return [leftover for leftover in found if leftover.is_free]


def remove(leftover: Leftover) -> bool:
    """Delete a store that nobody needs, holding its lock meanwhile; return whether it is gone.

    A store is left alone if somebody has taken it in the meantime, or if it has no lock file (it may just be in the
    making, or on a file system without locks). Only files that stores are made of are deleted. In an object store
    nothing tells whether somebody uses it: the caller says by this that nobody does.
    """
    if leftover.path.startswith("s3://"):
        try:
            BucketFolder(leftover.path).delete_all()
        except CheckpointError as error:
            _log.warning("%s", error)
            return False
        return True
    store = Path(leftover.path)
    try:
        lock = hold_lock(store / LOCK_NAME, existing=True)
    except OSError:
        return False
    try:
        return not is_being_read(store) and delete_files(store)
    finally:
        release_lock(lock)


def delete_files(store: Path) -> bool:
    """Delete a store whose lock the caller holds; return whether it is gone."""
    try:
        for name in STORE_FILES:
            with contextlib.suppress(FileNotFoundError):
                (store / name).unlink()
        for temporary in store.glob(f"{TEMPORARY}*"):
            temporary.unlink()
        store.rmdir()
    except OSError:
        return False
    return True


def take_over(path: str, store: uuid.UUID) -> int | None:
    """Lock a store whose session has ended; return the lock's descriptor, or None where that cannot be done."""
    if path.startswith("s3://"):
        return None
    try:
        return hold_lock(Path(path) / f"offload-{store}" / LOCK_NAME, existing=True)
    except OSError:
        return None
