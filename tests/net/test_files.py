"""What every version has written is read as ever, and what is written today is what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from net import files
from net.recordings import check, recorded

RECORDED = recorded(files.FILE)


@pytest.mark.parametrize("version", files.VERSIONS)
def test_checkpoints_of_a_version_are_read(version: str, tmp_path: Path) -> None:
    loaded = {f"{version} {kind}": files.load(kind, tmp_path / kind) for kind in files.unpack(version, tmp_path)}
    check("files", {name: RECORDED["loaded"].get(name) for name in loaded}, loaded)


def test_every_recorded_checkpoint_is_there(tmp_path: Path) -> None:
    there = {f"{version} {kind}" for version in files.VERSIONS for kind in files.unpack(version, tmp_path / version)}
    assert there == set(RECORDED["loaded"])


@pytest.mark.parametrize("kind", files.KINDS)
def test_a_checkpoint_says_what_was_recorded(kind: str, tmp_path: Path) -> None:
    check("files", RECORDED["written"][kind], files.write(kind, tmp_path))


@pytest.mark.parametrize("version", files.RATES)
def test_a_file_of_rates_is_read_and_written_again(version: str, tmp_path: Path) -> None:
    check("files", RECORDED["rates"][version], files.rates(version, tmp_path))


def test_rates_are_written_as_they_were(tmp_path: Path) -> None:
    written = tmp_path / "rates.json"
    files.old_files.write_rates(written)
    assert written.read_text() == (files.FILES / f"{files.RATES[-1]}-rates.json").read_text()


def test_a_file_of_rates_says_what_it_depends_on(tmp_path: Path) -> None:
    check("files", RECORDED["facts"], files.facts(tmp_path))
