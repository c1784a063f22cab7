"""One trial of `capacity.py`, in a process of its own: three steps of one model, and what its memory went to.

The request is JSON on the command line; the answer is the last line of standard output. Weights are made in bf16,
from one block of random numbers, so that making them takes neither time nor memory.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from _common import computing
from _worker import SEED, SETTINGS, DeepSpeed, Plain, batch, memory
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from offload.cli.model import VOCABULARY, Shape
from offload.errors import InfeasiblePlanError
from offload.memory.arenas import available_bytes

STEPS = 3
TOKENS = 16

SHORTAGES = ("allocate memory", "no more memory", "no memory for", "bad_alloc", "Cannot allocate", "MemoryError")
"""How torch, this package, C++ and the system say that there is no more memory."""


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


def build(shape: Shape) -> Model:
    """Return the model in bf16, the same for the same shape."""
    with torch.device("meta"):
        model = Model(shape).bfloat16()
    model.to_empty(device="cpu")
    # A prime number of them: no two rows of a matrix begin at the same one.
    some = (0.02 * torch.randn(1_000_003, generator=torch.Generator().manual_seed(SEED))).bfloat16()
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            if weight.dim() < 2:
                weight.fill_(1.0)
                continue
            source = some.roll(7919 * number)
            for piece in weight.view(-1).split(len(some)):
                piece.copy_(source[: len(piece)])
    return model


class Torch(Plain):
    """torch.optim.AdamW over fp32 masters; a 16-bit gradient goes as soon as it has become an fp32 one."""

    def __init__(self, request: dict[str, Any]) -> None:
        super().__init__(request)
        self.clip = request["clip"]
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **SETTINGS)

    @torch.no_grad()
    def step(self) -> None:
        for master, weight in zip(self.masters, self.model.parameters(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for master, weight in zip(self.masters, self.model.parameters(), strict=True):
            weight.copy_(master)


class Ours(Plain):
    """offload.AdamW, nothing resident."""

    def __init__(self, request: dict[str, Any]) -> None:
        import offload

        super().__init__(request)
        self.clip = request["clip"]
        settings = dict(request["settings"])
        overlap = settings.pop("overlap")
        place = {"path": request["path"], "max_bytes": request["disk_bytes"]}
        config = offload.OffloadConfig(
            host_memory=0, paths=[place], checkpoints_kept=0, overlap="auto" if overlap else "off", **settings
        )
        self.optimizer = offload.AdamW(self.model.named_parameters(), **SETTINGS, offload=config)
        self.ahead_bytes = 0
        if overlap:
            self.optimizer.overlap_forward(self.model)
            self.optimizer.engine.speculate(True)  # from the first step on, in what memory is left

    def step(self) -> None:
        self.optimizer.clip_grad_norm_(self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.finish()  # what follows is about this step
        self.ahead_bytes += int(self.optimizer.metrics().get("speculation/confirmed_bytes", 0))

    def about(self) -> dict[str, int]:
        plan = self.optimizer.plan.plan
        return {
            "staging_bytes": plan.staging_bytes,
            "overhead_bytes": plan.overhead_bytes,
            "gradient_bytes": plan.budgets.gradient_bytes,
            "made_ahead_bytes": self.ahead_bytes,
        }

    def close(self) -> None:
        self.optimizer.close()


KINDS = {"torch": Torch, "ours": Ours, "deepspeed": DeepSpeed}


def used_on_disk(folder: str) -> int:
    """Return the bytes that files below a folder take."""
    return sum(512 * path.stat().st_blocks for path in Path(folder).rglob("*") if path.is_file())


def trial(request: dict[str, Any]) -> dict[str, Any]:
    """Train; return losses, marks and what is known of the memory."""
    marks: dict[str, dict[str, int]] = {}
    if request["kind"] == "deepspeed":
        import deepspeed  # noqa: F401
    else:
        import offload  # noqa: F401
    # What everybody's first step loads: torch's own optimizers, its compiler and its threads.
    torch.optim.AdamW([torch.ones(1, requires_grad=True)])
    torch.ones(64, 64).bfloat16() @ torch.ones(64, 64).bfloat16()
    marks["process"] = memory()
    model = build(Shape(**request["shape"]))
    numel = sum(weight.numel() for weight in model.parameters())
    weights = list(model.parameters())
    marks["weights"] = memory()
    settings = json.loads(json.dumps(request["settings"]).replace("{path}", request["path"]))
    contender = KINDS[request["kind"]]({**request, "settings": settings, "model": model})
    marks["optimizer"] = memory()
    losses, seconds = [], []
    for step in range(STEPS):
        began_s = time.perf_counter()
        with computing():
            loss = contender.forward(batch(step, TOKENS))
            if step == 0:
                marks["forward"] = memory()
            contender.backward(loss)
        marks["backward"] = memory()
        contender.step()
        marks["step"] = memory()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began_s)
    if not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"the losses are not finite: {losses}")
    about = contender.about() if request["kind"] == "ours" else {}
    digest = 0
    if request["kind"] != "deepspeed":  # whose weights are elsewhere
        if request["kind"] == "ours":
            contender.optimizer.finish()
        for weight in weights:
            digest = zlib.crc32(weight.detach().view(torch.int16).numpy(), digest)
    found = {
        "numel": numel,
        "losses": losses,
        "digest": digest,
        "seconds": seconds,
        "marks": marks,
        "disk_bytes": used_on_disk(request["path"]),
        "about": about,
    }
    contender.close()
    return found


def main() -> None:
    request = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints is log
    if request["most_data_bytes"]:
        resource.setrlimit(resource.RLIMIT_DATA, (request["most_data_bytes"],) * 2)
    try:
        found = trial(request)
    except (MemoryError, RuntimeError, OSError, InfeasiblePlanError) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        short = isinstance(error, InfeasiblePlanError) or any(sign in text for sign in SHORTAGES)
        if not short:
            raise
        found = {"short_of": text, "available_bytes": available_bytes()}
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
