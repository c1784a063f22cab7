"""FSDP1 and `ZeroRedundancyOptimizer`: ranks with weights of their own under the same names save them by rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mirror import same, states
from sharded import SETTINGS, spawn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import offload


def build(kind: str, folder: Path) -> tuple[torch.nn.Module, Any, offload.AdamW]:
    """Return a model, what steps it, and our optimizer."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(9, 31), torch.nn.Tanh(), torch.nn.Linear(31, 5))
    (folder / "state").mkdir(exist_ok=True)
    settings: dict[str, Any] = {"host_memory": 0, "paths": [folder / "state"], "subgroup_numel": 1024, "threads": 1}
    if kind == "zero":
        zero = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=offload.AdamW, **SETTINGS, offload=settings)
        return DistributedDataParallel(net), zero, zero.optim
    wrapped = FullyShardedDataParallel(net, use_orig_params=kind == "fsdp1 named", device_id=torch.device("cpu"))
    parameters = wrapped.named_parameters() if kind == "fsdp1 named" else wrapped.parameters()
    optimizer = offload.AdamW(parameters, **SETTINGS, offload=settings)
    return wrapped, optimizer, optimizer


def train(model: torch.nn.Module, stepper: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 9)).square().mean().backward()
        stepper.step()
        stepper.zero_grad()


def state(optimizer: offload.AdamW) -> list[torch.Tensor]:
    return states(optimizer, [parameter for group in optimizer.param_groups for parameter in group["params"]])


def resumes(folder: Path, kind: str) -> None:
    model, stepper, optimizer = build(kind, folder)
    train(model, stepper, range(2))
    optimizer.save_checkpoint(folder / "ck", extra=dist.get_rank())
    before, weights = state(optimizer), [parameter.detach().clone() for parameter in model.parameters()]
    train(model, stepper, range(2, 4))
    optimizer.wait_checkpoint()
    after = state(optimizer)
    optimizer.close()
    dist.barrier()
    model, stepper, optimizer = build(kind, folder)
    assert optimizer.load_checkpoint(folder / "ck") == dist.get_rank()
    assert same(state(optimizer), before)
    if kind == "zero":  # the other ranks' weights are the model's to bring
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(weight)
    train(model, stepper, range(2, 4))
    assert same(state(optimizer), after)
    optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 named", "zero"])
def test_weights_of_each_rank_are_saved_by_rank(tmp_path: Path, kind: str) -> None:
    spawn(2, tmp_path, resumes, kind)
    weight = torch.nn.Parameter(torch.zeros(3))
    with (
        offload.AdamW([weight]) as optimizer,
        pytest.raises(offload.CheckpointError, match=r"saved by 2 ranks with weights of their own"),
    ):
        optimizer.load_checkpoint(tmp_path / "ck")
