"""Frameworks that nobody has told of us: they save `state_dict()` and give it back, here in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from limited import limited
from small import SETTINGS

import offload

AllLarge = limited(offload.AdamW, large_copy_bytes=0)
"""Hands out all state in files, however small it is."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "path").mkdir()
    return tmp_path / "path"


def bits(model: torch.nn.Module) -> list[bytes]:
    return [parameter.detach().view(torch.uint8).numpy().tobytes() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accelerate(tmp_path: Path, path: Path, dtype: torch.dtype) -> None:
    accelerate = pytest.importorskip("accelerate")

    def prepared() -> tuple[Any, ...]:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True)
        model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Linear(256, 1)).to(dtype)
        ours = AllLarge(model.named_parameters(), lr=1e-2, offload={**SETTINGS, "paths": [path]})
        schedule = torch.optim.lr_scheduler.ExponentialLR(ours, 0.9)
        return accelerator, *accelerator.prepare(model, ours, schedule), ours

    def train(run: tuple[Any, ...], *steps: int) -> None:
        accelerator, model, optimizer, schedule, _ = run
        for step in steps:
            batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(step)).to(dtype)
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    first, second = prepared(), prepared()
    with first[-1], second[-1]:
        train(first, 1, 2)
        first[0].save_state(str(tmp_path / "saved"), safe_serialization=False)
        train(first, 3, 4)
        second[0].load_state(str(tmp_path / "saved"))
        train(second, 3, 4)
        assert bits(second[1]) == bits(first[1])
        assert second[-1].param_groups[0]["lr"] == first[-1].param_groups[0]["lr"]


@pytest.mark.parametrize("precision", ["bf16-true"])
def test_lightning(tmp_path: Path, path: Path, precision: str) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_runs import Module

    def fit(name: str, steps: int, resume: Path | None = None) -> list[bytes]:
        module = Module("offload", {**SETTINGS, "paths": [path]})
        saves = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = Trainer(
            accelerator="cpu",
            precision=precision,  # type: ignore[arg-type]
            callbacks=[saves],
            max_steps=steps,
            default_root_dir=tmp_path,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(range(100), batch_size=1), ckpt_path=resume)  # type: ignore
        return bits(module)

    whole = fit("whole", 6)
    assert (
        len(torch.load(tmp_path / "whole" / "step=4.ckpt", weights_only=False)["optimizer_states"][0]["state"]) == 4
    )
    assert fit("again", 6, tmp_path / "whole" / "step=4.ckpt") == whole


@pytest.mark.parametrize("bf16", [True])
def test_trainer(tmp_path: Path, path: Path, bf16: bool) -> None:
    pytest.importorskip("transformers")
    from trainer_runs import Tokens, model
    from transformers import Trainer, TrainingArguments

    def train(name: str, steps: int, resume: Path | None = None) -> list[bytes]:
        trained = model().to(torch.bfloat16 if bf16 else torch.float32)
        args = TrainingArguments(
            output_dir=tmp_path / name,
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        config = {**SETTINGS, "paths": [path]}
        with AllLarge(trained.named_parameters(), lr=1e-2, offload=config) as ours:
            trainer = Trainer(model=trained, args=args, train_dataset=Tokens(), optimizers=(ours, None))
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return bits(trained)

    whole = train("whole", 6)
    file = tmp_path / "whole" / "checkpoint-4" / "optimizer.pt"
    entry = torch.load(file)["state"][0]
    assert ("master" in entry) == bf16
    assert train("again", 6, tmp_path / "whole" / "checkpoint-4") == whole
