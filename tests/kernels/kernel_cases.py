"""Inputs for the kernels' tests, and what "the same bits" means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch

from offload.formats import COMPACT8, COMPACT16, EXACT, MASTER_LOW, SCALES, StateFormat
from offload.formats.compact8 import BLOCK_NUMEL
from offload.kernels import norm_sq_at, reference, rounding_keys
from offload.kernels.reference import SegmentTensors, minifloat
from offload.protocols import SegmentFlag
from offload.rules import ADAMW, MASTER, UpdateRule, segment_dtype

GUARD = 0xA5
SIZES = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000, 4095, 4096, 4097, 12345)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, None)

_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_STATE_DTYPES = {EXACT: torch.float32, COMPACT16: torch.bfloat16}
_INTEGERS |= {dtype: dtype for dtype in (torch.int16, torch.uint8)}
_SPECIAL = (
    0.0,
    -0.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-45,
    -1e-40,
    1.17549435e-38,
    3.4e38,
    -3.4e38,
)


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN being equal to NaN whatever its payload."""
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    nan = torch.isnan(expected)
    if not torch.equal(torch.isnan(actual), nan):
        return False
    bits = [torch.where(nan, 0, x.view(_INTEGERS[x.dtype])) for x in (actual, expected)]
    return torch.equal(*bits)


def values(seed: int, numel: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Return "plain" values of a usual size, or "wild" ones: any exponent, and every special value."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "plain":
        return torch.randn(numel, generator=generator).mul(0.1).to(dtype)
    integer = _INTEGERS[dtype]
    limits = torch.iinfo(integer)
    wild = torch.randint(limits.min, limits.max + 1, (numel,), generator=generator, dtype=torch.int64)
    wild = wild.to(integer).view(dtype)
    at = torch.rand(numel, generator=generator) < 0.2
    special = torch.tensor(_SPECIAL)[torch.randint(len(_SPECIAL), (numel,), generator=generator)].to(dtype)
    return torch.where(at, special, wild)


class Placed:
    """A copy of a tensor's bytes at a chosen offset from a 256-byte boundary, between guard bytes."""

    device = "cpu"
    """Where all copies are made."""

    unaligned = True
    """Whether an offset that is no multiple of the element's size is used as it is, or rounded down to one."""

    def __init__(self, tensor: torch.Tensor, offset: int = 0, memory: np.ndarray | None = None) -> None:
        self.dtype, self._shape = tensor.dtype, tensor.shape
        self._nbytes = tensor.numel() * tensor.element_size()
        needed = self._nbytes + 1024
        if memory is None:
            self._raw = torch.empty(needed, dtype=torch.uint8, device=self.device)
        else:
            self._raw = torch.from_numpy(memory[:needed])
        self._raw.fill_(GUARD)
        if not self.unaligned:
            offset -= offset % self.dtype.itemsize
        self._start = 256 + (-self._raw.data_ptr() % 256) + offset
        self.address = self._raw.data_ptr() + self._start
        self.put(tensor)

    def put(self, tensor: torch.Tensor) -> None:
        """Write a tensor's bytes there."""
        self._inside.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))

    @property
    def _inside(self) -> torch.Tensor:
        return self._raw[self._start : self._start + self._nbytes]

    def tensor(self) -> torch.Tensor:
        """Return a copy, on the CPU, of what is there now, having checked the guards."""
        outside = torch.cat([self._raw[: self._start], self._raw[self._start + self._nbytes :]])
        assert torch.all(outside == GUARD), "written out of bounds"
        tensor = torch.empty(self._nbytes // self.dtype.itemsize, dtype=self.dtype)
        tensor.view(torch.uint8).copy_(self._inside)
        return tensor.reshape(self._shape)


@dataclass
class Case:
    """One segment twice: as tensors for the reference, and as bytes for a kernel."""

    tensors: SegmentTensors
    placed: dict[str, Placed]

    state_format: ClassVar[StateFormat] = EXACT
    """Of all segments that are made."""

    @classmethod
    def make(
        cls,
        numel: int,
        *,
        seed: int = 0,
        kind: str = "plain",
        gradient_dtype: torch.dtype = torch.bfloat16,
        weight_dtype: torch.dtype | None = torch.bfloat16,
        flags: SegmentFlag = SegmentFlag.ACTIVE | SegmentFlag.DECOUPLED_DECAY,
        scalars: Any = None,
        offsets: tuple[int, ...] = (),
        rule: UpdateRule = ADAMW,
        first_index: int | None = None,
    ) -> Case:
        state_dtype = _STATE_DTYPES.get(cls.state_format, torch.float32)
        tensors = SegmentTensors(
            master=values(seed, numel, torch.float32, kind),
            state=[
                # What a root is taken of is negative by mistake only.
                state.abs() if kind == "plain" and name in never_negative(rule) else state
                for number, name in enumerate(rule.state)
                for state in [values(seed + 1 + number, numel, state_dtype, kind)]
            ],
            gradient=values(seed + 3, numel, gradient_dtype, kind),
            weight=None if weight_dtype is None else values(seed + 4, numel, weight_dtype, kind),
            flags=flags,
            scalars=scalars or some_scalars(flags, rule=rule),
            rule=rule,
            state_format=cls.state_format,
            rounding_key=int(rounding_keys(seed, 0, 1)[0]),
            first_index=some_index(seed, numel) if first_index is None else first_index,
        )
        if cls.state_format is COMPACT8:
            if kind == "wild":
                for number, tensor in enumerate(tensors.tensors().values()):
                    tensor.copy_(mostly_finite(tensor, tensors.first_index, seed + number))
            store_in_codes(tensors)
        named = tensors.tensors()
        names = (*tensors.rule.names, "gradient", "weight")
        at = dict(zip(names, offsets or [0] * len(names), strict=True))
        for name, beside in ((MASTER_LOW, MASTER), (SCALES, tensors.rule.names[1])):
            at[name] = at[beside] // 4
        return cls(tensors, {name: Placed(tensor, at[name]) for name, tensor in named.items()})

    def row(self) -> np.ndarray:
        """Return the segment's row, pointing at the bytes."""
        row = reference.segment_table([self.tensors])
        for name, placed in self.placed.items():
            row[name] = placed.address
        return row

    def check(self) -> None:
        """Run the reference and compare everything with what the kernel left behind."""
        reference.update(self.tensors)
        for name, placed in self.placed.items():
            assert same_bits(placed.tensor(), self.tensors.tensors()[name]), f"{name} differs from the reference"


def mostly_finite(tensor: torch.Tensor, first_index: int, seed: int) -> torch.Tensor:
    """Return wild values whose blocks are mostly finite, of few binades, or zeros: one value makes NaN of a block."""
    numel, generator = tensor.numel(), torch.Generator().manual_seed(seed)
    blocks, before = minifloat.blocks_numel(first_index, numel), first_index % BLOCK_NUMEL
    kind, exponent = (
        torch.randint(*limits, (blocks,), generator=generator).repeat_interleave(BLOCK_NUMEL)[before : before + numel]
        for limits in ((0, 10), (-140, 100))
    )
    mantissas = torch.frexp(tensor.to(torch.float32).nan_to_num(0.7, 0.9, -0.6)).mantissa
    finite = torch.ldexp(mantissas, exponent - torch.randint(0, 12, (numel,), generator=generator))
    return torch.where(kind == 0, 0.0, torch.where(kind == 1, tensor.to(torch.float32), finite)).to(tensor.dtype)


def store_in_codes(tensors: SegmentTensors) -> None:
    """Put a segment's state, which is in fp32, into codes, and the master of a 16-bit weight into planes."""
    numel, values, master = tensors.master.numel(), tensors.state, tensors.master
    blocks = minifloat.blocks_numel(tensors.first_index, numel)
    tensors.state = [torch.zeros(numel, dtype=torch.uint8) for _ in values]
    tensors.scales = torch.zeros(blocks, len(values), dtype=torch.uint8)
    if tensors.weight is not None:
        tensors.master = torch.zeros(numel, dtype=torch.int16)
        tensors.master_low = torch.zeros(numel, dtype=torch.uint8)
    reference.store_state(tensors, values)
    reference.store_master(tensors, master)


def some_index(seed: int, numel: int) -> int:
    """Return a first index: zero, large, and such that a multiple of 2^32 lies inside the segment."""
    crossing = (1 << 32) * (1 + seed % 1000) - numel // 2
    return (0, crossing, (1 << 63) + 12345, crossing - 1, 1_000_003)[seed % 5] % (1 << 64)


def some_scalars(
    flags: SegmentFlag,
    *,
    weight_decay: float = 0.1,
    step: int = 3,
    grad_scale: float = 0.37,
    rule: UpdateRule = ADAMW,
) -> Any:
    if rule is not ADAMW:
        return rule.row(step, rule.values({**rule.defaults, "weight_decay": weight_decay}), grad_scale)
    return reference.scalars(
        step,
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=weight_decay,
        decoupled=bool(flags & SegmentFlag.DECOUPLED_DECAY),
        grad_scale=grad_scale,
    )


@cache
def never_negative(rule: UpdateRule) -> frozenset[str]:
    """Return the tensors of state that no gradient makes negative, which is seen from a first update."""
    states = [torch.zeros(2) for _ in rule.state]
    gradient, row = torch.tensor([-1.0, 1.0]), unlike_scalars(rule)
    reference.update(SegmentTensors(torch.zeros(2), states, gradient, None, SegmentFlag.ACTIVE, row, rule))
    return frozenset(name for name, state in zip(rule.state, states, strict=True) if bool((state >= 0).all()))


def unlike_scalars(rule: UpdateRule) -> Any:
    """Return scalars of which no two are alike and none is 0 or 1, whatever the rule means by them."""
    count = len(rule.scalars._fields)
    return rule.scalars(*(float(np.float32(0.9 - 0.8 * number / count)) for number in range(count)))


def table_of(cases: list[Case]) -> np.ndarray:
    """Return one table with a row for each case."""
    table = np.zeros(len(cases), segment_dtype(cases[0].tensors.rule))
    for row, case in enumerate(cases):
        table[row] = case.row()[0]
    return table


def norm_sq(blocks: Sequence[np.ndarray]) -> float:
    """Return the squared norm that native code makes of block sums."""
    addresses = np.array([part.ctypes.data for part in blocks], np.uint64)
    return norm_sq_at(addresses, np.array([part.size for part in blocks], np.uint64))
