"""Mistakes that no training on the test accelerator can show: of CUDA's own row, of kernels, of speed.

Each is planted in a process of its own, in which the test that is to find it runs.
`python -m accelerator.cuda_mistakes NAME ...` says of each how pytest has ended: a line of JSON, name and code. All
of one call are found on the test accelerator, or all elsewhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from accelerator import late, processes
from accelerator.mistakes import Plant, around, in_device, instead, replaced
from offload import backends
from offload.device import accelerator
from offload.device.lanes import GpuLanes
from offload.kernels import gpu

VARIABLE = "OFFLOAD_PLANTED"
"""Names the mistake to processes that a test starts."""

ROOT = Path(__file__).parents[2]


class CudaMistake(NamedTuple):
    """One that no training shows; the test that finds it, and whether that runs on the test accelerator."""

    plant: Plant
    found_by: str
    is_late: bool


CUDA_MISTAKES: dict[str, CudaMistake] = {}


def found_by(test: str, *, is_late: bool = False) -> Callable[[Plant], Plant]:
    """Have a mistake be one that a test finds."""

    def told(plant: Plant) -> Plant:
        CUDA_MISTAKES[plant.__name__] = CudaMistake(plant, f"tests/{test}", is_late)
        return plant

    return told


def in_cuda_row(name: str) -> Callable[[Callable[..., Any]], Plant]:
    """Plant another entry in the row of CUDA."""

    def planted(wrong: Callable[..., Any]) -> Plant:
        @wraps(wrong)
        @contextlib.contextmanager
        def plant() -> Iterator[None]:
            right = backends.BACKENDS["cuda"]
            backends.BACKENDS["cuda"] = replace(right, **{name: wrong})
            try:
                yield
            finally:
                backends.BACKENDS["cuda"] = right

        return plant

    return planted


@contextlib.contextmanager
def other_source(module: str, right: str, wrong: str) -> Iterator[None]:
    """Have a module be imported anew from other source; where `right` is not there once, it raises."""
    spec = importlib.util.find_spec(module)
    text = Path(spec.origin).read_text()
    assert text.count(right) == 1, f"{right!r} is {text.count(right)} times in {module}"
    before = sys.modules.pop(module, None)
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder, Path(spec.origin).name)  # from which Triton reads a kernel's source
        changed.write_text(text.replace(right, wrong))
        other = importlib.util.spec_from_file_location(module, changed)
        made = sys.modules[module] = importlib.util.module_from_spec(other)
        try:
            other.loader.exec_module(made)
            yield
        finally:
            del sys.modules[module]
            if before is not None:
                sys.modules[module] = before


_take_reusable = gpu.Uploads._take_reusable


@found_by("unit/test_accelerator.py::test_no_table_is_filled_anew_while_it_waits_to_be_read", is_late=True)
@instead(gpu.Uploads, "_take_reusable")
def table_filled_while_read(self: Any, used: Any) -> Any:
    """A pinned table is filled anew while it is read, once a stream has three: rows of another update."""
    return used.popleft() if len(used) >= 3 else _take_reusable(self, used)


@found_by("accelerator/test_training.py::test_nothing_but_reports_waits_for_lanes[True]", is_late=True)
@in_device("follow")
def lanes_wait_on_the_host(right: Any, self: Any, lane: Any, mark: Any) -> None:
    """A lane follows a mark by waiting for it on the host: nothing overlaps, and steps take twice as long."""
    mark.wait()


@found_by("unit/test_cuda_row.py::test_who_waits_for_an_event_sleeps")
@in_cuda_row("event")
def events_spin(device: Any, timed: bool) -> Any:
    """Who waits for an event does not sleep: each reporter spins on a core, which the CPU's update loses."""
    return backends.cuda.Event(enable_timing=timed)


@found_by("unit/test_cuda_row.py::test_streams_and_events_are_of_the_classes_that_take_each_other[strict]")
@in_cuda_row("current_stream")
def a_stream_of_the_common_class(device: Any) -> Any:
    """The current stream is one of torch's common class: "invalid device ordinal" at the first mark (torch 2.11)."""
    return torch.Stream(stream_id=0, device_index=0, device_type=1)


@found_by("unit/test_cuda_row.py::test_a_refused_registration_leaves_no_error_behind[strict]")
@in_cuda_row("pin")
def an_error_is_left(address: int, nbytes: int) -> None:
    """The error of a refused registration is not cleared: the next kernel of forward is blamed for it."""
    runtime = backends.cuda.cudart()
    refused = runtime.cudaHostRegister(address, nbytes, 1)
    if int(refused):
        raise RuntimeError(f"{runtime.cudaGetErrorString(refused)} (CUDA error {int(refused)})")


@found_by("unit/test_cuda_row.py::test_what_is_registered_is_so_for_all_devices")
def registered_for_one_device() -> AbstractContextManager[None]:
    """Host memory is registered for the current device alone: copies of others of the process wait on the host."""
    return replaced(backends, "_PORTABLE", 0)


@found_by("kernels/test_gpu_beyond.py::test_what_lies_behind_a_tensor_may_be_out_of_reach")
def reads_beyond() -> AbstractContextManager[None]:
    """The kernel that gathers a gradient reads beyond its end, and takes zero for what it has read there: an illegal
    address, at the end of one of the allocator's segments alone.
    """
    return other_source(
        "offload.kernels.triton_kernels",
        "    found = read(pointers(source, start, NORM_BLOCK, SOURCE, ALIGNED), inside, FULL)\n    values",
        "    found = tl.load(pointers(source, start, NORM_BLOCK, SOURCE, ALIGNED))\n"
        "    found = tl.where(inside, found, found * 0)\n    values",
    )


@found_by("unit/test_accelerator.py::test_events_are_used_again_when_nobody_waits_for_them", is_late=True)
@around(accelerator._Event, "__init__")
def event_recorded_again(right: Any, self: Any, *arguments: Any, **options: Any) -> None:
    """An event is recorded anew while a mark stands for its last record: who waits for it waits for other work."""
    right(self, *arguments, **options)
    self.unused.appendleft(self.event)


@found_by("kernels/test_gpu_code.py::test_sums_of_squares_are_not_fused")
def sums_are_fused() -> AbstractContextManager[None]:
    """Kernels of the norm are compiled with fused multiply-add: a norm of other bits than the CPU's."""
    return replaced(gpu, "GATHER_OPTIONS", {"num_warps": 8})


@found_by("unit/test_accelerator.py::test_what_is_launched_has_been_compiled")
@instead(gpu, "_programs_at")
def pieces_begin_anywhere(words: int) -> int:
    """A table's second part begins at any word, where kernels are compiled for 16 bytes: a misaligned address."""
    return words


@found_by("unit/test_accelerator.py::test_memory_is_unpinned_while_it_is_there", is_late=True)
@instead(GpuLanes, "free_arena")
def unpinned_when_gone(self: Any, arena: Any) -> None:
    """An arena is unmapped before it is unpinned: a registration of addresses that are somebody else's next."""
    arena.close()
    self.pinned.unpin(arena)


@found_by("unit/test_cuda_row.py::test_threads_leave_captures_of_others_alone[strict]")
@in_cuda_row("relax_captures")
def captures_are_broken() -> None:
    """Threads do not leave captures by other threads alone: a CUDA graph of the user's fails, now and then."""


@found_by("unit/test_cuda_row.py::test_what_goes_first_has_the_greater_priority[strict]")
@in_cuda_row("stream")
def last_in_the_queue(device: Any, first: bool) -> Any:
    """Updates' streams have the least priority in the place of the greatest: all wait for forward's kernels."""
    return backends.cuda.Stream(device, priority=int(first))


@found_by(
    "unit/test_accelerator.py::test_what_was_borrowed_is_not_used_again_before_any_lane_has_come_so_far", is_late=True
)
@in_device("return_borrowed")
def borrowed_and_still_leaving(right: Any, self: Any) -> None:
    """Borrowed memory is given back while state leaves it on lane D2H: forward writes to it before."""
    streams = {lane: stream for lane, stream in self._streams.items() if lane is not accelerator.DeviceLane.D2H}
    with replaced(self, "_streams", streams):
        right(self)


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Plant the mistake that `VARIABLE` names, if it does."""
    name = os.environ.get(VARIABLE)
    with CUDA_MISTAKES[name].plant() if name else contextlib.nullcontext():
        yield


def main(names: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.chdir(ROOT)
    if CUDA_MISTAKES[names[0]].is_late:
        late.load()
        backends.BACKENDS["late"] = backends.Backend(pin=late.pin, unpin=late.unpin)
        os.environ[processes.HERE] = ""  # so that tests run here
    for name in names:
        os.environ[VARIABLE] = name
        with CUDA_MISTAKES[name].plant():
            plugins = [f"-p{plugin}" for plugin in processes.PLUGINS]
            code = pytest.main(["-q", "-x", *plugins, CUDA_MISTAKES[name].found_by])
        answers.write(json.dumps([name, int(code)]) + "\n")
        answers.flush()
    os._exit(0)  # threads of streams do not end


if __name__ == "__main__":
    main(sys.argv[1:])
