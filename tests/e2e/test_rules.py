"""Every update rule beside torch's own, and what of torch's state and hyperparameters it takes and refuses."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror import same_bits

import offload
from offload.errors import ConfigError
from offload.formats import EXACT, StateSpec
from offload.rules import RULES

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "lion": (offload.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "lion, maximized": (offload.Lion, {"lr": 1e-3, "betas": (0.8, 0.9), "maximize": True}),
    "adagrad": (offload.Adagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "adagrad, decaying": (offload.Adagrad, {"lr": 1e-2, "lr_decay": 0.3, "maximize": True}),
    "sgd": (offload.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd, nesterov": (offload.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "sgd, plain": (offload.SGD, {"lr": 1e-2, "dampening": 0.5, "maximize": True}),
    "adamw": (offload.AdamW, {"lr": 1e-2}),
}
every_optimizer = pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, line by line, in float64."""

    def __init__(self, params: Any, lr: float, betas: Any = (0.9, 0.99), weight_decay: float = 0.0, **more: Any):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), sign = group["betas"], -1 if group.get("maximize") else 1
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = (beta1 * momentum + (1 - beta1) * sign * p.grad).sign()
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))
                momentum.mul_(beta2).add_(sign * p.grad, alpha=1 - beta2)


THEIRS = {
    offload.Lion: PaperLion,
    offload.Adagrad: torch.optim.Adagrad,
    offload.SGD: torch.optim.SGD,
    offload.AdamW: torch.optim.AdamW,
}
"""What each optimizer is compared with: torch's own, or the paper."""


def weights(*dtypes: torch.dtype, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (3000, 1, 4097, 700)
    return [
        torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype))
        for size, dtype in zip(sizes, itertools.cycle(dtypes))
    ]


def train(optimizer: Any, parameters: list[torch.nn.Parameter], first: int, steps: int, clip: bool = True) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(parameters):
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
            # One has none in every other step: it counts its own updates.
            parameter.grad = None if number == 1 and step % 2 else drawn
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


@every_optimizer
def test_near_torch_over_many_steps(kind: Any, settings: dict[str, Any]) -> None:
    """Two hundred steps; a sign may differ where the momentum is nearly 0, and then by one step of Lion."""
    ours, theirs = weights(torch.float32), weights(torch.float64)
    for p, q in zip(ours, theirs, strict=True):
        q.data.copy_(p.data)
    start = [p.detach().clone() for p in ours]
    other = THEIRS[kind](theirs, **settings)
    with kind(ours, **settings) as optimizer:
        for step in range(200):
            generator = torch.Generator().manual_seed(step)
            for p, q in zip(ours, theirs, strict=True):
                p.grad = torch.randn(p.shape, generator=generator)
                q.grad = p.grad.double()
            optimizer.step()
            other.step()
        for p, q, first in zip(ours, theirs, start, strict=True):
            way = (q.detach() - first).abs().max().item()
            assert way > 0.001
            far = (p.detach() - q.detach()).abs()
            rounded = 200 * 2**-24 * (1 + q.detach().abs())  # half a unit of the last place in each step
            if kind is offload.Lion:
                assert (far > rounded).float().mean() < 0.001
                assert far.max() <= 4.1 * settings["lr"]
            else:
                assert (far <= rounded).all()


@every_optimizer
def test_state_of_torchs_own_comes_in(kind: Any, settings: dict[str, Any]) -> None:
    parameters = weights(torch.float32)
    other = THEIRS[kind](parameters, **settings)
    train(other, parameters, 0, 3, clip=False)
    again = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    with kind(again, **settings) as optimizer:
        optimizer.load_state_dict(other.state_dict())
        train(optimizer, again, 4, 2, clip=False)
        train(other, parameters, 4, 2, clip=False)
        for ours, p in zip(again, parameters, strict=True):
            torch.testing.assert_close(ours, p, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("entry", [{"momentum_buffer": None}, {}])
def test_state_that_says_nothing_is_of_no_update(entry: Any) -> None:
    """Torch's SGD without momentum has kept None for it."""
    parameters = weights(torch.float32)
    with offload.SGD(parameters) as optimizer:
        train(optimizer, parameters, 0, 2)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: entry, 2: entry}})
        assert not optimizer.state
        train(optimizer, parameters, 2, 1)
        optimizer.state[parameters[0]] = entry
        assert parameters[0] not in optimizer.state
        assert parameters[2] in optimizer.state


@pytest.mark.parametrize(("kind", "name"), [(offload.Lion, "exp_avg"), (offload.SGD, "momentum_buffer")])
def test_state_of_those_who_count_no_updates_comes_in(kind: Any, name: str, tmp_path: Path) -> None:
    parameters = weights(torch.bfloat16)
    named = [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
    state = {number: {name: torch.randn(p.shape)} for number, p in enumerate(parameters)}
    pytest.importorskip("safetensors.torch").save_file(
        {f"state.p{number}.{name}": entry[name] for number, entry in state.items()}, tmp_path / "state.safetensors"
    )
    with kind(named) as optimizer:
        for load in (
            lambda: optimizer.load_state_dict({**optimizer.state_dict(), "state": state}),
            lambda: optimizer.import_state(tmp_path / "state.safetensors"),
        ):
            optimizer.reset_state()
            load()
            for number, parameter in enumerate(parameters):
                assert optimizer.state[parameter]["step"] == 1
                assert same_bits(optimizer.state_for(parameter)[name], state[number][name])


@pytest.mark.parametrize("theirs", [torch.optim.AdamW, torch.optim.Adam])
def test_a_state_dict_of_another_rule_is_refused(theirs: Any) -> None:
    """Lion finds all of its state and hyperparameters in what Adam keeps."""
    parameters = weights(torch.float32)
    other = theirs(parameters)
    train(other, parameters, 0, 1, clip=False)
    with offload.Lion(parameters) as optimizer:
        with pytest.raises(ConfigError, match=r"exp_avg_sq.*another rule"):
            optimizer.load_state_dict(other.state_dict())
        assert optimizer.param_groups[0]["lr"] == 1e-4
        assert not optimizer.state
        with pytest.raises(ConfigError, match="another rule"):
            optimizer.state[parameters[0]] = other.state[parameters[0]]
        mine = {**other.state[parameters[0]], "exp_avg_sq": None}
        optimizer.state[parameters[0]] = mine
        assert optimizer.state[parameters[0]]["step"] == 1


def test_state_takes_the_bytes_that_the_rule_says() -> None:
    found = {}
    for kind in {kind for kind, _ in OPTIMIZERS.values()}:
        parameters = [torch.nn.Parameter(torch.zeros(1 << 16, dtype=torch.bfloat16))]
        with kind(parameters) as optimizer:
            found[kind.rule.name] = optimizer.metrics()["state_bytes"] / (1 << 16)
    assert found == {name: StateSpec(rule, EXACT).item_bytes for name, rule in RULES.items()}
    assert found["adam"] == 12
    assert found["lion"] == 8


@pytest.mark.parametrize(
    ("kind", "settings", "field"),
    [
        (offload.Lion, {"lr": -1}, "lr"),
        (offload.Lion, {"betas": (0.9, 1.0)}, "betas"),
        (offload.Lion, {"betas": 0.9}, "betas"),
        (offload.Lion, {"maximize": "yes"}, "maximize"),
        (offload.Adagrad, {"lr_decay": float("nan")}, "lr_decay"),
        (offload.Adagrad, {"eps": float("inf")}, "eps"),
        (offload.Adagrad, {"initial_accumulator_value": -0.1}, "initial_accumulator_value"),
        (offload.SGD, {"momentum": -0.1}, "momentum"),
        (offload.SGD, {"dampening": float("nan")}, "dampening"),
        (offload.SGD, {"nesterov": True}, "nesterov"),
        (offload.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov"),
    ],
)
def test_bad_hyperparameters_are_refused(kind: Any, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        kind(weights(torch.bfloat16), **settings)


def test_a_first_gradient_is_the_first_momentum() -> None:
    """Whatever the dampening, as in torch; and so it is again after a reset."""
    parameters = [torch.nn.Parameter(torch.zeros(10))]
    with offload.SGD(parameters, lr=1.0, momentum=0.5, dampening=0.9) as optimizer:
        for _ in range(2):
            parameters[0].grad = torch.ones(10)
            optimizer.step()
            assert torch.equal(optimizer.state_for(parameters[0])["momentum_buffer"], torch.ones(10))
            optimizer.reset_state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_momentum_remembers_no_infinity(dtype: torch.dtype) -> None:
    """Weights that are put back after a gradient that was not finite train on, as with torch's own."""
    parameters = [torch.nn.Parameter(torch.zeros(100, dtype=dtype))]
    with offload.SGD(parameters, lr=1.0) as optimizer:
        for gradient in (float("inf"), float("nan"), 1.0):
            with torch.no_grad():
                parameters[0].zero_()
            parameters[0].grad = torch.full_like(parameters[0], gradient)
            optimizer.step()
        assert torch.equal(parameters[0], torch.full_like(parameters[0], -1.0))
        assert torch.equal(optimizer.state_for(parameters[0])["momentum_buffer"], torch.ones(100))
