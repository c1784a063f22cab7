"""The simulated executor and its faults, by themselves."""

from __future__ import annotations

import copy
import errno
import random

import numpy as np
import pytest
from world.data import SimData
from world.executor import Disorder, SimExecutor
from world.faults import (
    CorruptPayload,
    Crash,
    FailOperation,
    MisdirectedWrite,
    PathFull,
    SimulatedCrash,
    SlowLane,
    StuckOperation,
    random_faults,
)

from offload.dtypes import DtypeCode
from offload.errors import ConfigError, CorruptRecordError, InternalError, TierError, TierFullError
from offload.layout import Parameter, build_layout
from offload.plan import Budgets, PathBudget, PathRates, Rates, make_plan
from offload.protocols import SECTOR_BYTES
from offload.schedule.index import Location, TileRecord
from offload.schedule.operations import BeginSweep, Done, Failed, ReadTile, RunVisit, Stop, Sweep, Visit, WriteTile

LAYOUT = build_layout([Parameter("p", 2048, DtypeCode.BFLOAT16, 0)], 1024)
OFFERS = (PathBudget("/a", 1 << 30), PathBudget("/b", 1 << 30))
PLAN = make_plan(LAYOUT, Budgets(0, None, OFFERS))
RATES = Rates(3 * SECTOR_BYTES / 10.0, (PathRates(SECTOR_BYTES, SECTOR_BYTES / 2, 0.5),) * 2)
TILES = [tile for tile, _, _ in LAYOUT.subgroups[0].tiles]


def read(op: int, path: int = 0, slot: int = 0, checksum: int = 0) -> ReadTile:
    return ReadTile(op, TILES[0], slot, 0, TileRecord(Location(path, 0, SECTOR_BYTES), 1, checksum))


def write(op: int, path: int = 0, offset: int = 0, tile: int = 0, step: int = 1) -> WriteTile:
    record = TileRecord(Location(path, offset, SECTOR_BYTES), step, 0)
    return WriteTile(op, TILES[tile], 0, tile * SECTOR_BYTES, record)


def run(op: int, subgroup: int = 0) -> RunVisit:
    return RunVisit(op, 1, Visit(subgroup), 0, True)


def drain(executor: SimExecutor, count: int) -> list:
    events: list = []
    while len(events) < count:
        events += executor.wait()
    return events


def test_lanes_are_serial_and_work_side_by_side():
    executor = SimExecutor(PLAN, RATES)
    executor.submit([read(1), read(2), write(3), read(4, path=1), run(5)])
    assert executor.wait() == [Done(1), Done(4)]
    assert executor.now_s == 1.5
    assert executor.wait() == [Done(3)]
    assert executor.now_s == 2.5
    assert executor.wait() == [Done(2)]
    assert executor.now_s == 3.0
    assert executor.wait() == [Done(5)]
    assert executor.now_s == 10.0
    assert executor.busy_s == {"cpu": 10.0, "read:0": 3.0, "read:1": 1.5, "write:0": 2.5, "write:1": 0.0}
    assert executor.lane_bytes["read:0"] == 2 * SECTOR_BYTES
    assert [tuple(interval) for interval in executor.timeline[1:3]] == [
        ("read:0", "subgroup 0 tensor 0 tile 0", 1.5, 3.0, SECTOR_BYTES, None),
        ("write:0", "subgroup 0 tensor 0 tile 0", 0.0, 2.5, SECTOR_BYTES, None),
    ]
    assert executor.timeline[-1].label == "subgroup 0"


def test_injected_events_come_in_their_turn():
    executor = SimExecutor(PLAN, RATES)
    begin = BeginSweep(Sweep(1, 1, ()))
    executor.submit([read(1)])
    executor.inject(begin)
    executor.inject(begin, at_s=2.0)
    assert [executor.wait(), executor.wait(), executor.wait()] == [[begin], [Done(1)], [begin]]


def test_waiting_for_nothing_is_a_bug_and_for_a_stuck_request_an_end():
    with pytest.raises(InternalError, match="nothing in flight"):
        SimExecutor(PLAN, RATES).wait()
    executor = SimExecutor(PLAN, RATES, [StuckOperation("read", 0)])
    executor.submit([read(1), read(2)])
    assert executor.wait() == [Done(2)]
    (event,) = executor.wait()
    assert isinstance(event, Stop)
    assert "no answer" in str(event.error)
    assert event.error.path == "/a"


@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [
        (FailOperation("write", 1), TierError, errno.EIO),
        (FailOperation("write", 1, None), TierError, None),
        (PathFull(0, 0.1), TierFullError, errno.ENOSPC),
    ],
)
def test_failing_writes(fault, kind, code):
    executor = SimExecutor(PLAN, RATES, [fault], data=SimData(PLAN))
    executor.submit([write(1), write(2, offset=2 * SECTOR_BYTES, tile=1), write(3, path=1)])
    events = {event.op: event for event in drain(executor, 3)}
    assert isinstance(events[1], Done)
    assert isinstance(events[3], Done)
    assert type(events[2].error) is kind
    assert (events[2].error.path, events[2].error.offset, events[2].error.errno) == ("/a", 2 * SECTOR_BYTES, code)


def test_failing_run_and_read():
    executor = SimExecutor(PLAN, RATES, [FailOperation("run", 0), FailOperation("read", 0)])
    executor.submit([run(1), read(2)])
    assert all(isinstance(event, Failed) for event in drain(executor, 2))


def test_slow_lane_and_disorder():
    executor = SimExecutor(PLAN, RATES, [SlowLane("read:0", 1.0, 10.0)])
    executor.submit([read(1), read(2), read(3, path=1)])
    drain(executor, 3)
    assert executor.now_s == 1.5 + 15.0

    def order(seed: int) -> list[int]:
        executor = SimExecutor(PLAN, RATES, seed=seed, disorder=Disorder(jitter=2.0, servers=3))
        executor.submit([read(op) for op in range(1, 10)])
        return [event.op for event in drain(executor, 9)]

    assert order(1) == order(1)
    assert order(1) != list(range(1, 10))
    executor = SimExecutor(PLAN, RATES, disorder=Disorder(lag_s=10.0))
    executor.submit([read(1), read(2), write(3)])
    assert executor.wait() == [Done(1), Done(3), Done(2)]


def fill(data: SimData) -> None:
    data.staging[0][:] = np.arange(data.staging[0].size, dtype=np.uint32)


def test_bytes_go_out_and_come_back():
    data = SimData(PLAN)
    fill(data)
    executor = SimExecutor(PLAN, RATES, data=data)
    executor.submit([write(1)])
    (done,) = executor.wait()
    executor.submit([read(2, slot=1, checksum=done.record.checksum)])
    assert data.staging[1][0] == 0xDEADBEEF, "a buffer is worth nothing while it is read into"
    executor.wait()
    assert (data.staging[1][:1024] == data.staging[0][:1024]).all()


@pytest.mark.parametrize(
    ("faults", "detail"),
    [
        ([CorruptPayload(0)], "checksum differs"),
        ([MisdirectedWrite(0)], "holds no record"),
        ([MisdirectedWrite(1)], "of step 2"),
        ([], "checksum differs"),
    ],
)
def test_records_that_are_not_what_was_written(faults, detail):
    data = SimData(PLAN)
    fill(data)
    executor = SimExecutor(PLAN, RATES, faults, data=data)
    executor.submit([write(1)])
    (done,) = executor.wait()
    executor.submit([write(2, offset=2 * SECTOR_BYTES, tile=1, step=2)])
    executor.wait()
    executor.submit([read(3, checksum=done.record.checksum ^ (not faults))])
    (failed,) = executor.wait()
    assert isinstance(failed.error, CorruptRecordError)
    assert detail in str(failed.error)


def test_crash_loses_what_was_not_synced_and_nothing_else():
    after = []
    for seed in range(20):
        data = SimData(PLAN)
        fill(data)
        executor = SimExecutor(PLAN, RATES, [Crash(2)], seed, data)
        executor.submit([write(1)])
        executor.wait()
        data.sync()
        executor.submit([write(2, offset=2 * SECTOR_BYTES, tile=1), write(3, offset=4 * SECTOR_BYTES, tile=2)])
        executor.wait()
        with pytest.raises(SimulatedCrash):
            executor.wait()
        slots = data.stores[0].slots
        assert slots[0].tile == TILES[0]
        after.append(slots[2 * SECTOR_BYTES] is not None)
    assert True in after
    assert False in after


def test_store_after_a_crash_holds_old_new_or_nothing():
    data = SimData(PLAN)
    fill(data)
    executor = SimExecutor(PLAN, RATES, data=data)
    executor.submit([write(1, step=1)])
    executor.wait()
    data.sync()
    executor.submit([write(2, step=2)])
    executor.wait()
    old_and_new = {1, 2, None}
    seen = set()
    for seed in range(40):
        other = copy.deepcopy(data)
        other.crash(random.Random(seed))
        found = other.stores[0].slots[0]
        seen.add(found.step if found else None)
    assert seen == old_and_new


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match=r"rates\.paths"):
        SimExecutor(PLAN, Rates(1.0, ()))
    with pytest.raises(ConfigError, match="give data"):
        SimExecutor(PLAN, RATES, [CorruptPayload(0)])


def test_random_faults_come_from_the_seed():
    draws = [random_faults(seed, paths=2, operations=50) for seed in range(300)]
    assert draws == [random_faults(seed, paths=2, operations=50) for seed in range(300)]
    kinds = {FailOperation, StuckOperation, CorruptPayload, MisdirectedWrite, PathFull, SlowLane}
    drawn = [fault for draw in draws for fault in draw]
    assert {type(fault) for fault in drawn} == kinds
    assert any(fault.errno is None for fault in drawn if isinstance(fault, FailOperation))
    assert random_faults(1, paths=0, operations=0)
