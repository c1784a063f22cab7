"""One seed, one model and one program of training with activations on paths; run, and compared with memory."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mirror import same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import InfeasiblePlanError, OffloadConfig

WIDTH = 64


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
            x = getattr(self, kind)(x * self.scale)
        return x * self.mask

    def relu_(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(x + 1)

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x.mean(0, keepdim=True).expand_as(x)).tanh()

    def cat(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, ::2].exp().clamp(max=3), x[:, 1::2].sigmoid()], 1)

    def half(self, x: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() * x.bfloat16().t().contiguous().t()).float()

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return Twice.apply(x)

    def complex(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.view_as_complex(x.unflatten(1, (-1, 2)))
        return torch.view_as_real(found * found.conj()).flatten(1)

    def index(self, x: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(len(x)).flip(0)] * x


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


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


def layer(rng: random.Random) -> nn.Module:
    kind = rng.choice(("mlp", "attention", "odd", "norm", "dropless", "glu"))
    if kind == "attention":
        return Attention()
    if kind == "odd":
        return Odd(rng)
    if kind == "norm":
        return nn.LayerNorm(WIDTH)
    if kind == "glu":
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GLU(), nn.Linear(2 * WIDTH, WIDTH))
    act = rng.choice((nn.GELU(), nn.ReLU(inplace=True), nn.SiLU(), nn.Tanh()))
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), act, nn.Linear(2 * WIDTH, WIDTH))


def build(seed: int) -> nn.Sequential:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(rng.randrange(2, 9)):
        each = layer(rng)
        layers.append(Recomputed(each, rng.random() < 0.5) if rng.random() < 0.25 else each)
    layers.insert(rng.randrange(len(layers) + 1), Failing())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)


@dataclass
class Program:
    seed: int
    settings: dict[str, Any]
    host_bytes: list[int]
    least_bytes: int
    room: int | None
    actions: list[tuple[str, int]]
    rows: int
    found: list[Any] = field(default_factory=list)


ACTIONS = (
    "plain",
    "plain",
    "plain",
    "retain",
    "penalty",
    "two",
    "outside",
    "nested",
    "dropped",
    "fails",
    "fails late",
)


def make_program(seed: int) -> Program:
    rng = random.Random(seed)
    settings: dict[str, Any] = {"host_memory": rng.choice((0, 10**9)), "subgroup_numel": 8192}
    settings |= rng.choice(({}, {}, {"gradient_memory": 0}, {"overlap": "backward"}, {"overlap": "forward"}))
    sizes = [rng.choice((1 << 20, 1 << 20, 3 << 20, 16 << 20)) for _ in range(2)]
    actions: list[tuple[str, int]] = []
    for _ in range(rng.randrange(2, 6)):
        actions += [(rng.choice(ACTIONS), rng.randrange(1 << 30)) for _ in range(rng.choice((1, 1, 2)))]
        actions.append((rng.choice(("step", "step", "step", "step and park", "evaluate", "resize")), 0))
    least, room = rng.choice((1, 10_000, 100_000)), rng.choice((None, None, None, 2 << 20))
    return Program(seed, settings, sizes, least, room, actions, rng.choice((16, 64, 300)))


def train(program: Program, folder: Path, on_paths: bool) -> list[Any]:
    """Return digests of all that is seen: losses, gradients, weights."""
    model, found = build(program.seed), list[Any]()
    path = {"path": folder}
    if program.room is not None and on_paths:
        path["max_bytes"] = plan_bytes(program, model, folder) + program.room
    config = OffloadConfig(paths=[path], checkpoints_kept=0, **program.settings)
    sizes = [*program.host_bytes]
    failing = next(module for module in model if isinstance(module, Failing))
    with offload.AdamW(model.named_parameters(), lr=1e-3, offload=config) as optimizer:
        if config.overlaps_forward:
            optimizer.overlap_forward(model)

        def context() -> Any:
            if not on_paths:
                return contextlib.nullcontext()
            return optimizer.activations_on_paths(model, sizes[0], least_bytes=program.least_bytes)

        def loss_of(seed: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(program.rows, WIDTH, generator=generator, requires_grad=True)
            loss = model(x).square().mean()
            found.append(loss.item())
            return loss

        def park() -> None:
            # Activations may have taken what room there was, and keep it; then all stays as it was.
            is_scarce = on_paths and program.room is not None
            with contextlib.suppress(InfeasiblePlanError) if is_scarce else contextlib.nullcontext():
                optimizer.park()

        def act(what: str, seed: int) -> None:  # whose graphs end with it
            if what in ("step", "step and park"):
                found.append(float(optimizer.clip_grad_norm_(1.0)))
                optimizer.step()
                optimizer.zero_grad()
                if what == "step and park":
                    park()
            elif what == "evaluate":
                with context(), torch.no_grad():
                    loss_of(seed)
            elif what == "resize":
                sizes.reverse()
            elif what == "outside":
                with context():
                    loss = loss_of(seed)
                loss.backward()
            elif what == "dropped":
                with context():
                    loss_of(seed)
            elif what == "two":
                with context():
                    first, second = loss_of(seed), loss_of(seed + 1)
                    first.backward()
                    second.backward()
            elif what == "retain":
                with context():
                    loss = loss_of(seed)
                    inputs = [p for p in model.parameters() if p.requires_grad]
                    if not any(isinstance(m, Recomputed) for m in model):
                        each = torch.autograd.grad(loss, inputs, retain_graph=True)
                        found.extend(float(g.double().sum()) for g in each)
                    loss.backward()
            elif what == "penalty":
                with context():
                    generator = torch.Generator().manual_seed(seed)
                    x = torch.randn(program.rows, WIDTH, generator=generator, requires_grad=True)
                    y = torch.tanh(model[0](x)).square() @ torch.ones(WIDTH)
                    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                    (slope.square().mean() + y.mean()).backward()
            elif what == "nested":
                with context():
                    loss = loss_of(seed)
                    with context():
                        other = loss_of(seed + 1)
                    (loss + other).backward()
            elif what in ("fails", "fails late"):
                failing.when = "forward" if what == "fails" else "backward"
                with contextlib.suppress(ValueError), context():
                    loss_of(seed).backward()
                failing.when = ""
                optimizer.zero_grad()
            else:
                with context():
                    loss_of(seed).backward()

        for action in program.actions:
            act(*action)
        optimizer.finish()
        found += [parameter.detach().clone() for parameter in model.parameters()]
        if on_paths:
            figures = optimizer.metrics()
            found.append({key: value for key, value in figures.items() if key.startswith("activations/")})
            optimizer.zero_grad()
            park()  # which is refused while anything is left
    assert not [*folder.iterdir()], "files are left"
    return found


def plan_bytes(program: Program, model: nn.Module, folder: Path) -> int:
    """Return what state takes on the path, where all of it may come to lie when it is parked."""
    config = OffloadConfig(paths=[folder], checkpoints_kept=0, **{**program.settings, "host_memory": 0})
    with offload.AdamW(
        [p.detach().clone().requires_grad_() for p in model.parameters()], offload=config
    ) as optimizer:
        return optimizer.plan.plan.storage_bytes


def compare(program: Program, folder: Path) -> dict[str, float]:
    """Train with activations in memory and on the path; compare all that is seen, bit for bit."""
    folder.mkdir(exist_ok=True)
    expected = train(program, folder, False)
    *seen, figures = train(program, folder, True)
    assert len(seen) == len(expected)
    for number, (left, right) in enumerate(zip(seen, expected, strict=True)):
        same = same_bits(left, right) if isinstance(left, torch.Tensor) else left == right or left != left
        assert same, f"seed {program.seed}: value {number} of {program.actions} is {left}, in memory {right}"
    return figures
