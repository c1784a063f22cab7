"""Gradients of further backward passes, copied from a GPU and added in host memory to those of earlier passes.

They are copied through a ring of pinned buffers. The sender puts copies on lane `LEAVING`, and waits only if all
buffers are in use; a thread waits for each copy and lets the session's workers add it. A gradient that is larger than
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
from offload.layout import ceil_div, round_up
from offload.memory.arenas import Arena
from offload.plan.budget import PIECE_ALIGNMENT
from offload.protocols import SECTOR_BYTES, DeviceLane, Mark

BUFFERS = 4
"""Buffers of the ring: the contents of one are added while others are filled."""

MOST_BUFFER_BYTES = 32 << 20
"""Largest size of a buffer: copying it takes about a millisecond, many times longer than the calls for it."""


def buffer_bytes(slots_bytes: int) -> int:
    """Return the size of each of the `BUFFERS` buffers, given the size of all slots that are added to; 0 for none.

    Together they are as large as the slots, in whole sectors, unless `MOST_BUFFER_BYTES` limits them.
    """
    sectors = ceil_div(slots_bytes, BUFFERS * SECTOR_BYTES)
    return min(sectors * SECTOR_BYTES, MOST_BUFFER_BYTES)


@dataclass(eq=False, slots=True)
class Filling:
    """One use of a buffer: what is copied to it, and added from it.

    Attributes:
        buffer: Number of the buffer.
        copies: Copies from the device to the buffer.
        rows: Additions after that, by dtype, as the kernel's rows: (address in the slot, in the buffer, elements).
        mark: Mark after the copies; None before they are on their lane.
        sent: Whether it was given to the thread. After an interrupt it may have been, and this is still False.
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
    """The additions of one session; `wait_and_clear_error` separates those of two steps.

    One thread at a time calls `prepare` and `send`; all else is called between backward passes.

    Args:
        lanes: The session's lanes.
        kernel: Adds gradients in host memory.
    """

    def __init__(self, lanes: GpuLanes, kernel: CpuUpdateKernel) -> None:
        self.arena: Arena | None = None
        """The buffers; None before they are needed."""
        self._lanes = lanes
        self._kernel = kernel
        self._buffer_bytes = 0  # of each buffer
        self._next_buffer = 0  # the number of the one that `prepare` fills next
        self._last_fillings: list[Filling | None] = [None] * BUFFERS  # the last use of each buffer
        self._error: BaseException | None = None  # of an addition; kept for `finish`
        self._work: SimpleQueue[Filling | None] = SimpleQueue()  # for the thread; None ends it
        self._thread_lock = threading.Lock()  # acquired for good by the adding thread, so that there is only one
        self._ended = waits.Latch()  # set when the thread has ended, or can never begin

    def prepare(self, gradients: Sequence[tuple[int, int, int, DtypeCode]], slots_bytes: int) -> Sending:
        """Assign gradients to buffers of the ring, one after another, so that `send` can copy and add them.

        A gradient that does not fit into the rest of a buffer is cut, and goes on in the next buffer. If
        `slots_bytes` has grown, larger buffers may replace the old ones first.

        Args:
            gradients: Rows of (device address, slot's address, elements, dtype).
            slots_bytes: Bytes of all slots that are added to, which size the buffers.

        Returns:
            The uses of buffers, in the order in which they are sent.
        """
        if not any(numel for _, _, numel, _ in gradients):
            return []
        arena = self._ensure_buffers(buffer_bytes(slots_bytes))
        sending: Sending = []
        # Of the buffer that is being filled: its copies, its additions, and how much of it is full.
        copies: list[tuple[int, int, int]] = []
        rows: dict[DtypeCode, list[tuple[int, int, int]]] = {}
        filled_bytes = 0
        for source, target, numel, dtype in gradients:
            item_bytes = int(ITEM_BYTES[dtype])
            done = 0  # elements of the gradient that have been assigned
            while done < numel:
                # The size of a buffer and of its full part are multiples of `PIECE_ALIGNMENT`. So unless they are
                # equal, there is room for some elements.
                if filled_bytes == self._buffer_bytes:
                    sending.append(self._next_filling(copies, rows))
                    copies, rows, filled_bytes = [], {}, 0
                count = min(numel - done, (self._buffer_bytes - filled_bytes) // item_bytes)
                nbytes = item_bytes * count
                offset = item_bytes * done
                address = arena.address + self._next_buffer * self._buffer_bytes + filled_bytes
                copies.append((source + offset, address, nbytes))
                rows.setdefault(dtype, []).append((target + offset, address, count))
                filled_bytes += round_up(nbytes, PIECE_ALIGNMENT)
                done += count
        if copies:
            sending.append(self._next_filling(copies, rows))
        return sending

    def _ensure_buffers(self, nbytes: int) -> Arena:
        """Return the arena of buffers of at least `nbytes` each; smaller ones are replaced once nothing uses them."""
        if self.arena is not None and self._buffer_bytes >= nbytes:
            return self.arena
        if self.arena is not None:
            self._wait_for_all()
            # A filling may have copies and no mark, if an interrupt ended `send` between the two. Nobody has waited
            # for such copies, so wait for all of lane `LEAVING`.
            self._lanes.device.mark(DeviceLane.LEAVING, timed=False).wait()
            self._free_buffers()
        self._buffer_bytes = nbytes
        self.arena = self._lanes.allocate_arena(BUFFERS * nbytes)
        return self.arena

    def _next_filling(
        self, copies: list[tuple[int, int, int]], rows: dict[DtypeCode, list[tuple[int, int, int]]]
    ) -> Filling:
        """Return a use of the ring's next buffer, and go on to the one after it.

        The buffer's last use may not have ended: `send` waits for that.
        """
        buffer = self._next_buffer
        self._next_buffer = (buffer + 1) % BUFFERS
        return Filling(buffer, as_pieces(copies), rows)

    def send(self, sending: Sending) -> None:
        """Copy gradients on lane `LEAVING`, and queue them for the thread to add; after an interrupt, call it again.

        Raises:
            OffloadError: The device has failed.
        """
        if not self._thread_lock.locked():  # an interrupt may lead to a second thread, which returns at once
            threading.Thread(target=self._run_adder, name="offload-add", daemon=True).start()
        for filling in sending:
            if filling.sent:
                continue
            if filling.mark is None:
                self._wait_for_buffer(filling)
                self._last_fillings[filling.buffer] = filling
                self._lanes.pieces.to_host(filling.copies, PIECE_ALIGNMENT, DeviceLane.LEAVING)
                filling.mark = self._lanes.device.mark(DeviceLane.LEAVING, timed=False)
            self._work.put(filling)  # the thread skips a filling that it gets twice
            filling.sent = True

    def _wait_for_buffer(self, filling: Filling) -> None:
        """Wait until the use of a filling's buffer before this one has ended."""
        previous = self._last_fillings[filling.buffer]  # the filling itself if an interrupted `send` goes on
        if previous is not None and previous is not filling and not previous.ended.is_set():
            self._wait(previous)

    def finish(self) -> None:
        """Wait until all gradients that were sent have been added.

        Raises:
            OffloadError: A gradient could not be added. Each call raises this until `wait_and_clear_error`.
        """
        self._wait_for_all()
        if self._error is not None:
            raise self._error

    def wait_and_clear_error(self) -> None:
        """Wait until no gradient is on its way, and forget an error: its gradients are dropped."""
        self._wait_for_all()
        self._last_fillings = [None] * BUFFERS
        self._error = None

    def _wait_for_all(self) -> None:
        """Wait until all fillings have ended: each buffer's last one, and so all before it."""
        for filling in self._last_fillings:
            if filling is not None:
                if not filling.sent:  # `send` was interrupted: the thread may not have it
                    self._work.put(filling)
                self._wait(filling)

    def _wait(self, filling: Filling) -> None:
        """Wait until a filling has ended, and log a long wait."""
        waits.wait_for(filling.ended.wait, lambda: "gradients that leave the GPU to be added in host memory")

    # On the thread

    def _run_adder(self) -> None:
        """Take fillings from the queue and add their gradients, until `close`; runs on the adding thread.

        A second thread, which an interrupt of `send` may have started, returns at once.
        """
        if not self._thread_lock.acquire(blocking=False):
            return
        try:
            # If the device has failed, each wait for a mark raises the error again, and `_add` keeps it.
            with contextlib.suppress(OffloadError):
                self._lanes.device.prepare_thread()
            while (filling := self._work.get()) is not None:
                if not filling.ended.is_set():
                    self._add(filling)
        finally:
            self._ended.set()

    def _add(self, filling: Filling) -> None:
        """Wait for a filling's copies, add its gradients, and free its buffer; keep an error for `finish`."""
        try:
            # Without a mark, `send` was interrupted, and the gradients are forgotten. After an error nothing more is
            # added: `finish` raises the error, unless all gradients are dropped (`wait_and_clear_error`).
            if filling.mark is not None and self._error is None:
                filling.mark.wait()
                for dtype, rows in filling.rows.items():
                    self._kernel.add(np.array(rows, np.uint64), dtype)
        except BaseException as error:  # raised by `finish`
            self._error = error
        finally:
            filling.ended.set()
            self._lanes.wake()  # an update may wait for these gradients

    # The end

    def _free_buffers(self) -> None:
        """Free the buffers."""
        if self.arena is not None:
            self._lanes.free_arena(self.arena)
            self.arena = None

    def close(self) -> None:
        """End the thread and free the buffers; the device has been closed."""
        if self._thread_lock.acquire(blocking=False):  # no thread has begun, and none can begin from now on
            self._ended.set()
        self._work.put(None)  # ends the thread, if there is one
        self._ended.wait()
        self._free_buffers()
