"""Random programs that freeze, swap, restore, save and resume, beside a plain loop: see `state_programs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import state_programs

import offload


@pytest.mark.parametrize("seed", range(50))
def test_random_programs(seed: int, tmp_path: Path) -> None:
    state_programs.run(state_programs.make_program(seed), tmp_path / "of")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(50, 500, 50))
def test_many_random_programs(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 50):
        state_programs.run(state_programs.make_program(seed), tmp_path / str(seed))


def test_the_loop_finds_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that is given up, and an update that is not counted, show."""
    settings = {**state_programs.make_program(0).settings, "form": "exact", "mounted": False, "frozen": []}
    settings |= {"dtypes": [0] * 6, "scaled": False, "overlap": "off"}
    actions: list[tuple[str, Any]] = [("pass", (1, [0, 1, 2])), ("step", None), ("pass", (2, [0])), ("step", 0.5)]
    program = state_programs.Program(0, settings, 0, actions)
    state_programs.run(program, tmp_path / "right")
    step, reset = offload.AdamW.step, offload.AdamW.reset_state

    def gives_up(optimizer: Any, *arguments: Any) -> None:
        optimizer.refresh_masters()
        step(optimizer, *arguments)

    def forgets(optimizer: Any, *arguments: Any) -> None:
        reset(optimizer)
        step(optimizer, *arguments)

    for number, planted in enumerate((gives_up, forgets)):
        monkeypatch.setattr(offload.AdamW, "step", planted)
        with pytest.raises(AssertionError):
            state_programs.run(program, tmp_path / str(number))
