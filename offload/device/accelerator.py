"""An accelerator as torch sees it: streams, events, memory and copies behind `offload.protocols.Device`.

Lanes are streams, every mark an event. Hardware has few queues for all streams of a process (8 by CUDA's default, 4
by ROCm's), and streams that share a queue wait for each other. So this makes few streams. A stream waits only for
work that was enqueued before, so streams that share a queue cannot wait in a circle.

Device memory is torch's own, so that it shows in torch's figures and freed memory is used again. Addresses are
wrapped as tensors without a copy, so that torch makes the driver's calls. What differs between types of accelerators
is in `offload.backends`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch

from offload import combinations
from offload.backends import tensor_at, working_on
from offload.device.driver import Driver, raising_offload_error
from offload.dtypes import DtypeCode
from offload.errors import OffloadError
from offload.kernels.gpu import device_kernel
from offload.protocols import ERROR_DEVICE, LANES, DeviceLane, Mark, Queue
from offload.rules import RULES

log = logging.getLogger("offload")

HOST = torch.device("cpu")

PCI_DEVICES = Path("/sys/bus/pci/devices")
"""Where Linux lists devices, by their addresses."""

LEAST_RESERVE_BYTES = 2 << 30
"""Least memory to leave free, else a tenth of the card's: later batches may be larger, libraries need workspaces."""

REBASE_S = 10.0
"""Greatest age of the event that marks are timed from. CUDA gives a float of milliseconds, whose steps are half a
microsecond after ten seconds and eight milliseconds after a day; and its clock drifts from the host's."""

CLOCK_S = 2e-4
"""The host's clock is read before and after such an event. If the readings are further apart than this, another event
is tried: a busy thread may have kept the waiting one from going on in Python."""

CLOCK_TRIES = 5
"""Most events that are tried."""

CLOCK_LATE_S = 0.05
"""If the readings are further apart than this, the device was late, not Python: with one queue for all streams it had
to do all its work first, so the event happened at the later reading."""


class _Event:
    """A `Mark`: an event that has been recorded on a lane's stream. Methods are those of `Mark`."""

    def __init__(self, device: AcceleratorDevice, lane: DeviceLane, stream: Any, timed: bool) -> None:
        self.device = device
        self.lane = lane
        self.base = device.base  # what `time_s` measures from; recorded before, so that the time is not negative
        # An event may be recorded again while a stream waits for it: the stream waits for the earlier record.
        self.unused = device.unused[timed]
        try:
            self.event = self.unused.pop()
        except IndexError:  # none; not asked for before, as other threads take events, too
            self.event = device.backend.event(device.device, timed)
        self.event.record(stream)

    def __del__(self) -> None:
        """Let the event be used for another mark; there is no event if it could not be made."""
        if hasattr(self, "event"):
            self.unused.append(self.event)

    def reached(self) -> bool:
        with self.device.current():
            return bool(self.event.query())

    def wait(self) -> None:
        with self.device.current():
            self.event.synchronize()

    def time_s(self) -> float:
        with self.device.current():
            base, base_s = self.base
            return base_s + float(base.elapsed_time(self.event)) / 1e3  # `elapsed_time` is in milliseconds


class _Reporter:
    """Posts completions once marks of one lane have been reached, in their order, on a thread of its own.

    There is one for each lane: a mark that is reached late must not delay reports of another lane.
    """

    def __init__(self, device: AcceleratorDevice) -> None:
        self._device = device
        self._pending: deque[tuple[_Event, Queue, int]] = deque()
        self._changed = threading.Condition()  # guards `_pending` and `_closed`
        self._closed = False
        self._thread = threading.Thread(target=self._post_reached, name="offload-gpu", daemon=True)
        self._thread.start()

    def add(self, mark: _Event, queue: Queue, op: int) -> None:
        """Post completion `op` when a mark has been reached."""
        with self._changed:
            self._pending.append((mark, queue, op))
            self._changed.notify()

    def _post_reached(self) -> None:
        """Wait for each mark in turn and post its completion, until `close`; the work of the thread.

        Before each mark, and every `REBASE_S` without one, the device's `base` is renewed if it is too old.
        """
        device = self._device
        with contextlib.suppress(OffloadError):  # if the device has failed, each report below says so
            device.prepare_thread()
        while True:
            with self._changed:
                while not self._pending and not self._closed:
                    if not self._changed.wait(REBASE_S):
                        break  # nothing has come, and `base` is due
                if not self._pending and self._closed:
                    return
                report = self._pending.popleft() if self._pending else None
            # On this thread, as it may wait for all work of the device: if all streams have one queue
            # (CUDA_DEVICE_MAX_CONNECTIONS=1).
            with contextlib.suppress(OffloadError):
                device.rebase()
            if report is None:
                continue
            mark, queue, op = report
            try:
                mark.wait()
                now_s = mark.time_s()
                queue.post(op, started_s=now_s, finished_s=now_s)
            except Exception as error:  # any error is reported: somebody waits for this
                log.error("%s", error)
                now_s = time.monotonic()
                queue.post(op, error=ERROR_DEVICE, started_s=now_s, finished_s=now_s)

    def close(self) -> None:
        """End the thread when it has posted all that it was given."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not threading.current_thread():  # the garbage collector may call this on any thread
            self._thread.join()


class AcceleratorDevice(Driver):
    """A `offload.protocols.Device`: torch's `device`, or its current one.

    Raises:
        OffloadError: torch sees no such device, `BACKENDS` has none of its type, or its kernels cannot be used.
    """

    shared: ClassVar[dict[DeviceLane, DeviceLane]] = {DeviceLane.GRADIENTS: DeviceLane.PIECES}
    """Lanes that use another lane's stream, by the lane. The kernels of these two take microseconds: in backward
    `PIECES` gathers small gradients before they are copied to the host, and `GRADIENTS` sums gradients."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        with self.current():
            self._streams = self._make_streams()
            # Between the pieces of a copy; see `copy`.
            self._pauses: dict[DeviceLane, Any] = {lane: _make_pause(self.device) for lane in LANES}
            self._kernel = device_kernel(self.device, self._streams[DeviceLane.H2D])
            name, pci_address = self.backend.describe(self.device)
            self.name = f"{self.device} ({name})"
            self.memory_bytes = int(torch.accelerator.get_memory_info(self.device)[1])  # [0] is what is free
        self.reserve_bytes = max(LEAST_RESERVE_BYTES, self.memory_bytes // 10)
        self.node = _node_of(pci_address)
        self.unused: dict[bool, deque[Any]] = {False: deque(), True: deque()}
        """Events without and with timing that can be recorded again, as making one can take long."""
        self._memory: dict[int, torch.Tensor] = {}
        self._borrowed: list[torch.Tensor] = []
        self._reporters_lock = threading.Lock()
        self._closed = False
        with self.current():
            self.base = self._read_clocks(self._streams[DeviceLane.PIECES])  # any lane would do: none has work yet
        self._reporters = {DeviceLane.D2H: _Reporter(self)}  # made now, as it also renews `base`

    def _make_streams(self) -> dict[DeviceLane, Any]:
        """Make the lanes' streams; a lane in `shared` gets another lane's, which is made before."""
        # Their kernels are short and much work waits for them, so they precede those of forward and backward.
        with_priority = (DeviceLane.UPDATE, DeviceLane.GRADIENTS, DeviceLane.PIECES)
        streams: dict[DeviceLane, Any] = {}
        for lane in LANES:
            if lane not in self.shared:
                streams[lane] = self.backend.stream(self.device, lane in with_priority)
        streams.update((lane, streams[other]) for lane, other in self.shared.items())
        return streams

    # Threads

    def prepare_thread(self) -> None:
        """See `Device.prepare_thread`."""
        with raising_offload_error(self.name):
            torch.accelerator.set_device_index(self.device)
        self.backend.relax_captures()

    def _read_clocks(self, idle: Any) -> tuple[Any, float]:
        """Record an event on an idle stream; return it with the host's monotonic time at which it happened.

        The event happened between two readings of the host's clock, so its time is known the better, the closer these
        are. A few events are tried (see `CLOCK_S`), and the one with the closest readings is returned.
        """
        best: tuple[Any, float] = None, 0.0
        best_took_s = float("inf")
        for _ in range(CLOCK_TRIES):
            event, before_s = self.backend.event(self.device, True), time.monotonic()
            event.record(idle)
            event.synchronize()
            took_s = time.monotonic() - before_s
            is_late = took_s >= CLOCK_LATE_S
            if took_s < best_took_s:
                best_took_s = took_s
                # Midway between the readings, or at the later one if the device was late.
                best = event, before_s + (took_s if is_late else took_s / 2)
            if best_took_s < CLOCK_S or is_late:
                break
        return best

    def rebase(self) -> None:
        """Replace `base`, the event from which marks are timed, if it is old and some stream is idle."""
        with self.current():
            _, base_s = self.base
            if time.monotonic() - base_s > REBASE_S:
                idle = next((stream for stream in self._streams.values() if stream.query()), None)
                if idle is not None:
                    self.base = self._read_clocks(idle)

    def prepare(self, rule: str, kinds: Iterable[tuple[DtypeCode, DtypeCode, int]]) -> None:
        """See `Device.prepare`."""
        with self.current():
            self._kernel.compile(RULES[rule], kinds)

    # Memory

    def free_bytes(self) -> int:
        """See `Device.free_bytes`."""
        with self.current():
            return int(torch.accelerator.get_memory_info(self.device)[0])

    def cached_bytes(self) -> int:
        """See `Device.cached_bytes`."""
        with self.current():
            return torch.accelerator.memory_reserved(self.device) - torch.accelerator.memory_allocated(self.device)

    def allocate(self, nbytes: int, caller: Hashable = None) -> int:
        """Allocate memory by torch's allocator, to be kept or (with `caller`) borrowed; see `Device.allocate`."""
        with self.current():
            # Torch may return memory of a freed tensor, which earlier work on this stream still uses. Lanes are other
            # streams. So that work is waited for here; for borrowed memory the lanes follow `mark_caller` instead.
            with working_on(cast(Any, caller)) if caller is not None else contextlib.nullcontext():
                tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if caller is None:
                self.backend.current_stream(self.device).synchronize()
                self._memory[tensor.data_ptr()] = tensor
            else:
                self._borrowed.append(tensor)
        return tensor.data_ptr()

    def release(self, address: int) -> None:
        """See `Device.release`."""
        del self._memory[address]

    def return_borrowed(self) -> None:
        """See `Device.return_borrowed`."""
        with self.current():
            for tensor in self._borrowed:
                for stream in dict.fromkeys(self._streams.values()):  # each once: two lanes share one
                    tensor.record_stream(stream)  # torch reuses the memory after the work that is on the lane now
        self._borrowed.clear()

    def record_use(self, tensor: torch.Tensor) -> None:
        """See `Device.record_use`; costs nothing if the tensor was allocated on the caller's stream."""
        with self.current():
            tensor.record_stream(self.backend.current_stream(self.device))

    # Order

    def stream(self, lane: DeviceLane) -> Any:
        """Return the stream of a lane; the caller has made the device current.

        Raises:
            ConfigError: The lane is `CALLER`, and a CUDA graph is being captured from its stream; see `Device`.
        """
        if lane is not DeviceLane.CALLER:
            return self._streams[lane]
        if self.backend.captures():
            combinations.CAPTURED.refuse("optimizer", "used while a CUDA graph is captured")
        return self.backend.current_stream(self.device)

    def mark(self, lane: DeviceLane, *, timed: bool = True) -> Mark:
        """See `Device.mark`."""
        with self.current():
            return _Event(self, lane, self.stream(lane), timed)

    def caller(self) -> Hashable:
        """See `Device.caller`."""
        with self.current():
            stream: Hashable = self.stream(DeviceLane.CALLER)
            return stream

    def mark_caller(self, caller: Hashable) -> Mark:
        """See `Device.mark_caller`."""
        with self.current():
            return _Event(self, DeviceLane.CALLER, caller, timed=False)

    def follow(self, lane: DeviceLane, mark: Mark) -> None:
        """See `Device.follow`."""
        if isinstance(mark, _Event):  # as all marks of this device are
            with self.current():
                self.stream(lane).wait_event(mark.event)

    def report(self, mark: Mark, queue: Queue, op: int) -> None:
        """See `Device.report`; the thread that reports a lane's marks is started with the lane's first one."""
        if isinstance(mark, _Event):  # as all marks of this device are
            with self._reporters_lock:
                if mark.lane not in self._reporters:
                    self._reporters[mark.lane] = _Reporter(self)
                reporter = self._reporters[mark.lane]
            reporter.add(mark, queue, op)

    # Work

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int, piece_bytes: int = 0) -> None:
        """See `Device.copy`; between pieces runs a kernel that casts one element, so that other copies get a turn."""
        if not nbytes:
            return
        target_device, source_device = (self.device, HOST) if lane is DeviceLane.H2D else (HOST, self.device)
        with self.current(), working_on(self.stream(lane)):
            target_bytes = tensor_at(target, nbytes, torch.uint8, target_device)
            source_bytes = tensor_at(source, nbytes, torch.uint8, source_device)
            if not piece_bytes:
                target_bytes.copy_(source_bytes, non_blocking=True)
                return
            pause_target, pause_source = self._pauses[lane]
            # Both lists have a piece, the pause, the next piece, the pause, and so on.
            targets = [each for piece in target_bytes.unsafe_split(piece_bytes) for each in (piece, pause_target)]
            sources = [each for piece in source_bytes.unsafe_split(piece_bytes) for each in (piece, pause_source)]
            torch._foreach_copy_(targets, sources, non_blocking=True)  # one copy after the other, by one call

    def copy_pieces(self, lane: DeviceLane, pieces: npt.NDArray[np.uint64]) -> None:
        """See `Device.copy_pieces`."""
        with self.current(), working_on(self.stream(lane)):
            self._kernel.copy_pieces(pieces)

    def send_table(self, table: npt.NDArray[Any]) -> Any:
        """See `Device.send_table`; it is copied on `H2D`'s stream, for work on the current stream, `UPDATE`'s."""
        with self.current(), working_on(self.stream(DeviceLane.UPDATE)):
            return self._kernel.send(table)

    def update(self, sent: Any) -> None:
        """See `Device.update`."""
        with self.current(), working_on(self.stream(DeviceLane.UPDATE)):
            self._kernel.update(sent)

    def gradient_blocks(
        self,
        lane: DeviceLane,
        source: int,
        dtype: DtypeCode,
        numel: int,
        blocks: int,
        target: int = 0,
        target_dtype: DtypeCode = DtypeCode.NONE,
        accumulate: bool = False,
    ) -> None:
        """Enqueue a gradient's sums of squares, and its copy or addition to a slot; see `Device.gradient_blocks`."""
        with self.current(), working_on(self.stream(lane)):
            self._kernel.gather(source, dtype, numel, blocks, target, target_dtype, accumulate=accumulate)

    def sum_gradients(self, lane: DeviceLane, dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> None:
        """See `Device.sum_gradients`."""
        with self.current(), working_on(self.stream(lane)):
            self._kernel.sum_rows(dtype, rows)

    def fingerprint_gradients(self, lane: DeviceLane, dtype: DtypeCode, rows: npt.NDArray[np.uint64]) -> None:
        """See `Device.fingerprint_gradients`."""
        with self.current(), working_on(self.stream(lane)):
            self._kernel.fingerprint_rows(dtype, rows)

    def close(self) -> None:
        """Wait for all streams, end the threads that report, and free all memory."""
        if self._closed:
            return
        with contextlib.suppress(OffloadError), self.current():
            for stream in self._streams.values():
                stream.synchronize()
        self._closed = True
        for reporter in self._reporters.values():
            reporter.close()
        self._memory.clear()
        self._borrowed.clear()


def _node_of(pci_address: tuple[int, int, int] | None) -> int | None:
    """Return the NUMA node of the device at a PCI address (domain, bus, device); None if Linux does not tell."""
    if pci_address is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        node = int((PCI_DEVICES / "{:04x}:{:02x}:{:02x}.0".format(*pci_address) / "numa_node").read_text())
        return node if node >= 0 else None  # -1: Linux knows of none
    return None


def _make_pause(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return target and source of a copy that is done by a short kernel.

    Their dtypes differ, which takes a kernel: a copy engine casts nothing.
    """
    return torch.empty(1, dtype=torch.float32, device=device), torch.empty(1, dtype=torch.int32, device=device)
