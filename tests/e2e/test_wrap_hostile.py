"""Classes that look beyond one parameter, and what else is odd about them: refused by name, or right."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_wrap import Averaging, assert_same, draw, streamed, train
from torch import optim

import offload
from offload.errors import ConfigError, SessionBrokenError, StepAbortedError


class Plain(optim.Optimizer):
    """Calls `one` for each parameter of each group."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.one(parameter, self.state[parameter], group)

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        raise NotImplementedError


class RateOfPlace(Plain):
    """Has a rate for each group by its place."""

    rates = 0.1, 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for rate, group in zip(self.rates, self.param_groups, strict=False):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=rate)


class CountsGroups(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / len(self.param_groups))


class FirstRate(Plain):
    """The first group's rate is that of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rate = None
        for group in self.param_groups:
            rate = group["lr"] if rate is None else rate
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=float(rate))


class KeepsEps(Plain):
    """What the first parameter's type gives stays for all others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            eps = None
            for parameter in group["params"]:
                if parameter.grad is not None:
                    eps = torch.finfo(parameter.dtype).eps if eps is None else eps
                    parameter.sub_(parameter.grad.clamp(min=eps), alpha=0.1)


class KeepsDimensions(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            whole = None
            for parameter in group["params"]:
                if parameter.grad is not None:
                    whole = parameter.dim() > 1 if whole is None else whole
                    parameter.sub_(parameter.grad, alpha=0.1 if whole else 0.2)


class SharesWeights(Plain):
    """Its state is the weight itself, and no copy."""

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        state.setdefault("slow", weight.data)
        weight.add_(state["slow"], alpha=-0.1)


class CountsCalls(Plain):
    calls = 0

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        type(self).calls += 1
        weight.sub_(weight.grad, alpha=1 / type(self).calls)


class LateState(Plain):
    """Something appears at the third step."""

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 3:
            state["late"] = weight.clone()


class Fails(Plain):
    """Cannot divide at the step `at`."""

    def __init__(self, params: Any, at: int = 1) -> None:
        super().__init__(params, at=at)

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        state["count"] = state.get("count", 0) + 1
        weight.sub_(weight.grad, alpha=1 / (group["at"] - state["count"]))

    def train(self) -> None:
        raise KeyError("no mode")


class LargeSeed(Plain):
    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        state["seed"] = 1 << 64


class Keyed(Plain):
    """Keeps something under a key that it is given."""

    def __init__(self, params: Any, key: Any = "key") -> None:
        super().__init__(params)
        self.key = key

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        state[self.key] = state.get(self.key, 0) + 1
        weight.sub_(weight.grad, alpha=1 / state[self.key])


class Noting(Plain):
    """Keeps something itself."""

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        self.seen = getattr(self, "seen", 0) + 1


class CountsItself(Plain):
    """Keeps something in what it has kept before."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts = {"updates": 0}

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        self.counts["updates"] += 1
        weight.sub_(weight.grad, alpha=0.1 / self.counts["updates"])


class HasATensor(Plain):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.factor = torch.tensor(0.5)

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        weight.sub_(weight.grad * self.factor)


class Growing(Plain):
    """Keeps a tensor whose shape changes."""

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        state["all"] = torch.cat([state["all"], weight.grad.flatten()]) if state else weight.grad.flatten()


class Listing(Plain):
    """Keeps a list."""

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        state.setdefault("losses", []).append(1.0)


class Shared(Plain):
    """Keeps something of no parameter."""

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        self.state["all"]["count"] = 1


class Counting(Plain):
    """Counts parameters in its group."""

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        group["lr"] += 1


class Remembering(Plain):
    """Keeps what no checkpoint holds in its group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] = {**group.get("steps", {}), len(group.get("steps", {})): group["lr"]}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)


class Drawing(Plain):
    """Draws random numbers."""

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        weight.add_(torch.randn_like(weight))


class Clips(Plain):
    """Clips the norm of all gradients at 10, which those of a few elements seldom have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        norm = sum(float(weight.grad.square().sum()) for weight in weights) ** 0.5
        for weight in weights:
            weight.sub_(weight.grad, alpha=0.1 * min(1.0, 10 / max(norm, 1e-9)))


class Drops(optim.SGD):
    """Ends its step with `zero_grad`, so that loops need none."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.zero_grad()


class Twice(optim.SGD):
    """Calls a closure again after its update, if it is given one."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        return loss if closure is None else closure()


class TwoGroups(Plain):
    """Puts matrices into one group, and the rest into another; takes parameters alone, or groups as well."""

    def __init__(self, params: Any, flattens: bool) -> None:
        flat = [p for item in params for p in (item["params"] if flattens and isinstance(item, dict) else [item])]
        super().__init__([{"params": [p for p in flat if (p.dim() > 1) is large]} for large in (True, False)])


@pytest.mark.parametrize("flattens", [False, True])
def test_groups_that_a_class_makes_itself_are_to_be_given(flattens: bool) -> None:
    parameters = [parameter for _, parameter in pair()]
    with pytest.raises(ConfigError, match=r"TwoGroups.*give it those that this one makes: of 1 it has made 2"):
        offload.wrap(TwoGroups, parameters, flattens=flattens)
    with pytest.raises(ConfigError, match="of 2 it has made 2, with other parameters"):
        offload.wrap(TwoGroups, [{"params": parameters[1:]}, {"params": parameters[:1]}], flattens=True)


def test_a_closure_is_refused_that_the_class_would_call_again() -> None:
    weights = [parameter for _, parameter in pair()]
    with offload.wrap(Twice, weights) as optimizer:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        with pytest.raises(ConfigError, match=r"compute gradients before it: .*Twice calls a closure again"):
            optimizer.step(lambda: 1.0)
        assert all(weight.eq(1).all() for weight in weights)
        optimizer.step()


def pair(*dtypes: torch.dtype, shapes: Any = ((6, 5), (7,))) -> list[tuple[str, torch.nn.Parameter]]:
    dtypes = dtypes or (torch.float32,)
    return [(f"layer.{n}", torch.nn.Parameter(torch.ones(shapes[n % 2], dtype=t))) for n, t in enumerate(dtypes * 2)]


@pytest.mark.parametrize(
    ("kind", "settings", "dtypes", "told"),
    [
        (RateOfPlace, {}, (), "by itself"),
        (CountsGroups, {}, (), "by itself"),
        (FirstRate, {}, (), "by itself"),
        (FirstRate, {"lr": 0.0}, (), "by itself"),
        (KeepsEps, {}, (torch.float32, torch.bfloat16), "by itself.*groups? of their own"),
        (optim.Adafactor, {}, (torch.float32, torch.float16), "by itself.*group of their own"),
        (optim.Adafactor, {}, (torch.float32, torch.bfloat16), "by itself.*group of their own"),
        (optim.Adafactor, {}, (torch.bfloat16, torch.float16), "by itself.*group of their own"),
        (KeepsDimensions, {}, (), "by itself"),
        (SharesWeights, {}, (), "by itself"),
        (CountsCalls, {}, (), "by itself"),
        (LateState, {}, (), "'late' is new"),
        (Fails, {}, (), r"can update .*layer.*raised ZeroDivisionError"),
        (Fails, {"at": 2}, (), r"can update .*layer.*raised ZeroDivisionError"),
        (LargeSeed, {}, (), "'seed', an integer of more than 64 bits, of layer"),
        (Keyed, {"key": "a\0b"}, (), "text with a zero in it, of layer"),
        (Keyed, {"key": "\ud800"}, (), "surrogates not allowed, of layer"),
        (Keyed, {"key": object()}, (), "a key that is neither text nor number, of layer"),
        (Clips, {}, (), "beside another one"),
        (Drawing, {}, (), "by itself"),
        (Drops, {}, (), r"leaves \.grad to the loop"),
        (Counting, {}, (), "by itself"),
        (Noting, {}, (), "attribute 'seen'"),
        (CountsItself, {}, (), "its attribute 'counts'"),
        (HasATensor, {}, (), "'factor', as an attribute"),
        (Growing, {}, (), "'all', which was .* a step later"),
        (Listing, {}, (), "'losses', a list"),
        (Shared, {}, (), "'all' of none"),
        (Remembering, {}, (), "'steps' in its groups, which changes, and no checkpoint could hold"),
        (optim.LBFGS, {}, (), "use another class: it calls the model, and looks at all parameters"),
        (optim.SparseAdam, {}, (), "sparse"),
        (optim.AdamW, {"fused": True}, (), "fused.*leave it out"),
        (optim.AdamW, {"capturable": True}, (), "capturable.*leave it out"),
        (optim.Adam, {"differentiable": True}, (), "differentiable.*leave it out"),
        (optim.Adam, {"offload": {"state_format": "compact16"}}, (), 'state_format.*use "exact"'),
        (torch.nn.Linear, {}, (), "give a class of torch.optim.Optimizer"),
        (optim.AdamW([torch.zeros(1)]), {}, (), "give a class of torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(kind: Any, settings: Any, dtypes: Any, told: str) -> None:
    parameters = pair(*dtypes)
    generator = torch.random.get_rng_state()
    for groups in (parameters, [{"params": parameters}]):
        with pytest.raises(ConfigError, match=told) as caught:
            offload.wrap(kind, groups, **settings)
        assert getattr(kind, "__name__", "Optimizer") in str(caught.value) or kind is torch.nn.Linear
    assert all(weight.eq(1).all() and weight.grad is None for _, weight in parameters)
    assert torch.equal(generator, torch.random.get_rng_state())


def test_what_shows_of_large_tensors_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="beside another one"):
        offload.wrap(Clips, [torch.nn.Parameter(torch.ones(1025, 1024)) for _ in range(2)])


def test_two_groups_are_no_help_to_a_class_that_looks_at_their_places() -> None:
    (first, second, *_) = pair()
    for kind in (RateOfPlace, CountsGroups, FirstRate):
        with pytest.raises(ConfigError, match=f"{kind.__name__}.*another group"):
            offload.wrap(kind, [{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.7}])


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.bfloat16, torch.float16)])
def test_types_of_their_own_groups_have_the_bits_of_the_class(dtypes: Any, tmp_path: Path) -> None:
    own, ours = pair(*dtypes), pair(*dtypes)
    groups = [[{"params": [w for _, w in each if w.dtype is dtype]} for dtype in dtypes] for each in (own, ours)]
    theirs = optim.Adafactor(groups[0])
    with offload.wrap(optim.Adafactor, groups[1], offload=streamed(tmp_path)) as optimizer:
        weights = [w for group in groups[0] for w in group["params"]], [w for g in groups[1] for w in g["params"]]
        for each, parameters in ((theirs, weights[0]), (optimizer, weights[1])):
            train(parameters, each, range(5))
        assert_same([w.detach() for w in weights[0]], [w.detach() for w in weights[1]])
        assert_same(theirs.state_dict(), optimizer.state_dict())


def test_what_comes_later_is_tried_too() -> None:
    """A group that is added, and a weight that is thawed: refused before anything has changed."""
    whole, half = (torch.nn.Parameter(torch.ones(6, dtype=dtype)) for dtype in (torch.float32, torch.float16))
    half.requires_grad_(False)
    with offload.wrap(optim.Adafactor, [("whole", whole), ("half", half)]) as optimizer:
        whole.grad = torch.ones(6)
        optimizer.step()
        before = whole.detach().clone()
        half.requires_grad_(True).grad = torch.ones(6).half()
        with pytest.raises(ConfigError, match=r"Adafactor.*half"):
            optimizer.step()
        assert torch.equal(whole, before)
        half.grad = None
        added = [("other", torch.nn.Parameter(torch.ones(3))), ("wide", torch.nn.Parameter(torch.ones(3).half()))]
        with pytest.raises(ConfigError, match=r"Adafactor.*(other|wide)"):
            optimizer.add_param_group({"params": added})
        assert len(optimizer.param_groups) == 1
        optimizer.step()
        assert not torch.equal(whole, before)


def test_a_group_that_is_added_behind_a_step_is_not_of_that_step(tmp_path: Path) -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    theirs = Averaging(models[0].parameters())
    config = streamed(tmp_path, overlap="forward") | {"subgroup_numel": 1024}
    with offload.wrap(Averaging, models[1].parameters(), offload=config) as optimizer:
        optimizer.overlap_forward(models[1])
        for step in range(3):
            for model, each in zip(models, (theirs, optimizer), strict=True):
                each.zero_grad()
                model(torch.ones(2, 8) * step).square().mean().backward()
                each.step()
                each.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        assert_same(optimizer.state_dict()["param_groups"], theirs.state_dict()["param_groups"])


def test_a_group_that_could_not_be_added_leaves_nothing_behind() -> None:
    """Another one has its number then, and other state."""
    weight, whole, half = (
        torch.nn.Parameter(torch.ones(4).to(t)) for t in (torch.float32, torch.float32, torch.half)
    )
    with offload.wrap(optim.SGD, [weight], lr=0.1) as optimizer:
        shared = torch.nn.Parameter(whole.data)
        with pytest.raises(ConfigError, match="share memory"):
            optimizer.add_param_group({"params": [whole, shared]})
        optimizer.add_param_group({"params": [whole], "momentum": 0.9})
        for _ in range(2):
            weight.grad, whole.grad = torch.ones(4), torch.ones(4)
            optimizer.step()
        assert (optimizer.state[whole]["momentum_buffer"] == 1.9).all()
    with offload.wrap(optim.Adafactor, [weight]) as optimizer:
        for added in ([whole, half], [whole, half]):
            with pytest.raises(ConfigError, match="by itself"):
                optimizer.add_param_group({"params": added})


@contextlib.contextmanager
def about_to_fail(kind: type[Fails], folder: Path) -> Iterator[Any]:
    """Lend an optimizer whose next step fails."""
    ours = [weight for _, weight in pair()]
    named = [("first", ours[0]), ("second", ours[1])]
    with offload.wrap(kind, named, at=7, offload=streamed(folder)) as optimizer:
        for step in range(6):
            draw(ours, step)
            optimizer.step()
        draw(ours, 7)
        yield optimizer


def test_what_fails_in_training_names_class_and_parameter(tmp_path: Path) -> None:
    with offload.wrap(Fails, pair(), at=7) as optimizer, pytest.raises(ConfigError, match=r"Fails.*layer.*no mode"):
        optimizer.train()
    with about_to_fail(Fails, tmp_path) as optimizer:
        with pytest.raises(StepAbortedError, match=r"Fails.*can update (first|second): it raised ZeroDivisionError"):
            optimizer.step()
        with pytest.raises(SessionBrokenError):
            optimizer.step()


def test_what_failed_can_be_printed_with_its_variables_after_the_end(tmp_path: Path) -> None:
    with about_to_fail(Fails, tmp_path) as optimizer, pytest.raises(StepAbortedError) as caught:
        optimizer.step()
    failed, classes = caught.value, []
    while failed is not None:
        classes.append(type(failed))
        for frame, _ in traceback.walk_tb(failed.__traceback__):
            assert frame.f_code.co_name
            for value in list(frame.f_locals.values()):
                repr(value)
                if isinstance(value, torch.Tensor):
                    value.sum()
        failed = failed.__cause__ or failed.__context__
    assert ZeroDivisionError in classes


class RaisesInACircle(Fails):
    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        try:
            super().one(weight, state, group)
        except ZeroDivisionError as error:
            raise error from error


def test_an_error_that_is_its_own_cause_ends_the_step(tmp_path: Path) -> None:
    with (
        about_to_fail(RaisesInACircle, tmp_path) as optimizer,
        pytest.raises(StepAbortedError, match="ZeroDivisionError"),
    ):
        optimizer.step()


class Hashes(Plain):
    """An integer of 64 bits for each parameter, signed or not, which decides what a step does."""

    def __init__(self, params: Any, low: int = 0) -> None:
        super().__init__(params, low=low)

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        grown = (state.get("hash", 1) * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        state["hash"] = grown + group["low"]
        weight.sub_(weight.grad, alpha=state["hash"] % 1009 / 1009)


@pytest.mark.parametrize("low", [0, -(2**63)])
def test_integers_go_everywhere_as_they_are(low: int, tmp_path: Path) -> None:
    own, ours = ([weight for _, weight in pair()] for _ in range(2))
    theirs = Hashes(own, low=low)
    (tmp_path / "path").mkdir()
    with offload.wrap(Hashes, ours, low=low, offload=streamed(tmp_path / "path")) as optimizer:
        for round in range(6):
            for each, parameters in ((theirs, own), (optimizer, ours)):
                train(parameters, each, range(round, round + 1))
            assert_same(theirs.state_dict()["state"], optimizer.state_dict()["state"])
            if round == 2:
                optimizer.load_state_dict(theirs.state_dict())
            if round == 4:
                optimizer.save_checkpoint(tmp_path / "saved")
                optimizer.wait_checkpoint()
                optimizer.reset_state()
                optimizer.load_checkpoint(tmp_path / "saved")
        assert_same([w.detach() for w in own], [w.detach() for w in ours])
        theirs.load_state_dict(optimizer.state_dict())
        assert theirs.state[own[0]]["hash"].bit_length() > 53


def test_an_integer_that_grows_beyond_names_class_and_parameter() -> None:
    ours = pair()
    with offload.wrap(Grows, ours) as optimizer:
        for _ in range(7):
            for _, weight in ours:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
        with pytest.raises(
            StepAbortedError, match=r"Grows.*of layer\.\d, 'count' is an integer of more than 64 bits"
        ):
            optimizer.step()


class Grows(Plain):
    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        state["count"] = state.get("count", 1) << 8


def test_a_number_that_cannot_be_had_is_refused_and_nothing_is_loaded() -> None:
    ours = [weight for _, weight in pair()]
    with offload.wrap(Hashes, [("one", ours[0]), ("two", ours[1])]) as optimizer:
        train(ours, optimizer, range(2))
        before = optimizer.state_dict()
        for value in (1 << 64, 1.5, float("nan"), "text", [1]):
            saved = optimizer.state_dict()
            saved["state"][0]["hash"] = 5
            saved["state"][1]["hash"] = value
            with pytest.raises(ConfigError, match=r"'hash'.*Hashes for two"):
                optimizer.load_state_dict(saved)
            assert_same(optimizer.state_dict(), before)


def test_integers_of_groups_go_through_checkpoints_as_they_are(tmp_path: Path) -> None:
    seed = 1000009000027000027
    weight = torch.nn.Parameter(torch.ones(4))
    for round in range(2):
        group = {"params": [weight], "seed": torch.tensor(0 if round else seed), "plain": 0 if round else seed}
        with offload.wrap(optim.SGD, [group]) as optimizer:
            weight.grad = torch.ones(4)
            optimizer.step()
            if not round:
                optimizer.save_checkpoint(tmp_path / "saved", copy=True)
                optimizer.wait_checkpoint()
            else:
                optimizer.load_checkpoint(tmp_path / "saved")
            assert optimizer.param_groups[0]["seed"].item() == optimizer.param_groups[0]["plain"] == seed


def test_a_step_of_the_class_s_own_meaning_is_loaded() -> None:
    """Some keep no count by that name."""
    (_, weight), _ = pair()
    with offload.wrap(StepSizes, [weight]) as optimizer:
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert_same(optimizer.state_dict(), saved)


class StepSizes(Plain):
    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        state["step"] = state["step"] * 0.5 if state else torch.full_like(weight, -0.1)
        weight.add_(state["step"])


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad, optim.SGD, optim.NAdam, optim.Rprop])
def test_what_has_no_elements_has_all_keys_after_a_step(kind: Any, tmp_path: Path) -> None:
    own, ours = ([torch.nn.Parameter(torch.ones(shape)) for shape in ((0, 3), (4,))] for _ in range(2))
    settings = {"lr": 0.1, **({"momentum": 0.9} if kind is optim.SGD else {})}
    theirs = kind(own, **settings)
    with offload.wrap(kind, ours, **settings, offload=streamed(tmp_path)) as optimizer:
        for step in range(2):
            for each, parameters in ((theirs, own), (optimizer, ours)):
                draw(parameters, step)
                each.step()
        saved, wanted = optimizer.state_dict(), theirs.state_dict()
        assert saved["state"][0].keys() == wanted["state"][0].keys()
        assert saved["state"][0].get("step") == wanted["state"][0].get("step")
        assert_same(saved["state"][1], wanted["state"][1])
        theirs.load_state_dict(saved)
        optimizer.load_state_dict(wanted)
        for each, parameters in ((theirs, own), (optimizer, ours)):
            draw(parameters, 2)
            each.step()
        assert_same([p.detach() for p in own], [p.detach() for p in ours])
        optimizer.reset_state()
        assert not optimizer.state_dict()["state"]


def test_a_class_that_cannot_step_over_nothing_says_so() -> None:
    with pytest.raises(ConfigError, match=r"Adafactor.*can update empty: it raised ZeroDivisionError"):
        offload.wrap(
            optim.Adafactor,
            [("full", torch.nn.Parameter(torch.ones(3))), ("empty", torch.nn.Parameter(torch.ones(0)))],
        )


class Shifts(Plain):
    """Keeps the gradients of the last two steps, by moving one to the other's place."""

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        if not state:
            state["now"], state["before"] = torch.zeros_like(weight), torch.zeros_like(weight)
        weight.add_(state["now"] + state["before"] + weight.grad, alpha=-group["lr"])
        state["before"], state["now"] = state["now"], weight.grad.clone()


class KeepsMasters(Plain):
    """Has fp32 masters of its own, by the name that ours have."""

    def one(self, weight: torch.Tensor, state: Any, group: Any) -> None:
        if not state:
            state["master"] = weight.float()
        weight.copy_(state["master"].sub_(weight.grad.float(), alpha=group["lr"]))


@pytest.mark.parametrize(("kind", "dtype"), [(Shifts, torch.float32), (KeepsMasters, torch.bfloat16)])
def test_state_that_moves_or_has_our_names_is_the_class_s_own(kind: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    own, ours = ([weight for _, weight in pair(dtype)] for _ in range(2))
    theirs = kind(own)
    with offload.wrap(kind, ours, offload=streamed(tmp_path)) as optimizer:
        for step in range(4):
            for each, parameters in ((theirs, own), (optimizer, ours)):
                draw(parameters, step)
                each.step()
            assert_same([p.detach() for p in own], [p.detach() for p in ours])
            optimizer.load_state_dict(optimizer.state_dict())
