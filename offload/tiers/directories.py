"""A directory as a place: its tiers, its stores, and folders of small files."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from offload._native import CompletionQueue, IoThreads, StoreFile
from offload.errors import CheckpointError, ConfigError, invariant
from offload.protocols import SECTOR_BYTES, Tier, TileRequest
from offload.tiers.asyncfile import supports_direct
from offload.tiers.common import FileBytes, Owned, StoreOptions, check_options_without_threads
from offload.tiers.file import DEFAULT_PIECE_BYTES, FileTier
from offload.tiers.filesystem import (
    LOCK_NAME,
    NETWORK_FILE_SYSTEMS,
    STORE_FILES,
    LockFile,
    file_system,
    hold_lock,
    identity,
    is_being_read,
    lock_holder,
    open_regular,
    read_json,
    read_regular,
    replacing,
    room_bytes,
    share_lock,
    sync_directory,
    unshare_lock,
)
from offload.tiers.place import TEMPORARY, Folder, Place, limit_bytes, raising_checkpoint_error
from offload.tiers.store import DATA_NAME, NO_LOCK_ERRNOS, RANK_NAME, RECORD_NAME, STORE_NAME, Store, StoreDirectory
from offload.tiers.turns import TakingTurns

_RECORD_BYTES = 1 << 16
"""Most bytes of a store's record; a longer one is not ours."""


class Directory(Place):
    """A `Place` on a file system; its methods are described there.

    Args:
        path: The directory, or "file://" and it.
        field: Ignored: any text may be the name of a directory.
    """

    has_locks = True

    def __init__(self, path: str, field: str = "paths") -> None:
        self.path = path.removeprefix("file://")
        self.name = os.path.abspath(self.path)
        self.lock_path = self.path

    def check(self, field: str) -> Hashable:
        if not os.path.exists(self.path):
            raise ConfigError(field, self.path, "the directory does not exist; create it first")
        if not os.path.isdir(self.path):
            raise ConfigError(field, self.path, "it is not a directory; name one")
        if not os.access(self.path, os.W_OK | os.X_OK):
            advice = "the directory cannot be written; change its permissions or name another"
            raise ConfigError(field, self.path, advice)
        return identity(self.path)

    def parts(self) -> tuple[str, ...]:
        """See `Place.parts`; links are followed."""
        return Path(os.path.realpath(self.path)).parts

    def room(self) -> tuple[int, int | None]:
        """See `Place.room`; a file system that does not say how large it is has no limit."""
        return room_bytes(os.statvfs(self.path)), os.stat(self.path).st_dev

    def facts(self) -> dict[str, str]:
        """See `Place.facts`; all directories of one file system have the same `device`."""
        directory = os.path.realpath(self.path)
        try:
            # A file system without an id (mostly network mounts) is identified by what is mounted.
            file_system_id = os.statvfs(directory).f_fsid
            device = f"{file_system_id:016x}" if file_system_id else mount_of(directory)[0]
            return {"path": directory, "file_system": file_system(directory), "device": device}
        except OSError as cause:
            raise ConfigError("paths", self.path, f"it cannot be used: {cause.strerror}") from cause

    def for_rank(self, rank: int, field: str) -> Directory:
        """See `Place.for_rank`; the outer directory is checked only if the rank's has to be made in it."""
        rank_directory = os.path.join(self.path, f"rank-{rank}")
        if not os.path.isdir(rank_directory):
            self.check(field)
        try:
            os.makedirs(rank_directory, exist_ok=True)
        except OSError as error:
            advice = f"the directory cannot be written ({error.strerror}); change its permissions or name another"
            raise ConfigError(field, self.path, advice) from error
        return Directory(rank_directory)

    def open(self, store: uuid.UUID, queue: CompletionQueue, options: StoreOptions) -> Tier:
        """See `Place.open`; the tier takes turns on the path if the options ask for turns."""
        if options.io_backend == "auto" and self._wants_asyncio():
            options = replace(options, io_backend="asyncio")
        if options.io_backend == "asyncio":  # as the user has said, or as was found just now
            check_options_without_threads(self.path, options, "asyncio takes no turns, other backends do")
            options = replace(options, turns=None)
        if options.turns is None:
            return FileTier(self.path, store, queue, options)
        inner_queue = CompletionQueue()  # on which the turns' thread alone waits: it passes completions on to `queue`
        inner = FileTier(self.path, store, inner_queue, options)
        try:
            return TakingTurns(inner, inner_queue, queue, options.turns)
        except BaseException:
            inner.close()
            raise

    def _wants_asyncio(self) -> bool:
        """Return whether `io_backend` "auto" is asyncio: on a network or parallel file system without O_DIRECT.

        Such transfers go through the page cache anyway, and one event loop keeps a bounded number of them going. A
        file is made for a moment, to try O_DIRECT.
        """
        try:
            return file_system(self.path) in NETWORK_FILE_SYSTEMS and not supports_direct(self.path)
        except OSError:
            return False  # opening the store raises an error that says what is wrong

    def open_existing(self, store: uuid.UUID, queue: CompletionQueue) -> Tier:
        return ExistingStore(self.path, store, queue)

    def folder(self) -> DirectoryFolder:
        return DirectoryFolder(self.path)

    def store(self, store: uuid.UUID) -> DirectoryFolder:
        return DirectoryFolder(f"{self.path.rstrip('/')}/offload-{store}", follow=False)

    def stores(self, *, ranks: bool = True) -> list[DirectoryFolder]:
        """See `Place.stores`; a link is never a store. What is in a rank's folder that cannot be read is left out."""
        root = Path(self.path)
        names = _stores_in(root)
        for folder in _rank_directories(root) if ranks else ():
            with contextlib.suppress(PermissionError):  # another user's
                names += _stores_in(folder) if _is_directory(folder) else ()
        return [DirectoryFolder(name, follow=False) for name in names]

    def search(self, store: uuid.UUID, names: Iterable[str]) -> list[str]:
        """See `Place.search`; directories that cannot be read are passed over."""
        folders: list[Path] = []
        for directory in map(Path, names):
            # A name may be that of one rank's directory; the store may lie beside it, or in another rank's.
            path = directory.parent if RANK_NAME.fullmatch(directory.name) else directory
            with contextlib.suppress(OSError):
                candidates = [directory, path, *_rank_directories(path)]
                folders += [folder for folder in candidates if _is_directory(folder / f"offload-{store}")]
        return list(dict.fromkeys(map(str, folders)))  # each once


def _rank_directories(path: Path) -> list[Path]:
    """Return the directories of ranks on a path, sorted."""
    return [entry for entry in sorted(path.iterdir()) if RANK_NAME.fullmatch(entry.name)]


def _owner_of_new_files(directory: Path) -> int | None:
    """Return the owner of a file that this process makes in a directory, by number; None if it cannot make one.

    Some mounts show all files as one user's, who is not this process's: NFS with all_squash, CIFS with uid=.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory) as file:
        return os.fstat(file.fileno()).st_uid
    return None


def _stores_in(folder: Path) -> list[str]:
    """Return the paths of the stores in a directory, sorted."""
    names = [entry for entry in sorted(folder.iterdir()) if STORE_NAME.fullmatch(entry.name)]
    return [str(entry) for entry in names if _is_directory(entry)]


def _is_directory(entry: Path) -> bool:
    """Return whether a name is that of a directory, and no link to one."""
    return entry.is_dir() and not entry.is_symlink()


def mount_of(directory: str) -> tuple[str, str]:
    """Return what is mounted where a directory lies, such as a server's export, and with which options.

    Both are "" if that is unknown. The directory is a real path.
    """
    # Of several mounts at one point the last one listed stays: it lies over the others.
    mounts = {mount.mountpoint: (mount.device, mount.opts) for mount in psutil.disk_partitions(all=True)}
    mount_point = Path(directory)
    while str(mount_point) not in mounts and mount_point != mount_point.parent:
        mount_point = mount_point.parent
    return mounts.get(str(mount_point), ("", ""))


class DirectoryFolder(Folder):
    """A `Folder` on a file system; its methods are described there.

    Args:
        path: The directory. It is made absolute, and links in it are resolved when the folder is made, as they may
            change later.
        follow: Whether its last name, and its files, may be links; False for a store.
    """

    has_locks = True

    def __init__(self, path: str, *, follow: bool = True) -> None:
        self.label = path
        if follow:
            self.path = os.path.realpath(path)
        else:
            parent, name = os.path.split(os.path.abspath(path))
            self.path = os.path.join(os.path.realpath(parent), name)
        self._follow = follow
        self._root = Path(self.path)

    def read(self, name: str) -> bytes | None:
        """See `Folder.read`; a file that is not regular, or larger than allowed, is an error."""
        file_path = os.path.join(self.path, name)
        try:
            with (
                raising_checkpoint_error("read", file_path),
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
            ):
                return read_regular(self._root / name, limit_bytes(name), follow=self._follow)
        except MemoryError as cause:
            raise CheckpointError(f"cannot read {file_path}: it is larger than memory") from cause
        return None

    def read_into(self, name: str, pieces: Sequence[memoryview]) -> None:
        file_path = os.path.join(self.path, name)
        opener = partial(open_regular, follow=self._follow)  # refuses what is no regular file
        with raising_checkpoint_error("read", file_path), open(self._root / name, "rb", opener=opener) as file:
            is_shorter = any(file.readinto(piece) != len(piece) for piece in pieces)
            if is_shorter or file.read(1):  # a byte is left: the file is longer
                raise CheckpointError(f"{file_path} is damaged: it has another size than was written")

    @contextlib.contextmanager
    def content(self, name: str, scratch: str | None) -> Iterator[FileBytes]:
        """See `Folder.content`; the file is read in place."""
        with contextlib.ExitStack() as ends:
            with raising_checkpoint_error("read", os.path.join(self.path, name)):
                opener = partial(open_regular, follow=self._follow)
                file = ends.enter_context(open(self._root / name, "rb", opener=opener))
            yield FileBytes(file.fileno(), os.fstat(file.fileno()).st_size)

    def identity(self) -> str:
        """See `Folder.identity`; the inode's number, which copies do not share."""
        with contextlib.suppress(OSError):
            return str(os.stat(self.path).st_ino)
        return ""

    def write(self, name: str, content: bytes | Iterable[memoryview] | FileBytes, *, begun: str = "") -> None:
        """See `Folder.write`; until the file is whole it has the name `begun`, or a new one."""
        temporary = begun or f"{TEMPORARY}{uuid.uuid4().hex}"
        with (
            raising_checkpoint_error("write", os.path.join(self.path, name)),
            replacing(self._root / name, temporary) as file,
        ):
            file.writelines([content] if isinstance(content, bytes) else content)

    def delete(self, name: str) -> None:
        with (
            raising_checkpoint_error("delete", os.path.join(self.path, name)),
            contextlib.suppress(FileNotFoundError),
        ):
            (self._root / name).unlink()
            sync_directory(self._root)

    def names(self) -> list[str]:
        with (
            raising_checkpoint_error("list", f"{self.path}/"),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
        ):
            return sorted(name for name in os.listdir(self._root) if not name.startswith(TEMPORARY))
        return []

    def walk(self) -> list[tuple[str, int]]:
        sizes = []
        with raising_checkpoint_error("list", f"{self.path}/"):
            for path in self._root.rglob("*"):
                if path.is_file() and not path.name.startswith(TEMPORARY):
                    sizes.append((path.relative_to(self._root).as_posix(), path.stat().st_size))
        return sorted(sizes)

    def prepare(self) -> None:
        with raising_checkpoint_error("use", f"{self.path}/"):
            new_directories = [each for each in (self._root, *self._root.parents) if not each.exists()]
            self._root.mkdir(parents=True, exist_ok=True)
            trial = self._root / f"{TEMPORARY}{uuid.uuid4().hex}"
            trial.write_bytes(b"")
            trial.unlink()
            # The names of directories that were made here have to be durable, too. A name is durable once the
            # directory that it stands in is synced. Another rank may just have made the folder and its parent.
            parents = [*self._root.parents][: max(2, len(new_directories))]
            for directory in (self._root, *parents):
                with contextlib.suppress(PermissionError):  # one that this user may not read was not made here
                    sync_directory(directory)

    def nbytes(self) -> int:
        with StoreDirectory(self._root) as files:
            # Blocks, as a file may have holes; they are counted in units of 512 bytes on every file system.
            return sum(status.st_blocks * 512 for status in files.files().values())

    def opened_by(self) -> str:
        """Check that a store is this user's, and no copy made by hand: the record of a copy names the original.

        Returns "": the store's lock says who uses it (see `Folder.opened_by`).

        Raises:
            CheckpointError: The store is another user's, or its record names another store.
        """
        # Root may use any store. On some mounts all files have one owner, also those that this process makes.
        owner = os.stat(self._root, follow_symlinks=False).st_uid
        if os.geteuid() not in (0, owner) and owner != _owner_of_new_files(self._root.parent):
            raise CheckpointError(f"it belongs to the user with number {owner}")
        try:
            record = read_json(self._root / RECORD_NAME, _RECORD_BYTES)
            name = f"offload-{record['uuid']}"
        except FileNotFoundError:
            return ""  # its session was killed while it made or deleted the store
        except (ValueError, TypeError, KeyError):
            name = ""  # no record of ours, which is refused below
        if name != self._root.name:
            raise CheckpointError(f"{self._root / RECORD_NAME} is not the record of this store")
        return ""

    def used_by(self) -> int | None:
        return lock_holder(self._root)

    def is_read(self, *, own: int = 0) -> bool:
        return is_being_read(self._root, own=own)

    def acquire_lock(self) -> LockFile | None:
        try:
            return hold_lock(self._root / LOCK_NAME, existing=True)
        except OSError:
            return None

    def remove(self) -> None:
        with StoreDirectory(self._root) as files:
            names = list(files.files())
            # The lock is deleted last: `remove_empty` deletes a store without one only if it is empty.
            files.delete([*(name for name in names if name.startswith(TEMPORARY)), *STORE_FILES])
            files.remove()

    def remove_tree(self) -> None:
        with raising_checkpoint_error("delete", f"{self.label}/"), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.label)  # not `path`, which a link has been resolved in: this refuses a link
            sync_directory(self._root.parent)

    def remove_empty(self) -> bool:
        """See `Folder.remove_empty`; the system refuses to remove a directory that is not empty."""
        with contextlib.suppress(OSError):
            self._root.rmdir()
            return True
        return False


DEPTH = 4
"""Reads of another session's store that are in flight at a time."""


class ExistingStore(FileTier):
    """Slots of another session's store, for reading; nothing is made, changed or deleted.

    While it is open, if the file system has locks, a shared lock on the store's `lock` file says that it is read, so
    that no session frees slots that checkpoints name. Arguments are those of `FileTier`.

    Raises:
        TierError: There is no such store, or it cannot be read.
    """

    cached = False

    def __init__(self, path: str, store: uuid.UUID, queue: CompletionQueue) -> None:
        Owned.__init__(self, path)  # not `FileTier.__init__`, which makes a store
        self.depth = DEPTH
        with self.raising_tier_error("open"), contextlib.ExitStack() as undo:
            self._directory = _ReadLockedStore(Path(os.path.abspath(path)) / f"offload-{store}")
            undo.callback(self._directory.close)
            self.store_path, self.data_path = self._directory.directory, self._directory.data_path
            descriptor, self.direct = _open_data(self.data_path)
            self._file = StoreFile(descriptor, self.direct, store.bytes)
            self._io = IoThreads(queue, DEPTH, DEFAULT_PIECE_BYTES)
            undo.pop_all()

    def write(self, request: TileRequest) -> None:
        """Raise: another session's store is never written to."""
        invariant(False, "a store of another session is written to")

    def free_bytes(self) -> int:
        """Return 0: nothing can be written here."""
        return 0


class _ReadLockedStore(Store):
    """The directory of another session's store, under a shared lock until `close`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data_path = directory / DATA_NAME
        self._lock: LockFile | None = None  # None if there is no lock file, or the file system has no locks
        with contextlib.suppress(FileNotFoundError):  # a copy where nobody may write has no lock file
            try:
                self._lock = share_lock(directory / LOCK_NAME)
            except OSError as cause:
                if cause.errno not in NO_LOCK_ERRNOS:
                    raise

    def close(self, *, keep: bool = True) -> None:
        """Give the shared lock up; the store is kept, whatever `keep` says."""
        if self._lock is not None:
            unshare_lock(self._lock)
            self._lock = None


def _open_data(path: Path) -> tuple[int, bool]:
    """Open a file for reading, with O_DIRECT if possible; return the descriptor, and whether it has O_DIRECT.

    If anything goes wrong with O_DIRECT, the file is opened without; an error of that second attempt is raised.
    """
    with contextlib.suppress(OSError):
        descriptor = open_regular(path, os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, SECTOR_BYTES) as page:
            try:
                os.preadv(descriptor, [page], 0)  # some file systems refuse the flag at the first transfer only
                return descriptor, True
            except OSError:
                os.close(descriptor)
    return open_regular(path), False
