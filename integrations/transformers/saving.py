"""A Trainer's checkpoints: marked as whole before older ones are deleted, and saved on a SIGTERM."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import offload
from offload import OffloadError
from offload.checkpoint.marker import Mark, mark_begun, mark_of
from offload.combinations import TWO_SAVES
from offload.optim.folders import begin_folder, end_folder
from offload.optim.preemption import SigtermHandler
from offload.optim.ranks import any_rank

FOLDER = "optimizer"
"""The optimizer's folder in a Trainer's checkpoint."""

CHECKPOINTS = re.compile(r"checkpoint-\d+")

_SENTINEL = "checkpoint-is-incomplete.txt"
"""A file of transformers' `enable_jit_checkpoint`, which deletes it after the save if it is still there."""

log = logging.getLogger("offload")


class DeletionHook:
    """Replaces the module `shutil` in transformers, so that a checkpoint's state is released before its deletion.

    Once its folder is gone, a deleted checkpoint cannot be told from one that was moved, and its state on the paths
    would be kept.
    """

    def __init__(self) -> None:
        self._postponed: list[Callable[[], None]] | None = None  # deletions; None outside of `postponed`

    def __getattr__(self, name: str) -> Any:
        """Return all else of `shutil`."""
        return getattr(shutil, name)

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """Postpone deletions until this context ends; delete nothing if an exception ends it."""
        outer_deletions, self._postponed = self._postponed, []  # those of a context around this one
        try:
            yield
            deletions = self._postponed
        finally:
            self._postponed = outer_deletions
        # Within a context around this one `rmtree` postpones them again.
        for delete in deletions:
            delete()

    def rmtree(self, path: str | os.PathLike[str], *arguments: Any, **options: Any) -> None:
        """Release a checkpoint's state, then delete the folder as `shutil.rmtree` does; in `postponed`, later."""
        if self._postponed is not None:
            self._postponed.append(partial(self.rmtree, path, *arguments, **options))
            return
        folder = os.path.abspath(path)
        try:
            # The release is noted in the folder above, which stays; the session that keeps the state reads it there.
            offload.release_before_deletion(os.path.join(folder, FOLDER), os.path.dirname(folder))
            if mark_of(folder) is not Mark.NONE:
                # A kill during the deletion must not leave a folder that is marked as whole. Without a lock: network
                # file systems delete no folder that has an open file.
                mark_begun(folder, locks=False)
        except OffloadError as error:
            log.warning("what %s holds on the paths stays there when it is deleted now: %s", folder, error)
        shutil.rmtree(path, *arguments, **options)


DELETION_HOOK = DeletionHook()


def save(
    trainer: Any,
    optimizer: Any,
    original: Callable[..., Any],
    model: Any,
    trial: Any,
    *arguments: Any,
    **options: Any,
) -> None:
    """Save a checkpoint by `Trainer._save_checkpoint` (`original`), mark it as whole, then delete older ones.

    `original` deletes older ones before it returns; this is postponed, so that there is always a whole one.
    """
    # The folder that `original` saves to.
    folder = os.path.join(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
    begin_folder(folder)
    with DELETION_HOOK.postponed():
        original(trainer, model, trial, *arguments, **options)
        with contextlib.suppress(FileNotFoundError):  # before `end_folder` lists the folder's files for a mirror
            os.unlink(os.path.join(folder, _SENTINEL))
        end_folder(optimizer, folder)


class Callback:
    """Base of our callbacks. A Trainer has its callbacks, so they refer to it weakly, and do not keep it alive.

    Args:
        trainer: The Trainer.
        find_optimizer: Returns a Trainer's optimizer if that is one of ours; else None.
    """

    def __init__(self, trainer: Any, find_optimizer: Callable[[Any], Any]) -> None:
        self.trainer_ref = weakref.ref(trainer)
        self._find_optimizer = find_optimizer

    def optimizer(self) -> Any:
        """Return the Trainer's optimizer if it is one of ours; else None, also if there is no Trainer any more."""
        trainer = self.trainer_ref()
        return None if trainer is None else self._find_optimizer(trainer)


class Sigterm(Callback):
    """Saves on all ranks at the end of the step in which one of them gets a SIGTERM."""

    _handler: SigtermHandler | None = None  # None while no training with an optimizer of ours is under way

    @property
    def has_signal(self) -> bool:
        """Whether a SIGTERM has come for which nothing has been saved."""
        return self._handler is not None and self._handler.has_signal

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Handle SIGTERM while training lasts."""
        # An error may have ended training without `on_train_end`, and left a handler: with `auto_find_batch_size`
        # training then begins anew within the same `train`.
        self.on_train_end()
        if self.optimizer() is None:
            return
        if getattr(args, "enable_jit_checkpoint", False):  # older releases have no such argument
            TWO_SAVES.refuse("commit_on_sigterm", True)
        self._handler = handler = SigtermHandler()
        # If this callback is freed without `on_train_end`. Not at exit: the end of the process ends a handler anyway.
        weakref.finalize(self, handler.restore).atexit = False

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Ask the Trainer to save now if any rank has had a SIGTERM. Collective."""
        handler = self._handler
        if handler is None:
            return
        handler.note_step()
        if any_rank(handler.has_signal):
            lacks_state = getattr(args, "save_only_model", False)  # older releases have no such argument
            what = "weights alone (save_only_model): the optimizer begins anew from them"
            log.warning("SIGTERM: the Trainer saves %s", what if lacks_state else "a checkpoint")
            handler.is_committing = control.should_save = True
            control.should_evaluate = False  # which the Trainer would do before it saves

    on_evaluate = on_step_end  # after an evaluation, too: the Trainer saves next

    def on_save(self, *arguments: Any, **options: Any) -> None:
        """If the save was for a SIGTERM: wait for the mirror, then pass the signal on."""
        handler, optimizer = self._handler, self.optimizer()
        if handler is not None and handler.is_committing:
            try:
                if optimizer is not None:
                    optimizer.wait_mirror()  # the paths may be lost with the machine
            except OffloadError:
                log.exception("SIGTERM: the checkpoint is saved, and not mirrored")
            handler.pass_on_together()

    def on_train_end(self, *arguments: Any, **options: Any) -> None:
        """Restore the handler that was there before, and pass on to it a signal for which nothing was saved.

        That may end the process. Idempotent.
        """
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.restore()
