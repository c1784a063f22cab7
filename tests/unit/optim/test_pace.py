"""How long forward, backward and waits take, by a clock that is told what time it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offload.optim import pace
from offload.optim.pace import HISTORY, LEAST_WAIT_S, Pace


class Caller:
    """What a caller does, at which second; waits are (begin, end, for all of the step)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.pace = Pace()
        monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def waits(self, begin_s: float, end_s: float, for_all: bool = False) -> None:
        self.now_s = begin_s
        with self.pace.timed_wait(for_all=for_all):
            self.now_s = end_s

    def at(self, now_s: float, event: str, *arguments: Any) -> Any:
        self.now_s = now_s
        return getattr(self.pace, event)(*arguments)


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> Caller:
    return Caller(monkeypatch)


@pytest.mark.parametrize(
    ("waits", "typical_s", "waited_s"),
    [
        ([], (3.0, 5.0), 1.0),
        ([(11.0, 12.0)], (2.0, 5.0), 2.0),  # in forward: less of it
        ([(15.0, 15.5)], (3.0, 5.0), 1.5),  # in backward, for a part of the step: backward goes on
        ([(16.0, 18.0, True)], (3.0, 3.0), 3.0),  # for all of it: backward has ended
        ([(16.0, 16.5, True), (17.0, 17.5, True)], (3.0, 3.0), 2.0),  # with the first
        ([(11.0, 12.0, True)], (2.0, 5.0), 2.0),  # for all of it, in forward
        ([(10.0, 12.0), (11.0, 13.0)], (0.0, 5.0), 5.0),  # of two threads: never less than none
    ],
)
def test_an_iteration(caller: Caller, waits: list[Any], typical_s: tuple[float, float], waited_s: float) -> None:
    assert caller.pace.typical_s is None
    caller.at(10.0, "end_call", 9.0)
    for wait in (wait for wait in waits if wait[0] < 13.0):
        caller.waits(*wait)
    caller.at(13.0, "note_arrival")
    caller.at(14.0, "note_arrival")  # the second says nothing
    for wait in (wait for wait in waits if wait[0] > 13.0):
        caller.waits(*wait)
    assert caller.at(18.0, "begin_step") == 18.0
    assert caller.pace.typical_s == typical_s
    assert caller.pace.waited_s == waited_s


def test_intervals_are_forward_backward_and_waits_that_are_long_enough(caller: Caller) -> None:
    caller.at(10.0, "end_call", 9.0)
    assert caller.pace.intervals == []
    caller.waits(10.0, 10.0 + LEAST_WAIT_S / 2)
    caller.waits(11.0, 12.0)
    caller.at(13.0, "note_arrival")
    seen = [(each.label, each.started_s, each.finished_s) for each in caller.pace.intervals]
    assert seen == [("forward", 10.0, 13.0), ("waits for weights", 11.0, 12.0)]
    caller.at(18.0, "begin_step")
    seen = [(each.label, each.started_s, each.finished_s) for each in caller.pace.last_intervals]
    assert seen == [("forward", 10.0, 13.0), ("backward", 13.0, 18.0), ("waits for weights", 11.0, 12.0)]
    caller.at(20.0, "end_call", 18.0)
    assert caller.pace.intervals == []
    assert len(caller.pace.last_intervals) == 3


def test_what_is_typical_is_the_median_of_the_last_iterations(caller: Caller) -> None:
    for forward_s in (90.0, 1.0, 2.0, 3.0, 50.0, 60.0):
        caller.at(0.0, "end_call", 0.0)
        caller.at(forward_s, "note_arrival")
        caller.at(2 * forward_s, "begin_step")
    assert HISTORY == 5
    assert caller.pace.typical_s == (3.0, 3.0)


def test_a_step_that_none_went_before_says_nothing(caller: Caller) -> None:
    caller.at(1.0, "note_arrival")
    assert caller.at(2.0, "begin_step") == 2.0
    assert caller.pace.typical_s is None
    caller.at(3.0, "end_call", 2.0)
    caller.at(5.0, "begin_step")  # and no gradient has arrived
    assert caller.pace.typical_s is None
    assert caller.pace.waited_s == 1.0


def test_a_wait_that_raises_counts(caller: Caller) -> None:
    def fails() -> None:
        with caller.pace.timed_wait():
            caller.now_s = 2.0
            raise KeyboardInterrupt

    caller.at(0.0, "end_call", 0.0)
    with pytest.raises(KeyboardInterrupt):
        fails()
    caller.at(3.0, "note_arrival")
    caller.at(4.0, "begin_step")
    assert caller.pace.typical_s == (1.0, 1.0)
