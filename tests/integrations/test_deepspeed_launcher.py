"""`python -m offload.integrations.deepspeed`: the script runs as it would without us, and its state is offloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import prepared
import pytest

pytest.importorskip("deepspeed")

LAUNCHER = ("-m", "offload.integrations.deepspeed")
SCRIPT = Path(__file__).with_name("deepspeed_script.py")
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "steps_per_print": 10**9,
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}

PROGRAM = """
import json, os, sys
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals()]))

def fail(how):
    if how == "raise":
        raise ValueError("as asked")
    if how == "interrupt":
        raise KeyboardInterrupt
    sys.exit("a message" if how == "message" else 7)

if sys.argv[-1] != "end":
    fail(sys.argv[-1])
"""


def python(
    *arguments: str, cwd: Path, interpreter: str = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [interpreter, "-W", "ignore", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=840)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "exit", "message", "raise", "interrupt"])
def test_a_script_runs_as_plain_python_runs_it(how: str, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "program.py").write_text(PROGRAM)
    plain, ours = (
        python(*launcher, "scripts/program.py", "--flag", how, cwd=tmp_path) for launcher in ((), LAUNCHER)
    )
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert how == "end" or ours.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "raise"])
def test_a_module_runs_as_plain_python_runs_it(how: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "program.py").write_text(PROGRAM)
    plain, ours = (python(*launcher, "-m", "package.program", how, cwd=tmp_path) for launcher in ((), LAUNCHER))
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    assert "runpy" not in ours.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("nothing.py",), 2, "nothing.py"),
        (("-m", "no.such.module"), 1, "No module named no.such.module"),
        ((), 2, "usage"),
        (("--flag", "program.py"), 2, "usage"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(
    arguments: tuple[str, ...], status: int, says: str, tmp_path: Path
) -> None:
    done = python(*LAUNCHER, *arguments, cwd=tmp_path)
    assert done.returncode == status
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == (2 if says == "usage" else 1), done.stderr


def trained(folder: Path, name: str, *arguments: str, ranks: int = 2, status: int = 0) -> list[dict[str, Any]]:
    """Run the training script in ranks; return what each of them wrote."""
    offload = {"host_memory": 0, "paths": [str(folder)], "subgroup_numel": 1024, "threads": 1}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "multi_tier_offload": offload}))
    script = [argument.format(script=SCRIPT) for argument in arguments]
    extra = [str(folder / "config.json"), str(folder / name)]
    place = script.index(str(SCRIPT) if str(SCRIPT) in script else SCRIPT.stem) + 1
    command = [*script[:place], *extra, *script[place:]]
    interpreter = sys.executable if name == "launched" else prepared.python()
    done = python(
        *prepared.torchrun(ranks), *command, cwd=folder, interpreter=interpreter, PYTHONPATH=str(SCRIPT.parent)
    )
    assert bool(done.returncode) == bool(status), done.stderr[-3000:]
    assert not status or f"exitcode  : {status}" in done.stderr, done.stderr[-3000:]
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_that_cannot_be_edited_is_offloaded(tmp_path: Path) -> None:
    """Without the call or the launcher the object is ignored; with either of them losses are the same."""
    (stock,) = trained(tmp_path, "stock", "{script}", ranks=1)
    assert stock["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    edited = trained(tmp_path, "edited", "{script}", "--enable")
    launched = trained(tmp_path, "launched", *LAUNCHER, "{script}")
    assert [rank["losses"] for rank in launched] == [rank["losses"] for rank in edited]
    for rank in (*edited, *launched):
        assert (rank["optimizer"], rank["resident"]) == ("OffloadedStage3", 0)
    assert not any(
        rank["early"] for rank in launched
    )  # the launcher itself imports nothing that reads the environment
    assert launched[0]["argv"] == [str(SCRIPT), str(tmp_path / "config.json"), str(tmp_path / "launched")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deepspeeds_launcher_puts_its_rank_before_the_program(tmp_path: Path) -> None:
    """It reaches the program, whose exit status reaches whoever waits for it."""
    arguments = (*LAUNCHER, "--local_rank=0", "-m", SCRIPT.stem)
    (found,) = trained(tmp_path, "rank", *arguments, ranks=1, status=7)
    assert found["local_rank"] == 0
    assert found["argv"][1] == "--local_rank=0"
    assert found["optimizer"] == "OffloadedStage3"
