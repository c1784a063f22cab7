"""`Lion`, `Adagrad` and `SGD`: one state tensor beside the master, 8 bytes a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch

from offload.config import OffloadConfig
from offload.optim.groups import Group, TorchOptions
from offload.optim.optimizer import OffloadedOptimizer
from offload.rules import ADAGRAD, LION, SGD_MOMENTUM, not_negative

Offload = OffloadConfig | Mapping[str, Any] | None
Rate = float | torch.Tensor


class Lion(OffloadedOptimizer):
    """Lion with offloaded state (Chen et al. 2023, arXiv 2302.06675, algorithm 2); weight decay is decoupled.

    Args:
        params: As for `AdamW`.
        lr: Learning rate; a third to a tenth of AdamW's.
        betas: How much of the old momentum counts in the sign, and in the new momentum.
        weight_decay: Decoupled decay; three to ten times AdamW's.
        maximize: Maximize instead of minimize.
        offload: Where state may live; None for host memory.
        options: As for `AdamW`.

    Raises:
        ConfigError: If an argument or parameter cannot be used; raised before any file is touched.
        InfeasiblePlanError: If the state does not fit into the tiers.
    """

    rule, kind = LION, "Lion"

    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        offload: Offload = None,
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}, offload, options
        )


class Adagrad(OffloadedOptimizer):
    """Adagrad with offloaded state (Duchi et al., JMLR 12, 2011), as torch's; weight decay is an L2 term.

    Args:
        params: As for `AdamW`.
        lr: Learning rate.
        lr_decay: The rate of a parameter's update `n` is `lr / (1 + (n - 1) * lr_decay)`.
        weight_decay: Coefficient of the L2 term.
        initial_accumulator_value: What the sums of squares start from. As torch has it, such a start is written, and
            seen in `state`, before the first update; 0 is not.
        eps: Added to the root of the sum of squares.
        maximize: Maximize instead of minimize.
        offload: Where state may live; None for host memory.
        options: As for `AdamW`.

    Raises:
        ConfigError: If an argument or parameter cannot be used; raised before any file is touched.
        InfeasiblePlanError: If the state does not fit into the tiers.
    """

    rule, kind, torch_class = ADAGRAD, "Adagrad", torch.optim.Adagrad

    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        offload: Offload = None,
        **options: Unpack[TorchOptions],
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps, "maximize": maximize}
        defaults["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(params, defaults, offload, options)

    def _start_values_of(self, group: Group) -> dict[str, float]:
        """Return what the sums of squares start from; refuse a value that is negative or no number."""
        (start,) = not_negative({"initial_accumulator_value": 0.0, **group}, "initial_accumulator_value")
        return {"sum": start}

    def _check_group(self, group: Group) -> None:
        """Refuse hyperparameters that cannot be used, and start values."""
        super()._check_group(group)
        self._start_values_of(group)


class SGD(OffloadedOptimizer):
    """SGD with momentum and offloaded state, as torch's; weight decay is an L2 term.

    Args:
        params: As for `AdamW`.
        lr: Learning rate.
        momentum: Part of the momentum that stays. While it is 0, the buffer is the last gradient, from which a
            momentum set later goes on; torch leaves its buffer alone then, and starts a missing one with the first
            gradient that has a momentum.
        dampening: Part of a gradient that does not enter the momentum; the first gradient enters whole.
        weight_decay: Coefficient of the L2 term.
        nesterov: Nesterov's momentum.
        maximize: Maximize instead of minimize.
        offload: Where state may live; None for host memory.
        options: As for `AdamW`.

    Raises:
        ConfigError: If an argument or parameter cannot be used; raised before any file is touched.
        InfeasiblePlanError: If the state does not fit into the tiers.
    """

    rule, kind, torch_class = SGD_MOMENTUM, "SGD", torch.optim.SGD

    def __init__(
        self,
        params: Iterable[Any],
        lr: Rate = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        offload: Offload = None,
        **options: Unpack[TorchOptions],
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "nesterov": nesterov, "maximize": maximize}, offload, options)
