"""Defines what a correct update is: plain torch operations, each rounded on its own.

Every kernel of this package gives the same bits as this file, infinities and subnormals included; NaN equals
NaN whatever its payload. The update is Adam of Kingma and Ba, "Adam: A Method for Stochastic Optimization"
(ICLR 2015, algorithm 1), with weight decay as an L2 term, or decoupled as in Loshchilov and Hutter,
"Decoupled Weight Decay Regularization" (ICLR 2019, algorithm 2). Bias correction is folded into two scalars;
the order of operations is our own choice.

Invariants:
    * Only `*`, `+`, `-`, `/` and a square root on fp32 tensors, each correctly rounded. `alpha=`, `addcmul`,
      `addcdiv` and `lerp` are not used because torch may fuse them, rounding once instead of twice; torch's
      own fp32 `sqrt` is not correctly rounded on every CPU build, so `square_root` takes a detour.
    * Scalars are computed in float64 and rounded once.
    * Subnormals are kept: call this with torch's default, `torch.set_flush_denormal(False)`.

Not done here: speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from offload.dtypes import DtypeCode
from offload.protocols import NORM_BLOCK_NUMEL, SEGMENT_DTYPE, SegmentFlag

if TYPE_CHECKING:
    import numpy.typing as npt

TORCH_DTYPES: dict[DtypeCode, torch.dtype] = {code: getattr(torch, code.name.lower()) for code in DtypeCode if code}
"""The element types that weights and gradients may have."""

DTYPE_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}

FINGERPRINT_KEYS = (
    (np.uint64(0x243F6A8885A308D3), np.uint64(0x9E3779B97F4A7C15)),
    (np.uint64(0xB7E151628AED2A6B), np.uint64(0x6A09E667F3BCC909)),
)
"""The two keys of a gradient's first word, and by how much those of the next are more; see `fingerprint`."""
ROUNDED_NUMEL = 1 << 16
"""Elements that `store_rounded` rounds at once."""


class Scalars(NamedTuple):
    """What an update needs beside tensors; each value is exactly representable in float32.

    Names are those of `SEGMENT_DTYPE`'s fields.
    """

    grad_scale: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_bias2_sqrt: float
    eps: float
    step_size: float
    decay: float


def scalars(
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_scale: float = 1.0,
    maximize: bool = False,
) -> Scalars:
    """Return the scalars of one parameter's update, computed in float64 and rounded once to float32.

    Args:
        step: Number of this update of the parameter, counted from 1.
        lr: Learning rate.
        betas: Decay rates of exp_avg and exp_avg_sq, each in [0, 1).
        eps: Added to the root of the second moment after bias correction.
        weight_decay: Coefficient of the decay.
        decoupled: AdamW's decay, `p * (1 - lr * weight_decay)`, instead of the L2 term of Adam.
        grad_scale: What the gradient is multiplied by: clipping, one over the loss scale, or their product.
        maximize: Flip the sign of the gradient.

    Raises:
        ValueError: `step` is below 1 or a beta is outside [0, 1).
    """
    beta1, beta2 = betas
    if step < 1:
        raise ValueError(f"step: {step} cannot be used; updates are counted from 1")
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"betas: {betas} cannot be used; both must be in [0, 1)")
    exact = Scalars(
        grad_scale=-grad_scale if maximize else grad_scale,
        beta1=beta1,
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        inv_bias2_sqrt=1.0 / (1.0 - beta2**step) ** 0.5,
        eps=eps,
        step_size=lr / (1.0 - beta1**step),
        decay=1.0 - lr * weight_decay if decoupled else weight_decay,
    )
    with np.errstate(over="ignore"):  # beyond float32 is infinity, which the update then shows
        return Scalars(*(float(np.float32(value)) for value in exact))


@dataclass(slots=True)
class SegmentTensors:
    """One row of a segment table, as tensors.

    Attributes:
        master: fp32, shape [numel], contiguous, on CPU. Where the weight is fp32, the weight itself.
        exp_avg: fp32, shape [numel].
        exp_avg_sq: fp32, shape [numel].
        gradient: bf16, fp16 or fp32, shape [numel]; may be None if the segment is not active.
        weight: bf16 or fp16, shape [numel]; None where the weight is fp32.
        flags: What to do.
        scalars: May be None if the segment is not active.
    """

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    gradient: torch.Tensor | None
    weight: torch.Tensor | None
    flags: SegmentFlag
    scalars: Scalars | None


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


def round_weight(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 masters to the weight's dtype, to nearest even; fp16 overflows to infinity."""
    return round_to_bfloat16(master) if dtype == torch.bfloat16 else master.to(dtype)


def store_rounded(values: torch.Tensor, out: torch.Tensor) -> None:
    """Put flat fp32 values into a flat tensor of as many elements, as `round_weight` rounds them.

    In pieces that stay in a core's cache, so that memory is bounded whatever the size.
    """
    if out.dtype == torch.float32:
        out.copy_(values)
        return
    for start in range(0, values.numel(), ROUNDED_NUMEL):
        piece = values[start : start + ROUNDED_NUMEL]
        out[start : start + ROUNDED_NUMEL] = round_weight(piece, out.dtype)


def update(segment: SegmentTensors) -> None:
    """Update one segment in place, as its flags say.

    The L2 term is left out where `decay` is 0: adding 0 * p would make NaN of an infinite weight.
    Decoupled decay is always a multiplication (by 1 where weight_decay is 0).
    """
    flags = segment.flags
    p, m, v = segment.master, segment.exp_avg, segment.exp_avg_sq
    if flags & SegmentFlag.LOAD_MASTER and segment.weight is not None:
        p.copy_(segment.weight.to(torch.float32))
    if flags & SegmentFlag.ZERO_MOMENTS:
        m.zero_()
        v.zero_()
    if not flags & SegmentFlag.ACTIVE:
        return
    s = segment.scalars
    if s is None or segment.gradient is None:
        raise ValueError("an active segment needs a gradient and scalars")

    g = segment.gradient.to(torch.float32) * s.grad_scale
    if flags & SegmentFlag.DECOUPLED_DECAY:
        p.copy_(p * s.decay)
    elif s.decay != 0.0:
        g = g + p * s.decay
    m.copy_(m * s.beta1 + g * s.one_minus_beta1)
    v.copy_(v * s.beta2 + (g * g) * s.one_minus_beta2)
    denominator = square_root(v) * s.inv_bias2_sqrt + s.eps
    p.copy_(p - (m / denominator) * s.step_size)
    if segment.weight is not None:
        segment.weight.copy_(round_weight(p, segment.weight.dtype))


def update_table(segments: Iterable[SegmentTensors]) -> None:
    """Update segments in place, one after the other."""
    for segment in segments:
        update(segment)


def segment_table(segments: Sequence[SegmentTensors]) -> npt.NDArray[Any]:
    """Return the segment table (dtype `SEGMENT_DTYPE`) whose rows point at these tensors.

    The tensors must outlive every use of the table.

    Raises:
        ValueError: A tensor is not contiguous, not on the CPU, or has the wrong dtype or length.
    """
    table = np.zeros(len(segments), SEGMENT_DTYPE)
    for row, segment in zip(table, segments, strict=True):
        numel = segment.master.numel()
        for name in ("master", "exp_avg", "exp_avg_sq", "gradient", "weight"):
            tensor = getattr(segment, name)
            if tensor is None:
                continue
            state = name not in ("gradient", "weight")
            if tensor.dtype not in DTYPE_CODES or (state and tensor.dtype != torch.float32):
                raise ValueError(f"{name}: dtype {tensor.dtype} cannot be used")
            if tensor.numel() != numel or not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ValueError(f"{name}: must be a contiguous CPU tensor of {numel} elements")
            row[name] = tensor.data_ptr()
        row["numel"] = numel
        row["flags"] = int(segment.flags)
        if segment.gradient is not None:
            row["gradient_dtype"] = int(DTYPE_CODES[segment.gradient.dtype])
        row["weight_dtype"] = int(DtypeCode.FLOAT32 if segment.weight is None else DTYPE_CODES[segment.weight.dtype])
        if segment.scalars is not None:
            for name, value in segment.scalars._asdict().items():
                row[name] = value
    return table


def gradient_blocks(gradient: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return the sums of squares of a gradient's blocks: float64, shape [ceil(numel / NORM_BLOCK_NUMEL)].

    The gradient is cut at multiples of NORM_BLOCK_NUMEL elements from its own start, the last block padded
    with zeros. Squares are exact in float64 (48 bits of its 53, and well inside its range). A block's squares
    are added by halving, `x[:n] + x[n:]`, until one is left. So a block's sum is not finite exactly if one of
    its elements is not: it is the overflow flag too.
    """
    values = gradient.reshape(-1).to(torch.float32).to(torch.float64).numpy()
    rows = -(-values.size // NORM_BLOCK_NUMEL)
    x = np.zeros((rows, NORM_BLOCK_NUMEL), np.float64)
    x.reshape(-1)[: values.size] = values
    x = x * x
    n = NORM_BLOCK_NUMEL // 2
    while n >= 1:
        x = x[:, :n] + x[:, n:]
        n //= 2
    return x.reshape(-1)


def fingerprint(gradient: torch.Tensor) -> int:
    """Return 64 bits that change when any bit of a gradient does; csrc/kernels/body.h says why.

    The gradient's bytes are taken as 64-bit words (little endian), the last one padded with zeros. The word at
    position i is combined by exclusive or with each of two keys, `start + i * step`, and the two halves of both
    results are multiplied. The first product and the second one with its halves swapped are added to the fingerprint,
    modulo 2^64.
    """
    contents = gradient.contiguous().reshape(-1).view(torch.uint8).numpy()
    padded = np.zeros(-(-contents.size // 8) * 8, np.uint8)
    padded[: contents.size] = contents
    words, half = padded.view("<u8"), np.uint64(32)
    positions = np.arange(words.size, dtype=np.uint64)
    keyed = [words ^ (start + positions * step) for start, step in FINGERPRINT_KEYS]
    first, second = ((word & np.uint64(0xFFFFFFFF)) * (word >> half) for word in keyed)
    return int(np.sum(first + (second << half | second >> half), dtype=np.uint64))


def accumulate(slot: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to what its slot holds: one addition in fp32, rounded to the slot's dtype, as torch does it."""
    slot.copy_(round_weight(slot.to(torch.float32) + gradient.to(torch.float32), slot.dtype))


def sum_in_order(values: npt.NDArray[np.float64]) -> float:
    """Add float64 values one after the other, starting from 0.0 (numpy's sum and Python's add otherwise)."""
    total = 0.0
    for value in values.tolist():
        total += value
    return total


def norm_sq(blocks: Iterable[npt.NDArray[np.float64]]) -> float:
    """Return the squared L2 norm of gradients from each parameter's block sums, in parameter order."""
    total = 0.0
    for parameter in blocks:
        total += sum_in_order(parameter)
    return total
