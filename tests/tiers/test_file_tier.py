"""What is special about a directory: places, locks, processes, system calls that fail."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from leftovers import clear, open_files
from memory_tier import MemoryTier
from tier_harness import FILE_KINDS, Build, Harness, gather

import offload
from offload._native import CompletionQueue, IoThreads, StoreFile
from offload.checkpoint.stores import delete_free, find_stores
from offload.errors import ConfigError, TierError, TierFullError
from offload.memory.arenas import Arena
from offload.protocols import ERROR_CHECKSUM, ERROR_HEADER, ERROR_SHORT, MAX_DEPTH, Completion, TileId
from offload.tiers import (
    FileTier,
    StoreOptions,
    file_system,
    free_bytes,
    identity,
    lock_holder,
    open_tier,
    slot_bytes,
    tier_error,
)
from offload.tiers.filesystem import UNLIMITED_BYTES, hold_lock, is_being_read, release_lock, share_lock, unshare_lock

TARGET = 4 << 20
NBYTES = 200 << 10  # four pieces of 64 KiB, the last one short


def open_file(path: Path | str, **options: object) -> FileTier:
    return FileTier(path, uuid.uuid4(), CompletionQueue(), **gather(options))


def tier_of(harness: Harness) -> FileTier:
    assert isinstance(harness.tier, FileTier)
    return harness.tier


# The place


def test_a_store_comes_and_goes(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("untouched")
    store = uuid.uuid4()
    tier = FileTier(tmp_path, store, CompletionQueue())
    assert sorted(os.listdir(tmp_path)) == ["mine", f"offload-{store}"]
    assert sorted(os.listdir(tier.store_path)) == ["lock", "store.json", "tiles"]
    record = json.loads((tier.store_path / "store.json").read_text())
    assert record == {"format": 1, "uuid": str(store), "pid": os.getpid(), "host": socket.gethostname()}
    assert os.stat(tier.store_path).st_mode & 0o077 == 0
    tier.close()
    assert os.listdir(tmp_path) == ["mine"]


def test_keep_leaves_the_store(tmp_path: Path) -> None:
    tier = open_file(tmp_path)
    tier.keep(())
    tier.close()
    assert sorted(os.listdir(tier.store_path)) == ["lock", "store.json", "tiles"]
    assert lock_holder(tier.store_path) is None


def test_close_deletes_nothing_of_others(tmp_path: Path) -> None:
    tier = open_file(tmp_path)
    (tier.store_path / "notes").write_text("not ours")
    tier.close()
    assert os.listdir(tier.store_path) == ["notes"]


def test_close_after_the_store_was_deleted(tmp_path: Path) -> None:
    tier = open_file(tmp_path)
    for name in os.listdir(tier.store_path):
        (tier.store_path / name).unlink()
    tier.store_path.rmdir()
    tier.close()


def test_the_working_directory_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    tier = open_file("here")
    monkeypatch.chdir("/")
    tier.close()
    assert os.listdir(tmp_path / "here") == []
    assert tier.path == "here"


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory") as caught:
        open_file(tmp_path / "missing")
    assert caught.value.field == "paths"
    assert caught.value.value == str(tmp_path / "missing")
    assert os.listdir(tmp_path) == []


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        open_file(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="make it writable"):
        open_file(tmp_path)
    tmp_path.chmod(0o700)


def test_a_read_only_file_system(mounted: Callable[..., Path]) -> None:
    path = mounted("tmpfs", "ro,size=1m")
    with pytest.raises(ConfigError, match="make it writable") as caught:
        open_file(path)
    assert caught.value.field == "paths"
    assert os.listdir(path) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_bytes": 0},
        {"max_bytes": -1},
        {"depth": 0},
        {"depth": MAX_DEPTH + 1},
        {"piece_bytes": 0},
        {"piece_bytes": 5000},
    ],
    ids=str,
)
def test_sizes_that_cannot_be_used(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_file(tmp_path, **wrong)
    assert caught.value.field == next(iter(wrong))
    assert os.listdir(tmp_path) == []


def test_places_have_an_identity(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert identity(tmp_path / "link") == identity(tmp_path / "b" / ".." / "a")
    assert identity(tmp_path / "a") != identity(tmp_path / "b")
    with pytest.raises(FileNotFoundError):
        identity(tmp_path / "c")


def test_file_systems_have_names(tmp_path: Path, tmpfs: Path) -> None:
    assert file_system(tmpfs) == "tmpfs"
    assert file_system("/proc") == "0x9fa0"
    assert file_system(tmp_path)
    with pytest.raises(FileNotFoundError):
        file_system(tmp_path / "missing")


def test_open_tier_chooses_by_scheme(tmp_path: Path) -> None:
    for path in (str(tmp_path), f"file://{tmp_path}"):
        options = StoreOptions(max_bytes=1 << 20, depth=1)
        tier = open_tier(path, uuid.uuid4(), CompletionQueue(), options=options)
        assert isinstance(tier, FileTier)
        assert tier.free_bytes() == 1 << 20
        tier.close()
    with pytest.raises(ConfigError, match="'ftp'"):
        open_tier("ftp://host/run", uuid.uuid4(), CompletionQueue())


# Locks and processes


def test_the_lock_is_held_until_close(tmp_path: Path) -> None:
    tier = open_file(tmp_path)
    tier.keep(())
    for _ in range(2):  # asking must not give the lock up
        assert lock_holder(tier.store_path) == os.getpid()
        assert holder_seen_by_another(tier.store_path) == os.getpid()
    tier.close()
    assert lock_holder(tier.store_path) is None
    assert holder_seen_by_another(tier.store_path) is None
    assert lock_holder(tmp_path) is None  # no store at all


def test_who_opens_the_lock_file_too_gives_no_lock_up(tmp_path: Path) -> None:
    """As `shutil.copytree` of a run's folder does."""
    lock = hold_lock(tmp_path / "lock")
    readers = [share_lock(tmp_path / "lock") for _ in range(2)]
    for reader in readers:
        (tmp_path / "lock").read_bytes()
        assert holder_seen_by_another(tmp_path) == os.getpid()
        assert reader_seen_by_another(tmp_path)
        assert not is_being_read(tmp_path, own=len(readers))
        unshare_lock(reader)
        readers = readers[1:]
    assert not reader_seen_by_another(tmp_path)
    release_lock(lock)
    assert holder_seen_by_another(tmp_path) is None


def test_a_record_lock_of_an_older_version_counts(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    code = "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX, 1); print(); input()"
    command = [sys.executable, "-uc", code, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as older:
        assert older.stdout is not None
        older.stdout.readline()
        assert lock_holder(tmp_path) == older.pid
        with pytest.raises(BlockingIOError):
            hold_lock(tmp_path / "lock", existing=True)
        older.communicate(b"\n")
    release_lock(hold_lock(tmp_path / "lock", existing=True))


def test_a_lock_goes_that_its_server_does_not_know_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may have an error for whoever asks about a file that somebody has deleted."""
    lock = hold_lock(tmp_path / "lock")
    (descriptor,) = lock.descriptors
    (tmp_path / "lock").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda descriptor: os.stat(tmp_path / "lock"))
        release_lock(lock)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_store_is_ours_where_new_files_have_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS with all_squash, or CIFS with uid=, where all files are one user's, who is not this one."""
    for _ in range(2):
        tier = open_file(tmp_path)
        tier.keep(())
        tier.close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
    if os.getuid() == 0:  # who may give a store away
        os.chown(tier.store_path, 54321, -1)
        *_, found = sorted(find_stores(str(tmp_path)), key=lambda store: store.problem)
        assert (found.path, found.problem) == (str(tier.store_path), "it belongs to the user with number 54321")
    delete_free([str(tmp_path)])
    left = [tier.store_path.name] if os.getuid() == 0 else []
    assert os.listdir(tmp_path) == left


def holder_seen_by_another(store: Path) -> int | None:
    told = told_by_another("lock_holder", store)
    return None if told == "None" else int(told)


def reader_seen_by_another(store: Path) -> bool:
    return told_by_another("is_being_read", store) == "True"


def told_by_another(function: str, store: Path) -> str:
    code = f"import sys; from offload.tiers.filesystem import {function}; print({function}(sys.argv[1]))"
    out = subprocess.run([sys.executable, "-c", code, str(store)], capture_output=True, text=True, check=True)
    return out.stdout.strip()


HOLDER = """
import os, sys, uuid
from offload._native import CompletionQueue
from offload.tiers import FileTier
tier = FileTier(sys.argv[1], uuid.UUID(sys.argv[2]), CompletionQueue())
if os.fork() == 0:
    print(os.getpid(), flush=True)
    sys.stdin.buffer.read()
    os._exit(0)
sys.stdin.buffer.read()
"""


def test_a_killed_process_leaves_its_store_and_no_lock(tmp_path: Path) -> None:
    store = uuid.uuid4()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), str(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    directory = tmp_path / f"offload-{store}"
    assert lock_holder(directory) == holder.pid
    holder.send_signal(signal.SIGKILL)
    assert holder.wait() == -signal.SIGKILL
    os.kill(child, 0)  # a forked child lives on, with every descriptor
    assert lock_holder(directory) is None
    assert sorted(os.listdir(directory)) == ["lock", "store.json", "tiles"]
    holder.stdin.close()
    holder.stdout.close()


def test_a_forked_child_leaves_the_store_alone(tmp_path: Path) -> None:
    tier = open_file(tmp_path)
    child = os.fork()
    if child == 0:
        try:
            tier.close()
            del tier
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert sorted(os.listdir(tier.store_path)) == ["lock", "store.json", "tiles"]
    assert holder_seen_by_another(tier.store_path) == os.getpid()
    tier.close()


def test_threads_take_no_signals(tmp_path: Path) -> None:
    tier = open_file(tmp_path, depth=3)
    expected = [f"offload-{way}{i}" for way in ("read", "write") for i in range(3)]
    blocked: dict[str, int] = {}
    deadline_s = time.monotonic() + 60.0
    while sorted(blocked) != expected and time.monotonic() < deadline_s:  # one that was joined may still be shown
        blocked = {}
        for file in Path("/proc/self/task").glob("*/status"):
            with contextlib.suppress(OSError):  # it has gone
                status = dict(line.split(":\t", 1) for line in file.read_text().splitlines())
                if status["Name"].startswith("offload-"):
                    blocked[status["Name"]] = int(status["SigBlk"], 16)
    assert sorted(blocked) == expected
    wanted = 1 << (signal.SIGINT - 1) | 1 << (signal.SIGTERM - 1) | 1 << (signal.SIGUSR1 - 1)
    assert all(mask & wanted == wanted for mask in blocked.values())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    tier.close()


def test_files_close_on_exec(tmp_path: Path) -> None:
    tier = open_file(tmp_path)
    out = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False)
    assert str(tier.store_path) not in out.stdout
    tier.close()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    clear()
    before = open_files()
    open_file(tmp_path).close()
    with pytest.raises(ConfigError):
        open_file(tmp_path / "missing")
    assert open_files().items() <= before.items()  # what others have left may go meanwhile


def test_waiting_leaves_the_interpreter_free(build: Build) -> None:
    harness = build("file-buffered")
    queue = harness.queue
    arrived: list[list[tuple[int, int, int, float, float]]] = []
    waiter = threading.Thread(target=lambda: arrived.append(queue.wait(60.0)))
    waiter.start()
    harness.fill(4096)
    harness.tier.write(harness.request(0, 4096))  # needs the interpreter while the other thread waits
    waiter.join(60.0)
    assert [record[1] for record in arrived[0]] == [0]


@pytest.mark.parametrize("nbytes", [4096, NBYTES])
def test_checksums_are_the_callers_where_it_has_them(build: Build, nbytes: int) -> None:
    """What an update takes in the processor's cache is not taken again from memory."""
    harness = build("file-direct")
    harness.fill(nbytes)
    assert harness.write(harness.request(0, nbytes, checksum=5)).detail == 5
    request = harness.request(0, nbytes, at=TARGET, checksum=5)
    assert harness.read(request).error == ERROR_CHECKSUM
    completion = harness.read(request._replace(verify=False))
    assert (completion.error, completion.detail) == (0, 0)
    assert harness.read(request._replace(verify=False, checksum=6)).error == ERROR_CHECKSUM


# Growth


def test_the_file_grows_by_extents_up_to_its_limit(build: Build) -> None:
    harness = build("file-direct", max_bytes=300 << 20)
    harness.fill(4096)
    data = tier_of(harness).data_path
    assert os.stat(data).st_size == 0
    assert harness.write(harness.request(0, 4096)).error == 0
    assert os.stat(data).st_size == 256 << 20
    assert harness.write(harness.request(256 << 20, 4096)).error == 0
    assert os.stat(data).st_size == 300 << 20
    assert harness.write(harness.request((300 << 20) - 4096, 4096)).error == errno.ENOSPC


@pytest.mark.parametrize(("kind", "nbytes"), [("tmpfs", 0), ("ext4", 4 << 20)])
def test_a_full_disk(mounted: Callable[..., Path], kind: str, nbytes: int) -> None:
    path = mounted(kind, "size=4m" if kind == "tmpfs" else "defaults", nbytes=nbytes)
    queue = CompletionQueue()
    tier = FileTier(path, uuid.uuid4(), queue)
    harness = Harness(tier, queue)
    size = 512 << 10
    data = harness.fill(size)
    assert tier.free_bytes() <= 4 << 20
    written = 0
    while True:
        request = harness.request(written * slot_bytes(size), size, tile=TileId(0, 0, written))
        completion = harness.write(request)
        if completion.error:
            break
        written += 1
        assert written < 20
    assert written >= 2
    assert completion.error == errno.ENOSPC
    error = tier_error("write", completion, request, tier)
    assert isinstance(error, TierFullError)
    assert "ENOSPC" in str(error)
    assert tier.free_bytes() < slot_bytes(size)
    for index in range(written):  # what was there before is still good
        request = harness.request(index * slot_bytes(size), size, at=TARGET, tile=TileId(0, 0, index))
        assert harness.read(request).error == 0
        assert harness.bytes_at(TARGET, size) == data
    tier.close()
    assert [name for name in os.listdir(path) if name != "lost+found"] == []


@pytest.mark.parametrize("backend", ["threads", "asyncio"])
def test_a_file_system_without_direct_io_that_does_not_say_its_size(
    mounted: Callable[..., Path], backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = mounted("ramfs")
    assert free_bytes([str(path)]) == [UNLIMITED_BYTES]
    queue = CompletionQueue()
    with caplog.at_level("INFO"):
        tier = open_tier(str(path), uuid.uuid4(), queue, options=StoreOptions(io_backend=backend))
    assert tier.cached
    if backend != "asyncio":
        assert "no O_DIRECT (Invalid argument), using the page cache" in caplog.text
    harness = Harness(tier, queue)
    data = harness.fill(NBYTES)
    assert tier.free_bytes() >= UNLIMITED_BYTES
    assert harness.write(harness.request(0, NBYTES)).error == 0
    assert harness.read(harness.request(0, NBYTES, at=TARGET)).error == 0
    assert harness.bytes_at(TARGET, NBYTES) == data
    tier.close()
    assert os.listdir(path) == []


def test_state_whose_two_versions_do_not_fit(mounted: Callable[..., Path]) -> None:
    weight = torch.nn.Parameter(torch.zeros(1 << 18))
    path = mounted("tmpfs", "size=3m")
    settings = {"host_memory": 0, "subgroup_numel": 1 << 16, "staging_memory": 1 << 20}
    with pytest.raises(offload.InfeasiblePlanError, match="versions in flight") as caught:
        offload.AdamW([weight], offload=offload.OffloadConfig(paths=[path], **settings))  # type: ignore[arg-type]
    room = caught.value.available_bytes[str(path)]
    assert 8 << 18 < room < caught.value.needed_bytes  # one version of all state fits
    assert os.listdir(path) == []
    enough = mounted("tmpfs", f"size={caught.value.needed_bytes + (1 << 20)}")
    with offload.AdamW([weight], offload=offload.OffloadConfig(paths=[enough], **settings)) as optimizer:  # type: ignore[arg-type]
        for _ in range(3):
            weight.grad = torch.ones(1 << 18)
            optimizer.step()


def test_no_room_even_for_the_store(mounted: Callable[..., Path]) -> None:
    path = mounted("tmpfs", "size=4k,nr_inodes=3")
    with pytest.raises(TierFullError) as caught:
        open_file(path)
    assert caught.value.operation == "open"
    assert os.listdir(path) == []


# System calls that do less than they were asked


@pytest.fixture(params=FILE_KINDS)
def files(request: pytest.FixtureRequest, build: Build) -> Harness:
    return build(request.param, depth=1)


@pytest.mark.parametrize("limit_bytes", [1, 512, 4095, 4096, 4097, 5000, 60000])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_short_transfers_continue(files: Harness, limit_bytes: int, nth: int) -> None:
    data = files.fill(NBYTES, seed=nth)
    tier = tier_of(files)
    tier.inject("write", nth, limit_bytes=limit_bytes)
    tier.inject("write", nth + 1, limit_bytes=limit_bytes)
    assert files.write(files.request(0, NBYTES)).error == 0
    tier.inject("read", nth, limit_bytes=limit_bytes)
    tier.inject("read", nth + 1, limit_bytes=limit_bytes)
    assert files.read(files.request(0, NBYTES, at=TARGET)).error == 0
    assert files.bytes_at(TARGET, NBYTES) == data


def test_interrupted_calls_are_repeated(files: Harness) -> None:
    data = files.fill(NBYTES)
    for kind in ("read", "write"):
        for nth in (1, 2, 4):
            tier_of(files).inject(kind, nth, error=errno.EINTR)
    assert files.write(files.request(0, NBYTES)).error == 0
    assert files.read(files.request(0, NBYTES, at=TARGET)).error == 0
    assert files.bytes_at(TARGET, NBYTES) == data


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_failed_read_is_reported(files: Harness, nth: int) -> None:
    files.fill(NBYTES)
    assert files.write(files.request(0, NBYTES)).error == 0
    tier_of(files).inject("read", nth, error=errno.EIO)
    request = files.request(0, NBYTES, at=TARGET)
    completion = files.read(request)
    assert completion.error == errno.EIO
    error = tier_error("read", completion, request, files.tier)
    assert type(error) is TierError
    assert "EIO" in str(error)
    assert error.offset == (0 if nth == 1 else 4096 + (nth - 1) * (64 << 10))
    assert files.read(files.request(0, NBYTES, at=TARGET)).error == 0


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_write_that_fails_leaves_no_header(files: Harness, nth: int) -> None:
    files.fill(NBYTES)
    tier_of(files).inject("write", nth, error=errno.EIO)
    assert files.write(files.request(0, NBYTES)).error == errno.EIO
    assert files.read(files.request(0, NBYTES, at=TARGET)).error in (ERROR_HEADER, ERROR_SHORT)
    assert files.write(files.request(0, NBYTES)).error == 0
    assert files.read(files.request(0, NBYTES, at=TARGET)).error == 0


@pytest.mark.parametrize("kind", ["allocate", "write"])
def test_a_full_device_is_reported(files: Harness, kind: str) -> None:
    files.fill(NBYTES)
    tier_of(files).inject(kind, 1, error=errno.ENOSPC)
    request = files.request(0, NBYTES)
    completion = files.write(request)
    assert isinstance(tier_error("write", completion, request, files.tier), TierFullError)
    assert files.write(request).error == 0


def test_a_transfer_that_moves_nothing_ends(files: Harness) -> None:
    files.fill(NBYTES)
    tier_of(files).inject("write", 2, limit_bytes=0)
    assert files.write(files.request(0, NBYTES)).error == errno.EIO
    assert files.write(files.request(0, NBYTES)).error == 0
    tier_of(files).inject("read", 2, limit_bytes=0)
    assert files.read(files.request(0, NBYTES, at=TARGET)).error == ERROR_SHORT


def test_a_failed_sync_is_never_forgotten(files: Harness) -> None:
    files.fill(4096)
    assert files.write(files.request(0, 4096)).error == 0
    tier_of(files).inject("sync", 1, error=errno.EIO)
    for op in (101, 102):
        files.tier.sync(op)
        (completion,) = files.collect(1)
        assert (completion.op, completion.error) == (op, errno.EIO)
        error = tier_error("sync", completion, None, files.tier)
        assert (error.operation, error.offset) == ("sync", None)


def test_faults_are_checked(files: Harness) -> None:
    with pytest.raises(ValueError, match="kind is one of"):
        tier_of(files).inject("seek")
    with pytest.raises(ValueError, match="counts from 1"):
        tier_of(files).inject("read", 0)


def test_a_torn_write_is_noticed(build: Build) -> None:
    # A process that dies while it overwrites a slot that nothing refers to any more.
    harness = build("file-buffered", depth=1)
    data_path = tier_of(harness).data_path

    def stored() -> bytes:
        with open(data_path, "rb") as file:
            return file.read(slot_bytes(NBYTES))

    harness.fill(NBYTES, seed=1)
    assert harness.write(harness.request(0, NBYTES, step=1)).error == 0
    old = stored()
    harness.fill(NBYTES, seed=2)
    assert harness.write(harness.request(0, NBYTES, step=2)).error == 0
    new = stored()
    for cut in range(4096, len(new), 16384):
        for torn in (old[:cut] + new[cut:], new[:cut] + old[cut:]):
            with open(data_path, "r+b") as file:
                file.write(torn)
            for step in (1, 2):
                assert harness.read(harness.request(0, NBYTES, at=TARGET, step=step)).error != 0


def test_in_memory_there_is_no_path() -> None:
    tier = MemoryTier(uuid.uuid4(), CompletionQueue())
    assert tier.path == "memory:"
    tier.close()


def test_a_system_without_threads_to_spare(tmp_path: Path) -> None:
    code = (
        "import os, resource, sys, uuid\n"
        "from offload._native import CompletionQueue\n"
        "from offload.errors import TierError\n"
        "from offload.tiers import FileTier, StoreOptions\n"
        "options = StoreOptions(depth=64, io_backend='threads')\n"
        # The stacks of 64 threads do not fit, so one of them cannot be started.
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), used + (96 << 20)))\n"
        "try:\n"
        "    FileTier(sys.argv[1], uuid.uuid4(), CompletionQueue(), options)\n"
        "except TierError as error:\n"
        "    print(error, os.listdir(sys.argv[1]))\n"
    )
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("open failed on file path")
    assert out.stdout.endswith("[]\n")


def test_threads_never_need_the_interpreter(tmp_path: Path) -> None:
    queue, memory, store = CompletionQueue(), Arena(1 << 20), uuid.uuid4()
    descriptor = os.open(tmp_path / "tiles", os.O_RDWR | os.O_CREAT)
    file = StoreFile(descriptor, False, store.bytes, 0, 1 << 20)
    engine = IoThreads(queue, 4, 64 << 10)
    for index in range(50):
        where = index * slot_bytes(64 << 10), memory.address, 64 << 10
        engine.write(file, index, (0, 0, index), 7, *where)
    del file
    del engine  # the destructor joins, and keeps the interpreter meanwhile
    done: list[Completion] = []
    while len(done) < 50:
        arrived = queue.wait(60.0)
        assert arrived
        done += [Completion(*record) for record in arrived]
    assert all(completion.error == 0 for completion in done)
    memory.close()
