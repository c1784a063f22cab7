"""Switching the integration on and off, and functions that then replace Megatron-Core's; it is patched here alone.

Megatron has a `DistributedOptimizer` for the dense parameters of a model, and another for its experts, if it has any,
in a `ChainedOptimizer`. Below each is an inner optimizer of torch's kind: ours is `MegatronAdamW`. A function that
"Replaces" another is called in its place, and is given it as `original`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from offload import ConfigError, DtypeCode, OffloadConfig, Parameter
from offload.combinations import (
    MEGATRON_BUFFER,
    MEGATRON_CHANGES,
    MEGATRON_FSDP,
    MEGATRON_GATHERS,
    MEGATRON_GRAPHS,
    MEGATRON_MIRRORS,
    MEGATRON_REDUCES,
    MEGATRON_ROUNDED,
    MEGATRON_WEIGHTS,
    MEGATRON_WHOLE,
)
from offload.integrations import shared
from offload.integrations.megatron import backward, in_place
from offload.integrations.megatron.inner import MegatronAdamW

log = logging.getLogger("offload")

TESTED = ("0.16.1",)

_PACKAGE = "megatron.core.optimizer"
_DISTRIBUTED = f"{_PACKAGE}.distrib_optimizer"
_CHECKPOINTING = "megatron.core.dist_checkpointing"
_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
_HYBRID = "HybridDeviceOptimizer"
_MAKER = "_get_megatron_optimizer_based_on_param_groups"

RELIED_ON: dict[str, dict[str, tuple[str, str]]] = {
    _PACKAGE: {
        _MAKER: ("config model_chunks param_groups", f"{_HYBRID} optimizer_cpu_offload DistributedOptimizer"),
        "get_megatron_optimizer": ("config model_chunks", f"{_MAKER} ChainedOptimizer"),
    },
    f"{_PACKAGE}.ChainedOptimizer": {
        "__init__": ("self chained_optimizers", ""),
        "sharded_state_dict": ("self model_sharded_state_dict is_loading", "add_prefix_for_sharding"),
    },
    f"{_DISTRIBUTED}.{_HYBRID}": {"__init__": ("self params", "")},
    f"{_DISTRIBUTED}.DistributedOptimizer": {
        # Made over whole weights by the package, and here once more over shards, with its own defaults.
        "__init__": ("self optimizer config", f"{_HYBRID} optimizer defaults opt_group_ranges"),
        "_build_model_and_main_param_groups": ("", "use_precision_aware_optimizer_no_fp8_or_ds_fp8 detach view"),
        "_get_model_param_range_map": ("self param", ""),
        "_copy_model_grads_to_main_grads": ("self", "main_grad decoupled_grad"),
        "_copy_main_params_to_model_params": ("self", "use_precision_aware_optimizer_no_fp8_or_ds_fp8"),
        "_copy_model_params_to_main_params": ("self", f"{_HYBRID} update_fp32_param_by_new_param"),
        "_collect_main_grad_data_for_unscaling": ("self", "decoupled_grad"),
        "_get_main_param_and_optimizer_states": ("self model_param", f"{_HYBRID} model_param_group_index_map state"),
        "_set_main_param_and_optimizer_states": ("self model_param tensors", f"{_HYBRID} state"),
        "state_dict": ("self", "sub_optimizers"),
        "load_state_dict": ("self state_dict", "dummy_step"),
        "sharded_state_dict": ("self model_sharded_state_dict is_loading sharding_type metadata", "ShardedObject"),
    },
    f"{_BUFFERS}._ParamAndGradBucketGroup": {
        "start_grad_sync": ("self force_all_reduce", "grad_reduce_handle"),
        "finish_grad_sync": ("self force_all_reduce", "start_grad_sync grad_reduce_handle wait"),
    },
    _CHECKPOINTING: {
        "save": ("sharded_state_dict checkpoint_dir", "finalize_fns"),
        "load": ("sharded_state_dict checkpoint_dir", ""),
    },
}
"""Functions that are replaced, or that use a replacement: their first parameters, and names that their code must use;
see `shared.check_relied_on`."""

TIED = "embedding.word_embeddings.weight"
"""What each stage calls its copy of an embedding that several stages have."""

_undo = contextlib.ExitStack()
"""What `enable` has replaced; closing it twice does nothing."""


def enable(config: Mapping[str, Any] | str, *, layout: str = "stock") -> None:
    """Have Megatron-Core keep the state of distributed optimizers that are made from now on where the config says.

    Call this in each process that trains, before `get_megatron_optimizer`. A second call replaces the first.
    Gradients are read in the dtype of Megatron's buffer, whatever `gradient_dtype` says.

    Args:
        config: Fields of `OffloadConfig`, or the path of a JSON file of them.
        layout: Of checkpoints: "stock" is Megatron's, in the format that it is asked for. With "in_place" state stays
            where it lies, and a folder `offload` in Megatron's checkpoint, which all ranks have to see, names it (of
            experts `offload-1`).

    Raises:
        ConfigError: A setting cannot be used, also not under Megatron, or the Megatron-Core that is installed cannot;
            names what is missing.
    """
    global _undo
    settings = OffloadConfig.from_dict(shared.read_fields(config), "config")
    if not settings.keeps_grads:  # by either of the two settings that the error names
        MEGATRON_BUFFER.refuse("keep_grads, gradient_memory", "gradients that leave")
    if layout not in ("stock", "in_place"):
        raise ConfigError("layout", layout, 'use "stock" or "in_place"')
    if layout == "stock" and settings.mirror is not None:
        MEGATRON_MIRRORS.refuse("mirror", settings.mirror)
    MEGATRON_GATHERS.check("overlap", settings.overlap)
    disable()
    shared.check_relied_on("megatron.core", "pip install --no-deps megatron-core", TESTED, RELIED_ON)
    package, distributed = import_module(_PACKAGE), import_module(_DISTRIBUTED)
    with contextlib.ExitStack() as undo:
        for module in (package, distributed):
            shared.replace(undo, module, _HYBRID, MegatronAdamW)
        shared.replace(undo, package, _MAKER, functools.partial(make_checked, getattr(package, _MAKER)))
        chained, outer = package.ChainedOptimizer, distributed.DistributedOptimizer
        group = import_module(_BUFFERS)._ParamAndGradBucketGroup
        # Class, method, replacement, and what the replacement is given after the original method.
        for owner, name, replacement, *extra in (
            (chained, "__init__", init_chained, settings),
            (chained, "sharded_state_dict", _sharded_chain, layout),
            (outer, "sharded_state_dict", sharded_state_dict),
            (outer, "load_state_dict", _load_state_dict),
            (group, "start_grad_sync", backward.start_grad_sync),
            (group, "finish_grad_sync", backward.finish_grad_sync),
        ):
            shared.replace(undo, owner, name, functools.partialmethod(replacement, vars(owner)[name], *extra))
        local = import_module(f"{_CHECKPOINTING}.tensor_aware_state_dict").MCoreTensorAwareStateDict
        # `from_state_dict` is a class method. `refuse_local` calls the function in it, as `original`, with the class.
        refusing = functools.partial(in_place.refuse_local, vars(local)["from_state_dict"].__func__)
        shared.replace(undo, local, "from_state_dict", classmethod(refusing))
        # Both modules have the functions, and callers import them from either.
        for module in (import_module(_CHECKPOINTING), import_module(f"{_CHECKPOINTING}.serialization")):
            for name in ("save", "load"):
                shared.replace(undo, module, name, functools.partial(getattr(in_place, name), getattr(module, name)))
        _undo = undo.pop_all()  # for `disable`; an error before this line has undone all replacements


def disable() -> None:
    """Undo `enable`, once the optimizers that were made since are not used any more. Idempotent."""
    _undo.close()


def inner_optimizers(optimizer: Any) -> list[MegatronAdamW]:
    """Return our optimizers below the one that `get_megatron_optimizer` has returned.

    Each has `engine.metrics()`, `engine.plan` and `close()`.
    """
    # Megatron returns a `ChainedOptimizer`; one of the optimizers in it may be given, too.
    distributed_optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    return [outer.optimizer for outer in distributed_optimizers if isinstance(outer.optimizer, MegatronAdamW)]


def make_checked(
    original: Callable[..., Any], config: Any, model_chunks: Any, *arguments: Any, **options: Any
) -> Any:
    """Replaces `_get_megatron_optimizer_based_on_param_groups`: first refuse settings of Megatron's, and weights.

    Refused is what our optimizer cannot be used with; the error names it.
    """
    # Megatron, too, takes the first chunk's `ddp_config` for that of all.
    if model_chunks[0].ddp_config.use_megatron_fsdp:
        MEGATRON_FSDP.refuse("use_megatron_fsdp", True)
    # With these three set Megatron makes a precision-aware `DistributedOptimizer`, and below it the
    # `HybridDeviceOptimizer` whose place ours takes.
    for name in ("use_distributed_optimizer", "optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if not getattr(config, name):
            MEGATRON_WHOLE.refuse(name, False)
    if model_chunks[0].ddp_config.fp8_param_gather:
        MEGATRON_WEIGHTS.refuse("fp8_param_gather", True)
    # Our masters and moments are fp32; how they are stored is for the `state_format` of our own config to say.
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(config, name) is not torch.float32:
            MEGATRON_ROUNDED.refuse(name, getattr(config, name))
    for parameter, name in _parameter_names(model_chunks).items():
        if parameter.requires_grad and parameter.dtype is torch.float32:
            MEGATRON_WEIGHTS.refuse(name, parameter.dtype)
    return original(config, model_chunks, *arguments, **options)


def _parameter_names(model_chunks: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, str]:
    """Return a name for each parameter in this rank's part of the model, unique on this rank."""
    names: dict[torch.nn.Parameter, str] = {}
    for number, chunk in enumerate(model_chunks):
        prefix = f"chunk{number}." if len(model_chunks) > 1 else ""
        for name, parameter in chunk.named_parameters():
            # Names decide how state is rounded: copies of an embedding on two stages get one name, and stay alike.
            is_tied = getattr(parameter, "shared_embedding", False)
            names[parameter] = TIED if is_tied else prefix + name
    return names


def init_chained(chained: Any, original: Callable[..., None], config: OffloadConfig, optimizers: list[Any]) -> None:
    """Replaces `ChainedOptimizer.__init__`, which is given all optimizers of a model: open the engine of each.

    Experts have an optimizer of their own. The config's budgets are divided among the engines in proportion to the
    elements that each optimizer has on this rank.
    """
    original(chained, optimizers)
    ours = [distributed for distributed in optimizers if isinstance(distributed.optimizer, MegatronAdamW)]
    numels = [sum(shard.numel() for shard in distributed.optimizer.shards) for distributed in ours]
    for number, (distributed, numel) in enumerate(zip(ours, numels, strict=True)):
        own_config = config.for_part(numel, sum(numels))
        if len(ours) > 1:
            # Of checkpoints in place: the first keeps the name "offload", the experts' is "offload-1".
            distributed.optimizer.folder += f"-{number}" if number else ""
            text = "optimizer %d of %d has %d of %d parameters of this rank: host_memory %s, gpu_memory %s"
            log.info(text, number + 1, len(ours), numel, sum(numels), own_config.host_memory, own_config.gpu_memory)
        open_engine(distributed, own_config)


def _check_updates_in_backward(distributed: Any, config: OffloadConfig) -> None:
    """Raise `ConfigError` if no gradient is known to be final before backward has ended: no update could be made."""
    chunk = distributed.model_chunks[0]  # chunks have one config, as they are parts of one model
    if not chunk.ddp_config.overlap_grad_reduce:  # then Megatron reduces when backward has ended
        MEGATRON_REDUCES.refuse("overlap", config.overlap)
    # Both make Megatron multiply all gradients in place after their reduction: by the inverse of the loss scale, or
    # of the number of tokens.
    if distributed.grad_scaler is not None or chunk.config.calculate_per_token_loss:
        MEGATRON_CHANGES.refuse("overlap", config.overlap)
    # A graph replays reductions without telling when each has ended. The scope is a string, a member of an enum, or a
    # list of either, by the release; older ones have none. Its text has the name in each case.
    if "full_iteration" in str(getattr(chunk.config, "cuda_graph_scope", "")):
        MEGATRON_GRAPHS.refuse("overlap", config.overlap)


def open_engine(distributed: Any, config: OffloadConfig) -> None:
    """Open the engine of the `MegatronAdamW` below a `DistributedOptimizer`, over this rank's shards of its weights.

    Raises:
        ConfigError: Shards are not what is relied on; or updates in backward would be of no use.
    """
    if config.overlaps_backward:
        _check_updates_in_backward(distributed, config)
    inner, names = distributed.optimizer, _parameter_names(distributed.model_chunks)
    # By index of the parameter group, and place in the group, which is the order of shards.
    parameters: dict[tuple[int, int], tuple[torch.Tensor, Parameter]] = {}
    for weight, (group, place) in distributed.model_param_group_index_map.items():
        shard = inner.param_groups[group]["params"][place]
        shard_range = distributed._get_model_param_range_map(weight)["param"]  # the shard's elements of the weight
        # Without the prefix of DDP's wrapper, which begins the name if the model has one chunk.
        name, dtype = names[weight].removeprefix("module."), DtypeCode.of(shard.dtype)
        if shard.numel() != shard_range.end - shard_range.start or shard.dtype is not weight.dtype:
            raise ConfigError("megatron", name, f"use one of {', '.join(TESTED)}: it is not cut as it was there")
        whole = weight.numel(), tuple(weight.shape)
        parameters[group, place] = weight, Parameter(name, shard.numel(), dtype, group, shard_range.start, *whole)
    if torch.distributed.get_world_size() > 1:
        config = config.for_rank(torch.distributed.get_rank())
    in_order = dict(parameters[place] for place in sorted(parameters))  # empty where a stage trains nothing
    # Gradients have one dtype in all buffers: fp32, or that of the weights. Without buffers any dtype will do.
    inner.open(in_order, config, distributed.buffers[0].grad_dtype if in_order else torch.float32)
    if config.overlaps_backward:
        backward.listeners.add(inner)


def _sharded_chain(
    chained: Any,
    original: Callable[..., Any],
    layout: str,
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    **options: Any,
) -> Any:
    """Replaces `ChainedOptimizer.sharded_state_dict`: with the layout "in_place", note it in a save's metadata.

    The `sharded_state_dict` of each optimizer is given the metadata. In a load they are those of the checkpoint.
    """
    if layout == "in_place" and not is_loading and inner_optimizers(chained):
        options["metadata"] = {**(options.get("metadata") or {}), in_place.KEY: in_place.SHARDING}
    return original(chained, model_sharded_state_dict, is_loading, **options)


def sharded_state_dict(
    distributed: Any,
    original: Callable[..., Any],
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    sharding_type: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Replaces `DistributedOptimizer.sharded_state_dict`: return one with state in place if the metadata say so.

    Else it is Megatron's. In Megatron's format "fully_reshardable" some ranks, or all, have the state of all ranks in
    host memory, which may not fit: these log a warning.
    """
    metadata = metadata or {}
    if isinstance(distributed.optimizer, MegatronAdamW):
        if metadata.get(in_place.KEY) == in_place.SHARDING:
            return in_place.sharded_state_dict(distributed, is_loading)
        # With this setting a save gathers state on the first rank alone; a load still has it on all ranks.
        on_first_only = metadata.get("distrib_optim_fully_reshardable_mem_efficient", False)
        is_gathered = metadata.get(in_place.KEY) == "fully_reshardable"
        if is_gathered and (is_loading or not on_first_only or distributed.data_parallel_group.rank() == 0):
            nbytes = 12 * sum(buffer.numel_unpadded for buffer in distributed.buffers)  # masters and moments in fp32
            log.warning("fully_reshardable has state of all ranks in this one's host memory: %d bytes", nbytes)
    return original(distributed, model_sharded_state_dict, is_loading, sharding_type, metadata)


def _load_state_dict(distributed: Any, original: Callable[..., None], state_dict: dict[str, Any]) -> None:
    """Replaces `DistributedOptimizer.load_state_dict`: then write the state that it has set, or load state in place.

    State is in place if the dict has, instead of state, the id of our checkpoint. Megatron does not see that entry.
    """
    state = state_dict.get("param_state")
    id = state.get(shared.POINTER) if isinstance(state, dict) else None
    if id is not None:
        state_dict = {name: value for name, value in state_dict.items() if name != "param_state"}
    original(distributed, state_dict)
    if isinstance(distributed.optimizer, MegatronAdamW):
        distributed.optimizer.write_set_state()
        if id is not None:
            in_place.load_state(distributed, id)
