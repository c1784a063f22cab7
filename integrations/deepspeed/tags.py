"""DeepSpeed's tags as folders: marked when they are whole, mirrored, and saved on a SIGTERM.

A *tag* is the name of one save, and of its folder beside those of other tags. A function that "Replaces" a method of
an engine is set on that engine alone, and calls the method that was there.
"""

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

BESIDE = "zero_to_fp32.py", "zero_to_torch.py", "latest"
"""Files that DeepSpeed writes beside the tags; the last one names the newest tag."""


def mark_tags_when_whole(optimizer: Any, engine: Any) -> None:
    """Replace an engine's methods that save and load: a tag is marked as whole, then mirrored.

    A tag is marked when DeepSpeed's checkpoint engine commits it, after its last file and before `latest` names it;
    it is mirrored once `latest` does. Usually both are done before `save_checkpoint` returns. A *decoupled*
    checkpoint engine, which saves by a thread or process, commits after further micro-steps. A save behind training
    marks and mirrors by itself.
    """
    if engine.use_node_local_storage():  # no process sees all files of a tag
        return
    save, load = engine.save_checkpoint, engine.load_checkpoint
    # The folder of the tag that is being saved, until it is marked as whole; and then, until it is mirrored, that of
    # the marked tag.
    unmarked_folder = unmirrored_folder = ""
    # A DeepSpeed without decoupled checkpoint engines does not have the method.
    commit_decoupled = getattr(engine, "_commit_decoupled_checkpoint", lambda: None)

    def save_checkpoint(save_dir: Any, tag: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """Replaces `save_checkpoint`: mark the tag's folder as begun, save, mark it as whole, and mirror it."""
        nonlocal unmarked_folder
        optimizer.check_is_loaded()
        if not save_dir:  # which DeepSpeed refuses
            return save(save_dir, tag, *arguments, **keywords)
        optimizer.wait_checkpoint()
        folder = os.path.abspath(save_dir)
        tag = str(f"global_step{engine.global_steps}" if tag in (None, "") else tag)  # which may be the number 0
        tag_folder = os.path.join(folder, tag)
        # A tag may have folders in its name, as "a/b". A mirror keeps all of it: `depth` parts of the path.
        is_marked = begin_folder(tag_folder, Marker(depth=1 + os.path.normpath(tag).count(os.sep), shared=BESIDE))
        if not is_marked:  # ranks have folders of their own, none of which will be whole
            unmark(tag_folder)
        unmarked_folder = tag_folder if is_marked else ""
        optimizer.is_saved_behind = False  # `save` sets it again if that goes on in the background
        writer = engine.checkpoint_engine
        if "commit" not in vars(writer):  # else an earlier save has replaced it
            writer.commit = partial(commit, writer.commit)
        try:
            result = save(save_dir, tag, *arguments, **keywords)
        except BaseException:
            unmarked_folder = ""  # no later commit is to mark the folder, which stays marked as begun
            raise
        if not getattr(writer, "is_decoupled", lambda: False)():  # else the engine commits after further micro-steps
            mark()
            mirror()
        return result

    def mark() -> None:
        """Mark the tag's folder as whole, unless that was done, or a save behind training does it when it ends."""
        nonlocal unmarked_folder, unmirrored_folder
        folder, unmarked_folder = unmarked_folder, ""
        if folder and not optimizer.is_saved_behind:
            mark_folder(folder)
            unmirrored_folder = folder

    def mirror() -> None:
        """Mirror the tag's folder if it was marked, once: when `latest`, which is mirrored, too, names the tag."""
        nonlocal unmirrored_folder
        folder, unmirrored_folder = unmirrored_folder, ""
        if folder:
            mirror_folder(optimizer.shard, folder)  # the shard has the `engine` that this uses

    def commit_and_mirror() -> None:
        """Replaces `_commit_decoupled_checkpoint`, which commits a decoupled save: then mirror the tag."""
        commit_decoupled()
        mirror()

    def commit(original: Callable[[Any], Any], info: Any) -> Any:
        """Replaces the checkpoint engine's `commit`, called after the last file of a tag: then mark the tag."""
        result = original(info)
        mark()  # a collective, before rank 0 names the tag in `latest` without waiting for other ranks
        return result

    def load_checkpoint(load_dir: Any, tag: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """Replaces `load_checkpoint`: mirror the tag that was loaded, if it is whole."""
        result = load(load_dir, tag, *arguments, **keywords)
        if result[0] is not None:  # the path of a file in the tag's folder; None if nothing was loaded
            tag_folder = os.path.dirname(result[0])
            # The process that saved the tag may have been killed before the tag was mirrored. The tag need not have a
            # checkpoint of the engine in it.
            if mark_of(tag_folder) is Mark.WHOLE:
                mirror_folder(optimizer.shard, tag_folder, is_new=False)
        return result

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
    engine._commit_decoupled_checkpoint = commit_and_mirror


def commit_on_sigterm(optimizer: Any, engine: Any, folder: str) -> SigtermHandler:
    """Replace `engine.step`: all ranks save to a folder at the end of a step in which one of them got a SIGTERM.

    Then the ranks that had the signal run the handler of SIGTERM before this one, which usually ends the process, and
    so the run.

    The handler keeps no optimizer alive; when the optimizer is freed, the earlier handler is restored.
    """
    handler, step, optimizer_ref = SigtermHandler(), engine.step, weakref.ref(optimizer)
    weakref.finalize(optimizer, handler.restore).atexit = False  # the end of the process ends a handler anyway

    def save() -> None:
        """Save to the folder, and wait for that."""
        engine.save_checkpoint(folder)
        if (alive := optimizer_ref()) is not None:
            alive.wait_checkpoint()

    def wait_mirror() -> None:
        """Wait for the mirror's copy of what was saved."""
        if (alive := optimizer_ref()) is not None:
            alive.shard.engine.checkpoints.wait_mirror()

    def step_and_commit(*arguments: Any, **keywords: Any) -> Any:
        """Replaces `step`: after the last micro-step, commit if any rank has had a signal."""
        is_last = engine.is_gradient_accumulation_boundary()  # before `step`, which counts the micro-step
        result = step(*arguments, **keywords)
        if is_last:
            handler.note_step()  # tells a later handler, of another optimizer, that this one's owner still trains
            if any_rank(handler.has_signal):
                handler.commit(save, wait_mirror, folder)
        return result

    engine.step = step_and_commit
    return handler
