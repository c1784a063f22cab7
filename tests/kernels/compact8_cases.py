"""Segments in `compact8` with chosen values, for every kernel's tests, and the tests of values at both ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import WEIGHT_DTYPES, Case, Placed, some_scalars, store_in_codes

from offload.formats import SCALES
from offload.formats.compact8 import BLOCK_NUMEL
from offload.kernels import reference
from offload.protocols import SegmentFlag

ACTIVE, ZERO = SegmentFlag.ACTIVE, SegmentFlag.ZERO_STATE
GREATEST = (63 / 32 * 2.0**63) ** 2
"""The greatest value whose root has a code."""


def placed_again(case: Case) -> Case:
    """Copy a case's tensors, which have changed, to where the kernel finds them."""
    case.placed = {name: Placed(tensor) for name, tensor in case.tensors.tensors().items()}
    return case


def replaced(case: Case, **tensors: torch.Tensor) -> Case:
    """Put other values into a case, for the reference and for the kernel; state and master in fp32."""
    segment = case.tensors
    for name in ("gradient", "weight"):
        if name in tensors:
            getattr(segment, name).copy_(tensors[name])
    state, master = reference.state_of(segment), reference.master_of(segment)
    for number, name in enumerate(segment.rule.state):
        state[number].copy_(tensors.get(name, state[number]))
    segment.state, segment.master = state, tensors.get("master", master)
    store_in_codes(segment)
    return placed_again(case)


def passing_through(moments: torch.Tensor, first_index: int = 0, **settings: Any) -> Case:
    """Return a first update of Adam whose new exp_avg is what is given, and whose new exp_avg_sq is its square."""
    settings = {"gradient_dtype": torch.float32, "flags": ACTIVE | ZERO, "first_index": first_index} | settings
    case = Case.make(moments.numel(), **settings)
    plain = {"grad_scale": 1.0, "decay": 0.0, "one_minus_beta1": 1.0, "one_minus_beta2": 1.0}
    case.tensors.scalars = some_scalars(ACTIVE)._replace(**plain)
    return replaced(case, gradient=moments)


def cut_up(case: Case, starts: list[int]) -> np.ndarray:
    """Return a table with a row for each run of a case's elements that begins at one of `starts`, whole blocks on."""
    whole, ends = case.row(), [*starts[1:], case.tensors.master.numel()]
    table, first_index = np.repeat(whole, len(starts)), case.tensors.first_index
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        table["numel"][row] = end - start
        table["first_index"][row] = (first_index + start) % (1 << 64)
        for name, placed in case.placed.items():
            offset = start * placed.dtype.itemsize
            if name == SCALES:
                offset = (first_index % BLOCK_NUMEL + start) // BLOCK_NUMEL * len(case.tensors.state)
            table[name][row] += np.uint64(offset)
    return table


def stored(case: Case) -> dict[str, torch.Tensor]:
    """Return what a kernel has left behind: state and master in fp32, codes, scales."""
    segment = case.tensors
    names = segment.rule.names[1:]
    codes = {name: case.placed[name].tensor() for name in names}
    scales = case.placed[SCALES].tensor().view(-1, len(names))
    state = reference.state_of(dataclasses.replace(segment, state=[*codes.values()], scales=scales))
    return (
        dict(zip(names, state, strict=True))
        | {f"{name} codes": code for name, code in codes.items()}
        | {"scales": scales}
    )


# Tests for every kernel.


def blocks_of_magnitudes() -> torch.Tensor:
    """Return finite values in blocks: of each a few binades, from the least number to the greatest."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-149, 129).repeat_interleave(BLOCK_NUMEL).float()
    spread = 14 * torch.rand(exponents.numel(), generator=generator) ** 2
    values = torch.ldexp(torch.ones_like(exponents).double(), exponents - spread).clamp(max=3.4028234e38).float()
    values[::7] *= -1.0
    values[5::BLOCK_NUMEL] = -0.0
    return values


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_finite_gradients_make_finite_state(kernel, weight_dtype):
    """Of any magnitude; and a moment without a root beside it is 0, so that no update is much above the step size."""
    moments = blocks_of_magnitudes()
    case = passing_through(moments, 3, weight_dtype=weight_dtype)
    kernel.run(case.row())
    case.check()
    found = stored(case)
    moment, square, root = found["exp_avg"], found["exp_avg_sq"], found["exp_avg_sq codes"]
    assert torch.all(torch.isfinite(moment))
    assert torch.all(torch.isfinite(square))
    assert torch.equal(square == 0, root == 0)
    assert not torch.any(moment[square == 0])
    assert not torch.any(torch.signbit(moment[moment == 0]))
    scales = found["scales"][:, 1]
    assert {0, 64, 65, 190} <= set(scales.tolist())
    assert set(scales.tolist()) <= {0, *range(64, 191)}
    overflowed = torch.isinf(moments * moments)
    assert torch.any(overflowed)
    assert torch.all(square[overflowed] == GREATEST)
    assert not torch.any(moment[overflowed])

    case.tensors.flags, scalars = ACTIVE, some_scalars(ACTIVE)
    case.tensors.scalars = scalars._replace(decay=0.0, step_size=1.0, inv_bias2_sqrt=1.0)
    replaced(case, gradient=torch.zeros_like(moments), master=torch.zeros_like(moments))
    kernel.run(case.row())
    case.check()
    master = reference.master_of(case.tensors)
    assert torch.all(torch.isfinite(master))
    assert 0.5 < master.abs().max() < 10


@pytest.mark.parametrize(
    ("moment", "square", "then"),
    [
        (1.0, 1e-45, (0.0, 0.0)),  # a block of subnormal squares is zeros
        (1.0, 1.1e-38, (0.0, 0.0)),
        (1.0, 2.0**-126, (1.0, 2.0**-126)),
        (-1.0, 2.0**-126, (-1.0, 2.0**-126)),
        (1.0, -0.0, (0.0, 0.0)),
        (-0.0, 1.0, (0.0, 1.0)),
        (1e-45, 1.0, (0.0, 1.0)),  # below the least scale of a moment
        (1.0, 3.4028234e38, (1.0, GREATEST)),
        (1.0, float("inf"), (0.0, GREATEST)),  # which the moment was divided by
        (3.4028234e38, 1.0, (31 / 16 * 2.0**127, 1.0)),
        (float("inf"), 1.0, (float("nan"), 1.0)),
        (float("-inf"), float("inf"), (float("nan"), GREATEST)),
        (float("nan"), 1.0, (float("nan"), 1.0)),
        (1.0, float("nan"), (0.0, float("nan"))),
    ],
)
def test_values_at_both_ends(kernel, moment, square, then):
    """What is stored of an exp_avg and an exp_avg_sq, in whole blocks and in parts of some."""
    case = passing_through(torch.ones(3 * BLOCK_NUMEL), 40)
    chosen = case.tensors.scalars._replace(one_minus_beta1=moment, one_minus_beta2=square)
    case.tensors.scalars = type(chosen)(*(float(np.float32(number)) for number in chosen))
    kernel.run(case.row())
    case.check()
    found = stored(case)
    for name, expected in zip(("exp_avg", "exp_avg_sq"), then, strict=True):
        assert torch.equal(
            torch.nan_to_num(found[name], -1.0), torch.full((found[name].numel(),), expected).nan_to_num(-1.0)
        )
