"""The engine under an optimizer, and the GPU that it is for; it may be opened later than the optimizer is made."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence

from offload.config import OffloadConfig
from offload.device.none import NoDevice
from offload.errors import ConfigError, SessionBrokenError
from offload.layout import Parameter
from offload.limits import Limits
from offload.protocols import Device, DeviceLane
from offload.rules import UpdateRule
from offload.session.engine import Engine

log = logging.getLogger("offload")


class LateEngine:
    """An engine that may be opened late: before the first backward pass nobody knows what it leaves free on the GPU.

    Args:
        config: Of this rank.
        rule: Of the optimizer.
        opens: Describes parameters and calls `start`.
        limits: See `Engine`.

    Attributes:
        device: The one that all weights lie on.
        opened: The engine, once there is one.
        waits: Whether it is left until somebody needs it.
    """

    def __init__(
        self, config: OffloadConfig, rule: UpdateRule, opens: Callable[[OffloadConfig], None], limits: Limits
    ) -> None:
        self.config = config
        self.rule = rule
        self._limits = limits
        self.use(NoDevice())
        self.opened: Engine | None = None
        self.waits = False
        self._opens = opens
        self._closed = False

    def use(self, device: Device) -> None:
        """Take a device, which is closed if no engine is opened for it."""
        self.device: Device = device
        self._unopened = weakref.finalize(self, device.close)

    @property
    def engine(self) -> Engine:
        """The engine; see `open`."""
        return self.opened or self.open()

    def open(self) -> Engine:
        """Return the engine; if it was left until now, it is opened with no state at home on the GPU."""
        if self.opened is None and self.waits and not self._closed:
            log.info("no state is at home on the GPU, as it is asked for before the first step")
            self._opens(dataclasses.replace(self.config, gpu_memory=0))
        if self.opened is None:
            self.check_open()
            raise ConfigError("optimizer", "not open", "use it between its constructor and close()")
        return self.opened

    def check_open(self) -> None:
        """Raise `SessionBrokenError` if the engine has been closed."""
        if self._closed:
            raise SessionBrokenError("the session is closed; make a new optimizer to go on")

    def open_after_backward(self) -> None:
        """Open the engine, if it was left until now: it is known now what backward leaves free."""
        if not self._closed:
            # Before anything changes: refused while a CUDA graph is captured.
            self.device.mark(DeviceLane.CALLER, timed=False)
            if self.opened is None:
                self._opens(self.config)

    def start(self, parameters: Sequence[Parameter], config: OffloadConfig, gradient_slots: bool) -> None:
        """Open the engine; if that fails, it is closed, and the device with it."""
        self._unopened.detach()
        self._closed = True
        config = dataclasses.replace(config, shard=False)  # the parameters say which pieces they are
        self.opened = Engine(
            parameters, config, gradient_slots=gradient_slots, device=self.device, rule=self.rule, limits=self._limits
        )
        self._closed = False

    def close(self) -> None:
        """Close the engine, or the device if there is none; idempotent."""
        self._closed = True
        if self.opened is not None:
            self.opened.close()
        else:
            self._unopened()
