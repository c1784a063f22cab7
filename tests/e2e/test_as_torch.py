"""What torch's tests check of its optimizers, over the inputs in its `optim_db`, is checked of ours.

Every check runs with torch's own class first, so that it says something of torch's manners, and then with ours. Where
ours refuses on purpose, the case has one of `REASONS`, and the refusal is what is tested.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import offload

common = pytest.importorskip("torch.testing._internal.common_optimizers", reason="it needs expecttest")

INFOS = {info.optim_cls: info for info in common.optim_db}
PAIRS = {
    "AdamW": (offload.AdamW, torch.optim.AdamW),
    "Adam": (offload.Adam, torch.optim.Adam),
    "SGD": (offload.SGD, torch.optim.SGD),
    "Adagrad": (offload.Adagrad, torch.optim.Adagrad),
}

REASONS = {
    "amsgrad": "amsgrad",
    "weights with gaps": "use a contiguous weight",
    "complex, float64 and sparse tensors": "use bfloat16, float16 or float32 weights|use dense gradients",
    "capturable and differentiable": "a CUDA graph cannot hold|autograd does not see",
    "copies of an optimizer": "copy or save optimizer.state_dict",
    "a parameter twice in one group": "twice in one group",
    "parameters taken out of a group, or groups in another order": "not in the group any more",
}
"""What differs on purpose, and what the refusal says; docs/frameworks.md has the same table."""


class Maker:
    """Makes optimizers of one class over other arguments, and closes them."""

    def __init__(self, kind: Any, theirs: Any, given: dict[str, Any]) -> None:
        self.kind, self.theirs, self._given = kind, theirs, given
        self._made: list[Any] = []

    @property
    def kwargs(self) -> dict[str, Any]:
        return copy.deepcopy(self._given)

    def __call__(self, params: Any, **more: Any) -> Any:
        self._made.append(self.kind(params, **{**self.kwargs, **more}))
        return self._made[-1]

    def reference(self, params: Any, **more: Any) -> Any:
        """Return torch's own."""
        return self.theirs(params, **{**self.kwargs, **more})

    def close(self) -> None:
        for optimizer in self._made:
            if hasattr(optimizer, "close"):
                optimizer.close()


# Checks: `check(make, variant)`, and which variants there are of each, for an optimizer's OptimizerInfo.

CHECKS: dict[str, tuple[Callable[[Maker, Any], None], Callable[[Any], list[Any]], str | None]] = {}


def check(
    variants: Callable[[Any], list[Any]] | list[Any] | None = None, reason: str | None = None
) -> Callable[[Callable[[Maker, Any], None]], Callable[[Maker, Any], None]]:
    """Register a check; `reason` is what ours refuses it for."""
    listed = variants if callable(variants) else lambda info: [None] if variants is None else variants

    def register(function: Callable[[Maker, Any], None]) -> Callable[[Maker, Any], None]:
        CHECKS[function.__name__] = function, listed, reason
        return function

    return register


def layer(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Return a weight and a bias, always the same."""
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(size, generator=generator).to(dtype)) for size in ((10, 5), (10,))]


def clones(params: list[Parameter]) -> list[Parameter]:
    return [Parameter(parameter.detach().clone()) for parameter in params]


def give_gradients(params: list[Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def run(optimizer: Any, params: list[Any], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()


def loss_of(params: list[Any]) -> torch.Tensor:
    weight, bias = params
    return (weight.mv(torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype)) + bias).pow(2).sum()


def closure_of(optimizer: Any, params: list[Any]) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(params)
        loss.backward()
        return loss

    return closure


def assert_close(ours: list[Any], theirs: list[Any], tolerance: float = 1e-5) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach().float(), other.detach().float(), rtol=tolerance, atol=tolerance)


def assert_equal(one: Any, other: Any) -> None:
    """Verify that two nests of containers and tensors are equal."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other


def flags(info: Any) -> list[Any]:
    return [{}, {"foreach": True}] + [{"fused": True}] * ("fused" in info.supported_impls)


@check([torch.float32, torch.bfloat16, torch.float16])
def steps_are_torchs(make: Maker, dtype: Any) -> None:
    params = layer(dtype)
    theirs = [Parameter(parameter.detach().float()) for parameter in params]
    optimizer, reference = make(params), make.reference(theirs)
    for step in range(4):
        give_gradients(params, step)
        for one, other in zip(params, theirs, strict=True):
            other.grad = one.grad.float()
        optimizer.step()
        reference.step()
    assert_close(params, theirs, {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype])


@check(flags)
def flags_change_nothing(make: Maker, chosen: Any) -> None:
    params, plain = layer(), layer()
    given = make.kwargs
    if chosen.get("foreach") and isinstance(given.get("lr"), torch.Tensor):
        given["lr"] = float(given["lr"])  # torch refuses the two together
    run(make(params, **{**given, **chosen}), params, 3)
    run(make(plain), plain, 3)
    assert_close(params, plain, 0.0 if make.kind is not make.theirs else 1e-5)


@check(reason="weights with gaps")
def weights_have_gaps(make: Maker, _: None) -> None:
    params = [Parameter(torch.stack([p.detach(), p.detach()], -1)[..., 0]) for p in layer()]
    assert not params[0].is_contiguous()
    optimizer = make(params)
    closure = closure_of(optimizer, params)
    first = closure().item()
    for _ in range(12):
        optimizer.step(closure)
    last = closure().item()
    assert last > first if make.kwargs.get("maximize") else last < first


@check(lambda info: [*range(len(info.scheduler_inputs))])
def goes_in_the_right_direction_with_schedulers(make: Maker, number: int) -> None:
    info = INFOS[make.theirs]
    params, theirs = layer(), layer()
    found = []
    for optimizer, mine in ((make(params), params), (make.reference(theirs), theirs)):
        schedulers = [scheduler(optimizer) for scheduler in info.scheduler_inputs[number]]
        closure = closure_of(optimizer, mine)
        for _ in range(6):
            loss = optimizer.step(closure)
            for scheduler in schedulers:
                scheduler.step(loss) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
        found.append([float(group["lr"]) for group in optimizer.param_groups])
    assert found[0] == found[1]
    assert_close(params, theirs, 1e-4)


@check([(), (1,)])
def lr_may_be_a_tensor(make: Maker, shape: Any) -> None:
    lr = float(make.kwargs.get("lr", 1e-3))
    params, theirs = layer(), layer()
    optimizer = make(params, lr=torch.full(shape, lr))
    reference = make.reference(theirs, lr=lr)
    run(optimizer, params, 2)
    run(reference, theirs, 2)
    optimizer.param_groups[0]["lr"].fill_(lr / 2)
    reference.param_groups[0]["lr"] = lr / 2
    run(optimizer, params, 2, 2)
    run(reference, theirs, 2, 2)
    assert_close(params, theirs)


@check()
def a_closure_is_called_once_and_its_loss_returned(make: Maker, _: None) -> None:
    params, calls = layer(), []
    optimizer = make(params)

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        give_gradients(params, 0)
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert calls == [True]
    theirs = layer()
    run(make.reference(theirs), theirs, 1)
    assert_close(params, theirs)


@check()
def a_step_without_gradients_changes_nothing(make: Maker, _: None) -> None:
    params = layer()
    optimizer = make(params)
    optimizer.step()
    run(optimizer, params, 2)
    before, saved = clones(params), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.step()
    assert_equal([*params], before)
    assert_equal(optimizer.state_dict()["state"], saved["state"])


@check()
def a_step_with_zero_gradients_is_torchs(make: Maker, _: None) -> None:
    params, theirs = layer(), layer()
    for optimizer, mine in ((make(params), params), (make.reference(theirs), theirs)):
        for parameter in mine:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.step()
    assert_close(params, theirs)
    if not make.kwargs.get("weight_decay") and make.theirs is not torch.optim.AdamW:
        assert_equal([*params], layer())


@check()
def it_prints_its_settings(make: Maker, _: None) -> None:
    text = repr(make(layer()))
    assert make.theirs.__name__ in text
    assert "lr: " in text


@check()
def state_dicts_are_deterministic(make: Maker, _: None) -> None:
    params = layer()
    optimizer = make(params)
    run(optimizer, params, 2)
    again = clones(params)
    other = make(again)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's shares what it is given
    run(optimizer, params, 2, 2)
    run(other, again, 2, 2)
    assert_equal([*params], [*again])
    assert_equal(optimizer.state_dict(), other.state_dict())
    other.param_groups.extend(other.param_groups)  # repeated parameters have the number that they had
    assert_equal(optimizer.state_dict()["param_groups"][-1], other.state_dict()["param_groups"][-1])
    assert_equal(optimizer.state_dict()["state"], other.state_dict()["state"])


@check()
def steps_that_are_no_tensors_load(make: Maker, _: None) -> None:
    params = layer()
    optimizer = make(params)
    run(optimizer, params, 2)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].item()
    theirs = clones(params)
    reference = make.reference(theirs)
    reference.load_state_dict(copy.deepcopy(saved))
    optimizer.load_state_dict(saved)
    run(optimizer, params, 1, 2)
    run(reference, theirs, 1, 2)
    assert_close(params, theirs)


@check(lambda info: sorted({"maximize", "foreach", "differentiable", "capturable"} & {*info.not_og_supported_flags}))
def older_state_dicts_load(make: Maker, flag: str) -> None:
    params = layer()
    optimizer = make(params)
    run(optimizer, params, 2)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group.pop(flag, None)
    optimizer.load_state_dict(saved)
    run(optimizer, params, 1, 2)
    theirs = layer()
    run(make.reference(theirs), theirs, 3)
    if flag != "maximize" or not make.kwargs.get("maximize"):
        assert_close(params, theirs)


@check([True, False])
def saved_files_load(make: Maker, weights_only: bool) -> None:
    params = layer()
    optimizer = make(params)
    run(optimizer, params, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    assert_equal(loaded, optimizer.state_dict())
    again = clones(params)
    other = make(again)
    other.load_state_dict(loaded)
    assert_equal(other.state_dict(), optimizer.state_dict())


@check(["to torch's", "from torch's"])
def state_dicts_are_exchanged(make: Maker, way: str) -> None:
    params = layer()
    first, second = (make, make.reference) if way == "to torch's" else (make.reference, make)
    optimizer = first(params)
    run(optimizer, params, 3)
    again = clones(params)
    other = second(again)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, 3, 3)
    run(other, again, 3, 3)
    assert_close(params, again)


@check()
def groups_of_state_dicts_are_torchs(make: Maker, _: None) -> None:
    params, theirs = layer(), layer()
    saved, expected = make(params).state_dict(), make.reference(theirs).state_dict()
    for group, wanted in zip(saved["param_groups"], expected["param_groups"], strict=True):
        assert group.keys() == wanted.keys()
        assert {n: group[n] for n in wanted if n not in ("fused", "foreach")} == {
            n: wanted[n] for n in wanted if n not in ("fused", "foreach")
        }


@check([*itertools.product((False, True), (False, True))])
def names_travel(make: Maker, named: tuple[bool, bool]) -> None:
    called = ["0.weight", "0.bias"]
    params = layer()
    optimizer = make([*zip(called, params, strict=True)] if named[0] else params)
    run(optimizer, params, 2)
    saved = optimizer.state_dict()
    again = clones(params)
    other = make([*zip(called, again, strict=True)] if named[1] else again)
    other.load_state_dict(copy.deepcopy(saved))
    for group in (other.state_dict()["param_groups"][0], other.param_groups[0]):
        assert group.get("param_names") == (called if any(named) else None)
    run(optimizer, params, 1, 2)
    run(other, again, 1, 2)
    assert_equal([*params], [*again])


@check(["pre", "post", "all"])
def step_hooks(make: Maker, which: str) -> None:
    params, heard = layer(), []
    optimizer = make(params)

    def before(hooked: Any, args: Any, kwargs: Any) -> None:
        assert hooked is optimizer
        heard.append("pre")
        give_gradients(params, 5)

    def after(hooked: Any, args: Any, kwargs: Any) -> None:
        heard.append("post")
        assert not torch.equal(params[0], layer()[0])

    handles = [optimizer.register_step_pre_hook(before)]
    if which != "pre":
        handles.append(optimizer.register_step_post_hook(after))
    if which == "all":
        handles.append(register_optimizer_step_pre_hook(lambda *_: heard.append("global pre")))
        handles.append(register_optimizer_step_post_hook(lambda *_: heard.append("global post")))
    expected = {"pre": ["pre"], "post": ["pre", "post"], "all": ["global pre", "pre", "post", "global post"]}[which]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert sorted(heard) == sorted(expected)
    optimizer.step()
    assert len(heard) == len(expected)


@check(["pre", "post", "both"])
def state_dict_hooks(make: Maker, which: str) -> None:
    optimizer = make(layer())
    if which != "post":
        optimizer.register_state_dict_pre_hook(lambda hooked: hooked.state.__setitem__("seen", 1))
    if which != "pre":

        def after(hooked: Any, saved: dict[str, Any]) -> Any:
            saved["state"].pop("seen", None)
            saved["more"] = True
            return saved if which == "both" else None

        optimizer.register_state_dict_post_hook(after)
    saved = optimizer.state_dict()
    assert saved["state"].get("seen") == (1 if which == "pre" else None)
    assert saved.get("more") == (None if which == "pre" else True)
    assert optimizer.state.get("seen") == (None if which == "post" else 1)


@check(["pre", "pre returns another", "post", "both"])
def load_state_dict_hooks(make: Maker, which: str) -> None:
    optimizer = make(layer())
    saved = optimizer.state_dict()
    lr = float(saved["param_groups"][0]["lr"])

    def before(hooked: Any, given: dict[str, Any]) -> Any:
        if which == "pre returns another":
            groups = [{**group, "lr": lr / 2} for group in given["param_groups"]]
            return {**given, "param_groups": groups}
        given["param_groups"] = [{**group, "lr": lr / 2} for group in given["param_groups"]]
        return None

    def after(hooked: Any) -> None:
        hooked.state["loaded"] = float(hooked.param_groups[0]["lr"])

    if which != "post":
        optimizer.register_load_state_dict_pre_hook(before)
    if which in ("post", "both"):
        optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(saved)
    now = lr if which == "post" else lr / 2
    assert float(optimizer.param_groups[0]["lr"]) == now
    assert float(saved["param_groups"][0]["lr"]) == lr
    assert optimizer.state.get("loaded") == (now if which in ("post", "both") else None)


@check(["deepcopy", "pickle"], "copies of an optimizer")
def an_optimizer_is_copied(make: Maker, way: str) -> None:
    params = layer()
    optimizer = make(params)
    run(optimizer, params, 1)
    other = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert public <= vars(other).keys()


@check(["complex64", "float64"], "complex, float64 and sparse tensors")
def other_dtypes(make: Maker, name: str) -> None:
    params = [Parameter(torch.ones(3, 2, dtype=getattr(torch, name)))]
    optimizer = make(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()


@check(lambda info: [None] if info.supports_sparse else [], "complex, float64 and sparse tensors")
def sparse_gradients(make: Maker, _: None) -> None:
    params = [Parameter(torch.ones(3, 2))]
    given = {"weight_decay": 0.0}  # which torch refuses with them
    if "momentum" in make.kwargs or "nesterov" in make.kwargs:
        given["momentum"] = make.kwargs["momentum"]
    optimizer = make(params, **given)
    params[0].grad = torch.ones(3, 2).to_sparse()
    optimizer.step()


@check(lambda info: [] if info.supports_sparse else [None])
def sparse_gradients_are_refused_as_by_torch(make: Maker, _: None) -> None:
    params = [Parameter(torch.ones(3, 2))]
    optimizer = make(params)
    params[0].grad = torch.ones(3, 2).to_sparse()
    with pytest.raises((RuntimeError, offload.ConfigError), match=r"sparse"):
        optimizer.step()


@check(
    lambda info: ["differentiable", *["capturable"] * (info.optim_cls in (torch.optim.Adam, torch.optim.AdamW))],
    "capturable and differentiable",
)
def flags_that_are_refused(make: Maker, flag: str) -> None:
    make(layer(), **{flag: True})


@check()
def other_keys_of_state_travel(make: Maker, _: None) -> None:
    params = layer()
    optimizer = make(params)
    optimizer.state["x"] = 1
    optimizer.state["counts"]["n"] = 2
    run(optimizer, params, 1)
    saved = optimizer.state_dict()
    assert (saved["state"]["x"], saved["state"]["counts"]) == (1, {"n": 2})
    again = clones(params)
    other = make(again)
    other.state["y"] = 3
    other.load_state_dict(copy.deepcopy(saved))
    assert other.state["x"] == 1
    assert "y" not in other.state
    assert {key for key in other.state if isinstance(key, str)} == {"x", "counts"}
    run(optimizer, params, 1, 1)
    run(other, again, 1, 1)
    assert_equal([*params], [*again])
    del other.state["x"]
    assert "x" not in other.state


@check([True, False])
def gradients_are_zeroed(make: Maker, set_to_none: bool) -> None:
    params = layer()
    optimizer = make(params)
    closure_of(optimizer, params)()
    optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in params:
        assert parameter.grad is None if set_to_none else not parameter.grad.any()
    closure_of(optimizer, params)()
    optimizer.step()
    theirs = layer()
    reference = make.reference(theirs)
    closure_of(reference, theirs)()
    reference.step()
    assert_close(params, theirs)


@check(["one view of all", "each its own", "kept by a hook", "detached in place"])
def gradients_lie_in_memory_of_the_program(make: Maker, whose: str) -> None:
    """What is written there after backward counts, as by an all-reduce of one buffer; zeros there drop the last."""
    seen = []
    for kind in (make, make.reference):
        optimizer = kind(params := layer())
        sizes = [parameter.numel() for parameter in params]
        buffers = [torch.zeros(sum(sizes))] if whose == "one view of all" else [*map(torch.zeros_like, params)]
        views = buffers[0].split(sizes) if whose == "one view of all" else buffers
        kept: dict[Any, torch.Tensor] = {}
        for parameter, view in zip(params, views, strict=True):
            if whose == "kept by a hook":
                parameter.register_post_accumulate_grad_hook(lambda p, kept=kept: kept.update({p: p.grad}))
            elif whose != "detached in place":
                parameter.grad = view.view_as(parameter)
        for scale in (1.0, 0.5, 2.0):
            for buffer in buffers:
                buffer.zero_()
            if whose == "detached in place":
                for parameter in params:
                    if parameter.grad is not None:
                        parameter.grad.detach_().zero_()
            loss_of(params).backward()
            for buffer in (*buffers, *kept.values()):
                buffer.mul_(scale)
            optimizer.step()
            if whose == "kept by a hook":
                optimizer.zero_grad()
        seen.append([*params])
    assert_close(*seen)


@check(["taken out", "moved", "reversed", "deleted"], "parameters taken out of a group, or groups in another order")
def groups_are_changed_in_place(make: Maker, how: str) -> None:
    weight, bias = params = layer()
    optimizer = make([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.2}])
    run(optimizer, params, 1)
    before, groups = clones(params), optimizer.param_groups
    if how == "reversed":
        groups.reverse()
    elif how == "deleted":
        del groups[1]
    else:
        groups[1]["params"].clear()
        if how == "moved":
            groups[0]["params"].append(bias)
    try:
        run(optimizer, params, 1, 1)
    except offload.ConfigError:
        assert_equal([*params], [*before])
        raise


@check(["groups", "sizes"])
def state_dicts_of_other_models_are_refused(make: Maker, what: str) -> None:
    params = layer()
    optimizer = make(params)
    run(optimizer, params, 1)
    weight, bias = layer()
    other = make([{"params": [weight]}, {"params": [bias]}] if what == "groups" else [weight])
    with pytest.raises(ValueError, match="group"):
        other.load_state_dict(optimizer.state_dict())


def wrong_arguments(make: Maker, number: int) -> None:
    """Torch's class refuses them; ours does, too, or computes what torch does with plain numbers."""
    found = INFOS[make.theirs].optim_error_inputs_func("cpu", torch.float32)[number]
    given = found.optimizer_error_input
    params = layer() if given.params is None else given.params
    if found.error_type is UserWarning:
        with pytest.warns(UserWarning, match=found.error_regex):
            make(params, **given.kwargs)
        return
    try:
        optimizer = make(params, **given.kwargs)
    except found.error_type:
        return
    assert make.kind is not make.theirs
    plain = {
        name: tuple(map(float, value)) if name == "betas" else float(value) if name == "lr" else value
        for name, value in given.kwargs.items()
    }
    theirs = layer()
    run(optimizer, params, 2)
    run(make.reference(theirs, **plain), theirs, 2)
    assert_close(params, theirs)


class Case(NamedTuple):
    """One check of one optimizer with one of the inputs of `optim_db`."""

    name: str
    check: Callable[[Maker, Any], None]
    optimizer: str
    kwargs: dict[str, Any]
    variant: Any
    reason: str | None


def cases() -> Iterator[Case]:
    for optimizer, (_, theirs) in PAIRS.items():
        info = INFOS[theirs]
        for given in info.optim_inputs_func(device="cpu"):
            for name, (function, variants, refused) in CHECKS.items():
                for variant in variants(info):
                    reason = "amsgrad" if given.kwargs.get("amsgrad") else refused
                    label = f"{name}-{optimizer}-{given.desc}-{variant}"
                    yield Case(label, function, optimizer, given.kwargs, variant, reason)
        for number, wrong in enumerate(info.optim_error_inputs_func("cpu", torch.float32)):
            reason = "a parameter twice in one group" if wrong.error_type is UserWarning else None
            desc = wrong.optimizer_error_input.desc
            yield Case(f"wrong_arguments-{optimizer}-{desc}-{number}", wrong_arguments, optimizer, {}, number, reason)


CASES = [*cases()]
ARITHMETIC = {"steps_are_torchs", "flags_change_nothing", "a_step_with_zero_gradients_is_torchs", "wrong_arguments"}
RUNS = [*dict.fromkeys((case.optimizer, case.check.__name__) for case in CASES)]


def run_case(case: Case) -> None:
    """Run a check with torch's class, and with ours."""
    ours, theirs = PAIRS[case.optimizer]
    for kind in (theirs, ours):
        make = Maker(kind, theirs, case.kwargs)
        try:
            if kind is theirs or case.reason is None:
                case.check(make, case.variant)
            else:
                with pytest.raises(offload.ConfigError, match=REASONS[case.reason]):
                    case.check(make, case.variant)
        finally:
            make.close()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(("optimizer", "check"), RUNS)
def test_as_torch(optimizer: str, check: str, every: int) -> None:
    """With all inputs of `optim_db`, or with every third where no arithmetic is; an error has a note of the case.

    Each check begins at another one.
    """
    chosen = [case for case in CASES if (case.optimizer, case.check.__name__) == (optimizer, check)]
    if check not in ARITHMETIC:
        chosen = chosen[min(RUNS.index((optimizer, check)) % every, len(chosen) - 1) :: every]
    for case in chosen:
        try:
            run_case(case)
        except BaseException as error:
            error.add_note(case.name)
            raise


def test_how_much_is_as_torch_has_it() -> None:
    """`make test-full` runs each of these cases above; a refusal that is none fails there."""
    alike = [case for case in CASES if case.reason is None]
    assert len({case.name for case in CASES}) == len(CASES) >= 858
    assert len(alike) >= 780
    assert {case.reason for case in CASES} == {None, *REASONS}
    assert len(REASONS) <= 7


def test_pages_say_what_differs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text("utf-8")
    table = page.split("## What differs from torch on purpose")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == [*REASONS]
