"""Trainings of Megatron-Core that are killed while they save go on from the newest whole checkpoint, bit for bit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import megatron_kills
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]


def test_a_run_that_is_killed_twice_ends_as_one_that_is_not(tmp_path: Path) -> None:
    """In place; `megatron_kills.py` does so many times, in both layouts."""
    figures = megatron_kills.run_seed("in_place", 3, tmp_path, {}, kills=2)
    assert figures["kills"] == figures["one killed"] + figures["both killed"] == 2
