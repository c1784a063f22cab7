"""`commit_on_sigterm`: a process that is asked to end commits its step under way, and ends as it would have."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import prepared
import pytest
import torch
import torch.distributed as dist
from sharded import SETTINGS, Model, exact_gradients, local, mean_gradients, spawn, start
from test_signal_handlers import handled
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.checkpoint.contents import is_checkpoint
from offload.checkpoint.reader import Checkpoint
from offload.optim import shards
from offload.optim.preemption import Preemption, SigtermHandler

LONG_S = 120.0
RANKS = {"alone": 1, "alone, both": 1}
RANKS |= {"replicas": 2, "replicas, forward": 2, "shard": 2, "shard, backward": 2, "fsdp2": 2}
"""How many processes a way to train has; all of them train alike, and go on from each other's checkpoints."""

# One process: the handler before is one of the test's


class Before:
    """The handler of SIGTERM that was there before; counts its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.error: BaseException | None = None

    def __call__(self, number: int, frame: Any) -> None:
        self.calls.append(number)
        if self.error is not None:
            raise self.error


@pytest.fixture
def before() -> Iterator[Before]:
    handler = Before()
    outer = signal.signal(signal.SIGTERM, handler)
    yield handler
    found = signal.signal(signal.SIGTERM, outer)
    assert found is handler, "the handler before was not restored"


def make(path: Path, **settings: Any) -> tuple[torch.nn.Parameter, offload.AdamW]:
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5000).bfloat16())
    (path / "state").mkdir(exist_ok=True)
    config = {"host_memory": 0, "paths": [path / "state"], "subgroup_numel": 2048, "threads": 1, **settings}
    return parameter, offload.AdamW([("weight", parameter)], lr=1e-2, offload=config)


def step(parameter: torch.nn.Parameter, optimizer: offload.AdamW) -> None:
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def saved_step(folder: Path) -> int:
    with Checkpoint(folder) as checkpoint:
        return checkpoint.step


def test_the_step_after_a_signal_commits_and_the_handler_before_runs(
    tmp_path: Path, before: Before, caplog: pytest.LogCaptureFixture
) -> None:
    parameter, optimizer = make(tmp_path)
    with optimizer:
        optimizer.commit_on_sigterm(tmp_path / "ck", extra=lambda: {"calls": len(before.calls)})
        step(parameter, optimizer)
        assert not is_checkpoint(tmp_path / "ck")
        for number in (1, 2):  # it stays in use
            ask()
            assert len(before.calls) == number - 1
            step(parameter, optimizer)
            assert before.calls == [signal.SIGTERM] * number
            assert saved_step(tmp_path / "ck") == number + 1
        assert caplog.text.count(f"SIGTERM: committing a checkpoint to {tmp_path / 'ck'}") == 2
        step(parameter, optimizer)
        assert len(before.calls) == 2
        assert saved_step(tmp_path / "ck") == 3
    _, resumed = make(tmp_path)
    with resumed:
        assert resumed.load_checkpoint(tmp_path / "ck") == {"calls": 1}


@pytest.mark.parametrize("asked", [Preemption.after_call, SigtermHandler.pass_on, SigtermHandler.__call__])
def test_a_signal_at_any_line_is_passed_on_once_with_a_checkpoint(tmp_path: Path, before: Before, asked: Any) -> None:
    """The first or a second one: it is never lost, and no handler runs without a checkpoint of the last step."""
    parameter, optimizer = make(tmp_path)
    with optimizer:
        optimizer.commit_on_sigterm(tmp_path / "ck")
        for line in range(1, 16):
            before.calls.clear()
            step(parameter, optimizer)
            ask()
            with handled(asked, line, ask) as handler:
                step(parameter, optimizer)
            first, steps = len(before.calls), 3 * line - 1
            assert first in (1, 2), handler.where
            step(parameter, optimizer)
            assert len(before.calls) in (first, 2), handler.where
            steps += len(before.calls) > first
            assert saved_step(tmp_path / "ck") == steps, handler.where


def test_a_second_signal_during_the_commit_goes_to_the_handler_before(tmp_path: Path, before: Before) -> None:
    parameter, optimizer = make(tmp_path)
    told: list[int] = []

    def extra() -> None:
        ask()
        told.extend(before.calls)

    with optimizer:
        optimizer.commit_on_sigterm(tmp_path / "ck", extra=extra)
        ask()
        ask()  # before the commit it is the same request
        assert not before.calls
        step(parameter, optimizer)
        assert told == [signal.SIGTERM]
        assert before.calls == told
        assert saved_step(tmp_path / "ck") == 1
        before.error = SystemExit(7)
        ask()
        with pytest.raises(SystemExit):
            step(parameter, optimizer)
        assert len(before.calls) == 2
        assert saved_step(tmp_path / "ck") == 1, "it ended before the second commit"
        before.error = None
        optimizer.commit_on_sigterm(tmp_path / "ck")
        ask()
        step(parameter, optimizer)
        assert len(before.calls) == 3
        assert saved_step(tmp_path / "ck") == 3


@pytest.mark.parametrize("why", ["extra", "folder", "error of the handler"])
def test_a_commit_that_fails_is_logged_and_the_handler_before_runs(
    tmp_path: Path, before: Before, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    parameter, optimizer = make(tmp_path)
    extra: Callable[[], Any] = dict
    if why == "extra":
        extra = threading.Lock
    elif why == "folder":
        (tmp_path / "ck").write_text("a file")
    else:
        before.error = KeyError("of the handler")
    with optimizer:
        optimizer.commit_on_sigterm(tmp_path / "ck", extra=extra)
        ask()
        with pytest.raises(KeyError) if before.error else contextlib.nullcontext():
            step(parameter, optimizer)
        assert len(before.calls) == 1
        assert ("nothing was committed" in caplog.text) == (before.error is None)
        step(parameter, optimizer)
        assert len(before.calls) == 1


def test_a_signal_that_no_step_follows_is_passed_on_at_the_end(tmp_path: Path, before: Before) -> None:
    parameter, optimizer = make(tmp_path)
    optimizer.commit_on_sigterm(tmp_path / "ck")
    step(parameter, optimizer)
    ask()
    assert not before.calls
    optimizer.close()
    assert len(before.calls) == 1
    optimizer.close()
    assert len(before.calls) == 1
    assert not is_checkpoint(tmp_path / "ck")


def test_it_is_replaced_and_taken_back(tmp_path: Path, before: Before) -> None:
    parameter, optimizer = make(tmp_path)
    with optimizer:
        optimizer.commit_on_sigterm(tmp_path / "first")
        optimizer.commit_on_sigterm(tmp_path / "second")
        ask()
        step(parameter, optimizer)
        assert not is_checkpoint(tmp_path / "first")
        assert saved_step(tmp_path / "second") == 1
        optimizer.commit_on_sigterm(None)
        assert signal.getsignal(signal.SIGTERM) is before
        ask()
        assert len(before.calls) == 2
        step(parameter, optimizer)
        assert saved_step(tmp_path / "second") == 1
        optimizer.commit_on_sigterm(None)
        optimizer.commit_on_sigterm(tmp_path / "second")
        ask()
        assert len(before.calls) == 2
        step(parameter, optimizer)
        assert saved_step(tmp_path / "second") == 3


def test_a_forgotten_optimizer_restores_the_handler(tmp_path: Path, before: Before) -> None:
    parameter, optimizer = make(tmp_path)
    optimizer.commit_on_sigterm(tmp_path / "ck")
    step(parameter, optimizer)
    del optimizer
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_was_set_since_stays(tmp_path: Path, before: Before) -> None:
    """It passes signals on to ours, as those do that care for others; ours passes them on when its time is over."""
    _, optimizer = make(tmp_path)
    optimizer.commit_on_sigterm(tmp_path / "ck")
    ours: Any = signal.getsignal(signal.SIGTERM)
    later = Before()
    signal.signal(signal.SIGTERM, later)
    optimizer.close()
    assert signal.getsignal(signal.SIGTERM) is later
    ours(signal.SIGTERM, None)
    assert len(before.calls) == 1
    assert not later.calls
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("turn", "saved"), [(1, [2, 1]), (-1, [1, 1])])
def test_two_optimizers_commit_one_after_the_other(
    tmp_path: Path, before: Before, turn: int, saved: list[int]
) -> None:
    """Whichever steps first, in the first iteration, too, before which none has stepped."""
    made = []
    for name in "ab":
        (tmp_path / name).mkdir()
        made.append(make(tmp_path / name))
        made[-1][1].commit_on_sigterm(tmp_path / name / "ck")
    ask()
    for _ in range(2):
        for parameter, optimizer in made[::turn]:
            step(parameter, optimizer)
    assert len(before.calls) == 1
    assert [saved_step(tmp_path / name / "ck") for name in "ab"] == saved
    for _, optimizer in reversed(made):
        optimizer.close()


def test_an_optimizer_that_steps_no_more_is_passed_over(tmp_path: Path, before: Before) -> None:
    """It would note the signal of one made since for a step that never comes; it may step once that is closed."""
    made = []
    for name in "abc":
        (tmp_path / name).mkdir()
        made.append(make(tmp_path / name))
        made[-1][1].commit_on_sigterm(tmp_path / name / "ck")
        step(*made[-1])
    ask()
    step(*made[-1])
    assert len(before.calls) == 1
    assert [is_checkpoint(tmp_path / name / "ck") for name in "abc"] == [False, False, True]
    ask()
    made[2][1].close()  # the signal is then for the next step of the second one, which passes over the first
    assert len(before.calls) == 1
    step(*made[1])
    assert len(before.calls) == 2
    assert [is_checkpoint(tmp_path / name / "ck") for name in "abc"] == [False, True, True]
    for _, optimizer in reversed(made):
        optimizer.close()


def test_a_forked_process_has_the_handler_before(tmp_path: Path, before: Before) -> None:
    _, optimizer = make(tmp_path)
    with optimizer:
        optimizer.commit_on_sigterm(tmp_path / "ck")
        child = os.fork()
        if child == 0:
            ask()
            os._exit(len(before.calls))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert not before.calls


def test_a_step_on_another_thread_commits(tmp_path: Path, before: Before) -> None:
    parameter, optimizer = make(tmp_path)
    with optimizer:
        optimizer.commit_on_sigterm(tmp_path / "ck")
        ask()
        thread = threading.Thread(target=step, args=(parameter, optimizer))
        thread.start()
        thread.join()
        assert saved_step(tmp_path / "ck") == 1
        assert before.calls == [signal.SIGTERM]


def test_a_step_that_the_scaler_skips_commits(tmp_path: Path, before: Before) -> None:
    parameter, optimizer = make(tmp_path)
    scaler = offload.GradScaler("cpu", init_scale=4.0)
    with optimizer:
        optimizer.commit_on_sigterm(tmp_path / "ck")
        for number, factor in enumerate((1.0, float("inf"), 1.0)):
            scaler.scale((parameter * factor).sum()).backward()
            if number:
                ask()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert len(before.calls) == number
            if number:
                assert saved_step(tmp_path / "ck") == number


def test_a_step_that_only_shows_state_commits(tmp_path: Path, before: Before) -> None:
    parameter, optimizer = make(tmp_path)
    with optimizer:
        optimizer.commit_on_sigterm(tmp_path / "ck")
        optimizer.param_groups[0]["lr"] = 0.0
        parameter.grad = torch.zeros_like(parameter)
        ask()
        optimizer.step()
        assert len(before.calls) == 1
        assert saved_step(tmp_path / "ck") == 0


def test_bad_input_is_refused(tmp_path: Path, before: Before) -> None:
    _, optimizer = make(tmp_path)
    untyped: Any = optimizer
    with optimizer:
        for arguments in ((3,), ("",), ("a\0b",)):
            with pytest.raises(offload.ConfigError, match="name a folder"):
                untyped.commit_on_sigterm(*arguments)
        with pytest.raises(offload.ConfigError, match=r"extra: 'dict' .* give a function"):
            untyped.commit_on_sigterm(tmp_path / "ck", extra={"step": 1})
        errors: list[Exception] = []

        def elsewhere() -> None:
            try:
                optimizer.commit_on_sigterm(tmp_path / "ck")
            except offload.ConfigError as error:
                errors.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "main thread" in str(errors[0])
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(offload.SessionBrokenError, match="closed"):
        optimizer.commit_on_sigterm(tmp_path / "ck")
    optimizer.commit_on_sigterm(None)
    _, keeps_none = make(tmp_path, checkpoints_kept=0)
    with keeps_none, pytest.raises(offload.ConfigError, match="checkpoints_kept: 0"):
        keeps_none.commit_on_sigterm(tmp_path / "ck")


# Processes of their own, that SIGTERM ends


def build(kind: str, folder: Path) -> tuple[torch.nn.Module, torch.nn.Module, offload.AdamW]:
    """Return a model, what its forward pass is called on, and an optimizer."""
    model = Model()
    called: torch.nn.Module = model
    if kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        called = fully_shard(model)
    elif RANKS[kind] > 1:
        called = DistributedDataParallel(model)
    (folder / "state").mkdir(exist_ok=True)
    settings: dict[str, Any] = {"host_memory": 0, "paths": [folder / "state"], "subgroup_numel": 1024, "threads": 1}
    way, _, overlap = kind.partition(", ")
    config = {**settings, "shard": way == "shard", "overlap": overlap or "off"}
    optimizer = offload.AdamW(model.named_parameters(), **SETTINGS, offload=config)
    if overlap in ("forward", "both"):
        optimizer.overlap_forward(called)
    return model, called, optimizer


def train(called: torch.nn.Module, optimizer: offload.AdamW, number: int, begun: Callable[[], object]) -> None:
    """Take one step with the mean of two ranks' gradients, whether there are two ranks or one."""
    wanted = exact_gradients(number, dist.get_rank() if dist.is_initialized() else 0)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        mean = iter(mean_gradients(number, 2))
        wanted = [[next(mean) for _ in block] for block in wanted]
    called(wanted).backward()
    if number % 2:
        optimizer.clip_grad_norm_(2.0)
    begun()
    optimizer.step()
    optimizer.zero_grad()


def digest(model: torch.nn.Module, optimizer: offload.AdamW) -> str:
    optimizer.finish()
    hasher = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *optimizer.state_for(parameter).values()):
            hasher.update(local(tensor).contiguous().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class Uninterrupted:
    """A run with all state in memory that nobody interrupts; its digests after each step."""

    def __init__(self) -> None:
        self._model = Model()
        self._optimizer = offload.AdamW(self._model.named_parameters(), **SETTINGS)
        self._digests = [digest(self._model, self._optimizer)]

    def after(self, steps: int) -> str:
        while len(self._digests) <= steps:
            train(self._model, self._optimizer, len(self._digests) - 1, lambda: None)
            self._digests.append(digest(self._model, self._optimizer))
        return self._digests[steps]


@pytest.fixture(scope="module")
def uninterrupted() -> Uninterrupted:
    return Uninterrupted()


class Begun:
    """The number of the last step that a rank has begun, as it and whoever watches it see it; 0 at its start."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(folder / f"begun-{rank}", os.O_RDWR | os.O_CREAT)

    def note(self, number: int) -> None:
        os.pwrite(self._file, number.to_bytes(8, "little"), 0)

    def read(self) -> int:
        return int.from_bytes(os.pread(self._file, 8, 0), "little")


def live(folder: Path, kind: str, last: int = 1 << 40, asked: tuple[int, ...] = (), how: str = "default") -> None:
    """Train from the checkpoint on, if there is one, up to a step; some ranks ask themselves to end in their third.

    Args:
        folder: Of the run.
        kind: One of `RANKS`.
        last: The step.
        asked: Which ranks.
        how: What SIGTERM meets without us: "default", "ignored", or "told", a handler that only notes it.
    """
    rank = dist.get_rank()
    told: list[int] = []
    if how != "default":
        signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "ignored" else lambda n, _: told.append(n))
    model, called, optimizer = build(kind, folder)
    begun, done = Begun(folder, rank), 0
    if is_checkpoint(folder / "ck"):
        done = optimizer.load_checkpoint(folder / "ck")["steps"]
    number = done
    optimizer.commit_on_sigterm(folder / "ck", extra=lambda: {"steps": number + 1, "began_s": time.time()})
    for number in range(done, last):
        if number == done + 2 and rank in asked:
            ask()
        train(called, optimizer, number, partial(begun.note, number + 1))
    if how != "default":
        (folder / f"ended-{rank}").write_text(repr((told == [signal.SIGTERM], digest(model, optimizer))))
    optimizer.close()


class Life:
    """Processes that train in one way; killed when nobody looks at them any more."""

    def __init__(self, folder: Path, kind: str, *arguments: Any) -> None:
        self.folder = folder
        self.ranks = range(RANKS[kind])
        self.begun = [Begun(folder, rank) for rank in self.ranks]
        for begun in self.begun:
            begun.note(0)
        self._processes = start(RANKS[kind], folder, live, kind, *arguments).processes

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def wait_for_step(self, number: int) -> None:
        """Wait until all ranks have begun so many steps since their start."""
        deadline_s = time.monotonic() + LONG_S
        first = 0
        while not first or min(begun.read() for begun in self.begun) < first + number - 1:
            first = first or min(begun.read() for begun in self.begun)
            assert time.monotonic() < deadline_s
            assert all(process.is_alive() for process in self._processes)
            time.sleep(0.001)

    def ask(self, rank: int) -> None:
        os.kill(self._processes[rank].pid, signal.SIGTERM)

    def ends(self, rank: int) -> int:
        """Return how a rank has ended, once it has."""
        self._processes[rank].join(LONG_S)
        code: int | None = self._processes[rank].exitcode
        assert code is not None, "it goes on"
        return code


def assert_last_step_is_committed(folder: Path, begun: list[Begun], uninterrupted: Uninterrupted) -> float:
    """Check a checkpoint bit by bit against the last step that was begun; return how long its commit took."""
    (number,) = {rank.read() for rank in begun}
    assert saved_step(folder / "ck") == number
    model, _, optimizer = build("alone", folder)
    with optimizer:
        extra = optimizer.load_checkpoint(folder / "ck")
        assert extra["steps"] == number
        assert digest(model, optimizer) == uninterrupted.after(number)
    return (folder / "ck" / "COMMIT").stat().st_mtime - float(extra["began_s"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alone", "replicas", "shard"])
@pytest.mark.parametrize("how", ["ignored", "told"])
def test_where_the_handler_before_does_not_end_it_training_goes_on(
    tmp_path: Path, uninterrupted: Uninterrupted, kind: str, how: str
) -> None:
    with Life(tmp_path, kind, 6, (0,), how) as life:
        for rank in life.ranks:
            assert life.ends(rank) == 0
            told, _, found = (tmp_path / f"ended-{rank}").read_text()[1:-1].partition(", ")
            assert (told == "True") == (how == "told" and rank == 0)
            assert kind == "shard" or found == repr(uninterrupted.after(6))
    assert saved_step(tmp_path / "ck") == 3


PROGRAM = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from test_preemption import live

dist.init_process_group("gloo")
torch.set_num_threads(1)
live(Path(sys.argv[1]), "replicas")
"""


@pytest.mark.slow
def test_a_launcher_that_is_asked_to_end_has_all_its_ranks_commit(
    tmp_path: Path, uninterrupted: Uninterrupted
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    command = [sys.executable, *prepared.torchrun(2), str(tmp_path / "program.py"), str(tmp_path)]
    begun = [Begun(tmp_path, rank) for rank in range(2)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}) as launcher:
        deadline_s = time.monotonic() + LONG_S
        while min(rank.read() for rank in begun) < 3 and launcher.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
        launcher.terminate()
        assert launcher.wait(LONG_S) != 0
    assert_last_step_is_committed(tmp_path, begun, uninterrupted)


def one_rank_fails(folder: Path) -> None:
    """Have one rank asked, and the other one's extra fail, which has it wait for nobody."""
    shards.GATHER_BYTES = 1000  # so that weights are exchanged in several parts
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _, called, optimizer = build("shard", folder)
    rank, given = dist.get_rank(), [4]

    def extra() -> int:
        return given[0]

    optimizer.commit_on_sigterm(folder / "ck", extra=extra)
    for number in range(4):
        if number in (1, 3) and rank == 0:
            ask()
        if rank == 1:
            given = [4] if number == 3 else []
        train(called, optimizer, number, lambda: None)
        assert is_checkpoint(folder / "ck") == (number == 3)
    assert optimizer.load_checkpoint(folder / "ck") == 4
    optimizer.close()


@pytest.mark.slow
def test_ranks_do_not_wait_for_one_that_cannot_commit(tmp_path: Path) -> None:
    spawn(2, tmp_path, one_rank_fails)
    assert saved_step(tmp_path / "ck") == 4


def campaign(folder: Path, uninterrupted: Uninterrupted, kills: int, seed: int, kinds: list[str]) -> list[float]:
    """Ask one life after the other, of each kind in turn, to end at a random moment, by its signal with its step
    committed; return how long their commits took."""
    rng = random.Random(seed)
    seconds = []
    for number in range(kills):
        kind = kinds[number % len(kinds)]
        asked = [[0], [1], [0, 1]][number % 3] if RANKS[kind] > 1 else [0]
        with Life(folder, kind) as life:
            life.wait_for_step(rng.randint(1, 5))
            time.sleep(rng.random() * 0.02)  # somewhere in what comes next
            for rank in asked:
                life.ask(rank)
            for rank in asked:
                assert life.ends(rank) == -signal.SIGTERM
        seconds.append(assert_last_step_is_committed(life.folder, life.begun, uninterrupted))
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("kills", "seed"),
    [(10, 1), pytest.param(100, 2, marks=[pytest.mark.full, pytest.mark.timeout(3600)])],
)
def test_lives_that_are_asked_to_end_at_random_moments_lose_no_step(
    tmp_path: Path, uninterrupted: Uninterrupted, kills: int, seed: int, ranks: int
) -> None:
    kinds = [kind for kind in RANKS if RANKS[kind] == ranks]
    seconds = sorted(campaign(tmp_path, uninterrupted, kills, seed, kinds))
    print(f"from the end of the call to the commit: median {seconds[kills // 2]:.3f} s, most {seconds[-1]:.3f} s")
