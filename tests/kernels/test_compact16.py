"""State in `compact16`: the suite of exact state on every kernel, and what rounding adds to it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import test_update_kernel
import torch
from compact8_cases import cut_up
from devices import CUDA, LATE_FULL
from kernel_cases import DTYPES, WEIGHT_DTYPES, Case, Placed, same_bits, some_scalars, table_of
from test_gpu import gpu_kernel
from test_update_kernel import (  # noqa: F401
    ACTIVE,
    DECOUPLED,
    UPDATES,
    ZERO,
    run_and_check,
    test_any_alignment,
    test_any_table,
    test_every_rule,
    test_flags,
    test_masters_beside_weights_that_are_no_plain_numbers,
    test_masters_stay_where_the_weight_is_their_rounding,
    test_old_values_stay_where_new_ones_go_elsewhere,
    test_sizes,
    test_unread_fields_may_be_null,
    test_untouched_without_flags,
)

from offload.errors import InternalError
from offload.formats import COMPACT16, EXACT
from offload.kernels import CpuUpdateKernel, instruction_sets, reference, rounding_keys
from offload.rules import LION, RULES

GREATEST = float(torch.finfo(torch.bfloat16).max)


@pytest.fixture(scope="module", params=[*instruction_sets(), "interpreter", "torch", LATE_FULL[0], CUDA[0]])
def kernel(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "state_format", COMPACT16)
        if request.param in instruction_sets():
            with CpuUpdateKernel(threads=2, instruction_set=request.param) as kernel:
                yield kernel
            return
        with gpu_kernel(request.param) as kernel:
            yield kernel


def replaced(case: Case, **tensors: torch.Tensor) -> Case:
    """Put other values into a case, for the reference and for the kernel."""
    for name, values in tensors.items():
        case.tensors.tensors()[name].copy_(values)
        case.placed[name] = Placed(case.tensors.tensors()[name])
    return case


def passing_through(moments: torch.Tensor, *, seed: int = 0) -> Case:
    """Return an update that leaves both moments, whose new values are fp32, as they are but for rounding."""
    case = Case.make(moments.numel(), seed=seed, gradient_dtype=torch.float32, weight_dtype=None, flags=ACTIVE | ZERO)
    plain = {"grad_scale": 1.0, "decay": 0.0, "one_minus_beta1": 1.0, "one_minus_beta2": 1.0}
    case.tensors.scalars = some_scalars(ACTIVE)._replace(**plain)
    return replaced(case, gradient=moments)


@pytest.mark.parametrize("distance", [1 << 28, (1 << 27) + (1 << 12)])
def test_tensors_that_compete_for_the_cache(kernel, distance):
    if not isinstance(kernel, CpuUpdateKernel):
        pytest.skip("the CPU's kernels have a way of their own for them")
    test_update_kernel.test_tensors_that_compete_for_the_cache(kernel, distance)


@pytest.mark.parametrize("offsets", [(4, 2, 6, 2, 2), (8, 30, 34, 0, 6), (60, 62, 2, 4, 64)])
def test_state_at_any_multiple_of_two(kernel, offsets):
    sizes = (1, 63, 64, 200, 4097)
    run_and_check(
        kernel,
        [
            Case.make(numel, seed=numel + i, gradient_dtype=g, weight_dtype=w, offsets=offsets)
            for i, (numel, g, w) in enumerate(itertools.product(sizes, DTYPES, WEIGHT_DTYPES))
        ],
    )


def test_what_is_special_is_stored_as_defined(kernel):
    """Infinities and zeros stay, NaN is one number, and no finite value becomes infinite."""
    infinity = float("inf")
    specials = [0.0, -0.0, infinity, -infinity, 3.4e38, -3.4e38, GREATEST, -GREATEST, 1.0, -(2.0**-133)]
    stored = [0.0, -0.0, infinity, -infinity, GREATEST, -GREATEST, GREATEST, -GREATEST, 1.0, -(2.0**-133)]
    quiet = torch.tensor([0x7FC00000, -0x400000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor(specials), quiet]).repeat(100)
    case = passing_through(values)
    run_and_check(kernel, [case])
    moment = case.placed["exp_avg"].tensor().view(torch.int16)
    assert torch.all(moment.view(100, -1)[:, len(specials) :] == 0x7FC0)
    wanted = torch.tensor(stored).to(torch.bfloat16).view(torch.int16)
    wanted[1] = 0  # m * beta1, which is +0, and -0 make +0
    assert torch.all(moment.view(100, -1)[:, : len(specials)] == wanted)
    second = case.placed["exp_avg_sq"].tensor()
    assert not torch.any(torch.signbit(second)), "exp_avg_sq is -0, or NaN with a sign"


def test_negative_zero_keeps_its_sign(kernel):
    zeros = torch.full((100,), -0.0)
    scalars = some_scalars(ACTIVE, rule=LION)._replace(decay=0.0)
    case = Case.make(100, rule=LION, gradient_dtype=torch.float32, flags=ACTIVE, scalars=scalars)
    replaced(case, exp_avg=zeros, gradient=zeros)
    run_and_check(kernel, [case])
    assert torch.all(torch.signbit(case.placed["exp_avg"].tensor()))


def test_subnormals_are_rounded_like_other_numbers(kernel):
    bits = torch.arange(0, 1 << 18, 37, dtype=torch.int32)
    values = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    case = passing_through(values)
    run_and_check(kernel, [case])
    moment = case.placed["exp_avg"].tensor().to(torch.float32)
    step = 2.0**-133
    assert torch.all((moment - values).abs() < step)
    assert abs(float((moment.double() - values.double()).mean())) < 0.02 * step


@pytest.mark.parametrize(
    "first_index", [0, 999, (1 << 32) - 5000, (7 << 32) - 1, (1 << 63) - 3000, (1 << 64) - 10_000]
)
def test_cuts_change_nothing(kernel, first_index):
    """Rows, pieces and threads, on both sides of a multiple of 2^32."""
    for starts in ([0], [0, 1, 64, 127, 4096, 4097, 5000], sorted({0, *range(3, 10_000, 1013)})):
        case = Case.make(10_000, seed=3, offsets=(8, 4, 4, 4, 4))
        case.tensors.first_index = first_index
        kernel.run(cut_up(case, starts))
        case.check()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads, monkeypatch):
    monkeypatch.setattr(Case, "state_format", COMPACT16)
    cases = [Case.make(i % 23, seed=i, flags=UPDATES[i % len(UPDATES)]) for i in range(50)]
    cases.insert(30, Case.make(200_001, seed=6))
    with CpuUpdateKernel(threads=threads) as kernel:
        run_and_check(kernel, cases)


def test_both_formats_in_one_table(kernel):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "state_format", EXACT)
        exact = [Case.make(1000, seed=seed, kind="wild") for seed in range(3)]
    compact = [Case.make(1000, seed=seed, kind="wild") for seed in range(3)]
    run_and_check(kernel, [case for pair in zip(exact, compact, strict=True) for case in pair])


def test_exact_state_ignores_key_and_index(kernel):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "state_format", EXACT)
        case = Case.make(1000)
        row = case.row()
    row["rounding_key"], row["first_index"] = 77, 1 << 40
    kernel.run(row)
    case.check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exp_avg": 1}, "state is not aligned to 2 bytes"),
        ({"exp_avg_sq": 1}, "state is not aligned to 2 bytes"),
        ({"master": 2}, "master is not aligned to 4 bytes"),
        ({"state_format": 6}, "unknown state_format 7"),
        ({"state_format": -1, "exp_avg": 2}, "state is not aligned to 4 bytes"),
    ],
)
def test_wrong_tables_are_refused(kernel, changes, message):
    cases = [Case.make(10), Case.make(10)]
    table = table_of(cases)
    for name, more in changes.items():
        table[name][1] = int(table[name][1]) + more
    before = cases[0].placed["master"].tensor()
    with pytest.raises(InternalError, match=f"segment 1: {message}"):
        kernel.run(table)
    assert same_bits(cases[0].placed["master"].tensor(), before), "something was updated"


def test_tensors_of_another_format_are_refused():
    case = Case.make(4)
    case.tensors.state_format = COMPACT16
    case.tensors.state = [tensor.to(torch.float32) for tensor in case.tensors.state]
    with pytest.raises(ValueError, match=r"exp_avg: dtype torch\.float32"):
        reference.segment_table([case.tensors])


def test_the_master_moves_by_what_is_not_rounded():
    """One update from equal state gives the masters and weights of exact state, bit for bit, under every rule."""
    for rule, flags in itertools.product(RULES.values(), (ACTIVE, ACTIVE | DECOUPLED, ACTIVE | ZERO)):
        cases = [Case.make(1000, flags=flags, rule=rule) for _ in range(2)]
        segment = cases[1].tensors
        segment.state_format = COMPACT16
        segment.state = [tensor.to(torch.bfloat16) for tensor in segment.state]
        for exact, compact in zip(cases[0].tensors.state, segment.state, strict=True):
            exact.copy_(compact)
        for case in cases:
            reference.update(case.tensors)
        assert same_bits(segment.master, cases[0].tensors.master)
        assert same_bits(segment.weight, cases[0].tensors.weight)
        for exact, compact in zip(cases[0].tensors.state, segment.state, strict=True):
            assert torch.all((compact.float() - exact).abs() <= exact.abs() * 2.0**-7)


# How well state follows what fp32 would keep.


def second_moment(beta2: float, steps: int, numel: int = 65_536, *, nearest: bool = False) -> tuple[float, float]:
    """Return the mean root of exp_avg_sq in compact16 and in fp32, long after gradients have fallen twentyfold.

    Seven of eight elements' gradients fall, the others' stay, as in embeddings and experts.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp(torch.randn(numel, generator=generator))
    falls = torch.arange(numel) % 8 != 0
    settings = {"lr": 0.0, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}
    segments = []
    for dtype in (torch.bfloat16, torch.float32):
        state = [torch.zeros(numel, dtype=dtype), (sizes * sizes).to(torch.bfloat16).to(dtype)]
        compact = COMPACT16 if dtype == torch.bfloat16 else EXACT
        row = reference.scalars(1000, **settings)
        gradient = torch.where(falls, sizes / 20, sizes)
        segments.append(
            reference.SegmentTensors(torch.zeros(numel), state, gradient, None, ACTIVE, row, state_format=compact)
        )
    compact, exact = segments
    with CpuUpdateKernel(threads=1) as kernel:
        for step in range(1, steps + 1):
            if nearest:
                state = [tensor.float() for tensor in compact.state]
                wide = replace(compact, state=state, state_format=EXACT)
                kernel.run(reference.segment_table([wide, exact]))
                for kept, values in zip(compact.state, wide.state, strict=True):
                    kept.copy_(reference.round_to_bfloat16(values))
                continue
            compact.rounding_key = int(rounding_keys(0, 0, step)[0])
            kernel.run(reference.segment_table([compact, exact]))
    roots = [segment.state[1].double().sqrt()[falls] / sizes[falls] for segment in segments]
    return float(roots[0].mean()), float(roots[1].mean())


@pytest.mark.parametrize(("beta2", "steps"), [(0.95, 200), (0.999, 4000), (0.9999, 4000)])
@pytest.mark.slow
def test_second_moments_decay_as_in_fp32(beta2, steps):
    compact, exact = second_moment(beta2, steps, 16_384)
    assert abs(compact / exact - 1) < 0.02


@pytest.mark.slow
def test_rounded_to_nearest_they_would_not():
    compact, exact = second_moment(0.999, 4000, 4096, nearest=True)
    assert compact / exact > 2


@pytest.mark.parametrize(("beta2", "steps"), [(0.95, 400), (0.999, 5000), (0.9999, 5000)])
@pytest.mark.slow
def test_second_moments_vanish_as_in_fp32(beta2, steps):
    """After the last gradient exp_avg_sq falls by beta2 at each update, on the mean over elements."""
    numel = 16_384
    state = [torch.zeros(numel, dtype=torch.bfloat16), torch.ones(numel, dtype=torch.bfloat16)]
    row = some_scalars(ACTIVE)._replace(beta2=float(np.float32(beta2)))
    segment = reference.SegmentTensors(
        torch.zeros(numel), state, torch.zeros(numel), None, ACTIVE, row, state_format=COMPACT16
    )
    with CpuUpdateKernel(threads=1) as kernel:
        for step in range(1, steps + 1):
            segment.rounding_key = int(rounding_keys(0, 0, step)[0])
            kernel.run(reference.segment_table([segment]))
            if step in (steps // 8, steps // 2, steps):
                assert abs(float(state[1].double().mean()) / beta2**step - 1) < 0.02
