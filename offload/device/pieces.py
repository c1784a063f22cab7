"""Copies of many small pieces of device memory, by a few copies and a kernel that gathers or scatters the pieces.

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
    """The mark after the last work in the buffer; None before there was any."""
    is_noted: bool = True
    """Whether `used` is up to date. It is not from `_next_buffer` until `note_used`, and stays so if an interrupt or
    an error comes in between."""

    def note_used(self, mark: Mark) -> None:
        """Note the mark after all work in the buffer."""
        self.used, self.is_noted = mark, True


@dataclass(frozen=True, slots=True)
class _Round:
    """Small pieces that pass through one buffer.

    Attributes:
        pieces: The pieces.
        offsets: Offset of each in the buffer.
        runs: Copies between host and buffer: (offset in the buffer, host address, bytes).
    """

    pieces: Pieces
    offsets: npt.NDArray[np.uint64]
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
            pieces: The pieces. In host memory, gaps below `PIECE_ALIGNMENT` between small ones are read with them.

        Returns:
            Whether any pieces are scattered, so that their readers have to follow lane `PIECES`.
        """
        device, lane = self._device, DeviceLane.H2D
        with self._lock:  # to the end, as `replace_buffers` must not replace buffers in use
            alone, rounds = self._arrange(pieces, PIECE_ALIGNMENT)
            for target, source, nbytes in alone.tolist():
                self._lanes.copy(lane, target, source, nbytes)
            for round_ in rounds:
                buffer = self._next_buffer(lane)
                for offset, host_address, nbytes in round_.runs:
                    self._lanes.copy(lane, buffer.place.address + offset, host_address, nbytes)
                device.follow(DeviceLane.PIECES, device.mark(lane, timed=False))
                sources = round_.offsets + np.uint64(buffer.place.address)
                rows = np.stack([round_.pieces[:, 0], sources, round_.pieces[:, 2]], axis=1)  # target, source, bytes
                device.copy_pieces(DeviceLane.PIECES, rows)
                buffer.note_used(device.mark(DeviceLane.PIECES, timed=False))
            return bool(rounds)

    def to_host(self, pieces: Pieces, gap_bytes: int = PIECE_ALIGNMENT, lane: DeviceLane = DeviceLane.D2H) -> None:
        """Copy pieces to the host on `lane`; small ones are gathered before, on lane `PIECES`.

        Args:
            pieces: The pieces.
            gap_bytes: Gaps below this, between small pieces in host memory, are overwritten: they hold nothing.
            lane: The lane of the copies; all pieces are in host memory after it.
        """
        device = self._device
        with self._lock:
            alone, rounds = self._arrange(pieces, gap_bytes)
            for source, target, nbytes in alone.tolist():
                self._lanes.copy(lane, target, source, nbytes)
            for round_ in rounds:
                buffer = self._next_buffer(DeviceLane.PIECES)
                targets = round_.offsets + np.uint64(buffer.place.address)
                rows = np.stack([targets, round_.pieces[:, 0], round_.pieces[:, 2]], axis=1)  # target, source, bytes
                device.copy_pieces(DeviceLane.PIECES, rows)
                device.follow(lane, device.mark(DeviceLane.PIECES, timed=False))
                for offset, host_address, nbytes in round_.runs:
                    self._lanes.copy(lane, host_address, buffer.place.address + offset, nbytes)
                buffer.note_used(device.mark(lane, timed=False))

    def _next_buffer(self, lane: DeviceLane) -> _Buffer:
        """Return the buffer that was used longest ago, and make `lane` wait for that use.

        The caller calls the buffer's `note_used` once it has enqueued all work in the buffer.
        """
        device = self._device
        self._buffers.rotate(-1)  # in one call, so that no interrupt loses a buffer
        buffer = self._buffers[-1]
        if not buffer.is_noted:  # it is not known which lane has used it last: wait for all
            for other in LANES:
                device.follow(lane, device.mark(other, timed=False))
        elif buffer.used is not None:
            device.follow(lane, buffer.used)
        buffer.is_noted = False
        return buffer

    def _arrange(self, pieces: Pieces, gap_bytes: int) -> tuple[Pieces, list[_Round]]:
        """Return the pieces to copy one by one, and the others in rounds, each as many as one buffer holds.

        In a round, pieces with small gaps between them in host memory, and no overlap, make a *run*: one copy. A run
        keeps its gaps in the buffer.
        """
        # A small piece fits into a buffer wherever it begins in its unit of `PIECE_ALIGNMENT`.
        is_small = pieces[:, 2] < min(LEAST_COPY_BYTES, max(0, self.buffer_bytes - PIECE_ALIGNMENT))
        if np.count_nonzero(is_small) <= KERNEL_COPIES:  # to gather them would take as long as to copy each
            return pieces, []
        alone, small = [pieces[~is_small]], pieces[is_small].astype(np.int64)  # signed, as gaps may be negative
        # By host address, so that neighbours follow each other: backward goes from the last layer to the first.
        small = small[np.argsort(small[:, 1], kind="stable")]
        _, host, nbytes = small.T
        host_ends = host + nbytes
        gaps = host[1:] - host_ends[:-1]
        begins_run = np.concatenate([[True], (gaps < 0) | (gaps >= gap_bytes)])
        ends_run = np.append(begins_run[1:], True)
        # Lay all runs out in an endless buffer, each at a multiple of PIECE_ALIGNMENT; then cut that into rounds.
        # `run_offsets` has one number more than there are runs: the end of the last.
        run_of_piece = np.cumsum(begins_run) - 1
        run_hosts = host[begins_run]
        run_bytes = host_ends[ends_run] - run_hosts
        run_offsets = np.concatenate([[0], np.cumsum(-(-run_bytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT)])
        offsets = run_offsets[run_of_piece] + host - run_hosts[run_of_piece]
        ends = offsets + nbytes
        rounds, first = [], 0
        while first < len(small):
            # A round takes pieces `first` to `beyond`, as many as fit: it may begin and end within a run.
            origin = offsets[first] // PIECE_ALIGNMENT * PIECE_ALIGNMENT  # of the buffer, in the endless one
            beyond = int(np.searchsorted(ends, origin + self.buffer_bytes, side="right"))
            part, count = slice(first, beyond), beyond - first
            first = beyond  # of the next round; it has grown, as every small piece fits into a buffer
            heads = np.flatnonzero(np.append(True, begins_run[part][1:]))  # each run's first piece of this round
            if len(heads) + KERNEL_COPIES >= count:  # to copy each piece takes no more copies
                alone.append(small[part].astype(np.uint64))
                continue
            tails = np.append(heads[1:], count) - 1  # each run's last piece
            round_offsets = offsets[part] - origin
            sizes = host_ends[part][tails] - host[part][heads]
            runs = np.stack([round_offsets[heads], host[part][heads], sizes], axis=1)
            rounds.append(
                _Round(
                    small[part].astype(np.uint64),
                    round_offsets.astype(np.uint64),
                    [(offset, address, size) for offset, address, size in runs.tolist()],
                )
            )
        return np.concatenate(alone), rounds
