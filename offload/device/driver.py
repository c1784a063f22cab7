"""What a driver is asked for by itself, without a lane: which device is current, and which host memory it reaches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from offload.backends import accelerator
from offload.errors import OffloadError


class _Current:
    """See `Driver.current`; a class, as every call of a device is made within one."""

    __slots__ = ("_index", "_name", "_other")

    def __init__(self, name: str, index: int) -> None:
        self._name, self._index = name, index

    def __enter__(self) -> None:
        self._other = None
        try:
            if torch.accelerator.current_device_index() != self._index:
                other = torch.accelerator.device_index(self._index)
                other.__enter__()
                self._other = other
        except RuntimeError as error:
            raise _refusal(self._name, error) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._other is not None:
            self._other.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and not isinstance(error, OffloadError):
            raise _refusal(self._name, error) from error


class Driver:
    """An accelerator's driver.

    Args:
        device: Of which one; None for the current.

    Attributes:
        device: Which one.
        backend: What differs between types of accelerators.
        name: What it is, for messages.

    Raises:
        OffloadError: torch sees no such device, or `BACKENDS` has none of its type.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        with refusals("accelerator"):
            self.device, self.backend = accelerator(device)
        self.name = str(self.device)

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make this the thread's current device, and turn torch's errors into `OffloadError`s.

        A thread begins with device 0, and any call for that device makes a context there, of half a gigabyte.
        """
        return _Current(self.name, self.device.index)

    def pin(self, address: int, nbytes: int) -> None:
        """See `Device.pin`."""
        with self.current():
            try:
                self.backend.pin(address, nbytes)
            except RuntimeError as error:
                reason = f"{nbytes} bytes of host memory cannot be pinned: {_first_line(error)}"
                raise OffloadError(f"{self.name}: {reason}") from error

    def unpin(self, address: int) -> None:
        """See `Device.unpin`."""
        with contextlib.suppress(OffloadError), self.current():
            self.backend.unpin(address)


@contextlib.contextmanager
def refusals(name: str) -> Iterator[None]:
    """Turn torch's errors for a device into `OffloadError`s."""
    try:
        yield
    except OffloadError:
        raise
    except RuntimeError as error:
        raise _refusal(name, error) from error


def _refusal(name: str, error: RuntimeError) -> OffloadError:
    return OffloadError(f"{name}: {_first_line(error)}")


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
