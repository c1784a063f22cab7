"""What the README and the pages in docs/ show runs as it stands."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import prepared
import pytest

from offload import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PLANNING = (ROOT / "docs" / "planning.md").read_text()
DEEPSPEED = (ROOT / "docs" / "deepspeed.md").read_text()
PAGES = README + "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))


BLOCKS = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: str, tmp_path: Path) -> None:
    python = sys.executable if block == BLOCKS[0] else prepared.python()
    block = block.replace("/mnt/nvme", str(tmp_path))  # where a reader has a disk
    done = prepared.ran([python, "-c", block], cwd=tmp_path)
    if "state_for(" in block:
        assert "torch.Size([64, 64])" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("small_probe")
def test_the_probe_runs_as_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = re.findall(r"^\.venv/bin/offload (probe .*)$", PLANNING, re.MULTILINE)
    for number, path in enumerate(re.findall(r" (/\S+)", line)):
        (tmp_path / str(number)).mkdir()
        line = line.replace(path, str(tmp_path / str(number)))
    assert cli.main([*line.split(), "--seconds", "0.05"]) == 0
    (file,) = re.findall(r"^written to (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert Path(file).parent.name == "offload"
    Path(file).unlink()


PLAN = r"^(?:\.venv/bin/)?offload ((?:plan|machine) .*)$"
PLANNED = PLANNING.partition("<!-- begin commands:")[2].partition("<!-- end commands -->")[0]
"""Commands that `docs/generate.py` has made as it wrote them, which `test_docs.py` does again."""
PLANS = sorted(set(re.findall(PLAN, PAGES.replace(PLANNED, ""), re.MULTILINE)))
SHOWN, *_ = re.findall(r"^offload (plan --model llama-8b .*)$", PLANNING, re.MULTILINE)
"""What it prints is spoken of."""
SEARCHES = [line for line in PLANS if line.endswith(" --advise") and line != SHOWN]
"""Which take seconds; with a target that all settings meet, a search ends at the first."""
QUICK = [line.replace(" --advise", " --target 1000s") if line in SEARCHES else line for line in PLANS]


@pytest.mark.slow
@pytest.mark.parametrize("line", [*QUICK, *(pytest.param(line, marks=pytest.mark.full) for line in SEARCHES)])
def test_plans_are_made_as_they_are_shown(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == 0
    printed = capsys.readouterr().out
    assert printed
    if line == SHOWN:
        (said,) = re.findall(r'\("(a second path[^"]*)"\)', PLANNING)
        assert said in printed


def test_plans_that_are_left_to_the_docs_are_found() -> None:
    planned = re.findall(PLAN, PLANNED, re.MULTILINE)
    assert len(planned) > 5
    assert SHOWN in PLANS


def test_the_readme_shows_the_command_of_a_row_of_its_table() -> None:
    (shown,) = re.findall(r"^offload (plan .* --advise)$", README, re.MULTILINE)
    assert shown in re.findall(PLAN, PLANNED, re.MULTILINE)


def test_scripts_and_files_that_it_names_are_there() -> None:
    named = re.findall(r"`(?:python )?((?:bench|docs|offload|tests)/[\w/]+\.(?:py|md))`", PAGES)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_deepspeed_config_is_one_that_works() -> None:
    import json

    from offload.integrations.deepspeed import settings

    block, *_ = re.findall(r"```json\n(.*?)```", DEEPSPEED, re.DOTALL)
    config = json.loads(block)
    assert settings.read(config).paths
    assert settings.adam_from_config(config["optimizer"]["type"], config["optimizer"]["params"])[0]
