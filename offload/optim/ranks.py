"""What ranks have to agree on."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from offload.errors import CheckpointError
from offload.optim import shards

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
        World size, rank, the save's id, and whether an earlier rank saves this rank's state too, since both have the
        same pieces of the same weights.

    Raises:
        CheckpointError: Ranks have other weights under the same names; raised on all of them.
    """
    size, rank = world()
    id = uuid.uuid4().hex
    if size == 1:
        return size, rank, id, False
    found: list[Any] = [None] * size
    torch.distributed.all_gather_object(found, (id, {name: _digest(weight) for name, weight in weights.items()}))
    first: dict[tuple[Any, ...], tuple[int, Any]] = {}
    for number, (_, theirs) in enumerate(found):
        for name, (whole, place, digest) in theirs.items():
            # Pieces of one weight are alike in what the whole is; those in one place in what they hold, too.
            for key, value in (((name,), whole), ((name, place), digest)):
                if first.setdefault(key, (number, value))[1] != value:
                    raise CheckpointError(
                        f"ranks {first[key][0]} and {number} have different weights that are both called {name}: "
                        "give every weight a name of its own, or use `offload.Engine`, whose parameters know their "
                        "places"
                    )
    return size, rank, found[0][0], any(theirs == found[rank][1] for _, theirs in found[:rank])


def _digest(weight: torch.Tensor) -> tuple[Any, ...]:
    """Return what a weight is, which piece of it this rank has, and a checksum of the piece's beginning."""
    mine, (start, box) = shards.local(weight.detach()), shards.place(weight)
    beginning = mine.as_strided((mine.numel(),), (1,))[:DIGEST_NUMEL].cpu()
    checksum = zlib.crc32(beginning.view(torch.uint8).numpy().tobytes())
    return (tuple(weight.shape), weight.dtype), (start, mine.numel(), box), checksum
