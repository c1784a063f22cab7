"""What compact state does to training: held-out loss beside `exact`, with paired seeds.

A small Llama is trained on text. Of each pair (a seed and a beta2) every contender starts from the same weights and
sees the same batches; what is compared is the held-out loss at the end, less that of `exact`. `control` is `exact`
with the last bit of every gradient's mantissa drawn at random: what differs by no more than it differs by chance. The
report gives mean differences with their 95% intervals (Student's t), and which difference the pairs would have shown:
one that such an interval excludes 0 for in four of five repetitions.

Runs of an hour are killed: `--runs` keeps what each found, and goes on from there. Runs of another commit count where
`--made-at` names it, which is for commits between which no contender's bits changed: the digest of the weights, kept
with each loss, tells that of two runs.

`nearest` is bf16 moments rounded to nearest, known to freeze where beta2 is near 1
(tests/kernels/test_format_decay.py); torchao's and bitsandbytes' 8-bit AdamW, with an fp32 master beside them, run
where they are installed. With `--optimizer muon` it is Muon with its momentum in the formats, at one beta2 of what
AdamW updates there.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from _common import Target, arguments, computing, environment, progress, report

import offload
from offload.cli.model import Shape, build_model
from offload.cli.text import draw_windows, load_text
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


class Mastered:
    """Another optimizer over fp32 copies of the weights."""

    def __init__(self, parameters: list[torch.nn.Parameter], make: Callable[[list[Any]], Any]) -> None:
        self._parameters = parameters
        self._masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
        self._inner = make(self._masters)
        self.param_groups = self._inner.param_groups

    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self._inner.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        pass


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
    return Mastered(list(model.parameters()), lambda masters: made(masters, **settings))


def available(contenders: tuple[str, ...]) -> Iterator[str]:
    for contender in contenders:
        try:
            import_module(contender)
            yield contender
        except Exception as error:
            print(f"{contender} is left out: {error}")


def train(contender: str, sizes: dict[str, Any], beta2: float, seed: int) -> tuple[float, str]:
    """Return the held-out loss at the end and a digest of the weights."""
    text = load_text(sizes["data"], min_bytes=1 << 20)
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
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().view(torch.int16).numpy().tobytes())
    optimizer.close()
    return statistics.fmean(losses), digest.hexdigest()


def run(task: tuple[str, dict[str, Any], float, int]) -> tuple[tuple[str, float, int], tuple[float, str]]:
    torch.set_num_threads(1)
    contender, sizes, beta2, seed = task
    return (contender, beta2, seed), train(contender, sizes, beta2, seed)


def kept_runs(
    file: Path | None, commits: list[str], sizes: dict[str, Any]
) -> tuple[dict[tuple[str, float, int], tuple[float, str]], dict[tuple[str, float, int], str]]:
    """Return what runs of these sizes are kept in a file, and at which of some commits each was made."""
    found, made_at = {}, {}
    lines = file.read_text().splitlines() if file and file.exists() else []
    for (commit, sizes_then), key, (loss, digest) in map(json.loads, lines):
        if commit not in commits or sizes_then != sizes:
            continue
        contender, beta2, seed = key
        of = contender, beta2, seed
        if of in found and found[of] != (loss, digest):
            raise SystemExit(f"{file}: {contender}, beta2 {beta2}, seed {seed} ended otherwise at {commit}")
        found[of], made_at[of] = (loss, digest), commit
    return found, made_at


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


def draw(results: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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


def main() -> None:
    parser = arguments(__doc__, picture=True)
    parser.add_argument("--data", help="text file or folder (default: the sources of Python's standard library)")
    parser.add_argument("--pairs", type=int, choices=QUANTILES, default=5, help="seeds for each beta2")
    parser.add_argument(
        "--pairs-of-others",
        type=int,
        choices=QUANTILES,
        help=f"seeds for each beta2 of {' and '.join(OTHERS)}, which take longer (default: as many)",
    )
    parser.add_argument(
        "--runs", type=Path, metavar="FILE", help="add each run's loss there; skip those that are there"
    )
    parser.add_argument(
        "--made-at", nargs="+", default=[], metavar="COMMIT", help="take runs of these commits from there, too"
    )
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at once")
    args = parser.parse_args()
    described = environment(device="cpu")
    sizes: dict[str, Any] = {
        "data": args.data, "layers": args.layers, "hidden": args.hidden, "steps": args.steps,
        "seq": 64, "batch": 8, "lr": 2e-3, "evaluated": 512,
    }  # fmt: skip
    if described["compute"] != "bf16":  # which runs that were kept earlier do not say
        sizes["compute"] = described["compute"]
    pairs, betas = args.pairs, BETAS
    if args.smoke:
        sizes |= {"layers": 1, "hidden": 64, "steps": 3, "evaluated": 4}
        pairs, betas = 2, BETAS[:1]
    contenders = ("exact", "control", *FORMATS)
    if args.optimizer == "muon":
        sizes["optimizer"], betas = "muon", BETAS[:1]
    elif not args.smoke:
        contenders += ("nearest", *available(OTHERS))
    found, made_at = kept_runs(args.runs, [described["commit"], *args.made_at], sizes)
    seeds = {
        name: range(min(pairs, args.pairs_of_others or pairs) if name in OTHERS else pairs) for name in contenders
    }
    tasks = [
        (name, sizes, beta2, seed)
        for seed in range(pairs)
        for beta2 in betas
        for name in contenders
        if seed in seeds[name]
    ]
    made_at = {(name, *of): made_at.get((name, *of), described["commit"]) for name, _, *of in tasks}
    tasks = [task for task in tasks if (task[0], *task[2:]) not in found]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for done, (key, value) in enumerate(pool.imap_unordered(run, tasks), 1):
            found[key] = value
            if args.runs:
                with args.runs.open("a") as file:
                    print(json.dumps([[described["commit"], sizes], key, value]), file=file)
            progress(f"{done} of {len(tasks)} runs: {key[0]}, beta2 {key[1]}, seed {key[2]}: {value[0]:.4f}")
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
    if args.picture:
        draw(results, args.picture)
    targets = [
        Target.at_most(
            f"beta2 {beta2}, {name}: mean loss difference to exact over the control's 95% half-width",
            abs(rows["contenders"][name]["mean"]) / rows["contenders"]["control"]["half_width"],
            1.0,
        )
        for beta2, rows in results.items()
        for name in FORMATS
    ]
    checksum = hashlib.sha256(
        "".join(found[key][1] for key in sorted(found) if key[0] in ("exact", *FORMATS)).encode()
    )
    text = load_text(args.data, min_bytes=1 << 20)
    model = build_model(
        Shape(sizes["layers"], sizes["hidden"]), seq=sizes["seq"], dtype=torch.bfloat16, device="cpu", seed=0
    )
    described_sizes = sizes | {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained_tokens": sizes["steps"] * sizes["batch"] * sizes["seq"],
        "text_bytes": len(text.values),
    }
    versions = {name: metadata.version(name) for name in contenders if name in OTHERS}
    commits = dict(Counter(made_at.values()))
    document = {
        "sizes": described_sizes, "pairs": pairs, "runs_made_at": commits, "versions": versions, "loss": results
    }  # fmt: skip
    report(args, described, document, checksum.hexdigest()[:16], targets)


if __name__ == "__main__":
    main()
