"""Accelerators by their type, as torch calls it: what torch has no common word for, in one row of `BACKENDS` each.

All else asks `torch.accelerator`, streams and tensors, which are the same for every type. A type without a row is
refused: results are promised bit for bit, and whether a type keeps that promise is looked at before it gets one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import ConfigError

log = logging.getLogger("offload")

cuda: Any = torch.cuda

ADVICE = (
    "keep weights on the CPU or on a CUDA (or ROCm) device; "
    "docs/architecture.md says what other accelerators would need"
)

_PORTABLE = 1  # cudaHostRegisterPortable
_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@dataclass(frozen=True)
class Backend:
    """What differs between types of accelerators. All is called with the device current.

    Attributes:
        pin: Locks host memory (address, bytes) and lets the device reach it; raises `RuntimeError` with the reason.
        unpin: Takes it back (address).
        compiler: What its kernels are compiled with, "triton"; None where plain torch operations do their work.
        describe: Returns a device's name, and its PCI domain, bus and device where these are known.
        stream: Makes a stream (device, whether its work goes before others').
        current_stream: Returns the current one of a device, as `stream` makes them.
        event: Makes an event (device, whether it is timed) for such streams. Waits for it should sleep.
        captures: Returns whether work on the current stream is being captured.
        relax_captures: Lets this thread's calls leave captures by other threads alone.
    """

    pin: Callable[[int, int], None]
    unpin: Callable[[int], Any]
    compiler: str | None = None
    describe: Callable[[torch.device], tuple[str, tuple[int, int, int] | None]] = lambda device: (device.type, None)
    stream: Callable[[torch.device, bool], Any] = lambda device, first: torch.Stream(device, priority=-first)
    current_stream: Callable[[torch.device], Any] = torch.accelerator.current_stream
    event: Callable[[torch.device, bool], Any] = lambda device, timed: torch.Event(device, enable_timing=timed)
    captures: Callable[[], bool] = lambda: False
    relax_captures: Callable[[], None] = lambda: None


def accelerator(device: torch.device | str | None = None, name: str = "device") -> tuple[torch.device, Backend]:
    """Return a device that is there, with its number, and its row; None for the current one.

    Raises:
        ConfigError: There is no such device, or none that offload runs on; about the setting `name`.
    """
    there = torch.accelerator.current_accelerator(check_available=True)
    chosen = there if device is None else torch.device(device)
    if chosen is None:
        raise ConfigError(name, device, "torch sees no accelerator")
    backend = BACKENDS.get(chosen.type)
    if backend is None:
        raise ConfigError(name, str(chosen), ADVICE)
    count = torch.accelerator.device_count() if there == torch.device(chosen.type) else 0
    if (chosen.index or 0) >= count:
        raise ConfigError(name, str(chosen), f"torch sees {count} such devices")
    index = torch.accelerator.current_device_index() if chosen.index is None else chosen.index
    return torch.device(chosen.type, index), backend


class working_on:
    """Make a stream of the current device the current one.

    `with stream` keeps what was current before on the stream itself, which several threads may share.
    """

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *raised: object) -> None:
        torch.accelerator.set_stream(self._before)


def tensor_at(address: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory of a device, or the host's, as a flat tensor; whoever owns it keeps it."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))


def _cuda_pin(address: int, nbytes: int) -> None:
    runtime = cuda.cudart()
    refused = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
    if int(refused):
        with contextlib.suppress(RuntimeError):
            # Only a launch clears the error, which the next kernel would be blamed for; making zeros may be none.
            torch.empty(1, dtype=torch.uint8, device="cuda").add_(1)
        raise RuntimeError(f"{runtime.cudaGetErrorString(refused)} (CUDA error {int(refused)})")


def _cuda_describe(device: torch.device) -> tuple[str, tuple[int, int, int] | None]:
    found = cuda.get_device_properties(device)
    try:
        return found.name, (found.pci_domain_id, found.pci_bus_id, found.pci_device_id)
    except AttributeError:  # a build of torch that does not know the address
        return found.name, None


def _cuda_relax_captures() -> None:
    """By default, many calls make a capture of a CUDA graph by another thread fail."""
    name, library = ("hip", "libamdhip64.so") if torch.version.hip else ("cuda", "libcudart.so")
    version = f".{torch.version.cuda.partition('.')[0]}" if torch.version.cuda else ""
    try:
        runtime = ctypes.CDLL(library + version)  # torch has loaded it
        runtime[f"{name}ThreadExchangeStreamCaptureMode"](ctypes.byref(ctypes.c_int(_RELAXED)))
    except (OSError, AttributeError) as error:
        log.debug("a capture of a CUDA graph may fail while offload works: %s", error)


BACKENDS: dict[str, Backend] = {
    # ROCm, too, which torch calls by the same name.
    "cuda": Backend(
        pin=_cuda_pin,
        unpin=lambda address: cuda.cudart().cudaHostUnregister(address),
        compiler="triton",
        describe=_cuda_describe,
        # An event of torch's common class spins while it is waited for, and this one takes streams of its own only.
        stream=lambda device, first: cuda.Stream(device, priority=-first),
        current_stream=lambda device: cuda.current_stream(device),
        event=lambda device, timed: cuda.Event(enable_timing=timed, blocking=True),
        captures=lambda: bool(cuda.is_current_stream_capturing()),
        relax_captures=_cuda_relax_captures,
    )
}
