"""`AdamW` and `Adam`: what this package's optimizers know of Adam, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from offload.config import OffloadConfig
from offload.engine.tables import GroupScalars
from offload.errors import ConfigError
from offload.layout import MOMENTS
from offload.optim.groups import Group, number
from offload.optim.optimizer import OffloadedOptimizer


class OffloadedAdam(OffloadedOptimizer):
    """What `AdamW` and `Adam` share; use one of these."""

    decoupled: ClassVar[bool]
    _moments = MOMENTS

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        amsgrad: bool = False,
        offload: OffloadConfig | Mapping[str, Any] | None = None,
    ) -> None:
        if amsgrad:
            raise ConfigError("amsgrad", amsgrad, "use false: the engine keeps two moments, not three")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, offload)

    @property
    def _kind(self) -> str:
        return "AdamW" if self.decoupled else "Adam"

    def _check_group(self, group: Group) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not 0 <= number(group.get(name)) < math.inf:
                raise ConfigError(name, group.get(name), "give a finite number >= 0")
        betas = group.get("betas")
        pair = isinstance(betas, tuple | list) and len(betas) == 2
        if not pair or not all(0 <= number(beta) < 1 for beta in betas or ()):
            raise ConfigError("betas", betas, "give two numbers from 0 (included) to 1 (not included)")
        if not isinstance(group.get("maximize", False), bool | int | np.bool_):
            raise ConfigError("maximize", group["maximize"], "use true or false")

    def _check_saved_group(self, group: Group) -> None:
        self._check_group(group)
        if group.get("amsgrad"):
            raise ConfigError("state_dict amsgrad", True, "the engine keeps two moments, not three")
        if group.get("decoupled_weight_decay", self.decoupled) != self.decoupled:
            kind = "Adam" if self.decoupled else "AdamW"
            raise ConfigError("state_dict", f"of {kind}", f"load it into offload.{kind}")

    def _scalars(self, group: Group) -> GroupScalars:
        return GroupScalars(
            lr=number(group["lr"]),
            beta1=number(group["betas"][0]),
            beta2=number(group["betas"][1]),
            eps=number(group["eps"]),
            weight_decay=number(group["weight_decay"]),
            decoupled=self.decoupled,
            maximize=bool(group["maximize"]),
        )


class AdamW(OffloadedAdam):
    """AdamW with offloaded state: decoupled weight decay (Loshchilov and Hutter, ICLR 2019), as torch's.

    Args:
        params: Parameters, groups of parameters, or named parameters, as for `torch.optim.AdamW`. Weights are bf16,
            fp16 or fp32, dense, all on the CPU or all on one CUDA (or ROCm) device.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled decay.
        maximize: Maximize instead of minimize.
        amsgrad: Not supported; only False.
        offload: Where state may live; None for host memory.

    Raises:
        ConfigError: If an argument or parameter cannot be used; raised before any file is touched.
        InfeasiblePlanError: If the state does not fit into the tiers.
    """

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        amsgrad: bool = False,
        offload: OffloadConfig | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, amsgrad=amsgrad, offload=offload)


class Adam(OffloadedAdam):
    """Adam with offloaded state (Kingma and Ba, ICLR 2015); weight decay is an L2 term of the gradient, as torch's.

    Arguments and errors are those of `AdamW`; `weight_decay` is 0 by default.
    """

    decoupled = False
