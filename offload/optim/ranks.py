"""What ranks have to agree on."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from offload.errors import CheckpointError

if TYPE_CHECKING:
    from offload.optim.weights import Bound

DIGEST_NUMEL = 1024
"""Elements at the beginning of each weight by which ranks find out whether they have the same."""


def world() -> tuple[int, int]:
    """Return (world size, rank); (1, 0) without torch.distributed."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    return 1, 0


def mesh_of_all(device: str) -> Any:
    """Return torch's mesh of all ranks; it has the default process group, and makes no other.

    Args:
        device: The kind of device that weights are on.
    """
    from torch.distributed.device_mesh import DeviceMesh

    everyone: Any = torch.distributed.group.WORLD
    return DeviceMesh.from_group(everyone, device)


def agree_on_save(bounds: Iterable[Bound]) -> tuple[int, int, str, bool]:
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
    torch.distributed.all_gather_object(found, (id, {bound.name: _digest(bound) for bound in bounds}))
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


def _digest(bound: Bound) -> tuple[Any, ...]:
    """Return what a weight is, which piece of it this rank has, and a checksum of the piece's beginning."""
    weight, mine = bound.parameter, bound.local.detach()
    place = (0, weight.numel()) if bound.cut is None else (bound.cut.start, mine.numel(), bound.cut.box)
    beginning = mine.as_strided((mine.numel(),), (1,))[:DIGEST_NUMEL].cpu()
    checksum = zlib.crc32(beginning.view(torch.uint8).numpy().tobytes())
    return (tuple(weight.shape), weight.dtype), place, checksum
