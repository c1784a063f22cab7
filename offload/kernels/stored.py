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
    """The tensors in host memory in which a run of a state tensor is stored.

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
        """Return the arguments by which native functions find the run: format, addresses, index and size."""
        numel, beside = self.first.numel(), self.beside
        _check("first", self.first, stored_dtype(self.format), numel)
        if beside is None:
            whole = self.first.dtype in DTYPE_CODES
            invariant(whole, f"state in {self.format.name} without what lies beside it")
            return self.format.code, self.first.data_ptr(), 0, 0, 0, numel
        block = self.format.block_numel
        items = blocks_numel(self.first_index, numel, block)
        _check("beside", beside, torch.uint8, items, column=block > 1)
        place = beside.data_ptr(), beside.stride(0)
        return self.format.code, self.first.data_ptr(), *place, self.first_index, numel

    def read(self, out: torch.Tensor, instruction_set: str = "") -> None:
        """Write what is stored to a flat tensor of as many elements, rounded to its type."""
        _check("out", out, out.dtype, self.first.numel())
        decode(*self.place(), out.data_ptr(), DTYPE_CODES[out.dtype], instruction_set)

    def write(self, values: torch.Tensor, roots: torch.Tensor | None = None, instruction_set: str = "") -> None:
        """Store flat fp32 values, rounded to nearest; in planes to odd.

        Args:
            values: A value for each element.
            roots: Codes of the roots by which an update divides these values: where a code is 0, 0 is stored.
            instruction_set: One of `instruction_sets()`; "" for the fastest.
        """
        _check("values", values, torch.float32, self.first.numel())
        if roots is not None:
            _check("roots", roots, torch.uint8, self.first.numel())
        address = 0 if roots is None else roots.data_ptr()
        encode(*self.place(), values.data_ptr(), address, instruction_set)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, numel: int, *, column: bool = False) -> None:
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
    others = state.format.stored_as(name)[1:]
    if not others:
        return Stored(formats[name], tensors[name])
    (other,) = others
    if other not in tensors:
        return Stored(FP32, tensors[name])
    beside = tensors[other]
    if formats[name].block_numel > 1:
        beside = beside.view(-1, len(state.rule.state))[:, state.rule.state.index(name)]
    return Stored(formats[name], tensors[name], beside, first_index)


@contextlib.contextmanager
def as_fp32(
    state: StateSpec, tensors: Mapping[str, torch.Tensor], first_index: int, *, read: bool, keep: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """Lend a segment's state in fp32 by the rule's names: fp32 tensors in place, others as copies.

    What is packed is lent in place, as words.

    Args:
        state: The rule, and the format of its state.
        tensors: The stored tensors by name, flat.
        first_index: Index of the segment's first element in the unsharded parameter.
        read: Whether copies begin with the stored values; else they are undefined.
        keep: Whether copies are stored afterwards; see `Stored.write`.
    """
    rule = state.rule
    stored = {name: stored_in(state, name, tensors, first_index) for name in rule.names}
    copies = {name: place for name, place in stored.items() if place.format is not FP32 and name != PACKED}
    views = {
        name: torch.empty(place.first.numel(), dtype=torch.float32, device="cpu") if name in copies else place.first
        for name, place in stored.items()
    }
    for name, place in copies.items() if read else ():
        place.read(views[name])
    yield views
    if not keep:
        return
    roots = rule.roots if state.format.stores_roots else ()
    invariant(len(roots) <= 1, "a rule with several roots")  # a zero in one would have to zero the others
    for name, place in sorted(copies.items(), key=lambda item: item[0] not in roots):  # roots first
        if roots and name in rule.state and name not in roots:
            place.write(views[name], copies[roots[0]].first)
            place.first.masked_fill_(torch.isposinf(views[roots[0]]), 0)  # where the root is inf, the quotient was 0
        else:
            place.write(views[name])


def store_rounded(values: torch.Tensor, out: torch.Tensor) -> None:
    """Write flat fp32 values to a flat tensor of as many elements, rounded to its type, to nearest even."""
    _check("values", values, torch.float32, out.numel())
    _check("out", out, out.dtype, out.numel())
    encode(DTYPE_CODES[out.dtype], out.data_ptr(), 0, 0, 0, out.numel(), values.data_ptr(), 0)
