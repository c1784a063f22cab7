"""State in `compact8` on the GPU's kernels: what an update leaves behind, bit for bit, wherever blocks begin."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compact8_cases import (  # noqa: F401
    cut_up,
    passing_through,
    test_finite_gradients_make_finite_state,
    test_values_at_both_ends,
)
from devices import CUDA, LATE_FULL
from kernel_cases import DTYPES, WEIGHT_DTYPES, Case, Placed, same_bits, some_scalars, table_of
from test_gpu import Synchronous, gpu_kernel
from test_update_kernel import (  # noqa: F401
    ACTIVE,
    DECOUPLED,
    LOAD,
    OTHERS,
    UPDATES,
    ZERO,
    test_any_alignment,
    test_any_table,
    test_every_rule,
    test_flags,
    test_masters_beside_weights_that_are_no_plain_numbers,
    test_masters_stay_where_the_weight_is_their_rounding,
    test_sizes,
    test_untouched_without_flags,
)

from offload.errors import InternalError
from offload.formats import COMPACT8, MASTER_LOW, SCALES
from offload.formats.compact8 import BLOCK_NUMEL as SHARED_NUMEL
from offload.kernels import GpuUpdateKernel, reference
from offload.kernels import gpu as kernels
from offload.kernels.gpu import BLOCK_NUMEL
from offload.kernels.reference import minifloat
from offload.protocols import SEGMENT_DTYPE
from offload.rules import ADAGRAD, ADAMW, LION, MASTER, RULES, segment_dtype

CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


@pytest.fixture(scope="module", params=["interpreter8", "torch", LATE_FULL[0], CUDA[0]])
def kernel(request):
    with pytest.MonkeyPatch.context() as patch, gpu_kernel(request.param) as kernel:
        patch.setattr(Case, "state_format", COMPACT8)
        yield kernel


def run_and_check(kernel: Synchronous, cases: list[Case]) -> None:
    """Update segments of any rules at once."""
    kernel.run(np.concatenate([case.row().view(SEGMENT_DTYPE) for case in cases]))
    for case in cases:
        case.check()


def some_case(number: int, numel: int, **settings: Any) -> Case:
    """Return a case: of consecutive numbers every rule, dtype, flag and kind of values."""
    rule = tuple(RULES.values())[number % len(RULES)]
    defaults = {
        "seed": number,
        "kind": ("plain", "wild")[number // 2 % 2],
        "gradient_dtype": DTYPES[number % 3],
        "weight_dtype": WEIGHT_DTYPES[number // 3 % 3],
        "flags": UPDATES[number % len(UPDATES)],
        "rule": rule,
    }
    return Case.make(numel, **defaults | settings)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_blocks_begin_anywhere_in_a_segment(kernel, rule):
    """Residues of the first index, each with what is left of a first block, whole ones, and part of a last one."""
    indices = [0, 1, 4, 7, 32, 33, 60, 63, (1 << 32) - 63, (1 << 32) - 32, (1 << 63) + 12345]
    cases = [
        some_case(number, 130 + 6 * number, rule=rule, first_index=first, kind=("plain", "wild")[number % 2])
        for number, first in enumerate(indices)
    ]
    run_and_check(kernel, cases)


@pytest.mark.parametrize("residue", [0, 5, 63])
def test_sizes_about_those_of_blocks_and_programs(kernel, residue):
    sizes = (1, 2, 59, 60, 63, 64, 65, 128, 960, 961, 1019, 1023, 1024, 1025, 2 * BLOCK_NUMEL - residue)
    cases = [some_case(n, numel, first_index=residue + (n << 6)) for n, numel in enumerate(sizes)]
    run_and_check(kernel, cases)


@pytest.mark.parametrize(
    ("first_index", "count"),
    [
        *((residue, 4) for residue in range(2, 64, 3)),
        *(pytest.param(residue, 12, marks=pytest.mark.full) for residue in range(64)),
    ],
)
@pytest.mark.slow
def test_every_residue(kernel, first_index, count):
    """With every rule, of other dtypes for each residue; `make test-full` has every residue, with all dtypes."""
    cases = [some_case(first_index + n, 1000 + n, first_index=first_index) for n in range(count)]
    run_and_check(kernel, cases)


@pytest.mark.parametrize("flags", OTHERS)
def test_segments_that_are_not_active(kernel, flags):
    """State is made whole in all its tensors, and nothing beside it is touched."""
    cases = [
        some_case(n, 70 + n, flags=flags, kind="wild", weight_dtype=weight, first_index=40, rule=rule)
        for n, (rule, weight) in enumerate(itertools.product((ADAMW, LION), WEIGHT_DTYPES))
    ]
    run_and_check(kernel, cases)


@pytest.mark.parametrize("first_index", [0, 37, (1 << 32) - 1000, (1 << 63) - 700])
def test_cuts_between_blocks_change_nothing(kernel, first_index):
    """Rows, and programs, on both sides of a multiple of 2^32; the reference has the whole."""
    begin = -first_index % SHARED_NUMEL
    for number, cuts in enumerate(([0, 2, 16], [1, 17, 20])):
        case = some_case(4 * number, 1500, first_index=first_index, kind="plain", flags=ACTIVE)
        starts = sorted({0, *(begin + SHARED_NUMEL * cut for cut in cuts)})
        kernel.run(cut_up(case, starts))
        case.check()


def test_every_code_is_read_and_written_again(kernel):
    """All codes with scales from the least to the greatest, and NaN's, in an update that leaves state alone."""
    scales = torch.tensor([0, 24, 25, 126, 127, 133, 134, 135, 253, 254, 255], dtype=torch.uint8)
    for rule in (ADAMW, ADAGRAD, LION):
        case = Case.make(256 * len(scales), rule=rule, flags=ACTIVE, first_index=0)
        unchanged = {"beta1": 1.0, "beta2": 1.0, "one_minus_beta1": 0.0, "one_minus_beta2": 0.0}
        known = {name: value for name, value in unchanged.items() if name in case.tensors.scalars._fields}
        case.tensors.scalars = case.tensors.scalars._replace(grad_scale=0.0, decay=0.0, **known)
        for codes in case.tensors.state:
            codes.copy_(CODES.repeat(len(scales)))
            codes[::SHARED_NUMEL] = 0x7F if rule is LION or codes is not case.tensors.state[-1] else 0xFF
            codes[:256] = 0
        case.tensors.scales.copy_(scales.repeat_interleave(4)[:, None].expand_as(case.tensors.scales))
        before = reference.state_of(case.tensors)
        case.placed |= {name: Placed(case.tensors.tensors()[name]) for name in (*rule.names[1:], SCALES)}
        run_and_check(kernel, [case])
        after = reference.state_of(case.tensors)
        if rule is not ADAMW:  # there, what has a root of 0 beside it becomes 0
            for old, new in zip(before, after, strict=True):
                finite = torch.isfinite(old)
                assert torch.equal(new[finite], old[finite])


def test_scales_follow_the_greatest_of_a_block(kernel):
    """At, just below and just above each value from which the next scale is needed, of either kind of code."""
    edges = []
    for exponent, mantissa_bits in itertools.product((0, 20, 23, 24, 25, 100, 126, 253, 254), (4, 5)):
        edge = (exponent + 2 << 23) - (1 << 23 - mantissa_bits)  # (2 - 2^-mantissa_bits) * 2^exponent
        edges += [max(0, min(edge + near, 0x7F7FFFFF)) for near in (-1, 0, 1)]
    greatest = torch.tensor(edges, dtype=torch.int32).view(torch.float32)
    spread = torch.rand(len(edges), SHARED_NUMEL, generator=torch.Generator().manual_seed(0))
    spread[:, 17] = 1.0
    values = greatest[:, None] * spread * torch.where(torch.arange(SHARED_NUMEL) % 3 == 1, -1.0, 1.0)
    case, roots = passing_through(values.reshape(-1)), passing_through(values.abs().sqrt().reshape(-1))
    run_and_check(kernel, [case, roots])
    assert {0, 24, 25, 26, 254} <= set(case.tensors.scales[:, 0].tolist())


def test_what_is_not_finite_makes_nan_of_its_block_alone(kernel):
    values = torch.full((5 * SHARED_NUMEL,), 0.5)
    values[[10, 80, 200]] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    case = passing_through(values, 59)  # blocks of the segment begin at its elements 5, 69, 133, ...
    run_and_check(kernel, [case])
    wrong = [False, True, True, False, True, False]
    assert (case.tensors.scales[:, 0] == minifloat.NAN_SCALE).tolist() == wrong
    scales, codes = case.placed[SCALES].tensor(), case.placed["exp_avg"].tensor()
    assert scales[wrong, 1].tolist() == [190, 190, 255]
    assert torch.equal(codes[5:133], torch.zeros(128, dtype=torch.uint8))
    assert torch.all(codes[133:197] != 0)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16])
def test_masters_that_are_special(kernel, weight_dtype):
    """Rounded beside infinity, to NaN that is one number, and below the least normal number."""
    bits = [0, 0x7F7FFE00, 0x7F7FFF00, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000, 1, 0x80, 0xFF]
    masters = torch.tensor(bits, dtype=torch.int32)
    masters = torch.cat([masters, masters | -(1 << 31)]).view(torch.float32).repeat(30)
    numel = masters.numel()
    scalars = some_scalars(ACTIVE)._replace(decay=0.0, one_minus_beta1=1.0, beta1=0.0, one_minus_beta2=0.0, beta2=0.0)
    # exp_avg_sq is 0, and so the master moves by the gradient: to each of the numbers, from near it or from 0.
    scalars = scalars._replace(grad_scale=1.0, eps=1.0, step_size=1.0)
    case = Case.make(numel, gradient_dtype=torch.float32, weight_dtype=weight_dtype, flags=ACTIVE, scalars=scalars)
    near = torch.where(masters.abs() < 1, torch.zeros(numel), masters)
    case.tensors.gradient.copy_(torch.nan_to_num(near - masters, 0.0) + masters.abs().clamp(max=1.0))
    reference.store_master(case.tensors, near)
    case.placed |= {name: Placed(case.tensors.tensors()[name]) for name in (MASTER, MASTER_LOW, "gradient")}
    run_and_check(kernel, [case])


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_old_values_stay_where_new_ones_go_elsewhere(kernel, rule):
    for weight_dtype, flags in itertools.product((torch.float16, None), (ACTIVE, ACTIVE | LOAD, LOAD)):
        case = Case.make(100, weight_dtype=weight_dtype, flags=flags, rule=rule, first_index=9)
        table = case.row()
        names = ["master", *(["weight", MASTER_LOW] if weight_dtype is not None else [])]
        old = {name: case.placed[name] for name in names}
        before = {name: old[name].tensor() for name in names}
        for name in names:
            case.placed[name] = Placed(case.tensors.tensors()[name], 2)
            table[f"new_{name}"] = case.placed[name].address
        kernel.run(table)
        case.check()
        for name in names:
            assert same_bits(old[name].tensor(), before[name])


def test_unread_fields_may_be_null(kernel):
    zeroed, loaded = Case.make(100, flags=ZERO, kind="wild"), Case.make(100, flags=LOAD)
    table = table_of([zeroed, loaded])
    for name in ("master", MASTER_LOW, "gradient", "weight", "gradient_dtype", "weight_dtype"):
        table[name][0] = 0
    for name in ("gradient", "gradient_dtype", "exp_avg", "exp_avg_sq", SCALES):
        table[name][1] = 0
    kernel.run(table)
    for name in ("exp_avg", "exp_avg_sq", SCALES):
        assert not zeroed.placed[name].tensor().any()
    loaded.check()
    whole = Case.make(100, weight_dtype=None)
    row = whole.row()
    assert not row[MASTER_LOW].any()
    kernel.run(row)
    whole.check()
    empty = np.zeros(3, segment_dtype(ADAMW))
    empty["flags"], empty["state_format"] = int(ACTIVE), COMPACT8.code
    kernel.run(empty)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({SCALES: 0}, "scales is null"),
        ({MASTER_LOW: 0}, "master_low is null"),
        ({"exp_avg": 0}, "state 0 is null"),
        ({"master": 1}, "master is not aligned to 2 bytes"),
        ({"state_format": 3}, "unknown state_format 3"),
    ],
)
def test_wrong_tables_are_refused(kernel, changes, message):
    cases = [Case.make(10), Case.make(10)]
    table = table_of(cases)
    for name, value in changes.items():
        table[name][1] = value
    before = {name: placed.tensor() for name, placed in cases[0].placed.items()}
    with pytest.raises(InternalError, match=f"segment 1: {message}"):
        kernel.run(table)
    for name, placed in cases[0].placed.items():
        assert same_bits(placed.tensor(), before[name]), "something was updated"


@pytest.mark.parametrize("residue", [0, 4, 37])
def test_what_is_aligned_where_blocks_begin_is_read_in_vectors(kernel, residue, monkeypatch):
    """Programs begin there, so that an element's own address says nothing."""
    launched: list[tuple[int, dict[str, Any]]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *arguments, **constants: launched.append((grid[0], constants))

    recorders = SimpleNamespace(update=Recorder(), triton=SimpleNamespace(JITFunction=()))
    monkeypatch.setattr(kernels, "import_module", lambda name: recorders)
    recording = GpuUpdateKernel("cpu")
    items = {"master": 2, MASTER_LOW: 1, "exp_avg": 1, "exp_avg_sq": 1, "gradient": 2, "weight": 2}
    case = Case.make(BLOCK_NUMEL, first_index=residue, flags=ACTIVE)
    row = case.row()
    for name, item in items.items():
        row[name] = (1 << 40) + residue * item
    recording.update(recording.send(row))
    assert [(count, found["ALIGNED"]) for count, found in launched] == [(1 + (residue > 0), True)]
    for name, item in items.items():
        launched.clear()
        changed = row.copy()
        changed[name] += np.uint64(item)
        recording.update(recording.send(changed))
        assert [found["ALIGNED"] for _, found in launched] == [False], name
