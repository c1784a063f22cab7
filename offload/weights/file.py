"""Weights in a file: for a model whose weights do not fit into memory, and are read from a drive as they are used.

Parameters stay ordinary tensors, whose memory is a mapped file (`offload.weights.mapping`). So views, ties,
`state_dict`, versions, averages of weights and optimizers work by themselves. Hooks of the model only read ahead the
layer that comes next, and mark memory of used layers as the first to be reclaimed.

A *unit* is what is read at once, the weights that are used together: usually a layer's; outside of layers those that
one module has itself.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload import combinations
from offload.errors import ConfigError
from offload.optim import shards
from offload.units import format_bytes
from offload.weights.layers import check_weights, give_buffers, own_parameters, units
from offload.weights.mapping import PAGE_BYTES, LayerReadAhead, MappedFile, joined, up
from offload.weights.safetensors import checked, read_into
from offload.weights.sharded import ShardsInFile

log = logging.getLogger("offload")


def weights_in_file(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    layers: Sequence[nn.Module] | None = None,
    safetensors: Iterable[str | os.PathLike[str]] = (),
) -> WeightsInFile | ShardsInFile:
    """Move all weights of a model, trainable and frozen, from memory to a file that is mapped into memory.

    Call it before the optimizer is made. Parameters stay the same objects, with the same values. Hooks of the model's
    layers read ahead the layer that comes next, in forward and backward passes in any order. The file has no name: it
    is freed with the last tensor that lies in it, or when the process ends, however. Save the model as any other.

    A model on the meta device gets memory here: new parameters, zeros until `safetensors`, `load_state_dict` or an
    initialisation writes them. So do its buffers, but those that are not persistent must be in `safetensors` or have
    been computed before. A tensor with another dtype in a file is converted to the model's, and a warning says so.

    If FSDP2 has sharded the model (`fully_shard`), each rank calls this, and its shards lie in a file of its own. The
    shards must be in host memory: on a mesh of CPUs, or by `CPUOffloadPolicy(pin_memory=False)`.

    Args:
        model: On the CPU, or on the meta device.
        path: A folder on the drive.
        layers: Modules that are used one after another; by default those that the model's lists repeat, or in a
            sharded model those that FSDP2 gathers.
        safetensors: Files whose tensors, by their names, are read into the model one at a time.

    Returns:
        The object whose hooks read ahead; it need not be kept.

    Raises:
        ConfigError: A weight is on another device, or shares memory with another; the model has an optimizer, or is
            in a file already; the folder cannot be used; a file has a tensor that the model lacks; a buffer on the
            meta device is not persistent, and in no file. Nothing has changed then.
        OSError: A file cannot be opened; nothing has changed then.
        TierFullError: The drive has no room for all weights; nothing has changed then.
        TierError: The drive fails.
    """
    _check_once(model)
    if shards.fsdp_groups(model):
        if layers is not None:
            raise ConfigError("layers", "given", "leave it out: a sharded model has what fully_shard was called with")
        return ShardsInFile(model, path, safetensors)
    return WeightsInFile(model, path, layers, safetensors)


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Weights that are used together: a layer's, or those that a module outside of layers has itself.

    Attributes:
        ranges: Where the weights lie in the file: offset and bytes of each range.
        weights: For each weight the module that has it, its name in that module, and its name in the model.
    """

    ranges: list[tuple[int, int]]
    weights: list[tuple[weakref.ref[nn.Module], str, str]]


class WeightsInFile:
    """Weights of a model that lie in a file; see `weights_in_file`.

    Attributes:
        file: The mapped file.
        nbytes: Size of the weights, with padding for alignment.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        layers: Sequence[nn.Module] | None = None,
        safetensors: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        # All that can refuse the model or the folder comes before the first move, so that nothing has changed then.
        modules_of_units = units(model, layers)
        _check_model(model)
        files = checked(model, safetensors)
        offsets, self.nbytes = _offsets_in_file(modules_of_units)
        self.file = MappedFile(path, up(max(self.nbytes, 1), PAGE_BYTES))  # an empty file cannot be mapped
        self._handles: list[Any] = []
        names = {module: name for name, module in model.named_modules()}
        moved: dict[torch.Tensor, nn.Parameter] = {}
        self._units = [self._move_unit(modules, names, offsets, moved) for modules in modules_of_units]
        self._layers = LayerReadAhead(self.file, [unit.ranges for unit in self._units])
        give_buffers(model, torch.device("cpu"))
        read_into(model, files, self.file)
        for number, modules in enumerate(modules_of_units):
            # A unit's first module is the one that is called. `prepend`: before hooks of the user's, which may use
            # weights.
            self._handles += [
                modules[0].register_forward_pre_hook(partial(self._before_forward, number), prepend=True),
                modules[0].register_forward_hook(partial(self._after_forward, number)),
            ]
        log.info(
            "%s of weights lie in a file in %s: %d weights, used in %d layers",
            *(format_bytes(self.nbytes), os.fspath(path), len(moved), len(modules_of_units)),
        )

    def close(self) -> None:
        """Remove the hooks; weights stay in the file, which is freed with the last of them; idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy of this, pickled or deep, do nothing.

        Hooks are copied with their model, and this object with them. But the copy's weights lie in memory.
        """
        return _without_units, ()

    def _move_unit(
        self,
        modules: Sequence[nn.Module],
        names: dict[nn.Module, str],
        offsets: dict[torch.Tensor, int],
        moved: dict[torch.Tensor, nn.Parameter],
    ) -> _Unit:
        """Move weights that are used together to the file; tied ones that were moved before are only noted.

        Args:
            modules: The modules that have them.
            names: Names of all modules in the model.
            offsets: Offsets in the file, in bytes, of all weights.
            moved: The parameters that lie in the file so far, by the parameter before the move; this adds to it.
        """
        weights, places = [], list[tuple[int, int]]()
        for module in modules:
            for name, weight in own_parameters(module).items():
                if not weight.numel():  # it has no place in the file
                    continue
                offset = offsets[weight]
                if weight not in moved:  # else it is tied, and lies there
                    moved[weight] = self._move_weight(weight, offset)
                if weight.is_meta:  # it cannot get memory: a new parameter takes its place
                    module.register_parameter(name, moved[weight])
                places.append((offset, weight.nbytes))
                full_name = f"{names[module]}.{name}".lstrip(".")
                weights.append((weakref.ref(module), name, full_name))
        ranges = joined(places)
        for offset, nbytes in ranges:
            self.file.advise_unneeded(offset, nbytes, was_written=True)
        return _Unit(ranges, weights)

    def _move_weight(self, weight: nn.Parameter, offset: int) -> nn.Parameter:
        """Move a weight to the file; return it, or for one on the meta device a new parameter."""
        flat = self.file.tensor(offset, weight.numel(), weight.dtype)
        # The weight keeps its strides (channels last, say), unless its elements have gaps between them, or overlap:
        # its place in the file is as large as its elements.
        place = flat.as_strided(weight.shape, weight.stride()) if shards.is_dense(weight) else flat.view(weight.shape)
        if weight.is_meta:
            moved: nn.Parameter = torch.Tensor._make_subclass(type(weight), place, weight.requires_grad)
            moved.__dict__.update(weight.__dict__)  # attributes that the user has set
            return moved
        with torch.no_grad():
            place.copy_(weight)
            weight.data = place
        return weight

    @_disable_dynamo  # of a compiled model, too, the hook runs as it is
    def _before_forward(self, number: int, *of_forward: Any) -> None:
        """Wait until a unit's weights are in memory; a hook before its forward."""
        self._have_unit_in_memory(number)

    @_disable_dynamo  # as `_before_forward`
    def _after_forward(self, number: int, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Hook one of a unit's outputs, so that the unit's weights are in memory again for its backward pass.

        That hook runs when the output's gradient has been computed, before the unit's own backward. This one runs
        after its forward.
        """
        for output in _pytree.tree_leaves(outputs):
            if isinstance(output, torch.Tensor) and output.requires_grad and not output.is_leaf:
                output.register_hook(lambda gradient: self._have_unit_in_memory(number))  # type: ignore[no-untyped-call]
                return

    def _have_unit_in_memory(self, number: int) -> None:
        """Check that a unit's weights lie in the file, and wait until they are in memory, to be used now."""
        # Nothing to do in two cases. The hooks of a copied model belong to an object without units, as its weights
        # lie in memory (`_without_units`). And `torch.export` traces the model without its memory: `is_compiling` is
        # true then, and not where `torch.compile` is used, which does not trace these hooks (`_disable_dynamo`).
        if not self._units or torch.compiler.is_compiling():
            return
        for module, name, full_name in self._units[number].weights:
            _check_place(full_name, module(), name, self.file)
        self._layers.begin(number)


def _without_units() -> WeightsInFile:
    """Return the object to which hooks in a copy of a model belong: without units they do nothing."""
    copied = WeightsInFile.__new__(WeightsInFile)
    copied._units = []
    copied._handles = []
    copied.nbytes = 0
    return copied


def _offsets_in_file(modules_of_units: Iterable[Sequence[nn.Module]]) -> tuple[dict[torch.Tensor, int], int]:
    """Return the offset of each weight in the file, and where the last one ends, both in bytes.

    Weights lie unit by unit, and a unit begins on a page: pages are read and let go of whole. A tied weight lies in
    the first of its units.
    """
    offsets = dict[torch.Tensor, int]()
    end = 0
    for modules in modules_of_units:
        end = up(end, PAGE_BYTES)
        for weight in (weight for module in modules for weight in own_parameters(module).values()):
            if weight not in offsets and weight.numel():
                offsets[weight] = end
                end = up(end + weight.nbytes)
    return offsets, end


def _check_model(model: nn.Module) -> None:
    """Refuse a model with tensors that cannot lie in a file.

    Those are on another device than the CPU or the meta device, not dense, or wrap other tensors, as `DTensor`s do.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta") or tensor.layout != torch.strided:
            where = f"{tensor.layout} on {tensor.device}"
            raise ConfigError(name, where, "have the model on the CPU, or on the meta device, and dense")
    weights: dict[str, Any] = dict(model.named_parameters())
    for name, weight in weights.items():
        if is_traceable_wrapper_subclass(weight):
            raise ConfigError(name, type(weight).__name__, "have tensors with memory of their own, not sharded")
    check_weights(model, combinations.FILE_LATE)


def _check_once(model: nn.Module) -> None:
    """Refuse a model with hooks of an earlier call, which would find its weights moved out of their file."""
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            function = getattr(hook, "func", hook)  # what a `partial` calls, or the hook itself
            owner = getattr(function, "__self__", None)
            if isinstance(owner, WeightsInFile | ShardsInFile) and owner._handles:  # none after `close`
                allowed = "call weights_in_file once, or close() before what it returned"
                raise ConfigError("model", f"{name or 'it all'}, whose weights lie in a file", allowed)


def _check_place(full_name: str, module: nn.Module | None, name: str, file: MappedFile) -> None:
    """Refuse a weight that does not lie in the file any more, as after `model.to(...)`.

    If the module has no parameter of that name any more, nothing is refused: the model may have changed. A plain
    tensor in the parameter's place passes, too: `functional_call` puts one there for a call.

    Args:
        full_name: The weight's name in the model.
        module: The module that has it; None if there is no such module any more.
        name: Its name there.
        file: The file.
    """
    weight: torch.Tensor | None = None if module is None else module._parameters.get(name)
    if not isinstance(weight, nn.Parameter):
        return
    if weight.device.type != "cpu" or not file.address <= weight.data_ptr() < file.address + file.nbytes:
        what = f"{weight.dtype}, in memory, on {weight.device}"
        advice = (
            "change dtype, device and modules, and load with assign=True, before weights_in_file, or close() what it "
            "returned and call it again"
        )
        raise ConfigError(full_name, what, f"{advice}: this weight has left its file")
