"""What torch takes and keeps: options, betas, schedules beyond 1, other keys of state, sums that start above 0."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import CyclicLR

import offload

SUBGROUP = 1024


class Pair:
    """Like OmegaConf's ListConfig: counted and indexed, and neither a list nor a tuple."""

    def __init__(self, *items: float) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, at: int) -> float:
        return self._items[at]


def params_of(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [Parameter(torch.randn(size, generator=generator).to(dtype)) for size in ((40, 50), (70,), ())]


def run(optimizer: Any, params: list[Parameter], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in params:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def same(one: list[Parameter], other: list[Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


PAIRS: dict[str, Any] = {
    "list": [0.8, 0.95],
    "numpy": np.array([0.8, 0.95]),
    "class": Pair(0.8, 0.95),
    "tensor": torch.tensor([0.8, 0.95], dtype=torch.float64),
    "tensors": (torch.tensor(0.8, dtype=torch.float64), torch.tensor(0.95, dtype=torch.float64)),
}


@pytest.mark.parametrize(
    ("kind", "betas"),
    zip(itertools.cycle([offload.AdamW, offload.Adam, offload.Lion]), PAIRS.values(), strict=False),
    ids=PAIRS,
)
def test_betas_may_be_any_pair(kind: Any, betas: Any, tmp_path: Path) -> None:
    params, plain = params_of(), params_of()
    with kind(params, betas=betas) as optimizer, kind(plain, betas=(0.8, 0.95)) as other:
        run(optimizer, params, 3)
        run(other, plain, 3)
        assert same(params, plain)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.save_checkpoint(tmp_path / "saved", copy=True)
        optimizer.wait_checkpoint()
        with kind(params_of(), betas=(0.5, 0.5)) as again:
            again.load_checkpoint(tmp_path / "saved")
            assert [float(beta) for beta in again.param_groups[0]["betas"]] == [0.8, 0.95]
        was = type(optimizer.param_groups[0]["betas"])
        optimizer.load_checkpoint(tmp_path / "saved")
        run(optimizer, params, 1, 3)
        assert was is Pair or isinstance(optimizer.param_groups[0]["betas"], was)


BAD: list[Any] = [
    0.9,
    (0.9,),
    [0.9, 0.95, 0.99],
    "ab",
    {0.9, 0.95},
    None,
    (0.9, "0.95"),
    np.eye(2),
    iter((0.9, 0.95)),
]
BAD += [np.array([0.9, np.nan]), (0.9, 1.0), (1.0, 0.9), (5.0, 0.9), (-0.1, 0.9), torch.tensor(0.9)]


def test_betas_that_are_no_pair_are_refused() -> None:
    for betas in BAD:
        with pytest.raises(offload.ConfigError, match=r"(?s)betas.*sequence of two numbers"):
            offload.AdamW(params_of(), betas=betas)


@pytest.mark.parametrize("theirs", [torch.optim.Adam, torch.optim.AdamW])
def test_a_schedule_may_drive_a_beta_beyond_one(theirs: Any) -> None:
    """Adam's first beta goes 5, 4, 3, 2; torch goes on, and so do we, with its numbers."""
    ours = getattr(offload, theirs.__name__)
    found = []
    for kind in (theirs, ours):
        params = params_of()
        optimizer = kind(params, lr=1e-3)
        schedule = CyclicLR(optimizer, 1e-3, 2e-3, step_size_up=4, base_momentum=1, max_momentum=5)
        assert optimizer.param_groups[0]["betas"][0] == 5
        for step in range(3):
            run(optimizer, params, 1, step)
            schedule.step()
        found.append(params)
    for mine, other in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_beta_of_one_is_refused_where_something_is_updated() -> None:
    params = params_of()
    with offload.Adam(params) as optimizer:
        run(optimizer, params, 1)
        before, state = copy.deepcopy(params), copy.deepcopy(optimizer.state_dict())
        group = optimizer.param_groups[0]
        group["betas"] = (1.0, 0.999)
        optimizer.zero_grad()
        optimizer.step()  # without gradients, as torch
        with pytest.raises(offload.ConfigError, match="bias correction"):
            run(optimizer, params, 1)
        group["betas"] = (10.0, 0.999)
        assert same(params, before)
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
        group["betas"] = (0.9, 0.999)
        run(optimizer, params, 1, 1)
        theirs = params_of()
        reference = torch.optim.Adam(theirs)
        run(reference, theirs, 2)
        for mine, other in zip(params, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_other_keys_are_a_dict_of_dicts() -> None:
    params = params_of()
    with offload.SGD(params) as optimizer:
        state = optimizer.state
        assert state.get("x") is None
        assert state.pop("x", 3) == 3
        with pytest.raises(KeyError):
            state.pop("x")
        assert not state
        state["x"]["y"] = 1
        run(optimizer, params, 1)
        assert [key for key in state if not isinstance(key, torch.Tensor)] == ["x"]
        assert dict(state.items())["x"] == {"y": 1}
        assert len(state) == len(params) + 1
        assert state.setdefault("z", 4) == 4
        assert state.pop("x") == {"y": 1}
        saved = optimizer.state_dict()
        saved["state"]["gone"] = {"momentum_buffer": torch.ones(3)}
        with pytest.raises(offload.ConfigError, match="gone"):
            optimizer.load_state_dict(saved)  # a parameter that is not here
        assert state["z"] == 4
        state.clear()
        assert not state


PLACES = {
    "memory": {},
    "paths": {"host_memory": 0, "subgroup_numel": SUBGROUP},
    "compact16": {"state_format": "compact16"},
    "compact8": {"state_format": "compact8", "host_memory": 0, "subgroup_numel": 4096},
}


def config(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {**settings, "paths": [folder]} if "host_memory" in settings else settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", PLACES)
def test_sums_start_where_they_are_told_to(tmp_path: Path, place: str, dtype: torch.dtype) -> None:
    exact = "compact" not in place
    where = config(PLACES[place], tmp_path / "paths")
    params = params_of(dtype)
    settings = {"lr": 0.1, "initial_accumulator_value": 0.5}
    theirs = [Parameter(p.detach().float()) for p in params]
    reference = torch.optim.Adagrad(theirs, **settings)
    optimizer = offload.Adagrad(params, **settings, offload=where)

    def sums() -> list[torch.Tensor]:
        return [optimizer.state_for(p)["sum"] for p in params]

    def starts() -> None:
        assert len(optimizer.state) == len(params)
        for parameter, found in zip(params, sums(), strict=True):
            torch.testing.assert_close(found, torch.full_like(found, 0.5), rtol=0 if exact else 2**-4, atol=0)
            assert optimizer.state[parameter]["step"] == 0

    with optimizer:
        starts()
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["initial_accumulator_value"] == 0.5
        torch.optim.Adagrad(copy.deepcopy(theirs), **settings).load_state_dict(copy.deepcopy(saved))
        for step in range(3):
            run(optimizer, params, 1, step)
            for mine, other in zip(params, theirs, strict=True):
                other.grad = mine.grad.float() if mine.grad is not None else None
            generator = torch.Generator().manual_seed(step)
            for other in theirs:
                other.grad = torch.randn(other.shape, generator=generator).to(dtype).float()
            reference.step()
        if exact:
            for found, other in zip(sums(), theirs, strict=True):
                torch.testing.assert_close(found, reference.state[other]["sum"], rtol=1e-6, atol=1e-6)
        tolerance = 1e-5 if exact and dtype is torch.float32 else 5e-2
        for mine, other in zip(params, theirs, strict=True):
            torch.testing.assert_close(mine.float(), other.detach(), rtol=tolerance, atol=tolerance)
        optimizer.save_checkpoint(tmp_path / "saved", copy=True)
        optimizer.wait_checkpoint()
        trained = sums()
        again = offload.Adagrad(params_of(dtype), offload=config(PLACES[place], tmp_path / "others"))
        with again:
            again.load_checkpoint(tmp_path / "saved")
            assert again.param_groups[0]["initial_accumulator_value"] == 0.5
            for parameter, expected in zip(again.param_groups[0]["params"], trained, strict=True):
                assert torch.equal(again.state_for(parameter)["sum"], expected)
        optimizer.reset_state()
        starts()
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        starts()
        added = Parameter(torch.ones(300, dtype=dtype))
        optimizer.add_param_group({"params": [added], "initial_accumulator_value": 2.0})
        found = optimizer.state_for(added)["sum"]
        torch.testing.assert_close(found, torch.full((300,), 2.0), rtol=0 if exact else 2**-4, atol=0)
        for other in sums():
            torch.testing.assert_close(other, torch.full_like(other, 0.5), rtol=0 if exact else 2**-4, atol=0)


def test_a_start_that_is_none_is_refused() -> None:
    for value in (-1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(offload.ConfigError, match="initial_accumulator_value"):
            offload.Adagrad(params_of(), initial_accumulator_value=value)  # type: ignore[arg-type]


def test_a_start_comes_with_a_state_dict() -> None:
    """Before the first update, too, of all parameters and of those that it says nothing of."""
    theirs = torch.optim.Adagrad(params_of(), initial_accumulator_value=2.0)
    for forgotten in (None, 1):
        params = params_of()
        with offload.Adagrad(params) as optimizer:
            saved = theirs.state_dict()
            saved["state"] = {key: value for key, value in saved["state"].items() if key != forgotten}
            optimizer.load_state_dict(saved)
            assert optimizer.state.keys() == {*params}
            for entry in optimizer.state_dict()["state"].values():
                assert bool((entry["sum"] == 2).all())
            assert len(optimizer.state_dict()["state"]) == len(params)


def test_a_start_of_zero_writes_nothing() -> None:
    with offload.Adagrad(params_of()) as optimizer:
        assert not optimizer.state
        optimizer.reset_state()
        assert not optimizer.state


@pytest.mark.parametrize("kind", [offload.AdamW, offload.Adam, offload.Lion, offload.Adagrad, offload.SGD])
def test_options_that_change_nothing_are_taken_and_others_named(kind: Any) -> None:
    for options in (
        {"fused": True},
        {"foreach": False, "fused": None},
        {"capturable": False, "differentiable": False},
    ):
        kind(params_of(), **options).close()
    for name in ("capturable", "differentiable"):
        with pytest.raises(offload.ConfigError, match=name):
            kind(params_of(), **{name: True})
    with pytest.raises(TypeError, match=rf"{kind.__name__}.*'fuzed'"):
        kind(params_of(), fuzed=True)


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(step))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_training_step_may_be_compiled(tmp_path: Path, backend: str) -> None:
    plain, compiled = small(), small()
    finals = []
    for trained, wrap in ((plain, lambda step: step), (compiled, torch.compile(backend=backend))):
        optimizer = offload.AdamW(trained.parameters(), lr=0.01, offload=config(PLACES["paths"], tmp_path))

        def step(inputs: torch.Tensor, trained: Any = trained, optimizer: Any = optimizer) -> torch.Tensor:
            loss = trained(inputs).square().mean()
            loss.backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        with optimizer:
            run = wrap(step)
            losses = [run(batch(number)).item() for number in range(4)]
        finals.append((losses, [parameter.detach().clone() for parameter in trained.parameters()]))
    assert finals[0][0] == pytest.approx(finals[1][0], rel=1e-6)
    for a, b in zip(finals[0][1], finals[1][1], strict=True):
        torch.testing.assert_close(a, b)
    assert finals[0][0][0] != finals[0][0][-1]
