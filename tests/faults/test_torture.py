"""A short version of torture.py; the long one is run by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import prepared
import pytest


def run(kills: int, seed: int, steps: int, file: Path, *more: str, ranks: int = 1) -> dict[str, int]:
    script = Path(__file__).with_name("torture.py")
    numbers = ["--kills", str(kills), "--seed", str(seed), "--steps", str(steps), "--ranks", str(ranks)]
    python = prepared.python() if more else sys.executable
    command = [python, str(script), *numbers, *more, "--json", str(file)]
    prepared.ran(command)
    found: dict[str, int] = json.loads(file.read_text())["results"]
    return found


overlapping = pytest.mark.parametrize(
    "more",
    [[], ["--overlap"], ["--overlap", "both"], ["--overlap", "leaving"], ["--parks", "--overlap", "both"]],
    ids=" ".join,
)
"""Whether steps go on behind the lives that are killed, and are made before they are taken; whether lives park."""


@pytest.mark.slow
def test_killed_lives_lose_nothing(tmp_path: Path) -> None:
    """Random programs are killed in all ways (`test_programs`); here stores do not pile up."""
    figures = run(6, 1, 300, tmp_path / "figures.json", "--parks", "--overlap", "both")
    assert figures["kills"] > 0
    assert figures["stores left"] < 20


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [2, 3, 4])
@overlapping
def test_many_killed_lives_lose_nothing(tmp_path: Path, seed: int, more: list[str]) -> None:
    assert run(200, seed, 4000, tmp_path / "figures.json", *more)["kills"] > 0


@pytest.mark.slow
def test_a_killed_rank_keeps_nobody(tmp_path: Path) -> None:
    figures = run(2, 1, 120, tmp_path / "figures.json", ranks=2)
    assert figures["kills"] > 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_killed_ranks_keep_nobody(tmp_path: Path) -> None:
    figures = run(200, 2, 4000, tmp_path / "figures.json", ranks=2)
    assert figures["kills of rank 0"] > 0
    assert figures["kills of rank 1"] > 0
