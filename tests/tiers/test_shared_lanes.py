"""An emulated device that processes share: no two transfers have the same piece of its time."""

from __future__ import annotations

import math
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from _throttled import GRAIN_S, SharedLanes, TakingGrains, _Transfer

from offload.protocols import Completion

PROCESSES, BOOKINGS = 3, 20_000


def book(pipe: Connection, path: Path) -> None:
    lanes = SharedLanes(path)
    pipe.send("ready")
    pipe.recv()  # so that all begin at once
    pipe.send([lanes.book("read", 0.0, 1.0) for _ in range(BOOKINGS)])
    lanes.close()


@pytest.mark.slow
def test_processes_take_turns_on_a_lane(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(PROCESSES)]
    processes = [context.Process(target=book, args=(theirs, tmp_path / "lanes")) for _, theirs in pairs]
    for process in processes:
        process.start()
    for ours, _ in pairs:
        ours.recv()
    for ours, _ in pairs:
        ours.send("go")
    ends = [end for ours, _ in pairs for end in ours.recv()]
    for process in processes:
        process.join()
    assert sorted(ends) == [float(second) for second in range(1, PROCESSES * BOOKINGS + 1)]


def test_lanes_are_apart_and_wait_for_what_comes_later(tmp_path: Path) -> None:
    one, other = SharedLanes(tmp_path / "lanes"), SharedLanes(tmp_path / "lanes")
    assert one.book("read", 10.0, 2.0) == 12.0
    assert other.book("read", 11.0, 2.0) == 14.0
    assert one.book("write", 11.0, 2.0) == 13.0
    assert other.book("read", 20.0, 1.0) == 21.0
    one.close()
    other.close()


def transfer(op: int, submitted_s: float, seconds: float) -> _Transfer:
    return _Transfer(Completion(op, 0, 0, 0.0, 0.0, 0), submitted_s, seconds)


def test_transfers_of_a_shared_device_take_as_long_as_one_after_the_other() -> None:
    device = TakingGrains(at_once=2)
    for op in (1, 2, 3):
        device.add(transfer(op, 10.0, 1.0))
    assert device.ended(9.0) == []
    assert device.ended(11.5) == []
    assert device.next_s() <= 12.0
    # Two side by side, and then the third.
    ended = [(end_s, each.started_s, each.completion.op) for end_s, each in device.ended(20.0)]
    assert [op for *_, op in ended] == [1, 2, 3]
    assert [end_s for end_s, *_ in ended] == pytest.approx([12.0, 12.0, 13.0], abs=2 * GRAIN_S)
    assert [started_s for _, started_s, _ in ended] == pytest.approx([10.0, 10.0, 12.0], abs=2 * GRAIN_S)
    assert device.next_s() == math.inf
    device.add(transfer(4, 30.0, 0.5))
    assert [end_s for end_s, _ in device.ended(31.0)] == pytest.approx([30.5])
