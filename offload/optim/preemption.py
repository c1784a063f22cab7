"""Preemption: after a SIGTERM an optimizer's step commits a checkpoint, and then the process ends as it would have.

A signal may interrupt any line, so its handler only notes it. The end of `step` does the rest, where state is whole
and all ranks meet: they exchange whether one has noted a signal, and if so all of them commit.

Not done here: saving; with `shard`, the exchange of weights, which carries the notes.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch

from offload import combinations
from offload.checkpoint.folder import open_folder
from offload.config import OffloadConfig
from offload.errors import CheckpointError, ConfigError
from offload.optim.ranks import any_rank
from offload.optim.stateful import StatefulOptimizer

log = logging.getLogger("offload")

_turns = itertools.count()
"""Counts two kinds of event, a handler's installation and a step of its owner, to tell which of two came first."""


class SigtermHandler:
    """The process's handler of SIGTERM from now on, for one optimizer, its owner; made on the main thread.

    It keeps no optimizer alive.

    Attributes:
        has_signal: Whether a SIGTERM has come that has not been passed on to the earlier handler.
        is_committing: Whether a checkpoint is being written for a SIGTERM, maybe another rank's: a second one of this
            process is then passed on at once.
    """

    def __init__(self) -> None:
        self.has_signal = False
        self.is_committing = False
        self._is_in_use = True
        self._pid = os.getpid()
        self._installed = self._stepped = next(_turns)
        self._step_count = 0
        if threading.current_thread() is not threading.main_thread():
            thread = threading.current_thread().name
            raise ConfigError(
                "commit_on_sigterm", thread, "call it on the main thread: no other sets signal handlers"
            )
        self._before = signal.getsignal(signal.SIGTERM)
        if self._before is None:
            native = "a handler of SIGTERM that native code has set"
            raise ConfigError("commit_on_sigterm", native, "have it set from Python: no other can be run afterwards")
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note a signal: the owner's step commits a checkpoint at its end. In three cases run the earlier handler:

        * during a commit, for the second signal of this process (the commit may be for another rank's signal);
        * in a forked process;
        * after `restore`, where that could not install the earlier handler.

        The earlier handler may be one of this class, which notes the signal for its own owner's next step. It is
        skipped if its owner has not stepped since this handler was installed: it may never again. It is not skipped
        after `restore`, nor in the first step of this handler's owner: by then the other may have had no turn.
        """
        is_own_process = os.getpid() == self._pid
        is_second_in_commit = self.has_signal and self.is_committing
        if self._is_in_use and is_own_process and not is_second_in_commit:
            self.has_signal = True
            return
        self.has_signal = self.is_committing = False
        before = self._before
        may_pass_over = self._is_in_use and self._step_count > 1
        while may_pass_over and isinstance(before, SigtermHandler) and before._stepped < self._installed:
            before = before._before
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL:  # else SIG_IGN: the signal is ignored
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # ends the process

    def note_step(self) -> None:
        """Note that the owner has taken a step; called at its end, whether or not there is a signal."""
        self._stepped = next(_turns)
        self._step_count += 1

    def pass_on(self) -> None:
        """Run the earlier handler for a signal that was noted, on the main thread; it may end the process."""
        main = threading.main_thread()
        if not self.has_signal:  # another rank has had it
            self.is_committing = False
        elif threading.current_thread() is main:
            self(signal.SIGTERM, inspect.currentframe())  # as for a second signal, so that the earlier handler runs
        elif main.ident is not None:
            signal.pthread_kill(main.ident, signal.SIGTERM)  # a second signal: the main thread calls this handler

    def commit(self, save: Callable[[], object], wait_mirror: Callable[[], object], where: object) -> None:
        """Save, then pass on a signal that this rank has had; if saving fails, that is logged.

        Args:
            save: Returns when the checkpoint is committed.
            wait_mirror: Returns when it is mirrored, too: the paths may be lost with the machine.
            where: The folder, for the log.
        """
        log.warning("SIGTERM: committing a checkpoint to %s", where)
        self.is_committing = True
        failure_text = "SIGTERM: nothing was committed to %s"
        try:
            save()
            failure_text = "SIGTERM: a checkpoint was committed to %s, and is not mirrored"
            wait_mirror()
        except Exception:  # logged only: the signal ends this run, whatever was saved
            log.exception(failure_text, where)
        except BaseException:  # an interrupt has ended the commit
            self.is_committing = False
            raise
        self.pass_on_together()

    def pass_on_together(self) -> None:
        """Wait for all ranks, then `pass_on`: when one rank ends, a launcher ends the others. Collective."""
        any_rank(False)  # its result means nothing: all ranks meet in it, before a signal ends one of them
        self.pass_on()

    def restore(self) -> None:
        """Install the earlier handler again; pass on a signal that nothing was committed for."""
        self._is_in_use = False
        current: object = signal.getsignal(signal.SIGTERM)
        # Only the main thread can install one. Elsewhere, or if another was installed over it, this handler stays,
        # and `__call__` runs the earlier one.
        if current is self and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
        self.pass_on()


class Preemption:
    """Commits one optimizer's checkpoint at the end of a `step`, once a rank has had a SIGTERM.

    Attributes:
        is_late: Whether an integration calls `commit` itself, after `step` has returned.
        is_due: Whether a checkpoint is to be committed.
    """

    def __init__(self) -> None:
        self.is_late = False
        self.is_due = False
        self._handler: SigtermHandler | None = None  # None while this is not in use
        self._folder: str | os.PathLike[str] | Callable[[], object] = ""  # or a function that saves
        self._extra: Callable[[], Any] | None = None
        self._model: Callable[[], torch.nn.Module | None] = _no_model  # else a weak reference
        self._restore_handler: Callable[[], object] = _nothing_to_restore

    def use(
        self,
        optimizer: StatefulOptimizer,
        config: OffloadConfig,
        folder: str | os.PathLike[str] | Callable[[], object],
        model: torch.nn.Module | None,
        extra: Callable[[], Any] | None,
    ) -> None:
        """Check the arguments of `OffloadedOptimizer.commit_on_sigterm`, note them, and install the handler once.

        `config` is the optimizer's; the others are described there.
        """
        if callable(folder):
            if model is not None or extra is not None:
                raise ConfigError("folder", folder, "leave model and extra out, which the function saves itself")
        elif isinstance(folder, str | os.PathLike):
            open_folder(folder)  # raises if this cannot be a folder's name
        else:
            raise ConfigError("folder", folder, "name a folder, or s3://bucket/prefix; None for no commits")
        if not isinstance(model, torch.nn.Module | None):
            raise ConfigError("model", type(model).__name__, "give a torch.nn.Module, or leave it out")
        if extra is not None and not callable(extra):
            raise ConfigError("extra", type(extra).__name__, "give a function: what it returns is saved")
        if config.paths and not config.checkpoints:  # a commit keeps its checkpoint's tiles on the paths
            combinations.NONE_KEPT.refuse("checkpoints_kept", 0)
        if self._handler is None:  # else a call before this one has installed it
            self._handler = SigtermHandler()
            self._restore_handler = finalizer = weakref.finalize(optimizer, self._handler.restore)
            finalizer.atexit = False  # the end of the process ends it anyway
        self._folder = folder
        self._extra = extra
        self._model = _no_model if model is None else weakref.ref(model)  # its hooks may hold the optimizer

    def end(self) -> None:
        """Restore the earlier handler, and commit no more; idempotent."""
        self._handler = self._extra = None
        self._restore_handler()

    @property
    def _name(self) -> object:
        """The folder, for logs."""
        return "where the loop saves" if callable(self._folder) else self._folder

    @property
    def note(self) -> bool | None:
        """Whether this rank has had a SIGTERM, for ranks to exchange in a step; None if this is not in use."""
        return None if self._handler is None else self._handler.has_signal

    def after_call(self, optimizer: StatefulOptimizer, any_sigterm: bool | None) -> None:
        """Commit if a rank has had a SIGTERM, and pass it on. Called at the end of each step.

        With `is_late` only note that a commit is due.

        Args:
            optimizer: The optimizer.
            any_sigterm: Whether any rank has noted a signal, as ranks have exchanged in this step. None if they have
                not: then a collective asks for it.
        """
        handler = self._handler
        if handler is None:
            return
        handler.note_step()
        if any_sigterm is None:
            any_sigterm = any_rank(handler.has_signal)
        if not any_sigterm:
            return
        self.is_due = True
        if not self.is_late:
            self.commit(optimizer)

    def commit(self, optimizer: StatefulOptimizer) -> None:
        """Commit if `is_due`, and pass the signal on."""
        is_due = self.is_due
        self.is_due = False
        if is_due and self._handler is not None:
            self._handler.commit(partial(self._save, optimizer), optimizer.wait_mirror, self._name)

    def _save(self, optimizer: StatefulOptimizer) -> None:
        """Save as `commit_on_sigterm` was told, and wait until that is committed. Collective."""
        if callable(self._folder):
            self._folder()
            optimizer.wait_checkpoint()
            return
        extra = None
        failure = None
        try:
            extra = None if self._extra is None else self._extra()
        except Exception as error:
            failure = error
        if any_rank(failure is not None):  # all ranks raise: others would wait for one that does not save
            raise failure or CheckpointError("another rank's extra could not be made")
        optimizer.save_checkpoint(self._folder, model=self._model(), extra=extra)
        optimizer.wait_checkpoint()


def _nothing_to_restore() -> None:
    """Do nothing: no handler was replaced."""


def _no_model() -> None:
    """Return no model; stands for a weak reference where no model was given."""
