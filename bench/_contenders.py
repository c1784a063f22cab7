"""Who trains against whom in `bench/iteration.py` and `bench/deepspeed.py`, and how each is set up.

Each is used as its own documentation says. DeepSpeed's subgroups and reduction buckets have 10 million elements (by
default the whole model is one, which takes a gigabyte more and is slower, stock and ours alike); its NVMe offload
runs with its pipelining off and on, with the settings of its aio that a sweep in the same run found fastest.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _contest import (
    BASELINE,
    SPREAD,
    STATE_BYTES,
    Contender,
    ContenderError,
    Outcome,
    Schedule,
    Worker,
    best,
    common_of,
    markdown,
    picture,
    row,
    run_group,
    spread,
    sum_of_losses,
    times_faster,
    times_shorter,
)
from _harness import Option, Run, main
from _needs import DEEPSPEED, LIBAIO, NATIVE, Need

from offload.cli.model import choose_shape
from offload.cli.values import parse_count, parse_number

SUBGROUP_NUMEL = 10_000_000
BUFFERS = {False: 4, True: 12}
"""DeepSpeed's buffer_count: its default; with pipelining the default fails an assertion, 12 works."""

STOCK_CPU = "DeepSpeed, CPU offload"
STOCK_NVME = "DeepSpeed, NVMe offload"
STOCK_PIPELINED = "DeepSpeed, NVMe offload, pipelined"
EQUAL = {
    STOCK_NVME: "ours in DeepSpeed, memory as NVMe offload",
    STOCK_PIPELINED: "ours in DeepSpeed, memory as NVMe offload, pipelined",
}
OURS_MEMORY = "ours in DeepSpeed, all in memory"
OURS_HIDDEN = "ours in DeepSpeed, memory as NVMe offload, hidden in forward and backward"
OURS_DISK = "ours in DeepSpeed, nothing resident"
OURS_DISK_HIDDEN = "ours in DeepSpeed, nothing resident, hidden in forward and backward"
FUSED = "torch AdamW, fused"
ALONE_MEMORY = "ours, all in memory"

ON_DISK = {"host_memory": 0, "paths": ["{path}"]}
HIDDEN = {**ON_DISK, "overlap": "both"}

NATIVE_SKIPPED = "left out of the smoke run: its native part takes minutes to build"


def deepspeed(name: str, settings: Mapping[str, Any], *, smoke: bool, left_out: str = "", **more: Any) -> Contender:
    pieces = 100_000 if smoke else SUBGROUP_NUMEL
    zero = {"stage": 3, "sub_group_size": pieces, "reduce_bucket_size": pieces, **settings.get("zero", {})}
    rest = {key: value for key, value in settings.items() if key != "zero"}
    return Contender(name, "deepspeed", {"zero_optimization": zero, **rest}, left_out=left_out, **more)


def in_deepspeed(name: str, ours: Mapping[str, Any], *, smoke: bool, **more: Any) -> Contender:
    settings = {"zero": {"offload_optimizer": {"device": "cpu"}}, "multi_tier_offload": dict(ours)}
    return deepspeed(name, settings, smoke=smoke, **more)


def deepspeed_baseline(smoke: bool) -> Contender:
    return deepspeed(BASELINE, {"no_optimizer": True}, smoke=smoke)


def memory_group(smoke: bool) -> list[Contender]:
    torch_adam = {"adam": {"torch_adam": True, "fused": True}}
    stock: dict[str, Any] = {"zero": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
    if smoke:  # its own Adam is compiled at first use
        stock |= {**torch_adam, "zero_force_ds_cpu_optimizer": False}
    return [
        deepspeed_baseline(smoke),
        deepspeed("DeepSpeed, no offload", torch_adam, smoke=smoke),
        deepspeed(STOCK_CPU, stock, smoke=smoke),
        in_deepspeed(OURS_MEMORY, {}, smoke=smoke),
    ]


def stock_on_disk(name: str, pipelined: bool, smoke: bool, aio: Mapping[str, Any], **zero: Any) -> Contender:
    place = {"device": "nvme", "nvme_path": "{path}", "buffer_count": BUFFERS[pipelined], "pin_memory": False}
    place |= {"pipeline_read": pipelined, "pipeline_write": pipelined}
    settings = {"zero": {"offload_optimizer": place, **zero}, "aio": dict(aio)}
    return deepspeed(name, settings, smoke=smoke, left_out=NATIVE_SKIPPED if smoke else "")


def disk_group(smoke: bool, aio: Mapping[str, Any]) -> list[Contender]:
    return [
        deepspeed_baseline(smoke),
        stock_on_disk(STOCK_NVME, False, smoke, aio),
        stock_on_disk(STOCK_PIPELINED, True, smoke, aio),
        in_deepspeed(OURS_DISK, ON_DISK, smoke=smoke),
        in_deepspeed(OURS_DISK_HIDDEN, HIDDEN, smoke=smoke),
        *(in_deepspeed(ours, ON_DISK, smoke=smoke, equal_to=stock) for stock, ours in EQUAL.items()),
        in_deepspeed(OURS_HIDDEN, HIDDEN, smoke=smoke, equal_to=STOCK_NVME),
    ]


def standalone_group(numel: int) -> list[Contender]:
    return [
        Contender(BASELINE, "plain"),
        Contender(FUSED, "torch", {"fused": True}),
        Contender(ALONE_MEMORY, "offload"),
        Contender("ours, half in memory", "offload", {**ON_DISK, "host_memory": STATE_BYTES * numel // 2}),
        Contender("ours, nothing resident", "offload", ON_DISK),
    ]


def needs(contender: Contender) -> Sequence[Need]:
    """Return what has to be installed for a contender."""
    if contender.kind != "deepspeed":
        return ()
    if contender.name == STOCK_CPU:
        return NATIVE
    return (*NATIVE, LIBAIO) if contender.name in EQUAL else (DEEPSPEED,)


@dataclass(frozen=True)
class Defaults:
    """What a front door chooses.

    Attributes:
        groups: Which groups run.
        tokens: Batch sizes; the last is the one whose forward and backward take about as long as a step.
        minutes: In which all of it is through.
        smoke: Which groups run at smoke size.
    """

    groups: tuple[str, ...]
    tokens: tuple[int, ...]
    minutes: float
    smoke: tuple[str, ...]


GROUPS = {
    "memory": "DeepSpeed, state in memory",
    "disk": "DeepSpeed, state on disk",
    "standalone": "without DeepSpeed",
}
SMOKE = (BASELINE, FUSED, ALONE_MEMORY, STOCK_CPU, OURS_MEMORY, OURS_DISK)
"""Contenders that run at smoke size: one of each kind."""

PARAMS, SMOKE_PARAMS = "130M", "300k"


def judge(run: Run, group: str, outcomes: Mapping[str, Outcome], tokens: int) -> None:
    """Note the group's promises at one batch size."""
    base = outcomes[BASELINE]

    def pair(mine: str, theirs: Outcome | None) -> tuple[Outcome, Outcome] | None:
        ours = outcomes.get(mine)
        return (ours, theirs) if ours and theirs and ours.ran and theirs.ran else None

    def promise(mine: str, theirs: Outcome | None, iteration: float, exposed: float | None) -> None:
        both = pair(mine, theirs)
        what = f"{mine}, against {theirs.name if theirs else 'stock'}"
        why = "one of them did not run"
        faster = both and times_faster(*both, tokens)
        run.at_least(f"{what}: iterations, times as fast", faster or None, iteration, why)
        if exposed is not None:
            shorter = both and times_shorter(*both, base, tokens)
            run.at_least(f"{what}: exposed step, times shorter", shorter or None, exposed, why)
        peak = both and both[0].peak_bytes / both[1].peak_bytes
        run.at_most(f"{what}: peak memory over theirs", peak or None, 1.0, why)

    if group == "disk":
        stock = best(outcomes, (STOCK_NVME, STOCK_PIPELINED), tokens)
        for name, ours in EQUAL.items():
            promise(ours, outcomes.get(name), 3.0, 4.0)
        promise(OURS_HIDDEN, outcomes.get(STOCK_NVME), 4.0, 4.0)
        promise(OURS_DISK, stock, 1.6, 1.8)
        promise(OURS_DISK_HIDDEN, stock, 1.6, 1.8)
    elif group == "memory":
        promise(OURS_MEMORY, outcomes.get(STOCK_CPU), 1.0, None)
    else:
        noise = spread(base.values("iteration_s", tokens))
        promise(ALONE_MEMORY, outcomes.get(FUSED), 1.0 - noise, None)
    ours = [o for o in outcomes.values() if o.name.startswith("ours") and o.losses and not o.failed]
    what = f"{GROUPS[group]}: ours (exact) have the same losses, bit for bit"
    run.at_least(what, same_losses(ours), 1.0, "ours did not run")


def same_losses(ours: Sequence[Outcome]) -> float | None:
    if not ours:
        return None
    length = min(len(outcome.losses) for outcome in ours)
    return float(all(outcome.losses[:length] == ours[0].losses[:length] for outcome in ours))


def aio_settings(common: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return what the sweep of DeepSpeed's aio found."""
    worker = Worker(Contender("aio", "aio", {"path": "{path}", "smoke": common["smoke"]}), common, folder)
    try:
        found: dict[str, Any] = worker.answer(900.0)  # its native part is compiled at first use
        return found
    except ContenderError as error:
        return {"best": {}, "failed": str(error), "output": worker.output()}
    finally:
        worker.close()


def field_of(group: str, args: argparse.Namespace, aio: Mapping[str, Any]) -> list[Contender]:
    """Return who trains in a group; at smoke size few of them do."""
    if group == "standalone":
        field = standalone_group(choose_shape(args.params).numel)
    else:
        field = memory_group(args.smoke) if group == "memory" else disk_group(args.smoke, aio)
    return [each for each in field if not args.smoke or each.name in SMOKE or each.left_out]


def measure(defaults: Defaults, run: Run) -> None:
    """Run the groups."""
    args, results, shape = run.args, run.results, choose_shape(run.args.params)
    chosen = [name for name in args.sections if not run.smoke or name in defaults.smoke]
    sizes = [8, 16][-len(args.tokens) :] if run.smoke else args.tokens
    common = common_of(shape, max(sizes), run.smoke)
    ends_s = time.monotonic() + 60 * args.minutes
    print(
        f"model: {shape.numel:,} parameters, {shape.layers} layers of {shape.hidden}, bf16 weights, fp32 state, "
        f"computed in {run.described['compute']}"
    )
    aio: dict[str, Any] = {"best": {}}
    if "disk" in chosen and not run.smoke and STOCK_NVME not in run.missing:
        aio = aio_settings(common, run.folder)
    results |= {"model": {**common["shape"], "numel": shape.numel}, "tokens": sizes, "aio": aio}
    everybody: list[Outcome] = []
    for number, group in enumerate(chosen):
        schedule = Schedule(
            parts=tuple((size, 2 if run.smoke else 3 if size == min(sizes) else 2) for size in sizes),
            rounds=1 if run.smoke else args.rounds,
            least=1 if run.smoke else 3,
            seconds=(ends_s - time.monotonic()) * WEIGHTS[group] / sum(WEIGHTS[name] for name in chosen[number:]),
        )
        field = field_of(group, args, aio["best"])
        outcomes, speeds = run_group(field, schedule, common, run.place(group), missing=run.missing)
        everybody += outcomes.values()
        base = outcomes[BASELINE]
        ran = {n: o for n, o in outcomes.items() if o.iterations and (not o.failed or n == BASELINE)}
        failed = {n: o.failed for n, o in outcomes.items() if o.failed}
        results[group] = {"speeds": speeds, "contenders": {n: asdict(o) for n, o in outcomes.items()}}
        for tokens in sizes:
            rows = {n: row(o, base, speeds, tokens, shape.numel) for n, o in ran.items() if base.iterations}
            results[group][f"{tokens} tokens"] = rows
            title = f"{GROUPS[group]}, {tokens} tokens, {len(speeds)} rounds"
            print(f"\n### {title}\n\n{markdown(rows, failed)}\n", flush=True)
        noise = max((spread(base.values("iteration_s", tokens)) for tokens in sizes), default=0.0)
        if noise > SPREAD:
            print(f"The machine was busy: iterations without an optimizer spread by {noise:.0%}; trust ratios only.")
        judge(run, group, outcomes, sizes[-1])
    run.checksums.append(sum_of_losses(everybody))


def drawn(file: Path, results: Mapping[str, Any]) -> None:
    """Draw all tables."""
    titles = {f"{GROUPS[group]}, {n} tokens": (group, f"{n} tokens") for group in GROUPS for n in results["tokens"]}
    picture(file, {title: results[group][name] for title, (group, name) in titles.items() if group in results})


def parse_sizes(name: str, text: str) -> list[int]:
    """Return the sizes of batches, which are separated by commas."""
    return [parse_count(name, size, most=1 << 20) for size in text.split(",")]


def training_options(params: str, tokens: str, rounds: str, minutes: float) -> tuple[Option, ...]:
    """Return the options of a benchmark that trains side by side, with their defaults."""
    count, number = partial(parse_count, most=10**12), partial(parse_number, least=0.01, most=10_000)
    return (
        Option("params", params, SMOKE_PARAMS, "parameters of the model", read=count),
        Option("tokens", tokens, help="tokens of a batch, each size", read=parse_sizes),
        Option("rounds", rounds, help="most rounds of a section", read=partial(parse_count, most=10_000)),
        Option("minutes", f"{minutes}", help="in which all is through", read=number),
    )


def contest(question: str | None, defaults: Defaults) -> None:
    """Run the groups and report."""

    def wanted(args: argparse.Namespace) -> dict[str, Sequence[Need]]:
        return {c.name: needs(c) for group in args.sections for c in field_of(group, args, {})}

    main(
        question,
        partial(measure, defaults),
        sections=defaults.groups,
        options=training_options(PARAMS, ",".join(map(str, defaults.tokens)), "15", defaults.minutes),
        device="cpu",
        path=True,
        picture=drawn,
        needs=wanted,
    )


WEIGHTS = {"memory": 1.0, "disk": 2.0, "standalone": 1.0}
"""How the time that is left is divided."""
