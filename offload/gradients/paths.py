"""Gradients in a few buffers in host memory, which are written to the paths when buffers are needed for others.

Each gradient is copied to the buffers of its subgroups as it arrives, or added there to those of earlier passes, and
the squares for its norm are summed in the same pass. `offload.schedule.scratch` decides which subgroups have buffers,
and what is written to the paths and read back; here a buffer is asked for (`Filler`), and written to until the next.
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
from offload.gradients.store import BLOCK_BYTES, GradientStore
from offload.kernels.reference import TORCH_DTYPES
from offload.layout import Layout, Segment
from offload.memory.arenas import Arena
from offload.plan import Plan
from offload.protocols import NORM_BLOCK_NUMEL


class Filler(Protocol):
    """Gives `PathGradients` buffers to fill: the engine thread."""

    def turn(self) -> AbstractContextManager[None]:
        """Return a context in which no other thread closes the session, or has gradients arrive."""

    def borrow_buffer(self, subgroup: int) -> int:
        """Return a subgroup's buffer, which belongs to the caller until the next call, a step, or `drop`.

        Raises:
            SessionBrokenError: The session was closed, or is broken.
        """

    def begin_step(self) -> None:
        """Note that the last buffer is filled; on the engine thread."""

    def drop(self, dropped: Callable[[], None]) -> None:
        """Forget all gradients in buffers and on paths, then call `dropped`; an interrupt never comes in between."""


class PathGradients(GradientStore):
    """The gradients of one session with `gradient_memory`; see the module.

    Args:
        parts: See `GradientStore`.
        lanes: The session's lanes, which copy gradients to host memory.
        filler: Gives buffers to fill.
    """

    def __init__(self, *parts: Any, lanes: Lanes, filler: Filler) -> None:
        super().__init__(*parts)
        self._lanes = lanes
        self._filler = filler
        # The segments of each parameter, with their subgroups; the last first.
        self._segments: list[list[tuple[int, Segment]]] = []
        self._arrivals: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._filling: tuple[int, int] | None = None  # a subgroup, and the address of its buffer
        self._incomplete: dict[str, None] = {}  # parameters whose gradients are being copied, or were interrupted so
        self._announced: set[str] = set()  # those of them whose copy has not begun
        self._drops = 0  # how often all gradients have been forgotten
        self._buffers: Arena | None = None
        self._buffer_bytes = 0
        self._bounce_address = 0  # of the buffer that a gradient is copied to first from a device
        self._block_at_edge = np.zeros(NORM_BLOCK_NUMEL * 4, np.uint8)  # elements of a block in several subgroups

    # Memory

    def used_bytes(self, plan: Plan) -> int:
        """Return the host memory for gradients: that of the buffers."""
        return plan.with_buffer_bytes(self._lanes.bounces).budgets.gradient_bytes

    def use_plan(self, plan: Plan, before: Layout) -> None:
        """Take over a plan; a larger arena of buffers replaces the old one, with the same content."""
        super().use_plan(plan, before)
        subgroups = plan.layout.subgroups
        self._segments = [
            [(number, subgroups[number].segments[at]) for number, at in reversed(segment_places)]
            for segment_places in plan.layout.places
        ]
        added = len(self._segments) - len(self._arrivals)
        self._arrivals = np.concatenate([self._arrivals[: len(self._segments)], np.zeros(max(added, 0), np.int64)])
        old, nbytes = self._buffers, self.used_bytes(plan)
        if nbytes > (old.nbytes if old is not None else 0):
            self._buffers = self._memory.allocate_arena(nbytes)
            if old is not None:
                size, count = self._buffer_bytes, old.nbytes // self._buffer_bytes - self._lanes.bounces
                for number in range(count):
                    target = self._buffers.address + number * plan.gradient_buffer_bytes
                    ctypes.memmove(target, old.address + number * size, size)
                self._memory.free_arena(old)
            self._buffer_bytes = plan.gradient_buffer_bytes
            self._filling = None
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
        """Copy or add the gradient of one backward pass to buffers; see `Gradients.arrived`.

        Raises:
            ConfigError: Its dtype is wider than that in which gradients are kept, or an earlier pass was interrupted.
        """
        with self._filler.turn():
            self._copy_or_add(position, address, dtype)

    def _copy_or_add(self, position: int, address: int, dtype: DtypeCode) -> None:
        """Copy or add a gradient to its buffers, segment by segment; a signal handler may drop all in between."""
        parameter = self._parameters[position]
        if parameter.name not in self._announced:
            self.announce(position)
        self._announced.discard(parameter.name)
        kept_dtype = self._slot_settings.dtype_of(parameter)
        item = int(ITEM_BYTES[kept_dtype])
        if dtype is not kept_dtype and (kept_dtype is not DtypeCode.FLOAT32 or self._lanes.bounces):
            allowed = 'let autograd make it in the dtype of its weight, or set gradient_dtype="float32"'
            raise ConfigError(f"gradient of {parameter.name}", TORCH_DTYPES[dtype], allowed)
        wide = None
        if dtype is not kept_dtype:
            wide = tensor_at(address, parameter.numel, TORCH_DTYPES[dtype]).to(torch.float32)
            address = wide.data_ptr()
        is_first, target, drops = not self._arrivals[position], 1, self._drops
        for subgroup, segment in self._segments[position]:  # from the last one, as backward goes
            target = self._address_to_fill(subgroup) + segment.offset * item
            source = self._lanes.copy_gradient_to_host(
                address + segment.start * item, segment.numel * item, self._bounce_address
            )
            if self._drops != drops:  # a signal handler has called `forget`
                return
            self._store_segment(position, segment, source, target, kept_dtype, is_first=is_first)
        if self._drops != drops:
            return
        self._arrivals[position] += 1
        super().bind(position, target, kept_dtype, True)
        self._gathered[position] = kept_dtype
        self._incomplete.pop(parameter.name, None)

    def announce(self, position: int) -> None:
        """Note that a gradient is about to arrive: an interrupt from now on leaves an incomplete pass.

        Raises:
            ConfigError: A pass was interrupted before.
        """
        name = self._parameters[position].name
        if name in self._incomplete:
            self._check_complete()
        self._incomplete[name] = None
        self._announced.add(name)

    def bind(self, position: int, address: int, dtype: DtypeCode, gathered: bool) -> None:
        """Raise `ConfigError`: gradients have to arrive here, and cannot be bound where they lie."""
        combinations.GRADIENTS_BOUND.refuse(f"gradient of {self._parameters[position].name}", "bound where it lies")

    def slot(self, position: int) -> torch.Tensor:
        """Raise `ConfigError`: a gradient cannot be shown, as it may lie on the paths."""
        combinations.GRADIENTS_READ.refuse("gradient_memory", "below that of all gradients")

    def _address_to_fill(self, subgroup: int) -> int:
        if self._filling is None or self._filling[0] != subgroup:
            self._filling = None
            self._filling = subgroup, self._memory.buffer_address("gradients", self._filler.borrow_buffer(subgroup))
        return self._filling[1]

    def _store_segment(
        self, position: int, segment: Segment, source: int, target: int, dtype: DtypeCode, *, is_first: bool
    ) -> None:
        """Copy or add a segment's part of a gradient to its buffer, and sum the squares of the result by blocks.

        A block that lies in several segments is summed with the one that is stored last, which has its beginning: the
        parts that were stored before are kept in `_block_at_edge`.
        """
        item, block, edge = int(ITEM_BYTES[dtype]), NORM_BLOCK_NUMEL, self._block_at_edge.ctypes.data
        start, end, numel = segment.start, segment.start + segment.numel, self._parameters[position].numel
        blocks = int(self._blocks_at[position])
        # From `first` to `last` are whole blocks; before is the end of a block that begins in the segment before,
        # after it the beginning of one that ends in the next segment.
        first = min(end, -(-start // block) * block)
        last = max(first, end if end == numel else end // block * block)
        if is_first:
            for begin, stop in ((start, first), (last, end)):
                at = (begin - start) * item
                ctypes.memmove(target + at, source + at, (stop - begin) * item)
        else:
            self._kernel.add(np.array([(target, source, segment.numel)], np.uint64), dtype)
        if last > first:
            at, sums = (first - start) * item, blocks + BLOCK_BYTES * (first // block)
            copy = (target + at, dtype) if is_first else ()
            self._kernel.gradient_blocks((source if is_first else target) + at, dtype, last - first, sums, *copy)
        # The end of the block, in the next segment, was kept before: segments are stored from the last one on.
        if end > last:
            ctypes.memmove(edge, target + (last - start) * item, (end - last) * item)
            count, sums = min(block, numel - last), blocks + BLOCK_BYTES * (last // block)
            self._kernel.gradient_blocks(edge, dtype, count, sums)
        if first > start:
            ctypes.memmove(edge + start % block * item, target, (first - start) * item)

    # Between steps

    def bound_at(self) -> GradientsAt:
        """Check that all gradients are complete; None, as a run is told its buffer otherwise."""
        self._check_complete()
        return None

    def begin_step(self, plan: Plan, visits: object) -> bool:
        """Note that a step uses all gradients; those that arrive next are the first of a new step."""
        self._filler.begin_step()
        self._reset()
        return False

    def _reset(self) -> None:
        self._arrivals[:], self._filling = 0, None
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
            given = f"an interrupted pass, at {next(iter(self._incomplete))}"
            raise ConfigError("gradients", given, "call optimizer.zero_grad(), and take the backward passes again")

    def _sum_changed(self, positions: Any) -> npt.NDArray[np.int64]:
        self._check_complete()
        return np.array(positions, np.int64)

    def close(self) -> None:
        """Free all buffers."""
        self._buffers = None
        super().close()
