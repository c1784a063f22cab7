"""Choosing between threads and asyncio, and what threads do."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from tier_harness import Build, Harness

import offload
from offload._native import CompletionQueue, IoThreads, StoreFile
from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.memory.arenas import Arena
from offload.protocols import TileId
from offload.tiers import FileTier, StoreOptions, open_tier, slot_bytes
from offload.tiers.file import IO_BACKENDS

TARGET = 4 << 20


def test_one_engine_moves_two_stores(tmp_path: Path) -> None:
    queue = CompletionQueue()
    engine = IoThreads(queue, 4, 64 << 10)
    stores = [uuid.uuid4().bytes for _ in range(2)]
    descriptors = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(2)]
    files = [StoreFile(fd, False, store) for fd, store in zip(descriptors, stores, strict=True)]
    arena = Arena(1 << 20)
    arena.numpy(0, 4096, np.uint8)[:] = 1
    arena.numpy(4096, 4096, np.uint8)[:] = 2
    for number, file in enumerate(files):
        engine.write(file, 1, (0, 0, 0), 1, 0, arena.address + number * 4096, 4096)
        assert queue.wait(60.0)[0][:2] == (1, 0)
    for number, file in enumerate(files):
        engine.read(file, 2, (0, 0, 0), 1, 0, arena.address + 8192, 4096)
        assert queue.wait(60.0)[0][:2] == (2, 0)
        assert (arena.numpy(8192, 4096, np.uint8) == number + 1).all()
    engine.close()
    files.clear()
    del file
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def backend_of(folder: Path, wanted: str) -> str:
    tier = open_tier(str(folder), uuid.uuid4(), CompletionQueue(), options=StoreOptions(io_backend=wanted))
    assert isinstance(tier, FileTier)
    tier.close()
    return tier.io_backend


def test_what_was_asked_for_is_used(tmp_path: Path) -> None:
    assert [backend_of(tmp_path, wanted) for wanted in IO_BACKENDS] == ["threads", "threads", "asyncio"]


@pytest.mark.parametrize("wanted", [*IO_BACKENDS, "io_uring"])
def test_the_choice_is_said_once(wanted: str) -> None:
    """Of a process; and what a setting of earlier versions is taken as."""
    code = (
        "import logging, sys; logging.basicConfig(level='INFO', format='%(name)s %(levelname)s %(message)s')\n"
        "from offload.tiers.file import choose_io_backend\n"
        "print(*[choose_io_backend(sys.argv[1]) for _ in range(3)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, wanted], capture_output=True, text=True, check=True)
    (chosen,) = {*done.stdout.split()}
    *before, line = done.stderr.splitlines()
    assert line == f"offload INFO storage I/O by {chosen}"
    assert [each.split(",")[0] for each in before] == (
        ['offload WARNING io_backend "io_uring" is taken as "threads"'] if wanted == "io_uring" else []
    )


def test_io_uring_is_taken_as_threads(tmp_path: Path) -> None:
    assert backend_of(tmp_path, "io_uring") == "threads"
    weight = torch.nn.Parameter(torch.ones(4096))
    config = OffloadConfig(host_memory=0, paths=[tmp_path], io_backend="io_uring")
    with offload.AdamW([weight], lr=0.5, offload=config) as optimizer:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (weight < 1.0).all()


def test_unknown_backends_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="io_backend"):
        backend_of(tmp_path, "magic")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="io_backend"):
        OffloadConfig(io_backend="magic")
    assert [OffloadConfig(io_backend=name).io_backend for name in IO_BACKENDS] == list(IO_BACKENDS)


def await_threads(counts: dict[str, int]) -> None:
    """Wait until so many threads' names begin so: one that was joined may still be shown."""
    found: dict[str, int] = {}
    deadline_s = time.monotonic() + 60.0
    while found != counts and time.monotonic() < deadline_s:
        names = []
        for comm in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has gone
                names.append(comm.read_text())
        found = {start: sum(name.startswith(start) for name in names) for start in counts}
    assert found == counts


@pytest.mark.parametrize("depth", [1, 3, 16])
def test_the_depth_that_is_set_is_kept_to(build: Build, depth: int) -> None:
    harness = build("file-direct", depth=2)
    harness.tier.set_depth(depth)
    await_threads({"offload-read": depth, "offload-write": depth})  # each moves one tile at a time


def test_growth_that_fails_holds_up_nobody_else(build: Build) -> None:
    harness = build("file-direct", max_bytes=1 << 20)
    harness.fill(64 << 10)
    pitch = slot_bytes(64 << 10)
    beyond = harness.request(1 << 30, 64 << 10)
    harness.tier.write(beyond)
    good = harness.request(pitch, 64 << 10)
    harness.tier.write(good)
    harness.tier.sync(500)
    errors = {c.op: c.error for c in harness.collect(3)}
    assert errors == {beyond.op: errno.ENOSPC, good.op: 0, 500: 0}


def test_mixed_traffic_with_faults(build: Build) -> None:
    rng = np.random.default_rng(0)
    harness = build("file-direct")
    tier = harness.tier
    assert isinstance(tier, FileTier)
    nbytes, count = 132 << 10, 8
    pitch = slot_bytes(nbytes)
    data = harness.fill(count * nbytes)

    def request(index: int, target: int = 0) -> object:
        return harness.request(index * pitch, nbytes, at=target + index * nbytes, tile=TileId(0, 0, index))

    for index in range(count):
        tier.write(request(index))  # type: ignore[arg-type]
    assert all(c.error == 0 for c in harness.collect(count))
    for _ in range(20):
        for kind in ("read", "write"):
            tier.inject(kind, int(rng.integers(1, 20)), limit_bytes=int(rng.integers(1, 60_000)))
            tier.inject(kind, int(rng.integers(1, 20)), error=errno.EINTR)
        order = rng.permutation(count)
        for index in order[: count // 2]:
            tier.write(request(int(index)))  # type: ignore[arg-type]
        for index in order[count // 2 :]:
            tier.read(request(int(index), TARGET))  # type: ignore[arg-type]
        assert [c.error for c in harness.collect(count)] == [0] * count
        for index in order[count // 2 :]:
            assert harness.bytes_at(TARGET + index * nbytes, nbytes) == data[index * nbytes : (index + 1) * nbytes]


def test_no_wake_up_is_lost(build: Build) -> None:
    # Submissions that race with the thread's going to sleep must not be lost.
    harness: Harness = build("file-tmpfs")
    harness.fill(4096)
    for _ in range(2000):
        assert harness.write(harness.request(0, 4096)).error == 0
