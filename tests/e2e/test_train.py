"""`offload train` as a user runs it: a process of its own, the real engine, real files."""

import json
import subprocess
from pathlib import Path

import prepared
import pytest

from offload.cli import main

MAIN = "import sys; from offload.cli import main; sys.exit(main())"


def _train(folder: Path, *options: str, main: str = MAIN) -> subprocess.CompletedProcess[str]:
    size = ["--params", "200k", "--seq", "32", "--batch", "2", "--steps", "3", "--subgroup-numel", "32k"]
    command = [prepared.python(), "-c", main, "train", *size, "--output", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_offloading_changes_no_bit(tmp_path: Path) -> None:
    done = _train(tmp_path / "run", "--compare-in-memory", "--quiet", "--json", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["comparison"]["identical"] is True
    assert summary["comparison"]["finite"] is True
    assert summary["resident_share"] < 0.5
    assert summary["paths"][0]["read_bytes"] > 0
    assert summary["paths"][0]["write_bytes"] > 0
    assert json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8")) == summary


@pytest.mark.slow
@pytest.mark.late(shared=True)
@pytest.mark.parametrize(("device", "overlap"), [("late", "both"), ("late:1", "off")])
def test_offloading_changes_no_bit_on_an_accelerator(tmp_path: Path, device: str, overlap: str) -> None:
    size = ["--params", "100k", "--seq", "16", "--batch", "2", "--steps", "4", "--subgroup-numel", "32k"]
    options = ["--quiet", "--device", device, "--overlap", overlap, "--output", str(tmp_path / "run")]
    assert main(["train", *size, *options, "--compare-in-memory"]) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))
    assert summary["comparison"]["identical"] is True
    assert summary["comparison"]["finite"] is True


SLOW = """import sys
from offload.measure import products
products.product_rates = lambda dtype: products.ProductRates(dtype, 0.5e9, 115e9)
from offload.cli import main
sys.exit(main())"""


@pytest.mark.slow
def test_a_processor_that_is_slow_in_16_bits_computes_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OFFLOAD_COMPUTE", raising=False)
    done = _train(tmp_path / "run", "--compare-in-memory", main=SLOW)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("compute: ")]
    assert lines == ["compute: fp32 (matrix products here: bfloat16 0.5 GFLOP/s, float32 115)"]
    summary = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))
    assert summary["model"]["compute"] == "fp32"
    assert summary["settings"]["dtype"] == "bf16"
    assert summary["comparison"]["identical"] is True
    assert summary["comparison"]["finite"] is True


@pytest.mark.slow
def test_two_paths_share_the_traffic_and_nothing_is_left_on_them(tmp_path: Path) -> None:
    paths = [tmp_path / "disk0", tmp_path / "disk1"]
    for path in paths:
        path.mkdir()
    options = ["--paths", *map(str, paths)]
    # So many subgroups that each step moves tiles of both, whatever their rates.
    options += ["--accumulate", "2", "--subgroup-numel", "4k"]
    done = _train(tmp_path / "run", *options)
    assert done.returncode == 0, done.stderr
    assert "path 1" in done.stdout
    files = sorted(path.name for path in (tmp_path / "run").iterdir())
    reports = ["report.html", "report.json"]
    assert files == ["lanes.png", "loss.png", "metrics.jsonl", *reports, "summary.json", "timeline.json"]
    assert "What would help" in (tmp_path / "run/report.html").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(lines[-1][f"optimizer/path/{index}/read_bytes"] > 0 for index in range(2))
    assert [list(path.iterdir()) for path in paths] == [[], []]


@pytest.mark.slow
def test_an_unusable_path_is_one_line(tmp_path: Path) -> None:
    done = _train(tmp_path / "run", "--paths", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


WATCHED = f"""
sys.path.append({str(Path(__file__).parents[1])!r})
from settling import settle
import offload
from offload.session.thread import EngineThread
waits, lines, clip, clipped = EngineThread.wait_pending, [], offload.AdamW.clip_grad_norm_, []
def wait_pending(self):
    pending = self.pending
    lines.append(pending is not None and not all(each.is_set() for each in pending._visit_ends.values()))
    waits(self)
def settled(self, limit):
    clipped.append(True)
    if len(clipped) == 6:
        settle(self.engine)
    return clip(self, limit)
EngineThread.wait_pending, offload.AdamW.clip_grad_norm_ = wait_pending, settled
status = main()
print("waited for", sum(lines[:-2]))  # the last step has none behind it: its figures and the end may wait
sys.exit(status)
"""


@pytest.mark.slow
def test_hidden_steps_are_not_waited_for_to_show_their_figures(tmp_path: Path) -> None:
    hidden = MAIN.replace("sys.exit(main())", WATCHED)
    size = ["--params", "200k", "--seq", "32", "--batch", "2", "--steps", "6", "--subgroup-numel", "32k"]
    options = ["--overlap", "both", "--host-memory", "0", "--clip", "1000", "--output", str(tmp_path / "run")]
    command = [prepared.python(), "-c", hidden, "train", *size, *options]
    done = prepared.ran(command, timeout=240)
    assert "waited for 0" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["optimizer/step"] for line in lines] == [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["norm"] > 0 for line in lines)
    assert lines[-1]["optimizer/speculation/confirmed_bytes"] > 0


FAILING = """
import offload
metrics, seen = offload.AdamW.metrics, []
def fail_in_the_end(self):
    seen.append(1)
    if len(seen) >= 3:
        raise offload.OffloadError("the last step has failed")
    return metrics(self)
offload.AdamW.metrics = fail_in_the_end
sys.exit(main())
"""


@pytest.mark.slow
def test_a_last_step_that_fails_behind_the_loop_is_told(tmp_path: Path) -> None:
    done = _train(tmp_path / "run", "--overlap", "forward", main=MAIN.replace("sys.exit(main())", FAILING))
    assert done.returncode == 1
    assert "the last step has failed" in done.stderr
    lines = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
