"""What benchmarks share: the environment, what they have found so far, and memory."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import offload
from offload.measure.products import SETTING, choose_compute, computing_in

ROOT = Path(__file__).resolve().parent.parent

# A script's folder comes first where modules are looked for, and `deepspeed` is not the script of that name.
sys.path.sort(key=lambda folder: folder == str(ROOT / "bench"))
HUGE_PAGE_BYTES = 2 << 20


def cores() -> int:
    """Return the CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(*, device: str | None = None) -> dict[str, Any]:
    """Return where this runs: hardware, versions, commit, command, and how busy the machine already is.

    Args:
        device: Where a model is trained, if one is: the dtype that its products are computed in is chosen, said, and
            the same in all processes that are started from now on (see `computing`).
    """
    compute = None
    if device is not None:
        chosen = choose_compute(device=device)
        print(chosen, flush=True)
        compute = chosen.name
        os.environ[SETTING] = compute

    def git(*arguments: str) -> str:
        if not (ROOT / ".git").exists():  # a copy, perhaps inside another repository
            return ""
        try:
            done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip()

    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"compute": compute} if compute else {}),
        "numpy": np.__version__,
        "offload": getattr(offload, "__version__", None),
        # `bench/gpu/once.sh` knows of a copy what it was copied from.
        "commit": git("rev-parse", "HEAD") or os.environ.get("OFFLOAD_COMMIT") or None,
        "uncommitted_changes": bool(
            # Reports that are written again are no change of what is measured.
            git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/reports")
            or os.environ.get("OFFLOAD_CHANGED")
        ),
        "command": shlex.join(["python", *map(_without_place, sys.argv)]),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def computing() -> AbstractContextManager[Any]:
    """Return the context that every contender's forward and backward run in."""
    return computing_in(choose_compute(device="cpu").dtype)


def _without_place(argument: str) -> str:
    """Return an argument; a path outside of the repository by its name alone, as where it lies is this machine's."""
    inside = argument.removeprefix(f"{ROOT}/")
    return Path(inside).name if inside.startswith("/") else inside


def progress(message: str) -> None:
    """Say something on a terminal, nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{message}", end="", file=sys.stderr, flush=True)


class Kept:
    """What the parts of a benchmark have found, kept in a file from where a run that was stopped goes on.

    Args:
        file: A line of JSON for each part; None to keep nothing.
        of: What has to be the same for what is there to count: the commit, and sizes.
    """

    def __init__(self, file: Path | None, *of: Any) -> None:
        self._file, self._of = file, json.loads(json.dumps(of, default=str))
        lines = file.read_text().splitlines() if file and file.exists() else []
        self._found = {part: found for of_then, part, found in map(json.loads, lines) if of_then == self._of}

    def has(self, part: str) -> bool:
        """Return whether it is known what a part has found."""
        return part in self._found

    def find(self, part: str, make: Callable[[], Any]) -> Any:
        """Return what a part has found, as JSON knows it: what is kept, else what `make` returns."""
        if part not in self._found:
            line = json.dumps([self._of, part, make()])
            if self._file:
                with self._file.open("a") as file:
                    print(line, file=file)
            self._found[part] = json.loads(line)[2]
        return self._found[part]


def memory() -> dict[str, int]:
    """Return this process's resident bytes.

    The most ever and now, mapped files included; of those now what is its own and what is of files; what is pinned.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    held = {words[0].rstrip(":"): int(words[1]) << 10 for words in map(str.split, lines) if words[-1] == "kB"}
    return {
        "peak_bytes": held["VmHWM"],
        "resident_bytes": held["VmRSS"],
        "own_bytes": held["RssAnon"] + held["RssShmem"],
        "file_bytes": held["RssFile"],
        "pinned_bytes": held.get("VmPin", 0) + held.get("VmLck", 0),
    }


def kernel_io() -> dict[str, int]:
    """Return what the kernel says that this process has read and written on devices."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {
        name: int(value)
        for name, value in (line.split(": ") for line in lines)
        if name in ("read_bytes", "write_bytes")
    }


def moved(before: dict[str, int]) -> dict[str, int]:
    """Return the bytes that this process has read and written on devices since `kernel_io` returned `before`."""
    return {name: count - before[name] for name, count in kernel_io().items()}


def huge_tensors(*sizes: tuple[int, torch.dtype]) -> list[torch.Tensor]:
    """Return tensors in one mapping of huge pages, each on a 4 KiB page, the n-th 68 KiB * n further on.

    Without the stagger, tensors whose distance is a multiple of a large power of two would compete for the
    same places in the first-level cache, and all contenders would measure that.
    """
    stagger_bytes = 68 << 10
    starts, end = [], 0
    for index, (numel, dtype) in enumerate(sizes):
        start = -(-end // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + index * stagger_bytes
        starts.append(start)
        end = start + numel * dtype.itemsize
    memory = mmap.mmap(-1, end + 2 * HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    base = -address % HUGE_PAGE_BYTES
    return [
        torch.frombuffer(memory, dtype=dtype, count=numel, offset=base + start)
        for (numel, dtype), start in zip(sizes, starts, strict=True)
    ]


def end_with_parent() -> None:
    """Let a child process be killed when this one ends, however that is. Runs between fork and exec; Linux."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
