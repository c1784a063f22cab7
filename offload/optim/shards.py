"""Sharded tensors: torch's `DTensor` as the elements that this rank has, and where they lie in the whole.

A `DTensor` is a wrapper around a local tensor. The engine binds the local tensor's memory. Both have a version
counter: operations on the wrapper count in the wrapper's alone, writes to the local tensor in the local one's alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch

from offload.errors import ConfigError
from offload.layout import row_major

Box = tuple[tuple[int, int], ...]
"""First index and size of a piece in each dimension."""


def is_sharded(tensor: object) -> bool:
    """Return whether a tensor is a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # who has one has imported this, which takes long
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor that this rank has: a plain tensor's are all."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # else it is a view with a graph
        found: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return found


def counted(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that count changes in place: a wrapper, and what this rank has of it."""
    return (tensor, local(tensor)) if is_sharded(tensor) else (tensor,)


def version(tensor: torch.Tensor) -> int:
    """Return a number that grows with every change in place that torch counts."""
    return sum(part._version for part in counted(tensor))


def let_go(tensor: torch.Tensor) -> None:
    """Let go of a detached tensor's memory; its version counter stays."""
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    if is_sharded(tensor):
        tensor._local_tensor = empty  # type: ignore[attr-defined]
    else:
        tensor.data = empty


def placed_as(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape are cut alike, or neither is cut."""
    if not (is_sharded(tensor) or is_sharded(other)):
        return True
    left, right = ((getattr(t, "device_mesh", None), getattr(t, "placements", None)) for t in (tensor, other))
    return left == right


def place(tensor: torch.Tensor) -> tuple[int, Box | None]:
    """Return where this rank's elements begin in the whole tensor, and their box if they are no run there."""
    if not is_sharded(tensor):
        return 0, None
    box = _box(tensor)
    if not all(size for _, size in box):
        return 0, None
    strides = row_major(tensor.shape)
    start = sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
    last = sum((first + size - 1) * stride for (first, size), stride in zip(box, strides, strict=True))
    return start, None if last + 1 - start == local(tensor).numel() else box


def _box(tensor: Any) -> Box:
    (chunk,) = tensor.__create_chunk_list__()  # what torch.distributed.checkpoint asks for
    return tuple(zip(chunk.offsets, chunk.sizes, strict=True))


def check(tensor: torch.Tensor, name: str) -> None:
    """Refuse a sharded parameter whose local elements cannot be told in the whole."""
    if not is_sharded(tensor):
        return
    sharded: Any = tensor
    if sharded.device_mesh.get_coordinate() is None:
        raise ConfigError(
            name, str(sharded.device_mesh), "leave it to the ranks of its mesh: this rank is not of them"
        )
    if any(placement.is_partial() for placement in sharded.placements):
        raise ConfigError(name, str(sharded.placements), "use parameters that are sharded or replicated, not partial")
    mine = local(tensor)
    if type(mine) not in (torch.Tensor, torch.nn.Parameter):
        raise ConfigError(name, f"DTensor of {type(mine).__name__}", "use plain tensors as shards")
    sizes = tuple(size for _, size in _box(tensor))
    if tuple(mine.shape) != sizes:
        raise ConfigError(name, f"a shard of {tuple(mine.shape)}", f"its placements {sharded.placements} say {sizes}")
    if not mine.is_contiguous() or (tensor.numel() and not _is_row_major(tensor)):
        raise ConfigError(name, f"strides {tensor.stride()}", "use a contiguous sharded parameter")


def _is_row_major(tensor: torch.Tensor) -> bool:
    ways = zip(tensor.shape, tensor.stride(), row_major(tensor.shape), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in ways)


def as_placed(gradient: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Return a gradient cut as its parameter; a collective where it was not, as it is still to be reduced, say."""
    if placed_as(gradient, parameter):
        return gradient
    if not (is_sharded(gradient) and is_sharded(parameter)):
        kinds = [type(tensor).__name__ for tensor in (gradient, parameter)]
        raise ConfigError(f"gradient of {name}", kinds[0], f"use the weight's kind, {kinds[1]}")
    given: Any = gradient
    wanted: Any = parameter
    if given.device_mesh != wanted.device_mesh:
        raise ConfigError(f"gradient of {name}", str(given.device_mesh), f"use the weight's {wanted.device_mesh}")
    with torch.no_grad():
        found: torch.Tensor = given.redistribute(placements=wanted.placements)
    return found


def shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return fp32 values of the elements that this rank has, in a parameter's form; nothing is copied or moved."""
    mine = local(parameter)
    values = flat.as_strided(mine.size(), mine.stride())
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # `DTensor.from_local` moves what it is given to the mesh's device.
    spec: Any = parameter._spec  # type: ignore[attr-defined]
    meta = TensorMeta(parameter.shape, parameter.stride(), flat.dtype)
    make: Any = DTensor
    found: torch.Tensor = make(values, DTensorSpec(spec.mesh, spec.placements, meta), requires_grad=False)
    return found


def own_part(what: str, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return those elements of a tensor of a parameter's shape that this rank has of the parameter.

    The tensor is cut as the parameter, or whole on every rank.

    Raises:
        ConfigError: It is cut in another way.
    """
    if placed_as(tensor, parameter):
        return local(tensor)
    if is_sharded(tensor):
        allowed = "use the parameter's mesh and placements, or whole tensors on every rank"
        raise ConfigError(what, f"a DTensor of {getattr(tensor, 'placements', None)}", allowed)
    return tensor[tuple(slice(first, first + size) for first, size in _box(parameter))]


def total(parts: Iterable[tuple[torch.Tensor, float]]) -> float:
    """Return the sum over all ranks of a number that each has for its piece of each parameter.

    Replicated pieces count once. Every rank gets the same bits: ranks exchange their numbers, and each adds all of
    them, rounded once. That takes one collective for each process group over which something is sharded, on its own
    backend; none for plain tensors, which count as replicated.
    """
    sums: dict[tuple[str, ...], float] = {}
    groups: dict[str, tuple[Any, str]] = {}
    for parameter, number in parts:
        over: list[str] = []
        if is_sharded(parameter):
            sharded: Any = parameter
            mesh = sharded.device_mesh
            for dim, placement in enumerate(sharded.placements):
                if not placement.is_replicate():
                    group = mesh.get_group(dim)
                    groups.setdefault(group.group_name, (group, mesh.device_type))
                    over.append(group.group_name)
        sums[tuple(over)] = sums.get(tuple(over), 0.0) + number
    for name, (group, device) in groups.items():
        chosen = [among for among in sums if name in among]
        mine = torch.tensor([sums.pop(among) for among in chosen], dtype=torch.float64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        torch.distributed.all_gather(everyone, mine, group=group)
        for among, numbers in zip(chosen, torch.stack(everyone).T.tolist(), strict=True):
            others = tuple(other for other in among if other != name)
            sums[others] = sums.get(others, 0.0) + math.fsum(numbers)
    return sums.get((), 0.0)
