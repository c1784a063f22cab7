"""Updates that verify and make checksums of the state they work on."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from offload._native import CompletionQueue, crc32c_portable
from offload.dtypes import DtypeCode
from offload.errors import InternalError
from offload.formats import COMPACT8, EXACT, EXACT_ADAMW, FORMATS, Format, StateFormat
from offload.kernels import CpuUpdateKernel, instruction_sets
from offload.kernels.table import segment_table
from offload.protocols import ERROR_CHECKSUM, Completion, SealedState, SegmentFlag
from offload.rules import ADAMW

NUMEL, TILE_NUMEL = 150 * 1024, 70 * 1024
"""Of each tensor, and of a tile: neither is a multiple of what a worker takes at a time, 64 Ki elements."""

RUNS = [
    (0, 3),
    (64, 1000),
    (1088, 1),
    (1152, 64),
    (2048, 70_000),
    (72_064, 65_536),
    (140_032, 12_345),
    (152_417, 600),
]
"""Offset and length of each segment, with padding between them and at the end."""

IN_EACH_FORMAT = pytest.mark.parametrize("state_format", FORMATS, ids=str)


class Subgroup:
    """A subgroup's state, as bytes, gradients and weights in memory."""

    def __init__(self, inactive: int | None = None, state_format: StateFormat = EXACT) -> None:
        random = np.random.default_rng(0)
        self.spec = EXACT_ADAMW.stored_in(state_format)
        self.state = [self._stored(form, random) for _, form in self.spec.stored]
        self.gradient = random.standard_normal(NUMEL, np.float32)
        self.weight = np.zeros(NUMEL, np.uint16)
        self.offsets = np.array([offset for offset, _ in RUNS], np.uint64)
        self.flags = np.full(len(RUNS), int(SegmentFlag.ACTIVE | SegmentFlag.DECOUPLED_DECAY), np.uint32)
        if inactive is not None:
            self.flags[inactive] = 0

    @staticmethod
    def _stored(form: Format, random: np.random.Generator) -> npt.NDArray[np.uint8]:
        """Return plausible bytes: values that are not negative, any code, scales near to 1; and padding."""
        nbytes = form.nbytes(NUMEL)
        found = random.integers(0, 256, nbytes).astype(np.uint8)
        if form.item_numel > 1:
            found[: form.offset(NUMEL)] = random.integers(110, 130, form.offset(NUMEL))
        elif form.item_bytes > 1:
            values = np.abs(random.standard_normal(NUMEL, np.float32)).view(np.uint32)
            found[:] = (values if form.item_bytes == 4 else (values >> 16).astype(np.uint16)).view(np.uint8)
        return found

    def table(self) -> npt.NDArray[Any]:
        addresses = {
            name: tensor.ctypes.data + form.offset(self.offsets)
            for (name, form), tensor in zip(self.spec.stored, self.state, strict=True)
        }
        addresses["gradient"] = self.gradient.ctypes.data + self.offsets * np.uint64(4)
        addresses["weight"] = self.weight.ctypes.data + self.offsets * np.uint64(2)
        return segment_table(
            self.spec,
            np.array([numel for _, numel in RUNS], np.uint64),
            addresses,
            weight_dtype=DtypeCode.BFLOAT16,
            gradient_dtype=int(DtypeCode.FLOAT32),
            flags=self.flags,
            scalars=ADAMW.row(3, ADAMW.values(ADAMW.defaults), 1.0),
            rounding_key=7,
            first_index=self.offsets,
        )

    def sealed(self) -> SealedState:
        tensors = [
            (tensor.ctypes.data, form.item_bytes, form.item_numel, tensor.nbytes)
            for (_, form), tensor in zip(self.spec.stored, self.state, strict=True)
        ]
        return SealedState(tensors, self.offsets, NUMEL, TILE_NUMEL)

    def tile(self, tensor: int, tile: int) -> npt.NDArray[np.uint8]:
        """Return a tile of a tensor, the last one with what pads the tensor."""
        form = self.spec.stored[tensor].format
        end = form.offset((tile + 1) * TILE_NUMEL) if tile < NUMEL // TILE_NUMEL else None
        return self.state[tensor][form.offset(tile * TILE_NUMEL) : end]

    def block(self, element: int) -> list[bytes]:
        """Return the bytes of state and weight of the 1024 elements around one."""
        first = element // 1024 * 1024
        cuts = [slice(form.offset(first), form.offset(first + 1024)) for _, form in self.spec.stored]
        state = [tensor[cut].tobytes() for tensor, cut in zip(self.state, cuts, strict=True)]
        return [*state, self.weight[first : first + 1024].tobytes()]


def ended(queue: CompletionQueue) -> Completion:
    (record,) = queue.wait(60.0)
    return Completion(*record)


@IN_EACH_FORMAT
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
            for tensor in range(len(found.state)):
                for tile in range(3):
                    stored = found.tile(tensor, tile)
                    assert expected.checksum(tensor, tile) == crc32c_portable(stored.ctypes.data, stored.nbytes)


@pytest.mark.parametrize("element", [0, 1024, 2047, 2048, 65_535, 70 * 1024, NUMEL - 1])
@IN_EACH_FORMAT
def test_a_changed_bit_is_found_before_its_block_is_used(state_format: StateFormat, element: int) -> None:
    queue = CompletionQueue()
    with CpuUpdateKernel(queue, 2) as kernel:
        for tensor, (_, form) in enumerate(EXACT_ADAMW.stored_in(state_format).stored):
            subgroup = Subgroup(state_format=state_format)
            seal = kernel.submit_sealed(1, subgroup.table(), subgroup.sealed(), None)
            assert ended(queue).error == 0
            subgroup.state[tensor][form.offset(element)] ^= 1 << 3
            before = subgroup.block(element)
            kernel.submit_sealed(2, subgroup.table(), subgroup.sealed(), seal)
            completion = ended(queue)
            assert completion.error == ERROR_CHECKSUM
            assert (completion.detail >> 32, completion.detail & 0xFFFFFFFF) == (tensor, element // TILE_NUMEL)
            assert subgroup.block(element) == before


def test_padding_is_sealed() -> None:
    """What a tier writes of it comes back, or the path has damaged it."""
    subgroup, queue = Subgroup(state_format=COMPACT8), CompletionQueue()
    scales = len(subgroup.state) - 1
    assert subgroup.state[scales].nbytes > subgroup.spec.stored[scales].format.offset(NUMEL)
    with CpuUpdateKernel(queue, 2) as kernel:
        seal = kernel.submit_sealed(1, subgroup.table(), subgroup.sealed(), None)
        assert ended(queue).error == 0
        subgroup.state[scales][-1] ^= 1
        kernel.submit_sealed(2, subgroup.table(), subgroup.sealed(), seal)
        completion = ended(queue)
    assert (completion.error, completion.detail) == (ERROR_CHECKSUM, scales << 32 | 2)


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
            (
                sealed._replace(tensors=[(address, 4, 1, nbytes - 1) for address, _, _, nbytes in sealed.tensors]),
                None,
            ),
            (sealed._replace(tensors=[(address, 4, 3, nbytes) for address, _, _, nbytes in sealed.tensors]), None),
            (sealed._replace(tensors=[(address, 4, 0, nbytes) for address, _, _, nbytes in sealed.tensors]), None),
            (sealed._replace(tensors=[(address, 2, 1, nbytes) for address, _, _, nbytes in sealed.tensors]), seal),
        ):
            with pytest.raises(InternalError):
                kernel.submit_sealed(2, subgroup.table(), wrong, expected)
        assert queue.wait(0.0) == []
        with pytest.raises(IndexError):
            seal.checksum(0, 3)
