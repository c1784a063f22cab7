"""One harness for every tier: a store, its queue, and memory to move tiles from and to."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from _throttled import ThrottledTier
from faulty import FaultyTier
from memory_tier import MemoryTier

from offload._native import CompletionQueue
from offload.memory.arenas import Arena
from offload.protocols import Completion, Tier, TileId, TileRequest
from offload.tiers import FileTier, RemoteTier, StoreOptions, slot_bytes
from offload.tiers.objects import S3Client, split_url

ARENA_BYTES = 8 << 20
TILE = TileId(1, 2, 3)
FILE_KINDS = ["file-direct", "file-buffered", "file-tmpfs"]
"""Places of a directory's tier, with threads."""

KINDS = ["throttled", "memory", "faulty", *FILE_KINDS, "asyncfile", "s3"]


def gather(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tier from options by name, those of `StoreOptions` as one."""
    shared = {field.name for field in dataclasses.fields(StoreOptions)}
    rest = {name: value for name, value in options.items() if name not in shared}
    return {"options": StoreOptions(**{name: options[name] for name in options if name in shared}), **rest}


class Harness:
    """A tier with everything that a test needs around it."""

    def __init__(self, tier: Tier, queue: CompletionQueue) -> None:
        self.tier = tier
        self.queue = queue
        self.arena = Arena(ARENA_BYTES)
        self.ops = 0

    def request(
        self,
        offset: int,
        nbytes: int,
        *,
        at: int = 0,
        tile: TileId = TILE,
        step: int = 7,
        checksum: int | None = None,
    ) -> TileRequest:
        """Return a request between the slot at `offset` and byte `at` of the arena."""
        self.ops += 1
        return TileRequest(
            op=self.ops,
            tile=tile,
            step=step,
            offset=offset,
            address=self.arena.address + at,
            nbytes=nbytes,
            checksum=checksum,
        )

    def fill(self, nbytes: int, seed: int = 0, at: int = 0) -> bytes:
        """Put random bytes into the arena; return them."""
        data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        self.arena.numpy(at, nbytes, np.uint8)[:] = data
        return data.tobytes()

    def bytes_at(self, at: int, nbytes: int) -> bytes:
        """Return what lies in the arena."""
        return self.arena.numpy(at, nbytes, np.uint8).tobytes()

    def collect(self, count: int) -> list[Completion]:
        """Return exactly `count` completions, in order of arrival; there must not be more."""
        found: list[Completion] = []
        while len(found) < count:
            arrived = self.queue.wait(60.0)
            assert arrived, f"only {len(found)} of {count} completions arrived"
            found.extend(Completion(*record) for record in arrived)
        found.extend(Completion(*record) for record in self.queue.wait(0.0))
        assert len(found) == count
        return found

    def write(self, request: TileRequest) -> Completion:
        """Write and wait."""
        self.tier.write(request)
        (completion,) = self.collect(1)
        assert completion.op == request.op
        return completion

    def read(self, request: TileRequest) -> Completion:
        """Read and wait."""
        self.tier.read(request)
        (completion,) = self.collect(1)
        assert completion.op == request.op
        return completion

    def flip(self, offset: int, mask: int = 1) -> None:
        """Damage one byte of the store behind the tier's back."""
        tier = self.tier.inner if isinstance(self.tier, FaultyTier | ThrottledTier) else self.tier
        if isinstance(tier, MemoryTier):
            start, record = next(
                (start, record) for start, record in tier.slots.items() if start <= offset < start + len(record)
            )
            record[offset - start] ^= mask
            return
        if isinstance(tier, RemoteTier):
            start, key = max((start, key) for start, key in objects(tier).items() if start <= offset)
            content = object_content(tier, key)
            content[offset - start] ^= mask
            client_of(tier).put(key, [memoryview(content)])
            return
        assert isinstance(tier, FileTier)
        with open(tier.data_path, "r+b") as file:
            old = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([old[0] ^ mask]), offset)

    def cut(self, end: int) -> None:
        """End the store at byte `end`, as a file that lost its tail does."""
        tier = self.tier.inner if isinstance(self.tier, FaultyTier | ThrottledTier) else self.tier
        if isinstance(tier, MemoryTier):
            tier.cut(end)
            return
        if isinstance(tier, RemoteTier):
            for start, key in objects(tier).items():
                content = object_content(tier, key)
                if start < end:
                    client_of(tier).put(key, [memoryview(content)[: end - start]])
                else:
                    client_of(tier).delete([key])
            return
        assert isinstance(tier, FileTier)
        os.truncate(tier.data_path, end)

    def take_from(self, other: Harness, nbytes: int) -> None:
        """Put the first slot of another store in place of this one's, behind the tiers' backs."""
        ours, theirs = self.tier, other.tier
        if isinstance(ours, RemoteTier):
            assert isinstance(theirs, RemoteTier)
            content = object_content(theirs, objects(theirs)[0])
            client_of(ours).put(objects(ours)[0], [memoryview(content)])
            return
        assert isinstance(ours, FileTier)
        assert isinstance(theirs, FileTier)
        with open(theirs.data_path, "rb") as source, open(ours.data_path, "r+b") as target:
            target.write(source.read(slot_bytes(nbytes)))


def object_content(tier: RemoteTier, key: str) -> bytearray:
    """Return what an object holds."""
    content = bytearray(client_of(tier).head(key) or 0)
    client_of(tier).get_into(key, [memoryview(content)])
    return content


def objects(tier: RemoteTier) -> dict[int, str]:
    """Return the key of the newest object of each slot, by the slot's offset."""
    named = [key for key in client_of(tier).list(tier.store_prefix) if key.rpartition("/")[2].count("-") == 4]
    return {int(key.rpartition("-")[2]): key for key in sorted(named, key=lambda key: int(key.split("-")[-2]))}


@functools.cache
def client_of(tier: RemoteTier) -> S3Client:
    """Return a client of one's own for where a tier's objects are."""
    return S3Client(tier.path, split_url(tier.path)[0])


Build = Callable[..., Harness]
