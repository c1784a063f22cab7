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
"""A segment changes if it has one of these flags."""

_RULES = {rule.code: rule for rule in RULES.values()}


class PlainUpdateKernel(DeviceKernel):
    """A `DeviceKernel` on any device of torch, the CPU included."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _send(self, table: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], list[int]] | None:
        """Return what `_update` takes, or None if no segment changes. The host reads the table, so it stays there.

        Returns:
            A copy of the rows of segments that change, and a dtype code for each: its gradient's, or NONE for a
            segment that is not active (its master is taken, or its state zeroed, and no more).
        """
        touched = np.flatnonzero((table["numel"] > 0) & (table["flags"] & _TOUCHING != 0))
        if not touched.size:
            return None
        rows = table[touched]
        is_active = rows["flags"] & int(SegmentFlag.ACTIVE) != 0
        gradient_dtypes = np.where(is_active, rows["gradient_dtype"], int(DtypeCode.NONE))
        misaligned = touched[is_active & (rows["gradient"] % SLOT_BYTES[gradient_dtypes] != 0)]
        invariant(not misaligned.size, f"segment {misaligned[:1].tolist()}: gradient is not aligned to its elements")
        return rows, gradient_dtypes.tolist()

    def _update(self, sent: tuple[npt.NDArray[Any], list[int]]) -> None:
        """Update each segment by the reference, piece by piece, which bounds the temporary memory."""
        rows, gradient_dtypes = sent
        for number, gradient_dtype in enumerate(gradient_dtypes):
            rule = _RULES[int(rows["rule"][number])]
            # The same row, with fields by the names of the rule's state and scalars.
            row = rows[number : number + 1].view(segment_dtype(rule))[0]
            state = StateSpec(rule, FORMATS[int(row["state_format"])])
            # Elements that share scales with the segment's first one, and come before the segment:
            numel_before = int(row["first_index"]) % state.format.block_numel
            for start, numel in _pieces(int(row["numel"]), numel_before):
                reference.update(self.segment(row, state, gradient_dtype, start, numel))

    def segment(self, row: Any, state: StateSpec, gradient_dtype: int, start: int, numel: int) -> SegmentTensors:
        """Return a run of a segment's elements as tensors for `reference.update`, which changes them in place.

        The tensors view the memory that the row names. Where the row has another address for new values
        (`new_master`, `new_weight`), the tensor lies there, and is first filled with the old values if the update
        reads them.

        Args:
            row: A row of a segment table, with its rule's names.
            state: The rule, and how its state is stored.
            gradient_dtype: Code of the gradient's element type; 0 if the segment is not active.
            start: Number of the run's first element in the segment: 0, or where elements that share scales begin.
            numel: Elements of the run.
        """
        flags = SegmentFlag(int(row["flags"]))
        rule, formats = state.rule, dict(state.stored)
        first_index = int(row["first_index"]) + start
        has_weight = bool(row["weight"])  # else the weight is the master

        def at(name: str, dtype: torch.dtype, first: int = start, count: int = numel) -> torch.Tensor:
            """Return `count` elements, from number `first` on, of the tensor whose address the row's `name` is."""
            return self.at(int(row[name]) + first * dtype.itemsize, count, dtype)

        def written(name: str, dtype: torch.dtype, is_read: bool) -> torch.Tensor:
            """Return the run in the memory for new values of `name`: at `new_{name}`, or if that is 0 at `name`.

            With `is_read` it holds the old values, to be updated in place.
            """
            if not row[f"new_{name}"]:
                return at(name, dtype)
            new = at(f"new_{name}", dtype)
            return new.copy_(at(name, dtype)) if is_read else new

        is_active = bool(gradient_dtype)
        takes_master = has_weight and bool(flags & TAKES_MASTER)
        weight = None
        if has_weight:
            weight_dtype = TORCH_DTYPES[DtypeCode(int(row["weight_dtype"]))]
            # The old weight is read only where the master is taken from it; only an active segment writes a new one.
            weight = written("weight", weight_dtype, takes_master) if is_active else at("weight", weight_dtype)
        # An update that only zeroes state does not touch the master.
        master, master_low = torch.empty(0, dtype=torch.float32, device=self.device), None
        if is_active or takes_master:
            reads_master = not (takes_master and SegmentFlag.LOAD_MASTER in flags)  # else all of it is overwritten
            # An fp32 weight is its own master, in fp32 whatever the format of the state.
            master_dtype = stored_dtype(formats[MASTER]) if has_weight else torch.float32
            master = written("master", master_dtype, reads_master)
            if has_weight and MASTER_LOW in formats:
                master_low = written("master_low", torch.uint8, reads_master)
        scales = None
        if SCALES in formats:
            block_numel, states = state.format.block_numel, len(rule.state)
            blocks = blocks_numel(first_index, numel, block_numel)
            # The row's address is that of the segment's first block; blocks are counted in the unsharded parameter.
            first_block = first_index // block_numel - int(row["first_index"]) // block_numel
            scales = at(SCALES, torch.uint8, first_block * states, blocks * states).view(blocks, states)
        return SegmentTensors(
            master=master,
            state=[at(name, stored_dtype(formats[name])) for name in rule.state],
            gradient=at("gradient", TORCH_DTYPES[DtypeCode(gradient_dtype)]) if is_active else None,
            weight=weight,
            flags=flags,
            scalars=rule.scalars(*(float(row[name]) for name in rule.scalars._fields)),
            rule=rule,
            state_format=state.format,
            rounding_key=int(row["rounding_key"]),
            first_index=first_index,
            master_low=master_low,
            scales=scales,
        )

    def _gather(
        self, source: tuple[int, int], numel: int, blocks: int, slot: tuple[int, int], accumulate: bool
    ) -> None:
        """Copy or add a gradient to its slot, if it has one, and write the sums of squares of its blocks.

        Each piece is whole blocks of the norm, so each block's sum is written once.
        """
        for start, count in _pieces(numel):
            values = self._elements(*source, start, count)
            slot_address, _ = slot
            if slot_address:
                in_slot = self._elements(*slot, start, count)
                if accumulate:
                    reference.accumulate(in_slot, values)
                    values = in_slot  # the sums are those of the result
                else:
                    in_slot.copy_(values)
            sums = reference.block_sums(values)
            # 8 bytes a sum: float64.
            self.at(blocks + start // NORM_BLOCK_NUMEL * 8, sums.numel(), torch.float64).copy_(sums)

    def _copy_pieces(self, pieces: npt.NDArray[np.uint64]) -> None:
        for target, source, nbytes in pieces.tolist():
            self.at(target, nbytes, torch.uint8).copy_(self.at(source, nbytes, torch.uint8))

    def _sum_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        for address, numel, blocks in rows.tolist():
            self._gather((address, dtype), numel, blocks, (0, 0), False)  # at (0, NONE) is no slot

    def _fingerprint_rows(self, dtype: int, rows: npt.NDArray[np.uint64]) -> None:
        """Write each gradient's fingerprint in parts: 64 bits for each block of the norm. Pieces are whole blocks."""
        for address, numel, parts in rows.tolist():
            for start, count in _pieces(numel):
                first_block = start // NORM_BLOCK_NUMEL
                sums = reference.fingerprint_parts(self._elements(address, dtype, start, count), first_block)
                self.at(parts + 8 * first_block, sums.numel(), torch.int64).copy_(sums)

    def _elements(self, address: int, code: int, start: int, count: int) -> torch.Tensor:
        """Return `count` elements from `start` on of a tensor at an address, of the dtype with this code."""
        dtype = TORCH_DTYPES[DtypeCode(code)]
        return self.at(address + start * dtype.itemsize, count, dtype)

    def at(self, address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor over memory of the device."""
        return tensor_at(address, numel, dtype, self.device)


def _pieces(numel: int, before: int = 0) -> Iterator[tuple[int, int]]:
    """Yield start and length of the pieces of `numel` elements, each of at most `PIECE_NUMEL`.

    `before` elements come before the first one in its block of elements that share scales. Pieces end at multiples of
    `PIECE_NUMEL`, counted from that block's begin, or with the last element. So no block is cut: all pieces but the
    first begin with one.
    """
    start = 0
    while start < numel:
        count = min(numel - start, PIECE_NUMEL - (before + start) % PIECE_NUMEL)
        yield start, count
        start += count
