"""Collectives by which ranks fail together, so that none waits for another for ever."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch

from offload import SessionBrokenError

_T = TypeVar("_T")


def exchange_device(group: Any) -> torch.device:
    """Return the device of tensors that a group's backend exchanges: the CPU with gloo, else the accelerator."""
    if "gloo" in torch.distributed.get_backend(group):
        return torch.device("cpu")
    return torch.device(import_module("deepspeed.accelerator").get_accelerator().device_name())


def max_over_ranks(number: int, group: Any) -> int:
    """Return the greatest of all ranks' numbers. Collective over `group`."""
    numbers = torch.tensor([number], dtype=torch.int64, device=exchange_device(group))
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX, group=group)
    return int(numbers.item())


def on_all_ranks(work: Callable[[], _T], group: Any) -> _T:
    """Do this rank's work; if it raises on any rank, raise on all, so that none waits for another for ever.

    Collective over `group`. Returns what `work` does on this rank.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    # Ranks come here with an `Exception`, too, and all learn whether any of them has one.
    if torch.distributed.get_world_size(group) > 1 and max_over_ranks(error is not None, group):
        error = error or SessionBrokenError("another rank could not do its part; its log says why")
    if error is not None:
        raise error
    return result
