"""torchtitan, LLaMA-Factory and litgpt with the lines of docs/frameworks.md.

They bring much, and want other releases of packages than each other, so that most tests take what they do with an
optimizer in short for them. Where one is installed its example is trained, killed and resumed; `doors.py` makes
environments for all.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import yaml
from doors import DOORS, ROOT, check
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import offload
import offload.integrations.transformers as integration

PAGE = (ROOT / "docs" / "frameworks.md").read_text()


def blocks(section: str, folder: Path) -> list[str]:
    """Return what a section of the page shows, with a folder that is there for its disk."""
    (text,) = re.findall(rf"^## {section}\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found
    return [block.replace("/mnt/nvme0/offload", str(folder)) for block in found]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    """Put a module of these names, and the packages that it is in, in the place of what may be installed."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        made = ModuleType(".".join(parts[:count]))
        made.__path__ = []
        monkeypatch.setitem(sys.modules, made.__name__, made)
    vars(made).update(names)


class OptimizersContainer:
    """torchtitan's, in short: groups of parameters by patterns, an optimizer for each name, state by names."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        param_groups: list[Any]
        implementation: str = "fused"
        optimizer_factory_kwargs_by_name: dict[str, Any] = dataclasses.field(default_factory=dict)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        if name not in ("Adam", "AdamW"):
            raise NotImplementedError(f"Optimizer {name} not added.")
        return getattr(torch.optim, name)

    def __init__(self, config: Any, *, model_parts: list[torch.nn.Module]) -> None:
        (model,), (group,) = model_parts, config.param_groups
        chosen = [(name, p) for name, p in model.named_parameters() if re.search(group.pattern, name)]
        fused = {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}
        names = {"param_names": [name for name, _ in chosen], "params": [p for _, p in chosen]}
        make = self._resolve_optimizer_factory(group.optimizer_name)
        options = config.optimizer_factory_kwargs_by_name.get(group.optimizer_name, {})
        self.optimizers = [make([{**names, **fused, **group.optimizer_kwargs}], **options)]

    def state_dict(self) -> dict[str, Any]:
        found = {}
        for optimizer in self.optimizers:
            given = optimizer.state_dict()
            for group in given["param_groups"]:
                for name, number in zip(group["param_names"], group["params"], strict=True):
                    found |= {f"state.{name}.{key}": value for key, value in given["state"][number].items()}
                    others = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                    found |= {f"param_groups.{name}.{key}": value for key, value in others.items()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            if not optimizer.state:  # a step without a rate, by gradients that are 0, has state be there
                for group in optimizer.param_groups:
                    rate, group["lr"] = group["lr"], 0.0
                    for p in group["params"]:
                        p.grad = torch.zeros_like(p)
                    optimizer.step()
                    optimizer.zero_grad()
                    group["lr"] = rate
            state, groups, number = {}, [], 0
            for group in optimizer.param_groups:
                numbers = range(number, number + len(group["params"]))
                for number, name, p in zip(numbers, group["param_names"], group["params"], strict=True):
                    state[number] = {key: state_dict[f"state.{name}.{key}"] for key in optimizer.state[p]}
                others = [key for key in group if key not in ("params", "param_names")]
                name = group["param_names"][0]
                given = {key: state_dict[f"param_groups.{name}.{key}"] for key in others}
                groups.append({"params": list(numbers), **given})
            optimizer.load_state_dict({"state": state, "param_groups": groups})


@dataclasses.dataclass(kw_only=True)
class ParamGroupConfig:
    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any]


def small(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_torchtitans_container_knows_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State comes and goes as torchtitan asks for it, with the same bits; torch's own names stay."""
    names = {"OptimizersContainer": OptimizersContainer, "ParamGroupConfig": ParamGroupConfig}
    module(monkeypatch, "torchtitan.components.optimizer", **names)
    (lines,) = blocks("torchtitan", tmp_path)
    space: dict[str, Any] = {}
    exec(compile(lines, "docs/frameworks.md", "exec"), space)
    config, made = space["optimizer"], space["Optimizers"]
    assert type(config) is made.Config
    assert made._resolve_optimizer_factory("Adam") is torch.optim.Adam
    for unknown in ("Lion", "offload.Nothing"):
        with pytest.raises(NotImplementedError, match=unknown):
            made._resolve_optimizer_factory(unknown)
    model, other = small(), small(1)
    ours, again = made(config, model_parts=[model]), made(config, model_parts=[other])
    (optimizer,), (resumed,) = ours.optimizers, again.optimizers
    with optimizer, resumed:
        assert isinstance(optimizer, offload.AdamW)
        assert [str(path.path) for path in optimizer.config.paths] == [str(tmp_path)]
        steps(model, optimizer, range(3))
        other.load_state_dict(model.state_dict())
        again.load_state_dict(ours.state_dict())
        steps(model, optimizer, range(3, 6))
        steps(other, resumed, range(3, 6))
        assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_litgpt_makes_ours_by_its_path(tmp_path: Path) -> None:
    """litgpt imports the class that `class_path` names, and calls it with the parameters and `init_args`."""
    (text,) = blocks("litgpt", tmp_path)
    wanted = yaml.safe_load(text)["optimizer"]
    place, name = wanted["class_path"].rsplit(".", 1)
    model = small()
    with getattr(__import__(place, fromlist=[name]), name)(model.parameters(), **wanted["init_args"]) as optimizer:
        assert type(optimizer) is offload.AdamW
        assert optimizer.param_groups[0]["lr"] == 3e-5
        assert optimizer.defaults["lr"] == 3e-5  # which litgpt's schedule begins with
        assert [str(path.path) for path in optimizer.config.paths] == [str(tmp_path)]
        steps(model, optimizer, range(2))


def test_llama_factorys_trainer_is_given_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def run_exp() -> None:
        given = yaml.safe_load(Path(sys.argv[1]).read_text())
        given |= {"output_dir": str(tmp_path / "run"), "max_steps": 2, "report_to": [], "use_cpu": True}
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 32, (16, 8))]
        made.append(
            Trainer(  # LLaMA-Factory's adds GaLore and others, and leaves `optim` to this
                model=LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=8, **sizes)),
                args=TrainingArguments(**given),
                train_dataset=rows,
            )
        )
        made[0].train()

    module(monkeypatch, "llamafactory.train.tuner", run_exp=run_exp)
    program, settings = blocks("LLaMA-Factory", tmp_path)
    (tmp_path / "config.yaml").write_text(settings)
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "config.yaml")])
    try:
        exec(compile(program, "docs/frameworks.md", "exec"), {})
        with made[0].optimizer.optimizer as optimizer:
            assert isinstance(optimizer, offload.AdamW)
            assert [str(path.path) for path in optimizer.config.paths] == [str(tmp_path)]
            assert optimizer.config.checkpoints == 3  # save_total_limit, and the next one
        assert (tmp_path / "run" / "checkpoint-2" / "optimizer" / "COMMIT").exists()
    finally:
        integration.disable()


@pytest.mark.slow
@pytest.mark.parametrize("name", DOORS)
def test_a_framework_trains_is_killed_and_resumes(name: str, tmp_path: Path) -> None:
    if find_spec(DOORS[name].package) is None:
        pytest.skip(f"{name} is not installed: python tests/doors.py {name}")
    check(DOORS[name], sys.executable, tmp_path)
