"""Checkpoints in a bucket: kept, resumed from where they lie, and freed.

A resume frees the store that it has read, once nobody needs it; and none that somebody may use.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from s3_server import BUCKET, S3Server

import offload
from offload import cli
from offload.processes import Process
from offload.tiers.buckets import Bucket

NUMEL = 2048
PROGRAM = """
import os, sys, torch, offload
path, folder, how = sys.argv[1:]
weight = torch.nn.Parameter(torch.ones(2048).bfloat16())
config = offload.OffloadConfig(host_memory=0, paths=[path], subgroup_numel=1024)
optimizer = offload.AdamW([("weight", weight)], offload=config)
weight.grad = torch.ones(2048).bfloat16()
optimizer.step()
optimizer.save_checkpoint(folder)
optimizer.wait_checkpoint()
if how == "close":
    optimizer.close()
elif how == "kill":
    os.kill(os.getpid(), 9)
elif how == "wait":
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), 9)
"""


def step(weight: torch.nn.Parameter, optimizer: offload.AdamW, seed: int = 0) -> None:
    weight.grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)).bfloat16()
    optimizer.step()


class Run:
    """A run whose state and checkpoints are in a bucket."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.prefix = f"resume-{uuid.uuid4()}"
        self.path, self.folder = f"s3://{BUCKET}/{self.prefix}/state", f"s3://{BUCKET}/{self.prefix}/run"
        self._capsys = capsys

    def begin(self, how: str) -> subprocess.Popen[str]:
        command = [prepared.python(), "-c", PROGRAM, self.path, self.folder, how]
        return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def open(self, **settings: Any) -> tuple[torch.nn.Parameter, offload.AdamW]:
        """Return a weight of zeros, and an optimizer whose state is in the bucket."""
        weight = torch.nn.Parameter(torch.zeros(NUMEL).bfloat16())
        config = {"host_memory": 0, "paths": [self.path], "subgroup_numel": 1024, **settings}
        return weight, offload.AdamW([("weight", weight)], offload=config)

    def resume(self, folder: str = "", *, saves: int = 1, copy: bool = False) -> None:
        weight, optimizer = self.open()
        with optimizer:
            optimizer.load_checkpoint(self.folder)
            for _ in range(saves):
                step(weight, optimizer)
                optimizer.save_checkpoint(folder or self.folder, copy=copy)
                optimizer.wait_checkpoint()
        self.check(folder or self.folder)

    def check(self, folder: str) -> None:
        weight = torch.nn.Parameter(torch.zeros(NUMEL).bfloat16())
        with offload.AdamW([("weight", weight)]) as optimizer:
            optimizer.load_checkpoint(folder)
            assert optimizer.state_for(weight)["exp_avg"].abs().max() > 0

    def gc(self, *arguments: str) -> dict[str, str]:
        assert cli.main(["gc", self.path, "--json", *arguments]) == 0
        return {row["store"]: row["verdict"] for row in json.loads(self._capsys.readouterr().out)}

    def change_record(self, **values: object) -> None:
        (store,) = Bucket(self.path).stores()
        record = json.loads(store.read("store.json") or b"")
        assert record.keys() >= values.keys()
        store.write("store.json", json.dumps({**record, **values}).encode())


@pytest.fixture
def run(s3: S3Server, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.mark.parametrize("copy", [False, True])
def test_a_bucket_keeps_checkpoints(s3: S3Server, run: Run, copy: bool) -> None:
    weight, optimizer = run.open()
    with optimizer:
        for seed in range(3):
            step(weight, optimizer, seed)
            optimizer.save_checkpoint(run.folder, extra=seed, copy=copy)
        optimizer.wait_checkpoint()
        step(weight, optimizer, 3)
    left = s3.keys(f"{run.prefix}/state")
    assert bool(left) is not copy, "only what the checkpoint refers to stays on the path"
    assert len(Bucket(run.folder).stores()) == copy, "a copy that was replaced goes"
    other = torch.nn.Parameter(torch.zeros(NUMEL).bfloat16())
    with offload.AdamW([("weight", other)]) as optimizer:
        assert optimizer.load_checkpoint(run.folder) == 2
        step(other, optimizer, 3)
    assert torch.equal(weight, other)
    assert s3.keys(f"{run.prefix}/state") == left


def test_resuming_from_a_bucket_copies_nothing_and_gc_takes_only_what_is_named(run: Run) -> None:
    weight, optimizer = run.open()
    with optimizer:
        step(weight, optimizer)
        optimizer.save_checkpoint(run.folder)
        optimizer.wait_checkpoint()
        step(weight, optimizer, 1)
    (first,) = run.gc()
    run.change_record(ended=None, process=None)  # as of a session elsewhere that was killed
    other, optimizer = run.open()
    with optimizer:
        optimizer.load_checkpoint(run.folder)
        assert not [i for i in optimizer.timeline() if i.lane.startswith(("write", "save", "copy"))]
        step(other, optimizer, 1)
        assert torch.equal(weight, other)
        optimizer.save_checkpoint(run.folder)
        optimizer.wait_checkpoint()
    assert "may use it" in run.gc()[first]
    (second,) = run.gc().keys() - {first}
    name, kept = (store.rpartition("/offload-")[2] for store in (first, second))
    assert [*run.gc("--store", name, "--dry-run").values()] == ["would be deleted"]
    assert [*run.gc("--store", name).values()] == ["deleted"]
    assert ["needed by" in verdict for verdict in run.gc("--store", kept).values()] == [True]
    assert cli.main(["gc", run.path, "--store", name]) == 2
    run.check(run.folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_resume_frees_the_store_that_it_has_read(run: Run, how: str) -> None:
    """Also where the session before was killed: its process is seen to be gone."""
    assert run.begin(how).wait() == (0 if how == "close" else -9)
    (first,) = run.gc()
    run.resume()
    (verdict,) = run.gc().values()
    assert "needed by" in verdict
    assert first not in run.gc()
    run.resume(saves=3)
    assert ["needed by" in verdict for verdict in run.gc().values()] == [True]


@pytest.mark.slow
def test_the_store_of_a_living_session_stays(run: Run) -> None:
    with run.begin("wait") as living:
        assert living.stdout is not None
        pid = int(living.stdout.readline())
        (first,) = run.gc()
        run.resume()
        assert f"process {pid} on" in run.gc()[first]
    assert run.gc()[first] == "deleted"
    assert ["needed by" in verdict for verdict in run.gc().values()] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "process", [[f"{uuid.uuid4()} pid:[1]", 1 << 21, "1"], ["here", "1", 2]], ids=["elsewhere", "none"]
)
def test_the_store_of_who_cannot_be_seen_stays(run: Run, process: list[Any]) -> None:
    """Also where a record says nonsense; who is seen to have ended is said below."""
    assert run.begin("kill").wait() == -9
    run.change_record(process=process)
    (first,) = run.gc()
    run.resume()
    assert "may use it" in run.gc()[first]


@pytest.mark.slow
def test_a_store_that_a_checkpoint_needs_stays(run: Run) -> None:
    """The one that was resumed from is in its folder, as the next was saved elsewhere; or it was copied."""
    assert run.begin("close").wait() == 0
    (first,) = run.gc()
    run.resume(f"{run.folder}-fork", saves=2)
    assert "needed by" in run.gc()[first]
    run.resume(f"{run.folder}-copy", copy=True)
    assert "needed by" in run.gc()[first]
    run.check(run.folder)
    run.resume()
    assert first not in run.gc()
    for folder in (run.folder, f"{run.folder}-fork", f"{run.folder}-copy"):
        run.check(folder)


@pytest.mark.slow
def test_a_store_that_another_resume_reads_stays(run: Run) -> None:
    """Two sessions go on from one checkpoint, and one of them replaces it."""
    assert run.begin("close").wait() == 0
    (first,) = run.gc()

    def resumed() -> tuple[torch.nn.Parameter, offload.AdamW]:
        weight, optimizer = run.open(staging_memory="16KiB")
        optimizer.load_checkpoint(run.folder)
        return weight, optimizer

    weight, fork = resumed()
    run.resume()
    assert "may use it" in run.gc()[first]
    step(weight, fork)
    fork.save_checkpoint(f"{run.folder}-fork")
    fork.wait_checkpoint()  # nobody reads it any more
    assert first not in run.gc()
    fork.close()
    run.check(f"{run.folder}-fork")
    _, idle = resumed()
    (second,) = [store for store, verdict in run.gc().items() if run.folder in verdict.split(", ")[0].split(" by ")]
    run.resume()
    assert "may use it" in run.gc()[second]
    idle.close()
    assert run.gc()[second] == "deleted"


@pytest.mark.slow
def test_a_session_that_closes_keeps_the_notes_of_those_that_read_its_store(s3: S3Server, run: Run) -> None:
    weight, owner = run.open()
    step(weight, owner)
    owner.save_checkpoint(run.folder)
    owner.wait_checkpoint()
    (first,) = run.gc()
    _, idle = run.open(staging_memory="16KiB")
    idle.load_checkpoint(run.folder)
    notes = [key for key in s3.keys(f"{run.prefix}/state") if "/reader-" in key]
    owner.close()
    assert len(notes) == 1
    assert [key for key in s3.keys(f"{run.prefix}/state") if "/reader-" in key] == notes
    run.resume()
    assert "may use it" in run.gc()[first]
    idle.close()
    assert run.gc()[first] == "deleted"


def test_a_process_is_seen_to_have_ended(tmp_path: Path) -> None:
    this = Process.this()
    assert this is not None
    assert not this.has_ended()
    assert this._replace(start_time="1").has_ended()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        started = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        process = Process(this.machine, other.pid, started)
        assert not process.has_ended()
        assert not process._replace(machine="another").has_ended()
        assert not process._replace(start_time="").has_ended()
        other.kill()
    assert process.has_ended()
    for pid in (0, -1):
        assert not process._replace(pid=pid).has_ended()
    assert process._replace(pid=1 << 40).has_ended()
