"""What a benchmark lacks is said before it starts, with the command that installs it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import prepared
import pytest
from _contenders import (
    EQUAL,
    FUSED,
    OURS_DISK,
    STOCK_CPU,
    STOCK_NVME,
    disk_group,
    memory_group,
    needs,
    standalone_group,
)
from _needs import DEEPSPEED, FIO, LIBAIO, NATIVE, Need, links_libaio, package, require

BENCH = Path(__file__).resolve().parents[1] / "bench"


def bench(script: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [prepared.python(), str(BENCH / script), *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def compiler_without_headers(folder: Path) -> str:
    """Make a compiler that finds no header of the system."""
    wrapper = folder / "c++"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("c++")} -nostdinc -nostdinc++ "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


@pytest.mark.slow
def test_paths_without_fio_do_not_start(tmp_path: Path) -> None:
    done = bench("paths.py", "--sections", "single,traffic", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "no: single\n    apt-get install fio\n" in done.stderr
    assert "--allow-missing" in done.stderr
    assert not done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", ["deepspeed.py", "iteration.py"])
def test_trainings_without_libaio_do_not_start(script: str, tmp_path: Path) -> None:
    done = bench(script, CXX=compiler_without_headers(tmp_path))
    assert done.returncode == 1
    assert f"no: {', '.join(EQUAL)}\n    apt-get install libaio-dev\n" in done.stderr
    assert "--allow-missing" in done.stderr


def test_libaio_is_found_as_the_compiler_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libaio.h").write_text('extern "C" int io_submit(void *, long, void *);\n')
    (tmp_path / "aio.c").write_text("int io_submit(void *context, long count, void *all) { return 0; }\n")
    library = ["c++", "-x", "c", "-shared", "-fPIC", str(tmp_path / "aio.c"), "-o", str(tmp_path / "libaio.so")]
    subprocess.run(library, check=True)
    monkeypatch.setenv("CXX", compiler_without_headers(tmp_path))
    assert not links_libaio()
    monkeypatch.setenv("CFLAGS", f"-I{tmp_path}")
    monkeypatch.setenv("LDFLAGS", f"-L{tmp_path}")
    assert links_libaio()
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert not links_libaio()


def test_a_package_is_not_a_benchmark_of_that_name() -> None:
    assert importlib.util.find_spec("paths") is not None
    assert not package("paths")
    assert package("torch")


def test_each_contender_needs_what_it_is_built_of() -> None:
    field = {c.name: c for c in [*memory_group(False), *disk_group(False, {}), *standalone_group(1000)]}
    assert needs(field[STOCK_NVME]) == (*NATIVE, LIBAIO)
    assert needs(field[STOCK_CPU]) == NATIVE
    assert needs(field[OURS_DISK]) == (DEEPSPEED,)
    assert needs(field[FUSED]) == ()


def test_what_is_missing_is_left_out_if_it_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    there, absent = Need("sand", "dig", lambda: True), Need("gold", "pan", lambda: False)
    wanted = {"a": [there], "b": [there, absent], "c": [absent], "d": []}
    args = argparse.Namespace(smoke=False, allow_missing=False, picture=None)
    with pytest.raises(SystemExit, match="nothing was run"):
        require(args, wanted)
    assert capsys.readouterr().err == "gold is missing, without which there is no: b, c\n    pan\n"
    args.allow_missing = True
    assert require(args, wanted) == dict.fromkeys("bc", "not run: missing gold")
    assert require(args, {"a": [there]}) == {}
    args.smoke = True
    assert require(args, {"c": [absent, FIO]}) == {}
