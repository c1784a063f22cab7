"""`optimizer.state`: what is written to it takes effect or is refused, and never vanishes without a word."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mirror import same_bits

import offload

NUMELS = (3000, 700, 1)


def weights(dtype: torch.dtype, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(numel, generator=generator).to(dtype)) for numel in NUMELS]


def step(optimizer: Any, parameters: list[torch.nn.Parameter], seed: int) -> None:
    for parameter, gradient in zip(parameters, weights(parameters[0].dtype, seed), strict=True):
        parameter.grad = gradient.detach().to(parameter.device)
    optimizer.step()
    optimizer.zero_grad()


def states(optimizer: Any, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    found = [optimizer.state_for(parameter) for parameter in parameters]
    return [tensor for entry in found for tensor in entry.values()] + [p.detach().clone() for p in parameters]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(same_bits, left, right))


TIERS: dict[str, dict[str, Any]] = {
    "memory": {},
    "disk": {"host_memory": 0},
    "both": {"host_memory": 20_000},
    "gpu": {"gpu_memory": "1MB"},
    "through the gpu": {"gpu_memory": 0, "placement": "gpu", "host_memory": 0},
}


ON_LATE = pytest.mark.late(shared=True)


EVERYWHERE = [pytest.param(name, marks=ON_LATE) if "gpu" in name else name for name in TIERS]
"""For `make`, by `indirect`; it is on a disk where nothing is said."""


@pytest.fixture(params=["disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes an optimizer over some parameters, with its state on one tier."""
    settings = TIERS[request.param]

    def made(parameters: list[torch.nn.Parameter], **options: Any) -> Any:
        paths = [tmp_path] if "host_memory" in settings else []
        config = offload.OffloadConfig(subgroup_numel=1024, paths=paths, **settings)
        if "gpu" in request.param:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.data = parameter.data.to("late")
        return offload.AdamW(parameters, lr=1e-2, offload=config, **options)

    return made


@pytest.mark.parametrize("make", EVERYWHERE, indirect=True)
def test_one_parameter_is_reset_and_the_others_stay(make: Callable[..., Any]) -> None:
    parameters = weights(torch.bfloat16)
    with make(parameters) as optimizer:
        step(optimizer, parameters, 1)
        before = states(optimizer, parameters)
        optimizer.reset_state([parameters[1]])
        after = states(optimizer, parameters)
        changed = [n for n, (old, new) in enumerate(zip(before, after, strict=True)) if not same_bits(old, new)]
        assert changed == [4, 5]
        assert list(optimizer.state) == [parameters[0], parameters[2]]
        with pytest.raises(offload.ConfigError, match="parameter"):
            optimizer.reset_state([parameters[0], torch.nn.Parameter(torch.zeros(3))])
        assert len(optimizer.state) == 2


def clear_all(optimizer: Any) -> None:
    optimizer.state.clear()


def empty_all(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def empty_each(optimizer: Any) -> None:
    for parameter in list(optimizer.state):
        optimizer.state[parameter] = {}


def clear_each(optimizer: Any) -> None:
    for entry in optimizer.state.values():
        entry.clear()


def delete_each(optimizer: Any) -> None:
    for parameter in list(optimizer.state):
        del optimizer.state[parameter]


def pop_each(optimizer: Any) -> None:
    while optimizer.state:
        optimizer.state.popitem()


def assign_zeros(optimizer: Any) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])
        entry["exp_avg_sq"] *= 0
        entry.update(step=0)


def assign_entries(optimizer: Any) -> None:
    for parameter, entry in optimizer.state.items():
        zeros = {name: torch.zeros_like(tensor) for name, tensor in entry.items() if name != "master"}
        optimizer.state[parameter] = {**entry, **zeros}


@pytest.mark.parametrize(
    "idiom",
    [clear_all, empty_all, empty_each, clear_each, delete_each, pop_each, assign_zeros, assign_entries],
)
def test_usual_ways_to_reset_moments(make: Callable[..., Any], idiom: Callable[[Any], None]) -> None:
    parameters, twins = weights(torch.bfloat16), weights(torch.bfloat16)
    with make(parameters) as optimizer, make(twins) as twin:
        for each, mine in ((optimizer, parameters), (twin, twins)):
            step(each, mine, 1)
            step(each, mine, 2)
        idiom(optimizer)
        twin.reset_state()
        assert len(optimizer.state) == 0
        assert same(states(optimizer, parameters), states(twin, twins))
        step(optimizer, parameters, 3)
        step(twin, twins, 3)
        assert same(states(optimizer, parameters), states(twin, twins))


def zero_one(optimizer: Any, parameter: torch.Tensor) -> Any:
    optimizer.state[parameter]["exp_avg"].zero_()


def zero_steps(optimizer: Any, parameter: torch.Tensor) -> Any:
    optimizer.state[parameter]["step"].zero_()


def zero_all(optimizer: Any, parameter: torch.Tensor) -> Any:
    torch._foreach_zero_([entry["exp_avg_sq"] for entry in optimizer.state.values()])


def zero_a_view(optimizer: Any, parameter: torch.Tensor) -> Any:
    optimizer.state[parameter]["master"][10:20] = 0


def zero_and_keep(optimizer: Any, parameter: torch.Tensor) -> Any:
    kept = optimizer.state[parameter]
    kept["exp_avg"].mul_(0.5)
    return kept


@pytest.mark.parametrize(
    ("change", "use"),
    [
        (zero_one, "step"),
        (zero_steps, "state"),
        (zero_all, "state_dict"),
        (zero_a_view, "state_for"),
        (zero_and_keep, "save_checkpoint"),
        (zero_and_keep, "step"),
    ],
)
def test_a_change_in_place_is_refused_once(
    tmp_path: Path, change: Callable[[Any, torch.Tensor], Any], use: str
) -> None:
    parameters, twins = weights(torch.bfloat16), weights(torch.bfloat16)
    with offload.AdamW(parameters) as optimizer, offload.AdamW(twins) as twin:
        step(optimizer, parameters, 1)
        step(twin, twins, 1)
        kept = change(optimizer, parameters[0])
        gc.collect()  # the copy is gone, and its change is known
        uses: dict[str, Callable[[], Any]] = {
            "step": lambda: step(optimizer, parameters, 2),
            "state": lambda: optimizer.state[parameters[1]],
            "state_dict": optimizer.state_dict,
            "state_for": lambda: optimizer.state_for(parameters[1]),
            "save_checkpoint": lambda: optimizer.save_checkpoint(tmp_path / "ck"),
        }
        with pytest.raises(offload.ConfigError, match=r"changed in place.*reset_state.*load_state_dict"):
            uses[use]()
        del kept
        step(optimizer, parameters, 2)
        step(twin, twins, 2)
        assert same(states(optimizer, parameters), states(twin, twins))


def test_a_reset_drops_only_changes_in_place_of_what_it_resets() -> None:
    parameters = weights(torch.bfloat16)
    with offload.AdamW(parameters) as optimizer:
        step(optimizer, parameters, 1)
        zero_one(optimizer, parameters[0])
        optimizer.reset_state(parameters[:1])
        step(optimizer, parameters, 2)
        zero_one(optimizer, parameters[0])
        optimizer.reset_state(parameters[1:])
        with pytest.raises(offload.ConfigError, match="changed in place"):
            step(optimizer, parameters, 3)
        zero_one(optimizer, parameters[0])
        optimizer.reset_state()
        step(optimizer, parameters, 3)


def test_copies_that_are_the_caller_s_may_be_changed() -> None:
    parameters = weights(torch.float32)
    with offload.AdamW(parameters) as optimizer:
        step(optimizer, parameters, 1)
        before = states(optimizer, parameters)
        for entry in optimizer.state_dict()["state"].values():
            assert type(entry) is dict
            for tensor in entry.values():
                tensor.zero_()
        for tensor in optimizer.state_for(parameters[0]).values():
            tensor.zero_()
        read = optimizer.state[parameters[0]]
        assert type(copy.deepcopy(read)) is dict
        copy.deepcopy(read)["exp_avg"].zero_()
        assert same(states(optimizer, parameters), before)
        held = optimizer._state.copies._watched
        del read, entry, tensor
        gc.collect()
        step(optimizer, parameters, 2)
        assert held
        assert not optimizer._state.copies._watched


@pytest.mark.parametrize("make", EVERYWHERE, indirect=True)
def test_an_assignment_is_written_where_the_state_lives(make: Callable[..., Any]) -> None:
    parameters = weights(torch.float32)
    with make(parameters) as optimizer:
        step(optimizer, parameters, 1)
        wanted = {name: torch.randn(NUMELS[0]) for name in ("exp_avg", "exp_avg_sq", "master")}
        kept = optimizer.state[parameters[0]]
        first = kept["exp_avg"].clone()
        for name, tensor in wanted.items():
            optimizer.state[parameters[0]][name] = tensor.double()
        optimizer.state[parameters[0]]["step"] = torch.tensor(7)
        found = optimizer.state[parameters[0]]
        assert found.keys() == {"step", "exp_avg", "exp_avg_sq"}  # an fp32 weight is its master
        assert same_bits(parameters[0].detach(), wanted["master"])
        assert all(same_bits(optimizer.state_for(parameters[0])[name], tensor) for name, tensor in wanted.items())
        assert found["step"] == 7
        kept["exp_avg"] = first  # what was read then, which is not there any more
        assert same_bits(optimizer.state[parameters[0]]["exp_avg"], first)
        for wrong in (
            lambda: kept.update(exp_avg=torch.zeros(3)),
            lambda: kept.update(exp_avg_sq=None),
            lambda: kept.update(momentum=first),
            lambda: kept.update(step=-1),
            lambda: kept.pop("exp_avg"),
            lambda: optimizer.state.update({parameters[0]: {"step": 1}}),
            lambda: optimizer.state.update({torch.zeros(3): {}}),
            lambda: setattr(optimizer, "state", {parameters[0]: {}}),
            lambda: setattr(optimizer, "state", None),
        ):
            with pytest.raises(offload.ConfigError):
                wrong()
        assert same_bits(optimizer.state[parameters[0]]["exp_avg"], first)


def test_what_is_there_already_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks that load state go through it once more to move it to a device."""
    parameters = weights(torch.bfloat16)
    with offload.AdamW(parameters) as optimizer:
        step(optimizer, parameters, 1)
        monkeypatch.setattr(optimizer.engine.state, "write", None)
        for entry in optimizer.state.values():
            for name, tensor in entry.items():
                entry[name] = tensor.clone() if name != "step" else tensor


def test_state_before_the_first_step(make: Callable[..., Any]) -> None:
    parameters = weights(torch.bfloat16)
    with make(parameters) as optimizer:
        optimizer.state = {}
        optimizer.state.clear()
        optimizer.reset_state()
        optimizer.reset_state(parameters)
        assert not optimizer.state
        with pytest.raises(KeyError):
            optimizer.state[parameters[0]]
        step(optimizer, parameters, 1)
        assert len(optimizer.state) == 3


def test_an_optimizer_is_not_made_in_inference_mode(tmp_path: Path) -> None:
    config = offload.OffloadConfig(host_memory=0, paths=[tmp_path])
    parameters = weights(torch.bfloat16)
    with torch.inference_mode(), pytest.raises(offload.ConfigError, match=r"inference_mode.*outside"):
        offload.AdamW(parameters, offload=config)
    with offload.AdamW(parameters, offload=config) as optimizer:
        with torch.inference_mode(), pytest.raises(offload.ConfigError, match="inference_mode"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        assert len(optimizer.param_groups) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", EVERYWHERE, indirect=True)
def test_inference_mode_changes_nothing(make: Callable[..., Any], tmp_path: Path) -> None:
    parameters, twins = weights(torch.bfloat16), weights(torch.bfloat16)
    for mine in (parameters, twins):
        mine[2].requires_grad_(False)  # joins at the first step
    with make(parameters) as optimizer, make(twins) as twin:
        for mine in (parameters, twins):
            mine[2].requires_grad_(True)
        step(twin, twins, 1)
        with torch.inference_mode():
            step(optimizer, parameters, 1)
            first = states(optimizer, parameters)
            saved = optimizer.state_dict()
            optimizer.clip_grad_norm_(1.0)
            entry = optimizer.state[parameters[0]]
            entry["exp_avg"] = entry["exp_avg"].clone()
        assert same(first, states(twin, twins))
        saved["state"][0]["exp_avg"].requires_grad_()  # an ordinary tensor
        step(optimizer, parameters, 2)
        step(twin, twins, 2)
        assert same(states(optimizer, parameters), states(twin, twins))
        optimizer.save_checkpoint(tmp_path / "ck", copy=True)
        optimizer.wait_checkpoint()
        with torch.inference_mode():
            step(optimizer, parameters, 3)
            optimizer.load_checkpoint(tmp_path / "ck")
            optimizer.load_state_dict(optimizer.state_dict())
            step(optimizer, parameters, 4)
        torch.autograd.backward(parameters, [torch.ones_like(p) for p in parameters])
        torch.autograd.backward(twins, [torch.ones_like(p) for p in twins])
        step(twin, twins, 4)
        optimizer.step()
        for parameter in twins:
            parameter.grad = torch.ones_like(parameter)
        twin.step()
        assert same(states(optimizer, parameters), states(twin, twins))


def test_what_is_loaded_is_not_shared() -> None:
    parameters = [torch.nn.Parameter(torch.ones(10, dtype=torch.float32)) for _ in range(2)]
    with offload.AdamW(parameters[:1]) as one, offload.AdamW(parameters[1:]) as other:
        one.param_groups[0]["lr"] = torch.tensor(0.1)
        one.param_groups[0]["mine"] = [1]
        other.load_state_dict(one.state_dict())
        other.param_groups[0]["lr"].fill_(0.5)
        other.param_groups[0]["mine"].append(2)
        assert float(one.param_groups[0]["lr"]) == pytest.approx(0.1)
        assert one.param_groups[0]["mine"] == [1]


def test_a_state_dict_without_a_parameter_forgets_its_moments() -> None:
    parameter = torch.nn.Parameter(torch.ones(5000, dtype=torch.float32))
    with offload.AdamW([parameter]) as optimizer:
        before = optimizer.state_dict()
        parameter.grad = torch.ones(5000, dtype=torch.float32)
        optimizer.step()
        optimizer.state[parameter]["step"] = 0  # a warm restart that keeps moments
        optimizer.load_state_dict(before)
        assert not optimizer.state_for(parameter)["exp_avg"].any()


def test_arrays_of_one_element_are_hyperparameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(10, dtype=torch.float32))
    with offload.AdamW([parameter], lr=np.array([0.1]), betas=(torch.tensor([0.9]), np.array([0.99]))) as optimizer:
        parameter.grad = torch.ones(10, dtype=torch.float32)
        optimizer.step()
        assert optimizer.engine.step_count(0) == 1
