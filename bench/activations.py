"""Saved tensors on the paths: how much more fits, and what an iteration takes.

A Llama with a byte vocabulary, fp32, trains on the CPU; all of its optimizer state lies on a path.

*Room.* The largest batch times length within a given amount of memory: with saved tensors in memory, on the path,
with recomputation, and with both. Each is tried in a process of its own, by two iterations; its peak (VmHWM) at
two sizes gives bytes a token and those of the process, hence the largest size; an iteration at 0.97 of that has to
stay within the limit. The buffers of activations count, and so does everything else. What leaves has to find room on
the disk, too, or it stays in memory: where the disk is smaller, it says the largest size.

*Time.* In one process, in turns, at equal tokens: an iteration with saved tensors in memory, on the path, packed by
torch's `save_on_cpu` (which moves nothing on the CPU) and by `torch.save` to a file each. The bound is
max(F, W / w) + max(B, R / r): the seconds of forward and backward with tensors in memory, the bytes that left and
that came back, and the path's rates. Gradients are compared bit for bit.
"""

from __future__ import annotations

import shutil
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from _common import memory, progress
from _harness import Option, Run, in_process, main, medians, show
from _llama import Model
from _worker import loss_of
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import offload
from offload.cli.model import VOCABULARY, Shape
from offload.config import parse_bytes

KINDS = ("memory", "paths", "recompute", "both")
AGAIN = 16
"""With recomputation so many times as many rows are tried: few inputs of layers would all fit the buffers."""

LENGTH = 512
"""Tokens of a row: attention's own memory grows with its square, and is the same for all."""

OPTIONS = (
    Option("limit", "6GiB", "1GiB", "memory of a process"),
    Option("buffers", "256MiB", "2MiB", "host_memory of activations"),
    Option("layers", 24, 3),
    Option("hidden", 256, 64),
    Option("vocabulary", VOCABULARY),
    Option("length", LENGTH, 64),
    Option("rows", [2, 4], [8, 16], "of the two trials", more={"nargs": 2}),
    Option("time_rows", 2, 16),
    Option("pairs", 15, 1),
)


class Training:
    """One model, and its optimizer with all state on a path."""

    def __init__(self, shape: Shape, folder: Path, recomputes: bool, vocabulary: int, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.model = Model(shape, recomputes, vocabulary)
        folder.mkdir(exist_ok=True)
        config = offload.OffloadConfig(host_memory=0, paths=[folder], checkpoints_kept=0)
        self.optimizer = offload.AdamW(self.model.named_parameters(), lr=1e-4, offload=config)
        self.vocabulary = vocabulary

    def on_paths(self, host_memory: str) -> AbstractContextManager[Any]:
        return self.optimizer.activations_on_paths(self.model, host_memory, least_bytes="64KiB")

    def iteration(self, rows: int, length: int, context: AbstractContextManager[Any]) -> dict[str, float]:
        """Return seconds of forward and backward, and a digest of the gradients."""
        tokens = torch.randint(self.vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
        started_s = time.perf_counter()
        with context:
            loss = loss_of(self.model(tokens)[:, :-1], tokens)
            forward_s = time.perf_counter() - started_s
            loss.backward()
            whole_s = time.perf_counter() - started_s
        digest = 0
        for parameter in self.model.parameters():
            digest = zlib.crc32(parameter.grad.numpy(), digest)
        self.optimizer.zero_grad()
        found = {"forward_s": forward_s, "backward_s": whole_s - forward_s, "whole_s": whole_s, "digest": digest}
        figures = self.optimizer.metrics()
        return found | {key.partition("/")[2]: n for key, n in figures.items() if key.startswith("activations/")}


# Room


def trial(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Take some iterations at each size in this process; return the peaks of memory."""
    kind, shape = request["kind"], Shape(request["layers"], request["hidden"])
    training = Training(
        shape, Path(request["folder"]), kind in ("recompute", "both"), request["vocabulary"], request["threads"]
    )
    found = []
    for rows in request["rows"]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        for _ in range(request["iterations"]):
            context = training.on_paths(request["host_memory"]) if kind in ("paths", "both") else nullcontext()
            turn = training.iteration(rows, request["length"], context)
        took = {key: turn[key] for key in ("digest", "whole_s")}
        left_bytes = turn.get("written_bytes", 0.0)
        found.append({"peak_bytes": memory()["peak_bytes"], **took, "left_bytes": left_bytes})
    training.optimizer.close()
    return found


def tried(args: Any, kind: str, rows: Sequence[int], folder: Path, iterations: int = 2) -> list[dict[str, Any]]:
    """Return what trials in a process of their own have found, in order of size."""
    request = {"kind": kind, "rows": [*rows], "length": args.length, "layers": args.layers, "hidden": args.hidden}
    request |= {"folder": str(folder), "host_memory": args.buffers, "vocabulary": args.vocabulary}
    request |= {"threads": torch.get_num_threads(), "iterations": iterations}
    # Freed memory goes back at once: its peak is then what was in use.
    return list(in_process(__file__, request, MALLOC_TRIM_THRESHOLD_="0", MALLOC_MMAP_THRESHOLD_="65536"))


def largest(args: Any, kind: str, folder: Path) -> dict[str, Any]:
    """Return the most rows within the limit, by two trials, and the peak of a trial near it."""
    again = AGAIN if kind in ("recompute", "both") and not args.smoke else 1
    limit, (few, more) = parse_bytes("limit", args.limit), (again * rows for rows in args.rows)
    progress(kind)
    low, high = tried(args, kind, (few, more), folder)
    row_bytes = max(1.0, (high["peak_bytes"] - low["peak_bytes"]) / (more - few))
    process_bytes = low["peak_bytes"] - few * row_bytes
    rows = by_memory = int((limit - process_bytes) / row_bytes)
    left_bytes = (high["left_bytes"] - low["left_bytes"]) / (more - few)
    if left_bytes > 0:
        rows = min(rows, int(0.9 * shutil.disk_usage(folder).free / left_bytes))
    found = {"row_bytes": row_bytes, "process_bytes": process_bytes, "tokens": rows * args.length}
    found["length"] = args.length
    found |= {"left_row_bytes": left_bytes, "memory_tokens": by_memory * args.length}
    if not args.smoke and rows * 0.97 >= 1:
        (near,) = tried(args, kind, [int(rows * 0.97)], folder, 1)
        found |= {
            "near_rows": int(rows * 0.97),
            "near_peak_bytes": near["peak_bytes"],
            "within": near["peak_bytes"] <= limit,
        }
    return found


# Time


def by_files(folder: Path) -> saved_tensors_hooks:
    """Return hooks that write each saved tensor to a file of its own, and read it."""
    numbers: Iterator[int] = iter(range(1 << 60))

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.nbytes < 1 << 16 or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        file = folder / f"{next(numbers)}.pt"
        torch.save(tensor.detach(), file)
        return file

    def unpack(packed: Any) -> torch.Tensor:
        return torch.load(packed) if isinstance(packed, Path) else packed

    return saved_tensors_hooks(pack, unpack)


def times(args: Any, folder: Path) -> dict[str, Any]:
    """Return medians of iterations, by contender, taken in turns."""
    shape, threads = Shape(args.layers, args.hidden), torch.get_num_threads()
    training = Training(shape, folder / "time", False, args.vocabulary, threads)
    files = folder / "files"
    files.mkdir()
    contenders: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "memory": nullcontext,
        "paths": lambda: training.on_paths(args.buffers),
        "save_on_cpu": save_on_cpu,
        "torch.save": lambda: by_files(files),
    }
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for number in range(args.pairs + 1):
        for name, context in contenders.items():
            progress(f"{name} {number}")
            turns[name].append(training.iteration(args.time_rows, args.length, context()))
            for file in files.iterdir():
                file.unlink()
    found: dict[str, Any] = {name: medians(each[1:]) for name, each in turns.items()}
    rates = training.optimizer.engine.rates.paths
    write, read = sum(path.write.alone for path in rates), sum(path.read.alone for path in rates)
    bounds = []
    for kept, paths in zip(turns["memory"][1:], turns["paths"][1:], strict=True):
        left_s, back_s = paths["written_bytes"] / write, paths["read_bytes"] / read
        bound_s = max(kept["forward_s"], left_s) + max(kept["backward_s"], back_s)
        bounds.append(paths["whole_s"] / bound_s)
    found["over_bound"] = statistics.median(bounds)
    found["same"] = len({turn["digest"] for each in turns.values() for turn in each}) == 1
    training.optimizer.close()
    return found


def measure(run: Run) -> None:
    run.results["time"] = timed = times(run.args, run.folder)
    run.results["room"] = room = {kind: largest(run.args, kind, run.folder / kind) for kind in KINDS}
    for kind, row in room.items():
        show(kind, row, "tokens", "memory_tokens", "row_bytes")
    for name in ("memory", "paths", "save_on_cpu", "torch.save"):
        show(name, timed[name], "forward_s", "whole_s")
    tokens = {kind: max(1, row["tokens"]) for kind, row in room.items()}
    run.at_least("tokens on the path over those in memory", tokens["paths"] / tokens["memory"], 6.0)
    run.at_least("tokens with both over recomputation alone", tokens["both"] / tokens["recompute"], 1.5)
    run.at_most("iteration over its bound", timed["over_bound"], 1.10)
    run.at_least("times as fast as torch.save", timed["torch.save"]["whole_s"] / timed["paths"]["whole_s"], 1.0)
    run.at_least("gradients of all, bit for bit", float(timed["same"]), 1.0)
    run.checksums.append(f"{int(timed['memory']['digest']):08x}")


if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True, device="cpu", child=trial)
