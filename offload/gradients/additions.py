"""Gradients of further backward passes, copied from a GPU and added in host memory to those of earlier passes.

They are copied through a ring of pinned buffers. The sender puts copies on lane `LEAVING`, and waits only if all
buffers are taken; a thread waits for each copy and lets the session's workers add it. A gradient that is larger than
the rest of a buffer is cut. Gradients are added in the order in which they were sent.

An interrupt may end any method of the sender at any line: a `Sending` records how far it has come, and sending it
again continues there.

An addition that fails raises in `finish`, in the step, however soon it fails: backward is not interrupted at an
arbitrary parameter.

Not done here: buckets, order with other lanes, and knowing what gradients are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np

from offload import waits
from offload.device.lanes import GpuLanes
from offload.device.pieces import Pieces, as_pieces
from offload.dtypes import ITEM_BYTES, DtypeCode
from offload.errors import OffloadError
from offload.kernels import CpuUpdateKernel
from offload.memory.arenas import Arena
from offload.plan.budget import PIECE_ALIGNMENT
from offload.protocols import SECTOR_BYTES, DeviceLane, Mark

BUFFERS = 4
"""Buffers of the ring: one is added while others are filled."""

MOST_BUFFER_BYTES = 32 << 20
"""Largest size of a buffer: copying it takes about a millisecond, many times longer than the calls for it."""


def buffer_bytes(slots_bytes: int) -> int:
    """Return the size of each of the `BUFFERS` buffers, given that of all slots that are added to; 0 for none."""
    return min(-(-slots_bytes // (BUFFERS * SECTOR_BYTES)) * SECTOR_BYTES, MOST_BUFFER_BYTES)


@dataclass(eq=False, slots=True)
class Filling:
    """One use of a buffer: what is copied to it, and added from it.

    Attributes:
        buffer: Number of the buffer.
        copies: Copies from the device to the buffer.
        rows: Additions after that: (target, source, elements), by dtype.
        mark: Mark after the copies; None before they are on their lane.
        sent: Whether it was certainly given to the thread.
        ended: Set when the buffer is free again.
    """

    buffer: int
    copies: Pieces
    rows: dict[DtypeCode, list[tuple[int, int, int]]]
    mark: Mark | None = None
    sent: bool = False
    ended: waits.Latch = field(default_factory=waits.Latch)


Sending = list[Filling]
"""The uses of buffers by gradients that are sent together."""


class Additions:
    """The additions of one session; `forget` separates those of two steps.

    `send` belongs to one thread at a time, all else is called between backward passes.

    Args:
        lanes: The session's lanes.
        kernel: Adds gradients in host memory.
    """

    def __init__(self, lanes: GpuLanes, kernel: CpuUpdateKernel) -> None:
        self.arena: Arena | None = None
        """The buffers; None before they are needed."""
        self._lanes = lanes
        self._kernel = kernel
        self._size = 0
        self._next = 0
        self._ring: list[Filling | None] = [None] * BUFFERS
        self._error: BaseException | None = None
        self._work: SimpleQueue[Filling | None] = SimpleQueue()
        self._thread_lock = threading.Lock()
        self._ended = waits.Latch()

    def prepare(self, gradients: Sequence[tuple[int, int, int, DtypeCode]], slots_bytes: int) -> Sending:
        """Assign gradients to buffers, so that `send` can copy and add them.

        Args:
            gradients: Rows of (device address, slot's address, elements, dtype).
            slots_bytes: See `buffer_bytes`.
        """
        if not any(numel for _, _, numel, _ in gradients):
            return []
        size = buffer_bytes(slots_bytes)
        if self.arena is None or self._size < size:
            if self.arena is not None:
                self._wait_for_all()
                # Copies of forgotten gradients may go on, if an interrupt came before their mark.
                self._lanes.device.mark(DeviceLane.LEAVING, timed=False).wait()
                self._close_buffers()
            self._size = size
            self.arena = self._lanes.arena(BUFFERS * size)
        sending: Sending = []
        copies: list[tuple[int, int, int]] = []
        rows: dict[DtypeCode, list[tuple[int, int, int]]] = {}
        filled_bytes = 0
        for source, target, numel, dtype in gradients:
            item, done = int(ITEM_BYTES[dtype]), 0
            while done < numel:
                if filled_bytes == self._size:
                    sending.append(self._new_filling(copies, rows))
                    copies, rows, filled_bytes = [], {}, 0
                count = min(numel - done, (self._size - filled_bytes) // item)
                address = self.arena.address + (self._next * self._size) + filled_bytes
                copies.append((source + item * done, address, item * count))
                rows.setdefault(dtype, []).append((target + item * done, address, count))
                filled_bytes += -(-item * count // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
                done += count
        if copies:
            sending.append(self._new_filling(copies, rows))
        return sending

    def _new_filling(
        self, copies: list[tuple[int, int, int]], rows: dict[DtypeCode, list[tuple[int, int, int]]]
    ) -> Filling:
        buffer, self._next = self._next, (self._next + 1) % BUFFERS
        return Filling(buffer, as_pieces(copies), rows)

    def send(self, sending: Sending) -> None:
        """Copy gradients on lane `LEAVING`, and queue them for the thread to add; after an interrupt, call it again.

        Raises:
            OffloadError: The device has failed.
        """
        if not self._thread_lock.locked():  # a second thread returns at once
            threading.Thread(target=self._run_thread, name="offload-add", daemon=True).start()
        for filling in sending:
            if filling.sent:
                continue
            if filling.mark is None:
                previous = self._ring[filling.buffer]
                if previous is not None and previous is not filling and not previous.ended.is_set():
                    self._wait(previous)
                self._ring[filling.buffer] = filling
                self._lanes.pieces.to_host(filling.copies, PIECE_ALIGNMENT, DeviceLane.LEAVING)
                filling.mark = self._lanes.device.mark(DeviceLane.LEAVING, timed=False)
            self._work.put(filling)  # the thread skips a filling that it gets twice
            filling.sent = True

    def finish(self) -> None:
        """Wait until all gradients that were sent have been added.

        Raises:
            OffloadError: A gradient could not be added.
        """
        self._wait_for_all()
        if self._error is not None:
            raise self._error

    def wait_and_clear_error(self) -> None:
        """Wait until no gradient is on its way, and forget an error."""
        self._wait_for_all()
        self._ring = [None] * BUFFERS
        self._error = None

    def _wait_for_all(self) -> None:
        for filling in self._ring:
            if filling is not None:
                if not filling.sent:  # `send` was interrupted: the thread may not have it
                    self._work.put(filling)
                self._wait(filling)

    def _wait(self, filling: Filling) -> None:
        waits.wait_for(filling.ended.wait, lambda: "gradients that leave the GPU to be added in host memory")

    # On the thread

    def _run_thread(self) -> None:
        """Add what is sent, filling by filling, until `close`; a second thread returns at once."""
        if not self._thread_lock.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OffloadError):  # a device that has failed says so with every mark
                self._lanes.device.prepare_thread()
            while (filling := self._work.get()) is not None:
                if not filling.ended.is_set():
                    self._add(filling)
        finally:
            self._ended.set()

    def _add(self, filling: Filling) -> None:
        """Wait for a filling's copies, add its gradients, and free its buffer; keep an error for `finish`."""
        try:
            if filling.mark is not None and self._error is None:
                filling.mark.wait()
                for dtype, rows in filling.rows.items():
                    self._kernel.add(np.array(rows, np.uint64), dtype)
        except BaseException as error:  # raised by `finish`
            self._error = error
        finally:
            filling.ended.set()
            self._lanes.wake()

    # The end

    def _close_buffers(self) -> None:
        if self.arena is not None:
            self._lanes.free_arena(self.arena)
            self.arena = None

    def close(self) -> None:
        """End the thread and give the buffers back; the device has been closed."""
        if self._thread_lock.acquire(blocking=False):  # the thread never began, nor will
            self._ended.set()
        self._work.put(None)
        self._ended.wait()
        self._close_buffers()
