"""Directories of a real FUSE mount, which is how many network file systems come; needs root and bindfs."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from skips import cannot_run
from tier_harness import Harness

import offload
from offload._native import CompletionQueue
from offload.checkpoint.folder import open_folder
from offload.checkpoint.stores import lasting_inode
from offload.tiers import FileTier, StoreOptions, file_system, lock_holder, open_tier

BACKENDS = ["auto", "threads", "asyncio"]


@pytest.fixture(scope="module", params=[[], ["--forward-odirect=4096"]], ids=["cached", "direct"])
def fuse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder seen through FUSE, with O_DIRECT kept from or passed on to what is below."""
    if os.geteuid() != 0 or shutil.which("bindfs") is None or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root, /dev/fuse and bindfs")
    below, point = tmp_path_factory.mktemp("below"), tmp_path_factory.mktemp("fuse")
    done = subprocess.run(["bindfs", *request.param, below, point], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        cannot_run(f"no FUSE here: {done.stderr.strip()}")
    yield point
    subprocess.run(["umount", point], check=True)


def test_a_folder_on_fuse_has_no_inode_in_pins(fuse: Path, tmp_path: Path) -> None:
    """The next mount may give it another one, which would tell a copy."""
    assert lasting_inode(open_folder(fuse)) == ""
    assert lasting_inode(open_folder(tmp_path)) == str(tmp_path.stat().st_ino)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_come_and_go(fuse: Path, backend: str) -> None:
    assert file_system(fuse) == "fuse"
    queue = CompletionQueue()
    tier = open_tier(str(fuse), uuid.uuid4(), queue, options=StoreOptions(io_backend=backend))
    assert isinstance(tier, FileTier)
    assert (tier.io_backend == "asyncio") == (backend == "asyncio")
    assert lock_holder(tier.store_path) == os.getpid()
    harness = Harness(tier, queue)
    data = harness.fill(1 << 20)
    assert harness.write(harness.request(0, 1 << 20)).error == 0
    tier.sync(99)
    assert harness.collect(1)[0].error == 0
    assert harness.read(harness.request(0, 1 << 20, at=4 << 20)).error == 0
    assert harness.bytes_at(4 << 20, 1 << 20) == data
    tier.close()
    assert os.listdir(fuse) == []  # also no file under another name, as these systems keep for one that is open


def test_every_backend_gives_the_same_weights(fuse: Path) -> None:
    found = []
    for backend in ("threads", "asyncio"):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(50_000))
        config = offload.OffloadConfig(host_memory=0, paths=[fuse], subgroup_numel=8192, io_backend=backend)
        with offload.AdamW([weight], lr=1e-2, offload=config) as optimizer:
            for _ in range(3):
                weight.grad = torch.randn(50_000)
                optimizer.step()
        found.append(weight.detach().clone())
        assert os.listdir(fuse) == []
    assert all(torch.equal(found[0], each) for each in found[1:])
