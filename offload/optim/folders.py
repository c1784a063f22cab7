"""Folders to which a framework or a loop saves, an optimizer's checkpoint among its files.

A folder is marked as begun before anything is written to it, and as whole once all ranks have written to it. Then it
is mirrored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from offload.checkpoint.folder import open_folder
from offload.checkpoint.marker import ALONE, Mark, Marker, mark_begun, mark_of, mark_whole
from offload.errors import ConfigError
from offload.optim.ranks import Meeting, any_rank, on_all_ranks, world
from offload.tiers import parse_place


@contextlib.contextmanager
def checkpoint_folder(optimizer: Any, folder: str) -> Iterator[None]:
    """Mark a folder as begun before a `with` block; after it mark the folder as whole, and mirror it.

    If the block raises on a rank, the folder stays marked as begun. All ranks enter and leave the block together. See
    `StatefulOptimizer.checkpoint_folder`.
    """
    folder = directory_of(folder)
    begin_folder(folder)
    meeting = Meeting(folder)  # a collective, so made before a rank can fail in the block
    with optimizer.engine.checkpoints.keeping_all():  # the folder before stays whole until this one is
        try:
            yield
            optimizer.wait_checkpoint()  # a save in the block may go on after it
        except BaseException:
            meeting.note_failure()
            raise
        meeting.wait()  # no collective: a rank that has failed would not come to it
        mark_folder(folder)
    mirror_folder(optimizer, folder)


def directory_of(folder: str | os.PathLike[str]) -> str:
    """Return the absolute path of a folder, as the working directory may change before the folder is whole.

    Raises:
        ConfigError: The folder is in a bucket, or its name cannot be a folder's.
    """
    open_folder(folder)  # raises if this cannot be a folder's name
    name = parse_place(os.fspath(folder)).name
    if not os.path.isabs(name):
        raise ConfigError("folder", folder, "name a directory: the files in a bucket cannot be marked as whole")
    return name


def begin_folder(folder: str, belongs: Marker = ALONE) -> bool:
    """Mark a folder as not whole, before any rank writes to it. Collective.

    Args:
        folder: The folder.
        belongs: What to note of files that belong to the folder: a marker with `depth`, `beside` and `shared`.

    Returns:
        Whether all ranks see the mark. If not, ranks have folders of their own on different file systems, none whole.
    """
    # All ranks meet first: a rank whose peers have ended, as at a SIGTERM, must not get as far as changing the mark.
    any_rank(False)  # its result means nothing
    _on_first_rank(lambda: mark_begun(folder, belongs))
    return not any_rank(mark_of(folder) is not Mark.BEGUN)


def end_folder(optimizer: Any, folder: str) -> None:
    """Mark a folder as whole, once all ranks have written to it, and queue it for the optimizer's mirror. Collective.

    The optimizer's own checkpoint in the folder has been committed.
    """
    mark_folder(folder)
    mirror_folder(optimizer, folder)


def mark_folder(folder: str) -> None:
    """Mark a folder as whole, once all ranks have written to it. Collective."""
    any_rank(False)  # its result means nothing: all ranks meet in it
    _on_first_rank(lambda: mark_whole(folder))


def _on_first_rank(work: Callable[[], None]) -> None:
    """Do `work` on rank 0; the other ranks wait for that. If it fails, all ranks raise."""
    is_first = world()[1] == 0
    do_nothing = tuple  # a callable that may be called without arguments
    on_all_ranks(work if is_first else do_nothing, other="rank 0 could not mark the folder; see what it says")


def mirror_folder(optimizer: Any, folder: str, *, is_new: bool = True) -> None:
    """Queue a copy of a folder to the mirror, if there is one, for this rank. No collective.

    `is_new` is False for a folder that was loaded, not saved.
    """
    size, rank = world()
    optimizer.engine.checkpoints.mirror_folder(folder, rank, size, is_new=is_new)
