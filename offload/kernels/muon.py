"""Muon's update of one matrix: torch's own class, run on views of the state, which may be stored in any format.

So bits are those of `torch.optim.Muon` over an fp32 twin, on this device and with this number of threads; its
Newton-Schulz iteration works in bfloat16, whatever the weights' type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.kernels import reference
from offload.kernels.pieces import Piece, step_alone
from offload.kernels.reference.rounding import random_bits


@torch.no_grad()
def update(piece: Piece, group: int, values: Mapping[str, Any]) -> None:
    """Update a matrix; see `offload.rules.UpdateRule.update`."""
    segment = piece.segment
    (momentum,), master = reference.state_of(segment), reference.master_of(segment)
    view = torch.nn.Parameter(piece.shaped(master))
    view.grad = piece.gradient(torch.float32)
    muon = torch.optim.Muon([view], **values)
    muon.state[view] = {"momentum_buffer": piece.shaped(momentum)}
    step_alone(muon)
    random = None
    if segment.state_format.rounds:
        random = random_bits(segment.rounding_key, segment.first_index, master.numel(), master.device)
    reference.store_state(segment, [momentum], random)
    reference.store_master(segment, master, random)
