"""Measurements that decide how the engine should use a GPU; each prints one line of JSON.

    duplex   copies of a subgroup's state each way, alone and both at once
    behind   a small copy to the GPU behind large ones on another stream: does it wait for them?
    update   updates of state on the GPU, in each format of it: elements and bytes a second
    leaving  gradients that leave during a backward of matrix products: which streams and priorities cost least?
    pinning  registering host memory: fresh, touched before, in chunks, by several threads
    calls    the host's cost of each call of `offload.protocols.Device`, and of a gradient's arrival

`python bench/gpu/micro.py NAME`. With `--simulated` everything runs on the CPU, on streams that are none: that shows
that it runs, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from _gpu_runs import SETTINGS, simulated_adamw

import offload
from offload.dtypes import DtypeCode
from offload.formats import EXACT_ADAMW, FORMATS, Format
from offload.kernels import GpuUpdateKernel, blocks_numel
from offload.kernels.table import trial_items, trial_table
from offload.memory.arenas import Arena
from offload.protocols import DeviceLane
from offload.rules import ADAMW
from offload.sim import SimulatedDevice

Found = dict[str, Any]
SUBGROUP_BYTES = 12 << 24
TABLE_BYTES = 1 << 17


class HostEvent:
    """Stands for an event where work is done when it is asked for."""

    def record(self, stream: Any = None) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, later: HostEvent) -> float:
        return max(1e3 * (later.at_s - self.at_s), 1e-3)

    def synchronize(self) -> None:
        return


class Cuda:
    """Streams, events and memory of the current device.

    Attributes:
        device: Where tensors are made.
        smoke: Whether sizes are tiny.
    """

    def __init__(self, smoke: bool) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.smoke = smoke

    def stream(self, priority: int = 0) -> Any:
        return torch.cuda.Stream(self.device, priority=priority)

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def follow(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)

    def register(self, address: int, nbytes: int) -> int:
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 1))
        if code:
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=self.device).add_(1)  # a launch takes the error, else the next is blamed for it
        return code

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def lanes(self) -> Any:
        from offload.device.accelerator import AcceleratorDevice

        return AcceleratorDevice(self.device)

    adamw: Any = offload.AdamW


class Simulated(Cuda):
    """The CPU in a device's place."""

    def __init__(self, smoke: bool) -> None:
        self.device, self.smoke = torch.device("cpu"), True
        self.adamw = simulated_adamw()

    def stream(self, priority: int = 0) -> Any:
        return None

    def on(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def event(self) -> Any:
        return HostEvent()

    def wait(self) -> None:
        return

    def follow(self, stream: Any, event: Any) -> None:
        return

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8)

    def register(self, address: int, nbytes: int) -> int:
        return 0

    def unregister(self, address: int) -> None:
        return

    def lanes(self) -> Any:
        return SimulatedDevice(1 << 28)


def spread(samples: list[float]) -> Found:
    """Return the median of some samples, and how far they are apart."""
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}


def duplex(gpu: Cuda) -> Found:
    """Copies of a subgroup's state."""
    nbytes, copies, rounds = (1 << 16, 2, 2) if gpu.smoke else (SUBGROUP_BYTES, 8, 5)
    host = {way: gpu.pinned(nbytes) for way in ("h2d", "d2h")}
    there = {way: torch.empty(nbytes, dtype=torch.uint8, device=gpu.device) for way in host}
    streams = {way: gpu.stream() for way in host}
    samples: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for ways in (("h2d",), ("d2h",), ("h2d", "d2h")):
            gpu.wait()
            events = {way: (gpu.event(), gpu.event()) for way in ways}
            for way in ways:
                events[way][0].record(streams[way])
            for _ in range(copies):
                for way in ways:
                    target, source = (there[way], host[way]) if way == "h2d" else (host[way], there[way])
                    with gpu.on(streams[way]):
                        target.copy_(source, non_blocking=True)
            for way in ways:
                events[way][1].record(streams[way])
            gpu.wait()
            for way in ways:
                rate = copies * nbytes * 1e3 / events[way][0].elapsed_time(events[way][1])
                if number:
                    samples.setdefault(f"{way} {'alone' if len(ways) == 1 else 'both'}, bytes/s", []).append(rate)
    return {"bytes of a copy": nbytes} | {name: spread(values) for name, values in samples.items()}


def behind(gpu: Cuda) -> Found:
    """A table's upload behind copies of state on another stream, and the same as a kernel's own reads."""
    large, rounds = (1 << 16, 2) if gpu.smoke else (SUBGROUP_BYTES, 9)
    state, table = gpu.pinned(large), gpu.pinned(TABLE_BYTES)
    into = torch.empty(large, dtype=torch.uint8, device=gpu.device)
    small = torch.empty(TABLE_BYTES, dtype=torch.uint8, device=gpu.device)
    found: Found = {"large": large, "small": TABLE_BYTES}
    for label, ahead, priority in (("alone", 0, 0), ("behind four", 4, 0), ("behind four, high priority", 4, -1)):
        first, second = gpu.stream(), gpu.stream(priority)
        samples, large_s = [], []
        for _ in range(rounds):
            gpu.wait()
            begun, ended, loaded = gpu.event(), gpu.event(), gpu.event()
            begun.record(second)
            with gpu.on(first):
                for _ in range(ahead):
                    into.copy_(state, non_blocking=True)
                loaded.record(first)
            with gpu.on(second):
                small.copy_(table, non_blocking=True)
                ended.record(second)
            gpu.wait()
            samples.append(begun.elapsed_time(ended) / 1e3)
            large_s.append(begun.elapsed_time(loaded) / 1e3)
        found[f"{label}, s"] = spread(samples)
        found[f"{label}: the large ones, s"] = spread(large_s)
    return found


def update(gpu: Cuda) -> Found:
    """AdamW's update of a segment whose tensors are far larger than caches, gradient and weight in bf16."""
    numel, launches, rounds = (5120, 1, 2) if gpu.smoke else (1 << 27, 4, 9)
    kernel, stream = GpuUpdateKernel(gpu.device), gpu.stream()
    found: Found = {"elements": numel}
    for state_format in FORMATS:
        state = EXACT_ADAMW.stored_in(state_format)
        items = trial_items(state)
        tensors = {name: some_stored(gpu, name, stored, numel) for name, stored in items.items()}
        table = trial_table(state, {name: tensor.data_ptr() for name, tensor in tensors.items()}, numel)
        samples = []
        for number in range(rounds + 1):  # the first compiles
            gpu.wait()
            began, ended = gpu.event(), gpu.event()
            with gpu.on(stream):
                began.record(stream)
                for _ in range(launches):
                    kernel.update(kernel.send(table))
                ended.record(stream)
            gpu.wait()
            if number:
                samples.append(launches * numel * 1e3 / began.elapsed_time(ended))
        name = state_format.name
        found[f"{name}, elements/s"] = spread(samples)
        nbytes = 2 * state.item_bytes + 2 + 2  # the weight is written only, the gradient read
        found[f"{name}, bytes/s"] = spread([nbytes * rate for rate in samples])
        del tensors  # before those of the next format
    return found


def some_stored(gpu: Cuda, name: str, stored: Format, numel: int) -> torch.Tensor:
    """Return numbers of a usual size as a tensor of a trial's stores them."""
    if stored.item_numel > 1:
        return torch.full(
            (-(-numel // stored.item_numel), stored.item_bytes), 110, dtype=torch.uint8, device=gpu.device
        )
    if stored.item_bytes == 1:
        return torch.randint(0, 256, (numel,), dtype=torch.uint8, device=gpu.device)
    dtype = torch.float32 if stored.item_bytes == 4 else torch.bfloat16
    drawn = torch.randn(numel, dtype=dtype, device=gpu.device).mul_(1e-3)
    return drawn.abs_() if name in ADAMW.roots else drawn


def leaving(gpu: Cuda) -> Found:
    """Norms and copies of gradients during matrix products, on one stream or two, at either priority."""
    side, numel, count, rounds = (64, 5000, 3, 1) if gpu.smoke else (8192, 4096 * 11008, 24, 3)
    kernel = GpuUpdateKernel(gpu.device)
    left, right = (torch.randn(side, side, device=gpu.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    gradients = [torch.randn(numel, device=gpu.device).to(torch.bfloat16) for _ in range(3)]
    host = [gpu.pinned(2 * numel).view(torch.bfloat16) for _ in range(3)]
    blocks = torch.empty(blocks_numel(numel), dtype=torch.float64, device=gpu.device)

    def passes(way: str, priority: int) -> tuple[float, float]:
        """Return the products' seconds, and those from the first gradient to the last one's arrival."""
        main, norms = gpu.stream(), gpu.stream(priority)
        copies = gpu.stream(priority) if way == "two streams" else norms
        gpu.wait()
        begun, computed, first, last = (gpu.event() for _ in range(4))
        begun.record(main)
        for number in range(count):
            with gpu.on(main):
                torch.mm(left, right, out=out)
                torch.mm(left, right, out=out)
                arrived = gpu.event()
                arrived.record(main)
            if way == "none":
                continue
            gradient, target = gradients[number % 3], host[number % 3]
            gpu.follow(norms, arrived)
            if copies is not norms:
                gpu.follow(copies, arrived)
            if number == 0:
                first.record(norms)
            with gpu.on(norms):
                if way != "copies alone":
                    kernel.gather(gradient.data_ptr(), DtypeCode.BFLOAT16, numel, blocks.data_ptr())
            with gpu.on(copies):
                target.copy_(gradient, non_blocking=True)
        computed.record(main)
        if way != "none":
            last.record(copies)
        gpu.wait()
        leaving_s = first.elapsed_time(last) / 1e3 if way != "none" else 0.0
        return begun.elapsed_time(computed) / 1e3, leaving_s

    variants = [("none", 0), ("copies alone", 0), ("one stream", 0), ("one stream", -1)]
    variants += [("two streams", 0), ("two streams", -1)]
    times: dict[tuple[str, int], list[tuple[float, float]]] = {variant: [] for variant in variants}
    for number in range(rounds + 1):
        for variant in variants:
            taken = passes(*variant)
            if number:
                times[variant].append(taken)
    found: Found = {"bytes of a gradient": 2 * numel, "gradients": count}
    for (way, priority), taken in times.items():
        label = f"{way}, priority {priority}"
        found[f"{label}: products, s"] = spread([products for products, _ in taken])
        if way != "none":
            found[f"{label}: gradients, bytes/s"] = spread([2 * numel * count / s for _, s in taken])
    return found


def pinning(gpu: Cuda) -> Found:
    """Registering anonymous memory."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    total = 1 << 22 if gpu.smoke else min(16 << 30, available // 4) >> 30 << 30 or 1 << 30
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
        ("fresh, in one call", 0, 1, False),
        ("fresh, huge pages, in one call", 0, 1, True),
        ("huge pages touched by 8 threads, in one call", 8, 1, True),
        ("huge pages touched by 8 threads, 4 chunks by 4 threads", 8, 4, True),
        ("fresh, huge pages, 4 chunks by 4 threads", 0, 4, True),
    ):
        memory = mmap.mmap(-1, total + (2 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = np.frombuffer(memory, np.uint8)
        address = view.ctypes.data + -view.ctypes.data % (2 << 20)
        codes: list[int] = []

        def register(at: int, nbytes: int, codes: list[int] = codes) -> None:
            codes.append(gpu.register(at, nbytes))

        began_s = time.perf_counter()
        if touched:
            in_threads(touch, address, touched)
        touched_s = time.perf_counter()
        in_threads(register, address, chunks)
        ended_s = time.perf_counter()
        found[label] = {"touch_s": touched_s - began_s, "register_s": ended_s - touched_s, "codes": sorted(codes)}
        if not any(codes):
            for number in range(chunks):
                gpu.unregister(address + number * (total // chunks))
            found[label]["unregister_s"] = time.perf_counter() - ended_s
        del view
        memory.close()
    return found


def calls(gpu: Cuda) -> Found:
    """Seconds of the host's thread for each call, with the device idle enough that none has to wait."""
    count, nbytes, numel = (20, 1 << 12, 4096) if gpu.smoke else (200, 1 << 20, 1 << 20)
    device, host = gpu.lanes(), Arena(2 * nbytes)
    found: Found = {"calls": count}
    try:
        device.pin(host.address, host.nbytes)
        memory, state = device.allocate(2 * nbytes), device.allocate(16 * numel)
        table = trial_table(EXACT_ADAMW, state, numel)
        blocks = device.allocate(8 * blocks_numel(numel))
        marks = [device.mark(DeviceLane.H2D)]

        def gather() -> None:
            gradient = state + 12 * numel
            device.gradient_blocks(DeviceLane.GRADIENTS, gradient, DtypeCode.BFLOAT16, numel, blocks)

        def visit(piece_bytes: int = 0) -> None:
            """Make the calls of `GpuLanes` for a visit whose state is in host memory."""
            marks.append(device.mark(DeviceLane.H2D))
            sent = device.send_table(table)
            device.copy(DeviceLane.H2D, memory, host.address, nbytes, piece_bytes)
            device.follow(DeviceLane.UPDATE, device.mark(DeviceLane.H2D))
            marks.append(device.mark(DeviceLane.UPDATE))
            device.update(sent)
            device.follow(DeviceLane.D2H, device.mark(DeviceLane.UPDATE))
            marks.append(device.mark(DeviceLane.D2H))
            device.copy(DeviceLane.D2H, host.address + nbytes, memory + nbytes, nbytes, piece_bytes)
            marks.append(device.mark(DeviceLane.D2H))

        sizes = iter(range(nbytes, 2, -2))
        work: dict[str, Callable[[], Any]] = {
            "mark": lambda: marks.append(device.mark(DeviceLane.H2D)),
            "follow": lambda: device.follow(DeviceLane.UPDATE, marks[-1]),
            "reached": lambda: marks[0].reached(),
            "copy to the GPU": lambda: device.copy(DeviceLane.H2D, memory, host.address, nbytes),
            "copy from the GPU": lambda: device.copy(DeviceLane.D2H, host.address + nbytes, memory + nbytes, nbytes),
            "copy, each of another size": lambda: device.copy(DeviceLane.H2D, memory, host.address, next(sizes)),
            "update of a segment": lambda: device.update(device.send_table(table)),
            "gradient_blocks": gather,
            "a visit": visit,
            "a visit, copied in 8 pieces each way": lambda: visit(nbytes // 8),
        }
        for name, call in work.items():
            call()  # compiles
            device.mark(DeviceLane.UPDATE).wait()
            taken, worked = [], []
            for number in range(count):
                began_s, thread_s = time.perf_counter(), time.thread_time()
                call()
                worked.append(time.thread_time() - thread_s)
                taken.append(time.perf_counter() - began_s)
                if number % 20 == 19:  # so that no queue is full
                    for lane in (DeviceLane.H2D, DeviceLane.D2H, DeviceLane.UPDATE, DeviceLane.GRADIENTS):
                        device.mark(lane).wait()
            found[f"{name}, s"] = spread(taken)
            found[f"{name}, s of the thread"] = spread(worked)
        for lane in (DeviceLane.H2D, DeviceLane.D2H, DeviceLane.UPDATE, DeviceLane.GRADIENTS):
            device.mark(lane).wait()
        device.unpin(host.address)
        for address in (memory, state, blocks):
            device.release(address)
    finally:
        device.close()
        host.close()
    return found | arrivals(gpu)


def arrivals(gpu: Cuda) -> Found:
    """Seconds of backward for each gradient that leaves, beyond those of one that stays."""
    tensors, numel, rounds = (8, 1000, 2) if gpu.smoke else (500, 1 << 16, 5)
    found: Found = {}
    taken: dict[bool, list[float]] = {True: [], False: []}
    for keep in (True, False):
        drawn = [
            torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16, device=gpu.device)) for _ in range(tensors)
        ]
        ones = [torch.ones_like(parameter) for parameter in drawn]
        config = offload.OffloadConfig(keep_grads=keep, gpu_memory=0, placement="cpu")
        with gpu.adamw(drawn, offload=config, **SETTINGS) as optimizer:
            for number in range(rounds + 1):
                gpu.wait()
                began_s = time.perf_counter()
                torch.autograd.backward(drawn, ones)
                if number:
                    taken[keep].append((time.perf_counter() - began_s) / tensors)
                optimizer.step()
                optimizer.zero_grad()
    found["backward of a gradient that stays, s"] = spread(taken[True])
    found["backward of a gradient that leaves, s"] = spread(taken[False])
    return found


MEASUREMENTS = {
    "duplex": duplex,
    "behind": behind,
    "update": update,
    "leaving": leaving,
    "pinning": pinning,
    "calls": calls,
}


def main() -> None:
    """Take one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MEASUREMENTS)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it still run?")
    parser.add_argument("--simulated", action="store_true", help="the CPU in a device's place, at smoke sizes")
    args = parser.parse_args()
    if not args.simulated and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    found = MEASUREMENTS[args.name](Simulated(True) if args.simulated else Cuda(args.smoke))
    print(json.dumps({"simulated": args.simulated, **found}))


if __name__ == "__main__":
    main()
