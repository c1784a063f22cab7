"""An in-memory twin of an optimizer, computed by `offload.kernels.reference` alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

import offload
from offload.kernels import reference
from offload.protocols import SegmentFlag


class Mirror:
    """Holds copies of weights and the state that belongs to them; `step` is the definition of an update."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, decoupled: bool) -> None:
        self.decoupled = decoupled
        self.groups = [dict(group) for group in groups]
        self.weights = [
            [p.detach().clone(memory_format=torch.contiguous_format) for p in group["params"]] for group in groups
        ]
        self.masters = [[w.float().clone() for w in weights] for weights in self.weights]
        self.moments = [[(torch.zeros(w.shape), torch.zeros(w.shape)) for w in ws] for ws in self.weights]
        self.steps = [[0] * len(weights) for weights in self.weights]

    def norm(self, gradients: Sequence[Sequence[torch.Tensor | None]]) -> float:
        blocks = [reference.gradient_blocks(g) for group in gradients for g in group if g is not None]
        return math.sqrt(reference.norm_sq(blocks))

    def step(self, gradients: Sequence[Sequence[torch.Tensor | None]], clip: float = 1.0) -> None:
        for number, group in enumerate(self.groups):
            for index, gradient in enumerate(gradients[number]):
                if gradient is not None:
                    self._update(number, index, group, gradient, clip)

    def assert_same(self, optimizer: Any, groups: Sequence[dict[str, Any]]) -> None:
        """Check that an optimizer's weights and state, wherever they lie, have the bits of this twin's."""
        for number, group in enumerate(groups):
            for index, parameter in enumerate(group["params"]):
                assert same_bits(parameter.detach().cpu(), self.weights[number][index])
                state = optimizer.state_for(parameter)
                assert same_bits(state["master"], self.masters[number][index])
                assert same_bits(state["exp_avg"], self.moments[number][index][0])
                assert same_bits(state["exp_avg_sq"], self.moments[number][index][1])

    def _update(self, number: int, index: int, group: dict[str, Any], gradient: torch.Tensor, clip: float) -> None:
        self.steps[number][index] += 1
        weight = self.weights[number][index]
        exp_avg, exp_avg_sq = self.moments[number][index]
        scalars = reference.scalars(
            self.steps[number][index],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self.decoupled,
            grad_scale=clip,
            maximize=group.get("maximize", False),
        )
        flags = SegmentFlag.ACTIVE
        if self.decoupled:
            flags |= SegmentFlag.DECOUPLED_DECAY
        is_master = weight.dtype == torch.float32
        master = weight if is_master else self.masters[number][index]
        segment = reference.SegmentTensors(
            master=master.view(-1),
            state=(exp_avg.view(-1), exp_avg_sq.view(-1)),
            gradient=gradient.contiguous().view(-1),
            weight=None if is_master else weight.view(-1),
            flags=flags,
            scalars=scalars,
        )
        reference.update(segment)
        if is_master:
            self.masters[number][index] = weight


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, wherever they lie; NaN equals NaN whatever its payload."""
    left, right = left.cpu(), right.cpu()
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    equal = left.contiguous().view(whole) == right.contiguous().view(whole)
    return bool((equal | (left.isnan() & right.isnan())).all())


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether as many tensors hold the same bits, each pair of them."""
    return all(same_bits(a, b) for a, b in zip(left, right, strict=True))


def states(optimizer: offload.AdamW, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return copies of all weights, then the state of each."""
    found = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        found += optimizer.state_for(parameter).values()
    return found
