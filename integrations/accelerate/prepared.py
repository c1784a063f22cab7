"""A prepared optimizer with the methods of the one in it, and what its accelerator does in another way."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch

from offload import ConfigError
from offload.combinations import BY_DEEPSPEED
from offload.integrations.shared import (
    POINTER,
    clipper,
    ours,
    pointer,
    release,
    save,
    tell_last_pass,
)
from offload.optim.hiding import hide_steps

try:
    AcceleratedOptimizer: Any = import_module("accelerate.optimizer").AcceleratedOptimizer
except ImportError as error:
    raise ConfigError("accelerate", f"cannot be imported: {error}", "pip install accelerate") from error

SHARDED = "DEEPSPEED", "FSDP", "MEGATRON_LM"

FOLDER = "optimizer_state"
"""The optimizer's folder in what `save_state` writes; a number follows for all but the first one."""


class Prepared(AcceleratedOptimizer):  # type: ignore[misc]
    """What `accelerator.prepare` returns for an optimizer, once `enable` has been told of it."""

    pointer: dict[str, Any] | None = None
    """What `save_state` writes in place of all state, while it does."""

    loaded_from: str = ""
    """The folder that `load_state` reads."""

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


def enable(accelerator: Any, optimizer: Any) -> Any:
    """Have an accelerator leave the state of a prepared optimizer of ours where it lives.

    Methods of this accelerator alone are replaced: `clip_grad_norm_` and `save_state`.

    Args:
        accelerator: The one that has prepared the optimizer.
        optimizer: What its `prepare` has returned for one of our optimizers. A second call changes nothing.

    Returns:
        `optimizer`, which has the methods and properties of ours now.

    Raises:
        ConfigError: The optimizer is not one of ours, or has not been prepared, or is sharded by the accelerator.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise ConfigError("optimizer", type(optimizer).__name__, "give what accelerator.prepare has returned for it")
    if ours(optimizer) is None:
        allowed = "give one of offload's, such as offload.AdamW"
        raise ConfigError("optimizer", type(optimizer.optimizer).__name__, allowed)
    if accelerator.distributed_type in SHARDED:
        BY_DEEPSPEED.refuse("accelerator", str(accelerator.distributed_type))
    prepared: list[Prepared] = vars(accelerator).setdefault("offload_prepared", [])
    if not prepared:
        accelerator.clip_grad_norm_ = partial(_clip, accelerator, prepared)
        accelerator.save_state = partial(_save_state, accelerator, prepared)
        accelerator.register_load_state_pre_hook(partial(_before_load, prepared))
    if not any(known is optimizer for known in prepared):
        optimizer.__class__ = Prepared  # the object is the one that the accelerator knows
        prepared.append(optimizer)
        tell_last_pass(ours(optimizer), accelerator)
        models = accelerator._models
        # A model that is compiled later only the caller has as it is called.
        hide_steps(ours(optimizer), models if accelerator.state.dynamo_plugin.backend == "NO" else (), models)
    return optimizer


def _clip(
    accelerator: Any, prepared: list[Prepared], parameters: Any, max_norm: float, norm_type: float = 2
) -> torch.Tensor:
    """Stand in for `Accelerator.clip_grad_norm_`: the norm is the same, and the update clips."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    found = clipper(map(ours, prepared), accelerator, parameters, norm_type)
    if found is None:
        return type(accelerator).clip_grad_norm_(accelerator, parameters, max_norm, norm_type)  # type: ignore[no-any-return]
    return found.clip_grad_norm_(max_norm)  # type: ignore[no-any-return]


def _save_state(accelerator: Any, prepared: list[Prepared], *arguments: Any, **options: Any) -> Any:
    """Stand in for `Accelerator.save_state`, which deletes old folders first, by `total_limit`."""
    there = [{k for k in known.engine.checkpoints.kept if os.path.isdir(k)} for known in prepared]
    accelerator.wait_for_everyone()  # else the first rank deletes what others have not looked at
    hook = accelerator.register_save_state_pre_hook(partial(_before_save, prepared, there))
    try:
        return type(accelerator).save_state(accelerator, *arguments, **options)
    finally:
        hook.remove()
        for known in prepared:
            known.pointer = None


def _before_save(prepared: list[Prepared], there: list[set[str]], models: Any, weights: Any, output_dir: str) -> None:
    for number, known in enumerate(prepared):
        for folder in sorted(there[number]):
            if not os.path.isdir(folder):
                release(known, folder)
        name = f"{FOLDER}_{number}" if number else FOLDER
        save(known, os.path.join(output_dir, name))
        known.pointer = pointer(ours(known), name, "accelerate")


def _before_load(prepared: list[Prepared], models: Any, input_dir: str) -> None:
    for known in prepared:
        known.loaded_from = str(input_dir)
