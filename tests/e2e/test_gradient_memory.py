"""Gradients that leave host memory for the paths: the bits of those that stay, in less memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror import same

import offload
from offload import ConfigError, InfeasiblePlanError, OffloadConfig

WIDTH = 128


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8))).to(torch.bfloat16)


def optimizer_of(
    layers: torch.nn.Module, folder: Path, memory: int | str | None = 0, **settings: Any
) -> offload.AdamW:
    chosen = {"host_memory": 0, "paths": [folder], "subgroup_numel": 8192, "gradient_memory": memory, **settings}
    return offload.AdamW(layers.named_parameters(), lr=1e-2, offload=OffloadConfig(**chosen))


def backward(layers: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers(torch.randn(4, WIDTH, generator=generator).bfloat16()).float().square().mean().backward()


def weights(layers: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in layers.parameters()]


def trained(folder: Path, memory: int | None, steps: int = 2) -> list[torch.Tensor]:
    layers = model()
    with optimizer_of(layers, folder, memory) as optimizer:
        for seed in range(steps):
            backward(layers, seed)
            optimizer.step()
            optimizer.zero_grad()
    return weights(layers)


@pytest.mark.parametrize("memory", [0, None])
@pytest.mark.parametrize("clips", [False, True])
def test_who_may_clip_gradients_that_have_left_is_told_once(
    memory: int | None, clips: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layers = model()
    with optimizer_of(layers, tmp_path, memory) as optimizer:
        for seed in range(3):
            backward(layers, seed)
            if clips:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    told = [record.getMessage() for record in caplog.records if "clip_grad_norm_" in record.getMessage()]
    assert len(told) == (memory == 0 and not clips)


def test_no_gradient_stays_in_grad_and_the_plan_says_what_leaves(tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer:
        backward(layers)
        assert all(parameter.grad is None for parameter in layers.parameters())
        plan = optimizer.plan.plan
        assert plan.budgets.gradient_bytes == plan.gradient_buffers * plan.gradient_buffer_bytes
        assert 0 < plan.gradient_buffers < len(plan.layout.subgroups)
        text = str(optimizer.plan)
        assert f"{plan.gradient_buffers} buffers of" in text
        assert "leave for the paths in backward" in text


@pytest.mark.parametrize("memory", ["1GiB", "auto"])
def test_gradients_that_all_fit_stay_where_they_were(memory: str, tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path, memory) as optimizer:
        backward(layers)
        assert all(parameter.grad is not None for parameter in layers.parameters())
        assert memory == "auto" or not optimizer.plan.plan.gradient_buffers


@pytest.mark.parametrize("passes", [1, 3])
def test_what_leaves_is_written_once_a_pass_and_read_once_more(passes: int, tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer:
        for step in range(4):
            for number in range(passes):
                backward(layers, 10 * step + number)
            optimizer.step()
            optimizer.zero_grad()
        moved = {"read": 0, "write": 0}
        for interval in optimizer.timeline():
            if interval.label.startswith("gradients of"):
                moved[interval.lane.partition(":")[0]] += interval.nbytes
        plan = optimizer.plan.plan
        left, whole = plan.path_gradient_bytes, sum(n for tiles in plan.gradient_tiles for _, _, n in tiles)
        assert left <= moved["read"] <= left + (passes - 1) * whole
        assert left <= moved["write"] <= left + (passes - 1) * whole
        if passes == 1:
            assert moved == {"read": left, "write": left}
        metrics = optimizer.metrics()
        assert metrics["lane/read:0/predicted_s"] > 0


def test_room_for_gradients_is_in_the_plan(tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path, None, checkpoints_kept=0) as optimizer:
        without = optimizer.plan.plan.storage_bytes
    place = {"path": tmp_path, "max_bytes": without}
    with pytest.raises(InfeasiblePlanError, match="state on storage"):
        optimizer_of(layers, tmp_path, 0, checkpoints_kept=0, paths=[place])


def test_gradients_that_are_put_into_grad_are_used(tmp_path: Path):
    inside, outside = model(), model()
    for layers, memory in ((inside, None), (outside, 0)):
        with optimizer_of(layers, tmp_path, memory) as optimizer:
            for parameter in layers.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
    assert same(weights(inside), weights(outside))


def test_a_wider_gradient_is_refused_by_name(tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer:
        parameter = layers[0].weight
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        with pytest.raises(ConfigError, match=r"gradient of 0\.weight"):
            optimizer.step()


@pytest.mark.parametrize("memory", [0, None])
def test_gradients_that_leave_for_an_earlier_optimizer_are_refused_by_name(memory: int | None, tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as earlier, optimizer_of(layers, tmp_path, memory) as later:
        with pytest.raises(ConfigError, match=r"gradient of 7\.bias.*close the earlier optimizer"):
            backward(layers)
        earlier.close()
        later.zero_grad()
        backward(layers)
        before = weights(layers)
        later.step()
        assert not same(weights(layers), before)


def test_an_optimizer_takes_the_place_of_one_that_nobody_holds(tmp_path: Path):
    layers = model()
    optimizer = optimizer_of(layers, tmp_path)
    optimizer = optimizer_of(layers, tmp_path)  # the earlier one is forgotten only after this one was made
    backward(layers)
    optimizer.step()
    optimizer.close()


def test_a_pass_that_is_interrupted_is_not_used_by_half(tmp_path: Path):
    layers = model()

    class Interrupted(Exception):
        pass

    with optimizer_of(layers, tmp_path) as optimizer:
        engine, calls = optimizer.engine, []
        ask = engine.gradients.arrived

        def arrived(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 5:
                raise Interrupted
            return ask(*arguments)

        engine.gradients.arrived = arrived
        with pytest.raises(Interrupted):
            backward(layers)
        engine.gradients.arrived = ask
        optimizer.zero_grad()
        backward(layers)
        optimizer.step()
    assert same(weights(layers), trained(tmp_path, None, steps=1))


def test_park_refuses_gradients_that_no_step_has_used(tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer:
        backward(layers, 0)
        with pytest.raises(ConfigError, match="park"):
            optimizer.park()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.park()
        backward(layers, 1)
        optimizer.step()
    assert same(weights(layers), trained(tmp_path, None))


def test_a_group_whose_subgroups_are_larger(tmp_path: Path):
    """Buffers become larger while they hold gradients that no step has used."""
    found = []
    for memory in (None, "20KiB"):
        layers = model()
        added = torch.nn.Linear(WIDTH, 3 * WIDTH)
        with optimizer_of(layers, tmp_path, memory) as optimizer:
            before = optimizer.plan.plan
            backward(layers, 0)
            optimizer.add_param_group({"params": [*added.named_parameters()]})
            added(torch.ones(1, WIDTH)).sum().backward()
            backward(layers, 1)
            optimizer.step()
            after = optimizer.plan.plan
            assert memory is None or after.gradient_buffer_bytes > before.gradient_buffer_bytes
            assert after.gradient_buffers >= before.gradient_buffers
        found.append(weights(layers) + weights(added))
    assert same(*found)


def test_two_threads_in_backward(tmp_path: Path):
    layers = torch.nn.ModuleList([model(), model()])
    with optimizer_of(layers, tmp_path) as optimizer:
        threads = [threading.Thread(target=backward, args=(part, 0)) for part in layers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.step()
    for part in layers:
        assert same(weights(part), trained(tmp_path, None, steps=1))


def test_a_zero_grad_that_is_interrupted_is_whole_or_not_at_all(tmp_path: Path):
    layers = model()
    with optimizer_of(layers, tmp_path) as optimizer:
        backward(layers, 5)
        thread = optimizer.engine._thread
        request = thread.request

        def interrupted(*arguments: Any, **options: Any) -> None:
            request(*arguments, **options)
            raise KeyboardInterrupt

        thread.request = interrupted
        with pytest.raises(KeyboardInterrupt):
            optimizer.zero_grad()
        thread.request = request
        backward(layers, 0)
        optimizer.step()
    assert same(weights(layers), trained(tmp_path, None, steps=1))
