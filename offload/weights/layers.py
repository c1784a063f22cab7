"""The layers of a model: what is used together, one after another."""

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


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return what a model repeats, in the order of `model.modules()`: children of its lists, mostly of one class.

    Of lists inside each other the outermost count.
    """
    found, inside = list[nn.Module](), set[nn.Module]()
    for module in model.modules():
        if module in inside or not isinstance(module, LISTS):
            continue
        children = [child for child in module.children() if next(child.parameters(), None) is not None]
        kinds = Counter(type(child) for child in children)
        if kinds and max(kinds.values()) >= max(2, (len(children) + 1) // 2):
            found += children
            inside.update(inner for child in children for inner in child.modules())
    return found


def units(model: nn.Module, layers: Sequence[nn.Module] | None = None) -> list[list[nn.Module]]:
    """Return what is used together: layers, and of the rest each module that has parameters of its own.

    Args:
        model: The model.
        layers: Its layers; None for those that `find_layers` finds.

    Returns:
        In the order of `model.modules()`, the modules of each, first the one whose turn it is. None is in two.

    Raises:
        ConfigError: A layer is not in the model.
    """
    chosen = _chosen(model, layers)
    taken, found = set[nn.Module](), list[list[nn.Module]]()
    for module in model.modules():
        if module in taken:
            continue
        is_layer = module in chosen and is_called(module)
        if module in chosen and not is_layer:  # a list of lists: "for attention, mlp in layers"
            chosen.update(module.children())
        inner = [each for each in (module.modules() if is_layer else [module]) if each not in taken]
        taken.update(inner)
        if any(own_parameters(each) for each in inner):
            found.append(inner)
    return found


def _chosen(model: nn.Module, layers: Sequence[nn.Module] | None) -> set[nn.Module]:
    chosen = {*(find_layers(model) if layers is None else layers)}
    if strange := chosen - {*model.modules()}:
        raise ConfigError("layers", type(next(iter(strange))).__name__, "give modules of this model")
    return chosen


class Groups:
    """Modules whose weights can be brought together when the module is called, and let go when it has been.

    A weight that is used outside of a layer, too, is not the layer's: then the layer's modules are taken, as far as
    all uses of their weights are inside of one. Trainable weights of a group have one dtype. What is in no other is
    the model's.

    Args:
        model: The model.
        layers: Its layers; None for those that `find_layers` finds. Of layers inside each other the outermost count.
        others: Weights that are in no group.

    Attributes:
        modules: One for each group; those inside of others first, the model last.

    Raises:
        ConfigError: A layer is not in the model, or a module has trainable weights of several dtypes.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module] | None, others: Collection[nn.Parameter] = ()
    ) -> None:
        self._others = {*others}
        self._names = {module: name for name, module in model.named_modules()}
        self._paths = Counter(module for _, module in model.named_modules(remove_duplicate=False))
        self._uses = Counter(weight for weight in self._used(model))
        chosen, found = _chosen(model, layers) - {model}, set[nn.Module]()
        for layer in self._names:
            if layer in chosen:
                chosen.difference_update(layer.modules())
                self._find(layer, found)
        for module in (model, *found):
            self._split(module, found)
        self.modules = [*(module for module in reversed(self._names) if module in found), model]

    def _used(self, module: nn.Module) -> Iterator[nn.Parameter]:
        """Yield a module's weights, each as often as one of its modules has it."""
        for _, inner in module.named_modules(remove_duplicate=False):
            yield from (each for each in own_parameters(inner).values() if each not in self._others)

    def _has_all_uses(self, module: nn.Module) -> bool:
        uses, paths = Counter(self._used(module)), self._paths[module]
        return all(self._uses[weight] == paths * number for weight, number in uses.items())

    def _find(self, module: nn.Module, found: set[nn.Module]) -> None:
        """Add a module that can be a group, or of those inside of it which can."""
        if next(self._used(module), None) is None:
            return
        if is_called(module) and self._has_all_uses(module):
            found.add(module)
            return
        for child in module.children():
            self._find(child, found)

    def _split(self, module: nn.Module, found: set[nn.Module]) -> None:
        """Add modules of a group whose dtype is another than the group's."""
        members: dict[nn.Module, nn.Module] = {module: module}  # each with one that has it
        waiting = [module]
        while waiting:
            parent = waiting.pop()
            children = [child for child in parent.children() if child not in found and child not in members]
            members.update(dict.fromkeys(children, parent))
            waiting += children
        own = {member: self._own_dtype(member) for member in members}
        sizes = Counter[torch.dtype | None]()
        for member, dtype in own.items():
            sizes[dtype] += sum(each.numel() for each in own_parameters(member).values() if each.requires_grad)
        most = own[module] or max(sizes, key=lambda dtype: sizes[dtype])
        dtypes: dict[nn.Module, torch.dtype | None] = {}
        for member, parent in members.items():
            around = dtypes.get(parent, most)
            dtypes[member] = own[member] or around
            if dtypes[member] != around:
                if not is_called(member) or not self._has_all_uses(member):
                    where = f"trainable weights of {own[member]}, in a layer of {around}"
                    raise ConfigError(self._names[member], where, "give trainable weights of a layer one dtype")
                found.add(member)

    def _own_dtype(self, module: nn.Module) -> torch.dtype | None:
        """Return the dtype of the trainable weights that a module has itself."""
        own = {each.dtype for each in own_parameters(module).values() if each.requires_grad}
        if len(own) > 1:
            raise ConfigError(self._names[module], f"trainable weights of {own}", "give those of a module one dtype")
        return next(iter(own), None)


def is_called(module: nn.Module) -> bool:
    """Return whether a module computes something by itself, and so runs hooks; a list does not."""
    return type(module).forward is not nn.Module.forward


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters by name, without those of its children."""
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def check_weights(model: nn.Module, late: combinations.Row) -> None:
    """Refuse weights that cannot be moved without somebody losing them.

    Args:
        model: The model.
        late: Why no optimizer may have its weights.

    Raises:
        ConfigError: Two weights share memory, or an optimizer has one.
    """
    names: dict[torch.Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    dense = (weight for weight in names if weight.layout == torch.strided and shards.is_dense(weight))
    shards.check_apart({weight: names[weight] for weight in dense if shards.local(weight).data_ptr()})
    if _optimizer_of(names) is not None:
        gc.collect()  # one that nobody has any more
        if (found := _optimizer_of(names)) is not None:
            late.refuse(found[0], f"a weight of {found[1]}", optimizer=found[1])


def _optimizer_of(names: Mapping[torch.Tensor, str]) -> tuple[str, str] | None:
    """Return the name of a weight that an optimizer has, and the optimizer's class."""
    for each in gc.get_objects():  # torch has no list of optimizers, and a weight does not know its own
        if issubclass(type(each), torch.optim.Optimizer):
            for group in vars(each).get("param_groups", ()):
                for weight in group["params"]:
                    if weight in names:
                        return names[weight], type(each).__name__
    return None


def give_buffers(model: nn.Module, device: torch.device) -> None:
    """Give buffers on the meta device memory."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
