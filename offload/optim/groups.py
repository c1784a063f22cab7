"""Parameter groups: names of their parameters, and hyperparameters to JSON or a state dict and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch

from offload.errors import CheckpointError, ConfigError, check_text
from offload.layout import PARAMETER_NAMES
from offload.rules import items, number

NOT_SAVED = ("param_names", "amsgrad", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")
NOT_LOADED = ("params", *NOT_SAVED)
"""Entries of a saved group that are no hyperparameters of this optimizer: parameters, names, torch's own options."""

HYPERPARAMETER_DEPTH = 4
"""How deeply a hyperparameter may be nested to be kept in a checkpoint."""

Group = Mapping[str, Any]


class TorchOptions(TypedDict, total=False):
    """Options of torch's own optimizers for how they run: accepted without effect, the last two only if not True."""

    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


def torch_defaults(kind: Any) -> Mapping[str, Any]:
    """Return the entries, with default values, that a group of torch's own class `kind` has; none for None."""
    # Only an instance has them, and torch makes none without a parameter.
    return {} if kind is None else dict(kind([torch.empty(0, dtype=torch.float32, device="cpu")]).defaults)


def check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse options that cannot be ignored.

    Raises:
        ConfigError: The step is to be captured in a CUDA graph, or seen by autograd.
        TypeError: There is no such argument.
    """
    for name, value in options.items():
        if name not in TorchOptions.__annotations__:
            raise TypeError(f"{kind}.__init__() got an unexpected keyword argument {name!r}")
        if value and name == "capturable":
            raise ConfigError(name, value, "use false: a CUDA graph cannot hold a step that moves state")
        if value and name == "differentiable":
            raise ConfigError(name, value, "use false: autograd does not see the update")


def names(groups: Sequence[Group]) -> list[tuple[torch.Tensor, str, int]]:
    """Return every parameter with its name and its group's number.

    If a group has no "param_names", its parameters' names are made up of the group's number and their index.
    """
    named = []
    for group_number, group in enumerate(groups):
        given_names = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            made_up = f"param_groups[{group_number}].params[{index}]"
            named.append((parameter, str(given_names[index]) if given_names else made_up, group_number))
    return named


def checked_groups(
    state_dict: Mapping[str, Any], groups: Sequence[Group], check: Callable[[Group], None]
) -> list[Group]:
    """Return the groups of a state dict, after verifying that they match `groups`, the optimizer's own.

    `check` is called with each saved group, and raises if its values cannot be used. A saved group may lack values,
    as torch.distributed.checkpoint saves none of a group without parameters: `check` gets this optimizer's instead.
    """
    if not isinstance(state_dict.get("state"), Mapping) or not isinstance(state_dict.get("param_groups"), list):
        raise ConfigError("state_dict", sorted(state_dict), 'it needs a mapping "state" and a list "param_groups"')
    saved_groups: list[Group] = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group.get("params", ())) for group in saved_groups]
    if sizes != saved_sizes:
        raise ConfigError("state_dict", saved_sizes, f"its groups must have {sizes} parameters")
    keys = [key for group in saved_groups for key in group.get("params", ())]
    parameter_ids = [id(parameter) for group in groups for parameter in group["params"]]
    # Keys and parameters must be in one-to-one relation: a parameter in two groups has the same key in both.
    is_one_to_one = all(isinstance(key, Hashable) for key in keys) and (
        len(set(keys)) == len(set(parameter_ids)) == len(set(zip(keys, parameter_ids, strict=True)))
    )
    if not is_one_to_one:
        raise ConfigError("state_dict params", keys, "give each parameter a number or a name of its own")
    for own_group, saved_group in zip(groups, saved_groups, strict=True):
        _check_names(saved_group.get("param_names"), len(own_group["params"]))
        check({**own_group, **saved_group})
    return saved_groups


def _check_names(names: Any, count: int) -> None:
    """Refuse names of a saved group that are not one string for each of its `count` parameters, or None."""
    if names is None:
        return
    are_strings = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not are_strings or len(names) != count:
        raise ConfigError("state_dict param_names", names, "give each parameter of the group a name, or none")
    for name in names:
        check_text("state_dict param_names", name, PARAMETER_NAMES)


def to_json(groups: Sequence[Group], ignored: Collection[str] = NOT_LOADED) -> list[dict[str, Any]]:
    """Return the groups' hyperparameters as JSON takes them; those that JSON cannot hold are left out."""
    return [
        {name: _marked(value) for name, value in group.items() if name not in ignored and is_plain(value)}
        for group in groups
    ]


def _marked(value: Any) -> Any:
    """Return a hyperparameter as JSON takes it.

    A tensor of one element becomes {"tensor": number}: the mark says that it was a tensor. See `_from_plain`.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"tensor": +value.item()}  # `+` makes a bool 0 or 1, and leaves other numbers as they are
    return _to_plain(value)


def from_json(
    metadata: Mapping[str, Any],
    path: str,
    kind: str,
    groups: Sequence[Group],
    check: Callable[[Group], None],
    ignored: Collection[str] = NOT_LOADED,
) -> list[dict[str, Any]]:
    """Return the hyperparameters of all groups from a checkpoint's metadata, after checks: a file may hold anything.

    Args:
        metadata: The checkpoint's.
        path: The checkpoint's folder, for errors.
        kind: The optimizer's name; the checkpoint must be of the same.
        groups: The optimizer's groups.
        check: Called with each group as it would be with the saved values; raises if they cannot be used.
        ignored: Names of entries that are not loaded.
    """
    saved_groups = metadata.get("groups")
    if metadata.get("optimizer") != kind:
        raise CheckpointError(f"{path} is of {metadata.get('optimizer')}, and this is {kind}")
    if not isinstance(saved_groups, list) or not all(isinstance(group, dict) for group in saved_groups):
        raise CheckpointError(f"{path} is damaged: its groups are {str(saved_groups)[:60]}")
    if len(saved_groups) != len(groups):
        raise CheckpointError(
            f"{path} is of another model: it has {len(saved_groups)} parameter groups, and there are "
            f"{len(groups)} here"
        )
    hyperparameters = []
    for group, saved in zip(groups, saved_groups, strict=True):
        # Parameters are never saved. If a group has some, it is damaged: `_from_plain` raises for their name.
        names_to_load = [name for name in saved if name not in ignored or name == "params"]
        try:
            values = {name: _from_plain(name, saved[name], group.get(name)) for name in names_to_load}
            check({**group, **values})
            hyperparameters.append(values)
        except ConfigError as cause:
            raise CheckpointError(f"{path} is damaged: {cause}") from cause
    return hyperparameters


def set_hyperparameters(groups: Sequence[dict[str, Any]], hyperparameters: Sequence[Group]) -> None:
    """Set the groups' hyperparameters to those that `from_json` returned; tensors are written to in place."""
    for group, values in zip(groups, hyperparameters, strict=True):
        for name, value in values.items():
            if isinstance(value, torch.Tensor):  # as the group's own value is
                group[name].copy_(value)
            else:
                group[name] = value


def is_plain(value: object, depth: int = HYPERPARAMETER_DEPTH) -> bool:
    """Return whether JSON can hold a value: None, a number, text, or sequences of these, nested at most `depth` deep.

    NumPy's numbers are numbers, too, and so are tensors and arrays of one element.
    """
    if value is None or isinstance(value, bool | int | float | str | np.bool_):
        return True
    is_number = not isinstance(value, tuple | list) and not math.isnan(number(value))  # `number` is NaN for others
    if is_number:  # one of any other class, say a Fraction, is not plain: `_to_plain` cannot convert it
        return isinstance(value, torch.Tensor | np.ndarray | np.number)
    # Mappings and bytes are no sequences here, though they have a length and can be indexed.
    elements = None if isinstance(value, Mapping | bytes) else items(value)
    return depth > 0 and elements is not None and all(is_plain(element, depth - 1) for element in elements)


def _to_plain(value: Any) -> Any:
    """Return a value as JSON takes it: numbers as Python's, sequences as lists. `is_plain` is true of it."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [_to_plain(element) for element in items(value) or ()]


def _from_plain(name: str, saved: Any, current: Any) -> Any:
    """Return a saved hyperparameter, converted to the type of the group's current value.

    JSON has only lists and numbers, so `current` decides whether a value becomes a tuple, an array or a tensor.
    """
    is_marked = isinstance(saved, dict) and saved.keys() == {"tensor"}
    value = saved["tensor"] if is_marked else saved
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "params" or not is_plain(value) or (is_marked and not is_number):
        raise ConfigError(name, saved, "no checkpoint has such a hyperparameter")
    if isinstance(value, list) and isinstance(current, tuple):
        return tuple(value)
    if isinstance(value, list) and isinstance(current, np.ndarray):
        return np.array(value)
    return _tensor_like(current, name, value, saved) if isinstance(current, torch.Tensor) else value


def _tensor_like(current: torch.Tensor, name: str, value: Any, saved: Any) -> torch.Tensor:
    """Return `value` as a tensor of the shape, dtype and device of `current`; refuse one of another shape.

    `name` and `saved`, the value as the file has it, are for errors.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    advice = f"it is a tensor of shape {tuple(current.shape)} here"
    if current.numel() == 1 and not is_number:  # a tensor of one element was saved as a number: see `_marked`
        raise ConfigError(name, saved, advice)
    try:
        if current.numel() == 1:
            return torch.full_like(current, value, requires_grad=False)
        tensor = torch.tensor(value, dtype=current.dtype, device=current.device)
    except (RuntimeError, OverflowError, TypeError, ValueError) as cause:
        raise ConfigError(name, saved, str(cause)) from cause
    if tensor.shape != current.shape:
        raise ConfigError(name, saved, advice)
    return tensor
