"""A model whose forward pass is nothing but to wait for its weights, and to read them."""

from __future__ import annotations

import torch


class Layer(torch.nn.Module):
    """A parameter, and what a gradient has of it: a weight that is read too early shows in all bits that follow."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> torch.Tensor:
        return 0.05 * self.weight.detach().float()
