"""What steps teach about a machine: its next step is predicted, whatever was believed before."""

from __future__ import annotations

import dataclasses
import itertools
import statistics

import pytest

from offload.dtypes import DtypeCode
from offload.layout import Parameter, build_layout
from offload.measure import observe, typical
from offload.plan import Budgets, PathBudget, PathRates, Plan, Rates, estimate, make_plan
from offload.predict import predict

GB = 1e9
SUBGROUPS = 40


def make(slots: int, resident: float) -> Plan:
    layout = build_layout([Parameter("p", SUBGROUPS << 20, DtypeCode.BFLOAT16, 0)], 1 << 20, 1 << 20)
    size = layout.max_subgroup_bytes
    budgets = Budgets(round(resident * SUBGROUPS) * size, slots * size, (PathBudget("path", 1 << 50),))
    return make_plan(layout, budgets)


def device(read: float, write: float, keeps: float) -> PathRates:
    """Return a path of which each direction keeps a part of its rate beside the other."""
    alone = {"read_alone_bytes_per_s": read * GB, "write_alone_bytes_per_s": write * GB}
    return PathRates(keeps * read * GB, keeps * write * GB, 1e-4, **alone)


DEVICES = {
    f"{name}, {write:g} GB/s of writes": device(2, write, keeps)
    for write in (2.0, 1.0)
    for name, keeps in (("shared", 0.5), ("shared in part", 0.75), ("independent", 1.0))
}


@pytest.mark.slow
@pytest.mark.parametrize("believed", ["nothing of sharing", "the right proportions"])
@pytest.mark.parametrize("kind", DEVICES)
def test_three_steps_tell_how_directions_share_a_path(kind: str, believed: str) -> None:
    path = DEVICES[kind]
    if believed == "nothing of sharing":
        start = PathRates(1.2 * GB, 0.9 * GB, path.latency_s)
    else:
        rates = {f.name: getattr(path, f.name) for f in dataclasses.fields(path)}
        start = PathRates(**{name: rate * (0.6 if "bytes" in name else 1) for name, rate in rates.items()})
    errors, closed = [], []
    for number, (slots, cpu) in enumerate(itertools.product((2, 4, 8), (20, 6, 2))):
        resident = (0.0, 0.5)[number % 2]
        plan, true = make(slots, resident), Rates(cpu * GB, (path,), reaction_s=1e-4)
        step = predict(plan, true)
        seen = [dataclasses.replace(true, paths=(start,))]
        for _ in range(3):
            seen.append(observe(typical(seen), step.timeline))
        found = typical(seen)
        errors.append(abs(predict(plan, found, timeline=False).step_s / step.step_s - 1))
        closed.append(abs(estimate(plan, found).step_s / step.step_s - 1))
    assert max(errors) < 0.1, errors
    assert statistics.median(errors) < 0.05
    assert max(closed) < 0.1, closed
    assert statistics.median(closed) < 0.05


@pytest.mark.parametrize("numel", [1 << 10, 1 << 14, 1 << 16])
@pytest.mark.parametrize(("slots", "at_once"), [(2, 1), (2, 16), (4, 4)])
def test_a_step_of_small_subgroups_tells_what_a_visit_costs_beside_its_bytes(
    numel: int, slots: int, at_once: int
) -> None:
    """Whoever knows rates of bytes alone is off by factors; one step teaches the rest."""
    layout = build_layout([Parameter("p", SUBGROUPS * numel, DtypeCode.BFLOAT16, 0)], numel)
    budgets = Budgets(0, slots * layout.max_subgroup_bytes, (PathBudget("path", 1 << 50),))
    plan = make_plan(layout, budgets)
    path = PathRates(2 * GB, 1.5 * GB, 4e-5, at_once=at_once)
    known = Rates(10 * GB, (PathRates(2 * GB, 1.5 * GB),))
    true = dataclasses.replace(known, paths=(path,), reaction_s=1e-5, operation_s=8e-5, begin_s=3e-4)
    step = predict(plan, true)
    if numel < 1 << 16:
        assert predict(plan, known).step_s < 0.5 * step.step_s
    found = observe(known, step.timeline)
    assert found.operation_s == pytest.approx(true.operation_s)
    assert found.begin_s == pytest.approx(true.begin_s)
    assert predict(plan, found).step_s == pytest.approx(step.step_s, rel=0.1)
    assert estimate(plan, found).step_s == pytest.approx(step.step_s, rel=0.2)
