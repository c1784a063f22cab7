"""Switching the integration on and off, and functions that then replace transformers' own; it is patched here alone.

A function that "Replaces" a method is called in its place, and is given that method as `original`. An optimizer "of
ours" is an `OffloadedOptimizer`; other optimizers are left to the Trainer.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, partialmethod
from importlib import import_module
from typing import Any, TypeVar, cast

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
from offload.optim.optimizer import OffloadedOptimizer

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], tuple[str, ...], tuple[str, ...]]] = {
    "offload_adamw": (offload.AdamW, ("betas", "eps"), ()),
    "offload_adam": (offload.Adam, ("betas", "eps"), ()),
    "offload_lion": (offload.Lion, ("betas",), ()),
    "offload_adagrad": (offload.Adagrad, (), ("lr_decay", "weight_decay", "eps")),
    "offload_sgd": (offload.SGD, (), ("momentum", "dampening", "weight_decay", "nesterov")),
    "offload_muon": (
        offload.Muon,
        ("betas", "adamw_eps", "adjust_lr_fn"),
        ("momentum", "nesterov", "ns_steps", "eps", "adamw_lr_ratio"),
    ),
}
"""By what can be given as `optim`: the optimizer's class; its arguments that are set by training arguments, beside
learning rate and weight decay; and those that are set by `optim_args`. As transformers has it for torch's class of
that name."""

_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
"""How `optim_args` may spell a truth value, in any case."""

_NUMBERS: dict[str, Callable[[str], Any]] = {"nesterov": lambda text: _FLAGS[text.lower()], "ns_steps": int}
"""By name, how values of `optim_args` are read that are not floats."""

_AS_NEAR = 0.9
"""Similarity (0 to 1) to a mistyped name from which one of ours is suggested, even if another of ours is nearer."""

_TRAINING_ARGS = "transformers.training_args"

log = logging.getLogger("offload")

C = TypeVar("C", bound=saving.Callback)

_undo = contextlib.ExitStack()
"""What `enable` has replaced; closing it twice does nothing."""
_warned_of_other_optimizer = _warned_of_copies = False


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
    global _undo, _warned_of_other_optimizer, _warned_of_copies
    if isinstance(config, OffloadConfig):
        settings = config
    else:
        settings = OffloadConfig.from_dict({} if config is None else shared.read_fields(config))
    settings.check_paths()  # now, and not when a model has been loaded
    try:
        trainer = import_module("transformers.trainer").Trainer
        training_args = import_module(_TRAINING_ARGS)
        names, arguments = training_args.OptimizerNames, training_args.TrainingArguments
    except ImportError as error:
        raise ConfigError("transformers", f"cannot be imported: {error}", "pip install transformers") from error
    disable()
    _warned_of_other_optimizer = _warned_of_copies = False
    wrappers = _wrappers(settings, activation_memory, commit_on_sigterm)
    # `_get_output_dir` is not replaced, but `saving.save` calls it.
    missing = [name for name in (*wrappers, "_get_output_dir") if not hasattr(trainer, name)]
    if missing:
        allowed = f"use a release whose Trainer has {', '.join(missing)}"
        raise ConfigError("transformers", import_module("transformers").__version__, allowed)
    with contextlib.ExitStack() as undo:
        shared.replace(undo, names, "_missing_", classmethod(partial(_ensure_optimizer_name, names._missing_)))
        # It depends on the release which of the two modules deletes checkpoints.
        for module in ("transformers.trainer", "transformers.trainer_utils"):
            if hasattr(import_module(module), "shutil"):
                shared.replace(undo, import_module(module), "shutil", saving.DELETION_HOOK)
        shared.replace(
            undo, arguments, "__post_init__", partialmethod(_set_interrupted_aside, arguments.__post_init__)
        )
        for name, wrapper in wrappers.items():
            shared.replace(undo, trainer, name, wrapper(getattr(trainer, name)))
        _undo = undo.pop_all()  # for `disable`; an error before this line has undone all replacements


def _wrappers(
    settings: OffloadConfig, activation_memory: int | str | None, commit_on_sigterm: bool
) -> dict[str, Callable[[Any], Any]]:
    """Return, by the name of each method of `Trainer` to replace, a function from that method to its replacement."""
    wrappers: dict[str, Callable[[Any], Any]] = {
        "get_optimizer_cls_and_kwargs": lambda original: staticmethod(partial(_choose_optimizer, original, settings)),
        "create_optimizer": lambda original: partialmethod(_create_optimizer, original, commit_on_sigterm),
        "log": lambda original: partialmethod(_log, original),
        "train": lambda original: partialmethod(_train, original, commit_on_sigterm),
        # No callback is called in place of any of these. Only the last one has a public name.
        "_save_checkpoint": lambda original: partialmethod(_save_checkpoint, original),
        "_save_optimizer_and_scheduler": lambda original: partialmethod(_save_optimizer, original),
        "_load_optimizer_and_scheduler": lambda original: partialmethod(_load_optimizer, original),
        "_load_from_checkpoint": lambda original: partialmethod(_load_model, original),
        "_load_best_model": lambda original: partialmethod(_call_as_without_fsdp, original),
        "save_model": lambda original: partialmethod(_call_as_without_fsdp, original),
    }
    if activation_memory is not None:
        wrappers["training_step"] = lambda original: partialmethod(_training_step, original, activation_memory)
    return wrappers


def disable() -> None:
    """Undo `enable`; optimizers that were made stay as they are. Idempotent."""
    _undo.close()


def watch() -> None:
    """Until `enable` is called, have training arguments that name one of our optimizers raise an error that says so.

    The import of this package calls this. Nothing else changes, and transformers is not imported: if it has not been
    yet, this is called again right after its import.
    """
    module = sys.modules.get(_TRAINING_ARGS)
    if module is None:
        sys.meta_path.insert(0, shared.AtImport(_TRAINING_ARGS, watch))
        return
    with contextlib.suppress(AttributeError):  # an unknown version, or one still being imported
        names = module.OptimizerNames
        names._missing_ = classmethod(partial(_refuse_until_enabled, names._missing_))


def _refuse_until_enabled(original: Callable[[Any], Any], kind: Any, value: Any) -> Any:
    """Replaces `OptimizerNames._missing_`, which an `Enum` calls for an unknown value: raise `ConfigError` for ours.

    It is never removed. While `enable` is in force, `_ensure_optimizer_name` stands before it and calls it as
    `original`. `kind` is `OptimizerNames`.
    """
    if value in OPTIMIZERS:
        allowed = "call offload.integrations.transformers.enable(...) first, in this process"
        raise ConfigError("optim", value, allowed)
    return original(value)


def _ensure_optimizer_name(original: Callable[[Any], Any], kind: Any, value: Any) -> Any:
    """Replaces `OptimizerNames._missing_`, which an `Enum` calls for an unknown value: return a member for our names.

    `kind` is `OptimizerNames`.

    Raises:
        ConfigError: The value is no name, and of all names one of ours is the nearest to it.
    """
    if value not in OPTIMIZERS:
        nearest = difflib.get_close_matches(str(value), [*OPTIMIZERS, *kind], 1)
        if nearest and nearest[0] in OPTIMIZERS:
            # Adam and AdamW are equally near to some mistakes, and train differently: then both are suggested.
            suggested = difflib.get_close_matches(str(value), OPTIMIZERS, 2, _AS_NEAR) or nearest
            meant = " or ".join(f'"{name}"' for name in suggested)
            raise ConfigError("optim", value, f"did you mean {meant}? ours are {', '.join(OPTIMIZERS)}")
        return original(value)
    # Made by hand, as an `Enum` takes no members later; it is not among the class's members, which stay as they are.
    member = str.__new__(kind, value)
    member._name_, member._value_ = value.upper(), value
    # Pickled as a plain string, so that `training_args.bin` can be read without `enable`, too.
    member.__reduce_ex__ = lambda protocol: (str, (str(value),))
    return member


def _choose_optimizer(
    original: Callable[..., Any], settings: OffloadConfig, args: Any, model: torch.nn.Module | None = None
) -> tuple[Any, dict[str, Any]]:
    """Replaces `Trainer.get_optimizer_cls_and_kwargs`: return the class and the arguments of one of `OPTIMIZERS`.

    Args:
        original: Returns those of other optimizers.
        settings: As `enable` was given them.
        args: The training arguments.
        model: The model, for the names of its parameters.
    """
    name = str(getattr(args.optim, "value", args.optim))  # of a member of `OptimizerNames`, or a string
    if name not in OPTIMIZERS:
        _warn_of_other_optimizer(name)
        return cast("tuple[Any, dict[str, Any]]", original(args, model))
    kind, accepted, accepted_as_text = OPTIMIZERS[name]
    values = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon, "adamw_eps": args.adam_epsilon}
    values["adjust_lr_fn"] = "match_rms_adamw"  # a Trainer has one learning rate, which has to suit AdamW, too
    max_checkpoints = _max_checkpoints(args) or 0  # 0 where their number has no limit: each is a copy then
    if settings.checkpoints_kept is None:
        settings = replace(settings, checkpoints_kept=max_checkpoints)
    _warn_of_copies(settings, max_checkpoints)
    options = {key: values[key] for key in accepted} | _read_optim_args(args.optim_args, name, accepted_as_text)
    return _named_class(kind, model), {"lr": args.learning_rate, "offload": settings, **options}


def _read_optim_args(text: str | None, optim: str, accepted: tuple[str, ...]) -> dict[str, Any]:
    """Return what a Trainer's `optim_args` say, such as "momentum=0.9,nesterov=true", by name.

    Raises:
        ConfigError: A name is not one of `accepted`, which are those of `optim`; or a value cannot be read.
    """
    values: dict[str, Any] = {}
    for pair in text.replace(" ", "").split(",") if text else ():
        name, _, value = pair.partition("=")
        if not accepted:
            own = "learning_rate, weight_decay, adam_beta1, adam_beta2 and adam_epsilon are arguments of their own"
            raise ConfigError("optim_args", pair, f"leave it out with {optim}: {own}")
        if name not in accepted:
            raise ConfigError("optim_args", pair, f"{optim} takes {', '.join(accepted)}")
        try:
            values[name] = _NUMBERS.get(name, float)(value)
        except (KeyError, ValueError):
            raise ConfigError("optim_args", pair, 'write a value, as in "momentum=0.9,nesterov=true"') from None
    return values


def _warn_of_other_optimizer(name: str) -> None:
    """Warn once that a Trainer makes an optimizer that is not ours: a caller of `enable` has meant to use one."""
    global _warned_of_other_optimizer
    if not _warned_of_other_optimizer:
        _warned_of_other_optimizer = True
        log.warning(
            'a Trainer trains with optim="%s", whose state stays in memory; write optim="offload_adamw"', name
        )


def _warn_of_copies(config: OffloadConfig, most: int) -> None:
    """Warn once that checkpoints are copies: a Trainer has up to `most` of them, and the paths keep fewer.

    0 for `most` means that their number has no limit: nothing is said then. Nor is anything said where
    `checkpoints_kept` is 0, as that asks for copies.
    """
    global _warned_of_copies
    if not _warned_of_copies and config.paths and 0 < config.checkpoints < most:
        _warned_of_copies = True
        advice = "write %d: save_total_limit, and one for the next (`enable` fills it in where it is left out)"
        log.warning("with checkpoints_kept=%d each checkpoint is a copy; " + advice, config.checkpoints, most)


def _max_checkpoints(args: Any) -> int | None:
    """Return the most checkpoints that a Trainer has at a time, including the next one; None for any number."""
    limit = args.save_total_limit
    if limit is None or limit <= 0:  # a Trainer takes both for no limit
        return None
    least = 1 if args.metric_for_best_model is None else 2  # the best one stays beside the last one
    return int(max(limit, least)) + 1  # an old one is deleted only when the new one is whole


def _named_class(kind: type[torch.optim.Optimizer], model: torch.nn.Module | None) -> type[torch.optim.Optimizer]:
    """Return a subclass of `kind` that names its parameters as the model does, so that checkpoints have these names.

    The Trainer gives an optimizer parameters without names. Without a model, or with parameters that are not the
    model's, they stay without.
    """
    names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}

    def has_names(group: Mapping[str, Any]) -> bool:
        """Return whether a group has parameters, all of them the model's."""
        return bool(group["params"]) and all(id(parameter) in names for parameter in group["params"])

    class Named(kind):  # type: ignore[misc, valid-type]
        def __init__(self, params: Iterable[Any], *arguments: Any, **options: Any) -> None:
            groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
            if all(map(has_names, groups)):  # torch wants names in all groups or in none
                groups = [{**group, "params": [(names[id(p)], p) for p in group["params"]]} for group in groups]
            super().__init__(groups, *arguments, **options)

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            """Add a group; name its parameters if those of the other groups have names: torch wants all or none.

            A parameter that is not the model's is named by its position.
            """
            group_index, params = len(self.param_groups), param_group.get("params")
            is_to_name = group_index and "param_names" in self.param_groups[0]
            if is_to_name and isinstance(params, Iterable) and not isinstance(params, set):  # else torch refuses it
                listed = [params] if isinstance(params, torch.Tensor) else [*params]
                param_group["params"] = [
                    (names.get(id(each), f"param_groups[{group_index}].params[{position}]"), each)
                    if isinstance(each, torch.Tensor)
                    else each  # a pair of name and parameter already, or something that torch refuses
                    for position, each in enumerate(listed)
                ]
            super().add_param_group(param_group)

    Named.__name__ = Named.__qualname__ = kind.__name__
    return Named


def _our_optimizer(trainer: Any) -> Any:
    """Return a Trainer's optimizer, out of Accelerate's wrapper, if it is one of ours; else None.

    None, too, if DeepSpeed or FSDP may shard the model. FSDP does not where it only keeps weights in host memory, in
    one process.
    """
    may_shard = getattr(trainer, "is_fsdp_enabled", False) and not _has_weights_in_host(trainer)
    if may_shard or getattr(trainer, "is_deepspeed_enabled", False):
        return None
    return shared.ours(trainer.optimizer)


def _names_ours(args: Any) -> bool:
    """Return whether training arguments name one of our optimizers."""
    # `optim` is a member of `OptimizerNames`, or a string.
    return str(getattr(args.optim, "value", args.optim)) in OPTIMIZERS


def _uses_ours(trainer: Any) -> bool:
    """Return whether a Trainer has an optimizer of ours, or will make one.

    It makes one whose name is in its training arguments, or whose class it was given as `optimizer_cls_and_kwargs`.
    """
    # The attribute is None if nothing was given; older releases have none.
    kind, _ = getattr(trainer, "optimizer_cls_and_kwargs", None) or (None, None)
    is_given = isinstance(kind, type) and issubclass(kind, OffloadedOptimizer)
    return is_given or _names_ours(trainer.args) or _our_optimizer(trainer) is not None


def _has_weights_in_host(trainer: Any) -> bool:
    """Return whether a Trainer uses FSDP, and its arguments name an optimizer of ours: weights are in host memory.

    `_move_weights_to_host` refuses any other use of FSDP with ours.
    """
    return getattr(trainer, "is_fsdp_enabled", False) and _names_ours(trainer.args)


def _move_weights_to_host(trainer: Any) -> None:
    """Apply FSDP2 so that it keeps the model's weights in host memory; Accelerate does not apply it again.

    That is the only use of FSDP which is supported: FSDP2 with `cpu_offload`, in one process. Others are refused.
    """
    accelerator, model = trainer.accelerator, trainer.model
    plugin = accelerator.state.fsdp_plugin
    fsdp = import_module("torch.distributed.fsdp")
    offloads = isinstance(plugin.cpu_offload, fsdp.CPUOffloadPolicy)  # which FSDP2 alone has
    if not offloads or accelerator.num_processes > 1:
        given = f"FSDP{plugin.fsdp_version}, cpu_offload {offloads}, {accelerator.num_processes} processes"
        FSDP_TRAINER.refuse("fsdp", given)
    if isinstance(model, fsdp.FSDPModule):  # a second `train`
        return
    plugin.set_auto_wrap_policy(model)  # now, as it finds layers by the names of classes, which FSDP2 changes
    # The policy that goes by classes of layers is a `functools.partial` now, with these classes as a keyword. Other
    # policies name no classes.
    layer_classes = getattr(plugin.auto_wrap_policy, "keywords", {}).get("transformer_layer_cls", ())
    layers = [module for module in model.modules() if type(module) in layer_classes]
    if plugin.activation_checkpointing:
        plugin.activation_checkpointing = False  # done here: Accelerate would look for layers by their old names
        import_module("accelerate.utils").fsdp2_apply_ac(accelerator, model)
    offload.weights_in_host_memory(model, layers=layers or None)  # None: the modules that the model's lists repeat
    if accelerator.native_amp:
        # Autocast, as without FSDP: FSDP's mixed precision would need fp32 weights. `evaluation_mode` keeps
        # Accelerate from wrapping the model in anything else.
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    shared.disable_no_sync(accelerator)


def _call_as_without_fsdp(trainer: Any, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a Trainer's method that saves or loads, which is `original`; also replaces two such methods.

    With weights in host memory the method runs as if FSDP were off: one process has all of each weight.
    """
    if not _has_weights_in_host(trainer):
        return original(trainer, *arguments, **options)
    trainer.is_fsdp_enabled = False
    try:
        return original(trainer, *arguments, **options)
    finally:
        trainer.is_fsdp_enabled = True


def _is_of_fsdp(checkpoint: str) -> bool:
    """Return whether a checkpoint was written by a Trainer with FSDP and another optimizer than ours.

    It has FSDP's files of weights, and no folder of ours.
    """
    written = glob.glob(os.path.join(glob.escape(checkpoint), "pytorch_model_fsdp*"))
    return bool(written) and not os.path.isdir(os.path.join(checkpoint, FOLDER))


def _set_interrupted_aside(arguments: Any, original: Callable[..., None]) -> None:
    """Replaces `TrainingArguments.__post_init__`: set folders of interrupted saves aside before any is read."""
    original(arguments)
    if _names_ours(arguments):
        _set_aside(arguments)


def _set_aside(arguments: Any) -> None:
    """Rename folders in `output_dir` whose save was interrupted, as our markers show: nobody is to load them."""
    if arguments.output_dir:
        set_aside(os.fspath(arguments.output_dir), saving.CHECKPOINTS)


def _create_optimizer(
    trainer: Any, original: Callable[..., Any], commits: bool, *arguments: Any, **options: Any
) -> Any:
    """Replaces `Trainer.create_optimizer`: move weights before; afterwards join an optimizer of ours to the Trainer.

    `commits` is whether a SIGTERM saves a checkpoint.
    """
    if _has_weights_in_host(trainer):
        _move_weights_to_host(trainer)
    optimizer = original(trainer, *arguments, **options)
    if _our_optimizer(trainer) is not None:
        _ensure_callbacks(trainer, commits)
        _join_accelerator(trainer)
    return optimizer


def _join_accelerator(trainer: Any) -> None:
    """Have Accelerate's clipping use the update of our optimizer, which asks Accelerate whether a pass is the last.

    Idempotent.
    """
    accelerator = trainer.accelerator
    shared.tell_last_pass(_our_optimizer(trainer), accelerator)
    if "clip_grad_norm_" in vars(accelerator):  # an earlier call has replaced it on this object
        return
    clip = accelerator.clip_grad_norm_

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip in the update if our optimizer can, else as Accelerate does."""
        optimizer_now = _our_optimizer(trainer)  # a second `train` may have made another one
        # A callback that sees gradients before the step has to see them clipped, which they are not until the update.
        if optimizer_now is None or (optimizer_now.keeps_grads and _shows_gradients(trainer)):
            return clip(parameters, max_norm, norm_type)
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if shared.find_clipping_optimizer([optimizer_now], accelerator, parameters, norm_type) is None:
            return clip(parameters, max_norm, norm_type)
        return optimizer_now.clip_grad_norm_(max_norm)

    accelerator.clip_grad_norm_ = clip_grad_norm_


def _shows_gradients(trainer: Any) -> bool:
    """Return whether a callback of the user's is called between clipping and the step, by `on_pre_optimizer_step`.

    It may read gradients, or change them without trace, by `.data`. transformers' own callbacks change none.
    """
    # A callback that does not define the method has that of `TrainerCallback`, a class of transformers.
    methods = (callback.on_pre_optimizer_step for callback in trainer.callback_handler.callbacks)
    return any(str(method.__module__).partition(".")[0] != "transformers" for method in methods)


class _Serving(saving.Callback):  # type: ignore[misc]
    """Prepares an optimizer of ours for training, and finishes it, whether the Trainer or its caller has made it."""

    def on_train_begin(self, *arguments: Any, **options: Any) -> None:
        """Begin without gradients; let steps overlap forward and backward, as the config's `overlap` says."""
        trainer, ours = self.trainer_ref(), self.optimizer()
        if trainer is not None and ours is not None:
            ours.zero_grad()  # also those that have left `.grad`, of a step that an error has ended
            _join_accelerator(trainer)
            as_called = [trainer.model_wrapped]  # compiled, or in DDP or FSDP2, which also reduce gradients
            hide_steps(ours, called=as_called, reducing=as_called)

    def on_train_end(self, *arguments: Any, **options: Any) -> None:
        """Wait for the last step, as the caller may read weights next; free store slots."""
        ours = self.optimizer()
        if ours is not None:
            ours.finish()
            ours.engine.checkpoints.release_deleted()  # those deleted since the last save: no other save follows


def _ensure_callbacks(trainer: Any, commits: bool) -> saving.Sigterm | None:
    """Have a Trainer call our callbacks; return the one that saves on a SIGTERM, if `commits`."""
    _ensure_callback(trainer, _Serving)
    return _ensure_callback(trainer, saving.Sigterm) if commits else None


def _ensure_callback(trainer: Any, kind: type[C]) -> C:
    """Return a Trainer's callback of a class of ours; add one if it has none."""
    for callback in trainer.callback_handler.callbacks:  # some may have been given from another Trainer's list
        if isinstance(callback, kind) and callback.trainer_ref() is trainer:
            return callback
    base = import_module("transformers").TrainerCallback
    # The class is made here, as transformers is not imported together with this package. Where callbacks are pickled,
    # a plain `TrainerCallback` takes the place of ours: the next Trainer adds its own.
    made_class = type(kind.__name__, (kind, base), {"__reduce__": lambda self: (base, ())})
    made: C = made_class(trainer, _our_optimizer)
    trainer.add_callback(made)
    return made


def _training_step(
    trainer: Any,
    original: Callable[..., Any],
    memory: int | str,
    model: torch.nn.Module,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Replaces `Trainer.training_step` (forward and backward): saved tensors beyond `memory` leave for the paths.

    `memory` is a size of host memory; see `activations_on_paths`.
    """
    ours = _our_optimizer(trainer)
    with contextlib.nullcontext() if ours is None else ours.activations_on_paths(model, memory):
        return original(trainer, model, *arguments, **options)


def _log(trainer: Any, original: Callable[..., Any], logs: dict[str, float], *arguments: Any, **options: Any) -> None:
    """Replaces `Trainer.log`: figures of the last step are logged with the loss."""
    ours = _our_optimizer(trainer) if "loss" in logs else None
    if ours is not None:
        logs = {**logs, **shared.figures_to_log(ours, trainer.model)}
    original(trainer, logs, *arguments, **options)


class _Pointer:
    """Stands in for an optimizer while a Trainer writes or reads `optimizer.pt`; `content` is the file's content."""

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any] | None:
        """Return what the Trainer is to write."""
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what the Trainer has read; nothing is loaded."""
        self.content = state_dict


def _call_with_pointer(
    trainer: Any, original: Callable[..., Any], folder: str, content: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Call a Trainer's method that writes or reads `optimizer.pt`, with a `_Pointer` in place of the optimizer.

    Args:
        trainer: The Trainer.
        original: Its method.
        folder: The checkpoint's folder.
        content: What the method is to write; None if it reads.

    Returns:
        What it has read, or `content`.
    """
    optimizer, pointer = trainer.optimizer, _Pointer(content)
    trainer.optimizer = pointer
    try:
        _call_as_without_fsdp(trainer, original, folder)
    finally:
        trainer.optimizer = optimizer
    return pointer.content


def _save_checkpoint(trainer: Any, original: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Replaces `Trainer._save_checkpoint`: folders saved with an optimizer of ours are marked as whole."""
    ours = _our_optimizer(trainer)
    if ours is None:
        original(trainer, *arguments, **options)
    else:
        saving.save(trainer, ours, original, *arguments, **options)


def _save_optimizer(trainer: Any, original: Callable[..., Any], output_dir: str) -> None:
    """Replaces `Trainer._save_optimizer_and_scheduler`: save our checkpoint, and write a pointer as `optimizer.pt`.

    This waits for the commit: the Trainer deletes an older checkpoint next, and a kill must leave a whole one.
    """
    ours = _our_optimizer(trainer)
    if ours is None:
        _call_as_without_fsdp(trainer, original, output_dir)
        return
    ours.engine.checkpoints.release_deleted()  # before the new one needs room
    limit = _max_checkpoints(trainer.args)
    _warn_of_copies(ours.engine.config, limit or 0)
    folder, keeps_too_few = os.path.join(output_dir, FOLDER), limit is None or ours.engine.config.checkpoints < limit
    # A copy if the paths cannot keep all of the Trainer's checkpoints. `is_to_copy` is asked, too, as the Trainer may
    # want more than its limit: the best one, say, of the run that it was resumed from.
    copy = keeps_too_few or shared.is_to_copy(ours.engine, folder)
    ours.save_checkpoint(folder, copy=copy)
    ours.wait_checkpoint()
    _call_with_pointer(trainer, original, output_dir, shared.pointer(ours, FOLDER, "transformers"))


def _load_model(trainer: Any, original: Callable[..., Any], checkpoint: str, *arguments: Any, **options: Any) -> Any:
    """Replaces `Trainer._load_from_checkpoint`, which loads weights as a resume begins: refuse a broken checkpoint.

    That is one which is not whole; see `_find_fault`.
    """
    if _uses_ours(trainer):
        _check_whole(checkpoint)
    if _is_of_fsdp(checkpoint):  # whose files FSDP alone reads
        return original(trainer, checkpoint, *arguments, **options)
    return _call_as_without_fsdp(trainer, original, checkpoint, *arguments, **options)


def _train(
    trainer: Any,
    original: Callable[..., Any],
    commits: bool,
    resume_from_checkpoint: str | bool | None = None,
    *arguments: Any,
    **options: Any,
) -> Any:
    """Replaces `Trainer.train`: add our callbacks, and resume from a checkpoint that is whole.

    `commits` is whether a SIGTERM saves a checkpoint.

    Raises:
        ConfigError: DeepSpeed is to make the optimizer, of its own where its config names one.
    """
    if _names_ours(trainer.args) and trainer.is_deepspeed_enabled:
        DEEPSPEED_TRAINER.refuse("optim", str(getattr(trainer.args.optim, "value", trainer.args.optim)))
    wanted: Any = resume_from_checkpoint  # a path, or true for the last one in `output_dir`
    if wanted and _uses_ours(trainer):
        wanted = _whole_instead(trainer, wanted)
    _set_aside(trainer.args)  # again, as `_set_interrupted_aside` does so only where the arguments name ours
    sigterm = _ensure_callbacks(trainer, commits)
    # In these two cases the Trainer makes a new optimizer. An older one, which these references would keep, is freed
    # before that: two would have twice the state.
    if trainer.model_init is not None or trainer.optimizer is None:
        trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    try:
        return original(trainer, wanted, *arguments, **options)
    except Exception:
        # `on_train_end` below passes the signal on, which may end the process before anybody sees the error.
        if sigterm is not None and sigterm.has_signal:
            log.exception("training has failed, and a SIGTERM has come")
        raise
    finally:
        if sigterm is not None:
            sigterm.on_train_end()  # after an error the Trainer does not call it, and the handler would stay


def _whole_instead(trainer: Any, wanted: Any) -> Any:
    """Return the checkpoint to resume from: usually `wanted`, a path, or True for the last one in `output_dir`.

    If that is the last one, and not whole, the last whole one beside it is returned, if there is one: else a run that
    is restarted automatically would fail each time. A checkpoint that is not the last one was chosen by a user, and
    stays.
    """
    folder = trainer.args.output_dir if wanted is True else os.path.dirname(os.path.abspath(wanted))
    last: str | None = None
    if os.path.isdir(folder):  # else `get_last_checkpoint` would raise
        last = import_module("transformers.trainer_utils").get_last_checkpoint(folder)
    means_last = last and (wanted is True or os.path.abspath(wanted) == os.path.abspath(last))
    fault = _find_fault(last) if last and means_last else ""
    whole_ones = _whole_checkpoints_beside(last) if last and fault else []
    if not whole_ones:
        return wanted
    log.warning("%s is not whole, as %s: training goes on from %s", last, fault, whole_ones[-1])
    return whole_ones[-1]


def _whole_checkpoints_beside(folder: str) -> list[str]:
    """Return the whole checkpoints beside one that is not, in the order of their steps."""
    name_without_step, _, _ = os.path.normpath(folder).rpartition("-")
    paths = glob.glob(f"{glob.escape(name_without_step)}-*")
    step_by_path = {path: path.rpartition("-")[2] for path in paths}
    in_order = sorted((int(step), path) for path, step in step_by_path.items() if step.isdecimal())
    return [path for _, path in in_order if not _find_fault(path)]


def _check_whole(checkpoint: str) -> None:
    """Raise `CheckpointError` if a Trainer's checkpoint is not whole.

    Other folders, such as one of weights alone, are left to the Trainer.
    """
    has_name = os.path.basename(os.path.abspath(checkpoint)).startswith("checkpoint-")
    is_trainers = has_name or os.path.isdir(os.path.join(checkpoint, FOLDER))
    fault = _find_fault(checkpoint) if is_trainers and os.path.isdir(checkpoint) else ""
    if not fault:
        return
    folder, whole_ones = os.path.normpath(checkpoint), _whole_checkpoints_beside(checkpoint)
    advice = "no other one beside it is: delete it, and begin anew"
    if whole_ones:
        whole = whole_ones[-1]
        advice = f"{whole} is: delete {folder}, or go on with trainer.train(resume_from_checkpoint={whole!r})"
    raise CheckpointError(f"{folder} is not whole, as {fault}; {advice}")


def _find_fault(checkpoint: str) -> str:
    """Return why a Trainer's checkpoint is not whole, with the first file that it lacks; "" if it is whole.

    A folder whose save has begun, and not ended, lacks the marker `WHOLE`. Any other needs `trainer_state.json`, and,
    if it has our folder, the `COMMIT` in that.
    """
    commit, released = os.path.join(FOLDER, "COMMIT"), os.path.join(FOLDER, "RELEASED")

    def lacks(name: str) -> bool:
        """Return whether the folder has no such file."""
        return not os.path.isfile(os.path.join(checkpoint, name))

    needed = [commit] if os.path.isdir(os.path.join(checkpoint, FOLDER)) else []
    is_begun = mark_of(checkpoint) is Mark.BEGUN
    missing = WHOLE if is_begun else next(filter(lacks, [*needed, "trainer_state.json"]), "")
    if missing == commit and not lacks(released):
        return f"its state was released ({released} says why)"
    return f"its save was interrupted ({missing} is missing)" if missing else ""


def _load_optimizer(trainer: Any, original: Callable[..., Any], checkpoint: str | None) -> None:
    """Replaces `Trainer._load_optimizer_and_scheduler`: load a checkpoint of ours where `optimizer.pt` names one.

    Else the state in that file, which is torch's, is loaded. The Trainer itself loads the scheduler.
    """
    ours = _our_optimizer(trainer)
    if ours is None or checkpoint is None:  # without a checkpoint the Trainer resumes from nothing
        if checkpoint is not None and os.path.isfile(os.path.join(checkpoint, FOLDER, "COMMIT")):
            raise CheckpointError(
                f"{checkpoint} was written with an optimizer of offload, and the state of this one is not there: "
                f'resume with the same optim="offload_...", or from what this makes for torch\'s own: '
                f"offload export {checkpoint} --for transformers OUT"
            )
        _call_as_without_fsdp(trainer, original, checkpoint)  # a plain call, unless weights are in host memory
        return
    if _is_of_fsdp(checkpoint):  # whose files FSDP alone reads
        original(trainer, checkpoint)
        return
    loaded = _call_with_pointer(trainer, original, checkpoint)  # `optimizer.pt`; None if the Trainer reads none
    if loaded is not None and POINTER in loaded:
        ours.load_checkpoint(os.path.join(checkpoint, loaded[POINTER]))
    elif loaded is not None:  # the state of torch's optimizer, or saved by a Trainer without `enable`
        ours.load_state_dict(loaded)
