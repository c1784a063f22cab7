"""Gradients in a few buffers in host memory, which are written to the paths when buffers are needed for others.

Each gradient is copied to the buffers of its subgroups as it arrives, or added there to those of earlier passes, and
the squares for its norm are summed in the same pass. `offload.schedule.scratch` decides which subgroups have buffers,
and what is written to the paths and read back; here a buffer is requested (`Filler`), and filled until the next one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from offload import combinations
from offload.device.none import Lanes
from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.engine.tables import GradientsAt
from offload.engine.views import tensor_at
from offload.errors import ConfigError
from offload.gradients.store import BLOCK_SUM_BYTES, GradientStore
from offload.kernels.reference import TORCH_DTYPES
from offload.layout import Layout, Segment, round_up
from offload.memory.arenas import Arena
from offload.plan import Plan
from offload.protocols import NORM_BLOCK_NUMEL


class Filler(Protocol):
    """Gives `PathGradients` buffers to fill: the engine thread."""

    def turn(self) -> AbstractContextManager[None]:
        """Return a context in which no other thread closes the session, or has gradients arrive."""

    def borrow_buffer(self, subgroup: int) -> int:
        """Return the number of a subgroup's buffer, which the caller may fill until the next call, a step, or `drop`.

        The buffer that the last call has returned is released: it may be written to the paths, and given to another
        subgroup. This waits until there is a buffer.

        Raises:
            SessionBrokenError: The session was closed, or is broken.
        """

    def begin_step(self) -> None:
        """Note that the last buffer is filled; on the engine thread."""

    def drop(self, dropped: Callable[[], None]) -> None:
        """Forget all gradients in buffers and on paths, then call `dropped`; an interrupt never comes in between."""


class PathGradients(GradientStore):
    """The gradients of one session with `gradient_memory`; see the module.

    A gradient is announced when it is about to arrive, then copied, then has arrived. From announcement to arrival
    its parameter is in `_incomplete`; it stays there if an interrupt ends the copy.

    Args:
        parts: The arguments of `GradientStore`.
        lanes: The session's lanes, which copy gradients to host memory.
        filler: Gives buffers to fill.
    """

    def __init__(self, *parts: Any, lanes: Lanes, filler: Filler) -> None:
        super().__init__(*parts)
        self._lanes = lanes
        self._filler = filler
        # The segments of each parameter, with their subgroups; the last first, as backward goes.
        self._segments: list[list[tuple[int, Segment]]] = []
        # How many gradients of each parameter have been added to its buffers since the last step.
        self._arrivals: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._filling: tuple[int, int] | None = None  # subgroup and address of the buffer that is being filled
        self._incomplete: dict[str, None] = {}  # parameters whose gradients were announced, and have not arrived
        self._announced: set[str] = set()  # those of them whose copy has not begun
        self._drops = 0  # how often all gradients were forgotten or used, so that a copy under way notices it
        self._buffers: Arena | None = None
        self._buffer_bytes = 0  # of each buffer
        self._bounce_address = 0  # of the buffer that a gradient is copied to first from a device
        # Elements (of up to 4 bytes) of a norm's block that lies in several segments: those that have been stored so
        # far. See `_store_segment`.
        self._block_at_edge = np.zeros(NORM_BLOCK_NUMEL * 4, np.uint8)

    # Memory

    def used_bytes(self, plan: Plan) -> int:
        """Return the host memory for gradients: that of the buffers."""
        return plan.with_buffer_bytes(self._lanes.bounces).budgets.gradient_bytes

    def use_plan(self, plan: Plan, before: Layout) -> None:
        """See `GradientStore.use_plan`; a larger arena of buffers replaces the old one, with the same content."""
        super().use_plan(plan, before)
        subgroups = plan.layout.subgroups
        self._segments = [
            [(number, subgroups[number].segments[at]) for number, at in reversed(segment_places)]
            for segment_places in plan.layout.places
        ]
        # New parameters come last. The last call may have failed, and have noted more of them than this plan has.
        count = len(self._segments)
        old_arrivals = self._arrivals[:count]
        self._arrivals = np.concatenate([old_arrivals, np.zeros(count - len(old_arrivals), np.int64)])
        old_bytes = self._buffers.nbytes if self._buffers is not None else 0
        if self.used_bytes(plan) > old_bytes:
            self._enlarge_buffers(plan)

    def _enlarge_buffers(self, plan: Plan) -> None:
        """Allocate a larger arena of buffers, and copy the content of each old buffer to the new one of its number.

        The old arena is freed, so addresses in it are forgotten. The engine's memory is told the new ones.
        """
        old = self._buffers
        self._buffers = self._memory.allocate_arena(self.used_bytes(plan))
        if old is not None:
            old_size = self._buffer_bytes
            count = old.nbytes // old_size - self._lanes.bounces  # a bounce buffer has nothing to keep
            for number in range(count):
                target = self._buffers.address + number * plan.gradient_buffer_bytes
                ctypes.memmove(target, old.address + number * old_size, old_size)
            self._memory.free_arena(old)
        self._buffer_bytes = plan.gradient_buffer_bytes
        self._filling = None  # it has an address in the old arena
        self._bounce_address = self._buffers.address + plan.gradient_buffers * plan.gradient_buffer_bytes
        self._memory.place_buffers("gradients", self._buffers.address, self._buffer_bytes)

    def _new_blocks(self, plan: Plan, first: int, counts: list[int]) -> list[npt.NDArray[np.float64]]:
        return [np.zeros(count, np.float64) for count in counts]

    # During backward

    def has_arrived(self, position: int) -> bool:
        """Return whether a gradient of a parameter has arrived since the last step or `forget`."""
        return bool(self._arrivals[position])

    def have_arrived(self) -> bool:
        """Return whether gradients have arrived since the last step or `forget`."""
        return bool(self._arrivals.any() or self._incomplete)

    def arrived(self, position: int, address: int, dtype: DtypeCode) -> None:
        """Copy or add the gradient of one backward pass to buffers, which may wait for the paths.

        Raises:
            ConfigError: Its dtype is not that in which gradients are kept, and cannot be widened to that (only to
                float32, and not on a device); or an earlier pass was interrupted.
        """
        with self._filler.turn():
            self._copy_or_add(position, address, dtype)

    def _copy_or_add(self, position: int, address: int, dtype: DtypeCode) -> None:
        """Copy a parameter's first gradient since the last step to its buffers, or add a further one to it there.

        It goes segment by segment. A signal handler may drop all gradients in between (`_drops` grows): then the rest
        of this one is dropped, too.
        """
        parameter = self._parameters[position]
        if parameter.name not in self._announced:  # the caller has not announced it itself
            self.announce(position)
        self._announced.discard(parameter.name)
        kept_dtype = self._slot_settings.dtype_of(parameter)
        item_bytes = int(ITEM_BYTES[kept_dtype])
        can_widen = kept_dtype is DtypeCode.FLOAT32 and not self._lanes.bounces  # not if it lies on a device
        if dtype is not kept_dtype and not can_widen:
            advice = 'let autograd make it in the dtype of its weight, or set gradient_dtype="float32"'
            raise ConfigError(f"gradient of {parameter.name}", TORCH_DTYPES[dtype], advice)
        widened = None  # keeps the memory of a widened copy until the end
        if dtype is not kept_dtype:
            widened = tensor_at(address, parameter.numel, TORCH_DTYPES[dtype]).to(torch.float32)
            address = widened.data_ptr()
        is_first = not self._arrivals[position]
        drops = self._drops
        target = 1  # what is bound below without segments: an address that nobody reads, but not 0, which means none
        for subgroup, segment in self._segments[position]:
            target = self._address_to_fill(subgroup) + segment.offset * item_bytes
            source = self._lanes.copy_gradient_to_host(
                address + segment.start * item_bytes, segment.numel * item_bytes, self._bounce_address
            )
            if self._drops != drops:  # a signal handler has called `forget`
                return
            self._store_segment(position, segment, source, target, kept_dtype, is_first=is_first)
        if self._drops != drops:
            return
        self._arrivals[position] += 1
        # The address only shows that there is a gradient: each run is told where its subgroup's buffer is.
        super().bind(position, target, kept_dtype, gathered=True)  # this class's own `bind` refuses callers
        self._summed_dtypes[position] = kept_dtype
        self._incomplete.pop(parameter.name, None)

    def announce(self, position: int) -> None:
        """Note that a gradient is about to arrive, so that an interrupt before its arrival is noticed.

        Raises:
            ConfigError: This parameter's last gradient never arrived. (Gradients of other parameters are not checked,
                as they may be on their way just now; the step checks all.)
        """
        name = self._parameters[position].name
        if name in self._incomplete:
            raise self._incomplete_error(name)
        self._incomplete[name] = None
        self._announced.add(name)

    def bind(self, position: int, address: int, dtype: DtypeCode, gathered: bool) -> None:
        """Raise `ConfigError`: gradients must arrive during backward here, and cannot be bound where they lie."""
        combinations.GRADIENTS_BOUND.refuse(f"gradient of {self._parameters[position].name}", "bound where it lies")

    def slot(self, position: int) -> torch.Tensor:
        """Raise `ConfigError`: a gradient cannot be shown, as it may lie on the paths."""
        combinations.GRADIENTS_READ.refuse("gradient_memory", "below that of all gradients")

    def _address_to_fill(self, subgroup: int) -> int:
        """Return the address of a subgroup's buffer; request it, and wait for it, unless it is being filled."""
        if self._filling is not None and self._filling[0] == subgroup:
            return self._filling[1]
        self._filling = None  # the request releases the last buffer, even if it then fails
        address = self._memory.buffer_address("gradients", self._filler.borrow_buffer(subgroup))
        self._filling = subgroup, address
        return address

    def _store_segment(
        self, position: int, segment: Segment, source: int, target: int, dtype: DtypeCode, *, is_first: bool
    ) -> None:
        """Copy or add a segment's part of a gradient to its buffer, and sum the squares of the result by blocks.

        Blocks are counted from the parameter's first element, and segments begin anywhere in them. So a segment may
        have, in this order: the end of a block that begins in the segment before, whole blocks, and the beginning of
        a block that ends in the next segment. Segments are stored from the last one on. The end of a block is kept in
        `_block_at_edge`, and the block is summed when the segment with its beginning is stored.

        Args:
            position: The parameter.
            segment: The segment.
            source: Address of the segment's part of the gradient, in host memory.
            target: Address of the segment's place in the buffer.
            dtype: Element type of both.
            is_first: Whether the gradient is the first since the last step, to be copied; else it is added.
        """
        item_bytes = int(ITEM_BYTES[dtype])
        edge = self._block_at_edge.ctypes.data
        # In elements of the parameter: the segment is from `start` to `end`, its whole blocks from `first` to `last`.
        # The parameter's last block counts as whole, though it may be shorter.
        start = segment.start
        end = segment.start + segment.numel
        numel = self._parameters[position].numel
        first = min(end, round_up(start, NORM_BLOCK_NUMEL))
        last = max(first, end if end == numel else end // NORM_BLOCK_NUMEL * NORM_BLOCK_NUMEL)
        if is_first:
            # Whole blocks are copied below, by the kernel that sums them.
            for begin, stop in ((start, first), (last, end)):
                offset = (begin - start) * item_bytes
                ctypes.memmove(target + offset, source + offset, (stop - begin) * item_bytes)
        else:
            self._kernel.add(np.array([(target, source, segment.numel)], np.uint64), dtype)
        if last > first:  # there are whole blocks
            offset = (first - start) * item_bytes
            summed = source if is_first else target
            copy = (target + offset, dtype) if is_first else ()
            sums = self._sum_address(position, first)
            self._kernel.gradient_blocks(summed + offset, dtype, last - first, sums, *copy)
        if end > last:  # the beginning of a block: `edge` has the rest of it, so that it can be summed
            ctypes.memmove(edge, target + (last - start) * item_bytes, (end - last) * item_bytes)
            block_numel = min(NORM_BLOCK_NUMEL, numel - last)
            self._kernel.gradient_blocks(edge, dtype, block_numel, self._sum_address(position, last))
        if first > start:  # the end of a block, or a part in its middle: keep it at its place in the block
            offset_in_block = start % NORM_BLOCK_NUMEL * item_bytes
            ctypes.memmove(edge + offset_in_block, target, (first - start) * item_bytes)

    def _sum_address(self, position: int, element: int) -> int:
        """Return the address of a block's sum; the block is the one that begins at an element of a parameter."""
        return int(self._blocks_at[position]) + BLOCK_SUM_BYTES * (element // NORM_BLOCK_NUMEL)

    # Between steps

    def bound_at(self) -> GradientsAt:
        """Check that all gradients are complete; return None, as each run is told the address of its buffer."""
        self._check_complete()
        return None

    def begin_step(self, plan: Plan, visits: object) -> bool:
        """Note that a step uses all gradients that have arrived: the next ones are for the step after it.

        The buffer that was filled last is released, so that the step can read it.

        Returns:
            False: no memory was added.
        """
        self._filler.begin_step()
        self._reset()
        return False

    def _reset(self) -> None:
        """Note that there are no gradients."""
        self._arrivals[:] = 0
        self._filling = None
        self._incomplete.clear()
        self._announced.clear()
        self._drops += 1

    def forget(self) -> None:
        """Forget all gradients that no step has used."""
        if self.have_arrived():
            self._filler.drop(self._reset)

    def _check_complete(self) -> None:
        """Raise `ConfigError` if a backward pass was interrupted while a gradient was copied."""
        if self._incomplete:
            raise self._incomplete_error(next(iter(self._incomplete)))

    def _incomplete_error(self, name: str) -> ConfigError:
        """Return the error for a pass that was interrupted while this parameter's gradient arrived."""
        given = f"an interrupted pass, at {name}"
        return ConfigError("gradients", given, "call optimizer.zero_grad(), and take the backward passes again")

    def _sum_changed(self, positions: Any) -> npt.NDArray[np.int64]:
        """Return positions of gradients, which were all summed as they arrived; check that they are complete."""
        self._check_complete()
        return np.array(positions, np.int64)

    def close(self) -> None:
        """Free all buffers."""
        self._buffers = None
        super().close()
