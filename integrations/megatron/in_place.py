"""Megatron-Core's checkpoints whose state stays where it lies: our folder in theirs, and a pointer in their files.

`sharded_state_dict` has the id of our checkpoint in the place of all state. Which folder that goes to, or comes from,
`dist_checkpointing.save` and `load` alone know, so these are replaced, too. A checkpoint is Megatron's when its
`metadata.json` is there, which is written after our folder has been committed.

In the folder parameters' names begin with the number of the model-parallel part. So all ranks save to it together,
and any number of data-parallel ranks goes on from it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import uuid
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

from offload import CheckpointError, SaveRequest
from offload.integrations.shared import POINTER, is_to_copy
from offload.optim.folders import begin_folder, end_folder
from offload.optim.ranks import on_all_ranks, world

KEY, SHARDING = "distrib_optim_sharding_type", "offload_in_place"
"""What the metadata of such a checkpoint have."""

FAILED = "another rank could not do its part of a checkpoint; its log says why"
"""What a rank says where another one has failed."""

_CHECKPOINTING = "megatron.core.dist_checkpointing"

_asked: dict[str, Any] = {}
"""The `DistributedOptimizer`s whose state dicts are to be saved next, by the checkpoints' ids."""

_loading: list[str] = []
"""The checkpoint of Megatron's that was read last."""


def sharded_state_dict(distributed: Any, is_loading: bool) -> dict[str, Any]:
    """Return what `DistributedOptimizer.sharded_state_dict` does, with an id for state; collective for a save."""
    ids = [uuid.uuid4().hex]
    if not is_loading:
        torch.distributed.broadcast_object_list(ids)
        for known in [known for known, each in _asked.items() if each is distributed]:
            del _asked[known]  # it was not saved
        _asked[ids[0]] = distributed
    found = {**distributed.state_dict(), "param_state": {POINTER: ids[0]}}
    kind = import_module(f"{_CHECKPOINTING}.mapping").ShardedObject
    replica = distributed.distributed_optimizer_instance_id, 0, distributed.data_parallel_group.rank()
    part = f"optimizer.distributed.dp_group_idx_{distributed.data_parallel_group_idx}"
    objects = {name: kind(f"{part}.{name}", value, (1,), (0,), replica) for name, value in found.items()}
    return {**objects, "param_state_sharding_type": SHARDING}


def save(
    original: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: Any, *rest: Any, **options: Any
) -> Any:
    """Stand in for `dist_checkpointing.save`: begin our folders first, where a state dict has their ids. Collective.

    Ours go on behind training with `async_sharded_save`, and are awaited before Megatron ends its own. Once that has
    ended the whole folder is marked, and mirrored.

    Raises:
        CheckpointError: Ours could not be saved; raised on all ranks.
    """
    values = import_module(f"{_CHECKPOINTING}.dict_utils").nested_values(sharded_state_dict)
    pointers = (value.data for value in values if isinstance(getattr(value, "data", None), dict))
    asked = {pointer[POINTER]: _asked.pop(pointer[POINTER]) for pointer in pointers if POINTER in pointer}
    if not asked:
        return original(sharded_state_dict, checkpoint_dir, *rest, **options)
    place, inner = os.path.abspath(checkpoint_dir), [distributed.optimizer for distributed in asked.values()]
    begin_folder(place)
    on_all_ranks(functools.partial(begin_saves, place, asked), FAILED)
    wait = functools.partial(on_all_ranks, lambda: [each.engine.checkpoints.wait() for each in inner], FAILED)
    options["content_metadata"] = {**(options.get("content_metadata") or {}), KEY: SHARDING}
    if not options.get("async_sharded_save"):
        wait()
    request = original(sharded_state_dict, checkpoint_dir, *rest, **options)
    end = functools.partial(end_folder, inner[0], place)
    if request is None:
        end()
    else:
        request.finalize_fns[:] = [wait, *request.finalize_fns, end]
    return request


def begin_saves(place: str, asked: Mapping[str, Any]) -> None:
    """Begin to save; a copy where as many checkpoints are kept as the paths have room for, as none is Megatron's."""
    ranks, rank = world()
    for id, distributed in asked.items():
        engine, folder = distributed.optimizer.settled(), os.path.join(place, distributed.optimizer.folder)
        for known in engine.checkpoints.kept:
            if not os.path.isdir(known):  # Megatron, or its user, has deleted it
                engine.checkpoints.release(known, after_mirror=True)
        request = SaveRequest(folder, id=id, rank=rank, ranks=ranks, names=_names(distributed), mirrored=False)
        is_copy, is_replica = is_to_copy(engine, folder), distributed.distributed_optimizer_instance_id > 0
        engine.checkpoints.save(dataclasses.replace(request, copy=is_copy, replica=is_replica))


def load(
    original: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: Any, *rest: Any, **options: Any
) -> Any:
    """Stand in for `dist_checkpointing.load`: `load_state` is told by it where the folder is."""
    _loading[:] = [os.path.abspath(checkpoint_dir)]
    return original(sharded_state_dict, checkpoint_dir, *rest, **options)


def load_state(distributed: Any, id: str) -> None:
    """Go on from the folder of the checkpoint that `load` has read; collective.

    Raises:
        CheckpointError: It is not there, or belongs to another checkpoint of Megatron's; raised on all ranks.
    """

    def part() -> None:
        engine, (ranks, rank) = distributed.optimizer.settled(), world()
        with engine.checkpoints.open(os.path.join(_loading[0], distributed.optimizer.folder)) as checkpoint:
            if checkpoint.id != id:
                raise CheckpointError(f"{_loading[0]} is not whole: its files are of several checkpoints")
            engine.checkpoints.load(checkpoint, names=_names(distributed), rank=rank, ranks=ranks)
            engine.finish(on_gpu=True)

    on_all_ranks(part, FAILED)


def _names(distributed: Any) -> dict[str, str]:
    """Return what parameters of an engine are called in the folder."""
    parameters, part = distributed.optimizer.engine.plan.layout.parameters, distributed.data_parallel_group_idx
    return {parameter.name: f"part{part}.{parameter.name}" for parameter in parameters}
