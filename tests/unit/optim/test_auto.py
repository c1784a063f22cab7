"""`overlap="auto"`, given the seconds of iterations: what it tries, what it keeps, and when it looks again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import pytest
import torch

from offload.optim.hiding import DRIFT, LEAST_GAIN, MODES, MOST_TRIAL, TRIAL, TRIAL_S, AutoOverlap

SECONDS = {"off": 10.0, "forward": 9.0, "backward": 7.0, "both": 6.0}


class Steps:
    """A chooser, and what it has switched on."""

    def __init__(self, forward: bool = True, backward: bool = True) -> None:
        self.auto = AutoOverlap()
        self.speculates = False
        self._can = {"forward": forward, "backward": backward}

    def speculate(self, on: bool) -> None:
        self.speculates = on

    @property
    def mode(self) -> str:
        hides = self.auto.goes_on and self._can["forward"], self.speculates
        return next(name for name, each in MODES.items() if each == hides)

    def take(self, count: int, seconds: Mapping[str, float]) -> list[str]:
        """Take so many steps; return the mode of each."""
        found = []
        for _ in range(count):
            found.append(self.mode)
            self.auto.pace.iteration_s = seconds[self.mode]
            engine: Any = self
            self.auto.after_step(engine, [], torch.device("cpu"), **self._can)
        return found


def slower(mode: str, by: float) -> dict[str, float]:
    return {**SECONDS, mode: SECONDS[mode] * by}


def tried(modes: Iterable[str]) -> list[str]:
    """Return the modes of the first steps: the first of them twice as long as the others."""
    first, *others = modes
    return [first] * (2 * TRIAL) + [mode for mode in others for _ in range(TRIAL)]


@pytest.mark.parametrize("best", MODES)
def test_every_mode_is_tried_for_some_steps_and_the_fastest_is_kept(best: str) -> None:
    steps = Steps()
    assert steps.take(20, slower(best, 0.2)) == tried(MODES)
    assert steps.take(100, slower(best, 0.2)) == [best] * 100


def test_short_iterations_are_tried_for_more_steps_as_one_tells_less_of_them() -> None:
    steps, most = Steps(), MOST_TRIAL
    seconds = {mode: took_s / 100 for mode, took_s in SECONDS.items()}
    assert steps.take(most, seconds) == ["forward"] * most
    rest = [mode for mode in MODES if mode != "forward"]
    assert steps.take(3 * most, seconds) == [mode for mode in rest for _ in range(most)]
    assert steps.take(20, seconds) == ["both"] * 20


@pytest.mark.parametrize("count", range(1, MOST_TRIAL - 2 * TRIAL + 2))
def test_a_mode_that_needs_a_few_steps_more_goes_on_where_another_was_chosen(count: int) -> None:
    """Nothing is hidden at first, as forward is not possible: what is in effect is not what was chosen last."""
    steps = Steps(forward=False)
    iteration_s = TRIAL_S / (2 * TRIAL - 1 + count)  # after the first choice's iterations, so many are missing
    seconds = {"off": iteration_s, "backward": iteration_s / 2}
    auto = steps.auto
    auto.pace.iteration_s = math.nan  # of the first step, as nothing came before it
    auto.after_step(cast(Any, steps), [], torch.device("cpu"), forward=False, backward=True)
    modes = steps.take(2 * TRIAL - 2 + count, seconds)
    assert set(modes) == {"off"}
    assert steps.take(4 * MOST_TRIAL, seconds)[-1] == "backward"


@pytest.mark.parametrize(
    ("forward", "backward", "modes"),
    [
        (True, False, ["forward", "off"]),
        (False, True, ["off", "backward"]),
        (False, False, ["off"]),
    ],
)
def test_what_is_not_possible_is_not_tried(forward: bool, backward: bool, modes: list[str]) -> None:
    steps = Steps(forward, backward)
    assert steps.take(len(tried(modes)), SECONDS) == tried(modes)
    assert set(steps.take(60, SECONDS)) == {min(modes, key=SECONDS.__getitem__)}


def test_of_modes_that_take_as_long_the_one_that_does_least_is_kept() -> None:
    for gain, kept in ((LEAST_GAIN / 2, "off"), (LEAST_GAIN * 2, "both")):
        steps = Steps()
        seconds = {**dict.fromkeys(MODES, 10.0), "both": 10.0 * (1 - gain)}
        steps.take(20, seconds)
        assert steps.mode == kept


def test_iterations_into_which_the_mode_before_reaches_and_one_that_was_held_up_do_not_count() -> None:
    steps = Steps()
    steps.take(TRIAL, slower("forward", 10.0))
    for mode in MODES:
        for factor in (10.0, 1.0, 10.0, 1.0):
            assert steps.take(1, slower(mode, factor if mode != "forward" else 1.0)) == [mode]
    assert steps.mode == "both"


def test_all_are_tried_again_where_the_one_in_use_takes_another_time_by_then() -> None:
    steps = Steps()
    steps.take(20, SECONDS)
    little, much = {**slower("both", 1 + DRIFT / 2), "backward": 1.0}, slower("both", 1.6)
    assert set(steps.take(20, little)) == {"both"}
    assert set(steps.take(40, much)) == {"both"}  # it is looked at after 40 and 80
    rest = [mode for mode in MODES if mode != "both"]
    assert steps.take(3 * TRIAL, much) == [mode for mode in rest for _ in range(TRIAL)]
    assert set(steps.take(92, {**much, "backward": 20.0})) == {"backward"}
    assert steps.mode == "forward"


def test_a_way_that_opens_later_is_tried_and_one_that_has_closed_is_left() -> None:
    steps = Steps(forward=False)
    steps.take(12, SECONDS)
    steps._can["forward"] = True
    assert {*steps.take(24, SECONDS)} == {"backward", "forward", "both"}
    assert steps.mode == "both"
    steps._can["forward"] = False
    assert {*steps.take(80, SECONDS)} == {"backward"}


def test_iterations_before_a_model_was_given_say_nothing_of_forward() -> None:
    steps = Steps(forward=False, backward=False)
    steps.take(80, SECONDS)
    steps._can["forward"] = True
    assert set(steps.take(TRIAL + 1, SECONDS)) == {"forward"}
    assert set(steps.take(TRIAL, SECONDS)) == {"off"}
    assert steps.mode == "forward"
