"""What `offload train` says of a run, and `offload trace` makes of it for other programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import cli
from offload.cli import report
from offload.cli.record import OPTIMIZERS, Comparison, RunRecord
from offload.cli.trace import trace
from offload.cli.values import in_columns, to_json
from offload.pictures import draw
from offload.schedule.timeline import Interval, lane_order

PNG = b"\x89PNG"


def _row(step: int, loss: float = 2.0, **metrics: float) -> dict[str, Any]:
    own = {"step": step, "loss": loss, "lr": 1e-3, "norm": 0.5, "tokens_per_s": 100.0 * step}
    seconds = {"forward_s": 0.1, "backward_s": 0.2, "step_s": 0.3, "iteration_s": 0.6}
    metrics = {"step": step, "path/0/read_bytes": 7, **metrics}
    return own | seconds | {f"{OPTIMIZERS}{name}": value for name, value in metrics.items()}


def _summary(run: RunRecord) -> dict[str, object]:
    values = run.summary()
    paths = [{"path": "/p", **moved} for moved in values.pop("path_bytes", [])]
    return values | {
        "paths": paths,
        "text": {"byte_entropy": 3.2},
        "output": "runs/x",
        "verdict": None,
        "in_memory": None,
    }


def test_the_summary_leaves_the_first_step_out_of_its_medians() -> None:
    run = RunRecord([_row(step, 6.0 - step, predicted_step_s=0.1 * step) for step in (1, 2, 3, 4)])
    summary = run.summary()
    assert summary["tokens_per_s"] == 300
    assert summary["predicted_step_s"] == pytest.approx(0.3)
    assert summary["first_loss"] == 5.0
    assert summary["final_loss"] == 3.5
    assert summary["path_bytes"] == [{"read_bytes": 7, "write_bytes": None}]
    assert summary["state_bytes"] is None


def test_the_final_loss_is_the_mean_of_the_last_steps() -> None:
    run = RunRecord([_row(step, float(step)) for step in range(1, 41)])
    assert run.summary()["final_loss"] == 30.5


def test_the_table_says_what_is_known() -> None:
    known = {
        "step_s": 0.2,
        "predicted_step_s": 0.1,
        "state_bytes": 4 * 2**20,
        "resident_bytes": 2**20,
        "resident_share": 0.25,
        "streamed_bytes": 3 * 2**20,
    }
    text = report.table(_summary(RunRecord([_row(1, **known), _row(2, **known)])))
    assert "25% resident" in text
    assert "100 ms for the step alone, measured 200 ms (2 times as long)" in text
    assert "path 0" in text
    assert "runs/x" in text
    assert "resident" not in report.table(_summary(RunRecord([_row(1)])))


def test_where_steps_are_hidden_the_table_compares_iterations() -> None:
    known = {"step_s": 0.2, "predicted_step_s": 0.1, "predicted_iteration_s": 0.5, "waited_s": 0.03}
    text = report.table(_summary(RunRecord([_row(step, **known) for step in (1, 2)])))
    assert "500 ms for an iteration, measured 600 ms (+20%)" in text
    assert "30 ms for the step" in text
    assert "step alone" not in text


def test_the_table_compares_lanes_and_names_the_furthest_off() -> None:
    lanes = {"cpu": (0.1, 0.11), "read:0": (0.2, 0.15), "write:0": (0.0, 0.0)}
    known: dict[str, float] = {}
    for lane, (predicted_s, measured_s) in lanes.items():
        known |= {f"lane/{lane}/predicted_s": predicted_s, f"lane/{lane}/busy_s": measured_s}
    summary = _summary(RunRecord([_row(step, **known) for step in (1, 2, 3)]))
    assert summary["lanes"] == {lane: {"predicted_s": p, "measured_s": m} for lane, (p, m) in lanes.items()}
    lines = dict(line.split("  ", 1) for line in report.table(summary).splitlines())
    assert lines["CPU update"].strip() == "100 ms predicted, 110 ms measured (+10%)"
    assert lines["read path 0"].strip() == "200 ms predicted, 150 ms measured (-25%)"
    assert lines["furthest off"].strip() == "read path 0, 50 ms shorter"
    assert "write path 0" not in lines
    assert "furthest" not in report.table(_summary(RunRecord([_row(1)])))


def test_a_run_of_no_steps_has_an_empty_table() -> None:
    assert report.table(_summary(RunRecord())) == ""


def _compared(
    ours: list[float], theirs: list[float], our_losses: list[float], their_losses: list[float]
) -> Comparison:
    weights = [{"bias": torch.ones(3), "w": torch.tensor(values)} for values in (ours, theirs)]
    return Comparison.of(*weights, our_losses, their_losses)


@pytest.mark.parametrize(
    ("theirs", "their_losses", "identical"),
    [([0.0, 2.0], [1.0], True), ([-0.0, 2.0], [1.0], False), ([0.0, 2.0], [math.nextafter(1.0, 2.0)], False)],
)
def test_a_comparison_is_identical_only_if_nothing_differs(
    theirs: list[float], their_losses: list[float], identical: bool
) -> None:
    comparison = _compared([0.0, 2.0], theirs, [1.0], their_losses)
    assert comparison.identical is identical
    assert comparison.verdict().startswith("identical" if identical else "DIFFERENT")
    assert comparison.numel == 5
    assert (comparison.different_numel, comparison.first_different) == (
        (1, "w") if theirs[0].hex()[0] == "-" else (0, None)
    )


def test_equality_of_runs_that_blew_up_is_called_worthless() -> None:
    comparison = _compared([math.nan], [math.nan], [1.0, math.nan], [1.0, math.nan])
    assert comparison.identical
    assert not comparison.finite
    assert "not finite" in comparison.verdict()


def test_runs_of_other_lengths_differ() -> None:
    assert not _compared([1.0], [1.0], [1.0], [1.0, 1.0]).losses_identical


def test_json_has_no_numbers_that_parsers_refuse() -> None:
    assert json.loads(to_json({"a": [math.nan, math.inf, (1.5, -math.inf)]})) == {"a": [None, None, [1.5, None]]}


def _interval(began_s: float, ended_s: float, nbytes: int = 0, lane: str = "cpu") -> Interval:
    return Interval(lane, "tile", began_s, ended_s, nbytes)


def test_busy_time_counts_overlaps_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    intervals = [_interval(0, 2, 2**20), _interval(1, 3, 2**20), _interval(5, 10, 2**20)]
    from matplotlib.axes import Axes

    drawn: list[str] = []
    plain = Axes.text
    monkeypatch.setattr(Axes, "text", lambda self, x, y, s, **how: (drawn.append(s), plain(self, x, y, s, **how))[1])
    draw.draw_lanes(tmp_path / "lanes.png", intervals, [], step=1)
    assert "3.0 MiB at 384.0 KiB/s\nbusy 80%" in drawn


def test_lanes_are_drawn_in_the_order_of_the_data_and_by_number() -> None:
    lanes = ["write:0", "read:10", "other", "read:2", "cpu"]
    assert sorted(lanes, key=lane_order) == ["cpu", "read:2", "read:10", "write:0", "other"]


@pytest.mark.parametrize(
    "timeline",
    [[], [_interval(5, 5)], [_interval(0, 1), _interval(0.5, 2, 99, "read:0"), _interval(1, 3, 0, "new:lane")]],
    ids=["empty", "instant", "overlapping"],
)
def test_pictures_are_drawn_of_anything(tmp_path: Path, timeline: list[Interval]) -> None:
    draw.draw_lanes(tmp_path / "lanes.png", timeline, ["/a", "/b" * 200], step=1)
    draw.draw_losses(tmp_path / "loss.png", [3.0, math.nan, 2.0], 3.2, 20)
    assert (tmp_path / "lanes.png").read_bytes().startswith(PNG)
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert in_columns([("a", "1", "x"), ("bcd", "23", "")], right=[1]) == "a     1  x\nbcd  23"
    assert in_columns([]) == ""


# Traces

TIMELINE = [
    ("cpu", "subgroup 0", 10.0, 11.0, 100),
    ("read:0", "subgroup 1 tensor 0 tile 0", 10.0, 10.5, 40),
    ("read:0", "subgroup 1 tensor 0 tile 1", 10.25, 10.75, 40),
    ("read:0", "subgroup 1 tensor 1 tile 0", 10.5, 11.5, 40),
]


def test_overlapping_operations_are_on_threads_of_their_own() -> None:
    events = trace(TIMELINE, ["/disk"], step=7)["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(threads.values()) == ["cpu", "read:0 (/disk)", "read:0 (/disk)"]
    work = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"], e["args"]["bytes"]) for e in work[:2]] == [
        ("subgroup 0", 0.0, 1e6, 100),
        ("subgroup 1 tensor 0 tile 0", 0.0, 0.5e6, 40),
    ]
    for one in work:
        for other in work:
            if one is not other and one["tid"] == other["tid"]:
                assert one["ts"] + one["dur"] <= other["ts"] or other["ts"] + other["dur"] <= one["ts"]


def test_a_run_is_turned_into_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "timeline.json").write_text(json.dumps({"step": 3, "paths": ["/disk"], "operations": TIMELINE}))
    assert cli.main(["trace", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["operations"] == 4
    assert len(json.loads(Path(said["trace"]).read_text())["traceEvents"]) == 1 + 3 + 4
    assert Path(said["picture"]).read_bytes().startswith(b"\x89PNG")


def test_the_picture_does_not_take_the_place_of_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "timeline.json").write_text(json.dumps({"step": 3, "paths": ["/disk"], "operations": TIMELINE}))
    assert cli.main(["trace", str(tmp_path), "--out", str(tmp_path / "x.png")]) == 2
    assert "trace.json" in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("content", "words"), [(None, "offload train"), ("{", "not JSON"), ('{"step": 1, "paths": []}', "operations")]
)
def test_what_is_no_run(tmp_path: Path, content: str | None, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "timeline.json").write_text(content)
    assert cli.main(["trace", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
