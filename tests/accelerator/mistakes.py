"""Mistakes in the use of a device, planted one at a time: a test accelerator that is of any use finds each of them.

They are what programs on a GPU get wrong: order between lanes that nobody asks for, memory that is used again too
early, host memory that is read before its copy has come, device memory that the host touches, the wrong device. Most
are planted in the product, at one call of `offload.protocols.Device`; the others in `Host`, which does for the
trainings what a careful user does for himself. Those that only leave out a call are not among them: `leave_out` makes
them all.

Each says what a real GPU would make of it, and how it shows. None is found by looking for it: trainings end with
other bits than on the CPU, or do not end. No training shows free memory that is counted though somebody has it (the
device is asked for what is planned, or half, until it gives that), nor a thread that does not adopt its device (only
CUDA makes a context for a thread's first device, half a gigabyte, and each call makes its device current).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

from offload.device import accelerator
from offload.device.lanes import GpuLanes
from offload.errors import OffloadError
from offload.gradients.gpu import Departure, GpuGradients
from offload.integrations.deepspeed.gradients import Transfers
from offload.protocols import DeviceLane

DEVICE: type = accelerator.AcceleratorDevice
"""The class of devices that mistakes are planted in."""


WITHIN = 8
"""Each mistake that is found at all is found by one of so many seeds, from 0 on; most of them by the first."""


class Shows(Enum):
    """How a mistake gives itself away."""

    BITS = "weights or state have other bits than on the CPU; NaN, where memory was used again"
    CRASH = "the process ends with SIGSEGV, as the host has touched device memory"
    ERROR = "an exception"
    TIMES = "a timeline tells of times outside the step"
    PLACE = "another device or stream is current afterwards"


class Host:
    """What a training asks of the device for itself, done with care."""

    @staticmethod
    @contextlib.contextmanager
    def working_on(stream: Any) -> Iterator[None]:
        """Work on a stream, behind all work on the current one so far, which then goes on behind it."""
        outside = torch.accelerator.current_stream()
        stream.wait_stream(outside)
        with stream:
            yield
        outside.wait_stream(stream)

    @staticmethod
    def used_on(tensor: torch.Tensor, stream: Any) -> None:
        """Say that a stream uses a tensor, which was made on another one and may be dropped at any time."""
        tensor.record_stream(stream)

    @staticmethod
    def upload(staging: torch.Tensor, values: torch.Tensor, target: torch.Tensor) -> None:
        """Copy values to the device through a pinned buffer, which is free again when this returns."""
        staging.copy_(values)
        target.copy_(staging, non_blocking=True)
        torch.accelerator.current_stream().synchronize()

    @staticmethod
    def download(staging: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return what a tensor on the device holds, through a pinned buffer."""
        staging.copy_(source, non_blocking=True)
        torch.accelerator.current_stream().synchronize()
        return staging.clone()

    @staticmethod
    def first(tensor: torch.Tensor) -> float:
        """Return the first element of an fp32 tensor on the device."""
        return float(tensor.flatten()[0].cpu())


@dataclass(frozen=True)
class Planted:
    """A mistake.

    Attributes:
        name: For reports.
        wrong: What is done wrong.
        on_a_gpu: What a real one would make of it.
        plant: Makes it, as long as the context lasts.
    """

    name: str
    wrong: str
    on_a_gpu: str
    plant: Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mistake(Planted):
    """One that a training finds.

    Attributes:
        workload: Which.
        shows: How it gives itself away here.
        quick: Whether `make test` looks for it.
    """

    workload: str
    shows: Shows = Shows.BITS
    quick: bool = False


# How they are planted


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Have an attribute be another one; nothing is replaced that is not there."""
    getattr(owner, name)
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def in_device(name: str, wrong: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Plant another method in the device, which is given the right one first."""
    return lambda: replaced(DEVICE, name, given(getattr(DEVICE, name), wrong))


def given(right: Any, wrong: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is given the right one first."""
    return lambda *arguments, **options: wrong(right, *arguments, **options)


def instead(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Plant another method in a class of the product."""
    return lambda: replaced(owner, name, value)


def is_within(within: str) -> bool:
    """Return whether what has called the caller of this is a certain public function, or a private one for it.

    Args:
        within: Qualified name of the function; or of a module, for all that is in it.
    """
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:  # another mistake at the same method
        frame = frame.f_back
    if frame.f_globals["__name__"] == within:
        return True
    while frame.f_code.co_name.startswith(("_", "<")) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_qualname == within


def in_marks(name: str, wrong: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Plant another method in all marks of the device, which is given the right one first."""
    kinds: dict[type, type] = {}

    def marks(right: Any, *arguments: Any, **options: Any) -> Any:
        mark = right(*arguments, **options)
        kind = type(mark)
        if kind not in kinds:
            kinds[kind] = type(kind.__name__, (kind,), {name: given(getattr(kind, name), wrong)})
        mark.__class__ = kinds[kind]
        return mark

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        with in_device("mark", marks)(), in_device("mark_caller", marks)():
            yield

    return plant


def never_awaited(within: str = "") -> Callable[[], AbstractContextManager[Any]]:
    """Have waits for marks that one function makes (see `is_within`) return at once; "" for all."""

    def wait(right: Any, self: Any) -> None:
        if within and not is_within(within):
            right(self)

    return in_marks("wait", wait)


def always_but_to_who_reads_times(right: Any, self: Any) -> Any:
    """Say that a mark has been reached; not to what reads its time, whose error would come first."""
    return right(self) if is_within("GpuLanes.take_timed") else True


def nothing(*arguments: Any, **options: Any) -> None:
    """Stand in for what is left out."""


# What they do


def on_another_lane(swapped: dict[DeviceLane, DeviceLane]) -> Callable[..., Any]:
    """Have a method take one lane for another."""

    def wrong(right: Any, self: Any, lane: DeviceLane, *arguments: Any, **options: Any) -> Any:
        return right(self, swapped.get(lane, lane), *arguments, **options)

    return wrong


def on_the_current_stream(wanted: DeviceLane, within: str) -> Callable[..., Any]:
    """Have a method of the device take the stream that is current for that of a lane."""

    def wrong(right: Any, self: Any, lane: DeviceLane) -> Any:
        return right(self, CALLER if lane is wanted and is_within(within) else lane)

    return wrong


def marks_the_newest_caller(right: Any, self: Any, caller: Any) -> Any:
    return self.mark(DeviceLane.CALLER, timed=False)


def one_caller_only(right: Any, self: Any) -> Any:
    found = right(self)
    return self.__dict__.setdefault("first_caller", found)


def reports_at_once(right: Any, self: Any, mark: Any, queue: Any, op: int) -> None:
    queue.post(op)


def reports_pushes_at_once(right: Any, self: Any, mark: Any, queue: Any, op: int) -> None:
    if is_within("GpuLanes.await_push"):
        queue.post(op)
    else:
        right(self, mark, queue, op)


def never_timed(right: Any, self: Any, lane: DeviceLane, *, timed: bool = True) -> Any:
    return right(self, lane, timed=False)


def copies_by_the_host(lanes: Callable[[DeviceLane], bool]) -> Callable[..., Any]:
    def wrong(
        right: Any, self: Any, lane: DeviceLane, target: int, source: int, nbytes: int, piece_bytes: int = 0
    ) -> None:
        if lanes(lane):
            ctypes.memmove(target, source, nbytes)
        else:
            right(self, lane, target, source, nbytes, piece_bytes)

    return wrong


def allocates_out_of_order(right: Any, self: Any, nbytes: int, caller: Any = None) -> int:
    impatient = replace(self.backend, current_stream=lambda device: SimpleNamespace(synchronize=nothing))
    with replaced(self, "backend", impatient):
        return int(right(self, nbytes, caller))


def lends_out_of_order(right: Any, self: Any, nbytes: int, caller: Any = None) -> int:
    other = None if caller is None else self.stream(DeviceLane.PIECES)
    return int(right(self, nbytes, other))


@contextlib.contextmanager
def leaves_the_device_alone(right: Any, self: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def closes_at_once() -> Iterator[None]:
    """Have nobody wait for lanes at the end; streams are not waited for then, as of a device that has failed."""

    @contextlib.contextmanager
    def refused() -> Iterator[None]:
        raise OffloadError("closed")
        yield

    def current(right: Any, self: Any) -> AbstractContextManager[None]:
        return refused() if is_within("AcceleratorDevice.close") else right(self)

    def wait(right: Any, self: Any) -> None:
        if not is_within("GpuLanes.close"):
            right(self)

    with in_device("current", current)(), replaced(GpuLanes, "wait", given(GpuLanes.wait, wait)):
        yield


def keeps_the_old_time(right: Any, self: Any) -> None:
    event, base_s = self.base
    self.base = event, -math.inf  # so that it is old
    right(self)
    self.base = self.base[0], base_s


def drops_gradients_in_transit(right: Any, self: Any, *arguments: Any, **options: Any) -> None:
    right(self, *arguments, **options)
    self.in_transit.clear()


def follows_a_bucket_that_is_on_no_lane(right: Any, self: Any) -> Any:
    return self if is_within("GpuGradients.drop_oldest_when_read") else right(self)


def forgets_what_is_scattered(right: Any, self: Any, lane: DeviceLane, *, timed: bool = True) -> Any:
    scattered = lane is DeviceLane.PIECES and is_within("GpuLanes.send_weights")
    return right(self, DeviceLane.H2D if scattered else lane, timed=timed)


def marks_before_the_copy(right: Any, self: Any, target: torch.Tensor, source: torch.Tensor) -> None:
    right(self, target.flatten()[:0], source.flatten()[:0])
    mark, _, _ = self.under_way.pop()
    pinned = torch.empty(source.numel(), dtype=target.dtype, pin_memory=True)
    pinned.copy_(source, non_blocking=True)
    source.record_stream(torch.accelerator.current_stream(source.device))
    self.under_way.append((mark, pinned, target))


@contextlib.contextmanager
def on_nobody_s_behalf(stream: Any) -> Iterator[None]:
    with stream:
        yield


@contextlib.contextmanager
def leaves_without_a_word(stream: Any) -> Iterator[None]:
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        yield


def fills_a_buffer_in_use(staging: torch.Tensor, values: torch.Tensor, target: torch.Tensor) -> None:
    staging.copy_(values)
    target.copy_(staging, non_blocking=True)


def reads_a_copy_under_way(staging: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    staging.copy_(source, non_blocking=True)
    return staging.clone()


def reads_device_memory(tensor: torch.Tensor) -> float:
    return float(ctypes.c_float.from_address(tensor.data_ptr()).value)


H2D, D2H, UPDATE, GRADIENTS = DeviceLane.H2D, DeviceLane.D2H, DeviceLane.UPDATE, DeviceLane.GRADIENTS
CALLER, PIECES = DeviceLane.CALLER, DeviceLane.PIECES

MISTAKES: tuple[Mistake, ...] = (
    # Marks
    Mistake(
        "marked-on-another-lane",
        "the mark after copies to the host is recorded on the stream of copies to the device",
        "host memory is taken for complete while it is written",
        in_device("mark", on_another_lane({D2H: H2D})),
        workload="kept-gpu",
    ),
    Mistake(
        "marked-on-the-thread-s-stream",
        "a bucket that leaves later marks the stream that is current then, not the one that made its gradients",
        "gradients made on a user's stream leave before they are there",
        in_device("mark_caller", marks_the_newest_caller),
        workload="two-streams",
    ),
    Mistake(
        "one-caller",
        "gradients made on two streams are taken for those of one",
        "those of the second stream leave before they are there",
        in_device("caller", one_caller_only),
        workload="streams-departing",
    ),
    Mistake(
        "untimed",
        "marks are made without timing where their time is asked for",
        "CUDA refuses to tell a time, and the session breaks",
        in_device("mark", never_timed),
        workload="ending",
        shows=Shows.ERROR,
        quick=True,
    ),
    Mistake(
        "reported-at-once",
        "the end of an operation is posted before its mark is reached",
        "host state is updated, written to disk or sent on before it has come",
        in_device("report", reports_at_once),
        workload="kept-gpu",
        quick=True,
    ),
    Mistake(
        "always-reached",
        "a mark says that it has been reached",
        "the CPU updates with gradients that are still coming",
        in_marks("reached", always_but_to_who_reads_times),
        workload="kept-cpu",
    ),
    Mistake(
        "never-waited",
        "waiting for a mark returns at once",
        "norms from old sums, host memory read before its copy has come",
        never_awaited(),
        workload="kept",
        shows=Shows.ERROR,
    ),
    Mistake(
        "state-read-early",
        "state is handed out before its copy to pinned memory has come",
        "state_dict() with what the buffer held before",
        never_awaited("GpuLanes.copy_to_host"),
        workload="state-home",
        quick=True,
    ),
    Mistake(
        "norm-read-early",
        "sums of squares are read before their copy to pinned memory has come",
        "the norm of the step before",
        never_awaited("GpuGradients.settle"),
        workload="kept",
    ),
    Mistake(
        "old-times",
        "times are counted from a newer event with the older event's time",
        "a timeline that is off by as long as the session runs, and plans made from it",
        in_device("rebase", keeps_the_old_time),
        workload="times",
        shows=Shows.TIMES,
    ),
    # Work on the wrong lane, or by the wrong hand
    Mistake(
        "copied-on-the-caller-s-stream",
        "state is copied to the device on the stream that is current on the engine thread",
        "updates do not wait for it: they follow lane H2D",
        in_device("stream", on_the_current_stream(H2D, "AcceleratorDevice.copy")),
        workload="kept-gpu",
    ),
    Mistake(
        "updated-on-the-current-stream",
        "updates are put on the stream that is current on the engine thread",
        "state is copied out, and weights are read, before they are updated",
        in_device("stream", on_the_current_stream(UPDATE, "AcceleratorDevice.update")),
        workload="kept-gpu",
    ),
    Mistake(
        "sums-on-another-lane",
        "sums of many gradients are put on lane H2D",
        "they are read before they are there, and before gradients are",
        in_device("sum_gradients", on_another_lane({GRADIENTS: H2D})),
        workload="kept",
    ),
    Mistake(
        "block-sums-on-another-lane",
        "the sums of one gradient, or an addition to it, are put on lane H2D",
        "they are read before they are there, and before gradients are",
        in_device("gradient_blocks", on_another_lane({GRADIENTS: H2D})),
        workload="departing-gpu",
    ),
    Mistake(
        "pieces-on-another-lane",
        "small pieces are gathered and scattered on lane H2D",
        "copies and forward do not wait for it",
        in_device("copy_pieces", on_another_lane({PIECES: UPDATE})),
        workload="kept-cpu",
    ),
    Mistake(
        "host-reads-the-device",
        "the host copies device memory by itself",
        "SIGSEGV",
        in_device("copy", copies_by_the_host(lambda lane: lane is not H2D)),
        workload="ending",
        shows=Shows.CRASH,
        quick=True,
    ),
    Mistake(
        "host-writes-to-the-device",
        "the host copies to device memory by itself",
        "SIGSEGV",
        in_device("copy", copies_by_the_host(lambda lane: lane is H2D)),
        workload="ending",
        shows=Shows.CRASH,
    ),
    # Memory
    Mistake(
        "dropped-in-transit",
        "gradients are dropped before they have left",
        "their memory is used again by backward: other gradients leave in their place",
        instead(GpuGradients, "keep_until_read", given(GpuGradients.keep_until_read, drops_gradients_in_transit)),
        workload="departing-cpu",
        quick=True,
    ),
    Mistake(
        "follows-nothing",
        "gradients are handed back behind a bucket that has not left, which no stream can follow",
        "backward uses their memory again before they have left",
        instead(Departure, "on_lane", given(Departure.on_lane, follows_a_bucket_that_is_on_no_lane)),
        workload="departing-cpu",
    ),
    Mistake(
        "allocated-out-of-order",
        "memory for the lanes is taken without waiting for the stream that the allocator orders it by",
        "whoever had it before still writes to it",
        in_device("allocate", allocates_out_of_order),
        workload="added",
    ),
    Mistake(
        "borrowed-out-of-order",
        "memory is borrowed in the order of another stream than that which lanes are made to follow",
        "it is filled when state is there",
        in_device("allocate", lends_out_of_order),
        workload="borrowing-departing",
    ),
    Mistake(
        "closed-early",
        "a session ends without waiting for its lanes",
        "weights without the last step; copies to memory that is unmapped",
        closes_at_once,
        workload="ending",
        quick=True,
    ),
    # Host memory that copies use
    Mistake(
        "added-before-they-come",
        "gradients of further passes are added before their copy to a pinned buffer has come",
        "those of the buffer's last user are added",
        never_awaited("offload.gradients.additions"),
        workload="departing-cpu",
        quick=True,
    ),
    Mistake(
        "updated-before-gradients-come",
        "an update on the CPU does not wait for its gradients and weights",
        "updated with the gradients of the step before",
        instead(GpuLanes, "inputs_mark", nothing),
        workload="kept-cpu",
        quick=True,
    ),
    Mistake(
        "weight-slot-in-use",
        "a weight slot is taken for free before its weights have left",
        "weights of another subgroup arrive",
        in_device("report", reports_pushes_at_once),
        workload="forward-cpu",
    ),
    Mistake(
        "scattered-unseen",
        "whoever reads new weights follows their copy, and not the kernel that scatters the small ones",
        "forward reads small weights of the step before",
        in_device("mark", forgets_what_is_scattered),
        workload="forward-cpu",
    ),
    # Threads and devices
    Mistake(
        "wrong-current-device",
        "work for the second device is asked for while the first one is current",
        "CUDA launches kernels on the first device: an illegal address",
        in_device("current", leaves_the_device_alone),
        workload="second",
        shows=Shows.PLACE,
        quick=True,
    ),
    # DeepSpeed's transfers
    Mistake(
        "transfers-not-waited-for",
        "gradients in host memory are read while they come",
        "those of the window before",
        instead(Transfers, "wait", nothing),
        workload="transfers",
        quick=True,
    ),
    Mistake(
        "transfers-marked-early",
        "the event after a copy is recorded before it",
        "as above, for the newest",
        instead(Transfers, "start", given(Transfers.start, marks_before_the_copy)),
        workload="transfers",
    ),
    # What users do
    Mistake(
        "stream-begins-early",
        "a user's stream does not wait for what it reads",
        "backward of old activations",
        instead(Host, "working_on", staticmethod(on_nobody_s_behalf)),
        workload="streams",
    ),
    Mistake(
        "stream-ends-early",
        "what comes after a user's stream does not wait for it",
        "a step with half of its gradients",
        instead(Host, "working_on", staticmethod(leaves_without_a_word)),
        workload="streams",
    ),
    Mistake(
        "used-on-another-stream",
        "a tensor is dropped while another stream uses it, without record_stream",
        "its memory is somebody else's before it has been read",
        instead(Host, "used_on", staticmethod(nothing)),
        workload="host",
        quick=True,
    ),
    Mistake(
        "staging-in-use",
        "a pinned buffer is filled anew before its last copy has left",
        "the values of the next batch arrive twice",
        instead(Host, "upload", staticmethod(fills_a_buffer_in_use)),
        workload="host",
        quick=True,
    ),
    Mistake(
        "staging-read-early",
        "a pinned buffer is read before the copy to it has come",
        "the values of the last copy",
        instead(Host, "download", staticmethod(reads_a_copy_under_way)),
        workload="host",
        quick=True,
    ),
    Mistake(
        "tensor-read-by-the-host",
        "the host reads a tensor's memory where it lies",
        "SIGSEGV",
        instead(Host, "first", staticmethod(reads_device_memory)),
        workload="host",
        shows=Shows.CRASH,
        quick=True,
    ),
)


def plants() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return what can be planted, by name."""
    return {mistake.name: mistake.plant for mistake in MISTAKES}
