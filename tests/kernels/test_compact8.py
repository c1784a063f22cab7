"""State in `compact8`: the suite of exact state on every kernel, and what codes, blocks and planes add to it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from compact8_cases import (  # noqa: F401
    cut_up,
    passing_through,
    placed_again,
    replaced,
    test_finite_gradients_make_finite_state,
    test_values_at_both_ends,
)
from kernel_cases import DTYPES, WEIGHT_DTYPES, Case, same_bits, some_scalars, table_of
from test_update_kernel import (  # noqa: F401
    ACTIVE,
    DECOUPLED,
    LOAD,
    OTHERS,
    UPDATES,
    ZERO,
    run_and_check,
    test_any_alignment,
    test_any_table,
    test_every_rule,
    test_fingerprints_of_what_is_read,
    test_flags,
    test_masters_beside_weights_that_are_no_plain_numbers,
    test_masters_stay_where_the_weight_is_their_rounding,
    test_old_values_stay_where_new_ones_go_elsewhere,
    test_sizes,
    test_unread_fields_may_be_null,
    test_untouched_without_flags,
)

from offload.errors import InternalError
from offload.formats import COMPACT8, FORMATS, MASTER_LOW, SCALES
from offload.formats.compact8 import BLOCK_NUMEL
from offload.kernels import CpuUpdateKernel, StreamVariant, instruction_sets, reference, rounding_keys
from offload.kernels.reference import minifloat
from offload.kernels.reference.rounding import random_bits
from offload.rules import ADAMW, RULES

BITS = (minifloat.SIGNED_MANTISSA_BITS, minifloat.ROOT_MANTISSA_BITS)


@pytest.fixture(scope="module", params=instruction_sets())
def kernel(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "state_format", COMPACT8)
        with CpuUpdateKernel(threads=2, instruction_set=request.param) as kernel:
            yield kernel


def scales_of(case: Case) -> torch.Tensor:
    return case.placed[SCALES].tensor().view(-1, len(case.tensors.state))


# Against the reference, bit for bit.


def test_every_place_in_a_block(kernel):
    """Segments that begin at any element of a block, and end before it, in it, with it and after it."""
    cases = []
    for residue, (numel, kind) in itertools.product(range(BLOCK_NUMEL), ((1, "plain"), (64, "wild"), (150, "plain"))):
        settings = {"kind": kind, "weight_dtype": WEIGHT_DTYPES[residue % 3], "first_index": (1 << 40) + residue}
        cases.append(Case.make(numel, seed=residue, **settings))
    run_and_check(kernel, cases)


@pytest.mark.parametrize("offsets", [(2, 1, 3, 2, 2), (4, 63, 17, 0, 6), (62, 0, 1, 4, 64), (6, 2, 2, 1, 34)])
def test_codes_at_any_byte(kernel, offsets):
    run_and_check(
        kernel,
        [
            Case.make(numel, seed=numel + i, gradient_dtype=g, weight_dtype=w, offsets=offsets)
            for i, (numel, g, w) in enumerate(itertools.product((63, 64, 200, 4097), DTYPES, WEIGHT_DTYPES[:2]))
        ],
    )


def test_wild_updates_of_every_kind(kernel):
    """Values of all magnitudes, so that blocks of all sorts lie beside each other, under all flags."""
    for rule in RULES.values():
        kinds = itertools.product(DTYPES, WEIGHT_DTYPES, (*UPDATES, *OTHERS))
        run_and_check(
            kernel,
            [
                Case.make(700 + i, seed=i, kind="wild", gradient_dtype=g, weight_dtype=w, flags=f, rule=rule)
                for i, (g, w, f) in enumerate(kinds)
            ],
        )


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 63, 64, 200])
def test_what_is_not_finite_stays_in_its_block(kernel, special, at):
    """One gradient makes NaN of the state of its block, and of no other's; of the masters of that block, later."""
    moments = torch.linspace(-1, 1, 300)
    moments[at] = special
    case = passing_through(moments)
    run_and_check(kernel, [case])
    block, scales = at // BLOCK_NUMEL, scales_of(case)
    others = [b for b in range(len(scales)) if b != block]
    assert torch.all(scales[others] < 200)
    assert scales[block].tolist() == [255, 255 if np.isnan(special) else 190]
    inside = slice(block * BLOCK_NUMEL, (block + 1) * BLOCK_NUMEL)
    case.tensors.flags = ACTIVE
    run_and_check(kernel, [case])
    master = reference.master_of(case.tensors)
    assert torch.all(torch.isnan(master[inside]))
    assert torch.isnan(master).sum() == len(master[inside])


@pytest.mark.parametrize("exponent", [*range(-149, -95), *range(58, 65), *range(120, 128)])
def test_magnitudes_at_both_ends(kernel, exponent):
    """Blocks of zeros, of the least scale, of the greatest."""
    generator = torch.Generator().manual_seed(exponent)
    moments = torch.ldexp(torch.rand(500, generator=generator) * 2 - 1, torch.tensor(exponent))
    moments[7::64] = torch.ldexp(
        torch.tensor([1.0, 31 / 32, 1.9375, 1.95, 63 / 64, 1.96875, 1.97, 1.999]), torch.tensor(exponent)
    )
    case = passing_through(moments)
    run_and_check(kernel, [case])
    run_and_check(kernel, [replaced(Case.make(500, gradient_dtype=torch.float32), exp_avg=moments, gradient=moments)])


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16])
def test_masters_at_every_tie_and_at_both_ends(kernel, weight_dtype):
    """The weight is the rounding of the master as it is stored: at, just below and just above all ties."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if weight_dtype is torch.bfloat16:
        bits = torch.cat(
            [(halves << 16) + offset for offset in (0, 0x7E80, 0x7F00, 0x7FFF, 0x8000, 0x8001, 0x8100, 0xFFFF)]
        )
    else:
        bits = torch.cat(
            [
                halves.to(torch.int16).view(torch.float16).float().view(torch.int32) + o
                for o in (-256, 0, 4096 - 256, 4096, 4096 + 256)
            ]
        )
        small = torch.arange(0, 2048, dtype=torch.float32) * 2.0**-26
        bits = torch.cat([bits, small.view(torch.int32), (-small).view(torch.int32)])
    # Finite blocks and others.
    master = torch.cat(
        [bits.view(torch.float32), torch.where(bits.view(torch.float32).isfinite(), bits.view(torch.float32), 1.0)]
    )
    scalars = some_scalars(ACTIVE)._replace(step_size=0.0, decay=0.0, eps=1.0)
    for gradient in (0.0, 1e-3):
        case = Case.make(master.numel(), weight_dtype=weight_dtype, flags=ACTIVE, scalars=scalars)
        run_and_check(kernel, [replaced(case, master=master, gradient=torch.full_like(master, gradient))])


def test_every_sixteen_bit_gradient_and_weight(kernel):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype, flags in itertools.product((torch.bfloat16, torch.float16), (ACTIVE | LOAD, LOAD)):
        case = Case.make(2**16, gradient_dtype=dtype, weight_dtype=dtype, flags=flags)
        weight, gradient = every.roll(777).view(dtype), every.view(dtype)
        run_and_check(kernel, [replaced(case, weight=weight, gradient=gradient)])


def test_all_codes_are_read(kernel):
    """Every code in blocks of every scale, with a gradient of 0."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256)
    for weight_dtype in WEIGHT_DTYPES:
        case = Case.make(65_536, weight_dtype=weight_dtype)
        segment = case.tensors
        segment.first_index = 0
        segment.state = [torch.where(codes == 0x80, 0, codes), codes.clone()]
        scales = torch.tensor([0, *range(24, 256)], dtype=torch.uint8).repeat(5)[:1024]
        segment.scales = torch.stack([scales, scales.roll(1)], dim=1).contiguous()
        segment.gradient.zero_()
        run_and_check(kernel, [placed_again(case)])


def test_values_whose_root_is_coded_as_zero_are_zeros(kernel):
    """Else a moment would be divided by almost nothing."""
    generator = torch.Generator().manual_seed(0)
    moments = torch.exp2(-12 * torch.rand(64_000, generator=generator))
    case = passing_through(moments)
    run_and_check(kernel, [case])
    moment, root = (case.placed[name].tensor() for name in ("exp_avg", "exp_avg_sq"))
    assert torch.any(root == 0)
    assert not torch.any(moment[root == 0])
    assert torch.any(moment[root != 0] == 0)


@pytest.mark.parametrize(
    "first_index", [0, 999, (1 << 32) - 5000, (7 << 32) - 1, (1 << 63) - 3000, (1 << 64) - 10_000]
)
@pytest.mark.parametrize("rule", [ADAMW, RULES["lion"]], ids=lambda rule: rule.name)
def test_cuts_between_blocks_change_nothing(kernel, first_index, rule):
    """Rows, on both sides of a multiple of 2^32."""
    to_block = -first_index % BLOCK_NUMEL
    for cuts in ((), (0, 64, 4096, 4160, 8192), tuple(range(0, 9000, 1024))):
        case = Case.make(10_000, seed=3, rule=rule, first_index=first_index)
        kernel.run(cut_up(case, sorted({0, *(to_block + cut for cut in cuts)})))
        case.check()


@pytest.mark.parametrize("first_index", [0, 1, 63, (1 << 32) - 70_001])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads, first_index, monkeypatch):
    """Pieces are cut at multiples of 4096 elements of their segment, wherever blocks begin."""
    monkeypatch.setattr(Case, "state_format", COMPACT8)
    cases = [Case.make(i % 23, seed=i, flags=UPDATES[i % len(UPDATES)]) for i in range(50)]
    cases[30:30] = [
        Case.make(200_001, seed=6, flags=flags, first_index=first_index) for flags in (ACTIVE, LOAD | ZERO)
    ]
    with CpuUpdateKernel(threads=threads) as kernel:
        run_and_check(kernel, cases)


def test_all_formats_in_one_table(kernel):
    cases = []
    for state_format in FORMATS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Case, "state_format", state_format)
            cases.append([Case.make(1000, seed=seed, kind="wild") for seed in range(3)])
    run_and_check(kernel, [case for together in zip(*cases, strict=True) for case in together])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"master": 1}, "master is not aligned to 2 bytes"),
        ({"new_master": 1}, "master is not aligned to 2 bytes"),
        ({"state_format": 1}, "unknown state_format 3"),
        ({MASTER_LOW: None}, "master_low is null"),
        ({SCALES: None}, "scales is null"),
        ({"exp_avg": None}, "state 0 is null"),
    ],
)
def test_wrong_tables_are_refused(kernel, changes, message):
    cases = [Case.make(10), Case.make(10)]
    table = table_of(cases)
    for name, more in changes.items():
        table[name][1] = 0 if more is None else int(table[name][1]) + more
    before = cases[0].placed["master"].tensor()
    with pytest.raises(InternalError, match=f"segment 1: {message}"):
        kernel.run(table)
    assert same_bits(cases[0].placed["master"].tensor(), before), "something was updated"


def test_masters_of_fp32_weights_are_whole(kernel):
    case = Case.make(100, weight_dtype=None)
    assert case.tensors.master_low is None
    table = case.row()
    table["master"] += np.uint64(2)
    with pytest.raises(InternalError, match="master is not aligned to 4 bytes"):
        kernel.run(table)
    run_and_check(kernel, [case])


@pytest.mark.parametrize("variant", range(16))
def test_streams_move_what_updates_move(kernel, variant):
    case = Case.make(9_000)
    before = {name: placed.tensor() for name, placed in case.placed.items()}
    streamed = slice(9_000 // BLOCK_NUMEL * BLOCK_NUMEL)
    for turn in range(2):
        kernel.stream(case.row(), StreamVariant(variant))
        weight = case.placed["weight"].tensor()
        assert torch.equal(weight[streamed], case.tensors.gradient[streamed])
        for name in ("master", MASTER_LOW, "exp_avg", "exp_avg_sq"):
            tensor = case.placed[name].tensor()
            changed = tensor[streamed].view(torch.uint8) != before[name][streamed].view(torch.uint8)
            assert torch.all(changed.view(-1, 4) == torch.tensor([False, False, False, turn == 0])), name
        assert torch.equal(case.placed[SCALES].tensor(), before[SCALES])


# The numbers themselves, as the reference has them.


def blocks_of(codes: torch.Tensor, scale: int) -> tuple[torch.Tensor, torch.Tensor]:
    return codes, torch.full((minifloat.blocks_numel(0, codes.numel()),), scale, dtype=torch.uint8)


@pytest.mark.parametrize("scale", [24, 25, 127, 200, 254])
@pytest.mark.parametrize("mantissa_bits", BITS)
def test_codes_are_distinct_values_in_order(mantissa_bits, scale):
    codes, scales = blocks_of(torch.arange(8 << mantissa_bits, dtype=torch.uint8), scale)
    decoded = minifloat.decode(codes, scales, 0, mantissa_bits)
    assert decoded[0] == 0
    assert torch.all(decoded[1:] > decoded[:-1])
    assert decoded[-1] == (2 - 2.0**-mantissa_bits) * 2.0 ** (scale - 127)
    signed = minifloat.decode_signed(
        torch.arange(256, dtype=torch.uint8), torch.full((4,), scale, dtype=torch.uint8), 0
    )
    assert torch.all(signed[129:] == -signed[1:128])


@pytest.mark.parametrize("mantissa_bits", BITS)
def test_what_was_decoded_is_coded_to_the_same_values(mantissa_bits):
    """With any random bits, in any block whose greatest value is no greater; to the same codes in one like it."""
    generator = torch.Generator().manual_seed(mantissa_bits)
    codes = torch.randint(0, 8 << mantissa_bits, (64_000,), generator=generator).to(torch.uint8)
    codes.view(-1, BLOCK_NUMEL)[:, 3] = torch.randint(
        4 << mantissa_bits, 8 << mantissa_bits, (1000,), generator=generator
    )
    limits = minifloat.LEAST_SCALES[mantissa_bits], minifloat.GREATEST_SCALES[mantissa_bits] + 1
    scales = torch.randint(*limits, (1000,), generator=generator).to(torch.uint8)
    values = minifloat.decode(codes, scales, 0, mantissa_bits)
    random = torch.randint(0, 1 << 23 - mantissa_bits, (64_000,), generator=generator)
    for bits in (random, torch.zeros_like(random), torch.full_like(random, (1 << 23 - mantissa_bits) - 1), None):
        again, scales_again = minifloat.encode(values, 0, mantissa_bits, bits)
        assert same_bits(minifloat.decode(again, scales_again, 0, mantissa_bits), values)
    full = codes.view(-1, BLOCK_NUMEL).amax(dim=1) >= 7 << mantissa_bits
    same = (again == codes).view(-1, BLOCK_NUMEL).all(dim=1) & (scales_again == scales)
    assert torch.all(same[full])


def test_masters_of_24_bits_stay_what_they_are():
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=generator) & ~0xFF
    values = bits.to(torch.int32).view(torch.float32)
    for random in (random_bits(7, 0, values.numel()), None):
        upper, lower = minifloat.split_master(values, random)
        assert same_bits(minifloat.join_master(upper, lower), values)


def z_score(rounded: torch.Tensor, values: torch.Tensor) -> float:
    """Return how many standard deviations the sum of rounding errors is from 0."""
    errors = rounded.double() - values.double()
    return float(errors.sum() / (errors * errors).sum().sqrt())


@pytest.mark.slow
def test_the_mean_of_what_is_stored_is_the_value():
    """Over magnitudes throughout a block, however they are weighed; rounding to nearest fails the same test."""
    numel = 1 << 20
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(numel, generator=generator) ** 8 * (torch.rand(numel, generator=generator) + 1)
    values.view(-1, BLOCK_NUMEL)[:, 0] = 1.5
    random = random_bits(int(rounding_keys(0, 0, 1)[0]), 12_345 * BLOCK_NUMEL, numel)
    first = 12_345 * BLOCK_NUMEL
    upper, lower = minifloat.split_master(values, random)
    stored = {
        "signed": minifloat.decode_signed(*minifloat.encode_signed(-values, first, random), first) * -1,
        "root": minifloat.decode(*minifloat.encode_root(values, first, random), first, BITS[1]),
        "master": minifloat.join_master(upper, lower),
    }
    for power in (0.0, 0.4, 1.0):
        weight = (values.clamp(min=2.0**-7) ** -power).double()
        for name, rounded in stored.items():
            assert abs(z_score(rounded * weight, values * weight)) < 4, (name, power)
    nearest = minifloat.decode(*minifloat.encode_root(values * 0 + 0.0101, first, None), first, BITS[1])
    assert abs(z_score(nearest[:1000], values[:1000] * 0 + 0.0101)) > 20


def test_the_parts_of_random_bits_are_independent():
    """What rounds exp_avg up says nothing of what rounds the root or the master up."""
    numel = 1 << 20
    random = random_bits(99, 0, numel)
    parts = [random >> 31, (random & 0x3FFFF) >> 17, ((random * minifloat.MASTER_RANDOM) & 0xFFFFFFFF) >> 31]
    for first, second in itertools.combinations(parts, 2):
        agree = float((first == second).sum())
        assert abs(agree - numel / 2) < 4 * (numel / 4) ** 0.5
