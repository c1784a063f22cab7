"""A framework's folder as a mirror copies it: whole, with the engine's checkpoint in it, while training goes on.

Files are opened when the save has ended, so that neither the framework, which deletes old folders, nor the copy
waits for the other. In the mirror a folder is marked as it is in the run's (`marker`); while it is copied the marker
lists the files that are durable there, by size and time of change, so that after a crash only the others are copied.
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
from offload.checkpoint.marker import BEGUN, DAMAGED, WHOLE, Mark, Marker, mark_in
from offload.errors import CheckpointError
from offload.processes import Process
from offload.tiers.common import FileBytes
from offload.tiers.place import MAX_RECORD_BYTES, TEMPORARY, Folder

MOST_OPEN = 256
"""Most files of a folder that are open at a time; further ones are opened when their turn comes.

Also no more than an eighth of what the process may open: two folders may be open, and training needs files, too.
"""

NOTE_BYTES = 64 << 20
"""Bytes after which the marker is written again, even if few files have been copied since."""

BESIDE = "offload-beside"
"""Subfolder of a mirror's folder for copies of files that lie beside the folder in the run's.

Each folder has its own copies, so that an incomplete one overwrites none that a whole folder needs.
"""

UNFINISHED = ".offload-"
"""Prefix of the names of folders with unfinished files, which are not copied."""


@dataclass(frozen=True)
class WholeFolder:
    """A folder that a framework has written.

    Names are relative to the run's folder, and the same relative to the mirror, except those of files beside it.

    Attributes:
        above: The run's folder: that which the framework writes all folders of one training run to.
        name: Name of the folder, in which the marker lies.
        checkpoint: Name of the folder with the engine's checkpoint, which is copied as such; "" for none.
        belongs: What the marker says of files beside the folder: they are copied last, in their order, then the
            shared ones, with the content that they have when this is opened.
    """

    above: str
    name: str
    checkpoint: str = ""
    belongs: Marker = field(default_factory=Marker)

    @classmethod
    def at(cls, folder: str) -> WholeFolder:
        """Return the folder at a directory, with what its marker says and the checkpoint that is found in it.

        Raises:
            CheckpointError: The folder has checkpoints of several optimizers, or its marker cannot be read.
        """
        folder = os.path.abspath(folder)
        with_commit = (directory for directory, _, names in os.walk(folder) if COMMIT_NAME in names)
        checkpoints = [directory for directory in with_commit if is_checkpoint(directory)]
        if len(checkpoints) > 1:
            listed = ", ".join(sorted(os.path.relpath(directory, folder) for directory in checkpoints))
            raise CheckpointError(f"it has checkpoints of several optimizers, {listed}")
        belongs = mark_in(open_folder(folder))[1]
        if belongs is DAMAGED:
            raise CheckpointError("its marker is damaged")
        above = folder
        for _ in range(belongs.depth):
            above = os.path.dirname(above)
        name, *inside = (os.path.relpath(directory, above) for directory in (folder, *checkpoints))
        return cls(above, name, "".join(inside), belongs)

    def source(self, name: str = "") -> str:
        """Return the path of a file or folder by its name; that of the folder itself if no name is given."""
        return os.path.join(self.above, name or self.name)

    def files(self) -> list[str]:
        """Return the names of the files to copy, sorted, then those of files that lie beside the folder.

        Not among them: the engine's checkpoint, which is copied as such, unfinished and temporary files, and markers.

        Raises:
            OSError: A directory cannot be read.
        """
        paths = []
        for above, names, files in os.walk(self.source(), onerror=_unless_gone):
            inside = os.path.relpath(above, self.above)
            names[:] = [name for name in names if not name.startswith(UNFINISHED)]
            if inside == self.checkpoint:
                names[:], files = ([name for name in listed if not OWN.fullmatch(name)] for listed in (names, files))
            paths += [f"{inside}/{name}" for name in files if not name.startswith(TEMPORARY)]
        without_markers = sorted(path for path in paths if os.path.basename(path) not in (BEGUN, WHOLE))
        return [*without_markers, *self.belongs.beside, *self.belongs.shared]


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # somebody's temporary one
        raise error


@dataclass(slots=True)
class _File:
    """A file to copy.

    Attributes:
        path: Its path.
        descriptor: -1 while the file is not open.
        state: Size in bytes, and time of the last change in ns.
        content: What was in it when it was read; None for a file that is copied through its descriptor.
    """

    path: str
    descriptor: int = -1
    state: tuple[int, int] = (0, 0)
    content: bytes | None = None

    def open(self) -> bool:
        """Open the file, unless it has been read; return whether it can be copied, which only regular files can."""
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
        """Copy the file's content of when it was opened or read; it is durable when this returns."""
        content = FileBytes(self.descriptor, self.state[0]) if self.content is None else self.content
        folder.write(os.path.basename(self.path), content)
        if self.content is None and self._state() != self.state:
            raise CheckpointError(f"{self.path} was changed while it was copied")

    def read(self) -> None:
        """Read the file now, if it can be copied: another save may write over it before it is copied."""
        if self.open():
            with open(self.descriptor, "rb", closefd=False) as file:
                self.content = file.read()
            self.state = len(self.content), self.state[1]
            self.close()

    def open_as_it_was(self) -> bool:
        """Open a file whose state was noted earlier; see `open`.

        Raises:
            CheckpointError: It has been changed since.
        """
        noted = self.state
        is_open = self.open()
        if self.content is None and self.state != noted:
            raise CheckpointError(f"{self.path} was changed before it was copied")
        return is_open

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def _state(self) -> tuple[int, int]:
        return _state_of(os.fstat(self.descriptor))


def _state_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


class FolderCopy:
    """The work on one folder's files: `begin`, every file of `copy`, `commit`; then `close`.

    Args:
        whole: The folder; its files are opened.
        mirror: Directory or prefix of a bucket that has the run's folder.
        is_new: Whether the folder has just been saved. Else a folder that is whole in the mirror stays as it is.

    Raises:
        OSError: A file cannot be opened.
    """

    def __init__(self, whole: WholeFolder, mirror: str, *, is_new: bool = True) -> None:
        self.whole = whole
        self._is_new = is_new
        self.target = f"{mirror}/{whole.name}"
        self.mirror = mirror
        self._copied: dict[str, tuple[int, int]] = {}
        self.files: dict[str, _File] = {}
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most_open = MOST_OPEN if limit == resource.RLIM_INFINITY else min(MOST_OPEN, limit // 8)
        try:
            for name in whole.files():
                file = _File(whole.source(name))
                may_lack = name not in whole.belongs.beside  # as a temporary one, or a shared one
                with contextlib.suppress(*[FileNotFoundError] * may_lack):
                    if name in whole.belongs.shared:
                        file.read()
                    if len(self.files) >= most_open:
                        file.state = _state_of(os.stat(file.path))
                    if len(self.files) >= most_open or file.open():
                        self.files[name] = file
        except BaseException:
            self.close()
            raise

    def begin(self) -> bool:
        """Mark the mirror's folder as not whole, noting what an earlier copy has left; False if it is to stay whole.

        Raises:
            CheckpointError: Another process is copying to it.
        """
        folder = open_folder(self.target)
        mark, marker = mark_in(folder)
        known = {name: state for name, state in marker.files.items() if self._is_unchanged(name, state)}
        if mark is Mark.WHOLE:
            is_same_save = self.whole.belongs.whole_s in (0.0, marker.whole_s)
            if not self._is_new or (is_same_save and known.keys() == self.files.keys()):
                return False
        this, other = Process.this(), marker.process
        if this and other and other != this and other.machine == this.machine and not other.has_ended():
            raise CheckpointError(f"process {other.pid} is copying it")
        folder.prepare()
        self._copied = known if mark is Mark.BEGUN else {}
        self._note(folder, BEGUN)
        folder.delete(WHOLE)
        for name in marker.files.keys() - self.files.keys():  # of another folder of that name
            if name.startswith(f"{self.whole.name}/"):
                directory, last = os.path.split(name)
                open_folder(f"{self.mirror}/{directory}").delete(last)
        return True

    def _is_unchanged(self, name: str, state: tuple[int, int]) -> bool:
        """Return whether the mirror's copy of a file, noted with `state`, is of the file as this was made with it."""
        file = self.files.get(name)
        return file is not None and (file.content is not None or file.state == state)

    def _note(self, folder: Folder, mark: str) -> None:
        """Write the mirror's marker, BEGUN or WHOLE, with the files that are durable there."""
        belongs = self.whole.belongs
        process, whole_s = (Process.this(), 0.0) if mark == BEGUN else (None, belongs.whole_s or time.time())
        marker = replace(belongs, process=process, files=self._copied, whole_s=whole_s)
        content = marker.encode()
        if len(content) > MAX_RECORD_BYTES:  # nobody could read it: whoever goes on copies all again
            content = replace(marker, files={}).encode()
        folder.write(mark, content)

    def copy(self) -> Iterator[int]:
        """Copy the files that are missing; yield the bytes of each once it is durable."""
        marked, folders = open_folder(self.target), dict[str, Folder]()
        lies_beside = {*self.whole.belongs.beside, *self.whole.belongs.shared}
        noted = nbytes = 0
        for name, file in self.files.items():
            if name in self._copied or (file.descriptor < 0 and not file.open_as_it_was()):
                continue
            inside = os.path.dirname(f"{self.whole.name}/{BESIDE}/{name}" if name in lies_beside else name)
            target = f"{self.mirror}/{inside}"
            if target not in folders:
                folders[target] = open_folder(target)
                folders[target].prepare()
            file.write_to(folders[target])
            file.close()
            self._copied[name] = file.state
            nbytes += file.state[0]
            # A marker lists all names, so for many small files it is written for every sixteenth of them only.
            if len(self._copied) > noted + noted // 16 or nbytes > NOTE_BYTES:
                self._note(marked, BEGUN)
                noted, nbytes = len(self._copied), 0
            yield file.state[0]

    def commit(self) -> None:
        """Mark the mirror's folder as whole."""
        folder = open_folder(self.target)
        self._note(folder, WHOLE)
        folder.delete(BEGUN)

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in self.files.values():
            file.close()


def delete_copy(whole: WholeFolder, mirror: str, *, is_unfinished: bool = False) -> None:
    """Delete a folder from a mirror, unless it has no marker, as no mirror has made it.

    Args:
        whole: The folder.
        mirror: See `FolderCopy`.
        is_unfinished: Delete it only if this process has begun to copy it, and not ended.

    Raises:
        OffloadError: Something could not be deleted.
    """
    folder = open_folder(f"{mirror}/{whole.name}")
    mark, marker = mark_in(folder)
    if mark is Mark.NONE or (is_unfinished and (mark is Mark.WHOLE or marker.process != Process.this())):
        return
    if mark is Mark.WHOLE:  # one that is not has no need of room for a marker
        folder.write(BEGUN, Marker(Process.this()).encode())
    folder.remove_tree()


class Seen:
    """Remembers which folders runs' folders contain, to find those that were deleted during this session."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, int, int], set[str]] = {}

    def note(self, whole: WholeFolder) -> None:
        """Remember the names in the run's folder that `whole` lies in."""
        with contextlib.suppress(OSError):
            noted, present = self._list(whole.above)
            noted |= present

    def deleted_siblings(self, whole: WholeFolder) -> list[WholeFolder]:
        """Return the siblings of a whole folder that were deleted since they were noted; each once.

        No folder if the run's folder cannot be read, or is another than was noted: it was moved, say, or unmounted.
        """
        own_first, slash, inside = whole.name.partition("/")
        try:
            noted, present = self._list(whole.above)
        except OSError:
            return []
        deleted = noted - present - {own_first}
        noted -= deleted
        return [WholeFolder(whole.above, name + slash + inside) for name in sorted(deleted)]

    def _list(self, above: str) -> tuple[set[str], set[str]]:
        """Return the names that were noted in a run's folder, and those that are in it now."""
        status = os.stat(above)
        return self._noted.setdefault((above, status.st_dev, status.st_ino), set()), {*os.listdir(above)}
