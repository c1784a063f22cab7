"""Memory given back between steps: bits, what moves, what is refused, and what may come in between."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from programs import in_a_thread
from simulated import OnDevice
from world import SimulatedDevice

import offload
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


@pytest.fixture(params=["half", "compact8", "GPU and host homes"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, **SETTINGS[request.param])
    yield made
    made.close()


def written_bytes(optimizer: Any) -> float:
    return optimizer.metrics()["path/0/written_bytes"]


def test_only_what_has_changed_in_staging_slots_moves_where_nothing_is_resident(tmp_path: Path) -> None:
    pair = Pair(tmp_path, **SETTINGS["streamed"])
    pair.train()
    pair.train()
    parking = pair.parking
    before, slots = written_bytes(parking), parking.plan.plan.staging_slots
    parking.park()
    moved = written_bytes(parking) - before
    assert 0 < moved <= slots * 12 * 1024
    assert moved == parking.metrics()["park/moved_bytes"]
    parking.park()
    assert written_bytes(parking) - before == moved, "a second park moves nothing"
    totals = []
    for optimizer, weights in zip(pair.optimizers, pair.weights, strict=True):
        begun = written_bytes(optimizer)
        for step in range(3, 6):
            train(optimizer, weights, step)
        totals.append(written_bytes(optimizer) - begun)
    assert totals[0] <= totals[1] + slots * 12 * 1024, "ordinary steps write more than they did"
    pair.close()


def test_a_checkpoint_of_a_parked_session_is_whole(pair: Pair, tmp_path: Path) -> None:
    pair.train()
    pair.parking.park()
    for name, copy in (("kept", False), ("copied", True)):
        pair.parking.save_checkpoint(tmp_path / name, copy=copy)
        pair.parking.wait_checkpoint()
        assert pair.parking.engine.is_parked, "a save takes memory"
    pair.train()
    pair.parking.park()
    for name in ("kept", "copied"):
        pair.parking.load_checkpoint(tmp_path / name)
        pair.parking.park()
    pair.optimizers[1].zero_grad()
    train(pair.parking, pair.weights[0], 2)
    pair.check()


def test_a_park_from_another_thread_while_steps_go_on(tmp_path: Path) -> None:
    pair = Pair(tmp_path, **SETTINGS["half"])
    pair.train()
    done, errors = threading.Event(), []

    def park() -> None:
        while not done.is_set():
            try:
                pair.parking.park(wait=False)
            except offload.ConfigError:  # a gradient is there
                continue
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=park)
    thread.start()
    try:
        for step in range(2, 12):
            pair.steps = step
            generator = torch.Generator().manual_seed(step)
            for optimizer, weights in zip(pair.optimizers, pair.weights, strict=True):
                for weight in weights:
                    weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
                generator.manual_seed(step)
                optimizer.step()
    finally:
        done.set()
        thread.join()
    assert not errors
    for optimizer in pair.optimizers:
        optimizer.zero_grad()
    pair.check()
    pair.close()


@pytest.mark.parametrize("is_used", [True, False])
def test_another_threads_park_leaves_gradients_as_they_are(tmp_path: Path, is_used: bool) -> None:
    """It may come amid a backward pass, while torch changes `.grad`, which two threads may not touch."""
    pair = Pair(tmp_path, **SETTINGS["half"])
    pair.train()
    for weights in pair.weights:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
    for optimizer in pair.optimizers if is_used else ():
        optimizer.step()
    before = [weight.grad for weight in pair.weights[0]]
    assert None not in before
    in_a_thread(pair.parking.park)
    assert pair.parking.engine.is_parked
    assert all(weight.grad is gradient for weight, gradient in zip(pair.weights[0], before, strict=True))
    for optimizer in pair.optimizers:
        optimizer.step()
    pair.check()
    pair.close()


@pytest.mark.parametrize("place", ["first", "last", "between"])
@pytest.mark.parametrize("zeroes", [True, False])
def test_another_threads_park_amid_a_backward_pass_changes_no_bit(tmp_path: Path, place: str, zeroes: bool) -> None:
    """Before the first gradient of the pass, between two, and after the last: in their hooks."""
    ends = []
    for parks in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
        (folder := tmp_path / str(parks)).mkdir()
        config = {"paths": [folder], "host_memory": 100_000, "subgroup_numel": 2048}
        with offload.AdamW(model.parameters(), lr=1e-2, offload=config) as optimizer:
            seen = 0

            def park(gradient: torch.Tensor, parks: bool = parks, optimizer: Any = optimizer) -> None:
                nonlocal seen
                seen += 1
                if parks and seen % 3:
                    in_a_thread(lambda: optimizer.park(wait=seen % 2 == 0))

            weight = list(model.parameters())[{"first": -1, "between": 2, "last": 0}[place]]
            if place == "first":
                weight.register_hook(park)
            else:
                weight.register_post_accumulate_grad_hook(park)
            for step in range(8):
                model(torch.full((2, 64), float(step % 3))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad() if zeroes else torch._foreach_zero_([p.grad for p in model.parameters()])
            ends.append([p.detach().clone() for p in model.parameters()])
            assert seen == 8
    assert all(map(torch.equal, *ends))


STORM = """
import sys, threading, torch, offload
torch.set_num_threads(1)
weights = [torch.nn.Parameter(torch.randn(50)) for _ in range(40)]
optimizer = offload.AdamW(weights, offload={"paths": [sys.argv[1]], "host_memory": 4096})
done = threading.Event()

def storm():
    while not done.is_set():
        optimizer.park(wait=False)

thread = threading.Thread(target=storm)
thread.start()
for _ in range(60):
    sum((weight * weight).sum() for weight in weights).backward()
    optimizer.step()
    optimizer.zero_grad()
done.set()
thread.join()
optimizer.close()
"""


@pytest.mark.slow
def test_parks_beside_backward_passes_of_another_thread_end_no_process(tmp_path: Path) -> None:
    prepared.ran([prepared.python(), "-c", STORM, str(tmp_path)])


def test_a_gradient_that_arrives_while_memory_is_given_back_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at gradients and their end, another thread may set one: it belongs to the next step."""
    pair = Pair(tmp_path, **SETTINGS["half"])
    pair.train()
    route, weight = pair.parking._route, pair.weights[0][0]
    check, gradient = route.check_gradients_used, torch.ones_like(weight)

    def look() -> None:
        check()
        weight.grad = gradient

    monkeypatch.setattr(route, "check_gradients_used", look)
    pair.parking.park()
    assert weight.grad is gradient
    assert all(other.grad is None for other in pair.weights[0][1:])
    pair.close()


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
