"""Stores, the pins that keep them, and which stores may be freed.

Each store lists the checkpoints that refer to it, in `pins.json`: a pin is the id and the folder of a checkpoint. The
pin is durable before the checkpoint is committed.

Before anything is freed (after a commit, by `offload gc`, in a resume that takes a store over, or when a session uses
slots again), `standing` is asked about each pin, or `judge` about a store with its pins. The rule: **a pin ends only
with a release that names its id**: a `RELEASED`, or a `COMMIT` that names it among those it has replaced; then the
pin itself is removed. A session writes these files for a checkpoint that it finds in its folder. Anything else there,
or an empty folder, is no evidence: the name may mean another folder by now (another mount, a link, a rename). A pin
that cannot be decided is kept, and reported as missing: a person may delete its store. Before a checkpoint is deleted
with its folder, a `RELEASED` has to be written in one of the two folders above it, where it counts, too.

A pin has the inode and the path of its store's directory. In a copy one of them is another (on another file system
the inode may be the same). There a release in the pin's folder is no evidence: it was the original's, and the copy of
the checkpoint may still be needed. A store that was moved looks like a copy. Such a pin is missing, until a session
that takes the store over writes its own folder, the inode and the path into it.

A pin has the inode of its checkpoint's folder, too. Another inode under the same name tells a copy on another volume,
as containers have: it is treated as a copy under another name. Not in a store that was copied or moved itself, as the
folder may have gone with it.

The pin of a save by one rank that was killed before its `COMMIT` ends, too. Such a save writes a file (`begun_name`)
to its folder before it pins a store; `COMMIT` replaces this file in one rename, so no checkpoint has both. The
session that was to write `COMMIT` had the store's lock. The file's name has the folder's inode, so that the file
means nothing in a copy of the folder that was made during the save.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import reprlib
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.checkpoint.contents import read_manifests, read_released
from offload.checkpoint.folder import is_name, open_folder
from offload.checkpoint.manifest import COMMIT_NAME, CommitRecord, seal, unseal, unseal_commit
from offload.errors import CheckpointError, ConfigError
from offload.tiers import file_system, parse_place
from offload.tiers.filesystem import PINS_NAME, release_lock
from offload.tiers.place import TEMPORARY, Folder
from offload.tiers.store import describe_user

_log = logging.getLogger("offload")


HERE = ".."
"""A pin's folder if the store lies in the checkpoint itself, wherever that is moved."""

_COLUMNS = ("inodes", "store_paths", "folder_inodes")
"""What `pins.json` has of pins beside id and folder, each by id; files of older versions lack some."""

_LASTING_INODES = frozenset(
    {"ext", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "nfs", "ceph", "lustre", "gpfs", "beegfs"}
)
"""Types of file systems on which a directory keeps its inode; others may give it another one at the next mount."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One checkpoint that refers to a store: its id, and the folder that it was written to, or `HERE`.

    `inode` is what `Folder.identity` said of the store when the pin was written, `store_path` was its path, and
    `folder_inode` is what `lasting_inode` said of the folder; "" if that is unknown.
    """

    id: str
    folder: str
    inode: str = ""
    store_path: str = ""
    folder_inode: str = ""

    def written_in(self, store: Folder) -> Pin:
        """Return the pin as it is to be written in a store."""
        is_here = self.folder == HERE
        return self if is_here else replace(self, inode=store.identity(), store_path=store.path)

    def is_of(self, store: Folder) -> bool:
        """Return whether the pin was written in this store where it lies now, as far as the pin says."""
        return self.store_path in ("", store.path) and self.inode in ("", store.identity())

    def names(self, folder: str, store: Folder) -> bool:
        """Return whether the pin, of this store, names this folder itself, and not one that this is a copy of."""
        if not is_same(self.folder, folder):
            return False
        if not self.folder_inode or not self.is_of(store):  # of an older version; or the folder was copied, too
            return True
        return lasting_inode(open_folder(folder)) in ("", self.folder_inode)


def lasting_inode(folder: Folder) -> str:
    """Return what `Folder.identity` does for a checkpoint's folder; "" if it may be another at the next mount."""
    with contextlib.suppress(OSError):
        is_lasting = not folder.has_locks or file_system(folder.path) in _LASTING_INODES
        return folder.identity() if is_lasting else ""
    return ""


class Standing(enum.Enum):
    """Whether the checkpoint that a pin names is there, released, or missing."""

    HELD = "it is in its folder"
    RELEASED = "a session has released or replaced it, or has ended before it was committed"
    MISSING = "nobody can tell: no folder has it, and it was not released, or only the original of a copied store was"


def store_folder(path: str, store: uuid.UUID) -> Folder:
    """Return the folder of a store on a path."""
    return parse_place(path).store(store)


def read_pins(folder: Folder) -> list[Pin]:
    """Return the pins of a store.

    Raises:
        CheckpointError: The pins are damaged or cannot be read.
    """
    content = folder.read(PINS_NAME)
    if content is None:
        return []
    where = f"{folder.path}/{PINS_NAME}"
    body = unseal("pins", content, where)
    rows = body.get("pins")
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == 2 and all(is_name(text) for text in row) for row in rows
    ):
        raise CheckpointError(f"{where} is damaged: pins is {reprlib.repr(rows)}")
    columns = [body.get(name, {}) for name in _COLUMNS]
    for name, texts in zip(_COLUMNS, columns, strict=True):
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise CheckpointError(f"{where} is damaged: {name} is {reprlib.repr(texts)}")
    return [Pin(id, name, *(texts.get(id, "") for texts in columns)) for id, name in rows]


def write_pins(folder: Folder, pins: Sequence[Pin]) -> None:
    """Replace the pins of a store, durably."""
    body = {
        "pins": [[pin.id, pin.folder] for pin in pins],  # older versions read pins of two texts
        "inodes": {pin.id: pin.inode for pin in pins if pin.inode},
        "store_paths": {pin.id: pin.store_path for pin in pins if pin.store_path},
        "folder_inodes": {pin.id: pin.folder_inode for pin in pins if pin.folder_inode},
    }
    folder.write(PINS_NAME, seal("pins", body))


def pin(folder: Folder, added: Pin) -> None:
    """Add a pin to a store."""
    pins = read_pins(folder)
    added = added.written_in(folder)
    if added not in pins:
        write_pins(folder, [*(pin for pin in pins if (pin.id, pin.folder) != (added.id, added.folder)), added])


def unpin(folder: Folder, id: str) -> None:
    """Delete a checkpoint's pin from a store; the caller has released the checkpoint, or it was never committed."""
    pins = read_pins(folder)
    remaining = [pin for pin in pins if pin.id != id]
    if remaining != pins:
        write_pins(folder, remaining)


# What may be freed ------------------------------------------------------------------------------------------------


def begun_name(folder: Folder, id: str) -> str:
    """Return the name of the file that says that a save by one rank is not committed; "" where none is written."""
    identity = folder.identity()
    return f"{TEMPORARY}{id}-{identity}" if identity else ""


def standing(pin: Pin, store: str) -> Standing:
    """Return the standing of a pin's checkpoint. A checkpoint that cannot be read counts as held: it may be repaired.

    Args:
        pin: A pin of the store. While its checkpoint is being committed it may count as released, which frees
            nothing, as the store is in use.
        store: The store's directory, or prefix of a bucket. "" will do if the pin's folder is not `HERE`.
    """
    if not pin.id:  # it stands for a checkpoint around the store that cannot be read
        return Standing.MISSING
    folder = store.rpartition("/")[0] if pin.folder == HERE else pin.folder
    try:
        opened = open_folder(folder)
        opened.hasten()
        content = opened.read(COMMIT_NAME)
        if content is not None:
            commit = unseal_commit(content, folder)
            if commit.id == pin.id:
                return Standing.HELD
            released_ids = commit.replaced  # another checkpoint is there now
        else:
            released_ids, _ = read_released(opened)
        begun = begun_name(opened, pin.id)
        is_begun = begun and opened.read(begun) is not None  # the save was killed before its `COMMIT`
    except (ConfigError, CheckpointError, ValueError):  # such as a name that no folder can have
        return Standing.HELD
    is_released = is_begun or pin.id in released_ids or _is_named_above(opened.path, pin.id)
    is_here = not store or pin.is_of(open_folder(store))
    return Standing.RELEASED if is_released and is_here else Standing.MISSING


def folders_above(folder: str) -> tuple[str, ...]:
    """Return the two folders above one, where a `RELEASED` may name checkpoints whose own folder was deleted."""
    above = os.path.dirname(folder)
    return above, os.path.dirname(above)


def _is_named_above(folder: str, id: str) -> bool:
    """Return whether a `RELEASED` in one of the two folders above a checkpoint's names it."""
    for above in folders_above(folder):
        with contextlib.suppress(ConfigError, CheckpointError, ValueError):  # what cannot be read names nothing
            opened = open_folder(above)
            opened.hasten()
            released_ids, _ = read_released(opened)
            if id in released_ids:
                return True
    return False


def released_before(folder: Folder) -> tuple[str, ...]:
    """Return the ids of the checkpoints that a folder has held before a commit to it, newest first.

    The first is the one that the commit replaces. It is left out if it is a copy of a checkpoint that is elsewhere:
    otherwise, replacing the copy would release the original, which has the same id.

    Raises:
        CheckpointError: The folder's `COMMIT` is not ours to replace.
    """
    commit = commit_to_replace(folder)
    if commit is None:
        released_ids, _ = read_released(folder)
        return released_ids
    return commit.replaced if _is_copy(folder) else (commit.id, *commit.replaced)


def commit_to_replace(folder: Folder) -> CommitRecord | None:
    """Return the `COMMIT` of a folder; None if there is none.

    Raises:
        CheckpointError: The file was not written by this package, or is damaged: it is not replaced.
    """
    content = folder.read(COMMIT_NAME)
    try:
        return None if content is None else unseal_commit(content, os.path.join(folder.path, COMMIT_NAME))
    except CheckpointError as cause:
        raise CheckpointError(f"{cause}. It is not replaced: move it away, or save to another folder") from cause


def _is_copy(folder: Folder) -> bool:
    """Return whether the checkpoint in a folder is a copy of one that the pins of its stores find elsewhere."""
    with contextlib.suppress(CheckpointError):  # the checkpoint is damaged, or its stores are gone
        id, manifests = read_manifests(folder)
        stores = {place for manifest in manifests for place in manifest.stores_elsewhere}
        return any(is_elsewhere(id, folder.path, path, store) for path, store in sorted(stores))
    return False


def is_elsewhere(id: str, folder: str, path: str, store: uuid.UUID) -> bool:
    """Return whether a store is pinned for the same checkpoint in another folder than `folder`, and it is there.

    Then `folder` is a copy of that folder, and both need the store. If the other one has the same name, on another
    volume, nobody can look there: it counts as being there.

    Raises:
        CheckpointError: The pins cannot be read.
    """
    opened = store_folder(path, store)
    pins_elsewhere = (pin for pin in read_pins(opened) if pin.id == id and not pin.names(folder, opened))
    return any(standing(pin, opened.path) is Standing.HELD for pin in pins_elsewhere)


def is_pinned_in(folder: str, id: str, path: str, store: uuid.UUID) -> bool:
    """Return whether a store has the pin of a checkpoint in that folder, and is the one that it was written in."""
    with contextlib.suppress(CheckpointError):
        opened = store_folder(path, store)
        for found in read_pins(opened):
            if found.id == id and found.folder != HERE and found.names(folder, opened):
                return found.is_of(opened)
    return False


def note_move(id: str, folder: str, path: str, store: uuid.UUID) -> None:
    """Write a moved checkpoint's folder, the store's inode and path into its pin; the caller has the store's lock.

    Raises:
        CheckpointError: The pins cannot be read or written.
    """
    opened = store_folder(path, store)
    pins = read_pins(opened)
    moved = Pin(id, folder, folder_inode=lasting_inode(open_folder(folder))).written_in(opened)

    def note(pin: Pin) -> Pin:
        """Return the pin as it has to be."""
        is_noted = pin.id != id or (pin.names(folder, opened) and pin.is_of(opened))
        return pin if is_noted else moved

    new_pins = [note(pin) for pin in pins]
    if new_pins != pins:
        write_pins(opened, new_pins)


def unpin_released(path: str, store: uuid.UUID) -> None:
    """Delete the pins of released checkpoints from a store, whose lock the caller has.

    Call this as soon as a store is locked: without the `RELEASED` that names a checkpoint, which may be deleted at
    any time, nobody can tell any more that the checkpoint was released.

    Raises:
        CheckpointError: The pins cannot be read or written.
    """
    folder = store_folder(path, store)
    pins = read_pins(folder)
    remaining = [pin for pin in pins if standing(pin, folder.path) is not Standing.RELEASED]
    if remaining != pins:
        write_pins(folder, remaining)


def is_same(left: str, right: str) -> bool:
    """Return whether two names mean one directory."""
    with contextlib.suppress(OSError, ValueError):
        return left == right or os.path.samefile(left, right)
    return False


def is_read(store: Folder, *, own: int = 0) -> bool:
    """Return whether a store is known to have more readers than its owner and the caller's own, `own` of them."""
    with contextlib.suppress(OSError):
        return store.is_read(own=own)
    return False


# Leftovers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leftover:
    """A store, and whether anybody needs it.

    Attributes:
        path: The store's directory.
        nbytes: Bytes that the store takes.
        used_by: Pid of the process that has the store's lock; None if none has.
        being_read: Whether some process reads the store.
        pins: Pins of checkpoints that are in their folders.
        missing: Pins of checkpoints that may be deleted, never committed, moved, hidden by a mount, or copied.
        problem: Why the store cannot be judged; "" if it can.
        opened_by: In an object store, the session that has opened the store and may still use it; "" if that is known
            to have ended, and where stores have locks.
        folder: The store's folder.
    """

    path: str
    nbytes: int
    used_by: int | None
    being_read: bool
    pins: tuple[Pin, ...]
    missing: tuple[Pin, ...]
    problem: str = ""
    opened_by: str = ""
    folder: Folder = field(kw_only=True, repr=False, compare=False)

    @property
    def is_unused(self) -> bool:
        """Whether no process uses or reads the store, and no checkpoint that is in its folder needs the store."""
        return not (self.used_by is not None or self.being_read or self.pins or self.problem)

    @property
    def is_free(self) -> bool:
        """Whether the store may be deleted without asking a person: surely unused and unread, every pin released."""
        return self.may_go()

    def may_go(self, *, missing: bool = False, ended: bool = False) -> bool:
        """Return whether the store may be deleted, given what the caller knows.

        Args:
            missing: The checkpoints of `missing` pins have been deleted.
            ended: The session in `opened_by` has ended.
        """
        return self.is_unused and (missing or not self.missing) and (ended or not self.opened_by)


def find_stores(path: str) -> list[Leftover]:
    """Return all stores on a path, in order of their names; those in folders of ranks (`rank-<r>`) are included.

    Raises:
        ConfigError: `path` is not a directory that can be read, or not a bucket that can be used.
    """
    try:
        return [judge(store) for store in parse_place(path, "PATH").stores()]
    except (NotADirectoryError, FileNotFoundError) as cause:
        raise ConfigError("PATH", path, "name a directory that exists") from cause
    except OSError as cause:
        raise ConfigError("PATH", path, f"it cannot be read: {cause.strerror}") from cause
    except CheckpointError as cause:
        raise ConfigError("PATH", path, str(cause)) from cause


def leftover_bytes(most_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return, by the ids of checkpoints, the bytes of the ended sessions' stores that have a pin of them.

    Stores without locks are left out: nothing tells there that a session has ended.

    Args:
        most_bytes: The paths, each with how many bytes of a checkpoint count there.
    """
    nbytes_by_id = Counter[str]()
    for path, most in most_bytes.items():
        place = parse_place(path)
        stores: Sequence[Folder] = ()
        with contextlib.suppress(OSError):  # opening a store there raises why
            # Those of several ranks lie in folders of their own.
            stores = place.stores(ranks=False) if place.has_locks else ()
        for store in stores:
            with contextlib.suppress(OSError, CheckpointError):  # it is another user's, or has damaged pins
                if store.used_by() is None:
                    nbytes = min(store.nbytes(), most)
                    nbytes_by_id.update(dict.fromkeys({pin.id for pin in read_pins(store)}, nbytes))
    return nbytes_by_id


def judge(store: Folder, *, locked: bool = False) -> Leftover:
    """Return who uses and reads a store, and which pins keep it; errors are noted in `problem`.

    With `locked` the caller itself has the store's lock, which is then not counted as a use.
    """
    nbytes, used_by, being_read, opened_by, problem = 0, None, False, "", ""
    pins: tuple[Pin, ...] = ()
    missing: tuple[Pin, ...] = ()
    try:
        nbytes = store.nbytes()
        opened_by = store.opened_by()
        used_by = None if locked else store.used_by()
        being_read = store.is_read()
        pins, missing = _split_pins(store)
    except OSError as cause:
        problem = f"{cause.filename}: {cause.strerror}" if cause.filename else str(cause)
    except CheckpointError as cause:
        problem = str(cause)
    return Leftover(store.label, nbytes, used_by, being_read, pins, missing, problem, opened_by, folder=store)


def _split_pins(store: Folder) -> tuple[tuple[Pin, ...], tuple[Pin, ...]]:
    """Return the pins of a store whose checkpoints are in their folders, and those whose checkpoints are missing.

    In them `HERE` is replaced by the folder.
    """
    pins = read_pins(store)
    name = store.label
    if not any(pin.folder == HERE for pin in pins):  # it may be in a checkpoint from before there were such pins
        pins += _pins_of_copy_around(name)
    parent, _, _ = name.rpartition("/")
    verdicts = [(replace(pin, folder=parent) if pin.folder == HERE else pin, standing(pin, name)) for pin in pins]
    held_pins = tuple(pin for pin, verdict in verdicts if verdict is Standing.HELD)
    missing_pins = tuple(pin for pin, verdict in verdicts if verdict is Standing.MISSING)
    return held_pins, missing_pins


def _pins_of_copy_around(store: str) -> list[Pin]:
    """Return the pin that a store has to have because of the self-contained checkpoint in whose folder it lies.

    No pin if it lies in none. A pin without an id if the checkpoint there cannot be read.
    """
    folder, _, name = store.rpartition("/")
    around = open_folder(folder)
    if around.read(COMMIT_NAME) is None:
        return []
    try:
        id, manifests = read_manifests(around)
    except CheckpointError:
        return [Pin("", HERE)]  # it is damaged or not ours: nobody can tell which stores it names
    refs = [ref for manifest in manifests for ref in manifest.stores]
    is_named = any(ref.path is None and f"offload-{ref.store}" == name for ref in refs)
    return [Pin(id, HERE)] if is_named else []


def remove(leftover: Leftover, *, missing: bool = False, ended: bool = False) -> bool:
    """Delete a store that may be freed, under its lock; return whether it is deleted.

    The store is judged again under the lock. A store without a lock file may be on a file system without locks, and
    is deleted only if it is empty. A store that is just being made looks like a leftover until its session has locked
    it; if it is deleted, the session makes it again. Only files that stores are made of are deleted. For `missing`
    and `ended`, what the caller knows of the store, see `Leftover.may_go`.
    """
    store = leftover.folder
    lock = store.acquire_lock()
    if lock is None and store.has_locks:
        return store.remove_empty()
    try:
        return delete_unused(store, missing=missing, ended=ended)
    finally:
        if lock is not None:
            release_lock(lock)


def delete_free(paths: Iterable[str]) -> None:
    """Delete the stores on some paths whose sessions have ended and that no checkpoint needs, as `offload gc` does.

    On paths whose stores have no locks nothing is deleted: nothing tells there that a session has ended, so a person
    has to delete them.

    Raises:
        ConfigError: A path cannot be read.
    """
    for path in dict.fromkeys(paths):
        for leftover in find_stores(path) if parse_place(path).has_locks else ():
            if leftover.is_free and remove(leftover):
                _log.info("deleted %s, which a session that has ended left behind", leftover.path)


def note_reading(stores: Iterable[tuple[str, uuid.UUID]], reader: str) -> None:
    """Note in stores without locks, in a file called `reader`, that this session reads them.

    Failures are ignored: writing may be forbidden.
    """
    content = json.dumps(describe_user()).encode()
    for path, store in stores:
        with contextlib.suppress(CheckpointError):
            store_folder(path, store).write(reader, content)


def drop_notes(stores: Iterable[tuple[str, uuid.UUID]], reader: str) -> None:
    """Delete the notes that `note_reading` has written. Failures are ignored: a note that stays keeps its store."""
    for path, store in stores:
        with contextlib.suppress(CheckpointError):
            store_folder(path, store).delete(reader)


def delete_released(stores: Iterable[tuple[str, uuid.UUID]]) -> bool:
    """Delete, of some stores without locks, those that no checkpoint needs any more and that nobody may use.

    Returns:
        Whether none of them is left.

    Raises:
        CheckpointError: Pins cannot be read or written.
    """
    remaining_count = 0
    for path, store in stores:
        unpin_released(path, store)
        opened = store_folder(path, store)
        if not opened.names():  # it has no files: it was deleted before
            continue
        if not read_pins(opened) and delete_unused(opened):
            _log.info("deleted %s, which a session that has ended left behind", opened.path)
        else:
            remaining_count += 1
    return remaining_count == 0


def delete_unused(store: Folder, *, missing: bool = False, ended: bool = False) -> bool:
    """Delete a store whose lock the caller has, if it may be freed (`Leftover.may_go`); return whether it is deleted.

    A failure is logged or, if it is the system's (`OSError`), ignored.
    """
    if not judge(store, locked=True).may_go(missing=missing, ended=ended):
        return False
    try:
        store.remove()
    except CheckpointError as error:
        _log.warning("%s", error)
        return False
    except OSError:
        return False
    return True
