"""Random training programs, each run with all gradients in memory and with as few as can be: the same bits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import offload

WIDTH = 48


class Model(torch.nn.Module):
    """A few blocks with what makes gradients awkward: tied, frozen, and now and then unused parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(90, WIDTH)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Tanh(), torch.nn.Linear(3 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(4))
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, tokens: torch.Tensor, skipped: int, recomputes: bool) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, (block, norm) in enumerate(zip(self.blocks, self.norms, strict=True)):
            if number != skipped:
                y = norm(x)
                x = x + (checkpoint(block, y, use_reentrant=True) if recomputes and y.requires_grad else block(y))
        return (self.frozen(x) @ self.embedding.weight.T).float()


@dataclass
class Program:
    seed: int
    settings: dict[str, Any]
    gradient_memory: int
    actions: list[tuple[str, Any]]


def make_program(seed: int) -> Program:
    rng = random.Random(seed)
    settings = {
        "host_memory": rng.choice((0, 0, 200_000, 2_000_000)),
        "subgroup_numel": rng.choice((4096, 4096, 8192, 20_480)),
        "state_format": rng.choice(("exact", "exact", "compact16", "compact8")),
        "gradient_dtype": rng.choice(("parameter", "parameter", "float32")),
        "overlap": rng.choice(("off", "off", "forward", "auto")),
        "threads": rng.choice((1, 2)),
    }
    actions: list[tuple[str, Any]] = []
    for number in range(rng.randrange(2, 6)):
        for _ in range(rng.choice((1, 1, 2, 3))):
            actions.append(("pass", (rng.randrange(1 << 30), rng.choice((-1, -1, 2)), rng.random() < 0.3)))
            if rng.random() < 0.1:
                actions.append(("state", None))
            if rng.random() < 0.1:
                actions.append(("add", rng.randrange(1 << 30)))
        if rng.random() < 0.15:
            actions.append(("skip", None))
            continue
        if rng.random() < 0.5:
            actions.append(("clip", rng.choice((0.05, 1.0, 1e9))))
        actions.append(("step", None))
        if rng.random() < 0.2:
            actions.append(("park", None))
        if rng.random() < 0.2:
            actions.append(("save", number))
        if rng.random() < 0.1:
            actions.append(("group", rng.randrange(1 << 30)))
    return Program(seed, settings, rng.choice((0, 0, 5000, 40_000)), actions)


def run_program(program: Program, folder: Path, *, leaves: bool) -> list[Any]:
    """Return all that a run shows: losses, norms, state on the way, and the weights that it ends with."""
    model = Model(program.seed).to(torch.bfloat16)
    memory = program.gradient_memory if leaves else None
    (folder / "store").mkdir(parents=True)
    config = offload.OffloadConfig(paths=[folder / "store"], gradient_memory=memory, **program.settings)
    scale = 256.0 if program.seed % 3 == 0 else 1.0
    optimizer = offload.AdamW(model.named_parameters(), lr=1e-2, offload=config)
    scaler = offload.GradScaler("cpu", init_scale=scale, enabled=scale > 1)
    if program.settings["overlap"] == "forward":
        optimizer.overlap_forward(model)
    seen: list[Any] = []
    with optimizer:
        for what, value in program.actions:
            match what:
                case "pass":
                    seed, skipped, recomputes = value
                    tokens = torch.randint(90, (2, 8), generator=torch.Generator().manual_seed(seed))
                    loss = model(tokens, skipped, recomputes).square().mean()
                    scaler.scale(loss).backward()
                    seen.append(loss.detach())
                case "add":  # gradients that are no backward pass's
                    generator = torch.Generator().manual_seed(value)
                    weight = model.blocks[1][0].weight
                    torch.autograd.backward([weight], [torch.randn(weight.shape, generator=generator).bfloat16()])
                case "state":
                    seen += [each.clone() for each in optimizer.state_for(model.blocks[0][0].weight).values()]
                case "clip":
                    scaler.unscale_(optimizer)
                    seen.append(optimizer.clip_grad_norm_(value))
                case "step":
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                case "skip":
                    optimizer.zero_grad()
                case "park":
                    optimizer.park()
                case "save":
                    optimizer.save_checkpoint(folder / f"save-{value}")
                case "group":
                    generator = torch.Generator().manual_seed(value)
                    added = torch.nn.Parameter(torch.randn(3000, generator=generator).bfloat16())
                    if not hasattr(model, "added"):
                        model.added = added
                        optimizer.add_param_group({"params": [("added", added)]})
        optimizer.finish()
        seen += [parameter.detach().clone() for parameter in model.parameters()]
    return seen


def compare(program: Program, folder: Path) -> None:
    """Run a program both ways.

    Raises:
        AssertionError: They differ in a bit.
    """
    inside = run_program(program, folder / "inside", leaves=False)
    outside = run_program(program, folder / "outside", leaves=True)
    assert len(inside) == len(outside)
    for number, (a, b) in enumerate(zip(inside, outside, strict=True)):
        assert torch.equal(a, b), f"program {program.seed}: {number} of {len(inside)} differs; {program}"
