"""Each mistake that no training can show is found by the test that is named for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import prepared
import pytest

from accelerator import processes
from accelerator.cuda_mistakes import CUDA_MISTAKES

FAILED = 1
"""How pytest ends where a test has failed, and not itself."""


def ends(is_late: bool) -> dict[str, int]:
    """Plant the mistakes that are found on the test accelerator, or elsewhere; return how tests end, by name."""
    tests = Path(__file__).parents[1]
    names = [name for name, mistake in CUDA_MISTAKES.items() if mistake.is_late is is_late]
    program = [prepared.python(), "-m", "accelerator.cuda_mistakes", *names]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "LATE_"))}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tests), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = prepared.ran(program, env=variables)
    return dict(json.loads(line) for line in ended.stdout.splitlines())


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, int]:
    return ends(False)


@pytest.fixture(scope="module")
def on_the_accelerator() -> dict[str, int]:
    processes.needed()
    return ends(True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CUDA_MISTAKES)
def test_each_is_found(name: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue("on_the_accelerator" if CUDA_MISTAKES[name].is_late else "elsewhere")
    assert found[name] == FAILED
