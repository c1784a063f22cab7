"""The planner: what it promises whatever the rates and budgets, and that it decides as it should in plain cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from offload.dtypes import DtypeCode
from offload.errors import ConfigError, InfeasiblePlanError
from offload.layout import Parameter, build_layout
from offload.plan import (
    NO_GPU,
    Budgets,
    GpuRates,
    Home,
    PathBudget,
    PathRates,
    Placement,
    Rates,
    choose_plan,
    estimate,
    make_plan,
)

GIB = 1 << 30


def layout_of(*numels: int, subgroup_numel: int = 4096):
    parameters = [Parameter(f"p{i}", n, DtypeCode.BFLOAT16, i) for i, n in enumerate(numels)]
    return build_layout(parameters, subgroup_numel, 4096)


def even(subgroups: int):
    return layout_of(4096 * subgroups)


SIZE = even(1).state_bytes
speeds = st.floats(1e6, 1e11)
paths = st.lists(
    st.builds(PathRates, speeds, speeds, st.sampled_from((0.0, 1e-5)), st.sampled_from((0.0, 2.0))), max_size=3
)
gpus = st.builds(GpuRates, speeds, speeds, speeds)
rates = st.builds(Rates, speeds, paths.map(tuple), gpus, st.sampled_from((float("inf"), 1e9, 1e11)))


@st.composite
def problems(draw):
    layout = layout_of(*draw(st.lists(st.integers(1, 40_000), min_size=1, max_size=5)))
    found = draw(rates)
    total = layout.state_bytes
    budgets = Budgets(
        host_bytes=draw(st.sampled_from((0, total // 3, total))),
        staging_bytes=draw(st.none() | st.integers(1, 9).map(lambda n: n * layout.max_subgroup_bytes)),
        paths=tuple(PathBudget(f"/path{i}", 1 << 40) for i in range(len(found.paths))),
        follow_rates=draw(st.booleans()),
        gpu_bytes=draw(st.sampled_from((0, total // 4, total))),
        gpu_staging_bytes=draw(st.integers(0, 5)) * layout.max_subgroup_bytes,
        weights_on_gpu=draw(st.booleans()),
    )
    return layout, budgets, found


@settings(max_examples=150)
@given(problems())
@pytest.mark.slow
def test_no_budget_is_exceeded_and_no_fixed_choice_is_better(problem):
    layout, budgets, found = problem
    try:
        plan = choose_plan(layout, budgets, found)
    except InfeasiblePlanError:
        with pytest.raises(InfeasiblePlanError):
            choose_plan(layout, budgets, found, "cpu")
        return
    assert plan == choose_plan(layout, budgets, found), "not deterministic"
    assert plan.home_bytes[Home.HOST] <= budgets.host_bytes
    assert plan.home_bytes[Home.GPU] <= budgets.gpu_bytes
    assert plan.gpu_slots * plan.gpu_slot_bytes <= budgets.gpu_staging_bytes
    assert budgets.staging_bytes is None or plan.staging_bytes <= budgets.staging_bytes
    assert plan.storage_bytes <= sum(path.available_bytes for path in budgets.paths)
    cost = estimate(plan, found)
    assert cost.step_s >= cost.bound_s * (1 - 1e-9)
    # More slots are only taken where they pay, so all are compared with as many.
    budgets = replace(budgets, staging_bytes=max(plan.staging_bytes, plan.slot_bytes))
    others: list[str] = ["cpu"]
    if budgets.gpu_staging_bytes >= layout.max_subgroup_bytes:
        others += [f"stride:{k}" for k in range(1, len(layout.subgroups) + 2)]
    for placement in others:
        other = choose_plan(layout, budgets, found, placement)
        assert cost.step_s <= estimate(other, found).step_s * (1.011 if not plan.staging_slots else 1.001), placement


@settings(max_examples=50)
@given(problems())
def test_without_a_gpu_a_plan_stays_as_it_is_whatever_is_measured(problem):
    """A session chooses again when it knows its rates: placements follow them, and there is but one."""
    layout, budgets, found = problem
    budgets = replace(budgets, gpu_bytes=0, gpu_staging_bytes=0, weights_on_gpu=False)
    try:
        plan = make_plan(layout, budgets)
    except InfeasiblePlanError:
        assume(False)
    for placement in ("auto", "cpu", 0):
        assert choose_plan(layout, budgets, replace(found, gpu=NO_GPU), placement, kept=plan) == plan


def test_the_gpu_takes_what_the_cpu_cannot():
    """A link as fast as the CPU: with both at work a step takes half as long."""
    layout = even(100)
    budgets = Budgets(layout.state_bytes, gpu_staging_bytes=4 * SIZE)
    found = Rates(1e9, gpu=GpuRates(1e12, 1e9, 1e9))
    plan = choose_plan(layout, budgets, found)
    assert plan.placements.count(Placement.GPU) in (49, 50, 51)
    assert estimate(plan, found).step_s == pytest.approx(layout.state_bytes / 1e9 / 2, rel=0.05)
    # Neighbours alternate, so that both have something to do all the time.
    assert all(set(plan.placements[i : i + 3]) == set(Placement) for i in range(98))


def test_a_slow_link_leaves_everything_to_the_cpu():
    layout = even(20)
    budgets = Budgets(layout.state_bytes, gpu_staging_bytes=4 * SIZE)
    plan = choose_plan(layout, budgets, Rates(1e9, gpu=GpuRates(1e12, 1e7, 1e7)))
    assert set(plan.placements) == {Placement.CPU}


def test_memory_that_is_shared_makes_the_copies_dearer():
    """The CPU's update alone takes the whole memory bandwidth: what is copied for the GPU slows it down."""
    layout = even(200)
    budgets = Budgets(layout.state_bytes, gpu_staging_bytes=4 * SIZE)
    alone = Rates(1e9, gpu=GpuRates(1e12, 1e9, 1e9))
    shared = replace(alone, memory_bytes_per_s=1e9 * 28 / 12)
    cost = estimate(choose_plan(layout, budgets, shared), shared)
    assert cost.step_s > 1.3 * estimate(choose_plan(layout, budgets, alone), alone).step_s
    assert cost.lane_s["memory"] <= cost.step_s


def test_what_is_at_home_on_the_gpu_is_updated_there():
    layout = even(10)
    budgets = Budgets(layout.state_bytes, gpu_bytes=3 * SIZE, weights_on_gpu=True)
    plan = choose_plan(layout, budgets, Rates(1e9, gpu=GpuRates(1e12, 1e9, 1e9)))
    assert plan.homes == (Home.GPU,) * 3 + (Home.HOST,) * 7
    assert plan.placements == (Placement.GPU,) * 3 + (Placement.CPU,) * 7
    assert plan.home_bytes[Home.GPU] == 3 * SIZE
    assert plan.home_bytes[Home.HOST] == 7 * SIZE
    assert "3 subgroups at home" in str(plan)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ("cpu", []),
        ("gpu", list(range(9))),
        (0.0, []),
        (1, list(range(9))),
        (1 / 3, [2, 5, 8]),
        ("stride:3", [2, 5, 8]),
        ("stride:4", [3, 7]),
        ("stride:10", []),
    ],
)
def test_a_placement_can_be_named(placement, expected):
    layout = even(9)
    budgets = Budgets(layout.state_bytes, gpu_staging_bytes=SIZE)
    plan = choose_plan(layout, budgets, Rates(1e9, gpu=GpuRates(1e12, 1e9, 1e9)), placement)
    assert [n for n in range(9) if plan.updates_on_gpu(n)] == expected


@pytest.mark.parametrize(
    "placement", ["fast", "stride:0", "stride:x", "stride:", -0.1, 1.5, float("nan"), True, None]
)
def test_other_placements_are_refused(placement):
    with pytest.raises(ConfigError, match="placement"):
        choose_plan(even(2), Budgets(GIB, gpu_staging_bytes=GIB), Rates(1.0, gpu=GpuRates(1.0, 1.0, 1.0)), placement)


def test_a_gpu_that_nobody_measured_is_refused():
    for budgets, placement in ((Budgets(GIB), "gpu"), (Budgets(GIB, gpu_bytes=1), "auto"), (Budgets(GIB), 0.5)):
        with pytest.raises(ConfigError, match=r"rates\.gpu"):
            choose_plan(even(2), budgets, Rates(1.0), placement)


def test_rates_for_every_path():
    with pytest.raises(ConfigError, match=r"rates\.paths"):
        choose_plan(even(2), Budgets(0, paths=(PathBudget("/a", GIB),)), Rates(1.0))


def test_gpu_staging_memory_for_at_least_one_subgroup():
    with pytest.raises(InfeasiblePlanError) as caught:
        choose_plan(even(4), Budgets(GIB, gpu_staging_bytes=SIZE - 1), Rates(1.0, gpu=GpuRates(1.0, 1.0, 1.0)), "gpu")
    assert caught.value.needed_bytes == SIZE
    assert caught.value.available_bytes == {"GPU staging": SIZE - 1}


def test_more_slots_only_where_they_pay():
    layout = even(60)
    offers = (PathBudget("/path", 1 << 40),)
    bound_by_path = Rates(1e12, (PathRates(1e9, 1e9),))
    assert choose_plan(layout, Budgets(0, paths=offers), bound_by_path).staging_slots == 4
    # A slot is away for long on the GPU, and each goes through flush and fetch in turn.
    offers = replace(Budgets(0, paths=offers), gpu_staging_bytes=4 * SIZE, weights_on_gpu=True)
    far = Rates(1e6, (PathRates(1e9, 1e9),), GpuRates(1e9, 1e9, 1e9))
    assert choose_plan(layout, offers, far, "gpu").staging_slots > 4


def test_no_more_slots_than_the_paths_have_room_for():
    layout = even(60)
    budgets = Budgets(0, gpu_staging_bytes=4 * SIZE, weights_on_gpu=True, paths=(PathBudget("/path", 1 << 40),))
    far = Rates(1e6, (PathRates(1e9, 1e9),), GpuRates(1e9, 1e9, 1e9))
    roomy = choose_plan(layout, budgets, far)
    least = make_plan(layout, budgets).storage_bytes
    assert roomy.storage_bytes > least
    plan = choose_plan(layout, replace(budgets, paths=(PathBudget("/path", least),)), far)
    assert plan.storage_bytes == least


@pytest.mark.parametrize("memory_bytes_per_s", [float("inf"), 300e9])
@pytest.mark.slow
def test_ten_thousand_subgroups_are_few_evaluations(memory_bytes_per_s, monkeypatch):
    """No test looks at the time; what it depends on is how often the cost is taken."""
    from offload.plan import planner

    counted = []
    real = planner.estimate_mix
    monkeypatch.setattr(planner, "estimate_mix", lambda *args: counted.append(1) or real(*args))
    layout = even(10_000)
    budgets = Budgets(layout.state_bytes // 2, None, (PathBudget("/a", 1 << 50),), gpu_staging_bytes=4 * SIZE)
    found = Rates(40e9, (PathRates(6e9, 5e9),), GpuRates(1e12, 50e9, 50e9), memory_bytes_per_s)
    choose_plan(layout, budgets, found)
    assert len(counted) < 600
