"""The benchmark of this folder's code runs, tiny, and says what it promises to say."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import prepared
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_kernel_benchmark(tmp_path):
    path = tmp_path / "report.json"
    command = [
        prepared.python(),
        str(ROOT / "bench" / "kernel.py"),
        "--smoke",
        "--json",
        str(path),
        "--threads",
        "2",
    ]
    checksums = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(path.read_text())
        assert report["smoke"] is True
        assert {"cpu", "torch", "commit", "command"} <= report["environment"].keys()
        assert all(target.keys() >= {"name", "value", "target", "met"} for target in report["targets"])
        assert len(report["targets"]) == 6
        assert report["results"]["contenders"]["offload/whole"]["parameters_per_s"] > 0
        checksums.append(report["checksum"])
    assert checksums[0] == checksums[1]
