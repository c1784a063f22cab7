"""What a user sees when a path fails under a running session."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from faulty import Fault, FaultKind, FaultyTier, Operation, faulty_paths
from layers import Layer
from leftovers import clear, open_files
from settling import settle

import offload
from offload.checkpoint import saves
from offload.errors import CorruptRecordError
from offload.measure import quick_probe
from offload.plan import Rates
from offload.protocols import TileId, TileRequest
from offload.session import parts, setup, visits
from offload.tiers import SLOT_HEADER_BYTES, FileTier, open_tier


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FaultyTier]:
    """Return the tiers of paths, in the order in which they are opened."""
    return faulty_paths(monkeypatch)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the n-th operation (after the probe) of one path fail."""

    def plant(path: Path, operation: Operation, kind: FaultKind, nth: int, code: int = errno.EIO) -> None:
        tiers: list[FaultyTier] = []

        def opened(name: str, store: uuid.UUID, queue: Any, **settings: Any) -> Any:
            tier = open_tier(name, store, queue, **settings)
            if name == str(path):
                tiers.append(FaultyTier(tier, queue))
                return tiers[-1]
            return tier

        def probed(*arguments: Any, **how: Any) -> Rates:
            rates = quick_probe(*arguments, **how)
            for tier in tiers:  # how many operations the probe takes depends on time
                tier.plant(Fault(operation, kind, nth, errno=code))
            return rates

        monkeypatch.setattr(setup, "open_tier", opened)
        monkeypatch.setattr(parts, "quick_probe", probed)

    return plant


def train(paths: list[Path], steps: int = 4, staging_slots: int = 2, *, overlaps: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(Layer(torch.nn.Parameter(torch.randn(1024).bfloat16())) for _ in range(8))
    parameters = [*layers.parameters()]
    config = offload.OffloadConfig(
        host_memory=0,
        paths=[{"path": path, "share": 1} for path in paths],  # not by rate: which write comes when must not vary
        subgroup_numel=1024,
        staging_memory=staging_slots * 12 * 1024,
    )
    with offload.AdamW(parameters, lr=1e-2, offload=config) as optimizer:
        if overlaps:
            optimizer.overlap_forward(layers)
        for _ in range(steps):
            for layer in layers:
                layer.weight.grad = (torch.randn(1024) + layer()).bfloat16()
            optimizer.step()
        states = [optimizer.state_for(parameter)["exp_avg_sq"] for parameter in parameters]
    return [*(parameter.detach() for parameter in parameters), *states]


overlapping = pytest.mark.parametrize("overlaps", [False, True], ids=["waited for", "behind"])
"""Whether steps go on behind their caller, into the next pass over all layers."""


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a", tmp_path / "b"]
    for path in found:
        path.mkdir()
    return found


@pytest.mark.parametrize(("nth", "code"), [(1, errno.EIO), (5, errno.ENOSPC), (20, errno.EIO)])
@overlapping
def test_a_failed_write_goes_to_another_path(
    failing: Any, paths: list[Path], code: int, nth: int, overlaps: bool, caplog: Any
) -> None:
    expected = train(paths)
    failing(paths[0], "write", FaultKind.ERROR, nth, code)
    found = train(paths, overlaps=overlaps)
    assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))
    assert "other paths" in caplog.text
    assert errno.errorcode[code] in caplog.text


@overlapping
def test_a_failed_write_without_another_path_breaks_the_session(
    failing: Any, paths: list[Path], overlaps: bool
) -> None:
    failing(paths[0], "write", FaultKind.ERROR, 5, errno.ENOSPC)
    with pytest.raises(offload.StepAbortedError) as caught:
        train(paths[:1], overlaps=overlaps)
    assert isinstance(caught.value.cause, offload.TierError)
    assert "weights and state belong to no step" in str(caught.value)
    assert not list(paths[0].iterdir())


@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.CORRUPT, FaultKind.MISDIRECTED])
@overlapping
def test_a_failed_read_aborts_the_step_and_says_which(
    failing: Any, paths: list[Path], kind: FaultKind, overlaps: bool
) -> None:
    failing(paths[0], "read", kind, 3)
    with pytest.raises(offload.StepAbortedError) as caught:
        train(paths, overlaps=overlaps)
    wanted = offload.TierError if kind is FaultKind.ERROR else CorruptRecordError
    assert isinstance(caught.value.cause, wanted)
    assert "tensor" in str(caught.value.cause)
    assert str(paths[0]) in str(caught.value.cause)
    assert caught.value.step >= 2


@pytest.mark.parametrize("kind", [FaultKind.CORRUPT, FaultKind.LOST, FaultKind.TORN, FaultKind.MISDIRECTED])
@overlapping
def test_damage_done_by_a_write_is_never_used(
    failing: Any, paths: list[Path], kind: FaultKind, overlaps: bool
) -> None:
    expected = train(paths)
    failing(paths[0], "write", kind, 4)
    if kind is FaultKind.TORN:  # reported at once, so another path takes over
        found = train(paths, overlaps=overlaps)
        assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))
    else:
        with pytest.raises(offload.StepAbortedError) as caught:
            train(paths, overlaps=overlaps)
        assert isinstance(caught.value.cause, CorruptRecordError)


@pytest.mark.parametrize("reader", ["step", "state"])
@pytest.mark.parametrize(
    ("form", "tensor", "place"),
    [
        *(("exact", 2, place) for place in (0, 1024, 4095)),
        *(("compact16", 2, 1024), ("compact8", 2, 1024), ("compact8", 4, 0), ("compact8", 4, 4095)),
    ],
)
def test_a_bit_that_flips_on_a_path_is_found_before_it_is_used(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, reader: str, place: int, form: str, tensor: int
) -> None:
    """The update takes the checksums of what it writes and verifies what it reads; others have that done before.

    The last tensor of compact8 is its scales, 128 bytes and what fills a sector.
    """
    reads: list[TileRequest] = []
    writes: list[TileRequest] = []

    class Noted(FileTier):
        def read(self, request: TileRequest) -> None:
            reads.append(request)
            super().read(request)

        def write(self, request: TileRequest) -> None:
            writes.append(request)
            super().write(request)

    monkeypatch.setattr(setup, "open_tier", lambda *place, **settings: Noted(*place, **settings))
    parameters = [torch.nn.Parameter(torch.ones(64, 64).bfloat16()) for _ in range(4)]
    slot_bytes = {"exact": 48, "compact16": 32, "compact8": 24}[form] * 1024
    settings: dict[str, Any] = {"subgroup_numel": 4096, "staging_memory": slot_bytes, "state_format": form}
    config = offload.OffloadConfig(host_memory=0, paths=paths[:1], **settings)

    def step(optimizer: Any) -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    with offload.AdamW(parameters, lr=1e-2, offload=config) as optimizer:
        step(optimizer)
        reads.clear()
        writes.clear()
        step(optimizer)
        assert reads
        assert not any(request.verify for request in reads)
        assert writes
        assert all(request.checksum is not None for request in writes)
        index = optimizer.engine._parts.machine.index
        weights = [parameter.detach().clone() for parameter in parameters]
        record = index.get(TileId(1, tensor, 0))
        assert record is not None
        (file,) = paths[0].glob("offload-*/tiles")
        with open(file, "r+b") as tiles:
            at = record.location.offset + SLOT_HEADER_BYTES + place
            byte = os.pread(tiles.fileno(), 1, at)[0]
            os.pwrite(tiles.fileno(), bytes([byte ^ 16]), at)
        use = partial(step, optimizer) if reader == "step" else partial(optimizer.state_for, parameters[1])
        with pytest.raises(offload.OffloadError) as caught:
            use()
        cause = caught.value.cause if isinstance(caught.value, offload.StepAbortedError) else caught.value
        assert isinstance(cause, CorruptRecordError)
        assert f"subgroup 1, tensor {tensor}, tile 0" in str(cause)
        assert str(paths[0]) in str(cause)
        stored = optimizer.engine.plan.layout.subgroups[1].tensors[tensor].format
        first = min(place // stored.item_bytes * stored.item_numel, 4095) // 1024 * 1024
        block = slice(first, first + 1024)  # padding belongs to the last
        assert torch.equal(parameters[1].view(-1)[block], weights[1].view(-1)[block])


def test_a_broken_session_stays_broken_and_says_so(failing: Any, paths: list[Path]) -> None:
    failing(paths[0], "read", FaultKind.ERROR, 1)
    parameters = [torch.nn.Parameter(torch.randn(1024).bfloat16()) for _ in range(4)]
    config = offload.OffloadConfig(host_memory=0, paths=paths[:1], subgroup_numel=1024, staging_memory=12 * 1024)
    optimizer = offload.AdamW(parameters, offload=config)

    def steps() -> None:
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    with pytest.raises(offload.StepAbortedError):
        steps()
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(offload.SessionBrokenError, match="EIO"):
            use()
    optimizer.close()
    assert not list(paths[0].iterdir())


@overlapping
def test_a_broken_session_names_its_last_checkpoint(
    failing: Any, paths: list[Path], tmp_path: Path, overlaps: bool
) -> None:
    """The path is lost for good; the checkpoint, on another one, is intact."""
    failing(paths[0], "read", FaultKind.ERROR, 20)
    layers = torch.nn.ModuleList(Layer(torch.nn.Parameter(torch.randn(1024).bfloat16())) for _ in range(4))
    parameters = [*layers.parameters()]
    config = offload.OffloadConfig(host_memory=0, paths=paths[:1], subgroup_numel=1024, staging_memory=12 * 1024)
    optimizer = offload.AdamW(parameters, offload=config)
    folder = tmp_path / "ck"
    if overlaps:
        optimizer.overlap_forward(layers)

    def steps(count: int) -> None:
        for _ in range(count):
            for layer in layers:
                layer.weight.grad = torch.ones_like(layer(), dtype=torch.bfloat16)
            optimizer.step()

    steps(1)
    optimizer.save_checkpoint(folder, copy=True)
    optimizer.wait_checkpoint()
    saved = [optimizer.engine.step_count(number) for number in range(4)]
    with pytest.raises(offload.StepAbortedError, match=str(folder)) as caught:
        steps(5)
    assert caught.value.checkpoint == str(folder)
    optimizer.close()
    with offload.AdamW(parameters) as other:
        other.load_checkpoint(folder)
        assert [other.engine.step_count(number) for number in range(4)] == saved


def test_a_broken_session_does_not_name_a_checkpoint_that_it_could_not_take_over(
    failing: Any, paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(paths[0], "read", FaultKind.ERROR, 20)
    parameters = [torch.nn.Parameter(torch.randn(1024).bfloat16()) for _ in range(4)]

    def make(path: Path) -> offload.AdamW:
        config = offload.OffloadConfig(host_memory=0, paths=[path], subgroup_numel=1024, staging_memory=12 * 1024)
        return offload.AdamW(parameters, offload=config)

    def steps(optimizer: offload.AdamW, count: int) -> None:
        for _ in range(count):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    def save(optimizer: offload.AdamW, folder: Path) -> None:
        steps(optimizer, 1)
        optimizer.save_checkpoint(folder)
        optimizer.wait_checkpoint()

    def no_place(path: str) -> None:
        raise offload.TierError("open", tier="file", path=path)

    with make(paths[1]) as other:
        save(other, tmp_path / "foreign")
    with make(paths[0]) as optimizer:
        save(optimizer, tmp_path / "own")
        with monkeypatch.context() as patch:
            patch.setattr(saves, "parse_place", no_place)
            with pytest.raises(offload.TierError):
                optimizer.load_checkpoint(tmp_path / "foreign")
        with pytest.raises(offload.StepAbortedError) as caught:
            steps(optimizer, 5)
        assert caught.value.checkpoint == str(tmp_path / "own")


TRAINING = """
import os, signal, sys, threading, torch, offload
parameters = [torch.nn.Parameter(torch.randn(4096).bfloat16()) for _ in range(8)]
config = offload.OffloadConfig(host_memory=0, paths=[sys.argv[1]], subgroup_numel=4096)
optimizer = offload.AdamW(parameters, offload=config)
def step():
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
"""

ENDLESS = """
while True:
    step()
    print(flush=True)
"""

INTERRUPTED = """
step()
try:
    threading.Timer(0, os.kill, (os.getpid(), signal.SIGINT)).start()
    while True:
        step()
except KeyboardInterrupt:
    counts = [optimizer.engine.step_count(number) for number in range(8)]
    states = [optimizer.state_for(parameter)["exp_avg"] for parameter in parameters]
    same = all(bool((state == states[0][0]).all()) for state in states)
    optimizer.close()
    print("whole", len(set(counts)) == 1 and same)
"""


@pytest.mark.slow
def test_a_killed_process_disturbs_nobody(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep me")
    command = [sys.executable, "-c", TRAINING + ENDLESS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in range(3):
            assert child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    assert len([*tmp_path.iterdir()]) == 2
    train([tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]  # no checkpoint needs the store of a killed session


TWICE_INTERRUPTED = """
class Late(BaseException):
    pass
def late(*_):
    global armed
    if armed:  # no more than two a step, and none outside
        armed -= 1
        raise Late
armed = 0
step()
signal.signal(signal.SIGALRM, late)
signal.signal(signal.SIGINT, late)
main = threading.main_thread().ident
begun, begin = os.pipe()
def kick():
    while os.read(begun, 1):  # two at once, early in a step
        signal.pthread_kill(main, signal.SIGALRM)
        signal.pthread_kill(main, signal.SIGINT)
threading.Thread(target=kick, daemon=True).start()
raised = 0
def guarded(depth):
    global raised, armed
    try:
        if depth:
            guarded(depth - 1)
        else:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            armed = 2
            os.write(begin, b"x")
            optimizer.step()
            armed = 0
    except Late:
        raised += 1
for _ in range(10):
    guarded(3)
    armed = 0
for parameter in parameters:
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
counts = [optimizer.engine.step_count(number) for number in range(8)]
states = [optimizer.state_for(parameter)["exp_avg"] for parameter in parameters]
same = all(bool((state == states[0][0]).all()) for state in states)
near = abs(float(states[0][0]) - (1 - 0.9 ** counts[0])) < 1e-5
optimizer.close()
print("whole", len(set(counts)) == 1 and same and near and raised > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [INTERRUPTED, TWICE_INTERRUPTED])
def test_ctrl_c_leaves_whole_state(tmp_path: Path, script: str) -> None:
    command = [prepared.python(), "-c", TRAINING + script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "whole True", done.stderr
    assert not list(tmp_path.iterdir())


def test_a_tier_that_cannot_be_closed_does_not_keep_the_others_open(paths: list[Path]) -> None:
    parameters = [torch.nn.Parameter(torch.randn(1024).bfloat16()) for _ in range(4)]
    optimizer = offload.AdamW(
        parameters, offload=offload.OffloadConfig(host_memory=0, paths=paths, subgroup_numel=1024)
    )
    store = next(paths[0].iterdir())
    (store / "tiles").unlink()
    (store / "tiles").mkdir()
    optimizer.close()
    assert not list(paths[1].iterdir())


@pytest.mark.parametrize("backend", ["auto", "threads", "asyncio"])
def test_sessions_leave_no_descriptors(paths: list[Path], backend: str) -> None:
    def run() -> None:
        parameters = [torch.nn.Parameter(torch.randn(1024).bfloat16()) for _ in range(4)]
        config = offload.OffloadConfig(host_memory=0, paths=paths, subgroup_numel=1024, io_backend=backend)
        with offload.AdamW(parameters, offload=config) as optimizer:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    run()
    clear()
    before = open_files()
    for _ in range(3):
        run()
        assert open_files().items() <= before.items()  # what others have left may go meanwhile


def test_a_step_that_nothing_can_be_learnt_from_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train([tmp_path])

    def observe(*arguments: Any) -> None:
        raise ZeroDivisionError("a rate of nothing")

    monkeypatch.setattr(visits, "observe", observe)
    assert all(map(torch.equal, train([tmp_path]), expected))
    assert "nothing is learnt from the last step: ZeroDivisionError" in caplog.text


def test_whoever_is_told_of_a_bug_may_free_what_updates_wrote_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that ends the engine thread in the middle of a step is told when the step's updates have ended."""
    parameters = [torch.nn.Parameter(torch.ones(5000).bfloat16()) for _ in range(4)]
    with offload.AdamW(parameters, offload=offload.OffloadConfig(subgroup_numel=1024, threads=1)) as optimizer:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)

        def learn(self: Any) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(visits.SweepRequests, "refine_rates", learn)
        executor = optimizer.engine._parts.executor
        with pytest.raises(offload.StepAbortedError, match="a bug"):
            optimizer.step()
        assert not executor._in_flight
        with pytest.raises(offload.SessionBrokenError, match="a bug"):
            optimizer.step()


class Ahead:
    """A session that makes updates during backward from the second step on, all of whose state lies on one path."""

    def __init__(self, path: Path) -> None:
        self.weights = [torch.nn.Parameter(torch.randn(1024).bfloat16()) for _ in range(8)]
        config = offload.OffloadConfig(
            host_memory=0, paths=[path], subgroup_numel=1024, staging_memory=2 * 12 * 1024, overlap="backward"
        )
        self.optimizer = offload.AdamW(self.weights, offload=config)
        self.machine = self.optimizer.engine._parts.machine

    def backward(self) -> None:
        sum((weight.float() * weight.detach()).sum() for weight in self.weights).backward()

    def step(self) -> None:
        self.backward()
        settle(self.optimizer.engine)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self, until: Callable[[], bool]) -> None:
        latest_s = time.monotonic() + 20
        while not until():
            assert time.monotonic() < latest_s
            time.sleep(0.001)


@pytest.mark.parametrize(
    "use",
    [
        lambda optimizer, folder: optimizer.step(),
        lambda optimizer, folder: optimizer.state_dict(),
        lambda optimizer, folder: optimizer.save_checkpoint(folder / "checkpoint"),
    ],
    ids=["step", "state_dict", "save"],
)
@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.CORRUPT])
def test_a_read_that_fails_ahead_of_a_step_aborts_it(
    opened: list[FaultyTier], paths: list[Path], tmp_path: Path, kind: FaultKind, use: Callable[[Any, Path], None]
) -> None:
    """Whoever asks first is told of the step; whoever asks then, of a session that is broken."""
    training = Ahead(paths[0])
    optimizer, machine = training.optimizer, training.machine
    with optimizer:
        for _ in range(3):
            training.step()
        training.wait(lambda: machine.is_open and not machine.in_flight)  # the slots are full
        weights = [weight.detach().clone() for weight in training.weights]
        opened[0].plant(Fault("read", kind))
        with pytest.raises(  # noqa: PT012  backward asks, too: it may be the first
            offload.StepAbortedError, match=r"step 4 was aborted: .*Nothing had been updat"
        ) as caught:
            training.backward()
            training.wait(lambda: optimizer.engine.broken is not None)
            use(optimizer, tmp_path)
        assert isinstance(caught.value.cause, offload.TierError)
        assert str(paths[0]) in str(caught.value)
        with pytest.raises(offload.SessionBrokenError, match="broke and cannot be used any more"):
            optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(weights, training.weights, strict=True))
    assert not list(paths[0].iterdir())


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_ahead_of_a_step_costs_what_was_ahead(
    opened: list[FaultyTier], paths: list[Path], code: int
) -> None:
    found = []
    for path in paths:
        torch.manual_seed(0)
        training = Ahead(path)
        with training.optimizer as optimizer:
            for step in range(6):
                if step == 3 and path is paths[1]:
                    opened[1].plant(Fault("write", FaultKind.ERROR, 4, errno=code))
                training.step()
            states = [optimizer.state_for(weight)["exp_avg_sq"] for weight in training.weights]
        found.append([*(weight.detach() for weight in training.weights), *states])
    assert opened[1].fired
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
