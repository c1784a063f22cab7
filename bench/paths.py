"""Storage paths: one against fio, several against their sum, and what of the traffic a step is seen to pay.

Sections, each of which can be run alone (`--sections single,sum`):

  single        one path, reads and writes mixed, against fio at the same block size and depth; by I/O backend
  sum           paths throttled to given rates (emulated, by a decorator) against one and against the sum
  slow          a path that slows down to a third in mid-run, against the best fixed split for the new rates
  traffic       bytes that a step moves, against the least possible
  overlap       exposed step time against the staging memory, with a pause as long as the I/O before each step
  cpu           CPU seconds that a gigabyte costs between staging memory and path, by thread, with checksums and
                without: what steps take beyond those of the same state in memory
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import shutil
import statistics
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import Target, arguments, environment, interleaved, report, run_sections
from _needs import FIO, require
from _throttled import ThrottledTier

import offload
from offload._native import CompletionQueue
from offload.memory.arenas import Arena
from offload.protocols import Tier, TileId, TileRequest
from offload.session import setup
from offload.tiers import StoreOptions, open_tier
from offload.units import format_seconds

MB = 1_000_000
MIB = 1 << 20
SLOT_HEADER = 4096
THREADS = {
    "offload-update": "update",
    "offload-ring": "I/O",
    "offload-read": "I/O",
    "offload-write": "I/O",
}
"""What a session's threads are for, by their names without numbers; the engine's and the caller's are Python's."""


# One path, tile by tile


class Mixer:
    """Keeps reads and writes of whole tiles in flight on one tier."""

    def __init__(self, tier: Tier, queue: CompletionQueue, tile_bytes: int, depth: int, slots: int) -> None:
        self.tier, self.queue, self.tile_bytes, self.depth, self.slots = tier, queue, tile_bytes, depth, slots
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
        )
        (self.tier.write if write else self.tier.read)(request)
        return request.op

    def _wait(self) -> list[int]:
        done = self.queue.wait()
        for record in done:
            if record[1]:
                raise SystemExit(f"a transfer failed with error {record[1]}")
        return [record[0] for record in done]

    def run(self, tiles: int, reads: bool = True, writes: bool = True) -> None:
        """Move `tiles` tiles each way, `depth` at a time each way."""
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
        while flying:
            for op in self._wait():
                more(*flying.pop(op))


def fio(folder: Path, block_bytes: int, depth: int, total_bytes: int, engine: str, way: str = "rw") -> float | None:
    """Return fio's bytes per second, reads and writes mixed or as `way` says ("read"); None without fio."""
    if shutil.which("fio") is None:
        return None
    jobs = depth if engine == "psync" else 1
    command = ["fio", "--name=mixed", f"--rw={way}", "--rwmixread=50", "--direct=1", "--output-format=json"]
    command += [f"--ioengine={engine}", f"--bs={block_bytes}", f"--iodepth={1 if engine == 'psync' else depth}"]
    command += [f"--numjobs={jobs}", f"--size={total_bytes // jobs}", f"--directory={folder}", "--group_reporting"]
    # Huge pages behind fio's buffers too: they decide its throughput as much as ours.
    command.append("--mem=malloc")
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "PATH": "/usr/bin:/bin:/usr/local/bin"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def backends() -> list[str]:
    found = []
    for backend in ("threads", "io_uring"):
        with contextlib.suppress(offload.ConfigError, TypeError):
            offload.OffloadConfig(io_backend=backend)
            found.append(backend)
    return found


@contextlib.contextmanager
def opened(folder: Path, backend: str, *, checksum: bool) -> Iterator[tuple[Tier, CompletionQueue]]:
    queue = CompletionQueue()
    options = StoreOptions(checksum=checksum, io_backend=backend if len(backends()) > 1 else "auto")
    tier = open_tier(str(folder), uuid.uuid4(), queue, options=options)
    try:
        yield tier, queue
    finally:
        tier.close()


def single(folder: Path, smoke: bool, targets: list[Target]) -> dict[str, Any]:
    tile, depth, tiles, rounds = (MIB, 2, 4, 2) if smoke else (8 * MIB, 4, 64, 7)
    moved = 2 * tile * tiles
    cpu_seconds: dict[str, list[float]] = {}

    def timed(mixer: Mixer, name: str) -> None:
        started_s = time.process_time()  # of all threads, the tier's included
        mixer.run(tiles)
        cpu_seconds[name].append(time.process_time() - started_s)

    with contextlib.ExitStack() as stack:
        contenders: dict[str, Callable[[], object]] = {}
        for backend, checksum in itertools.product(backends(), (True, False)):
            tier, queue = stack.enter_context(opened(folder, backend, checksum=checksum))
            mixer = Mixer(tier, queue, tile, depth, max(2 * depth, tiles // 4))
            name = f"{backend}, {'' if checksum else 'no '}checksum"
            cpu_seconds[name] = []
            contenders[name] = lambda m=mixer, name=name: timed(m, name)  # type: ignore[misc]
        rates: dict[str, list[float]] = {"fio libaio": [], "fio psync": []}

        def measure(engine: str) -> None:
            rate = fio(folder, 4 * MIB if not smoke else MIB, depth, moved, engine)
            if rate is not None:
                rates[f"fio {engine}"].append(rate)

        for engine in ("libaio", "psync"):
            contenders[f"fio {engine}"] = lambda engine=engine: measure(engine)  # type: ignore[misc]
        times = interleaved(contenders, rounds)
    cpu_s = {name: 1e9 * statistics.median(spent) / moved for name, spent in cpu_seconds.items()}
    found: dict[str, Any] = {
        name: moved / statistics.median(t) for name, t in times.items() if not name.startswith("fio")
    }
    found |= {name: statistics.median(values) for name, values in rates.items() if values}
    for name, rate in found.items():
        spent = f", {cpu_s[name]:.3f} CPU-s/GB" if name in cpu_s else ""
        print(f"  {name:<28} {rate / 1e9:6.2f} GB/s read and written{spent}")
    for name, seconds in cpu_s.items():
        found[f"{name}, CPU-s/GB"] = seconds
    best_fio = max((rate for name, rate in found.items() if name.startswith("fio")), default=None)
    ours = max(rate for name, rate in found.items() if name.endswith("no checksum"))
    value = None if best_fio is None else ours / best_fio
    targets.append(Target.at_least("single path, mixed, over fio", value, 0.9, "fio is not installed"))
    return found


# The engine over throttled paths


class Pace(NamedTuple):
    """A device to emulate.

    Attributes:
        read: MB/s of reads alone.
        write: MB/s of writes alone.
        at_once: See `ThrottledTier`.
    """

    read: float
    write: float
    at_once: int = 0

    def __str__(self) -> str:
        if self.read == math.inf:
            return "disk"
        each_way = f"{self.read:.0f}" if self.read == self.write else f"{self.read:.0f}/{self.write:.0f}"
        return f"{each_way} shared by {self.at_once}" if self.at_once else each_way


class Throttles:
    """Opens paths behind a `ThrottledTier` of the pace that each was given (or MB/s each way); an infinite one as it
    is."""

    def __init__(self, folder: Path, paces: Sequence[float | Pace]) -> None:
        self.tiers: dict[str, ThrottledTier] = {}
        self.rates: dict[str, Pace] = {}
        for number, pace in enumerate(paces):
            path = folder / f"path-{number}-{uuid.uuid4().hex[:8]}"
            path.mkdir()
            self.rates[str(path)] = pace if isinstance(pace, Pace) else Pace(pace, pace)

    def open(self, path: str, store: uuid.UUID, queue: CompletionQueue, **settings: Any) -> Tier:
        read, write, at_once = self.rates[path]
        if math.isinf(read):
            return open_tier(path, store, queue, **settings)
        inner_queue = CompletionQueue()
        inner = open_tier(path, store, inner_queue, **settings)
        rates = {"read_bytes_per_s": read * MB, "write_bytes_per_s": write * MB}
        tier = ThrottledTier(inner, inner_queue, queue, **rates, at_once=at_once)
        self.tiers[path] = tier
        return tier


class Run:
    """An engine over throttled paths with parameters of its own."""

    def __init__(
        self,
        folder: Path,
        rates: list[float],
        subgroups: int,
        staging: int,
        numel: int,
        shares: list[float] | None = None,
    ) -> None:
        self.throttles = Throttles(folder, rates)
        torch.manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(numel).bfloat16()) for _ in range(subgroups)]
        self.gradients = [torch.randn(numel).bfloat16() for _ in range(subgroups)]
        paths: list[dict[str, Any]] = [{"path": path} for path in self.throttles.rates]
        for path, share in zip(paths, shares or [], strict=False):
            path["share"] = share
        real, setup.open_tier = setup.open_tier, self.throttles.open  # type: ignore[assignment]
        try:
            config = offload.OffloadConfig(
                host_memory=0, paths=paths, subgroup_numel=numel, staging_memory=12 * numel * staging
            )
            self.optimizer = offload.AdamW(self.parameters, lr=1e-3, offload=config)
        finally:
            setup.open_tier = real
        self.state_bytes = 12 * numel * subgroups
        self.staging_bytes = 12 * numel * staging

    def step(self) -> float:
        """Take one step; return its seconds."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        started_s = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - started_s

    def steady(self, steps: int) -> float:
        for _ in range(3):
            self.step()
        return statistics.median(self.step() for _ in range(steps))

    def close(self) -> str:
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.detach().view(torch.int16).numpy().tobytes())
        self.optimizer.close()
        return digest.hexdigest()[:16]


def sizes(smoke: bool) -> tuple[int, int, int]:
    """Return (subgroups, elements of each, timed steps)."""
    return (6, 1 << 14, 1) if smoke else (40, 1 << 20, 5)


def several(folder: Path, smoke: bool, targets: list[Target]) -> dict[str, Any]:
    subgroups, numel, steps = sizes(smoke)
    base = 400.0
    found: dict[str, Any] = {}
    for name, rates in {
        "1": [base],
        "1+1": [base] * 2,
        "1+1+1": [base] * 3,
        "3+2+1": [base, base / 1.5, base / 3],
    }.items():
        run = Run(folder, rates, subgroups, 4, numel)
        step_s = run.steady(steps)
        moved = run.optimizer.metrics()["streamed_bytes"] - run.staging_bytes
        found[name] = {
            "step_s": step_s,
            "of_sum": moved / step_s / (sum(rates) * MB),
            "checksum": run.close(),
        }
        print(
            f"  emulated {name:<8} {format_seconds(step_s):>8}, {found[name]['of_sum']:.1%} of the sum of bandwidths"
        )
    targets.append(
        Target.at_least("two equal paths over one (emulated)", found["1"]["step_s"] / found["1+1"]["step_s"], 1.9)
    )
    targets.append(Target.at_least("paths of 3:2:1 over their sum (emulated)", found["3+2+1"]["of_sum"], 0.9))
    if len({each["checksum"] for each in found.values()}) != 1:
        raise SystemExit("the weights depend on the paths")
    return found


def slow(folder: Path, smoke: bool, targets: list[Target]) -> dict[str, Any]:
    subgroups, numel, steps = sizes(smoke)
    base = 400.0
    best = Run(folder, [base / 3, base], subgroups, 4, numel, [1, 3])
    best_s = best.steady(steps)
    best.close()
    run = Run(folder, [base, base], subgroups, 4, numel)
    before_s = run.steady(steps)
    path = next(iter(run.throttles.rates))
    run.throttles.tiers[path].set_rates(base / 3 * MB, base / 3 * MB)
    after = [run.step() for _ in range(5 + steps)]
    run.close()
    found = {"before_s": before_s, "after_s": after, "best_static_s": best_s}
    print(
        f"  emulated: {format_seconds(before_s)}, then {', '.join(map(format_seconds, after))}; "
        f"best fixed split {format_seconds(best_s)}"
    )
    value = statistics.median(after[4:]) / best_s
    targets.append(
        Target.at_most("from the fifth step after a path slowed to a third, over the best split", value, 1.1)
    )
    return found


def traffic(folder: Path, smoke: bool, targets: list[Target]) -> dict[str, Any]:
    subgroups, numel, _ = sizes(smoke)
    run = Run(folder, [2000.0, 1000.0], subgroups, 4, numel)
    for _ in range(4):
        run.step()
    metrics = run.optimizer.metrics()
    run.close()
    least = run.state_bytes - run.staging_bytes
    found = {"least_bytes": least}
    for verb in ("read", "write"):
        found[verb] = sum(int(metrics[f"path/{number}/{verb}_bytes"]) for number in range(2))
        targets.append(Target.at_most(f"bytes {verb} in a step over the least possible", found[verb] / least, 1.01))
    print(f"  read {found['read']:,}, written {found['write']:,}, least {least:,}")
    return found


def overlap(folder: Path, smoke: bool, targets: list[Target]) -> dict[str, Any]:
    subgroups, numel, steps = sizes(smoke)
    if not smoke:  # filling and draining cost about one subgroup each, so many small ones
        subgroups, numel = 4 * subgroups, numel // 4
    base = 400.0
    found: dict[str, Any] = {}
    for share in (0.1, 0.5, 0.8):
        staging = max(1, round(share * subgroups))
        run = Run(folder, [base], subgroups, staging, numel)
        io_s = run.state_bytes / (base * MB)
        times = []
        for _ in range(3 + steps):
            time.sleep(io_s)  # forward and backward, as long as the I/O
            times.append(run.step())
        run.close()
        step_s = statistics.median(times[3:])
        real = staging / subgroups
        found[str(share)] = {"step_s": step_s, "io_s": io_s, "ratio": step_s / io_s, "bound": 1 - real}
        print(
            f"  emulated, A/S = {real:.2f}: step {format_seconds(step_s)} of {format_seconds(io_s)} unoverlapped, "
            f"bound {1 - real:.2f}"
        )
        value = step_s / io_s / (1 - real)
        targets.append(Target.at_most(f"exposed step over (1 - A/S) of the I/O, A/S = {share}", value, 1.1))
    return found


def thread_seconds() -> Counter[str]:
    """Return the CPU seconds of this process's threads so far, by what they are for."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name = THREADS.get((task / "comm").read_text().strip().rstrip("0123456789"), "others")
            found[name] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def cpu(folder: Path, smoke: bool, targets: list[Target]) -> dict[str, Any]:
    subgroups, numel, rounds = (6, 1 << 14, 2) if smoke else (24, 1 << 21, 9)
    gradients = [torch.randn(numel).bfloat16() for _ in range(subgroups)]
    state_bytes = 12 * numel * subgroups
    settings: dict[str, dict[str, Any]] = {
        "resident": {"host_memory": 2 * state_bytes},
        "checksums": {"host_memory": 0},
        "no checksums": {"host_memory": 0, "checksum": False},
    }
    spent: dict[str, list[Counter[str]]] = {name: [] for name in settings}
    moved: dict[str, int] = {}
    digests = set()
    with contextlib.ExitStack() as stack:
        contenders: dict[str, Callable[[], object]] = {}
        trained = {}
        for name, more in settings.items():
            torch.manual_seed(0)
            weights = [torch.nn.Parameter(torch.randn(numel).bfloat16()) for _ in range(subgroups)]
            config = offload.OffloadConfig(
                paths=[folder], subgroup_numel=numel, staging_memory=4 * 12 * numel, **more
            )
            trained[name] = weights, stack.enter_context(offload.AdamW(weights, lr=1e-3, offload=config))

        def step(name: str) -> None:
            weights, optimizer = trained[name]
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient
            before = thread_seconds()
            optimizer.step()
            after = thread_seconds()
            after.subtract(before)
            spent[name].append(after)
            metrics = optimizer.metrics()
            moved[name] = sum(int(metrics.get(f"path/0/{verb}_bytes", 0)) for verb in ("read", "write"))

        for name in settings:
            contenders[name] = partial(step, name)
        interleaved(contenders, rounds + 3)
        for weights, _ in trained.values():
            digest = hashlib.sha256()
            for weight in weights:
                digest.update(weight.detach().view(torch.int16).numpy().tobytes())
            digests.add(digest.hexdigest())
    if len(digests) != 1:
        raise SystemExit("the weights depend on where state lies")
    found: dict[str, Any] = {}
    base = spent["resident"][3:]
    for name in ("checksums", "no checksums"):
        beyond = [
            {thread: 1e9 * (took[thread] - alone[thread]) / moved[name] for thread in (*took, *alone)}
            for took, alone in zip(spent[name][3:], base, strict=True)
        ]
        threads = {
            thread: statistics.median(each.get(thread, 0.0) for each in beyond)
            for thread in (*dict.fromkeys(THREADS.values()), "others")
        }
        total = statistics.median(sum(each.values()) for each in beyond)
        found[name] = {"cpu_s_per_gb": total, "threads": threads}
        parts = ", ".join(f"{thread} {seconds:+.4f}" for thread, seconds in threads.items())
        print(f"  {name:<13} {total:.4f} CPU-s/GB ({parts})")
    found["update_cpu_s_per_gb"] = 1e9 * statistics.median(each["update"] for each in base) / state_bytes
    print(f"  the update alone takes {found['update_cpu_s_per_gb']:.4f} CPU-s/GB of state")
    return found


SECTIONS: dict[str, Callable[[Path, bool, list[Target]], dict[str, Any]]] = {
    "single": single,
    "sum": several,
    "slow": slow,
    "traffic": traffic,
    "overlap": overlap,
    "cpu": cpu,
}


def main() -> None:
    args = arguments(__doc__, path=True, sections=SECTIONS).parse_args()
    require(args, {"single": [FIO]} if "single" in args.sections else {})
    described = environment(device="cpu")
    results, targets = run_sections(args, SECTIONS, args.smoke)
    checksum = results.get("sum", {}).get("1", {}).get("checksum", "none of the chosen sections computes")
    report(args, described, results, checksum, targets)


if __name__ == "__main__":
    main()
