"""Every instruction set against the reference, bit for bit."""

from __future__ import annotations

import itertools
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, SIZES, WEIGHT_DTYPES, Case, Placed, same_bits, some_scalars, table_of, unlike_scalars

from offload.dtypes import DtypeCode
from offload.errors import InternalError, SessionBrokenError
from offload.formats import MASTER_LOW
from offload.kernels import CpuUpdateKernel, instruction_sets, reference
from offload.protocols import SegmentFlag
from offload.rules import ADAMW, RULES, segment_dtype

ACTIVE, DECOUPLED = SegmentFlag.ACTIVE, SegmentFlag.DECOUPLED_DECAY
LOAD, ZERO, MATCH = SegmentFlag.LOAD_MASTER, SegmentFlag.ZERO_STATE, SegmentFlag.MATCH_MASTER
UPDATES = [
    ACTIVE | decay | extra
    for decay in (SegmentFlag(0), DECOUPLED)
    for extra in (SegmentFlag(0), LOAD, ZERO, LOAD | ZERO)
] + [ACTIVE | MATCH, ACTIVE | DECOUPLED | MATCH, ACTIVE | LOAD | MATCH | ZERO]
OTHERS = [SegmentFlag(0), DECOUPLED, LOAD, ZERO, LOAD | ZERO, MATCH, MATCH | ZERO, LOAD | MATCH]


@pytest.fixture(scope="module", params=instruction_sets())
def kernel(request):
    with CpuUpdateKernel(threads=2, instruction_set=request.param) as kernel:
        assert kernel.instruction_set == request.param
        yield kernel


def run_and_check(kernel: CpuUpdateKernel, cases: list[Case]) -> None:
    kernel.run(table_of(cases))
    for case in cases:
        case.check()


@pytest.mark.parametrize("kind", ["plain", "wild"])
@pytest.mark.parametrize("numel", SIZES)
def test_sizes(kernel, numel, kind):
    run_and_check(
        kernel,
        [
            Case.make(numel, seed=numel + 10 * i, kind=kind, gradient_dtype=g, weight_dtype=w)
            for i, (g, w) in enumerate(itertools.product(DTYPES, WEIGHT_DTYPES))
        ],
    )


@pytest.mark.parametrize(
    ("flags", "weight_decay"),
    [*((flags, 0.1) for flags in UPDATES + OTHERS), (ACTIVE, 0.0), (ACTIVE | DECOUPLED, 0.0)],
)
def test_flags(kernel, flags, weight_decay):
    scalars = some_scalars(flags, weight_decay=weight_decay)
    run_and_check(
        kernel,
        [
            Case.make(333, seed=i, kind=kind, gradient_dtype=g, weight_dtype=w, flags=flags, scalars=scalars)
            for i, (g, w, kind) in enumerate(itertools.product(DTYPES, WEIGHT_DTYPES, ("plain", "wild")))
        ],
    )


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule is not ADAMW], ids=lambda rule: rule.name)
def test_every_rule(kernel, rule):
    """With its defaults, of which many are 0, and with scalars that cannot be taken for each other."""
    kinds = [*itertools.product((1, 63), ("plain", "wild"), DTYPES, WEIGHT_DTYPES)]
    kinds += itertools.product((4097,), ("plain",), DTYPES, WEIGHT_DTYPES)  # several pieces, or blocks
    cases = [
        Case.make(numel, seed=i, kind=kind, gradient_dtype=g, weight_dtype=w, flags=UPDATES[4 * (i % 2)], rule=rule)
        for i, (numel, kind, g, w) in enumerate(kinds)
    ]
    scalars = unlike_scalars(rule)
    cases += [
        Case.make(333, kind=kind, gradient_dtype=g, weight_dtype=w, flags=flags, scalars=scalars, rule=rule)
        for kind, g, w, flags in itertools.product(("plain", "wild"), DTYPES, (torch.bfloat16, None), UPDATES[::4])
    ]
    run_and_check(kernel, cases + [Case.make(333, flags=flags, rule=rule) for flags in (*UPDATES, *OTHERS)])


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_old_values_stay_where_new_ones_go_elsewhere(kernel, rule):
    for weight_dtype, flags in itertools.product(WEIGHT_DTYPES, (ACTIVE, ACTIVE | LOAD, LOAD, ACTIVE | MATCH, MATCH)):
        case = Case.make(5000, weight_dtype=weight_dtype, flags=flags, rule=rule)
        table = case.row()
        names = [name for name in ("master", MASTER_LOW, "weight") if name in case.placed]
        old = {name: case.placed[name] for name in names}
        before = {name: old[name].tensor() for name in names}
        for name in names:
            case.placed[name] = type(old[name])(case.tensors.tensors()[name])
            table[f"new_{name}"] = case.placed[name].address
        kernel.run(table)
        case.check()
        for name in names:
            assert same_bits(old[name].tensor(), before[name])


def test_fingerprints_of_what_is_read(kernel):
    """Of gradients, and of fp32 weights that stay; added to what is there, whatever the size and the pieces."""
    kinds = itertools.product((1, 63, 1024, 1025, 70_003), DTYPES, WEIGHT_DTYPES)
    cases = [Case.make(n, seed=n, first_index=640, gradient_dtype=g, weight_dtype=w) for n, g, w in kinds]
    sums = np.arange(2 * len(cases), dtype=np.uint64).reshape(-1, 2)
    expected, olds = sums.copy(), []
    table = table_of(cases)
    table["read"] = sums.ctypes.data + sums.strides[0] * np.arange(len(cases))
    for row, case in enumerate(cases):
        expected[row, 0] += np.uint64(reference.fingerprint(case.placed["gradient"].tensor()))
        if "weight" not in case.placed:
            olds.append(old := case.placed["master"])
            expected[row, 1] += np.uint64(reference.fingerprint(old.tensor()))
            case.placed["master"] = type(old)(case.tensors.tensors()["master"])
            table["new_master"][row] = case.placed["master"].address
    kernel.run(table)
    assert (sums == expected).all()
    for case in cases:
        case.check()


@pytest.mark.parametrize(
    "offsets",
    [
        (4, 4, 4, 2, 2),
        (0, 0, 0, 1, 0),
        (0, 0, 0, 0, 32),
        (32, 32, 32, 16, 16),
        (60, 4, 8, 6, 30),
        (4, 4, 4, 0, 34),
    ],
)
def test_any_alignment(kernel, offsets):
    run_and_check(
        kernel,
        [
            Case.make(numel, seed=numel, gradient_dtype=g, weight_dtype=w, offsets=offsets)
            for numel, g, w in itertools.product((5, 63, 64, 65, 200, 4097), DTYPES, WEIGHT_DTYPES)
        ],
    )


@pytest.mark.parametrize("distance", [1 << 28, (1 << 27) + (1 << 12), (1 << 24) + (1 << 19)])
def test_tensors_that_compete_for_the_cache(kernel, distance):
    """Distances at which lines push each other out of AMD's first-level cache take another way through."""
    memory = np.frombuffer(mmap.mmap(-1, 4 * distance + (1 << 20)), np.uint8)
    for flags, gradient, weight, kind in itertools.product(UPDATES, DTYPES, WEIGHT_DTYPES, ("plain", "wild")):
        case = Case.make(2345, kind=kind, gradient_dtype=gradient, weight_dtype=weight, flags=flags)
        for i, name in enumerate(case.placed):
            tensor = case.tensors.tensors()[name]
            case.placed[name] = Placed(tensor, 60 if i < 3 else 0, memory[i * distance :])
        run_and_check(kernel, [case])


@pytest.mark.parametrize("flags", [ACTIVE | MATCH, MATCH])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_stay_where_the_weight_is_their_rounding(kernel, dtype, flags):
    """Sizes about a vector's and a piece's, anywhere; half of the weights are what their masters round to."""
    cases = []
    sizes = (0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, 3000)
    for numel, (offset, kind) in itertools.product(sizes, ((0, "wild"), (12, "plain"))):
        case = Case.make(
            numel, seed=numel, kind=kind, weight_dtype=dtype, flags=flags, offsets=(offset,) * 4 + (offset // 2,)
        )
        match_half(case)
        cases.append(case)
    run_and_check(kernel, cases)


SPECIAL_MASTERS = [
    *(float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, -1e30, 3.4e38, 65519.9, 65520.0, -65520.0, 1e-45),
    *(-1e-45, 1.17e-38, 2.0**-24, 2.0**-25, 2.0**-25 * 1.001, -(2.0**-26), 1.0, 1.0 + 2.0**-20, 1.0 + 2.0**-8),
]
SPECIAL_WEIGHTS = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 2.0**-24, -(2.0**-24), 65504.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_beside_weights_that_are_no_plain_numbers(kernel, dtype):
    """NaN is NaN, infinity is what overflows to it, -0 is not 0; each beside each, and beside its own rounding."""
    masters, weights = torch.tensor(SPECIAL_MASTERS), torch.tensor(SPECIAL_WEIGHTS).to(dtype)
    master = torch.cat([masters.repeat_interleave(len(weights)), masters])
    weight = torch.cat([weights.repeat(len(masters)), reference.round_weight(masters, dtype)])
    case = Case.make(master.numel(), weight_dtype=dtype, flags=MATCH, first_index=0)
    reference.store_master(case.tensors, master)
    stored = reference.master_of(case.tensors).clone()
    case.tensors.weight.copy_(weight)
    place_anew(case)
    run_and_check(kernel, [case])
    found = reference.master_of(case.tensors)
    alike = reference.round_weight(stored, dtype).view(torch.int16) == weight.view(torch.int16)
    assert same_bits(found, torch.where(alike, stored, weight.float()))
    assert alike[-len(masters) :].sum() >= len(masters) - 2  # compact state has rounded some
    for number, value in enumerate(stored.tolist()):
        if value != value:
            assert found[number] != found[number] or weight[number] == weight[number]


def place_anew(case: Case) -> None:
    """Have a kernel find what a case's tensors hold now."""
    for name, placed in case.placed.items():
        case.placed[name] = type(placed)(case.tensors.tensors()[name])


def match_half(case: Case) -> None:
    """Make about half of a case's weights what their masters round to; the bytes stay where they are placed."""
    weight = case.tensors.weight
    rounded = reference.round_weight(reference.master_of(case.tensors), weight.dtype)
    matched = torch.rand(weight.numel(), generator=torch.Generator().manual_seed(weight.numel())) < 0.5
    weight.copy_(torch.where(matched, rounded, weight))
    case.placed["weight"].put(weight)


def test_every_sixteen_bit_gradient_and_weight(kernel):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        case = Case.make(2**16, gradient_dtype=dtype, weight_dtype=dtype, flags=ACTIVE | LOAD)
        case.tensors.gradient.copy_(every.view(dtype))
        case.tensors.weight.copy_(every.roll(777).view(dtype))
        case = Case(case.tensors, {name: type(p)(case.tensors.tensors()[name]) for name, p in case.placed.items()})
        run_and_check(kernel, [case])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_the_weight(kernel, dtype):
    """Masters at, just below and just above every tie between two weights, subnormals included."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(torch.float32)
    halves = halves[torch.isfinite(halves)]
    step = {torch.bfloat16: 1 << 15, torch.float16: 1 << 12}[dtype]
    bits = halves.view(torch.int32)
    middles = torch.cat([bits + step + d for d in (-1, 0, 1)]).view(torch.float32)
    small = torch.arange(0, 2048, dtype=torch.float32) * 2.0**-26  # fp16's subnormals and their ties
    master = torch.cat([middles, small, -small, torch.nextafter(small, torch.tensor(1.0))])
    scalars = some_scalars(ACTIVE)._replace(step_size=0.0, decay=0.0, eps=1.0)
    case = Case.make(master.numel(), weight_dtype=dtype, flags=ACTIVE, scalars=scalars)
    case.tensors.master.copy_(master)
    case.placed["master"] = type(case.placed["master"])(master)
    run_and_check(kernel, [case])
    assert torch.equal(case.tensors.master, master), "the update was to change nothing but the weight"
    finite = torch.isfinite(master)
    assert torch.equal(case.tensors.weight[finite], master[finite].to(dtype))  # torch's own cast agrees


def test_subnormals_survive(kernel):
    """Gradients so small that v is subnormal, and weights that are."""
    for dtype in WEIGHT_DTYPES:
        case = Case.make(500, gradient_dtype=torch.float32, weight_dtype=dtype)
        for name, factor in (
            ("gradient", 1e-21),
            ("exp_avg", 1e-41),
            ("exp_avg_sq", 1e-42),
            ("master", 1e-39),
        ):
            tensor = case.tensors.tensors()[name]
            tensor.mul_(factor)
            case.placed[name] = type(case.placed[name])(tensor)
        run_and_check(kernel, [case])
        assert torch.any((case.tensors.state[1] > 0) & (case.tensors.state[1] < 1.17549435e-38))


def test_untouched_without_flags(kernel):
    cases = [Case.make(100, kind="wild", flags=flags) for flags in (SegmentFlag(0), DECOUPLED)]
    before = [{name: placed.tensor() for name, placed in case.placed.items()} for case in cases]
    kernel.run(table_of(cases))
    for case, tensors in zip(cases, before, strict=True):
        for name, placed in case.placed.items():
            assert torch.equal(placed.tensor().view(torch.uint8), tensors[name].view(torch.uint8))


def test_unread_fields_may_be_null(kernel):
    case = Case.make(100, flags=ZERO)
    row = case.row()
    for name in ("master", "gradient", "weight", "gradient_dtype", "weight_dtype"):
        row[name] = 0
    kernel.run(row)
    assert not case.placed["exp_avg"].tensor().any()
    empty = np.zeros(3, segment_dtype(ADAMW))
    empty["flags"] = int(ACTIVE)
    kernel.run(empty)
    kernel.run(np.zeros(0, segment_dtype(ADAMW)))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.slow
def test_threads_change_nothing(threads):
    """Large segments among thousands of tiny ones, some of them inactive, cut into many pieces."""
    flags = [*UPDATES, SegmentFlag(0), LOAD, ZERO]
    cases = [
        Case.make(i % 23, seed=i, flags=flags[i % len(flags)], kind="wild" if i % 3 else "plain") for i in range(2000)
    ]
    cases.insert(700, Case.make(200_001, seed=5, offsets=(4, 4, 4, 2, 2)))
    cases.insert(900, Case.make(131_072, seed=6, gradient_dtype=torch.float32))
    cases.insert(901, Case.make(100_000, seed=7, flags=SegmentFlag(0)))
    with CpuUpdateKernel(threads=threads) as kernel:
        run_and_check(kernel, cases)


@pytest.mark.parametrize("numel", [100, 200_000])
def test_float_mode_of_the_caller_changes_nothing(kernel, numel):
    """Neither on the calling thread (small tables) nor on workers that were started under it."""
    case = Case.make(numel, gradient_dtype=torch.float32)
    for name in ("gradient", "exp_avg", "exp_avg_sq", "master"):
        tensor = case.tensors.tensors()[name].mul_(1e-39)
        case.placed[name] = type(case.placed[name])(tensor)
    row = case.row()
    assert torch.set_flush_denormal(True)
    try:
        kernel.run(row)
        with CpuUpdateKernel(threads=1, instruction_set=kernel.instruction_set) as young:
            empty = np.zeros(0, segment_dtype(ADAMW))
            young.run(empty)
        assert (torch.tensor([1e-39]) * 1.0).item() == 0.0, "the caller's mode is still the caller's"
    finally:
        torch.set_flush_denormal(False)
    case.check()


def test_workers_started_while_flushing(kernel):
    case = Case.make(200_000, gradient_dtype=torch.float32)
    for name in ("gradient", "exp_avg_sq", "master"):
        tensor = case.tensors.tensors()[name].mul_(1e-39)
        case.placed[name] = type(case.placed[name])(tensor)
    torch.set_flush_denormal(True)
    try:
        with CpuUpdateKernel(threads=2, instruction_set=kernel.instruction_set) as young:
            young.run(case.row())
    finally:
        torch.set_flush_denormal(False)
    case.check()


@settings(max_examples=50 if settings.default.derandomize else 150)
@given(
    data=st.lists(
        st.tuples(
            st.integers(0, 300),
            st.sampled_from(DTYPES),
            st.sampled_from(WEIGHT_DTYPES),
            st.integers(0, 15),
            st.sampled_from(["plain", "wild"]),
            st.tuples(
                *[st.integers(0, 31).map(lambda x: 4 * x)] * 3,
                st.integers(0, 63),
                st.integers(0, 63).map(lambda x: 2 * x),
            ),
            st.integers(1, 10**6),
            st.sampled_from([0.0, 1e-30, 0.01, 1.0, 3e38, float("inf"), float("nan")]),
            st.floats(width=32),
        ),
        max_size=8,
    ),
    seed=st.integers(0, 2**30),
)
def test_any_table(kernel, data, seed):
    cases = []
    for i, (numel, gradient, weight, flags, kind, offsets, step, decay, scale) in enumerate(data):
        scalars = some_scalars(SegmentFlag(flags), step=step, grad_scale=scale)._replace(
            decay=float(np.float32(decay))
        )
        cases.append(
            Case.make(
                numel,
                seed=seed + 10 * i,
                kind=kind,
                gradient_dtype=gradient,
                weight_dtype=weight,
                flags=SegmentFlag(flags),
                scalars=scalars,
                offsets=offsets,
            )
        )
    if cases:
        run_and_check(kernel, cases)


WRONG = {
    "null master": {"master": 0},
    "null moment": {"exp_avg_sq": 0},
    "null gradient": {"gradient": 0},
    "odd state": {"exp_avg": 2},
    "odd weight": {"weight": 1},
    "gradient code": {"gradient_dtype": 7},
    "no gradient code": {"gradient_dtype": 0},
    "fp32 weight": {"weight_dtype": int(DtypeCode.FLOAT32)},
    "null weight": {"weight": 0},
    "unknown flag": {"flags": 32},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG.keys())
def test_wrong_tables_are_refused(kernel, changes):
    cases = [Case.make(10), Case.make(10)]
    table = table_of(cases)
    for name, value in changes.items():
        table[name][1] = table[name][1] + value if name in ("exp_avg", "weight") and value in (1, 2) else value
    before = cases[0].placed["master"].tensor()
    with pytest.raises(InternalError, match="segment 1"):
        kernel.run(table)
    assert torch.equal(cases[0].placed["master"].tensor(), before), "something was updated"


def test_wrong_arrays_are_refused(kernel):
    with pytest.raises(InternalError, match="dtype"):
        kernel.run(np.zeros(4, np.float32))
    with pytest.raises(InternalError, match="contiguous"):
        kernel.run(np.zeros(4, segment_dtype(ADAMW))[::2])
    with pytest.raises(InternalError, match="contiguous"):
        kernel.run(np.zeros((2, 2), segment_dtype(ADAMW)))
    with pytest.raises(InternalError, match="no queue"):
        kernel.submit(1, np.zeros(0, segment_dtype(ADAMW)))


def test_wrong_constructions_are_refused():
    with pytest.raises(ValueError, match="threads"):
        CpuUpdateKernel(threads=0)
    with pytest.raises(ValueError, match="instruction_set"):
        CpuUpdateKernel(instruction_set="mmx")


def test_closed():
    kernel = CpuUpdateKernel(threads=2)
    kernel.close()
    kernel.close()
    with pytest.raises(SessionBrokenError, match="closed"):
        kernel.run(np.zeros(0, segment_dtype(ADAMW)))
