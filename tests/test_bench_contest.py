"""What becomes of a contender that crashes, hangs or strays, and how memory limits and figures follow from it."""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

import prepared
import pytest
from _contest import (
    BASELINE,
    Contender,
    ContenderError,
    Outcome,
    Schedule,
    Worker,
    check_losses,
    exposed,
    limit_memory,
    run_group,
    times_faster,
)

COMMON = {"shape": {"layers": 1, "hidden": 32}, "numel": 20_000, "seq": 8, "smoke": True}


@pytest.mark.slow
def test_a_contender_that_crashes_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", prepared.python())
    field = [
        Contender(BASELINE, "plain"),
        Contender("broken", "torch", {"no_such_setting": 1}),
        Contender("absent", "torch", left_out="not run: for a reason"),
        Contender("sound", "torch", {"fused": True}),
    ]
    said: list[str] = []
    schedule = Schedule(((8, 2),), 2, 2, 0.0, settling=2)
    outcomes, speeds = run_group(field, schedule, COMMON, tmp_path, said.append)
    assert outcomes["broken"].failed == "crashed: exit status 1"
    assert "no_such_setting" in outcomes["broken"].output
    assert any("broken" in line for line in said)
    assert outcomes["absent"].failed == "not run: for a reason"
    assert not outcomes["sound"].failed
    assert len(outcomes["sound"].iterations) == len(speeds) == 2
    assert outcomes["sound"].peak_bytes > outcomes["sound"].start_bytes / 2 > 0
    # Every round trains on, in each contender, those included that do not count.
    assert len(outcomes["sound"].losses) == 8


@pytest.mark.slow
def test_a_contender_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    worker = Worker(Contender("slow", "plain"), COMMON, tmp_path)
    worker.answer(120)
    os.kill(worker.process.pid, signal.SIGSTOP)
    with pytest.raises(ContenderError, match="hangs"):
        worker.ask({"run": [[8, 0, 1]]}, 0.1)
    worker.close(0.0)
    assert worker.process.returncode == -signal.SIGKILL


def outcome(name: str, losses: list[float], seconds: list[float] = [], **more: int) -> Outcome:  # noqa: B006
    rounds = [[{"tokens": 8, "iteration_s": each}] for each in seconds]
    return Outcome(name, {}, losses=losses, iterations=rounds, **more)  # type: ignore[arg-type]


def test_losses_that_stray_are_reported() -> None:
    outcomes = {
        "a": outcome("a", [2.0, 1.0]),
        "b": outcome("b", [2.0, 1.001]),
        "nan": outcome("nan", [2.0, math.nan]),
        "off": outcome("off", [2.0, 1.2]),
        "c": outcome("c", [2.0, 1.0]),
        "d": outcome("d", [2.0, 1.0]),
        BASELINE: outcome(BASELINE, [2.0, 2.0]),
    }
    check_losses(outcomes)
    assert {name for name, each in outcomes.items() if each.failed} == {"nan", "off"}
    assert "step 1" in outcomes["off"].failed


def test_the_exposed_step_is_what_a_free_optimizer_would_save() -> None:
    base, ours = outcome(BASELINE, [], [1.0, 1.2, 1.1]), outcome("ours", [], [1.3, 1.5, 1.4])
    theirs = outcome("theirs", [], [2.6, 3.0, 2.8])
    assert exposed(ours, base, 8) == pytest.approx([0.2, 0.4, 0.3])
    assert exposed(base, base, 8) == []
    assert times_faster(ours, theirs, 8) == pytest.approx(2.0)
    assert times_faster(ours, outcome("none", []), 8) is None


def test_as_much_state_is_resident_as_the_others_peak_leaves_room_for() -> None:
    bare = outcome("bare", [], peak_bytes=1 << 30)
    bare.settings = {"multi_tier_offload": {"host_memory": 0, "paths": ["/x"]}}
    theirs = outcome("theirs", [], peak_bytes=(1 << 30) + (100 << 20))
    ours = Contender("ours", "deepspeed", bare.settings, equal_to="theirs")
    outcomes = {"bare": bare, "theirs": theirs}
    limited = limit_memory(ours, outcomes, 10**9)
    assert limited is not None
    assert limited.settings["multi_tier_offload"]["host_memory"] == 84 << 20
    assert limit_memory(ours, outcomes, 10**6).settings["multi_tier_offload"]["host_memory"] < 13 * 10**6  # type: ignore[union-attr]
    theirs.failed = "crashed"
    assert limit_memory(ours, outcomes, 10**9) is None
