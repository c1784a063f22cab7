"""Figures that others published of their own offloading, on the same work: ours, and loops that do what theirs do.

Sections, each of which can be run alone (`--sections cold,threads`):

  cold      a step over 67,108,864 parameters whose state is on one disk and nowhere in memory: until `step()` returns
            (foreground), and until the rest is written (drain). AReno (inclusionAI/AReno, pull request 498) has
            1.026 s and 0.542 s at 10.125 bytes a parameter. Beside ours a loop that reads two buckets ahead and
            writes behind, as theirs does, and one that does one after the other, both with our kernel and the better
            of O_DIRECT and buffered files with fsync. All are judged by what fio moves in the same rounds. Ours is
            made cold by `park`, which is its drain, and takes memory again before the clock starts
  threads   a step over 512 tensors of 1,048,576 elements in memory: one process with 2 threads, and 8 processes with
            one thread each at a quarter of the size, on 2 CPUs. Megatron-LM Lite (ISEEKYAN/Megatron-LM, issue 188)
            has 1.81 s and 17.2 s. Beside ours torch's AdamW with a tensor at a time, as theirs
  offloads  an iteration with what torch itself offloads by: FSDP2's `CPUOffloadPolicy`, `save_on_cpu`. Without a GPU
            both copy within host memory: what shows is what the copies cost. torchao's `CPUOffloadOptimizer` needs
            one, and is left out

The serial loop of reinforcement-learning stacks, with our engine at the same memory, is in `bench/phases.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from _common import Kept, Target, arguments, end_with_parent, environment, interleaved, progress, report
from _contenders import ALONE_MEMORY, TORCHAO_OFFLOAD
from _contest import (
    BASELINE,
    STATE_BYTES,
    Contender,
    Outcome,
    Schedule,
    markdown,
    row,
    run_group,
    spread,
    work_folder,
)
from _needs import FIO, require
from _worker import kernel_io, moved
from paths import MIB, fio
from phases import SETTINGS, SerialLoop

import offload
from offload.cli.model import choose_shape
from offload.units import format_bytes, format_seconds

PUBLISHED = {
    "foreground_s": 1.026, "drain_s": 0.542, "bytes_each": 10.125,
    "one process_s": 1.81, "eight processes_s": 17.2,
}  # fmt: skip
FORMATS = ("exact", "compact16", "compact8")
CPUS = 2
QUARTER = 4
PROCESS_BYTES = 300 << 20
"""Of a process with torch, beside its tensors."""
POLICY = "FSDP2 of one rank, torch AdamW, CPUOffloadPolicy"
SAVES = "torch AdamW, fused, save_on_cpu"
SMOKE_FIELD = (BASELINE, POLICY, SAVES, ALONE_MEMORY)


@dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        numel: Parameters of the cold step.
        weights: Tensors that they are in.
        buckets: Of the loops.
        rounds: Of the cold step.
        tensors, elements: Of the step in memory.
        processes: Beside each other there.
        steps: Of each of them, in each of `turns`.
        turns: How often each kind of process is started.
        params: Of the model that is trained.
        tokens: Of its batch.
        iterations: Rounds of it.
    """

    numel: int
    weights: int
    buckets: int
    rounds: int
    tensors: int
    elements: int
    processes: int
    steps: int
    turns: int
    params: int
    tokens: int
    iterations: int


SMOKE = Size(1 << 19, 4, 8, 2, 8, 1 << 12, 2, 1, 1, 300_000, 16, 1)
FULL = Size(1 << 26, 64, 16, 9, 512, 1 << 20, 8, 4, 2, 130_000_000, 128, 5)


def digest(weight: torch.Tensor) -> str:
    return hashlib.sha256(weight.view(torch.int16).numpy().tobytes()).hexdigest()[:16]


# A step whose state is on the disk


class AheadLoop(SerialLoop):
    """The serial loop with buckets read ahead and written behind: what is left to write is its drain."""

    AHEAD, PLACES = 2, 4

    def __init__(self, folder: Path, weight: torch.Tensor, gradient: torch.Tensor, buckets: int) -> None:
        super().__init__(folder, weight, gradient, buckets, self.PLACES - 1)
        self._readers, self._writers = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._writes: dict[int, Future[None]] = {}

    def _stays(self, number: int) -> bool:
        return False

    def _place(self, number: int) -> int:
        return number % self.PLACES

    def _read(self, number: int, write: Future[None] | None) -> None:
        if write is not None:
            write.result()  # of what was in this memory
        self._file.read(self._memory[self._place(number)], number * self.bucket_bytes)

    def step(self) -> None:
        self._steps += 1
        reads: dict[int, Future[None]] = {}
        for number in range(self._buckets):
            for ahead in range(number + len(reads), min(number + self.AHEAD + 1, self._buckets)):
                reads[ahead] = self._readers.submit(self._read, ahead, self._writes.get(self._place(ahead)))
            reads.pop(number).result()
            self._update(number)
            place = self._place(number)
            self._writes[place] = self._writers.submit(
                self._file.write, self._memory[place], number * self.bucket_bytes
            )

    def drain(self) -> None:
        for write in self._writes.values():
            write.result()

    def close(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()
        super().close()


class Ours:
    """Our optimizer, all of whose state is on the disk."""

    def __init__(self, folder: Path, weight: torch.Tensor, gradient: torch.Tensor, weights: int, form: str) -> None:
        shape = -1, min(1024, weight.numel() // weights)
        pieces = [piece.view(shape) for piece in weight.chunk(weights)]
        self._gradients = [piece.view(shape) for piece in gradient.chunk(weights)]
        self._weights = [torch.nn.Parameter(piece) for piece in pieces]
        config = offload.OffloadConfig(host_memory=0, paths=[folder], state_format=form, exact_names=())
        self.optimizer = offload.AdamW(self._weights, **SETTINGS, offload=config)
        self.close = self.optimizer.close

    def prepare(self) -> None:
        """Take memory again, which holds nothing."""
        self.optimizer.unpark()
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient

    def step(self) -> None:
        self.optimizer.step()

    def drain(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.park()


def cold(size: Size, path: Path | None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size.numel, generator=generator).bfloat16()
    gradient = torch.randn(size.numel, generator=generator).bfloat16()
    names = ("serial", "ahead", *FORMATS)
    weights = {name: start.clone() for name in names}
    used: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    total = 2 * STATE_BYTES * size.numel
    rates: dict[str, list[float]] = {"read": [], "rw": []}
    with tempfile.TemporaryDirectory(dir=path) as made, ExitStack() as ends:
        folders = {name: Path(made, name) for name in (*names, "fio")}
        for folder in folders.values():
            folder.mkdir()
        loops = {
            "serial": SerialLoop(folders["serial"], weights["serial"], gradient, size.buckets, 0),
            "ahead": AheadLoop(folders["ahead"], weights["ahead"], gradient, size.buckets),
        }
        ours = {form: Ours(folders[form], weights[form], gradient, size.weights, form) for form in FORMATS}
        for each in (*loops.values(), *ours.values()):
            ends.callback(each.close)

        def taken(name: str, step: Callable[[], None], drain: Callable[[], None]) -> None:
            before, times = kernel_io(), [time.perf_counter()]
            step()
            times.append(time.perf_counter())
            drain()
            times.append(time.perf_counter())
            one = {"foreground_s": times[1] - times[0], "drain_s": times[2] - times[1], **moved(before)}
            used[name].append(one)

        def run(name: str) -> None:
            if name in ours:
                ours[name].prepare()
                taken(name, ours[name].step, ours[name].drain)
            else:
                loop = loops[name]
                taken(name, loop.step, loop.drain if isinstance(loop, AheadLoop) else lambda: None)

        def measure(way: str) -> None:
            rate = fio(folders["fio"], min(4 * MIB, total // 8), 4, total // 4, "libaio", way)
            if rate is not None:
                rates[way].append(rate)

        contenders: dict[str, Callable[[], object]] = {name: lambda name=name: run(name) for name in names}  # type: ignore[misc]
        contenders |= {f"fio {way}": lambda way=way: measure(way) for way in rates}  # type: ignore[misc]
        interleaved(contenders, size.rounds)
    digests = {
        name: hashlib.sha256(w.view(torch.int16).numpy().tobytes()).hexdigest()[:16] for name, w in weights.items()
    }
    if len({digests[name] for name in ("serial", "ahead", "exact")}) != 1:
        raise SystemExit(f"exact state came to other weights than the loops: {digests}")
    disk = {way: statistics.median(found[1:]) for way, found in rates.items() if found}
    rows: dict[str, Any] = {}
    for name, rounds in used.items():
        rounds = rounds[1:]  # the first one makes files
        row = {each: statistics.median(one[each] for one in rounds) for each in rounds[0]}
        row["all_s"] = statistics.median(one["foreground_s"] + one["drain_s"] for one in rounds)
        row["spread"] = spread([one["foreground_s"] for one in rounds])
        row["bytes_per_s"] = (row["read_bytes"] + row["write_bytes"]) / row["all_s"]
        row["of_fio"] = row["bytes_per_s"] / disk["rw"] if disk else None
        for what in ("foreground_s", "all_s"):
            row[f"{what}_ahead"] = statistics.median(
                (theirs["foreground_s"] + (what == "all_s") * theirs["drain_s"])
                / (mine["foreground_s"] + (what == "all_s") * mine["drain_s"])
                for mine, theirs in zip(rounds, used["ahead"][1:], strict=True)
            )
        rows[name] = row | {"rounds": rounds}
        of_fio = f"{row['of_fio']:.2f} of fio" if disk else "no fio"
        print(
            f"  {name:<9} {format_seconds(row['foreground_s'])} and {format_seconds(row['drain_s'])} to drain: "
            f"{row['read_bytes'] / 1e6:.0f} MB read, {row['write_bytes'] / 1e6:.0f} MB written, {of_fio}"
        )
    files = {name: loop.chosen for name, loop in loops.items()}
    return {"contenders": rows, "fio_bytes_per_s": disk, "files": files, "checksum": "-".join(digests.values())}


def cold_targets(found: dict[str, Any]) -> list[Target]:
    rows, targets = found["contenders"], []
    why = "fio is not installed"
    for name in ("ahead", "exact"):
        what = {"ahead": "the loop that reads ahead", "exact": "exact state"}[name]
        least = {"ahead": 0.8, "exact": 0.9}[name]
        targets.append(
            Target.at_least(f"cold step, {what}: bytes a second, of fio's", rows[name]["of_fio"], least, why)
        )
    for form in FORMATS:
        fewer = (rows["ahead"]["read_bytes"] + rows["ahead"]["write_bytes"]) / max(
            1, rows[form]["read_bytes"] + rows[form]["write_bytes"]
        )
        what = f"cold step, {form}: with its drain, times as fast as the loop that reads ahead, over the bytes' ratio"
        targets.append(Target.at_least(what, rows[form]["all_s_ahead"] / fewer, 0.9))
    what = "cold step, exact: foreground, times as fast as the loop that reads ahead"
    targets.append(Target.at_least(what, rows["exact"]["foreground_s_ahead"], 1.0))
    return targets


# A step in memory


class Stepping:
    """Tensors of one process, and what updates them."""

    def __init__(self, kind: str, tensors: int, elements: int, threads: int) -> None:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CPUS])
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(2 * elements, generator=generator).bfloat16()
        self.weights = [torch.nn.Parameter(values[:elements].clone()) for _ in range(tensors)]
        self.gradients = [values[elements:].clone() for _ in range(tensors)]
        self.kind = kind
        if kind == "ours":
            self.optimizer = offload.AdamW(self.weights, **SETTINGS, offload=offload.OffloadConfig(threads=threads))
        else:
            masters = [torch.nn.Parameter(weight.detach().float()) for weight in self.weights]
            self.each = [torch.optim.AdamW([master], **SETTINGS, foreach=False) for master in masters]

    @torch.no_grad()
    def step(self) -> float:
        """Take one; return its seconds."""
        if self.kind == "ours":
            for weight, gradient in zip(self.weights, self.gradients, strict=True):
                weight.grad = gradient
            started_s = time.perf_counter()
            self.optimizer.step()
            return time.perf_counter() - started_s
        started_s = time.perf_counter()
        for weight, gradient, adamw in zip(self.weights, self.gradients, self.each, strict=True):
            (master,) = adamw.param_groups[0]["params"]
            master.grad = gradient.float()
            adamw.step()
            master.grad = None
            weight.copy_(master)
        return time.perf_counter() - started_s


def child(request: dict[str, Any]) -> None:
    """Be one process of the step in memory: a line comes for each step, and its seconds go back."""
    stepping = Stepping(**request)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(stepping.step(), flush=True)
    # Weights are alike in all tensors, all processes and both sizes.
    print(digest(stepping.weights[-1].detach()), flush=True)


def processes(count: int, steps: int, **request: Any) -> tuple[list[float], set[str]]:
    """Return the seconds until all of some processes have taken a step, for each step, and what they came to."""
    command = [sys.executable, __file__, "--child", json.dumps(request)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, **pipes, preexec_fn=end_with_parent) for _ in range(count)]

    def answers() -> list[str]:
        lines = [each.stdout.readline().strip() for each in running]  # type: ignore[union-attr]
        if not all(lines):
            raise SystemExit(f"a process with {request} has ended")
        return lines

    try:
        answers()
        found = []
        for _ in range(steps + 1):
            for each in running:
                each.stdin.write("step\n")  # type: ignore[union-attr]
                each.stdin.flush()  # type: ignore[union-attr]
            found.append(max(map(float, answers())))
        for each in running:
            each.stdin.close()  # type: ignore[union-attr]
        return found[1:], set(answers())
    finally:
        for each in running:
            each.kill()
            each.wait()


def in_memory(size: Size, path: Path | None) -> dict[str, Any]:
    del path  # nothing is on a disk
    results: dict[str, Any] = {}
    cases = {"one process": (1, 1, CPUS), "eight processes": (size.processes, QUARTER, 1)}
    each_bytes = (STATE_BYTES + 4) * size.tensors * size.elements  # with weights and gradients in 16 bits
    most = max(count * (each_bytes // part + PROCESS_BYTES) for count, part, _ in cases.values())
    if psutil.virtual_memory().available < most:
        raise SystemExit(f"steps in memory take {format_bytes(most)}, which are not free")
    for case, (count, part, threads) in cases.items():
        seconds: dict[str, list[float]] = {"ours": [], "a tensor at a time": []}
        digests: dict[str, set[str]] = {kind: set() for kind in seconds}
        for turn in range(size.turns):
            for kind in list(seconds)[:: 1 if turn % 2 == 0 else -1]:
                progress(f"{case}: {kind}, turn {turn + 1}/{size.turns}")
                request = {"tensors": size.tensors // part, "elements": size.elements, "threads": threads}
                taken, found = processes(count, size.steps, kind=kind, **request)
                seconds[kind] += taken
                digests[kind] |= found
        medians = {kind: part * statistics.median(each) for kind, each in seconds.items()}
        results[case] = {
            "part": 1 / part,
            "seconds": seconds,
            "whole_s": medians,
            "times": medians["a tensor at a time"] / medians["ours"],
            "checksums": {kind: sorted(found) for kind, found in digests.items()},
        }
        print(
            f"  {case}: {format_seconds(medians['ours'])}, torch with a tensor at a time "
            f"{format_seconds(medians['a tensor at a time'])}; published {PUBLISHED[f'{case}_s']} s"
        )
    ours = {digest for case in results.values() for digest in case["checksums"]["ours"]}
    if len(ours) != 1:
        raise SystemExit(f"weights depend on processes or threads: {ours}")
    results["checksum"] = ours.pop()
    return results


def memory_targets(found: dict[str, Any]) -> list[Target]:
    targets = []
    for case in ("one process", "eight processes"):
        row = found[case]
        least = {"one process": 2.0, "eight processes": 3.0}[case]
        what = f"step in memory, {case}: times as fast as torch's AdamW with a tensor at a time"
        targets.append(Target.at_least(what, row["times"], least))
        what = f"step in memory, {case}: seconds of the whole size, over those published of another machine"
        targets.append(Target.at_most(what, row["whole_s"]["ours"] / PUBLISHED[f"{case}_s"], 1.0))
    return targets


# What torch offloads by


def offloads(size: Size, path: Path | None) -> dict[str, Any]:
    shape = choose_shape(size.params)
    common = {
        "shape": {"layers": shape.layers, "hidden": shape.hidden},
        "numel": shape.numel,
        "seq": size.tokens,
        "device": "cpu",
        "smoke": size is SMOKE,
    }
    field = [
        Contender(BASELINE, "plain"),
        Contender("torch AdamW, fused", "torch", {"fused": True}),
        Contender(SAVES, "torch", {"fused": True, "save_on_cpu": True}),
        Contender("FSDP2 of one rank, torch AdamW", "fsdp", {"offloads": False}),
        Contender(POLICY, "fsdp", {"offloads": True}),
        Contender(TORCHAO_OFFLOAD, "torchao", left_out="not run: it needs weights on a GPU"),
        Contender(ALONE_MEMORY, "offload"),
        Contender("ours, nothing resident", "offload", {"host_memory": 0, "paths": ["{path}"]}),
    ]
    if size is SMOKE:
        field = [each for each in field if each.name in SMOKE_FIELD or each.left_out]
    with work_folder(path) as folder:
        schedule = Schedule(((size.tokens, 2 if size is SMOKE else 3),), size.iterations, 1, math.inf)
        outcomes, speeds = run_group(field, schedule, common, folder, print)
    base = outcomes[BASELINE]
    ran = {name: each for name, each in outcomes.items() if each.iterations and not each.failed}
    rows = {name: row(each, base, speeds, size.tokens, shape.numel) for name, each in ran.items()}
    print(markdown(rows, {name: each.failed for name, each in outcomes.items() if each.failed}))
    losses = json.dumps([[outcome.name, outcome.losses[:4]] for outcome in outcomes.values()])
    checksum = hashlib.sha256(losses.encode()).hexdigest()[:16]
    kept = {name: asdict(outcome) for name, outcome in outcomes.items()}
    return {"rows": rows, "contenders": kept, "speeds": speeds, "checksum": checksum}


def offloads_targets(found: dict[str, Any]) -> list[Target]:
    outcomes = {name: Outcome(**each) for name, each in found["contenders"].items()}
    ours, policy = outcomes[ALONE_MEMORY], outcomes[POLICY]
    sizes = {i["tokens"] for each in ours.iterations for i in each}
    pairs = [
        pair
        for tokens in sizes
        for pair in zip(ours.values("iteration_s", tokens), policy.values("iteration_s", tokens), strict=False)
    ]
    times = statistics.median(theirs / mine for mine, theirs in pairs) if pairs and not policy.failed else None
    what = "iteration, all in memory, times as fast as FSDP2's CPUOffloadPolicy"
    return [Target.at_least(what, times, 1.0, "one of them did not run")]


SECTIONS: dict[
    str, tuple[Callable[[Size, Path | None], dict[str, Any]], Callable[[dict[str, Any]], list[Target]]]
] = {
    "cold": (cold, cold_targets),
    "threads": (in_memory, memory_targets),
    "offloads": (offloads, offloads_targets),
}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    args: argparse.Namespace = arguments(__doc__, path=True, runs=True, sections=SECTIONS).parse_args()
    require(args, {"cold": [FIO]} if "cold" in args.sections else {})
    described = environment(device="cpu")
    size = SMOKE if args.smoke else FULL
    kept = Kept(args.runs, described["commit"], asdict(size))
    results: dict[str, Any] = {"published": PUBLISHED}
    targets: list[Target] = []
    for name in args.sections:
        measure, judge = SECTIONS[name]
        print(f"{name}:")
        results[name] = kept.find(name, lambda measure=measure: measure(size, args.path))  # type: ignore[misc]
        targets += judge(results[name])
    report(args, described, results, "-".join(results[name]["checksum"] for name in args.sections), targets)


if __name__ == "__main__":
    main()
