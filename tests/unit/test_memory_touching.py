"""Touching memory: all of it, on the nodes that are meant, by threads that may be refused, and with a way out."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from test_memory import resident_pages
from world import SimulatedDevice

from offload import waits
from offload._native import CompletionQueue
from offload.device import accelerator
from offload.device.lanes import GpuLanes
from offload.errors import OffloadError
from offload.memory import arenas as memory
from offload.memory import touching
from offload.memory.arenas import Arena
from offload.memory.touching import PIECE_BYTES, cores_of_rank, nodes_for, nodes_here, touch


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of four CPUs, and one with memory alone."""
    for number, cpus in ((0, "0-1,8-9"), (1, "2-3,10-11"), (2, "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    (tmp_path / "online").write_text("0-2\n")
    monkeypatch.setattr(touching, "NODES", tmp_path)
    return tmp_path


def allow(monkeypatch: pytest.MonkeyPatch, cpus: set[int]) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(cpus))


def test_nodes_are_those_of_the_cpus_that_may_be_used(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, {0, 1, 2, 8, 77})
    assert nodes_here() == {0: {0, 1, 8}, 1: {2}}
    allow(monkeypatch, {10})
    assert nodes_here() == {1: {10}}
    monkeypatch.setattr(touching, "NODES", nodes / "absent")
    assert nodes_here() == {}


def test_ranks_share_numa_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touching, "NODES", tmp_path)
    allow(monkeypatch, set(range(16)))
    assert not cores_of_rank(0, 2)  # no nodes are listed
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-3,8-11\n")
    assert not cores_of_rank(1, 2)
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("4-7,12-15\n")
    (tmp_path / "node2").mkdir()
    (tmp_path / "node2" / "cpulist").write_text("\n")  # memory alone
    first, second = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}
    assert cores_of_rank(0, 1) == first | second
    assert [cores_of_rank(number, 2) for number in range(2)] == [first, second]
    assert [cores_of_rank(number, 4) for number in range(4)] == [first, first, second, second]
    allow(monkeypatch, {0, 1})
    assert not cores_of_rank(1, 2)  # bound to one node by others


@pytest.mark.parametrize(
    ("cpus", "reader", "expected"),
    [
        (range(12), None, {0, 1}),  # as where the CPU needs what both give
        (range(12), 1, {1}),
        (range(12), 2, {0, 1}),  # no CPU of it
        ((0, 8), 1, set()),  # one node: nothing to choose
        ((0, 8), None, set()),
    ],
)
def test_which_nodes_memory_is_to_lie_on(
    cpus: range, reader: int | None, expected: set[int], nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, set(cpus))
    assert set(nodes_for(reader)) == expected


@pytest.mark.parametrize("refused", [False, True])
def test_pieces_are_touched_in_turn_by_threads_of_each_node(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bound, done = threading.local(), []

    def bind(pid: int, cpus: set[int]) -> None:
        if refused:
            raise PermissionError
        bound.cpus = set(cpus)

    monkeypatch.setattr("os.sched_setaffinity", bind)
    places = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
    nbytes = 9 * PIECE_BYTES + 5
    touch(lambda at, size: done.append((at, size, getattr(bound, "cpus", None))), nbytes, places)
    done.sort()
    assert [at for at, _, _ in done] == list(range(0, nbytes, PIECE_BYTES))
    assert [size for _, size, _ in done] == [PIECE_BYTES] * 9 + [5]
    wanted = [None if refused else set(places[number % 2]) for number in range(10)]
    assert [cpus for _, _, cpus in done] == wanted


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("nbytes", [5000, 3 * PIECE_BYTES + 5000])
def test_everything_is_touched_and_zero(
    nbytes: int, threads: int, knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel knows no call for it."""
    monkeypatch.setattr(touching, "MOST_THREADS", threads)
    allow(monkeypatch, set(range(4)))
    if not knows:
        monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    arena, before = Arena(nbytes, huge_pages=False), threading.active_count()
    arena.touch()
    assert resident_pages(arena.address, nbytes) == -(-nbytes // mmap.PAGESIZE)
    assert not arena.numpy(0, nbytes, np.uint8).any()
    assert threading.active_count() <= before + threads
    arena.close()


@pytest.mark.parametrize("knows", [True, False])
def test_what_is_touched_keeps_its_content(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not knows:
        monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    arena = Arena(3 * mmap.PAGESIZE)
    arena.numpy(0, arena.nbytes, np.uint8)[:] = 7
    arena.discard(mmap.PAGESIZE, mmap.PAGESIZE)
    arena.touch()
    content = arena.numpy(0, arena.nbytes, np.uint8).reshape(3, -1)
    assert (content == np.array([[7], [0], [7]])).all()
    assert resident_pages(arena.address, arena.nbytes) == 3
    del content
    arena.close()


def test_one_piece_is_touched_by_this_thread_on_its_node_which_then_goes_back() -> None:
    before, during = os.sched_getaffinity(0), list[set[int]]()
    cpus = frozenset({min(before)})
    touch(lambda at, size: during.append(os.sched_getaffinity(0)), PIECE_BYTES, {0: cpus})
    assert during == [cpus]
    assert os.sched_getaffinity(0) == before


def test_a_shortage_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    def piece(at: int, size: int) -> None:
        done.append(at)
        raise OffloadError("no memory")

    with pytest.raises(OffloadError, match="no memory"):
        touch(piece, 100 * PIECE_BYTES)
    assert len(done) <= touching.MOST_THREADS


def test_memory_that_nobody_wants_any_more_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice()
    lanes, done = GpuLanes(device, CompletionQueue()), []

    def touched(arena: Arena, offset: int, nbytes: int) -> None:
        done.append(offset)
        lanes.given_up = True

    monkeypatch.setattr(Arena, "touch_part", touched)
    with pytest.raises(OffloadError, match="closed"):
        lanes.allocate_arena(100 * PIECE_BYTES)
    assert len(done) <= touching.MOST_THREADS
    assert not device.pinned
    lanes.given_up = False
    lanes.close()


def test_an_interrupt_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on, done, plain = threading.Event(), threading.Event(), [], waits.BackgroundWork.wait

    def piece(at: int, size: int) -> None:
        done.append(at)
        reached.set()
        assert go_on.wait(60)

    def wait(arrived: object, what: object) -> bool:
        assert reached.wait(60)
        raise KeyboardInterrupt

    def wait_for_last_pieces(thread: waits.BackgroundWork) -> bool:
        go_on.set()
        return plain(thread)

    monkeypatch.setattr(waits, "wait_for", wait)
    monkeypatch.setattr(waits.BackgroundWork, "wait", wait_for_last_pieces)
    allow(monkeypatch, {0, 1})
    with pytest.raises(KeyboardInterrupt):
        touch(piece, 10_000 * PIECE_BYTES)
    assert len(done) <= 2


def test_what_a_gpu_reads_is_touched_before_it_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice()
    plain, seen = device.pin, []

    def pin(address: int, nbytes: int) -> None:
        seen.append(resident_pages(address, nbytes))
        plain(address, nbytes)

    monkeypatch.setattr(device, "pin", pin)
    lanes = GpuLanes(device, CompletionQueue())
    lanes.allocate_arena(3 * PIECE_BYTES)
    assert seen == [3 * PIECE_BYTES // mmap.PAGESIZE]
    lanes.close()


def test_the_node_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "PCI_DEVICES", tmp_path)
    assert accelerator._node_of((0, 0xAB, 0)) is None
    folder = tmp_path / "0000:ab:00.0"
    folder.mkdir()
    for text, expected in (("1\n", 1), ("-1\n", None), ("", None)):
        (folder / "numa_node").write_text(text)
        assert accelerator._node_of((0, 0xAB, 0)) == expected
    assert accelerator._node_of(None) is None
