"""State of frozen parameters: a checkpoint's is kept whatever requires a gradient now, and what has none begins anew.

The reference never freezes: a step updates what has a gradient then, as torch's optimizers do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import Model, local, on_ranks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import offload
from offload.checkpoint.exchange import export_safetensors

SHAPES = {"a": (64, 33), "b": (70,), "c": (8, 16), "d": (5, 7), "none": (0, 4)}
DTYPES = {"b": torch.float32, "d": torch.float16}
History = list[dict[str, torch.Tensor]]
"""The gradients of each step, of what had one."""


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            drawn = torch.randn(shape, generator=generator).to(DTYPES.get(name, torch.bfloat16))
            self.register_parameter(name, torch.nn.Parameter(drawn))


KINDS: dict[str, Callable[..., Any]] = {
    "SGD": partial(offload.SGD, momentum=0.9),
    "Muon": offload.Muon,
    "wrapped": partial(offload.wrap, torch.optim.NAdam),
}
"""What `test_programs.py` does not draw, and one that files of state have; it freezes all else as it goes."""


def made(kind: str, params: Any, **settings: Any) -> Any:
    return KINDS[kind](params, lr=1e-2, offload=offload.OffloadConfig(**settings))


def state_of(optimizer: Any, model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def same(left: dict[str, dict[str, Any]], right: dict[str, dict[str, Any]]) -> bool:
    ones, others = (
        {(name, key): torch.as_tensor(value) for name, entry in states.items() for key, value in entry.items()}
        for states in (left, right)
    )
    return ones.keys() == others.keys() and all(torch.equal(value, others[key]) for key, value in ones.items())


def reference(kind: str, history: History) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Return weights and state after a history, of an optimizer in memory that knows nothing of freezing."""
    model = Weights()
    with made(kind, model.named_parameters()) as optimizer:
        for gradients in history:
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name].clone() if name in gradients else None
            optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}, state_of(optimizer, model)


def backward(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Give parameters that require one a gradient, by autograd."""
    generator, given = torch.Generator().manual_seed(seed), {}
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.requires_grad:
            torch.autograd.backward([parameter], [drawn])
            given[name] = drawn
    return given


def step(optimizer: Any, model: torch.nn.Module, history: History) -> None:
    history.append(backward(model, len(history)))
    optimizer.step()
    optimizer.zero_grad()


def check(kind: str, optimizer: Any, model: torch.nn.Module, history: History) -> None:
    weights, state = reference(kind, history)
    assert state.keys() == {name for gradients in history for name in gradients}
    assert same(state_of(optimizer, model), state)
    assert all(torch.equal(p.detach(), weights[name]) for name, p in model.named_parameters())


def freeze(model: torch.nn.Module, *names: str) -> None:
    """Freeze some parameters, and thaw all others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)


# Ways to save and to resume


def by_checkpoint(folder: Path, optimizer: Any, model: torch.nn.Module) -> Callable[..., None]:
    optimizer.save_checkpoint(folder, model=model)
    optimizer.wait_checkpoint()

    def load(optimizer: Any, model: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer.load_checkpoint(folder, model=model)

    return load


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def by_state_dict(folder: Path, optimizer: Any, model: torch.nn.Module) -> Callable[..., None]:
    weights, state = weights_of(model), optimizer.state_dict()

    def load(optimizer: Any, model: torch.nn.Module) -> None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)

    return load


def by_file(folder: Path, optimizer: Any, model: torch.nn.Module) -> Callable[..., None]:
    optimizer.save_checkpoint(folder)
    optimizer.wait_checkpoint()
    weights, file = weights_of(model), folder.with_suffix(".safetensors")
    export_safetensors(folder, file)

    def load(optimizer: Any, model: torch.nn.Module) -> None:
        model.load_state_dict(weights)
        optimizer.import_state(file)

    return load


WAYS = {"checkpoint": by_checkpoint, "state_dict": by_state_dict, "file": by_file}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("SGD", "file"),
        *((kind, way) for kind in ("Muon", "wrapped") for way in ("checkpoint", "state_dict")),
    ],
)
def test_state_of_what_is_frozen_comes_back(kind: str, way: str, tmp_path: Path) -> None:
    """Other parameters are frozen when it is saved than when it is loaded, and all are thawed afterwards."""
    model, history = Weights(), History()
    if kind == "wrapped":
        del model.none  # of which a class keeps nothing
    (tmp_path / "path").mkdir()
    settings = {"host_memory": 0, "paths": [tmp_path / "path"], "subgroup_numel": 4096}
    optimizer = made(kind, model.named_parameters(), **settings)
    for frozen in ((), ("a", "d"), ("c",), ("a", "d")):
        freeze(model, *frozen)
        step(optimizer, model, history)
    load = WAYS[way](tmp_path / "ck", optimizer, model)
    step(optimizer, model, [*history])  # which is lost
    optimizer.close()
    freeze(model, "b", "d")
    optimizer = made(kind, model.named_parameters(), **settings)
    freeze(model, "c", "d")
    load(optimizer, model)
    check(kind, optimizer, model, history)
    freeze(model)
    step(optimizer, model, history)
    check(kind, optimizer, model, history)
    optimizer.close()


def gradient(parameter: torch.Tensor, value: float = 1.0) -> None:
    parameter.grad = torch.full_like(parameter, value)


def saved(folder: Path, count: int, **settings: Any) -> list[torch.nn.Parameter]:
    """Return parameters of one step, whose checkpoint is in a folder."""
    parameters = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(count)]
    with offload.AdamW(named(parameters), offload=settings) as optimizer:
        for parameter in parameters:
            gradient(parameter)
        optimizer.step()
        optimizer.save_checkpoint(folder, copy=True)
        optimizer.wait_checkpoint()
        optimizer.zero_grad()
    return parameters


def named(parameters: list[torch.nn.Parameter]) -> list[tuple[str, torch.nn.Parameter]]:
    return [*zip("abcde"[: len(parameters)], parameters, strict=True)]


def test_state_of_a_name_that_no_group_has_is_refused_by_name(tmp_path: Path) -> None:
    """As where the frozen are left out of the groups."""
    a, b = saved(tmp_path / "ck", 2)
    export_safetensors(tmp_path / "ck", tmp_path / "file")
    before = b.detach().clone()
    with offload.AdamW([("b", b)]) as optimizer:
        for load, path in ((optimizer.load_checkpoint, "ck"), (optimizer.import_state, "file")):
            with pytest.raises(offload.CheckpointError, match="has state of a, which no parameter group has"):
                load(tmp_path / path)
        assert torch.equal(b, before)
        assert not optimizer.state
    groups = {
        "has state of a, which no parameter group has": [("b", b.requires_grad_(False))],
        "of another model: it has no c; it has a, b": [("a", a), ("c", torch.nn.Parameter(torch.ones(64, 64)))],
    }
    for words, group in groups.items():
        with offload.AdamW(group) as optimizer, pytest.raises(offload.CheckpointError, match=words):
            optimizer.load_checkpoint(tmp_path / "ck")


def test_a_parameter_that_is_new_begins_anew_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parameters = [*saved(tmp_path / "ck", 2), torch.nn.Parameter(torch.ones(64, 64))]
    with offload.AdamW(named(parameters)) as optimizer:
        for parameter in parameters:
            gradient(parameter)
        optimizer.step()
        optimizer.load_checkpoint(tmp_path / "ck")
        assert "has no state of c: it begins anew" in caplog.text
        assert [p in optimizer.state for p in parameters] == [True, True, False]
        for parameter in parameters:
            gradient(parameter)
        optimizer.step()
        assert [float(optimizer.state[p]["step"]) for p in parameters] == [2, 2, 1]
        assert torch.equal(optimizer.state[parameters[2]]["exp_avg"], torch.full((64, 64), 0.1))


def test_values_that_state_starts_from_are_there_anew(tmp_path: Path) -> None:
    a, b = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    made = partial(offload.Adagrad, [("a", a), ("b", b)], initial_accumulator_value=0.5)
    b.requires_grad_(False)
    with made() as optimizer:
        gradient(a)
        optimizer.step()
        b.requires_grad_(True)
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
    with made() as optimizer:
        gradient(b)
        optimizer.step()
        optimizer.load_checkpoint(tmp_path / "ck")
        assert float(optimizer.state_for(b)["sum"][0, 0]) == 0.5
        assert float(optimizer.state_for(a)["sum"][0, 0]) == 1.5


def test_without_room_nothing_is_bound_and_nothing_has_changed(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "ck", 2)
    a.requires_grad_(False)
    path = {"path": tmp_path, "max_bytes": 150_000}
    with offload.AdamW(
        named([a, b]), offload={"host_memory": 0, "paths": [path], "checkpoints_kept": 0}
    ) as optimizer:
        gradient(b)
        optimizer.step()
        before = b.detach().clone(), state_of(optimizer, torch.nn.ParameterDict({"a": a, "b": b}))
        with pytest.raises(offload.InfeasiblePlanError):
            optimizer.load_checkpoint(tmp_path / "ck")
        assert torch.equal(b, before[0])
        assert same(state_of(optimizer, torch.nn.ParameterDict({"a": a, "b": b})), before[1])
        gradient(b)
        optimizer.step()
        assert float(optimizer.state[b]["step"]) == 2


def test_what_a_frozen_parameter_without_state_is_told(tmp_path: Path) -> None:
    a, b = (torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2))
    with offload.AdamW(named([a.requires_grad_(False), b])) as optimizer:
        gradient(b)
        optimizer.step()
        with pytest.raises(offload.ConfigError, match=r"frozen \(requires_grad=False\), and has no state"):
            optimizer.state_for(a)
        assert "frozen" not in str(optimizer.plan)
        state = optimizer.state_dict()
        state["state"][0] = {name: value.clone() for name, value in state["state"][1].items()}
        optimizer.load_state_dict(state)
        assert "frozen         32.0 KiB  of the state" in str(optimizer.plan)
        optimizer.add_param_group({"params": [("c", torch.nn.Parameter(torch.ones(8), requires_grad=False))]})
        assert len(optimizer.state_dict()["state"]) == 2


def test_what_torch_leaves_out_of_frozen_parameters_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with offload.AdamW(model.named_parameters()) as optimizer:
        for parameter in model.parameters():
            gradient(parameter)
        optimizer.step()
        state = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, state)
        assert not caplog.text
    model[0].requires_grad_(False)
    with offload.AdamW(model.named_parameters()) as optimizer:
        set_optimizer_state_dict(model, optimizer, state)
        assert "2 frozen parameters (0.weight, ...) have no state in what is loaded" in caplog.text
        assert len(optimizer.state) == 2


# Ranks


def given(model: torch.nn.Module, number: int) -> None:
    """Give all that is not frozen a gradient: the same on all ranks, each its own piece of it."""
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * number + len(name)))
        drawn = drawn.to(parameter.dtype)
        if parameter.requires_grad and isinstance(parameter, DTensor):
            drawn = distribute_tensor(drawn, parameter.device_mesh, parameter.placements)
        parameter.grad = drawn if parameter.requires_grad else None


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "muon-fsdp2", "muon-ddp"])
@on_ranks(2)
def test_ranks_keep_state_of_what_is_frozen(folder: Path, kind: str) -> None:
    """Two lives with a frozen block, beside one that goes on."""
    muon, shards = kind.startswith("muon"), kind.endswith("fsdp2")

    def opened(model: torch.nn.Module, name: str) -> Any:
        config = {"host_memory": 0, "paths": [folder], "subgroup_numel": 4096, "shard": not shards}
        return (offload.Muon if muon else offload.AdamW)(model.named_parameters(), lr=1e-2, offload=config)

    def step(optimizer: Any, model: torch.nn.Module, number: int) -> None:
        given(model, number)
        optimizer.step()
        optimizer.zero_grad()

    models = [Model(torch.bfloat16) for _ in range(2)]
    for model in models if shards else ():
        fully_shard(model)
    straight = opened(models[0], "straight")
    for number in range(6):
        models[0].blocks[0].requires_grad_(not 1 < number < 4)
        step(straight, models[0], number)
    model = models[1]
    for life, names in enumerate((("first", "none"), ("second", "first"), ("third", "second"))):
        model.blocks[0].requires_grad_(life != 1)
        optimizer = opened(model, "life")
        if life:
            optimizer.load_checkpoint(folder / names[1])
        for number in range(2 * life, 2 * life + 2):
            step(optimizer, model, number)
        optimizer.save_checkpoint(folder / names[0])
        optimizer.wait_checkpoint()
        if life < 2:
            optimizer.close()
    for left, right in zip(models[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(local(left.detach()), local(right.detach()))
        if not muon:  # whose state lies on one rank
            one, other = straight.state_for(left), optimizer.state_for(right)
            assert all(torch.equal(local(one[name]), local(other[name])) for name in one)
    for each in (straight, optimizer):
        each.close()
