"""Switching it on and off: the one place where transformers is patched."""

from __future__ import annotations

import contextlib
import functools
import glob
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import torch

import offload
from offload import CheckpointError, ConfigError, OffloadConfig
from offload.checkpoint.marker import WHOLE, Mark, mark_of, set_aside
from offload.combinations import DEEPSPEED_TRAINER, FSDP_TRAINER
from offload.integrations import shared
from offload.integrations.shared import POINTER
from offload.integrations.transformers import saving
from offload.integrations.transformers.saving import FOLDER
from offload.optim.hiding import hide_steps

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...]]] = {
    "offload_adamw": (offload.AdamW, ("betas", "eps")),
    "offload_adam": (offload.Adam, ("betas", "eps")),
    "offload_lion": (offload.Lion, ("betas",)),
    "offload_adagrad": (offload.Adagrad, ()),
    "offload_sgd": (offload.SGD, ()),
    "offload_muon": (offload.Muon, ("betas", "adamw_eps", "adjust_lr_fn")),
}
"""What can be given as `optim`: the class, and which training arguments it takes beside learning rate and decay."""

log = logging.getLogger("offload")

_undo = contextlib.ExitStack()
"""What `enable` has replaced; closing it twice does nothing."""
_said_other = False


def enable(
    config: OffloadConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    activation_memory: int | str | None = None,
    commit_on_sigterm: bool = False,
) -> None:
    """Let a `Trainer` be given `optim="offload_adamw"`, or another name of `OPTIMIZERS`.

    Args:
        config: Tiers and budgets of the optimizers that Trainers make from now on: a mapping of the fields of
            `OffloadConfig`, or a JSON file of one. Where it has no `checkpoints_kept`, `save_total_limit` says it.
        activation_memory: Host memory for saved tensors, which leave for the paths beyond: each training step is in
            `activations_on_paths(model, activation_memory)`. None: they stay where they are.
        commit_on_sigterm: Have a Trainer save a checkpoint at the end of the step in which any rank gets a SIGTERM;
            then the handler that was there before runs, which by default ends the process.

    Raises:
        ConfigError: The config cannot be used, a path of it included, or transformers is not there or lacks what is
            relied on.
    """
    global _undo, _said_other
    if isinstance(config, OffloadConfig):
        settings = config
    else:
        settings = OffloadConfig.from_dict({} if config is None else shared.fields(config))
    settings.check_paths()  # now, and not when a model has been loaded
    try:
        trainer = import_module("transformers.trainer").Trainer
        training_args = import_module("transformers.training_args")
        names, arguments = training_args.OptimizerNames, training_args.TrainingArguments
    except ImportError as error:
        raise ConfigError("transformers", f"cannot be imported: {error}", "pip install transformers") from error
    disable()
    _said_other = False
    wrappers: dict[str, Callable[[Any], Any]] = {
        "get_optimizer_cls_and_kwargs": lambda original: staticmethod(functools.partial(_choose, original, settings)),
        "create_optimizer": lambda original: functools.partialmethod(_create, original, commit_on_sigterm),
        "log": lambda original: functools.partialmethod(_log, original),
        "train": lambda original: functools.partialmethod(_resume, original),
        # These have no public name, and no callback stands in their place.
        "_save_checkpoint": lambda original: functools.partialmethod(_save_checkpoint, original),
        "_save_optimizer_and_scheduler": lambda original: functools.partialmethod(_save, original),
        "_load_optimizer_and_scheduler": lambda original: functools.partialmethod(_load, original),
        "_load_from_checkpoint": lambda original: functools.partialmethod(_load_model, original),
        "_load_best_model": lambda original: functools.partialmethod(_without_fsdp, original),
        "save_model": lambda original: functools.partialmethod(_without_fsdp, original),
    }
    if activation_memory is not None:
        wrappers["training_step"] = lambda original: functools.partialmethod(_train, original, activation_memory)
    gone = [name for name in (*wrappers, "_get_output_dir") if not hasattr(trainer, name)]
    if gone:
        allowed = f"use a release whose Trainer has {', '.join(gone)}"
        raise ConfigError("transformers", import_module("transformers").__version__, allowed)
    with contextlib.ExitStack() as undo:
        shared.replace(undo, names, "_missing_", classmethod(functools.partial(_optimizer_name, names._missing_)))
        for module in ("transformers.trainer", "transformers.trainer_utils"):
            if hasattr(import_module(module), "shutil"):
                shared.replace(undo, import_module(module), "shutil", saving.DELETING)
        shared.replace(undo, arguments, "__post_init__", functools.partialmethod(_begin, arguments.__post_init__))
        for name, wrapper in wrappers.items():
            shared.replace(undo, trainer, name, wrapper(getattr(trainer, name)))
        _undo = undo.pop_all()


def disable() -> None:
    """Undo `enable`; optimizers that were made stay as they are. Idempotent."""
    _undo.close()


def _optimizer_name(original: Callable[[Any], Any], kind: Any, value: Any) -> Any:
    """Replaces `OptimizerNames._missing_`, which is asked for names that it does not have."""
    if value not in OPTIMIZERS:
        return original(value)
    member = str.__new__(kind, value)
    member._name_, member._value_ = value.upper(), value
    return member


def _choose(
    original: Callable[..., Any], settings: OffloadConfig, args: Any, model: torch.nn.Module | None = None
) -> tuple[Any, dict[str, Any]]:
    """Replaces `Trainer.get_optimizer_cls_and_kwargs`."""
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIMIZERS:
        _say_other(name)
        return cast("tuple[Any, dict[str, Any]]", original(args, model))
    if getattr(args, "deepspeed", None):
        DEEPSPEED_TRAINER.refuse("optim", name)
    kind, taken = OPTIMIZERS[name]
    values = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon, "adamw_eps": args.adam_epsilon}
    values["adjust_lr_fn"] = "match_rms_adamw"  # a Trainer has one learning rate, which has to suit AdamW, too
    if settings.checkpoints_kept is None:
        settings = replace(settings, checkpoints_kept=_most_checkpoints(args) or 0)
    elif settings.paths and 0 < settings.checkpoints < (most := _most_checkpoints(args) or 0):
        advice = "leave it out, or write %d: save_total_limit, and one for the next"
        log.warning("with checkpoints_kept=%d each checkpoint is a copy; " + advice, settings.checkpoints, most)
    return _with_names(kind, model), {
        "lr": args.learning_rate,
        "offload": settings,
        **{key: values[key] for key in taken},
    }


def _say_other(name: str) -> None:
    """Warn once that a Trainer makes an optimizer that is not ours: a caller of `enable` has meant to use one."""
    global _said_other
    if not _said_other:
        _said_other = True
        log.warning(
            'a Trainer trains with optim="%s", whose state stays in memory; write optim="offload_adamw"', name
        )


def _most_checkpoints(args: Any) -> int | None:
    """Return the most checkpoints that a Trainer has at a time, including the next one; None for any number."""
    limit = args.save_total_limit
    if limit is None or limit <= 0:
        return None
    return int(max(limit, 2 if args.load_best_model_at_end else 1)) + 1  # an old one goes when the new one is whole


def _with_names(kind: type[torch.optim.Optimizer], model: torch.nn.Module | None) -> type[torch.optim.Optimizer]:
    """Return an optimizer's class that is given a model's parameters with their names, as in checkpoints."""
    names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}

    class Named(kind):  # type: ignore[misc, valid-type]
        def __init__(self, params: Iterable[Any], *arguments: Any, **options: Any) -> None:
            groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
            # All groups or none have names for torch, and an empty one has none.
            if all(group["params"] and all(id(p) in names for p in group["params"]) for group in groups):
                groups = [{**group, "params": [(names[id(p)], p) for p in group["params"]]} for group in groups]
            super().__init__(groups, *arguments, **options)

    Named.__name__ = Named.__qualname__ = kind.__name__
    return Named


def _ours(trainer: Any) -> Any:
    """Return a trainer's optimizer of ours, out of Accelerate's wrapper; None if it has none, or it is sharded."""
    by_fsdp = getattr(trainer, "is_fsdp_enabled", False) and not _has_weights_in_host(trainer)
    return None if by_fsdp or getattr(trainer, "is_deepspeed_enabled", False) else shared.ours(trainer.optimizer)


def _is_asked_for(args: Any) -> bool:
    """Return whether training arguments name one of our optimizers."""
    return str(getattr(args.optim, "value", args.optim)) in OPTIMIZERS


def _has_weights_in_host(trainer: Any) -> bool:
    """Return whether a Trainer uses FSDP with an optimizer of ours, which keeps weights in host memory."""
    return getattr(trainer, "is_fsdp_enabled", False) and _is_asked_for(trainer.args)


def _weights_to_host(trainer: Any) -> None:
    """Move weights to host memory, as the Trainer's settings say: FSDP2 with offloading, in one process.

    FSDP2 is applied here; Accelerate does not apply it again.
    """
    plugin, accelerator, model = trainer.accelerator.state.fsdp_plugin, trainer.accelerator, trainer.model
    fsdp = import_module("torch.distributed.fsdp")
    offloads = isinstance(plugin.cpu_offload, fsdp.CPUOffloadPolicy)  # which FSDP2 alone has
    if not offloads or accelerator.num_processes > 1:
        said = f"FSDP{plugin.fsdp_version}, cpu_offload {offloads}, {accelerator.num_processes} processes"
        FSDP_TRAINER.refuse("fsdp", said)
    if isinstance(model, fsdp.FSDPModule):  # a second `train`
        return
    plugin.set_auto_wrap_policy(model)  # now, as it finds layers by the names of classes, which FSDP2 changes
    kinds = getattr(plugin.auto_wrap_policy, "keywords", {}).get("transformer_layer_cls", ())
    layers = [module for module in model.modules() if type(module) in kinds]
    if plugin.activation_checkpointing:
        plugin.activation_checkpointing = False  # Accelerate looks for layers by their names again
        import_module("accelerate.utils").fsdp2_apply_ac(accelerator, model)
    offload.weights_in_host_memory(model, layers=layers or None)
    if accelerator.native_amp:  # autocast, as without FSDP: FSDP's mixed precision would need fp32 weights
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    shared.reduce_always(accelerator)


def _without_fsdp(trainer: Any, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a method of the Trainer that saves or loads as if FSDP were off: weights in host memory need no more."""
    if not _has_weights_in_host(trainer):
        return original(trainer, *arguments, **options)
    trainer.is_fsdp_enabled = False
    try:
        return original(trainer, *arguments, **options)
    finally:
        trainer.is_fsdp_enabled = True


def _is_of_fsdp(checkpoint: str) -> bool:
    """Return whether a Trainer with FSDP and another optimizer has written a checkpoint."""
    written = glob.glob(os.path.join(glob.escape(checkpoint), "pytorch_model_fsdp*"))
    return bool(written) and not os.path.isdir(os.path.join(checkpoint, FOLDER))


def _begin(arguments: Any, original: Callable[..., None]) -> None:
    """Replaces `TrainingArguments.__post_init__`: set aside folders of interrupted saves before any is read."""
    original(arguments)
    if _is_asked_for(arguments) and arguments.output_dir:
        set_aside(os.fspath(arguments.output_dir), saving.CHECKPOINTS)


def _create(trainer: Any, original: Callable[..., Any], commits: bool, *arguments: Any, **options: Any) -> Any:
    """Replaces `Trainer.create_optimizer`: prepare weights, clip in the update, and add callbacks."""
    if _has_weights_in_host(trainer):
        _weights_to_host(trainer)
    optimizer = original(trainer, *arguments, **options)
    accelerator = trainer.accelerator
    if _ours(trainer) is not None and "clip_grad_norm_" not in vars(accelerator):
        clip = accelerator.clip_grad_norm_

        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            optimizer_now = _ours(trainer)  # a second `train` may have made another one
            if optimizer_now is None:
                return clip(parameters, max_norm, norm_type)
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if shared.clipper([optimizer_now], accelerator, parameters, norm_type) is None:
                return clip(parameters, max_norm, norm_type)
            return optimizer_now.clip_grad_norm_(max_norm)

        accelerator.clip_grad_norm_ = clip_grad_norm_
        trainer.add_callback(_overlap_callback(trainer))
        if commits:
            trainer_ref = weakref.ref(trainer)
            trainer.add_callback(saving.preempted(lambda: _ours(trainer) if (trainer := trainer_ref()) else None))
    if _ours(trainer) is not None:
        shared.tell_last_pass(_ours(trainer), accelerator)
    return optimizer


def _overlap_callback(trainer: Any) -> Any:
    """Return a callback that gives the optimizer its model, and waits at the end until all weights are updated."""

    class Overlapping(import_module("transformers").TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            ours = _ours(trainer)
            if ours is not None:
                called = [trainer.model_wrapped]  # wrapped, compiled
                hide_steps(ours, called, called)

        def on_train_end(self, *arguments: Any, **options: Any) -> None:
            ours = _ours(trainer)
            if ours is not None:
                ours.finish()
                ours.engine.checkpoints.release_deleted()

    return Overlapping()


def _train(
    trainer: Any,
    original: Callable[..., Any],
    memory: int | str,
    model: torch.nn.Module,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Replaces `Trainer.training_step` (forward and backward): activations are kept on the paths meanwhile."""
    ours = _ours(trainer)
    with contextlib.nullcontext() if ours is None else ours.activations_on_paths(model, memory):
        return original(trainer, model, *arguments, **options)


def _log(trainer: Any, original: Callable[..., Any], logs: dict[str, float], *arguments: Any, **options: Any) -> None:
    """Replaces `Trainer.log`: figures of the last step are logged with the loss."""
    ours = _ours(trainer) if "loss" in logs else None
    if ours is not None:
        logs = {**logs, **shared.logged(ours, trainer.model)}
    original(trainer, logs, *arguments, **options)


class _Pointer:
    """Replaces an optimizer while a Trainer writes or reads `optimizer.pt`."""

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any] | None:
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict


def _with_pointer(
    trainer: Any, original: Callable[..., Any], folder: str, content: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Call the Trainer's own method with a pointer in place of the optimizer; return the pointer's content then."""
    optimizer, pointer = trainer.optimizer, _Pointer(content)
    trainer.optimizer = pointer
    try:
        _without_fsdp(trainer, original, folder)
    finally:
        trainer.optimizer = optimizer
    return pointer.content


def _save_checkpoint(trainer: Any, original: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Replaces `Trainer._save_checkpoint`: folders saved with an optimizer of ours are marked as whole."""
    ours = _ours(trainer)
    if ours is None:
        original(trainer, *arguments, **options)
    else:
        saving.save(trainer, ours, original, *arguments, **options)


def _save(trainer: Any, original: Callable[..., Any], output_dir: str) -> None:
    """Replaces `Trainer._save_optimizer_and_scheduler`.

    This waits for the commit: the Trainer deletes an older checkpoint next, and a kill must leave a whole one.
    """
    ours = _ours(trainer)
    if ours is None:
        _without_fsdp(trainer, original, output_dir)
        return
    ours.engine.checkpoints.release_deleted()  # before the new one needs room
    most, folder = _most_checkpoints(trainer.args), os.path.join(output_dir, FOLDER)
    copy = most is None or ours.engine.config.checkpoints < most
    ours.save_checkpoint(folder, copy=copy)
    ours.wait_checkpoint()
    _with_pointer(trainer, original, output_dir, shared.pointer(ours, FOLDER, "transformers"))


def _load_model(trainer: Any, original: Callable[..., Any], checkpoint: str, *arguments: Any, **options: Any) -> Any:
    """Replaces `Trainer._load_from_checkpoint`, which a resume begins with: refuse a folder that is not whole."""
    if _is_asked_for(trainer.args):
        _check_whole(checkpoint)
    if _is_of_fsdp(checkpoint):
        return original(trainer, checkpoint, *arguments, **options)
    return _without_fsdp(trainer, original, checkpoint, *arguments, **options)


def _resume(
    trainer: Any,
    original: Callable[..., Any],
    resume_from_checkpoint: str | bool | None = None,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Replaces `Trainer.train`: if the last checkpoint is not whole, resume from the whole one before it.

    The Trainer would resume from the last one, so that a run that is restarted automatically would fail each time.
    A checkpoint that was named and is not the last one is not replaced by another.
    """
    wanted: Any = resume_from_checkpoint
    if _is_asked_for(trainer.args) and wanted:
        last_in = import_module("transformers.trainer_utils").get_last_checkpoint
        folder = trainer.args.output_dir if wanted is True else os.path.dirname(os.path.abspath(wanted))
        last: str = (last_in(folder) if os.path.isdir(folder) else None) or ""
        is_meant = last and (wanted is True or os.path.abspath(wanted) == os.path.abspath(last))
        missing = _first_missing(last) if is_meant else ""
        whole_ones = _whole_beside(last) if missing else []
        if whole_ones:
            wanted = whole_ones[-1]
            log.warning(
                "%s is not whole, as its save was interrupted (%s is missing): training goes on from %s",
                *(last, missing, wanted),
            )
    return original(trainer, wanted, *arguments, **options)


def _whole_beside(folder: str) -> list[str]:
    """Return the whole checkpoints beside one that is not, in the order of their steps."""
    beside = glob.glob(f"{glob.escape(os.path.normpath(folder).rpartition('-')[0])}-*")
    numbered = {path: path.rpartition("-")[2] for path in beside}
    return [
        path
        for _, path in sorted((int(n), path) for path, n in numbered.items() if n.isdecimal())
        if not _first_missing(path)
    ]


def _check_whole(checkpoint: str) -> None:
    """Raise `CheckpointError` for a Trainer's checkpoint that is not whole; the Trainer judges other folders."""
    is_saved = os.path.basename(os.path.abspath(checkpoint)).startswith("checkpoint-")
    is_saved |= os.path.isdir(os.path.join(checkpoint, FOLDER))
    missing = _first_missing(checkpoint) if is_saved and os.path.isdir(checkpoint) else ""
    if not missing:
        return
    folder, whole_ones = os.path.normpath(checkpoint), _whole_beside(checkpoint)
    advice = "no other one beside it is: delete it, and begin anew"
    if whole_ones:
        whole = whole_ones[-1]
        advice = f"{whole} is: delete {folder}, or go on with trainer.train(resume_from_checkpoint={whole!r})"
    raise CheckpointError(f"{folder} is not whole, as its save was interrupted ({missing} is missing); {advice}")


def _first_missing(checkpoint: str) -> str:
    """Return the name of a file that a whole checkpoint of a Trainer has and this one lacks; "" if it lacks none."""
    if mark_of(checkpoint) is Mark.BEGUN:
        return WHOLE
    wanted = [os.path.join(FOLDER, "COMMIT")] if os.path.isdir(os.path.join(checkpoint, FOLDER)) else []
    wanted.append("trainer_state.json")
    return next((name for name in wanted if not os.path.isfile(os.path.join(checkpoint, name))), "")


def _load(trainer: Any, original: Callable[..., Any], checkpoint: str | None) -> None:
    """Replaces `Trainer._load_optimizer_and_scheduler`: load what a pointer names, or torch's state."""
    ours = _ours(trainer)
    if ours is None or checkpoint is None:
        if checkpoint is not None and os.path.isfile(os.path.join(checkpoint, FOLDER, "COMMIT")):
            raise CheckpointError(
                f"{checkpoint} was written with an optimizer of offload, and the state of this one is not there: "
                f'resume with the same optim="offload_...", or from what this makes for torch\'s own: '
                f"offload export {checkpoint} --for transformers OUT"
            )
        _without_fsdp(trainer, original, checkpoint)
        return

    if _is_of_fsdp(checkpoint):
        original(trainer, checkpoint)
        return
    loaded = _with_pointer(trainer, original, checkpoint)
    if loaded is not None and POINTER in loaded:
        ours.load_checkpoint(os.path.join(checkpoint, loaded[POINTER]))
    elif loaded is not None:  # the state of torch's optimizer, or saved by a Trainer without `enable`
        ours.load_state_dict(loaded)
