"""What ranks have to agree on: their number, and who saves which weights under which names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from offload.checkpoint.request import SaveRequest
from offload.errors import CheckpointError
from offload.layout import bare_names
from offload.optim.weights import BoundParameter
from offload.processes import Process
from offload.tiers.common import digest_of

log = logging.getLogger("offload")

DIGEST_NUMEL = 1024
"""Elements at the beginning of each weight by which ranks find out whether they have the same."""


def world() -> tuple[int, int]:
    """Return (world size, rank); (1, 0) without torch.distributed."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size(), distributed.get_rank()
    return 1, 0


def any_rank(note: bool) -> bool:
    """Return whether any rank notes something; a collective."""
    if world()[0] == 1:
        return note
    has_cpu = "cpu:" in torch.distributed.get_backend_config()
    device = torch.device("cpu") if has_cpu else torch.accelerator.current_accelerator()
    notes = torch.tensor([note], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(notes)
    return bool(notes)


def on_all_ranks(work: Callable[[], object], other: str) -> None:
    """Do one rank's work; what it fails with is raised on all ranks, so that none waits for ever. Collective.

    Args:
        work: This rank's.
        other: What this rank says where another one's work has failed.

    Raises:
        CheckpointError: Another rank's work has failed.
        Exception: This rank's has.
    """
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    if any_rank(failure is not None):
        raise failure or CheckpointError(other)


def agree_on_save(request: SaveRequest, bounds: Collection[BoundParameter]) -> SaveRequest:
    """Agree on a save that all ranks make together.

    Returns:
        The request, with what all ranks have alike and what this one does. Its metadata has the `prefix` of the names
        where the weights are this rank's alone. A replica is a rank whose weights an earlier one has, too.

    Raises:
        CheckpointError: Ranks have other weights under the same names; raised on all of them.
    """
    size, rank = world()
    agreed = replace(request, rank=rank, ranks=size, metadata={"prefix": ""})
    if size == 1:
        return replace(agreed, names=bare_names(bound.name for bound in bounds))
    answers: list[Any] = [None] * size
    weights_here = {bound.name: _digest(bound) for bound in bounds}
    own_answer = request.id, weights_here, all(map(_is_of_its_rank, bounds)), Process.this()
    torch.distributed.all_gather_object(answers, own_answer)
    clash = _clash([weights for _, weights, _, _ in answers])
    find_ended = partial(_ended_ranks, [process for *_, process in answers])
    agreed = replace(agreed, id=answers[0][0], find_ended=find_ended)
    names = bare_names(name for _, weights, _, _ in answers for name in weights)  # all ranks' alike
    if clash is None:
        replica = any(weights == answers[rank][1] for _, weights, _, _ in answers[:rank])
        return replace(agreed, names=names, replica=replica)
    name, one, other = clash
    if not all(of_its_rank for _, _, of_its_rank, _ in answers):
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
    names = {name: prefix + bare for name, bare in names.items()}
    return replace(agreed, names=names, metadata={"prefix": prefix})


def _ended_ranks(processes: Sequence[Process | None]) -> list[int]:
    """Return the ranks whose processes have ended; those on other machines cannot be seen."""
    return [rank for rank, process in enumerate(processes) if process is not None and process.has_ended()]


def _is_of_its_rank(bound: BoundParameter) -> bool:
    """Return whether a plain tensor's name may mean another weight, or another piece, on each rank."""
    return bound.cut is None and (is_flattened(bound.parameter) or bound.name.startswith("param_groups["))


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is FSDP1's, so that this rank may have any part of it."""
    return getattr(parameter, "_fsdp_flattened", False)


def _clash(everyone: Sequence[Mapping[str, tuple[Any, ...]]]) -> tuple[str, int, int] | None:
    """Return a name under which two ranks have different weights, and these ranks; None if there is none.

    Pieces of one weight have the same whole; pieces in the same place have the same digest, too.
    """
    first: dict[tuple[Any, ...], tuple[int, Any]] = {}
    for rank, weights in enumerate(everyone):
        for name, (whole, place, digest) in weights.items():
            for key, value in (((name,), whole), ((name, place), digest)):
                if first.setdefault(key, (rank, value))[1] != value:
                    return name, first[key][0], rank
    return None


def _digest(bound: BoundParameter) -> tuple[Any, ...]:
    """Return what a weight is, which piece of it this rank has, and a digest of the piece's beginning."""
    weight, mine = bound.parameter, bound.local.detach()
    place = (0, weight.numel()) if bound.cut is None else (bound.cut.start, mine.numel(), bound.cut.box)
    beginning = mine.as_strided((mine.numel(),), (1,))[:DIGEST_NUMEL].cpu()
    return (tuple(weight.shape), weight.dtype), place, digest_of(beginning.view(torch.uint8).numpy().data)
