"""Copies between the host and a device that is not there, for tests of whoever starts them."""

from __future__ import annotations

import torch


class LateTransfers:
    """Stands in for `offload.integrations.deepspeed.transfers.Transfers`; every tensor counts as far.

    A copy takes what its source has when it is started, as its place in a stream guarantees, and changes its target
    only when somebody waits, which is as late as a device may. A read without a wait finds what was there before, and
    a write without a wait is lost.
    """

    def __init__(self) -> None:
        self.started = 0
        """Copies so far."""
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def is_far(self, tensor: torch.Tensor) -> bool:
        """Return True."""
        return True

    def buffer(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros, as many as a tensor has elements."""
        return torch.zeros(like.numel(), dtype=dtype or like.dtype, device="cpu")

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Keep a copy for later."""
        self.started += 1
        self._late.append((target, source.clone()))

    def wait(self) -> None:
        """Make all copies, in their order."""
        for target, source in self._late:
            target.copy_(source)
        self._late.clear()
