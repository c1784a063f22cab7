"""What `AcceleratorDevice` asks of torch, with a torch.cuda that keeps a list: threads, devices, streams, errors."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from offload import backends
from offload.dtypes import DtypeCode
from offload.engine import accelerator as module
from offload.errors import ConfigError, OffloadError
from offload.kernels import gpu as kernels
from offload.protocols import DeviceLane, SegmentFlag, StateFormat
from offload.rules import ADAMW, segment_dtype

INDEX = 1


class Stream:
    """A stream, with what was put on it."""

    def __init__(self, cuda: FakeCuda, device: Any = None, priority: int = 0) -> None:
        self.cuda = cuda
        self.device = torch.device("cuda", cuda.index if device is None else torch.device(device).index)
        self.priority = priority
        self.work: list[Any] = []

    def wait_event(self, event: Event) -> None:
        self.cuda.touch("wait_event")
        self.work.append(("wait", event))

    def wait_stream(self, stream: Stream) -> None:
        self.work.append(("wait", stream))

    def synchronize(self) -> None:
        self.cuda.touch("synchronize")


class Event:
    """An event, which is reached at once."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool = False, blocking: bool = False) -> None:
        self.cuda, self.timed, self.blocking = cuda, enable_timing, blocking
        self.recorded = 0
        cuda.events.append(self)

    def record(self, stream: Stream) -> None:
        self.cuda.touch("record")
        self.recorded += 1
        stream.work.append(("record", self))

    def query(self) -> bool:
        self.cuda.touch("query")
        return True

    def synchronize(self) -> None:
        self.cuda.touch("synchronize")

    def elapsed_time(self, other: Event) -> float:
        if not (self.timed and other.timed):
            raise RuntimeError("both events must be made with timing")
        return 1.0


class FakeCuda:
    """What is used of `torch.cuda` and `torch.accelerator`; two devices, and each thread begins with the first."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.contexts: set[int] = set()
        """Devices that were asked for something, or set, by a thread."""
        self.events: list[Event] = []
        self.defaults = [Stream(self, torch.device("cuda", index)) for index in range(2)]
        self.capturing = False
        self.registered: list[tuple[int, int]] = []

    @property
    def index(self) -> int:
        return getattr(self.local, "index", 0)

    def touch(self, what: str) -> None:
        self.contexts.add(self.index)

    def set_device(self, device: Any) -> None:
        self.local.index = torch.device(device).index
        self.touch("set_device")

    set_device_index = set_device

    def device_index(self, index: int) -> Any:
        class Exchange:
            def __enter__(self) -> None:
                self.before, cuda.local.index = cuda.index, index

            def __exit__(self, *raised: Any) -> None:
                cuda.local.index = self.before  # torch does not make a context for that

        cuda = self
        return Exchange()

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        return Stream(self, device, priority)

    def Event(self, **options: Any) -> Event:
        return Event(self, **options)

    def current_stream(self, device: Any = None) -> Any:
        index = self.index if device is None else torch.device(device).index
        return getattr(self.local, f"stream{index}", self.defaults[index])

    def set_stream(self, stream: Any) -> None:
        self.set_device(stream.device)
        setattr(self.local, f"stream{stream.device.index}", stream)

    def get_memory_info(self, device: Any) -> tuple[int, int]:
        return 1 << 30, 1 << 31

    def current_accelerator(self, check_available: bool) -> torch.device:
        return torch.device("cuda")

    def device_count(self) -> int:
        return len(self.defaults)

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(name="card")  # without what an older torch has not

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def cudart(self) -> Any:
        return SimpleNamespace(
            cudaHostRegister=self.register,
            cudaHostUnregister=lambda address: self.touch("unregister"),
            cudaGetErrorString=lambda error: "out of memory",
        )

    def register(self, address: int, nbytes: int, flags: int) -> int:
        self.touch("register")
        self.registered.append((address, nbytes))
        return 2 if nbytes > 1 << 20 else 0


class Kernel:
    """What `GpuUpdateKernel` asks of a stream."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.device = cuda, torch.device("cuda", INDEX)

    def update(self, table: Any) -> None:
        self.launch("update")

    def gather(self, *arguments: Any, accumulate: bool = False) -> None:
        self.launch("gather")

    def gather_rows(self, dtype: Any, rows: Any) -> None:
        self.launch("gather_rows")

    def copy_pieces(self, pieces: Any) -> None:
        self.launch("copy_pieces")

    def launch(self, name: str) -> None:
        self.cuda.touch(name)
        self.cuda.current_stream().work.append(name)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    def tensor_at(address: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type == "cuda":
            fake.touch("tensor_at")
            fake.current_stream().work.append("copy")
        return torch.frombuffer((ctypes.c_char * numel).from_address(address), dtype=dtype)

    def made(*shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        fake.touch("empty")
        return torch.zeros(*shape, dtype=dtype, device="cpu")

    monkeypatch.setattr(backends, "cuda", fake)
    monkeypatch.setattr(module, "device_kernel", lambda device: Kernel(fake))
    monkeypatch.setattr(module, "tensor_at", tensor_at)
    stand_ins = {"accelerator": fake, "empty": made, "zeros": made}
    for user in (module, backends):
        monkeypatch.setattr(user, "torch", SimpleNamespace(**{**vars(torch), **stand_ins}))
    return fake


@pytest.fixture
def device(cuda: FakeCuda) -> Iterator[module.AcceleratorDevice]:
    made = module.AcceleratorDevice(torch.device("cuda", INDEX))
    yield made
    made.close()


class Posts:
    """A queue that waits for as many posts."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.some = threading.Semaphore(0)

    def post(self, op: int, **rest: Any) -> None:
        self.seen.append(op)
        self.some.release()


def use_all(device: module.AcceleratorDevice) -> None:
    values = np.zeros(64, np.uint8)
    address = device.allocate(64)
    device.copy(DeviceLane.H2D, address, values.ctypes.data, 64)
    device.copy(DeviceLane.D2H, values.ctypes.data, address, 64)
    device.update(np.zeros(1, segment_dtype(ADAMW)))
    device.gradient_blocks(DeviceLane.GRADIENTS, address, DtypeCode.FLOAT32, 4, address)
    device.copy_pieces(DeviceLane.PIECES, np.array([[address, address + 32, 32]], np.uint64))
    rows = np.array([[address, 4, address + 32]], np.uint64)
    device.sum_gradients(DeviceLane.GRADIENTS, DtypeCode.FLOAT32, rows)
    assert device.mark_caller(device.caller()).reached()
    for lane in DeviceLane:
        mark = device.mark(lane)
        assert mark.reached()
        mark.wait()
        device.follow(lane, mark)
    device.pin(values.ctypes.data, 64)
    device.unpin(values.ctypes.data)
    assert device.free_bytes() == 1 << 30
    device.release(address)


def test_nothing_is_asked_of_another_device(cuda: FakeCuda, device: module.AcceleratorDevice) -> None:
    """Neither by the caller's thread, which may work for another, nor by threads of the session."""
    use_all(device)
    assert cuda.index == 0
    thread = threading.Thread(target=lambda: (device.adopt_thread(), use_all(device)))
    thread.start()
    thread.join()
    posts = Posts()
    device.report(device.mark(DeviceLane.D2H), posts, 7)
    assert posts.some.acquire(timeout=60.0)
    device.close()
    assert cuda.contexts == {INDEX}


def test_the_caller_s_lane_is_refused_while_it_is_captured(cuda: FakeCuda, device: module.AcceleratorDevice) -> None:
    mark = device.mark(DeviceLane.UPDATE)
    cuda.capturing = True
    for refused in (
        device.caller,
        lambda: device.mark(DeviceLane.CALLER),
        lambda: device.follow(DeviceLane.CALLER, mark),
    ):
        with pytest.raises(ConfigError, match="CUDA graph"):
            refused()
    device.follow(DeviceLane.D2H, mark)


def test_threads_of_the_session_leave_captures_alone(
    cuda: FakeCuda, device: module.AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []

    class Runtime:
        def __getitem__(self, name: str) -> Any:
            assert name == "cudaThreadExchangeStreamCaptureMode"
            return lambda mode: modes.append(mode._obj.value)

    opened: list[str] = []
    monkeypatch.setattr(backends.torch, "version", SimpleNamespace(cuda="13.0", hip=None))
    monkeypatch.setattr(backends.ctypes, "CDLL", lambda name: (opened.append(name), Runtime())[1])
    before = cuda.index
    device.adopt_thread()
    cuda.local.index = before
    assert opened == ["libcudart.so.13"]
    assert modes == [2]  # cudaStreamCaptureModeRelaxed


def test_events_are_used_again_when_nobody_waits_for_them(cuda: FakeCuda, device: module.AcceleratorDevice) -> None:
    before = len(cuda.events)
    for _ in range(10):
        for lane in DeviceLane:
            device.follow(DeviceLane.UPDATE, device.mark(lane, timed=False))
    assert not [event for event in cuda.events[before:] if event.timed]
    assert len(cuda.events) == before + 1
    held = [device.mark(DeviceLane.H2D) for _ in range(3)]
    assert len({mark.event for mark in held}) == 3
    assert held[0].time_s() <= held[0].base[1] + 1e-3


def test_a_lane_that_is_busy_does_not_hold_up_the_reports_of_another(
    cuda: FakeCuda, device: module.AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    posts, busy, left = Posts(), device.mark(DeviceLane.H2D), threading.Event()
    monkeypatch.setattr(module._Event, "wait", lambda mark: mark is not busy or left.wait(60.0))
    device.report(busy, posts, 7)
    device.report(device.mark(DeviceLane.D2H), posts, 8)
    try:
        assert posts.some.acquire(timeout=60.0)
        assert posts.seen == [8]
    finally:
        left.set()
    assert posts.some.acquire(timeout=60.0)
    assert posts.seen == [8, 7]
    device.close()


def test_the_time_is_compared_on_the_thread_that_reports(
    cuda: FakeCuda, device: module.AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes a mark may be running backward."""
    compared: list[threading.Thread] = []
    plain = device._now
    monkeypatch.setattr(device, "_now", lambda: (compared.append(threading.current_thread()), plain())[1])
    monkeypatch.setattr(module, "REBASE_S", 0.0)
    posts = Posts()
    device.report(device.mark(DeviceLane.D2H), posts, 7)
    assert posts.some.acquire(timeout=60.0)
    device.close()
    assert {thread.name for thread in compared} == {"offload-gpu"}


def test_the_clock_is_read_again_if_python_was_late(
    cuda: FakeCuda, device: module.AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    for waits_s, best in (((5e-3, 1e-4, 1.0), 1), ((1.0, 3e-3, 2e-3, 4e-3, 5e-3, 1e-5), 2)):
        ticks = [tick for number, wait_s in enumerate(waits_s) for tick in (10.0 * number, 10.0 * number + wait_s)]
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=iter(ticks).__next__))
        before = len(cuda.events)
        event, now_s = device._now()
        assert event is cuda.events[before + best]
        assert now_s == pytest.approx(10.0 * best + waits_s[best] / 2)


def test_kernels_of_the_session_come_before_those_of_backward(device: module.AcceleratorDevice) -> None:
    priorities = {lane: device.stream(lane).priority for lane in DeviceLane if lane is not DeviceLane.CALLER}
    kernels = {DeviceLane.UPDATE, DeviceLane.GRADIENTS, DeviceLane.PIECES}
    assert {lane for lane, priority in priorities.items() if priority} == kernels
    assert set(priorities.values()) == {-1, 0}


class Uploaded:
    """A tensor on the device."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.users = cuda, []

    def copy_(self, other: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.current_stream().work.append("upload")

    def record_stream(self, stream: Stream) -> None:
        self.users.append(stream)

    def __getitem__(self, which: slice) -> Uploaded:
        return self


def test_a_table_is_sent_before_the_state_that_it_is_for_is_there(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine copies all that goes to the device: a table that comes after the wait takes its turn again."""
    made: list[Uploaded] = []

    def empty(*shape: int, dtype: torch.dtype, device: Any, pin_memory: bool = False) -> Any:
        if device == "cpu":
            return torch.empty(*shape, dtype=dtype, device="cpu")
        made.append(Uploaded(cuda))
        return made[-1]

    monkeypatch.setattr(kernels, "torch", SimpleNamespace(**{**vars(torch), "empty": empty}))
    uploads = kernels.Uploads(torch.device("cuda", 0), backends.BACKENDS["cuda"])
    copied, lane, words = cuda.Event(), cuda.Stream(), np.arange(1000)
    before = len(cuda.events)
    lane.wait_event(copied)
    cuda.set_stream(lane)
    with uploads.lend(words):
        lane.work.append("update")
    (event,) = cuda.events[before:]
    assert uploads._stream.work == ["upload", ("record", event)]
    assert lane.work == [("wait", copied), ("wait", event), "update", ("record", event)]
    with uploads.lend(words):  # in the same memory, as its work has been done
        monkeypatch.setattr(Event, "query", lambda event: False)
        with uploads.lend(words):  # in other memory
            assert len(made) == 2
    with uploads.lend(words):  # none has been done
        assert len(made) == 3
    assert len(cuda.events) == before + 3


def test_a_tensor_that_is_given_up_is_the_current_stream_s_too(
    cuda: FakeCuda, device: module.AcceleratorDevice
) -> None:
    tensor = Uploaded(cuda)
    cuda.set_stream(Stream(cuda, torch.device("cuda", INDEX)))
    device.give_up(tensor)  # type: ignore[arg-type]
    assert tensor.users == [cuda.current_stream(device.device)]


def test_a_tenth_of_the_card_is_left_but_no_less_than_is_useful(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for total, reserve in ((8 << 30, 2 << 30), (80 << 30, 8 << 30)):
        monkeypatch.setattr(cuda, "get_memory_info", lambda device, total=total: (1 << 30, total))
        device = module.AcceleratorDevice(torch.device("cuda", INDEX))
        assert device.reserve_bytes == reserve
        device.close()


def test_tables_of_several_threads_are_in_no_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event has been reached, so that all memory that nobody has is used again."""
    made: list[int] = []

    def empty(size: int, dtype: torch.dtype, device: Any, pin_memory: bool = False) -> torch.Tensor:
        made.append(size)
        return torch.zeros(size, dtype=dtype, device="cpu")

    stream = Stream(FakeCuda())
    monkeypatch.setattr(stream, "wait_event", lambda event: None)
    event = SimpleNamespace(record=lambda stream: None, query=lambda: True)
    backend = backends.Backend(
        pin=lambda address, nbytes: None,
        unpin=lambda address: None,
        stream=lambda device, first: None,
        current_stream=lambda device: stream,
        event=lambda device, timed: event,
    )
    monkeypatch.setattr(kernels, "working_on", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(kernels, "torch", SimpleNamespace(**{**vars(torch), "empty": empty}))
    uploads, wrong = kernels.Uploads(torch.device("cpu"), backend), []

    def use(number: int) -> None:
        for turn in range(300):
            words = np.arange(600) + 1000 * number + turn
            with uploads.lend(words) as there:
                for _ in range(3):
                    time.sleep(0)  # others' turn
                    if not np.array_equal(there.numpy(), words):
                        wrong.append((number, turn))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert set(made) == {1024}
    assert len(made) <= 2 * len(threads)


class Recorder:
    """A kernel of Triton's that notes what it is compiled for."""

    def __init__(self) -> None:
        self.warm: list[dict[str, Any]] = []
        self.launched: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        noted = self.launched if grid[0] else self.warm
        return lambda *arguments, **constants: noted.append(
            {"arguments": [_kind(argument) for argument in arguments], **constants}
        )


def _kind(argument: Any) -> Any:
    """Return what Triton compiles for: a pointer's element type and alignment, or the size of an integer."""
    if isinstance(argument, int):
        return "i64" if argument >= 1 << 31 else "i32"
    return argument.dtype, argument.data_ptr() % 16 == 0


@pytest.mark.parametrize("formats", [(StateFormat.EXACT,), tuple(StateFormat)])
@pytest.mark.parametrize("weight", [DtypeCode.BFLOAT16, DtypeCode.FLOAT16, DtypeCode.FLOAT32])
def test_what_is_launched_has_been_compiled(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, weight: DtypeCode, formats: tuple[StateFormat, ...]
) -> None:
    kernel = kernels.GpuUpdateKernel.__new__(kernels.GpuUpdateKernel)
    kernel.device = torch.device("cpu")
    kernel._kernels = SimpleNamespace(update=Recorder(), gather=Recorder())
    kernel._kernels.copy_pieces, kernel._kernels.gather_rows = Recorder(), Recorder()
    at = 1 << 45
    for gradient in {weight, DtypeCode.FLOAT32}:
        kernel.compile(ADAMW, {(gradient, weight, state_format) for state_format in formats})
        table = np.zeros(len(formats), segment_dtype(ADAMW))
        table["state_format"] = [int(state_format) for state_format in formats]
        for name in ("master", "master_low", "exp_avg", "exp_avg_sq", "scales", "gradient"):
            table[name] = at
        table["weight"] = at if weight is not DtypeCode.FLOAT32 else 0
        table["weight_dtype"] = int(weight) if weight is not DtypeCode.FLOAT32 else 0
        table["gradient_dtype"], table["numel"], table["flags"] = int(gradient), 5000, int(SegmentFlag.ACTIVE)
        kernel.update(table)
        kernel.gather(at, gradient, 5000, at)
        kernel.gather_rows(gradient, np.array([[at, 5000, at + 8]], np.uint64))
        kernel.gather(at, gradient, 5000, at + 8, at + (1 << 20), gradient, accumulate=True)
        for rows in range(1, 4):  # what follows them is at multiples of 16 bytes
            kernel.update(np.repeat(table[:1], rows))
    kernel.copy_pieces(np.array([[at, at + (1 << 20), 5000]], np.uint64))
    for recorder in vars(kernel._kernels).values():
        assert recorder.launched
        assert all(launched in recorder.warm for launched in recorder.launched)


def test_a_gpu_that_triton_cannot_drive_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drivers:
        @property
        def active(self) -> Any:
            raise RuntimeError("Failed to find C compiler")

    triton = SimpleNamespace(JITFunction=object, runtime=SimpleNamespace(driver=Drivers()))
    module_ = SimpleNamespace(triton=triton, update=object())
    monkeypatch.setattr(kernels, "import_module", lambda name: module_)
    monkeypatch.setattr(kernels, "accelerator", lambda device: (torch.device(device), backends.BACKENDS["cuda"]))
    with pytest.raises(ConfigError, match="Failed to find C compiler"):
        kernels.GpuUpdateKernel("cuda:0")


def test_what_cannot_be_pinned_is_told_with_cuda_s_reason(cuda: FakeCuda, device: module.AcceleratorDevice) -> None:
    with pytest.raises(OffloadError, match=r"2097152 bytes .* cannot be pinned: out of memory \(CUDA error 2\)"):
        device.pin(1 << 30, 2 << 20)
