"""The machine alone: events in, operations out. No loop, no executor."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.dtypes import DtypeCode
from offload.errors import InternalError, TierError, TierFullError
from offload.layout import Parameter, build_layout
from offload.plan import Budgets, Home, PathBudget, Placement, Plan, make_plan, visit_order
from offload.protocols import SECTOR_BYTES
from offload.schedule.index import TileIndex
from offload.schedule.machine import Machine
from offload.schedule.operations import (
    Admit,
    Allocated,
    AwaitPush,
    BeginSweep,
    Done,
    Evict,
    Extend,
    Failed,
    LimitGpuSlots,
    MakeSlots,
    OutcomeTold,
    PauseOpenSweep,
    ReadTile,
    RunVisit,
    SealStep,
    Stop,
    Sweep,
    Transfer,
    Visit,
    WriteTile,
)
from offload.schedule.runs import update_visits
from offload.schedule.staging import Phase, Staging

SUBGROUP_BYTES = 3 * SECTOR_BYTES
EIO = TierError("write", tier="fake", path="path0", errno=5)


def make(subgroups: int, slots: int, resident: int = 0, limits: tuple[int, ...] = (1 << 30,), *listener) -> Machine:
    """Return a machine over equal subgroups of three tiles, the first `resident` of them at home in memory."""
    layout = build_layout([Parameter("p", 1024 * subgroups, DtypeCode.BFLOAT16, 0)], 1024, SECTOR_BYTES)
    offers = tuple(PathBudget(f"path{i}", limit) for i, limit in enumerate(limits))
    plan = make_plan(layout, Budgets(resident * SUBGROUP_BYTES, slots * SUBGROUP_BYTES, offers))
    assert plan.homes.count(Home.HOST) == resident
    return machine_for(plan, *listener)


def machine_for(plan: Plan, *listener) -> Machine:
    stores = [(path.available_bytes, path.share) for path in plan.budgets.paths]
    return Machine(plan, TileIndex(stores, plan.slot_counts), *listener)


def allocated(machine: Machine) -> Machine:
    """Return a machine on whose paths the room of all planned slots is there."""
    machine.handle(MakeSlots())
    machine.handle(Allocated(tuple(machine.index.end_bytes(n) for n in range(len(machine.plan.budgets.paths)))))
    return machine


def give(machine: Machine, *events) -> list:
    for event in events:
        machine.handle(event)
        machine.check()
    return machine.take_operations()


def sweep(number: int, *subgroups: int, **flags: bool) -> BeginSweep:
    return BeginSweep(Sweep(number, number, tuple(Visit(subgroup, **flags) for subgroup in subgroups)))


def finish(machine: Machine, operations: list) -> list:
    """Let everything end well, oldest first; return all operations, those given included."""
    done = []
    while operations:
        operation = operations.pop(0)
        done.append(operation)
        operations += give(machine, Done(operation.op))
    return done


def finish_until_run(machine: Machine, operations: list) -> list:
    """Let everything but runs end well, oldest first; return all operations, those given included."""
    done = []
    while operations:
        operation = operations.pop(0)
        done.append(operation)
        if not isinstance(operation, RunVisit):
            operations += give(machine, Done(operation.op))
    return done


def test_fresh_subgroup_runs_without_a_fetch():
    machine = make(1, 1)
    (run,) = give(machine, sweep(1, 0))
    assert run == RunVisit(run.op, 1, Visit(0), 0, fresh=True)
    assert machine.phases[0] is Phase.BUSY
    assert not give(machine, Done(run.op))
    assert machine.phases[0] is Phase.DIRTY
    assert machine.take_finished_sweep().number == 1
    assert machine.changed_subgroups == [0]
    assert machine.has_no_sweep
    assert not machine.is_fresh(0)


def test_state_that_stays_in_memory_is_neither_written_nor_read():
    machine = make(2, 2)
    for number in range(1, 4):
        operations = finish(machine, give(machine, sweep(number, 0, 1)))
        assert [type(operation) for operation in operations] == [RunVisit, RunVisit]
        machine.take_finished_sweep()


def test_flush_then_fetch_when_a_slot_is_wanted():
    machine = make(2, 1)
    (run,) = give(machine, sweep(1, 0, 1))
    writes = give(machine, Done(run.op))
    assert [type(write) for write in writes] == [WriteTile] * 3
    assert [write.buffer_offset for write in writes] == [0, SECTOR_BYTES, 2 * SECTOR_BYTES]
    assert {write.record.step for write in writes} == {1}
    records = [replace(write.record, checksum=10 + number) for number, write in enumerate(writes)]
    assert not give(machine, Done(writes[0].op, records[0]), Done(writes[2].op, records[2]))
    assert machine.index.get(writes[0].tile) is None, "a version is committed before all of it is there"
    (run,) = give(machine, Done(writes[1].op, records[1]))
    assert (run.visit.subgroup, run.fresh) == (1, True)
    give(machine, Done(run.op))
    machine.take_finished_sweep()
    # The way back: subgroup 1 is dirty in the only slot.
    writes = give(machine, sweep(2, 0))
    reads = give(machine, *(Done(write.op) for write in writes))
    assert [type(read) for read in reads] == [ReadTile] * 3
    assert [read.record for read in reads] == records
    assert not give(machine, Done(reads[2].op), Done(reads[0].op))
    assert machine.phases[0] is Phase.FETCHING
    (run,) = give(machine, Done(reads[1].op))
    assert (run.visit.subgroup, run.fresh) == (0, False)


def test_overwriting_visit_fetches_nothing():
    machine = make(2, 1)
    finish(machine, give(machine, sweep(1, 0, 1)))
    machine.take_finished_sweep()
    operations = finish(machine, give(machine, sweep(2, 0, overwrites=True)))
    assert [type(operation) for operation in operations] == [WriteTile] * 3 + [RunVisit]
    assert operations[-1].fresh is False


def test_reading_visit_leaves_state_clean_and_its_slot_free_to_take():
    machine = make(3, 1)
    finish(machine, give(machine, sweep(1, 0, 1, 2)))
    machine.take_finished_sweep()
    operations = finish(machine, give(machine, sweep(2, 0, 1, changes=False)))
    kinds = [type(operation) for operation in operations]
    assert kinds == [WriteTile] * 3 + [ReadTile] * 3 + [RunVisit] + [ReadTile] * 3 + [RunVisit]
    assert machine.phases[1] is Phase.READY
    assert machine.changed_subgroups == []


def test_reading_visit_of_dirty_state_keeps_it_dirty():
    machine = make(2, 1)
    finish(machine, give(machine, sweep(1, 0)))
    machine.take_finished_sweep()
    finish(machine, give(machine, sweep(2, 0, changes=False)))
    machine.take_finished_sweep()
    assert machine.phases[0] is Phase.DIRTY
    writes = give(machine, sweep(3, 1))
    assert {write.record.step for write in writes} == {1}, "the version is that of the last change"


def test_resident_subgroups_fill_the_waits():
    machine = make(4, 1, resident=2)
    first = give(machine, sweep(1, 0, 1, 2, 3))
    assert [run.visit.subgroup for run in first] == [2, 0], "streamed first, then resident"
    assert [run.slot for run in first] == [0, None]
    operations = give(machine, Done(first[0].op))
    assert [type(operation) for operation in operations] == [WriteTile] * 3 + [RunVisit]
    assert operations[-1].visit.subgroup == 1


def test_no_more_than_two_runs_at_once_where_state_is_streamed():
    machine = make(5, 1, resident=4)
    assert len(give(machine, sweep(1, *range(5)))) == 2


def test_more_runs_are_handed_over_where_nothing_streamed_would_wait_for_them():
    machine = make(5, 1, resident=5)
    assert len(give(machine, sweep(1, *range(5)))) == 4


def test_old_slots_are_freed_only_when_the_new_version_is_whole():
    machine = make(2, 1)
    finish(machine, give(machine, sweep(1, 0, 1)))
    machine.take_finished_sweep()
    operations = give(machine, sweep(2, 0))
    while not isinstance(operations[0], RunVisit):
        operations = give(machine, *(Done(operation.op) for operation in operations))
    give(machine, Done(operations[0].op))
    machine.take_finished_sweep()
    writes = give(machine, sweep(3, 1))
    old = {machine.index.get(write.tile).location for write in writes}
    new = {write.record.location for write in writes}
    assert len(old) == len(new) == 3
    assert not old & new
    give(machine, Done(writes[0].op), Done(writes[1].op))
    assert {machine.index.get(write.tile).location for write in writes} == old
    give(machine, Done(writes[2].op))
    assert {machine.index.get(write.tile).location for write in writes} == new


def test_failed_write_goes_to_another_path():
    warnings = []
    machine = make(2, 1, 0, (1 << 30, 1 << 30), SimpleNamespace(say_warning=warnings.append))
    (run,) = give(machine, sweep(1, 0, 1))
    writes = give(machine, Done(run.op))
    failing = next(write for write in writes if write.record.location.path == 0)
    (again,) = give(machine, Failed(failing.op, EIO))
    assert (again.tile, again.slot, again.buffer_offset) == (failing.tile, failing.slot, failing.buffer_offset)
    assert again.record.location.path == 1
    assert machine.broken is None
    assert "path0" in warnings[0]
    finish(machine, [again, *(write for write in writes if write is not failing)])
    assert machine.take_finished_sweep().number == 1
    assert machine.broken is None


def test_all_state_moves_to_the_path_that_is_left():
    machine = make(6, 2, limits=(1 << 30, 1 << 30))
    for number in range(1, 8):
        operations = give(machine, sweep(number, *visit_order(range(6), machine.slots)))
        while operations:
            operation = operations.pop(0)
            if isinstance(operation, WriteTile) and operation.record.location.path == 0 and number > 1:
                operations += give(machine, Failed(operation.op, EIO))
            else:
                operations += give(machine, Done(operation.op))
        assert machine.take_finished_sweep().number == number
        assert machine.broken is None, "a second path with room did not save the run"
    assert machine.index.live_bytes()[0] == 0


def test_failed_write_without_another_path_breaks():
    machine = make(2, 1)
    (run,) = give(machine, sweep(1, 0, 1))
    first, *others = give(machine, Done(run.op))
    assert not give(machine, Failed(first.op, EIO))
    assert machine.broken is EIO
    assert machine.finished_sweep is None, "what is in flight still uses the buffers"
    assert not give(machine, *(Done(write.op) for write in others))
    assert machine.take_finished_sweep().number == 1
    assert machine.changed_subgroups == [0]


def test_no_visit_starts_when_a_flush_finds_no_room():
    machine = make(4, 2, resident=1)
    machine.index.retire(0)
    first, second = give(machine, sweep(1, 0, 1, 2, 3))
    assert [first.visit.subgroup, second.visit.subgroup] == [1, 2]
    assert not give(machine, Done(first.op)), "the resident subgroup is started after all"
    assert isinstance(machine.broken, TierFullError)
    assert not give(machine, Done(second.op))
    assert machine.take_finished_sweep().number == 1
    assert machine.changed_subgroups == [1, 2]


def test_no_other_flush_starts_when_one_finds_no_room():
    parameters = [Parameter("large", 2048, DtypeCode.BFLOAT16, 0), Parameter("small", 1024, DtypeCode.BFLOAT16, 1)]
    layout = build_layout([*parameters, Parameter("more", 4096, DtypeCode.BFLOAT16, 2)], 2048, 2 * SECTOR_BYTES)
    plan = make_plan(layout, Budgets(0, 2 * layout.max_subgroup_bytes, (PathBudget("path0", 1 << 30),)))
    machine = Machine(plan, TileIndex([(2 * SECTOR_BYTES, 1.0)], plan.slot_counts))  # less than the plan demands
    finish(machine, give(machine, sweep(1, 0, 1)))
    machine.take_finished_sweep()
    assert not give(machine, sweep(2, 2, 3)), "the small subgroup is flushed after all"
    assert isinstance(machine.broken, TierFullError)
    assert machine.take_finished_sweep().number == 2


def test_flush_without_room_names_the_tile():
    machine = make(2, 1)
    machine.index.retire(0)
    (run,) = give(machine, sweep(1, 0, 1))
    assert not give(machine, Done(run.op))
    assert isinstance(machine.broken, TierFullError)
    assert "TileId(subgroup=0, tensor=0, tile=0)" in str(machine.broken)
    assert machine.take_finished_sweep().number == 1


@pytest.mark.parametrize("kind", [RunVisit, ReadTile])
def test_failed_run_or_read_breaks_once_all_has_landed(kind: type):
    machine = make(3, 2)
    finish(machine, give(machine, sweep(1, 0, 1, 2)))
    machine.take_finished_sweep()
    operations = give(machine, sweep(2, 0, 1, 2))
    while not any(isinstance(operation, kind) for operation in operations):
        operations += give(machine, Done(operations.pop(0).op))
    failing = next(operation for operation in operations if isinstance(operation, kind))
    operations.remove(failing)
    error = TierError("read", tier="fake", path="path0", errno=5)
    assert not give(machine, Failed(failing.op, error))
    for operation in operations:
        assert machine.finished_sweep is None
        assert not give(machine, Done(operation.op))
    assert machine.take_finished_sweep().number == 2
    assert machine.broken is error


def test_stop_ends_the_sweep_without_waiting():
    machine = make(2, 1)
    (run,) = give(machine, sweep(1, 0, 1))
    error = TierError("run", tier="host", path="cpu", detail="no answer")
    assert not give(machine, Stop(error))
    assert machine.take_finished_sweep().number == 1
    assert machine.broken is error
    assert not give(machine, Done(run.op)), "a late answer starts nothing"
    assert not give(machine, sweep(2, 0))
    assert machine.take_finished_sweep().number == 2


def test_after_a_stop_between_sweeps_nothing_has_moved():
    """The step that it keeps from beginning names no subgroup of the step before."""
    machine = make(1, 1)
    finish(machine, give(machine, sweep(1, 0)))
    machine.take_finished_sweep()
    assert machine.changed_subgroups == [0]
    give(machine, Stop(TierError("copy", tier="gpu", path="h2d")))
    assert machine.changed_subgroups == []


def test_reports_that_cannot_be_are_refused_with_their_story():
    machine = make(1, 1)
    with pytest.raises(InternalError, match="operation 7 reports back") as caught:
        machine.handle(Done(7))
    assert "Done(op=7" in caught.value.__notes__[0]
    (run,) = give(make_again := make(1, 1), sweep(1, 0))
    with pytest.raises(InternalError, match="another is under way"):
        make_again.handle(sweep(2, 0))
    make_again.handle(Done(run.op))
    with pytest.raises(InternalError, match="before the last one was taken"):
        make_again.handle(sweep(3, 0))
    with pytest.raises(InternalError, match="twice"):
        make(1, 1).handle(sweep(1, 0, 0))


def test_a_phase_that_cannot_follow_is_refused():
    machine = make(1, 1)
    with pytest.raises(InternalError, match=r"subgroup 0 goes from Phase\.ABSENT to Phase\.DIRTY"):
        Staging(machine.plan).set_phase(0, Phase.DIRTY)


def test_extended_plan_keeps_what_is_there():
    machine = make(2, 1, resident=1)
    finish(machine, give(machine, sweep(1, 0, 1)))
    machine.take_finished_sweep()
    bigger = make(5, 1, resident=1).plan
    give(machine, Extend(bigger))
    assert not machine.is_fresh(1)
    assert machine.is_fresh(4)
    operations = finish(machine, give(machine, sweep(2, 0, 1, 2, 3, 4)))
    assert [operation.visit.subgroup for operation in operations if isinstance(operation, RunVisit)] == [
        1,
        0,
        2,
        3,
        4,
    ]
    assert machine.take_finished_sweep().number == 2
    assert machine.broken is None


def test_extended_plan_takes_no_staging_slot_away():
    with pytest.raises(InternalError, match="takes staging slots away"):
        make(3, 2).handle(Extend(make(4, 1).plan))
    machine = make(3, 1)
    give(machine, sweep(1, 0, 1, 2))
    with pytest.raises(InternalError, match="between sweeps and saves only"):
        machine.handle(Extend(make(4, 1).plan))


@settings(max_examples=60)
@given(subgroups=st.integers(1, 12), slots=st.integers(1, 14), resident=st.integers(0, 4), order=st.randoms())
def test_steady_traffic_is_the_streamed_state_less_the_staging_memory(subgroups, slots, resident, order):
    """With S equal streamed subgroups and A slots a step reads S - A subgroups and writes as many, exactly."""
    machine = make(subgroups + resident, slots, resident)
    streamed, staging = subgroups, machine.plan.staging_slots
    assert staging == min(slots, subgroups)
    for number in range(1, 5):
        wanted = visit_order(range(subgroups + resident), machine.slots)
        operations, counts = give(machine, sweep(number, *wanted)), {ReadTile: 0, WriteTile: 0, RunVisit: 0}
        while operations:
            operation = operations.pop(order.randrange(len(operations)))
            counts[type(operation)] += 1
            operations += give(machine, Done(operation.op))
        assert machine.take_finished_sweep().number == number
        moved = 3 * (streamed - staging)
        fetched = 0 if number == 1 else moved
        assert counts == {ReadTile: fetched, WriteTile: moved, RunVisit: subgroups + resident}


# Visits on a GPU


def make_gpu(on_gpu: list[bool], *, gpu_slots: int = 1, resident: int | None = None, slots: int = 1) -> Machine:
    """Return a machine over equal subgroups, of which the GPU updates those that are marked."""
    count = len(on_gpu)
    placements = [Placement.GPU if gpu else Placement.CPU for gpu in on_gpu]
    layout = build_layout([Parameter("p", 1024 * count, DtypeCode.BFLOAT16, 0)], 1024, SECTOR_BYTES)
    budgets = Budgets(
        (count if resident is None else resident) * SUBGROUP_BYTES,
        slots * SUBGROUP_BYTES,
        (PathBudget("path0", 1 << 30),),
        gpu_staging_bytes=gpu_slots * SUBGROUP_BYTES,
        weights_on_gpu=True,
    )
    return machine_for(make_plan(layout, budgets, placements=placements))


def step(machine: Machine, number: int) -> BeginSweep:
    return BeginSweep(Sweep(number, number, update_visits(machine.plan, range(len(machine.plan.layout.subgroups)))))


def test_a_visit_on_the_gpu_is_copied_in_and_out_through_its_slot():
    machine = make_gpu([True])
    (run,) = give(machine, step(machine, 1))  # fresh: there is nothing to copy in
    assert run == RunVisit(run.op, 1, Visit(0, gpu=True), None, fresh=True, transfer_slot=0)
    (out,) = give(machine, Done(run.op))
    assert out == Transfer(out.op, 0, "state", "flush", 0, SUBGROUP_BYTES)
    assert machine.take_finished_sweep().number == 1, "the update has ended; the copy out is behind the step"
    assert machine.phases[0] is Phase.BUSY
    # The next step wants the state while it is still on its way.
    assert not give(machine, step(machine, 2))
    (copy,) = give(machine, Done(out.op))
    assert copy == Transfer(copy.op, 0, "state", "fetch", 0, SUBGROUP_BYTES)
    (run,) = give(machine, Done(copy.op))
    assert run == RunVisit(run.op, 2, Visit(0, gpu=True), None, fresh=False, transfer_slot=0)
    (out,) = give(machine, Done(run.op))
    give(machine, Done(out.op))
    assert machine.phases[0] is Phase.RESIDENT


def test_both_devices_work_at_once_and_weights_follow_updates_on_the_cpu():
    machine = make_gpu([False, True])
    cpu, gpu = give(machine, step(machine, 1))
    assert (cpu.visit.gpu, gpu.visit.gpu) == (False, True)
    (push,) = give(machine, Done(cpu.op))
    assert (cpu.transfer_slot, push) == (0, Transfer(push.op, 0, "weights", "flush", 0, 2 * 1024))
    (out,) = give(machine, Done(gpu.op))
    assert not machine.finished_sweep, "the weights are not there yet"
    give(machine, Done(push.op))
    assert machine.take_finished_sweep().number == 1
    give(machine, Done(out.op))


def test_weights_that_are_masters_are_fetched_to_a_slot_which_is_free_when_they_have_left_it():
    layout = build_layout([Parameter("p", 4 * 1024, DtypeCode.FLOAT32, 0)], 1024, 4096)
    machine = machine_for(make_plan(layout, Budgets(layout.state_bytes, weights_on_gpu=True)))
    assert machine.plan.weight_slots == 4
    fetches = give(machine, step(machine, 1))
    assert fetches == [Transfer(f.op, n, "weights", "fetch", n, 4 * 1024) for n, f in enumerate(fetches)]
    runs = give(machine, *(Done(fetch.op) for fetch in fetches[:2]))
    assert [(run.visit.subgroup, run.transfer_slot) for run in runs] == [(0, 0), (1, 1)]
    (push,) = give(machine, Done(runs[0].op))
    (waiting,) = give(machine, Done(push.op))
    assert waiting == AwaitPush(waiting.op, 0, 0)
    finish(machine, give(machine, *(Done(o.op) for o in (*fetches[2:], runs[1]))))
    assert machine.take_finished_sweep().number == 1, "the last of the weights may still be on their way"
    # The next step wants slot 0, which has not been left.
    second = [o for o in give(machine, step(machine, 2)) if isinstance(o, Transfer)]
    assert [(fetch.subgroup, fetch.transfer_slot) for fetch in second] == [(0, 1), (1, 2), (2, 3)]
    (last,) = give(machine, Done(waiting.op))
    assert last == Transfer(last.op, 3, "weights", "fetch", 0, 4 * 1024)


def kind_of(operation) -> str:
    return operation.way if isinstance(operation, Transfer) else type(operation).__name__


def test_streamed_state_passes_through_both_memories():
    machine = make_gpu([True, True], resident=0)
    kinds = [kind_of(operation) for operation in finish(machine, give(machine, step(machine, 1)))]
    machine.take_finished_sweep()
    assert kinds == ["RunVisit", "flush", *["WriteTile"] * 3, "RunVisit", "flush"]
    kinds = [kind_of(operation) for operation in finish(machine, give(machine, step(machine, 2)))]
    # It begins with what lies in the staging slot: the last one.
    there, back = ["fetch", "RunVisit", "flush"], [*["WriteTile"] * 3, *["ReadTile"] * 3]
    assert kinds == [*there, *back, *there]


def test_a_failed_copy_breaks_the_session():
    machine = make_gpu([True])
    finish(machine, give(machine, step(machine, 1)))
    machine.take_finished_sweep()
    (copy,) = give(machine, step(machine, 2))
    assert not give(machine, Failed(copy.op, TierError("copy", tier="gpu", path="h2d")))
    assert machine.broken is not None
    assert machine.take_finished_sweep().number == 2
    assert machine.failed


def test_weights_that_stay_old_keep_their_step_from_counting():
    machine = make_gpu([False, False], resident=1)
    pending = give(machine, step(machine, 1))
    assert [type(operation) for operation in pending] == [RunVisit, RunVisit]
    machine.broken = EIO  # as by a flush that finds no room
    assert not give(machine, *(Done(operation.op) for operation in pending))
    assert machine.take_finished_sweep().number == 1
    assert machine.changed_subgroups == [pending[0].visit.subgroup, pending[1].visit.subgroup]
    assert machine.failed, "the new weights have not reached the GPU"


def test_gpu_slots_follow_the_plan_between_steps():
    machine = make_gpu([True, True], gpu_slots=2)
    finish(machine, give(machine, step(machine, 1)))
    machine.take_finished_sweep()
    plan = machine.plan
    budgets = replace(plan.budgets, gpu_staging_bytes=SUBGROUP_BYTES)
    give(machine, Extend(make_plan(plan.layout, budgets, placements=plan.placements)))
    operations = finish(machine, give(machine, step(machine, 2)))
    assert {o.transfer_slot for o in operations} == {0}, "one is left"


def test_a_step_has_the_gpu_slots_that_are_lent_to_it():
    machine = make_gpu([True, True, True], gpu_slots=3)
    finish(machine, give(machine, step(machine, 1)))
    machine.take_finished_sweep()
    for number, lent in ((2, 1), (3, 2), (4, 3)):
        first = give(machine, LimitGpuSlots(lent), step(machine, number))
        assert [copy.transfer_slot for copy in first] == list(range(lent))
        operations = finish(machine, first)
        assert {o.transfer_slot for o in operations} <= set(range(lent))
        assert machine.take_finished_sweep().number == number
    give(machine, LimitGpuSlots(0))
    borrowing = replace(machine.plan, budgets=replace(machine.plan.budgets, borrows=True))
    cpu = update_visits(borrowing.unborrowed, range(3))
    assert not any(visit.gpu for visit in cpu)
    finish(machine, give(machine, BeginSweep(Sweep(5, 5, cpu))))
    assert machine.take_finished_sweep().number == 5
    with pytest.raises(InternalError, match="more staging slots"):
        give(machine, LimitGpuSlots(4))
    give(machine, Extend(machine.plan))
    assert len(give(machine, step(machine, 6))) == 3, "a plan that is taken up has all its slots"


def test_copies_out_of_slots_that_are_not_lent_any_more_go_on():
    machine = make_gpu([True, True], gpu_slots=2)
    runs = give(machine, step(machine, 1))
    outs = give(machine, *(Done(run.op) for run in runs))
    assert machine.take_finished_sweep().number == 1
    assert not give(machine, LimitGpuSlots(1), step(machine, 2)), "state is on its way"
    assert not give(machine, Done(outs[1].op)), "slot 1 is free, and not lent"
    (copy,) = give(machine, Done(outs[0].op))
    assert copy.transfer_slot == 0
    finish(machine, [copy])
    assert machine.take_finished_sweep().number == 2


@pytest.mark.parametrize("fails_before", [False, True])
def test_a_version_beside_the_live_one_is_confirmed_only_while_its_writes_go_well(fails_before: bool) -> None:
    machine = allocated(make(2, 1))
    finish(machine, give(machine, sweep(1, 0, 1)))
    give(machine, OutcomeTold(machine.finished_sweep))
    reads = give(machine, BeginSweep(Sweep(2, 2, (Visit(0, speculative=True),), is_open=True)), Admit((0,)))
    *_, run = [each for each in finish_until_run(machine, reads) if isinstance(each, RunVisit)]
    writes = give(machine, Done(run.op))
    assert {*machine.speculative_versions} == {0}
    if fails_before:
        give(machine, Failed(writes[0].op, EIO))
        assert not machine.speculative_versions  # a save would fail with it, and a step that makes it again does not
    give(machine, PauseOpenSweep(), SealStep(tuple(machine.speculative_versions)))
    for write in writes[fails_before:]:
        give(machine, Done(write.op))
    assert machine.broken is None
    newest = {machine.index.get(tile).step for tile, _, _ in machine.plan.layout.subgroups[0].tiles}
    assert newest == ({1} if fails_before else {2})


def test_state_that_comes_back_from_the_gpu_behind_its_step_is_flushed_before_a_version_is_made() -> None:
    machine = allocated(make_gpu([True], resident=0))
    (run,) = give(machine, step(machine, 1))
    (out,) = give(machine, Done(run.op))
    machine.take_finished_sweep()
    assert not give(machine, BeginSweep(Sweep(2, 2, (Visit(0, speculative=True),), is_open=True)), Admit((0,)))
    writes = give(machine, Done(out.op))
    assert {write.record.step for write in writes} == {1}
    *_, ahead = finish_until_run(machine, writes)
    assert ahead == RunVisit(ahead.op, 2, Visit(0, speculative=True), 0, fresh=False)
    finish(machine, [ahead])
    give(machine, PauseOpenSweep(), SealStep((0,)))
    assert {machine.index.get(tile).step for tile, _, _ in machine.plan.layout.subgroups[0].tiles} == {2}


def test_memory_is_vacated_only_when_what_an_open_sweep_fetched_has_come():
    machine = make(2, 2)
    finish(machine, give(machine, sweep(1, 0, 1)))
    machine.take_finished_sweep()
    finish(machine, give(machine, Evict(1, ())))
    machine.take_finished_eviction()
    reads = give(machine, BeginSweep(Sweep(2, 2, (Visit(0, speculative=True),), is_open=True)))
    assert not give(machine, SealStep(), Evict(2, ()))
    assert machine.is_evicting, "slots are vacated, and something is still read into them"
    finish(machine, reads)
    assert machine.take_finished_eviction() == (Evict(2, ()), None)
    assert not machine.slots


def test_state_that_leaves_memory_while_the_machine_breaks_is_somewhere():
    machine = allocated(make(3, 1, resident=2))
    finish(machine, give(machine, sweep(1, 0, 1, 2)))
    machine.take_finished_sweep()
    writes = give(machine, Evict(1, (0, 1)))
    of = {number: [write for write in writes if write.tile.subgroup == number] for number in range(3)}
    give(machine, Failed(of[0][0].op, EIO), Failed(of[2][0].op, EIO))
    assert machine.broken is EIO
    assert not give(machine, *(Done(write.op) for number in range(3) for write in of[number][number != 1 :]))
    assert machine.take_finished_eviction() == (Evict(1, (0, 1)), EIO)
    assert [machine.is_evicted(number) for number in range(2)] == [False, True]


def test_a_leave_that_finds_no_room_for_changed_slots_breaks_and_issues_nothing():
    layout = build_layout([Parameter("p", 2048 + 1024, DtypeCode.BFLOAT16, 0)], 2048, 2 * SECTOR_BYTES)
    large, small = 3 * SECTOR_BYTES, 2 * SECTOR_BYTES  # in the store
    path = PathBudget("path", 20 * large + small)
    plan = make_plan(layout, Budgets(0, 2 * layout.subgroups[0].state_bytes, (path,)))
    machine = machine_for(plan)
    finish(machine, give(machine, sweep(1, 0, 1)))
    machine.take_finished_sweep()
    while (location := machine.index.claim(large - SECTOR_BYTES)) is not None:
        machine.index.abandon_unwritable(location, is_full=False)
    assert not give(machine, Evict(1, ()))
    assert isinstance(machine.broken, TierFullError)
    assert machine.take_finished_eviction() == (Evict(1, ()), machine.broken)
