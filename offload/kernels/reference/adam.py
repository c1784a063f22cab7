"""Adam of Kingma and Ba, "Adam: A Method for Stochastic Optimization" (ICLR 2015, algorithm 1).

Weight decay is an L2 term, or decoupled as in Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR
2019, algorithm 2). Bias correction is folded into two scalars; the order of operations is our own choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.kernels.reference.rounding import square_root
from offload.rules.adam import Scalars


def change(s: Scalars, g: torch.Tensor, state: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what is subtracted from the master; `state` is exp_avg and exp_avg_sq, updated in place."""
    m, v = state
    m.copy_(m * s.beta1 + g * s.one_minus_beta1)
    v.copy_(v * s.beta2 + (g * g) * s.one_minus_beta2)
    denominator = square_root(v) * s.inv_bias2_sqrt + s.eps
    return (m / denominator) * s.step_size
