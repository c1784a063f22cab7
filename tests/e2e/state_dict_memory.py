"""A program: what state dicts take of this process's own memory, by phase, as JSON.

    python tests/e2e/state_dict_memory.py FOLDER DTYPE NUMEL

`test_state_dicts.py` judges it; with 100000000 elements it measures what the docs say. Pages of files do not count:
they are the kernel's to write and drop. VmHWM has them, and its peak may be theirs, so a thread looks at RssAnon: a
peak that it misses makes a phase seem to take less, never more.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from checkpoint_memory import status_bytes
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import offload

WEIGHTS = 16
LOOK_S = 0.002


def own_bytes() -> int:
    return status_bytes("RssAnon") + status_bytes("RssShmem")


class Model(torch.nn.Module):
    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        drawn = [torch.full((numel // WEIGHTS // 64, 64), 0.5, dtype=dtype, device="cpu") for _ in range(WEIGHTS)]
        self.weights = torch.nn.ParameterList(drawn)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for weight in self.weights:
            torch.autograd.backward(weight, torch.ones_like(weight))
        optimizer.step()
        optimizer.zero_grad()


def peak_of(work: Callable[[], Any]) -> int:
    """Return the most that this process had of its own while it did some work."""
    seen, done = [own_bytes()], threading.Event()

    def look() -> None:
        while not done.wait(LOOK_S):
            seen.append(own_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
        seen.append(own_bytes())
    finally:
        done.set()
        thread.join()
    gc.collect()
    return max(seen)


def measure(folder: Path, dtype: torch.dtype, numel: int) -> dict[str, Any]:
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "path").mkdir()
    file, distributed = place / "optimizer.pt", place / "distributed"
    model = Model(numel, dtype)
    settings = {"paths": [place / "path"], "host_memory": 0, "staging_memory": "50MiB", "subgroup_numel": 1 << 20}
    found: dict[str, Any] = {}
    with offload.AdamW(model.named_parameters(), offload=settings) as optimizer:

        def save_distributed() -> None:
            dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=distributed)

        def load_distributed() -> None:
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=distributed)
            set_optimizer_state_dict(model, optimizer, state["optimizer"])

        phases: dict[str, Callable[[], Any]] = {
            "training": lambda: [model.step(optimizer) for _ in range(3)],
            "torch.save": lambda: torch.save(optimizer.state_dict(), file),
            "torch.load": lambda: optimizer.load_state_dict(torch.load(file, mmap=True)),
            "dcp.save": save_distributed,
            "dcp.load": load_distributed,
            "training again": lambda: [model.step(optimizer) for _ in range(2)],
        }
        for name, work in phases.items():
            found[name] = peak_of(work)
        found["state"] = sum(t.nbytes for e in optimizer.state_dict()["state"].values() for t in e.values())
    return found


def main() -> None:
    folder, dtype, numel = Path(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.set_num_threads(2)
    measure(folder, dtype, 1 << 16)  # code and threads that stay are there from then on
    print(json.dumps(measure(folder, dtype, numel)))


if __name__ == "__main__":
    main()
