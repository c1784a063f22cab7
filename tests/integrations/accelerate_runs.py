"""Trains a small model with Accelerate; run as a program by `test_accelerate.py`.

    python accelerate_runs.py FOLDER STEPS [resume] [kill=N] [kill_saving=N] [kept=N] [limit=N] [overlap=...]
        [mirror=DIR]

Values are JSON. Saves every second step. Prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import dying
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import offload
from offload.integrations.accelerate import enable
from offload.optim import folders

SETTINGS = {"host_memory": 0, "subgroup_numel": 4096, "staging_memory": "256KiB", "threads": 1}


def main(folder: str, steps: int, *rest: str) -> None:
    options = {name: json.loads(value) for name, _, value in (each.partition("=") for each in rest) if value}
    naming = {"automatic_checkpoint_naming": True, "total_limit": options.get("limit")}
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(folder, **naming))
    end, killed = folders.mark_whole, f"_{options.get('kill_saving')}"
    folders.mark_whole = lambda at: os.kill(os.getpid(), signal.SIGKILL) if at.endswith(killed) else end(at)
    path = Path(folder) / "path"
    path.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1))
    config = {**SETTINGS, "paths": [path], "checkpoints_kept": options.get("kept")}
    config |= {"overlap": options.get("overlap", "off"), "mirror": options.get("mirror")}
    ours = offload.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, offload=config)
    schedule = torch.optim.lr_scheduler.ExponentialLR(ours, 0.9)
    model, optimizer, schedule = accelerator.prepare(model, ours, schedule)
    optimizer = enable(accelerator, optimizer, commit_on_sigterm=folder if dying.WISH else None)
    torch.manual_seed(accelerator.process_index)
    if "resume" in rest:
        accelerator.load_state()
        there = [int(path.name.partition("_")[2]) for path in Path(folder).glob("checkpoints/checkpoint_*")]
        accelerator.project_configuration.iteration = max(there) + 1
    losses, norms = [], []
    for step in range(int(optimizer.metrics()["step"]), steps):
        if step == options.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
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
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    kept = [Path(name).parent.name for name in optimizer.engine.checkpoints.kept]
    rate = optimizer.param_groups[0]["lr"]
    hidden_in = optimizer.plan.hidden_in
    found = {"losses": losses, "norms": norms, "weights": digest, "lr": rate, "kept": kept, "hidden_in": hidden_in}
    line = json.dumps(found)
    os.write(1, f"{line}\n".encode())  # at once: ranks share what they write to
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
