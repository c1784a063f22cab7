"""The definition itself: against torch, and against what it promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import same_bits

from offload import _native
from offload.kernels import CpuUpdateKernel, reference
from offload.kernels.reference import SegmentTensors, round_to_bfloat16, scalars, segment_table, square_root
from offload.protocols import SEGMENT_DTYPE, SegmentFlag
from offload.rules import ADAMW, segment_dtype


def test_segment_is_what_python_says_it_is():
    assert _native.SEGMENT_BYTES == SEGMENT_DTYPE.itemsize == 184
    assert reference.Scalars._fields == segment_dtype(ADAMW).names[-9:]


def test_scalars_are_rounded_once():
    s = scalars(
        7,
        lr=3e-4,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.1,
        decoupled=True,
        grad_scale=0.3,
        maximize=True,
    )
    assert all(float(np.float32(value)) == value for value in s)
    assert s.one_minus_beta2 == float(np.float32(1 - 0.999)) != float(np.float32(1) - np.float32(0.999))
    assert s.inv_bias2_sqrt == float(np.float32(1 / (1 - 0.999**7) ** 0.5))
    assert s.step_size == float(np.float32(3e-4 / (1 - 0.9**7)))
    assert s.decay == float(np.float32(1 - 3e-4 * 0.1))
    assert s.grad_scale == float(np.float32(-0.3))
    adam = scalars(1, lr=3e-4, betas=(0.0, 0.0), eps=0.0, weight_decay=0.1, decoupled=False)
    assert (adam.decay, adam.grad_scale, adam.inv_bias2_sqrt) == (float(np.float32(0.1)), 1.0, 1.0)


@pytest.mark.parametrize("change", [{"step": 0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}])
def test_scalars_that_make_no_sense(change):
    arguments = {
        "step": 1,
        "lr": 1.0,
        "betas": (0.9, 0.9),
        "eps": 0.0,
        "weight_decay": 0.0,
        "decoupled": True,
    }
    with pytest.raises(ValueError, match="cannot be used"):
        scalars(**(arguments | change))


def test_bfloat16_rounds_to_nearest_even():
    every = torch.arange(0, 2**32, 2**12 - 1, dtype=torch.int64).sub(2**31).to(torch.int32).view(torch.float32)
    rounded = round_to_bfloat16(every)
    nan = torch.isnan(every)
    assert torch.isnan(rounded[nan]).all()
    assert torch.equal(rounded[~nan].view(torch.int16), every[~nan].to(torch.bfloat16).view(torch.int16))
    tiny = torch.tensor([1e-40, -1e-40])
    assert torch.all(round_to_bfloat16(tiny) != 0)


def test_square_root_is_correctly_rounded():
    """Against the processor's instruction, which IEEE 754 binds; every exponent, and two binades densely."""
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (1 << 20,), generator=generator).to(torch.int32)
    binades = torch.arange(0x3F800000, 0x40800000, 3, dtype=torch.int32)
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45, -1.0]).view(torch.int32)
    numbers = torch.cat([anything, binades, special]).view(torch.float32)
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(np.sqrt(numbers.numpy()))
    assert same_bits(square_root(numbers), expected)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.slow
def test_close_to_torch_over_many_steps(native, decoupled, maximize):
    """Only last bits differ: after 200 steps no fp32 weight is further away than 2e-6 of the way it has come,
    give or take one part in 10^6 of its own size."""
    torch.manual_seed(0)
    start = torch.randn(3000)
    theirs = start.clone().requires_grad_()
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    torchs = (torch.optim.AdamW if decoupled else torch.optim.Adam)([theirs], maximize=maximize, **settings)
    ours = SegmentTensors(
        start.clone(), (torch.zeros(3000), torch.zeros(3000)), torch.zeros(3000), None, SegmentFlag.ACTIVE, None
    )
    if decoupled:
        ours.flags |= SegmentFlag.DECOUPLED_DECAY
    with CpuUpdateKernel(threads=1) as kernel:
        for step in range(1, 201):
            gradient = torch.sin(start * step) + 0.1 * torch.randn(3000)
            theirs.grad = gradient.clone()
            torchs.step()
            ours.gradient.copy_(gradient)
            ours.scalars = scalars(step, decoupled=decoupled, maximize=maximize, **settings)
            if native:
                kernel.run(segment_table([ours]))
            else:
                reference.update(ours)
    way = (theirs.detach() - start).abs().mean()
    assert way > 0.01
    torch.testing.assert_close(ours.master, theirs.detach(), rtol=1e-6, atol=2e-6 * max(1.0, way.item()))


def test_tables_of_unsuitable_tensors_are_refused():
    def segment(**changes):
        numbers = torch.zeros(4)
        given = {
            "master": numbers,
            "exp_avg": numbers.clone(),
            "exp_avg_sq": numbers.clone(),
            "gradient": numbers.clone(),
            "weight": None,
            "flags": SegmentFlag.ACTIVE,
            "scalars": scalars(1, lr=1.0, betas=(0.9, 0.9), eps=0.0, weight_decay=0.0, decoupled=True),
        }
        given |= changes
        return SegmentTensors(state=(given.pop("exp_avg"), given.pop("exp_avg_sq")), **given)

    assert segment_table([segment()])["numel"].tolist() == [4]
    for changes in (
        {"master": torch.zeros(4, dtype=torch.bfloat16)},
        {"exp_avg": torch.zeros(5)},
        {"gradient": torch.zeros(8)[::2]},
        {"weight": torch.zeros(4, dtype=torch.int16)},
    ):
        with pytest.raises(ValueError, match=next(iter(changes))):
            segment_table([segment(**changes)])
