"""The layers of a model: modules whose weights are used together, one layer after another."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from offload import combinations
from offload.errors import ConfigError
from offload.optim import shards

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
"""Modules that have layers as children."""


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's layers: the children of its lists (`LISTS`) whose children are mostly of one class.

    At least two children of such a list, and at least half of them, are of that class. The others are layers, too.
    Children without parameters do not count, and are no layers. Layers are in the order of `model.modules()`. Lists
    inside of layers are not looked at.
    """
    layers = list[nn.Module]()
    inside = set[nn.Module]()
    for module in model.modules():
        if module in inside or not isinstance(module, LISTS):
            continue
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        counts = Counter(type(child) for child in children)
        half = (len(children) + 1) // 2
        if counts and max(counts.values()) >= max(2, half):
            layers += children
            inside.update(inner for child in children for inner in child.modules())
    return layers


def units(model: nn.Module, layers: Sequence[nn.Module] | None = None) -> list[list[nn.Module]]:
    """Return the units of a model: each layer, and outside of layers each module that has parameters itself.

    Args:
        model: The model.
        layers: Its layers; None for those that `find_layers` finds.

    Returns:
        For each unit, in the order of `model.modules()`, its modules; the first is the one that is called. No module
        is in two units.

    Raises:
        ConfigError: A layer is not in the model.
    """
    chosen = _chosen_layers(model, layers)
    in_a_unit = set[nn.Module]()
    found_units = list[list[nn.Module]]()
    for module in model.modules():
        if module in in_a_unit:
            continue
        is_layer = module in chosen and is_called(module)
        # A list in a list, as in "for attention, mlp in layers": its children, which come later, are layers instead.
        if module in chosen and not is_layer:
            chosen.update(module.children())
        inner = [each for each in (module.modules() if is_layer else [module]) if each not in in_a_unit]
        in_a_unit.update(inner)
        if any(own_parameters(each) for each in inner):
            found_units.append(inner)
    return found_units


def _chosen_layers(model: nn.Module, layers: Sequence[nn.Module] | None) -> set[nn.Module]:
    """Return the layers that the user names, or those that are found; refuse modules of another model."""
    chosen = {*(find_layers(model) if layers is None else layers)}
    if strange := chosen - {*model.modules()}:
        raise ConfigError("layers", type(next(iter(strange))).__name__, "give modules of this model")
    return chosen


class GatherGroups:
    """Groups of weights that can be copied together when a module is called, and freed when it returns.

    Usually a group is a layer. If a weight of a layer is used outside of it, too, the layer is no group: instead the
    outermost modules inside of it whose weights are used nowhere else are groups. Trainable weights of a group have
    one dtype; modules with another one are groups of their own. Weights in no other group are the model's.

    Args:
        model: The model.
        layers: Its layers; None for those that `find_layers` finds. Of layers inside each other the outermost count.
        others: Weights that are to be in no group.

    Attributes:
        modules: The module of each group; those inside of others first, the model last.

    Raises:
        ConfigError: A layer is not in the model, or a module has trainable weights of several dtypes.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module] | None, others: Collection[nn.Parameter] = ()
    ) -> None:
        self._others = {*others}
        self._names = {module: name for name, module in model.named_modules()}
        # By how many names a module, and a weight, is in the model: tied ones by several.
        self._paths = Counter(module for _, module in model.named_modules(remove_duplicate=False))
        self._uses = Counter(self._weights_used_in(model))
        chosen = _chosen_layers(model, layers) - {model}
        groups = set[nn.Module]()
        for layer in self._names:
            if layer in chosen:
                chosen.difference_update(layer.modules())  # layers inside of it, which come later, do not count
                self._add_groups_in(layer, groups)
        for module in (model, *groups):  # the groups so far; those that the call adds have one dtype already
            self._split_by_dtype(module, groups)
        # In reverse, as `named_modules` has a module before those inside of it.
        self.modules = [*(module for module in reversed(self._names) if module in groups), model]

    def _weights_used_in(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the weights in a module, each once for every name that it has there."""
        for _, inner in module.named_modules(remove_duplicate=False):
            yield from (weight for weight in own_parameters(inner).values() if weight not in self._others)

    def _has_all_uses(self, module: nn.Module) -> bool:
        """Return whether the weights in a module are used nowhere else in the model.

        Then a weight has as many names in the model as it has inside of the module, times the names of the module,
        which has several if it is in several places.
        """
        uses_inside = Counter(self._weights_used_in(module))
        paths = self._paths[module]
        return all(self._uses[weight] == paths * count for weight, count in uses_inside.items())

    def _add_groups_in(self, module: nn.Module, groups: set[nn.Module]) -> None:
        """Add a module to `groups` if it can be a group, else those inside of it that can."""
        if next(self._weights_used_in(module), None) is None:
            return
        if is_called(module) and self._has_all_uses(module):
            groups.add(module)
            return
        for child in module.children():
            self._add_groups_in(child, groups)

    def _split_by_dtype(self, module: nn.Module, groups: set[nn.Module]) -> None:
        """Make modules in the group of `module` groups of their own if their trainable weights have another dtype.

        The group keeps the dtype of the module's own weights; if it has none, the one that most elements have. A
        module inside without trainable weights of its own counts as of its parent's dtype. So a new group begins
        where the dtype changes from parent to child.
        """
        # By module of the group its parent, parents first; without modules that are in other groups.
        parent_of: dict[nn.Module, nn.Module] = {module: module}
        waiting = [module]
        while waiting:
            parent = waiting.pop()
            children = [child for child in parent.children() if child not in groups and child not in parent_of]
            parent_of.update(dict.fromkeys(children, parent))
            waiting += children
        own_dtypes = {member: self._own_dtype(member) for member in parent_of}
        numels = Counter[torch.dtype | None]()
        for member, dtype in own_dtypes.items():
            numels[dtype] += sum(each.numel() for each in own_parameters(member).values() if each.requires_grad)
        group_dtype = own_dtypes[module] or max(numels, key=lambda dtype: numels[dtype])
        dtypes: dict[nn.Module, torch.dtype | None] = {}
        for member, parent in parent_of.items():
            parents_dtype = dtypes.get(parent, group_dtype)  # `module` is its own parent here: the group's
            dtypes[member] = own_dtypes[member] or parents_dtype
            if dtypes[member] != parents_dtype:
                if not is_called(member) or not self._has_all_uses(member):
                    where = f"trainable weights of {own_dtypes[member]}, in a layer of {parents_dtype}"
                    raise ConfigError(self._names[member], where, "give trainable weights of a layer one dtype")
                groups.add(member)

    def _own_dtype(self, module: nn.Module) -> torch.dtype | None:
        """Return the dtype of the trainable weights that a module has itself, not in children; None without any."""
        dtypes = {each.dtype for each in own_parameters(module).values() if each.requires_grad}
        if len(dtypes) > 1:
            what = f"trainable weights of {dtypes}"
            raise ConfigError(self._names[module], what, "give those of a module one dtype")
        return next(iter(dtypes), None)


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward of its own, so that its hooks run; a list has none."""
    return type(module).forward is not nn.Module.forward


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a module has itself, not in its children, by their names in it."""
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def check_weights(model: nn.Module, late: combinations.Row) -> None:
    """Refuse a model whose weights cannot be moved: two share memory, or an optimizer has one.

    The optimizer would go on with the weights as they were before the move.

    Raises:
        ConfigError: Two weights share memory; or an optimizer has one, which is refused as `late` says.
    """
    names: dict[torch.Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    dense = (weight for weight in names if weight.layout == torch.strided and shards.is_dense(weight))
    with_memory = (weight for weight in dense if shards.local(weight).data_ptr())  # not those on the meta device
    shards.check_apart({weight: names[weight] for weight in with_memory})
    if _optimizer_of(names) is not None:
        gc.collect()  # it may be an optimizer that nobody holds any more
        found = _optimizer_of(names)
        if found is not None:
            name, optimizer = found
            late.refuse(name, f"a weight of {optimizer}", optimizer=optimizer)


def _optimizer_of(names: Mapping[torch.Tensor, str]) -> tuple[str, str] | None:
    """Return the name of a weight that some optimizer of this process has, and the optimizer's class; or None."""
    for candidate in gc.get_objects():  # torch has no list of optimizers
        # Not by `isinstance`, which asks an object for `__class__`, and may so run code of it.
        if issubclass(type(candidate), torch.optim.Optimizer):
            for group in vars(candidate).get("param_groups", ()):
                for weight in group["params"]:
                    if weight in names:
                        return names[weight], type(candidate).__name__
    return None


def give_buffers(model: nn.Module, device: torch.device) -> None:
    """Replace buffers on the meta device by zeros on `device`; a buffer of several modules stays one tensor."""
    given: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if buffer not in given:
                    given[buffer] = torch.zeros_like(buffer, device=device)
                module._buffers[name] = given[buffer]
