"""The short probe that a session begins with: over how much memory, how often, and after what."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from world import SimulatedDevice

from offload._native import CompletionQueue
from offload.device.lanes import GpuLanes
from offload.dtypes import DtypeCode
from offload.engine.executor import LiveExecutor
from offload.formats import COMPACT8, COMPACT16, EXACT, EXACT_ADAMW, StateFormat
from offload.kernels import CpuUpdateKernel
from offload.kernels.table import trial_bytes, trial_items
from offload.layout import Parameter, build_layout
from offload.measure import probe, quick_probe, samples, trial, workbench
from offload.measure.trial import trial_rates
from offload.measure.workbench import CHUNK_NUMEL, TrialState
from offload.memory.arenas import Arena
from offload.plan import NO_GPU, Budgets, Home, PathBudget, PathRates, Plan, Rates, make_plan
from offload.plan.rates import UPDATE_MEMORY_COST
from offload.predict import predict
from offload.schedule.operations import Event
from offload.tiers import StoreOptions, open_tier

GIB = 1 << 30


def plan_of(numel: int, state_format: StateFormat = EXACT, exact: int = 0) -> Plan:
    parameters = [
        Parameter("p", numel, DtypeCode.BFLOAT16, 0),
        Parameter("q", exact, DtypeCode.BFLOAT16, 0, exact=True),
    ]
    state = EXACT_ADAMW.stored_in(state_format)
    layout = build_layout(parameters if exact else parameters[:1], 1 << 22, 1 << 20, state=state)
    return make_plan(layout, Budgets(host_bytes=layout.state_bytes))


TESTS = itertools.count(1 << 16)
ROUNDS, STEPS = samples.QUICK_ROUNDS, trial.STEPS
"""Those of everybody's sessions, not of the tests'."""


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has measured, it has measured on other CPUs."""
    plain, number = os.sched_getaffinity, next(TESTS)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*plain(pid), number})
    monkeypatch.setattr(samples, "QUICK_ROUNDS", ROUNDS)
    monkeypatch.setattr(trial, "STEPS", STEPS)


@pytest.mark.parametrize(
    ("caches", "state", "staging", "available", "expected"),
    [
        (32 << 20, 100 * GIB, 0, 100 * GIB, 512 << 20),
        (400 << 20, 100 * GIB, 0, 100 * GIB, 1200 << 20),
        (32 << 20, 96 << 20, 0, 100 * GIB, 96 << 20),  # no more than the session takes itself
        (32 << 20, 100 * GIB, 0, 2 * GIB, 256 << 20),  # nor than a part of what is there
        (32 << 20, 3 << 20, 0, 100 * GIB, 3 << 20),
        (32 << 20, 3 << 20, 0, 0, 0),
        (32 << 20, 96 << 20, 64 << 20, 100 * GIB, 96 << 20),  # beside staging memory, which it has taken
        (32 << 20, 64 << 20, 316 << 20, 100 * GIB, 300 << 20),  # or in it
    ],
)
def test_over_how_much_memory(
    caches: int, state: int, staging: int, available: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "cache_bytes", lambda: caches)
    monkeypatch.setattr(probe, "available_bytes", lambda: available)

    class Session:
        host_bytes, overhead_bytes, staging_bytes = state + staging + 1000, 1000, staging
        layout = SimpleNamespace(parameters=(), state=EXACT_ADAMW)

    class Taken(Exception):
        pass

    def take(spec: Any, numel: int, *arguments: Any, **options: Any) -> None:
        raise Taken(numel)

    monkeypatch.setattr(probe, "TrialState", take)
    queue = CompletionQueue()
    with CpuUpdateKernel(queue, 1) as kernel, pytest.raises(Taken) as taken:
        quick_probe(kernel, [], queue, 0, Session)  # type: ignore[arg-type]
    numel = taken.value.args[0]
    nbytes = numel * trial_bytes(EXACT_ADAMW)
    unit = (CHUNK_NUMEL if expected > CHUNK_NUMEL * trial_bytes(EXACT_ADAMW) else 1024) * trial_bytes(EXACT_ADAMW)
    assert numel > 0
    assert numel % 1024 == 0
    assert nbytes <= max(expected, unit)
    assert nbytes > expected - unit


def test_caches_are_counted_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(6):
        for index, (level, size, shared) in enumerate(
            [(1, "48K", f"{cpu}"), (1, "32K", f"{cpu}"), (2, "2M", f"{cpu}"), (3, "96M", "0-2" if cpu < 3 else "3-5")]
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(probe, "SYSTEM_CPUS", tmp_path)
    for allowed, expected in (({0, 1, 2, 3}, 192), ({4, 5}, 96), ({9}, 0)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, allowed=allowed: allowed)
        assert probe.cache_bytes() == expected << 20


def test_a_process_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def trial(spec: Any, numel: int, *arguments: Any, **options: Any) -> TrialState:
        taken.append(numel)
        return TrialState(spec, numel, *arguments, **options)

    monkeypatch.setattr(probe, "TrialState", trial)
    queue = CompletionQueue()
    with CpuUpdateKernel(queue, 1) as one, CpuUpdateKernel(queue, 2) as two:
        first = quick_probe(one, [], queue, 0, plan_of(100_000))
        again = quick_probe(one, [], queue, 0, plan_of(100_000))
        assert again.cpu_bytes_per_s == first.cpu_bytes_per_s
        assert again.memory_bytes_per_s == first.memory_bytes_per_s
        assert len(taken) == 1
        quick_probe(two, [], queue, 0, plan_of(100_000))
        quick_probe(one, [], queue, 0, plan_of(200_000))
    assert len(taken) == 3
    assert taken[0] == taken[1] < taken[2]
    # An update does not move more than memory gives, which is then what the update moved, but for rounding.
    assert 0 < first.cpu_bytes_per_s * UPDATE_MEMORY_COST <= first.memory_bytes_per_s * (1 + 1e-9) < float("inf")


@pytest.mark.parametrize(
    ("state_format", "exact", "expected"),
    [
        (EXACT, 0, 12.0),
        (COMPACT16, 0, 4.0),
        (COMPACT8, 0, 1.0),
        (COMPACT8, 100_000, (12 + 5 + 2 / 64) / (12 / 12 + (5 + 2 / 64) / 1)),
    ],
)
def test_each_format_of_a_session_is_measured(
    state_format: StateFormat, exact: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {EXACT: 12.0, COMPACT16: 4.0, COMPACT8: 1.0}
    measured: list[StateFormat] = []

    def trial(spec: Any, *arguments: Any, **options: Any) -> TrialState:
        measured.append(spec.format)
        return TrialState(spec, *arguments, **options)

    monkeypatch.setattr(probe, "TrialState", trial)
    monkeypatch.setattr(samples, "lane_rates", lambda run: {"cpu": rates[measured[-1]] * 1e9})
    queue = CompletionQueue()
    with CpuUpdateKernel(queue, 1) as kernel:
        found = quick_probe(kernel, [], queue, 0, plan_of(100_000, state_format, exact))
    assert found.cpu_bytes_per_s == pytest.approx(expected * 1e9)
    assert set(measured) == {EXACT, state_format}


@pytest.mark.parametrize("lazy", [False, True])
def test_a_gpu_is_measured_beside_the_update(lazy: bool) -> None:
    """A device that does nothing until it is waited for is measured, too."""
    device = SimulatedDevice(lazy=lazy, bytes_per_s=None if lazy else 1e8)
    queue = CompletionQueue()
    lanes = GpuLanes(device, queue)
    with CpuUpdateKernel(queue, 1) as kernel:
        found = quick_probe(kernel, [], queue, 0, plan_of(20_000), lanes)
    assert found.gpu != NO_GPU
    if not lazy:
        assert max(found.gpu.h2d_bytes_per_s, found.gpu.d2h_bytes_per_s, found.gpu.update_bytes_per_s) <= 1e8
    assert 0 <= found.gpu.memory_cost <= samples.MOST_GPU_MEMORY_COST
    assert not device.pinned
    lanes.close()


@pytest.mark.parametrize(("speed", "expected"), [(1.0, 0.0), (0.5, 0.2), (0.1, samples.MOST_GPU_MEMORY_COST)])
def test_what_copies_leave_of_the_update_is_their_cost(
    speed: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = 1e9 if speed == 0.1 else 10e9 * UPDATE_MEMORY_COST * 0.5 / 2 / 0.2

    class Probe:
        def __init__(self, *how: Any, **more: Any) -> None:
            pass

        def close(self) -> None:
            pass

        def warm_up(self) -> None:
            pass

        def samples(self) -> Any:
            link_rates = {f"gpu/{way}{beside}": link for way in ("h2d", "d2h") for beside in ("", " alone")}
            yield "all", lambda: link_rates | {"gpu/update": 10e9, "gpu/speed of cpu": speed}

    monkeypatch.setattr(probe, "GpuProbe", Probe)
    monkeypatch.setattr(samples, "lane_rates", lambda run: {"cpu": 10e9})
    monkeypatch.setattr(TrialState, "stream_rate", lambda *how: 10e9 * UPDATE_MEMORY_COST)
    queue = CompletionQueue()
    device = SimpleNamespace(name=f"of speed {speed}", free_bytes=lambda: 1 << 30)
    lanes = SimpleNamespace(device=device, measure_rates=lambda measure: measure(lanes))
    with CpuUpdateKernel(queue, 1) as kernel:
        found = quick_probe(kernel, [], queue, 0, plan_of(20_000), lanes)  # type: ignore[arg-type]
    assert found.gpu is not None
    assert found.gpu.memory_cost == pytest.approx(expected)


def test_staging_memory_is_passed_over_where_it_is_most_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken already; what the probe took beside it, the session would take never."""
    layout = build_layout([Parameter("p", 12 << 20, DtypeCode.BFLOAT16, 0)], 1 << 20, 1 << 20)
    plan = make_plan(layout, Budgets(0, staging_bytes=100 << 20, paths=(PathBudget("disk", 1 << 30),)))
    assert plan.staging_bytes > plan.host_bytes - plan.overhead_bytes - plan.staging_bytes
    taken: list[int] = []
    monkeypatch.setattr(workbench, "Arena", lambda nbytes, **options: taken.append(nbytes))
    staging, queue = Arena(plan.staging_bytes), CompletionQueue()
    with CpuUpdateKernel(queue, 1) as kernel:
        found = quick_probe(kernel, [], queue, staging.address, plan)
    assert found.cpu_bytes_per_s > 0
    assert not taken
    assert staging.tensor(0, plan.staging_bytes // 2, torch.uint8).any()
    staging.close()


def held(state: TrialState, name: str, nbytes: int) -> tuple[int, bytes]:
    """Return where a tensor of a trial's state lies, and what it holds."""
    address = int(state.table(0, state.numel)[name][0])
    return address, ctypes.string_at(address, nbytes)


def test_what_lay_in_borrowed_memory_makes_no_difference() -> None:
    """As moments, some bits take the kernel several times as long."""
    spec, numel = EXACT_ADAMW.stored_in(COMPACT8), 1 << 16
    staging = Arena(32 << 20)
    staging.tensor(0, staging.nbytes, torch.uint8).fill_(0xFF)
    borrowed = TrialState(spec, numel, borrowed=(staging.address, staging.nbytes))
    own = TrialState(spec, numel)
    for name, stored in trial_items(spec).items():
        (there, found), (elsewhere, wanted) = (held(state, name, stored.offset(numel)) for state in (borrowed, own))
        assert found == wanted
        assert staging.address <= there < staging.address + staging.nbytes
        assert not staging.address <= elsewhere < staging.address + staging.nbytes
    own.close()
    staging.close()


def test_trial_state_repeats_its_values() -> None:
    numel = (1 << 16) * 2 + 1000
    state = TrialState(EXACT_ADAMW, numel)
    master = np.frombuffer(held(state, "master", 4 * numel)[1], np.float32)
    gradient = np.frombuffer(held(state, "gradient", 2 * numel)[1], np.uint16)
    assert (master[: 1 << 16] == master[1 << 16 : 2 << 16]).all()
    assert (master[-1000:] == master[:1000]).all()
    assert (gradient[-1000:] != 0).any()
    state.close()


@pytest.mark.parametrize("paths", [0, 1, 2])
def test_steps_of_a_small_plan_show_what_a_visit_costs(paths: int, tmp_path: Path) -> None:
    """What they write is the session's to overwrite, and what is known of bytes stays as it is."""
    queue, known = CompletionQueue(), Rates(10e9, (PathRates(1e9, 2e9, at_once=3),) * paths)
    with contextlib.ExitStack() as ends:
        tiers = []
        for number in range(paths):
            (tmp_path / str(number)).mkdir()
            tiers.append(open_tier(str(tmp_path / str(number)), uuid.uuid4(), queue))
            ends.callback(tiers[-1].close)
        kernel = ends.enter_context(CpuUpdateKernel(queue, 1))
        found = trial_rates(kernel, tiers, queue, known)
        assert found.operation_s > 0
        assert found.begin_s >= 0
        assert found.reaction_s >= 0
        assert found.cpu_bytes_per_s == known.cpu_bytes_per_s
        assert [path.read for path in found.paths] == [path.read for path in known.paths]
        assert not queue.wait(0.0), "something is still under way"
    layout = build_layout([Parameter("p", 40 << 10, DtypeCode.BFLOAT16, 0)], 1 << 10)
    offers = tuple(PathBudget(str(number), 1 << 40) for number in range(paths))
    plan = make_plan(layout, Budgets(0 if paths else layout.state_bytes, None, offers))
    assert predict(plan, found).step_s > predict(plan, known).step_s


def test_no_step_is_tried_where_a_path_has_no_room_for_it(tmp_path: Path) -> None:
    queue, known = CompletionQueue(), Rates(10e9, (PathRates(1e9, 2e9),))
    tier = open_tier(
        str(tmp_path), uuid.uuid4(), queue, options=StoreOptions(max_bytes=16 << 10, extent_bytes=16 << 10)
    )
    with contextlib.closing(tier), CpuUpdateKernel(queue, 1) as kernel:
        assert trial_rates(kernel, [tier], queue, known) == known


def test_lanes_are_waited_for_when_a_trial_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they work on is given back after that, never under them."""
    queue = CompletionQueue()
    executors: list[LiveExecutor] = []
    in_flight: list[int] = []
    wait, close = LiveExecutor.wait, Arena.close

    def interrupted(self: LiveExecutor) -> list[Event]:
        if self._in_flight and not executors:
            executors.append(self)
            raise KeyboardInterrupt
        return wait(self)

    def noted(self: Arena) -> None:
        in_flight.extend(len(executor._in_flight) for executor in executors)
        close(self)

    tier = open_tier(str(tmp_path), uuid.uuid4(), queue)
    with contextlib.closing(tier), CpuUpdateKernel(queue, 1) as kernel, monkeypatch.context() as patch:
        patch.setattr(LiveExecutor, "wait", interrupted)
        patch.setattr(Arena, "close", noted)
        with pytest.raises(KeyboardInterrupt):
            trial_rates(kernel, [tier], queue, Rates(10e9, (PathRates(1e9, 2e9),)))
    assert in_flight
    assert not any(in_flight)


def test_the_steps_that_are_tried_are_like_the_session_s(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = build_layout([Parameter("p", 40 << 12, DtypeCode.BFLOAT16, 0)], 1 << 12)
    size, paths = layout.max_subgroup_bytes, (PathBudget("path", 1 << 40),)
    made: list[Plan] = []
    monkeypatch.setattr(trial, "make_plan", lambda *what: made.append(make_plan(*what)) or made[-1])
    full, known = SimpleNamespace(paid=False, free_bytes=lambda: -1), Rates(10e9, (PathRates(1e9, 2e9),))
    for at_home, slots in ((0, 2), (30, 3), (40, 8)):
        plan = make_plan(layout, Budgets(at_home * size, slots * size, paths))
        assert trial_rates(None, [full], None, known, plan) is known  # type: ignore[arg-type, list-item]
        small = made.pop()
        assert len(small.homes) == trial.SUBGROUPS
        assert small.homes.count(Home.HOST) == round(trial.SUBGROUPS * at_home / 40)
        assert small.staging_slots == min(plan.staging_slots, trial.SLOTS)


def test_a_path_is_probed_with_tiles_of_the_session_where_no_state_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state moves when it is parked."""
    layout = build_layout([Parameter("p", 80 << 10, DtypeCode.BFLOAT16, 0)], 40 << 10)
    plan = make_plan(layout, Budgets(layout.state_bytes, None, (PathBudget(str(tmp_path), 1 << 30),)))
    assert plan.staging_bytes == 0
    sizes: list[int] = []

    class Slots(workbench.Slots):
        def load(self, *arguments: Any) -> Any:
            sizes.append(self.tile_bytes)
            return super().load(*arguments)

    monkeypatch.setattr(probe, "Slots", Slots)
    queue = CompletionQueue()
    with (
        contextlib.closing(open_tier(str(tmp_path), uuid.uuid4(), queue)) as tier,
        CpuUpdateKernel(queue, 1) as kernel,
    ):
        quick_probe(kernel, [tier], queue, 0, plan)
    assert sizes[0] == plan.largest_tile_bytes > 4096
