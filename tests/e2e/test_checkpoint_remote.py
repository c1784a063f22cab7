"""Checkpoints on an object store: folder, paths, or both."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch
from s3_server import BUCKET, S3Server

import offload


@pytest.mark.parametrize("copy", [False, True])
def test_a_bucket_keeps_checkpoints(s3: S3Server, tmp_path: Path, copy: bool) -> None:
    prefix = f"ck-{uuid.uuid4()}"
    path, folder = f"s3://{BUCKET}/{prefix}/state", f"s3://{BUCKET}/{prefix}/run"
    weight = torch.nn.Parameter(torch.randn(5000).bfloat16())

    def step(parameter: torch.nn.Parameter, optimizer: offload.AdamW, seed: int) -> None:
        parameter.grad = torch.randn(5000, generator=torch.Generator().manual_seed(seed)).bfloat16()
        optimizer.step()

    config = offload.OffloadConfig(host_memory=0, paths=[path], subgroup_numel=1024)
    with offload.AdamW([("weight", weight)], offload=config) as optimizer:
        for seed in range(3):
            step(weight, optimizer, seed)
            optimizer.save_checkpoint(folder, extra=seed, copy=copy)
        optimizer.wait_checkpoint()
        step(weight, optimizer, 3)
    left = s3.keys(f"{prefix}/state")
    assert bool(left) is not copy, "only what the checkpoint refers to stays on the path"
    other = torch.nn.Parameter(torch.zeros(5000).bfloat16())
    with offload.AdamW([("weight", other)]) as optimizer:
        assert optimizer.load_checkpoint(folder) == 2
        step(other, optimizer, 3)
    assert torch.equal(weight, other)
    assert s3.keys(f"{prefix}/state") == left
