"""Predicted and measured seconds side by side."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

import offload
from offload.dtypes import DtypeCode
from offload.layout import Parameter, build_layout
from offload.measure import lane_totals
from offload.plan import Budgets, PathBudget, PathRates, Plan, Rates, estimate, make_plan
from offload.predict import carry_on, explain, predict
from offload.predict.explanation import SHORT_S
from offload.units import format_seconds

GB = 1e9
RATES = Rates(20 * GB, (PathRates(4 * GB, 3 * GB), PathRates(2 * GB, 2 * GB)))


def make() -> Plan:
    layout = build_layout([Parameter("p", 20 << 20, DtypeCode.BFLOAT16, 0)], 1 << 20, 1 << 20)
    paths = tuple(PathBudget(f"path {n}", 4 * layout.state_bytes) for n in range(2))
    return make_plan(layout, Budgets(0, 4 * layout.max_subgroup_bytes, paths, follow_rates=True))


def metrics_of(plan: Plan, rates: Rates) -> dict[str, float]:
    """Return the metrics of a step on lanes of the given rates."""
    step = predict(plan, rates)
    found: dict[str, float] = {"step": 3, "step_s": step.step_s}
    for lane, (nbytes, busy_s) in lane_totals(step.timeline).items():
        found |= {f"lane/{lane}/busy_s": busy_s, f"lane/{lane}/bytes": nbytes}
    return found


def test_a_step_as_predicted_is_nowhere_off() -> None:
    found = explain(make(), RATES, metrics_of(make(), RATES))
    assert found.measured_s == pytest.approx(found.prediction.step_s)
    assert [lane.lane for lane in found.lanes] == list(found.prediction.busy_s)
    assert all(lane.apart_s == pytest.approx(0.0, abs=1e-9) for lane in found.lanes)
    assert "(+0%)" in str(found)


def test_the_lane_that_is_furthest_off_is_named() -> None:
    slower = dataclasses.replace(RATES, paths=(RATES.paths[0], PathRates(2 * GB, 0.5 * GB)))
    fixed = make()
    fixed = dataclasses.replace(fixed, budgets=dataclasses.replace(fixed.budgets, follow_rates=False))
    found = explain(fixed, RATES, metrics_of(fixed, slower))
    assert found.largest is not None
    assert found.largest.lane == "write:1"
    assert found.largest.measured_s == pytest.approx(4 * found.largest.predicted_s)
    assert "furthest from its prediction: write:1, " in str(found)
    assert "(4 times as long)" in str(found)
    assert format_seconds(found.measured_s) in str(found)


@pytest.mark.parametrize(("share", "is_short"), [(0.99, True), (1.01, False)])
def test_short_steps_are_said_to_be_unpredictable(share: float, is_short: bool) -> None:
    longer = dataclasses.replace(explain(make(), RATES, metrics_of(make(), RATES)), measured_s=share * SHORT_S)
    longer = dataclasses.replace(longer, prediction=dataclasses.replace(longer.prediction, step_s=0.1))
    assert ("a step under 500 ms may be several times off" in str(longer)) == is_short


def test_before_the_first_step_there_is_only_the_prediction() -> None:
    found = explain(make(), RATES, {"step": 0, "step_s": 0.0})
    assert math.isnan(found.measured_s)
    assert found.largest is None
    assert str(found) == str(predict(make(), RATES))


def test_a_prediction_is_carried_on_to_rates_nearby() -> None:
    plan = make()
    now = Rates(21 * GB, (PathRates(3.8 * GB, 2.9 * GB), PathRates(2.1 * GB, 1.9 * GB)))
    factor = estimate(plan, now).step_s / estimate(plan, RATES).step_s
    carried, anew = carry_on(predict(plan, RATES), RATES, now, factor), predict(plan, now)
    assert carried.step_s == pytest.approx(anew.step_s, rel=0.05)
    for lane, busy_s in anew.busy_s.items():
        assert carried.busy_s[lane] == pytest.approx(busy_s, rel=0.15), lane  # shares follow rates, tile by tile


@pytest.mark.slow
def test_an_optimizer_and_an_engine_explain_their_last_step(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(200_000, dtype=torch.bfloat16))
    config = offload.OffloadConfig(host_memory=0, paths=[tmp_path], subgroup_numel=1 << 14)
    with offload.AdamW([weight], offload=config) as optimizer:
        assert "furthest" not in str(optimizer.plan)
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        found, metrics = optimizer.explain(), optimizer.metrics()
        assert found.measured_s == metrics["step_s"]
        assert {lane.lane for lane in found.lanes} == {"cpu", "read:0", "write:0", "engine"}
        for lane in found.lanes:
            assert lane.predicted_s > 0
            assert f"lane/{lane.lane}/predicted_s" in metrics
        cpu = next(lane for lane in found.lanes if lane.lane == "cpu")
        assert cpu.measured_s == metrics["lane/cpu/busy_s"]
        assert "furthest from its prediction" in str(optimizer.plan)
        engine = optimizer.engine
        assert explain(engine.plan, engine.rates, engine.metrics()).measured_s == found.measured_s
