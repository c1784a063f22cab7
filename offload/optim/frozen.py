"""What is said where weights do not train: their memory is not the optimizer's to save."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from offload.optim import shards
from offload.units import format_bytes

LITTLE = 0.25
"""State that takes a smaller part of what the frozen weights take is little."""

_log = logging.getLogger("offload")
is_told = False


def tell_little(state_bytes: int, parameters: Iterable[torch.Tensor]) -> None:
    """Say, once a process, that offloading saves little: state is small beside weights that are frozen, as with LoRA.

    Args:
        state_bytes: Of the optimizer's state, on this rank.
        parameters: Parameters of the model, as far as they are known; sharded ones count by what lies here.
    """
    global is_told
    if is_told:
        return
    local = (shards.local(parameter) for parameter in parameters if not parameter.requires_grad)
    frozen_bytes = sum(piece.numel() * piece.element_size() for piece in local)
    if 0 < state_bytes < LITTLE * frozen_bytes:
        is_told = True
        _log.info(
            "there is little to offload: %s of optimizer state beside %s of frozen weights, which stay where they "
            "are (said once)",
            format_bytes(state_bytes),
            format_bytes(frozen_bytes),
        )
