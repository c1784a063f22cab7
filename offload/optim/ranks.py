"""What ranks have to agree on."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from offload.errors import CheckpointError

DIGEST_NUMEL = 1024
"""Elements at the beginning of each weight by which ranks find out whether they have the same."""


def world() -> tuple[int, int]:
    """Return (world size, rank); (1, 0) without torch.distributed."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    return 1, 0


def agree_on_save(weights: Mapping[str, torch.Tensor]) -> tuple[int, int, str, bool]:
    """Agree on a save that all ranks make together.

    Returns:
        World size, rank, the save's id, and whether rank 0 saves this rank's state too, since all have the same.

    Raises:
        CheckpointError: Ranks have other weights under the same names; raised on all of them.
    """
    size, rank = world()
    id = uuid.uuid4().hex
    if size == 1:
        return size, rank, id, False
    found: list[Any] = [None] * size
    torch.distributed.all_gather_object(found, (id, {name: _digest(weight) for name, weight in weights.items()}))
    first: dict[str, tuple[int, int]] = {}
    for number, (_, theirs) in enumerate(found):
        for name, digest in theirs.items():
            if first.setdefault(name, (number, digest))[1] != digest:
                raise CheckpointError(
                    f"ranks {first[name][0]} and {number} have different weights that are both called {name}: "
                    "give every weight a name of its own, or use `offload.Engine`, whose parameters know their places"
                )
    return size, rank, found[0][0], rank > 0 and all(theirs == found[0][1] for _, theirs in found)


def _digest(weight: torch.Tensor) -> int:
    beginning = weight.detach().as_strided((weight.numel(),), (1,))[:DIGEST_NUMEL].cpu()
    return zlib.crc32(beginning.view(torch.uint8).numpy().tobytes())
