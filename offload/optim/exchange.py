"""Weights that ranks exchange while a step goes on behind its callers: DDP with `shard=True`, ZeRO-1 and 2.

A rank updates its part of the weights and needs those of others. Of a pending step they are exchanged bucket by
bucket, in an order on which ranks agree as it begins, by a thread: so no rank waits in it for the caller of another,
who may evaluate alone, write a file, or use other modules. The collectives have a process group of their own.

A rank whose step fails says so with the buckets that it still exchanges, so that no other waits for it for ever.

Public for those who drive an `offload.Engine` themselves, as the DeepSpeed integration does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from offload import waits
from offload.backends import working_on
from offload.errors import SessionBrokenError
from offload.session.engine import Engine

BUCKET_BYTES = 4 << 20
"""Bytes of weights that are exchanged at once, at least: collectives have a cost of their own."""

UNUSED = 1 << 62
"""In the place of what a rank does not use: greater than any place in the order."""


class Bucket(NamedTuple):
    """Weights that are exchanged at once.

    Attributes:
        keys: By these others wait for it.
        positions: What the engine of this rank updates of it.
        gather: Has all ranks exchange it, given a mesh of the exchange's own and a note of each rank (bool, shape
            [ranks]; a rank sets its own).
    """

    keys: Sequence[Hashable]
    positions: Sequence[int]
    gather: Callable[[Any, torch.Tensor], None]


class Exchange:
    """The exchanges of one optimizer, one step at a time. Made by all ranks together.

    Args:
        group: Of the ranks, of which each updates some of the weights.
        device: Where weights are. On an accelerator a stream of the exchange's own brings them, and whoever waits for
            a bucket waits until it is there.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.distributed.get_process_group_ranks(group)
        self._device = device
        self._group: Any = torch.distributed.new_group(ranks)
        self._mesh: Any = DeviceMesh.from_group(self._group, device.type)
        self._latches: dict[Hashable, waits.Latch] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_lost = False  # whether a rank has failed: weights here are of no step

    @property
    def is_under_way(self) -> bool:
        """Whether there is an exchange that nobody has waited for to its end."""
        return self._thread is not None

    def agree(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return in which order ranks exchange things; a collective.

        Args:
            places: Of each thing, its place in this rank's order, or `UNUSED`.

        Returns:
            Rows of (place, number of the thing): its first place on any rank.
        """
        found = torch.tensor(places, dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return sorted(zip(found.tolist(), range(len(places)), strict=True))

    def begin(self, engine: Engine, buckets: Sequence[Bucket]) -> None:
        """Begin to exchange the weights of a step.

        Args:
            engine: Updates this rank's part in a pending step; where none goes on, it has failed.
            buckets: In the order on which ranks agree.
        """
        latches = [waits.Latch() for _ in buckets]
        self._latches = {key: latch for bucket, latch in zip(buckets, latches, strict=True) for key in bucket.keys}
        work = (engine, buckets, latches, not engine.is_pending, _stream_behind(self._device))
        self._thread = threading.Thread(target=self._run, args=work, name="offload-exchange", daemon=True)
        self._thread.start()

    def _run(
        self,
        engine: Engine,
        buckets: Sequence[Bucket],
        latches: Sequence[waits.Latch],
        has_failed: bool,
        stream: contextlib.AbstractContextManager[Any],
    ) -> None:
        """Exchange one bucket after the other; on a thread."""
        try:
            with stream:
                for bucket, latch in zip(buckets, latches, strict=True):
                    try:
                        engine.wait_for(bucket.positions, on_any_stream=True)
                    except Exception as error:
                        self._error = self._error or error
                    has_failed |= self._error is not None or engine.broken is not None
                    notes = torch.full((self._mesh.size(),), has_failed, dtype=torch.bool, device=self._device)
                    bucket.gather(self._mesh, notes)
                    is_lost = bool(notes.any())  # which waits for an accelerator
                    self._is_lost |= is_lost and not has_failed
                    latch.set()
        except Exception as error:  # of a collective: a rank has ended
            self._is_lost = True
            self._error = self._error or error
        finally:
            for latch in latches:
                if not latch.is_set():
                    latch.set()

    def wait_for(self, keys: Iterable[Hashable]) -> None:
        """Wait until some buckets are here.

        Raises:
            StepAbortedError: This rank's step has failed.
            SessionBrokenError: Another rank's has, or a rank has ended.
        """
        if self._thread is not None:
            for key in keys:
                if (latch := self._latches.get(key)) is not None and not latch.is_set():
                    waits.wait_for(latch.wait, lambda: "weights that other ranks update")
            self._raise()

    def finish(self) -> None:
        """Wait until all is here; see `wait_for`."""
        thread = self._thread
        if thread is not None:
            waits.wait_for(_joined(thread), lambda: "weights that other ranks update")
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


@contextlib.contextmanager
def _working_on(stream: torch.Stream) -> Iterator[None]:
    with torch.accelerator.device_index(stream.device.index), working_on(stream):
        yield


def _stream_behind(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return what has a thread work on a stream behind what its caller has enqueued; nothing on the CPU."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return _working_on(stream)


def _joined(thread: threading.Thread) -> Any:
    def joined(pause_s: float) -> bool:
        thread.join(min(pause_s, waits.SLICE_S))
        return not thread.is_alive()

    return joined
