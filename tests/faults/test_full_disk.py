"""Random programs on a disk that fills up; many more are run by hand or by `make test-full`."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import full_disk
import pytest
import torch
from limited import limited

import offload


@cache
def expected() -> Any:
    return full_disk.undisturbed()


@pytest.fixture(params=full_disk.KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each kind of file system that can be mounted here."""
    try:
        with full_disk.mounted(request.param, tmp_path):
            return str(request.param)
    except OSError as cause:
        pytest.skip(str(cause))


overlapping = pytest.mark.parametrize("overlaps", [False, True], ids=["waited for", "behind"])
"""Whether steps go on behind the program."""


def run(kind: str, seeds: range, tmp_path: Path, overlaps: bool, parks: int = 0) -> None:
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        told = full_disk.run(seed, kind, folder, expected(), overlaps, parks)
        assert told["open"], seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 5))
@overlapping
def test_a_disk_that_fills_up_brings_promised_errors_only(
    kind: str, seed: int, overlaps: bool, tmp_path: Path
) -> None:
    run(kind, range(seed, seed + 1), tmp_path, overlaps)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 103))
@overlapping
def test_parks_on_a_disk_that_fills_up_lose_nothing(kind: str, seed: int, overlaps: bool, tmp_path: Path) -> None:
    run(kind, range(seed, seed + 1), tmp_path, overlaps, parks=5)


def test_state_dicts_leave_what_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and checkpoints have room on a disk that is small, and where temporary files go, too."""
    with contextlib.ExitStack() as ends:
        try:
            small = ends.enter_context(full_disk.mounted("ext4", tmp_path))
        except OSError as cause:
            pytest.skip(str(cause))
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        (path := small / "path").mkdir()
        parameter = torch.nn.Parameter(torch.zeros(50_000, dtype=torch.bfloat16))
        config = {"host_memory": 0, "paths": [path], "subgroup_numel": 4096, "checkpoints_kept": 1}
        with limited(offload.AdamW, large_copy_bytes=0)([parameter], offload=config) as optimizer:
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            saved = [optimizer.state_dict()["state"][0] for _ in range(12)]
            lines = Path("/proc/self/maps").read_text().splitlines()
            assert (
                0 < sum(str(small) in line and "(deleted)" in line for line in lines) < 12
            )  # the others are in memory
            for step in range(4):
                optimizer.step()
                optimizer.save_checkpoint(tmp_path / f"ck{step}")
                optimizer.wait_checkpoint()
            assert all(torch.equal(entry["exp_avg"], saved[0]["exp_avg"]) for entry in saved)
            assert (saved[0]["exp_avg"] > 0).all()
        del saved
        gc.collect()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(3600)
@overlapping
def test_many_disks_that_fill_up(kind: str, overlaps: bool, tmp_path: Path) -> None:
    run(kind, range(5, 150), tmp_path, overlaps)
