"""A session over a real GPU (`-m gpu`): what `test_simulated_gpu.py` shows, on the device itself."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror import Mirror
from own_process import in_own_process

import offload

pytestmark = pytest.mark.gpu

SIZES = ((700, 400), (300_000,), (17,), (250, 1000), (), (4096,))
PLACEMENTS = ["cpu", "gpu", "auto", 0.25, 0.5]


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")


def weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> list[torch.nn.Parameter]:
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
    mirror = Mirror([{**_defaults(), "params": weights(dtype=dtype, device="cpu")}], decoupled=True)
    for step in range(steps):
        total = gradients(step * passes, dtype)
        for again in range(1, passes):
            total = [a + b for a, b in zip(total, gradients(step * passes + again, dtype), strict=True)]
        norm = mirror.norm([total])
        mirror.step([total], min(1.0, 1.0 / (norm + 1e-6)))
    return mirror


def _defaults() -> dict[str, Any]:
    return {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def check(optimizer: offload.AdamW, parameters: list[torch.nn.Parameter], mirror: Mirror) -> None:
    mirror.assert_same(optimizer, [{"params": parameters}])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_recorded_gradients_give_the_bits_of_the_reference(
    tmp_path: Path, dtype: torch.dtype, keep_grads: bool, placement: str | float
) -> None:
    parameters = weights(dtype=dtype)
    settings = config(tmp_path, placement=placement, keep_grads=keep_grads)
    with offload.AdamW(parameters, offload=settings) as optimizer:
        train(optimizer, parameters, range(5), passes=2)
        check(optimizer, parameters, expected(5, dtype, passes=2))


@pytest.mark.parametrize("gpu_memory", [0, 4_000_000, "auto"])
def test_homes_do_not_change_the_bits(tmp_path: Path, gpu_memory: int | str) -> None:
    parameters = weights()
    with offload.AdamW(parameters, offload=config(tmp_path, gpu_memory=gpu_memory)) as optimizer:
        train(optimizer, parameters, range(4))
        check(optimizer, parameters, expected(4, torch.bfloat16))


def test_a_checkpoint_goes_to_the_cpu_and_back(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    parameters = weights()
    with offload.AdamW(parameters, offload=config(tmp_path / "store")) as optimizer:
        train(optimizer, parameters, range(2))
        optimizer.save_checkpoint(tmp_path / "checkpoint", copy=True)
        train(optimizer, parameters, range(2, 4))
        optimizer.wait_checkpoint()
        check(optimizer, parameters, expected(4, torch.bfloat16))
    for device in ("cpu", "cuda"):
        again = weights(seed=9, device=device)
        settings = None if device == "cpu" else config(tmp_path / "store", placement="gpu")
        with offload.AdamW(again, offload=settings) as optimizer:
            optimizer.load_checkpoint(tmp_path / "checkpoint")
            train(optimizer, again, range(2, 4))
            check(optimizer, again, expected(4, torch.bfloat16))


def _losses(folder: Path, placement: str | float, *, keep_grads: bool) -> list[float]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(512, 256), layer, torch.nn.Linear(256, 512)).cuda().bfloat16()
    settings = config(folder, placement=placement, keep_grads=keep_grads, gpu_memory=0)
    losses = []
    generator = torch.Generator("cpu").manual_seed(1)
    with offload.AdamW(model.parameters(), lr=1e-3, offload=settings) as optimizer:
        for _ in range(20):
            tokens = torch.randint(512, (8, 33), generator=generator).cuda()
            logits = model(tokens[:, :-1]).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def _all_losses(folder: Path) -> list[list[float]]:
    torch.use_deterministic_algorithms(True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return [_losses(folder, place, keep_grads=keep) for place in PLACEMENTS for keep in (True, False)]


def test_training_is_the_same_for_every_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # looked at once, at a process's first matrix product
    runs = in_own_process(_all_losses, tmp_path)
    assert runs[0][-1] < runs[0][0]
    assert all(run == runs[0] for run in runs)


def test_gradients_that_leave_free_their_memory(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1 << 24, device="cuda", dtype=torch.bfloat16))
    settings = config(tmp_path, keep_grads=False, placement="cpu", gpu_memory=0, host_memory="1GiB")
    with offload.AdamW([parameter], offload=settings) as optimizer:
        for _ in range(2):
            torch.autograd.backward([parameter], [torch.ones_like(parameter)])
            optimizer.step()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.autograd.backward([parameter], [torch.ones_like(parameter)])
        torch.cuda.synchronize()
        torch.autograd.backward([parameter], [torch.ones_like(parameter)])  # the first has been copied by now
        torch.cuda.synchronize()
        optimizer.engine._parts.gradients.on_gpu.in_transit.clear()  # type: ignore[union-attr]
        assert torch.cuda.memory_allocated() <= before + parameter.numel()


def test_loss_scaling(tmp_path: Path) -> None:
    parameters = weights(dtype=torch.float16)
    scaler = offload.GradScaler("cuda", init_scale=256.0, growth_interval=100)
    settings = config(tmp_path, keep_grads=False)
    with offload.AdamW(parameters, offload=settings) as optimizer:
        for step in range(3):
            scale = scaler.scale(torch.ones((), device="cuda")).item()
            drawn = [(g.float() * scale).half() for g in gradients(step, torch.float16)]
            if step == 1:
                drawn[0].view(-1)[5] = torch.nan
            torch.autograd.backward(parameters, [g.cuda() for g in drawn])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 128.0
        assert optimizer.engine.step_count(0) == 2


def test_memory_that_cannot_be_pinned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from offload.engine.accelerator import AcceleratorDevice

    device = AcceleratorDevice()
    try:
        with pytest.raises(offload.OffloadError, match="cannot be pinned"):
            device.pin(4096, 4096)  # nothing is mapped there
        assert torch.ones(3, device="cuda").sum().item() == 3  # the refusal is not blamed on the next kernel
    finally:
        device.close()


def test_marks_tell_the_host_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.engine import accelerator
    from offload.protocols import DeviceLane

    monkeypatch.setattr(accelerator, "REBASE_S", 0.0)
    device = accelerator.AcceleratorDevice()
    try:
        times = []
        for _ in range(5):
            before_s = time.monotonic()
            mark = device.mark(DeviceLane.H2D)
            mark.wait()
            times.append(mark.time_s())
            assert before_s - 1e-3 <= times[-1] <= time.monotonic() + 1e-3
        assert times == sorted(times)
    finally:
        device.close()


def test_a_default_device_is_not_where_the_host_works(tmp_path: Path) -> None:
    with torch.device("cuda"):
        parameters = weights()
        with offload.AdamW(parameters, offload=config(tmp_path, keep_grads=False)) as optimizer:
            train(optimizer, parameters, range(2), passes=2)
            assert optimizer.state_for(parameters[0])["exp_avg"].device.type == "cpu"
