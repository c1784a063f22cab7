"""Updates during the backward pass by the CPU, with weights on a GPU, which gradients leave or on which they stay.

On the simulated device, on the test accelerator, and on real ones with `-m gpu`.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import CUDA, LATE_FULL
from settling import settle
from test_gpu_training import Given, Place, drawn
from test_overlap_backward import (
    LOOSE,
    Barrier,
    Training,
    accumulated,
    another_rate,
    auto_changes,
    changes,
    clipped,
    dropped,
    dropped_behind_its_back,
    fp32_weights_written_past_counters,
    plain,
    run,
    run_as_fed,
    saved,
    signs_flipped_everywhere,
    state_read,
    torch_clips_nothing,
    weights_written,
)
from test_overlap_forward import assert_same, everything
from world import SimulatedDevice

from offload import waits
from offload.device.lanes import GpuLanes
from offload.errors import OffloadError, StepAbortedError
from offload.gradients import gpu as gpu_gradients
from offload.optim import hiding
from offload.plan import Home, Placement, Plan
from offload.predict import predict
from offload.predict.predict import with_backward_s
from offload.protocols import WAKE, DeviceLane

pytestmark = pytest.mark.not_overlapped("steps go on where the tests say so")

SIZES = ((70, 80), (17,), (6000,), (128, 64), (), (100, 100), (4096,), (3, 5), (90, 90))
EACH = 3
"""Weights of one module."""

SMALL_BUCKETS = {"bucket_bytes": 15_000, "bucket_count": 3}
"""Gradients leave while backward goes on, some alone and some together."""

PLACINGS: dict[str, dict[str, Any]] = {
    "nothing resident": {"host_memory": 0, "gpu_memory": 0, "placement": "cpu"},
    "part of the visits": {"host_memory": 0, "gpu_memory": 0, "placement": 0.4},
    "part at home": {"host_memory": 100_000, "gpu_memory": 100_000, "placement": 0.4},
}


@pytest.fixture(params=["simulated", LATE_FULL[0], CUDA[0]], name="place")
def _place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param)


class OnGpu(Training):
    """A model on a GPU whose gradients are given, and its optimizer."""

    def __init__(
        self,
        folder: Path,
        place: Place,
        overlap: str,
        dtype: torch.dtype = torch.bfloat16,
        kept: list[Any] | None = None,
        **options: Any,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.place, self.overlap = folder, place, overlap
        place.limits = SMALL_BUCKETS
        weights = [torch.nn.Parameter(tensor.to(place.device, dtype)) for tensor in drawn(0, SIZES)]
        for weight in weights if kept is not None else ():
            weight.register_post_accumulate_grad_hook(lambda weight: kept.append(weight.grad))
        self.model = torch.nn.ModuleList(Given(weights[at : at + EACH]) for at in range(0, len(weights), EACH))
        defaults = {"subgroup_numel": 4096, "threads": 1, "checkpoints_kept": 1, "keep_grads": False}
        options = {**defaults, **PLACINGS["nothing resident"], "paths": [folder], "overlap": overlap, **options}
        self.optimizer = place.optimizer([*self.model.parameters()], **options)
        self.counts: Counter[str] = Counter()
        self.seed = 0
        self.follow = False
        self.kind = ""

    def loss(self, factor: float = 1.0) -> torch.Tensor:
        self.seed += 1
        given = [(factor * tensor).to(self.place.device) for tensor in drawn(1000 + self.seed, SIZES)]
        return sum(module(*given[EACH * n : EACH * (n + 1)]) for n, module in enumerate(self.model))

    def backward(self, factor: float = 1.0) -> None:
        self.loss(factor).backward()
        if self.seed % 2:
            self.settle()

    def settle(self) -> None:
        if self.optimizer._holder.engine_if_open is not None:
            settle(self.optimizer.engine)

    def step(self) -> None:
        self.settle()
        self.optimizer.step()
        before = self.counts["revoked"]
        self.count()
        self.counts[f"revoked by {self.kind}"] += self.counts["revoked"] - before

    def able_bytes(self) -> int:
        """Return the streamed bytes, which the CPU updates ahead."""
        return self.optimizer.engine.plan.home_bytes[Home.STREAMED]


def not_finite(training: OnGpu, rng: random.Random) -> None:
    """As after any step that is skipped, the gradients are dropped; then there is a step."""
    training.backward(rng.choice([float("nan"), float("inf")]))
    assert not torch.isfinite(training.optimizer.clip_grad_norm_(1.0))
    training.optimizer.zero_grad()
    training.backward()


def given_more(training: OnGpu, rng: random.Random) -> None:
    """A gradient that somebody puts into `.grad` when that of the pass has left is added to it."""
    training.backward()
    parameter = rng.choice([*training.model.parameters()])
    parameter.grad = torch.full_like(parameter, 0.125)


def added_to(training: OnGpu, rng: random.Random) -> None:
    """A pass that nobody announced, all of which is there when the step begins: the norm has waited for it."""
    training.backward()
    training.backward()
    training.optimizer.clip_grad_norm_(LOOSE)


def masters_read_again(training: OnGpu, rng: random.Random) -> None:
    training.backward()
    training.optimizer.refresh_masters()


def moved(training: OnGpu, rng: random.Random) -> None:
    training.backward()
    parameter = rng.choice([*training.model.parameters()])
    parameter.data = parameter.data.clone()


REVOKING = [
    clipped,
    accumulated,
    another_rate,
    weights_written,
    dropped,
    dropped_behind_its_back,
    state_read,
    saved,
    not_finite,
    given_more,
    added_to,
    masters_read_again,
    moved,
]


def assert_says_something(found: list[torch.Tensor]) -> None:
    """Check that state that is compared is that of a training that goes on."""
    assert sum(int(tensor.isfinite().sum()) for tensor in found) > 0.99 * sum(tensor.numel() for tensor in found)


def named(kind: Any) -> Any:
    """Return a kind of step that says which it is."""

    def call(training: OnGpu, rng: random.Random) -> None:
        training.kind = kind.__name__
        kind(training, rng)
        training.optimizer.finish()

    call.__name__ = kind.__name__
    return call


def test_all_is_confirmed_where_gradients_stay_and_nothing_changes(place: Place, tmp_path: Path) -> None:
    """Also where torch clips, by 1; and nothing is where each gradient changes."""
    options = PLACINGS["part of the visits"] | {"keep_grads": True}
    training = OnGpu(tmp_path / "run", place, "backward", **options)
    with training.optimizer as optimizer:
        for kind in (*6 * [plain], torch_clips_nothing, signs_flipped_everywhere):
            before = training.counts["confirmed"]
            kind(training, random.Random(0))
            training.step()
            optimizer.zero_grad()
            confirms = optimizer.engine.step_number > 1 and kind is not signs_flipped_everywhere
            assert training.counts["confirmed"] == before + confirms * training.able_bytes()
        assert training.counts["revoked"] == training.able_bytes() > 0


def test_gradients_that_stay_are_let_go_of(place: Place, tmp_path: Path) -> None:
    """When they are dropped before a step, and when it has been taken."""
    training = OnGpu(tmp_path / "run", place, "backward", keep_grads=True)
    with training.optimizer as optimizer:
        for drops in (False, False, True, False):
            training.backward()
            training.settle()
            gradients = [weakref.ref(parameter.grad) for parameter in training.model.parameters()]
            assert all(gradient() is not None for gradient in gradients)
            if not drops:
                training.step()
            optimizer.zero_grad()
            assert not any(gradient() is not None for gradient in gradients)


@pytest.mark.parametrize(
    ("dtype", "keeps"),
    [
        (torch.bfloat16, False),
        pytest.param(torch.float32, False, marks=pytest.mark.full),
        (torch.float32, True),
    ],
)
def test_what_revokes(place: Place, tmp_path: Path, dtype: torch.dtype, keeps: bool) -> None:
    """Each kind of change that can come between an update and the step."""
    found = {}
    kinds: list[Any] = [*REVOKING]
    if dtype is torch.float32:  # a weight is its master, which lies on the GPU, and to which the caller may write
        kinds[kinds.index(masters_read_again)] = fp32_weights_written_past_counters
    for overlap in ("off", "backward"):
        training = OnGpu(tmp_path / overlap, place, overlap, dtype, keep_grads=keeps)
        with training.optimizer as optimizer:
            for kind in kinds:
                for each in (plain, plain, plain, kind):
                    training.seed += training.seed % 2  # so that the next pass is waited for
                    named(each)(training, random.Random(0))
                    training.step()
                    optimizer.zero_grad()
            optimizer.wait_checkpoint()
            found[overlap] = everything(optimizer, training.model)
    assert_says_something(found["off"])
    assert_same(found["off"], found["backward"])
    assert training.counts["revoked by plain"] == 0
    for kind in kinds:
        assert training.counts[f"revoked by {kind.__name__}"] > 0, kind.__name__


def test_all_is_confirmed_where_nothing_changes(place: Place, tmp_path: Path) -> None:
    training = OnGpu(tmp_path / "run", place, "backward", **PLACINGS["part of the visits"])
    with training.optimizer as optimizer:
        for _ in range(8):
            plain(training, random.Random(0))
            training.step()
            optimizer.zero_grad()
        found = optimizer.metrics()
        assert {*optimizer.plan.plan.placements} == {*Placement}
        assert 0 < training.able_bytes() == optimizer.plan.plan.state_bytes
        assert found["speculation/confirmed_bytes"] == training.able_bytes()
        assert training.counts["confirmed"] == 7 * training.able_bytes()  # all but the first
        assert training.counts["revoked"] == 0
        assert "the step is hidden in backward" in str(optimizer.plan)


def test_updates_are_made_while_backward_goes_on(place: Place, tmp_path: Path) -> None:
    training, made = OnGpu(tmp_path / "run", place, "backward"), []
    with training.optimizer as optimizer:
        machine = optimizer.engine._parts.machine

        def wait() -> None:
            until_s = time.monotonic() + 20
            while not machine.speculative_versions and time.monotonic() < until_s:
                time.sleep(0.001)
            made.append(len(machine.speculative_versions))

        for _ in range(3):
            plain(training, random.Random(0))
            training.step()
            optimizer.zero_grad()
        given = [tensor.to(place.device) for tensor in drawn(0, SIZES)]
        first, *others = training.model.parameters()
        late = (Barrier.apply(first, wait) * given[0]).float().sum()
        early = [(weight * gradient).float().sum() for weight, gradient in zip(others, given[1:], strict=True)]
        torch.stack([late, *early]).sum().backward()
        assert made[0] > 0
        training.step()
        assert optimizer.metrics()["speculation/confirmed_bytes"] == training.able_bytes()


def test_passes_are_as_many_as_the_caller_says(place: Place, tmp_path: Path) -> None:
    """However many there are; gradients of further passes are added in host memory before an update reads them."""
    found, last = [], [False]
    for overlap in ("off", "backward"):
        training = OnGpu(tmp_path / overlap, place, overlap)
        with training.optimizer as optimizer:
            optimizer.last_micro_step(lambda: last[0])
            for passes in (2, 3, 2, 4, 2):
                for number in range(passes):
                    last[0] = number == passes - 1
                    training.backward()
                training.step()
                optimizer.zero_grad()
                if overlap == "backward" and optimizer.engine.step_number > 1:
                    assert optimizer.metrics()["speculation/confirmed_bytes"] == training.able_bytes()
            optimizer.last_micro_step(None)  # then as many as before the last step
            for _ in range(3):
                training.backward()
                training.backward()
                training.step()
                optimizer.zero_grad()
                if overlap == "backward":
                    assert optimizer.metrics()["speculation/confirmed_bytes"] == training.able_bytes()
            found.append(everything(optimizer, training.model))
    assert_same(*found)


def span(tensor: torch.Tensor) -> tuple[int, int, bool]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, False


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("follow", [True, False])
def test_new_weights_come_behind_whoever_reads_the_old_ones(tmp_path: Path, follow: bool, lazy: bool) -> None:
    """Forward and backward are work on the caller's lane, which may be done long after it was asked for."""
    found: dict[str, list[Any]] = {"off": [], "backward": []}
    for overlap, seen in found.items():
        kept: list[Any] = []  # a GPU's allocator gives memory to others in the order of the caller's lane
        device = SimulatedDevice(1 << 28, lazy=lazy, delay_s=0 if lazy else 2e-4, caller_is_host=False)
        training = OnGpu(tmp_path / overlap, Place("simulated", device), overlap, kept=kept)
        weights = [*training.model.parameters()]

        def read(into: list[Any], weights: list[Any] = weights, device: SimulatedDevice = device) -> None:
            for weight in weights:
                device.caller_work("reads", lambda w=weight: into.append(w.detach().clone()), [span(weight)])

        with training.optimizer as optimizer:
            if follow:
                optimizer.overlap_forward(training.model)
            for step in range(8):
                loss = training.loss()  # its hooks wait for weights
                read(seen)
                loss.backward()
                read(seen)
                training.settle()
                if step == 6:  # which ends what is ahead
                    optimizer.state_dict()
                read(seen)
                optimizer.clip_grad_norm_(1e-2 if step == 4 else LOOSE)
                optimizer.step()
                training.count()
                optimizer.zero_grad()
            optimizer.finish()
            device.mark(DeviceLane.CALLER, timed=False).wait()
            seen += everything(optimizer, training.model)
    assert_same(found["off"], found["backward"])
    assert training.counts["confirmed"] > 0
    assert training.counts["revoked"] > 0


@pytest.mark.parametrize("again", [False, True])
def test_float32_weights_that_move_are_kept_until_no_lane_reads_them(tmp_path: Path, again: bool) -> None:
    """Those that the pass began with, which are copied to their images: also where others have been bound since."""
    device = SimulatedDevice(1 << 28, delay_s=1e-3)
    training = OnGpu(tmp_path / "run", Place("simulated", device), "backward", torch.float32, keep_grads=True)
    with training.optimizer as optimizer:
        for _ in range(3):
            plain(training, random.Random(0))
            training.step()
            optimizer.zero_grad()
        gradients = optimizer.engine._parts.gradients
        bring, has_landed, may_land = gradients.fetch_final, gradients.has_landed, threading.Event()
        gradients.has_landed = lambda segments: may_land.is_set() and has_landed(segments)
        weights = [*training.model.parameters()]
        began = [weakref.ref(weight.untyped_storage()) for weight in weights]
        spans = [(weight.data_ptr(), weight.data_ptr() + weight.nbytes) for weight in weights]
        brought: list[Any] = []

        def bring_and_look(final: Any, subgroup: Any, masters: Any) -> None:
            brought.extend(masters.tolist())
            bring(final, subgroup, masters)
            reads = gradients.final_read
            plain_wait = reads.wait
            reads.wait = lambda: (seen.append([storage() is not None for storage in began]), plain_wait())

        seen: list[Any] = []
        gradients.fetch_final = bring_and_look
        training.loss().backward()
        for weight in weights:
            weight.data = weight.data.clone()
        if again:
            optimizer.clip_grad_norm_(LOOSE)  # binds them
            for weight in weights:
                weight.data = weight.data.clone()
        may_land.set()
        while not brought:
            optimizer.engine._parts.queue.post(WAKE)
            time.sleep(0.001)
        optimizer.step()
        assert brought
        assert all(any(start <= at < end for start, end in spans) for at, _, _ in brought)
        assert seen
        assert all(map(all, seen))


def test_a_session_that_is_opened_after_backward(tmp_path: Path) -> None:
    """With state at home on the GPU as there is room, and none for all of it."""
    found = []
    for overlap in ("off", "backward"):
        place = Place("simulated", SimulatedDevice(400_000, delay_s=1e-4))
        training = OnGpu(tmp_path / overlap, place, overlap, gpu_memory="auto", placement=0.3)
        found.append(run(training, 12, 1, [named(kind) for kind in REVOKING]))
    assert_says_something(found[0])
    assert_same(*found)
    assert 0 < training.optimizer.engine.plan.home_bytes[Home.GPU] < training.optimizer.engine.plan.state_bytes
    assert training.counts["confirmed"] > 0


@pytest.mark.parametrize(("follow", "keeps"), [(False, True), (True, False)])
def test_auto_does_what_times_say(
    place: Place, tmp_path: Path, follow: bool, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it tries, and takes up again: all bits are those of "off"."""
    found = []
    for overlap in ("off", "auto"):
        training = OnGpu(tmp_path / overlap, place, overlap, keep_grads=keeps)
        training.follow = follow
        state, speculates = run_as_fed(training, monkeypatch)
        found.append(state)
        assert changes(speculates) == (auto_changes(follow) if overlap == "auto" else [])
    assert training.counts["confirmed"] > 0
    assert_same(*found)


@pytest.mark.parametrize("placing", PLACINGS)
def test_what_is_predicted(place: Place, tmp_path: Path, placing: str) -> None:
    """Forward and backward by themselves at least, less than with the whole step behind them, and more with less."""
    training = OnGpu(tmp_path / "run", place, "backward", **PLACINGS[placing])
    with training.optimizer as optimizer:
        plan = optimizer.engine.plan
        made = predict(plan, optimizer.engine.rates)
        for follows in (False, True):
            rates = optimizer.engine.rates
            short_s, long_s = (
                with_backward_s(made, plan, rates, seconds, seconds, follows=follows)
                for seconds in (0.0, 100 * made.step_s)
            )
            assert 0 < short_s < 2.5 * made.step_s  # all streamed state is moved, what staging slots hold, too
            assert 200 * made.step_s <= long_s <= 201 * made.step_s
            if not follows and training.able_bytes() < plan.state_bytes:
                assert long_s > 200 * made.step_s


def weights_of(training: OnGpu) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in training.model.parameters()]


def refuse(*args: Any) -> Any:
    raise OffloadError("the device has failed")


def trained(tmp_path: Path, passes: int = 1, overlap: str = "backward", steps: int = 4, **options: Any) -> OnGpu:
    """Return a training some steps of which have been made ahead."""
    place = Place("simulated", SimulatedDevice(1 << 28, delay_s=1e-4))
    training = OnGpu(tmp_path / "run", place, overlap, **options)
    for _ in range(steps):
        for _ in range(passes):
            training.backward()
        training.step()
        training.optimizer.zero_grad()
    assert training.counts["confirmed"] > 0
    return training


def closed(optimizer: Any) -> None:
    """Close in a thread, so that one that waits for good fails."""

    def close() -> None:
        with contextlib.suppress(OffloadError):
            optimizer.close()

    ends = threading.Thread(target=close, daemon=True)
    ends.start()
    ends.join(30)
    assert not ends.is_alive()


@pytest.mark.parametrize("awaited", [False, True])
def test_an_addition_that_fails_ends_the_step_before_anything_is_confirmed(
    tmp_path: Path, awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward goes on, also where it waits for that addition's buffer."""
    training = trained(tmp_path, passes=2)
    before = weights_of(training)
    plain, waited_for = waits.wait_for, threading.Event()

    def wait(arrived: Any, what: Any, *timeout_s: Any) -> bool:
        if "to be added in host memory" in what():
            waited_for.set()
        return plain(arrived, what, *timeout_s)

    monkeypatch.setattr(waits, "wait_for", wait)
    kernel = training.optimizer.engine._parts.kernel
    kernel.add = lambda *rows: (waited_for.wait(30 if awaited else 0), refuse())
    training.backward()
    training.backward()
    with pytest.raises(StepAbortedError, match="Nothing had been updated"):
        training.step()
    assert_same(before, weights_of(training))
    closed(training.optimizer)


def test_a_device_that_fails_behind_a_confirmation_leaves_a_step_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trained(tmp_path)
    training.backward()
    training.settle()
    send, count = GpuLanes.send_weights, iter(range(100))
    monkeypatch.setattr(GpuLanes, "send_weights", lambda *args: (send if next(count) < 3 else refuse)(*args))
    with pytest.raises(StepAbortedError, match=r"subgroups had been updated") as told:
        training.optimizer.step()
    assert len(told.value.moved) > 3
    closed(training.optimizer)


def test_a_device_that_fails_ahead_of_a_step_aborts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = trained(tmp_path)
    before = weights_of(training)
    monkeypatch.setattr(gpu_gradients.Departure, "landed", refuse)
    with pytest.raises(StepAbortedError, match="Nothing had been updated"):  # noqa: PT012  whatever is called next
        training.loss().backward()
        training.settle()  # a step that comes before the session has looked would make everything itself
        training.optimizer.step()
    assert_same(before, weights_of(training))
    closed(training.optimizer)


def exchanged(plan: Plan) -> Plan:
    """Return a plan in which the GPU updates what the CPU has updated, and the other way round."""
    other = {Placement.CPU: Placement.GPU, Placement.GPU: Placement.CPU}
    return replace(plan, placements=tuple(other[placement] for placement in plan.placements))


def test_a_device_that_fails_where_images_are_taken_anew_does_not_keep_a_session_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hiding, "MOST_TRIAL", hiding.TRIAL)  # however short iterations are
    training = trained(tmp_path, overlap="auto", steps=11, placement=0.4)
    engine = training.optimizer.engine
    training.loss().backward()
    training.settle()
    engine._parts.plan = exchanged(engine.plan)
    monkeypatch.setattr(GpuLanes, "wait", refuse)
    closed(training.optimizer)
    assert not engine.speculates


def test_memory_for_new_weights_is_that_of_the_plan_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the GPU has taken over updates of subgroups that had images, and given up those of others."""
    monkeypatch.setattr(hiding, "MOST_TRIAL", hiding.TRIAL)
    training = trained(tmp_path, overlap="auto", steps=11, placement=0.4)
    engine, parts = training.optimizer.engine, training.optimizer.engine._parts
    plan = engine.plan

    def image_bytes(plan: Plan) -> int:
        return sum(subgroup.weight_bytes for subgroup in plan.updated_in_backward)

    assert image_bytes(plan) in [arena.nbytes for arena in parts.memory.arenas]
    training.loss().backward()
    training.settle()
    parts.plan = exchanged(plan)
    assert image_bytes(parts.plan) != image_bytes(plan)
    engine.state.read([0])  # what was made is revoked, and made again
    assert image_bytes(parts.plan) in [arena.nbytes for arena in parts.memory.arenas]
    parts.plan = plan
    training.optimizer.close()
