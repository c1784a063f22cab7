"""What ranks have to agree on."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from offload.errors import CheckpointError
from offload.layout import bare_names

if TYPE_CHECKING:
    from offload.optim.weights import BoundParameter

log = logging.getLogger("offload")

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


class Agreement(NamedTuple):
    """What ranks have agreed on for a save that they make together.

    Attributes:
        ranks: World size.
        rank: This rank.
        id: The save's.
        replica: Whether an earlier rank saves this rank's state too, since both have the same pieces of the same
            weights.
        names: What the checkpoint calls this rank's weights: their names in the bare module.
        prefix: What these names begin with where the weights are nobody else's.
        ended: Returns the ranks whose processes have ended, as far as this one can see them.
    """

    ranks: int
    rank: int
    id: str
    names: Mapping[str, str]
    replica: bool = False
    prefix: str = ""
    ended: Callable[[], Collection[int]] = tuple


def agree_on_save(bounds: Collection[BoundParameter]) -> Agreement:
    """Agree on a save that all ranks make together.

    Raises:
        CheckpointError: Ranks have other weights under the same names; raised on all of them.
    """
    size, rank = world()
    id = uuid.uuid4().hex
    if size == 1:
        return Agreement(size, rank, id, bare_names(bound.name for bound in bounds))
    found: list[Any] = [None] * size
    weights_here = {bound.name: _digest(bound) for bound in bounds}
    mine = id, weights_here, all(map(_is_of_its_rank, bounds)), Process.this()
    torch.distributed.all_gather_object(found, mine)
    clash = _clash([weights for _, weights, _, _ in found])
    ended = partial(_ended, [process for *_, process in found])
    id = found[0][0]
    names = bare_names(name for _, weights, _, _ in found for name in weights)  # all ranks' alike
    if clash is None:
        replica = any(weights == found[rank][1] for _, weights, _, _ in found[:rank])
        return Agreement(size, rank, id, names, replica, ended=ended)
    name, one, other = clash
    if not all(of_its_rank for _, _, of_its_rank, _ in found):
        raise CheckpointError(
            f"ranks {one} and {other} have different weights that are both called {name}: give every weight a name "
            "of its own, or use `offload.Engine`, whose parameters know their places"
        )
    log.log(
        logging.WARNING if rank == 0 else logging.INFO,
        "ranks %d and %d have different weights that are both called %s, as with FSDP1 or ZeroRedundancyOptimizer: "
        "each rank saves its own, for as many ranks to load",
        *(one, other, name),
    )
    prefix = f"rank{rank}."
    return Agreement(size, rank, id, {n: prefix + bare for n, bare in names.items()}, prefix=prefix, ended=ended)


class Process(NamedTuple):
    """A process, so that those who share its machine can tell when it has ended.

    Attributes:
        machine: The running kernel, and the name space of its pids.
        pid: Its number there.
        started: When it was started: numbers are used again.
    """

    machine: str
    pid: int
    started: str

    @classmethod
    def this(cls) -> Process | None:
        """Return this process; None where the kernel does not say."""
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                machine = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            return None
        return cls(machine, os.getpid(), _started(os.getpid()))


def _started(pid: int) -> str:
    """Return when a process was started; "" if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        state, *others = file.read().rpartition(")")[2].split()
        return "" if state in "ZX" else others[18]
    return ""


def _ended(processes: Sequence[Process | None]) -> list[int]:
    """Return the ranks whose processes have ended; those on other machines cannot be seen."""
    here = Process.this()
    return [
        rank
        for rank, found in enumerate(processes)
        if here and found and found.machine == here.machine and _started(found.pid) != found.started
    ]


def _is_of_its_rank(bound: BoundParameter) -> bool:
    """Return whether nobody says which weight, or which piece of one, a plain tensor is."""
    return bound.cut is None and (is_flattened(bound.parameter) or bound.name.startswith("param_groups["))


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is FSDP1's, so that this rank may have any part of it."""
    return getattr(parameter, "_fsdp_flattened", False)


def _clash(everyone: Sequence[Mapping[str, tuple[Any, ...]]]) -> tuple[str, int, int] | None:
    """Return the name of different weights, and two ranks that have them; None if there are none.

    Pieces of one weight are alike in what the whole is; those in one place in what they hold, too.
    """
    first: dict[tuple[Any, ...], tuple[int, Any]] = {}
    for rank, weights in enumerate(everyone):
        for name, (whole, place, digest) in weights.items():
            for key, value in (((name,), whole), ((name, place), digest)):
                if first.setdefault(key, (rank, value))[1] != value:
                    return name, first[key][0], rank
    return None


def _digest(bound: BoundParameter) -> tuple[Any, ...]:
    """Return what a weight is, which piece of it this rank has, and a checksum of the piece's beginning."""
    weight, mine = bound.parameter, bound.local.detach()
    place = (0, weight.numel()) if bound.cut is None else (bound.cut.start, mine.numel(), bound.cut.box)
    beginning = mine.as_strided((mine.numel(),), (1,))[:DIGEST_NUMEL].cpu()
    checksum = zlib.crc32(beginning.view(torch.uint8).numpy().tobytes())
    return (tuple(weight.shape), weight.dtype), place, checksum
