"""The `offload` command as such."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offload import cli


def test_the_package_runs_as_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "offload.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert (done.returncode, done.stdout) == (0, capsys.readouterr().out)
