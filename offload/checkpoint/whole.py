"""A framework's folder as a mirror copies it: whole, with the engine's checkpoint in it, while training goes on.

Files are opened when the save has ended: an open file can be read after the framework, which deletes old folders, has
deleted it. So neither waits for the other. In the mirror a folder has markers as in the run (`marker`). While it is
copied, its marker lists the files that are durable there, with size and time of change. So after a crash only the
other files are copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from offload.checkpoint.contents import is_checkpoint
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import COMMIT_NAME, OWN
from offload.checkpoint.marker import BEGUN, DAMAGED, UNFINISHED, WHOLE, Mark, Marker, mark_in, now_s
from offload.errors import CheckpointError
from offload.processes import Process
from offload.tiers.common import FileBytes
from offload.tiers.place import TEMPORARY, Folder

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


@dataclass(frozen=True)
class WholeFolder:
    """A folder that a framework has written.

    Names are relative to the run's folder. In the mirror files have the same names, except those beside the folder.

    Attributes:
        above: The run's folder: the one that the framework writes all folders of one training run to.
        name: Name of the folder, in which the marker lies.
        checkpoint: Name of the folder with the engine's checkpoint, which is copied as such; "" for none.
        belongs: What the marker says of files beside the folder. They are copied last, in their order, then the
            shared files, with the content that they have when the copy begins.
    """

    above: str
    name: str
    checkpoint: str = ""
    belongs: Marker = field(default_factory=Marker)

    @classmethod
    def at(cls, folder: str) -> WholeFolder:
        """Return the `WholeFolder` of a directory, by what its marker says, and with the checkpoint found in it.

        Raises:
            CheckpointError: The folder has checkpoints of several optimizers, or its marker cannot be read.
        """
        folder = os.path.abspath(folder)
        with_commit = (directory for directory, _, names in os.walk(folder) if COMMIT_NAME in names)
        checkpoints = [directory for directory in with_commit if is_checkpoint(directory)]
        if len(checkpoints) > 1:
            listed = ", ".join(sorted(os.path.relpath(directory, folder) for directory in checkpoints))
            raise CheckpointError(f"it has checkpoints of several optimizers, {listed}")
        _, belongs = mark_in(open_folder(folder))
        if belongs is DAMAGED:
            raise CheckpointError("its marker is damaged")
        above = folder
        for _ in range(belongs.depth):  # the run's folder is that many levels above
            above = os.path.dirname(above)
        checkpoint = os.path.relpath(checkpoints[0], above) if checkpoints else ""
        return cls(above, os.path.relpath(folder, above), checkpoint, belongs)

    def source(self, name: str = "") -> str:
        """Return the path of a file or folder by its name; that of the folder itself if no name is given."""
        return os.path.join(self.above, name or self.name)

    def files(self) -> list[str]:
        """Return the names of the files to copy: sorted those in the folder, then those that lie beside it.

        Left out are the engine's checkpoint, which is copied as such, unfinished and temporary files, and markers.

        Raises:
            OSError: A directory cannot be read.
        """
        paths = []
        for directory, folders, files in os.walk(self.source(), onerror=_raise_unless_gone):
            name = os.path.relpath(directory, self.above)
            is_checkpoint_folder = name == self.checkpoint
            # In place: the walk does not enter folders that are removed from the list.
            folders[:] = [
                folder
                for folder in folders
                if not (folder.startswith(UNFINISHED) or (is_checkpoint_folder and OWN.fullmatch(folder)))
            ]
            for file in files:
                is_own = is_checkpoint_folder and OWN.fullmatch(file)
                if not (is_own or file.startswith(TEMPORARY) or file in (BEGUN, WHOLE)):
                    paths.append(f"{name}/{file}")
        return [*sorted(paths), *self.belongs.beside, *self.belongs.shared]


def _raise_unless_gone(error: OSError) -> None:
    """Raise an error of `os.walk`, unless the directory has gone: it was somebody's temporary one."""
    if not isinstance(error, FileNotFoundError):
        raise error


@dataclass(slots=True)
class _File:
    """A file to copy. It is open, has been read (`content`), or is to be opened when its turn comes.

    Attributes:
        path: Its path.
        descriptor: -1 while the file is not open.
        state: Size in bytes, and time of the last change in ns, as noted when the file was opened or, if that is to
            come, when it was listed.
        content: What was in it when it was read; None for a file that is copied through its descriptor.
    """

    path: str
    descriptor: int = -1
    state: tuple[int, int] = (0, 0)
    content: bytes | None = None

    def open(self) -> bool:
        """Open the file, unless it has been read; return whether it can be copied, as only regular files can."""
        if self.content is not None:
            return True
        try:
            # O_NONBLOCK: without it, opening a named pipe would wait for a writer.
            self.descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket
                return False
            raise
        self.state = self._state()
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            self.close()  # which sets `descriptor` to -1
        return self.descriptor >= 0

    def write_to(self, folder: Folder) -> None:
        """Copy the content that the file had when it was opened or read; the copy is durable when this returns.

        Raises:
            CheckpointError: The file was changed while it was copied, or the copy cannot be written.
        """
        nbytes, _ = self.state
        content = FileBytes(self.descriptor, nbytes) if self.content is None else self.content
        folder.write(os.path.basename(self.path), content)
        if self.content is None and self._state() != self.state:
            raise CheckpointError(f"{self.path} was changed while it was copied")

    def read(self) -> None:
        """Read the file's content now, if it can be copied, and close it: the next save may overwrite the file."""
        if self.open():
            with open(self.descriptor, "rb", closefd=False) as file:
                self.content = file.read()
            _, changed_ns = self.state
            self.state = len(self.content), changed_ns
            self.close()

    def open_as_it_was(self) -> bool:
        """Open a file whose state was noted earlier; return whether it can be copied.

        Raises:
            CheckpointError: It has been changed since.
        """
        noted = self.state
        is_open = self.open()
        if self.content is None and self.state != noted:
            raise CheckpointError(f"{self.path} was changed before it was copied")
        return is_open

    def close(self) -> None:
        """Close the file; idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def _state(self) -> tuple[int, int]:
        """Return the open file's `state` as it is now."""
        return _state_of(os.fstat(self.descriptor))


def _state_of(status: os.stat_result) -> tuple[int, int]:
    """Return size, and time of the last change, which tell whether a file has been changed."""
    return status.st_size, status.st_mtime_ns


class FolderCopy:
    """The copying of one folder's files to a mirror: call `begin`, exhaust `copy`, call `commit`; at the end `close`.

    Args:
        whole: The folder; its files are opened.
        mirror: The mirror's directory or prefix, in which the copies have the names of the run's folder.
        is_new: Whether the folder has just been saved. Else a folder that is whole in the mirror stays as it is.

    Raises:
        OSError: A file cannot be opened.
    """

    def __init__(self, whole: WholeFolder, mirror: str, *, is_new: bool = True) -> None:
        self.whole = whole
        self._is_new = is_new
        self.target = f"{mirror}/{whole.name}"  # the folder in the mirror
        self.mirror = mirror
        self._run = ""  # names the training, for the marker
        self._copied: dict[str, tuple[int, int]] = {}  # files that are durable there, by name: `_File.state`
        self.files: dict[str, _File] = {}  # those to copy, by name
        try:
            for name in whole.files():
                try:
                    self._open_file(name)
                except FileNotFoundError:
                    # A temporary file, or a shared one, may go at any time; one beside the folder is part of it.
                    if name in whole.belongs.beside:
                        raise
        except BaseException:
            self.close()
            raise

    def _open_file(self, name: str) -> None:
        """Add a file to `files`, if it can be copied. It stays open until `copy` has copied it, or `close`.

        A shared file is read at once; others are opened. If too many are open, only the file's state is noted, and
        `copy` opens it.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most_open = MOST_OPEN if limit == resource.RLIM_INFINITY else min(MOST_OPEN, limit // 8)
        file = _File(self.whole.source(name))
        if name in self.whole.belongs.shared:
            file.read()
        if file.content is None and len(self.files) >= most_open:
            file.state = _state_of(os.stat(file.path))  # `open_as_it_was` compares it
            self.files[name] = file
        elif file.open():
            self.files[name] = file

    def begin(self, run: str = "") -> bool:
        """Mark the mirror's folder as not whole, and find which files an interrupted copy has copied already.

        A folder that is whole in the mirror stays so if it has this very save, or if the run's folder was loaded.

        Args:
            run: Names the training that has saved the folder; "" if nobody knows.

        Returns:
            Whether there is something to copy; False if the mirror's folder stays whole.

        Raises:
            CheckpointError: Another process is copying to it, or it is whole, and of another training.
        """
        self._run = run
        folder = open_folder(self.target)
        mark, marker = mark_in(folder)
        unchanged = {name: state for name, state in marker.files.items() if self._is_unchanged(name, state)}
        if mark is Mark.WHOLE:
            # By the time at which the run's folder became whole; 0.0: its marker has none.
            is_same_save = self.whole.belongs.whole_s in (0.0, marker.whole_s)
            if not self._is_new or (is_same_save and unchanged.keys() == self.files.keys()):
                return False
            if not marker.is_of(run, self.whole.above):  # two may have folders of one name
                raise CheckpointError(
                    f"{self.target} is a folder of another run: give this run a mirror of its own, or delete it"
                )
        this = Process.this()
        copier = marker.process  # `this` is None where the kernel does not say; `copier` also if nobody copies
        # A process on another machine is taken to have ended: nobody can tell.
        is_another = this and copier and copier != this and copier.machine == this.machine
        if copier and is_another and not copier.has_ended():
            raise CheckpointError(f"process {copier.pid} is copying it")
        folder.prepare()
        self._copied = unchanged if mark is Mark.BEGUN else {}  # a whole copy may be of another save
        self._write_marker(folder, BEGUN)
        folder.delete(WHOLE)  # after that: `BEGUN` counts where both are there
        # Delete files that an earlier folder of this name had and this one has not.
        for name in marker.files.keys() - self.files.keys():
            if name.startswith(f"{self.whole.name}/"):
                directory, last = os.path.split(name)
                open_folder(f"{self.mirror}/{directory}").delete(last)
        return True

    def _is_unchanged(self, name: str, state: tuple[int, int]) -> bool:
        """Return whether the mirror's copy of a file, noted with `state`, need not be made again.

        A shared file's copy need not, whatever its state: later saves overwrite the file, and the copy is as it was.
        """
        file = self.files.get(name)
        is_shared = file is not None and file.content is not None  # shared files alone are read when they are listed
        return is_shared or (file is not None and file.state == state)

    def _write_marker(self, folder: Folder, mark: str) -> None:
        """Write the mirror's marker: what the run's marker says, with the files that are durable in the mirror.

        Args:
            folder: The folder in the mirror.
            mark: The marker's name: `BEGUN`, with this process as the copier; or `WHOLE`, with the time at which the
                run's folder became whole (the present time, if its marker has none).
        """
        belongs = self.whole.belongs
        marker = replace(
            belongs,
            process=None,
            files=self._copied,
            whole_s=belongs.whole_s or now_s(),
            run=self._run,
            source=self.whole.above,
            locked=False,
        )
        if mark == BEGUN:
            marker = replace(marker, process=Process.this(), whole_s=0.0)
        # A marker that would be too long is encoded without `files`: whoever goes on then copies all again.
        folder.write(mark, marker.encode())

    def copy(self) -> Iterator[int]:
        """Copy the files that are missing; yield the bytes of each once it is durable."""
        marked = open_folder(self.target)
        folders: dict[str, Folder] = {}
        beside = {*self.whole.belongs.beside, *self.whole.belongs.shared}
        noted_count = unnoted_bytes = 0
        for name, file in self.files.items():
            # Skipped: copied by an earlier session; or not opened so far (too many were open), and no regular file.
            if name in self._copied or (file.descriptor < 0 and not file.open_as_it_was()):
                continue
            name_in_mirror = f"{self.whole.name}/{BESIDE}/{name}" if name in beside else name
            target = f"{self.mirror}/{os.path.dirname(name_in_mirror)}"
            if target not in folders:
                folders[target] = open_folder(target)
                folders[target].prepare()
            file.write_to(folders[target])
            file.close()
            self._copied[name] = file.state
            nbytes, _ = file.state
            unnoted_bytes += nbytes
            # A marker lists all copied files, so writing it for each would cost the square of their number. It is
            # written again after a sixteenth more files, or after `NOTE_BYTES`.
            if len(self._copied) > noted_count + noted_count // 16 or unnoted_bytes > NOTE_BYTES:
                self._write_marker(marked, BEGUN)
                noted_count = len(self._copied)
                unnoted_bytes = 0
            yield nbytes

    def commit(self) -> None:
        """Mark the mirror's folder as whole."""
        folder = open_folder(self.target)
        self._write_marker(folder, WHOLE)
        folder.delete(BEGUN)

    def close(self) -> None:
        """Close the files; idempotent."""
        for file in self.files.values():
            file.close()


def find_changed(folder: Folder, marker: Marker) -> list[str]:
    """Return, in words, which files of a whole folder are missing or of another size than its marker notes.

    The folder is a run's or a mirror's. It may have been copied by other means, which were interrupted when they had
    brought the marker, but not all files. Files that are not noted do not matter.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    if not marker.files:
        return []
    sizes, beside, changed = dict(folder.walk()), {*marker.beside, *marker.shared}, []
    for name, (noted_bytes, _) in marker.files.items():
        # Its name in this folder: noted names are relative to the run's folder, which is `depth` levels above.
        here = f"{BESIDE}/{name}" if name in beside else "/".join(name.split("/")[marker.depth :])
        nbytes = sizes.get(here)
        if nbytes != noted_bytes:
            problem = "is missing" if nbytes is None else f"is of {nbytes} bytes, not of {noted_bytes}"
            changed.append(f"{folder.path}/{here} {problem}")
    return changed


def delete_copy(whole: WholeFolder, mirror: str, run: str = "", *, is_unfinished: bool = False) -> bool:
    """Delete a folder's copy from a mirror; a folder without a marker stays, as no mirror has made it.

    Args:
        whole: The folder.
        mirror: Directory or prefix of a bucket that has the copy, under the folder's name.
        run: Names the training whose copy it has to be; "" for any.
        is_unfinished: Delete the copy only if this process has begun it and it is not whole.

    Returns:
        Whether there was one to delete.

    Raises:
        OffloadError: Something could not be deleted.
    """
    folder = open_folder(f"{mirror}/{whole.name}")
    mark, marker = mark_in(folder)
    is_unfinished_here = mark is Mark.BEGUN and marker.process == Process.this()
    is_of_run = marker.is_of(run, whole.above)
    if mark is Mark.NONE or not is_of_run or (is_unfinished and not is_unfinished_here):
        return False
    if mark is Mark.WHOLE:  # an interrupted deletion must not leave the mark of a whole folder: `BEGUN` overrules it
        folder.write(BEGUN, Marker(Process.this()).encode())
    folder.remove_tree()
    return True


class Seen:
    """Remembers what each run's folder contains, to find the folders in it that are deleted during this session."""

    def __init__(self) -> None:
        self._noted: dict[tuple[str, int, int], dict[str, tuple[int, int] | None]] = {}
        """For each run's folder the names in it, as `_siblings` returns them.

        The key is the run's folder's path, device and inode: another folder that gets its path is not taken for it.
        """

    def note(self, whole: WholeFolder) -> None:
        """Remember what is in the run's folder that `whole` lies in."""
        with contextlib.suppress(OSError):
            self._noted_in(whole.above).update(_siblings(whole))

    def deleted_siblings(self, whole: WholeFolder) -> list[WholeFolder]:
        """Return the siblings of a whole folder that were deleted since they were noted; each is returned once.

        Siblings of a folder "step_5/optim" are "step_4/optim" and so on. One that was renamed is returned, under its
        old name, when it is deleted. Nothing is returned if the run's folder cannot be read, or is another than was
        noted: it was moved, say, or unmounted.
        """
        own_name, slash, inside = whole.name.partition("/")  # such as "step_5", "/" and "optim"
        checkpoint = whole.checkpoint.removeprefix(own_name)
        try:
            noted = self._noted_in(whole.above)
            present = _siblings(whole)
        except OSError:
            return []
        markers = {marker for marker in present.values() if marker is not None}
        gone = noted.keys() - present.keys() - {own_name}
        # A folder whose marker is there under another name was renamed.
        deleted = sorted(name for name in gone if noted[name] not in markers)
        for name in deleted:  # so that each is returned once
            del noted[name]
        # As this folder, with their own first names.
        return [WholeFolder(whole.above, name + slash + inside, checkpoint and name + checkpoint) for name in deleted]

    def _noted_in(self, above: str) -> dict[str, tuple[int, int] | None]:
        """Return what was noted in a run's folder; callers change it."""
        status = os.stat(above)
        return self._noted.setdefault((above, status.st_dev, status.st_ino), {})


def _siblings(whole: WholeFolder) -> dict[str, tuple[int, int] | None]:
    """Return the names in the run's folder that a whole folder lies in, each with what tells a folder under any name.

    That is inode and time of change of the folder's marker of a whole folder, which it keeps when it is renamed; None
    where there is no such marker.
    """
    _, _, inside = whole.name.partition("/")
    markers: dict[str, tuple[int, int] | None] = dict.fromkeys(os.listdir(whole.above))
    for name in markers:
        with contextlib.suppress(OSError):
            status = os.stat(os.path.join(whole.above, name, inside, WHOLE))
            markers[name] = status.st_ino, status.st_mtime_ns
    return markers
