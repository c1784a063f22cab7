"""Sharded trainings on the test accelerator, by torchrun: several in one start, which takes longer than most of them.

training_ranks.py FOLDER [[KIND,KEEPS,PLACEMENT,OVERLAP],...]
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mirror import Mirror, same_bits
from settling import settle
from sharded import SETTINGS, Model, clipped, exact_gradients, local, mean_gradients, own
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from accelerator import late, ranks
from offload.optim import dealt, shards

DEVICE = "late:0"


def given(step: int) -> list[list[torch.Tensor]]:
    """Return this rank's gradients, on the device."""
    return [[tensor.to(DEVICE) for tensor in block] for block in exact_gradients(step, dist.get_rank())]


def sharded(model: Model) -> torch.nn.Module:
    mesh = init_device_mesh("late", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def muon(folder: Path, keep_grads: bool, placement: float, overlap: str = "off") -> None:
    """Train FSDP2's shards beside a twin that is whole and in host memory."""
    model = sharded(Model().to(DEVICE))
    twin = Model()
    settings = {"lr": 1e-2, "weight_decay": 1e-2}
    places = {"host_memory": 0, "gpu_memory": 0, "paths": [folder], "subgroup_numel": 2048, "threads": 1}
    beside = offload.Muon(twin.named_parameters(), **settings)
    with offload.Muon(
        model.named_parameters(), **settings, offload={**places, "keep_grads": keep_grads, "overlap": overlap}
    ) as optimizer:
        for step in range(6):
            model(given(step)).backward()
            for parameter, mean in zip(twin.parameters(), mean_gradients(step, dist.get_world_size()), strict=True):
                parameter.grad = mean.to(parameter.dtype)
            if overlap != "off":
                settle(optimizer.engine)
            if step % 2:
                norms = [float(each.clip_grad_norm_(2.0)) for each in (optimizer, beside)]
                assert norms[0] == norms[1]
            optimizer.step()
            beside.step()
            optimizer.zero_grad()
            for parameter, whole in zip(model.parameters(), twin.parameters(), strict=True):
                assert same_bits(local(parameter.detach()), own(parameter, whole.detach())), step
    beside.close()


def adamw(kind: str, folder: Path, keep_grads: bool, placement: float, overlap: str = "off") -> None:
    mirror = Mirror(Model().parameters(), **SETTINGS)
    beside = Model()
    model: torch.nn.Module = Model().to(DEVICE)
    trained = model
    if kind == "fsdp2":
        sharded(model)
    else:
        trained = DistributedDataParallel(model, bucket_cap_mb=0.005)
    config = offload.OffloadConfig(
        host_memory=0,
        gpu_memory=0,
        paths=[folder],
        subgroup_numel=2048,
        threads=1,
        keep_grads=keep_grads,
        placement=placement,
        shard="ddp" in kind and "whole" not in kind,
        overlap=overlap,
    )
    confirmed_bytes = hidden = 0.0
    with offload.AdamW(model.named_parameters(), **SETTINGS, offload=config) as optimizer:
        if config.overlaps_forward:
            optimizer.overlap_forward(model, check=placement == 0.5)  # late copies of weights, too
        if "buckets" in kind:
            optimizer.overlap_backward(trained)
        for step in range(4 if overlap == "off" else 12):
            gradients = [torch.zeros(()) for _ in mirror.weights]
            for number in (step, step + 10) if kind == "fsdp2" else (step,):
                loss = trained(given(number))
                loss.backward()
                wanted = exact_gradients(number, dist.get_rank())
                with torch.no_grad():  # forward has used the weights of the last step, whole
                    for parameter, weight in zip(beside.parameters(), mirror.weights, strict=True):
                        parameter.copy_(weight)
                    assert loss.item() == beside(wanted).item(), (step, number)
                both = zip(gradients, mean_gradients(number, dist.get_world_size()), strict=True)
                gradients = [sum_ + more for sum_, more in both]
                assert all((parameter.grad is None) is not keep_grads for parameter in model.parameters())
                if config.overlaps_backward:
                    settle(optimizer.engine)
            factor = clipped(optimizer, mirror, gradients) if step % (2 if overlap == "off" else 4) == 1 else 1.0
            optimizer.step()
            optimizer.zero_grad()
            mirror.step(gradients, factor)
            hidden += optimizer.engine.is_pending
            if config.overlaps_backward:
                if overlap == "both":
                    optimizer.finish()
                confirmed_bytes += optimizer.metrics()["speculation/confirmed_bytes"]
        if config.overlaps_backward:
            assert confirmed_bytes > 0
        if config.overlaps_forward:
            assert hidden > 0
            optimizer.finish()
        assert all(local(parameter).device.type == "late" for parameter in model.parameters())
        mirror.assert_same(optimizer, model.parameters())
        if not keep_grads:
            plain = torch.nn.Parameter(torch.ones(3, device=DEVICE))
            with pytest.raises(offload.ConfigError, match="keep_grads"):
                optimizer.add_param_group({"params": [("plain", plain)]})


if __name__ == "__main__":
    ranks.begin()
    late.tell_offload()
    shards.GATHER_BYTES = dealt.BUCKET_BYTES = 1000  # so that weights are exchanged in several parts
    kinds = ("fsdp2", "ddp", "ddp buckets", "ddp whole", "ddp whole buckets")
    ranks.serve({"muon": muon, **{kind: partial(adamw, kind) for kind in kinds}}, 100)
