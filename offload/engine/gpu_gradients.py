"""Gradients on a GPU: their norms, and their way to where they are used.

A gradient that the CPU will use is copied to its slot in host memory, in its own dtype; one that the GPU will use
stays where it is. Sums of squares are made on the GPU in the same pass. What further backward passes add is added on
the GPU for what stays there; for what has left, the copy of the new gradient is added in host memory, so that nothing
travels twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.engine.gpu import GpuLanes
from offload.engine.memory import Arena
from offload.errors import ConfigError
from offload.kernels import CpuUpdateKernel
from offload.protocols import NORM_BLOCK_NUMEL, DeviceLane, Mark

PASSING = 2
"""Gradients that may be on their way to be added in host memory; another waits for the first of them."""

BLOCK_BYTES = 8


@dataclass(slots=True)
class _Parameter:
    """What is known of one parameter's gradient since the last step."""

    numel: int
    slot: torch.Tensor
    stays: bool
    blocks: npt.NDArray[np.float64]
    device_blocks: int
    arrivals: int = 0
    kept: int = 0
    dtype: DtypeCode = DtypeCode.NONE
    mark: Mark | None = None
    added: bool = False


@dataclass(slots=True)
class _Region:
    """Block sums of the parameters that were added together, on the device and in host memory."""

    device: int
    host: Arena


@dataclass(slots=True)
class _Passing:
    mark: Mark
    position: int
    buffer: torch.Tensor


@dataclass
class GpuGradients:
    """Gradients of one session whose weights lie on a GPU.

    `arrived` is called by whoever runs backward, the rest between passes.

    Attributes:
        lanes: The session's.
        kernel: Makes the sums of what was added in host memory.
        positions: By parameter.
    """

    lanes: GpuLanes
    kernel: CpuUpdateKernel
    positions: list[_Parameter] = field(default_factory=list)
    _regions: list[_Region] = field(default_factory=list)
    _passing: list[_Passing] = field(default_factory=list)
    _buffers: Arena | None = None
    _largest: int = 0
    _taken: int = 0

    def add(self, numels: list[int], slots: list[torch.Tensor], stay: list[bool], region: Arena | None) -> None:
        """Take up more parameters.

        Args:
            numels: Elements of each.
            slots: Host memory for the gradients that the CPU uses, flat; empty for others.
            stay: Whether the GPU uses any part of a parameter.
            region: Host memory for all their block sums; None if there are none.
        """
        if region is None:
            device = 0
        else:
            device = self.lanes.device.allocate(region.nbytes)
            self._regions.append(_Region(device, region))
        offset = 0
        for numel, slot, stays in zip(numels, slots, stay, strict=True):
            count = -(-numel // NORM_BLOCK_NUMEL)
            blocks = region.numpy(offset, count, np.float64) if region is not None else np.zeros(0)
            self._largest = max(self._largest, slot.numel() * slot.element_size())
            self.positions.append(_Parameter(numel, slot, stays, blocks, device + offset))
            offset += count * BLOCK_BYTES

    # During backward

    def arrived(self, position: int, address: int, dtype: DtypeCode) -> Mark:
        """Take in one backward pass's gradient, which lies on the device.

        Returns:
            The mark after which its memory is not read any more; but the first one of a parameter whose `stays` is
            set is read, and added to, until `forget`.

        Raises:
            ConfigError: If its dtype is not that of the slot, or of the passes before.
        """
        found = self.positions[position]
        self._check_dtype(found, dtype)
        device, first, left = self.lanes.device, not found.arrivals, None
        made = device.mark(DeviceLane.CALLER, timed=False)
        if found.slot.numel():
            target = found.slot if first else self._buffer(found)
            device.follow(DeviceLane.LEAVING, made)
            self.lanes.copy(DeviceLane.LEAVING, target.data_ptr(), address, found.numel * int(ITEM_BYTES[dtype]))
            left = device.mark(DeviceLane.LEAVING, timed=False)
            if not first:
                self._passing.append(_Passing(left, position, target))
        if first:
            found.kept = address
        if first or found.stays:
            adds = (found.kept, dtype, True) if not first else ()
            device.follow(DeviceLane.GRADIENTS, made)
            device.gradient_blocks(DeviceLane.GRADIENTS, address, dtype, found.numel, found.device_blocks, *adds)
        if left is not None:  # after the sums, so that these do not wait for their own copy
            device.follow(DeviceLane.GRADIENTS, left)
        found.arrivals += 1
        found.dtype = dtype
        found.mark = device.mark(DeviceLane.GRADIENTS, timed=False)
        return found.mark

    def _check_dtype(self, found: _Parameter, dtype: DtypeCode) -> None:
        item = int(ITEM_BYTES[dtype])
        if (found.slot.numel() and item != found.slot.element_size()) or (
            found.arrivals and dtype is not found.dtype
        ):
            raise ConfigError(
                "gradient dtype", dtype.name.lower(), "use that of the weights, or gradient_dtype float32, throughout"
            )

    def _buffer(self, found: _Parameter) -> torch.Tensor:
        size = -(-self._largest // 4096) * 4096
        if self._buffers is None or self._buffers.nbytes < PASSING * size:
            self.finish_additions()
            self._close_buffers()
            self._buffers = self.lanes.arena(PASSING * size)
        if len(self._passing) == PASSING:
            self._add_first()
        self._taken = (self._taken + 1) % PASSING
        return self._buffers.tensor(self._taken * size, found.numel, found.slot.dtype)

    def _add_first(self) -> None:
        passing = self._passing.pop(0)
        passing.mark.wait()
        found = self.positions[passing.position]
        found.slot.add_(passing.buffer)
        found.added = True

    # Between passes

    def gather(self, position: int, address: int, dtype: DtypeCode) -> None:
        """Make the block sums of a gradient that stays with its owner, behind the caller's work."""
        found, device = self.positions[position], self.lanes.device
        device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.CALLER, timed=False))
        device.gradient_blocks(DeviceLane.GRADIENTS, address, dtype, found.numel, found.device_blocks)

    def finish_additions(self) -> None:
        """Add in host memory what is on its way there."""
        while self._passing:
            self._add_first()

    def settle(self) -> None:
        """Finish what is on its way, and bring all block sums to host memory."""
        device = self.lanes.device
        self.finish_additions()
        for region in self._regions:
            self.lanes.copy(DeviceLane.GRADIENTS, region.host.address, region.device, region.host.nbytes)
        device.mark(DeviceLane.GRADIENTS, timed=False).wait()
        for found in self.positions:
            if found.added and not found.stays:
                address, blocks = found.slot.data_ptr(), found.blocks.ctypes.data
                self.kernel.gradient_blocks(address, found.dtype, found.numel, blocks)

    def forget(self) -> None:
        """Gradients have been used or are not wanted: the next that arrives is the first."""
        device = self.lanes.device
        device.follow(
            DeviceLane.CALLER, device.mark(DeviceLane.GRADIENTS, timed=False)
        )  # their memory may be used again
        for passing in self._passing:
            passing.mark.wait()
        self._passing.clear()
        for found in self.positions:
            found.arrivals, found.kept, found.mark, found.added = 0, 0, None, False

    def _close_buffers(self) -> None:
        if self._buffers is not None:
            self.lanes.give_back(self._buffers)
            self._buffers = None

    def close(self) -> None:
        """Give the memory for additions back; the device has been closed."""
        self._passing.clear()
        self._close_buffers()
