"""What torch's users do beside training works here, or is refused by one clear error: frozen weights of any type,
groups without values, weights of another form, `optimizer.state` handed on."""

from __future__ import annotations

import contextlib
import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from awkward import same
from torch.nn import Parameter

import offload
from offload.errors import ConfigError, SessionBrokenError


class Quantised(torch.Tensor):
    """Codes of a byte and a scale that say they are bfloat16, as libraries for quantised weights have them."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes)
        raise NotImplementedError(f"{func} of a quantised weight")


def frozen(tensor: torch.Tensor) -> Parameter:
    return Parameter(tensor, requires_grad=False)


def in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "uint8": lambda: frozen(torch.zeros(3, 4, dtype=torch.uint8)),
    "int4, two in a byte": lambda: frozen(torch.zeros(3, 2, dtype=torch.int8).view(torch.uint8)),
    "uint4": lambda: frozen(torch.empty(3, 4, dtype=torch.uint4)),
    "int64": lambda: frozen(torch.zeros(3, dtype=torch.int64)),
    "bool": lambda: frozen(torch.zeros(3, dtype=torch.bool)),
    "no elements": lambda: frozen(torch.zeros(0, dtype=torch.uint8)),
    "float64": lambda: frozen(torch.zeros(3, dtype=torch.float64)),
    "float8": lambda: frozen(torch.zeros(3, dtype=torch.float8_e4m3fn)),
    "complex": lambda: frozen(torch.zeros(3, dtype=torch.complex64)),
    "meta": lambda: frozen(torch.zeros(3, device="meta")),
    "sparse": lambda: frozen(torch.eye(3).to_sparse()),
    "gaps": lambda: frozen(torch.zeros(3, 4)[:, :2]),
    "expanded": lambda: frozen(torch.zeros(1).expand(3)),
    "negated": lambda: frozen(torch._neg_view(torch.ones(3))),
    "inference": lambda: frozen(in_inference_mode()),
    "quantised": lambda: Quantised(torch.zeros(3, 4, dtype=torch.int8)),
    "16 bits": lambda: frozen(torch.zeros(3, 4, dtype=torch.bfloat16)),
}
MAKERS: dict[str, Callable[..., Any]] = {
    "AdamW": offload.AdamW,
    "Muon": offload.Muon,
    "wrap": lambda params, **rest: offload.wrap(torch.optim.Adam, params, **rest),
}
SETTINGS: list[dict[str, Any]] = [{}, {"overlap": "backward"}, {"gradient_memory": 0}, {"gradient_dtype": "float32"}]


def trained(optimizer: Any, weight: torch.Tensor, steps: int = 2) -> torch.Tensor:
    for _ in range(steps):
        optimizer.zero_grad()
        (weight.float() ** 2).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return weight.detach()


def weight() -> Parameter:
    return Parameter(torch.linspace(1, 2, 16).view(4, 4))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("maker", MAKERS)
def test_frozen_weights_of_any_kind_are_left_alone(maker: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """In groups that optimizers are made with, and in those that are added, first, last and alone."""
    if maker == "wrap":
        settings = {name: value for name, value in settings.items() if name != "gradient_memory"}
    config = {"host_memory": 0, "paths": [tmp_path], **settings}
    alone, with_others = weight(), weight()
    others = [make() for make in KINDS.values()]
    with MAKERS[maker]([("w", alone)], lr=0.1, offload=config) as optimizer:
        expected = trained(optimizer, alone, 4)
    named = [*zip(KINDS, others, strict=True)]
    half = len(named) // 2
    groups = [{"params": named[half:]}, {"params": [*named[:half], ("w", with_others)]}]
    with MAKERS[maker](groups, lr=0.1, offload=config) as optimizer:
        trained(optimizer, with_others)
        optimizer.add_param_group({"params": [(f"{name}, too", make()) for name, make in KINDS.items()]})
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
        optimizer.load_checkpoint(tmp_path / "ck")
        assert torch.equal(trained(optimizer, with_others), expected)
        assert [*optimizer.state] == [with_others]
    assert all(other.grad is None for other in others)


@pytest.mark.parametrize("maker", MAKERS)
def test_all_weights_may_be_frozen_at_first(maker: str) -> None:
    later, reference = weight(), weight()
    later.requires_grad_(False)
    with MAKERS[maker]([("q", KINDS["meta"]()), ("w", later)], lr=0.1) as optimizer:
        optimizer.step()
        later.requires_grad_(True)
        with MAKERS[maker]([("w", reference)], lr=0.1) as other:
            assert torch.equal(trained(optimizer, later), trained(other, reference))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_that_cannot_be_updated_is_named_when_it_has_a_gradient(settings: dict[str, Any], tmp_path: Path) -> None:
    config = {"host_memory": 0, "paths": [tmp_path], **settings}
    mine, reference = weight(), weight()
    told = dict.fromkeys(("float64", "float8", "uint8"), "use bfloat16, float16 or float32")
    told |= {"gaps": "contiguous", "meta": "keep weights on the CPU"}
    others = {kind: KINDS[kind]() for kind in told}
    with offload.AdamW([("w", reference)], lr=0.1, offload=config) as optimizer:
        expected = trained(optimizer, reference, 7)
    with offload.AdamW([*others.items(), ("w", mine)], lr=0.1, offload=config) as optimizer:
        trained(optimizer, mine, 1)
        for kind, bad in others.items():
            (mine**2).sum().backward()
            if kind == "uint8":
                bad.grad = torch.zeros_like(bad)
            else:
                (bad.requires_grad_(True).float() ** 2).sum().backward()
            for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
                with pytest.raises(ConfigError, match=f"{kind}: .*{told[kind]}"):
                    call()
            bad.grad = None
            bad.requires_grad_(False)
            optimizer.step()  # with the gradient of the other, which was there
            optimizer.zero_grad()
        assert torch.equal(trained(optimizer, mine, 1), expected)


@pytest.mark.late(shared=True)
@pytest.mark.parametrize("settings", [{}, {"keep_grads": False}, {"overlap": "backward"}], ids=str)
def test_frozen_weights_may_lie_on_other_devices(settings: dict[str, Any], tmp_path: Path) -> None:
    config = {"host_memory": 0, "paths": [tmp_path], **settings}
    mine, reference = (Parameter(weight().detach().to("late:0")) for _ in range(2))
    with offload.AdamW([("w", reference)], lr=0.1, offload=config) as optimizer:
        expected = trained(optimizer, reference, 4)
    elsewhere = [frozen(torch.zeros(3)), frozen(torch.zeros(3, dtype=torch.uint8)), KINDS["meta"]()]
    named = [(f"frozen.{number}", each) for number, each in enumerate(elsewhere)]
    with offload.AdamW([*named, ("w", mine)], lr=0.1, offload=config) as optimizer:
        trained(optimizer, mine, 1)
        elsewhere[0].requires_grad_(True)
        (mine.float() ** 2).sum().backward()
        elsewhere[0].sum().backward()
        with pytest.raises(ConfigError, match=r"frozen.0: .*have all weights on late:0"):
            optimizer.step()
        elsewhere[0].grad = None
        elsewhere[0].requires_grad_(False)
        optimizer.step()
        assert torch.equal(trained(optimizer, mine), expected)
    mine.requires_grad_(False)
    with offload.AdamW([("q", KINDS["meta"]()), ("w", mine)], lr=0.1, offload=config) as optimizer:
        mine.requires_grad_(True)
        trained(optimizer, mine, 1)
        assert optimizer.state_for(mine)["exp_avg"].any()


@pytest.mark.late(shared=True)
@pytest.mark.parametrize("settings", [{}, {"keep_grads": False}, {"overlap": "backward"}], ids=str)
@pytest.mark.parametrize("there", [True, False])
def test_a_weight_that_was_moved_to_another_device_is_named(
    settings: dict[str, Any], there: bool, tmp_path: Path
) -> None:
    if not there and not settings.get("keep_grads", True):
        settings = {}  # that is for weights on a device
    devices = ["late:0", "cpu"] if there else ["cpu", "late:0"]
    mine, other = (Parameter(weight().detach().to(devices[0])) for _ in range(2))
    config = {"host_memory": 0, "paths": [tmp_path], **settings}
    with offload.AdamW([("layer.weight", mine), ("w", other)], lr=0.1, offload=config) as optimizer:
        trained(optimizer, mine, 1)
        data = mine.data
        mine.data = data.to(devices[1])
        said = f"layer.weight: .*on {devices[1]}.*make a new optimizer"
        # Where gradients stay on a device until the step, nobody looks at them before.
        looks = not there or "keep_grads" in settings
        with pytest.raises(ConfigError, match=said) if looks else contextlib.nullcontext():
            (mine * mine).sum().backward()
        with pytest.raises(ConfigError, match=said):
            optimizer.step()
        mine.grad, mine.data = None, data
        trained(optimizer, mine, 1)


class Adapted(torch.nn.Module):
    """A quantised layer whose codes are frozen, with two adapters, as PEFT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = frozen(torch.arange(64, dtype=torch.uint8).view(8, 8))
        self.scale = frozen(torch.full((8, 1), 0.01, dtype=torch.float64))
        for name in ("first", "second"):
            self.register_parameter(f"{name}_a", Parameter(torch.linspace(-1, 1, 16).view(2, 8)))
            self.register_parameter(f"{name}_b", Parameter(torch.zeros(8, 2)))

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        whole = (self.base.double() * self.scale).float()
        return x @ (whole + getattr(self, f"{name}_b") @ getattr(self, f"{name}_a")).t()


def test_adapters_of_one_quantised_base_have_an_optimizer_each(tmp_path: Path) -> None:
    def run(given: Callable[[Adapted, str], Any], folder: Path) -> list[torch.Tensor]:
        model = Adapted()
        optimizers = {name: offload.AdamW(given(model, name), lr=0.1) for name in ("first", "second")}
        for step in range(6):
            if step == 3:  # from checkpoints, to new ones
                for name, optimizer in optimizers.items():
                    optimizer.save_checkpoint(folder / name, model=model)
                    optimizer.wait_checkpoint()
                    optimizer.close()
                    optimizers[name] = offload.AdamW(given(model, name), lr=0.1)
                    optimizers[name].load_checkpoint(folder / name, model=model)
            name = ("first", "second")[step % 2]
            model(torch.ones(3, 8), name).pow(2).mean().backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
        for optimizer in optimizers.values():
            optimizer.close()
        return [parameter.detach() for parameter in model.parameters()]

    def of(model: Adapted, name: str) -> list[tuple[str, Parameter]]:
        return [(each, p) for each, p in model.named_parameters() if each.startswith(("base", "scale", name))]

    def alone(model: Adapted, name: str) -> list[tuple[str, Parameter]]:
        return [(each, p) for each, p in of(model, name) if p.requires_grad]

    expected = run(alone, tmp_path / "alone")
    assert not torch.equal(expected[2], Adapted().first_a)
    for mine, other in zip(run(of, tmp_path / "all"), expected, strict=True):
        assert torch.equal(mine, other)


# Groups without values


@pytest.mark.parametrize("maker", MAKERS)
def test_a_saved_group_takes_what_it_lacks_from_the_optimizer(maker: str) -> None:
    """torch.distributed.checkpoint gives none to a group without parameters."""
    mine, reference = weight(), weight()

    def groups(own: Parameter) -> list[dict[str, Any]]:
        return [{"params": [], "lr": 0.3, "weight_decay": 0.2}, {"params": [own], "lr": 0.1, "weight_decay": 0.05}]

    with MAKERS[maker](groups(mine)) as optimizer, MAKERS[maker](groups(reference)) as other:
        trained(optimizer, mine)
        trained(other, reference)
        for lacks in ("all", "lr", "others"):
            saved = optimizer.state_dict()
            before = [{**group, "params": None} for group in optimizer.param_groups]
            for group in saved["param_groups"]:
                for name in [name for name in group if name != "params"]:
                    if lacks == "all" or (name == "lr") == (lacks == "lr"):
                        del group[name]
            optimizer.load_state_dict(saved)
            assert [{**group, "params": None} for group in optimizer.param_groups] == before
            assert torch.equal(trained(optimizer, mine), trained(other, reference))
        saved["param_groups"][0]["weight_decay"] = saved["param_groups"][1]["weight_decay"] = -1
        if maker != "wrap":  # which knows nothing of its class's
            with pytest.raises(ConfigError, match="weight_decay"):
                optimizer.load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_empty_group_goes_through_torchs_distributed_checkpoint() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = torch.nn.Linear(4, 4)
    groups = [{"params": [], "lr": 0.3}, {"params": [*model.parameters()], "lr": 0.1}]
    with offload.AdamW(groups) as optimizer:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        before = {p: optimizer.state_for(p) for p in model.parameters()}
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
        assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.1]
        assert all(same(optimizer.state_for(p), entry) for p, entry in before.items())
        optimizer.step()


# Weights of another form

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "padded": lambda data: torch.cat([data, data[:1]]),
    "cut": lambda data: data[:2].clone(),
    "flat": lambda data: data.flatten(),
    "other strides": lambda data: data.t().contiguous().t(),
    "bfloat16": lambda data: data.bfloat16(),
    "float64": lambda data: data.double(),
}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_weight_of_another_form_is_named_in_backward_as_in_the_step(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    config = {"host_memory": 0, "paths": [tmp_path], **settings}
    mine, other = weight(), weight()
    with offload.AdamW([("layer.weight", mine), ("w", other)], lr=0.1, offload=config) as optimizer:
        (mine.sum() + other.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        saved, data = optimizer.state_for(other), mine.data
        said = "layer.weight: .*make a new optimizer after changing a weight's dtype, shape, memory format or device"
        for change in CHANGES.values():
            mine.data = change(data)
            with pytest.raises(ConfigError, match=said):
                (mine * mine).sum().backward()
            with pytest.raises(ConfigError, match=said):
                optimizer.step()
            mine.grad, mine.data = None, data
            assert same(optimizer.state_for(other), saved)
            trained(optimizer, mine, 1)  # nothing was lost


# Arguments and attributes


def bad_arguments() -> Iterator[Any]:
    for kind in (offload.AdamW, offload.Adam, offload.SGD, offload.Adagrad):
        for name in inspect.signature(kind).parameters:
            if name in ("lr", "weight_decay", "eps", "momentum", "lr_decay"):
                yield pytest.param(kind, {name: -1.0}, id=f"{kind.__name__}-{name}")
    yield pytest.param(offload.AdamW, {"betas": (1.0, 0.9)}, id="betas")


@pytest.mark.parametrize(("kind", "bad"), [*bad_arguments()])
def test_hyperparameters_are_looked_at_before_parameters(kind: Any, bad: dict[str, Any]) -> None:
    for params in (None, [], 3, [3]):
        for each in (kind.torch_class, kind):
            with pytest.raises(ValueError, match=r"-1|beta"):
                each(params, **bad)
        with pytest.raises((TypeError, ValueError)) as theirs:
            kind.torch_class(params)
        with pytest.raises(theirs.type):
            kind(params)


def test_state_may_be_assigned_to_itself() -> None:
    mine = weight()
    with offload.AdamW([mine]) as optimizer, offload.AdamW([weight()]) as other:
        trained(optimizer, mine)
        trained(other, other.param_groups[0]["params"][0])
        optimizer.state["note"] = {"kept": 1}
        before = optimizer.state_for(mine)
        optimizer.state = optimizer.state
        assert same(optimizer.state_for(mine), before)
        assert optimizer.state["note"] == {"kept": 1}
        for value in (other.state, dict(optimizer.state), None, 3, [1]):
            with pytest.raises(ConfigError, match="use load_state_dict to replace state"):
                optimizer.state = value
        assert same(optimizer.state_for(mine), before)
        optimizer.state = {}
        assert len(optimizer.state) == 0
    optimizer.state = optimizer.state  # closed
    with pytest.raises(SessionBrokenError):
        optimizer.step()


@pytest.mark.parametrize("wrapper", ["accelerate", "lightning"])
def test_wrappers_hand_state_on(wrapper: str) -> None:
    mine = weight()
    with offload.AdamW([mine]) as optimizer:
        trained(optimizer, mine)
        if wrapper == "accelerate":
            accelerate = pytest.importorskip("accelerate")
            wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer, device_placement=False)
        else:
            wrapped = pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer(optimizer)
        before = optimizer.state_for(mine)
        wrapped.state = wrapped.state
        assert same(optimizer.state_for(mine), before)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("overlap", ["off", "backward", "both"])
def test_a_forgotten_optimizer_ends_at_once_without_the_collector(maker: str, overlap: str, tmp_path: Path) -> None:
    """Its thread, files and memory. The first optimizer of a process waits: torch imports its compiler for that one,
    and what fails there keeps the frames that wait for it, and the optimizer, until the collector comes."""
    if maker == "Muon" and overlap == "both":
        overlap = "backward"
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    try:
        optimizer = MAKERS[maker](
            model.named_parameters(), lr=0.1, offload={"host_memory": 0, "paths": [tmp_path], "overlap": overlap}
        )
        if overlap == "both":
            optimizer.overlap_forward(model)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.state_dict()
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
        owned = [weakref.ref(each) for each in (optimizer, optimizer.engine)]
        del optimizer
        assert [each() for each in owned] == [None, None]
        assert "offload-engine" not in [thread.name for thread in threading.enumerate()]
        assert (tmp_path / "ck" / "COMMIT").exists()
    finally:
        gc.enable()
