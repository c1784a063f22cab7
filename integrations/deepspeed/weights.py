"""ZeRO-3's weights in files, where a config has them on NVMe: `{"device": "nvme", "nvme_path": ...}`.

DeepSpeed is told that they are on the CPU, and so does not use its own swapper. It still makes its tensors, but these
are moved to mapped files: each weight that `zero.Init` cuts, unless it is small, to a file of its own as it is made;
later all weights of an engine, to one file that is reserved before the engine changes anything. Files have no names,
and each rank has its own.

This relies, beside the methods of `switch.RELIED_ON`, on DeepSpeed's reading and writing parts of weights by their
tensors: a parameter's `ds_tensor` is this rank's part, flat; `ds_process_group` are the ranks that have the others.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from offload import ConfigError
from offload.combinations import SWAPPED_BY_DEEPSPEED
from offload.integrations import shared
from offload.integrations.deepspeed import settings
from offload.integrations.deepspeed.ranks import on_all_ranks
from offload.weights.partitions import Partitions

CONFIG = "deepspeed.runtime.config", "DeepSpeedConfig"
INIT = "deepspeed.runtime.zero.partition_parameters", "Init"

LEAST_BYTES = 1 << 20
"""Smaller parts, of which there are many, stay in memory until an engine has a file for all."""

_folders: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""The folder of each `zero.Init` whose partitions lie in files."""
_is_reserved = False
"""Whether an engine that has a file for all its weights is just being made."""


def patch_deepspeed(undo: contextlib.ExitStack, is_ours: Callable[[Any], bool]) -> None:
    """Replace DeepSpeed's methods so that weights lie in files where a config says NVMe, until `undo` is closed.

    `is_ours` returns whether engines of a `DeepSpeedConfig` get their optimizer from this backend.
    """
    config, init = (getattr(import_module(module), kind) for module, kind in (CONFIG, INIT))
    initialize, validate, partition = config._initialize_params, init._validate_remote_device, init._partition_param

    @functools.wraps(initialize)
    def initialize_params(deepspeed_config: Any, param_dict: Any) -> None:
        """Refuse a misplaced object; tell DeepSpeed that weights are on the CPU where its config has them on NVMe."""
        settings.refuse_misplaced_object(param_dict)
        initialize(deepspeed_config, param_dict)
        if is_ours(deepspeed_config) and settings.weights_folder(deepspeed_config._param_dict) is not None:
            zero = deepspeed_config.zero_config
            # Not pinned, as the mapped files that they are moved to are not.
            zero.offload_param = zero.offload_param.model_copy(update={"device": "cpu", "pin_memory": False})

    @functools.wraps(validate)
    def validate_remote_device(init_context: Any, remote_device: Any, ds_config: Any) -> Any:
        """Note the folder for weights of a `zero.Init`, which calls this with its config, as it is made.

        Not while an engine is made that has reserved a file for all its weights.
        """
        folder = None if _is_reserved or ds_config is None else _weights_folder_of(ds_config)
        if folder is not None:
            _folders[init_context] = folder
        return validate(init_context, remote_device, ds_config)

    @functools.wraps(partition)
    def partition_param(init_context: Any, param: Any, *arguments: Any, **keywords: Any) -> Any:
        """Cut a weight as DeepSpeed does; the first time, move this rank's part of it to a mapped file."""
        is_first = param.ds_tensor is None
        result = partition(init_context, param, *arguments, **keywords)
        part = param.ds_tensor
        if is_first and init_context in _folders and part.is_cpu and part.nbytes >= LEAST_BYTES:
            # Ranks have parts of one size, so that all of them come here.
            folder = _folders[init_context]
            file = on_all_ranks(lambda: _open_partitions(folder, [part.nbytes]), param.ds_process_group)
            file.move(part)
            file.trim_heap()
        return result

    shared.replace(undo, config, "_initialize_params", initialize_params)
    shared.replace(undo, init, "_validate_remote_device", validate_remote_device)
    shared.replace(undo, init, "_partition_param", partition_param)


def _weights_folder_of(config: Any) -> str | None:
    """Return the folder for weights that a `DeepSpeedConfig` names; None if it names none, or is not ours."""
    given = config.zero_config.offload_param
    # In a config that is ours `initialize_params` has set the device to "cpu"; the config's text still says "nvme".
    is_ours = given is not None and given.device != "nvme"
    return settings.weights_folder(config._param_dict) if is_ours else None


@contextlib.contextmanager
def reserve_file(engine: Any, optimizer: Any) -> Iterator[Partitions | None]:
    """Yield a file with room for this rank's part of an engine's weights; None if its config has them elsewhere.

    Weights are not moved here: the engine's optimizer does that while this context lasts. Collective.

    Raises:
        ConfigError: DeepSpeed's own swapper has some weights, or the folder cannot be used.
        TierFullError: There is no room.
    """
    global _is_reserved
    # The model's, and those that the optimizer has beside them; once each.
    parameters = dict.fromkeys(engine.module.parameters())
    for group in optimizer.param_groups:
        parameters.update(dict.fromkeys(group["params"]))
    given = engine._config.zero_config.offload_param
    # The config was read before the backend was switched on, or was given an object for it.
    if given is not None and given.device == "nvme":
        SWAPPED_BY_DEEPSPEED.refuse(f"{settings.WEIGHTS}.device", "nvme")
    for parameter in parameters:
        if getattr(parameter, "nvme_swapper", None) is not None:
            SWAPPED_BY_DEEPSPEED.refuse(engine.param_names.get(parameter, "parameter"), "has DeepSpeed's swapper")
    if (folder := _weights_folder_of(engine._config)) is None:
        yield None
        return
    ranks = torch.distributed.get_world_size(engine.seq_data_parallel_group)
    part_sizes = [  # bytes of this rank's part of each weight: ranks have equal parts, rounded up
        -(-getattr(parameter, "ds_numel", parameter.numel()) // ranks) * parameter.itemsize
        for parameter in parameters
    ]
    file = on_all_ranks(lambda: _open_partitions(folder, part_sizes), engine.seq_data_parallel_group)
    _is_reserved = True  # a `zero.Init` that DeepSpeed makes meanwhile opens no files of its own
    try:
        yield file
    finally:
        _is_reserved = False


def _open_partitions(folder: str, sizes: list[int]) -> Partitions:
    """Reserve a file for parts of these sizes in bytes; an error names DeepSpeed's key of the folder."""
    try:
        return Partitions(folder, sizes)
    except ConfigError as error:
        raise ConfigError(settings.WEIGHTS_FOLDER, folder, error.allowed) from error.__cause__
