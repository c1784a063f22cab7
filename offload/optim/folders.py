"""Folders that a framework, or a loop, writes together with an optimizer: marked as whole at last, and mirrored."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from offload.checkpoint.contents import is_checkpoint
from offload.checkpoint.folder import open_folder
from offload.checkpoint.manifest import COMMIT_NAME
from offload.checkpoint.marker import Mark, mark_begun, mark_of, mark_whole
from offload.checkpoint.whole import WholeFolder
from offload.errors import ConfigError
from offload.optim.ranks import any_rank, on_all_ranks, world
from offload.tiers import parse_place

log = logging.getLogger("offload")


@contextlib.contextmanager
def checkpoint_folder(optimizer: Any, folder: str) -> Iterator[None]:
    """See `StatefulOptimizer.checkpoint_folder`."""
    open_folder(folder)  # raises where the name can be none
    given, folder = folder, parse_place(folder).name  # whatever the working directory is when it ends
    if not os.path.isabs(folder):
        raise ConfigError("folder", given, "name a directory: the files in a bucket cannot be marked as whole")
    config = optimizer.config
    if config.paths and config.checkpoints == 1:
        log.warning("with checkpoints_kept=1 the folder before loses its state while %s is not whole: give 2", folder)
    begin_folder(folder)
    yield
    optimizer.wait_checkpoint()
    end_folder(optimizer, folder)


def begin_folder(folder: str) -> bool:
    """Mark a folder as one that is not whole, before any rank writes to it. Collective.

    Returns:
        Whether all ranks see that. Else each has a folder of its own, and there is none that could be whole.
    """
    any_rank(False)  # a rank that others have left alone, as at a SIGTERM, is not to take the mark off
    _on_first_rank(lambda: mark_begun(folder))
    return not any_rank(mark_of(folder) is not Mark.BEGUN)


def end_folder(optimizer: Any, folder: str, *, above: str = "", beside: Sequence[str] = ()) -> None:
    """Mark a folder as whole, once all ranks have written to it, and have the mirror copy it. Collective.

    Args:
        optimizer: Whose mirror; its checkpoint in the folder has been committed.
        folder: The folder.
        above: The run's folder, by which the mirror names it; the one above it if left out.
        beside: See `WholeFolder`.
    """
    mark_folder(folder)
    mirror_folder(optimizer, folder, above=above, beside=beside)


def mark_folder(folder: str) -> None:
    """Mark a folder as whole, once all ranks have written to it. Collective."""
    any_rank(False)
    _on_first_rank(lambda: mark_whole(folder))


def _on_first_rank(work: Callable[[], None]) -> None:
    """Have rank 0 do something, and wait for that; what it fails with is raised on all ranks."""
    is_first = world()[1] == 0
    on_all_ranks(work if is_first else tuple, "rank 0 could not mark the folder; see what it says")


def resume_folder(optimizer: Any, folder: str, *, above: str = "", beside: Sequence[str] = ()) -> None:
    """Have the mirror go on with a folder from which all ranks have loaded, if it is whole; see `end_folder`."""
    if mark_of(folder) is Mark.WHOLE:
        mirror_folder(optimizer, folder, above=above, beside=beside, is_new=False)


def mirror_folder(
    optimizer: Any,
    folder: str,
    *,
    above: str = "",
    beside: Sequence[str] = (),
    shared: Sequence[str] = (),
    is_new: bool = True,
) -> None:
    """Have the mirror copy a folder with what is in it; see `end_folder` and `WholeFolder`. No collective."""
    if optimizer.engine.config.mirror is None:
        return
    folder = os.path.abspath(folder)
    above = os.path.abspath(above) if above else os.path.dirname(folder)
    name = os.path.relpath(folder, above)
    if name.split(os.sep)[0] == os.pardir:
        log.warning("%s is not mirrored: it does not lie in %s", folder, above)
        return
    places = sorted(place for place, _, names in os.walk(folder) if COMMIT_NAME in names and is_checkpoint(place))
    found = [os.path.relpath(place, folder) for place in places]
    if len(found) > 1:
        log.warning("%s is not mirrored: it has checkpoints of several optimizers, %s", folder, ", ".join(found))
        return
    inside = os.path.normpath(os.path.join(name, found[0])) if found else ""
    size, rank = world()
    optimizer.engine.checkpoints.mirror_folder(
        WholeFolder(above, name, inside, beside, shared), rank, size, is_new=is_new
    )
