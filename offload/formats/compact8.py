"""The upper 24 bits of the master; state beside it in codes of a byte, in blocks that share scales.

`offload.kernels.reference.minifloat` defines the numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offload.errors import ConfigError
from offload.formats.format import MASTER_LOW, SCALES, Format, StateFormat, StateTensor
from offload.rules import MASTER, UpdateRule

BLOCK_NUMEL = 64
"""Elements that share scales."""

FP24_UPPER, FP24_LOWER = Format("fp24_upper", 2, dtype="int16", code=4), Format("fp24_lower", 1)
"""The two planes of a master's upper 24 bits: the upper 16 of them, and the lower 8."""

SIGNED = Format("s1e3m4", 1, code=5, block_numel=BLOCK_NUMEL)
ROOT = Format("root_ue3m5", 1, code=6, block_numel=BLOCK_NUMEL)
"""Codes of a byte: for values of both signs, and for the roots of values that are never negative."""


class _Compact8(StateFormat):
    """The format; `StateFormat` describes the methods."""

    name = "compact8"
    code = 2
    drift = 0.2
    block_numel = BLOCK_NUMEL
    stores_roots = True
    masters = (StateTensor(MASTER, FP24_UPPER), StateTensor(MASTER_LOW, FP24_LOWER))

    def element(self, is_root: bool) -> Format:
        return ROOT if is_root else SIGNED

    def state(self, rule: UpdateRule) -> tuple[StateTensor, ...]:
        """See `StateFormat.state`; the scales of all tensors are one more tensor.

        An item of it has the scales of one block of elements: a byte for each tensor.
        """
        tensor_count = len(rule.state)
        return (*super().state(rule), StateTensor(SCALES, Format(f"scales{tensor_count}", tensor_count, BLOCK_NUMEL)))

    def stored_as(self, name: str) -> tuple[str, ...]:
        """See `StateFormat.stored_as`; a master has a lower plane, all other state has scales."""
        return (name, MASTER_LOW if name == MASTER else SCALES)

    def check(self, rule: UpdateRule, values: Any) -> None:
        """See `StateFormat.check`; refuse an `eps` that is 0 in fp32, too.

        Small roots, and what an update divides by them, are stored as 0; without `eps` the quotient would be NaN.
        """
        super().check(rule, values)
        eps = rule.added_to_roots(values)
        if eps is not None and np.float32(eps) == 0:
            raise ConfigError("eps", eps, "with state_format compact8 it divides zeros; give one above 1e-45")


COMPACT8 = _Compact8()
