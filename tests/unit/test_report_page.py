"""`offload report`, `optimizer.report`: the page of what a run did, and that what stands in it is text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages import Reader

import offload
from offload import cli

EVIL = '<script>document.title = "run"</script><img src=x onerror="document.title = 1">"&$x$'
TIMELINE = {
    "step": 3,
    "paths": [f"/{EVIL}"],
    "operations": [["cpu", EVIL, 10.0, 11.0, 100], ["read:0", "tile", 10.0, 10.5, 40]],
}
REPORT = {
    "title": EVIL,
    "plan": EVIL,
    "tiers": [{"name": EVIL, "parts": {EVIL: 3 << 20, "state": 5 << 20}, "nbytes": 16 << 20}],
    "steps": [{"number": n, "measured_s": 0.2, "predicted_s": 0.1 if n else None} for n in range(3)],
    "lanes": [{"name": EVIL, "predicted_s": None, "measured_s": 0.5, "nbytes": 40}],
    "planned_bytes": 1 << 20,
    "peak_bytes": 2 << 20,
    "checkpoints": [EVIL],
    "advice": [[EVIL, 0.25]],
    "notes": [EVIL],
}
HEADINGS = ("The plan", "Lanes during step 3", "The last steps and their predictions", "Memory", "Checkpoints")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    (tmp_path / "timeline.json").write_text(json.dumps(TIMELINE))
    return tmp_path


def test_a_run_has_a_page_in_which_all_is_text_and_nothing_is_loaded_from_elsewhere(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(folder), "--json"]) == 0
    page = Path(json.loads(capsys.readouterr().out)["page"])
    assert page == folder / "report.html"
    reader = Reader(content := page.read_text())
    assert not reader.open
    assert not {"script", "img", "iframe", "object", "a"} & set(reader.tags)
    assert reader.tags.count("svg") == 3
    said = " ".join(reader.said)
    assert all(heading in said for heading in (*HEADINGS, "What would help"))
    assert said.count(EVIL) >= 7  # pictures have the ends of long names
    assert "2 times as long" in said
    assert "-250 ms" in said
    assert "default-src 'none'" in content
    sources = [part.partition('"')[0] for part in content.split('href="')[1:] + content.split('src="')[1:]]
    assert all(source.startswith(("#", "data:image/png;base64,")) for source in sources)


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no headless browser is installed (apt install chromium)")
def test_a_browser_shows_the_page_and_runs_nothing_of_it(folder: Path) -> None:
    assert cli.main(["report", str(folder), "--quiet"]) == 0
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}"]
    picture = folder / "page.png"
    page = (folder / "report.html").as_uri()
    shown = subprocess.run(
        [str(chromium()), *flags, "--dump-dom", page], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    reader = Reader(shown)
    assert not reader.open
    assert "script" not in reader.tags
    assert shown.count("<title>run</title>") == 0  # its own title, that no script has changed
    said = " ".join(reader.said)
    assert all(heading in said for heading in HEADINGS)
    assert reader.tags.count("svg") == 3
    subprocess.run(
        [str(chromium()), *flags, "--window-size=1000,2000", f"--screenshot={picture}", page],
        capture_output=True,
        timeout=120,
        check=True,
    )
    from matplotlib.image import imread

    pixels = imread(picture)
    assert pixels.shape[:2] == (2000, 1000)
    assert len({tuple(pixel) for pixel in pixels[::10, ::10, :3].reshape(-1, 3)}) > 10  # bars of several colours


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "offload train"),
        ("{", "not JSON"),
        ({"steps": 1}, "damaged"),
        ({"steps": [{"number": -1, "measured_s": 1.0, "predicted_s": None}]}, "damaged"),
        ({"tiers": [{"name": "x", "parts": {"state": -5}, "nbytes": None}]}, "damaged"),
        ({"advice": [["x", 1e300]]}, "damaged"),
        ({"plan": None}, "damaged"),
    ],
)
def test_what_is_no_run(folder: Path, change: object, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "report.json"
    if change is None:
        file.unlink()
    else:
        file.write_text(change if isinstance(change, str) else json.dumps({**REPORT, **change}))  # type: ignore[dict-item]
    assert cli.main(["report", str(folder)]) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_a_page_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder), "--out", "/nowhere/page.html"]) == 2
    assert "--out" in capsys.readouterr().err


def stepped(tmp_path: Path, steps: int) -> offload.AdamW:
    weights = [torch.nn.Parameter(torch.randn(100, 1000).bfloat16())]
    (tmp_path / "state").mkdir()
    config = offload.OffloadConfig(host_memory="512KiB", paths=[tmp_path / "state"], subgroup_numel=8192)
    optimizer = offload.AdamW(weights, offload=config)
    for _ in range(steps):
        weights[0].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("steps", [0, 2])
def test_an_optimizer_reports_itself(tmp_path: Path, steps: int) -> None:
    with stepped(tmp_path, steps) as optimizer:
        if steps:
            optimizer.save_checkpoint(tmp_path / "checkpoint")
            optimizer.wait_checkpoint()
        optimizer.report(tmp_path / "page.html")
        said = " ".join(Reader((tmp_path / "page.html").read_text()).said)
        assert str(optimizer.plan).splitlines()[0] in said
    assert f"Lanes during step {steps}" in said
    assert "host_memory +" in said
    assert ("checkpoint" in said.partition("kept on the paths")[2]) == bool(steps)


def test_a_run_of_ones_own_is_a_folder_for_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last hundred steps of the session; `offload report` writes the same page again."""
    run = tmp_path / "runs" / "mine"
    with stepped(tmp_path, 103) as optimizer:
        optimizer.report(run)
        last_s = optimizer.metrics()["step_s"]
    steps = json.loads((run / "report.json").read_text())["steps"]
    assert [step["number"] for step in steps] == [*range(3, 104)]  # a hundred, and the last
    assert all(step["measured_s"] > 0 for step in steps)
    assert steps[-1]["measured_s"] == pytest.approx(last_s)
    assert [step["predicted_s"] is None for step in steps] == [True] * 100 + [False]
    page = (run / "report.html").read_text()
    (run / "report.html").unlink()
    assert cli.main(["report", str(run)]) == cli.main(["trace", str(run)]) == 0
    assert Reader((run / "report.html").read_text()).said == Reader(page).said
    assert json.loads((run / "trace.json").read_text())
    assert "operations of step 103" in capsys.readouterr().out


def test_a_session_that_has_loaded_reports_its_own_steps(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with stepped(tmp_path / "first", 2) as first, stepped(tmp_path / "second", 0) as second:
        first.save_checkpoint(tmp_path / "checkpoint")
        first.wait_checkpoint()
        second.load_checkpoint(tmp_path / "checkpoint")
        for numbers in ([], [3], [3, 4]):
            second.report(tmp_path / "run")
            steps = json.loads((tmp_path / "run" / "report.json").read_text())["steps"]
            assert [step["number"] for step in steps] == numbers
            assert all(step["measured_s"] > 0 for step in steps)
            (weight,) = second.param_groups[0]["params"]
            weight.square().sum().backward()
            second.step()


def test_without_matplotlib_there_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stepped(tmp_path, 1) as optimizer:
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        optimizer.report(os.fspath(tmp_path / "page.html"))
    reader = Reader((tmp_path / "page.html").read_text())
    assert "svg" not in reader.tags
    assert "need matplotlib" in " ".join(reader.said)
    assert reader.tags.count("table") >= 4
