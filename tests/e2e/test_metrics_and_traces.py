"""What a run shows of itself: metrics in other programs' logs, a trace, bytes written, steps that took too long."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.metrics import ALWAYS, TABLE, which
from offload.plan import Rates
from offload.predict import forecast


def make(path: Path, overlap: str = "off") -> tuple[torch.nn.Parameter, offload.AdamW]:
    parameter = torch.nn.Parameter(torch.randn(6000, generator=torch.Generator().manual_seed(0)).bfloat16())
    config = offload.OffloadConfig(
        host_memory=0, paths=[path], subgroup_numel=1024, staging_memory=40_000, threads=1, overlap=overlap
    )
    return parameter, offload.AdamW([parameter], offload=config)


def step(parameter: torch.nn.Parameter, optimizer: offload.AdamW) -> None:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


class Board:
    """As TensorBoard's `SummaryWriter`."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append((step, value))


class Run:
    """As a run of W&B."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.rows.append((step, values))


def test_metrics_go_to_loggers_after_every_step_or_less_often(tmp_path: Path) -> None:
    board, few, run, rows = Board(), Board(), Run(), []
    parameter, optimizer = make(tmp_path)
    with optimizer:
        optimizer.log_to(board, names="*")
        optimizer.log_to(few)
        optimizer.log_to(run, every=2, prefix="o/", names=["step_s", "path/*", "nothing"])
        optimizer.log_to(lambda values, step: rows.append((step, values)), names="*")
        for _ in range(4):
            step(parameter, optimizer)
        assert board.scalars["offload/step"] == [(n, n) for n in (1, 2, 3, 4)]
        assert board.scalars["offload/path/0/write_bytes"][-1][1] > 0
        assert [number for number, _ in run.rows] == [2, 4]
        assert run.rows[0][1]["o/step_s"] > 0
        parts = "read_bytes", "write_bytes", "live_bytes", "written_bytes"
        assert set(run.rows[0][1]) == {"o/step_s", *(f"o/path/0/{part}" for part in parts)}
        assert set(few.scalars) == {
            f"offload/{name}"
            for name in ("step_s", "predicted_step_s", "hidden_s", "resident_share", "gradient_norm")
        }
        names = {tag.removeprefix("offload/") for tag in board.scalars}
        of = {name: [each for each in TABLE if each == name or which(each, name) is not None] for name in names}
        assert all(len(declared) == 1 for declared in of.values()), of
        always = {name for name, metric in TABLE.items() if metric.since == ALWAYS}
        assert always == {declared for each in of.values() for declared in each}
        assert few.scalars["offload/step_s"] == board.scalars["offload/step_s"]
        assert few.scalars["offload/hidden_s"] == [(n, 0.0) for n in (1, 2, 3, 4)]
        assert rows[-1] == (
            4,
            {f"offload/{name}": pytest.approx(v, nan_ok=True) for name, v in optimizer.metrics().items()},
        )
        assert board.scalars["offload/step"][-1] == (optimizer.engine.step_number, 4)
        for writer, every in ((object(), 1), (board, 0), (board, math.nan), (board, 1.5), (board, True)):
            with pytest.raises(offload.ConfigError):
                optimizer.log_to(writer, every=every)
        for names in ((), 5, [1], None):
            with pytest.raises(offload.ConfigError, match="names"):
                optimizer.log_to(board, names=names)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", ["off", "forward"])
def test_what_is_read_between_steps_counts_for_none(tmp_path: Path, overlap: str) -> None:
    parameter, optimizer = make(tmp_path, overlap)
    model = torch.nn.Module()
    model.weight = parameter
    with optimizer:
        optimizer.overlap_forward(model)
        for _ in range(3):
            step(parameter, optimizer)
            optimizer.state_dict()
            figures, operations = optimizer.metrics(), len(optimizer.timeline())
            optimizer.state_for(parameter)
            after = optimizer.metrics()
            assert len(optimizer.timeline()) > operations
            assert after["lane/engine/busy_s"] == figures["lane/engine/busy_s"]
            assert after["path/0/read_bytes"] == figures["path/0/read_bytes"]
        assert max(after["path/0/read_bytes"], after["path/0/write_bytes"]) <= optimizer.engine.plan.state_bytes


def test_a_trace_is_written_from_any_session(tmp_path: Path) -> None:
    path, file = tmp_path / "path", tmp_path / "trace.json"
    path.mkdir()
    parameter, optimizer = make(path)
    with optimizer:
        step(parameter, optimizer)
        step(parameter, optimizer)
        optimizer.write_trace(file)
        events = json.loads(file.read_text())["traceEvents"]
        operations = [event for event in events if event["ph"] == "X"]
        assert {event["cat"] for event in operations} == {"cpu", "read:0", "write:0", "engine"}
        assert len(operations) == len(optimizer.timeline())
        assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in operations)
        names = [event["args"]["name"] for event in events if event["ph"] == "M"]
        assert names[0] == "offload, step 2"
        assert f"read:0 ({path})" in names
        begins, learns = sorted(
            (event for event in operations if event["cat"] == "engine"), key=lambda event: event["ts"]
        )[:2]
        assert learns["ts"] == pytest.approx(begins["ts"] + begins["dur"]), "two turns, with no wait between them"


def test_written_bytes_are_those_of_the_whole_session(tmp_path: Path) -> None:
    parameter, optimizer = make(tmp_path)
    with optimizer:
        total, seen = 0.0, []
        for _ in range(4):
            step(parameter, optimizer)
            optimizer.engine.checkpoints.wait()
            seen.append(optimizer.metrics()["path/0/written_bytes"])
        for _ in range(2):  # flushes of a step end in the next one at the latest
            step(parameter, optimizer)
        streamed = optimizer.engine.plan.state_bytes
        total = optimizer.metrics()["path/0/written_bytes"]
        assert seen == sorted(seen)
        assert 4 * streamed / 2 < total
        before = total
        optimizer.save_checkpoint(tmp_path / "checkpoint", copy=False)
        optimizer.wait_checkpoint()
        assert optimizer.metrics()["path/0/written_bytes"] >= before


def test_a_step_that_takes_far_longer_than_expected_is_told_ever_more_rarely(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Expected:
        step_s = 2.0

    monkeypatch.setattr(forecast, "estimate", lambda plan, rates: Expected)
    watched: Any = forecast.Forecast()
    nothing: tuple[Any, Rates] = (None, None)  # type: ignore[assignment]
    for step_s in (0.1, 6.9, 9.9):
        watched.watch(*nothing, step_s)
    assert not caplog.records
    for _ in range(9):
        watched.watch(*nothing, 10.1)
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 4  # the first, second, fourth and eighth
    assert "took 10.1 s, and 2.0 s were expected" in told[0].getMessage()
