"""Training with state on an object store, alone and beside a directory, also while requests fail."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror import Mirror
from s3_server import BUCKET, FaultProxy, S3Server

import offload
from offload.tiers import RetryPolicy, buckets, remote

QUICK = RetryPolicy(attempts=5, first_delay_s=0.01, longest_delay_s=0.02, stall_timeout_s=10.0)
LASTING = RetryPolicy(attempts=10_000, first_delay_s=0.05, longest_delay_s=0.05, stall_timeout_s=10.0)


def train(paths: list[Any], steps: int = 3, **settings: Any) -> None:
    """Train on `paths` and verify that everything equals the reference."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(70, 30), (5000,), (3,), (2000,)]
    parameters = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(shapes, [torch.bfloat16, torch.float32, torch.float16, torch.bfloat16], strict=True)
    ]
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    mirror = Mirror(parameters, **options)
    config = offload.OffloadConfig(
        host_memory=0, paths=paths, subgroup_numel=1024, staging_memory=3 * 12 * 1024, **settings
    )
    with offload.AdamW(parameters, **options, offload=config) as optimizer:
        for _ in range(steps):
            gradients = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            mirror.step(gradients)
        mirror.assert_same(optimizer, parameters)


@pytest.fixture
def prefix() -> str:
    return f"e2e-{uuid.uuid4()}"


@pytest.mark.parametrize("checksum", [True, False])
def test_an_object_store_equals_the_reference(s3: S3Server, prefix: str, checksum: bool) -> None:
    train([f"s3://{BUCKET}/{prefix}"], checksum=checksum)
    assert s3.keys(prefix) == []


def test_a_directory_and_an_object_store_equal_the_reference(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    train([tmp_path, {"path": f"s3://{BUCKET}/{prefix}", "share": 2}])
    train([tmp_path, f"s3://{BUCKET}/{prefix}"], io_backend="asyncio")
    assert s3.keys(prefix) == []
    assert list(tmp_path.iterdir()) == []


def test_requests_that_fail_now_and_then_change_nothing(
    proxy: FaultProxy, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One request may meet all five faults of its method.
    monkeypatch.setattr(remote, "PATIENT", dataclasses.replace(QUICK, attempts=10))
    planted = [
        proxy.add(method=method, match=r"/\d+-\d+-\d+-[1-9]", after=after, **fault)
        for method in ("GET", "PUT")
        for after, fault in enumerate(
            [
                {"kind": "status", "status": 503, "code": "SlowDown", "times": 2},
                {"kind": "reset"},
                {"kind": "truncate" if method == "GET" else "lost-answer"},
                {"kind": "corrupt" if method == "GET" else "status"},
            ]
        )
    ]
    train([f"s3://{BUCKET}/{prefix}"])
    assert [fault.hits for fault in planted] == [fault.times for fault in planted]


def test_small_files_and_stores_of_a_checkpoint_are_asked_for_as_patiently_as_tiles(
    proxy: FaultProxy, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (buckets, remote):
        monkeypatch.setattr(module, "PATIENT", QUICK)
    config = {"host_memory": 0, "paths": [f"s3://{BUCKET}/{prefix}"]}
    many = QUICK.attempts - 1
    with offload.AdamW([("w", torch.nn.Parameter(torch.ones(100)))], offload=config) as optimizer:
        busy = proxy.add(kind="status", match=r"pins\.json", status=503, code="SlowDown", times=many)
        optimizer.save_checkpoint(tmp_path / "run")
        optimizer.wait_checkpoint()
    with offload.AdamW([("w", torch.nn.Parameter(torch.ones(100)))], offload=config) as optimizer:
        busy_store = proxy.add(kind="status", method="HEAD", match=r"store\.json", status=503, times=many)
        optimizer.load_checkpoint(tmp_path / "run")
    assert [busy.hits, busy_store.hits] == [many, many]


def test_a_write_that_keeps_failing_goes_to_another_path(
    proxy: FaultProxy, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENT", QUICK)
    planted = proxy.add(kind="status", method="PUT", match=r"/\d+-\d+-\d+-2-", times=10_000)
    train([f"s3://{BUCKET}/{prefix}", tmp_path])
    assert planted.hits >= QUICK.attempts


def test_a_server_killed_and_started_again_in_the_middle_of_a_step(
    aws: pytest.MonkeyPatch, prefix: str, s3: S3Server
) -> None:
    servers = [S3Server()]
    proxy = FaultProxy(servers[0].port)
    aws.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    aws.setattr(remote, "PATIENT", LASTING)

    first = threading.Lock()  # the request may be tried again before there is another server

    def restart(method: str, target: str) -> None:
        if method == "PUT" and "/0-0-0-2-" in target and first.acquire(blocking=False):
            servers[0].kill()
            servers.append(S3Server())
            proxy.upstream = servers[1].port

    proxy.before = restart
    try:
        with pytest.raises((offload.StepAbortedError, offload.SessionBrokenError)) as caught:
            train([f"s3://{BUCKET}/{prefix}"], steps=4)
        assert len(servers) == 2
        assert "NoSuchKey" in str(caught.value)
    finally:
        proxy.close()
        for server in servers:
            server.kill()


def test_a_bucket_that_cannot_be_used_leaves_no_store(s3: S3Server, tmp_path: Path) -> None:
    with pytest.raises(offload.ConfigError, match="NoSuchBucket"):
        train([tmp_path, "s3://another-bucket/run"])
    assert list(tmp_path.iterdir()) == []
