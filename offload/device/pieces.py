"""Copies of many small pieces of device memory, gathered into (or scattered from) few large ones by a kernel there.

A copy costs its enqueueing, 10 to 50 us, whatever its size. So small pieces that lie beside each other in host memory
pass through a buffer on the device: one copy for all of them between the host and the buffer, and one kernel, on lane
`PIECES`, between the buffer and their places. Large pieces, and a few small ones, are copied each on its own.

Order: a kernel that scatters follows its copies, copies follow the kernel that gathers for them, and a buffer's next
user follows its last. Whoever reads what was scattered follows lane `PIECES`; what gathering depends on is for the
caller to have that lane follow.

Not done here: waiting, and knowing what pieces are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from offload.device.memory import Block, Place
from offload.plan.budget import KERNEL_COPIES, LEAST_COPY_BYTES, PIECE_ALIGNMENT, PIECE_BUFFERS
from offload.protocols import LANES, Device, DeviceLane, Mark

Pieces = npt.NDArray[np.uint64]
"""Rows of (device address, host address, bytes)."""


def as_pieces(rows: Sequence[tuple[int, int, int]]) -> Pieces:
    """Return rows of (device address, host address, bytes) as one array."""
    return np.array(rows, np.uint64).reshape(-1, 3)


@dataclass(slots=True)
class _Buffer:
    place: Place
    used: Mark | None = None
    """After the last work in it."""
    is_noted: bool = True
    """Whether `used` is that mark: an interrupt or an error may have come before it was noted."""

    def note(self, mark: Mark) -> None:
        """Take note of the mark after all work in it."""
        self.used, self.is_noted = mark, True


@dataclass(frozen=True, slots=True)
class _Round:
    """Small pieces that pass through one buffer.

    Attributes:
        pieces: Theirs.
        places: Where each lies in the buffer.
        runs: Copies between host and buffer: (place in the buffer, host address, bytes).
    """

    pieces: Pieces
    places: Pieces
    runs: list[tuple[int, int, int]]


class Copier(Protocol):
    """Puts a copy on a lane: `GpuLanes`."""

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int) -> None:
        """See `GpuLanes.copy`."""


class PieceCopies:
    """Copies pieces of device memory to and from host memory; any thread.

    Args:
        device: The GPU.
        lanes: Take copies of its pieces and buffers.
    """

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

    def adopt(self, block: Block) -> Block:
        """Use other device memory for all buffers together. Return the old one, which lanes may still use."""
        with self._lock:
            old, self._block = self._block, block
            size = block.nbytes // PIECE_BUFFERS
            self._buffers = deque(_Buffer(Place(block, number * size)) for number in range(PIECE_BUFFERS))
            return old

    def to_device(self, pieces: Pieces) -> bool:
        """Copy pieces to the device: large ones on lane `H2D`, others then go on on lane `PIECES`.

        Args:
            pieces: In host memory, gaps of less than `PIECE_ALIGNMENT` bytes between small ones are read, too.

        Returns:
            Whether there are others.
        """
        device, lane = self._device, DeviceLane.H2D
        with self._lock:  # to the end: buffers go while they are nobody's
            alone, rounds = self._arrange(pieces, PIECE_ALIGNMENT)
            for target, source, nbytes in alone.tolist():
                self._lanes.copy(lane, target, source, nbytes)
            for part in rounds:
                buffer = self._take(lane)
                for place, host, nbytes in part.runs:
                    self._lanes.copy(lane, buffer.place.address + place, host, nbytes)
                device.follow(DeviceLane.PIECES, device.mark(lane, timed=False))
                at = part.places + np.uint64(buffer.place.address)
                device.copy_pieces(DeviceLane.PIECES, np.stack([part.pieces[:, 0], at, part.pieces[:, 2]], axis=1))
                buffer.note(device.mark(DeviceLane.PIECES, timed=False))
            return bool(rounds)

    def to_host(self, pieces: Pieces, gap_bytes: int = PIECE_ALIGNMENT, lane: DeviceLane = DeviceLane.D2H) -> None:
        """Copy pieces to the host, all of them on `lane` in the end.

        Args:
            pieces: Which.
            gap_bytes: Gaps of less than that between small pieces in host memory are nobody's, and written, too.
            lane: Where copies are put.
        """
        device = self._device
        with self._lock:
            alone, rounds = self._arrange(pieces, gap_bytes)
            for source, target, nbytes in alone.tolist():
                self._lanes.copy(lane, target, source, nbytes)
            for part in rounds:
                buffer = self._take(DeviceLane.PIECES)
                at = part.places + np.uint64(buffer.place.address)
                device.copy_pieces(DeviceLane.PIECES, np.stack([at, part.pieces[:, 0], part.pieces[:, 2]], axis=1))
                device.follow(lane, device.mark(DeviceLane.PIECES, timed=False))
                for place, host, nbytes in part.runs:
                    self._lanes.copy(lane, host, buffer.place.address + place, nbytes)
                buffer.note(device.mark(lane, timed=False))

    def _take(self, lane: DeviceLane) -> _Buffer:
        """Return the buffer that was used longest ago; a lane waits for its last use."""
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
        """Return the pieces to copy each on its own, and rounds of the rest."""
        small = pieces[:, 2] < min(LEAST_COPY_BYTES, max(0, self.buffer_bytes - PIECE_ALIGNMENT))
        if np.count_nonzero(small) <= KERNEL_COPIES:
            return pieces, []
        alone, rest = [pieces[~small]], pieces[small].astype(np.int64)
        rest = rest[np.argsort(rest[:, 1], kind="stable")]  # backward goes from the last layer to the first
        _, host, nbytes = rest.T
        gaps = host[1:] - (host + nbytes)[:-1]
        begins = np.concatenate([[True], (gaps < 0) | (gaps >= gap_bytes)])
        # Where each piece would lie in an endless buffer, each run at the start of a line of it.
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
