"""A model with all kinds of weights, and all that there is to compare of it and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from mirror import same_bits


class Model(torch.nn.Module):
    """Weights of all shapes, one of them tied, one empty, one frozen, one that another order of dimensions has."""

    def __init__(self, dtype: torch.dtype, seed: int = 0, *, rows: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"embed": (50, 40), "matrix": (140, 60), "picture": (8, 4, 3, 5), "bias": (60,), "scalar": ()}
        for name, shape in (*shapes.items(), ("empty", (0, 7)), ("frozen", (9,))):
            drawn = torch.randn(shape, generator=generator).to(dtype)
            if name == "picture" and not rows:
                drawn = drawn.to(memory_format=torch.channels_last)
            setattr(self, name, torch.nn.Parameter(drawn, requires_grad=name != "frozen"))
        self.tied = self.embed

    def groups(self) -> list[dict[str, Any]]:
        named = list(self.named_parameters())
        return [
            {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [(n, p) for n, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ]

    def trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def train_with(self, optimizer: Any, *seeds: int) -> None:
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for parameter in self.trained():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
            optimizer.step()
            optimizer.zero_grad()


def everything(model: Model, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {f"{name}.weight": p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found |= {f"{name}.{key}": value for key, value in optimizer.state_for(parameter).items()}
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(same_bits(left[name], right[name]) for name in left)
