"""State in one byte an element: minifloats in blocks that share a power of two. Plain torch.

A code has three bits of exponent over `mantissa_bits` of mantissa, and stands for an integer: with e the exponent and
f the mantissa, f where e is 0 and `(2^mantissa_bits + f) 2^(e - 1)` elsewhere. A value is its code's integer times
the unit of its block. A block is `BLOCK_NUMEL` elements of the unsharded parameter, counted from its start, or what
a shard has of them. Its scale s, one byte, says the unit: 2^(s - 133 - mantissa_bits), which makes the greatest code
`2 - 2^-mantissa_bits` times 2^(s - 127), the binade of the block's greatest value.

    s = 0       all values are zeros
    s = 255     all values are NaN: one of them was not finite

Beyond the range of scales: a block whose greatest value is 31/16 2^-104 or less becomes zeros; a value above
31/16 2^127, the greatest code of the greatest scale, becomes that one. -0 becomes 0. Roots have a range of their own,
in which the square of every code but 0 is neither 0 nor infinite: a block whose greatest root is 63/32 2^-64 or less,
all of whose squares are subnormal, becomes zeros; a root above 63/32 2^63, infinity too, becomes that one. So what is
finite stays finite, and a value is 0 exactly if the code of its root is.

Powers of two, so that scaling is exact, a rounding has no bias, and what was decoded is coded to the same values
again, in any block whose greatest value is no greater than in this one.

Invariants: each operation on fp32 is exact or rounded on its own, as everywhere in this package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload import formats
from offload.formats.compact8 import BLOCK_NUMEL
from offload.kernels.reference.rounding import square_root

SIGNED_MANTISSA_BITS = 4
"""Of a code with a sign, in its highest bit: values may be negative."""

ROOT_MANTISSA_BITS = 5
"""Of a code of a square root: values are never negative, and their roots are what is stored."""

NAN_SCALE = 255
LEAST_SCALES = {SIGNED_MANTISSA_BITS: 24, ROOT_MANTISSA_BITS: 64}
GREATEST_SCALES = {SIGNED_MANTISSA_BITS: 254, ROOT_MANTISSA_BITS: 190}
"""By a code's mantissa bits."""


def blocks_numel(first_index: int, numel: int) -> int:
    """Return how many blocks so many elements lie in, the first of them being that of `first_index`."""
    return formats.blocks_numel(first_index, numel, BLOCK_NUMEL)


def _in_blocks(values: torch.Tensor, first_index: int) -> torch.Tensor:
    """Return values in shape [blocks, BLOCK_NUMEL]; zeros where a block has elements that are not among them."""
    before, blocks = first_index % BLOCK_NUMEL, blocks_numel(first_index, values.numel())
    padded = values.new_zeros(blocks * BLOCK_NUMEL)
    padded[before : before + values.numel()] = values
    return padded.reshape(blocks, BLOCK_NUMEL)


def _spread(scales: torch.Tensor, first_index: int, numel: int) -> torch.Tensor:
    """Return for each of `numel` elements the scale of its block."""
    before = first_index % BLOCK_NUMEL
    return scales.to(torch.int64).repeat_interleave(BLOCK_NUMEL)[before : before + numel]


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2^exponents in fp32, made from its bits; exponents are from -126 to 127."""
    return (exponents + 127 << 23).to(torch.int32).view(torch.float32)


def encode(
    values: torch.Tensor, first_index: int, mantissa_bits: int, random: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes without signs (uint8, shape [numel]) and scales (uint8, shape [blocks]) of magnitudes.

    A magnitude between two codes becomes the upper one with the probability that makes the mean of the result the
    magnitude; without random bits, the nearer one, the upper one of two that are as near.

    Args:
        values: fp32, shape [numel].
        first_index: Index of the first one in the unsharded parameter.
        mantissa_bits: Of a code.
        random: For each, `23 - mantissa_bits` random bits, as int64; None to round to nearest.
    """
    cut, least_normal = 23 - mantissa_bits, 1 << mantissa_bits
    bits = values.contiguous().view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    greatest = _in_blocks(bits, first_index).amax(dim=1)
    # The exponent of the greatest value; one more if the value is above the greatest code of its binade.
    scales = (greatest + (1 << cut) - 1 >> 23).clamp(max=GREATEST_SCALES[mantissa_bits])
    scales = torch.where(scales < LEAST_SCALES[mantissa_bits], 0, scales)
    greatest_stored = 0x7F800000 if mantissa_bits == ROOT_MANTISSA_BITS else 0x7F7FFFFF
    scales = torch.where(greatest > greatest_stored, NAN_SCALE, scales)
    scale = _spread(scales, first_index, values.numel())
    coded = (scale > 0) & (scale < NAN_SCALE)
    unit = torch.where(coded, 133 + mantissa_bits - scale, 0)
    # In units of the block; below the least normal number codes are as far from each other as in its binade.
    y = torch.where(coded, values.abs() * _power_of_two(unit), 0.0)
    is_normal = y >= least_normal
    z = torch.where(is_normal, y, y + least_normal).view(torch.int32).to(torch.int64)
    added = (1 << cut - 1) if random is None else random
    # The least normal number has exponent 127 + mantissa_bits in an fp32, and 1 in a code.
    codes = (z + added >> cut) - (127 + mantissa_bits << mantissa_bits) + torch.where(is_normal, least_normal, 0)
    codes = torch.where(coded, codes.clamp(max=(8 << mantissa_bits) - 1), 0)
    return codes.to(torch.uint8), scales.to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor, first_index: int, mantissa_bits: int) -> torch.Tensor:
    """Return magnitudes: fp32, shape [numel], from codes without signs and the scales of their blocks."""
    code = codes.to(torch.int64)
    above = ((code >> mantissa_bits) - 1).clamp(min=0)  # binades above the least normal one
    integer = (code - (above << mantissa_bits) << above).to(torch.float32)
    scale = _spread(scales, first_index, codes.numel())
    unit = torch.where(scale > 0, scale - 133 - mantissa_bits, 0)
    return torch.where(scale == NAN_SCALE, torch.nan, integer * _power_of_two(unit))


def encode_signed(
    values: torch.Tensor, first_index: int, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of values; `random` are the 32 bits of each element, of which the upper 19 are used."""
    random = None if random is None else random >> 13
    codes, scales = encode(values, first_index, SIGNED_MANTISSA_BITS, random)
    negative = (values.contiguous().view(torch.int32) < 0) & (codes > 0)
    return codes | negative.to(torch.uint8) << 7, scales


def decode_signed(codes: torch.Tensor, scales: torch.Tensor, first_index: int) -> torch.Tensor:
    """Return the values of `encode_signed`'s codes."""
    magnitude = decode(codes & 0x7F, scales, first_index, SIGNED_MANTISSA_BITS)
    return torch.where(codes > 0x7F, -magnitude, magnitude)


def encode_root(
    roots: torch.Tensor, first_index: int, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of roots; `random` are the 32 bits of each element, of which the lower 18 are used."""
    return encode(roots, first_index, ROOT_MANTISSA_BITS, None if random is None else random & 0x3FFFF)


def decode_root(codes: torch.Tensor, scales: torch.Tensor, first_index: int) -> torch.Tensor:
    """Return the squares of what `encode_root`'s codes stand for."""
    root = decode(codes, scales, first_index, ROOT_MANTISSA_BITS)
    return root * root


def encode_state(
    state: Sequence[torch.Tensor], are_roots: Sequence[bool], first_index: int, random: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return codes (uint8, shape [numel] each) and scales (uint8, shape [blocks, number of tensors]) of fp32 state.

    Where a root is stored as 0, 0 is stored of the other tensors, too: else these would be divided by almost nothing.
    So it is where a root is infinite, as the quotient was 0.

    Args:
        state: fp32, shape [numel] each.
        are_roots: Of each, whether its square root is what is stored.
        first_index: Index of the first element in the unsharded parameter.
        random: The 32 bits of each element; None to round to nearest.
    """
    encoded = [
        encode_root(square_root(values), first_index, random)
        if is_root
        else encode_signed(values, first_index, random)
        for values, is_root in zip(state, are_roots, strict=True)
    ]
    codes = [tensor for tensor, _ in encoded]
    for number, is_root in enumerate(are_roots):  # at most one is
        if is_root:
            zeros = (codes[number] == 0) | torch.isposinf(state[number])
            for tensor, is_other in zip(codes, are_roots, strict=True):
                if not is_other:
                    tensor.masked_fill_(zeros, 0)
    return codes, torch.stack([scales for _, scales in encoded], dim=1)


def decode_state(
    codes: Sequence[torch.Tensor], are_roots: Sequence[bool], first_index: int, scales: torch.Tensor
) -> list[torch.Tensor]:
    """Return the state, in fp32, of `encode_state`'s codes and scales."""
    return [
        (decode_root if is_root else decode_signed)(tensor, scales[:, number], first_index)
        for number, (tensor, is_root) in enumerate(zip(codes, are_roots, strict=True))
    ]


def split_master(values: torch.Tensor, random: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper 24 bits of fp32 values, rounded, in two planes: int16 and uint8.

    Stochastically, away from zero with the probability that makes the mean of the result the value. Or to odd: a
    value between two becomes the one whose last bit is 1. What is rounded so can be rounded once more, to the 8 or 11
    bits of a weight, as if it had not been (S. Boldo, G. Melquiond, "Emulation of a FMA and correctly rounded sums:
    proved algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008); rounding to nearest would
    make ties. Infinity and NaN stay what they are (NaN the one NaN 0x7FC000), and a finite value beyond the greatest
    with 24 bits becomes that one.

    Args:
        values: fp32, shape [numel].
        random: The 32 bits of each element, of which 8 are made; None to round to odd.
    """
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    if random is None:
        rounded = (bits >> 8) | ((bits & 0xFF) != 0).to(torch.int64)
    else:
        inside = (bits & 0x7FFFFFFF) < 0x7F7FFF00
        rounded = bits + torch.where(inside, (random * MASTER_RANDOM & 0xFFFFFFFF) >> 24, 0) >> 8
    rounded = torch.where(torch.isnan(values), 0x7FC000, rounded)
    return (rounded >> 8).to(torch.int16), (rounded & 0xFF).to(torch.uint8)


def join_master(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of `split_master`'s planes."""
    bits = (upper.view(torch.int16).to(torch.int64) & 0xFFFF) << 16 | lower.to(torch.int64) << 8
    return torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


MASTER_RANDOM = 0x9E3779B1
"""What an element's random bits are multiplied by for those of its master: the upper 8 of the product."""
