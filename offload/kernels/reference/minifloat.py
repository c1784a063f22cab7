"""State in one byte an element: minifloats in blocks that share a power of two. Plain torch.

A code has three bits of exponent, e, over `mantissa_bits` of mantissa, f. It stands for an integer: f where e is 0,
and `(2^mantissa_bits + f) 2^(e - 1)` elsewhere. A value is its code's integer times the unit of its block.

A block is `BLOCK_NUMEL` elements of the unsharded parameter, counted from its start, or what a shard has of them. Its
scale s, one byte, is the exponent of the block's greatest value as an fp32 has it (127 for values from 1 to 2). It is
one more if that value is above all codes. The unit is 2^(s - 133 - mantissa_bits). So the greatest code, of integer
`(2 - 2^-mantissa_bits) 2^(mantissa_bits + 6)`, stands for `(2 - 2^-mantissa_bits) 2^(s - 127)`.

    s = 0       all values are zeros
    s = 255     all values are NaN: one of them was NaN, or infinite and no root

Scales have a range. Of values: a block whose greatest value is 31/16 2^-104 or less becomes zeros; a value above
31/16 2^127, the greatest code of the greatest scale, becomes that one. -0 becomes 0.

Of roots it is a narrower range, in which the square of every code but 0 is neither 0 nor infinite: a block whose
greatest root is 63/32 2^-64 or less, all of whose squares are subnormal, becomes zeros; a root above 63/32 2^63,
infinity too, becomes that one. So what is finite stays finite, and a decoded value is 0 if, and only if, the code of
its root is.

Units are powers of two, so that scaling is exact, a rounding has no bias, and what was decoded is coded to the same
values again, in any block whose greatest value is no greater than in this one.

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
"""The range of scales, but for 0 and `NAN_SCALE`, by a code's mantissa bits."""


def blocks_numel(first_index: int, numel: int) -> int:
    """Return how many blocks `numel` elements lie in, of which the first has the index `first_index`."""
    return formats.blocks_numel(first_index, numel, BLOCK_NUMEL)


def _in_blocks(values: torch.Tensor, first_index: int) -> torch.Tensor:
    """Return values in shape [blocks, BLOCK_NUMEL]; zeros in the place of a block's elements that are not given."""
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
    """Return codes without signs (uint8, shape [numel]) and scales (uint8, shape [blocks]) of values' magnitudes.

    A magnitude between two codes becomes the upper one with the probability that makes the mean of the result the
    magnitude. Without random bits it becomes the nearer one, or the upper one of two that are as near.

    Args:
        values: fp32, shape [numel].
        first_index: Index of the first value in the unsharded parameter.
        mantissa_bits: Of a code: `SIGNED_MANTISSA_BITS` or `ROOT_MANTISSA_BITS`.
        random: For each value, `23 - mantissa_bits` random bits, as int64; None to round to nearest.
    """
    # `cut` bits of an fp32 mantissa are cut off. `least_normal` is the integer of the first code with exponent 1.
    cut, least_normal = 23 - mantissa_bits, 1 << mantissa_bits
    # Magnitudes as the bits of fp32 values, which are in the order of the values; infinity and NaN are the greatest.
    bits = values.contiguous().view(torch.int32).to(torch.int64) & 0x7FFFFFFF
    greatest = _in_blocks(bits, first_index).amax(dim=1)
    # The exponent of the greatest value; one more if the value is above the greatest code of its binade.
    scales = (greatest + (1 << cut) - 1 >> 23).clamp(max=GREATEST_SCALES[mantissa_bits])
    scales = torch.where(scales < LEAST_SCALES[mantissa_bits], 0, scales)
    # An infinite root is stored as the greatest code; any other infinity, and NaN, makes the block NaN.
    greatest_stored = 0x7F800000 if mantissa_bits == ROOT_MANTISSA_BITS else 0x7F7FFFFF
    scales = torch.where(greatest > greatest_stored, NAN_SCALE, scales)
    scale = _spread(scales, first_index, values.numel())
    coded = (scale > 0) & (scale < NAN_SCALE)
    # The exponent of one over the block's unit; y is the magnitude in units of the block.
    unit = torch.where(coded, 133 + mantissa_bits - scale, 0)
    y = torch.where(coded, values.abs() * _power_of_two(unit), 0.0)
    is_normal = y >= least_normal
    # Below the least normal number codes are whole numbers, as far from each other as in its binade. The addition
    # brings y to that binade, where the upper bits of an fp32 are those of a code.
    z = torch.where(is_normal, y, y + least_normal).view(torch.int32).to(torch.int64)
    # Before the lower bits are cut off, random bits, or half of 2^cut, are added to them: a carry rounds up.
    added = (1 << cut - 1) if random is None else random
    # The least normal number has exponent 127 + mantissa_bits in an fp32, and 1 in a code; what was brought to its
    # binade has 0.
    codes = (z + added >> cut) - (127 + mantissa_bits << mantissa_bits) + torch.where(is_normal, least_normal, 0)
    codes = torch.where(coded, codes.clamp(max=(8 << mantissa_bits) - 1), 0)
    return codes.to(torch.uint8), scales.to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor, first_index: int, mantissa_bits: int) -> torch.Tensor:
    """Return magnitudes: fp32, shape [numel], from codes without signs and the scales of their blocks."""
    code = codes.to(torch.int64)
    above = ((code >> mantissa_bits) - 1).clamp(min=0)  # binades above the least normal one: e - 1
    # (2^mantissa_bits + f) 2^above, as the code without `above` has exponent 1; f where the exponent is 0.
    integer = (code - (above << mantissa_bits) << above).to(torch.float32)
    scale = _spread(scales, first_index, codes.numel())
    unit = torch.where(scale > 0, scale - 133 - mantissa_bits, 0)
    return torch.where(scale == NAN_SCALE, torch.nan, integer * _power_of_two(unit))


def encode_signed(
    values: torch.Tensor, first_index: int, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, each with a sign in its highest bit, and scales of values.

    `random` are the 32 bits of each element, of which the upper 19 are used. A code of 0 has no sign.
    """
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

    If one is a root, an update divides the others by it. Where it is stored as 0, so are the others: they would be
    divided by almost nothing. Where it is infinite, too: the quotient was 0, but an infinite root is stored as a
    finite number.

    Args:
        state: fp32, shape [numel] each.
        are_roots: For each tensor, whether its square root is what is stored.
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
    """Return fp32 values rounded to their upper 24 bits, in two planes: the upper 16 (int16) and the lower 8 (uint8).

    With random bits, values are rounded up or down in magnitude so that the mean of the results is the value. Without
    them, values are rounded to odd: a value between two becomes the one whose last bit is 1. What is rounded to odd
    can be rounded once more, to the 8 or 11 bits of a weight, as if it had not been (S. Boldo, G. Melquiond,
    "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on
    Computers 57(4), 2008); rounding to nearest would make ties.

    Infinity and NaN stay what they are (NaN the one NaN 0x7FC000), and a finite value beyond the greatest with 24
    bits becomes that one.

    Args:
        values: fp32, shape [numel].
        random: The 32 bits of each element, of which 8 others are made (`MASTER_RANDOM`); None to round to odd.
    """
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    if random is None:
        rounded = (bits >> 8) | ((bits & 0xFF) != 0).to(torch.int64)
    else:
        # Below the greatest value with 24 bits; from there on a carry could make infinity.
        inside = (bits & 0x7FFFFFFF) < 0x7F7FFF00
        rounded = bits + torch.where(inside, (random * MASTER_RANDOM & 0xFFFFFFFF) >> 24, 0) >> 8
    rounded = torch.where(torch.isnan(values), 0x7FC000, rounded)
    return (rounded >> 8).to(torch.int16), (rounded & 0xFF).to(torch.uint8)


def join_master(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of `split_master`'s planes."""
    bits = (upper.view(torch.int16).to(torch.int64) & 0xFFFF) << 16 | lower.to(torch.int64) << 8
    # As a signed number of 32 bits, so that it lies within the range of int32.
    return torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


MASTER_RANDOM = 0x9E3779B1
"""What an element's random bits are multiplied by, modulo 2^32. The upper 8 bits of the product round its master."""
