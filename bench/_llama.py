"""A Llama that can be made where memory is scarce, from one block of random numbers, and can recompute its layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

import offload
from offload.cli.model import VOCABULARY, Shape


class Block(nn.Module):
    """A layer of a Llama: `Shape.numel` counts its weights. Its norms have the only vectors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.hidden, shape.intermediate
        self.heads = shape.heads
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = rms_norm(x, x.shape[-1:], self.norms[0])
        q, k, v = (f(found).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        found = rms_norm(x, x.shape[-1:], self.norms[1])
        return x + self.down(silu(self.gate(found)) * self.up(found))


class Model(nn.Module):
    """A Llama without positions; where it recomputes, each layer's activations are computed again in backward."""

    def __init__(self, shape: Shape, recomputes: bool = True, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embed = nn.Embedding(vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return rms_norm(x, x.shape[-1:], self.norm) @ self.embed.weight.T


def build(shape: Shape, seed: int, weights_in: str | None = None) -> Model:
    """Return the model in bf16, the same for the same shape and seed; it takes no memory while it is made.

    Args:
        shape: Of the model.
        seed: Of its weights.
        weights_in: The folder in which these lie, in a file; None for memory.
    """
    with torch.device("meta"):
        model = Model(shape).bfloat16()
    if weights_in is None:
        model.to_empty(device="cpu")
    else:
        offload.weights_in_file(model, weights_in)
    # A prime number of them: no two rows of a matrix begin at the same one.
    some = (0.02 * torch.randn(1_000_003, generator=torch.Generator().manual_seed(seed))).bfloat16()
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            if weight.dim() < 2:
                weight.fill_(1.0)
                continue
            source = some.roll(7919 * number)
            for piece in weight.view(-1).split(len(some)):
                piece.copy_(source[: len(piece)])
    return model
