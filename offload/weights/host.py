"""Weights in host memory: a model that does not fit on its device is computed there, a layer at a time.

torch's FSDP2 brings the weights, on a mesh of one. Here is what it leaves open on one device: which modules go
together, memory that is registered with the device once and at its exact size, state dicts of plain tensors, and what
must not happen behind its back.
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
from offload.weights.layers import Groups, check_weights, give_buffers, own_parameters
from offload.weights.mapping import PAGE_BYTES, Layers, MappedFile, is_mapped, up
from offload.weights.safetensors import checked, read_into

log = logging.getLogger("offload")

OUTSIDE = -1
"""Torch's number of a backward pass, where there is none."""


def weights_in_host_memory(
    model: nn.Module,
    *,
    layers: Sequence[nn.Module] | None = None,
    on_device: Iterable[str] = (),
    path: str | os.PathLike[str] | None = None,
    safetensors: Iterable[str | os.PathLike[str]] = (),
) -> WeightsInHostMemory:
    """Have the weights of a model lie in host memory, and come to the current device a layer at a time.

    Call it before the optimizer is made, and give that `model.named_parameters()`: they are new objects, torch's
    `DTensor`s on a mesh of one device. The model is called as before; inputs may be on the CPU. FSDP2 brings weights
    before a layer's forward and backward pass, lets go of them behind it, and copies gradients to host memory.
    `model.state_dict()` gives plain tensors over the memory of the weights, and `model.load_state_dict()` takes such.

    Buffers go to the device. A model on the CPU never is there whole. One on the meta device gets memory here for the
    first time: what it holds is zero until `load_state_dict` or an initialisation writes it. A default process group
    of this one process is made if there is none, and ends with the model.

    Args:
        model: On the CPU, on the meta device, or on the current device.
        layers: What is used one after another, if not what the model's lists repeat.
        on_device: Names of frozen weights, or of modules whose weights all are, that stay on the device.
        path: A folder on a drive: weights lie in a file there that is mapped into memory, as `weights_in_file` has
            them, and are read layer by layer where memory has no room for all. Copies are from memory that is not
            pinned then.
        safetensors: Files whose tensors, by their names, are read into the model one at a time.

    Returns:
        What it has done; nobody has to keep it.

    Raises:
        ConfigError: There is no accelerator, or a weight cannot be brought, or the model has an optimizer already, or
            belongs to something else, or a file of tensors has what the model has not; nothing has changed then.
        OffloadError: The system does not have that much memory, or the drive no room.
    """
    return WeightsInHostMemory(model, layers, on_device, path, safetensors)


class WeightsInHostMemory:
    """Weights of a model that lie in host memory; see `weights_in_host_memory`.

    Attributes:
        device: Where they are computed.
        file: Where they lie; None in registered memory.
        nbytes: How much they are in host memory, with what aligns them.
        pinned_bytes: How much of that the device reaches by itself.
        window_bytes: The most of them that is on the device at a time: of the model itself, and of two layers.
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
        modules = Groups(model, layers, stays).modules
        driver = _driver()
        self.device = driver.device
        _check_weights(model, stays, self.device)
        self._pinned, self._arenas = PinnedMemory(driver), list[Arena]()
        self._coming: dict[Any, tuple[list[torch.Tensor], Any]] = {}
        """Of groups that FSDP2 has asked for: copies of their weights on the device, and an event behind those."""
        self._last_copy: Any = None
        self._places: dict[Any, tuple[str, int]] = {}
        """Name and address of each weight, by torch's `FSDPParam`."""
        self.file: MappedFile | None = None
        self._ranges: list[tuple[int, int]] = []
        self._numbers: dict[Any, int] = {}
        """Of each group in the file: where it lies, and its number there."""
        if path is not None:
            sizes_there = (up(weight.nbytes) for weight in model.parameters() if weight not in stays)
            self.file = MappedFile(path, up(sum(sizes_there) + len(modules) * PAGE_BYTES, PAGE_BYTES))
        group = alone(self.device)
        end = weakref.finalize(self, _end, self._pinned, self._arenas, group)
        end.atexit = False  # a process that ends gives all back by itself
        with driver.current():
            originals = _on_meta(model, stays)
            _shard(model, modules, stays, self.device)
            self._groups = shards.unsharders(model)
            sizes = {gathered: self._place(gathered, originals) for gathered in self._groups}
            _state_of(model)._lazy_init()
        self.nbytes, self.pinned_bytes = sum(sizes.values()), self._pinned.pinned_bytes
        self._layers = None if self.file is None else Layers(self.file, [[place] for place in self._ranges])
        own = sum(sizes.pop(gathered) for gathered in self._groups if model in gathered.modules)
        self.window_bytes = own + sum(sorted(sizes.values())[-2:])
        self._hook(model)
        read_into(model, files, self.file)
        said = format_bytes(self.nbytes), len(self._places), len(sizes), format_bytes(self.window_bytes), self.device
        log.info(
            "%s of weights lie in host memory: %d, in %d layers and the rest, of which %s are on %s at a time", *said
        )

    def __deepcopy__(self, memo: object) -> WeightsInHostMemory:
        """Return this: torch refuses to copy such a model, and copies of its parts have no hook to be brought by."""
        return self

    def _place(self, group: Any, originals: _Originals) -> int:
        """Have the weights of a group lie in an arena of their own, or in the file; return their size."""
        managed = group.fsdp_params
        weights = [originals[each._module_info.module, each._module_info.param_name] for each in managed]
        ends = [*accumulate(map(up, (weight.nbytes for _, weight in weights)))]
        if not ends:
            return 0
        memory, begin = self._memory(group, ends[-1])
        places = []
        for each, (name, weight), offset in zip(managed, weights, [0, *ends], strict=False):
            place = memory.tensor(begin + offset, weight.numel(), weight.dtype).view(weight.shape)
            if not weight.is_meta:
                place.copy_(weight.detach())
                weight.data = place  # whoever has it still, has no second copy
            made = nn.Parameter(each.to_sharded_dtensor(place), requires_grad=weight.requires_grad)
            made.__dict__.update(weight.__dict__)
            each._setattr_on_modules(made)
            each.reset_sharded_param()
            self._places[each] = name, place.data_ptr()
            places.append((place.data_ptr(), place.nbytes))
        if isinstance(memory, MappedFile):
            memory.let_go(begin, ends[-1], was_written=True)
            return ends[-1]
        before = self._pinned.pinned_bytes
        self._pinned.pin(memory)
        if any(len([*self._pinned.whole_copies(*place)]) > 1 for place in places):
            self._pinned.unpin(memory)  # a copy lies in one registration, or in none
        for each in managed:
            # Gradients come beside other work then, to memory that torch pins; it copies no weight that is pinned.
            each.pin_memory = self._pinned.pinned_bytes - before == memory.nbytes
        return ends[-1]

    def _memory(self, group: Any, nbytes: int) -> tuple[Arena | MappedFile, int]:
        """Return where a group's weights lie, and where they begin there."""
        if self.file is None:
            self._arenas.append(Arena(max(1, nbytes)))
            return self._arenas[-1], 0
        begin = up(sum(self._ranges[-1]), PAGE_BYTES) if self._ranges else 0
        self._numbers[group] = len(self._ranges)
        self._ranges.append((begin, nbytes))
        return self.file, begin

    def _hook(self, model: nn.Module) -> None:
        for group in self._groups:
            shards.StandIn(group, "unshard", self._bring)
            shards.StandIn(group, "wait_for_unshard", self._take)
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.register_forward_hook(self._after_forward)
        module: Any
        for module in model.modules():
            if any(map(shards.is_sharded, own_parameters(module).values())):
                module.register_state_dict_post_hook(_give_plain)
                module.register_load_state_dict_pre_hook(self._take_plain)

    @torch.inference_mode(False)  # what is made here serves later passes, too
    @torch.no_grad()
    def _bring(self, group: Any, unshard: Any, async_op: bool = False) -> None:
        """Have FSDP2 gather a group, and copy its weights beside the work of the caller's stream.

        With a mesh of one torch copies when it waits for them, on that stream.
        """
        before = group._all_gather_result
        unshard(async_op)
        gathered = group._all_gather_result
        if gathered is None or gathered is before or gathered.all_gather_input_split_sizes:
            return
        for each in group.fsdp_params:
            name, address = self._places.get(each, ("", 0))
            if name and each._sharded_param_data.data_ptr() != address:
                _refuse_left(name, each.sharded_param)
        if self._layers is not None and group in self._numbers:
            self._layers.begin(self._numbers[group])
        stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)
        with group.device_handle.stream(stream):
            copies = [each._sharded_param_data.to(self.device, non_blocking=True) for each in group.fsdp_params]
            self._last_copy = stream.record_event()
        self._coming[group] = copies, self._last_copy

    @torch.inference_mode(False)
    def _take(self, group: Any, wait_for_unshard: Any) -> None:
        """Have FSDP2 wait for a group, and find its weights on the device."""
        coming = self._coming.pop(group, None)
        if coming is None or group._all_gather_result is None:
            wait_for_unshard()
            return
        copies, event = coming
        group.device_handle.current_stream().wait_event(event)
        hosts = [each._sharded_param_data for each in group.fsdp_params]
        try:
            for each, copy in zip(group.fsdp_params, copies, strict=True):
                each._sharded_param_data = copy
            wait_for_unshard()  # which has the stream of copies wait until these have been used
        finally:
            for each, host in zip(group.fsdp_params, hosts, strict=True):
                each._sharded_param_data = host

    @_disable_dynamo
    def _before_forward(self, model: Any, inputs: object) -> None:
        """Have what a pass without a backward pass has left on the device be brought again: it may have changed.

        After a pass that has raised FSDP2 goes on in the middle of it, with gradients that it has not reduced.
        """
        if torch._C._current_graph_task_id() != OUTSIDE:  # recomputed
            return
        for each, (name, _) in self._places.items():
            weight = each._module_info.module._parameters.get(each._module_info.param_name)
            if weight is not each.sharded_param and weight is not getattr(each, "_unsharded_param", None):
                allowed = "write to the weights, or load a state dict: FSDP2 computes with those that it has"
                raise ConfigError(name, "another tensor in its place", allowed)
        context = _state_of(model)._state_ctx
        if context.iter_forward_root is not None or context.post_backward_final_callback_queued:
            model.reset_iter_state()
            for each in (each for group in self._groups for each in group.fsdp_params):
                if (gathered := getattr(each, "_unsharded_param", None)) is not None:
                    gathered.grad = None
        model.reshard()

    @_disable_dynamo
    def _after_forward(self, model: Any, inputs: object, outputs: object) -> None:
        """Let go of the model's own weights where no backward pass will; weights may be written from then on."""
        if not torch.is_grad_enabled() and torch._C._current_graph_task_id() == OUTSIDE:
            model.reshard()
            self._wait()

    def _wait(self) -> None:
        if self._last_copy is not None:
            self._last_copy.synchronize()

    def _take_plain(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *lists: object
    ) -> None:
        """Have `load_state_dict` find tensors that are placed as the weights are."""
        if metadata.get("assign_to_params_buffers"):
            allowed = "leave it out: weights in host memory stay where they are, and take the values"
            raise ConfigError("assign", True, allowed)
        self._wait()
        for name, weight in own_parameters(module).items():
            value = state.get(prefix + name)
            if not isinstance(value, torch.Tensor) or value.shape != weight.shape:
                continue  # torch says what differs
            if shards.is_sharded(weight) and not shards.is_sharded(value):
                state[prefix + name] = shards.placed(value, weight)


_Originals = dict[tuple[nn.Module, str], tuple[str, nn.Parameter]]
"""A model's weights, with their names, by the modules that have them and the names there."""


def _give_plain(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Have `state_dict` give tensors over the memory of the weights; a hook."""
    for name in own_parameters(module):
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and shards.is_sharded(value):
            state[prefix + name] = shards.local(value)


def _driver() -> Driver:
    """Return that of the current device."""
    if not torch.accelerator.is_available():
        allowed = "leave it out: weights on the CPU lie in host memory; weights_in_file has them on a drive"
        raise ConfigError("model", "no accelerator", allowed)
    return Driver()


def _state_of(module: Any) -> Any:
    return module._get_fsdp_state()


def _staying(model: nn.Module, on_device: Iterable[str]) -> set[nn.Parameter]:
    """Return the weights of a model that stay on the device, by their names or those of modules."""
    if isinstance(on_device, str):
        raise ConfigError("on_device", on_device, "give a list of names")
    found = set[nn.Parameter]()
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
        found.update(named.values())
    return found


def _check_free(model: nn.Module) -> None:
    """Refuse a model that something else has, and processes that are several."""
    check_alone()
    takers = {"FullyShardedDataParallel": "FSDP", "DistributedDataParallel": "DDP", "OptimizedModule": "compile"}
    for module in model.modules():
        taker = takers.get(type(module).__name__, "")
        if taker or hasattr(module, "_get_fsdp_state"):
            combinations.HOST_TAKEN.refuse("model", type(module).__name__, taker=taker or "FSDP")
    for name, weight in model.named_parameters():
        taker = "DeepSpeed" if hasattr(weight, "ds_id") else ""
        if shards.is_sharded(weight):
            taker = "torch.distributed"
        elif weight.device.type == "cpu" and weight.layout == torch.strided and is_mapped(weight.data_ptr()):
            taker = "weights_in_file"
        if taker:
            combinations.HOST_TAKEN.refuse(name, str(tuple(weight.shape)), taker=taker)
    check_weights(model, combinations.HOST_LATE)


def _check_weights(model: nn.Module, stays: Collection[nn.Parameter], device: torch.device) -> None:
    """Refuse tensors that cannot be brought to the device, by name."""
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
    """Put new weights without memory in the place of a model's; FSDP2 moves those that have some over the device."""
    found: _Originals = {}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, weight in own_parameters(module).items():
            if weight not in stays:
                if weight not in made:
                    made[weight] = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
                found[module, name] = f"{path}.{name}".lstrip("."), weight
                setattr(module, name, made[weight])
    return found


def _shard(model: nn.Module, modules: Iterable[nn.Module], stays: set[nn.Parameter], device: torch.device) -> None:
    """Apply FSDP2, and bring to the device what stays there."""
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


def _refuse_left(name: str, weight: torch.Tensor) -> None:
    mine = shards.local(weight)
    where = f"{mine.dtype}, on {mine.device}"
    allowed = "change dtype or device before weights_in_host_memory: this weight has left its place in host memory"
    raise ConfigError(name, where, allowed)


def _end(pinned: PinnedMemory, arenas: Iterable[Arena], group: Alone | None) -> None:
    """Give up what a model had that is gone; tensors that somebody has of it keep their memory."""
    pinned.close()
    for arena in arenas:
        arena.close()
