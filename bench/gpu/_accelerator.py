"""What measurements ask of an accelerator, with torch alone: streams, events, memory and registrations."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
Found = dict[str, Any]
HOST = torch.device("cpu")
HUGE_PAGE_BYTES = 2 << 20

cuda: Any = torch.cuda


class Cuda:
    """The current CUDA device.

    Attributes:
        device: Where tensors are made.
        smoke: Whether sizes are tiny.
    """

    def __init__(self, smoke: bool = False) -> None:
        self.smoke = smoke
        self.device = torch.device("cuda", cuda.current_device())

    def stream(self, priority: int = 0) -> Any:
        """Return a new stream; one of priority -1 goes first."""
        return cuda.Stream(self.device, priority=priority)

    def on(self, stream: Any) -> Any:
        """Let work within a block go to a stream."""
        return cuda.stream(stream)

    def event(self, stream: Any) -> Any:
        """Return a timed event that a stream has been given now."""
        made = cuda.Event(enable_timing=True)
        made.record(stream)
        return made

    def wait(self) -> None:
        """Wait for all work of the device."""
        cuda.synchronize(self.device)

    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory; return the runtime's code: 0 is success."""
        code = int(cuda.cudart().cudaHostRegister(address, nbytes, 1))
        if code:
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=self.device).add_(1)  # a launch takes the error, else the next is blamed for it
        return code

    def unregister(self, address: int) -> None:
        """Take a registration back."""
        cuda.cudart().cudaHostUnregister(address)

    def facts(self) -> Found:
        """Return what the device says of itself."""
        found = cuda.get_device_properties(self.device)
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")

        def attribute(number: int) -> int:
            value = ctypes.c_int(-1)
            runtime.cudaDeviceGetAttribute(ctypes.byref(value), number, self.device.index)
            return value.value

        return {
            "name": found.name,
            "cuda": torch.version.cuda,
            "memory_bytes": found.total_memory,
            "copy_engines": attribute(40),
            "kernels_read_registered_memory": attribute(91),
        }


class Late(Cuda):
    """The test accelerator, which the CPU plays: it shows that everything runs, and nothing else."""

    def __init__(self) -> None:
        sys.path.append(str(ROOT / "tests"))
        from accelerator import late

        late.load()
        self._late, self.smoke, self.device = late, True, torch.device("late", 0)

    def stream(self, priority: int = 0) -> Any:
        return torch.Stream(self.device, priority=priority)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def event(self, stream: Any) -> Any:
        made = torch.Event(self.device, enable_timing=True)
        made.record(stream)
        return made

    def wait(self) -> None:
        torch.accelerator.synchronize()

    def register(self, address: int, nbytes: int) -> int:
        self._late.pin(address, nbytes)
        return 0

    def unregister(self, address: int) -> None:
        self._late.unpin(address)

    def facts(self) -> Found:
        return {"name": "the test accelerator: no figure means anything"}


def _accelerator(name: str, *, smoke: bool = False) -> Cuda:
    """Return the accelerator of a name, "cuda" or "late"."""
    return Late() if name == "late" else Cuda(smoke)


class Pinned:
    """Registered host memory, on huge pages where the system gives them.

    Args:
        gpu: What copies from and to it.
        nbytes: Its size.
    """

    def __init__(self, gpu: Cuda, nbytes: int) -> None:
        self._gpu = gpu
        self._memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        began = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.address = began + -began % HUGE_PAGE_BYTES
        ctypes.memset(self.address, 1, nbytes)
        self._used = 0
        self.code = gpu.register(self.address, nbytes)

    def take(self, nbytes: int, device: torch.device = HOST) -> torch.Tensor:
        """Return the next bytes as a tensor: the host's, or as a kernel of the device finds them."""
        at, self._used = self.address + self._used, self._used + nbytes
        return tensor_at(at, nbytes, device)

    def close(self) -> None:
        """Take the registration back; the memory goes with the process."""
        self._gpu.wait()
        if not self.code:
            self._gpu.unregister(self.address)


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory as a tensor of bytes; whoever owns it keeps it."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def spread(samples: list[float]) -> Found:
    """Return the median of some samples, and how far they are apart."""
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}


Measurement = Callable[[Cuda], Found]


def take(measurements: dict[str, Measurement], description: str) -> None:
    """Take one measurement and print it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=measurements)
    parser.add_argument("--accelerator", choices=["cuda", "late"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it still run?")
    args = parser.parse_args()
    if args.accelerator == "cuda" and not cuda.is_available():
        parser.error("torch sees no CUDA device")
    print(json.dumps(measurements[args.name](_accelerator(args.accelerator, smoke=args.smoke))), flush=True)
