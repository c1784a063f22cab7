"""Rates learnt from timelines: what shared memory took is not counted, outliers pass, lasting changes are noticed."""

from __future__ import annotations

import dataclasses
import math

import pytest

from offload.measure import lane_totals, observe, typical
from offload.measure.observe import IMPOSSIBLE, LEAST_KEPT, LEAST_TOGETHER
from offload.plan import NO_GPU, GpuRates, PathRates, Rates
from offload.plan.rates import UPDATE_MEMORY_COST
from offload.schedule.timeline import ENGINE, Interval

GB = 1e9
MB = 1 << 20


def spans(lane: str, *times: tuple[float, float], nbytes: int = 100 * MB) -> list[Interval]:
    return [Interval(lane, "", begin_s, end_s, nbytes) for begin_s, end_s in times]


def rates_of(cpu: float = 20 * GB, cost: float = 0.0, memory: float = math.inf, latency_s: float = 0.0) -> Rates:
    return Rates(cpu, (PathRates(4 * GB, 2 * GB, latency_s, cost),), NO_GPU, memory)


def test_busy_time_is_when_anything_is_on_the_lane() -> None:
    timeline = spans("read:0", (0, 1), (0.5, 2), (3, 4)) + spans("cpu", (1, 1), (0, 0.5))
    assert lane_totals(timeline) == {"read:0": (300 * MB, 3.0), "cpu": (200 * MB, 0.5)}
    assert lane_totals(spans("cpu", (0, 5), (1, 2), (4, 6))) == {"cpu": (300 * MB, 6.0)}


def test_what_waits_keeps_a_lane_busy_and_what_finds_it_idle_was_waited_for() -> None:
    """A second's gap each: the second operation was due before the first had ended, the third after the second."""
    timeline = [
        Interval("cpu", "", 1.0, 2.0, 100 * MB, due_s=0.8),
        Interval("cpu", "", 3.0, 4.0, 100 * MB, due_s=1.5),
        Interval("cpu", "", 6.0, 7.0, 100 * MB, due_s=5.0),
        Interval("read:0", "", 5.0, 6.0, 100 * MB),
    ]
    assert lane_totals(timeline)["cpu"] == (300 * MB, pytest.approx(3.0 + 1.0))
    found = observe(rates_of(), timeline)
    assert found.reaction_s == pytest.approx((0.2 + 1.0) / 2)
    assert observe(dataclasses.replace(rates_of(), reaction_s=0.3), timeline[-1:]).reaction_s == 0.3
    assert typical([rates_of(), found, found]).reaction_s == found.reaction_s


def test_a_turn_of_the_other_direction_was_not_waited_for_the_engine() -> None:
    """A write that was due while a read had the device is no reaction, wherever that read was due."""
    timeline = [
        Interval("read:0", "", 0.0, 2.0, 100 * MB, due_s=0.0),
        Interval("write:0", "", 2.0, 4.0, 100 * MB, due_s=1.0),
        Interval("write:1", "", 1.2, 2.0, 100 * MB, due_s=1.0),
        Interval("read:0", "", 4.4, 5.0, 100 * MB, due_s=4.1),
    ]
    assert observe(rates_of(), timeline[:2]).reaction_s == 0.0
    known = dataclasses.replace(rates_of(), paths=rates_of().paths * 2)
    assert observe(known, timeline).reaction_s == pytest.approx((0.0 + 0.2 + 0.3) / 3, abs=1e-9)


def test_what_a_checkpoint_writes_shows_no_reaction() -> None:
    """It waits for its turn; and what waits for it was not waited for the engine."""
    timeline = [
        Interval("read:0", "", 0.1, 1.0, 100 * MB, due_s=0.0),
        Interval("save:0", "", 3.0, 4.0, 100 * MB, due_s=1.5),
        Interval("copy:0", "", 6.0, 7.0, 100 * MB, due_s=5.0),
        Interval("write:0", "", 7.0, 8.0, 100 * MB, due_s=6.5),
        Interval("read:0", "", 9.3, 9.5, 100 * MB, due_s=9.0),
    ]
    assert observe(rates_of(), timeline).reaction_s == pytest.approx((0.1 + 0.3) / 2)


def test_a_lane_that_did_little_keeps_its_rate() -> None:
    known = rates_of()
    assert observe(known, []) == known
    found = observe(known, spans("cpu", (0, 1), nbytes=1000) + spans("read:0", (0, 1), nbytes=1000))
    assert found.cpu_bytes_per_s == known.cpu_bytes_per_s
    assert found.paths[0].read == known.paths[0].read
    assert observe(known, spans("cpu", (1, 1)) + spans("write:0", (1, 1))) == known


def test_a_path_that_did_little_shows_what_its_operations_take_beside_their_bytes() -> None:
    """Three reads and a write; a microsecond each is for their bytes."""
    known = dataclasses.replace(rates_of(), paths=(PathRates(4 * GB, 4 * GB),))
    timeline = spans("read:0", (0, 0.001), (0.001, 0.003), (1, 1.001), nbytes=4000)
    timeline += spans("write:0", (2, 2.002), nbytes=4000)
    found = observe(known, timeline).paths[0]
    assert found.latency_s == pytest.approx(0.006 / 4 - 1e-6)
    assert found.read == known.paths[0].read
    # A direction that has shown its rate has shown it with the latency that was known,
    late = dataclasses.replace(known, paths=(dataclasses.replace(known.paths[0], latency_s=0.1),))
    much = [*timeline, *spans("write:0", (3, 4))]
    assert observe(late, much).paths[0].latency_s == pytest.approx(0.1)
    # or with what it can have been: half of the time.
    later = dataclasses.replace(known, paths=(dataclasses.replace(known.paths[0], latency_s=10.0),))
    found = observe(later, much).paths[0]
    assert found.latency_s == pytest.approx(1.002 / 2 / 2)
    assert 2 * found.latency_s + (100 * MB + 4000) / found.write.alone == pytest.approx(1.002)
    assert typical([known, observe(known, timeline), observe(known, timeline)]).paths[0].latency_s > 0


def test_transfers_that_are_under_way_together_share_their_path() -> None:
    one_by_one = spans("read:0", (0, 1), (1, 2), (2, 3)) + spans("write:0", (0, 3))
    assert observe(rates_of(), one_by_one).paths[0].at_once == 1
    together = [*one_by_one, *spans("write:0", (0.5, 4), (2.5, 4), (3.5, 5))]
    found = observe(rates_of(), together)
    assert found.paths[0].at_once == 3
    assert typical([rates_of(), found, found]).paths[0].at_once == 3
    known = dataclasses.replace(rates_of(), paths=(dataclasses.replace(rates_of().paths[0], at_once=16),))
    assert observe(known, spans("cpu", (0, 1))).paths[0].at_once == 16, "nothing was moved"


def worked(*times: tuple[float, float]) -> list[Interval]:
    """Return turns of the engine's thread."""
    return [Interval(ENGINE, "", begin_s, end_s, 0) for begin_s, end_s in times]


def a_step() -> list[Interval]:
    """Return a step in which the engine's thread takes 0.7 to begin it and 0.1 for an operation, and is woken thrice.

    It is woken 0.05 after what has happened; what it does last in a turn is to take in what ended meanwhile.
    """
    return [
        *worked((0.0, 0.9), (1.05, 1.35), (2.05, 2.25)),
        Interval("cpu", "", 0.8, 0.85, 100 * MB, due_s=0.0),
        Interval("cpu", "", 0.9, 1.0, 100 * MB, due_s=0.0),
        Interval("write:0", "", 1.15, 2.0, 100 * MB, due_s=1.0),
        Interval("write:0", "", 1.25, 2.0, 100 * MB, due_s=1.0),
        Interval("cpu", "", 1.35, 1.4, 100 * MB, due_s=1.0),
        Interval("read:0", "", 2.15, 3.0, 100 * MB, due_s=2.0),
        Interval("read:0", "", 2.25, 3.0, 100 * MB, due_s=2.0),
    ]


def test_what_the_engine_s_thread_takes_is_no_lane_s_and_no_reaction() -> None:
    found = observe(rates_of(), a_step())
    assert found.operation_s == pytest.approx(0.1)
    assert found.begin_s == pytest.approx(0.7)
    # Of those that found their lanes idle when they were due: the first update, and the first write.
    assert found.reaction_s == pytest.approx((0.0 + 0.05) / 2)
    assert lane_totals(a_step())["cpu"][1] == pytest.approx(0.05 + 0.1 + 0.05)
    last = [found, found, observe(found, a_step())]
    assert typical(last).operation_s == pytest.approx(0.1)
    # Without the thread's intervals nothing is known of it, and what it took is the engine's reaction, as ever.
    without = [interval for interval in a_step() if interval.lane != ENGINE]
    silent = observe(dataclasses.replace(rates_of(), operation_s=0.3, begin_s=0.4), without)
    assert (silent.operation_s, silent.begin_s) == (0.3, 0.4)
    assert silent.reaction_s == pytest.approx((0.8 + 0.15) / 2)


def test_what_the_engine_s_thread_learns_from_operations_is_a_part_of_their_costs() -> None:
    """It is in the turn behind the one that begins a step, and grows with the operations, as their costs do."""
    learns = [*a_step(), *worked((0.9, 1.05))]
    found = observe(rates_of(), learns)
    assert found.begin_s == pytest.approx(0.9 - 2 * found.operation_s)
    assert found.operation_s == pytest.approx(0.1 + 0.15 / 5)


def test_a_step_whose_operations_all_begin_in_its_first_turn_takes_all_that_the_thread_works() -> None:
    timeline = [*worked((0.0, 0.5), (0.5, 0.7), (1.0, 1.1)), Interval("cpu", "", 0.4, 0.9, 100 * MB, due_s=0.0)]
    found = observe(dataclasses.replace(rates_of(), operation_s=0.1), timeline)
    assert (found.operation_s, found.begin_s) == (0.1, pytest.approx(0.5 + 0.2 + 0.1 - 0.1))


def test_the_engine_s_turns_behind_a_step_are_not_its() -> None:
    """One turn takes in the last operation's end; requests that come later are others' affairs."""
    timeline = [*a_step(), *worked((3.05, 3.05), (5.0, 9.0), (10.0, 11.0))]
    assert observe(rates_of(), timeline).operation_s == pytest.approx(0.1)


def test_calls_of_a_gpu_that_are_known_apart_are_not_counted_twice() -> None:
    gpu = GpuRates(1 * GB, 1 * GB, 1 * GB, call_s=1e-5)
    known = dataclasses.replace(rates_of(), gpu=gpu, operation_s=1e-4)
    found = observe(known, a_step())
    assert (found.operation_s, found.begin_s) == (known.operation_s, known.begin_s)


def test_each_lane_has_its_bytes_over_its_time() -> None:
    timeline = spans("read:0", (0, 1), (1, 2)) + spans("write:0", (0, 4)) + spans("cpu", (0, 0.5))
    found = observe(rates_of(), timeline)
    assert found.paths[0].read_bytes_per_s == 100 * MB
    assert found.paths[0].write_bytes_per_s == 25 * MB
    assert found.cpu_bytes_per_s == 200 * MB


def shared(read: float, write: float, keeps: float = 0.5) -> PathRates:
    """Return a path of which each direction keeps a part of its rate (GB/s) beside the other."""
    alone = {"read_alone_bytes_per_s": read * GB, "write_alone_bytes_per_s": write * GB}
    return PathRates(keeps * read * GB, keeps * write * GB, **alone)


def seen_path(known: PathRates, timeline: list[Interval]) -> PathRates:
    return observe(Rates(1.0, (known,)), timeline).paths[0]


@pytest.mark.parametrize("known", [PathRates(1 * GB, 1 * GB), shared(9, 1, 0.9), PathRates(4 * GB, 1 * GB)])
def test_a_direction_is_seen_alone_and_beside_the_other(known: PathRates) -> None:
    """4 GB/s of reads alone, 1 beside writes; 2 GB/s of writes, whether or not something is read."""
    timeline = [
        *spans("write:0", (0, 2), nbytes=int(4 * GB)),
        *spans("read:0", (1, 1.75), nbytes=int(0.75 * GB)),
        *spans("read:0", (1.75, 3), nbytes=int(4.25 * GB)),  # a quarter of a second beside the write
        *spans("read:0", (3, 5), nbytes=int(8 * GB)),
        *spans("write:0", (5, 6), nbytes=int(2 * GB)),
    ]
    found = seen_path(known, timeline)
    assert found.read_bytes_per_s == pytest.approx(1 * GB, rel=0.01)
    assert found.read_alone_bytes_per_s == pytest.approx(4 * GB, rel=0.01)
    assert found.write_bytes_per_s == pytest.approx(2 * GB, rel=0.01)
    assert found.write_alone_bytes_per_s == pytest.approx(2 * GB, rel=0.01)


def test_no_step_makes_a_direction_stand_still_beside_the_other() -> None:
    """All reads end later the less they were beside the write: as if they had moved nothing meanwhile."""
    timeline = [
        *spans("write:0", (0, 4), nbytes=int(4 * GB)),
        *spans("read:0", (1, 4.5), nbytes=int(1 * GB)),
        *spans("read:0", (4.5, 5.5), nbytes=int(4 * GB)),
    ]
    found = seen_path(PathRates(1 * GB, 1 * GB), timeline)
    assert found.read_alone_bytes_per_s * LEAST_KEPT == pytest.approx(found.read_bytes_per_s)
    assert 1.5 * found.read_alone_bytes_per_s + 3 * found.read_bytes_per_s == pytest.approx(5 * GB)
    # Writes are hardly seen alone: they keep what reads leave of the device, at the least.
    writes = spans("write:0", (0, 1), nbytes=int(4 * GB)) + spans("write:0", (1, 5), nbytes=1 << 20)
    found = seen_path(PathRates(1 * GB, 1 * GB), writes + timeline[1:])
    assert found.read.rate_share_beside + found.write.rate_share_beside >= LEAST_TOGETHER - 1e-6
    # Unless a device was measured to do worse than taking turns.
    found = seen_path(shared(1, 1, keeps=0.2), writes + timeline[1:])
    assert found.read.rate_share_beside + found.write.rate_share_beside == pytest.approx(0.4)
    # Nor faster than alone.
    timeline = [
        *spans("write:0", (0, 4), nbytes=int(4 * GB)),
        *spans("read:0", (2, 4), nbytes=int(4 * GB)),
        *spans("read:0", (4, 6), nbytes=int(1 * GB)),
    ]
    found = seen_path(PathRates(1 * GB, 1 * GB), timeline)
    assert found.read_alone_bytes_per_s == pytest.approx(found.read_bytes_per_s) == pytest.approx(5 / 4 * GB)


@pytest.mark.parametrize("together", [False, True])
def test_what_a_step_does_not_show_keeps_its_proportion_to_what_it_does(together: bool) -> None:
    """A path that has become half as fast: nothing was read beside a write, or nothing without one."""
    known = shared(4, 2)
    writes = (0, 2) if together else (2, 4)
    speed = 0.5 if together else 1.0
    timeline = spans("read:0", (0, 2), nbytes=int(speed * 4 * GB)) + spans(
        "write:0", writes, nbytes=int(speed * 2 * GB)
    )
    found = seen_path(known, timeline)
    for verb, alone in (("read", 2 * GB), ("write", 1 * GB)):
        assert getattr(found, verb).alone == pytest.approx(alone, rel=1e-6)
        assert getattr(found, verb).beside == pytest.approx(alone / 2, rel=1e-6)


def test_latency_is_not_counted_against_bandwidth() -> None:
    found = observe(rates_of(latency_s=0.1), spans("read:0", (0, 1), (1, 2)))
    assert found.paths[0].read_bytes_per_s == pytest.approx(200 * MB / 1.8)
    # A latency that cannot be: no more than half of the time is believed to be latency.
    found = observe(rates_of(latency_s=5.0), spans("read:0", (0, 1), (1, 2)))
    assert found.paths[0].read_bytes_per_s == pytest.approx(200 * MB)


def test_a_gpu_is_learnt_where_there_is_one() -> None:
    timeline = spans("gpu", (0, 1)) + spans("h2d", (0, 2)) + spans("d2h", (0, 4))
    assert observe(rates_of(), timeline).gpu == NO_GPU
    known = dataclasses.replace(rates_of(), gpu=GpuRates(1 * GB, 1 * GB, 1 * GB, 5))
    gpu = observe(known, timeline).gpu
    assert gpu == GpuRates(100 * MB, 50 * MB, 25 * MB, 5)


def test_a_link_s_directions_keep_their_proportion() -> None:
    """A quarter of 400 MB to the GPU while something comes back, at half the rate."""
    gpu = GpuRates(1 * GB, 1 * GB, 1 * GB, h2d_alone_bytes_per_s=2 * GB, d2h_alone_bytes_per_s=2 * GB)
    timeline = spans("h2d", (0, 2), (2, 3), (3, 4), (4, 5)) + spans("d2h", (0, 2))
    found = observe(dataclasses.replace(rates_of(), gpu=gpu), timeline).gpu
    assert found.h2d == (pytest.approx(50 * MB), pytest.approx(100 * MB))
    assert found.d2h == (pytest.approx(50 * MB), pytest.approx(100 * MB))


def contended(known: Rates, cpu: float, times: list[tuple[float, float]], io: list[Interval]) -> list[Interval]:
    """Return the timeline of a CPU of that rate alone, at work at `times` beside `io` (disjoint, on one lane)."""
    alone = dataclasses.replace(known, cpu_bytes_per_s=cpu)
    nbytes, busy_s = sum(i.nbytes for i in io), sum(i.finished_s - i.started_s for i in io)
    speed = alone.cpu_speed(nbytes / busy_s * known.paths[0].memory_cost)
    timeline = list(io)
    for begin_s, end_s in times:
        beside_s = sum(max(0, min(end_s, i.finished_s) - max(begin_s, i.started_s)) for i in io)
        done = int(cpu * (end_s - begin_s - beside_s + speed * beside_s))
        timeline.append(Interval("cpu", "", begin_s, end_s, done))
    return timeline


@pytest.mark.parametrize("true_cpu", [15, 20, 24])
@pytest.mark.parametrize("times", [[(0.0, 1.0)], [(0.0, 2.0)], [(1.5, 3.0), (3.5, 4.0)], [(2.0, 3.0)]])
def test_the_cpu_s_rate_is_the_one_that_it_has_alone(true_cpu: float, times: list[tuple[float, float]]) -> None:
    """Alone, half beside a path, all the time beside it: the same rate, where the step tells it at all."""
    known = rates_of(20 * GB, cost=3.0, memory=60 * GB)
    io = spans("read:0", (1.0, 1.5), (1.5, 3.5), nbytes=int(5 * GB))
    timeline = contended(known, true_cpu * GB, times, io)
    beside = 4 * GB * 3.0
    limited = true_cpu * GB * UPDATE_MEMORY_COST > known.memory_bytes_per_s - beside
    found = observe(known, timeline).cpu_bytes_per_s
    if limited and times == [(2.0, 3.0)]:
        # Whatever is faster than the memory lets it be looks the same: what was known is as good as any.
        assert found * UPDATE_MEMORY_COST >= (known.memory_bytes_per_s - beside) * (1 - 1e-5)
    else:
        assert found == pytest.approx(true_cpu * GB, rel=1e-4)


def test_what_was_known_stays_where_memory_limits_all_the_time() -> None:
    known = rates_of(20 * GB, cost=3.0, memory=47 * GB)
    io = spans("read:0", (0.0, 2.0), nbytes=int(8 * GB))
    found = observe(known, contended(known, 17 * GB, [(0.0, 2.0)], io))
    assert found.cpu_bytes_per_s == 20 * GB


def step_of(true: Rates) -> list[Interval]:
    """Return a step on lanes of those rates, half of the update beside a read."""
    return contended(true, true.cpu_bytes_per_s, [(0.0, 2.0)], spans("read:0", (1.0, 2.0), nbytes=int(4 * GB)))


@pytest.mark.parametrize(
    ("wrong", "after"),
    [
        (rates_of(25 * GB, cost=9.0, memory=60 * GB), 25),  # the cost was measured on a busy machine
        (rates_of(12 * GB, cost=1.0, memory=30 * GB), 24),  # all of it was
        (rates_of(30 * GB, cost=0.0, memory=90 * GB), 24),  # too good: what was reached is what is believed
        (rates_of(25 * GB, cost=2.0, memory=60 * GB), 25),
    ],
)
def test_rates_that_a_step_refutes_give_way(wrong: Rates, after: float) -> None:
    """Whatever was believed, the next steps are predicted as they are."""
    true = rates_of(25 * GB, cost=2.0, memory=60 * GB)
    seen = [wrong]
    for _ in range(3):
        seen.append(observe(typical(seen), step_of(true)))
    found = typical(seen)
    demand = 4 * GB * found.paths[0].memory_cost
    predicted = found.cpu_bytes_per_s * (1 + found.cpu_speed(demand))
    reached = lane_totals(step_of(true))["cpu"][0]
    assert predicted == pytest.approx(reached, rel=IMPOSSIBLE)
    assert found.cpu_bytes_per_s == pytest.approx(after * GB, rel=0.04)
    assert found.memory_bytes_per_s >= found.cpu_bytes_per_s * UPDATE_MEMORY_COST * (1 - 1e-9)


def test_noise_of_a_few_percent_does_not_wear_costs_down() -> None:
    true = rates_of(25 * GB, cost=2.0, memory=60 * GB)
    seen = [true]
    for number in range(100):
        noisy = [i._replace(nbytes=int(i.nbytes * (1.0 + 0.04 * math.sin(number)))) for i in step_of(true)]
        seen = [*seen, observe(typical(seen), noisy)][-4:]
    assert typical(seen).paths[0].memory_cost == 2.0
    assert typical(seen).memory_bytes_per_s == 60 * GB


def test_observing_its_own_prediction_changes_nothing() -> None:
    from offload.dtypes import DtypeCode
    from offload.layout import Parameter, build_layout
    from offload.plan import Budgets, PathBudget, make_plan
    from offload.predict import predict

    layout = build_layout([Parameter("p", 40 << 20, DtypeCode.BFLOAT16, 0)], 1 << 20, 1 << 20)
    paths = tuple(PathBudget(f"path {n}", 4 * layout.state_bytes) for n in range(2))
    budgets = Budgets(layout.state_bytes // 3, 4 * layout.max_subgroup_bytes, paths, follow_rates=True)
    rates = Rates(
        20 * GB, (PathRates(4 * GB, 3 * GB, 1e-4, 2.0), PathRates(1 * GB, 2 * GB, 0.0, 1.0)), NO_GPU, 48 * GB
    )
    prediction = predict(make_plan(layout, budgets), rates)
    assert prediction.busy_s["cpu"] > 1.05 * layout.state_bytes / rates.cpu_bytes_per_s  # there was contention
    found = observe(dataclasses.replace(rates, cpu_bytes_per_s=15 * GB), prediction.timeline)
    assert found.cpu_bytes_per_s == pytest.approx(rates.cpu_bytes_per_s, rel=0.02)
    for seen, true in zip(found.paths, rates.paths, strict=True):
        assert seen.read_bytes_per_s == pytest.approx(true.read_bytes_per_s, rel=0.02)
        assert seen.write_bytes_per_s == pytest.approx(true.write_bytes_per_s, rel=0.02)


def test_one_outlier_changes_nothing_and_a_lasting_change_shows_in_the_second_step() -> None:
    def step(read_gb_per_s: float) -> list[Interval]:
        return spans("read:0", (0.0, 1.0), nbytes=int(read_gb_per_s * GB))

    seen = [rates_of()]
    for rate, believed in [(4, 4), (0.1, 4), (4, 4), (40, 4), (4, 4), (1.3, 4), (1.3, 1.3), (1.3, 1.3)]:
        seen.append(observe(typical(seen), step(rate)))
        assert typical(seen).paths[0].read_bytes_per_s == pytest.approx(believed * GB), rate


def test_the_middle_is_taken_of_each_rate_by_itself() -> None:
    gpus = [GpuRates(1, 6, 2, 5), GpuRates(3, 4, 1, 5), GpuRates(2, 5, 3, 5)]
    cpus = [3.0, 1.0, 2.0]
    history = [
        Rates(cpu, (PathRates(cpu, 4 - cpu, 0.5, 2.0),), gpu, 9.0) for cpu, gpu in zip(cpus, gpus, strict=True)
    ]
    found = typical([rates_of(), *history])
    assert found == Rates(2.0, (PathRates(2.0, 2.0, 0.5, 2.0),), GpuRates(2, 5, 2, 5), 9.0)
