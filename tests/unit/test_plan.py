"""Homes, staging and bytes; the order of visits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.dtypes import DtypeCode
from offload.errors import ConfigError, InfeasiblePlanError
from offload.layout import Parameter, build_layout, extend_layout
from offload.plan import Budgets, Home, PathBudget, PathRates, Placement, Rates, make_plan, visit_order
from offload.plan.budget import DEFAULT_STAGING_SLOTS
from offload.protocols import SECTOR_BYTES
from offload.schedule.index import TileIndex

SUBGROUP_BYTES = 3 * SECTOR_BYTES


def layout_of(subgroups: int):
    return build_layout([Parameter("p", 1024 * subgroups, DtypeCode.BFLOAT16, 0)], 1024)


def paths(*limits: int) -> tuple[PathBudget, ...]:
    return tuple(PathBudget(f"/path{i}", limit) for i, limit in enumerate(limits))


def test_state_that_fits_stays_in_host_memory():
    plan = make_plan(layout_of(5), Budgets(5 * SUBGROUP_BYTES))
    assert plan.homes == (Home.HOST,) * 5
    assert plan.staging_slots == plan.staging_bytes == plan.storage_bytes == plan.home_bytes[Home.STREAMED] == 0
    assert plan.home_bytes[Home.HOST] == plan.state_bytes == 5 * SUBGROUP_BYTES
    assert plan.host_bytes == plan.home_bytes[Home.HOST] + plan.overhead_bytes


def test_first_subgroups_stay_the_others_stream():
    plan = make_plan(layout_of(5), Budgets(2 * SUBGROUP_BYTES + 1, 2 * SUBGROUP_BYTES, paths(1 << 30), 100))
    assert plan.homes == (Home.HOST,) * 2 + (Home.STREAMED,) * 3
    assert (plan.staging_slots, plan.slot_bytes) == (2, SUBGROUP_BYTES)
    assert plan.home_bytes[Home.HOST] + plan.home_bytes[Home.STREAMED] == plan.state_bytes
    assert plan.host_bytes == plan.home_bytes[Home.HOST] + plan.staging_bytes + 100 + plan.overhead_bytes
    # Nine live tiles of a sector each, and six more while two subgroups are flushed.
    assert plan.slot_counts == {SECTOR_BYTES: 15}
    assert plan.storage_bytes == 15 * 2 * SECTOR_BYTES


def test_staging_slots():
    many = layout_of(9)
    assert make_plan(many, Budgets(0, None, paths(1 << 30))).staging_slots == DEFAULT_STAGING_SLOTS
    assert make_plan(many, Budgets(0, 7 * SUBGROUP_BYTES - 1, paths(1 << 30))).staging_slots == 6
    assert make_plan(layout_of(2), Budgets(0, None, paths(1 << 30))).staging_slots == 2, "more than it streams"


def test_no_subgroups_need_nothing():
    plan = make_plan(build_layout([], 1024), Budgets(0))
    assert plan.host_bytes == plan.overhead_bytes
    assert "0 subgroups" in str(plan)


@pytest.mark.parametrize(
    ("budgets", "needed", "available"),
    [
        (Budgets(SUBGROUP_BYTES), 4 * SUBGROUP_BYTES, {"host_memory": SUBGROUP_BYTES}),
        (Budgets(0, SUBGROUP_BYTES - 1, paths(1 << 30)), SUBGROUP_BYTES, {"staging_memory": SUBGROUP_BYTES - 1}),
        (
            Budgets(SUBGROUP_BYTES, SUBGROUP_BYTES, paths(1000, 2000)),
            # Three streamed subgroups and one in flight, and what may be left over at the end of a path.
            (12 + 1) * 2 * SECTOR_BYTES,
            {"host_memory": SUBGROUP_BYTES, "/path0": 1000, "/path1": 2000},
        ),
    ],
)
def test_what_does_not_fit_is_said_with_numbers(budgets, needed, available):
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(layout_of(4), budgets)
    assert caught.value.needed_bytes == needed
    assert caught.value.available_bytes == available
    assert str(needed) in str(caught.value)


def test_room_on_storage_is_enough_to_the_byte():
    needed = (12 + 3) * 2 * SECTOR_BYTES
    make_plan(layout_of(4), Budgets(0, SUBGROUP_BYTES, paths(needed)))
    with pytest.raises(InfeasiblePlanError):
        make_plan(layout_of(4), Budgets(0, SUBGROUP_BYTES, paths(needed - 1)))


@pytest.mark.parametrize(("dtype", "tensors"), [(DtypeCode.BFLOAT16, 3), (DtypeCode.FLOAT32, 3)])
def test_room_for_checkpoints_is_reserved_to_the_byte_and_named(dtype, tensors):
    layout = build_layout([Parameter("p", 4 * 1024, dtype, 0)], 1024)
    one = 4 * tensors * 2 * SECTOR_BYTES  # every tile of state and masters, a sector each, with its header
    state = make_plan(layout, Budgets(0, SUBGROUP_BYTES, paths(1 << 30))).storage_bytes
    needed = state + 3 * one  # two that are kept, and the next

    def plan(limit: int, **more):
        return make_plan(layout, Budgets(0, SUBGROUP_BYTES, paths(limit), checkpoints=2, **more))

    assert plan(needed).checkpoint_bytes == 3 * one
    assert plan(needed, checkpoints_required=True).has_room_for_checkpoints
    assert "beside the state in use, at most for 2 checkpoints kept and one being written\n" in f"{plan(needed)}\n"
    assert not plan(needed - 1).has_room_for_checkpoints
    assert "more than there is" in str(plan(needed - 1))
    assert plan(needed - 1, checkpoints_required=True, leftover_bytes=1).has_room_for_checkpoints
    with pytest.raises(InfeasiblePlanError, match=r"lower checkpoints_kept .*save_total_limit") as caught:
        plan(needed - 1, checkpoints_required=True)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (needed, {"/path0": needed - 1})
    assert "2 checkpoints kept" in str(caught.value)


@pytest.mark.parametrize("spare", [-1, 0, 2 * SECTOR_BYTES - 1, 2 * SECTOR_BYTES])
def test_room_for_checkpoints_is_what_the_stores_have_room_for(spare: int) -> None:
    """Each path may end a byte before a slot does."""
    first = 21 * 2 * SECTOR_BYTES - 1
    plan = make_plan(layout_of(4), Budgets(0, SUBGROUP_BYTES, paths(1 << 30, 1 << 30), checkpoints=2))
    limits = first, plan.storage_bytes + plan.checkpoint_bytes - first + spare
    plan = make_plan(layout_of(4), Budgets(0, SUBGROUP_BYTES, paths(*limits), checkpoints=2))
    index = TileIndex([(limit, 1.0) for limit in limits], plan.slot_counts, plan.checkpoint_bytes)
    slots = plan.checkpoint_bytes // (2 * SECTOR_BYTES)
    assert plan.has_room_for_checkpoints == index.reserve({SECTOR_BYTES: slots}) == (spare == 2 * SECTOR_BYTES)


def test_state_in_memory_needs_room_for_its_checkpoints_too():
    budgets = Budgets(1 << 30, None, paths(5 * 3 * 2 * SECTOR_BYTES), checkpoints=1, checkpoints_required=True)
    with pytest.raises(InfeasiblePlanError, match="1 checkpoint kept"):
        make_plan(layout_of(5), budgets)
    assert "storage" in str(make_plan(layout_of(2), budgets))


@settings(max_examples=100)
@given(
    numels=st.lists(st.integers(1, 9000), min_size=1, max_size=8),
    host_bytes=st.integers(0, 1 << 20),
    staging_bytes=st.none() | st.integers(0, 1 << 18),
    limits=st.lists(st.integers(0, 1 << 21), max_size=3),
)
def test_plan_is_never_over_budget(numels, host_bytes, staging_bytes, limits):
    layout = build_layout([Parameter(f"p{i}", n, DtypeCode.BFLOAT16, i % 2) for i, n in enumerate(numels)], 3000)
    try:
        plan = make_plan(layout, Budgets(host_bytes, staging_bytes, paths(*limits)))
    except InfeasiblePlanError:
        return
    assert plan.home_bytes[Home.HOST] <= host_bytes
    assert plan.storage_bytes <= sum(limits)
    assert staging_bytes is None or plan.staging_bytes <= staging_bytes or not plan.staging_slots
    assert all(
        subgroup.state_bytes <= plan.slot_bytes
        for subgroup in layout.subgroups
        if not plan.is_resident(subgroup.index)
    )
    assert str(plan)


def test_kept_homes_stay():
    layout = layout_of(4)
    budgets = Budgets(2 * SUBGROUP_BYTES, 2 * SUBGROUP_BYTES, paths(1 << 30))
    before = make_plan(layout, budgets)
    longer = extend_layout(layout, [Parameter("more", 3000, DtypeCode.BFLOAT16, 0)], 1024)
    after = make_plan(longer, budgets, kept=before)
    assert after.homes[:4] == before.homes
    assert after.staging_slots == before.staging_slots
    assert set(after.homes[4:]) == {Home.STREAMED}, "the budget was spent before"


def test_added_subgroups_do_not_take_staging_slots_away():
    layout = build_layout([Parameter("p", 4096, DtypeCode.FLOAT32, 0)], 1024)
    before = make_plan(layout, Budgets(0, 4 * SUBGROUP_BYTES, paths(1 << 30)))
    assert before.staging_slots == 4
    longer = extend_layout(layout, [Parameter("more", 2048, DtypeCode.BFLOAT16, 0)], 2048)
    with pytest.raises(InfeasiblePlanError, match="staging_memory") as caught:
        make_plan(longer, Budgets(0, 4 * SUBGROUP_BYTES, paths(1 << 30)), kept=before)
    assert caught.value.needed_bytes == 4 * 2 * SUBGROUP_BYTES
    after = make_plan(longer, Budgets(0, 8 * SUBGROUP_BYTES, paths(1 << 30)), kept=before)
    assert (after.staging_slots, after.slot_bytes) == (4, 2 * SUBGROUP_BYTES)


def test_cached_subgroups_come_first_in_their_order():
    assert visit_order([0, 1, 2, 3, 4], {3, 1}) == (1, 3, 0, 2, 4)
    assert visit_order([4, 0], {1, 2}) == (4, 0)
    assert visit_order([], {1}) == ()


@given(st.lists(st.integers(0, 50), unique=True), st.sets(st.integers(0, 50)))
def test_visit_order_is_a_stable_rearrangement(wanted, cached):
    order = visit_order(wanted, cached)
    assert sorted(order) == sorted(wanted)
    flags = [subgroup in cached for subgroup in order]
    assert flags == sorted(flags, reverse=True)
    for flag in (True, False):
        assert [s for s in order if (s in cached) is flag] == [s for s in wanted if (s in cached) is flag]


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_rates_are_finite_and_positive(value):
    for make in (
        lambda: Rates(value),
        lambda: Rates(1.0, (PathRates(value, 1.0),)),
        lambda: Rates(1.0, (PathRates(1.0, value),)),
    ):
        with pytest.raises(ConfigError, match="rates"):
            make()
    if value != 0.0:
        with pytest.raises(ConfigError, match="latency_s"):
            Rates(1.0, (PathRates(1.0, 1.0, value),))


def test_added_subgroups_leave_as_many_staging_slots_as_there_were():
    layout = layout_of(12)
    budgets = Budgets(0, None, paths(1 << 30))
    before = make_plan(layout, budgets, staging_slots=8)
    longer = extend_layout(layout, [Parameter("more", 3000, DtypeCode.BFLOAT16, 0)], 1024)
    assert make_plan(longer, budgets, kept=before).staging_slots == 8


def test_buffers_for_checkpoints_are_in_the_plan():
    plan = make_plan(build_layout([Parameter("w", 10_000, DtypeCode.BFLOAT16, 0)], 4096, 8192), Budgets(1 << 20))
    assert plan.largest_tile_bytes == 8192
    assert plan.overhead_bytes == plan.table_bytes + 4 * 8192
    assert "32.0 KiB  checkpoints, while they are copied or loaded" in str(plan)


def test_a_plan_that_borrows_for_nothing_can_be_printed():
    layout = layout_of(2)
    budgets = Budgets(0, gpu_bytes=layout.state_bytes, gpu_staging_bytes=layout.state_bytes, borrows=True)
    plan = make_plan(layout, budgets)
    assert plan.homes == (Home.GPU, Home.GPU)
    assert "staging, 0 slots of 0 B; 0 of the other subgroups are updated on the GPU" in str(plan)


@pytest.mark.parametrize("dtype", [DtypeCode.BFLOAT16, DtypeCode.FLOAT32])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_updates_during_backward_take(on_gpu, dtype):
    layout = build_layout([Parameter("p", 4 * 1024, dtype, 0)], 1024)
    budgets = Budgets(
        layout.subgroup_bytes[0],
        paths=paths(1 << 30),
        speculates=True,
        weights_on_gpu=on_gpu,
        gpu_staging_bytes=on_gpu * layout.state_bytes,
    )
    plan = make_plan(layout, budgets, placements=[Placement.CPU, Placement.CPU, *on_gpu * [Placement.GPU]])
    expected = [1, 2, 3]  # subgroup 0 is at home in memory; 2 is updated by the CPU, too
    assert [n for n in range(4) if plan.may_speculate(n)] == expected
    unasked = replace(plan, budgets=replace(budgets, speculates=False))  # gradients of 2 do not come to host memory
    assert [n for n in range(4) if unasked.may_speculate(n)] == ([1, 3] if on_gpu else expected)
    assert plan.image_bytes == len(expected) * layout.subgroups[0].weight_bytes
    tiles = sum(count for _, count in layout.subgroups[0].tile_sizes)
    assert plan.speculative_storage_bytes == len(expected) * (layout.subgroup_bytes[0] + tiles * SECTOR_BYTES)
