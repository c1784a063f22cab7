"""What compact state does to training: held-out loss beside `exact`, with paired seeds.

A small Llama is trained on text. Of each pair (a seed and a beta2) every contender starts from the same weights and
sees the same batches; what is compared is the held-out loss at the end, less that of `exact`. `control` is `exact`
with the last bit of every gradient's mantissa drawn at random: what differs by no more than it differs by chance. The
report gives mean differences with their 95% intervals (Student's t), and which difference the pairs would have shown:
one that such an interval excludes 0 for in four of five repetitions.

Runs of an hour are killed: `--runs` keeps what each found, and goes on from there.

`nearest` is bf16 moments rounded to nearest, known to freeze where beta2 is near 1
(tests/kernels/test_format_decay.py); torchao's and bitsandbytes' 8-bit AdamW, with an fp32 master beside them, run
where they are installed. With `--optimizer muon` it is Muon with its momentum in the formats, at one beta2 of what
AdamW updates there.
"""

from __future__ import annotations

import functools
import hashlib
import math
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from _common import computing, progress
from _harness import Option, Run, digest, main
from _worker import Mastered

import offload
from offload.cli.model import Shape, build_model
from offload.cli.text import Text, draw_windows, load_text
from offload.kernels.reference import round_to_bfloat16

BETAS = (0.95, 0.999)
FORMATS = ("compact16", "compact8")
OTHERS = ("torchao", "bitsandbytes")
HELD_OUT = 0.05
"""Share of the text, at its end, that nobody is trained on."""

QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Half a 95% interval of a mean in standard errors (Student's t), by the number of pairs."""

SHOWN = {2: 16.32, 3: 5.65, 4: 4.25, 5: 3.76, 6: 3.51, 7: 3.37, 8: 3.27, 9: 3.20, 10: 3.15}
"""Standard errors from 0 at which that interval excludes 0 with a probability of 80% (noncentral t)."""


class Nearest(torch.optim.AdamW):
    """Moments in bf16, rounded to nearest."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(round_to_bfloat16(state[name]).float())


def make_optimizer(contender: str, model: Any, sizes: dict[str, Any], beta2: float, seed: int) -> Any:
    settings: dict[str, Any] = {"lr": sizes["lr"], "betas": (0.9, beta2), "weight_decay": 0.1}
    if sizes.get("optimizer") == "muon":
        form = contender if contender in FORMATS else "exact"
        config = offload.OffloadConfig(state_format=form, seed=seed, threads=1)
        settings |= {"adjust_lr_fn": "match_rms_adamw"}
        return offload.Muon(model.named_parameters(), offload=config, **settings)
    if contender in ("exact", "control", *FORMATS):
        form = contender if contender in FORMATS else "exact"
        # Also the embedding: all that the format may touch.
        config = offload.OffloadConfig(state_format=form, seed=seed, threads=1, exact_names=[])
        return offload.AdamW(model.named_parameters(), offload=config, **settings)
    makers = {
        "nearest": lambda: Nearest,
        "torchao": lambda: import_module("torchao.optim").AdamW8bit,
        "bitsandbytes": lambda: import_module("bitsandbytes").optim.AdamW8bit,
    }
    made = makers[contender]()
    return Mastered(model.parameters(), lambda masters: made(masters, **settings))


def available(contenders: tuple[str, ...]) -> Iterator[str]:
    for contender in contenders:
        try:
            import_module(contender)
            yield contender
        except Exception as error:
            print(f"{contender} is left out: {error}")


@functools.cache
def read(data: str | None) -> Text:
    """Return the text, which each process reads once."""
    return load_text(data, min_bytes=1 << 20)


def train(contender: str, sizes: dict[str, Any], beta2: float, seed: int) -> tuple[float, str]:
    """Return the held-out loss at the end and a digest of the weights."""
    text = read(sizes["data"])
    cut = int(len(text.values) * (1 - HELD_OUT))
    trained, held_out = text.values[:cut], text.values[cut:]
    model = build_model(
        Shape(sizes["layers"], sizes["hidden"]), seq=sizes["seq"], dtype=torch.bfloat16, device="cpu", seed=seed
    )
    draws = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(contender, model, sizes, beta2, seed)
    flips = torch.Generator().manual_seed(1000 + seed)
    steps, warmup = sizes["steps"], max(1, sizes["steps"] // 20)
    for step in range(steps):
        lr = sizes["lr"] * min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # torchao's
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        tokens = draw_windows(trained, draws, batch=sizes["batch"], seq=sizes["seq"])
        with computing():
            logits = model(tokens[:, :-1]).logits.float()
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if contender == "control":
            for parameter in model.parameters():
                bit = torch.randint(2, parameter.grad.shape, generator=flips, dtype=torch.int16)
                parameter.grad.view(torch.int16).bitwise_xor_(bit)
        optimizer.step()
        optimizer.zero_grad()
    windows = held_out.long().unfold(
        0, sizes["seq"] + 1, max(1, (len(held_out) - sizes["seq"]) // sizes["evaluated"])
    )
    losses = []
    with torch.no_grad(), computing():
        for tokens in windows[: sizes["evaluated"]].split(32):
            logits = model(tokens[:, :-1]).logits.float()
            losses += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            ).tolist()
    checksum = digest(model.parameters())
    optimizer.close()
    return statistics.fmean(losses), checksum


def trained(task: tuple[str, dict[str, Any], float, int]) -> tuple[tuple[str, float, int], tuple[float, str]]:
    torch.set_num_threads(1)
    contender, sizes, beta2, seed = task
    return (contender, beta2, seed), train(contender, sizes, beta2, seed)


def summary(differences: list[float]) -> dict[str, Any]:
    """Return what pairs say."""
    count = len(differences)
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(count)
    half = QUANTILES[count] * error
    return {
        "differences": differences,
        "mean": mean,
        "interval": [mean - half, mean + half],
        "half_width": half,
        "would_show": SHOWN[count] * error,
    }


def draw(file: Path, found: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = found["loss"]
    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 3.2), sharey=True, squeeze=False)
    for axis, (beta2, found) in zip(axes[0], results.items(), strict=True):
        for place, row in enumerate(found["contenders"].values()):
            axis.plot(row["differences"], [place] * len(row["differences"]), "o", color="#999999", markersize=4)
            axis.errorbar(row["mean"], place, xerr=row["half_width"], fmt="s", color="#1f4e79", capsize=4)
        axis.axvline(0.0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(found["contenders"])), list(found["contenders"]))
        axis.set_title(f"beta2 = {beta2}")
        axis.set_xlabel("held-out loss less that of exact")
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def measure(run: Run) -> None:
    args, pairs = run.args, run.args.pairs
    betas = BETAS[:1] if run.smoke or args.optimizer == "muon" else BETAS
    sizes: dict[str, Any] = {
        "data": args.data, "layers": args.layers, "hidden": args.hidden, "steps": args.steps,
        "seq": 64, "batch": 8, "lr": 2e-3, "evaluated": 4 if run.smoke else 512,
    }  # fmt: skip
    contenders = ("exact", "control", *FORMATS)
    if args.optimizer == "muon":
        sizes["optimizer"] = "muon"
    elif not run.smoke:
        contenders += ("nearest", *available(OTHERS))
    seeds = {
        name: range(min(pairs, args.pairs_of_others or pairs) if name in OTHERS else pairs) for name in contenders
    }
    keys = [(name, beta2, n) for n in range(pairs) for beta2 in betas for name in contenders if n in seeds[name]]
    tasks = [(name, sizes, beta2, n) for name, beta2, n in keys if not run.kept.has(f"{name}, {beta2}, {n}")]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for done, ((name, beta2, n), value) in enumerate(pool.imap_unordered(trained, tasks), 1):
            run.kept.find(f"{name}, {beta2}, {n}", lambda value=value: value)
            progress(f"{done} of {len(tasks)} runs: {name}, beta2 {beta2}, seed {n}: {value[0]:.4f}")
    found = {(name, beta2, n): run.kept.find(f"{name}, {beta2}, {n}", tuple) for name, beta2, n in keys}
    results = {}
    for beta2 in betas:
        exact = [found["exact", beta2, seed][0] for seed in range(pairs)]
        rows = {
            name: summary([found[name, beta2, seed][0] - exact[seed] for seed in seeds[name]])
            for name in contenders[1:]
        }
        results[str(beta2)] = {"exact_loss": statistics.fmean(exact), "contenders": rows}
        for name, row in rows.items():
            interval = "[{:+.4f}, {:+.4f}]".format(*row["interval"])
            print(f"beta2 {beta2}, {name}: {row['mean']:+.4f} {interval}, would show {row['would_show']:.4f}")
        for name in FORMATS:
            what = f"beta2 {beta2}, {name}: mean loss difference to exact over the control's 95% half-width"
            run.at_most(what, abs(rows[name]["mean"]) / rows["control"]["half_width"], 1.0)
    digests = "".join(found[key][1] for key in sorted(found) if key[0] in ("exact", *FORMATS))
    run.checksums.append(hashlib.sha256(digests.encode()).hexdigest()[:16])
    shape = Shape(sizes["layers"], sizes["hidden"])
    model = build_model(shape, seq=sizes["seq"], dtype=torch.bfloat16, device="cpu", seed=0)
    sizes |= {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_tokens": sizes["steps"] * sizes["batch"] * sizes["seq"],
        "text_bytes": len(read(args.data).values),
    }
    versions = {name: metadata.version(name) for name in contenders if name in OTHERS}
    made_at = {run.described["commit"]: len(keys)}
    run.results |= {"sizes": sizes, "pairs": pairs, "runs_made_at": made_at, "versions": versions, "loss": results}


MANY = {"type": int, "choices": QUANTILES}
OPTIONS = (
    Option("data", None, help="text file or folder; None for the sources of Python's standard library"),
    Option("pairs", 5, 2, "seeds for each beta2", more=MANY),
    Option("pairs_of_others", None, help=f"of {' and '.join(OTHERS)}, which take longer", more=MANY),
    Option("optimizer", "adamw", more={"choices": ("adamw", "muon")}),
    Option("steps", 1500, 3),
    Option("layers", 2, 1),
    Option("hidden", 128, 64),
    Option("workers", os.cpu_count() or 1, help="runs at once"),
)

if __name__ == "__main__":
    main(__doc__, measure, options=OPTIONS, picture=draw, runs=True, device="cpu")
