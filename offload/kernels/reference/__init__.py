"""Defines what a correct update is: plain torch operations, each rounded on its own.

Every kernel of this package gives the same bits as this folder, infinities and subnormals included; NaN equals
NaN whatever its payload. What all rules share is here, the arithmetic of each in a file of its own.

Invariants:
    * Only `*`, `+`, `-`, `/` and a square root on fp32 tensors, each correctly rounded. `alpha=`, `addcmul`,
      `addcdiv` and `lerp` are not used because torch may fuse them, rounding once instead of twice; torch's
      own fp32 `sqrt` is not correctly rounded on every CPU build, so `square_root` takes a detour.
    * Scalars are computed in float64 and rounded once.
    * Subnormals are kept: call this with torch's default, `torch.set_flush_denormal(False)`.

Not done here: speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offload.dtypes import DtypeCode
from offload.errors import known
from offload.formats import COMPACT8, COMPACT16, EXACT, MASTER_LOW, SCALES, StateFormat, StateSpec, StateTensor
from offload.kernels.reference import adagrad, adam, lion, minifloat, sgd
from offload.kernels.reference.rounding import random_bits, round_stochastically, round_to_bfloat16
from offload.kernels.reference.rounding import rounding_keys as rounding_keys
from offload.kernels.reference.rounding import square_root as square_root
from offload.kernels.table import segment_table as kernel_table
from offload.protocols import NORM_BLOCK_NUMEL, SegmentFlag
from offload.rules import ADAMW, MASTER, UpdateRule, segment_dtype
from offload.rules.adam import Scalars as Scalars
from offload.rules.adam import scalars as scalars

if TYPE_CHECKING:
    import numpy.typing as npt

TORCH_DTYPES: dict[DtypeCode, torch.dtype] = {code: getattr(torch, code.name.lower()) for code in DtypeCode if code}
"""The element types that weights and gradients may have."""

DTYPE_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}

FINGERPRINT_KEYS = (
    (0x243F6A8885A308D3, 0x9E3779B97F4A7C15 - (1 << 64)),
    (0xB7E151628AED2A6B - (1 << 64), 0x6A09E667F3BCC909),
)
"""Two sequences of keys for the words of a gradient, each as (start, step): the key of word i is `start + i * step`
modulo 2^64. Written as int64, which torch can multiply; see `fingerprint_parts`."""

_CHANGES: dict[str, Callable[[Any, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]] = {
    "adam": adam.change,
    "lion": lion.change,
    "adagrad": adagrad.change,
    "sgd": sgd.change,
}
"""By rule: a function that returns what is subtracted from the master.

It takes the rule's scalars, the scaled gradient, and the state in fp32, which it updates in place.
"""


@dataclass(slots=True)
class SegmentTensors:
    """One row of a segment table, as tensors, all of them on one device.

    Attributes:
        master: fp32, shape [numel], contiguous. Where the weight is fp32, the weight itself. int16 where it is the
            upper plane of two; of the weight's own dtype where the rule's masters are copies of weights.
        state: fp32, or what `state_format` says, shape [numel] each, in the order of `rule.state`.
        gradient: bf16, fp16 or fp32, shape [numel]; may be None if the segment is not active.
        weight: bf16 or fp16, shape [numel]; None where the weight is fp32.
        flags: What an update does to the segment.
        scalars: What `rule.row` returns; may be None if the segment is not active.
        rule: The update rule.
        state_format: How the state is stored.
        rounding_key: Of this update, from `rounding_keys`; used only where the format rounds.
        first_index: Index of the first element in the unsharded parameter; used only where the format rounds.
        master_low: The lower plane of a master in two: uint8, shape [numel].
        scales: Where elements share them: uint8, shape [blocks, number of state tensors]. Of a class's rule, its
            packed state, so that it is zeroed with the rest.
    """

    master: torch.Tensor
    state: Sequence[torch.Tensor]
    gradient: torch.Tensor | None
    weight: torch.Tensor | None
    flags: SegmentFlag
    scalars: Any
    rule: UpdateRule = ADAMW
    state_format: StateFormat = EXACT
    rounding_key: int = 0
    first_index: int = 0
    master_low: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are not None, by their names in a segment table."""
        named = zip(self.rule.names, (self.master, *self.state), strict=True)
        others = {"gradient": self.gradient, "weight": self.weight, MASTER_LOW: self.master_low, SCALES: self.scales}
        return dict(named) | {name: tensor for name, tensor in others.items() if tensor is not None}


def round_weight(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 masters to the weight's dtype, to nearest even; fp16 overflows to infinity."""
    return round_to_bfloat16(master) if dtype == torch.bfloat16 else master.to(dtype)


def matched(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return each fp32 master that rounds to its 16-bit weight, and in the place of all others the weight in fp32.

    Bits are compared, so -0 is not 0. An infinite fp16 weight matches any master that overflows to it. Where the
    weight is NaN, the result is NaN either way.
    """
    is_alike = round_weight(master, weight.dtype).view(torch.int16) == weight.view(torch.int16)
    return torch.where(is_alike, master, weight.to(torch.float32))


def update(segment: SegmentTensors) -> None:
    """Update one segment in place, as its flags say.

    First the master is taken from the weight, and the state zeroed, where a flag asks for it. Then, if the segment is
    active, its rule updates master and state, and the weight becomes the rounded master.

    The L2 term is left out where `decay` is 0: adding 0 * p would make NaN of an infinite weight.
    Decoupled decay is always a multiplication (by 1 where weight_decay is 0).

    Compact state is widened, exactly, before the update, and rounded after it. The master's change is computed from
    the new state before that is rounded, the weight from the master as it is stored.
    """
    flags, s = segment.flags, segment.scalars
    if segment.weight is not None and flags & SegmentFlag.LOAD_MASTER:
        store_master(segment, segment.weight.to(torch.float32))
    elif segment.weight is not None and flags & SegmentFlag.MATCH_MASTER:
        store_master(segment, matched(master_of(segment).to(torch.float32), segment.weight))
    if flags & SegmentFlag.ZERO_STATE:
        for tensor in segment.state:
            tensor.zero_()
        if segment.scales is not None:
            segment.scales.zero_()
    if not flags & SegmentFlag.ACTIVE:
        return
    if s is None or segment.gradient is None:
        raise ValueError("an active segment needs a gradient and scalars")

    g = segment.gradient.to(torch.float32) * s.grad_scale
    p = master_of(segment)
    if flags & SegmentFlag.DECOUPLED_DECAY:
        p = p * s.decay
    elif s.decay != 0.0:
        g = g + p * s.decay
    state = state_of(segment)
    p = p - _CHANGES[segment.rule.name](s, g, state)
    random = random_of(segment)
    store_state(segment, state, random)
    p = store_master(segment, p, random)
    if segment.weight is not None:
        segment.weight.copy_(round_weight(p, segment.weight.dtype))


def random_of(segment: SegmentTensors) -> torch.Tensor | None:
    """Return the `random_bits` of a segment's update; None where its format does not round."""
    if not segment.state_format.rounds:
        return None
    return random_bits(segment.rounding_key, segment.first_index, segment.master.numel(), segment.master.device)


def master_of(segment: SegmentTensors) -> torch.Tensor:
    """Return a segment's master in fp32."""
    if segment.master_low is None:
        return segment.master
    return minifloat.join_master(segment.master, segment.master_low)


def store_master(segment: SegmentTensors, values: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """Store a new master in a segment's tensors as its format says; return it as it was stored, in fp32.

    Args:
        segment: The segment.
        values: The new master: fp32, shape [numel]; may be `segment.master` itself, if that was changed in place.
        random: From `random_bits`; None to round to odd.
    """
    if segment.master_low is None:
        if values is not segment.master:
            segment.master.copy_(values)
        return values
    upper, lower = minifloat.split_master(values, random)
    segment.master.copy_(upper)
    segment.master_low.copy_(lower)
    return minifloat.join_master(upper, lower)


def state_of(segment: SegmentTensors) -> list[torch.Tensor]:
    """Return copies of a segment's state in fp32."""
    load, _ = _FORMATS[segment.state_format]
    return load(segment)


def store_state(segment: SegmentTensors, state: Sequence[torch.Tensor], random: torch.Tensor | None = None) -> None:
    """Put new state, in fp32, into a segment's tensors as its format says.

    Args:
        segment: The segment.
        state: fp32, shape [numel] each.
        random: From `random_bits`; None to round to nearest.
    """
    _, store = _FORMATS[segment.state_format]
    store(segment, state, random)


def _widened(segment: SegmentTensors) -> list[torch.Tensor]:
    """Return copies of state in fp32 or bf16, in fp32."""
    return [tensor.to(torch.float32, copy=True) for tensor in segment.state]


def _store(segment: SegmentTensors, state: Sequence[torch.Tensor], random: torch.Tensor | None) -> None:
    """Store values, or codes, as they are: nothing is rounded, so `random` is not used."""
    for tensor, values in zip(segment.state, state, strict=True):
        tensor.copy_(values)


def _store_rounded(segment: SegmentTensors, state: Sequence[torch.Tensor], random: torch.Tensor | None) -> None:
    """Store values in bf16, rounded with random bits, or without them to nearest.

    The first tensor takes the lower 16 of an element's 32 random bits, the second one the upper 16.
    """
    for number, (tensor, values) in enumerate(zip(segment.state, state, strict=True)):
        if random is None:
            tensor.copy_(round_to_bfloat16(values))
        else:
            tensor.copy_(round_stochastically(values, random >> 16 * number & 0xFFFF))


def _are_roots(segment: SegmentTensors) -> list[bool]:
    """Return for each state tensor whether codes are made of its square root."""
    return [name in segment.rule.roots for name in segment.rule.state]


def _decoded(segment: SegmentTensors) -> list[torch.Tensor]:
    scales = known(segment.scales, "codes without scales")
    return minifloat.decode_state(segment.state, _are_roots(segment), segment.first_index, scales)


def _store_codes(segment: SegmentTensors, state: Sequence[torch.Tensor], random: torch.Tensor | None) -> None:
    """Store values as codes of a byte, and the scales of their blocks; without random bits rounded to nearest."""
    codes, scales = minifloat.encode_state(state, _are_roots(segment), segment.first_index, random)
    _store(segment, codes, None)
    known(segment.scales, "codes without scales").copy_(scales)


_FORMATS: dict[StateFormat, tuple[Callable[..., list[torch.Tensor]], Callable[..., None]]] = {
    EXACT: (_widened, _store),
    COMPACT16: (_widened, _store_rounded),
    COMPACT8: (_decoded, _store_codes),
}
"""By format: two functions, which load a segment's state in fp32 (`state_of`) and store it (`store_state`)."""


def segment_table(segments: Sequence[SegmentTensors]) -> npt.NDArray[Any]:
    """Return the segment table whose rows have the addresses of these segments' tensors, after checking them.

    All segments have one rule. The tensors must outlive every use of the table.

    Raises:
        ValueError: A tensor is not contiguous, not on the CPU, or has the wrong dtype or length.
    """
    table = np.zeros(len(segments), segment_dtype(segments[0].rule if segments else ADAMW))
    for row, segment in enumerate(segments):
        numel, state = segment.master.numel(), StateSpec(segment.rule, segment.state_format)
        # What the format stores; but a master without its lower plane is fp32, whatever the format.
        has_planes = segment.master_low is not None
        formats = dict(state.stored if has_planes else (StateTensor(MASTER), *state.beside))  # format by name
        for name, tensor in segment.tensors().items():
            form = formats.get(name)  # None: a gradient or a weight, which may have any of these dtypes
            fits = tensor.dtype in DTYPE_CODES if form is None else tensor.dtype == getattr(torch, form.dtype)
            if not fits:
                raise ValueError(f"{name}: dtype {tensor.dtype} cannot be used")
            wanted = numel
            if form is not None and form.item_numel > 1:  # several elements share an item of a byte: scales
                wanted = form.run_bytes(segment.first_index, numel)
            if tensor.numel() != wanted or not tensor.is_contiguous() or tensor.device.type != "cpu":
                raise ValueError(f"{name}: must be a contiguous CPU tensor of {wanted} elements")
        gradient, weight = segment.gradient, segment.weight
        table[row] = kernel_table(
            state,
            numel,
            {name: tensor.data_ptr() for name, tensor in segment.tensors().items()},
            weight_dtype=DtypeCode.NONE if weight is None else DTYPE_CODES[weight.dtype],
            gradient_dtype=DtypeCode.NONE if gradient is None else DTYPE_CODES[gradient.dtype],
            flags=segment.flags,
            scalars=segment.scalars,
            rounding_key=segment.rounding_key,
            first_index=segment.first_index,
        )[0]
    return table


def gradient_blocks(gradient: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return `block_sums` of a gradient on the CPU."""
    sums: npt.NDArray[np.float64] = block_sums(gradient).numpy()
    return sums


def block_sums(gradient: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of a gradient's blocks: float64, shape [ceil(numel / NORM_BLOCK_NUMEL)].

    The gradient is cut at multiples of NORM_BLOCK_NUMEL elements from its own start, the last block padded
    with zeros. Squares are exact in float64 (48 bits of its 53, and well inside its range). A block's squares
    are added by halving, `x[:n] + x[n:]`, until one is left: an order that vectors of any width can keep to. As
    no finite sum overflows, a block's sum is infinite or NaN if, and only if, one of its elements is: it is the
    overflow flag too.
    """
    rows = -(-gradient.numel() // NORM_BLOCK_NUMEL)
    x = torch.zeros(rows * NORM_BLOCK_NUMEL, dtype=torch.float64, device=gradient.device)
    x[: gradient.numel()] = gradient.detach().reshape(-1).to(torch.float32)
    x = (x * x).reshape(rows, NORM_BLOCK_NUMEL)
    n = NORM_BLOCK_NUMEL // 2
    while n >= 1:
        x = x[:, :n] + x[:, n:]
        n //= 2
    return x.reshape(-1)


def fingerprint(gradient: torch.Tensor) -> int:
    """Return 64 bits that change when any bit of a gradient does; csrc/kernels/body.h says why."""
    return int(fingerprint_parts(gradient).sum()) % (1 << 64) if gradient.numel() else 0


def fingerprint_parts(gradient: torch.Tensor, first_block: int = 0) -> torch.Tensor:
    """Return a gradient's fingerprint in parts: an int64 for each block of NORM_BLOCK_NUMEL elements.

    The gradient's bytes are taken as 64-bit words (little endian), the last one padded with zeros. The word at
    position i of the gradient has two keys, `start + i * step` (`FINGERPRINT_KEYS`), and a term:

        term = product(word ^ key_1) + swap(product(word ^ key_2))

    `product` multiplies the two halves of a word, `swap` exchanges them. A part is the sum of a block's terms, the
    fingerprint that of all parts, both modulo 2^64.

    Args:
        gradient: Consecutive blocks of the gradient, or all of it; the last block may have fewer elements.
        first_block: Number of the first of these blocks in the gradient, in which words have their positions.
    """
    contents = gradient.detach().contiguous().reshape(-1).view(torch.uint8)
    count, block_words = -(-contents.numel() // 8), NORM_BLOCK_NUMEL * gradient.itemsize // 8
    padded = torch.zeros(8 * count, dtype=torch.uint8, device=contents.device)
    padded[: contents.numel()] = contents
    words, half = padded.view(torch.int64), 0xFFFFFFFF
    positions = torch.arange(count, dtype=torch.int64, device=contents.device) + first_block * block_words
    # int64 shifts copies of the sign in from the left: `& half` removes them. Products and sums wrap modulo 2^64.
    first, second = (
        (word & half) * (word >> 32 & half)
        for word in (words ^ (start + positions * step) for start, step in FINGERPRINT_KEYS)
    )
    terms = torch.zeros(-(-count // block_words) * block_words, dtype=torch.int64, device=contents.device)
    terms[:count] = first + (second << 32 | second >> 32 & half)
    return terms.view(-1, block_words).sum(1)


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
