"""Lion: X. Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023, arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from offload.rules.rule import UpdateRule, check_decay_rates, decay_rates, flag, not_negative, rounded


class Scalars(NamedTuple):
    """The numbers that an update needs beside tensors.

    With gradient g, momentum m (exp_avg) and master p:

        g = grad_scale * g
        p = decay * p - lr * sign(beta1 * m + one_minus_beta1 * g)
        m = beta2 * m + one_minus_beta2 * g
    """

    grad_scale: float
    decay: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    lr: float


class _Lion(UpdateRule):
    """The rule; `UpdateRule` describes the methods."""

    name = "lion"
    code = 1
    state = ("exp_avg",)
    scalars = Scalars
    missing_step = 1
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}

    def check(self, group: Mapping[str, Any]) -> None:
        check_decay_rates(group)

    def values(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `UpdateRule.values`; `sign` is -1 to maximize, for which `row` flips the gradient."""
        lr, weight_decay = not_negative(group, "lr", "weight_decay")
        betas = decay_rates(group)
        return {"lr": lr, "betas": betas, "weight_decay": weight_decay, "sign": -1 if flag(group, "maximize") else 1}

    def row(self, step: int, values: Mapping[str, Any], grad_scale: float) -> Scalars:
        beta1, beta2 = values["betas"]
        exact = Scalars(
            grad_scale=values["sign"] * grad_scale,
            decay=1.0 - values["lr"] * values["weight_decay"],
            beta1=beta1,
            one_minus_beta1=1.0 - beta1,
            beta2=beta2,
            one_minus_beta2=1.0 - beta2,
            lr=values["lr"],
        )
        return Scalars(*rounded(exact))

    def decoupled(self, values: Mapping[str, Any]) -> bool:
        return True


LION = _Lion()
