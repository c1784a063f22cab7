"""State as it is stored, and as fp32 tensors: for everybody who looks at it, between updates.

Native, on the calling thread, with the GIL released; bit for bit what `offload.kernels.reference` defines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from offload._native import decode, encode
from offload.dtypes import DtypeCode
from offload.errors import invariant
from offload.kernels.reference import DTYPE_CODES
from offload.kernels.reference.minifloat import blocks_numel
from offload.protocols import StateFormat
from offload.rules import BF16, FP32, MASTER, MASTER_LOW, SCALES, Format, UpdateRule
from offload.rules.formats import FP24_UPPER, ROOT, SIGNED

_DTYPES = {FP32: torch.float32, BF16: torch.bfloat16, FP24_UPPER: torch.int16}

# As csrc/kernels/kernels.h counts them.
_FORMS = {FP32: DtypeCode.FLOAT32, BF16: DtypeCode.BFLOAT16, FP24_UPPER: 4, SIGNED: 5, ROOT: 6}


def stored_dtype(stored: Format) -> torch.dtype:
    """Return the element type of a tensor with what is stored in a format: uint8 for codes and scales."""
    return _DTYPES.get(stored, torch.uint8)


class Stored(NamedTuple):
    """What a run of a state tensor is stored in, in host memory.

    Attributes:
        format: How.
        first: Flat, of its `stored_dtype`: elements, codes, or the upper plane of a master.
        beside: The lower plane of a master; of codes the scales of their blocks, which may be a column of a matrix.
        first_index: Index of the first element in the unsharded parameter; where there are no blocks, anything.
    """

    format: Format
    first: torch.Tensor
    beside: torch.Tensor | None = None
    first_index: int = 0

    def place(self) -> tuple[int, int, int, int, int, int]:
        """Return what native functions are told."""
        numel, beside = self.first.numel(), self.beside
        _check("first", self.first, stored_dtype(self.format), numel)
        if beside is None:
            invariant(self.format in (FP32, BF16), f"state in {self.format.name} without what lies beside it")
            return _FORMS[self.format], self.first.data_ptr(), 0, 0, 0, numel
        has_blocks = self.format is not FP24_UPPER
        items = blocks_numel(self.first_index, numel) if has_blocks else numel
        _check("beside", beside, torch.uint8, items, column=has_blocks)
        stride = beside.stride(0)
        return _FORMS[self.format], self.first.data_ptr(), beside.data_ptr(), stride, self.first_index, numel

    def read(self, out: torch.Tensor, instruction_set: str = "") -> None:
        """Write what is stored to a flat tensor of as many elements, rounded to its type."""
        _check("out", out, out.dtype, self.first.numel())
        decode(*self.place(), out.data_ptr(), DTYPE_CODES[out.dtype], instruction_set)

    def write(self, values: torch.Tensor, roots: torch.Tensor | None = None, instruction_set: str = "") -> None:
        """Store flat fp32 values, rounded to nearest; in planes to odd.

        Args:
            values: As many as there are.
            roots: Codes of the roots that these values are divided by: where those are 0, 0 is stored.
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


def stored_in(rule: UpdateRule, name: str, tensors: Mapping[str, torch.Tensor], first_index: int) -> Stored:
    """Return what one state tensor of a segment is stored in.

    Args:
        rule: The update rule, in the format of the state.
        name: One of its `names`.
        tensors: What state is stored in, by name; flat. A master without a lower plane is fp32.
        first_index: Index of the segment's first element in the unsharded parameter.
    """
    form = {tensor.name: tensor.format for tensor in rule.stored}[name]
    if name == MASTER.name:
        beside = tensors.get(MASTER_LOW)
        return Stored(FP32 if beside is None else form, tensors[name], beside)
    if rule.state_format is not StateFormat.COMPACT8:
        return Stored(form, tensors[name])
    scales = tensors[SCALES].view(-1, len(rule.state))
    return Stored(form, tensors[name], scales[:, rule.names.index(name) - 1], first_index)


@contextlib.contextmanager
def as_fp32(
    rule: UpdateRule, tensors: Mapping[str, torch.Tensor], first_index: int, *, read: bool, keep: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """Lend a segment's state in fp32 by the rule's names: the tensors that are fp32, and copies of others.

    Args:
        rule: The update rule, in the format of the state.
        tensors: What state is stored in, by name; flat.
        first_index: Index of its first element in the unsharded parameter.
        read: Whether copies hold what is stored; else anything.
        keep: Whether copies are stored afterwards; see `Stored.write`.
    """
    stored = {name: stored_in(rule, name, tensors, first_index) for name in rule.names}
    views = {
        name: place.first
        if place.format is FP32
        else torch.empty(place.first.numel(), dtype=torch.float32, device="cpu")
        for name, place in stored.items()
    }
    copies = {name: place for name, place in stored.items() if place.format is not FP32}
    for name, place in copies.items() if read else ():
        place.read(views[name])
    yield views
    if not keep:
        return
    roots = [name for name, place in copies.items() if place.format is ROOT]
    invariant(len(roots) <= 1, "a rule with several roots")  # each would have to be zeroed where another is
    for name, place in sorted(copies.items(), key=lambda item: item[1].format is not ROOT):  # roots first
        if place.format is SIGNED and roots:
            place.write(views[name], copies[roots[0]].first)
            place.first.masked_fill_(torch.isposinf(views[roots[0]]), 0)  # divided by it, it was 0
        else:
            place.write(views[name])


def store_rounded(values: torch.Tensor, out: torch.Tensor) -> None:
    """Put flat fp32 values into a flat tensor of as many elements, rounded to its type, to nearest even."""
    _check("values", values, torch.float32, out.numel())
    _check("out", out, out.dtype, out.numel())
    encode(DTYPE_CODES[out.dtype], out.data_ptr(), 0, 0, 0, out.numel(), values.data_ptr(), 0)
