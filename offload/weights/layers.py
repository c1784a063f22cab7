"""The layers of a model: what is used together, one after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from offload.errors import ConfigError

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
    chosen = {*(find_layers(model) if layers is None else layers)}
    if strange := chosen - {*model.modules()}:
        raise ConfigError("layers", type(next(iter(strange))).__name__, "give modules of this model")
    taken, found = set[nn.Module](), list[list[nn.Module]]()
    for module in model.modules():
        if module in taken:
            continue
        inner = [each for each in (module.modules() if module in chosen else [module]) if each not in taken]
        taken.update(inner)
        if any(own_parameters(each) for each in inner):
            found.append(inner)
    return found


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters by name, without those of its children."""
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
