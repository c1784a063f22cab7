"""DeepSpeed's tags as folders that are whole or not: marked, mirrored, and saved when a SIGTERM comes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from offload.checkpoint.marker import Mark, mark_of, unmark
from offload.optim import folders
from offload.optim.preemption import SigtermHandler
from offload.optim.ranks import any_rank

LATEST = "latest"
BESIDE = "zero_to_fp32.py", "zero_to_torch.py", LATEST
"""What DeepSpeed writes beside the tags; it finds the newest tag by the last."""


def save_whole(optimizer: Any, engine: Any) -> None:
    """Have a DeepSpeed engine mark the tags that it saves as whole, and have the mirror copy them."""
    if engine.use_node_local_storage():  # nobody sees the whole of a tag
        return
    save, load = engine.save_checkpoint, engine.load_checkpoint
    is_one = False

    def save_checkpoint(save_dir: Any, tag: Any = None, *arguments: Any, **keywords: Any) -> Any:
        nonlocal is_one
        optimizer.wait_checkpoint()
        folder, tag = os.path.abspath(save_dir), str(tag or f"global_step{engine.global_steps}")
        is_one = folders.begin(os.path.join(folder, tag))
        if not is_one:
            unmark(os.path.join(folder, tag))
        optimizer.is_saved_behind = False
        writer = engine.checkpoint_engine
        if "commit" not in vars(writer):
            writer.commit = partial(commit, writer.commit)
        found = save(save_dir, tag, *arguments, **keywords)
        if is_one and not optimizer.is_saved_behind:
            mirror(optimizer.shard, folder, tag)
        return found

    def commit(original: Callable[[Any], Any], info: Any) -> Any:
        found = original(info)
        folder = os.path.join(os.path.abspath(info.save_dir), info.tag)
        if is_one and not optimizer.is_saved_behind:  # before rank 0 names it as latest, which waits for no other
            folders.mark(folder)
        return found

    def load_checkpoint(load_dir: Any, tag: Any = None, *arguments: Any, **keywords: Any) -> Any:
        found = load(load_dir, tag, *arguments, **keywords)
        if found[0] is not None:
            mirror(optimizer.shard, os.path.abspath(load_dir), str(tag or _latest(load_dir)), is_new=False)
        return found

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def _latest(folder: Any) -> str:
    with open(os.path.join(folder, LATEST), encoding="utf-8") as file:
        return file.read().strip()


def mirror(shard: Any, folder: str, tag: str, *, is_new: bool = True, is_whole: bool = False) -> None:
    """Have the mirror copy a tag, if it is whole; no collective.

    Args:
        shard: Of this rank.
        folder: Of all tags.
        tag: Its name.
        is_new: See `folders.mirror`.
        is_whole: Whether it is, or becomes so on rank 0 in this moment; else its mark says that.
    """
    whole = os.path.join(folder, tag)
    if is_whole or mark_of(whole) is Mark.WHOLE:
        shared = [name for name in BESIDE if os.path.exists(os.path.join(folder, name))]
        folders.mirror(shard, whole, above=folder, shared=shared, is_new=is_new)


def commit_on_sigterm(optimizer: Any, engine: Any, folder: str) -> SigtermHandler:
    """Have all ranks save to a folder at the end of the step in which one of them gets a SIGTERM."""
    handler, step, this = SigtermHandler(), engine.step, weakref.ref(optimizer)
    weakref.finalize(optimizer, handler.restore).atexit = False

    def save() -> None:
        engine.save_checkpoint(folder)
        if (found := this()) is not None:
            found.wait_checkpoint()
            found.shard.engine.checkpoints.wait_mirror()

    def step_and_commit(*arguments: Any, **keywords: Any) -> Any:
        is_last = engine.is_gradient_accumulation_boundary()
        found = step(*arguments, **keywords)
        if is_last and any_rank(handler.has_signal):
            handler.commit(save, folder)
        return found

    engine.step = step_and_commit
    return handler
