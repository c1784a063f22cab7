"""What a wheel holds, without compiling; `make wheels` builds whole ones and uses them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import wheels

from offload.cli import bench
from offload.errors import OffloadError


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    code = f"import scikit_build_core.build as b; b.build_wheel({str(tmp_path)!r}, {{'wheel.cmake': 'false'}})"
    subprocess.run([sys.executable, "-c", code], cwd=wheels.ROOT, check=True, capture_output=True)
    (built,) = tmp_path.glob("*.whl")
    return built


def test_a_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheels.contents(wheel) == ["native modules: []"]


@pytest.mark.parametrize("name", ["offload/bench/iteration.py", "tests/wheels.py", "offload/kernels/notes.md"])
def test_what_does_not_belong_into_a_wheel_is_found(wheel: Path, name: str) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(name, "")
        archive.writestr("offload/_native.abi3.so", "")
    assert wheels.contents(wheel) == [f"has {name}"]


def test_benchmarks_without_a_checkout_say_where_they_are(tmp_path: Path) -> None:
    assert bench.script(wheels.ROOT / "offload") == wheels.ROOT / "bench" / "iteration.py"
    (tmp_path / "bench").mkdir()  # somebody else's package of that name
    (tmp_path / "bench" / "iteration.py").touch()
    with pytest.raises(OffloadError, match=r"source checkout.*offload-.*\.tar\.gz; then run `make bench`"):
        bench.script(tmp_path / "offload")


def test_interpreters_that_do_not_run_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python3.11"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert wheels.interpreters([]) == {}
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert wheels.interpreters([Path(sys.executable)]) == {this: Path(sys.executable)}
