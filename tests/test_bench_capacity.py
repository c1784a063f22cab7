"""The search for the largest model, and what is compared, without a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _contest
import capacity
import pytest
from capacity import CONTENDERS, TOLERANCE, Trial, same_weights, search


def trained(layers: int, peak_bytes: int, digest: int = 0) -> Trial:
    mark = {"own_bytes": peak_bytes, "file_bytes": 0, "peak_bytes": peak_bytes}
    found: dict[str, Any] = {"marks": {"step": mark}, "iterations": [{"loss": 1.0}], "digest": digest}
    return Trial(layers, 100 * layers, fits=True, found=found)


@pytest.mark.parametrize("truth", [0, 1, 2, 7, 39, 40, 41, 300])
@pytest.mark.parametrize("predicted", [1, 10, 40, 200])
@pytest.mark.parametrize("believed", [0.5, 1.0, 1.3])
def test_the_most_layers_that_fit_are_found(truth: int, predicted: int, believed: float) -> None:
    """Whatever was predicted, and however far the small trials' peaks are from what the limit counts."""
    limit = 1000 + 400 * truth

    def attempt(layers: int) -> Trial:
        if layers <= truth:
            return trained(layers, int(believed * (1000 + 400 * layers)))
        return Trial(layers, 100 * layers, fits=False, why="too large")

    told: list[Trial] = []
    trials = search(attempt, predicted, limit, told.append)
    assert told == trials
    best = max((t.layers for t in trials if t.fits), default=0)
    least = min(t.layers for t in trials if not t.fits)
    assert best <= truth < least
    assert least - best <= max(1, TOLERANCE * best)
    if believed == 1.0 and truth in (39, 40, 41) and predicted == 40:
        assert len(trials) <= 5


def test_losses_and_weights_are_compared_at_sizes_that_both_trained() -> None:
    chosen = [contender for contender in CONTENDERS if contender.same == "exact"]
    assert len(chosen) == 4
    one, other, *_ = (contender.name for contender in chosen)
    assert same_weights({one: [trained(3, 1, digest=5)], other: [trained(4, 1, digest=5)]}, chosen) is None
    assert same_weights({one: [trained(3, 1, digest=5)], other: [trained(3, 1, digest=5)]}, chosen) == 1.0
    assert same_weights({one: [trained(3, 1, digest=5)], other: [trained(3, 1, digest=6)]}, chosen) == 0.0


def test_a_process_beyond_the_limit_is_a_no_and_any_other_failure_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program of a few lines in the trial's place."""
    (tmp_path / "bench").mkdir()
    monkeypatch.setattr(_contest, "ROOT", tmp_path)
    program = tmp_path / "bench" / "_worker.py"
    contender, shape = CONTENDERS[0], capacity.Shape(1, 64)
    with capacity.made_group() as group:
        program.write_text("raise ValueError('wrong')")
        with pytest.raises(capacity.TrialError, match="wrong"):
            capacity.run_trial(contender, shape, 64 << 20, 1 << 30, group, tmp_path)
        if group is None:
            pytest.skip("no control group can be made here")
        program.write_text("x = b'1' * (200 << 20)")
        trial = capacity.run_trial(contender, shape, 64 << 20, 1 << 30, group, tmp_path)
        assert not trial.fits
        assert "kernel" in trial.why
        folder = group.folder
    assert not folder.exists()
