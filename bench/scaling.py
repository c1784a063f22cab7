"""How a step's time scales: with parameters, resident share, paths, look-ahead, subgroup size and ranks.

One curve a section, each of which can be run alone (`--sections parameters,resident`). Paths are throttled to equal
rates each way (emulated), so that what is seen is the engine's doing and not the disk's; ranks are processes that
share one emulated device. In every round each point of a curve takes a step, another one first each time; a point's
time is the median. Beside each: the least possible, bytes over the rate of what bounds it.

  parameters  0.5 to 32 million, nothing resident: a straight line through the origin, but for filling and draining
  resident    0 to 100% of the state in memory: a straight line down, until the update itself is longest
  paths       1, 2 and 3 paths of the same rate: bandwidths add up
  lookahead   1 to 16 staging slots: flat from where reads, updates and writes can all be under way, and lower the
              more of the state the slots are
  subgroup    the same state in 8 to 128 subgroups: flat, but for filling (few, large) and handling (many, small)
  ranks       1 and 2 processes, each with the same state, on one emulated device: twice the time for twice the bytes
  published   paths in the proportion of a published machine's NVMe drive and parallel file system, at a twentieth of
              their rates: what the second adds
  nodes       on paper: what `offload plan` says of 8, 64 and 1,024 ranks on nodes of that machine, with a drive each
              and with a parallel file system that all of them share, whose total is assumed
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import statistics
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from _common import progress
from _harness import Run, main, spawned, turns
from _sessions import MB, Configuration, Model, Session, Size, Throttles
from _throttled import SharedLanes, ThrottledTier

from offload._native import CompletionQueue
from offload.cli.node import Machine
from offload.cli.plan import with_shared_path
from offload.cli.scenario import Scenario, ask
from offload.cli.shapes import Model as Trained
from offload.measure import find_rates
from offload.plan import Home, PathRates, Rates
from offload.protocols import Tier
from offload.tiers import open_tier
from offload.units import format_seconds

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

SHRUNK = 20
"""Part of a published machine's rates that its emulated paths have."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One place on a curve.

    Attributes:
        at: Where on the axis.
        subgroups: Of the model.
        numel: Elements of each.
        configuration: What the session is given.
    """

    at: float
    subgroups: int
    numel: int
    configuration: Configuration

    @property
    def least_s(self) -> float:
        """Seconds in which the paths can move what a step must."""
        subgroup_bytes = 12 * self.numel
        resident = round(self.configuration.resident * self.subgroups)
        # What is left in the slots is what the next step starts with.
        moved = max(0, self.subgroups - resident - self.configuration.slots) * subgroup_bytes
        return moved / (sum(self.configuration.paths) * MB)


def rates_of(configuration: Configuration) -> Rates:
    paths = tuple(PathRates(rate * MB, rate * MB, 0.0) for rate in configuration.paths)
    return Rates(cpu_bytes_per_s=20e9, paths=paths)


def curve(run: Run, points: Sequence[Point], unit: str) -> dict[str, Any]:
    """Return the seconds of a step at each point."""
    seconds: list[list[float]] = [[] for _ in points]
    with ExitStack() as stack:
        opened = []
        for point in points:
            model = Model(Size(point.subgroups, point.numel))
            opened.append(Session(run.folder, model, point.configuration, rates_of(point.configuration)))
            stack.callback(opened[-1].engine.close)
            opened[-1].warm_up()
        for _, place in turns(range(len(points)), 1 if run.smoke else 5):
            seconds[place].append(opened[place].step())
    return shown(points, [statistics.median(each) for each in seconds], unit)


def shown(points: Sequence[Point], seconds: Sequence[float], unit: str) -> dict[str, Any]:
    for point, step_s in zip(points, seconds, strict=True):
        print(f"  {point.at:8g} {unit:<22} {format_seconds(step_s):>8}   least {format_seconds(point.least_s):>8}")
    return {
        "unit": unit,
        "at": [point.at for point in points],
        "step_s": list(seconds),
        "least_s": [point.least_s for point in points],
    }


def fit(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """Return the straight line of least squares and the largest distance from it, relative to the largest value."""
    slope, intercept = statistics.linear_regression(xs, ys)
    off = max(abs(intercept + slope * x - y) for x, y in zip(xs, ys, strict=True))
    return {"slope": slope, "intercept": intercept, "off": off / max(ys)}


def sized(run: Run) -> tuple[int, int]:
    """Return how many subgroups there are, and the elements of each."""
    return (8, 1 << 12) if run.smoke else (64, 1 << 18)


def parameters(run: Run) -> dict[str, Any]:
    _, numel = sized(run)
    counts = (8, 16) if run.smoke else (8, 16, 32, 64, 128, 256)
    points = [Point(n * numel / 1e6, n, numel, Configuration(0.0, (RATE,))) for n in counts]
    found = curve(run, points, "million parameters")
    found["line"] = fit(found["at"], found["step_s"])
    run.at_most("step over parameters: distance from a straight line", found["line"]["off"], 0.05)
    return found


def resident(run: Run) -> dict[str, Any]:
    shares = (0.0, 1.0) if run.smoke else (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
    points = [Point(100 * share, *sized(run), Configuration(share, (RATE,))) for share in shares]
    found = curve(run, points, "% resident")
    bound = [i for i, point in enumerate(points) if point.least_s > 0]
    if len(bound) > 2:
        found["line"] = fit([points[i].at for i in bound], [found["step_s"][i] for i in bound])
    off = found["line"]["off"] if "line" in found else None
    run.at_most("step over resident share: distance from a straight line", off, 0.05, "too few points")
    return found


def paths(run: Run) -> dict[str, Any]:
    points = [Point(n, *sized(run), Configuration(0.0, (RATE,) * n)) for n in (1, 2, 3)]
    found = curve(run, points, "paths")
    one, two, three = found["step_s"]
    run.at_least("two equal paths over one", one / two, 1.9)
    run.at_least("three equal paths over one", one / three, 2.7)
    return found


def lookahead(run: Run) -> dict[str, Any]:
    slots = (1, 4) if run.smoke else (1, 2, 3, 4, 8, 16)
    points = [Point(n, *sized(run), Configuration(0.0, (RATE,), slots=n)) for n in slots]
    found = curve(run, points, "staging slots")
    four = slots.index(4)
    over = found["step_s"][four] / points[four].least_s
    run.at_most("four staging slots: step over the least possible", over, 1.1)
    return found


def subgroup(run: Run) -> dict[str, Any]:
    whole = 1 << 16 if run.smoke else 1 << 24
    counts = (8, 16) if run.smoke else (8, 16, 32, 64, 128)
    # The same bytes of staging for all.
    points = [
        Point(whole / n / 1e6, n, whole // n, Configuration(0.0, (RATE,), slots=max(2, n // 4))) for n in counts
    ]
    found = curve(run, points, "million a subgroup")
    small = [s / p.least_s for s, p in zip(found["step_s"], points, strict=True) if p.subgroups >= 32]
    run.at_most("32 to 128 subgroups: step over the least possible", max(small, default=None), 1.1, "smoke")
    return found


def rank(pipe: Connection, folder: str, lanes: str, subgroups: int, numel: int) -> None:
    """Take a step whenever asked to; say how long it took."""
    logging.getLogger("offload").setLevel("ERROR")

    def throttled(path: str, store: uuid.UUID, queue: CompletionQueue, **settings: Any) -> Tier:
        inner_queue = CompletionQueue()
        inner = open_tier(path, store, inner_queue, **settings)
        rate = RATE * MB
        shared = SharedLanes(lanes)
        return ThrottledTier(inner, inner_queue, queue, read_bytes_per_s=rate, write_bytes_per_s=rate, lanes=shared)

    configuration = Configuration(0.0, (RATE,), threads=1)
    with mock.patch.object(Throttles, "open", lambda self, *a, **k: throttled(*a, **k)):
        one = Session(Path(folder), Model(Size(subgroups, numel)), configuration, rates_of(configuration))
    pipe.send(one.warm_up())
    while pipe.recv():
        pipe.send(one.step())
    one.engine.close()


def ranks(run: Run) -> dict[str, Any]:
    numel, count, rounds = (1 << 12, 8, 1) if run.smoke else (1 << 18, 48, 5)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with spawned(rank, 2, str(run.folder), str(run.folder / "lanes"), count, numel) as pipes:
        run.checksums.append(run.same("the ranks compute different weights", [pipe.recv() for pipe in pipes]))
        for number in range(rounds + 1):
            for at in (1, 2):
                for pipe in pipes[:at]:
                    pipe.send(True)
                took = [pipe.recv() for pipe in pipes[:at]]
                if number:  # the first is not each one's first, but the first of the pair
                    seconds[at].append(max(took))
            progress(f"round {number}/{rounds}")
        for pipe in pipes:
            pipe.send(False)
    points = [
        Point(1, count, numel, Configuration(0.0, (RATE,))),
        Point(2, 2 * count, numel, Configuration(0.0, (RATE,), slots=8)),
    ]
    one_s, two_s = (statistics.median(each) for each in seconds.values())
    run.at_most("two ranks on one device, over twice one", two_s / one_s / 2, 1.05)
    return shown(points, [one_s, two_s], "ranks on one device")


def published(run: Run) -> dict[str, Any]:
    there = find_rates(MACHINE).rates.paths
    rates = [min(path.read_bytes_per_s, path.write_bytes_per_s) / SHRUNK / MB for path in there]
    points = [Point(n, *sized(run), Configuration(0.0, tuple(rates[:n]))) for n in range(1, len(rates) + 1)]
    found = curve(run, points, "paths") | {"machine": MACHINE, "shrunk": SHRUNK, "rates_mb_per_s": rates}
    gained = found["step_s"][0] / found["step_s"][-1] / (sum(rates) / rates[0])
    name = f"emulated {MACHINE}: both paths over the drive alone, over what their rates add up to"
    run.at_least(name, gained, 0.95)
    return found


def nodes(run: Run) -> dict[str, Any]:
    """Nothing is measured."""
    rows = []
    rates = find_rates(MACHINE).rates
    for (model, numel_of), count in itertools.product(PAPER_MODELS.items(), NODES[:1] if run.smoke else NODES):
        own = dataclasses.replace(rates, paths=rates.paths[:1])
        shared = with_shared_path(rates, f"1={SHARED_BYTES_PER_S:.0f}", count)
        for storage, of_node in (("its own drive", own), ("and a shared file system", shared)):
            trained = Trained(params=numel_of(RANKS * count) // (1000 if run.smoke else 1), on_gpu=True)
            machine = Machine(rates=of_node, nodes=count, ranks=RANKS)
            answer = ask(Scenario.of(trained, machine, host_memory=0 if run.smoke else PAPER_HOST_BYTES))
            plan = answer.plan
            row = {
                "model": model,
                "ranks": machine.all_ranks,
                "nodes": count,
                "storage": storage,
                "params": trained.params,
                "resident_share": 1 - plan.home_bytes[Home.STREAMED] / plan.state_bytes,
                "step_s": answer.step_s,
                "bound_s": answer.estimate.bound_s,
                "bound_by": answer.estimate.bound_by,
            }
            print(f"  {model}, {row['ranks']} ranks, {storage}: {format_seconds(answer.step_s)}, {row['bound_by']}")
            rows.append(row)
    return {
        "machine": MACHINE,
        "shared_bytes_per_s": SHARED_BYTES_PER_S,
        "host_bytes": PAPER_HOST_BYTES,
        "rows": rows,
    }


if __name__ == "__main__":
    curves = (parameters, resident, paths, lookahead, subgroup, ranks, published, nodes)
    main(__doc__, sections={each.__name__: each for each in curves}, path=True)
