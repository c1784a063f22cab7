"""Optimizer-state offloading over host memory and storage that never changes the numbers.

Public names are loaded when they are first used: importing the package loads neither torch nor anything native.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.config import OffloadConfig
    from offload.dtypes import DtypeCode
    from offload.errors import (
        CheckpointError,
        ConfigError,
        CorruptRecordError,
        InfeasiblePlanError,
        InternalError,
        OffloadError,
        PlanError,
        SessionBrokenError,
        StepAbortedError,
        TierClosedError,
        TierError,
        TierFullError,
    )
    from offload.layout import Parameter
    from offload.optim import SGD, Adagrad, Adam, AdamW, GradScaler, Lion
    from offload.predict.explanation import Explanation, explain
    from offload.rules import GroupScalars
    from offload.session.engine import Engine

__version__ = "0.1.0"

_HOMES = {
    "SGD": "offload.optim.simple",
    "Adagrad": "offload.optim.simple",
    "Lion": "offload.optim.simple",
    "Adam": "offload.optim",
    "AdamW": "offload.optim",
    "GradScaler": "offload.optim.scaler",
    "CheckpointError": "offload.errors",
    "ConfigError": "offload.errors",
    "CorruptRecordError": "offload.errors",
    "DtypeCode": "offload.dtypes",
    "Engine": "offload.session.engine",
    "Explanation": "offload.predict.explanation",
    "GroupScalars": "offload.rules.adam",
    "InfeasiblePlanError": "offload.errors",
    "InternalError": "offload.errors",
    "OffloadConfig": "offload.config",
    "OffloadError": "offload.errors",
    "Parameter": "offload.layout",
    "PlanError": "offload.errors",
    "SessionBrokenError": "offload.errors",
    "StepAbortedError": "offload.errors",
    "TierClosedError": "offload.errors",
    "TierError": "offload.errors",
    "TierFullError": "offload.errors",
    "explain": "offload.predict.explanation",
}
"""Where each public name lives; a test holds that it is there and nowhere else."""

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CheckpointError",
    "ConfigError",
    "CorruptRecordError",
    "DtypeCode",
    "Engine",
    "Explanation",
    "GradScaler",
    "GroupScalars",
    "InfeasiblePlanError",
    "InternalError",
    "Lion",
    "OffloadConfig",
    "OffloadError",
    "Parameter",
    "PlanError",
    "SessionBrokenError",
    "StepAbortedError",
    "TierClosedError",
    "TierError",
    "TierFullError",
    "explain",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
