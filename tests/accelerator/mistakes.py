"""Mistakes in the use of a device, planted one at a time: a test accelerator that is of any use finds each of them.

They are what programs on a GPU get wrong: order between lanes that nobody asks for, memory that is used again too
early, host memory that is read before its copy has come, device memory that the host touches, the wrong device. Most
are planted in the product, at one call of `offload.protocols.Device`; the others in `Host`, which does for the
trainings what a careful user does for himself. Those that only leave out a call are not among them: `leave_out` makes
them all.

Each says what is wrong, what a real GPU would make of it, and how it shows. None is found by looking for it:
trainings end with other bits than on the CPU, or do not end. No training shows free memory that is counted though
somebody has it (the device is asked for what is planned, or half, until it gives that), nor a thread that does not
adopt its device (only CUDA makes a context for a thread's first device, half a gigabyte, and each call makes its
device current).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import Enum
from functools import wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from offload.device import accelerator
from offload.device.lanes import GpuLanes
from offload.errors import OffloadError
from offload.gradients.gpu import Departure, GpuGradients
from offload.integrations.deepspeed.gradients import Transfers
from offload.protocols import DeviceLane

H2D, D2H, UPDATE, GRADIENTS = DeviceLane.H2D, DeviceLane.D2H, DeviceLane.UPDATE, DeviceLane.GRADIENTS
CALLER, PIECES = DeviceLane.CALLER, DeviceLane.PIECES

WITHIN = 8
"""Each mistake that is found at all is found by one of so many seeds, from 0 on; most of them by the first."""

Plant = Callable[[], AbstractContextManager[Any]]
"""Makes a mistake, as long as the context lasts; its docstring says what is wrong, and what a GPU makes of it."""


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


class Mistake(NamedTuple):
    """One that a training finds, and how it gives itself away."""

    plant: Plant
    workload: str
    shows: Shows
    quick: bool
    """Whether `make test` looks for it."""


MISTAKES: dict[str, Mistake] = {}
"""All that trainings find, by name."""


def found_by(workload: str, shows: Shows = Shows.BITS, *, quick: bool = False) -> Callable[[Plant], Plant]:
    """Have a mistake be one that a training finds."""

    def told(plant: Plant) -> Plant:
        assert plant.__name__ not in MISTAKES
        MISTAKES[plant.__name__] = Mistake(plant, workload, shows, quick)
        return plant

    return told


def plants() -> dict[str, Plant]:
    """Return what can be planted, by name."""
    return {name: mistake.plant for name, mistake in MISTAKES.items()}


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


def given(right: Any, wrong: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is given the right one first."""
    return lambda *arguments, **options: wrong(right, *arguments, **options)


def instead(owner: Any, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Plant another function in a class or module of the product, or in `Host`."""
    return lambda wrong: wraps(wrong)(lambda: replaced(owner, name, staticmethod(wrong) if owner is Host else wrong))


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Plant another method, which is given the right one first."""
    return lambda wrong: wraps(wrong)(lambda: replaced(owner, name, given(getattr(owner, name), wrong)))


def in_device(name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Plant another method in the device, which is given the right one first."""
    return around(accelerator.AcceleratorDevice, name)


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


def in_marks(name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Plant another method in all marks of the device, which is given the right one first."""

    def planted(wrong: Callable[..., Any]) -> Plant:
        kinds: dict[type, type] = {}

        def marks(right: Any, *arguments: Any, **options: Any) -> Any:
            mark = right(*arguments, **options)
            kind = type(mark)
            if kind not in kinds:
                kinds[kind] = type(kind.__name__, (kind,), {name: given(getattr(kind, name), wrong)})
            mark.__class__ = kinds[kind]
            return mark

        @wraps(wrong)
        @contextlib.contextmanager
        def plant() -> Iterator[None]:
            with in_device("mark")(marks)(), in_device("mark_caller")(marks)():
                yield

        return plant

    return planted


# Marks


@found_by("kept-gpu")
@in_device("mark")
def marks_on_another_lane(right: Any, self: Any, lane: DeviceLane, **timed: bool) -> Any:
    """The mark after copies to the host is on lane H2D: host memory is taken for complete while it is written."""
    return right(self, H2D if lane is D2H else lane, **timed)


@found_by("two-streams")
@in_device("mark_caller")
def marks_the_newest_caller(right: Any, self: Any, caller: Any) -> Any:
    """A bucket that leaves later marks the stream that is current then: it leaves before its gradients are there."""
    return self.mark(CALLER, timed=False)


@found_by("streams-departing")
@in_device("caller")
def one_caller_only(right: Any, self: Any) -> Any:
    """Gradients made on two streams are taken for those of one: the second stream's leave before they are there."""
    found = right(self)
    return self.__dict__.setdefault("first_caller", found)


@found_by("ending", Shows.ERROR, quick=True)
@in_device("mark")
def never_timed(right: Any, self: Any, lane: DeviceLane, *, timed: bool = True) -> Any:
    """Marks are made without timing where their time is asked for: CUDA refuses, and the session breaks."""
    return right(self, lane, timed=False)


@found_by("kept-gpu", quick=True)
@in_device("report")
def reports_at_once(right: Any, self: Any, mark: Any, queue: Any, op: int) -> None:
    """An operation's end is posted before its mark is reached: host state is updated, or sent on, before it comes."""
    queue.post(op)


@found_by("kept-cpu")
@in_marks("reached")
def always_reached(right: Any, self: Any) -> Any:
    """A mark says that it has been reached; not to what reads its time, whose error would come first. The CPU updates
    with gradients that are still coming.
    """
    return right(self) if is_within("GpuLanes.take_timed") else True


@found_by("kept", Shows.ERROR)
@in_marks("wait")
def never_waited(right: Any, self: Any) -> None:
    """Waiting for a mark returns at once: norms from old sums, host memory read before its copy has come."""


@found_by("state-home", quick=True)
@in_marks("wait")
def state_read_early(right: Any, self: Any) -> None:
    """State is handed out before its copy to pinned memory has come: what the buffer held before."""
    if not is_within("GpuLanes.copy_to_host"):
        right(self)


@found_by("kept")
@in_marks("wait")
def norm_read_early(right: Any, self: Any) -> None:
    """Sums of squares are read before their copy to pinned memory has come: the norm of the step before."""
    if not is_within("GpuGradients.settle"):
        right(self)


@found_by("times", Shows.TIMES)
@in_device("rebase")
def keeps_the_old_time(right: Any, self: Any) -> None:
    """Times are counted from a newer event with the older event's time: a timeline that is off, and plans from it."""
    event, base_s = self.base
    self.base = event, -math.inf  # so that it is old
    right(self)
    self.base = self.base[0], base_s


# Work on the wrong lane, or by the wrong hand


@found_by("kept-gpu")
@in_device("stream")
def copies_on_the_current_stream(right: Any, self: Any, lane: DeviceLane) -> Any:
    """State is copied to the device on the engine thread's current stream: updates do not wait for it."""
    return right(self, CALLER if lane is H2D and is_within("AcceleratorDevice.copy") else lane)


@found_by("kept-gpu")
@in_device("stream")
def updates_on_the_current_stream(right: Any, self: Any, lane: DeviceLane) -> Any:
    """Updates are put on the engine thread's current stream: state leaves, and weights are read, before them."""
    return right(self, CALLER if lane is UPDATE and is_within("AcceleratorDevice.update") else lane)


@found_by("kept")
@in_device("sum_gradients")
def sums_on_another_lane(right: Any, self: Any, lane: DeviceLane, *arguments: Any) -> Any:
    """Sums of many gradients are put on lane H2D: read before they are there, and made before gradients are."""
    return right(self, H2D if lane is GRADIENTS else lane, *arguments)


@found_by("departing-gpu")
@in_device("gradient_blocks")
def block_sums_on_another_lane(right: Any, self: Any, lane: DeviceLane, *arguments: Any, **options: Any) -> Any:
    """The sums of one gradient, or an addition to it, are put on lane H2D: as above."""
    return right(self, H2D if lane is GRADIENTS else lane, *arguments, **options)


@found_by("kept-cpu")
@in_device("copy_pieces")
def pieces_on_another_lane(right: Any, self: Any, lane: DeviceLane, *arguments: Any) -> Any:
    """Small pieces are gathered and scattered on the lane of updates: copies and forward do not wait for it."""
    return right(self, UPDATE if lane is PIECES else lane, *arguments)


@found_by("ending", Shows.CRASH, quick=True)
@in_device("copy")
def host_reads_the_device(right: Any, self: Any, lane: DeviceLane, *arguments: int) -> None:
    """The host copies device memory by itself: SIGSEGV."""
    if lane is H2D:
        right(self, lane, *arguments)
    else:
        ctypes.memmove(*arguments[:3])


@found_by("ending", Shows.CRASH)
@in_device("copy")
def host_writes_to_the_device(right: Any, self: Any, lane: DeviceLane, *arguments: int) -> None:
    """The host copies to device memory by itself: SIGSEGV."""
    if lane is H2D:
        ctypes.memmove(*arguments[:3])
    else:
        right(self, lane, *arguments)


# Memory


@found_by("departing-cpu", quick=True)
@around(GpuGradients, "keep_until_read")
def drops_gradients_in_transit(right: Any, self: Any, *arguments: Any, **options: Any) -> None:
    """Gradients are dropped before they have left: backward uses their memory, and others leave in their place."""
    right(self, *arguments, **options)
    self.in_transit.clear()


@found_by("departing-cpu")
@around(Departure, "on_lane")
def follows_nothing(right: Any, self: Any) -> Any:
    """Gradients are handed back behind a bucket that no stream can follow yet: backward uses their memory."""
    return self if is_within("GpuGradients.drop_oldest_when_read") else right(self)


@found_by("added")
@in_device("allocate")
def allocates_out_of_order(right: Any, self: Any, nbytes: int, caller: Any = None) -> int:
    """Memory for lanes is taken without waiting for the allocator's stream: whoever had it still writes to it."""
    impatient = replace(self.backend, current_stream=lambda device: SimpleNamespace(synchronize=lambda: None))
    with replaced(self, "backend", impatient):
        return int(right(self, nbytes, caller))


@found_by("borrowing-departing")
@in_device("allocate")
def borrows_out_of_order(right: Any, self: Any, nbytes: int, caller: Any = None) -> int:
    """Memory is borrowed in the order of another stream than lanes follow: it is filled when state is there."""
    return int(right(self, nbytes, None if caller is None else self.stream(PIECES)))


@found_by("ending", quick=True)
@contextlib.contextmanager
def closes_at_once() -> Iterator[None]:
    """A session ends without waiting for its lanes, nor for streams, as of a device that has failed: weights without
    the last step; copies to memory that is unmapped.
    """

    @contextlib.contextmanager
    def refused() -> Iterator[None]:
        raise OffloadError("closed")
        yield

    def current(right: Any, self: Any) -> AbstractContextManager[None]:
        return refused() if is_within("AcceleratorDevice.close") else right(self)

    def wait(right: Any, self: Any) -> None:
        if not is_within("GpuLanes.close"):
            right(self)

    with in_device("current")(current)(), around(GpuLanes, "wait")(wait)():
        yield


# Host memory that copies use


@found_by("departing-cpu", quick=True)
@in_marks("wait")
def added_before_they_come(right: Any, self: Any) -> None:
    """Gradients of further passes are added before they have come to a pinned buffer: its last user's are."""
    if not is_within("offload.gradients.additions"):
        right(self)


@found_by("kept-cpu", quick=True)
@instead(GpuLanes, "inputs_mark")
def updated_before_gradients_come(*_: Any) -> None:
    """An update on the CPU does not wait for its gradients and weights, and takes those of the step before."""


@found_by("forward-cpu")
@in_device("report")
def reports_pushes_at_once(right: Any, self: Any, mark: Any, queue: Any, op: int) -> None:
    """A weight slot is taken for free before its weights have left: weights of another subgroup arrive."""
    if is_within("GpuLanes.await_push"):
        queue.post(op)
    else:
        right(self, mark, queue, op)


@found_by("forward-cpu")
@in_device("mark")
def scattered_unseen(right: Any, self: Any, lane: DeviceLane, **timed: bool) -> Any:
    """Who reads new weights follows their copy, not the kernel that scatters: forward reads old small weights."""
    return right(self, H2D if lane is PIECES and is_within("GpuLanes.send_weights") else lane, **timed)


# Threads and devices


@found_by("second", Shows.PLACE, quick=True)
@in_device("current")
@contextlib.contextmanager
def leaves_the_device_alone(right: Any, self: Any) -> Iterator[None]:
    """Work for the second device is asked for while the first is current: CUDA would launch on the first."""
    yield


# DeepSpeed's transfers


@found_by("transfers", quick=True)
@instead(Transfers, "wait")
def transfers_not_waited_for(self: Any) -> None:
    """Gradients in host memory are read while they come: those of the window before."""


@found_by("transfers")
@around(Transfers, "start")
def transfers_marked_early(right: Any, self: Any, target: torch.Tensor, source: torch.Tensor) -> None:
    """The event after a copy is recorded before it: as above, for the newest."""
    right(self, target.flatten()[:0], source.flatten()[:0])
    mark, _, _ = self.under_way.pop()
    pinned = torch.empty(source.numel(), dtype=target.dtype, pin_memory=True)
    pinned.copy_(source, non_blocking=True)
    source.record_stream(torch.accelerator.current_stream(source.device))
    self.under_way.append((mark, pinned, target))


# What users do


@found_by("streams")
@instead(Host, "working_on")
@contextlib.contextmanager
def stream_begins_early(stream: Any) -> Iterator[None]:
    """A user's stream does not wait for what it reads: backward of old activations."""
    with stream:
        yield


@found_by("streams")
@instead(Host, "working_on")
@contextlib.contextmanager
def stream_ends_early(stream: Any) -> Iterator[None]:
    """What comes after a user's stream does not wait for it: a step with half of its gradients."""
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        yield


@found_by("host", quick=True)
@instead(Host, "used_on")
def used_on_another_stream(*_: Any) -> None:
    """A tensor is dropped while another stream uses it, without record_stream: its memory is somebody else's."""


@found_by("host", quick=True)
@instead(Host, "upload")
def staging_in_use(staging: torch.Tensor, values: torch.Tensor, target: torch.Tensor) -> None:
    """A pinned buffer is filled anew before its last copy has left: the values of the next batch arrive twice."""
    staging.copy_(values)
    target.copy_(staging, non_blocking=True)


@found_by("host", quick=True)
@instead(Host, "download")
def staging_read_early(staging: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A pinned buffer is read before the copy to it has come: the values of the last copy."""
    staging.copy_(source, non_blocking=True)
    return staging.clone()


@found_by("host", Shows.CRASH, quick=True)
@instead(Host, "first")
def tensor_read_by_the_host(tensor: torch.Tensor) -> float:
    """The host reads a tensor's memory where it lies: SIGSEGV."""
    return float(ctypes.c_float.from_address(tensor.data_ptr()).value)
