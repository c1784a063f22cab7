"""Trainings whose gradients are given, so that every device must end with the same bits: what users do with a GPU.

On the simulated device, on torch's test accelerator, and on real ones with `-m gpu`; on the second one of each, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import late
from devices import CUDA, LATE, LATE_FULL, the_device
from limited import limited
from mirror import Mirror, same_bits
from own_process import in_own_process
from simulated import OnDevice
from world import SimulatedDevice

import offload
from offload.backends import working_on

SIZES = ((70, 40), (30_000,), (17,), (25, 100), (), (4096,))
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


class Place:
    """A device for weights, one of torch's or a simulated one.

    Args:
        name: "simulated", or torch's name of a device.
        simulated: The simulated device, if not one like any other.

    Attributes:
        large: Whether it is meant for large models.
    """

    def __init__(self, name: str, simulated: SimulatedDevice | None = None) -> None:
        self.real = name != "simulated"
        self.large = name.startswith("cuda")
        self.simulated = simulated
        self.device = the_device(name) if self.real else torch.device("cpu")
        self.limits: dict[str, Any] = {}

    def optimizer(
        self, parameters: Sequence[torch.nn.Parameter], bytes_per_s: float | None = None, **config: Any
    ) -> offload.AdamW:
        """Return an optimizer; `bytes_per_s` is the simulated link's rate."""
        settings = offload.OffloadConfig(**config)
        if self.real:
            return limited(offload.AdamW, **self.limits)(parameters, offload=settings, **SETTINGS)
        device = self.simulated or SimulatedDevice(1 << 28, delay_s=1e-4, bytes_per_s=bytes_per_s)
        return limited(OnDevice, **self.limits)(parameters, device=device, offload=settings, **SETTINGS)

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Make a stream of the user's current: everything before comes before it, and it before everything after."""
        if not self.real:
            return contextlib.nullcontext()
        return _joined(torch.Stream(self.device))

    def pause(self, cycles: int) -> None:
        """Keep the current stream busy."""
        if self.large:
            with torch.cuda.device(self.device):
                torch.cuda._sleep(cycles)
        elif self.real:
            late.dawdle(torch.accelerator.current_stream(self.device))


@contextlib.contextmanager
def _joined(stream: torch.Stream) -> Iterator[None]:
    with torch.accelerator.device_index(stream.device.index):
        outside = torch.accelerator.current_stream()
        stream.wait_stream(outside)
        with working_on(stream):
            yield
        outside.wait_stream(stream)


PLACES = [LATE[0], LATE_FULL[1], *CUDA]
IN_WORKLOADS = pytest.mark.parametrize("place", [*LATE_FULL, *CUDA], indirect=True)
"""For what `accelerator/workloads.py` trains on the test accelerator, too."""


@pytest.fixture(params=PLACES, name="place")
def _place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param)


class Given(torch.nn.Module):
    """A model whose weights' gradients are its arguments, exactly, in whatever order a device adds up."""

    def __init__(self, weights: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        parts = [(weight * gradient).float().sum() for weight, gradient in zip(self.weights, given, strict=True)]
        return torch.stack(parts).sum()


class Slowed(torch.autograd.Function):
    """The identity, whose backward keeps the device busy first."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, place: Place, cycles: int) -> torch.Tensor:
        ctx.place, ctx.cycles = place, cycles
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.place.pause(ctx.cycles)
        return gradient, None, None


def drawn(seed: int, sizes: Sequence[tuple[int, ...]] = SIZES) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    return [torch.randn(size, generator=generator, device="cpu").bfloat16() for size in sizes]


def weights(place: Place, sizes: Sequence[tuple[int, ...]] = SIZES) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(tensor.to(place.device)) for tensor in drawn(0, sizes)]


def train(
    place: Place,
    optimizer: offload.AdamW,
    loss_of: Callable[..., torch.Tensor],
    steps: int,
    sizes: Sequence[tuple[int, ...]] = SIZES,
) -> None:
    for step in range(steps):
        given = [tensor.to(place.device) for tensor in drawn(1000 + step, sizes)]
        loss_of(*given).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def check(
    optimizer: offload.AdamW,
    parameters: list[torch.nn.Parameter],
    steps: int,
    sizes: Sequence[tuple[int, ...]] = SIZES,
) -> None:
    """Compare with the reference."""
    start = [torch.nn.Parameter(tensor) for tensor in drawn(0, sizes)]
    mirror = Mirror(start, **SETTINGS)
    for step in range(steps):
        given = drawn(1000 + step, sizes)
        mirror.step(given, min(1.0, 1.0 / (mirror.norm(given) + 1e-6)))
    mirror.assert_same(optimizer, parameters)


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    chosen = {"host_memory": 300_000, "gpu_memory": 100_000, "subgroup_numel": 4096, "placement": 0.5, "threads": 1}
    return {**chosen, "paths": [folder], **changes}


@IN_WORKLOADS
@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_streams_of_the_users(place: Place, tmp_path: Path, keep_grads: bool, whole: bool) -> None:
    """Forward and backward on a stream of the user's, the step there as well or outside."""
    parameters = weights(place)
    model = Given(parameters)
    with place.optimizer(parameters, **config(tmp_path, keep_grads=keep_grads)) as optimizer:
        for step in range(4):
            with place.stream():
                given = [tensor.to(place.device) for tensor in drawn(1000 + step)]
                place.pause(20_000_000)  # so that whoever does not wait for this stream comes too early
                model(*given).backward()
                if whole:
                    optimizer.clip_grad_norm_(1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            if not whole:
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        check(optimizer, parameters, 4)


@pytest.mark.slow
@pytest.mark.parametrize("keep_grads", [True, False])
def test_a_compiled_model(place: Place, tmp_path: Path, keep_grads: bool) -> None:
    parameters = weights(place)
    torch.compiler.reset()
    model = torch.compile(Given(parameters), backend="inductor" if place.large else "aot_eager")
    with place.optimizer(parameters, **config(tmp_path, keep_grads=keep_grads)) as optimizer:
        train(place, optimizer, model, 3)
        check(optimizer, parameters, 3)


@pytest.mark.parametrize("place", ["simulated", *PLACES], indirect=True)
@pytest.mark.parametrize("keep_grads", [True, False])
@pytest.mark.parametrize("longer", [True, False])
def test_backward_and_the_link(place: Place, tmp_path: Path, keep_grads: bool, longer: bool) -> None:
    """A backward pass that makes gradients more slowly than the link takes them, or faster."""
    sizes = ((1 << 22,),) * 12 if place.large else ((1 << 13,),) * 12
    parameters = weights(place, sizes)
    model = Given(parameters)

    def loss_of(*given: torch.Tensor) -> torch.Tensor:
        plain = model(*given)
        if not longer:
            return plain
        # Each weight's gradient has to wait for a node of its own.
        parts = [
            (Slowed.apply(weight, place, 3_000_000) * gradient).float().sum()
            for weight, gradient in zip(parameters, given, strict=True)
        ]
        return torch.stack(parts).sum()

    room = sum(12 * size[0] for size in sizes)
    settings = config(
        tmp_path, keep_grads=keep_grads, host_memory=room, gpu_memory=0, subgroup_numel=sizes[0][0] // 2
    )
    with place.optimizer(parameters, bytes_per_s=None if longer else 2e7, **settings) as optimizer:
        train(place, optimizer, loss_of, 3, sizes)
        check(optimizer, parameters, 3, sizes)


@pytest.mark.slow
@IN_WORKLOADS
@pytest.mark.parametrize("gpu_memory", [0, "auto"])
def test_a_large_state(place: Place, tmp_path: Path, gpu_memory: int | str) -> None:
    """On a GPU more than a gibibyte, where addresses and counts outgrow 32 bits of bytes and pins come in pieces."""
    each, tensors = ((1 << 24) + 12_345, 7) if place.large else ((1 << 16) + 345, 7)
    parameters = [
        torch.nn.Parameter(torch.zeros(each, dtype=torch.bfloat16, device=place.device)) for _ in range(tensors)
    ]
    plain = [torch.nn.Parameter(torch.zeros(each, dtype=torch.bfloat16, device="cpu")) for _ in range(tensors)]
    settings = {"gpu_memory": gpu_memory, "keep_grads": False, "placement": 0.5}
    with place.optimizer(parameters, **settings) as optimizer, offload.AdamW(plain, **SETTINGS) as reference:
        for step in range(2):
            given = drawn(step, ((each,),) * tensors)
            torch.autograd.backward(parameters, [tensor.to(place.device) for tensor in given])
            torch.autograd.backward(plain, given)
            for each_one in (optimizer, reference):
                each_one.clip_grad_norm_(1.0)
                each_one.step()
                each_one.zero_grad()
        for mine, theirs in zip(parameters, plain, strict=True):
            assert same_bits(mine.detach().cpu(), theirs.detach())
            state, wanted = optimizer.state_for(mine), reference.state_for(theirs)
            assert all(same_bits(state[name], wanted[name]) for name in ("master", "exp_avg", "exp_avg_sq"))


def train_on(place: Place, folder: Path) -> None:
    parameters = weights(place)
    with place.optimizer(parameters, **config(folder, keep_grads=False)) as optimizer:
        train(place, optimizer, Given(parameters), 3)
        check(optimizer, parameters, 3)


def has_a_context_elsewhere(folder: Path) -> bool:
    train_on(Place("cuda:1"), folder)
    return bool(torch._C._cuda_hasPrimaryContext(0))


@pytest.mark.gpu
def test_the_first_device_is_left_alone(tmp_path: Path) -> None:
    """A context there would take half a gigabyte from whoever works on it."""
    the_device("cuda:1")
    assert not in_own_process(has_a_context_elsewhere, tmp_path)


@pytest.mark.late(shared=True)
def test_nothing_is_put_on_streams_of_another_device(tmp_path: Path) -> None:
    def put() -> list[int]:
        return [count for device, _, count, _ in late.streams() if device == 0]

    before = put()
    train_on(Place("late:1"), tmp_path)
    assert put() == before
