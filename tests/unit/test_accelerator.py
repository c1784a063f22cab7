"""What `AcceleratorDevice` asks of torch: threads, devices, streams, errors. On the test accelerator.

What is CUDA's alone is told by replies that stand for the driver's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerator import late
from accelerator.workloads import sent

import offload
from offload import backends
from offload._native import CompletionQueue
from offload.device import accelerator as module
from offload.device.lanes import GpuLanes
from offload.dtypes import DtypeCode
from offload.errors import ConfigError, OffloadError
from offload.formats import EXACT, FORMATS, StateFormat
from offload.kernels import gpu as kernels
from offload.protocols import LANES, DeviceLane, SegmentFlag
from offload.rules import ADAMW, segment_dtype

ON_LATE = pytest.mark.late(shared=True)
INDEX = 1


def here() -> torch.device:
    return torch.device("late", INDEX)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """All events that are made from now on, and whether they are timed."""
    made: list[tuple[Any, bool]] = []
    backend = backends.BACKENDS["late"]

    def event(device: torch.device, timed: bool) -> Any:
        made.append((backend.event(device, timed), timed))
        return made[-1][0]

    monkeypatch.setitem(backends.BACKENDS, "late", replace(backend, event=event))
    return made


@pytest.fixture
def device(events: Any) -> Iterator[module.AcceleratorDevice]:
    made = module.AcceleratorDevice(here())
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
    device.update(device.send_table(np.zeros(1, segment_dtype(ADAMW))))
    device.gradient_blocks(DeviceLane.GRADIENTS, address, DtypeCode.FLOAT32, 4, address)
    device.copy_pieces(DeviceLane.PIECES, np.array([[address, address + 32, 32]], np.uint64))
    rows = np.array([[address, 4, address + 32]], np.uint64)
    device.sum_gradients(DeviceLane.GRADIENTS, DtypeCode.FLOAT32, rows)
    device.mark_caller(device.caller()).wait()
    for lane in DeviceLane:
        mark = device.mark(lane)
        mark.wait()
        assert mark.reached()
        device.follow(lane, mark)
    device.pin(values.ctypes.data, 64)
    device.unpin(values.ctypes.data)
    assert 0 < device.free_bytes() < device.memory_bytes
    device.release(address)


def put() -> list[int]:
    """Return how much has been put on each stream of the first device."""
    return [count for index, _, count, _ in late.streams() if index == 0]


@ON_LATE
def test_nothing_is_asked_of_another_device(device: module.AcceleratorDevice) -> None:
    """Neither by the caller's thread, which may work for another, nor by threads of the session."""
    before = put()
    use_all(device)
    assert torch.accelerator.current_device_index() == 0
    indices: list[int] = []

    def adopted() -> None:
        device.prepare_thread()
        use_all(device)
        indices.append(torch.accelerator.current_device_index())

    thread = threading.Thread(target=adopted)
    thread.start()
    thread.join()
    assert indices == [INDEX]
    posts = Posts()
    device.report(device.mark(DeviceLane.D2H), posts, 7)
    assert posts.some.acquire(timeout=60.0)
    device.close()
    assert put() == before


@ON_LATE
def test_the_caller_s_lane_is_refused_while_it_is_captured(device: module.AcceleratorDevice) -> None:
    mark = device.mark(DeviceLane.UPDATE)
    device.backend = replace(device.backend, captures=lambda: True)
    for refused in (
        device.caller,
        lambda: device.mark(DeviceLane.CALLER),
        lambda: device.follow(DeviceLane.CALLER, mark),
    ):
        with pytest.raises(ConfigError, match="CUDA graph"):
            refused()
    device.follow(DeviceLane.D2H, mark)


@ON_LATE
def test_threads_of_the_session_relax_captures(device: module.AcceleratorDevice) -> None:
    relaxed: list[int] = []
    device.backend = replace(device.backend, relax_captures=lambda: relaxed.append(threading.get_ident()))
    thread = threading.Thread(target=device.prepare_thread)
    thread.start()
    thread.join()
    assert relaxed == [thread.ident]


@ON_LATE
def test_events_are_used_again_when_nobody_waits_for_them(events: Any, device: module.AcceleratorDevice) -> None:
    before = len(events)
    for _ in range(10):
        for lane in DeviceLane:
            device.follow(DeviceLane.UPDATE, device.mark(lane, timed=False))
    assert [timed for _, timed in events[before:]] == [False]
    held = [device.mark(DeviceLane.H2D) for _ in range(3)]
    assert len({mark.event for mark in held}) == 3


@ON_LATE
def test_a_lane_that_is_busy_does_not_hold_up_the_reports_of_another(device: module.AcceleratorDevice) -> None:
    posts = Posts()
    with late.held(device.stream(DeviceLane.H2D)):
        device.report(device.mark(DeviceLane.H2D), posts, 7)
        device.report(device.mark(DeviceLane.D2H), posts, 8)
        assert posts.some.acquire(timeout=60.0)
        assert posts.seen == [8]
    assert posts.some.acquire(timeout=60.0)
    assert posts.seen == [8, 7]


@ON_LATE
def test_the_time_is_compared_on_the_thread_that_reports(
    device: module.AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes a mark may be running backward."""
    compared: list[threading.Thread] = []
    plain = device._read_clocks
    monkeypatch.setattr(
        device, "_read_clocks", lambda idle: (compared.append(threading.current_thread()), plain(idle))[1]
    )
    monkeypatch.setattr(module, "REBASE_S", 0.0)
    posts = Posts()
    device.report(device.mark(DeviceLane.D2H), posts, 7)
    assert posts.some.acquire(timeout=60.0)
    device.close()
    assert {thread.name for thread in compared} == {"offload-gpu"}


@ON_LATE
def test_the_clock_is_read_again_if_python_was_late(
    events: Any, device: module.AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it was the device that was late: then the event is at the end of the wait."""
    for waits_s, best, part in (
        ((5e-3, 1e-4, 1.0), 1, 0.5),
        ((4e-2, 3e-3, 2e-3, 4e-3, 5e-3, 1e-5), 2, 0.5),
        ((1.0, 1e-5), 0, 1.0),
    ):
        ticks = [tick for number, wait_s in enumerate(waits_s) for tick in (10.0 * number, 10.0 * number + wait_s)]
        before = len(events)
        with monkeypatch.context() as patch:
            patch.setattr(module, "time", SimpleNamespace(monotonic=iter(ticks).__next__))
            event, now_s = device._read_clocks(device.stream(DeviceLane.H2D))
        assert event is events[before + best][0]
        assert now_s == pytest.approx(10.0 * best + waits_s[best] * part)


@ON_LATE
def test_kernels_of_the_session_come_before_those_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, first = backends.BACKENDS["late"], {}

    def stream(device: torch.device, goes_first: bool) -> Any:
        made = backend.stream(device, goes_first)
        first[made] = goes_first
        return made

    monkeypatch.setitem(backends.BACKENDS, "late", replace(backend, stream=stream))
    device = module.AcceleratorDevice(here())
    kernels = {DeviceLane.UPDATE, DeviceLane.GRADIENTS, DeviceLane.PIECES}
    assert {lane for lane in LANES if first[device.stream(lane)]} == kernels
    device.close()


@ON_LATE
def test_a_table_is_sent_before_the_state_that_it_is_for_is_there(events: Any) -> None:
    """It waits for nothing that the work waits for which it is for."""
    with torch.accelerator.device_index(INDEX):
        copies, lane, words = torch.Stream(here()), torch.Stream(here()), np.arange(1000)
        uploads = kernels.Uploads(here(), backends.BACKENDS["late"], copies)
        found = torch.zeros(1000, dtype=torch.int64, device=here())
        torch.accelerator.synchronize()
        before = len(events)
        with late.held(lane), backends.working_on(lane):
            with uploads.in_use(sent(uploads, words)) as there:
                found.copy_(there[:1000])
            copies.synchronize()  # the table is there, though its lane waits
            assert not lane.query()
            with uploads.in_use(sent(uploads, words)):  # in other memory, as its work has not been done
                assert len(events) == before + 2
        lane.synchronize()
        assert found.tolist() == words.tolist()
        with backends.working_on(lane), uploads.in_use(sent(uploads, words)):  # in the same memory
            assert len(events) == before + 2


@ON_LATE
def test_a_session_has_five_streams() -> None:
    """The user's, NCCL's and FSDP's are beside them in as few queues as hardware has."""
    backend, made = backends.BACKENDS["late"], []

    def stream(*how: Any) -> Any:
        made.append(backend.stream(*how))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends.BACKENDS, "late", replace(backend, stream=stream))
        used = {(index, number): count for index, number, count, _ in late.streams()}
        weights = [torch.nn.Parameter(torch.ones(3000, dtype=torch.bfloat16, device=here())) for _ in range(4)]
        settings = offload.OffloadConfig(
            gpu_memory=0, placement=0.5, subgroup_numel=2048, keep_grads=False, threads=1
        )
        with offload.AdamW(weights, offload=settings) as optimizer:
            for _ in range(3):
                torch.autograd.backward(weights, [torch.ones_like(weight) for weight in weights])
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        worked = {
            (index, number) for index, number, count, _ in late.streams() if count > used.get((index, number), 0)
        }
    assert len(made) == 5
    mine = torch.get_device_module("late").default_stream(here())
    assert worked <= {(INDEX, each.stream_id) for each in (*made, mine)} | {(0, mine.stream_id)}


@ON_LATE
def test_the_clock_is_read_on_a_stream_that_is_idle(
    device: module.AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one that works it would be read late; while all do, marks are timed from the time before."""
    monkeypatch.setattr(module, "REBASE_S", -1.0)
    streams = [*dict.fromkeys(device.stream(lane) for lane in LANES)]
    read: list[Any] = []
    monkeypatch.setattr(device, "_read_clocks", lambda idle: (read.append(idle), device.base)[1])
    with contextlib.ExitStack() as held:
        for stream in streams[:-1]:
            held.enter_context(late.held(stream))
            stream.record_event()
        device.rebase()
        assert read == [streams[-1]]
        held.enter_context(late.held(streams[-1]))
        streams[-1].record_event()
        device.rebase()
        assert len(read) == 1


@ON_LATE
def test_a_tensor_that_is_given_up_is_the_current_stream_s_too(device: module.AcceleratorDevice) -> None:
    """Its memory is not used again before that stream has come so far."""
    reader = torch.Stream(here())
    with torch.accelerator.device_index(INDEX):
        tensor = torch.full((1 << 20,), 7.0, device=here())
        copy = torch.zeros(1 << 20, device=here())
        reader.wait_stream(torch.accelerator.current_stream())
        with late.held(reader):
            with backends.working_on(reader):
                copy.copy_(tensor)
                device.record_use(tensor)
            del tensor
            torch.full((1 << 20,), 8.0, device=here())
        reader.synchronize()
        assert bool((copy.cpu() == 7.0).all())


@ON_LATE
@pytest.mark.parametrize("lane", LANES)
def test_what_was_borrowed_is_not_used_again_before_any_lane_has_come_so_far(
    lane: DeviceLane, device: module.AcceleratorDevice
) -> None:
    wanted = torch.full((4096,), 7, dtype=torch.uint8, device="cpu")
    found = torch.zeros(4096, dtype=torch.uint8, device="cpu")
    with torch.accelerator.device_index(INDEX):
        address = device.allocate(4096, device.caller())
        torch.accelerator.synchronize()
        device.copy(DeviceLane.H2D, address, wanted.data_ptr(), 4096)
        torch.accelerator.synchronize()
        device.pin(found.data_ptr(), 4096)
        device.pin(wanted.data_ptr(), 4096)
        with late.held(device.stream(lane)):
            if lane is DeviceLane.H2D:
                device.copy(lane, address, wanted.data_ptr(), 4096)
            else:
                device.copy(lane, found.data_ptr(), address, 4096)
            device.return_borrowed()
            # More than what earlier tests have left free, so that what was borrowed would be among it.
            taken = [torch.full((4096,), 8, dtype=torch.uint8, device=here()) for _ in range(1024)]
            until_s = time.monotonic() + 0.5  # as long as they wait for the lane; if they do not, they end before
            while not torch.accelerator.current_stream().query() and time.monotonic() < until_s:
                time.sleep(0.001)
        torch.accelerator.synchronize()
        device.unpin(found.data_ptr())
        device.unpin(wanted.data_ptr())
    assert lane is DeviceLane.H2D or torch.equal(found, wanted)
    assert all(bool((tensor.cpu() == 8).all()) for tensor in taken)


@ON_LATE
def test_memory_is_unpinned_while_it_is_there(device: module.AcceleratorDevice) -> None:
    """Afterwards its addresses may be somebody else's."""
    before = late.registered()
    with torch.accelerator.device_index(INDEX):
        lanes = GpuLanes(device, CompletionQueue())
        arena = lanes.allocate_arena(1 << 20)
        assert len(late.registered()) > len(before)
        lanes.free_arena(arena)
    assert late.registered() == before


@ON_LATE
def test_a_tenth_of_the_card_is_left_but_no_less_than_is_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 16 << 30
    try:
        late.set_device_bytes(total, INDEX)
        for least in (2 << 30, 1 << 30):
            monkeypatch.setattr(module, "LEAST_RESERVE_BYTES", least)
            device = module.AcceleratorDevice(here())
            assert device.reserve_bytes == max(least, total // 10)
            device.close()
    finally:
        late.set_device_bytes(4 << 30, INDEX)


@ON_LATE
def test_no_table_is_filled_anew_while_it_waits_to_be_read(events: Any) -> None:
    with torch.accelerator.device_index(INDEX):
        backend, lane = backends.BACKENDS["late"], torch.Stream(here())
        copies = backend.stream(here(), False)
        uploads = kernels.Uploads(here(), backend, copies)
        tables = [np.arange(600) + 1000 * turn for turn in range(6)]
        found = torch.zeros((6, 600), dtype=torch.int64, device=here())
        torch.accelerator.synchronize()
        with late.held(lane), backends.working_on(lane):
            for words, row in zip(tables, found, strict=True):
                with uploads.in_use(sent(uploads, words)) as there:
                    row.copy_(there[:600])
            copies.synchronize()  # what is filled anew is there before the lane reads
        lane.synchronize()
        assert np.array_equal(found.cpu().numpy(), np.stack(tables))


@ON_LATE
def test_tables_of_several_threads_are_in_no_memory_at_once(events: Any) -> None:
    uploads, wrong = kernels.Uploads(here(), backends.BACKENDS["late"]), []

    def use(number: int) -> None:
        torch.accelerator.set_device_index(INDEX)
        for turn in range(100):
            words = np.arange(600) + 1000 * number + turn
            with uploads.in_use(sent(uploads, words)) as there:
                for _ in range(2):
                    time.sleep(0)  # others' turn
                    if not np.array_equal(there[:600].cpu().numpy(), words):
                        wrong.append((number, turn))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(events) < 100  # memory is used again


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


@pytest.mark.parametrize("formats", [(EXACT,), FORMATS])
@pytest.mark.parametrize("weight", [DtypeCode.BFLOAT16, DtypeCode.FLOAT16, DtypeCode.FLOAT32])
def test_what_is_launched_has_been_compiled(
    monkeypatch: pytest.MonkeyPatch, weight: DtypeCode, formats: tuple[StateFormat, ...]
) -> None:
    recorders = {name: Recorder() for name in ("update", "gather", "copy_pieces", "sum_rows", "fingerprint_rows")}
    launched = SimpleNamespace(**recorders, triton=SimpleNamespace(JITFunction=()))
    monkeypatch.setattr(kernels, "import_module", lambda name: launched)
    kernel = kernels.GpuUpdateKernel("cpu")
    at = 1 << 45
    for gradient in {weight, DtypeCode.FLOAT32}:
        kernel.compile(ADAMW, {(gradient, weight, state_format.code) for state_format in formats})
        table = np.zeros(len(formats), segment_dtype(ADAMW))
        table["state_format"] = [state_format.code for state_format in formats]
        for name in ("master", "master_low", "exp_avg", "exp_avg_sq", "scales", "gradient"):
            table[name] = at
        table["weight"] = at if weight is not DtypeCode.FLOAT32 else 0
        table["weight_dtype"] = int(weight) if weight is not DtypeCode.FLOAT32 else 0
        table["gradient_dtype"], table["numel"], table["flags"] = int(gradient), 5000, int(SegmentFlag.ACTIVE)
        kernel.update(kernel.send(table))
        kernel.gather(at, gradient, 5000, at)
        for look_at in (kernel.sum_rows, kernel.fingerprint_rows):
            look_at(gradient, np.array([[at, 5000, at + 8]], np.uint64))
        kernel.gather(at, gradient, 5000, at + 8, at + (1 << 20), gradient, accumulate=True)
        for rows in range(1, 4):  # what follows them is at multiples of 16 bytes
            kernel.update(kernel.send(np.repeat(table[:1], rows)))
        odd = at + (4 if gradient is DtypeCode.FLOAT32 else 2)
        kernel.gather(odd, gradient, 5000, at)
        kernel.gather(odd, gradient, 5000, at + 8, at + (1 << 20), gradient, accumulate=True)
        for found, master, flags in ((odd, at, SegmentFlag.ACTIVE), (at, at, 0), (at, at + 4, 0)):
            table["gradient"], table["master"], table["flags"] = found, master, int(flags)
            kernel.update(kernel.send(table))
    kernel.copy_pieces(np.array([[at, at + (1 << 20), 5000]], np.uint64))
    for recorder in recorders.values():
        assert recorder.launched
        assert all(launched in recorder.warm for launched in recorder.launched)


def test_one_thread_at_a_time_launches_what_may_have_to_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread may find a kernel of which Triton knows how it is launched, and not yet what."""
    alone: list[bool] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **constants: alone.append(kernels.FIRST_LAUNCH.locked())

    names = ("update", "gather", "copy_pieces", "sum_rows", "fingerprint_rows")
    launched = SimpleNamespace(**{name: Kernel() for name in names}, triton=SimpleNamespace(JITFunction=()))
    monkeypatch.setattr(kernels, "import_module", lambda name: launched)
    kernel = kernels.GpuUpdateKernel("cpu")
    at = 1 << 45

    def gather(address: int, numel: int) -> bool:
        kernel.gather(address, DtypeCode.BFLOAT16, numel, at)
        return alone.pop()

    assert gather(at, 4096)
    assert not gather(at + 64, 8192)
    assert gather(at + 2, 4096)  # not aligned
    assert gather(at, 4095)
    assert gather(at, 1 << 31)  # an integer of 64 bits
    assert not gather(at, 4097)
    kernel.compile(ADAMW, {(DtypeCode.BFLOAT16, DtypeCode.BFLOAT16, EXACT.code)})
    assert len(alone) > 8
    alone.clear()
    kernel.copy_pieces(np.array([[at, at + (1 << 20), 5000]], np.uint64))
    assert alone == [False]


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


@ON_LATE
def test_what_cannot_be_pinned_is_told_with_the_device_s_name(device: module.AcceleratorDevice) -> None:
    values = np.zeros(1 << 20, np.uint8)
    device.pin(values.ctypes.data, values.nbytes)
    with pytest.raises(OffloadError, match=r"^late:1 .*1048576 bytes .* cannot be pinned: "):
        device.pin(values.ctypes.data, values.nbytes)
    device.unpin(values.ctypes.data)
