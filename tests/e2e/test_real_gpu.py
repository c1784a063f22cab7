"""A session over a device of torch's: what `test_simulated_gpu.py` shows, on the device itself.

On the test accelerator here, on a real GPU with `-m gpu`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import CUDA, LATE, LATE_FULL, the_device
from mirror import Mirror

import offload
from offload.device import accelerator
from offload.device.accelerator import AcceleratorDevice
from offload.protocols import DeviceLane

SIZES = ((700, 400), (300_000,), (17,), (250, 1000), (), (4096,))
PLACEMENTS = ["cpu", "gpu", "auto", 0.25, 0.5]


@pytest.fixture(params=[LATE[0], CUDA[0]])
def device(request: pytest.FixtureRequest) -> torch.device:
    return the_device(request.param)


def weights(
    device: torch.device | str, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> list[torch.nn.Parameter]:
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = [torch.randn(size, generator=generator, device="cpu").to(dtype) for size in SIZES]
    return [torch.nn.Parameter(tensor.to(device)) for tensor in drawn]


def gradients(seed: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(1000 + seed)
    return [torch.randn(size, generator=generator, device="cpu").to(dtype) for size in SIZES]


def config(folder: Path, **changes: Any) -> offload.OffloadConfig:
    chosen = {"host_memory": 6_000_000, "gpu_memory": 2_000_000, "subgroup_numel": 65536, "placement": 0.5}
    return offload.OffloadConfig(**{**chosen, "paths": [folder], **changes})


def train(optimizer: offload.AdamW, parameters: list[torch.nn.Parameter], steps: range, passes: int = 1) -> None:
    for step in steps:
        for again in range(passes):
            drawn = gradients(step * passes + again, parameters[0].dtype)
            torch.autograd.backward(parameters, [g.to(parameters[0].device) for g in drawn])
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def expected(steps: int, dtype: torch.dtype, passes: int = 1) -> Mirror:
    mirror = Mirror(weights("cpu", dtype=dtype), **_defaults())
    for step in range(steps):
        total = gradients(step * passes, dtype)
        for again in range(1, passes):
            total = [a + b for a, b in zip(total, gradients(step * passes + again, dtype), strict=True)]
        norm = mirror.norm(total)
        mirror.step(total, min(1.0, 1.0 / (norm + 1e-6)))
    return mirror


def _defaults() -> dict[str, Any]:
    return {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


as_in_training = pytest.mark.parametrize("device", [LATE_FULL[0], CUDA[0]], indirect=True)
"""What `accelerator/test_training.py` shows of the test accelerator in less time."""


@as_in_training
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_recorded_gradients_give_the_bits_of_the_reference(
    device: torch.device, tmp_path: Path, dtype: torch.dtype, keep_grads: bool, placement: str | float
) -> None:
    parameters = weights(device, dtype=dtype)
    settings = config(tmp_path, placement=placement, keep_grads=keep_grads)
    with offload.AdamW(parameters, offload=settings) as optimizer:
        train(optimizer, parameters, range(5), passes=2)
        expected(5, dtype, passes=2).assert_same(optimizer, parameters)


@as_in_training
def test_a_checkpoint_goes_to_the_cpu_and_back(device: torch.device, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    parameters = weights(device)
    with offload.AdamW(parameters, offload=config(tmp_path / "store")) as optimizer:
        train(optimizer, parameters, range(2))
        optimizer.save_checkpoint(tmp_path / "checkpoint", copy=True)
        train(optimizer, parameters, range(2, 4))
        optimizer.wait_checkpoint()
        expected(4, torch.bfloat16).assert_same(optimizer, parameters)
    for place in ("cpu", device):
        again = weights(place, seed=9)
        settings = None if place == "cpu" else config(tmp_path / "store", placement="gpu")
        with offload.AdamW(again, offload=settings) as optimizer:
            optimizer.load_checkpoint(tmp_path / "checkpoint")
            train(optimizer, again, range(2, 4))
            expected(4, torch.bfloat16).assert_same(optimizer, again)


def test_gradients_that_leave_free_their_memory(device: torch.device, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 24, device=device, dtype=torch.bfloat16))
    settings = config(tmp_path, keep_grads=False, placement="cpu", gpu_memory=0, host_memory="1GiB")
    with offload.AdamW([parameter], offload=settings) as optimizer:
        for _ in range(2):
            torch.autograd.backward([parameter], [torch.ones_like(parameter)])
            optimizer.step()
        gc.collect()
        before = torch.accelerator.memory_allocated(device)
        torch.autograd.backward([parameter], [torch.ones_like(parameter)])
        torch.accelerator.synchronize(device)
        torch.autograd.backward([parameter], [torch.ones_like(parameter)])  # the first has been copied by now
        torch.accelerator.synchronize(device)
        optimizer.engine._parts.gradients.in_transit.clear()  # type: ignore[attr-defined]
        assert torch.accelerator.memory_allocated(device) <= before + parameter.numel()


@as_in_training
def test_loss_scaling(device: torch.device, tmp_path: Path) -> None:
    parameters = weights(device, dtype=torch.float16)
    scaler = offload.GradScaler(device.type, init_scale=256.0, growth_interval=100)
    settings = config(tmp_path, keep_grads=False)
    with offload.AdamW(parameters, offload=settings) as optimizer:
        for step in range(3):
            scale = scaler.scale(torch.ones((), device=device)).item()
            drawn = [(g.float() * scale).half() for g in gradients(step, torch.float16)]
            if step == 1:
                drawn[0].view(-1)[5] = torch.nan
            torch.autograd.backward(parameters, [g.to(device) for g in drawn])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 128.0
        assert optimizer.engine.step_count(0) == 2


@pytest.fixture
def made(device: torch.device) -> Iterator[AcceleratorDevice]:
    made = AcceleratorDevice(device)
    yield made
    made.close()


def test_memory_that_cannot_be_pinned(device: torch.device, made: AcceleratorDevice) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8, device="cpu")
    address = memory.data_ptr()
    made.pin(address, 4096)
    try:
        with pytest.raises(offload.OffloadError, match="cannot be pinned"):
            made.pin(address, 4096)
    finally:
        made.unpin(address)
    assert torch.ones(3, device=device).sum().item() == 3  # the refusal is not blamed on the next kernel


def test_marks_tell_the_host_s_time(made: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "REBASE_S", 0.0)
    times = []
    for _ in range(5):
        before_s = time.monotonic()
        mark = made.mark(DeviceLane.H2D)
        mark.wait()
        times.append(mark.time_s())
        assert before_s - 1e-3 <= times[-1] <= time.monotonic() + 1e-3
    assert times == sorted(times)
