"""The row "cuda" of `BACKENDS`, over a stand-in that insists on what CUDA insists on; and over CUDA where it is."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from strict_cuda import StrictCuda, opened

from offload import backends

DEVICE = torch.device("cuda", 0)
GLOBAL, RELAXED = 0, 2
"""`cudaStreamCaptureMode`, driver_types.h."""
ON = [
    pytest.param("strict", id="strict"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=ON)
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """torch.cuda, or what stands for it."""
    if request.param == "cuda":
        yield torch.cuda
        return
    strict = StrictCuda()
    monkeypatch.setattr(backends, "cuda", strict)
    with strict.operators():
        yield strict


def row() -> backends.Backend:
    return backends.BACKENDS["cuda"]


def test_streams_and_events_are_of_the_classes_that_take_each_other(cuda: Any) -> None:
    for stream in (row().stream(DEVICE, False), row().stream(DEVICE, True), row().current_stream(DEVICE)):
        assert type(stream) is cuda.Stream
        for timed in (False, True):
            row().event(DEVICE, timed).record(stream)


def test_what_goes_first_has_the_greater_priority(cuda: Any) -> None:
    assert row().stream(DEVICE, True).priority < row().stream(DEVICE, False).priority


def test_who_waits_for_an_event_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "cuda", StrictCuda())
    for timed in (False, True):
        event = row().event(DEVICE, timed)
        assert event.sleeps
        assert event.timed is timed


def test_a_refused_registration_leaves_no_error_behind(cuda: Any) -> None:
    """The next kernel that this thread launches would be blamed, if only a launch cleared it."""
    memory = mmap.mmap(-1, 1 << 20)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    row().pin(address, 1 << 20)
    try:
        with pytest.raises(RuntimeError, match=r"\(CUDA error 712\)"):
            row().pin(address, 1 << 20)
        torch.empty(1, device="cuda").add_(1)
    finally:
        row().unpin(address)


def test_what_is_registered_is_so_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = StrictCuda(most_bytes=1 << 20)
    monkeypatch.setattr(backends, "cuda", strict)
    with strict.operators():
        row().pin(1 << 30, 1 << 20)
        assert strict.registered == {1 << 30: (1 << 20, 1)}  # cudaHostRegisterPortable
        with pytest.raises(RuntimeError, match=r"^out of memory \(CUDA error 2\)$"):
            row().pin(2 << 30, 1)
        row().unpin(1 << 30)
    assert not strict.registered
    assert not strict.last_error


def test_threads_leave_captures_of_others_alone(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thread takes in the place of its mode is what it had."""
    if isinstance(cuda, StrictCuda):
        versions = SimpleNamespace(version=SimpleNamespace(cuda="13.0", hip=None))
        monkeypatch.setattr(backends, "torch", versions)
        monkeypatch.setattr(backends.ctypes, "CDLL", opened(cuda))
    opened_here: list[Any] = []
    library = backends.ctypes.CDLL

    def noted(name: str) -> Any:
        opened_here.append(library(name))
        return opened_here[-1]

    monkeypatch.setattr(backends.ctypes, "CDLL", noted)
    mode = ctypes.c_int(GLOBAL)

    def relax() -> None:
        row().relax_captures()
        name = "hip" if torch.version.hip else "cuda"
        opened_here[0][f"{name}ThreadExchangeStreamCaptureMode"](ctypes.byref(mode))

    thread = threading.Thread(target=relax)  # the mode is a thread's own
    thread.start()
    thread.join()
    assert mode.value == RELAXED
