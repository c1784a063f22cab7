"""Updates in backward from gradients that FSDP2 copies from the test accelerator to host memory."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import prepared
import pytest

pytestmark = [
    pytest.mark.late(shared=True),
    pytest.mark.not_overlapped("steps go on where the tests say so"),
    pytest.mark.not_ahead("updates are made ahead where the tests say so"),
    pytest.mark.slow,
]

PROGRAM = Path(__file__).with_name("copied_ranks.py")
COPIED, HSDP, PAGEABLE = "fsdp2 copied", "fsdp2 copied hsdp", "fsdp2 copied pageable"
QUICK = [(1, COPIED, "backward", 0), (1, COPIED, "both", 2), (2, COPIED, "backward", 1), (2, HSDP, "backward", 0)]
CELLS = [*((r, COPIED, o, form) for r in (1, 2) for o in ("backward", "both") for form in range(3))]
CELLS += [(2, HSDP, "backward", 0), (2, HSDP, "both", 2), (2, PAGEABLE, "backward", 1), (2, COPIED, "forward", 0)]


def run(ranks: int, *arguments: str) -> None:
    tests = PROGRAM.parents[1]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("LATE_")}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (tests, tests / "e2e")))
    program = [prepared.python(), *prepared.torchrun(ranks), str(PROGRAM), *arguments]
    ended = subprocess.run(program, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("passed") == ranks


@pytest.mark.parametrize(
    ("ranks", "kind", "overlap", "form"),
    [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.full) for cell in CELLS],
)
def test_bits_are_those_of_steps_without(tmp_path: Path, ranks: int, kind: str, overlap: str, form: int) -> None:
    run(ranks, str(tmp_path), "bits", json.dumps([kind, overlap, form, 60]))


@pytest.mark.parametrize("scenario", ["looks", "models", "chosen", "raised"])
def test_one_and_two_ranks(tmp_path: Path, scenario: str) -> None:
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run(ranks, str(folder), scenario)
