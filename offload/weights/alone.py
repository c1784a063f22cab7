"""A default process group for a process that is alone, as torch needs one for a mesh, even of one device.

The group's collectives copy their input, or leave it as it is. It opens no port, has no thread, and reads no
environment variables, unlike torch's own groups.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from offload import combinations

BACKEND = "offload"
"""The backend's name in torch."""

_made: weakref.ref[Alone] | None = None
"""The owner of the group that was made last."""


class Alone:
    """The owner of a default process group, which it makes. The group ends with this object, if not before."""

    def __init__(self, device: torch.device) -> None:
        distributed: Any = torch.distributed
        if BACKEND not in distributed.Backend.backend_list:
            devices = ["cpu", device.type]
            # With `extended_api` torch calls `_make_group` with two objects: what it knows of the group, and options.
            distributed.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=devices)
        distributed.init_process_group(BACKEND, store=distributed.HashStore(), rank=0, world_size=1)
        end = weakref.finalize(self, _end_group, weakref.ref(distributed.group.WORLD))
        end.atexit = False  # a process that ends needs no group


def check_alone() -> None:
    """Refuse a process that is one of several."""
    if torch.distributed.is_initialized() and (ranks := torch.distributed.get_world_size()) > 1:
        combinations.HOST_ALONE.refuse("model", f"of one of {ranks} processes")


def alone(device: torch.device) -> Alone | None:
    """Return the owner of the default process group; make both if there is no group.

    None if somebody else has made the group. Else the caller keeps the owner as long as it needs the group.
    """
    global _made
    if torch.distributed.is_initialized():
        return _made() if _made is not None else None
    owner = Alone(device)
    _made = weakref.ref(owner)
    return owner


def _make_group(common: Any, options: Any) -> Any:
    """Return torch's fake process group; with one process its results are those of a real one. torch calls this."""
    kind: Any = torch._C._distributed_c10d.FakeProcessGroup
    return kind._create_internal(common.group_rank, common.group_size)


def _end_group(group: weakref.ref[Any]) -> None:
    """Destroy the default process group if it is still `group`, the one that `Alone` has made."""
    distributed: Any = torch.distributed
    if distributed.is_initialized() and distributed.group.WORLD is group():
        distributed.destroy_process_group()
