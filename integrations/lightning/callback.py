"""`OffloadCallback`, and functions that replace methods of its Trainer's strategy and precision plugin.

A function that "Replaces" a method is set on one strategy or plugin alone. It calls the method of the class,
`type(strategy)`, which stays as it is. A *pointer* is a dict that a checkpoint has in place of all state: it names
the folder that has the state.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from offload import CheckpointError, ConfigError
from offload.checkpoint.marker import Marker
from offload.combinations import AVERAGED, BY_DEEPSPEED, WRITES_BEHIND
from offload.integrations.shared import POINTER, check_clips_by_value, figures_to_log, ours, pointer, release, save
from offload.optim.folders import begin_folder, end_folder
from offload.optim.hiding import hide_steps

try:
    Callback: Any = import_module("lightning.pytorch").Callback
except ImportError:
    try:
        Callback = import_module("pytorch_lightning").Callback
    except ImportError as error:
        raise ConfigError("lightning", f"cannot be imported: {error}", "pip install lightning") from error
_FSSPEC = import_module("fsspec.core")  # Lightning reads and writes checkpoints by it
url_to_fs, split_protocol = _FSSPEC.url_to_fs, _FSSPEC.split_protocol

AVERAGING = "StochasticWeightAveraging", "WeightAveraging"
"""Callbacks of Lightning's that average weights; beside them no step may go on into forward."""

WRAPPING = "_WrappingCheckpointIO"
"""Lightning's base class of plugins that write checkpoints by another, as `AsyncCheckpointIO` does in a thread."""

SUFFIX = ".offload-"
"""In the name of the folder beside a checkpoint: the text between the checkpoint's name and a number."""


class OffloadCallback(Callback):  # type: ignore[misc]
    """Keeps the state of a `Trainer`'s optimizer out of its checkpoints, and clips in the update.

    `x.ckpt` names the folder `x.ckpt.offload-N` beside it, which is committed before `x.ckpt` is written and deleted
    with it. For that, methods of the Trainer's strategy and precision plugin are replaced on these two objects. The
    Trainer has one optimizer, ours, as `_set_up` checks: hence `optimizers[0]`.
    """

    def __init__(self) -> None:
        self._folders_by_checkpoint: dict[str, set[str]] = {}
        """Folders that a checkpoint may name, by its path: several once a save of this process was interrupted."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace methods of the strategy and the precision plugin, before the optimizer is made."""
        if stage != "fit":
            return
        strategy, precision = trainer.strategy, trainer.precision_plugin
        if strategy.restore_checkpoint_after_setup:  # it shards, and has checkpoints of its own
            BY_DEEPSPEED.refuse("strategy", type(strategy).__name__)
        if WRAPPING in _class_names([strategy.checkpoint_io]):
            WRITES_BEHIND.refuse("plugins", type(strategy.checkpoint_io).__name__)
        # Optimizers of an earlier `fit` are freed before this one's are made.
        strategy.optimizers, strategy.lr_scheduler_configs = [], []
        # The replacements call methods of the class, so replacing again, as a second `fit` does, changes nothing.
        strategy.setup = partial(_set_up, strategy)
        strategy.optimizer_state = partial(_optimizer_state, strategy)
        strategy.load_optimizer_state_dict = partial(self._load_optimizer_state, trainer)
        strategy.save_checkpoint = partial(self._save_checkpoint, strategy)
        strategy.remove_checkpoint = partial(self._remove_checkpoint, strategy)
        strategy.teardown = partial(_teardown, strategy)
        precision.clip_grad_by_norm = partial(_clip_grad_by_norm, precision)
        precision.clip_grad_by_value = partial(_clip_grad_by_value, precision)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Drop gradients of an earlier `fit`, as the Trainer does, but also those that have left `.grad`."""
        ours(trainer.optimizers[0]).zero_grad()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the last step: the caller may read weights next."""
        ours(trainer.optimizers[0]).finish()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """Log figures of the last step, as often as Lightning logs."""
        every = trainer.log_every_n_steps  # 0: never
        # At step 0, after a micro-step that only accumulates, there is no last step yet.
        if trainer.loggers and every and trainer.global_step and trainer.global_step % every == 0:
            values = figures_to_log(ours(trainer.optimizers[0]), pl_module)
            # Lightning insists on a batch size where `training_step` has a `dataloader_iter`; any will do.
            pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def _save_checkpoint(
        self, strategy: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Replaces `Strategy.save_checkpoint`, on all ranks: save state to a new folder, then the file that names it.

        An older checkpoint of the same name stays whole until the new file replaces its file, as it names another
        folder. That folder is deleted last.

        A local folder is marked: a file in it says first that a save has begun, which shows if it is interrupted, and
        then that the folder is whole. A whole folder is mirrored together with the checkpoint's file, which the
        marker names as lying `beside` it. A folder in a bucket has no marker, and no mirror gets the file with it.
        """
        write = partial(type(strategy).save_checkpoint, strategy, checkpoint, filepath, storage_options)
        states = checkpoint.get("optimizer_states")
        if not states or POINTER not in states[0]:  # weights alone, or state that is not ours
            write()
            return
        path = _absolute(filepath)
        folder = strategy.broadcast(self._unused_folder(path) if strategy.is_global_zero else None)
        optimizer = ours(strategy.optimizers[0])
        is_local = split_protocol(path)[0] is None
        if is_local:  # folders in a bucket cannot be marked
            begin_folder(folder, Marker(beside=(os.path.basename(path),)))
        save(optimizer, folder)
        # `states[0]` is a pointer that names no folder yet: `_optimizer_state` has made it.
        checkpoint["optimizer_states"] = [{**states[0], POINTER: os.path.basename(folder)}]
        # Noted before the file is written: if that fails, the file may or may not name the folder.
        self._folders_by_checkpoint.setdefault(path, set()).add(folder)
        write()
        self._folders_by_checkpoint[path] = {folder}
        strategy.barrier()  # rank 0 alone writes the file: no rank goes on before it is there
        if is_local:
            end_folder(optimizer, folder)
        _delete_folders_beside(strategy, path, but=folder)

    def _unused_folder(self, path: str) -> str:
        """Return a folder beside the checkpoint `path`, for its state, that an older file `path` does not name."""
        if path not in self._folders_by_checkpoint:
            # An older checkpoint, of another run perhaps, may name any folder beside it. Without one, none is named.
            is_there = url_to_fs(path)[0].exists(path)
            self._folders_by_checkpoint[path] = {*_state_folders_beside(path)} if is_there else set()
        taken = self._folders_by_checkpoint[path]
        # One name more than are taken, so that one is unused.
        candidates = (f"{path}{SUFFIX}{number}" for number in range(len(taken) + 1))
        return next(folder for folder in candidates if folder not in taken)

    def _load_optimizer_state(self, trainer: Any, checkpoint: Mapping[str, Any]) -> None:
        """Replaces `Strategy.load_optimizer_state_dict`: load the folder that a checkpoint names, if it names one."""
        optimizer, states = ours(trainer.optimizers[0]), checkpoint["optimizer_states"]
        if len(states) != 1:
            raise ConfigError(
                "ckpt_path", trainer.ckpt_path, f"it has {len(states)} optimizers; go on from one with 1"
            )
        if POINTER not in states[0]:  # Lightning has saved all state, without this callback
            optimizer.load_state_dict(states[0])
            return
        path = _absolute(trainer.ckpt_path)
        # With `save_last="link"` the last checkpoint is a link to the one that has the folder beside it.
        path = os.path.realpath(path) if split_protocol(path)[0] is None else path
        folder = os.path.join(os.path.dirname(path), states[0][POINTER])
        try:
            optimizer.load_checkpoint(folder)
        except CheckpointError as error:
            raise CheckpointError(
                f"the optimizer's state of {path} cannot be loaded: {error}. It belongs into {folder}: copy that "
                "folder with the checkpoint, or load the weights alone, with LightningModule.load_from_checkpoint"
            ) from error
        self._folders_by_checkpoint[path] = {folder}

    def _remove_checkpoint(self, strategy: Any, filepath: Any) -> None:
        """Replaces `Strategy.remove_checkpoint`, on all ranks: then delete the folders with its state, too."""
        path = _absolute(filepath)
        type(strategy).remove_checkpoint(strategy, filepath)
        self._folders_by_checkpoint.pop(path, None)
        _delete_folders_beside(strategy, path)


def _class_names(objects: Iterable[Any]) -> set[str]:
    """Return the names of the objects' classes, and of those that these inherit from."""
    return {kind.__name__ for one in objects for kind in type(one).__mro__}


def _set_up(strategy: Any, trainer: Any) -> None:
    """Replaces `Strategy.setup`, which makes the optimizer: check it, and let its steps overlap forward and backward.

    They overlap forward only if weights are not averaged and the module is not compiled.

    The callback's `on_fit_start` would be too late: there Lightning's `LearningRateFinder` trains, maybe before it.
    """
    type(strategy).setup(strategy, trainer)
    if trainer.state.fn != "fit":  # the replacement of an earlier `fit` stays, and serves `test`, too
        return
    optimizer_names = [type(optimizer).__name__ for optimizer in strategy.optimizers]
    if len(optimizer_names) != 1 or ours(strategy.optimizers[0]) is None:
        allowed = "have configure_optimizers return one of offload's, such as offload.AdamW, and no other"
        raise ConfigError("optimizers", ", ".join(optimizer_names) or "none", allowed)
    optimizer, module = ours(strategy.optimizers[0]), trainer.lightning_module
    is_compiled = getattr(module, "_compiler_ctx", None) is not None  # its hooks may be those of another run
    may_overlap_forward = _class_names(trainer.callbacks).isdisjoint(AVERAGING) and not is_compiled
    if not may_overlap_forward:
        AVERAGED.check("overlap", optimizer.config.overlap, averaging=" and ".join(AVERAGING))
    # Not the module itself: its `training_step` uses its own parameters, and is no call of a module. What reduces
    # gradients is `strategy.model`, the module in DDP's wrapper if there is one.
    hide_steps(optimizer, module.children() if may_overlap_forward else (), [strategy.model])


def _optimizer_state(strategy: Any, optimizer: Any) -> dict[str, Any]:
    """Replaces `Strategy.optimizer_state`: return a pointer whose folder `_save_checkpoint` fills in."""
    own = ours(optimizer)
    state: dict[str, Any]
    state = type(strategy).optimizer_state(strategy, optimizer) if own is None else pointer(own, None, "lightning")
    return state


def _teardown(strategy: Any) -> None:
    """Replaces `Strategy.teardown`: finish the last step, then call the class's `teardown` without optimizers.

    With optimizers it would read all of their state to move it to host memory.
    """
    optimizers, strategy.optimizers = strategy.optimizers, []
    # Even if a `finish` raises, the class's `teardown` is called, and then the optimizers are put back: the callback
    # that was added last runs first.
    with contextlib.ExitStack() as at_end:
        at_end.callback(setattr, strategy, "optimizers", optimizers)
        at_end.callback(type(strategy).teardown, strategy)
        for optimizer in filter(None, map(ours, optimizers)):
            optimizer.finish()  # training may have ended with an error; `teardown` moves weights, too


def _clip_grad_by_norm(precision: Any, optimizer: Any, clip_val: float) -> None:
    """Replaces `Precision.clip_grad_by_norm`: our optimizer clips in the update, unless a scaler is used."""
    own = ours(optimizer)
    if own is None or getattr(precision, "scaler", None) is not None:  # which changes gradients itself
        type(precision).clip_grad_by_norm(precision, optimizer, clip_val)
    elif clip_val > 0:  # else nothing is to be clipped
        own.clip_grad_norm_(clip_val)


def _clip_grad_by_value(precision: Any, optimizer: Any, clip_val: float) -> None:
    """Replaces `Precision.clip_grad_by_value`, which clips `.grad`: first refuse gradients that leave it."""
    own = ours(optimizer)
    if own is not None:
        check_clips_by_value([own], precision.main_params(optimizer))
    type(precision).clip_grad_by_value(precision, optimizer, clip_val)


def _absolute(path: Any) -> str:
    """Return a checkpoint's path, made absolute if it is a local one."""
    name = str(path)
    scheme, _ = split_protocol(name)
    if scheme not in (None, "s3"):
        raise ConfigError("filepath", name, "a directory, or s3://bucket/prefix, has the optimizer's state beside it")
    return os.path.abspath(name) if scheme is None else name


def _state_folders_beside(path: str) -> list[str]:
    """Return the folders beside a checkpoint whose names say that they have its state, by `SUFFIX`; [] if none."""
    parent, name = os.path.split(path)
    files, directory = url_to_fs(parent)
    with contextlib.suppress(FileNotFoundError):
        # With `refresh`, as fsspec may remember an older list of a bucket.
        entries = sorted(
            os.path.basename(path.rstrip("/")) for path in files.ls(directory, detail=False, refresh=True)
        )
        return [f"{parent}/{entry}" for entry in entries if entry.startswith(name + SUFFIX)]
    return []


def _delete_folders_beside(strategy: Any, path: str, but: str | None = None) -> None:
    """Release, then delete, the state folders beside a checkpoint except `but`. Collective."""
    unwanted = [folder for folder in _state_folders_beside(path) if folder != but] if strategy.is_global_zero else []
    for folder in strategy.broadcast(unwanted):
        release(ours(strategy.optimizers[0]).engine, folder)  # each rank its own part
        # A rank that sees the folder vanish while it releases takes it for moved, and keeps its part.
        strategy.barrier()
        if strategy.is_global_zero:
            files, directory = url_to_fs(folder)
            files.rm(directory, recursive=True)
