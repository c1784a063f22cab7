"""An in-memory twin of an AdamW, computed by `loop.updated`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from loop import are_same, updated
from sharded import local, own

import offload
from offload.kernels import reference


class Mirror:
    """Holds copies of weights and the state that belongs to them; `step` is the definition of an update."""

    def __init__(self, parameters: Iterable[torch.Tensor], **settings: Any) -> None:
        self.settings = settings
        self.weights = [p.detach().clone(memory_format=torch.contiguous_format) for p in parameters]
        self.masters = [weight.float().clone() for weight in self.weights]
        self.moments = [[torch.zeros(weight.shape) for _ in range(2)] for weight in self.weights]
        self.steps = [0] * len(self.weights)

    def norm(self, gradients: Sequence[torch.Tensor]) -> float:
        return math.sqrt(reference.norm_sq([reference.gradient_blocks(gradient) for gradient in gradients]))

    def step(self, gradients: Sequence[torch.Tensor], clip: float = 1.0) -> None:
        for index, (weight, gradient) in enumerate(zip(self.weights, gradients, strict=True)):
            self.steps[index] += 1
            kept = weight if weight.dtype == torch.float32 else self.masters[index], *self.moments[index]
            gradient = gradient.reshape(weight.shape)
            after = updated("adamw", self.settings, self.steps[index], gradient, *kept, scale=clip)
            self.masters[index], *self.moments[index] = after.values()
            weight.copy_(after["master"])

    def assert_same(self, optimizer: Any, parameters: Iterable[torch.Tensor]) -> None:
        """Check that weights and state, wherever they lie, have the bits of this twin's; or this rank's piece has."""
        for index, parameter in enumerate(parameters):
            found = parameter.detach(), *optimizer.state_for(parameter).values()
            wholes = self.weights[index], self.masters[index], *self.moments[index]
            for mine, whole in zip(found, wholes, strict=True):
                assert same_bits(local(mine), own(mine, whole)), index


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, wherever they lie; NaN equals NaN whatever its payload."""
    left, right = left.cpu(), right.cpu()
    return left.dtype == right.dtype and left.shape == right.shape and bool(are_same(left, right).all())


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether as many tensors hold the same bits, each pair of them."""
    return all(same_bits(a, b) for a, b in zip(left, right, strict=True))


def states(optimizer: offload.AdamW, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return copies of all weights, then the state of each."""
    found = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        found += optimizer.state_for(parameter).values()
    return found
