"""One state of the product at work: `python _beside.py FOLDER NAME SCALE DISK`, for `beside.py`.

For each line on standard input it answers with the seconds of a round; when there are no more, with its peak memory
and a digest of what it computed. It asks only for what all states that are compared have, and takes the package from
FOLDER, whatever is installed.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

folder, name, scale, disk = sys.argv[1:]
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, folder)

import offload  # noqa: E402
from offload.kernels import CpuUpdateKernel  # noqa: E402
from offload.kernels.reference import SegmentTensors, scalars, segment_table  # noqa: E402
from offload.protocols import SegmentFlag  # noqa: E402

LAYERS, WIDTH, ROWS = (2, 128, 4) if scale == "smoke" else (24, 1280, 64)
TIMES = 1 if scale == "smoke" else 3


class Layer(torch.nn.Module):
    """A layer whose weights are 16-bit and whose products are not, as processors without bf16 take ages for those."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16) / WIDTH**0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, self.weight.float()).tanh()


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]


def answer(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def rounds(work: Callable[[], float], rest: Callable[[], object] = lambda: None) -> None:
    """For each line of input, answer with the median seconds of some calls after one that does not count.

    Args:
        work: Returns the seconds that count.
        rest: Waits for what is under way, as it is another's turn.
    """
    for _ in sys.stdin:
        seconds = [work() for _ in range(1 + TIMES)][1:]
        rest()
        answer(seconds=statistics.median(seconds))


def kernel() -> str:
    """Update in memory, bf16 gradient in and bf16 weight out."""
    numel = LAYERS * WIDTH * WIDTH
    generator = torch.Generator().manual_seed(0)
    master = torch.zeros(numel).normal_(0.0, 0.02, generator=generator)
    gradient = torch.zeros(numel).normal_(0.0, 0.01, generator=generator).bfloat16()
    weight = master.bfloat16()
    values = scalars(3, decoupled=True, grad_scale=0.37, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    flags = SegmentFlag.ACTIVE | SegmentFlag.DECOUPLED_DECAY
    moments = [torch.zeros(numel), torch.zeros(numel)]
    table = segment_table([SegmentTensors(master, moments, gradient, weight, flags, values)])
    updates = CpuUpdateKernel(threads=torch.get_num_threads())

    def update() -> float:
        started_s = time.perf_counter()
        updates.run(table)
        return time.perf_counter() - started_s

    rounds(update)
    updates.close()
    return digest([weight])


def training(work: str) -> str:
    """A step alone, or an iteration: plain, with a checkpoint after each, or with its step hidden."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
    numel = sum(parameter.numel() for parameter in model.parameters())
    share = {"step": 0.0, "step in memory": 1.0, "overlap": 0.0}.get(work, 0.5)
    settings: dict[str, Any] = {"overlap": "backward"} if work == "overlap" else {}
    config = offload.OffloadConfig(host_memory=int(12 * numel * share), paths=[disk], **settings)
    rows = torch.randn(ROWS, WIDTH)
    with offload.AdamW(model.named_parameters(), lr=1e-4, offload=config) as optimizer:
        following = optimizer.overlap_forward(model) if work == "overlap" else None

        def iteration() -> float:
            began_s = time.perf_counter()
            model(rows).square().mean().backward()
            step_s = time.perf_counter()
            optimizer.clip_grad_norm_(1e9)
            optimizer.step()
            stepped_s = time.perf_counter()
            optimizer.zero_grad()
            if work == "checkpoint":
                optimizer.save_checkpoint(Path(disk) / "checkpoint")
            return stepped_s - step_s if work.startswith("step") else time.perf_counter() - began_s

        def rest() -> None:
            optimizer.finish()
            optimizer.wait_checkpoint()

        rounds(iteration, rest)
        if following is not None:
            following.remove()
        return digest(list(model.parameters()))


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


if not Path(offload.__file__).is_relative_to(folder):
    raise SystemExit(f"the package is of {offload.__file__}, not of {folder}")
checksum = kernel() if name == "kernel" else training(name)
answer(peak_bytes=peak_bytes(), checksum=checksum)
