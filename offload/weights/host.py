"""Weights in host memory: a model that does not fit on its device is computed there, a layer at a time.

torch's FSDP2, on a mesh of one device, copies ("gathers") the weights. This module adds what FSDP2 lacks for that:
which modules form a group, memory that is registered with the device once and at its exact size, state dicts of plain
tensors, and errors for changes that FSDP2 would not notice.
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
    here: zeros until `load_state_dict` or an initialisation writes it. A default process group of this one process is
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
            already, or belongs to another framework, or a file has a tensor that the model lacks; nothing has changed
            then.
        OffloadError: The system does not have that much memory, or the drive no room.
    """
    return WeightsInHostMemory(model, layers, on_device, path, safetensors)


class WeightsInHostMemory:
    """Weights of a model that lie in host memory; see `weights_in_host_memory`.

    Attributes:
        device: The device that computes.
        file: The mapped file with the weights; None if they lie in registered memory.
        nbytes: Their size in host memory, with padding for alignment.
        pinned_bytes: How much of that is pinned.
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
        stays = _staying(model, on_device)
        _check_free(model)
        files = checked(model, safetensors)
        modules = GatherGroups(model, layers, stays).modules
        driver = _driver()
        self.device = driver.device
        _check_weights(model, stays, self.device)
        self._pinned, self._arenas = PinnedMemory(driver), list[Arena]()
        self._gathering: dict[Any, tuple[list[torch.Tensor], Any]] = {}
        """By group that FSDP2 is gathering: copies of its weights on the device, and an event after these copies."""
        self._last_copy: Any = None
        self._places: dict[Any, tuple[str, int]] = {}
        """Name and address of each weight, by torch's `FSDPParam`."""
        self.file: MappedFile | None = None
        self._ranges: list[tuple[int, int]] = []
        self._numbers: dict[Any, int] = {}
        """By group in the file its index into `_ranges`, which has offset and size of each."""
        if path is not None:
            sizes_there = (up(weight.nbytes) for weight in model.parameters() if weight not in stays)
            self.file = MappedFile(path, up(sum(sizes_there) + len(modules) * PAGE_BYTES, PAGE_BYTES))
        group = alone(self.device)
        end = weakref.finalize(self, _free, self._pinned, self._arenas, group)
        end.atexit = False  # the end of the process frees all of it anyway
        with driver.current():
            originals = _on_meta(model, stays)
            _shard(model, modules, stays, self.device)
            self._groups = shards.fsdp_groups(model)
            sizes = {gathered: self._move_group(gathered, originals) for gathered in self._groups}
            _state_of(model)._lazy_init()
        self.nbytes, self.pinned_bytes = sum(sizes.values()), self._pinned.pinned_bytes
        self._layers = None if self.file is None else LayerReadAhead(self.file, [[place] for place in self._ranges])
        own = sum(sizes.pop(gathered) for gathered in self._groups if model in gathered.modules)
        self.window_bytes = own + sum(sorted(sizes.values())[-2:])
        self._hook(model)
        read_into(model, files, self.file)
        said = format_bytes(self.nbytes), len(self._places), len(sizes), format_bytes(self.window_bytes), self.device
        log.info(
            "%s of weights lie in host memory: %d, in %d layers and the rest, of which %s are on %s at a time", *said
        )

    def __deepcopy__(self, memo: object) -> WeightsInHostMemory:
        """Return this object: torch refuses to copy such a model, and copies of its modules do not need this."""
        return self

    def _move_group(self, group: Any, originals: _Originals) -> int:
        """Move the weights of a group to an arena of their own, or to the file; return their size."""
        fsdp_params = group.fsdp_params
        weights = [originals[p._module_info.module, p._module_info.param_name] for p in fsdp_params]
        ends = [*accumulate(map(up, (weight.nbytes for _, weight in weights)))]
        if not ends:
            return 0
        memory, begin = self._memory(group, ends[-1])
        places = []
        for fsdp_param, (name, weight), offset in zip(fsdp_params, weights, [0, *ends], strict=False):
            place = memory.tensor(begin + offset, weight.numel(), weight.dtype).view(weight.shape)
            if not weight.is_meta:
                place.copy_(weight.detach())
                weight.data = place  # somebody may still hold the old parameter: no second copy is kept for it
            made = nn.Parameter(fsdp_param.to_sharded_dtensor(place), requires_grad=weight.requires_grad)
            made.__dict__.update(weight.__dict__)
            fsdp_param._setattr_on_modules(made)
            fsdp_param.reset_sharded_param()
            self._places[fsdp_param] = name, place.data_ptr()
            places.append((place.data_ptr(), place.nbytes))
        if isinstance(memory, MappedFile):
            memory.advise_unneeded(begin, ends[-1], was_written=True)
            return ends[-1]
        before = self._pinned.pinned_bytes
        self._pinned.pin(memory)
        if any(len([*self._pinned.whole_copies(*place)]) > 1 for place in places):
            self._pinned.unpin(memory)  # FSDP2 copies each weight at once, which must not cross registrations
        for fsdp_param in fsdp_params:
            # Then FSDP2 copies gradients asynchronously, to memory that it pins; pinned weights it does not copy.
            fsdp_param.pin_memory = self._pinned.pinned_bytes - before == memory.nbytes
        return ends[-1]

    def _memory(self, group: Any, nbytes: int) -> tuple[Arena | MappedFile, int]:
        """Return the memory for a group's weights, and the offset at which they begin in it."""
        if self.file is None:
            self._arenas.append(Arena(max(1, nbytes)))
            return self._arenas[-1], 0
        begin = up(sum(self._ranges[-1]), PAGE_BYTES) if self._ranges else 0
        self._numbers[group] = len(self._ranges)
        self._ranges.append((begin, nbytes))
        return self.file, begin

    def _hook(self, model: nn.Module) -> None:
        """Replace the groups' methods that gather, and hook forward passes and state dicts of the model."""
        for group in self._groups:
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

        Stands in for the group's `unshard`. On a mesh of one device FSDP2 itself would copy only in
        `wait_for_unshard`, on the caller's stream, which then could not compute meanwhile.
        """
        before = group._all_gather_result
        unshard(async_op)
        gathered = group._all_gather_result
        if gathered is None or gathered is before or gathered.all_gather_input_split_sizes:
            return
        for fsdp_param in group.fsdp_params:
            name, address = self._places.get(fsdp_param, ("", 0))
            if name and fsdp_param._sharded_param_data.data_ptr() != address:
                _refuse_moved(name, fsdp_param.sharded_param)
        if self._layers is not None and group in self._numbers:
            self._layers.begin(self._numbers[group])
        stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        with group.device_handle.stream(stream):
            copies = [p._sharded_param_data.to(self.device, non_blocking=True) for p in group.fsdp_params]
            self._last_copy = stream.record_event()
        self._gathering[group] = copies, self._last_copy

    @torch.inference_mode(False)
    def _end_gather(self, group: Any, wait_for_unshard: Any) -> None:
        """Let FSDP2 end gathering a group from the copies that `_begin_gather` has made on the device.

        Stands in for the group's `wait_for_unshard`.
        """
        pending = self._gathering.pop(group, None)
        if pending is None or group._all_gather_result is None:
            wait_for_unshard()
            return
        copies, event = pending
        group.device_handle.current_stream().wait_event(event)
        hosts = [p._sharded_param_data for p in group.fsdp_params]
        try:
            for fsdp_param, copy in zip(group.fsdp_params, copies, strict=True):
                fsdp_param._sharded_param_data = copy
            wait_for_unshard()  # also orders the stream of copies after this use of them
        finally:
            for fsdp_param, host in zip(group.fsdp_params, hosts, strict=True):
                fsdp_param._sharded_param_data = host

    @_disable_dynamo
    def _before_forward(self, model: Any, inputs: object) -> None:
        """Before the model's forward: check its weights, and make FSDP2 begin anew; a hook.

        Refuses weights that were replaced by other tensors. If the last pass raised, resets FSDP2, which would go on
        in its middle, and drops its unreduced gradients. Frees the device's copies of the model's own weights, so
        that they are copied again, as the weights may have been written to.
        """
        if torch._C._current_graph_task_id() != NO_PASS:  # activation checkpointing runs this forward again
            return
        for fsdp_param, (name, _) in self._places.items():
            weight = fsdp_param._module_info.module._parameters.get(fsdp_param._module_info.param_name)
            if weight is not fsdp_param.sharded_param and weight is not getattr(fsdp_param, "_unsharded_param", None):
                allowed = "write to the weights, or load a state dict: FSDP2 computes with those that it has"
                raise ConfigError(name, "another tensor in its place", allowed)
        context = _state_of(model)._state_ctx
        if context.iter_forward_root is not None or context.post_backward_final_callback_queued:
            model.reset_iter_state()
            for fsdp_param in (p for group in self._groups for p in group.fsdp_params):
                if (gathered := getattr(fsdp_param, "_unsharded_param", None)) is not None:
                    gathered.grad = None
        model.reshard()

    @_disable_dynamo
    def _after_forward(self, model: Any, inputs: object, outputs: object) -> None:
        """After a forward without gradients: free the device's copies of the model's own weights; a hook.

        Else the backward pass does. This waits for all copies, so that weights may be written from now on.
        """
        if not torch.is_grad_enabled() and torch._C._current_graph_task_id() == NO_PASS:
            model.reshard()
            self._wait()

    def _wait(self) -> None:
        if self._last_copy is not None:
            self._last_copy.synchronize()

    def _place_loaded(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *lists: object
    ) -> None:
        """Before `load_state_dict`: wrap its plain tensors as `DTensor`s, placed as the weights are; a hook."""
        if metadata.get("assign_to_params_buffers"):
            allowed = "leave it out: weights in host memory stay where they are, and take the values"
            raise ConfigError("assign", True, allowed)
        self._wait()
        for name, weight in own_parameters(module).items():
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or value.shape != weight.shape:
                continue  # torch raises an error for it
            if shards.is_dtensor(weight) and not shards.is_dtensor(value):
                state[prefix + name] = shards.placed(value, weight)


_Originals = dict[tuple[nn.Module, str], tuple[str, nn.Parameter]]
"""Name in the model and weight, by the module that has the weight and its name in that."""


def _unwrap_saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """After `state_dict`: replace `DTensor`s by plain tensors over the memory of the weights; a hook."""
    for name in own_parameters(module):
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and shards.is_dtensor(value):
            state[prefix + name] = shards.local(value)


def _driver() -> Driver:
    """Return the driver of the current device."""
    if not torch.accelerator.is_available():
        allowed = "leave it out: weights on the CPU lie in host memory; weights_in_file has them on a drive"
        raise ConfigError("model", "no accelerator", allowed)
    return Driver()


def _state_of(module: Any) -> Any:
    return module._get_fsdp_state()


def _staying(model: nn.Module, on_device: Iterable[str]) -> set[nn.Parameter]:
    """Return the weights of a model that stay on the device, named by weight or by module."""
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
        if not named or trained:
            allowed = f"leave out {trained[0]}, which trains" if trained else "give names of this model's weights"
            raise ConfigError("on_device", wanted, allowed)
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


def _check_weights(model: nn.Module, stays: Collection[nn.Parameter], device: torch.device) -> None:
    """Refuse tensors that FSDP2 cannot copy to the device, by name."""
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


def _on_meta(model: nn.Module, stays: Collection[nn.Parameter]) -> _Originals:
    """Replace a model's weights by new ones on the meta device; return the originals.

    For `fully_shard`, which would move weights with memory to the device.
    """
    originals: _Originals = {}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, weight in own_parameters(module).items():
            if weight not in stays:
                if weight not in made:
                    made[weight] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
                originals[module, name] = f"{path}.{name}".lstrip("."), weight
                setattr(module, name, made[weight])
    return originals


def _shard(model: nn.Module, modules: Iterable[nn.Module], stays: set[nn.Parameter], device: torch.device) -> None:
    """Apply FSDP2 to the modules, and move buffers and the weights in `stays` to the device."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = shards.mesh_of_all(device.type)
    for module in modules:
        policy = CPUOffloadPolicy(pin_memory=False)
        fully_shard(module, mesh=mesh, offload_policy=policy, ignored_params=stays or None)
    give_buffers(model, device)
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
    allowed = "change dtype or device before weights_in_host_memory: this weight has left its place in host memory"
    raise ConfigError(name, where, allowed)


def _free(pinned: PinnedMemory, arenas: Iterable[Arena], group: Alone | None) -> None:
    """Unpin and free the memory of a model that is gone; tensors of it that somebody holds keep theirs."""
    pinned.close()
    for arena in arenas:
        arena.close()
