"""Storage paths: one against fio, several against their sum, and what of the traffic a step is seen to pay.

Sections, each of which can be run alone (`--sections single,sum`):

  single        one path, reads and writes mixed, against fio at the same block size and depth
  sum           paths throttled to given rates (emulated, by a decorator) against one and against the sum
  traffic       bytes that a step moves, against the least possible
  overlap       exposed step time against the staging memory, with a pause as long as the I/O before each step
  cpu           CPU seconds that a gigabyte costs between staging memory and path, with checksums and without: what
                steps take beyond those of the same state in memory
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import cores
from _harness import Row, Run, digest, main, rows_of_rounds, show
from _needs import FIO
from _sessions import MB, MIB, Configuration, Model, Pace, Session, sessions

import offload
from offload._native import CompletionQueue
from offload.formats import EXACT_ADAMW
from offload.memory.arenas import Arena
from offload.protocols import Completion, Tier, TileId, TileRequest
from offload.tiers import StoreOptions, open_tier

SLOT_HEADER = 4096


# One path, tile by tile


class Mixer:
    """Keeps reads and writes of whole tiles in flight on one tier."""

    def __init__(
        self, tier: Tier, queue: CompletionQueue, tile_bytes: int, depth: int, slots: int, *, verify: bool = True
    ) -> None:
        self.tier, self.queue, self.tile_bytes, self.depth, self.slots = tier, queue, tile_bytes, depth, slots
        self.verify = verify
        self.arena = Arena(2 * depth * tile_bytes, prefault=True)
        self.arena.tensor(0, 2 * depth * tile_bytes, torch.uint8).random_(generator=torch.Generator().manual_seed(1))
        self.ops = itertools.count(1)
        self.steps = [0] * (2 * slots)
        for slot in range(slots):
            self._submit(True, slot, 0)
            self._wait()

    def _submit(self, write: bool, slot: int, buffer: int) -> int:
        if write:
            self.steps[slot] += 1
        request = TileRequest(
            op=next(self.ops),
            tile=TileId(0, 0, slot),
            step=self.steps[slot],
            offset=slot * (self.tile_bytes + SLOT_HEADER),
            address=self.arena.address + buffer * self.tile_bytes,
            nbytes=self.tile_bytes,
            verify=self.verify,
        )
        (self.tier.write if write else self.tier.read)(request)
        return request.op

    def _wait(self) -> list[Completion]:
        done = [Completion(*record) for record in self.queue.wait()]
        for completion in done:
            if completion.error:
                raise SystemExit(f"a transfer failed: {completion}")
        return done

    def run(self, tiles: int, reads: bool = True, writes: bool = True) -> list[float]:
        """Move `tiles` tiles each way, `depth` at a time each way; return when each was through."""
        flying: dict[int, tuple[bool, int]] = {}
        left = {False: tiles if reads else 0, True: tiles if writes else 0}
        slots = {False: itertools.cycle(range(self.slots)), True: itertools.cycle(range(self.slots, 2 * self.slots))}

        def more(write: bool, buffer: int) -> None:
            if left[write]:
                left[write] -= 1
                flying[self._submit(write, next(slots[write]), buffer)] = write, buffer

        for buffer in range(self.depth):
            more(False, buffer)
            more(True, self.depth + buffer)
        ends = []
        while flying:
            for completion in self._wait():
                ends.append(completion.finished_s)
                more(*flying.pop(completion.op))
        return ends


def fio(folder: Path, block_bytes: int, depth: int, total_bytes: int, engine: str, way: str = "rw") -> Row:
    """Return fio's "bytes_per_s", reads and writes mixed or as `way` says ("read"); None without fio."""
    if shutil.which("fio") is None:
        return {"bytes_per_s": None}
    jobs = depth if engine == "psync" else 1
    command = ["fio", "--name=mixed", f"--rw={way}", "--rwmixread=50", "--direct=1", "--output-format=json"]
    command += [f"--ioengine={engine}", f"--bs={block_bytes}", f"--iodepth={1 if engine == 'psync' else depth}"]
    command += [f"--numjobs={jobs}", f"--size={total_bytes // jobs}", f"--directory={folder}", "--group_reporting"]
    # Huge pages behind fio's buffers too: they decide its throughput as much as ours.
    command.append("--mem=malloc")
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PATH": "/usr/bin:/bin:/usr/local/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return {"bytes_per_s": float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])}


@contextlib.contextmanager
def opened(folder: Path | str, **options: Any) -> Iterator[tuple[Tier, CompletionQueue]]:
    """Yield a tier, opened by `StoreOptions` of these options, and its queue."""
    queue = CompletionQueue()
    tier = open_tier(str(folder), uuid.uuid4(), queue, options=StoreOptions(**options))
    try:
        yield tier, queue
    finally:
        tier.close()


def single(run: Run) -> dict[str, Any]:
    tile, depth, tiles, rounds = (MIB, 2, 4, 2) if run.smoke else (8 * MIB, 4, 64, 7)
    moved = 2 * tile * tiles
    block_bytes = MIB if run.smoke else 4 * MIB
    with contextlib.ExitStack() as stack:
        contenders: dict[str, Callable[[], object]] = {
            f"fio {engine}": partial(fio, run.folder, block_bytes, depth, moved, engine)
            for engine in ("libaio", "psync")
        }
        for checksum in (True, False):
            tier, queue = stack.enter_context(opened(run.folder, io_backend="threads"))
            mixer = Mixer(tier, queue, tile, depth, max(2 * depth, tiles // 4), verify=checksum)
            contenders[f"threads, {'' if checksum else 'no '}checksum"] = partial(mixer.run, tiles)
        rows = rows_of_rounds(contenders, rounds)
    found: dict[str, Any] = {}
    for name, each in rows.items():
        rates = [row.get("bytes_per_s", moved / row["seconds"]) for row in each]
        if None not in rates:
            found[name] = statistics.median(rates)
            show(name, {"bytes_per_s": found[name]}, "bytes_per_s")
    best_fio = max((rate for name, rate in found.items() if name.startswith("fio")), default=None)
    ours = max(rate for name, rate in found.items() if name.endswith("no checksum"))
    value = None if best_fio is None else ours / best_fio
    run.at_least("single path, mixed, over fio", value, 0.9, "fio is not installed")
    return found


# The engine over throttled paths

BASE = 400.0
"""MB/s each way."""


@contextlib.contextmanager
def session(run: Run, rates: Sequence[float], *, slots: int = 4, cut: int = 1, **more: Any) -> Iterator[Session]:
    """Yield a session over paths of such rates, in some subgroups, or `cut` times as many smaller ones."""
    model = Model(6, 1 << 14) if run.smoke else Model(40 * cut, (1 << 20) // cut)
    paths = tuple(Pace(rate, rate) for rate in rates)
    configuration = Configuration(0.0, paths, slots, min(2, cores()), **more)
    with sessions(run.folder, model, lambda _: None, [configuration]) as (one,):
        yield one


def steady_s(run: Run, one: Session) -> float:
    return statistics.median(one.waited_s() for _ in range(1 if run.smoke else 5))


def several(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parts in {"1": [1], "1+1": [1, 1], "1+1+1": [1, 1, 1], "3+2+1": [1, 2 / 3, 1 / 3]}.items():
        with session(run, [BASE * part for part in parts]) as one:
            checksum, step_s = one.warm_up(), steady_s(run, one)
            of_sum = one.least_bytes / step_s / (sum(parts) * BASE * MB)
        found[name] = {"step_s": step_s, "of_sum": of_sum, "checksum": checksum}
        show(f"emulated {name}", found[name], "step_s", "of_sum")
    run.at_least("two equal paths over one (emulated)", found["1"]["step_s"] / found["1+1"]["step_s"], 1.9)
    run.at_least("paths of 3:2:1 over their sum (emulated)", found["3+2+1"]["of_sum"], 0.9)
    run.checksums.append(run.same("the weights depend on the paths", (each["checksum"] for each in found.values())))
    return found


def traffic(run: Run) -> dict[str, Any]:
    with session(run, [2000.0, 1000.0]) as one:
        one.warm_up()
        metrics, least = one.engine.metrics(), one.least_bytes
    found = {"least_bytes": least}
    for verb in ("read", "write"):
        found[verb] = sum(int(metrics[f"path/{number}/{verb}_bytes"]) for number in range(2))
        run.at_most(f"bytes {verb} in a step over the least possible", found[verb] / least, 1.01)
    show("bytes", found, "read", "write", "least_bytes")
    return found


def overlap(run: Run) -> dict[str, Any]:
    # Filling and draining cost about one subgroup each, so there are many small ones.
    subgroups = 6 if run.smoke else 160
    found: dict[str, Any] = {}
    for share in (0.1, 0.5, 0.8):
        slots = max(1, round(share * subgroups))
        with session(run, [BASE], slots=slots, cut=4) as one:
            io_s = one.model.numel * EXACT_ADAMW.item_bytes / (BASE * MB)
            times = []
            for _ in range(4 if run.smoke else 8):
                time.sleep(io_s)  # forward and backward, as long as the I/O
                times.append(one.waited_s())
        step_s, bound = statistics.median(times[3:]), 1 - slots / subgroups
        found[str(share)] = {"step_s": step_s, "io_s": io_s, "ratio": step_s / io_s, "bound": bound}
        show(f"emulated, A/S = {1 - bound:.2f}", found[str(share)], "step_s", "io_s", "ratio", "bound")
        run.at_most(f"exposed step over (1 - A/S) of the I/O, A/S = {share}", step_s / io_s / bound, 1.1)
    return found


def cpu(run: Run) -> dict[str, Any]:
    subgroups, numel, rounds = (6, 1 << 14, 2) if run.smoke else (24, 1 << 21, 9)
    gradients = [torch.randn(numel).bfloat16() for _ in range(subgroups)]
    settings: dict[str, dict[str, Any]] = {
        "resident": {"host_memory": 24 * numel * subgroups},
        "checksums": {"host_memory": 0},
        "no checksums": {"host_memory": 0, "checksum": False},
    }
    trained = {}

    def step(name: str) -> Row:
        weights, optimizer = trained[name]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        before_s = time.process_time()
        optimizer.step()
        cpu_s, metrics = time.process_time() - before_s, optimizer.metrics()
        return {"cpu_s": cpu_s, "bytes": sum(metrics.get(f"path/0/{verb}_bytes", 0) for verb in ("read", "write"))}

    with contextlib.ExitStack() as stack:
        for name, more in settings.items():
            torch.manual_seed(0)
            weights = [torch.nn.Parameter(torch.randn(numel).bfloat16()) for _ in range(subgroups)]
            config = offload.OffloadConfig(
                paths=[run.folder], subgroup_numel=numel, staging_memory=4 * 12 * numel, **more
            )
            trained[name] = weights, stack.enter_context(offload.AdamW(weights, lr=1e-3, offload=config))
        rows = rows_of_rounds({name: partial(step, name) for name in settings}, rounds, settling=4)
    run.same("the weights depend on where state lies", (digest(weights) for weights, _ in trained.values()))
    found: dict[str, Any] = {}
    for name in ("checksums", "no checksums"):
        pairs = zip(rows[name], rows["resident"], strict=True)
        beyond = [1e9 * (took["cpu_s"] - alone["cpu_s"]) / took["bytes"] for took, alone in pairs]
        found[name] = {"cpu_s_per_gb": statistics.median(beyond)}
        show(name, found[name], "cpu_s_per_gb")
    return found


if __name__ == "__main__":
    main(
        __doc__,
        sections={
            "single": single,
            "sum": several,
            "traffic": traffic,
            "overlap": overlap,
            "cpu": cpu,
        },
        path=True,
        device="cpu",
        needs=lambda args: {"single": [FIO]} if "single" in args.sections else {},
    )
