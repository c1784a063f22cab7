"""Stores, the pins that keep them, and which stores may be freed.

Each store lists the checkpoints that refer to it, in `pins.json`: a pin is the id and the folder of a checkpoint. The
pin is durable before the checkpoint is committed.

Before anything is freed, `standing` is asked about each pin, or `judge` about a store with its pins: after a commit,
by `offload gc`, in a resume that takes a store over, and when a session uses slots again. The rule: **a pin ends only
with a release that names its id**. That is a `RELEASED`, or a `COMMIT` that names the id among those it has replaced;
then the pin itself is removed. A session writes these files for a checkpoint that it finds in its folder. Any other
content of the folder, or an empty folder, is no evidence: the name may mean another folder by now (another mount, a
link, a rename). A pin that cannot be decided is kept, and reported as missing: a person may delete its store.
Before a checkpoint is deleted with its folder, a `RELEASED` has to be written in one of the two folders above it,
where it counts, too.

Copies of stores. A pin has the inode and the path of its store's directory. In a copy of the store at least one of
the two differs (on another file system the inode may be the same). There a release in the pin's folder is no
evidence: it was the original's, and the copy of the checkpoint may still be needed. A store that was moved looks like
a copy. Such a pin counts as missing, until a session that takes the store over writes the checkpoint's present
folder, and the store's inode and path, into it.

Copies of folders. A pin has the inode of its checkpoint's folder, too. Another inode under the same name tells a copy
on another volume, as containers have: it is treated as a copy under another name. Not so in a store that was copied
or moved itself, as the folder may have gone with it.

Killed saves. The pin of a save by one rank that was killed before its `COMMIT` ends, too. Such a save writes a file
(`begun_name`) to its folder before it pins a store. `COMMIT` replaces this file in one rename, so no checkpoint has
both. While the save goes on its session has the store's lock, so nothing is freed then. The file's name has the
folder's inode, so that the file means nothing in a copy of the folder that was made during the save.
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
"""Keys of `pins.json` for the fields of `Pin` after id and folder, in their order: each has texts by id.

Files of older versions lack some of them.
"""

_LASTING_INODES = frozenset(
    {"ext", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "tmpfs", "nfs", "ceph", "lustre", "gpfs", "beegfs"}
)
"""Types of file systems on which a directory keeps its inode; others may give it another one at the next mount."""


@dataclass(frozen=True, slots=True)
class Pin:
    """One checkpoint that refers to a store.

    Attributes:
        id: The checkpoint's id.
        folder: The folder that the checkpoint was written to, or `HERE`.
        inode: The store's `Folder.identity` when the pin was written; "" if that is unknown.
        store_path: The store's path then; "" if that is unknown.
        folder_inode: The folder's `lasting_inode` then; "" if that is unknown.
    """

    id: str
    folder: str
    inode: str = ""
    store_path: str = ""
    folder_inode: str = ""

    def written_in(self, store: Folder) -> Pin:
        """Return the pin as it is to be written in a store: with the store's inode and path, unless it is `HERE`."""
        is_here = self.folder == HERE
        return self if is_here else replace(self, inode=store.identity(), store_path=store.path)

    def is_of(self, store: Folder) -> bool:
        """Return whether the pin was written in this very store, which is no copy and has not been moved since.

        What the pin does not say counts as fitting.
        """
        return self.store_path in ("", store.path) and self.inode in ("", store.identity())

    def names(self, folder: str, store: Folder) -> bool:
        """Return whether the pin, read in `store`, names the checkpoint's folder `folder` itself.

        It does not if the folder is a copy of the one that the pin names, under another name or on another volume.
        """
        if not is_same(self.folder, folder):
            return False
        # The folder's inode tells nothing if it was not noted (by an older version, or as it may change), or if the
        # store was copied or moved, as the folder may have gone with it.
        if not self.folder_inode or not self.is_of(store):
            return True
        return lasting_inode(open_folder(folder)) in ("", self.folder_inode)


def lasting_inode(folder: Folder) -> str:
    """Return the `Folder.identity` of a checkpoint's folder; "" if it may change with the next mount."""
    with contextlib.suppress(OSError):
        # A folder without locks is a bucket's: it lies on no file system, and its identity is "" anyway.
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
    """Add a pin to a store, in place of one for the same checkpoint in the same folder."""
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
    """Return the name of the file that says that a save by one rank is not committed yet.

    It has the folder's inode, so that it says nothing in a copy of the folder. "" in a bucket, where no such file is
    written. The file is a temporary one: `COMMIT` is written under this name, and then renamed.
    """
    identity = folder.identity()
    return f"{TEMPORARY}{id}-{identity}" if identity else ""


def standing(pin: Pin, store: str) -> Standing:
    """Return the standing of a pin's checkpoint.

    It is held if its folder's `COMMIT` has its id; released if a `COMMIT` or `RELEASED` names the id, or its save was
    killed; else missing. A checkpoint that cannot be read counts as held: it may be repaired.

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
        opened.hasten()  # the caller waits; a bucket that does not answer soon counts as unreadable
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
    is_here = not store or pin.is_of(open_folder(store))  # in a copied store a release is no evidence
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

    The first is that of the checkpoint that the commit replaces, if there is one. It is left out if that checkpoint
    is a copy of one elsewhere: otherwise, replacing the copy would release the original, which has the same id.

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
    """Return whether the checkpoint `id` in `folder` is a copy of one that is in another folder, too.

    The pins of the store on `path` tell: one is for the same checkpoint in another folder, and the checkpoint is
    there. Both folders need the store then. If the other folder has the same name, on another volume, nobody can look
    there: the checkpoint counts as being there.

    Raises:
        CheckpointError: The pins cannot be read.
    """
    opened = store_folder(path, store)
    pins_elsewhere = (pin for pin in read_pins(opened) if pin.id == id and not pin.names(folder, opened))
    return any(standing(pin, opened.path) is Standing.HELD for pin in pins_elsewhere)


def is_pinned_in(folder: str, id: str, path: str, store: uuid.UUID) -> bool:
    """Return whether a store has a pin of the checkpoint `id` in `folder`, and is no copy of the pinned store."""
    with contextlib.suppress(CheckpointError):
        opened = store_folder(path, store)
        for pin in read_pins(opened):
            # `HERE` is no path that `names` could compare; such a pin is that of a copy with its store inside.
            if pin.id == id and pin.folder != HERE and pin.names(folder, opened):
                return pin.is_of(opened)
    return False


def note_move(id: str, folder: str, path: str, store: uuid.UUID) -> None:
    """Correct a checkpoint's pin in a store, if the checkpoint's folder or the store has moved.

    The pin gets the present folder, and the store's present inode and path. The caller has the store's lock.

    Raises:
        CheckpointError: The pins cannot be read or written.
    """
    opened = store_folder(path, store)
    pins = read_pins(opened)
    moved = Pin(id, folder, folder_inode=lasting_inode(open_folder(folder))).written_in(opened)

    def note(pin: Pin) -> Pin:
        """Return a pin as it has to be: `moved` if it is this checkpoint's and says something else."""
        is_right = pin.id != id or (pin.names(folder, opened) and pin.is_of(opened))
        return pin if is_right else moved

    new_pins = [note(pin) for pin in pins]
    if new_pins != pins:
        write_pins(opened, new_pins)


def unpin_released(path: str, store: uuid.UUID) -> None:
    """Delete the pins of released checkpoints from a store; the caller has its lock, if it has one.

    Call this as soon as a store is locked. That a checkpoint was released is told by a `RELEASED` or `COMMIT` in a
    folder, which may be deleted at any time.

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
    """Return whether a store is known to have readers beside its owner and `own` readers of this process."""
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
        missing: Pins whose checkpoints are not in their folders, and were not released as far as anybody can tell:
            deleted, never committed, moved, hidden by a mount, or copied.
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
    """Return how many bytes ended sessions' stores take, for each checkpoint that has pins in them.

    A session that resumes from the checkpoint can go on in these stores, so their bytes count as room for it. Stores
    without locks are left out: nothing tells there that a session has ended.

    Args:
        most_bytes: For each path, the most bytes of one store there that are counted.

    Returns:
        Bytes by the checkpoint's id.
    """
    nbytes_by_id = Counter[str]()
    for path, most in most_bytes.items():
        place = parse_place(path)
        stores: Sequence[Folder] = ()
        with contextlib.suppress(OSError):  # the path cannot be read: users are told when a store is opened there
            # Without those in `rank-<r>`: they are of sessions of several ranks.
            stores = place.stores(ranks=False) if place.has_locks else ()
        for store in stores:
            with contextlib.suppress(OSError, CheckpointError):  # it is another user's, or has damaged pins
                if store.used_by() is None:  # its session has ended
                    nbytes = min(store.nbytes(), most)
                    # A `Counter` adds: the store's bytes go to every checkpoint that has a pin in it.
                    nbytes_by_id.update(dict.fromkeys({pin.id for pin in read_pins(store)}, nbytes))
    return nbytes_by_id


def judge(store: Folder, *, locked: bool = False) -> Leftover:
    """Return who uses and reads a store, and which pins keep it; an error is noted in `problem`, and not raised.

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
    """Return the pins of a store whose checkpoints are in their folders, then those whose checkpoints are missing.

    Pins of released checkpoints are in neither. In both `HERE` is replaced by the folder that the store lies in.
    """
    pins = read_pins(store)
    name = store.label
    if not any(pin.folder == HERE for pin in pins):  # a copy that an older version saved has no such pin
        pins += _pins_of_copy_around(name)
    parent, _, _ = name.rpartition("/")
    verdicts = [(replace(pin, folder=parent) if pin.folder == HERE else pin, standing(pin, name)) for pin in pins]
    held_pins = tuple(pin for pin, verdict in verdicts if verdict is Standing.HELD)
    missing_pins = tuple(pin for pin, verdict in verdicts if verdict is Standing.MISSING)
    return held_pins, missing_pins


def _pins_of_copy_around(store: str) -> list[Pin]:
    """Return the pin that a store needs if it lies in the folder of a self-contained checkpoint that names it.

    No pin if there is no such checkpoint; a pin without an id if the checkpoint there cannot be read.
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
    """Lock a store, judge it again, and delete it if it may be freed; return whether it is deleted.

    A store that cannot be locked is deleted only if it is empty, unless stores on its path have no locks at all. A
    store that is just being made looks like a leftover until its session has locked it; if it is deleted, the session
    makes it again. Only files that stores are made of are deleted.

    Args:
        leftover: The store.
        missing: See `Leftover.may_go`.
        ended: See `Leftover.may_go`.
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
    """Delete those of the stores, which have no locks, that no checkpoint needs any more and that nobody may use.

    Pins of released checkpoints are deleted first.

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
    """Delete a store if it may be freed (`Leftover.may_go`); return whether it is deleted.

    The caller has the store's lock, if the store has one. A failure is logged; the system's (`OSError`) is ignored.
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
