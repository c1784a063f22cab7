"""CRC32C against published values, a table version in plain Python, and itself in parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import _native


def plain(data: bytes, seed: int = 0) -> int:
    """CRC32C a bit at a time, as RFC 3720 defines it."""
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def both(data: bytes, seed: int = 0, skip: int = 0) -> int:
    """Return the checksum of `data[skip:]`, which all implementations must agree on."""
    array = np.frombuffer(data, np.uint8) if data else np.zeros(1, np.uint8)
    address, nbytes = array.ctypes.data + skip, len(data) - skip
    fast = _native.crc32c(address, nbytes, seed)
    assert fast == _native.crc32c_portable(address, nbytes, seed)
    if _native.crc32c_implementation() == "avx512":
        assert fast == _native.crc32c_sse42(address, nbytes, seed)
    return fast


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_published_values(data: bytes, expected: int) -> None:
    assert both(data) == plain(data) == expected


def test_every_length_around_the_streams() -> None:
    data = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8).tobytes()
    for length in [
        *range(300),
        *range(500, 530),
        *range(765, 800),
        *range(1020, 1030),
        3 * 1024 - 1,
        3 * 1024,
        3 * 1024 + 1,
        3071 + 8,
    ]:
        assert both(data[:length], skip=min(3, length)) == plain(data[min(3, length) : length])
    for length in [3 * 16384 + delta for delta in (-9, -8, -1, 0, 1, 7, 8, 3072, 3073)] + [99_999]:
        both(data[:length], seed=length)


@settings(max_examples=60)
@given(a=st.binary(max_size=400), b=st.binary(max_size=400), seed=st.integers(0, 2**32 - 1))
def test_parts_make_the_whole(a: bytes, b: bytes, seed: int) -> None:
    assert both(a + b, seed) == both(b, both(a, seed)) == plain(a + b, seed)
    assert _native.crc32c_combine(both(a), both(b), len(b)) == both(a + b)


def test_combining_long_lengths() -> None:
    # Zeros of 5 GiB would have to be read; combining in two ways must agree instead.
    crc = both(b"some bytes")
    zeros = both(bytes(1 << 16))
    nbytes = 1 << 16
    for _ in range(17):
        zeros = _native.crc32c_combine(zeros, zeros, nbytes)
        nbytes *= 2
    once = _native.crc32c_combine(crc, zeros, nbytes)
    half = both(bytes(1 << 16))
    length = 1 << 16
    for _ in range(16):
        half = _native.crc32c_combine(half, half, length)
        length *= 2
    twice = _native.crc32c_combine(_native.crc32c_combine(crc, half, length), half, length)
    assert once == twice


def test_the_implementation_has_a_name() -> None:
    assert _native.crc32c_implementation() in ("avx512", "sse4.2", "portable")
