"""Holds an optimizer's engine and the device of its weights; the engine may be opened after the first backward."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from offload.config import OffloadConfig
from offload.device.none import NoDevice
from offload.errors import ConfigError, SessionBrokenError
from offload.layout import Parameter
from offload.limits import Limits
from offload.protocols import Device, DeviceLane
from offload.rules import UpdateRule
from offload.session.engine import Engine

log = logging.getLogger("offload")


class OptimizerParts(Protocol):
    """The methods of an optimizer that its parts call."""

    def _open(self, config: OffloadConfig) -> None:
        """Describe the parameters, and open the engine with these settings by `EngineHolder.start`."""

    def _finish(self) -> None:
        """Wait until the last step is over."""

    def _start_values(self) -> Mapping[torch.Tensor, Mapping[str, float]]:
        """Return the values that state tensors start from, by name, for parameters where they are not 0."""


class EngineHolder:
    """Holds an optimizer's engine; can defer opening it until the first backward has shown what is free on the GPU.

    Args:
        owner: The optimizer, by a weak proxy: its holder does not keep it alive.

    Attributes:
        config: The optimizer's settings, for this rank.
        rule: How state is updated.
        device: The device that all weights lie on.
        engine_if_open: The engine; None before it is opened.
        is_deferred: Whether the engine is opened only when it is first needed.
    """

    def __init__(self, config: OffloadConfig, rule: UpdateRule, owner: OptimizerParts, limits: Limits) -> None:
        self.config = config
        self.rule = rule
        self._limits = limits
        self.set_device(NoDevice())
        self.engine_if_open: Engine | None = None
        self.is_deferred = False
        self._owner = owner
        self._closed = False

    def set_device(self, device: Device) -> None:
        """Set the device of the weights; it is closed with the holder, unless an engine is opened for it."""
        self.device: Device = device
        self._close_device = weakref.finalize(self, device.close)

    @property
    def engine(self) -> Engine:
        """The engine, which this opens if that was deferred; see `open`."""
        return self.engine_if_open or self.open()

    def open(self) -> Engine:
        """Return the engine; open it first if that was deferred. An engine that was closed is returned, too.

        If this opens it, backward has not shown yet how much of the GPU is free. So no state has its home there,
        unless the settings say how much.
        """
        if self.engine_if_open is None and self.is_deferred and not self._closed:
            config = self.config.opened_early()
            if config is not self.config:
                log.info("no state is at home on the GPU, as it is asked for before the first step")
            self._owner._open(config)  # which calls `start`: that sets `engine_if_open`
        if self.engine_if_open is None:
            self.check_open()
            # Not closed and not deferred: the optimizer's constructor has not come to opening it.
            raise ConfigError("optimizer", "not open", "use it between its constructor and close()")
        return self.engine_if_open

    def check_open(self) -> None:
        """Raise `SessionBrokenError` if the engine has been closed."""
        if self._closed:
            raise SessionBrokenError("the session is closed; make a new optimizer to go on")

    def open_after_backward(self) -> None:
        """Open the engine if that was deferred, as backward has shown by now how much of the GPU is free.

        After `close` this does nothing.
        """
        if not self._closed:
            # Nobody uses the mark. While a CUDA graph is captured, making one raises, before anything has changed.
            self.device.mark(DeviceLane.CALLER, timed=False)
            if self.engine_if_open is None:
                self._owner._open(self.config)

    def start(self, parameters: Sequence[Parameter], config: OffloadConfig, *, gradient_slots: bool) -> None:
        """Open the engine, which owns the device from now on; if opening fails, both are closed.

        `gradient_slots`: whether the engine provides memory for gradients.
        """
        self._close_device.detach()  # as the engine closes the device, also where opening fails
        self._closed = True  # until the engine is open: if that fails, this holder can open none any more
        config = dataclasses.replace(config, shard=False)  # `parameters` describe this rank's pieces already
        self.engine_if_open = Engine(
            parameters, config, gradient_slots=gradient_slots, device=self.device, rule=self.rule, limits=self._limits
        )
        self._closed = False

    def close(self) -> None:
        """Close the engine, or the device if there is none; idempotent."""
        self._closed = True
        if self.engine_if_open is not None:
            self.engine_if_open.close()
        else:
            self._close_device()
