"""A framework's folder as a mirror copies it: whole, with the checkpoint of ours in it, while training goes on.

Files are opened when the save has ended, so that neither the framework, which deletes old folders, nor the copy
waits for the other. In the mirror a folder is marked as it is in the run's (`marker`); while it is copied the marker
has the files that are durable there, by size and time of change, so that whoever goes on after a crash copies the
others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from offload.checkpoint.contents import is_checkpoint
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import COMMIT_NAME, OWN
from offload.checkpoint.marker import BEGUN, WHOLE, Mark, Marker, mark_in
from offload.errors import CheckpointError
from offload.processes import Process
from offload.tiers.common import FileBytes
from offload.tiers.place import TEMPORARY, Folder

MOST_OPEN = 256
"""Files that are open at a time; of a folder with more, those beyond are opened when their turn comes.

No more than an eighth of what the process may have open: two folders' are, and training goes on beside them.
"""

NOTE_BYTES = 64 << 20
"""Bytes after which what has been copied is noted, though few files have been."""

BESIDE = "offload-beside"
"""In a mirror, what a folder has the files beside it in, so that one that is not whole replaces none of others."""

UNFINISHED = ".offload-"
"""How the names of folders begin in which what is not finished lies."""


@dataclass(frozen=True)
class WholeFolder:
    """A folder that a framework has written.

    Names are relative to the run's folder, as they are in the mirror to that, but for those beside it.

    Attributes:
        above: The run's folder.
        name: Of the folder, in which the marker lies.
        checkpoint: Of the folder with a checkpoint of ours, which is copied as such; "" for none.
        belongs: What its marker says of files beside it: those are copied last, in their order, and shared ones, as
            they are when they are opened, behind them.
    """

    above: str
    name: str
    checkpoint: str = ""
    belongs: Marker = field(default_factory=Marker)

    @classmethod
    def at(cls, folder: str) -> WholeFolder:
        """Return the one that lies in a directory.

        Raises:
            CheckpointError: It has checkpoints of several optimizers, or its marker cannot be read.
        """
        folder = os.path.abspath(folder)
        places = [place for place, _, names in os.walk(folder) if COMMIT_NAME in names and is_checkpoint(place)]
        if len(places) > 1:
            found = ", ".join(sorted(os.path.relpath(place, folder) for place in places))
            raise CheckpointError(f"it has checkpoints of several optimizers, {found}")
        belongs = mark_in(open_folder(folder))[1]
        above = folder
        for _ in range(belongs.depth):
            above = os.path.dirname(above)
        name, *inside = (os.path.relpath(place, above) for place in (folder, *places))
        return cls(above, name, "".join(inside), belongs)

    def source(self, name: str = "") -> str:
        """Return where something lies; the folder itself if nothing is named."""
        return os.path.join(self.above, name or self.name)

    def files(self) -> list[str]:
        """Return the names of all its files, sorted, those that the checkpoint is made of not among them.

        Raises:
            OSError: Some of it cannot be read.
        """
        found = []
        for above, names, files in os.walk(self.source(), onerror=_unless_gone):
            inside = os.path.relpath(above, self.above)
            names[:] = [name for name in names if not name.startswith(UNFINISHED)]
            if inside == self.checkpoint:
                names[:], files = ([name for name in each if not OWN.fullmatch(name)] for each in (names, files))
            found += [f"{inside}/{name}" for name in files if not name.startswith(TEMPORARY)]
        own = sorted(set(found) - {f"{self.name}/{mark}" for mark in (BEGUN, WHOLE)})
        return [*own, *self.belongs.beside, *self.belongs.shared]


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # somebody's temporary one
        raise error


@dataclass(slots=True)
class _File:
    """A file to copy.

    Attributes:
        path: Where it lies.
        descriptor: Of it; -1 while it is not open.
        state: Size in bytes, and time of the last change in ns.
        content: What was in it then, where others write over it.
    """

    path: str
    descriptor: int = -1
    state: tuple[int, int] = (0, 0)
    content: bytes | None = None

    def open(self) -> bool:
        """Open it, unless it has been read; return whether it is something that can be copied."""
        if self.content is not None:
            return True
        try:
            self.descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket
                return False
            raise
        self.state = self._state()
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            self.close()
        return self.descriptor >= 0

    def write_to(self, folder: Folder) -> None:
        """Copy it; it is durable when this returns, as it was when it was opened."""
        content = FileBytes(self.descriptor, self.state[0]) if self.content is None else self.content
        folder.write(os.path.basename(self.path), content)
        if self.content is None and self._state() != self.state:
            raise CheckpointError(f"{self.path} was changed while it was copied")

    def read(self) -> None:
        """Read it, so that it is copied as it is now."""
        with open(self.path, "rb") as file:
            self.content = file.read()
            self.state = len(self.content), os.fstat(file.fileno()).st_mtime_ns

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self.descriptor)
        return found.st_size, found.st_mtime_ns


class FolderCopy:
    """The work on one folder's files: `begin`, every file of `copy`, `commit`; then `close`.

    Args:
        whole: The folder; its files are opened.
        mirror: Directory or prefix of a bucket that has the run's folder.

    Raises:
        OSError: A file cannot be opened.
    """

    def __init__(self, whole: WholeFolder, mirror: str) -> None:
        self.whole = whole
        self.target = f"{mirror}/{whole.name}"
        self.mirror = mirror
        self._copied: dict[str, tuple[int, int]] = {}
        self.files: dict[str, _File] = {}
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most_open = MOST_OPEN if limit == resource.RLIM_INFINITY else min(MOST_OPEN, limit // 8)
        try:
            for name in whole.files():
                file = _File(whole.source(name))
                with contextlib.suppress(FileNotFoundError):  # somebody's temporary one
                    if name in whole.belongs.shared:
                        file.read()
                    if len(self.files) >= most_open or file.open():
                        self.files[name] = file
        except BaseException:
            self.close()
            raise

    def begin(self) -> bool:
        """Find out what is there already, and mark the folder there as one that is not whole; False if it is."""
        folder = open_folder(self.target)
        mark, marker = mark_in(folder)
        known = {name: state for name, state in marker.files.items() if self._is_same(name, state)}
        if mark is Mark.WHOLE and known.keys() == self.files.keys():
            return False
        folder.prepare()
        self._copied = known if mark is Mark.BEGUN else {}
        self._note(folder, BEGUN)
        folder.delete(WHOLE)
        for name in marker.files.keys() - self.files.keys():  # of another folder of that name
            if name.startswith(f"{self.whole.name}/"):
                place, last = os.path.split(name)
                open_folder(f"{self.mirror}/{place}").delete(last)
        return True

    def _is_same(self, name: str, state: tuple[int, int]) -> bool:
        file = self.files.get(name)
        if file is not None and file.content is not None:
            return True
        if file is not None and file.descriptor < 0:
            with contextlib.suppress(OSError):
                found = os.stat(file.path)
                return (found.st_size, found.st_mtime_ns) == state
        return file is not None and file.state == state

    def _note(self, folder: Folder, mark: str) -> None:
        process, whole_s = (Process.this(), 0.0) if mark == BEGUN else (None, time.time())
        marker = replace(self.whole.belongs, process=process, files=self._copied, whole_s=whole_s)
        folder.write(mark, marker.encode())

    def copy(self) -> Iterator[int]:
        """Copy the files that are missing; yield the bytes of each once it is durable."""
        marked, folders = open_folder(self.target), dict[str, Folder]()
        lies_beside = {*self.whole.belongs.beside, *self.whole.belongs.shared}
        noted = nbytes = 0
        for name, file in self.files.items():
            if name in self._copied or (file.descriptor < 0 and not file.open()):
                continue
            inside = os.path.dirname(f"{self.whole.name}/{BESIDE}/{name}" if name in lies_beside else name)
            place = f"{self.mirror}/{inside}"
            if place not in folders:
                folders[place] = open_folder(place)
                folders[place].prepare()
            file.write_to(folders[place])
            file.close()
            self._copied[name] = file.state
            nbytes += file.state[0]
            if len(self._copied) > noted + noted // 16 or nbytes > NOTE_BYTES:  # not all of many names for each
                self._note(marked, BEGUN)
                noted, nbytes = len(self._copied), 0
            yield file.state[0]

    def commit(self) -> None:
        """Mark the folder there as whole."""
        folder = open_folder(self.target)
        self._note(folder, WHOLE)
        folder.delete(BEGUN)

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in self.files.values():
            file.close()


def delete_copy(whole: WholeFolder, mirror: str, unless: Mark = Mark.NONE) -> None:
    """Delete from a mirror a folder of no use, unless no mirror has made it, or it is marked so.

    Raises:
        OffloadError: Something could not be deleted.
    """
    folder = open_folder(f"{mirror}/{whole.name}")
    if mark_in(folder)[0] not in (Mark.NONE, unless):
        folder.write(BEGUN, Marker(Process.this()).encode())
        folder.remove_tree()


class Seen:
    """What runs' folders have held, to find out what has gone from them while this session looked."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, int, int], set[str]] = {}

    def note(self, whole: WholeFolder) -> None:
        """Take note of what is in the run's folder of one."""
        with contextlib.suppress(OSError):
            noted, there = self._looked(whole.above)
            noted |= there

    def gone(self, whole: WholeFolder) -> list[WholeFolder]:
        """Return the folders beside one, which is whole, that have gone since they were noted; each once.

        None where the run's folder cannot be read, or is another one than was noted: it was moved, say, or nothing is
        mounted there any more.
        """
        own, slash, rest = whole.name.partition("/")
        try:
            noted, there = self._looked(whole.above)
        except OSError:
            return []
        found = noted - there - {own}
        noted -= found
        return [WholeFolder(whole.above, name + slash + rest) for name in sorted(found)]

    def _looked(self, above: str) -> tuple[set[str], set[str]]:
        """Return the names that were noted of a run's folder, and those that are there now."""
        found = os.stat(above)
        return self._names.setdefault((above, found.st_dev, found.st_ino), set()), {*os.listdir(above)}
