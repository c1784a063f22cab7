"""State as it is stored, and as fp32 tensors: for everybody who looks at it, between updates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from offload.kernels.reference import (
    SegmentTensors,
    decoded,
    master_of,
    minifloat,
    state_of,
    store_master,
    store_state,
)
from offload.protocols import SegmentFlag, StateFormat
from offload.rules import MASTER, MASTER_LOW, SCALES, Format, UpdateRule
from offload.rules.formats import BF16, FP24_UPPER, FP32

_DTYPES = {FP32: torch.float32, BF16: torch.bfloat16, FP24_UPPER: torch.int16}


def stored_dtype(stored: Format) -> torch.dtype:
    """Return the element type of a tensor with what is stored in a format: uint8 for codes and scales."""
    return _DTYPES.get(stored, torch.uint8)


@contextlib.contextmanager
def as_fp32(
    rule: UpdateRule,
    state_format: StateFormat,
    stored: Mapping[str, torch.Tensor],
    first_index: int,
    *,
    keep: bool,
) -> Iterator[dict[str, torch.Tensor]]:
    """Lend a segment's state in fp32 by the rule's names: the tensors that are fp32, and copies of others.

    Args:
        rule: The update rule.
        state_format: How it is stored.
        stored: What it is stored in, by name; flat.
        first_index: Index of its first element in the unsharded parameter.
        keep: Whether copies are stored afterwards, rounded to nearest.
    """
    if state_format is StateFormat.EXACT:
        yield dict(stored)
        return
    scales = stored.get(SCALES)
    segment = SegmentTensors(
        master=stored[MASTER.name],
        state=[stored[tensor.name] for tensor in rule.state],
        gradient=None,
        weight=None,
        flags=SegmentFlag(0),
        scalars=None,
        rule=rule,
        state_format=state_format,
        first_index=first_index,
        master_low=stored.get(MASTER_LOW),
        scales=None if scales is None else scales.view(-1, len(rule.state)),
    )
    views = dict(zip(rule.names, (master_of(segment), *state_of(segment)), strict=True))
    yield views
    if keep:
        store_state(segment, [views[tensor.name] for tensor in rule.state])
        store_master(segment, views[MASTER.name])


def stored_master(values: torch.Tensor, state_format: StateFormat) -> torch.Tensor:
    """Return the fp32 master of a 16-bit weight as it is once it has been stored in a format."""
    return minifloat.join_master(*minifloat.split_master(values)) if state_format is StateFormat.COMPACT8 else values


def tensor_as_fp32(rule: UpdateRule, name: str, stored: Mapping[str, torch.Tensor], first_index: int) -> torch.Tensor:
    """Return one state tensor of a segment, stored in several, in fp32.

    Args:
        rule: The update rule.
        name: One of its `names`.
        stored: What the tensor is stored in, as bytes, by name.
        first_index: Index of its first element in the unsharded parameter.
    """
    if name == MASTER.name:
        return decoded(rule, name, stored[name].view(torch.int16), stored[MASTER_LOW], first_index)
    return decoded(rule, name, stored[name], stored[SCALES].view(-1, len(rule.state)), first_index)
