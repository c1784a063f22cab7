"""Weights that wait in host memory for the test accelerator: the bits of a model that lies on the device."""

from __future__ import annotations

import copy
import gc
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prepared
import pytest
import torch
import torch.distributed as dist
from settling import LONG_S
from tensor_files import saved_as_safetensors
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from accelerator import late
from offload import backends
from offload.cli import streamed
from offload.optim import shards
from offload.weights.mapping import is_mapped

pytestmark = [
    pytest.mark.late(shared=True),
    pytest.mark.not_overlapped("steps go on where the tests say so"),
    pytest.mark.not_ahead("updates are made ahead where the tests say so"),
]

WIDTH, WORDS, STEPS = 32, 50, 3
ROOT = Path(__file__).parents[2]


class Block(nn.Module):
    """A layer with an adapter, whose dtype may be another."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.adapter(x.to(self.adapter.weight.dtype)).to(x.dtype)
        return x + self.down(self.up(x).relu()) * self.scale.to(x.dtype) + added


class Model(nn.Module):
    """Tied embeddings, layers, and a norm."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))


def plain(model: Model) -> None:
    """Nothing is changed."""


def tied(model: Model) -> None:
    model.layers[2].up.weight = model.layers[0].up.weight
    model.layers[3].down = model.layers[1].down


def mixed(model: Model) -> None:
    for layer in model.layers:
        layer.adapter.float()


def adapted(model: Model) -> None:
    model.requires_grad_(False)
    for layer in model.layers:
        layer.adapter.float().requires_grad_(True)


def partly_frozen(model: Model) -> None:
    model.layers[3].register_parameter("nothing", nn.Parameter(torch.ones(0, 3, dtype=model.norm.weight.dtype)))
    for part in (model.layers[:2], model.norm):
        part.requires_grad_(False)


KINDS = [plain, tied, mixed, adapted, partly_frozen]


def made(change: Callable[[Model], None] = plain, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    torch.manual_seed(0)
    model = Model(**options).to(dtype)
    change(model)
    return model


def batch(step: int, place: str = "late") -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(step), device="cpu").to(place)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = batch(step)
    return nn.functional.cross_entropy(model(tokens).float().view(-1, WORDS), tokens.roll(1).view(-1))


def optimizer_of(model: nn.Module, folder: Path, **config: Any) -> offload.AdamW:
    folder.mkdir(exist_ok=True)
    settings = {"host_memory": 0, "paths": [folder], "subgroup_numel": 4096} | config
    optimizer = offload.AdamW(model.named_parameters(), lr=1e-2, offload=settings)
    if config.get("overlap") in ("backward", "both") and any(map(shards.is_dtensor, model.parameters())):
        optimizer.overlap_backward(model)
    if config.get("overlap") in ("forward", "both"):
        optimizer.overlap_forward(model)
    return optimizer


def clipped(optimizer: offload.AdamW, model: nn.Module, step: int) -> None:
    loss_of(model, step).backward()
    optimizer.clip_grad_norm_(0.5)


def clipped_by_torch(optimizer: offload.AdamW, model: nn.Module, step: int) -> None:
    loss_of(model, step).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # whose norm on a device has other bits


def accumulated(optimizer: offload.AdamW, model: nn.Module, step: int) -> None:
    for micro_step in range(3):
        (loss_of(model, 10 * step + micro_step) / 3).backward()


def evaluated(optimizer: offload.AdamW, model: nn.Module, step: int) -> None:
    """Passes without a backward pass on both sides of one."""
    loss_of(model, step)
    with torch.no_grad():
        loss_of(model, step)
    loss_of(model, step).backward()
    with torch.no_grad():
        loss_of(model, step + 1)
    loss_of(model, step + 2)


def parked(optimizer: offload.AdamW, model: nn.Module, step: int) -> None:
    optimizer.finish()
    optimizer.park()
    loss_of(model, step).backward()


def trained(model: nn.Module, folder: Path, way: Callable[..., None] = clipped, **config: Any) -> list[torch.Tensor]:
    """Return losses, and state of all weights that train."""
    found = []
    with optimizer_of(model, folder, **config) as optimizer:
        for step in range(STEPS):
            way(optimizer, model, step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                found.append(loss_of(model, step).cpu())
        for weight in model.parameters():
            if weight.requires_grad:
                found += (shards.local(each).clone() for each in optimizer.state_for(weight).values())
    return found


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (again, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == again
        assert torch.equal(a.cpu(), b.cpu()), name


def has_ended() -> bool:
    """Return whether the process group has; a thread of autograd lets go of a pass a moment after that has ended."""
    until_s = time.monotonic() + LONG_S
    while dist.is_initialized() and time.monotonic() < until_s:
        gc.collect()
    return not dist.is_initialized()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert has_ended()


def beside(folder: Path, change: Callable[[Model], None], dtype: torch.dtype, recompute: bool, **config: Any) -> None:
    """Train on the device, and from host memory; all is the same."""
    way, names, path = config.pop("way", clipped), config.pop("on_device", []), config.pop("path", None)
    on_device = made(change, dtype, recompute=recompute).to("late")
    expected = trained(on_device, folder / "device", way, **{**config, "overlap": "off"})
    model = made(change, dtype, recompute=recompute)
    offload.weights_in_host_memory(model, on_device=names, path=path)
    mine = [shards.local(each) for each in model.parameters() if each.requires_grad and each.numel()]
    assert all(each.is_cpu and is_mapped(each.data_ptr()) == (path is not None) for each in mine)
    found = trained(model, folder / "host", way, **config)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert_same(model, on_device)


OVERLAPS = ["off", "forward", "backward", "both"]
QUICK = [(plain, "both"), (tied, "off"), (mixed, "forward"), (adapted, "backward"), (partly_frozen, "both")]


@pytest.mark.parametrize(
    ("change", "overlap"),
    [*QUICK, *(pytest.param(k, o, marks=pytest.mark.full) for k in KINDS for o in OVERLAPS if (k, o) not in QUICK)],
)
def test_bits_are_those_of_weights_on_the_device(
    change: Callable[[Model], None], overlap: str, tmp_path: Path
) -> None:
    dtype = torch.bfloat16 if overlap in ("off", "both") or change in (mixed, adapted) else torch.float32
    beside(tmp_path, change, dtype, change is plain, overlap=overlap)


BOTH = {"overlap": "both"}
LEAVE = {"gradient_memory": 0, "overlap": "forward"}
COMPACT = {"host_memory": None, "state_format": "compact8"}


@pytest.mark.parametrize(
    ("way", "config"),
    [
        (clipped_by_torch, BOTH),
        (accumulated, LEAVE),
        (evaluated, COMPACT),
        (parked, LEAVE),
        *(
            pytest.param(way, config, marks=pytest.mark.full)
            for way, configs in (
                (accumulated, (BOTH, COMPACT)),
                (evaluated, (BOTH, LEAVE)),
                (parked, (BOTH, COMPACT)),
            )
            for config in configs
        ),
    ],
)
def test_whatever_is_done_in_a_step(way: Callable[..., None], config: dict[str, Any], tmp_path: Path) -> None:
    beside(tmp_path, plain, torch.bfloat16, way is accumulated, way=way, **config)


@pytest.mark.parametrize(
    ("change", "config"),
    [(plain, {"overlap": "forward"}), (tied, LEAVE), (partly_frozen, COMPACT), (adapted, {"way": evaluated})],
)
def test_they_lie_in_a_file(change: Callable[[Model], None], config: dict[str, Any], tmp_path: Path) -> None:
    beside(tmp_path, change, torch.bfloat16, change is plain, path=tmp_path, **config)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["device", "host"]


def test_a_file_without_room_or_that_fails_is_an_error(tmp_path: Path) -> None:
    model = made()
    with pytest.raises(offload.ConfigError, match="path"):
        offload.weights_in_host_memory(model, path=tmp_path / "missing")
    assert not any(map(shards.is_dtensor, model.parameters()))
    home = offload.weights_in_host_memory(model, path=tmp_path)
    loss_of(model, 0).backward()
    with pytest.raises(offload.ConfigError, match="weights in a file"):
        optimizer_of(model, tmp_path / "state", overlap="backward")
    os.truncate(home.file.descriptor, 0)
    with pytest.raises(offload.TierError, match=r"EIO.*weights that are mapped"):
        loss_of(model, 1)


def test_frozen_weights_stay_on_the_device_if_they_are_named(tmp_path: Path) -> None:
    names = ["layers.0", "layers.1.up.weight", "norm"]
    beside(tmp_path, partly_frozen, torch.bfloat16, True, on_device=names)
    model = made(partly_frozen)
    home = offload.weights_in_host_memory(model, on_device=names)
    stay = [weight for weight in model.parameters() if weight.device.type == "late"]
    assert len(stay) == 5 + 1 + 2
    kept = sum(weight.nbytes for weight in model.parameters()) - sum(weight.nbytes for weight in stay)
    assert kept <= home.nbytes < kept + 64 * len([*model.parameters()])


@pytest.mark.parametrize(
    ("names", "match"), [(["norm"], "norm.weight, which trains"), (["nor"], "give names"), ("norm", "give a list")]
)
def test_only_frozen_weights_can_be_named(names: Any, match: str) -> None:
    with pytest.raises(offload.ConfigError, match=match):
        offload.weights_in_host_memory(made(), on_device=names)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_checkpoint_goes_from_one_to_the_other(is_first: bool, tmp_path: Path) -> None:
    models = [made(partly_frozen, torch.bfloat16) for _ in range(2)]
    for number, model in enumerate(models):
        if is_first is (number == 0):
            offload.weights_in_host_memory(model)
        else:
            model.to("late")
    with optimizer_of(models[0], tmp_path / "state", overlap="forward") as optimizer:
        for step in range(2):
            clipped(optimizer, models[0], step)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            models[0].norm.bias.add_(1)  # which is frozen
        optimizer.save_checkpoint(tmp_path / "saved", model=models[0], copy=True)
        optimizer.wait_checkpoint()
        saved = optimizer.state_dict()
        with optimizer_of(models[1], tmp_path / "other") as other:
            other.load_checkpoint(tmp_path / "saved", model=models[1])
            assert_same(*models)
            for one, model in ((optimizer, models[0]), (other, models[1])):
                clipped(one, model, 2)
                one.step()
                one.zero_grad()
            assert_same(*models)
            if not is_first:  # state dicts of DTensors are for DTensors; plain ones are for all
                other.load_state_dict(saved)


def test_state_dicts_are_plain_tensors_over_the_weights() -> None:
    model, other = made(), made(dtype=torch.bfloat16)
    offload.weights_in_host_memory(model)
    state = model.state_dict()
    assert all(type(each) is torch.Tensor for each in state.values())
    assert [*state] == [*other.state_dict()]
    weights = [each for name, each in state.items() if not name.endswith("scale")]
    assert all(each.is_cpu and each.is_pinned() for each in weights)
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in weights)  # none is saved with its arena
    assert state["head.weight"].data_ptr() == state["words.weight"].data_ptr()
    kept = model.state_dict(keep_vars=True)
    assert kept["head.weight"] is kept["words.weight"]
    loss_of(model, 0)  # leaves the model's own weights on the device
    for source in (other.state_dict(), other.to("late").state_dict()):
        for each in weights:
            each.zero_()
        assert not model.load_state_dict(source).missing_keys
        assert torch.equal(state["layers.1.up.bias"], other.layers[1].up.bias.cpu().float())
    assert torch.equal(loss_of(model, 0).cpu(), loss_of(other.float(), 0).cpu())
    model.layers[1].load_state_dict(model.layers[0].state_dict())
    assert torch.equal(state["layers.1.up.weight"], state["layers.0.up.weight"])
    with pytest.raises(RuntimeError, match=r"size mismatch for norm\.bias"):
        model.load_state_dict({**other.state_dict(), "norm.bias": torch.ones(3)})
    with pytest.raises(offload.ConfigError, match="assign"):
        model.load_state_dict(other.state_dict(), assign=True)


def test_an_average_is_kept_of_the_state_dict(tmp_path: Path) -> None:
    """A copy of the model is refused by torch."""
    model, on_device = made(), made().to("late")
    offload.weights_in_host_memory(model)
    with pytest.raises(AssertionError, match="deepcopy"):
        copy.deepcopy(model)
    averages = []
    for each in (model, on_device):
        average = {name: tensor.clone() for name, tensor in each.state_dict().items()}
        with optimizer_of(each, tmp_path, overlap="both") as optimizer:
            for step in range(STEPS):
                loss_of(each, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                for name, tensor in each.state_dict().items():
                    average[name].lerp_(tensor, 0.5)
            optimizer.finish()
            before = {name: tensor.clone() for name, tensor in each.state_dict().items()}
            each.load_state_dict(average)
            with torch.no_grad():
                averages.append(loss_of(each, 0).cpu())
            each.load_state_dict(before)
            averages += (tensor.cpu() for tensor in (loss_of(each, 0), *average.values()))
    assert all(
        torch.equal(a, b) for a, b in zip(averages[: len(averages) // 2], averages[len(averages) // 2 :], strict=True)
    )


@pytest.mark.parametrize(
    "leaves",
    [lambda model: model.to("late"), lambda model: model.to(torch.float64), lambda model: model.layers[2].half()],
)
def test_a_weight_that_has_left_is_named(leaves: Callable[[Model], Any]) -> None:
    model = made()
    offload.weights_in_host_memory(model)
    loss_of(model, 0).backward()
    leaves(model)
    with pytest.raises(offload.ConfigError, match=r"(words\.weight|layers\.2\.up\.weight): .*has left its place"):
        loss_of(model, 1)


def test_inference_may_come_first(tmp_path: Path) -> None:
    model, on_device = made(), made().to("late")
    offload.weights_in_host_memory(model)
    for each in (model, on_device):
        with torch.inference_mode():
            loss_of(each, 0)
    found, expected = (trained(each, tmp_path, evaluated) for each in (model, on_device))
    assert all(map(torch.equal, found, expected))
    with torch.inference_mode():
        assert torch.equal(loss_of(model, 0).cpu(), loss_of(on_device, 0).cpu())


def test_other_tensors_in_the_place_of_weights_are_refused() -> None:
    model = made()
    offload.weights_in_host_memory(model)
    others = {name: weight.clone() for name, weight in made().to("late").named_parameters()}
    for _ in range(2):
        with pytest.raises(offload.ConfigError, match=r"words\.weight: 'another tensor.*load a state dict"):
            torch.func.functional_call(model, others, (batch(0),))
        loss_of(model, 0)  # leaves weights on the device
    model.layers[1].up.bias = nn.Parameter(torch.zeros(2 * WIDTH, device="late"))
    with pytest.raises(offload.ConfigError, match=r"layers\.1\.up\.bias: 'another tensor"):
        loss_of(model, 1)


def test_a_model_is_made_there(tmp_path: Path) -> None:
    """On the meta device, or on the accelerator."""
    plain = made(partly_frozen)
    with torch.device("meta"):
        models = [Model(), Model().to("meta")]
    models[1].register_buffer("more", torch.ones(3, device="meta"))
    for model in models:
        partly_frozen(model)
    plain_state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    some = {name: plain_state.pop(name) for name in ("layers.0.up.weight", "layers.1.down.weight", "words.weight")}
    saved_as_safetensors(some, tmp_path / "some.safetensors")
    home = offload.weights_in_host_memory(
        models[0], on_device=["layers.0"], safetensors=[tmp_path / "some.safetensors"]
    )
    assert models[0].head.weight is models[0].words.weight
    assert not models[0].layers[0].down.weight.any()
    assert {*models[0].load_state_dict(plain_state, strict=False).missing_keys} == {*some}
    on_device = made(partly_frozen).to("late")
    free = torch.accelerator.get_memory_info()[0]
    offload.weights_in_host_memory(on_device)
    gc.collect()
    torch.accelerator.empty_cache()
    assert torch.accelerator.get_memory_info()[0] > free
    assert torch.equal(loss_of(models[0], 0).cpu(), loss_of(on_device, 0).cpu())
    offload.weights_in_host_memory(models[1])
    assert models[1].more.device.type == "late"
    assert home.device == torch.device("late:0")


@pytest.mark.parametrize("in_file", [False, True])
def test_buffers_may_have_memory_where_weights_have_none(in_file: bool, tmp_path: Path) -> None:
    """And must, if they are not persistent."""
    plain, model = made(), made()
    for layer in model.layers:
        layer.register_buffer("scale", layer.scale, persistent=False)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(weight.to("meta")))
    model.head.weight = model.words.weight
    file = saved_as_safetensors(dict(plain.named_parameters()), tmp_path / "some.safetensors")
    given: dict[str, Any] = {"safetensors": [file], "path": tmp_path if in_file else None}
    model.layers[1].scale, scale = model.layers[1].scale.to("meta"), model.layers[1].scale
    with pytest.raises(offload.ConfigError, match=r"buffers on the meta device: \['layers\.1\.scale'\]"):
        offload.weights_in_host_memory(model, **given)
    assert all(weight.is_meta for weight in model.parameters())
    model.layers[1].scale = scale
    offload.weights_in_host_memory(model, **given)
    offload.weights_in_host_memory(plain)
    assert torch.equal(loss_of(model, 0), loss_of(plain, 0))


def test_bytes_are_those_that_are_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}
    row = backends.BACKENDS["late"]

    def pin(address: int, nbytes: int) -> None:
        pinned[address] = nbytes
        row.pin(address, nbytes)

    monkeypatch.setitem(backends.BACKENDS, "late", backends.Backend(pin=pin, unpin=row.unpin))
    monkeypatch.setattr(torch.Tensor, "pin_memory", None)  # torch's rounds up, and copies
    model = made(dtype=torch.bfloat16)
    weights = [*model.parameters()]
    total = sum(weight.nbytes for weight in weights)
    with caplog.at_level(logging.INFO, "offload"):
        home = offload.weights_in_host_memory(model)
    assert re.search(
        r"KiB of weights lie in host memory: 23, in 4 layers and the rest, of which [\d.]+ KiB", caplog.text
    )
    assert total <= home.nbytes < total + 64 * len(weights)
    assert sum(pinned.values()) == home.pinned_bytes == home.nbytes
    assert {*late.registered()} >= {*pinned}
    own = sum(tensor.nbytes for tensor in (model.words.weight, *model.norm.parameters()))
    layer = sum(weight.nbytes for weight in model.layers[0].parameters())
    assert own + 2 * layer <= home.window_bytes < own + 2 * layer + 64 * 12
    torch.accelerator.synchronize()
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with torch.no_grad():
        loss_of(model, 0)
    torch.accelerator.synchronize()
    few = 64 << 10  # activations, and what the allocator rounds up
    assert torch.accelerator.max_memory_allocated() - before < home.window_bytes + few
    kept = weights[3]
    del model, home, weights
    gc.collect()
    assert not {*late.registered()} & {*pinned}
    assert kept.isfinite().all()  # who has a weight still, has its memory


@pytest.mark.parametrize("recompute", [False, True])
def test_no_more_is_on_the_device_than_is_planned(recompute: bool, tmp_path: Path) -> None:
    """Weights and gradients of an iteration, as `offload plan` names them; few tokens take next to nothing beside."""
    wide = 256
    model = made(dtype=torch.bfloat16, recompute=recompute)
    model.words, model.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    layers = [nn.Sequential(nn.Linear(WIDTH, wide), *(nn.Linear(wide, wide) for _ in range(4))) for _ in range(8)]
    for layer in layers:
        layer.append(nn.Linear(wide, WIDTH))
    model.layers = nn.ModuleList(layers)
    model.bfloat16()
    of_layer = sum(weight.numel() for weight in layers[0].parameters())
    shape: Any = SimpleNamespace(layer_params=of_layer, rest_params=2 * WORDS * WIDTH + 2 * WIDTH)
    assert shape.rest_params + 8 * of_layer == sum(weight.numel() for weight in model.parameters())
    offload.weights_in_host_memory(model)
    optimizer = optimizer_of(model, tmp_path)
    for step in range(3):
        torch.accelerator.synchronize()
        gc.collect()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        loss_of(model, step).backward()
        torch.accelerator.synchronize()
        found = torch.accelerator.max_memory_allocated() - before
        few = 256 << 10
        assert found < streamed.window_bytes(shape) + streamed.gradients_bytes(shape) + few
        assert found > streamed.window_bytes(shape)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def test_what_cannot_be_registered_is_brought_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise RuntimeError("no more")

    monkeypatch.setitem(backends.BACKENDS, "late", backends.Backend(pin=refuse, unpin=late.unpin))
    model = made()
    assert offload.weights_in_host_memory(model).pinned_bytes == 0
    loss = loss_of(model, 0)
    loss.backward()
    assert torch.equal(loss.cpu(), loss_of(made().to("late"), 0).cpu())


def test_a_layer_comes_beside_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's weights are copied while the layer before it is held."""
    model = made()
    offload.weights_in_host_memory(model)
    with torch.no_grad():
        expected = loss_of(model, 0).cpu()
    group = model.layers[2]._get_fsdp_state()._fsdp_param_groups[0]
    computing, copying = torch.accelerator.current_stream(), group.comm_ctx.all_gather_copy_in_stream
    seen = []

    class Look:
        def take(self, group: Any, wait_for_unshard: Callable[[], None]) -> None:
            copying.synchronize()
            seen.append(computing.query())
            wait_for_unshard()

    def hold(*_: Any) -> None:
        computing.synchronize()  # the layer's own weights are there
        late.hold(computing)

    look = Look()
    shards.PatchedMethod(group, "wait_for_unshard", look.take)
    hooks = [
        model.layers[1].up.register_forward_pre_hook(hold),
        model.layers[2].up.register_forward_pre_hook(lambda *_: late.release(computing)),
    ]
    with torch.no_grad():
        found = loss_of(model, 0).cpu()
    assert seen == [False]
    assert torch.equal(found, expected)
    for hook in hooks:
        hook.remove()


def test_a_pass_that_raises_is_forgotten(tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    model = made()
    offload.weights_in_host_memory(model)
    for register in (model.layers[1].register_forward_pre_hook, model.layers[1].register_full_backward_hook):
        handle = register(fail)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, 0).backward()
        handle.remove()
        model.zero_grad()
    assert_same(model, made())
    found = trained(model, tmp_path / "one")
    assert all(map(torch.equal, found, trained(made().to("late"), tmp_path / "two")))


def test_a_group_of_one_process_is_made_once_and_ended() -> None:
    models = [made(), made()]
    for model in models:
        offload.weights_in_host_memory(model)
    assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
    assert "cpu:" in dist.get_backend_config()
    for place in ("cpu", "late"):
        ones, found = torch.ones(4, device=place), torch.empty(4, device=place)
        dist.all_reduce(ones)
        dist.all_gather_into_tensor(found, ones)
        dist.broadcast(found, 0)
        dist.barrier()
        assert found.cpu().tolist() == [1.0] * 4
    everyone: list[Any] = [None]
    dist.all_gather_object(everyone, {"rank": 0})
    assert everyone == [{"rank": 0}]
    del models[0], model
    gc.collect()
    assert dist.is_initialized()
    loss_of(models[0], 0).backward()
    models.clear()
    assert has_ended()


def test_a_group_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = made()
        offload.weights_in_host_memory(model)
        found = trained(model, tmp_path / "one")
        assert all(map(torch.equal, found, trained(made().to("late"), tmp_path / "two")))
        del model
        gc.collect()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda model: model.register_parameter("gate", nn.Parameter(torch.ones(()))), "gate: .*scalar"),
        (lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(WIDTH, WORDS).t())), "strides"),
        (lambda model: model.norm.to("late:1"), "norm.weight: 'late:1'"),
        (
            lambda model: model.layers[1].adapter.register_parameter("more", nn.Parameter(torch.ones(3).half())),
            "dtype",
        ),
        (lambda model: model.register_parameter("sparse", nn.Parameter(torch.eye(3).to_sparse())), "sparse_coo"),
        (lambda model: model.norm.weight.register_hook(print), "norm.weight: .*hooks"),
        (lambda model: offload.weights_in_host_memory(model), "HOST_TAKEN"),
    ],
)
def test_what_cannot_be_brought_is_refused_by_name(change: Callable[[Model], Any], match: str) -> None:
    model = made()
    change(model)
    before = [*model.parameters()]
    with pytest.raises(
        offload.ConfigError, match=match.replace("HOST_TAKEN", "before anything else takes the model")
    ):
        offload.weights_in_host_memory(model)
    assert [id(each) for each in before] == [id(each) for each in model.parameters()]


def test_the_page_shows_a_training(tmp_path: Path) -> None:
    """It runs in a process of its own, which ends as it should with the model still there."""
    text = (ROOT / "docs" / "weights.md").read_text()
    (block,) = re.findall(r"^```\n(import torch, offload\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    load = "from accelerator import late\nlate.load()\nfrom offload import backends\n"
    load += "backends.BACKENDS['late'] = backends.Backend(pin=late.pin, unpin=late.unpin)\n"
    program = load + block.replace("/mnt/nvme", str(tmp_path)) + "\nprint('passed')\n"
    command = [prepared.python(), "-c", program]
    ended = prepared.ran(command, cwd=ROOT / "tests")
    assert ended.stdout.endswith("passed\n")
