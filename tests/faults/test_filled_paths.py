"""A tenth of the campaign of filled_paths.py; the rest is run by hand or by `make test-full`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import filled_paths
import pytest


def run(seeds: range, tmp_path: Path) -> Counter[str]:
    try:
        (probe := tmp_path / "probe").mkdir()
        with filled_paths.mounted(probe, 1, 1 << 20):
            pass
    except OSError as cause:
        pytest.skip(str(cause))
    found: Counter[str] = Counter()
    for seed in seeds:
        (folder := tmp_path / str(seed)).mkdir()
        found += filled_paths.run(seed, folder)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_paths_that_others_fill_cost_no_step(tmp_path: Path) -> None:
    found = run(range(20), tmp_path)
    assert min(found[overlap] for overlap in filled_paths.OVERLAPS) == 5
    assert found["steps with versions made ahead"] > 0
    assert found["filled"] > 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_paths_that_others_fill_cost_no_step(tmp_path: Path) -> None:
    run(range(20, 200), tmp_path)
