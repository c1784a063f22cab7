"""Trains a small model under FSDP2 in a loop of one's own, with torch.distributed.checkpoint; run in ranks.

    python dcp_runs.py FOLDER STEPS [resume=CHECKPOINT] [mirror=DIR]

Saves every second step and at a SIGTERM, and keeps two checkpoints. Prints one line of JSON.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import dying
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small import SETTINGS, digest, options, say
from torch.distributed.fsdp import fully_shard

import offload
from offload.checkpoint.marker import Mark, mark_of


def main(folder: Path, steps: int, told: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    path = folder / "path"
    path.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    config = {**SETTINGS, "subgroup_numel": 1024, "paths": [path], "checkpoints_kept": 2}
    config["mirror"] = told.get("mirror")
    optimizer = offload.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, offload=config)
    losses: list[float] = []

    def save() -> None:
        target = folder / "steps" / f"step-{int(optimizer.metrics()['step'])}"
        if mark_of(str(target)) is not Mark.WHOLE:  # a killed run may have left one
            dist.barrier()
            with optimizer.checkpoint_folder(target):
                dcp.save({"model": model.state_dict()}, checkpoint_id=target)
                optimizer.save_checkpoint(target / "optimizer")
            delete_old(target)

    def delete_old(newest: Path) -> None:
        old = sorted(newest.parent.glob("step-*"), key=lambda path: int(path.name[5:]))[:-2]
        dist.barrier()
        if dist.get_rank() == 0:
            for each in old:
                shutil.rmtree(each)

    optimizer.commit_on_sigterm(save)
    if "resume" in told:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=told["resume"])
        model.load_state_dict(state["model"])
        optimizer.load_checkpoint(Path(told["resume"]) / "optimizer")
    for step in range(int(optimizer.metrics()["step"]), steps):
        dying.step(step)
        draws = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, 32, generator=draws)).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 2 == 1:
            save()
    optimizer.finish()
    if config["mirror"]:
        optimizer.wait_mirror()
        dying.end(optimizer.metrics())
    optimizer.close()
    say(losses=losses, weights=digest(model.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), options(sys.argv[3:]))
