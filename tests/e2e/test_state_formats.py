"""State in fewer bytes: the same bits whatever the placement, and nothing lost on the way through checkpoints."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror import same, same_bits, states
from simulated import OnDevice

import offload
from offload.errors import ConfigError
from offload.kernels import reference, rounding_keys
from offload.kernels.reference import SegmentTensors
from offload.protocols import SegmentFlag, StateFormat
from offload.rules import ADAMW
from offload.sim import SimulatedDevice

SIZES = [(70, 64), (3000,), (1,), (129, 33), (4096,)]
STEPS = 6


def weights(dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def train(optimizer: offload.AdamW, parameters: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        for parameter in parameters:
            parameter.grad = (
                torch.randn(parameter.shape, generator=generator).to(parameter.dtype).to(parameter.device)
            )
        optimizer.clip_grad_norm_(20.0)
        optimizer.step()
        optimizer.zero_grad()


def named(parameters: list[torch.nn.Parameter]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]


def run(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, steps: int = STEPS) -> list[torch.Tensor]:
    parameters = weights(dtype)
    settings = offload.OffloadConfig(state_format="compact16", **config)
    with offload.AdamW(named(parameters), lr=1e-2, offload=settings) as optimizer:
        train(optimizer, parameters, range(steps))
        return states(optimizer, parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_the_reference_s_update(dtype: torch.dtype) -> None:
    parameters, expected = weights(dtype), weights(dtype)
    # What the kernels' reference makes of the same gradients, parameter by parameter.
    own = [
        (p.detach().to(torch.float32).reshape(-1).clone(), [torch.zeros(p.numel(), dtype=torch.bfloat16)] * 2)
        for p in expected
    ]
    own = [(master, [state.clone() for state in pair]) for master, pair in own]
    settings = offload.OffloadConfig(state_format="compact16", subgroup_numel=4096, seed=7)
    with offload.AdamW(named(parameters), lr=1e-2, offload=settings) as optimizer:
        numbers = optimizer.engine._parts.tables.numbers
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            gradients = [torch.randn(p.shape, generator=generator).to(dtype) for p in parameters]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            optimizer.zero_grad()
            values = ADAMW.values({**ADAMW.defaults, "lr": 1e-2})
            for number, gradient in enumerate(gradients):
                master, pair = own[number]
                weight = None if dtype is torch.float32 else expected[number].detach().reshape(-1)
                reference.update(
                    SegmentTensors(
                        master=master,
                        state=tuple(pair),
                        gradient=gradient.reshape(-1),
                        weight=weight,
                        flags=SegmentFlag.ACTIVE | SegmentFlag.DECOUPLED_DECAY,
                        scalars=ADAMW.row(step + 1, values, 1.0),
                        state_format=StateFormat.COMPACT16,
                        rounding_key=int(rounding_keys(7, numbers[number], step + 1)[0]),
                    )
                )
        for parameter, (master, pair) in zip(parameters, own, strict=True):
            found = optimizer.state_for(parameter)
            for values, name in zip((master, *pair), ("master", "exp_avg", "exp_avg_sq"), strict=True):
                assert same_bits(found[name].reshape(-1), values.to(torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_do_not_depend_on_placement(dtype: torch.dtype, tmp_path: Path) -> None:
    expected = run({}, dtype)
    for number, subgroup_numel in enumerate((2048, 4096, 1 << 20)):
        path = tmp_path / str(number)
        path.mkdir()
        budgets = {"paths": [path], "host_memory": 20000 * number, "staging_memory": "256KiB" if number < 2 else None}
        assert same(run({**budgets, "subgroup_numel": subgroup_numel, "threads": 1 + number % 2}, dtype), expected)
    exact = weights(dtype)
    with offload.AdamW(named(exact), lr=1e-2) as optimizer:
        train(optimizer, exact, range(STEPS))
        assert not same(states(optimizer, exact), expected)


@pytest.mark.parametrize("placement", ["cpu", "gpu", 0.5])
def test_bits_are_the_same_on_a_gpu(placement: Any, tmp_path: Path) -> None:
    expected = run({})
    parameters = weights()
    settings = offload.OffloadConfig(
        state_format="compact16",
        placement=placement,
        paths=[tmp_path],
        host_memory="40KB",
        staging_memory="256KiB",
        subgroup_numel=2048,
        gpu_memory=0,
    )
    with OnDevice(named(parameters), device=SimulatedDevice(), lr=1e-2, offload=settings) as optimizer:
        train(optimizer, parameters, range(STEPS))
        assert same(states(optimizer, parameters), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("copy", [False, True])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(copy: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """The seed and each parameter's number are the checkpoint's, whatever the order and the seed of the new run."""
    expected = run({"seed": 3}, dtype)
    parameters = weights(dtype)
    (tmp_path / "paths").mkdir()
    settings = {
        "paths": [tmp_path / "paths"],
        "host_memory": "30KB",
        "staging_memory": "256KiB",
        "subgroup_numel": 4096,
    }
    first = offload.OffloadConfig(state_format="compact16", seed=3, **settings)
    with offload.AdamW(named(parameters), lr=1e-2, offload=first) as optimizer:
        train(optimizer, parameters, range(3))
        optimizer.save_checkpoint(tmp_path / "checkpoint", copy=copy)
    fresh = weights(dtype)
    second = offload.OffloadConfig(state_format="compact16", seed=99, **settings)
    with offload.AdamW(named(fresh), lr=1e-2, offload=second) as optimizer:
        optimizer.load_checkpoint(tmp_path / "checkpoint")
        train(optimizer, fresh, range(3, STEPS))
        assert same(states(optimizer, fresh), expected)


@pytest.mark.parametrize(("here", "there"), [("compact16", "exact"), ("exact", "compact16")])
def test_a_checkpoint_of_one_format_loads_into_the_other(here: str, there: str, tmp_path: Path) -> None:
    parameters = weights()
    with offload.AdamW(named(parameters), offload=offload.OffloadConfig(state_format=there)) as optimizer:
        train(optimizer, parameters, range(3))
        saved = [optimizer.state_for(parameter) for parameter in parameters]
        optimizer.save_checkpoint(tmp_path / "checkpoint")
    fresh = weights()
    with offload.AdamW(named(fresh), offload=offload.OffloadConfig(state_format=here)) as optimizer:
        optimizer.load_checkpoint(tmp_path / "checkpoint")
        for parameter, values in zip(fresh, saved, strict=True):
            found = optimizer.state_for(parameter)
            assert same_bits(found["master"], values["master"])
            for name in ("exp_avg", "exp_avg_sq"):
                wanted = values[name] if here == "exact" else values[name].to(torch.bfloat16).to(torch.float32)
                assert same_bits(found[name], wanted)


def test_state_takes_eight_bytes_a_parameter(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1 << 18, dtype=torch.bfloat16))]
    settings = offload.OffloadConfig(state_format="compact16", paths=[tmp_path], host_memory=0)
    with offload.AdamW(parameters, offload=settings) as optimizer:
        train(optimizer, parameters, range(2))
        assert optimizer.metrics()["state_bytes"] == 8 << 18
        assert optimizer.plan.plan.layout.rule.memory_cost == 20 / 8
        state = optimizer.state_dict()["state"][0]
        assert {tensor.dtype for name, tensor in state.items() if name != "step"} == {torch.float32}


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"state_format.*exact.*compact16"):
        offload.OffloadConfig(state_format="compact4")
    with pytest.raises(ConfigError, match="seed"):
        offload.OffloadConfig(seed=-1)


def piece(weight: torch.Tensor, start: int, whole: int) -> tuple[offload.Engine, torch.Tensor]:
    """Return an engine for a run of a parameter, and the memory of its gradient."""
    gradient = torch.zeros_like(weight)
    parameter = offload.Parameter("p", weight.numel(), offload.DtypeCode.BFLOAT16, 0, start, whole)
    config = offload.OffloadConfig(state_format="compact16", subgroup_numel=2048)
    engine = offload.Engine([parameter], config, gradient_slots=False)
    engine.bind_weight(0, weight.data_ptr())
    engine.bind_gradient(0, gradient.data_ptr(), offload.DtypeCode.BFLOAT16)
    return engine, gradient


def test_bits_do_not_depend_on_how_a_parameter_is_sharded() -> None:
    numel, groups = 10_000, [offload.GroupScalars(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)]
    found = []
    for cuts in ([0, numel], [0, 3_333, 3_334, 8_192, numel]):
        weight = torch.linspace(-1, 1, numel).to(torch.bfloat16)
        pieces = [(first, last, *piece(weight[first:last], first, numel)) for first, last in pairwise(cuts)]
        for step in range(STEPS):
            values = torch.randn(numel, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            for first, last, engine, gradient in pieces:
                gradient.copy_(values[first:last])
                engine.step(groups)
        states = [engine.read_state([0])[0] for *_, engine, _ in pieces]
        found.append([weight, *(torch.cat([state[name] for state in states]) for name in states[0])])
        for *_, engine, _ in pieces:
            engine.close()
    assert same(*found)


@pytest.mark.parametrize("here", ["compact16", "exact"])
def test_masters_that_are_weights_are_saved_whole(here: str, tmp_path: Path) -> None:
    """They are fp32 in every format, and so twice as large as the tiles of what lies beside them."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 10_000))
    settings = offload.OffloadConfig(state_format=here, paths=[tmp_path], host_memory=0, subgroup_numel=4096)
    with offload.AdamW([parameter], offload=settings) as optimizer:
        train(optimizer, [parameter], range(2))
        saved = parameter.detach().clone()
        optimizer.save_checkpoint(tmp_path / "checkpoint")
        optimizer.wait_checkpoint()
        parameter.data.zero_()
        optimizer.load_checkpoint(tmp_path / "checkpoint")
        assert same_bits(parameter.detach(), saved)
