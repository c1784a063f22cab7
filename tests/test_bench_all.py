"""`make bench-all` skips what has a report of this state, keeps what ends well, and goes on after a failure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import _all
import pytest
from _common import Kept

GOOD = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--json")
parser.add_argument("--runs")
parser.add_argument("--picture", help="drawn there")
given = parser.parse_args()
pathlib.Path(given.picture).write_text("picture")
pathlib.Path(given.runs).write_text("part")
pathlib.Path(given.json).write_text(json.dumps({"environment": {"commit": COMMIT}}))
"""
BAD = "import sys; sys.exit('it does not work' if '--json' in sys.argv else 0)"


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *who, *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path, file: str, text: str) -> str:
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-m", file)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a benchmark that works and one that does not."""
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init", "-q")
    (root / ".gitignore").write_text("build\n")
    made = commit(root, "offload/a.py", "1")
    (root / "bench").mkdir()
    (root / "bench" / "bad.py").write_text(BAD)
    commit(root, "bench/good.py", GOOD.replace("COMMIT", repr(made)))
    table = [
        ("`python bench/bad.py`", "", "1 min", ("bad",)),
        ("`make it` (`bench/good.py`)", "", "1 min", ("good",)),
        ("`python bench/silent.py`", "", "1 min", ()),
    ]
    monkeypatch.setattr(_all.figures, "BENCHMARKS", table)
    monkeypatch.setattr(_all, "ROOT", root)
    monkeypatch.setattr(_all.git, "__kwdefaults__", {"root": root})
    monkeypatch.setattr(_all.figures, "REPORTS", root / "reports")
    monkeypatch.setattr(_all.state, "__defaults__", ("HEAD", root))
    monkeypatch.setattr(_all.is_of, "__defaults__", (root,))
    return root


def test_a_failure_is_named_and_the_others_run(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _all.main([]) == 1
    said = capsys.readouterr().out
    assert "[1/2] bad: FAILED" in said
    assert "it does not work" in said
    assert "[2/2] good: done" in said
    assert "failed: bad: exit status 1" in said
    names = sorted(file.name[11:] for file in (checkout / "reports").iterdir())
    assert names == ["good.json", "good.png"]
    kept = list((checkout / "build" / "bench-all").rglob("good.runs"))
    assert len(kept) == 1


def test_what_has_a_report_of_this_state_is_skipped(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _all.main(["good"]) == 0
    capsys.readouterr()
    git(checkout, "add", "-A")
    commit(checkout, "docs/page.md", "a page is not the product's code")
    assert _all.main(["good"]) == 0
    assert "is of this state, skipped" in capsys.readouterr().out
    commit(checkout, "csrc/a.cpp", "1")
    assert _all.main(["good"]) == 0
    assert "good: done" in capsys.readouterr().out


def test_changes_that_are_not_committed_are_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "offload" / "a.py").write_text("2")
    assert _all.main([]) == 1
    assert "not committed" in capsys.readouterr().out
    assert not (checkout / "reports").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "'nothing' is no report; there are bad, good"),
        (["--path", "/no/such/place"], "'/no/such/place' is no directory"),
    ],
)
def test_bad_arguments_are_refused(
    checkout: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        _all.main(arguments)
    assert said in capsys.readouterr().err
    assert not (checkout / "reports").exists()


@pytest.mark.parametrize("wrong", [{"smoke": True}, {"environment": {}}, {"environment": {"commit": "0" * 40}}])
def test_other_reports_do_not_count(checkout: Path, tmp_path: Path, wrong: dict[str, Any]) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    file = tmp_path / "report.json"
    right = {"environment": {"commit": head}}
    file.write_text(json.dumps(right))
    assert _all.is_of(file, _all.state())
    file.write_text(json.dumps(right | wrong))
    assert not _all.is_of(file, _all.state())
    file.write_text("{")
    assert not _all.is_of(file, _all.state())


def test_parts_of_the_same_run_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "runs"
    made = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"pair": (1, 2)}

    assert Kept(file, "commit", 5).find("a", make) == {"pair": [1, 2]}
    assert Kept(file, "commit", 5).find("a", make) == {"pair": [1, 2]}
    assert len(made) == 1
    Kept(file, "other", 5).find("a", make)
    Kept(file, "commit", 5).find("b", make)
    Kept(None, "commit", 5).find("a", make)
    assert len(made) == 4


def test_every_row_of_the_table_names_a_script_that_is_there() -> None:
    found = _all.benchmarks()
    assert [each for each in found if not (_all.ROOT / each.script).exists()] == []
    assert len({each.name for each in found}) == len(found)
    assert {"ablation", "others", "gradients", "torture-ranks"} <= {each.name for each in found}
