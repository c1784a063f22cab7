"""The random bits of stochastic rounding: what they are, and that they are as good as random.

Each test of quality has a control that shows its power: bits with a small flaw, which it finds.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import Case, Placed

from offload.formats import COMPACT16
from offload.kernels import CpuUpdateKernel, instruction_sets, rounding_keys
from offload.kernels.reference import rounding
from offload.protocols import SegmentFlag

FLAGS = SegmentFlag.ACTIVE | SegmentFlag.ZERO_STATE
M64 = (1 << 64) - 1
Numbers = list[int] | np.ndarray
SIGMAS = 5.0
"""How far a statistic may be from its mean: further by chance once in 1.7 million. No sample changes between runs."""


def mixed(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & M64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M64
    return z ^ (z >> 31)


def defined_key(seed: int, number: int, update: int) -> int:
    step = 0x9E3779B97F4A7C15
    key = mixed((seed + step) & M64)
    for part in (number, update):
        key = mixed(((key ^ part) + step) & M64)
    return key


def defined_bits(key: int, index: int) -> int:
    key = mixed((key + (index >> 32) * 0x9E3779B97F4A7C15) & M64)
    x = (index * 0x9E3779B9 + key) & 0xFFFFFFFF
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15 ^ key >> 32
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def test_bits_are_what_they_are_defined_to_be():
    """Written again with Python's integers; the last line holds numbers, so that stored state stays what it means."""
    numbers, updates = np.array([0, 1, 12345, M64], np.uint64), np.array([1, 1, 7, M64], np.uint64)
    for seed in (0, 1, -1, 1 << 63, 1 << 64):
        expected = [defined_key(seed & M64, int(n), int(u)) for n, u in zip(numbers, updates, strict=True)]
        assert rounding_keys(seed, numbers, updates).tolist() == expected
    assert rounding_keys(3, 4, np.arange(5)).tolist() == [defined_key(3, 4, update) for update in range(5)]
    for first in (0, 7, (1 << 32) - 3, (5 << 32) - 1, (1 << 63) - 2, (1 << 64) - 6):
        key = defined_key(1, 2, first)
        assert rounding.random_bits(key, first, 6).tolist() == [defined_bits(key, first + i) for i in range(6)]
    assert rounding_keys(0, 1, 2).tolist() == [0x5DEF8C1F8A9E3322]
    assert rounding.random_bits(0, (1 << 32) - 1, 2).tolist() == [0x7ED47951, 0x2F69A059]


def bits_of(seed: int, number: int, update: int, first: int = 0, numel: int = 1 << 20) -> np.ndarray:
    return rounding.random_bits(int(rounding_keys(seed, number, update)[0]), first, numel).numpy().astype(np.uint32)


def halves(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return bits & 0xFFFF, bits >> 16


def chi_square(values: np.ndarray, buckets: int) -> float:
    """Return by how many standard deviations the values' spread over buckets is from that of random ones."""
    counts = np.bincount(values.astype(np.int64), minlength=buckets)
    expected = values.size / buckets
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (buckets - 1)) / (2 * (buckets - 1)) ** 0.5


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return the correlation of two rows of 16-bit numbers, in standard deviations from none."""
    x, y = (np.asarray(values, np.float64) - 32767.5 for values in (a, b))
    return float((x * y).sum() / ((65536.0**2 - 1) / 12 * x.size**0.5))


def mean(a: np.ndarray) -> float:
    """Return the mean of 16-bit numbers, in standard deviations from that of random ones."""
    return float((np.asarray(a, np.float64) - 32767.5).mean() / (((65536.0**2 - 1) / 12 / a.size) ** 0.5))


def bit_balance(bits: np.ndarray) -> float:
    """Return how far the worst of 32 bits is from being set every other time, in standard deviations."""
    shares = [(bits >> np.uint32(k) & 1).mean() for k in range(32)]
    return max(abs(share - 0.5) for share in shares) * 2 * bits.size**0.5


def samples(numel: int) -> dict[str, np.ndarray]:
    """Return rows of bits along each of the four things that they depend on, near 2^32 too."""
    keys = rounding_keys(0, 5, np.arange(1, numel + 1))
    numbers = rounding_keys(0, np.arange(numel), 9)
    return {
        "elements": bits_of(0, 0, 1, 0, numel),
        "elements around 2^32": bits_of(0, 3, 1, (1 << 32) - numel // 2, numel),
        "distant elements": along([int(rounding_keys(0, 0, 1)[0])] * numel, [i * 8191 << 20 for i in range(numel)]),
        "updates": along(keys.tolist(), [77] * numel),
        "parameters": along(numbers.tolist(), [0] * numel),
        "seeds": along([int(rounding_keys(seed, 0, 1)[0]) for seed in range(4096)], [1] * 4096),
    }


def along(keys: Numbers, indices: Numbers, step: int = rounding.COUNTER_STEP) -> np.ndarray:
    """Return the bits of pairs of a key and an index, as `defined_bits` does, all at once."""
    index = np.asarray(indices, np.uint64)
    key = rounding.mix64(np.asarray(keys, np.uint64) + (index >> np.uint64(32)) * np.uint64(rounding.INDEX_STEP))
    x = index.astype(np.uint32) * np.uint32(step) + key.astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15) ^ (key >> np.uint64(32)).astype(np.uint32)
    x *= np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


@pytest.fixture(scope="module")
def rows() -> dict[str, np.ndarray]:
    return samples(1 << 18)


def test_both_ways_to_make_samples_agree():
    key = defined_key(1, 2, 3)
    for first in (0, (9 << 32) - 50):
        ours = along([key] * 100, list(range(first, first + 100)))
        assert np.array_equal(ours, rounding.random_bits(key, first, 100).numpy())


def test_each_bit_is_set_every_other_time(rows):
    for name, bits in rows.items():
        assert bit_balance(bits) < SIGMAS, name
    flawed = rows["updates"] | (np.arange(1 << 18) % 40 == 0).astype(np.uint32)
    assert bit_balance(flawed) > SIGMAS


def test_halves_are_spread_evenly(rows):
    """Over coarse buckets and fine ones."""
    for name, bits in rows.items():
        for half in halves(bits):
            for buckets in (16, 256, 4096):
                assert abs(chi_square(half * buckets >> 16, buckets)) < SIGMAS, name
            assert abs(mean(half)) < SIGMAS, name
    half = rows["updates"] & 0xFFFF
    assert chi_square((half | (half % 50 == 0)) & 0xFF, 256) > SIGMAS
    assert abs(mean(half * 0.99)) > SIGMAS


def test_nothing_is_correlated(rows):
    """Halves of an element; neighbours at several distances along elements, updates, parameters and seeds."""
    for name, bits in rows.items():
        lower, upper = halves(bits)
        assert abs(correlation(lower, upper)) < SIGMAS, name
        for distance in (1, 2, 3, 4, 8, 16, 32, 64, 256, 1024):
            for a in (lower, upper):
                for b in (lower, upper):
                    assert abs(correlation(a[:-distance], b[distance:])) < SIGMAS, (name, distance)
    lower, upper = halves(rows["elements"])
    assert abs(correlation(lower, np.where(np.arange(lower.size) % 50 == 0, lower, upper))) > SIGMAS


def test_pairs_of_neighbours_fill_the_plane(rows):
    """Chi-square of both halves' upper bits with those of the next one: dependence that no correlation shows."""
    for name, bits in rows.items():
        for half in halves(bits):
            for shift in (0, 6, 10):
                part = half >> shift & 63
                for distance in (1, 2, 4, 16, 32, 256):
                    assert abs(chi_square(part[:-distance] * 64 + part[distance:], 4096)) < SIGMAS, (name, shift)
        lower, upper = halves(bits)
        assert abs(chi_square((lower >> 10) * 64 + (upper >> 10), 4096)) < SIGMAS, name
    worst = 0.0
    for key in rounding_keys(0, 0, np.arange(8)).tolist():
        part = along([key] * (1 << 18), list(range(1 << 18)), step=1) >> 22 & 63
        worst = max(worst, chi_square(part[:-32] * 64 + part[32:], 4096))
    assert worst > SIGMAS, "that this mixer alone is too weak is not found"


def flips(keys: np.ndarray, indices: np.ndarray, key_bits: int, index_bits: int) -> float:
    """Return how far that bit of the result which does worst is from flipping every other time with these bits."""
    others = (keys ^ np.uint64(key_bits)).tolist(), (indices ^ np.uint64(index_bits)).tolist()
    return bit_balance(along(keys.tolist(), indices.tolist()) ^ along(*others)) / 2 / keys.size**0.5


@pytest.mark.slow
def test_every_input_bit_flips_every_result_bit_every_other_time():
    """Of the index and of the key; the worst of 32 bits may be 2% away, of which 1.4% (5 deviations) is chance."""
    generator = np.random.default_rng(0)
    keys = generator.integers(0, M64, 1 << 15, np.uint64, endpoint=True)
    indices = generator.integers(0, M64, 1 << 15, np.uint64, endpoint=True)
    for bit in range(64):
        assert flips(keys, indices, 0, 1 << bit) < 0.02
        assert flips(keys, indices, 1 << bit, 0) < 0.02
    assert flips(keys, indices, 0, 0) == 0.5


def test_keys_are_all_different():
    keys = [rounding_keys(seed, np.arange(300).repeat(300), np.tile(np.arange(300), 300)) for seed in range(3)]
    assert np.unique(np.concatenate(keys)).size == 3 * 300 * 300


def bias(random: np.ndarray, fraction: int) -> float:
    """Return how far roundings of 1 and so many 65536ths of a step are from their mean, in standard deviations."""
    values = torch.full((random.size,), 0x3F800000 + fraction, dtype=torch.int32).view(torch.float32)
    rounded = rounding.round_stochastically(values, torch.from_numpy(random.astype(np.int64)))
    p = fraction / 65536
    return abs(float((rounded.view(torch.int16) == 0x3F81).double().mean()) - p) / (p * (1 - p) / random.size) ** 0.5


@pytest.mark.slow
def test_rounding_has_no_bias():
    """One element over many updates, and many elements at one: enough of them to find a bias of 0.002 of a step."""
    numel = 3_000_000
    updates = along(rounding_keys(0, 1, np.arange(numel)), np.full(numel, 5))
    for bits in (updates, bits_of(0, 0, 1, 1 << 40, numel)):
        for half in halves(bits):
            for fraction in (6553, 32768):
                assert bias(half, fraction) < SIGMAS
    assert bias(np.minimum(half + 132, 65535), 32768) > SIGMAS, "a bias of 0.002 is not found"


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_no_element_is_biased(instruction_set):
    """The kernel itself, over 2,000 updates of state that is put back: chi-square over elements, lanes included."""
    numel, updates, fraction = 80, 2000, 21845
    value = float(np.array([0x3F800000 + fraction], np.uint32).view(np.float32)[0])
    ups = [np.zeros(numel), np.zeros(numel)]
    with pytest.MonkeyPatch.context() as patch, CpuUpdateKernel(threads=1, instruction_set=instruction_set) as kernel:
        patch.setattr(Case, "state_format", COMPACT16)
        case = Case.make(numel, gradient_dtype=torch.float32, weight_dtype=None, flags=FLAGS)
        row = case.row()
        row["grad_scale"], row["decay"], row["one_minus_beta1"], row["one_minus_beta2"] = 1.0, 0.0, 1.0, 1.0 / value
        gradient = Placed(torch.full((numel,), value))
        row["gradient"] = gradient.address
        for key in rounding_keys(0, 0, np.arange(1, updates + 1)):
            row["rounding_key"] = key
            kernel.run(row)
            for up, name in zip(ups, ("exp_avg", "exp_avg_sq"), strict=True):
                up += case.placed[name].tensor().float().numpy() > value
    for up in ups:
        p = fraction / 65536
        deviations = (up - updates * p) / (updates * p * (1 - p)) ** 0.5
        assert np.abs(deviations).max() < SIGMAS
        assert abs(float((deviations**2).sum()) - numel) < SIGMAS * (2 * numel) ** 0.5
