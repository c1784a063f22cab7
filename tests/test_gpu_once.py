"""One run on a machine with a GPU: its report, whatever becomes of its parts; and all on the test accelerator."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import prepared
import pytest

GPU = Path(__file__).resolve().parents[1] / "bench" / "gpu"


@pytest.fixture(scope="module")
def once() -> ModuleType:
    spec = importlib.util.spec_from_file_location("once", GPU / "once.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["once"] = module  # where its dataclasses look for names
    spec.loader.exec_module(module)
    return module


def args_of(out: Path, limit_s: float = 545.0, accelerator: str = "late") -> argparse.Namespace:
    return argparse.Namespace(out=out, limit=limit_s, wheels=None, accelerator=accelerator)


@pytest.fixture
def ran(once: ModuleType, tmp_path: Path) -> Any:
    """Returns what runs parts and returns the exit status and the report."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*parts: Any, limit_s: float = 545.0) -> tuple[int, dict[str, Any]]:
        made = once.Run(args_of(tmp_path / "out", limit_s))
        status = made.run(parts)
        assert not made.scratch.exists()
        return status, json.loads(made.file.read_text())

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def part(once: ModuleType) -> Callable[..., Any]:
    def make(name: str, code: str, limit_s: float = 60.0, **more: Any) -> Any:
        more = {"read": once.last_json, "cuda": False} | more
        return once.Part(name, [sys.executable, "-c", code], limit_s, "is it so?", **more)

    return make


def test_a_part_that_fails_hangs_or_says_nothing_does_not_end_the_run(ran: Any, part: Any) -> None:
    status, report = ran(
        part("fine", "print('{\"figure\": 3}')"),
        part("fails", "raise SystemExit('no luck')"),
        part("hangs", "print('begun', flush=True); input(open('/dev/zero').read())", 1.0),
        part("silent", ""),
        part("absent", "", cuda=True),
        part("fine again", "print('{\"figure\": 4}')"),
    )
    assert (status, report["state"]) == (1, "complete")
    entries = {entry["name"]: entry for entry in report["parts"]}
    assert entries["fine"]["result"] == {"figure": 3}
    assert entries["fails"]["status"] == "failed (1)"
    assert "no luck" in entries["fails"]["output_end"]
    assert entries["hangs"]["status"] == "cut short by its limit"
    assert (entries["silent"]["status"], entries["silent"]["unreadable"]) == (
        "unreadable",
        "ValueError: no line of JSON",
    )
    assert (entries["absent"]["status"], entries["absent"]["reason"]) == ("not run", "needs CUDA")
    assert entries["fine again"]["result"] == {"figure": 4}


def test_what_finds_no_time_left_is_named(ran: Any, part: Any) -> None:
    status, report = ran(part("late", ""), limit_s=1.0)
    assert status == 0
    assert (report["parts"][-1]["status"], report["parts"][-1]["reason"]) == ("not run", "no time left")


def test_what_a_part_has_started_ends_with_it(ran: Any, part: Any) -> None:
    """Those in groups of their own, too, as a build's compilers are."""
    sleeps = "import subprocess as s; print(s.Popen(['sleep', '1000'], process_group=0).pid, flush=True)"
    status, report = ran(part("ends", sleeps, read=lambda output: {"pid": int(output)}))
    assert status == 0
    with contextlib.suppress(ProcessLookupError):  # gone, and not only dead
        started = os.pidfd_open(report["parts"][-1]["result"]["pid"])
        assert select.select([started], [], [], 30.0)[0], "it is still running"
        os.close(started)


CUT = """
import argparse, pathlib, sys
sys.path.insert(0, sys.argv[1])
import once
args = argparse.Namespace(out=pathlib.Path(sys.argv[2]), limit=545.0, wheels=None, accelerator="late")
child = "import sys, time; told = open(sys.argv[1], 'w'); print('begun', file=told, flush=True); time.sleep(250)"
def part(name, *command):
    return once.Part(name, [sys.executable, "-c", *command], 300.0, "", once.last_json, cuda=False)
once.Run(args).run([part("before", "print('{}')"), part("cut", child, sys.argv[3])])
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_leaves_what_it_had_found(number: signal.Signals, tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    command = [sys.executable, "-c", CUT, str(GPU), str(tmp_path / "reports"), str(told)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        with told.open() as child:
            assert child.readline() == "begun\n"
            process.send_signal(number)
            process.wait(60.0)
            assert child.read() == ""  # comes when the child has ended, too
    finally:
        process.kill()
    report = json.loads((tmp_path / "reports" / "once.json").read_text())
    assert report["state"] == ("running" if number == signal.SIGKILL else "cut short")
    assert [entry["status"] for entry in report["parts"]] == ["ok", "running"]


def test_standard_output_has_an_end(
    ran: Any, part: Any, once: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report has all of it."""
    much = "import json; print(json.dumps({'much': 'x' * 5000}))"
    _, report = ran(*(part(f"part {number}", much) for number in range(15)))
    assert len(capsys.readouterr().out) <= once.MOST_CHARACTERS
    assert all(len(entry["result"]["much"]) == 5000 for entry in report["parts"])


def test_parts_that_need_torch_alone_do_not_wait_for_the_build(
    ran: Any, part: Any, once: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once.importlib.util, "find_spec", lambda name: None)
    start = once.Run.start

    def instead(self: Any, command: Any, *how: Any) -> Any:
        return start(self, ["false"] if "pip install" in command[-1] else command, *how)

    monkeypatch.setattr(once.Run, "start", instead)
    status, report = ran(part("before", "print('{}')", torch_alone=True), part("after", "print('{}')"))
    assert status == 1
    assert [(entry["name"], entry["status"]) for entry in report["parts"]] == [
        ("before", "ok"),
        ("build", "failed (1)"),
        ("after", "ok"),
    ]


def test_figures_are_short_on_standard_output(once: ModuleType) -> None:
    found = {"a rate": {"median": 1234.567, "least": 1.0, "most": 2.0}, "pairs": [0.123456, 7]}
    assert once.short(found) == '{"a rate":1230.0,"pairs":[0.123,7]}'


def test_the_lines_of_pytest_are_counted(once: ModuleType) -> None:
    output = """
tests/kernels/test_gpu.py::test_sizes[cuda-a b] PASSED [ 3%]
tests/kernels/test_gpu.py::test_sizes[cuda-7] SKIPPED (no device) [ 4%]
tests/kernels/test_gpu.py::test_flags[cuda-2] FAILED [ 12%]
tests/kernels/test_gpu.py::test_cut_short
"""
    failures = ["tests/kernels/test_gpu.py::test_flags[cuda-2]"]
    assert once.tests_of(output) == {"passed": 1, "skipped": 1, "failed": 1, "failures": failures}
    with pytest.raises(ValueError, match="no test has passed"):
        once.tests_of("tests/a.py::test_b SKIPPED (x)\n")


def test_a_copy_knows_what_it_was_copied_from(
    once: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "ROOT", tmp_path)  # no checkout
    assert once.commit_of(None) == once.commit_of(tmp_path) == ""
    (tmp_path / "COMMIT").write_text("0123abcd\n")
    assert once.commit_of(tmp_path) == "0123abcd"


def test_the_page_says_what_each_part_decides(once: ModuleType) -> None:
    page = (GPU.parents[1] / "docs" / "gpu.md").read_text()
    names = {part.name.split()[0] for part in once.parts_of(Path(), "cuda")}
    assert {name for name in names if f"| `{name}` |" not in page} == set()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.late(shared=True)
def test_all_of_it_runs_on_the_test_accelerator(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [str(GPU / "once.sh"), str(out), "--accelerator", "late", "--limit", "3000"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LATE_")}
    variables |= {"PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    for ours in (prepared.FOLDER, prepared.OWNER):  # a server that a part began would end with the part
        variables.pop(ours, None)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout) <= 12_000
    report = json.loads((out / "once.json").read_text())
    assert report["state"] == "complete"
    ran = {entry["name"] for entry in report["parts"] if entry["status"] == "ok"}
    measured = {"machine", "pinning", "duplex", "behind", "host", "update", "calls", "forward", "leaving"}
    assert ran == measured
    assert {entry["reason"] for entry in report["parts"] if entry["name"] not in ran} == {"needs CUDA"}
    assert (out / "once.log").stat().st_size > 0
