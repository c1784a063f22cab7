"""Trains a small model under FSDP2 in a loop of one's own, with torch.distributed.checkpoint; run in ranks.

    python dcp_runs.py FOLDER STEPS [resume=CHECKPOINT] [mirror=DIR]

Saves every second step and at a SIGTERM, and keeps two checkpoints. Prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import dying
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import offload

SETTINGS = {"host_memory": 0, "subgroup_numel": 1024, "staging_memory": "256KiB", "threads": 1}


def main(folder: Path, steps: int, options: dict[str, str]) -> None:
    dist.init_process_group("gloo")
    path = folder / "path"
    path.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    config = {**SETTINGS, "paths": [path], "mirror": options.get("mirror"), "checkpoints_kept": 2}
    optimizer = offload.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, offload=config)
    losses: list[float] = []

    def save() -> None:
        target = folder / "steps" / f"step-{int(optimizer.metrics()['step'])}"
        if not target.exists():
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
    if "resume" in options:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=options["resume"])
        model.load_state_dict(state["model"])
        optimizer.load_checkpoint(Path(options["resume"]) / "optimizer")
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
    digest = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(local.detach().numpy().tobytes())
    optimizer.close()
    line = json.dumps({"losses": losses, "weights": digest.hexdigest()})
    os.write(1, f"{line}\n".encode())  # at once: ranks share what they write to
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), dict(option.split("=", 1) for option in sys.argv[3:]))
