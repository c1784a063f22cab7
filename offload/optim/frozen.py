"""A note in the log if most weights are frozen, as offloading optimizer state saves little memory then."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from offload.optim import shards
from offload.units import format_bytes

LITTLE = 0.25
"""State counts as little if its bytes are less than this part of the frozen weights'."""

_log = logging.getLogger("offload")
is_told = False
"""Whether the note has been logged in this process."""


def tell_little(state_bytes: int, parameters: Iterable[torch.Tensor]) -> None:
    """If the state is small beside frozen weights, as with LoRA, log that offloading saves little; once a process.

    Args:
        state_bytes: Bytes of the optimizer's state on this rank.
        parameters: The model's, as far as they are known; sharded ones count by this rank's shard.
    """
    global is_told
    if is_told:
        return
    frozen_pieces = (shards.local(parameter) for parameter in parameters if not parameter.requires_grad)
    frozen_bytes = sum(piece.numel() * piece.element_size() for piece in frozen_pieces)
    if 0 < state_bytes < LITTLE * frozen_bytes:  # 0: nothing trains here
        is_told = True
        _log.info(
            "there is little to offload: %s of optimizer state beside %s of frozen weights, which stay where they "
            "are (said once)",
            format_bytes(state_bytes),
            format_bytes(frozen_bytes),
        )
