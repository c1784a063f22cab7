"""All that the net knows of the inside of the package. Whoever moves one of these things changes it here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from settling import settle as settle_engine

from offload.kernels import CpuUpdateKernel, instruction_sets
from offload.sim import SimulatedDevice

__all__ = ["SimulatedDevice", "instruction_sets", "on_device", "only", "settle"]


def on_device(kind: type[Any], device: SimulatedDevice) -> type[Any]:
    """Return an optimizer class whose weights, in host memory, count as lying on a simulated device."""

    def find(self: Any, parameters: Any) -> SimulatedDevice:
        return device

    return type(kind.__name__, (kind,), {"_find_device": find})


def settle(optimizer: Any) -> None:
    """Wait until the engine has nothing to do: what can be updated during backward has been."""
    if optimizer._late.opened is not None:
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
