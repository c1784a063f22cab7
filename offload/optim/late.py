"""The engine under an optimizer, which may be opened later than the optimizer is made."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence

from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.layout import Parameter
from offload.protocols import Device, DeviceLane
from offload.session.engine import Engine

log = logging.getLogger("offload")


class LateEngine:
    """An engine and the GPU that it is for.

    On a GPU it is opened when the first backward pass has ended, if how much of the GPU it may use is to be found
    out: before, nobody knows what backward leaves free.

    Args:
        config: Of this rank.
        opens: The optimizer's method that describes parameters and calls `start`; it is not kept alive.

    Attributes:
        config: Of this rank.
        device: The GPU that all weights lie on; None for the CPU.
        opened: The engine, once there is one.
    """

    def __init__(self, config: OffloadConfig, opens: weakref.WeakMethod[Callable[[OffloadConfig], None]]) -> None:
        self.config = config
        self.device: Device | None = None
        self.opened: Engine | None = None
        self._opens = opens
        self._closed = False
        self._unopened: weakref.finalize[[], LateEngine] | None = None

    def leave(self, device: Device) -> None:
        """Leave opening until later; the device is closed if it comes to nothing."""
        self._unopened = weakref.finalize(self, device.close)

    @property
    def engine(self) -> Engine:
        """The engine; see `open`."""
        return self.opened or self.open()

    def open(self) -> Engine:
        """Return the engine, opened with no state on the GPU, if it was left until now.

        Raises:
            ConfigError: It was closed before it was opened.
        """
        if self.opened is None and self.device is not None and not self._closed:
            log.info("no state is at home on the GPU, as it is asked for before the first step")
            self._open(dataclasses.replace(self.config, gpu_memory=0))
        if self.opened is None:
            raise ConfigError("optimizer", "not open", "use it between its constructor and close()")
        return self.opened

    def open_after_backward(self) -> None:
        """Open the engine, if it was left until now: it is known now what backward leaves free."""
        if self.device is not None and not self._closed:
            # Before anything changes: refused while a CUDA graph is captured.
            self.device.mark(DeviceLane.CALLER, timed=False)
            if self.opened is None:
                self._open(self.config)

    def _open(self, config: OffloadConfig) -> None:
        opens = self._opens()
        if opens is not None:
            opens(config)

    def start(self, parameters: Sequence[Parameter], config: OffloadConfig, gradient_slots: bool) -> None:
        """Open the engine; if that fails, it is closed, and the device with it."""
        if self._unopened is not None:
            self._unopened.detach()
        self._closed = True
        self.opened = Engine(parameters, config, gradient_slots=gradient_slots, device=self.device)
        self._closed = False

    def close(self) -> None:
        """Close the engine, or the device if there is none; idempotent."""
        self._closed = True
        if self._unopened is not None:
            self._unopened.detach()
        if self.opened is not None:
            self.opened.close()
        elif self.device is not None:
            self.device.close()
