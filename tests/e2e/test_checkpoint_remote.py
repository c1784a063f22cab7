"""Checkpoints on an object store: folder, paths, or both."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import torch
from s3_server import BUCKET, S3Server

import offload
from offload import cli
from offload.tiers.buckets import Bucket


@pytest.mark.parametrize("copy", [False, True])
def test_a_bucket_keeps_checkpoints(s3: S3Server, tmp_path: Path, copy: bool) -> None:
    prefix = f"ck-{uuid.uuid4()}"
    path, folder = f"s3://{BUCKET}/{prefix}/state", f"s3://{BUCKET}/{prefix}/run"
    weight = torch.nn.Parameter(torch.randn(2000).bfloat16())

    def step(parameter: torch.nn.Parameter, optimizer: offload.AdamW, seed: int) -> None:
        parameter.grad = torch.randn(2000, generator=torch.Generator().manual_seed(seed)).bfloat16()
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
    other = torch.nn.Parameter(torch.zeros(2000).bfloat16())
    with offload.AdamW([("weight", other)]) as optimizer:
        assert optimizer.load_checkpoint(folder) == 2
        step(other, optimizer, 3)
    assert torch.equal(weight, other)
    assert s3.keys(f"{prefix}/state") == left


def test_resuming_from_a_bucket_copies_nothing_and_gc_takes_only_what_is_named(
    s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = f"ck-{uuid.uuid4()}"
    path, folder = f"s3://{BUCKET}/{prefix}/state", f"s3://{BUCKET}/{prefix}/run"
    config = offload.OffloadConfig(host_memory=0, paths=[path], subgroup_numel=1024)

    def step(parameter: torch.nn.Parameter, optimizer: offload.AdamW, seed: int) -> None:
        parameter.grad = torch.randn(2000, generator=torch.Generator().manual_seed(seed)).bfloat16()
        optimizer.step()

    def gc(*arguments: str) -> list[dict[str, str]]:
        assert cli.main(["gc", path, "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    weight = torch.nn.Parameter(torch.randn(2000).bfloat16())
    with offload.AdamW([("weight", weight)], offload=config) as optimizer:
        step(weight, optimizer, 0)
        optimizer.save_checkpoint(folder)
        optimizer.wait_checkpoint()
        step(weight, optimizer, 1)
    (first,) = gc()
    assert "needed by" in first["verdict"]
    (store,) = Bucket(path).stores()
    record = json.loads(store.read("store.json") or b"")
    assert record.pop("ended")
    assert record.pop("process")
    store.write("store.json", json.dumps(record).encode())  # as of a session elsewhere that was killed
    other = torch.nn.Parameter(torch.zeros(2000).bfloat16())
    with offload.AdamW([("weight", other)], offload=config) as optimizer:
        optimizer.load_checkpoint(folder)
        assert not [i for i in optimizer.timeline() if i.lane.startswith(("write", "save", "copy"))]
        step(other, optimizer, 1)
        assert torch.equal(weight, other)
        optimizer.save_checkpoint(folder)
        optimizer.wait_checkpoint()
    rows = {row["store"]: row for row in gc()}
    assert len(rows) == 2
    assert "may use it" in rows[first["store"]]["verdict"]
    name = first["store"].rpartition("/offload-")[2]
    assert [row["verdict"] for row in gc("--store", name, "--dry-run")] == ["would be deleted"]
    assert [row["verdict"] for row in gc("--store", name)] == ["deleted"]
    (second,) = gc()
    kept = second["store"].rpartition("/offload-")[2]
    assert ["needed by" in row["verdict"] for row in gc("--store", kept)] == [True]
    assert cli.main(["gc", path, "--store", name]) == 2
    with offload.AdamW([("weight", other)], offload=config) as optimizer:
        optimizer.load_checkpoint(folder)
    assert torch.equal(weight, other)
