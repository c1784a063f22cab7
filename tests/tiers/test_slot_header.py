"""The on-disk format, byte by byte, apart from the code that writes it."""

from __future__ import annotations

import struct
import uuid

import numpy as np
import pytest

from offload import _native

STORE = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
FIELDS = (11, 22, 33, 44, 8192)  # subgroup, tensor, tile, step, nbytes


def build(flags: int, checksum: int, words: int = FIELDS[4] // 4) -> bytes:
    """Make a header from the documented layout alone."""
    body = struct.pack(
        "<8sII16sIIIIQQQ", b"OFFLSLOT", 1, flags, STORE.bytes, *FIELDS[:3], checksum, FIELDS[3], words, FIELDS[4]
    ).ljust(4092, b"\0")
    array = np.frombuffer(body, np.uint8)
    return body + struct.pack("<I", _native.crc32c_portable(array.ctypes.data, 4092))


@pytest.mark.parametrize(("checksum", "flags"), [(0xDEADBEEF, 1), (0, 1), (None, 0)])
def test_the_layout_is_the_documented_one(checksum: int | None, flags: int) -> None:
    raw = _native.make_slot_header(STORE.bytes, *FIELDS, checksum)
    assert raw == build(flags, checksum or 0)
    assert _native.parse_slot_header(raw) == (STORE.bytes, *FIELDS, checksum)
    assert _native.check_slot_header(raw, STORE.bytes, *FIELDS)


def test_elements_that_earlier_versions_wrote_are_not_looked_at() -> None:
    raw = build(0, 0, 55)
    assert _native.parse_slot_header(raw) == (STORE.bytes, *FIELDS, None)
    assert _native.check_slot_header(raw, STORE.bytes, *FIELDS)


def test_each_field_is_compared() -> None:
    raw = _native.make_slot_header(STORE.bytes, *FIELDS)
    for index in range(len(FIELDS)):
        other = list(FIELDS)
        other[index] += 1
        assert not _native.check_slot_header(raw, STORE.bytes, *other)
    assert not _native.check_slot_header(raw, uuid.uuid4().bytes, *FIELDS)


def test_no_bit_can_change() -> None:
    raw = _native.make_slot_header(STORE.bytes, *FIELDS, 1)
    for position in range(4096):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << (position % 8)
        assert _native.parse_slot_header(bytes(damaged)) is None


@pytest.mark.parametrize(("offset", "value"), [(0, b"OFFLSL0T"), (8, b"\2\0\0\0"), (12, b"\3\0\0\0")])
def test_a_later_format_is_refused_even_when_whole(offset: int, value: bytes) -> None:
    body = bytearray(build(1, 5)[:4092])
    body[offset : offset + len(value)] = value
    array = np.frombuffer(bytes(body), np.uint8)
    raw = bytes(body) + struct.pack("<I", _native.crc32c(array.ctypes.data, 4092))
    assert _native.parse_slot_header(raw) is None


def test_zeros_are_no_header() -> None:
    assert _native.parse_slot_header(bytes(4096)) is None


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match="4096"):
        _native.parse_slot_header(b"short")
    with pytest.raises(ValueError, match="16 bytes"):
        _native.make_slot_header(b"short", *FIELDS)
