"""Muon, as torch has it: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).

Newton-Schulz orthogonalizes the momentum of a whole matrix, so matrices are not cut; see `offload.kernels.whole`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from offload.errors import ConfigError
from offload.rules.rule import WholeRule, flag, items, not_negative, number


class _Muon(WholeRule):
    """The rule; `UpdateRule` describes the methods."""

    name = "muon"
    state = ("momentum_buffer",)
    missing_step = 1
    scratch_item_bytes = 32  # gradient, momentum and update in fp32, matrices in bf16, and rounding's random bits
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
    }

    def values(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `UpdateRule.values`; a hyperparameter that the group lacks has its default."""
        settings = {**self.defaults, **{name: group[name] for name in self.defaults if name in group}}
        lr, weight_decay, momentum, eps = not_negative(settings, "lr", "weight_decay", "momentum", "eps")
        coefficients = [number(coefficient) for coefficient in items(settings["ns_coefficients"]) or []]
        steps = settings["ns_steps"]
        if len(coefficients) != 3 or any(math.isnan(coefficient) for coefficient in coefficients):
            raise ConfigError("ns_coefficients", settings["ns_coefficients"], "give three numbers")
        # A `bool` is an `int`, but no number of iterations. Torch's Muon refuses 100 and more.
        if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < 100:
            raise ConfigError("ns_steps", steps, "give a number of iterations from 0 to 99")
        if settings["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            raise ConfigError("adjust_lr_fn", settings["adjust_lr_fn"], 'use "original" or "match_rms_adamw"')
        plain_numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
        return {
            **settings,
            **plain_numbers,
            "nesterov": flag(settings, "nesterov"),
            "ns_coefficients": tuple(coefficients),
        }

    def work(self, shape: Sequence[int]) -> float:
        """Return the floating-point operations of Newton-Schulz with the default number of iterations.

        An iteration has three matrix products. X (shorter x longer side) with its transpose takes
        2 * rows * columns * shorter operations, and so does a square matrix with X; a square matrix with itself takes
        2 * shorter^3.
        """
        rows, columns = shape
        shorter = min(rows, columns)
        return float(self.defaults["ns_steps"]) * (4.0 * rows * columns * shorter + 2.0 * shorter**3)


MUON = _Muon()
