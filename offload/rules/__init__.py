"""Update rules: which state is kept for each parameter, and how a step changes it. Pure."""

from offload.rules.adagrad import ADAGRAD
from offload.rules.adam import ADAM, ADAMW, GroupScalars
from offload.rules.classes import ClassRule, described
from offload.rules.lion import LION
from offload.rules.muon import MUON
from offload.rules.rule import (
    BLOCK_NUMEL,
    MASTER,
    MOST_STEPS,
    PACKED,
    UpdateRule,
    checked_step,
    flag,
    items,
    not_negative,
    number,
    plain_number,
    segment_dtype,
)
from offload.rules.sgd import SGD_MOMENTUM

RULES: dict[str, UpdateRule] = {rule.name: rule for rule in (ADAMW, LION, ADAGRAD, SGD_MOMENTUM)}
"""The rules by name that have kernels, and whose parameters may be cut anywhere."""

NAMED = {**RULES, MUON.name: MUON}
"""All rules by name, as checkpoints have it; those of other classes are not known before a checkpoint names them."""

__all__ = [
    "ADAGRAD",
    "ADAM",
    "ADAMW",
    "BLOCK_NUMEL",
    "LION",
    "MASTER",
    "MOST_STEPS",
    "MUON",
    "NAMED",
    "PACKED",
    "RULES",
    "SGD_MOMENTUM",
    "ClassRule",
    "GroupScalars",
    "UpdateRule",
    "checked_step",
    "described",
    "flag",
    "items",
    "not_negative",
    "number",
    "plain_number",
    "segment_dtype",
]
