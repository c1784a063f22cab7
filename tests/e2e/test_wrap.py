"""Classes of `torch.optim`'s kind through the engine: their own bits, wherever state lives, and clear refusals."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror import same_bits
from sharded import spawn
from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

import offload
from offload.errors import CheckpointError, ConfigError, StepAbortedError

CLASSES: dict[str, tuple[type, dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd, momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    "adagrad": (optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "adadelta": (optim.Adadelta, {}),
    "adamax": (optim.Adamax, {"maximize": True}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "asgd": (optim.ASGD, {}),
    "rprop": (optim.Rprop, {}),
    "adafactor": (optim.Adafactor, {}),
    "amsgrad": (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamw, foreach": (optim.AdamW, {"foreach": True}),
    "adamw, rate in a tensor": (optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "sgd, rate in a tensor": (optim.SGD, {"lr": torch.tensor(1e-2), "momentum": 0.9}),
}
STEPS = 16
"""Past those of the first steps that classes begin otherwise with."""


class Odd(optim.Optimizer):
    """A user's own: plain numbers, None, bytes, a matrix for each row, and a tensor that comes at the second step."""

    def __init__(self, params: Any, lr: float = 0.01, bad: str = "") -> None:
        super().__init__(params, {"lr": lr, "bad": bad})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group)
        return loss

    def update(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(count=0, rate=0.5, odd=True, nothing=None, signs=torch.zeros_like(p, dtype=torch.int8))
            state["outer"] = torch.zeros(p.shape[0], p.shape[0]) if p.dim() == 2 else None
        elif "late" not in state:
            state["late"] = p.grad.clone()
        state["count"] += 1
        state["rate"] *= 0.99
        state["odd"] = not state["odd"]
        state["signs"] = torch.sign(p.grad).to(torch.int8)  # another tensor each time
        if state["outer"] is not None:
            state["outer"].addmm_(p.grad.float(), p.grad.float().T)
            p.add_((state["outer"].clamp(-1, 1) @ p.grad.float()).to(p.dtype), alpha=-1e-4)
        if "late" in state:
            state["late"].mul_(0.5).add_(p.grad)
            p.sub_(state["late"] * group["lr"] * state["rate"])
        p.data = p + state["signs"].to(p.dtype) * 1e-3 * state["count"]  # and another weight


class Averaging(optim.Optimizer):
    """As schedule-free optimizers do: counts in its groups, and walks its state between training and evaluation."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "weight_sum": 0.0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            weight = group["lr"] ** 2 * (group["k"] + 1)
            group["weight_sum"] += weight
            share = weight / group["weight_sum"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, share).add_(p.grad, alpha=-group["lr"] * (1 - share) * 0.1)
                    z.sub_(p.grad * group["lr"])
            group["k"] += 1

    def _walk(self, train: bool, weight: Any) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))
                group["train_mode"] = train

    @torch.no_grad()
    def eval(self) -> None:
        self._walk(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def train(self) -> None:
        self._walk(True, lambda beta: 1 - beta)


def weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (64, 48), (33,), (), (128, 100), (7, 3, 5)
    found = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    found.append(torch.nn.Parameter(torch.randn(9, 40, generator=generator).to(dtype).t()))  # another memory format
    return found


def two_groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.003}]


@torch.no_grad()
def draw(parameters: list[torch.nn.Parameter], step: int, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for number, parameter in enumerate(parameters):
        drawn = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))  # as autograd's
        parameter.grad = None if number == 1 and step % 3 == 0 else drawn.to(dtype or parameter.dtype)


def train(parameters: list[torch.nn.Parameter], optimizer: Any, steps: Any) -> None:
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.99 ** (n + steps.start))
    for step in steps:
        draw(parameters, step)
        optimizer.step()
        schedule.step()


def streamed(folder: Path, **more: Any) -> dict[str, Any]:
    return {"host_memory": 0, "paths": [str(folder)], "subgroup_numel": 8192, **more}


def assert_same(one: Any, other: Any, where: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert torch.equal(one, other) or same_bits(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    else:
        assert (type(one), one) == (type(other), other), where


def compare(kind: type, settings: dict[str, Any], dtype: torch.dtype, folder: Path, **more: Any) -> None:
    """Train beside the class itself in memory, with nothing resident."""
    own, ours = weights(dtype), weights(dtype)
    theirs = kind(two_groups(own), **copy.deepcopy(settings))
    with offload.wrap(
        kind, two_groups(ours), **copy.deepcopy(settings), offload=streamed(folder, **more)
    ) as optimizer:
        train(own, theirs, range(STEPS))
        train(ours, optimizer, range(STEPS))
        assert_same([p.detach() for p in own], [p.detach() for p in ours])
        assert_same(theirs.state_dict(), optimizer.state_dict())
        assert optimizer.metrics()["resident_bytes"] == 0


@pytest.mark.parametrize("name", CLASSES)
def test_bits_are_those_of_the_class_with_nothing_resident(name: str, tmp_path: Path) -> None:
    compare(*CLASSES[name], torch.float32, tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("sgd, momentum", torch.bfloat16),
        ("adafactor", torch.bfloat16),
        ("amsgrad", torch.float16),
        ("nadam", torch.float16),
    ],
)
def test_a_class_updates_16_bit_weights_as_it_does(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    compare(*CLASSES[name], dtype, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_of_ones_own(dtype: torch.dtype, tmp_path: Path) -> None:
    compare(Odd, {}, dtype, tmp_path)
    compare(Averaging, {}, dtype, tmp_path)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adafactor])
def test_masters_are_an_fp32_twin(kind: type, tmp_path: Path) -> None:
    """Of gradients in 16 bits; weights are what the twin's round to."""
    ours = weights(torch.bfloat16)
    twins = [torch.nn.Parameter(p.detach().float()) for p in ours]
    theirs = kind(two_groups(twins))
    with offload.wrap(kind, two_groups(ours), offload=streamed(tmp_path), masters=True) as optimizer:
        for step in range(STEPS):
            draw(ours, step)
            for p, q in zip(ours, twins, strict=True):
                q.grad = None if p.grad is None else p.grad.float()
            theirs.step()
            optimizer.step()
        for p, q in zip(ours, twins, strict=True):
            assert torch.equal(p, q.to(torch.bfloat16))
            assert torch.equal(optimizer.state_for(p)["master"], q)
            found = optimizer.state[p]
            assert_same({k: v for k, v in found.items() if k != "master"}, theirs.state[q])


def test_gradients_wider_than_weights_stay_so(tmp_path: Path) -> None:
    own, ours = weights(torch.bfloat16), weights(torch.bfloat16)
    for p in own:
        p.grad_dtype = torch.float32
    theirs = optim.SGD(own, lr=0.1, momentum=0.9)
    config = streamed(tmp_path, gradient_dtype="float32")
    with offload.wrap(optim.SGD, ours, lr=0.1, momentum=0.9, offload=config) as optimizer:
        for step in range(5):
            draw(own, step, torch.float32)
            draw(ours, step, torch.float32)
            theirs.step()
            optimizer.step()
        for p, q in zip(own, ours, strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("kind", [optim.Adagrad, optim.Adafactor, Odd, Averaging])
def test_a_resumed_run_goes_on_exactly(kind: type, tmp_path: Path) -> None:
    """Where its state lies, and into subgroups of another size and host memory."""
    (tmp_path / "path").mkdir()
    config = streamed(tmp_path / "path")
    ours = weights(torch.bfloat16)
    with offload.wrap(kind, two_groups(ours), offload=config) as optimizer:
        train(ours, optimizer, range(4))
        for folder, is_copy in (("copy", True), ("saved", False)):
            optimizer.save_checkpoint(tmp_path / folder, copy=is_copy)
            optimizer.wait_checkpoint()
        train(ours, optimizer, range(4, 9))
        wanted = [p.detach().clone() for p in ours], copy.deepcopy(optimizer.state_dict())
    for folder, other in (("copy", {"offload": {}}), ("saved", {"offload": streamed(tmp_path / "path")})):
        again = weights(torch.bfloat16, seed=1)
        with offload.wrap(kind, two_groups(again), **other) as optimizer:
            optimizer.load_checkpoint(tmp_path / folder)
            train(again, optimizer, range(4, 9))
            assert_same([p.detach() for p in again], wanted[0])
            assert_same(optimizer.state_dict(), wanted[1])


def test_state_dicts_are_the_class_s_own(tmp_path: Path) -> None:
    """The class loads what the wrapped one gives, and the other way round."""
    own, ours = weights(), weights()
    theirs = optim.NAdam(two_groups(own))
    with offload.wrap(optim.NAdam, two_groups(ours), offload=streamed(tmp_path)) as optimizer:
        train(ours, optimizer, range(3))
        for p, q in zip(own, ours, strict=True):
            p.data.copy_(q)
        theirs.load_state_dict(optimizer.state_dict())
        train(own, theirs, range(3, 6))
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
        with torch.no_grad():
            for p, q in zip(own, ours, strict=True):
                q.copy_(p)
        train(own, theirs, range(6, 9))
        train(ours, optimizer, range(6, 9))
        assert_same([p.detach() for p in own], [p.detach() for p in ours])
        assert_same(theirs.state_dict(), optimizer.state_dict())
        with pytest.raises(ConfigError, match=r"'exp_avg' was float32 \(64, 48\) and is float32 \(3,\)"):
            optimizer.state[ours[0]] = {**optimizer.state[ours[0]], "exp_avg": torch.zeros(3)}
        with pytest.raises(ConfigError, match="'momentum_buffer' is new"):
            optimizer.load_state_dict({**theirs.state_dict(), "state": {0: {"momentum_buffer": torch.zeros(64, 48)}}})
        optimizer.state[ours[0]]["mu_product"] = torch.tensor(0.25)
        assert optimizer.state[ours[0]]["mu_product"] == 0.25
        optimizer.reset_state([ours[0]])
        assert ours[0] not in optimizer.state


def test_train_and_eval_walk_the_state_wherever_it_lives(tmp_path: Path) -> None:
    own, ours = weights(torch.bfloat16), weights(torch.bfloat16)
    theirs = Averaging(two_groups(own))
    with offload.wrap(Averaging, two_groups(ours), offload=streamed(tmp_path)) as optimizer:
        for start in range(0, 6, 2):
            for each, parameters in ((theirs, own), (optimizer, ours)):
                each.train()
                for step in range(start, start + 2):
                    draw(parameters, step)
                    each.step()
                each.eval()
            assert_same([p.detach() for p in own], [p.detach() for p in ours])
            assert_same(theirs.state_dict(), optimizer.state_dict())
    with offload.wrap(optim.SGD, weights()) as optimizer, pytest.raises(AttributeError, match="eval"):
        optimizer.eval()


def test_hooks_run_once_a_step_and_closures_too() -> None:
    counts: Counter[str] = Counter()
    handle = register_optimizer_step_pre_hook(lambda *of: counts.update(["all"]))
    try:
        ours = weights()
        with offload.wrap(optim.Adam, two_groups(ours)) as optimizer:
            optimizer.register_step_post_hook(lambda *of: counts.update(["own"]))
            draw(ours, 1)
            assert optimizer.step(lambda: counts.update(["closure"]) or 3.0) == 3.0
    finally:
        handle.remove()
    assert counts == {"all": 1, "own": 1, "closure": 1}


def test_a_group_without_gradients_counts_as_the_class_counts_it() -> None:
    own, ours = weights(), weights()
    theirs = Averaging(two_groups(own))
    with offload.wrap(Averaging, two_groups(ours)) as optimizer:
        for step in range(4):
            for parameters, each in ((own, theirs), (ours, optimizer)):
                draw(parameters, step)
                for p in parameters[2:]:
                    p.grad = None
                each.step()
        assert theirs.param_groups[1]["k"] == 4
        assert_same(theirs.state_dict(), optimizer.state_dict())
        assert_same([p.detach() for p in own], [p.detach() for p in ours])


def test_clipping_and_loss_scales_come_in_as_a_factor(tmp_path: Path) -> None:
    own, ours = weights(), weights()
    theirs = optim.Adamax(own)
    with offload.wrap(optim.Adamax, ours, offload=streamed(tmp_path)) as optimizer:
        for step in range(3):
            draw(own, step)
            draw(ours, step)
            norm = optimizer.clip_grad_norm_(1.0)
            for p in own:
                if p.grad is not None:
                    p.grad.mul_(float(torch.tensor(1.0 / (float(norm) + 1e-6), dtype=torch.float32)))
            theirs.step()
            optimizer.step()
        assert_same([p.detach() for p in own], [p.detach() for p in ours])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize(
    "config", [{"overlap": "forward"}, {"overlap": "backward"}, {"overlap": "both"}, {"gradient_memory": 0}, {}]
)
def test_steps_behind_forward_and_gradients_that_leave_change_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    models = Model(), Model()
    theirs = Averaging(models[0].parameters())
    config = streamed(tmp_path, **config) | {"subgroup_numel": 1024}
    with offload.wrap(Averaging, models[1].named_parameters(), offload=config) as optimizer:
        if config.get("overlap") in ("forward", "both"):
            optimizer.overlap_forward(models[1], check=True)
        for step in range(6):
            for model, each in zip(models, (theirs, optimizer), strict=True):
                each.zero_grad()
                model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).backward()
                each.step()
            if step == 3:
                optimizer.park()
        optimizer.finish()
        assert optimizer.param_groups[0]["k"] == theirs.param_groups[0]["k"]
        assert_same(*([p.detach() for p in model.parameters()] for model in models))


class Halving(Averaging):
    """Sets its rate itself, too: half of it for the next step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.5


@pytest.mark.parametrize("overlap", ["off", "forward", "both"])
def test_a_class_changes_its_groups_before_step_returns(overlap: str, tmp_path: Path) -> None:
    """As in memory: the caller finds what the class has written, and what the caller writes then stays."""
    models = Model(), Model()
    groups = [[{"params": list(model.layers[at].parameters())} for at in (0, 2, 4)] for model in models]
    theirs = Halving(groups[0], lr=torch.tensor(0.1))
    config = streamed(tmp_path, overlap=overlap) | {"subgroup_numel": 1024}
    with offload.wrap(Halving, groups[1], lr=torch.tensor(0.1), offload=config) as optimizer:
        if overlap != "off":
            optimizer.overlap_forward(models[1])
        for step in range(6):
            for model, each in zip(models, (theirs, optimizer), strict=True):
                model.layers[2].requires_grad_(step >= 3)
                model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step))).backward()
                old_rates = [group["lr"].clone() for group in each.param_groups]
                each.step()
                each.zero_grad()
                if step == 4:
                    each.eval()
                    each.train()
                values = [{**group, "params": None} for group in each.param_groups]
                if each is theirs:
                    expected = values
                each.param_groups[0]["lr"] = old_rates[0]  # as before the step
                each.param_groups[2]["lr"].fill_(0.3)
            assert_same(values, expected)
        optimizer.finish()
        assert_same(*([p.detach() for p in model.parameters()] for model in models))


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ([], ValueError),
        ([{"params": []}], None),
        ([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))], ConfigError),
        ([torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))], ConfigError),
        ([torch.zeros(8)[:4].requires_grad_()] * 2, ValueError),
        ("text", TypeError),
    ],
)
def test_bad_parameters_are_refused_as_ever(params: Any, error: Any) -> None:
    if error is None:
        with offload.wrap(optim.AdamW, params) as optimizer:
            optimizer.step()
        return
    with pytest.raises(error):
        offload.wrap(optim.AdamW, params)


def test_what_shows_only_in_training_ends_it_by_name() -> None:
    """State that a schedule makes appear was not planned for."""
    ours = weights()
    with offload.wrap(optim.SGD, ours, lr=0.1) as optimizer:
        draw(ours, 1)
        optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(StepAbortedError, match=r"SGD.*'momentum_buffer' is new"):
            optimizer.step()


def test_state_of_another_class_or_size_is_refused(tmp_path: Path) -> None:
    with offload.wrap(optim.SGD, weights(), lr=0.1, momentum=0.9) as optimizer:
        optimizer.save_checkpoint(tmp_path / "saved", copy=True)
        optimizer.wait_checkpoint()
    with (
        offload.wrap(optim.RMSprop, weights()) as optimizer,
        pytest.raises(CheckpointError, match=r"is of torch\.optim\.sgd"),
    ):
        optimizer.load_checkpoint(tmp_path / "saved")
    with offload.wrap(optim.SGD, weights()) as optimizer, pytest.raises(CheckpointError, match=r"SGD\(\)"):
        optimizer.load_checkpoint(tmp_path / "saved")
    from offload.checkpoint.exchange import export_safetensors

    with pytest.raises(CheckpointError, match=r"state of torch\.optim\.sgd\.SGD\(momentum_buffer\): load it there"):
        export_safetensors(tmp_path / "saved", tmp_path / "file")


class ByName(optim.Optimizer):
    """Has factors of rates on parameters, and decays by name, as some scripts' classes do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            names = group.get("param_names") or [""] * len(group["params"])
            for p, name in zip(group["params"], names, strict=True):
                if p.grad is not None:
                    p.mul_(0.9 if name.endswith("weight") else 1.0)
                    state = self.state[p]
                    state["sum"] = state.get("sum", 0) + p.grad
                    p.add_(state["sum"], alpha=-group["lr"] * p.lr_mul)
                    if p.lr_mul > 4:  # other state than other parameters
                        state["large"] = torch.ones_like(p)


class Strict(ByName):
    """Looks names up, refuses those that stand twice, and counts on parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        names = [name for group in self.param_groups for name in group["param_names"]]
        assert len({*names}) == len(names)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.steps += 1
                p.seen.append(p.grad is not None)


def test_trials_repeat_no_names_and_change_no_attributes(tmp_path: Path) -> None:
    """With three matrices or more: names of one of two are repeated in another group."""
    ours, plain = ([*weights(), *weights(seed=1)[:1]] for _ in range(2))
    for parameter in (*ours, *plain):
        parameter.lr_mul, parameter.steps, parameter.seen = 1.0, torch.zeros(()), []  # type: ignore[attr-defined]
    expected = Strict([(str(n), p) for n, p in enumerate(plain)])
    with offload.wrap(Strict, [(str(n), p) for n, p in enumerate(ours)], offload=streamed(tmp_path)) as optimizer:
        assert not ours[0].seen  # type: ignore[attr-defined]
        for parameters in (ours, plain):
            draw(parameters, 1)
        optimizer.step()
        expected.step()
        parameter = ours[0]
        kept = torch.zeros(3)
        parameter.extra = kept  # type: ignore[attr-defined]
        optimizer.step()
        expected.step()
        found = weakref.ref(kept)
        del parameter.extra, kept  # type: ignore[attr-defined]
        assert found() is None
    for one, other in zip(ours, plain, strict=True):
        assert same_bits(one, other)
        assert (one.steps, one.seen) == (other.steps, other.seen)  # type: ignore[attr-defined]


@pytest.mark.parametrize("named", [False, True])
def test_a_class_sees_names_and_attributes_of_parameters(named: bool, tmp_path: Path) -> None:
    ours, plain = weights(), weights()
    for parameters in (ours, plain):
        for number, parameter in enumerate(parameters):
            parameter.lr_mul = 1.0 + number  # type: ignore[attr-defined]

    def given(parameters: list[torch.nn.Parameter]) -> list[Any]:
        suffixes = ("weight", "bias")
        return [(f"{n}.{suffixes[n % 2]}", p) for n, p in enumerate(parameters)] if named else [*parameters]

    expected = ByName(given(plain)[:4])
    with offload.wrap(ByName, given(ours)[:4], offload=streamed(tmp_path)) as optimizer:
        for step in range(3):
            if step == 1:
                for each, parameters in ((optimizer, ours), (expected, plain)):
                    each.add_param_group({"params": given(parameters)[4:], "lr": 0.01})
            for parameters in (ours, plain):
                draw(parameters, step)
                parameters[0].lr_mul = 3.0 - step  # type: ignore[attr-defined]  # as it is then
            optimizer.step()
            expected.step()
    for one, other in zip(ours, plain, strict=True):
        assert same_bits(one, other)
    kept = weakref.ref(ours[1])
    del ours, one, other, parameters, optimizer, each
    gc.collect()
    assert kept() is None


def test_a_group_that_is_added_joins(tmp_path: Path) -> None:
    own, ours = weights(), weights()
    theirs = optim.RMSprop(own[:2])
    with offload.wrap(optim.RMSprop, ours[:2], offload=streamed(tmp_path)) as optimizer:
        for each, parameters in ((theirs, own), (optimizer, ours)):
            train(parameters[:2], each, range(3))
            each.add_param_group({"params": parameters[2:], "lr": 0.5})
            train(parameters, each, range(3, 6))
        assert_same([p.detach() for p in own], [p.detach() for p in ours])
        assert_same(theirs.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_parameter_that_was_frozen_joins_too() -> None:
    own, ours = weights(), weights()
    for parameters in (own, ours):
        parameters[0].requires_grad_(False)
    theirs = optim.Adagrad(own)
    with offload.wrap(optim.Adagrad, ours) as optimizer:
        for each, parameters in ((theirs, own), (optimizer, ours)):
            train(parameters[1:], each, range(2))
            parameters[0].requires_grad_()
            train(parameters, each, range(2, 5))
        assert_same([p.detach() for p in own], [p.detach() for p in ours])


def test_weights_that_are_changed_outside_and_empty_ones() -> None:
    own, ours = weights(torch.bfloat16), weights(torch.bfloat16)
    for parameters in (own, ours):
        parameters.append(torch.nn.Parameter(torch.empty(0, 3)))
    theirs = optim.AdamW(own)
    with offload.wrap(optim.AdamW, ours) as optimizer:
        for step in range(4):
            for parameters, each in ((own, theirs), (ours, optimizer)):
                draw(parameters, step)
                each.step()
                with torch.no_grad():
                    parameters[0].mul_(0.5)
        assert_same([p.detach() for p in own], [p.detach() for p in ours])
        assert optimizer.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()


def ddp(folder: Path, first: int) -> None:
    """All state on each rank: one saves for all."""
    ours = weights()
    (folder / "path").mkdir(exist_ok=True)
    with offload.wrap(optim.Adagrad, ours, offload=streamed(folder / "path")) as optimizer:
        if first:
            optimizer.load_checkpoint(folder / "saved")
        train(ours, optimizer, range(first, 5))
        if not first:
            optimizer.save_checkpoint(folder / "saved", copy=True)
            optimizer.wait_checkpoint()
        train(ours, optimizer, range(5, 7))
    torch.save([p.detach() for p in ours], folder / f"weights-{first}-{torch.distributed.get_rank()}")


@pytest.mark.slow
def test_ranks_with_all_state_each_save_once(tmp_path: Path) -> None:
    spawn(2, tmp_path, ddp, 0)
    spawn(2, tmp_path, ddp, 5)
    found = [torch.load(path) for path in sorted(tmp_path.glob("weights-*"))]
    assert len(found) == 4
    for other in found[1:]:
        assert_same(found[0], other)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match=r"shard.*give them unsharded"):
        spawn(2, tmp_path, sharded)


def sharded(folder: Path) -> None:
    offload.wrap(optim.SGD, weights(), offload={"shard": True})


def test_options_of_the_class_are_loaded() -> None:
    """What other optimizers of ours have no use for changes its numbers."""
    one, other = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    plain = torch.optim.NAdam([one], weight_decay=0.5, decoupled_weight_decay=True)
    one.grad, other.grad = torch.ones(8), torch.ones(8)
    plain.step()
    with offload.wrap(torch.optim.NAdam, [other], weight_decay=0.5) as wrapped:
        other.data.copy_(one.data)
        wrapped.load_state_dict(plain.state_dict())
        for optimizer in (plain, wrapped):
            optimizer.step()
        assert wrapped.param_groups[0]["decoupled_weight_decay"] is True
        assert torch.equal(one, other)


def test_a_checkpoint_of_other_state_of_the_same_size_is_refused(tmp_path: Path) -> None:
    settings = {"host_memory": 0, "paths": [str(tmp_path)]}
    (weight,) = weights = [torch.nn.Parameter(torch.ones(16))]
    with offload.wrap(torch.optim.RMSprop, weights, momentum=0.9, offload=settings) as wrapped:
        weight.grad = torch.ones(16)
        wrapped.step()
        wrapped.save_checkpoint(tmp_path / "ck", copy=True)
    with (
        offload.wrap(torch.optim.RMSprop, weights, centered=True, offload=settings) as wrapped,
        pytest.raises(offload.CheckpointError, match="momentum_buffer"),
    ):
        wrapped.load_checkpoint(tmp_path / "ck")
