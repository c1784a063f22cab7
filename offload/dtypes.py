"""The one table of element types: their numbers in native code and their sizes. Their names are torch's."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class DtypeCode(IntEnum):
    """Element types as the native code numbers them."""

    NONE = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3

    @classmethod
    def of(cls, dtype: torch.dtype) -> DtypeCode:
        """Return the code of a torch dtype; raise KeyError if weights and gradients cannot have it."""
        return cls[str(dtype).removeprefix("torch.").upper()]


ITEM_BYTES = np.array([0, 2, 2, 4], np.uint64)
"""Bytes of an element, by its type's code."""
