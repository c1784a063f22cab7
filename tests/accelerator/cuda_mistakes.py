"""Mistakes that no training on the test accelerator can show: of CUDA's own row, of kernels, of speed.

Each is planted in a process of its own, in which the test that is to find it runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from accelerator.mistakes import Planted, given, in_device, instead
from offload import backends
from offload.device import accelerator
from offload.device.lanes import GpuLanes
from offload.kernels import gpu


@dataclass(frozen=True)
class CudaMistake(Planted):
    """One that no training shows.

    Attributes:
        found_by: The test that finds it.
        is_late: Whether `found_by` runs on the test accelerator.
    """

    found_by: str
    is_late: bool = False


def in_cuda_row(**changed: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Plant other entries in the row of CUDA."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        right = backends.BACKENDS["cuda"]
        backends.BACKENDS["cuda"] = replace(right, **changed)
        try:
            yield
        finally:
            backends.BACKENDS["cuda"] = right

    return plant


def in_source(module: str, right: str, wrong: str) -> Callable[[], AbstractContextManager[Any]]:
    """Plant other source in a module, which is imported anew from it; where `right` is not there once, it raises."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text()
        assert text.count(right) == 1, f"{right!r} is {text.count(right)} times in {module}"
        before = sys.modules.pop(module, None)
        with tempfile.TemporaryDirectory() as folder:
            changed = Path(folder, Path(spec.origin).name)  # from which Triton reads a kernel's source
            changed.write_text(text.replace(right, wrong))
            other = importlib.util.spec_from_file_location(module, changed)
            assert other is not None
            assert other.loader is not None
            made = sys.modules[module] = importlib.util.module_from_spec(other)
            try:
                other.loader.exec_module(made)
                yield
            finally:
                del sys.modules[module]
                if before is not None:
                    sys.modules[module] = before

    return plant


def _uses_what_is_read(self: Any, used: Any) -> Any:
    return used.popleft() if len(used) >= 3 else gpu_unused(self, used)


gpu_unused = gpu.Uploads._take_reusable


def _waits_on_the_host(right: Any, self: Any, lane: Any, mark: Any) -> None:
    mark.wait()


def _leaves_the_error(address: int, nbytes: int) -> None:
    runtime = backends.cuda.cudart()
    refused = runtime.cudaHostRegister(address, nbytes, 1)
    if int(refused):
        raise RuntimeError(f"{runtime.cudaGetErrorString(refused)} (CUDA error {int(refused)})")


def _records_again(right: Any, self: Any, *arguments: Any, **options: Any) -> None:
    right(self, *arguments, **options)
    self.unused.appendleft(self.event)


def _unpins_what_is_gone(self: Any, arena: Any) -> None:
    arena.close()
    self.pinned.unpin(arena)


def _records_some_streams(right: Any, self: Any) -> None:
    kept = dict(self._streams)
    self._streams = {lane: stream for lane, stream in kept.items() if lane is not accelerator.DeviceLane.D2H}
    try:
        right(self)
    finally:
        self._streams = kept


CUDA_MISTAKES = (
    CudaMistake(
        "table-filled-while-read",
        "a pinned table is filled anew while it is read, once a stream has three",
        "rows of another update: wrong weights, without a word",
        instead(gpu.Uploads, "_take_reusable", _uses_what_is_read),
        found_by="tests/unit/test_accelerator.py::test_no_table_is_filled_anew_while_it_waits_to_be_read",
        is_late=True,
    ),
    CudaMistake(
        "lanes-wait-on-the-host",
        "a lane follows a mark by waiting for it on the host",
        "nothing overlaps: a step takes two to three times as long",
        in_device("follow", _waits_on_the_host),
        found_by="tests/accelerator/test_training.py::test_nothing_but_reports_waits_for_lanes[True]",
        is_late=True,
    ),
    CudaMistake(
        "events-spin",
        "events are made without the flag by which who waits for them sleeps",
        "each reporter spins on a core, which the CPU's update loses",
        in_cuda_row(event=lambda device, timed: backends.cuda.Event(enable_timing=timed)),
        found_by="tests/unit/test_cuda_row.py::test_who_waits_for_an_event_sleeps",
    ),
    CudaMistake(
        "a-stream-of-the-common-class",
        "the current stream is one of torch's common class",
        'torch 2.11: "invalid device ordinal" at the first mark',
        in_cuda_row(current_stream=lambda device: torch.Stream(stream_id=0, device_index=0, device_type=1)),
        found_by="tests/unit/test_cuda_row.py::test_streams_and_events_are_of_the_classes_that_take_each_other[strict]",
    ),
    CudaMistake(
        "an-error-is-left",
        "the error of a refused registration is not cleared",
        "the next kernel of forward is blamed for it",
        in_cuda_row(pin=_leaves_the_error),
        found_by="tests/unit/test_cuda_row.py::test_a_refused_registration_leaves_no_error_behind[strict]",
    ),
    CudaMistake(
        "registered-for-one-device",
        "host memory is registered for the current device alone",
        "copies of other devices of the process wait on the host",
        instead(backends, "_PORTABLE", 0),
        found_by="tests/unit/test_cuda_row.py::test_what_is_registered_is_so_for_all_devices",
    ),
    CudaMistake(
        "reads-beyond",
        "the kernel that gathers a gradient reads beyond its end, and takes zero for what it has read there",
        "an illegal address, at the end of one of the allocator's segments alone",
        in_source(
            "offload.kernels.triton_kernels",
            "    found = read(pointers(source, start, NORM_BLOCK, SOURCE, ALIGNED), inside, FULL)\n    values",
            "    found = tl.load(pointers(source, start, NORM_BLOCK, SOURCE, ALIGNED))\n"
            "    found = tl.where(inside, found, found * 0)\n    values",
        ),
        found_by="tests/kernels/test_gpu_beyond.py::test_what_lies_behind_a_tensor_may_be_out_of_reach",
    ),
    CudaMistake(
        "event-recorded-again",
        "an event is recorded anew while a mark still stands for its last record",
        "whoever waits for the mark waits for other work, or is told of a time after it",
        instead(accelerator._Event, "__init__", given(accelerator._Event.__init__, _records_again)),
        found_by="tests/unit/test_accelerator.py::test_events_are_used_again_when_nobody_waits_for_them",
        is_late=True,
    ),
    CudaMistake(
        "sums-are-fused",
        "kernels of the norm are compiled with fused multiply-add",
        "a norm of other bits than the CPU's: clipping depends on placement",
        instead(gpu, "GATHER_OPTIONS", {"num_warps": 8}),
        found_by="tests/kernels/test_gpu_code.py::test_sums_of_squares_are_not_fused",
    ),
    CudaMistake(
        "pieces-begin-anywhere",
        "a table's second part begins at any word, where kernels are compiled for multiples of 16 bytes",
        "a misaligned address, with an odd number of words alone",
        instead(gpu, "_programs_at", lambda words: words),
        found_by="tests/unit/test_accelerator.py::test_what_is_launched_has_been_compiled",
    ),
    CudaMistake(
        "unpinned-when-gone",
        "an arena is unmapped before it is unpinned",
        "an error that nobody sees, and a registration of addresses that belong to somebody else next",
        instead(GpuLanes, "free_arena", _unpins_what_is_gone),
        found_by="tests/unit/test_accelerator.py::test_memory_is_unpinned_while_it_is_there",
        is_late=True,
    ),
    CudaMistake(
        "captures-are-broken",
        "threads do not leave captures by other threads alone",
        "a CUDA graph that the user captures fails, now and then",
        in_cuda_row(relax_captures=lambda: None),
        found_by="tests/unit/test_cuda_row.py::test_threads_leave_captures_of_others_alone[strict]",
    ),
    CudaMistake(
        "last-in-the-queue",
        "streams of updates have the least priority in the place of the greatest",
        "updates wait for forward's kernels, and everything waits for updates",
        in_cuda_row(stream=lambda device, first: backends.cuda.Stream(device, priority=int(first))),
        found_by="tests/unit/test_cuda_row.py::test_what_goes_first_has_the_greater_priority[strict]",
    ),
    CudaMistake(
        "borrowed-and-still-leaving",
        "memory that was borrowed is given back without a word for the lane on which state leaves it",
        "forward writes to it before state has left",
        in_device("return_borrowed", _records_some_streams),
        found_by="tests/unit/test_accelerator.py::test_what_was_borrowed_is_not_used_again_before_any_lane_has_come_so_far",
        is_late=True,
    ),
)
