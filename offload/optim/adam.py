"""`AdamW` and `Adam`: their arguments and defaults; the arithmetic is in `offload/rules` and `offload/kernels`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch

from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.optim.groups import Group, TorchOptions
from offload.optim.optimizer import OffloadedOptimizer
from offload.rules import ADAM, ADAMW


class OffloadedAdam(OffloadedOptimizer):
    """The base class of `AdamW` and `Adam`; use one of these."""

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
        **options: Unpack[TorchOptions],
    ) -> None:
        if amsgrad:
            raise _refuse_third_moment("amsgrad")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, offload, options)

    def _check_group(self, group: Group) -> None:
        """Refuse a group with `amsgrad`, or with the other class's weight decay, as torch's classes write them."""
        super()._check_group(group)
        if group.get("amsgrad"):
            raise _refuse_third_moment("amsgrad")
        is_decoupled = self.rule is ADAMW
        if group.get("decoupled_weight_decay", is_decoupled) != is_decoupled:
            advice = f"leave it out, or use offload.{self._other_class}"
            raise ConfigError("decoupled_weight_decay", not is_decoupled, advice)

    def _check_saved_group(self, group: Group) -> None:
        """Refuse a group of a state dict as `_check_group` does, in words about the state dict."""
        if group.get("amsgrad"):
            raise _refuse_third_moment("state_dict amsgrad")
        is_decoupled = self.rule is ADAMW
        if group.get("decoupled_weight_decay", is_decoupled) != is_decoupled:
            raise ConfigError("state_dict", f"of {self._other_class}", f"load it into offload.{self._other_class}")
        # Last, as it calls `_check_group`, which would refuse the same in words about the constructor.
        super()._check_saved_group(group)

    @property
    def _other_class(self) -> str:
        """The class with the other weight decay."""
        return "Adam" if self.rule is ADAMW else "AdamW"


def _refuse_third_moment(field: str) -> ConfigError:
    """Return the error for `amsgrad`."""
    return ConfigError(field, True, "use false: the engine keeps two moments, not three")


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
        options: `foreach`, `fused`, `capturable`, `differentiable`, as torch has them; the last two only False.

    Raises:
        ConfigError: If an argument or parameter cannot be used; raised before any file is touched.
        InfeasiblePlanError: If the state does not fit into the tiers.
    """

    rule, kind, torch_class = ADAMW, "AdamW", torch.optim.AdamW

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
        **options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, maximize=maximize, amsgrad=amsgrad, offload=offload, **options
        )


class Adam(OffloadedAdam):
    """Adam with offloaded state (Kingma and Ba, ICLR 2015); weight decay is an L2 term of the gradient, as torch's.

    Arguments and errors are those of `AdamW`; `weight_decay` is 0 by default.
    """

    rule, kind, torch_class = ADAM, "Adam", torch.optim.Adam
