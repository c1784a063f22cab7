"""`Shard` and its copies from and to the test accelerator, which end as late as they may."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from accelerator import late
from world import SimulatedDevice

from offload import Engine, InfeasiblePlanError, OffloadConfig
from offload.gradients import gpu as gpu_gradients
from offload.integrations.deepspeed import gradients as gradients_module
from offload.integrations.deepspeed import shard as shard_module
from offload.integrations.deepspeed.gradients import Transfers, transit_bytes
from offload.integrations.deepspeed.pieces import Piece
from offload.integrations.deepspeed.shard import Shard
from offload.limits import Limits
from offload.plan import GpuRates, Rates
from offload.protocols import DeviceLane
from offload.rules import GroupScalars
from offload.session import parts, placement_review, state, state_copy, visits
from offload.units import format_bytes

PIECES = (Piece("a", 0, 0, 5, 0), Piece("b", 0, 5, 3, 0))
GROUPS = [GroupScalars(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, decoupled=True, maximize=False)]
GRADIENT = torch.tensor([1.0, -2.0, 3.0, -4.0, 5.0])


def make(dtype: torch.dtype = torch.bfloat16) -> tuple[Shard, torch.Tensor]:
    weights = torch.linspace(-1, 1, 8).to(dtype)
    return Shard(PIECES, [weights], OffloadConfig(host_memory="1MiB", threads=1)), weights


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shard]:
    """A shard whose gradients come from the test accelerator, on which nothing is done before somebody waits."""
    accelerator = SimpleNamespace(get_accelerator=lambda: torch.get_device_module("late"))
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", accelerator)
    shard, _ = make()
    stream = torch.accelerator.current_stream()
    late.dawdle(stream)
    yield shard
    late.dawdle(stream, False)
    shard.close()


def stepped(shard: Shard) -> Any:
    shard.step(GROUPS, 1.0)
    return shard.weights[0].tolist(), shard.read(0, "exp_avg", shard.pieces[0].numel).tolist()


READERS: dict[str, Callable[[Shard], Any]] = {
    "gradient": lambda shard: shard.gradient(0).tolist(),
    "lend_gradient": lambda shard: shard.lend_gradient(0).tolist(),
    "lend_sum": lambda shard: shard.lend_sum(0).tolist(),
    "norms": lambda shard: shard.norms(),
    "step": stepped,
}


@pytest.mark.late(shared=True)
@pytest.mark.parametrize("arrivals", [1, 3])
@pytest.mark.parametrize("reader", READERS)
def test_readers_wait_for_gradients(reader: str, arrivals: int, far: Shard) -> None:
    near, _ = make()
    found = []
    for shard, device in ((near, "cpu"), (far, "late")):
        for _ in range(arrivals):
            shard.accumulate(0, GRADIENT.to(device, torch.bfloat16), final=False)
        found.append(READERS[reader](shard))
    near.close()
    assert found[1] == found[0]
    if reader == "norms":
        assert found[1] == {"a": pytest.approx(arrivals * math.sqrt(55))}


@pytest.mark.late(shared=True)
def test_gradients_on_their_way_take_no_more_memory_than_allowed(far: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it the oldest is waited for; one alone may be larger."""
    monkeypatch.setattr(gradients_module, "IN_TRANSIT_BYTES", 12)
    transfers = Transfers()
    targets = [torch.zeros(5, dtype=torch.bfloat16) for _ in range(3)]
    for number, target in enumerate(targets):
        transfers.start(target, GRADIENT.to("late", torch.bfloat16) * (number + 1))
    assert [target.tolist() for target in targets[:2]] == [GRADIENT.tolist(), (2 * GRADIENT).tolist()]
    transfers.wait()
    assert targets[2].tolist() == (3 * GRADIENT).tolist()


@pytest.mark.parametrize("sums", [None, torch.float32])
def test_the_plan_counts_the_memory_of_gradients(sums: torch.dtype | None) -> None:
    """They lie in the engine's slots, in the type that they are summed in."""
    shard = on_device(0, torch.bfloat16, sums)
    plan, nbytes = shard.engine.plan, (4 if sums else 2) * (5008 + 3008)  # slots are aligned
    without = dataclasses.replace(plan, budgets=dataclasses.replace(plan.budgets, gradient_bytes=0))
    assert plan.budgets.gradient_bytes >= nbytes
    assert plan.host_bytes - without.host_bytes == plan.budgets.gradient_bytes
    assert f"{format_bytes(plan.budgets.gradient_bytes)}  gradients" in str(plan)
    shard.accumulate(0, drawn(5000, 0), final=False)
    slots = [shard.engine.gradients.slot(number) for number in (0, 1)]
    assert shard.gradient(0).data_ptr() == slots[0].data_ptr()
    assert {slot.dtype for slot in slots} == {sums or torch.bfloat16}
    shard.close()


def test_gradients_outlast_memory_that_is_given_back_between_steps() -> None:
    shard = on_device(0, torch.bfloat16, None)
    shard.accumulate(0, drawn(5000, 0).bfloat16(), final=True)
    before = shard.gradient(0).tolist()
    shard.forget_used_gradients()
    shard.engine.park(keep_host=True)
    assert shard.engine.is_parked
    assert shard.gradient(0).tolist() == before
    shard.accumulate(0, drawn(5000, 0).bfloat16(), final=True)
    assert not shard.engine.is_parked
    assert shard.gradient(0).tolist() == [2 * value for value in before]
    shard.close()


def test_a_gradient_that_is_not_there_takes_no_memory_while_that_is_given_back() -> None:
    numel = 1 << 23
    pieces = (Piece("there", 0, 0, 64, 0), Piece("missing", 0, 64, numel, 0))
    weights = [torch.zeros(numel + 64, dtype=torch.bfloat16)]
    with contextlib.closing(Shard(pieces, weights, OffloadConfig(host_memory="128MiB", threads=1))) as shard:
        shard.accumulate(0, torch.ones(64, dtype=torch.bfloat16), final=False)
        shard.step(GROUPS, 1.0)
        shard.close_window()
        shard.engine.park(keep_host=True)
        before = psutil.Process().memory_info().rss
        found = shard.gradient(1)
        assert psutil.Process().memory_info().rss - before < numel  # of 2 bytes each
        assert not found.view(torch.uint8).any()
        del found
        assert shard.engine.is_parked
        shard.accumulate(1, torch.ones(numel, dtype=torch.bfloat16), final=False)
        shard.close_window()
        shard.accumulate(0, torch.ones(64, dtype=torch.bfloat16), final=False)  # of another window
        assert not shard.gradient(1).any()


@pytest.mark.parametrize("far", [False, True])
def test_the_plan_counts_the_memory_that_gradients_pass_through(far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.zeros(8, dtype=torch.bfloat16)]
    config = OffloadConfig(host_memory="1MiB", threads=1)
    found = []
    for from_accelerator in (False, far):
        with contextlib.closing(Shard(PIECES, weights, config, from_accelerator=from_accelerator)) as shard:
            found.append(shard.engine.plan.host_bytes)
    assert found[1] - found[0] == far * 16
    assert transit_bytes([10, 6]) == 16
    monkeypatch.setattr(gradients_module, "IN_TRANSIT_BYTES", 5)
    assert transit_bytes([10, 6]) == 15


@pytest.mark.late(shared=True)
def test_an_overflow_that_is_on_its_way_is_seen(far: Shard) -> None:
    far.accumulate(0, torch.full((5,), math.inf, device="late"), final=True)
    assert not far.is_finite()


@pytest.mark.late(shared=True)
def test_what_is_thrown_away_does_not_arrive_later(far: Shard) -> None:
    far.accumulate(0, GRADIENT.to("late"), final=True)
    far.close_window()
    far.engine.gradients.slot(0).fill_(7)
    assert far.gradient(0).tolist() == [7] * 5


@pytest.mark.late(shared=True)
def test_the_source_may_change_when_the_copy_has_been_started(far: Shard) -> None:
    gradient = GRADIENT.to("late")
    far.accumulate(0, gradient, final=True)
    gradient.zero_()
    assert far.gradient(0).tolist() == GRADIENT.tolist()


def test_a_copy_of_the_state_lies_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file that is written to by system calls, else in memory; it says so where neither has room."""
    weights, pieces = torch.linspace(-1, 1, 8), (Piece("a", 0, 0, 5, 0), Piece("b", 0, 5, 1, 0))
    monkeypatch.setattr(shard_module, "Engine", partial(Engine, limits=Limits(large_copy_bytes=0)))
    shard = Shard(pieces, [weights], OffloadConfig(paths=[tmp_path], host_memory="1MiB", threads=1))
    in_file = shard.export()[0]
    assert [*in_file.tensors] == ["master", "exp_avg", "exp_avg_sq"]
    assert in_file.master.tolist() == [*weights[:6].tolist(), 0.0, 0.0]  # padding
    rooms: dict[str, int] = {}
    monkeypatch.setattr(state, "free_bytes_beside", lambda *session: rooms)
    in_memory = shard.export()[0]
    assert all(map(torch.equal, in_memory.tensors.values(), in_file.tensors.values()))
    monkeypatch.setattr(state_copy, "available_bytes", lambda: 0)
    with pytest.raises(InfeasiblePlanError, match="a copy of the state"):
        shard.export()
    shard.engine.close()


def test_reductions_in_fp32_are_added_to_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device they go to zeros there, which are then accumulated on the host; on the CPU to their slot."""
    pytest.importorskip("deepspeed")
    from offload.integrations.deepspeed.stage12 import OffloadedStage12

    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    for device in ("cpu", "meta"):
        optimizer = object.__new__(OffloadedStage12)
        optimizer.shard, _ = make(torch.float32)
        optimizer.dtype, optimizer.gradient_accumulation_dtype = torch.bfloat16, torch.float32
        optimizer.real_dp_process_group, optimizer.params_in_partition = [None], [[]]
        optimizer.parallel_partitioned_bit16_groups = [[torch.empty(8, dtype=torch.bfloat16, device=device)]]
        optimizer._numbers, optimizer._sums_by_parameter = {11: 0}, {}
        target = optimizer._get_compact_grad_partition_slice(0, 0, 11, 5)
        assert target is not None
        assert (target.device.type, target.dtype, target.numel()) == (device, torch.float32, 5)
        assert optimizer._get_compact_grad_partition_slice(0, 1, 11, 5) is None
        optimizer.shard.close()


@pytest.mark.gpu
def test_copies_of_a_gpu_are_waited_for() -> None:
    transfers = Transfers()
    source = torch.zeros(1 << 24, device="cuda")
    target = torch.zeros(1 << 24)
    torch.cuda.synchronize()
    for value in (1.0, 2.0):
        torch.cuda._sleep(100_000_000)  # else it might have ended anyway
        source.fill_(value)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            transfers.start(target, source)
        transfers.wait()
        assert bool((target == value).all())


# With weights on a GPU

PLACEMENTS: list[Any] = ["cpu", "gpu", 0.5]
DEVICES = {"late": {"lazy": True}, "threads": {"delay_s": 0.001}}


def on_device(placement: Any, dtype: torch.dtype, sums: torch.dtype | None, **how: Any) -> Shard:
    """Return a shard of several subgroups, one of whose pieces lies in two, over a simulated GPU."""
    weights = torch.linspace(-1, 1, 8192).to(dtype)
    pieces = (Piece("a", 0, 0, 5000, 0), Piece("b", 0, 5000, 3000, 0), Piece("c", 0, 8000, 0, 0))
    config = OffloadConfig(host_memory="1MiB", threads=1, subgroup_numel=2048, placement=placement)
    device = SimulatedDevice(**how) if how else None
    if device is None:
        config = OffloadConfig(host_memory="1MiB", threads=1, subgroup_numel=2048)
    return Shard(pieces, [weights], config, device, sums)


def drawn(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def random_life(shard: Shard, seed: int, dtype: torch.dtype) -> list[Any]:
    """Do with a shard whatever DeepSpeed and its users may do, in any order."""
    chosen, found = random.Random(seed), []
    for _ in range(5):
        for _ in range(chosen.randint(1, 6)):
            number, act = chosen.randint(0, 1), chosen.random()
            numel = shard.pieces[number].numel
            values = drawn(numel, chosen.randint(0, 999)).to(dtype)
            wanted = chosen.choice([None, numel, numel - 8, numel + 8 * number])  # nothing but padding is behind b
            if act < 0.6:
                buffer = values.clone()
                shard.accumulate(number, buffer, final=chosen.random() < 0.3)
                buffer.fill_(math.nan)
            elif act < 0.7:
                shard.lend_gradient(number)[:numel] = values
                shard.note_changed(number)
            elif act < 0.8:
                found.append(shard.lend_gradient(number, wanted).float().tolist())
            elif act < 0.9:
                found += [shard.norms(), shard.is_finite()]
            elif number in shard.active:
                found.append(shard.gradient(number, wanted).float().tolist())
        found += [shard.norms(), shard.active]
        if chosen.random() < 0.8:
            shard.step(GROUPS, chosen.choice([1.0, 0.25]))
        if chosen.random() < 0.15 and dtype == torch.bfloat16:
            shard.weights[0][:100] = 1.0
            shard.reload_masters()
        shard.close_window()
        found.append(shard.weights[0].float().tolist()[:8000])
    state = shard.export()[0]
    return [*found, state.master.tolist(), *(moment.tolist() for moment in state.moments.values()), shard.steps()]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_done_with_a_shard_has_the_same_bits_on_a_gpu(seed: int) -> None:
    chosen = random.Random(seed)
    dtype, sums = chosen.choice([torch.bfloat16, torch.float32]), chosen.choice([None, torch.float32])
    placement, how = chosen.choice([*PLACEMENTS, 0.25]), chosen.choice(list(DEVICES.values()))
    near, far = on_device(placement, dtype, sums), on_device(placement, dtype, sums, **how)
    expected, found = random_life(near, seed, dtype), random_life(far, seed, dtype)
    assert far.engine.plan.weights_on_gpu
    updated = [far.engine.plan.updates_on_gpu(number) for number in range(len(far.engine.plan.homes))]
    assert {"cpu": not any(updated), "gpu": all(updated)}.get(placement, any(updated) and not all(updated))
    for place, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a == b, place
    near.close()
    far.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_shard_whose_placement_changes_has_the_same_bits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step shows other rates, and whatever they ask for is done between two windows."""
    rates = [Rates(10.0**cpu, (), GpuRates(1e9, 10.0**link, 10.0**link)) for cpu, link in ((6, 9), (9, 6), (8, 8))]
    shown, plans = itertools.cycle(rates), set()
    plain = visits.SweepRequests.refine_rates

    def learn(self: visits.SweepRequests) -> None:
        plain(self)
        plans.add(self._parts.plan.placements)
        self._parts.rates, self.placement_review.due = next(shown), True

    monkeypatch.setattr(parts, "quick_probe", lambda *arguments, **how: next(shown))
    monkeypatch.setattr(visits.SweepRequests, "refine_rates", learn)
    monkeypatch.setattr(placement_review, "WORTH_A_CHANGE", 0.0)
    chosen = random.Random(seed)
    dtype, sums = chosen.choice([torch.bfloat16, torch.float32]), chosen.choice([None, torch.float32])
    near, far = on_device(0, dtype, sums), on_device("auto", dtype, sums, **chosen.choice(list(DEVICES.values())))
    expected, found = random_life(near, seed, dtype), random_life(far, seed, dtype)
    for place, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert a == b, place
    assert len(plans) > 1
    near.close()
    far.close()


class Watched(SimulatedDevice):
    """Keeps what is put on its lanes."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.seen: list[tuple[Any, str]] = []

    def put(self, lane: Any, label: str, *arguments: Any, **named: Any) -> Any:
        if label != "mark":
            self.seen.append((lane, label))
        return super().put(lane, label, *arguments, **named)


SMALL = tuple(Piece(str(number), 0, 64 * number, 61, 0) for number in range(32))


def small_on_device(device: SimulatedDevice | None) -> Shard:
    config = OffloadConfig(host_memory="1MiB", threads=1, subgroup_numel=1024, placement=0)
    return Shard(SMALL, [torch.linspace(-1, 1, 2048).bfloat16()], config, device)


def reduce_all(shard: Shard, step: int) -> None:
    """Hand over the gradients of all pieces from one bucket, as DeepSpeed does."""
    bucket = torch.empty(2048, dtype=torch.bfloat16)
    for number in reversed(range(len(SMALL))):
        gradient = bucket[64 * number :][:61]
        gradient.copy_(drawn(61, 100 * step + number))
        shard.accumulate(number, gradient, final=True)
        gradient.fill_(math.nan)


def test_small_gradients_leave_together() -> None:
    """With one kernel for all their sums and one copy; DeepSpeed's stream waits for nothing meanwhile."""
    device = Watched(lazy=True)
    near, far = small_on_device(None), small_on_device(device)
    device.seen.clear()
    for shard in (near, far):
        reduce_all(shard, 0)
    assert not device.seen
    assert far.norms() == near.norms()
    lanes = [lane for lane, _ in device.seen]
    assert lanes.count(DeviceLane.LEAVING) == 1
    assert lanes.count(DeviceLane.GRADIENTS) == 2  # the sums, and their copy to the host
    device.seen.clear()
    for shard in (near, far):
        reduce_all(shard, 1)
    assert not device.seen
    assert far.norms() == near.norms()
    assert [lane for lane, _ in device.seen].count(DeviceLane.LEAVING) < len(SMALL)
    assert stepped(far) == stepped(near)
    near.close()
    far.close()


def test_deepspeeds_stream_waits_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of gradients that leave one by one, either."""
    monkeypatch.setattr(shard_module, "Engine", partial(Engine, limits=Limits(bucket_bytes=1)))
    device = Watched(lazy=True)
    near, far = small_on_device(None), small_on_device(device)
    device.seen.clear()
    before = device.done
    for shard in (near, far):
        reduce_all(shard, 0)
    assert [lane for lane, _ in device.seen].count(DeviceLane.LEAVING) == len(SMALL)
    assert device.done == before
    assert far.norms() == near.norms()
    near.close()
    far.close()


@pytest.mark.parametrize("limit", ["in_transit_bytes", "COPIED_BYTES"])
@pytest.mark.parametrize("how", DEVICES)
def test_copies_of_gradients_take_no_more_memory_than_allowed(
    how: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond that DeepSpeed's stream waits for the oldest; a gradient that is too large for a copy it waits for."""
    most = {"in_transit_bytes": 500, "COPIED_BYTES": 100}[limit]
    if limit == "COPIED_BYTES":
        monkeypatch.setattr(gradients_module, limit, most)
    else:
        monkeypatch.setattr(shard_module, "Engine", partial(Engine, limits=Limits(in_transit_bytes=most)))
    near, far = small_on_device(None), small_on_device(SimulatedDevice(**DEVICES[how]))
    store = far.engine._parts.gradients
    assert isinstance(store, gpu_gradients.GpuGradients)
    for step in range(3):
        for shard in (near, far):
            for number in range(2):
                reduce_all(shard, 10 * step + number)
                held = sum(gradient.nbytes for _, gradient in store.in_transit)
                assert held <= (most if limit == "in_transit_bytes" else 0)
        assert far.norms() == near.norms()
        assert stepped(far) == stepped(near)
        assert not store.in_transit
        for shard in (near, far):
            shard.close_window()
    near.close()
    far.close()
