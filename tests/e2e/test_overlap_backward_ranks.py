"""Updates during the backward pass of several ranks: FSDP2, and DDP with `shard=True`, on gloo processes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mirror import same_bits
from settling import settle
from sharded import local, spawn
from test_overlap_backward import LOOSE, TIGHT, changes
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.errors import ConfigError
from offload.predict import Forecast

pytestmark = pytest.mark.not_overlapped("steps go on where the tests say so")

FORMS = [
    ("exact", torch.float32),
    ("compact16", torch.bfloat16),
    ("compact8", torch.bfloat16),
]


def network(dtype: torch.dtype) -> torch.nn.Module:
    """Return layers of which ranks have even parts, uneven ones, and none."""
    torch.manual_seed(0)
    sizes = ((64, 128), (128, 64), (64, 48), (48, 1))
    layers = (layer for first, last in sizes for layer in (torch.nn.Linear(first, last), torch.nn.Tanh()))
    return torch.nn.Sequential(*layers).to(dtype)


class Ranks:
    """What one rank trains: a model of which everything streams, and its optimizer."""

    def __init__(self, folder: Path, kind: str, overlap: str, form: str, dtype: torch.dtype) -> None:
        folder.mkdir(exist_ok=True)
        self.model = network(dtype)
        self.dtype = dtype
        self.counts: Counter[str] = Counter()
        self.seed = 0
        options: dict[str, Any] = {"state_format": form, "subgroup_numel": 4096, "threads": 1}
        if kind == "fsdp2":
            # It never has a gradient, and lies beside others that have.
            self.model[0].register_parameter("unused", torch.nn.Parameter(torch.ones(10, dtype=dtype)))
            for layer in self.model:
                fully_shard(layer)
            self.called: torch.nn.Module = fully_shard(self.model)
        else:
            self.called = DistributedDataParallel(
                self.model, bucket_cap_mb=0.02, gradient_as_bucket_view=kind == "ddp views"
            )
            options["shard"] = True
        config = offload.OffloadConfig(host_memory=0, overlap=overlap, paths=[folder], **options)
        self.optimizer = offload.AdamW(self.model.named_parameters(), lr=1e-2, weight_decay=0.1, offload=config)

    def backward(self) -> None:
        self.seed += 1
        generator = torch.Generator().manual_seed(100 * self.seed + dist.get_rank())
        self.called(torch.randn(3, 64, generator=generator).to(self.dtype)).pow(2).mean().backward()

    def settle(self) -> None:
        settle(self.optimizer.engine)

    def gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self.model.parameters() if p.grad is not None and local(p.grad).numel()]

    def everything(self) -> list[torch.Tensor]:
        found = [local(parameter.detach()).clone() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            found += (local(tensor).clone() for tensor in self.optimizer.state_for(parameter).values())
        return found


def plain(training: Ranks) -> None:
    training.backward()
    training.optimizer.clip_grad_norm_(LOOSE)


def clipped(training: Ranks) -> None:
    training.backward()
    training.optimizer.clip_grad_norm_(TIGHT)


def accumulated(training: Ranks) -> None:
    training.backward()
    training.settle()
    training.backward()


def reduced_once(training: Ranks) -> None:
    sharded: Any = training.called
    if isinstance(sharded, DistributedDataParallel):
        with sharded.no_sync():
            training.backward()
            training.settle()
    else:
        sharded.set_requires_gradient_sync(False)
        training.backward()
        sharded.set_requires_gradient_sync(True)
    training.backward()


def dropped(training: Ranks) -> None:
    training.backward()
    training.settle()
    training.optimizer.zero_grad()
    training.backward()


def dropped_behind_its_back(training: Ranks) -> None:
    training.backward()
    training.model.zero_grad()
    training.backward()


def not_finite(training: Ranks) -> None:
    training.backward()
    training.settle()
    if dist.get_rank() == 1:
        training.gradients()[0].data.fill_(float("nan"))
    if not torch.isfinite(training.optimizer.clip_grad_norm_(1.0)):
        training.counts["skipped"] += 1
        training.optimizer.zero_grad()


def written_by_one_rank(training: Ranks) -> None:
    """What one rank alone has changed of its own share, and so revokes."""
    training.backward()
    training.settle()
    if dist.get_rank() == training.seed % 2:
        for gradient in training.gradients():
            gradient.data.neg_()


def replaced_by_one_rank(training: Ranks) -> None:
    training.backward()
    parameter = training.model[0].weight
    if dist.get_rank() == training.seed % 2:
        training.settle()
        parameter.grad = parameter.grad.clone()


def state_read(training: Ranks) -> None:
    training.backward()
    training.optimizer.state_dict()


ODD = [
    clipped,
    accumulated,
    reduced_once,
    dropped,
    dropped_behind_its_back,
    not_finite,
    written_by_one_rank,
    replaced_by_one_rank,
    state_read,
]


def run(training: Ranks, kinds: list[Callable[[Ranks], None]]) -> list[torch.Tensor]:
    """Train, a step of each kind; return this rank's weights and state."""
    with training.optimizer as optimizer:
        before = plain
        for kind in kinds:
            ahead = optimizer.engine._thread.speculation
            foreseen = kind is before is plain and ahead._is_armed
            kind(training)
            training.settle()
            optimizer.step()
            if kind is not not_finite:
                optimizer.zero_grad()
            found = optimizer.metrics()
            if "speculation/confirmed_bytes" in found:
                training.counts["confirmed"] += found["speculation/confirmed_bytes"]
                training.counts["revoked"] += found["speculation/revoked_bytes"]
                training.counts[f"revoked by {kind.__name__}"] += found["speculation/revoked_bytes"]
                if foreseen and not found["speculation/revoked_bytes"]:
                    training.counts["foreseen"] += 1
                    assert found["speculation/confirmed_bytes"] >= 0.9 * found["streamed_bytes"] > 0
            before = kind
        return training.everything()


def beside_off(folder: Path, kind: str) -> None:
    rng = random.Random(0)
    kinds = [plain, plain]
    for odd in ODD:
        kinds += [odd, plain, plain, plain]
    kinds += [kind for _ in range(6) for kind in (rng.choice(ODD), plain, plain)]
    for form, dtype in FORMS:
        found = []
        for overlap in ("off", "backward"):
            training = Ranks(folder / f"{overlap}-{form}", kind, overlap, form, dtype)
            found.append(run(training, kinds))
        for left, right in zip(*found, strict=True):
            assert same_bits(left, right)
        counts = training.counts
        assert counts["skipped"] > 0
        assert counts["foreseen"] > 5
        assert counts["confirmed"] > counts["revoked"] > 0
        for odd in (clipped, accumulated, dropped, not_finite):
            assert counts[f"revoked by {odd.__name__}"] > 0
        assert everywhere(counts["revoked by written_by_one_rank"]) > 0


def everywhere(number: float) -> float:
    """Return the sum of all ranks' numbers."""
    found = torch.tensor(number)
    dist.all_reduce(found)
    return float(found)


KINDS = ["fsdp2", "ddp", "ddp views"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_steps_without(tmp_path: Path, kind: str) -> None:
    spawn(2, tmp_path, beside_off, kind)


def torch_clips(training: Ranks) -> None:
    training.backward()
    training.settle()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), LOOSE)


def undisturbed(folder: Path, kind: str) -> None:
    for each in (plain, torch_clips):
        training = Ranks(folder / each.__name__, kind, "backward", "exact", torch.bfloat16)
        with training.optimizer as optimizer:
            for step in range(6):
                each(training)
                training.settle()
                optimizer.step()
                optimizer.zero_grad()
                found = optimizer.metrics()
                # All but the first step, which finds no state on storage and ahead of which nobody knows what comes.
                assert found["speculation/confirmed_bytes"] == (found["streamed_bytes"] if step else 0)
                assert found["speculation/revoked_bytes"] == 0
            assert "the step is hidden in backward" in str(optimizer.plan)
            training.backward()
            training.settle()
            memory = [StorageWeakRef(gradient.untyped_storage()) for gradient in training.gradients()]
            for parameter in training.model.parameters():
                parameter.grad = None
            if kind != "ddp views":  # whose buckets stay
                assert not any(each.expired() for each in memory)  # updates read it
                optimizer.zero_grad()
                assert all(each.expired() for each in memory)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 2) for kind in KINDS), ("fsdp2", 1)])
def test_all_is_confirmed_where_nothing_changes(tmp_path: Path, kind: str, ranks: int) -> None:
    spawn(ranks, tmp_path, undisturbed, kind)


def chosen_by_the_first_rank(folder: Path, kind: str) -> None:
    """Rank 0 finds that hiding the step wins, from step 8 to 15 that it does not; rank 1 always the contrary."""
    found = []
    for overlap in ("off", "auto"):
        training = Ranks(folder / overlap, kind, overlap, "compact16", torch.bfloat16)
        speculates = []
        with training.optimizer as optimizer:
            for step in range(1, 21):
                wins = (8 <= step < 16) == (dist.get_rank() == 1)
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(Forecast, "with_backward_s", lambda *_, wins=wins: 0.0 if wins else 1e9)
                    (clipped if step % 5 == 0 else plain)(training)
                    training.settle()
                    optimizer.step()
                optimizer.zero_grad()
                speculates.append(optimizer.engine.speculates)
                training.counts["confirmed"] += optimizer.metrics().get("speculation/confirmed_bytes", 0)
            found.append(training.everything())
        if overlap == "auto":
            assert changes(speculates) == [4, 8, 16]
            assert training.counts["confirmed"] > 0
        else:
            assert not any(speculates)
    for left, right in zip(*found, strict=True):
        assert same_bits(left, right)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 2) for kind in KINDS), ("fsdp2", 1)])
def test_auto_does_what_the_first_rank_predicts(tmp_path: Path, kind: str, ranks: int) -> None:
    spawn(ranks, tmp_path, chosen_by_the_first_rank, kind)


def refused(folder: Path) -> None:
    config = offload.OffloadConfig(host_memory=0, paths=[folder], overlap="backward")
    model = network(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"overlap: 'backward' .* DDP with shard=True"):
        offload.AdamW(DistributedDataParallel(model).parameters(), offload=config)
    fully_shard(model[0])
    with pytest.raises(ConfigError, match=r"overlap: 'backward' .* DDP with shard=True"):
        offload.AdamW(model.parameters(), offload=config)  # of which some are whole on every rank


@pytest.mark.slow
def test_gradients_that_others_reduce_after_they_have_arrived_are_refused(tmp_path: Path) -> None:
    spawn(2, tmp_path, refused)
