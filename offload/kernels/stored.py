"""Converts state between its stored formats and fp32 tensors, for reads and writes between updates.

Native, on the calling thread, with the GIL released; bit for bit what `offload.kernels.reference` defines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from offload._native import decode, encode
from offload.errors import invariant
from offload.formats import FP32, Format, StateSpec, blocks_numel
from offload.kernels.reference import DTYPE_CODES
from offload.rules import PACKED


def stored_dtype(stored: Format) -> torch.dtype:
    """Return the torch dtype of a tensor in a format."""
    dtype: torch.dtype = getattr(torch, stored.dtype)
    return dtype


class Stored(NamedTuple):
    """The tensors in host memory in which a run of elements of a state tensor is stored.

    Attributes:
        format: The run's format.
        first: Flat, of its `stored_dtype`: elements, codes, or the upper plane of a master.
        beside: The lower plane of a master; for codes the scales of their blocks, which may be a column of a matrix.
        first_index: Index of the first element in the unsharded parameter; ignored by formats without blocks.
    """

    format: Format
    first: torch.Tensor
    beside: torch.Tensor | None = None
    first_index: int = 0

    def place(self) -> tuple[int, int, int, int, int, int]:
        """Return the first six arguments of the native `decode` and `encode`, after checking the tensors.

        Returns:
            The format's code, the addresses of `first` and `beside`, the stride of `beside` in bytes, the first
            index, and the number of elements. Without `beside` its address, its stride and the index are 0.
        """
        numel, beside = self.first.numel(), self.beside
        _check("first", self.first, stored_dtype(self.format), numel)
        if beside is None:
            has_elements = self.first.dtype in DTYPE_CODES  # neither codes nor an upper plane
            invariant(has_elements, f"state in {self.format.name} without what lies beside it")
            return self.format.code, self.first.data_ptr(), 0, 0, 0, numel  # no address, stride or index is used
        # Beside codes is a scale for each block; beside a master, whose blocks are single elements, a byte for each.
        block_numel = self.format.block_numel
        items = blocks_numel(self.first_index, numel, block_numel)
        _check("beside", beside, torch.uint8, items, column=block_numel > 1)
        addresses = self.first.data_ptr(), beside.data_ptr()
        return self.format.code, *addresses, beside.stride(0), self.first_index, numel

    def read(self, out: torch.Tensor, instruction_set: str = "") -> None:
        """Decode what is stored into a flat tensor of as many elements, rounded to that tensor's dtype."""
        _check("out", out, out.dtype, self.first.numel())
        decode(*self.place(), out.data_ptr(), DTYPE_CODES[out.dtype], instruction_set)

    def write(self, values: torch.Tensor, roots: torch.Tensor | None = None, instruction_set: str = "") -> None:
        """Encode and store flat fp32 values, rounded to nearest, or to odd in the planes of a master.

        Args:
            values: A value for each element.
            roots: Codes of the roots by which an update divides these values, one for each element. Where a root's
                code is 0, 0 is stored: the next update would divide the value by almost nothing.
            instruction_set: One of `instruction_sets()`; "" for the fastest.
        """
        _check("values", values, torch.float32, self.first.numel())
        if roots is not None:
            _check("roots", roots, torch.uint8, self.first.numel())
        address = 0 if roots is None else roots.data_ptr()
        encode(*self.place(), values.data_ptr(), address, instruction_set)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, *, column: bool = False) -> None:
    """Raise InternalError unless a tensor is flat, in host memory, of this dtype and size, as native code assumes.

    With `column` it may be a column of a matrix, whose elements lie apart.
    """
    is_flat = tensor.dim() == 1 and (column or tensor.is_contiguous()) and tensor.device.type == "cpu"
    fits = is_flat and tensor.dtype == dtype and tensor.numel() == numel
    invariant(
        fits, f"{name}: {tensor.dtype} of shape {list(tensor.shape)}, not {numel} elements of {dtype} in host memory"
    )


def stored_in(state: StateSpec, name: str, tensors: Mapping[str, torch.Tensor], first_index: int) -> Stored:
    """Return the tensors in which one state tensor of a segment is stored.

    Args:
        state: The segment's rule, and how its state is stored.
        name: One of its rule's `names`.
        tensors: The stored tensors by name, flat. A master without a lower plane is fp32.
        first_index: Index of the segment's first element in the unsharded parameter.
    """
    formats = dict(state.stored)
    _, *others = state.format.stored_as(name)  # the name of the tensor beside it, if there is one
    if not others:
        return Stored(formats[name], tensors[name])
    (other,) = others
    if other not in tensors:  # an fp32 weight, which is its master
        return Stored(FP32, tensors[name])
    beside = tensors[other]
    if formats[name].block_numel > 1:  # scales: a row for each block, a column for each of the rule's tensors
        beside = beside.view(-1, len(state.rule.state))[:, state.rule.state.index(name)]
    return Stored(formats[name], tensors[name], beside, first_index)


@contextlib.contextmanager
def as_fp32(
    state: StateSpec, tensors: Mapping[str, torch.Tensor], first_index: int, *, read: bool, keep: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """Lend a segment's state in fp32 while this context lasts.

    What is stored in fp32 is lent itself, and so is packed state, as words. All else is lent as a decoded copy, which
    may be encoded and stored again at the end.

    Args:
        state: The rule, and the format of its state.
        tensors: The stored tensors by name, flat.
        first_index: Index of the segment's first element in the unsharded parameter.
        read: Whether copies begin with the stored values; else their content is undefined.
        keep: Whether copies are encoded and stored afterwards; see `Stored.write`. Not if the context raises.

    Yields:
        The tensors by the rule's names, flat.
    """
    rule = state.rule
    all_stored = {name: stored_in(state, name, tensors, first_index) for name in rule.names}
    encoded = {name: stored for name, stored in all_stored.items() if stored.format is not FP32 and name != PACKED}
    views = {
        name: torch.empty(stored.first.numel(), dtype=torch.float32, device="cpu")
        if name in encoded
        else stored.first
        for name, stored in all_stored.items()
    }
    for name, stored in encoded.items() if read else ():
        stored.read(views[name])
    yield views
    if not keep:
        return
    # State that updates divide by a root is stored as 0 where the root is: it would be divided by almost nothing.
    roots = rule.roots if state.format.stores_roots else ()
    invariant(len(roots) <= 1, "a rule with several roots")  # a zero in one would have to zero the others
    # Roots come first (False sorts before True): the others look at their codes.
    for name, stored in sorted(encoded.items(), key=lambda item: item[0] not in roots):
        is_divided_by_root = bool(roots) and name in rule.state and name not in roots
        if is_divided_by_root:
            stored.write(views[name], encoded[roots[0]].first)
            # An infinite root is stored as the greatest code, a finite number. value / inf was 0, and stays 0.
            stored.first.masked_fill_(torch.isposinf(views[roots[0]]), 0)
        else:
            stored.write(views[name])


def store_rounded(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write flat fp32 values to a flat tensor of as many elements, rounded to its type, to nearest even."""
    _check("values", values, torch.float32, out.numel())
    _check("out", out, out.dtype, out.numel())
    # An element type is a format with nothing beside it: no second address, stride or first index. And no roots.
    encode(DTYPE_CODES[out.dtype], out.data_ptr(), 0, 0, 0, out.numel(), values.data_ptr(), 0)
