"""Roots and casts that are correctly rounded on every CPU, and stochastic rounding, in plain torch.

Random bits come from a counter, never from a generator. They depend on the seed, the number of the parameter, the
count of its updates and the index of the element in the unsharded parameter, and on nothing else: not on shards,
subgroups, tiles, threads or the order of work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

INDEX_STEP = 0x9E3779B97F4A7C15
"""What a key grows by where the upper half of an element's index grows by 1."""

COUNTER_STEP = 0x9E3779B9
"""What an element's counter grows by where the lower half of its index grows by 1."""


def square_root(values: torch.Tensor) -> torch.Tensor:
    """Return fp32 square roots, correctly rounded.

    torch's own root of fp32 tensors is one bit off for one value in six where it calls a vector library (seen
    with 2.13.0 on CPU). The root of an fp32 value is at least 2^-51 of itself away from any number halfway
    between two fp32 values, so a float64 root, even one off by its last bit, rounds to the right fp32 value.
    """
    return values.to(torch.float64).sqrt().to(torch.float32)


def round_to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16, to nearest even, by integer arithmetic: subnormals stay, NaN stays NaN."""
    bits = values.contiguous().view(torch.int32)
    # Bf16 is the upper half of an fp32. Adding 0x7FFF carries into it if the lower half is above 0x8000, the tie; at
    # the tie itself only with 1 more, which is added where the upper half is odd.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = torch.where(torch.isnan(values), torch.full_like(bits, 0x7FC0), rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)


def mix64(values: Any) -> npt.NDArray[np.uint64]:
    """Mix 64-bit integers: every bit of the result depends on every bit of the value, and the mapping is one to one.

    The last stage of splitmix64 with the constants of D. Stafford's variant 13 (G. Steele, D. Lea, C. Flood, "Fast
    Splittable Pseudorandom Number Generators", OOPSLA 2014, section 4).
    """
    z: npt.NDArray[np.uint64] = np.atleast_1d(np.asarray(values, np.uint64))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def rounding_keys(seed: int, numbers: Any, updates: Any) -> npt.NDArray[np.uint64]:
    """Return a key for each parameter's update: random bits are made of this key and an element's index alone.

    Args:
        seed: Any integer, modulo 2^64.
        numbers: The number of each parameter, below 2^64.
        updates: The number of each one's update, counted from 1; below 2^64.

    Returns:
        One key for each parameter; the keys of one parameter's updates are all different.
    """
    step = np.uint64(INDEX_STEP)
    keys = mix64(np.array([seed % (1 << 64)], np.uint64) + step)
    for part in (numbers, updates):
        keys = mix64((keys ^ np.asarray(part, np.uint64)) + step)
    return keys


def random_bits(key: int, first_index: int, numel: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return 32 random bits for each of consecutive elements: int64, shape [numel].

    They are a hash of the key and of the element's 64-bit index. The upper half of the index changes the key, by
    `mix64`; it is the same for all elements of a round of the loop. The lower half is multiplied by a constant (32
    bits of the golden ratio), so that neighbours differ in all bits, and enters a mixer, C. Wellons's "lowbias32"
    ("Prospecting for Hash Functions", 2018). The lower half of the key is added before the mixer; the upper half
    comes in between its two multiplications, so that no key's bits are those of another key shifted.

    Without the constant the mixer is too weak: 6 bits of an element tell something of those of the 32nd element after
    it (chi-square, 27 standard deviations over 2^18 elements; with it 3.4, the greatest of 864 tests).

    Args:
        key: Of the parameter's update, from `rounding_keys`.
        first_index: Index of the first element in the unsharded parameter.
        numel: How many elements.
        device: Where they are made.
    """
    bits = torch.empty(numel, dtype=torch.int64, device=device)
    done = 0
    while done < numel:
        upper, lower = divmod(first_index + done, 1 << 32)  # the halves of the index
        count = min(numel - done, (1 << 32) - lower)
        # The halves of the key that is changed by the index:
        high, low = divmod(int(mix64((key + upper * INDEX_STEP) % (1 << 64))[0]), 1 << 32)
        x = torch.arange(lower, lower + count, dtype=torch.int64, device=device) * COUNTER_STEP + low & 0xFFFFFFFF
        x = x ^ (x >> 16)
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x = x ^ (x >> 15) ^ high
        x = x * 0x846CA68B & 0xFFFFFFFF
        bits[done : done + count] = x ^ (x >> 16)
        done += count
    return bits


def round_stochastically(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16, up or down in magnitude at random, so that the mean of the results is the value.

    `random` (integers below 2^16) is added to the lower 16 bits of the fp32, which are then cut off: a carry rounds
    away from zero. What is a bf16 already, zeros and infinities included, stays what it is. NaN becomes the one NaN
    0x7FC0. A finite value beyond the greatest bf16 becomes that one, so none becomes infinite.
    """
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    inside = values.abs() < torch.finfo(torch.bfloat16).max
    rounded = bits + torch.where(inside, random, 0) >> 16
    rounded = torch.where(torch.isnan(values), 0x7FC0, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)
