"""Adam and AdamW. Bias correction is folded into two scalars; see `offload.kernels.reference.adam`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload.errors import ConfigError
from offload.rules.rule import UpdateRule, check_decay_rates, decay_rates, flag, not_negative, rounded


@dataclass(frozen=True, slots=True)
class GroupScalars:
    """Adam's hyperparameters of one group for one step.

    Attributes:
        lr: Learning rate.
        beta1: Decay rate of exp_avg, in [0, 1) unless a schedule has exceeded that.
        beta2: Decay rate of exp_avg_sq, in [0, 1).
        eps: Added to the root of the second moment after bias correction.
        weight_decay: Coefficient of the decay.
        decoupled: AdamW's decay, `p * (1 - lr * weight_decay)`, instead of the L2 term of Adam.
        maximize: Flip the sign of the gradient.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool = True
    maximize: bool = False


class Scalars(NamedTuple):
    """The numbers that an update needs beside tensors; `scalars` computes them.

    With gradient g, moments m (exp_avg) and v (exp_avg_sq), master p, and t the number of the update:

        g = grad_scale * g
        p = decay * p (AdamW), or g = g + decay * p (Adam)
        m = beta1 * m + one_minus_beta1 * g
        v = beta2 * v + one_minus_beta2 * g^2
        p = p - step_size * m / (inv_bias2_sqrt * sqrt(v) + eps)

    This is Adam's update: step_size is lr / (1 - beta1^t), and inv_bias2_sqrt is 1 / sqrt(1 - beta2^t).
    """

    grad_scale: float
    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_bias2_sqrt: float
    eps: float
    step_size: float


def scalars(
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    grad_scale: float = 1.0,
    maximize: bool = False,
) -> Scalars:
    """Return the scalars of one parameter's update, computed in float64 and rounded once to float32.

    Args:
        step: Number of this update of the parameter, counted from 1.
        lr: See `GroupScalars`, as for the other hyperparameters.
        betas: The second in [0, 1); the first any number for which the bias correction is not 0 (for 1 it is).
        eps: See `GroupScalars`, as for `weight_decay`, `decoupled` and `maximize`.
        grad_scale: Factor of the gradient: clipping, one over the loss scale, or their product.

    Raises:
        ValueError: `step` is below 1.
        ConfigError: A beta has no bias correction at this update.
    """
    beta1, beta2 = betas
    if step < 1:
        raise ValueError(f"step: {step} cannot be used; updates are counted from 1")
    try:
        bias1 = 1.0 - beta1**step
    except OverflowError:  # the power of a beta far beyond 1
        bias1 = 0.0  # refused below
    if bias1 == 0.0 or not 0.0 <= beta2 < 1.0:
        raise ConfigError("betas", betas, f"at update {step} they have no bias correction; both belong in [0, 1)")
    exact = Scalars(
        grad_scale=-grad_scale if maximize else grad_scale,
        decay=1.0 - lr * weight_decay if decoupled else weight_decay,
        beta1=beta1,
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        inv_bias2_sqrt=1.0 / (1.0 - beta2**step) ** 0.5,
        eps=eps,
        step_size=lr / bias1,
    )
    return Scalars(*rounded(exact))


class _Adam(UpdateRule):
    """Adam, or with `decoupled` AdamW; `UpdateRule` describes the methods."""

    name = "adam"
    code = 0
    state = ("exp_avg", "exp_avg_sq")
    roots = ("exp_avg_sq",)
    scalars = Scalars

    def __init__(self, *, decoupled: bool, weight_decay: float) -> None:
        self._decoupled = decoupled
        numbers = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay}
        self.defaults = {**numbers, "maximize": False}  # type: ignore[misc]

    def check(self, group: Mapping[str, Any]) -> None:
        check_decay_rates(group)

    def values(self, group: Mapping[str, Any]) -> GroupScalars:
        lr, eps, weight_decay = not_negative(group, "lr", "eps", "weight_decay")
        beta1, beta2 = decay_rates(group)
        return GroupScalars(lr, beta1, beta2, eps, weight_decay, self._decoupled, flag(group, "maximize"))

    def row(self, step: int, values: GroupScalars, grad_scale: float) -> Scalars:
        return scalars(
            step,
            lr=values.lr,
            betas=(values.beta1, values.beta2),
            eps=values.eps,
            weight_decay=values.weight_decay,
            decoupled=values.decoupled,
            grad_scale=grad_scale,
            maximize=values.maximize,
        )

    def decoupled(self, values: GroupScalars) -> bool:
        return values.decoupled

    def added_to_roots(self, values: GroupScalars) -> float | None:
        return values.eps


ADAM = _Adam(decoupled=False, weight_decay=0.0)
ADAMW = _Adam(decoupled=True, weight_decay=1e-2)
