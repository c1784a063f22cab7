"""Writes checkpoints, the stores that they lie in, and a file of rates, with whatever version of the package runs it.

    python tests/net/old_files.py FOLDER

This is how `files/*.tar.xz` were made: in a checkout of the commit that names each archive, with its native module
built, and this script's folder outside it. FOLDER should be /tmp/offload-net, which the files name.

What a version cannot do is left out, so the script only grows. Nothing here may import the rest of the net.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import socket
import sys
import tarfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import offload

STEPS = 3


def drawn(seed: int, shape: tuple[int, ...], period: int = 61) -> torch.Tensor:
    """Return multiples of 1/64 that repeat, so that archives stay small."""
    count = torch.Size(shape).numel()
    numbers = [((position % period) * 37 + seed * 101) % 255 - 127 for position in range(count)]
    return torch.tensor(numbers, dtype=torch.float32).reshape(shape) / 64


def model(kind: str) -> dict[str, torch.nn.Parameter]:
    """Return parameters by name: one that compact8 codes where `kind` says so, else all of them small."""
    shapes = {"matrix": (64, 64) if kind == "compact8" else (9, 8), "bias": (9,), "gain": (5,), "scalar": ()}
    dtypes = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)
    return {
        name: torch.nn.Parameter(drawn(number, shape).to(dtype))
        for number, ((name, shape), dtype) in enumerate(zip(shapes.items(), dtypes, strict=True))
    }


def optimizer_of(kind: str, parameters: dict[str, torch.nn.Parameter], **config: Any) -> Any:
    """Return an optimizer of a kind of state: a rule's, AdamW's in a format, or AdamW's."""
    if kind in ("compact16", "compact8"):
        config |= {"state_format": kind, "seed": 5}
    numel = 4096 if "state_format" in config else 1024
    settings = offload.OffloadConfig(subgroup_numel=numel, threads=1, **config)
    named = list(parameters.items())
    groups = [{"params": named[:2]}, *([{"params": named[2:], "weight_decay": 0.0}] if named[2:] else [])]
    if kind in ("Lion", "Adagrad", "SGD"):
        options = {"Lion": {"betas": (0.9, 0.99)}, "Adagrad": {"lr_decay": 0.1}, "SGD": {"momentum": 0.9}}[kind]
        return getattr(offload, kind)(groups, lr=2**-6, offload=settings, **options)
    return offload.AdamW(groups, lr=2**-6, betas=(0.9, 0.95), weight_decay=0.1, offload=settings)


def train(optimizer: Any, parameters: dict[str, torch.nn.Parameter], first: int, steps: int) -> None:
    """Take steps; one parameter has no gradient in the first."""
    for step in range(first, first + steps):
        for number, (name, parameter) in enumerate(parameters.items()):
            gradient = drawn(10 * step + number, tuple(parameter.shape)).to(parameter.dtype)
            parameter.grad = None if step == 1 and name == "gain" else gradient
        optimizer.step()
        optimizer.zero_grad()


def save(optimizer: Any, folder: Path, **options: Any) -> None:
    """Save and wait for the commit."""
    optimizer.save_checkpoint(folder, **options)
    optimizer.wait_checkpoint()


def write_checkpoints(kind: str, folder: Path) -> None:
    """Write a checkpoint whose tiles stay in their store, one that replaced another, and one that was released."""
    path = folder / "path"
    path.mkdir(parents=True, exist_ok=True)
    parameters = model(kind)
    with optimizer_of(kind, parameters, host_memory=0, paths=[path], checkpoints_kept=2) as optimizer:
        train(optimizer, parameters, 1, 1)
        save(optimizer, folder / "replaced")
        released = hasattr(optimizer, "release_checkpoint")
        if released:
            save(optimizer, folder / "released")
            optimizer.release_checkpoint(folder / "released")
        train(optimizer, parameters, 2, STEPS - 1)
        save(optimizer, folder / "replaced", extra={"position": STEPS, "loss": torch.tensor([0.5])})


def write_copy(kind: str, folder: Path) -> None:
    """Write a checkpoint that needs nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = model(kind)
    with optimizer_of(kind, parameters) as optimizer:
        train(optimizer, parameters, 1, STEPS)
        save(optimizer, folder / "copy", copy=True)


def write_of_a_rank(rank: int, folder: str) -> None:
    """Write one of two ranks' part of a checkpoint of columns of a weight, which are no single run of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    with torch.no_grad():
        parameter = torch.nn.Parameter(distribute_tensor(drawn(0, (9, 8)).bfloat16(), mesh, [Shard(1)]))
    with offload.AdamW(
        [("matrix", parameter)], lr=2**-6, offload=offload.OffloadConfig(threads=1, subgroup_numel=1024)
    ) as optimizer:
        for step in range(1, STEPS + 1):
            parameter.grad = distribute_tensor(drawn(10 * step, (9, 8)).bfloat16(), mesh, [Shard(1)])
            optimizer.step()
            optimizer.zero_grad()
        save(optimizer, Path(folder) / "ranks", copy=True)
    torch.distributed.destroy_process_group()


def write_ranks(folder: Path) -> None:
    """Write a checkpoint of two ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    mp.spawn(write_of_a_rank, (str(folder),), nprocs=2)
    (folder / "meeting").unlink(missing_ok=True)


NUMBERS = {
    "cpu_bytes_per_s": 3e10,
    "memory_bytes_per_s": 9e10,
    "compute_flops_per_s": 1e14,
    "reaction_s": 2e-5,
    "operation_s": 3e-6,
    "begin_s": 1e-4,
    "read_bytes_per_s": 4e9,
    "write_bytes_per_s": 2e9,
    "latency_s": 1e-4,
    "memory_cost": 1.5,
    "read_alone_bytes_per_s": 5e9,
    "write_alone_bytes_per_s": 3e9,
    "at_once": 2.0,
    "update_bytes_per_s": 9e11,
    "h2d_bytes_per_s": 2.5e10,
    "d2h_bytes_per_s": 2.4e10,
    "h2d_alone_bytes_per_s": 3e10,
    "d2h_alone_bytes_per_s": 2.8e10,
    "memory_bytes": 80_000_000_000,
    "call_s": 5e-6,
}


def write_rates(file: Path) -> None:
    """Write a file of rates that has all that this version knows."""
    plan, measure = importlib.import_module("offload.plan"), importlib.import_module("offload.measure")

    def filled(kind: Any, **parts: Any) -> Any:
        names = [field.name for field in dataclasses.fields(kind) if field.name in NUMBERS]
        return kind(**{name: NUMBERS[name] for name in names}, **parts)

    by_threads = {1: 1e10, 2: 1.8e10, 8: 3e10}
    cpu: dict[Any, Any] = by_threads
    rates_file = importlib.import_module("offload.measure.rates_file")
    if rates_file.FORMAT > 1:
        formats: Any = importlib.import_module("offload.protocols")
        formats = getattr(formats, "StateFormat", None) or importlib.import_module("offload.formats")
        cpu = {formats.EXACT: by_threads, formats.COMPACT16: {1: 8e9}, formats.COMPACT8: {1: 2e9, 8: 1.2e10}}
    path = {"path": "/data", "file_system": "ext4", "device": "00000000000000fe"}
    found = measure.RatesFile(
        rates=filled(plan.Rates, paths=(filled(plan.PathRates),), gpu=filled(plan.GpuRates)),
        cpu_bytes_per_s=cpu,
        machine={"cpu": "a CPU", "cores": 8, "memory_bytes": 1 << 36, "gpu": "1 x a GPU", "kernel": "6.1.0"},
        versions={"offload": "0.1.0", "torch": "2.13.0"},
        paths=(path,),
        measurements={"update": measure.Measurement(median=3e10, spread=0.02, runs=5, unit="B/s")},
        warnings=("paths were busy",),
        created="2026-01-31T12:00:00Z",
    )
    measure.save_rates(file, found)


def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an archive's entry without who made it and when."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def main(folder: Path) -> None:
    """Write all that this version can: a file of rates, and an archive of checkpoints."""
    folder.mkdir(parents=True)
    socket.gethostname = lambda: "host"  # which a store's record names
    write_rates(folder.with_name(f"{folder.name}-rates.json"))
    if not hasattr(offload.AdamW, "save_checkpoint"):
        return
    kinds = ["exact"]
    kinds += [kind for kind in ("Lion", "Adagrad", "SGD") if hasattr(offload, kind)]
    fields = {field.name for field in dataclasses.fields(offload.OffloadConfig)}
    kinds += ["compact16", "compact8"] if "state_format" in fields else []
    wanted = os.environ.get("KINDS", "").split() or kinds
    for kind in kinds:
        if kind not in wanted:
            continue
        try:
            optimizer_of(kind, model(kind)).close()
        except offload.ConfigError as error:
            print(f"{kind} is left out: {error}")
            continue
        write_checkpoints(kind, folder / kind)
        write_copy(kind, folder / kind)
    if "ranks" in os.environ.get("KINDS", "ranks"):
        try:
            write_ranks(folder / "ranks")
        except Exception as error:
            print(f"ranks are left out: {str(error).strip().splitlines()[-1]}")
            shutil.rmtree(folder / "ranks")
    with tarfile.open(folder.with_suffix(".tar.xz"), "w:xz", preset=9) as archive:
        for entry in sorted(folder.rglob("*")):
            archive.add(entry, entry.relative_to(folder), recursive=False, filter=plain)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
