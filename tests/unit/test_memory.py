"""Arenas: alignment, views, lifetime, forks, shortage; and how all of their memory is touched, on the nodes meant."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from world import SimulatedDevice

from offload import waits
from offload._native import CompletionQueue
from offload.device import accelerator
from offload.device.lanes import GpuLanes
from offload.errors import InternalError, OffloadError
from offload.memory import arenas as memory
from offload.memory import touching
from offload.memory.arenas import HUGE_PAGE_BYTES, Arena, available_bytes
from offload.memory.touching import PIECE_BYTES, cores_of_rank, nodes_for, nodes_here, touch


def mapping_of(address: int) -> str:
    """Return what /proc/self/smaps says about the mapping that contains an address."""
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    for entry in entries[1:]:
        start, end = (int(part, 16) for part in entry.split(" ", 1)[0].split("-"))
        if start <= address < end:
            return entry
    return ""


def resident_pages(address: int, nbytes: int) -> int | None:
    """Return how many pages are in memory, by mincore; None where not all of them are mapped."""
    # Not by /proc, where the kernel may merge neighbouring mappings.
    pages = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(pages * mmap.PAGESIZE), found) == 0:
        return sum(page & 1 for page in found)
    assert ctypes.get_errno() == errno.ENOMEM
    return None


def test_cached_files_are_memory_that_may_still_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    machine = available_bytes()
    assert machine > 1 << 20
    (tmp_path / "memory.max").write_text("10000\n")
    (tmp_path / "memory.current").write_text("9900\n")
    (tmp_path / "memory.stat").write_text("anon 3900\nactive_file 1000\ninactive_file 3000\nslab_reclaimable 20\n")
    assert available_bytes() == 4120
    (tmp_path / "memory.stat").write_text("anon\n")  # nothing that can be read
    assert available_bytes() == 100
    (tmp_path / "memory.current").write_text("15000\n")  # a limit that was lowered
    assert available_bytes() == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() > 1 << 20


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["job/step", "job"])
def test_the_limit_of_a_control_group_holds_for_those_below_it(
    version: int, limited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(
        "7:cpu:/other\n" + ("4:memory:/job/step\n0::/\n" if version == 1 else "0::/job/step\n")
    )
    root = tmp_path / "memory" if version == 1 else tmp_path
    (root / "job" / "step").mkdir(parents=True)
    limit, used, cached = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 1\ntotal_inactive_file 300\n")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file 300\n")
    )
    (root / limited / limit).write_text("10000\n")
    (root / limited / used).write_text("9900\n")
    (root / limited / "memory.stat").write_text(cached)
    assert available_bytes() == 400


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ("0::/job/step\n", [("job/step", 2), ("job", 2), ("", 2)]),
        ("0::/\n", [("", 2)]),
        ("4:cpu,memory:/job\n0::/\n", [("memory/job", 1), ("memory", 1), ("", 2)]),
        (None, [("", 2)]),
    ],
    ids=["nested", "root", "both versions", "hidden"],
)
def test_each_control_group_is_named_once(
    own: str | None, found: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert [*memory.control_groups()] == [(tmp_path / name, version) for name, version in found]


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 1 << 20, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 12345])
def test_size_and_alignment(nbytes: int) -> None:
    arena = Arena(nbytes)
    assert arena.nbytes == nbytes
    assert arena.address % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 4096) == 0
    view = arena.numpy(0, nbytes, np.uint8)
    assert view.ctypes.data == arena.address
    view[:] = 7
    assert view.sum() == 7 * nbytes
    with pytest.raises(InternalError):
        arena.numpy(0, nbytes + 1, np.uint8)
    with pytest.raises(InternalError):
        arena.numpy(-1, 1, np.uint8)
    del view
    arena.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_tensors_are_views(dtype: torch.dtype) -> None:
    arena = Arena(1 << 16)
    tensor = arena.tensor(4096, 100, dtype)
    assert tensor.data_ptr() == arena.address + 4096
    assert (tensor.dtype, tensor.numel()) == (dtype, 100)
    tensor.fill_(3)
    assert torch.equal(arena.tensor(4096, 100, dtype), tensor)
    assert arena.numpy(4096 + 100 * dtype.itemsize, 1, np.uint8)[0] == 0
    assert arena.tensor(0, 0, dtype).numel() == 0
    if dtype.itemsize > 1:
        with pytest.raises(InternalError):
            arena.tensor(1, 1, dtype)


def test_views_outlive_the_arena() -> None:
    arena = Arena(4 << 20)
    array = arena.numpy(0, 1 << 20, np.float32)
    tensor = arena.tensor(0, 1 << 20, torch.float32)[10:20]
    array[:] = 5
    address = arena.address
    arena.close()
    arena.close()
    del array
    assert tensor.sum() == 50
    assert mapping_of(address)
    before = Path("/proc/self/statm").read_text().split()[0]
    del tensor
    after = Path("/proc/self/statm").read_text().split()[0]
    assert int(before) - int(after) >= (4 << 20) // 4096


def test_closed_arenas_give_no_views() -> None:
    arena = Arena(4096)
    arena.close()
    with pytest.raises(OffloadError, match="closed"):
        arena.numpy(0, 1, np.uint8)
    with pytest.raises(OffloadError, match="closed"):
        arena.tensor(0, 1, torch.uint8)


def test_the_kernel_was_told() -> None:
    flags = re.search(r"VmFlags: (.*)", mapping_of((huge := Arena(4 << 20)).address))
    assert flags is not None
    wanted = {"dc"}  # not copied on fork
    if Path("/sys/kernel/mm/transparent_hugepage").exists():  # the kernel has huge pages to give
        wanted.add("hg")
    assert wanted <= set(flags.group(1).split())
    flags = re.search(r"VmFlags: (.*)", mapping_of((small := Arena(4 << 20, huge_pages=False)).address))
    assert flags is not None
    assert "hg" not in flags.group(1).split()
    huge.close()
    small.close()


def test_prefaulting_touches_every_page_and_no_more() -> None:
    nbytes = 3 * HUGE_PAGE_BYTES + 5000
    cold, warm = Arena(nbytes, huge_pages=False), Arena(nbytes, huge_pages=False, prefault=True)
    assert resident_pages(cold.address, nbytes) == 0
    assert resident_pages(warm.address, nbytes) == -(-nbytes // mmap.PAGESIZE)
    assert not warm.numpy(0, nbytes, np.uint8).any()
    cold.close()
    warm.close()


@pytest.mark.parametrize("nbytes", [1 << 56, 1 << 62, 1 << 70])
def test_a_shortage_names_the_bytes(nbytes: int) -> None:
    with pytest.raises(OffloadError, match=str(nbytes)):
        Arena(nbytes)


def test_a_limit_on_address_space_is_a_shortage_too() -> None:
    code = (
        "import resource; from offload.memory.arenas import Arena; from offload.errors import OffloadError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "try:\n    Arena(64 << 30)\nexcept OffloadError as error:\n    print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(64 << 30) in out.stdout


def test_nothing_is_no_arena() -> None:
    with pytest.raises(InternalError):
        Arena(0)


def test_a_fork_does_not_inherit() -> None:
    arena = Arena(4 << 20, prefault=True)
    child = os.fork()
    if child == 0:
        os._exit(0 if resident_pages(arena.address, arena.nbytes) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert resident_pages(arena.address, arena.nbytes) == arena.nbytes // mmap.PAGESIZE
    arena.close()


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
