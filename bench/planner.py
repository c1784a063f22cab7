"""Predicted steps beside measured ones, the planner's choice beside all others, and a path that slows down.

Sections, each of which can be run alone (`--sections predictions,choice`):

  predictions  configurations that differ in resident share, paths, their throttling, staging depth and threads: the
               step that the simulator predicts beside the median of those measured, (a) by the rates of the full
               probe, which knows nothing of the configuration, and (b) by those that the session has learnt in three
               steps. Both predictions are made before the first step that counts. Beside them, (c), each step's own
               prediction, made just before it, as `optimizer.explain()` shows it: on a machine that others use at the
               same time, rates change from minute to minute. (d), in hindsight, is by the rates that each step itself
               showed: what is left there is the model's error, not a change of rates.
  choice       with the same host memory, every number of staging slots that the planner considers, and several fixed
               splits between paths, each run; what `choose_plan` chose beside the fastest of them
  follow       a path that is throttled to a third in mid-run: the part of the bytes that it gets, step by step
  time         seconds of process time that choosing a plan for 10,000 subgroups takes

The disk is this machine's, real files with checksums; slower paths are emulated by throttling it.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from _common import cores, progress
from _harness import Run, main, ratio, turns
from _sessions import DISK, MB, Configuration, Model, Pace, Session, Size, Throttles, sessions

from offload.dtypes import DtypeCode
from offload.formats import EXACT
from offload.layout import SECTOR_NUMEL, Parameter, build_layout
from offload.measure import full, full_probe, observe
from offload.plan import (
    NO_GPU,
    Budgets,
    GpuRates,
    PathBudget,
    PathRates,
    Placement,
    Plan,
    Rates,
    choose_plan,
    estimate,
)
from offload.plan.planner import STAGING_SLOTS
from offload.predict import predict
from offload.units import format_seconds

EACH_WAY = Pace(400, 400)
THIRD = Pace(400 / 3, 400 / 3)
SHARED = Pace(800, 800, at_once=16)
SLOW_WRITES = Pace(800, 400)
SHARED_SLOW_WRITES = Pace(800, 400, at_once=4)
"""Paths whose directions are independent or have one bandwidth, of which a write may take twice as much; as MB/s."""


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
            self.file = full_probe(paths, seconds=run.size.probe_s, numel=numel, report=show)
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
    for _, one in turns(opened, run.size.rounds):
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

    with sessions(run.folder, Model(run.size), probed.rates, chosen) as opened:
        for one in opened:
            found[one.configuration]["predicted_by_probe_s"] = one.predict()
        checksum = rounds_of(run, opened, measure)
        for one in opened:
            metrics = one.engine.metrics()
            row = found[one.configuration]
            row["lanes_s"] = {
                lane: [seconds, metrics[f"lane/{lane}/busy_s"]]
                for lane, seconds in predict(one.engine.plan, one.engine.rates).busy_s.items()
            }
            row["rates"] = one.engine.rates.to_dict()
    print(f"  {'':<52} measured     (a)     (b)     (c)     (d)")
    for configuration, row in found.items():
        row["measured_s"] = measured_s = statistics.median(row["steps_s"])
        row["error_by_probe"] = row["predicted_by_probe_s"] / measured_s - 1
        row["error"] = row["predicted_s"] / measured_s - 1
        for error, predicted in (("error_each", "predicted_each_s"), ("error_in_hindsight", "hindsight_s")):
            row[error] = ratio(row[predicted], row["steps_s"]) - 1
        print(
            f"  {configuration!s:<52} {measured_s:7.4f}s {row['error_by_probe']:+7.1%} {row['error']:+7.1%} "
            f"{row['error_each']:+7.1%} {row['error_in_hindsight']:+7.1%}"
        )
    for name, key in (
        ("largest error of a step's prediction, learnt rates", "error"),
        ("the same, predicted before each step", "error_each"),
        ("the same, by the rates that the step itself showed", "error_in_hindsight"),
    ):
        run.at_most(name, max(abs(row[key]) for row in found.values()), 0.1)
    run.checksums.append(checksum)
    said = probed.file.to_dict()
    return {
        # Where paths were made says nothing.
        "probe": said | {"paths": [facts | {"path": Path(facts["path"]).name} for facts in said["paths"]]},
        "configurations": {str(configuration): row for configuration, row in found.items()},
        "checksum": checksum,
    }


def choice(run: Run) -> dict[str, Any]:
    threads = min(2, cores())
    deepest = min(STAGING_SLOTS) + 2 if run.smoke else max(STAGING_SLOTS)
    depths = [slots for slots in STAGING_SLOTS if slots <= deepest]
    memory = deepest if run.smoke else 16  # subgroups' worth of host memory, at home and staging
    found: dict[str, Any] = {}
    probed = Probed(run, [Configuration(0.0, (DISK, EACH_WAY, THIRD))])
    model = Model(run.size)
    for paths in ((DISK,), (EACH_WAY, THIRD)):
        splits: tuple[tuple[float, ...], ...] = ((), *SPLITS) if len(paths) > 1 else ((),)

        def configured(slots: int, split: tuple[float, ...], paths: tuple[Pace, ...] = paths) -> Configuration:
            return Configuration((memory - slots) / run.size.subgroups, paths, slots, threads, split)

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


def follow(run: Run) -> dict[str, Any]:
    rate = EACH_WAY.read
    configuration = Configuration(0.0, (EACH_WAY, EACH_WAY), threads=min(2, cores()))
    probed = Probed(run, [configuration])
    parts, seconds = [], []
    with sessions(run.folder, Model(run.size), probed.rates, [configuration]) as (one,):
        one.warm_up()
        for number in range(9):
            if number == 1:
                path = next(iter(one.throttles.rates))
                one.throttles.tiers[path].set_rates(rate / 3 * MB, rate / 3 * MB)
            seconds.append(one.step())
            metrics = one.engine.metrics()
            written = [metrics[f"path/{each}/write_bytes"] for each in range(2)]
            parts.append(written[0] / max(sum(written), 1))
    print(f"  part of the bytes written to it: {parts[0]:.3f}, then {', '.join(f'{part:.3f}' for part in parts[1:])}")
    # It reaches a third of the other, and 1 / (1 + 3) is its due.
    run.at_most("bytes to a path slowed to a third, in the fifth step, over its due", parts[5] / 0.25, 1.1)
    return {"part_of_bytes_written": parts, "steps_s": seconds, "slowed_before_step": 2}


def planning(run: Run) -> dict[str, Any]:
    """Two paths and a GPU, so that there is much to choose; rates that need no measuring."""
    count, numel = 10_000, 16 * SECTOR_NUMEL
    rates = Rates(40e9, (PathRates(6e9, 5e9), PathRates(2e9, 1e9)), GpuRates(1e12, 50e9, 50e9), 300e9)
    seconds: list[float] = []
    for _ in range(3 if run.smoke else 9):
        # Anew each time: what a layout has worked out once it remembers.
        layout = build_layout([Parameter("p", count * numel, DtypeCode.BFLOAT16, 0)], numel)
        paths = (PathBudget("/a", 1 << 50), PathBudget("/b", 1 << 50))
        staging_bytes = 4 * layout.subgroups[0].state_bytes
        host_bytes = count * staging_bytes * 15 // 64
        budgets = Budgets(host_bytes, None, paths, follow_rates=True, gpu_staging_bytes=staging_bytes)
        started_s = time.process_time()
        plan: Plan = choose_plan(layout, budgets, rates)
        seconds.append(time.process_time() - started_s)
    value = statistics.median(seconds)
    on_gpu = plan.placements.count(Placement.GPU)
    print(f"  {len(plan.layout.subgroups):,} subgroups, {on_gpu:,} of them on the GPU: {format_seconds(value)}")
    run.at_most("seconds of process time for a plan of 10,000 subgroups", value, 0.1)
    return {"process_s": seconds, "subgroups": count}


if __name__ == "__main__":
    main(
        __doc__,
        sections={"predictions": predictions, "choice": choice, "follow": follow, "time": planning},
        sizes=(Size(12, 1 << 14, 1, 0.3), Size(40, 1 << 20, 7, 15.0)),
        path=True,
    )
