"""An emulated device that processes share: no two transfers have the same piece of its time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from offload.tiers import SharedLanes

BOOKINGS = 2000


def book(path: Path) -> list[float]:
    lanes = SharedLanes(path)
    try:
        return [lanes.book("read", 0.0, 1.0) for _ in range(BOOKINGS)]
    finally:
        lanes.close()


def test_processes_take_turns_on_a_lane(tmp_path: Path) -> None:
    path = tmp_path / "lanes"
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        ends = [end for part in pool.map(book, [path] * 3, chunksize=1) for end in part]
    assert sorted(ends) == [float(second) for second in range(1, 3 * BOOKINGS + 1)]


def test_lanes_are_apart_and_wait_for_what_comes_later(tmp_path: Path) -> None:
    one, other = SharedLanes(tmp_path / "lanes"), SharedLanes(tmp_path / "lanes")
    assert one.book("read", 10.0, 2.0) == 12.0
    assert other.book("read", 11.0, 2.0) == 14.0
    assert one.book("write", 11.0, 2.0) == 13.0
    assert other.book("read", 20.0, 1.0) == 21.0
    one.close()
    other.close()
