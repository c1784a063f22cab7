"""A resume from a bucket frees the store that it has read, once nobody needs it; and none that somebody may use."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

import prepared
import pytest
import torch
from s3_server import BUCKET, S3Server

import offload
from offload import cli
from offload.processes import Process
from offload.tiers.buckets import Bucket

PROGRAM = """
import os, sys, torch, offload
path, folder, how = sys.argv[1:]
weight = torch.nn.Parameter(torch.ones(5000).bfloat16())
config = offload.OffloadConfig(host_memory=0, paths=[path], subgroup_numel=1024)
optimizer = offload.AdamW([("weight", weight)], offload=config)
weight.grad = torch.ones(5000).bfloat16()
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


class Run:
    """A run whose state and checkpoints are in a bucket."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        prefix = f"resume-{uuid.uuid4()}"
        self.path, self.folder = f"s3://{BUCKET}/{prefix}/state", f"s3://{BUCKET}/{prefix}/run"
        self._capsys = capsys

    def begin(self, how: str) -> subprocess.Popen[str]:
        command = [prepared.python(), "-c", PROGRAM, self.path, self.folder, how]
        return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def resume(self, folder: str = "", *, saves: int = 1, copy: bool = False) -> None:
        weight = torch.nn.Parameter(torch.zeros(5000).bfloat16())
        config = offload.OffloadConfig(host_memory=0, paths=[self.path], subgroup_numel=1024)
        with offload.AdamW([("weight", weight)], offload=config) as optimizer:
            optimizer.load_checkpoint(self.folder)
            for _ in range(saves):
                weight.grad = torch.ones(5000).bfloat16()
                optimizer.step()
                optimizer.save_checkpoint(folder or self.folder, copy=copy)
                optimizer.wait_checkpoint()
        self.check(folder or self.folder)

    def check(self, folder: str) -> None:
        weight = torch.nn.Parameter(torch.zeros(5000).bfloat16())
        with offload.AdamW([("weight", weight)], offload={}) as optimizer:
            optimizer.load_checkpoint(folder)
            assert optimizer.state_for(weight)["exp_avg"].abs().min() > 0

    def gc(self) -> dict[str, str]:
        assert cli.main(["gc", self.path, "--json"]) == 0
        return {row["store"]: row["verdict"] for row in json.loads(self._capsys.readouterr().out)}

    def change_record(self, **values: object) -> None:
        (store,) = Bucket(self.path).stores()
        record = json.loads(store.read("store.json") or b"")
        store.write("store.json", json.dumps({**record, **values}).encode())


@pytest.fixture
def run(s3: S3Server, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


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
    "whose",
    ["another kernel", "another container", "an older version", "nonsense", "a number that was used again"],
)
def test_the_store_of_who_cannot_be_seen_stays(run: Run, whose: str) -> None:
    assert run.begin("kill").wait() == -9
    this = Process.this()
    assert this is not None
    boot, _, container = this.machine.partition(" ")
    process = {
        "another kernel": [f"{uuid.uuid4()} {container}", 1 << 21, "1"],
        "another container": [f"{boot} pid:[1]", 1 << 21, "1"],
        "an older version": None,
        "nonsense": [this.machine, "1", 2],
        "a number that was used again": [this.machine, this.pid, "1"],
    }[whose]
    run.change_record(process=process)
    (first,) = run.gc()
    run.resume()
    is_known = whose == "a number that was used again"
    assert (first in run.gc()) is not is_known
    if not is_known:
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
        weight = torch.nn.Parameter(torch.zeros(5000).bfloat16())
        config = offload.OffloadConfig(host_memory=0, paths=[run.path], subgroup_numel=1024, staging_memory="64KiB")
        optimizer = offload.AdamW([("weight", weight)], offload=config)
        optimizer.load_checkpoint(run.folder)
        return weight, optimizer

    weight, fork = resumed()
    run.resume()
    assert "may use it" in run.gc()[first]
    weight.grad = torch.ones(5000).bfloat16()
    fork.step()
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
