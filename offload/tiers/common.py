"""What every tier needs: lifetime, checks of sizes, requests and headers, and the error that a failure stands for."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from offload import waits
from offload._native import admit_slot_header, crc32c, crc32c_combine, make_slot_header
from offload.errors import (
    CheckpointError,
    ConfigError,
    CorruptRecordError,
    TierClosedError,
    TierError,
    TierFullError,
    invariant,
)
from offload.protocols import (
    ERROR_CHECKSUM,
    ERROR_HEADER,
    ERROR_SHORT,
    MAX_DEPTH,
    SECTOR_BYTES,
    Completion,
    TileRequest,
)

DEFAULT_EXTENT_BYTES = 256 << 20

_log = logging.getLogger("offload")

SLOT_HEADER_BYTES = SECTOR_BYTES
"""Bytes in front of a slot's payload; csrc/io/header.h describes them."""

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""System errors that mean that a path has no room: device, quota, largest file."""

FILE_PIECE_BYTES = 1 << 20
"""Bytes of a file that are in memory at a time while it is copied."""

_CORRUPT = {
    ERROR_HEADER: "the slot's header is damaged or belongs to another tile, step or store",
    ERROR_CHECKSUM: "the payload does not have the checksum that was recorded for it",
    ERROR_SHORT: "the store ends before the slot does, or has lost it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How a tier takes turns on its path.

    Attributes:
        path: Directory whose identity names the lock; None for the tier's own path. Ranks that write to different
            subdirectories of one path take turns on the path.
        holders: Processes that may have a turn at once; the same number in all processes.
        turn_bytes: Most bytes that a turn moves while another process is waiting; also most bytes in flight at once
            (a larger request goes alone). At each end of a turn the path is idle for a moment.
        report_after_s: How long to wait for a turn before a warning names the process that has it.
    """

    path: str | None = None
    holders: int = 1
    turn_bytes: int = 64 << 20
    report_after_s: float = waits.QUIET_S


class FileBytes:
    """The content of an open file as if it were in memory: each part is read when it is used.

    Args:
        descriptor: Of the file; the caller closes it.
        nbytes: Size of the content.
        first: Where the content begins in the file.

    Raises:
        CheckpointError: From any read, if the file has become shorter.
    """

    def __init__(self, descriptor: int, nbytes: int, first: int = 0) -> None:
        self._descriptor = descriptor
        self._nbytes = nbytes
        self._first = first

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> memoryview:
        """Read a part of the content, whose slice has no step; a system call may return less than was asked for."""
        start, stop, _ = part.indices(self._nbytes)
        content = memoryview(bytearray(stop - start))
        done = 0
        while done < len(content):
            read_bytes = os.preadv(self._descriptor, [content[done:]], self._first + start + done)
            if not read_bytes:  # the file ends here, although it had this part when its size was taken
                raise CheckpointError("it became shorter while it was copied")
            done += read_bytes
        return content

    def part(self, start: int, stop: int) -> FileBytes:
        """Return a part of the content, which is likewise read when it is used."""
        return FileBytes(self._descriptor, min(stop, self._nbytes) - start, self._first + start)

    def __iter__(self) -> Iterator[memoryview]:
        """Read and yield the content piece by piece."""
        for start in range(0, self._nbytes, FILE_PIECE_BYTES):
            yield self[start : start + FILE_PIECE_BYTES]


@contextlib.contextmanager
def filling(descriptor: int, nbytes: int) -> Iterator[memoryview]:
    """Make an empty file `nbytes` long, and yield its content: what is written to it goes to the file.

    Raises:
        OSError: The disk is full.
    """
    if not nbytes:  # the system maps no empty file
        yield memoryview(b"")
        return
    # Allocated first: on a full disk, a write to mapped memory kills the process (SIGBUS) instead of raising.
    os.posix_fallocate(descriptor, 0, nbytes)
    with mmap.mmap(descriptor, nbytes) as content, memoryview(content) as whole:
        yield whole


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store is opened, on any path.

    Attributes:
        max_bytes: Most that the store may grow to; None for no limit.
        extent_bytes: The step in which a directory's store grows; no more than it is expected to need in all.
        depth: Requests in flight for each direction, 1 to `MAX_DEPTH`; None for the tier's default.
        turns: Take turns on the path with other processes (with threads only; else a warning says that nobody does);
            None for no lock.
        io_backend: How directories are read and written: "threads", "asyncio", or "auto": threads, with asyncio for
            network and parallel file systems without O_DIRECT. "io_uring" is taken as "threads".
        used_bytes: Take over an existing store whose session has ended, and whose first `used_bytes` are divided
            into slots; `close` does not delete it. With threads only. None for a new store.
    """

    max_bytes: int | None = None
    extent_bytes: int = DEFAULT_EXTENT_BYTES
    depth: int | None = None
    turns: Turns | None = None
    io_backend: str = "auto"
    used_bytes: int | None = None


DEFAULTS = StoreOptions()


class NamedPath(Protocol):
    """The attributes of a tier that messages name."""

    name: str
    path: str


@runtime_checkable
class Explaining(Protocol):
    """A tier that knows more about a failed operation than a number can say."""

    def explain(self, op: int) -> str:
        """Return, once, what is known about a failed operation; "" for nothing."""


class Owned:
    """Base of tiers that end with `close` and belong to the process that opened them.

    Args:
        path: The path as the user wrote it.

    Attributes:
        kept: Offsets of slots: `close` leaves the store in place, with at least these slots. None: `close` deletes
            the store.
    """

    name: str
    paid = False

    def __init__(self, path: str) -> None:
        self.path = path
        self.kept: frozenset[int] | None = None
        self._pid = os.getpid()
        self._closed = False

    def check_in_place(self) -> None:
        """Do nothing: no other store can take this one's place."""

    def keep(self, offsets: Collection[int]) -> None:
        """Let `close` keep the store, and in it the slots at these offsets."""
        self.kept = frozenset(offsets)

    def check_open(self, operation: str) -> None:
        """Raise `TierClosedError` where the tier has been closed, or belongs to another process."""
        if self._closed:
            raise closed_error(operation, self)
        if os.getpid() != self._pid:
            raise closed_error(operation, self, foreign=True)

    @contextlib.contextmanager
    def raising_tier_error(self, operation: str) -> Iterator[None]:
        """Turn errors of the system within this context into a `TierError` about `operation`."""
        try:
            yield
        except OSError as cause:
            raise system_error(operation, cause, self) from cause
        except RuntimeError as cause:  # no more threads, or descriptors
            raise TierError(operation, tier=self.name, path=self.path, detail=str(cause)) from cause

    def mark_closed(self) -> bool:
        """Mark the tier as closed; return whether the caller has to free its resources.

        That is so at the first call, in the process that opened the tier; a forked child frees nothing.
        """
        is_first = not self._closed
        self._closed = True
        return is_first and os.getpid() == self._pid


def check_options_without_threads(path: str, options: StoreOptions, why_no_turns: str) -> None:
    """Raise if `options` take a store over, and warn if they ask for turns: only a `FileTier` with threads can."""
    if options.used_bytes is not None:
        detail = "stores are taken over on local file systems only"
        raise TierError("take over", tier="storage", path=path, detail=detail)
    if options.turns is not None:
        _log.warning("path_lock has no effect on %s: %s", path, why_no_turns)


def check_limits(max_bytes: int | None, depth: int, piece_bytes: int = SECTOR_BYTES) -> None:
    """Raise `ConfigError` unless a tier can be opened with these sizes; `max_bytes` None is no limit.

    A tier that does not cut its transfers into pieces leaves `piece_bytes` out: the default is always accepted.
    """
    if max_bytes is not None and max_bytes < 2 * SECTOR_BYTES:  # the smallest slot: a header and one sector
        raise ConfigError("max_bytes", max_bytes, f"allow at least {2 * SECTOR_BYTES} bytes, or None")
    check_depth(depth)
    if piece_bytes < SECTOR_BYTES or piece_bytes % SECTOR_BYTES or piece_bytes > 1 << 30:
        raise ConfigError("piece_bytes", piece_bytes, "use a multiple of 4096 of at most 1 GiB")


def check_depth(depth: int) -> None:
    """Raise `ConfigError` unless a tier may have so many requests of a direction in flight."""
    if not 1 <= depth <= MAX_DEPTH:
        raise ConfigError("depth", depth, f"use 1 to {MAX_DEPTH}")


def verify_header(header: bytes, store: bytes, request: TileRequest) -> tuple[int, int | None]:
    """Compare a slot's header, as it was read, with the request; return (error, checksum of the payload).

    The error is 0; `ERROR_HEADER` if the header is damaged, or is not that of the requested tile and version in the
    store of uuid `store`; or `ERROR_CHECKSUM` if it has another checksum than the request. The checksum is for
    `verify_payload`; None after an error, if the header has none, or if nobody wants the payload verified.
    """
    # Verified even where the caller will do that again (`checksum` without `verify`): the tier can still read a
    # payload again that was damaged in transfer.
    verifies = request.verify or request.checksum is not None
    return admit_slot_header(header, store, request.tile, request.step, request.nbytes, request.checksum, verifies)


def verify_payload(request: TileRequest, expected: int) -> tuple[int, int]:
    """Compute the CRC32C of a payload that was read; return (error, CRC32C).

    The error is `ERROR_CHECKSUM` if the header has another checksum (`expected`), else 0.
    """
    checksum = crc32c(request.address, request.nbytes)
    error = 0 if checksum == expected else ERROR_CHECKSUM
    return error, checksum


def make_header(store: bytes, request: TileRequest) -> tuple[bytes, int | None]:
    """Return the header of a tile that is to be written, and the payload's checksum in it; None for no checksum."""
    checksum = None
    if request.verify:  # the header gets a checksum, which is computed here if the caller does not know it
        checksum = crc32c(request.address, request.nbytes) if request.checksum is None else request.checksum
    return make_slot_header(store, request.tile, request.step, request.nbytes, checksum), checksum


def digest_of_slot(header: bytes, checksum: int | None, nbytes: int) -> int | None:
    """Return the CRC32C of a header followed by its payload of `nbytes`, without reading the payload again.

    `checksum` is the payload's own CRC32C; the result is None if it is None.
    """
    return None if checksum is None else crc32c_combine(digest_of(header), checksum, nbytes)


def digest_of(content: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC32C of bytes; to go on from earlier bytes, give their CRC32C as `before`."""
    # `crc32c` takes an address, which numpy knows of bytes in place; numpy refuses to wrap none.
    return crc32c(np.frombuffer(content, np.uint8).ctypes.data, len(content), before) if content else before


def slot_bytes(nbytes: int) -> int:
    """Return the bytes that a slot for `nbytes` of payload takes in a store, header included."""
    return SLOT_HEADER_BYTES + -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES


def check_request(request: TileRequest) -> None:
    """Raise `InternalError` unless a request is aligned as `TileRequest` says it has to be."""
    offset, address, nbytes = request.offset, request.address, request.nbytes
    # A sector is a power of two: the three are multiples of it if the bits of all of them together are.
    if offset >= 0 and address > 0 and nbytes >= 0 and not (offset | address | nbytes) % SECTOR_BYTES:
        return  # before any message is made: this runs for every tile
    invariant(offset >= 0 and offset % SECTOR_BYTES == 0, f"unaligned slot: {request}")
    invariant(address > 0 and address % SECTOR_BYTES == 0, f"unaligned buffer: {request}")
    invariant(False, f"unaligned length: {request}")  # the only one of the three that is left


def memory_of(request: TileRequest) -> memoryview:
    """Return the memory that a request reads or writes, without a copy; the request's caller keeps it alive."""
    # ctypes wraps memory at an address as an array of chars; the cast makes plain bytes of these.
    return memoryview((ctypes.c_char * request.nbytes).from_address(request.address)).cast("B")


def describe(request: TileRequest) -> str:
    """Return a tile's name for messages."""
    subgroup, tensor, tile = request.tile
    return f"subgroup {subgroup}, tensor {tensor}, tile {tile}, step {request.step}"


def closed_error(operation: str, tier: NamedPath, *, foreign: bool = False) -> TierClosedError:
    """Return the error for using a tier after `close`, or in another process than the one that made it."""
    detail = "it belongs to the process that opened it" if foreign else "it has been closed"
    return TierClosedError(operation, tier=tier.name, path=tier.path, detail=detail)


def system_error(operation: str, cause: OSError, tier: NamedPath) -> TierError:
    """Return the error to raise for a failed system call; `TierFullError` if there was no room."""
    error_class = TierFullError if cause.errno in FULL_ERRNOS else TierError
    return error_class(
        operation, tier=tier.name, path=tier.path, errno=cause.errno, detail=cause.strerror or str(cause)
    )


def tier_error(operation: str, completion: Completion, request: TileRequest | None, tier: NamedPath) -> TierError:
    """Return the error to raise for a failed completion of an operation: "read", "write" or "sync" (no `request`).

    The tier is asked to explain the failure, if it can, which it does once only.

    Returns:
        `TierFullError` if there was no room, `CorruptRecordError` if what was read is not what was written, else a
        plain `TierError` with the system's error number.
    """
    invariant(completion.error != 0, "an error was made from a completion that succeeded")
    # The detail of a failure is the offset where it happened; 0 if the tier does not know.
    offset = None if request is None else completion.detail or request.offset
    detail = describe(request) if request is not None else ""
    reason = tier.explain(completion.op) if isinstance(tier, Explaining) else ""
    if reason:
        detail = f"{detail}: {reason}" if detail else reason
    if completion.error < 0:  # an error of ours; the system's are positive
        damage = _CORRUPT.get(completion.error, f"unknown error {completion.error}")
        detail = f"{detail}: {damage}" if detail else damage
        return CorruptRecordError(operation, tier=tier.name, path=tier.path, offset=offset, detail=detail)
    error_class = TierFullError if completion.error in FULL_ERRNOS else TierError
    return error_class(
        operation, tier=tier.name, path=tier.path, offset=offset, errno=completion.error, detail=detail
    )
