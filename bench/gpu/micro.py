"""Measurements of the package that decide how the engine should use a GPU; each prints one line of JSON.

    update   updates of state on the GPU, in each format of it: elements and bytes a second
    leaving  gradients that leave during a backward of matrix products: which streams and priorities cost least?
    calls    the host's cost of each call of `offload.protocols.Device`, and of a gradient's arrival
    forward  a forward pass bound by launches, with the last iteration's step going on behind it, and without

`python bench/gpu/micro.py NAME [--accelerator late]`. `links.py` beside it needs torch alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch
from _accelerator import Cuda, Found, Late, Measurement, Pinned, spread, take
from _worker import SETTINGS

import offload
from offload.backends import BACKENDS, Backend
from offload.device.accelerator import AcceleratorDevice
from offload.dtypes import DtypeCode
from offload.formats import EXACT_ADAMW, FORMATS, Format
from offload.kernels import blocks_numel
from offload.kernels.gpu import device_kernel
from offload.kernels.table import trial_items, trial_table
from offload.memory.arenas import Arena
from offload.protocols import DeviceLane
from offload.rules import ADAMW


def known(gpu: Cuda) -> None:
    """Let the package run on the test accelerator, if that is the device."""
    if isinstance(gpu, Late):
        from accelerator import late

        BACKENDS["late"] = Backend(pin=late.pin, unpin=late.unpin)


def update(gpu: Cuda) -> Found:
    """AdamW's update of a segment whose tensors are far larger than caches, gradient and weight in bf16."""
    numel, launches, rounds = (5120, 1, 2) if gpu.smoke else (1 << 27, 4, 9)
    known(gpu)
    kernel, stream = device_kernel(gpu.device), gpu.stream()
    found: Found = {"elements": numel}
    for state_format in FORMATS:
        state = EXACT_ADAMW.stored_in(state_format)
        items = trial_items(state)
        tensors = {name: some_stored(gpu, name, stored, numel) for name, stored in items.items()}
        table = trial_table(state, {name: tensor.data_ptr() for name, tensor in tensors.items()}, numel)
        samples = []
        for number in range(rounds + 1):  # the first compiles
            gpu.wait()
            with gpu.on(stream):
                began = gpu.event(stream)
                for _ in range(launches):
                    kernel.update(kernel.send(table))
                ended = gpu.event(stream)
            gpu.wait()
            if number:
                samples.append(launches * numel * 1e3 / max(began.elapsed_time(ended), 1e-3))
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
    known(gpu)
    kernel = device_kernel(gpu.device)
    left, right = (torch.randn(side, side, device=gpu.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    gradients = [torch.randn(numel, device=gpu.device).to(torch.bfloat16) for _ in range(3)]
    memory = Pinned(gpu, 3 * 2 * numel)
    host = [memory.take(2 * numel).view(torch.bfloat16) for _ in range(3)]
    blocks = torch.empty(blocks_numel(numel), dtype=torch.float64, device=gpu.device)

    def passes(way: str, priority: int) -> tuple[float, float]:
        """Return the products' seconds, and those from the first gradient to the last one's arrival."""
        main, norms = gpu.stream(), gpu.stream(priority)
        copies = gpu.stream(priority) if way == "two streams" else norms
        gpu.wait()
        begun = first = last = gpu.event(main)
        for number in range(count):
            with gpu.on(main):
                torch.mm(left, right, out=out)
                torch.mm(left, right, out=out)
                arrived = gpu.event(main)
            if way == "none":
                continue
            gradient, target = gradients[number % 3], host[number % 3]
            norms.wait_event(arrived)
            if copies is not norms:
                copies.wait_event(arrived)
            if number == 0:
                first = gpu.event(norms)
            with gpu.on(norms):
                if way != "copies alone":
                    kernel.gather(gradient.data_ptr(), DtypeCode.BFLOAT16, numel, blocks.data_ptr())
            with gpu.on(copies):
                target.copy_(gradient, non_blocking=True)
        computed = gpu.event(main)
        if way != "none":
            last = gpu.event(copies)
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
    memory.close()
    found: Found = {"bytes of a gradient": 2 * numel, "gradients": count}
    for (way, priority), each in times.items():
        label = f"{way}, priority {priority}"
        found[f"{label}: products, s"] = spread([products for products, _ in each])
        if way != "none":
            found[f"{label}: gradients, bytes/s"] = spread([2 * numel * count / max(s, 1e-9) for _, s in each])
    return found


def calls(gpu: Cuda) -> Found:
    """Seconds of the host's thread for each call, with the device idle enough that none has to wait."""
    count, nbytes, numel = (20, 1 << 12, 4096) if gpu.smoke else (200, 1 << 20, 1 << 20)
    known(gpu)
    device, host = AcceleratorDevice(gpu.device), Arena(2 * nbytes)
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
        with offload.AdamW(drawn, offload=config, **SETTINGS) as optimizer:
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


class Block(torch.nn.Module):
    """A layer whose launches take longer than its work.

    Args:
        width: Of its matrix.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.line = torch.nn.Linear(width, width, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = given + torch.nn.functional.gelu(self.line(self.norm(given)))
        return found


def forward(gpu: Cuda) -> Found:
    """Milliseconds of a forward pass on the host and on the GPU, of its input's copy, and of the whole iteration."""
    known(gpu)
    width, depth, iterations, skipped = (64, 2, 3, 1) if gpu.smoke else (4096, 60, 7, 3)
    found: Found = {}
    for how in ("off", "forward"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Block(width) for _ in range(depth))).to(gpu.device, torch.bfloat16)
        memory = Pinned(gpu, 2 * 16 * width)
        given = memory.take(2 * 16 * width).view(torch.bfloat16).view(16, width)
        given.copy_(torch.randn(16, width))
        config = offload.OffloadConfig(gpu_memory=0, keep_grads=False)
        taken: dict[str, list[float]] = {}
        with offload.AdamW(model.parameters(), offload=config, **SETTINGS) as optimizer:
            if how == "forward":
                optimizer.overlap_forward(model)
            for number in range(iterations):
                if how == "off":
                    gpu.wait()
                stream = torch.accelerator.current_stream()
                began_s, begun = time.perf_counter(), gpu.event(stream)
                there = given.to(gpu.device, non_blocking=True)
                copied = gpu.event(stream)
                loss = model(there).float().square().mean()
                computed = gpu.event(stream)
                host_s = time.perf_counter() - began_s
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if how == "off":
                    gpu.wait()
                computed.synchronize()
                if number < skipped:
                    continue
                shown = {
                    "host": 1e3 * host_s,
                    "gpu": copied.elapsed_time(computed),
                    "input": begun.elapsed_time(copied),
                    "iteration": 1e3 * (time.perf_counter() - began_s),
                }
                for name, milliseconds in shown.items():
                    taken.setdefault(name, []).append(milliseconds)
            optimizer.finish()
            gpu.wait()
            metrics = optimizer.metrics()
        found |= {f"{how}: {name}, ms": spread(values)["median"] for name, values in taken.items()}
        found |= {f"{how}: step, ms": 1e3 * metrics["step_s"]}
        memory.close()
    return found


MEASUREMENTS: dict[str, Measurement] = {"update": update, "leaving": leaving, "calls": calls, "forward": forward}

if __name__ == "__main__":
    take(MEASUREMENTS, str(__doc__))
