"""Lion; see `offload.rules.lion` for where it is from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.rules.lion import Scalars


def change(s: Scalars, g: torch.Tensor, state: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what is subtracted from the master; `state` is exp_avg, updated in place.

    The sign is 1 or -1, or the value itself where that is a zero or NaN.
    """
    (m,) = state
    mixed = m * s.beta1 + g * s.one_minus_beta1
    m.copy_(m * s.beta2 + g * s.one_minus_beta2)
    sign = torch.where((mixed > 0) | (mixed < 0), torch.copysign(torch.ones_like(mixed), mixed), mixed)
    return sign * s.lr
