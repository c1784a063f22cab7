"""Homes on memory nodes: which of them, beside the best of all splits, and rates of nodes in files."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from offload.dtypes import DtypeCode
from offload.errors import ConfigError, InfeasiblePlanError
from offload.layout import Layout, Parameter, build_layout
from offload.measure import RatesFile, as_on_fastest
from offload.plan import (
    Budgets,
    GpuRates,
    Home,
    NodeBudget,
    NodeRates,
    PathBudget,
    PathRates,
    Placement,
    Plan,
    Rates,
    choose_plan,
    estimate,
    make_plan,
)
from offload.predict import predict
from offload.schedule.timeline import Interval

NUMEL = 1 << 24
SIZE = 12 * NUMEL
PATH = (PathBudget("path", 1 << 50),)


def layout_of(count: int) -> Layout:
    return build_layout([Parameter("all", count * NUMEL, DtypeCode.BFLOAT16, 0)], NUMEL)


def node(number: int, update: float, link: float = 0.0, memory: float = 1e12) -> NodeRates:
    return NodeRates(number, update * 1e9, memory, memory, link * 1e9)


def rates_of(slow: float, path: float | None = None, links: tuple[float, float] | None = None) -> Rates:
    """Return rates of a CPU that updates 60 GB/s on node0, and less on node2."""
    first, second = links or (0.0, 0.0)
    paths = () if path is None else (PathRates(path * 1e9, path * 1e9),)
    found = Rates(60e9, paths, nodes=(node(0, 60, first), node(2, slow, second)))
    if links is None:
        return found
    link = max(links) * 1e9
    return dataclasses.replace(found, gpu=GpuRates(1.4e12, link, link))


def budgets_of(first: int, second: int, *, streams: bool = True, gpu: bool = False) -> Budgets:
    nodes = NodeBudget(0, first * SIZE), NodeBudget(2, second * SIZE)
    staging = 4 * SIZE if gpu else 0
    paths = PATH if streams else ()
    return Budgets((first + second) * SIZE, paths=paths, nodes=nodes, gpu_staging_bytes=staging, weights_on_gpu=gpu)


# Brute force


@pytest.mark.parametrize("slow", [2.0, 20.0, 50.0])
@pytest.mark.parametrize("path", [1.0, 8.0, 40.0])
@pytest.mark.parametrize(
    ("count", "first", "second"),
    [(5, 1, 4), (4, 2, 1), pytest.param(6, 2, 6, marks=[pytest.mark.slow, pytest.mark.full])],
)
def test_a_deal_is_near_the_best_of_all_splits(slow: float, path: float, count: int, first: int, second: int) -> None:
    layout, rates, budgets = layout_of(count), rates_of(slow, path), budgets_of(first, second)
    budgets = dataclasses.replace(budgets, staging_bytes=2 * SIZE)
    chosen = choose_plan(layout, budgets, rates)
    best_s = float("inf")
    for places in itertools.product((0, 2, None), repeat=count):
        if places.count(0) <= first and places.count(2) <= second:
            streamed = places.count(None)
            homes = tuple(Home.STREAMED if place is None else Home.HOST for place in places)
            slots = min(2, streamed)
            plan = dataclasses.replace(
                chosen, homes=homes, nodes=places, staging_slots=slots, slot_bytes=SIZE if slots else 0
            )
            best_s = min(best_s, predict(plan, rates, timeline=False).step_s)
    assert predict(chosen, rates, timeline=False).step_s <= 1.05 * best_s


@pytest.mark.parametrize("links", [(50.0, 50.0), (50.0, 12.0), (20.0, 50.0)])
@pytest.mark.parametrize("slow", [6.0, 45.0])
def test_a_deal_with_a_gpu_is_near_the_best_of_all_splits(slow: float, links: tuple[float, float]) -> None:
    layout, rates, budgets = layout_of(8), rates_of(slow, None, links), budgets_of(6, 6, streams=False, gpu=True)
    chosen = choose_plan(layout, budgets, rates)
    best_s = float("inf")
    for first in range(2, 7):
        deal = [NodeBudget(0, first * SIZE), NodeBudget(2, (8 - first) * SIZE)]
        for on_gpu in itertools.product((Placement.CPU, Placement.GPU), repeat=8):
            if on_gpu[:first] == tuple(sorted(on_gpu[:first], key=lambda each: each.value)):  # order hardly matters
                plan = make_plan(layout, budgets, placements=on_gpu, node_bytes=deal)
                if plan.placements[first:] == tuple(sorted(plan.placements[first:], key=lambda each: each.value)):
                    best_s = min(best_s, predict(plan, rates, timeline=False).step_s)
    assert predict(chosen, rates, timeline=False).step_s <= 1.05 * best_s


# What a deal is


def counts(plan: Plan) -> tuple[int, int, int]:
    return plan.nodes.count(0), plan.nodes.count(2), plan.homes.count(Home.STREAMED)


def test_the_fastest_node_is_filled_first_whatever_its_number() -> None:
    assert counts(choose_plan(layout_of(6), budgets_of(4, 4, streams=False), rates_of(20))) == (4, 2, 0)
    faster = choose_plan(layout_of(6), budgets_of(4, 4, streams=False), rates_of(90))
    assert counts(faster) == (2, 4, 0)
    assert faster.buffer_node == 2
    assert faster.node_bytes == {2: 4 * SIZE, 0: 2 * SIZE}
    assert faster.bytes_by_node[2] == 4 * SIZE
    same = choose_plan(layout_of(6), budgets_of(4, 4, streams=False), dataclasses.replace(
        rates_of(60), nodes=(node(0, 60), node(2, 60, memory=2e12))
    ))  # fmt: skip
    assert counts(same) == (2, 4, 0)  # by what is read and written


def test_a_node_that_is_slower_than_streaming_is_left_alone() -> None:
    """At 2 GB/s an update on node2 takes the CPU longer than the path takes to bring and take away that state."""
    plan = choose_plan(layout_of(32), budgets_of(8, 24), rates_of(2, 20))
    first, second, streamed = counts(plan)
    assert first == 8
    assert streamed > 0
    assert second < 24
    filled = make_plan(layout_of(32), budgets_of(8, 24))
    assert estimate(plan, rates_of(2, 20)).step_s < 0.8 * estimate(filled, rates_of(2, 20)).step_s
    assert "of that on node2, of 4.5 GiB" in str(plan)


def test_what_the_gpu_updates_lies_where_the_cpu_is_slow() -> None:
    plan = choose_plan(layout_of(12), budgets_of(8, 8, streams=False, gpu=True), rates_of(6, None, (50, 50)))
    on_gpu = [number for number in range(12) if plan.updates_on_gpu(number)]
    assert {plan.nodes[number] for number in range(12) if number not in on_gpu} == {0}
    assert 2 in {plan.nodes[number] for number in on_gpu}


def test_homes_stay_on_their_nodes_when_state_is_added() -> None:
    rates, budgets = rates_of(20), budgets_of(4, 4, streams=False)
    before = choose_plan(layout_of(3), budgets, rates)
    after = choose_plan(layout_of(6), budgets, rates, kept=before)
    assert after.nodes[:3] == before.nodes == (0, 0, 0)
    assert counts(after) == (4, 2, 0)
    with pytest.raises(InfeasiblePlanError):
        choose_plan(layout_of(9), budgets, rates, kept=before)


def test_more_memory_is_given_on_the_fastest_node() -> None:
    budgets = budgets_of(4, 4).with_more_host(SIZE)
    assert budgets.nodes == (NodeBudget(0, 5 * SIZE), NodeBudget(2, 4 * SIZE))
    assert budgets.host_bytes == 9 * SIZE
    assert Budgets(SIZE).with_more_host(SIZE) == Budgets(2 * SIZE)


@pytest.mark.parametrize("placement", ["auto", "cpu"])
def test_where_all_state_is_at_home_on_the_gpu_nodes_keep_their_bytes(placement: str) -> None:
    budgets = dataclasses.replace(budgets_of(4, 4, gpu=True), gpu_bytes=6 * SIZE)
    plan = choose_plan(layout_of(6), budgets, rates_of(20, 1, (50, 50)), placement)
    assert set(plan.homes) == {Home.GPU}
    assert plan.budgets.nodes == budgets.nodes


def test_nodes_need_rates() -> None:
    with pytest.raises(ConfigError, match=r"'node2' cannot be used; the rates have node0"):
        choose_plan(layout_of(6), budgets_of(4, 4), dataclasses.replace(rates_of(20, 1), nodes=(node(0, 60),)))
    alone = dataclasses.replace(budgets_of(8, 0), nodes=(NodeBudget(5, 8 * SIZE),), paths=())
    assert choose_plan(layout_of(6), alone, Rates(1e9)).nodes == (5,) * 6  # there is nothing to compare


def test_slower_nodes_take_longer_in_the_simulator_as_in_the_closed_form() -> None:
    rates = rates_of(20, None, (50, 25))
    for placements in ([], [Placement.GPU] * 6):
        plan = make_plan(layout_of(6), budgets_of(2, 4, streams=False, gpu=True), placements=placements)
        times = estimate(plan, rates).step_s, predict(plan, rates).step_s
        assert times[0] == pytest.approx(times[1], rel=0.05)
    on_cpu = make_plan(layout_of(6), budgets_of(2, 4, streams=False))
    seconds = predict(on_cpu, rates_of(20)).busy_s["cpu"]
    assert seconds == pytest.approx(2 * SIZE / 60e9 + 4 * SIZE / 20e9)


def test_a_step_teaches_the_rate_of_the_fastest_node() -> None:
    rates, plan = rates_of(20), make_plan(layout_of(6), budgets_of(4, 2, streams=False))
    timeline = [Interval("cpu", f"subgroup {n}", float(n), n + 1.0, SIZE) for n in (0, 5)]
    assert [each.nbytes for each in as_on_fastest(timeline, plan, rates)] == [SIZE, 3 * SIZE]
    one_kind = make_plan(layout_of(6), Budgets(6 * SIZE))
    assert as_on_fastest(timeline, one_kind, rates) is timeline


# Rates


def test_rates_of_nodes_are_read_back_and_old_files_load() -> None:
    rates = rates_of(20, 1)
    values = json.loads(json.dumps(rates.to_dict()))
    assert Rates.from_dict(values) == rates
    assert RatesFile.from_dict({"format": 2, "rates": values}).rates == rates
    del values["nodes"]
    assert Rates.from_dict(values).nodes == ()
    assert "nodes" not in Rates.from_dict(values).to_dict()
    assert RatesFile.from_dict({"format": 1, "rates": values}).rates.nodes == ()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"node": -1}, "rates.nodes[0].node"),
        ({"node": 1024}, "rates.nodes[0].node"),
        ({"node": 0.5}, "rates.nodes[0].node"),
        ({"node": True}, "rates.nodes[0].node"),
        ({"node": "node0"}, "rates.nodes[0].node"),
        ({"update_bytes_per_s": 0}, "rates.nodes[0].update_bytes_per_s"),
        ({"read_bytes_per_s": float("nan")}, "rates.nodes[0].read_bytes_per_s"),
        ({"link_bytes_per_s": -1}, "rates.nodes[0].link_bytes_per_s"),
        ({"node": 2}, "rates.nodes"),
        ({"speed": 1}, "rates.nodes[0].speed"),
    ],
)
def test_bad_rates_of_nodes_are_refused(change: dict[str, object], field: str) -> None:
    values = rates_of(20).to_dict()
    first, second = values["nodes"]
    with pytest.raises(ConfigError) as caught:
        Rates.from_dict({**values, "nodes": [{**first, **change}, second]})
    assert caught.value.field == field
    with pytest.raises(ConfigError, match="a list with an object for each node"):
        Rates.from_dict({**values, "nodes": {"node0": first}})


def test_a_link_is_no_faster_than_the_memory_behind_it() -> None:
    rates = rates_of(20, None, (50, 50))
    assert rates.slowness([0, 2]) == {0: (1.0, 1.0), 2: (3.0, 1.0)}
    narrow = dataclasses.replace(rates, nodes=(node(0, 60), node(2, 20, memory=25e9)))
    assert narrow.slowness([0, 2]) == {0: (1.0, 1.0), 2: (3.0, 2.0)}
    assert rates.slowness([2]) == {2: (1.0, 1.0)}  # among those in use
    assert rates.slowness([]) == {}
