"""Trainings on the test accelerator that have to end with the same bits as on the CPU, whatever lane dawdles.

A seed says who does. A stream that dawdles does nothing before somebody waits for it: what should have waited, and
does not, comes first for certain, without any sleep. With each of the first seeds one stream does not dawdle; with
each of the next ones one alone does; with the others several do, and the rest take random times.

The models are small, and so are the limits at which the product collects, cuts or waits (`SMALL`): all of its ways
of moving data are taken.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from limited import limited
from settling import settle
from torch.nn import functional

import offload
from accelerator import late
from accelerator.mistakes import Host, replaced
from offload import backends
from offload.device import accelerator, lanes, pieces
from offload.device.accelerator import AcceleratorDevice
from offload.integrations.deepspeed.gradients import Transfers
from offload.kernels.gpu import ArgumentTable, Uploads
from offload.plan import budget
from offload.protocols import LANES, DeviceLane

SMALL = (
    (lanes, "HIDDEN_PIECE_BYTES", 1000),
    (pieces, "LEAST_COPY_BYTES", 6000),
    (budget, "LEAST_COPY_BYTES", 6000),
    (accelerator, "REBASE_S", 0.02),
    (accelerator, "LEAST_RESERVE_BYTES", 192 << 10),
)
"""Limits of the product, as they have to be for a model of a few hundred KiB to come to them."""

WIDTH, DEPTH, BATCH = 64, 5, 4
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 1e-2}

USERS = ("first", "second")
"""Streams that a training makes."""

STREAMS: tuple[DeviceLane | str, ...] = (DeviceLane.CALLER, *LANES, *USERS)

DEVICES = 2


class Wrong(Exception):
    """A training has ended otherwise than on the CPU."""


class Pace:
    """Who dawdles, by a seed: streams that do nothing before somebody waits for them."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self._random = random.Random(seed)
        count, self._most_us = len(STREAMS), 0
        if seed < count:
            self.dawdling = {*STREAMS} - {STREAMS[seed]}
        elif seed < 2 * count:
            self.dawdling = {STREAMS[seed - count]}
        else:
            self.dawdling = {stream for stream in STREAMS if self._random.random() < 0.5}
            self._most_us = 200
        self._paced: list[Any] = []
        self._users = 0

    def set(self, stream: Any, name: DeviceLane | str) -> None:
        """Have a stream dawdle, or not."""
        self._paced.append(stream)
        late.dawdle(stream, name in self.dawdling)
        late.delays(0, 0 if name in self.dawdling else self._most_us, self._random.randrange(1 << 30), stream)

    def user(self) -> Any:
        """Return a new stream of the user's."""
        stream = torch.Stream(device=self.device)
        self.set(stream, USERS[self._users % 2])
        self._users += 1
        return stream

    def end(self) -> None:
        """Have no stream dawdle any more, and wait for all."""
        for stream in self._paced:
            late.dawdle(stream, False)
            late.delays(0, 0, 0, stream)
        for number in range(DEVICES):
            torch.accelerator.synchronize(number)


def load() -> None:
    """Have torch, the product, and its part for DeepSpeed know the test accelerator; for the rest of the process."""
    late.load(DEVICES)
    backends.BACKENDS["late"] = backends.Backend(pin=late.pin, unpin=late.unpin)
    AcceleratorDevice.shared = {}  # which orders more than there has to be
    deepspeed = ModuleType("deepspeed.accelerator")  # all of it that transfers ask for
    deepspeed.get_accelerator = lambda: torch.get_device_module("late")
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


VECTORS = ("bias", "gain", "shift", "twist", "lift", "tilt")


class Net(torch.nn.Module):
    """Layers of a matrix and small vectors, whose gradients depend on weights."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 7) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(seed)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(DEPTH))
        for layer in self.layers:
            for name in ("matrix", *VECTORS):
                size = (WIDTH, WIDTH) if name == "matrix" else (WIDTH,)
                drawn = torch.randn(size, generator=generator, device="cpu") / 8
                setattr(layer, name, torch.nn.Parameter(drawn.to(dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().sum() / 64


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 + number)
    return torch.randn((BATCH, WIDTH), generator=generator, device="cpu").bfloat16()


def working(stream: Any) -> AbstractContextManager[Any]:
    """Work on a stream of the user's, if there is one: see `Host.working_on`."""
    return contextlib.nullcontext() if stream is None else Host.working_on(stream)


@dataclass
class Run:
    """One training under way; on the CPU nobody dawdles (`pace` is None)."""

    workload: Workload
    pace: Pace | None
    folder: Path
    found: dict[str, torch.Tensor] = field(default_factory=dict)
    """What it ends with, by name."""
    blocks: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    @property
    def device(self) -> str:
        return "cpu" if self.pace is None else self.pace.device

    def model(self) -> Net:
        return Net().to(self.device)

    def optimizer(self, parameters: Any) -> offload.AdamW:
        config = dict(self.workload.config)
        if self.pace is None:
            config = {name: config[name] for name in ("state_format",) if name in config}
        elif config.pop("on_paths", False):
            config["paths"] = [self.folder]
        limits = {"bucket_bytes": 7000, "bucket_count": 12, "in_transit_bytes": self.workload.transit_bytes}
        kind = limited(offload.AdamW, **limits)
        optimizer = kind(parameters, offload=offload.OffloadConfig(threads=1, **config), **SETTINGS)
        device = optimizer._holder.device
        if self.pace is not None and device is not None:
            for lane in LANES:
                self.pace.set(device.stream(lane), lane)
        return optimizer

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Note what a tensor holds now."""
        self.found[name] = tensor.detach().cpu().clone()

    def keep_all(self, model: torch.nn.Module, optimizer: offload.AdamW, when: str = "end") -> None:
        for name, parameter in model.named_parameters():
            self.keep(f"{when} {name}", parameter)
        self.keep_state(model, optimizer, when)

    def keep_state(self, model: torch.nn.Module, optimizer: offload.AdamW, when: str) -> None:
        for name, parameter in model.named_parameters():
            for tensor, value in optimizer.state_for(parameter).items():
                self.keep(f"{when} {name} {tensor}", value)

    @cached_property
    def users(self) -> list[Any]:
        """Two streams of the user's; on the CPU there are none."""
        return [None if self.pace is None else self.pace.user() for _ in USERS]

    @contextlib.contextmanager
    def beside(self, stream: Any) -> Iterator[None]:
        """Work on a stream of the user's behind all work outside so far, where nothing waits for it then."""
        if stream is not None:
            stream.wait_stream(self.outside)
        with contextlib.nullcontext() if stream is None else stream:
            yield

    @property
    def outside(self) -> Any:
        """The stream that is current where no other is."""
        return torch.get_device_module(self.device).default_stream(self.device)

    def scribble(self, model: torch.nn.Module, stream: Any) -> None:
        """Take memory of the gradients' sizes on a stream, without waiting, for as long as the training lasts."""
        if stream is not None:
            with stream:
                self.claim([parameter.nbytes for parameter in model.parameters()])

    def claim(self, sizes: Sequence[int]) -> None:
        """Take memory of these sizes, which should be free, and fill it."""
        if self.pace is not None:
            for number, size in enumerate(sizes):
                value = number % 100 + 1
                self.blocks.append((torch.full((size,), value, dtype=torch.uint8, device=self.device), value))

    def check_claimed(self) -> None:
        if self.pace is not None:
            torch.accelerator.synchronize(self.device)
        for tensor, value in self.blocks:
            if not bool((tensor.cpu() == value).all()):
                raise Wrong("memory of somebody else has been written to")


@dataclass(frozen=True)
class Workload:
    """A training.

    Attributes:
        name: Its name.
        train: What it does.
        config: Of the optimizer on the device; `on_paths` for a folder of its own.
        device: On which; the first one is current.
        device_bytes: How much memory it has.
        transit_bytes: Gradients that are held while they leave; beyond that, backward follows those that leave.
    """

    name: str
    train: Callable[[Run], None]
    config: dict[str, Any]
    device: str = "late:0"
    device_bytes: int = 1 << 30
    transit_bytes: int = 20_000


# What they do

StepOf = Callable[[Run, Net, offload.AdamW, int], None]
"""What is done in one step of a training."""


def _passes(run: Run, model: Net, step: int, count: int = 2) -> None:
    for number in range(count):
        model(batch(10 * step + number).to(run.device)).backward()


def _step(run: Run, optimizer: offload.AdamW, *, clip: bool = True) -> None:
    if clip:
        norm = optimizer.clip_grad_norm_(0.1)
        run.keep(f"norm {sum(name.startswith('norm') for name in run.found)}", torch.as_tensor(norm))
    optimizer.step()
    optimizer.zero_grad()


def in_steps(count: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[StepOf], Callable[[Run], None]]:
    """Make a training of what is done in each of so many steps."""

    def of(step_of: StepOf) -> Callable[[Run], None]:
        def train(run: Run) -> None:
            model = run.model().to(dtype)
            with run.optimizer(model.parameters()) as optimizer:
                for step in range(count):
                    step_of(run, model, optimizer, step)
                run.keep_all(model, optimizer)
            if run.blocks:
                run.check_claimed()

        return train

    return of


@in_steps(3)
def plain(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Two passes a step; it is clipped but once, as whoever clips waits for gradients."""
    _passes(run, model, step)
    _step(run, optimizer, clip=step != 1)


@in_steps(3)
def partial(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Two passes a step, of which the second reaches the first layer alone: what is summed of the others stays."""
    _passes(run, model, step, 1)
    (model.layers[0](batch(10 * step + 5).to(run.device)).float().sum() / 64).backward()
    _step(run, optimizer, clip=step != 1)


@in_steps(5)
def written(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Updates have read gradients that the caller's stream still scales when the step is asked for."""
    _passes(run, model, step, 1)
    if run.pace is not None:
        settle(optimizer.engine)
    for parameter in model.parameters() if step > 1 else ():
        parameter.grad.mul_(0.5)
    _step(run, optimizer, clip=False)


@in_steps(2)
def growing(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """As much state at home on the device as there is room for, and then a larger batch."""
    _passes(run, model, step, 1)
    _step(run, optimizer, clip=False)
    run.claim([48 << 10])


@in_steps(3)
def dropped(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Gradients of two passes are dropped each time before those of others are made."""
    _passes(run, model, 10 + step)
    optimizer.zero_grad()
    _passes(run, model, step, 1)
    _step(run, optimizer, clip=step == 1)


def times(run: Run) -> None:
    """What a timeline tells of the last step happened in it, however often the clock has been read anew."""
    model, steps, age_s = run.model(), 0, 0.0
    with run.optimizer(model.parameters()) as optimizer:
        opened_s = time.monotonic()
        while run.pace is not None and age_s < 1:
            _passes(run, model, steps, 1)
            torch.accelerator.synchronize(run.device)
            began_s = time.monotonic()
            _step(run, optimizer, clip=False)
            optimizer.state_for(next(model.parameters()))
            age_s = time.monotonic() - opened_s
            told = [time_s - began_s for item in optimizer.timeline() for time_s in (item.started_s, item.finished_s)]
            if min(told) < -0.1 or max(told) > time.monotonic() - began_s + 0.1:
                raise Wrong(f"times {min(told):.3f} to {max(told):.3f} s of a step that has just been taken")
            steps += 1


@in_steps(3)
def streams(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Each pass on another stream, steps there or outside; streams go on with other things at once."""
    for number, stream in enumerate(run.users):
        with working(stream):
            model(batch(10 * step + number).to(run.device)).backward()
    with working(run.users[0] if step == 1 else None):
        _step(run, optimizer, clip=step == 2)
    if not optimizer.config.keep_grads:  # else it is for the user to give up what was in .grad
        for stream in run.users:
            run.scribble(model, stream)


@in_steps(3)
def two_streams(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Two halves of a model that have nothing to do with each other, each on its own stream, then the other's."""
    parts, x = [], batch(step).to(run.device)
    for half in range(2):
        with working(run.users[(half + step) % 2]):
            y = x + model.layers[half].lift  # so that this one's gradient, which is small, comes last
            for layer in model.layers[half::2]:
                y = layer(y)
            parts.append(y.float().sum())
    (torch.stack(parts).sum() / 64).backward()
    _step(run, optimizer, clip=step == 2)


@in_steps(4)
def forward(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Steps that go on into the next forward pass."""
    if run.pace is not None and not step:
        optimizer.overlap_forward(model)
    _passes(run, model, step, 1)
    _step(run, optimizer, clip=step % 2 == 0)
    if step == 3:
        optimizer.finish()


@in_steps(4)
def forward_streams(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Steps outside go on into the next forward pass, on another stream of the user's; weights are hidden."""
    if run.pace is not None and not step:
        optimizer.overlap_forward(model, check=True)
    with working(run.users[step % 2]):
        loss = model(batch(step).to(run.device))
        run.scribble(model, run.outside if run.pace is not None else None)
        loss.backward()
        del loss  # or nodes of autograd stay for the next pass, with their streams
    _step(run, optimizer, clip=False)
    run.scribble(model, run.users[(step + 1) % 2])
    if step == 3:
        optimizer.finish()


def collected(run: Run) -> None:
    """Gradients are made on a stream of the user's and arrive outside, as with DDP, which keeps autograd's nodes."""
    model = run.model()
    nodes = [parameter.view_as(parameter).grad_fn.next_functions[0][0] for parameter in model.parameters()]
    with run.optimizer(model.parameters()) as optimizer:
        for step in range(3):
            with working(run.users[0]):
                model(batch(step).to(run.device)).backward()
            _step(run, optimizer, clip=step == 2)
        run.keep_all(model, optimizer)
    del nodes


@in_steps(3)
def given(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Gradients that a user makes on a stream of his own, and puts beside those of a backward pass."""
    _passes(run, model, step, 1)
    with working(run.users[0]):
        for parameter in model.parameters():
            more = torch.full_like(parameter, 0.01 * (step + 1))
            parameter.grad = more if parameter.grad is None else parameter.grad + more
        del more
    _step(run, optimizer, clip=False)
    run.scribble(model, run.users[0])


def _halve(run: Run, optimizer: offload.AdamW, step: int) -> None:
    """Take state out, and put half of the moments back."""
    found = optimizer.state_dict()
    for number, entry in found["state"].items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim():
                run.keep(f"{step} {number} {name}", value)
                if name != "master":
                    value.mul_(0.5)
    optimizer.load_state_dict(found)


@in_steps(3)
def state(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """State is taken out and put back."""
    _passes(run, model, step, 1)
    _step(run, optimizer, clip=False)
    _halve(run, optimizer, step)


@in_steps(3)
def elsewhere(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Steps on a stream of the user's; outside, which waits for nothing, state is read and replaced."""
    with run.beside(run.users[0]):
        _passes(run, model, step, 1)
        _step(run, optimizer, clip=False)
    _halve(run, optimizer, step)


@in_steps(3, torch.float32)
def elsewhere_single(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Weights that are masters, updated on a stream of the user's; their state is read outside."""
    with run.beside(run.users[0]):
        model(batch(step).to(run.device).float()).backward()
        _step(run, optimizer, clip=False)
    run.keep_state(model, optimizer, f"{step}")


@in_steps(3, torch.float32)
def single(run: Run, model: Net, optimizer: offload.AdamW, step: int) -> None:
    """Weights that are masters; state that is read at once behind a step."""
    model(batch(step).to(run.device).float()).backward()
    _step(run, optimizer, clip=False)
    run.keep_all(model, optimizer, f"{step}")


def saved(run: Run) -> None:
    """Steps on a stream of the user's; outside, which waits for nothing, a checkpoint at once behind the last."""
    model = run.model()
    with run.optimizer(model.parameters()) as optimizer:
        with run.beside(run.users[0]):
            for step in range(2):
                _passes(run, model, step, 1)
                _step(run, optimizer, clip=False)
        optimizer.save_checkpoint(run.folder / "saved", copy=True)
    again = Net()
    with offload.AdamW(again.parameters(), **SETTINGS) as optimizer:
        optimizer.load_checkpoint(run.folder / "saved")
        run.keep_all(again, optimizer)


def added(run: Run) -> None:
    """Parameters that come later, on a stream of the user's, for which there are to be larger buffers."""
    model = run.model()
    first = [getattr(model.layers[0], name) for name in VECTORS]
    with run.optimizer(first) as optimizer, working(run.users[0]):
        for step in range(4):
            if step == 2:
                before = _buffers(optimizer)
                ids = {id(parameter) for parameter in first}
                optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in ids]})
                with contextlib.nullcontext() if run.pace is None else run.outside:
                    run.claim(before)
            _passes(run, model, step, 1)
            _step(run, optimizer, clip=step == 3)
            model.zero_grad()
        if run.pace is not None:
            torch.accelerator.synchronize(run.device)
        run.keep_all(model, optimizer)
    run.check_claimed()


def _buffers(optimizer: offload.AdamW) -> list[int]:
    """Return the sizes of what a session has taken of the device."""
    return [tensor.numel() for tensor in getattr(optimizer.engine._parts.lanes.device, "_memory", {}).values()]


def ending(run: Run) -> None:
    """The end comes at once behind the last step, which was taken on a stream of the user's."""
    model = run.model()
    optimizer = run.optimizer(model.parameters())
    with working(run.users[0]):
        for step in range(2):
            _passes(run, model, step, 1)
            _step(run, optimizer, clip=False)
        before = _buffers(optimizer)
        optimizer.close()
        if run.pace is not None:
            with run.outside:
                run.claim(before)
    for name, parameter in model.named_parameters():
        run.keep(name, parameter)
    run.check_claimed()


def transfers(run: Run) -> None:
    """DeepSpeed's way of gradients to host memory."""
    moved, source = Transfers(), batch(0).to(run.device)
    targets = [torch.zeros(source.numel(), dtype=source.dtype, device="cpu") for _ in range(3)]
    for number in range(3):
        for target, stream in zip(targets, (None, *run.users), strict=True):
            made = source * (number + 1)
            source = source + 1
            if run.pace is None:
                target.copy_(made.view(-1))
                continue
            with run.beside(stream):
                moved.start(target, made.view(-1))
            del made
            torch.zeros_like(source)
        if run.pace is not None:
            run.outside.synchronize()
        moved.wait()
        for target in targets:
            run.keep(f"{number}", target)


def host(run: Run) -> None:
    """What users do by themselves."""
    x, stream = torch.zeros(4096, device=run.device), run.users[0]
    staging = torch.zeros(4096, device="cpu", pin_memory=run.pace is not None)
    for number in range(4):
        values = [torch.full((4096,), float(2 * number + more), device="cpu") for more in range(2)]
        if stream is None:
            x = x + values[0] + values[1]
            run.keep(f"{number}", x)
            run.keep(f"{number} first", x[:1])
            continue
        there = [torch.empty(4096, device=run.device) for _ in values]
        for source, target in zip(values, there, strict=True):
            Host.upload(staging, source, target)
        stream.wait_stream(torch.accelerator.current_stream())
        before = x
        with stream:
            x = x + there[0] + there[1]
        for tensor in (before, *there):
            Host.used_on(tensor, stream)
        del before, there, tensor, target
        scratch = [torch.zeros(4096, device=run.device) for _ in values]
        torch.accelerator.current_stream().wait_stream(stream)
        run.keep(f"{number}", Host.download(staging, x))
        run.keep(f"{number} first", torch.tensor([Host.first(x)], device="cpu"))
        del scratch


def sent(uploads: Uploads, words: npt.NDArray[np.int64]) -> ArgumentTable:
    """Return a table that has been sent, for the current stream."""
    table = uploads.get_table(words.size)
    table.words[: words.size] = words
    uploads.send(table, words.size)
    return table


def tables(run: Run) -> None:
    """Kernels' tables; an interrupt lets go of one whose work is on a stream that has not come so far."""
    words = np.arange(1000)
    if run.pace is None:
        run.keep("words", torch.from_numpy(words))
        return
    (lane, copies), backend = run.users, backends.BACKENDS["late"]
    found = torch.zeros(1000, dtype=torch.int64, device=run.device)
    torch.accelerator.synchronize()

    class Interrupted(torch.Event):
        def record(self, stream: Any = None) -> None:
            if stream == lane:
                raise KeyboardInterrupt
            super().record(stream)

    kinds = [Interrupted]

    def event(device: torch.device, timed: bool) -> Any:
        return kinds.pop()(device) if kinds else backend.event(device, timed)

    uploads = Uploads(torch.device(run.device), replace(backend, event=event), copies)
    with late.held(lane), Host.working_on(lane):
        with contextlib.suppress(KeyboardInterrupt), uploads.in_use(sent(uploads, words)) as there:
            found.copy_(there[:1000])
        del there
        with uploads.in_use(sent(uploads, words + 5000)):
            copies.synchronize()
    lane.synchronize()
    run.keep("words", found)


PLAIN = {"gpu_memory": 0, "subgroup_numel": 2048, "staging_memory": "120KiB"}
CPU, GPU, BOTH = ({**PLAIN, "placement": where} for where in ("cpu", "gpu", 0.5))
HOME = {"subgroup_numel": 2048, "gpu_memory": "300KiB", "placement": "gpu"}
SMALL_HOME = {**HOME, "gpu_memory": "150KiB"}
LEAVES, BORROWS = {"keep_grads": False}, {"gpu_memory": "borrow"}
BACKWARD = {"overlap": "backward", "host_memory": 0, "on_paths": True}
ON_PATHS = {**LEAVES, "gradient_memory": 0, "host_memory": 0, "on_paths": True}

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("departing", plain, BOTH | LEAVES),
        Workload("departing-cpu", plain, CPU | LEAVES),
        Workload("departing-gpu", plain, GPU | LEAVES),
        Workload("kept", plain, BOTH),
        Workload("kept-gpu", plain, GPU),
        Workload("kept-cpu", plain, CPU),
        Workload("home", plain, {**SMALL_HOME, "placement": 0.5}),
        Workload("borrowing", plain, GPU | BORROWS),
        Workload("borrowing-departing", partial, BOTH | BORROWS | LEAVES),
        Workload("borrowing-streams", streams, BOTH | BORROWS),
        Workload("auto", growing, {"subgroup_numel": 2048}, device_bytes=472 << 10),
        Workload("backward", plain, CPU | LEAVES | BACKWARD),
        Workload("backward-kept", written, CPU | BACKWARD),
        Workload("on-paths", plain, CPU | ON_PATHS),
        Workload("on-paths-streams", streams, CPU | ON_PATHS),
        Workload("streams", streams, BOTH),
        Workload("streams-departing", streams, BOTH | LEAVES),
        Workload("held", plain, BOTH | LEAVES, transit_bytes=1 << 30),
        Workload("held-gpu", plain, GPU | LEAVES, transit_bytes=1 << 30),
        Workload("held-cpu", plain, CPU | LEAVES, transit_bytes=1 << 30),
        Workload("held-streams", streams, BOTH | LEAVES, transit_bytes=1 << 30),
        Workload("two-streams", two_streams, BOTH | LEAVES),
        Workload("forward", forward, BOTH),
        Workload("forward-departing", forward, BOTH | LEAVES),
        Workload("forward-cpu", forward, CPU),
        Workload("state", state, BOTH),
        Workload("state-home", state, SMALL_HOME),
        Workload("dropped", dropped, GPU | LEAVES),
        Workload("dropped-half", dropped, BOTH | LEAVES),
        Workload("second", plain, BOTH, "late:1"),
        Workload("times", times, GPU),
        Workload("added", added, HOME),
        Workload("added-cpu", added, CPU),
        Workload("single", single, BOTH),
        Workload("elsewhere", elsewhere, HOME),
        Workload("elsewhere-cpu", elsewhere, CPU),
        Workload("elsewhere-single", elsewhere_single, HOME),
        Workload("saved", saved, {**HOME, "on_paths": True}),
        Workload("forward-streams", forward_streams, BOTH),
        Workload("forward-streams-departing", forward_streams, BOTH | LEAVES),
        Workload("forward-home", forward_streams, HOME),
        Workload("given", given, HOME | LEAVES, transit_bytes=4000),
        Workload("collected", collected, CPU | LEAVES),
        Workload("collected-gpu", collected, GPU | LEAVES),
        Workload("ending", ending, HOME),
        Workload("transfers", transfers, {}),
        Workload("tables", tables, {}),
        Workload("host", host, {}),
    )
}


def _trained(workload: Workload, pace: Pace | None) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(workload, pace, Path(folder))
        before = _current(pace)
        if pace is not None:
            pace.set(torch.accelerator.current_stream(pace.device), DeviceLane.CALLER)
        workload.train(run)
        if _current(pace) != before:
            raise Wrong("place: another device or stream is current than before")
    return run.found


def _current(pace: Pace | None) -> Any:
    """Return the calling thread's device, and its stream of the device that a training is on."""
    if pace is None:
        return None
    return torch.accelerator.current_device_index(), torch.accelerator.current_stream(pace.device)


@cache
def reference(name: str) -> dict[str, torch.Tensor]:
    """Return what a training ends with on the CPU."""
    return _trained(WORKLOADS[name], None)


def run(name: str, seed: int, plant: Callable[[], AbstractContextManager[Any]] | None = None) -> None:
    """Run a training on the device; `plant` makes a mistake meanwhile.

    Raises:
        Wrong: It has ended otherwise than on the CPU.
        Exception: It has not ended well.
    """
    workload = WORKLOADS[name]
    pace = Pace(seed, workload.device)
    torch.accelerator.empty_cache()
    late.set_device_bytes(workload.device_bytes, torch.device(workload.device).index)
    with contextlib.ExitStack() as stack:
        for limit in SMALL:
            stack.enter_context(replaced(*limit))
        if plant is not None:
            stack.enter_context(plant())
        stack.callback(pace.end)
        found = _trained(workload, pace)
    for key, tensor in reference(name).items():
        other = found[key]
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            raise Wrong(f"bits of {key}: {other.shape} {other.dtype}")
        if not torch.equal(other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)):
            nan = " (NaN)" if other.is_floating_point() and bool(other.isnan().any()) else ""
            raise Wrong(f"bits of {key}{nan}")
