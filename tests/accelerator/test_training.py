"""Trainings on the test accelerator end with the bits of the CPU, whatever is chosen and whenever streams run.

Each is done on both, forward and backward by torch. Delays of streams come from the test's name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from limited import limited

import offload
from accelerator import late
from accelerator.ranks import run_ranks
from accelerator.workloads import DEPTH, Net, batch
from offload import backends
from offload.backends import working_on
from offload.device import accelerator, pieces
from offload.plan import budget, planner

pytestmark = [
    pytest.mark.late(shared=True),
    pytest.mark.not_overlapped("steps go on where the tests say so"),
    pytest.mark.not_ahead("updates are made ahead where the tests say so"),
]

STEPS = 3


@pytest.fixture(autouse=True)
def _small_limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model's pieces are copied alone and together; a test's name says how many slots the device has."""
    for module in (pieces, budget):
        monkeypatch.setattr(module, "LEAST_COPY_BYTES", 6000)
    slots = 1 + zlib.crc32(request.node.nodeid.encode()) % 6
    for module in (budget, planner):
        monkeypatch.setattr(module, "GPU_STAGING_SLOTS", slots)
    monkeypatch.setitem(budget.make_plan.__kwdefaults__, "gpu_slots", slots)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    found = torch.device(request.param)
    with torch.accelerator.device_index(found.index or 0):
        yield found


@contextlib.contextmanager
def behind(stream: torch.Stream | None) -> Iterator[None]:
    """Work on a stream, behind all that is on the current one, which then goes on behind it."""
    if stream is None:
        yield
        return
    outside = torch.accelerator.current_stream()
    stream.wait_stream(outside)
    with working_on(stream):
        yield
    outside.wait_stream(stream)


class OnStreams(Net):
    """The same, whose layers are on streams in turns."""

    streams: Sequence[torch.Stream]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, stream in zip(self.layers, itertools.cycle(self.streams), strict=False):
            with behind(stream):
                x = layer(x)
        return x.float().sum() / 64


# -- What is chosen


class Case(NamedTuple):
    """A training: one choice of each kind.

    Attributes:
        rule: Class of the optimizer.
        form: How state is stored.
        dtype: Of weights.
        placement: Where updates run.
        home: Where state is: on paths, in host memory, part of it on the device.
        keeps: Whether gradients stay in `.grad`.
        overlap: What a step is hidden in.
        way: What happens between steps.
    """

    rule: str
    form: str
    dtype: torch.dtype
    placement: str | float
    home: str
    keeps: bool
    overlap: str
    way: str

    @property
    def can_be(self) -> bool:
        """Whether nothing of it is refused."""
        is_early = self.overlap in ("backward", "both")
        if self.home == "borrowed" and self.overlap in ("forward", "both"):
            return False
        if is_early and self.keeps:
            return False
        if self.way == "scaled":
            return self.dtype is torch.float16 or (self.dtype is torch.float32 and self.keeps)
        return not (self.way == "clipped by torch" and not self.keeps)

    def __str__(self) -> str:
        return "-".join(str(choice).removeprefix("torch.") for choice in self)


RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 1e-2},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 1e-2},
    "Adagrad": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
}
HOMES: dict[str, dict[str, Any]] = {
    "paths": {"host_memory": 0, "gpu_memory": 0},
    "host": {"gpu_memory": 0},
    "device": {"host_memory": 120_000, "gpu_memory": 100_000},
    "borrowed": {"host_memory": 120_000, "gpu_memory": "borrow"},
}
WAYS = ("plain", "a stream", "two streams", "two passes", "clipped", "clipped by torch", "scaled")
KINDS: tuple[tuple[Any, ...], ...] = (
    tuple(RULES),
    ("exact", "compact16", "compact8"),
    (torch.bfloat16, torch.float16, torch.float32),
    ("cpu", "gpu", 0.5),
    tuple(HOMES),
    (True, False),
    ("off", "forward", "backward", "both"),
    WAYS,
)


def pairs(case: Case) -> set[tuple[int, Any, int, Any]]:
    """Return all that two kinds of choices are together."""
    both = itertools.combinations(range(len(case)), 2)
    return {(one, case[one], other, case[other]) for one, other in both}


def covering() -> list[Case]:
    """Return trainings of which some have each two choices that can be had together."""
    rng = random.Random(0)
    cases = [case for case in map(Case._make, itertools.product(*KINDS)) if case.can_be]
    left, chosen = set().union(*map(pairs, cases)), []
    while left:
        best = max(rng.sample(cases, 400), key=lambda case: len(pairs(case) & left))
        if not pairs(best) & left:
            best = next(case for case in cases if pairs(case) & left)
        chosen.append(best)
        left -= pairs(best)
    return chosen


CASES = covering()


def in_turns(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """Have each case on one of the devices."""
    both = [(name, case) for name, case in zip(itertools.cycle(("late", "late:1")), cases, strict=False)]
    ids = [f"{name}-{case}" for name, case in both]
    return pytest.mark.parametrize(("device", "case"), both, ids=ids, indirect=["device"])


class Training:
    """A training on one device.

    Args:
        case: Which.
        device: Where; on the CPU nothing is chosen but the rule and how state is stored.
        folder: For paths.
    """

    def __init__(self, case: Case, device: torch.device, folder: Path, seed: int = 7) -> None:
        self.case, self.device = case, device
        is_far = device.type != "cpu"
        kind = OnStreams if is_far and case.way == "two streams" else Net
        self.model = kind(case.dtype, seed).to(device)
        config: dict[str, Any] = {"state_format": case.form, "threads": 1}
        if is_far:
            overlap = "backward" if case.overlap in ("backward", "both") else "off"
            config |= {"placement": case.placement, "keep_grads": case.keeps, "overlap": overlap}
            config |= {"subgroup_numel": 4096, "paths": [folder], **HOMES[case.home]}
        optimizer = limited(getattr(offload, case.rule), bucket_bytes=6000, bucket_count=3)
        self.optimizer = optimizer(
            self.model.parameters(), offload=offload.OffloadConfig(**config), **RULES[case.rule]
        )
        if is_far and case.overlap in ("forward", "both"):
            self.optimizer.overlap_forward(self.model)
        scaler = offload.GradScaler if case.dtype is torch.float16 else torch.amp.GradScaler
        self.scaler = scaler(device.type, init_scale=2.0**10, growth_interval=2) if case.way == "scaled" else None
        self.streams = [torch.Stream(device) for _ in range(2)] if is_far else [None, None]
        self.model.streams = self.streams

    def backward(self, number: int) -> None:
        loss = self.model(batch(number).to(self.device, self.case.dtype))
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, number: int) -> None:
        """Run an iteration."""
        way, optimizer = self.case.way, self.optimizer
        with behind(self.streams[0] if way == "a stream" else None):
            for again in range(2 if way == "two passes" else 1):
                self.backward(2 * number + again)
        if way == "clipped":
            optimizer.clip_grad_norm_(0.05)
        elif way == "clipped by torch":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05, foreach=False)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()

    def run(self, steps: range) -> None:
        for number in steps:
            self.step(number)

    def found(self) -> dict[str, torch.Tensor]:
        """Return weights and state."""
        self.optimizer.finish()
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = parameter.detach().cpu().clone()
            found |= {f"{name} {key}": value for key, value in self.optimizer.state_for(parameter).items()}
        return found


@contextlib.contextmanager
def training(case: Case, device: torch.device, folder: Path, seed: int = 7) -> Iterator[Training]:
    made = Training(case, device, folder, seed)
    with made.optimizer:
        yield made


def on_the_cpu(case: Case, folder: Path, steps: int = STEPS) -> dict[str, torch.Tensor]:
    with training(case, torch.device("cpu"), folder) as made:
        made.run(range(steps))
        return made.found()


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.isfinite().all(), name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@in_turns(CASES)
def test_bits_are_those_of_the_cpu(device: torch.device, tmp_path: Path, case: Case) -> None:
    with training(case, device, tmp_path) as made:
        made.run(range(STEPS))
        assert_same(made.found(), on_the_cpu(case, tmp_path))


BORROWING = [
    Case("AdamW", "exact", torch.bfloat16, placement, "borrowed", keeps, "off", way)
    for placement, keeps, way in (
        ("gpu", True, "clipped"),
        (0.5, True, "plain"),
        ("gpu", False, "two passes"),
        (0.5, False, "a stream"),
        ("cpu", False, "clipped"),
    )
]


@in_turns(BORROWING)
def test_nothing_is_held_during_forward(device: torch.device, tmp_path: Path, case: Case) -> None:
    """Forward finds as much memory in use as before there was a session: torch's own, and none of ours."""
    with training(case, device, tmp_path) as made:
        taken: list[int] = []
        for layer in made.model.layers:
            layer.register_forward_pre_hook(lambda *_: taken.append(torch.accelerator.memory_allocated()))
        rounds = []
        for number in range(STEPS):
            taken.clear()
            made.step(number)
            rounds.append(taken[:DEPTH])  # behind the first pass there are gradients
        assert rounds == rounds[:1] * STEPS  # in the first round there is no session yet
        metrics = made.optimizer.metrics()
        assert metrics["gpu_bytes"] == 0
        assert metrics["borrowed_bytes"] > 0 or case.placement == "cpu"
        assert_same(made.found(), on_the_cpu(case, tmp_path))


@pytest.mark.parametrize("keeps", [True, False])
def test_nothing_but_reports_waits_for_lanes(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of them held, an iteration comes to its last update, and no thread has waited for one on the host."""
    device = torch.device("late:0")
    lanes: list[torch.Stream] = []
    updates = threading.Semaphore(0)
    row, update = backends.BACKENDS["late"], accelerator.AcceleratorDevice.update

    def stream(*how: Any) -> torch.Stream:
        lanes.append(row.stream(*how))
        return lanes[-1]

    def told(self: Any, *arguments: Any, **options: Any) -> None:
        update(self, *arguments, **options)
        updates.release()

    def waits() -> int:
        reporters = {thread.native_id for thread in threading.enumerate() if thread.name == "offload-gpu"}
        return sum(count for thread, count in late.host_waits().items() if thread not in reporters)

    monkeypatch.setitem(backends.BACKENDS, "late", replace(row, stream=stream))
    monkeypatch.setattr(accelerator.AcceleratorDevice, "update", told)
    model = Net().to(device)
    config = {"gpu_memory": "4MiB", "placement": "gpu", "keep_grads": keeps, "subgroup_numel": 4096, "threads": 1}
    with offload.AdamW(model.parameters(), lr=1e-2, offload=config) as optimizer:
        optimizer.overlap_forward(model)

        def iterate() -> None:
            model(given).backward()
            optimizer.step()
            optimizer.zero_grad()

        given = batch(0).to(device)
        for _ in range(3):  # no step goes on into the first forward pass
            count = 0
            iterate()
            optimizer.finish()
            while updates.acquire(blocking=False):
                count += 1
        torch.accelerator.synchronize()
        before, found, ended = waits(), 0, threading.Event()

        def hold() -> None:
            torch.accelerator.set_device_index(0)
            iterate()
            for _ in range(count):
                updates.acquire()
            ended.set()

        with contextlib.ExitStack() as holds:
            for each in (*lanes, torch.accelerator.current_stream()):
                holds.enter_context(late.held(each))
            thread = threading.Thread(target=hold)
            thread.start()
            while not ended.wait(0.01) and not found:
                found = waits() - before
        thread.join()
        optimizer.finish()
    assert count
    assert not found


# -- What comes in between


SOME = (
    Case("AdamW", "exact", torch.bfloat16, 0.5, "device", True, "off", "clipped"),
    Case("AdamW", "compact8", torch.bfloat16, 0.5, "paths", False, "off", "a stream"),
    Case("Lion", "compact16", torch.float16, "gpu", "host", False, "forward", "two streams"),
    Case("Adagrad", "exact", torch.bfloat16, "cpu", "paths", False, "both", "plain"),
)


@in_turns(SOME)
def test_checkpoints_go_from_device_to_device(device: torch.device, tmp_path: Path, case: Case) -> None:
    wanted = on_the_cpu(case, tmp_path, 4)
    with training(case, device, tmp_path) as made:
        made.run(range(2))
        made.optimizer.save_checkpoint(tmp_path / "saved", copy=True)
        made.run(range(2, 4))  # while it is written
        assert_same(made.found(), wanted)
        made.optimizer.wait_checkpoint()
    for place in ("cpu", "late:1"):  # where half of these come from
        there = torch.device(place)
        with training(case, there, tmp_path, seed=8) as made:
            made.optimizer.load_checkpoint(tmp_path / "saved")
            made.run(range(2, 4))
            assert_same(made.found(), wanted)


@in_turns(SOME)
def test_a_close_after_a_step_or_a_backward_pass(device: torch.device, tmp_path: Path, case: Case) -> None:
    """Weights are those of the last step, whatever is still on its way."""
    wanted = on_the_cpu(case, tmp_path, 2)
    for passes in (0, 1):
        with training(case, device, tmp_path) as made:
            made.run(range(2))
            for number in range(passes):
                made.backward(100 + number)
        for name, parameter in made.model.named_parameters():
            assert torch.equal(parameter.detach().cpu(), wanted[name]), (passes, name)


def updated_whole(kind: str, device: torch.device, folder: Path, keeps: bool) -> list[torch.Tensor]:
    """Return weights after steps whose gradients are the same on every device."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(30, 50), (64, 64), (40,)]
    starts = [torch.randn(shape, generator=generator, device="cpu").bfloat16() for shape in shapes]
    weights = [torch.nn.Parameter(start.to(device)) for start in starts]
    named = [(f"w{number}", weight) for number, weight in enumerate(weights)]
    folder.mkdir()
    config = {"host_memory": 0, "gpu_memory": 0, "paths": [folder], "subgroup_numel": 2048, "keep_grads": keeps}
    made = (
        offload.Muon(named, lr=1e-2, offload=config)
        if kind == "muon"
        else offload.wrap(torch.optim.NAdam, named, lr=1e-2, offload=config)
    )
    with made as optimizer:
        for step in range(4):
            for weight, shape in zip(weights, shapes, strict=True):
                wanted = torch.randn(shape, generator=generator, device="cpu").bfloat16().to(device)
                (weight * wanted).sum().backward()
            if step % 2:
                optimizer.clip_grad_norm_(3.0)
            optimizer.step()
            optimizer.zero_grad()
    return [weight.detach().cpu() for weight in weights]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", ["muon", "wrapped"])
def test_whole_parameters_have_the_bits_of_the_cpu(tmp_path: Path, kind: str, keeps: bool) -> None:
    wanted = updated_whole(kind, torch.device("cpu"), tmp_path / "cpu", True)
    found = updated_whole(kind, torch.device("late:0"), tmp_path / "late", keeps)
    assert all(map(torch.equal, found, wanted))


RANKS: dict[str, list[tuple[str, bool, float, str]]] = {
    "fsdp2": [
        ("fsdp2", True, 0.5, "off"),
        ("fsdp2", False, 0.0, "off"),
        ("fsdp2", False, 1.0, "off"),
        ("fsdp2", True, 0.5, "forward"),
        ("fsdp2", True, 1.0, "forward"),
        ("fsdp2", False, 0.3, "forward"),
    ],
    "fsdp2 in backward": [
        ("fsdp2", False, 0.3, "backward"),
        ("fsdp2", False, 0.3, "both"),
        ("fsdp2", True, 0.3, "both"),
        ("muon", True, 0.0, "off"),
        ("muon", False, 0.0, "backward"),
    ],
    "ddp": [
        ("ddp", True, 0.5, "off"),
        ("ddp", True, 0.5, "forward"),
        ("ddp", True, 0.3, "backward"),
        ("ddp buckets", True, 0.3, "both"),
        ("ddp whole", True, 0.3, "backward"),
        ("ddp whole buckets", True, 0.0, "both"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("group", RANKS)
def test_two_ranks(tmp_path: Path, group: str) -> None:
    """Several trainings in one start; what is printed last names the one that failed."""
    run_ranks(2, "training_ranks.py", str(tmp_path), json.dumps(RANKS[group]))
