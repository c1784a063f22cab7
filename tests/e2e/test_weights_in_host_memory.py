"""Weights in host memory, as far as no accelerator is needed: which modules go together, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.weights.layers import GatherGroups


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x)))


def made() -> Any:
    model: Any = nn.Module()
    model.words, model.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    model.head.weight = model.words.weight
    model.layers = nn.ModuleList(Block() for _ in range(3))
    return model


def groups(model: nn.Module, *arguments: Any) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in GatherGroups(model, *(arguments or (None,))).modules]


class TestGroups:
    """Those inside of others come first, and the model last."""

    def test_layers_and_the_rest(self) -> None:
        assert groups(made()) == ["layers.2", "layers.1", "layers.0", ""]
        assert groups(nn.Linear(2, 2)) == [""]
        assert groups(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ["1", "0", ""]

    def test_layers_that_are_given(self) -> None:
        model = made()
        assert groups(model, [model.layers[1], model.layers[1].up, model]) == ["layers.1", ""]
        assert groups(model, []) == [""]
        assert groups(model, [model.layers]) == ["layers.2", "layers.1", "layers.0", ""]
        with pytest.raises(offload.ConfigError, match="layers: 'Linear'"):
            groups(model, [nn.Linear(2, 2)])

    def test_a_weight_that_is_used_elsewhere_is_the_models(self) -> None:
        model = made()
        model.layers[0].up.weight = model.layers[2].up.weight
        parts = ["layers.2.norm", "layers.2.down", "layers.1", "layers.0.norm", "layers.0.down", ""]
        assert groups(model) == parts

    def test_a_module_that_is_used_elsewhere_is_one_of_its_own(self) -> None:
        model = made()
        model.layers[0].up = model.layers[2].up
        assert [*groups(model)][-3:] == ["layers.0.down", "layers.0.up", ""]
        model = made()
        model.layers.append(model.layers[0])
        assert groups(model) == ["layers.2", "layers.1", "layers.0", ""]

    def test_a_module_of_another_dtype_is_one_of_its_own(self) -> None:
        model = made().bfloat16()
        model.layers[1].norm.float()
        model.words.half()  # and so the head
        model.gate = nn.Linear(20, 20).double()
        with pytest.raises(
            offload.ConfigError, match=r"words: .*float16.*give trainable weights of a layer one dtype"
        ):
            groups(model)
        model.gate.half()
        assert groups(model) == ["layers.2", "layers.1.norm", "layers.1", "layers.0", ""]
        model.layers.requires_grad_(False)
        assert groups(model) == ["layers.2", "layers.1", "layers.0", ""]

    def test_weights_of_one_module_have_one_dtype(self) -> None:
        model = made()
        model.layers[1].up.bias = nn.Parameter(model.layers[1].up.bias.double())
        with pytest.raises(offload.ConfigError, match=r"layers\.1\.up: .*give those of a module one dtype"):
            groups(model)

    def test_weights_that_are_left_out_make_no_group(self) -> None:
        model = made()
        assert groups(model, None, [*model.layers[1].parameters()]) == ["layers.2", "layers.0", ""]


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def test_without_an_accelerator_it_is_refused(no_accelerator: None) -> None:
    model = made()
    before = [*model.parameters()]
    with pytest.raises(offload.ConfigError, match=r"no accelerator.*weights_in_file"):
        offload.weights_in_host_memory(model)
    assert [id(each) for each in before] == [id(each) for each in model.parameters()]


def test_an_optimizer_that_was_made_before_is_named(no_accelerator: None) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.layers[1].parameters())
    with pytest.raises(offload.ConfigError, match=r"layers\.1\.up\.weight: 'a weight of SGD'"):
        offload.weights_in_host_memory(model)
    optimizer.mine = optimizer  # type: ignore[attr-defined]  # only the garbage collector ends it
    del optimizer
    with pytest.raises(offload.ConfigError, match="no accelerator"):
        offload.weights_in_host_memory(model)
