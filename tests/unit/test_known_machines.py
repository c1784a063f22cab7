"""Rates of well-known machines: they load, and every figure names its source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import offload.measure
from offload.cli.machine import Machine
from offload.cli.scenario import Scenario, ask
from offload.cli.shapes import Model
from offload.dtypes import DtypeCode
from offload.layout import Parameter, build_layout
from offload.measure import load_rates
from offload.plan import Budgets, PathBudget, choose_plan, estimate

MACHINES = sorted((Path(offload.measure.__file__).parent / "machines").glob("*.json"))


def figures(values: Any, name: str = "") -> Iterator[str]:
    """Yield the name of every number, as in "gpu.h2d_bytes_per_s" or "paths[0].read_bytes_per_s"."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from figures(value, f"{name}.{key}" if name else key)
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from figures(value, f"{name}[{number}]")
    else:
        yield name


def test_there_are_machines() -> None:
    assert {"h100-node", "a100-node"} <= {file.stem for file in MACHINES}


@pytest.mark.parametrize("file", MACHINES, ids=lambda file: file.stem)
def test_every_figure_has_a_source(file: Path) -> None:
    values = json.loads(file.read_text())
    assert set(figures(values["rates"])) == set(values["source"])
    assert all(text.strip() for text in values["source"].values())


@pytest.mark.parametrize("file", MACHINES, ids=lambda file: file.stem)
def test_a_plan_can_be_made_from_them(file: Path) -> None:
    rates = load_rates(file).rates.shared_by(4)
    layout = build_layout([Parameter("p", 10**9, DtypeCode.BFLOAT16, 0)], 10**8)
    offers = tuple(PathBudget(f"path {number}", 1 << 40) for number in range(len(rates.paths)))
    host_bytes = 0 if offers else 1 << 40
    budgets = Budgets(host_bytes, None, offers, gpu_staging_bytes=4 << 30, weights_on_gpu=True)
    cost = estimate(choose_plan(layout, budgets, rates), rates)
    assert 0 < cost.bound_s <= cost.step_s < 60


@pytest.mark.parametrize("file", MACHINES, ids=lambda file: file.stem)
@pytest.mark.parametrize("placement", ["auto", "cpu", "gpu", 0.5])
def test_four_ranks_on_one_node_are_predicted_as_planned(file: Path, placement: str | float) -> None:
    rates = load_rates(file).rates
    params = 7 * 10**9
    host_memory = 0 if rates.paths else 12 * params
    model, machine = Model(params=params, weights_on="gpu"), Machine(rates=rates, ranks=4)
    answer = ask(Scenario.of(model, machine, host_memory=host_memory, placement=placement))
    assert answer.estimate.step_s == pytest.approx(answer.step_s, rel=0.06)
