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

import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from _common import progress
from _contenders import ALONE_MEMORY
from _contest import (
    BASELINE,
    STATE_BYTES,
    Contender,
    Schedule,
    common_of,
    markdown,
    row,
    run_group,
    spread,
    sum_of_losses,
    times_faster,
)
from _harness import (
    Option,
    Row,
    Run,
    column,
    digest,
    main,
    medians,
    ratio,
    rows_of_rounds,
    show,
    spawned,
    turns,
)
from _needs import FIO
from _sessions import MIB
from paths import fio
from phases import SETTINGS, SerialLoop

import offload
from offload.cli.model import choose_shape
from offload.units import format_bytes

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
OPTIONS = (
    Option("numel", 1 << 26, 1 << 19, "parameters of the cold step"),
    Option("weights", 64, 4, "tensors that they are in"),
    Option("buckets", 16, 8, "of the loops"),
    Option("rounds", 9, 2, "of the cold step"),
    Option("tensors", 512, 8, "of the step in memory"),
    Option("elements", 1 << 20, 1 << 12, "of each of them"),
    Option("processes", 8, 2, "beside each other there"),
    Option("steps", 4, 1, "of each of them"),
    Option("turns", 2, 1, "how often each kind of process is started"),
    Option("params", 130_000_000, 300_000, "of the model that is trained"),
    Option("tokens", 128, 16, "of its batch"),
    Option("iterations", 5, 1, "rounds of it"),
)


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


def cold(run: Run) -> Row:
    size, generator = run.args, torch.Generator().manual_seed(0)
    run.results["published"] = PUBLISHED
    start = torch.randn(size.numel, generator=generator).bfloat16()
    gradient = torch.randn(size.numel, generator=generator).bfloat16()
    names = ("serial", "ahead", *FORMATS)
    weights = {name: start.clone() for name in names}
    total = 2 * STATE_BYTES * size.numel
    with ExitStack() as ends:
        folders = {name: run.place() for name in (*names, "fio")}
        loops = {
            "serial": SerialLoop(folders["serial"], weights["serial"], gradient, size.buckets, 0),
            "ahead": AheadLoop(folders["ahead"], weights["ahead"], gradient, size.buckets),
        }
        ours = {form: Ours(folders[form], weights[form], gradient, size.weights, form) for form in FORMATS}
        for each in (*loops.values(), *ours.values()):
            ends.callback(each.close)

        def take(name: str) -> Row:
            one = ours.get(name) or loops[name]
            if isinstance(one, Ours):
                one.prepare()
            times = [time.perf_counter()]
            one.step()
            times.append(time.perf_counter())
            if name != "serial":
                one.drain()
            times.append(time.perf_counter())
            return {"foreground_s": times[1] - times[0], "drain_s": times[2] - times[1], "all_s": times[2] - times[0]}

        contenders: dict[str, Callable[[], object]] = {name: partial(take, name) for name in names}
        for way in ("read", "rw"):
            given = (folders["fio"], min(4 * MIB, total // 8), 4, total // 4, "libaio", way)
            contenders[way] = partial(fio, *given)
        used = rows_of_rounds(contenders, size.rounds)  # the first round, which does not count, makes files
    digests = {name: digest([weight]) for name, weight in weights.items()}
    run.same("exact state and the loops", (digests[name] for name in ("serial", "ahead", "exact")))
    rates = {way: column(used[way], "bytes_per_s") for way in ("read", "rw")}
    disk = {way: statistics.median(found) for way, found in rates.items() if None not in found}
    rows: Row = {}
    for name in names:
        rounds = used[name]
        row: Row = medians(rounds)
        row["spread"] = spread(column(rounds, "foreground_s"))
        row["bytes_per_s"] = (row["read_bytes"] + row["write_bytes"]) / row["all_s"]
        row["of_fio"] = row["bytes_per_s"] / disk["rw"] if disk else None
        for what in ("foreground_s", "all_s"):
            row[f"{what}_ahead"] = ratio(column(used["ahead"], what), column(rounds, what))
        rows[name] = row | {"rounds": rounds}
        show(name, row, "foreground_s", "drain_s", "read_bytes", "write_bytes", "of_fio")
    for name, what, least in (("ahead", "the loop that reads ahead", 0.8), ("exact", "exact state", 0.9)):
        what = f"cold step, {what}: bytes a second, of fio's"
        run.at_least(what, rows[name]["of_fio"], least, "fio is not installed")
    moved_bytes = {name: row["read_bytes"] + row["write_bytes"] for name, row in rows.items()}
    for form in FORMATS:
        fewer = moved_bytes["ahead"] / max(1, moved_bytes[form])
        what = f"cold step, {form}: with its drain, times as fast as the loop that reads ahead, over the bytes' ratio"
        run.at_least(what, rows[form]["all_s_ahead"] / fewer, 0.9)
    what = "cold step, exact: foreground, times as fast as the loop that reads ahead"
    run.at_least(what, rows["exact"]["foreground_s_ahead"], 1.0)
    run.checksums += digests.values()
    files = {name: loop.chosen for name, loop in loops.items()}
    return {"contenders": rows, "fio_bytes_per_s": disk, "files": files}


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


def stepping(pipe: Connection, *given: Any) -> None:
    """Be one process of the step in memory: answer with the seconds of a step, and in the end what it came to."""
    one = Stepping(*given)
    pipe.send("ready")
    while pipe.recv():
        pipe.send(one.step())
    # Weights are alike in all tensors, all processes and both sizes.
    pipe.send(digest(one.weights[-1:]))


def processes(count: int, steps: int, *given: Any) -> tuple[list[float], set[str]]:
    """Return the seconds until all of some processes have taken a step, for each step, and what they came to."""
    with spawned(stepping, count, *given) as pipes:

        def ask(goes_on: bool) -> list[Any]:
            for pipe in pipes:
                pipe.send(goes_on)
            return [pipe.recv() for pipe in pipes]

        for pipe in pipes:
            pipe.recv()
        found = [max(ask(True)) for _ in range(steps + 1)]
        return found[1:], set(ask(False))


def in_memory(run: Run) -> Row:
    size, results = run.args, {}
    cases = {"one process": (1, 1, CPUS, 2.0), "eight processes": (size.processes, QUARTER, 1, 3.0)}
    each_bytes = (STATE_BYTES + 4) * size.tensors * size.elements  # with weights and gradients in 16 bits
    most = max(count * (each_bytes // part + PROCESS_BYTES) for count, part, *_ in cases.values())
    if psutil.virtual_memory().available < most:
        raise SystemExit(f"steps in memory take {format_bytes(most)}, which are not free")
    for case, (count, part, threads, least) in cases.items():
        seconds: dict[str, list[float]] = {"ours": [], "a tensor at a time": []}
        digests: dict[str, set[str]] = {kind: set() for kind in seconds}
        for _, kind in turns(seconds, size.turns):
            progress(f"{case}: {kind}")
            taken, found = processes(count, size.steps, kind, size.tensors // part, size.elements, threads)
            seconds[kind] += taken
            digests[kind] |= found
        whole_s = {kind: part * statistics.median(each) for kind, each in seconds.items()}
        row = results[case] = {
            "part": 1 / part,
            "seconds": seconds,
            "whole_s": whole_s,
            "times": whole_s["a tensor at a time"] / whole_s["ours"],
            "checksums": {kind: sorted(found) for kind, found in digests.items()},
        }
        show(case, {f"{kind}_s": took_s for kind, took_s in whole_s.items()}, *(f"{kind}_s" for kind in whole_s))
        what = f"step in memory, {case}: times as fast as torch's AdamW with a tensor at a time"
        run.at_least(what, row["times"], least)
        what = f"step in memory, {case}: seconds of the whole size, over those published of another machine"
        run.at_most(what, whole_s["ours"] / PUBLISHED[f"{case}_s"], 1.0)
    ours = (digest for case in results.values() for digest in case["checksums"]["ours"])
    run.checksums.append(run.same("weights depend on processes or threads", ours))
    return results


# What torch offloads by


def offloads(run: Run) -> Row:
    size, shape = run.args, choose_shape(run.args.params)
    field = [
        Contender(BASELINE, "plain"),
        Contender("torch AdamW, fused", "torch", {"fused": True}),
        Contender(SAVES, "torch", {"fused": True, "save_on_cpu": True}),
        Contender("FSDP2 of one rank, torch AdamW", "fsdp", {"offloads": False}),
        Contender(POLICY, "fsdp", {"offloads": True}),
        Contender("torchao CPUOffloadOptimizer", "torchao", left_out="not run: it needs weights on a GPU"),
        Contender(ALONE_MEMORY, "offload"),
        Contender("ours, nothing resident", "offload", {"host_memory": 0, "paths": ["{path}"]}),
    ]
    if run.smoke:
        field = [each for each in field if each.name in SMOKE_FIELD or each.left_out]
    schedule = Schedule(((size.tokens, 2 if run.smoke else 3),), size.iterations, 1, math.inf)
    outcomes, speeds = run_group(field, schedule, common_of(shape, size.tokens, run.smoke), run.folder)
    base = outcomes[BASELINE]
    rows = {n: row(each, base, speeds, size.tokens, shape.numel) for n, each in outcomes.items() if each.ran}
    print(markdown(rows, {name: each.failed for name, each in outcomes.items() if each.failed}))
    policy = outcomes[POLICY]
    times = None if policy.failed else times_faster(outcomes[ALONE_MEMORY], policy, size.tokens)
    what = "iteration, all in memory, times as fast as FSDP2's CPUOffloadPolicy"
    run.at_least(what, times, 1.0, "one of them did not run")
    run.checksums.append(sum_of_losses(outcomes.values()))
    kept = {name: asdict(outcome) for name, outcome in outcomes.items()}
    return {"rows": rows, "contenders": kept, "speeds": speeds}


if __name__ == "__main__":
    main(
        __doc__,
        sections={"cold": cold, "threads": in_memory, "offloads": offloads},
        options=OPTIONS,
        path=True,
        device="cpu",
        needs=lambda args: {"cold": [FIO]} if "cold" in args.sections else {},
    )
