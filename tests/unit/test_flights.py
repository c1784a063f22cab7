"""Operations in flight: none is lost, whatever ends the run."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable

import pytest

from offload import waits
from offload._native import CompletionQueue
from offload.engine.flights import Flights
from offload.errors import TierError


class Lane:
    """Ends operations when it is told to, the last started first."""

    def __init__(self, stall_s: float | None = None, at_once: int = 3) -> None:
        self.queue = CompletionQueue()
        self.flights = Flights[str](self.queue, stall_s)
        self.left = ["d", "c", "b", "a"]
        self.started: list[tuple[int, str]] = []
        self.at_once = at_once

    def take(self) -> str | None:
        if len(self.flights.out) == self.at_once or not self.left:
            return None
        return self.left.pop()

    def start(self, op: int, item: str) -> None:
        assert self.flights.out[op] == item  # noted before it is started
        self.started.append((op, item))

    def end(self, *items: str) -> None:
        for op, item in self.started:
            if item in items:
                self.queue.post(op)

    def ends_at_once(self, op: int, item: str) -> None:
        self.start(op, item)
        self.queue.post(op)


def test_a_place_that_is_free_is_taken() -> None:
    lane = Lane()
    run = lane.flights.run(lane.take, lane.start)
    lane.queue.post(2)
    assert next(run)[1] == "b"
    assert sorted(lane.flights.out.values()) == ["a", "c"]
    lane.end("a", "c")
    assert [next(run)[1], next(run)[1]] == ["a", "c"]
    lane.queue.post(4)
    assert [item for _, item in run] == ["d"]
    assert not lane.flights.out


def test_all_that_is_in_flight_ends_before_a_run_that_is_given_up() -> None:
    lane = Lane()
    with contextlib.closing(lane.flights.run(lane.take, lane.start)) as landed:
        lane.queue.post(1)
        next(landed)
        lane.end("b", "c")
    assert not lane.flights.out
    assert lane.queue.wait(0.0) == []
    assert [item for _, item in lane.started] == ["a", "b", "c"]


def test_what_was_refused_is_not_waited_for() -> None:
    lane = Lane()

    def refuse(op: int, item: str) -> None:
        if item == "b":
            raise TierError("read", tier="t", path="p")
        lane.ends_at_once(op, item)

    with pytest.raises(TierError):
        list(lane.flights.run(lane.take, refuse))
    assert not lane.flights.out
    assert lane.queue.wait(0.0) == []


@pytest.mark.parametrize("stop", [lambda run: None, lambda run: run.close()], ids=["to the end", "given up"])
def test_what_never_ends_is_given_up_and_remembered(stop: Callable[[object], None]) -> None:
    lane = Lane(stall_s=0.01)
    run = lane.flights.run(lane.take, lane.start)
    lane.queue.post(1)
    assert next(run)[1] == "a"
    stop(run)
    assert list(run) == []
    assert {"b", "c"} <= set(lane.flights.out.values())
    assert lane.flights.oldest() == "b"


def test_what_arrives_with_an_interrupt_is_not_waited_for_again() -> None:
    lane, main = Lane(stall_s=120.0), threading.get_ident()

    def interrupt() -> None:
        while sys._current_frames()[main].f_code.co_name != "arrived":
            time.sleep(0)
        # What is raised for it is raised when the wait is over, which what arrives ends.
        signal.pthread_kill(main, signal.SIGUSR1)
        lane.end("a", "b", "c")

    interrupting = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            list(lane.flights.run(lane.take, lane.start))
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, before)
    assert not lane.flights.out


@pytest.mark.parametrize("is_started", [True, False])
def test_what_an_interrupt_kept_from_starting_is_not_waited_for_for_ever(
    is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "SETTLE_S", 0.01)
    lane = Lane()

    def start(op: int, item: str) -> None:
        if is_started or item != "b":
            lane.ends_at_once(op, item)
        if item == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(lane.flights.run(lane.take, start))
    assert list(lane.flights.out.values()) == ([] if is_started else ["b"])
