"""Weights in host memory, for a model that does not fit on its device: each layer is copied there when it computes.

torch's FSDP2, on a mesh of one device, copies the weights, which it calls gathering. This module adds what FSDP2
lacks for that: which modules form a group, memory that is registered with the device once and at its exact size,
state dicts of plain tensors, and errors for changes that FSDP2 would not notice.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from offload import combinations
from offload.device.driver import Driver
from offload.device.pinning import PinnedMemory
from offload.errors import ConfigError
from offload.memory.arenas import Arena
from offload.optim import shards
from offload.units import format_bytes
from offload.weights.alone import Alone, alone, check_alone
from offload.weights.layers import GatherGroups, check_weights, give_buffers, own_parameters
from offload.weights.mapping import PAGE_BYTES, LayerReadAhead, MappedFile, is_mapped, up
from offload.weights.safetensors import checked, read_into

log = logging.getLogger("offload")

NO_PASS = -1
"""torch's number of the backward pass when none is under way."""


def weights_in_host_memory(
    model: nn.Module,
    *,
    layers: Sequence[nn.Module] | None = None,
    on_device: Iterable[str] = (),
    path: str | os.PathLike[str] | None = None,
    safetensors: Iterable[str | os.PathLike[str]] = (),
) -> WeightsInHostMemory:
    """Move a model's weights to host memory, from where they are copied to the current device a layer at a time.

    Call it before the optimizer is made, and give that `model.named_parameters()`: they are new objects, torch's
    `DTensor`s on a mesh of one device. The model is called as before; inputs may be on the CPU. FSDP2 copies weights
    to the device before a layer's forward and backward pass, frees the copies after it, and copies gradients to host
    memory. `model.state_dict()` returns plain tensors over the memory of the weights, and `model.load_state_dict()`
    takes plain tensors.

    Buffers go to the device. A model on the CPU is never whole on the device. One on the meta device gets memory
    here, as by `weights_in_file`: zeros until something writes it. A default process group of this one process is
    made if there is none, and ends with the model.

    Args:
        model: On the CPU, on the meta device, or on the current device.
        layers: Modules that are used one after another; by default those that the model's lists repeat.
        on_device: Names of frozen weights, or of modules with frozen weights alone, that stay on the device.
        path: A folder on a drive: weights lie in a file there that is mapped into memory, as by `weights_in_file`,
            and are read layer by layer if memory has no room for all. The memory is not pinned then.
        safetensors: Files whose tensors, by their names, are read into the model one at a time.

    Returns:
        An object that describes this; it need not be kept.

    Raises:
        ConfigError: There is no accelerator, or a weight cannot be copied this way, or the model has an optimizer
            already, or belongs to another framework, or a file has a tensor that the model lacks, or a buffer on the
            meta device is not persistent, and in no file; nothing has changed then.
        OffloadError: The system does not have that much memory, or the drive no room.
    """
    return WeightsInHostMemory(model, layers, on_device, path, safetensors)


class WeightsInHostMemory:
    """Weights of a model that lie in host memory; see `weights_in_host_memory`.

    Attributes:
        device: The device that computes.
        file: The mapped file with the weights; None if they lie in registered memory.
        nbytes: Bytes of the weights in host memory, with padding for alignment.
        pinned_bytes: How many of these bytes are pinned.
        window_bytes: The most that is on the device at a time: the model's own weights, and those of two layers.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module] | None = None,
        on_device: Iterable[str] = (),
        path: str | os.PathLike[str] | None = None,
        safetensors: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        # Whatever can refuse the model comes first, so that nothing has changed then.
        stays = _weights_to_stay(model, on_device)
        _check_free(model)
        files = checked(model, safetensors)
        modules = GatherGroups(model, layers, stays).modules
        driver = _driver()
        self.device = driver.device
        _check_weights_and_buffers(model, stays, self.device)
        self._pinned, self._arenas = PinnedMemory(driver), list[Arena]()
        self._gathering: dict[Any, tuple[list[torch.Tensor], Any]] = {}
        """By group that FSDP2 is gathering: copies of its weights on the device, and an event after these copies."""
        self._last_copy: Any = None  # the newest of these events
        self._places: dict[Any, tuple[str, int]] = {}
        """Name and address of each weight, by torch's `FSDPParam`."""
        self.file: MappedFile | None = None
        self._ranges: list[tuple[int, int]] = []
        """Offset and size of each group's weights in the file."""
        self._layer_numbers: dict[Any, int] = {}
        """By group its index into `_ranges`."""

        if path is not None:
            weights_bytes = sum(up(weight.nbytes) for weight in model.parameters() if weight not in stays)
            padding_bytes = len(modules) * PAGE_BYTES  # at most: each group begins on a page
            self.file = MappedFile(path, up(weights_bytes + padding_bytes, PAGE_BYTES))
        process_group = alone(self.device)
        end = weakref.finalize(self, _free_memory, self._pinned, self._arenas, process_group)
        end.atexit = False  # the end of the process frees all of it anyway
        with driver.current():
            originals = _replace_by_meta_weights(model, stays)
            _shard(model, modules, stays, self.device)
            self._groups = shards.fsdp_groups(model)
            layer_bytes = {group: self._move_group(group, originals) for group in self._groups}
            # The model becomes FSDP2's root now: later the root would be whichever of its modules is called first.
            _state_of(model)._lazy_init()

        self.nbytes = sum(layer_bytes.values())
        self.pinned_bytes = self._pinned.pinned_bytes
        self._layers = None if self.file is None else LayerReadAhead(self.file, [[place] for place in self._ranges])
        # The model's own weights, those in no layer, stay on the device from the first to the last layer. They are
        # taken out of `layer_bytes`, which has layers alone from here on.
        own_bytes = sum(layer_bytes.pop(group) for group in self._groups if model in group.modules)
        # One layer is computed while the next one is copied.
        self.window_bytes = own_bytes + sum(sorted(layer_bytes.values())[-2:])
        self._hook(model)
        read_into(model, files, self.file)
        window = format_bytes(self.window_bytes)
        log.info(
            "%s of weights lie in host memory: %d, in %d layers and the rest, of which %s are on %s at a time",
            *(format_bytes(self.nbytes), len(self._places), len(layer_bytes), window, self.device),
        )

    def __deepcopy__(self, memo: object) -> WeightsInHostMemory:
        """Return this object: torch refuses to copy such a model, and copies of its modules do not need this."""
        return self

    def _move_group(self, group: Any, originals: _Originals) -> int:
        """Move the weights of a group to an arena of their own, or to the file; return their bytes, with padding.

        `originals` has the user's weights, in whose place FSDP2 has sharded weights on the meta device.
        """
        fsdp_params = group.fsdp_params
        weights = [originals[p._module_info.module, p._module_info.param_name] for p in fsdp_params]
        ends = [*accumulate(up(weight.nbytes) for _, weight in weights)]
        if not ends:
            return 0
        nbytes = ends[-1]
        memory, begin = self._allocate(group, nbytes)
        places = []
        offsets = [0, *ends[:-1]]
        for fsdp_param, (name, weight), offset in zip(fsdp_params, weights, offsets, strict=True):
            place = memory.tensor(begin + offset, weight.numel(), weight.dtype).view(weight.shape)
            if not weight.is_meta:
                place.copy_(weight.detach())
                weight.data = place  # somebody may still hold the old parameter: no second copy is kept for it
            sharded = nn.Parameter(fsdp_param.to_sharded_dtensor(place), requires_grad=weight.requires_grad)
            sharded.__dict__.update(weight.__dict__)  # attributes that the user has set
            fsdp_param._setattr_on_modules(sharded)
            fsdp_param.reset_sharded_param()  # has FSDP2 gather from the new one
            self._places[fsdp_param] = name, place.data_ptr()
            places.append((place.data_ptr(), place.nbytes))
        if isinstance(memory, MappedFile):
            memory.advise_unneeded(begin, nbytes, was_written=True)
            return nbytes
        is_pinned = self._pin_if_possible(memory, places)
        for fsdp_param in fsdp_params:
            # With True FSDP2 copies gradients asynchronously, to pinned memory, but for those that it then adds to
            # earlier ones. It would also copy weights to pinned memory, but not those that are pinned already.
            fsdp_param.pin_memory = is_pinned
        return nbytes

    def _pin_if_possible(self, memory: Arena, places: Iterable[tuple[int, int]]) -> bool:
        """Pin an arena, unless a weight would lie in two registrations; return whether all of the arena is pinned.

        A registration with the driver may be smaller than the arena. FSDP2 copies each weight by one copy, which must
        not cross from one registration to the next. If one would, the arena is unpinned again.

        Args:
            memory: The arena.
            places: Address and bytes of each weight in it.
        """
        before = self._pinned.pinned_bytes
        self._pinned.pin(memory)
        if any(len([*self._pinned.whole_copies(*place)]) > 1 for place in places):
            self._pinned.unpin(memory)
        return self._pinned.pinned_bytes - before == memory.nbytes

    def _allocate(self, group: Any, nbytes: int) -> tuple[Arena | MappedFile, int]:
        """Return the memory for `nbytes` of a group's weights, and their offset in it, in bytes.

        The memory is a new arena, or the file, of which each group gets the next pages. With the file, also note the
        group's layer number and range, for `LayerReadAhead`.
        """
        if self.file is None:
            self._arenas.append(Arena(max(1, nbytes)))  # all weights may be without elements
            return self._arenas[-1], 0
        begin = 0
        if self._ranges:
            last_begin, last_bytes = self._ranges[-1]
            begin = up(last_begin + last_bytes, PAGE_BYTES)
        self._layer_numbers[group] = len(self._ranges)
        self._ranges.append((begin, nbytes))
        return self.file, begin

    def _hook(self, model: nn.Module) -> None:
        """Replace the groups' methods that gather, and hook forward passes and state dicts of the model."""
        for group in self._groups:  # which keep the objects that are made here, for good
            shards.PatchedMethod(group, "unshard", self._begin_gather)
            shards.PatchedMethod(group, "wait_for_unshard", self._end_gather)
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.register_forward_hook(self._after_forward)
        module: Any
        for module in model.modules():
            if any(map(shards.is_dtensor, own_parameters(module).values())):
                module.register_state_dict_post_hook(_unwrap_saved)
                module.register_load_state_dict_pre_hook(self._place_loaded)

    @torch.inference_mode(False)  # tensors made here are used by later passes, too
    @torch.no_grad()
    def _begin_gather(self, group: Any, unshard: Any, async_op: bool = False) -> None:
        """Let FSDP2 begin to gather a group, and copy its weights to the device on the stream for gathers.

        Called in place of the group's method `unshard`, which is passed. On a mesh of one device FSDP2 itself would
        copy only in `wait_for_unshard`, on the caller's stream, which could not compute meanwhile.
        """
        before = group._all_gather_result
        unshard(async_op)
        gathered = group._all_gather_result
        has_begun = gathered is not None and gathered is not before
        if not has_begun or gathered.all_gather_input_split_sizes:  # there are sizes where FSDP2 gathers by itself
            return
        for fsdp_param in group.fsdp_params:
            name, address = self._places.get(fsdp_param, ("", 0))
            if name and fsdp_param._sharded_param_data.data_ptr() != address:
                _refuse_moved(name, fsdp_param.sharded_param)
        if self._layers is not None and group in self._layer_numbers:
            self._layers.begin(self._layer_numbers[group])
        # Of FSDP2's two streams for a gather, the one for the copies before it.
        stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        with group.device_handle.stream(stream):
            copies = [p._sharded_param_data.to(self.device, non_blocking=True) for p in group.fsdp_params]
            self._last_copy = stream.record_event()
        self._gathering[group] = copies, self._last_copy

    @torch.inference_mode(False)  # as `_begin_gather`
    def _end_gather(self, group: Any, wait_for_unshard: Any) -> None:
        """Let FSDP2 end gathering a group, from the copies that `_begin_gather` has made on the device.

        Called in place of the group's method `wait_for_unshard`, which is passed. That method reads the weights from
        `_sharded_param_data` of each parameter. So while it runs, the copies on the device stand there.
        """
        pending = self._gathering.pop(group, None)
        if pending is None or group._all_gather_result is None:  # no copies, or they are not wanted any more
            wait_for_unshard()
            return
        copies, event = pending
        group.device_handle.current_stream().wait_event(event)
        in_host_memory = [p._sharded_param_data for p in group.fsdp_params]
        try:
            for fsdp_param, copy in zip(group.fsdp_params, copies, strict=True):
                fsdp_param._sharded_param_data = copy
            wait_for_unshard()  # also orders the stream of copies after this use of them
        finally:
            for fsdp_param, weight in zip(group.fsdp_params, in_host_memory, strict=True):
                fsdp_param._sharded_param_data = weight

    @_disable_dynamo
    def _before_forward(self, model: Any, inputs: object) -> None:
        """Check that the model's weights were not replaced by other tensors; a hook before the model's forward.

        Also frees the device's copies of the model's own weights, so that they are copied again, as the weights may
        have been written to; and resets FSDP2 after a pass that raised.
        """
        if torch._C._current_graph_task_id() != NO_PASS:  # activation checkpointing runs this forward again
            return
        for fsdp_param, (name, _) in self._places.items():
            # The parameter itself, or while it is gathered its copy on the device.
            weight = fsdp_param._module_info.module._parameters.get(fsdp_param._module_info.param_name)
            if weight is not fsdp_param.sharded_param and weight is not getattr(fsdp_param, "_unsharded_param", None):
                allowed = "write to the weights, or load a state dict: FSDP2 computes with those that it has"
                raise ConfigError(name, "another tensor in its place", allowed)
        self._reset_if_interrupted(model)
        model.reshard()

    def _reset_if_interrupted(self, model: Any) -> None:
        """If the last pass raised, reset FSDP2, which would go on in its middle, and drop its unreduced gradients."""
        context = _state_of(model)._state_ctx
        # FSDP2 sets these two while a forward or a backward is under way. None is now, before a forward; so if one of
        # the two is still set, a pass has raised.
        if context.iter_forward_root is None and not context.post_backward_final_callback_queued:
            return
        model.reset_iter_state()
        for group in self._groups:
            for fsdp_param in group.fsdp_params:
                gathered = getattr(fsdp_param, "_unsharded_param", None)
                if gathered is not None:
                    gathered.grad = None

    @_disable_dynamo
    def _after_forward(self, model: Any, inputs: object, outputs: object) -> None:
        """After a forward without gradients, free the device's copies of the model's own weights; a hook.

        Also wait for all copies to the device, so that weights may be written to from now on. After a forward with
        gradients the backward pass frees the copies.
        """
        if not torch.is_grad_enabled() and torch._C._current_graph_task_id() == NO_PASS:
            model.reshard()
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        """Wait until all weights that are being gathered have been read."""
        if self._last_copy is not None:
            self._last_copy.synchronize()

    def _place_loaded(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *lists: object
    ) -> None:
        """Replace plain tensors in a state dict by `DTensor`s, as the weights are; a hook before `load_state_dict`.

        Also wait for copies of the weights to the device, as `load_state_dict` then writes to the weights. Refuse
        `assign`, which would put other tensors in the place of the weights.
        """
        if metadata.get("assign_to_params_buffers"):
            advice = "leave it out: weights in host memory stay where they are, and take the values"
            raise ConfigError("assign", True, advice)
        self._wait_for_copies()
        for name, weight in own_parameters(module).items():
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or value.shape != weight.shape:
                continue  # torch raises an error for it
            if shards.is_dtensor(weight) and not shards.is_dtensor(value):
                state[prefix + name] = shards.placed(value, weight)


_Originals = dict[tuple[nn.Module, str], tuple[str, nn.Parameter]]
"""A model's weights before FSDP2, each with its name in the model; by the module that has it, and its name there."""


def _unwrap_saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Replace `DTensor`s by plain tensors over the memory of the weights; a hook after `state_dict`."""
    for name in own_parameters(module):
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and shards.is_dtensor(value):
            state[prefix + name] = shards.local(value)


def _driver() -> Driver:
    """Return the driver of the current device; refuse a system without an accelerator."""
    if not torch.accelerator.is_available():
        advice = "leave it out: weights on the CPU lie in host memory; weights_in_file has them on a drive"
        raise ConfigError("model", "no accelerator", advice)
    return Driver()


def _state_of(module: Any) -> Any:
    """Return FSDP2's state of a module."""
    return module._get_fsdp_state()


def _weights_to_stay(model: nn.Module, on_device: Iterable[str]) -> set[nn.Parameter]:
    """Return the weights of a model that stay on the device; refuse those that train.

    `on_device` has names of weights, and of modules, all of whose weights stay.
    """
    if isinstance(on_device, str):
        raise ConfigError("on_device", on_device, "give a list of names")
    staying = set[nn.Parameter]()
    for wanted in on_device:
        named = {
            name: weight
            for name, weight in model.named_parameters(remove_duplicate=False)
            if name == wanted or name.startswith(f"{wanted}.")
        }
        trained = [name for name, weight in named.items() if weight.requires_grad]
        if trained:
            raise ConfigError("on_device", wanted, f"leave out {trained[0]}, which trains")
        if not named:
            raise ConfigError("on_device", wanted, "give names of this model's weights")
        staying.update(named.values())
    return staying


def _check_free(model: nn.Module) -> None:
    """Refuse a model that another framework or `weights_in_file` uses, and a process that is one of several."""
    check_alone()
    takers = {"FullyShardedDataParallel": "FSDP", "DistributedDataParallel": "DDP", "OptimizedModule": "compile"}
    for module in model.modules():
        taker = takers.get(type(module).__name__, "")
        if taker or hasattr(module, "_get_fsdp_state"):
            combinations.HOST_TAKEN.refuse("model", type(module).__name__, taker=taker or "FSDP")
    for name, weight in model.named_parameters():
        taker = "DeepSpeed" if hasattr(weight, "ds_id") else ""
        if shards.is_dtensor(weight):
            taker = "torch.distributed"
        elif weight.device.type == "cpu" and weight.layout == torch.strided and is_mapped(weight.data_ptr()):
            taker = "weights_in_file"
        if taker:
            combinations.HOST_TAKEN.refuse(name, str(tuple(weight.shape)), taker=taker)
    check_weights(model, combinations.HOST_LATE)


def _check_weights_and_buffers(model: nn.Module, stays: Collection[nn.Parameter], device: torch.device) -> None:
    """Refuse a model with a tensor that FSDP2 cannot copy to the device; the error names the tensor.

    Weights in `stays`, which are not copied, only have to be on the CPU, the meta device or `device`, as buffers.
    """
    places = f"have the model on the CPU, on the meta device or on {device}, which is current"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta") and tensor.device != device:
            raise ConfigError(name, str(tensor.device), places)
    for name, weight in model.named_parameters():
        if weight in stays:
            continue
        if type(weight) is not nn.Parameter or weight.layout != torch.strided:
            what = f"{type(weight).__name__}, {weight.layout}"
            raise ConfigError(name, what, "have dense tensors of torch's own; name others, if frozen, in on_device")
        if weight._backward_hooks or weight._post_accumulate_grad_hooks or weight.grad is not None:
            what = "a weight with a gradient, or hooks"
            raise ConfigError(name, what, "take gradients and register hooks behind it: weights are new objects then")
        if not weight.dim():
            raise ConfigError(name, "a scalar", "have one element in one dimension: FSDP2 takes no scalars")
        if not weight.is_contiguous():
            raise ConfigError(name, f"strides {weight.stride()}", "use a contiguous weight: FSDP2 takes no other")


def _replace_by_meta_weights(model: nn.Module, stays: Collection[nn.Parameter]) -> _Originals:
    """Replace a model's weights, but for those in `stays`, by new ones on the meta device; return the originals.

    That is for `fully_shard`, which would move weights with memory to the device.
    """
    originals: _Originals = {}
    meta_weights: dict[nn.Parameter, nn.Parameter] = {}  # one for all places of a tied weight
    for path, module in model.named_modules():
        for name, weight in own_parameters(module).items():
            if weight not in stays:
                if weight not in meta_weights:
                    on_meta = torch.empty_like(weight, device="meta")
                    meta_weights[weight] = nn.Parameter(on_meta, weight.requires_grad)
                originals[module, name] = f"{path}.{name}".lstrip("."), weight
                setattr(module, name, meta_weights[weight])
    return originals


def _shard(model: nn.Module, modules: Iterable[nn.Module], stays: set[nn.Parameter], device: torch.device) -> None:
    """Apply FSDP2 to the modules, whose weights are on the meta device; move buffers and `stays` to the device.

    The modules come in the order that FSDP2 needs: those inside of others first.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = shards.mesh_of_all(device.type)
    for module in modules:
        policy = CPUOffloadPolicy(pin_memory=False)  # `_move_group` pins memory of exact size
        fully_shard(module, mesh=mesh, offload_policy=policy, ignored_params=stays or None)
    give_buffers(model, device)  # those on the meta device; `fully_shard` has moved the others
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in own_parameters(module).items():
            if weight in stays and weight.is_meta:
                if weight not in moved:
                    moved[weight] = nn.Parameter(torch.zeros_like(weight, device=device), requires_grad=False)
                setattr(module, name, moved[weight])
            elif weight in stays:
                weight.data = weight.detach().to(device)


def _refuse_moved(name: str, weight: torch.Tensor) -> None:
    """Raise the error for a weight that does not lie in its place in host memory any more."""
    elements = shards.local(weight)
    where = f"{elements.dtype}, on {elements.device}"
    advice = "change dtype or device before weights_in_host_memory: this weight has left its place in host memory"
    raise ConfigError(name, where, advice)


def _free_memory(pinned: PinnedMemory, arenas: Iterable[Arena], group: Alone | None) -> None:
    """Unpin and free the memory of a model that is gone; tensors that somebody holds keep theirs.

    `group` is not used: as an argument of this finalizer the process group is kept alive until it runs.
    """
    pinned.close()
    for arena in arenas:
        arena.close()
