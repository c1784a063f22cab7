"""The examples in docs/examples/ run, are short, and train."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import prepared
import pytest
from doors import DOORS

EVERY = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.py"))
EXAMPLES = [path for path in EVERY if path.name not in {door.example for door in DOORS.values()}]
"""Those that are run here; integrations/test_doors.py runs the others."""
RANKS = {"ddp.py": 2, "deepspeed_zero3.py": 1, "fsdp2.py": 2}
MOST_LINES = 60
UNCOMPILED = """import deepspeed.ops, runpy
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
runpy.run_path({example!r}, run_name="__main__")
"""
"""Runs an example without DeepSpeed's shared-memory collectives, which take a minute to compile."""
COMMITTED = {
    "accelerate_loop": "checkpoint/optimizer_state",
    "hugging_face": "run/checkpoint-20/optimizer",
    "lightning_fit": "run/last.ckpt.offload-1",
    "trl_sft": "run/checkpoint-20/optimizer",
}
"""What the first run of an example leaves, for the second one to go on from."""


def run(example: Path, folder: Path, python: str) -> str:
    ranks = RANKS.get(example.name, 0)
    launcher = prepared.torchrun(ranks) if ranks else ()
    program = [str(example), str(folder)]
    if "deepspeed" in example.name:
        (folder / "uncompiled.py").write_text(UNCOMPILED.format(example=str(example)))
        program = [str(folder / "uncompiled.py"), str(folder)]
    done = subprocess.run(
        [python, *launcher, *program],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.full)], ids=["prepared", "fresh"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, fresh: bool, tmp_path: Path) -> None:
    for package in re.findall(r"^(?:import|from) (\w+)", example.read_text(), re.MULTILINE):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    assert "loss" in run(example, tmp_path, sys.executable if fresh else prepared.python())
    if example.stem in COMMITTED:
        assert (tmp_path / COMMITTED[example.stem] / "COMMIT").exists()
        assert "loss" in run(example, tmp_path, prepared.python())  # which resumes


def test_examples_are_short_and_named_in_the_docs() -> None:
    assert len(EVERY) >= 7
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    for example in EVERY:
        assert len(example.read_text().splitlines()) <= MOST_LINES, example.name
        assert f"](examples/{example.name})" in page
