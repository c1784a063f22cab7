"""DDP on gloo processes: all state on each rank, or, with `OffloadConfig(shard=True)`, a rank's rows on each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mirror import Mirror, same_bits
from sharded import SETTINGS, Model, clipped, exact_gradients, mean_gradients, on_ranks, spawn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.optim import shards


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Tanh(), torch.nn.Linear(50, 20)).bfloat16()


def config(folder: Path, **settings: object) -> offload.OffloadConfig:
    (folder / "state").mkdir(exist_ok=True)
    found = {"host_memory": 0, "paths": [folder / "state"], "subgroup_numel": 1024, "threads": 1, "shard": True}
    return offload.OffloadConfig(**{**found, **settings})


@on_ranks(2)
def test_ddp_equals_the_reference(folder: Path) -> None:
    rank = dist.get_rank()
    model = net()
    mirror = Mirror(model.parameters(), **SETTINGS)
    parallel = DistributedDataParallel(model)
    optimizer = offload.AdamW(parallel.parameters(), **SETTINGS, offload=config(folder, shard=False))
    assert list(Path(folder, "state", f"rank-{rank}").iterdir())
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
    model = net()
    parallel, losses = DistributedDataParallel(model, **variant), []
    with offload.AdamW(parallel.parameters(), lr=1e-2, offload=config(folder, shard=False)) as optimizer:
        if mode != "off":
            optimizer.overlap_forward(parallel, check=mode == "check")
        for step in range(4):
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


# With a rank's rows on each


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
@pytest.mark.parametrize(
    ("dtype", "others"),
    [(torch.bfloat16, ((4, True), (2, True), (2, False))), (torch.float32, ((2, True),))],
    ids=["bf16", "fp32"],
)
def test_ranks_keep_their_rows_and_others_resume(
    tmp_path: Path, dtype: torch.dtype, others: tuple[tuple[int, bool], ...]
) -> None:
    spawn(4, tmp_path, save, dtype)
    for ranks, shard in others:
        spawn(ranks, tmp_path, resume, dtype, shard, 4)
    resume(tmp_path, dtype, True, 4)  # one process has all rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@on_ranks(2)
def test_a_state_dict_of_another_rank_is_refused(folder: Path, dtype: torch.dtype) -> None:
    """It has that rank's rows; a rank that could load it hears of the other's refusal."""
    rank = dist.get_rank()
    model, mirror = new(dtype)
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(folder))
    train(optimizer, DistributedDataParallel(model), mirror, range(2), 2)
    if rank == 0:
        torch.save(optimizer.state_dict(), folder / "saved")
    dist.barrier()
    saved = torch.load(folder / "saved")
    error, message = [(offload.CheckpointError, "rank 1 could"), (offload.ConfigError, "another rank's")][rank]
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(saved)
    mirror.assert_same(optimizer, model.parameters())
    optimizer.close()


def test_without_other_ranks_it_changes_nothing(tmp_path: Path) -> None:
    model, mirror = new(torch.bfloat16)
    with offload.AdamW(model.named_parameters(), **SETTINGS, offload=config(tmp_path)) as optimizer:
        train(optimizer, model, mirror, range(2), 1)
        mirror.assert_same(optimizer, model.parameters())
