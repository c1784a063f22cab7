"""FSDP2: state of local shards, norms over all ranks, checkpoints by piece, on gloo processes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mirror import Mirror, same_bits
from sharded import SETTINGS, Model, exact_gradients, local, mean_gradients, own, spawn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import offload


def config(folder: Path, **settings: object) -> offload.OffloadConfig:
    (folder / "state").mkdir(exist_ok=True)
    found = {"host_memory": 0, "paths": [folder / "state"], "subgroup_numel": 1024, "threads": 1, **settings}
    return offload.OffloadConfig(**found)


def sharded_model(dtype: torch.dtype = torch.bfloat16, **settings: object) -> Model:
    model = Model(dtype)
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def assert_equals_whole(optimizer: offload.AdamW, model: torch.nn.Module, mirror: Mirror) -> None:
    """Check weights and state of this rank's pieces against the whole, bit for bit."""
    for index, parameter in enumerate(model.parameters()):
        assert same_bits(local(parameter.detach()), own(parameter, mirror.weights[0][index]))
        state = optimizer.state_for(parameter)
        wholes = (mirror.masters[0][index], *mirror.moments[0][index])
        for (name, found), whole in zip(state.items(), wholes, strict=True):
            assert isinstance(found, DTensor), name
            assert (found.device_mesh, found.placements) == (parameter.device_mesh, parameter.placements)
            assert found.dtype == torch.float32
            assert found.shape == parameter.shape
            assert same_bits(local(found), own(parameter, whole)), name


def exact(folder: Path, dtype: torch.dtype, formats: str = "exact") -> None:
    """Train with gradients of which every order of addition is exact, beside the whole model in memory."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mirror = Mirror([{"params": list(Model(dtype).parameters()), **SETTINGS}], decoupled=True)
    model = sharded_model(dtype)
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder))
    for step in range(5):
        if step == 3:  # two passes, reduced once
            model.set_requires_gradient_sync(False)
            model(exact_gradients(10 + step, rank)).backward()
            model.set_requires_gradient_sync(True)
        model(exact_gradients(step, rank)).backward()
        gradients = mean_gradients(step, ranks)
        if step == 3:
            both = zip(gradients, mean_gradients(10 + step, ranks), strict=True)
            gradients = [left + right for left, right in both]
        clip = 1.0
        if step % 2:
            norm = mirror.norm([gradients])
            assert float(optimizer.clip_grad_norm_(2.0)) == norm
            clip = min(1.0, 2.0 / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        mirror.step([gradients], clip)
    assert_equals_whole(optimizer, model, mirror)
    optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_have_the_bits_of_the_whole(tmp_path: Path, ranks: int) -> None:
    spawn(ranks, tmp_path, exact, torch.bfloat16)
