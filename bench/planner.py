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
from functools import partial
from typing import Any
from unittest import mock

from _common import cores, progress
from _harness import Option, Row, Run, column, main, ratio, rows_of_rounds, show
from _sessions import DISK, Configuration, Model, Pace, Session, Throttles, sessions

from offload.formats import EXACT
from offload.measure import full, full_probe, observe
from offload.plan import NO_GPU, Rates, choose_plan, estimate
from offload.plan.planner import STAGING_SLOTS
from offload.predict import predict

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


def rounds_of(
    run: Run, opened: Sequence[Session], each: Callable[[Session], Row]
) -> tuple[str, dict[Configuration, list[Row]]]:
    """Return the digest of the weights, and the rows that `each` returns for all sessions, round by round."""
    digests = []
    for number, one in enumerate(opened):
        progress(f"warm-up {number + 1}/{len(opened)}: {one.configuration}")
        digests.append(one.warm_up())
    contenders = {one.configuration: partial(each, one) for one in opened}
    rows = rows_of_rounds(contenders, run.args.rounds, settling=0)
    return str(run.same("the weights depend on the configuration", digests)), rows


def predictions(run: Run) -> dict[str, Any]:
    chosen = CONFIGURATIONS[4::4][:3] if run.smoke else CONFIGURATIONS
    chosen = tuple(dataclasses.replace(each, threads=min(each.threads, cores())) for each in chosen)
    probed = Probed(run, chosen)

    def measure(one: Session) -> Row:
        said_s, known = one.predict(), one.engine.rates
        step_s = one.step()
        hindsight_s = predict(one.engine.plan, observe(known, one.engine.timeline())).step_s
        return {"step_s": step_s, "predicted_s": said_s, "hindsight_s": hindsight_s}

    with sessions(run.folder, Model(run.args.subgroups, run.args.numel), probed.rates, chosen) as opened:
        checksum, rounds = rounds_of(run, opened, measure)
        run.checksums.append(checksum)
    found: dict[str, Row] = {}
    for configuration, rows in rounds.items():
        steps_s = column(rows, "step_s")
        row = found[str(configuration)] = {"rounds": rows, "measured_s": statistics.median(steps_s)}
        row["error"] = rows[0]["predicted_s"] / row["measured_s"] - 1
        row["error_each"] = ratio(column(rows, "predicted_s"), steps_s) - 1
        row["error_in_hindsight"] = ratio(column(rows, "hindsight_s"), steps_s) - 1
        show(str(configuration), row, "measured_s", "error", "error_each", "error_in_hindsight")
    for name, key in (
        ("largest error of a step's prediction, learnt rates", "error"),
        ("the same, predicted before each step", "error_each"),
        ("the same, by the rates that the step itself showed", "error_in_hindsight"),
    ):
        run.at_most(name, max(abs(row[key]) for row in found.values()), 0.1)
    return {"configurations": found}


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
        with sessions(run.folder, model, probed.rates, candidates) as opened:
            asked = opened[0].engine
            # Deciding, as a session does that is told the host memory and not the staging memory.
            budgets = dataclasses.replace(asked.plan.budgets, staging_bytes=None, follow_rates=True)
            plan = choose_plan(asked.plan.layout, budgets, probed.rates(candidates[0]))
            planned = configured(min(plan.staging_slots, deepest), ())
            checksum, rounds = rounds_of(run, opened, lambda one: {"step_s": one.step()})
            costs = {one.configuration: estimate(one.engine.plan, one.engine.rates).step_s for one in opened}
        steps = {each: column(rows, "step_s") for each, rows in rounds.items()}
        medians = {each: statistics.median(seconds) for each, seconds in steps.items()}
        best = min(medians, key=lambda each: medians[each])
        value = ratio(steps[planned], steps[best])
        name = "+".join(map(str, paths))
        said = {"chosen_s": medians[planned], "best_s": medians[best]}
        show(f"{name}: chosen {planned}, best of {len(candidates)} {best}", said, "chosen_s", "best_s")
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
