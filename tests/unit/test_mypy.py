"""Types are checked against this tree alone, whatever is installed beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("installed", [False, True])
def test_an_installed_copy_of_the_integrations_is_not_looked_at(tmp_path: Path, installed: bool) -> None:
    """`make` may put the packages of another environment on the path, `offload` among them, and of another day.

    What is checked has to be the same as where there is none: the integrations lie in a folder of another name.
    """
    source, site = tmp_path / "source", tmp_path / "site"
    for folder in (source / "offload", site / "offload" / "integrations"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "py.typed").touch()
    (site / "offload" / "integrations" / "shared.py").write_text("KINDS: int = 3\n")
    program = "from offload.integrations.shared import KINDS\n\nreveal_type(KINDS)\nKINDS.torch_class\n"
    (source / "offload" / "program.py").write_text(program)
    settings = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={tmp_path}"]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, "offload"],
        cwd=source,
        env={**os.environ, "MYPYPATH": str(site) if installed else ""},
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line.partition(": ")[2] for line in found.stdout.splitlines()]
    assert said == ['note: Revealed type is "Any"', "no issues found in 2 source files"], found.stdout + found.stderr
