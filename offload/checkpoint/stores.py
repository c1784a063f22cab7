"""Stores, what pins them, and what may be freed.

A store that checkpoints refer to says so itself, in `pins.json`: a list of checkpoints, each by its id and folder.
A pin is durable before its checkpoint is committed.

Whoever wants to free anything (tidying after a commit, `offload gc`, a resume that takes a store over, a session that
uses slots again) asks `standing` about each pin, or `judge` about a store, which does. The rule: **a pin ends only
with a release that names its id**: a `RELEASED`, or a `COMMIT` that says it has replaced it, and then the removal of
the pin itself. A session writes them for a checkpoint that it finds in its folder. Anything else that is found there,
or not found, is no evidence: a folder's name may mean another folder by now (another mount, a link, a rename). What
cannot be decided is kept, reported as missing, and for a person to delete.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import re
import reprlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.checkpoint.contents import read_manifests, read_released
from offload.checkpoint.folder import TEMPORARY, BucketFolder, DirectoryFolder, Folder, open_folder
from offload.checkpoint.manifest import COMMIT_NAME, CommitRecord, seal, unseal, unseal_commit
from offload.errors import CheckpointError, ConfigError
from offload.tiers.places import (
    LOCK_NAME,
    PINS_NAME,
    STORE_FILES,
    hold_lock,
    is_being_read,
    lock_holder,
    read_json,
    release_lock,
)
from offload.tiers.store import RECORD_NAME, StoreDirectory

_log = logging.getLogger("offload")

_STORE = re.compile(r"offload-([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})")
_RANK = re.compile(r"rank-\d+")

HERE = ".."
"""The folder of a pin whose checkpoint is the one that the store lies in, wherever that is moved."""

_RECORD_BYTES = 1 << 16
"""Most that a store's record may have."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One checkpoint that refers to a store: its id, and the folder that it was written to, or `HERE`."""

    id: str
    folder: str


class Standing(enum.Enum):
    """What is known of a checkpoint that a pin names."""

    HELD = "it is in its folder"
    RELEASED = "a session has released or replaced it"
    MISSING = "nobody can tell: it is not in its folder, and nothing there says that it was released"


def store_folder(path: str, store: uuid.UUID) -> Folder:
    """Return the folder of a store on a path."""
    return _open_store(f"{path.rstrip('/')}/offload-{store}")


def _open_store(name: str) -> Folder:
    """Return the folder of a store; on a file system, of which somebody else may have made anything."""
    return BucketFolder(name) if name.startswith("s3://") else DirectoryFolder(name, follow=False)


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
        isinstance(row, list) and len(row) == 2 and all(_is_name(text) for text in row) for row in rows
    ):
        raise CheckpointError(f"{where} is damaged: pins is {reprlib.repr(rows)}")
    return [Pin(*row) for row in rows]


def _is_name(text: object) -> bool:
    """Return whether the system could take a text for a path's."""
    try:
        return isinstance(text, str) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def write_pins(folder: Folder, pins: Sequence[Pin]) -> None:
    """Replace the pins of a store, durably."""
    folder.write(PINS_NAME, seal("pins", {"pins": [[pin.id, pin.folder] for pin in pins]}))


def pin(folder: Folder, added: Pin) -> None:
    """Add a pin to a store."""
    pins = read_pins(folder)
    if added not in pins:
        write_pins(folder, [*pins, added])


def unpin(folder: Folder, id: str) -> None:
    """Take a checkpoint's pin off a store; the caller has released it, or it has never been one."""
    pins = read_pins(folder)
    left = [pin for pin in pins if pin.id != id]
    if left != pins:
        write_pins(folder, left)


# What may be freed ------------------------------------------------------------------------------------------------


def standing(pin: Pin, store: str) -> Standing:
    """Return what is known of the checkpoint of a pin.

    What cannot be read counts as held: it may be mended.

    Args:
        pin: One of a store.
        store: The store's directory, or prefix of a bucket.
    """
    if not pin.id:
        return Standing.MISSING
    folder = store.rpartition("/")[0] if pin.folder == HERE else pin.folder
    try:
        place = open_folder(folder)
        content = place.read(COMMIT_NAME)
        if content is not None:
            commit = unseal_commit(content, folder)
            if commit.id == pin.id:
                return Standing.HELD
            released = commit.replaced
        else:
            released = read_released(place)[0]
    except (ConfigError, CheckpointError, ValueError):  # such as a name that no folder can have
        return Standing.HELD
    return Standing.RELEASED if pin.id in released else Standing.MISSING


def released_before(folder: Folder) -> tuple[str, ...]:
    """Return which checkpoints a folder has held and a commit to it replaces, newest first.

    A copy of a checkpoint that is elsewhere, too, is not one of them: replacing it releases nothing.

    Raises:
        CheckpointError: Its `COMMIT` is not ours to replace.
    """
    commit = commit_to_replace(folder)
    if commit is None:
        return read_released(folder)[0]
    return (commit.id, *commit.replaced) if not _is_copy(folder) else commit.replaced


def commit_to_replace(folder: Folder) -> CommitRecord | None:
    """Return what the `COMMIT` of a folder says; None if there is none.

    Raises:
        CheckpointError: It is not ours to replace.
    """
    content = folder.read(COMMIT_NAME)
    try:
        return None if content is None else unseal_commit(content, os.path.join(folder.path, COMMIT_NAME))
    except CheckpointError as cause:
        raise CheckpointError(f"{cause}. It is not replaced: move it away, or save to another folder") from cause


def _is_copy(folder: Folder) -> bool:
    """Return whether the checkpoint in a folder is a copy of one that the pins of its stores find elsewhere."""
    with contextlib.suppress(CheckpointError):  # it is damaged, or its stores have gone
        id, manifests = read_manifests(folder)
        refs = {(ref.path, ref.store) for manifest in manifests for ref in manifest.stores if ref.path is not None}
        return any(is_elsewhere(id, folder.path, path, store) for path, store in sorted(refs))
    return False


def is_elsewhere(id: str, folder: str, path: str, store: uuid.UUID) -> bool:
    """Return whether a checkpoint is in the folder that a store's pin names, and that is another one than `folder`.

    `folder` is a copy of it then, and both need the store.

    Raises:
        CheckpointError: The pins cannot be read.
    """
    place = store_folder(path, store)
    return any(
        pin.id == id and not is_same(pin.folder, folder) and standing(pin, place.path) is Standing.HELD
        for pin in read_pins(place)
    )


def note_move(id: str, folder: str, path: str, store: uuid.UUID) -> None:
    """Have the pin of a checkpoint that was moved name the folder that it is in now; the caller has the store's lock.

    Raises:
        CheckpointError: The pins cannot be read or written.
    """
    place = store_folder(path, store)
    pins = read_pins(place)
    moved = [Pin(id, folder) if pin.id == id and not is_same(pin.folder, folder) else pin for pin in pins]
    if moved != pins:
        write_pins(place, moved)


def is_same(left: str, right: str) -> bool:
    """Return whether two names mean one directory."""
    with contextlib.suppress(OSError, ValueError):
        return left == right or os.path.samefile(left, right)
    return False


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
        pins: Checkpoints that it is pinned by and that are in their folders.
        missing: Pins of checkpoints of which nobody can tell: deleted, never committed, moved, or hidden by a mount.
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
    def is_unused(self) -> bool:
        """Whether nobody uses or reads it, and no checkpoint that is in its folder needs it."""
        return not (self.used_by is not None or self.being_read or self.pins or self.problem)

    @property
    def is_free(self) -> bool:
        """Whether it may be deleted by itself: nobody uses or reads it, and every pin was released."""
        return self.is_unused and not self.missing


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
        ranks = [rank for rank in sorted(root.iterdir()) if _RANK.fullmatch(rank.name) and _is_directory(rank)]
        return [judge(store) for folder in (root, *ranks) for store in stores_in(folder)]
    except OSError as cause:
        raise ConfigError("PATH", path, f"it cannot be read: {cause.strerror}") from cause


def stores_in(folder: Path) -> list[Path]:
    """Return the directories of stores in a folder, in order; a link in the place of one is none."""
    return [entry for entry in sorted(folder.iterdir()) if _STORE.fullmatch(entry.name) and _is_directory(entry)]


def _is_directory(entry: Path) -> bool:
    return entry.is_dir() and not entry.is_symlink()


def leftover_bytes(paths: Sequence[str]) -> int:
    """Return what stores whose sessions have ended take on directories among `paths`."""
    found = 0
    for path in paths:
        if path.startswith("s3://"):
            continue
        with contextlib.suppress(OSError):
            for store in stores_in(Path(path.removeprefix("file://"))):
                if lock_holder(store) is None:
                    found += _bytes_of(store)
    return found


def _bytes_of(store: Path) -> int:
    with StoreDirectory(store) as files:
        return sum(status.st_blocks * 512 for status in files.files().values())


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
        held, missing = _split_pins(folder, path)
    except (ValueError, AttributeError, RecursionError, CheckpointError) as cause:
        return Leftover(path, nbytes, None, False, (), (), problem=str(cause))
    return Leftover(path, nbytes, None, False, held, missing, opened_by=who)


def judge(store: Path, *, locked: bool = False) -> Leftover:
    """Return what is known of a store on a file system.

    Args:
        store: Its directory.
        locked: Whether the caller has its lock, and is nobody who uses it.
    """
    nbytes, used_by = 0, None
    try:
        nbytes = _bytes_of(store)
        _check_owner(store)
        _check_record(store)
        used_by = None if locked else lock_holder(store)
        being_read = is_being_read(store)
        held, missing = _split_pins(_open_store(str(store)), str(store))
    except OSError as cause:
        problem = f"{cause.filename}: {cause.strerror}" if cause.filename else str(cause)
        return Leftover(str(store), nbytes, used_by, False, (), (), problem=problem)
    except CheckpointError as cause:
        return Leftover(str(store), nbytes, used_by, False, (), (), problem=str(cause))
    return Leftover(str(store), nbytes, used_by, being_read, held, missing)


def _check_owner(store: Path) -> None:
    owner = os.stat(store, follow_symlinks=False).st_uid
    if os.geteuid() not in (0, owner):
        raise CheckpointError(f"it belongs to the user with number {owner}")


def _check_record(store: Path) -> None:
    """Make sure that a store's record, if it has one, is its own: it may be a copy that somebody made by hand."""
    try:
        record = read_json(store / RECORD_NAME, _RECORD_BYTES)
        name = f"offload-{record['uuid']}"
    except FileNotFoundError:
        return  # its session was killed while it was made, or deleted
    except (ValueError, TypeError, KeyError):
        name = ""
    if name != store.name:
        raise CheckpointError(f"{store / RECORD_NAME} is not the record of this store")


def _split_pins(folder: Folder, store: str) -> tuple[tuple[Pin, ...], tuple[Pin, ...]]:
    """Return the pins whose checkpoints are in their folders, and those of which nobody can tell."""
    pins = read_pins(folder)
    if not any(pin.folder == HERE for pin in pins):
        pins += _implied_pins(store)
    parent = store.rpartition("/")[0]
    known = [(Pin(pin.id, parent if pin.folder == HERE else pin.folder), standing(pin, store)) for pin in pins]
    held = tuple(pin for pin, what in known if what is Standing.HELD)
    return held, tuple(pin for pin, what in known if what is Standing.MISSING)


def _implied_pins(store: str) -> list[Pin]:
    """Return the pin that a self-contained checkpoint around a store would have, had it been written today."""
    folder, _, name = store.rpartition("/")
    place = open_folder(folder)
    if place.read(COMMIT_NAME) is None:
        return []
    try:
        id, manifests = read_manifests(place)
    except CheckpointError:
        return [Pin("", HERE)]  # it is damaged or not ours: what it names is not known
    refs = [ref for manifest in manifests for ref in manifest.stores]
    return [Pin(id, HERE)] if any(ref.path is None and f"offload-{ref.store}" == name for ref in refs) else []


def remove(leftover: Leftover, *, missing: bool = False) -> bool:
    """Delete a store that may be freed, holding its lock meanwhile; return whether it is gone.

    It is judged again under its lock. A store is left alone if it has no lock file: it may just be in the making, or
    on a file system without locks. Only files that stores are made of are deleted. In an object store nothing tells
    whether somebody uses it: the caller says by this that nobody does.

    Args:
        leftover: Which one.
        missing: Delete it even if some of its pins are missing: the caller knows that their checkpoints are gone.
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
        return delete_unused(store, missing=missing)
    finally:
        release_lock(lock)


def delete_unused(store: Path, *, missing: bool = False) -> bool:
    """Delete a store whose lock the caller has, if it may be freed; return whether it is gone. See `remove`."""
    found = judge(store, locked=True)
    if not (found.is_free or (missing and found.is_unused)):
        return False
    try:
        with StoreDirectory(store) as files:
            names = list(files.files())
            files.delete([*STORE_FILES, *(name for name in names if name.startswith(TEMPORARY))])
            files.remove()
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


# Where stores are -------------------------------------------------------------------------------------------------


def places_of(store: uuid.UUID, paths: Sequence[str]) -> list[str]:
    """Return the directories, among some paths and those of their ranks, in which there is a store of that name."""
    found = []
    for path in paths:
        if path.startswith("s3://"):
            continue
        root = Path(os.path.abspath(path.removeprefix("file://")))
        top = root.parent if _RANK.fullmatch(root.name) else root
        with contextlib.suppress(OSError):
            ranks = [rank for rank in sorted(top.iterdir()) if _RANK.fullmatch(rank.name)]
            found += [folder for folder in (root, top, *ranks) if _is_directory(folder / f"offload-{store}")]
    return list(dict.fromkeys(map(str, found)))
