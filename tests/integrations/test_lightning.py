"""Lightning's Trainer with our optimizers: like torch's, killed and resumed, with old checkpoints deleted."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import started
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from lightning_runs import Module, rows
from small import SETTINGS
from started import end

import offload
from offload.checkpoint.manifest import RELEASED_NAME
from offload.integrations.lightning import OffloadCallback

PROGRAM = Path(__file__).with_name("lightning_runs.py")


def start(folder: Path, *arguments: object, python: str = "") -> subprocess.Popen[str]:
    return started.start(PROGRAM, folder, *arguments, ranks=2 if "ranks=2" in arguments else 0, python=python)


def run(folder: Path, *arguments: object, python: str = "") -> list[dict[str, Any]]:
    """Return what each rank says."""
    return end(start(folder, *arguments, python=python))[0]


def kill(folder: Path, *arguments: object) -> list[str]:
    """Return the names of what the killed process has left beside its checkpoints."""
    end(start(folder, *arguments), 1 if "ranks=2" in arguments else -signal.SIGKILL)
    return names(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").iterdir())


def pinned(folder: Path) -> int:
    """Return how many checkpoints hold slots on the path."""
    files = (folder / "path").glob("*/pins.json")
    return sum(len(json.loads(file.read_text().splitlines()[1])["pins"]) for file in files)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what eight steps lead to without an interruption, however they are saved."""
    return run(tmp_path_factory.mktemp("whole"), "offload", 8)[0]


@pytest.mark.slow
def test_a_trainer_trains_as_with_torchs_optimizer(tmp_path: Path) -> None:
    (stock,) = run(tmp_path / "stock", "torch", 6)
    (ours,) = run(tmp_path / "ours", "offload", 6, python=sys.executable)
    assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-4)
    assert ours["lr"] == stock["lr"]
    assert len(set(ours["losses"])) == 6
    assert {"offload_step_s", "offload_predicted_step_s", "offload_resident_share"} <= ours["logged"][0].keys()
    assert names(tmp_path / "ours") == ["step=6.ckpt", "step=6.ckpt.offload-0"]
    stored = torch.load(tmp_path / "ours" / "run" / "step=6.ckpt", weights_only=False)
    assert [state["offload_checkpoint"] for state in stored["optimizer_states"]] == ["step=6.ckpt.offload-0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rest", "left"),
    [
        (["kept=2"], [6]),
        pytest.param(["kept=null"], [6], marks=pytest.mark.full),
        # In place as long as there is room, then copies.
        pytest.param(["kept=2", "save.save_top_k=-1"], [2, 4, 6], marks=pytest.mark.full),
        (["kept=0", "save.save_top_k=2", 'save.monitor="train_loss"', 'precision="bf16-mixed"'], [4, 6]),
        pytest.param(["kept=2", 'precision="bf16-true"', "accumulate_grad_batches=2"], [6], marks=pytest.mark.full),
    ],
    ids=["in-place", "unset", "unlimited", "copies", "bf16"],
)
def test_a_killed_trainer_resumes_exactly(
    tmp_path: Path, rest: list[str], left: list[int], whole: dict[str, Any]
) -> None:
    if any("precision" in option for option in rest):
        (whole,) = run(tmp_path / "whole", "offload", 8, *rest)
    found = kill(tmp_path / "killed", "offload", 8, "kill=7", *rest)
    assert [name for name in found if name.endswith(".ckpt")] == [f"step={step}.ckpt" for step in left]
    assert [name for name in found if ".offload-" in name] == [f"step={step}.ckpt.offload-0" for step in left]
    last = tmp_path / "killed" / "run" / "step=6.ckpt"
    (resumed,) = run(tmp_path / "killed", "offload", 8, f"resume={last}", *rest)
    assert resumed["weights"] == whole["weights"]
    assert resumed["losses"] == whole["losses"][-len(resumed["losses"]) :]
    for step in left if "save.save_top_k=-1" in rest else []:  # all of them last
        (again,) = run(tmp_path / f"{step}", "offload", 8, f"resume={last.with_name(f'step={step}.ckpt')}")
        assert again["weights"] == whole["weights"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("same", "named"),
        pytest.param("same", "written", marks=pytest.mark.full),
        pytest.param("{step}", "named", marks=pytest.mark.full),
        pytest.param("{step}", "written", marks=pytest.mark.full),
        ("{step}", "removed"),
    ],
)
def test_a_kill_while_a_checkpoint_is_written_or_deleted_leaves_a_whole_one(
    tmp_path: Path, name: str, when: str, whole: dict[str, Any]
) -> None:
    """Also where each checkpoint takes the place of the one before under its name."""
    rest = ["kept=2", f'save.filename="{name}"', "save.enable_version_counter=false"]
    found = kill(tmp_path / "killed", "offload", 8, f"kill={when}", *rest)
    assert len(found) >= 3  # the folder of the other one is there
    last = max((tmp_path / "killed" / "run").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    (resumed,) = run(tmp_path / "killed", "offload", 8, f"resume={last}", *rest)
    assert resumed["weights"] == whole["weights"]
    assert resumed["losses"] == whole["losses"][-len(resumed["losses"]) :]
    if name == "same":  # what the killed process has left is gone, too
        assert len(names(tmp_path / "killed")) == 2
        assert pinned(tmp_path / "killed") == 1


@pytest.mark.slow
def test_lightning_saves_at_a_sigterm(tmp_path: Path, whole: dict[str, Any]) -> None:
    """By its own callback, behind the batch in which the signal came; and goes on from there exactly."""
    process = start(tmp_path, "offload", 8, "term=5")
    out, errors = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, ""), errors  # as Lightning ends then
    (resumed,) = run(tmp_path, "offload", 8, f"resume={tmp_path / 'ended.ckpt'}")
    assert resumed["weights"] == whole["weights"]
    assert resumed["losses"] == whole["losses"][6:]


@pytest.mark.slow
def test_two_ranks_save_and_resume_together_and_one_goes_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "offload", 8, "ranks=2", "kept=2")
    assert len(whole) == 2
    assert len({rank["weights"] for rank in whole}) == 1
    assert names(tmp_path / "whole") == ["step=8.ckpt", "step=8.ckpt.offload-0"]
    kill(tmp_path / "killed", "offload", 8, "ranks=2", "kept=2", "kill=7")
    last = tmp_path / "killed" / "run" / "step=6.ckpt"
    shutil.copytree(tmp_path / "killed", tmp_path / "copy")
    resumed = run(tmp_path / "killed", "offload", 8, "ranks=2", "kept=2", f"resume={last}")
    assert [rank["weights"] for rank in resumed] == [rank["weights"] for rank in whole]
    (alone,) = run(tmp_path / "alone", "offload", 8, f"resume={last}")
    assert alone["lr"] == whole[0]["lr"]
    twice = run(tmp_path / "twice", "offload", 8, "ranks=2", f"resume={tmp_path / 'alone' / 'run' / 'step=8.ckpt'}")
    assert {rank["weights"] for rank in twice} == {alone["weights"]}


@pytest.mark.slow
def test_a_checkpoint_of_lightnings_own_is_gone_on_from(tmp_path: Path) -> None:
    kill(tmp_path, "torch", 8, "kill=7")
    (whole,) = run(tmp_path / "whole", "torch", 8)
    (resumed,) = run(tmp_path, "offload", 8, f"resume={tmp_path / 'run' / 'step=6.ckpt'}")
    assert resumed["losses"] == pytest.approx(whole["losses"][-2:], rel=1e-4)


# In this process


class Small(Module):
    def __init__(self, path: Path, **config: Any) -> None:
        super().__init__("offload", {**SETTINGS, "paths": [path], **config})


NUMBERS = torch.utils.data.DataLoader(range(2), batch_size=1)


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[OffloadCallback(), *callbacks],
        **{"max_steps": 4, "gradient_clip_val": 0.5, "enable_checkpointing": bool(callbacks), **options},
    )


def fit(folder: Path, module: LightningModule, *callbacks: Any, resume: Any = None, **options: Any) -> Trainer:
    trainer = trainer_of(folder, *callbacks, **options)
    trainer.fit(module, NUMBERS, NUMBERS, ckpt_path=resume)
    return trainer


def weights(module: LightningModule) -> list[torch.Tensor]:
    return copy.deepcopy([*module.parameters()])


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".ckpt" in path.name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "path").mkdir()
    return tmp_path / "path"


def test_a_trainer_saves_when_it_is_told_to(tmp_path: Path, path: Path) -> None:
    """Over a checkpoint of that name, after `fit`, and weights alone."""
    module = Small(path, checkpoints_kept=2)
    trainer = fit(tmp_path, module)
    before, optimizer = weights(module), trainer.optimizers[0]
    for number in (0, 1, 0):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        assert checkpoints(tmp_path) == ["a.ckpt", f"a.ckpt.offload-{number}"]
        assert optimizer.engine.checkpoints.kept == (str(tmp_path / f"a.ckpt.offload-{number}"),)
    trainer.save_checkpoint(tmp_path / "b.ckpt", weights_only=True)
    assert checkpoints(tmp_path) == ["a.ckpt", "a.ckpt.offload-0", "b.ckpt"]
    module.to(torch.float64)
    trainer = fit(tmp_path, resumed := Small(path), resume=tmp_path / "a.ckpt")  # nothing is left to do
    assert all(map(torch.equal, weights(resumed), before))
    trainer.strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert checkpoints(tmp_path) == ["b.ckpt"]
    assert trainer.optimizers[0].engine.checkpoints.kept == ()
    optimizer.close()


@pytest.mark.parametrize("is_anothers", [False, True], ids=["own", "anothers"])
def test_a_folder_that_a_checkpoint_may_name_is_not_written_to(tmp_path: Path, path: Path, is_anothers: bool) -> None:
    """A save fails when the file has been written, and nobody knows."""

    class Failing(TorchCheckpointIO):
        def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
            super().save_checkpoint(*arguments, **options)
            if checkpoints(tmp_path) == ["a.ckpt", "a.ckpt.offload-0", "a.ckpt.offload-1"]:
                raise OSError("late")

    trainer = fit(tmp_path, Small(path), plugins=[Failing()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    if is_anothers:
        trainer = fit(tmp_path, Small(path), plugins=[Failing()])
    with pytest.raises(OSError, match="late"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert checkpoints(tmp_path) == ["a.ckpt", "a.ckpt.offload-2"]
    trainer.optimizers[0].close()


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"save_top_k": 0}, []),
        ({"save_top_k": 1}, ["3"]),
        ({"save_top_k": 3, "monitor": "step"}, ["1", "2", "3"]),
        ({"save_top_k": -1}, ["1", "2", "3", "4"]),
        ({"save_last": True}, ["last", "4"]),
        ({"save_last": "link", "save_top_k": -1}, ["last", "1", "2", "3", "4"]),
        ({"save_weights_only": True}, ["4"]),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_folders_live_as_long_as_their_checkpoints(
    tmp_path: Path, path: Path, options: dict[str, Any], left: list[str]
) -> None:
    if options == {"save_top_k": 1}:
        options, left = {**options, "monitor": "train_loss"}, [""]
    saving = ModelCheckpoint(tmp_path / "run", "{step}", every_n_train_steps=1, **options)
    trainer = fit(tmp_path, Small(path, checkpoints_kept=2), saving)
    found = checkpoints(tmp_path / "run") if (tmp_path / "run").exists() else []
    files = [name for name in found if name.endswith(".ckpt")]
    if left != [""]:
        assert [name.removeprefix("step=").removesuffix(".ckpt") for name in files] == left
    folders = [name.rpartition(".offload-")[0] for name in found if ".offload-" in name]
    whole = [name for name in files if not (tmp_path / "run" / name).is_symlink()]
    assert folders == ([] if options.get("save_weights_only") else whole)
    kept = {os.path.basename(folder) for folder in trainer.optimizers[0].engine.checkpoints.kept}
    assert kept <= set(found)  # the others are copies
    assert len(kept) <= 2
    for name in files if folders else []:
        resumed = fit(tmp_path / "other", module := Small(path), resume=tmp_path / "run" / name, max_steps=5)
        assert resumed.global_step == 5
        assert len(module.losses) == 5 - trainer_step(tmp_path / "run" / name)
        resumed.optimizers[0].close()


def test_no_folder_is_deleted_before_all_ranks_have_released_it(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = set[str]()

    def barrier(strategy: Any, *arguments: Any, **keywords: Any) -> None:
        released.update(found.parent.name for found in (tmp_path / "run").glob(f"*/{RELEASED_NAME}"))

    monkeypatch.setattr(SingleDeviceStrategy, "barrier", barrier)
    saving = ModelCheckpoint(tmp_path / "run", "{step}", every_n_train_steps=1)
    fit(tmp_path, Small(path, checkpoints_kept=2), saving).optimizers[0].close()
    assert released == {f"step={step}.ckpt.offload-0" for step in (1, 2, 3)}


def trainer_step(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=False)["global_step"])


def test_what_a_trainer_does_beside(tmp_path: Path, path: Path) -> None:
    """A trial run, stopping early, averaging weights, and validation between two calls of `fit`."""
    trainer = fit(tmp_path, Small(path), fast_dev_run=2)
    assert trainer.global_step == 2
    stopping = EarlyStopping("loss", patience=1, min_delta=100.0)
    assert (
        fit(tmp_path, Small(path), stopping, max_steps=-1, max_epochs=9, enable_checkpointing=False).global_step == 4
    )
    averaging = StochasticWeightAveraging(1e-3, swa_epoch_start=1, annealing_epochs=1)
    module = Small(path)
    fit(tmp_path, module, averaging, max_steps=-1, max_epochs=4, enable_checkpointing=False)
    assert len(set(module.losses)) == 8
    module = Small(path)
    trainer = fit(tmp_path, module, ModelCheckpoint(tmp_path / "run"))
    expected = weights(module)
    numbers = torch.utils.data.DataLoader(range(2), batch_size=1)
    for saved in ("best", None):
        assert trainer.validate(module, numbers, ckpt_path=saved, verbose=False)
    trainer.optimizers[0].close()
    fit(tmp_path, module, resume=trainer.checkpoint_callback.best_model_path, max_steps=6)
    other = Small(path)
    fit(tmp_path / "other", other, max_steps=6)
    assert all(map(torch.equal, weights(module), weights(other)))
    assert not all(map(torch.equal, weights(module), expected))


class Direct(Small):
    """Has a weight that its training uses, and which evaluation uses in a call of the module."""

    def __init__(self, path: Path, **config: Any) -> None:
        super().__init__(path, **config)
        self.factor = torch.nn.Parameter(torch.ones(32))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        x = rows(self.trainer.global_step)
        return (self.layers(self.factor * x) - x[:, :1]).square().mean()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(self.factor * batch)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.losses.append(self(rows(1000)).square().mean().item())


@pytest.mark.not_overlapped("steps go on where the test says so")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_steps_are_hidden_in_forward_and_backward(tmp_path: Path, path: Path, is_compiled: bool) -> None:
    found = []
    for overlap in ("off", "both"):
        module = Direct(path, overlap=overlap)
        if is_compiled:
            module.layers = torch.compile(module.layers, backend="eager")
        trainer = fit(tmp_path / overlap, module, ModelCheckpoint(tmp_path / overlap / "run"), max_steps=6)
        hidden_in = "forward and backward" if overlap == "both" else ""
        assert trainer.optimizers[0].plan.hidden_in == hidden_in
        found.append(([parameter.detach().clone() for parameter in module.parameters()], module.losses))
        trainer.optimizers[0].close()
    (weights_off, losses_off), (weights_both, losses_both) = found
    assert losses_off == losses_both
    assert all(map(torch.equal, weights_off, weights_both))


@pytest.mark.not_overlapped("steps go on where the test says so")
def test_steps_do_not_go_on_where_weights_are_averaged_or_all_is_compiled(tmp_path: Path, path: Path) -> None:
    averaging = StochasticWeightAveraging(1e-3, swa_epoch_start=1)
    with pytest.raises(offload.ConfigError, match="StochasticWeightAveraging"):
        fit(tmp_path, Small(path, overlap="forward"), averaging, max_steps=-1, max_epochs=2)
    whole: Any = torch.compile(Small(path, overlap="both"), backend="eager")
    with pytest.raises(offload.ConfigError, match="all of it is compiled"):
        fit(tmp_path, whole)
    trainer = fit(tmp_path, Small(path, overlap="auto"), averaging, max_steps=-1, max_epochs=2)
    assert trainer.optimizers[0].plan.hidden_in in ("", "backward")
    trainer.optimizers[0].close()
    trainer = fit(tmp_path, Small(path, overlap="auto"))
    assert trainer.optimizers[0].plan.hidden_in.startswith("forward")


@pytest.mark.not_overlapped("steps go on where the test says so")
def test_a_learning_rate_is_found_with_hidden_steps_and_one_optimizer_at_a_time(tmp_path: Path, path: Path) -> None:
    """Lightning's finder trains before callbacks are told that `fit` starts."""
    found = []
    for overlap in ("off", "both"):
        alive = weakref.WeakSet[torch.optim.Optimizer]()

        class Counting(Small):
            def configure_optimizers(self, alive: weakref.WeakSet[torch.optim.Optimizer] = alive) -> Any:
                assert not alive
                made = super().configure_optimizers()
                alive.add(made["optimizer"])
                return made

        module = Counting(path, overlap=overlap)
        trainer = trainer_of(tmp_path)
        Tuner(trainer).lr_find(module, NUMBERS, num_training=5, early_stop_threshold=None, update_attr=False)
        trainer.fit(module, NUMBERS)
        found.append(([parameter.detach().clone() for parameter in module.parameters()], module.losses))
        trainer.optimizers[0].close()
    (weights_off, losses_off), (weights_both, losses_both) = found
    assert len(losses_off) == 9
    assert losses_off == losses_both
    assert all(map(torch.equal, weights_off, weights_both))


def test_gradients_of_a_fit_that_failed_are_dropped_wherever_they_are(tmp_path: Path, path: Path) -> None:
    """Of an optimizer that the next fit goes on with."""

    class Accumulating(Small):
        automatic_optimization, made, fails = False, None, False

        def configure_optimizers(self) -> Any:
            self.made = self.made or super().configure_optimizers()
            return self.made

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            self.manual_backward(super().training_step(batch, index))
            if self.fails:
                raise OSError("amid an accumulation")
            if index == 1:
                self.optimizers().step()
                self.optimizers().zero_grad()

    found = []
    for fails in (False, True):
        module = Accumulating(path, gradient_memory=0)
        if fails:
            module.fails = True
            with pytest.raises(OSError, match="amid an accumulation"):
                fit(tmp_path, module, gradient_clip_val=None)
            module.fails = False
        trainer = fit(tmp_path, module, gradient_clip_val=None)
        found.append(weights(module))
        trainer.optimizers[0].close()
    assert all(map(torch.equal, *found))


@pytest.mark.not_overlapped("looks at .grad after the step")
def test_clipping_by_value_is_torchs_own_and_by_norm_ours(tmp_path: Path, path: Path) -> None:
    trainer = fit(tmp_path, Small(path), gradient_clip_val=1e-6)
    assert trainer.optimizers[0].metrics()["gradient_norm"] > 0
    seen = []

    class Largest(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *rest: Any) -> None:
            seen.extend(float(p.grad.abs().max()) for p in module.parameters() if p.grad is not None)

    options = {"gradient_clip_val": 1e-6, "gradient_clip_algorithm": "value", "enable_checkpointing": False}
    fit(tmp_path, Small(path), Largest(), **options)
    assert 0 < max(seen) <= 1.0001e-6
    assert fit(tmp_path, Small(path), gradient_clip_val=None).global_step == 4
    with pytest.raises(offload.ConfigError, match="by their L2 norm, what leaves"):
        fit(tmp_path, Small(path, gradient_memory=0), **options)


def test_manual_optimization(tmp_path: Path, path: Path) -> None:
    class Manual(Small):
        automatic_optimization = False

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()

    module, stock = Manual(path), Manual(path)
    stock.optim = "torch"
    trainer = fit(tmp_path, module, gradient_clip_val=None)
    assert trainer.optimizers[0].metrics()["gradient_norm"] > 0
    plain = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=4, enable_progress_bar=False
    )
    plain.fit(stock, torch.utils.data.DataLoader(range(2), batch_size=1))
    assert module.losses == pytest.approx(stock.losses, rel=1e-4)


def test_what_cannot_be_used_is_named(tmp_path: Path, path: Path) -> None:
    stock = Small(path)
    stock.optim = "torch"
    with pytest.raises(offload.ConfigError, match="AdamW"):
        fit(tmp_path, stock)

    class Two(Small):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [super(Two, self).configure_optimizers()["optimizer"] for _ in range(2)]

    with pytest.raises(offload.ConfigError, match="no other"):
        fit(tmp_path, Two(path), gradient_clip_val=None)
    with pytest.raises(offload.ConfigError, match="FSDPStrategy"):
        OffloadCallback().setup(SimpleNamespace(strategy=FSDPStrategy(), precision_plugin=None), None, "fit")
    with pytest.raises(offload.ConfigError, match="'AsyncCheckpointIO'"):
        fit(tmp_path, Small(path), plugins=[AsyncCheckpointIO()])
    trainer = fit(tmp_path, Small(path))
    with pytest.raises(offload.ConfigError, match="gs://bucket"):
        trainer.save_checkpoint("gs://bucket/a.ckpt")
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt.offload-0").rename(tmp_path / "elsewhere")
    with pytest.raises(offload.CheckpointError, match=r"a\.ckpt\.offload-0: copy that folder"):
        fit(tmp_path, Small(path), resume=tmp_path / "a.ckpt")
