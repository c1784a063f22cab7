"""SGD with momentum, as torch computes it (Sutskever et al., ICML 2013, but the rate does not enter the momentum)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from offload.errors import ConfigError
from offload.rules.rule import UpdateRule, flag, not_negative, number, rounded


class Scalars(NamedTuple):
    """The numbers that an update needs beside tensors.

    With gradient g, momentum m (momentum_buffer) and master p:

        g = grad_scale * g + decay * p
        m = momentum * m + one_minus_dampening * g
        p = p - lr * (of_gradient * g + of_momentum * m)

    The factors of the last line are (1, momentum) with Nesterov's momentum, else (0, 1).
    """

    grad_scale: float
    decay: float
    momentum: float
    one_minus_dampening: float
    of_gradient: float
    of_momentum: float
    lr: float


class _Sgd(UpdateRule):
    """The rule; `UpdateRule` describes the methods."""

    name = "sgd"
    code = 3
    state = ("momentum_buffer",)
    scalars = Scalars
    missing_step = 1
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    }

    def values(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `UpdateRule.values`; `sign` is -1 to maximize, for which `row` flips the gradient."""
        lr, momentum, weight_decay = not_negative(group, "lr", "momentum", "weight_decay")
        dampening = number(group.get("dampening"))
        if not -1e30 < dampening < 1e30:  # so that 1 - dampening is finite in fp32; NaN is refused, too
            raise ConfigError("dampening", group.get("dampening"), "give a finite number")
        if flag(group, "nesterov") and (momentum == 0 or dampening != 0):  # torch's SGD refuses that, too
            raise ConfigError("nesterov", True, "it needs a momentum and no dampening")
        sign = -1 if flag(group, "maximize") else 1
        return {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening if momentum else 0.0,  # torch's SGD ignores it without a momentum
            "weight_decay": weight_decay,
            "nesterov": flag(group, "nesterov"),
            "sign": sign,
        }

    def row(self, step: int, values: Mapping[str, Any], grad_scale: float) -> Scalars:
        """See `UpdateRule.row`; as in torch, the first update makes the gradient itself the momentum, undampened."""
        is_first = step == 1
        exact = Scalars(
            grad_scale=values["sign"] * grad_scale,
            decay=values["weight_decay"],
            momentum=0.0 if is_first else values["momentum"],
            one_minus_dampening=1.0 if is_first else 1.0 - values["dampening"],
            of_gradient=1.0 if values["nesterov"] else 0.0,
            of_momentum=values["momentum"] if values["nesterov"] else 1.0,
            lr=values["lr"],
        )
        return Scalars(*rounded(exact))

    def forgets(self, step: int, values: Mapping[str, Any]) -> bool:
        """See `UpdateRule.forgets`; at the first update, or with a momentum of 0, the old buffer has the factor 0."""
        return step == 1 or values["momentum"] == 0


SGD_MOMENTUM = _Sgd()
