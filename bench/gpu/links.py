"""Measurements with torch alone, taken while the package is being built; each prints one line of JSON.

    machine  host memory before and after much of it is touched, and what the device says of itself
    pinning  registering host memory: seconds, chunks and threads; does a copy of it return at once?
    duplex   copies of a subgroup's state: each way alone, both, both beside matrix products
    behind   a small table behind large copies: on another stream, on the same, behind chunks, read by a kernel
    host     the host's cost of an event, a wait, a query and a copy; after how many calls a queue is full
    streams  which pairs of streams hold each other up, with the connections of CUDA_DEVICE_MAX_CONNECTIONS

`python bench/gpu/links.py NAME [--accelerator late]`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _accelerator import HOST, HUGE_PAGE_BYTES, Cuda, Found, Late, Measurement, Pinned, cuda, spread, take, tensor_at

SUBGROUP_BYTES = 12 << 24
TABLE_BYTES = 1 << 17
CHUNK_BYTES = 32 << 20

TOUCHED_BYTES = 100 << 30
TOUCH_S = 30.0
SPARE_BYTES = 6 << 30
"""Memory that touching leaves available."""


def machine(gpu: Cuda) -> Found:
    """What there is. A virtual machine's memory may grow as it is used: what comes after finds it grown."""

    def total() -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available() -> int:
        line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
        return int(line.split()[1]) << 10

    before, began_s = total(), time.monotonic()
    held: list[mmap.mmap] = []
    last_s = began_s
    while not gpu.smoke and len(held) << 30 < TOUCHED_BYTES and time.monotonic() - began_s < TOUCH_S:
        if available() > SPARE_BYTES:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            held.append(mmap.mmap(-1, 1 << 30, flags=flags))
            last_s = time.monotonic()
        elif time.monotonic() - last_s > 3.0:
            break
        else:
            time.sleep(0.1)
    seconds = time.monotonic() - began_s
    found = {"host_before_bytes": before, "host_after_bytes": total(), "touched_bytes": len(held) << 30}
    for piece in held:
        piece.close()
    cores = len(os.sched_getaffinity(0))
    return found | {"touch_s": seconds, "cores": cores, "torch": torch.__version__} | gpu.facts()


def pinning(gpu: Cuda) -> Found:
    """Registering anonymous memory, and what a copy from it costs the host."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = 1 << 22 if gpu.smoke else min(8 << 30, available // 4) >> 30 << 30 or 1 << 30
    libc = ctypes.CDLL(None)
    found: Found = {"bytes": total}

    def touch(address: int, nbytes: int) -> None:
        libc.memset(ctypes.c_void_p(address), 0, ctypes.c_size_t(nbytes))

    def in_threads(work: Callable[[int, int], None], address: int, threads: int) -> None:
        each = total // threads
        started = [threading.Thread(target=work, args=(address + n * each, each)) for n in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    for label, touched, chunks, huge in (
        ("fresh", 0, 1, False),
        ("huge pages", 0, 1, True),
        ("huge pages touched by 8 threads", 8, 1, True),
        ("the same, 4 chunks by 4 threads", 8, 4, True),
    ):
        memory = mmap.mmap(-1, total + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(view) + -ctypes.addressof(view) % HUGE_PAGE_BYTES
        codes: list[int] = []

        def register(at: int, nbytes: int, codes: list[int] = codes) -> None:
            codes.append(gpu.register(at, nbytes))

        began_s = time.perf_counter()
        if touched:
            in_threads(touch, address, touched)
        touched_s = time.perf_counter()
        in_threads(register, address, chunks)
        took_s = time.perf_counter() - touched_s
        found[label] = {"touch_s": touched_s - began_s, "register_s": took_s, "codes": sorted(codes)}
        if not any(codes):
            size = min(total // chunks, SUBGROUP_BYTES)
            source = tensor_at(address, size, HOST)
            there = torch.empty_like(source, device=gpu.device)
            gpu.wait()
            began_s = time.perf_counter()
            there.copy_(source, non_blocking=True)
            found[label]["copy_returns_after_s"] = time.perf_counter() - began_s
            gpu.wait()
            found[label]["copied_after_s"] = time.perf_counter() - began_s
            found[label]["is_pinned"] = isinstance(gpu, Late) or source.is_pinned()
            for number in range(chunks):
                gpu.unregister(address + number * (total // chunks))
        del view
        memory.close()
    return found


def duplex(gpu: Cuda) -> Found:
    """Copies of a subgroup's state."""
    nbytes, copies, rounds = (1 << 16, 2, 2) if gpu.smoke else (SUBGROUP_BYTES, 8, 4)
    memory = Pinned(gpu, 2 * nbytes)
    host = {way: memory.take(nbytes) for way in ("h2d", "d2h")}
    there = {way: torch.empty(nbytes, dtype=torch.uint8, device=gpu.device) for way in host}
    streams = {way: gpu.stream() for way in (*host, "products")}
    side = 64 if gpu.smoke else 8192
    left = torch.ones(side, side, dtype=torch.bfloat16, device=gpu.device)
    out = torch.empty_like(left)
    samples: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for label, ways in (
            ("alone", ("h2d",)),
            ("alone", ("d2h",)),
            ("both", tuple(host)),
            ("products", tuple(host)),
        ):
            gpu.wait()
            if label == "products":
                with gpu.on(streams["products"]):
                    for _ in range(12):
                        torch.mm(left, left, out=out)
            began = {way: gpu.event(streams[way]) for way in ways}
            for _ in range(copies):
                for way in ways:
                    target, source = (there[way], host[way]) if way == "h2d" else (host[way], there[way])
                    with gpu.on(streams[way]):
                        target.copy_(source, non_blocking=True)
            ended = {way: gpu.event(streams[way]) for way in ways}
            gpu.wait()
            for way in ways if number else ():
                rate = copies * nbytes * 1e3 / max(began[way].elapsed_time(ended[way]), 1e-3)
                samples.setdefault(f"{way} {label}, bytes/s", []).append(rate)
    memory.close()
    return {"bytes": nbytes} | {name: spread(values) for name, values in samples.items()}


def behind(gpu: Cuda) -> Found:
    """Milliseconds until a table is there that is asked for behind large copies, and until these are through."""
    nbytes, rounds = (1 << 16, 1) if gpu.smoke else (SUBGROUP_BYTES, 2)
    memory = Pinned(gpu, nbytes + 2 * TABLE_BYTES)
    state, table = memory.take(nbytes), memory.take(TABLE_BYTES)
    seen = tensor_at(table.data_ptr(), TABLE_BYTES, gpu.device) if not gpu.smoke else None
    into = torch.empty(nbytes, dtype=torch.uint8, device=gpu.device)
    small = torch.empty(TABLE_BYTES, dtype=torch.uint8, device=gpu.device)
    first, second = gpu.stream(), gpu.stream()

    def large(kind: str) -> None:
        with gpu.on(first):
            if kind != "chunks":
                into.copy_(state, non_blocking=True)
                return
            for at in range(0, nbytes, CHUNK_BYTES):
                into[at : at + CHUNK_BYTES].copy_(state[at : at + CHUNK_BYTES], non_blocking=True)
                small[:8].add_(1)

    def asked(kind: str, ahead: int, fed: int) -> list[float]:
        gpu.wait()
        began = gpu.event(first)
        for _ in range(ahead):
            large(kind)
        stream = first if kind == "same stream" else second
        with gpu.on(stream):
            if kind == "kernel" and seen is not None:
                torch.add(seen, 0, out=small)
            else:
                small.copy_(table, non_blocking=True)
        there = gpu.event(stream)
        for _ in range(fed):
            large(kind)
        ended = gpu.event(first)
        gpu.wait()
        return [round(began.elapsed_time(there), 3), round(began.elapsed_time(ended), 3)]

    found: Found = {"bytes": nbytes, "table": TABLE_BYTES}
    for kind in ("other stream", "same stream", "chunks", *(["kernel"] if seen is not None else [])):
        for ahead, fed in ((0, 0), (1, 0), (4, 0), (1, 6)):
            taken = [asked(kind, ahead, fed) for _ in range(rounds)]
            found[f"{kind}, {ahead} ahead, {fed} after: table, all; ms"] = taken[-1]
    memory.close()
    return found


def host(gpu: Cuda) -> Found:
    """Microseconds of the host for torch's calls, and calls of a record that took more than a millisecond."""
    count, calls = (20, 50) if gpu.smoke else (1000, 6000)
    nbytes = 1 << 16 if gpu.smoke else SUBGROUP_BYTES
    memory = Pinned(gpu, nbytes)
    source, into = memory.take(nbytes), torch.empty(nbytes, dtype=torch.uint8, device=gpu.device)
    first, second = gpu.stream(), gpu.stream()
    event = gpu.event(first)

    def cost(call: Callable[[], Any]) -> float:
        gpu.wait()
        began_s = time.perf_counter()
        for number in range(count):
            call()
            if number % 100 == 99:
                gpu.wait()
        return round((time.perf_counter() - began_s) / count * 1e6, 2)

    def copy() -> None:
        with gpu.on(first):
            into[:4096].copy_(source[:4096], non_blocking=True)

    found: Found = {
        "record_us": cost(lambda: event.record(first)),
        "wait_event_us": cost(lambda: second.wait_event(event)),
        "query_us": cost(event.query),
        "copy_us": cost(copy),
        "tensor_at_us": cost(lambda: tensor_at(source.data_ptr(), 4096, HOST)),
    }
    gpu.wait()
    stalls = []
    with gpu.on(first):
        for _ in range(16):
            into.copy_(source, non_blocking=True)
        for number in range(calls):
            began_s = time.perf_counter()
            event.record(first)
            took_s = time.perf_counter() - began_s
            if took_s > 1e-3:
                stalls.append([number, round(took_s * 1e3, 1)])
    gpu.wait()
    memory.close()
    return found | {"stalls: call, ms": stalls[:3], "stalls": len(stalls)}


FIRST = ("UPDATE", "GRADIENTS", "PIECES")
STREAMS = ("H2D", "D2H", "LEAVING", "clock", "tables", *FIRST, "user's", "other")
"""The streams of a session in about the order in which it makes them; those of FIRST have priority."""


def streams(gpu: Cuda) -> Found:
    """Pairs of streams of which one's work waits for the other's, which waits for an event."""
    made = [gpu.stream(-1 if name in FIRST else 0) for name in STREAMS]
    blocker, nbytes = gpu.stream(-1), 1 << 16
    memory = Pinned(gpu, nbytes)
    source = memory.take(nbytes)
    there = [torch.zeros(nbytes, dtype=torch.uint8, device=gpu.device) for _ in made]

    def work(kind: str, number: int) -> Any:
        with gpu.on(made[number]):
            if kind == "h2d":
                there[number].copy_(source, non_blocking=True)
            elif kind == "d2h":
                source.copy_(there[number], non_blocking=True)
            else:
                there[number].add_(1)
        return gpu.event(made[number])

    def held_up(first: str, second: str) -> list[str]:
        found = []
        for waits in range(len(made)):
            for asked in range(len(made)):
                if waits == asked:
                    continue
                gpu.wait()
                with gpu.on(blocker):
                    cuda._sleep(6_000_000)
                gate = gpu.event(blocker)
                made[waits].wait_event(gate)
                work(first, waits)
                work(second, asked).synchronize()
                if gate.query():
                    found.append(f"{STREAMS[asked]} behind {STREAMS[waits]}")
        return found

    found: Found = {"connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")}
    for first in ("h2d", "d2h", "kernel"):
        for second in ("h2d", "kernel"):
            work(first, 0)
            work(second, 1)
            pairs = held_up(first, second)
            found[f"{second} behind {first}"] = [len(pairs), pairs[:3]]
    memory.close()
    return found


MEASUREMENTS: dict[str, Measurement] = {
    "machine": machine,
    "pinning": pinning,
    "duplex": duplex,
    "behind": behind,
    "host": host,
    "streams": streams,
}


if __name__ == "__main__":
    take(MEASUREMENTS, str(__doc__))
