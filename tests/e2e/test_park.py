"""Memory given back between steps: bits, what moves, what is refused, and what may come in between."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import OnDevice

import offload
from offload.sim import SimulatedDevice
from offload.units import format_seconds

NUMELS = (3000, 1024, 5, 7000)


def parameters(dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    kinds = itertools.cycle(dtypes)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).to(next(kinds))) for n in NUMELS]


def train(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    loss = sum((w.float() * torch.randn(w.shape, generator=generator)).sum() for w in weights)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Pair:
    """An optimizer that parks, and its twin that never does."""

    def __init__(self, folder: Path, device: bool = False, **settings: Any) -> None:
        self.folder = folder
        self.optimizers: list[Any] = []
        self.weights: list[list[torch.nn.Parameter]] = []
        for name in ("parks", "never"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            config = offload.OffloadConfig(
                paths=[str(folder / name)], **{"subgroup_numel": 1024, "threads": 1, **settings}
            )
            weights = parameters()
            more = {"device": SimulatedDevice(1 << 24, seed=1, lazy=False, pins=True)} if device else {}
            kind = OnDevice if device else offload.AdamW
            self.optimizers.append(kind(weights, lr=0.1, offload=config, **more))
            self.weights.append(weights)
        self.steps = 0

    @property
    def parking(self) -> Any:
        return self.optimizers[0]

    def train(self) -> None:
        self.steps += 1
        for optimizer, weights in zip(self.optimizers, self.weights, strict=True):
            train(optimizer, weights, self.steps)

    def check(self) -> None:
        for number, (weight, other) in enumerate(zip(*self.weights, strict=True)):
            assert torch.equal(weight, other), f"weight {number}"
            mine, others = (o.state_for(w) for o, w in zip(self.optimizers, (weight, other), strict=True))
            assert all(torch.equal(mine[key], others[key]) for key in others), f"state {number}"

    def close(self) -> None:
        for optimizer in self.optimizers:
            optimizer.close()


SETTINGS: dict[str, dict[str, Any]] = {
    "streamed": {"host_memory": 0, "staging_memory": 3 * 12 * 1024 * 4},
    "half": {"host_memory": 60_000, "staging_memory": 3 * 12 * 1024 * 4},
    "resident": {"host_memory": "1GiB"},
    "compact8": {"host_memory": 30_000, "state_format": "compact8", "subgroup_numel": 4096},
    "GPU homes": {"device": True, "host_memory": 0, "gpu_memory": 80_000, "placement": 0.5},
    "GPU and host homes": {"device": True, "host_memory": 50_000, "gpu_memory": 40_000, "placement": "gpu"},
    "all on the GPU": {"device": True, "host_memory": 0, "gpu_memory": "4MiB", "placement": "gpu"},
    "gradients leave the GPU": {"device": True, "host_memory": 60_000, "gpu_memory": 0, "keep_grads": False},
}


@pytest.fixture(params=SETTINGS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, **SETTINGS[request.param])
    yield made
    made.close()


def test_every_step_after_a_park_has_the_same_bits(pair: Pair) -> None:
    pair.parking.park()  # fresh
    for step in range(6):
        pair.train()
        pair.parking.park(host_memory=(0, 40_000)[step % 2], gpu_memory=(0, "1GiB")[step // 3])
        assert pair.parking.engine.is_parked
        if step % 3 == 1:
            pair.parking.unpark()
            assert not pair.parking.engine.is_parked
    pair.check()
    assert pair.parking.metrics()["park/away_bytes"] == 0


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 64))])
def test_random_programs_have_the_bits_of_one_that_never_parks(pair: Pair, seed: int, tmp_path: Path) -> None:
    """Steps, parks, saves, loads and reads at random, all of them of the parked session."""
    rng = random.Random(seed)
    saved: list[tuple[int, Path]] = []
    pair.train()
    for number in range(14):
        match rng.choice(("train", "train", "park", "park", "behind", "save", "load", "read", "unpark")):
            case "train":
                pair.train()
            case "park":
                pair.parking.park(rng.choice((0, 20_000, "1MiB")), rng.choice((0, "1MiB")))
            case "behind":
                pair.parking.park(rng.choice((0, 20_000)), wait=False)
            case "save":
                folders = [tmp_path / f"saved {number} {name}" for name in ("parks", "never")]
                for optimizer, folder in zip(pair.optimizers, folders, strict=True):
                    optimizer.save_checkpoint(folder)
                saved = [(pair.steps, folders[0]), (pair.steps, folders[1])]
            case "load" if saved:
                for optimizer, (_, folder) in zip(pair.optimizers, saved, strict=True):
                    optimizer.wait_checkpoint()
                    optimizer.load_checkpoint(folder)
                pair.steps = saved[0][0]
            case "read":
                weight = rng.randrange(len(NUMELS))
                mine, others = (
                    o.state_for(weights[weight]) for o, weights in zip(pair.optimizers, pair.weights, strict=True)
                )
                assert all(torch.equal(mine[key], others[key]) for key in others)
            case "unpark":
                pair.parking.unpark()
    pair.train()
    pair.check()


def test_what_is_said_of_a_park(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """How long memory and state take to come back: in the log, in metrics, and in the plan while memory is gone."""
    optimizer = pair.parking
    pair.train()
    assert not [name for name in optimizer.metrics() if name.startswith("park/")]
    with caplog.at_level("INFO", logger="offload"):
        optimizer.park()
    seconds = optimizer.metrics()["park/predicted_back_s"]
    assert seconds > 0
    assert f"back in about {format_seconds(seconds)}" in caplog.text
    assert f"given back, back in about {format_seconds(seconds)}" in str(optimizer.plan)
    optimizer.unpark()
    assert "given back" not in str(optimizer.plan)
    assert optimizer.metrics()["park/predicted_back_s"] == seconds
