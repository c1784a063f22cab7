"""The on-disk format, byte by byte, apart from the code that writes it."""

from __future__ import annotations

import struct
import uuid

import numpy as np
import pytest

from offload import _native
from offload.protocols import ERROR_CHECKSUM, ERROR_HEADER

STORE = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
TILE, STEP, NBYTES = (11, 22, 33), 44, 8192
SLOT = STORE.bytes, TILE, STEP, NBYTES
REFUSED = ERROR_HEADER, None


def build(flags: int, checksum: int, words: int = NBYTES // 4) -> bytes:
    """Make a header from the documented layout alone."""
    body = struct.pack(
        "<8sII16sIIIIQQQ", b"OFFLSLOT", 1, flags, STORE.bytes, *TILE, checksum, STEP, words, NBYTES
    ).ljust(4092, b"\0")
    array = np.frombuffer(body, np.uint8)
    return body + struct.pack("<I", _native.crc32c_portable(array.ctypes.data, 4092))


@pytest.mark.parametrize(("checksum", "flags"), [(0xDEADBEEF, 1), (0, 1), (None, 0)])
def test_the_layout_is_the_documented_one(checksum: int | None, flags: int) -> None:
    raw = _native.make_slot_header(*SLOT, checksum)
    assert raw == build(flags, checksum or 0)
    assert _native.admit_slot_header(raw, *SLOT) == (0, checksum)
    assert _native.admit_slot_header(raw, *SLOT, verify=False) == (0, None)
    assert _native.admit_slot_header(raw, *SLOT, checksum or 0) == (0, checksum)
    assert _native.admit_slot_header(raw, *SLOT, 7, verify=False) == (ERROR_CHECKSUM, None)


def test_elements_that_earlier_versions_wrote_are_not_looked_at() -> None:
    assert _native.admit_slot_header(build(0, 0, 55), *SLOT) == (0, None)


def test_each_field_is_compared() -> None:
    raw = _native.make_slot_header(*SLOT)
    others = [tuple(field + (number == index) for number, field in enumerate(TILE)) for index in range(3)]
    for slot in (
        (uuid.uuid4().bytes, TILE, STEP, NBYTES),
        *((STORE.bytes, other, STEP, NBYTES) for other in others),
        (STORE.bytes, TILE, STEP + 1, NBYTES),
        (STORE.bytes, TILE, STEP, NBYTES + 1),
    ):
        assert _native.admit_slot_header(raw, *slot) == REFUSED  # type: ignore[arg-type]


def test_no_bit_can_change() -> None:
    raw = _native.make_slot_header(*SLOT, 1)
    for position in range(4096):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << (position % 8)
        assert _native.admit_slot_header(bytes(damaged), *SLOT) == REFUSED


@pytest.mark.parametrize(("offset", "value"), [(0, b"OFFLSL0T"), (8, b"\2\0\0\0"), (12, b"\3\0\0\0")])
def test_a_later_format_is_refused_even_when_whole(offset: int, value: bytes) -> None:
    body = bytearray(build(1, 5)[:4092])
    body[offset : offset + len(value)] = value
    array = np.frombuffer(bytes(body), np.uint8)
    raw = bytes(body) + struct.pack("<I", _native.crc32c(array.ctypes.data, 4092))
    assert _native.admit_slot_header(raw, *SLOT) == REFUSED


def test_zeros_are_no_header() -> None:
    assert _native.admit_slot_header(bytes(4096), *SLOT) == REFUSED


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match="4096"):
        _native.admit_slot_header(b"short", *SLOT)
    with pytest.raises(ValueError, match="16 bytes"):
        _native.make_slot_header(b"short", *SLOT[1:])
