"""Predicted steps beside measured ones, and the planner's choice beside all others.

Sections, each of which can be run alone (`--sections predictions,choice`):

  predictions  configurations that differ in resident share, paths, their throttling, staging depth and threads: the
               step that the simulator predicts beside the median of those measured, (a) by the rates that the
               session has learnt in three steps, before the first step that counts. Beside it, (b), each step's own
               prediction, made just before it, as `optimizer.explain()` shows it: on a machine that others use at the
               same time, rates change from minute to minute. (c), in hindsight, is by the rates that each step itself
               showed: what is left there is the model's error, not a change of rates.
  choice       with the same host memory, every number of staging slots that the planner considers, and several fixed
               splits between paths, each run; what `choose_plan` chose beside the fastest of them

The disk is this machine's, real files with checksums; slower paths are emulated by throttling it.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from _common import cores, progress
from _harness import Option, Run, main, ratio, turns
from _sessions import DISK, Configuration, Model, Pace, Session, Throttles, sessions

from offload.formats import EXACT
from offload.measure import full, full_probe, observe
from offload.plan import NO_GPU, Rates, choose_plan, estimate
from offload.plan.planner import STAGING_SLOTS
from offload.predict import predict
from offload.units import format_seconds

EACH_WAY = Pace(400, 400)
THIRD = Pace(400 / 3, 400 / 3)
SHARED = Pace(800, 800, at_once=16)
SLOW_WRITES = Pace(800, 400)
SHARED_SLOW_WRITES = Pace(800, 400, at_once=4)
"""Paths whose directions are independent or have one bandwidth, of which a write may take twice as much; as MB/s."""


OPTIONS = (
    Option("subgroups", 40, 12),
    Option("numel", 1 << 20, 1 << 14, "elements of a subgroup"),
    Option("rounds", 7, 1),
    Option("probe_s", 15.0, 0.3, "seconds of a probe"),
)
CONFIGURATIONS = (
    Configuration(0.0),
    Configuration(0.0, slots=2),
    Configuration(0.0, slots=8),
    Configuration(0.0, threads=1),
    Configuration(0.5),
    Configuration(0.5, slots=2, threads=1),
    Configuration(0.75),
    Configuration(0.9, slots=2),
    Configuration(1.0),
    Configuration(1.0, threads=1),
    Configuration(0.0, (EACH_WAY,), slots=1),
    Configuration(0.5, (EACH_WAY,)),
    Configuration(0.0, (EACH_WAY, EACH_WAY)),
    Configuration(0.0, (EACH_WAY, EACH_WAY), slots=8, threads=1),
    Configuration(0.0, (EACH_WAY, THIRD)),
    Configuration(0.25, (EACH_WAY, Pace(200, 200), THIRD)),
    Configuration(0.0, (SHARED,), slots=2),
    Configuration(0.5, (SHARED,), slots=2, threads=1),
    Configuration(0.5, (SHARED,)),
    Configuration(0.0, (SHARED,), slots=8),
    Configuration(0.5, (SLOW_WRITES,), slots=2, threads=1),
    Configuration(0.0, (SLOW_WRITES,)),
    Configuration(0.0, (SHARED_SLOW_WRITES,), slots=2),
    Configuration(0.5, (SHARED_SLOW_WRITES,), slots=2, threads=1),
    Configuration(0.5, (SHARED_SLOW_WRITES,)),
    Configuration(0.0, (SHARED, EACH_WAY)),
)

SPLITS = ((1, 1), (3, 1), (5, 1))


class Probed:
    """What the full probe measures of the CPU and of each kind of path, put together for a configuration."""

    def __init__(self, run: Run, configurations: Sequence[Configuration]) -> None:
        self.kinds = sorted({rate for configuration in configurations for rate in configuration.paths})
        throttles = Throttles(run.folder, list(self.kinds))

        def show(done: int, total: int, what: str) -> None:
            progress(f"probe: {what} {done}/{total}")

        with mock.patch.object(full, "open_tier", throttles.open):
            numel = 1 << 17 if run.smoke else None
            paths = list(throttles.rates)
            self.file = full_probe(paths, seconds=run.args.probe_s, numel=numel, report=show)
        for warning in self.file.warnings:
            print(f"  probe: {warning}")

    def rates(self, configuration: Configuration) -> Rates:
        paths = tuple(self.file.rates.paths[self.kinds.index(rate)] for rate in configuration.paths)
        cpu = self.file.cpu_rate({EXACT: 1}, configuration.threads)
        return dataclasses.replace(self.file.rates, cpu_bytes_per_s=cpu, paths=paths, gpu=NO_GPU)


def rounds_of(run: Run, opened: Sequence[Session], each: Callable[[Session], None]) -> str:
    """Call `each` for all sessions, round by round, another one first each time; return the digest of the weights."""
    digests = []
    for number, one in enumerate(opened):
        progress(f"warm-up {number + 1}/{len(opened)}: {one.configuration}")
        digests.append(one.warm_up())
    for _, one in turns(opened, run.args.rounds):
        each(one)
    return str(run.same("the weights depend on the configuration", digests))


def predictions(run: Run) -> dict[str, Any]:
    chosen = CONFIGURATIONS[4::4][:3] if run.smoke else CONFIGURATIONS
    chosen = tuple(dataclasses.replace(each, threads=min(each.threads, cores())) for each in chosen)
    probed = Probed(run, chosen)
    found: dict[Configuration, dict[str, Any]] = {
        each: {"steps_s": [], "predicted_each_s": [], "hindsight_s": []} for each in chosen
    }

    def measure(one: Session) -> None:
        row = found[one.configuration]
        predicted_s = one.predict()
        row.setdefault("predicted_s", predicted_s)
        row["predicted_each_s"].append(predicted_s)
        known = one.engine.rates
        row["steps_s"].append(one.step())
        row["hindsight_s"].append(predict(one.engine.plan, observe(known, one.engine.timeline())).step_s)

    with sessions(run.folder, Model(run.args.subgroups, run.args.numel), probed.rates, chosen) as opened:
        run.checksums.append(rounds_of(run, opened, measure))
    print(f"  {'':<52} measured     (a)     (b)     (c)")
    for configuration, row in found.items():
        row["measured_s"] = measured_s = statistics.median(row["steps_s"])
        row["error"] = row["predicted_s"] / measured_s - 1
        for error, predicted in (("error_each", "predicted_each_s"), ("error_in_hindsight", "hindsight_s")):
            row[error] = ratio(row[predicted], row["steps_s"]) - 1
        errors = " ".join(f"{row[error]:+7.1%}" for error in ("error", "error_each", "error_in_hindsight"))
        print(f"  {configuration!s:<52} {measured_s:7.4f}s {errors}")
    for name, key in (
        ("largest error of a step's prediction, learnt rates", "error"),
        ("the same, predicted before each step", "error_each"),
        ("the same, by the rates that the step itself showed", "error_in_hindsight"),
    ):
        run.at_most(name, max(abs(row[key]) for row in found.values()), 0.1)
    return {"configurations": {str(configuration): row for configuration, row in found.items()}}


def choice(run: Run) -> dict[str, Any]:
    threads = min(2, cores())
    deepest = min(STAGING_SLOTS) + 2 if run.smoke else max(STAGING_SLOTS)
    depths = [slots for slots in STAGING_SLOTS if slots <= deepest]
    memory = deepest if run.smoke else 16  # subgroups' worth of host memory, at home and staging
    found: dict[str, Any] = {}
    probed = Probed(run, [Configuration(0.0, (DISK, EACH_WAY, THIRD))])
    model = Model(run.args.subgroups, run.args.numel)
    for paths in ((DISK,), (EACH_WAY, THIRD)):
        splits: tuple[tuple[float, ...], ...] = ((), *SPLITS) if len(paths) > 1 else ((),)

        def configured(slots: int, split: tuple[float, ...], paths: tuple[Pace, ...] = paths) -> Configuration:
            return Configuration((memory - slots) / run.args.subgroups, paths, slots, threads, split)

        candidates = [configured(slots, split) for slots, split in itertools.product(depths, splits)]
        steps: dict[Configuration, list[float]] = {each: [] for each in candidates}
        with sessions(run.folder, model, probed.rates, candidates) as opened:
            asked = opened[0].engine
            # Deciding, as a session does that is told the host memory and not the staging memory.
            budgets = dataclasses.replace(asked.plan.budgets, staging_bytes=None, follow_rates=True)
            plan = choose_plan(asked.plan.layout, budgets, probed.rates(candidates[0]))
            planned = configured(min(plan.staging_slots, deepest), ())
            checksum = rounds_of(run, opened, lambda one, steps=steps: steps[one.configuration].append(one.step()))
            costs = {one.configuration: estimate(one.engine.plan, one.engine.rates).step_s for one in opened}
        medians = {each: statistics.median(seconds) for each, seconds in steps.items()}
        best = min(medians, key=lambda each: medians[each])
        value = ratio(steps[planned], steps[best])
        name = "+".join(map(str, paths))
        print(
            f"  {name}: chosen {planned}: {format_seconds(medians[planned])}; best of {len(candidates)} {best}: "
            f"{format_seconds(medians[best])}"
        )
        run.at_most(f"the planner's choice over the best of all, {name}", value, 1.05)
        found[name] = {
            "chosen": str(planned),
            "best": str(best),
            "ratio": value,
            "candidates": {
                str(each): {"measured_s": medians[each], "estimated_s": costs[each], "steps_s": steps[each]}
                for each in candidates
            },
            "checksum": checksum,
        }
    return found


if __name__ == "__main__":
    main(__doc__, sections={"predictions": predictions, "choice": choice}, options=OPTIONS, path=True)
