"""The master in fp32; state beside it in bf16."""

from __future__ import annotations

from offload.formats.format import BF16, Format, StateFormat


class _Compact16(StateFormat):
    """The format; `StateFormat` describes the methods."""

    name = "compact16"
    code = 1
    drift = 0.02

    def element(self, is_root: bool) -> Format:
        return BF16


COMPACT16 = _Compact16()
