"""A session over a simulated GPU: the same bits wherever updates run, whenever the device gets round to its work."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import signal
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from limited import limited
from mirror import same, states
from simulated import OnDevice, add_early, hung_commit
from world import HazardError, SimulatedDevice

import offload
from offload._native import CompletionQueue
from offload.device import pinning
from offload.device.host import HostMemory
from offload.device.lanes import GpuLanes
from offload.device.none import NO_LANES
from offload.dtypes import DtypeCode
from offload.formats import COMPACT8, EXACT
from offload.plan import Home
from offload.plan.budget import FETCHED_AHEAD, HIDDEN_PIECE_BYTES
from offload.protocols import DeviceLane
from offload.schedule.runs import RESIDENT_RUNS_IN_FLIGHT
from offload.session import setup

SIZES = ((70, 40), (3000,), (17,), (2500,))


def weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def backward(parameters: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    gradients = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]
    torch.autograd.backward(parameters, gradients)


def config(folder: Path, **changes: Any) -> offload.OffloadConfig:
    chosen = {
        "host_memory": 60_000,
        "gpu_memory": 40_000,
        "paths": [folder],
        "subgroup_numel": 1024,
        "placement": 0.5,
    }
    return offload.OffloadConfig(**{**chosen, "threads": 1, **changes})


def train(optimizer: offload.AdamW, parameters: list[torch.nn.Parameter], steps: range, clip: bool = True) -> None:
    for step in steps:
        backward(parameters, step)
        if clip:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def on_cpu(steps: range, dtype: torch.dtype = torch.bfloat16, clip: bool = True) -> list[torch.Tensor]:
    parameters = weights(dtype=dtype)
    with offload.AdamW(parameters) as optimizer:
        train(optimizer, parameters, steps, clip)
        return states(optimizer, parameters)


def _forget(lanes: GpuLanes, wanted: DeviceLane, when: str) -> None:
    """Let `lanes` put no wait on a lane while a method runs."""
    plain, device = getattr(lanes, when), lanes.device
    follow = device.follow

    def forgetful(*arguments: Any) -> Any:
        device.follow = lambda lane, mark: None if lane is wanted else follow(lane, mark)  # type: ignore[method-assign]
        try:
            return plain(*arguments)
        finally:
            device.follow = follow  # type: ignore[method-assign]

    setattr(lanes, when, forgetful)


PLANTED: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "an update does not wait for the copy to the GPU": lambda parts, _: _forget(
        parts.lanes, DeviceLane.UPDATE, "enqueue_update"
    ),
    "a copy back does not wait for the update": lambda parts, _: _forget(parts.lanes, DeviceLane.D2H, "copy_out"),
    "the CPU does not wait for its gradients": lambda parts, _: setattr(
        parts.lanes, "inputs_mark", lambda subgroup: None
    ),
    "a weight slot is used again while it is pushed": lambda parts, _: setattr(
        parts.lanes, "await_push", lambda operation: parts.queue.post(operation.op)
    ),
    "weights are read before they have been fetched": lambda parts, _: setattr(
        parts.lanes, "fetch_weights", lambda operation, due_s: parts.queue.post(operation.op)
    ),
    "host memory is taken as whole before it has been copied back": lambda parts, _: setattr(
        parts.lanes.device, "report", lambda mark, queue, op: queue.post(op)
    ),
    "gradients are added before they have arrived": lambda parts, patch: add_early(parts.lanes.device, patch),
}


@pytest.mark.not_ahead("whoever waits for gradients to make updates from has a lazy device copy them")
@pytest.mark.parametrize("bug", PLANTED)
def test_a_forgotten_wait_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every order that lanes need is one whose absence these tests notice."""
    monkeypatch.setattr("offload.plan.budget.WEIGHT_SLOTS", 3)  # so that they are used again
    parameters = weights()
    expected = on_cpu(range(3))
    settings = config(tmp_path, keep_grads="added" not in bug, gpu_memory=0)
    optimizer = OnDevice(parameters, device=SimulatedDevice(lazy=True), offload=settings)
    parts = optimizer.engine._parts
    PLANTED[bug](parts, monkeypatch)
    try:
        for step in range(3):
            if "added" in bug:
                torch.autograd.backward(parameters, [torch.zeros_like(p) for p in parameters])
            train(optimizer, parameters, range(step, step + 1))
        found = states(optimizer, parameters)
    except offload.OffloadError as error:
        caused = [error, error.__cause__, error.__context__]
        assert any(isinstance(cause, HazardError) for cause in caused)
        return
    finally:
        with contextlib.suppress(offload.OffloadError):
            optimizer.close()
    assert not same(found, expected)


def span(tensor: torch.Tensor, *, writes: bool) -> tuple[int, int, bool]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size(), writes


def train_behind(
    optimizer: offload.AdamW,
    parameters: list[torch.nn.Parameter],
    device: SimulatedDevice,
    steps: range,
    clip: bool,
    kept: list[torch.Tensor] | None = None,
) -> list[list[torch.Tensor]]:
    """Train with forward and backward on the caller's lane; return the weights that each forward pass found.

    All gradients go into `kept`: a GPU's allocator gives memory to others in the order of the caller's stream, the
    CPU's does so at once. Whoever lets this be interrupted keeps them until the device has done its work.
    """
    seen: list[list[torch.Tensor]] = []
    kept = [] if kept is None else kept
    for step in steps:
        found: list[torch.Tensor] = []
        for parameter in parameters:
            device.caller_work(
                "forward",
                lambda p=parameter, into=found: into.append(p.detach().clone()),
                [span(parameter, writes=False)],
            )
        seen.append(found)
        generator = torch.Generator().manual_seed(1000 + step)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            kept.append(torch.full_like(parameter, torch.nan))
            parameter.grad = kept[-1]
            device.caller_work(
                "backward",
                lambda into=kept[-1], value=gradient: into.copy_(value),
                [span(kept[-1], writes=True)],
            )
            if not optimizer.engine.config.keep_grads:
                optimizer._route.handle_arrival(optimizer._weights.bound[parameter])
        if clip:  # which waits for the gradients
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    device.mark(DeviceLane.CALLER).wait()
    device.mark(DeviceLane.UPDATE).wait()
    return seen


@pytest.mark.parametrize(
    ("forgotten", "keep_grads", "clip"),
    [
        *itertools.product([None], [False, True], [False, True]),
        *(
            pytest.param("order_caller", *settings, marks=pytest.mark.not_overlapped("who waits orders the caller"))
            for settings in itertools.product([False, True], [False, True])
        ),
        # Clipping waits for the gradients, and those that leave have been waited for.
        ("follow_caller", True, False),
    ],
)
def test_the_order_of_a_step_and_of_forward_and_backward(
    tmp_path: Path, forgotten: str | None, keep_grads: bool, clip: bool
) -> None:
    """With both on lanes, nothing but marks says what comes first."""
    parameters = weights()
    device = SimulatedDevice(lazy=True, caller_is_host=False)
    settings = config(tmp_path, keep_grads=keep_grads)
    optimizer = OnDevice(parameters, device=device, offload=settings)
    if forgotten is None:
        with optimizer:
            seen = train_behind(optimizer, parameters, device, range(4), clip)
            assert same(seen[3], on_cpu(range(3), clip=clip)[: len(parameters)])
            assert same(states(optimizer, parameters), on_cpu(range(4), clip=clip))
        return
    lanes = optimizer.engine._parts.lanes
    setattr(lanes, forgotten, lambda: None)
    with pytest.raises(offload.OffloadError) as raised, optimizer:
        train_behind(optimizer, parameters, device, range(4), clip)
    assert any(isinstance(cause, HazardError) for cause in (raised.value, raised.value.__cause__))


@pytest.mark.parametrize("gpu_memory", [0, 60_000])
def test_a_checkpoint_takes_buffers_only_for_state_in_gpu_memory(
    tmp_path: Path, gpu_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = [], HostMemory.ensure_checkpoint_buffers
    monkeypatch.setattr(HostMemory, "ensure_checkpoint_buffers", lambda *of: asked.append(of) or ask(*of))
    parameters, chosen = weights(dtype=torch.bfloat16), config(tmp_path, gpu_memory=gpu_memory)
    with OnDevice(parameters, device=SimulatedDevice(lazy=True), offload=chosen) as optimizer:
        train(optimizer, parameters, range(2))
        optimizer.save_checkpoint(tmp_path / "checkpoint")
        optimizer.wait_checkpoint()
    assert bool(asked) == (gpu_memory > 0)


@pytest.mark.parametrize("keep_grads", [False, True])
def test_loss_scaling(tmp_path: Path, keep_grads: bool) -> None:
    """`offload.GradScaler` scales, clips and skips as torch's does over fp32 copies of the gradients."""
    parameters, twins = weights(dtype=torch.float16), weights(dtype=torch.float16)
    ours = offload.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    device = SimulatedDevice(lazy=True)
    settings = config(tmp_path, keep_grads=keep_grads, gradient_dtype="float32")
    # Powers of two scale without rounding, so torch's unscaled gradients are exactly ours.
    twin_config = offload.OffloadConfig(gradient_dtype="float32")
    with (
        OnDevice(parameters, device=device, offload=settings) as optimizer,
        offload.AdamW(twins, offload=twin_config) as twin,
    ):
        for step in range(6):
            for who, scaler, owner in ((parameters, ours, optimizer), (twins, theirs, twin)):
                generator = torch.Generator().manual_seed(step)
                gradients = [torch.randn(p.shape, generator=generator).half() for p in who]
                if step == 3:
                    gradients[1][7] = torch.inf
                scale = scaler.scale(torch.ones(())).item()
                torch.autograd.backward(who, [(g.float() * scale / 1024).half() for g in gradients])
                scaler.unscale_(owner)
                owner.clip_grad_norm_(0.01)
                scaler.step(owner)
                scaler.update()
                owner.zero_grad()
            assert ours.state_dict() == theirs.state_dict()
        assert same(states(optimizer, parameters), states(twin, twins))
        backward(parameters, 0)
        ours.scale(torch.ones(()))
        ours.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            ours.unscale_(optimizer)


def test_a_skipped_step_forgets_gradients_that_have_left(tmp_path: Path) -> None:
    """Whoever zeroes them through the model would add to them for ever."""
    parameters = weights()
    scaler = offload.GradScaler("cpu", init_scale=1.0, backoff_factor=1.0 - 2.0**-20)
    with OnDevice(
        parameters, device=SimulatedDevice(lazy=True), offload=config(tmp_path, keep_grads=False)
    ) as optimizer:
        scaler.scale(torch.ones(()))
        torch.autograd.backward(parameters, [torch.full_like(p, torch.inf) for p in parameters])
        scaler.step(optimizer)
        scaler.update()
        for parameter in parameters:
            parameter.grad = None
        backward(parameters, 0)
        scaler.unscale_(optimizer)
        assert torch.isfinite(optimizer.clip_grad_norm_(1.0))
        scaler.step(optimizer)
        assert optimizer.engine.step_count(0) == 1


def test_gradients_leave_during_backward(tmp_path: Path) -> None:
    parameters = weights()
    settings = config(tmp_path, keep_grads=False, placement="cpu", gpu_memory=0)
    with OnDevice(parameters, device=SimulatedDevice(), offload=settings) as optimizer:
        backward(parameters, 0)
        assert all(parameter.grad is None for parameter in parameters)
        held = [weakref.ref(gradient) for _, gradient in optimizer.engine._parts.gradients.in_transit]  # type: ignore[attr-defined]
        optimizer.step()
        assert all(reference() is None for reference in held)
        # Torch's own scaler finds no gradients and says so; a step without any changes nothing.
        before = states(optimizer, parameters)
        optimizer.step()
        assert same(before, states(optimizer, parameters))
        backward(parameters, 1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)


class Cut(SimulatedDevice):
    """Notes in what pieces something is copied."""

    def __init__(self) -> None:
        self.pieces: list[tuple[DeviceLane, int]] = []
        super().__init__()

    def copy(self, lane: DeviceLane, target: int, source: int, nbytes: int, piece_bytes: int = 0) -> None:
        self.pieces.append((lane, piece_bytes))
        super().copy(lane, target, source, nbytes, piece_bytes)


def test_copies_are_cut_while_a_step_is_hidden_and_at_no_other_time(tmp_path: Path) -> None:
    device, model = Cut(), torch.nn.Linear(70, 40).bfloat16()
    where = {"gpu_memory": 0, "host_memory": 1 << 20}
    with OnDevice(model.parameters(), device=device, offload=config(tmp_path, **where)) as optimizer:
        for hides in (False, True):
            if hides:
                optimizer.overlap_forward(model)
            for _ in range(2):
                model(torch.ones(2, 70).bfloat16()).sum().backward()
                device.pieces.clear()
                optimizer.step()
                optimizer.finish()
                optimizer.zero_grad()
                assert {lane for lane, _ in device.pieces} >= {DeviceLane.H2D, DeviceLane.LEAVING}
                assert {size for _, size in device.pieces} == ({HIDDEN_PIECE_BYTES} if hides else {0})
            optimizer.state_dict()
            assert device.pieces[-1][1] == 0


@pytest.mark.not_ahead("whoever waits for gradients to make updates from waits for their sums, too")
def test_copies_of_gradients_do_not_wait_for_their_sums(tmp_path: Path) -> None:
    """Sums wait for backward's own kernels to end, and the link would idle meanwhile."""
    parameters = weights()
    device = SimulatedDevice(lazy=True)
    settings = config(tmp_path, keep_grads=False, placement="cpu", gpu_memory=0)
    with OnDevice(parameters, device=device, offload=settings) as optimizer:
        parts, before = optimizer.engine._parts, device.done
        gradients = [torch.full_like(p, number + 1) for number, p in enumerate(parameters)]
        torch.autograd.backward(parameters, gradients)
        device.mark(DeviceLane.LEAVING).wait()
        assert device.done == before + len(parameters)
        for number, position in enumerate(parts.gradients.records):  # type: ignore[attr-defined]
            assert (position.slot == number + 1).all()
        device.mark(DeviceLane.GRADIENTS).wait()
        assert device.done == before + len(parameters) + 1  # one kernel sums all of them


def arrive(
    optimizer: offload.AdamW, parameters: list[torch.nn.Parameter], device: SimulatedDevice, seed: int
) -> None:
    """Put a backward pass on the caller's lane, in memory that it allocates and frees there."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter in parameters:
        value = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = device.empty(tuple(parameter.shape), parameter.dtype)
        at, nbytes = parameter.grad.data_ptr(), value.nbytes
        device.caller_work(
            "backward",
            lambda at=at, value=value: ctypes.memmove(at, value.data_ptr(), value.nbytes),
            [(at, at + nbytes, True)],
        )
        optimizer._route.handle_arrival(optimizer._weights.bound[parameter])


@pytest.mark.parametrize("lazy", [False, True])
def test_backward_waits_on_the_gpu_when_too_many_gradients_are_on_their_way(tmp_path: Path, lazy: bool) -> None:
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 1000).bfloat16()) for _ in range(20)]
    twins = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    device = SimulatedDevice(lazy=lazy, caller_is_host=False)
    settings = config(tmp_path, keep_grads=False, placement="cpu", gpu_memory=0)
    kind = limited(OnDevice, in_transit_bytes=4096)
    with kind(parameters, device=device, offload=settings) as optimizer, offload.AdamW(twins) as twin:
        for step in range(2):
            arrive(optimizer, parameters, device, step)
            assert device.user_bytes <= 4096 + 2 * 2000
            generator = torch.Generator().manual_seed(1000 + step)
            torch.autograd.backward(twins, [torch.randn(1000, generator=generator).bfloat16() for _ in twins])
            for owner in (optimizer, twin):
                owner.step()
                owner.zero_grad()
        device.mark(DeviceLane.CALLER).wait()  # for new weights
        assert same(states(optimizer, parameters), states(twin, twins))


@pytest.mark.parametrize("placement", ["cpu", "gpu"])
def test_memory_of_another_stream_is_not_used_again_before_its_gradient_has_been_read(
    tmp_path: Path, placement: str
) -> None:
    parameters = weights()
    device = SimulatedDevice(lazy=True, caller_is_host=False)
    settings = config(tmp_path, keep_grads=False, placement=placement, gpu_memory=0)
    with OnDevice(parameters, device=device, offload=settings) as optimizer:
        for passes in (2, 1):
            with device.stream("backward"):
                for number in range(passes):
                    arrive(optimizer, parameters, device, passes - 1 - number)
            if passes == 2:
                optimizer.zero_grad()  # on another stream
        optimizer.step()
        device.mark(DeviceLane.CALLER).wait()  # for new weights
        assert same(states(optimizer, parameters), on_cpu(range(1), clip=False))


@pytest.mark.parametrize(("fail_at", "keep_grads"), [(3, False), (30, True), (60, False), (90, True)])
def test_a_gpu_that_fails_breaks_the_session(tmp_path: Path, fail_at: int, keep_grads: bool) -> None:
    parameters = weights()
    device = SimulatedDevice(fail_at=fail_at)

    def run() -> None:
        with OnDevice(parameters, device=device, offload=config(tmp_path, keep_grads=keep_grads)) as optimizer:
            train(optimizer, parameters, range(20))

    with pytest.raises(offload.OffloadError, match=r"simulated GPU has failed|the GPU has failed"):
        run()
    assert not device.pinned
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_on_the_gpu(tmp_path: Path) -> None:
    parameters = weights()
    with pytest.raises(offload.OffloadError, match=r"no memory for|gpu_memory"):
        OnDevice(parameters, device=SimulatedDevice(50_000), offload=config(tmp_path, gpu_memory=10**6))
    assert not list(tmp_path.iterdir())


def test_what_is_free_after_backward_is_used(tmp_path: Path) -> None:
    parameters = weights()
    with OnDevice(
        parameters, device=SimulatedDevice(1 << 20), offload=config(tmp_path, gpu_memory="auto")
    ) as optimizer:
        assert optimizer.state_dict()["state"] == {}
        optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does with every optimizer
        assert optimizer._holder.engine_if_open is None
        train(optimizer, parameters, range(3))
        assert optimizer.engine.plan.home_bytes[Home.GPU] == optimizer.engine.plan.state_bytes
        assert same(states(optimizer, parameters), on_cpu(range(3)))
    with OnDevice(
        parameters, device=SimulatedDevice(1 << 20), offload=config(tmp_path, gpu_memory="auto")
    ) as optimizer:
        assert "GPU" in str(optimizer.plan)  # before the first step: nobody knows what backward will take
        assert optimizer.engine.plan.home_bytes[Home.GPU] == 0


@pytest.mark.parametrize("gpu_memory", [10**6, 30_000], ids=["all", "some"])
def test_state_at_home_on_the_gpu_is_resident(tmp_path: Path, gpu_memory: int) -> None:
    settings = config(tmp_path, gpu_memory=gpu_memory, host_memory=0)
    with OnDevice(weights(), device=SimulatedDevice(4 << 20), offload=settings) as optimizer:
        found = optimizer.metrics()
        assert 0 < found["gpu_bytes"] == found["resident_bytes"] <= gpu_memory
        assert found["resident_bytes"] + found["streamed_bytes"] == found["state_bytes"]
        assert found["resident_share"] == found["gpu_bytes"] / found["state_bytes"]
        assert (found["resident_share"] == 1.0) == (gpu_memory == 10**6)


@pytest.mark.parametrize("given", [1.0, 0.45, 0.15])
def test_auto_takes_less_where_the_gpu_gives_less(tmp_path: Path, given: float) -> None:
    """Free memory may be in pieces, or another process' by then."""
    parameters, device = weights(), SimulatedDevice(1 << 20)
    plain, needed = device.allocate, 120_000

    def allocate(nbytes: int) -> int:
        if nbytes > given * needed:
            raise offload.OffloadError(f"no memory for {nbytes} bytes")
        return plain(nbytes)

    device.allocate = allocate  # type: ignore[method-assign]
    settings = config(tmp_path, gpu_memory="auto", placement="auto")
    with OnDevice(parameters, device=device, offload=settings) as optimizer:
        train(optimizer, parameters, range(3))
        plan = optimizer.engine.plan
        assert (plan.home_bytes[Home.GPU] == plan.state_bytes) == (given == 1.0)
        assert plan.home_bytes[Home.GPU] <= given * needed
        assert plan.home_bytes[Home.GPU] > 0
        assert same(states(optimizer, parameters), on_cpu(range(3)))


def test_auto_leaves_what_the_device_wants_left(tmp_path: Path) -> None:
    parameters, device = weights(), SimulatedDevice(1 << 20)
    device.reserve_bytes = (1 << 20) - 80_000
    with OnDevice(parameters, device=device, offload=config(tmp_path, gpu_memory="auto")) as optimizer:
        train(optimizer, parameters, range(1))
        assert 0 < optimizer.engine.plan.home_bytes[Home.GPU] <= 80_000 - 4 * 12_288
        assert device.free_bytes() >= device.reserve_bytes - 2000  # sums of gradients


def test_what_the_lanes_did_is_reported(tmp_path: Path) -> None:
    parameters = weights()
    device = SimulatedDevice(bytes_per_s=1e9)
    with OnDevice(parameters, device=device, offload=config(tmp_path, gpu_memory=0)) as optimizer:
        train(optimizer, parameters, range(3))
        found, plan = optimizer.metrics(), optimizer.engine.plan
        copied = sum(s.state_bytes for s in plan.layout.subgroups if plan.updates_on_gpu(s.index))
        pushed = 2 * sum(s.numel for s in plan.layout.subgroups if not plan.updates_on_gpu(s.index))
        here = [s for s in plan.layout.subgroups if not plan.updates_on_gpu(s.index)]
        brought = sum(segment.numel * s.weight_bytes // s.numel for s in here for segment in s.segments)
        optimizer.state_for(parameters[0])
        device.mark(DeviceLane.D2H).wait()
        found = optimizer.metrics()
        assert found["lane/gpu/bytes"] == copied
        assert found["lane/d2h/bytes"] == copied + brought, "what is read between steps is of no step"
        assert copied < found["lane/h2d/bytes"] <= copied + pushed
        assert {i.lane for i in optimizer.timeline()} >= {"cpu", "gpu", "h2d", "d2h", "read:0", "write:0"}
        assert "h2d" in str(optimizer.explain())


@pytest.mark.parametrize("keep_grads", [False, True])
def test_every_thread_works_for_its_own_device(tmp_path: Path, keep_grads: bool) -> None:
    """A thread that asks another device for something makes a context there, of half a gigabyte."""
    (tmp_path / "store").mkdir()
    parameters = weights()
    device = SimulatedDevice(index=3)
    device.prepare_thread()
    settings = config(tmp_path / "store", keep_grads=keep_grads)
    optimizer = OnDevice(parameters, device=device, offload=settings)
    train(optimizer, parameters, range(3))
    optimizer.save_checkpoint(tmp_path / "checkpoint", copy=True)
    optimizer.wait_checkpoint()
    assert same(states(optimizer, parameters), on_cpu(range(3)))
    closing = threading.Thread(target=optimizer.engine._shutdown.forgotten)
    closing.start()  # as the collector would, on any thread
    closing.join()
    optimizer.close()
    assert optimizer.engine._shutdown.freed
    assert not device.pinned


@pytest.mark.parametrize(("keep_grads", "gpu_memory"), [(False, "auto"), (False, 40_000), (True, "auto")])
def test_what_a_cuda_graph_would_not_repeat_is_refused_while_it_is_captured(
    tmp_path: Path, keep_grads: bool, gpu_memory: int | str
) -> None:
    parameters = weights()
    device = SimulatedDevice()
    settings = config(tmp_path, keep_grads=keep_grads, gpu_memory=gpu_memory)
    with OnDevice(parameters, device=device, offload=settings) as optimizer:
        for step in range(3):
            device.capturing = True
            if step and not keep_grads:
                with pytest.raises(offload.ConfigError, match="CUDA graph"):
                    backward(parameters, step)
                for parameter in parameters:
                    parameter.grad = None
            for refused in (lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
                with pytest.raises(offload.ConfigError, match="CUDA graph"):
                    refused()
            device.capturing = False
            train(optimizer, parameters, range(step, step + 1))
        assert same(states(optimizer, parameters), on_cpu(range(3)))


class Replayed(torch.autograd.Function):
    """Has its gradient where it had it before, as a replayed CUDA graph has."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, new: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.new, ctx.place = new, place
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.place.copy_(ctx.new).detach(), None, None


@pytest.mark.parametrize("placement", ["cpu", "gpu"])
def test_gradients_of_replayed_graphs_leave_once_a_step(tmp_path: Path, placement: str) -> None:
    """What the second pass writes over may not have left, or is what the GPU adds to."""
    parameters, twins = weights(), weights()
    places = [torch.empty_like(p) for p in parameters]
    settings = config(tmp_path, keep_grads=False, placement=placement)

    def replay(seed: int) -> None:
        generator = torch.Generator().manual_seed(1000 + seed)
        for weight, place in zip(parameters, places, strict=True):
            new = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            Replayed.apply(weight, new, place).backward()

    with OnDevice(parameters, device=SimulatedDevice(), offload=settings) as optimizer, offload.AdamW(twins) as twin:
        for step in range(3):
            replay(step)
            with pytest.raises(offload.ConfigError, match=r"params\[0\].*same memory"):
                replay(step)
            optimizer.zero_grad()
            replay(step)
            optimizer.step()
            optimizer.zero_grad()
            backward(twins, step)
            twin.step()
            twin.zero_grad()
        assert same(states(optimizer, parameters), states(twin, twins))


PAGE = mmap.PAGESIZE


@pytest.mark.parametrize(
    ("limit", "total", "all_pinned"),
    [(None, None, True), (3 * PAGE, None, True), (None, 20 * PAGE, False), (0, None, False)],
    ids=["in one call each", "in small chunks", "not all", "nothing"],
)
def test_memory_is_pinned_as_far_as_the_system_allows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: int | None,
    total: int | None,
    all_pinned: bool,
) -> None:
    """A copy may span chunks of it, or end in what is not pinned."""
    monkeypatch.setattr(pinning, "LEAST_PIN_BYTES", PAGE)
    parameters = weights()
    device = SimulatedDevice(lazy=True, pin_limit_bytes=limit, pin_total_bytes=total)
    settings = config(tmp_path, gpu_memory=0, keep_grads=False)
    with OnDevice(parameters, device=device, offload=settings) as optimizer:
        for step in range(3):
            backward(parameters, 10 + step)  # which is added in host memory
            train(optimizer, parameters, range(step, step + 1))
        found, parts = optimizer.metrics(), optimizer.engine._parts
        arenas = [*parts.memory.arenas, parts.gradients.additions.arena]  # type: ignore[attr-defined]
        assert found["pinned_bytes"] == sum(device.pinned.values())
        assert found["pinned_bytes"] + found["unpinned_bytes"] == sum(arena.nbytes for arena in arenas if arena)
        assert all_pinned == (found["unpinned_bytes"] == 0) == (device.pageable_bytes == 0)
        assert ("cannot be pinned" in caplog.text) == ("not pinned" in str(optimizer.plan)) == (not all_pinned)
        if limit == 3 * PAGE:
            assert len(device.pinned) > len(arenas)
    assert not device.pinned


def test_wide_gradients_of_narrow_weights_are_copied_to_pinned_memory(tmp_path: Path) -> None:
    parameters, twins = weights(), weights()
    device = SimulatedDevice()
    settings = config(tmp_path, gpu_memory=0, placement="cpu")
    with OnDevice(parameters, device=device, offload=settings) as optimizer, offload.AdamW(twins) as twin:
        before = optimizer.plan.plan.host_bytes
        for parameter in (*parameters, *twins):
            parameter.grad_dtype = torch.float32
        for step in range(3):
            for owner, mine in ((optimizer, parameters), (twin, twins)):
                backward(mine, step)
                owner.step()
                owner.zero_grad()
        assert not device.pageable_bytes
        assert optimizer.plan.plan.host_bytes == before + sum(4 * parameter.numel() for parameter in parameters)
        assert same(states(optimizer, parameters), states(twin, twins))


def test_kernels_are_made_ready_when_the_session_opens(tmp_path: Path) -> None:
    parameters, device = weights(), SimulatedDevice()
    narrow, wide, exact = DtypeCode.BFLOAT16, DtypeCode.FLOAT32, EXACT.code
    with OnDevice(parameters[:2], device=device, offload=config(tmp_path)) as optimizer:
        assert device.prepared == {(narrow, narrow, exact)}
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3000))]})
        assert device.prepared == {(narrow, narrow, exact), (wide, wide, exact)}
    device = SimulatedDevice()
    with OnDevice(parameters, device=device, offload=config(tmp_path, gradient_dtype="float32")):
        assert device.prepared == {(wide, narrow, exact)}
    device = SimulatedDevice()
    compact = config(tmp_path, state_format="compact8", subgroup_numel=4096, host_memory=0, gpu_memory=0)
    named = [("p", torch.nn.Parameter(torch.ones(70, 64))), ("embed", parameters[0])]
    with OnDevice(named, device=device, offload=compact):
        assert device.prepared == {(wide, wide, COMPACT8.code), (narrow, narrow, exact)}


def test_threads_leave_cores_for_those_that_drive_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda which: set(range(48)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    lanes = GpuLanes(SimulatedDevice(), CompletionQueue())
    assert [setup.default_threads(each) for each in (NO_LANES, lanes)] == [48, 46]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert [setup.default_threads(each) for each in (NO_LANES, lanes)] == [6, 4]
    monkeypatch.setattr(os, "sched_getaffinity", lambda which: {0, 1})
    assert setup.default_threads(lanes) == 1
    lanes.close()


def test_weights_on_two_devices_are_refused() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3, device="meta"))]
    with pytest.raises(offload.ConfigError, match=r"one device|CUDA"):
        offload.AdamW(parameters)


@pytest.mark.not_overlapped("its forward pass waits for nothing, and each update interrupts whoever waits")
def test_a_step_that_is_interrupted_still_comes_before_the_next_forward(tmp_path: Path) -> None:
    parameters = weights()
    device = SimulatedDevice(lazy=True, caller_is_host=False)
    settings = config(tmp_path, gpu_memory=0)
    with OnDevice(parameters, device=device, offload=settings) as optimizer:
        train_behind(optimizer, parameters, device, range(2), clip=False)
        plain = optimizer.engine._parts.kernel.submit

        def interrupt(op: int, table: Any) -> None:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            plain(op, table)

        optimizer.engine._parts.kernel.submit = interrupt  # type: ignore[method-assign]
        kept: list[torch.Tensor] = []
        with pytest.raises(KeyboardInterrupt):
            train_behind(optimizer, parameters, device, range(2, 3), clip=False, kept=kept)
        optimizer.engine._parts.kernel.submit = plain  # type: ignore[method-assign]
        optimizer.zero_grad()
        train_behind(optimizer, parameters, device, range(3, 4), clip=False)
        assert same(states(optimizer, parameters), on_cpu(range(4), clip=False))


def test_a_gpu_without_room_for_more_goes_on_with_what_it_has(tmp_path: Path) -> None:
    def parameter(numel: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.linspace(-1, 1, numel).bfloat16())

    device = SimulatedDevice(1 << 20)
    parameters = [parameter(4096), parameter(17)]
    # The first is at home on the GPU; the second passes through slots there, which are too small for what is added.
    settings = config(tmp_path, gpu_memory=60_000, subgroup_numel=4096, placement="gpu")
    twins = [parameter(4096), parameter(17)]
    with OnDevice(parameters, device=device, offload=settings) as optimizer, offload.AdamW(twins) as twin:
        assert optimizer.engine.plan.gpu_slots
        for step in range(3):
            train(optimizer, parameters, range(step, step + 1))
            train(twin, twins, range(step, step + 1))
            if step == 1:
                optimizer.engine._parts.lanes.wait()  # type: ignore[attr-defined]
                device.allocate(device.free_bytes() - 60_000)
                with pytest.raises(offload.OffloadError, match="no memory for"):
                    optimizer.add_param_group({"params": [parameter(600), parameter(5000)]})
                assert device.free_bytes() == 60_000
        assert same(states(optimizer, parameters), states(twin, twins))


def wait_for_copies(device: SimulatedDevice) -> None:
    """Let whoever asks for a copy see at once what became of it."""
    plain = device.copy

    def copy(lane: DeviceLane, target: int, source: int, nbytes: int, piece_bytes: int = 0) -> None:
        plain(lane, target, source, nbytes, piece_bytes)
        device.mark(lane).wait()

    device.copy = copy  # type: ignore[method-assign]


def test_a_gpu_that_fails_leaves_the_checkpoint_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one whose commit hangs meanwhile, and ends when the session has long been closed."""
    reached, go_on = hung_commit(monkeypatch)
    parameters = weights()
    device = SimulatedDevice()
    optimizer = limited(OnDevice, settle_s=0.0)(parameters, device=device, offload=config(tmp_path, placement="cpu"))
    train(optimizer, parameters, range(2))
    expected = [parameter.detach().clone() for parameter in parameters]
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    assert reached.wait(60.0)
    backward(parameters, 2)
    optimizer.clip_grad_norm_(1.0)  # waits for the gradients
    device.fail_at = device.done
    wait_for_copies(device)
    with pytest.raises(offload.StepAbortedError):
        optimizer.step()
    with pytest.raises(offload.CheckpointError, match="simulated GPU has failed"):
        optimizer.engine.checkpoints.wait(60.0)
    thread = optimizer.engine._parts.saves.last.thread  # type: ignore[union-attr]
    optimizer.close()
    optimizer.zero_grad()
    go_on.set()
    assert thread is not None
    thread.join(60.0)
    fresh = weights()
    with offload.AdamW(fresh) as other:
        other.load_checkpoint(tmp_path / "checkpoint")
        assert all(torch.equal(a.detach(), b) for a, b in zip(fresh, expected, strict=True))


def test_parameters_that_the_gpu_has_no_room_for_leave_no_trace(tmp_path: Path) -> None:
    def run(refused: bool) -> list[torch.Tensor]:
        parameters, device = weights(), SimulatedDevice()
        with OnDevice(parameters, device=device, offload=config(tmp_path)) as optimizer:
            train(optimizer, parameters, range(2))
            if refused:
                plain = device.allocate

                def allocate(nbytes: int) -> int:
                    if nbytes < 1000:  # sums of gradients
                        raise offload.OffloadError(f"no memory for {nbytes} bytes")
                    return plain(nbytes)

                device.allocate = allocate  # type: ignore[method-assign]
                with pytest.raises(offload.OffloadError, match="no memory for"):
                    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(777).bfloat16())]})
                device.allocate = plain  # type: ignore[method-assign]
            more = torch.nn.Parameter(torch.ones(3000).bfloat16())
            optimizer.add_param_group({"params": [more]})
            train(optimizer, [*parameters, more], range(2, 4))
            return states(optimizer, [*parameters, more])

    assert same(run(False), run(True))


@pytest.mark.parametrize(("keep_grads", "at_once"), [(False, False), (True, False), (True, True)])
def test_a_step_that_the_gpu_fails_in_says_so(tmp_path: Path, keep_grads: bool, at_once: bool) -> None:
    """Also where the device is quick enough to fail while the step's gradients are still being asked for."""
    parameters = weights()
    device = SimulatedDevice()
    optimizer = OnDevice(parameters, device=device, offload=config(tmp_path, keep_grads=keep_grads, placement="cpu"))
    train(optimizer, parameters, range(2))
    backward(parameters, 2)
    optimizer.clip_grad_norm_(1.0)  # waits for the gradients
    device.fail_at = device.done
    if at_once:
        wait_for_copies(device)
    with pytest.raises(
        offload.StepAbortedError, match="Nothing had been updated" if at_once else "step 3 was aborted"
    ):
        optimizer.step()
    with pytest.raises(offload.SessionBrokenError):
        optimizer.step()
    optimizer.close()
    optimizer.zero_grad()


def test_gradients_that_have_left_are_forgotten_by_close(tmp_path: Path) -> None:
    parameters = weights()
    device = SimulatedDevice()
    with OnDevice(parameters, device=device, offload=config(tmp_path, keep_grads=False)) as optimizer:
        backward(parameters, 0)
        held = [weakref.ref(gradient) for _, gradient in optimizer.engine._parts.gradients.in_transit]  # type: ignore[attr-defined]
        assert held
    assert all(reference() is None for reference in held)
    optimizer.zero_grad()


def test_a_device_is_closed_by_whoever_forgets_it(tmp_path: Path) -> None:
    """Before the first step nothing is open but the device; the collector may run on the device's own thread."""
    device = SimulatedDevice()
    optimizer = OnDevice(weights(), device=device, offload=config(tmp_path, gpu_memory="auto"))
    OnDevice.next_device = None
    del optimizer
    gc.collect()
    with pytest.raises(offload.OffloadError, match="closed"):
        device.mark(DeviceLane.H2D)

    another, ended = SimulatedDevice(), threading.Event()
    raised: list[BaseException] = []

    class Closing:
        def post(self, *arguments: Any, **named: Any) -> None:
            try:
                another.close()
            except BaseException as error:
                raised.append(error)
            ended.set()

    another.report(another.mark(DeviceLane.H2D), Closing(), 1)  # type: ignore[arg-type]
    assert ended.wait(60)
    assert not raised


def test_what_cannot_be_opened_stays_closed(tmp_path: Path) -> None:
    parameters = weights()
    settings = config(tmp_path, gpu_memory="auto", host_memory=0, paths=[])
    optimizer = OnDevice(parameters, device=SimulatedDevice(1000), offload=settings)
    backward(parameters, 0)
    with pytest.raises(offload.OffloadError, match=r"GPU|host_memory"):
        optimizer.step()
    with pytest.raises(offload.SessionBrokenError, match="make a new optimizer"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("keep_grads", [False, True])
def test_the_plan_names_the_host_memory_that_is_used(tmp_path: Path, keep_grads: bool) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16)) for numel in (400_000, 10_000)]
    settings = config(
        tmp_path, host_memory="2MB", gpu_memory="2MB", subgroup_numel=65536, placement=0.3, keep_grads=keep_grads
    )
    with OnDevice(parameters[1:], device=SimulatedDevice(), offload=settings) as optimizer:
        for _ in range(3):
            train(optimizer, parameters[1:], range(1))
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))]})
        optimizer.add_param_group({"params": parameters[:1]})
        for _ in range(3):
            torch.autograd.backward(parameters, [torch.ones_like(p) for p in parameters])
        optimizer.step()
        optimizer.state_for(parameters[0])
        parts, plan = optimizer.engine._parts, optimizer.engine.plan
        arenas = [*parts.memory.arenas, parts.gradients.additions.arena]  # type: ignore[attr-defined]
        used = sum(arena.nbytes for arena in arenas if arena is not None)
        assert used <= plan.host_bytes - plan.overhead_bytes + 8 * -(-410_000 // 4096) + 65536  # block sums; rounding
        assert used > 0.9 * (plan.host_bytes - plan.overhead_bytes)


def test_weights_that_lie_elsewhere_are_refused() -> None:
    """Their addresses would be taken for those of the other memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        elsewhere = torch.nn.Parameter(torch.zeros(3, device="cuda:0"))
    with offload.AdamW(weights()) as optimizer:
        with pytest.raises(offload.ConfigError, match="all weights on cpu"):
            optimizer.add_param_group({"params": [elsewhere]})
        train(optimizer, [p for group in optimizer.param_groups for p in group["params"]], range(1))


def test_updates_begin_before_all_gradients_have_been_sent_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU updates first does not wait until copies for the last are enqueued."""
    weights = [torch.nn.Parameter(torch.zeros(1024, dtype=torch.bfloat16)) for _ in range(24)]
    device = SimulatedDevice(lazy=True)
    config = offload.OffloadConfig(host_memory="1MiB", placement="cpu", subgroup_numel=1024, threads=1)
    with OnDevice(weights, device=device, offload=config) as optimizer:
        assert len(optimizer.plan.plan.homes) == 24
        torch.autograd.backward(weights, [torch.ones_like(weight) for weight in weights])
        optimizer.step()  # in which masters are taken from the weights, too
        torch.autograd.backward(weights, [torch.ones_like(weight) for weight in weights])
        done: list[str] = []
        kernel, copy = optimizer.engine._parts.kernel, device.copy

        def submit(op: int, table: Any, plain: Any = kernel.submit) -> None:
            done.append("run")
            plain(op, table)

        def noted(lane: DeviceLane, *where: int) -> None:
            done.extend(["gradient"] * (lane is DeviceLane.LEAVING))
            copy(lane, *where)

        monkeypatch.setattr(kernel, "submit", submit)
        monkeypatch.setattr(device, "copy", noted)
        optimizer.step()
    assert done.count("run") == done.count("gradient") == 24
    ahead = [done[: place + 1].count("gradient") - done[:place].count("run") for place in range(len(done))]
    assert max(ahead) <= FETCHED_AHEAD + RESIDENT_RUNS_IN_FLIGHT  # the runs in flight have begun


def test_nothing_is_measured_while_the_caller_is_at_work(tmp_path: Path) -> None:
    """A device shared with a backward pass that has not ended would seem slower than it is."""
    device, done = SimulatedDevice(lazy=True, caller_is_host=False), []
    device.caller_work("backward", lambda: done.append(True), [])
    plain = device.update

    def update(table: Any) -> None:
        assert done
        plain(table)

    device.update = update  # type: ignore[method-assign]
    with OnDevice(weights(), device=device, offload=config(tmp_path, placement="auto")):
        assert done


def watched_copies(device: Any) -> list[Any]:
    """Return what grows with each copy that is put on a device's lanes."""
    found: list[Any] = []

    def watch(plain: Callable[..., None]) -> Callable[..., None]:
        return lambda *how: (found.append(how), plain(*how))[1]

    for name in ("copy", "copy_pieces"):
        setattr(device, name, watch(getattr(device, name)))
    return found


def test_gradients_of_streamed_state_are_sent_for_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed subgroups run as soon as they are there, before others that come first in the step's order."""
    parameters = weights()
    settings = config(tmp_path, gpu_memory=0, placement="cpu")
    with OnDevice(parameters, device=SimulatedDevice(), offload=settings) as optimizer:
        train(optimizer, parameters, range(2))
        monkeypatch.setattr("offload.gradients.gpu.FETCHED_AHEAD", 0)
        gradients, late = optimizer.engine._parts.gradients, []
        plain = gradients.fetch_for_visit
        copies = watched_copies(optimizer.engine._parts.lanes.device)

        def bring(subgroup: int) -> None:
            before = len(copies)
            plain(subgroup)
            late.extend([subgroup] * (len(copies) > before))

        monkeypatch.setattr(gradients, "fetch_for_visit", bring)
        cached = set(optimizer.engine._parts.machine.slots)
        train(optimizer, parameters, range(2, 3))
        plan = optimizer.engine.plan
        streamed = {s.index for s in plan.layout.subgroups if not plan.is_resident(s.index)}
        assert streamed - cached
        assert not (streamed - cached) & set(late)


@pytest.mark.parametrize(
    ("lane", "dtype", "options", "said"),
    [
        (DeviceLane.LEAVING, torch.float32, {"placement": "cpu"}, "copy failed on gpu path d2h"),
        (DeviceLane.LEAVING, torch.bfloat16, {"placement": "cpu"}, "update failed on gpu path d2h"),
        (DeviceLane.H2D, torch.bfloat16, {"placement": "cpu"}, "copy failed on gpu path h2d"),
        (DeviceLane.D2H, torch.bfloat16, {"placement": "gpu"}, "copy failed on gpu path d2h"),
    ],
)
def test_a_lane_that_hangs_is_named(
    lane: DeviceLane,
    dtype: torch.dtype,
    options: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offload.plan.budget.WEIGHT_SLOTS", 1)
    device, parameters = SimulatedDevice(lazy=True), weights(dtype=dtype)
    chosen = config(tmp_path, gpu_memory=0, host_memory=12 * 20_000, **options)
    with OnDevice(parameters, device=device, offload=chosen) as optimizer:
        train(optimizer, parameters, range(1))
        report, executor = device.report, optimizer.engine._parts.executor

        def silent(mark: Any, queue: Any, op: int) -> None:
            if mark.lane is not lane:
                report(mark, queue, op)

        monkeypatch.setattr(device, "report", silent)
        executor._stall_s = 1.0  # others are through by then
        with pytest.raises(offload.StepAbortedError, match=said):
            train(optimizer, parameters, range(1, 3))
