"""Builds segment tables, which tell a kernel what to update: rows of `SEGMENT_DTYPE`, one for each segment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.errors import invariant
from offload.formats import BF16, Format, StateSpec
from offload.protocols import SEGMENT_DTYPE, SegmentFlag
from offload.rules import MASTER, segment_dtype

if TYPE_CHECKING:
    import numpy.typing as npt


def segment_table(
    state: StateSpec,
    numel: Any,
    addresses: Mapping[str, Any],
    *,
    weight_dtype: DtypeCode,
    gradient_dtype: Any = DtypeCode.NONE,
    flags: Any = 0,
    scalars: Any = None,
    rounding_key: Any = 0,
    first_index: Any = 0,
) -> npt.NDArray[Any]:
    """Return a segment table, of as many rows as `numel` has numbers.

    Arguments of type `Any`, and the values of `addresses`, are one number for all rows, or an array with a number for
    each row.

    Args:
        state: The rule, and how its state is stored.
        numel: Elements of each segment.
        addresses: By name: the stored state tensors, "weight" and "gradient"; an fp32 weight is the master. For a
            speculative update also "new_weight" (for an fp32 weight "new_master"), where new weights are written, and
            "read", two 64-bit sums to which the fingerprints of what the update reads are added.
        weight_dtype: Element type of the weights.
        gradient_dtype: `DtypeCode` of the gradients.
        flags: `SegmentFlag`s.
        scalars: What `rule.row` returns, or columns of it; None for zeros.
        rounding_key: The update's, from `offload.kernels.rounding_keys`. Only formats that round use it, and
            `first_index`.
        first_index: Index of a segment's first element in the unsharded parameter.
    """
    table = np.zeros(np.size(numel), segment_dtype(state.rule))
    table["rule"], table["state_format"] = state.rule.code, state.format.code
    table["numel"], table["flags"] = numel, flags
    table["rounding_key"], table["first_index"] = rounding_key, first_index
    is_master = weight_dtype is DtypeCode.FLOAT32
    for name, address in addresses.items():
        field = MASTER if is_master and name == "weight" else name
        table[field] = address
    table["weight_dtype"], table["gradient_dtype"] = int(weight_dtype), gradient_dtype
    if scalars is not None:
        for name, value in zip(state.rule.scalars._fields, scalars, strict=True):
            table[name] = value
    return table


def active_rows(table: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each segment of a table whether it is updated."""
    active: npt.NDArray[np.bool_] = (table["flags"] & np.uint32(SegmentFlag.ACTIVE)) != 0
    return active


def weights_at(table: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return two arrays, of each segment's weight: its address and its bytes; an fp32 weight is the master."""
    code = table["weight_dtype"]
    # Either code says that the weight is fp32, whose address is in the field of the master.
    is_master = (code == DtypeCode.NONE) | (code == DtypeCode.FLOAT32)
    item_bytes = np.where(is_master, ITEM_BYTES[DtypeCode.FLOAT32], ITEM_BYTES[code])
    return np.where(is_master, table[MASTER], table["weight"]), table["numel"] * item_bytes


def trial_table(state: StateSpec, addresses: Mapping[str, int] | int, numel: int) -> npt.NDArray[Any]:
    """Return the table of an update to be timed: one segment, whose gradient and weight are bf16.

    Args:
        state: The rule, and how its state is stored.
        addresses: By name: the tensors of `trial_items`. Or the address of the first one, if each of the others
            begins where the one before it ends.
        numel: Elements; whole blocks of those that share scales.
    """
    rule = state.rule
    if isinstance(addresses, int):
        items = trial_items(state)
        starts = accumulate((stored.offset(numel) for stored in items.values()), initial=addresses)
        addresses = dict(zip(items, starts, strict=False))  # the last of `starts` is the end
    values = rule.values(rule.defaults)
    flags = SegmentFlag.ACTIVE
    if rule.decoupled(values):
        flags |= SegmentFlag.DECOUPLED_DECAY
    return segment_table(
        state,
        numel,
        addresses,
        weight_dtype=DtypeCode.BFLOAT16,
        gradient_dtype=DtypeCode.BFLOAT16,
        flags=flags,
        scalars=rule.row(step=10, values=values, grad_scale=1.0),  # a step like most, not the first
    )


def trial_items(state: StateSpec) -> dict[str, Format]:
    """Return by name how each tensor of a `trial_table` is stored, in the order of those that follow each other."""
    return dict(state.stored) | dict.fromkeys(("gradient", "weight"), BF16)


def trial_bytes(state: StateSpec) -> int:
    """Return the bytes that an element takes in all tensors of a `trial_table` together, rounded up."""
    return math.ceil(sum(stored.bytes_each for stored in trial_items(state).values()))


def as_segment_rows(table: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of any rule's segment table as rows of `SEGMENT_DTYPE`, after checking that it is one.

    Raises:
        InternalError: It is no contiguous segment table.
    """
    names = table.dtype.names or ()
    is_table = table.dtype.itemsize == SEGMENT_DTYPE.itemsize and {"master", "rule", "numel"} <= set(names)
    # The message is made only if it is needed: a dtype's text costs more than the rest of a submission.
    invariant(is_table, "" if is_table else f"a segment table has dtype {table.dtype}, not that of a rule's segments")
    invariant(
        table.ndim == 1 and table.flags.c_contiguous,
        f"a segment table of shape {table.shape} is not one contiguous row of segments",
    )
    return table.view(SEGMENT_DTYPE)
