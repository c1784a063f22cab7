"""Trains a small model in Lightning's `Trainer`; run as a program by `test_lightning.py`.

    python lightning_runs.py FOLDER OPTIM STEPS [resume=CHECKPOINT] [kill=WHEN] [term=N] [ranks=N] [kept=N]
        [mirror=DIR] [key=value ...]

`key=value` is of `Trainer` or, after `save.`, of `ModelCheckpoint`. WHEN is a number of steps, or where in saving or
deleting a checkpoint: "named" (the state is committed), "written", "removed" (its folder is still there), the first
two at the second checkpoint. Prints one line of JSON.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import dying
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from small import SETTINGS, die, digest, end_rank, options, say

import offload
from offload.integrations.lightning import OffloadCallback


def rows(number: int) -> torch.Tensor:
    """Return a batch. Lightning goes on with the next epoch's first one, so modules here make theirs themselves."""
    return torch.randn(2, 32, generator=torch.Generator().manual_seed(number))


class Module(LightningModule):
    """Reproduces its input's first element; the learning rate falls at every step."""

    def __init__(self, optim: str, config: dict[str, Any]) -> None:
        super().__init__()
        self.optim, self.config = optim, config
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        batch = rows(self.trainer.global_step * self.trainer.world_size + self.trainer.global_rank)
        batch = batch.to(self.layers[0].weight.dtype)
        loss = (self.layers(batch) - batch[:, :1]).square().mean()
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        batch = rows(1000 + index).to(self.layers[0].weight.dtype)
        self.log("loss", (self.layers(batch) - batch[:, :1]).square().mean())

    def configure_optimizers(self) -> Any:
        options = {"lr": 1e-2, "weight_decay": 0.1}
        if self.optim == "torch":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters(), **options)
        else:
            optimizer = offload.AdamW(self.named_parameters(), **options, offload=self.config)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Kill(Callback):
    """Kills the process when a step has ended, as an operator or a machine might."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.step, self.number = step, number

    def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        dying.step(trainer.global_step)
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


class KillingIO(TorchCheckpointIO):
    """Kills the process while checkpoints are written or deleted."""

    def __init__(self, when: str | int | None) -> None:
        super().__init__()
        self.when, self.left = when, 2 if when != "removed" else 1

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.reached("named")
        super().save_checkpoint(*arguments, **options)
        self.reached("written")

    def remove_checkpoint(self, *arguments: Any, **options: Any) -> None:
        super().remove_checkpoint(*arguments, **options)
        self.reached("removed")

    def reached(self, place: str) -> None:
        self.left -= place == self.when
        if place == self.when and self.left == 0:
            die()


def main(folder: str, optim: str, steps: int, *rest: str) -> None:
    values = options(rest)
    resume, kill, kept, mirror = (values.pop(name, None) for name in ("resume", "kill", "kept", "mirror"))
    term, ranks = values.pop("term", 0), values.pop("ranks", 1)
    saving = {name.removeprefix("save."): values.pop(name) for name in [*values] if name.startswith("save.")}
    path = Path(folder) / "path"
    path.mkdir(exist_ok=True, parents=True)
    seed_everything(1, verbose=False)
    module = Module(optim, {**SETTINGS, "paths": [path], "checkpoints_kept": kept, "mirror": mirror})
    found: list[Any] = []

    class Logged(Callback):
        def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
            found.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        num_nodes=1,
        max_steps=steps,
        default_root_dir=folder,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=values.pop("limit_val_batches", 0),
        callbacks=[
            *([OffloadCallback()] if optim == "offload" else []),
            ModelCheckpoint(Path(folder) / "run", **{"filename": "{step}", "every_n_train_steps": 2, **saving}),
            *([Kill(kill)] if isinstance(kill, int) else []),
            *([Kill(term, signal.SIGTERM), OnExceptionCheckpoint(folder, "ended")] if term else []),
            *([Kill(-1), OnExceptionCheckpoint(Path(folder) / "run", "ended")] if dying.WISH else []),
            Logged(),
        ],
        plugins=[KillingIO(kill)],
        **values,
    )
    numbers = torch.utils.data.DataLoader(range(8 * ranks), batch_size=1)
    trainer.fit(module, numbers, numbers, ckpt_path=resume)
    if mirror:
        trainer.optimizers[0].wait_mirror()
        dying.end(trainer.optimizers[0].metrics())
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    say(losses=module.losses, weights=digest(module.parameters()), lr=rate, logged=found[-1:])
    end_rank()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
