"""Steps that go on into the next forward pass of several ranks: DDP with `shard=True`, on gloo processes."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from settling import settle
from sharded import local, on_ranks, spawn
from test_overlap_forward import (
    MODES,
    Model,
    assert_all_same,
    assert_same,
    everything,
    follow,
    loss_of,
    train,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.errors import ConfigError, OffloadError
from offload.optim import exchange, shards

pytestmark = pytest.mark.not_overlapped("steps go on where the tests say so")


def settings(folder: Path, **more: Any) -> offload.OffloadConfig:
    given = {"host_memory": 0, "paths": [folder], "subgroup_numel": 4096, "threads": 1, "shard": True, **more}
    return offload.OffloadConfig(**given)


def all_of(optimizer: offload.AdamW, model: torch.nn.Module) -> list[torch.Tensor]:
    return [local(tensor) for tensor in everything(optimizer, model)]


def made_parallel(model: Model, kind: str) -> torch.nn.Module:
    """Return what calls the model, by the kind: DDP, or FSDP2 with or without prefetches that the user asks for."""
    if "fsdp2" not in kind:
        return DistributedDataParallel(model, gradient_as_bucket_view=kind == "views")
    for block in model.blocks:
        fully_shard(block.norm)  # of another dtype
    blocks = [fully_shard(block, reshard_after_forward="keeps" not in kind) for block in model.blocks]
    fully_shard(model)
    if "prefetches" in kind:
        for one, two in pairwise(blocks):
            one.set_modules_to_forward_prefetch([two])
        model.register_forward_pre_hook(lambda *_: blocks[0].unshard(async_op=True) and None)
    return model


FORMS = (
    ("exact", torch.bfloat16, 1),
    ("compact16", torch.bfloat16, 4096),
    ("compact8", torch.bfloat16, 4 << 20),
    ("exact", torch.float32, 1),
)
"""How state is stored, weights' dtype, and how many bytes of theirs ranks exchange at once."""


def beside_off(folder: Path, kind: str, steps: int, forms: Sequence[int] = range(len(FORMS))) -> None:
    rank = dist.get_rank()
    for state_format, dtype, exchange.BUCKET_BYTES in (FORMS[number] for number in forms):
        found = []
        for mode in MODES:
            model = Model(dtype)
            parallel = made_parallel(model, kind)
            overlap = "backward" if "both" in kind and mode != "off" else "off"
            config = settings(folder, state_format=state_format, overlap=overlap, shard="fsdp2" not in kind)
            with offload.AdamW(model.parameters(), lr=1e-2, offload=config) as optimizer:
                if overlap == "backward" and isinstance(parallel, DistributedDataParallel):
                    optimizer.overlap_backward(parallel)
                follow(optimizer, parallel, mode)
                losses = train(model, optimizer, steps, parallel, rank)
                found.append([torch.tensor(losses), *all_of(optimizer, model)])
        assert_all_same(found)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "forms"), [("ddp", 3, [0, 1, 2]), ("fsdp2 prefetches", 2, [2, 3])])
def test_some_bits_are_those_without(tmp_path: Path, kind: str, ranks: int, forms: list[int]) -> None:
    """FSDP2 exchanges weights by itself; state is stored in each form by one of these."""
    spawn(ranks, tmp_path, beside_off, kind, 14, forms)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *((kind, ranks) for kind in ("ddp", "fsdp2") for ranks in (1, 2, 3)),
        *((kind, 2) for kind in ("views", "both", "fsdp2 prefetches", "fsdp2 keeps", "fsdp2 both")),
    ],
)
def test_bits_are_those_without(tmp_path: Path, kind: str, ranks: int) -> None:
    spawn(ranks, tmp_path, beside_off, kind, 14)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["ddp", "both", "fsdp2 both"])
def test_bits_are_those_without_over_many_steps(tmp_path: Path, kind: str) -> None:
    spawn(2, tmp_path, beside_off, kind, 200)


@on_ranks(2)
def test_modules_wait_for_their_own_rows(folder: Path) -> None:
    """After `step` weights wait for a module, unless DDP still holds the memory of their gradients."""
    for kind in ("ddp", "views", "fsdp2"):
        model, views = Model(), kind == "views"
        parallel = made_parallel(model, kind)
        config = settings(folder, shard=kind != "fsdp2")
        with offload.AdamW(model.parameters(), lr=1e-2, offload=config) as optimizer:
            optimizer.overlap_forward(parallel, check=True)
            for step in range(4):
                loss_of(parallel, step).backward()
                optimizer.step()
                weights = [local(p) for p in model.parameters() if p.requires_grad]
                waiting = [bool(weight.isnan().all()) for weight in weights if weight.numel()]
                assert any(waiting) == (not views), f"{step, kind, waiting}"
                if any(waiting):
                    assert sum(waiting) >= len(waiting) - 3
            optimizer.finish()
            assert not any(bool(local(p).isnan().any()) for p in model.parameters())


class Branching(torch.nn.Module):
    """A branch of a rank's own, in front of layers that all ranks use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.layers(self.branches[branch](x) + x)


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.full)])
@on_ranks()
def test_no_rank_waits_for_what_another_calls(folder: Path) -> None:
    """They use other modules, and one evaluates, reads weights and writes a file while the other waits for it."""
    rank, found = dist.get_rank(), []
    for mode in MODES:
        model = Branching()
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        with offload.AdamW(model.parameters(), lr=1e-2, offload=settings(folder)) as optimizer:
            follow(optimizer, parallel, mode)
            seen = []
            for step in range(12):
                generator = torch.Generator().manual_seed(100 * step + rank)
                loss = parallel(torch.randn(4, 32, generator=generator), (step + rank) % 3).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if rank == step % 2:
                    with torch.no_grad():
                        seen.append(model(torch.ones(1, 32), 0).sum())
                    torch.save(model.state_dict(), folder / f"{mode}-{step}.pt")
                dist.barrier()
            found.append([*seen, *all_of(optimizer, model)])
    assert_all_same(found)
    for step in range(12):
        saved = [torch.load(folder / f"{mode}-{step}.pt") for mode in MODES]
        for other in saved[1:]:
            assert_same([*saved[0].values()], [*other.values()])


@pytest.mark.parametrize("begins", [True, False])
@on_ranks(2)
def test_a_rank_that_fails_is_told_of_everywhere(folder: Path, begins: bool) -> None:
    """What it was waited for is told on all ranks: its step has failed, or has not begun."""
    model = Model()
    parallel = DistributedDataParallel(model)
    optimizer = offload.AdamW(model.parameters(), lr=1e-2, offload=settings(folder))
    optimizer.overlap_forward(parallel)
    for step in range(2):
        loss_of(parallel, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(parallel, 2).backward()
    optimizer.finish()
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            if begins:
                patched.setattr(optimizer.engine._parts.views, "work", fail)
            else:
                patched.setattr(optimizer.engine, "step", fail)
        error = None
        try:
            optimizer.step()
            optimizer.finish()
        except (OffloadError, OSError) as caught:
            error = caught
        if dist.get_rank() == 1:
            assert error is not None
        else:
            assert "another rank could not finish its step" in str(error)
    optimizer.close()


def fail(*arguments: Any, **keywords: Any) -> None:
    raise offload.TierError("a tier has failed") if not keywords.get("pending") else OSError("no step")


@on_ranks(2)
def test_a_step_under_way_ends_with_its_optimizer(folder: Path) -> None:
    """A step under way ends with its optimizer, whether that is closed or forgotten; another goes on from there."""
    model = Model()
    parallel = DistributedDataParallel(model)
    for closes in (True, False):
        optimizer = offload.AdamW(model.parameters(), lr=1e-2, offload=settings(folder))
        followed = optimizer.overlap_forward(parallel)
        for step in range(3):
            loss_of(parallel, step).backward()
            optimizer.step()
        if closes:
            optimizer.close()
            followed.remove()
            continue
        optimizer.finish()
        kept = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert kept() is None
        loss_of(parallel, 4).backward()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    for mine in weights:
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, mine)


@on_ranks(2)
def test_fsdp2_is_left_as_it_was_and_fsdp1_is_refused(folder: Path) -> None:
    """FSDP2 is left as it was found; what gathers in ways of its own is refused."""
    model = made_parallel(Model(), "fsdp2")
    optimizer = offload.AdamW(model.parameters(), offload=settings(folder, shard=False))
    with optimizer:
        first = optimizer.overlap_forward(model)
        second = optimizer.overlap_forward(model)  # takes the place of the first
        assert [*optimizer._overlap.models] == [second]
        first.remove()
        groups = shards.fsdp_groups(model)
        assert len(groups) == 7
        assert all("unshard" in vars(group) for group in groups)
        second.remove()
        assert not any("unshard" in vars(group) for group in groups)
    flat = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
    optimizer = offload.AdamW(flat.parameters(), offload=settings(folder, shard=False))
    with optimizer, pytest.raises(ConfigError, match="FSDP1 gathers"):
        optimizer.overlap_forward(flat)


@on_ranks(2)
def test_tensor_parallel_weights_are_waited_for(folder: Path) -> None:
    """Each rank waits for its part of a weight before the module that multiplies by it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for dtype, one in ((torch.bfloat16, "forward"), (torch.float32, "backward")):
        found, hidden_steps = [], 0
        for overlap in ("off", one, "both"):
            torch.manual_seed(0)
            blocks = [
                torch.nn.Sequential(OrderedDict(up=Linear(64, 128), act=torch.nn.GELU(), down=Linear(128, 64)))
                for _ in range(3)
            ]
            model = torch.nn.Sequential(*blocks, Linear(64, 8)).to(dtype)
            for block in blocks:
                parallelize_module(block, mesh, plan)
            config = settings(folder, shard=False, overlap=overlap, subgroup_numel=1024)
            with offload.AdamW(model.parameters(), lr=1e-2, offload=config) as optimizer:
                if config.overlaps_forward:
                    optimizer.overlap_forward(model, check=True)
                for step in range(8):
                    generator = torch.Generator().manual_seed(step)
                    model(torch.randn(4, 64, generator=generator).to(dtype)).pow(2).mean().backward()
                    settle(optimizer.engine)
                    optimizer.clip_grad_norm_(1e-3 if step % 4 == 3 else 1e3)
                    optimizer.step()
                    hidden_steps += optimizer._overlap.is_pending
                    optimizer.zero_grad()
                found.append(all_of(optimizer, model))
        assert hidden_steps > 0
        for others in found[1:]:
            assert_same(others, found[0])
