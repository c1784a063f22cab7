"""A program: what checkpoints take of host memory, by phase, as JSON; `test_checkpoint_memory.py` judges it.

A process of its own, because what earlier sessions of a process have left to the allocator would hide what this one
takes. A small session goes first, so that code and threads that stay are there.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import offload
from offload.checkpoint.exchange import export_safetensors

WEIGHTS = 32
NUMEL = 8 << 20
SUBGROUP_NUMEL = 2 << 20


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def used_bytes(which: str) -> int:
    """Return "VmRSS" or "VmHWM" but for pages of files: libraries, of which more and more is in use."""
    return status_bytes(which) - status_bytes("RssFile")


class Run:
    """One session, and what each phase of it took beyond what the process had before."""

    def __init__(self, folder: Path, numel: int, dtype: torch.dtype, settings: dict[str, Any]) -> None:
        # Gradients of a weight each are small before they are where the session has them.
        drawn = [torch.full((numel // WEIGHTS,), 0.5, dtype=dtype, device="cpu") for _ in range(WEIGHTS)]
        self.weights = [torch.nn.Parameter(values) for values in drawn]
        gc.collect()
        self.base_bytes = used_bytes("VmRSS")
        path = tempfile.mkdtemp(dir=folder)
        self.optimizer = offload.AdamW(self.weights, offload={"paths": [path], **settings})
        plan = self.optimizer.plan.plan
        self.found: dict[str, Any] = {"plan": plan.host_bytes, "buffers": plan.checkpoint_buffer_bytes, "phases": {}}

    def phase(self, name: str, work: Callable[[], Any]) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        work()
        peak, now = used_bytes("VmHWM") - self.base_bytes, used_bytes("VmRSS") - self.base_bytes
        self.found["phases"][name] = {"peak": peak, "after": now}

    def step(self) -> None:
        for weight in self.weights:
            torch.autograd.backward(weight, torch.ones_like(weight))
        self.optimizer.step()

    def save(self, folder: Path, *, copy: bool = False) -> None:
        self.optimizer.save_checkpoint(folder, copy=copy)
        self.optimizer.wait_checkpoint()


def measure(folder: Path, numel: int, dtype: torch.dtype, settings: dict[str, Any]) -> dict[str, Any]:
    place, copied, file = (Path(tempfile.mkdtemp(dir=folder)) for _ in range(3))
    run = Run(folder, numel, dtype, {"subgroup_numel": SUBGROUP_NUMEL, **settings})
    with run.optimizer:
        run.phase("steps", lambda: [run.step() for _ in range(2)])
        run.phase("save", lambda: run.save(place))
        run.phase("load", lambda: run.optimizer.load_checkpoint(place))
        run.phase("step after a load", run.step)
        run.phase("save a copy", lambda: run.save(copied, copy=True))
        run.phase("load a copy", lambda: run.optimizer.load_checkpoint(copied))
        run.phase("step after a copy", run.step)
        export_safetensors(copied, file / "state.safetensors")
        run.phase("import", lambda: run.optimizer.import_state(file / "state.safetensors"))
        run.phase("step after an import", run.step)
    found = {"same": run.found}
    del run
    # Other subgroups: nothing of the checkpoint's layout fits this session's buffers.
    run = Run(folder, numel, dtype, {"subgroup_numel": SUBGROUP_NUMEL // 32, **settings})
    with run.optimizer:
        run.phase("load other subgroups", lambda: run.optimizer.load_checkpoint(copied))
        run.phase("step", run.step)
    return {**found, "other": run.found}


def main() -> None:
    folder, dtype, settings = Path(sys.argv[1]), getattr(torch, sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(2)
    measure(folder, SUBGROUP_NUMEL // 16, dtype, settings)
    print(json.dumps(measure(folder, NUMEL, dtype, settings)))


if __name__ == "__main__":
    main()
