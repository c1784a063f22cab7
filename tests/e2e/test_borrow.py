"""GPU memory that is borrowed between backward and forward: bits, what is held when, and steps without room."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from at_line import AtLine, at_every_line
from mirror import same, states
from simulated import OnDevice
from test_simulated_gpu import backward, config, on_cpu, train, train_behind, weights
from world import HazardError, SimulatedDevice

import offload
from offload.device import lanes
from offload.dtypes import DtypeCode
from offload.gradients import gpu as gradients
from offload.plan.budget import GPU_STAGING_SLOTS
from offload.protocols import DeviceLane
from offload.units import format_bytes

pytestmark = pytest.mark.not_overlapped("what is borrowed goes back before forward")

ROOM = 1 << 20


def borrowing(folder: Path, **changes: Any) -> offload.OffloadConfig:
    return config(folder, **{"gpu_memory": "borrow", "placement": "gpu", "host_memory": 60_000, **changes})


@pytest.mark.parametrize(("placement", "keep_grads"), [("gpu", True), (0.5, False), ("auto", True), ("cpu", False)])
@pytest.mark.parametrize("clip", [True, False])
def test_where_forward_and_backward_are_on_a_lane_nothing_is_held_between_steps(
    tmp_path: Path, placement: str | float, keep_grads: bool, clip: bool
) -> None:
    """Bits are those of the CPU; `test_programs.py` has them where the host is the caller."""
    parameters, steps = weights(), range(4)
    device = SimulatedDevice(ROOM, seed=3, delay_s=1e-4, caller_is_host=False)
    settings = borrowing(tmp_path, placement=placement, keep_grads=keep_grads)
    with OnDevice(parameters, device=device, offload=settings) as optimizer:
        for step in steps:
            train_behind(optimizer, parameters, device, range(step, step + 1), clip)
            assert device.taken_bytes == 0
            assert optimizer.metrics()["gpu_bytes"] == 0
            slots = optimizer.engine.plan.gpu_slots * optimizer.engine.plan.gpu_slot_bytes
            assert optimizer.metrics()["borrowed_bytes"] >= slots > 0 or placement in ("auto", "cpu")
        found = states(optimizer, parameters)
        assert device.taken_bytes == 0
    assert same(found, on_cpu(steps, clip=clip))


def test_memory_that_is_used_after_it_was_given_back_is_found(tmp_path: Path) -> None:
    parameters = weights()
    device = SimulatedDevice(ROOM, lazy=True)
    optimizer = OnDevice(parameters, device=device, offload=borrowing(tmp_path, host_memory="1MB"))
    train(optimizer, parameters, range(1))
    of_engine: Any = optimizer.engine._parts.lanes
    plain, early = of_engine.copy_out, []

    def copy_out(operation: Any, *arguments: Any) -> None:
        if not early:
            early.append(operation.transfer_slot)
            device.return_borrowed()
        plain(operation, *arguments)

    of_engine.copy_out = copy_out
    try:
        with pytest.raises(offload.OffloadError) as caught:
            train(optimizer, parameters, range(1, 2))
        assert isinstance(caught.value.__cause__ or caught.value, HazardError)
    finally:
        optimizer.close()


def test_gradients_that_are_dropped_leave_nothing_behind(tmp_path: Path) -> None:
    parameters = weights()
    device = SimulatedDevice(ROOM)
    with OnDevice(parameters, device=device, offload=borrowing(tmp_path, keep_grads=False)) as optimizer:
        train(optimizer, parameters, range(1))
        engine, gradient = optimizer.engine, torch.ones_like(parameters[0])
        engine.gradients.arrived(0, gradient.data_ptr(), DtypeCode.BFLOAT16)
        assert device.taken_bytes > 0
        engine.gradients.forget([gradient])
        assert device.taken_bytes == 0


# -- Room


class Crowded(SimulatedDevice):
    """A device of which others take all but `free` bytes from when that is set."""

    free: int | None = None
    refused = 0

    def allocate(self, nbytes: int, caller: Any = None) -> int:
        try:
            return super().allocate(nbytes, caller)
        except offload.OffloadError:
            self.refused += 1
            raise

    def free_bytes(self) -> int:
        left = super().free_bytes()
        return left if self.free is None else min(left, self.free - self.taken_bytes)


@pytest.mark.parametrize(("placement", "keep_grads"), [("gpu", True), ("gpu", False), (0.5, True), (0.5, False)])
def test_steps_that_find_less_room(
    tmp_path: Path, placement: Any, keep_grads: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Fewer slots, or none: the bits stay, and the next step has what it finds."""
    seed = 2 * keep_grads + (placement == 0.5)
    rng, parameters = random.Random(seed), weights()
    device = Crowded(ROOM, seed=seed, delay_s=1e-4)
    settings = borrowing(tmp_path, keep_grads=keep_grads, placement=placement, gradient_dtype="parameter")
    with OnDevice(parameters, device=device, offload=settings) as optimizer:
        train(optimizer, parameters, range(1))
        plan = optimizer.engine.plan
        pieces = 4 * plan.piece_buffer_bytes + 4096
        full = optimizer.metrics()["borrowed_bytes"]
        with caplog.at_level(logging.WARNING, "offload"):
            for step in range(1, 7):
                slots = rng.randrange(plan.gpu_slots + 1) if step % 3 else 0
                device.free = pieces + slots * plan.gpu_slot_bytes
                train(optimizer, parameters, range(step, step + 1))
                assert device.taken_bytes == 0
                assert optimizer.metrics()["borrowed_bytes"] < full or slots == plan.gpu_slots
        assert not device.refused  # for that, torch's allocator gives back all it has cached
        assert any("left less of the GPU" in record.message for record in caplog.records)
        found = int(optimizer.metrics()["borrowed_bytes"])
        assert f"the last step has borrowed {format_bytes(found)}" in str(optimizer.plan)
        device.free = None
        train(optimizer, parameters, range(7, 8))
        assert optimizer.metrics()["borrowed_bytes"] == full
        assert same(states(optimizer, parameters), on_cpu(range(8)))


def test_fp32_gradients_of_16_bit_weights_without_room(tmp_path: Path) -> None:
    parameters, expected = weights(), weights()
    device = Crowded(ROOM)
    settings = borrowing(tmp_path, gradient_dtype="float32")
    with (
        offload.AdamW(expected, offload={"gradient_dtype": "float32"}) as plain,
        OnDevice(parameters, device=device, offload=settings) as optimizer,
    ):
        for step in range(3):
            device.free = None if step == 0 else 4096
            train(plain, expected, range(step, step + 1))
            train(optimizer, parameters, range(step, step + 1))
        assert same(states(optimizer, parameters), states(plain, expected))


def test_slots_are_as_many_as_pay(tmp_path: Path) -> None:
    """No more than there is room for; a card without room has none, and trains."""
    for room, most in ((1 << 22, 64), (60_000, GPU_STAGING_SLOTS), (40_000, 0)):
        folder = tmp_path / str(room)
        folder.mkdir()
        parameters = weights()
        placement = "gpu" if most else "auto"
        settings, device = borrowing(folder, placement=placement, host_memory="1MB"), SimulatedDevice(room)
        if not most:
            device.reserve_bytes = room
        with OnDevice(parameters, device=device, offload=settings) as optimizer:
            train(optimizer, parameters, range(2))
            plan = optimizer.engine.plan
            assert min(most, GPU_STAGING_SLOTS) <= plan.gpu_slots <= most
            assert plan.gpu_slots * plan.gpu_slot_bytes <= room
            assert same(states(optimizer, parameters), on_cpu(range(2)))


# -- What is said


def test_the_plan_says_how_many_slots_there_are_and_what_they_win(tmp_path: Path) -> None:
    parameters = weights()
    with OnDevice(parameters, device=SimulatedDevice(ROOM), offload=borrowing(tmp_path)) as optimizer:
        train(optimizer, parameters, range(1))
        text, plan = str(optimizer.plan), optimizer.engine.plan
        assert f"borrowed from backward's end to forward, {plan.gpu_slots} slots of" in text
        assert "with the staging slots that are borrowed a step takes" in text
    with OnDevice(weights(), device=SimulatedDevice(ROOM), offload=config(tmp_path, gpu_memory=0)) as optimizer:
        assert "borrow" not in str(optimizer.plan)
        assert "borrowed_bytes" not in optimizer.metrics()


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    """A session whose call was refused trains on."""
    with pytest.raises(offload.ConfigError, match="gpu_memory"):
        offload.OffloadConfig(gpu_memory="lend")
    model = torch.nn.Linear(4, 4)
    settings = borrowing(tmp_path, overlap="auto")
    with OnDevice(model.parameters(), device=SimulatedDevice(ROOM), offload=settings) as optimizer:
        with pytest.raises(offload.ConfigError, match=r'gpu_memory.*use "auto" or a size'):
            optimizer.overlap_forward(model)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


# -- What may come in between


@pytest.mark.parametrize("keep_grads", [True, False], ids=["kept", "leave"])
@pytest.mark.parametrize("lazy", [True, False])
def test_parks_after_amid_and_before_steps(tmp_path: Path, keep_grads: bool, lazy: bool) -> None:
    """A park waits for lanes that still use what was borrowed, and for the step that has it."""
    parameters = weights()
    device = SimulatedDevice(ROOM, lazy=lazy)
    with OnDevice(parameters, device=device, offload=borrowing(tmp_path, keep_grads=keep_grads)) as optimizer:
        train(optimizer, parameters, range(1))
        full = optimizer.metrics()["borrowed_bytes"]
        optimizer.park()
        assert optimizer.engine.is_parked
        optimizer.unpark()
        assert device.taken_bytes == 0
        train(optimizer, parameters, range(1, 2))

        of_engine: Any = optimizer.engine._parts.lanes

        def park() -> None:
            with contextlib.suppress(offload.ConfigError):  # gradients that have left are refused until zero_grad()
                optimizer.engine.park()

        plain, parks = of_engine.copy_out, threading.Thread(target=park)

        def copy_out(*arguments: Any) -> None:
            if parks.ident is None:
                assert device.taken_bytes > 0
                parks.start()
            plain(*arguments)

        of_engine.copy_out = copy_out
        train(optimizer, parameters, range(2, 3))
        parks.join()
        assert device.taken_bytes == 0

        backward(parameters, 3)
        with pytest.raises(offload.ConfigError, match="gradient"):
            optimizer.park()
        assert device.taken_bytes == 0
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.metrics()["borrowed_bytes"] == full
        assert device.taken_bytes == 0
        assert same(states(optimizer, parameters), on_cpu(range(4)))


@pytest.mark.parametrize("nth", [0, 3])
def test_a_step_that_is_aborted_leaves_nothing_borrowed(tmp_path: Path, nth: int) -> None:
    parameters = weights()
    device = SimulatedDevice(ROOM, seed=nth, delay_s=1e-4)
    with OnDevice(parameters, device=device, offload=borrowing(tmp_path, placement=0.5)) as optimizer:
        train(optimizer, parameters, range(1))
        of_engine: Any = optimizer.engine._parts.lanes
        left, plain = nth, of_engine.enqueue_update

        def run(*arguments: Any) -> None:
            nonlocal left
            if not left:
                raise offload.OffloadError("the GPU has had enough")
            left -= 1
            plain(*arguments)

        of_engine.enqueue_update = run
        with pytest.raises(offload.StepAbortedError):
            train(optimizer, parameters, range(1, 2))
        assert device.taken_bytes == 0


@pytest.mark.slow
def test_a_ctrl_c_at_any_line_of_an_iteration_leaves_nothing_borrowed(tmp_path: Path) -> None:
    parameters = weights()
    device = SimulatedDevice(ROOM)
    settings = borrowing(tmp_path, keep_grads=False, placement=0.5)
    with OnDevice(parameters, device=device, offload=settings) as optimizer:
        train(optimizer, parameters, range(1))

        def program(interrupted: AtLine) -> None:
            interrupted(lambda: train(optimizer, parameters, range(1)))
            optimizer.zero_grad()
            assert device.taken_bytes == 0, interrupted.where

        files = (gradients.__file__, lanes.__file__)  # what borrows and gives back on the caller's thread
        assert at_every_line(program, within=files) == {*files}
        train(optimizer, parameters, range(1))
        assert optimizer.metrics()["borrowed_bytes"] > 0
        assert device.taken_bytes == 0


def test_memory_is_taken_in_the_order_of_the_callers_own_stream(tmp_path: Path) -> None:
    """The user works on another stream than the default: what backward has used there is used by lanes behind it."""
    parameters = weights()
    device = SimulatedDevice(ROOM, seed=4, delay_s=1e-4, caller_is_host=False)
    asked: list[Any] = []
    plain = device.allocate
    device.allocate = lambda nbytes, caller=None: asked.append(caller) or plain(nbytes, caller)  # type: ignore
    with OnDevice(parameters, device=device, offload=borrowing(tmp_path)) as optimizer:
        train_behind(optimizer, parameters, device, range(1), clip=True)
        asked.clear()
        with device.stream("side"):
            train_behind(optimizer, parameters, device, range(1, 2), clip=True)
        assert asked
        assert set(asked) == {"side"}
        device.mark(DeviceLane.CALLER).wait()
        assert same(states(optimizer, parameters), on_cpu(range(2)))


def test_an_engine_that_is_open_before_backward(tmp_path: Path) -> None:
    """As under DeepSpeed: what is free then counts, and nothing of it is held."""
    parameters = weights()
    device = SimulatedDevice(ROOM)
    with OnDevice(parameters, device=device, offload=borrowing(tmp_path)) as optimizer:
        optimizer.state_for(parameters[0])
        assert device.taken_bytes == 0
        assert optimizer.engine.plan.gpu_slots > 0
        train(optimizer, parameters, range(2))
        assert device.taken_bytes == 0
        assert same(states(optimizer, parameters), on_cpu(range(2)))
