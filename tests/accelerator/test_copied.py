"""Updates in backward from gradients that FSDP2 copies from the test accelerator to host memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelerator.ranks import run_ranks

pytestmark = [
    pytest.mark.late(shared=True),
    pytest.mark.not_overlapped("steps go on where the tests say so"),
    pytest.mark.not_ahead("updates are made ahead where the tests say so"),
    pytest.mark.slow,
]

COPIED, HSDP, PAGEABLE = "fsdp2 copied", "fsdp2 copied hsdp", "fsdp2 copied pageable"
QUICK = [(1, COPIED, "backward", 0), (1, COPIED, "both", 2), (2, COPIED, "backward", 1), (2, HSDP, "backward", 0)]
"""In `make test`: each kind of step after each, and no further ones by chance."""
CELLS = [*((r, COPIED, o, form) for r in (1, 2) for o in ("backward", "both") for form in range(3))]
CELLS += [(2, HSDP, "backward", 0), (2, HSDP, "both", 2), (2, PAGEABLE, "backward", 1), (2, COPIED, "forward", 0)]


def run(ranks: int, folder: Path, *scenarios: tuple[Any, ...]) -> None:
    run_ranks(ranks, "copied_ranks.py", str(folder), json.dumps(scenarios))


@pytest.mark.parametrize(
    ("ranks", "kind", "overlap", "form"),
    [pytest.param(*cell, marks=[] if cell in QUICK else pytest.mark.full) for cell in CELLS],
)
def test_bits_are_those_of_steps_without(tmp_path: Path, ranks: int, kind: str, overlap: str, form: int) -> None:
    run(ranks, tmp_path, ("bits", kind, overlap, form, 0 if (ranks, kind, overlap, form) in QUICK else 60))


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_and_two_ranks(tmp_path: Path, ranks: int) -> None:
    run(ranks, tmp_path, ("looks",), ("models",), ("chosen",), ("raised",))
