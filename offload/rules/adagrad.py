"""Adagrad: Duchi et al., "Adaptive Subgradient Methods ..." (JMLR 12, 2011), with torch's decay of the rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from offload.rules.rule import UpdateRule, flag, not_negative, rounded


class Scalars(NamedTuple):
    """The numbers that an update needs beside tensors.

    With gradient g and master p:

        g = grad_scale * g + decay * p
        sum = sum + g^2
        p = p - step_size * g / (sqrt(sum) + eps)
    """

    grad_scale: float
    decay: float
    eps: float
    step_size: float


class _Adagrad(UpdateRule):
    """The rule; `UpdateRule` describes the methods."""

    name = "adagrad"
    code = 2
    state = ("sum",)
    roots = ("sum",)
    scalars = Scalars
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-2,
        "lr_decay": 0.0,
        "weight_decay": 0.0,
        "eps": 1e-10,
        "maximize": False,
    }

    def values(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `UpdateRule.values`; `sign` is -1 to maximize, for which `row` flips the gradient."""
        names = ("lr", "lr_decay", "weight_decay", "eps")
        numbers = dict(zip(names, not_negative(group, *names), strict=True))
        return {**numbers, "sign": -1 if flag(group, "maximize") else 1}

    def row(self, step: int, values: Mapping[str, Any], grad_scale: float) -> Scalars:
        """See `UpdateRule.row`; the learning rate decays with the number of the update, as torch's does."""
        exact = Scalars(
            grad_scale=values["sign"] * grad_scale,
            decay=values["weight_decay"],
            eps=values["eps"],
            step_size=values["lr"] / (1.0 + (step - 1) * values["lr_decay"]),
        )
        return Scalars(*rounded(exact))

    def added_to_roots(self, values: Mapping[str, Any]) -> float | None:
        eps: float = values["eps"]
        return eps


ADAGRAD = _Adagrad()
