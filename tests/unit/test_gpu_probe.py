"""Probes of a GPU measure its work, whatever the host takes to enqueue it: on a device with a clock of its own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from offload.errors import OffloadError
from offload.formats import EXACT_ADAMW
from offload.measure import gpu as measure_gpu
from offload.measure import probe
from offload.measure.gpu import D2H, H2D, UPDATE, GpuProbe
from offload.memory.arenas import Arena
from offload.protocols import DeviceLane

NUMEL = 1 << 20
COPY_BYTES = NUMEL * 16 // 2
STATE_BYTES = NUMEL * 12


@dataclass
class VirtualMark:
    """A point on a lane of a `VirtualDevice`."""

    device: VirtualDevice
    at_s: float

    def reached(self) -> bool:
        return self.device.now_s >= self.at_s

    def wait(self) -> None:
        self.device.now_s = max(self.device.now_s, self.at_s)

    def time_s(self) -> float:
        return self.at_s


@dataclass
class VirtualDevice:
    """A device on which time passes only as calls say: each takes the host `call_s`, and work runs behind it.

    A copy that begins while the other direction works is slower.
    """

    call_s: float
    alone: float = 50e9
    beside: float = 40e9
    update_bytes_per_s: float = 1e12
    name: str = "virtual"
    now_s: float = 0.0
    free_s: dict[DeviceLane, float] = field(default_factory=dict)
    copies: int = 0

    def _put(self, lane: DeviceLane, seconds: float) -> None:
        self.now_s += self.call_s
        self.free_s[lane] = max(self.free_s.get(lane, 0.0), self.now_s) + seconds

    def allocate(self, nbytes: int) -> int:
        return 0

    def release(self, address: int) -> None:
        pass

    def free_bytes(self) -> int:
        return 1 << 40

    def mark(self, lane: DeviceLane, *, timed: bool = True) -> VirtualMark:
        self._put(lane, 0.0)
        return VirtualMark(self, self.free_s[lane])

    def follow(self, lane: DeviceLane, mark: VirtualMark) -> None:
        self.now_s += self.call_s
        self.free_s[lane] = max(self.free_s.get(lane, 0.0), mark.at_s)

    def copy(self, lane: DeviceLane, nbytes: int) -> None:
        self.copies += 1
        other = D2H if lane is H2D else H2D
        begins_s = max(self.free_s.get(lane, 0.0), self.now_s + self.call_s)
        hindered = lane in (H2D, D2H) and self.free_s.get(other, 0.0) >= begins_s
        self._put(lane, nbytes / (self.beside if hindered else self.alone))

    def send_table(self, table: Any) -> Any:
        return table

    def update(self, table: Any) -> None:
        assert int(np.sum(table["numel"])) == NUMEL
        self._put(UPDATE, STATE_BYTES / self.update_bytes_per_s)


class VirtualLanes:
    """What a probe uses of `GpuLanes`."""

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device

    def allocate_arena(self, nbytes: int, node: int | None = None) -> Arena:
        return Arena(nbytes)

    def free_arena(self, arena: Arena) -> None:
        arena.close()

    def copy_to_device(self, parts: Any) -> None:
        pass

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int) -> None:
        assert nbytes == COPY_BYTES
        self.device.copy(lane, nbytes)


def rates_of(device: VirtualDevice, repeats: int = 8) -> dict[str, float]:
    lanes: Any = VirtualLanes(device)
    with contextlib.closing(GpuProbe(lanes, EXACT_ADAMW, NUMEL, 0.0 if repeats == 1 else 1e9)) as made:
        if repeats > 1:
            made.warm_up()
        alone = made.rates(H2D, suffix=" alone") | made.rates(D2H, suffix=" alone")
        return alone | made.rates(H2D, D2H) | made.rates(UPDATE)


def test_what_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device, given_back = VirtualDevice(0.0), []
    lanes: Any = VirtualLanes(device)
    monkeypatch.setattr(device, "release", given_back.append)

    def refused(*arguments: Any, **options: Any) -> None:
        raise OffloadError("no memory")

    for name in ("copy_to_device", "allocate_arena"):
        monkeypatch.setattr(lanes, name, refused)
        with pytest.raises(OffloadError, match="no memory"):
            GpuProbe(lanes, EXACT_ADAMW, NUMEL)
    assert len(given_back) == 2


@pytest.mark.parametrize("repeats", [1, 8])
@pytest.mark.parametrize("call_s", [0.0, 20e-6, 100e-6])
def test_the_host_s_calls_are_no_part_of_a_rate(call_s: float, repeats: int) -> None:
    """A copy takes 170 us and an update 13 us."""
    found = rates_of(VirtualDevice(call_s), repeats)
    assert found["gpu/h2d alone"] == pytest.approx(50e9)
    assert found["gpu/d2h alone"] == pytest.approx(50e9)
    assert found["gpu/update"] == pytest.approx(1e12)
    for way in ("h2d", "d2h") if repeats > 1 else ("d2h",):  # the first copy finds the other direction idle
        assert found[f"gpu/{way}"] == pytest.approx(40e9, rel=0.05)


def test_without_the_gate_they_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    open_gate = VirtualMark(VirtualDevice(0.0), 1.0)
    monkeypatch.setattr(GpuProbe, "gate", lambda self, lanes: open_gate)
    found = rates_of(VirtualDevice(100e-6), 1)
    assert found["gpu/h2d alone"] < 35e9
    assert found["gpu/update"] < 150e9


def test_a_gate_has_an_end() -> None:
    """Where copies end when they are asked for, as those of memory that is not pinned may, none holds work back."""
    device = VirtualDevice(100e-6, alone=1e18)
    rates_of(device, 1)
    # Each of four runs but those that find the longest gate is repeated; that gate has been found by the first.
    gates = 2 * measure_gpu.MOST_GATE_COPIES - 1 + 3 * measure_gpu.MOST_GATE_COPIES
    assert device.copies <= gates + 6 + 4


@pytest.mark.parametrize(("largest", "room", "expected"), [(1 << 26, 1 << 40, 1 << 24), (1 << 26, 1 << 26, 1 << 19)])
def test_the_quick_probe_updates_more_than_caches_hold(
    largest: int, room: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card with little memory, less; the session's host memory is as much as ever."""

    class Made(Exception):
        pass

    def make(lanes: Any, state: Any, numel: int, run_s: float, update: Any, *, copy_bytes: int) -> None:
        assert 2 * copy_bytes <= probe.SPARE_BYTES
        raise Made(numel)

    class Subgroup:
        numel = largest // 4

    class Layout:
        device_state = EXACT_ADAMW
        subgroups = (Subgroup,) * 4

    class Plan:
        layout = Layout

    class Lanes:
        class device:
            name = "a card"
            free_bytes = staticmethod(lambda: room)

    monkeypatch.setattr(probe, "GpuProbe", make)
    lanes, plan = Lanes, Plan
    with pytest.raises(Made) as made:
        probe.probe_gpu(lanes, pytest.fail, (), 1, plan)  # type: ignore[arg-type]
    assert made.value.args == (expected,)


@pytest.mark.parametrize("copies", [1, 3, 200])
def test_a_run_moves_as_much_as_there_is_time_for(copies: int) -> None:
    """Each run but the first, whose length is known by the one before; beside the CPU's update a quarter of that."""
    device, copy_s = VirtualDevice(0.0), COPY_BYTES / 50e9
    lanes: Any = VirtualLanes(device)
    with contextlib.closing(GpuProbe(lanes, EXACT_ADAMW, NUMEL, (copies + 0.1) * copy_s, lambda: 1.0)) as made:
        made.rates(H2D)
        before_s = device.free_s[H2D]
        made.rates(H2D)
        moved_s = device.free_s[H2D] - before_s - copy_s  # behind the gate
        assert moved_s == pytest.approx(min(copies, measure_gpu.COPIES) * copy_s)
        for expected in (1, max(1, min(copies // 5, measure_gpu.COPIES_BESIDE))):  # each way hinders the other
            before = device.copies
            made.beside(lambda: 1.0)
            assert device.copies - before == 2 * expected
