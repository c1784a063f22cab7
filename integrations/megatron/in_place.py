"""Megatron-Core's checkpoints whose state stays where it lies: our folder in theirs, and a pointer in their files.

`sharded_state_dict` has the id of our checkpoint in the place of all state. Which folder that goes to, or comes from,
`dist_checkpointing.save` and `load` alone know, so these are replaced, too. A checkpoint is Megatron's when its
`metadata.json` is there, which is written after our folder has been committed.

In the folder parameters' names begin with the number of the model-parallel part. So all ranks save to it together,
and any number of data-parallel ranks goes on from it.
"""

from __future__ import annotations

import functools
import os
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import torch

from offload import CheckpointError, SaveRequest
from offload.combinations import MEGATRON_LOCAL
from offload.integrations.shared import POINTER, WatchedFolder, is_to_copy, release
from offload.optim.folders import begin_folder, directory_of, end_folder
from offload.optim.ranks import on_all_ranks, world

KEY, SHARDING = "distrib_optim_sharding_type", "offload_in_place"
"""What the metadata of such a checkpoint have."""

FAILED = "another rank could not do its part of a checkpoint; its log says why"
"""What a rank says where another one has failed."""

_CHECKPOINTING = "megatron.core.dist_checkpointing"

asked_states: dict[str, Any] = {}
"""The `DistributedOptimizer`s whose state dicts are to be saved next, by the checkpoints' ids."""

_read: dict[str, str] = {}
"""Checkpoints of Megatron's that have been read, by the ids of ours in them."""

_unmarked: dict[str, list[str]] = {}
"""The ids of ours in the newest save to each checkpoint of Megatron's that is not marked as whole yet."""

_watched: weakref.WeakKeyDictionary[Any, dict[str, WatchedFolder]] = weakref.WeakKeyDictionary()
"""By engine, and by the name that they had, folders whose state stays on the paths until they are deleted."""


def sharded_state_dict(distributed: Any, is_loading: bool) -> dict[str, Any]:
    """Return what `DistributedOptimizer.sharded_state_dict` does, with an id for state; collective for a save."""
    ids = [uuid.uuid4().hex]  # in a load Megatron replaces it by the id that was saved
    if not is_loading:
        torch.distributed.broadcast_object_list(ids)
        for known in [known for known, each in asked_states.items() if each is distributed]:
            del asked_states[known]  # it was not saved
        asked_states[ids[0]] = distributed
    found = {**distributed.state_dict(), "param_state": {POINTER: ids[0]}}
    kind = import_module(f"{_CHECKPOINTING}.mapping").ShardedObject
    # Of equal objects Megatron writes the one whose numbers are all 0.
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
    ids = [*_ids(sharded_state_dict)]
    if unknown := [id for id in ids if id not in asked_states]:
        raise CheckpointError(f"state {unknown[0]} has been saved: make a state dict anew for each save")
    asked = {id: asked_states.pop(id) for id in ids}
    if not asked:
        return original(sharded_state_dict, checkpoint_dir, *rest, **options)
    place, inner = directory_of(checkpoint_dir), [distributed.optimizer for distributed in asked.values()]
    if len({optimizer.folder for optimizer in inner}) < len(inner):
        raise CheckpointError("two optimizers would save to one folder: save each to a checkpoint of its own")
    begin_folder(place)
    _unmarked[place] = ids
    ends, ended = list[Future[None]](), list[int]()
    try:
        on_all_ranks(lambda: ends.extend(begin_saves(place, asked, ended)), FAILED)
    except BaseException:
        ended += range(world()[0])  # saves that have begun wait for no rank
        raise
    wait = functools.partial(on_all_ranks, lambda: [end.result() for end in ends], FAILED)
    options["content_metadata"] = {**(options.get("content_metadata") or {}), KEY: SHARDING}
    if not options.get("async_sharded_save"):
        wait()
    request = original(sharded_state_dict, checkpoint_dir, *rest, **options)
    end = functools.partial(_end_folder, inner[0], place, ids)
    if request is None:
        end()
    else:
        # The last one writes `metadata.json`; those before take what Megatron's writers have left, also if ours fail.
        request.finalize_fns[-1:] = [wait, request.finalize_fns[-1], end]
    return request


def _end_folder(optimizer: Any, place: str, ids: list[str]) -> None:
    """Mark a checkpoint of Megatron's and mirror it, unless a newer save to it, which does, has begun. Collective."""
    if _unmarked.get(place) == ids:
        del _unmarked[place]
        end_folder(optimizer, place)


def _ids(state: Any) -> Iterator[str]:
    """Yield the ids of our checkpoints in a state dict of Megatron's, to be saved or as it was loaded."""
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    for value in values:
        pointer = getattr(value, "data", value)  # of a `ShardedObject`, in a state dict to be saved
        if isinstance(pointer, dict) and POINTER in pointer:
            yield pointer[POINTER]
        else:
            yield from _ids(value)


def begin_saves(place: str, asked: Mapping[str, Any], ended: Collection[int] = ()) -> list[Future[None]]:
    """Begin to save; a copy where as many checkpoints are kept as the paths have room for, as none is Megatron's.

    Args:
        place: Megatron's checkpoint.
        asked: What is saved, by the ids of our checkpoints.
        ended: Ranks that are not waited for any more, which may come while the saves go on.

    Returns:
        For each save, what has its outcome once it has ended.
    """
    (ranks, rank), ends = world(), list[Future[None]]()
    for id, distributed in asked.items():
        optimizer = distributed.optimizer
        engine, folder = optimizer.engine_with_state_written(), os.path.join(place, optimizer.folder)
        watched = _watched.setdefault(engine, {})
        for known in dict.fromkeys(engine.checkpoints.kept):
            _watch(watched, known)
            if watched[known].is_deleted:  # by Megatron, or by its user
                release(engine, known)
                del watched[known]
        # One that had this name and was renamed is kept: the folder's new content gets no room from it.
        before = watched.get(folder)
        was_renamed = before is not None and not (before.is_there or before.is_deleted)
        is_copy, end = was_renamed or is_to_copy(engine, folder), Future[None]()
        engine.checkpoints.save(
            SaveRequest(
                folder,
                id=id,
                rank=rank,
                ranks=ranks,
                names=_names(distributed),
                mirrored=False,
                copy=is_copy,
                replica=distributed.distributed_optimizer_instance_id > 0,  # the first instance saves the same state
                on_done=functools.partial(_end, end, folder, None if is_copy else watched),
                find_ended=lambda: ended,
            )
        )
        ends.append(end)
    return ends


def _watch(watched: dict[str, WatchedFolder], folder: str) -> None:
    """Watch a folder, unless one of this name is watched already."""
    if folder not in watched:
        watched[folder] = WatchedFolder(folder)


def _end(
    end: Future[None], folder: str, watched: dict[str, WatchedFolder] | None, error: BaseException | None
) -> None:
    """Note the outcome of a save to a folder, which is watched from then on if its state stays on the paths."""
    if error is None:
        if watched is not None:  # else it is a copy, which has nothing on the paths; nor has a failed save
            watched[folder] = WatchedFolder(folder)
        end.set_result(None)
    else:
        end.set_exception(error)


def refuse_local(
    original: Callable[..., Any], kind: type, sharded_state_dict: Any, *rest: Any, **options: Any
) -> Any:
    """Stand in for `MCoreTensorAwareStateDict.from_state_dict`, which copies a state dict to memory or a local disk.

    Raises:
        ConfigError: There is no state in it.
    """
    if any(True for _ in _ids(sharded_state_dict)):
        MEGATRON_LOCAL.refuse("layout", "in_place")
    return original(kind, sharded_state_dict, *rest, **options)


def load(
    original: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: Any, *rest: Any, **options: Any
) -> Any:
    """Stand in for `dist_checkpointing.load`: `load_state` is told by it where the folder is."""
    found = original(sharded_state_dict, checkpoint_dir, *rest, **options)
    state = found[0] if isinstance(found, tuple) else found  # with names of what was missing, where these are wanted
    if ids := [*_ids(state)]:
        _read.update(dict.fromkeys(ids, directory_of(checkpoint_dir)))
    return found


def load_state(distributed: Any, id: str) -> None:
    """Go on from the folder of the checkpoint that `load` has read; collective.

    Raises:
        CheckpointError: It is not there, or belongs to another checkpoint of Megatron's; raised on all ranks.
    """

    def part() -> None:
        """Load this rank's part."""
        engine, (ranks, rank), place = distributed.optimizer.engine_with_state_written(), world(), _read.get(id)
        if place is None:
            raise CheckpointError(f"state {id} is in a folder: load the state dict by dist_checkpointing.load")
        folder = os.path.join(place, distributed.optimizer.folder)
        with engine.checkpoints.open(folder) as checkpoint:
            if checkpoint.id != id:
                raise CheckpointError(f"{place} is not whole: its files are of several checkpoints")
            engine.checkpoints.load(checkpoint, names=_names(distributed), rank=rank, ranks=ranks)
            engine.finish(on_gpu=True)
        _watch(_watched.setdefault(engine, {}), folder)

    on_all_ranks(part, FAILED)


def _names(distributed: Any) -> dict[str, str]:
    """Return what parameters of an engine are called in the folder."""
    parameters, part = distributed.optimizer.engine.plan.layout.parameters, distributed.data_parallel_group_idx
    return {parameter.name: f"part{part}.{parameter.name}" for parameter in parameters}
