"""An accelerator's updates in plain torch operations, if no compiler for kernels supports it: right, and slow.

`offload.kernels.reference` itself runs on tensors of the device, piece by piece. So the bits are those of the
reference if the device's `*`, `+`, `-`, `/`, float64 roots and casts are correctly rounded.

Invariants: nothing waits for the device, and nothing reads its memory on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from offload.backends import tensor_at
from offload.dtypes import DtypeCode
from offload.errors import invariant
from offload.formats import FORMATS, MASTER_LOW, SCALES, StateSpec, blocks_numel
from offload.kernels import reference
from offload.kernels.device import SLOT_BYTES, DeviceKernel
from offload.kernels.reference import TORCH_DTYPES, SegmentTensors
from offload.kernels.stored import stored_dtype
from offload.protocols import NORM_BLOCK_NUMEL, TAKES_MASTER, SegmentFlag
from offload.rules import MASTER, RULES, segment_dtype

if TYPE_CHECKING:
    import numpy.typing as npt

PIECE_NUMEL = 1 << 20
"""Elements of a piece, a multiple of every block's: each takes some dozens of bytes of temporary memory."""

_TOUCHING = int(SegmentFlag.ACTIVE | TAKES_MASTER | SegmentFlag.ZERO_STATE)
_RULES = {rule.code: rule for rule in RULES.values()}


class PlainUpdateKernel(DeviceKernel):
    """A `DeviceKernel` on any device of torch, the CPU included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _send(self, table: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[int]] | None:
        touched = np.flatnonzero((table["numel"] > 0) & (table["flags"] & _TOUCHING != 0))
        if not touched.size:
            return None
        used = table[touched]
        active = used["flags"] & int(SegmentFlag.ACTIVE) != 0
        gradients = np.where(active, used["gradient_dtype"], int(DtypeCode.NONE))
        odd = touched[active & (used["gradient"] % SLOT_BYTES[gradients] != 0)]
        invariant(not odd.size, f"segment {odd[:1].tolist()}: gradient is not aligned to its elements")
        return used, gradients.tolist()

    def _update(self, sent: tuple[npt.NDArray[Any], list[int]]) -> None:
        used, gradients = sent
        for number, gradient in enumerate(gradients):
            rule = _RULES[int(used["rule"][number])]
            row = used[number : number + 1].view(segment_dtype(rule))[0]
            state = StateSpec(rule, FORMATS[int(row["state_format"])])
            for start, numel in _pieces(int(row["numel"]), int(row["first_index"]) % state.format.block_numel):
                reference.update(self.segment(row, state, gradient, start, numel))

    def segment(self, row: Any, state: StateSpec, gradient: int, start: int, numel: int) -> SegmentTensors:
        """Return elements of a segment as tensors for `reference.update`, over the memory that is to be written.

        Args:
            row: A row of a segment table, with its rule's names.
            state: The rule, and how its state is stored.
            gradient: Code of the gradient's element type; 0 if the segment is not active.
            start: First element, at a block's begin.
            numel: How many.
        """
        flags, rule, formats = SegmentFlag(int(row["flags"])), state.rule, dict(state.stored)
        first_index, has_weight = int(row["first_index"]) + start, bool(row["weight"])
        in_planes = MASTER_LOW in formats and has_weight
        master_dtype = stored_dtype(formats[MASTER]) if has_weight else torch.float32

        def at(name: str, dtype: torch.dtype, first: int = start, count: int = numel) -> torch.Tensor:
            return self.at(int(row[name]) + first * dtype.itemsize, count, dtype)

        def written(name: str, dtype: torch.dtype, is_read: bool) -> torch.Tensor:
            """Return the tensor for new values; if old ones are read, with these copied to it."""
            if not row[f"new_{name}"]:
                return at(name, dtype)
            new = at(f"new_{name}", dtype)
            return new.copy_(at(name, dtype)) if is_read else new

        active, takes = bool(gradient), has_weight and bool(flags & TAKES_MASTER)
        loads = takes and SegmentFlag.LOAD_MASTER in flags
        weight_dtype = TORCH_DTYPES[DtypeCode(int(row["weight_dtype"]))] if has_weight else torch.float32
        weight = None
        if has_weight:
            weight = written("weight", weight_dtype, takes) if active else at("weight", weight_dtype)
        master, master_low = torch.empty(0, dtype=torch.float32, device=self.device), None
        if active or takes:
            master = written("master", master_dtype, not loads)
            master_low = written("master_low", torch.uint8, not loads) if in_planes else None
        scales = None
        if SCALES in formats:
            # All pieces but the first begin where a block does.
            blocks, states = blocks_numel(first_index, numel, state.format.block_numel), len(rule.state)
            before = first_index // state.format.block_numel - int(row["first_index"]) // state.format.block_numel
            scales = at(SCALES, torch.uint8, before * states, blocks * states).view(blocks, states)
        return SegmentTensors(
            master,
            [at(name, stored_dtype(formats[name])) for name in rule.state],
            at("gradient", TORCH_DTYPES[DtypeCode(gradient)]) if active else None,
            weight,
            flags,
            rule.scalars(*(float(row[name]) for name in rule.scalars._fields)),
            rule,
            state.format,
            int(row["rounding_key"]),
            first_index,
            master_low,
            scales,
        )

    def _gather(
        self, source: tuple[int, int], numel: int, blocks: int, slot: tuple[int, int], accumulate: bool
    ) -> None:
        for start, count in _pieces(numel):
            values = self._elements(*source, start, count)
            if slot[0]:
                kept = self._elements(*slot, start, count)
                if accumulate:
                    reference.accumulate(kept, values)
                    values = kept
                else:
                    kept.copy_(values)
            sums = reference.block_sums(values)
            self.at(blocks + start // NORM_BLOCK_NUMEL * 8, sums.numel(), torch.float64).copy_(sums)

    def _copy_pieces(self, pieces: npt.NDArray[np.uint64]) -> None:
        for target, source, nbytes in pieces.tolist():
            self.at(target, nbytes, torch.uint8).copy_(self.at(source, nbytes, torch.uint8))

    def _gather_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        for address, numel, blocks in rows.tolist():
            self._gather((address, dtype), numel, blocks, (0, 0), False)

    def _fingerprint_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        for address, numel, parts in rows.tolist():
            for start, count in _pieces(numel):
                first_block = start // NORM_BLOCK_NUMEL
                sums = reference.fingerprint_parts(self._elements(address, dtype, start, count), first_block)
                self.at(parts + 8 * first_block, sums.numel(), torch.int64).copy_(sums)

    def _elements(self, address: int, code: int, start: int, count: int) -> torch.Tensor:
        dtype = TORCH_DTYPES[DtypeCode(code)]
        return self.at(address + start * dtype.itemsize, count, dtype)

    def at(self, address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor over memory of the device."""
        return tensor_at(address, numel, dtype, self.device)


def _pieces(numel: int, before: int = 0) -> Iterator[tuple[int, int]]:
    """Yield start and length of pieces of `numel` elements; `before`: elements of the first block before them."""
    start = 0
    while start < numel:
        count = min(numel - start, PIECE_NUMEL - (before + start) % PIECE_NUMEL)
        yield start, count
        start += count
