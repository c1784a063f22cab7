"""Copies of many small pieces of device memory, by few copies and a kernel that gathers or scatters the pieces.

Each copy takes 10 to 50 us to enqueue, whatever its size. So small pieces that lie beside each other in host memory
pass through a buffer on the device: one copy for all of them between the host and the buffer, and one kernel, on lane
`PIECES`, between the buffer and the pieces' places. Large pieces, and a few small ones, are copied one by one.

Order: a kernel that scatters follows its copies, copies follow the kernel that gathers for them, and a buffer's next
use follows its last. Work that reads scattered pieces has to follow lane `PIECES`; and the caller makes that lane
follow the work that gathered pieces depend on.

Not done here: waiting, and knowing what the pieces are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from offload.device.memory import Block, BlockPlace
from offload.plan.budget import KERNEL_COPIES, LEAST_COPY_BYTES, PIECE_ALIGNMENT, PIECE_BUFFERS
from offload.protocols import LANES, Device, DeviceLane, Mark

Pieces = npt.NDArray[np.uint64]
"""Rows of (device address, host address, bytes)."""


def as_pieces(rows: Sequence[tuple[int, int, int]]) -> Pieces:
    """Return rows of (device address, host address, bytes) as one array."""
    return np.array(rows, np.uint64).reshape(-1, 3)


@dataclass(slots=True)
class _Buffer:
    """A buffer on the device, through which small pieces pass."""

    place: BlockPlace
    used: Mark | None = None
    """After the last work in the buffer."""
    is_noted: bool = True
    """Whether `used` is up to date: an interrupt or an error may come before `note`."""

    def note(self, mark: Mark) -> None:
        """Note the mark after all work in the buffer."""
        self.used, self.is_noted = mark, True


@dataclass(frozen=True, slots=True)
class _Round:
    """Small pieces that pass through one buffer.

    Attributes:
        pieces: The pieces.
        places: Offset of each in the buffer.
        runs: Copies between host and buffer: (offset in the buffer, host address, bytes).
    """

    pieces: Pieces
    places: Pieces
    runs: list[tuple[int, int, int]]


class Copier(Protocol):
    """Puts a copy on a lane: `GpuLanes`."""

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int) -> None:
        """See `GpuLanes.copy`."""


class PieceCopies:
    """Copies pieces of device memory to and from host memory; any thread."""

    def __init__(self, device: Device, lanes: Copier) -> None:
        self._device = device
        self._lanes = lanes
        self._block = Block()
        self._buffers: deque[_Buffer] = deque()
        self._lock = threading.RLock()

    @property
    def buffer_bytes(self) -> int:
        """Size of each of the `PIECE_BUFFERS` buffers; 0 while there are none, when every piece is copied alone."""
        return self._block.nbytes // PIECE_BUFFERS if self._block.address else 0

    def replace_buffers(self, block: Block) -> Block:
        """Use another block of device memory for all buffers; return the old block, which lanes may still use."""
        with self._lock:
            old, self._block = self._block, block
            size = block.nbytes // PIECE_BUFFERS
            self._buffers = deque(_Buffer(BlockPlace(block, number * size)) for number in range(PIECE_BUFFERS))
            return old

    def to_device(self, pieces: Pieces) -> bool:
        """Copy pieces to the device on lane `H2D`; small ones are then scattered on lane `PIECES`.

        Args:
            pieces: In host memory, gaps of less than `PIECE_ALIGNMENT` bytes between small ones are read, too.

        Returns:
            Whether any pieces are scattered, so that their readers have to follow lane `PIECES`.
        """
        device, lane = self._device, DeviceLane.H2D
        with self._lock:  # to the end: `adopt` replaces buffers only while none is in use
            alone, rounds = self._arrange(pieces, PIECE_ALIGNMENT)
            for target, source, nbytes in alone.tolist():
                self._lanes.copy(lane, target, source, nbytes)
            for each in rounds:
                buffer = self._take(lane)
                for offset, host, nbytes in each.runs:
                    self._lanes.copy(lane, buffer.place.address + offset, host, nbytes)
                device.follow(DeviceLane.PIECES, device.mark(lane, timed=False))
                sources = each.places + np.uint64(buffer.place.address)
                rows = np.stack([each.pieces[:, 0], sources, each.pieces[:, 2]], axis=1)
                device.copy_pieces(DeviceLane.PIECES, rows)
                buffer.note(device.mark(DeviceLane.PIECES, timed=False))
            return bool(rounds)

    def to_host(self, pieces: Pieces, gap_bytes: int = PIECE_ALIGNMENT, lane: DeviceLane = DeviceLane.D2H) -> None:
        """Copy pieces to the host on `lane`; small ones are gathered before, on lane `PIECES`.

        Args:
            pieces: Which.
            gap_bytes: Smaller gaps between small pieces in host memory hold nothing, and are written, too.
            lane: The lane of the copies; all pieces are in host memory after it.
        """
        device = self._device
        with self._lock:
            alone, rounds = self._arrange(pieces, gap_bytes)
            for source, target, nbytes in alone.tolist():
                self._lanes.copy(lane, target, source, nbytes)
            for each in rounds:
                buffer = self._take(DeviceLane.PIECES)
                targets = each.places + np.uint64(buffer.place.address)
                rows = np.stack([targets, each.pieces[:, 0], each.pieces[:, 2]], axis=1)
                device.copy_pieces(DeviceLane.PIECES, rows)
                device.follow(lane, device.mark(DeviceLane.PIECES, timed=False))
                for offset, host, nbytes in each.runs:
                    self._lanes.copy(lane, host, buffer.place.address + offset, nbytes)
                buffer.note(device.mark(lane, timed=False))

    def _take(self, lane: DeviceLane) -> _Buffer:
        """Return the buffer that was used longest ago, after making a lane wait for that use."""
        device = self._device
        self._buffers.rotate(-1)  # in one call, so that no interrupt loses a buffer
        buffer = self._buffers[-1]
        if not buffer.is_noted:
            for other in LANES:
                device.follow(lane, device.mark(other, timed=False))
        elif buffer.used is not None:
            device.follow(lane, buffer.used)
        buffer.is_noted = False
        return buffer

    def _arrange(self, pieces: Pieces, gap_bytes: int) -> tuple[Pieces, list[_Round]]:
        """Return the pieces to copy one by one, and the others in rounds, each as many as one buffer holds.

        In a round, pieces with small gaps between them in host memory make a *run*, which is one copy.
        """
        small = pieces[:, 2] < min(LEAST_COPY_BYTES, max(0, self.buffer_bytes - PIECE_ALIGNMENT))
        if np.count_nonzero(small) <= KERNEL_COPIES:
            return pieces, []
        alone, rest = [pieces[~small]], pieces[small].astype(np.int64)
        rest = rest[np.argsort(rest[:, 1], kind="stable")]  # backward goes from the last layer to the first
        _, host, nbytes = rest.T
        gaps = host[1:] - (host + nbytes)[:-1]
        begins = np.concatenate([[True], (gaps < 0) | (gaps >= gap_bytes)])
        # The end of each piece in a buffer without limit, where each run begins at a multiple of PIECE_ALIGNMENT.
        run = np.cumsum(begins) - 1
        starts = host[begins]
        lengths = (host + nbytes)[np.append(begins[1:], True)] - starts
        lines = np.cumsum(-(-lengths // PIECE_ALIGNMENT) * PIECE_ALIGNMENT)
        ends = np.concatenate([[0], lines])[run] + host - starts[run] + nbytes
        rounds, first = [], 0
        while first < len(rest):
            origin = (ends[first] - nbytes[first]) // PIECE_ALIGNMENT * PIECE_ALIGNMENT
            last = max(first + 1, int(np.searchsorted(ends, origin + self.buffer_bytes, side="right")))
            part = slice(first, last)
            heads = np.flatnonzero(np.append(True, begins[part][1:]))
            first = last
            if len(heads) + KERNEL_COPIES >= last - part.start:
                alone.append(rest[part].astype(np.uint64))
                continue
            places = (ends - nbytes)[part] - origin
            tails = np.append(heads[1:], last - part.start) - 1
            sizes = (host + nbytes)[part][tails] - host[part][heads]
            runs = np.stack([places[heads], host[part][heads], sizes], axis=1)
            rounds.append(
                _Round(rest[part].astype(np.uint64), places.astype(np.uint64), [tuple(row) for row in runs.tolist()])
            )
        return np.concatenate(alone), rounds
