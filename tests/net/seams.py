"""All that the net knows of the inside of the package. Whoever moves one of these things changes it here."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from settling import settle as settle_engine
from world import SimulatedDevice

from offload import cli
from offload.kernels import CpuUpdateKernel, instruction_sets
from offload.measure import load_rates, save_rates
from offload.measure.rates_file import machine_facts, versions
from offload.protocols import Device, DeviceLane
from offload.tiers import parse_place

__all__ = [
    "CountedDevice",
    "SimulatedDevice",
    "facts",
    "instruction_sets",
    "load_rates",
    "on_device",
    "only",
    "save_rates",
    "settle",
    "verified",
]


METHODS = tuple(name for name, value in vars(Device).items() if callable(value) and not name.startswith("_"))
"""What a device can be asked for."""


class CountedDevice(SimulatedDevice):
    """A simulated device that counts what it is asked for, by method and, where there is one, by lane."""

    def __init__(self, memory_bytes: int, **options: Any) -> None:
        self.calls: Counter[str] = Counter()
        self._inside = threading.local()
        super().__init__(memory_bytes, **options)


def _counted(method: str) -> Callable[..., Any]:
    plain = getattr(SimulatedDevice, method)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(self._inside, "call", False):  # the device's own
            return plain(self, *arguments, **options)
        lanes = [each for each in (*arguments, *options.values()) if isinstance(each, DeviceLane)]
        self.calls[" ".join([method, *(lane.name.lower() for lane in lanes)])] += 1
        self._inside.call = True
        try:
            return plain(self, *arguments, **options)
        finally:
            self._inside.call = False

    return call


for _method in METHODS:
    setattr(CountedDevice, _method, _counted(_method))


def on_device(kind: type[Any], device: SimulatedDevice) -> type[Any]:
    """Return an optimizer class whose weights, in host memory, count as lying on a simulated device."""

    def find(self: Any, parameters: Any) -> SimulatedDevice:
        return device

    return type(kind.__name__, (kind,), {"_find_device": find})


def settle(optimizer: Any) -> None:
    """Wait until the engine has nothing to do: what can be updated during backward has been."""
    if optimizer._holder.engine_if_open is not None:
        settle_engine(optimizer.engine)


@contextlib.contextmanager
def only(instruction_set: str) -> Iterator[list[str]]:
    """Have sessions update with this instruction set; gives a list of those that kernels made meanwhile have."""
    used: list[str] = []
    plain = CpuUpdateKernel.__init__

    def made(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **{**options, "instruction_set": instruction_set})
        used.append(self.instruction_set)

    CpuUpdateKernel.__init__ = made  # type: ignore[method-assign]
    try:
        yield used
    finally:
        CpuUpdateKernel.__init__ = plain  # type: ignore[method-assign]


def verified(checkpoint: Path) -> list[dict[str, Any]]:
    """Return what `offload verify --json` says."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        cli.main(["verify", str(checkpoint), "--json", "--quiet"])
    found: list[dict[str, Any]] = json.loads(said.getvalue())
    return found


def facts(path: str) -> dict[str, dict[str, Any]]:
    """Return what rates depend on."""
    return {"machine": machine_facts(), "versions": versions(), "path": parse_place(path).facts()}
