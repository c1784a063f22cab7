"""Rows of weights that ranks exchange while a step goes on behind its callers (DDP with `shard=True`).

A rank updates its rows and needs those of others. Of a pending step they are exchanged bucket by bucket, in an order
on which ranks agree as it begins, by a thread: so no rank waits in it for the caller of another, who may evaluate
alone, write a file, or use other modules. The collectives have a process group of their own.

A rank whose step fails says so with the rows that it still exchanges, so that no other waits for it for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from offload import waits
from offload.errors import SessionBrokenError
from offload.optim import shards
from offload.optim.weights import BoundParameter
from offload.session.engine import Engine

BUCKET_BYTES = 4 << 20
"""Bytes of weights that are exchanged at once, at least: collectives have a cost of their own."""

UNUSED = 1 << 62
"""In the place of a weight that a rank does not update: greater than any place in the order."""


class Exchange:
    """The exchanges of one optimizer, one step at a time. Made by all ranks together.

    Args:
        mesh: Of the ranks, of which each updates some rows of every weight.
    """

    def __init__(self, mesh: Any) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.distributed.get_process_group_ranks(mesh.get_group())
        self._group: Any = torch.distributed.new_group(ranks)
        self._mesh: Any = DeviceMesh.from_group(self._group, mesh.device_type)
        self._latches: dict[BoundParameter, waits.Latch] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_lost = False  # whether a rank has failed: weights here are of no step

    @property
    def is_under_way(self) -> bool:
        """Whether there is an exchange that nobody has waited for to its end."""
        return self._thread is not None

    def agree(
        self, shared: Sequence[BoundParameter], at_once: Iterable[BoundParameter], later: Iterable[BoundParameter]
    ) -> list[BoundParameter]:
        """Return the weights that ranks exchange, in their common order; a collective.

        Args:
            shared: All weights that are cut over ranks.
            at_once: Those that this rank updates and needs first.
            later: The others that it updates, in the order of their use.
        """
        order = {bound: 1 + number for number, bound in enumerate(later)} | dict.fromkeys(at_once, 0)
        places = torch.tensor([order.get(bound, UNUSED) for bound in shared], dtype=torch.int64, device="cpu")
        torch.distributed.all_reduce(places, op=torch.distributed.ReduceOp.MIN, group=self._group)
        found = sorted(range(len(shared)), key=places.tolist().__getitem__)
        return [shared[number] for number in found if places[number] != UNUSED]

    def begin(self, engine: Engine, order: Sequence[BoundParameter], copies: Mapping[Any, torch.Tensor]) -> None:
        """Begin to exchange the weights of a step.

        Args:
            engine: Updates this rank's rows in a pending step; where none goes on, it has failed.
            order: What `agree` returned.
            copies: Where weights are updated that are hidden from their modules.
        """
        buckets: list[list[BoundParameter]] = [[]]
        nbytes = 0
        for bound in order:
            if nbytes >= BUCKET_BYTES:
                buckets.append([])
                nbytes = 0
            buckets[-1].append(bound)
            nbytes += bound.parameter.nbytes
        latches = [waits.Latch() for _ in buckets]
        self._latches = {bound: latch for bucket, latch in zip(buckets, latches, strict=True) for bound in bucket}
        # Not through the parameters, whose versions count what their users change.
        weights = [[copies.get(bound, bound.parameter.data) for bound in bucket] for bucket in buckets]
        has_failed = not engine.is_pending
        work = (engine, buckets, weights, latches, has_failed)
        self._thread = threading.Thread(target=self._run, args=work, name="offload-exchange", daemon=True)
        self._thread.start()

    def _run(
        self,
        engine: Engine,
        buckets: list[list[BoundParameter]],
        weights: list[list[torch.Tensor]],
        latches: list[waits.Latch],
        has_failed: bool,
    ) -> None:
        """Exchange one bucket after the other; on a thread."""
        try:
            for bucket, tensors, latch in zip(buckets, weights, latches, strict=True):
                try:
                    engine.wait_for([bound.position for bound in bucket])
                except Exception as error:
                    self._error = self._error or error
                has_failed |= self._error is not None or engine.broken is not None
                notes = torch.full((self._mesh.size(),), has_failed, dtype=torch.bool, device="cpu")  # a row a rank
                cuts = (bound.cut for bound in bucket)
                shards.gather([*shards.send(zip(tensors, cuts, strict=True), self._mesh), notes], self._mesh)
                self._is_lost |= not has_failed and bool(notes.any())
                latch.set()
        except Exception as error:  # of a collective: a rank has ended
            self._is_lost = True
            self._error = self._error or error
        finally:
            for latch in latches:
                if not latch.is_set():
                    latch.set()

    def wait_for(self, bounds: Iterable[BoundParameter]) -> None:
        """Wait until the rows of some weights are here.

        Raises:
            StepAbortedError: This rank's step has failed.
            SessionBrokenError: Another rank's has, or a rank has ended.
        """
        if self._thread is not None:
            for bound in bounds:
                if (latch := self._latches.get(bound)) is not None and not latch.is_set():
                    waits.wait_for(latch.wait, lambda: "the rows of weights that other ranks update")
            self._raise()

    def finish(self) -> None:
        """Wait until all rows are here; see `wait_for`."""
        thread = self._thread
        if thread is not None:
            waits.wait_for(_joined(thread), lambda: "the rows of weights that other ranks update")
            self._thread = None
            self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if self._is_lost:
            text = "another rank could not finish its step, so that weights here are of no step; its log says why"
            raise SessionBrokenError(text) from error
        if error is not None:
            raise error

    def close(self) -> None:
        """End: other ranks get what they wait for, and what they do not send is left soon."""
        thread, self._thread = self._thread, None
        if thread is None or waits.wait_for(_joined(thread), lambda: "", waits.QUIET_S):
            with contextlib.suppress(Exception):  # all groups may have been destroyed
                torch.distributed.destroy_process_group(self._group)


def _joined(thread: threading.Thread) -> Any:
    def joined(pause_s: float) -> bool:
        thread.join(min(pause_s, waits.SLICE_S))
        return not thread.is_alive()

    return joined
