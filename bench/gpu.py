"""The half of the engine that needs a GPU, in sections that can be run one at a time and add to one report.

    a  rates: copies each way alone and together, updates on the CPU and on the GPU, the CPU's update beside copies
    b  the GPU's kernels against the CPU's and the reference, bit by bit, on 1e9 random elements with NaN, infinities
       and subnormals
    c  update time against the share that the GPU updates: 0 to 100%, and the planner's choice; predicted and measured
    d  iteration time and peak memory of a Llama with bf16 weights, beside no offload at all and beside other
       offloaders, each in a process of its own on the same batches (`--contenders` runs some of them)
    p  steps at every share as predicted for published machines; for a node with one H100 beside their bounds, and
       with parts of the engine changed; needs no GPU

`python bench/gpu.py --sections b --json FILE` keeps the other sections that FILE holds; each section says on what
machine, from what commit and by what command it was run. Without a CUDA device nothing but that fact is reported.
`bench/gpu/once.sh` runs this on a machine without a package index.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the smoke run's kernels; read when Triton is imported

from _common import cores, progress
from _contest import Contender, ContenderError, Worker, common_of
from _gpu_node import budgets_of, layout_of, node
from _harness import Option, Run, main, names_among
from _needs import NATIVE, TORCHAO
from _worker import gpu_share
from kernel import Buffers

import offload
from offload.cli.model import choose_shape
from offload.dtypes import DtypeCode
from offload.errors import ConfigError
from offload.formats import EXACT_ADAMW
from offload.kernels import CpuUpdateKernel, GpuUpdateKernel, blocks_numel, reference
from offload.kernels.reference import DTYPE_CODES, SegmentTensors, segment_table
from offload.kernels.table import segment_table as kernel_table
from offload.measure import find_rates
from offload.measure.gpu import gpu_probe
from offload.plan import choose_plan, estimate
from offload.predict import predict
from offload.protocols import SegmentFlag
from offload.units import format_seconds

NO_DEVICE = "no CUDA device: not run"
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ACTIVE, DECOUPLED = SegmentFlag.ACTIVE, SegmentFlag.DECOUPLED_DECAY
STATE = EXACT_ADAMW.rule.names
UPDATE_BYTES = 28  # an element's state, gradient and weight, read and written
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, "auto")
MACHINES = ("h100-node", "a100-node")
PREDICTED_ELEMENTS = (10**9, 3 * 10**9)
NODE_ELEMENTS = 7 * 10**9

Found = dict[str, Any]


# Tables of tensors, wherever they are


def row_of(tensors: dict[str, torch.Tensor | None], flags: SegmentFlag, values: reference.Scalars) -> np.ndarray:
    """Return the segment table's row for tensors of any device."""
    return kernel_table(
        EXACT_ADAMW,
        next(tensor.numel() for tensor in tensors.values() if tensor is not None),
        {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None},
        weight_dtype=dtype_of(tensors["weight"]),
        gradient_dtype=dtype_of(tensors["gradient"]),
        flags=flags,
        scalars=values,
    )


def dtype_of(tensor: torch.Tensor | None) -> DtypeCode:
    return DtypeCode.NONE if tensor is None else DTYPE_CODES[tensor.dtype]


def settled(device: torch.device) -> None:
    """Wait for all work of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median time of a piece of work, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        settled(device)
        started_s = time.perf_counter()
        work()
        settled(device)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[1:])


# Section a


def section_rates(run: Run, device: torch.device | None) -> Found:
    numel, rounds = (1 << 14, 1) if run.smoke else (1 << 26, 5)
    buffers = Buffers(numel)
    values = reference.scalars(4, decoupled=True, grad_scale=0.37, **SETTINGS)
    table = segment_table([buffers.segment(4)])
    host = torch.device("cpu")
    found: Found = {"numel": numel, "threads": cores()}
    with CpuUpdateKernel() as kernel:

        def update() -> float:
            return numel / seconds(lambda: kernel.run(table), host, 1)

        found["cpu update, elements/s"] = statistics.median(update() for _ in range(rounds))
        with gpu_probe(update) as probes:
            if not probes or device is None:
                found["not_run"] = f"everything on the GPU: {NO_DEVICE}"
                return found
            samples: dict[str, list[float]] = {}
            for _ in range(rounds):
                for label, sample in probes[0].samples():
                    progress(label)
                    for name, value in sample().items():
                        samples.setdefault(name, []).append(value)
        found |= {f"{name.removeprefix('gpu/')} (probe)": statistics.median(v) for name, v in samples.items()}
    there = {name: getattr(buffers, name).to(device) for name in (*STATE, "gradient", "weight")}
    row = row_of(there, ACTIVE | DECOUPLED, values)
    gpu = GpuUpdateKernel(device)
    found["gpu update, elements/s"] = numel / seconds(lambda: gpu.update(gpu.send(row)), device, rounds)
    return found


# Section b


def patterns(numel: int, dtype: torch.dtype, kind: str, generator: torch.Generator) -> torch.Tensor:
    """Return "plain" values of a usual size, or "wild" ones: any bits at all, a fifth of them special values."""
    device = generator.device
    if kind == "plain":
        return torch.randn(numel, generator=generator, device=device).mul_(0.1).to(dtype)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(integer)
    bits = torch.randint(limits.min, limits.max + 1, (numel,), generator=generator, device=device, dtype=torch.int64)
    special = torch.tensor(
        [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 1.17549435e-38, 3.4e38, -3.4e38],
        device=device,
    )
    choice = torch.randint(len(special), (numel,), generator=generator, device=device)
    at = torch.rand(numel, generator=generator, device=device) < 0.2
    return torch.where(at, special[choice].to(dtype), bits.to(integer).view(dtype))


def different(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Return how many elements differ in their bits, NaN being equal to NaN; `theirs` is on the CPU."""
    theirs = theirs.to(ours.device)
    integer = {4: torch.int32, 2: torch.int16, 8: torch.int64}[ours.element_size()]
    same = (ours.view(integer) == theirs.view(integer)) | (torch.isnan(ours) & torch.isnan(theirs))
    return int((~same).sum())


def rounds_of_tests(total: int, chunk: int) -> Iterator[tuple[int, int, torch.dtype, torch.dtype | None, Any, str]]:
    """Return what each round of section b is about, until there have been `total` elements."""
    every = itertools.cycle(
        itertools.product(
            (torch.bfloat16, torch.float16, torch.float32),
            (torch.bfloat16, torch.float16, None),
            (
                ACTIVE | DECOUPLED,
                ACTIVE,
                ACTIVE | DECOUPLED | SegmentFlag.LOAD_MASTER,
                ACTIVE | SegmentFlag.ZERO_STATE,
            ),
            ("wild", "plain"),
        )
    )
    for number, first in enumerate(range(0, total, chunk)):
        # Seven further each time: 7 and the 72 combinations have no divisor in common, so all turn up, mixed.
        for _ in range(6):
            next(every)
        yield number, min(chunk, total - first), *next(every)


def section_bits(run: Run, device: torch.device | None) -> Found:
    where = device or torch.device("cpu")
    try:
        gpu = GpuUpdateKernel(where)
    except ConfigError as error:
        return {"not_run": str(error)}
    args = run.args
    total, chunk = (60_000, 5_003) if run.smoke else (args.elements, 1 << 23)
    found: Found = {"elements": 0, "different": {}, "with": {"NaN": 0, "infinity": 0, "fp32 subnormal": 0}}
    counts: dict[str, int] = {}
    digest = hashlib.sha256()
    cpu = CpuUpdateKernel()
    ends_s = time.monotonic() + args.limit
    for number, numel, gradient, weight, flags, kind in rounds_of_tests(total, chunk):
        progress(f"{number * chunk:.3g} of {total:.3g} elements")
        if time.monotonic() > ends_s:
            found["ended_early"] = f"no time left in this call, of {total:.3g} elements"
            break
        generator = torch.Generator(where).manual_seed(number)
        there = {name: patterns(numel, torch.float32, kind, generator) for name in STATE}
        if kind == "plain":
            there["exp_avg_sq"].abs_()
        there["gradient"] = patterns(numel, gradient, kind, generator)
        tensors: dict[str, torch.Tensor | None] = dict(there)
        tensors["weight"] = None if weight is None else patterns(numel, weight, kind, generator)
        given = torch.cat([tensor.float() for tensor in there.values()])
        found["with"]["NaN"] += int(torch.isnan(given).sum())
        found["with"]["infinity"] += int(torch.isinf(given).sum())
        found["with"]["fp32 subnormal"] += int(((given != 0) & (given.abs() < 1.17549435e-38)).sum())
        del given
        here = {name: None if tensor is None else tensor.cpu().clone() for name, tensor in tensors.items()}
        values = reference.scalars(
            1 + number, decoupled=bool(flags & DECOUPLED), grad_scale=(0.37, 1.0, 1e-4)[number % 3], **SETTINGS
        )
        judge = None
        if number < args.reference_rounds:
            judge = {name: None if tensor is None else tensor.clone() for name, tensor in here.items()}
            master, *state = (judge[name] for name in STATE)
            reference.update(SegmentTensors(master, state, judge["gradient"], judge["weight"], flags, values))
        gpu.update(gpu.send(row_of(tensors, flags, values)))
        cpu.run(row_of(here, flags, values))
        for name, tensor in tensors.items():
            if tensor is None or name == "gradient":
                continue
            counts[name] = counts.get(name, 0) + different(tensor, here[name])
            if judge is not None:
                label = f"{name} (reference)"
                counts[label] = counts.get(label, 0) + different(tensor, judge[name])
        for label, count in gathered(gpu, cpu, tensors["gradient"], here["gradient"], number % 3).items():
            counts[label] = counts.get(label, 0) + count
        digest.update(np.ascontiguousarray(here["master"].view(torch.int32)[:1000].numpy()).tobytes())
        found["elements"] += numel
    cpu.close()
    found["different"] = counts
    found["on"] = "the GPU" if device is not None else "Triton's interpreter, which says nothing of a GPU"
    found["checksum"] = digest.hexdigest()[:16]
    return found


def gathered(
    gpu: GpuUpdateKernel, cpu: CpuUpdateKernel, there: torch.Tensor, here: torch.Tensor, way: int
) -> dict[str, int]:
    """Gather a gradient on both sides, by itself, widened, or accumulated onto itself; count what differs."""
    numel, code = there.numel(), dtype_of(there)
    slot_dtype = torch.float32 if way == 1 else there.dtype
    slot, kept = there.to(slot_dtype, copy=True), here.to(slot_dtype, copy=True)
    blocks = torch.empty(blocks_numel(numel), dtype=torch.float64, device=there.device)
    gpu.gather(
        there.data_ptr(),
        code,
        numel,
        blocks.data_ptr(),
        slot.data_ptr(),
        DTYPE_CODES[slot_dtype],
        accumulate=way == 2,
    )
    if way == 2:
        reference.accumulate(kept, here)
    wanted = torch.empty(blocks_numel(numel), dtype=torch.float64)
    cpu.gradient_blocks(kept.data_ptr(), DTYPE_CODES[slot_dtype], numel, wanted.data_ptr())
    name = ("copied", "widened", "accumulated")[way]
    return {f"gradient {name}": different(slot, kept), f"block sums {name}": different(blocks, wanted)}


# Section c


def section_shares(run: Run, device: torch.device | None) -> Found:
    """Steps of one set of parameters with given gradients, at every share; the same weights come out of all."""
    args, where = run.args, device or torch.device("cpu")
    tensors, each, warm_up, steps = (4, 1 << 14, 1, 2) if run.smoke else (64, args.elements_c // 64, 4, 5)
    generator = torch.Generator(where).manual_seed(0)
    starts = [patterns(each, torch.bfloat16, "plain", generator) for _ in range(tensors)]
    gradients = [patterns(each, torch.bfloat16, "plain", generator) for _ in range(tensors)]
    found: Found = {"elements": tensors * each, "shares": {}}
    first: list[torch.Tensor] | None = None
    ends_s = time.monotonic() + args.limit
    for share in SHARES if device is not None else ("cpu",):
        progress(f"share {share}")
        if time.monotonic() > ends_s:
            found["shares"][str(share)] = {"not_run": "no time left in this call"}
            continue
        weights = [torch.nn.Parameter(start.clone()) for start in starts]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        try:
            # All state lies in host memory.
            config = offload.OffloadConfig(placement=share, gpu_memory=0)
            optimizer = offload.AdamW(weights, offload=config, **SETTINGS)
        except offload.OffloadError as error:
            found["shares"][str(share)] = {"not_run": str(error)}
            continue
        taken = []
        with optimizer:
            for _ in range(warm_up + steps):
                settled(where)
                started_s = time.perf_counter()
                optimizer.step()
                settled(where)
                taken.append(time.perf_counter() - started_s)
            metrics = optimizer.metrics()
            entry = {
                "gpu_share": gpu_share(optimizer.plan.plan),
                "step_s": statistics.median(taken[warm_up:]),
                "predicted_s": metrics["predicted_step_s"],
                "lanes": {name: value for name, value in metrics.items() if name.startswith("lane/")},
            }
        if first is None:
            first = [weight.detach().clone() for weight in weights]
        entry["same_weights"] = all(torch.equal(a, b) for a, b in zip(weights, first, strict=True))
        found["shares"][str(share)] = entry
    if device is None:
        found["not_run"] = f"shares on a GPU: {NO_DEVICE}"
    return found


def bound_s(rates: Found, elements: int, share: float) -> float | None:
    """Return what a step with host-resident state cannot be faster than: its busiest link, memory or GPU.

    16-bit gradients go down and 16-bit weights up for what the CPU updates, 12 bytes of state each way for what the
    GPU does. Host memory moves 28 bytes for an update on the CPU and whatever crosses the link.
    """
    try:
        down, up = rates["d2h (probe)"], rates["h2d (probe)"]
        memory, gpu = UPDATE_BYTES * rates["cpu update, elements/s"], rates["gpu update, elements/s"]
    except KeyError:
        return None
    there, here = elements * share, elements * (1 - share)
    down_bytes, up_bytes = 12 * there + 2 * here, 12 * there + 2 * here
    crossing = down_bytes + up_bytes
    return max(down_bytes / down, up_bytes / up, (UPDATE_BYTES * here + crossing) / memory, there / gpu)


# Section p


def section_predictions(run: Run, device: torch.device | None) -> Found:
    """Predict section c for machines that others have measured: the scheduler's own steps on simulated lanes."""
    found: Found = {"machines": {}}
    for machine, elements in itertools.product(MACHINES, PREDICTED_ELEMENTS[: 1 if run.smoke else None]):
        rates = replace(find_rates(machine).rates, paths=())
        layout = layout_of([elements // 64] * 64)
        budgets = budgets_of(layout, keep_grads=False)
        rows = {}
        for share in SHARES:
            plan = choose_plan(layout, budgets, rates, share)
            step_s, least_s = predict(plan, rates).step_s, estimate(plan, rates).bound_s
            rows[str(share)] = {"gpu_share": gpu_share(plan), "step_s": step_s, "bound_s": least_s}
        found["machines"][f"{machine}, {elements:.0e} parameters"] = rows
    found["node"] = node(10**9 if run.smoke else NODE_ELEMENTS, bound_s, 10 if run.smoke else 100)
    return found


# Section d


CLIP = 1.0
WARM_UP = 3
ON_GPU = {"keep_grads": False, "gpu_memory": 0}
"""Of ours, where weights are on a GPU: all state lies where the contender says."""


def zero(name: str, stage: int = 3, ours: Found | None = None, **more: Any) -> Contender:
    """Return a contender under DeepSpeed's ZeRO.

    Args:
        name: Of it.
        stage: Of ZeRO.
        ours: Our backend's object in the config; None for stock.
        more: What `offload_optimizer` says besides, and DeepSpeed's object "zenflow".
    """
    settings: Found = {"stage": stage, "overlap_comm": True}
    settings |= {"zenflow": more.pop("zenflow")} if "zenflow" in more else {}
    settings["offload_optimizer"] = {"device": "cpu", "pin_memory": True, **more}
    backend = {} if ours is None else {"multi_tier_offload": ours}
    return Contender(name, "deepspeed", {"zero_optimization": settings, **backend})


ZERO3 = "deepspeed-zero3"
CONTENDERS = {
    each.name: each
    for each in (
        # torch.optim.AdamW(fused=True) on fp32 masters, weights cast from them.
        Contender("in-memory", "lean"),
        Contender("offload-host", "offload"),
        Contender("offload-disk", "offload", {"host_memory": 0, "paths": ["{path}"]}),
        # The planner's share of updates on the GPU, but for "half".
        zero("offload-deepspeed", ours={}),
        zero("offload-deepspeed-half", ours={"placement": 0.5}),
        zero("offload-deepspeed-zero2", 2, ours={}),
        zero("offload-deepspeed-zero1", 1, ours={}),
        Contender("torchao", "torchao"),
        zero(ZERO3),
        zero("deepspeed-zero2", 2),
        zero("deepspeed-twinflow", ratio=0.5),
        zero("deepspeed-superoffload", super_offload=True),
        # What its documentation begins with: all but the largest gradients are applied every fourth step. Compared
        # with nobody.
        zero("deepspeed-zenflow", 2, zenflow={"topk_ratio": 0.1, "update_interval": 4, "overlap_step": True}),
    )
}
PEERS = ("torchao", "deepspeed-zero2", "deepspeed-twinflow", "deepspeed-superoffload")
"""Others than ZeRO-3 that ours is compared with."""


def trained(contender: Contender, common: Found, folder: Path, iterations: int, limit_s: float) -> Found:
    """Return what a contender took and held, or under "not_run" why it has not."""
    ends_s = time.monotonic() + limit_s
    worker = Worker(contender, common, folder)
    try:
        worker.answer(limit_s)
        found: Found = worker.ask({"run": [[common["seq"], 0, WARM_UP + iterations]]}, ends_s - time.monotonic())
    except ContenderError as error:
        log = worker.output()
        return {"not_run": f"{error}: {(log.splitlines() or ['without a word'])[-1]}", "log": log}
    finally:
        worker.close()
    counted = found["iterations"][WARM_UP:]
    return found | {"parameters": common["numel"], "iteration_s": [each["iteration_s"] for each in counted]}


def section_training(run: Run, device: torch.device | None) -> Found:
    """Run the contenders that were asked for, as long as there is time; keep what others found before."""
    args, before = run.args, run.results.get("d", {})
    params, rows, seq, iterations = (
        (200_000, 2, 32, 2) if run.smoke else (int(args.params), args.batch, args.seq, args.iterations)
    )
    common = common_of(choose_shape(params), seq, run.smoke)
    common |= {"device": "cuda" if device else "cpu", "rows": rows, "clip": CLIP}
    asked = {"parameters": params, "batch": rows, "seq": seq, "clip": CLIP}
    contenders = dict(before["contenders"]) if before.get("asked") == asked else {}
    ends_s = time.monotonic() + args.limit
    for name in args.contenders:
        contender, left_s = CONTENDERS[name], ends_s - time.monotonic()
        if contender.kind == "offload" and device is not None:
            contender = replace(contender, settings={**contender.settings, **ON_GPU})
        progress(name)
        if device is None and contender.kind in ("deepspeed", "torchao"):
            entry: Found = {"not_run": "compared on a GPU only, where its offload is meant to run"}
        elif run.smoke and contender.kind == "deepspeed":
            entry = {"not_run": "left out of the smoke run: its native part takes a minute to build"}
        elif left_s < 30:
            entry = {"not_run": f"no time left in this call; use --sections d --contenders {name}"}
        else:
            entry = trained(contender, common, run.place(name), iterations, left_s)
        if "not_run" not in entry or "iteration_s" not in contenders.get(name, {}):
            contenders[name] = entry
    return {"asked": asked, "contenders": contenders}


# The report


def judge(run: Run) -> None:
    """Note the promises; None where nothing was measured, with the reason."""
    results = run.results

    def why(section: str) -> str:
        return str(results.get(section, {}).get("not_run", f"section {section} has not been run, or not whole"))

    bits = results.get("b", {})
    share = None
    if bits.get("elements") and bits.get("on") == "the GPU":
        wrong = sum(bits["different"].values())
        share = max(0.0, 1.0 - wrong / bits["elements"])
    run.at_least("GPU kernels: elements with the reference's bits", share, 1.0, why("b"))

    section = results.get("c", {})
    shares = {name: entry for name, entry in section.get("shares", {}).items() if "step_s" in entry}
    whole = {str(one) for one in SHARES} <= shares.keys()
    same = min((float(entry["same_weights"]) for entry in shares.values()), default=None) if whole else None
    run.at_least("shares with the weights of share 0, all of them", same, 1.0, why("c"))
    chosen = shares["auto"]["step_s"] / min(entry["step_s"] for entry in shares.values()) if whole else None
    run.at_most("planner's share beside the best share", chosen, 1.05, why("c"))
    over = None
    if whole:
        auto = shares["auto"]
        least_s = bound_s(results.get("a", {}), section["elements"], auto["gpu_share"])
        over = None if least_s is None else auto["step_s"] / least_s
    note = why("c") if not whole else why("a")
    run.at_most("step with host-resident state over its bound", over, 1.15, note)

    ran = results.get("d", {}).get("contenders", {})
    taken_s = {n: statistics.median(entry["iteration_s"]) for n, entry in ran.items() if "iteration_s" in entry}
    reason = ran.get(ZERO3, {}).get("not_run", why("d"))
    for ours, name in (
        ("offload-host", "iteration, times as fast as DeepSpeed ZeRO-3 CPU offload"),
        ("offload-deepspeed", "iteration of ours in DeepSpeed ZeRO-3, times as fast as its CPU offload"),
    ):
        times = taken_s[ZERO3] / taken_s[ours] if {ours, ZERO3} <= taken_s.keys() else None
        run.at_least(name, times, 2.5, reason)
    others = [taken_s[name] for name in PEERS if name in taken_s]
    best = min(others) / taken_s["offload-host"] if others and "offload-host" in taken_s else None
    run.at_least("iteration, times as fast as the fastest other peer", best, 1.0, why("d"))
    predicted = results.get("p", {}).get("machines", {}).values()
    over = max((rows["auto"]["step_s"] / rows["auto"]["bound_s"] for rows in predicted), default=None)
    name = "predicted for published machines: step with host-resident state over its bound"
    run.at_most(name, over, 1.15, why("p"))
    best = [rows["auto"]["step_s"] / min(row["step_s"] for row in rows.values()) for rows in predicted]
    name = "predicted for published machines: planner's share beside the best share"
    run.at_most(name, max(best, default=None), 1.05, why("p"))
    there = results.get("p", {}).get("node", {})
    for placed in ("all on the CPU", "all on the GPU", "auto"):
        step = there.get("steps", {}).get(placed)
        over = step["step_s"] / step["bound_s"] if step else None
        run.at_most(f"predicted for an H100: step, {placed}, over its bound", over, 1.05, why("p"))
    over = there["steps"]["auto"]["step_s"] / there["best"]["step_s"] if there else None
    name = "predicted for an H100: planner's share beside the best share"
    run.at_most(name, over, 1.03, why("p"))


def described() -> Found:
    """Return what matters on a GPU of versions and the device."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    found: Found = {"cuda": torch.version.cuda, "driver": None}
    found |= {name: version(name) for name in ("triton", "torchao", "deepspeed", "transformers")}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu_memory_bytes"] = properties.total_memory
        found["gpu_capability"] = f"{properties.major}.{properties.minor}"
        driver = Path("/proc/driver/nvidia/version")
        found["driver"] = driver.read_text().splitlines()[0] if driver.exists() else None
    return found


SECTIONS: dict[str, Callable[[Run, torch.device | None], Found]] = {
    "a": section_rates,
    "b": section_bits,
    "c": section_shares,
    "d": section_training,
    "p": section_predictions,
}


def measure(run: Run) -> None:
    """Run the sections that were asked for and add them to the report."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    run.described |= described()
    file = run.args.json
    if file is not None and file.exists():
        document = json.loads(file.read_text())
        run.results = document["results"]
        if document["smoke"] is not run.smoke:
            raise SystemExit(f"{file} holds a run of another size (smoke: {document['smoke']}); name another file")
    for name in run.args.sections:
        if device is None and not run.smoke and name != "p":
            print(f"section {name}: {NO_DEVICE}")
            found: Found = {"not_run": NO_DEVICE}
            if "not_run" not in run.results.get(name, found):
                continue  # what a GPU has found is kept
        else:
            started_s = time.monotonic()
            found = SECTIONS[name](run, device)
            print(f"section {name}: {format_seconds(time.monotonic() - started_s)}")
        run.results[name] = found | {"environment": run.described, "smoke": run.smoke}
    judge(run)
    kept = json.dumps({name: found.get("checksum") for name, found in sorted(run.results.items())})
    run.checksums.append(hashlib.sha256(kept.encode()).hexdigest()[:16])


COUNT = {"type": lambda text: int(float(text))}
OPTIONS = (
    Option("contenders", ",".join(CONTENDERS), help="of section d", read=names_among(CONTENDERS)),
    Option("params", 1e9, help="of section d's model"),
    Option("batch", 4, help="sequences of an iteration"),
    Option("seq", 2048, help="tokens of a sequence"),
    Option("iterations", 10, help="iterations that count"),
    Option("elements", 10**9, help="of section b", more=COUNT),
    Option("elements_c", 10**9, help="of section c", more=COUNT),
    Option("reference_rounds", 2, help="rounds of section b with the reference too"),
    Option("limit", 440.0, help="seconds of sections b, c and d each, after which no more is begun"),
)


def needs(args: argparse.Namespace) -> dict[str, Any]:
    """Return what has to be installed for the contenders of section d, where that runs."""
    if not torch.cuda.is_available() or "d" not in args.sections:
        return {}
    wanted = {"deepspeed": NATIVE, "torchao": (TORCHAO,)}
    return {name: wanted.get(CONTENDERS[name].kind, ()) for name in args.contenders}


if __name__ == "__main__":
    main(__doc__, measure, sections=tuple(SECTIONS), options=OPTIONS, path=True, needs=needs)
