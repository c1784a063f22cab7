"""`offload trace`: a run's timeline for other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload import cli
from offload.cli.trace import trace

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
