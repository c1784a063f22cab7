"""A session's memory on its device: blocks that can be given back together, and allocated again at other addresses.

Users of a block ask it for its address each time, so they need not be told that it was given back and allocated
again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.protocols import Device


@dataclass(slots=True, eq=False)
class Block:
    """Memory of a device for one purpose; its address may change between steps.

    Attributes:
        nbytes: Its size; 0 for none.
        address: Its address; 0 while it has no memory.
        lasts: Whether it is the session's for good, and not borrowed for each step.
    """

    nbytes: int = 0
    address: int = 0
    lasts: bool = False


class BlockPlace(NamedTuple):
    """A place in a block: an offset in bytes from the block's begin."""

    block: Block
    offset: int

    @property
    def address(self) -> int:
        """The place's present address."""
        return self.block.address + self.offset


class DeviceMemory:
    """The lasting blocks of one session. No work uses them while they are freed or allocated again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocks: list[Block] = []

    def allocate(self, *sizes: int) -> list[Block]:
        """Allocate a new block of each size; a size of 0 is a block without memory.

        Raises:
            OffloadError: The device has no room for all of them; none has been allocated then.
        """
        blocks = [Block(nbytes, lasts=True) for nbytes in sizes]
        with_memory = [block for block in blocks if block.nbytes]
        self._allocate_memory(with_memory)
        self._blocks += with_memory
        return blocks

    def free(self, block: Block) -> None:
        """Free a block for good; one of 0 bytes, which has no memory, is ignored."""
        if block.nbytes:
            self._blocks.remove(block)
            self._device.release(block.address)

    def free_all(self) -> None:
        """Free the memory of all blocks until `reallocate_all`; their content is lost."""
        for block in self._blocks:
            if block.address:
                self._device.release(block.address)
                block.address = 0

    def reallocate_all(self) -> None:
        """Allocate memory again for all blocks; their content is undefined.

        Raises:
            OffloadError: The device has no room for all of them; nothing has changed then.
        """
        self._allocate_memory([block for block in self._blocks if not block.address])

    def _allocate_memory(self, blocks: Sequence[Block]) -> None:
        """Allocate memory for all blocks or, if there is no room, for none."""
        addresses: list[int] = []
        with contextlib.ExitStack() as undo:
            for block in blocks:
                address = self._device.allocate(block.nbytes)
                undo.callback(self._device.release, address)
                addresses.append(address)
            undo.pop_all()  # all are there: none is released
        for block, address in zip(blocks, addresses, strict=True):
            block.address = address
