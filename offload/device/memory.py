"""A session's memory on its device: blocks that can be given back together, and taken again elsewhere.

Whoever has a block asks it for its address when that is used, so nobody else has to know that it went and came.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.protocols import Device


@dataclass(slots=True, eq=False)
class Block:
    """Memory of a device, for one purpose.

    Attributes:
        nbytes: Its size; 0 for none.
        address: Where it lies; 0 for nowhere.
        lasts: Whether it is the session's for good, and not borrowed when it is needed.
    """

    nbytes: int = 0
    address: int = 0
    lasts: bool = False


class Place(NamedTuple):
    """Where something lies in a block, in bytes from its begin."""

    block: Block
    offset: int

    @property
    def address(self) -> int:
        """Its address now."""
        return self.block.address + self.offset


class DeviceMemory:
    """The blocks of one session that last; none is in use while they go or come.

    Args:
        device: Where they lie.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._blocks: list[Block] = []

    def take(self, *sizes: int) -> list[Block]:
        """Return a new block of each of some sizes.

        Raises:
            OffloadError: The device has no room for all of them; none has been taken then.
        """
        blocks = [Block(nbytes, lasts=True) for nbytes in sizes]
        lasting = [block for block in blocks if block.nbytes]
        self._place(lasting)
        self._blocks += lasting
        return blocks

    def free(self, block: Block) -> None:
        """Give a block back for good."""
        if block.nbytes:
            self._blocks.remove(block)
            self._device.release(block.address)

    def give_back(self) -> None:
        """Give the memory of all blocks back; what lay there is lost."""
        for block in self._blocks:
            if block.address:
                self._device.release(block.address)
                block.address = 0

    def take_again(self) -> None:
        """Take memory again for all blocks; what lies there is undefined.

        Raises:
            OffloadError: The device has no room for all of them; nothing has changed then.
        """
        self._place([block for block in self._blocks if not block.address])

    def _place(self, blocks: Sequence[Block]) -> None:
        addresses: list[int] = []
        with contextlib.ExitStack() as undo:
            for block in blocks:
                addresses.append(self._device.allocate(block.nbytes))
                undo.callback(self._device.release, addresses[-1])
            undo.pop_all()
        for block, address in zip(blocks, addresses, strict=True):
            block.address = address
