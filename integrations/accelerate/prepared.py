"""`Prepared`: Accelerate's wrapper with our optimizer's methods; and functions that replace Accelerate's methods.

A function that "Replaces" a method of an accelerator calls that of its class, `type(accelerator)`, which stays as it
is. A *pointer* is a dict that names the folder of our checkpoint, and is saved in place of all state.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from offload import CheckpointError, ConfigError
from offload.checkpoint.marker import Mark, mark_of, set_aside
from offload.combinations import BY_DEEPSPEED, GATHERED_TO_SAVE
from offload.integrations.shared import (
    POINTER,
    check_clips_by_value,
    disable_no_sync,
    find_clipping_optimizer,
    ours,
    pointer,
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
"""Accelerate's `distributed_type`s that shard optimizers, which is refused but for FSDP2."""

FILE = "optimizer"
"""Accelerate's name for the file of the first optimizer, without `.bin`."""

FOLDER = "optimizer_state"
"""The optimizer's folder in what `save_state` writes; a number follows for all but the first one."""


class Prepared(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer that `accelerator.prepare` has returned, after `enable` has been called with it."""

    pointer: dict[str, Any] | None = None
    """What `state_dict` returns in place of all state while `save_state` runs."""

    loading_folder: str = ""
    """The folder that `load_state` reads."""

    schedulers: Sequence[Any] = ()
    """The prepared schedulers of this optimizer, if a checkpoint is saved on a SIGTERM."""

    has_scheduler_stepped = True
    """Whether a scheduler has stepped since the last step: a SIGTERM's checkpoint waits for that."""

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Make Accelerate's step; then save if a SIGTERM has come, unless a scheduler's step is expected first."""
        result = super().step(*arguments, **options)
        if self.gradient_state.sync_gradients:  # else Accelerate has only accumulated gradients
            # A scheduler that has stepped after the last step is expected to do so after this one.
            steps_scheduler_next = bool(self.schedulers) and self.has_scheduler_stepped
            self.has_scheduler_stepped = False
            if not steps_scheduler_next:
                self.optimizer.preemption.commit(self.optimizer)
        return result

    def after_schedule(self) -> None:
        """Note that a scheduler has stepped; save now if a SIGTERM has come."""
        self.has_scheduler_stepped = True
        self.optimizer.preemption.commit(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of our optimizer that Accelerate's wrapper does not have."""
        if name == "optimizer":  # not set yet, while a copy of this is made: the next line would recurse
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the pointer while `save_state` runs, else all state."""
        return self.pointer or super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the checkpoint that a pointer names, or torch's state."""
        if POINTER in state_dict:
            self.optimizer.load_checkpoint(os.path.join(self.loading_folder, state_dict[POINTER]))
        else:  # of torch's
            super().load_state_dict(state_dict)


def enable(accelerator: Any, optimizer: Any, *, commit_on_sigterm: str | os.PathLike[str] | None = None) -> Any:
    """Let an accelerator save and load a prepared optimizer of ours by its checkpoints, without moving its state.

    Methods of this accelerator alone are replaced: `clip_grad_norm_`, `clip_grad_value_`, `save_state`, `load_state`;
    and `no_sync`, if there is one process and FSDP2 keeps its weights in host memory. Under FSDP2 the optimizer
    begins anew with what `prepare` has made of its parameters, so no step may have been taken.

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
        _prepare_for_fsdp2(accelerator)
        ours(optimizer).reopen()  # `prepare` has replaced what it was made for
    elif accelerator.distributed_type in SHARDED:
        BY_DEEPSPEED.refuse("accelerator", str(accelerator.distributed_type))
    prepared: weakref.WeakSet[Prepared] | None = vars(accelerator).get("offload_prepared")
    if prepared is None:  # the first call for this accelerator
        # Weak references, as the accelerator lets go of its optimizers in `free_memory`.
        prepared = accelerator.offload_prepared = weakref.WeakSet()
        _set_interrupted_aside(accelerator)
        accelerator.clip_grad_norm_ = partial(_clip_grad_norm, accelerator, prepared)
        accelerator.clip_grad_value_ = partial(_clip_grad_value, accelerator, prepared)
        accelerator.save_state = partial(_save_state, accelerator, prepared)
        accelerator.load_state = partial(_load_state, accelerator)
        accelerator.register_load_state_pre_hook(partial(_before_load, prepared))
    if optimizer not in prepared:
        optimizer.__class__ = Prepared  # the object is the one that the accelerator knows
        prepared.add(optimizer)
        tell_last_pass(ours(optimizer), accelerator)
        models = accelerator._models
        # Modules have to be hooked as they are called. A module that Accelerate compiles is in `_models` as it was
        # before, except under FSDP2, and only the caller has the compiled one. So none is hooked to wait for weights
        # if Accelerate compiles.
        hide_steps(ours(optimizer), models if accelerator.state.dynamo_plugin.backend == "NO" else (), models)
    if commit_on_sigterm is not None:
        _commit_on_sigterm(accelerator, optimizer, commit_on_sigterm)
    return optimizer


def _commit_on_sigterm(accelerator: Any, optimizer: Prepared, folder: str | os.PathLike[str]) -> None:
    """Have a SIGTERM save a whole folder, once both the optimizer and its scheduler have stepped."""
    accelerator_ref = weakref.ref(accelerator)  # weak, as the accelerator has the optimizer, which keeps `save`

    def save() -> None:
        """Save all that the accelerator has, if it still exists."""
        if (alive := accelerator_ref()) is not None:
            alive.save_state(os.fspath(folder))

    inner = ours(optimizer)
    inner.commit_on_sigterm(save)
    inner.preemption.is_late = True  # `Prepared` has it commit, after its own step or the scheduler's
    optimizer.schedulers = [known for known in accelerator._schedulers if optimizer in known.optimizers]
    for scheduler in optimizer.schedulers:
        if "step" not in vars(scheduler):  # else an earlier call has replaced it
            scheduler.step = partial(_step_scheduler, optimizer, scheduler)


def _step_scheduler(optimizer: Prepared, scheduler: Any, *arguments: Any, **options: Any) -> None:
    """Replaces `AcceleratedScheduler.step`: then tell the optimizer, whose save on a SIGTERM may have waited."""
    type(scheduler).step(scheduler, *arguments, **options)
    if optimizer.gradient_state.sync_gradients:
        optimizer.after_schedule()


def _set_interrupted_aside(accelerator: Any) -> None:
    """Move folders of interrupted saves out of the folder in which `load_state` looks for the last checkpoint."""
    config = accelerator.project_configuration
    if config.automatic_checkpoint_naming and accelerator.project_dir is not None:
        project_folder = os.fspath(accelerator.project_dir)
        set_aside(os.path.join(project_folder, "checkpoints"), re.compile(r"checkpoint_\d+"), project_folder)


def _prepare_for_fsdp2(accelerator: Any) -> None:
    """With one process, whose FSDP2 keeps weights in host memory, have gradients move there in each micro-step.

    In any other use of FSDP2 nothing is done.

    Raises:
        ConfigError: FSDP2 would have all weights on the device to save them.
    """
    plugin, fsdp = accelerator.state.fsdp_plugin, import_module("torch.distributed.fsdp")
    if accelerator.num_processes == 1 and isinstance(plugin.cpu_offload, fsdp.CPUOffloadPolicy):
        if plugin.state_dict_type == fsdp.StateDictType.FULL_STATE_DICT:
            GATHERED_TO_SAVE.refuse("state_dict_type", "FULL_STATE_DICT")
        disable_no_sync(accelerator)


def _clip_grad_norm(
    accelerator: Any, prepared: Iterable[Prepared], parameters: Any, max_norm: float, norm_type: float = 2
) -> torch.Tensor:
    """Replaces `Accelerator.clip_grad_norm_`: return the same norm; our optimizer clips in its update.

    If no optimizer of ours can clip these parameters, Accelerate does; see `find_clipping_optimizer`.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    clipping = find_clipping_optimizer(map(ours, prepared), accelerator, parameters, norm_type)
    if clipping is None:
        return type(accelerator).clip_grad_norm_(accelerator, parameters, max_norm, norm_type)  # type: ignore[no-any-return]
    return clipping.clip_grad_norm_(max_norm)  # type: ignore[no-any-return]


def _clip_grad_value(accelerator: Any, prepared: Iterable[Prepared], parameters: Any, clip_value: float) -> None:
    """Replaces `Accelerator.clip_grad_value_`, which clips `.grad`: first refuse gradients that leave it."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    check_clips_by_value(map(ours, prepared), parameters)
    type(accelerator).clip_grad_value_(accelerator, parameters, clip_value)


def _save_state(accelerator: Any, enabled: Container[Prepared], *arguments: Any, **options: Any) -> Any:
    """Replaces `Accelerator.save_state`: each optimizer saves its own checkpoint, and Accelerate a pointer to it.

    Accelerate deletes old folders before it saves, by `total_limit`. So the folders of kept checkpoints are listed
    before that, and `_before_save` releases the checkpoints whose folders are gone by then. Collective.

    `enabled` are the optimizers that `enable` was called with.
    """
    prepared = [optimizer for optimizer in accelerator._optimizers if optimizer in enabled]
    if not prepared:  # after `free_memory`
        return type(accelerator).save_state(accelerator, *arguments, **options)
    existing_folders = [
        {folder for folder in optimizer.engine.checkpoints.kept if os.path.isdir(folder)} for optimizer in prepared
    ]
    accelerator.wait_for_everyone()  # else the first rank deletes folders that others have not listed yet
    before_save = partial(_before_save, accelerator, prepared, existing_folders)
    hook = accelerator.register_save_state_pre_hook(before_save)
    try:
        with _saving_fsdp_by_pointers(before_save):  # FSDP's optimizers are saved before hooks are called
            saved_folder = type(accelerator).save_state(accelerator, *arguments, **options)
    finally:
        hook.remove()
        for optimizer in prepared:
            optimizer.pointer = None
    end_folder(ours(prepared[0]), str(saved_folder))  # one mirror is enough for the folder: the first optimizer's
    return saved_folder


def _before_save(
    accelerator: Any, prepared: list[Prepared], existing: list[set[str]], models: Any, weights: Any, output_dir: str
) -> None:
    """Release deleted checkpoints, save new ones, and have `state_dict` return pointers to these.

    Accelerate calls this as a hook before a save, with the last three arguments.

    Args:
        accelerator: The accelerator that saves.
        prepared: The optimizers that are saved.
        existing: For each optimizer, folders of kept checkpoints that were there before the save.
        models: Unused.
        weights: Unused.
        output_dir: The folder that is saved to.
    """
    if prepared[0].pointer is not None:  # `_saving_fsdp_by_pointers` has called this already
        return
    begin_folder(output_dir)
    for number, (optimizer, existing_folders) in enumerate(zip(prepared, existing, strict=True)):
        for folder in sorted(existing_folders):
            if not os.path.isdir(folder):  # deleted since `_save_state` has listed it
                release(ours(optimizer).engine, folder)
        name = _numbered(FOLDER, number)
        save(optimizer, os.path.join(output_dir, name))
        optimizer.pointer = pointer(ours(optimizer), name, "accelerate")


def _load_state(accelerator: Any, *arguments: Any, **options: Any) -> Any:
    """Replaces `Accelerator.load_state`: optimizers of ours load what pointers name."""
    with _saving_fsdp_by_pointers():
        return type(accelerator).load_state(accelerator, *arguments, **options)


@contextlib.contextmanager
def _saving_fsdp_by_pointers(before_save: Callable[..., None] | None = None) -> Iterator[None]:
    """While this context lasts, replace Accelerate's functions that save and load models and optimizers under FSDP.

    The replacements save and load optimizers of ours as pointers. Accelerate calls these functions, those of models
    first, before its hooks. So the replacements do the hooks' work, too: they mark the folder before anything is
    written to it, and check its mark before anything is read.

    Args:
        before_save: The hook before a save; None in a load.
    """
    module = import_module("accelerate.accelerator")
    save_theirs, load_theirs = module.save_fsdp_optimizer, module.load_fsdp_optimizer
    save_their_model, load_their_model = module.save_fsdp_model, module.load_fsdp_model

    def save_model(plugin: Any, accelerator: Any, model: Any, folder: str, *given: Any, **options: Any) -> Any:
        """Replaces `save_fsdp_model`."""
        if before_save is not None:
            begin_folder(folder)
        return save_their_model(plugin, accelerator, model, folder, *given, **options)

    def load_model(plugin: Any, accelerator: Any, model: Any, folder: str, *given: Any, **options: Any) -> Any:
        """Replaces `load_fsdp_model`."""
        _check_whole(folder)
        return load_their_model(plugin, accelerator, model, folder, *given, **options)

    def file_of(*given: Any, **options: Any) -> str:
        """Return what Accelerate calls an optimizer's file, by `optimizer_index`, the sixth argument."""
        number = given[5] if len(given) > 5 else options.get("optimizer_index", 0)
        return f"{_numbered(FILE, number)}.bin"

    def save_ours(*given: Any, **options: Any) -> None:
        """Replaces `save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, optimizer_index)`."""
        _, accelerator, optimizer, _, folder, *_ = given
        if before_save is None or not isinstance(optimizer, Prepared):  # within a load, or of another optimizer
            save_theirs(*given, **options)
            return
        before_save(None, None, folder)  # sets `optimizer.pointer`, which `state_dict` returns
        if accelerator.is_main_process:
            torch.save(optimizer.state_dict(), os.path.join(folder, file_of(*given, **options)))

    def load_ours(*given: Any, **options: Any) -> None:
        """Replaces `load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, optimizer_index)`."""
        _, _, optimizer, _, folder, *_ = given
        # Another optimizer, or a checkpoint that was saved without ours.
        if not isinstance(optimizer, Prepared) or not os.path.isdir(os.path.join(folder, FOLDER)):
            load_theirs(*given, **options)
            return
        _before_load([optimizer], None, folder)
        optimizer.load_state_dict(torch.load(os.path.join(folder, file_of(*given, **options)), weights_only=True))

    with contextlib.ExitStack() as undo:
        replace(undo, module, "save_fsdp_model", save_model)
        replace(undo, module, "load_fsdp_model", load_model)
        replace(undo, module, "save_fsdp_optimizer", save_ours)
        replace(undo, module, "load_fsdp_optimizer", load_ours)
        yield


def _numbered(name: str, number: int) -> str:
    """Return a name for one of several optimizers, as Accelerate numbers its own: the first has the bare name."""
    return f"{name}_{number}" if number else name


def _before_load(prepared: Iterable[Prepared], models: Any, input_dir: str) -> None:
    """Refuse a folder that is not whole; note the folder for `load_state_dict`. Accelerate's hook before a load."""
    _check_whole(input_dir)
    for known in prepared:
        known.loading_folder = str(input_dir)


def _check_whole(folder: str) -> None:
    """Raise `CheckpointError` if a folder's marker says that its save has begun and not ended."""
    if mark_of(str(folder)) is Mark.BEGUN:
        raise CheckpointError(f"{folder} is not whole, as its save was interrupted, or is under way: load another")
