"""Devices that never answer: nothing is silent for long, and everything has a way out that loses nothing."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from faulty import FaultyTier
from layers import Layer
from limited import limited
from s3_server import BUCKET, FaultProxy
from settling import settle
from skips import cannot_run

import offload
from offload import waits
from offload.protocols import WAKE
from offload.session import setup
from offload.tiers import open_tier

LONG_S = 120.0

Hasty = limited(offload.AdamW, settle_s=0.05, unwind_s=0.05)
"""Waits for what has been given up as long as these tests like."""
BACKENDS = ["threads", "asyncio"]

overlapping = pytest.mark.parametrize("overlaps", [False, True], ids=["waited for", "behind"])
"""Whether steps go on behind their caller, into the next pass over all layers."""


class Stuck(FaultyTier):
    """A path whose device stops to answer: requests are not even started, and `close` waits for them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.hangs: Collection[str] = ()
        """"read", "write"."""
        self.asked = threading.Event()
        self.thawed = threading.Event()
        self._lock = threading.Lock()

    def read(self, request: Any) -> None:
        if not self._holds("read", request):
            super().read(request)

    def write(self, request: Any) -> None:
        if not self._holds("write", request):
            super().write(request)

    def _holds(self, verb: Any, request: Any) -> bool:
        with self._lock:
            if verb not in self.hangs:
                return False
            self._held[request.op] = (verb, request)
        self.asked.set()
        return True

    def answer(self) -> None:
        with self._lock:
            self.hangs = ()
        for op in self.held():
            self.release(op)

    def close(self) -> None:
        if self.hangs:
            assert self.thawed.wait(LONG_S)
        super().close()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[Stuck]:
    opened: list[Stuck] = []

    def opening(name: str, store: uuid.UUID, queue: Any, **settings: Any) -> Any:
        opened.append(Stuck(open_tier(name, store, queue, **settings), queue, []))
        return opened[-1]

    monkeypatch.setattr(setup, "open_tier", opening)
    return opened


class Training:
    """A session whose every step reads from its path."""

    def __init__(self, path: Any, *, overlaps: bool = False, **settings: Any) -> None:
        parameters = [torch.nn.Parameter(torch.randn(1024).bfloat16()) for _ in range(4)]
        self.layers = torch.nn.ModuleList(map(Layer, parameters))
        config = offload.OffloadConfig(
            host_memory=0, paths=[path], subgroup_numel=1024, staging_memory=12 * 1024, threads=1, **settings
        )
        self.optimizer = Hasty(parameters, offload=config)
        self.engine = self.optimizer.engine
        if overlaps:
            self.optimizer.overlap_forward(self.layers)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for layer in self.layers:
                layer.weight.grad = torch.ones_like(layer(), dtype=torch.bfloat16)
            self.optimizer.step()

    def give_up_in(self, seconds: float) -> None:
        self.engine._parts.executor._stall_s = seconds  # not from the beginning: whatever is slow here hangs as well

    def give_up_on(self, tier: Stuck) -> None:
        """Give up as soon as nothing is under way but what a path does not answer: what is slow is no hang."""
        parts = self.engine._parts

        def watch() -> None:
            while not tier.held() or parts.machine.in_flight != len(tier.held()):
                time.sleep(0.001)
            self.give_up_in(0.1)
            parts.queue.post(WAKE)

        threading.Thread(target=watch, daemon=True).start()


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def ended(training: Training) -> bool:
    end = training.engine._shutdown.work
    assert end is not None
    return end.wait(LONG_S)


@overlapping
def test_a_session_leaves_a_hung_device_and_says_what_it_leaves(
    tmp_path: Path,
    stuck: list[Stuck],
    overlaps: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training(tmp_path, overlaps=overlaps)
    training.step()
    training.optimizer.finish()
    stuck[0].hangs = ["read"]
    training.give_up_on(stuck[0])
    with pytest.raises(offload.StepAbortedError, match="no answer for"), training.optimizer:
        training.step(2)
    errors = messages(caplog, logging.ERROR)
    assert len(errors) == 2
    assert "has broken" in errors[0]
    assert str(tmp_path) in errors[0]
    assert "offload-" in errors[1]
    assert "bytes of host memory" in errors[1]
    assert list(tmp_path.iterdir())
    staging = training.engine._parts.memory.staging[0]
    assert f"{staging:x}-" in Path("/proc/self/maps").read_text()  # a request may still write there
    training.optimizer.close()  # nothing more to say, and nothing to wait for
    assert messages(caplog, logging.ERROR) == errors
    stuck[0].thawed.set()
    assert ended(training)
    assert not list(tmp_path.iterdir())
    with pytest.raises(offload.OffloadError, match="closed"):
        training.engine._parts.memory.arenas[0].tensor(0, 1, torch.uint8)


def test_a_session_waits_for_an_answer_as_long_as_it_is_told(tmp_path: Path) -> None:
    training = Training(tmp_path, stall_timeout_s=123.0)
    assert training.engine._parts.executor._stall_s == 123.0
    training.optimizer.close()


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_path_that_hangs_ahead_of_a_step(tmp_path: Path, stuck: list[Stuck], verb: str, answers: bool) -> None:
    """A step is told of it if it never answers, and takes what it needs if it does."""
    training = Training(tmp_path, overlap="backward")
    engine = training.engine

    def backward() -> None:
        training.optimizer.zero_grad()
        sum(layer.weight.float().sum() for layer in training.layers).backward()

    with training.optimizer:
        for _ in range(3):
            backward()
            settle(engine)
            training.optimizer.step()
        stuck[0].hangs = [verb]
        if not answers:
            training.give_up_on(stuck[0])
        backward()
        assert stuck[0].asked.wait(LONG_S)
        if answers:
            stuck[0].answer()
            training.optimizer.step()
            assert engine.step_number == 4
            return
        until_s = time.monotonic() + LONG_S
        while engine.broken is None and time.monotonic() < until_s:
            time.sleep(0.001)
        with pytest.raises(offload.StepAbortedError, match=f"{verb} failed .*no answer for .*Nothing had been updat"):
            training.optimizer.step()
        with pytest.raises(offload.SessionBrokenError, match="no answer for"):
            training.optimizer.step()
    stuck[0].thawed.set()
    assert ended(training)
    assert not list(tmp_path.iterdir())


def test_a_hung_path_keeps_no_other_open(tmp_path: Path, stuck: list[Stuck]) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    parameter = torch.nn.Parameter(torch.randn(9000).bfloat16())
    config = offload.OffloadConfig(host_memory=0, paths=paths, subgroup_numel=1024, threads=1)
    optimizer = Hasty([parameter], offload=config)
    stuck[0].hangs = ["read"]
    optimizer.engine._thread.broken = offload.OffloadError("as if")
    optimizer.close()
    assert list(paths[0].iterdir())
    closing, until_s = optimizer.engine._parts.closing, time.monotonic() + LONG_S
    while len(closing) != 1 and time.monotonic() < until_s:
        time.sleep(0.001)
    assert [tier.path for tier in closing] == [str(paths[0])]
    assert not list(paths[1].iterdir())
    stuck[0].thawed.set()
    assert optimizer.engine._shutdown.work.wait(LONG_S)  # type: ignore[union-attr]
    assert not list(paths[0].iterdir())


@overlapping
def test_a_long_silence_is_explained_and_harmless(
    tmp_path: Path,
    stuck: list[Stuck],
    overlaps: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training(tmp_path, overlaps=overlaps)
    training.step()
    training.optimizer.finish()
    stuck[0].hangs = ["read"]
    monkeypatch.setattr(waits, "QUIET_S", 0.05)

    def told(message: str) -> None:
        stuck[0].answer()

    awaited = f"waiting for file path {tmp_path} to read at byte"  # besides what is slow without having hung
    with listening(awaited, told):
        training.step()
        training.optimizer.finish()
    assert any(awaited in text for text in messages(caplog, logging.WARNING))
    monkeypatch.undo()
    training.step()
    training.optimizer.close()
    assert not list(tmp_path.iterdir())


def interrupt(message: str) -> None:
    os.kill(os.getpid(), signal.SIGINT)


class listening:
    """Calls `told` with the first log message that has a text in it."""

    def __init__(self, text: str, told: Callable[[str], None]) -> None:
        self.handler = logging.Handler()
        heard = threading.Lock()

        def emit(record: logging.LogRecord) -> None:
            if text in record.getMessage() and heard.acquire(blocking=False):
                told(record.getMessage())

        self.handler.emit = emit  # type: ignore[method-assign]

    def __enter__(self) -> None:
        logging.getLogger("offload").addHandler(self.handler)

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("offload").removeHandler(self.handler)


def test_ctrl_c_is_a_way_out_of_a_step_that_hangs(
    tmp_path: Path, stuck: list[Stuck], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path)
    training.step()
    stuck[0].hangs = ["read"]
    monkeypatch.setattr(waits, "QUIET_S", 0.05)
    with listening("to read", interrupt), pytest.raises(KeyboardInterrupt):
        training.step()
    assert "interrupted after" in messages(caplog, logging.ERROR)[0]
    with pytest.raises(offload.SessionBrokenError):
        training.step()
    training.optimizer.close()
    stuck[0].thawed.set()
    assert ended(training)


def test_ctrl_c_is_a_way_out_of_a_close_that_hangs(
    tmp_path: Path, stuck: list[Stuck], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The device answers all that it is asked, and hangs when its store is deleted."""
    training = Training(tmp_path)
    training.step()
    stuck[0].hangs = ["read"]
    monkeypatch.setattr(waits, "QUIET_S", 0.05)
    with listening("waiting for requests to", interrupt), pytest.raises(KeyboardInterrupt):
        training.optimizer.close()
    training.optimizer.close()
    assert "does not end" in messages(caplog, logging.ERROR)[-1]
    stuck[0].thawed.set()
    assert ended(training)
    assert not list(tmp_path.iterdir())


def test_ctrl_c_is_a_way_out_of_a_forward_pass_that_waits_for_a_hung_device(
    tmp_path: Path, stuck: list[Stuck], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step goes on behind; a device that answers after all ends it, and whoever closes does not wait for that."""
    training = Training(tmp_path, overlaps=True)
    training.step()
    training.optimizer.finish()
    stuck[0].hangs = ["read"]
    monkeypatch.setattr(waits, "QUIET_S", 0.05)
    with listening("to read", interrupt), pytest.raises(KeyboardInterrupt), training.optimizer:
        training.step(2)
    assert "does not end" in messages(caplog, logging.ERROR)[-1]
    assert list(tmp_path.iterdir())
    stuck[0].answer()
    stuck[0].thawed.set()
    assert ended(training)
    assert not list(tmp_path.iterdir())


# Real devices


def send_signal(server: subprocess.Popen[bytes], number: int) -> None:
    """Send a server a signal; return once it has stopped, if that is what it says: it takes no request more."""
    server.send_signal(number)
    tasks = Path("/proc", str(server.pid), "task")
    while number == signal.SIGSTOP and any("T (stopped)" not in (t / "status").read_text() for t in tasks.iterdir()):
        time.sleep(0.001)


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[tuple[Path, Callable[[int], None]]]:
    """A folder that a process serves, and a function that sends this process a signal: stopped, it never answers."""
    if os.geteuid() != 0 or shutil.which("bindfs") is None or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root, /dev/fuse and bindfs")
    below, point = tmp_path / "below", tmp_path / "fuse"
    below.mkdir()
    point.mkdir()
    command = ["bindfs", "-f", "--multithreaded", "--forward-odirect=4096", below, point]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as server:
        try:
            while not os.path.ismount(point):
                if server.poll() is not None:
                    cannot_run("no FUSE here")
            yield point, partial(send_signal, server)
        finally:
            server.send_signal(signal.SIGCONT)
            subprocess.run(["umount", "--lazy", point], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_that_stops(fuse: tuple[Path, Callable[[int], None]], backend: str) -> None:
    """What lanes have asked for is answered long after the session has gone, and harms nobody."""
    path, send = fuse
    training = Training(path, io_backend=backend)
    training.step()
    send(signal.SIGSTOP)
    training.give_up_in(0.3)
    with pytest.raises(offload.StepAbortedError, match="no answer for"), training.optimizer:
        training.step(4)
    other = Training(path.parent / "below", io_backend=backend)
    send(signal.SIGCONT)
    other.step()
    other.optimizer.close()
    assert ended(training)
    assert not list(path.iterdir())


CHILD = """
import sys, time, torch, offload
from dataclasses import replace
class Hasty(offload.AdamW):
    limits = replace(offload.AdamW.limits, settle_s=0.2)
path, backend, closes = sys.argv[1:]
parameters = [torch.nn.Parameter(torch.randn(1024).bfloat16()) for _ in range(4)]
optimizer = Hasty(parameters, offload=offload.OffloadConfig(
    host_memory=0, paths=[path], subgroup_numel=1024, staging_memory=12 * 1024, io_backend=backend))
def step():
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
step()
while optimizer.engine._parts.machine.in_flight:  # what a server has begun to answer, no signal ends
    time.sleep(0.001)
optimizer.engine._parts.executor._stall_s = 0.3
print("ready", flush=True)
sys.stdin.readline()
try:
    step()
    step()
except offload.StepAbortedError:
    print("given up", flush=True)
if closes == "closes":
    optimizer.close()
print("over", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "closes"), [*((backend, "forgets") for backend in BACKENDS), (BACKENDS[0], "closes")]
)
def test_an_interpreter_exits_beside_a_hung_device(
    fuse: tuple[Path, Callable[[int], None]], backend: str, closes: str
) -> None:
    path, send = fuse
    python = prepared.python() if closes == "closes" else sys.executable
    command = [python, "-c", CHILD, str(path), backend, closes]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "ready\n"
            send(signal.SIGSTOP)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "given up\n"
            assert child.stdout.readline() == "over\n"
            assert child.wait(LONG_S) == 0  # and only then is the device let go
        finally:
            send(signal.SIGCONT)
            child.kill()


@pytest.fixture
def frozen(mounted: Callable[..., Path]) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """A folder of an ext4 of its own, and a function that freezes ("-f") and thaws ("-u") it."""
    if shutil.which("fsfreeze") is None:
        pytest.skip("needs fsfreeze")
    point = mounted("ext4", nbytes=48 << 20, lazy=True)

    def freeze(how: str) -> None:
        subprocess.run(["fsfreeze", how, point], check=how == "-f", capture_output=True)
        if how == "-f":
            watchdog.start()  # not before: what is slow until then must not have it thawed

    watchdog = threading.Timer(LONG_S, freeze, ["-u"])
    yield point, freeze
    watchdog.cancel()
    freeze("-u")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@overlapping
def test_a_frozen_file_system(frozen: tuple[Path, Callable[[str], None]], backend: str, overlaps: bool) -> None:
    """Not even a signal ends what waits there: reads go on, writes and deletions do not."""
    path, freeze = frozen
    training = Training(path, overlaps=overlaps, io_backend=backend)
    training.step()
    freeze("-f")
    training.give_up_in(0.3)
    with pytest.raises(offload.StepAbortedError, match="no answer for"), training.optimizer:
        training.step(4)
    freeze("-u")
    assert ended(training)
    assert [entry.name for entry in path.iterdir()] == ["lost+found"]


@pytest.mark.slow
def test_an_object_store_that_stalls(proxy: FaultProxy) -> None:
    training = Training(f"s3://{BUCKET}/stalled-{uuid.uuid4()}")
    training.step()
    for method in ("GET", "PUT", "POST", "DELETE"):
        proxy.add(kind="stall", method=method, match="", times=1000)
    training.give_up_in(0.3)
    with pytest.raises(offload.StepAbortedError, match="no answer for"), training.optimizer:
        training.step(4)
    proxy.faults.clear()
    proxy.released.set()
    assert ended(training)
