"""Data-parallel training on two gloo processes gives the same weights with and without offloading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mirror import Mirror, same_bits
from sharded import on_ranks

import offload


@on_ranks(2)
def test_ddp_equals_the_reference(folder: Path) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Tanh(), torch.nn.Linear(50, 20)).bfloat16()
    config = offload.OffloadConfig(host_memory=0, paths=[folder], subgroup_numel=1024, threads=1)
    settings = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    mirror = Mirror(model.parameters(), **settings)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = offload.AdamW(parallel.parameters(), **settings, offload=config)
    assert list(Path(folder, f"rank-{rank}").iterdir())
    for step in range(4):
        torch.manual_seed(100 * step + rank)
        for micro in range(2):
            loss = parallel(torch.randn(8, 30).bfloat16()).float().square().mean()
            if micro == 0:
                with parallel.no_sync():
                    loss.backward()
            else:
                loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        norm = float(optimizer.clip_grad_norm_(0.05))
        assert norm == mirror.norm(gradients)
        optimizer.step()
        optimizer.zero_grad()
        mirror.step(gradients, min(1.0, 0.05 / (norm + 1e-6)))
    for parameter, weight in zip(model.parameters(), mirror.weights, strict=True):
        assert same_bits(parameter.detach(), weight)
        other = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(other, parameter.detach())
        assert same_bits(other[0], other[1])
    optimizer.close()


VARIANTS: list[dict[str, bool]] = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}]


def trained(folder: Path, variant: dict[str, bool], mode: str, rank: int) -> list[torch.Tensor]:
    """Train with steps that go on into the next forward pass, or not, and return weights and losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Tanh(), torch.nn.Linear(50, 20)).bfloat16()
    parallel = torch.nn.parallel.DistributedDataParallel(model, **variant)
    config = offload.OffloadConfig(host_memory=0, paths=[folder], subgroup_numel=1024, threads=1)
    losses = []
    with offload.AdamW(parallel.parameters(), lr=1e-2, offload=config) as optimizer:
        if mode != "off":
            optimizer.overlap_forward(parallel, check=mode == "check")
        for step in range(6):
            torch.manual_seed(100 * step + rank)
            loss = parallel(torch.randn(8, 30).bfloat16()).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.clip_grad_norm_(0.05)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.not_overlapped("steps go on where the test says so")
@on_ranks(2)
def test_steps_go_on_into_the_next_forward_pass(folder: Path) -> None:
    rank = dist.get_rank()
    for variant in VARIANTS:
        wanted = trained(folder, variant, "off", rank)
        for mode in ("on", "check"):
            found = trained(folder, variant, mode, rank)
            assert all(map(same_bits, found, wanted)), (variant, mode)
