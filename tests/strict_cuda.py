"""What `torch.cuda` and the driver below it insist on, and the test accelerator, of torch's own classes, does not.

`StrictCuda` takes the place of `offload.backends.cuda`. Each rule has its source, files and lines of torch 2.13;
`tests/unit/test_cuda_row.py` runs the same tests on `torch.cuda` where there is one. It cannot there where nothing
tells: with which flags an event was made, and for which devices memory is registered.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

OUT_OF_MEMORY = 2
ALREADY_REGISTERED = 712
"""`cudaError_t`, driver_types.h."""


class Stream:
    """Its own class: `torch.Stream` is no `torch.cuda.Stream` (torch/cuda/streams.py:17).

    The lower the priority's number the earlier its work goes, and 0 is the least that there is. A positive one is not
    refused, and counts as 0 (torch/cuda/streams.py:29; c10/cuda/CUDAStream.h:177).
    """

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.priority = torch.device(device or "cuda:0"), min(priority, 0)


class Event:
    """Takes streams of its own class alone; torch 2.11 says "invalid device ordinal" of others (pytorch #173792).

    Who waits for one that was not made with `blocking` spins (torch/cuda/streams.py:174; cudaEventBlockingSync in the
    runtime's reference); the time of one that was not made with `enable_timing` is not told
    (c10/cuda/CUDAEvent.h:199).
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.timed, self.sleeps, self.recorded_on = enable_timing, blocking, None

    def record(self, stream: Any = None) -> None:
        if type(stream) is not Stream:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.recorded_on = stream


class Runtime:
    """The few calls that torch.cuda.cudart() has (torch/csrc/cuda/shared/cudart.cpp, "HostRegister").

    A call that is refused returns its error and leaves it as the thread's last one ("cudaGetLastError" in the
    runtime's reference), which only a launch takes: C10_CUDA_KERNEL_LAUNCH_CHECK raises what it finds
    (c10/cuda/CUDAException.h:72). Memory that is set or copied does not launch; `zero_` is a memset from pytorch
    #195303 on. Memory is registered for all devices by a flag alone (cudaHostRegisterPortable, "cudaHostRegister").
    """

    def __init__(self, cuda: StrictCuda) -> None:
        self._cuda = cuda

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        known = self._cuda.registered
        if any(address < at + size and at < address + nbytes for at, (size, _) in known.items()):
            return self._refuse(ALREADY_REGISTERED)
        if sum(size for size, _ in known.values()) + nbytes > self._cuda.most_bytes:
            return self._refuse(OUT_OF_MEMORY)
        known[address] = nbytes, flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return (
            0 if self._cuda.registered.pop(address, None) else self._refuse(713)
        )  # cudaErrorHostMemoryNotRegistered

    def cudaGetErrorString(self, error: int) -> str:
        return {OUT_OF_MEMORY: "out of memory", ALREADY_REGISTERED: "part or all of it is registered"}[error]

    def _refuse(self, error: int) -> int:
        self._cuda.last_error = error
        return error


class StrictCuda:
    """Stands for `torch.cuda` in `offload.backends`, whose other operations on "cuda" go to `launched` and `set`.

    Attributes:
        most_bytes: Of host memory that can be registered.
        registered: Size and flags of what is, by address.
        last_error: Of the thread.
        capture_mode: Each thread's.
    """

    Stream, Event = Stream, Event

    def __init__(self, most_bytes: int = 1 << 40) -> None:
        self.most_bytes = most_bytes
        self.registered: dict[int, tuple[int, int]] = {}
        self.last_error = 0
        self.capture_mode = threading.local()
        self.current = Stream()

    def cudart(self) -> Runtime:
        return Runtime(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return False

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(name="strict", pci_domain_id=0, pci_bus_id=1, pci_device_id=0)

    def launch(self) -> None:
        """Launch a kernel, which is blamed for the error before it."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error: {error}")

    @contextlib.contextmanager
    def operators(self) -> Iterator[None]:
        """Have torch's operators on device "cuda" be launches or memsets of this one."""
        cuda = self

        class Mode(TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
                options = options or {}
                if str(options.get("device", "")).startswith("cuda"):
                    return FarTensor(cuda)  # made: by a memset at the most
                return function(*arguments, **options)

        with Mode():
            yield


class FarTensor:
    """A tensor on the strict device."""

    def __init__(self, cuda: StrictCuda) -> None:
        self._cuda = cuda

    def zero_(self) -> FarTensor:
        return self

    def __getattr__(self, name: str) -> Any:
        def operator(*arguments: Any, **options: Any) -> FarTensor:
            self._cuda.launch()
            return self

        if name.startswith("__"):
            raise AttributeError(name)
        return operator


def opened(cuda: StrictCuda) -> Any:
    """Return what stands for `ctypes.CDLL`: the runtime's own library, with the one call that is asked of it.

    A thread's mode is exchanged for another, and the call writes the one that it had; each thread begins with the
    global one, 0 ("cudaThreadExchangeStreamCaptureMode" in the runtime's reference).
    """

    class Library:
        def __init__(self, name: str) -> None:
            assert name.startswith("libcudart.so"), name

        def __getitem__(self, name: str) -> Any:
            assert name == "cudaThreadExchangeStreamCaptureMode"

            def exchange(mode: Any) -> None:
                there = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))
                before = getattr(cuda.capture_mode, "value", 0)
                cuda.capture_mode.value, there[0] = there[0], before

            return exchange

    return Library
