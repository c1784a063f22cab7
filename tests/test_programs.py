"""Random training programs, beside a plain loop: see `programs`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import prepared
import programs
import pytest
import soak
from histories import can_mount

import offload

pytestmark = [
    pytest.mark.not_overlapped("steps go on where programs say so"),
    pytest.mark.not_ahead("updates are made in backward where programs say so"),
]


REACHED = {
    "confirmed",
    "revoked",
    "activations written",
    "park",
    "resume",
    "load",
    "dict",
    "add",
    "state",
    "reset",
    "lost",
}
"""What programs do, and what comes of it."""
WITH_MOUNTS = {"filled", "save refused", "save failed: CheckpointError"}
PLAIN_HERE, FULL_HERE = 40, 10
"""Programs of lower seeds run once, where it is counted what they do."""


@pytest.mark.slow
def test_programs_reach_what_they_are_for(tmp_path: Path) -> None:
    told, reached = Counter[str](), REACHED | (WITH_MOUNTS if can_mount() else set())
    for seed in range(100):
        for make in (programs.make_program, programs.make_full_program)[: 1 + (seed < FULL_HERE)]:
            told.update(programs.run(make(seed), tmp_path / f"{seed}-{make.__name__}"))
        if seed >= PLAIN_HERE - 1 and all(told[what] for what in reached):
            break
    assert {what for what in reached if told[what]} == reached


@pytest.mark.parametrize("seed", range(PLAIN_HERE, 230))
def test_programs(seed: int) -> None:
    programs.check(programs.make_program(seed))


@pytest.mark.parametrize("seed", range(FULL_HERE, 50))
def test_programs_on_a_disk_that_fills_up(seed: int) -> None:
    programs.check(programs.make_full_program(seed))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(50, 5350, 100))
def test_many_programs(first: int) -> None:
    for seed in range(first, first + 100):
        programs.check(programs.make_program(seed))
        programs.check(programs.make_full_program(seed))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in range(20, 500, 20))])
def test_programs_that_are_killed(first: int) -> None:
    """In a process of its own, which forks while it has one thread."""
    command = [prepared.python(), str(Path(programs.__file__)), "--kills", "--programs", "20", "--from", str(first)]
    prepared.ran(command)


TRAINS: list[tuple[str, Any]] = [("pass", (1, [0, 1], "", False)), ("step", (None, "ours"))]
CALM: list[tuple[str, Any]] = [("park", (False, True)), ("unpark", 0), ("check", "state_for"), ("read", 0)]


@pytest.mark.parametrize("planted", ["gives up masters", "forgets moments"])
def test_what_is_lost_is_found_and_the_program_is_made_smaller(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"overlap": "forward", "threads": 2, "told": True}
    program = programs.Program(0, settings, [*CALM, *TRAINS, *CALM, *TRAINS, *CALM])
    programs.check(program)
    step, reset = offload.AdamW.step, offload.AdamW.reset_state

    def gives_up(optimizer: Any, *arguments: Any) -> None:
        optimizer.refresh_masters()
        step(optimizer, *arguments)

    def forgets(optimizer: Any, *arguments: Any) -> None:
        reset(optimizer)
        step(optimizer, *arguments)

    monkeypatch.setattr(offload.AdamW, "step", gives_up if planted == "gives up masters" else forgets)
    with pytest.raises(AssertionError, match=r"def test_program_0\(tmp_path"):
        programs.check(program)
    small = programs.shrink(program)
    assert {name for name, value in small.settings.items() if value != programs.PLAIN[name]} <= {"kinds"}
    assert {what for what, _ in small.actions} == {"pass", "step"}
    assert len(small.actions) <= 4


def test_a_soak_goes_on_where_it_ended_and_leaves_as_many_files(tmp_path: Path) -> None:
    looks = [*soak.soak(tmp_path, 1, 0.0, every=20), *soak.soak(tmp_path, 1, 0.0, every=20)]
    assert {path.name for path in (tmp_path / "of").iterdir()} >= {"kept", "mirror"}
    assert looks[1]["files"] < 60
