"""Update rules: which state is kept for each parameter, and how a step changes it. Pure."""

from offload.rules.adagrad import ADAGRAD
from offload.rules.adam import ADAM, ADAMW, GroupScalars
from offload.rules.classes import ClassRule, described
from offload.rules.lion import LION
from offload.rules.rule import (
    BLOCK_NUMEL,
    MASTER,
    PACKED,
    UpdateRule,
    checked_step,
    items,
    not_negative,
    number,
    segment_dtype,
)
from offload.rules.sgd import SGD_MOMENTUM

RULES: dict[str, UpdateRule] = {rule.name: rule for rule in (ADAMW, LION, ADAGRAD, SGD_MOMENTUM)}
"""The rules by name, as checkpoints have it."""

__all__ = [
    "ADAGRAD",
    "ADAM",
    "ADAMW",
    "BLOCK_NUMEL",
    "LION",
    "MASTER",
    "PACKED",
    "RULES",
    "SGD_MOMENTUM",
    "ClassRule",
    "GroupScalars",
    "UpdateRule",
    "checked_step",
    "described",
    "items",
    "not_negative",
    "number",
    "segment_dtype",
]
