"""The half of the engine that needs a GPU, in sections that can be run one at a time and add to one report.

    a  rates: copies each way alone and together, updates on the CPU and on the GPU, the CPU's update beside copies
    b  the GPU's kernels against the CPU's and the reference, bit by bit, on 1e9 random elements with NaN, infinities
       and subnormals
    c  update time against the share that the GPU updates: 0 to 100%, and the planner's choice; predicted and measured
    d  iteration time of a Llama with bf16 weights, beside no offload at all and beside other offloaders, each in a
       process of its own on the same batches, losses compared (`--contenders` runs some of them)
    e  peak GPU and host memory of those that ran in d
    p  steps at every share as predicted for published machines; for a node with one H100 beside their bounds, and
       with parts of the engine changed; needs no GPU

`python bench/gpu.py --section b --json FILE` keeps the other sections that FILE holds; each section says on what
machine, from what commit and by what command it was run. FILE gets a Markdown file beside it. Without a CUDA device
nothing but that fact is reported; `--simulated` puts a simulated device in a GPU's place, at smoke sizes, to see that
everything runs. `bench/gpu/once.sh` runs this on a machine without a package index.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the smoke run's kernels; read when Triton is imported

from _common import Target, arguments, cores, environment, progress, report, write_whole
from _gpu_node import node
from _gpu_runs import (
    ABOUT,
    CONTENDERS,
    IN_DEEPSPEED,
    OURS,
    PEERS,
    Specification,
    fitting_rates,
    gpu_share,
    iteration_s,
    run,
    simulated_adamw,
)
from _needs import NATIVE, TORCHAO, Need, require
from kernel import Buffers

import offload
from offload.dtypes import DtypeCode
from offload.errors import ConfigError
from offload.formats import EXACT_ADAMW
from offload.kernels import CpuUpdateKernel, GpuUpdateKernel, blocks_numel, reference
from offload.kernels.reference import DTYPE_CODES, SegmentTensors, segment_table
from offload.kernels.table import segment_table as kernel_table
from offload.layout import MAX_TILE_BYTES, Layout, Parameter, extend_layout
from offload.measure import find_rates
from offload.measure.gpu import gpu_probe
from offload.plan import Budgets, choose_plan, choose_subgroup_numel, estimate
from offload.plan.budget import GPU_STAGING_SLOTS
from offload.predict import predict
from offload.protocols import SegmentFlag
from offload.units import format_seconds

NO_DEVICE = "no CUDA device: not run"
SIMULATED = "SIMULATED DEVICE: NO GPU WAS USED, NO FIGURE MEANS ANYTHING"
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ACTIVE, DECOUPLED = SegmentFlag.ACTIVE, SegmentFlag.DECOUPLED_DECAY
STATE = EXACT_ADAMW.rule.names
UPDATE_BYTES = 28  # an element's state, gradient and weight, read and written
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, "auto")
SECTIONS = ("a", "b", "c", "d", "e", "p")
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


def section_rates(args: argparse.Namespace, device: torch.device | None) -> Found:
    numel, rounds = (1 << 14, 1) if args.smoke else (1 << 26, 5)
    buffers = Buffers(numel)
    values = reference.scalars(4, decoupled=True, grad_scale=0.37, **SETTINGS)
    table = segment_table([buffers.segment(4, whole=True)])
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
    update_s = seconds(lambda: gpu.update(gpu.send(row)), device, rounds)
    found["gpu update, elements/s"] = numel / update_s
    found["gpu update, bytes/s"] = numel * UPDATE_BYTES / update_s
    source, slot = there["gradient"], torch.empty_like(there["gradient"])
    blocks = torch.empty(blocks_numel(numel), dtype=torch.float64, device=device)
    for name, add in (("gather", False), ("gather and accumulate", True)):
        code = dtype_of(source)
        took_s = seconds(
            lambda add=add, code=code: gpu.gather(
                source.data_ptr(), code, numel, blocks.data_ptr(), slot.data_ptr(), code, accumulate=add
            ),
            device,
            rounds,
        )
        found[f"gpu {name}, elements/s"] = numel / took_s
    target = torch.empty_like(there["master"])
    copied_s = seconds(lambda: target.copy_(there["master"]), device, rounds)
    found["gpu memory copy, bytes/s read and written"] = 2 * 4 * numel / copied_s
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


def section_bits(args: argparse.Namespace, device: torch.device | None) -> Found:
    where = device or torch.device("cpu")
    try:
        gpu = GpuUpdateKernel(where)
    except ConfigError as error:
        return {"not_run": str(error)}
    total, chunk = (60_000, 5_003) if args.smoke else (args.elements, 1 << 23)
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


def section_shares(args: argparse.Namespace, device: torch.device | None) -> Found:
    """Steps of one set of parameters with given gradients, at every share; the same weights come out of all."""
    where = device or torch.device("cpu")
    tensors, each, warm_up, steps = (4, 1 << 14, 1, 2) if args.smoke else (64, args.elements_c // 64, 4, 5)
    generator = torch.Generator(where).manual_seed(0)
    starts = [patterns(each, torch.bfloat16, "plain", generator) for _ in range(tensors)]
    gradients = [patterns(each, torch.bfloat16, "plain", generator) for _ in range(tensors)]
    found: Found = {"elements": tensors * each, "shares": {}}
    found["rates"], unfit = fitting_rates(args.rates)
    if unfit:
        found["rates"] += f" ({unfit})"
    kind = simulated_adamw() if args.simulated else offload.AdamW
    first: list[torch.Tensor] | None = None
    ends_s = time.monotonic() + args.limit
    for share in SHARES if device is not None or args.simulated else ("cpu",):
        progress(f"share {share}")
        if time.monotonic() > ends_s:
            found["shares"][str(share)] = {"not_run": "no time left in this call"}
            continue
        weights = [torch.nn.Parameter(start.clone()) for start in starts]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        try:
            # All state lies in host memory.
            config = offload.OffloadConfig(placement=share, gpu_memory=0, rates=fitting_rates(args.rates)[0])
            optimizer = kind(weights, offload=config, **SETTINGS)
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
        found["not_run"] = SIMULATED if args.simulated else f"shares on a GPU: {NO_DEVICE}"
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


def section_predictions(args: argparse.Namespace) -> Found:
    """Predict section c for machines that others have measured: the scheduler's own steps on simulated lanes."""
    found: Found = {"machines": {}}
    for machine, elements in itertools.product(MACHINES, PREDICTED_ELEMENTS[: 1 if args.smoke else None]):
        rates = replace(find_rates(machine).rates, paths=())
        parameters = [Parameter(f"p{n}", elements // 64, DtypeCode.BFLOAT16, 0) for n in range(64)]
        layout = extend_layout(Layout((), ()), parameters, choose_subgroup_numel(elements), MAX_TILE_BYTES)
        staging_bytes = GPU_STAGING_SLOTS * max(layout.subgroup_bytes)
        budgets = Budgets(layout.state_bytes, gpu_staging_bytes=staging_bytes, weights_on_gpu=True)
        rows = {}
        for share in SHARES:
            plan = choose_plan(layout, budgets, rates, share)
            step_s, least_s = predict(plan, rates).step_s, estimate(plan, rates).bound_s
            rows[str(share)] = {"gpu_share": gpu_share(plan), "step_s": step_s, "bound_s": least_s}
        found["machines"][f"{machine}, {elements:.0e} parameters"] = rows
    found["node"] = node(10**9 if args.smoke else NODE_ELEMENTS, bound_s, 10 if args.smoke else 100)
    return found


# Sections d and e


def section_training(args: argparse.Namespace, device: torch.device | None, before: Found) -> Found:
    """Run the contenders that were asked for, as long as there is time; keep what others found before."""
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        if args.smoke:
            place = "simulated" if args.simulated else "cpu" if device is None else "cuda"
            spec = Specification(2e5, 2, 32, 1, 2, place, folder, args.rates)
        else:
            spec = Specification(args.params, args.batch, args.seq, 3, args.iterations, "cuda", folder, args.rates)
        asked = {"parameters": spec.params, "batch": spec.batch, "seq": spec.seq, "clip": spec.clip}
        found = before if before.get("asked") == asked else {"asked": asked, "contenders": {}}
        ends_s = time.monotonic() + args.limit
        for name in args.contenders:
            left_s = ends_s - time.monotonic()
            progress(name)
            if args.smoke and "deepspeed" in name and not args.simulated:
                entry: Found = {"not_run": "left out of the smoke run: its native part takes a minute to build"}
            elif left_s < 30:
                entry = {"not_run": f"no time left in this call; use --section d --contenders {name}"}
            else:
                entry = run(name, spec, left_s)
            if "not_run" not in entry or "iteration_s" not in found["contenders"].get(name, {}):
                found["contenders"][name] = entry
    return found


def ran(section: Found) -> dict[str, Found]:
    """Return the contenders that have run."""
    return {name: entry for name, entry in section.get("contenders", {}).items() if "iteration_s" in entry}


def section_memory(training: Found) -> Found:
    """Return the peaks of what ran in section d."""
    found: Found = {}
    for name, entry in training.get("contenders", {}).items():
        kept = ("peak_gpu_bytes", "peak_gpu_reserved_bytes", "peak_host_bytes", "not_run")
        found[name] = {key: entry[key] for key in kept if key in entry}
    return {"contenders": found} if found else {"not_run": "section d has not been run"}


# The report


def targets_of(results: dict[str, Found]) -> list[Target]:
    """Return the promises; None where nothing was measured, with the reason."""

    def why(section: str) -> str:
        return str(results.get(section, {}).get("not_run", f"section {section} has not been run, or not whole"))

    bits = results.get("b", {})
    share = None
    if bits.get("elements") and bits.get("on") == "the GPU":
        wrong = sum(bits["different"].values())
        share = max(0.0, 1.0 - wrong / bits["elements"])
    targets = [Target.at_least("GPU kernels: elements with the reference's bits", share, 1.0, why("b"))]

    section = results.get("c", {})
    shares = {name: entry for name, entry in section.get("shares", {}).items() if "step_s" in entry}
    whole = {str(one) for one in SHARES} <= shares.keys()
    same = min((float(entry["same_weights"]) for entry in shares.values()), default=None) if whole else None
    targets.append(Target.at_least("shares with the weights of share 0, all of them", same, 1.0, why("c")))
    chosen = shares["auto"]["step_s"] / min(entry["step_s"] for entry in shares.values()) if whole else None
    targets.append(Target.at_most("planner's share beside the best share", chosen, 1.05, why("c")))
    over = None
    if whole:
        auto = shares["auto"]
        least_s = bound_s(results.get("a", {}), section["elements"], auto["gpu_share"])
        over = None if least_s is None else auto["step_s"] / least_s
    note = why("c") if not whole else why("a")
    targets.append(Target.at_most("step with host-resident state over its bound", over, 1.15, note))

    found = ran(results.get("d", {}))
    ours = min((iteration_s(found[name]) for name in OURS[:1] if name in found), default=None)
    zero3 = "deepspeed-zero3"
    times = iteration_s(found[zero3]) / ours if ours and zero3 in found else None
    reason = results.get("d", {}).get("contenders", {}).get(zero3, {}).get("not_run", why("d"))
    targets.append(Target.at_least("iteration, times as fast as DeepSpeed ZeRO-3 CPU offload", times, 2.5, reason))
    inside = iteration_s(found[IN_DEEPSPEED[0]]) if IN_DEEPSPEED[0] in found else None
    times = iteration_s(found[zero3]) / inside if inside and zero3 in found else None
    name = "iteration of ours in DeepSpeed ZeRO-3, times as fast as its CPU offload"
    targets.append(Target.at_least(name, times, 2.5, reason))
    others = [iteration_s(found[name]) for name in PEERS if name in found and name != zero3]
    best = min(others) / ours if ours and others else None
    targets.append(Target.at_least("iteration, times as fast as the fastest other peer", best, 1.0, why("d")))
    predicted = results.get("p", {}).get("machines", {}).values()
    over = max((rows["auto"]["step_s"] / rows["auto"]["bound_s"] for rows in predicted), default=None)
    name = "predicted for published machines: step with host-resident state over its bound"
    targets.append(Target.at_most(name, over, 1.15, why("p")))
    best = [rows["auto"]["step_s"] / min(row["step_s"] for row in rows.values()) for rows in predicted]
    name = "predicted for published machines: planner's share beside the best share"
    targets.append(Target.at_most(name, max(best, default=None), 1.05, why("p")))
    there = results.get("p", {}).get("node", {})
    for placed in ("all on the CPU", "all on the GPU", "auto"):
        step = there.get("steps", {}).get(placed)
        over = step["step_s"] / step["bound_s"] if step else None
        targets.append(Target.at_most(f"predicted for an H100: step, {placed}, over its bound", over, 1.05, why("p")))
    over = there["steps"]["auto"]["step_s"] / there["best"]["step_s"] if there else None
    name = "predicted for an H100: planner's share beside the best share"
    targets.append(Target.at_most(name, over, 1.03, why("p")))
    return targets


def markdown(results: dict[str, Found], targets: list[Target]) -> str:
    """Return the report for people."""
    lines = ["# GPU", ""]
    if any(section.get("environment", {}).get("gpu") == SIMULATED for section in results.values()):
        lines += [f"**{SIMULATED}**", ""]
    for target in targets:
        value = f"not measured ({target.note})" if target.value is None else f"{target.value:.3f}"
        verdict = "" if target.met is None else ", met" if target.met else ", MISSED"
        sign = "at most" if "over its bound" in target.name or "beside the best" in target.name else "at least"
        lines.append(f"* {target.name}: {value}; target {sign} {target.target:g}{verdict}")
    for name, section in sorted(results.items()):
        ran_on = section.get("environment", {})
        lines += ["", f"## Section {name}", ""]
        if ran_on:
            machine = f"{ran_on['gpu'] or 'no GPU'}, {ran_on['cpu']} ({ran_on['cores']} cores)"
            versions = ", ".join(f"{key} {ran_on[key]}" for key in ("python", "torch", "cuda", "triton", "driver"))
            lines += [
                f"{ran_on['date']}, commit {ran_on['commit']}: `{ran_on['command']}`  ",
                f"{machine}; {versions}",
            ]
            if section.get("smoke"):
                lines.append("\nSmoke sizes: the figures mean nothing.")
        if "not_run" in section:
            lines += ["", f"**{section['not_run']}**"]
        table = table_of(name, section)
        lines += ["", *table] if table else []
    return "\n".join(lines).rstrip() + "\n"


def table_of(name: str, section: Found) -> list[str]:
    """Return one section as a Markdown table."""
    head: tuple[str, ...] = ("", "")
    rows: list[tuple[str, ...]] = []
    if name == "c":
        head = ("share", "GPU's part", "step, ms", "predicted, ms", "same weights")
        for share, entry in section.get("shares", {}).items():
            if "not_run" in entry:
                rows.append((share, entry["not_run"], "", "", ""))
                continue
            times = (f"{1e3 * entry[key]:.1f}" for key in ("step_s", "predicted_s"))
            rows.append((share, f"{entry['gpu_share']:.2f}", *times, "yes" if entry["same_weights"] else "NO"))
    elif name == "d":
        head = ("contender", "iteration, ms", "last loss", "largest difference of loss", "weights", "")
        found = ran(section)
        plain = found.get("in-memory", {}).get("losses")
        for contender, entry in section.get("contenders", {}).items():
            if contender not in found:
                rows.append((contender, "not run", "", "", "", f"{ABOUT[contender]}: {entry['not_run']}"))
                continue
            apart = f"{max(abs(a - b) for a, b in zip(entry['losses'], plain, strict=True)):.2e}" if plain else ""
            shown = (f"{1e3 * iteration_s(entry):.1f}", f"{entry['losses'][-1]:.4f}", apart)
            rows.append((contender, *shown, entry.get("weights", ""), ABOUT[contender]))
    elif name == "p":
        head = ("machine", "share", "GPU's part", "step, ms", "over its bound")
        for machine, shares in section.get("machines", {}).items():
            for share, entry in shares.items():
                times = (f"{1e3 * entry['step_s']:.1f}", f"{entry['step_s'] / entry['bound_s']:.3f}")
                rows.append((machine, share, f"{entry['gpu_share']:.2f}", *times))
        there = section.get("node", {})
        for placed, entry in there.get("steps", {}).items():
            over = f"{entry['step_s'] / entry['bound_s']:.3f}"
            machine = f"an H100, {there['elements']:.0e} parameters"
            rows.append((machine, placed, f"{entry['gpu_share']:.2f}", f"{1e3 * entry['step_s']:.1f}", over))
    elif name == "e":
        head = ("contender", "peak GPU, GiB", "reserved, GiB", "peak host, GiB")
        for contender, entry in section.get("contenders", {}).items():
            kept = ("peak_gpu_bytes", "peak_gpu_reserved_bytes", "peak_host_bytes")
            sizes = ("not run", "", "") if "not_run" in entry else (f"{entry[key] / 2**30:.2f}" for key in kept)
            rows.append((contender, *sizes))
    else:
        own = ("environment", "smoke", "not_run", "checksum")
        for key, value in section.items():
            if isinstance(value, dict) and key not in own:
                rows += [(f"{key}: {inner}", f"{number:,}") for inner, number in value.items()]
            elif key not in own:
                rows.append((key, f"{value:,.6g}" if isinstance(value, float) else f"{value}"))
    if not rows:
        return []
    lines = [" | ".join(("", *row, "")).strip() for row in (head, ("---",) * len(head), *rows)]
    if name == "p" and "node" in section:
        lines += ["", *parts_of_node(section["node"])]
    return lines


def parts_of_node(there: Found) -> list[str]:
    """Return what each part of the engine changes on the node, as a Markdown table."""
    lines = ["| changed | updates on | GPU's part | step, ms | over the engine's as it is |", "|---|---|---|---|---|"]
    for row in there["parts"]:
        figures = f"{row['gpu_share']:.2f} | {1e3 * row['step_s']:.1f} | {row['over']:.3f}"
        lines.append(f"| {row['what']} | {row['updates']} | {figures} |")
    return lines


def described(simulated: bool = False) -> dict[str, Any]:
    """Return the environment with what matters on a GPU."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    found = environment() | {"cuda": torch.version.cuda, "driver": None}
    found |= {name: version(name) for name in ("triton", "torchao", "deepspeed", "transformers")}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu_memory_bytes"] = properties.total_memory
        found["gpu_capability"] = f"{properties.major}.{properties.minor}"
        driver = Path("/proc/driver/nvidia/version")
        found["driver"] = driver.read_text().splitlines()[0] if driver.exists() else None
    if simulated:
        found["gpu"] = SIMULATED
    return found


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__, path=True)
    parser.add_argument(
        "--section", action="append", choices=SECTIONS, help="only this one; may be given several times"
    )
    parser.add_argument(
        "--contenders", type=lambda text: text.split(","), default=list(CONTENDERS), help="of section d"
    )
    parser.add_argument("--params", type=float, default=1e9, help="of section d's model")
    parser.add_argument("--batch", type=int, default=4, help="sequences of an iteration")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--iterations", type=int, default=10, help="iterations that count")
    parser.add_argument("--elements", type=lambda text: int(float(text)), default=10**9, help="of section b")
    parser.add_argument("--elements-c", type=lambda text: int(float(text)), default=10**9, help="of section c")
    parser.add_argument("--reference-rounds", type=int, default=2, help="rounds of section b with the reference too")
    parser.add_argument(
        "--limit", type=float, default=440.0, help="seconds of sections b, c and d each, after which no more is begun"
    )
    parser.add_argument(
        "--rates", metavar="FILE", default="auto", help="what `offload probe` wrote, for ours in c and d"
    )
    parser.add_argument(
        "--simulated", action="store_true", help="a simulated device in the GPU's place, at smoke sizes: does it run?"
    )
    args = parser.parse_args()
    if args.simulated and torch.cuda.is_available():
        parser.error("--simulated: there is a CUDA device")
    args.smoke = args.smoke or args.simulated
    unknown = set(args.contenders) - set(CONTENDERS)
    if unknown:
        parser.error(f"--contenders: {', '.join(sorted(unknown))} cannot be run; there are {', '.join(CONTENDERS)}")
    return args


def needs(contender: str) -> Sequence[Need]:
    """Return what has to be installed for a contender of section d."""
    return NATIVE if "deepspeed" in contender else (TORCHAO,) if contender == "torchao" else ()


def main() -> None:
    """Run the sections that were asked for and add them to the report."""
    args = parsed()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    if device is not None and "d" in (args.section or SECTIONS):
        require(args, {name: needs(name) for name in args.contenders})
    surroundings = described(args.simulated)
    results: dict[str, Found] = {}
    if args.json is not None and args.json.exists():
        document = json.loads(args.json.read_text())
        results = document["results"]
        if document["smoke"] is not args.smoke:
            raise SystemExit(
                f"{args.json} holds a run of another size (smoke: {document['smoke']}); name another file"
            )
    sections: dict[str, Callable[[], Found]] = {
        "a": lambda: section_rates(args, device),
        "b": lambda: section_bits(args, device),
        "c": lambda: section_shares(args, device),
        "d": lambda: section_training(args, device, dict(results.get("d", {}))),
        "e": lambda: section_memory(results.get("d", {})),
        "p": lambda: section_predictions(args),
    }
    for name in args.section or SECTIONS:
        if device is None and not args.smoke and name != "p":
            print(f"section {name}: {NO_DEVICE}")
            found: Found = {"not_run": NO_DEVICE}
            if "not_run" not in results.get(name, found):
                continue  # what a GPU has found is kept
        else:
            started_s = time.monotonic()
            found = sections[name]()
            print(f"section {name}: {format_seconds(time.monotonic() - started_s)}")
        results[name] = found | {"environment": surroundings, "smoke": args.smoke}
    targets = targets_of(results)
    if args.simulated:
        targets = [Target(target.name, None, target.target, None, SIMULATED) for target in targets]
    kept = json.dumps({name: found.get("checksum") for name, found in sorted(results.items())})
    report(args, surroundings, results, hashlib.sha256(kept.encode()).hexdigest()[:16], targets)
    if args.json is not None:
        write_whole(args.json.with_suffix(".md"), markdown(results, targets))


if __name__ == "__main__":
    main()
