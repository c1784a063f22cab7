"""Updates during the backward pass: the bits of steps that make none, whatever happens before the step."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_overlap_forward import Model, assert_same, everything, loss_of

import offload

LOOSE, TIGHT = 1e9, 1e-2


class Training:
    """A model of which everything streams, and its optimizer."""

    def __init__(self, folder: Path, overlap: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.model = Model(dtype)
        options = {"subgroup_numel": 4096, "threads": 1, "checkpoints_kept": 1, **options}
        config = offload.OffloadConfig(host_memory=0, paths=[folder], overlap=overlap, **options)
        self.optimizer = offload.AdamW(self.model.named_parameters(), lr=1e-2, weight_decay=0.1, offload=config)
        self.counts: Counter[str] = Counter()
        self.seed = 0

    def backward(self) -> None:
        self.seed += 1
        loss_of(self.model, self.seed).backward()

    def settle(self) -> None:
        """Wait until what can be made ahead has been made: else it is a matter of luck how much of it there is."""
        machine, ahead = self.optimizer.engine._parts.machine, self.optimizer.engine._thread.ahead
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s and ahead._wanted:
            final = [number for number, left in [*ahead._left.items()] if left <= 0]
            if machine.is_ahead and not ahead._final and all(machine._beside.get(number) for number in final):
                return
            time.sleep(0.001)

    def step(self) -> None:
        ahead = self.optimizer.engine._thread.ahead
        self.settle()
        self.optimizer.step()
        self.counts["confirmed"] += ahead.confirmed_bytes
        self.counts["revoked"] += ahead.revoked_bytes


def plain(training: Training, rng: random.Random) -> None:
    training.backward()
    training.optimizer.clip_grad_norm_(LOOSE)


def clipped(training: Training, rng: random.Random) -> None:
    training.backward()
    training.optimizer.clip_grad_norm_(TIGHT)


def torch_clips(training: Training, rng: random.Random) -> None:
    training.backward()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), rng.choice([LOOSE, LOOSE, TIGHT]))


def accumulated(training: Training, rng: random.Random) -> None:
    training.backward()
    training.backward()


def written_past_counters(training: Training, rng: random.Random) -> None:
    training.backward()
    for parameter in rng.sample([p for p in training.model.parameters() if p.grad is not None], 3):
        parameter.grad.data.flatten()[0] += 1


def signs_flipped(training: Training, rng: random.Random) -> None:
    training.backward()
    parameter = rng.choice([p for p in training.model.parameters() if p.grad is not None])
    parameter.grad.data.neg_()


def another_rate(training: Training, rng: random.Random) -> None:
    training.backward()
    for group in training.optimizer.param_groups:
        group["lr"] = rng.choice([1e-2, 2e-3])


def weights_written(training: Training, rng: random.Random) -> None:
    training.backward()
    parameter = rng.choice([*training.model.parameters()])
    with torch.no_grad():
        parameter.mul_(0.5)


def fp32_weights_written_past_counters(training: Training, rng: random.Random) -> None:
    training.backward()
    parameter = rng.choice([*training.model.parameters()])
    if parameter.dtype is torch.float32:
        parameter.data.mul_(0.5)


def some_without_gradient(training: Training, rng: random.Random) -> None:
    training.backward()
    rng.choice([*training.model.parameters()]).grad = None


def another_gradient(training: Training, rng: random.Random) -> None:
    training.backward()
    parameter = rng.choice([p for p in training.model.parameters() if p.grad is not None])
    parameter.grad = torch.ones_like(parameter)


def dropped(training: Training, rng: random.Random) -> None:
    training.backward()
    training.optimizer.zero_grad()
    training.backward()


def dropped_behind_its_back(training: Training, rng: random.Random) -> None:
    training.backward()
    training.model.zero_grad()
    training.backward()


def state_read(training: Training, rng: random.Random) -> None:
    training.backward()
    training.optimizer.state_dict()


def saved(training: Training, rng: random.Random) -> None:
    training.backward()
    training.optimizer.save_checkpoint(training.folder / f"checkpoint-{training.seed}")


def not_finite(training: Training, rng: random.Random) -> None:
    training.backward()
    parameter = rng.choice([p for p in training.model.parameters() if p.grad is not None])
    parameter.grad.data.flatten()[-1] = float("nan")
    if not torch.isfinite(training.optimizer.clip_grad_norm_(1.0)):
        training.optimizer.zero_grad()


KINDS = [
    clipped,
    torch_clips,
    accumulated,
    written_past_counters,
    signs_flipped,
    another_rate,
    weights_written,
    fp32_weights_written_past_counters,
    some_without_gradient,
    another_gradient,
    dropped,
    dropped_behind_its_back,
    state_read,
    saved,
    not_finite,
]


def run(training: Training, steps: int, seed: int, kinds: list[Callable[..., None]]) -> list[torch.Tensor]:
    rng = random.Random(seed)
    with training.optimizer:
        for _ in range(steps):
            kind = rng.choice(kinds) if rng.random() < 0.4 else plain
            kind(training, random.Random(rng.random()))
            training.counts[kind.__name__] += 1
            training.step()
            training.optimizer.zero_grad()
        training.optimizer.wait_checkpoint()
        return everything(training.optimizer, training.model)


@pytest.mark.parametrize("form", ["exact", "compact16", "compact8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_are_those_of_steps_without(tmp_path: Path, dtype: torch.dtype, form: str) -> None:
    found = {}
    for overlap in ("off", "backward"):
        training = Training(tmp_path / overlap, overlap, dtype, state_format=form)
        found[overlap] = run(training, 60, 1, KINDS)
    assert_same(found["off"], found["backward"])
    assert training.counts["confirmed"] > 0
    assert training.counts["revoked"] > 0
