"""Switching the backend on and off. Methods of DeepSpeed's engine class are replaced here alone.

*Our object* is the object `multi_tier_offload` of a DeepSpeed config (`KEY`). While the backend is on, an engine with
it in its config gets its optimizer from this package: `OffloadedStage3` or `OffloadedStage12`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from importlib import import_module
from typing import Any

import torch

from offload import ConfigError
from offload.combinations import OTHER_PARALLELISM, SAVED_APART
from offload.integrations import shared
from offload.integrations.deepspeed import settings, tags, weights
from offload.integrations.deepspeed.settings import KEY, VARIABLE

log = logging.getLogger("offload")

TESTED = ("0.17.6", "0.18.9", "0.19.8")
OLDEST = 0, 17

_ENGINE = "deepspeed.runtime.engine", "DeepSpeedEngine"
_STAGE3 = "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"
_STAGE12 = "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"

RELIED_ON: dict[tuple[str, str], dict[str, str]] = {
    _ENGINE: {
        "_configure_optimizer": "client_optimizer model_parameters",
        "save_checkpoint": "save_dir tag client_state save_latest",
        "load_checkpoint": "load_dir tag",
        "_save_checkpoint": "save_dir tag",
        "_save_zero_checkpoint": "save_path tag",
        "_get_zero_ckpt_name": "checkpoints_path tag",
        "_get_ckpt_name": "checkpoints_path tag",
        "_load_checkpoint": "load_dir tag",
        "_get_all_zero_checkpoints": "load_dir tag",
    },
    _STAGE3: {
        "_create_param_groups_fp16_flat_cpu_memory": "",
        "_setup_for_real_optimizer": "",
        "_create_fp32_partitions": "",
        "initialize_optimizer_states": "",
        "partition_grads": "params_to_release grad_partitions",
        "independent_gradient_partition_epilogue": "",
        "_get_norm_groups": "",
        "has_overflow": "partition_gradients",
        "unscale_and_clip_grads": "sub_group_id total_norm",
        "_optimizer_step": "sub_group_id",
        "_reassign_or_swap_out_partitioned_parameters": "sub_group_id",
        "_unflatten_partitioned_parameters": "sub_group_id",
        "_post_step": "timer_names",
        "reset_cpu_buffers": "",
        "zero_grad": "set_to_none",
        "_rigid_state_dict": "",
        "_rigid_load_state_dict": "state_dict load_optimizer_states",
        "_restore_from_bit16_weights": "",
        "load_hp_checkpoint_state_from_checkpoint_dir_stage3": "checkpoint_dir",
        "_get_fp32_opt_state_partition": "param release_swap_buffers optim_state_key",
        "_get_fp32_grad_state_partition": "param release_swap_buffers",
        "set_full_hp_param": "value param optim_state_key",
        "set_local_hp_param": "value param optim_state_key",
        "set_fp32_grad_for_param": "value param",
        "set_local_grad_for_param": "value param",
        "destroy": "",
    },
    _STAGE12: {
        "initialize_optimizer_states": "",
        "copy_grads_in_partition": "param",
        "independent_gradient_partition_epilogue": "",
        "_update_model_bit16_weights": "group_index",
        "get_param_gradient_attribute": "param",
        "clear_grad_attribute": "param",
        "has_overflow": "partition_gradients",
        "scaled_global_norm": "norm_type",
        "unscale_and_clip_grads": "grad_groups_flat total_norm",
        "_optimizer_step": "group_no",
        "reset_cpu_buffers": "",
        "update_lp_params": "",
        "state_dict": "",
        "load_state_dict": "state_dict_list load_optimizer_states",
        "_restore_from_bit16_weights": "",
        "_link_all_hp_params": "",
        "_lazy_init_hp_params_optimizer_state": "",
        "_get_offload_gradient_dict": "",
        "destroy": "",
    },
    weights.CONFIG: {"_initialize_params": "param_dict"},
    weights.INIT: {"_validate_remote_device": "remote_device ds_config", "_partition_param": "param"},
}
"""Methods that are overridden or called, with the parameters that they must begin with."""


class _Mode(Enum):
    """How an engine whose config has our object gets its optimizer: OFF <-> WATCHING -> ON -> OFF."""

    OFF = auto()
    """As in stock DeepSpeed, whose method is not replaced."""
    WATCHING = auto()
    """As in stock DeepSpeed, with a warning: this package has been imported, but `enable` not called."""
    ON = auto()
    """From this backend."""


_mode = _Mode.OFF
_original: Callable[..., Any] | None = None
"""DeepSpeed's `_configure_optimizer`, while it is replaced."""
object_for_all: Mapping[str, Any] | None = None
"""The `multi_tier_offload` object for configs that have none."""
_warned_of_own = _warned_of_stock = _warned_of_ignored = False
"""Whether warnings that are logged once have been: two of `add_object_for_all`, one of `_warn_of_ignored_object`."""
_undo = contextlib.ExitStack()
"""Undoes the replacements of `weights.patch_deepspeed`."""


def check_deepspeed() -> None:
    """Check that the installed DeepSpeed has the methods that this backend replaces or calls.

    Raises:
        ConfigError: It is not installed, or a method is missing or has other parameters; names them.
    """
    try:
        deepspeed = import_module("deepspeed")
    except ImportError as error:
        allowed = "pip install --no-build-isolation deepspeed (with torch installed before)"
        raise ConfigError("deepspeed", "not installed", allowed) from error
    version = str(deepspeed.__version__)
    if tuple(int(number) for number in version.split(".")[:2]) < OLDEST:
        raise ConfigError("deepspeed", version, f"use one of {', '.join(TESTED)}")
    changed = []
    for (module, kind), methods in RELIED_ON.items():
        owner = getattr(import_module(module), kind, None)
        for method, parameters in methods.items():
            function = getattr(owner, method, None)
            if function is None:
                changed.append(f"{kind}.{method} is gone")
                continue
            actual = list(inspect.signature(_without_tracing(function)).parameters)[1:]  # without `self`
            if actual[: len(parameters.split())] != parameters.split():
                changed.append(f"{kind}.{method}({', '.join(actual)}) took ({', '.join(parameters.split())})")
    if changed:
        raise ConfigError("deepspeed", version, f"use one of {', '.join(TESTED)}: {'; '.join(changed)}")
    if version.split("+")[0] not in TESTED:  # without the suffix of a local build
        log.info("DeepSpeed %s has all that is relied on, but only %s are tested", version, ", ".join(TESTED))


def _without_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function below DeepSpeed's tracing decorator; `function` itself if it is not decorated.

    The decorator sets no `__wrapped__`, so the function is taken from the closure of its wrapper.
    """
    if function.__name__ == "wrapped_fn":
        for cell in function.__closure__ or ():
            if inspect.isfunction(cell.cell_contents):
                return _without_tracing(cell.cell_contents)
    return function


def _configure_optimizer_of(
    engine: Any, original: Callable[..., Any], client_optimizer: Any, model_parameters: list[Any]
) -> None:
    """Replaces `DeepSpeedEngine._configure_optimizer` if the config has our object: the engine gets our optimizer.

    DeepSpeed's own method, `original`, makes it: meanwhile the names of DeepSpeed's optimizer classes stand for ours.
    """
    # Imported here, as these modules import DeepSpeed, which this package does not import before the program does.
    from offload.integrations.deepspeed.common import OffloadedOptimizer, warn_of_large_buckets
    from offload.integrations.deepspeed.stage3 import OffloadedStage3
    from offload.integrations.deepspeed.stage12 import OffloadedStage12

    config, saving = settings.read(engine.config), settings.saving(engine.config)
    # DeepSpeed's own saves keep no checkpoint on the paths, so the plan needs no room for one. With a mirror
    # `checkpoints_kept` may not be 0.
    if saving.is_deepspeeds and config.mirror is None:
        config = dataclasses.replace(config, checkpoints_kept=0)
    _check_engine(engine)
    if saving.layout == "in_place" and engine.use_node_local_storage():
        SAVED_APART.refuse("multi_tier_offload.checkpoint.layout", saving.layout)
    if config.mirror is not None and engine.use_node_local_storage():
        SAVED_APART.refuse("multi_tier_offload.mirror", config.mirror)
    _offload_to_cpu(engine)
    client_optimizer = _ensure_client_optimizer(engine, client_optimizer, model_parameters)
    # DeepSpeed may not insist on its own CPU optimizer: the client's is never stepped.
    engine._config.zero_force_ds_cpu_optimizer = False
    # `original` may import this module, whose class derives from one that is replaced below. So it is imported now.
    with contextlib.suppress(ImportError):  # an older DeepSpeed has no such module
        import_module("deepspeed.runtime.superoffload.superoffload_stage3")
    with contextlib.ExitStack() as stack:
        weights_file = stack.enter_context(weights.reserve_file(engine, client_optimizer))
        # `original` makes an optimizer of one of these classes, which it finds by name in these modules.
        for (module_name, class_name), replacement in (
            (_STAGE3, functools.partial(OffloadedStage3, weights_file=weights_file)),
            ((_ENGINE[0], _STAGE12[1]), OffloadedStage12),
        ):
            module = import_module(module_name)
            stack.callback(setattr, module, class_name, getattr(module, class_name))
            setattr(
                module, class_name, functools.partial(replacement, offload_config=config, names=engine.param_names)
            )
        original(engine, client_optimizer, model_parameters)
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if not isinstance(optimizer, OffloadedOptimizer):
        raise ConfigError("deepspeed", kind, f"use one of {', '.join(TESTED)}: it was made in spite of {KEY}")
    # With weights in a file there is no memory for new weights until the step.
    optimizer.may_update_during_backward = settings.reduces_during_backward(engine.config) and weights_file is None
    optimizer.report_to(engine)
    optimizer.hook_model(engine.module)
    # The order matters: each of these wraps the engine's methods as the calls before have left them.
    optimizer.stream_checkpoints(engine)
    optimizer.refuse_unfit_tags(engine)
    if not saving.is_deepspeeds:
        optimizer.replace_save_checkpoint(engine, saving)
    tags.mark_tags_when_whole(optimizer, engine)
    if saving.commit_on_sigterm:
        optimizer.sigterm = tags.commit_on_sigterm(optimizer, engine, saving.commit_on_sigterm)
    optimizer.pass_on_include(engine)
    if engine.global_rank == 0:
        warn_of_large_buckets(engine, config)
        text = f"offload keeps the optimizer state of this engine ({kind}), on this rank:\n{optimizer.offload.plan}"
        import_module("deepspeed.utils").log_dist(text, ranks=[0])


def _ensure_client_optimizer(engine: Any, given: Any, model_parameters: list[Any]) -> torch.optim.Optimizer:
    """Return the torch optimizer whose parameter groups have the hyperparameters; it is never stepped.

    It is the one that the program gives, or that a function which it gives makes of the parameters. If it gives none,
    one is made as the config's `optimizer` section says.

    Raises:
        ConfigError: It is an optimizer, or has hyperparameters, that the engine does not run.
    """
    from offload.integrations.deepspeed.shard import LionGroups, check_optimizer

    optimizer: torch.optim.Optimizer = given
    if given is None and str(engine.optimizer_name()).lower() == settings.LION_TYPE:
        optimizer = LionGroups(model_parameters, **settings.lion_from_config(engine.optimizer_params()))
        engine._config.zero_allow_untested_optimizer = True  # DeepSpeed knows its own Lions by their classes
    elif given is None:
        decoupled, params = settings.adam_from_config(engine.optimizer_name(), engine.optimizer_params())
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer = kind(model_parameters, **params)
        for group in optimizer.param_groups:
            group["bias_correction"] = True  # DeepSpeed's own Adam, which may load our checkpoint, has it
    elif not isinstance(given, torch.optim.Optimizer) and callable(given):
        optimizer = given(model_parameters)
    check_optimizer(optimizer)
    return optimizer


def _is_offloaded(config: Any) -> bool:
    """Return whether a `DeepSpeedConfig` offloads its optimizer to some device."""
    given = config.zero_config.offload_optimizer
    none = import_module("deepspeed.runtime.zero.offload_config").OffloadDeviceEnum.none
    return bool(given is not None and given.device != none)


def _gets_our_optimizer(config: Any) -> bool:
    """Return whether the engine of a `DeepSpeedConfig` gets its optimizer, if it has one, from this backend.

    Its config has our object, or will be given it by `add_object_for_all`.
    """
    gets_object = KEY in config._param_dict or (object_for_all is not None and _is_offloaded(config))
    return _mode is _Mode.ON and gets_object


def _offload_to_cpu(engine: Any) -> None:
    """Set `offload_optimizer.device` of an engine's config to "cpu" where it is "none", DeepSpeed's default.

    Our optimizer classes build on DeepSpeed's code for an optimizer that is offloaded there.
    """
    if _is_offloaded(engine._config):
        return
    module = import_module("deepspeed.runtime.zero.offload_config")
    zero = engine._config.zero_config
    given = zero.offload_optimizer
    if given is None:
        given = module.DeepSpeedZeroOffloadOptimizerConfig()
    zero.offload_optimizer = given.model_copy(update={"device": module.OffloadDeviceEnum.cpu})
    if engine.global_rank == 0:
        log.warning('%s.device counts as "cpu" beside %s; write it, and this is not said', settings.OFFLOAD, KEY)


def _check_engine(engine: Any) -> None:
    """Raise `ConfigError` for an engine with MoE, pipeline, model or tensor parallelism."""
    if getattr(engine, "has_moe_layers", False):
        OTHER_PARALLELISM.refuse("model", "has MoE layers")
    if getattr(engine, "pipeline_parallelism", False):
        OTHER_PARALLELISM.refuse("model", "PipelineModule")
    mpu = getattr(engine, "mpu", None)
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        OTHER_PARALLELISM.refuse("mpu", "model parallel")
    tensor_parallel = engine.autotp_size() if hasattr(engine, "autotp_size") else 0  # older DeepSpeeds have none
    if tensor_parallel > 1:
        OTHER_PARALLELISM.refuse("tensor_parallel.autotp_size", tensor_parallel)


def add_object_for_all(engine: Any) -> None:
    """Add the object that `enable` was given to an engine's config, if it has none and offloads its optimizer.

    Where the object is not used, or there is none, a warning is logged.

    Raises:
        ConfigError: The config has a key that looks like `multi_tier_offload`, mistyped.
    """
    global _warned_of_own, _warned_of_stock
    config = engine.config or {}
    if KEY in config:
        has_other_object = object_for_all is not None and config[KEY] != object_for_all
        if has_other_object and engine.global_rank == 0 and not _warned_of_own:
            _warned_of_own = True
            log.warning("a DeepSpeed config has its own %s, which is used: not the one that was given for all", KEY)
        return
    settings.refuse_mistyped_key(config)
    is_first_rank = engine.global_rank == 0
    if object_for_all is None:
        if is_first_rank and not _warned_of_stock:
            _warned_of_stock = True
            log.warning("an optimizer stays DeepSpeed's, with its state: its config has no %s (said once)", KEY)
    elif _is_offloaded(engine._config):
        engine.config = {**config, KEY: dict(object_for_all)}  # a copy: the program may use its own elsewhere
    elif is_first_rank:
        log.warning("an optimizer stays DeepSpeed's, with its state: its config has no %s.device", settings.OFFLOAD)


def enable(config: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
    """Let `deepspeed.initialize` use the engine wherever the config has a `multi_tier_offload` object.

    Idempotent. Without that object nothing changes, but for what `config` says; the first such engine is logged as a
    warning, and a name that is nearly `multi_tier_offload` is refused.

    Args:
        config: The object, or a JSON file of it, for programs that write their DeepSpeed config themselves. A config
            that offloads its optimizer (`zero_optimization.offload_optimizer.device`) and has no object gets this
            one. If left out, it is what an earlier call gave, or what the file has that the environment variable
            `OFFLOAD_DEEPSPEED_CONFIG` names.

    Raises:
        ConfigError: If the DeepSpeed that is installed cannot be used, or the object; names what is missing or wrong.
    """
    global _mode, object_for_all, _warned_of_own
    if config is None and object_for_all is None:
        config = os.environ.get(VARIABLE) or None
    given = object_for_all if config is None else settings.load(config)
    if _mode is not _Mode.ON:
        check_deepspeed()
        weights.patch_deepspeed(_undo, _gets_our_optimizer)
    if given is not object_for_all:  # another object: the warning that a config has its own may be logged again
        object_for_all, _warned_of_own = given, False
    _mode = _Mode.ON
    _replace_configure()


def watch() -> None:
    """Warn when a DeepSpeed engine's config has our object, which DeepSpeed ignores, until `enable` is called.

    Idempotent. Nothing else changes; nor does anything in a DeepSpeed whose method cannot be replaced.
    """
    global _mode
    if _mode is _Mode.OFF:  # else it watches already, or the backend is on
        _mode = _Mode.WATCHING
        _act_once_imported()


def _replace_configure() -> None:
    """Replace `DeepSpeedEngine._configure_optimizer`, unless that was done."""
    global _original
    if _original is not None:
        return
    engine_class = getattr(import_module(_ENGINE[0]), _ENGINE[1])
    original = engine_class._configure_optimizer

    @functools.wraps(original)
    def configure(engine: Any, client_optimizer: Any, model_parameters: list[Any]) -> None:
        """Give an engine whose config has our object our optimizer if ON, and warn of the object if WATCHING."""
        if _mode is _Mode.ON:
            add_object_for_all(engine)
        has_object = KEY in (engine.config or {})
        if _mode is _Mode.ON and has_object:
            _configure_optimizer_of(engine, original, client_optimizer, model_parameters)
            return
        if _mode is _Mode.WATCHING and has_object:
            _warn_of_ignored_object(engine)
        original(engine, client_optimizer, model_parameters)

    engine_class._configure_optimizer = configure
    _original = original


def _warn_of_ignored_object(engine: Any) -> None:
    """Warn, once, on rank 0, that DeepSpeed ignores our object."""
    global _warned_of_ignored
    if engine.global_rank == 0 and not _warned_of_ignored:
        _warned_of_ignored = True
        log.warning(
            "a DeepSpeed config has %s, which DeepSpeed ignores: all state stays where its own optimizer keeps it; "
            "run the script by `python -m offload.integrations.deepspeed`, or call enable() before "
            "deepspeed.initialize (said once)",
            KEY,
        )


def disable() -> None:
    """Undo `enable`; engines that were made stay as they are. Idempotent."""
    global _mode, _original, object_for_all, _warned_of_own, _warned_of_stock, _warned_of_ignored
    _mode, object_for_all = _Mode.OFF, None
    _warned_of_own = _warned_of_stock = _warned_of_ignored = False
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AtImport)]
    _undo.close()
    if _original is None:  # nothing is replaced
        return
    engine_class = getattr(import_module(_ENGINE[0]), _ENGINE[1])
    # If somebody has wrapped our method since, it stays below theirs, and passes calls on while the mode is OFF.
    if getattr(engine_class._configure_optimizer, "__wrapped__", None) is _original:
        engine_class._configure_optimizer = _original
    _original = None


class _AtImport(shared.AtImport):  # type: ignore[misc]
    """An import hook that switches the backend on, or has it watch, right after DeepSpeed's first import.

    DeepSpeed reads environment variables as it is imported. So this does not import it earlier than the program does.
    """

    enables = False
    """Whether `enable` is called then; else the backend only watches, as `watch` says."""

    def __init__(self) -> None:
        super().__init__("deepspeed", lambda: _act_once_imported(enables=self.enables))


def _act_once_imported(*, enables: bool = False) -> None:
    """Enable the backend, or only have it watch, right after DeepSpeed's import; at once if it has been imported."""
    if "deepspeed" not in sys.modules:
        finder = next((finder for finder in sys.meta_path if isinstance(finder, _AtImport)), None)
        if finder is None:
            finder = _AtImport()
            sys.meta_path.insert(0, finder)
        finder.enables |= enables
    elif enables:
        enable()
    elif _mode is _Mode.WATCHING:
        with contextlib.suppress(ImportError, AttributeError):  # an unknown version, or one still being imported
            _replace_configure()


def enable_at_import() -> None:
    """Call `enable` when DeepSpeed is imported, or now if it is already. Idempotent.

    For launchers of programs that may never import DeepSpeed, or set its environment variables before they do.
    """
    _act_once_imported(enables=True)


@contextlib.contextmanager
def _enabled() -> Iterator[None]:
    """Enable the backend while this context lasts, then restore the mode from before."""
    before = _mode
    enable()
    try:
        yield
    finally:
        if before is not _Mode.ON:
            disable()  # which sets the mode OFF
        if before is _Mode.WATCHING:
            watch()


def initialize(*arguments: Any, **keywords: Any) -> Any:
    """Call `deepspeed.initialize` with the backend on for that one call.

    Returns:
        What `deepspeed.initialize` does.
    """
    with _enabled():
        return import_module("deepspeed").initialize(*arguments, **keywords)
