"""`OffloadConfig(shard=True)`: DDP with a rank's rows of the state on each rank, on gloo processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mirror import Mirror, same_bits
from sharded import SETTINGS, Model, clipped, exact_gradients, mean_gradients, spawn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.optim import shards

DTYPES = [torch.bfloat16, torch.float32]


def config(folder: Path, **settings: object) -> offload.OffloadConfig:
    (folder / "state").mkdir(exist_ok=True)
    found = {"host_memory": 0, "paths": [folder / "state"], "subgroup_numel": 1024, "threads": 1, "shard": True}
    return offload.OffloadConfig(**{**found, **settings})


def train(optimizer: offload.AdamW, model: torch.nn.Module, mirror: Mirror, steps: range, ranks: int) -> None:
    """Train with the mean of the gradients of some number of ranks, beside the whole model in memory."""
    rank, here = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for step in steps:
        wanted = exact_gradients(step, rank)
        if here != ranks:
            mean = iter(mean_gradients(step, ranks))
            wanted = [[next(mean) for _ in block] for block in wanted]
        model(wanted).backward()
        gradients = mean_gradients(step, ranks)
        clip = clipped(optimizer, mirror, gradients) if step % 2 else 1.0
        optimizer.step()
        optimizer.zero_grad()
        mirror.step(gradients, clip)


def new(dtype: torch.dtype) -> tuple[Model, Mirror]:
    model = Model(dtype)
    return model, Mirror(model.parameters(), **SETTINGS)


def save(folder: Path, dtype: torch.dtype) -> None:
    shards.GATHER_BYTES = 1000  # so that weights are exchanged in several parts
    ranks = dist.get_world_size()
    model, mirror = new(dtype)
    parallel = DistributedDataParallel(model)
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder))
    whole = sum(parameter.numel() for parameter in model.parameters())
    mine = sum(parameter.numel for parameter in optimizer.engine.plan.layout.parameters)
    assert mine < whole / ranks + 130
    train(optimizer, parallel, mirror, range(3), ranks)
    for parameter in model.parameters():
        assert isinstance(optimizer.state_for(parameter)["exp_avg"], DTensor)
    mirror.assert_same(optimizer, model.parameters())
    optimizer.save_checkpoint(folder / "ck", extra=dist.get_rank())
    train(optimizer, parallel, mirror, range(3, 5), ranks)
    optimizer.wait_checkpoint()
    mirror.assert_same(optimizer, model.parameters())
    saved = optimizer.state_dict()
    changed = list(model.parameters())[-1]
    before = changed.detach().clone()
    if dtype == torch.float32:  # a weight is its master: what one rank is given, all get
        optimizer.state[changed]["master"] = torch.full(changed.shape, 3.0)
        assert bool((changed == 3).all())
        optimizer.state[changed]["master"] = before
    optimizer.load_state_dict(saved)
    assert same_bits(changed.detach(), before)
    mirror.assert_same(optimizer, model.parameters())
    optimizer.close()


def resume(folder: Path, dtype: torch.dtype, shard: bool, ranks: int) -> None:
    model, mirror = new(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder, shard=shard))
    optimizer.load_checkpoint(folder / "ck")
    for step in range(3):
        clip = min(1.0, 2.0 / (mirror.norm(mean_gradients(step, ranks)) + 1e-6)) if step % 2 else 1.0
        mirror.step(mean_gradients(step, ranks), clip)
    mirror.assert_same(optimizer, model.parameters())
    train(optimizer, parallel, mirror, range(3, 5), ranks)
    mirror.assert_same(optimizer, model.parameters())
    optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
def test_ranks_keep_their_rows_and_others_resume(tmp_path: Path, dtype: torch.dtype) -> None:
    spawn(4, tmp_path, save, dtype)
    spawn(4, tmp_path, resume, dtype, True, 4)
    spawn(2, tmp_path, resume, dtype, True, 4)
    spawn(2, tmp_path, resume, dtype, False, 4)
    resume(tmp_path, dtype, True, 4)  # one process has all rows


def test_without_other_ranks_it_changes_nothing(tmp_path: Path) -> None:
    model, mirror = new(torch.bfloat16)
    with offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(tmp_path)) as optimizer:
        train(optimizer, model, mirror, range(2), 1)
        mirror.assert_same(optimizer, model.parameters())


def test_an_engine_and_other_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(offload.ConfigError, match=r"shard: True .* parameters say which pieces"):
        offload.Engine([], offload.OffloadConfig(shard=True))
    with pytest.raises(offload.ConfigError, match=r"shard: 2 .* true or false"):
        offload.OffloadConfig(shard=2)  # type: ignore[arg-type]
