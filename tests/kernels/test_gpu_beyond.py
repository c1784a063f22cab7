"""No kernel of the GPU's reads or writes beyond what it is given."""

from __future__ import annotations

import os
from pathlib import Path

import prepared
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

PROGRAM = Path(__file__).with_name("beyond.py")


def test_what_lies_behind_a_tensor_may_be_out_of_reach() -> None:
    """The last tensor of a segment of the allocator has nothing behind it."""
    here = PROGRAM.parent
    variables = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    program = [prepared.python(), str(PROGRAM)]
    prepared.ran(program, env=variables)
