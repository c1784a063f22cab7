"""Every benchmark runs at smoke size and reports in the agreed form."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch

BENCH = Path(__file__).resolve().parents[1] / "bench"
SCRIPTS = sorted(path.name for path in BENCH.glob("[!_]*.py"))
OF_THEIR_OWN = ("gpu.py", "kernel.py")
"""Whose smoke runs are looked at more closely, below and in kernels/test_bench_smoke.py."""
LONG = ("ablation.py", "large.py", "megatron_core.py", "overlap_ranks.py")
"""Whose parts run in others' smoke runs: workers and contenders in deepspeed.py, "auto" in overlap.py."""
FRESH = "classes.py"
"""Which imports all it needs, as whoever measures has it. Figures of memory are of a forked process in others'
smoke runs, where nobody reads them."""


def python(script: str) -> str:
    return sys.executable if script == FRESH else prepared.python()


def smoke(script: str, path: Path) -> dict[str, Any]:
    """Return what the smoke run of a benchmark reports."""
    command = [python(script), str(BENCH / script), "--smoke", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["smoke"] is True
    assert {"cpu", "torch", "commit", "command"} <= report["environment"].keys()
    assert report["results"]
    assert report["checksum"]
    assert report["targets"]
    for target in report["targets"]:
        assert target.keys() >= {"name", "value", "target", "met"}
        assert target["value"] is None or not math.isnan(target["value"]), target
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=[pytest.mark.full] * (script in LONG))
        for script in SCRIPTS
        if script not in OF_THEIR_OWN
    ],
)
def test_smoke(script: str, tmp_path: Path) -> None:
    report = smoke(script, tmp_path / "report.json")
    if script == "gpu_parts.py":  # simulated; it changes methods of the product's, which has to go on having them
        assert report["targets"][0]["name"].startswith("small tensors share copies")
        assert report["targets"][0]["met"]


def test_the_index_has_every_benchmark_and_its_links_lead_somewhere() -> None:
    index = BENCH.parent / "docs" / "benchmarks.md"
    text = index.read_text()
    in_rows = set(re.findall(r"^\| .*`(?:python )?bench/(\w+\.py)", text, re.MULTILINE))
    assert [script for script in SCRIPTS if script not in in_rows] == []
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    assert [link for link in links if not (index.parent / link).exists()] == []


@pytest.mark.slow
def test_a_simulated_gpu_node_keeps_to_its_bounds(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = smoke("gpu.py", path)
    promised = [target for target in report["targets"] if target["name"].startswith("predicted for an H100")]
    assert len(promised) == 4
    assert all(target["met"] for target in promised), promised
    over = {(row["what"], row["updates"]): row["over"] for row in report["results"]["p"]["node"]["parts"]}
    assert over["1 updates in flight", "CPU"] > 1.05
    assert over["gradients fetched all at the begin", "auto"] > over["gradients fetched 4 visits ahead", "auto"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_benchmark_without_a_gpu_says_so_and_keeps_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [python("gpu.py"), str(BENCH / "gpu.py"), "--json", str(path)]
    done = subprocess.run([*command, "--sections", "c"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["results"]["c"]["not_run"] == "no CUDA device: not run"
    assert all(target["value"] is None and target["note"] for target in report["targets"])
    report["results"]["b"] = {"elements": 8, "different": {"master": 2}, "on": "the GPU"}
    path.write_text(json.dumps(report))
    done = subprocess.run([*command, "--sections", "a,b,c,d"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert set(report["results"]) == set("abcd")
    assert report["targets"][0]["value"] == pytest.approx(0.75)
    assert report["targets"][0]["met"] is False
    assert "bits: 0.750, target 1: MISSED" in done.stdout
    not_run = [name for name, found in report["results"].items() if found.get("not_run") == "no CUDA device: not run"]
    assert sorted(not_run) == ["a", "c", "d"]
    done = subprocess.run([*command, "--smoke", "--sections", "a"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "another size" in done.stderr


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
        python("published.py"),
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
