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


@pytest.mark.slow
def test_published_rows_are_predicted_from_any_subset_of_tables(tmp_path: Path) -> None:
    rows = [
        "testbed,model,subgroups_per_rank,params_per_rank,stride_k,update_s",
        "4xH100,20B,32,4500000000,5,1.75",
        "4xH100,20B,32,4500000000,0,",
    ]
    (tmp_path / "interleaved_update_sweep.csv").write_text("\n".join(rows) + "\n")
    path = tmp_path / "report.json"
    command = [
        sys.executable,
        str(BENCH / "published.py"),
        "--smoke",
        "--evaluate",
        str(tmp_path),
        "--json",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    interleaved, plain = json.loads(path.read_text())["results"]["rows"]
    assert interleaved["error_percent"] == pytest.approx(100 * (interleaved["predicted"]["update_s"] / 1.75 - 1))
    assert plain["error_percent"] is None
    assert interleaved["predicted"]["update_s"] < plain["predicted"]["update_s"]
    (tmp_path / "interleaved_update_sweep.csv").write_text(rows[0] + "\n4xB200,20B,32,4500000000,5,1.75\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "error: testbed: '4xB200'" in done.stderr
