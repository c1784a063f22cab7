"""Calls of an accelerator's driver that need no lane: make a device current, pin host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from offload.backends import accelerator
from offload.errors import OffloadError


class _Current:
    """The context that `Driver.current` returns. A generator would be slower, and every call enters a context."""

    # `_switch` is torch's own context, by which the device was made current; None if it was current before.
    __slots__ = ("_index", "_name", "_switch")

    def __init__(self, name: str, index: int) -> None:
        self._name, self._index = name, index

    def __enter__(self) -> None:
        """Make the device current, unless it is."""
        self._switch = None
        try:
            if torch.accelerator.current_device_index() != self._index:
                switch = torch.accelerator.device_index(self._index)
                switch.__enter__()
                self._switch = switch
        except RuntimeError as error:
            raise _as_offload_error(self._name, error) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Make the former device current again; raise an error of torch's as an `OffloadError`."""
        if self._switch is not None:
            self._switch.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and not isinstance(error, OffloadError):
            raise _as_offload_error(self._name, error) from error


class Driver:
    """An accelerator's driver, as far as it is called without a lane.

    Args:
        device: Which accelerator; None for the current one.

    Attributes:
        device: The accelerator, with its index.
        backend: What differs between types of accelerators.
        name: The accelerator's name in messages.

    Raises:
        OffloadError: torch sees no such device, or `BACKENDS` has none of its type.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        with raising_offload_error("accelerator"):
            self.device, self.backend = accelerator(device)
        self.name = str(self.device)

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make this the thread's current device within a block, and turn torch's errors into `OffloadError`s.

        A new thread's current device is 0, and any call for device 0 makes a context there, of half a gigabyte.
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
def raising_offload_error(name: str) -> Iterator[None]:
    """Turn torch's errors for a device, within a block, into `OffloadError`s that begin with `name`."""
    try:
        yield
    except OffloadError:
        raise
    except RuntimeError as error:
        raise _as_offload_error(name, error) from error


def _as_offload_error(name: str, error: RuntimeError) -> OffloadError:
    """Return the `OffloadError` to raise for an error of torch's about a device."""
    return OffloadError(f"{name}: {_first_line(error)}")


def _first_line(error: RuntimeError) -> str:
    """Return the first line of an error's text (others are advice for debugging), or the name of its type."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
