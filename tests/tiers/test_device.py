"""What every `offload.protocols.Device` does: the simulated one, the test accelerator, a real one with `-m gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from devices import CUDA, LATE, the_device
from world import SimulatedDevice

from offload._native import CompletionQueue
from offload.device.accelerator import AcceleratorDevice
from offload.dtypes import DtypeCode
from offload.errors import InternalError, OffloadError
from offload.kernels import CpuUpdateKernel, reference
from offload.memory.arenas import Arena
from offload.protocols import Device, DeviceLane, SegmentFlag
from offload.rules import ADAMW, segment_dtype


@pytest.fixture(params=["eager", "lazy", *LATE, *CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made: Device
    if request.param in ("eager", "lazy"):
        made = SimulatedDevice(1 << 26, lazy=request.param == "lazy", delay_s=1e-3)
    else:
        made = AcceleratorDevice(the_device(request.param))
    yield made
    made.close()


@pytest.fixture
def host() -> Iterator[Arena]:
    arena = Arena(1 << 22)
    yield arena
    arena.close()


def fetch(device: Device, arena: Arena, address: int, nbytes: int, offset: int) -> bytes:
    device.copy(DeviceLane.D2H, arena.address + offset, address, nbytes)
    device.mark(DeviceLane.D2H).wait()
    return arena.numpy(offset, nbytes, np.uint8).tobytes()


def send(device: Device, arena: Arena, values: np.ndarray, offset: int) -> int:
    """Copy values to new memory of the device, through the arena."""
    raw = values.view(np.uint8).reshape(-1)
    arena.numpy(offset, raw.size, np.uint8)[:] = raw
    address = device.allocate(raw.size)
    device.copy(DeviceLane.H2D, address, arena.address + offset, raw.size)
    device.mark(DeviceLane.H2D).wait()
    return address


def test_bytes_go_there_and_back(device: Device, host: Arena) -> None:
    for nbytes in (1, 4096, 1_000_003):
        values = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        address = send(device, host, values, 0)
        assert fetch(device, host, address, nbytes, 1 << 21) == values.tobytes()
        device.release(address)
    device.copy(DeviceLane.H2D, address, host.address, 0)
    assert device.mark(DeviceLane.H2D).wait() is None


def test_copies_in_pieces_are_copies(device: Device, host: Arena) -> None:
    half = host.nbytes // 2
    values = host.numpy(0, half, np.uint8)
    values[:] = np.random.default_rng(0).integers(0, 256, half, np.uint8)
    address = device.allocate(half)
    for nbytes in (0, 1, 4096, half - 1):
        before = host.numpy(half, half, np.uint8)
        before[:] = 0
        device.copy(DeviceLane.H2D, address, host.address, nbytes, 4096)
        device.follow(DeviceLane.D2H, device.mark(DeviceLane.H2D))
        device.copy(DeviceLane.D2H, host.address + half, address, nbytes, 1 << 16)
        device.mark(DeviceLane.D2H).wait()
        assert np.array_equal(host.numpy(half, half, np.uint8)[:nbytes], values[:nbytes])
        assert not host.numpy(half, half, np.uint8)[nbytes:].any()
    device.release(address)


def test_pinned_memory_works_as_any_other(device: Device, host: Arena) -> None:
    device.pin(host.address, host.nbytes)
    values = np.arange(1 << 18, dtype=np.uint32)
    address = send(device, host, values, 0)
    assert fetch(device, host, address, values.nbytes, 1 << 21) == values.tobytes()
    device.unpin(host.address)


def test_chunks_of_pinned_memory_and_what_is_between_them(device: Device, host: Arena) -> None:
    chunk = 1 << 20
    for number in (0, 1, 3):
        device.pin(host.address + number * chunk, chunk)
    with pytest.raises(OffloadError, match=device.name.split()[0]):
        device.pin(host.address + chunk, chunk)
    memory = device.allocate(2 * chunk)
    values = np.arange(chunk // 4, dtype=np.uint32)
    for number in range(4):
        host.numpy(number * chunk, values.size, np.uint32)[:] = values + number
        device.copy(DeviceLane.H2D, memory, host.address + number * chunk, chunk)
        mark = device.mark(DeviceLane.H2D)
        mark.wait()
        assert fetch(device, host, memory, chunk, number * chunk) == (values + np.uint32(number)).tobytes()
    for number in (0, 1, 3):
        device.unpin(host.address + number * chunk)


def test_a_lane_that_follows_another_finds_its_work_done(device: Device, host: Arena) -> None:
    size = 1 << 20
    memory = device.allocate(size)
    source, target = host.numpy(0, size, np.uint8), host.numpy(size, size, np.uint8)
    for turn in range(1, 20):
        source[:] = turn
        device.copy(DeviceLane.H2D, memory, host.address, size)
        device.follow(DeviceLane.D2H, device.mark(DeviceLane.H2D))
        device.copy(DeviceLane.D2H, host.address + size, memory, size)
        mark = device.mark(DeviceLane.D2H)
        device.follow(DeviceLane.H2D, mark)
        mark.wait()
        assert mark.reached()
        assert (target == turn).all()


def test_marks_are_reported_once_each_and_in_order(device: Device, host: Arena) -> None:
    queue = CompletionQueue()
    memory = device.allocate(1 << 20)
    for op in range(10, 30):
        device.copy(DeviceLane.D2H, host.address, memory, 1 << 16)
        device.report(device.mark(DeviceLane.D2H), queue, op)
    seen: list[tuple[int, int, int, float, float]] = []
    while len(seen) < 20:
        seen += queue.wait(10.0)
    assert [record[0] for record in seen] == list(range(10, 30))
    assert [record[1] for record in seen] == [0] * 20
    times = [record[4] for record in seen]
    assert times == sorted(times)
    assert queue.wait(0.01) == []


def test_times_grow(device: Device, host: Arena) -> None:
    memory = device.allocate(1 << 20)
    marks = [device.mark(DeviceLane.H2D)]
    for _ in range(3):
        device.copy(DeviceLane.H2D, memory, host.address, 1 << 20)
        marks.append(device.mark(DeviceLane.H2D))
    marks[-1].wait()
    times = [mark.time_s() for mark in marks]
    assert times == sorted(times)


@pytest.mark.parametrize("weight", [DtypeCode.BFLOAT16, DtypeCode.FLOAT16, DtypeCode.FLOAT32])
def test_an_update_gives_the_bits_of_the_cpu(device: Device, host: Arena, weight: DtypeCode) -> None:
    numel = 5000
    generator = np.random.default_rng(3)
    item = np.uint16 if weight is not DtypeCode.FLOAT32 else np.float32
    state = [generator.standard_normal(numel, np.float32) for _ in range(2)]
    state.append(np.abs(generator.standard_normal(numel, np.float32)))
    dtype = {DtypeCode.BFLOAT16: torch.bfloat16, DtypeCode.FLOAT16: torch.float16}.get(weight, torch.float32)
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradient = drawn.view(torch.int16).numpy().view(np.uint16) if item is np.uint16 else drawn.numpy()
    weights = np.zeros(numel, item)
    table = np.zeros(1, segment_dtype(ADAMW))
    table["numel"] = numel
    table["flags"] = int(SegmentFlag.ACTIVE | SegmentFlag.DECOUPLED_DECAY)
    table["gradient_dtype"] = int(weight)
    table["weight_dtype"] = int(weight if item is np.uint16 else DtypeCode.NONE)
    scalars = {"grad_scale": 0.7, "beta1": 0.9, "one_minus_beta1": 0.1, "beta2": 0.95, "one_minus_beta2": 0.05}
    for name, value in {**scalars, "inv_bias2_sqrt": 1.3, "eps": 1e-8, "step_size": 0.01, "decay": 0.99}.items():
        table[name] = value
    tensors = {"master": state[0], "exp_avg": state[1], "exp_avg_sq": state[2], "gradient": gradient}
    if item is np.uint16:
        tensors["weight"] = weights
    there = {name: send(device, host, values, 0) for name, values in tensors.items()}
    for name, address in there.items():
        table[name] = address
    device.update(device.send_table(table))
    device.follow(DeviceLane.D2H, device.mark(DeviceLane.UPDATE))
    found = {
        name: fetch(device, host, there[name], values.nbytes, 0)
        for name, values in tensors.items()
        if name != "gradient"
    }
    for name, values in tensors.items():
        table[name] = values.ctypes.data
    with CpuUpdateKernel(threads=1) as kernel:
        kernel.run(table)
    assert found == {name: values.tobytes() for name, values in tensors.items() if name != "gradient"}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [DtypeCode.BFLOAT16, DtypeCode.FLOAT16, DtypeCode.FLOAT32])
def test_gradients_are_summed_and_added_as_on_the_cpu(
    device: Device, host: Arena, dtype: DtypeCode, accumulate: bool
) -> None:
    numel = 9001
    kind = {DtypeCode.BFLOAT16: torch.bfloat16, DtypeCode.FLOAT16: torch.float16}.get(dtype, torch.float32)
    generator = torch.Generator().manual_seed(5)
    new, old = (torch.randn(numel, generator=generator).to(kind) for _ in range(2))
    if dtype is not DtypeCode.FLOAT32:
        raw = [tensor.view(torch.int16).numpy() for tensor in (new, old)]
    else:
        raw = [new.numpy(), old.numpy()]
    source, target = (send(device, host, values, 0) for values in raw)
    blocks = device.allocate(3 * 8)
    device.gradient_blocks(DeviceLane.GRADIENTS, source, dtype, numel, blocks, target, dtype, accumulate)
    device.follow(DeviceLane.D2H, device.mark(DeviceLane.GRADIENTS))
    sums = np.frombuffer(fetch(device, host, blocks, 24, 0), np.float64)
    result = fetch(device, host, target, raw[0].nbytes, 0)
    wanted = (old + new if accumulate else new).contiguous()
    expected = np.zeros(3)
    with CpuUpdateKernel(threads=1) as kernel:
        kernel.gradient_blocks(wanted.data_ptr(), dtype, numel, expected.ctypes.data)
    assert result == wanted.view(torch.uint8).numpy().tobytes()
    assert sums.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [DtypeCode.BFLOAT16, DtypeCode.FLOAT32])
def test_many_gradients_are_summed_as_one_is(device: Device, host: Arena, dtype: DtypeCode) -> None:
    """And have the fingerprints that the CPU makes of them."""
    item = 2 if dtype is DtypeCode.BFLOAT16 else 4
    drawn = np.random.default_rng(1).standard_normal(40_000, np.float32)
    values = drawn if item == 4 else (drawn.view(np.uint32) >> 16).astype(np.uint16)
    source, wanted = send(device, host, values, 0), np.zeros(20)
    sums = send(device, host, np.zeros(20), 0)
    rows, at, block = [], 0, 0
    with CpuUpdateKernel(threads=1) as kernel:
        for numel in (1, 4096, 5, 0, 8193, 700):
            rows.append((source + at * item, numel, sums + 8 * block))
            kernel.gradient_blocks(values[at:].ctypes.data, dtype, numel, wanted[block:].ctypes.data)
            at, block = at + numel, block + -(-numel // 4096)
    device.follow(DeviceLane.GRADIENTS, device.mark_caller(device.caller()))
    device.sum_gradients(DeviceLane.GRADIENTS, dtype, np.array(rows, np.uint64))
    device.follow(DeviceLane.D2H, device.mark(DeviceLane.GRADIENTS))
    assert fetch(device, host, sums, wanted.nbytes, 0) == wanted.tobytes()
    device.fingerprint_gradients(DeviceLane.GRADIENTS, dtype, np.array(rows, np.uint64))
    device.follow(DeviceLane.D2H, device.mark(DeviceLane.GRADIENTS))
    parts = np.frombuffer(fetch(device, host, sums, wanted.nbytes, 0), np.uint64)
    at = block = 0
    for _, numel, _ in rows:
        gradient = torch.from_numpy(values[at : at + numel].copy())
        assert parts[block : block + -(-numel // 4096)].sum() == np.uint64(reference.fingerprint(gradient))
        at, block = at + numel, block + -(-numel // 4096)


def test_pieces_are_copied_at_once(device: Device, host: Arena) -> None:
    values = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    memory = send(device, host, values, 0)
    gathered = device.allocate(1 << 20)
    sizes = [2, 4096, 62, 16, 100_000, 0, 14]
    rows, wanted, at = [], b"", 0
    for number, nbytes in enumerate(sizes):
        start = 120_000 * number + 2 * number
        rows.append((gathered + at, memory + start, nbytes))
        wanted += values[start : start + nbytes].tobytes()
        at += nbytes
    device.copy_pieces(DeviceLane.PIECES, np.array(rows, np.uint64))
    device.copy_pieces(DeviceLane.PIECES, np.zeros((0, 3), np.uint64))
    device.follow(DeviceLane.D2H, device.mark(DeviceLane.PIECES))
    assert fetch(device, host, gathered, at, 0) == wanted
    with pytest.raises(InternalError, match="16-bit words"):
        device.copy_pieces(DeviceLane.PIECES, np.array([(gathered, memory, 3)], np.uint64))


def test_memory_is_counted_and_refused(device: Device) -> None:
    with pytest.raises(OffloadError, match=device.name.split()[0]):
        device.allocate(device.free_bytes() * 4 + (1 << 40))
    before = device.free_bytes()  # now that torch has given back to the driver what it kept of earlier tests
    address = device.allocate(1 << 22)
    assert address % 256 == 0
    assert device.free_bytes() <= before
    device.release(address)


def test_closing_twice(device: Device) -> None:
    device.close()
    device.close()
