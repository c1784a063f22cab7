"""Faults as data happen where they were asked for, once, and are noticed like real ones."""

from __future__ import annotations

import errno
import uuid

import pytest
from faulty import Fault, FaultKind, FaultyTier
from memory_tier import MemoryTier
from tier_harness import Harness

from offload._native import CompletionQueue
from offload.errors import InternalError
from offload.protocols import ERROR_CHECKSUM, ERROR_HEADER, TileId
from offload.tiers import slot_bytes

TARGET = 4 << 20


def harness_with(*faults: Fault) -> Harness:
    queue = CompletionQueue()
    return Harness(FaultyTier(MemoryTier(uuid.uuid4(), queue), queue, faults), queue)


def test_the_nth_operation_of_a_kind_fails_once() -> None:
    fault = Fault("read", FaultKind.ERROR, nth=2, errno=errno.ENXIO)
    harness = harness_with(fault)
    harness.fill(4096)
    assert harness.write(harness.request(0, 4096)).error == 0
    errors = [harness.read(harness.request(0, 4096, at=TARGET)).error for _ in range(4)]
    assert errors == [0, errno.ENXIO, 0, 0]
    assert isinstance(harness.tier, FaultyTier)
    assert harness.tier.fired == [fault]


def test_faults_of_a_tile_count_its_operations_only() -> None:
    tile = TileId(0, 0, 5)
    harness = harness_with(
        Fault("write", FaultKind.ERROR, nth=2, errno=errno.ENOSPC, tile=tile), Fault("sync", FaultKind.ERROR)
    )
    harness.fill(4096)
    errors = []
    for target in (tile, TileId(0, 0, 6), TileId(0, 0, 6), tile, tile):
        errors.append(harness.write(harness.request(0, 4096, tile=target)).error)
    assert errors == [0, 0, 0, errno.ENOSPC, 0]
    harness.tier.sync(99)
    assert harness.collect(1)[0].error == errno.EIO
    harness.tier.sync(100)
    assert harness.collect(1)[0].error == 0


def test_faults_due_together_happen_one_after_the_other() -> None:
    harness = harness_with(
        Fault("read", FaultKind.ERROR, errno=errno.EIO), Fault("read", FaultKind.ERROR, errno=errno.ENXIO)
    )
    harness.fill(4096)
    assert harness.write(harness.request(0, 4096)).error == 0
    errors = [harness.read(harness.request(0, 4096, at=TARGET)).error for _ in range(3)]
    assert errors == [errno.EIO, errno.ENXIO, 0]


@pytest.mark.parametrize(
    ("kind", "written", "found"),
    [
        (FaultKind.CORRUPT, 0, ERROR_CHECKSUM),
        (FaultKind.TORN, errno.EIO, ERROR_CHECKSUM),
        (FaultKind.MISDIRECTED, 0, ERROR_HEADER),
        (FaultKind.LOST, 0, ERROR_HEADER),
        (FaultKind.ERROR, errno.EIO, ERROR_HEADER),
    ],
)
def test_a_bad_write_stays_bad_until_the_next_one(kind: FaultKind, written: int, found: int) -> None:
    harness = harness_with(Fault("write", kind, nth=2))
    harness.fill(4096, seed=1)
    assert harness.write(harness.request(0, 4096, step=1)).error == 0
    data = harness.fill(4096, seed=2)
    completion = harness.write(harness.request(0, 4096, step=2))
    assert completion.error == written
    for _ in range(2):
        assert harness.read(harness.request(0, 4096, at=TARGET, step=2)).error == found
    assert harness.write(harness.request(0, 4096, step=2)).error == 0
    assert harness.read(harness.request(0, 4096, at=TARGET, step=2)).error == 0
    assert harness.bytes_at(TARGET, 4096) == data


@pytest.mark.parametrize(
    ("kind", "found"), [(FaultKind.CORRUPT, ERROR_CHECKSUM), (FaultKind.MISDIRECTED, ERROR_HEADER)]
)
def test_a_bad_read_is_bad_once(kind: FaultKind, found: int) -> None:
    harness = harness_with(Fault("read", kind))
    harness.fill(4096)
    assert harness.write(harness.request(0, 4096)).error == 0
    assert harness.read(harness.request(0, 4096, at=TARGET)).error == found
    assert harness.read(harness.request(0, 4096, at=TARGET)).error == 0


def test_delayed_operations_wait_for_their_release() -> None:
    harness = harness_with(
        Fault("write", FaultKind.DELAY), Fault("read", FaultKind.DELAY), Fault("sync", FaultKind.DELAY)
    )
    tier = harness.tier
    assert isinstance(tier, FaultyTier)
    data = harness.fill(4096)
    first = harness.request(0, 4096)
    tier.write(first)
    second = harness.write(harness.request(slot_bytes(4096), 4096))
    assert second.error == 0
    tier.sync(50)
    assert tier.held() == [first.op, 50]
    tier.release(first.op)
    assert [c.op for c in harness.collect(1)] == [first.op]
    third = harness.request(0, 4096, at=TARGET)
    tier.read(third)
    assert tier.held() == [50, third.op]
    tier.close()  # lets go of all
    assert [c.op for c in harness.collect(2)] == [50, third.op]
    assert harness.bytes_at(TARGET, 4096) == data


def test_only_what_is_held_can_be_released() -> None:
    harness = harness_with()
    assert isinstance(harness.tier, FaultyTier)
    with pytest.raises(InternalError):
        harness.tier.release(1)
