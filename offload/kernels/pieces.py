"""`Piece`: one parameter's tensors for a rule of whole parameters; and a step of a torch optimizer without hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offload.kernels.reference import SegmentTensors
from offload.layout import Parameter


def step_alone(optimizer: torch.optim.Optimizer, *closure: Callable[[], Any]) -> None:
    """Call an optimizer's step without its hooks, which the offloaded optimizer calls itself, once a step."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # torch has wrapped it in a function that calls the hooks
        step = step.__wrapped__
    step(optimizer, *closure)


@dataclass(slots=True)
class Piece:
    """One parameter in an update.

    Attributes:
        parameter: Its description in the layout.
        segment: Its state as it is stored, its gradient and its weight, all flat.
        packed: Its packed state, flat words of 4 bytes; None if its rule packs none.
    """

    parameter: Parameter
    segment: SegmentTensors
    packed: torch.Tensor | None = None

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return elements in the order of the parameter's memory as a tensor of the parameter's shape and strides."""
        shape, stride = self.parameter.shape, self.parameter.stride
        if shape is None:
            return flat
        return flat.view(shape) if stride is None else flat.as_strided(shape, stride)

    def gradient(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient times its factor, computed in fp32, in a dtype; with a factor of 1 it is only cast."""
        gradient, factor = self.segment.gradient, self.segment.scalars.grad_scale
        if gradient is None:
            raise ValueError("an active segment needs a gradient")
        if factor != 1:
            gradient = gradient.to(torch.float32) * factor
        return self.shaped(gradient.to(dtype))
