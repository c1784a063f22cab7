"""What every tier must do, the fakes included."""

from __future__ import annotations

import errno
import os
import random
import uuid

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tier_harness import Build, Harness

from offload._native import crc32c_portable
from offload.errors import ConfigError, CorruptRecordError, InternalError, TierClosedError, TierError, TierFullError
from offload.protocols import ERROR_CHECKSUM, ERROR_HEADER, ERROR_SHORT, MAX_DEPTH, SECTOR_BYTES, TileId
from offload.tiers import SLOT_HEADER_BYTES, slot_bytes, tier_error

SIZES = [4096, 8192, 60 << 10, 64 << 10, 68 << 10, 128 << 10, (1 << 20) + 4096]
TARGET = 4 << 20  # where in the arena reads go

relaxed = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_was_written_is_read_bit_for_bit(harness: Harness, nbytes: int) -> None:
    data = harness.fill(nbytes, seed=nbytes)
    written = harness.write(harness.request(0, nbytes))
    assert written.error == 0
    assert written.detail == crc32c_portable(harness.arena.address, nbytes)
    assert 0 < written.started_s <= written.finished_s

    found = harness.read(harness.request(0, nbytes, at=TARGET, checksum=written.detail))
    assert (found.error, found.detail) == (0, written.detail)
    assert harness.bytes_at(TARGET, nbytes) == data


@relaxed
@given(
    slots=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_slots_do_not_touch_each_other(harness: Harness, slots: list[int], order: random.Random) -> None:
    plan = []
    offset = at = 0
    for index, sectors in enumerate(slots):
        nbytes = sectors * SECTOR_BYTES
        plan.append((offset, nbytes, at, harness.fill(nbytes, seed=index, at=at)))
        offset += slot_bytes(nbytes)
        at += nbytes
    for index in order.sample(range(len(plan)), len(plan)):
        offset, nbytes, at, _ = plan[index]
        harness.tier.write(harness.request(offset, nbytes, at=at, tile=TileId(index, 0, 0)))
    assert all(c.error == 0 for c in harness.collect(len(plan)))
    for index in order.sample(range(len(plan)), len(plan)):
        offset, nbytes, at, _ = plan[index]
        harness.tier.read(harness.request(offset, nbytes, at=TARGET + at, tile=TileId(index, 0, 0)))
    assert all(c.error == 0 for c in harness.collect(len(plan)))
    for _, nbytes, at, data in plan:
        assert harness.bytes_at(TARGET + at, nbytes) == data


def test_many_in_flight_complete_once_each(harness: Harness) -> None:
    nbytes, count = 16 << 10, 200
    data = harness.fill(count * nbytes)
    half = count // 2
    pitch = slot_bytes(nbytes)
    ops = []
    for index in range(half):
        request = harness.request(index * pitch, nbytes, at=index * nbytes, tile=TileId(0, 0, index))
        ops.append(request.op)
        harness.tier.write(request)
    assert sorted(c.op for c in harness.collect(half)) == ops

    ops = []
    for index in range(half):  # both directions at once
        new = harness.request(
            (half + index) * pitch, nbytes, at=(half + index) * nbytes, tile=TileId(0, 0, half + index)
        )
        harness.tier.write(new)
        old = harness.request(index * pitch, nbytes, at=TARGET + index * nbytes, tile=TileId(0, 0, index))
        harness.tier.read(old)
        ops += [new.op, old.op]
    completions = harness.collect(count)
    assert sorted(c.op for c in completions) == ops
    assert all(c.error == 0 for c in completions)
    assert harness.bytes_at(TARGET, half * nbytes) == data[: half * nbytes]


@pytest.mark.parametrize(
    "wrong",
    [
        {"tile": TileId(9, 2, 3)},
        {"tile": TileId(1, 9, 3)},
        {"tile": TileId(1, 2, 9)},
        {"step": 6},
        {"step": 8},
    ],
    ids=str,
)
def test_another_tile_or_version_is_refused(harness: Harness, wrong: dict[str, object]) -> None:
    harness.fill(8192)
    assert harness.write(harness.request(0, 8192)).error == 0
    completion = harness.read(harness.request(0, 8192, at=TARGET, **wrong))  # type: ignore[arg-type]
    assert completion.error == ERROR_HEADER
    assert isinstance(tier_error("read", completion, None, harness.tier), CorruptRecordError)
    assert harness.read(harness.request(0, 8192, at=TARGET)).error == 0


def test_another_length_is_refused(harness: Harness) -> None:
    harness.fill(8192)
    assert harness.write(harness.request(0, 8192)).error == 0
    assert harness.read(harness.request(0, 4096, at=TARGET)).error == ERROR_HEADER


def test_another_store_is_refused(build: Build, kind: str) -> None:
    if kind in ("memory", "faulty", "throttled"):
        pytest.skip("stores in memory share nothing")
    ours, theirs = build(kind), build(kind)
    for harness in (ours, theirs):
        harness.fill(8192)
        assert harness.write(harness.request(0, 8192)).error == 0
    ours.take_from(theirs, 8192)
    assert ours.read(ours.request(0, 8192, at=TARGET)).error == ERROR_HEADER
    assert theirs.read(theirs.request(0, 8192, at=TARGET)).error == 0


def test_an_older_payload_under_the_right_name_is_refused(harness: Harness) -> None:
    harness.fill(8192)
    written = harness.write(harness.request(0, 8192))
    completion = harness.read(harness.request(0, 8192, at=TARGET, checksum=written.detail ^ 1))
    assert completion.error == ERROR_CHECKSUM


def test_a_slot_that_was_never_written_is_refused(harness: Harness) -> None:
    harness.fill(8192)
    assert harness.write(harness.request(slot_bytes(8192), 8192)).error == 0
    assert harness.read(harness.request(0, 8192, at=TARGET)).error in (ERROR_HEADER, ERROR_SHORT)
    beyond = harness.request(1 << 30, 8192, at=TARGET)
    assert harness.read(beyond).error == ERROR_SHORT


def test_each_damaged_header_byte_is_noticed(harness: Harness) -> None:
    offset = slot_bytes(4096)
    harness.fill(8192)
    assert harness.write(harness.request(offset, 8192)).error == 0
    for position in [*range(80), 1000, 4091, *range(4092, 4096)]:
        mask = 1 << (position % 8)
        harness.flip(offset + position, mask)
        completion = harness.read(harness.request(offset, 8192, at=TARGET))
        assert completion.error == ERROR_HEADER, position
        assert completion.detail == offset
        harness.flip(offset + position, mask)
    assert harness.read(harness.request(offset, 8192, at=TARGET)).error == 0


@relaxed
@given(position=st.integers(0, (68 << 10) - 1), bit=st.integers(0, 7))
def test_each_damaged_payload_bit_is_noticed(harness: Harness, position: int, bit: int) -> None:
    nbytes = 68 << 10  # two pieces
    harness.fill(nbytes)
    assert harness.write(harness.request(0, nbytes)).error == 0
    harness.flip(SLOT_HEADER_BYTES + position, 1 << bit)
    request = harness.request(0, nbytes, at=TARGET)
    completion = harness.read(request)
    assert completion.error == ERROR_CHECKSUM
    error = tier_error("read", completion, request, harness.tier)
    assert isinstance(error, CorruptRecordError)
    assert "subgroup 1, tensor 2, tile 3, step 7" in str(error)


@pytest.mark.parametrize("end", [0, 2048, 4096, 4096 + 512, 8192, 70000, (68 << 10) + 4096 - 1])
def test_a_store_that_was_cut_is_noticed(harness: Harness, end: int) -> None:
    nbytes = 68 << 10
    harness.fill(nbytes)
    assert harness.write(harness.request(0, nbytes)).error == 0
    harness.cut(end)
    request = harness.request(0, nbytes, at=TARGET)
    completion = harness.read(request)
    assert completion.error == ERROR_SHORT
    assert isinstance(tier_error("read", completion, request, harness.tier), CorruptRecordError)


def test_a_reader_that_verifies_the_payload_itself_still_has_the_header_verified(harness: Harness) -> None:
    """Whether the tier looks at the payload too is its own choice."""
    data = harness.fill(128 << 10)
    written = harness.write(harness.request(0, 128 << 10)).detail
    request = harness.request(0, 128 << 10, at=TARGET, checksum=written)._replace(verify=False)
    assert harness.read(request).error == 0
    assert harness.bytes_at(TARGET, 128 << 10) == data
    assert harness.read(request._replace(checksum=written ^ 1)).error == ERROR_CHECKSUM
    assert harness.read(request._replace(step=8)).error == ERROR_HEADER
    harness.flip(SLOT_HEADER_BYTES + (70 << 10))
    assert harness.read(request._replace(verify=True)).error == ERROR_CHECKSUM


def test_a_checksum_that_the_writer_knows_is_the_payloads(harness: Harness) -> None:
    data = np.frombuffer(harness.fill(128 << 10), np.uint8)
    known = crc32c_portable(data.ctypes.data, data.nbytes)
    assert harness.write(harness.request(0, 128 << 10, checksum=known)).detail == known
    completion = harness.read(harness.request(0, 128 << 10, at=TARGET, checksum=known))
    assert (completion.error, completion.detail) == (0, known)


def test_without_checksums_headers_still_count(harness: Harness) -> None:
    data = harness.fill(128 << 10)
    assert harness.write(harness.request(0, 128 << 10)._replace(verify=False)).detail == 0
    completion = harness.read(harness.request(0, 128 << 10, at=TARGET))
    assert (completion.error, completion.detail) == (0, 0)
    assert harness.bytes_at(TARGET, 128 << 10) == data
    harness.flip(SLOT_HEADER_BYTES + 5)
    assert harness.read(harness.request(0, 128 << 10, at=TARGET)).error == 0
    assert harness.read(harness.request(0, 128 << 10, at=TARGET, step=8)).error == ERROR_HEADER
    harness.flip(40)
    assert harness.read(harness.request(0, 128 << 10, at=TARGET)).error == ERROR_HEADER


def test_a_slot_can_be_used_again(harness: Harness) -> None:
    harness.fill(8192, seed=1)
    assert harness.write(harness.request(0, 8192, step=1)).error == 0
    data = harness.fill(8192, seed=2)
    assert harness.write(harness.request(0, 8192, step=2)).error == 0
    assert harness.read(harness.request(0, 8192, at=TARGET, step=1)).error == ERROR_HEADER
    assert harness.read(harness.request(0, 8192, at=TARGET, step=2)).error == 0
    assert harness.bytes_at(TARGET, 8192) == data


def test_the_largest_names_fit(harness: Harness) -> None:
    tile = TileId(2**32 - 1, 2**32 - 1, 2**32 - 1)
    harness.fill(4096)
    assert harness.write(harness.request(0, 4096, tile=tile, step=2**64 - 1)).error == 0
    assert harness.read(harness.request(0, 4096, at=TARGET, tile=tile, step=2**64 - 1)).error == 0


def test_sync_comes_after_the_writes_before_it(harness: Harness) -> None:
    harness.fill(64 << 10)
    for _ in range(5):
        ops = []
        for index in range(6):
            request = harness.request(index * slot_bytes(64 << 10), 64 << 10)
            ops.append(request.op)
            harness.tier.write(request)
        harness.ops += 1
        harness.tier.sync(harness.ops)
        completions = harness.collect(7)
        assert all(c.error == 0 for c in completions)
        assert completions[-1].op == harness.ops


@pytest.mark.parametrize("depth", [1, 3, MAX_DEPTH])
def test_any_depth_moves_the_same_bytes(harness: Harness, depth: int) -> None:
    nbytes, count = 60 << 10, 24
    pitch = slot_bytes(nbytes)
    for turn, allowed in enumerate((depth, 2, depth)):  # changed in between too
        harness.tier.set_depth(allowed)
        assert harness.tier.depth == allowed
        data = harness.fill(count * nbytes, seed=turn)
        for way, target in ((harness.tier.write, 0), (harness.tier.read, TARGET)):
            for index in range(count):
                tile = TileId(0, 0, index)
                way(harness.request(index * pitch, nbytes, at=target + index * nbytes, tile=tile, step=turn))
            if not target:
                harness.ops += 1
                harness.tier.sync(harness.ops)
            assert not any(c.error for c in harness.collect(count + (not target)))
        assert harness.bytes_at(TARGET, count * nbytes) == data


@pytest.mark.parametrize("depth", [0, -1, MAX_DEPTH + 1])
def test_depths_that_cannot_be(harness: Harness, depth: int) -> None:
    before = harness.tier.depth
    with pytest.raises(ConfigError, match=f"depth: {depth} "):
        harness.tier.set_depth(depth)
    assert harness.tier.depth == before
    harness.fill(4096)
    assert harness.write(harness.request(0, 4096)).error == 0


def test_free_bytes_counts_down_to_full(build: Build, kind: str) -> None:
    pitch = slot_bytes(64 << 10)
    harness = build(kind, max_bytes=2 * pitch)
    harness.fill(64 << 10)
    assert harness.tier.free_bytes() == 2 * pitch
    assert harness.write(harness.request(pitch, 64 << 10)).error == 0
    assert harness.tier.free_bytes() == 0
    assert harness.write(harness.request(0, 64 << 10)).error == 0
    request = harness.request(2 * pitch, 64 << 10)
    completion = harness.write(request)
    assert completion.error == errno.ENOSPC
    error = tier_error("write", completion, request, harness.tier)
    assert isinstance(error, TierFullError)
    assert error.offset == 2 * pitch
    assert harness.tier.path in str(error)
    assert harness.read(harness.request(0, 64 << 10, at=TARGET)).error == 0


def test_free_bytes_without_a_limit(harness: Harness) -> None:
    assert harness.tier.free_bytes() > 0


def test_requests_must_be_aligned(harness: Harness) -> None:
    for request in (
        harness.request(512, 4096),
        harness.request(0, 4096, at=512),
        harness.request(0, 512),
        harness.request(-4096, 4096),
    ):
        with pytest.raises(InternalError):
            harness.tier.write(request)
        with pytest.raises(InternalError):
            harness.tier.read(request)
    harness.collect(0)


def test_close_finishes_what_is_in_flight(harness: Harness) -> None:
    harness.fill(64 << 10)
    for index in range(20):
        harness.tier.write(harness.request(index * slot_bytes(64 << 10), 64 << 10))
    harness.tier.close()
    completions = harness.collect(20)
    assert all(c.error == 0 for c in completions)


def test_use_after_close(harness: Harness) -> None:
    harness.tier.close()
    harness.tier.close()
    request = harness.request(0, 4096)
    for use in (
        lambda: harness.tier.read(request),
        lambda: harness.tier.write(request),
        lambda: harness.tier.sync(1),
        lambda: harness.tier.set_depth(1),
        harness.tier.free_bytes,
    ):
        with pytest.raises(TierClosedError):
            use()
    harness.collect(0)


def test_a_forked_child_cannot_use_the_tier(harness: Harness) -> None:
    data = harness.fill(8192)
    assert harness.write(harness.request(0, 8192)).error == 0
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                harness.tier.free_bytes()
            except TierClosedError:
                harness.tier.close()
                harness.tier.close()
                harness.tier = None  # type: ignore[assignment]  # run the destructors
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert harness.read(harness.request(0, 8192, at=TARGET)).error == 0
    assert harness.bytes_at(TARGET, 8192) == data


def test_errors_say_where_and_what(harness: Harness) -> None:
    request = harness.request(8192, 4096)
    completion_type = type(harness.read(request))
    for code, kind_of_error in [
        (errno.EIO, TierError),
        (errno.EDQUOT, TierFullError),
        (errno.EFBIG, TierFullError),
        (ERROR_SHORT, CorruptRecordError),
        (ERROR_CHECKSUM, CorruptRecordError),
        (-99, CorruptRecordError),
    ]:
        error = tier_error("read", completion_type(1, code, 0, 0.0, 0.0), request, harness.tier)
        assert type(error) is kind_of_error
        assert error.offset == 8192
        assert error.errno == (code if code > 0 else None)
        assert "subgroup 1, tensor 2, tile 3, step 7" in str(error)
    with pytest.raises(InternalError):
        tier_error("read", completion_type(1, 0, 0, 0.0, 0.0), request, harness.tier)


def test_stores_have_names_of_their_own(build: Build, kind: str) -> None:
    store = uuid.uuid4()
    first = build(kind, store=store)
    if kind in ("memory", "faulty", "throttled"):
        pytest.skip("stores in memory share nothing")
    with pytest.raises(TierError) as caught:
        build(kind, store=store)
    assert caught.value.errno == errno.EEXIST
    first.fill(4096)
    assert first.write(first.request(0, 4096)).error == 0
