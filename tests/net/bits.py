"""Forty short trainings, and the bits that they end with.

Gradients are integers times powers of two, computed without torch, and each depends on the weight that forward has
read: `g + w / 8`, rounded once. So the bits depend on no processor, and a weight that is read too early shows.

Bits depend on the rule, the format of state, and the dtypes of weights alone: what is recorded is named by these
three, and every placement and overlap has to end with it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import offload
from net import seams
from net.recordings import digest

FILE = "bits.json"

RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (offload.AdamW, {"lr": 2**-6, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}),
    "adam": (offload.Adam, {"lr": 2**-6, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.01}),
    "lion": (offload.Lion, {"lr": 2**-8, "betas": (0.9, 0.99), "weight_decay": 0.3}),
    "adagrad": (offload.Adagrad, {"lr": 2**-5, "lr_decay": 0.01, "initial_accumulator_value": 0.125}),
    "sgd": (offload.SGD, {"lr": 2**-6, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
}

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (50, 90),
    "matrix": (70, 80),
    "bias": (70,),
    "wide": (129, 65),
    "scalar": (),
    "row": (6007,),
    "few": (3, 1, 5),
    "empty": (0, 7),
}
"""Weights; every two make a module. `wide` lies in several subgroups; `matrix` is one that compact8 codes."""

DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "bf16": (torch.bfloat16,),
    "fp32": (torch.float32,),
    "mixed": (torch.bfloat16, torch.float16, torch.float32),
}

STATE_BYTES = 12 * 26_000
"""About what the exact state takes."""

SUBGROUP_NUMEL = 4096

PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "path": {"host_memory": 0, "paths": 1},
    "mixed": {"host_memory": STATE_BYTES // 2, "paths": 2, "threads": 2},
    "device cpu": {"host_memory": 0, "paths": 1, "gpu_memory": 0, "placement": "cpu"},
    "device gpu": {"host_memory": STATE_BYTES // 3, "paths": 1, "gpu_memory": STATE_BYTES // 3, "placement": "gpu"},
    "device half": {"host_memory": STATE_BYTES // 4, "paths": 1, "gpu_memory": STATE_BYTES // 4, "placement": 0.5},
}

TRAININGS = (
    "adamw exact bf16 | host | off",
    "adamw exact bf16 | path | forward",
    "adamw exact bf16 | path | both",
    "adamw exact bf16 | device cpu | off",
    "adamw exact bf16 | device cpu | backward",
    "adamw exact bf16 | device half | forward",
    "adamw exact bf16 | device half | both",
    "adamw compact16 bf16 | path | off",
    "adamw compact16 bf16 | path | backward",
    "adamw compact16 bf16 | mixed | backward",
    "adamw compact16 bf16 | mixed | both",
    "adamw compact16 fp32 | path | forward",
    "adamw compact8 fp32 | device gpu | off",
    "adamw compact8 mixed | mixed | backward",
    "adam exact bf16 | path | off",
    "adam exact bf16 | device gpu | off",
    "adam exact fp32 | mixed | both",
    "adam exact mixed | device half | off",
    "adam compact16 bf16 | mixed | off",
    "adam compact16 bf16 | device cpu | backward",
    "adam compact8 mixed | host | forward",
    "lion exact bf16 | mixed | forward",
    "lion exact bf16 | mixed | backward",
    "lion exact mixed | device cpu | forward",
    "lion compact16 bf16 | device gpu | forward",
    "lion compact16 fp32 | host | off",
    "lion compact16 fp32 | device half | off",
    "lion compact8 bf16 | path | both",
    "adagrad exact bf16 | host | forward",
    "adagrad exact bf16 | mixed | off",
    "adagrad exact bf16 | device cpu | both",
    "adagrad exact fp32 | path | backward",
    "adagrad compact16 mixed | device gpu | off",
    "adagrad compact8 bf16 | device half | forward",
    "sgd exact bf16 | device gpu | forward",
    "sgd exact bf16 | device half | backward",
    "sgd compact16 bf16 | host | forward",
    "sgd compact16 bf16 | mixed | forward",
    "sgd compact16 mixed | path | both",
    "sgd compact8 fp32 | device cpu | off",
)
"""Every two of a rule, a format, dtypes, a place and an overlap that go together are together in one of them."""

LOOSE, TIGHT = 1e9, 2.0**-2


class _Given(torch.autograd.Function):
    """Whose weight has the gradient that is given, and an eighth of the weight that forward has read."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        ctx.gradient = (given + weight.float() / 8).to(weight.dtype)
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.gradient, None


class Pair(torch.nn.Module):
    """Some weights and their gradients."""

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [_Given.apply(w, given[n]).float() for n, w in self.named_parameters() if n in given]
        return torch.stack(parts).sum()


def integers(seed: int, numel: int) -> Any:
    """Return integers from -127 to 127, as SplitMix64 draws them (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        z = np.arange(1, numel + 1, dtype=np.uint64) + np.uint64(seed << 32)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z % np.uint64(255)).astype(np.int64) - 127


def drawn(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return such integers times a power of two that the seed says, as fp32."""
    numel = int(np.prod(shape, dtype=np.int64))
    return torch.from_numpy(integers(seed, numel)).reshape(shape).float() * 2.0 ** -(8 + seed % 5)


def given(seed: int) -> dict[str, torch.Tensor]:
    """Return gradients of all weights."""
    return {name: drawn(100 * seed + number, shape) for number, (name, shape) in enumerate(SHAPES.items())}


class Model(torch.nn.Module):
    """Modules of two weights each."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.pairs = torch.nn.ModuleList()
        for number, (name, shape) in enumerate(SHAPES.items()):
            if number % 2 == 0:
                self.pairs.append(Pair())
            weight = 4 * drawn(1000 + number, shape)
            self.pairs[-1].register_parameter(name, torch.nn.Parameter(weight.to(dtypes[number % len(dtypes)])))

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = [pair(given) for pair in self.pairs if any(name in given for name, _ in pair.named_parameters())]
        return torch.stack(parts).sum()

    def groups(self) -> list[dict[str, Any]]:
        """Return two groups with rates of their own."""
        named = list(self.named_parameters())
        return [
            {"params": [(n, p) for n, p in named if p.dim() > 1]},
            {"params": [(n, p) for n, p in named if p.dim() <= 1], "lr": 2**-7, "weight_decay": 0.0},
        ]


def content(training: str) -> str:
    """Return what a training's bits depend on."""
    return training.split(" | ")[0]


def train(training: str, folder: Path) -> dict[str, Any]:
    """Run one training: `rule format dtypes | place | overlap`.

    Args:
        training: Which one.
        folder: Where its paths are made.

    Returns:
        Digests of weights and of all state, and the norms.
    """
    what, place, overlap = training.split(" | ")
    rule, state_format, dtypes = what.split()
    kind, settings = RULES[rule]
    options = {"threads": 1, **PLACES[place]}
    paths = [folder / str(number) for number in range(options.pop("paths", 0))]
    for path in paths:
        path.mkdir(parents=True)
    on_backward, on_forward = overlap in ("backward", "both"), overlap in ("forward", "both")
    if place.startswith("device"):
        kind = seams.on_device(kind, seams.SimulatedDevice(1 << 26, delay_s=1e-5))
        options["keep_grads"] = not on_backward
    config = offload.OffloadConfig(
        paths=paths,
        subgroup_numel=SUBGROUP_NUMEL,
        state_format=state_format,
        seed=11,
        checkpoints_kept=0,
        overlap="backward" if on_backward else "off",
        **options,
    )
    model = Model(DTYPES[dtypes])
    norms: dict[str, str] = {}
    early_bytes: Counter[str] = Counter()
    with kind(model.groups(), offload=config, **settings) as optimizer:
        if on_forward:
            optimizer.overlap_forward(model, check=overlap == "forward" and not place.startswith("device"))
        for step in range(8):
            _step(model, optimizer, step, norms, is_early=on_backward)
            if on_backward:
                optimizer.finish()  # else the figures may be of a step before, or of none
            early_bytes.update(
                {name: n for name, n in optimizer.metrics().items() if name.startswith("speculation/")}
            )
        optimizer.finish()
        tensors = {}
        for name, parameter in model.named_parameters():
            state = optimizer.state_for(parameter)
            tensors[name.split(".")[-1]] = [
                f"{part} {_bits(tensor)}" for part, tensor in (("weight", parameter.detach()), *state.items())
            ]
    if on_backward and not all(early_bytes[f"speculation/{what}_bytes"] for what in ("confirmed", "revoked")):
        raise AssertionError(f"{training} has not updated, or not revoked, anything during backward: {early_bytes}")
    left = [entry.name for path in paths for entry in path.iterdir()]
    if left:
        raise AssertionError(f"{training} has left {left}")
    return {"norms": norms, **tensors}


def _step(model: Model, optimizer: Any, step: int, norms: dict[str, str], *, is_early: bool) -> None:
    """Take a step: plain (0, 3), clipped loosely (1, 7) or tightly (2), skipped (4), of fewer (5), at half lr (6)."""
    seeds = [10 * step, 10 * step + 3] if step == 2 else [10 * step]
    for seed in seeds:
        gradients = given(seed)
        if step == 4:
            gradients["row"][77] = float("inf")
        if step == 5:
            del gradients["few"], gradients["matrix"]
        model(gradients).backward()
        if is_early:
            seams.settle(optimizer)
    if step in (1, 2, 4, 7):
        norms[f"step {step}"] = float(optimizer.clip_grad_norm_(TIGHT if step == 2 else LOOSE)).hex()
    if step == 6:
        for group in optimizer.param_groups:
            group["lr"] /= 2
    if step != 4:
        optimizer.step()
    optimizer.zero_grad()


def _bits(tensor: torch.Tensor) -> str:
    whole = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    return digest(tensor.contiguous().view(whole).numpy().tobytes())


def observe(folder: Path) -> dict[str, Any]:
    """Return what is recorded: for each content, what the first training with it ends with."""
    found: dict[str, Any] = {}
    for number, training in enumerate(TRAININGS):
        if content(training) not in found:
            found[content(training)] = train(training, folder / str(number))
    return found
