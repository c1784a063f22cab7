"""One state, one set of bits: weights and state do not depend on the way by which the state was loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from mirror import same_bits

import offload
from offload.checkpoint.exchange import export_safetensors

FORMATS = ["exact", "compact16", "compact8"]
RULES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "adamw": (offload.AdamW, {"weight_decay": 0.1}),
    "adam": (offload.Adam, {"weight_decay": 0.1}),
    "lion": (offload.Lion, {"weight_decay": 0.1}),
    "sgd": (offload.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "adagrad": (offload.Adagrad, {"weight_decay": 0.1}),
}
TYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(70, 64), (129, 33), (100,)]

Parameters = list[torch.nn.Parameter]
Found = list[list[torch.Tensor]]


class Saved(NamedTuple):
    """One state, as every way of loading takes it."""

    weights: list[torch.Tensor]
    state: dict[str, Any]
    checkpoint: Path
    file: Path


def parameters_of(values: Sequence[torch.Tensor]) -> Parameters:
    return [torch.nn.Parameter(value.clone()) for value in values]


def made(kind: type[Any], parameters: Parameters, state_format: str, **more: Any) -> Any:
    config = offload.OffloadConfig(state_format=state_format, exact_names=[], subgroup_numel=4096)
    named = [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
    return kind(named, offload=config, lr=1e-2, **more)


def update(optimizer: Any, parameters: Parameters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()


def update_by_nothing(optimizer: Any, parameters: Parameters) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = 1e-2


def everything(optimizer: Any, parameters: Parameters) -> Found:
    """Return each parameter's weight, master and moments."""
    return [[p.detach().clone(), *optimizer.state_for(p).values()] for p in parameters]


def saved(kind: type[Any], options: Mapping[str, Any], dtype: torch.dtype, state_format: str, folder: Path) -> Saved:
    generator = torch.Generator().manual_seed(5)
    parameters = parameters_of([torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES])
    with made(kind, parameters, state_format, **options) as optimizer:
        for seed in range(3):
            update(optimizer, parameters, seed)
        return keep(optimizer, parameters, folder)


def keep(optimizer: Any, parameters: Parameters, folder: Path) -> Saved:
    optimizer.save_checkpoint(folder / "saved")
    optimizer.wait_checkpoint()
    export_safetensors(folder / "saved", folder / "state.safetensors")
    weights = [parameter.detach().clone() for parameter in parameters]
    return Saved(weights, optimizer.state_dict(), folder / "saved", folder / "state.safetensors")


def load_weights(optimizer: Any, parameters: Parameters, found: Saved) -> None:
    with torch.no_grad():
        for parameter, weight in zip(parameters, found.weights, strict=True):
            parameter.copy_(weight)


def load_state_dict(optimizer: Any, parameters: Parameters, found: Saved) -> None:
    optimizer.load_state_dict(found.state)


def load_checkpoint(optimizer: Any, parameters: Parameters, found: Saved) -> None:
    optimizer.load_checkpoint(found.checkpoint)


def import_state(optimizer: Any, parameters: Parameters, found: Saved) -> None:
    optimizer.import_state(found.file)


def assign(optimizer: Any, parameters: Parameters, found: Saved) -> None:
    for number, parameter in enumerate(parameters):
        optimizer.state[parameter] = found.state["state"][number]


def assign_each(optimizer: Any, parameters: Parameters, found: Saved) -> None:
    update(optimizer, parameters, 9)
    for number, parameter in enumerate(parameters):
        # Roots first: beside one that is stored as 0, compact8 stores no moment (docs/formats.md).
        for name, value in reversed(found.state["state"][number].items()):
            optimizer.state[parameter][name] = value


def reset(optimizer: Any, parameters: Parameters, found: Saved) -> None:
    optimizer.reset_state()


Way = tuple[Callable[[Any, Parameters, Saved], None], ...]
WAYS: dict[str, Way] = {
    "checkpoint": (load_checkpoint,),
    "file": (import_state,),
    "weights, state dict": (load_weights, load_state_dict),
    "state dict, weights": (load_state_dict, load_weights),
    "state dict twice": (load_weights, load_state_dict, load_state_dict),
    "weights, assigned": (load_weights, assign),
    "assigned, weights": (assign, load_weights),
    "each assigned, weights": (assign_each, load_weights),
    "over another": (load_checkpoint, reset, load_weights, load_state_dict),
}
"""By all of which weights and state come from the same."""

OF_MASTERS: dict[str, Way] = {"state dict": (load_state_dict,), "assigned": (assign,), "each": (assign_each,)}
"""By which 16-bit weights follow from their masters."""


def load(way: Way, found: Saved, kind: type[Any], state_format: str, options: Mapping[str, Any]) -> list[Found]:
    """Return what there is after a load, after a step by nothing, and after two more of any kind."""
    parameters = parameters_of([torch.full_like(weight, 0.7) for weight in found.weights])
    with made(kind, parameters, state_format, **options) as optimizer:
        for part in way:
            part(optimizer, parameters, found)
        seen = [everything(optimizer, parameters)]
        update_by_nothing(optimizer, parameters)
        seen.append(everything(optimizer, parameters))
        for seed in (3, 4):
            update(optimizer, parameters, seed)
        seen.append(everything(optimizer, parameters))
        return seen


def is_same(one: Found, other: Found, count: int | None = None) -> bool:
    pairs = [zip(a[:count], b[:count], strict=True) for a, b in zip(one, other, strict=True)]
    return all(same_bits(a, b) for a, b in chain(*pairs))


CASES = [
    *product(["adamw"], TYPES[:1], FORMATS, FORMATS),
    *product(["adamw"], TYPES[1:], ["exact"], ["compact8"]),
    *product([rule for rule in RULES if rule != "adamw"], TYPES[:1], ["exact"], ["compact8"]),
]
MORE = [
    *product(["adamw"], TYPES[1:], ["exact"], ["exact", "compact16"]),
    *product([rule for rule in RULES if rule != "adamw"], TYPES[:1], ["exact"], ["exact"]),
]
"""Whose parts, format, type and rule, are in those above."""


@pytest.mark.parametrize(
    ("rule", "dtype", "of", "into"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_every_way_of_loading_makes_the_same_bits(
    rule: str, dtype: torch.dtype, of: str, into: str, tmp_path: Path
) -> None:
    kind, options = RULES[rule]
    found = saved(kind, options, dtype, of, tmp_path)
    ways = WAYS if dtype is torch.float32 else WAYS | OF_MASTERS
    loaded = {name: load(way, found, kind, into, options) for name, way in ways.items()}
    first = loaded["checkpoint"]
    assert all(same_bits(a[0], weight) for a, weight in zip(first[0], found.weights, strict=True))
    for name, seen in loaded.items():
        assert all(is_same(a, b) for a, b in zip(seen, first, strict=True)), name
        assert is_same(seen[1], seen[0], 2), f"{name}: a step by nothing changes weights or masters"


@pytest.mark.parametrize("dtype", TYPES[:2])
@pytest.mark.parametrize("into", FORMATS)
def test_masters_of_any_bits(into: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Zeros with a sign, subnormals, ties, overflows, infinities and NaN among them, and what is drawn."""
    ends = [0, 1, 0x7F, 0x80, 0x81, 0x7FFF, 0x8000, 0x8001, 0x1000, 0xFFFF]
    tops = [0, 0x8000, 0x3F80, 0xBF81, 0x477F, 0xC77F, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7F81, 0x3300, 0x3880]
    words = torch.tensor([top << 16 | end for top, end in product(tops, ends)])
    drawn = torch.randint(1 << 32, (70 * 64 - len(words),), generator=torch.Generator().manual_seed(1))
    master = torch.cat([words, drawn]).to(torch.int32).view(torch.float32).view(70, 64)
    options = {"weight_decay": 0.1}
    parameters = parameters_of([torch.zeros(70, 64, dtype=dtype)])
    with made(offload.AdamW, parameters, "exact", **options) as optimizer:
        zeros = torch.zeros(70, 64)
        optimizer.state[parameters[0]] = {"step": 3, "master": master, "exp_avg": zeros, "exp_avg_sq": zeros}
        assert same_bits(parameters[0].detach(), master.to(dtype))
        found = keep(optimizer, parameters, tmp_path)
    loaded = {name: load(way, found, offload.AdamW, into, options) for name, way in (WAYS | OF_MASTERS).items()}
    for name, seen in loaded.items():
        assert same_bits(seen[0][0][0], found.weights[0]), name
        assert all(is_same(a, b) for a, b in zip(seen, loaded["checkpoint"], strict=True)), name
        assert is_same(seen[1], seen[0], 2), name


@pytest.mark.late(shared=True)
@pytest.mark.parametrize(("into", "gpu_memory"), [("exact", 0), ("compact16", "1MB"), ("compact8", 0)])
def test_weights_on_a_device(into: str, gpu_memory: Any, tmp_path: Path) -> None:
    found = saved(offload.AdamW, {}, torch.bfloat16, "exact", tmp_path)
    seen = []
    for way in (WAYS["checkpoint"], OF_MASTERS["state dict"], OF_MASTERS["assigned"]):
        parameters = parameters_of([torch.full_like(weight, 0.7, device="late") for weight in found.weights])
        config = offload.OffloadConfig(
            state_format=into, exact_names=[], subgroup_numel=4096, gpu_memory=gpu_memory, placement="gpu"
        )
        named = [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
        with offload.AdamW(named, lr=1e-2, offload=config) as optimizer:
            for part in way:
                part(optimizer, parameters, found)
            seen.append(everything(optimizer, parameters))
            update_by_nothing(optimizer, parameters)
            assert is_same(everything(optimizer, parameters), seen[-1], 2)
    assert all(same_bits(a[0], weight) for a, weight in zip(seen[0], found.weights, strict=True))
    assert all(is_same(one, seen[0]) for one in seen)


def test_what_is_changed_after_a_load_counts(tmp_path: Path) -> None:
    """Not the rounding of a master that was loaded, but a weight that somebody wrote since."""
    found = saved(offload.AdamW, {}, torch.bfloat16, "compact8", tmp_path)
    parameters = parameters_of(found.weights)
    with made(offload.AdamW, parameters, "compact8") as optimizer:
        optimizer.load_state_dict(found.state)
        with torch.no_grad():
            parameters[0][3] = 0.3
        optimizer.state[parameters[0]]["exp_avg"] = torch.zeros(SHAPES[0])
        parameters[1].data.mul_(2)  # which nobody sees
        optimizer.state[parameters[1]]["exp_avg"] = torch.zeros(SHAPES[1])
        optimizer.refresh_masters()
        assert bool((parameters[0][3] == torch.tensor(0.3, dtype=torch.bfloat16)).all())
        assert same_bits(parameters[1].detach(), found.weights[1] * 2)
        for parameter in parameters:
            assert same_bits(optimizer.state_for(parameter)["master"], parameter.detach().float())
