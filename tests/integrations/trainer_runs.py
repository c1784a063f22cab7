"""Trains a small model in Hugging Face's `Trainer`; run as a program by `test_transformers.py`.

    python trainer_runs.py FOLDER OPTIM STEPS [resume[=FOLDER]] [kill=N] [stop=N] [overlap=...] [activations=SIZE]
        [term=N] [kill_saving=N] [mirror=DIR] [key=value of TrainingArguments ...]

OPTIM is an argument of that name, or "wrap": the Trainer is given a wrapped class of torch's.

Prints one line of JSON: losses, gradient norms and a digest of the weights.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import dying
import torch
from small import SETTINGS, die, digest, end_rank, options, say
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import offload
import offload.integrations.transformers as offload_transformers
from offload.optim import folders


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same for everybody."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Kill(TrainerCallback):
    """Kills the process when a step has ended, as an operator or a machine might; or ends training there; or sends
    the last rank a SIGTERM as a step begins."""

    def __init__(self, kill: int, stop: int, term: int) -> None:
        self.kill, self.stop, self.term = kill, stop, term

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        dying.step(state.global_step)
        if state.global_step == self.term - 1 and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if state.global_step == self.kill:
            die()
        control.should_training_stop |= state.global_step == self.stop


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))


def main(folder: str, optim: str, steps: int, *rest: str) -> None:
    told = options(rest)
    resume, mirror, activations = (told.pop(name, None) for name in ("resume", "mirror", "activations"))
    kill, stop, term, killed = (told.pop(name, 0) for name in ("kill", "stop", "term", "kill_saving"))
    path = Path(folder) / "path"
    path.mkdir(exist_ok=True)
    config = {**SETTINGS, "paths": [path], "overlap": told.pop("overlap", "off"), "mirror": mirror}
    hears = term > 0 or bool(dying.WISH)
    offload_transformers.enable(config, activation_memory=activations, commit_on_sigterm=hears)
    end = folders.mark_whole
    folders.mark_whole = lambda at: die() if at.endswith(f"-{killed}") else end(at)
    args = TrainingArguments(
        output_dir=folder,
        optim="adamw_torch" if optim == "wrap" else optim,
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
        **told,
    )
    trained = model()
    callbacks = [Kill(kill, stop, term)] if kill or stop or hears else None
    data: dict[str, Any] = {"train_dataset": Tokens(), "eval_dataset": Tokens()}
    if optim == "wrap":
        kept = {**config, "checkpoints_kept": 3}
        given = offload.wrap(torch.optim.NAdam, trained.named_parameters(), lr=1e-2, offload=kept)
        data["optimizers"] = (given, None)
    trainer = Trainer(model=trained, args=args, callbacks=callbacks, **data)
    trainer.train(resume_from_checkpoint=resume)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if mirror:
        optimizer.wait_mirror()
        dying.end(optimizer.metrics())
    say(
        losses=[entry["loss"] for entry in history],
        norms=[entry["grad_norm"] for entry in history],
        weights=digest(trained.parameters()),
        optimizer=f"{type(optimizer).__module__}.{type(optimizer).__name__}",
        rank=trainer.args.process_index,
        evaluated=[entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        hidden_in=str(getattr(getattr(optimizer, "plan", None), "hidden_in", "")),
    )
    end_rank()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
