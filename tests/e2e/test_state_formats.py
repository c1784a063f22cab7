"""State in fewer bytes: the same bits whatever the placement, and nothing lost on the way through checkpoints."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror import same, same_bits, states

import offload
from offload.errors import ConfigError
from offload.formats import COMPACT8
from offload.kernels.reference import minifloat
from offload.rules import GroupScalars

SIZES = [(70, 64), (3000,), (1,), (129, 33), (4096,)]
STEPS = 6
FORMS = ["compact16", "compact8"]


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_that_is_read_and_written_back_is_the_same(form: str, dtype: torch.dtype) -> None:
    parameters = weights(dtype)
    settings = offload.OffloadConfig(state_format=form, subgroup_numel=4096)
    with offload.AdamW(named(parameters), lr=1e-2, offload=settings) as optimizer:
        train(optimizer, parameters, range(STEPS))
        before = states(optimizer, parameters)
        optimizer.load_state_dict(optimizer.state_dict())
        assert same(states(optimizer, parameters), before)
        optimizer.state[parameters[0]]["exp_avg"] = optimizer.state_for(parameters[0])["exp_avg"]  # not alone there
        assert same(states(optimizer, parameters), before)
        wrong = optimizer.state_dict()
        wrong["state"][0]["exp_avg_sq"][3] = -1.0
        wrong["state"][1].pop("master", None)
        del wrong["state"][2]
        with pytest.raises(ConfigError, match="exp_avg_sq"):
            optimizer.load_state_dict(wrong)
        assert same(states(optimizer, parameters), before)


@pytest.mark.parametrize("values", [float("nan"), float("inf"), 3e38, 1e-45, 0.0])
def test_extreme_state_does_not_spread_beyond_its_block(values: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(128, 64, dtype=torch.bfloat16))
    settings = offload.OffloadConfig(state_format="compact8")
    with offload.AdamW([("p", parameter)], offload=settings) as optimizer:
        train(optimizer, [parameter], range(2))
        before = optimizer.state_for(parameter)
        changed = before["exp_avg"].clone()
        changed[5, 7] = values
        optimizer.state[parameter]["exp_avg"] = changed
        after = optimizer.state_for(parameter)
        assert same_bits(after["exp_avg_sq"], before["exp_avg_sq"])
        assert same_bits(after["exp_avg"][:5], before["exp_avg"][:5])
        assert same_bits(after["exp_avg"][6:], before["exp_avg"][6:])
        assert bool(after["exp_avg"][5].isnan().all()) is (values != values or values == float("inf"))


def test_state_takes_eight_bytes_a_parameter(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1 << 18, dtype=torch.bfloat16))]
    settings = offload.OffloadConfig(state_format="compact16", paths=[tmp_path], host_memory=0)
    with offload.AdamW(parameters, offload=settings) as optimizer:
        train(optimizer, parameters, range(2))
        assert optimizer.metrics()["state_bytes"] == 8 << 18
        assert optimizer.plan.plan.layout.state.memory_cost == 20 / 8
        state = optimizer.state_dict()["state"][0]
        assert {tensor.dtype for name, tensor in state.items() if name != "step"} == {torch.float32}


def test_what_shares_scales_takes_five_bytes_and_the_plan_says_what_does_not(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(512, 512), "up": torch.nn.Linear(1024, 1024)})
    parameters = [(name, p) for name, p in model.to(torch.bfloat16).named_parameters()]
    settings = offload.OffloadConfig(state_format="compact8", paths=[tmp_path], host_memory=0)
    with offload.AdamW(parameters, offload=settings) as optimizer:
        train(optimizer, [p for _, p in parameters], range(2))
        layout = optimizer.plan.plan.layout
        assert [p.exact for p in layout.parameters] == [True, False, True]
        assert layout.state.item_bytes == 5.03125
        # The matrix, and in subgroups of their own what is exact: the embedding and the bias.
        found = Counter(dict.fromkeys(("exact", "compact8"), 0))
        for subgroup in layout.subgroups:
            found[subgroup.state.format.name] += subgroup.state_bytes
        assert found == {"exact": 12 * (512 * 512 + 1024), "compact8": 5 << 20 | 1 << 15}
        text = str(optimizer.plan)
        assert "12 bytes each" in text
        assert "5.031 bytes each" in text
    with offload.AdamW(
        parameters, offload=offload.OffloadConfig(state_format="compact8", exact_names=[])
    ) as optimizer:
        assert [p.exact for p in optimizer.plan.plan.layout.parameters] == [False, False, True]


def test_embeddings_without_names_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    parameter = torch.nn.Parameter(torch.zeros(100, 64))
    with offload.AdamW([parameter], offload=offload.OffloadConfig(state_format="compact8")) as optimizer:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(100, 64))]})
        assert optimizer.plan.plan.layout.state.format is COMPACT8
    assert caplog.text.count("embeddings cannot be told") == 1


@pytest.mark.parametrize("kind", [offload.AdamW, offload.Adagrad])
def test_an_eps_of_0_is_refused_where_roots_become_0(kind: Any) -> None:
    """A moment of 0 would be divided by a root of 0. A step that finds such an eps changes nothing."""
    settings = offload.OffloadConfig(state_format="compact8")
    with pytest.raises(ConfigError, match=r"eps: 0\.0 cannot be used; with state_format compact8"):
        kind(named(weights()), eps=0.0, offload=settings)
    parameters = weights()
    with kind(named(parameters), offload=settings) as optimizer:
        train(optimizer, parameters, range(2))
        before = states(optimizer, parameters)
        optimizer.param_groups[0]["eps"] = 1e-46
        with pytest.raises(ConfigError, match="eps: 1e-46"):
            train(optimizer, parameters, range(2, 3))
        assert same(before, states(optimizer, parameters))
        optimizer.param_groups[0]["eps"] = 1e-8
        train(optimizer, parameters, range(2, 3))
        after = states(optimizer, parameters)
    parameters = weights()
    with kind(named(parameters), offload=settings) as optimizer:
        train(optimizer, parameters, range(2))
        optimizer.param_groups[0]["eps"] = 1e-8
        train(optimizer, parameters, range(2, 3))
        assert same(after, states(optimizer, parameters))
    with kind(named(weights()), eps=0.0, offload=offload.OffloadConfig(state_format="compact16")):
        pass


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"state_format.*exact.*compact16"):
        offload.OffloadConfig(state_format="compact4")
    with pytest.raises(ConfigError, match="exact_names"):
        offload.OffloadConfig(exact_names="*embed*")
    with pytest.raises(ConfigError, match="seed"):
        offload.OffloadConfig(seed=-1)


def piece(weight: torch.Tensor, start: int, whole: int, form: str) -> tuple[offload.Engine, torch.Tensor]:
    """Return an engine for a run of a parameter, and the memory of its gradient."""
    gradient = torch.zeros_like(weight)
    parameter = offload.Parameter("p", weight.numel(), offload.DtypeCode.BFLOAT16, 0, start, whole)
    config = offload.OffloadConfig(state_format=form, subgroup_numel=4096)
    engine = offload.Engine([parameter], config, gradient_slots=False)
    engine.bind_weight(0, weight.data_ptr())
    engine.gradients.bind(0, gradient.data_ptr(), offload.DtypeCode.BFLOAT16)
    return engine, gradient


@pytest.mark.parametrize(
    ("form", "inner"), [("compact16", [3_333, 3_334, 8_192]), ("compact8", [64, 4_160, 8_192, 9_984])]
)
def test_bits_do_not_depend_on_how_a_parameter_is_sharded(form: str, inner: list[int]) -> None:
    """In compact8 as long as no block is cut: one that is has scales for each of its parts."""
    numel, groups = 10_000, [GroupScalars(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)]
    found = []
    for cuts in ([0, numel], [0, *inner, numel]):
        weight = torch.linspace(-1, 1, numel).to(torch.bfloat16)
        pieces = [(first, last, *piece(weight[first:last], first, numel, form)) for first, last in pairwise(cuts)]
        for step in range(STEPS):
            values = torch.randn(numel, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            for first, last, engine, gradient in pieces:
                gradient.copy_(values[first:last])
                engine.step(groups)
        states = [engine.state.read([0])[0] for *_, engine, _ in pieces]
        found.append([weight, *(torch.cat([state[name] for state in states]) for name in states[0])])
        for *_, engine, _ in pieces:
            engine.close()
    assert same(*found)


def test_an_embedding_that_comes_later_fits_into_the_slots_that_there_are(tmp_path: Path) -> None:
    first, later = (torch.nn.Parameter(torch.zeros(1024, 512, dtype=torch.bfloat16)) for _ in range(2))
    settings = offload.OffloadConfig(
        state_format="compact8", paths=[tmp_path], host_memory=0, staging_memory="512KiB"
    )
    with offload.AdamW([("up", first)], offload=settings) as optimizer:
        train(optimizer, [first], range(1))
        slot_bytes = optimizer.plan.plan.slot_bytes
        optimizer.add_param_group({"params": [("embed", later)]})
        train(optimizer, [first, later], range(1, 3))
        plan = optimizer.plan.plan
        assert plan.slot_bytes == slot_bytes
        assert [p.exact for p in plan.layout.parameters] == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nobody_decodes_with_what_defines_the_numbers(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a hundred times as long as native code, and as many times the memory."""

    def refused(*_: Any) -> Any:
        raise AssertionError("the reference was called")

    for name in ("encode", "decode", "split_master", "join_master"):
        monkeypatch.setattr(minifloat, name, refused)

    def made() -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.linspace(-1, 1, 90_000).reshape(300, 300).to(dtype))

    parameter, other = made(), made()
    with offload.AdamW([("p", parameter)], offload=offload.OffloadConfig(state_format="compact8")) as optimizer:
        train(optimizer, [parameter], range(2))
        before = states(optimizer, [parameter])
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.save_checkpoint(tmp_path / "checkpoint")
    settings = offload.OffloadConfig(state_format="compact8", subgroup_numel=1 << 15)
    with offload.AdamW([("p", other)], offload=settings) as optimizer:
        optimizer.load_checkpoint(tmp_path / "checkpoint")
        assert same(states(optimizer, [other]), before)
