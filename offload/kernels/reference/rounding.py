"""Roots and casts that are correctly rounded on every CPU, in plain torch."""

from __future__ import annotations

import torch


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
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = torch.where(torch.isnan(values), torch.full_like(bits, 0x7FC0), rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)
