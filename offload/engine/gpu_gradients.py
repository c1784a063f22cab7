"""Gradients on a GPU: their norms, and their way to where they are used.

A gradient that the CPU will use is copied to its slot in host memory, in its own dtype; one that the GPU will use
stays where it is. Its squares are summed on the GPU in the same pass. Gradients of further backward passes are added
on the GPU where the first one has stayed, and in host memory where it has left, so that nothing travels twice.
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
from offload.protocols import NORM_BLOCK_NUMEL, SECTOR_BYTES, DeviceLane, Mark

PASSING = 2
"""Gradients that may be on their way to be added in host memory; one more waits for the first of them."""

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

    def forget(self) -> None:
        """Drop what has arrived."""
        self.arrivals, self.kept, self.mark, self.added = 0, 0, None, False


@dataclass(slots=True)
class _Region:
    """Block sums of parameters that one `add` took up, on the device and in host memory."""

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

    `arrived` belongs to the thread of backward; all else is called between passes.

    Attributes:
        lanes: The session's lanes.
        kernel: Sums the squares of gradients that were added in host memory.
        positions: One for each parameter.
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
            slots: Flat slots in host memory for gradients that the CPU uses; empty for others.
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

    def place(self, slots: list[torch.Tensor], stay: list[bool]) -> None:
        """Exchange the slots of the first parameters, of which nothing has arrived, and whether each one stays."""
        for found, slot, stays in zip(self.positions, slots, stay, strict=False):
            self._largest = max(self._largest, slot.numel() * slot.element_size())
            found.slot, found.stays = slot, stays

    # During backward

    def arrived(self, position: int, address: int, dtype: DtypeCode) -> Mark:
        """Take in one backward pass's gradient, which lies on the device.

        Returns:
            The mark after which its memory is not read any more. Except where `stays` is set: there the first
            gradient is read, and added to, until `forget`.

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
        size = -(-self._largest // SECTOR_BYTES) * SECTOR_BYTES
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
        """Sum the blocks of a gradient that the caller keeps, behind the caller's work."""
        found, device = self.positions[position], self.lanes.device
        device.follow(DeviceLane.GRADIENTS, device.mark(DeviceLane.CALLER, timed=False))
        device.gradient_blocks(DeviceLane.GRADIENTS, address, dtype, found.numel, found.device_blocks)

    def replace(self, position: int) -> None:
        """Drop what arrived of one parameter: the caller has another gradient for it."""
        found = self.positions[position]
        if found.arrivals:
            self.finish_additions()
            found.forget()

    def finish_additions(self) -> None:
        """Wait for gradients on their way to be added in host memory, and add them."""
        while self._passing:
            self._add_first()

    def settle(self) -> None:
        """Finish all additions, and copy all block sums to host memory."""
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
        """Drop all gradients: the next to arrive is the first of its parameter."""
        device = self.lanes.device
        # The caller may use their memory again.
        device.follow(DeviceLane.CALLER, device.mark(DeviceLane.GRADIENTS, timed=False))
        for passing in self._passing:
            passing.mark.wait()
        self._passing.clear()
        for found in self.positions:
            found.forget()

    def _close_buffers(self) -> None:
        if self._buffers is not None:
            self.lanes.give_back(self._buffers)
            self._buffers = None

    def close(self) -> None:
        """Give the memory for additions back; the device has been closed."""
        self._passing.clear()
        self._close_buffers()
