"""State through `torch.distributed.checkpoint`, to and from torch's own optimizers, in one process."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from awkward import Model, everything, same
from limited import limited
from mirror import same_bits
from sharded import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import offload

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"full_state_dict": True},
    "full on the cpu": {"full_state_dict": True, "cpu_offload": True},
    "flat": {"flatten_optimizer_state_dict": True},
}


AllLarge = limited(offload.AdamW, large_copy_bytes=0)
"""Hands out all state in files, however small it is."""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes an optimizer of ours over a model, with its state on disk."""

    def made(model: Model, kind: Any = offload.AdamW, **settings: Any) -> Any:
        path = tempfile.mkdtemp(dir=tmp_path)
        config = {"host_memory": 0, "paths": [path], "subgroup_numel": 4096, **settings}
        return limited(kind, large_copy_bytes=0)(model.groups(), lr=1e-2, offload=config)

    return made


def save(model: Model, optimizer: Any, folder: Path, options: StateDictOptions) -> None:
    weights, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: Model, optimizer: Any, folder: Path, options: StateDictOptions, *, masters: bool = True) -> None:
    weights, state = get_state_dict(model, optimizer, options=options)
    if not masters:
        state = {key: value for key, value in state.items() if not key.endswith(".master")}
        for entry in state.get("state", {}).values():
            entry.pop("master", None)
    found = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=options
    )


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((offload.AdamW, dtype) for dtype in (torch.float32, torch.bfloat16)),
        *((kind, torch.bfloat16) for kind in (offload.Lion, offload.SGD)),
        *((kind, torch.float32) for kind in (offload.Adam, offload.Adagrad)),
    ],
)
def test_asking_for_state_changes_nothing(make: Callable[..., Any], kind: Any, dtype: torch.dtype) -> None:
    model, twin = Model(dtype), Model(dtype)
    with make(model, kind) as optimizer, make(twin, kind) as other:
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
        before = groups_of(optimizer)
        hooked: list[Any] = []
        optimizer.register_step_post_hook(lambda *_: hooked.append(1))
        for _ in range(2):
            found = get_optimizer_state_dict(model, optimizer)
            assert len(found["state"]) == 6
            for name, entry in found["state"].items():
                assert entry.pop("step") == 0
                master = entry.pop("master", None)
                assert (master is None) == (dtype == torch.float32)
                assert master is None or same_bits(master, model.get_parameter(name).detach().float())
                assert all(not tensor.any() for tensor in entry.values())
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
        assert hooked  # torch has taken its step
        assert groups_of(optimizer) == before
        assert all(parameter.grad is None for parameter in model.parameters())
        assert optimizer.engine.step_number == 0
        assert same(everything(model, optimizer), everything(twin, other))
        for seed in (1, 2):
            model.train_with(optimizer, seed)
            twin.train_with(other, seed)
            assert same(everything(model, optimizer), everything(twin, other))
        get_optimizer_state_dict(model, optimizer)
        assert same(everything(model, optimizer), everything(twin, other))
        for each in (optimizer, other):
            each.reset_state()
        get_optimizer_state_dict(model, optimizer)
        assert same(everything(model, optimizer), everything(twin, other))
        assert all(optimizer.engine.step_count(number) == 0 for number in range(6))


@pytest.mark.late(shared=True)
@pytest.mark.parametrize("settings", [{}, {"gpu_memory": 0, "placement": "gpu"}, {"keep_grads": False}])
def test_asking_for_state_changes_nothing_beside_a_gpu(settings: dict[str, Any]) -> None:
    """With `gpu_memory="auto"` the engine is not open before."""
    model, twin = Model(torch.bfloat16).to("late"), Model(torch.bfloat16).to("late")
    config = {"subgroup_numel": 1024, **settings}
    with (
        AllLarge(model.groups(), offload=config) as optimizer,
        offload.AdamW(twin.groups(), offload=config) as other,
    ):
        assert len(get_optimizer_state_dict(model, optimizer)["state"]) == 6
        for parameters, its in ((model.trained(), optimizer), (twin.trained(), other)):
            for seed in (1, 2):
                generator = torch.Generator().manual_seed(seed)
                drawn = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]
                torch.autograd.backward(parameters, drawn)
                its.step()
                its.zero_grad()
        assert same(everything(model, optimizer), everything(twin, other))


def test_a_step_that_only_looks_like_it_counts(make: Callable[..., Any]) -> None:
    model = Model(torch.float32)
    with make(model) as optimizer:

        def step(rate: float, gradient: float) -> int:
            for group in optimizer.param_groups:
                group["lr"] = rate
            for parameter in model.trained():
                parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
            return int(optimizer.engine.step_number)

        assert step(0.0, 0.0) == 0
        assert len(optimizer.state) == 6
        assert step(0.0, 1.0) == 1  # the beginning of a warm-up
        assert step(0.0, 0.0) == 2  # state is there
        optimizer.reset_state([model.matrix])
        assert model.matrix not in optimizer.state
        assert step(0.1, 0.0) == 3
    with make(model) as optimizer:
        assert step(0.1, 0.0) == 1
    with pytest.raises(offload.SessionBrokenError):
        step(0.1, 0.0)
    closed = make(model)
    closed.close()
    model.zero_grad()
    with pytest.raises(offload.SessionBrokenError):
        get_optimizer_state_dict(model, closed)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        *(("plain", torch.bfloat16), ("full", torch.float32), ("full on the cpu", torch.bfloat16)),
        *(("flat", torch.float32), ("flat", torch.bfloat16)),
    ],
)
def test_ours_to_ours(make: Callable[..., Any], tmp_path: Path, options: str, dtype: torch.dtype) -> None:
    chosen = StateDictOptions(**OPTIONS[options])
    model, again = Model(dtype), Model(dtype, seed=4)
    with make(model) as optimizer, make(again) as other:
        other.param_groups[0]["lr"] = 7.0
        model.train_with(optimizer, 1, 2)
        save(model, optimizer, tmp_path / "saved", chosen)
        load(again, other, tmp_path / "saved", chosen)
        assert groups_of(other) == groups_of(optimizer)
        for seed in (3, 4):
            assert same(everything(again, other), everything(model, optimizer))
            model.train_with(optimizer, seed)
            again.train_with(other, seed)
        assert same(everything(again, other), everything(model, optimizer))


@pytest.mark.parametrize(
    ("state_format", "options", "dtype"),
    [
        *(("exact", "plain", dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(("exact", "full", torch.bfloat16), ("exact", "full on the cpu", torch.float32)),
        *(("exact", "flat", torch.bfloat16), ("compact16", "plain", torch.float32)),
        ("compact8", "flat", torch.bfloat16),
    ],
)
def test_torchs_own_and_back(
    make: Callable[..., Any], tmp_path: Path, options: str, dtype: torch.dtype, state_format: str
) -> None:
    """Torch's moments are of the weight's dtype; theirs have no master, so one of ours cannot be asked for."""
    chosen = StateDictOptions(**OPTIONS[options])
    model, middle, again = (Model(dtype, seed) for seed in range(3))
    plain = torch.optim.AdamW(middle.groups(), lr=5.0)
    with make(model, state_format=state_format) as optimizer, make(again) as other:
        model.train_with(optimizer, 1, 2)
        save(model, optimizer, tmp_path / "ours", chosen)
        load(middle, plain, tmp_path / "ours", chosen)
        assert plain.param_groups[0]["lr"] == 1e-2
        assert [group["weight_decay"] for group in plain.param_groups] == [0.1, 0.0]
        for name, parameter in model.named_parameters():
            assert same_bits(middle.get_parameter(name).detach(), parameter.detach())
            if parameter.requires_grad:
                ours, theirs = optimizer.state[parameter], plain.state[middle.get_parameter(name)]
                assert theirs["step"] == 2
                assert all(same_bits(theirs[key], ours[key].to(dtype)) for key in ("exp_avg", "exp_avg_sq"))
        middle.train_with(plain, 3)
        save(middle, plain, tmp_path / "theirs", chosen)
        load(again, other, tmp_path / "theirs", chosen, masters=dtype == torch.float32)
        for name, parameter in middle.named_parameters():
            assert same_bits(again.get_parameter(name).detach(), parameter.detach())
            if parameter.requires_grad:
                ours, theirs = other.state_for(again.get_parameter(name)), plain.state[parameter]
                assert all(same_bits(ours[key], theirs[key].float()) for key in ("exp_avg", "exp_avg_sq"))
                assert same_bits(ours["master"], parameter.detach().float())
                assert other.state[again.get_parameter(name)]["step"] == 3
        if dtype == torch.float32:
            middle.train_with(plain, 4, 5)
            again.train_with(other, 4, 5)
            for ours, theirs in zip(again.parameters(), middle.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_torchs_own_without_names(make: Callable[..., Any], tmp_path: Path) -> None:
    """Ours asks for names that theirs do not have."""
    model, again = Model(torch.float32), Model(torch.float32, seed=1)
    plain = torch.optim.AdamW([{**g, "params": [p for _, p in g["params"]]} for g in model.groups()], lr=1e-2)

    def assert_alike(other: Any) -> None:
        for ours, theirs in zip(again.trained(), model.trained(), strict=True):
            assert same_bits(ours.detach(), theirs.detach())
            assert all(same_bits(value, other.state[ours][key]) for key, value in plain.state[theirs].items())

    model.train_with(plain, 1, 2)
    save(model, plain, tmp_path / "theirs", StateDictOptions())
    with make(again) as other:
        weights, state = get_state_dict(again, other)
        for group in state["param_groups"]:
            group.pop("param_names")
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "theirs")
        set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state)
        assert_alike(other)
        again.train_with(other, 3)
        save(again, other, tmp_path / "ours", StateDictOptions())
        load(model, plain, tmp_path / "ours", StateDictOptions())
        assert_alike(other)


@pytest.mark.parametrize(("dtype", "flat"), [(torch.float32, False), (torch.bfloat16, True)])
def test_import_state_reads_the_same(
    make: Callable[..., Any], tmp_path: Path, dtype: torch.dtype, flat: bool
) -> None:
    chosen = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, again, third = (Model(dtype, seed, rows=True) for seed in (0, 1, 1))
    with make(model) as optimizer, make(again) as one, make(third) as other:
        model.train_with(optimizer, 1, 2)
        save(model, optimizer, tmp_path / "saved", chosen)
        load(again, one, tmp_path / "saved", chosen)
        third.load_state_dict(model.state_dict())
        other.import_state(tmp_path / "saved")
        assert same(everything(again, one), everything(third, other))
        again.train_with(one, 3)
        third.train_with(other, 3)
        assert same(everything(again, one), everything(third, other))


def test_a_parameter_that_came_late(make: Callable[..., Any], tmp_path: Path) -> None:
    model, again = Model(torch.bfloat16), Model(torch.bfloat16, seed=1)
    with make(model) as optimizer, make(again) as other:
        model.train_with(optimizer, 1)
        for each in (model, again):
            each.frozen.requires_grad_(True)
            each.late = torch.nn.Parameter(torch.ones(33, dtype=torch.bfloat16))
        for each, its in ((model, optimizer), (again, other)):
            its.add_param_group({"params": [("late", each.late)], "lr": 0.5})
        model.train_with(optimizer, 2)
        save(model, optimizer, tmp_path / "saved", StateDictOptions())
        load(again, other, tmp_path / "saved", StateDictOptions())  # nothing of it has been updated
        assert other.state[again.frozen]["step"] == 1
        assert same(everything(again, other), everything(model, optimizer))
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        model.train_with(optimizer, 3)
        set_optimizer_state_dict(model, optimizer, saved)
        assert optimizer.state[model.late]["step"] == 1


@on_ranks(2)
def test_two_ranks_with_the_same_state(folder: Path) -> None:
    for options in ("plain", "full", "flat"):  # with the fourth torch gives rank 0 alone a state dict
        chosen = StateDictOptions(**OPTIONS[options])
        model, again = Model(torch.bfloat16), Model(torch.bfloat16, seed=4)
        config = {"host_memory": 0, "paths": [folder], "subgroup_numel": 4096, "threads": 1}
        with (
            AllLarge(model.groups(), offload=config) as optimizer,
            AllLarge(again.groups(), offload=config) as other,
        ):
            model.train_with(optimizer, 1, 2)
            place = Path(folder, "saved", options)
            save(model, optimizer, place, chosen)
            dist.barrier()
            load(again, other, place, chosen)
            assert same(everything(again, other), everything(model, optimizer))
