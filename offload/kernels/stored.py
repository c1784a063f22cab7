"""State as it is stored, and as fp32 tensors: for everybody who looks at it, between updates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from offload.kernels.reference import (
    SegmentTensors,
    decoded,
    master_of,
    minifloat,
    state_of,
    store_master,
    store_rounded,
    store_state,
)
from offload.protocols import BLOCK_NUMEL, SegmentFlag, StateFormat
from offload.rules import MASTER, MASTER_LOW, SCALES, Format, UpdateRule
from offload.rules.formats import BF16, FP24_UPPER, FP32

RUN_NUMEL = 1 << 14
"""Elements that are decoded or encoded at once, which takes a hundred times as many bytes."""

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
    read: bool,
    keep: bool,
) -> Iterator[dict[str, torch.Tensor]]:
    """Lend a segment's state in fp32 by the rule's names: the tensors that are fp32, and copies of others.

    Args:
        rule: The update rule.
        state_format: How it is stored.
        stored: What it is stored in, by name; flat.
        first_index: Index of its first element in the unsharded parameter.
        read: Whether copies hold what is stored; else anything.
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
    numel = segment.master.numel()
    is_fp32 = segment.master_low is None
    copied = rule.names[1:] if is_fp32 else rule.names
    views = {MASTER.name: segment.master}
    views |= {name: torch.empty(numel, dtype=torch.float32, device="cpu") for name in copied}
    for run in _runs(first_index, numel) if read else ():
        part = _part(segment, run)
        for view, values in zip(views.values(), (master_of(part), *state_of(part)), strict=True):
            if view is not segment.master:
                view[run] = values
    yield views
    for run in _runs(first_index, numel) if keep else ():
        part = _part(segment, run)
        store_state(part, [views[tensor.name][run] for tensor in rule.state])
        if not is_fp32:
            store_master(part, views[MASTER.name][run])


def _runs(first_index: int, numel: int) -> Iterator[slice]:
    """Yield runs that a core's cache holds and that begin with a block: memory is bounded whatever the size."""
    start = 0
    while start < numel:
        stop = min(numel, start + RUN_NUMEL - (first_index + start) % BLOCK_NUMEL)
        yield slice(start, stop)
        start = stop


def _blocks(first_index: int, run: slice) -> slice:
    """Return which of a segment's blocks a run of its elements lies in."""
    before = first_index % BLOCK_NUMEL
    return slice((before + run.start) // BLOCK_NUMEL, -(-(before + run.stop) // BLOCK_NUMEL))


def _part(segment: SegmentTensors, run: slice) -> SegmentTensors:
    """Return a run of a segment; see `_runs`."""
    return replace(
        segment,
        master=segment.master[run],
        state=[tensor[run] for tensor in segment.state],
        first_index=segment.first_index + run.start,
        master_low=None if segment.master_low is None else segment.master_low[run],
        scales=None if segment.scales is None else segment.scales[_blocks(segment.first_index, run)],
    )


def store_weight(master: torch.Tensor, state_format: StateFormat, weight: torch.Tensor) -> None:
    """Put into a 16-bit weight what its fp32 master is once that has been stored in a format, rounded."""
    if state_format is not StateFormat.COMPACT8:
        store_rounded(master, weight)
        return
    for run in _runs(0, master.numel()):
        store_rounded(minifloat.join_master(*minifloat.split_master(master[run])), weight[run])


def put_as_fp32(
    rule: UpdateRule, name: str, stored: Mapping[str, torch.Tensor], first_index: int, out: torch.Tensor
) -> None:
    """Put one state tensor of a segment, stored in several, into a flat tensor, rounded to its type.

    Args:
        rule: The update rule.
        name: One of its `names`.
        stored: What the tensor is stored in, as bytes, by name.
        first_index: Index of its first element in the unsharded parameter.
        out: As many elements.
    """
    for run in _runs(first_index, out.numel()):
        if name == MASTER.name:
            main, beside = stored[name].view(torch.int16)[run], stored[MASTER_LOW][run]
        else:
            scales = stored[SCALES].view(-1, len(rule.state))
            main, beside = stored[name][run], scales[_blocks(first_index, run)]
        store_rounded(decoded(rule, name, main, beside, first_index + run.start), out[run])
