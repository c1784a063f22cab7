"""Adagrad; see `offload.rules.adagrad` for where it is from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.kernels.reference.rounding import square_root
from offload.rules.adagrad import Scalars


def change(s: Scalars, g: torch.Tensor, state: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what is subtracted from the master; `state` is sum (of squared gradients), updated in place."""
    (total,) = state
    total.copy_(total + g * g)
    return (g / (square_root(total) + s.eps)) * s.step_size
