"""What programs train: weights whose gradients are given, and a model of parts that are awkward to offload."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parent / "faults"))
from layers import Layer

WIDTH, TOKENS = 64, 70


class Twice(torch.autograd.Function):
    """Saves an input twice, an output, and a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(x, x.view(-1), y, y.t() if y.dim() == 2 else y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, flat, y, turned = ctx.saved_tensors
        return grad * 2 + 1e-4 * (flat.view_as(x) + y + (turned.t() if y.dim() == 2 else turned))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(0, 1) for part in self.joint(x).chunk(3, -1))
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))


class Odd(nn.Module):
    """Views, broadcasts, changes in place and types that come up in models."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.kinds = [rng.choice(("relu_", "expand", "cat", "half", "twice", "complex", "index")) for _ in range(3)]
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mask", torch.arange(WIDTH).float().remainder(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for kind in self.kinds:
            x = getattr(self, kind)(x * self.scale).to(x.dtype)
        return x * self.mask

    def relu_(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(x + 1)

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x.mean(0, keepdim=True).expand_as(x)).tanh()

    def cat(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, ::2].exp().clamp(max=3), x[:, 1::2].sigmoid()], 1)

    def half(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16() * x.bfloat16().t().contiguous().t()

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return Twice.apply(x)

    def complex(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.view_as_complex(x.float().unflatten(1, (-1, 2)))
        return torch.view_as_real(found * found.conj()).flatten(1)

    def index(self, x: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(len(x)).flip(0)] * x


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant) if x.requires_grad else self.inner(x)


class Failing(nn.Module):
    """Raises when it is told to, in forward or in backward."""

    when = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when == "forward":
            raise ValueError("in forward")
        if self.when == "backward" and x.requires_grad:
            x = x * 1
            x.register_hook(self.raise_it)
        return x

    def raise_it(self, grad: torch.Tensor) -> None:
        raise ValueError("in backward")


class Skipped(nn.Module):
    """A layer that some passes leave out: its parameters have no gradient then."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.skips else x + self.inner(x)


def part(rng: random.Random) -> nn.Module:
    match rng.choice(("mlp", "mlp", "attention", "odd", "norm", "glu", "skipped")):
        case "attention":
            return Attention()
        case "odd":
            return Odd(rng)
        case "norm":
            return nn.LayerNorm(WIDTH)
        case "glu":
            return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GLU(), nn.Linear(2 * WIDTH, WIDTH))
        case "skipped":
            return Skipped()
    act = rng.choice((nn.GELU(), nn.ReLU(inplace=True), nn.SiLU(), nn.Tanh()))
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), act, nn.Linear(2 * WIDTH, WIDTH))


class Body(nn.Module):
    """Parts in a row, between an embedding and the same weights once more, and a frozen layer."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        parts: list[nn.Module] = []
        for _ in range(rng.randrange(1, 6)):
            each = part(rng)
            parts.append(Recomputed(each, rng.random() < 0.5) if rng.random() < 0.25 else each)
        self.failing = Failing()
        parts.insert(rng.randrange(len(parts) + 1), self.failing)
        self.parts = nn.Sequential(*parts)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (self.frozen(self.parts(self.embedding(tokens))) @ self.embedding.weight.T).float()

    def loss(self, seed: int, rows: int) -> torch.Tensor:
        return self(torch.randint(TOKENS, (rows,), generator=torch.Generator().manual_seed(seed))).square().mean()

    def slope(self, seed: int, rows: int) -> torch.Tensor:
        """Return a loss of which a gradient is part."""
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        y = torch.tanh(self.embedding(torch.arange(rows) % TOKENS).float() * x).square()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return slope.square().mean() + y.mean()

    def train_on(
        self, how: str, seed: int, rows: int, scaled: Callable[[torch.Tensor], torch.Tensor], context: Any
    ) -> list[torch.Tensor]:
        """Make the forward and backward passes of one way; return what is seen on the way.

        Args:
            how: The way.
            seed: Of the tokens.
            rows: How many of them.
            scaled: Returns a loss as backward takes it.
            context: Makes contexts of passes.
        """
        seen: list[torch.Tensor] = []

        def forward(number: int = 0) -> torch.Tensor:
            loss = self.loss(seed + number, rows)
            seen.append(loss.detach())
            return loss

        def backward(loss: torch.Tensor) -> None:
            if loss.requires_grad:
                scaled(loss).backward()

        if how == "outside":
            with context():
                loss = forward()
            backward(loss)
            return seen
        with context(), contextlib.ExitStack() as ends:
            match how:
                case "evaluate":
                    with torch.no_grad():
                        forward()
                case "dropped":
                    forward()
                case "two":
                    first, second = forward(), forward(1)
                    backward(first)
                    backward(second)
                case "nested":
                    loss = forward()
                    with context():
                        loss = loss + forward(1)
                    backward(loss)
                case "retain":
                    loss = forward()
                    inputs = [p for p in self.parameters() if p.requires_grad]
                    if inputs and not any(isinstance(each, Recomputed) for each in self.parts):
                        each = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
                        seen.extend(gradient for gradient in each if gradient is not None)
                    backward(loss)
                case "penalty":
                    backward(self.slope(seed, rows))
                case "skip" | "fails" | "fails late":
                    skipped = [each for each in self.modules() if isinstance(each, Skipped)] if how == "skip" else []
                    self.failing.when = {"fails": "forward", "fails late": "backward"}.get(how, "")
                    for each in skipped:
                        each.skips = True
                        ends.callback(setattr, each, "skips", False)
                    ends.callback(setattr, self.failing, "when", "")
                    with contextlib.suppress(ValueError):
                        backward(forward())
                case _:
                    backward(forward())
        return seen


WAYS = ("plain", "plain", "plain", "retain", "penalty", "two", "outside", "nested", "dropped", "evaluate", "skip")
FAILS = ("fails", "fails late")


class Net(nn.Module):
    """Layers whose gradients are given, and perhaps a body.

    Args:
        seed: Of the body and all weights.
        kinds: Shape and type of each layer's weight.
        body: The type of the body's weights, or None.
    """

    def __init__(self, seed: int, kinds: list[tuple[tuple[int, ...], str]], body: str | None) -> None:
        super().__init__()
        self.layers, self.seed = nn.ModuleList(), seed
        for shape, kind in kinds:
            self.add(shape, kind)
        self.body: Body | None = None
        if body is not None:
            torch.manual_seed(seed)
            self.body = Body(random.Random(seed)).to(getattr(torch, body))

    def add(self, shape: tuple[int, ...], kind: str) -> None:
        """Add a layer."""
        generator = torch.Generator().manual_seed(self.seed + len(self.layers))
        drawn = torch.randn(shape, generator=generator).to(getattr(torch, kind))
        self.layers.append(Layer(nn.Parameter(drawn)))

    def loss(self, seed: int, numbers: list[int]) -> torch.Tensor | None:
        """Return a loss of which the gradient of some layers is drawn, and a little of their own weight."""
        generator, losses = torch.Generator().manual_seed(seed), []
        for number, layer in enumerate(self.layers):
            drawn = torch.randn(layer.weight.shape, generator=generator)
            if number in numbers and layer.weight.requires_grad:
                losses.append((layer.weight * (drawn + layer()).to(layer.weight.dtype)).float().sum())
        return sum(losses[1:], losses[0]) if losses else None
