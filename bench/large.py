"""One large model on one machine: what `offload plan` said before the training, and what happened.

Weights and gradients in bf16 are all that memory has to hold, beside new weights made during backward; state is in
one format, none of it resident, and steps are hidden in forward and in backward. With --gradient-memory, gradients
beyond it leave for the disk, weights alone fill the memory, and steps are hidden in forward. The rates are those of a
probe made just before; forward and backward are predicted by the FLOP/s that a small model of the same width reaches,
the process and its activations by what that model took beyond its own plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _common import end_with_parent, progress
from _harness import Option, Run, main

from offload.cli.model import choose_shape
from offload.cli.values import parse_count
from offload.measure import full_probe, save_rates

SEQ = 128
FEW_LAYERS = (2, 4)
"""Of the small models: two, so that what a layer takes is known."""

UNCLIPPED = 1000.0
"""Norms are taken; no gradient has so large a one, and what is made ahead is kept."""

WAYS = ("read", "write")

PLANNED = (
    "forward_s",
    "backward_s",
    "step_s",
    "iteration_s",
    "hidden_iteration_s",
    "bound_s",
    "lanes",
    "speculation",
)
SUMMED_UP = ("steps", "seconds", "tokens_per_s", "forward_s", "backward_s", "step_s", "optimizer_step_s", "lanes")
"""What the report has of a plan and of a summary: neither their folders nor this machine's."""

FLOPS_PER_WEIGHT = 6
"""Of forward and backward together, for each token."""


def offload(command: str, folder: Path, *options: object) -> tuple[dict[str, Any], int]:
    """Run a command of ours; return what it prints as JSON, and its peak of resident memory in bytes."""
    line = [sys.executable, "-m", "offload.cli", command, "--json", *map(str, options)]
    with (folder / f"{command}.out").open("w+") as out, (folder / f"{command}.log").open("w+") as log:
        process = subprocess.Popen(line, stdout=out, stderr=log, cwd=folder, preexec_fn=end_with_parent)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        log.seek(0)
        if process.returncode:
            raise SystemExit(f"offload {command} failed with {process.returncode}:\n{log.read()[-3000:]}")
        found: dict[str, Any] = json.load(out)
    return found, usage.ru_maxrss << 10


def plan(folder: Path, numel: int, state: Sequence[object], *more: object) -> dict[str, Any]:
    return offload("plan", folder, "--params", numel, "--gpus", 0, *state, *more)[0]


def train(folder: Path, name: str, steps: int, batch: int, *more: object) -> tuple[dict[str, Any], int]:
    common = ("--seq", SEQ, "--batch", batch, "--steps", steps, "--clip", UNCLIPPED, "--lr", 1e-5)
    return offload("train", folder, *common, "--output", folder / name, "--quiet", *more)


def small_models(
    folder: Path, state: Sequence[object], hidden: int, batch: int
) -> tuple[float, list[tuple[int, int]]]:
    """Return the FLOP/s of forward and backward, and for each small model its layers and what the plan leaves out."""
    flops_per_s, beyond = 0.0, []
    for layers in FEW_LAYERS:
        progress(f"a model of {layers} layers")
        shape = ("--layers", layers, "--hidden", hidden)
        found, peak = train(folder, f"small-{layers}", 4, batch, *shape, *state)
        numel = found["model"]["numel"]
        planned = plan(folder, numel, state)["node"]["used_bytes"]
        beyond.append((layers, peak - planned))
        flops_per_s = FLOPS_PER_WEIGHT * numel * batch * SEQ / (found["forward_s"] + found["backward_s"])
    return flops_per_s, beyond


def line_through(points: Sequence[tuple[int, int]], at: int) -> int:
    (a, low), (b, high) = points
    return round(low + (high - low) / (b - a) * (at - a))


def measure(run: Run) -> None:
    args, folder, rates = run.args, run.folder, run.folder / "rates.json"
    shape = choose_shape(args.params)
    progress("rates")
    few = {"seconds": 1.0, "numel": 1 << 17} if run.smoke else {}
    save_rates(rates, full_probe([str(folder)], **few))
    state = ["--state-format", args.state_format, "--host-memory", 0, "--rates", rates]
    hidden_in = "both"
    if args.gradient_memory is not None:
        state += ["--gradient-memory", args.gradient_memory]
        hidden_in = "forward"  # what leaves memory is not there to be updated early
    flops_per_s, beyond = small_models(folder, state, shape.hidden, args.batch)
    said = plan(folder, shape.numel, state, "--tokens", args.batch * SEQ, "--flops", flops_per_s)
    if hidden_in == "both":  # all of it, both ways
        moved = dict.fromkeys(WAYS, said["speculation"]["storage_bytes"])
    else:
        read = sum(lane["bytes"] for name, lane in said["lanes"].items() if name.startswith("read"))
        moved = {"read": read, "write": sum(path["written_bytes_per_step"] for path in said["paths"])}
    ahead_bytes = said["speculation"]["memory_bytes"] if hidden_in == "both" else 0
    predicted = {
        "iteration_s": said["hidden_iteration_s"][hidden_in],
        "waiting_iteration_s": said["iteration_s"],
        "peak_bytes": said["node"]["used_bytes"] + ahead_bytes + line_through(beyond, shape.layers),
        **{f"{way}_bytes": moved[way] for way in WAYS},
    }
    print(f"{shape.numel:,} parameters; predicted: {predicted}", flush=True)
    progress("the large model")
    sized = ("--layers", shape.layers, "--hidden", shape.hidden, *state)
    found, peak = train(folder, "large", args.steps, args.batch, *sized, "--overlap", hidden_in)
    lines = [json.loads(line) for line in (folder / "large" / "metrics.jsonl").read_text().splitlines()]
    happened = {
        "iteration_s": args.batch * SEQ / found["tokens_per_s"],
        "peak_bytes": peak,
        **{f"{way}_bytes": sum(path[f"{way}_bytes"] for path in found["paths"]) for way in WAYS},
    }
    print(f"happened: {happened}")
    run.results |= {
        "model": found["model"],
        "tokens": args.batch * SEQ,
        "state_format": args.state_format,
        "gradient_memory": args.gradient_memory,
        "rates_of": {"flops_per_s": flops_per_s, "beyond_plan_bytes": beyond},
        "plan": {name: said[name] for name in PLANNED},
        "predicted": predicted,
        "happened": happened,
        "summary": {name: found[name] for name in SUMMED_UP},
        "steps": lines,
    }
    for (name, value), most in zip(happened.items(), (0.15, 0.05, 0.02, 0.02), strict=True):
        run.at_most(f"{name}: distance of what was predicted", abs(predicted[name] / value - 1), most)
    run.checksums.append(hashlib.sha256(json.dumps([line["loss"] for line in lines]).encode()).hexdigest()[:16])


OPTIONS = (
    Option("params", "3B", "2M", "parameters of the model", read=parse_count),
    Option("batch", 4, 1, f"sequences of {SEQ} bytes"),
    Option("steps", 20, 3),
    Option("state_format", "compact16", more={"choices": ("exact", "compact16", "compact8")}),
    Option("gradient_memory", None, help="for gradients; all stay in memory without", more={"metavar": "SIZE"}),
)

if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, path=True, device="cpu")
