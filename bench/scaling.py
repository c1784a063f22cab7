"""How a step's time scales: with parameters, with the resident share, and on paper with nodes.

One curve a section, each of which can be run alone (`--sections parameters,resident`). Paths are throttled to equal
rates each way (emulated), so that what is seen is the engine's doing and not the disk's. In every round each point of
a curve takes a step, another one first each time; a point's time is the median. Beside each: the least possible,
bytes over the rate of what bounds it.

  parameters  0.5 to 32 million, nothing resident: a straight line through the origin, but for filling and draining
  resident    0 to 100% of the state in memory: a straight line down, until the update itself is longest
  nodes       on paper: what `offload plan` says of 8, 64 and 1,024 ranks on nodes of that machine, with a drive each
              and with a parallel file system that all of them share, whose total is assumed
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from _harness import Run, main, show, turns
from _sessions import MB, Configuration, Model, Pace, Session

from offload.cli.machine import Machine, with_shared_path
from offload.cli.scenario import Scenario, ask
from offload.cli.shapes import Model as Trained
from offload.measure import find_rates
from offload.plan import Home, PathRates, Rates

RATE = 300.0
"""MB/s each way of an emulated path."""

MACHINE = "h100-node-nvme-pfs"
NODES = (2, 16, 256)
RANKS = 4
"""On each node, as the published machine has GPUs."""

PAPER_MODELS = {"13B a rank": lambda ranks: 13_000_000_000 * ranks, "280B": lambda ranks: 280_000_000_000}
SHARED_BYTES_PER_S = 100e9
"""Each way, of the parallel file system for all nodes together: assumed."""

PAPER_HOST_BYTES = 40 << 30
"""For each rank's state at home in memory."""


def numel_of(run: Run) -> int:
    """Return the elements of a subgroup."""
    return 1 << 12 if run.smoke else 1 << 18


def curve(run: Run, points: Sequence[tuple[float, int, float]], unit: str) -> dict[str, Any]:
    """Return the seconds of a step at each point, and how far those that are bound by the path are from a line.

    Args:
        run: What is told.
        points: For each the place on the axis, the subgroups and the share of them that are resident.
        unit: Of the axis.
    """
    rates = Rates(cpu_bytes_per_s=20e9, paths=(PathRates(RATE * MB, RATE * MB, 0.0),))
    seconds: list[list[float]] = [[] for _ in points]
    with ExitStack() as stack:
        opened = []
        for _, subgroups, share in points:
            configuration = Configuration(share, (Pace(RATE, RATE),))
            opened.append(Session(run.folder, Model(subgroups, numel_of(run)), configuration, rates))
            stack.callback(opened[-1].engine.close)
            checksum = opened[-1].warm_up()
        run.checksums.append(checksum)
        for _, place in turns(range(len(points)), 1 if run.smoke else 5):
            seconds[place].append(opened[place].step())
        least_s = [one.least_bytes / (RATE * MB) for one in opened]
    step_s = [statistics.median(each) for each in seconds]
    for (at, *_), took_s, bound_s in zip(points, step_s, least_s, strict=True):
        show(f"{at:g} {unit}", {"step_s": took_s, "least_s": bound_s}, "step_s", "least_s")
    found: dict[str, Any] = {"unit": unit, "at": [at for at, *_ in points], "step_s": step_s, "least_s": least_s}
    bound = [(at, took_s) for at, took_s, bound_s in zip(found["at"], step_s, least_s, strict=True) if bound_s > 0]
    if len(bound) > 1:
        slope, intercept = statistics.linear_regression(*zip(*bound, strict=True))
        off = max(abs(intercept + slope * at - took_s) for at, took_s in bound)
        found["line"] = {"slope": slope, "intercept": intercept, "off": off / max(s for _, s in bound)}
    return found


def parameters(run: Run) -> dict[str, Any]:
    counts = (8, 16) if run.smoke else (8, 16, 32, 64, 128, 256)
    found = curve(
        run, [(n * (1 << 12 if run.smoke else 1 << 18) / 1e6, n, 0.0) for n in counts], "million parameters"
    )
    run.at_most("step over parameters: distance from a straight line", found["line"]["off"], 0.05)
    return found


def resident(run: Run) -> dict[str, Any]:
    shares = (0.0, 1.0) if run.smoke else (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
    found = curve(run, [(100 * share, 8 if run.smoke else 64, share) for share in shares], "% resident")
    off = found["line"]["off"] if "line" in found else None
    run.at_most("step over resident share: distance from a straight line", off, 0.05, "too few points")
    return found


def nodes(run: Run) -> dict[str, Any]:
    """Nothing is measured."""
    rows = []
    rates = find_rates(MACHINE).rates
    for (model, numel_of), count in itertools.product(PAPER_MODELS.items(), NODES[:1] if run.smoke else NODES):
        own = dataclasses.replace(rates, paths=rates.paths[:1])
        shared = with_shared_path(rates, f"1={SHARED_BYTES_PER_S:.0f}", count)
        for storage, of_node in (("its own drive", own), ("and a shared file system", shared)):
            trained = Trained(params=numel_of(RANKS * count) // (1000 if run.smoke else 1), weights_on="gpu")
            machine = Machine(rates=of_node, nodes=count, ranks=RANKS)
            answer = ask(Scenario.of(trained, machine, host_memory=0 if run.smoke else PAPER_HOST_BYTES))
            plan = answer.plan
            row = {
                "ranks": machine.all_ranks,
                "nodes": count,
                "params": trained.params,
                "resident_share": 1 - plan.home_bytes[Home.STREAMED] / plan.state_bytes,
                "step_s": answer.step_s,
                "bound_s": answer.estimate.bound_s,
                "bound_by": answer.estimate.bound_by,
            }
            show(f"{model}, {storage}", row, "ranks", "step_s", "bound_by")
            rows.append(row)
    return {
        "machine": MACHINE,
        "shared_bytes_per_s": SHARED_BYTES_PER_S,
        "host_bytes": PAPER_HOST_BYTES,
        "rows": rows,
    }


if __name__ == "__main__":
    curves = (parameters, resident, nodes)
    main(__doc__, sections={each.__name__: each for each in curves}, path=True)
