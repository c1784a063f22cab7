"""Tiles to and from a directory: io_uring and threads of `FileTier`, with and without checksums, beside fio.

Closed loops of some tiles in flight on slots that have been written before, O_DIRECT, huge pages: whole tiles with
header and verification on our side, requests of the same size at the same depth on fio's. Mixed means both
directions at once, from and to different slots. Every figure is the median over rounds in which all contenders
take turns; ratios are taken within a round. Processor seconds are those of the whole process, Python included.

    OFFLOAD_BENCH_DIR   the directory to measure (default: the folder for temporary files)
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _common import Target, arguments, environment, progress, report

from offload._native import CompletionQueue, IoUring
from offload.engine.memory import Arena
from offload.protocols import TileId, TileRequest
from offload.tiers import FileTier, slot_bytes

MODES = ("read", "write", "mixed")


@dataclass
class Cell:
    """One round of one contender."""

    bytes_per_s: float
    cpu_s_per_gb: float


class Store:
    """A file tier with tiles in it, and memory to move them from and to."""

    def __init__(
        self, folder: str, backend: str, tile_bytes: int, store_bytes: int, args: Any, checksum: bool
    ) -> None:
        self.queue = CompletionQueue()
        self.tier = FileTier(
            folder,
            uuid.uuid4(),
            self.queue,
            threads=args.threads,
            depth=args.depth,
            piece_bytes=args.piece_bytes,
            checksum=checksum,
            io_backend=backend,
        )
        self.tile_bytes = tile_bytes
        self.tiles = args.tiles
        self.slots = store_bytes // tile_bytes
        self.arena = Arena(2 * self.tiles * tile_bytes)
        self.arena.numpy(0, self.arena.nbytes, np.uint8)[:] = np.arange(self.arena.nbytes, dtype=np.uint8)
        if args.register:
            self.tier.register_memory(self.arena.address, self.arena.nbytes)
        for slot in range(self.slots):
            self.start("write", slot, 0)
            self.finish()
        self.tier.sync(1 << 40)
        self.finish()

    def start(self, way: str, slot: int, buffer: int) -> None:
        request = TileRequest(
            op=buffer + (0 if way == "read" else self.tiles),
            tile=TileId(0, 0, slot),
            step=0,
            offset=slot * slot_bytes(self.tile_bytes),
            address=self.arena.address + (buffer + (0 if way == "read" else self.tiles)) * self.tile_bytes,
            nbytes=self.tile_bytes,
            numel=self.tile_bytes // 4,
        )
        (self.tier.read if way == "read" else self.tier.write)(request)

    def finish(self) -> list[int]:
        records = self.queue.wait()
        for record in records:
            if record[1]:
                raise SystemExit(f"a transfer failed: {record}")
        return [record[0] for record in records]

    def run(self, mode: str, seconds: float) -> Cell:
        """Keep `tiles` tiles in flight in each direction that `mode` has."""
        ways = ("read", "write") if mode == "mixed" else (mode,)
        # Readers and writers keep to their half, for the slots of an offloaded step are never shared either.
        half = max(1, self.slots // 2)
        turn = dict.fromkeys(ways, 0)

        def start(way: str, buffer: int) -> None:
            slot = turn[way] % (half if mode == "mixed" else self.slots)
            turn[way] += 1
            self.start(way, slot + (half if mode == "mixed" and way == "write" else 0), buffer)

        before, started_s = cpu_s(), time.perf_counter()
        for way in ways:
            for buffer in range(self.tiles):
                start(way, buffer)
        in_flight = len(ways) * self.tiles
        moved = 0
        while in_flight:
            for op in self.finish():
                moved += self.tile_bytes
                if time.perf_counter() - started_s < seconds:
                    start("read" if op < self.tiles else "write", op % self.tiles)
                else:
                    in_flight -= 1
        elapsed_s = time.perf_counter() - started_s
        return Cell(moved / elapsed_s, (cpu_s() - before) / (moved / 1e9))

    def close(self) -> None:
        self.tier.close()
        self.arena.close()


class Fio:
    """The same requests without headers, checks or Python."""

    def __init__(self, folder: str, tile_bytes: int, store_bytes: int, args: Any) -> None:
        self.path = Path(folder) / f"fio-{tile_bytes}"
        self.size = store_bytes
        self.block_bytes = min(args.piece_bytes, tile_bytes)
        self.depth = args.depth
        self.fio("fill", ["--rw=write", f"--size={self.size}"], [])

    def fio(self, name: str, options: list[str], more: list[str]) -> list[dict[str, Any]]:
        shared = [f"--filename={self.path}", "--ioengine=io_uring", "--direct=1", f"--bs={self.block_bytes}"]
        shared += [
            f"--iodepth={self.depth}",
            "--mem=malloc",
            "--output-format=json",
            "--thread",
            "--scramble_buffers=0",
        ]
        done = subprocess.run(
            ["fio", *shared, f"--name={name}", *options, *more],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
            cwd=self.path.parent,
        )
        jobs: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        return jobs

    def run(self, mode: str, seconds: float) -> Cell:
        timed = ["--time_based", f"--runtime={seconds:.2f}s"]
        if mode == "mixed":
            half = self.size // 2
            options = [*timed, "--rw=read", f"--size={half}"]
            jobs = self.fio(
                "read", options, ["--name=write", *timed, "--rw=write", f"--size={half}", f"--offset={half}"]
            )
        else:
            jobs = self.fio(mode, [*timed, f"--rw={mode}", f"--size={self.size}"], [])
        bytes_per_s = cpu = moved = 0.0
        for job in jobs:
            for way in ("read", "write"):
                bytes_per_s += job[way]["bw_bytes"]
                moved += job[way]["io_bytes"]
            cpu += (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        return Cell(bytes_per_s, cpu / (moved / 1e9))

    def close(self) -> None:
        self.path.unlink()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(folder: str, tile_bytes: int, store_bytes: int, args: Any) -> dict[str, Any]:
    """Return every contender's rounds, mode by mode."""
    contenders: dict[str, Store | Fio] = {}
    try:
        for backend in ("io_uring", "threads"):
            if backend == "io_uring" and IoUring.refusal():
                continue
            for checksum in (True, False):
                name = backend + (" crc" if checksum else "")
                contenders[name] = Store(folder, backend, tile_bytes, store_bytes, args, checksum)
        if shutil.which("fio") and not args.smoke:
            contenders["fio"] = Fio(folder, tile_bytes, store_bytes, args)
        rounds: dict[str, dict[str, list[Cell]]] = {mode: {name: [] for name in contenders} for mode in MODES}
        names = list(contenders)
        for number in range(args.rounds + 1):
            for mode in MODES:
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    cell = contenders[name].run(mode, args.seconds)
                    if number > 0:
                        rounds[mode][name].append(cell)
            progress(f"{tile_bytes >> 20} MiB tiles, round {number}/{args.rounds}")
    finally:
        for contender in contenders.values():
            contender.close()
    progress("")
    found: dict[str, Any] = {}
    for mode, by_name in rounds.items():
        fio = by_name.get("fio")
        found[mode] = {}
        for name, cells in by_name.items():
            row: dict[str, Any] = {
                "gb_per_s": statistics.median(cell.bytes_per_s for cell in cells) / 1e9,
                "cpu_s_per_gb": statistics.median(cell.cpu_s_per_gb for cell in cells),
            }
            if fio:
                pairs = zip(cells, fio, strict=True)
                row["of_fio"] = statistics.median(ours.bytes_per_s / theirs.bytes_per_s for ours, theirs in pairs)
            found[mode][name] = row
            ratio = f"{row['of_fio']:6.2f}" if fio else ""
            size = f"{tile_bytes >> 20} MiB" if tile_bytes >> 20 else f"{tile_bytes >> 10} KiB"
            print(f"{size:>8} {mode:6} {name:13} {row['gb_per_s']:6.2f} {row['cpu_s_per_gb']:8.4f} {ratio}")
    return found


def content(folder: str, args: Any) -> str:
    """Return a digest of what a tile comes back as, the same from every backend."""
    digests = []
    for backend in ("threads", "io_uring"):
        if backend == "io_uring" and IoUring.refusal():
            continue
        store = Store(folder, backend, 1 << 20, 4 << 20, args, True)
        store.start("read", 3, args.tiles - 1)
        store.finish()
        found = store.arena.numpy((args.tiles - 1) << 20, 1 << 20, np.uint8).tobytes()
        digests.append(hashlib.sha256(found).hexdigest()[:16])
        store.close()
    if len(set(digests)) != 1:
        raise SystemExit(f"the backends read different bytes: {digests}")
    return digests[0]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tile-mib", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--piece-bytes", type=int, default=4 << 20)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiles", type=int, default=3, help="tiles in flight, for each direction")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.7, help="length of a contender's turn")
    parser.add_argument("--no-register", dest="register", action="store_false", help="do not name the memory")
    args = parser.parse_args()
    described = environment()
    sizes, store_bytes = [size << 20 for size in args.tile_mib], 1 << 30
    if args.smoke:
        sizes, store_bytes, args.rounds, args.seconds = [256 << 10], 4 << 20, 1, 0.02
    print("    tile mode   contender       GB/s CPU-s/GB of fio")
    with tempfile.TemporaryDirectory(dir=os.environ.get("OFFLOAD_BENCH_DIR")) as folder:
        checksum = content(folder, args)
        results = {str(size): measure(folder, size, store_bytes, args) for size in sizes}
    targets = []
    for size, found in results.items():
        name = f"mixed traffic of {int(size) >> 10} KiB tiles, of fio"
        value = found["mixed"].get("io_uring crc", {}).get("of_fio")
        targets.append(Target.at_least(name, value, 0.9, "needs fio and io_uring" if value is None else ""))
    report(args, described, results, checksum, targets)


if __name__ == "__main__":
    main()
