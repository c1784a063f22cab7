"""Many small tensors on a simulated GPU: the same bits as on the CPU, in few device calls."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from limited import limited
from mirror import same, states
from simulated import OnDevice
from world import HazardError, SimulatedDevice

import offload
from offload.device import pieces
from offload.gradients import gpu as gpu_gradients
from offload.plan import budget
from offload.protocols import DeviceLane

CALLS = (
    "mark",
    "follow",
    "copy",
    "copy_pieces",
    "update",
    "gradient_blocks",
    "sum_gradients",
    "caller",
    "mark_caller",
)


class Counting(SimulatedDevice):
    """Counts what is put on its lanes by kind, and what it is asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        for name in CALLS:
            setattr(self, name, self._counted(name, getattr(self, name)))

    def _counted(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.asked[name] += 1
            return plain(*arguments, **named)

        return call

    def put(self, lane: Any, label: str, *arguments: Any, **named: Any) -> Any:
        kind = label.split(" of ")[0].removeprefix("a ").removeprefix("an ")
        pieces = label.endswith("pieces")
        self.calls["kernel" if pieces or kind in ("gradient", "gradients", "update") else kind] += 1
        return super().put(lane, label, *arguments, **named)


def vectors(count: int, numel: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    """Vectors in one block of memory, in no order that the optimizer knows, and two matrices."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(count * (numel + 8), generator=generator).to(dtype)
    order = torch.randperm(count, generator=generator).tolist()
    found = [block[n * (numel + 8) :][: numel - n % 3] for n in order]
    found += [torch.randn(shape, generator=generator).to(dtype) for shape in ((70, 40), (30, 50))]
    return [torch.nn.Parameter(tensor) for tensor in found]


def gradients(parameters: list[torch.nn.Parameter], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]


def train(optimizer: offload.AdamW, parameters: list[torch.nn.Parameter], steps: range, passes: int) -> None:
    for step in steps:
        for number in range(passes):
            torch.autograd.backward(parameters, gradients(parameters, passes * step + number))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def config(folder: Path, **changes: Any) -> offload.OffloadConfig:
    chosen = {"host_memory": 30_000, "gpu_memory": 0, "paths": [folder], "subgroup_numel": 4096, "placement": "cpu"}
    return offload.OffloadConfig(**{**chosen, "threads": 1, **changes})


@pytest.mark.parametrize(
    ("dtype", "changes", "passes", "keep_grads"),
    [
        (torch.bfloat16, {}, 3, False),
        (torch.bfloat16, {"placement": 0.5}, 1, True),
        (torch.bfloat16, {"placement": 0.5}, 1, False),
        (torch.bfloat16, {"gradient_dtype": "float32"}, 3, False),
        (torch.float32, {}, 3, True),
        (torch.float32, {}, 1, False),
    ],
    ids=["cpu", "both", "both, leaving", "wide", "fp32", "fp32, leaving"],
)
def test_the_same_bits_as_on_the_cpu(
    tmp_path: Path, dtype: torch.dtype, changes: dict[str, Any], passes: int, keep_grads: bool
) -> None:
    """Of weights, state, and checkpoints of both."""
    (tmp_path / "store").mkdir()
    parameters, twins = vectors(24, 130, dtype), vectors(24, 130, dtype)
    settings = config(tmp_path / "store", keep_grads=keep_grads, **changes)
    twin_config = offload.OffloadConfig(gradient_dtype=settings.gradient_dtype)
    with (
        OnDevice(parameters, device=SimulatedDevice(lazy=True), offload=settings) as optimizer,
        offload.AdamW(twins, offload=twin_config) as twin,
    ):
        assert optimizer.engine.plan.piece_buffer_bytes > 0
        for owner, mine in ((optimizer, parameters), (twin, twins)):
            train(owner, mine, range(2), passes)
        optimizer.save_checkpoint(tmp_path / "checkpoint")
        optimizer.wait_checkpoint()
        expected = states(twin, twins)
        assert same(states(optimizer, parameters), expected)
    with offload.AdamW(twins, offload=twin_config) as twin:
        torch._foreach_zero_([p.data for p in twins])
        twin.load_checkpoint(tmp_path / "checkpoint")
        assert same(states(twin, twins), expected)


def test_the_calls_of_a_step(tmp_path: Path) -> None:
    """They grow with subgroups, and not with tensors."""
    seen = []
    for count in (100, 400):
        device = Counting()
        parameters = vectors(count, 128)
        settings = config(tmp_path, host_memory="10MB", subgroup_numel=1 << 16, paths=[])
        with OnDevice(parameters, device=device, offload=settings) as optimizer:
            assert len(optimizer.engine.plan.layout.subgroups) == 1
            train(optimizer, parameters, range(2), 1)
            torch.autograd.backward(parameters, gradients(parameters, 2))
            device.calls.clear()
            optimizer.step()
        seen.append({kind: number for kind, number in device.calls.items() if kind != "mark"})
    assert seen[0] == seen[1] == {"copy": 2, "kernel": 2, "table": 2}


def test_buffers_are_part_of_the_plan(tmp_path: Path) -> None:
    device = SimulatedDevice()
    before = device.free_bytes()
    parameters = vectors(40, 130)
    with OnDevice(parameters, device=device, offload=config(tmp_path)) as optimizer:
        plan = optimizer.engine.plan

        def sums(plan: budget.Plan) -> int:  # of blocks, and of segments' fingerprints
            segments = sum(len(subgroup.segments) for subgroup in plan.layout.subgroups)
            return 8 * (sum(-(-p.numel // 4096) for p in plan.layout.parameters) + segments)

        assert before - device.free_bytes() == budget.PIECE_BUFFERS * plan.piece_buffer_bytes + sums(plan)
        assert "small tensors on their way to and from the CPU" in str(optimizer.plan)
        assert optimizer.engine._parts.lanes.pieces.buffer_bytes == plan.piece_buffer_bytes  # type: ignore[attr-defined]
        larger = [torch.nn.Parameter(torch.zeros(300, dtype=torch.bfloat16)) for _ in range(12)]
        train(optimizer, parameters, range(1), 1)
        optimizer.add_param_group({"params": larger})
        train(optimizer, [*parameters, *larger], range(2), 1)
        plan = optimizer.engine.plan
        assert before - device.free_bytes() == budget.PIECE_BUFFERS * plan.piece_buffer_bytes + sums(plan)


def test_auto_leaves_room_for_the_buffers(tmp_path: Path) -> None:
    device = SimulatedDevice(1 << 20)
    parameters = vectors(40, 130)
    settings = config(tmp_path, gpu_memory="auto", placement=0.5)
    device.reserve_bytes = (1 << 20) - 160_000
    with OnDevice(parameters, device=device, offload=settings) as optimizer:
        train(optimizer, parameters, range(2), 1)
        plan = optimizer.engine.plan
        assert plan.piece_buffer_bytes > 0
        assert device.free_bytes() >= device.reserve_bytes - 8 * len(parameters)


def test_models_of_large_tensors_have_no_buffers() -> None:
    weights = [torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in (1 << 19, 1 << 19, 4096, 4096)]
    settings = offload.OffloadConfig(host_memory="40MB", placement="cpu", threads=1)
    with OnDevice(weights, device=SimulatedDevice(), offload=settings) as optimizer:
        assert optimizer.engine.plan.piece_buffer_bytes == 0
        assert "small tensors" not in str(optimizer.plan)
    assert pieces.LEAST_COPY_BYTES == 1 << 20


def test_what_a_backward_pass_asks_of_the_device(tmp_path: Path) -> None:
    """For each gradient, on which lane backward runs; all else for all of them together."""
    seen = []
    for count in (100, 400):
        device = Counting()
        parameters = vectors(count, 128)
        settings = config(tmp_path, host_memory="10MB", subgroup_numel=1 << 16, paths=[], keep_grads=False)
        with OnDevice(parameters, device=device, offload=settings):
            device.asked.clear()
            torch.autograd.backward(parameters, gradients(parameters, 2))
            assert device.asked.pop("caller") == len(parameters)
            seen.append(device.asked.total())
            assert device.asked["copy"] == device.asked["copy_pieces"] == device.asked["sum_gradients"] == 1
    assert seen == [15, 15]


def arrive(optimizer: offload.AdamW, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """As from a hook, outside of any backward pass of torch's."""
    parameter.grad = gradient
    optimizer._route.handle_arrival(optimizer._weights.bound[parameter])


def sums_asked(device: Counting) -> int:
    return device.asked["sum_gradients"] + device.asked["gradient_blocks"]


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, [0] * 8),
        ({"bucket_count": 3}, [0, 0, 1, 1, 1, 2, 2, 2]),
        ({"bucket_bytes": 1000}, [0, 0, 0, 1, 1, 1, 1, 2]),
        ({"bucket_bytes": 250}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
    ids=["no limit", "count", "bytes", "each alone"],
)
def test_when_a_bucket_leaves(tmp_path: Path, limits: dict[str, int], left: list[int]) -> None:
    device = Counting()
    parameters = [torch.nn.Parameter(torch.zeros(128, dtype=torch.bfloat16)) for _ in range(8)]
    kind, settings = limited(OnDevice, **limits), config(tmp_path, keep_grads=False)
    with kind(parameters, device=device, offload=settings) as optimizer:
        seen = []
        for parameter in parameters:
            arrive(optimizer, parameter, torch.ones_like(parameter))
            seen.append(sums_asked(device))
        assert seen == left
        optimizer.engine.gradients.end_backward()
        optimizer.engine.gradients.end_backward()
        assert sums_asked(device) == left[-1] + (left[-1] in (0, 2) and "bucket_bytes" not in limits)


def on_gpu(optimizer: offload.AdamW) -> gpu_gradients.GpuGradients:
    found = optimizer.engine._parts.gradients
    assert isinstance(found, gpu_gradients.GpuGradients)
    return found


ASKING: dict[str, Callable[[offload.AdamW, list[torch.nn.Parameter]], object]] = {
    "the norm": lambda optimizer, _: optimizer.clip_grad_norm_(1.0),
    "a step": lambda optimizer, _: optimizer.step(),
    "another gradient of one": lambda optimizer, p: arrive(optimizer, p[0], torch.ones_like(p[0])),
    "a gradient in place of one": lambda optimizer, p: optimizer.engine.gradients.bind(
        0, p[1].data_ptr(), offload.DtypeCode.BFLOAT16
    ),
    "its mark": lambda optimizer, _: on_gpu(optimizer).in_transit[0][0].wait(),
    "its memory": lambda optimizer, _: on_gpu(optimizer).drop_oldest_when_read(),
    "whoever has gradients in slots": lambda optimizer, _: optimizer.engine.gradients.settle(),
}


@pytest.mark.parametrize("who", ASKING)
def test_whoever_asks_for_gradients_has_their_bucket_leave(tmp_path: Path, who: str) -> None:
    device = Counting()
    parameters = vectors(9, 128)
    with OnDevice(parameters, device=device, offload=config(tmp_path, keep_grads=False)) as optimizer:
        for parameter in parameters:
            arrive(optimizer, parameter, torch.ones_like(parameter))
        assert not any(mark.reached() for mark, _ in on_gpu(optimizer).in_transit)
        assert sums_asked(device) == 0
        ASKING[who](optimizer, parameters)
        assert device.asked["sum_gradients"] == 1
        assert device.asked["gradient_blocks"] == 0


def test_gradients_in_a_bucket_are_forgotten_unread(tmp_path: Path) -> None:
    device = Counting()
    parameters, twins = vectors(9, 128), vectors(9, 128)
    with (
        OnDevice(parameters, device=device, offload=config(tmp_path, keep_grads=False)) as optimizer,
        offload.AdamW(twins) as twin,
    ):
        for parameter in parameters:
            arrive(optimizer, parameter, torch.full_like(parameter, torch.nan))
        marks = [mark for mark, _ in on_gpu(optimizer).in_transit]
        optimizer.zero_grad()
        assert sums_asked(device) == 0
        for mark in marks:
            mark.wait()
        for owner, mine in ((optimizer, parameters), (twin, twins)):
            train(owner, mine, range(2), 1)
        assert same(states(optimizer, parameters), states(twin, twins))


def made_on_the_device(
    optimizer: offload.AdamW, parameters: list[torch.nn.Parameter], device: SimulatedDevice, seed: int
) -> None:
    """Put a backward pass on the caller's lane, in memory that it allocates and frees there."""
    for parameter, value in zip(parameters, gradients(parameters, seed), strict=True):
        made = device.empty(tuple(parameter.shape), parameter.dtype)
        at, nbytes = made.data_ptr(), value.nbytes
        device.caller_work(
            "backward",
            lambda at=at, value=value: ctypes.memmove(at, value.data_ptr(), value.nbytes),
            [(at, at + nbytes, True)],
        )
        arrive(optimizer, parameter, made)


BUCKET_BUGS: dict[str, Callable[[SimulatedDevice, pytest.MonkeyPatch], None]] = {
    "a gradient is let go before it has left": lambda _, patch: patch.setattr(
        gpu_gradients.Departure, "reached", lambda mark: True
    ),
    "a bucket leaves before its gradients are made": lambda device, patch: patch.setattr(
        device, "mark_caller", lambda caller: device.mark(DeviceLane.PIECES)
    ),
    "a bucket waits for another of the caller's lanes": lambda device, patch: patch.setattr(
        device, "mark_caller", lambda caller: device.mark(DeviceLane.CALLER)
    ),
}


@pytest.mark.not_ahead("whoever waits for gradients to make updates from knows of copies, too")
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("bug", [None, *BUCKET_BUGS])
def test_a_bucket_s_forgotten_waits_are_found(
    tmp_path: Path, bug: str | None, lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters, twins = vectors(12, 128), vectors(12, 128)
    device = SimulatedDevice(lazy=lazy, caller_is_host=False)
    optimizer = OnDevice(parameters, device=device, offload=config(tmp_path, keep_grads=False))

    def run() -> None:
        for step in range(3):
            half = len(parameters) // 2
            with device.stream("backward"):
                made_on_the_device(optimizer, parameters, device, step)
                if step == 1:  # of another backward, some of them small
                    made_on_the_device(optimizer, parameters[:half], device, 10)
            device.follow(DeviceLane.CALLER, device.mark_caller("backward"))
            optimizer.step()
            optimizer.zero_grad()
        device.mark(DeviceLane.CALLER).wait()

    if bug is not None:
        BUCKET_BUGS[bug](device, monkeypatch)
        with pytest.raises(offload.OffloadError) as raised, optimizer:
            run()
        caused = (raised.value, raised.value.__cause__, raised.value.__context__)
        assert any(isinstance(cause, HazardError) for cause in caused)
        return
    with optimizer, offload.AdamW(twins) as twin:
        run()
        for step in range(3):
            torch.autograd.backward(twins, gradients(twins, step))
            if step == 1:
                half = len(twins) // 2
                torch.autograd.backward(twins[:half], gradients(twins[:half], 10))
            twin.step()
            twin.zero_grad()
        assert same(states(optimizer, parameters), states(twin, twins))


def test_norms_of_gradients_that_stay_are_summed_together(tmp_path: Path) -> None:
    device = Counting()
    parameters = vectors(30, 128)
    with OnDevice(parameters, device=device, offload=config(tmp_path)) as optimizer:
        torch.autograd.backward(parameters, gradients(parameters, 0))
        device.asked.clear()
        optimizer.clip_grad_norm_(1.0)
        assert device.asked["sum_gradients"] == 1
        assert device.asked["gradient_blocks"] == 0
