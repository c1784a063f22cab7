"""Formats: how the state that an update rule keeps is stored. Pure."""

from offload.formats.compact8 import COMPACT8
from offload.formats.compact16 import COMPACT16
from offload.formats.exact import EXACT
from offload.formats.format import BF16, FP32, MASTER_LOW, SCALES, Format, StateFormat, StateTensor, blocks_numel
from offload.formats.spec import EXACT_ADAMW, StateSpec

FORMATS: tuple[StateFormat, ...] = (EXACT, COMPACT16, COMPACT8)
"""The formats, each at the place of its `code`."""

STATE_FORMATS = {state_format.name: state_format for state_format in FORMATS}
"""The same by name."""

__all__ = [
    "BF16",
    "COMPACT8",
    "COMPACT16",
    "EXACT",
    "EXACT_ADAMW",
    "FORMATS",
    "FP32",
    "MASTER_LOW",
    "SCALES",
    "STATE_FORMATS",
    "Format",
    "StateFormat",
    "StateSpec",
    "StateTensor",
    "blocks_numel",
]
