"""Slots of stores: claims, versions, shares, limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.dtypes import DtypeCode
from offload.errors import InternalError
from offload.layout import Parameter, build_layout
from offload.plan import Budgets, PathBudget, make_plan
from offload.plan.budget import least_slot_bytes
from offload.protocols import SECTOR_BYTES, TileId
from offload.schedule.index import Location, TileIndex, TileRecord

TILE = TileId(0, 0, 0)
OTHER = TileId(0, 0, 1)
WHOLE = 2 * SECTOR_BYTES  # a payload of one sector and its header


def index(*limits: int, slots: int = 4, shares: tuple[float, ...] = ()) -> TileIndex:
    return TileIndex(list(zip(limits, shares or [1.0] * len(limits), strict=True)), {SECTOR_BYTES: slots})


def write(stores: TileIndex, tile: TileId, step: int) -> TileRecord:
    location = stores.claim(SECTOR_BYTES)
    assert location is not None
    record = TileRecord(location, step, step)
    stores.commit(tile, record)
    stores.check()
    return record


def test_version_lies_where_it_was_written_and_frees_the_one_before():
    stores = index(1 << 20)
    assert stores.get(TILE) is None
    first = write(stores, TILE, 1)
    assert stores.get(TILE) == first
    second = write(stores, TILE, 2)
    assert second.location != first.location
    assert stores.get(TILE) == second
    assert write(stores, TILE, 3).location == first.location, "a free slot is used before the store grows"
    assert stores.live_bytes() == (WHOLE,)


def test_claims_end_at_the_limit_and_at_the_planned_count():
    stores = index(3 * WHOLE - 1)
    assert [stores.claim(SECTOR_BYTES) for _ in range(3)] == [
        Location(0, 0, SECTOR_BYTES),
        Location(0, WHOLE, SECTOR_BYTES),
        None,
    ]
    stores = index(1 << 20, slots=1)
    assert stores.claim(SECTOR_BYTES) is not None
    assert stores.claim(SECTOR_BYTES) is None
    assert stores.claim(2 * SECTOR_BYTES) is None, "a size that the plan does not know"


def test_paths_get_their_shares():
    stores = index(1 << 30, 1 << 30, shares=(3.0, 1.0), slots=400)
    for tile in range(400):
        write(stores, TileId(0, 0, tile), 1)
    assert stores.live_bytes() == (300 * WHOLE, 100 * WHOLE)


def test_full_path_hands_over_to_the_next():
    stores = index(2 * WHOLE, 1 << 30, slots=10)
    paths = [stores.claim(SECTOR_BYTES).path for _ in range(6)]
    assert sorted(paths) == [0, 0, 1, 1, 1, 1]


def test_abandoned_slot_is_free_again():
    stores = index(1 << 20, slots=1)
    location = stores.claim(SECTOR_BYTES)
    stores.abandon(location)
    stores.check()
    assert stores.claim(SECTOR_BYTES) == location


def test_retired_path_stays_readable_and_its_slots_can_be_made_elsewhere():
    stores = index(1 << 20, 1 << 20, slots=4)
    records = [write(stores, tile, 1) for tile in (TILE, OTHER)]
    assert sorted(record.location.path for record in records) == [0, 1]
    flying = stores.claim(SECTOR_BYTES)
    assert flying.path == 0
    stores.retire(0)
    stores.retire(0)
    stores.abandon(flying)
    stores.check()
    assert [stores.get(tile) for tile in (TILE, OTHER)] == records
    # Four slots in all, one of them stuck on path 0: three on path 1, of which one is live.
    claims = [stores.claim(SECTOR_BYTES) for _ in range(3)]
    assert [claim and claim.path for claim in claims] == [1, 1, None]
    lying_there = next(tile for tile, record in zip((TILE, OTHER), records, strict=True) if record.location.path == 0)
    stores.commit(lying_there, TileRecord(claims[0], 2, 2))
    stores.check()
    assert stores.claim(SECTOR_BYTES).path == 1, "the slot that the tile left on path 0 counts no more"
    assert stores.live_bytes()[0] == 0


def test_retired_path_gives_up_its_free_slots():
    stores = index(1 << 20, 1 << 20, slots=3)
    claims = [stores.claim(SECTOR_BYTES) for _ in range(3)]
    for claim in claims:
        stores.abandon(claim)
    stores.retire(claims[0].path)
    again = [stores.claim(SECTOR_BYTES) for _ in range(4)]
    assert [claim is not None for claim in again] == [True, True, True, False]
    assert {claim.path for claim in again[:3]} == {1 - claims[0].path}


def test_allowing_more_slots():
    stores = index(1 << 20, slots=2)
    assert [stores.claim(SECTOR_BYTES) is None for _ in range(3)] == [False, False, True]
    stores.plan_more_slots({SECTOR_BYTES: 3, 2 * SECTOR_BYTES: 1})
    assert [stores.claim(SECTOR_BYTES) is None for _ in range(2)] == [False, True]
    assert stores.claim(2 * SECTOR_BYTES) is not None
    stores.check()


def test_slots_that_checkpoints_hold_are_none_of_the_plans():
    stores = index(1 << 20, slots=2)
    record = write(stores, TILE, 1)
    assert stores.reserve({SECTOR_BYTES: 1})
    stores.hold(record.location)
    stores.plan_more_slots({SECTOR_BYTES: 4})  # four slots besides the one that is held, one of them live for now
    assert [stores.claim(SECTOR_BYTES) is None for _ in range(5)] == [False, False, False, False, True]


def test_slots_that_nobody_claimed_are_refused():
    stores = index(1 << 20)
    location = Location(0, 0, SECTOR_BYTES)
    with pytest.raises(InternalError, match="nobody claimed"):
        stores.commit(TILE, TileRecord(location, 1, 1))
    with pytest.raises(InternalError, match="not claimed"):
        stores.abandon(location)


@settings(max_examples=150)
@given(
    numels=st.lists(st.integers(1, 9000), min_size=1, max_size=5),
    subgroup_numel=st.sampled_from([1024, 2048, 5120]),
    tile_bytes=st.sampled_from([4096, 8192, 12288]),
    slots=st.integers(1, 5),
    shares=st.lists(st.sampled_from([0.1, 1.0, 7.0]), min_size=1, max_size=4),
    random=st.randoms(use_true_random=False),
)
def test_planned_room_is_always_enough(numels, subgroup_numel, tile_bytes, slots, shares, random):
    """While no more subgroups than staging slots are flushed at once, no claim fails, in stores without slack."""
    dtypes = [DtypeCode.BFLOAT16, DtypeCode.FLOAT32]
    parameters = [Parameter(f"p{i}", numel, random.choice(dtypes), 0) for i, numel in enumerate(numels)]
    layout = build_layout(parameters, subgroup_numel, tile_bytes)

    def offer(limits: list[int]):
        paths = tuple(
            PathBudget(f"path{i}", limit, share) for i, (limit, share) in enumerate(zip(limits, shares, strict=True))
        )
        slot_bytes = max(layout.max_subgroup_bytes, least_slot_bytes(layout.state))
        return make_plan(layout, Budgets(0, slots * slot_bytes, paths))

    plan = offer([1 << 40] * len(shares))
    room = plan.storage_bytes + (max(plan.slot_counts) + SECTOR_BYTES) * (len(shares) - 1)
    cuts = sorted(random.randrange(room + 1) for _ in shares[1:])
    plan = offer([stop - start for start, stop in zip([0, *cuts], [*cuts, room], strict=True)])
    stores = TileIndex([(path.available_bytes, path.share) for path in plan.budgets.paths], plan.slot_counts)
    flying: dict[int, list] = {}
    for step in range(4 * len(layout.subgroups)):
        idle = [s for s in range(len(layout.subgroups)) if s not in flying]
        if idle and len(flying) < plan.staging_slots and random.random() < 0.7:
            subgroup = random.choice(idle)
            flying[subgroup] = [(tile, stores.claim(n)) for tile, _, n in layout.subgroups[subgroup].tiles]
            assert all(location is not None for _, location in flying[subgroup])
        elif flying:
            for tile, location in flying.pop(random.choice(list(flying))):
                stores.commit(tile, TileRecord(location, step, 0))
        stores.check()
        assert sum(stores.live_bytes()) <= plan.storage_bytes


def test_room_that_was_strayed_into_is_not_promised_again():
    """A path that grew beyond the plan may leave too little for slots of other sizes; `has_room` says so."""
    stores = index(12 * WHOLE, 12 * WHOLE, slots=8)
    for step in range(1, 12):
        stores.reshare((0.9, 0.1) if step % 2 else (0.1, 0.9))
        for tile in range(6):
            write(stores, TileId(0, 0, tile), step)
    stores.check()
    more = {SECTOR_BYTES: 8, 2 * SECTOR_BYTES: 100}
    assert not stores.has_room(more)
    assert stores.has_room({SECTOR_BYTES: 8})


def test_straying_leaves_checkpoints_what_the_ends_of_paths_cannot_hold():
    """Two paths with room for four slots and a half each have room for eight, not nine."""
    stores = TileIndex([(4 * WHOLE + WHOLE // 2, 0.5)] * 2, {SECTOR_BYTES: 4}, 4 * WHOLE)
    for step in range(1, 12):
        stores.reshare((0.9, 0.1) if step % 2 else (0.1, 0.9))
        for tile in range(3):
            write(stores, TileId(0, 0, tile), step)
    assert stores.reserve({SECTOR_BYTES: 4})


def test_versions_that_nobody_needs_leave_checkpoints_room_for_slots_of_any_size():
    stores = TileIndex([(13 * SECTOR_BYTES, 0.5)] * 2, {SECTOR_BYTES: 1, 4 * SECTOR_BYTES: 1}, 10 * SECTOR_BYTES)
    stores.abandon(stores.claim(4 * SECTOR_BYTES))
    assert not stores.reserve({SECTOR_BYTES: 3}, lent=True)
    assert stores.reserve({SECTOR_BYTES: 2}, lent=True)


def test_a_store_that_is_taken_up_is_cut_into_free_slots_between_those_that_are_held():
    stores = TileIndex([(1 << 20, 1.0)], {SECTOR_BYTES: 4, 2 * SECTOR_BYTES: 2})
    held = {Location(0, 3 * WHOLE, SECTOR_BYTES): 1, Location(0, 4 * WHOLE + 12 * SECTOR_BYTES, SECTOR_BYTES): 2}
    stores.replace_store(0, 40 * SECTOR_BYTES, held)
    stores.check()
    assert stores.has_planned_room()
    # Six sectors in front are two large slots, twelve between are four; one larger slot less fits than there is.
    large = [stores.claim(2 * SECTOR_BYTES) for _ in range(6)]
    assert sorted(location.offset // SECTOR_BYTES for location in large) == [0, 3, 8, 11, 14, 17]
    stores.make_newest(TILE, TileRecord(Location(0, 3 * WHOLE, SECTOR_BYTES), 5, 1))
    assert stores.get(TILE).step == 5
    write(stores, TILE, 6)
    stores.check()
    taken = stores.claim(SECTOR_BYTES)
    assert taken.offset > max(location.offset for location in held), "a slot that is held was written to"
    stores.unhold(TILE, Location(0, 3 * WHOLE, SECTOR_BYTES))
    assert stores.claim(SECTOR_BYTES).offset == 3 * WHOLE
    stores.check()


def test_a_store_too_full_to_be_taken_up_says_so():
    stores = TileIndex([(1 << 20, 1.0)], {SECTOR_BYTES: 4})
    stores.replace_store(0, 6 * WHOLE, {Location(0, 5 * WHOLE, SECTOR_BYTES): 1})
    assert stores.has_planned_room()
    full = TileIndex([(1 << 20, 1.0)], {SECTOR_BYTES: 4})
    full.replace_store(0, 4 * WHOLE, {Location(0, offset * WHOLE, SECTOR_BYTES): 1 for offset in range(3)})
    assert not full.has_planned_room()


def test_foreign_tiles_are_live_until_they_are_written_here():
    stores = index(1 << 20, slots=4)
    stores.make_newest(TILE, TileRecord(Location(7, 0, SECTOR_BYTES), 3, 1))
    assert (stores.is_foreign(TILE), sum(stores.live_bytes())) == (True, 0)
    stores.check()
    write(stores, TILE, 4)
    assert not stores.is_foreign(TILE)
    stores.check()
    with pytest.raises(InternalError, match="no checkpoint holds"):
        stores.make_newest(TILE, TileRecord(Location(0, 99 * WHOLE, SECTOR_BYTES), 5, 1))


def test_slots_that_a_step_may_need_are_there_and_are_not_lent():
    stores = index(1 << 20, 1 << 20, slots=5)
    assert stores.reserve({SECTOR_BYTES: 3}, lent=True)
    assert stores.claim_loan(SECTOR_BYTES) is None, "nothing is there"
    stores.make_slots()
    ends = stores.end_bytes(0), stores.end_bytes(1)
    assert sum(ends) == 5 * WHOLE
    assert stores.claim_loan(SECTOR_BYTES) is None, "the room is not there"
    stores.note_allocated(ends)
    lent = [stores.claim_loan(SECTOR_BYTES) for _ in range(3)]
    assert all(location.offset >= ends[location.path] for location in lent)
    assert stores.claim(SECTOR_BYTES, lent=True) is None, "no more were reserved"
    own = [stores.claim(SECTOR_BYTES) for _ in range(6)]
    assert all(location.offset < ends[location.path] for location in own[:5])
    assert own[5] is None
    stores.commit(TILE, TileRecord(own[0], 1, 0))
    stores.commit(TILE, TileRecord(lent[0], 2, 0))  # confirmed: the slot of the version before is the plan's
    for location in lent[1:]:
        stores.abandon(location)
    stores.unreserve({SECTOR_BYTES: 3}, lent=True)
    stores.check()
    assert stores.reserve({SECTOR_BYTES: 3}, lent=True)
    again = {stores.claim(SECTOR_BYTES, lent=True) for _ in range(3)}
    assert len(again) == 3
    assert stores.end_bytes(0) + stores.end_bytes(1) == 8 * WHOLE, "slots that nobody needs are lent again"
    stores.check()


def test_a_path_that_is_full_takes_what_is_there_and_grows_again_later():
    stores = index(1 << 20, slots=2)
    stores.make_slots()
    stores.note_allocated((stores.end_bytes(0),))
    assert stores.reserve({SECTOR_BYTES: 1}, lent=True)
    lent = stores.claim(SECTOR_BYTES, lent=True)
    assert not stores.has_room_on_disk(lent)
    stores.abandon_unwritable(lent, is_full=True)
    stores.check()
    stores.stop_growing(0)
    assert stores.claim(SECTOR_BYTES, lent=True) is None
    own = stores.claim(SECTOR_BYTES)
    stores.abandon_unwritable(own, is_full=True)  # as on a file system that writes elsewhere each time
    assert stores.claim(SECTOR_BYTES) == own, "its room is there"
    stores.try_again()
    assert stores.claim(SECTOR_BYTES, lent=True) == lent, "no room is lost by asking for it"
    stores.check()


def test_no_more_slots_are_cut_than_are_planned():
    shares = (0.1, 0.7, 0.2, 1 / 3)
    for slots in range(1, 60):
        stores = index(*[1 << 20] * len(shares), slots=slots, shares=shares)
        stores.make_slots()
        assert sum(map(stores.end_bytes, range(len(shares)))) == slots * WHOLE
        stores.check()
