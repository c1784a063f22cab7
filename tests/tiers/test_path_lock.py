"""Processes and sessions that share a path take turns on it: real processes, synchronised by pipes.

Most tests stand between the lock and the device: `HeldTier` is a tier whose requests end when the test says so,
hence a turn lasts as long as the test wants.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import queue as queues
import select
import signal
import stat
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
from s3_server import BUCKET, S3Server
from tier_harness import TILE, Harness

import offload
from offload._native import CompletionQueue
from offload.config import PathConfig
from offload.device.host import HostMemory
from offload.device.none import NO_LANES
from offload.dtypes import DtypeCode
from offload.engine.executor import LiveExecutor
from offload.errors import ConfigError, TierError
from offload.layout import Parameter, build_layout
from offload.plan import Budgets, PathBudget, make_plan
from offload.protocols import Completion, TileRequest
from offload.schedule.index import Location, TileRecord
from offload.schedule.operations import ReadTile, Stop
from offload.session.setup import choose_turns
from offload.tiers import StoreOptions, Turns, identity, innermost, open_tier, turns
from offload.tiers.turns import TakingTurns, lock_bytes, lock_file

HERE = Path(__file__).parent

LONG_S = 60.0
PATIENT = {"holders": 1, "turn_bytes": 4096, "report_after_s": LONG_S}


class HeldTier:
    """A tier whose requests are in flight until somebody says that they have ended; nothing is moved."""

    name, cached, paid, depth = "held", False, False, 1

    def __init__(self, path: str | Path, queue: CompletionQueue) -> None:
        self.path = str(path)
        self._queue = queue
        self._begun: queues.SimpleQueue[int] = queues.SimpleQueue()
        self._flying: set[int] = set()

    def read(self, request: TileRequest) -> None:
        self._flying.add(request.op)
        self._begun.put(request.op)

    def started(self, timeout_s: float) -> int | None:
        """Wait for the next request that has arrived, in that order; its op, or None after a time."""
        with contextlib.suppress(queues.Empty):
            return self._begun.get(timeout=timeout_s)
        return None

    def finish(self, op: int) -> None:
        """End a request that is in flight."""
        self._flying.remove(op)
        self._queue.post(op)

    def close(self) -> None:
        for op in list(self._flying):
            self.finish(op)


class Session:
    """One holder-to-be of a path's lock."""

    def __init__(self, path: str | Path, **settings: Any) -> None:
        self.queue = CompletionQueue()
        inner_queue = CompletionQueue()
        self.held = HeldTier(path, inner_queue)
        self.tier = TakingTurns(self.held, inner_queue, self.queue, Turns(**(PATIENT | settings)))  # type: ignore[arg-type]

    def submit(self, op: int) -> None:
        """Start a request; it reaches the device when the session has its turn."""
        self.tier.read(TileRequest(op=op, tile=TILE, step=0, offset=0, address=4096, nbytes=4096))

    def has_turn(self) -> int:
        """Wait for the next request that has reached the device."""
        op = self.held.started(LONG_S)
        assert op is not None, "the turn did not come"
        return op

    def waits(self) -> str:
        """Wait until a turn has been asked for and somebody else has it; return what is said about that."""
        return waits(self.tier)

    def finish(self, op: int) -> None:
        """End a request; its completion must be the only one."""
        self.held.finish(op)
        assert [Completion(*record)[:2] for record in self.queue.wait(LONG_S)] == [(op, 0)]


def waits(tier: Any) -> str:
    """Wait until a tier waits for a turn; return what it says about that."""
    deadline_s = time.monotonic() + LONG_S
    while time.monotonic() < deadline_s:
        if said := tier.waiting_for():
            return str(said)
        os.sched_yield()
    raise AssertionError("nobody waits")


# Each child runs one of these with its arguments, answers by lines, and waits for lines.
CHILD_HEAD = """
import os, sys
sys.path += {folders!r}
from test_path_lock import *

def say(what=""):
    print(what, flush=True)

def wait():
    return sys.stdin.readline()

say(os.getpid())
"""


class Child:
    """A process running a piece of code."""

    def __init__(self, code: str, *arguments: object) -> None:
        head = CHILD_HEAD.format(folders=[str(HERE), str(HERE.parent), str(HERE.parents[1] / "bench")])
        self.process = subprocess.Popen(
            [prepared.python(), "-c", head + code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = int(self.hear())  # not that of what stands in for it

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return line.strip()

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")

    def end(self) -> None:
        """Have it end, whatever it does; it has ended when this returns."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts children; none is left at the end."""
    with contextlib.ExitStack() as stack:

        def start(code: str, *arguments: object) -> Child:
            made = Child(code, *arguments)
            stack.callback(made.end)
            return made

        yield start


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """Makes sessions of this process, on the temporary folder unless told otherwise; closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(path: Path = tmp_path, **settings: Any) -> Session:
            made = Session(path, **settings)
            stack.callback(made.tier.close)
            stack.callback(made.held.close)
            return made

        yield make
    with contextlib.suppress(FileNotFoundError):
        os.unlink(lock_file(tmp_path))


HOLD = """
session = Session(sys.argv[1])
session.submit(1)
session.has_turn()
say("has the turn")
wait()
session.finish(1)
say("finished")
wait()
"""

TURNS = """
path, log, count, name = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND), int(sys.argv[3]), sys.argv[4]
session = Session(path)
session.submit(1)
session.submit(2)  # there is always another one: whoever has had a turn wants the next
say("asked")
for number in range(1, count + 1):
    op = session.has_turn()
    os.write(log, f"+{name}".encode())
    os.write(log, f"-{name}".encode())
    if number + 2 <= count:
        session.submit(number + 2)
    session.finish(op)
session.tier.close()
say("done")
"""


def run_turns(path: Path, holder: Session, children: Callable[..., Child], names: str, count: int) -> str:
    """Let processes take `count` turns each, all waiting before the first; return what they logged."""
    log = path / "log"
    log.touch()
    holder.submit(1)
    holder.has_turn()
    processes = [children(TURNS, path, log, count, name) for name in names]
    for process in processes:
        assert process.hear() == "asked"
    assert log.read_text() == ""
    holder.finish(1)
    for process in processes:
        assert process.hear() == "done"
    return log.read_text()


def test_two_processes_are_never_in_at_once(
    tmp_path: Path, session: Callable[..., Session], child: Callable[..., Child]
) -> None:
    text = run_turns(tmp_path, session(), child, "ab", 100)
    entries = [text[at : at + 4] for at in range(0, len(text), 4)]
    assert Counter(entries) == {"+a-a": 100, "+b-b": 100}


def next_in_line(path: Path) -> int:
    """Wait until a process is next in line for a path's lock; return its pid."""
    line = lock_bytes(path)[0]
    deadline_s = time.monotonic() + LONG_S
    while time.monotonic() < deadline_s:
        if (pid := line.holder()) is not None:
            return pid
        os.sched_yield()
    raise AssertionError("nobody is in line")


def test_the_next_of_three_processes_in_line_gets_the_turn(tmp_path: Path, child: Callable[..., Child]) -> None:
    code = """
say("up")
wait()
session = Session(sys.argv[1])
session.submit(1)
op = 1
while True:
    assert session.has_turn() == op
    say("has the turn")
    wait()
    session.submit(op + 1)  # before the turn ends: who has had one wants the next
    session.finish(op)
    op += 1
"""
    children = {made.pid: made for made in (child(code, tmp_path) for _ in range(3))}
    for made in children.values():
        assert made.hear() == "up"
    for made in children.values():
        made.tell()
    outputs = {made.process.stdout: pid for pid, made in children.items()}
    had: list[int] = []
    following = None
    for _ in range(60):
        (output, *others), _, _ = select.select(list(outputs), [], [], LONG_S)
        assert not others, "two processes have a turn at once"
        holder = outputs[output]
        assert children[holder].hear() == "has the turn"
        assert following in (None, holder), "somebody has overtaken the next in line"
        had.append(holder)
        # Whoever is next lined up behind the holder, which therefore is not next itself.
        following = next_in_line(tmp_path)
        assert following in children
        assert following != holder
        children[holder].tell()
    assert all(one != other for one, other in itertools.pairwise(had))
    os.unlink(lock_file(tmp_path))


@pytest.mark.parametrize("fate", ["killed", "finished"])
def test_a_forked_child_of_the_holder_keeps_nothing(
    tmp_path: Path, session: Callable[..., Session], child: Callable[..., Child], fate: str
) -> None:
    code = """
session = Session(sys.argv[1])
session.submit(1)
session.has_turn()
reader, writer = os.pipe()
if os.fork() == 0:
    os.close(0)
    os.close(writer)
    say("born")
    os.read(reader, 1)  # until the test lets go of the fifo, whatever becomes of the parent
    with open(sys.argv[2]) as file:
        file.read()
    open(sys.argv[3], "w").close()
    os._exit(0)
os.close(reader)
wait()
session.finish(1)
wait()
"""
    fifo, witness = tmp_path / "fifo", tmp_path / "witness"
    os.mkfifo(fifo)
    holder = child(code, tmp_path, fifo, witness)
    assert holder.hear() == "born"
    mine = session()
    mine.submit(1)
    assert f"process {holder.pid} " in mine.waits()
    if fate == "killed":
        os.kill(holder.pid, signal.SIGKILL)
        assert holder.process.wait() == -signal.SIGKILL
    else:
        holder.tell()
    mine.finish(mine.has_turn())
    if fate == "finished":
        os.kill(holder.pid, signal.SIGKILL)
        holder.process.wait()
    assert not witness.exists()
    with open(fifo, "w"):  # opens only when somebody reads: the grandchild is alive
        pass
    assert holder.process.stdout is not None
    assert holder.process.stdout.read() == ""  # it has gone too
    assert witness.exists()


def test_two_paths_in_different_order_do_not_deadlock(
    tmp_path: Path, session: Callable[..., Session], child: Callable[..., Child]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    code = """
held, wanted = Session(sys.argv[1]), Session(sys.argv[2])
held.submit(1)
held.has_turn()
say("has one")
wait()
wanted.submit(1)
wanted.waits()
say("waits for the other")
wait()
held.finish(1)
wanted.finish(wanted.has_turn())
say("had both")
wait()
"""
    processes = [child(code, first, second), child(code, second, first)]
    for _ in range(2):
        for process in processes:
            process.hear()
        for process in processes:  # only now: one that went ahead would give the other its turn unasked
            process.tell()
    assert [process.hear() for process in processes] == ["had both", "had both"]
    for path in (first, second):
        os.unlink(lock_file(path))


def test_tiers_of_two_processes_work_on_two_paths_in_different_order(
    tmp_path: Path, child: Callable[..., Child]
) -> None:
    paths = [tmp_path / "first", tmp_path / "second"]
    for path in paths:
        path.mkdir()
    code = """
tiers = []
for path in sys.argv[1:]:
    queue = CompletionQueue()
    tier = open_tier(path, uuid.uuid4(), queue, options=StoreOptions(turns=Turns(turn_bytes=256 << 10)))
    tiers.append(Harness(tier, queue))
say("open")
wait()
for _ in range(10):
    requests = [[h.request(n * (68 << 10), 64 << 10, at=n * (64 << 10)) for n in range(16)] for h in tiers]
    for move in ("write", "read"):
        for pair in zip(*requests):
            for harness, request in zip(tiers, pair):
                getattr(harness.tier, move)(request)
        for harness in tiers:
            assert not any(completion.error for completion in harness.collect(16))
for harness in tiers:
    harness.tier.close()
say("done")
"""
    processes = [child(code, *paths), child(code, *reversed(paths))]
    for process in processes:
        assert process.hear() == "open"
    for process in processes:
        process.tell()
    for process in processes:
        assert process.hear() == "done"
    assert [list(path.iterdir()) for path in paths] == [[], []]
    for path in paths:
        os.unlink(lock_file(path))


def test_a_stopped_holder_is_named(
    tmp_path: Path, child: Callable[..., Child], session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = child(HOLD, tmp_path)
    assert holder.hear() == "has the turn"
    os.kill(holder.pid, signal.SIGSTOP)
    while Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()
    told, said = threading.Event(), []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            told.set()

    monkeypatch.setattr(logging.getLogger("offload"), "handlers", [Listener(logging.WARNING)])
    queue = CompletionQueue()
    tier = open_tier(str(tmp_path), uuid.uuid4(), queue, options=StoreOptions(turns=Turns(report_after_s=0.05)))
    harness = Harness(tier, queue)
    tier.write(harness.request(0, 4096))
    assert told.wait(LONG_S)
    for part in (f"process {holder.pid}", str(tmp_path), f"kill -CONT {holder.pid}"):
        assert part in said[0]
        assert part in tier.waiting_for()
    # It is a warning only: what was asked for is done when the turn comes.
    assert queue.wait(0.0) == []
    os.kill(holder.pid, signal.SIGCONT)
    holder.tell()
    assert [completion.error for completion in harness.collect(1)] == [0]
    assert tier.waiting_for() == ""
    tier.close()


def test_a_stall_names_who_is_in_the_way(tmp_path: Path, child: Callable[..., Child]) -> None:
    holder = child(HOLD, tmp_path)
    assert holder.hear() == "has the turn"
    queue = CompletionQueue()
    tier = open_tier(str(tmp_path), uuid.uuid4(), queue, options=StoreOptions(turns=Turns(report_after_s=0.05)))
    harness = Harness(tier, queue)
    memory = HostMemory(NO_LANES)
    executor = LiveExecutor([tier], None, queue, memory, stall_s=0.2)  # type: ignore[arg-type]
    operation = ReadTile(1, TILE, 0, 0, TileRecord(Location(0, 0, 4096), 1, 0))
    layout = build_layout([Parameter("p", 1024, DtypeCode.BFLOAT16, 0)], 1024)
    plan = make_plan(layout, Budgets(0, None, (PathBudget("path", 1 << 30),)))
    executor.use_plan(plan)
    memory.place_slots(harness.arena.address, plan.slot_bytes)
    executor.submit([operation])
    waits(tier)  # another thread asks
    (event,) = executor.wait()
    assert isinstance(event, Stop)
    assert f"process {holder.pid}" in str(event.error)
    # Nobody can move the holder: closing gives up, and says so in the completion.
    tier.close()
    assert [Completion(*record).error for record in queue.wait(0.0)] == [errno.ETIMEDOUT]
    assert not list(tmp_path.glob("offload-*"))


def test_sessions_of_one_process_take_turns(tmp_path: Path, session: Callable[..., Session]) -> None:
    first, second = session(), session()
    first.submit(1)
    assert first.has_turn() == 1
    second.submit(2)
    assert f"process {os.getpid()} " in second.waits()
    assert second.held.started(0.0) is None
    assert next_in_line(tmp_path) == os.getpid()
    first.submit(3)
    first.finish(1)
    # Somebody waits, and a turn moves 4 KiB at most: the first one's next request goes after the second's.
    assert second.has_turn() == 2
    assert first.held.started(0.0) is None
    second.finish(2)
    assert first.has_turn() == 3
    first.finish(3)


def test_a_turn_lasts_while_nobody_waits(session: Callable[..., Session]) -> None:
    only = session()
    for op in range(1, 101):
        only.submit(op)
    for op in range(1, 101):
        assert only.has_turn() == op
        # What is in flight is bounded: somebody who comes now does not wait for all of it.
        assert only.held.started(0.0) is None
        only.finish(op)


def test_so_many_at_once(session: Callable[..., Session]) -> None:
    first, second, third = (session(holders=2) for _ in range(3))
    for one in (first, second):
        one.submit(1)
        one.has_turn()
    third.submit(1)
    third.waits()
    assert third.held.started(0.0) is None
    first.finish(1)
    third.finish(third.has_turn())
    second.finish(1)


def test_what_other_sessions_of_the_process_do_drops_nothing(
    tmp_path: Path, session: Callable[..., Session], child: Callable[..., Child]
) -> None:
    code = """
session = Session(sys.argv[1])
session.submit(1)
session.waits()
say("waits")
session.has_turn()
say("has the turn")
wait()
"""
    first, second = session(), session()
    first.submit(1)
    first.has_turn()
    second.submit(1)
    second.waits()
    # Any close of the lock file in this process would give the turn up.
    open_tier(str(tmp_path), uuid.uuid4(), CompletionQueue(), options=StoreOptions(turns=Turns())).close()
    assert second.held.started(0.0) is None
    other = child(code, tmp_path)
    assert other.hear() == "waits"
    assert not select.select([other.process.stdout], [], [], 0)[0]
    first.finish(1)
    second.finish(second.has_turn())
    assert other.hear() == "has the turn"


def test_the_path_gets_no_file_and_the_lock_is_open_to_all(tmp_path: Path) -> None:
    queue = CompletionQueue()
    mask = os.umask(0o077)
    try:
        tier = open_tier(str(tmp_path), uuid.uuid4(), queue, options=StoreOptions(turns=Turns()))
    finally:
        os.umask(mask)
    harness = Harness(tier, queue)
    assert harness.write(harness.request(0, 4096)).error == 0
    assert [entry.name for entry in tmp_path.iterdir()] == [innermost(tier).store_path.name]  # type: ignore[attr-defined]
    name = lock_file(tmp_path)
    assert not name.startswith(str(tmp_path))
    assert stat.S_IMODE(os.stat(name).st_mode) == 0o666
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    assert lock_file(link) == name
    tier.close()
    link.unlink()
    assert list(tmp_path.iterdir()) == []
    os.unlink(name)


def test_a_lock_file_that_is_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LOCK_DIRECTORIES", (str(tmp_path),))
    path = tmp_path / "path"
    path.mkdir()
    target = tmp_path / "precious"
    target.write_text("mine")
    name = lock_file(path)
    os.unlink(name)
    os.symlink(target, name)
    with pytest.raises(TierError, match='path_lock "off"'):
        open_tier(str(path), uuid.uuid4(), CompletionQueue(), options=StoreOptions(turns=Turns()))
    assert target.read_text() == "mine"
    assert list(path.iterdir()) == []


def test_off_does_nothing(tmp_path: Path) -> None:
    device, inode = identity(tmp_path)

    def ours() -> set[str]:
        names = [thread.name for thread in threading.enumerate()] + os.listdir("/dev/shm")
        return {name for name in names if name.startswith(("offload-turn", f"offload-path-{device:x}-{inode:x}"))}

    before = ours()
    queue = CompletionQueue()
    tier = open_tier(str(tmp_path), uuid.uuid4(), queue)
    assert innermost(tier) is tier
    assert ours() <= before
    tier.close()


def test_the_switch() -> None:
    path = PathConfig(path="somewhere")

    def chosen(**fields: Any) -> Turns | None:
        return choose_turns(offload.OffloadConfig(**fields), path)

    assert chosen() is None
    assert chosen(path_lock="on", lock_timeout_s=7) == Turns(report_after_s=7)
    assert chosen(path_lock=3) == Turns(holders=3)
    assert chosen(path_lock="off") is None
    for wrong in ("maybe", 0, True, -1, None):
        with pytest.raises(ConfigError, match="path_lock"):
            chosen(path_lock=wrong)
    for wrong in (0, -1, "soon", True):
        with pytest.raises(ConfigError, match="lock_timeout_s"):
            chosen(lock_timeout_s=wrong)


def test_where_the_lock_has_no_effect_is_said(
    tmp_path: Path, s3: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.tiers.directories.supports_direct", lambda directory: False)
    weight = torch.nn.Parameter(torch.randn(5000))
    for path, kind in ((str(tmp_path), "nfs"), (f"s3://{BUCKET}/turns", "ext")):
        monkeypatch.setattr("offload.tiers.directories.file_system", lambda directory, kind=kind: kind)
        for lock, times in (("on", 1), ("auto", 0)):
            caplog.clear()
            config = offload.OffloadConfig(host_memory=0, paths=[path], path_lock=lock)
            offload.AdamW([weight], offload=config).close()
            assert caplog.text.count(f"path_lock has no effect on {path}") == times


def test_an_engine_under_the_lock_gives_the_same_weights(tmp_path: Path) -> None:
    found = []
    for number, lock in enumerate(("off", "on", 2)):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(50_000))
        folder = tmp_path / str(number)
        folder.mkdir()
        config = offload.OffloadConfig(host_memory=0, paths=[folder], subgroup_numel=8192, path_lock=lock)
        with contextlib.closing(offload.AdamW([weight], lr=1e-2, offload=config)) as optimizer:
            for _ in range(3):
                weight.grad = torch.randn(50_000)
                optimizer.step()
        found.append(weight.detach().clone())
        assert list(folder.iterdir()) == []
        if lock != "off":
            os.unlink(lock_file(folder))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
