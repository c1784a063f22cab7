"""Accelerators by type ("cuda"): one row of `BACKENDS` each, of functions for which torch has no common call.

Pinning of host memory is one. All else is done by `torch.accelerator`, streams and tensors, which are the same for
every type. A type without a row is refused: results are promised bit for bit, and a type gets a row once it has been
tested for that.
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
    """The functions of one type of accelerators; they are called with the device current.

    Arguments stand in brackets. Defaults are torch's calls that are common to all types; or they do nothing, where a
    type has no such thing.

    Attributes:
        pin: Locks host memory (address, bytes) and lets the device reach it; raises `RuntimeError` with the reason.
        unpin: Undoes `pin` (address).
        compiler: "triton" where kernels are compiled with it; None where plain torch operations take their place.
        describe: Returns the name (device) and the PCI address: domain, bus, device; None for one that is not known.
        stream: Makes a stream (device, whether its work goes before that of other streams: by priority -1, not 0).
        current_stream: Returns the current stream (device), of the class that `stream` makes.
        event: Makes an event (device, whether it is timed) for such streams. A thread that waits for it should sleep.
        captures: Returns whether work on the current stream is being captured for a graph.
        relax_captures: Keeps this thread's calls from breaking captures by other threads.
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
    """Check that an accelerator exists; return it, with an index, and the row of its type.

    Args:
        device: The device; without an index, the current one of its type is meant. None for the current accelerator.
        name: The setting that an error names.

    Raises:
        ConfigError: There is no such device, or it is of a type that offload does not run on.
    """
    present = torch.accelerator.current_accelerator(check_available=True)
    chosen = present if device is None else torch.device(device)
    if chosen is None:
        raise ConfigError(name, device, "torch sees no accelerator")
    backend = BACKENDS.get(chosen.type)
    if backend is None:
        raise ConfigError(name, str(chosen), ADVICE)
    # Torch counts the devices of one type only: that of `present`, which has no index. Others count as absent.
    is_present = present == torch.device(chosen.type)
    count = torch.accelerator.device_count() if is_present else 0
    if (chosen.index or 0) >= count:
        raise ConfigError(name, str(chosen), f"torch sees {count} such devices")
    index = torch.accelerator.current_device_index() if chosen.index is None else chosen.index
    return torch.device(chosen.type, index), backend


class working_on:
    """Make a stream the current device's current stream within this context.

    Instead of torch's `with stream`: that notes the former stream on the stream object itself, so that threads which
    share the object would overwrite each other's note.
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
    """Return a flat tensor over memory of a device, or the host's, without a copy.

    The tensor does not own the memory: whoever allocated it must not free it while the tensor is in use.
    """
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, numel * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, (numel,), (1,))


def _cuda_pin(address: int, nbytes: int) -> None:
    """Pin host memory; see `Backend.pin`."""
    runtime = cuda.cudart()
    error = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
    if int(error):
        with contextlib.suppress(RuntimeError):
            # CUDA reports the error again at the next launch of a kernel, which might be the user's. So launch one
            # here: an addition, as making zeros may launch none.
            torch.empty(1, dtype=torch.uint8, device="cuda").add_(1)
        raise RuntimeError(f"{runtime.cudaGetErrorString(error)} (CUDA error {int(error)})")


def _cuda_describe(device: torch.device) -> tuple[str, tuple[int, int, int] | None]:
    """Return a device's name and PCI address; see `Backend.describe`."""
    properties = cuda.get_device_properties(device)
    try:
        return properties.name, (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    except AttributeError:  # a build of torch that does not know the address
        return properties.name, None


def _cuda_relax_captures() -> None:
    """Set this thread's capture mode to "relaxed".

    By default many calls of this thread would make another thread's capture of a graph fail. Torch has no call for
    that, so the runtime's own is called, CUDA's or ROCm's.
    """
    name, library = ("hip", "libamdhip64.so") if torch.version.hip else ("cuda", "libcudart.so")
    version = f".{torch.version.cuda.partition('.')[0]}" if torch.version.cuda else ""  # as in libcudart.so.12
    try:
        runtime = ctypes.CDLL(library + version)  # usually torch has loaded it: this is that one's handle then
        # By reference: the call exchanges the mode, and puts the former one there, which nobody needs.
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
        # CUDA's own classes: `torch.Event` would spin in waits, where `blocking` lets the thread sleep; and
        # `torch.cuda.Event` takes streams of `torch.cuda.Stream` only.
        stream=lambda device, first: cuda.Stream(device, priority=-first),
        current_stream=lambda device: cuda.current_stream(device),
        event=lambda device, timed: cuda.Event(enable_timing=timed, blocking=True),
        captures=lambda: bool(cuda.is_current_stream_capturing()),
        relax_captures=_cuda_relax_captures,
    )
}
