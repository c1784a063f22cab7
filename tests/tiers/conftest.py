"""Fixtures of the tier tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from _throttled import ThrottledTier
from faulty import FaultyTier
from memory_tier import MemoryTier
from s3_server import BUCKET
from tier_harness import KINDS, Build, Harness, gather

from offload._native import CompletionQueue
from offload.protocols import Tier
from offload.tiers import FileTier, RemoteTier


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder on a tmpfs."""
    if not os.path.isdir("/dev/shm") or not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs here")
    path = Path(tempfile.mkdtemp(prefix="offload-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def build(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Build]:
    """Makes a harness of a kind: `build(kind, max_bytes=..., ...)`; closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(kind: str, *, store: uuid.UUID | None = None, **options: object) -> Harness:
            queue = CompletionQueue()
            store = store or uuid.uuid4()
            tier: Tier
            if kind in ("memory", "faulty"):
                tier = MemoryTier(store, queue, **options)  # type: ignore[arg-type]
                if kind == "faulty":
                    tier = FaultyTier(tier, queue)
            elif kind == "s3":
                request.getfixturevalue("s3")
                tier = RemoteTier(f"s3://{BUCKET}/{tmp_path.name}", store, queue, **gather(options))
            elif kind == "asyncfile":
                options = {"piece_bytes": 64 << 10, **options, "io_backend": "asyncio"}
                tier = FileTier(tmp_path, store, queue, **gather(options))
            elif kind == "throttled":
                inner_queue = CompletionQueue()
                inner = MemoryTier(store, inner_queue, **options)  # type: ignore[arg-type]
                tier = ThrottledTier(inner, inner_queue, queue, read_bytes_per_s=1e10, write_bytes_per_s=1e10)
            else:
                folder = request.getfixturevalue("tmpfs") if kind == "file-tmpfs" else tmp_path
                options.setdefault("direct", kind == "file-direct")
                options.setdefault("piece_bytes", 64 << 10)
                options.setdefault("io_backend", "threads")
                tier = FileTier(folder, store, queue, **gather(options))
                if kind == "file-direct" and not tier.direct:
                    tier.close()
                    pytest.skip("no O_DIRECT on the file system of the temporary folder")
                stack.callback(tier.close)
                return Harness(tier, queue)
            stack.callback(tier.close)
            return Harness(tier, queue)

        yield make


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of tier in turn."""
    return str(request.param)


@pytest.fixture
def harness(build: Build, kind: str) -> Harness:
    """A harness of each kind in turn, with default options."""
    return build(kind)
