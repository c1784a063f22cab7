"""One rank on one of two hosts; see `test_hosts.py`.

    python hosts_run.py KIND FOLDER STEPS network=NAME host=LETTER [load=FOLDER] [save=FOLDER] [mirror=FOLDER] [waits]

Writes what became of it to FOLDER/said-<rank>.json: "digest" of weights and state, and "error" of the load. With
`waits` it saves and trains until somebody kills it, once it has written FOLDER/saving-<rank>.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x0002_0000, 0x0400_0000, 0x4000_0000


def move(network: str, letter: str, place: Path) -> None:
    """Be on a host from now on: on its network, with its disk as `place/disk`, under its name.

    This process has one thread, which is what moves.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network}") as file:
        for done in (libc.setns(file.fileno(), CLONE_NEWNET), libc.unshare(CLONE_NEWNS | CLONE_NEWUTS)):
            if done:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for words in (["--make-rprivate", "/"], ["--bind", str(place / f"disk-{letter}"), str(place / "disk")]):
        subprocess.run(["mount", *words], check=True)
    socket.sethostname(f"host-{letter}")


def own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Training:
    """A model, on all ranks, of which each has a part of the state on a disk of its host."""

    def __init__(self, kind: str, disk: Path, options: dict[str, str]) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).bfloat16()
        settings: dict[str, Any] = {"host_memory": 0, "paths": [str(disk)], "subgroup_numel": 1024, "threads": 1}
        settings["checkpoints_kept"] = 2
        if "mirror" in options:
            settings["mirror"] = options["mirror"]
        self.kind, self.bare = kind, model
        if kind == "deepspeed":
            import offload.integrations.deepspeed as offload_deepspeed

            config = {
                "train_micro_batch_size_per_gpu": 4,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                "multi_tier_offload": {**settings, "checkpoint": {"layout": "in_place", "wait": False}},
            }
            self.engine, *_ = offload_deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
            return
        if kind == "fsdp2":
            self.model: Any = fully_shard(model)
        else:
            self.model = DistributedDataParallel(model)
            settings["shard"] = True
        offloading = offload.OffloadConfig(**settings)
        self.optimizer = offload.AdamW(self.model.named_parameters(), lr=1e-2, offload=offloading)

    def step(self, number: int) -> None:
        torch.manual_seed(number)  # the same on all ranks: sums of equal gradients do not depend on their order
        rows = torch.randn(4, 64).bfloat16()
        if self.kind == "deepspeed":
            self.engine.backward(self.engine(rows).float().square().mean())
            self.engine.step()
        else:
            self.model(rows).float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self, folder: str, steps: int) -> None:
        if self.kind == "deepspeed":
            self.engine.save_checkpoint(folder, tag="tag", client_state={"steps": steps})
        else:
            self.optimizer.save_checkpoint(folder, extra={"steps": steps})

    def wait(self) -> None:
        (self.engine.optimizer if self.kind == "deepspeed" else self.optimizer).wait_checkpoint()

    def load(self, folder: str) -> int:
        if self.kind == "deepspeed":
            return int(self.engine.load_checkpoint(folder)[1]["steps"])
        return int(self.optimizer.load_checkpoint(folder)["steps"])

    def digest(self) -> str:
        found = hashlib.sha256()
        if self.kind == "deepspeed":
            shard = self.engine.optimizer.shard
            tensors = [*shard.weights, *(t for state in shard.export() for t in state.tensors.values())]
        else:
            tensors = []
            for parameter in self.model.parameters():
                tensors += [parameter, *self.optimizer.state_for(parameter).values()]
        for tensor in tensors:
            found.update(own(tensor.detach()).float().numpy().tobytes())
        return found.hexdigest()

    def close(self) -> None:
        if self.kind == "deepspeed":
            self.engine.destroy()
        else:
            self.optimizer.close()


def main() -> None:
    kind, folder, steps, *words = sys.argv[1:]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    rank, world, place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(folder)
    move(options["network"], options["host"], place)
    if kind == "deepspeed":
        import deepspeed

        deepspeed.init_distributed(
            "gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=world, verbose=False
        )
    else:
        dist.init_process_group("gloo", os.environ["RENDEZVOUS"], rank=rank, world_size=world)
    said: dict[str, Any] = {}
    training = Training(kind, place / "disk", options)
    first = 0
    try:
        if "load" in options:
            first = training.load(options["load"])
    except offload.OffloadError as error:
        said["error"] = str(error)
    else:
        for number in range(first, int(steps)):
            training.step(number)
        said |= {"first": first, "digest": training.digest()}
        if "save" in options:
            training.save(options["save"], int(steps))
            training.wait()
            if "mirror" in options:
                training.optimizer.wait_mirror()
        number = int(steps)
        while "waits" in words:
            training.step(number)
            number += 1
            training.save(options["save"] + "-later", number)
            (place / f"saving-{rank}").touch()
    (place / f"said-{rank}.json").write_text(json.dumps(said))
    training.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
