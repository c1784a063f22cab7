"""What compact formats are chosen for: state that decays as it does in fp32, and updates that stay as small.

The gradients of seven elements in eight fall or vanish, those of their neighbours do not. What then has to decay by
less than half a step of its format at every update never does if it is rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offload.formats import COMPACT8, COMPACT16, EXACT, StateFormat
from offload.kernels import reference
from offload.kernels.reference import SegmentTensors, minifloat, rounding_keys, state_of
from offload.kernels.reference.rounding import random_bits
from offload.protocols import SegmentFlag
from offload.rules import ADAMW

NUMEL = 8192
BLOCKS = NUMEL // 64
FALLING = torch.arange(NUMEL) % 8 != 0
"""Whose gradients fall."""


def fresh(state_format: StateFormat) -> SegmentTensors:
    form = {
        EXACT: torch.float32,
        COMPACT16: torch.bfloat16,
        COMPACT8: torch.uint8,
    }
    return SegmentTensors(
        master=torch.zeros(NUMEL),
        state=[torch.zeros(NUMEL, dtype=form.get(state_format, torch.uint8)) for _ in range(2)],
        gradient=None,
        weight=None,
        flags=SegmentFlag.ACTIVE,
        scalars=None,
        state_format=state_format,
        scales=torch.zeros(BLOCKS, 2, dtype=torch.uint8) if state_format is COMPACT8 else None,
    )


def to_nearest(segment: SegmentTensors, state: list[torch.Tensor]) -> None:
    reference.store_state(segment, state)


def without_zeros_beside_zeros(segment: SegmentTensors, state: list[torch.Tensor]) -> None:
    random = random_bits(segment.rounding_key, 0, NUMEL)
    reference.store_state(segment, state, random)
    segment.state[0].copy_(minifloat.encode_signed(state[0], 0, random)[0])


FORMATS: dict[str, tuple[StateFormat, Callable[[SegmentTensors, list[torch.Tensor]], None] | None]] = {
    "exact": (EXACT, None),
    "compact16": (COMPACT16, None),
    "compact8": (COMPACT8, None),
    "compact16, to nearest": (COMPACT16, to_nearest),
    "compact8, to nearest": (COMPACT8, to_nearest),
    "compact8, any exp_avg": (COMPACT8, without_zeros_beside_zeros),
}
"""Formats, and how another than the right one would store new state."""


def run(beta2: float, fall: float, before: int, after: int) -> tuple[dict[str, float], dict[str, float]]:
    """Let gradients fall after `before` steps, and go on for `after`.

    Returns:
        For each format, the sum of the roots of exp_avg_sq over that in fp32, and the greatest update of the last
        tenth of all steps, of elements whose gradients fell.
    """
    generator = torch.Generator().manual_seed(1)
    scale = torch.exp(0.7 * torch.randn(NUMEL, generator=generator))
    segments = {name: fresh(state_format) for name, (state_format, _) in FORMATS.items()}
    greatest = dict.fromkeys(FORMATS, 0.0)
    for step in range(1, before + after + 1):
        fallen = torch.where(FALLING & (step > before), fall, 1.0)
        gradient = torch.randn(NUMEL, generator=generator) * scale * fallen
        values = ADAMW.values({**ADAMW.defaults, "lr": 1.0, "betas": (0.9, beta2), "weight_decay": 0.0})
        for name, segment in segments.items():
            segment.gradient, segment.scalars = gradient, ADAMW.row(step, values, 1.0)
            segment.rounding_key = int(rounding_keys(0, 1, step)[0])
            segment.master.zero_()
            other = FORMATS[name][1]
            if other is None:
                reference.update(segment)
            else:
                state = state_of(segment)
                segment.master.sub_(reference.adam.change(segment.scalars, gradient, state))
                other(segment, state)
            if step > before + 0.9 * after:
                greatest[name] = max(greatest[name], float(segment.master[FALLING].abs().max()))
    roots = {name: float(state_of(segment)[1][FALLING].double().sqrt().sum()) for name, segment in segments.items()}
    return {name: root / roots["exact"] for name, root in roots.items()}, greatest


# Five times 1 / (1 - beta2) steps after gradients have fallen; those of 0.9999 take five minutes each.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("beta2", "fall", "before", "after"),
    [
        pytest.param(0.95, 0.05, 100, 120, marks=pytest.mark.slow),
        pytest.param(0.95, 0.0, 100, 120, marks=pytest.mark.slow),
        pytest.param(0.99, 0.0, 300, 500, marks=pytest.mark.full),
        pytest.param(0.999, 0.05, 1500, 5000, marks=pytest.mark.full),
        pytest.param(0.999, 0.0, 1500, 5000, marks=pytest.mark.full),
        pytest.param(0.9999, 0.05, 1500, 50_000, marks=pytest.mark.full),
        pytest.param(0.9999, 0.0, 1500, 50_000, marks=pytest.mark.full),
    ],
)
def test_exp_avg_sq_decays_as_in_fp32(beta2: float, fall: float, before: int, after: int) -> None:
    """The sum of its roots, which are what updates divide by, stays within 2%; rounded to nearest it would not.

    It would be too large, having decayed too little, or too small, having grown too little before.
    """
    roots, _ = run(beta2, fall, before, after)
    print(beta2, fall, roots)
    for name in ("compact16", "compact8"):
        assert abs(roots[name] - 1) < 0.02, (name, roots)
    assert abs(roots["compact8, to nearest"] - 1) > 0.02, roots
    if beta2 >= 0.99:  # half a step of bf16 is 0.2 to 0.4%
        assert abs(roots["compact16, to nearest"] - 1) > 0.02, roots


@pytest.mark.slow
def test_no_update_explodes_where_gradients_fall_far() -> None:
    """Roots that are too small for their block become 0; what is divided by them would be divided by eps."""
    _, greatest = run(0.95, 1e-4, 50, 350)
    assert greatest["compact16"] < 10
    assert greatest["compact8"] < 10, greatest
    assert greatest["compact8, any exp_avg"] > 1000, greatest
