"""The full probe on this machine's own files, small; and the arithmetic that makes rates of what it finds."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from _throttled import ThrottledTier
from devices import CUDA, LATE_FULL, the_device
from faulty import Fault, FaultKind, FaultyTier
from s3_server import BUCKET, S3Server
from world.device import SimulatedDevice

from offload._native import CompletionQueue
from offload.device.lanes import GpuLanes
from offload.errors import ConfigError, TierError
from offload.formats import EXACT, EXACT_ADAMW, FORMATS
from offload.measure import RatesFile, full, full_probe
from offload.measure.drive import Load, bytes_per_s, drive, rates_beside
from offload.measure.full import LADDER_BYTES, PATH_SLOTS, thread_counts
from offload.measure.gpu import GpuProbe
from offload.measure.samples import FULL_ROUNDS, fit_latency, summarise
from offload.measure.workbench import memory_cost
from offload.plan import NO_GPU, PathRates, Rates
from offload.plan.rates import LEAST_CPU_SPEED, UPDATE_MEMORY_COST
from offload.schedule.timeline import Interval
from offload.tiers import StoreOptions, open_tier

GB = 1e9


def probe(*paths: Path, **arguments: Any) -> RatesFile:
    return full_probe([str(path) for path in paths], **{"seconds": 0.5, "numel": 1 << 17, "threads": 2, **arguments})


@pytest.mark.slow
def test_every_tile_is_written_before_it_is_read_however_long_one_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Any] = []

    def opened(*arguments: Any, **settings: Any) -> Any:
        tier = open_tier(*arguments, **settings)
        plain = tier.write

        def write(request: Any) -> None:
            if request.nbytes == LADDER_BYTES[0] and len(held) < PATH_SLOTS:
                held.append(request)
                if len(held) == 1:
                    return  # the first does not end before the others have begun
            plain(request)
            if len(held) == PATH_SLOTS:
                plain(held[0])
                held.append(None)

        tier.write = write
        return tier

    monkeypatch.setattr(full, "open_tier", opened)
    probe(tmp_path, seconds=0.1)
    assert held[-1] is None


@pytest.mark.slow
@pytest.mark.parametrize("max_bytes", [10 << 20, 9 << 19])  # of the second, smaller tiles need a large part, too
def test_what_the_search_for_a_depth_has_written_is_room(
    max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*arguments: Any, options: StoreOptions) -> Any:
        return open_tier(*arguments, options=dataclasses.replace(options, max_bytes=max_bytes))

    monkeypatch.setattr(full, "open_tier", opened)
    assert probe(tmp_path, seconds=0.1).rates.paths


@pytest.mark.slow
def test_a_probe_measures_everything_and_leaves_nothing(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    reports: list[tuple[int, int, str]] = []
    found = probe(tmp_path / "one", tmp_path / "two", report=lambda *each: reports.append(each))
    assert found.misfit() == ""
    assert set(found.cpu_bytes_per_s) == set(FORMATS)
    assert all(set(each) == {1, 2} for each in found.cpu_bytes_per_s.values())
    assert len(found.rates.paths) == len(found.paths) == 2
    assert found.rates.memory_bytes_per_s >= max(found.cpu_bytes_per_s[EXACT].values()) * UPDATE_MEMORY_COST
    for number in range(2):
        for name in ("read alone", "write alone", "read", "write", "latency", "read beside cpu", "speed of cpu"):
            assert f"path {number}/{name}" in found.measurements
    assert "memory/plain" in found.measurements
    for name, each in found.measurements.items():
        assert FULL_ROUNDS[0] <= each.runs <= FULL_ROUNDS[1], name
        assert each.median >= 0, name
        assert math.isfinite(each.spread), name
    assert RatesFile.from_dict(found.to_dict(), "rates") == RatesFile(**{**vars(found), "file": "rates"})
    assert not [file for name in ("one", "two") for file in (tmp_path / name).iterdir()]
    done = [each[0] for each in reports]
    assert done == sorted(done)
    assert reports[-1][0] == reports[-1][1]
    assert all(done <= total for done, total, _ in reports)


@pytest.mark.slow
def test_a_slow_path_is_seen_as_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def throttled(path: str, store: Any, queue: CompletionQueue, **arguments: Any) -> ThrottledTier:
        inner = CompletionQueue()
        rates = {"read_bytes_per_s": 60e6, "write_bytes_per_s": 30e6, "latency_s": 1e-3}
        return ThrottledTier(open_tier(path, store, inner, **arguments), inner, queue, **rates)

    monkeypatch.setattr("offload.measure.full.open_tier", throttled)
    found = probe(tmp_path)
    # A busy machine may be slower still, but nothing is faster than its device.
    for verb, limit in (("read", 60e6), ("write", 30e6)):
        assert 0 < found.measurements[f"path 0/{verb} alone"].median <= limit * 1.01
        # Of what a tile took at most half is taken for latency.
        assert 0 < getattr(found.rates.paths[0], f"{verb}_bytes_per_s") <= 2 * limit * 1.01
    assert 0 <= found.rates.paths[0].latency_s < 1


@pytest.mark.slow
def test_a_bucket_is_measured_and_left_empty(s3: S3Server) -> None:
    found = full_probe([f"s3://{BUCKET}/probed"], seconds=0.5, numel=1 << 17, threads=1)
    assert found.paths[0]["file_system"] == "s3"
    assert found.rates.paths[0].read_bytes_per_s > 0
    assert not s3.keys("probed")


@pytest.mark.slow
def test_a_failing_path_is_named_and_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(path: str, store: Any, queue: CompletionQueue, **arguments: Any) -> FaultyTier:
        return FaultyTier(open_tier(path, store, queue, **arguments), queue, [Fault("read", FaultKind.ERROR, nth=3)])

    monkeypatch.setattr("offload.measure.full.open_tier", faulty)
    with pytest.raises(TierError, match=str(tmp_path)):
        probe(tmp_path)
    assert not list(tmp_path.iterdir())


def test_paths_without_room_or_without_existence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        probe(tmp_path / "absent")

    def small(path: str, store: Any, queue: CompletionQueue, options: StoreOptions) -> Any:
        less = dataclasses.replace(options, max_bytes=1 << 20, extent_bytes=1 << 16)
        return open_tier(path, store, queue, options=less)

    monkeypatch.setattr("offload.measure.full.open_tier", small)
    with pytest.raises(ConfigError, match=r"MiB are free there and the probe needs 4\.0 MiB"):
        probe(tmp_path)
    assert not list(tmp_path.iterdir())


def test_directions_are_measured_while_both_are_at_work() -> None:
    """Reads are through first, and writes faster then."""
    timeline = [Interval("read", "", float(at), at + 1.0, 30) for at in range(2)]
    timeline += [Interval("write", "", float(at), at + 1.0, 10) for at in range(2)]
    timeline.append(Interval("write", "", 2.0, 3.0, 40))
    assert rates_beside(timeline) == {"read": 30.0, "write": 10.0}
    assert rates_beside(timeline[-1:]) == {"write": 40.0}
    # Where they hardly met, each has what it reached.
    assert rates_beside([timeline[0], timeline[-1]]) == {"read": 30.0, "write": 40.0}


def test_threads_are_measured_closely_where_it_matters() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(2) == [1, 2]
    assert thread_counts(8) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert thread_counts(12) == [*range(1, 9), 12]
    assert thread_counts(64) == [*range(1, 9), 12, 16, 24, 32, 48, 64]


def test_spread_is_of_the_middle_half() -> None:
    found = summarise([1.0, 2.0, 2.0, 2.0, 100.0], "s")
    assert (found.median, found.spread, found.runs, found.unit) == (2.0, 0.0, 5, "s")
    assert summarise([2.0, 1.0, 3.0], "s").spread == 1.0
    assert summarise([0.0, 0.0, 0.0], "s").spread == 0.0


def test_latency_is_where_the_line_begins() -> None:
    sizes = (4096, 65536, 1 << 20, 8 << 20)
    assert fit_latency([(size, 5e-5 + size / 2e9) for size in sizes]) == pytest.approx(5e-5)
    assert fit_latency([(size, size / 2e9) for size in sizes]) == pytest.approx(0.0, abs=1e-9)
    assert fit_latency([(4096, 1e-6), (8192, 3e-6)]) == 0.0
    assert fit_latency([(4096, 1e-6)]) == 0.0


@pytest.mark.parametrize("speed", [0.2, 0.5, 0.81, 0.95])
@pytest.mark.parametrize("cpu", [15, 24, 25.5])
def test_the_cost_of_io_gives_the_slow_down_back(cpu: float, speed: float) -> None:
    read, write = 2.4 * GB, 2.5 * GB
    cost = memory_cost(60 * GB, cpu * GB, speed, read + write)
    rates = Rates(cpu * GB, (PathRates(read, write, 0.0, cost),), NO_GPU, 60 * GB)
    assert rates.cpu_speed((read + write) * cost) == pytest.approx(speed)


def test_io_that_slows_nothing_costs_no_more_than_it_moves() -> None:
    """One thread leaves most of the memory alone: only that I/O has room says nothing about what it takes."""
    assert memory_cost(60 * GB, 10 * GB, 1.0, 5 * GB) == 1.0
    assert memory_cost(60 * GB, 10 * GB, 1.1, 5 * GB) == 1.0
    # A tenth less, where runs are a third apart, is nothing that a slow path can have done.
    assert memory_cost(60 * GB, 25 * GB, 0.9, 0.05 * GB) > 100
    assert memory_cost(60 * GB, 25 * GB, 0.9, 0.05 * GB, spread=0.3) == 1.0
    assert memory_cost(60 * GB, 25.7 * GB, 1.0, 5 * GB) < 0.01
    assert memory_cost(60 * GB, 30 * GB, 1.0, 5 * GB) == 0.0
    rates = Rates(10 * GB, (), NO_GPU, 60 * GB)
    assert rates.cpu_speed(5 * GB * memory_cost(60 * GB, 10 * GB, 0.99, 5 * GB)) == 1.0
    assert rates.cpu_speed(1e15) == LEAST_CPU_SPEED


class Lane:
    """Operations that end at once, the last started first, and record how many were out."""

    def __init__(self, queue: CompletionQueue, nbytes: int = 10, errors: Mapping[int, int] | None = None) -> None:
        self.queue, self.nbytes, self.errors = queue, nbytes, errors or {}
        self.places: list[int] = []
        self.clock = itertools.count()

    def load(self, lane: str, depth: int, count: int | None) -> Load:
        def start(op: int, place: int) -> None:
            self.places.append(place)
            error = self.errors.get(len(self.places), 0)
            began_s = float(next(self.clock))
            self.queue.post(op, error, started_s=began_s, finished_s=began_s + 1)

        return Load(lane, self.nbytes, depth, start, lambda completion: TierError("x", tier="t", path="p"), count)


@pytest.mark.parametrize(("depth", "count"), [(1, 1), (4, 2), (4, 4), (4, 9), (3, 100)])
def test_a_load_runs_as_often_as_asked(depth: int, count: int) -> None:
    lane = Lane(CompletionQueue())
    timeline = drive(lane.queue, [lane.load("read:0", depth, count)])
    assert len(timeline) == len(lane.places) == count
    assert set(lane.places) == set(range(min(depth, count)))


def test_a_load_without_a_count_goes_on_as_long_as_the_others() -> None:
    queue = CompletionQueue()
    counted, follower = Lane(queue), Lane(queue)
    timeline = drive(queue, [follower.load("cpu", 2, None), counted.load("read:0", 3, 50)])
    lanes = [interval.lane for interval in timeline]
    assert lanes.count("read:0") == 50
    assert lanes.count("cpu") == len(follower.places) >= 2


def test_a_failure_ends_all_loads_and_is_raised_when_nothing_is_out() -> None:
    queue = CompletionQueue()
    failing, other = Lane(queue, errors={5: 7}), Lane(queue)
    with pytest.raises(TierError):
        drive(queue, [failing.load("read:0", 2, 1000), other.load("cpu", 2, None)])
    assert len(failing.places) < 10
    assert queue.wait(0.0) == []


def test_only_the_time_in_which_all_lanes_work_counts() -> None:
    timeline = [
        Interval("cpu", "", 0.0, 2.0, 100),  # half of it before the other lane begins
        Interval("cpu", "", 2.0, 3.0, 100),
        Interval("read:0", "", 1.0, 2.5, 30),
        Interval("read:0", "", 1.0, 5.0, 80),  # half of it after the CPU ends
    ]
    assert bytes_per_s(timeline, "cpu") == pytest.approx((50 + 100) / 2)
    assert bytes_per_s(timeline, "read:0") == pytest.approx((30 + 40) / 2)


def test_a_device_is_measured_through_its_lanes() -> None:
    """The simulated device refuses work that is not in order, and copies of memory that is not pinned are counted."""
    device = SimulatedDevice(bytes_per_s=1e9)
    lanes = GpuLanes(device, CompletionQueue())
    free_bytes = device.free_bytes()
    with contextlib.closing(GpuProbe(lanes, EXACT_ADAMW, 4096, update=itertools.count(1.0).__next__)) as made:
        found: dict[str, float] = {}
        for _ in range(2):
            for _, sample in made.samples():
                found |= sample()
    ways = ("h2d", "d2h")
    assert found.keys() == {f"gpu/{way}{beside}" for way in ways for beside in ("", " alone", " beside cpu")} | {
        "gpu/update",
        "gpu/speed of cpu",
    }
    assert all(0 < value < math.inf for value in found.values())
    assert (device.pageable_bytes, device.pinned, device.free_bytes()) == (0, {}, free_bytes)
    lanes.close()


@pytest.mark.parametrize("name", [LATE_FULL[0], CUDA[0]])
def test_an_accelerator_is_measured(name: str) -> None:
    device = the_device(name)
    found = probe()
    assert found.machine["gpu"] or device.type != "cuda"  # it is the driver's word
    gpu = found.rates.gpu
    assert gpu != NO_GPU
    assert gpu.memory_bytes > 1 << 30
    assert all(0 < rate < math.inf for rate in (gpu.h2d_bytes_per_s, gpu.d2h_bytes_per_s, gpu.update_bytes_per_s))
    if device.type != "cuda":
        return
    # Any link is slower than the GPU's own memory, and both ways together are no faster than each alone.
    assert max(gpu.h2d_bytes_per_s, gpu.d2h_bytes_per_s) < gpu.update_bytes_per_s * UPDATE_MEMORY_COST
    alone = {way: found.measurements[f"gpu/{way} alone"].median for way in ("h2d", "d2h")}
    assert gpu.h2d_bytes_per_s < 1.2 * alone["h2d"]
    assert gpu.d2h_bytes_per_s < 1.2 * alone["d2h"]


def test_a_lane_that_rests_while_the_other_works_has_a_rate() -> None:
    timeline = [
        Interval("read:0", "", 0.0, 1.0, 100, 0.0),
        Interval("read:0", "", 9.0, 10.0, 100, 0.0),
        Interval("write:0", "", 2.0, 8.0, 600, 0.0),
    ]
    rates = rates_beside(timeline)
    assert min(rates.values()) > 0
