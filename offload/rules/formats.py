"""How one state tensor lies in memory and on a path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.protocols import StateFormat


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store the elements of a state tensor.

    Attributes:
        name: As manifests have it.
        item_bytes: Bytes of an element.
    """

    name: str
    item_bytes: int

    def nbytes(self, numel: Any) -> Any:
        """Return the bytes that so many elements take; the number may be an array of `uint64`."""
        return numel * (self.item_bytes if isinstance(numel, int) else np.uint64(self.item_bytes))


FP32 = Format("fp32", 4)

BF16 = Format("bf16", 2)
"""Rounded stochastically by updates (`offload.kernels.reference.rounding`), to nearest where state is set."""

STATE_FORMATS = {"exact": StateFormat.EXACT, "compact16": StateFormat.COMPACT16}
"""What a user calls the formats of a session's state."""

BESIDE_THE_MASTER = {StateFormat.EXACT: FP32, StateFormat.COMPACT16: BF16}
"""How each stores every tensor but the master, which is fp32."""
