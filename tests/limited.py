"""Optimizers whose sessions have other limits than everybody's: small models meet them, and nobody waits for long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import offload


def limited(kind: Any, **limits: Any) -> Any:
    """Return a class of optimizers whose sessions have these limits; see `offload.limits.Limits`."""
    return type(kind.__name__, (kind,), {"limits": replace(kind.limits, **limits), "__module__": kind.__module__})


def limit(engine: offload.Engine, **limits: Any) -> None:
    """Give a session other limits on its way; those that its parts were made with stay."""
    engine._parts.limits = replace(engine._parts.limits, **limits)
