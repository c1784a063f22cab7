"""Placement "auto" follows what steps show: which device updates what changes between two steps, and no bit does."""

from __future__ import annotations

import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from simulated import OnDevice, hung_commit
from test_simulated_gpu import backward, on_cpu, same, states, train, weights
from world import SimulatedDevice

import offload
from offload.errors import OffloadError
from offload.measure import HISTORY
from offload.plan import GpuRates, PathRates, Placement, Plan, Rates, choose_plan
from offload.session import parts, placement_review, visits

FIRST = HISTORY + 1
"""The step before which placement is chosen again: as many have been observed by then as a rate is the median of."""

MIX = Rates(1e9, (), GpuRates(1e11, 4e9, 4e9))
MOSTLY_CPU = Rates(1e9, (), GpuRates(1e11, 5e7, 5e7))
GPU = Rates(1e6, (), GpuRates(1e12, 1e12, 1e12))
CPU = Rates(1e12, (), GpuRates(1e6, 1e6, 1e6))


def config(**changes: Any) -> offload.OffloadConfig:
    chosen = {"gpu_memory": 0, "subgroup_numel": 1024, "threads": 1}
    return offload.OffloadConfig(**{**chosen, **changes})


def made(monkeypatch: pytest.MonkeyPatch, probed: Rates, shown: Any) -> None:
    """Let the probe find some rates, and each step show others: rates, or a function of how many it has shown."""
    count = iter(range(10**6))

    def observe(known: Rates, timeline: Any) -> Rates:
        found = shown(next(count)) if callable(shown) else shown
        return replace(found, paths=known.paths)

    def probe(kernel: Any, tiers: Any, *arguments: Any, **how: Any) -> Rates:
        return replace(probed, paths=(PathRates(1e13, 1e13),) * len(tiers))

    monkeypatch.setattr(parts, "quick_probe", probe)
    monkeypatch.setattr(visits, "observe", observe)


def choice(plan: Plan, rates: Rates) -> tuple[Placement, ...]:
    known = replace(rates, paths=(PathRates(1e13, 1e13),) * len(plan.budgets.paths))
    return choose_plan(plan.layout, plan.budgets, known, kept=plan).placements


@pytest.mark.parametrize(
    ("probed", "right", "keep_grads", "streams"),
    [
        (GPU, MIX, False, False),
        (GPU, MIX, True, True),
        (CPU, MIX, False, True),
        (GPU, CPU, False, False),
        (CPU, GPU, True, False),
        (GPU, MOSTLY_CPU, False, True),
    ],
)
def test_the_second_choice_is_that_of_the_right_rates(
    probed: Rates, right: Rates, keep_grads: bool, streams: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(monkeypatch, probed, right)
    device, parameters = SimulatedDevice(lazy=True), weights()
    folders = {"paths": [tmp_path], "host_memory": 40_000} if streams else {}
    with OnDevice(parameters, device=device, offload=config(keep_grads=keep_grads, **folders)) as optimizer:
        seen = []
        for step in range(FIRST + 1):
            train(optimizer, parameters, range(step, step + 1))
            seen.append(optimizer.engine.plan)
        first, last = seen[0], seen[-1]
        # Gradients that leave during backward are in slots of the old choice until the step has ended.
        changed = FIRST - 1
        assert [plan.placements for plan in seen[:changed]] == [first.placements] * changed
        assert last.placements == choice(first, right) != first.placements
        assert seen[changed].placements == last.placements
        assert (last.homes, last.staging_slots, last.layout) == (first.homes, first.staging_slots, first.layout)
        gradients = optimizer.engine._parts.gradients
        for number, places in enumerate(last.layout.places):
            if any(not last.updates_on_gpu(subgroup) for subgroup, _ in places):
                assert gradients.slot(number).numel() == parameters[number].numel()
        assert last.budgets.gradient_bytes == gradients.used_bytes(last)
        assert same(states(optimizer, parameters), on_cpu(range(FIRST + 1)))
    assert not device.pinned


def test_the_rates_of_a_device_are_learnt_and_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but what the lanes really did: a device a thousand times slower than it seemed."""
    monkeypatch.setattr(sys.modules["offload.measure.observe"], "LEAST_BYTES", 1)
    monkeypatch.setattr(parts, "quick_probe", lambda *arguments, **how: GPU)
    device, parameters = SimulatedDevice(bytes_per_s=5e5), weights()
    with OnDevice(parameters, device=device, offload=config()) as optimizer:
        train(optimizer, parameters, range(1))
        assert Placement.CPU not in optimizer.engine.plan.placements
        train(optimizer, parameters, range(1, FIRST + 1))
        assert optimizer.engine.plan.placements.count(Placement.CPU) > len(optimizer.engine.plan.placements) // 2
        assert same(states(optimizer, parameters), on_cpu(range(FIRST + 1)))


@pytest.mark.parametrize("placement", ["cpu", "gpu", 0.5])
def test_what_the_user_has_chosen_stays(placement: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, MIX, lambda count: (CPU, GPU)[count % 2])
    parameters = weights()
    with OnDevice(parameters, device=SimulatedDevice(lazy=True), offload=config(placement=placement)) as optimizer:
        before = optimizer.engine.plan.placements
        train(optimizer, parameters, range(3 * FIRST))
        assert optimizer.engine.plan.placements == before


def test_rates_that_swing_do_not_swing_the_placement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made(monkeypatch, CPU, lambda count: (GPU, CPU)[count // 8 % 2])
    parameters = weights()
    with (
        caplog.at_level(logging.INFO, "offload"),
        OnDevice(parameters, device=SimulatedDevice(lazy=True), offload=config()) as optimizer,
    ):
        train(optimizer, parameters, range(100))
        assert same(states(optimizer, parameters), on_cpu(range(100)))
    said = [record for record in caplog.records if "from now on, and not" in record.message]
    assert 1 < len(said) <= placement_review.MOST_CHANGES


def test_a_choice_that_is_little_better_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    nearly = replace(MIX, cpu_bytes_per_s=MIX.cpu_bytes_per_s * 1.02)
    made(monkeypatch, MIX, nearly)
    parameters = weights()
    with OnDevice(parameters, device=SimulatedDevice(lazy=True), offload=config()) as optimizer:
        before = optimizer.engine.plan
        train(optimizer, parameters, range(FIRST + 2))
        assert optimizer.engine.plan is before


@pytest.mark.parametrize(
    ("probed", "right", "lacks", "keep_grads"),
    [(GPU, CPU, "available_bytes", False), (CPU, GPU, "usable_bytes", True)],
)
def test_without_memory_for_another_choice_the_old_one_stays(
    probed: Rates,
    right: Rates,
    lacks: str,
    keep_grads: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made(monkeypatch, probed, right)
    parameters = weights()
    with OnDevice(parameters, device=SimulatedDevice(lazy=True), offload=config(keep_grads=keep_grads)) as optimizer:
        before = optimizer.engine.plan
        asked = parts if hasattr(parts, lacks) else optimizer.engine._parts.lanes
        monkeypatch.setattr(asked, lacks, lambda *arguments: 1000)
        train(optimizer, parameters, range(5 * FIRST))
        assert optimizer.engine.plan is before
        monkeypatch.undo()
        assert same(states(optimizer, parameters), on_cpu(range(5 * FIRST)))
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "the GPU updates what it did before" in said.message


@pytest.mark.parametrize("keep_grads", [False, True])
def test_memory_that_runs_out_on_the_way_changes_nothing(keep_grads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, GPU, MIX)
    parameters = weights()
    with OnDevice(parameters, device=SimulatedDevice(lazy=True), offload=config(keep_grads=keep_grads)) as optimizer:
        before = optimizer.engine.plan

        def refuse(*arguments: Any, **options: Any) -> Any:
            raise OffloadError("no memory for an arena")

        monkeypatch.setattr(optimizer.engine._parts.memory, "allocate_arena", refuse)
        train(optimizer, parameters, range(FIRST + 2))
        monkeypatch.undo()
        assert optimizer.engine.plan is before
        assert same(states(optimizer, parameters), on_cpu(range(FIRST + 2)))


def test_gradient_memory_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, CPU, GPU)
    device, parameters = SimulatedDevice(lazy=True), weights()
    with OnDevice(parameters, device=device, offload=config(keep_grads=False)) as optimizer:
        train(optimizer, parameters, range(1))
        before = optimizer.engine.plan.budgets.gradient_bytes
        arenas = len(device.pinned)
        train(optimizer, parameters, range(1, FIRST + 1))
        assert optimizer.engine.plan.budgets.gradient_bytes == 0 < before
        assert len(device.pinned) == arenas - 1


def test_nothing_changes_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(monkeypatch, GPU, MIX)
    reached, go_on = hung_commit(monkeypatch)
    parameters = weights()
    with OnDevice(parameters, device=SimulatedDevice(lazy=True), offload=config()) as optimizer:
        train(optimizer, parameters, range(FIRST - 1))
        before = optimizer.engine.plan
        optimizer.save_checkpoint(tmp_path / "checkpoint")
        assert reached.wait(60)
        train(optimizer, parameters, range(FIRST - 1, FIRST + 1))
        assert optimizer.engine.plan is before
        go_on.set()
        optimizer.wait_checkpoint()
        train(optimizer, parameters, range(FIRST + 1, FIRST + 2))
        assert optimizer.engine.plan.placements == choice(before, MIX) != before.placements
        assert same(states(optimizer, parameters), on_cpu(range(FIRST + 2)))


@pytest.mark.slow
@settings(max_examples=15, phases=(Phase.generate,), suppress_health_check=list(HealthCheck), deadline=None)
@given(
    keep_grads=st.booleans(),
    streams=st.booleans(),
    gpu_memory=st.sampled_from([0, 30_000]),
    gradient_dtype=st.sampled_from(["parameter", "float32"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    passes=st.integers(1, 3),
    lazy=st.booleans(),
    drawn=st.lists(st.sampled_from([MIX, MOSTLY_CPU, GPU, CPU]), min_size=8, max_size=8),
    saves=st.sets(st.integers(0, 7)),
)
def test_bits_do_not_depend_on_when_and_how_often_placement_changes(
    keep_grads: bool,
    streams: bool,
    gpu_memory: int,
    gradient_dtype: str,
    dtype: torch.dtype,
    passes: int,
    lazy: bool,
    drawn: list[Rates],
    saves: set[int],
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        made(monkeypatch, drawn[0], lambda count: drawn[count % len(drawn)])
        monkeypatch.setattr(placement_review, "MOST_CHANGES", 100)
        monkeypatch.setattr(placement_review, "WORTH_A_CHANGE", -1.0)
        monkeypatch.setattr(visits, "typical", lambda seen: seen[-1])
        always = lambda self: setattr(self, "due", True)  # noqa: E731
        monkeypatch.setattr(placement_review.PlacementReview, "note_learnt_step", always)
        store = Path(folder) / "store"
        store.mkdir()
        folders = {"paths": [store], "host_memory": 40_000} if streams else {}
        chosen = config(keep_grads=keep_grads, gradient_dtype=gradient_dtype, gpu_memory=gpu_memory, **folders)

        def run(optimizer: Any, parameters: list[torch.nn.Parameter], steps: range) -> None:
            for step in steps:
                for number in range(passes):
                    backward(parameters, 10 * step + number)
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()

        parameters, twins = weights(dtype=dtype), weights(dtype=dtype)
        with offload.AdamW(twins, offload=offload.OffloadConfig(gradient_dtype=gradient_dtype)) as twin:
            run(twin, twins, range(8))
            expected = states(twin, twins)
        device = SimulatedDevice(lazy=lazy, delay_s=0.0 if lazy else 1e-4)
        with OnDevice(parameters, device=device, offload=chosen) as optimizer:
            for step in range(8):
                run(optimizer, parameters, range(step, step + 1))
                if step in saves:
                    optimizer.save_checkpoint(Path(folder) / f"checkpoint-{step}", copy=step % 2 == 0)
            assert same(states(optimizer, parameters), expected)
        if saves:
            last = max(saves)
            again = weights(seed=5, dtype=dtype)
            device = SimulatedDevice(lazy=lazy)
            with OnDevice(again, device=device, offload=chosen) as optimizer:
                optimizer.load_checkpoint(Path(folder) / f"checkpoint-{last}")
                run(optimizer, again, range(last + 1, 8))
                assert same(states(optimizer, again), expected)
