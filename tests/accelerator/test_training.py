"""Trainings on the test accelerator end with the bits of the CPU, whatever is chosen and whenever streams run.

Each is done on both, forward and backward by torch. Delays of streams come from the test's name.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from devices import LATE, the_device
from torch.nn import functional

import offload
from offload.backends import working_on
from offload.engine import gpu_gradients, pieces
from offload.plan import budget

pytestmark = pytest.mark.not_overlapped("steps go on where the tests say so")

WIDTH, DEPTH, BATCH, STEPS = 48, 4, 4, 3


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model's gradients leave alone and together, and its pieces are copied alone and together."""
    monkeypatch.setattr(gpu_gradients, "LARGE_BYTES", 4000)
    monkeypatch.setattr(gpu_gradients, "BUCKET_COUNT", 3)
    for module in (pieces, budget):
        monkeypatch.setattr(module, "LEAST_COPY_BYTES", 4000)


@pytest.fixture(params=LATE, name="device")
def _device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    found = the_device(request.param)
    with torch.accelerator.device_index(found.index or 0):
        yield found


class Layer(torch.nn.Module):
    """A matrix and two vectors."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        for name, size in (("matrix", (WIDTH, WIDTH)), ("bias", (WIDTH,)), ("gain", (WIDTH,))):
            drawn = torch.randn(size, generator=generator, device="cpu") / 8
            setattr(self, name, torch.nn.Parameter(drawn.to(dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.linear(x, self.matrix, self.bias).relu() * self.gain


class Net(torch.nn.Module):
    """Layers, which may be put on streams in turns."""

    def __init__(self, dtype: torch.dtype, seed: int = 7) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(seed)
        self.layers = torch.nn.ModuleList(Layer(generator, dtype) for _ in range(DEPTH))
        self.streams: list[torch.Stream] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            with behind(self.streams[number % len(self.streams)] if self.streams else None):
                x = layer(x)
        return x.float().square().mean()


@contextlib.contextmanager
def behind(stream: torch.Stream | None) -> Iterator[None]:
    """Work on a stream, behind all that is on the current one, which then goes on behind it."""
    if stream is None:
        yield
        return
    outside = torch.accelerator.current_stream()
    stream.wait_stream(outside)
    with working_on(stream):
        yield
    outside.wait_stream(stream)


def batch(number: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 + number)
    return torch.randn((BATCH, WIDTH), generator=generator, device="cpu").to(device, dtype)


# -- What is chosen


class Case(NamedTuple):
    """A training: one choice of each kind.

    Attributes:
        rule: Class of the optimizer.
        form: How state is stored.
        dtype: Of weights.
        placement: Where updates run.
        home: Where state is: on paths, in host memory, part of it on the device.
        keeps: Whether gradients stay in `.grad`.
        overlap: What a step is hidden in.
        way: What happens between steps.
    """

    rule: str
    form: str
    dtype: torch.dtype
    placement: str | float
    home: str
    keeps: bool
    overlap: str
    way: str

    @property
    def can_be(self) -> bool:
        """Whether nothing of it is refused."""
        is_early = self.overlap in ("backward", "both")
        if is_early and self.keeps:
            return False
        if self.way == "scaled":
            return self.dtype is torch.float16
        return not (self.way == "clipped by torch" and not self.keeps)

    def __str__(self) -> str:
        return "-".join(str(choice).removeprefix("torch.") for choice in self)


RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 1e-2},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 1e-2},
    "Adagrad": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
}
HOMES: dict[str, dict[str, Any]] = {
    "paths": {"host_memory": 0, "gpu_memory": 0},
    "host": {"gpu_memory": 0},
    "device": {"host_memory": 60_000, "gpu_memory": 40_000},
}
WAYS = ("plain", "a stream", "two streams", "two passes", "clipped", "clipped by torch", "scaled")
KINDS: tuple[tuple[Any, ...], ...] = (
    tuple(RULES),
    ("exact", "compact16", "compact8"),
    (torch.bfloat16, torch.float16, torch.float32),
    ("cpu", "gpu", 0.5),
    tuple(HOMES),
    (True, False),
    ("off", "forward", "backward", "both"),
    WAYS,
)


def pairs(case: Case) -> set[tuple[int, Any, int, Any]]:
    """Return all that two kinds of choices are together."""
    both = itertools.combinations(range(len(case)), 2)
    return {(one, case[one], other, case[other]) for one, other in both}


def covering() -> list[Case]:
    """Return trainings of which some have each two choices that can be had together."""
    rng = random.Random(0)
    cases = [case for case in map(Case._make, itertools.product(*KINDS)) if case.can_be]
    left, chosen = set().union(*map(pairs, cases)), []
    while left:
        best = max(rng.sample(cases, 400), key=lambda case: len(pairs(case) & left))
        if not pairs(best) & left:
            best = next(case for case in cases if pairs(case) & left)
        chosen.append(best)
        left -= pairs(best)
    return chosen


CASES = covering()


class Training:
    """A training on one device.

    Args:
        case: Which.
        device: Where; on the CPU nothing is chosen but the rule and how state is stored.
        folder: For paths.
    """

    def __init__(self, case: Case, device: torch.device, folder: Path, seed: int = 7) -> None:
        self.case, self.device = case, device
        self.model = Net(case.dtype, seed).to(device)
        is_far = device.type != "cpu"
        config: dict[str, Any] = {"state_format": case.form, "threads": 1}
        if is_far:
            overlap = "backward" if case.overlap in ("backward", "both") else "off"
            config |= {"placement": case.placement, "keep_grads": case.keeps, "overlap": overlap}
            config |= {"subgroup_numel": 1024, "paths": [folder], **HOMES[case.home]}
        kind = getattr(offload, case.rule)
        self.optimizer = kind(self.model.parameters(), offload=offload.OffloadConfig(**config), **RULES[case.rule])
        if is_far and case.overlap in ("forward", "both"):
            self.optimizer.overlap_forward(self.model)
        scaler = torch.amp.GradScaler if case.keeps and is_far else offload.GradScaler
        self.scaler = scaler(device.type, init_scale=2.0**10, growth_interval=2) if case.way == "scaled" else None
        self.streams = [torch.Stream(device) for _ in range(2)] if is_far else [None, None]
        if is_far and case.way == "two streams":
            self.model.streams = self.streams

    def backward(self, number: int) -> None:
        loss = self.model(batch(number, self.device, self.case.dtype))
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, number: int) -> None:
        """Run an iteration."""
        way, optimizer = self.case.way, self.optimizer
        with behind(self.streams[0] if way == "a stream" else None):
            for again in range(2 if way == "two passes" else 1):
                self.backward(2 * number + again)
        if way == "clipped":
            optimizer.clip_grad_norm_(0.05)
        elif way == "clipped by torch":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05, foreach=False)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()

    def run(self, steps: range) -> None:
        for number in steps:
            self.step(number)

    def found(self) -> dict[str, torch.Tensor]:
        """Return weights and state."""
        self.optimizer.finish()
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().cpu().clone()
            found |= {f"{name} {key}": value for key, value in self.optimizer.state_for(parameter).items()}
        return found


@contextlib.contextmanager
def training(case: Case, device: torch.device, folder: Path, seed: int = 7) -> Iterator[Training]:
    made = Training(case, device, folder, seed)
    with made.optimizer:
        yield made


def on_the_cpu(case: Case, folder: Path, steps: int = STEPS) -> dict[str, torch.Tensor]:
    with training(case, torch.device("cpu"), folder) as made:
        made.run(range(steps))
        return made.found()


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.isfinite().all(), name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_the_cpu(device: torch.device, tmp_path: Path, case: Case) -> None:
    with training(case, device, tmp_path) as made:
        made.run(range(STEPS))
        assert_same(made.found(), on_the_cpu(case, tmp_path))
