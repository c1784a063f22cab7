"""Optimizer-state offloading over host memory and storage that never changes the numbers.

Public names are loaded when they are first used: importing the package loads neither torch nor anything native.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.checkpoint.commit import release_before_deletion as release_before_deletion
    from offload.checkpoint.request import SaveRequest as SaveRequest
    from offload.config import OffloadConfig as OffloadConfig
    from offload.dtypes import DtypeCode as DtypeCode
    from offload.errors import CheckpointError as CheckpointError
    from offload.errors import ConfigError as ConfigError
    from offload.errors import InfeasiblePlanError as InfeasiblePlanError
    from offload.errors import OffloadError as OffloadError
    from offload.errors import PlanError as PlanError
    from offload.errors import SessionBrokenError as SessionBrokenError
    from offload.errors import StepAbortedError as StepAbortedError
    from offload.errors import TierError as TierError
    from offload.errors import TierFullError as TierFullError
    from offload.layout import Parameter as Parameter
    from offload.optim import SGD as SGD
    from offload.optim import Adagrad as Adagrad
    from offload.optim import Adam as Adam
    from offload.optim import AdamW as AdamW
    from offload.optim import GradScaler as GradScaler
    from offload.optim import Lion as Lion
    from offload.optim import Muon as Muon
    from offload.optim import wrap as wrap
    from offload.session.engine import Engine as Engine
    from offload.weights.file import weights_in_file as weights_in_file
    from offload.weights.host import weights_in_host_memory as weights_in_host_memory

__version__ = "0.2.0"

_HOMES = {
    "SGD": "optim",
    "Adagrad": "optim",
    "Adam": "optim",
    "AdamW": "optim",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DtypeCode": "dtypes",
    "Engine": "session.engine",
    "GradScaler": "optim",
    "InfeasiblePlanError": "errors",
    "Lion": "optim",
    "Muon": "optim",
    "OffloadConfig": "config",
    "OffloadError": "errors",
    "Parameter": "layout",
    "PlanError": "errors",
    "SaveRequest": "checkpoint.request",
    "SessionBrokenError": "errors",
    "StepAbortedError": "errors",
    "TierError": "errors",
    "TierFullError": "errors",
    "release_before_deletion": "checkpoint.commit",
    "weights_in_file": "weights.file",
    "weights_in_host_memory": "weights.host",
    "wrap": "optim",
}
"""The module of each public name, below `offload`. A test compares it with the imports for type checkers above."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Return a public name from its module, which is imported for that; Python calls this for missing attributes."""
    if name in _HOMES:
        return getattr(import_module(f"offload.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names for `dir`: also public names that have not been loaded."""
    return sorted([*globals(), *_HOMES])
