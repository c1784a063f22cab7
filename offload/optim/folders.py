"""Folders that a framework, or a loop, writes together with an optimizer: marked as whole at last, and mirrored."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from offload.checkpoint.manifest import COMMIT_NAME
from offload.checkpoint.marker import Mark, mark_begun, mark_of, mark_whole
from offload.checkpoint.whole import WholeFolder
from offload.errors import CheckpointError, OffloadError
from offload.optim.ranks import any_rank, world

log = logging.getLogger("offload")


@contextlib.contextmanager
def checkpoint_folder(optimizer: Any, folder: str) -> Iterator[None]:
    """See `StatefulOptimizer.checkpoint_folder`."""
    begin(folder)
    yield
    optimizer.wait_checkpoint()
    end(optimizer, folder)


def begin(folder: str) -> bool:
    """Mark a folder as one that is not whole, before any rank writes to it. Collective.

    Returns:
        Whether all ranks see that. Else each has a folder of its own, and there is none that could be whole.
    """
    any_rank(False)  # a rank that others have left alone, as at a SIGTERM, is not to take the mark off
    _on_first_rank(lambda: mark_begun(folder))
    return not any_rank(mark_of(folder) is not Mark.BEGUN)


def end(optimizer: Any, folder: str, *, above: str = "", beside: Sequence[str] = ()) -> None:
    """Mark a folder as whole, once all ranks have written to it, and have the mirror copy it. Collective.

    Args:
        optimizer: Whose mirror; its checkpoint in the folder has been committed.
        folder: The folder.
        above: The run's folder, by which the mirror names it; the one above it if left out.
        beside: See `WholeFolder`.
    """
    mark(folder)
    mirror(optimizer, folder, above=above, beside=beside)


def mark(folder: str) -> None:
    """Mark a folder as whole, once all ranks have written to it. Collective."""
    any_rank(False)
    _on_first_rank(lambda: mark_whole(folder))


def _on_first_rank(work: Callable[[], None]) -> None:
    """Have rank 0 do something, and wait for that; what it fails with is raised on all ranks."""
    failure = None
    try:
        if world()[1] == 0:
            work()
    except (OSError, OffloadError) as error:
        failure = error
    if any_rank(failure is not None):
        raise failure or CheckpointError("rank 0 could not mark the folder; see what it says")


def resumed(optimizer: Any, folder: str, *, above: str = "", beside: Sequence[str] = ()) -> None:
    """Have the mirror go on with a folder from which all ranks have loaded, if it is whole; see `end`."""
    if mark_of(folder) is Mark.WHOLE:
        mirror(optimizer, folder, above=above, beside=beside, is_new=False)


def mirror(
    optimizer: Any,
    folder: str,
    *,
    above: str = "",
    beside: Sequence[str] = (),
    shared: Sequence[str] = (),
    is_new: bool = True,
) -> None:
    """Have the mirror copy a folder with what is in it; see `end` and `WholeFolder`. No collective."""
    folder = os.path.abspath(folder)
    above = os.path.abspath(above) if above else os.path.dirname(folder)
    name = os.path.relpath(folder, above)
    found = [where for where in ("", *sorted(os.listdir(folder))) if _is_committed(os.path.join(folder, where))]
    if len(found) > 1:
        log.warning("%s is not mirrored: it has checkpoints of several optimizers, %s", folder, ", ".join(found))
        return
    inside = os.path.normpath(os.path.join(name, found[0])) if found else ""
    size, rank = world()
    optimizer.engine.checkpoints.mirror_folder(
        WholeFolder(above, name, inside, beside, shared), rank, size, is_new=is_new
    )


def _is_committed(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, COMMIT_NAME))
