"""Tensors that are cut over ranks: which elements this rank has, and which part of the whole these are.

A parameter is cut if it is torch's `DTensor`, a wrapper around a local tensor whose memory the engine binds; or if it
is a plain tensor, whole on every rank, of which each rank updates its rows (`OffloadConfig.shard`).

A `DTensor` and its local tensor have a version counter each: operations on the wrapper count in the wrapper's alone,
writes to the local tensor in the local one's alone, and torch's `_foreach` functions in neither.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo
from torch.multiprocessing.reductions import StorageWeakRef

from offload import combinations
from offload.errors import ConfigError
from offload.layout import row_major
from offload.optim.exchange import all_gather, broadcast

GATHER_BYTES = 64 << 20
"""Bytes of the buffers through which ranks exchange weights that each has updated in part."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut over a mesh of ranks, and which piece of it this rank has.

    Attributes:
        mesh: torch's `DeviceMesh`.
        placements: torch's, one for each dimension of the mesh.
        box: The piece as (first index, size) in each dimension.
        start: First element of the piece in the whole, in row-major order; 0 if the piece is empty.
        is_run: Whether the piece is a single run of the whole's elements in that order.
        owner_rank: Of a dealt parameter, the number in the mesh of its owner rank, whose piece is the whole; else
            None.
    """

    mesh: Any
    placements: tuple[Any, ...]
    box: tuple[tuple[int, int], ...]
    start: int
    is_run: bool
    owner_rank: int | None = None

    @property
    def groups(self) -> list[Any]:
        """The process groups over which the parameter is cut, and not replicated."""
        kinds = enumerate(self.placements)
        return [self.mesh.get_group(dimension) for dimension, kind in kinds if not kind.is_replicate()]

    @property
    def is_replicated(self) -> bool:
        """Whether several ranks have this piece."""
        kinds = enumerate(self.placements)
        return any(kind.is_replicate() and self.mesh.size(dimension) > 1 for dimension, kind in kinds)


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # whoever made one has imported this; importing takes long
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def fsdp_groups(model: torch.nn.Module) -> list[Any]:
    """Return the groups in which FSDP2 gathers a model's parameters: torch's `FSDPParamGroup`s."""
    module = sys.modules.get("torch.distributed.fsdp")  # as in `is_dtensor`
    kind = getattr(module, "FSDPModule", None)
    if kind is None:
        return []
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, kind)]
    groups: list[Any] = []
    for state in dict.fromkeys(states):  # modules that are sharded together have one state
        # Since torch 2.12 a state has a list of groups; before, one group, or None.
        groups_since_2_12 = getattr(state, "_fsdp_param_groups", None)
        groups += [state._fsdp_param_group] if groups_since_2_12 is None else groups_since_2_12
    return [group for group in groups if group is not None]


def gathered_by(fsdp_group: Any) -> list[torch.Tensor]:
    """Return the parameters that one of `fsdp_groups` gathers."""
    return [fsdp_param.sharded_param for fsdp_param in fsdp_group.fsdp_params]


def copies_gradients_to_host(parameter: torch.Tensor) -> bool:
    """Return whether FSDP2 copies a parameter's gradients from a GPU to host memory, where the weight lies.

    Then the mesh is one of GPUs, and the shard lies in host memory (`CPUOffloadPolicy`).
    """
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and mesh.device_type != local(parameter).device.type


class PatchedMethod:
    """Replaces a method of one of `fsdp_groups` until `remove`; in a forked process it only calls the method.

    Args:
        group: The group.
        name: The method's name.
        call: A bound method, whose object is not kept alive; called with the group, the replaced method, and its
            arguments.
    """

    def __init__(self, group: Any, name: str, call: Callable[..., Any]) -> None:
        self._call: Callable[[], Callable[..., Any] | None] = weakref.WeakMethod(call)  # returns None once it is gone
        self._group, self._name = group, name
        self._is_first = name not in vars(group)  # nothing has replaced the class's method before this
        self._method = getattr(group, name)
        self._pid = os.getpid()
        setattr(group, name, self)

    @_disable_dynamo
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the replacement; FSDP2 calls this as the group's method.

        After `remove`, once the object of `call` is gone, and in a forked process this calls the method itself.
        """
        call = self._call() if os.getpid() == self._pid else None
        if call is None:
            return self._method(*arguments, **options)
        return call(self._group, self._method, *arguments, **options)

    def remove(self) -> None:
        """Undo the replacement.

        What that takes depends on what stands in the method's place now:

        * this: the method is restored;
        * another `PatchedMethod`, which has replaced this one, or replaced one that had: whichever has this as its
          method gets this one's method instead;
        * something else, which still calls this: it stays, and this only calls the method from now on.
        """
        self._call = lambda: None  # from now on a call only calls the method
        newest = vars(self._group).get(self._name)
        if newest is self:  # nothing has replaced the method since
            if self._is_first:  # without the group's own attribute, the class's method is found again
                delattr(self._group, self._name)
            else:
                setattr(self._group, self._name, self._method)
        replacement = newest
        while isinstance(replacement, PatchedMethod):
            if replacement._method is self:
                replacement._method = self._method
                replacement._is_first = self._is_first
            replacement = replacement._method


def cut_of(parameter: torch.Tensor, name: str, rows_over: Any, owner: int | None = None) -> Cut | None:
    """Return how a parameter is cut; None if this rank has all of it.

    Args:
        parameter: The parameter.
        name: Its name.
        rows_over: A mesh over which the rows of plain tensors are cut; None if they are not.
        owner: The rank of that mesh, or of a `DTensor`'s, to which the parameter is dealt; None if it is not.

    Raises:
        ConfigError: It is cut in a way that cannot be updated.
    """
    if is_dtensor(parameter):
        if rows_over is not None:
            combinations.SHARDED_TWICE.refuse("shard", True, name=name)
        dtensor: Any = parameter
        mesh = dtensor.device_mesh
        placements = tuple(dtensor.placements)
        box = _checked_box(parameter, name)
        piece = local(parameter)
    elif rows_over is not None and parameter.dim():  # one without dimensions has no rows: each rank updates it
        from torch.distributed.tensor import Shard

        mesh, placements = rows_over, (Shard(0),)
        if owner is not None:
            box = dealt_box(parameter.shape, mesh, owner)
        else:
            rows = _rows(parameter.shape[0], mesh.size(), mesh.get_local_rank())
            box = (rows, *((0, whole) for whole in parameter.shape[1:]))
        piece = own(parameter, Cut(mesh, placements, box, start=0, is_run=True))  # `own` looks at the box alone
    else:
        return None

    strides = row_major(parameter.shape)
    _check_contiguous(parameter, piece, name, strides)
    if owner is not None and is_dtensor(parameter):  # the owner updates a whole copy, not its shard
        from torch.distributed.tensor import Shard

        mesh = dealing_mesh(mesh, name)
        box = dealt_box(parameter.shape, mesh, owner)
        return Cut(mesh, (Shard(0),), box, start=0, is_run=True, owner_rank=owner)
    if not piece.numel():  # an empty piece has no first element
        return Cut(mesh, placements, box, start=0, is_run=True, owner_rank=owner)
    # The whole's elements from the piece's first to its last are the piece alone if there are as many.
    start = sum(first * stride for (first, _), stride in zip(box, strides, strict=True))
    last = sum((first + size - 1) * stride for (first, size), stride in zip(box, strides, strict=True))
    is_run = last + 1 - start == piece.numel()
    return Cut(mesh, placements, box, start, is_run, owner)


def _checked_box(dtensor: Any, name: str) -> tuple[tuple[int, int], ...]:
    """Return `box_of` a `DTensor`; refuse one that cannot be updated.

    It has to have this rank in its mesh, no partial placement, and a plain local tensor of the size of the box.
    """
    mesh = dtensor.device_mesh
    placements = tuple(dtensor.placements)
    if mesh.get_coordinate() is None:
        raise ConfigError(name, str(mesh), "leave it to the ranks of its mesh, of which this is none")
    if any(kind.is_partial() for kind in placements):
        raise ConfigError(name, str(placements), "use parameters that are sharded or replicated, not partial")
    box = box_of(dtensor)
    piece = local(dtensor)
    if type(piece) not in (torch.Tensor, torch.nn.Parameter):
        raise ConfigError(name, f"DTensor of {type(piece).__name__}", "use plain tensors as shards")
    sizes = tuple(size for _, size in box)
    if tuple(piece.shape) != sizes:
        raise ConfigError(name, f"a shard of {tuple(piece.shape)}", f"its placements {placements} say {sizes}")
    return box


def _check_contiguous(parameter: torch.Tensor, piece: torch.Tensor, name: str, strides: Sequence[int]) -> None:
    """Refuse a sharded parameter, or this rank's piece of it, whose elements are not in row-major order.

    `strides` are those of row-major order. The stride of a dimension of size 1 is never used.
    """
    is_row_major = all(
        size == 1 or stride == row_stride
        for size, stride, row_stride in zip(parameter.shape, parameter.stride(), strides, strict=True)
    )
    if parameter.numel() and not is_row_major:
        raise ConfigError(name, f"strides {parameter.stride()}", "use a contiguous sharded parameter")
    if not piece.is_contiguous():
        raise ConfigError(name, f"a shard of strides {piece.stride()}", "use a contiguous sharded parameter")


def box_of(parameter: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return first index and size of this rank's shard of a `DTensor`, in each dimension."""
    dtensor: Any = parameter
    (chunk,) = dtensor.__create_chunk_list__()  # the protocol of torch.distributed.checkpoint
    return tuple(zip(chunk.offsets, chunk.sizes, strict=True))


def dealing_mesh(mesh: Any, name: str) -> Any:
    """Return a mesh of one dimension with the ranks of a parameter's mesh, over which it can be dealt.

    Raises:
        ConfigError: There is no process group of these ranks.
    """
    if mesh.ndim == 1:
        return mesh
    if mesh.size() != torch.distributed.get_world_size():
        allowed = "use a mesh of one dimension, or one of all ranks: whole matrices are dealt to its ranks"
        raise ConfigError(name, str(mesh), allowed)
    return mesh_of_all(mesh.device_type)


def mesh_of_all(device: str) -> Any:
    """Return torch's mesh of all ranks, which uses the default process group.

    Args:
        device: The kind of device that weights are on.
    """
    from torch.distributed.device_mesh import DeviceMesh

    everyone: Any = torch.distributed.group.WORLD
    return DeviceMesh.from_group(everyone, device)


def dealt_box(shape: Sequence[int], mesh: Any, owner: int) -> tuple[tuple[int, int], ...]:
    """Return this rank's piece of a parameter that is dealt to `owner`: all rows there, none elsewhere."""
    rows = shape[0] if mesh.get_local_rank() == owner else 0
    return ((0, rows), *((0, size) for size in shape[1:]))


def _rows(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the first row of a rank, and how many rows it has, as torch's `Shard(0)` cuts them.

    Each rank has the quotient, rounded up, of `rows` and `ranks`; so the last ranks may have fewer, or none.
    """
    rows_per_rank = -(-rows // ranks)
    first = min(rank * rows_per_rank, rows)
    return first, min(rows_per_rank, rows - first)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a `DTensor`; any other tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    elements: Any = tensor._local_tensor  # type: ignore[attr-defined]  # `to_local` may add a view or a graph
    wait = getattr(elements, "wait", None)  # the result of a collective under way has this method
    return elements if wait is None else wait()  # type: ignore[no-any-return]


def own(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """Return this rank's elements of a tensor: a `DTensor`'s shard, or the piece by `cut` of a whole one."""
    if cut is None or is_dtensor(tensor):
        return local(tensor)
    return tensor.detach()[tuple(slice(first, first + size) for first, size in cut.box)]


def counting_tensors(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors whose version counters count changes in place: a `DTensor`, and its local tensor."""
    return (tensor, local(tensor)) if is_dtensor(tensor) else (tensor,)


def version(tensor: torch.Tensor) -> int:
    """Return a number that grows with every change in place that torch counts."""
    if not is_dtensor(tensor):  # each step asks this of all weights
        return tensor._version
    return sum(part._version for part in counting_tensors(tensor))


class Stamp(NamedTuple):
    """Identifies a weight's memory and version, so that a weight that was moved or written to is recognised.

    Address and version alone are not enough. Memory that `weight.data = ...` frees may be used again by the next such
    assignment, so that a weight has the same address and version as before. But its storage is another object: the
    weak reference lets the memory go, and keeps the storage's own small object, whose address no later one gets.

    Attributes:
        address: Where this rank's elements lie.
        version: The weight's version.
        storage: Their storage.
    """

    address: int
    version: int
    storage: StorageWeakRef


def stamp(weight: torch.Tensor, elements: torch.Tensor, last: Stamp | None) -> Stamp:
    """Return a weight's stamp as it is now.

    Args:
        weight: The weight.
        elements: This rank's elements of it.
        last: Its last stamp, whose reference to the storage is used again if the storage is the same; None for none.
    """
    # Each step asks this of all weights. So `untyped_storage`, which is slow and makes a Python object, is only
    # called for another storage than the last.
    storage = torch._C._storage_address(elements)  # type: ignore[attr-defined]
    if last is None or last.storage.cdata != storage:
        storage_ref = StorageWeakRef(elements.untyped_storage())  # type: ignore[no-untyped-call]
    else:
        storage_ref = last.storage
    return Stamp(elements.data_ptr(), version(weight), storage_ref)


def free_memory(tensor: torch.Tensor) -> None:
    """Free a detached tensor's memory; its version counter stays."""
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    if is_dtensor(tensor):
        tensor._local_tensor = empty  # type: ignore[attr-defined]
    else:
        tensor.data = empty


def placed_as(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same mesh and placements, or neither is a `DTensor`."""

    def placing(each: torch.Tensor) -> tuple[Any, Any]:
        """Return mesh and placements; None for a plain tensor."""
        return getattr(each, "device_mesh", None), getattr(each, "placements", None)

    return placing(tensor) == placing(other)


def reduced_gradient(gradient: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Return a gradient with its parameter's placements.

    Usually it has these already. With tensor parallelism it may have others, and is reduced then: a collective.

    Raises:
        ConfigError: The gradient is on another mesh; `name` is the parameter's, for this.
    """
    if placed_as(gradient, parameter):
        return gradient
    mesh = getattr(gradient, "device_mesh", "no mesh")
    weight_mesh = getattr(parameter, "device_mesh", "no mesh")
    if mesh != weight_mesh:
        raise ConfigError(f"gradient of {name}", str(mesh), f"use the weight's: {weight_mesh}")
    with torch.no_grad():
        placements = parameter.placements  # type: ignore[attr-defined]
        redistributed: torch.Tensor = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return redistributed


def in_form(flat: torch.Tensor, parameter: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """Return flat fp32 values of this rank's elements as a tensor of the parameter's form, over the same memory.

    A cut parameter's is a `DTensor` of the whole shape.

    Args:
        flat: The values, in the order of the parameter's memory.
        parameter: The parameter.
        cut: How it is cut; None if this rank has all of it.

    Raises:
        ConfigError: The parameter is dealt, so that its whole state lies on the owner rank.
    """
    if cut is not None and cut.owner_rank is not None:
        combinations.DEALT_STATE.refuse("state", "read on several ranks")
    elements = own(parameter, cut)
    values = flat.as_strided(elements.size(), elements.stride())
    return values if cut is None else _placed(values, parameter, cut.mesh, cut.placements)


def placed(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's values as a `DTensor` that is cut as a parameter is, over the same memory."""
    return _placed(values, parameter, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]


def _placed(values: torch.Tensor, parameter: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> torch.Tensor:
    """Return a `DTensor` of the parameter's whole shape, over this rank's values."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(parameter.shape, parameter.stride(), values.dtype)
    make: Any = DTensor  # `from_local` would move the values to the mesh's device
    dtensor: torch.Tensor = make(values, DTensorSpec(mesh, placements, meta), requires_grad=False)
    return dtensor


def rank_elements_of(what: str, tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    """Return this rank's elements of a tensor that a user gave for a parameter.

    Args:
        what: What the tensor is, for errors.
        tensor: A `DTensor` that is cut as the parameter, or a whole tensor.
        cut: How the parameter is cut; None if this rank has all of it.

    Raises:
        ConfigError: It is cut in another way, or is another rank's.
    """
    if is_dtensor(tensor):
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)  # type: ignore[attr-defined]
        if cut is None or (mesh, placements) != (cut.mesh, cut.placements):
            allowed = "use the parameter's mesh and placements, or whole tensors on every rank"
            raise ConfigError(what, f"a DTensor of {placements}", allowed)
        # A pickled mesh has the coordinate of the rank that has pickled it, whose elements these are.
        if _place_in(mesh, placements) != _place_in(cut.mesh, placements):
            advice = (
                "each rank loads what it has saved itself: save optimizer.state_dict() on every rank, or use "
                "save_checkpoint or torch.distributed.checkpoint"
            )
            raise ConfigError(what, "another rank's elements", advice)
    return own(tensor, cut)


def _place_in(mesh: Any, placements: tuple[Any, ...]) -> list[int]:
    """Return the coordinate that a mesh has of its rank, without dimensions over which elements are replicated."""
    # The coordinate is None, so the list empty, if the mesh's rank is not in it.
    coordinate = mesh.get_coordinate() or ()
    return [number for number, kind in zip(coordinate, placements, strict=False) if not kind.is_replicate()]


def total(parts: Iterable[tuple[Cut | None, float]]) -> float:
    """Return the sum, over all ranks and parameters, of a number that each rank has for its piece of each parameter.

    `parts` has the cut and this rank's number of each parameter, on all ranks in the same order. A replicated piece
    counts once. Every rank gets the same bits: ranks exchange their numbers, and each adds all of them, rounded once.
    That takes one collective for each process group of several ranks over which parameters are cut, on the group's
    own backend.
    """
    # First this rank adds up its numbers of parameters that are cut over the same groups. Then one group after the
    # other adds up the sums of its ranks, and is taken out of their keys. So all ends in the sum under ().
    sums: dict[tuple[str, ...], float] = {}  # by names of the groups that have yet to add up
    groups: dict[str, Any] = {}  # by name
    devices: dict[str, str] = {}  # by name of the group: the kind of device that its collectives work on
    for cut, number in parts:
        names: tuple[str, ...] = ()
        if cut is not None:
            several = [group for group in cut.groups if group.size() > 1]
            names = tuple(group.group_name for group in several)
            for group in several:
                groups.setdefault(group.group_name, group)
                devices.setdefault(group.group_name, cut.mesh.device_type)
        sums[names] = sums.get(names, 0.0) + number
    for name, group in groups.items():
        pending = [names for names in sums if name in names]  # keys of the sums that this group adds up
        mine = torch.tensor([sums.pop(names) for names in pending], dtype=torch.float64, device=devices[name])
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        torch.distributed.all_gather(everyone, mine, group=group)
        for names, numbers_of_ranks in zip(pending, torch.stack(everyone).T.tolist(), strict=True):
            other_names = tuple(other for other in names if other != name)
            sums[other_names] = sums.get(other_names, 0.0) + math.fsum(numbers_of_ranks)
    return sums.get((), 0.0)


def content(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements as bytes in host memory, flat uint8; copied unless contiguous there."""
    return local(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)


def send(weights: Iterable[tuple[torch.Tensor, Cut | None]], mesh: Any) -> list[torch.Tensor]:
    """Broadcast each dealt weight from its owner rank to all; return the weights that are not dealt, for `gather`.

    `weights` has all weights that ranks exchange, each with its cut. A collective.
    """
    others = []
    for weight, cut in weights:
        if cut is None or cut.owner_rank is None:
            others.append(weight)
        else:
            flat_bytes = weight.detach().view(-1).view(torch.uint8)
            broadcast(flat_bytes, cut.owner_rank, mesh)
    return others


def gather(weights: Iterable[torch.Tensor], mesh: Any) -> None:
    """Exchange rows of weights that are whole on every rank, and of which each rank has updated its rows. Collective.

    Weights are exchanged bucket by bucket. Each rank packs its own bytes of the bucket's parts into a buffer, all
    ranks gather all buffers, and each unpacks them into its weights.
    """
    ranks = mesh.size()
    rank = mesh.get_local_rank()
    for bucket in _buckets(weights, ranks):
        packed_bytes = sum(part.stop - part.start for part in bucket)
        packed = torch.empty(packed_bytes, dtype=torch.uint8, device=bucket[0].flat.device)
        offset = 0
        for part in bucket:
            begin = rank * part.rank_bytes
            own_bytes = part.flat[begin + part.start : begin + part.stop]  # shorter or empty on the last ranks
            packed[offset : offset + own_bytes.numel()].copy_(own_bytes)
            offset += part.stop - part.start
        everyone = all_gather(packed, mesh)
        offset = 0
        for part in bucket:
            part.unpack(everyone[:, offset : offset + part.stop - part.start])
            offset += part.stop - part.start


class _Part(NamedTuple):
    """A part of each rank's rows of one weight: the same range of bytes in the rows of every rank.

    Attributes:
        flat: The whole weight as bytes: the first rank's rows, then the second's, and so on.
        rank_bytes: Bytes of one rank's rows; the last ranks may have fewer.
        start, stop: The range, counted from the first byte of a rank's rows.
    """

    flat: torch.Tensor
    rank_bytes: int
    start: int
    stop: int

    def unpack(self, of_ranks: torch.Tensor) -> None:
        """Copy this part of all ranks' rows to its places in the weight.

        Args:
            of_ranks: The bytes received, of shape [ranks, stop - start].
        """
        # First the ranks that have the full number of rows: their bytes are a matrix with a row for each rank.
        full_ranks = self.flat.numel() // self.rank_bytes
        full_bytes = full_ranks * self.rank_bytes
        matrix = self.flat[:full_bytes].view(full_ranks, self.rank_bytes)
        matrix[:, self.start : self.stop].copy_(of_ranks[:full_ranks])
        # Then the one rank that may have fewer rows; ranks behind it have none.
        last_bytes = self.flat[full_bytes + self.start : full_bytes + self.stop]
        if last_bytes.numel():
            last_bytes.copy_(of_ranks[full_ranks, : last_bytes.numel()])


def _buckets(weights: Iterable[torch.Tensor], ranks: int) -> Iterator[list[_Part]]:
    """Yield buckets: lists of parts of weights to exchange in one collective, the same lists on every rank.

    A weight that is larger than the rest of a bucket is cut, and goes on in the next bucket.
    """
    # In `gather` a rank has `ranks` + 1 buffers of this size, `GATHER_BYTES` in all: its own, and those of all ranks.
    bucket_bytes = max(1, GATHER_BYTES // (ranks + 1))
    used_bytes = 0
    bucket: list[_Part] = []
    for weight in weights:
        flat = weight.detach().view(-1).view(torch.uint8)
        _, rows = _rows(weight.shape[0], ranks, 0)
        rank_bytes = rows * (flat.numel() // weight.shape[0]) if flat.numel() else 0
        start = 0
        while start < rank_bytes:
            stop = min(rank_bytes, start + bucket_bytes - used_bytes)
            bucket.append(_Part(flat, rank_bytes, start, stop))
            used_bytes += stop - start
            start = stop
            if used_bytes == bucket_bytes:
                yield bucket
                bucket, used_bytes = [], 0
    if bucket:
        yield bucket


def check_apart(names: Mapping[torch.Tensor, str]) -> None:
    """Refuse weights that share memory: each has a master of its own, and they are updated in any order.

    `names` has the name of each weight.
    """
    parameters = [local(parameter) for parameter in names]
    name_of = [*names.values()]
    ranges = sorted((each.data_ptr(), each.nbytes, number) for number, each in enumerate(parameters) if each.numel())
    for (address, nbytes, number), (next_address, _, next_number) in pairwise(ranges):
        if next_address < address + nbytes:
            pair = " and ".join(name_of[each] for each in sorted((number, next_number)))
            raise ConfigError("params", f"{pair}, which share memory", "give tied weights as one parameter")


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order of dimensions."""
    expected_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:  # else the stride is never used
            if stride != expected_stride:
                return False
            expected_stride *= size
    return True
