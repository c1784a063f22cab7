"""Brings a framework's folder back from a mirror, to a machine that may have nothing else."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from offload.checkpoint.contents import is_checkpoint, read_commit
from offload.checkpoint.folder import FolderLock, open_folder
from offload.checkpoint.manifest import COMMIT_NAME, OWN
from offload.checkpoint.marker import BEGUN, DAMAGED, WHOLE, Mark, Marker, is_inside, mark_begun, mark_in, mark_whole
from offload.checkpoint.mirror import RankPart, RankPartCopy
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.request import SaveRequest
from offload.checkpoint.whole import BESIDE
from offload.errors import CheckpointError
from offload.tiers.place import TEMPORARY, saying


def find_whole(mirror: str) -> list[str]:
    """Return the names of the folders that are whole in a mirror, in the order in which they became so.

    Raises:
        CheckpointError: The mirror cannot be read.
    """
    names = {name for name, _ in open_folder(mirror).walk()}
    folders = [name.rpartition("/")[0] for name in names if name.endswith(f"/{WHOLE}")]
    whole = dict[str, float]()
    for name in folders:
        with contextlib.suppress(CheckpointError):  # a marker that nobody could have written
            mark, marker = mark_in(open_folder(f"{mirror}/{name}"))
            if mark is Mark.WHOLE and marker is not DAMAGED:
                whole[name] = marker.whole_s
    return sorted(whole, key=lambda name: (whole[name], name))


def fetch(mirror: str, name: str, above: str, show: Callable[[int, int], object] = lambda done, total: None) -> None:
    """Copy a folder from a mirror to a run's folder, as the framework has written it.

    Args:
        mirror: Directory, or "s3://bucket/prefix".
        name: Name of the folder in the mirror.
        above: The run's folder, a directory, made if it does not exist.
        show: Called with the bytes copied so far, and all bytes.

    Raises:
        CheckpointError: The folder is not whole in the mirror, or a local file would be replaced, or cannot be
            written; what has been copied is marked as not whole.
    """
    name = os.path.normpath(name)
    if os.path.isabs(name) or ".." in name.split("/"):
        raise CheckpointError(f"{name} is not in {mirror}: give the name of a folder there")
    source, run = open_folder(f"{mirror}/{name}"), open_folder(above)
    mark, marker = mark_in(source)
    if mark is not Mark.WHOLE:
        raise CheckpointError(f"{source.path} is not whole: it says {mark.value}")
    run.prepare()
    lock = FolderLock(run)
    if not lock.acquire():
        raise CheckpointError(f"another process brings something to {above}: wait, or name another folder")
    try:
        _fetch(mirror, name, above, marker, show)
        if mark_in(source) != (mark, marker):
            raise CheckpointError(f"{source.path} was changed while it was copied: delete what is in {above} of it")
        mark_whole(os.path.join(above, name))
    finally:
        lock.release()


def _fetch(mirror: str, name: str, above: str, marker: Marker, show: Callable[[int, int], object]) -> None:
    """Copy a whole folder's checkpoints and files; `fetch` has checked the source, and marks the result as whole."""
    source, target = open_folder(f"{mirror}/{name}"), os.path.join(above, name)
    sizes = [(file, nbytes) for file, nbytes in source.walk() if file not in (BEGUN, WHOLE)]
    files = {file: file.removeprefix(f"{BESIDE}/") if _lies_beside(file) else f"{name}/{file}" for file, _ in sizes}
    existing = [os.path.join(above, file) for file in files.values() if os.path.lexists(os.path.join(above, file))]
    if existing or (os.path.isdir(target) and os.listdir(target)):
        raise CheckpointError(f"{[*existing, target][0]} is there already: name another folder, or delete it")
    if not all(map(is_inside, files.values())):
        raise CheckpointError(f"{source.path} has a file that would lie elsewhere: no mirror has made it")
    committed = [file.removesuffix(COMMIT_NAME) for file in files if os.path.basename(file) == COMMIT_NAME]
    checkpoints = [inside for inside in committed if is_checkpoint(f"{mirror}/{name}/{inside}")]
    total = sum(nbytes for _, nbytes in sizes)
    done = 0
    mark_begun(target, marker)
    for inside in checkpoints:
        checkpoint = f"{name}/{inside}".rstrip("/")
        _fetch_checkpoint(f"{mirror}/{checkpoint}", os.path.join(above, checkpoint))
        done += sum(nbytes for file, nbytes in sizes if _is_in_checkpoint(inside, file))
        show(done, total)
    sizes.sort(key=lambda item: _lies_beside(item[0]))  # those beside it last, as they were written
    for file, nbytes in sizes:
        if not any(_is_in_checkpoint(inside, file) for inside in checkpoints):
            path = os.path.join(above, files[file])
            fetch_file(f"{source.path}/{file}", path, nbytes)
            if (state := marker.files.get(files[file])) is not None:
                os.utime(path, ns=(state[1], state[1]))  # a mirror knows by this time that it has the file
            done += nbytes
            show(done, total)


def _is_in_checkpoint(checkpoint: str, file: str) -> bool:
    """Return whether a file belongs to the engine's checkpoint under a prefix, "" or one with "/" at its end."""
    return file.startswith(checkpoint) and OWN.fullmatch(file.removeprefix(checkpoint)) is not None


def _lies_beside(file: str) -> bool:
    """Return whether a file that a mirror has in a folder lies beside this folder in the run's."""
    return file.startswith(f"{BESIDE}/")


def fetch_file(source: str, target: str, nbytes: int) -> None:
    """Copy a file of `nbytes` from a mirror, under a temporary name until all of it is there."""
    folder, _, last = source.rpartition("/")
    with saying("write", target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        temporary = os.path.join(os.path.dirname(target), f"{TEMPORARY}{uuid.uuid4().hex}")
        with open(temporary, "w+b") as file:
            if nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)  # who writes to a map is not told that the disk is full
                with mmap.mmap(file.fileno(), nbytes) as content, memoryview(content) as whole:
                    open_folder(folder).read_into(last, [whole])
        os.rename(temporary, target)


def _fetch_checkpoint(source: str, target: str) -> None:
    """Copy a checkpoint of the engine as a mirror's ranks do, one after the other, in this process.

    All parts are committed together at the end, as the commit of each waits for the others'.
    """
    commit = read_commit(open_folder(source))
    requests = [
        SaveRequest(target, copy=True, id=commit.id, rank=rank, ranks=commit.ranks) for rank in range(commit.ranks)
    ]
    with ExitStack() as ends:
        copies = []
        for request in requests:  # rank 0's first: its progress file tells the others that the copy has begun
            opened = ends.enter_context(Checkpoint(source, part=(request.id, request.rank, request.ranks)))
            copies.append(copy := RankPartCopy(RankPart(request, source, is_new=True), opened, "auto"))
            copy.part.folder.prepare()
            copy.begin()
            ends.callback(copy.close)
            for _ in copy.copy():
                pass
        _commit(copies)


def _commit(copies: Sequence[RankPartCopy]) -> None:
    """Commit the parts of all ranks, each on a thread of its own: a rank's commit waits for the others'."""

    def commit(copy: RankPartCopy) -> None:
        try:
            copy.commit(copy.source.extra(0), threading.Event())
        except BaseException:
            copy.part.note_failure()
            raise

    with ThreadPoolExecutor(len(copies)) as pool:
        for ended in [pool.submit(commit, copy) for copy in copies]:
            ended.result()
