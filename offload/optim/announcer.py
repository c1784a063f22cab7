"""What an engine is told as gradients arrive, for the updates that it makes in backward.

Public for those who drive an `offload.Engine` themselves, as the DeepSpeed integration does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from offload.errors import ConfigError
from offload.optim.pace import Pace
from offload.session.gradients import Gradients

UNREADABLE = (ArithmeticError, ConfigError, LookupError, RuntimeError, TypeError, ValueError)
"""What hyperparameters raise that cannot be read now. Not all exceptions: a signal handler may raise others."""


class BoundWeights(Protocol):
    """Knows where weights are bound: `Weights`, or DeepSpeed's shard."""

    def read_by_updates(self) -> Sequence[torch.Tensor] | None:
        """Return what updates in backward read that is not the engine's: fp32 weights, and gradients in no slot.

        None: a weight is not where it is bound, so nobody can tell what the step will read.
        """


class Announcer:
    """Says of each gradient that arrives of which pass it is, and as a pass begins, what the step would do then.

    Args:
        optimizer: Has the groups whose hyperparameters count; it is not kept alive.
        values: Returns what `Engine.step` is told of an optimizer's groups now.
        weights: Its weights.
        pace: Is told that gradients arrive.

    Attributes:
        is_last_pass: Returns whether the backward pass under way is the last before a step; None where nobody knows.
    """

    def __init__(
        self,
        optimizer: Any,
        values: Callable[[Any], Sequence[Any]],
        weights: BoundWeights,
        pace: Pace,
    ) -> None:
        self.is_last_pass: Callable[[], bool] | None = None
        self._optimizer = weakref.ref(optimizer)
        self._values = values
        self._weights = weights
        self._pace = pace

    def arrives(
        self, gradients: Gradients, position: int, *, is_last: bool | None = None, scale: float | None = None
    ) -> None:
        """Say that a gradient is about to be given to an engine; call this first.

        Args:
            gradients: Those of the engine.
            position: Of the gradient's parameter.
            is_last: Whether its pass is the last before the step; by default `is_last_pass` says so.
            scale: Of the loss, where it is known; else the last step's is expected.
        """
        self._pace.arrived()
        if not gradients.are_read_early:
            return
        if is_last is None and self.is_last_pass is not None:
            is_last = bool(self.is_last_pass())
        if not gradients.begins_pass(position, is_last):
            return
        optimizer, kept = self._optimizer(), self._weights.read_by_updates()
        if optimizer is None or kept is None:
            return
        try:
            groups = self._values(optimizer)
        except UNREADABLE:  # the caller may mend them before the step, which raises it else
            return
        gradients.foresee(groups, kept, scale)
