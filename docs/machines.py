"""The README's table "your model, your machine", as `offload plan` predicts it."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from offload import cli
from offload.cli.shapes import MODELS

GIB = 1 << 30
ADAMW_BYTES = 16
"""Of a parameter, in GPU memory: weight and gradient in 16 bits, master and two moments in fp32."""
CPU_OFFLOAD_BYTES = 16
"""Of a parameter, in host memory: what DeepSpeed's own estimator says of ZeRO-3 with its optimizer on the CPU, before
its factor for buffers (`estimate_zero3_model_states_mem_needs`)."""


@dataclass(frozen=True)
class Machine:
    """A row: a model, a machine, and how it is trained there.

    Attributes:
        model: As `--model` has it.
        title: Of the model and the machine.
        words: Of the machine, and of how it is trained, as `offload plan` takes them.
        gpus: How many GPUs there are.
    """

    model: str
    title: str
    words: str
    gpus: int = 1


NVME = "7GB/s,5GB/s:"
MACHINES = (
    Machine(
        "llama-1b",
        "Llama 1B, a laptop: 8 GiB GPU, 16 GiB, one NVMe",
        "--gpu 8GiB --link 12GB/s --host 16GiB --drive 3.5GB/s:1TB --cores 8 --tokens 1024 --recompute "
        "--no-keep-grads",
    ),
    Machine(
        "llama-8b",
        "Llama 8B, a desktop: 24 GB (RTX 4090), 64 GiB, one NVMe",
        f"--gpu rtx-4090 --host 64GiB --drive {NVME}2TB --cores 16 --tokens 16384 --accumulate 8 --recompute "
        "--no-keep-grads",
    ),
    Machine(
        "llama-8b",
        "Llama 8B, a laptop: 12 GiB GPU, 32 GiB, one NVMe",
        "--gpu 12GiB --link 12GB/s --host 32GiB --drive 3.5GB/s:1TB --cores 8 --tokens 4096 --accumulate 8 "
        "--recompute --flops 30e12",
    ),
    Machine(
        "qwen-32b",
        "Qwen 32B, one card of 24 GB (RTX 4090), 256 GiB, two NVMe",
        f"--gpu rtx-4090 --link 25GB/s --host 200GB/s:256GiB --drive {NVME}2TB {NVME}2TB --cores 32 --tokens 32768 "
        "--accumulate 16 --recompute",
    ),
    Machine(
        "qwen-32b",
        "Qwen 32B, one card of 48 GB (L40S), 256 GiB, two NVMe",
        f"--gpu l40s --host 200GB/s:256GiB --drive {NVME}2TB {NVME}2TB --cores 32 --tokens 32768 --accumulate 4 "
        "--recompute",
    ),
    Machine(
        "llama-70b",
        "Llama 70B, one H100 (80 GB), 1 TiB, two NVMe",
        f"--gpu h100 --host 400GB/s:1TiB --drive {NVME}4TB {NVME}4TB --cores 96 --tokens 32768 --accumulate 4 "
        "--recompute",
    ),
    Machine(
        "qwen-32b",
        "Qwen 32B, two such cards",
        f"--gpu 2xl40s --host 200GB/s:256GiB --drive {NVME}2TB {NVME}2TB --cores 32 --tokens 16384 --accumulate 8 "
        "--recompute",
        gpus=2,
    ),
    Machine(
        "llama-70b",
        "Llama 70B, a node: 8 x 80 GB (H100), 1 TiB, two NVMe",
        f"--gpu 8xh100 --host 400GB/s:1TiB --drive {NVME}4TB {NVME}4TB --cores 96 --tokens 16384 --accumulate 4 "
        "--recompute",
        gpus=8,
    ),
    Machine(
        "qwen-32b",
        "Qwen 32B, RL in turns: 8 x 80 GB (H100), 512 GiB, two NVMe",
        f"--gpu 8xh100 --host 300GB/s:512GiB --drive {NVME}4TB {NVME}4TB --cores 64 --tokens 8192 --accumulate 2 "
        "--recompute",
        gpus=8,
    ),
)


RTX_4090 = "--gpu rtx-4090 --link 25GB/s --host 200GB/s:1TiB --cores 64 --recompute --weights-on host"
PUBLISHED = (
    ("RoundPipe (README of thustorage/RoundPipe, arXiv 2604.27085)", "llama-8b", 3142),
    ("the same", "qwen-32b", 740),
    ("LLMQ in bf16 (IST-DASLab/llmq at b77d969)", "qwen-7b", 2800),
    ("the same", "qwen-14b", 1300),
)
"""Tokens a second on one RTX 4090 with weights in host memory; by which system, of a model of which size."""
MICRO_STEPS, ROWS = 8, 1024
"""Of an iteration; and the grain of what a micro-step has of tokens."""


def streaming(page: Path) -> str:
    """Return published rates of weights that come from host memory, beside those that are predicted of ours.

    One constant is taken from the first row: the operations a second at which it would do nothing but compute.
    """
    flops = 8 * MODELS[PUBLISHED[0][1]].params * PUBLISHED[0][2]
    head = "| published | tokens a second | all hidden | predicted of ours, tokens of a micro-step |"
    lines = [head, "|---|---|---|---|"]
    for system, model, per_s in PUBLISHED:
        rows, predicted = _most_rows(model, flops)
        hidden = flops / 8 / MODELS[model].params
        ours = f"{predicted:,.0f} ({predicted / per_s - 1:+.0%}), {rows:,}"
        lines.append(f"| {system}: {model} | {per_s:,} | {hidden:,.0f} ({hidden / per_s - 1:+.0%}) | {ours} |")
    command = f"offload plan --model {PUBLISHED[1][1]} {RTX_4090} --tokens {MICRO_STEPS * 3 * ROWS}"
    lines += ["", "```", f"{command} --accumulate {MICRO_STEPS} --flops {flops:.4g}", "```"]
    return "\n".join(lines)


@cache
def _most_rows(model: str, flops: float) -> tuple[int, float]:
    """Return the most tokens of a micro-step that leave what has to stay free of the card, and tokens a second."""
    best = 0, 0.0
    for rows in range(ROWS, 64 * ROWS, ROWS):
        tokens = MICRO_STEPS * rows
        words = f"plan --model {model} {RTX_4090} --tokens {tokens} --accumulate {MICRO_STEPS} --flops {flops:.4g}"
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            status = cli.main([*words.split(), "--json"])
        if status or any("left free" in each for each in json.loads(out.getvalue())["warnings"]):
            break
        best = rows, tokens / min(json.loads(out.getvalue())["hidden_iteration_s"].values())
    return best


@cache
def planned(machine: Machine, state_format: str) -> dict[str, Any] | None:
    """Return the best setting of what the words leave open; None if the model does not fit."""
    words = ["plan", "--model", machine.model, *machine.words.split(), "--state-format", state_format]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = cli.main([*words, "--advise", "--json"])
    found: list[dict[str, Any]] = [] if status else json.loads(out.getvalue())["settings"]
    return found[0] if found else None


def gib(nbytes: float) -> str:
    """Return a size in GiB: whole, where there are ten or more, or none."""
    return f"{nbytes / GIB:.0f}" if nbytes >= 10 * GIB or not nbytes else f"{nbytes / GIB:.1f}"


def seconds(value: float) -> str:
    """Return seconds with two significant digits."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def marked(setting: dict[str, Any]) -> str:
    """Return the mark of a time that rests on an assumed rate."""
    return "\\*" if setting["guessed"] else ""


def fitting(page: Path) -> str:
    """Return the table for a page."""
    head = (
        "your model, your machine",
        "fits",
        "GPU (each), host, drives",
        "step, iteration",
        "step, `compact8`",
        "torch's AdamW: GPU (each)",
        "DeepSpeed, CPU: host",
    )
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    given: tuple[str, str, str] = ("", "", "")
    guessed = False
    for machine in MACHINES:
        params = MODELS[machine.model].params
        beside = gib(ADAMW_BYTES * params / machine.gpus), gib(CPU_OFFLOAD_BYTES * params)
        exact, compact = planned(machine, "exact"), planned(machine, "compact8")
        if exact is None or compact is None:
            weights = gib(2 * params / machine.gpus)
            lines.append(f"| {' | '.join((machine.title, f'no: {weights} of weights', '-', '-', '-', *beside))} |")
            continue
        phases = exact["parked"]
        given = gib(machine.gpus * phases["host_bytes"]), gib(phases["gpu_bytes"]), seconds(phases["seconds"])
        host = gib(machine.gpus * sum(exact["host_memory_bytes"].values()))
        sizes = f"{gib(sum(exact['gpu_memory_bytes'].values()))}, {host}, {gib(exact['storage_bytes'])}"
        iteration = f", {seconds(exact['iteration_s'])} s" if exact["computes"] else ""
        times = f"{seconds(exact['step_s'])} s{iteration}", f"{seconds(compact['step_s'])} s{marked(compact)}"
        guessed |= bool(compact["guessed"])
        how = {"gpu": "yes", "host": "yes, weights in host memory", "path": "yes, weights in a file"}
        fits = how[exact["weights_on"]]
        lines.append(f"| {' | '.join((machine.title, fits, sizes, *times, *beside))} |")
    lines += [
        "",
        "**Predicted** by `offload plan`, not measured: sizes in GiB, with activations (not torch's, DeepSpeed's), "
        "which are",
        "computed again, and `keep_grads=False` where that is needed; a card computes at 40% of its data sheet, "
        "and a tenth of",
        "its memory (2 GiB at least) stays free. Drives have the state; a checkpoint kept there and the next one",
        "take up to twice as much as all state. Iterations hide the step in backward, too, where that pays: as long",
        f"as few steps clip. Between turns of the last row `park()` gives back {given[0]} GiB of host memory and",
        f"{given[1]} of each GPU's in {given[2]} s. Weights that do not fit: [docs/weights.md](docs/weights.md).",
        "[The commands](docs/planning.md#the-table-of-the-readme).",
    ]
    if guessed:
        lines += ["", "\\* Assumed, not known: as many parameters a second as of exact state."]
    return "\n".join(lines)


def commands(page: Path) -> str:
    """Return the commands behind the table."""
    fit = [machine for machine in MACHINES if planned(machine, "exact") is not None]
    return "\n".join(["```", *(f"offload plan --model {each.model} {each.words} --advise" for each in fit), "```"])
