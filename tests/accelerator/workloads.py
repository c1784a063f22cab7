"""Trainings on the test accelerator that have to end with the same bits as on the CPU, whatever lane dawdles.

A seed says who does. A stream that dawdles does nothing before somebody waits for it: what should have waited, and does
not, comes first for certain, without any sleep. Of the first seeds each has one stream dawdle; of the others
several, and the rest take random times.

The models are small, and so are the limits at which the product collects, cuts or waits (`SMALL`): all of its ways
of moving data are taken.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerator import late
from mistakes import Host, replaced
from torch.nn import functional

import offload
from offload import backends
from offload.engine import gpu_gradients, pieces
from offload.integrations.deepspeed.transfers import Transfers
from offload.optim import routes
from offload.plan import budget
from offload.protocols import LANES, DeviceLane

SMALL = (
    (gpu_gradients, "LARGE_BYTES", 7000),
    (gpu_gradients, "BUCKET_COUNT", 12),
    (routes, "MAX_IN_TRANSIT_BYTES", 20_000),
    (pieces, "LEAST_COPY_BYTES", 6000),
    (budget, "LEAST_COPY_BYTES", 6000),
)
"""Limits of the product, as they have to be for a model of a few hundred KiB to come to them."""

WIDTH, DEPTH, BATCH = 64, 5, 4
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 1e-2}

USERS = "user"
"""Streams that a training makes."""

STREAMS: tuple[DeviceLane | str, ...] = (DeviceLane.CALLER, *LANES, USERS)


class Wrong(Exception):
    """A training has ended otherwise than on the CPU."""


class Pace:
    """Who dawdles, by a seed.

    Attributes:
        dawdling: Streams that do nothing before somebody waits for them.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        if seed < len(STREAMS):
            self.dawdling, self._most_us = {STREAMS[seed]}, 0
        else:
            self.dawdling = {stream for stream in STREAMS if self._random.random() < 0.35}
            self._most_us = 200
        self._paced: list[Any] = []

    def set(self, stream: Any, name: DeviceLane | str) -> None:
        """Have a stream dawdle, or not."""
        self._paced.append(stream)
        late.dawdle(stream, name in self.dawdling)
        late.delays(0, 0 if name in self.dawdling else self._most_us, self._random.randrange(1 << 30), stream)

    def user(self) -> Any:
        """Return a new stream of the user's."""
        stream = torch.Stream(device=DEVICE)
        self.set(stream, USERS)
        return stream

    def end(self) -> None:
        """Have no stream dawdle any more, and wait for all."""
        for stream in self._paced:
            late.dawdle(stream, False)
            late.delays(0, 0, 0, stream)
        torch.accelerator.synchronize()


DEVICE = "late:0"


def load() -> None:
    """Have torch, the product, and its part for DeepSpeed know the test accelerator; for the rest of the process."""
    late.load()
    backends.BACKENDS["late"] = backends.Backend(pin=late.pin, unpin=late.unpin)
    deepspeed = ModuleType("deepspeed.accelerator")  # all of it that transfers ask for
    deepspeed.get_accelerator = lambda: torch.get_device_module("late")  # type: ignore[attr-defined]
    sys.modules["deepspeed.accelerator"] = deepspeed


class Layer(torch.nn.Module):
    """A matrix and as many small vectors as make a kernel that gathers them pay."""

    matrix: torch.Tensor
    bias: torch.Tensor
    gain: torch.Tensor
    shift: torch.Tensor
    twist: torch.Tensor
    lift: torch.Tensor
    tilt: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self.matrix, self.bias).relu()
        return x + torch.addcmul(self.lift, torch.addcmul(self.shift, y, self.gain), self.twist) * self.tilt


class Net(torch.nn.Module):
    """Layers of a matrix and small vectors, whose gradients depend on weights."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(7)

        def drawn(*size: int) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.randn(size, generator=generator, device="cpu") / 8).bfloat16())

        self.layers = torch.nn.ModuleList()
        for _ in range(DEPTH):
            layer = Layer()
            layer.matrix = drawn(WIDTH, WIDTH)
            for name in ("bias", "gain", "shift", "twist", "lift", "tilt"):
                setattr(layer, name, drawn(WIDTH))
            self.layers.append(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().sum() / 64


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 + number)
    return torch.randn((BATCH, WIDTH), generator=generator, device="cpu").bfloat16()


@dataclass
class Run:
    """One training under way.

    Attributes:
        workload: Which.
        pace: Who dawdles; None on the CPU.
        folder: For paths.
        found: What it ends with, by name.
    """

    workload: Workload
    pace: Pace | None
    folder: Path
    found: dict[str, torch.Tensor] = field(default_factory=dict)
    blocks: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    @property
    def device(self) -> str:
        return "cpu" if self.pace is None else DEVICE

    def model(self) -> Net:
        return Net().to(self.device)

    def optimizer(self, parameters: Any) -> offload.AdamW:
        config = dict(self.workload.config)
        if self.pace is None:
            config = {name: config[name] for name in ("state_format",) if name in config}
        elif config.pop("on_paths", False):
            config["paths"] = [self.folder]
        optimizer = offload.AdamW(parameters, offload=offload.OffloadConfig(threads=1, **config), **SETTINGS)
        device = optimizer._late.device
        if self.pace is not None and device is not None:
            for lane in LANES:
                self.pace.set(device.stream(lane), lane)
            self.pace.set(torch.accelerator.current_stream(), DeviceLane.CALLER)
        return optimizer

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Note what a tensor holds now."""
        self.found[name] = tensor.detach().cpu().clone()

    def keep_all(self, model: torch.nn.Module, optimizer: offload.AdamW, when: str = "end") -> None:
        for name, parameter in model.named_parameters():
            self.keep(f"{when} {name}", parameter)
            for tensor, value in optimizer.state_for(parameter).items():
                self.keep(f"{when} {name} {tensor}", value)

    def working(self, stream: Any) -> Any:
        """Work on a stream of the user's, if there is one."""
        return contextlib.nullcontext() if stream is None else Host.working_on(stream)

    def user(self) -> Any:
        return None if self.pace is None else self.pace.user()

    def claim(self, sizes: Sequence[int]) -> None:
        """Take memory of these sizes, which should be free, and fill it."""
        if self.pace is not None:
            for number, size in enumerate(sizes):
                value = number % 100 + 1
                self.blocks.append((torch.full((size,), value, dtype=torch.uint8, device=DEVICE), value))

    def check_claimed(self) -> None:
        for tensor, value in self.blocks:
            if not bool((tensor.cpu() == value).all()):
                raise Wrong("somebody else's memory has been written to")


@dataclass(frozen=True)
class Workload:
    """A training.

    Attributes:
        name: Its name.
        train: What it does.
        config: Of the optimizer on the device; `on_paths` for a folder of its own.
    """

    name: str
    train: Callable[[Run], None]
    config: dict[str, Any]


# What they do


def _passes(run: Run, model: Net, step: int, count: int = 2) -> None:
    for number in range(count):
        model(batch(10 * step + number).to(run.device)).backward()


def _step(run: Run, optimizer: offload.AdamW, *, clip: bool = True) -> None:
    if clip:
        optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()


def plain(run: Run) -> None:
    """Two passes a step; it is clipped but once, as whoever clips waits for gradients."""
    model = run.model()
    with run.optimizer(model.parameters()) as optimizer:
        for step in range(3):
            _passes(run, model, step)
            _step(run, optimizer, clip=step != 1)
        run.keep_all(model, optimizer)


def streams(run: Run) -> None:
    """Each pass on another stream, steps there or outside."""
    model = run.model()
    mine = [run.user(), run.user()]
    with run.optimizer(model.parameters()) as optimizer:
        for step in range(3):
            for number, stream in enumerate(mine):
                with run.working(stream):
                    model(batch(10 * step + number).to(run.device)).backward()
            with run.working(mine[0]) if step == 1 else contextlib.nullcontext():
                _step(run, optimizer, clip=step != 1)
        run.keep_all(model, optimizer)


def two_streams(run: Run) -> None:
    """Each pass with its layers on two streams, so that backward makes gradients on two."""
    model = run.model()
    first, second = run.user(), run.user()
    with run.optimizer(model.parameters()) as optimizer:
        for step in range(3):
            x = batch(step).to(run.device)
            for number, layer in enumerate(model.layers):
                with run.working(first if number % 2 else second):
                    x = layer(x)
            (x.float().sum() / 64).backward()
            _step(run, optimizer, clip=step != 1)
        run.keep_all(model, optimizer)


def forward(run: Run) -> None:
    """Steps that go on into the next forward pass."""
    model = run.model()
    with run.optimizer(model.parameters()) as optimizer:
        if run.pace is not None:
            optimizer.overlap_forward(model)
        for step in range(4):
            _passes(run, model, step, 1)
            _step(run, optimizer, clip=step % 2 == 0)
        optimizer.finish()
        run.keep_all(model, optimizer)


def state(run: Run) -> None:
    """State is taken out and put back."""
    model = run.model()
    with run.optimizer(model.parameters()) as optimizer:
        for step in range(3):
            _passes(run, model, step, 1)
            _step(run, optimizer, clip=False)
            found = optimizer.state_dict()
            for number, entry in found["state"].items():
                for name, value in entry.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        run.keep(f"{step} {number} {name}", value)
                        if name != "master":
                            value.mul_(0.5)
            optimizer.load_state_dict(found)
        run.keep_all(model, optimizer)


def added(run: Run) -> None:
    """Parameters that come later, for which there are to be larger buffers."""
    model, more = run.model(), run.model()
    with run.optimizer(model.parameters()) as optimizer:
        for step in range(3):
            _passes(run, model, step, 1)
            if step:
                _passes(run, more, step, 1)
            _step(run, optimizer, clip=step == 1)
            if not step:
                lanes = optimizer.engine._parts.gpu
                before = [] if lanes is None else [tensor.numel() for tensor in lanes.device._memory.values()]
                optimizer.add_param_group({"params": [*more.parameters()]})
                run.claim(before)
        run.keep_all(model, optimizer)
        run.keep_all(more, optimizer, "added")
    run.check_claimed()


def ending(run: Run) -> None:
    """The end comes at once behind the last step."""
    model = run.model()
    optimizer = run.optimizer(model.parameters())
    for step in range(2):
        _passes(run, model, step, 1)
        _step(run, optimizer, clip=False)
    lanes = optimizer.engine._parts.gpu
    before = [] if lanes is None else [tensor.numel() for tensor in lanes.device._memory.values()]
    optimizer.close()
    run.claim(before)
    for name, parameter in model.named_parameters():
        run.keep(name, parameter)
    run.check_claimed()


def transfers(run: Run) -> None:
    """DeepSpeed's way of gradients to host memory."""
    moved, source, streams = Transfers(), batch(0).to(run.device), [run.user(), run.user()]
    targets = [moved.buffer(source) for _ in range(3)]
    for number in range(3):
        for target, stream in zip(targets, (None, *streams), strict=True):
            made = source * (number + 1)
            source = source + 1
            if run.pace is None:
                target.copy_(made.view(-1))
                continue
            with run.working(stream):
                moved.start(target, made.view(-1))
            del made
        moved.wait()
        for target in targets:
            run.keep(f"{number}", target)


def host(run: Run) -> None:
    """What users do by themselves."""
    x = torch.zeros(4096, device=run.device)
    staging = torch.zeros(4096, device="cpu", pin_memory=run.pace is not None)
    stream = run.user()
    for number in range(4):
        values = torch.full((4096,), float(number), device="cpu")
        if stream is None:
            x = x + values
            run.keep(f"{number}", x)
            run.keep(f"{number} first", x[:1])
            continue
        there = torch.empty(4096, device=run.device)
        Host.upload(staging, values, there)
        with run.working(stream):
            x = x + there
        Host.used_on(there, stream)
        del there
        torch.zeros(4096, device=run.device)
        run.keep(f"{number}", Host.download(staging, x))
        run.keep(f"{number} first", torch.tensor([Host.first(x)], device="cpu"))


PLAIN = {"gpu_memory": 0, "subgroup_numel": 2048, "staging_memory": "120KiB"}

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("departing", plain, {**PLAIN, "placement": 0.5, "keep_grads": False}),
        Workload("departing-cpu", plain, {**PLAIN, "placement": "cpu", "keep_grads": False}),
        Workload("departing-gpu", plain, {**PLAIN, "placement": "gpu", "keep_grads": False}),
        Workload("kept", plain, {**PLAIN, "placement": 0.5}),
        Workload("kept-gpu", plain, {**PLAIN, "placement": "gpu"}),
        Workload("kept-cpu", plain, {**PLAIN, "placement": "cpu"}),
        Workload("home", plain, {"subgroup_numel": 2048, "gpu_memory": "150KiB", "placement": 0.5}),
        Workload("auto", plain, {"subgroup_numel": 2048}),
        Workload(
            "backward",
            plain,
            {**PLAIN, "placement": "cpu", "keep_grads": False, "overlap": "backward", "host_memory": 0, "on_paths": True},
        ),
        Workload("streams", streams, {**PLAIN, "placement": 0.5}),
        Workload("streams-departing", streams, {**PLAIN, "placement": 0.5, "keep_grads": False}),
        Workload("two-streams", two_streams, {**PLAIN, "placement": 0.5, "keep_grads": False}),
        Workload("forward", forward, {**PLAIN, "placement": 0.5}),
        Workload("forward-departing", forward, {**PLAIN, "placement": 0.5, "keep_grads": False}),
        Workload("forward-cpu", forward, {**PLAIN, "placement": "cpu", "keep_grads": False}),
        Workload("state", state, {**PLAIN, "placement": 0.5}),
        Workload("state-home", state, {"subgroup_numel": 2048, "gpu_memory": "150KiB", "placement": "gpu"}),
        Workload("added", added, {**PLAIN, "placement": 0.5, "keep_grads": False}),
        Workload("ending", ending, {**PLAIN, "placement": "gpu"}),
        Workload("transfers", transfers, {}),
        Workload("host", host, {}),
    )
}

_references: dict[str, dict[str, torch.Tensor]] = {}


def _trained(workload: Workload, pace: Pace | None) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(workload, pace, Path(folder))
        workload.train(run)
    return run.found


@contextlib.contextmanager
def _small_limits() -> Iterator[None]:
    with contextlib.ExitStack() as limits:
        for module, name, value in SMALL:
            limits.enter_context(replaced(module, name, value))
        yield


def reference(workload: Workload) -> dict[str, torch.Tensor]:
    """Return what a training ends with on the CPU."""
    if workload.name not in _references:
        _references[workload.name] = _trained(workload, None)
    return _references[workload.name]


def run(name: str, seed: int, plant: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
    """Run a training on the device.

    Args:
        name: Of the workload.
        seed: Says who dawdles.
        plant: Makes a mistake meanwhile.

    Raises:
        Wrong: It has ended otherwise than on the CPU.
        Exception: It has not ended well.
    """
    workload = WORKLOADS[name]
    wanted = reference(workload)
    pace = Pace(seed)
    with _small_limits(), plant() if plant is not None else contextlib.nullcontext():
        try:
            found = _trained(workload, pace)
        finally:
            pace.end()
    for key, tensor in wanted.items():
        other = found[key]
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise Wrong(f"{key}: {other.shape} {other.dtype}")
        if not torch.equal(other.view(torch.uint8), tensor.view(torch.uint8)):
            nan = " (NaN)" if other.is_floating_point() and bool(other.isnan().any()) else ""
            raise Wrong(f"{key}: other bits{nan}")
