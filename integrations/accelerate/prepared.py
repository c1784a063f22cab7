"""`Prepared`: Accelerate's wrapper with the methods of our optimizer; and replaced methods of its accelerator."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from offload import CheckpointError, ConfigError
from offload.checkpoint.marker import Mark, mark_of, set_aside
from offload.combinations import BY_DEEPSPEED, GATHERED_TO_SAVE
from offload.integrations.shared import (
    POINTER,
    clipper,
    ours,
    pointer,
    reduce_always,
    release,
    replace,
    save,
    tell_last_pass,
)
from offload.optim.folders import begin_folder, end_folder
from offload.optim.hiding import hide_steps

try:
    AcceleratedOptimizer: Any = import_module("accelerate.optimizer").AcceleratedOptimizer
except ImportError as error:
    raise ConfigError("accelerate", f"cannot be imported: {error}", "pip install accelerate") from error

SHARDED = "DEEPSPEED", "FSDP", "MEGATRON_LM"

FILE = "optimizer.bin"
"""Accelerate's name for the file of the first optimizer."""

FOLDER = "optimizer_state"
"""The optimizer's folder in what `save_state` writes; a number follows for all but the first one."""


class Prepared(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer that `accelerator.prepare` has returned, after `enable` has been called with it."""

    pointer: dict[str, Any] | None = None
    """What `state_dict` returns in place of all state while `save_state` runs."""

    loaded_from: str = ""
    """The folder that `load_state` reads."""

    schedulers: Sequence[Any] = ()
    """The prepared schedulers of this optimizer, if a checkpoint is saved on a SIGTERM."""

    is_scheduled = True
    """Whether a scheduler has stepped since the last step: a SIGTERM's checkpoint waits for that."""

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Make Accelerate's step; save on a SIGTERM, unless a scheduler steps next."""
        result = super().step(*arguments, **options)
        if self.gradient_state.sync_gradients:
            is_waiting, self.is_scheduled = self.is_scheduled and bool(self.schedulers), False
            if not is_waiting:
                self.optimizer.preemption.commit(self.optimizer)
        return result

    def after_schedule(self) -> None:
        """Note that a scheduler has stepped; save now if a SIGTERM has come."""
        self.is_scheduled = True
        self.optimizer.preemption.commit(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # while a copy of this is made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        return self.pointer or super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if POINTER in state_dict:
            self.optimizer.load_checkpoint(os.path.join(self.loaded_from, state_dict[POINTER]))
        else:  # of torch's
            super().load_state_dict(state_dict)


def enable(accelerator: Any, optimizer: Any, *, commit_on_sigterm: str | os.PathLike[str] | None = None) -> Any:
    """Let an accelerator save and load a prepared optimizer of ours by its checkpoints, without moving its state.

    Methods of this accelerator alone are replaced: `clip_grad_norm_`, `save_state` and `load_state`; and `no_sync`,
    if there is one process and FSDP2 keeps its weights in host memory. Under FSDP2 the optimizer begins anew with
    what `prepare` has made of its parameters, so no step may have been taken.

    Args:
        accelerator: The one that has prepared the optimizer.
        optimizer: What its `prepare` has returned for one of our optimizers. A second call changes nothing else.
        commit_on_sigterm: Save on all ranks, by `save_state` to this folder, at the end of the step in which one of
            them gets a SIGTERM; then the handler that was there before runs, which by default ends the process.
            If a scheduler is prepared and steps with the optimizer, the save comes after its step. Counters of a loop
            have to be right by then, or be in a data loader that is prepared with `use_stateful_dataloader`.

    Returns:
        `optimizer`, which has the methods and properties of ours now.

    Raises:
        ConfigError: The optimizer is not one of ours, or has not been prepared, or is sharded by DeepSpeed or FSDP1;
            or FSDP2 would have all weights on the device to save them.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise ConfigError("optimizer", type(optimizer).__name__, "give what accelerator.prepare has returned for it")
    if ours(optimizer) is None:
        allowed = "give one of offload's, such as offload.AdamW"
        raise ConfigError("optimizer", type(optimizer.optimizer).__name__, allowed)
    if getattr(accelerator, "is_fsdp2", False):
        _check_fsdp(accelerator)
        ours(optimizer).reopen()  # `prepare` has replaced what it was made for
    elif accelerator.distributed_type in SHARDED:
        BY_DEEPSPEED.refuse("accelerator", str(accelerator.distributed_type))
    prepared: list[Prepared] = vars(accelerator).setdefault("offload_prepared", [])
    if not prepared:
        _set_aside(accelerator)
        accelerator.clip_grad_norm_ = partial(_clip, accelerator, prepared)
        accelerator.save_state = partial(_save_state, accelerator, prepared)
        accelerator.load_state = partial(_load_state, accelerator, prepared)
        accelerator.register_load_state_pre_hook(partial(_before_load, prepared))
    if not any(known is optimizer for known in prepared):
        optimizer.__class__ = Prepared  # the object is the one that the accelerator knows
        prepared.append(optimizer)
        tell_last_pass(ours(optimizer), accelerator)
        models = accelerator._models
        # A model that is compiled later only the caller has as it is called.
        hide_steps(ours(optimizer), models if accelerator.state.dynamo_plugin.backend == "NO" else (), models)
    if commit_on_sigterm is not None:
        _commit_on_sigterm(accelerator, optimizer, commit_on_sigterm)
    return optimizer


def _commit_on_sigterm(accelerator: Any, optimizer: Prepared, folder: str | os.PathLike[str]) -> None:
    """Save a whole folder on a SIGTERM, once both the optimizer and its scheduler have stepped."""
    accelerator_ref = weakref.ref(accelerator)  # which has the optimizer

    def save() -> None:
        if (alive := accelerator_ref()) is not None:
            alive.save_state(os.fspath(folder))

    inner = ours(optimizer)
    inner.commit_on_sigterm(save)
    inner.preemption.is_late = True
    optimizer.schedulers = [known for known in accelerator._schedulers if optimizer in known.optimizers]
    for scheduler in optimizer.schedulers:
        if "step" not in vars(scheduler):
            scheduler.step = partial(_schedule, optimizer, scheduler)


def _schedule(optimizer: Prepared, scheduler: Any, *arguments: Any, **options: Any) -> None:
    """Replaces `AcceleratedScheduler.step`."""
    type(scheduler).step(scheduler, *arguments, **options)
    if optimizer.gradient_state.sync_gradients:
        optimizer.after_schedule()


def _set_aside(accelerator: Any) -> None:
    """Move folders of interrupted saves out of the folder in which `load_state` looks for the last one."""
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming and accelerator.project_dir is not None:
        above = os.fspath(accelerator.project_dir)
        set_aside(os.path.join(above, "checkpoints"), re.compile(r"checkpoint_\d+"), above)


def _check_fsdp(accelerator: Any) -> None:
    """Let an accelerator with one process, whose FSDP2 keeps weights in host memory, move gradients there, too."""
    plugin, fsdp = accelerator.state.fsdp_plugin, import_module("torch.distributed.fsdp")
    if accelerator.num_processes == 1 and isinstance(plugin.cpu_offload, fsdp.CPUOffloadPolicy):
        if plugin.state_dict_type == fsdp.StateDictType.FULL_STATE_DICT:
            GATHERED_TO_SAVE.refuse("state_dict_type", "FULL_STATE_DICT")
        reduce_always(accelerator)


def _clip(
    accelerator: Any, prepared: list[Prepared], parameters: Any, max_norm: float, norm_type: float = 2
) -> torch.Tensor:
    """Replaces `Accelerator.clip_grad_norm_`: the norm is the same, and the update clips."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    clipping = clipper(map(ours, prepared), accelerator, parameters, norm_type)
    if clipping is None:
        return type(accelerator).clip_grad_norm_(accelerator, parameters, max_norm, norm_type)  # type: ignore[no-any-return]
    return clipping.clip_grad_norm_(max_norm)  # type: ignore[no-any-return]


def _save_state(accelerator: Any, prepared: list[Prepared], *arguments: Any, **options: Any) -> Any:
    """Replaces `Accelerator.save_state`, which deletes old folders first, by `total_limit`."""
    folders_before = [{k for k in known.engine.checkpoints.kept if os.path.isdir(k)} for known in prepared]
    accelerator.wait_for_everyone()  # else the first rank deletes folders that others have not listed yet
    before = partial(_before_save, accelerator, prepared, folders_before)
    hook = accelerator.register_save_state_pre_hook(before)
    try:
        with _fsdp_by_pointers(before):
            folder = type(accelerator).save_state(accelerator, *arguments, **options)
    finally:
        hook.remove()
        for known in prepared:
            known.pointer = None
    end_folder(ours(prepared[0]), str(folder))
    return folder


def _before_save(
    accelerator: Any, prepared: list[Prepared], earlier: list[set[str]], models: Any, weights: Any, output_dir: str
) -> None:
    """Save each optimizer's checkpoint, and let `state_dict` return a pointer to it; release deleted ones first."""
    if prepared[0].pointer is not None:  # `_fsdp_by_pointers` has called this already
        return
    begin_folder(output_dir)
    for number, known in enumerate(prepared):
        for folder in sorted(earlier[number]):
            if not os.path.isdir(folder):
                release(ours(known).engine, folder)
        name = f"{FOLDER}_{number}" if number else FOLDER
        save(known, os.path.join(output_dir, name))
        known.pointer = pointer(ours(known), name, "accelerate")


def _load_state(accelerator: Any, prepared: list[Prepared], *arguments: Any, **options: Any) -> Any:
    """Replaces `Accelerator.load_state`."""
    with _fsdp_by_pointers():
        return type(accelerator).load_state(accelerator, *arguments, **options)


@contextlib.contextmanager
def _fsdp_by_pointers(before_save: Callable[..., None] | None = None) -> Iterator[None]:
    """Replace Accelerate's functions that save and load optimizers under FSDP: ours are saved as pointers.

    Accelerate calls them before its hooks, so they do what the hooks do.
    """
    module = import_module("accelerate.accelerator")
    save_theirs, load_theirs = module.save_fsdp_optimizer, module.load_fsdp_optimizer

    def save_ours(*given: Any, **options: Any) -> None:
        _, accelerator, optimizer, _, folder, *_ = given
        if before_save is None or not isinstance(optimizer, Prepared):
            save_theirs(*given, **options)
            return
        before_save(None, None, folder)
        if accelerator.is_main_process:
            torch.save(optimizer.state_dict(), os.path.join(folder, FILE))

    def load_ours(*given: Any, **options: Any) -> None:
        _, _, optimizer, _, folder, *_ = given
        if not isinstance(optimizer, Prepared) or not os.path.isdir(os.path.join(folder, FOLDER)):
            load_theirs(*given, **options)
            return
        _before_load([optimizer], None, folder)
        optimizer.load_state_dict(torch.load(os.path.join(folder, FILE), weights_only=True))

    with contextlib.ExitStack() as undo:
        replace(undo, module, "save_fsdp_optimizer", save_ours)
        replace(undo, module, "load_fsdp_optimizer", load_ours)
        yield


def _before_load(prepared: list[Prepared], models: Any, input_dir: str) -> None:
    if mark_of(str(input_dir)) is Mark.BEGUN:
        raise CheckpointError(f"{input_dir} is not whole, as its save was interrupted, or is under way: load another")
    for known in prepared:
        known.loaded_from = str(input_dir)
