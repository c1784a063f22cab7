"""Dealt weights: sharded matrices, each updated whole by one rank, on a copy beside the shards of all ranks.

Muon updates whole matrices, which cannot be done shard by shard. So each matrix that is a `DTensor` is dealt to one
rank of its mesh, its owner, which keeps a whole copy of the weight. Before a step ranks send their shards of
gradients to the owners. After it the owners send shards of the new weights back. Each way there is one exchange for
each bucket of weights. Ranks that are not the owner have a copy without rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import torch

from offload.errors import ConfigError
from offload.kernels.reference import DTYPE_CODES
from offload.optim import shards
from offload.optim.shards import Stamp

BUCKET_BYTES = 64 << 20
"""Bytes of whole weights or gradients that are exchanged at once."""

NOTHING = 0
UNUSABLE = 255
"""Codes of a gradient that ranks exchange: there is none; it cannot be read. Any other code is 1 plus the dtype's."""

Box = tuple[tuple[int, int], ...]
"""First index and size of a rank's shard, in each dimension."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _outside_autograd(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a method to run outside inference mode and autograd: its tensors have version counters, no graph."""

    @functools.wraps(method)
    def outside_autograd(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return outside_autograd


class DealtWeight:
    """A weight, a `DTensor`, that was dealt to one rank. Each rank of the mesh has such a record.

    Attributes:
        owner_rank: Rank of the owner in the mesh.
        is_own: Whether this rank is the owner.
        copy: The whole weight on its owner, no rows elsewhere.
        gradient: The whole gradient on its owner, no rows elsewhere; None if there is none.
    """

    def __init__(self, parameter: torch.Tensor, name: str, owner: int, boxes: list[Box], rank: int) -> None:
        self.parameter = parameter
        self.name = name
        self.owner_rank = owner
        self.is_own = owner == rank
        self.copy = self.empty(parameter.dtype)
        self.gradient: torch.Tensor | None = None
        self._boxes = boxes  # of the shards of all ranks
        self._stamp: Stamp | None = None  # of this rank's shard when it was equal to `copy` last

    def _current_stamp(self) -> Stamp:
        """Return the stamp of this rank's shard as it is now."""
        return shards.stamp(self.parameter, shards.local(self.parameter), self._stamp)

    @property
    def is_stale(self) -> bool:
        """Whether this rank's shard has changed since `copy` was made, as far as torch counts changes."""
        return self._stamp != self._current_stamp()

    def note_fresh(self) -> None:
        """Note that this rank's shard and `copy` are equal."""
        self._stamp = self._current_stamp()

    def note_stale(self) -> None:
        """Note that this rank's shard has changed, whatever torch has counted."""
        self._stamp = None

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Return an empty tensor of the whole shape on the owner, without rows elsewhere."""
        rows, *columns = self.parameter.shape
        device = shards.local(self.parameter).device
        return torch.empty(rows if self.is_own else 0, *columns, dtype=dtype, device=device)

    def piece(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the view of a whole tensor that is a rank's shard."""
        return whole[tuple(slice(first, first + size) for first, size in self._boxes[rank])]

    def numel_of(self, rank: int, *, once: bool = False) -> int:
        """Return the number of elements of a rank's shard.

        With `once` it is 0 if an earlier rank has the same shard, as with replication: that rank sends it.
        """
        if once and self._boxes.index(self._boxes[rank]) < rank:
            return 0
        return math.prod(size for _, size in self._boxes[rank])

    def reduce_to_code(self) -> int:
        """Return the code of this rank's gradient: `NOTHING`, `UNUSABLE`, or 1 plus its dtype's.

        If the placements of `.grad` are not the weight's, it is first replaced by one reduced to these: a collective.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return NOTHING
        gradient = shards.reduced_gradient(gradient, self.parameter, self.name)
        if gradient is not self.parameter.grad:
            self.parameter.grad = gradient  # so that it is not reduced twice
        piece = shards.local(gradient)
        shard = shards.local(self.parameter)
        is_like_shard = (piece.shape, piece.device) == (shard.shape, shard.device)
        if piece.layout != torch.strided or not is_like_shard or piece.dtype not in DTYPE_CODES:
            return UNUSABLE
        return 1 + DTYPE_CODES[piece.dtype]

    def free(self) -> None:
        """Free copy and gradient, which nobody uses any more."""
        self.copy = self.copy.new_empty(0)
        self.gradient = None


class Dealt:
    """Deals weights to the ranks of one mesh. All these ranks call each method together.

    Attributes:
        ranks: How many ranks there are.
        weights: The `DTensor`s that were dealt; plain tensors need no copy, as they are whole on all ranks.
    """

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self._group = mesh.get_group()
        self.ranks = mesh.size()
        self._rank = mesh.get_local_rank()
        # By weight that was dealt: its owner's rank, and the work of its update.
        self._works: dict[torch.Tensor, tuple[int, float]] = {}
        self.weights: dict[torch.Tensor, DealtWeight] = {}

    def assign_owners(self, works: Mapping[torch.Tensor, float]) -> dict[torch.Tensor, int]:
        """Choose an owner for each weight of `works`, and note the owner's work; alike on all ranks.

        Weights are dealt in the order of falling work, each to the rank that has the least work by then. Work of
        earlier calls counts, too.
        """
        loads = [0.0] * self.ranks
        for rank, work in self._works.values():
            loads[rank] += work
        owners = {}
        for weight in sorted(works, key=works.__getitem__, reverse=True):  # stable: the same order on all ranks
            rank = min(range(self.ranks), key=loads.__getitem__)
            loads[rank] += works[weight]
            self._works[weight] = rank, works[weight]
            owners[weight] = rank
        return owners

    def forget(self, weight: torch.Tensor) -> None:
        """Forget a weight that was dealt, if it was: its work counts no more, and its copy is dropped."""
        self._works.pop(weight, None)
        self.weights.pop(weight, None)

    @_outside_autograd
    def add(self, names: Mapping[torch.Tensor, str], owners: Mapping[torch.Tensor, int]) -> None:
        """Make the owners' copies of `DTensor`s that were dealt; a collective if there are any.

        Args:
            names: The names of these weights.
            owners: Owner ranks, as `assign_owners` has returned them; also of other weights.
        """
        if not names:
            return
        boxes: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(boxes, [shards.box_of(weight) for weight in names], group=self._group)
        for number, (weight, name) in enumerate(names.items()):
            shard_boxes = [boxes_of_rank[number] for boxes_of_rank in boxes]
            self.weights[weight] = DealtWeight(weight, name, owners[weight], shard_boxes, self._rank)
        self._gather_copies([self.weights[weight] for weight in names])

    @_outside_autograd
    def refresh(self, gradients: bool) -> list[DealtWeight]:
        """Send shards of weights that have changed, and with `gradients` all gradients, to the owners.

        First all ranks exchange, for each weight, whether their shard has changed and which gradient they have.

        Returns:
            The weights that have changed on some rank.

        Raises:
            ConfigError: Ranks have gradients of which no whole one can be made; raised on all of them.
        """
        weights = [*self.weights.values()]
        if not weights:
            return []
        # Two bytes of each weight: whether this rank's shard is stale, and the code of its gradient.
        own_states = [[weight.is_stale, weight.reduce_to_code() if gradients else NOTHING] for weight in weights]
        states = torch.tensor(own_states, dtype=torch.uint8, device=self._mesh.device_type).view(-1)
        everyone = [torch.empty_like(states) for _ in range(self.ranks)]
        torch.distributed.all_gather(everyone, states, group=self._group)
        stale, all_codes = torch.stack(everyone).view(self.ranks, -1, 2).cpu().unbind(-1)  # each [rank, weight]
        codes_by_weight = dict(zip(weights, all_codes.T.tolist(), strict=True))
        _check_codes(codes_by_weight)
        changed = [weight for weight, is_stale in zip(weights, stale.any(0).tolist(), strict=True) if is_stale]

        # An fp32 weight is sent each time: it is its own master, so a write that version counters miss counts, too.
        self._gather_copies([w for w in weights if w in changed or w.copy.dtype is torch.float32])

        if gradients:
            for weight in weights:  # all of them, before new ones are made: those of the last step use as much memory
                weight.gradient = None
            # By the first rank's code: after the check all ranks' are the same.
            with_gradients = [weight for weight, codes in codes_by_weight.items() if codes[0] != NOTHING]
            # None of them is None, as their codes say; it is asked for the type checker.
            gradient_shards = {w: w.parameter.grad for w in with_gradients if w.parameter.grad is not None}
            for weight, whole in self._gather_to_owners(gradient_shards):
                weight.gradient = whole
        return changed

    @_outside_autograd
    def scatter_copies(self) -> None:
        """Send the owners' copies back to the shards of all ranks, after an update; these count as unchanged then."""
        for bucket in _buckets({weight: weight.parameter for weight in self.weights.values()}):
            # For each rank, its shards of the weights that this rank owns.
            pieces = [[w.piece(w.copy, rank) for w in bucket if w.is_own] for rank in range(self.ranks)]
            # A rank receives its shards owner by owner.
            by_owner = sorted(bucket, key=lambda weight: weight.owner_rank)
            numels = [[w.numel_of(self._rank) for w in bucket if w.owner_rank == rank] for rank in range(self.ranks)]
            for weight, flat in zip(by_owner, self._exchange(pieces, numels, like=bucket[0].copy), strict=True):
                shard = shards.local(weight.parameter.detach())
                shard.copy_(flat.view(shard.shape))
        for weight in self.weights.values():
            weight.note_fresh()

    def free_gradients(self) -> None:
        """Free all gradients of owners."""
        for weight in self.weights.values():
            weight.gradient = None

    def gather_failures(self, error: Exception | None) -> list[tuple[int, str]]:
        """Return which ranks have failed, each with its error as text; `error` is this rank's, or None."""
        texts: list[str | None] = [None] * self.ranks
        torch.distributed.all_gather_object(texts, None if error is None else str(error), group=self._group)
        return [(rank, text) for rank, text in enumerate(texts) if text is not None]

    def _gather_copies(self, weights: Iterable[DealtWeight]) -> None:
        """Make the owners' copies anew from the shards of all ranks; the shards count as unchanged from now on."""
        for weight, whole in self._gather_to_owners({weight: weight.parameter for weight in weights}):
            weight.copy.copy_(whole)
            weight.note_fresh()

    def _gather_to_owners(
        self, tensors: Mapping[DealtWeight, torch.Tensor]
    ) -> Iterator[tuple[DealtWeight, torch.Tensor]]:
        """Send shards of `DTensor`s to the owners; yield each weight with the whole tensor there, else without rows.

        Of ranks that have the same shard, as with replication, the first one sends it.
        """
        for bucket in _buckets(tensors):
            local = {weight: shards.local(tensors[weight].detach()) for weight in bucket}
            sent = [weight for weight in bucket if weight.numel_of(self._rank, once=True)]
            # For each rank as the receiver, this rank's shards of the weights that the receiver owns.
            pieces = [[local[weight] for weight in sent if weight.owner_rank == rank] for rank in range(self.ranks)]
            owned = [weight for weight in bucket if weight.is_own]
            # This rank receives from each rank its shards of all weights in `owned`, in that order.
            numels = [[weight.numel_of(rank, once=True) for weight in owned] for rank in range(self.ranks)]
            received = iter(self._exchange(pieces, numels, like=local[bucket[0]]))
            whole = {weight: weight.empty(local[weight].dtype) for weight in bucket}
            for rank in range(self.ranks):
                for weight in owned:
                    flat = next(received)
                    if flat.numel():  # else an earlier rank has sent the same shard
                        piece = weight.piece(whole[weight], rank)
                        piece.copy_(flat.view(piece.shape))
            yield from whole.items()

    def _exchange(
        self, pieces: list[list[torch.Tensor]], numels: list[list[int]], like: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Send pieces to all ranks, and receive theirs, by one all-to-all. Collective.

        Args:
            pieces: For each rank, the pieces to send to it.
            numels: For each rank, the number of elements of each piece that it sends to this one.
            like: A tensor with the dtype and device of all pieces.

        Returns:
            The pieces received, flat, rank after rank; on the mesh's type of device.
        """
        device = self._mesh.device_type
        item_bytes = like.element_size()
        parts = [piece.reshape(-1) for piece in chain.from_iterable(pieces)]
        no_elements = torch.empty(0, dtype=like.dtype, device=like.device)  # as `cat` refuses an empty list
        sent = torch.cat([no_elements, *parts]).to(device)
        received = torch.empty(sum(map(sum, numels)), dtype=like.dtype, device=device)
        torch.distributed.all_to_all_single(  # of bytes, so that no backend has to know the dtype
            received.view(torch.uint8),
            sent.view(torch.uint8),
            output_split_sizes=[item_bytes * sum(from_rank) for from_rank in numels],
            input_split_sizes=[item_bytes * sum(piece.numel() for piece in to_rank) for to_rank in pieces],
            group=self._group,
        )
        return torch.split(received, [*chain.from_iterable(numels)])


def _check_codes(codes_by_weight: Mapping[DealtWeight, Sequence[int]]) -> None:
    """Raise `ConfigError` if a weight's codes of gradients, one for each rank, are unusable or unlike each other."""
    for weight, codes in codes_by_weight.items():
        if UNUSABLE in codes:
            advice = "have a dense gradient like the weight, in bfloat16, float16 or float32"
            raise ConfigError(f"gradient of {weight.name}", f"on rank {codes.index(UNUSABLE)}", advice)
        if len({*codes}) > 1:
            advice = "have one of the same dtype on each, or none on any"
            raise ConfigError(f"gradient of {weight.name}", "not alike on all ranks", advice)


def fail_together(dealt: Iterable[Dealt], error: Exception | None, close: Callable[[], object]) -> Exception | None:
    """Let all ranks of a mesh fail if one of them has; a collective over each mesh, in turn.

    Args:
        dealt: The weights that are dealt over each mesh.
        error: This rank's failure, or None.
        close: Called where some ranks of a mesh have failed, and others have not; where all have, nothing is closed.

    Returns:
        The error for this rank to raise: its own, else one that names the first rank that failed; None if no rank of
        its meshes has failed. It is returned, not raised, so that this rank takes part in the collectives over all
        meshes: other ranks wait for it there, and hear of the error.
    """
    for dealt_over_mesh in dealt:
        failures = dealt_over_mesh.gather_failures(error)
        if 0 < len(failures) < dealt_over_mesh.ranks:
            rank, text = failures[0]
            close()
            if error is None:  # it is set, too, for the next mesh's exchange
                advice = f"make a new optimizer on all ranks; this one is closed: rank {rank} failed: {text}"
                error = ConfigError("params", "dealt to ranks", advice)
    return error


def _buckets(tensors: Mapping[DealtWeight, torch.Tensor]) -> Iterator[list[DealtWeight]]:
    """Yield lists of weights whose tensors are exchanged at once: of one dtype, and of at least `BUCKET_BYTES`.

    The last list of a dtype may be smaller. The lists are alike on all ranks, as the bytes of a `DTensor` are those
    of the whole.
    """
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
