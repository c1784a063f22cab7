"""SGD with momentum; see `offload.rules.sgd` for where it is from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.rules.sgd import Scalars


def change(s: Scalars, g: torch.Tensor, state: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what is subtracted from the master; `state` is momentum_buffer, updated in place."""
    (buffer,) = state
    buffer.copy_(buffer * s.momentum + g * s.one_minus_dampening)
    # `of_gradient` and `of_momentum` are 1 and momentum with Nesterov's momentum, else 0 and 1.
    return (g * s.of_gradient + buffer * s.of_momentum) * s.lr
