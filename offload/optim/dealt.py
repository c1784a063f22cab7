"""Whole matrices of sharded weights: each lies on the one rank that updates it, beside the shards of all.

What is updated whole cannot be updated shard by shard. A `DTensor` of that kind is dealt to one rank of its mesh, its
owner, which keeps a whole copy of the weight. Before a step the shards of gradients go to owners, and behind it
weights come back from there, by one exchange each for buckets of weights. Other ranks have a copy without rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch

from offload.errors import ConfigError
from offload.kernels.reference import DTYPE_CODES
from offload.optim import shards

BUCKET_BYTES = 64 << 20
"""Of the whole weights or gradients that are exchanged at once."""

NOTHING, UNUSABLE = 0, 255
"""Codes of gradients that are not there, and that cannot be read; others are 1 more than those of their dtypes."""

Box = tuple[tuple[int, int], ...]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _plainly(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a method make tensors with version counters and without graphs, whatever its caller's mode."""

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapped


class DealtWeight:
    """A weight that was dealt to one rank.

    Attributes:
        parameter: The `DTensor`.
        name: Its name.
        owner: Rank of the owner in the mesh.
        copy: The whole weight on its owner, no rows elsewhere.
        gradient: The whole gradient there, likewise; None if there is none.
    """

    def __init__(self, parameter: torch.Tensor, name: str, owner: int, boxes: list[Box], rank: int) -> None:
        self.parameter, self.name, self.owner = parameter, name, owner
        self.is_own = owner == rank
        self.copy = self.empty(parameter.dtype)
        self.gradient: torch.Tensor | None = None
        self._boxes = boxes
        self._stamp: tuple[int, int] | None = None

    def current_stamp(self) -> tuple[int, int]:
        """Return address and version of the shard here as it is now."""
        return shards.local(self.parameter).data_ptr(), shards.version(self.parameter)

    @property
    def is_stale(self) -> bool:
        """Whether somebody has changed the shard here since `copy` was made, as far as torch counts that."""
        return self._stamp != self.current_stamp()

    def is_alike(self) -> None:
        """Note that the shard here is that of `copy`."""
        self._stamp = self.current_stamp()

    def is_changed(self) -> None:
        """Note that it is not, whatever torch has counted."""
        self._stamp = None

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a whole tensor on the owner, for none elsewhere."""
        rows, *columns = self.parameter.shape
        device = shards.local(self.parameter).device
        return torch.empty(rows if self.is_own else 0, *columns, dtype=dtype, device=device)

    def piece(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the view of a whole tensor that a rank has a shard of."""
        return whole[tuple(slice(first, first + size) for first, size in self._boxes[rank])]

    def numel_of(self, rank: int, *, once: bool = False) -> int:
        """Return the elements of a rank's shard; with `once`, 0 if an earlier rank has the same shard."""
        if once and self._boxes.index(self._boxes[rank]) < rank:
            return 0
        return math.prod(size for _, size in self._boxes[rank])

    def code(self) -> int:
        """Return what this rank has of a gradient, which it brings into the parameter's form, as a code."""
        gradient = self.parameter.grad
        if gradient is None:
            return NOTHING
        gradient = shards.reduced_gradient(gradient, self.parameter, self.name)
        if gradient is not self.parameter.grad:
            self.parameter.grad = gradient  # so that nobody reduces it again
        piece, shard = shards.local(gradient), shards.local(self.parameter)
        alike = piece.layout == torch.strided and (piece.shape, piece.device) == (shard.shape, shard.device)
        return 1 + DTYPE_CODES[piece.dtype] if alike and piece.dtype in DTYPE_CODES else UNUSABLE

    def free(self) -> None:
        """Give the memory up; nobody uses the copy any more."""
        self.copy, self.gradient = self.copy.new_empty(0), None


class Dealt:
    """Deals weights to the ranks of one mesh. All its ranks call everything here together.

    Attributes:
        ranks: How many there are.
        weights: `DTensor`s that were dealt. Plain tensors are whole on all ranks.
    """

    def __init__(self, mesh: Any) -> None:
        self._mesh, self._group = mesh, mesh.get_group()
        self.ranks = mesh.size()
        self._rank = mesh.get_local_rank()
        self._loads = [0.0] * self.ranks
        self.weights: dict[torch.Tensor, DealtWeight] = {}

    def deal(self, works: Mapping[torch.Tensor, float]) -> dict[torch.Tensor, int]:
        """Return a rank for each weight: the largest first, to whom has least to do; the same on all ranks.

        Args:
            works: What the update of each takes.
        """
        owners = {}
        for weight in sorted(works, key=works.__getitem__, reverse=True):  # which keeps the order of equal ones
            rank = min(range(self.ranks), key=self._loads.__getitem__)
            self._loads[rank] += works[weight]
            owners[weight] = rank
        return owners

    @_plainly
    def add(self, names: Mapping[torch.Tensor, str], owners: Mapping[torch.Tensor, int]) -> None:
        """Make the copies of `DTensor`s that were dealt; a collective if there are any."""
        if not names:
            return
        boxes: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(boxes, [shards.box_of(weight) for weight in names], group=self._group)
        for number, (weight, name) in enumerate(names.items()):
            own_boxes = [each[number] for each in boxes]
            self.weights[weight] = DealtWeight(weight, name, owners[weight], own_boxes, self._rank)
        self._fetch_copies([self.weights[weight] for weight in names])

    @_plainly
    def refresh(self, gradients: bool) -> list[DealtWeight]:
        """Bring what has changed to the owners.

        Args:
            gradients: Bring gradients, too.

        Returns:
            The weights whose copies were made anew.

        Raises:
            ConfigError: Ranks have gradients of which no whole one can be made; raised on all of them.
        """
        weights = [*self.weights.values()]
        if not weights:
            return []
        mine = [[weight.is_stale, weight.code() if gradients else NOTHING] for weight in weights]
        states = torch.tensor(mine, dtype=torch.uint8, device=self._mesh.device_type).view(-1)
        everyone = [torch.empty_like(states) for _ in range(self.ranks)]
        torch.distributed.all_gather(everyone, states, group=self._group)
        rows = torch.stack(everyone).view(self.ranks, -1, 2).cpu()
        stale, codes = rows[..., 0].any(0).tolist(), rows[..., 1].T.tolist()
        for weight, found in zip(weights, codes, strict=True):
            if UNUSABLE in found:
                allowed = "have a dense gradient like the weight, in bfloat16, float16 or float32"
                raise ConfigError(f"gradient of {weight.name}", f"on rank {found.index(UNUSABLE)}", allowed)
            if len({*found}) > 1:
                allowed = "have one of the same dtype on each, or none on any"
                raise ConfigError(f"gradient of {weight.name}", "not alike on all ranks", allowed)
        changed = [weight for weight, is_stale in zip(weights, stale, strict=True) if is_stale]
        # An fp32 weight is its own master, and writes past version counters count.
        self._fetch_copies([w for w in weights if w in changed or w.copy.dtype is torch.float32])
        if gradients:
            for weight in weights:
                weight.gradient = None
            there = (weight for weight, found in zip(weights, codes, strict=True) if found[0] != NOTHING)
            wanted = {weight: weight.parameter.grad for weight in there}
            for weight, whole in self._fetch({w: gradient for w, gradient in wanted.items() if gradient is not None}):
                weight.gradient = whole
        return changed

    @_plainly
    def give_back(self) -> None:
        """Bring the owners' copies to the shards of all ranks."""
        for bucket in _buckets({weight: weight.parameter for weight in self.weights.values()}):
            pieces = [[w.piece(w.copy, rank) for w in bucket if w.is_own] for rank in range(self.ranks)]
            by_owner = sorted(bucket, key=lambda weight: weight.owner)
            numels = [[w.numel_of(self._rank) for w in bucket if w.owner == rank] for rank in range(self.ranks)]
            for weight, flat in zip(by_owner, self._exchange(pieces, numels, bucket[0].copy), strict=True):
                shard = shards.local(weight.parameter.detach())
                shard.copy_(flat.view(shard.shape))
        for weight in self.weights.values():
            weight.is_alike()

    def forget(self) -> None:
        """Let go of all gradients."""
        for weight in self.weights.values():
            weight.gradient = None

    def failures(self, error: Exception | None) -> list[tuple[int, str]]:
        """Return which ranks have failed, and with what.

        Args:
            error: What this one has failed with.
        """
        told: list[str | None] = [None] * self.ranks
        torch.distributed.all_gather_object(told, None if error is None else str(error), group=self._group)
        return [(rank, text) for rank, text in enumerate(told) if text is not None]

    def _fetch_copies(self, weights: Iterable[DealtWeight]) -> None:
        for weight, whole in self._fetch({weight: weight.parameter for weight in weights}):
            weight.copy.copy_(whole)
            weight.is_alike()

    def _fetch(self, tensors: Mapping[DealtWeight, torch.Tensor]) -> Iterator[tuple[DealtWeight, torch.Tensor]]:
        """Yield what owners get of `DTensor`s that all ranks have shards of."""
        for bucket in _buckets(tensors):
            local = {weight: shards.local(tensors[weight].detach()) for weight in bucket}
            sent = [weight for weight in bucket if weight.numel_of(self._rank, once=True)]
            pieces = [[local[weight] for weight in sent if weight.owner == rank] for rank in range(self.ranks)]
            own = [weight for weight in bucket if weight.is_own]
            numels = [[weight.numel_of(rank, once=True) for weight in own] for rank in range(self.ranks)]
            received = iter(self._exchange(pieces, numels, local[bucket[0]]))
            whole = {weight: weight.empty(local[weight].dtype) for weight in bucket}
            for rank in range(self.ranks):
                for weight in own:
                    flat = next(received)
                    if flat.numel():
                        piece = weight.piece(whole[weight], rank)
                        piece.copy_(flat.view(piece.shape))
            yield from whole.items()

    def _exchange(
        self, pieces: list[list[torch.Tensor]], numels: list[list[int]], like: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Send pieces to each rank, and return those of so many elements that come from each; a collective."""
        device, nbytes = self._mesh.device_type, like.element_size()
        parts = [piece.reshape(-1) for piece in chain.from_iterable(pieces)]
        sent = torch.cat([torch.empty(0, dtype=like.dtype, device=like.device), *parts]).to(device)
        received = torch.empty(sum(map(sum, numels)), dtype=like.dtype, device=device)
        torch.distributed.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [nbytes * sum(each) for each in numels],
            [nbytes * sum(piece.numel() for piece in each) for each in pieces],
            group=self._group,
        )
        return torch.split(received, [*chain.from_iterable(numels)])


def _buckets(tensors: Mapping[DealtWeight, torch.Tensor]) -> Iterator[list[DealtWeight]]:
    """Yield lists of weights whose tensors are exchanged at once: of one dtype, and the same on all ranks."""
    by_dtype: dict[torch.dtype, list[DealtWeight]] = {}
    for weight, tensor in tensors.items():
        by_dtype.setdefault(tensor.dtype, []).append(weight)
    for weights in by_dtype.values():
        bucket: list[DealtWeight] = []
        nbytes = 0
        for weight in weights:
            bucket.append(weight)
            nbytes += tensors[weight].nbytes
            if nbytes >= BUCKET_BYTES:
                yield bucket
                bucket, nbytes = [], 0
        if bucket:
            yield bucket
