"""`Transfers`: copies between the host and other devices that may still be under way.

Invariant: whoever reads or writes host memory that a copy was started from or to has waited since. The stream that
was current orders the copy with that device's own work.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


class Transfers:
    """Copies on the current streams of the accelerator that DeepSpeed runs on."""

    def __init__(self) -> None:
        self._marks: dict[Any, Any] = {}  # an event behind the newest copy of each stream

    def is_far(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is where the host cannot read it."""
        return tensor.device.type != "cpu"

    def buffer(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros on the host, as many as a tensor has elements, for copies between the two.

        Args:
            like: The tensor.
            dtype: Of the zeros; by default that of the tensor.
        """
        return torch.zeros(like.numel(), dtype=dtype or like.dtype, device="cpu", pin_memory=self.is_far(like))

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy. One of the two is on the host, the other is far."""
        far = source if self.is_far(source) else target
        accelerator = import_module("deepspeed.accelerator").get_accelerator()
        stream = accelerator.current_stream(far.device)
        target.copy_(source, non_blocking=True)
        far.record_stream(stream)  # it may have been allocated on another stream, and be let go before the copy ends
        mark = self._marks.get(stream)
        if mark is None:
            mark = self._marks[stream] = accelerator.Event(blocking=True)
        mark.record(stream)

    def wait(self) -> None:
        """Return when all copies that have been started have ended."""
        for mark in self._marks.values():
            mark.synchronize()
        self._marks.clear()
