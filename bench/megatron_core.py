"""Megatron-Core's own CPU offload, and ours below its distributed optimizer: in host memory, with nothing resident.

Everybody trains the same GPT in Megatron's loop of one rank, on the CPU (`bench/_megatron.py` says how): weights in
bf16, gradients in Megatron's buffer of fp32, `use_precision_aware_optimizer`, gradients clipped. Stock keeps masters,
moments and copies of gradients in host memory (`optimizer_cpu_offload`, all of it), and steps by torch's fused AdamW.

The *floor* of an update is what it has to move: bytes of memory at what a stream over its operands reaches, and bytes
of the disk at what reads and writes of tiles reach, both measured in the same rounds; the longer one counts. That of
an iteration has all else beside it, as it takes without an update: forward, backward, norm, gathering of weights.
What a GPU would add is not there: gradients and weights cross no PCIe, they are copied within host memory.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import _megatron
from _common import cores
from _contenders import ON_DISK, same_losses
from _contest import BASELINE, Contender, Outcome, Schedule, markdown, row, run_group, sum_of_losses, times_faster
from _harness import Option, Run, main, show
from _needs import MEGATRON

from offload.cli.model import choose_shape
from offload.cli.values import parse_count

STOCK = "Megatron, CPU offload"
OURS_MEMORY = "ours, state in host memory"
OURS_DISK = "ours, nothing resident"
WITHOUT = "all but the update"
"""What the baseline is here: forward, backward, and Megatron's step, in which nothing is updated."""
GRADIENTS, UPDATE, WEIGHTS = 8, 28, 6
"""Bytes a parameter: stock's copies of fp32 gradients are read and written; an update reads gradients and state, and
writes state; and stock's weights are written from masters that are read. Ours writes weights with their masters."""
MEMORY_BYTES = {STOCK: GRADIENTS + UPDATE + WEIGHTS, OURS_MEMORY: UPDATE + 2, OURS_DISK: UPDATE + 2}
NEAR = 2.0**-9
"""Losses of another order of rounding may differ by so much, relatively: half a unit in the last place of a bf16
weight, which is all that forward sees of masters."""
OPTIONS = (
    Option("params", "200M", "300k", "parameters of the model", read=partial(parse_count, most=10**12)),
    Option("tokens", 512, 16, "of a batch"),
    Option("rounds", 7, 1, "that count"),
    Option("iterations", 3, 2, "of a round; the first does not count"),
)


def field() -> list[Contender]:
    """Return who trains."""
    threads = {"threads": cores()}
    return [
        Contender(BASELINE, "megatron"),
        Contender(STOCK, "megatron", {"offload": None}),
        Contender(OURS_MEMORY, "megatron", {"offload": threads}),
        Contender(OURS_DISK, "megatron", {"offload": {**threads, **ON_DISK}}),
    ]


def floors(
    name: str, found: Mapping[str, Any], speeds: Sequence[Mapping[str, float]], numel: int
) -> dict[str, float]:
    """Return the seconds that a contender's update cannot be shorter than: of memory, of the disk."""
    rates = {what: statistics.median(speed[f"{what}_bytes_per_s"] for speed in speeds) for what in ("memory", "disk")}
    disk_bytes = (found["kernel_read_bytes"] or 0.0) + (found["kernel_write_bytes"] or 0.0)
    return {
        "memory_floor_s": MEMORY_BYTES.get(name, 0) * numel / rates["memory"],
        "disk_floor_s": disk_bytes / rates["disk"],
    }


def judge(run: Run, outcomes: Mapping[str, Outcome], rows: Mapping[str, Any], tokens: int) -> None:
    """Note what is promised."""
    stock, ours, why = outcomes[STOCK], [outcomes[OURS_MEMORY], outcomes[OURS_DISK]], "one of them did not run"
    for mine, least in zip(ours, (1.0, 0.5), strict=True):
        both = mine.ran and stock.ran
        faster = times_faster(mine, stock, tokens) if both else None
        run.at_least(f"{mine.name}: iterations, times as fast as Megatron's CPU offload", faster, least, why)
        peak = mine.peak_bytes / stock.peak_bytes if both else None
        run.at_most(f"{mine.name}: peak memory over that of Megatron's CPU offload", peak, 1.0, why)
        over = rows[mine.name]["iteration_s"] / rows[mine.name]["floor_s"] if mine.name in rows else None
        run.at_most(f"{mine.name}: iteration over its floor", over, 1.2, why)
    losses = [each.losses for each in ours if each.ran]
    far = [abs(a - b) / abs(b) for mine in losses for a, b in zip(mine, stock.losses, strict=False)]
    run.results["losses_differ"] = max(far, default=None)
    what = "losses of ours and of Megatron's CPU offload differ, relatively"
    run.at_most(what, max(far) if far else None, NEAR, why)
    what = "losses with state in host memory and on the disk, bit for bit"
    run.at_least(what, same_losses([each for each in ours if each.ran]), 1.0, why)


def measure(run: Run) -> None:
    size, shape = run.args, choose_shape(run.args.params)
    numel = _megatron.numel(shape, size.tokens)
    sized = {"layers": shape.layers, "hidden": shape.hidden}
    common = {"shape": sized, "numel": numel, "seq": size.tokens, "smoke": run.smoke}
    print(
        f"model: {numel:,} parameters, {shape.layers} layers of {shape.hidden}, bf16 weights, fp32 gradients, "
        f"computed in {run.described['compute']}, {cores()} threads"
    )
    names = () if MEGATRON.there() else [each.name for each in field()]
    absent = dict.fromkeys(names, "not run: Megatron-Core is not installed")
    schedule = Schedule(((size.tokens, size.iterations),), size.rounds, size.rounds, math.inf)
    outcomes, speeds = run_group(field(), schedule, common, run.folder, missing={**absent, **run.missing})
    base = outcomes[BASELINE]
    rows: dict[str, Any] = {}
    for name, outcome in outcomes.items():
        if not outcome.iterations:
            continue
        found = rows[WITHOUT if outcome is base else name] = row(outcome, base, speeds, size.tokens, numel)
        found |= floors(name, found, speeds, numel)
        update_s = max(found["memory_floor_s"], found["disk_floor_s"])
        found["floor_s"] = rows[WITHOUT]["iteration_s"] + update_s
    failed = {name: each.failed for name, each in outcomes.items() if each.failed}
    print(f"\n{markdown(rows, failed)}\n", flush=True)
    for name, found in rows.items():
        show(name, found, "iteration_s", "floor_s", "memory_floor_s", "disk_floor_s", "peak_bytes")
    run.results |= {
        "model": {**sized, "numel": numel},
        "tokens": size.tokens,
        "threads": cores(),
        "memory_bytes_per_parameter": MEMORY_BYTES,
        "speeds": speeds,
        "rows": rows,
        "contenders": {name: asdict(each) for name, each in outcomes.items()},
    }
    judge(run, outcomes, rows, size.tokens)
    run.checksums.append(sum_of_losses(outcomes.values()))


if __name__ == "__main__":
    main(
        __doc__,
        measure,
        options=OPTIONS,
        device="cpu",
        path=True,
        needs=lambda args: {each.name: [MEGATRON] for each in field()},
    )
