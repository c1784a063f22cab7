"""Sums of squares and the copy on the way, against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, SIZES, Placed, norm_sq, same_bits, values

from offload.dtypes import DtypeCode
from offload.errors import InternalError
from offload.kernels import CpuUpdateKernel, blocks_numel, instruction_sets, reference
from offload.kernels.reference import DTYPE_CODES
from offload.protocols import NORM_BLOCK_NUMEL


@pytest.fixture(scope="module", params=instruction_sets())
def kernel(request):
    with CpuUpdateKernel(threads=2, instruction_set=request.param) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def large_sizes():
    return 65_536, 65_537, 200_003


def blocks_of(kernel, source: Placed, numel: int, destination: Placed | None = None) -> np.ndarray:
    blocks = torch.full((blocks_numel(numel) + 1,), -7.0, dtype=torch.float64, device=Placed.device)
    kernel.gradient_blocks(
        source.address,
        DTYPE_CODES[source.dtype],
        numel,
        blocks.data_ptr(),
        destination.address if destination else 0,
        DTYPE_CODES[destination.dtype] if destination else DtypeCode.NONE,
    )
    found = blocks.cpu().numpy()
    assert found[-1] == -7.0, "one block too many was written"
    return found[:-1]


def check(kernel, gradient: torch.Tensor, source_offset: int, copy: str, destination_offset: int) -> None:
    source = Placed(gradient, source_offset)
    destination = None
    if copy != "none":
        wanted = gradient.to(torch.float32) if copy == "widen" else gradient
        destination = Placed(torch.ones_like(wanted), destination_offset)
    blocks = blocks_of(kernel, source, gradient.numel(), destination)
    expected = reference.gradient_blocks(gradient)
    np.testing.assert_array_equal(
        blocks.view(np.int64)[~np.isnan(expected)], expected.view(np.int64)[~np.isnan(expected)]
    )
    np.testing.assert_array_equal(np.isnan(blocks), np.isnan(expected))
    assert same_bits(source.tensor(), gradient)
    if destination is not None:
        assert same_bits(destination.tensor(), wanted)


@pytest.mark.parametrize("copy", ["none", "same", "widen"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "wild"])
def test_sizes(kernel, large_sizes, dtype, kind, copy):
    for numel in (*SIZES, *large_sizes):
        check(kernel, values(numel, numel, dtype, kind), 0, copy, 0)


@settings(max_examples=60)
@given(
    numel=st.integers(0, 9000),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["plain", "wild"]),
    copy=st.sampled_from(["none", "same", "widen"]),
    offsets=st.tuples(st.integers(0, 63), st.integers(0, 63)),
    seed=st.integers(0, 2**30),
)
def test_anything_anywhere(kernel, numel, dtype, kind, copy, offsets, seed):
    check(kernel, values(seed, numel, dtype, kind), offsets[0], copy, offsets[1])


def fingerprints_of(kernel, gradients: list[torch.Tensor], offset: int = 0) -> list[int]:
    placed = [Placed(gradient, offset) for gradient in gradients]
    addresses = np.array([each.address for each in placed], np.uint64)
    sizes = np.array([gradient.numel() * gradient.element_size() for gradient in gradients], np.uint64)
    return kernel.fingerprints(addresses, sizes).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprints_are_those_of_the_reference(kernel, dtype):
    gradients = [values(numel, numel, dtype, "wild") for numel in (*SIZES, 65_536, 65_537, 600_003)]
    expected = [reference.fingerprint(gradient) for gradient in gradients]
    for offset in (0, 1, 2, 34):
        assert fingerprints_of(kernel, gradients, offset) == expected
    assert fingerprints_of(kernel, []) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copy", ["none", "same", "widen"])
def test_a_pass_returns_the_fingerprint_of_what_is_kept(kernel, dtype, copy):
    for numel in (0, 1, 5, 4095, 4097, 200_003):
        # A widened NaN may differ from its source in more than its length, so what was written counts.
        gradient = values(numel, numel, dtype, "wild")
        source, kept, code = Placed(gradient, 2), None, DtypeCode.NONE
        if copy != "none":
            kept = Placed(torch.zeros(numel, dtype=torch.float32 if copy == "widen" else dtype), 6)
            code = DTYPE_CODES[kept.dtype]
        blocks = np.empty(blocks_numel(numel) + 1)
        address = kept.address if kept else 0
        found = kernel.gradient_blocks(source.address, DTYPE_CODES[dtype], numel, blocks.ctypes.data, address, code)
        assert found == reference.fingerprint((kept or source).tensor())


def changed(gradient: torch.Tensor, how: str, generator: np.random.Generator) -> torch.Tensor:
    bits = gradient.clone().view(torch.int16 if gradient.element_size() == 2 else torch.int32)
    first, second = generator.choice(bits.numel(), 2, replace=False).tolist()
    low, high = sorted((first, second))
    sign = torch.iinfo(bits.dtype).min
    if how == "one bit":
        bits[first] ^= 1 << int(generator.integers(0, 15))
    elif how == "one sign":
        bits[first] ^= sign
    elif how == "two signs":
        bits[[first, second]] ^= sign
    elif how == "all signs":
        bits ^= sign
    elif how == "swap":
        bits[[first, second]] = bits[[second, first]]
    elif how == "zeros":
        bits[low : high + 1] = 0
    elif how == "scaled":
        bits += 1 << (7 if gradient.dtype is torch.bfloat16 else 23)  # the exponent is one more
    elif how == "rolled":
        bits = bits.roll(first or 1)
    return bits.view(gradient.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "how", ["one bit", "one sign", "two signs", "all signs", "swap", "zeros", "scaled", "rolled"]
)
def test_a_change_changes_both_halves_of_a_fingerprint(dtype, how):
    """Were the 64 bits not all at work, some of this many changes would leave 24 of them as they were."""
    generator = np.random.default_rng(1)
    gradient = values(5, 3000, dtype, "plain")
    before = reference.fingerprint(gradient)
    for _ in range(300):
        after = changed(gradient, how, generator)
        if torch.equal(after.view(torch.uint8), gradient.view(torch.uint8)):
            continue  # equal elements were swapped
        difference = before ^ reference.fingerprint(after)
        assert all(difference >> shift & 0xFFFFFF for shift in (0, 20, 40))
        gradient, before = after, before ^ difference


def test_zeros_and_nans_have_fingerprints_of_their_own():
    words = [0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F80]
    bits = [[word if at == place else 0 for at in range(5)] for word in words for place in range(5)]
    found = {reference.fingerprint(torch.from_numpy(np.array(row, np.uint16)).view(torch.bfloat16)) for row in bits}
    assert len(found) == 1 + 5 * 5


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_fingerprint(threads):
    gradients = [values(n, n, torch.bfloat16, "plain") for n in (3, 1_000_003, 0, 70_000, *([17] * 300))]
    with CpuUpdateKernel(threads=threads) as kernel:
        assert fingerprints_of(kernel, gradients) == [reference.fingerprint(gradient) for gradient in gradients]


def test_a_fingerprint_of_nothing_is_refused(kernel):
    with pytest.raises(InternalError, match="gradient 0: its address is null"):
        kernel.fingerprints(np.zeros(1, np.uint64), np.full(1, 8, np.uint64))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads):
    gradient = values(1, 500_001, torch.bfloat16, "plain")
    with CpuUpdateKernel(threads=threads) as kernel:
        check(kernel, gradient, 2, "widen", 4)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_not_finite_exactly_if_an_element_is_not(kernel, dtype, bad):
    gradient = torch.full((3 * NORM_BLOCK_NUMEL + 5,), torch.finfo(dtype).max, dtype=dtype)
    assert np.all(np.isfinite(blocks_of(kernel, Placed(gradient), gradient.numel())))
    for position in (0, NORM_BLOCK_NUMEL - 1, NORM_BLOCK_NUMEL, gradient.numel() - 1):
        poisoned = gradient.clone()
        poisoned[position] = bad
        finite = np.isfinite(blocks_of(kernel, Placed(poisoned), poisoned.numel()))
        assert np.flatnonzero(~finite).tolist() == [position // NORM_BLOCK_NUMEL]


@pytest.mark.parametrize("numel", [1000, 100_000])
def test_float_mode_of_the_caller_changes_nothing(kernel, numel):
    gradient = torch.full((numel,), 1e-41)
    torch.set_flush_denormal(True)
    try:
        blocks = blocks_of(kernel, Placed(gradient), numel)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(blocks, reference.gradient_blocks(gradient))
    assert np.all(blocks > 0)


def test_a_copy_onto_itself_is_no_copy(kernel):
    gradient = values(3, 5000, torch.float32, "wild")
    source = Placed(gradient)
    blocks_of(kernel, source, 5000, source)
    assert same_bits(source.tensor(), gradient)


def test_sums_are_in_order():
    generator = np.random.default_rng(0)
    parts = [np.exp(generator.normal(0, 20, n)) for n in (0, 1, 7, 1000)]
    for part in parts:
        assert norm_sq([part]) == reference.sum_in_order(part)
    assert norm_sq(parts) == reference.norm_sq(parts)
    assert norm_sq([]) == 0.0
    assert norm_sq([np.array([1.0, math.inf])]) == math.inf
    assert math.isnan(norm_sq([np.array([1.0, math.nan])]))


def test_norm_is_the_norm():
    gradients = [values(i, n, torch.bfloat16, "plain") for i, n in enumerate((10, 5000, 100_000))]
    ours = math.sqrt(norm_sq([reference.gradient_blocks(g) for g in gradients]))
    torchs = torch.cat(gradients).to(torch.float64).norm().item()
    assert ours == pytest.approx(torchs, rel=1e-14)


WRONG = {
    "source_dtype": (DtypeCode.NONE, 0, DtypeCode.NONE),
    "not converted": (DtypeCode.FLOAT32, 4096, DtypeCode.BFLOAT16),
    "overlap": (DtypeCode.BFLOAT16, 2, DtypeCode.BFLOAT16),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused(kernel, message):
    dtype, distance, destination_dtype = WRONG[message]
    memory, blocks = np.zeros(64, np.uint8), np.zeros(1)
    address = memory.ctypes.data
    with pytest.raises(InternalError, match=message):
        kernel.gradient_blocks(
            address, dtype, 8, blocks.ctypes.data, address + distance if distance else 0, destination_dtype
        )
    with pytest.raises(InternalError, match="source is null"):
        kernel.gradient_blocks(0, DtypeCode.FLOAT32, 8, blocks.ctypes.data)
    with pytest.raises(InternalError, match="blocks"):
        kernel.gradient_blocks(address, DtypeCode.FLOAT32, 8, blocks.ctypes.data + 1)
