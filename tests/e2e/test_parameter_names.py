"""Parameters are called in checkpoints what they are called in the bare module, however it was wrapped."""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import offload
from offload.checkpoint.exchange import SafetensorsSource, export_safetensors
from offload.checkpoint.reader import Checkpoint
from offload.errors import ConfigError
from offload.layout import Parameter, bare_names, keep_exact, matching_names
from offload.protocols import DtypeCode

GOLDENS = Path(__file__).parents[1] / "goldens"
sys.path.insert(0, str(GOLDENS))

import wrapped_names  # noqa: E402

BARE = ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    with tarfile.open(GOLDENS / "wrapped-names.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "bare"),
    [
        (["_orig_mod.a.w", "_orig_mod.b"], ["a.w", "b"]),
        (["a._orig_mod.w", "a._checkpoint_wrapped_module.b"], ["a.w", "a.b"]),
        (["_fsdp_wrapped_module.l.0._fsdp_wrapped_module._flat_param"], ["l.0._flat_param"]),
        (["module.a", "module.b"], ["a", "b"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["_orig_mod.module.a", "module._orig_mod.b"], ["a", "b"]),
        (["module.module.a", "module.module.b"], ["a", "b"]),
        (["a._orig_mod.w", "a.w", "_orig_mod.b"], ["a._orig_mod.w", "a.w", "b"]),
        (["modules.a", "my_orig_mod.w", "a._orig_mod"], ["modules.a", "my_orig_mod.w", "a._orig_mod"]),
        (["param_groups[0].params[0]", ""], ["param_groups[0].params[0]", ""]),
        ([], []),
    ],
)
def test_names_are_those_of_the_bare_module(names: list[str], bare: list[str]) -> None:
    found = bare_names(names)
    assert [found[name] for name in names] == bare
    assert bare_names(bare) == dict(zip(bare, bare, strict=True))  # once is enough
    assert matching_names(names, bare) == found
    assert matching_names(bare, names) == dict(zip(bare, names, strict=True))


@pytest.mark.parametrize(
    ("names", "there", "found"),
    [
        (["module.a"], ["module.a", "a"], {"module.a": "module.a"}),
        (["a"], ["module.a", "other.b"], {"a": "module.a"}),  # which has one more that is no module's
        (["a"], ["_orig_mod.a", "module.a"], {}),
        (["_orig_mod.a", "module.a"], ["a"], {}),
        (["module.a", "a"], ["module.a"], {"module.a": "module.a"}),
        (["a"], ["b"], {}),
    ],
)
def test_a_name_is_matched_where_only_one_can_be_meant(
    names: list[str], there: list[str], found: dict[str, str]
) -> None:
    assert matching_names(names, there) == found


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("way", ["load_checkpoint", "import_state"])
def test_an_older_checkpoint_loads(golden: Path, wrapped: bool, way: str) -> None:
    with Checkpoint(golden / "checkpoint") as old:
        assert all("_orig_mod" in name for name in old.names)
    source = SafetensorsSource(golden / "export")
    model = wrapped_names.model(wrapped)
    with offload.AdamW(model.named_parameters(), lr=1.0, offload=wrapped_names.CONFIG) as optimizer:
        if way == "import_state":
            optimizer.import_state(golden / "export")
        else:
            optimizer.load_checkpoint(golden / "checkpoint")
        for parameter, name in zip(model.parameters(), source.names, strict=True):
            for tensor, value in optimizer.state_for(parameter).items():
                assert value.flatten().tolist() == source.mapped(f"state.{name}.{tensor}").tolist()
            assert optimizer.state[parameter]["step"] == 3
        wrapped_names.train(model, optimizer, 4, 5)
        if way == "load_checkpoint":  # numbers of stochastic rounding, too, are by name
            assert wrapped_names.weights(model) == json.loads((golden / "after.json").read_text())


Wrap = Callable[[torch.nn.Module], torch.nn.Module]


class Module(torch.nn.Module):
    """Calls what it wraps as DDP does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def layers(wrap: Wrap) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(wrap(torch.nn.Linear(8, 4)), torch.nn.Linear(4, 1)).bfloat16()


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "bare": lambda: layers(lambda layer: layer),
    "compiled": lambda: torch.compile(layers(torch.compile)),  # type: ignore[arg-type,return-value]
    "recomputed": lambda: layers(checkpoint_wrapper),
    "ddp": lambda: Module(torch.compile(layers(lambda layer: layer))),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(
    ("kind", "other", "in_place"),
    [
        ("bare", "compiled", False),
        ("compiled", "bare", True),
        ("recomputed", "compiled", False),
        ("compiled", "ddp", True),
        ("ddp", "recomputed", False),
        ("ddp", "recomputed", True),
    ],
)
def test_a_wrapped_models_state_goes_into_any_other(tmp_path: Path, kind: str, other: str, in_place: bool) -> None:
    (tmp_path / "path").mkdir()
    config = {"host_memory": 0, "paths": [tmp_path / "path"], "threads": 1} if in_place else {"threads": 1}
    first, second = MODELS[kind](), MODELS[other]()
    with offload.AdamW(first.named_parameters(), lr=0.1, offload=config) as optimizer:
        wrapped_names.train(first, optimizer, 1, 2)
        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
        state = optimizer.state_dict()["state"]
    with Checkpoint(tmp_path / "ck") as checkpoint:
        assert checkpoint.names == BARE
    export_safetensors(tmp_path / "ck", tmp_path / "file")
    for load in ("load_checkpoint", "import_state"):
        with offload.AdamW(second.named_parameters(), lr=0.1, offload=config) as optimizer:
            getattr(optimizer, load)(tmp_path / ("file" if load == "import_state" else "ck"))
            loaded = optimizer.state_dict()["state"]
            assert all(torch.equal(loaded[n][name], state[n][name]) for n in state for name in state[n])
            assert loaded.keys() == state.keys()
            assert wrapped_names.weights(second) == wrapped_names.weights(first)


def test_groups_that_are_added_keep_the_names_apart(tmp_path: Path) -> None:
    """Names of the first group alone begin with `module.`; the second has the name that the first one would get."""
    weights = [torch.nn.Parameter(torch.full((4,), float(n))) for n in range(3)]
    named = [[("module.a", weights[0])], [("a", weights[1])], [("b", weights[2])]]

    def optimizer(groups: int) -> offload.AdamW:
        made = offload.AdamW(named[0])
        for group in named[1:groups]:
            made.add_param_group({"params": group})
        return made

    with optimizer(2) as two:
        for weight in weights[:2]:
            weight.grad = torch.ones(4)
        two.step()
        two.save_checkpoint(tmp_path / "two")
        two.wait_checkpoint()
        state = two.state_dict()["state"]
    with optimizer(2) as two:
        two.load_checkpoint(tmp_path / "two")
        assert two.state_dict()["state"][0]["exp_avg"].tolist() == state[0]["exp_avg"].tolist()
    with Checkpoint(tmp_path / "two") as checkpoint:
        assert checkpoint.names == ["module.a", "a"]
    with optimizer(3) as three, pytest.raises(offload.CheckpointError, match="parameter groups"):
        three.load_checkpoint(tmp_path / "two")


def test_patterns_are_of_the_bare_modules_names() -> None:
    names = ["_orig_mod.embed.weight", "_orig_mod.l._checkpoint_wrapped_module.weight", "_orig_mod.out.weight"]
    wide = [Parameter(name, 1 << 13, DtypeCode.BFLOAT16, 0, shape=(1 << 6, 1 << 7)) for name in names]
    assert [p.exact for p in keep_exact(wide, ["embed.*", "l.weight"])] == [True, True, False]
    assert [p.exact for p in keep_exact(wide, ["_orig_mod.out.*"])] == [False, False, True]


KINDS = {
    "adamw": offload.AdamW,
    "muon": offload.Muon,
    "wrapped": partial(offload.wrap, torch.optim.AdamW),
}


@pytest.mark.parametrize("kind", KINDS)
def test_names_that_cannot_be_saved_are_refused_when_they_are_given(kind: str) -> None:
    def named(own: str) -> tuple[str, torch.nn.Parameter]:
        return own, torch.nn.Parameter(torch.ones(4, 4))

    for name in ("\0", "a\0b", "\ud800", "x\udfffy"):
        frozen = named(name)
        frozen[1].requires_grad_(False)
        told = re.escape(f"{name!r} cannot be used; give a name of Unicode text")
        with pytest.raises(ConfigError, match=told):
            Parameter(name, 3, DtypeCode.FLOAT32, 0)
        for given in (named(name), frozen):
            with pytest.raises(ConfigError, match=told):
                KINDS[kind]([given, named("other")])
        with KINDS[kind]([named("other")]) as optimizer:
            with pytest.raises(ConfigError, match=told):
                optimizer.add_param_group({"params": [named(name)]})
            assert len(optimizer.param_groups) == 1
            saved = optimizer.state_dict()
            saved["param_groups"][0]["param_names"] = [name]
            with pytest.raises(ConfigError, match=told):
                optimizer.load_state_dict(saved)


@pytest.mark.parametrize("kind", KINDS)
def test_any_other_name_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    names = ["", " ", "a\nb", "a\rb", "\t", "a/b", "../x", "é😀.重み", "\x1b[31m", "\x01", "a" * 10_000, ".", ".."]
    names += ["__metadata__", "{}", "%s", '"', "*"]

    def parameters() -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, torch.nn.Parameter(torch.full((2, 2), float(n)))) for n, name in enumerate(names)]

    given = parameters()
    with KINDS[kind](given, lr=0.1) as optimizer:
        for n, (_, weight) in enumerate(given):
            weight.grad = torch.full_like(weight, n + 1.0)
        optimizer.step()
        optimizer.save_checkpoint(tmp_path / "saved", copy=True)
        optimizer.wait_checkpoint()
        wanted = optimizer.state_dict()["state"]
    if kind != "wrapped":
        export_safetensors(tmp_path / "saved", tmp_path / "file")
        assert set(SafetensorsSource(tmp_path / "file").names) == set(names)
    again = [*reversed(parameters())]
    with KINDS[kind](again, lr=0.1) as optimizer:
        optimizer.load_checkpoint(tmp_path / "saved")
        found = optimizer.state_dict()["state"]
        for n in range(len(names)):
            for key, value in wanted[n].items():
                assert torch.equal(found[len(names) - 1 - n][key], value)
