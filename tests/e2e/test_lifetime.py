"""Sessions that are cut short while they begin, grow, save or end: nothing is lost, and nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from limited import limited
from mirror import same_bits

import offload
from offload.checkpoint.commit import CommitJob
from offload.checkpoint.manifest import COMMIT_NAME
from offload.checkpoint.reader import Checkpoint
from offload.device import none
from offload.memory.arenas import Arena
from offload.session.thread import EngineThread
from offload.tiers import innermost
from offload.tiers.directories import DirectoryFolder

LONG_S = 60.0


def make(
    path: Path, numel: int = 3000, kind: Any = offload.AdamW, **settings: Any
) -> tuple[torch.nn.Parameter, offload.AdamW]:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(numel, generator=generator).bfloat16())
    config = offload.OffloadConfig(**{"paths": [path], "subgroup_numel": 1024, "host_memory": 30_000, **settings})
    return parameter, kind([parameter], offload=config)


def step(optimizer: offload.AdamW, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def added(numel: int) -> dict[str, Any]:
    return {"params": [torch.nn.Parameter(torch.ones(numel).bfloat16()), torch.nn.Parameter(torch.ones(10))]}


def threads_end(before: int) -> bool:
    deadline_s = time.monotonic() + LONG_S
    while threading.active_count() > before and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return threading.active_count() <= before


@pytest.mark.parametrize(("host_memory", "nth"), [(100_000, 0), (100_000, 1), (100_000, 2), (0, 0), (0, 1)])
def test_what_found_no_memory_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_memory: int, nth: int
) -> None:
    """Whichever of its arenas cannot be had: for homes, where there are any, gradients, or more staging slots."""
    taken = 0

    def arena(nbytes: int, **options: Any) -> Arena:
        nonlocal taken
        taken += 1
        if taken - 1 == nth:
            raise offload.OffloadError("no memory")
        return Arena(nbytes, **options)

    found = []
    for refused in (False, True):
        _, optimizer = make(tmp_path, host_memory=host_memory, subgroup_numel=2048)
        with optimizer:
            step(optimizer, 0)
            if refused:
                with monkeypatch.context() as patch:
                    patch.setattr(none, "Arena", arena)
                    with pytest.raises(offload.OffloadError, match="no memory"):
                        optimizer.add_param_group(added(9000))
            optimizer.add_param_group(added(500))
            for number in (1, 2):
                step(optimizer, number)
            everything = [p for group in optimizer.param_groups for p in group["params"]]
            assert len(everything) == 3
            found.append([p.detach().clone() for p in everything])
            found[-1] += [value for p in everything for value in optimizer.state_for(p).values()]
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("state_format", "slots", "first_numel"),
    [("exact", 1, 8192), ("compact16", 1, 3000), ("compact8", 3, 8192), ("compact8", 1, 3000)],
)
def test_parameters_come_later_whatever_staging_slots_there_are(
    tmp_path: Path, state_format: str, slots: int, first_numel: int
) -> None:
    """Slots cannot grow within `staging_memory`; parameters that a format keeps exact may have had them small."""
    found = []
    for staging in (None, slots * 12 * 4096):
        first = torch.nn.Parameter(torch.linspace(-1.0, 1.0, first_numel).half())
        second = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 300 * 72).view(300, 72).bfloat16())
        settings: dict[str, Any] = {"subgroup_numel": 4096, "staging_memory": staging, "state_format": state_format}
        config = offload.OffloadConfig(paths=[tmp_path], host_memory=0, **settings)
        with offload.AdamW([("first", first)], offload=config) as optimizer:
            step(optimizer, 0)
            optimizer.add_param_group({"params": [("second", second)]})
            for number in (1, 2):
                step(optimizer, number)
            found.append([first.detach().clone(), second.detach().clone()])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("started", [False, True])
def test_an_interrupt_as_the_engine_s_thread_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    before = threading.active_count()
    plain = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name != "offload-engine":
            plain(thread)
            return
        if started:
            plain(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path)
    assert threads_end(before)
    assert not list(tmp_path.iterdir())


def test_a_close_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    parameter, optimizer = make(tmp_path)
    step(optimizer, 0)
    engine = optimizer.engine
    thread = engine._thread._thread
    assert thread is not None

    def join() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(thread, "join", join)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    with pytest.raises(offload.SessionBrokenError):
        engine.state.read([0])
    engine.close()
    assert threads_end(before)
    assert not list(tmp_path.iterdir())
    optimizer.close()
    parameter.grad = None


def test_a_session_that_broke_in_a_step_and_is_forgotten_is_closed(tmp_path: Path) -> None:
    before = threading.active_count()
    parameter, optimizer = make(tmp_path, 12_000, host_memory=0)
    step(optimizer, 0)
    innermost(optimizer.engine._parts.tiers[0]).inject("read", 1, 5)  # type: ignore[attr-defined]
    with contextlib.suppress(offload.StepAbortedError):
        step(optimizer, 1)
    assert optimizer.engine.broken is not None
    parameter.grad = None
    del optimizer
    gc.collect()
    assert threads_end(before)
    assert not list(tmp_path.iterdir())


def test_the_collector_may_close_on_a_thread_of_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    plain = CommitJob.run

    def run(job: CommitJob) -> None:
        reached.set()
        assert go_on.wait(LONG_S)
        gc.collect()
        plain(job)

    monkeypatch.setattr(CommitJob, "run", run)
    path = tmp_path / "path"
    path.mkdir()
    parameter, optimizer = make(path)
    step(optimizer, 0)
    ending = optimizer.engine._shutdown
    optimizer.myself = optimizer  # type: ignore[attr-defined]
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    assert reached.wait(LONG_S)
    parameter.grad = None
    gc.disable()
    try:
        del optimizer
        go_on.set()
        deadline_s = time.monotonic() + LONG_S
        while not ending.freed and time.monotonic() < deadline_s:
            time.sleep(0.001)
    finally:
        gc.enable()
    assert ending.freed
    assert (tmp_path / "checkpoint" / "COMMIT").exists()


def test_a_failed_checkpoint_never_looks_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while the engine is still putting its things away, either."""

    def run(job: CommitJob) -> None:
        raise offload.CheckpointError("no luck")

    monkeypatch.setattr(CommitJob, "run", run)
    seen: list[type[BaseException] | None] = []
    parameter, optimizer = make(tmp_path)

    class Look(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "no checkpoint was written" in record.getMessage():
                try:
                    optimizer.engine.checkpoints.wait(0)
                except Exception as error:
                    seen.append(type(error))
                else:
                    seen.append(None)

    look = Look()
    logging.getLogger("offload").addHandler(look)
    try:
        with optimizer:
            step(optimizer, 0)
            optimizer.save_checkpoint(tmp_path / "checkpoint", copy=True)
            with pytest.raises(offload.CheckpointError, match="no luck"):
                optimizer.wait_checkpoint()
    finally:
        logging.getLogger("offload").removeHandler(look)
    assert seen == [TimeoutError]
    parameter.grad = None


def test_what_a_system_refuses_costs_the_checkpoint_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise MemoryError

    parameter, optimizer = make(tmp_path)
    with optimizer:
        step(optimizer, 0)
        monkeypatch.setattr("offload.checkpoint.saves.open_tier", refuse)
        with pytest.raises(offload.CheckpointError, match="MemoryError"):
            optimizer.save_checkpoint(tmp_path / "checkpoint", copy=True)
        with pytest.raises(ValueError, match="null"):
            optimizer.save_checkpoint(f"{tmp_path}/a\0b")
        step(optimizer, 1)
    parameter.grad = None


@pytest.mark.parametrize(
    ("reaches", "copy"), [("the end", False), ("the end", True), ("COMMIT", False), ("nothing", True)]
)
def test_a_session_that_breaks_while_it_commits_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: bool, reaches: str
) -> None:
    """The commit is seen to its end if it can be; a hung one may end later, and what it names is there then."""
    before, after = threading.Event(), threading.Event()
    plain = DirectoryFolder.write

    def write(folder: DirectoryFolder, name: str, data: bytes, **options: Any) -> None:
        if name == COMMIT_NAME and reaches == "nothing":
            before.set()
            assert jobs[0].cancelled.wait(LONG_S)
        if name == COMMIT_NAME and reaches == "COMMIT":
            before.set()
            assert after.wait(LONG_S)
        plain(folder, name, data, **options)
        if name == COMMIT_NAME and reaches == "the end":
            before.set()
            assert jobs[0].cancelled.wait(LONG_S)

    jobs: list[CommitJob] = []
    run = CommitJob.run

    def note(job: CommitJob) -> None:
        jobs.append(job)
        run(job)

    path, folder = tmp_path / "path", tmp_path / "checkpoint"
    path.mkdir()
    kind = limited(offload.AdamW, settle_s=0.0) if reaches == "COMMIT" else offload.AdamW
    parameter, optimizer = make(path, 12_000, kind, host_memory=0)
    step(optimizer, 0)
    saved = parameter.detach().clone()
    monkeypatch.setattr(DirectoryFolder, "write", write)
    monkeypatch.setattr(CommitJob, "run", note)
    if reaches == "COMMIT":
        threading.Timer(0.2, after.set).start()  # whenever: the step ends when the commit does
    optimizer.save_checkpoint(folder, copy=copy)
    assert before.wait(LONG_S)
    innermost(optimizer.engine._parts.tiers[0]).inject("read", 1, 5)  # type: ignore[attr-defined]
    with pytest.raises(offload.StepAbortedError) as caught:
        step(optimizer, 1)
    thread = optimizer.engine._parts.saves.last.thread  # type: ignore[union-attr]
    optimizer.close()
    assert thread is not None
    thread.join(LONG_S)
    monkeypatch.undo()
    if reaches == "the end":
        assert caught.value.checkpoint == str(folder)
    _, other = make(path, 12_000)
    with other:
        other.load_checkpoint(folder)
        assert torch.equal(next(iter(other.param_groups[0]["params"])).detach(), saved)
    parameter.grad = None


def test_an_addition_that_was_interrupted_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = offload.Engine.add

    def interrupt(*arguments: Any) -> None:
        plain(*arguments)
        raise KeyboardInterrupt

    found = []
    for interrupted in (False, True):
        _, optimizer = make(tmp_path)
        with optimizer:
            step(optimizer, 0)
            group = added(500)
            if interrupted:
                with monkeypatch.context() as patch:
                    patch.setattr(offload.Engine, "add", interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        optimizer.add_param_group(group)
                assert len(optimizer.param_groups) == 1
                step(optimizer, 1)
                with pytest.raises(offload.OffloadError):
                    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(7))]})
            else:
                step(optimizer, 1)
            optimizer.add_param_group(group)
            step(optimizer, 2)
            found.append([p.detach().clone() for group in optimizer.param_groups for p in group["params"]])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


class Reader:
    """What a caller gives to `State.visit`."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def take(self, position: int, first: int, views: Any) -> None:
        if self.fails:
            raise KeyError("the reader's own")


def test_an_engine_holds_on_to_nothing_of_a_request_that_it_has_answered(tmp_path: Path) -> None:
    """A copy of all state would stay in memory until the next step."""
    paths = [tmp_path / "path"]
    paths[0].mkdir()
    config = offload.OffloadConfig(host_memory="20KB", paths=paths, subgroup_numel=1024)
    parameter = torch.nn.Parameter(torch.ones(5000))
    with offload.AdamW([parameter], offload=config) as optimizer:
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        engine, held = optimizer.engine, []

        def read() -> list[Any]:
            return list(engine.state.read([0])[0].values())

        def visit(fails: bool) -> list[Any]:
            reader = Reader(fails)
            with contextlib.suppress(KeyError):
                engine.state.visit(reader.take)
            return [reader]

        def write() -> list[Any]:
            values = {"exp_avg": torch.zeros(5000)}
            engine.state.write({0: values})
            return list(values.values())

        def load() -> list[Any]:
            with Checkpoint(tmp_path / "ck") as checkpoint:
                engine.checkpoints.load(checkpoint)
            return [checkpoint]

        def refused() -> list[Any]:
            reader = Reader(False)

            def begin() -> None:
                assert reader
                raise offload.OffloadError("refused")

            with contextlib.suppress(offload.OffloadError):
                engine._thread.request(begin)
            return [reader]

        optimizer.save_checkpoint(tmp_path / "ck")
        optimizer.wait_checkpoint()
        for request in (read, lambda: visit(False), lambda: visit(True), write, load, refused):
            given = request()
            held.append([weakref.ref(each) for each in given])
            del given
            gc.collect()
            assert [ref() for ref in held[-1]] == [None] * len(held[-1])
        assert all(held)


def test_a_close_within_a_request_ends_the_session_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a signal handler, between the check that the session can be used and the wait for its answer."""
    parameter, optimizer = make(tmp_path)
    before, plain = parameter.detach().clone(), EngineThread.check_usable

    def check(thread: EngineThread) -> None:
        plain(thread)
        if thread.is_in_turn:
            optimizer.close()

    parameter.grad = torch.ones_like(parameter)
    with monkeypatch.context() as patch:
        patch.setattr(EngineThread, "check_usable", check)
        optimizer.step()
    assert optimizer.engine._shutdown.freed
    assert not torch.equal(parameter, before)
    with pytest.raises(offload.SessionBrokenError, match="closed"):
        optimizer.step()
    assert not list(tmp_path.iterdir())
    parameter.grad = None
