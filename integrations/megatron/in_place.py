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
"""By the id of a checkpoint of ours that is to be saved next, the `DistributedOptimizer` whose state dict has it."""

_read: dict[str, str] = {}
"""By the id of a checkpoint of ours, the folder of Megatron's checkpoint in which `load` has read the id."""

_unmarked: dict[str, list[str]] = {}
"""By folder of a checkpoint of Megatron's that is not marked as whole yet, ids of ours in the newest save to it."""

_watched: weakref.WeakKeyDictionary[Any, dict[str, WatchedFolder]] = weakref.WeakKeyDictionary()
"""By engine, and by the name that they had, folders of ours whose state stays on the paths until they are deleted."""


def sharded_state_dict(distributed: Any, is_loading: bool) -> dict[str, Any]:
    """Return a `DistributedOptimizer`'s sharded state dict, with the id of our checkpoint in the place of state.

    For a save this is a collective: all ranks have one new id. For a load, Megatron replaces the id by the saved one.
    """
    ids = [uuid.uuid4().hex]  # a list, in which `broadcast_object_list` puts rank 0's id
    if not is_loading:
        torch.distributed.broadcast_object_list(ids)
        # An earlier state dict of this optimizer that was never saved.
        for stale_id in [stale_id for stale_id, each in asked_states.items() if each is distributed]:
            del asked_states[stale_id]
        asked_states[ids[0]] = distributed
    entries = {**distributed.state_dict(), "param_state": {POINTER: ids[0]}}
    sharded_object = import_module(f"{_CHECKPOINTING}.mapping").ShardedObject
    # Several ranks have equal objects. Megatron writes the one whose replica numbers are all 0.
    replica = distributed.distributed_optimizer_instance_id, 0, distributed.data_parallel_group.rank()
    part = f"optimizer.distributed.dp_group_idx_{distributed.data_parallel_group_idx}"
    # Each is whole: at offset 0 of a global shape of 1.
    objects = {name: sharded_object(f"{part}.{name}", value, (1,), (0,), replica) for name, value in entries.items()}
    return {**objects, "param_state_sharding_type": SHARDING}


def save(
    original: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: Any, *rest: Any, **options: Any
) -> Any:
    """Replaces `dist_checkpointing.save`: also save our checkpoints whose ids are in the state dict. Collective.

    Our saves begin first, and have ended before Megatron's does: before it writes its files, or, with
    `async_sharded_save`, by which both go on behind training, before it writes `metadata.json`. When Megatron's save
    has ended, its folder is marked as whole and mirrored.

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
    outcomes, ended_ranks = list[Future[None]](), list[int]()  # of saves; ranks that these need not wait for
    try:
        on_all_ranks(lambda: outcomes.extend(begin_saves(place, asked, ended_ranks)), FAILED)
    except BaseException:
        ended_ranks += range(world()[0])  # saves that have begun wait for no rank, and so end
        raise
    wait = functools.partial(on_all_ranks, lambda: [end.result() for end in outcomes], FAILED)
    # Megatron saves these metadata, and a load is given them again: `KEY` then says that state is in place.
    options["content_metadata"] = {**(options.get("content_metadata") or {}), KEY: SHARDING}
    if not options.get("async_sharded_save"):
        wait()
    request = original(sharded_state_dict, checkpoint_dir, *rest, **options)
    end = functools.partial(_end_folder, inner[0], place, ids)  # whose mirror gets the folder: any of ours will do
    if request is None:  # Megatron's save has ended
        end()
    else:
        # Of Megatron's functions the last one writes `metadata.json`. Those before it collect what Megatron's writers
        # have left, and run even if our saves have failed.
        request.finalize_fns[-1:] = [wait, request.finalize_fns[-1], end]
    return request


def _end_folder(optimizer: Any, place: str, ids: list[str]) -> None:
    """Mark a checkpoint of Megatron's as whole, and mirror it. Collective.

    Nothing is done if `ids` are not of the newest save to the folder `place`: a newer one marks it when it ends.
    """
    if _unmarked.get(place) == ids:
        del _unmarked[place]
        end_folder(optimizer, place)


def _ids(state: Any) -> Iterator[str]:
    """Yield the ids of our checkpoints in a state dict of Megatron's that is to be saved, or was loaded."""
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    for value in values:
        pointer = getattr(value, "data", value)  # of a `ShardedObject`, in a state dict to be saved
        if isinstance(pointer, dict) and POINTER in pointer:
            yield pointer[POINTER]
        else:
            yield from _ids(value)


def begin_saves(place: str, asked: Mapping[str, Any], ended: Collection[int] = ()) -> list[Future[None]]:
    """Begin to save this rank's part of our checkpoints into folders of Megatron's checkpoint.

    State usually stays where it lies on the paths. It is copied if another checkpoint would have to be released for
    that, as it is for Megatron and its user to delete checkpoints. Those that they have deleted are released before.

    Args:
        place: Folder of Megatron's checkpoint.
        asked: The `DistributedOptimizer`s whose state is saved, by the ids of our checkpoints.
        ended: Ranks that are not waited for any more; the caller may add some while the saves go on.

    Returns:
        For each save, a future of its outcome.
    """
    (ranks, rank), ends = world(), list[Future[None]]()
    for id, distributed in asked.items():
        optimizer = distributed.optimizer
        engine, folder = optimizer.engine_with_state_written(), os.path.join(place, optimizer.folder)
        watched = _watched.setdefault(engine, {})
        for known in dict.fromkeys(engine.checkpoints.kept):  # once each: two checkpoints may have one folder's name
            _watch(watched, known)
            if watched[known].is_deleted:  # by Megatron, or by its user
                release(engine, known)
                del watched[known]
        # A save to a folder usually replaces the older checkpoint there, whose state is released for it. If that one
        # was renamed, it is still wanted, so the save is a copy.
        earlier = watched.get(folder)
        was_renamed = earlier is not None and not (earlier.is_there or earlier.is_deleted)
        is_copy, end = was_renamed or is_to_copy(engine, folder), Future[None]()
        engine.checkpoints.save(
            SaveRequest(
                folder,
                id=id,
                rank=rank,
                ranks=ranks,
                names=_names(distributed),
                mirrored=False,  # `_end_folder` has all of Megatron's folder mirrored, this one included
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
    """Set the future `end` to the outcome of a save; `error` is None for success.

    If its state stays on the paths, `watched` are the engine's watched folders, and this folder becomes one of them.
    """
    if error is None:
        if watched is not None:  # else it is a copy, which has nothing on the paths; nor has a failed save
            watched[folder] = WatchedFolder(folder)
        end.set_result(None)
    else:
        end.set_exception(error)


def refuse_local(
    original: Callable[..., Any], kind: type, sharded_state_dict: Any, *rest: Any, **options: Any
) -> Any:
    """Replaces `MCoreTensorAwareStateDict.from_state_dict`, which copies a state dict to memory or a local disk.

    Raises:
        ConfigError: The state dict has an id of ours in the place of state, so that there is no state to copy.
    """
    if any(True for _ in _ids(sharded_state_dict)):  # if there is an id at all
        MEGATRON_LOCAL.refuse("layout", "in_place")
    return original(kind, sharded_state_dict, *rest, **options)


def load(
    original: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: Any, *rest: Any, **options: Any
) -> Any:
    """Replaces `dist_checkpointing.load`: note, for `load_state`, from which folder it has read ids of ours."""
    loaded = original(sharded_state_dict, checkpoint_dir, *rest, **options)
    state = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple also has names of what was missing
    if ids := [*_ids(state)]:
        _read.update(dict.fromkeys(ids, directory_of(checkpoint_dir)))
    return loaded


def load_state(distributed: Any, id: str) -> None:
    """Load the state of our checkpoint `id`, from the folder in which `load` has read that id. Collective.

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
            engine.finish(on_gpu=True)  # the load has set weights, which other streams may read next
        _watch(_watched.setdefault(engine, {}), folder)

    on_all_ranks(part, FAILED)


def _names(distributed: Any) -> dict[str, str]:
    """Return the names in our checkpoint of an engine's parameters: with the number of the model-parallel part."""
    parameters, part = distributed.optimizer.engine.plan.layout.parameters, distributed.data_parallel_group_idx
    return {parameter.name: f"part{part}.{parameter.name}" for parameter in parameters}
