"""A Trainer's checkpoints: marked as whole when all is written, and older ones deleted behind that; SIGTERM."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
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

log = logging.getLogger("offload")


class Deleting:
    """Stands in for `shutil` where the Trainer deletes checkpoints: what they hold on the paths is released first.

    Afterwards nobody could tell a checkpoint that was deleted from one that was moved, and its state would stay.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Any, ...]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(shutil, name)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delete nothing meanwhile, and then what was to be deleted, unless an exception ends it."""
        before, self._held = self._held, []
        try:
            yield
            wanted = self._held
        finally:
            self._held = before
        for path, arguments, options in wanted:
            self.rmtree(path, *arguments, **options)

    def rmtree(self, path: str | os.PathLike[str], *arguments: Any, **options: Any) -> None:
        """See `shutil`."""
        if self._held is not None:
            self._held.append((path, arguments, options))
            return
        folder = os.path.abspath(path)
        try:
            offload.release_before_deletion(os.path.join(folder, FOLDER), os.path.dirname(folder))
            if mark_of(folder) is Mark.WHOLE:
                mark_begun(folder)  # a kill in between leaves no checkpoint
        except OffloadError as error:
            log.warning("what %s holds on the paths stays there when it is deleted now: %s", folder, error)
        shutil.rmtree(path, *arguments, **options)


DELETING = Deleting()


def save(
    trainer: Any,
    optimizer: Any,
    original: Callable[..., Any],
    model: Any,
    trial: Any,
    *arguments: Any,
    **options: Any,
) -> None:
    """Save a whole checkpoint by `Trainer._save_checkpoint`: marked as such, and older ones go behind that."""
    folder = os.path.join(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
    begin_folder(folder)
    with DELETING.held():
        original(trainer, model, trial, *arguments, **options)
        end_folder(optimizer, folder)


def preempted(optimizer: Callable[[], Any]) -> Any:
    """Return a callback that has all ranks save at the end of the step in which one of them gets a SIGTERM.

    Args:
        optimizer: What returns the Trainer's optimizer of ours; None where it has none.
    """

    class Preempted(import_module("transformers").TrainerCallback):  # type: ignore[misc]
        handler: SigtermHandler | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            self.on_train_end()
            if getattr(args, "enable_jit_checkpoint", False):
                TWO_SAVES.refuse("commit_on_sigterm", True)
            if optimizer() is not None:
                self.handler = handler = SigtermHandler()
                weakref.finalize(self, handler.restore).atexit = False

        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            handler = self.handler
            if handler is not None and any_rank(handler.has_signal):
                log.warning("SIGTERM: the Trainer saves a checkpoint")
                handler.is_committing = control.should_save = True
                control.should_evaluate = False

        on_evaluate = on_step_end  # behind which a checkpoint comes

        def on_save(self, *arguments: Any, **options: Any) -> None:
            handler, ours = self.handler, optimizer()
            if handler is not None and handler.is_committing:
                try:
                    if ours is not None:
                        ours.wait_mirror()  # the paths may go with the machine
                except OffloadError:
                    log.exception("SIGTERM: the checkpoint is saved, and not mirrored")
                handler.pass_on_together()

        def on_train_end(self, *arguments: Any, **options: Any) -> None:
            if self.handler is not None:
                self.handler.restore()
            self.handler = None

    return Preempted()
