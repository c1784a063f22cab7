"""A CUDA (or ROCm) device as torch sees it: streams, events, memory and copies behind `offload.protocols.Device`.

Every lane is a non-blocking stream of its own. Marks are CUDA events with timing, whose waits sleep. Device memory is
torch's own, so that it shows in torch's figures and what is given back is used again. Addresses become tensors
without a copy, so torch chooses the driver's calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt
import torch

from offload.errors import OffloadError
from offload.kernels.gpu import GpuUpdateKernel
from offload.protocols import ERROR_DEVICE, DeviceLane, DtypeCode, Mark, Queue

log = logging.getLogger("offload")

cuda: Any = torch.cuda

_PORTABLE = 1  # cudaHostRegisterPortable

REBASE_S = 10.0
"""How old the event may be from which marks are timed: CUDA gives a float of milliseconds, which has steps of half a
microsecond after ten seconds and of eight milliseconds after a day, and its clock drifts from the host's."""


class _Event:
    """A mark: an event that has been recorded."""

    def __init__(self, device: CudaDevice, event: Any, number: int, base: tuple[Any, float]) -> None:
        self.device = device
        self.event = event
        self.number = number
        self.base = base

    # With the device set: what a new thread asks first would else make a context on device 0, of half a gigabyte.

    def reached(self) -> bool:
        with _refusals(self.device.name), cuda.device(self.device.device):
            return bool(self.event.query())

    def wait(self) -> None:
        with _refusals(self.device.name), cuda.device(self.device.device):
            self.event.synchronize()

    def time_s(self) -> float:
        with _refusals(self.device.name):
            base, base_s = self.base
            return base_s + float(base.elapsed_time(self.event)) / 1e3


class _Memory:
    """Bytes of a device, as torch takes them without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


class CudaDevice:
    """A `offload.protocols.Device`.

    Args:
        device: Which one; None for the current.

    Raises:
        OffloadError: torch sees no such device, or its kernels cannot be used.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._kernel = GpuUpdateKernel(device)
        self.device = self._kernel.device
        self.name = f"{self.device} ({cuda.get_device_name(self.device)})"
        self._numbers = itertools.count()
        self._memory: dict[int, torch.Tensor] = {}
        self._pending: list[tuple[_Event, Queue, int]] = []
        self._some = threading.Condition()
        self._closed = False
        with _refusals(self.name), cuda.device(self.device):
            lanes = (DeviceLane.H2D, DeviceLane.D2H, DeviceLane.UPDATE, DeviceLane.GRADIENTS)
            self._streams = {lane: cuda.Stream(self.device) for lane in lanes}
            self._clock = cuda.Stream(self.device)
            self._base = self._now()
        self._thread = threading.Thread(target=self._post_reports, name="offload-gpu", daemon=True)
        self._thread.start()

    def _now(self) -> tuple[Any, float]:
        """Return an event that happens now, on a stream with nothing else on it, and the monotonic clock's time."""
        with cuda.device(self.device):
            event = cuda.Event(enable_timing=True)
            event.record(self._clock)
            event.synchronize()
            return event, time.monotonic()

    # Memory

    def free_bytes(self) -> int:
        """See `Device.free_bytes`."""
        with _refusals(self.name):
            return int(cuda.mem_get_info(self.device)[0])

    def allocate(self, nbytes: int) -> int:
        """See `Device.allocate`."""
        with _refusals(self.name):
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            # The allocator orders its memory by the stream that asked for it; our lanes are others.
            cuda.current_stream(self.device).synchronize()
        self._memory[tensor.data_ptr()] = tensor
        return tensor.data_ptr()

    def release(self, address: int) -> None:
        """See `Device.release`."""
        del self._memory[address]

    def pin(self, address: int, nbytes: int) -> None:
        """See `Device.pin`."""
        with _refusals(self.name), cuda.device(self.device):
            refused = cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)
            if not int(refused):
                return
            reason = f"{cuda.cudart().cudaGetErrorString(refused)} (CUDA error {int(refused)})"
            with contextlib.suppress(RuntimeError):
                # Takes the error away, which the next kernel would be blamed for.
                torch.zeros(1, dtype=torch.uint8, device=self.device)
        raise OffloadError(f"{self.name}: {nbytes} bytes of host memory cannot be pinned: {reason}")

    def unpin(self, address: int) -> None:
        """See `Device.unpin`."""
        with contextlib.suppress(OffloadError), _refusals(self.name), cuda.device(self.device):
            cuda.cudart().cudaHostUnregister(address)

    # Order

    def _stream(self, lane: DeviceLane) -> Any:
        return cuda.current_stream(self.device) if lane is DeviceLane.CALLER else self._streams[lane]

    def mark(self, lane: DeviceLane) -> Mark:
        """See `Device.mark`."""
        with _refusals(self.name):
            if time.monotonic() - self._base[1] > REBASE_S:
                self._base = self._now()
            base = self._base  # recorded before the mark, so no time since it is negative
            event = cuda.Event(enable_timing=True, blocking=True)
            event.record(self._stream(lane))
        return _Event(self, event, next(self._numbers), base)

    def follow(self, lane: DeviceLane, mark: Mark) -> None:
        """See `Device.follow`."""
        if isinstance(mark, _Event):
            with _refusals(self.name):
                self._stream(lane).wait_event(mark.event)

    def report(self, mark: Mark, queue: Queue, op: int) -> None:
        """See `Device.report`."""
        if isinstance(mark, _Event):
            with self._some:
                self._pending.append((mark, queue, op))
                self._some.notify()

    def _post_reports(self) -> None:
        while True:
            with self._some:
                while not self._pending and not self._closed:
                    self._some.wait()
                if not self._pending:
                    return
                # What was recorded first on a lane is reached first.
                chosen = min(self._pending, key=lambda pending: pending[0].number)
                self._pending.remove(chosen)
            mark, queue, op = chosen
            try:
                mark.wait()
                now_s = mark.time_s()
                queue.post(op, started_s=now_s, finished_s=now_s)
            except OffloadError as error:
                log.error("%s", error)
                now_s = time.monotonic()
                queue.post(op, error=ERROR_DEVICE, started_s=now_s, finished_s=now_s)

    # Work

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int) -> None:
        """See `Device.copy`; lane `H2D` copies to the device, all others from it."""
        if not nbytes:
            return
        here, there = (source, target) if lane is DeviceLane.H2D else (target, source)
        with _refusals(self.name), cuda.device(self.device), cuda.stream(self._stream(lane)):
            on_device = torch.as_tensor(_Memory(there, nbytes), dtype=torch.uint8, device=self.device)
            on_host = torch.frombuffer((ctypes.c_char * nbytes).from_address(here), dtype=torch.uint8)
            if lane is DeviceLane.H2D:
                on_device.copy_(on_host, non_blocking=True)
            else:
                on_host.copy_(on_device, non_blocking=True)

    def update(self, table: npt.NDArray[Any]) -> None:
        """See `Device.update`."""
        with _refusals(self.name), cuda.stream(self._streams[DeviceLane.UPDATE]):
            self._kernel.update(table)

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
        """See `Device.gradient_blocks`."""
        with _refusals(self.name), cuda.stream(self._stream(lane)):
            self._kernel.gather(source, dtype, numel, blocks, target, target_dtype, accumulate=accumulate)

    def close(self) -> None:
        """See `Device.close`."""
        if self._closed:
            return
        with contextlib.suppress(OffloadError), _refusals(self.name):
            for stream in self._streams.values():
                stream.synchronize()
        with self._some:
            self._closed = True
            self._some.notify()
        if self._thread is not threading.current_thread():  # the garbage collector may run on it
            self._thread.join()
        self._memory.clear()


@contextlib.contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turn what torch raises for a device into an `OffloadError`."""
    try:
        yield
    except OffloadError:
        raise
    except RuntimeError as error:
        raise OffloadError(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
