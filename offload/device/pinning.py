"""Pinned host memory, which a GPU reaches by itself: arenas are pinned in chunks, as far as the system allows.

A driver may refuse a large registration and accept several small ones, so a chunk that is refused is tried again at
half its size. A copy must lie in one registration: `whole_copies` cuts those that do not. Memory that cannot be
pinned is counted; copies of it work, more slowly.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import mmap
from collections.abc import Iterator
from typing import Protocol

from offload.errors import OffloadError
from offload.memory.arenas import Arena

log = logging.getLogger("offload")

PIN_BYTES = 16 << 30
"""Most that is pinned in one call; drivers refuse more than some hundred GiB, and now and then much less."""

LEAST_PIN_BYTES = 64 << 20
"""Least size at which a chunk that was refused is tried again."""


class Pins(Protocol):
    """The part of a `offload.protocols.Device` that registers host memory."""

    def pin(self, address: int, nbytes: int) -> None:
        """See `Device.pin`."""

    def unpin(self, address: int) -> None:
        """See `Device.unpin`."""


class PinnedMemory:
    """Pins a session's arenas in chunks. Nothing is copied while an arena is pinned or unpinned.

    Attributes:
        pinned_bytes: Host memory that is pinned now.
        unpinned_bytes: Host memory of these arenas that could not be pinned.
    """

    def __init__(self, device: Pins) -> None:
        self.pinned_bytes = 0
        self.unpinned_bytes = 0
        self._device = device
        self._chunks: dict[int, list[tuple[int, int]]] = {}  # address and size of each, by its arena's address
        self._edges: list[int] = []  # where chunks begin and end, sorted
        self._is_shortage_logged = False

    def pin(self, arena: Arena) -> None:
        """Pin an arena chunk by chunk, from its start on.

        A chunk that the system refuses is tried at half its size, and so on; later chunks are no larger. Once half is
        less than `LEAST_PIN_BYTES`, the arena stays unpinned from there on.
        """
        chunks: list[tuple[int, int]] = []
        self._chunks[arena.address] = chunks
        address, end = arena.address, arena.address + arena.nbytes
        size = PIN_BYTES
        try:
            while address < end:
                size = min(size, end - address)
                try:
                    self._device.pin(address, size)
                except OffloadError as error:
                    size = size // 2 // mmap.PAGESIZE * mmap.PAGESIZE  # two registrations share no page
                    if size < LEAST_PIN_BYTES:
                        self._warn_once(end - address, arena.nbytes, error)
                        break
                    continue
                chunks.append((address, size))
                address += size
        finally:  # also after an interrupt: what lies before `address` is pinned
            self.pinned_bytes += address - arena.address
            self.unpinned_bytes += end - address
            self._note_edges()

    def unpin(self, arena: Arena) -> None:
        """Unpin an arena, from or to which the device copies nothing any more."""
        chunks = self._chunks.pop(arena.address, [])
        chunks_bytes = sum(nbytes for _, nbytes in chunks)
        self.pinned_bytes -= chunks_bytes
        self.unpinned_bytes -= arena.nbytes - chunks_bytes
        self._note_edges()
        with contextlib.ExitStack() as ends:  # each chunk, even if another one fails
            for address, _ in chunks:
                ends.callback(self._device.unpin, address)

    def close(self) -> None:
        """Unpin everything; the device copies nothing any more."""
        with contextlib.ExitStack() as ends:
            for chunks in self._chunks.values():
                for address, _ in chunks:
                    ends.callback(self._device.unpin, address)
            self._chunks.clear()

    def whole_copies(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Cut a copy from or to host memory into pieces (offset, bytes), each of which lies in one chunk or none.

        A driver copies from or to one registration at a time, and a chunk is one.
        """
        edges = self._edges
        offset = 0
        # Edges within the copy: one at its first byte, or behind its last, cuts nothing.
        for edge in edges[bisect.bisect_right(edges, address) : bisect.bisect_left(edges, address + nbytes)]:
            yield offset, edge - address - offset
            offset = edge - address
        yield offset, nbytes - offset

    def _note_edges(self) -> None:
        """Note where the present chunks begin and end, for `whole_copies`."""
        chunks = (chunk for chunks in self._chunks.values() for chunk in chunks)
        # A new list each time: other threads may be reading the old one for their copies.
        self._edges = sorted({edge for address, nbytes in chunks for edge in (address, address + nbytes)})

    def _warn_once(self, nbytes: int, arena_bytes: int, error: OffloadError) -> None:
        """Log, the first time only, that `nbytes` of an arena's `arena_bytes` cannot be pinned."""
        if not self._is_shortage_logged:
            self._is_shortage_logged = True
            log.warning(
                "%d of %d bytes of host memory cannot be pinned, so copies between them and the GPU are slower: %s "
                "(said once; metrics()['unpinned_bytes'] counts all)",
                nbytes,
                arena_bytes,
                str(error),  # not the error, which would keep our frames alive with the log record
            )
