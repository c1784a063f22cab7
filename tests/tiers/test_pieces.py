"""Copies of many pieces of device memory: the bytes of copies one by one, in fewer calls, in an order that holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from world import HazardError, SimulatedDevice

from offload.device import pieces as module
from offload.device.memory import Block, DeviceMemory
from offload.device.pieces import PieceCopies, as_pieces
from offload.errors import OffloadError
from offload.memory.arenas import Arena
from offload.plan.budget import PIECE_BUFFERS
from offload.protocols import DeviceLane, Mark

BUFFER_BYTES = 4096


class Counting(SimulatedDevice):
    """Counts what it is asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(1 << 24, **options)
        self.calls: Counter[str] = Counter()

    def copy(self, lane: DeviceLane, *where: int) -> None:
        self.calls["copy"] += 1
        super().copy(lane, *where)

    def copy_pieces(self, lane: DeviceLane, pieces: Any) -> None:
        self.calls["kernel"] += 1
        super().copy_pieces(lane, pieces)


@pytest.fixture
def host() -> Iterator[Arena]:
    arena = Arena(1 << 20)
    yield arena
    arena.close()


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def device(request: pytest.FixtureRequest, host: Arena) -> Iterator[Counting]:
    made = Counting(lazy=request.param, delay_s=0.0 if request.param else 2e-4)
    yield made
    made.close()


def taken(device: SimulatedDevice, buffer_bytes: int) -> Block:
    nbytes = PIECE_BUFFERS * buffer_bytes
    return Block(nbytes, device.allocate(nbytes))


def copies_of(device: SimulatedDevice, buffer_bytes: int = BUFFER_BYTES) -> PieceCopies:
    made = PieceCopies(device, device)
    if buffer_bytes:
        made.replace_buffers(taken(device, buffer_bytes))
    return made


def drawn_pieces(seed: int, memory: int, host: int) -> list[tuple[int, int, int]]:
    """Pieces in slots of whole multiples of 128 bytes, some of which are nobody's, with large ones among them."""
    random = np.random.default_rng(seed)
    rows, there, here = [], 0, 0
    for _ in range(random.integers(1, 80)):
        nbytes = 2 * int(random.integers(1, random.choice([20, 500, 3000])))
        if random.random() < 0.8:
            rows.append((memory + there, host + here, nbytes))
        here += -(-nbytes // 128) * 128
        there += nbytes + 2 * int(random.integers(0, 9))
    random.shuffle(rows)
    return rows


def wait(device: SimulatedDevice) -> None:
    for lane in (DeviceLane.H2D, DeviceLane.D2H, DeviceLane.PIECES):
        device.mark(lane).wait()


@pytest.mark.parametrize("buffer_bytes", [0, 600, BUFFER_BYTES, 1 << 16])
def test_the_same_bytes_there_and_back(
    device: Counting, host: Arena, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing beside them: not in device memory, and in host memory only in gaps that are nobody's."""
    monkeypatch.setattr(module, "LEAST_COPY_BYTES", 3000)
    copies = copies_of(device, buffer_bytes)
    size = 1 << 19
    memory = device.allocate(size)
    filled = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    for seed in range(30):
        rows = drawn_pieces(seed, memory, host.address)
        image, back = host.numpy(0, size, np.uint8), host.numpy(size, size, np.uint8)
        image[:] = np.roll(filled, seed)
        back[:] = 7
        device.copy(DeviceLane.H2D, memory, host.address + size, size)
        wait(device)
        copies.to_device(as_pieces(rows))
        mark = device.mark(DeviceLane.PIECES)
        for lane in (DeviceLane.D2H, DeviceLane.PIECES):
            device.follow(lane, mark)
            device.follow(lane, device.mark(DeviceLane.H2D))
        device.copy(DeviceLane.D2H, host.address + size, memory, size)
        wait(device)
        wanted = np.full(size, 7, np.uint8)
        for there, here, nbytes in rows:
            wanted[there - memory :][:nbytes] = image[here - host.address :][:nbytes]
        assert np.array_equal(back, wanted)
        image[:] = 9
        copies.to_host(as_pieces(rows), gap_bytes=128)
        wait(device)
        kept = np.ones(size, bool)
        for there, here, nbytes in rows:
            at = here - host.address
            assert np.array_equal(image[at:][:nbytes], back[there - memory :][:nbytes])
            kept[at:][: -(-nbytes // 128) * 128] = False
        assert (image[kept] == 9).all()
    assert (device.calls["kernel"] > 0) is (buffer_bytes >= BUFFER_BYTES)


def test_small_pieces_take_one_copy_and_one_kernel(device: Counting, host: Arena) -> None:
    copies, memory = copies_of(device, 1 << 16), device.allocate(1 << 16)
    rows = as_pieces([(memory + 300 * n, host.address + 256 * n, 250) for n in range(100)])
    for method in (copies.to_device, copies.to_host):
        device.calls.clear()
        method(rows)
        assert device.calls == {"copy": 1, "kernel": 1}
        wait(device)
        device.calls.clear()
        method(rows[:4])
        assert device.calls == {"copy": 4}
        wait(device)


def test_pieces_that_lie_apart_in_host_memory_are_copied_each_on_its_own(device: Counting, host: Arena) -> None:
    copies, memory = copies_of(device, 1 << 16), device.allocate(1 << 16)
    copies.to_device(as_pieces([(memory + 300 * n, host.address + 512 * n, 250) for n in range(100)]))
    assert device.calls == {"copy": 100}
    wait(device)


def _no_follow(device: SimulatedDevice, lane: DeviceLane) -> Callable[..., None]:
    plain = device.follow
    return lambda other, mark: None if other is lane else plain(other, mark)


PLANTED: dict[str, Callable[[Counting, PieceCopies], object]] = {
    "scattered before it has been copied": lambda device, _: setattr(
        device, "follow", _no_follow(device, DeviceLane.PIECES)
    ),
    "copied before it has been gathered": lambda device, _: setattr(
        device, "follow", _no_follow(device, DeviceLane.D2H)
    ),
    "a buffer is used again while it is scattered": lambda device, _: setattr(
        device, "follow", _no_follow(device, DeviceLane.H2D)
    ),
}


@pytest.mark.parametrize("bug", [None, *PLANTED])
def test_a_forgotten_wait_is_found(bug: str | None, device: Counting, host: Arena) -> None:
    copies, memory = copies_of(device), device.allocate(1 << 16)
    rows = as_pieces([(memory + 256 * n, host.address + 256 * n, 256) for n in range(200)])
    if bug is not None:
        PLANTED[bug](device, copies)

    def run() -> Mark:
        copies.to_device(rows)
        SimulatedDevice.follow(device, DeviceLane.D2H, device.mark(DeviceLane.PIECES))
        for _ in range(2):
            copies.to_host(rows)
        return device.mark(DeviceLane.D2H)

    if bug is None:
        run().wait()
    else:
        with pytest.raises(HazardError):
            run()


class Interrupting(Counting):
    """Raises `KeyboardInterrupt` once, when it has done the n-th thing that it is asked for."""

    left = -1

    def _interrupt(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def copy(self, lane: DeviceLane, *where: int) -> None:
        super().copy(lane, *where)
        self._interrupt()

    def copy_pieces(self, lane: DeviceLane, pieces: Any) -> None:
        super().copy_pieces(lane, pieces)
        self._interrupt()

    def mark(self, lane: DeviceLane, *, timed: bool = True) -> Mark:
        found = super().mark(lane, timed=timed)
        self._interrupt()
        return found

    def follow(self, lane: DeviceLane, mark: Mark) -> None:
        super().follow(lane, mark)
        self._interrupt()


@pytest.mark.parametrize("first", ["to_device", "to_host"])
@pytest.mark.parametrize("second", ["to_device", "to_host"])
def test_an_interrupt_leaves_no_buffer_to_two(first: str, second: str, host: Arena) -> None:
    """Whatever it came between, what uses a buffer next comes behind all work in it."""
    nth, fired = 0, True
    while fired:
        nth += 1
        device = Interrupting(lazy=True)
        copies, memory = copies_of(device), device.allocate(1 << 16)
        rows = as_pieces([(memory + 256 * n, host.address + 256 * n, 256) for n in range(100)])
        others = rows + np.uint64(256 * 120)
        others[:, 2] = rows[:, 2]
        getattr(copies, first)(rows)  # all buffers have been used
        device.left = nth
        try:
            getattr(copies, first)(rows)
        except KeyboardInterrupt:
            device.left = 0
        fired, device.left = device.left == 0, -1
        for _ in range(2):
            getattr(copies, second)(others)
        wait(device)
        device.close()


def test_buffers_that_have_been_used_are_given_back_as_they_were_taken(host: Arena) -> None:
    device = Counting(lazy=True)
    memory = device.allocate(1 << 16)
    rows = as_pieces([(memory + 256 * n, host.address + 256 * n, 64) for n in range(8)])
    for times in range(PIECE_BUFFERS):
        block = taken(device, BUFFER_BYTES)
        copies = PieceCopies(device, device)
        assert copies.replace_buffers(block).nbytes == 0
        for _ in range(times):
            copies.to_host(rows)
        wait(device)
        assert copies.replace_buffers(taken(device, 2 * BUFFER_BYTES)) is block
    device.close()


def test_buffers_that_have_gone_are_used_again_where_they_have_come(host: Arena) -> None:
    """While they are away every piece is copied alone."""
    device = Counting(lazy=True)
    memory, places = DeviceMemory(device), device.allocate(1 << 16)
    rows = as_pieces([(places + 256 * n, host.address + 256 * n, 64) for n in range(8)])
    (block,), copies = memory.allocate(PIECE_BUFFERS * BUFFER_BYTES), PieceCopies(device, device)
    copies.replace_buffers(block)
    found = []
    for change in (lambda: None, memory.free_all, memory.reallocate_all):
        change()
        device.calls.clear()
        before, block_address = device.taken_bytes, block.address
        copies.to_host(rows)
        wait(device)
        found.append((device.calls["kernel"], block_address > 0, before))
    assert found == [(1, True, found[0][2]), (0, False, found[0][2] - block.nbytes), (1, True, found[0][2])]
    memory.free(block)
    assert device.taken_bytes == found[1][2]
    device.close()


def test_blocks_come_together_or_not_at_all() -> None:
    device = SimulatedDevice(1 << 16)
    memory = DeviceMemory(device)
    kept, none = memory.allocate(1 << 15, 0)
    assert kept.address > 0
    assert none.address == 0
    with pytest.raises(OffloadError):
        memory.allocate(1 << 12, 1 << 16)
    assert device.taken_bytes == 1 << 15
    memory.free_all()
    memory.free_all()
    assert device.taken_bytes == kept.address == 0
    other = device.allocate(1 << 16)
    with pytest.raises(OffloadError):
        memory.reallocate_all()
    assert kept.address == 0
    device.release(other)
    memory.reallocate_all()
    assert kept.address > 0
    assert device.taken_bytes == 1 << 15
    device.close()
