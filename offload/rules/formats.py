"""How one state tensor lies in memory and on a path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.protocols import BLOCK_NUMEL, SECTOR_BYTES, StateFormat


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store the elements of a state tensor.

    Attributes:
        name: As manifests have it.
        item_bytes: Bytes of an item: an element, or what the elements of a block share.
        item_numel: Elements of an item.
    """

    name: str
    item_bytes: int
    item_numel: int = 1

    @property
    def bytes_each(self) -> float:
        """Bytes of an element."""
        return self.item_bytes / self.item_numel

    @property
    def sector_numel(self) -> int:
        """Elements of a sector."""
        return SECTOR_BYTES // self.item_bytes * self.item_numel

    def offset(self, numel: Any) -> Any:
        """Return where an element's item begins, that many elements on; the number may be an array of `uint64`."""
        if isinstance(numel, int):
            return numel // self.item_numel * self.item_bytes
        return numel // np.uint64(self.item_numel) * np.uint64(self.item_bytes)

    def nbytes(self, numel: int) -> int:
        """Return the bytes that so many elements take: whole sectors, where several share an item."""
        nbytes: int = self.offset(numel)
        return nbytes if self.item_numel == 1 else -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES


FP32 = Format("fp32", 4)

BF16 = Format("bf16", 2)
"""Rounded stochastically by updates (`offload.kernels.reference.rounding`), to nearest where state is set."""

FP24_UPPER, FP24_LOWER = Format("fp24_upper", 2), Format("fp24_lower", 1)
"""Two planes of the upper 24 bits of fp32; this and what follows is of `offload.kernels.reference.minifloat`."""

SIGNED, ROOT = Format("s1e3m4", 1), Format("root_ue3m5", 1)
"""Codes of values of both signs; of the roots of values that are never negative."""

STATE_FORMATS = {format.name.lower(): format for format in StateFormat}
"""What a user calls the formats of a session's state."""


def scales(states: int) -> Format:
    """Return how the scales of so many state tensors are stored."""
    return Format(f"scales{states}", states, BLOCK_NUMEL)
