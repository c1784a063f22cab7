"""The one table of element types: their numbers in native code, their names in torch, their sizes."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class DtypeCode(IntEnum):
    """Element types as the native code numbers them."""

    NONE = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3

    @classmethod
    def of(cls, dtype: torch.dtype) -> DtypeCode:
        """Return the code of a torch dtype; KeyError if weights and gradients cannot have it."""
        return DTYPE_CODES[dtype]


TORCH_DTYPES = {
    DtypeCode.BFLOAT16: torch.bfloat16,
    DtypeCode.FLOAT16: torch.float16,
    DtypeCode.FLOAT32: torch.float32,
}
"""The element types that weights and gradients may have."""

DTYPE_CODES = {dtype: code for code, dtype in TORCH_DTYPES.items()}

ITEM_BYTES = np.array([0, *(dtype.itemsize for dtype in TORCH_DTYPES.values())], np.uint64)
"""Bytes of an element, by its type's code; 0 for none."""
