"""State as fp32 and back, outside of updates: each instruction set against the reference, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import Placed, mostly_finite, same_bits, values

from offload.errors import InternalError
from offload.formats import (
    BF16,
    COMPACT8,
    COMPACT16,
    EXACT_ADAMW,
    FORMATS,
    FP32,
    MASTER_LOW,
    SCALES,
    Format,
    StateFormat,
    StateSpec,
)
from offload.formats.compact8 import BLOCK_NUMEL, FP24_UPPER, ROOT, SIGNED
from offload.kernels import instruction_sets, reference
from offload.kernels.reference import SegmentTensors, minifloat
from offload.kernels.stored import Stored, as_fp32, store_rounded, stored_in
from offload.protocols import SegmentFlag
from offload.rules import RULES, UpdateRule

SETS = pytest.mark.parametrize("instruction_set", instruction_sets())
CODES = pytest.mark.parametrize("form", [SIGNED, ROOT], ids=lambda form: form.name)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLACES = [(0, 64), (0, 1), (63, 1), (17, 200), (1 << 40, 9_999), ((1 << 32) - 70, 4_250), (5, 63), (64, 8_192)]


def tensor_of(placed: Placed) -> torch.Tensor:
    """Return the tensor that lies between guards, not a copy."""
    return placed._inside.view(placed.dtype)


def decoded(form: Format, codes: torch.Tensor, scales: torch.Tensor, first_index: int) -> torch.Tensor:
    return (minifloat.decode_root if form is ROOT else minifloat.decode_signed)(codes, scales, first_index)


def encoded(
    form: Format, wanted: torch.Tensor, first_index: int, roots: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if form is ROOT:
        codes, scales = minifloat.encode_root(reference.square_root(wanted), first_index)
    else:
        codes, scales = minifloat.encode_signed(wanted, first_index)
    return (codes if roots is None else torch.where(roots == 0, 0, codes)), scales


def check_encoding(
    instruction_set: str, form: Format, wanted: torch.Tensor, first_index: int, roots: torch.Tensor | None = None
) -> None:
    """Compare codes and scales, between guards, in a column beside another that stays as it was."""
    numel = wanted.numel()
    blocks = minifloat.blocks_numel(first_index, numel)
    codes = Placed(torch.full((numel,), 77, dtype=torch.uint8), first_index % 7)
    scales = Placed(torch.full((blocks, 2), 77, dtype=torch.uint8))
    column = tensor_of(scales).view(-1, 2)[:, 1]
    Stored(form, tensor_of(codes), column, first_index).write(wanted, roots, instruction_set)
    expected, expected_scales = encoded(form, wanted, first_index, roots)
    assert torch.equal(scales.tensor()[:, 1], expected_scales)
    assert torch.equal(codes.tensor(), expected)
    assert torch.all(scales.tensor()[:, 0] == 77)


@SETS
@CODES
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_of_every_scale(instruction_set: str, form: Format, dtype: torch.dtype) -> None:
    """Codes that nobody makes, -0 and those of scales below the least, are not among them."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(232)
    codes = torch.where(codes == 0x80, 0, codes) if form is SIGNED else codes
    scales = torch.tensor([0, *range(24, 255), 255], dtype=torch.uint8).repeat_interleave(4)[: codes.numel() // 64]
    out = Placed(torch.zeros(codes.numel(), dtype=dtype), 4)
    Stored(form, codes, scales, 0).read(tensor_of(out), instruction_set)
    assert same_bits(out.tensor(), reference.round_weight(decoded(form, codes, scales, 0), dtype))


@SETS
@CODES
@pytest.mark.parametrize(("first_index", "numel"), PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_of_any_run(
    instruction_set: str, form: Format, first_index: int, numel: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(numel)
    codes = torch.randint(0, 128, (numel,), generator=generator, dtype=torch.uint8)
    blocks = minifloat.blocks_numel(first_index, numel)
    scales = torch.randint(24, 256, (blocks, 2), generator=generator, dtype=torch.uint8)
    place, out = Placed(codes, 3), Placed(torch.zeros(numel, dtype=dtype), 2 * dtype.itemsize)
    Stored(form, tensor_of(place), scales[:, 1], first_index).read(tensor_of(out), instruction_set)
    assert same_bits(out.tensor(), reference.round_weight(decoded(form, codes, scales[:, 1], first_index), dtype))


@SETS
@CODES
@pytest.mark.parametrize(("first_index", "numel"), PLACES)
@pytest.mark.parametrize("kind", ["plain", "mixed", "wild"])
def test_values_of_any_run_are_encoded(
    instruction_set: str, form: Format, first_index: int, numel: int, kind: str
) -> None:
    wanted = values(numel, numel, torch.float32, "plain" if kind == "plain" else "wild")
    if kind == "mixed":
        wanted = mostly_finite(wanted, first_index, 1)
    if form is ROOT:
        wanted = torch.where(wanted == 0, wanted, wanted.abs())  # -0 is its own root
    roots = torch.randint(0, 3, (numel,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    for beside in (None, roots):
        check_encoding(instruction_set, form, wanted, first_index, beside)


@SETS
@CODES
@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf"), -1.0, 3.4028234e38, 2.0**127 * 1.97])
@pytest.mark.parametrize("at", [0, 63, 64, 200])
def test_what_is_not_finite_or_nearly_not_stays_in_its_block(
    instruction_set: str, form: Format, special: float, at: int
) -> None:
    wanted = torch.linspace(0, 1, 300)
    wanted[at] = special
    check_encoding(instruction_set, form, wanted, 0)


@SETS
@CODES
@pytest.mark.parametrize("exponent", [*range(-149, -95), *range(58, 65), *range(120, 128)])
def test_magnitudes_at_both_ends_are_encoded(instruction_set: str, form: Format, exponent: int) -> None:
    generator = torch.Generator().manual_seed(exponent)
    wanted = torch.ldexp(torch.rand(500, generator=generator) * 2 - 1, torch.tensor(exponent))
    wanted[7::64] = torch.ldexp(
        torch.tensor([1.0, 31 / 32, 1.9375, 1.95, 63 / 64, 1.96875, 1.97, 1.999]), torch.tensor(exponent)
    )
    check_encoding(instruction_set, form, wanted.abs() if form is ROOT else wanted, 0)


@SETS
@CODES
def test_every_tie_is_rounded_away_from_zero(instruction_set: str, form: Format) -> None:
    """At, just below and just above the middle between neighbours, in blocks whose scale is one and the same."""
    bits = minifloat.ROOT_MANTISSA_BITS if form is ROOT else minifloat.SIGNED_MANTISSA_BITS
    codes = torch.arange(8 << bits, dtype=torch.uint8)
    scales = torch.full((minifloat.blocks_numel(0, codes.numel()),), 130, dtype=torch.uint8)
    magnitudes = minifloat.decode(codes, scales, 0, bits)
    ties = (magnitudes[1:] + magnitudes[:-1]) / 2
    around = torch.cat([(ties.view(torch.int32) + offset).view(torch.float32) for offset in (-1, 0, 1)])
    rows = torch.full((-(-around.numel() // 63), BLOCK_NUMEL), 0.0)
    rows[:, 0] = magnitudes[-1]
    padded = torch.zeros(rows.shape[0] * 63)
    padded[: around.numel()] = around
    rows[:, 1:] = padded.view(-1, 63)
    wanted = rows.flatten()
    if form is ROOT:
        wanted = wanted * wanted  # rounded, to be rooted again
    check_encoding(instruction_set, form, wanted, 0)
    if form is SIGNED:
        check_encoding(instruction_set, form, -wanted, 0)
        found, scales = encoded(form, ties[-1:], 0)
        assert found[0] == codes[-1], "the tie between the two greatest"


@SETS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lower", [0, 1, 0x7F, 0x80, 0xFF])
def test_every_upper_plane(instruction_set: str, dtype: torch.dtype, lower: int) -> None:
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    low = torch.full((2**16,), lower, dtype=torch.uint8)
    out = Placed(torch.zeros(2**16, dtype=dtype), 4)
    Stored(FP24_UPPER, upper, low).read(tensor_of(out), instruction_set)
    assert same_bits(out.tensor(), reference.round_weight(minifloat.join_master(upper, low), dtype))


@SETS
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 4_097])
def test_masters_are_split(instruction_set: str, numel: int) -> None:
    """At, just below and just above all ties of the upper bits, and wild ones."""
    halves = (torch.arange(numel, dtype=torch.int64) * 0x9E37 % 2**16 << 16).to(torch.int32)
    offsets = (0, 0x7F, 0x80, 0x81, 0x7FFF, 0x8000, 0xFFFF)
    cases = [(halves + offset).view(torch.float32) for offset in offsets] + [values(1, numel, torch.float32, "wild")]
    for wanted in cases:
        planes = Placed(torch.zeros(numel, dtype=torch.int16), 2), Placed(torch.zeros(numel, dtype=torch.uint8), 1)
        Stored(FP24_UPPER, *map(tensor_of, planes)).write(wanted, None, instruction_set)
        for found, expected in zip(planes, minifloat.split_master(wanted), strict=True):
            assert torch.equal(found.tensor(), expected)


@SETS
@pytest.mark.parametrize("form", [FP32, BF16], ids=lambda form: form.name)
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 9_001])
def test_elements(instruction_set: str, form: Format, numel: int) -> None:
    wanted = values(1, numel, torch.float32, "wild")
    dtype = torch.float32 if form is FP32 else torch.bfloat16
    place = Placed(torch.zeros(numel, dtype=dtype), 2 * dtype.itemsize)
    Stored(form, tensor_of(place)).write(wanted, None, instruction_set)
    kept = place.tensor()
    assert same_bits(kept, reference.round_weight(wanted, dtype))
    for out_dtype in DTYPES:
        out = Placed(torch.zeros(numel, dtype=out_dtype), out_dtype.itemsize)
        Stored(form, kept).read(tensor_of(out), instruction_set)
        assert same_bits(out.tensor(), reference.round_weight(kept.to(torch.float32), out_dtype))


def state_tensors(state: StateSpec, numel: int, first_index: int, *, fp32_weight: bool) -> dict[str, torch.Tensor]:
    """Return what so many elements of state are stored in, filled with something."""
    rule = state.rule
    if state.format is COMPACT8:
        found = {name: torch.full((numel,), 9, dtype=torch.uint8) for name in rule.names[1:]}
        found[SCALES] = torch.full((minifloat.blocks_numel(first_index, numel) * len(rule.state),), 99).to(
            torch.uint8
        )
        if not fp32_weight:
            found[MASTER_LOW] = torch.full((numel,), 9, dtype=torch.uint8)
    else:
        dtype = torch.bfloat16 if state.format is COMPACT16 else torch.float32
        found = {name: torch.full((numel,), 9, dtype=dtype) for name in rule.names[1:]}
    found["master"] = torch.full((numel,), 9, dtype=torch.int16 if MASTER_LOW in found else torch.float32)
    return found


@pytest.mark.parametrize("fp32_weight", [False, True])
@pytest.mark.parametrize("state_format", FORMATS, ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_a_segment_is_stored_as_the_reference_stores_it(
    rule: UpdateRule, state_format: StateFormat, fp32_weight: bool
) -> None:
    """All tensors of it: where a root is stored as 0, what is divided by it is."""
    state, numel, first_index = StateSpec(rule, state_format), 1_000, 29
    ours, theirs = (state_tensors(state, numel, first_index, fp32_weight=fp32_weight) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    wanted = {name: torch.exp2(-16 * torch.rand(numel, generator=generator)) for name in rule.names}
    with as_fp32(state, ours, first_index, read=False, keep=True) as views:
        assert list(views) == list(rule.names)
        for name, view in views.items():
            view.copy_(wanted[name])
    scales = theirs.get(SCALES)
    segment = SegmentTensors(
        master=theirs["master"],
        state=[theirs[name] for name in rule.names[1:]],
        gradient=None,
        weight=None,
        flags=SegmentFlag(0),
        scalars=None,
        rule=rule,
        state_format=state_format,
        first_index=first_index,
        master_low=theirs.get(MASTER_LOW),
        scales=None if scales is None else scales.view(-1, len(rule.state)),
    )
    reference.store_master(segment, wanted["master"])
    reference.store_state(segment, [wanted[name] for name in rule.names[1:]])
    assert all(same_bits(ours[name], theirs[name]) for name in theirs)
    before = {name: tensor.clone() for name, tensor in ours.items()}
    with as_fp32(state, ours, first_index, read=True, keep=False) as views:
        decoded_state = [reference.master_of(segment), *reference.state_of(segment)]
        assert all(same_bits(view, tensor) for view, tensor in zip(views.values(), decoded_state, strict=True))
        for name, view in views.items():
            if view is not ours[name]:
                view.zero_()
    assert all(same_bits(ours[name], before[name]) for name in before)


@SETS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_is_the_rounding_of_its_master_and_of_what_is_stored_of_it(
    instruction_set: str, dtype: torch.dtype
) -> None:
    """Beside every tie of both types; subnormals, overflows, infinities and NaN are among them."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    for tie in (0, 0x1000, 0x3000, 0x8000, 0x9000):
        beside = tie + torch.tensor([-0x81, -0x80, -0x7F, -1, 0, 1, 0x7F, 0x80, 0x81]) & 0xFFFF
        master = (upper[:, None] + beside).flatten().to(torch.int32).view(torch.float32)
        numel = master.numel()
        stored = Stored(FP24_UPPER, torch.empty(numel, dtype=torch.int16), torch.empty(numel, dtype=torch.uint8))
        weight, again = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        store_rounded(master, weight)
        stored.write(master, None, instruction_set)
        stored.read(again, instruction_set)
        assert same_bits(again, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_rounded(dtype: torch.dtype) -> None:
    wanted, out = values(0, 1_001, torch.float32, "wild"), torch.zeros(1_001, dtype=dtype)
    store_rounded(wanted, out)
    assert same_bits(out, reference.round_weight(wanted, dtype))


def test_the_callers_floating_point_mode_changes_nothing() -> None:
    """Subnormals stay, whatever a library has set."""
    wanted = torch.full((BLOCK_NUMEL,), 2.0**-140)
    bits = minifloat.split_master(wanted)
    planes = Stored(FP24_UPPER, *bits)
    roots = torch.full((BLOCK_NUMEL,), 2.0**-73)  # their squares are subnormal
    roots[0] = 2.0**-62
    codes, scales = minifloat.encode_root(roots, 0)
    expected = minifloat.decode_root(codes, scales, 0)
    out = torch.empty(BLOCK_NUMEL), torch.empty(BLOCK_NUMEL)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    try:
        planes.read(out[0])
        Stored(ROOT, codes, scales, 0).read(out[1])
    finally:
        torch.set_flush_denormal(False)
    assert 0 < expected[1] < 2.0**-126
    assert same_bits(out[0], wanted)
    assert same_bits(out[1], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first": torch.zeros(100)}, "first: torch.float32"),
        ({"first": torch.zeros(200, dtype=torch.uint8)[::2]}, "first"),
        ({"beside": torch.zeros(1, dtype=torch.uint8)}, "beside: .*not 2 elements"),
        ({"beside": torch.zeros(2, dtype=torch.int8)}, "beside: torch.int8"),
        ({"beside": None}, "without what lies beside it"),
        ({"first_index": 63}, "beside: .*not 3 elements"),
        ({"out": torch.zeros(99)}, "out: .*not 100 elements"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    """Native code sees addresses alone."""
    usual: dict[str, Any] = {
        "first": torch.zeros(100, dtype=torch.uint8),
        "beside": torch.zeros(2, dtype=torch.uint8),
        "first_index": 0,
        "out": torch.zeros(100),
    }
    given = usual | changes
    stored = Stored(SIGNED, given["first"], given["beside"], given["first_index"])
    with pytest.raises(InternalError, match=message):
        stored.read(given["out"])


def test_scales_of_a_tensor_are_its_column() -> None:
    state = EXACT_ADAMW.stored_in(COMPACT8)
    tensors = state_tensors(state, 200, 0, fp32_weight=False)
    tensors[SCALES].copy_(torch.tensor([10, 20]).repeat(4))
    for name, scale in (("exp_avg", 10), ("exp_avg_sq", 20)):
        beside = stored_in(state, name, tensors, 0).beside
        assert beside is not None
        assert beside.tolist() == [scale] * 4
    assert [stored_in(state, name, tensors, 0).format for name in state.rule.names] == [FP24_UPPER, SIGNED, ROOT]
