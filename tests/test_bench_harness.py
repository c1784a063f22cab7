"""Options, rounds and ends of benchmarks: what the harness does around their sections."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _harness import Option, Run, digest, in_process, main, medians, ratio, turns

from offload.cli.values import parse_count

OPTIONS = (
    Option("numel", "3M", "2k", "parameters", read=parse_count),
    Option("tokens", [128, 1024], [16]),
    Option("turn_mib", 64),
)
CHILD = """
import sys
from _harness import main
def child(request):
    print("what others print")
    return {"twice": 2 * request["number"]}
main(__doc__, lambda run: None, child=child)
"""


def ran(monkeypatch: pytest.MonkeyPatch, measure: Any, *given: str, **more: Any) -> Run:
    """Run a benchmark of these options; return its run."""
    found: list[Run] = []

    def keep(run: Run) -> Any:
        found.append(run)
        return measure(run)

    monkeypatch.setattr(sys, "argv", ["bench", *given])
    if "sections" in more:
        more["sections"] = dict.fromkeys(more["sections"], keep)
        main("why", options=OPTIONS, **more)
    else:
        main("why", keep, options=OPTIONS, **more)
    return found[-1]


def test_a_tiny_run_has_tiny_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "report.json"

    def measure(run: Run) -> None:
        run.results["found"] = run.options["numel"]
        run.at_most("seconds", 2.0, 1.0)
        run.checksums += ["a", "b"]

    run = ran(monkeypatch, measure, "--smoke", "--numel", "5M", "--json", str(file))
    assert (run.args.numel, run.args.tokens, run.args.turn_mib) == (2000, [16], 64)
    report = json.loads(file.read_text())
    assert report["results"] == {"found": 2000}
    assert report["checksum"] == "a-b"
    assert [target["met"] for target in report["targets"]] == [False]
    run = ran(monkeypatch, measure, "--tokens", "7", "8", "--turn-mib", "2")
    assert (run.args.numel, run.args.tokens, run.args.turn_mib) == (3_000_000, [7, 8], 2)
    assert run.results["found"] == 3_000_000


def test_sections_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = []

    def section(run: Run) -> str:
        folders.append(run.place("named"))
        return "done"

    given = ("--sections", "one,two", "--path", str(tmp_path))
    run = ran(monkeypatch, section, *given, sections=("one", "two", "three"), path=True)
    assert run.results == {"one": "done", "two": "done"}
    assert len({folder.parent for folder in folders}) == 2
    assert list(tmp_path.iterdir()) == []


def test_bad_values_and_failures_end_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ran(monkeypatch, lambda run: None, "--numel", "many")
    assert "--numel" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="failed: one, other"):
        ran(monkeypatch, lambda run: run.failed.extend(["one", "other"]))
    with pytest.raises(SystemExit, match="the weights differ"):
        ran(monkeypatch, lambda run: run.same("the weights differ", ["a", "b"]))
    assert "checksum" in capsys.readouterr().out


def test_another_one_is_first_in_each_round() -> None:
    assert list(turns("ab", 2, settling=1)) == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]


def test_figures_of_rounds() -> None:
    assert medians([{"s": 1.0}, {"s": 5.0}, {"s": 2.0}]) == {"s": 2.0}
    assert ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0]) == 3.0
    some = torch.arange(6.0).bfloat16()
    assert digest([some.view(2, 3)]) == digest([some]) != digest([some.roll(1)])


def test_a_process_answers_in_its_last_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    bench = Path(__file__).resolve().parents[1] / "bench"
    script.write_text(f"import sys; sys.path.append({str(bench)!r})\n{CHILD}")
    assert in_process(str(script), {"number": 4}) == {"twice": 8}
    with pytest.raises(SystemExit, match="KeyError"):
        in_process(str(script), {})
