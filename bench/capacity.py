"""The largest model that trains within a given amount of host memory and disk, found by search.

A trial is a process of its own that trains a Llama in bf16 for three steps of 16 tokens, gradients clipped, each
layer's activations computed again in backward. Its memory is limited by a control group where one can be made; the
kernel ends a process that needs more, and that is a "no". What else goes wrong is an error and ends the search. Files
that the kernel caches count towards a group's limit, but give way before a process is ended: they decide nothing.
Where no group can be made, a trial whose own peak (VmHWM, mapped files included) is beyond the limit is a "no".

Two small trials give the bytes a parameter and those of the process, hence a prediction; then the number of layers is
bisected. A model has the width at which the predicted one has 40 layers.

* *torch*: AdamW(fused) over fp32 masters, 16-bit gradients freed as they become fp32: 18 bytes a parameter.
* *DeepSpeed*: ZeRO-3, its own CPU Adam, with settings for the least memory: small subgroups, buckets and
  prefetches, no pipelining; optimizer state in memory or on disk; parameters there, too, made under `zero.Init`.
* *ours*: nothing resident, four staging slots of 2^20 elements; with overlap, steps go on in forward and are made in
  backward in what memory is left (`overlap="auto"`); with gradients on the disk, these leave for it as they arrive
  (`gradient_memory=0`); with weights there, too, these lie in a file (`weights_in_file`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from _common import end_with_parent, progress
from _contest import Contender, ContenderError, ShortError, Worker
from _harness import Option, Run, main, names_among
from _needs import LIBAIO, NATIVE, Need

from offload.cli.model import Shape
from offload.config import parse_bytes
from offload.memory.arenas import control_groups
from offload.units import format_seconds

LAYERS = 40
"""Of the predicted model: the steps of the search are a fortieth of it."""

TOLERANCE = 0.03
"""Between the largest model that trains and the smallest that does not."""

STEPS, TOKENS = 3, 16
TIMEOUT_S = 900.0
NO_LIMIT = 1 << 50
GUARD_BYTES = 1 << 30
"""Without a control group: what a process may allocate beyond the limit before that is refused."""

SMALL = {
    "sub_group_size": 10_000_000,
    "reduce_bucket_size": 10_000_000,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}


@dataclass(frozen=True, kw_only=True)
class Searched(Contender):
    """Who trains; "{path}" in its settings is a folder on the disk.

    Attributes:
        weight: Predicted bytes of memory a parameter.
        disk: Predicted bytes on the disk a parameter.
        needs: What has to be installed.
        same: Contenders with the same word get the same weights from the same model. Their models are equally wide,
            and the two smallest equally deep.
    """

    weight: float
    disk: float = 0.0
    needs: Sequence[Need] = ()
    same: str = ""

    @property
    def has_weights_in_file(self) -> bool:
        """Whether its weights lie on the disk, too."""
        return "weights_in" in self.settings


def stock(**zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **SMALL, **zero}}


def ours(ending: str, form: str, weight: float, disk: float, **more: Any) -> Searched:
    settings = {"host_memory": 0, "checkpoints_kept": 0, "subgroup_numel": 1 << 20, "overlap": "off", **more}
    return Searched(
        form + ending, "finished", {"state_format": form, **settings}, weight=weight, disk=disk, same=form
    )


IN_MEMORY = stock(offload_optimizer={"device": "cpu", "pin_memory": False})
ON_NVME = {"device": "nvme", "nvme_path": "{path}", "pin_memory": False, "buffer_count": 4}
ON_DISK = stock(offload_optimizer=ON_NVME)
CONTENDERS = (
    Searched("torch", "lean", {}, weight=18.0),
    Searched("deepspeed-cpu", "deepspeed", IN_MEMORY, weight=20.0, needs=NATIVE),
    Searched("deepspeed-nvme", "deepspeed", ON_DISK, weight=8.0, disk=16.0, needs=(*NATIVE, LIBAIO)),
    Searched(
        "deepspeed-nvme-weights",
        "deepspeed",
        stock(offload_optimizer=ON_NVME, offload_param={**ON_NVME, "buffer_size": 20_000_000, "max_in_cpu": 0}),
        weight=6.0,
        disk=18.0,
        needs=(*NATIVE, LIBAIO),
    ),
    ours("", "exact", 4.1, 12.2),
    ours("-overlap", "exact", 4.1, 24.4, overlap="auto"),
    ours("-gradients", "exact", 2.1, 14.3, gradient_memory=0),
    ours("", "compact8", 4.1, 5.3),
    ours("-overlap", "compact8", 4.1, 10.6, overlap="auto"),
    ours("-gradients", "compact8", 2.1, 7.4, gradient_memory=0),
    ours("-weights", "exact", 0.1, 16.3, gradient_memory=0, weights_in="{path}"),
    ours("-weights", "compact8", 0.1, 9.4, gradient_memory=0, weights_in="{path}"),
)
SMOKE = ("exact", "exact-overlap", "exact-gradients", "exact-weights")
OWN = ("process", "staging")
"""What a peak is made of that has nothing to do with the model's size."""


# Limits


class Group:
    """A control group for one trial after another.

    Attributes:
        folder: Its place in the file system of control groups.
        version: Of control groups: 1 or 2.
    """

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self.version = version

    def limit(self, nbytes: int) -> None:
        """Limit the memory, swap included, of all its processes together."""
        limit, swap = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), ("memory.max", "memory.swap.max")
        name, swap_name = limit if self.version == 1 else swap
        with contextlib.suppress(OSError):  # it may not be below the other limit, which may not be above it
            if self.version == 1:
                (self.folder / swap_name).write_text(str(nbytes))
        (self.folder / name).write_text(str(nbytes))
        with contextlib.suppress(OSError):  # a kernel that does not count swap
            (self.folder / swap_name).write_text(str(nbytes) if self.version == 1 else "0")

    def join(self) -> None:
        """Put the calling process into it."""
        (self.folder / "cgroup.procs").write_text("0")

    def kills(self) -> int:
        """Return how many processes the kernel has ended here for lack of memory."""
        text = (self.folder / ("memory.oom_control" if self.version == 1 else "memory.events")).read_text()
        return int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))


@contextlib.contextmanager
def made_group() -> Iterator[Group | None]:
    """Yield a control group whose memory can be limited, or None where none can be made.

    It is made below this process's own group, so that limits above hold, too. Groups of version 2 that have processes
    cannot have limited ones below them: there it is made beside its own.
    """
    made: Group | None = None
    with contextlib.suppress(OSError):
        for parent, version in control_groups():
            folder = parent / f"offload-capacity-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError:
                continue
            made = Group(folder, version)
            try:
                made.limit(1 << 40)
                break
            except OSError:
                folder.rmdir()
                made = None
    try:
        yield made
    finally:
        if made is not None:
            made.folder.rmdir()


# Trials


class TrialError(Exception):
    """A trial failed, and not for lack of memory or disk."""


@dataclass
class Trial:
    """One process.

    Attributes:
        layers: Of the model.
        numel: Its parameters.
        fits: Whether it trained within the limits.
        why: Why not; "" if it did.
        found: What it reported.
        seconds: What it took.
    """

    layers: int
    numel: int
    fits: bool
    why: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def losses(self) -> list[float]:
        """One a step."""
        return [iteration["loss"] for iteration in self.found["iterations"]]

    @property
    def peak_bytes(self) -> int:
        """Most memory of its own, mapped files left out."""
        marks = self.found["marks"]
        return int(
            max(marks["step"]["peak_bytes"] - marks["step"]["file_bytes"], *(m["own_bytes"] for m in marks.values()))
        )


def run_trial(
    contender: Searched, shape: Shape, memory_bytes: int, disk_bytes: int, group: Group | None, path: Path | None
) -> Trial:
    """Train a model of that shape within the limits.

    Raises:
        TrialError: It failed for another reason than a limit.
    """
    trial, began_s = Trial(shape.layers, shape.numel, fits=False), time.monotonic()
    sized = {"layers": shape.layers, "hidden": shape.hidden}
    if contender.kind == "finished":
        place = {"path": "{path}", "max_bytes": disk_bytes}
        contender = replace(contender, settings={**contender.settings, "paths": [place]})
    if group:
        group.limit(memory_bytes)
        killed = group.kills()

    def prepare() -> None:
        end_with_parent()
        if group:
            group.join()
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes + GUARD_BYTES,) * 2)

    with tempfile.TemporaryDirectory(dir=path, prefix="capacity-") as folder:
        worker = Worker(contender, {"shape": sized, "lean": True}, Path(folder), prepare)
        try:
            worker.answer(TIMEOUT_S)
            trial.found = worker.ask({"run": [[TOKENS, 0, STEPS]]}, TIMEOUT_S)
            trial.found["digest"] = worker.ask({"digest": True}, TIMEOUT_S)
            in_file = 2 * trial.numel if contender.has_weights_in_file else 0  # which has no name
            trial.found["disk_bytes"] = used_on_disk(Path(folder)) + in_file
        except ShortError as error:
            trial.why = str(error)
        except ContenderError as error:
            if not group or group.kills() == killed:
                raise TrialError(f"{contender.name}, {shape.layers} layers: {error}\n{worker.output()}") from error
            trial.why = "ended by the kernel: no more memory"
        finally:
            worker.close()
    trial.seconds = time.monotonic() - began_s
    if not trial.why:
        if not all(map(math.isfinite, trial.losses)):
            raise TrialError(f"{contender.name}, {shape.layers} layers: losses are not finite: {trial.losses}")
        if trial.found["disk_bytes"] > disk_bytes:
            trial.why = f"{trial.found['disk_bytes']} bytes on the disk"
        elif not group and trial.found["peak_bytes"] > memory_bytes:
            trial.why = "its peak is beyond the limit"
    trial.fits = not trial.why
    return trial


def used_on_disk(folder: Path) -> int:
    """Return the bytes that files below a folder take, but for the log."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file() and path.suffix != ".log")


# Search


def search(
    attempt: Callable[[int], Trial], predicted: int, memory_bytes: int, say: Callable[[Trial], None]
) -> list[Trial]:
    """Find the most layers that fit, to `TOLERANCE`.

    Args:
        attempt: Trains a model of so many layers.
        predicted: How many may fit.
        memory_bytes: The limit, for a prediction from what small models took.
        say: Is told of each trial.

    Returns:
        All trials, in order. The largest that fits is the result; none does if not even one layer fits.
    """
    trials: list[Trial] = []

    def ask(layers: int) -> bool:
        trials.append(attempt(layers))
        say(trials[-1])
        return trials[-1].fits

    for share in (8, 3):
        ask(max(1, predicted // share))
    slope = line(trials)
    if slope is not None:
        start, per_parameter = slope
        a, b = trials
        each = (b.numel - a.numel) / (b.layers - a.layers)
        predicted = b.layers + int(((memory_bytes - start) / per_parameter - b.numel) / each)
    low = max((trial.layers for trial in trials if trial.fits), default=0)
    high = min((trial.layers for trial in trials if not trial.fits), default=None)
    margin = stride = max(1, int(TOLERANCE * predicted))
    while high is None or high - low > max(1, TOLERANCE * low):
        between = (predicted, predicted - margin, predicted - 2 * margin) if high is not None else (predicted,)
        layers = next((n for n in between if low < n and (high is None or n < high)), None)
        if layers is None:
            layers = low + stride if high is None else (low + high) // 2
            stride *= 2
        if ask(layers):
            low = layers
        else:
            high = layers
    return trials


def line(trials: Sequence[Trial]) -> tuple[float, float] | None:
    """Return the bytes of a process without parameters and those of one parameter, by the two smallest that fit."""
    fit = sorted((trial for trial in trials if trial.fits), key=lambda trial: trial.numel)[:2]
    if len(fit) < 2 or fit[0].numel == fit[1].numel:
        return None
    a, b = fit
    slope = (b.peak_bytes - a.peak_bytes) / (b.numel - a.numel)
    return (a.peak_bytes - slope * a.numel, slope) if slope > 0 else None


def width(numel: float) -> int:
    """Return the width of a model of so many parameters in `LAYERS` layers."""
    grain = 64 if numel > 1e8 else 16
    return max(grain, round(math.sqrt(numel / (12 * LAYERS)) / grain) * grain)


def explained(contender: Searched, trial: Trial) -> dict[str, int]:
    """Return what the peak of a trial is made of, in bytes; the sum is the peak."""
    marks, numel, planned = trial.found["marks"], trial.numel, trial.found["planned"]
    parts = {"process": marks["process"]["own_bytes"], "weights": 0 if contender.has_weights_in_file else 2 * numel}
    if contender.kind == "lean":
        parts |= {"gradients, fp32": 4 * numel, "masters and moments": 12 * numel}
    else:
        parts["gradients"] = planned.get("gradient_bytes", 2 * numel)
        if contender.name == "deepspeed-cpu":
            parts |= {"masters and moments": 12 * numel}
        if planned:
            parts["staging"] = planned["staging_bytes"]
            parts["tables and threads, as planned"] = planned["overhead_bytes"]
    return {**parts, "the rest": trial.peak_bytes - sum(parts.values())}


def summary(contender: Searched, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return what a search found."""
    fit = [trial for trial in trials if trial.fits]
    found: dict[str, Any] = {
        "settings": contender.settings,
        "trials": [{**vars(trial), "peak_bytes": trial.peak_bytes if trial.fits else None} for trial in trials],
        "numel": 0,
    }
    if not fit:
        return found
    best = max(fit, key=lambda trial: trial.numel)
    found |= {"numel": best.numel, "layers": best.layers, "peak_bytes": best.peak_bytes}
    found["too_large_numel"] = min((t.numel for t in trials if not t.fits), default=None)
    found["disk_bytes"] = best.found["disk_bytes"]
    # Of the first forward pass, what outlives it for the backward pass: activations, and what torch sets up then.
    found["after_forward_bytes"] = (
        best.found["marks"]["forward"]["own_bytes"] - best.found["marks"]["optimizer"]["own_bytes"]
    )
    found["explained_bytes"] = explained(contender, best)
    fitted = line(trials)
    if fitted is not None:
        found["fitted"] = {"start_bytes": fitted[0], "bytes_per_parameter": fitted[1]}
    return found


def same_weights(found: Mapping[str, Sequence[Trial]], chosen: Sequence[Searched]) -> float | None:
    """Return 1 if all that must compute the same did, at every size that two trained; None if there is none."""
    compared: dict[tuple[str, int], set[tuple[Any, ...]]] = {}  # by their word, and parameters
    counts: dict[tuple[str, int], int] = {}
    for contender in chosen:
        for numel, trial in {t.numel: t for t in found.get(contender.name, ()) if t.fits}.items():
            if contender.same:
                key = contender.same, numel
                compared.setdefault(key, set()).add((*trial.losses, trial.found["digest"]))
                counts[key] = counts.get(key, 0) + 1
    shared = [key for key, count in counts.items() if count > 1]
    return float(all(len(compared[key]) == 1 for key in shared)) if shared else None


def judge(run: Run, results: Mapping[str, Any], same: float | None) -> None:
    """Note the promises."""
    ran = {name: row for name, row in results.items() if row.get("numel")}
    own = {name: sum(row["explained_bytes"].get(part, 0) for part in OWN) for name, row in ran.items()}

    def beside_deepspeed(name: str, least: float) -> None:
        both = name in ran and "deepspeed-nvme" in ran
        times = ran[name]["numel"] / ran["deepspeed-nvme"]["numel"] if both else None
        what = f"{name}: parameters, times those of DeepSpeed's NVMe offload"
        run.at_least(what, times, least, "one of them did not run")

    for name in ("exact", "exact-overlap", "compact8", "compact8-overlap"):
        share = ran[name]["numel"] * 4 / (run.args.memory - own[name]) if name in ran else None
        what = f"{name}: parameters over (limit - process - staging) / 4 bytes"
        run.at_least(what, share, 0.95, "it did not run")
    for name in ("exact-gradients", "compact8-gradients"):
        each = (ran[name]["peak_bytes"] - own[name]) / ran[name]["numel"] if name in ran else None
        run.at_most(f"{name}: bytes a parameter beside the process and staging", each, 2.2, "it did not run")
        beside_deepspeed(name, 2.5)
    for name in ("exact", "compact8"):
        beside_deepspeed(name, 1.8)
    of_disk = ran["compact8-weights"]["numel"] if "compact8-weights" in ran else None
    run.at_least("compact8-weights: parameters", of_disk, 7e9, "it did not run")
    what = "with and without overlap, gradients in memory and on disk: the same losses and weights, bit for bit"
    run.at_least(what, same, 1.0, "no size was trained by both")


def chosen_of(args: argparse.Namespace) -> list[Searched]:
    """Return who takes part; at smoke size some of ours do."""
    return [c for c in CONTENDERS if c.name in args.contenders and (not args.smoke or c.name in SMOKE)]


def measure(run: Run) -> None:
    memory_bytes, stat = run.args.memory, os.statvfs(run.folder)
    disk_bytes = run.args.disk or 9 * stat.f_bavail * stat.f_frsize // 10
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the group and the folders go
    results: dict[str, Any] = {}
    trials: dict[str, list[Trial]] = {}
    with made_group() as group:
        limits = {
            "memory_bytes": memory_bytes,
            "disk_bytes": disk_bytes,
            "by": f"a control group, version {group.version}" if group else "the process's own peak",
        }
        run.results |= {"limits": limits, "contenders": results}
        print(f"{memory_bytes:,} bytes of memory, limited by {limits['by']}; {disk_bytes:,} bytes of disk")
        for contender in chosen_of(run.args):
            if contender.name in run.missing:
                results[contender.name] = {"left_out": run.missing[contender.name]}
                continue
            try:
                found = contest(contender, run.smoke, memory_bytes, disk_bytes, group, run.folder)
            except TrialError as error:
                print(error)
                results[contender.name] = {"failed": str(error)}
                run.failed.append(contender.name)
                continue
            trials[contender.name] = found
            row = results[contender.name] = summary(contender, found)
            print(f"{contender.name}: {row['numel']:,} parameters")
    judge(run, results, same_weights(trials, chosen_of(run.args)))
    losses = {name: [trial.losses for trial in found if trial.fits] for name, found in trials.items()}
    run.checksums.append(hashlib.sha256(json.dumps(losses).encode()).hexdigest()[:16])


def contest(
    contender: Searched, smoke: bool, memory_bytes: int, disk_bytes: int, group: Group | None, path: Path
) -> list[Trial]:
    """Return the trials of one contender."""
    alike = [each for each in CONTENDERS if each.same == contender.same] if contender.same else [contender]
    weight, disk = max(each.weight for each in alike), max(each.disk for each in alike)
    predicted = min(memory_bytes / weight, disk_bytes / disk if disk else math.inf)
    shape = Shape(LAYERS, 64 if smoke else width(memory_bytes / weight))

    def attempt(layers: int) -> Trial:
        progress(f"{contender.name}: {layers} layers")
        return run_trial(contender, replace(shape, layers=layers), memory_bytes, disk_bytes, group, path)

    def say(trial: Trial) -> None:
        took = f"{trial.peak_bytes / 1e9:.2f} GB" if trial.fits else trial.why
        print(
            f"  {contender.name}: {trial.layers} layers, {trial.numel:,} parameters: {took} "
            f"({format_seconds(trial.seconds)})",
            flush=True,
        )

    if contender.kind == "deepspeed":  # compiles its native parts at first use, which takes more memory than a trial
        progress(f"{contender.name}: native parts")
        run_trial(contender, replace(shape, layers=1), NO_LIMIT, NO_LIMIT, None, path)
    if smoke:
        found = [attempt(2)]
        say(found[0])
        return found
    return search(attempt, max(1, round(LAYERS * predicted / shape.numel)), memory_bytes, say)


NAMES = [contender.name for contender in CONTENDERS]
OPTIONS = (
    Option("memory", "6GiB", help="host memory of a trial", read=parse_bytes),
    Option("disk", None, help="most bytes on the disk; nine tenths of what is free without", read=parse_bytes),
    Option("contenders", ",".join(NAMES), help="separated by commas", read=names_among(NAMES)),
)

if __name__ == "__main__":
    main(
        __doc__,
        measure,
        options=OPTIONS,
        path=True,
        device="cpu",
        needs=lambda args: {contender.name: contender.needs for contender in chosen_of(args)},
    )
