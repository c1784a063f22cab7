"""All state in fp32, as updates compute it."""

from __future__ import annotations

from offload.formats.format import FP32, Format, StateFormat


class _Exact(StateFormat):
    """The format; `StateFormat` describes the methods."""

    name = "exact"
    code = 0
    rounds = False

    def element(self, is_root: bool) -> Format:
        return FP32


EXACT = _Exact()
