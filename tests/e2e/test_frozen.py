"""State of frozen parameters: a checkpoint's is kept whatever requires a gradient now, and what has none begins anew.

The reference never freezes: a step updates what has a gradient then, as torch's optimizers do.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded import spawn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.checkpoint.exchange import export_safetensors

SHAPES = {"a": (64, 33), "b": (70,), "c": (8, 16), "d": (5, 7), "none": (0, 4)}
DTYPES = {"b": torch.float32, "d": torch.float16}
History = list[dict[str, torch.Tensor]]
"""The gradients of each step, of what had one."""


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            drawn = torch.randn(shape, generator=generator).to(DTYPES.get(name, torch.bfloat16))
            self.register_parameter(name, torch.nn.Parameter(drawn))


KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "AdamW": (offload.AdamW, {}),
    "compact8": (offload.AdamW, {"state_format": "compact8", "exact_names": ()}),
    "SGD": (partial(offload.SGD, momentum=0.9), {}),
    "Muon": (offload.Muon, {}),
    "wrapped": (partial(offload.wrap, torch.optim.NAdam), {}),
}


def made(kind: str, params: Any, **settings: Any) -> Any:
    make, own = KINDS[kind]
    return make(params, lr=1e-2, offload=offload.OffloadConfig(**own, **settings))


def state_of(optimizer: Any, model: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def same(left: dict[str, dict[str, Any]], right: dict[str, dict[str, Any]]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].keys() == right[name].keys()
        and all(torch.equal(torch.as_tensor(value), torch.as_tensor(right[name][key])) for key, value in entry.items())
        for name, entry in left.items()
    )


def reference(kind: str, history: History) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Return weights and state after a history, of an optimizer in memory that knows nothing of freezing."""
    model = Weights()
    with made(kind, model.named_parameters()) as optimizer:
        for gradients in history:
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name].clone() if name in gradients else None
            optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}, state_of(optimizer, model)


def backward(model: torch.nn.Module, seed: int, names: Collection[str] = tuple(SHAPES)) -> dict[str, torch.Tensor]:
    """Give parameters that require one a gradient, by autograd."""
    generator, given = torch.Generator().manual_seed(seed), {}
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.requires_grad and name in names:
            torch.autograd.backward([parameter], [drawn])
            given[name] = drawn
    return given


def step(optimizer: Any, model: torch.nn.Module, history: History) -> None:
    history.append(backward(model, len(history)))
    optimizer.step()
    optimizer.zero_grad()


def check(kind: str, optimizer: Any, model: torch.nn.Module, history: History) -> None:
    weights, state = reference(kind, history)
    assert state.keys() == {name for gradients in history for name in gradients}
    assert same(state_of(optimizer, model), state)
    assert all(torch.equal(p.detach(), weights[name]) for name, p in model.named_parameters())


def freeze(model: torch.nn.Module, *names: str) -> None:
    """Freeze some parameters, and thaw all others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)


# Ways to save and to resume


def by_checkpoint(folder: Path, optimizer: Any, model: torch.nn.Module) -> Callable[..., None]:
    optimizer.save_checkpoint(folder, model=model)
    optimizer.wait_checkpoint()

    def load(optimizer: Any, model: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer.load_checkpoint(folder, model=model)

    return load


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def by_state_dict(folder: Path, optimizer: Any, model: torch.nn.Module) -> Callable[..., None]:
    weights, state = weights_of(model), optimizer.state_dict()

    def load(optimizer: Any, model: torch.nn.Module) -> None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)

    return load


def by_file(folder: Path, optimizer: Any, model: torch.nn.Module) -> Callable[..., None]:
    optimizer.save_checkpoint(folder)
    optimizer.wait_checkpoint()
    weights, file = weights_of(model), folder.with_suffix(".safetensors")
    export_safetensors(folder, file)

    def load(optimizer: Any, model: torch.nn.Module) -> None:
        model.load_state_dict(weights)
        optimizer.import_state(file)

    return load


WAYS = {"checkpoint": by_checkpoint, "state_dict": by_state_dict, "file": by_file}
PLACES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "streamed": lambda path: {"host_memory": 0, "paths": [path], "subgroup_numel": 4096, "checkpoints_kept": 14},
    "memory": lambda path: {},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("frozen", [("a",), ("b", "none"), tuple(SHAPES)], ids=["one", "two", "all"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["construction", "load", "save"])
def test_state_of_what_is_frozen_is_loaded_kept_and_saved(
    way: str, when: str, frozen: tuple[str, ...], place: str, tmp_path: Path
) -> None:
    """Also by a session in between that does not train it, and saves anew."""
    settings, model, history = PLACES[place](tmp_path), Weights(), History()
    with made("AdamW", model.named_parameters(), **settings) as optimizer:
        step(optimizer, model, history)
        step(optimizer, model, history)
        if when == "save":
            freeze(model, *frozen)
        load = WAYS[way](tmp_path / "first", optimizer, model)
    if when == "construction":
        freeze(model, *frozen)
    with made("AdamW", model.named_parameters(), **settings) as optimizer:
        freeze(model, *frozen)
        load(optimizer, model)
        check("AdamW", optimizer, model, history)
        assert all(optimizer.state_for(p).keys() == {"master", "exp_avg", "exp_avg_sq"} for p in model.parameters())
        step(optimizer, model, history)
        load = WAYS[way](tmp_path / "second", optimizer, model)
    freeze(model)
    with made("AdamW", model.named_parameters(), **settings) as optimizer:
        load(optimizer, model)
        step(optimizer, model, history)
        check("AdamW", optimizer, model, history)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frozen", [("a", "none"), tuple(SHAPES)], ids=["two", "all"])
def test_a_thawed_layer_that_has_not_stepped_begins_anew(
    frozen: tuple[str, ...], way: str, place: str, tmp_path: Path
) -> None:
    settings, model, history = PLACES[place](tmp_path), Weights(), History()
    freeze(model, *frozen)
    if len(frozen) == len(SHAPES) and way == "file":
        pytest.skip("a file of no state is none")
    with made("AdamW", model.named_parameters(), **settings) as optimizer:
        if len(frozen) < len(SHAPES):
            step(optimizer, model, history)
        freeze(model)
        load = WAYS[way](tmp_path / "ck", optimizer, model)
    with made("AdamW", model.named_parameters(), **settings) as optimizer:
        load(optimizer, model)
        check("AdamW", optimizer, model, history)
        step(optimizer, model, history)
        check("AdamW", optimizer, model, history)
        load(optimizer, model)  # once more, over the state that it has by now
        check("AdamW", optimizer, model, history[:-1])


# Programs


def groups_of(model: torch.nn.Module, split: int) -> list[dict[str, Any]]:
    named = [*model.named_parameters()]
    return [{"params": part} for part in (named[:split], named[split:]) if part]


def run(seed: int, folder: Path) -> None:
    """Freeze, thaw, train, save and resume at random, and compare with the history alone."""
    chance = random.Random(seed)
    kind, place = chance.choice([*KINDS]), PLACES[chance.choice([*PLACES])](folder)
    ways = [way for way in WAYS if way != "file" or kind in ("AdamW", "SGD")]
    model, history, saves = Weights(), History(), []
    if kind == "wrapped":
        del model.none  # of which a class keeps nothing
    names, split = [name for name, _ in model.named_parameters()], chance.choice([0, 2, 3])

    def shuffle() -> None:
        freeze(model, *chance.sample(names, chance.randint(0, len(names))))

    def opened(order: int) -> Any:
        """Return an optimizer over the same groups, some of them added."""
        groups = groups_of(model, split)[::order]
        if chance.random() < 0.5:
            optimizer = made(kind, groups[:1], **place)
            for group in groups[1:]:
                optimizer.add_param_group(group)
            return optimizer
        return made(kind, groups, **place)

    shuffle()
    order = chance.choice([1, -1])
    optimizer = opened(order)
    for number in range(chance.randint(6, 14)):
        act = chance.choice(["step", "step", "step", "shuffle", "save", "resume"])
        if act == "shuffle":
            shuffle()
        elif act == "step":
            given = backward(model, 100 * seed + number, chance.sample(names, chance.randint(1, len(names))))
            if chance.random() < 0.2:
                shuffle()  # what has a gradient is updated, frozen by now or not
            history.append(given)
            optimizer.step()
            optimizer.zero_grad()
        elif act == "save":
            way = chance.choice(ways)
            if way != "file" or any(history):  # a file without state is refused
                saves.append((way, WAYS[way](folder / f"ck{number}", optimizer, model), [*history], order))
        elif saves:
            way, load, saved, order = chance.choice(saves)
            if way != "state_dict":  # others go by names
                order = chance.choice([1, -1])
            optimizer.close()
            history = [*saved]
            if chance.random() < 0.5:
                shuffle()
            optimizer = opened(order)
            if chance.random() < 0.5:
                shuffle()
            load(optimizer, model)
            check(kind, optimizer, model, history)
    check(kind, optimizer, model, history)
    optimizer.close()


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(n, marks=pytest.mark.full) for n in range(12, 120))])
def test_programs(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path)
