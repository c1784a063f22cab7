"""`offload probe` as people call it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import prepared
import pytest

from offload import cli
from offload.measure import RatesFile, default_rates_file, load_rates


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
@pytest.mark.usefixtures("small_probe")
def test_a_probe_writes_this_machine_s_file_and_prints_a_table(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert cli.main(["probe", "--seconds", "0.5", "--paths", *paths]) == 0
    printed = capsys.readouterr()
    found = load_rates(default_rates_file())
    assert default_rates_file().parent.parent == cache
    assert [facts["path"] for facts in found.paths] == paths
    assert f"written to {default_rates_file()}" in printed.out
    for name in found.measurements:
        assert name in printed.out
    assert "bytes of that from updates" in printed.out
    assert "probe: run" not in printed.err  # which is no terminal


@pytest.mark.slow
@pytest.mark.usefixtures("small_probe")
def test_json_is_what_is_in_the_file(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rates.json"
    assert cli.main(["probe", "--seconds", "0.1", "--quiet", "--json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(out.read_text())
    assert RatesFile.from_dict(json.loads(printed.out)).rates.paths == ()
    assert all("warning" in line for line in printed.err.splitlines())
    assert not cache.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "0"], "--seconds: '0' cannot be used"),
        (["--seconds", "-3"], "--seconds: '-3' cannot be used"),
        (["--seconds", "nan"], "--seconds: 'nan' cannot be used"),
        (["--seconds", "soon"], "--seconds: 'soon' cannot be used; give seconds, from 0.01 to 86400"),
        (["--paths"], "expected at least one argument"),
        (["--paths", "/nowhere/at/all"], "'/nowhere/at/all' cannot be used; the directory does not exist"),
        (["--paths", "/tmp", "/tmp"], "paths[1]: '/tmp' cannot be used; it is the same place"),
        (["--paths", "ftp://host/x"], "name a directory or s3://bucket/prefix"),
        (["--out", "missing/rates.json"], "name a file in a folder that is there"),
        (["--out", "/"], "--out: '/' cannot be used"),
        (["--out", "/dev/null/rates.json"], "--out: '/dev/null/rates.json' cannot be used"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], words: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["probe", "--quiet", *arguments])
    except SystemExit as ended:  # argparse's own
        status = int(ended.code or 0)
    assert status == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out
    assert not cache.exists()


def test_help_needs_neither_torch_nor_native_code() -> None:
    script = (
        "import sys; from offload import cli\n"
        "try: cli.main(['probe', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'offload._native' not in sys.modules"
    )
    done = prepared.ran([sys.executable, "-c", script])
    assert "rates file" in done.stdout
