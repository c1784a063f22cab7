"""Programs that tests start here, and what these print."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import prepared


def start(program: Path, folder: Path, *arguments: object, ranks: int = 0, python: str = "") -> subprocess.Popen[str]:
    """Start a program for a folder, which is made where it is missing; by a launcher if it is told how many ranks."""
    folder.mkdir(exist_ok=True)
    launcher = prepared.torchrun(ranks) if ranks else ()
    return subprocess.Popen(
        [python or prepared.python(), "-W", "ignore", *launcher, str(program), str(folder), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def end(process: subprocess.Popen[str], status: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Return what ranks have said, by their numbers if they say these, and the log of a program that ends so."""
    try:
        out, errors = process.communicate(timeout=240)
    finally:
        process.kill()  # it has ended, unless it hangs
    assert process.returncode == status, out + errors
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"')]
    return sorted(lines, key=lambda line: int(line.get("rank", 0))), errors
