"""Weights that ranks exchange while a pending step goes on in the background: DDP with `shard=True`, ZeRO-1 and 2.

A rank updates its part of the weights and needs those of others. In a pending step they are exchanged bucket by
bucket, in an order on which ranks agree as the step begins, by a thread of its own. So no rank waits in a collective
for another rank's caller, which may be evaluating alone, writing a file, or using other modules.

The collectives have a process group of their own, of gloo, and weights on an accelerator go through host memory. A
collective of NCCL's is a kernel that waits on its device for those of other ranks; so ranks have to issue all of them
in one order, whatever their groups are (pytorch #131895, #175145). But the program has collectives of its own in
forward and backward, and the order between these and this thread's would be left to chance. gloo's collectives wait
on the host, each on its own thread.

A rank whose step fails says so with the buckets that it still exchanges, so that no other rank waits for ever.

Public for those who drive an `offload.Engine` themselves, as the DeepSpeed integration does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from offload import waits
from offload.backends import accelerator, working_on
from offload.errors import SessionBrokenError
from offload.session.engine import Engine

BUCKET_BYTES = 4 << 20
"""Least bytes of weights that are exchanged at once, as each collective has a fixed cost."""

UNUSED = 1 << 62
"""The place, in a rank's order, of a thing that the rank does not use: greater than any other place."""


class Bucket(NamedTuple):
    """Weights that are exchanged at once.

    Attributes:
        keys: What `Exchange.wait_for` is given to wait for this bucket.
        positions: The parameters of it that this rank's engine updates.
        gather: A function that exchanges the weights over all ranks. It is given the exchange's own mesh, whose
            collectives work on host memory: `all_gather` and `broadcast` copy there and back.
    """

    keys: Sequence[Hashable]
    positions: Sequence[int]
    gather: Callable[[Any], None]


class Exchange:
    """The exchanges of one optimizer, one step at a time. Made by all ranks together.

    Args:
        group: The process group of the ranks, of which each updates some of the weights.
        device: Where weights lie. On an accelerator a stream of the exchange's own copies them, and `wait_for` waits
            on the host until the copies have ended.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.distributed.get_process_group_ranks(group)
        self._copies = None if device.type == "cpu" else _Copies(device)
        # Its own group and mesh, of the same ranks: see the module.
        own: Any = torch.distributed.new_group(ranks, backend="gloo")  # for which torch declares an int, too
        self._group: Any = own
        self._mesh: Any = DeviceMesh.from_group(own, "cpu")
        self._latches: dict[Hashable, waits.Latch] = {}  # set when the key's bucket has been exchanged
        self._landed: dict[Hashable, Any] = {}  # on an accelerator, an event after the copies of the key's bucket
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # of this rank's step, or of a collective; raised once
        self._has_mixed_weights = False  # whether another rank has failed: weights here are a mixture of two steps

    @property
    def is_under_way(self) -> bool:
        """Whether there is an exchange that nobody has waited for to its end."""
        return self._thread is not None

    def agree_on_order(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Agree on the order in which ranks exchange things: by the least place of each on any rank. A collective.

        Args:
            places: The place of each thing in this rank's order, or `UNUSED`. All ranks list the same things.

        Returns:
            The order, alike on all ranks: for each thing its least place, and its index into `places`.
        """
        first_places = torch.tensor(places, dtype=torch.int64, device="cpu")
        torch.distributed.all_reduce(first_places, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return sorted(zip(first_places.tolist(), range(len(places)), strict=True))

    def begin(self, engine: Engine, buckets: Sequence[Bucket]) -> None:
        """Begin to exchange the weights of a step, on a thread of its own.

        Args:
            engine: Updates this rank's part in a pending step; if no step is pending, this rank's step has failed.
            buckets: In the order on which ranks agree.
        """
        latches = [waits.Latch() for _ in buckets]
        self._latches = {key: latch for bucket, latch in zip(buckets, latches, strict=True) for key in bucket.keys}
        self._landed = {}
        if self._copies is not None:
            self._copies.follow()  # work that the caller has enqueued may still use the weights
        has_failed = not engine.is_pending
        arguments = (engine, buckets, latches, has_failed)
        self._thread = threading.Thread(target=self._run, args=arguments, name="offload-exchange", daemon=True)
        self._thread.start()

    def _run(
        self, engine: Engine, buckets: Sequence[Bucket], latches: Sequence[waits.Latch], has_failed: bool
    ) -> None:
        """Exchange one bucket after the other, each once its updates have ended; on the exchange's thread.

        With each bucket every rank also sends whether it has failed. `has_failed`: this rank's step did not begin.
        """
        copies = self._copies
        try:
            with contextlib.nullcontext() if copies is None else copies.stream_is_current():
                for bucket, latch in zip(buckets, latches, strict=True):
                    try:
                        # The caller may have waited for the whole step already, on another stream than this one.
                        engine.wait_for(bucket.positions, on_any_stream=True)
                    except Exception as error:  # this rank takes part all the same: others wait in the collectives
                        self._error = self._error or error
                    # The step may also have failed in an update that this bucket did not wait for.
                    has_failed |= self._error is not None or engine.broken is not None
                    bucket.gather(self._mesh)
                    # A failed rank may send old weights: then those on a rank that has not failed are of two steps.
                    failures = all_gather(torch.tensor([has_failed], dtype=torch.bool, device="cpu"), self._mesh)
                    self._has_mixed_weights |= bool(failures.any()) and not has_failed
                    if copies is not None:
                        self._landed |= dict.fromkeys(bucket.keys, copies.mark())
                    latch.set()
                if copies is not None:
                    copies.mark().synchronize()  # `finish` waits for the end of this thread alone
        except Exception as error:  # of a collective: another rank has ended
            self._has_mixed_weights = True
            self._error = self._error or error
        finally:
            for latch in latches:  # after an error some are not set: whoever waits for them goes on, and raises it
                if not latch.is_set():  # a latch may be set only once
                    latch.set()

    def wait_for(self, keys: Iterable[Hashable]) -> None:
        """Wait until some buckets have been exchanged, by their keys; return at once if no exchange is under way.

        Raises:
            StepAbortedError: This rank's step has failed.
            SessionBrokenError: Another rank's step has failed, or another rank has ended.
        """
        if self._thread is not None:
            for key in keys:
                latch = self._latches.get(key)  # None: the key is in no bucket of this step
                if latch is not None and not latch.is_set():
                    waits.wait_for(latch.wait, lambda: "weights that other ranks update")
                landed = self._landed.get(key)
                if landed is not None:  # None on the CPU, and where the exchange failed before
                    landed.synchronize()
            self._raise_failure()

    def finish(self) -> None:
        """Wait until all buckets have been exchanged, if an exchange is under way; raise as `wait_for` does."""
        thread = self._thread
        if thread is not None:
            waits.wait_for(_waiter_for_end(thread), lambda: "weights that other ranks update")
            self._thread = None  # also if the exchange has failed: it is over
            self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise the error of this exchange, if there is one.

        This rank's own error is raised once. If another rank has failed, all calls raise from now on, as the weights
        here stay a mixture of two steps.
        """
        error = self._error
        self._error = None
        if self._has_mixed_weights:
            text = "another rank could not finish its step, so that weights here are of no step; its log says why"
            raise SessionBrokenError(text) from error
        if error is not None:
            raise error

    def close(self) -> None:
        """End the exchange. What is under way may end in the background; wait for it at most `waits.QUIET_S` seconds.

        So other ranks get what they wait for, while this one does not wait long for them.
        """
        thread = self._thread
        self._thread = None
        # Without a text for the log: this wait ends when the first warning would be due.
        has_ended = thread is None or waits.wait_for(_waiter_for_end(thread), lambda: "", waits.QUIET_S)
        if has_ended:  # else the thread still uses the group
            with contextlib.suppress(Exception):  # all groups may have been destroyed
                torch.distributed.destroy_process_group(self._group)


class _Copies:
    """The stream of an accelerator on which weights are copied to host memory and back."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = accelerator(device)
        with torch.accelerator.device_index(self._device.index):
            goes_first = False  # no higher priority than other streams
            self._stream = self._backend.stream(self._device, goes_first)

    def follow(self) -> None:
        """Order the stream after all work that the caller has enqueued."""
        with torch.accelerator.device_index(self._device.index):
            self._stream.wait_stream(self._backend.current_stream(self._device))

    @contextlib.contextmanager
    def stream_is_current(self) -> Iterator[None]:
        """Make the stream the calling thread's current one within a block."""
        with torch.accelerator.device_index(self._device.index), working_on(self._stream):
            yield

    def mark(self) -> Any:
        """Return an event after all work on the stream; within `stream_is_current`."""
        is_timed = False
        event = self._backend.event(self._device, is_timed)
        event.record(self._stream)
        return event


def all_gather(flat: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Return the flat tensors of all ranks of a mesh, of one size and dtype, as shape [ranks, numel]; a collective.

    Args:
        flat: This rank's. If it lies on another type of device than the mesh's collectives work on, it is copied
            through pinned host memory, and the result is copied back on the current stream.
        mesh: Of one dimension.
    """
    is_on_mesh_device = flat.device.type == mesh.device_type
    shape = mesh.size(), flat.numel()
    if is_on_mesh_device:
        sent = flat
        everyone = torch.empty(shape, dtype=flat.dtype, device=flat.device)
    else:
        # A blocking copy, as the collective reads host memory and follows no stream.
        sent = _pinned_memory(flat.shape, flat).copy_(flat)
        everyone = _pinned_memory(shape, flat)
    torch.distributed.all_gather_into_tensor(everyone.view(-1), sent, group=mesh.get_group())
    return everyone.to(flat.device, non_blocking=True)


def broadcast(flat: torch.Tensor, owner: int, mesh: Any) -> None:
    """Copy one rank's flat tensor to all ranks of a mesh; a collective, through host memory as `all_gather`.

    Args:
        flat: The owner's tensor; on other ranks one of the same size that is written to.
        owner: The owner's rank in the mesh.
        mesh: Of one dimension.
    """
    group = mesh.get_group()
    if flat.device.type == mesh.device_type:
        torch.distributed.broadcast(flat, group_src=owner, group=group)
        return
    for part in torch.split(flat, BUCKET_BYTES // flat.itemsize):  # so that the pinned memory stays small
        on_host = _pinned_memory(part.shape, part)
        if mesh.get_local_rank() == owner:
            on_host.copy_(part)  # a blocking copy, as in `all_gather`
        torch.distributed.broadcast(on_host, group_src=owner, group=group)
        if mesh.get_local_rank() != owner:
            part.copy_(on_host, non_blocking=True)


def _pinned_memory(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return pinned host memory of the dtype of `like`; torch does not reuse it before copies from it have ended."""
    return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=True)


def _waiter_for_end(thread: threading.Thread) -> Any:
    """Return a function for `waits.wait_for` that waits for a thread's end, and returns whether it has come."""

    def has_ended(pause_s: float) -> bool:
        """Wait for the thread's end, `pause_s` seconds at most; return whether it has come."""
        thread.join(min(pause_s, waits.SLICE_S))
        return not thread.is_alive()

    return has_ended
