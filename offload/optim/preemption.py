"""Preemption: after a SIGTERM an optimizer's step commits a checkpoint, and then the process ends as it would have.

A signal may interrupt any line, so its handler only notes it. The end of a call does the rest, where state is whole
and all ranks meet: they tell each other of their notes, and all of them commit.

Not done here: saving; the exchange of weights that carries the notes, where ranks have one at every step.
"""

from __future__ import annotations

import inspect
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


class SigtermHandler:
    """The process's handler of SIGTERM from now on; made on the main thread. It keeps no optimizer.

    Attributes:
        has_signal: Whether a SIGTERM has come of which the handler before has not been told.
        is_committing: Whether its checkpoint is being written: the next SIGTERM goes to the handler before at once.
    """

    def __init__(self) -> None:
        self.has_signal = self.is_committing = False
        self._is_in_use = True
        self._pid = os.getpid()
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
        """Note a signal; run the handler before if one is dealt with already, and in a forked process."""
        if self._is_in_use and os.getpid() == self._pid and not (self.has_signal and self.is_committing):
            self.has_signal = True
            return
        self.has_signal = self.is_committing = False
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def pass_on(self) -> None:
        """Have the handler before told of a signal that was noted; it may end the process."""
        main = threading.main_thread()
        if not self.has_signal:
            self.is_committing = False
        elif threading.current_thread() is main:
            self(signal.SIGTERM, inspect.currentframe())
        elif main.ident is not None:
            signal.pthread_kill(main.ident, signal.SIGTERM)  # which is handled there

    def commit(self, save: Callable[[], object], wait_mirror: Callable[[], object], where: object) -> None:
        """Save, and have the handler before told of a signal on this rank; what saving fails with is logged.

        Args:
            save: Returns when the checkpoint is committed.
            wait_mirror: Returns when it is mirrored, too: the paths may go with the machine.
            where: Named in the log.
        """
        log.warning("SIGTERM: committing a checkpoint to %s", where)
        self.is_committing = True
        what = "SIGTERM: nothing was committed to %s"
        try:
            save()
            what = "SIGTERM: a checkpoint was committed to %s, and is not mirrored"
            wait_mirror()
        except Exception:
            log.exception(what, where)
        except BaseException:
            self.is_committing = False
            raise
        self.pass_on_together()

    def pass_on_together(self) -> None:
        """Do as `pass_on` once all ranks have come so far: a launcher ends others when one has ended. Collective."""
        any_rank(False)
        self.pass_on()

    def restore(self) -> None:
        """Set the handler before again; tell it of a signal that nothing was committed for."""
        self._is_in_use = False
        current: object = signal.getsignal(signal.SIGTERM)
        if current is self and threading.current_thread() is threading.main_thread():  # else it runs the one before
            signal.signal(signal.SIGTERM, self._before)
        self.pass_on()


class Preemption:
    """Has one optimizer commit at the end of a call, once a rank has had a SIGTERM.

    Attributes:
        is_late: Whether somebody else calls `commit`, after the call.
        is_due: Whether a checkpoint is to be committed.
    """

    def __init__(self) -> None:
        self.is_late = self.is_due = False
        self._handler: SigtermHandler | None = None
        self._folder: str | os.PathLike[str] | Callable[[], object] = ""
        self._extra: Callable[[], Any] | None = None
        self._model: Callable[[], torch.nn.Module | None] = _no_model
        self._restore: Callable[[], object] = tuple

    def use(
        self,
        optimizer: StatefulOptimizer,
        config: OffloadConfig,
        folder: str | os.PathLike[str] | Callable[[], object],
        model: torch.nn.Module | None,
        extra: Callable[[], Any] | None,
    ) -> None:
        """See `OffloadedOptimizer.commit_on_sigterm`."""
        if callable(folder):
            if model is not None or extra is not None:
                raise ConfigError("folder", folder, "leave model and extra out, which the function saves itself")
        elif isinstance(folder, str | os.PathLike):
            open_folder(folder)  # raises where the name can be none
        else:
            raise ConfigError("folder", folder, "name a folder, or s3://bucket/prefix; None for no commits")
        if not isinstance(model, torch.nn.Module | None):
            raise ConfigError("model", type(model).__name__, "give a torch.nn.Module, or leave it out")
        if extra is not None and not callable(extra):
            raise ConfigError("extra", type(extra).__name__, "give a function: what it returns is saved")
        if config.paths and not config.checkpoints:
            combinations.NONE_KEPT.refuse("checkpoints_kept", 0)
        if self._handler is None:
            self._handler = SigtermHandler()
            self._restore = finalizer = weakref.finalize(optimizer, self._handler.restore)
            finalizer.atexit = False
        self._folder, self._extra = folder, extra
        self._model = _no_model if model is None else weakref.ref(model)  # whose hooks may hold the optimizer

    def end(self) -> None:
        """Commit no more; idempotent."""
        self._handler = self._extra = None
        self._restore()

    @property
    def _name(self) -> object:
        return "where the loop saves" if callable(self._folder) else self._folder

    @property
    def note(self) -> bool | None:
        """Whether this rank has had a SIGTERM; None where that is nobody's affair."""
        return None if self._handler is None else self._handler.has_signal

    def after_call(self, optimizer: StatefulOptimizer, told: bool | None) -> None:
        """Commit if a rank has had a SIGTERM, and have the handler before told of it there; not if that is for later.

        Args:
            optimizer: Whose state is saved.
            told: Whether any rank has noted one, if ranks have told each other in this call.
        """
        handler = self._handler
        if handler is None or not (any_rank(handler.has_signal) if told is None else told):
            return
        self.is_due = True
        if not self.is_late:
            self.commit(optimizer)

    def commit(self, optimizer: StatefulOptimizer) -> None:
        """Commit if that is due, and have the handler before told of the signal."""
        is_due, self.is_due = self.is_due, False
        if is_due and self._handler is not None:
            self._handler.commit(partial(self._save, optimizer), optimizer.wait_mirror, self._name)

    def _save(self, optimizer: StatefulOptimizer) -> None:
        if callable(self._folder):
            self._folder()
            optimizer.wait_checkpoint()
            return
        extra, failure = None, None
        try:
            extra = None if self._extra is None else self._extra()
        except Exception as error:
            failure = error
        if any_rank(failure is not None):  # else others would wait for this rank
            raise failure or CheckpointError("another rank's extra could not be made")
        optimizer.save_checkpoint(self._folder, model=self._model(), extra=extra)
        optimizer.wait_checkpoint()


def _no_model() -> None:
    """Return no model."""
