"""What each mechanism is worth: added one by one from DeepSpeed's NVMe offload on, and taken away from the whole.

All train the same model under DeepSpeed's ZeRO-3 on one disk (`_contest.py` says how), at two batch sizes. Rounds are
three interleaved runs: every third round belongs to the same one. What a mechanism brings is the median over all
rounds of an iteration without it over one with it; its spread is the distance between the least and the largest of
the three runs' medians. It pays where it brings more than twice the spread. What saves memory and no time is judged
by the memory that the process holds, in the same way.

A step of the whole is hidden in forward and in backward (`overlap="both"`); the same is run with each alone, with
neither, and with "auto", which tries them all before anything counts. It sees both batch sizes in turn, as one
training, and keeps one way for them: so its iterations of all sizes together are compared with those of the best way.

Sections, each of which can be run alone:

  added      DeepSpeed's NVMe offload, its pipelining off and on; then ours with one mechanism more in each row
  taken      the whole, and the same without each mechanism. On one disk a second path brings nothing, so there are
             also one and two emulated paths, in the proportion of the published machine's
  simulated  the same rows on a published machine with 4 GPUs, its drive and its file system (`offload plan --rates
             h100-node-nvme-pfs`), beside what was published of it; one model with a larger batch, too, as forward and
             backward of the published ones are a fiftieth of an iteration. Nothing varies there: a mechanism pays if
             it brings one part in a hundred. Checksums are not in that model. Every way to hide a step is
             simulated, too, with exact state and with the whole's, at three batch sizes
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import published
from _auto import NEAR, settled, with_auto
from _common import progress
from _contenders import (
    STOCK_NVME,
    STOCK_PIPELINED,
    aio_settings,
    deepspeed,
    deepspeed_baseline,
    needs,
    same_losses,
    stock_on_disk,
    training_options,
)
from _contest import BASELINE, STATE_BYTES, Contender, Outcome, Schedule, common_of, run_group, sum_of_losses
from _harness import Run, main, ratio, show
from _needs import Need
from _schedules import Forgetting

from offload.cli.machine import Machine as Node
from offload.cli.model import choose_shape
from offload.cli.scenario import Scenario, ask
from offload.cli.shapes import Model
from offload.measure import find_rates
from offload.predict.predict import with_backward_s, with_forward_s
from offload.schedule.machine import Machine

MACHINE = "h100-node-nvme-pfs"
RUNS = 3
SUBGROUPS = 16
RESIDENT = 0.25
"""Part of the bytes of exact state that may be at home in memory, whatever the format."""

SHRUNK = 6
"""Part of the published machine's rates that the emulated paths have."""

WORTH = 0.01
"""What a mechanism has to bring where nothing is measured, and nothing varies."""

LARGER, LARGEST = 16, 32
"""Times the published batch with which a model is simulated as well: forward and backward take about as long as the
step of compact state, and of exact state."""

WHOLE = "compact8"
GRADIENTS = "gradients on paths"
ONE_PATH, TWO_PATHS = "one path, emulated", "two paths, emulated"
DISK = "added", "taken"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Which mechanisms are there.

    Attributes:
        gradients: Gradients stay in memory. Else backward writes them and the step reads them, as in DeepSpeed.
        order: What staging memory holds when a step ends is what the next one begins with.
        resident: A part of the state is at home in memory.
        second_path: There are two paths.
        checksum: Tiles carry one, which every read verifies.
        overlap: Where a step is hidden.
        form: Format of state.
    """

    gradients: bool = False
    order: bool = False
    resident: bool = False
    second_path: bool = False
    checksum: bool = False
    overlap: str = "off"
    form: str = "exact"

    def contender(self, name: str, numel: int, smoke: bool, paces: Sequence[float] = ()) -> Contender:
        """Return what trains so, under DeepSpeed."""
        ours: dict[str, Any] = {
            "host_memory": int(RESIDENT * STATE_BYTES * numel) if self.resident else 0,
            "paths": ["{path}"] * (1 + self.second_path),
            "subgroup_numel": subgroup_numel(numel),
            "checksum": self.checksum,
            "state_format": self.form,
            "overlap": self.overlap,
        }
        if not self.gradients:
            ours["gradient_memory"] = 0
        changes: dict[str, Any] = {} if self.order else {"forgets": True}
        if paces:
            changes["paces"] = list(paces)
        settings: dict[str, Any] = {"zero": {"offload_optimizer": {"device": "cpu"}, **pieces(numel)}}
        return deepspeed(name, {**settings, "multi_tier_offload": ours, "changes": changes}, smoke=smoke)


LADDER: dict[str, Parts] = {}
"""Rows that have one mechanism more than the one before, by that mechanism."""
for _name, _more in (
    ("one path", {}),
    ("no gradient I/O", {"gradients": True}),
    ("order", {"order": True}),
    ("residency", {"resident": True}),
    ("a second path", {"second_path": True}),
    ("checksums", {"checksum": True}),
    ("forward", {"overlap": "forward"}),
    ("backward", {"overlap": "both"}),
    ("compact16", {"form": "compact16"}),
    ("compact8", {"form": "compact8"}),
    # Which excludes updates in backward: their new weights are as many bytes in memory.
    (GRADIENTS, {"gradients": False, "overlap": "forward"}),
):
    LADDER[_name] = replace(list(LADDER.values())[-1] if LADDER else Parts(), **_more)  # type: ignore[arg-type]

TAKEN = {
    "order": {"order": False},
    "residency": {"resident": False},
    "a second path": {"second_path": False},
    "checksums": {"checksum": False},
    "forward": {"overlap": "backward"},
    "backward": {"overlap": "forward"},
    "hidden steps": {"overlap": "off"},
    "compact8": {"form": "exact"},
}
WITHOUT: dict[str, Parts] = {
    f"without {name}": replace(LADDER[WHOLE], **less)  # type: ignore[arg-type]
    for name, less in TAKEN.items()
}
AUTO = "auto"
HIDDEN = {"off": "without hidden steps", "forward": "without backward", "backward": "without forward", "both": WHOLE}
"""Rows that differ in where a step is hidden."""

SMOKE = {
    "added": (BASELINE, "one path", GRADIENTS),
    "taken": (WHOLE, AUTO, "without order", TWO_PATHS),
    "simulated": ("one path", "no gradient I/O", "a second path", WHOLE, "without order"),
}
"""What runs at smoke size."""


@dataclass(frozen=True)
class Comparison:
    """Two rows that differ in one mechanism.

    Attributes:
        mechanism: What it is.
        where: The section.
        without: The row that lacks it.
        with_: The row that has it.
        memory: Whether memory is what it saves, and not time.
    """

    mechanism: str
    where: str
    without: str
    with_: str
    memory: bool = False


def comparisons() -> Iterator[Comparison]:
    """Return what is compared."""
    names = list(LADDER)
    yield Comparison("ours", "added", STOCK_NVME, names[0])
    yield Comparison("ours, beside pipelining", "added", STOCK_PIPELINED, names[0])
    for before, name in itertools.pairwise(names[:-1]):
        yield Comparison(name, "added", before, name)
    for name in TAKEN:
        yield Comparison(name, "taken", f"without {name}", WHOLE)
    # Gradients on paths are what "no gradient I/O" does without; neither has updates in backward.
    yield Comparison("no gradient I/O", "taken", GRADIENTS, "without backward")
    yield Comparison(GRADIENTS, "taken", "without backward", GRADIENTS, memory=True)
    yield Comparison("a second path", "taken", ONE_PATH, TWO_PATHS)


def subgroup_numel(numel: int) -> int:
    return max(1024, numel // SUBGROUPS)


def pieces(numel: int) -> dict[str, int]:
    return {"sub_group_size": subgroup_numel(numel), "reduce_bucket_size": subgroup_numel(numel)}


def field_of(section: str, numel: int, smoke: bool, aio: dict[str, Any]) -> list[Contender]:
    """Return who trains beside whom."""
    if section == "added":
        stock = [
            stock_on_disk(name, name == STOCK_PIPELINED, smoke, aio, **pieces(numel))
            for name in (STOCK_NVME, STOCK_PIPELINED)
        ]
        ours = [parts.contender(name, numel, smoke) for name, parts in LADDER.items()]
        return [deepspeed_baseline(smoke), *stock, *ours]
    paces = [path.read_bytes_per_s / SHRUNK / 1e6 for path in find_rates(MACHINE).rates.paths]
    rows = {WHOLE: LADDER[WHOLE], AUTO: replace(LADDER[WHOLE], overlap="auto")}
    rows |= {GRADIENTS: LADDER[GRADIENTS], **WITHOUT}
    ours = [parts.contender(name, numel, smoke) for name, parts in rows.items()]
    before, after = LADDER["residency"], LADDER["a second path"]
    return [
        *ours,
        before.contender(ONE_PATH, numel, smoke, paces[:1]),
        after.contender(TWO_PATHS, numel, smoke, paces),
    ]


# Measured


def measured_rows(outcomes: dict[str, Outcome], tokens: Sequence[int]) -> dict[str, Any]:
    """Return a row of figures for each contender that ran."""
    names = ("iteration_s", "forward_s", "backward_s", "step_s", "kernel_read_bytes", "kernel_write_bytes")
    return {
        name: {
            "memory_bytes": statistics.median(outcome.resident_bytes),
            "peak_bytes": outcome.peak_bytes,
            "tokens": {str(size): {each: outcome.median(each, size) for each in names} for size in tokens},
        }
        for name, outcome in outcomes.items()
        if outcome.ran
    }


def brought(without: Sequence[float], with_: Sequence[float]) -> dict[str, Any]:
    """Return what is brought by what the second has and the first lacks, from a figure of each round."""
    ratios = [a / b for a, b in zip(without, with_, strict=False)]
    runs = [statistics.median(ratios[run::RUNS]) for run in range(min(RUNS, len(ratios)))]
    times, spread = statistics.median(ratios), max(runs) - min(runs)
    return {"times": times, "runs": runs, "spread": spread, "pays": times - 1 > 2 * spread}


def compared(outcomes: dict[str, Outcome], section: str, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Return what each mechanism brings in a section."""
    found = []
    for one in comparisons():
        without, with_ = outcomes.get(one.without), outcomes.get(one.with_)
        if one.where != section or not (without and with_ and without.ran and with_.ran):
            continue
        head = {"mechanism": one.mechanism, "without": one.without, "with": one.with_}
        if one.memory:
            figures = brought(without.resident_bytes, with_.resident_bytes)
            found.append({**head, "where": f"{section}, memory", **figures})
            continue
        for size in tokens:
            figures = brought(without.values("iteration_s", size), with_.values("iteration_s", size))
            found.append({**head, "where": f"{section}, {size} tokens", **figures})
    return found


def auto_over_best(outcomes: dict[str, Outcome], tokens: Sequence[int]) -> float | None:
    """Return what iterations of all sizes take with "auto" over those of the best way; None if one did not run."""
    found = [outcomes[name] for name in (AUTO, *HIDDEN.values()) if name in outcomes and outcomes[name].ran]
    if len(found) <= len(HIDDEN):
        return None
    auto, *ways = (
        [sum(sizes) for sizes in zip(*(each.values("iteration_s", size) for size in tokens), strict=True)]
        for each in found
    )
    return max(ratio(auto, way) for way in ways)


def shown(rows: dict[str, Any], figures: Sequence[dict[str, Any]], failed: dict[str, str]) -> None:
    for name, row in rows.items():
        seconds = {f"{size} tokens_s": each["iteration_s"] for size, each in row["tokens"].items()}
        show(name, row | seconds, *seconds, "memory_bytes")
    for each in figures:
        show(f"{each['mechanism']}, {each['where']}", each, "times", "spread", "pays")
    for name, why in failed.items():
        print(f"  {name}: {why}")


# Simulated


@dataclass(frozen=True)
class Published:
    """A model that was trained on the machine.

    Attributes:
        params: Of it.
        numels: Subgroup sizes of a rank.
        cached: Subgroups of each path that MLP-Offload kept in memory.
        forward_s, backward_s: Of MLP-Offload's iterations, whose gradients stay in memory.
        deepspeed_s, multipath_s: Iterations that were measured.
        source: Where they are from.
    """

    params: int
    numels: tuple[int, ...]
    cached: int
    forward_s: float
    backward_s: float
    deepspeed_s: float
    multipath_s: float
    source: str

    @property
    def subgroup_bytes(self) -> int:
        """State of the largest subgroup."""
        return max(self.numels) * STATE_BYTES

    @property
    def cached_bytes(self) -> int:
        """What MLP-Offload kept in the memory of a rank, on two paths."""
        return 2 * self.cached * self.subgroup_bytes


RANKS, SLOTS = published.RANKS_PER_NODE, 4
PAPER = {"params": 40_000_000_000, "subgroups": 60, "deepspeed_s": 242.3, "multipath_s": 102.0}
"""The 40B model, of which the paper has iterations and no logs are public: MLP-Offload (SC '25, arXiv 2509.02480)."""


def models(rows: Sequence[published.Paths]) -> dict[str, Published]:
    """Return the published models."""
    found = {}
    for multi in (row for row in rows if row.multi):
        stock = next(row for row in rows if row.model == multi.model and not row.multi)
        seconds = {name: float(multi.row[f"{name}_s"]) for name in ("fwd", "bwd", "iter")}
        found[multi.model] = Published(
            int(multi.row["num_params"]),
            multi.numels,
            multi.cached,
            seconds["fwd"],
            seconds["bwd"],
            float(stock.row["iter_s"]),
            seconds["iter"],
            "logs, bench/published",
        )
    like = min(found.values(), key=lambda model: model.params)
    params, count = int(PAPER["params"]), int(PAPER["subgroups"])
    scale = params / like.params
    paper = Published(
        params,
        (params // RANKS // count,) * count,
        like.cached,
        scale * like.forward_s,
        scale * like.backward_s,
        PAPER["deepspeed_s"],
        PAPER["multipath_s"],
        "arXiv 2509.02480; forward, backward and cache as of the next larger model",
    )
    return {"40B": paper, **found}


def simulated(parts: Parts, model: Published) -> Callable[[int, str], float]:
    """Simulate ours on the published machine, in no more memory than MLP-Offload's.

    Returns:
        What says the seconds of an iteration by how many times the published batch it has, and where its step is
        hidden.
    """
    staging_bytes = SLOTS * model.subgroup_bytes
    rates = find_rates(MACHINE).rates
    scenario = Scenario.of(
        Model(params=model.params, weights_on="gpu"),
        Node(rates=replace(rates, paths=rates.paths[: 1 + parts.second_path]), ranks=RANKS),
        host_memory=model.cached_bytes - staging_bytes if parts.resident else 0,
        staging_memory=staging_bytes,
        subgroup_numel=max(model.numels),
        gradient_memory=None if parts.gradients else 0,
        placement="cpu",
        state_format=parts.form,
    )
    machine = Machine if parts.order else Forgetting
    with mock.patch.object(importlib.import_module("offload.predict.predict"), "Machine", machine):
        answer = ask(scenario, timeline=True)
    prediction = answer.prediction
    if prediction is None:
        raise SystemExit(f"a step of {model.params:,} parameters has too many tiles to be simulated")

    def iteration_s(batch: int, overlap: str) -> float:
        forward_s, backward_s = batch * model.forward_s, max(batch * model.backward_s, prediction.gradients_s)
        if overlap in ("backward", "both"):
            plan, rates = answer.plan, answer.rates
            return with_backward_s(prediction, plan, rates, forward_s, backward_s, follows=overlap == "both")
        if overlap == "forward":
            return backward_s + with_forward_s(prediction, answer.plan, forward_s)
        return forward_s + backward_s + prediction.step_s

    return iteration_s


def simulated_ways(model: Published) -> dict[str, dict[str, float]]:
    """Return what an iteration of the whole takes for each way to hide its step; see `with_auto`."""
    found = {}
    for form in ("exact", LADDER[WHOLE].form):
        iteration_s = simulated(replace(LADDER[WHOLE], form=form), model)
        for batch in (1, LARGER, LARGEST):
            found[f"{form}, {batch} times the batch"] = with_auto({way: iteration_s(batch, way) for way in HIDDEN})
    return found


def theirs_s(model: Published, multi: bool, constants: dict[str, float]) -> float:
    """Return the seconds of an iteration of their schedule, by constants that were fitted on all logs."""
    told = {"num_params": str(model.params)}
    row = published.Paths("", model.numels, RANKS, multi, model.cached if multi else 0, told)
    return row.step_s(constants) + sum(row.rest(constants))


def simulate(smoke: bool) -> dict[str, Any]:
    """Return every row of every published model, and what each mechanism brings there."""
    tables = published.read_tables(published.TABLES)
    logged = published.paths_rows(tables, [tables])
    progress("fitting the published machine")
    constants = published.fit_paths(logged, published.mean_waits(tables), 1 if smoke else 25)
    known = models(logged)
    found: dict[str, Any] = {}
    for name in list(known)[:1] if smoke else known:
        model = known[name]
        rows: dict[int, dict[str, float]] = {1: {}, LARGER: {}}
        for row, parts in {**LADDER, **WITHOUT}.items():
            if smoke and row not in SMOKE["simulated"]:
                continue
            progress(f"{name}: {row}")
            iteration_s = simulated(parts, model)
            for batch, there in rows.items():
                there[row] = iteration_s(batch, parts.overlap)
        places = {f"simulated, {name}": rows[1]}
        if name == next(iter(known)):
            places[f"simulated, {name}, {LARGER} times the batch"] = rows[LARGER]
        figures = [
            {
                "mechanism": one.mechanism,
                "without": one.without,
                "with": one.with_,
                "where": f"{place}, {one.where}",
                "times": there[one.without] / there[one.with_],
                "spread": 0.0,
                "pays": there[one.without] / there[one.with_] - 1 > WORTH,
            }
            for place, there in places.items()
            for one in comparisons()
            if {one.without, one.with_} <= there.keys() and not one.memory and one.mechanism != "checksums"
        ]
        schedules = {
            "deepspeed_s": theirs_s(model, False, constants),
            "multipath_s": theirs_s(model, True, constants),
        }
        found[name] = {
            "rows": rows[1],
            "larger_rows": rows[LARGER],
            "published": asdict(model),
            "their_schedules": schedules,
            "ways": simulated_ways(model),
            "comparisons": figures,
        }
        show(f"{name}, published", found[name]["published"], *schedules)
        show(f"{name}, their schedules", schedules, *schedules)
        for row in rows[1]:
            larger = f"{LARGER} times the batch_s"
            show(row, {"iteration_s": rows[1][row], larger: rows[LARGER][row]}, "iteration_s", larger)
        for place, ways in found[name]["ways"].items():
            show(place, ways, *HIDDEN, AUTO, "both_over_single")
    return found


# All of it


def pays(figures: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return where each mechanism pays."""
    found: dict[str, list[str]] = {each["mechanism"]: [] for each in figures}
    for each in figures:
        if each["pays"]:
            found[each["mechanism"]].append(each["where"])
    return found


def judge(run: Run) -> None:
    """Note the promises."""
    results = run.results
    for mechanism, places in results["pays"].items():
        if mechanism == "checksums":  # which find torn and misdirected tiles, and cannot be faster
            cost = [1 / each["times"] for each in results["comparisons"] if each["mechanism"] == mechanism]
            run.at_most("checksums: an iteration with them over one without", max(cost), 1.05)
        elif not mechanism.startswith("ours"):
            run.at_least(f"{mechanism}: places where it pays by more than twice the spread", len(places), 1)
    if "auto_over_best" in results:
        what = "taken: iterations of all sizes with auto over those of the best way"
        run.at_most(what, results["auto_over_best"], NEAR, "one of them did not run")
    for form, same in results.get("same_losses", {}).items():
        run.at_least(f"losses of ours ({form}) are the same, bit for bit", same, 1.0, "none ran")
    for name, model in results.get("simulated", {}).items():
        theirs = model["published"]
        for row in ("a second path", WHOLE):
            times = theirs["multipath_s"] / model["rows"][row]
            what = f"simulated, {name}, ours up to {row}: iterations, times as fast as MLP-Offload's published"
            run.at_least(what, times, 1.0)
        for place, ways in model["ways"].items():
            what = f"simulated, {name}, {place}: an iteration with auto over the best way"
            run.at_most(what, ways["auto_over_best"], NEAR)
        for which in model["their_schedules"] if "logs" in theirs["source"] else ():
            off = abs(model["their_schedules"][which] / theirs[which] - 1)
            what = f"simulated, {name}: {which.removesuffix('_s')}'s own schedule, off what was published by"
            run.at_most(what, off, 0.15)


def losses_agree(outcomes: Sequence[dict[str, Outcome]]) -> dict[str, float | None]:
    """Return for each format whether all of ours came to the same losses."""
    forms: dict[str, list[Outcome]] = {}
    for group in outcomes:
        for outcome in group.values():
            ours = outcome.settings.get("multi_tier_offload")
            if ours and outcome.losses and not outcome.failed:
                forms.setdefault(ours["state_format"], []).append(outcome)
    return {form: same_losses(those) for form, those in forms.items()}


def trained(run: Run, section: str, seconds: float, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Return what became of a section's contenders in so many seconds."""
    shape, smoke = choose_shape(run.args.params), run.smoke
    common = common_of(shape, max(sizes), smoke)
    aio: dict[str, Any] = {"best": {}}
    schedule = Schedule(tuple((size, 2) for size in sizes), rounds, RUNS, seconds)
    if section == "taken":  # "auto" has to have chosen, and all train as many steps
        shortest_s = 1.0 if smoke else 0.1  # of an iteration: the shorter, the more "auto" has to see
        schedule = replace(schedule, settling=-(-settled(shortest_s) // (2 * len(sizes))))
    with run.brief_place() as folder:
        if section == "added" and not smoke and STOCK_NVME not in run.missing:
            aio = aio_settings(common, folder)
        field = field_of(section, shape.numel, smoke, aio["best"])
        field = [each for each in field if not smoke or each.name in SMOKE[section] or each.left_out]
        outcomes, speeds = run_group(field, schedule, common, folder, missing=run.missing)
    contenders = {name: asdict(outcome) for name, outcome in outcomes.items()}
    return {"contenders": contenders, "speeds": speeds, "aio": aio}


def measure(run: Run) -> None:
    args, results, shape = run.args, run.results, choose_shape(run.args.params)
    sizes, rounds = ([8, 16], RUNS) if run.smoke else (args.tokens, args.rounds)
    results |= {"model": {"layers": shape.layers, "hidden": shape.hidden, "numel": shape.numel}, "tokens": sizes}
    results |= {"rows": {}, "comparisons": []}
    groups: list[dict[str, Outcome]] = []
    ends_s, measured = time.monotonic() + 60 * args.minutes, [name for name in args.sections if name in DISK]
    for number, section in enumerate(measured):
        seconds = (ends_s - time.monotonic()) / (len(measured) - number)
        found = run.kept.find(section, partial(trained, run, section, seconds, sizes, rounds))
        outcomes = {name: Outcome(**each) for name, each in found["contenders"].items()}
        figures, rows = compared(outcomes, section, sizes), measured_rows(outcomes, sizes)
        results[section] = found
        results["rows"][section] = rows
        results["comparisons"] += figures
        if section == "taken":
            results["auto_over_best"] = auto_over_best(outcomes, sizes)
        groups.append(outcomes)
        print(f"{section}, {len(found['speeds'])} rounds:")
        shown(rows, figures, {name: outcome.failed for name, outcome in outcomes.items() if outcome.failed})
    if groups:
        results["same_losses"] = losses_agree(groups)
    if "simulated" in args.sections:
        print("simulated:")
        results["simulated"] = run.kept.find("simulated", partial(simulate, run.smoke))
        for model in results["simulated"].values():
            results["comparisons"] += model["comparisons"]
    results["pays"] = pays(results["comparisons"])
    for mechanism, places in results["pays"].items():
        print(f"{mechanism}: {', '.join(places) or 'pays nowhere'}")
    run.checksums.append(sum_of_losses(outcome for group in groups for outcome in group.values()))
    judge(run)


def wanted(args: argparse.Namespace) -> dict[str, Sequence[Need]]:
    """Return what the chosen contenders need."""
    numel = choose_shape(args.params).numel
    fields = (field_of(name, numel, args.smoke, {}) for name in args.sections if name in DISK)
    return {contender.name: needs(contender) for field in fields for contender in field}


if __name__ == "__main__":
    main(
        __doc__,
        measure,
        sections=(*DISK, "simulated"),
        options=training_options("40M", "16,128", "30", 60),
        path=True,
        runs=True,
        device="cpu",
        needs=wanted,
    )
