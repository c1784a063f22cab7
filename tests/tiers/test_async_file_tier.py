"""What the asyncio tier does beyond the suite for every tier."""

from __future__ import annotations

import errno
import os
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tier_harness
from tier_harness import Build, Harness, gather

from offload._native import CompletionQueue
from offload.errors import ConfigError, TierFullError
from offload.tiers import FileTier, StoreOptions, asyncfile, filesystem, open_tier, tier_error
from offload.tiers.asyncfile import supports_direct
from offload.tiers.lane import Lane

NBYTES = 256 << 10
TARGET = 4 << 20
ASYNCIO = StoreOptions(io_backend="asyncio")


def opened(path: Path, **options: object) -> str:
    tier = open_tier(str(path), uuid.uuid4(), CompletionQueue(), **gather(options))
    tier.close()
    assert isinstance(tier, FileTier)
    return "asyncio" if tier.io_backend == "asyncio" else "native"


def test_chosen_where_asked_for_or_where_nothing_better_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert opened(tmp_path, io_backend="asyncio") == "asyncio"
    assert opened(tmp_path) == "native"
    monkeypatch.setattr("offload.tiers.directories.supports_direct", lambda directory: False)
    assert opened(tmp_path) == "native"  # a local file system
    for kind in ("nfs", "fuse", "lustre"):
        monkeypatch.setattr("offload.tiers.directories.file_system", lambda directory, kind=kind: kind)
        assert opened(tmp_path) == "asyncio"
        assert opened(tmp_path, io_backend="threads") == "native"
    monkeypatch.setattr("offload.tiers.directories.supports_direct", lambda directory: True)
    assert opened(tmp_path) == "native"
    with pytest.raises(ConfigError, match="no such directory"):
        opened(tmp_path / "absent", io_backend="asyncio")
    assert list(tmp_path.iterdir()) == []


def test_looking_for_direct_io_leaves_nothing_behind(tmp_path: Path, tmpfs: Path) -> None:
    for folder in (tmp_path, tmpfs):
        tier = FileTier(folder, uuid.uuid4(), CompletionQueue())
        assert supports_direct(str(folder)) == tier.direct
        tier.close()
        assert list(folder.iterdir()) == []
    with pytest.raises(OSError, match="No such file"):
        supports_direct(str(tmp_path / "absent"))


@pytest.mark.parametrize("most", [1, 4095, 4097, 50_000])
def test_short_transfers_go_on(build: Build, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    nbytes = 4096 if most == 1 else NBYTES

    class Short(Lane):
        """Makes system calls that stop short."""

        def submit(self, call: Any, *arguments: Any) -> Any:
            if call.func in (os.preadv, os.pwritev):
                descriptor, buffers, offset = call.args
                call = partial(call.func, descriptor, [buffers[0][:most]], offset)
            return super().submit(call, *arguments)

    monkeypatch.setattr(asyncfile, "Lane", Short)
    harness = build("asyncfile")
    data = harness.fill(nbytes)
    assert harness.write(harness.request(0, nbytes)).error == 0
    assert harness.read(harness.request(0, nbytes, at=TARGET)).error == 0
    assert harness.bytes_at(TARGET, nbytes) == data


def test_errors_of_the_system_are_reported(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(Lane):
        """Makes system calls that fail, when it is told to."""

        fails = False

        def submit(self, call: Any, *arguments: Any) -> Any:
            stale = self.fails and call.func in (os.preadv, os.pwritev, os.fdatasync)
            return super().submit(self.refuse if stale else call, *arguments)

        def refuse(self) -> None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(asyncfile, "Lane", Stale)
    harness = build("asyncfile")
    harness.fill(NBYTES)
    assert harness.write(harness.request(0, NBYTES)).error == 0
    monkeypatch.setattr(Stale, "fails", True)
    assert harness.write(harness.request(0, NBYTES)).error == errno.ESTALE
    assert harness.read(harness.request(0, NBYTES)).error == errno.ESTALE
    harness.tier.sync(77)
    assert harness.collect(1)[0].error == errno.ESTALE
    monkeypatch.setattr(Stale, "fails", False)
    harness.tier.sync(78)  # what was lost stays lost
    assert harness.collect(1)[0].error == errno.ESTALE
    assert harness.read(harness.request(0, NBYTES)).error == 0


def test_a_full_file_system(mounted: object, build: Build) -> None:
    folder = mounted("tmpfs", "size=1m")  # type: ignore[operator]
    queue = CompletionQueue()
    tier = FileTier(folder, uuid.uuid4(), queue, ASYNCIO)
    harness = Harness(tier, queue)
    harness.fill(2 << 20)
    request = harness.request(0, 2 << 20)
    completion = harness.write(request)
    assert completion.error == errno.ENOSPC
    assert isinstance(tier_error("write", completion, request, tier), TierFullError)
    tier.close()
    assert list(folder.iterdir()) == []


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(filesystem.fcntl, "lockf", refuses)
    tier = FileTier(tmp_path, uuid.uuid4(), CompletionQueue(), ASYNCIO)
    monkeypatch.undo()
    assert tier.free_bytes() > 0
    tier.close()
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_cannot_be_used(tmp_path: Path) -> None:
    for options in ({"max_bytes": 4096}, {"depth": 0}, {"piece_bytes": 1000}):
        with pytest.raises(ConfigError):
            FileTier(tmp_path, uuid.uuid4(), CompletionQueue(), **gather({**options, "io_backend": "asyncio"}))
    assert list(tmp_path.iterdir()) == []
    assert tier_harness.ARENA_BYTES >= TARGET + NBYTES
