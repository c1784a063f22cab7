"""The test accelerator does what CUDA's devices do, later, and shows what they hide."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch

from accelerator import late
from accelerator.ranks import run_ranks

pytestmark = [pytest.mark.late, pytest.mark.slow]

ALONE = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def ones(*size: int, device: str = "late", **options: Any) -> torch.Tensor:
    return torch.ones(*size, device=device, **options)


def filled(like: torch.Tensor, value: float) -> bool:
    return torch.equal(like.cpu(), torch.full_like(like, value, device="cpu"))


@pytest.fixture
def main() -> torch.Stream:
    return torch.accelerator.current_stream()


@pytest.fixture
def side() -> torch.Stream:
    return torch.Stream("late:0")


def acts_after_release(stream: torch.Stream, act: Callable[[], object]) -> bool:
    """Release a stream when another thread waits for it, or has acted without; return whether it waited."""
    acted = threading.Event()

    def run() -> None:
        act()
        acted.set()

    thread = threading.Thread(target=run)
    thread.start()
    while not late.is_waited_for(stream) and thread.is_alive():
        os.sched_yield()
    waited = not acted.is_set()
    late.release(stream)
    thread.join()
    return waited and acted.is_set()


# -- Devices


def test_each_thread_has_a_current_device() -> None:
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert str(accelerator.current_accelerator()) == "late"
    assert accelerator.device_count() == 2
    accelerator.set_device_index(1)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(accelerator.current_device_index()))
    thread.start()
    thread.join()
    assert (seen, accelerator.current_device_index()) == ([0], 1)
    assert torch.empty(1, device="late").device.index == 1
    with accelerator.device_index(0):
        assert torch.empty(1, device="late").device.index == 0
        assert (ones(1, device="late:1") + 1).device.index == 1
    with pytest.raises(RuntimeError, match="no device 2"):
        accelerator.set_device_index(2)


def test_work_on_the_wrong_device_is_an_error() -> None:
    first, second = ones(2, device="late:0"), ones(2, device="late:1")
    with pytest.raises(RuntimeError, match="late:0 and late:1"):
        first + second
    with pytest.raises(RuntimeError, match="late:0 and cpu"):
        first + torch.ones(2)
    with pytest.raises(RuntimeError, match="late:0 and cpu"):
        torch.zeros(()).add_(first[0])
    event = torch.Event("late:0")
    event.record(torch.Stream("late:0"))
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        event.record(torch.Stream("late:1"))
    storage = torch._C._construct_storage_from_data_pointer(first.data_ptr(), second.device, 8)
    astray = torch.empty(0, device="late:1").set_(storage, 0, (2,))
    with pytest.raises(RuntimeError, match="not of late:1"):
        astray + 1
    assert filled(first + torch.tensor(1.0), 2)  # a number is any device's


def test_devices_copy_to_each_other_in_the_order_of_both_streams() -> None:
    there = ones(4, device="late:1")
    with late.held(torch.accelerator.current_stream("late:1")):
        there.mul_(3)
        here = there.to("late:0", non_blocking=True)
        assert not torch.accelerator.current_stream("late:0").query()
    assert filled(here, 3)


def test_more_devices_may_be_asked_for_before_the_first_use_alone() -> None:
    with pytest.raises(RuntimeError, match="in use already"):
        late.load(devices=3)
    code = "from accelerator import late; late.load(3); import torch; print(torch.ones(1, device='late:2').item())"
    ended = subprocess.run([prepared.python(), "-c", code], env=ALONE, capture_output=True, text=True, check=True)
    assert ended.stdout == "1.0\n"


# -- Streams


def test_a_stream_runs_in_order_and_does_not_wait_for_others(main: torch.Stream, side: torch.Stream) -> None:
    said: list[int] = []
    with late.held(main):
        for number in range(5):
            late.launch(lambda number=number: said.append(number), stream=main)  # type: ignore[misc]
        late.launch(lambda: said.append(-1), stream=side)
        side.synchronize()
        assert (said, main.query(), side.query()) == ([-1], False, True)
    torch.accelerator.synchronize()
    assert said == [-1, 0, 1, 2, 3, 4]


def test_a_stream_may_run_last(main: torch.Stream, side: torch.Stream) -> None:
    said: list[str] = []
    go_on = threading.Event()
    late.last(side)
    late.launch(go_on.wait, stream=main)
    late.launch(lambda: said.append("side"), stream=side)
    late.launch(lambda: said.append("main"), stream=main)
    go_on.set()
    main.synchronize()
    side.synchronize()
    assert said == ["main", "side"]
    go_on.clear()
    late.launch(go_on.wait, stream=main)
    late.launch(lambda: said.append("wanted"), stream=side)
    side.synchronize()  # though another is busy
    assert said[-1] == "wanted"
    late.launch(lambda: said.append("waited for"), stream=side)
    other = torch.Stream("late:0")
    other.wait_stream(side)
    other.synchronize()
    assert said[-1] == "waited for"
    go_on.set()


def test_streams_are_of_a_pool_as_cuda_s_are() -> None:
    streams = [torch.Stream("late:0", priority=priority) for priority in (0, -1) for _ in range(33)]
    assert len({stream.stream_id for stream in streams}) == 64
    with streams[0]:
        assert torch.accelerator.current_stream() == streams[0]
    assert torch.accelerator.current_stream().stream_id == 0


def test_a_process_ends_whatever_is_held() -> None:
    code = "from accelerator import late; late.load(); import torch; stream = torch.accelerator.current_stream(); "
    code += "late.hold(stream); torch.ones(4, device='late').add_(1); late.launch(lambda: print('ran')); print('end')"
    ended = subprocess.run([prepared.python(), "-c", code], env=ALONE, capture_output=True, text=True, check=True)
    assert ended.stdout == "end\n"


# -- Events


def test_the_host_waits_for_an_event_and_for_a_stream(main: torch.Stream) -> None:
    event = torch.Event("late")
    late.hold(main)
    ones(1).add_(1)
    event.record(main)
    assert acts_after_release(main, event.synchronize)
    late.hold(main)
    ones(1).add_(1)
    assert acts_after_release(main, main.synchronize)
    late.hold(main)
    ones(1).add_(1)
    assert acts_after_release(main, torch.accelerator.synchronize)


# -- Memory


def test_new_memory_is_nan() -> None:
    assert torch.empty(100, device="late").isnan().all()


def test_the_newest_block_of_a_stream_and_size_is_reused(main: torch.Stream, side: torch.Stream) -> None:
    kept = [torch.empty(256, device="late") for _ in range(2)]
    addresses = [each.data_ptr() for each in kept]
    kept.clear()
    with side:
        assert torch.empty(256, device="late").data_ptr() not in addresses
    assert torch.empty(512, device="late").data_ptr() not in addresses
    again = [torch.empty(100, device="late"), torch.empty(256, device="late")]
    assert again[0].data_ptr() not in addresses  # of another size
    assert again[1].data_ptr() in addresses


def test_a_device_is_full_at_some_time() -> None:
    late.set_device_bytes(1 << 20)
    assert torch.accelerator.get_memory_info() == (1 << 20, 1 << 20)
    kept = torch.empty(768 << 10, dtype=torch.uint8, device="late")
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(512 << 10, dtype=torch.uint8, device="late")
    assert torch.accelerator.get_memory_info() == (256 << 10, 1 << 20)
    assert torch.accelerator.memory_allocated() == torch.accelerator.max_memory_allocated() == 768 << 10
    del kept
    assert torch.accelerator.memory_allocated() == 0
    assert torch.accelerator.memory_reserved() == 768 << 10
    kept = torch.empty(512 << 10, dtype=torch.uint8, device="late")  # what was cached is given back for it
    assert torch.accelerator.memory_reserved() == 512 << 10
    del kept
    torch.accelerator.empty_cache()
    assert torch.accelerator.get_memory_info() == (1 << 20, 1 << 20)
    assert torch.accelerator.memory_stats()["num_ooms"] == 1
    torch.empty(2 << 20, dtype=torch.uint8, device="late:1")


def test_tensors_over_any_address_of_a_device() -> None:
    value = torch.arange(16, device="late", dtype=torch.float32)
    storage = torch._C._construct_storage_from_data_pointer(value.data_ptr() + 16, value.device, 24)
    part = torch.empty(0, device="late").set_(storage, 1, (2, 2), (2, 1))
    assert part.tolist() == [[5, 6], [7, 8]]
    part.zero_()
    assert value.sum().item() == 120 - 26
    with pytest.raises(RuntimeError, match="storage of size 24"):
        torch.as_strided(part, (8,), (1,)) + 1


def test_storages_are_resized() -> None:
    value = torch.arange(4, device="late")
    storage = value.untyped_storage()
    storage.resize_(0)
    assert storage.size() == 0
    with pytest.raises(RuntimeError, match="storage of 0"):
        value + 1
    storage.resize_(32)
    value.copy_(torch.arange(4))
    assert value.tolist() == [0, 1, 2, 3]
    value.resize_(8)
    assert value[:4].tolist() == [0, 1, 2, 3]


# -- Operators


def test_operators_run_later(main: torch.Stream) -> None:
    before = late.counts()
    value = ones(4)
    with late.held(main):
        result = (value + 1).sum()
        value.mul_(2)
        assert not main.query()
    assert (result.item(), filled(value, 2)) == (8, True)
    assert late.counts()["asynchronous"] >= before["asynchronous"] + 3
    late.hold(main)
    assert acts_after_release(main, lambda: value.nonzero())
    assert late.counts()["waited"]["aten::nonzero"] == 1


def test_wrong_arguments_are_said_at_the_call() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        ones(2) + ones(3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ones(2, 3) @ ones(2, 3)


def test_an_operator_takes_host_tensors_as_they_are_at_the_call(main: torch.Stream) -> None:
    value, number = torch.arange(4.0, device="late"), torch.tensor(2.0)
    with late.held(main):
        product = value * number
        number.fill_(5)
    assert product.tolist() == [0, 2, 4, 6]


# -- Host memory


def test_pageable_memory_is_staged_at_the_call_and_waited_for(main: torch.Stream) -> None:
    host = torch.zeros(64)
    assert not host.is_pinned()
    with late.held(main):
        target = host.to("late", non_blocking=True)
        host.fill_(1)
    assert filled(target, 0)
    late.hold(main)
    assert acts_after_release(main, lambda: host.copy_(target, non_blocking=True))
    late.hold(main)
    assert acts_after_release(main, lambda: target.copy_(host))


def test_host_memory_is_registered_once(main: torch.Stream) -> None:
    host = torch.zeros(1024)
    address, half = host.data_ptr(), host.nbytes // 2
    late.pin(address, half)
    assert late.registered() == [address]
    assert host[:512].is_pinned()
    for again in (address, address + half - 4):
        with pytest.raises(RuntimeError, match="registered already"):
            late.pin(again, half)
    with pytest.raises(RuntimeError, match="registered already"):
        late.pin(torch.zeros(4).pin_memory().data_ptr(), 16)
    with pytest.raises(RuntimeError, match="in part"):
        host.to("late", non_blocking=True)
    with pytest.raises(RuntimeError, match="not registered"):
        late.unpin(address + 4)
    late.hold(main)
    kept = host[:512].to("late", non_blocking=True)
    assert acts_after_release(main, lambda: late.unpin(address))
    with pytest.raises(RuntimeError, match="not registered"):
        late.unpin(address)
    late.pin(address + half, half)
    late.unpin(address + half)
    assert late.registered() == []
    assert filled(kept, 0)


def test_pinned_blocks_are_reused_when_copies_are_over(main: torch.Stream) -> None:
    host = torch.ones(1024).pin_memory()
    address = host.data_ptr()
    with late.held(main):
        there = host.to("late", non_blocking=True)
        del host
        assert torch.empty(1024, pin_memory=True).data_ptr() != address
    assert filled(there, 1)
    kept = [torch.empty(1024, pin_memory=True) for _ in range(2)]
    assert address in [each.data_ptr() for each in kept]
    assert all(each.isnan().all() for each in kept)


# -- Errors


def test_an_error_is_said_at_a_later_call_and_stays(main: torch.Stream) -> None:
    value, outside = ones(4), torch.tensor([9], device="late")
    with late.held(main):
        value[outside]
    for act in (main.synchronize, lambda: value + 1, lambda: value.cpu(), main.query):
        with pytest.raises(RuntimeError, match=r"aten::index.* has failed on late:0.*out of bounds"):
            act()
    assert filled(ones(4, device="late:1"), 1)
    late.forget_errors()
    assert filled(value, 1)


def test_tests_let_tasks_fail(main: torch.Stream) -> None:
    late.fail("copy", after=1)
    value = torch.zeros(4).to("late")
    with pytest.raises(RuntimeError, match="copy has failed on late:0, stream 0: a failure that a test asked for"):
        value.copy_(torch.ones(4))
    late.forget_errors()
    assert filled(value, 0)
    late.launch(lambda: 1 // 0, name="division")
    with pytest.raises(RuntimeError, match=r"division has failed.*ZeroDivisionError"):
        main.synchronize()
    late.forget_errors()
    late.fail("aten::mul")
    late.forget_errors()
    assert filled(ones(1) * 2, 2)


# -- Autograd


def test_backward_runs_on_the_streams_of_forward(main: torch.Stream, side: torch.Stream) -> None:
    weight = ones(4).requires_grad_()
    side.wait_stream(main)
    with side:
        loss = (weight * 3).sum()
    main.synchronize()
    side.synchronize()
    with late.held(side):
        loss.backward()  # whose caller's stream then waits for the gradient
        weight.grad.add_(1)  # type: ignore[union-attr]
        assert not side.query()
        assert not main.query()
    assert filled(weight.grad, 4)  # type: ignore[arg-type]


def test_autocast_has_cuda_s_lists() -> None:
    value = ones(4, 4)
    with torch.autocast("late", dtype=torch.bfloat16):
        product = value @ value
        assert product.dtype == torch.bfloat16
        assert torch.softmax(product, 0).dtype == torch.float32
        assert (value + value).dtype == torch.float32
    with torch.autocast("late"):
        assert (value @ value).dtype in (torch.bfloat16, torch.float16)


def test_random_numbers_depend_on_the_order_of_calls_alone(main: torch.Stream, side: torch.Stream) -> None:
    def draw() -> list[torch.Tensor]:
        with side:
            first = torch.randn(4, device="late")
        second = torch.rand(4, device="late")
        side.synchronize()
        return [first.cpu(), second.cpu(), torch.nn.functional.dropout(ones(64), 0.5).cpu()]

    torch.manual_seed(7)
    module = torch.get_device_module("late")
    state = module.get_rng_state()
    expected = draw()
    assert 0 < (expected[2] == 0).sum() < 64
    module.set_rng_state(state)
    late.last(main)
    assert all(torch.equal(left, right) for left, right in zip(draw(), expected, strict=True))
    assert not torch.equal(draw()[0], expected[0])
    own = [torch.Generator("late").manual_seed(3) for _ in range(2)]
    left, right = (torch.randperm(50, generator=each, device="late").tolist() for each in own)
    assert left == right
    assert sorted(left) == list(range(50))
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device="late", generator=torch.Generator())


# -- Files and copies


def test_tensors_are_saved_loaded_and_copied() -> None:
    value = torch.arange(6.0, device="late").reshape(2, 3)
    file = io.BytesIO()
    torch.save({"value": value, "view": value[1]}, file)
    for place in (None, "late:1", "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=place)
        assert str(loaded["value"].device) == (place or "late:0")
        assert loaded["view"].tolist() == [3, 4, 5]
        loaded["value"].zero_()
        assert loaded["view"].tolist() == [0, 0, 0]
    for made in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), value.clone(), value.cpu().to("late")):
        assert made.device == value.device
        assert made.data_ptr() != value.data_ptr()
        assert torch.equal(made, value)
    assert value.to("late:1").device.index == 1
    assert value.to("late") is value


# -- Ranks


def test_collectives_of_two_ranks() -> None:
    run_ranks(2, "ranks.py")
