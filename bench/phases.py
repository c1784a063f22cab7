"""Training whose memory is lent to others between steps, as reinforcement learning lends it to its rollouts.

Sections, each of which can be run alone (`--sections phases,serial,duplex`):

  phases  park, hold, unpark, step, with none, half and all of the state resident, each in a process of its own.
          Memory is the process's by the kernel's count (PSS, shared memory included); while it is parked, a second
          process in the same control group takes what was given back, under a limit that has no other room for it.
  serial  the step beside a loop that reads, updates and writes bucket after bucket, as disk tiers of such systems
          do: the same disk, the same bytes (counted by the kernel), the same kernel and bits. Exact state, and
          `compact8`.
  duplex  the same over an emulated path that reads and writes at once, each at a pace of its own.

What is promised are times over what the disk and memory allow: rates of reads and writes, alone and mixed, and of
touching memory are measured in the same run, between the rounds. Figures are medians over rounds.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from _common import cores, kernel_io, moved, progress
from _harness import (
    Option,
    Row,
    Run,
    column,
    digest,
    in_process,
    main,
    medians,
    ratio,
    rows_of_rounds,
    show,
)
from _sessions import GROUP, MB, MIB, Throttles, quarter_staged
from _throttled import Lanes
from capacity import Group, made_group
from paths import Mixer, opened

import offload
from offload.formats import EXACT_ADAMW
from offload.kernels import CpuUpdateKernel
from offload.kernels.reference import SegmentTensors, scalars, segment_table
from offload.memory.arenas import Arena
from offload.protocols import SegmentFlag

SHARES = (0.0, 0.5, 1.0)
NO_LIMIT = 1 << 50

PARK_S = 0.05
"""What a park may take beside what it writes."""

GONE_BYTES, GONE_BYTES_EACH = 64 << 20, 0.02
"""What a parked process may hold beyond what it held without the optimizer: of its own, and for each parameter."""

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WIDTH = 1024
DIRECT_BYTES = 8 * MIB
"""Of one request of the serial loop; so many of its threads have one in flight:"""
DIRECT_THREADS = 4


OPTIONS = (
    Option("numel", 1 << 28, 1 << 19, "parameters"),
    Option("weights", 16, 4, "tensors that they are in, in the section on phases"),
    Option("rounds", 5, 2, "of phases; steps of the loop are twice as many"),
    Option("tile_bytes", 8 * MIB, MIB, "of the tiles that measure the disk"),
    Option("tiles", 64, 4, "that measure it"),
    Option("touched_bytes", 512 << 20, 1 << 20, "that measure touching"),
)


class Disk:
    """What the disk and memory reach, as bytes per second.

    Args:
        folder: On the disk.
        size: The options: how much is moved.
    """

    def __init__(self, folder: Path, size: Any) -> None:
        self._ends = contextlib.ExitStack()
        tier, queue = self._ends.enter_context(opened(folder, io_backend="threads"))
        self._mixer = Mixer(tier, queue, size.tile_bytes, 4, max(8, size.tiles // 4), verify=False)
        self._size = size
        self.rates: dict[str, list[float]] = {"read": [], "write": [], "mixed": []}

    def measure(self) -> None:
        """Add a measurement of each rate."""
        for name, ways in {"read": (True, False), "write": (False, True), "mixed": (True, True)}.items():
            started_s = time.perf_counter()
            self._mixer.run(self._size.tiles, *ways)
            nbytes = sum(ways) * self._size.tiles * self._size.tile_bytes
            self.rates[name].append(nbytes / (time.perf_counter() - started_s))

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(rates) for name, rates in self.rates.items()}

    def close(self) -> None:
        self._ends.close()


def touching_bytes_per_s(nbytes: int) -> float:
    """Return how fast memory is touched that the process does not have yet."""
    arena = Arena(nbytes)
    started_s = time.perf_counter()
    arena.touch()
    seconds = time.perf_counter() - started_s
    arena.close()
    return nbytes / seconds


# Phases, in a process of their own


def held_bytes() -> int:
    """Return the memory of this process by the kernel's count: its own, and its part of what is shared."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


BESIDE_BYTES = 64 << 20
"""Room in a control group beside a process that is not parked: less than what it gives back."""

TAKER = """
import mmap, pathlib, sys
pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(memory), mmap.PAGESIZE):
    memory[at] = 1
"""


def taken_by_another(group: Group | None, before_bytes: int, given_bytes: int) -> bool | None:
    """Return whether another process can take what this one has given back; None without a control group.

    Args:
        group: Of both.
        before_bytes: What this process held before it was parked; its group has room for `BESIDE_BYTES` more.
        given_bytes: What it gave back.
    """
    if group is None:
        return None
    group.limit(before_bytes + BESIDE_BYTES)
    try:
        done = subprocess.run([sys.executable, "-c", TAKER, str(int(0.95 * given_bytes))], check=False)
    finally:
        group.limit(NO_LIMIT)
    return done.returncode == 0


class Training:
    """Iterations over weights whose gradients are always the same: nothing but the optimizer takes time."""

    def __init__(self, size: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = size.numel // size.weights // WIDTH, WIDTH
        self.weights = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for _ in range(size.weights)
        ]
        self.gradient = torch.randn(shape, generator=generator).bfloat16()
        self.optimizer: Any = None

    def backward(self) -> None:
        for weight in self.weights:
            weight.backward(self.gradient)

    def iteration(self) -> dict[str, float]:
        """Make one; return what it took and moved."""
        before, started_s = kernel_io(), time.perf_counter()
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer.finish()
        return {"seconds": time.perf_counter() - started_s, **moved(before)}


def child(request: dict[str, Any]) -> dict[str, Any]:
    """Run the phases of one resident share."""
    size, share, folder = SimpleNamespace(**request), request["share"], Path(request["folder"])
    group = Group(Path(request["group"]), request["version"]) if request["group"] else None
    if group is not None:
        group.join()
    training = Training(size)
    disk = Disk(folder, size)
    # What every optimizer of torch loads, and a first iteration.
    plain = torch.optim.SGD(training.weights, lr=0.0)
    training.backward()
    plain.step()
    plain.zero_grad()
    disk.measure()
    base_bytes = held_bytes()
    path = folder / "path"
    path.mkdir()
    config = offload.OffloadConfig(host_memory=int(12.6 * size.numel * share), paths=[path])
    rounds: list[dict[str, Any]] = []
    with offload.AdamW(training.weights, **SETTINGS, offload=config) as optimizer:
        training.optimizer = optimizer
        for _ in range(3):
            training.iteration()
        for number in range(size.rounds + 1):
            usual = [training.iteration() for _ in range(2)]
            before_bytes, before, started_s = held_bytes(), kernel_io(), time.perf_counter()
            optimizer.park()
            one: dict[str, Any] = {"park_s": time.perf_counter() - started_s, **moved(before)}
            said = optimizer.metrics()
            one |= {name.removeprefix("park/"): value for name, value in said.items() if name.startswith("park/")}
            one["before_bytes"], one["beyond_bytes"] = before_bytes, held_bytes() - base_bytes
            if number == 0:
                another = taken_by_another(group, before_bytes, int(one["given_back_bytes"]))
            disk.measure()
            one["touching_bytes_per_s"] = touching_bytes_per_s(size.touched_bytes)
            started_s = time.perf_counter()
            optimizer.unpark()
            one["unpark_s"] = time.perf_counter() - started_s
            one["first"] = training.iteration()
            one["usual"] = [*usual, *(training.iteration() for _ in range(2))]
            # Behind the caller.
            started_s = time.perf_counter()
            optimizer.park(wait=False)
            one["returns_s"] = time.perf_counter() - started_s
            while not optimizer.engine.is_parked:
                time.sleep(0.001)
            one["gone_s"] = time.perf_counter() - started_s
            one["gone_beyond_bytes"] = held_bytes() - base_bytes
            training.iteration()
            if number > 0:  # the first makes files and memory of the machine's host
                rounds.append(one)
        found = {
            "rounds": rounds,
            "rates": {**disk.medians(), "touching": statistics.median(o["touching_bytes_per_s"] for o in rounds)},
            "base_bytes": base_bytes,
            "taken_by_another": another,
            "state_bytes": said["state_bytes"],
            "resident_bytes": said["resident_bytes"],
            "checksum": digest(training.weights),
        }
    disk.close()
    return found


def summed_up(found: Row) -> dict[str, float]:
    """Return the medians of rounds, and what rates allow."""
    rounds, rates = found["rounds"], found["rates"]
    for one in rounds:
        usual = medians(one["usual"])
        one["usual_s"] = usual["seconds"]
        one["excess_s"] = one["unpark_s"] + one["first"]["seconds"] - usual["seconds"]
        one["read_back_bytes"] = one["first"]["read_bytes"] - usual["read_bytes"]
        taking_s = one["given_back_bytes"] / rates["touching"]
        one["back_bound_s"] = one["read_back_bytes"] / rates["read"] + taking_s
        one["over_prediction"] = one["excess_s"] / one["predicted_back_s"]
        # Bytes of ordinary steps: half of them were before the park.
        moved_bytes = [each["read_bytes"] + each["write_bytes"] for each in one["usual"]]
        first, last = sum(moved_bytes[: len(moved_bytes) // 2]), sum(moved_bytes[len(moved_bytes) // 2 :])
        one["bytes_as_before"] = last / first if first else 1.0
    figures = [{name: value for name, value in one.items() if name not in ("first", "usual")} for one in rounds]
    found["medians"] = medians(figures)
    return dict(found["medians"])


def phases(run: Run) -> Row:
    results: Row = {}
    with made_group() as group:
        for share in SHARES:
            where = f"{share:.0%} resident"
            progress(where)
            request = {
                **run.options,
                "share": share,
                "folder": str(run.place()),
                "group": str(group.folder) if group else "",
                "version": group.version if group else 0,
            }
            found = results[where] = in_process(__file__, request)
            m, rates = summed_up(found), found["rates"]
            show(f"{where}, parked", m, "park_s", "write_bytes", "given_back_bytes", "beyond_bytes")
            show("  back later than a usual step", m, "excess_s", "usual_s", "predicted_back_s", "back_bound_s")
            show("  wait=False", m, "returns_s", "gone_s")
            # The bytes alone are a bound only where there are enough of them.
            bound_s = m["moved_bytes"] / rates["write"]
            slack_s = PARK_S if share < 1 else 0.0
            run.at_most(f"{where}: park over its bound", m["park_s"] / (slack_s + 1.1 * bound_s), 1.0)
            what = "bytes written by a park over those of state that left memory"
            run.at_most(f"{where}: {what}", m["write_bytes"] / m["moved_bytes"], 1.01)
            run.at_most(f"{where}: bytes of steps after a park over those before", m["bytes_as_before"], 1.01)
            what = "memory after a park beyond the process's own, over what is allowed"
            beyond, allowed = max(m["beyond_bytes"], m["gone_beyond_bytes"]), GONE_BYTES_EACH * run.args.numel
            run.at_most(f"{where}: {what}", beyond / (GONE_BYTES + allowed), 1.0)
            took = None if found["taken_by_another"] is None else float(found["taken_by_another"])
            what = "another process takes what was given back"
            run.at_least(f"{where}: {what}", took, 1.0, "no control group can be made")
            what = "what unpark and the first step take longer, over bytes and memory at their rates"
            run.at_most(f"{where}: {what}", m["excess_s"] / m["back_bound_s"], 1.2)
            away = abs(m["over_prediction"] - 1)
            run.at_most(f"{where}: the same, distance of what was predicted", away, 0.15)
            run.at_most(f"{where}: park(wait=False) over 50 ms", m["returns_s"] / PARK_S, 1.0)
            what = "memory gone after park(wait=False), over its bound"
            run.at_most(f"{where}: {what}", m["gone_s"] / (slack_s + 1.2 * bound_s), 1.0)
    digests = (found["checksum"] for found in results.values())
    run.checksums.append(run.same("the weights differ between resident shares", digests))
    return results


# Beside a serial loop


class DirectFile:
    """Buckets in a file that is read and written past the page cache, several requests at once."""

    def __init__(self, file: Path, nbytes: int) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, nbytes)
        self._pool = ThreadPoolExecutor(DIRECT_THREADS)

    def _move(self, call: Callable[..., int], memory: memoryview, offset: int) -> None:
        def one(at: int) -> None:
            part = memory[at : at + DIRECT_BYTES]
            if call(self._file, [part], offset + at) != len(part):
                raise SystemExit("a transfer of the serial loop came to less than was asked for")

        list(self._pool.map(one, range(0, len(memory), DIRECT_BYTES)))

    def read(self, memory: memoryview, offset: int) -> None:
        self._move(os.preadv, memory, offset)

    def write(self, memory: memoryview, offset: int) -> None:
        self._move(os.pwritev, memory, offset)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._file)


class BufferedFile:
    """Buckets in a file that is read and written through the page cache, synced, and read from the disk again."""

    def __init__(self, file: Path, nbytes: int) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(self._file, 0, nbytes)

    def read(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            done += os.preadv(self._file, [memory[done:]], offset + done)
        os.posix_fadvise(self._file, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def write(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            done += os.pwritev(self._file, [memory[done:]], offset + done)
        os.fdatasync(self._file)
        os.posix_fadvise(self._file, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._file)


class PacedFile:
    """A file on the emulated path: held back like what a `ThrottledTier` moves.

    Args:
        inner: The file.
        bytes_per_s: Of reads, and of writes beside them.
    """

    def __init__(self, inner: DirectFile | BufferedFile, bytes_per_s: float) -> None:
        self._inner, self._bytes_per_s, self._lanes = inner, bytes_per_s, Lanes()
        self.close = inner.close

    def _paced(self, lane: str, move: Callable[[memoryview, int], None], memory: memoryview, offset: int) -> None:
        ends_s = self._lanes.book(lane, time.monotonic(), len(memory) / self._bytes_per_s)
        move(memory, offset)
        time.sleep(max(0.0, ends_s - time.monotonic()))

    def read(self, memory: memoryview, offset: int) -> None:
        self._paced("read", self._inner.read, memory, offset)

    def write(self, memory: memoryview, offset: int) -> None:
        self._paced("write", self._inner.write, memory, offset)


DUPLEX_BYTES_PER_S = 400 * MB
"""Of reads, and of writes beside them: what the disk below has room for."""

FILES: dict[str, type[DirectFile | BufferedFile]] = {"O_DIRECT": DirectFile, "buffered": BufferedFile}


class SerialLoop:
    """A step that reads a bucket of state, updates it and writes it back before it turns to the next one.

    Args:
        folder: Where its file is.
        weight: What is updated.
        gradient: Its gradient.
        buckets: How many there are.
        kept: How many of them stay in memory: as much as the staging memory of the others.
        bytes_per_s: Of the emulated path that it is on; None for the disk itself.
    """

    def __init__(
        self,
        folder: Path,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        buckets: int,
        kept: int,
        bytes_per_s: float | None = None,
    ) -> None:
        self.numel = weight.numel() // buckets
        self.bucket_bytes = int(EXACT_ADAMW.item_bytes * self.numel)
        self.weight, self.gradient = weight, gradient
        self._arenas = [Arena(self.bucket_bytes, prefault=True) for _ in range(kept + 1)]
        self._memory = [memoryview(arena.numpy(0, arena.nbytes, np.uint8)) for arena in self._arenas]
        self._kept = kept
        self._buckets = buckets
        self._kernel = CpuUpdateKernel(threads=cores())
        self._steps = 0
        kinds = {name: kind(folder / name, buckets * self.bucket_bytes) for name, kind in FILES.items()}
        tried = {name: [math.inf, math.inf] for name in kinds}
        for _ in range(3):
            for name, file in kinds.items():
                for way, move in enumerate((file.write, file.read)):
                    started_s = time.perf_counter()
                    move(self._memory[0], 0)
                    tried[name][way] = min(tried[name][way], time.perf_counter() - started_s)
        self.chosen = min(tried, key=lambda name: sum(tried[name]))
        chosen = kinds.pop(self.chosen)
        self._file = chosen if bytes_per_s is None else PacedFile(chosen, bytes_per_s)
        for name, file in kinds.items():
            file.close()
            (folder / name).unlink()
        for number in range(buckets):
            self._fill(number)

    def _stays(self, number: int) -> bool:
        """Return whether a bucket stays in memory."""
        return number < self._kept

    def _place(self, number: int) -> int:
        """Return which memory a bucket is in."""
        return number if self._stays(number) else self._kept

    def _fill(self, number: int) -> None:
        master, *moments = self._tensors(number)
        master.copy_(self._part(self.weight, number))
        for moment in moments:
            moment.zero_()
        if not self._stays(number):
            self._file.write(self._memory[self._place(number)], number * self.bucket_bytes)

    def _tensors(self, number: int) -> list[torch.Tensor]:
        arena = self._arenas[self._place(number)]
        return [arena.tensor(4 * self.numel * n, self.numel, torch.float32) for n in range(3)]

    def _part(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor[number * self.numel : (number + 1) * self.numel]

    def _update(self, number: int) -> None:
        master, *moments = self._tensors(number)
        row = scalars(self._steps, decoupled=True, grad_scale=1.0, **SETTINGS)
        gradient, weight = self._part(self.gradient, number), self._part(self.weight, number)
        flags = SegmentFlag.ACTIVE | SegmentFlag.DECOUPLED_DECAY
        self._kernel.run(segment_table([SegmentTensors(master, moments, gradient, weight, flags, row)]))

    def step(self) -> Any:
        """Take one; return the seconds that went to each part."""
        self._steps += 1
        spent_s = {"read": 0.0, "update": 0.0, "write": 0.0}

        @contextlib.contextmanager
        def timed(what: str) -> Iterator[None]:
            started_s = time.perf_counter()
            yield
            spent_s[what] += time.perf_counter() - started_s

        for number in range(self._buckets):
            moves, at = not self._stays(number), number * self.bucket_bytes
            if moves:
                with timed("read"):
                    self._file.read(self._memory[-1], at)
            with timed("update"):
                self._update(number)
            if moves:
                with timed("write"):
                    self._file.write(self._memory[-1], at)
        return spent_s

    def close(self) -> None:
        self._file.close()
        self._kernel.close()


def bound(
    loop_bytes: float, ours_bytes: float, update_s: float, ours_update_s: float, rates: dict[str, float]
) -> float:
    """Return how many times as fast as a serial loop a step can be that does all at once, by the disk's rates."""
    serial_s = loop_bytes / rates["read"] + loop_bytes / rates["write"] + update_s
    alone_s = max(ours_bytes / rates["read"], ours_bytes / rates["write"])
    return serial_s / max(alone_s, 2 * ours_bytes / rates["mixed"], ours_update_s)


def serial(run: Run, bytes_per_s: float | None = None, part: int = 1) -> Row:
    """Run steps beside the loop, on the disk or on a path of so many bytes per second each way, emulated on it.

    With `part`, of so small a part of the parameters.
    """
    where = "" if bytes_per_s is None else "emulated duplex path, "
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(run.args.numel // part, generator=generator).bfloat16()
    gradient = torch.randn(run.args.numel // part, generator=generator).bfloat16()
    buckets = 16
    forms = ("exact", "compact8")
    disk = Disk(run.folder, run.args)
    with contextlib.ExitStack() as ends:
        ends.callback(disk.close)
        engines, weights = {}, {name: start.clone() for name in ("serial", *forms)}
        throttles = Throttles(run.folder, [math.inf if bytes_per_s is None else bytes_per_s / MB] * len(forms))
        ends.enter_context(throttles.opening())
        for form, path in zip(forms, throttles.rates, strict=True):
            opened = quarter_staged(form, path, weights[form], gradient, buckets)
            engines[form] = ends.enter_context(contextlib.closing(opened))
        kept = engines["exact"].plan.staging_slots
        loop = SerialLoop(run.folder, weights["serial"], gradient, buckets, kept, bytes_per_s)
        ends.callback(loop.close)

        loop_bytes = loop.bucket_bytes * (buckets - kept)
        update_s = {form: one.plan.state_bytes / one.rates.cpu_bytes_per_s for form, one in engines.items()}
        steps: dict[str, Callable[[], object]] = {form: partial(engines[form].step, [GROUP]) for form in forms}
        contenders = {"serial": loop.step, **steps, "disk": disk.measure}
        used = rows_of_rounds(contenders, 2 * run.args.rounds, settling=4)  # rates, staging memory
        digests = {name: digest([weight]) for name, weight in weights.items()}
    run.same("the loop and exact state came to other weights", [digests["serial"], digests["exact"]])
    rates, each = disk.medians(), {way: medians(used["serial"])[way] for way in ("read", "update", "write")}
    if bytes_per_s is not None:
        rates = {"read": bytes_per_s, "write": bytes_per_s, "mixed": 2 * bytes_per_s}
    reached = {way: loop_bytes / each[way] / rates[way] for way in ("read", "write")}
    rows: Row = {}
    found: Row = {
        "rates": rates,
        "loop": {"file": loop.chosen, "seconds": each, "of_rates": reached, "bytes": loop_bytes},
        "contenders": rows,
        "checksum": "-".join(digests.values()),
    }
    run.checksums += digests.values()
    for name in ("serial", *forms):
        figures = medians(used[name])
        row = rows[name] = {**figures, "step_s": figures["seconds"], "steps": used[name]}
        show(name, row, "step_s", "read_bytes", "write_bytes")
    show(
        "the disk", {f"{way}_bytes_per_s": rate for way, rate in rates.items()}, *(f"{w}_bytes_per_s" for w in rates)
    )
    show(f"the loop ({loop.chosen}), of the disk's rates", reached, *reached)
    both_ways = {name: row["read_bytes"] + row["write_bytes"] for name, row in rows.items()}
    for form in forms:
        times_serial = ratio(column(used["serial"], "seconds"), column(used[form], "seconds"))
        limit = bound(loop_bytes, both_ways[form] / 2, each["update"], update_s[form], rates)
        rows[form] |= {"times_serial": times_serial, "bound": limit}
        show(form, rows[form], "times_serial", "bound")
        what = f"{where}{form}: times as fast as the serial loop"
        if where and form == "exact":
            run.at_least(what, times_serial, 1.8)
        run.at_least(f"{what}, over its bound", times_serial / limit, 0.9)
    over = both_ways["exact"] / both_ways["serial"] if both_ways["serial"] else 1.0
    run.at_most(f"{where}exact: bytes over those of the serial loop", over, 1.01)
    for way in reached:
        run.at_least(f"{where}serial loop: {way}s over the disk's rate", reached[way], 0.8)
    return found


if __name__ == "__main__":
    main(
        __doc__,
        sections={"phases": phases, "serial": serial, "duplex": lambda run: serial(run, DUPLEX_BYTES_PER_S, part=4)},
        options=OPTIONS,
        path=True,
        child=child,
    )
