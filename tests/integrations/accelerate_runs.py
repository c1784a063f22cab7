"""Trains a small model with Accelerate; run as a program by `test_accelerate.py`.

    python accelerate_runs.py FOLDER STEPS [resume] [kill=N] [kill_saving=N] [kept=N] [limit=N] [overlap=...]
        [mirror=DIR]

Saves every second step. Prints one line of JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

import dying
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from small import SETTINGS, die, digest, end_rank, options, say

import offload
from offload.integrations.accelerate import enable
from offload.optim import folders


def main(folder: str, steps: int, *rest: str) -> None:
    told = options(rest)
    naming = {"automatic_checkpoint_naming": True, "total_limit": told.get("limit")}
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(folder, **naming))
    end, killed = folders.mark_whole, f"_{told.get('kill_saving')}"
    folders.mark_whole = lambda at: die() if at.endswith(killed) else end(at)
    path = Path(folder) / "path"
    path.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1))
    config = {**SETTINGS, "paths": [path], "checkpoints_kept": told.get("kept")}
    config |= {"overlap": told.get("overlap", "off"), "mirror": told.get("mirror")}
    ours = offload.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, offload=config)
    schedule = torch.optim.lr_scheduler.ExponentialLR(ours, 0.9)
    model, optimizer, schedule = accelerator.prepare(model, ours, schedule)
    optimizer = enable(accelerator, optimizer, commit_on_sigterm=folder if dying.WISH else None)
    torch.manual_seed(accelerator.process_index)
    if "resume" in told:
        accelerator.load_state()
        there = [int(path.name.partition("_")[2]) for path in Path(folder).glob("checkpoints/checkpoint_*")]
        accelerator.project_configuration.iteration = max(there) + 1
    losses, norms = [], []
    for step in range(int(optimizer.metrics()["step"]), steps):
        if step == told.get("kill"):
            die()
        dying.step(step)
        loss = model(torch.randn(4, 32)).square().mean()
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 2 == 1:
            accelerator.save_state()
    optimizer.finish()
    if config["mirror"]:
        optimizer.wait_mirror()
        dying.end(optimizer.metrics())
    kept = [Path(name).parent.name for name in optimizer.engine.checkpoints.kept]
    seen = {"losses": losses, "norms": norms, "weights": digest(model.parameters()), "kept": kept}
    say(**seen, lr=optimizer.param_groups[0]["lr"], hidden_in=optimizer.plan.hidden_in)
    accelerator.end_training()
    end_rank()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
