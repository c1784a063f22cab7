"""An emulated device: no two transfers have the same piece of its time."""

from __future__ import annotations

import math

import pytest
from _throttled import GRAIN_S, Lanes, TakingGrains, _Transfer

from offload.protocols import Completion


def test_lanes_are_apart_and_wait_for_what_comes_later() -> None:
    lanes = Lanes()
    assert lanes.book("read", 10.0, 2.0) == 12.0
    assert lanes.book("read", 11.0, 2.0) == 14.0
    assert lanes.book("write", 11.0, 2.0) == 13.0
    assert lanes.book("read", 20.0, 1.0) == 21.0


def transfer(op: int, submitted_s: float, seconds: float) -> _Transfer:
    return _Transfer(Completion(op, 0, 0, 0.0, 0.0), submitted_s, seconds)


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
