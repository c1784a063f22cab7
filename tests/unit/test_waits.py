"""Waits that say what they are for, and work that nobody has to wait for."""

from __future__ import annotations

import logging
import threading

import pytest

from offload import waits
from offload._native import CompletionQueue

LONG_S = 60.0


class Clock:
    """Seconds that pass when somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(waits.time, "monotonic", lambda: self.now_s)

    def pass_by(self, seconds: float) -> bool:
        self.now_s += seconds
        return False


def test_a_long_wait_is_explained_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    assert not waits.wait_for(clock.pass_by, lambda: "Godot", 1000.0)
    assert clock.now_s == 1100.0
    assert [record.args for record in caplog.records] == [(each, "Godot") for each in (30, 60, 120, 240, 480, 960)]
    assert {(record.levelno, record.name) for record in caplog.records} == {(logging.WARNING, "offload")}


def test_nothing_is_said_before_its_time_or_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    assert not waits.wait_for(clock.pass_by, lambda: "Godot", 29.0)
    assert not waits.wait_for(clock.pass_by, lambda: "", 100.0)  # somebody else says it
    silence = waits.Silence()
    for _ in range(10):
        clock.pass_by(20.0)
        silence.warn_if_due(lambda: "Godot")
        silence.end()
    assert not caplog.records


def test_time_in_which_the_process_was_stopped_is_no_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it is stopped, what is waited for gets all of its time."""
    clock = Clock(monkeypatch)
    waited_s = 0.0

    def wait_with_stops(seconds: float) -> bool:
        nonlocal waited_s
        stopped_s = 4000.0 if clock.now_s > 101.0 and waited_s % 2 < 1 else 0.0
        waited_s += seconds
        return clock.pass_by(seconds + stopped_s)

    assert not waits.wait_for(wait_with_stops, lambda: "Godot", 10.0)
    assert 10.0 <= waited_s < 20.0
    assert clock.now_s > 4000.0
    assert not caplog.records


@pytest.mark.parametrize("late_s", [0.2, 5.0])
def test_a_wait_whose_every_part_is_late_ends(monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    """As where other threads keep the interpreter's lock."""
    clock = Clock(monkeypatch)
    assert not waits.wait_for(lambda seconds: clock.pass_by(seconds + late_s), lambda: "", 10.0)


def test_completions_come_in_time_or_not_at_all() -> None:
    queue = CompletionQueue()
    assert waits.completions(queue, lambda: "", 0.01) == []
    queue.post(7)
    assert [record[0] for record in waits.completions(queue, lambda: "")] == [7]


def test_background_work_is_done_once() -> None:
    begun, go_on, runs = threading.Event(), threading.Event(), []

    def work() -> None:
        runs.append(threading.current_thread())
        begun.set()
        assert go_on.wait(LONG_S)
        raise KeyError("as if")

    background = waits.BackgroundWork(work, "test")
    background.start()
    background.start()
    assert not background.wait(0.0)
    assert begun.wait(LONG_S)
    assert not background.forestall()
    go_on.set()
    assert background.wait(LONG_S)
    background.start()
    (thread,) = runs
    assert thread.daemon
    assert thread is not threading.current_thread()
    assert isinstance(background.error, KeyError)


def test_what_is_forestalled_is_never_done() -> None:
    runs: list[None] = []
    background = waits.BackgroundWork(lambda: runs.append(None), "test")
    assert background.forestall()
    background.start()
    assert not background.wait(0.0)
    assert runs == []


def test_what_an_interrupt_finds_before_its_begin_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, threads, runs = threading.Event(), [], []

    class LateThread(threading.Thread):
        def start(self) -> None:
            threads.append(self)
            super().start()

        def run(self) -> None:
            assert go_on.wait(LONG_S)
            super().run()

    def interrupt(arrived: object, what: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(waits.threading, "Thread", LateThread)
    monkeypatch.setattr(waits, "wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt):
        waits.side_by_side([lambda: runs.append(None)], "test", lambda: "")
    go_on.set()
    for thread in threads:
        thread.join(LONG_S)
    assert threads
    assert runs == []


def test_without_another_thread_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    runs: list[threading.Thread] = []
    background = waits.BackgroundWork(lambda: runs.append(threading.current_thread()), "test")
    background.start()
    assert background.done
    assert runs == [threading.current_thread()]
