"""What ranks have to agree on: whether one has failed, and which rank saves which weights under which names."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from offload import waits
from offload.checkpoint.commit import RANKS_TIMEOUT_S
from offload.checkpoint.folder import open_folder
from offload.checkpoint.request import SaveRequest
from offload.errors import CheckpointError
from offload.layout import bare_names
from offload.optim.weights import BoundParameter
from offload.processes import Process
from offload.session.engine import Engine
from offload.tiers.common import digest_of

log = logging.getLogger("offload")

DIGEST_NUMEL = 1024
"""Elements at the beginning of each weight by which ranks find out whether they have the same weight."""
SAMPLED, MOST_SAMPLED_NUMEL = 3, 1 << 20
"""Before a save, ranks with the same weights compare the state of a sample: how many weights the sample has (the
smallest ones), and the most elements of one."""


class _Answer(NamedTuple):
    """What a rank tells the others before a save.

    Attributes:
        id: The checkpoint's id; the first rank's counts.
        path: Where this rank saves to.
        weights: By name, what each of its weights is compared by.
        are_of_rank: Whether each of its names may mean other weights on other ranks (`_is_of_its_rank`).
        process: The rank's process, so that others see when it has ended; None where the kernel does not say.
    """

    id: str
    path: str
    weights: dict[str, _Digest]
    are_of_rank: bool
    process: Process | None


class _Digest(NamedTuple):
    """What a rank's weight is compared by with those of the same name on other ranks.

    Attributes:
        whole: Shape and dtype of the whole weight.
        place: Which piece of it the rank has.
        digest: Of the piece's beginning (`DIGEST_NUMEL`).
        state: The step count, and a digest of the piece's state if that is in the sample, else None.
    """

    whole: tuple[Any, ...]
    place: tuple[Any, ...]
    digest: int
    state: tuple[int, int | None]


def world() -> tuple[int, int]:
    """Return (world size, rank); (1, 0) without torch.distributed."""
    if _has_group():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def _has_group() -> bool:
    """Return whether there is a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_all_there(made_by: tuple[int, int], has_part: bool, what: str) -> None:
    """Refuse to save or load with fewer ranks than made the optimizer, if a rank would take its part for the whole.

    Ranks that each have all state may go on with fewer. But if there is no process group at all, they know nothing of
    each other: then only the first may go on.

    Args:
        made_by: The world size and this rank when the optimizer was made.
        has_part: Whether this rank has only a part of the state.
        what: What is to be done, for the error.

    Raises:
        CheckpointError: The process group has been destroyed, or another one of fewer ranks was made.
    """
    (size, rank), (now, _) = made_by, world()
    if now < size and (has_part or (rank > 0 and not _has_group())):
        raise CheckpointError(
            f"cannot {what}: the optimizer was made by {size} ranks, and torch.distributed has {now} now; do it on "
            "all of them before destroy_process_group()"
        )


def any_rank(note: bool) -> bool:
    """Return whether `note` is true on any rank; a collective."""
    if world()[0] == 1:
        return note
    has_cpu = "cpu:" in torch.distributed.get_backend_config()  # else, as with NCCL alone, the device's
    device = torch.device("cpu") if has_cpu else torch.accelerator.current_accelerator()
    notes = torch.tensor([note], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(notes)  # the sum: how many ranks note it
    return bool(notes)


def on_all_ranks(work: Callable[[], object], other: str) -> None:
    """Do this rank's work; if it fails on one rank, raise on all, so that none waits for ever. Collective.

    Args:
        work: This rank's.
        other: The message of this rank's error if another rank's work has failed.

    Raises:
        CheckpointError: Another rank's work has failed.
        Exception: What `work` raised on this rank.
    """
    failure: Exception | None = None
    try:
        work()
    except Exception as error:
        failure = error
    if any_rank(failure is not None):
        raise failure or CheckpointError(other)  # this rank's own error, else another rank's


def rank_with_other_weights(weights: Mapping[str, torch.Tensor]) -> int | None:
    """Return the first rank that has weights of other names, shapes or types; None if there is none. Collective."""
    bare = bare_names(weights)
    forms = [(bare[name], tuple(weight.shape), str(weight.dtype)) for name, weight in weights.items()]
    own = digest_of(repr(forms).encode())
    digests: list[Any] = [None] * world()[0]
    torch.distributed.all_gather_object(digests, own)
    return next((rank for rank, digest in enumerate(digests) if digest != own), None)


class Meeting:
    """Where ranks wait for each other at the end of a block, without a collective, by torch's key-value store.

    A rank that has failed in the block does not come: it only leaves a note, and may end, or go on to collectives
    that the others do not expect. Those that wait find the note. Making a meeting is a collective.

    Args:
        what: The block, for errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        size, self._rank = world()
        answers: list[Any] = [None] * size
        if size > 1:
            torch.distributed.all_gather_object(answers, (uuid.uuid4().hex, Process.this()))
            self._key = f"offload/meeting/{answers[0][0]}"
            self._processes = [process for _, process in answers]
        # None with MPI, where ranks meet in the next collective alone.
        self._store: Any = torch.distributed.distributed_c10d._get_default_store() if size > 1 else None

    def note_failure(self) -> None:
        """Tell the other ranks that this one has failed, and does not come; do nothing if the store has gone."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._key}/failed", str(self._rank))

    def wait(self) -> None:
        """Wait until all ranks have come, at most `RANKS_TIMEOUT_S`.

        After that time it returns all the same: the collective that the caller goes on to has a limit of its own.

        Raises:
            CheckpointError: One does not come: it has failed, or ended.
        """
        if self._store is None:
            return
        try:
            self._wait()
        except torch.distributed.DistError as cause:  # the store has gone, with the rank that has it
            raise CheckpointError(f"{self._what} is not whole: ranks cannot meet: {cause}") from cause

    def _wait(self) -> None:
        """Do the work of `wait`: count this rank as there, and look at the store until the count is that of all."""
        come_count, pause_s = self._store.add(f"{self._key}/come", 1), 0.001
        silence = waits.Silence()
        until_s = silence.now_s + RANKS_TIMEOUT_S
        while come_count < len(self._processes) and silence.now_s < until_s:
            gone = [f"{rank} has ended" for rank in _ended_ranks(self._processes)]
            if self._store.check([f"{self._key}/failed"]):
                gone.append(f"{self._store.get(f'{self._key}/failed').decode()} has failed")
            # Adding 0 reads the count. Only now, as a rank that has ended by now may have come before.
            come_count = self._store.add(f"{self._key}/come", 0)
            if gone and come_count < len(self._processes):
                # The last one, as a note of a failure says more than an end.
                raise CheckpointError(f"{self._what} is not whole: rank {gone[-1]}; see what it has said last")
            silence.warn_if_due(lambda: f"all ranks, so that {self._what} is whole")
            silence.wait(time.sleep, pause_s)  # `sleep` never returns something true, so this lasts all of `pause_s`
            pause_s = min(2 * pause_s, 0.5)


def agree_on_save(request: SaveRequest, bounds: Collection[BoundParameter], engine: Engine) -> SaveRequest:
    """Agree on a save that all ranks make together. A collective if there are several.

    Each rank tells the others what its weights are called and look like. Usually weights of one name are the same, or
    pieces of one weight. If they are not, the save is refused, unless on every rank all names may mean other weights
    elsewhere (FSDP1's, made-up ones): then each rank saves its own weights, under names with a prefix.

    Returns:
        The request with id, names and number of ranks, alike on all ranks, and with this rank's part. It is a replica
        if an earlier rank has the same weights, and the same state as far as that is compared. If ranks have weights
        of their own under the same names, as with FSDP1, its metadata has a `prefix` of this rank's names.

    Raises:
        CheckpointError: The save is refused, on all ranks; or another rank could not read its state.
    """
    size, rank = world()
    agreed = replace(request, rank=rank, ranks=size, metadata={"prefix": ""})
    if size == 1:
        return replace(agreed, names=bare_names(bound.name for bound in bounds))
    answers: list[Any] = [None] * size
    sampled: dict[BoundParameter, int] = {}
    on_all_ranks(lambda: sampled.update(_state_digests(bounds, engine)), "another rank could not read its state")
    states = {bound: (engine.step_count(bound.position), sampled.get(bound)) for bound in bounds}
    weights_here = {bound.name: _digest(bound, states[bound]) for bound in bounds}
    path = open_folder(request.path).label
    own_answer = _Answer(request.id, path, weights_here, all(map(_is_of_its_rank, bounds)), Process.this())
    torch.distributed.all_gather_object(answers, own_answer)
    elsewhere = [(number, answer.path) for number, answer in enumerate(answers) if answer.path != answers[0].path]
    if elsewhere:
        log.log(
            logging.WARNING if rank == 0 else logging.INFO,  # all ranks find it: one warning is enough
            "rank 0 saves to %s, and rank %d to %s: without one folder for all ranks nothing is committed",
            *(answers[0].path, *elsewhere[0]),
        )
    find_ended = partial(_ended_ranks, [answer.process for answer in answers])
    agreed = replace(agreed, id=answers[0].id, find_ended=find_ended)
    names = bare_names(name for answer in answers for name in answer.weights)  # made from all ranks' names
    clash = _find_clash([answer.weights for answer in answers])
    if clash is None:
        # A rank without weights to update is no replica: what else it has of a model may differ from other ranks'.
        replica = bool(bounds) and any(answer.weights == weights_here for answer in answers[:rank])
        return replace(agreed, names=names, replica=replica)

    # Ranks have different weights, or the same with different state, under one name.
    name, first_rank, other_rank = clash
    weights = [answers[each].weights[name] for each in (first_rank, other_rank)]
    differ_in_state_alone = weights[0]._replace(state=(0, None)) == weights[1]._replace(state=(0, None))
    what = "weights with different state" if differ_in_state_alone else "different weights"
    if not all(answer.are_of_rank for answer in answers):
        raise CheckpointError(
            f"ranks {first_rank} and {other_rank} have {what} that are both called {name}: give every weight a name "
            "of its own, or use `offload.Engine`, whose parameters know their places"
        )
    log.log(
        logging.WARNING if rank == 0 else logging.INFO,  # as above
        "ranks %d and %d have %s that are both called %s, as with FSDP1 or ZeroRedundancyOptimizer: "
        "each rank saves its own, for as many ranks to load",
        *(first_rank, other_rank, what, name),
    )
    prefix = f"rank{rank}."
    names = {name: prefix + bare for name, bare in names.items()}
    return replace(agreed, names=names, metadata={"prefix": prefix})


def _ended_ranks(processes: Sequence[Process | None]) -> list[int]:
    """Return the ranks whose processes have ended; those on other machines cannot be seen."""
    return [rank for rank, process in enumerate(processes) if process is not None and process.has_ended()]


def _is_of_its_rank(bound: BoundParameter) -> bool:
    """Return whether a parameter's name may mean another weight on each rank: FSDP1's, or a made-up name."""
    return bound.cut is None and (is_flattened(bound.parameter) or bound.name.startswith("param_groups["))


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is FSDP1's flat one, of which this rank has some range."""
    return getattr(parameter, "_fsdp_flattened", False)


def _find_clash(everyone: Sequence[Mapping[str, _Digest]]) -> tuple[str, int, int] | None:
    """Return a name under which two ranks have different weights, and these ranks; None if there is none.

    Under one name all ranks must have the same `whole`, and ranks with the same `place` the same digest and step
    count. Digests of state are compared where both ranks' samples have that weight: samples of ranks with partly
    different weights differ.
    """
    # The first rank with such a value, and the value, by what all ranks have to have alike.
    first_seen: dict[tuple[Any, ...], tuple[int, Any]] = {}
    for rank, weights in enumerate(everyone):
        for name, (whole, place, digest, (step_count, state_digest)) in weights.items():
            values: dict[tuple[Any, ...], Any] = {(name,): whole, (name, place): (digest, step_count)}
            if state_digest is not None:
                values[name, place, "state"] = state_digest
            for key, value in values.items():
                first_rank, first_value = first_seen.setdefault(key, (rank, value))
                if first_value != value:
                    return name, first_rank, rank
    return None


def _state_digests(bounds: Collection[BoundParameter], engine: Engine) -> dict[BoundParameter, int]:
    """Return digests of the state of a sample of weights, as ranks with equal weights may have unequal state.

    The sample has the smallest updated weights of those that other ranks may have, too: whole or replicated ones.
    Their state is read from where it lives.
    """
    updated = [
        bound
        for bound in bounds
        if 0 < bound.local.numel() <= MOST_SAMPLED_NUMEL
        and (bound.cut.is_replicated if bound.cut is not None else not is_flattened(bound.parameter))
        and engine.step_count(bound.position)
    ]
    sample = sorted(updated, key=lambda bound: (bound.local.numel(), bound.name))[:SAMPLED]
    digests: dict[BoundParameter, int] = {}
    states = engine.state.read([bound.position for bound in sample], own_masters=False) if sample else []
    for bound, tensors in zip(sample, states, strict=True):
        digests[bound] = 0
        for values in tensors.values():
            digests[bound] = digest_of(values.view(torch.uint8).numpy().data, digests[bound])
    return digests


def _digest(bound: BoundParameter, state: tuple[int, int | None]) -> _Digest:
    """Return what a weight is compared by on all ranks; `state` as in `_Digest`."""
    weight = bound.parameter
    piece = bound.local.detach()
    place = (0, weight.numel()) if bound.cut is None else (bound.cut.start, piece.numel(), bound.cut.box)
    beginning = piece.as_strided((piece.numel(),), (1,))[:DIGEST_NUMEL].cpu()  # flat, in the order of memory
    digest = digest_of(beginning.view(torch.uint8).numpy().data)
    return _Digest((tuple(weight.shape), weight.dtype), place, digest, state)
