"""Folders that a framework, or a loop, writes together with an optimizer: marked as whole at last, and mirrored."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from offload.checkpoint.folder import open_folder
from offload.checkpoint.marker import ALONE, Mark, Marker, mark_begun, mark_of, mark_whole
from offload.errors import ConfigError
from offload.optim.ranks import any_rank, on_all_ranks, world
from offload.tiers import parse_place


@contextlib.contextmanager
def checkpoint_folder(optimizer: Any, folder: str) -> Iterator[None]:
    """See `StatefulOptimizer.checkpoint_folder`."""
    open_folder(folder)  # raises where the name can be none
    given, folder = folder, parse_place(folder).name  # whatever the working directory is when it ends
    if not os.path.isabs(folder):
        raise ConfigError("folder", given, "name a directory: the files in a bucket cannot be marked as whole")
    begin_folder(folder)
    with optimizer.engine.checkpoints.keeping_all():  # the folder before is whole while this one is not
        yield
        optimizer.wait_checkpoint()
        mark_folder(folder)
    mirror_folder(optimizer, folder)


def begin_folder(folder: str, belongs: Marker = ALONE) -> bool:
    """Mark a folder as one that is not whole, before any rank writes to it. Collective.

    Args:
        folder: The folder.
        belongs: See `mark_begun`.

    Returns:
        Whether all ranks see that. Else each has a folder of its own, and there is none that could be whole.
    """
    any_rank(False)  # a rank that others have left alone, as at a SIGTERM, is not to take the mark off
    _on_first_rank(lambda: mark_begun(folder, belongs))
    return not any_rank(mark_of(folder) is not Mark.BEGUN)


def end_folder(optimizer: Any, folder: str) -> None:
    """Mark a folder as whole, once all ranks have written to it, and have the mirror copy it. Collective.

    Args:
        optimizer: Whose mirror; its checkpoint in the folder has been committed.
        folder: The folder.
    """
    mark_folder(folder)
    mirror_folder(optimizer, folder)


def mark_folder(folder: str) -> None:
    """Mark a folder as whole, once all ranks have written to it. Collective."""
    any_rank(False)
    _on_first_rank(lambda: mark_whole(folder))


def _on_first_rank(work: Callable[[], None]) -> None:
    """Have rank 0 do something, and wait for that; what it fails with is raised on all ranks."""
    is_first = world()[1] == 0
    on_all_ranks(work if is_first else tuple, "rank 0 could not mark the folder; see what it says")


def mirror_folder(optimizer: Any, folder: str, *, is_new: bool = True) -> None:
    """Have the mirror copy a folder with what is in it; see `Checkpoints.mirror_folder`. No collective."""
    size, rank = world()
    optimizer.engine.checkpoints.mirror_folder(folder, rank, size, is_new=is_new)
