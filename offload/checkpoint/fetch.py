"""Brings a framework's folder back from a mirror, to a machine that may have nothing else."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from offload.checkpoint.contents import is_checkpoint, read_commit, some_of
from offload.checkpoint.folder import FolderLock, open_folder
from offload.checkpoint.manifest import COMMIT_NAME, OWN
from offload.checkpoint.marker import BEGUN, DAMAGED, WHOLE, Mark, Marker, is_inside, mark_begun, mark_in, mark_whole
from offload.checkpoint.mirror import RankPart, RankPartCopy
from offload.checkpoint.reader import Checkpoint
from offload.checkpoint.request import SaveRequest
from offload.checkpoint.whole import BESIDE, find_changed
from offload.errors import CheckpointError
from offload.tiers.common import filling
from offload.tiers.place import TEMPORARY, raising_checkpoint_error


def find_whole(mirror: str) -> list[str]:
    """Return the names of the folders that are whole in a mirror, in the order in which they became whole in the run.

    Raises:
        CheckpointError: The mirror cannot be read.
    """
    names = {name for name, _ in open_folder(mirror).walk()}
    folders = [name.rpartition("/")[0] for name in names if name.endswith(f"/{WHOLE}")]
    whole_s_by_folder = dict[str, float]()
    for name in folders:
        with contextlib.suppress(CheckpointError):  # a marker that nobody could have written
            mark, marker = mark_in(open_folder(f"{mirror}/{name}"))
            if mark is Mark.WHOLE and marker is not DAMAGED:
                whole_s_by_folder[name] = marker.whole_s
    return sorted(whole_s_by_folder, key=lambda name: (whole_s_by_folder[name], name))


def fetch(mirror: str, name: str, above: str, show: Callable[[int, int], object] = lambda done, total: None) -> None:
    """Copy a folder from a mirror to a run's folder, so that it is there as the framework had written it.

    Args:
        mirror: Directory, or "s3://bucket/prefix".
        name: Name of the folder in the mirror.
        above: The run's folder, a directory, made if it does not exist.
        show: Called with the bytes copied so far, and all bytes.

    Raises:
        CheckpointError: The folder is not whole in the mirror, or a local file would be replaced, or cannot be
            written. What was copied by then is marked as not whole; calling this again continues the copy.
    """
    name = os.path.normpath(name)
    if os.path.isabs(name) or ".." in name.split("/"):
        raise CheckpointError(f"{name} is not in {mirror}: give the name of a folder there")
    source, run = open_folder(f"{mirror}/{name}"), open_folder(above)
    mark, marker = mark_in(source)
    if mark is Mark.NONE and not source.walk():
        raise CheckpointError(f"{name} is not in {mirror}: whole there are {some_of(find_whole(mirror))}")
    if mark is not Mark.WHOLE:
        raise CheckpointError(f"{source.path} is not whole: it says {mark.value}")
    if changed := find_changed(source, marker):
        raise CheckpointError(f"{source.path} is not whole: {some_of(changed)}")
    run.prepare()
    lock = FolderLock(run)
    if not lock.acquire():
        raise CheckpointError(f"another process brings something to {above}: wait, or name another folder")
    try:
        _copy_folder(mirror, name, above, marker, show)
        if mark_in(source) != (mark, marker):
            raise CheckpointError(f"{source.path} was changed while it was copied: delete what is in {above} of it")
        mark_whole(os.path.join(above, name))
    finally:
        lock.release()


def _check_free(folder: str, paths: Iterable[str], *, may_have_files: bool) -> None:
    """Raise `CheckpointError` if one of the paths exists or, unless `may_have_files`, if the folder is not empty."""
    existing = [path for path in paths if os.path.lexists(path)]
    if not (existing or may_have_files) and os.path.isdir(folder) and os.listdir(folder):
        existing = [folder]
    if existing:
        raise CheckpointError(f"{existing[0]} is there already: name another folder, or delete it")


def _copy_folder(mirror: str, name: str, above: str, marker: Marker, show: Callable[[int, int], object]) -> None:
    """Copy a whole folder: first the engine's checkpoints in it, then its other files, then files beside it.

    `fetch` has checked the source, and marks the result as whole. Arguments are those of `fetch`; `marker` is the
    source's.
    """
    source, target = open_folder(f"{mirror}/{name}"), os.path.join(above, name)
    sizes = {file: nbytes for file, nbytes in source.walk() if file not in (BEGUN, WHOLE)}
    # `file` is a file's name in the mirror's folder; `targets` has its name in the run's folder, `paths` the path.
    targets = {file: file.removeprefix(f"{BESIDE}/") if _is_beside(file) else f"{name}/{file}" for file in sizes}
    paths = {file: os.path.join(above, in_run) for file, in_run in targets.items()}
    mark, begun = mark_in(open_folder(target))
    # Whether an earlier call has begun to copy this very folder: `mark_begun` below has noted the source's `whole_s`.
    goes_on = mark is Mark.BEGUN and begun.whole_s == marker.whole_s > 0
    copied = {file for file in sizes if goes_on and _is_as_noted(paths[file], marker.files.get(targets[file]))}
    # All files in the folder are that call's, which found the folder free. Beside it there may be somebody else's.
    replaceable = {file for file in sizes if goes_on and (file in copied or not _is_beside(file))}
    _check_free(target, [path for file, path in paths.items() if file not in replaceable], may_have_files=goes_on)
    if not all(map(is_inside, targets.values())):
        raise CheckpointError(f"{source.path} has a file that would lie elsewhere: no mirror has made it")
    # Where the engine's checkpoints are in the folder: "" for the folder itself, else a name that ends with "/".
    with_commit = [file.removesuffix(COMMIT_NAME) for file in sizes if os.path.basename(file) == COMMIT_NAME]
    prefixes = [prefix for prefix in with_commit if is_checkpoint(f"{mirror}/{name}/{prefix}")]
    total_bytes, done_bytes = sum(sizes.values()), 0
    mark_begun(target, marker)
    for prefix in prefixes:
        checkpoint = f"{name}/{prefix}".rstrip("/")
        _fetch_checkpoint(f"{mirror}/{checkpoint}", os.path.join(above, checkpoint))
        done_bytes += sum(nbytes for file, nbytes in sizes.items() if _belongs_to_checkpoint(prefix, file))
        show(done_bytes, total_bytes)
    for file in sorted(sizes, key=_is_beside):  # those beside it last, as they were written
        if any(_belongs_to_checkpoint(prefix, file) for prefix in prefixes):
            continue
        if file not in copied:
            fetch_file(f"{source.path}/{file}", paths[file], sizes[file], marker.files.get(targets[file]))
        done_bytes += sizes[file]
        show(done_bytes, total_bytes)


def _is_as_noted(path: str, noted: tuple[int, int] | None) -> bool:
    """Return whether a file has the size and time of change that a marker has noted; False if nothing is noted."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == noted


def _belongs_to_checkpoint(prefix: str, file: str) -> bool:
    """Return whether a file is one that the engine has written for its checkpoint in the folder `prefix`.

    The prefix is "" or ends with "/". A framework may have files of its own in the same folder.
    """
    return file.startswith(prefix) and OWN.fullmatch(file.removeprefix(prefix)) is not None


def _is_beside(file: str) -> bool:
    """Return whether a file in a mirror's folder copies one that lies beside the folder in the run's folder."""
    return file.startswith(f"{BESIDE}/")


def fetch_file(source: str, target: str, nbytes: int, noted: tuple[int, int] | None) -> None:
    """Copy a file of `nbytes` from a mirror, under a temporary name until all of it is durable.

    `noted` is the file's size and time of change (in ns) in the marker; None if the marker does not list the file.
    The copy gets that time: by it a later call, and the mirror, know that the file need not be copied again.
    """
    folder, _, last = source.rpartition("/")
    with raising_checkpoint_error("write", target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        temporary = os.path.join(os.path.dirname(target), f"{TEMPORARY}{uuid.uuid4().hex}")
        with open(temporary, "w+b") as file:
            with filling(file.fileno(), nbytes) as whole:
                open_folder(folder).read_into(last, [whole])
            if noted is not None:
                _, changed_ns = noted
                os.utime(file.fileno(), ns=(changed_ns, changed_ns))
            os.fsync(file.fileno())
        os.rename(temporary, target)


def _fetch_checkpoint(source: str, target: str) -> None:
    """Copy a checkpoint of the engine: every rank's part, one after the other, in this process.

    Each part is copied as a rank copies its own to a mirror, and continues what an earlier call has copied of it. The
    parts are committed together at the end, as the commit of each waits for the others'.
    """
    if is_checkpoint(target):  # an earlier call has committed it
        return
    commit = read_commit(open_folder(source))
    with ExitStack() as ends:
        copies = []
        for rank in range(commit.ranks):  # 0 first: its progress file tells the others that the copy has begun
            request = SaveRequest(target, copy=True, id=commit.id, rank=rank, ranks=commit.ranks)
            opened = ends.enter_context(Checkpoint(source, part=(commit.id, rank, commit.ranks)))
            # `is_new` matters only to ranks that wait for rank 0, and none does here.
            copy = RankPartCopy(RankPart(request, source, is_new=True), opened, "auto")
            copies.append(copy)
            copy.part.folder.prepare()
            copy.begin()
            ends.callback(copy.close)
            for _ in copy.copy():  # copies a batch each time
                pass
        _commit_all(copies)


def _commit_all(copies: Sequence[RankPartCopy]) -> None:
    """Commit the parts of all ranks, each on a thread of its own: a rank's commit waits for the others'."""

    def commit(copy: RankPartCopy) -> None:
        """Commit one part; if that fails, note it, so that the other ranks' threads stop waiting."""
        never_set = threading.Event()
        try:
            copy.commit(copy.source.extra(0), never_set)  # of the one manifest that is open
        except BaseException:
            copy.part.note_failure()
            raise

    with ThreadPoolExecutor(len(copies)) as pool:
        for future in [pool.submit(commit, copy) for copy in copies]:
            future.result()
