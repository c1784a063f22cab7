"""The stages of a first run on a CUDA machine: their reports, whatever becomes of their parts."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import prepared
import pytest
import torch
from _gpu_runs import fitting_rates

GPU = Path(__file__).resolve().parents[1] / "bench" / "gpu"


@pytest.fixture(scope="module")
def stages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stages", GPU / "stages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stages"] = module  # where its dataclasses look for names
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def made(stages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a stage from its limit, and lets signals do again what they did."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

    monkeypatch.setenv("OFFLOAD_SITE", str(tmp_path / "sites"))

    def make(limit_s: float = 540.0) -> Any:
        args = argparse.Namespace(
            stage="check",
            folder=tmp_path,
            limit=limit_s,
            scratch=tmp_path,
            simulated=True,
            smoke=True,
            params=None,
            kept=None,
        )
        return stages.Stage(args)

    yield make
    for number, handler in handlers.items():
        signal.signal(number, handler)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_part_that_fails_hangs_or_says_nothing_does_not_end_the_stage(stages: ModuleType, made: Any) -> None:
    stage = made()

    def parts(stage: Any) -> Iterator[Any]:
        yield stages.Part("fine", python("print('{\"figure\": 3}')"), 60.0, stages.last_json)
        yield stages.Part("fails", python("raise SystemExit('no luck')"), 60.0)
        yield stages.Part("hangs", python("print('begun', flush=True); input(open('/dev/zero').read())"), 1.0)
        yield stages.Part("silent", python(""), 60.0, stages.last_json)
        yield stages.Part("absent", None, 60.0, missing="there is none")
        yield stages.Part("fine again", python("print('{\"figure\": 4}')"), 60.0, stages.last_json)

    assert stage.run(parts) == 1
    report = json.loads(stage.file.read_text())
    assert report["state"] == "complete"
    assert report["device"] == stages.SIMULATED
    assert report["commit"] or not shutil.which("git")
    entries = {entry["name"]: entry for entry in report["parts"]}
    assert entries["fine"]["result"] == {"figure": 3}
    assert (entries["fails"]["status"], entries["fails"]["exit_status"]) == ("failed", 1)
    assert "no luck" in entries["fails"]["output_end"]
    assert entries["hangs"]["status"] == "cut short by its limit"
    assert (entries["silent"]["status"], entries["silent"]["unreadable"]) == (
        "failed",
        "ValueError: no line of JSON",
    )
    assert (entries["absent"]["status"], entries["absent"]["reason"]) == ("not run", "there is none")
    assert entries["fine again"]["result"] == {"figure": 4}
    assert not stage.scratch.exists()
    assert sorted(path.suffix for path in stage.folder.iterdir()) == [".json", ".log"]


def test_what_a_part_has_started_ends_with_it(stages: ModuleType, made: Any) -> None:
    """Those in groups of their own, too, as a build's compilers are."""
    stage = made()
    sleeps = "import subprocess as s; print(s.Popen(['sleep', '1000'], process_group=0).pid, flush=True)"

    def parts(stage: Any) -> Iterator[Any]:
        yield stages.Part("ends", python(sleeps), 60.0, lambda output: {"pid": int(output)})

    assert stage.run(parts) == 0
    (entry,) = json.loads(stage.file.read_text())["parts"]
    with contextlib.suppress(ProcessLookupError):  # gone, and not only dead
        started = os.pidfd_open(entry["result"]["pid"])
        assert select.select([started], [], [], 30.0)[0], "it is still running"
        os.close(started)


def test_what_finds_no_time_left_is_named(stages: ModuleType, made: Any) -> None:
    stage = made(limit_s=1.0)
    assert stage.run(lambda stage: iter([stages.Part("late", python(""), 60.0)])) == 0
    (entry,) = json.loads(stage.file.read_text())["parts"]
    assert (entry["status"], entry["reason"]) == ("not run", "no time left in this stage")


def test_without_the_build_nothing_else_is_tried(stages: ModuleType, made: Any) -> None:
    stage = made()
    parts = [stages.Part("build", python("raise SystemExit(3)"), 60.0, needed=True), stages.Part("more", [], 60.0)]
    assert stage.run(lambda stage: iter(parts)) == 1
    report = json.loads(stage.file.read_text())
    assert report["state"] == "ended: build failed"
    assert len(report["parts"]) == 1


CUT = """
import argparse, pathlib, sys
sys.path.insert(0, sys.argv[1])
import stages
args = argparse.Namespace(stage="check", folder=pathlib.Path(sys.argv[2]), limit=540.0,
                          scratch=pathlib.Path(sys.argv[2]).parent, simulated=True,
                          smoke=True, params=None)
child = "import time; told = open(sys.argv[1], 'w'); print('begun', file=told, flush=True); time.sleep(250)"
def parts(stage):
    yield stages.Part("before", [sys.executable, "-c", "print('{}')"], 60.0, stages.last_json)
    yield stages.Part("cut", [sys.executable, "-c", "import sys; " + child, sys.argv[3]], 300.0)
stages.Stage(args).run(parts)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stage_that_is_killed_leaves_what_it_had_found(number: signal.Signals, tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    command = [sys.executable, "-c", CUT, str(GPU), str(tmp_path / "reports"), str(told)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with told.open() as child:
            assert child.readline() == "begun\n"
            process.send_signal(number)
            process.wait(60.0)
            assert child.read() == ""  # comes when the child has ended, too
    finally:
        process.kill()
    (file,) = (tmp_path / "reports").glob("*.json")
    report = json.loads(file.read_text())
    assert report["state"] == ("running" if number == signal.SIGKILL else "cut short by SIGTERM")
    assert [entry["status"] for entry in report["parts"]] == ["ok", report["state"]]


def test_the_lines_of_pytest_are_counted(stages: ModuleType) -> None:
    output = """
tests/kernels/test_gpu.py::test_sizes[cuda-a b] PASSED [ 3%]
tests/kernels/test_gpu.py::test_sizes[cuda-7] SKIPPED (no device) [ 4%]
[gw0] [ 12%] FAILED tests/kernels/test_gpu.py::test_flags[cuda-2]
[gw1] [ 13%] PASSED tests/kernels/test_gpu.py::test_flags[cuda-3]
tests/kernels/test_gpu.py::test_cut_short
"""
    found = stages.tests_of(output)
    failures = ["tests/kernels/test_gpu.py::test_flags[cuda-2]"]
    assert found == {"passed": 2, "skipped": 1, "failed": 1, "failures": failures}
    with pytest.raises(ValueError, match="no test has passed"):
        stages.tests_of("tests/a.py::test_b SKIPPED (x)\n")


@pytest.mark.parametrize(
    ("gpu", "host", "params"),
    [
        (80e9, 137e9, 3e9),
        (141e9, 137e9, 3e9),
        (80e9, 40e9, 1e9),
        (24e9, 64e9, 7e8),
        (48e9, 137e9, 2e9),
        (0, 0, 5e7),
    ],
)
def test_the_model_fits_the_memory(stages: ModuleType, gpu: float, host: float, params: float) -> None:
    assert stages.largest(int(gpu), int(host), 4096) == params


def test_a_copy_knows_what_it_was_copied_from(
    stages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "offload"
    copy.mkdir()
    (copy / "same").write_text("")
    (copy / "changed").write_text("new")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (tmp_path / "SHA256SUMS").write_text(f"{empty}  same\n{empty}  changed\n{empty}  gone\n")
    (tmp_path / "COMMIT").write_text("0123abcd\n")
    monkeypatch.setattr(stages, "ROOT", copy)
    monkeypatch.delenv("OFFLOAD_PACK", raising=False)
    pack = stages.find_pack()
    assert pack == tmp_path
    changed = ["since it was packed: changed", "since it was packed: gone"]
    assert stages.provenance(pack) == ("0123abcd", changed)


def built(folder: Path, name: str = "offload-site-0-0123") -> Path:
    """Returns a folder as a build leaves it, with what Triton keeps."""
    site = folder / name
    (site / ".triton" / "kernel").mkdir(parents=True)
    (site / ".triton" / "kernel" / "update.cubin").write_bytes(os.urandom(5000))
    (site / "offload" / "__pycache__").mkdir(parents=True)
    (site / "offload" / "__init__.py").write_text("kept = True\n")
    (site / "offload" / "__pycache__" / "of.pyc").write_bytes(b"another time")
    return site


def test_what_a_stage_has_built_is_there_for_the_next(stages: ModuleType, tmp_path: Path) -> None:
    """The machine between them is bare again; a build of other sources is not taken, nor is half an archive."""
    site, archive = built(tmp_path / "there"), tmp_path / "kept.tar.gz"
    assert stages.keep(site, archive) == f"{archive.stat().st_size} bytes"
    again = tmp_path / "here" / site.name
    assert stages.take(again, archive).endswith("taken")
    assert (again / "offload" / "__init__.py").read_text() == "kept = True\n"
    kernel = Path(".triton/kernel/update.cubin")
    assert (again / kernel).read_bytes() == (site / kernel).read_bytes()
    assert not list(again.rglob("__pycache__"))

    other = tmp_path / "here" / "offload-site-0-4567"
    assert "other sources" in stages.take(other, archive)
    archive.write_bytes(archive.read_bytes()[:-500])
    assert "Error" in stages.take(other, archive)
    assert "Error" in stages.take(other, tmp_path / "none")
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [site.name]


def test_a_build_that_is_too_large_to_bring_back_is_not_left(
    stages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "MOST_KEPT_BYTES", 1000)
    assert stages.keep(built(tmp_path), tmp_path / "kept.tar.gz").startswith("left out")
    assert stages.keep(tmp_path / "none", tmp_path / "kept.tar.gz") == "nothing was built"
    assert not list(tmp_path.glob("*kept*"))


def test_a_stage_takes_what_was_kept_in_the_place_of_building(stages: ModuleType, made: Any, tmp_path: Path) -> None:
    stage = made()
    stages.keep(built(tmp_path / "there", stage.site.name), stage.folder / stages.KEPT)
    assert [part.name for part in stages.common(stage)] == ["environment"]
    assert stage.report["taken"].endswith("taken")
    shutil.rmtree(stage.site)
    (stage.folder / stages.KEPT).write_bytes(b"no archive")
    assert [part.name for part in stages.common(stage)] == ["build", "environment"]
    assert "Error" in stage.report["taken"]


def test_parts_are_asked_for_by_the_beginnings_of_their_names(stages: ModuleType) -> None:
    parts = [stages.Part(name, None, 1.0) for name in ("device", "kernels", "deepspeed-zero3, 3e+09 parameters")]
    assert all(stages.asked(part, None) for part in parts)
    assert [stages.asked(part, ["kern", "deepspeed-zero3"]) for part in parts] == [False, True, True]


@pytest.mark.slow
def test_memory_is_looked_at_before_and_after_it_is_touched(stages: ModuleType) -> None:
    found = stages.touched((1 << 30) + 5)
    assert found["bytes"] == 1 << 30
    assert found["seconds"] > 0
    assert found["total_before_bytes"] > 1 << 30
    assert stages.touched(0)["bytes"] == 0


def test_rates_that_do_not_fit_are_probed_and_it_is_said_why(tmp_path: Path) -> None:
    """Asks as a session does: whole stages are run by `make test-full` alone."""
    assert fitting_rates("auto") == ("auto", "")
    rates, why = fitting_rates(str(tmp_path / "none.json"))
    assert rates == "auto"
    assert "none.json" in why


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["check", "rates", "train", "micro"])
def test_a_stage_runs_to_its_end(name: str, tmp_path: Path) -> None:
    command = [str(GPU / "run.sh"), name, str(tmp_path / "reports"), "--simulated", "--limit", "3000"]
    command += ["--scratch", str(tmp_path)]
    variables = {**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1", "OFFLOAD_SITE": str(tmp_path)}
    for ours in (prepared.FOLDER, prepared.OWNER):  # a server that one part's tests began ends with the part
        variables.pop(ours, None)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "reports").glob(f"{name}-*T*Z.json")
    report = json.loads(file.read_text())
    assert report["state"] == "complete"
    assert report["device"].startswith("SIMULATED DEVICE")
    assert {"cpu", "torch", "memory_bytes"} <= report["environment"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["duplex", "behind", "update", "leaving", "pinning", "calls"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_measurements_run(name: str) -> None:
    command = [prepared.python(), str(GPU / "micro.py"), name, "--simulated"]
    variables = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["simulated"] is True
    assert len(found) > 2
