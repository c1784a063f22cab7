"""A plain training loop: what weights and state have to be, whatever the package does. It imports nothing of it.

The contract, over a copy of the model that torch alone trains:

* What has a gradient is updated, in fp32 operations of which each is rounded on its own, by scalars that are computed
  in float64 and rounded once.
* A 16-bit weight is what its master rounds to. Where somebody has changed elements of it, they count: this is decided
  at the next update, and shown until then. Moments stay.
* What has no state begins anew.

How state is stored is a function that the loop is given: it returns what is left of the tensors when they come back.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Stored = Callable[[str, torch.Tensor, int | None, Tensors], Tensors]
"""From a parameter's name, its weight, the number of its update (None if it is none: nothing is drawn) and state."""
Group = dict[str, Any]


def single(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def root(values: torch.Tensor) -> torch.Tensor:
    """Return fp32 roots, which torch's own fp32 operation does not round correctly everywhere."""
    return values.double().sqrt().float()


# Rules: from hyperparameters, the number of the update, the gradient and state, the change and the new state


def adam(group: Group, step: int, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Sequence[torch.Tensor]:
    beta1, beta2 = group["betas"]
    m = m * single(beta1) + g * single(1 - beta1)
    v = v * single(beta2) + (g * g) * single(1 - beta2)
    by = root(v) * single(1 / (1 - beta2**step) ** 0.5) + single(group["eps"])
    return m / by * single(group["lr"] / (1 - beta1**step)), m, v


def lion(group: Group, step: int, g: torch.Tensor, m: torch.Tensor) -> Sequence[torch.Tensor]:
    beta1, beta2 = group["betas"]
    mixed = m * single(beta1) + g * single(1 - beta1)
    sign = torch.where((mixed > 0) | (mixed < 0), torch.copysign(torch.ones_like(mixed), mixed), mixed)
    return sign * single(group["lr"]), m * single(beta2) + g * single(1 - beta2)


def adagrad(group: Group, step: int, g: torch.Tensor, total: torch.Tensor) -> Sequence[torch.Tensor]:
    total = total + g * g
    size = group["lr"] / (1 + (step - 1) * group["lr_decay"])
    return g / (root(total) + single(group["eps"])) * single(size), total


def sgd(group: Group, step: int, g: torch.Tensor, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
    momentum = group["momentum"]
    kept, added = (momentum, 1 - group["dampening"]) if step > 1 and momentum else (0.0, 1.0)
    buffer = (buffer if kept else torch.zeros_like(buffer)) * single(kept) + g * single(added)
    of_gradient, of_momentum = (1.0, single(momentum)) if group["nesterov"] else (0.0, 1.0)
    return (g * of_gradient + buffer * of_momentum) * single(group["lr"]), buffer


RULES: dict[str, tuple[Callable[..., Sequence[torch.Tensor]], tuple[str, ...]]] = {
    "adamw": (adam, ("exp_avg", "exp_avg_sq")),
    "adam": (adam, ("exp_avg", "exp_avg_sq")),
    "lion": (lion, ("exp_avg",)),
    "adagrad": (adagrad, ("sum",)),
    "sgd": (sgd, ("momentum_buffer",)),
}
DECOUPLED = {"adamw", "lion"}
"""Whose weights decay by themselves, and not by way of their gradients."""


@torch.no_grad()
def updated(
    rule: str, group: Group, number: int, gradient: torch.Tensor, *kept: torch.Tensor, scale: float = 1.0
) -> Tensors:
    """Return the master and what the rule keeps beside it, given both, after update `number`.

    The gradient is multiplied by `scale` first.
    """
    change, names = RULES[rule]
    master, *state = kept
    gradient = gradient.float() * single(-scale if group.get("maximize") else scale)
    if rule in DECOUPLED:
        master = master * single(1 - group["lr"] * group["weight_decay"])
    elif group["weight_decay"]:
        gradient = gradient + master * single(group["weight_decay"])
    by, *state = change(group, number, gradient, *state)
    return dict(zip(("master", *names), (master - by, *state), strict=True))


@dataclass
class Kept:
    """One parameter's state: its updates, its master, and what its rule keeps."""

    step: int
    tensors: Tensors


@dataclass
class Snapshot:
    """What a checkpoint, or a state dict, holds."""

    weights: Tensors
    kept: dict[str, Kept]
    groups: list[Group]
    more: dict[str, Any] = field(default_factory=dict)
    """What whoever takes it keeps with it."""


def exact(name: str, weight: torch.Tensor, step: int | None, tensors: Tensors) -> Tensors:
    return tensors


class Loop:
    """A model, the state of each parameter that has been updated, and groups, of which each has its "names"."""

    def __init__(self, model: torch.nn.Module, groups: list[Group], rule: str, stored: Stored = exact) -> None:
        self.model, self.groups, self.stored, self.rule = model, groups, stored, rule
        self._names = RULES[rule][1]
        self.kept: dict[str, Kept] = {}

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    @property
    def gradients(self) -> Tensors:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def norm(self) -> float:
        return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in self.gradients.values()))

    def is_finite(self) -> bool:
        return all(bool(gradient.isfinite().all()) for gradient in self.gradients.values())

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> None:
        """Update what has a gradient, which is multiplied by `scale` first."""
        for group in self.groups:
            for name in group["names"]:
                parameter = self.parameters[name]
                if parameter.grad is None:
                    continue
                kept, number = self.settled(name).tensors.values(), 1
                if name in self.kept:
                    number += self.kept[name].step
                tensors = updated(self.rule, group, number, parameter.grad, *kept, scale=scale)
                self.kept[name] = Kept(number, self.stored(name, parameter, number, tensors))
                parameter.copy_(self.kept[name].tensors["master"])

    def drop(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def settled(self, name: str) -> Kept:
        """Return the state as it is now, given the weight; what is kept is left as it is."""
        weight = self.parameters[name].detach()
        kept = copy.deepcopy(self.kept.get(name))
        if kept is None:
            names = ("master", *self._names)
            kept = Kept(0, {each: torch.zeros(weight.shape) for each in names})
            kept.tensors["master"] = weight.float()
        else:
            master = kept.tensors["master"]
            kept.tensors["master"] = torch.where(are_same(master.to(weight.dtype), weight), master, weight.float())
        kept.tensors["master"] = self.stored(name, weight, None, kept.tensors)["master"]
        return kept

    @torch.no_grad()
    def refresh(self) -> None:
        """Read all masters from the weights."""
        for name, kept in self.kept.items():
            kept.tensors["master"] = self.parameters[name].detach().float()

    def reset(self, names: Iterable[str]) -> None:
        """Begin anew, but for masters."""
        for name in names:
            kept = self.kept[name]
            kept.step = 0
            kept.tensors |= {each: torch.zeros_like(kept.tensors[each]) for each in self._names}

    def write(self, name: str, tensor: str, values: torch.Tensor) -> None:
        kept = self.kept[name]
        kept.tensors = self.stored(name, self.parameters[name], None, {**kept.tensors, tensor: values})

    def snapshot(self, **more: Any) -> Snapshot:
        weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        kept = {name: self.settled(name) for name in self.kept}
        return Snapshot(weights, kept, copy.deepcopy(self.groups), more)

    @torch.no_grad()
    def load(self, snapshot: Snapshot) -> None:
        """Take state from a snapshot; what it knows nothing of begins anew."""
        self.kept = {}
        for name, weight in snapshot.weights.items():
            self.parameters[name].copy_(weight)
            kept = snapshot.kept.get(name)
            if kept is not None and (kept.step or weight.dtype != torch.float32):  # else there is nothing to keep
                self.kept[name] = Kept(kept.step, self.stored(name, weight, None, dict(kept.tensors)))
        for group, saved in zip(self.groups, snapshot.groups, strict=False):
            group |= {key: value for key, value in saved.items() if key != "names"}


def are_same(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return where two tensors of one type have the same bits; NaN equals NaN whatever its payload."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.itemsize]
    return (left.contiguous().view(whole) == right.contiguous().view(whole)) | (left.isnan() & right.isnan())
