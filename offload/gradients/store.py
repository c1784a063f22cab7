"""Gradients of one session: their memory, their norms, and their addresses in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from offload.device.host import HostMemory
from offload.device.none import never, nothing
from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.engine.tables import GradientsAt, StepRows, Tables
from offload.errors import ConfigError
from offload.gradients.additions import BUFFERS, buffer_bytes
from offload.kernels import CpuUpdateKernel, blocks_numel, norm_sq_at
from offload.kernels.reference import DTYPE_CODES, TORCH_DTYPES
from offload.layout import SEGMENT_ALIGN_NUMEL, Layout, Parameter, Segment, round_up
from offload.memory.arenas import Arena
from offload.plan import Plan
from offload.protocols import Mark

BLOCK_SUM_BYTES = 8
"""Size of the sum of a block's squares."""

FinalGradient = tuple[torch.Tensor, Mark | None]
"""A gradient that is read where it lies, not in a slot; on a device, with the mark after which it is complete."""


class SlotArena(NamedTuple):
    """Memory of slots that were made together, and the positions of their parameters."""

    arena: Arena
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GradientSlots:
    """How gradient slots in host memory are made.

    Attributes:
        dtype: Element type of all slots; None for each parameter's own.
        exist: Whether there are slots at all.
        needs_buffers: Whether gradients from a GPU may need buffers, from which they are added to their slots.
        passing_bytes: Host memory of the caller's that gradients pass through on their way to slots.
    """

    dtype: DtypeCode | None
    exist: bool
    needs_buffers: bool
    passing_bytes: int = 0

    def dtype_of(self, parameter: Parameter) -> DtypeCode:
        """Return the element type of a parameter's slot."""
        return parameter.dtype if self.dtype is None else self.dtype

    def bytes_of(self, parameter: Parameter) -> int:
        """Return the size of a parameter's slot, padded to the alignment of segments; 0 if there are no slots."""
        if not self.exist:
            return 0
        numel = round_up(parameter.numel, SEGMENT_ALIGN_NUMEL)
        return numel * TORCH_DTYPES[self.dtype_of(parameter)].itemsize

    def total_bytes(self, parameters: Sequence[Parameter]) -> int:
        """Return the host memory for the gradients of these parameters, buffers included."""
        slots_bytes = sum(self.bytes_of(parameter) for parameter in parameters)
        buffers_bytes = BUFFERS * buffer_bytes(slots_bytes) if self.needs_buffers else 0
        return slots_bytes + self.passing_bytes + buffers_bytes


class GradientStore:
    """The gradients of one session: `HostGradients`, `PathGradients`, or `GpuGradients` for weights on a GPU.

    `begin_step`, `fetch_for_visit` and `coming` are called on the engine thread, all else on the caller's or on that
    of backward, between requests.

    Args:
        slots: How slots are made.
        tables: Keep the address of each gradient.
        kernel: Sums squares for norms.
        memory: Host memory, for the slots.
    """

    send_bucket = keep_until_read = forget = settle = announce = finish = fetch_for_visit = coming = (
        return_borrowed
    ) = nothing
    fetch_final = end_final = nothing
    stays = has_arrived = have_arrived = begin_step = never
    """Methods that do nothing (`nothing`), or return False (`never`), for gradients in host memory alone."""

    def __init__(self, slots: GradientSlots, tables: Tables, kernel: CpuUpdateKernel, memory: HostMemory) -> None:
        self._slot_settings = slots
        self._tables = tables
        self._kernel = kernel
        self._memory = memory
        self._parameters: tuple[Parameter, ...] = ()
        self._slots: list[torch.Tensor] = []  # by position; an empty one where the plan needs none
        self._slot_memory: dict[int, torch.Tensor] = {}  # memory of slots by parameter, unused ones included
        self._arenas: list[SlotArena] = []  # arenas of that memory
        self._blocks: list[npt.NDArray[np.float64]] = []  # each parameter's sums of squares, block by block
        self._blocks_at: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)  # the addresses of `_blocks`
        self._block_counts: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)  # how many blocks each parameter has
        self._numels: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)  # and how many elements
        # The dtype of the gradient that `_blocks` are the sums of; NONE: there is none.
        self._summed_dtypes: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    # Memory

    def used_bytes(self, plan: Plan) -> int:
        """Return the bytes of host memory for gradients with a plan: its slots, unused slots, and buffers."""
        parameters = [
            parameter
            for number, parameter in enumerate(plan.layout.parameters)
            if number in self._slot_memory or self._needs_slot(plan, number)
        ]
        return self._slot_settings.total_bytes(parameters)

    def missing_bytes(self, plan: Plan) -> int:
        """Return the bytes of host memory that `use_plan` would allocate."""
        parameters = plan.layout.parameters
        return sum(self._slot_settings.bytes_of(parameters[number]) for number in self._positions_without_slot(plan))

    def _positions_without_slot(self, plan: Plan) -> list[int]:
        """Return positions of the parameters that need a slot with a plan, and have no memory for one."""
        return [
            number
            for number, parameter in enumerate(plan.layout.parameters)
            if number not in self._slot_memory
            and self._needs_slot(plan, number)
            and self._slot_settings.bytes_of(parameter)
        ]

    def _needs_slot(self, plan: Plan, position: int) -> bool:
        """Return whether a parameter's gradient has a slot with a plan; overridden for weights on a GPU."""
        return True

    def use_plan(self, plan: Plan, before: Layout) -> None:
        """Allocate memory for the gradients that the CPU uses with a plan, and make entries for parameters it adds.

        Unused slots stay allocated; an arena is freed when none of its slots is used.

        Args:
            plan: The new plan. No gradient of a parameter whose slot it adds or removes has arrived.
            before: The layout of the old plan.

        Raises:
            OffloadError: There is not enough memory; the old slots are unchanged.
        """
        first = len(before.parameters)
        # An earlier `use_plan` may have failed, and left entries and slots of parameters that `before` has not: clear
        # these.
        del self._slots[first:], self._blocks[first:]
        # An arena's positions ascend, so if its first parameter is none of `before`, none of them is.
        self._free_unused([arena for arena in self._arenas if arena.positions[0] >= first])
        self._parameters = plan.layout.parameters
        self._allocate_slots(self._positions_without_slot(plan))
        self._choose_slots(plan)
        added = len(self._parameters) - first
        # The zeros are `DtypeCode.NONE`: nothing has been summed of added parameters.
        self._summed_dtypes = np.concatenate([self._summed_dtypes[:first], np.zeros(added, np.int32)])
        self._numels = np.array([parameter.numel for parameter in self._parameters], np.uint64)
        counts = [blocks_numel(parameter.numel) for parameter in self._parameters[first:]]
        self._blocks += self._new_blocks(plan, first, counts)
        self._blocks_at = np.array([blocks.ctypes.data for blocks in self._blocks], np.uint64)
        self._block_counts = np.array([blocks.size for blocks in self._blocks], np.uint64)
        self._free_unused(
            [arena for arena in self._arenas if not any(self._slots[n].numel() for n in arena.positions)]
        )

    def _choose_slots(self, plan: Plan) -> None:
        """Fill `_slots`: parameters that need a slot with a plan have theirs there, and all others an empty one."""
        for number, parameter in enumerate(self._parameters):
            # One that needs a slot has no memory for it if there are no slots at all, or if it has no elements.
            slot = self._slot_memory.get(number) if self._needs_slot(plan, number) else None
            if slot is None:
                slot = torch.empty(0, dtype=TORCH_DTYPES[self._slot_settings.dtype_of(parameter)], device="cpu")
            self._slots[number : number + 1] = [slot]  # replaces the last plan's, or appends

    def _allocate_slots(self, positions: Sequence[int]) -> None:
        """Allocate one arena with slots for some parameters."""
        sizes = [self._slot_settings.bytes_of(self._parameters[number]) for number in positions]
        if not positions:
            return
        # On the CPU `.grad` may lie in a slot, and a forked child may look at it: so it inherits slots there, as it
        # does torch's own memory.
        arena = self._memory.allocate_arena(sum(sizes), inherit=True)
        self._arenas.append(SlotArena(arena, tuple(positions)))
        offset = 0
        for number, nbytes in zip(positions, sizes, strict=True):
            parameter = self._parameters[number]
            dtype = TORCH_DTYPES[self._slot_settings.dtype_of(parameter)]
            self._slot_memory[number] = arena.tensor(offset, parameter.numel, dtype)
            offset += nbytes

    def _free_unused(self, unused: Sequence[SlotArena]) -> None:
        """Free arenas of which no slot is in use."""
        for slot_arena in unused:
            self._arenas.remove(slot_arena)
            for number in slot_arena.positions:
                del self._slot_memory[number]
            self._memory.free_arena(slot_arena.arena)

    def _new_blocks(self, plan: Plan, first: int, counts: list[int]) -> list[npt.NDArray[np.float64]]:
        """Return new memory for block sums of the parameters from number `first` on.

        `counts` has the number of blocks of each of these parameters.
        """
        raise NotImplementedError

    def slot(self, position: int) -> torch.Tensor:
        """Return a parameter's slot in host memory, a flat tensor; empty if it has none.

        Raises:
            ConfigError: There are no slots at all.
        """
        if not self._slot_settings.exist:
            raise ConfigError("gradient_slots", False, "make the engine with gradient_slots=True")
        return self._slots[position]

    def slots_at(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
        """Return address and element type of each parameter's slot in host memory; address 0 where it has none."""
        addresses = [slot.data_ptr() if slot.numel() else 0 for slot in self._slots]
        dtypes = [self._slot_settings.dtype_of(parameter) for parameter in self._parameters]
        return np.array(addresses, np.uint64), np.array(dtypes, np.int32)

    def read_at(self) -> GradientsAt:
        """Return where updates during backward read gradients: in the slots; None if there are no slots."""
        return self.slots_at() if self._slot_settings.exist else None

    def bound_slots(self) -> Sequence[tuple[int, int]]:
        """Return address and size of the slots in which gradients are bound; parking keeps their memory."""
        return ()

    def bound_at(self) -> GradientsAt:
        """Return where the CPU reads gradients of weights on a GPU; None where it reads them where they are bound."""
        return None

    def has_landed(self, segments: Sequence[Segment]) -> bool:
        """Return whether the gradients of some segments, which have arrived, are in their slots.

        Gradients that do not depart from a GPU are left out. In host memory all are where updates read them.
        """
        return True

    # Gradients that updates in backward read, and that lie in no slot

    def final(self, position: int, gradient: torch.Tensor) -> FinalGradient | None:
        """Return a final gradient, so that updates during backward read it where it lies; on the caller's thread.

        Return None if these updates cannot read it.
        """
        return gradient, None

    def read_final(self, final: Mapping[int, FinalGradient], segments: Sequence[Segment], rows: StepRows) -> None:
        """Write into the expected step's `rows` where updates of segments read final gradients that have no slot."""
        for segment in segments:
            if segment.parameter in final:
                gradient, _ = final[segment.parameter]
                rows.gradients[segment.parameter] = gradient.data_ptr()
                rows.gradient_dtypes[segment.parameter] = DTYPE_CODES[gradient.dtype]

    def fingerprints(
        self,
        positions: npt.NDArray[np.uint64],
        addresses: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        *,
        masters: bool = False,
    ) -> npt.NDArray[np.uint64]:
        """Return fingerprints of pieces of gradients where the step that begins reads them.

        The step compares them to those of an update during backward: if they differ, that update is revoked.

        Args:
            positions: Parameter of each piece.
            addresses: Address of each piece.
            sizes: Bytes of each piece; 0 for none.
            masters: Whether the pieces are of fp32 weights, which are masters, and not of gradients.
        """
        return self._kernel.fingerprints(addresses, sizes)

    # Between steps

    def arrived(self, position: int, address: int, dtype: DtypeCode) -> Mark | None:
        """Copy or add the gradient of a backward pass, or note it.

        Returns:
            The mark after which no lane reads the gradient; None where there are no lanes, and it has been read.
        """
        raise NotImplementedError

    def bind(self, position: int, address: int, dtype: DtypeCode, gathered: bool) -> None:
        """Note where a parameter's gradient lies.

        `gathered` is whether its squares were summed as it arrived; else they are summed when a norm is asked for.
        """
        self._tables.gradients[position] = address
        self._tables.gradient_dtypes[position] = dtype
        if not gathered:
            self._summed_dtypes[position] = DtypeCode.NONE

    def norm_sq(self, positions: Sequence[int]) -> float:
        """Return the sum of squares of some gradients."""
        numbers = self._sum_changed(positions)
        return norm_sq_at(self._blocks_at[numbers], self._block_counts[numbers])

    def norms_sq(self, positions: Sequence[int]) -> list[float]:
        """Return the sum of squares of each of some gradients."""
        numbers = self._sum_changed(positions)
        return [norm_sq_at(self._blocks_at[[n]], self._block_counts[[n]]) for n in numbers.tolist()]

    def _sum_changed(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """Bring the block sums of some gradients up to date; return their positions."""
        raise NotImplementedError

    def close(self) -> None:
        """Free all slots."""
        self._slots.clear()
        self._slot_memory.clear()


class HostGradients(GradientStore):
    """Gradients in host memory: in their slots, or where the caller has them."""

    _fingerprints: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)  # of the gradients that `_blocks` are the sums of

    def _new_blocks(self, plan: Plan, first: int, counts: list[int]) -> list[npt.NDArray[np.float64]]:
        """Return new memory for block sums, and make entries for the gradients' fingerprints."""
        self._fingerprints = np.concatenate([self._fingerprints[:first], np.zeros(len(counts), np.uint64)])
        return [np.zeros(count, np.float64) for count in counts]

    def bound_slots(self) -> Sequence[tuple[int, int]]:
        """Return address and size of the slots in which gradients are bound."""
        bound_addresses = self._tables.gradients.tolist()
        return [
            (address, slot.nbytes)
            # There may be more slots than parameters, of a `use_plan` that failed.
            for slot, address in zip(self._slots, bound_addresses, strict=False)
            if address == slot.data_ptr() and address  # 0: an empty slot's
        ]

    def arrived(self, position: int, address: int, dtype: DtypeCode) -> None:
        """Copy a gradient to its slot, if it has one, and sum its squares in the same pass.

        It is bound in the slot then; without a slot it stays, and is bound, where it is.
        """
        slot = self._slots[position]
        if slot.numel():
            target, target_dtype = slot.data_ptr(), DTYPE_CODES[slot.dtype]
            self._sum_and_copy(position, address, dtype, target=target, target_dtype=target_dtype)
        else:
            self._sum_and_copy(position, address, dtype, target=address, target_dtype=dtype)

    def _sum_changed(self, positions: Sequence[int]) -> npt.NDArray[np.int64]:
        """Sum the squares of those gradients that have changed since they were summed; return all positions."""
        tables = self._tables
        numbers = np.array(positions, np.int64)
        for position in numbers[~self._have_current_sums(numbers)].tolist():
            address = int(tables.gradients[position])
            dtype = DtypeCode(tables.gradient_dtypes[position])
            self._sum_and_copy(position, address, dtype, target=address, target_dtype=dtype)
        return numbers

    def _sum_and_copy(
        self, position: int, address: int, dtype: DtypeCode, target: int, target_dtype: DtypeCode
    ) -> None:
        """Sum the squares of a gradient by blocks, copy it to its target in the same pass, and bind it there.

        A target that is the gradient's own address means that nothing is copied. Also notes the gradient's
        fingerprint, which the kernel makes in the same pass, for `_have_current_sums`.
        """
        numel = self._parameters[position].numel
        copies = target != address
        if numel:  # else there is no block
            self._summed_dtypes[position] = DtypeCode.NONE  # in case of an interrupt: the old sums are overwritten
            self._fingerprints[position] = self._kernel.gradient_blocks(
                address,
                dtype,
                numel,
                int(self._blocks_at[position]),
                target if copies else 0,
                target_dtype if copies else DtypeCode.NONE,
            )
        self._tables.gradients[position] = target
        self._tables.gradient_dtypes[position] = target_dtype
        self._summed_dtypes[position] = target_dtype

    def _have_current_sums(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each parameter whether its block sums are still those of its gradient.

        Fingerprints of the gradients are compared, as version counters miss changes: through `.data`, through NumPy
        arrays, or by `torch.amp.GradScaler.unscale_`.
        """
        tables = self._tables
        same: npt.NDArray[np.bool_] = self._summed_dtypes[positions] == tables.gradient_dtypes[positions]
        # So far the mask `same` tells whether the sums are of a gradient of this dtype. Only such gradients are
        # fingerprinted; then the mask is narrowed to those with the old fingerprint.
        candidates = positions[same]
        sizes = self._numels[candidates] * ITEM_BYTES[tables.gradient_dtypes[candidates]]
        fingerprints = self._kernel.fingerprints(tables.gradients[candidates], sizes)
        same[same] = fingerprints == self._fingerprints[candidates]
        return same
