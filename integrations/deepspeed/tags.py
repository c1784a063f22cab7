"""DeepSpeed's tags as folders that are whole or not: marked, mirrored, and saved when a SIGTERM comes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from offload.checkpoint.marker import Mark, Marker, mark_of, unmark
from offload.optim.folders import begin_folder, mark_folder, mirror_folder
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
    unmarked = ""  # the tag's folder, while it is saved and not marked

    def save_checkpoint(save_dir: Any, tag: Any = None, *arguments: Any, **keywords: Any) -> Any:
        nonlocal unmarked
        optimizer.wait_checkpoint()
        folder = os.path.abspath(save_dir)
        tag = str(f"global_step{engine.global_steps}" if tag in (None, "") else tag)  # which may be 0
        whole = os.path.join(folder, tag)
        is_one = begin_folder(whole, Marker(depth=1 + os.path.normpath(tag).count(os.sep), shared=BESIDE))
        if not is_one:
            unmark(whole)
        unmarked, optimizer.is_saved_behind = whole if is_one else "", False
        writer = engine.checkpoint_engine
        if "commit" not in vars(writer):
            writer.commit = partial(commit, writer.commit)
        try:
            found = save(save_dir, tag, *arguments, **keywords)
            mark()
        finally:
            unmarked = ""
        if is_one and not optimizer.is_saved_behind:
            mirror_folder(optimizer.shard, whole)
        return found

    def mark() -> None:
        nonlocal unmarked
        if unmarked and not optimizer.is_saved_behind:
            mark_folder(unmarked)
        unmarked = ""

    def commit(original: Callable[[Any], Any], info: Any) -> Any:
        found = original(info)
        mark()  # before rank 0 names it as the latest, which waits for no other rank
        return found

    def load_checkpoint(load_dir: Any, tag: Any = None, *arguments: Any, **keywords: Any) -> Any:
        found = load(load_dir, tag, *arguments, **keywords)
        if found[0] is not None:
            whole = os.path.dirname(found[0])
            if mark_of(whole) is Mark.WHOLE:  # what has no checkpoint of ours, too
                mirror_folder(optimizer.shard, whole, is_new=False)
        return found

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def commit_on_sigterm(optimizer: Any, engine: Any, folder: str) -> SigtermHandler:
    """Have all ranks save to a folder at the end of the step in which one of them gets a SIGTERM."""
    handler, step, this = SigtermHandler(), engine.step, weakref.ref(optimizer)
    weakref.finalize(optimizer, handler.restore).atexit = False

    def save() -> None:
        engine.save_checkpoint(folder)
        if (found := this()) is not None:
            found.wait_checkpoint()

    def wait_mirror() -> None:
        if (found := this()) is not None:
            found.shard.engine.checkpoints.wait_mirror()

    def step_and_commit(*arguments: Any, **keywords: Any) -> Any:
        is_last = engine.is_gradient_accumulation_boundary()
        found = step(*arguments, **keywords)
        if is_last and any_rank(handler.has_signal):
            handler.commit(save, wait_mirror, folder)
        return found

    engine.step = step_and_commit
    return handler
