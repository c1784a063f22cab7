"""Updates that verify and make checksums of the state they work on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from offload._native import CompletionQueue, crc32c_portable
from offload.dtypes import DtypeCode
from offload.errors import InternalError
from offload.kernels import CpuUpdateKernel, instruction_sets
from offload.kernels.table import segment_table
from offload.protocols import ERROR_CHECKSUM, Completion, SealedState, SegmentFlag, StateFormat
from offload.rules import ADAMW

NUMEL, TILE_NUMEL = 150 * 1024, 70 * 1024
"""Of each tensor, and of a tile: neither is a multiple of what a worker takes at a time, 64 Ki elements."""

RUNS = [(0, 3), (64, 1000), (1088, 1), (1152, 64), (2048, 70_000), (72_064, 65_536), (140_032, 12_345)]
"""Offset and length of each segment, with padding between them and at the end."""


class Subgroup:
    """A subgroup's state, gradients and weights in memory."""

    def __init__(self, inactive: int | None = None, state_format: StateFormat = StateFormat.EXACT) -> None:
        random = np.random.default_rng(0)
        self.items = [4, 4, 4] if state_format is StateFormat.EXACT else [4, 2, 2]
        values = np.abs(random.standard_normal((3, NUMEL), np.float32))
        self.state = [self._stored(row, item) for row, item in zip(values, self.items, strict=True)]
        self.gradient = random.standard_normal(NUMEL, np.float32)
        self.weight = np.zeros(NUMEL, np.uint16)
        self.offsets = np.array([offset for offset, _ in RUNS], np.uint64)
        flags = np.full(len(RUNS), int(SegmentFlag.ACTIVE | SegmentFlag.DECOUPLED_DECAY), np.uint32)
        if inactive is not None:
            flags[inactive] = 0
        self.format, self.flags = state_format, flags

    @staticmethod
    def _stored(row: npt.NDArray[np.float32], item: int) -> npt.NDArray[Any]:
        return row.copy() if item == 4 else (row.view(np.uint32) >> 16).astype(np.uint16)

    def table(self) -> npt.NDArray[Any]:
        addresses = {
            name: tensor.ctypes.data + self.offsets * np.uint64(item)
            for name, tensor, item in zip(ADAMW.names, self.state, self.items, strict=True)
        }
        addresses["gradient"] = self.gradient.ctypes.data + self.offsets * np.uint64(4)
        addresses["weight"] = self.weight.ctypes.data + self.offsets * np.uint64(2)
        return segment_table(
            ADAMW,
            np.array([numel for _, numel in RUNS], np.uint64),
            addresses,
            weight_dtype=DtypeCode.BFLOAT16,
            gradient_dtype=int(DtypeCode.FLOAT32),
            flags=self.flags,
            scalars=ADAMW.row(3, ADAMW.values(ADAMW.defaults), 1.0),
            state_format=self.format,
            rounding_key=7,
            first_index=self.offsets,
        )

    def sealed(self) -> SealedState:
        tensors = [(tensor.ctypes.data, item) for tensor, item in zip(self.state, self.items, strict=True)]
        return SealedState(tensors, self.offsets, NUMEL, TILE_NUMEL)

    def tile(self, tensor: int, tile: int) -> npt.NDArray[Any]:
        return self.state[tensor][tile * TILE_NUMEL : (tile + 1) * TILE_NUMEL]


def ended(queue: CompletionQueue) -> Completion:
    (record,) = queue.wait(60.0)
    return Completion(*record)


@pytest.mark.parametrize("state_format", [StateFormat.EXACT, StateFormat.COMPACT16])
@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("inactive", [None, 0, 4])
def test_a_sealed_update_has_the_same_bits_and_the_checksums_of_its_tiles(
    instruction_set: str, inactive: int | None, state_format: StateFormat
) -> None:
    found, plain = Subgroup(inactive, state_format), Subgroup(inactive, state_format)
    queue = CompletionQueue()
    with CpuUpdateKernel(queue, 2, instruction_set=instruction_set) as kernel:
        expected = None
        for op in range(3):
            kernel.run(plain.table())
            expected = kernel.submit_sealed(op, found.table(), found.sealed(), expected)
            assert ended(queue).error == 0
            for left, right in zip((*found.state, found.weight), (*plain.state, plain.weight), strict=True):
                assert left.tobytes() == right.tobytes()
            for tensor in range(3):
                for tile in range(3):
                    stored = found.tile(tensor, tile)
                    assert expected.checksum(tensor, tile) == crc32c_portable(stored.ctypes.data, stored.nbytes)


@pytest.mark.parametrize("element", [0, 1024, 2047, 2048, 65_535, 70 * 1024, NUMEL - 1])
@pytest.mark.parametrize("tensor", range(3))
def test_a_changed_bit_is_found_before_its_block_is_used(tensor: int, element: int) -> None:
    subgroup, queue = Subgroup(), CompletionQueue()
    with CpuUpdateKernel(queue, 2) as kernel:
        seal = kernel.submit_sealed(1, subgroup.table(), subgroup.sealed(), None)
        assert ended(queue).error == 0
        subgroup.state[tensor].view(np.uint32)[element] ^= 1 << 20
        block = slice(element // 1024 * 1024, (element // 1024 + 1) * 1024)
        before = [values[block].copy() for values in (*subgroup.state, subgroup.weight)]
        kernel.submit_sealed(2, subgroup.table(), subgroup.sealed(), seal)
        completion = ended(queue)
        assert completion.error == ERROR_CHECKSUM
        assert (completion.detail >> 32, completion.detail & 0xFFFFFFFF) == (tensor, element // TILE_NUMEL)
        for left, right in zip(before, (*subgroup.state, subgroup.weight), strict=True):
            assert left.tobytes() == right[block].tobytes()


def test_state_that_does_not_fit_its_table_is_refused() -> None:
    subgroup, queue = Subgroup(), CompletionQueue()
    sealed = subgroup.sealed()
    with CpuUpdateKernel(queue, 1) as kernel:
        seal = kernel.submit_sealed(1, subgroup.table(), sealed, None)
        assert ended(queue).error == 0
        for wrong, expected in (
            (sealed._replace(numel=NUMEL - 2048), None),
            (sealed._replace(numel=152 * 1024), seal),
            (sealed._replace(tile_numel=TILE_NUMEL + 1), None),
            (sealed._replace(offsets=sealed.offsets[::-1]), None),
            (sealed._replace(offsets=sealed.offsets[1:]), None),
        ):
            with pytest.raises(InternalError):
                kernel.submit_sealed(2, subgroup.table(), wrong, expected)
        assert queue.wait(0.0) == []
        with pytest.raises(IndexError):
            seal.checksum(0, 3)
