"""The way back to torch's own optimizers: the recipes of docs/frameworks.md as they are printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from small import SETTINGS

import offload
from offload import cli

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
SECTION = PAGE.partition("## Going back to torch's optimizers")[2].partition("\n## ")[0]
RECIPES = {
    name: (command, program)
    for name, command, program in re.findall(
        r"\*\*(.+?)\.\*\* [^`]*.*?```sh\n(.*?)\n```\n\n```\n(.*?)```", SECTION, re.DOTALL
    )
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where state lies; the recipe runs in the folder above."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path").mkdir()
    return tmp_path / "path"


def run(name: str, **given: Any) -> dict[str, Any]:
    """Run a recipe's command and program; return what the program has made."""
    command, program = RECIPES[name]
    for line in command.splitlines():
        assert line.startswith("offload export ")
        assert cli.main([*shlex.split(line)[1:], "--quiet"]) == 0
    exec(program, given)
    return given


def bare(optimizer: Any) -> Any:
    """Return torch's optimizer, out of what a framework has wrapped it in."""
    return getattr(optimizer, "optimizer", optimizer)


def check_equal(theirs: torch.optim.Optimizer, ours: dict[str, Any], dtype: torch.dtype) -> None:
    """Check that torch's optimizer has what ours had, rounded to the weights' type as torch does."""
    found = theirs.state_dict()
    assert type(theirs).__module__.startswith("torch.optim")
    assert [group["params"] for group in found["param_groups"]] == [g["params"] for g in ours["param_groups"]]
    for group, saved in zip(found["param_groups"], ours["param_groups"], strict=True):
        assert {name: group[name] for name in saved if name != "param_names"} == {
            name: value for name, value in saved.items() if name != "param_names"
        }
    assert found["state"].keys() == ours["state"].keys()
    for number, entry in found["state"].items():
        assert entry.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert entry["step"] == ours["state"][number]["step"]
        for tensor in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(entry[tensor], ours["state"][number][tensor].to(dtype))


def test_every_framework_has_a_recipe() -> None:
    assert RECIPES.keys() == {"Trainer", "Lightning", "Accelerate", "A loop of your own"}


@pytest.fixture
def trainer_folder(path: Path) -> dict[str, Any]:
    """A Trainer's checkpoint at step 4, of 8 steps with our optimizer, as the recipe has it."""
    pytest.importorskip("transformers")
    from trainer_runs import Tokens, model
    from transformers import Trainer, TrainingArguments

    import offload.integrations.transformers as offload_transformers

    common = {"output_dir": "run", "learning_rate": 1e-3, "weight_decay": 0.1, "max_steps": 8, "save_steps": 4}
    common |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}

    def train(optim: str) -> dict[str, Any]:
        trainer = Trainer(model=model(), args=TrainingArguments(optim=optim, **common), train_dataset=Tokens())
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return {"losses": losses, "optimizer": bare(trainer.optimizer)}

    theirs = train("adamw_torch")
    offload_transformers.enable({**SETTINGS, "paths": [path]})
    try:
        ours = train("offload_adamw")
        ours["optimizer"].load_checkpoint("run/checkpoint-4/optimizer")
        state = ours["optimizer"].state_dict()
        ours["optimizer"].close()
    finally:
        offload_transformers.disable()
    return {"Trainer": Trainer, "model": model, "rows": Tokens(), "losses": theirs["losses"], "state": state}


@pytest.mark.slow
def test_trainer(trainer_folder: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Trainer, TrainingArguments

    losses, state, trained = (trainer_folder.pop(name) for name in ("losses", "state", "model"))
    loaded: list[Any] = []

    class Seen(Trainer):
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            loaded.append(self.optimizer.state_dict())
            check_equal(bare(self.optimizer), state, torch.float32)

    def arguments(**given: Any) -> TrainingArguments:
        return TrainingArguments(**given, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1)

    made = run("Trainer", **{**trainer_folder, "Trainer": Seen, "TrainingArguments": arguments, "model": trained()})
    assert len(loaded) == 1
    assert len(loaded[0]["param_groups"]) == 2
    history = [entry["loss"] for entry in made["trainer"].state.log_history if "loss" in entry]
    assert history[-4:] == pytest.approx(losses[-4:], rel=1e-4)
    assert bare(made["trainer"].optimizer).state_dict()["state"][0]["step"] == 8


@pytest.mark.slow
def test_what_a_trainer_meets_without_the_recipe(trainer_folder: dict[str, Any]) -> None:
    from transformers import Trainer, TrainingArguments

    import offload.integrations.transformers as offload_transformers

    args = TrainingArguments(output_dir="run", optim="adamw_torch", max_steps=8, use_cpu=True, report_to=[])

    def resume() -> None:
        trainer = Trainer(model=trainer_folder["model"](), args=args, train_dataset=trainer_folder["rows"])
        trainer.train(resume_from_checkpoint="run/checkpoint-4")

    with pytest.raises(ValueError, match="`offload export CHECKPOINT --for transformers OUT`"):
        resume()
    offload_transformers.enable()
    try:
        with pytest.raises(offload.CheckpointError, match="offload export run/checkpoint-4 --for transformers OUT"):
            resume()
    finally:
        offload_transformers.disable()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_lightning(path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule, Trainer

    from offload.integrations.lightning import OffloadCallback

    losses: list[float] = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Linear(256, 1)).to(dtype)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(self.trainer.global_step)).to(dtype)
            loss = (self.layers(batch) - batch[:, :1]).square().mean()
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return offload.AdamW(self.named_parameters(), lr=1e-3, offload={**SETTINGS, "paths": [path]})

    class Theirs(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False}
    rows = torch.utils.data.DataLoader(range(8), batch_size=1)  # type: ignore[arg-type,var-annotated]
    Trainer(max_steps=8, **quiet).fit(Theirs(), rows)
    whole = losses.copy()
    trainer = Trainer(max_steps=4, callbacks=[OffloadCallback()], **quiet)
    trainer.fit(module := Module(), rows)
    trainer.save_checkpoint("run/last.ckpt")
    state = trainer.optimizers[0].state_dict()
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    checked: list[int] = []

    def quietly(**given: Any) -> Trainer:
        from lightning.pytorch import Callback

        class Check(Callback):
            def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
                check_equal(trainer.optimizers[0], state, dtype)
                assert all(map(torch.equal, module.parameters(), weights))
                checked.append(trainer.global_step)

        return Trainer(**given, **quiet, callbacks=[Check()])

    with pytest.raises(ValueError, match="`offload export CHECKPOINT --for lightning OUT`"):
        Trainer(max_steps=8, **quiet).fit(Theirs(), rows, ckpt_path="run/last.ckpt")
    losses.clear()
    made = run("Lightning", Module=Module, Trainer=quietly, rows=rows, torch=torch)
    assert checked == [4]
    assert losses == pytest.approx(whole[-4:], rel=1e-4 if dtype is torch.float32 else 0.1)
    assert made["trainer"].optimizers[0].state_dict()["state"][0]["step"] == 8
    assert torch.load("run/torch.ckpt", weights_only=True)["global_step"] == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_accelerate(path: Path, dtype: torch.dtype) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from offload.integrations.accelerate import enable

    def layers() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Linear(256, 1)).to(dtype)

    def train(model: torch.nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
            loss = (model(batch) - batch[:, :1]).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    accelerator = Accelerator(cpu=True)
    model = layers()
    whole = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 1, 8)
    ours = offload.AdamW((model := layers()).named_parameters(), lr=1e-3, offload={**SETTINGS, "paths": [path]})
    model, optimizer = accelerator.prepare(model, ours)
    optimizer = enable(accelerator, optimizer)
    train(model, optimizer, 1, 4)
    accelerator.save_state("checkpoint", safe_serialization=False)
    state = optimizer.state_dict()
    optimizer.close()

    accelerator = Accelerator(cpu=True)
    other = layers()
    accelerator.prepare(other, torch.optim.AdamW(other.parameters()))
    with pytest.raises(ValueError, match="`offload export CHECKPOINT --for accelerate OUT`"):
        accelerator.load_state("checkpoint")
    accelerator = Accelerator(cpu=True)
    made = run("Accelerate", accelerator=accelerator, model=layers(), torch=torch)
    check_equal(bare(made["optimizer"]), state, dtype)
    losses = train(made["model"], made["optimizer"], 5, 8)
    assert losses == pytest.approx(whole[-4:], rel=1e-4 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loop_of_ones_own(path: Path, dtype: torch.dtype) -> None:
    model = torch.nn.Linear(300, 30).to(dtype)
    with offload.AdamW(model.named_parameters(), lr=0.1, offload={**SETTINGS, "paths": [path]}) as ours:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        ours.step()
        ours.save_checkpoint("checkpoint")
        ours.wait_checkpoint()
        state = ours.state_dict()
    other = torch.nn.Linear(300, 30).to(dtype)
    made = run("A loop of your own", model=other, offload=offload, torch=torch)
    check_equal(made["optimizer"], state, dtype)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
