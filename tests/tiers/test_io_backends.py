"""Choosing between io_uring and threads, and what is special about a ring."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_harness import Build, Harness, need_io_uring

from offload._native import CompletionQueue, IoThreads, IoUring, StoreFile
from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.memory.arenas import Arena
from offload.protocols import TileId
from offload.tiers import FileTier, StoreOptions, open_tier, slot_bytes
from offload.tiers import file as file_module

TARGET = 4 << 20

# Installs a seccomp filter that answers the io_uring system calls of its first argument with the errno of the
# second, as the default profile of a container does, then opens tiers and says what came of it.
REFUSED = """
import ctypes, json, logging, struct, sys, uuid
calls, error, folder = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06
program = [(LOAD, 0, 0, 0)]
for number, call in enumerate(calls):
    program.append((EQUALS, len(calls) - number, 0, call))
program += [(RETURN, 0, 0, 0x7FFF0000), (RETURN, 0, 0, 0x00050000 | error)]
code = b"".join(struct.pack("HBBI", *line) for line in program)
buffer = ctypes.create_string_buffer(code)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc = ctypes.CDLL(None, use_errno=True)
unused = ctypes.c_ulong(0)
if libc.prctl(38, ctypes.c_ulong(1), unused, unused, unused) != 0:
    sys.exit("no_new_privs")
if libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(Program(len(program), ctypes.addressof(buffer)))) != 0:
    sys.exit("seccomp")
from offload._native import CompletionQueue, IoUring
from offload.memory.arenas import Arena
from offload.errors import ConfigError
from offload.protocols import TileId, TileRequest
from offload.tiers import StoreOptions, open_tier
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append([record.name, record.levelname, record.getMessage()])
logging.getLogger("offload").addHandler(Keep())
logging.getLogger("offload").setLevel(logging.INFO)
queue = CompletionQueue()
found = {"refusal": IoUring.refusal()}
try:
    open_tier(folder, uuid.uuid4(), queue, options=StoreOptions(io_backend="io_uring")).close()
    found["forced"] = ""
except ConfigError as error:
    found["forced"] = str(error)
tiers = [open_tier(folder, uuid.uuid4(), queue) for _ in range(2)]
found["backends"] = [tier.io_backend for tier in tiers]
arena = Arena(1 << 20)
arena.numpy(0, 8192, "u1")[:] = 7
errors = []
for at, move in ((0, tiers[0].write), (8192, tiers[0].read)):
    move(TileRequest(1, TileId(0, 0, 0), 1, 0, arena.address + at, 8192))
    errors += [record[1] for record in queue.wait(60.0)]
found["errors"] = errors
found["same"] = bool((arena.numpy(8192, 8192, "u1") == 7).all())
for tier in tiers:
    tier.close()
found["lines"] = [[level, text] for name, level, text in lines if name == "offload"]  # not a single tier's
print(json.dumps(found))
"""


def run_under_seccomp(calls: list[int], code: int, folder: Path) -> Any:
    """Return what `REFUSED` found where these system calls fail with this errno."""
    command = [sys.executable, "-c", REFUSED, json.dumps(calls), str(code), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and done.stderr.strip() in ("no_new_privs", "seccomp"):
        pytest.skip("no seccomp here")
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder) == []
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("calls", "code"),
    [([425], errno.EPERM), ([425, 426, 427], errno.ENOSYS), ([426], errno.EPERM)],
    ids=["forbidden", "unknown", "half-forbidden"],
)
def test_where_io_uring_is_refused_threads_do_it(tmp_path: Path, calls: list[int], code: int) -> None:
    if 425 not in calls:
        need_io_uring()
    found = run_under_seccomp(calls, code, tmp_path)
    assert found["refusal"] == code
    name = errno.errorcode[code]
    assert "io_backend" in found["forced"]
    assert name in found["forced"]
    assert found["backends"] == ["threads", "threads"]
    assert found["errors"] == [0, 0]
    assert found["same"]
    assert found["lines"] == [["INFO", f"storage I/O by threads (io_uring: {name}: {os.strerror(code)})"]]


def test_one_engine_moves_two_stores(tmp_path: Path, backend: str) -> None:
    queue = CompletionQueue()
    engine = (IoUring if backend == "io_uring" else IoThreads)(queue, 4, 64 << 10, True)
    stores = [uuid.uuid4().bytes for _ in range(2)]
    descriptors = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(2)]
    files = [StoreFile(fd, False, store) for fd, store in zip(descriptors, stores, strict=True)]
    arena = Arena(1 << 20)
    arena.numpy(0, 4096, np.uint8)[:] = 1
    arena.numpy(4096, 4096, np.uint8)[:] = 2
    for number, file in enumerate(files):
        engine.write(file, 1, 0, 0, 0, 1, 0, arena.address + number * 4096, 4096)
        assert queue.wait(60.0)[0][:2] == (1, 0)
    for number, file in enumerate(files):
        engine.read(file, 2, 0, 0, 0, 1, 0, arena.address + 8192, 4096)
        assert queue.wait(60.0)[0][:2] == (2, 0)
        assert (arena.numpy(8192, 4096, np.uint8) == number + 1).all()
    engine.close()
    files.clear()
    del file
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_what_was_asked_for_is_used(tmp_path: Path, backend: str) -> None:
    tier = open_tier(str(tmp_path), uuid.uuid4(), CompletionQueue(), options=StoreOptions(io_backend=backend))
    assert isinstance(tier, FileTier)
    assert tier.io_backend == backend
    tier.close()


def test_the_choice_is_said_once() -> None:
    """Of a process."""
    code = (
        "import logging; logging.basicConfig(level='INFO', format='%(name)s %(levelname)s %(message)s')\n"
        "from offload.tiers.file import choose_io_backend\n"
        "print(*[choose_io_backend() for _ in range(3)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (chosen,) = {*done.stdout.split()}
    (line,) = done.stderr.splitlines()
    assert line.startswith("offload INFO ")
    assert f"by {chosen}" in line


def test_unknown_backends_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="io_backend"):
        open_tier(str(tmp_path), uuid.uuid4(), CompletionQueue(), options=StoreOptions(io_backend="magic"))
    assert os.listdir(tmp_path) == []
    assert [OffloadConfig(io_backend=name).io_backend for name in file_module.IO_BACKENDS] == list(
        file_module.IO_BACKENDS
    )


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
def test_the_depth_that_is_set_is_kept_to(build: Build, backend: str, depth: int) -> None:
    harness = build(f"file-direct/{backend}", depth=2)
    harness.tier.set_depth(depth)
    if backend == "threads":  # each moves one tile at a time
        await_threads({"offload-read": depth, "offload-write": depth})
        return
    tier = harness.tier
    assert isinstance(tier, FileTier)
    pieces = 20
    nbytes = pieces * (64 << 10)
    harness.fill(nbytes)
    assert harness.write(harness.request(0, nbytes)).error == 0
    for kind, move in (("read", harness.read), ("write", harness.write)):
        # The first of a tile's pieces fails, which is known when no more may start: `depth` have by then.
        tier.inject(kind, 1, error=errno.EIO)
        tier.inject(kind, depth + 1, error=errno.ENXIO)
        assert move(harness.request(0, nbytes)).error == errno.EIO
        assert move(harness.request(0, nbytes)).error == errno.ENXIO
        assert move(harness.request(0, nbytes)).error == 0


def test_errors_of_several_pieces_are_reported_as_the_first(build: Build) -> None:
    need_io_uring()
    harness = build("file-direct/io_uring", depth=8)
    nbytes = 512 << 10
    harness.fill(nbytes)
    assert harness.write(harness.request(0, nbytes)).error == 0
    tier = harness.tier
    assert isinstance(tier, FileTier)
    for nth, code in ((7, errno.ENXIO), (4, errno.EIO), (5, errno.EPERM)):
        tier.inject("read", nth, error=code)
    completion = harness.read(harness.request(0, nbytes, at=TARGET))
    assert (completion.error, completion.detail) == (errno.EIO, 4096 + 3 * (64 << 10))
    assert harness.read(harness.request(0, nbytes, at=TARGET)).error == 0


def test_growth_that_fails_holds_up_nobody_else(build: Build, backend: str) -> None:
    harness = build(f"file-direct/{backend}", max_bytes=1 << 20)
    harness.fill(64 << 10)
    pitch = slot_bytes(64 << 10)
    beyond = harness.request(1 << 30, 64 << 10)
    harness.tier.write(beyond)
    good = harness.request(pitch, 64 << 10)
    harness.tier.write(good)
    harness.tier.sync(500)
    errors = {c.op: c.error for c in harness.collect(3)}
    assert errors == {beyond.op: errno.ENOSPC, good.op: 0, 500: 0}


def test_mixed_traffic_with_faults(build: Build, backend: str) -> None:
    rng = np.random.default_rng(0)
    harness = build(f"file-direct/{backend}")
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


def test_no_wake_up_is_lost(build: Build, backend: str) -> None:
    # Submissions that race with the thread's going to sleep must not be lost.
    harness: Harness = build(f"file-tmpfs/{backend}")
    harness.fill(4096)
    for _ in range(2000):
        assert harness.write(harness.request(0, 4096)).error == 0
