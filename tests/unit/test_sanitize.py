"""The builds of `make sanitize`, configured; what they find is not looked for here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cmake
import nanobind
import pytest

ROOT = Path(__file__).parents[2]


def configure(build: Path, kind: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "OFFLOAD_SANITIZE": kind,
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "nanobind_DIR": nanobind.cmake_dir(),
        "Python_EXECUTABLE": sys.executable,
    }
    command = [f"{cmake.CMAKE_BIN_DIR}/cmake", "-S", ROOT, "-B", build, *(f"-D{k}={v}" for k, v in settings.items())]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "flags"), [("", ""), ("address", "address,undefined"), ("thread", "thread")])
def test_every_file_is_instrumented_or_none(tmp_path: Path, kind: str, flags: str) -> None:
    done = configure(tmp_path, kind)
    assert done.returncode == 0, done.stderr
    commands = [entry["command"] for entry in json.loads((tmp_path / "compile_commands.json").read_text())]
    assert len(commands) >= len(list((ROOT / "csrc").rglob("*.cpp")))  # nanobind's sources beside
    for command in commands:
        assert ("-fsanitize=" in command) == bool(kind)
        assert f"-fsanitize={flags}" in command or not kind


@pytest.mark.slow
def test_an_unknown_sanitizer_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path, "memory")
    assert done.returncode != 0
    assert "`address` or `thread`" in done.stderr
