"""Random programs on a disk that fills up; many more are run by hand or by `make test-full`."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import full_disk
import pytest


@cache
def expected() -> Any:
    return full_disk.undisturbed()


@pytest.fixture(params=full_disk.KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each kind of file system that can be mounted here."""
    try:
        with full_disk.mounted(request.param, tmp_path):
            return str(request.param)
    except OSError as cause:
        pytest.skip(str(cause))


def run(kind: str, seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        told = full_disk.run(seed, kind, folder, expected())
        assert told["open"], seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, 5))
def test_a_disk_that_fills_up_brings_promised_errors_only(kind: str, seed: int, tmp_path: Path) -> None:
    run(kind, range(seed, seed + 1), tmp_path)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_disks_that_fill_up(kind: str, tmp_path: Path) -> None:
    run(kind, range(5, 150), tmp_path)
