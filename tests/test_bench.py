"""Every benchmark runs at smoke size and reports in the agreed form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"
SCRIPTS = sorted(path.name for path in BENCH.glob("[!_]*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_smoke(script: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, str(BENCH / script), "--smoke", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["smoke"] is True
    assert {"cpu", "torch", "commit", "command"} <= report["environment"].keys()
    assert report["results"]
    assert report["checksum"]
    assert report["targets"]
    for target in report["targets"]:
        assert target.keys() >= {"name", "value", "target", "met"}
